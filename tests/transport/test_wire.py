"""The wire format: round trips, limits, and decoders that no bytes can make raise anything but ProtocolError."""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import fields, is_dataclass
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from preble.errors import InvalidInput, ProtocolError
from preble.transport import wire
from preble.transport.messages import (
    CHUNKS_MAX,
    CLOSING_CODES,
    EVENTS_MAX,
    FINISH_REASONS,
    HALVES,
    ID_BYTES_MAX,
    KV_REFUSAL_CODES,
    PULL_ENDS,
    REFUSAL_CODES,
    STOP_TOKENS_MAX,
    TEXT_BYTES_MAX,
    PullFrom,
)
from preble.transport.namespaces import check_namespace
from preble.types import (
    LOGPROBS_MAX,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Claim,
    Grammar,
    PrefixEvicted,
    PrefixStored,
    RequestEnded,
    RequestPlaced,
    RequestPrefilled,
    SamplingParams,
    TokenLogprob,
)

ALL = wire.ROUTER_MESSAGES | wire.WORKER_MESSAGES | wire.KV_ASKS | wire.KV_ANSWERS

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
GRAMMARS = st.builds(Grammar, st.sampled_from(["regex", "ebnf"]), st.text("ab*", min_size=1, max_size=9)) | st.just(
    Grammar("choice", '["a", "b"]')
)
SAMPLING = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 2**31 - 1),
    temperature=st.none() | st.floats(0, 999),
    top_p=st.none() | st.floats(0.01, 1),
    stop_token_ids=TOKENS,
    ignore_eos=st.booleans(),
    seed=st.none() | INT63,
) | st.builds(
    SamplingParams,
    max_new_tokens=st.integers(99, 2**31 - 1),
    top_k=st.none() | st.integers(-1, 2**31 - 1),
    min_p=st.none() | st.floats(0, 1),
    min_new_tokens=st.none() | st.integers(0, 99),
    frequency_penalty=st.none() | st.floats(-2, 2),
    presence_penalty=st.none() | st.floats(-2, 2),
    repetition_penalty=st.none() | st.floats(0.01, 2),
    logprobs=st.none() | st.integers(0, LOGPROBS_MAX),
    logit_bias=st.none() | st.dictionaries(INT31, st.floats(-100, 100), min_size=1, max_size=5),
    grammar=st.none() | GRAMMARS,
)
CLAIMS = st.none() | st.builds(
    Claim,
    st.text(max_size=32),
    st.floats(0.01, 1e6),
    st.none() | st.floats(0.001, 1e6),
    st.sampled_from(["interactive", "batch"]),
)
LOGPROB = st.floats(max_value=0, allow_nan=False)
LOGPROBS = st.lists(
    st.builds(TokenLogprob, LOGPROB, st.lists(st.tuples(INT31, LOGPROB), max_size=LOGPROBS_MAX).map(tuple)), max_size=3
).map(tuple)
PAIR_HALVES = st.none() | st.sampled_from(HALVES)
FIELDS = st.lists(st.text("abc_", min_size=1, max_size=64), max_size=4).map(tuple)
PEER_EVENTS = st.one_of(  # by workers, of requests and evictions
    st.builds(RequestPlaced, IDS, IDS, PROMPT, NAMESPACES, st.none() | st.integers(1, 2**31 - 1), PAIR_HALVES),
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
    PEER_EVENTS,
)


ONE_TOKEN = b"\x01\0\0\0"
REQUEST = wire.GenerationRequest("r", np.array([1], np.int32))


def sampling_with(place: int, value: Any) -> list[Any]:
    """Sampling on the wire, with one of the fields that few requests have."""
    more: list[Any] = [None] * 7 + [b"", [], None, None, None]
    more[place] = value
    return [9, 0.0, None, b"", False, None, more]


def depth(value: Any) -> int:
    """How deep tuples are nested."""
    return 1 + max(map(depth, value), default=0) if isinstance(value, tuple) else 0


def requests() -> st.SearchStrategy[wire.GenerationRequest]:
    """Requests whose offset fits their tokens."""
    return PROMPT.flatmap(
        lambda ids: st.builds(
            wire.GenerationRequest,
            IDS,
            st.just(ids),
            SAMPLING,
            NAMESPACES,
            st.integers(0, len(ids) - 1),
            CLAIMS,
            st.none() | st.builds(PullFrom, TEXT, INT63, st.integers(1, len(ids)), INT63),
            PAIR_HALVES,
        )
    )


MESSAGES = st.one_of(
    st.builds(wire.Hello, IDS, TEXT, TEXT, TEXT, st.integers(0, 65_536)),
    requests(),
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
        FIELDS,
        FIELDS,
        st.booleans(),
        TEXT,
        TEXT,
        INT63,
    ),
    st.builds(wire.Refused, TEXT),
    st.builds(
        wire.OutputChunk,
        IDS,
        INT31,
        TOKENS,
        st.none() | INT31,
        st.none() | st.sampled_from(FINISH_REASONS),
        st.none() | TEXT,
        INT63,
        LOGPROBS,
    ),
    st.builds(
        wire.OutputChunks,
        st.lists(
            st.builds(
                wire.OutputChunk,
                IDS,
                INT31,
                TOKENS,
                st.none() | INT31,
                st.none() | st.sampled_from(FINISH_REASONS),
                st.none() | TEXT,
                logprobs=LOGPROBS,
            ),
            max_size=4,
        ).map(tuple),
        INT63,
    ),
    st.builds(wire.Rejected, IDS, st.sampled_from(REFUSAL_CODES), TEXT),
    st.builds(wire.Pong, INT63, INT63, INT63, INT63, INT63, INT63, INT63, INT63, st.booleans()),
    st.builds(wire.Events, INT63, st.lists(EVENTS, max_size=3).map(tuple), TEXT),
    st.builds(wire.ReplayEnd, INT63, INT63, INT63, INT63),
    st.builds(wire.PullEnded, IDS, st.sampled_from(PULL_ENDS), INT31, INT31, INT63, INT63, INT63, INT63),
    st.builds(wire.KvAsk, TEXT, PROMPT, INT31, NAMESPACES),
    st.builds(wire.KvPart, INT31, INT31, INT63),
    st.builds(wire.KvRefused, st.sampled_from(KV_REFUSAL_CODES), TEXT),
    st.builds(wire.Draining),
    st.builds(wire.Closed, st.sampled_from(CLOSING_CODES), TEXT),
    st.builds(wire.Fault, TEXT),
)


def plain(value: Any) -> Any:
    """Messages as comparable data: arrays and other sequences of tokens become tuples."""
    if isinstance(value, msgspec.Struct):
        return type(value).__name__, {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, np.ndarray):
        return tuple(value.tolist())
    if isinstance(value, dict):
        return tuple(value.items())
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
    assert not (wire.KV_ASKS | wire.KV_ANSWERS) & (wire.ROUTER_MESSAGES | wire.WORKER_MESSAGES), "no router asks for KV"


def test_token_ids_travel_as_raw_little_endian_int32() -> None:
    frame = wire.encode(wire.GenerationRequest("r", np.array([1, 258, 2**31 - 1], np.int32)))
    assert struct.pack("<3i", 1, 258, 2**31 - 1) in frame
    assert msgpack.unpackb(frame)[:2] == [wire.PROTOCOL_VERSION, 2]


def test_a_claim_travels_as_four_values_and_none_as_one_byte() -> None:
    ids, claim = np.array([7], np.int32), Claim("acme", 2.0, 1.5, "batch")
    frame = wire.encode(wire.GenerationRequest("r", ids, claim=claim))
    assert frame.endswith(bytes.fromhex("94a461636d65cb4000000000000000cb3ff8000000000000a56261746368c0c0"))
    assert wire.decode(frame, ALL).message.claim == claim
    nothing = wire.encode(wire.GenerationRequest("r", ids))
    assert nothing.endswith(b"\xc0\x00\xc0\xc0\xc0")  # namespace, offset, claim, pull, half


@pytest.mark.parametrize(
    "claim",
    [["a", 0.0, None, "batch"], ["a", 1.0, -1.0, "batch"], ["a", 1.0, None, "soon"], ["a" * 129, 1.0, None, "batch"]],
)
def test_claims_that_mean_nothing_are_refused(claim: list[Any]) -> None:
    values = msgpack.unpackb(wire.encode(wire.GenerationRequest("r", np.array([7], np.int32))))
    with pytest.raises(ProtocolError, match=r"tenant|weight|deadline_seconds|priority"):
        wire.decode(msgpack.packb([*values[:-3], claim, None, None]), ALL)


@pytest.mark.parametrize(
    ("pull", "text"),
    [
        (["x", 1, 0, 1], "must be an int in"),
        (["x", 1, 2, 1], "at most the 1 token_ids"),
        (["x" * 5000, 1, 1, 1], "endpoint"),
        (["x", 1, 1], "an array of 4"),
    ],
)
def test_pulls_that_mean_nothing_are_refused(pull: list[Any], text: str) -> None:
    values = msgpack.unpackb(wire.encode(wire.GenerationRequest("r", np.array([7], np.int32))))
    with pytest.raises(ProtocolError, match=text):
        wire.decode(msgpack.packb([*values[:-2], pull, None]), ALL)


@pytest.mark.parametrize("half", ["both", "", 1, True])
def test_halves_that_are_none_are_refused(half: Any) -> None:
    values = msgpack.unpackb(wire.encode(wire.GenerationRequest("r", np.array([7], np.int32), half="decode")))
    with pytest.raises(ProtocolError, match="GenerationRequest.half must be one of prefill, decode"):
        wire.decode(msgpack.packb([*values[:-1], half]), ALL)
    values = msgpack.unpackb(wire.encode(wire.Events(0, (RequestPlaced("A", "r", [1], half="prefill"),))))
    values[6][0][-1] = half
    with pytest.raises(ProtocolError, match="half must be one of prefill, decode"):
        wire.decode(msgpack.packb(values), ALL)


def test_a_decoded_prompt_is_int32_and_cannot_be_written_to() -> None:
    envelope = wire.decode(wire.encode(wire.GenerationRequest("r", np.array([5, 6], np.int32))), ALL)
    assert isinstance(envelope.message, wire.GenerationRequest)
    assert envelope.message.token_ids.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        envelope.message.token_ids[0] = 9


def test_a_chunk_costs_few_bytes() -> None:
    frame = wire.encode(wire.OutputChunk("123.1", 7, (42,)), epoch=2**62, session=3, seq=100)
    assert len(frame) < 40


def test_a_token_among_those_of_a_step_costs_few_bytes() -> None:
    chunks = tuple(wire.OutputChunk(f"{1000 + i}", 7, (42,)) for i in range(64))
    assert len(wire.encode(wire.OutputChunks(chunks), epoch=2**62, session=3, seq=100)) < 64 * 18 + 25


def test_what_is_reported_of_a_request_costs_as_few_bytes_as_the_page_says() -> None:
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


# --- beside another reader --------------------------------------------------------------------------------------------


def assert_faithful(frame: bytes) -> None:
    """What is read from a frame, if it is, has the values that msgpack finds there."""
    try:
        envelope = wire.decode(frame, ALL)
    except ProtocolError:
        return
    version, again = frame_of(envelope), msgpack.unpackb(frame)
    assert msgpack.unpackb(version)[1:] == again[1:]  # a `Refused` may be of any version


def frame_of(envelope: wire.Envelope) -> bytes:
    return wire.encode(envelope.message, epoch=envelope.epoch, session=envelope.session, seq=envelope.seq)


@given(MESSAGES, INT63, INT63, INT63)
def test_frames_are_what_msgpack_writes_of_the_values(
    message: wire.Message, epoch: int, session: int, seq: int
) -> None:
    frame = wire.encode(message, epoch=epoch, session=session, seq=seq)
    values = msgpack.unpackb(frame)
    assert values[0] == wire.PROTOCOL_VERSION and values[2:5] == [epoch, session, seq]
    assert frame == msgpack.packb(values)
    assert frame == frame_of(wire.decode(frame, ALL))


@given(MESSAGES, st.data())
@settings(max_examples=400)
def test_damaged_frames_are_read_as_msgpack_reads_them(message: wire.Message, data: st.DataObject) -> None:
    frame = bytearray(wire.encode(message, epoch=300, session=2, seq=70_000))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    assert_faithful(bytes(frame))
    assert_faithful(bytes(frame[: data.draw(st.integers(0, len(frame)))]))
    with pytest.raises(ProtocolError):
        wire.decode(bytes(frame) + b"\0", ALL)


@given(MESSAGES, st.data())
@settings(max_examples=200)
def test_junk_fields_are_read_as_msgpack_reads_them(message: wire.Message, data: st.DataObject) -> None:
    values = msgpack.unpackb(wire.encode(message))
    values[data.draw(st.integers(0, len(values) - 1))] = data.draw(JUNK)
    assert_faithful(msgpack.packb(values))


@given(st.lists(PEER_EVENTS, min_size=1, max_size=3), TEXT, st.data())
@settings(max_examples=400)
def test_damaged_events_are_read_as_msgpack_reads_them(events: list[Any], router: str, data: st.DataObject) -> None:
    frame = wire.encode(wire.Events(70_000, tuple(events), router), epoch=300)
    values = msgpack.unpackb(frame)
    event = data.draw(st.sampled_from(values[6]))
    event[data.draw(st.integers(0, len(event) - 1))] = data.draw(JUNK)
    assert_faithful(msgpack.packb(values))
    event[data.draw(st.integers(0, len(event))) :] = data.draw(st.lists(JUNK, max_size=2))
    assert_faithful(msgpack.packb(values))
    damaged = bytearray(frame)
    damaged[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    assert_faithful(bytes(damaged))


FREQUENT = [
    wire.OutputChunk("17", 3, (1, 2**31 - 1)),
    wire.OutputChunk("17", 0, (5,), 12, "length", None, 9),
    wire.OutputChunk("17", 0, (), None, "stop"),
    wire.GenerationRequest("a" * ID_BYTES_MAX, np.arange(2000, dtype=np.int32)),
    wire.GenerationRequest(
        "1", np.array([7, 8], np.int32), SamplingParams(5, 0.5, 0.9, (2, 3), True, 2**63 - 1), None, 1
    ),
    wire.Events(2**63 - 1, (), "x" * TEXT_BYTES_MAX),
    wire.Events(
        9,
        (
            RequestPlaced("A", "x" * ID_BYTES_MAX, [0, 2**31 - 1], None, 2**31 - 1),
            RequestPlaced("A", "r", [1]),
            RequestPrefilled("A", "r", 0),
            RequestEnded("A", "r"),
            PrefixEvicted([1, 2], 2),
        ),
    ),
    wire.Events(0, (RequestEnded("A", "r", 5),) * EVENTS_MAX),
]
RARE = [
    wire.OutputChunk("17", 0, (1,), None, "abort"),
    wire.OutputChunk("17", 0, (1,), None, "error", "why"),
    wire.GenerationRequest("1", np.array([7], np.int32), SamplingParams(temperature=0)),  # an int, which travels as one
    wire.GenerationRequest("1", np.array([7], np.int32), namespace=("lora", 1)),
    wire.GenerationRequest(
        "1",
        np.array([7], np.int32),
        SamplingParams(9, None, logprobs=2, top_k=5, logit_bias={3: -1.5}, grammar=Grammar("regex", "a+")),
    ),
    wire.OutputChunks((wire.OutputChunk("17", 3, (1,)), wire.OutputChunk("18", 0, (), 2, "error", "why")), 9),
    wire.GenerationRequest("1", np.array([7], np.int32), SamplingParams(allowed_token_ids=(3, 2**31 - 1))),
    wire.GenerationRequest("1", np.array([7], np.int32), SamplingParams(bad_words=("a", "größe"))),
    wire.OutputChunk("17", 3, (1,), logprobs=(TokenLogprob(-0.5, ((1, -0.5), (2, -1.25))),)),
    wire.Events(0, (RequestPlaced("A", "r", [1], "lora"),)),
    wire.Events(0, (PrefixEvicted([1, 2], 0, "lora"),)),
    wire.Events(0, (AllBlocksCleared(),)),
    wire.Events(0, (PrefixEvicted([1, 2], 1, None, "CPU"),)),
]


DIGESTS = (
    *("00974e7c3a8dbb5a", "ab195a314693669d", "801bca4cfa3fc289", "f90b62a2064eece2", "9956642c45036258"),
    *("96b9ecf46604729b", "d1694d33425a8db8", "946df742235ffb21", "5671ab413f6f4abb", "a62059c1daa1952b"),
    *("bd4c6ea4ed3fe9fa", "92da0d314827e892", "98eefb919c823333", "4054d1286f7670a0", "83288fc0fedeb67e"),
    *("b1fff5301ba09e84", "19f8f6c73d9acdb6", "7fc22d80ff229299", "b0b16d693ef81b8e", "9f2f803faca4d02d"),
    "899dc3b7a47a534a",
)


@pytest.mark.parametrize(("message", "digest"), list(zip(FREQUENT + RARE, DIGESTS, strict=True)))
def test_the_bytes_of_long_messages_stay(message: wire.Message, digest: str) -> None:
    frame = wire.encode(message, epoch=1, session=2, seq=3)
    assert hashlib.sha256(frame).hexdigest()[:16] == digest
    assert plain(wire.decode(frame, ALL).message) == plain(message)


STORED = BlockStored((1, b"h"), None, (1, 2), 2, ("a", 1), "GPU")
STAYS = [
    (
        wire.Welcome("w", "simulated", "llama", "abc", 16, 1000, None, 4096, (2,), "", 0, 1 << 20),
        "dc00190a11cf400000000000000002ce00011170a177a973696d756c61746564a56c6c616d61a361626310cd03e8c0cd1000"
        "c40402000000a000ce00100000c29090c2a0a000a4626f7468",
    ),
    (wire.Hello("r"), "9a0a01cf400000000000000002ce00011170a172a0a0a000"),
    (wire.Abort("r"), "960a03cf400000000000000002ce00011170a172"),
    (wire.Ping(7), "960a04cf400000000000000002ce0001117007"),
    (wire.Replay(300), "960a05cf400000000000000002ce00011170cd012c"),
    (wire.Bye(), "950a06cf400000000000000002ce00011170"),
    (wire.Refused("no"), "960a12cf400000000000000002ce00011170a26e6f"),
    (wire.Rejected("r", "invalid", "t"), "980a14cf400000000000000002ce00011170a172a7696e76616c6964a174"),
    (wire.Pong(1, 2, 3, 4, 5, 6, 7, 8, True), "9e0a15cf400000000000000002ce000111700102030405060708c3"),
    (wire.ReplayEnd(1, 2, 3, 4), "990a17cf400000000000000002ce0001117001020304"),
    (wire.Draining(), "950a18cf400000000000000002ce00011170"),
    (wire.Closed("gap", "t"), "970a19cf400000000000000002ce00011170a3676170a174"),
    (wire.Fault("t"), "960a1acf400000000000000002ce00011170a174"),
    (
        wire.Events(0, (STORED, BlockRemoved((2**64 - 1, -1)), RequestPlaced("a", "r", (1,), ("x", None), 5))),
        "980a16cf400000000000000002ce00011170009397a1539201c40168c0c40801000000020000000292a16101a347505593a1"
        "5292cfffffffffffffffffffc097a151a161a172c4040100000092a178c005c0a0",
    ),
]


@pytest.mark.parametrize(("message", "frame"), STAYS)
def test_the_bytes_of_short_messages_stay(message: wire.Message, frame: str) -> None:
    assert wire.encode(message, epoch=2**62, session=2, seq=70_000).hex() == frame
    assert plain(wire.decode(bytes.fromhex(frame), ALL).message) == plain(message)


def test_the_largest_frequent_frames_are_what_msgpack_writes() -> None:
    chunk = wire.OutputChunk("x" * ID_BYTES_MAX, 2**31 - 1, (2**31 - 1,) * 70_000, 2**31 - 1, "length", None, 2**63 - 1)
    sampling = SamplingParams(2**31 - 1, 999.9, 1.0, (1,) * STOP_TOKENS_MAX, True, 2**63 - 1)
    request = wire.GenerationRequest("x" * ID_BYTES_MAX, np.zeros(70_000, np.int32), sampling, None, 69_999)
    for message in (chunk, request):
        frame = wire.encode(message, epoch=2**63 - 1, session=2**63 - 1, seq=2**63 - 1)
        assert frame == msgpack.packb(msgpack.unpackb(frame))
        assert plain(wire.decode(frame, ALL).message) == plain(message)


# --- hostile bytes ----------------------------------------------------------------------------------------------------


@given(st.binary(max_size=200))
@settings(max_examples=400)
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
@settings(max_examples=200)
def test_any_fields_under_any_code_are_refused_or_valid(code: int, values: list[Any]) -> None:
    decodes_or_protocol_error(msgpack.packb([wire.PROTOCOL_VERSION, code, 1, 1, 1, *values], unicode_errors="replace"))


@given(MESSAGES, st.data())
@settings(max_examples=200)
def test_one_field_swapped_for_junk_is_refused_or_valid(message: wire.Message, data: st.DataObject) -> None:
    values = msgpack.unpackb(wire.encode(message))
    values[data.draw(st.integers(0, len(values) - 1))] = data.draw(JUNK)
    decodes_or_protocol_error(msgpack.packb(values))


@given(MESSAGES, st.data())
@settings(max_examples=200)
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
        (wire.Abort("r"), 5, "", "Abort.request_id must be a text of 1 to"),
        (wire.Abort("r"), 5, "x" * (ID_BYTES_MAX + 1), "Abort.request_id must be a text of 1 to"),
        (wire.Abort("r"), 5, b"r", "Abort.request_id must be a text"),
        (wire.Fault("t"), 5, "é" * TEXT_BYTES_MAX, "Fault.text must be a text of 0 to"),
        (wire.OutputChunk("r", 0, (1,)), 7, b"abc", "OutputChunk.token_ids must be whole int32 words"),
        (
            wire.OutputChunk("r", 0, (1,)),
            7,
            struct.pack("<i", -1),
            "OutputChunk.token_ids must be whole .*, none of them negative",
        ),
        (wire.OutputChunk("r", 0, (1,)), 9, "bored", "OutputChunk.finish_reason must be one of"),
        (wire.Rejected("r", "invalid", ""), 6, "because", "Rejected.code must be one of"),
        (REQUEST, 6, b"", "GenerationRequest.token_ids is empty"),
        (
            wire.GenerationRequest("r", np.array([1], np.int32)),
            9,
            1,
            "GenerationRequest.output_offset must be below the 1 token_ids",
        ),
        (REQUEST, 8, 1.5, "GenerationRequest.namespace must be None"),
        (
            wire.GenerationRequest("r", np.array([1], np.int32)),
            7,
            [1, math.nan, 1.0, b"", False, 0, None],
            "temperature must be in",
        ),
        (
            wire.GenerationRequest("r", np.array([1], np.int32)),
            7,
            [1, "hot", 1.0, b"", False, 0, None],
            "temperature must be a number",
        ),
        (
            wire.GenerationRequest("r", np.array([1], np.int32)),
            7,
            [0, 0.0, 1.0, b"", False, 0, None],
            "max_new_tokens must be an int",
        ),
        (
            wire.GenerationRequest("r", np.array([1], np.int32)),
            7,
            [1, 0.0, 1.0],
            "GenerationRequest.sampling must be an array of 7",
        ),
        (REQUEST, 7, sampling_with(0, 2**40), "top_k must be an int"),
        (REQUEST, 7, sampling_with(1, "much"), "GenerationRequest.sampling.more.min_p must be a number"),
        (REQUEST, 7, sampling_with(7, ONE_TOKEN), "more.biases must be as many as bias_token_ids"),
        (REQUEST, 7, sampling_with(9, ["rhyme", "abab"]), "Grammar.kind must be one of"),
        (REQUEST, 7, sampling_with(9, ["regex", 5]), "GenerationRequest.sampling.more.grammar.text must be a text"),
        (REQUEST, 7, sampling_with(10, b"\xff" * 4), "more.allowed_token_ids must be whole int32 words"),
        (REQUEST, 7, sampling_with(10, b""), "allowed_token_ids must be a tuple of 1 to"),
        (REQUEST, 7, sampling_with(11, ["a" * 257]), "more.bad_words"),
        (REQUEST, 7, sampling_with(11, [""]), "bad_words must be a tuple of 1 to"),
        (wire.OutputChunk("r", 0, (1,)), 12, [["?", []]], "OutputChunk.logprobs must be an array of log probabilities"),
        (wire.OutputChunks(()), 5, [["r", 0, b"abc", None, None, None, []]], "chunks.0..token_ids must be whole int32"),
        (wire.OutputChunks(()), 5, [["", 0, b"", None, None, None, []]], "OutputChunks.chunks must be an array of"),
        (wire.OutputChunks(()), 5, [["r", 0, b"", None]], "OutputChunks.chunks must be an array of at most"),
        (
            wire.OutputChunks(()),
            5,
            [["\u20ac" * 86, 0, b"", None, None, None, []]],
            "chunks.0..request_id must be a text",
        ),
        (wire.OutputChunks(()), 5, [["r", 0, b"", None, None, None, []]] * (CHUNKS_MAX + 1), "an array of at most"),
        (wire.Events(0, ()), 6, [["Z"]], "Events.events.0. must be an event array"),
        (wire.Events(0, ()), 6, [["E", b"\0\0\0\0", 2, None]], "kept_tokens must be an int in .0, 1."),
        (
            wire.Events(0, ()),
            6,
            [["R", [""], None]],
            "Events.events.0..block_hashes must be an array, .* 1 to 64 bytes",
        ),
        (
            wire.Events(0, ()),
            6,
            [["Q", "", "r", ONE_TOKEN, None, 1, None]],
            "Events.events.0..router must be a text of 1 to",
        ),
        (wire.Events(0, ()), 6, [["Q", "a", "r", b"", None, 1, None]], "Events.events.0..token_ids is empty"),
        (wire.Events(0, ()), 6, [["Q", "a", "r", ONE_TOKEN, 1.5, 1, None]], "Events.events.0..namespace must be None"),
        (wire.Events(0, ()), 6, [["Q", "a", "r", ONE_TOKEN, None, 0, None]], "max_new_tokens must be an int in .1, "),
        (wire.Events(0, ()), 6, [["F", "a", "x" * 257, 0]], "Events.events.0..request_id must be a text of 1 to"),
        (wire.Events(0, ()), 6, [["F", "a", "r", -1]], "Events.events.0..cached_tokens must be an int in .0, "),
        (wire.Events(0, ()), 6, [["X", "a", "r", True]], "Events.events.0..output_tokens must be an int in .0, "),
        (wire.Events(0, ()), 6, [["X", "a", "r"]], "Events.events.0. must be an array of 4"),
        (wire.Events(0, ()), 7, 3, "Events.complete_for must be a text"),
        (wire.Hello("r"), 5, "", "Hello.router_id must be a text of 1 to"),
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
    prompt = wire.GenerationRequest("r", np.zeros(1000, np.int32))
    frame = wire.encode(prompt)
    wire.decode(frame, ALL, max_bytes=len(frame))
    with pytest.raises(ProtocolError, match="the limit is"):
        wire.decode(frame, ALL, max_bytes=len(frame) - 1)
    with pytest.raises(InvalidInput, match="GenerationRequest takes .* the limit is"):
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
        (wire.Abort(""), "Abort.request_id must be a text of 1 to"),
        (wire.Abort("x" * (ID_BYTES_MAX + 1)), "Abort.request_id must be a text of 1 to"),
        (wire.Events(0, (AllBlocksCleared(),) * (EVENTS_MAX + 1)), "do not fit one frame"),
        (
            wire.GenerationRequest(
                "r", np.array([1], np.int32), SamplingParams(stop_token_ids=(1,) * (STOP_TOKENS_MAX + 1))
            ),
            "stop_token_ids has more than",
        ),
        (replace(REQUEST, namespace=frozenset()), "namespace must be None"),
        (wire.OutputChunk("r", 0, (2**31,)), "token_ids.0. is 2147483648, outside"),
        (wire.OutputChunks((wire.OutputChunk("", 0, (1,)),)), "chunks.0..request_id must be a text of 1 to"),
        (wire.OutputChunks((wire.OutputChunk("r", 0, ()),) * (CHUNKS_MAX + 1)), "do not fit one frame"),
        (wire.Ping(2**70), "cannot be encoded"),
        (wire.Events(0, (PrefixStored([1]),)), "events of .*PrefixStored.* do not travel"),
        (wire.Events(0, (RequestEnded("", "r"),)), "Events.events.0..router must be a text of 1 to"),
        (wire.Events(0, (RequestPlaced("a", "r", [-(2**31) - 1]),)), "token_ids.0. is -2147483649, outside"),
        (wire.Hello(""), "Hello.router_id must be a text of 1 to"),
    ],
)
def test_what_does_not_fit_the_wire_is_this_sides_fault(message: wire.Message, complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        wire.encode(message)


def test_a_long_reason_is_cut_rather_than_refused() -> None:
    envelope = wire.decode(wire.encode(wire.Closed("gap", "é" * 10_000)), ALL)
    assert isinstance(envelope.message, wire.Closed)
    assert 0 < len(envelope.message.text.encode()) <= TEXT_BYTES_MAX


@pytest.mark.parametrize("namespace", [None, "lora", b"salt", 7, ("model", ("lora", 3), None), ()])
def test_namespaces_that_can_travel(namespace: Any) -> None:
    check_namespace(namespace)
    there = wire.decode(
        wire.encode(wire.GenerationRequest("r", np.array([7], np.int32), namespace=namespace)), ALL
    ).message
    assert isinstance(there, wire.GenerationRequest) and there.namespace == namespace


@pytest.mark.parametrize("namespace", [1.5, True, frozenset(), 2**70, ((((("deep",),),),),), ("x",) * 65, "x" * 5000])
def test_namespaces_that_cannot_travel(namespace: Any) -> None:
    with pytest.raises(InvalidInput, match="namespace"):
        check_namespace(namespace)


# --- versions ---------------------------------------------------------------------------------------------------------


def test_another_version_is_recognised_and_a_refusal_is_understood_in_any() -> None:
    hello = msgpack.unpackb(wire.encode(wire.Hello("r")))
    hello[0] = 99
    with pytest.raises(wire.VersionMismatch, match="version 99") as caught:
        wire.decode(msgpack.packb(hello), ALL)
    assert caught.value.version == 99
    refused = msgpack.unpackb(wire.encode(wire.Refused("we differ")))
    refused[0] = 99
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
