"""Requests that two servers share: which of them a data plane sends it to, what the proxy beside that one is asked for,
as llm-d's routing sidecar reads it, and that neither booking outlives the request."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from preble.gateway.picker.pick import PREFILLER_HEADER
from tests.support.picker import (
    BODY,
    STREAMED,
    Plane,
    bodies,
    body,
    named,
    passed,
    picking,
    refusal,
    request_headers,
    response_headers,
    set_headers,
)
from tests.support.relay import InOrder, ScriptedServer, chat_answer, chat_events, event
from tests.support.transport import asynchronous

SSE = "text/event-stream"
ANSWER = msgspec.json.encode(chat_answer())
EVENTS = [event(one) for one in [*chat_events("he", "llo"), b"[DONE]"]]
FORGED = [(PREFILLER_HEADER, "10.9.9.9:1"), ("x-encoder-hosts-ports", "10.9.9.9:2")]
SETS = msgspec.json.encode({**msgspec.json.decode(BODY), "n": 2})
KINDS = pytest.mark.parametrize("kind", ["vllm", "sglang"])


async def servers(kind: str, *roles: Any) -> list[ScriptedServer]:
    """Servers with these roles, started, so that they have names."""
    return [await ScriptedServer(kind=kind, role=role).start() for role in roles]


def booked(plane: Plane) -> list[int]:
    """Requests that are booked at each server."""
    workers = plane.gateway.router.scheduler.stats()["workers"]
    return [workers[server.worker]["live_requests"] for server in plane.servers]


@KINDS
@asynchronous
async def test_the_one_that_decodes_is_the_destination_and_the_other_is_named_to_its_proxy(kind: str) -> None:
    first, second = await servers(kind, "prefill", "decode")
    async with picking(first, second) as plane:
        exchange = plane.exchange()
        answers = await plane.say(exchange, request_headers(), body(BODY))
        assert named(answers[0]) == second.worker and set_headers(answers[0]) == {PREFILLER_HEADER: first.worker}
        assert passed(answers) == BODY, "what the engines need of each other is the proxy's"
        assert booked(plane) == [1, 1]
        await plane.say(exchange, response_headers(), body(ANSWER, of="response"))
        await plane.settled()
        assert booked(plane) == [0, 0] and plane.gateway.router.counters.finished == 1


@asynchronous
async def test_the_prefill_s_booking_ends_with_the_first_token() -> None:
    async with picking(*await servers("vllm", "prefill", "decode")) as plane:
        exchange = plane.exchange()
        await plane.say(exchange, request_headers(), body(STREAMED))
        parts = bodies(EVENTS, of="response")
        await plane.say(exchange, response_headers(content_type=SSE), *parts[:2])
        assert booked(plane) == [0, 1]
        await plane.say(exchange, *parts[2:])
        assert booked(plane) == [0, 0]
        await plane.settled()


@pytest.mark.parametrize("upto", [1, 2, 3])
@pytest.mark.parametrize("end", ["close", "503", "400"])
@asynchronous
async def test_however_it_ends_neither_booking_stays(end: str, upto: int) -> None:
    async with picking(*await servers("vllm", "prefill", "decode")) as plane:
        exchange = plane.exchange()
        status = 200 if end == "close" else int(end)
        parts = bodies(EVENTS, of="response")
        said = [request_headers(), body(STREAMED), response_headers(status, content_type=SSE), *parts[:2]]
        await plane.say(exchange, *said[: 1 + upto])
        exchange.close()
        await plane.settled()
        assert booked(plane) == [0, 0]


@asynchronous
async def test_a_server_that_leaves_meanwhile_leaves_no_booking() -> None:
    for leaver in (0, 1):
        async with picking(*await servers("vllm", "prefill", "decode")) as plane:
            exchange = plane.exchange()
            await plane.say(exchange, request_headers(), body(BODY))
            await plane.gateway.router.remove_worker(plane.servers[leaver].url)
            await plane.say(exchange, response_headers(), body(ANSWER, of="response"))
            await plane.settled()
            assert plane.gateway.router.scheduler.stats()["live_requests"] == 0


@KINDS
@asynchronous
async def test_where_nothing_waits_one_that_does_both_has_all_of_it(kind: str) -> None:
    roles = await servers(kind, "prefill", "both")
    async with picking(*roles) as plane:
        answers = await plane.say(plane.exchange(), request_headers(), body(BODY))
        assert named(answers[0]) == roles[1].worker and set_headers(answers[0]) == {}


@asynchronous
async def test_a_client_s_own_word_on_who_prefills_is_never_passed_on() -> None:
    """The proxy sends the prompt wherever that header says."""
    first, second = await servers("vllm", "prefill", "decode")
    async with picking(first, second) as plane:
        answers = await plane.say(plane.exchange(), request_headers(headers=FORGED), body(BODY))
        assert set_headers(answers[0]) == {PREFILLER_HEADER: first.worker, "x-encoder-hosts-ports": None}
    async with picking(ScriptedServer()) as plane:
        answers = await plane.say(plane.exchange(), request_headers(headers=FORGED), body(BODY))
        assert set_headers(answers[0]) == dict.fromkeys(name for name, _ in FORGED)
        (answer,) = await plane.say(plane.exchange(), request_headers(headers=FORGED, method="GET", end=True))
        assert set_headers(answer) == dict.fromkeys(name for name, _ in FORGED)


@KINDS
@asynchronous
async def test_what_cannot_be_shared_goes_to_who_does_both(kind: str) -> None:
    found = await servers(kind, "prefill", "decode", "both")
    async with picking(*found) as plane:
        for path, data in (("/v1/chat/completions", SETS), ("/tokenize", b'{"prompt":"a"}')):
            answers = await plane.say(plane.exchange(), request_headers(path), body(data))
            assert named(answers[0]) == found[2].worker and set_headers(answers[0]) == {}
        assert booked(plane) == [0, 0, 2]


@asynchronous
async def test_where_nobody_does_both_it_goes_whole_to_those_that_decode_in_turn() -> None:
    """Found before two vLLM servers: a request for two choices, and one without a body, was answered 503."""
    first, *others = await servers("vllm", "prefill", "decode", "decode")
    names = {one.worker for one in others}
    async with picking(first, *others) as plane:
        for ask in ((request_headers(), body(SETS)), (request_headers("/v1/models", method="GET", end=True),)):
            seen = set()
            for _ in range(2):
                exchange = plane.exchange()
                answers = await plane.say(exchange, *ask)
                seen.add(named(answers[0]))
                assert set_headers(answers[0]) == {} and booked(plane) == [0, 0, 0]
                if len(ask) == 2:
                    assert passed(answers) == SETS
                await plane.say(exchange, response_headers(), body(ANSWER, of="response"))
                exchange.close()
            assert seen == names
        await plane.settled()


@asynchronous
async def test_sglang_s_decode_servers_are_sent_no_whole_prompt() -> None:
    async with picking(*await servers("sglang", "prefill", "decode")) as plane:
        status, _ = refusal(await plane.say(plane.exchange(), request_headers(), body(SETS)))
        assert status == 503
        exchange = plane.exchange()
        (answer,) = await plane.say(exchange, request_headers("/v1/models", method="GET", end=True))
        assert named(answer) == plane.servers[1].worker
        exchange.close()
        await plane.settled()


@asynchronous
async def test_further_destinations_are_those_that_decode() -> None:
    prefills, *decode, both = found = await servers("vllm", "prefill", "decode", "decode", "both")
    async with picking(*found, policy=InOrder(*found), picker_fallbacks=5) as plane:
        answers = await plane.say(plane.exchange(), request_headers(), body(BODY))
        first, *further = named(answers[0]).split(",")
        assert first == decode[0].worker and set(further) == {decode[1].worker, both.worker}
        answers = await plane.say(plane.exchange(), request_headers(), body(SETS))
        assert named(answers[0]) == both.worker, "a whole one has nowhere else to go"


@asynchronous
async def test_one_that_another_server_decodes_is_booked_there_and_stays_where_it_is_prefilled() -> None:
    first, second, third = await servers("vllm", "prefill", "decode", "decode")
    async with picking(first, second, third, policy=InOrder(first, second, third)) as plane:
        exchange = plane.exchange()
        await plane.say(exchange, request_headers(), body(BODY))
        assert booked(plane) == [1, 1, 0]
        await plane.say(exchange, response_headers(served=third.worker))
        assert booked(plane) == [1, 0, 1]
        await plane.say(exchange, body(ANSWER, of="response"))
        await plane.settled()
        assert booked(plane) == [0, 0, 0]


@asynchronous
async def test_a_subset_is_one_of_both_halves() -> None:
    first, second, third = await servers("vllm", "prefill", "decode", "decode")
    async with picking(first, second, third) as plane:
        for one in (second, third):
            asked = request_headers(subset=[first.worker, one.worker])
            answers = await plane.say(plane.exchange(), asked, body(BODY))
            assert named(answers[0]) == one.worker and set_headers(answers[0])[PREFILLER_HEADER] == first.worker
        status, _ = refusal(await plane.say(plane.exchange(), request_headers(subset=[first.worker]), body(BODY)))
        assert status == 503


@asynchronous
async def test_no_rank_is_named_where_the_proxy_would_name_it_to_both() -> None:
    found = [
        await ScriptedServer(role="prefill", ranks=2).start(),
        await ScriptedServer(role="decode", ranks=2).start(),
    ]
    async with picking(*found) as plane:
        answers = await plane.say(plane.exchange(), request_headers(), body(BODY))
        assert named(answers[0]) == f"127.0.0.1:{found[1].port}"
        assert set_headers(answers[0]) == {PREFILLER_HEADER: f"127.0.0.1:{found[0].port}"}
        assert passed(answers) == BODY
