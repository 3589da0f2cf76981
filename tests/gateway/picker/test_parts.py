"""Messages that are read from their bytes, beside what protobuf reads of the same, and parts that pass unread."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from preble.gateway.picker.exchange import PickExchange
from preble.gateway.picker.messages import FULL_DUPLEX, Metadata, ProcessingRequest, ProcessingResponse, said_by
from preble.gateway.picker.parts import PART_BYTES, PlainParts, Said, passed_part, read_said
from tests.support.picker import STREAMED, body, picking, request_headers, response_headers
from tests.support.relay import ScriptedServer, chat_events, event, usage_event
from tests.support.transport import asynchronous

names = st.text(alphabet="abc-:é", max_size=8)
values = st.one_of(st.text(alphabet="xyzé 1", max_size=12), st.binary(max_size=200))


@st.composite
def requests(draw: Any) -> Any:
    """A message of a data plane's."""
    message = ProcessingRequest()
    kind = draw(
        st.sampled_from(["request_headers", "response_headers", "request_body", "response_body", "trailers", ""])
    )
    if kind.endswith("headers"):
        head = getattr(message, kind)
        head.SetInParent()
        for name, value in draw(st.lists(st.tuples(names, values), max_size=4)):
            place = "value" if isinstance(value, str) else "raw_value"
            head.headers.headers.add(key=name, **{place: value})
        head.end_of_stream = draw(st.booleans())
    elif kind.endswith("body"):
        part = getattr(message, kind)
        part.SetInParent()
        part.body, part.end_of_stream = draw(st.binary(max_size=300)), draw(st.booleans())
    elif kind:
        message.request_trailers.SetInParent()
    if draw(st.booleans()):
        modes = draw(st.tuples(st.integers(0, 20), st.integers(0, 4)))
        message.protocol_config.request_body_mode, message.protocol_config.response_body_mode = modes
        message.protocol_config.SetInParent()
    if draw(st.booleans()):
        message.metadata_context.filter_metadata["a"].fields["b"].string_value = draw(names)
    message.observability_mode = draw(st.booleans())
    return message


def parts_of(said: Said) -> tuple[Any, ...]:
    """All that is said, to compare."""
    metadata = None if said.metadata is None else Metadata.FromString(said.metadata)
    return said.kind, said.fields, said.body, said.end, said.modes, said.is_observed, metadata


def is_usual(message: Any) -> bool:
    """Whether it is to be read without protobuf."""
    heads = [*message.request_headers.headers.headers, *message.response_headers.headers.headers]
    texts = [text for one in heads for text in (one.key, one.value)]
    modes = message.protocol_config
    return (
        all(text.isascii() for text in texts)
        and message.WhichOneof("one") != "request_trailers"
        and max(modes.request_body_mode, modes.response_body_mode) < 16
    )


@settings(max_examples=120, deadline=None)
@given(requests())
def test_what_is_read_is_what_protobuf_reads(message: Any) -> None:
    found = read_said(message.SerializeToString())
    assert (found is not None) == is_usual(message)
    assert found is None or parts_of(found) == parts_of(said_by(message))


@settings(max_examples=200, deadline=None)
@given(requests(), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3), st.integers(0, 400))
def test_of_broken_bytes_nothing_else_is_read_than_by_protobuf(
    message: Any, changes: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(message.SerializeToString())
    for at, value in changes:
        if at < len(data):
            data[at] = value
    given = bytes(data[: cut if changes and cut < len(data) else len(data)])
    found = read_said(given)
    if found is None:
        return
    try:
        expected = said_by(ProcessingRequest.FromString(given))
    except DecodeError:  # in what is read later, or not at all: metadata
        assert b"\x42" in given
        return
    assert parts_of(found) == parts_of(expected)


def test_a_field_that_comes_twice_is_left_to_protobuf() -> None:
    once = body(b"ab", of="response").SerializeToString()
    assert read_said(once) is not None and read_said(once + once) is None
    assert read_said(request_headers().SerializeToString() + once) is None
    inside = b"\x0a\x01a\x0a\x01b"
    assert read_said(bytes([0x2A, len(inside)]) + inside) is None


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([0, 1, 100, 127, 128, 16_000, 16_384, PART_BYTES]), st.integers(-9, 9), st.booleans())
def test_a_part_is_passed_on_in_protobufs_words(size: int, more: int, end: bool) -> None:
    part = bytes(max(size + more, 0))
    answer = ProcessingResponse()
    streamed = answer.response_body.response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = part, end
    found = ProcessingResponse.FromString(passed_part(4, part, end))
    assert found == answer


# --- parts that pass --------------------------------------------------------------------------------------------------

PLAIN = event({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]})
ENDS = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})


def opened() -> tuple[PlainParts, list[int]]:
    """Parts of a stream that stands between two events, and how often output was seen."""
    plain, seen = PlainParts(), [0]

    def on_output() -> None:
        seen[0] += 1

    plain.on_output = on_output
    return plain, seen


def test_plain_events_pass_and_are_counted() -> None:
    plain, seen = opened()
    assert plain.passed(body(PLAIN * 3, end=False, of="response").SerializeToString()) == passed_part(
        4, PLAIN * 3, False
    )
    assert (plain.events, seen) == (3, [1])
    message = body(PLAIN, end=False, of="response")
    message.metadata_context.filter_metadata["a"].fields["b"].string_value = "c"
    assert plain.passed(message.SerializeToString()) == passed_part(4, PLAIN, False) and plain.events == 4


def test_what_must_be_read_does_not_pass() -> None:
    plain, seen = opened()
    config = body(PLAIN, end=False, of="response")
    config.protocol_config.SetInParent()
    refused = [
        body(PLAIN, of="response"),
        body(PLAIN, end=False),
        body(ENDS, end=False, of="response"),
        body(PLAIN[:-1], end=False, of="response"),
        body(b"", end=False, of="response"),
        body(PLAIN * (PART_BYTES // len(PLAIN) + 1), end=False, of="response"),
        config,
        request_headers(),
    ]
    assert [plain.passed(one.SerializeToString()) for one in refused] == [None] * len(refused)
    whole = body(PLAIN, end=False, of="response").SerializeToString()
    assert all(plain.passed(whole[:at]) is None for at in range(len(whole)))
    plain.is_open = False
    assert plain.passed(whole) is None and (plain.events, seen) == (0, [0])
    plain.is_open, plain.on_output = True, None
    assert plain.passed(whole) is None


async def streamed(exchange: PickExchange, parts: list[bytes], *, passes: bool) -> tuple[list[bytes], int]:
    """What goes on of an answer in these parts, and how many of them passed unread."""
    found: list[bytes] = []
    unread = 0
    said = [request_headers(), body(STREAMED), response_headers(content_type="text/event-stream")]
    said += [body(part, end=False, of="response") for part in parts]
    for message in [*said, body(b"", of="response")]:
        data = message.SerializeToString()
        answer = exchange.plain.passed(data) if passes else None
        if answer is not None:
            found.append(answer)
            unread += 1
            continue
        answers = exchange.take(data)
        found += answers if isinstance(answers, list) else await answers
    exchange.close()
    return found, unread


@asynchronous
async def test_a_stream_is_answered_and_counted_alike_whether_its_events_pass_or_are_read() -> None:
    events = [event(one) for one in chat_events(*"abcdef")] + [event(usage_event(cached=2)), event(b"[DONE]")]
    results = []
    for passes in (False, True):
        async with picking(ScriptedServer()) as plane:
            answers, unread = await streamed(plane.exchange(), events, passes=passes)
            await plane.settled()
            lines = [line for line in plane.gateway.metrics.own_text().decode().split("\n") if "tokens_total" in line]
            bodies = [ProcessingResponse.FromString(one).response_body for one in answers[3:]]
            texts = [one.response.body_mutation.streamed_response.body for one in bodies]
            results.append((texts, lines))
            assert (unread > 3) is passes, "most of them need not be read"
    assert results[0] == results[1]


@asynchronous
async def test_where_answers_are_not_in_full_duplex_nothing_passes() -> None:
    async with picking(ScriptedServer()) as plane:
        exchange = plane.exchange()
        assert exchange.plain.is_open
        await plane.say(exchange, request_headers(modes=(FULL_DUPLEX, 1)), body(STREAMED))
        await plane.say(exchange, response_headers(content_type="text/event-stream"))
        await plane.say(exchange, body(PLAIN, end=False, of="response"))
        assert exchange.plain.passed(body(PLAIN, end=False, of="response").SerializeToString()) is None
        exchange.close()
        await plane.settled()
