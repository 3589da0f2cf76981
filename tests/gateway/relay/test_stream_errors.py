"""Errors inside of streams: a server's own before any output move the request on, those of the request are its
client's; and how the gateway ends a stream that it cannot go on with, as the official clients see it. Real sockets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest

from preble.errors import TransportError
from preble.gateway.api.http import error_events
from preble.gateway.relay.stream_errors import is_opening, server_fault
from tests.support.relay import (
    STREAM_HEAD,
    Call,
    InOrder,
    ScriptedServer,
    chat_events,
    chunk,
    event,
    events_of,
    serving,
)
from tests.support.transport import asynchronous

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 5}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}


def failed(code: Any, kind: str = "InternalServerError") -> Any:
    """OpenAI's error object, as SGLang and vLLM send it in a stream."""
    return {"error": {"object": "error", "message": "no", "type": kind, "param": None, "code": code}}


ABORTED = {"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": "full", "status_code": 503}}}
SERVERS_OWN = {
    "500": failed(500), "503": failed(503, "ServiceUnavailable"), "429": failed(429), "text": failed("500"),
    "type": {"error": {"message": "no", "type": "internal_error"}}, "abort": ABORTED,
    "old": {"object": "error", "message": "no", "type": "Internal", "code": 500},
}  # fmt: skip


def sends(*events: Any, opening: bool = False) -> Any:
    """A script: events, each a write of its own, and the end."""

    async def script(call: Call) -> None:
        await call.stream(*(chat_events(reason=None) if opening else ()), *events)

    return script


async def good(call: Call) -> None:
    """A chat."""
    await call.stream(*chat_events("he", "llo"))


@pytest.mark.parametrize("error", SERVERS_OWN.values(), ids=SERVERS_OWN)
@pytest.mark.parametrize("more", [{}, TOOLS], ids=["may go on", "may not"])
@pytest.mark.parametrize("opening", [False, True], ids=["first", "after the role"])
@asynchronous
async def test_a_stream_that_begins_with_a_servers_error_goes_on_elsewhere(
    error: Any, more: Any, opening: bool
) -> None:
    bad, other = ScriptedServer(sends(error, opening=opening)), ScriptedServer(good)
    await bad.start()
    await other.start()
    async with serving(bad, other, policy=InOrder(bad, other)) as front:
        status, _, body = await front.post(CHAT, {**ASKED, **more})
        assert status == 200 and events_of(body) == [*chat_events("he", "llo"), None]
        assert len(bad.calls) == len(other.calls) == 1
        await front.settled()


@asynchronous
async def test_where_every_stream_begins_with_an_error_the_client_gets_a_status() -> None:
    async with serving(ScriptedServer(sends(failed(503))), ScriptedServer(sends(failed(500)))) as front:
        status, _, body = await front.post(CHAT, {**ASKED, **TOOLS})
        assert status in (502, 503) and "error" in json.loads(body)
        assert all(len(server.calls) >= 1 for server in front.servers)
        await front.settled()


@pytest.mark.parametrize("error", [failed(400, "BadRequestError"), {"error": {"message": "odd"}}, {"error": "odd"}])
@asynchronous
async def test_what_a_stream_says_of_the_request_is_the_clients(error: Any) -> None:
    async with serving(ScriptedServer(sends(error)), ScriptedServer(sends(error))) as front:
        status, _, body = await front.post(CHAT, ASKED)
        assert status == 200 and body == event(error) + event(b"[DONE]")
        assert sum(len(server.calls) for server in front.servers) == 1
        await front.settled()


@asynchronous
async def test_an_error_event_that_comes_in_pieces_is_read_whole() -> None:
    async def pieces(call: Call) -> None:
        data = event(failed(500))
        await call.write(STREAM_HEAD + chunk(data[:12]))
        for _ in range(50):  # the gateway, on this loop, reads what is there
            await asyncio.sleep(0)
        await call.write(chunk(data[12:]) + b"0\r\n\r\n")

    bad, other = ScriptedServer(pieces), ScriptedServer(good)
    await bad.start()
    await other.start()
    async with serving(bad, other, policy=InOrder(bad, other)) as front:
        _, _, body = await front.post(CHAT, {**ASKED, **TOOLS})
        assert events_of(body) == [*chat_events("he", "llo"), None]


def named(one: Any) -> bytes:
    """One event of /v1/responses, with its name."""
    return f"event: {one['type']}\n".encode() + event(one)


def opening_events(name: str = "resp_1", tools: int = 0) -> list[Any]:
    """What a streamed response begins with; both repeat what was asked."""
    response = {"id": name, "object": "response", "status": "in_progress", "error": None, "output": []}
    response["tools"] = [{"type": "function", "name": f"f{i}", "description": "d" * 1000} for i in range(tools)]
    kinds = enumerate(("response.created", "response.in_progress"))
    return [{"type": kind, "sequence_number": number, "response": response} for number, kind in kinds]


def response_failed(code: str) -> Any:
    """As SGLang says it."""
    error = {"code": code, "message": "no"}
    return {"type": "response.failed", "sequence_number": 2, "response": {"id": "resp_1", "error": error}}


RESPONSE_ENDS = [
    {"type": "response.output_text.delta", "sequence_number": 2, "delta": "he", "item_id": "i", "output_index": 0},
    {"type": "response.completed", "sequence_number": 3, "response": {"id": "resp_2", "status": "completed"}},
]
ASKED_RESPONSE = {"model": "tiny", "input": "a", "stream": True}


def sends_named(*events: Any) -> Any:
    """A script: a streamed response, each event a write of its own."""

    async def script(call: Call) -> None:
        await call.write(STREAM_HEAD)
        for one in events:
            await call.write(chunk(named(one)))
        await call.write(b"0\r\n\r\n")

    return script


RESPONSE_FAULTS = {
    "failed": response_failed("server_error"),
    "full": response_failed("rate_limit_exceeded"),
    "error": {"type": "error", "code": "server_error", "message": "no", "param": None, "sequence_number": 2},
    "nested": {"type": "error", **failed(500)},
}


@pytest.mark.parametrize("fault", RESPONSE_FAULTS.values(), ids=RESPONSE_FAULTS)
@pytest.mark.parametrize("tools", [0, 200])
@asynchronous
async def test_a_response_that_fails_before_its_output_goes_on_elsewhere(fault: Any, tools: int) -> None:
    whole = [*opening_events("resp_2"), *RESPONSE_ENDS]
    bad, other = ScriptedServer(sends_named(*opening_events(tools=tools), fault)), ScriptedServer(sends_named(*whole))
    await bad.start()
    await other.start()
    async with serving(bad, other, policy=InOrder(bad, other)) as front:
        status, _, body = await front.post(RESPONSES, ASKED_RESPONSE)
        assert status == 200 and body == b"".join(map(named, whole))
        assert len(bad.calls) == len(other.calls) == 1
        await front.settled()


@asynchronous
async def test_a_response_that_fails_for_what_was_asked_is_its_clients() -> None:
    events = [*opening_events(), response_failed("invalid_prompt")]
    async with serving(ScriptedServer(sends_named(*events)), ScriptedServer(sends_named(*events))) as front:
        assert (await front.post(RESPONSES, ASKED_RESPONSE))[2] == b"".join(map(named, events))
        assert sum(len(server.calls) for server in front.servers) == 1
        await front.settled()


@asynchronous
async def test_a_response_that_fails_after_output_was_sent_is_its_clients() -> None:
    has_one = asyncio.Event()
    events = [*opening_events(), RESPONSE_ENDS[0], response_failed("server_error")]

    async def fails_then(call: Call) -> None:
        await call.write(STREAM_HEAD + b"".join(chunk(named(one)) for one in events[:-1]))
        await has_one.wait()
        await call.write(chunk(named(events[-1])) + b"0\r\n\r\n")

    async with serving(ScriptedServer(fails_then)) as front, front.send(RESPONSES, ASKED_RESPONSE) as answer:
        body = await answer.content.readuntil(b'"he"')
        has_one.set()
        assert body + await answer.read() == b"".join(map(named, events))
        await front.settled()


@asynchronous
async def test_a_servers_error_amid_text_moves_the_stream_on() -> None:
    async def goes_on(call: Call) -> None:
        await call.stream(*chat_events(" two", name="chatcmpl-2"))

    has_one = asyncio.Event()

    async def fails_then(call: Call) -> None:
        await call.stream(*chat_events("one", reason=None), end=False)
        await has_one.wait()
        await call.write(chunk(event(failed(500))) + chunk(event(b"[DONE]")) + b"0\r\n\r\n")

    bad, other = ScriptedServer(fails_then), ScriptedServer(goes_on)
    await bad.start()
    await other.start()
    async with serving(bad, other, policy=InOrder(bad, other)) as front, front.send(CHAT, ASKED) as answer:
        body = await answer.content.readuntil(b"one")
        has_one.set()
        events = events_of(body + await answer.read())
        text = "".join(choice["delta"].get("content") or "" for one in events[:-1] for choice in one["choices"])
        assert text == "one two" and not any("error" in one for one in events[:-1])
        assert other.calls[0].json["messages"][-1]["content"] == "one"
        await front.settled()


@asynchronous
async def test_text_that_names_errors_passes_as_it_is() -> None:
    events = chat_events("error", '{"error": {"code": 500}}', "abort")
    async with serving(ScriptedServer(sends(*events))) as front:
        _, _, body = await front.post(CHAT, ASKED)
        assert events_of(body) == [*events, None]


# --- servers that hang ------------------------------------------------------------------------------------------------

MESSAGE_EVENTS = [
    {"type": "message_start", "message": {"id": "m", "type": "message", "role": "assistant", "content": [],
     "model": "tiny", "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 0}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "he"}},
]  # fmt: skip
RESPONSE_EVENTS = [
    {"type": "response.output_text.delta", "sequence_number": 4, "delta": "he", "item_id": "i", "output_index": 0,
     "content_index": 0, "logprobs": []},
]  # fmt: skip
STALLED = {
    "chat": (CHAT, {**ASKED, **TOOLS}, chat_events("he", reason=None)),
    "completions": (COMPLETIONS, {"model": "tiny", "prompt": "a", "stream": True, "echo": True},
                    [{"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": "a"}]}]),
    "messages": (MESSAGES, ASKED, MESSAGE_EVENTS),
    "responses": (RESPONSES, {"model": "tiny", "input": "a", "stream": True}, RESPONSE_EVENTS),
    "generate": (GENERATE, {"text": "a", "stream": True, "return_logprob": True}, [{"text": "a", "meta_info": {}}]),
}  # fmt: skip


def hangs(events: list[Any]) -> Any:
    """A script: these events, each with its name, and then nothing."""

    async def script(call: Call) -> None:
        await call.write(STREAM_HEAD)
        for one in events:
            name = f"event: {one['type']}\n".encode() if "type" in one else b""
            await call.write(chunk(name + event(one)))
        await asyncio.Event().wait()

    return script


@pytest.mark.parametrize(("path", "asked", "events"), STALLED.values(), ids=STALLED)
@asynchronous
async def test_a_stream_that_falls_silent_and_cannot_go_on_ends_with_an_error(
    path: str, asked: Any, events: list[Any]
) -> None:
    server = ScriptedServer(hangs(events))
    async with serving(server, stalled_after_seconds=0.05) as front:
        status, headers, body = await front.post(path, asked)
        assert status == 200 and headers["x-preble-mode"] == "relay"
        sent = b"".join((f"event: {one['type']}\n".encode() if "type" in one else b"") + event(one) for one in events)
        assert body == sent + error_events(TransportError("silent for 0.2 s"), path, sent)
        await asyncio.wait_for(server.calls[0].gone.wait(), 30.0)
        await front.settled()
        assert front.router.counters.failed == 1 and front.router.counters.cancelled == 0
        name = path.removeprefix("/v1").strip("/").partition("/")[0]
        assert f'preble_relayed_streams_broken_total{{kind="{name}"}} 1' in front.gateway.metrics.own_text().decode()


OPENINGS = {
    "head": (CHAT, ASKED, []),
    "comment": (CHAT, ASKED, [b": wait\n\n"]),
    "role": (CHAT, ASKED, [event(chat_events(reason=None)[0])]),
    "response": (RESPONSES, ASKED_RESPONSE, [named(one) for one in opening_events()]),
}


def says_and_hangs(parts: list[bytes]) -> Any:
    """A script: the head, these parts, and then nothing."""

    async def script(call: Call) -> None:
        await call.write(STREAM_HEAD)
        for part in parts:
            await call.write(chunk(part))
        await asyncio.Event().wait()

    return script


@pytest.mark.parametrize(("path", "asked", "parts"), OPENINGS.values(), ids=OPENINGS)
@asynchronous
async def test_a_stream_that_only_begins_and_falls_silent_goes_on_elsewhere(
    path: str, asked: Any, parts: list[bytes]
) -> None:
    whole = [*opening_events("resp_2"), *RESPONSE_ENDS]
    answers = sends_named(*whole) if path == RESPONSES else good
    bad, other = ScriptedServer(says_and_hangs(parts)), ScriptedServer(answers)
    await bad.start()
    await other.start()
    async with serving(bad, other, policy=InOrder(bad, other), stalled_after_seconds=0.05) as front:
        status, _, body = await front.post(path, asked)
        assert status == 200
        if path == RESPONSES:
            assert body == b"".join(map(named, whole))
        else:
            assert events_of(body) == [*chat_events("he", "llo"), None]
        await asyncio.wait_for(bad.calls[0].gone.wait(), 30.0)
        await front.settled()


@asynchronous
async def test_where_every_stream_only_begins_the_client_gets_a_status() -> None:
    async with serving(ScriptedServer(says_and_hangs([])), stalled_after_seconds=0.02) as front:
        status, _, body = await front.post(CHAT, {**ASKED, **TOOLS})
        assert status in (502, 503) and "silent for" in json.loads(body)["error"]["message"]
        await front.settled()


@asynchronous
async def test_the_official_clients_raise_where_a_stream_falls_silent() -> None:
    async def script(call: Call) -> None:
        await hangs(next(events for path, _, events in STALLED.values() if path == call.path))(call)

    messages: Any = ASKED["messages"]
    async with serving(ScriptedServer(script), stalled_after_seconds=0.05) as front:
        base = f"http://127.0.0.1:{front.port}"
        async with anthropic.AsyncAnthropic(base_url=base, api_key="k", max_retries=0) as client:
            with pytest.raises(anthropic.APIStatusError, match="silent for") as raised:
                async for _ in await client.messages.create(model="tiny", messages=messages, max_tokens=5, stream=True):
                    pass
            assert raised.value.type == "overloaded_error"
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="k", max_retries=0) as client:
            with pytest.raises(openai.APIError, match="silent for"):
                async for _ in await client.chat.completions.create(
                    model="tiny", messages=messages, stream=True, tools=TOOLS["tools"]
                ):
                    pass
            with pytest.raises(openai.APIError, match="silent for"):
                async for _ in await client.responses.create(model="tiny", input="a", stream=True):
                    pass


# --- the rules --------------------------------------------------------------------------------------------------------


def test_the_numbers_of_a_responses_events_go_on_to_its_error() -> None:
    got = error_events(TransportError("gone"), "/v1/responses", b'{"sequence_number":3}\n\n{"sequence_number": 8}')
    name, data = got.rstrip().split(b"\n")
    assert name == b"event: error" and json.loads(data[6:])["sequence_number"] == 9


@pytest.mark.parametrize(
    ("kind", "data", "opens"),
    [
        ("chat", event(chat_events(reason=None)[0]), True),
        ("chat", b": ping\n\n" + event(chat_events(reason=None)[0]), True),
        ("chat", event(chat_events("a", reason=None)[1]), False),
        ("chat", b"data: {", True),
        ("chat", event(chat_events(reason=None)[0]) + b"data: {", True),
        ("chat", b"x" * (1 << 17), False),
        ("chat", event(failed(400)), False),
        ("messages", event(MESSAGE_EVENTS[0]), True),
        ("messages", event(MESSAGE_EVENTS[1]), False),
        ("responses", named({"type": "response.created"}) + named({"type": "response.in_progress"}), True),
        ("responses", named({"type": "response.output_item.added"}), False),
        ("responses", named({"type": "response.created", "x": "x" * (1 << 19)}), False),
        ("generate", event({"text": ""}), False),
    ],
)
def test_what_only_opens_an_answer_is_known(kind: str, data: bytes, opens: bool) -> None:
    assert is_opening(kind, data) == opens


def test_a_fault_is_found_behind_what_is_none() -> None:
    data = event(failed(400)) + event(failed(503))
    fault = server_fault(data)
    assert fault is not None and fault.full and data[fault.start :] == event(failed(503))
