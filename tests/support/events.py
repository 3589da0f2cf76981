"""An independent reader of engines' cache events, in plain Python over the msgpack package: what the compiled decoder's
event objects are compared with. For payloads that are well formed; it checks nothing."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import msgpack

from preble import AllBlocksCleared, BlockRemoved, BlockStored
from preble.types import BlockKeys, CacheEvent

_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
_POSITIONS: Mapping[str, tuple[str, ...]] = {
    "BlockStored": (*_STORED, "extra_keys", "group_idx"),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


def read_events(payload: bytes, namespace: Hashable = None) -> tuple[list[CacheEvent], int, int]:
    """The events of one batch, oldest first; how many have tags that mean nothing; how many blocks are left out."""
    _, written, *_ = msgpack.unpackb(payload, use_list=False, strict_map_key=False)
    read: list[CacheEvent] = []
    unknown = keyed = 0
    for event in written:
        tag, fields = _named(event)
        if tag == "BlockStored":
            made, left_out = _stored(fields, namespace)
            read += made
            keyed += left_out
        elif tag == "BlockRemoved":
            read.append(BlockRemoved(fields["block_hashes"], _medium(fields)))
        elif tag == "AllBlocksCleared":
            read.append(AllBlocksCleared())
        else:
            unknown += 1
    return read, unknown, keyed


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
    medium, group = fields.get("medium"), fields.get("group_idx")
    return f"{medium or 'GPU'}/{group}" if group else medium


def _stored(fields: Mapping[str, Any], namespace: Hashable) -> tuple[list[CacheEvent], int]:
    """The event without the blocks that have no namespace, and their number; no event if none is left."""
    hashes, parent, size = fields["block_hashes"], fields["parent_block_hash"], fields["block_size"]
    lora = fields.get("lora_name") or None
    own = [_own_keys(keys, lora) for keys in fields.get("extra_keys") or ()]
    first = own[0] if own and parent is None else ()
    allowed = next((i for i, keys in enumerate(own) if keys and keys != first), len(hashes))
    space = None
    if parent is None:
        salt = fields.get("cache_salt") or (fields.get("metadata") or {}).get("cache_salt") or None
        keys = BlockKeys(lora, fields.get("lora_id"), salt, first)
        space = namespace if keys == (None, None, None, ()) else keys.namespace(namespace)
        try:
            hash(space)
        except TypeError:
            allowed = 0
    left_out = len(hashes) - allowed
    if hashes and not allowed:
        return [], left_out
    tokens = fields["token_ids"][: allowed * size]
    return [BlockStored(hashes[:allowed], parent, tokens, size, space, _medium(fields))], left_out


def _own_keys(keys: Sequence[Any] | None, lora: str | None) -> tuple[Any, ...]:
    """A block's extra keys beside the LoRA's name, which comes first."""
    keys = tuple(keys or ())
    return keys[1:] if keys and lora is not None and keys[0] == lora else keys
