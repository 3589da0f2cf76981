"""A request's body as it came: its top-level fields, unread until wanted, and the change of some of them in the bytes.

Owns how a body is looked into and edited. It is looked over once; values stay slices of it, and what routing does not
need is never made into objects. Whatever is odd but JSON goes on to the server, which answers for it. Of a name that
comes twice the last counts, as it does for the servers.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from ..core.http_errors import wrong
from .endpoints import Endpoint

T = TypeVar("T")
Fields = dict[str, msgspec.Raw]
VALUE_BYTES_MAX = 4096  # of a small field: longer names, salts and numbers are nobody's
SALT_CHARACTERS_MAX = 1024  # of a longer one its hash keeps prompts apart

_FIELDS = msgspec.json.Decoder(Fields)
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_OPENING = re.compile(rb"\s*\{")
_LISTED = re.compile(rb'\s*\[\s*["\[{]')  # more than one prompt: no single list of token ids
# Fields that hold prompts, by an endpoint's path or its kind.
_PROMPTS = {
    "completions": ("prompt",),
    "generate": ("text", "input_ids"),
    "embeddings": ("input",),
    "/v1/chat/completions/batch": ("messages",),
}


class Once(Generic[T]):
    """An attribute that is worked out when it is first asked for. `functools.cached_property` takes a lock for that in
    Python 3.11, and a body belongs to one thread at a time."""

    def __init__(self, find: Callable[[Any], T]) -> None:
        self._find = find
        self._name = find.__name__
        self.__doc__ = find.__doc__

    def __get__(self, owner: Any, kind: Any = None) -> T:
        found = owner.__dict__[self._name] = self._find(owner)
        return found


@dataclass
class RelayedBody:
    """A body, and what routing reads of it. Its fields are slices of `data` and keep it alive."""

    data: bytes
    endpoint: Endpoint
    fields: Fields = field(default_factory=dict)

    def forget(self) -> None:
        """Let go of the bytes; what was read of them stays."""
        self.data = b""
        self.fields = {}

    def given(self, name: str) -> bool:
        """Whether a field is there and is not null."""
        raw = self.fields.get(name)
        return raw is not None and bytes(memoryview(raw)[:4]) != b"null"

    def value(self, name: str) -> Any:
        """A field's value as objects, whatever its size; None where it is absent, null or cannot be read."""
        raw = self.fields.get(name)
        return None if raw is None else _decoded(raw)

    def small(self, name: str) -> Any:
        """The same for a field that is small; None for one that is not."""
        raw = self.fields.get(name)
        return None if raw is None or memoryview(raw).nbytes > VALUE_BYTES_MAX else _decoded(raw)

    def text(self, name: str) -> str | None:
        """A small field that is text; None for anything else."""
        value = self.small(name)
        return value if isinstance(value, str) else None

    def edited(self, changes: Mapping[str, bytes]) -> bytes:
        """The body with other values of some fields, as JSON; see `edited`."""
        return _edited(self.data, changes, self.fields) if changes else self.data

    def usage_changes(self) -> dict[str, bytes]:
        """What must be edited in so that a stream says its usage; {} where it does so anyway, or cannot."""
        return self._usage_changes

    # --- what routing reads -------------------------------------------------------------------------------------------

    @Once
    def model(self) -> str | None:
        """The model that is asked for by name."""
        return self.text("model") or None

    @Once
    def stream(self) -> bool:
        """Whether the answer is to come as events."""
        return self.endpoint.streams and self.small("stream") in (True, "true", "True", 1)

    @Once
    def include_usage(self) -> bool:
        """Whether the client itself asks for the usage of a stream."""
        options = self.small("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))

    @Once
    def salt(self) -> str | None:
        """What keeps the cache of one tenant from others': `cache_salt`, and SGLang's `extra_key`."""
        if "cache_salt" not in self.fields and "extra_key" not in self.fields:
            return None
        salt, key = (_salt(self.small(name)) for name in ("cache_salt", "extra_key"))
        both = salt if not key else f"{salt or ''}\x1f{key}"
        return both if both is None or len(both) <= SALT_CHARACTERS_MAX else sha256(both.encode()).hexdigest()

    @Once
    def lora(self) -> str | None:
        """The adapter that SGLang's `lora_path` names."""
        if "lora_path" not in self.fields:
            return None
        path = self.small("lora_path")
        first = path[0] if isinstance(path, list) and path else path
        return first if isinstance(first, str) and first else None

    @Once
    def adapters(self) -> tuple[str, ...] | None:
        """All adapters that SGLang's `lora_path` names; None where that cannot be read."""
        if not self.given("lora_path"):
            return ()
        path = self.value("lora_path")
        names = path if isinstance(path, list) else [path]
        if path is None or not all(isinstance(name, str | None) for name in names):
            return None
        return tuple(name for name in names if name)

    @Once
    def max_tokens(self) -> int | None:
        """The most output tokens that are asked for, of one choice."""
        if self.endpoint.kind == "generate":
            return _whole(self._sampling.get("max_new_tokens"))
        names = ("max_completion_tokens", "max_output_tokens", "max_tokens")
        for name in names:
            if name in self.fields and (count := _whole(self.small(name))) is not None:
                return count
        return None

    @Once
    def n(self) -> int:
        """How many choices each prompt is to have."""
        kind = self.endpoint.kind
        is_inside = kind == "generate" or (kind == "other" and "sampling_params" in self.fields)
        given = self._sampling.get("n") if is_inside else self.small("n")
        return max(_whole(given) or 1, 1)

    @Once
    def prompts(self) -> int:
        """How many prompts it holds: each gets `n` choices."""
        names = _PROMPTS.get(self.endpoint.path) or _PROMPTS.get(self.endpoint.kind, ())
        raw = next((self.fields[name] for name in names if self.given(name)), None)
        if raw is None or _LISTED.match(memoryview(raw)) is None:
            return 1
        return max(len(items_of(raw) or ()), 1)

    @Once
    def previous_response_id(self) -> str | None:
        """The answer that a call of /v1/responses goes on from; only the server that made it has it."""
        return self.text("previous_response_id") if self.endpoint.kind == "responses" else None

    @Once
    def _usage_changes(self) -> dict[str, bytes]:
        if not self.stream or not self.endpoint.usage_option or self.include_usage:
            return {}
        if "stream_options" not in self.fields:
            return {"stream_options": b'{"include_usage":true}'}
        options = self.small("stream_options")
        if not isinstance(options, dict | None):
            return {}
        return {"stream_options": msgspec.json.encode({**(options or {}), "include_usage": True})}

    @Once
    def _sampling(self) -> dict[str, Any]:
        raw = self.fields.get("sampling_params")
        value = None if raw is None else _decoded(raw)
        first = value[0] if isinstance(value, list) and value else value
        return first if isinstance(first, dict) else {}


def read_body(data: bytes, endpoint: Endpoint) -> RelayedBody:
    """Look over a body. Raises `ApiError` 400 where it is no JSON object."""
    try:
        return RelayedBody(data, endpoint, _FIELDS.decode(data))
    except msgspec.ValidationError as error:
        raise wrong(f"the body must be an object: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise wrong(f"the body is not JSON: {error}") from error
    except RecursionError:
        raise wrong("the body is nested too deep") from None


def edited(data: bytes, changes: Mapping[str, bytes]) -> bytes:
    """A JSON object with other values (JSON themselves) of some of its fields, or with those fields where it has none.

    Every other byte stays as it is. Raises `msgspec.DecodeError` where `data` is no JSON object.
    """
    return _edited(data, changes, _FIELDS.decode(data))


def items_of(raw: msgspec.Raw) -> list[msgspec.Raw] | None:
    """The elements of a list, unread; None where it is none."""
    try:
        return _LIST.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _edited(data: bytes, changes: Mapping[str, bytes], fields: Fields) -> bytes:
    opening = _OPENING.match(data)
    if opening is None:
        raise msgspec.DecodeError("the body is no object")
    new = [f'"{name}":'.encode() + value for name, value in changes.items() if name not in fields]
    inserted = b",".join(new) + (b"," if new and fields else b"")
    cuts = [(opening.end(), opening.end(), inserted)]
    changed = [name for name in changes if name in fields]
    if changed:
        begin = _address(data)
        for name in changed:
            start = _address(fields[name]) - begin
            cuts.append((start, start + memoryview(fields[name]).nbytes, changes[name]))
    parts: list[bytes] = []
    at = 0
    for start, end, value in sorted(cuts):
        parts += (data[at:start], value)
        at = end
    parts.append(data[at:])
    return b"".join(parts)


def _address(data: Any) -> int:
    """Where bytes lie in memory: a field is a slice of its body, so that the difference is its place there."""
    place: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return place


def _decoded(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _whole(value: Any) -> int | None:
    """A count as engines read it, who also take 64.0 and "64" for one; None for what is none."""
    if isinstance(value, str) and len(value) <= VALUE_BYTES_MAX:
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value < 2**31 else None


def _salt(value: Any) -> str | None:
    if isinstance(value, list):
        value = "\x1e".join(one for one in value if isinstance(one, str))
    return value if isinstance(value, str) and value else None
