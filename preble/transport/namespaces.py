"""Namespaces on their way: as MessagePack in our frames, and as the cache salts and LoRA names of engines. Owns their
bytes and limits, and the one scheme by which a namespace becomes keys of SGLang and vLLM and is read from their events.

In a frame: None, text, bytes, 64-bit ints and tuples of these. They are the one thing there that may be nested, so they
are read level by level, and what is built from one frame is counted: a few bytes of nested arrays must not become a
gigabyte. At an engine:

    None                                          nothing
    ("lora", name), ("salt", text), both in order themselves
    any other                                     a salt made of it: "preble:" and its MessagePack in URL-safe base64

A salt says all that the namespace says, so nothing is remembered, and every router reads what another has sent. A salt
that begins with "preble:" itself is one of the others, or whoever chooses their salt could choose another's namespace.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Hashable
from typing import Annotated, Any

from msgspec import DecodeError, Meta, Raw
from msgspec.msgpack import Decoder, Encoder

from ..errors import InvalidInput, ProtocolError
from ..types import BlockKeys

_MARK = "preble:"
DEPTH_MAX = 4  # tuples inside tuples
ITEMS_MAX = 64  # elements of one tuple
ATOM_BYTES_MAX = 4096  # of a text or of bytes
ELEMENTS_MAX = 1 << 18  # array elements in one frame

_INT63 = 2**63 - 1
_ITEMS: Decoder[tuple[Raw, ...]] = Decoder(Annotated[tuple[Raw, ...], Meta(max_length=ITEMS_MAX)])
_BYTES: Decoder[bytes] = Decoder(Annotated[bytes, Meta(max_length=ATOM_BYTES_MAX)])
_ATOM: Decoder[Any] = Decoder(
    Annotated[int, Meta(ge=-_INT63, le=_INT63)] | Annotated[str, Meta(max_length=ATOM_BYTES_MAX)] | None
)
NIL = Raw(b"\xc0")
_encode = Encoder().encode


class Unfit(ValueError):
    """What is wrong with a value, as it goes on after the field's name: " is empty" or "[3].namespace must be ..."."""


class Elements:
    """How many array elements may still be built from one frame."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = ELEMENTS_MAX

    def take(self, count: int) -> None:
        """Raises `ProtocolError` at the limit."""
        self.left -= count
        if self.left < 0:
            raise ProtocolError(f"frame has more than {ELEMENTS_MAX} array elements")


def check_namespace(namespace: Hashable) -> None:
    """Raise `InvalidInput` unless the namespace can travel: None, str, bytes, 64-bit int, or tuples of these."""
    if namespace is not None:
        encode_namespace(namespace)


def encode_namespace(namespace: Hashable) -> bytes:
    """Its MessagePack. Raises `InvalidInput` as `check_namespace` does."""
    try:
        data = _encode(pack_namespace(namespace))
        read_namespace(Raw(data))
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidInput(f"namespace cannot be encoded: {error}") from error
    except (Unfit, ProtocolError) as error:
        raise InvalidInput(f"namespace{error}") from error
    return data


def decode_namespace(data: bytes, name: str) -> Hashable:
    """The namespace of its MessagePack. Raises `ProtocolError` that calls it `name`."""
    try:
        return read_namespace(Raw(data))
    except Unfit as error:
        raise ProtocolError(f"{name}{error}") from error


def pack_namespace(value: Any, depth: int = 0) -> Any:
    """The value, if it and all in it are of a kind that travels. Raises `Unfit`."""
    if isinstance(value, tuple) and depth < DEPTH_MAX:
        for item in value:
            pack_namespace(item, depth + 1)
    elif value is not None and type(value) not in (str, bytes, int):
        raise Unfit(
            f" must be None, str, bytes, int or tuples of these (at most {DEPTH_MAX} deep), got {type(value).__name__}"
        )
    return value


def read_namespace(raw: Raw, elements: Elements | None = None) -> Hashable:
    """The namespace of its MessagePack. Raises `Unfit`, and `ProtocolError` where `elements` are too many."""
    if raw == NIL:
        return None
    try:
        return _read(raw, 0, elements or Elements())
    except (DecodeError, UnicodeDecodeError, RecursionError, IndexError) as error:  # IndexError: no bytes at all
        raise Unfit(" must be None, text, bytes, a 64-bit int or arrays of these within the limits") from error


def _read(raw: Raw, depth: int, elements: Elements) -> Hashable:
    head = memoryview(raw)[0]
    if depth < DEPTH_MAX and (0x90 <= head < 0xA0 or head in (0xDC, 0xDD)):
        items = _ITEMS.decode(raw)
        elements.take(len(items) + 1)
        return tuple(_read(item, depth + 1, elements) for item in items)
    value: Hashable = (_BYTES if 0xC4 <= head < 0xC7 else _ATOM).decode(raw)
    if type(value) is str and 4 * len(value) > ATOM_BYTES_MAX and len(value.encode()) > ATOM_BYTES_MAX:
        raise DecodeError(f"more than {ATOM_BYTES_MAX} bytes")
    return value


def joined(*namespaces: Hashable) -> Hashable:
    """One namespace of several, one after the other: None of none, a tuple of all their parts else."""
    parts = [one if isinstance(one, tuple) else (one,) for one in namespaces if one is not None]
    return tuple(part for one in parts for part in one) or None


# --- at an engine ---------------------------------------------------------------------------------------------------


def keys_of(namespace: Hashable) -> tuple[str, str]:
    """(cache salt, LoRA name) for a request to an engine that loads LoRAs by name; "" for none.

    Raises `InvalidInput` for a namespace that cannot travel.
    """
    parts = namespace if isinstance(namespace, tuple) and all(isinstance(part, str) for part in namespace) else ()
    if namespace is None:
        return "", ""
    if len(parts) in (2, 4) and parts[::2] in (("lora",), ("salt",), ("lora", "salt")) and all(parts[1::2]):
        named = dict(zip(parts[::2], parts[1::2], strict=True))
        if not parts[1].startswith(_MARK) or "lora" in named:
            return named.get("salt", ""), named.get("lora", "")
    return _marked(namespace), ""


def salt_of(namespace: Hashable) -> str:
    """The cache salt for an engine that is asked for no LoRA: all of the namespace; "" for None."""
    salt, lora = keys_of(namespace)
    return _marked(namespace) if lora else salt


def namespace_of(keys: BlockKeys) -> Hashable:
    """The namespace of blocks that an engine distinguishes by more than tokens: the other way round."""
    salt, extra = keys.cache_salt, keys.extra_keys
    if salt is None and len(extra) == 1 and isinstance(extra[0], str):
        salt, extra = extra[0], ()  # where vLLM puts it
    if salt is not None and salt.startswith(_MARK) and keys.lora_name is None and not extra:
        with contextlib.suppress(ValueError, TypeError, ProtocolError):  # others' may begin like ours
            return decode_namespace(base64.urlsafe_b64decode(salt[len(_MARK) :]), "salt")
    return BlockKeys(keys.lora_name, keys.lora_id, salt, extra).namespace()


def sendable_namespace_of(keys: BlockKeys) -> Hashable:
    """The same for events that go on to routers. Raises `InvalidInput` for a namespace that cannot travel."""
    namespace = namespace_of(keys)
    check_namespace(namespace)
    return namespace


def _marked(namespace: Hashable) -> str:
    return _MARK + base64.urlsafe_b64encode(encode_namespace(namespace)).decode()
