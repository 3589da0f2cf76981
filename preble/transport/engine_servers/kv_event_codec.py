"""Cache events as SGLang and vLLM publish them, decoded into event objects. Owns the translation of both generations of
their format, and of SGLang's load frames; sockets and sequence numbers are `kv_feed`'s.

A batch is MessagePack `[time, events, rank]`. Each event is a map with its tag under "type" (SGLang from 0.5.20, vLLM
from 0.24) or an array that begins with it (before these). Where a scheduler is at hand, `GlobalScheduler.apply_raw`
takes the bytes as they are and is faster; `decode` is for those who pass events on, such as a worker.

The compiled decoder checks a payload before anything is read here, so both refuse the same bytes with the same words.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from ..._kv_index.event_batch import EventBatch
from ...errors import InvalidInput, ProtocolError
from ...types import AllBlocksCleared, BlockKeys, BlockRemoved, BlockStored, CacheEvent
from ..fields import check_namespace

_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
_POSITIONS: Mapping[str, tuple[str, ...]] = {
    "BlockStored": (*_STORED, "extra_keys", "group_idx"),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
_LOAD_MAX_BYTES = 4096


@dataclass(slots=True)
class DecodeCounters:
    """What `decode` left out: events with tags that mean nothing here, and blocks whose extra keys begin in the middle
    of a prompt (an image), which have no namespace of their own."""

    unknown_events: int = 0
    keyed_blocks: int = 0


def decode(payload: bytes, *, namespace: Hashable = None, counters: DecodeCounters | None = None) -> list[CacheEvent]:
    """The events of one batch, oldest first; `counters`, when given, count what is left out.

    Blocks that start a prompt are in `namespace`, or in that of their LoRA, salt or extra keys
    (`BlockKeys.namespace`); others follow their parent. Copies in different cache groups get different media.
    Raises `InvalidInput` saying what is wrong at which byte. No state, thread-safe.
    """
    EventBatch(payload)
    counters = counters or DecodeCounters()
    try:
        _, events, *_ = msgpack.unpackb(payload, use_list=False, strict_map_key=False)
    except (ValueError, TypeError) as error:
        # Only fields that the compiled decoder passes over can hold what Python cannot.
        raise InvalidInput(f"payload holds a value that Python cannot: {type(error).__name__}") from None
    decoded: list[CacheEvent] = []
    for event in events:
        tag, fields = _named(event)
        if tag == "BlockStored":
            decoded += _stored(fields, namespace, counters)
        elif tag == "BlockRemoved":
            decoded.append(BlockRemoved(fields["block_hashes"], _medium(fields)))
        elif tag == "AllBlocksCleared":
            decoded.append(AllBlocksCleared())
        else:
            counters.unknown_events += 1
    return decoded


def _named(event: Any) -> tuple[str, Mapping[str, Any]]:
    """Tag and fields by name, of an event of either generation."""
    if isinstance(event, dict):
        return event["type"], event
    tag, *values = event
    fields = dict(zip(_POSITIONS.get(tag, ()), values, strict=False))
    if isinstance(fields.get("lora_name"), dict):
        fields["metadata"] = fields.pop("lora_name")  # SGLang 0.5.18 and 0.5.19 have it in this place
    return tag, fields


def _medium(fields: Mapping[str, Any]) -> str | None:
    """The medium; copies in different cache groups are told apart like copies in different media."""
    medium, group = fields.get("medium"), fields.get("group_idx")
    return f"{medium or 'GPU'}/{group}" if group else medium


def _stored(fields: Mapping[str, Any], namespace: Hashable, counters: DecodeCounters) -> list[CacheEvent]:
    """The event without the blocks that have no namespace; [] if none is left."""
    hashes, parent, size = fields["block_hashes"], fields["parent_block_hash"], fields["block_size"]
    lora = fields.get("lora_name") or None
    own = [_own_keys(keys, lora) for keys in fields.get("extra_keys") or ()]
    # What a request names beside tokens from its start on is its namespace; what comes later is something inside it.
    first = own[0] if own and parent is None else ()
    allowed = next((i for i, keys in enumerate(own) if keys and keys != first), len(hashes))
    space = None
    if parent is None:
        space, named = _namespace(fields, lora, first, namespace)
        allowed = allowed if named else 0
    counters.keyed_blocks += len(hashes) - allowed
    if hashes and not allowed:
        return []
    return [BlockStored(hashes[:allowed], parent, fields["token_ids"][: allowed * size], size, space, _medium(fields))]


def _own_keys(keys: Sequence[Any] | None, lora: str | None) -> tuple[Any, ...]:
    """A block's extra keys beside the LoRA's name, which comes first."""
    keys = tuple(keys or ())
    return keys[1:] if keys and lora is not None and keys[0] == lora else keys


def _namespace(
    fields: Mapping[str, Any], lora: str | None, extra: tuple[Any, ...], namespace: Hashable
) -> tuple[Hashable, bool]:
    """The namespace of a prompt's first blocks; (None, False) if what they name cannot be one."""
    salt = fields.get("cache_salt") or (fields.get("metadata") or {}).get("cache_salt") or None
    lora_id = fields.get("lora_id")
    if lora is None and lora_id is None and salt is None and not extra:
        return namespace, True
    try:
        space = BlockKeys(lora, lora_id, salt, extra).namespace(namespace)
        check_namespace(space)
    except (InvalidInput, TypeError):
        return None, False
    return space, True


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One frame of SGLang's load feed: requests, and tokens of the KV cache, of one data-parallel rank.

    `used_tokens` are those that running requests hold, `waiting_uncached_tokens` what waiting ones will prefill.
    """

    running: int
    waiting: int
    used_tokens: int
    capacity_tokens: int
    rank: int
    waiting_uncached_tokens: int = 0


def decode_load(payload: bytes) -> LoadReport:
    """One load frame, `["LoadStat", running, waiting, tokens, max tokens, rank, waiting uncached, ...]`.

    Raises `ProtocolError` naming what is wrong.
    """
    if len(payload) > _LOAD_MAX_BYTES:
        raise ProtocolError(f"load frame has {len(payload)} bytes, at most {_LOAD_MAX_BYTES} are allowed")
    try:
        values = msgpack.unpackb(payload)
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"load frame is no MessagePack: {type(error).__name__}") from None
    if not isinstance(values, list) or len(values) < 6 or values[0] != "LoadStat":
        raise ProtocolError("load frame must be a list that starts with LoadStat and five numbers")
    numbers = [0 if value is None else value for value in values[1:7]]
    if any(type(number) is not int or not 0 <= number < 2**63 for number in numbers):
        raise ProtocolError("load frame: requests and tokens must be ints that are not negative")
    return LoadReport(*numbers)
