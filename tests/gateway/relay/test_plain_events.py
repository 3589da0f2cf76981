"""Plain events pass by a way of their own; what passes, is remembered and is read is the same as without it."""

from __future__ import annotations

import itertools
import random

import pytest

pytest.importorskip("uvicorn")

from preble.gateway.relay.endpoints import POSTS, Endpoint
from preble.gateway.relay.plain_events import PlainEvents
from preble.gateway.relay.resume import Emitted
from preble.gateway.relay.stream import REMEMBERED_BYTES, PassingStream
from preble.gateway.relay.usage import usage_reader
from preble.transport.engine_servers.chunks import of_chunks

CHAT, GENERATE = POSTS["/v1/chat/completions"], POSTS["/generate"]
PLAIN = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}],"usage":null}\n\n'
SPACED = b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": null}], "usage": null}\n\n'
EVENTS = [
    PLAIN,
    SPACED,
    b'data: {"choices":[{"delta":{"content":"\\"usage\\" and \\"error\\""},"finish_reason":null}]}\n\n',
    b": a comment\n\n",
    b'data: {"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n',
    b'data: {"choices":[{"delta":{"content":"","error":null},"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"c","stop_reason":5},"finish_reason":null}]}\n\n',
    b"data: [DONE]\n\n",
]


class Client:
    """A request's cycle, its flow, and the bytes that were written to it."""

    def __init__(self) -> None:
        self.written = b""
        self.disconnected = self.response_complete = self.write_paused = False
        self.outputs = 0

    def write(self, data: bytes) -> None:
        self.written += data

    def saw_output(self) -> None:
        self.outputs += 1


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def open_way(*, remembers: bool = True, bytes_max: int = 1000) -> tuple[PlainEvents, Client]:
    plain, client = PlainEvents(bytes_max=bytes_max, remembers=remembers), Client()
    plain.connect(client, client, client.write, client.saw_output)
    plain.is_open = True
    return plain, client


def test_chunks_are_whole_or_left_to_the_parser() -> None:
    assert of_chunks(chunk(b"abc") + chunk(b"d" * 300)) == b"abc" + b"d" * 300
    assert of_chunks(b"00003\r\nabc\r\n") == b"abc"
    for other in (
        b"", b"0\r\n\r\n", chunk(b"abc") + b"0\r\n\r\n", b"3;x\r\nabc\r\n", b"0000003\r\nabc\r\n", b"3\r\nabc",
        b"3\r\nabc\r", b"3\r\nabcd\r\n", b"3\n\nabc\r\n", b"\r\nabc\r\n", b"g\r\nabc\r\n", b"ffffff\r\nabc\r\n",
        b"3", b"3\r", b"-1\r\na\r\n",
    ):  # fmt: skip
        assert of_chunks(other) == b""


def test_plain_events_go_on_in_the_servers_own_chunks() -> None:
    plain, client = open_way()
    both = b"%X\r\n%b\r\n" % (len(PLAIN), PLAIN) + chunk(SPACED)
    assert plain.take(both) == 1
    assert client.written == both and client.outputs == 1
    assert plain.events == [PLAIN + SPACED] and not plain.last


@pytest.mark.parametrize(
    "odd",
    [
        *map(chunk, EVENTS[4:8]),
        chunk(PLAIN[:-1]),
        chunk(PLAIN)[:-1],
        b"0\r\n\r\n",
        chunk(PLAIN) + chunk(EVENTS[4]),
        b"",
    ],
)
def test_what_must_be_read_does_not_pass(odd: bytes) -> None:
    plain, client = open_way()
    assert plain.take(odd) == 0
    assert not client.written and not plain.events and not client.outputs and not plain.last


def test_nothing_passes_where_the_way_is_closed_or_too_much_is_remembered() -> None:
    plain, client = open_way(bytes_max=200)
    assert plain.take(chunk(PLAIN)) == 1
    assert plain.take(chunk(PLAIN)) == 1
    assert plain.take(chunk(PLAIN)) == 0  # `PassingStream` forgets then
    plain.size, plain.is_open = 0, False
    assert plain.take(chunk(PLAIN)) == 0
    assert client.written == chunk(PLAIN) * 2


def test_a_slow_client_and_one_that_has_gone() -> None:
    plain, client = open_way()
    client.write_paused = True
    assert plain.take(chunk(PLAIN)) == 2
    client.write_paused, client.disconnected = False, True
    assert plain.take(chunk(PLAIN)) == 1
    client.disconnected, client.response_complete = False, True
    assert plain.take(chunk(PLAIN)) == 1
    assert client.written == chunk(PLAIN)


@pytest.mark.parametrize("resumable", [True, False])
@pytest.mark.parametrize("remove_usage", [True, False])
@pytest.mark.parametrize("endpoint", [CHAT, GENERATE])
def test_streams_are_the_same_with_that_way(endpoint: Endpoint, resumable: bool, remove_usage: bool) -> None:
    rng = random.Random(f"{endpoint.path} {resumable} {remove_usage}")
    passed = 0
    for _ in range(200):
        sent = b"".join(rng.choices(EVENTS, weights=(30, 9, 9, 2, 1, 1, 1, 1, 1), k=rng.randint(1, 30)))
        if endpoint is GENERATE:
            sent = sent.replace(
                b'"choices"', b'"meta_info":{"prompt_tokens":9,"cached_tokens":2},"choices"', rng.randint(0, 3)
            )
        cuts = sorted(rng.sample(range(len(sent)), min(rng.randint(0, 4), len(sent))))
        parts = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
        lots = [chunk(event + b"\n\n") for part in parts for event in part.split(b"\n\n") if event]
        seen = []
        for uses_way in (True, False):
            reader = usage_reader(endpoint, True, remove_usage=remove_usage)
            stream = PassingStream(endpoint.kind, reader, resumable=resumable)
            client = Client()
            stream.plain.connect(client, client, client.write, client.saw_output)
            for lot in lots:
                if uses_way and stream.plain.take(lot):
                    passed += 1
                elif part := stream.take(of_chunks(lot)):
                    client.write(chunk(part))
            if rest := stream.end():
                client.write(chunk(rest))
            read = (reader.prompt_tokens, reader.cached_tokens, reader.output_tokens, reader.finish_reasons)
            first = reader.first_token, stream.fault_text, stream.last, b"".join(stream.plain.events), stream.is_ended
            seen.append((dechunked(client.written), read, first))
        assert seen[0] == seen[1]
    assert passed > 500


def dechunked(data: bytes) -> bytes:
    return of_chunks(data) if data else b""


def test_what_has_passed_counts_to_what_is_remembered() -> None:
    stream = PassingStream("chat", usage_reader(CHAT, True), resumable=True)
    client = Client()
    stream.plain.connect(client, client, client.write, client.saw_output)
    stream.take(PLAIN)
    long = PLAIN.replace(b'"a"', b'"%b"' % (b"a" * 100_000))
    while stream.resumable:
        if not stream.plain.take(chunk(long)):
            stream.take(long)
    assert not stream.plain.events and stream.plain.size == 0
    assert len(client.written) > REMEMBERED_BYTES - 2 * len(long)
    assert stream.plain.take(chunk(PLAIN)) == 1 and not stream.plain.events


@pytest.mark.parametrize("goes_on", [False, True], ids=["first", "going on"])
@pytest.mark.parametrize("size", [2_000, 2_100, 2_500])
def test_half_an_event_is_not_lost_where_too_much_has_passed_to_be_remembered(size: int, goes_on: bool) -> None:
    stream = PassingStream("chat", usage_reader(CHAT, True), resumable=True)
    if goes_on:
        stream.go_on(Emitted("chat"))
    event = PLAIN.replace(b'"a"', b'"%b"' % (b"a" * size))
    parts, sent, passed = itertools.cycle([event + event[:100], event[100:] + event]), [], []
    while stream.resumable:
        sent.append(next(parts))
        passed.append(stream.take(sent[-1]))
    passed.append(stream.end())
    assert b"".join(passed) == b"".join(sent)
