"""What relayed requests are routed on, seen from outside: metrics of keys, mismatches, and caches of several models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from preble.gateway.relay.body import read_body
from preble.gateway.relay.endpoints import POSTS
from preble.gateway.relay.routing_key import TRIED_MIN, routing_key
from preble.gateway.text.tokenizing import TextCodec
from preble.transport.engine_servers.server_info import ServerOptions
from tests.gateway.relay.test_models import CHAT, MESSAGES, ask, gateway, listed, server
from tests.support.gateway import make_tokenizer
from tests.support.relay import Call, Front, ScriptedServer, chat_answer
from tests.support.transport import asynchronous


async def metric(front: Front, name: str) -> dict[str, float]:
    """The samples of a counter, by their labels as written."""
    async with front.session.get(f"http://127.0.0.1:{front.port}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if line.startswith(f"{name}{{"))
    return {labels.removeprefix(name): float(value) for labels, value in samples}


@asynchronous
async def test_an_engine_that_counts_other_tokens_is_routed_by_text_after_three_requests(tmp_path: Path) -> None:
    codec = TextCodec(make_tokenizer(tmp_path), threads=1)
    body = json.dumps({"model": "a", "messages": MESSAGES}).encode()
    ours = len((await routing_key(read_body(body, POSTS[CHAT]), codec)).token_ids)
    counts = [ours, ours, ours + 1, ours - 1, ours + 7, ours + 7]

    async def counting(call: Call) -> None:
        await call.answer(chat_answer(prompt=counts.pop(0)))

    a = ScriptedServer(counting, kind="vllm", model="a")
    async with gateway(a, codec=codec) as front:
        for _ in range(len(counts)):
            assert (await ask(front, "a"))[0] == 200
        assert await metric(front, "preble_prompt_token_mismatches_total") == {'{kind="chat"}': 3.0}
        assert await metric(front, "preble_relayed_requests_total") == {
            '{by="tokens",kind="chat"}': 5.0,
            '{by="text",kind="chat"}': 1.0,
        }
        await front.settled()
    codec.close()


@pytest.mark.parametrize("events", [False, True])
@asynchronous
async def test_servers_that_publish_no_events_get_requests_by_their_text(tmp_path: Path, events: bool) -> None:
    codec = TextCodec(make_tokenizer(tmp_path), threads=1)
    body = json.dumps({"model": "a", "messages": MESSAGES}).encode()
    count = len((await routing_key(read_body(body, POSTS[CHAT]), codec)).token_ids)

    async def answer(call: Call) -> None:
        await call.answer(chat_answer(prompt=count))

    context = zmq.Context()
    publisher = context.socket(zmq.PUB)
    publisher.bind("tcp://127.0.0.1:*")
    options = ServerOptions(events_endpoint=publisher.last_endpoint.decode() if events else "")
    async with gateway(ScriptedServer(answer, kind="vllm", model="a"), codec=codec, options=options) as front:
        for _ in range(TRIED_MIN + 2):
            assert (await ask(front, "a"))[0] == 200
        by = {'{by="tokens",kind="chat"}': float(TRIED_MIN + 2 * events)}
        if not events:
            by['{by="text",kind="chat"}'] = 2.0
        assert await metric(front, "preble_relayed_requests_total") == by
        await front.settled()
    context.destroy()
    codec.close()


@asynchronous
async def test_without_a_tokenizer_requests_are_routed_by_text_and_still_find_their_prefix() -> None:
    a, b = server("a"), server("a")
    async with gateway(a, b) as front:
        messages: list[dict[str, Any]] = [{"role": "system", "content": "rules " * 500}]
        for turn in range(5):
            messages += [{"role": "user", "content": f"question {turn}"}]
            status, headers, _ = await front.post(CHAT, {"model": "a", "messages": messages})
            assert status == 200
            assert ("matched_tokens=0," in headers["x-preble-decision"]) == (turn == 0)
            messages += [{"role": "assistant", "content": f"answer {turn}"}]
        assert sorted((len(a.calls), len(b.calls))) == [0, 5], "a conversation stays where its prefix is"
        assert await metric(front, "preble_relayed_requests_total") == {'{by="text",kind="chat"}': 5.0}


ODD_BODIES = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b"{",
    b'{"model": 5}',
    b'{"model": "a", "messages": 5, "prompt": {}, "input": [[]], "text": [1, "x"], "tools": {}, "stream": "x"}',
    b'{"model": "a", "messages": [[]], "n": -1, "max_tokens": 1e99, "stream_options": [], "cache_salt": {}}',
    b'{"model": "a", "messages": [{"role": 1}], "input": {"a": 1}, "documents": 3, "stream": true}',
    b'{"model": "a\xff"}',
    b"[" * 100_000,
]


@asynchronous
async def test_no_body_makes_an_error_of_the_gateways_own() -> None:
    a = server("a")
    async with gateway(a) as front:
        status, document = await listed(front, "/openapi.json")
        assert status == 200
        asked = set()
        for path, operations in document["paths"].items():
            if path not in POSTS:
                continue
            assert set(operations) == {"post"}
            asked.add(path)
            for body in ODD_BODIES:
                assert (await front.post(path, body))[0] < 500, (path, body[:50])
        assert asked == POSTS.keys(), "the document has every relayed endpoint"
        assert document["paths"]["/v1/responses/{id}"]["get"]["parameters"][0]["name"] == "id"
        await front.settled()


def stored(tokens: list[int], **more: Any) -> bytes:
    """A batch of vLLM's with one block of four tokens."""
    event = {"type": "BlockStored", "block_hashes": [sum(tokens)], "parent_block_hash": None, "token_ids": tokens}
    event |= {"block_size": 4, "lora_id": None, "medium": "GPU", "lora_name": None, **more}
    return bytes(msgpack.packb([1.0, [event], 0]))


@asynchronous
async def test_what_servers_report_of_their_caches_is_kept_apart_by_model_and_adapter() -> None:
    a, b = server("a"), server("b", "lora-1")
    async with gateway(a, b) as front:
        fleet, scheduler = front.router.fleet, front.router.scheduler
        spaces = {name: front.gateway.models.get(name).namespace for name in ("a", "b", "lora-1")}
        assert len(set(spaces.values())) == 3
        for one in (a, b):
            fleet.apply_raw(fleet.worker(one.worker), stored([1, 2, 3, 4]))
        fleet.apply_raw(fleet.worker(b.worker), stored([5, 6, 7, 8], lora_name="lora-1"))

        def cached(tokens: list[int], name: str) -> set[str]:
            found = scheduler.match([*tokens, 9], namespace=spaces[name])
            return {worker for worker, count in found.matched_tokens.items() if count}

        assert (cached([1, 2, 3, 4], "a"), cached([1, 2, 3, 4], "b")) == ({a.worker}, {b.worker})
        assert cached([1, 2, 3, 4], "lora-1") == set()
        assert cached([5, 6, 7, 8], "lora-1") == {b.worker} and cached([5, 6, 7, 8], "b") == set()
        assert (await listed(front))[0] == 200
