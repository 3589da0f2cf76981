"""What answers say of themselves, read in passing: the shapes of both engines, cut anywhere."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from preble.gateway.relay import usage as usage_module
from preble.gateway.relay.endpoints import ENDPOINTS
from preble.gateway.relay.usage import UsageReader, usage_reader

BY_PATH = {endpoint.path: endpoint for endpoint in ENDPOINTS}


def event(content: Any, name: str = "") -> bytes:
    """One server-sent event as pydantic and orjson write it."""
    head = f"event: {name}\n" if name else ""
    text = content if isinstance(content, str) else json.dumps(content, separators=(",", ":"))
    return f"{head}data: {text}\n\n".encode()


def chunk(choices: list[Any], **more: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": choices,
        **more,
    }


def delta(text: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": reason, **more}


USAGE = {"prompt_tokens": 11, "total_tokens": 14, "completion_tokens": 3}
CACHED = {**USAGE, "prompt_tokens_details": {"cached_tokens": 8}}
TRICK = 'a"usage":{"prompt_tokens":99},"finish_reason":"no" {"choices":[]}\n\ndata: '


@dataclass(frozen=True)
class Case:
    """An answer and what it says: (prompt, cached, output tokens), finish reasons."""

    path: str
    events: tuple[bytes, ...]
    counts: tuple[int | None, int | None, int | None]
    reasons: tuple[str, ...]
    first: int = 0  # the event with which output has begun
    usage_at: int | None = None  # the event that holds nothing but the usage
    answer_id: str | None = None


STREAMS = {
    "vllm chat": Case(
        "/v1/chat/completions",
        (
            event(
                chunk(
                    [
                        {
                            "index": 0,
                            "delta": {"role": "assistant", "content": ""},
                            "logprobs": None,
                            "finish_reason": None,
                        }
                    ]
                )
            ),
            event(chunk([delta(TRICK)])),
            event(chunk([delta("b", "stop", stop_reason=None)])),
            event(chunk([], usage=CACHED)),
            event("[DONE]"),
        ),
        (11, 8, 3),
        ("stop",),
        usage_at=3,
    ),
    "sglang chat": Case(
        "/v1/chat/completions",
        (
            event(chunk([delta("")], usage=None)),
            event(chunk([delta("a\n\ndata: b")], usage=None)),
            event(chunk([delta("", "length", matched_stop=None)], usage=None)),
            event(chunk([], usage={**USAGE, "prompt_tokens_details": None, "reasoning_tokens": 0})),
            event("[DONE]"),
        ),
        (11, None, 3),
        ("length",),
        usage_at=3,
    ),
    "usage with every event": Case(
        "/v1/completions",
        (
            event(
                {
                    "id": "cmpl-1",
                    "choices": [{"index": 0, "text": "a", "finish_reason": None}],
                    "usage": {**USAGE, "completion_tokens": 1},
                }
            ),
            event(
                {
                    "id": "cmpl-1",
                    "choices": [{"index": 0, "text": "b", "finish_reason": "stop"}],
                    "usage": {**USAGE, "completion_tokens": 2},
                }
            ),
            event({"id": "cmpl-1", "choices": [], "usage": CACHED}),
            event("[DONE]"),
        ),
        (11, 8, 3),
        ("stop",),
        usage_at=2,
    ),
    "no usage": Case(
        "/v1/completions",
        (event({"id": "cmpl-1", "choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}), event("[DONE]")),
        (None, None, None),
        ("length",),
    ),
    "generate": Case(
        "/generate",
        tuple(
            event(
                {
                    "text": "ab"[:n],
                    "output_ids": [1, 2][:n],
                    "meta_info": {
                        "id": "r",
                        "finish_reason": {"type": "length", "length": 2} if n == 2 else None,
                        "prompt_tokens": 11,
                        "weight_version": "default",
                        "completion_tokens": n,
                        "cached_tokens": 8,
                        "e2e_latency": 0.1,
                    },
                }
            )
            for n in (1, 2)
        )
        + (event("[DONE]"),),
        (11, 8, 2),
        ("length",),
    ),
    "generate, two choices": Case(
        "/generate",
        tuple(
            event(
                {
                    "text": "a",
                    "output_ids": [1],
                    "index": index,
                    "meta_info": {
                        "id": "r",
                        "finish_reason": {"type": "stop", "matched": 2} if last else None,
                        "prompt_tokens": 11,
                        "completion_tokens": 2 if last else 1,
                        "cached_tokens": index,
                    },
                }
            )
            for last in (False, True)
            for index in (0, 1)
        )
        + (event("[DONE]"),),
        (22, 1, 4),
        ("stop", "stop"),
    ),
    "responses": Case(
        "/v1/responses",
        (
            event(
                {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress", "usage": None}},
                "response.created",
            ),
            event({"type": "response.output_item.added", "output_index": 0}, "response.output_item.added"),
            event({"type": "response.output_text.delta", "delta": "a"}, "response.output_text.delta"),
            event(
                {
                    "type": "response.completed",
                    "response": {
                        "id": "resp_1",
                        "status": "completed",
                        "usage": {
                            "input_tokens": 11,
                            "input_tokens_details": {"cached_tokens": 8},
                            "output_tokens": 3,
                            "total_tokens": 14,
                        },
                    },
                },
                "response.completed",
            ),
        ),
        (11, 8, 3),
        ("completed",),
        first=1,
        answer_id="resp_1",
    ),
    "messages": Case(
        "/v1/messages",
        (
            event(
                {
                    "type": "message_start",
                    "message": {
                        "id": "msg_1",
                        "role": "assistant",
                        "content": [],
                        "stop_reason": None,
                        "usage": {"input_tokens": 3, "output_tokens": 0, "cache_read_input_tokens": 8},
                    },
                },
                "message_start",
            ),
            event(
                {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
                "content_block_start",
            ),
            event(
                {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
                "content_block_delta",
            ),
            event(
                {
                    "type": "message_delta",
                    "delta": {"stop_reason": "end_turn"},
                    "usage": {"input_tokens": 3, "output_tokens": 3, "cache_read_input_tokens": 8},
                },
                "message_delta",
            ),
            event({"type": "message_stop"}, "message_stop"),
        ),
        (11, 8, 3),
        ("end_turn",),
        first=1,
    ),
}

WHOLE = {
    "chat": (
        "/v1/chat/completions",
        {
            "id": "chatcmpl-1",
            "choices": [{"index": 0, "message": {"content": TRICK}, "finish_reason": "tool_calls"}],
            "usage": CACHED,
        },
        (11, 8, 3),
        ("tool_calls",),
    ),
    "completions, two choices": (
        "/v1/completions",
        {
            "id": "cmpl-1",
            "choices": [{"text": "a", "finish_reason": "stop"}, {"text": "b", "finish_reason": "length"}],
            "usage": USAGE,
        },
        (11, None, 3),
        ("stop", "length"),
    ),
    "generate": (
        "/generate",
        {
            "text": "a",
            "meta_info": {
                "prompt_tokens": 11,
                "completion_tokens": 3,
                "cached_tokens": 8,
                "finish_reason": {"type": "stop"},
            },
        },
        (11, 8, 3),
        ("stop",),
    ),
    "generate, two choices": (
        "/generate",
        [
            {
                "text": "a",
                "meta_info": {
                    "prompt_tokens": 11,
                    "completion_tokens": 1,
                    "cached_tokens": 8,
                    "finish_reason": {"type": "abort"},
                },
            }
        ]
        * 2,
        (22, 16, 2),
        ("abort", "abort"),
    ),
    "responses": (
        "/v1/responses",
        {
            "id": "resp_1",
            "status": "completed",
            "output": [],
            "usage": {"input_tokens": 11, "input_tokens_details": {"cached_tokens": 8}, "output_tokens": 3},
        },
        (11, 8, 3),
        ("completed",),
    ),
    "messages": (
        "/v1/messages",
        {
            "id": "msg_1",
            "content": [],
            "stop_reason": "max_tokens",
            "usage": {"input_tokens": 3, "output_tokens": 3, "cache_read_input_tokens": 8},
        },
        (11, 8, 3),
        ("max_tokens",),
    ),
    "embeddings": (
        "/v1/embeddings",
        {"id": "e", "data": [], "usage": {"prompt_tokens": 11, "total_tokens": 11}},
        (11, None, None),
        (),
    ),
    "an error": ("/v1/chat/completions", {"error": {"message": "no", "code": 400}}, (None, None, None), ()),
    "no object": ("/v1/rerank", [1, None, "x"], (None, None, None), ()),
}


def counts(reader: UsageReader) -> tuple[int | None, int | None, int | None]:
    return reader.prompt_tokens, reader.cached_tokens, reader.output_tokens


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("remove", [False, True])
def test_a_stream_cut_at_any_byte_says_the_same(name: str, remove: bool) -> None:
    case = STREAMS[name]
    answer = b"".join(case.events)
    wanted = b"".join(one for i, one in enumerate(case.events) if not (remove and i == case.usage_at))
    for cut in range(len(answer) + 1):
        reader = usage_reader(BY_PATH[case.path], True, remove_usage=remove)
        passed = reader.feed(answer[:cut]) + reader.feed(answer[cut:]) + reader.end()
        assert passed == wanted, cut
        assert (counts(reader), reader.finish_reasons, reader.answer_id) == (
            case.counts,
            case.reasons,
            case.answer_id,
        ), cut
        assert reader.first_token


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_byte_by_byte_says_the_same_and_is_never_changed(name: str) -> None:
    case = STREAMS[name]
    reader = usage_reader(BY_PATH[case.path], True)
    for one in b"".join(case.events):
        assert reader.feed(bytes([one])) == bytes([one])
    assert reader.end() == b""
    assert (counts(reader), reader.finish_reasons) == (case.counts, case.reasons)


@pytest.mark.parametrize("name", STREAMS)
def test_output_has_begun_with_the_first_event_that_an_engine_sends_for_it(name: str) -> None:
    case = STREAMS[name]
    reader = usage_reader(BY_PATH[case.path], True)
    seen = []
    for one in case.events:
        reader.feed(one)
        seen.append(reader.first_token)
    assert seen.index(True) == case.first


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_answer_says_what_it_used(name: str) -> None:
    path, content, expected, reasons = WHOLE[name]
    answer = json.dumps(content).encode()
    for cut in range(0, len(answer), 7):
        reader = usage_reader(BY_PATH[path], False)
        assert reader.feed(answer[:cut]) + reader.feed(answer[cut:]) + reader.end() == answer
        assert (counts(reader), reader.finish_reasons, reader.first_token) == (expected, reasons, False)


def test_of_a_long_answer_the_tail_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_module, "WHOLE_BYTES_MAX", 1000)
    content = {"choices": [{"message": {"content": "x" * 40_000}, "finish_reason": "stop"}], "usage": CACHED}
    answer = json.dumps(content).encode()
    reader = usage_reader(BY_PATH["/v1/chat/completions"], False)
    for at in range(0, len(answer), 300):
        reader.feed(answer[at : at + 300])
        assert sum(map(len, reader._whole)) <= max(1000, usage_module.TAIL_BYTES)
    reader.end()
    assert counts(reader) == (11, 8, 3)


def test_an_event_without_end_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_module, "EVENT_BYTES_MAX", 100)
    for remove in (False, True):
        reader = usage_reader(BY_PATH["/v1/chat/completions"], True, remove_usage=remove)
        passed = b"".join(reader.feed(b"data: " + b"x" * 50) for _ in range(500)) + reader.end()
        assert passed == (b"data: " + b"x" * 50) * 500
        assert len(reader._held) <= usage_module.TAIL_BYTES + 56


@pytest.mark.parametrize("ends", ["\r\n\r\n", "\n\n"])
def test_both_ends_of_lines_are_ends(ends: str) -> None:
    answer = b"".join(STREAMS["vllm chat"].events).replace(b"\n\n", ends.encode())
    reader = usage_reader(BY_PATH["/v1/chat/completions"], True, remove_usage=True)
    passed = b"".join(reader.feed(bytes([one])) for one in answer) + reader.end()
    assert passed.count(ends.encode()) == 4 and b'"usage":{' not in passed
    assert counts(reader) == (11, 8, 3)


def test_the_fingerprint_of_a_removed_usage_event_goes_where_it_would_have_been() -> None:
    """vLLM writes it into its last event, which is the usage where that is asked for."""
    ends = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"b"},"finish_reason":"stop"}]}\n\n'
    usage = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":3},"system_fingerprint":"vllm-0.32.0-1"}\n\n'
    begins = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
    answer = begins + ends + usage + b"data: [DONE]\n\n"
    wanted = begins + ends.replace(b"}\n\n", b',"system_fingerprint":"vllm-0.32.0-1"}\n\n') + b"data: [DONE]\n\n"
    for cut in range(len(answer) + 1):
        reader = usage_reader(BY_PATH["/v1/chat/completions"], True, remove_usage=True)
        assert reader.feed(answer[:cut]) + reader.feed(answer[cut:]) + reader.end() == wanted, cut
        assert (reader.prompt_tokens, reader.finish_reasons) == (3, ("stop",))


def test_an_event_that_ends_a_choice_is_passed_on_with_the_next_one_or_at_the_end() -> None:
    ends = b'data: {"choices":[{"index":0,"finish_reason":"stop"}]}\n\n'
    reader = usage_reader(BY_PATH["/v1/chat/completions"], True, remove_usage=True)
    assert (reader.feed(ends), reader.feed(ends)) == (b"", ends)
    assert reader.end() == ends and reader.finish_reasons == ("stop", "stop")


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("remove", [False, True])
def test_events_that_come_whole_say_the_same_wherever_one_is_cut(name: str, remove: bool) -> None:
    case = STREAMS[name]
    wanted = b"".join(one for i, one in enumerate(case.events) if not (remove and i == case.usage_at))
    for number, broken in enumerate(case.events):
        for cut in range(len(broken)):
            parts = [*case.events[:number], broken[:cut], broken[cut:], *case.events[number + 1 :]]
            reader = usage_reader(BY_PATH[case.path], True, remove_usage=remove)
            assert b"".join([*map(reader.feed, parts), reader.end()]) == wanted, (number, cut)
            found = counts(reader), reader.finish_reasons, reader.answer_id
            assert found == (case.counts, case.reasons, case.answer_id), (number, cut)


@pytest.mark.parametrize("colon", [b":", b": "])
def test_events_with_a_token_and_nothing_else_pass_without_being_decoded(
    colon: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[bytes] = []
    monkeypatch.setattr(usage_module, "_json_of", decoded.append)
    token = b'data: {"choices":[{"index":0,"finish_reason"%bnull}],"usage"%bnull}\n\n' % (colon, colon)
    last = b'data: {"choices":[{"index":0,"finish_reason":null},{"index":1,"finish_reason":"stop"}]}\n\n'
    reader = usage_reader(BY_PATH["/v1/chat/completions"], True)
    for one in [token] * 5 + [token * 3, last, token]:
        assert reader.feed(one) == one
    assert decoded == [last.removesuffix(b"\n\n")] and reader.first_token


def test_of_a_generation_only_the_first_and_the_latest_counts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    real = usage_module._json_of
    decoded: list[bytes] = []

    def json_of(data: bytes) -> Any:
        decoded.append(data)
        return real(data)

    monkeypatch.setattr(usage_module, "_json_of", json_of)
    meta = '{"text":"a","meta_info":{"prompt_tokens":7,"completion_tokens":%d,"cached_tokens":4,"finish_reason":null}}'
    reader = usage_reader(BY_PATH["/generate"], True)
    for count in range(1, 10):
        reader.feed(event(meta % count))
        assert (reader.prompt_tokens, reader.cached_tokens) == (7, 4)
    for part in (b"data: [DO", b"NE]\n\n"):
        reader.feed(part)
    reader.end()
    assert counts(reader) == (7, 4, 9) and len(decoded) == 2
