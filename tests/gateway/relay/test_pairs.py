"""Requests at two servers of which one prefills and the other decodes: what reaches each, by SGLang's and by vLLM's own
fields, and where a request goes when either fails. Recording servers, real sockets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from preble.errors import InvalidConfig, ProtocolError
from preble.transport.engine_servers.server_info import ServerOptions, sglang_info, vllm_info
from tests.gateway.relay.test_relay import BODY, CHAT, STREAMED, streamed, whole
from tests.support.relay import STREAM_HEAD, Call, InOrder, ScriptedServer, chat_answer, chat_events, serving
from tests.support.transport import HANG_SECONDS, asynchronous, until

BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[1, 2]], "remote_port": 5600}


async def prefills(call: Call) -> None:
    """One token, and where its KV is, as vLLM says it."""
    await call.answer({**chat_answer("h", output=1), "kv_transfer_params": PARAMS})


def pair(kind: str, first: Any, second: Any, *more: ScriptedServer) -> list[ScriptedServer]:
    """A server that prefills, one that decodes, and others."""
    servers = [ScriptedServer(first, kind=kind, role="prefill"), ScriptedServer(second, kind=kind, role="decode")]
    return [*servers, *more]


def only(server: ScriptedServer) -> Any:
    """The body of the one request that a server got."""
    (call,) = server.calls
    return call.json


@pytest.mark.parametrize("body", [BODY, STREAMED])
@asynchronous
async def test_sglang_s_servers_are_both_sent_the_request_and_how_they_find_each_other(body: dict[str, Any]) -> None:
    answers = streamed if "stream" in body else whole
    first, second = pair("sglang", answers, answers)
    async with serving(first, second) as front:
        status, headers, answer = await front.post(CHAT, {**body, "max_tokens": 7})
        assert status == 200 and headers["x-preble-worker"] == second.worker
        assert (b"llo" in answer) if "stream" in body else json.loads(answer) == chat_answer()
        there, here = only(first), only(second)
        assert there == here, "the same, also in its length"
        assert there["bootstrap_host"] == "127.0.0.1" and there["bootstrap_port"] == 8123
        assert type(there["bootstrap_room"]) is int and 0 <= there["bootstrap_room"] < 2**63
        assert {name: value for name, value in there.items() if name in BODY} == BODY and there["max_tokens"] == 7
        await front.settled()
        await front.post(CHAT, {**body, "max_tokens": 7})
        rooms = [call.json["bootstrap_room"] for call in first.calls]
        assert len(set(rooms)) == 2, "each request has a room of its own"


@pytest.mark.parametrize("body", [BODY, {**STREAMED, "stream_options": {"include_usage": True}, "min_tokens": 3}])
@asynchronous
async def test_vllm_s_one_prefills_one_token_and_what_it_answers_goes_to_the_other(body: dict[str, Any]) -> None:
    first, second = pair("vllm", prefills, streamed if "stream" in body else whole)
    async with serving(first, second) as front:
        asked = {**body, "max_completion_tokens": 9}
        status, headers, _ = await front.post(CHAT, asked)
        assert status == 200 and headers["x-preble-worker"] == second.worker
        there, here = only(first), only(second)
        assert there["kv_transfer_params"] == {
            **{"do_remote_decode": True, "do_remote_prefill": False},
            **{"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None},
        }
        assert (there["stream"], there["max_tokens"], there["max_completion_tokens"]) == (False, 1, 1)
        assert there.get("stream_options") is None and not there.get("min_tokens")
        assert here == {**asked, "kv_transfer_params": PARAMS}
        await front.settled()


@asynchronous
async def test_what_is_explained_is_the_pair_and_changes_nothing() -> None:
    first, second = pair("vllm", prefills, whole)
    async with serving(first, second) as front:
        status, _, answer = await front.post("/v1/preble/explain", {"token_ids": list(range(100))})
        found = json.loads(answer)
        assert status == 200 and (found["reason"], found["worker"]) == ("pair", first.worker)
        pair_found = found["pair"]
        assert (pair_found["decode_worker"], pair_found["moved_tokens"]) == (second.worker, 100)
        assert pair_found["one_seconds"] is None, "nobody does both"
        assert front.gateway.router.scheduler.stats()["scheduled"] == 0


@asynchronous
async def test_a_prefill_whose_kv_nobody_can_have_is_computed_again() -> None:
    first, second = pair("vllm", whole, whole)
    async with serving(first, second) as front:
        assert (await front.post(CHAT, BODY))[0] == 200
        assert only(second) == BODY
        await front.settled()


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@asynchronous
async def test_where_the_prefill_fails_the_request_goes_to_others(kind: str) -> None:
    async def fails(call: Call) -> None:
        await call.answer({"error": "no"}, 500)

    async def waits(call: Call) -> None:
        if not any(name in call.json for name in (*BOOTSTRAP, "kv_transfer_params")):
            await whole(call)
        await asyncio.Event().wait()  # for KV that never comes

    servers = pair(kind, fails, waits, ScriptedServer(whole, kind=kind))
    for server in servers:
        await server.start()
    async with serving(*servers, policy=InOrder(*servers)) as front:
        status, headers, body = await front.post(CHAT, BODY)
        assert status == 200 and json.loads(body) == chat_answer()
        assert headers["x-preble-worker"] == servers[2].worker and len(servers[0].calls) == 1
        await front.settled()


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@asynchronous
async def test_a_request_that_the_prefill_refuses_is_answered_by_the_other_and_nobody_is_doubted(kind: str) -> None:
    """Found before vLLM: a request without its media type was sent to four servers, and answered with 502."""

    async def refuses(call: Call) -> None:
        await call.answer({"error": "wrong"}, 400)

    servers = pair(kind, refuses, refuses)
    async with serving(*servers) as front:
        for _ in range(3):
            status, headers, body = await front.post(CHAT, BODY)
            assert status == 400 and json.loads(body) == {"error": "wrong"}
            assert headers["x-preble-worker"] == servers[1].worker
            await front.settled()
        assert len(servers[0].calls) == 3, "it is asked again each time"


@asynchronous
async def test_a_decode_server_that_says_nothing_is_left() -> None:
    async def silent(call: Call) -> None:
        await call.write(STREAM_HEAD)
        await asyncio.Event().wait()

    servers = pair("sglang", streamed, silent, ScriptedServer(streamed, role="decode"))
    for server in servers:
        await server.start()
    async with serving(*servers, policy=InOrder(*servers), stalled_after_seconds=0.1) as front:
        status, headers, _ = await front.post(CHAT, STREAMED)
        assert status == 200 and headers["x-preble-worker"] == servers[2].worker
        await front.settled()


@pytest.mark.parametrize("why", ["client", "decode"])
@asynchronous
async def test_a_prefill_that_nobody_waits_for_is_hung_up(why: str) -> None:
    begun, waits = asyncio.Event(), asyncio.Event()

    async def begins(call: Call) -> None:
        await call.stream(*chat_events("he", reason=None), end=False)
        begun.set()
        await waits.wait()

    async def decodes(call: Call) -> None:
        await begun.wait()
        if why == "decode":
            call.reset()
        await waits.wait()

    servers = pair("sglang", begins, decodes, ScriptedServer(streamed))
    for server in servers:
        await server.start()
    async with serving(*servers, policy=InOrder(*servers)) as front:
        asking = asyncio.ensure_future(front.post(CHAT, STREAMED))
        if why == "client":
            await until(lambda: begun.is_set() and servers[1].calls, "both have it")
            asking.cancel()
        else:
            status, headers, _ = await asking
            assert status == 200 and headers["x-preble-worker"] == servers[2].worker
        for server in servers[: 2 if why == "client" else 1]:
            await asyncio.wait_for(server.calls[0].gone.wait(), HANG_SECONDS)
        await front.settled()


@asynchronous
async def test_what_cannot_be_served_in_two_goes_to_one_that_does_both() -> None:
    servers = pair("sglang", whole, whole, ScriptedServer(whole))
    async with serving(*servers) as front:
        for body in ({**BODY, "n": 2}, {**BODY, "bootstrap_room": 5}):
            _, headers, _ = await front.post(CHAT, body)
            assert headers["x-preble-worker"] == servers[2].worker
        assert servers[2].calls[1].json["bootstrap_room"] == 5
        await front.settled()
    async with serving(*pair("sglang", whole, whole)) as front:
        assert (await front.post(CHAT, {**BODY, "n": 2}))[0] == 503
        await front.settled()


def test_a_server_s_role_is_its_own_word_or_the_operator_s() -> None:
    answer = {"max_total_num_tokens": 100, "disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 7}
    info = sglang_info("http://a:1", answer, ServerOptions())
    assert (info.role, info.bootstrap_port) == ("prefill", 7)
    assert sglang_info("http://a:1", answer, ServerOptions(role="decode")).role == "decode"
    assert sglang_info("http://a:1", {**answer, "disaggregation_mode": "null"}, ServerOptions()).role == "both"
    with pytest.raises(ProtocolError, match="disaggregation_bootstrap_port"):
        sglang_info("http://a:1", {**answer, "disaggregation_bootstrap_port": "x"}, ServerOptions())
    options = ServerOptions(role="prefill", block_size=4, kv_capacity_tokens=100)
    assert vllm_info("http://a:1", {"data": [{"id": "m"}]}, "", {}, "", options).role == "prefill"
    with pytest.raises(InvalidConfig, match="ServerOptions.role must be one of both, prefill, decode"):
        ServerOptions(role="prefil")  # type: ignore[arg-type]
