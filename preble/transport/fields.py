"""Values inside a frame: how one field is written, and how strictly it is read. Owns the limits and the codecs of ints,
texts, token ids, namespaces, sampling parameters and cache events; what fields a message has is `wire`'s.

Every `unpack` takes the field's name and what msgpack read, and returns the value or raises `ProtocolError` naming the
field. Texts are never quoted in errors: they may hold parts of prompts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InvalidInput, InvalidTokens, ProtocolError
from ..types import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    PrefixEvicted,
    RequestEnded,
    RequestPlaced,
    RequestPrefilled,
    SamplingParams,
)

MAX_PROMPT_TOKENS = 2 << 20  # 8 MiB of token ids
MAX_TEXT_BYTES = 4096  # names, reasons, endpoints; longer ones are cut when encoded, refused when decoded
MAX_ID_BYTES = 256  # request ids and names of workers and routers
MAX_STOP_TOKENS = 1024
MAX_EVENTS = 4096  # cache events in one frame
MAX_NAMESPACE_DEPTH = 4  # tuples inside tuples
MAX_NAMESPACE_ITEMS = 64  # elements of one tuple

INT31 = 2**31 - 1
INT63 = 2**63 - 1

# --- field codecs: pack(value) -> what msgpack writes; unpack(field name, what msgpack read) -> value -----------------

Pack = Callable[[Any], Any]
Unpack = Callable[[str, Any], Any]


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    pack: Pack | None
    unpack: Unpack


def _wrong(name: str, wanted: str, got: Any) -> ProtocolError:
    shown = str(got) if type(got) in (int, float, bool) else type(got).__name__
    return ProtocolError(f"{name} must be {wanted}, got {shown}")


def int_field(name: str, low: int = 0, high: int = INT63) -> Field:
    wanted = f"an int in [{low}, {high}]"

    def unpack(where: str, value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _wrong(where, wanted, value)
        return value

    return Field(name, None, unpack)


def bool_field(name: str) -> Field:
    def unpack(where: str, value: Any) -> bool:
        if type(value) is not bool:
            raise _wrong(where, "a bool", value)
        return value

    return Field(name, None, unpack)


def _clip(text: str) -> str:
    """Cut a text to what the wire takes; surrogates (undecodable bytes in a path) become question marks."""
    data = text.encode("utf-8", "replace")
    return data[:MAX_TEXT_BYTES].decode("utf-8", "ignore")


def _unpack_text(where: str, value: Any, limit: int = MAX_TEXT_BYTES) -> str:
    # Four bytes a character at most, so the cheap test settles almost every text without encoding it.
    if type(value) is not str or (len(value) * 4 > limit and len(value.encode()) > limit):
        raise _wrong(where, f"a text of at most {limit} bytes", value)
    return value


def text_field(name: str) -> Field:
    return Field(name, _clip, _unpack_text)


def _pack_id(name: str, value: str) -> str:
    if not value or (len(value) * 4 > MAX_ID_BYTES and len(value.encode()) > MAX_ID_BYTES):
        raise InvalidInput(f"{name} must have 1 to {MAX_ID_BYTES} bytes")
    return value


def id_field(name: str) -> Field:
    def pack(value: str) -> str:
        return _pack_id(name, value)

    def unpack(where: str, value: Any) -> str:
        if not _unpack_text(where, value, MAX_ID_BYTES):
            raise _wrong(where, "not empty", value)
        return str(value)

    return Field(name, pack, unpack)


def choice_field(name: str, choices: Sequence[str]) -> Field:
    def unpack(where: str, value: Any) -> str:
        if type(value) is not str or value not in choices:
            raise _wrong(where, f"one of {', '.join(choices)}", value)
        return value

    return Field(name, None, unpack)


def optional(inner: Field) -> Field:
    def pack(value: Any) -> Any:
        return value if value is None or inner.pack is None else inner.pack(value)

    def unpack(where: str, value: Any) -> Any:
        return None if value is None else inner.unpack(where, value)

    return Field(inner.name, pack, unpack)


# --- token ids --------------------------------------------------------------------------------------------------------


def pack_tokens(token_ids: Any) -> bytes:
    """Raw little-endian int32 of any 1-D sequence of ids."""
    if isinstance(token_ids, tuple | list):
        try:
            return struct.pack(f"<{len(token_ids)}i", *token_ids)
        except struct.error as error:
            raise InvalidTokens("token_ids must be ints in [0, 2**31 - 1]") from error
    return np.ascontiguousarray(token_ids, dtype="<i4").tobytes()


def _token_bytes(where: str, value: Any, limit: int) -> bytes:
    if type(value) is not bytes or len(value) % 4 or len(value) > 4 * limit:
        raise _wrong(where, f"whole int32 words, at most {limit}", value)
    return value


def _unpack_array(where: str, value: Any) -> npt.NDArray[np.int32]:
    """A read-only int32 array over the frame's own bytes (a copy on a big-endian machine)."""
    token_ids = np.frombuffer(_token_bytes(where, value, MAX_PROMPT_TOKENS), dtype="<i4").astype(np.int32, copy=False)
    if token_ids.size and int(token_ids.min()) < 0:
        raise ProtocolError(f"{where} holds a negative token id")
    return token_ids


def unpack_prompt(where: str, value: Any) -> npt.NDArray[np.int32]:
    token_ids = _unpack_array(where, value)
    if not token_ids.size:
        raise ProtocolError(f"{where} is empty")
    return token_ids


def unpack_tuple(where: str, value: Any, limit: int = MAX_PROMPT_TOKENS) -> tuple[int, ...]:
    data = _token_bytes(where, value, limit)
    token_ids = struct.unpack(f"<{len(data) // 4}i", data)
    if token_ids and min(token_ids) < 0:
        raise ProtocolError(f"{where} holds a negative token id")
    return token_ids


# --- namespaces -------------------------------------------------------------------------------------------------------


def check_namespace(namespace: Hashable) -> None:
    """Raise `InvalidInput` unless the namespace can travel: None, str, bytes, 64-bit int, or tuples of these."""
    try:
        unpack_namespace("namespace", pack_namespace(namespace))
    except ProtocolError as error:
        raise InvalidInput(str(error)) from error


def pack_namespace(value: Any, depth: int = 0) -> Any:
    if isinstance(value, tuple) and depth < MAX_NAMESPACE_DEPTH:
        return [pack_namespace(item, depth + 1) for item in value]
    if value is None or type(value) in (str, bytes, int):
        return value
    raise InvalidInput(
        f"namespace must be None, str, bytes, int or tuples of these (at most {MAX_NAMESPACE_DEPTH} deep), "
        f"got {type(value).__name__}"
    )


def unpack_namespace(where: str, value: Any, depth: int = 0) -> Hashable:
    if type(value) is list and depth < MAX_NAMESPACE_DEPTH and len(value) <= MAX_NAMESPACE_ITEMS:
        return tuple(unpack_namespace(where, item, depth + 1) for item in value)
    if value is None or type(value) is int and -INT63 <= value <= INT63:
        return value
    if type(value) is bytes and len(value) <= MAX_TEXT_BYTES:
        return value
    if type(value) is str:
        return _unpack_text(where, value)
    raise _wrong(where, "None, text, bytes, a 64-bit int or arrays of these within the limits", value)


# --- sampling and events: arrays inside the array ---------------------------------------------------------------------


def pack_sampling(value: SamplingParams) -> list[Any]:
    if len(value.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidInput(f"SamplingParams.stop_token_ids has more than {MAX_STOP_TOKENS} ids")
    stop = pack_tokens(tuple(value.stop_token_ids))
    return [value.max_new_tokens, value.temperature, value.top_p, stop, value.ignore_eos, value.seed]


def unpack_sampling(where: str, value: Any) -> SamplingParams:
    max_new_tokens, temperature, top_p, stop, ignore_eos, seed = _items(where, value, 6)
    for name, number in (("temperature", temperature), ("top_p", top_p)):
        if type(number) not in (int, float):
            raise _wrong(f"{where}.{name}", "a number", number)
    if type(ignore_eos) is not bool:
        raise _wrong(f"{where}.ignore_eos", "a bool", ignore_eos)
    stop_token_ids = unpack_tuple(f"{where}.stop_token_ids", stop, MAX_STOP_TOKENS)
    try:
        return SamplingParams(max_new_tokens, temperature, top_p, stop_token_ids, ignore_eos, seed)
    except InvalidInput as error:
        raise ProtocolError(str(error)) from error


def _items(where: str, value: Any, count: int) -> list[Any]:
    if type(value) is not list or len(value) != count:
        raise _wrong(where, f"an array of {count}", value)
    return value


def _pack_evicted(event: PrefixEvicted) -> list[Any]:
    return ["E", pack_tokens(event.token_ids), event.kept_tokens, pack_namespace(event.namespace)]


def _pack_stored(event: BlockStored) -> list[Any]:
    token_ids, namespace = pack_tokens(event.token_ids), pack_namespace(event.namespace)
    hashes, parent = list(event.block_hashes), event.parent_block_hash
    return ["S", hashes, parent, token_ids, event.block_size, namespace, event.medium]


def _pack_removed(event: BlockRemoved) -> list[Any]:
    return ["R", list(event.block_hashes), event.medium]


def _pack_cleared(event: AllBlocksCleared) -> list[Any]:
    return ["C"]


def _pack_placed(event: RequestPlaced) -> list[Any]:
    token_ids, namespace = pack_tokens(event.token_ids), pack_namespace(event.namespace)
    return ["Q", *_pack_names(event), token_ids, namespace, event.max_new_tokens]


def _pack_prefilled(event: RequestPrefilled) -> list[Any]:
    return ["F", *_pack_names(event), event.cached_tokens]


def _pack_ended(event: RequestEnded) -> list[Any]:
    return ["X", *_pack_names(event), event.output_tokens]


def _pack_names(event: RequestPlaced | RequestPrefilled | RequestEnded) -> tuple[str, str]:
    return _pack_id("router", event.router), _pack_id("request_id", event.request_id)


def pack_events(events: Sequence[CacheEvent]) -> list[Any]:
    if len(events) > MAX_EVENTS:
        raise InvalidInput(f"{len(events)} events do not fit one frame (at most {MAX_EVENTS})")
    try:
        return [_PACKS[type(event)](event) for event in events]
    except KeyError as error:
        raise InvalidInput(f"events of {error} do not travel") from error


def unpack_events(where: str, value: Any) -> tuple[CacheEvent, ...]:
    if type(value) is not list or len(value) > MAX_EVENTS:
        raise _wrong(where, f"an array of at most {MAX_EVENTS}", value)
    return tuple(_unpack_event(f"{where}[{i}]", item) for i, item in enumerate(value))


def _unpack_event(where: str, value: Any) -> CacheEvent:
    tag = value[0] if type(value) is list and value else None
    unpack = _EVENTS.get(tag) if type(tag) is str else None
    if unpack is None:
        raise _wrong(where, "an event array that starts with E, S, R, C, Q, F or X", value)
    return unpack(where, value)


def _unpack_evicted(where: str, value: list[Any]) -> PrefixEvicted:
    _, token_bytes, kept_tokens, namespace = _items(where, value, 4)
    token_ids = unpack_prompt(f"{where}.token_ids", token_bytes)
    return PrefixEvicted(
        token_ids,  # type: ignore[arg-type]
        int_field("kept_tokens", 0, len(token_ids)).unpack(f"{where}.kept_tokens", kept_tokens),
        unpack_namespace(f"{where}.namespace", namespace),
    )


def _unpack_placed(where: str, value: list[Any]) -> RequestPlaced:
    _, router, request_id, token_bytes, namespace, max_new_tokens = _items(where, value, 6)
    return RequestPlaced(
        *_unpack_names(where, router, request_id),
        unpack_prompt(f"{where}.token_ids", token_bytes),  # type: ignore[arg-type]
        unpack_namespace(f"{where}.namespace", namespace),
        _MAX_NEW_TOKENS.unpack(f"{where}.max_new_tokens", max_new_tokens),
    )


def _unpack_prefilled(where: str, value: list[Any]) -> RequestPrefilled:
    _, router, request_id, cached_tokens = _items(where, value, 4)
    names = _unpack_names(where, router, request_id)
    return RequestPrefilled(*names, _COUNT.unpack(f"{where}.cached_tokens", cached_tokens))


def _unpack_ended(where: str, value: list[Any]) -> RequestEnded:
    _, router, request_id, output_tokens = _items(where, value, 4)
    names = _unpack_names(where, router, request_id)
    return RequestEnded(*names, _COUNT.unpack(f"{where}.output_tokens", output_tokens))


def _unpack_names(where: str, router: Any, request_id: Any) -> tuple[str, str]:
    return _ROUTER.unpack(f"{where}.router", router), _REQUEST_ID.unpack(f"{where}.request_id", request_id)


def _unpack_stored(where: str, value: list[Any]) -> BlockStored:
    _, hashes, parent, token_ids, block_size, namespace, medium = _items(where, value, 7)
    return BlockStored(
        _unpack_hashes(f"{where}.block_hashes", hashes),
        None if parent is None else _unpack_hash(f"{where}.parent_block_hash", parent),
        _unpack_array(f"{where}.token_ids", token_ids),  # type: ignore[arg-type]
        _BLOCK_SIZE.unpack(f"{where}.block_size", block_size),
        unpack_namespace(f"{where}.namespace", namespace),
        _MEDIUM.unpack(f"{where}.medium", medium),
    )


def _unpack_removed(where: str, value: list[Any]) -> BlockRemoved:
    _, hashes, medium = _items(where, value, 3)
    return BlockRemoved(_unpack_hashes(f"{where}.block_hashes", hashes), _MEDIUM.unpack(f"{where}.medium", medium))


def _unpack_cleared(where: str, value: list[Any]) -> AllBlocksCleared:
    _items(where, value, 1)
    return AllBlocksCleared()


def _unpack_hashes(where: str, value: Any) -> tuple[int | bytes, ...]:
    if type(value) is not list:
        raise _wrong(where, "an array", value)
    return tuple(_unpack_hash(where, item) for item in value)


def _unpack_hash(where: str, value: Any) -> int | bytes:
    if type(value) is int or type(value) is bytes and 0 < len(value) <= 64:
        return value
    raise _wrong(where, "a 64-bit int or 1 to 64 bytes", value)


_BLOCK_SIZE = int_field("block_size", 1, 65_536)
_MEDIUM = optional(text_field("medium"))
_ROUTER, _REQUEST_ID = id_field("router"), id_field("request_id")
_MAX_NEW_TOKENS = optional(int_field("max_new_tokens", 1, INT31))
_COUNT = optional(int_field("count", 0, INT31))
_PACKS: Mapping[type, Callable[[Any], list[Any]]] = {
    PrefixEvicted: _pack_evicted,
    BlockStored: _pack_stored,
    BlockRemoved: _pack_removed,
    AllBlocksCleared: _pack_cleared,
    RequestPlaced: _pack_placed,
    RequestPrefilled: _pack_prefilled,
    RequestEnded: _pack_ended,
}
_EVENTS: Mapping[str, Callable[[str, list[Any]], CacheEvent]] = {
    "E": _unpack_evicted,
    "S": _unpack_stored,
    "R": _unpack_removed,
    "C": _unpack_cleared,
    "Q": _unpack_placed,
    "F": _unpack_prefilled,
    "X": _unpack_ended,
}
