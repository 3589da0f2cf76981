"""The wire format: round trips, limits, and decoders that no bytes can make raise anything but ProtocolError."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble.errors import InvalidInput, ProtocolError
from preble.transport import wire
from preble.transport._frames import read_chunk, read_events, read_submit, write_chunk, write_submit
from preble.transport.fields import MAX_EVENTS, MAX_ID_BYTES, MAX_STOP_TOKENS, MAX_TEXT_BYTES, check_namespace
from preble.types import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    PrefixEvicted,
    PrefixStored,
    RequestEnded,
    RequestPlaced,
    RequestPrefilled,
    SamplingParams,
)

ALL = wire.ROUTER_MESSAGES | wire.WORKER_MESSAGES

# --- what a message may hold ------------------------------------------------------------------------------------------

INT31 = st.integers(0, 2**31 - 1)
INT63 = st.integers(0, 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
IDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
TOKENS = st.lists(INT31, max_size=20).map(tuple)
PROMPT = st.lists(INT31, min_size=1, max_size=20).map(lambda ids: np.array(ids, np.int32))
ATOMS = st.none() | TEXT | st.binary(max_size=20) | st.integers(-(2**63) + 1, 2**63 - 1)
NAMESPACES = st.recursive(ATOMS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6).filter(
    lambda value: depth(value) <= 4
)
HASHES = st.lists(st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=1, max_size=64), max_size=4).map(tuple)
SAMPLING = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 2**31 - 1),
    temperature=st.floats(0, 999),
    top_p=st.floats(0.01, 1),
    stop_token_ids=TOKENS,
    ignore_eos=st.booleans(),
    seed=INT63,
)
TOLD = st.one_of(  # by workers, of requests and evictions
    st.builds(RequestPlaced, IDS, IDS, PROMPT, NAMESPACES, st.none() | st.integers(1, 2**31 - 1)),
    st.builds(RequestPrefilled, IDS, IDS, st.none() | INT31),
    st.builds(RequestEnded, IDS, IDS, st.none() | INT31),
    PROMPT.flatmap(lambda ids: st.builds(PrefixEvicted, st.just(ids), st.integers(0, len(ids)), NAMESPACES)),
)
EVENTS = st.one_of(
    st.builds(
        BlockStored,
        HASHES,
        st.none() | st.integers(0, 99),
        PROMPT,
        st.integers(1, 65_536),
        NAMESPACES,
        st.none() | TEXT,
    ),
    st.builds(BlockRemoved, HASHES, st.none() | TEXT),
    st.builds(AllBlocksCleared),
    TOLD,
)


ONE_TOKEN = b"\x01\0\0\0"


def depth(value: Any) -> int:
    """How deep tuples are nested."""
    return 1 + max(map(depth, value), default=0) if isinstance(value, tuple) else 0


def submits() -> st.SearchStrategy[wire.Submit]:
    """Submits whose offset fits their tokens."""
    return PROMPT.flatmap(
        lambda ids: st.builds(wire.Submit, IDS, st.just(ids), SAMPLING, NAMESPACES, st.integers(0, len(ids) - 1))
    )


MESSAGES = st.one_of(
    st.builds(wire.Hello, IDS, TEXT, TEXT, TEXT, st.integers(0, 65_536)),
    submits(),
    st.builds(wire.Abort, IDS),
    st.builds(wire.Ping, INT63),
    st.builds(wire.Replay, INT63),
    st.builds(wire.Bye),
    st.builds(
        wire.Welcome,
        IDS,
        TEXT,
        TEXT,
        TEXT,
        st.integers(1, 65_536),
        st.integers(1, 2**31 - 1),
        st.none() | st.integers(1, 99),
        st.integers(1, 2**31 - 1),
        TOKENS,
        TEXT,
        INT63,
        st.integers(1024, 2**31 - 1),
        st.booleans(),
    ),
    st.builds(wire.Refused, TEXT),
    st.builds(
        wire.Chunk,
        IDS,
        INT31,
        TOKENS,
        st.none() | INT31,
        st.none() | st.sampled_from(wire.FINISH_REASONS),
        st.none() | TEXT,
        INT63,
    ),
    st.builds(wire.Rejected, IDS, st.sampled_from(wire.REFUSAL_CODES), TEXT),
    st.builds(wire.Pong, INT63, INT63, INT63, INT63, INT63, INT63, INT63, INT63, st.booleans()),
    st.builds(wire.Events, INT63, st.lists(EVENTS, max_size=3).map(tuple), TEXT),
    st.builds(wire.ReplayEnd, INT63, INT63, INT63, INT63),
    st.builds(wire.Draining),
    st.builds(wire.Closed, st.sampled_from(wire.CLOSING_CODES), TEXT),
    st.builds(wire.Fault, TEXT),
)


def plain(value: Any) -> Any:
    """Messages as comparable data: arrays and other sequences of tokens become tuples."""
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, np.ndarray):
        return tuple(value.tolist())
    return tuple(plain(item) for item in value) if isinstance(value, tuple | list) else value


# --- round trips ------------------------------------------------------------------------------------------------------


@given(MESSAGES, INT63, INT63, INT63)
def test_every_message_comes_back_as_it_went(message: wire.Message, epoch: int, session: int, seq: int) -> None:
    frame = wire.encode(message, epoch=epoch, session=session, seq=seq)
    envelope = wire.decode(frame, ALL)
    assert (envelope.epoch, envelope.session, envelope.seq) == (epoch, session, seq)
    assert plain(envelope.message) == plain(message)


def test_every_message_belongs_to_a_side() -> None:
    assert set(wire.Message.__args__) == ALL
    assert {wire.Fault} == wire.ROUTER_MESSAGES & wire.WORKER_MESSAGES


def test_token_ids_travel_as_raw_little_endian_int32() -> None:
    frame = wire.encode(wire.Submit("r", np.array([1, 258, 2**31 - 1], np.int32)))
    assert struct.pack("<3i", 1, 258, 2**31 - 1) in frame
    assert msgpack.unpackb(frame)[:2] == [wire.PROTOCOL_VERSION, 2]


def test_a_decoded_prompt_is_int32_and_cannot_be_written_to() -> None:
    envelope = wire.decode(wire.encode(wire.Submit("r", np.array([5, 6], np.int32))), ALL)
    assert isinstance(envelope.message, wire.Submit)
    assert envelope.message.token_ids.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        envelope.message.token_ids[0] = 9


def test_a_chunk_costs_few_bytes() -> None:
    frame = wire.encode(wire.Chunk("123.1", 7, (42,)), epoch=2**62, session=3, seq=100)
    assert len(frame) < 40


def test_what_is_told_of_a_request_costs_as_few_bytes_as_the_page_says() -> None:
    router = "router-0123456789abcdef"
    told = {
        RequestPlaced(router, "12345", (7,) * 1000, None, 128): 4040,
        RequestPrefilled(router, "12345", 900): 36,
        RequestEnded(router, "12345", 128): 36,
    }
    empty = len(wire.encode(wire.Events(1000, ()), epoch=2**62))
    assert empty < 20
    for event, size in told.items():
        assert size - 2 <= len(wire.encode(wire.Events(1000, (event,)), epoch=2**62)) - empty <= size


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=9)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=8,
)


# --- the two ways through ---------------------------------------------------------------------------------------------


def answer(decode: Callable[[], wire.Envelope]) -> Any:
    """What a decoder makes of a frame, errors included."""
    try:
        envelope = decode()
    except ProtocolError as error:
        return str(error)
    return (*envelope[:3], type(envelope.message), plain(envelope.message))


def assert_both_ways_agree(frame: bytes) -> None:
    """Whatever the short way answers, the way field by field says the same."""
    assert answer(lambda: wire.decode(frame, ALL)) == answer(lambda: wire.decode_by_fields(frame, ALL))


@given(MESSAGES, INT63, INT63, INT63)
def test_both_ways_write_the_same_bytes(message: wire.Message, epoch: int, session: int, seq: int) -> None:
    frame = wire.encode(message, epoch=epoch, session=session, seq=seq)
    assert frame == wire.encode_by_fields(message, epoch, session, seq)


@given(MESSAGES, st.data())
@settings(max_examples=1000)
def test_both_ways_read_the_same_from_damaged_frames(message: wire.Message, data: st.DataObject) -> None:
    frame = bytearray(wire.encode(message, epoch=300, session=2, seq=70_000))
    assert_both_ways_agree(bytes(frame))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    assert_both_ways_agree(bytes(frame))
    assert_both_ways_agree(bytes(frame[: data.draw(st.integers(0, len(frame)))]))
    assert_both_ways_agree(bytes(frame) + b"\0")


@given(MESSAGES, st.data())
@settings(max_examples=500)
def test_both_ways_read_the_same_from_junk_fields(message: wire.Message, data: st.DataObject) -> None:
    values = msgpack.unpackb(wire.encode(message))
    values[data.draw(st.integers(0, len(values) - 1))] = data.draw(JUNK)
    assert_both_ways_agree(msgpack.packb(values))


@given(st.lists(TOLD, min_size=1, max_size=3), TEXT, st.data())
@settings(max_examples=1000)
def test_both_ways_read_the_same_from_damaged_events(events: list[Any], router: str, data: st.DataObject) -> None:
    frame = wire.encode(wire.Events(70_000, tuple(events), router), epoch=300)
    assert_both_ways_agree(frame)
    values = msgpack.unpackb(frame)
    event = data.draw(st.sampled_from(values[6]))
    event[data.draw(st.integers(0, len(event) - 1))] = data.draw(JUNK)
    assert_both_ways_agree(msgpack.packb(values))
    event[data.draw(st.integers(0, len(event))) :] = data.draw(st.lists(JUNK, max_size=2))
    assert_both_ways_agree(msgpack.packb(values))
    damaged = bytearray(frame)
    damaged[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    assert_both_ways_agree(bytes(damaged))


USUAL = [
    wire.Chunk("17", 3, (1, 2**31 - 1)),
    wire.Chunk("17", 0, (5,), 12, "length", None, 9),
    wire.Chunk("17", 0, (), None, "stop"),
    wire.Submit("a" * MAX_ID_BYTES, np.arange(2000, dtype=np.int32)),
    wire.Submit("1", np.array([7, 8], np.int32), SamplingParams(5, 0.5, 0.9, (2, 3), True, 2**63 - 1), None, 1),
    wire.Events(2**63 - 1, (), "x" * MAX_TEXT_BYTES),
    wire.Events(
        9,
        (
            RequestPlaced("A", "x" * MAX_ID_BYTES, [0, 2**31 - 1], None, 2**31 - 1),
            RequestPlaced("A", "r", [1]),
            RequestPrefilled("A", "r", 0),
            RequestEnded("A", "r"),
            PrefixEvicted([1, 2], 2),
        ),
    ),
    wire.Events(0, (RequestEnded("A", "r", 5),) * MAX_EVENTS),
]
UNUSUAL = [
    wire.Chunk("17", 0, (1,), None, "abort"),
    wire.Chunk("17", 0, (1,), None, "error", "why"),
    wire.Submit("1", np.array([7], np.int32), SamplingParams(temperature=0)),  # an int, which travels as one
    wire.Submit("1", np.array([7], np.int32), namespace=("lora", 1)),
    wire.Events(0, (RequestPlaced("A", "r", [1], "lora"),)),
    wire.Events(0, (PrefixEvicted([1, 2], 0, "lora"),)),
    wire.Events(0, (AllBlocksCleared(),)),
]


@pytest.mark.parametrize("message", USUAL)
def test_the_usual_message_takes_the_short_way(message: Any) -> None:
    frame = wire.encode(message, epoch=1, session=2, seq=3)
    assert short_read(frame) is not None
    assert isinstance(message, wire.Events) or short_write(message) is not None


@pytest.mark.parametrize("message", UNUSUAL)
def test_the_short_way_declines_what_is_rare(message: Any) -> None:
    assert short_read(wire.encode(message)) is None
    assert isinstance(message, wire.Events) or short_write(message) is None


def short_read(frame: bytes) -> Any:
    """What the short way makes of a frame."""
    version = wire.PROTOCOL_VERSION
    return read_chunk(frame, version) or read_submit(frame, version) or read_events(frame, version)


def short_write(message: Any) -> bytes | None:
    """What the short way makes of a message."""
    if isinstance(message, wire.Chunk):
        return write_chunk(message, 1, 2, 3, wire.PROTOCOL_VERSION)
    return write_submit(message, 1, 2, 3, message.token_ids, wire.PROTOCOL_VERSION)


def test_the_largest_frame_of_the_short_way_fits_its_room() -> None:
    chunk = wire.Chunk("x" * MAX_ID_BYTES, 2**31 - 1, (2**31 - 1,) * 70_000, 2**31 - 1, "length", None, 2**63 - 1)
    sampling = SamplingParams(2**31 - 1, 999.9, 1.0, (1,) * MAX_STOP_TOKENS, True, 2**63 - 1)
    submit = wire.Submit("x" * MAX_ID_BYTES, np.zeros(70_000, np.int32), sampling, None, 69_999)
    for message in (chunk, submit):
        frame = wire.encode(message, epoch=2**63 - 1, session=2**63 - 1, seq=2**63 - 1)
        assert frame == wire.encode_by_fields(message, 2**63 - 1, 2**63 - 1, 2**63 - 1)


# --- hostile bytes ----------------------------------------------------------------------------------------------------


@given(st.binary(max_size=200))
@settings(max_examples=1000)
def test_random_bytes_raise_protocol_error_and_nothing_else(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.decode(frame, ALL)


def decodes_or_protocol_error(frame: bytes) -> None:
    """Fails by any other exception."""
    try:
        envelope = wire.decode(frame, ALL)
    except ProtocolError:
        return
    assert type(envelope.message) in ALL
    wire.encode(envelope.message)  # whatever was accepted can be said again


@given(st.integers(0, 40), st.lists(JUNK, max_size=16))
@settings(max_examples=500)
def test_any_fields_under_any_code_are_refused_or_valid(code: int, values: list[Any]) -> None:
    decodes_or_protocol_error(msgpack.packb([wire.PROTOCOL_VERSION, code, 1, 1, 1, *values], unicode_errors="replace"))


@given(MESSAGES, st.data())
@settings(max_examples=500)
def test_one_field_swapped_for_junk_is_refused_or_valid(message: wire.Message, data: st.DataObject) -> None:
    values = msgpack.unpackb(wire.encode(message))
    values[data.draw(st.integers(0, len(values) - 1))] = data.draw(JUNK)
    decodes_or_protocol_error(msgpack.packb(values))


@given(MESSAGES, st.data())
@settings(max_examples=500)
def test_damaged_frames_are_refused_or_valid(message: wire.Message, data: st.DataObject) -> None:
    frame = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    decodes_or_protocol_error(bytes(frame))
    decodes_or_protocol_error(bytes(frame[:cut]))
    decodes_or_protocol_error(bytes(frame) + bytes(frame[:cut]))


def test_a_missing_and_an_extra_field_are_refused() -> None:
    values = msgpack.unpackb(wire.encode(wire.Ping(3)))
    for wrong in (values[:-1], [*values, 0]):
        with pytest.raises(ProtocolError, match="Ping must have 1 fields"):
            wire.decode(msgpack.packb(wrong), ALL)


@pytest.mark.parametrize(
    ("message", "position", "value", "complaint"),
    [
        (wire.Ping(1), 5, -1, "Ping.nonce must be an int"),
        (wire.Ping(1), 5, True, "Ping.nonce must be an int"),
        (wire.Ping(1), 2, 2**63, "epoch must be an int"),
        (wire.Abort("r"), 5, "", "Abort.request_id must be not empty"),
        (wire.Abort("r"), 5, "x" * (MAX_ID_BYTES + 1), "Abort.request_id must be a text of at most"),
        (wire.Abort("r"), 5, b"r", "Abort.request_id must be a text"),
        (wire.Fault("t"), 5, "é" * MAX_TEXT_BYTES, "Fault.text must be a text of at most"),
        (wire.Chunk("r", 0, (1,)), 7, b"abc", "Chunk.token_ids must be whole int32 words"),
        (wire.Chunk("r", 0, (1,)), 7, struct.pack("<i", -1), "Chunk.token_ids holds a negative token id"),
        (wire.Chunk("r", 0, (1,)), 9, "bored", "Chunk.finish_reason must be one of"),
        (wire.Rejected("r", "invalid", ""), 6, "because", "Rejected.code must be one of"),
        (wire.Submit("r", np.array([1], np.int32)), 6, b"", "Submit.token_ids is empty"),
        (wire.Submit("r", np.array([1], np.int32)), 9, 1, "Submit.output_offset must be below the 1 token_ids"),
        (wire.Submit("r", np.array([1], np.int32)), 8, 1.5, "Submit.namespace must be None"),
        (wire.Submit("r", np.array([1], np.int32)), 7, [1, math.nan, 1.0, b"", False, 0], "temperature must be in"),
        (wire.Submit("r", np.array([1], np.int32)), 7, [1, "hot", 1.0, b"", False, 0], "temperature must be a number"),
        (wire.Submit("r", np.array([1], np.int32)), 7, [0, 0.0, 1.0, b"", False, 0], "max_new_tokens must be an int"),
        (wire.Submit("r", np.array([1], np.int32)), 7, [1, 0.0, 1.0], "Submit.sampling must be an array of 6"),
        (wire.Events(0, ()), 6, [["Z"]], "Events.events.0. must be an event array"),
        (wire.Events(0, ()), 6, [["E", b"\0\0\0\0", 2, None]], "kept_tokens must be an int in .0, 1."),
        (wire.Events(0, ()), 6, [["R", [""], None]], "block_hashes must be a 64-bit int or 1 to 64 bytes"),
        (wire.Events(0, ()), 6, [["Q", "", "r", ONE_TOKEN, None, 1]], "Events.events.0..router must be not empty"),
        (wire.Events(0, ()), 6, [["Q", "a", "r", b"", None, 1]], "Events.events.0..token_ids is empty"),
        (wire.Events(0, ()), 6, [["Q", "a", "r", ONE_TOKEN, 1.5, 1]], "Events.events.0..namespace must be None"),
        (wire.Events(0, ()), 6, [["Q", "a", "r", ONE_TOKEN, None, 0]], "max_new_tokens must be an int in .1, "),
        (wire.Events(0, ()), 6, [["F", "a", "x" * 257, 0]], "Events.events.0..request_id must be a text of at most"),
        (wire.Events(0, ()), 6, [["F", "a", "r", -1]], "Events.events.0..cached_tokens must be an int in .0, "),
        (wire.Events(0, ()), 6, [["X", "a", "r", True]], "Events.events.0..output_tokens must be an int in .0, "),
        (wire.Events(0, ()), 6, [["X", "a", "r"]], "Events.events.0. must be an array of 4"),
        (wire.Events(0, ()), 7, 3, "Events.complete_for must be a text"),
        (wire.Hello("r"), 5, "", "Hello.router_id must be not empty"),
    ],
)
def test_the_error_names_the_field(message: wire.Message, position: int, value: Any, complaint: str) -> None:
    values = msgpack.unpackb(wire.encode(message))
    values[position] = value
    with pytest.raises(ProtocolError, match=complaint):
        wire.decode(msgpack.packb(values), ALL)


def test_errors_do_not_quote_texts_which_may_be_prompts() -> None:
    values = msgpack.unpackb(wire.encode(wire.Ping(1)))
    values[5] = "the patient's name is"
    with pytest.raises(ProtocolError) as caught:
        wire.decode(msgpack.packb(values), ALL)
    assert "patient" not in str(caught.value)


def test_a_message_from_the_wrong_side_is_refused() -> None:
    with pytest.raises(ProtocolError, match="not expected from this side"):
        wire.decode(wire.encode(wire.Ping(1)), wire.WORKER_MESSAGES)
    with pytest.raises(ProtocolError, match="not expected from this side"):
        wire.decode(wire.encode(wire.Draining()), wire.ROUTER_MESSAGES)


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_frame_over_the_limit_is_refused_unread_and_not_made() -> None:
    prompt = wire.Submit("r", np.zeros(1000, np.int32))
    frame = wire.encode(prompt)
    wire.decode(frame, ALL, max_bytes=len(frame))
    with pytest.raises(ProtocolError, match="the limit is"):
        wire.decode(frame, ALL, max_bytes=len(frame) - 1)
    with pytest.raises(InvalidInput, match="Submit takes .* the limit is"):
        wire.encode(prompt, max_bytes=len(frame) - 1)


def test_a_small_frame_cannot_become_a_huge_object() -> None:
    nested = b"\xdd" + struct.pack(">I", 200_000) + b"\x90" * 200_000
    with pytest.raises(ProtocolError):
        wire.decode(b"\x92" + nested + nested, ALL)
    with pytest.raises(ProtocolError):
        wire.decode(b"\x91" * 100_000, ALL)
    with pytest.raises(ProtocolError):
        wire.decode(b"\xdd\xff\xff\xff\xff", ALL)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (wire.Abort(""), "request_id must have 1 to"),
        (wire.Abort("x" * (MAX_ID_BYTES + 1)), "request_id must have 1 to"),
        (wire.Events(0, (AllBlocksCleared(),) * (MAX_EVENTS + 1)), "do not fit one frame"),
        (
            wire.Submit("r", np.array([1], np.int32), SamplingParams(stop_token_ids=(1,) * (MAX_STOP_TOKENS + 1))),
            "stop_token_ids has more than",
        ),
        (wire.Submit("r", np.array([1], np.int32), namespace=frozenset()), "namespace must be None"),
        (wire.Chunk("r", 0, (2**31,)), "token_ids must be ints"),
        (wire.Ping(2**70), "cannot be encoded"),
        (wire.Events(0, (PrefixStored([1]),)), "events of .*PrefixStored.* do not travel"),
        (wire.Events(0, (RequestEnded("", "r"),)), "router must have 1 to"),
        (wire.Events(0, (RequestPlaced("a", "r", [-(2**31) - 1]),)), "token_ids must be ints"),
        (wire.Hello(""), "router_id must have 1 to"),
    ],
)
def test_what_does_not_fit_the_wire_is_this_sides_fault(message: wire.Message, complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        wire.encode(message)


def test_a_long_reason_is_cut_rather_than_refused() -> None:
    envelope = wire.decode(wire.encode(wire.Closed("gap", "é" * 10_000)), ALL)
    assert isinstance(envelope.message, wire.Closed)
    assert 0 < len(envelope.message.text.encode()) <= MAX_TEXT_BYTES


@pytest.mark.parametrize("namespace", [None, "lora", b"salt", 7, ("model", ("lora", 3), None), ()])
def test_namespaces_that_can_travel(namespace: Any) -> None:
    check_namespace(namespace)


@pytest.mark.parametrize("namespace", [1.5, True, frozenset(), 2**70, ((((("deep",),),),),), ("x",) * 65, "x" * 5000])
def test_namespaces_that_cannot_travel(namespace: Any) -> None:
    with pytest.raises(InvalidInput, match="namespace"):
        check_namespace(namespace)


# --- versions ---------------------------------------------------------------------------------------------------------


def test_another_version_is_recognised_and_a_refusal_is_understood_in_any() -> None:
    hello = msgpack.unpackb(wire.encode(wire.Hello("r")))
    hello[0] = 9
    with pytest.raises(wire.VersionMismatch, match="version 9") as caught:
        wire.decode(msgpack.packb(hello), ALL)
    assert caught.value.version == 9
    refused = msgpack.unpackb(wire.encode(wire.Refused("we differ")))
    refused[0] = 9
    assert wire.decode(msgpack.packb(refused), ALL).message == wire.Refused("we differ")


WELCOME = wire.Welcome("w", "simulated", "llama", "abc", 16, 1000, None, 4096, (2,), "", 0, 1 << 20)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("worker_id", "v"), ("model", "mistral"), ("tokenizer_fingerprint", "def"), ("block_size", 1)],
)
def test_a_mismatch_names_both_sides(name: str, expected: Any) -> None:
    text = wire.disagreement(replace(wire.Hello("router-1"), **{name: expected}), WELCOME)
    assert "worker w" in text and "router-1" in text
    assert repr(expected) in text and repr(getattr(WELCOME, name)) in text


def test_unknown_facts_fit_anything() -> None:
    assert wire.disagreement(wire.Hello("r"), WELCOME) == ""
    assert (
        wire.disagreement(wire.Hello("r", tokenizer_fingerprint="x"), replace(WELCOME, tokenizer_fingerprint="")) == ""
    )
