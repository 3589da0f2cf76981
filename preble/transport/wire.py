"""Messages between routers and workers and their bytes. Owns the format, its limits and strict decoding; opens no
socket.

One message is one ZeroMQ frame, a msgpack array:

    [protocol version, message code, epoch, session, sequence number, field, field, ...]

`epoch` names one start of a worker process and `session` one connection of one router to it, so that a frame from an
earlier life is recognised. `sequence number` counts the frames of one direction of a session from 0: a hole means that
frames were lost. Token ids travel as raw little-endian int32. `Refused` keeps its layout in every protocol version, so
that two sides that do not understand each other can still say so.

`decode` accepts exactly what `encode` makes: a wrong type, a value out of range, a missing or an extra field raises
`ProtocolError` naming the field, and any bytes whatever raise nothing else. Texts are never quoted in errors: they may
hold parts of prompts.

There are two ways through both. `_frames` handles the usual `Submit` and `Chunk` in compiled code, and reads the usual
`Events`: nearly all traffic. Where it declines, and for every other message, the table of fields below decides.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from ..errors import InvalidInput, ProtocolError
from ..types import CacheEvent, PrefixEvicted, RequestEnded, RequestPlaced, RequestPrefilled, SamplingParams
from ._frames import read_chunk, read_events, read_submit, write_chunk, write_submit
from .fields import (
    INT31,
    MAX_STOP_TOKENS,
    Field,
    Unpack,
    bool_field,
    choice_field,
    id_field,
    int_field,
    optional,
    pack_events,
    pack_namespace,
    pack_sampling,
    pack_tokens,
    text_field,
    unpack_events,
    unpack_namespace,
    unpack_prompt,
    unpack_sampling,
    unpack_tuple,
)

PROTOCOL_VERSION = 4

MAX_FRAME_BYTES = 16 << 20  # a longer frame is refused unread
MAX_ELEMENTS = 1 << 18  # array elements in one frame: a few bytes of nested arrays must not become a gigabyte

REFUSAL_CODES = ("queue_full", "invalid", "engine", "engine_failed", "draining", "duplicate")
CLOSING_CODES = ("gap", "slow_reader", "expired", "no_session", "replaced", "shutdown", "engine_failed")
FINISH_REASONS = ("stop", "length", "abort", "error")


# --- messages, router to worker ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a session. What the router expects of the worker is checked by the worker; "" and 0 mean no expectation.

    No two routers may have the same `router_id`: each takes what is told of its own requests for known.
    """

    router_id: str
    worker_id: str = ""
    model: str = ""
    tokenizer_fingerprint: str = ""
    block_size: int = 0


@dataclass(frozen=True, slots=True)
class Submit:
    """A prompt to continue; the last `output_offset` of `token_ids` (1-D int32) are output of an earlier attempt."""

    request_id: str
    token_ids: npt.NDArray[np.int32]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    namespace: Hashable = None
    output_offset: int = 0


@dataclass(frozen=True, slots=True)
class Abort:
    """The router no longer wants a request. Unknown ids are ignored: the request may just have ended."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Heartbeat; answered by a `Pong` with the same `nonce`."""

    nonce: int


@dataclass(frozen=True, slots=True)
class Replay:
    """Asks for the event batches from `from_seq` on; the worker answers with a page of them and a `ReplayEnd`."""

    from_seq: int


@dataclass(frozen=True, slots=True)
class Bye:
    """The router leaves; its requests are aborted."""


# --- messages, worker to router ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """Accepts a `Hello` and says what the worker is. The first event batch to expect is `next_event_seq`."""

    worker_id: str
    engine: str
    model: str
    tokenizer_fingerprint: str
    block_size: int
    kv_capacity_tokens: int
    max_running: int | None
    max_model_tokens: int
    eos_token_ids: tuple[int, ...]
    events_endpoint: str
    next_event_seq: int
    max_frame_bytes: int
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """Declines a `Hello`. The layout of this message never changes; `text` names both sides."""

    text: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """New output tokens of a request; `index` is the position of the first, counted from the original prompt.

    Event batches from `next_event_seq` on are younger than these tokens, whichever comes first.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    next_event_seq: int = 0


@dataclass(frozen=True, slots=True)
class Rejected:
    """A request was not taken, or given up without fault of its own (`engine_failed`). `code`: see `REFUSAL_CODES`."""

    request_id: str
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Pong:
    """Answers a `Ping`: load now, the next event batch's number, how long the engine has been in its current step."""

    nonce: int
    next_event_seq: int
    running: int = 0
    waiting: int = 0
    kv_used_tokens: int = 0
    kv_cached_tokens: int = 0
    waiting_uncached_tokens: int = 0
    step_ms: int = 0
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Events:
    """One numbered batch of events, oldest first; `number` counts batches from 0 in every epoch.

    A router that is alone need not be told of its own requests: they are left out, and `complete_for` is its id. For
    any other router such a batch counts as lost. "" makes it complete for all.
    """

    number: int
    events: tuple[CacheEvent, ...]
    complete_for: str = ""


@dataclass(frozen=True, slots=True)
class ReplayEnd:
    """Ends one page of a replay: it held the batches [`from_seq`, `to_seq`) and the worker's next batch is
    `next_event_seq`.

    `first_kept_seq` > `from_seq` means that older batches are gone for good: the router must start afresh.
    """

    from_seq: int
    to_seq: int
    first_kept_seq: int
    next_event_seq: int


@dataclass(frozen=True, slots=True)
class Draining:
    """The worker takes no new requests and will exit when the running ones end."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The worker ended the session (`code`: see `CLOSING_CODES`); its requests are aborted."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Fault:
    """Either side: a frame could not be decoded; it was counted and ignored. A worker's is outside the numbering."""

    text: str


Message = (
    Hello
    | Submit
    | Abort
    | Ping
    | Replay
    | Bye
    | Welcome
    | Refused
    | Chunk
    | Rejected
    | Pong
    | Events
    | ReplayEnd
    | Draining
    | Closed
    | Fault
)


class Envelope(NamedTuple):
    """A decoded frame."""

    epoch: int
    session: int
    seq: int
    message: Message


class VersionMismatch(ProtocolError):
    """The frame is of another protocol version; `version` is theirs."""

    def __init__(self, version: int) -> None:
        super().__init__(f"frame is of protocol version {version}, this side speaks {PROTOCOL_VERSION}")
        self.version = version


# --- the table of messages --------------------------------------------------------------------------------------------

_REFUSED_CODE = 18

_FIELDS: Mapping[type, tuple[int, tuple[Field, ...]]] = {
    Hello: (
        1,
        (
            id_field("router_id"),
            text_field("worker_id"),
            text_field("model"),
            text_field("tokenizer_fingerprint"),
            int_field("block_size", 0, 65_536),
        ),
    ),
    Submit: (
        2,
        (
            id_field("request_id"),
            Field("token_ids", pack_tokens, unpack_prompt),
            Field("sampling", pack_sampling, unpack_sampling),
            Field("namespace", pack_namespace, unpack_namespace),
            int_field("output_offset", 0, INT31),
        ),
    ),
    Abort: (3, (id_field("request_id"),)),
    Ping: (4, (int_field("nonce"),)),
    Replay: (5, (int_field("from_seq"),)),
    Bye: (6, ()),
    Welcome: (
        17,
        (
            id_field("worker_id"),
            text_field("engine"),
            text_field("model"),
            text_field("tokenizer_fingerprint"),
            int_field("block_size", 1, 65_536),
            int_field("kv_capacity_tokens", 1, INT31),
            optional(int_field("max_running", 1, INT31)),
            int_field("max_model_tokens", 1, INT31),
            Field("eos_token_ids", pack_tokens, lambda where, value: unpack_tuple(where, value, MAX_STOP_TOKENS)),
            text_field("events_endpoint"),
            int_field("next_event_seq"),
            int_field("max_frame_bytes", 1024, INT31),
            bool_field("draining"),
        ),
    ),
    Refused: (_REFUSED_CODE, (text_field("text"),)),
    Chunk: (
        19,
        (
            id_field("request_id"),
            int_field("index", 0, INT31),
            Field("token_ids", pack_tokens, unpack_tuple),
            optional(int_field("cached_tokens", 0, INT31)),
            optional(choice_field("finish_reason", FINISH_REASONS)),
            optional(text_field("error")),
            int_field("next_event_seq"),
        ),
    ),
    Rejected: (20, (id_field("request_id"), choice_field("code", REFUSAL_CODES), text_field("text"))),
    Pong: (
        21,
        (
            *(int_field(name) for name in ("nonce", "next_event_seq", "running", "waiting", "kv_used_tokens")),
            *(int_field(name) for name in ("kv_cached_tokens", "waiting_uncached_tokens", "step_ms")),
            bool_field("draining"),
        ),
    ),
    Events: (22, (int_field("number"), Field("events", pack_events, unpack_events), text_field("complete_for"))),
    ReplayEnd: (
        23,
        tuple(int_field(name) for name in ("from_seq", "to_seq", "first_kept_seq", "next_event_seq")),
    ),
    Draining: (24, ()),
    Closed: (25, (choice_field("code", CLOSING_CODES), text_field("text"))),
    Fault: (26, (text_field("text"),)),
}

_Reads = tuple[tuple[str, Unpack], ...]  # of a message: the name of each field in errors, and what reads it
_BY_CODE: Mapping[int, tuple[type, _Reads]] = {
    code: (cls, tuple((f"{cls.__name__}.{item.name}", item.unpack) for item in fields))
    for cls, (code, fields) in _FIELDS.items()
}
ROUTER_MESSAGES = frozenset(cls for cls, (code, _) in _FIELDS.items() if code < 16) | {Fault}
WORKER_MESSAGES = frozenset(cls for cls, (code, _) in _FIELDS.items() if code > 16)
_HEADER: _Reads = tuple((name, int_field(name).unpack) for name in ("epoch", "session", "seq"))
_NO_CLASS: tuple[None, _Reads] = (None, ())


def encode(
    message: Message, *, epoch: int = 0, session: int = 0, seq: int = 0, max_bytes: int = MAX_FRAME_BYTES
) -> bytes:
    """The frame of a message. Raises `InvalidInput` naming what does not fit the wire: that is this side's fault."""
    frame = None
    if type(message) is Chunk:
        frame = write_chunk(message, epoch, session, seq, PROTOCOL_VERSION)
    elif type(message) is Submit:
        token_ids = np.ascontiguousarray(message.token_ids, dtype=np.int32)
        frame = write_submit(message, epoch, session, seq, token_ids, PROTOCOL_VERSION)
    frame = frame or encode_by_fields(message, epoch, session, seq)
    if len(frame) > max_bytes:
        raise InvalidInput(f"{type(message).__name__} takes {len(frame)} bytes, the limit is {max_bytes}")
    return frame


def encode_by_fields(message: Message, epoch: int, session: int, seq: int) -> bytes:
    """The frame of any message, however long. Raises `InvalidInput` as `encode` does."""
    code, fields = _FIELDS[type(message)]
    values: list[Any] = [PROTOCOL_VERSION, code, epoch, session, seq]
    for item in fields:
        value = getattr(message, item.name)
        values.append(value if item.pack is None else item.pack(value))
    try:
        frame: bytes = msgpack.packb(values)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidInput(f"{type(message).__name__} cannot be encoded: {error}") from error
    return frame


def decode(frame: bytes, allowed: frozenset[type], *, max_bytes: int = MAX_FRAME_BYTES) -> Envelope:
    """The message of a frame, one of the classes `allowed`. Raises `ProtocolError` saying what is wrong, no other."""
    if len(frame) > max_bytes:
        raise ProtocolError(f"frame of {len(frame)} bytes, the limit is {max_bytes}")
    if Chunk in allowed:
        chunk = read_chunk(frame, PROTOCOL_VERSION)
        if chunk is not None:
            epoch, session, seq, fields = chunk
            return Envelope(epoch, session, seq, Chunk(*fields))
    if Submit in allowed:
        submit = read_submit(frame, PROTOCOL_VERSION)
        if submit is not None:
            return _submit_of(*submit)
    if Events in allowed:
        events = read_events(frame, PROTOCOL_VERSION)
        if events is not None:
            return _events_of(*events)
    return decode_by_fields(frame, allowed)


def _submit_of(
    epoch: int, session: int, seq: int, request_id: str, tokens: bytes, sampling: tuple[Any, ...], offset: int
) -> Envelope:
    try:
        message = Submit(request_id, np.frombuffer(tokens, np.int32), SamplingParams(*sampling), None, offset)
    except InvalidInput as error:
        raise ProtocolError(str(error)) from error
    return Envelope(epoch, session, seq, message)


def _events_of(
    epoch: int, session: int, seq: int, number: int, told: list[tuple[Any, ...]], complete_for: str
) -> Envelope:
    events = tuple(_EVENT_OF[letter](*fields) for letter, *fields in told)
    return Envelope(epoch, session, seq, Events(number, events, complete_for))


def _placed_of(router: str, request_id: str, words: bytes, namespace: None, limit: int | None) -> RequestPlaced:
    return RequestPlaced(router, request_id, np.frombuffer(words, np.int32), namespace, limit)  # type: ignore[arg-type]


def _evicted_of(words: bytes, kept_tokens: int, namespace: None) -> PrefixEvicted:
    return PrefixEvicted(np.frombuffer(words, np.int32), kept_tokens, namespace)  # type: ignore[arg-type]


# What `_frames.read_events` reads, by the letter that stands for it in a frame.
_EVENT_OF: Mapping[str, Callable[..., CacheEvent]] = {
    "Q": _placed_of,
    "F": RequestPrefilled,
    "X": RequestEnded,
    "E": _evicted_of,
}


def decode_by_fields(frame: bytes, allowed: frozenset[type]) -> Envelope:
    """The message of any frame. Raises `ProtocolError` as `decode` does."""
    values = _unpack_frame(frame)
    version, code = values[0], values[1]
    if type(version) is not int or type(code) is not int:
        raise ProtocolError("frame does not start with a protocol version and a message code")
    if version != PROTOCOL_VERSION and code != _REFUSED_CODE:
        raise VersionMismatch(version)
    cls, reads = _BY_CODE.get(code, _NO_CLASS)
    if cls is None or cls not in allowed:
        raise ProtocolError(f"message code {code} is unknown or not expected from this side")
    if len(values) != 5 + len(reads):
        raise ProtocolError(f"{cls.__name__} must have {len(reads)} fields, got {len(values) - 5}")
    header = [unpack(name, value) for (name, unpack), value in zip(_HEADER, values[2:5], strict=True)]
    message = cls(*[unpack(name, value) for (name, unpack), value in zip(reads, values[5:], strict=True)])
    if isinstance(message, Submit) and message.output_offset >= len(message.token_ids):
        raise ProtocolError(
            f"Submit.output_offset must be below the {len(message.token_ids)} token_ids, got {message.output_offset}"
        )
    epoch, session, seq = header
    return Envelope(epoch, session, seq, message)


def disagreement(hello: Hello, welcome: Welcome) -> str:
    """What keeps this router and this worker apart, naming both sides; "" when they fit. Unknown facts fit anything."""
    for name in ("worker_id", "model", "tokenizer_fingerprint", "block_size"):
        theirs, expected = getattr(welcome, name), getattr(hello, name)
        if expected and theirs and expected != theirs:
            return f"worker {welcome.worker_id} has {name} {theirs!r}, router {hello.router_id} expects {expected!r}"
    return ""


class _Elements:
    """Counts the array elements of one frame while msgpack builds them; stops it at the limit."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = MAX_ELEMENTS

    def __call__(self, items: list[Any]) -> list[Any]:
        self.left -= len(items) + 1
        if self.left < 0:
            raise ValueError("too many elements")
        return items


def _unpack_frame(frame: bytes) -> list[Any]:
    try:
        values = msgpack.unpackb(
            frame, raw=False, list_hook=_Elements(), max_array_len=MAX_ELEMENTS, max_map_len=0, max_ext_len=0
        )
    except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(f"frame is not msgpack: {type(error).__name__}") from error
    if type(values) is not list or len(values) < 5:
        raise ProtocolError("frame is not an array of at least 5 elements")
    return values
