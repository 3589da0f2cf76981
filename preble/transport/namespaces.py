"""Namespaces as engines know them. Owns the one scheme by which a namespace becomes a cache salt and a LoRA's name in
requests to SGLang and vLLM, and by which what their cache events name becomes a namespace again.

    None                                          nothing
    ("lora", name), ("salt", text), both in order themselves
    any other                                     a salt made of it: "preble:" and its MessagePack in URL-safe base64

A salt says all that the namespace says, so nothing is remembered, and every router reads what another has sent.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Hashable

import msgspec

from ..errors import ProtocolError
from ..types import BlockKeys
from .fields import check_namespace, pack_namespace, unpack_namespace

_MARK = "preble:"


def keys_of(namespace: Hashable) -> tuple[str, str]:
    """(cache salt, LoRA name) for a request to an engine that loads LoRAs by name; "" for none.

    Raises `InvalidInput` for a namespace that cannot travel.
    """
    parts = namespace if isinstance(namespace, tuple) and all(isinstance(part, str) for part in namespace) else ()
    if namespace is None:
        return "", ""
    if len(parts) in (2, 4) and parts[::2] in (("lora",), ("salt",), ("lora", "salt")) and all(parts[1::2]):
        named = dict(zip(parts[::2], parts[1::2], strict=True))
        return named.get("salt", ""), named.get("lora", "")
    return _marked(namespace), ""


def salt_of(namespace: Hashable) -> str:
    """The cache salt for an engine that is asked for no LoRA: all of the namespace; "" for None."""
    salt, lora = keys_of(namespace)
    return _marked(namespace) if lora else salt


def namespace_of(keys: BlockKeys) -> Hashable:
    """The namespace of blocks that an engine tells apart by more than tokens: the other way round."""
    salt, extra = keys.cache_salt, keys.extra_keys
    if salt is None and len(extra) == 1 and isinstance(extra[0], str):
        salt, extra = extra[0], ()  # where vLLM puts it
    if salt is not None and salt.startswith(_MARK) and keys.lora_name is None and not extra:
        with contextlib.suppress(ValueError, TypeError, RecursionError, ProtocolError):  # others' may begin like ours
            return unpack_namespace("salt", msgspec.msgpack.decode(base64.urlsafe_b64decode(salt[len(_MARK) :])))
    return BlockKeys(keys.lora_name, keys.lora_id, salt, extra).namespace()


def sendable_namespace_of(keys: BlockKeys) -> Hashable:
    """The same for events that go on to routers. Raises `InvalidInput` for a namespace that cannot travel."""
    namespace = namespace_of(keys)
    check_namespace(namespace)
    return namespace


def _marked(namespace: Hashable) -> str:
    return _MARK + base64.urlsafe_b64encode(msgspec.msgpack.encode(pack_namespace(namespace))).decode()
