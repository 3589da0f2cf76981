"""The bytes of messages. Owns the frame, its version and strict decoding; what fields hold is said in `messages`, how
they travel in `forms`. Opens no socket.

One message is one ZeroMQ frame, a msgpack array:

    [protocol version, message code, epoch, session, sequence number, field, field, ...]

`epoch` names one start of a worker process and `session` one connection of one router to it, so that a frame from an
earlier life is recognised. `sequence number` counts the frames of one direction of a session from 0: a hole means that
frames were lost. Between workers (`KvAsk` and its answers) these three say what `messages` does; the KV itself is a
second frame. Token ids travel as raw little-endian int32. `Refused` keeps its layout in every protocol version, so
that two sides that do not understand each other can still say so.

`decode` accepts exactly what `encode` makes: a wrong type, a value out of range, a missing or an extra field raises
`ProtocolError` naming the field, and any bytes whatever raise nothing else. Texts are never quoted in errors: they may
hold parts of prompts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, get_type_hints

import numpy as np
from msgspec import DecodeError, Raw, Struct, ValidationError
from msgspec.msgpack import Decoder, Encoder
from msgspec.structs import astuple

from ..errors import InvalidInput, ProtocolError
from .forms import EVENT_KINDS, FORMS
from .messages import (
    FRAME_BYTES_MAX,
    Abort,
    Bye,
    Closed,
    Draining,
    Events,
    Fault,
    GenerationRequest,
    Hello,
    KvAsk,
    KvPart,
    KvRefused,
    Message,
    Number,
    OutputChunk,
    OutputChunks,
    Ping,
    Pong,
    PullEnded,
    Refused,
    Rejected,
    Replay,
    ReplayEnd,
    Welcome,
)
from .namespaces import Unfit

PROTOCOL_VERSION = 10

_HEADER = ("version", "code", "epoch", "session", "seq")
_CODES: Mapping[type[Message], int] = {
    **{Hello: 1, GenerationRequest: 2, Abort: 3, Ping: 4, Replay: 5, Bye: 6},
    **{Welcome: 17, Refused: 18, OutputChunk: 19, Rejected: 20, Pong: 21, Events: 22, ReplayEnd: 23},
    **{Draining: 24, Closed: 25, Fault: 26, OutputChunks: 27, PullEnded: 28},
    **{KvAsk: 33, KvPart: 34, KvRefused: 35},
}
ROUTER_MESSAGES: frozenset[type] = frozenset(cls for cls, code in _CODES.items() if code < 16) | {Fault}
WORKER_MESSAGES: frozenset[type] = frozenset(cls for cls, code in _CODES.items() if 16 < code < 32)
KV_ASKS: frozenset[type] = frozenset({KvAsk})
KV_ANSWERS: frozenset[type] = frozenset({KvPart, KvRefused})


class Envelope(Struct, frozen=True):
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


def _plain(value: Any) -> Any:
    """Numbers of numpy, which engines may give."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} does not travel")


def encode(
    message: Message, *, epoch: int = 0, session: int = 0, seq: int = 0, max_bytes: int = FRAME_BYTES_MAX
) -> bytes:
    """The frame of a message. Raises `InvalidInput` naming what does not fit the wire: that is this side's fault."""
    try:
        frame = _WRITES[type(message)](message, epoch, session, seq)
    except Unfit as error:
        raise InvalidInput(_LAYOUTS[type(message)].misfit("pack", astuple(message))) from error
    except (OverflowError, TypeError, UnicodeEncodeError) as error:
        raise InvalidInput(f"{type(message).__name__} cannot be encoded: {error}") from error
    if len(frame) > max_bytes:
        raise InvalidInput(f"{type(message).__name__} takes {len(frame)} bytes, the limit is {max_bytes}")
    return frame


def decode(frame: bytes, allowed: frozenset[type], *, max_bytes: int = FRAME_BYTES_MAX) -> Envelope:
    """The message of a frame, one of the classes `allowed`. Raises `ProtocolError` saying what is wrong, no other."""
    if len(frame) > max_bytes:
        raise ProtocolError(f"frame of {len(frame)} bytes, the limit is {max_bytes}")
    layout = _BY_START.get(frame[:3]) or _layout_of(frame)
    if layout.cls not in allowed:
        raise ProtocolError(f"message code {layout.code} is unknown or not expected from this side")
    try:
        values = layout.decode(frame)
    except ValidationError as error:
        raise ProtocolError(layout.refusal(frame, str(error))) from error
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"frame is not msgpack: {type(error).__name__}") from error
    try:
        envelope = layout.read(*values)
    except Unfit as error:
        raise ProtocolError(layout.misfit("read", values[len(_HEADER) :])) from error
    except InvalidInput as error:
        raise ProtocolError(str(error)) from error
    if type(envelope.message) is GenerationRequest:
        _check_lengths(envelope.message)
    return envelope


def _check_lengths(request: GenerationRequest) -> None:
    count = len(request.token_ids)
    if request.output_offset >= count:
        raise ProtocolError(f"GenerationRequest.output_offset must be below the {count} token_ids")
    if request.pull is not None and request.pull.tokens > count:
        raise ProtocolError(f"GenerationRequest.pull.tokens must be at most the {count} token_ids")


def disagreement(hello: Hello, welcome: Welcome) -> str:
    """What keeps this router and this worker apart, naming both sides; "" when they fit. What is unknown fits all."""
    for name in ("worker_id", "model", "tokenizer_fingerprint", "block_size"):
        theirs, expected = getattr(welcome, name), getattr(hello, name)
        if expected and theirs and expected != theirs:
            return f"worker {welcome.worker_id} has {name} {theirs!r}, router {hello.router_id!r} expects {expected!r}"
    return ""


# --- layouts ----------------------------------------------------------------------------------------------------------


class _Layout:
    """How one message travels, made of its annotations.

    `write(message, epoch, session, seq)` makes its frame, `read(*elements)` the envelope of what `decode` has checked.
    Both are compiled for the message, as the `__init__` of a dataclass is: a loop over its fields takes longer than all
    the rest.
    """

    def __init__(self, cls: type[Message], code: int) -> None:
        hints = get_type_hints(cls, include_extras=True)
        self.cls = cls
        self.code = code
        self.names = cls.__struct_fields__
        self.forms = {name: FORMS[hints[name]] for name in self.names if hints[name] in FORMS}
        kinds = [self.forms[name].kind if name in self.forms else hints[name] for name in self.names]
        self.kinds = (int, int, Number, Number, Number, *kinds)
        self.decode = Decoder(tuple[self.kinds]).decode  # type: ignore[name-defined]
        self.write: Callable[..., bytes] = self._compiled(
            "lambda message, epoch, session, seq: "
            f"encode(({PROTOCOL_VERSION}, {code}, epoch, session, seq, {self._fields('pack', 'message.')}))"
        )
        self.read: Callable[..., Envelope] = self._compiled(
            f"lambda _version, _code, _epoch, _session, _seq, {', '.join(self.names)}: "
            f"Envelope(_epoch, _session, _seq, cls({self._fields('read', '')}))"
        )

    def _fields(self, way: str, of: str) -> str:
        values = []
        for name in self.names:
            form, value = self.forms.get(name), of + name
            if form is not None:
                call = f"{way}_{name}"
                plain = None if form.plain is None else form.plain.format(f"(_value := {value})")
                value = f"{call}({value})" if plain is None else f"_value if {plain} else {call}(_value)"
            values.append(value)
        return ", ".join(values)

    def _compiled(self, source: str) -> Any:
        names: dict[str, Any] = {"Envelope": Envelope, "cls": self.cls, "encode": Encoder(enc_hook=_plain).encode}
        for name, form in self.forms.items():
            names |= {f"pack_{name}": form.pack, f"read_{name}": form.read}
        return eval(source, names)

    def misfit(self, way: str, values: Sequence[Any]) -> str:
        """What is wrong with the first field that `pack` or `read` (the `way`) refuses."""
        for name, value in zip(self.names, values, strict=True):
            try:
                if name in self.forms:
                    getattr(self.forms[name], way)(value)
            except Unfit as error:
                return f"{self.cls.__name__}.{name}{error}"
        raise AssertionError("all fields fit")

    def refusal(self, frame: bytes, text: str) -> str:
        """What is wrong with a frame of which msgspec says `text`, which has places and may quote."""
        found = _PLACES.search(text)
        if found is None:
            return f"{self.cls.__name__} must have {len(self.names)} fields"
        place, *inner = (int(number) for number in found[1][1:-1].split("]["))
        name, kind = (*_HEADER, *(f"{self.cls.__name__}.{name}" for name in self.names))[place], self.kinds[place]
        if inner and self.cls is Events:
            number = inner.pop(0)
            name, kind = f"{name}[{number}]", _event_kind(frame, place, number)
        while inner and kind is not None and (struct := _struct_of(kind)) is not None:
            field = struct.__struct_fields__[inner.pop(0) - (struct.__struct_config__.tag is not None)]
            name, kind = f"{name}.{field}", get_type_hints(struct, include_extras=True)[field]
        return f"{name} must be {_wanted(kind)}"


class _Start(Struct, array_like=True):
    """What all frames begin with, whatever follows."""

    version: int
    code: int


_START = Decoder(_Start)
_RAWS = Decoder(list[Raw])
_LETTER = Decoder(str)
_PLACES = re.compile(r" - at `\$((?:\[\d+\])+)`$")
_LAYOUTS: Mapping[type, _Layout] = {cls: _Layout(cls, code) for cls, code in _CODES.items()}
_WRITES = {cls: layout.write for cls, layout in _LAYOUTS.items()}
_BY_CODE = {layout.code: layout for layout in _LAYOUTS.values()}
# By the bytes that `encode` begins with; a message of 16 elements or more begins otherwise.
_BY_START = {
    bytes((0x90 | len(layout.kinds), PROTOCOL_VERSION, layout.code)): layout
    for layout in _LAYOUTS.values()
    if len(layout.kinds) < 16
}


def _layout_of(frame: bytes) -> _Layout:
    """The layout of a frame that begins otherwise than ours usually do."""
    try:
        start = _START.decode(frame)
    except ValidationError as error:
        raise ProtocolError("frame does not start with a protocol version and a message code") from error
    except (DecodeError, RecursionError) as error:
        raise ProtocolError(f"frame is not msgpack: {type(error).__name__}") from error
    if start.version != PROTOCOL_VERSION and start.code != _CODES[Refused]:
        raise VersionMismatch(start.version)
    if start.code not in _BY_CODE:
        raise ProtocolError(f"message code {start.code} is unknown or not expected from this side")
    return _BY_CODE[start.code]


def _event_kind(frame: bytes, place: int, number: int) -> type[Struct] | None:
    """What an event must be by its letter; None without one, or where no more of the frame can be read."""
    try:
        event = _RAWS.decode(_RAWS.decode(frame)[place])[number]
        return EVENT_KINDS[_LETTER.decode(_RAWS.decode(event)[0])]
    except (KeyError, IndexError, DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _struct_of(kind: Any) -> type[Struct] | None:
    """The struct that a field holds, where it holds one or None."""
    for part in (kind, *get_args(kind)):
        if isinstance(part, type) and issubclass(part, Struct):
            return part
    return None


def _wanted(kind: Any) -> str:
    """What a field must be, in words."""
    if kind is None:
        return f"an event array that starts with one of {', '.join(EVENT_KINDS)}"
    for part in (kind, *get_args(kind)):
        for meta in getattr(part, "__metadata__", ()):
            return str(meta.description)
    struct = _struct_of(kind)
    if struct is not None:
        return f"an array of {len(struct.__struct_fields__) + (struct.__struct_config__.tag is not None)}"
    plain = next(part for part in (kind, *get_args(kind)) if isinstance(part, type))
    return f"a {plain.__name__}"
