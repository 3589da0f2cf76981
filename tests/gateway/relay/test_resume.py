"""Streams that go on at another server: text exactly once, with real sockets; and the rules of what can go on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from preble.gateway.api.openai import COMPLETION_MAX_TOKENS
from preble.gateway.relay.body import read_body
from preble.gateway.relay.endpoints import ENDPOINTS
from preble.gateway.relay.relay import PATIENCE, Stall
from preble.gateway.relay.resume import (
    Emitted,
    can_resume,
    continuation,
    emitted_by,
    output_limit,
)
from preble.gateway.relay.stream import REMEMBERED_BYTES, PassingStream
from preble.gateway.relay.usage import usage_reader
from preble.gateway.text.tokenizing import TextCodec
from preble.transport.engine_servers.watch import ON_TIME_MIN, SIGNS_MIN, STALLED, UNSTARTED
from tests.support.gateway import make_tokenizer
from tests.support.relay import (
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
from tests.support.transport import asynchronous, fast

BY_PATH = {one.path: one for one in ENDPOINTS}
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES = [{"role": "user", "content": "count"}]
ASKED = {"model": "tiny", "messages": MESSAGES, "stream": True, "max_tokens": 10}


def then_broken(events: list[Any], how: str) -> Any:
    """A script: these events, and then the stream is lost."""

    async def script(call: Call) -> None:
        await call.stream(*events, end=False)
        if how == "half":
            await call.write(chunk(event(chat_events("lost", reason=None, opening=False)[0])[:20]))
        if how in ("reset", "half"):
            call.reset()
        elif how == "ended":
            await call.write(b"0\r\n\r\n")
        else:
            await asyncio.Event().wait()

    return script


def text_of(events: list[Any]) -> str:
    """All text of a chat's events."""
    return "".join(choice["delta"].get("content") or "" for one in events if one for choice in one["choices"])


@pytest.mark.parametrize("how", ["reset", "half", "ended", "silent"])
@asynchronous
async def test_a_chat_goes_on_elsewhere_with_its_text_exactly_once(how: str) -> None:
    async def goes_on(call: Call) -> None:
        await call.stream(*chat_events(" three", " four", name="chatcmpl-2"), usage_event(prompt=9, output=3))

    bad = ScriptedServer(then_broken(chat_events("one", " two", reason=None), how))
    good = ScriptedServer(goes_on)
    await bad.start()
    await good.start()
    async with serving(
        bad, good, policy=InOrder(bad, good), stalled_after_seconds=0.3 if how == "silent" else 30
    ) as front:
        asked = {**ASKED, "stream_options": {"include_usage": True}}
        status, headers, body = await front.post(CHAT, asked)
        assert status == 200 and headers["x-preble-mode"] == "relay-resumable"
        events = events_of(body)
        assert text_of(events) == "one two three four" and events[-1] is None
        assert {one["id"] for one in events[:-1]} == {"chatcmpl-1"}
        assert sum(bool(c["delta"].get("role")) for one in events[:-1] for c in one["choices"]) == 1
        assert [c["finish_reason"] for one in events[:-1] for c in one["choices"] if c["finish_reason"]] == ["stop"]
        assert events[-2]["usage"]["prompt_tokens"] == 7 and events[-2]["usage"]["completion_tokens"] == 5
        (call,) = good.calls
        assert call.json == {
            **asked,
            "max_tokens": 8,
            "messages": [*MESSAGES, {"role": "assistant", "content": "one two"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        }
        await front.settled()
        assert front.router.counters.resumed == 1


class HungServer(ScriptedServer):
    """One whose engine says for ever that it runs a request and has made as many tokens as before."""

    @property
    def facts(self) -> dict[str, Any]:
        work = {"num_requests_running": 1, "generation_tokens_total": 77}
        lines = [f'vllm:{name}{{engine="0"}} {value}' for name, value in work.items()]
        found = super().facts
        return {**found, "/metrics": found["/metrics"] + "\n".join([*lines, ""]).encode()}


@asynchronous
async def test_a_chat_goes_on_elsewhere_as_soon_as_its_engine_is_known_to_hang() -> None:
    """Long before `stalled_after_seconds`, which is 30 here."""

    async def goes_on(call: Call) -> None:
        await call.stream(*chat_events(" two"))

    bad = HungServer(then_broken(chat_events("one", reason=None), "silent"), kind="vllm")
    good = ScriptedServer(goes_on, kind="vllm")
    await bad.start()
    await good.start()
    config = fast(hung_after_seconds=0.3)
    async with serving(bad, good, policy=InOrder(bad, good), router_config=config) as front:
        stuck = front.router.fleet.workers[bad.url]
        for _ in range(SIGNS_MIN):
            stuck.link.saw_output()  # it has worked before
        _, _, body = await front.post(CHAT, ASKED)
        assert text_of(events_of(body)) == "one two"
        assert (stuck.state, stuck.why) == ("suspect", STALLED)
        await asyncio.wait_for(bad.calls[0].gone.wait(), 30.0)
        await front.settled()
        assert front.router.counters.resumed == 1


@pytest.mark.parametrize("stream", [True, False])
@asynchronous
async def test_a_request_that_an_engine_never_begins_is_asked_for_elsewhere(stream: bool) -> None:
    """Long before four times `stalled_after_seconds`, and also where not even a head came."""

    async def never(call: Call) -> None:
        await asyncio.Event().wait()

    async def answers(call: Call) -> None:
        await (call.stream(*chat_events("one")) if stream else call.answer(chat_answer("one")))

    bad, good = HungServer(never, kind="vllm"), ScriptedServer(answers, kind="vllm")
    await bad.start()
    await good.start()
    config = fast(hung_after_seconds=0.1)
    async with serving(bad, good, policy=InOrder(bad, good), router_config=config) as front:
        stuck = front.router.fleet.workers[bad.url]
        for _ in range(SIGNS_MIN):
            stuck.link.saw_output()  # it has worked before
        for n in range(ON_TIME_MIN):
            stuck.link.expects(f"before-{n}", 1.0)
            stuck.link.first_token_came(f"before-{n}")
        status, _, body = await front.post(CHAT, {**ASKED, "stream": stream})
        assert status == 200 and b"one" in body
        assert (stuck.state, stuck.why) == ("suspect", UNSTARTED)
        await asyncio.wait_for(bad.calls[0].gone.wait(), 30.0)
        await front.settled()


@asynchronous
async def test_a_stream_goes_on_as_often_as_servers_are_lost() -> None:
    async def last(call: Call) -> None:
        await call.stream(*chat_events(" c", opening=False))

    servers = [
        ScriptedServer(then_broken(chat_events("a", reason=None), "reset")),
        ScriptedServer(then_broken(chat_events(" b", reason=None, name="chatcmpl-2"), "reset")),
        ScriptedServer(last),
    ]
    for server in servers:
        await server.start()
    async with serving(*servers, policy=InOrder(*servers)) as front:
        _, _, body = await front.post(CHAT, ASKED)
        assert text_of(events_of(body)) == "a b c"
        assert servers[2].calls[0].json["messages"][-1]["content"] == "a b"
        assert servers[2].calls[0].json["max_tokens"] == 8
        await front.settled()


@asynchronous
async def test_a_server_that_is_lost_to_the_router_loses_its_streams_too() -> None:
    async def goes_on(call: Call) -> None:
        await call.stream(*chat_events(" two"))

    bad, good = ScriptedServer(then_broken(chat_events("one", reason=None), "silent")), ScriptedServer(goes_on)
    await bad.start()
    await good.start()
    async with serving(bad, good, policy=InOrder(bad, good)) as front, front.send(CHAT, ASKED) as answer:
        await answer.content.readany()
        await front.router.remove_worker(bad.url)
        assert text_of(events_of(await answer.read())).endswith(" two")
        await asyncio.wait_for(bad.calls[0].gone.wait(), 30.0)


@asynchronous
async def test_a_stream_too_long_to_be_remembered_is_left_to_a_server_that_is_lost_to_the_router() -> None:
    ends = asyncio.Event()
    events = chat_events(*["x" * (64 << 10)] * 17, reason=None)
    last = chat_events(" last", opening=False)

    async def script(call: Call) -> None:
        await call.stream(*events, end=False)
        await ends.wait()
        await call.write(b"".join(chunk(event(one)) for one in (*last, b"[DONE]")) + b"0\r\n\r\n")

    server = ScriptedServer(script)
    await server.start()
    async with serving(server) as front, front.send(CHAT, ASKED) as answer:
        assert answer.headers["x-preble-mode"] == "relay-resumable"
        size = sum(len(event(one)) for one in events)
        begun = await answer.content.readexactly(size)
        assert size > REMEMBERED_BYTES
        await front.router.remove_worker(server.url)
        ends.set()
        assert events_of(begun + await answer.read()) == [*events, *last, None]


@asynchronous
async def test_a_stream_that_is_remembered_no_more_may_be_silent_for_longer() -> None:
    class Silent:
        is_paused, error = False, None
        last_at = asyncio.get_running_loop().time()

        def break_off(self, error: Exception) -> None:
            self.error = str(error)

    answer: Any = Silent()
    stream = PassingStream("chat", usage_reader(BY_PATH[CHAT], True), resumable=True)
    stall = Stall(answer, 1000.0, stream)
    stream.take(event(b"x" * (REMEMBERED_BYTES + 1)))
    for factor, error in ((1.0, None), (PATIENCE, "silent for 4000 s")):
        stall.cancel()
        answer.last_at = asyncio.get_running_loop().time() - 1000.0 * factor
        stall._look()
        assert answer.error == error
    stall.cancel()


@asynchronous
async def test_events_of_several_tokens_are_counted_by_the_tokenizer(tmp_path: Path) -> None:
    codec = TextCodec(make_tokenizer(tmp_path), threads=1)
    try:
        text = "one two three four five"
        tokens = len(await codec.encode(text, special_tokens=False))
        assert tokens > 2

        async def goes_on(call: Call) -> None:
            await call.stream(*chat_events(" six", opening=False), usage_event(prompt=20 + tokens, output=1))

        bad = ScriptedServer(then_broken(chat_events(text, reason=None), "reset"))
        good = ScriptedServer(goes_on)
        await bad.start()
        await good.start()
        async with serving(bad, good, policy=InOrder(bad, good), codec=codec) as front:
            _, _, body = await front.post(
                CHAT, {**ASKED, "max_tokens": tokens + 2, "stream_options": {"include_usage": True}}
            )
            assert good.calls[0].json["max_tokens"] == 2
            usage = events_of(body)[-2]["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (20, tokens + 1)
            _, _, body = await front.post(CHAT, {**ASKED, "max_tokens": tokens})
            assert len(good.calls) == 1, "all tokens have come"
            assert events_of(body)[-2]["choices"][0]["finish_reason"] == "length"
            await front.settled()
    finally:
        codec.close()


@pytest.mark.parametrize("ids", [[5], None], ids=["named", "not named"])
@asynchronous
async def test_a_prompt_of_ids_goes_on_only_where_the_server_names_those_that_came(ids: list[int] | None) -> None:
    line: Any = {"text": " b", "meta_info": {"id": "r", "prompt_tokens": 2, "completion_tokens": 1}}
    if ids is not None:
        line["output_ids"] = ids

    async def whole(call: Call) -> None:
        await call.stream(line)

    async with serving(ScriptedServer(whole)) as front:
        _, headers, _ = await front.post(GENERATE, {"input_ids": [1, 2], "stream": True})
        assert headers["x-preble-mode"] == ("relay" if ids is None else "relay-resumable")
        _, headers, _ = await front.post(GENERATE, {"text": "a", "stream": True})
        assert headers["x-preble-mode"] == "relay-resumable"
        await front.settled()


@asynchronous
async def test_nothing_is_asked_again_when_all_tokens_have_come() -> None:
    bad = ScriptedServer(then_broken(chat_events("one", "two", reason=None), "reset"))
    async with serving(bad) as front:
        _, _, body = await front.post(CHAT, {**ASKED, "max_tokens": 2})
        events = events_of(body)
        assert text_of(events) == "onetwo" and events[-2]["choices"][0]["finish_reason"] == "length"
        assert len(bad.calls) == 1 and events[-1] is None
        await front.settled()


@asynchronous
async def test_a_server_that_is_lost_after_the_last_token_has_ended_its_choice() -> None:
    """The event that ends a choice waits for the usage, which the gateway asked for; it is not lost with the server."""
    bad = ScriptedServer(then_broken(chat_events("one", " two"), "reset"))
    async with serving(bad) as front:
        _, _, body = await front.post(CHAT, ASKED)
        events = events_of(body)
        assert text_of(events) == "one two" and events[-1] is None
        assert [choice["finish_reason"] for one in events[:-1] for choice in one["choices"]][-1] == "stop"
        assert len(bad.calls) == 1
        await front.settled()


@asynchronous
async def test_a_completion_goes_on_from_its_text() -> None:
    def text_event(text: str, name: str, reason: str | None = None) -> Any:
        choice = {"index": 0, "text": text, "finish_reason": reason}
        return {"id": name, "object": "text_completion", "created": 1, "model": "tiny", "choices": [choice]}

    async def goes_on(call: Call) -> None:
        await call.stream(text_event(" d", "cmpl-2", "length"))

    bad = ScriptedServer(then_broken([text_event(" b", "cmpl-1"), text_event(" c", "cmpl-1")], "reset"))
    good = ScriptedServer(goes_on)
    await bad.start()
    await good.start()
    async with serving(bad, good, policy=InOrder(bad, good)) as front:
        body = {"prompt": "a", "stream": True, "max_tokens": 3}
        _, _, got = await front.post(COMPLETIONS, body)
        events = events_of(got)[:-1]
        assert "".join(one["choices"][0]["text"] for one in events) == " b c d"
        assert {one["id"] for one in events} == {"cmpl-1"}
        assert good.calls[0].json["prompt"] == "a b c" and good.calls[0].json["max_tokens"] == 1


@pytest.mark.parametrize(
    ("path", "body", "left"),
    [
        (COMPLETIONS, {"prompt": "a"}, {"max_tokens": 14}),
        (COMPLETIONS, {"prompt": "a", "max_tokens": None}, {"max_tokens": None}),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 5}, {"max_tokens": 3}),
        (CHAT, {"messages": MESSAGES}, {}),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 9}, {"max_completion_tokens": 7}),
        (GENERATE, {"text": "a"}, {"max_new_tokens": 126}),
        (GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": None}}, {"max_new_tokens": None}),
    ],
)
def test_what_goes_on_is_bound_as_the_whole_was_also_by_the_engines_own_limits(path: str, body: Any, left: Any) -> None:
    read = read_body(json.dumps({**body, "stream": True}).encode(), BY_PATH[path])
    assert can_resume(read)
    kind = read.endpoint.kind
    whole = next((limit + 2 for limit in left.values() if limit is not None), None)
    assert output_limit(read) == whole
    changes = continuation(read, Emitted(kind, "b c", [5, 6], 2))
    assert changes is not None
    further = json.loads(read.edited(changes))
    found = further["sampling_params"] if kind == "generate" else further
    assert {name: limit for name, limit in found.items() if name.startswith("max_")} == left


@asynchronous
async def test_a_completion_without_a_limit_is_whole_with_as_many_tokens_as_engines_give_it() -> None:
    event_of = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "tiny"}
    events = [{**event_of, "choices": [{"index": 0, "text": " b", "finish_reason": None}]}] * COMPLETION_MAX_TOKENS
    bad = ScriptedServer(then_broken(events, "reset"))
    async with serving(bad) as front:
        _, _, got = await front.post(COMPLETIONS, {"prompt": "a", "stream": True})
        assert events_of(got)[-2]["choices"][0]["finish_reason"] == "length" and len(bad.calls) == 1
        await front.settled()


@asynchronous
async def test_a_stream_that_only_says_that_it_ends_has_not_ended() -> None:
    async def goes_on(call: Call) -> None:
        await call.stream(*chat_events(" three", opening=False))

    bad = ScriptedServer(then_broken(chat_events("data: [DONE] two", reason=None), "ended"))
    good = ScriptedServer(goes_on)
    await bad.start()
    await good.start()
    async with serving(bad, good, policy=InOrder(bad, good)) as front:
        _, _, body = await front.post(CHAT, ASKED)
        assert text_of(events_of(body)) == "data: [DONE] two three"
        await front.settled()


@asynchronous
async def test_a_usage_that_has_passed_is_not_said_again_at_the_end() -> None:
    events = [*chat_events("one", " two"), usage_event(prompt=9, output=2)]
    bad = ScriptedServer(then_broken(events, "reset"))
    async with serving(bad) as front:
        _, _, body = await front.post(CHAT, {**ASKED, "stream_options": {"include_usage": True}})
        assert events_of(body) == [*events, None] and len(bad.calls) == 1
        await front.settled()


@pytest.mark.parametrize("prompt", [{"text": "a"}, {"input_ids": [1, 2]}], ids=["text", "ids"])
@asynchronous
async def test_generate_goes_on_with_all_that_came_in_each_event(prompt: Any) -> None:
    def line(text: str, ids: list[int], name: str, reason: Any = None) -> Any:
        meta = {"id": name, "prompt_tokens": 2, "completion_tokens": len(ids), "cached_tokens": 0}
        return {"text": text, "output_ids": ids, "meta_info": {**meta, "finish_reason": reason}}

    async def goes_on(call: Call) -> None:
        await call.stream(line(" d", [7], "r2"), line(" d e", [7, 8], "r2", {"type": "length", "length": 2}))

    bad = ScriptedServer(then_broken([line(" b", [5], "r1"), line(" b c", [5, 6], "r1")], "reset"))
    good = ScriptedServer(goes_on)
    await bad.start()
    await good.start()
    async with serving(bad, good, policy=InOrder(bad, good)) as front:
        _, headers, got = await front.post(
            GENERATE, {**prompt, "stream": True, "sampling_params": {"max_new_tokens": 4}}
        )
        assert headers["x-preble-mode"] == "relay-resumable"
        last = events_of(got)[-2]
        assert last["text"] == " b c d e" and last["output_ids"] == [5, 6, 7, 8]
        assert last["meta_info"]["completion_tokens"] == 4 and last["meta_info"]["id"] == "r1"
        assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
        further = good.calls[0].json
        assert further["sampling_params"] == {"max_new_tokens": 2}
        assert further.get("text") == ("a b c" if "text" in prompt else None)
        assert further.get("input_ids") == ([1, 2, 5, 6] if "input_ids" in prompt else None)


@pytest.mark.parametrize(
    ("path", "body", "can"),
    [
        (CHAT, ASKED, True),
        (CHAT, {**ASKED, "temperature": 0.5, "seed": 3, "stop": ["x"], "tools": None}, True),
        (CHAT, {**ASKED, "stream": False}, False),
        (CHAT, {**ASKED, "n": 2}, False),
        (CHAT, {**ASKED, "tools": [{"type": "function"}]}, False),
        (CHAT, {**ASKED, "logprobs": True}, False),
        (CHAT, {**ASKED, "response_format": {"type": "json_object"}}, False),
        (CHAT, {**ASKED, "presence_penalty": 1.0}, False),
        (CHAT, {**ASKED, "something_new": 1}, False),
        (CHAT, {**ASKED, "stream_options": {"continuous_usage_stats": True}}, False),
        (COMPLETIONS, {"prompt": "a", "stream": True}, True),
        *((COMPLETIONS, {"prompt": "a", "stream": True, "max_tokens": odd}, False) for odd in (100.0, "100", True)),
        *((CHAT, {**ASKED, "max_completion_tokens": odd}, False) for odd in (100.0, "100", [])),
        (GENERATE, {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 100.0}}, False),
        (COMPLETIONS, {"prompt": ["a", "b"], "stream": True}, False),
        (COMPLETIONS, {"prompt": [1, 2], "stream": True}, False),
        (COMPLETIONS, {"prompt": "a", "stream": True, "echo": True}, False),
        (GENERATE, {"text": "a", "stream": True}, True),
        (GENERATE, {"text": ["a"], "stream": True}, False),
        (GENERATE, {"input_ids": [1, 2], "stream": True, "sampling_params": {"top_k": 3}}, True),
        (GENERATE, {"input_ids": [[1], [2]], "stream": True}, False),
        (GENERATE, {"text": "a", "stream": True, "sampling_params": {"json_schema": "{}"}}, False),
        (GENERATE, {"text": "a", "stream": True, "return_logprob": True}, False),
        ("/v1/responses", {"input": "a", "stream": True}, False),
    ],
)
def test_only_plain_text_can_go_on(path: str, body: Any, can: bool) -> None:
    assert can_resume(read_body(json.dumps(body).encode(), BY_PATH[path])) == can


@pytest.mark.parametrize(
    "delta",
    [{"tool_calls": [{"index": 0}]}, {"reasoning_content": "hm"}, {"content": 3}],
    ids=["tool", "reasoning", "odd"],
)
def test_a_stream_that_held_more_than_text_cannot_go_on(delta: Any) -> None:
    events = [*chat_events("a", reason=None), {"choices": [{"index": 0, "delta": delta}]}]
    assert emitted_by("chat", b"".join(map(event, events))) is None


@asynchronous
async def test_a_stream_that_cannot_go_on_ends_with_an_error() -> None:
    broken = then_broken(
        [*chat_events("a", reason=None), {"choices": [{"index": 0, "delta": {"refusal": "x"}}]}], "reset"
    )
    async with serving(ScriptedServer(broken), ScriptedServer(broken)) as front:
        status, _, body = await front.post(CHAT, ASKED)
        *_, error, end = events_of(body)
        assert status == 200 and error["error"]["code"] == "worker_lost" and end is None
        assert sum(len(server.calls) for server in front.servers) == 1
        await front.settled()
