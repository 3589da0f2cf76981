"""The priority that attached servers are sent: each engine's own field with its own sign, only where the server serves
by it, and for batch work, a flood's too. Recording servers, real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from preble import SamplingParams
from preble.gateway.core.config_tables import KeyTable, ServerTable, options_of
from preble.scheduling.flow_control import FlowConfig
from preble.transport.engine_servers.server_info import EnginePriorities, ServerOptions, sglang_info, vllm_info
from preble.types import Claim
from tests.gateway.relay.test_relay import BODY, CHAT, STREAMED, streamed, whole
from tests.gateway.relay.test_resume import then_broken
from tests.support.relay import Call, InOrder, ScriptedServer, chat_events, serving
from tests.support.transport import asynchronous, fast, until

AS_BATCH = {"x-preble-priority": "batch"}
BY_PRIORITY = {"enable_priority_scheduling": True, "default_priority_value": None}
LOWER_FIRST = {**BY_PRIORITY, "schedule_low_priority_values_first": True}
ABSENT = "absent"
ON, OFF = ServerOptions(by_priority=True), ServerOptions(by_priority=False)
# kind, what it says of itself, what its operator says, and what it is sent: of interactive requests, of batch work
SERVERS: list[tuple[str, dict[str, Any], ServerOptions | None, Any, Any]] = [
    ("sglang", BY_PRIORITY, None, 0, -1),
    ("sglang", LOWER_FIRST, None, 0, 1),
    ("sglang", {**BY_PRIORITY, "default_priority_value": 5}, None, ABSENT, 4),
    ("sglang", {**LOWER_FIRST, "default_priority_value": 5}, None, ABSENT, 6),
    ("sglang", BY_PRIORITY, OFF, ABSENT, ABSENT),
    ("sglang", {"enable_priority_scheduling": False, "abort_on_priority_when_disabled": True}, ON, ABSENT, ABSENT),
    ("sglang", {}, ON, ABSENT, ABSENT),
    ("vllm", {}, ON, ABSENT, 1),
    ("vllm", {}, OFF, ABSENT, ABSENT),
    ("vllm", {}, None, ABSENT, ABSENT),
]


@pytest.mark.parametrize(("kind", "says", "options", "interactive", "batch"), SERVERS)
@asynchronous
async def test_a_server_is_sent_its_own_priority_only_where_it_serves_by_it(
    kind: str, says: dict[str, Any], options: ServerOptions | None, interactive: Any, batch: Any
) -> None:
    server = ScriptedServer(whole, kind=kind, more=says)
    async with serving(server, options=options) as front:
        for headers in ({}, AS_BATCH):
            assert (await front.post(CHAT, BODY, headers))[0] == 200
        assert [call.json.get("priority", ABSENT) for call in server.calls] == [interactive, batch]
        assert all({**call.json, **BODY} == call.json for call in server.calls), "the rest is as it came"
        await front.settled()


@asynchronous
async def test_a_client_s_own_priority_stays_but_for_batch_work_and_other_endpoints_have_none() -> None:
    server = ScriptedServer(whole, more=BY_PRIORITY)
    async with serving(server) as front:
        for given, headers, sent in ((7, {}, 7), (7, AS_BATCH, -1), (None, {}, 0), (None, AS_BATCH, -1)):
            await front.post(CHAT, {**BODY, "priority": given}, headers)
            assert server.calls[-1].json == {**BODY, "priority": sent}
        for path, asked in (("/v1/messages", {**BODY, "max_tokens": 3}), ("/v1/embeddings", {"input": "a"})):
            await front.post(path, asked, AS_BATCH)
            assert server.calls[-1].path == path and "priority" not in server.calls[-1].json
        await front.settled()


@asynchronous
async def test_a_stream_that_goes_on_elsewhere_has_the_priority_of_that_server() -> None:
    async def goes_on(call: Call) -> None:
        await call.stream(*chat_events(" three", name="chatcmpl-2"))

    bad = ScriptedServer(then_broken(chat_events("one", " two", reason=None), "reset"), more=BY_PRIORITY)
    good = ScriptedServer(goes_on, more=LOWER_FIRST)
    for server in (bad, good):
        await server.start()
    async with serving(bad, good, policy=InOrder(bad, good)) as front:
        assert (await front.post(CHAT, {**STREAMED, "max_tokens": 10}, AS_BATCH))[0] == 200
        assert (bad.calls[0].json["priority"], good.calls[0].json["priority"]) == (-1, 1)
        await front.settled()


@asynchronous
async def test_both_servers_of_a_pair_are_sent_it() -> None:
    servers = [ScriptedServer(streamed, role=role, more=BY_PRIORITY) for role in ("prefill", "decode")]
    async with serving(*servers) as front:
        assert (await front.post(CHAT, STREAMED, AS_BATCH))[0] == 200
        assert [[call.json["priority"] for call in server.calls] for server in servers] == [[-1], [-1]]
        await front.settled()


@asynchronous
async def test_what_a_tenant_wants_beyond_its_share_comes_later_at_its_server() -> None:
    opened = asyncio.Event()

    async def waits(call: Call) -> None:
        await opened.wait()
        await streamed(call)

    server = ScriptedServer(waits, more=BY_PRIORITY)
    flow = FlowConfig(spare_seconds=60.0, burst_seconds=1e-9)
    keys = [KeyTable(key=f"{name}-key", name=name, weight=1.0) for name in ("quiet", "flood")]
    async with serving(server, router_config=fast(flow=flow), keys=keys) as front:
        asked = []
        for number, tenant in enumerate(["quiet", *["flood"] * 4, "quiet"]):
            body = {**STREAMED, "messages": [{"role": "user", "content": f"{number} is another prompt"}]}
            body |= {"priority": 100} if tenant == "flood" else {}
            asked.append(asyncio.ensure_future(front.post(CHAT, body, {"authorization": f"Bearer {tenant}-key"})))
            await until(lambda: len(server.calls) == number + 1, "it is at the server")  # noqa: B023
        opened.set()
        assert [status for status, _, _ in await asyncio.gather(*asked)] == [200] * 6
        sent = [call.json["priority"] for call in server.calls]
        assert (sent[0], sent[1], sent[4], sent[5]) == (0, 0, -1, 0), "the fourth is beyond its share"
        await front.settled()


# what the server says of itself, and (given, sent) of interactive requests and of batch work of a tenant
CAPPED: list[tuple[str, dict[str, Any], ServerOptions | None, list[tuple[Any, Any]], list[tuple[Any, Any]]]] = [
    ("sglang", BY_PRIORITY, None, [(100, 0), (0, 0), (-1, -1), (-7, -7)], [(100, -1), (0, -1), (-7, -7)]),
    ("sglang", LOWER_FIRST, None, [(-100, 0), (7, 7)], [(-100, 1), (7, 7)]),
    ("sglang", {**BY_PRIORITY, "default_priority_value": 5}, None, [(6, 5), (5, 5), (2, 2)], [(6, 4), (2, 2)]),
    ("vllm", {}, ON, [(-100, 0), (0, 0), (7, 7), ("-100", 0), (-100.0, 0), (True, 0)], [(-100, 1), (7, 7)]),
    ("vllm", {}, None, [(-100, -100)], [(-100, -100)]),
]


@pytest.mark.parametrize(("kind", "says", "options", "interactive", "batch"), CAPPED)
@asynchronous
async def test_a_tenant_s_own_priority_never_puts_its_requests_before_those_of_others(
    kind: str,
    says: dict[str, Any],
    options: ServerOptions | None,
    interactive: list[tuple[Any, Any]],
    batch: list[tuple[Any, Any]],
) -> None:
    server = ScriptedServer(whole, kind=kind, more=says)
    keys = [KeyTable(key="one-key", name="one", weight=1.0)]
    async with serving(server, options=options, keys=keys) as front:
        for headers, pairs in (({}, interactive), (AS_BATCH, batch)):
            for given, sent in pairs:
                named = {"authorization": "Bearer one-key", **headers}
                assert (await front.post(CHAT, {**BODY, "priority": given}, named))[0] == 200
                assert server.calls[-1].json == {**BODY, "priority": sent}, (given, headers)
        await front.settled()


@pytest.mark.parametrize(("says", "batch"), [({}, ABSENT), (BY_PRIORITY, -1), (LOWER_FIRST, 1)])
@asynchronous
async def test_requests_that_the_router_itself_sends_have_it_too(says: dict[str, Any], batch: Any) -> None:
    async def answers(call: Call) -> None:
        meta = {"prompt_tokens": 3, "completion_tokens": 1, "cached_tokens": 0, "finish_reason": {"type": "length"}}
        await call.stream({"text": "", "output_ids": [5], "meta_info": meta})

    server = ScriptedServer(answers, more=says)
    async with serving(server) as front:
        sampling = SamplingParams(max_new_tokens=1)
        for named in ({}, {"priority": "batch"}):
            chunks = [one async for one in front.router.generate([1, 2, 3], sampling, **named)]
            assert [token for one in chunks for token in one.token_ids] == [5]
        interactive = ABSENT if batch == ABSENT else 0
        assert [call.json.get("priority", ABSENT) for call in server.calls] == [interactive, batch]


def test_what_a_server_says_of_priorities_is_read_and_the_operator_may_say_no() -> None:
    def of(options: ServerOptions = ServerOptions(), **says: Any) -> EnginePriorities:  # noqa: B008
        return sglang_info("http://a:1", {"max_total_num_tokens": 100, **says}, options).priorities

    assert of() == of(enable_priority_scheduling="yes") == of(OFF, **BY_PRIORITY) == EnginePriorities()
    assert of(**BY_PRIORITY) == EnginePriorities(0, -1)
    lowest, highest = -(2**63), 2**63 - 1
    at_the_end = of(**{**BY_PRIORITY, "default_priority_value": lowest})
    assert at_the_end.batch == lowest == at_the_end.capped(Claim(), 0), "more is refused by SGLang"
    assert of(**{**LOWER_FIRST, "default_priority_value": highest}).batch == highest
    options = options_of(ServerTable(url="http://a:1", by_priority=True, block_size=4, kv_capacity_tokens=100))
    assert vllm_info("http://a:1", {"data": [{"id": "m"}]}, "", {}, "", options).priorities.of(None) is None
    assert EnginePriorities(None, 1).of(Claim(priority="batch")) == 1 and EnginePriorities(0, 1).of(Claim()) == 0
