"""Frames and header fields of HTTP/2, byte by byte: examples of RFC 7541, what clients may send, and every bound."""

from __future__ import annotations

import contextlib
import random
import struct
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble.errors import ProtocolError
from preble.gateway.picker import http2
from preble.gateway.picker.hpack import HeaderDecoder, encoded
from preble.gateway.picker.http2 import (
    FRAME_BYTES,
    HEAD_BYTES,
    PREFACE,
    STREAM_BYTES,
    Http2Call,
    Http2Connection,
    Http2Stream,
)
from tests.models.header_fields import NaiveHeaderDecoder, integer, packed

DATA, HEADERS, RST, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
BLOCK = encoded(((b":method", b"POST"), (b":path", b"/x"), (b"te", b"trailers")))


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + number.to_bytes(4, "big") + payload


def frames(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """(kind, flags, stream, payload) of all frames."""
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 3], "big")
        yield data[at + 3], data[at + 4], int.from_bytes(data[at + 5 : at + 9], "big"), data[at + 9 : at + 9 + size]
        at += 9 + size


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False
        self.reads = True

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def take(self) -> list[tuple[int, int, int, bytes]]:
        """The frames since the last look."""
        written, self.written = self.written, b""
        return list(frames(written))


class Call(Http2Call):
    """Keeps what comes."""

    def __init__(self, stream: Http2Stream, fields: Any) -> None:
        self.stream, self.fields = stream, fields
        self.data = b""
        self.ended = self.was_reset = False

    def on_data(self, data: bytes) -> None:
        self.data += data

    def on_end(self) -> None:
        self.ended = True

    def on_reset(self) -> None:
        self.was_reset = True


class Peer:
    """A connection and its other side."""

    def __init__(self, streams_max: int = 10) -> None:
        self.calls: list[Call] = []
        self.gone = 0
        self.transport = Transport()
        self.connection = Http2Connection(self._accept, self._is_gone, streams_max)
        self.connection.connection_made(self.transport)

    def _accept(self, stream: Http2Stream, fields: Any) -> Call:
        self.calls.append(Call(stream, fields))
        return self.calls[-1]

    def _is_gone(self, _: Http2Connection) -> None:
        self.gone += 1

    def greet(self, *more: bytes) -> list[tuple[int, int, int, bytes]]:
        """Begin, then send frames; the frames that answer all but the greeting."""
        self.send(PREFACE + frame(SETTINGS, 0, 0))
        self.transport.take()
        return self.send(*more)

    def send(self, *data: bytes) -> list[tuple[int, int, int, bytes]]:
        """Send; the frames that answer."""
        for one in data:
            self.connection.data_received(one)
        return self.transport.take()

    def is_ended_by(self, *data: bytes) -> bool:
        """Whether these end the connection with GOAWAY."""
        answers = self.send(*data)
        return self.transport.closed and answers[-1][0] == GOAWAY and answers[-1][3][4:8] != bytes(4)


def open_stream(number: int = 1, flags: int = 0x4) -> bytes:
    """The head of a stream."""
    return frame(HEADERS, flags, number, BLOCK)


# --- header fields ----------------------------------------------------------------------------------------------------


def test_the_examples_of_the_standard() -> None:
    decoder = HeaderDecoder()
    first = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")]
    assert decoder.decode(bytes.fromhex("828684418cf1e3c2e5f23a6ba0ab90f4ff")) == first
    assert decoder.decode(bytes.fromhex("828684be5886a8eb10649cbf")) == [*first, (b"cache-control", b"no-cache")]
    third = decoder.decode(bytes.fromhex("828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf"))
    assert third[2:] == [(b":path", b"/index.html"), first[3], (b"custom-key", b"custom-value")]


def test_a_response_with_evictions_as_the_standard_shows_it() -> None:
    decoder = HeaderDecoder()
    sized = b"\x3f\xe1\x01"  # a table of 256 bytes
    blocks = (
        "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff6e919d29ad171863c78f0b97c8e9ae82ae43d3",
        "4883640effc1c0bf",
        "88c16196d07abe941054d444a8200595040b8166e084a62d1bffc05a839bd9ab77ad94e7821dd7f2e6c7b335dfdfcd5b3960d5af27087f"
        "3672c1ab270fb5291f9587316065c003ed4ee5b1063d5007",
    )
    found = [decoder.decode((sized if number == 0 else b"") + bytes.fromhex(one)) for number, one in enumerate(blocks)]
    assert found[0][0] == (b":status", b"302") and found[1][0] == (b":status", b"307")
    assert found[1][3] == (b"location", b"https://www.example.com")
    assert found[2][4:] == [
        (b"content-encoding", b"gzip"),
        (b"set-cookie", b"foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1"),
    ]


@pytest.mark.parametrize(
    "block",
    [b"\x80", b"\xff\xff\xff\xff\xff\x0f", b"\x40", b"\x00\x05ab", b"\x00\x01a\x81\x00", b"\x3f\xff\xff\x7f", b"\xbe"]
    + [b"\x00\x01a\x84\xff\xff\xff\xff", b"\x82" * 300, b"\x82\x20"],
)
def test_what_is_no_block_is_refused(block: bytes) -> None:
    with pytest.raises(ProtocolError):
        HeaderDecoder().decode(block)


def test_the_table_stays_within_its_bound() -> None:
    decoder, rng = HeaderDecoder(), random.Random(1)
    for _ in range(500):
        value = rng.randbytes(rng.randrange(100))
        block = b"\x40\x01a" + bytes([len(value)]) + value
        assert decoder.decode(block) == [(b"a", value)] and decoder.table_bytes <= 4096
    assert decoder.table_bytes == sum(33 + len(value) for _, value in decoder.table)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_decoded_or_refused(block: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert isinstance(HeaderDecoder().decode(block), list)


def texts(draw: Any) -> bytes:
    """A text as blocks have it, packed or not."""
    text: bytes = draw(st.binary(max_size=20))
    coded = packed(text) if draw(st.booleans()) else None
    return integer(len(text), 7, 0) + text if coded is None else integer(len(coded), 7, 0x80) + coded


@st.composite
def blocks(draw: Any) -> bytes:
    """A block, most of whose indexes are of fields that there are."""
    parts = [integer(draw(st.sampled_from([0, 60, 200, 4096])), 5, 0x20)] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 6))):
        index = draw(st.one_of(st.integers(1, 61), st.integers(62, 70)))
        first, bits = draw(st.sampled_from([(0x80, 7), (0x40, 6), (0x00, 4), (0x10, 4)]))
        if first == 0x80:
            parts.append(integer(index, bits, first))
        elif draw(st.booleans()):
            parts += [integer(index, bits, first), texts(draw)]
        else:
            parts += [bytes([first]), texts(draw), texts(draw)]
    return b"".join(parts)


def decoded(decoder: HeaderDecoder | NaiveHeaderDecoder, block: bytes) -> list[tuple[bytes, bytes]] | None:
    """The fields; None where it is refused."""
    try:
        return decoder.decode(block)
    except ProtocolError:
        return None


@settings(max_examples=150, deadline=None)
@given(st.lists(blocks(), min_size=1, max_size=5), st.binary(max_size=12))
def test_blocks_are_decoded_as_by_the_naive_model(given_blocks: list[bytes], rest: bytes) -> None:
    decoder, naive = HeaderDecoder(), NaiveHeaderDecoder()
    for block in [*given_blocks, given_blocks[0] + rest]:
        found = decoded(decoder, block)
        assert found == decoded(naive, block)
        if found is None:
            return
        assert decoder.table == list(naive.table)[::-1] and decoder.table_bytes == naive.table_bytes <= 4096


def test_every_byte_has_its_code() -> None:
    text = bytes(range(256))
    coded = packed(text)
    assert HeaderDecoder().decode(b"\x00\x01a" + integer(len(coded), 7, 0x80) + coded) == [(b"a", text)]


def test_a_small_block_cannot_become_many_fields() -> None:
    decoder = HeaderDecoder()
    value = bytes(4000)
    decoder.decode(b"\x40\x01a" + integer(len(value), 7, 0) + value)
    with pytest.raises(ProtocolError, match="more than 256"):
        decoder.decode(b"\xbe" * (64 << 10))


# --- connections ------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=8))
def test_wherever_bytes_are_cut_the_same_comes_in(cuts: list[int]) -> None:
    peer = Peer()
    data = PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, 0, 1, BLOCK[:3]) + frame(CONTINUATION, 0x4, 1, BLOCK[3:])
    data += frame(DATA, 0, 1, b"ab") + frame(PING, 0, 0, b"12345678") + frame(DATA, 0x9, 1, b"\x02cd\0\0")
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    peer.send(*(data[a:b] for a, b in zip(places, places[1:], strict=False)))
    (call,) = peer.calls
    assert call.data == b"abcd" and call.ended and (b":path", b"/x") in call.fields


def test_settings_and_pings_are_acknowledged() -> None:
    peer = Peer()
    assert [one[0] for one in peer.transport.take()] == [SETTINGS, WINDOW]
    assert peer.send(PREFACE, frame(SETTINGS, 0, 0)) == [(SETTINGS, 1, 0, b"")]
    assert peer.send(frame(PING, 0, 0, b"abcdefgh")) == [(PING, 1, 0, b"abcdefgh")]
    assert peer.send(frame(PING, 1, 0, b"abcdefgh"), frame(SETTINGS, 1, 0), frame(200, 0, 0, b"?")) == []


def test_an_answer_waits_for_its_windows() -> None:
    peer = Peer()
    peer.greet(open_stream(flags=0x5))
    stream = peer.calls[0].stream
    stream.head(b"\x88")
    stream.send(b"x" * 70_000)
    stream.head(b"\x00\x01a\x01b", end=True)
    sent = peer.transport.take()
    assert [one[0] for one in sent] == [HEADERS, DATA, DATA, DATA, DATA]
    assert sum(len(one[3]) for one in sent[1:]) == 65_535 and max(len(one[3]) for one in sent) == 16_384
    assert peer.send(frame(WINDOW, 0, 1, struct.pack(">I", 100_000))) == [], "the connection's window is used up, too"
    more = peer.send(frame(WINDOW, 0, 0, struct.pack(">I", 100_000)))
    assert [one[0] for one in more] == [DATA, HEADERS] and len(more[0][3]) == 70_000 - 65_535
    assert more[1][1] == 0x5 and not peer.connection.streams


def test_a_larger_window_of_streams_counts_for_those_that_run() -> None:
    peer = Peer()
    peer.greet(open_stream(), frame(WINDOW, 0, 0, struct.pack(">I", 1 << 20)))
    peer.calls[0].stream.send(b"x" * 70_000)
    peer.transport.take()
    more = peer.send(frame(SETTINGS, 0, 0, struct.pack(">HIHI", 4, 100_000, 5, 65_536)))
    assert [(one[0], len(one[3])) for one in more] == [(SETTINGS, 0), (DATA, 70_000 - 65_535)]


def test_bytes_that_are_taken_may_be_sent_anew_and_others_not() -> None:
    peer = Peer()
    peer.greet(open_stream())
    half = b"x" * (STREAM_BYTES // 2)
    assert peer.send(frame(DATA, 0, 1, half)) == []
    peer.calls[0].stream.take(len(half))
    assert peer.transport.take() == [(WINDOW, 0, 1, struct.pack(">I", len(half)))]
    answers = peer.send(*[frame(DATA, 0, 1, half)] * 3)
    assert answers[-1][:3] == (RST, 0, 1) and peer.calls[0].was_reset and not peer.connection.streams
    assert not peer.transport.closed, "other streams go on"


def test_what_was_sent_to_a_stream_that_is_over_is_no_error() -> None:
    peer = Peer()
    peer.greet(open_stream())
    peer.calls[0].stream.head(b"\x88", end=True)
    assert [one[0] for one in peer.transport.take()] == [HEADERS, RST]
    assert peer.send(frame(DATA, 1, 1, b"late"), frame(WINDOW, 0, 1, b"\0\0\0\1"), frame(RST, 0, 1, bytes(4))) == []
    assert not peer.transport.closed


def test_one_stream_too_many_is_refused_and_the_table_stays_in_step() -> None:
    peer = Peer(streams_max=1)
    kept = b"\x40\x01a\x01b"
    answers = peer.greet(open_stream(1), frame(HEADERS, 0x4, 3, kept))
    assert answers == [(RST, 0, 3, struct.pack(">I", http2.REFUSED_STREAM))]
    peer.send(frame(RST, 0, 1, bytes(4)), frame(HEADERS, 0x4, 5, b"\xbe"))
    assert peer.calls[0].was_reset and peer.calls[1].fields == [(b"a", b"b")]


def test_streams_that_are_opened_and_reset_leave_nothing() -> None:
    peer = Peer(streams_max=5)
    peer.greet()
    for number in range(1, 4001, 2):
        assert peer.send(open_stream(number) + frame(RST, 0, number, bytes(4))) == []
    assert not peer.connection.streams and len(peer.calls) == 2000 and all(call.was_reset for call in peer.calls)
    peer.send(open_stream(4001) + frame(RST, 0, 4001, bytes(4)) + frame(DATA, 0, 4001, b"late") + open_stream(4003))
    assert list(peer.connection.streams) == [4003] and not peer.transport.closed


def test_calls_go_with_their_streams() -> None:
    """Regression: a stream and its call held each other until the garbage was collected."""
    peer = Peer()
    peer.greet(open_stream(1), open_stream(3))
    gone = [weakref.ref(call) for call in peer.calls]
    streams = [call.stream for call in peer.calls]
    peer.calls.clear()
    streams[0].head(b"\x88", end=True)
    peer.send(frame(RST, 0, 3, bytes(4)))
    streams.clear()
    assert [one() for one in gone] == [None, None]


def test_many_settings_in_one_frame_are_applied_once_and_the_last_counts() -> None:
    peer = Peer(streams_max=200)
    peer.greet(*(open_stream(number) for number in range(1, 400, 2)))
    many = struct.pack(">HI", 4, 0) * 10_000 + struct.pack(">HI", 4, 10)
    assert peer.send(frame(SETTINGS, 0, 0, many)) == [(SETTINGS, 1, 0, b"")]
    for call in peer.calls:
        call.stream.send(b"x" * 20)
    assert [len(one[3]) for one in peer.transport.take()] == [10] * 200
    less = peer.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 3)))
    assert less == [(SETTINGS, 1, 0, b"")], "windows may become negative"
    assert peer.send(frame(WINDOW, 0, 1, struct.pack(">I", 7))) == []
    assert peer.send(frame(WINDOW, 0, 1, struct.pack(">I", 2))) == [(DATA, 0, 1, b"xx")]


def test_those_that_wait_share_the_connections_window() -> None:
    peer = Peer()
    peer.greet(open_stream(1), open_stream(3), frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 20)))
    for call in peer.calls:
        call.stream.send(bytes(65_535))
    peer.transport.take()
    assert sum(len(one[3]) for one in peer.send(frame(WINDOW, 0, 0, struct.pack(">I", 100)))) == 100
    peer.send(frame(RST, 0, 3, bytes(4)))
    assert peer.send(frame(WINDOW, 0, 0, struct.pack(">I", 1 << 20))) == [], "nobody waits any more"
    peer.calls[0].stream.send(b"more")
    assert peer.transport.take() == [(DATA, 0, 1, b"more")]


def test_a_frame_may_come_a_byte_at_a_time() -> None:
    peer = Peer()
    peer.greet(open_stream())
    sent = frame(DATA, 0, 1, bytes(range(256)) * 64)
    assert peer.send(*(sent[at : at + 1] for at in range(len(sent)))) == []
    assert peer.calls[0].data == bytes(range(256)) * 64


def test_a_client_that_goes_ends_its_calls() -> None:
    peer = Peer()
    peer.greet(open_stream(1), open_stream(3))
    peer.connection.connection_lost(None)
    assert [call.was_reset for call in peer.calls] == [True, True] and peer.gone == 1
    peer.calls[0].stream.send(b"too late")


def test_who_does_not_read_is_not_read_from() -> None:
    peer = Peer()
    peer.connection.pause_writing()
    assert not peer.transport.reads
    peer.connection.resume_writing()
    assert peer.transport.reads


def test_after_a_stop_streams_may_end_and_new_ones_are_refused() -> None:
    peer = Peer()
    peer.greet(open_stream(1))
    peer.connection.stop()
    assert [one[0] for one in peer.transport.take()] == [GOAWAY] and not peer.transport.closed
    assert [one[0] for one in peer.send(open_stream(3))] == [RST] and len(peer.calls) == 1
    peer.calls[0].stream.head(b"\x88", end=True)
    assert peer.transport.closed


def test_what_a_stream_still_says_that_was_refused_after_a_stop_ends_no_other() -> None:
    peer = Peer()
    peer.greet(open_stream(1))
    peer.connection.stop()
    peer.transport.take()
    said = peer.send(
        open_stream(3) + frame(DATA, 0, 3, b"x") + frame(HEADERS, 0x5, 3, BLOCK) + frame(RST, 0, 3, bytes(4))
    )
    assert said == [(RST, 0, 3, struct.pack(">I", http2.REFUSED_STREAM))]
    assert not peer.transport.closed and len(peer.calls) == 1
    peer.calls[0].stream.head(b"\x88", end=True)
    assert [one[:3] for one in peer.transport.take()][0] == (HEADERS, 0x5, 1) and peer.transport.closed


LATE = frame(HEADERS, 0x4, 5, BLOCK)


@pytest.mark.parametrize(
    "data",
    [
        (b"GET / HTTP/1.1\r\n\r\n",),
        (PREFACE, (FRAME_BYTES + 1).to_bytes(3, "big") + bytes([DATA, 0]) + (1).to_bytes(4, "big")),
        (PREFACE, frame(DATA, 0, 1, b"x")),
        (PREFACE, frame(DATA, 0, 0, b"x")),
        (PREFACE, frame(HEADERS, 0x4, 2, BLOCK)),
        (PREFACE, frame(HEADERS, 0x4, 1, b"\xff")),
        (PREFACE, frame(HEADERS, 0, 1, BLOCK), frame(PING, 0, 0, bytes(8))),
        (PREFACE, frame(CONTINUATION, 0x4, 1, BLOCK)),
        (
            PREFACE,
            frame(HEADERS, 0, 1, BLOCK),
            *[frame(CONTINUATION, 0, 1, bytes(16_384))] * (HEAD_BYTES // 16_384 + 1),
        ),
        (PREFACE, frame(HEADERS, 0, 1, BLOCK), frame(CONTINUATION, 0, 1)),
        (PREFACE, frame(PING, 0, 0, b"short")),
        (PREFACE, frame(SETTINGS, 0, 0, b"odd")),
        (PREFACE, frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 2**31))),
        (PREFACE, open_stream(), frame(WINDOW, 0, 1, b"\0\0\xff\xff"), frame(SETTINGS, 0, 0, b"\0\4\x7f\xff\xff\xff")),
        (PREFACE, frame(WINDOW, 0, 0, bytes(4))),
        (PREFACE, frame(WINDOW, 0, 0, struct.pack(">I", 2**31 - 1))),
        (PREFACE, frame(5, 0x4, 1, bytes(4) + BLOCK)),
        (PREFACE, frame(RST, 0, 7, bytes(4))),
        (PREFACE, open_stream(1), frame(DATA, 0x8, 1, b"\x05abc")),
    ],
)
def test_what_cannot_be_understood_ends_the_connection(data: tuple[bytes, ...]) -> None:
    assert Peer().is_ended_by(*data)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 255), st.integers(0, 9), st.binary(max_size=40)), max_size=8)
)
def test_any_frames_are_answered_or_end_the_connection(sent: list[tuple[int, int, int, bytes]]) -> None:
    peer = Peer()
    peer.greet()
    for one in sent:
        if peer.transport.closed:
            return
        peer.send(frame(*one))
        assert len(peer.connection.streams) <= 10
