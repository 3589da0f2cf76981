"""Requests through a gateway to scripted servers: what reaches them, what comes back, and where a request goes on when
a server fails. Real sockets on both sides, no engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from preble.gateway.app import make_app
from preble.transport.engine_servers.server_info import ServerOptions
from tests.support.relay import (
    JSON_HEAD,
    STREAM_HEAD,
    Call,
    InOrder,
    ScriptedServer,
    chat_answer,
    chat_events,
    chunk,
    event,
    events_of,
    serving,
    usage_event,
)
from tests.support.transport import asynchronous, fast, until

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi there, how are you?"}]}
STREAMED = {**BODY, "stream": True}


async def whole(call: Call) -> None:
    """A chat, whole."""
    await call.answer(chat_answer(), headers="x-engine: yes\r\n")


async def streamed(call: Call) -> None:
    """A chat, streamed; with the usage, if it is asked for."""
    events = chat_events("he", "llo")
    if (call.json.get("stream_options") or {}).get("include_usage"):
        events.append(usage_event(cached=2))
    await call.stream(*events)


@asynchronous
async def test_a_body_reaches_the_server_byte_for_byte_and_its_answer_comes_back_so() -> None:
    data = b'{ "model":"tiny", "odd" : 1.50e3,\n "messages":[{"role":"user","content":"\\u00e9"}], "new":{"a":[]}}'
    async with serving(ScriptedServer(whole)) as front:
        status, headers, body = await front.post(CHAT, data, {"x-mine": "1", "x-request-id": "req-7"})
        (call,) = servers_calls(front)
        assert status == 200 and body == json.dumps(chat_answer()).encode()
        assert call.body == data and call.path == CHAT and call.headers["x-mine"] == "1"
        assert call.headers["x-request-id"] == "req-7" and headers["x-request-id"] == "req-7"
        assert headers["x-engine"] == "yes" and headers["x-preble-mode"] == "relay"
        assert headers["x-preble-worker"] == call.headers["host"]
        assert "reason=" in headers["x-preble-decision"]
        await front.settled()


def servers_calls(front: Any) -> list[Call]:
    """The requests that the servers of a front got."""
    return [call for server in front.servers for call in server.calls]


@asynchronous
async def test_a_whole_answer_leaves_before_it_is_counted_and_is_counted_though_its_client_goes_then() -> None:
    async with serving(ScriptedServer(whole)) as front:
        has_all = asyncio.Event()
        received = [{"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}]
        finished: list[int] = []

        async def receive() -> Any:
            if received:
                return received.pop()
            await has_all.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body" and not message["more_body"]:
                finished.append(front.router.counters.finished)
                has_all.set()

        scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": []}
        await make_app(front.gateway)(scope, receive, send)
        assert (*finished, front.router.counters.finished) == (0, 1)
        counted = front.gateway.metrics.own_text().decode()
        assert f'preble_http_requests_total{{model="tiny",route="{CHAT}",status="200"}} 1.0' in counted
        assert 'preble_output_tokens_total{model="tiny"} 3.0' in counted
        await front.settled()


MANY = {  # path, a body that asks for 65 choices, and whether they are choices
    "n": (CHAT, {**BODY, "n": 65}, True),
    "n, a float": (CHAT, {**BODY, "n": 65.0}, True),
    "n, in quotes": (CHAT, {**BODY, "n": "65"}, True),
    "prompts": ("/v1/completions", {"prompt": ["a"] * 65}, True),
    "prompts and n": ("/generate", {"text": ["a"] * 13, "sampling_params": {"n": 5}}, True),
    "conversations": ("/v1/chat/completions/batch", {"messages": [BODY["messages"]] * 65}, True),
    "embeddings": ("/v1/embeddings", {"input": ["a"] * 65}, False),
}


@pytest.mark.parametrize(("path", "body", "is_bound"), MANY.values(), ids=MANY)
@asynchronous
async def test_a_request_has_no_more_choices_than_one_may_have(path: str, body: Any, is_bound: bool) -> None:
    server = ScriptedServer(whole)
    async with serving(server) as front:
        status, _, answer = await front.post(path, body)
        assert (status, len(server.calls)) == ((400, 0) if is_bound else (200, 1))
        assert not is_bound or json.loads(answer)["error"]["param"] == "n"
        front.gateway.configure(msgspec.structs.replace(front.gateway.config, choices_max=65))
        assert (await front.post(path, body))[0] == 200, "so many may be asked for"
        await front.settled()


@asynchronous
async def test_a_stream_comes_back_without_the_usage_that_the_gateway_asked_for() -> None:
    async with serving(ScriptedServer(streamed)) as front:
        status, headers, body = await front.post(CHAT, STREAMED)
        (call,) = servers_calls(front)
        assert status == 200 and headers["content-type"] == "text/event-stream"
        assert body == b"".join(map(event, [*chat_events("he", "llo"), b"[DONE]"]))
        assert call.json == {**STREAMED, "stream_options": {"include_usage": True}}
        await front.settled()


@asynchronous
async def test_usage_that_a_client_asks_for_stays_in_the_stream() -> None:
    asked = {**STREAMED, "stream_options": {"include_usage": True}}
    async with serving(ScriptedServer(streamed)) as front:
        _, _, body = await front.post(CHAT, asked)
        assert servers_calls(front)[0].body == json.dumps(asked).encode()
        assert events_of(body)[-2]["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize("status", [400, 401, 404, 422, 500])
@asynchronous
async def test_what_a_server_says_of_a_request_is_the_clients_answer(status: int) -> None:
    async def refuse(call: Call) -> None:
        await call.answer({"error": {"message": "no"}}, status)

    async with serving(ScriptedServer(refuse), ScriptedServer(refuse)) as front:
        got, _, body = await front.post(CHAT, BODY)
        assert got == status and json.loads(body) == {"error": {"message": "no"}}
        assert len(servers_calls(front)) == 1
        await front.settled()


async def reset_at_once(call: Call) -> None:
    """Nothing comes."""
    call.reset()


async def reset_in_the_head(call: Call) -> None:
    """Half a head."""
    await call.write(JSON_HEAD[:20])
    call.reset()


async def reset_in_the_body(call: Call) -> None:
    """A part of what was announced."""
    await call.write(JSON_HEAD + b"content-length: 100\r\n\r\n{")
    call.close()


async def reset_after_the_head(call: Call) -> None:
    """A stream without an event."""
    await call.write(STREAM_HEAD)
    call.reset()


async def not_http(call: Call) -> None:
    """Something else."""
    await call.write(b"SSH-2.0-OpenSSH\r\n")


async def huge_head(call: Call) -> None:
    """More fields than anybody needs."""
    await call.write(b"HTTP/1.1 200 OK\r\n" + b"x-a: " + b"b" * 100_000 + b"\r\n\r\n")


def refusing(status: int) -> Any:
    """A server that takes no more, or has something broken behind it."""

    async def refuse(call: Call) -> None:
        await call.answer({"error": "no"}, status)

    return refuse


FAILURES = {
    "reset": reset_at_once, "head": reset_in_the_head, "body": reset_in_the_body, "stream": reset_after_the_head,
    "ssh": not_http, "huge": huge_head, **{str(status): refusing(status) for status in (429, 502, 503, 504)},
}  # fmt: skip


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("body", [BODY, STREAMED], ids=["whole", "streamed"])
@asynchronous
async def test_a_request_goes_on_elsewhere_when_a_server_fails_before_the_first_byte(failure: Any, body: Any) -> None:
    bad, good = ScriptedServer(failure), ScriptedServer(streamed if "stream" in body else whole)
    await bad.start()
    await good.start()
    async with serving(bad, good, policy=InOrder(bad, good)) as front:
        status, headers, answer = await front.post(CHAT, body)
        assert status == 200 and headers["x-preble-worker"] == good.worker
        assert len(bad.calls) == len(good.calls) == 1 and bad.calls[0].body == good.calls[0].body
        assert answer
        await front.settled()


@asynchronous
async def test_a_server_that_cannot_be_reached_is_passed_over() -> None:
    bad, good = ScriptedServer(whole), ScriptedServer(whole)
    async with serving(bad, good) as front:
        front.router.scheduler  # noqa: B018
        await bad.stop()
        for _ in range(4):
            status, headers, _ = await front.post(CHAT, BODY)
            assert status == 200 and headers["x-preble-worker"] == good.worker
        await front.settled()


@asynchronous
async def test_where_every_server_is_full_the_client_may_try_again_later() -> None:
    async with serving(ScriptedServer(refusing(429)), ScriptedServer(refusing(503))) as front:
        status, headers, body = await front.post(CHAT, BODY)
        assert status == 503 and headers["retry-after"] == "1" and b"at their bound" in body
        await front.settled()


@asynchronous
async def test_a_stream_that_breaks_off_ends_with_an_error_event() -> None:
    async def broken(call: Call) -> None:
        await call.stream(*chat_events("he", reason=None), end=False)
        call.reset()

    body = {**STREAMED, "tools": [{"type": "function", "function": {"name": "f"}}]}
    async with serving(ScriptedServer(broken)) as front:
        status, _, got = await front.post(CHAT, body)
        *events, error, end = events_of(got)
        assert status == 200 and events == chat_events("he", reason=None) and end is None
        assert error["error"]["code"] == "unavailable"
        await front.settled()


@pytest.mark.parametrize("body", [BODY, STREAMED], ids=["whole", "streamed"])
@asynchronous
async def test_a_client_that_leaves_takes_its_request_from_the_server(body: Any) -> None:
    async def slow(call: Call) -> None:
        if "stream" in body:
            await call.stream(*chat_events("he", reason=None), end=False)
        await asyncio.Event().wait()

    server = ScriptedServer(slow)
    async with serving(server) as front:
        asking = asyncio.ensure_future(front.post(CHAT, body))
        await until(lambda: server.calls, "the server has it")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.wait_for(server.calls[0].gone.wait(), 30.0)
        await front.settled()
        assert front.router.counters.cancelled == 1


@asynchronous
async def test_a_server_that_is_lost_before_it_answers_loses_the_request_to_another() -> None:
    async def never(call: Call) -> None:
        await asyncio.Event().wait()

    bad, good = ScriptedServer(never), ScriptedServer(whole)
    await bad.start()
    await good.start()
    async with serving(bad, good, policy=InOrder(bad, good)) as front:
        asking = asyncio.ensure_future(front.post(CHAT, BODY))
        await until(lambda: bad.calls, "the server has it")
        bad.awake.clear()  # nobody answers there when asked how it is
        status, headers, _ = await asking
        assert status == 200 and headers["x-preble-worker"] == good.worker
        await front.settled()


@asynchronous
async def test_keys_of_clients_stay_here_and_servers_get_their_own() -> None:
    async with serving(ScriptedServer(whole), options=ServerOptions(api_key="servers"), api_keys=["k" * 32]) as front:
        status, _, _ = await front.post(
            CHAT, BODY, {"authorization": "Bearer " + "k" * 32, "x-api-key": "k", "cookie": "c"}
        )
        (call,) = servers_calls(front)
        assert status == 200 and call.headers["authorization"] == "Bearer servers"
        assert not {"x-api-key", "cookie"} & call.headers.keys()


@asynchronous
async def test_without_keys_of_the_gateways_a_clients_key_is_for_the_server() -> None:
    async with serving(ScriptedServer(whole)) as front:
        await front.post(CHAT, BODY, {"authorization": "Bearer theirs"})
        assert servers_calls(front)[0].headers["authorization"] == "Bearer theirs"


@asynchronous
async def test_fields_of_one_connection_go_no_further() -> None:
    async def answer(call: Call) -> None:
        await call.answer(
            chat_answer(), headers="connection: keep-alive, x-hop\r\nx-hop: 1\r\nkeep-alive: timeout=5\r\n"
        )

    async with serving(ScriptedServer(answer)) as front:
        given = {"connection": "keep-alive, x-own", "x-own": "1", "te": "trailers", "accept-encoding": "gzip"}
        _, headers, _ = await front.post(CHAT, BODY, given)
        (call,) = servers_calls(front)
        assert not {"x-own", "te", "connection"} & call.headers.keys() and call.headers["accept-encoding"] == "identity"
        assert not {"x-hop", "keep-alive", "access-control-allow-origin"} & headers.keys()


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@asynchronous
async def test_the_rank_is_named_as_each_engine_wants_it(kind: str) -> None:
    server = ScriptedServer(whole, kind=kind, ranks=2)
    async with serving(server) as front:
        await until(lambda: len(front.router.fleet.workers) == 2, "both ranks are known")
        await until(lambda: all(w.state == "ready" for w in front.router.fleet.workers.values()), "they are ready")
        _, headers, _ = await front.post(CHAT, BODY, {"x-data-parallel-rank": "7"})
        rank = headers["x-preble-worker"].rpartition("/")[2]
        (call,) = server.calls
        if kind == "sglang":
            assert call.json == {**BODY, "routed_dp_rank": int(rank)}
        else:
            assert call.json == BODY and call.headers["x-data-parallel-rank"] == rank


@asynchronous
async def test_a_relayed_request_is_counted_as_any_other() -> None:
    async with serving(ScriptedServer(streamed)) as front:
        await front.post(CHAT, STREAMED)
        await front.settled()
        gateway = front.gateway
        text = (
            await asyncio.to_thread(
                gateway.metrics.render, gateway.router.scheduler, gateway.router.stats(), gateway.stats()
            )
        ).decode()
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        found = {name.partition("{")[0]: float(value) for name, value in lines.items()}
        assert found["preble_output_tokens_total"] == 3 and found["preble_prompt_tokens_total"] == 5
        assert found["preble_actual_cached_tokens_total"] == 2
        assert found["preble_time_to_first_token_seconds_count"] == 1
        assert found["preble_time_per_output_token_seconds_count"] == 1
        assert found["preble_request_prompt_tokens_sum"] == 5 and found["preble_request_output_tokens_sum"] == 3
        for at in ("gateway", "engine"):
            assert float(lines[f'preble_queue_seconds_count{{at="{at}",model="tiny"}}']) == 1
        assert front.router.counters.finished == 1 and front.router.counters.output_tokens == 3
        await gateway.live.tick()
        state = json.loads(gateway.live.state(None, {}))
        assert state["totals"]["answers"] == 1 and state["fleet"]["errors"] == 0.0
        assert state["fleet"]["hit"] == 2 / 5
        for name in ("first_token_p50", "seconds_per_token_p50"):
            assert state["fleet"][name] is not None, name


@asynchronous
async def test_an_answer_may_be_long_and_a_client_slow() -> None:
    size = 8 << 20

    async def long(call: Call) -> None:
        await call.write(STREAM_HEAD)
        for _ in range(size >> 16):
            await call.write(chunk(b"x" * (1 << 16)))
        await call.write(b"0\r\n\r\n")

    server = ScriptedServer(long)
    async with serving(server) as front, front.send(CHAT, STREAMED) as answer:
        got = 0
        async for part in answer.content.iter_chunked(1 << 16):
            got += len(part)
        assert got == size


@asynchronous
async def test_no_more_requests_are_at_a_server_than_its_options_allow() -> None:
    async def slow(call: Call) -> None:
        await asyncio.Event().wait()

    server = ScriptedServer(slow)
    async with serving(server, options=ServerOptions(max_requests=1), router_config=fast()) as front:
        asking = asyncio.ensure_future(front.post(CHAT, BODY))
        await until(lambda: server.calls, "the server has it")
        status, _, body = await front.post(CHAT, BODY)
        assert status == 503 and b"at their bound" in body
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await front.settled()


@pytest.mark.parametrize("asked", [{}, {"logprobs": True}], ids=["may go on", "may not"])
@asynchronous
async def test_a_body_is_held_for_as_long_as_it_may_be_sent_again(asked: Any) -> None:
    async def slow(call: Call) -> None:
        await call.stream(*chat_events("he", reason=None), end=False)
        await asyncio.Event().wait()

    body = {**STREAMED, **asked, "messages": [{"role": "user", "content": "x" * 200_000}]}
    async with serving(ScriptedServer(slow)) as front:
        async with front.send(CHAT, body) as answer:
            await answer.content.readany()
            used = front.gateway.bodies.bytes_used
            assert (used > 100_000) == (answer.headers["x-preble-mode"] == "relay-resumable") == (not asked)
        await front.settled()
