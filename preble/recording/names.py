"""Blocks of token ids become names that say nothing of them. Owns the keyed hashes and the table of those that were
given lately; knows no file.

A block's name is a keyed BLAKE2b hash, 64 bits, of the name before it and its token ids. So equal names are equal
prefixes, and who has no key learns nothing of a text, not even by guessing it: the key is drawn for a recording, stays
in the memory of the processes that write it, and is never written.

Most of a prompt was there before. The table finds known blocks by what they are, and only new ones are hashed; a name
goes into a file once, and later requests refer to the request that brought it (`BlockPath.parent`).
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NAME_BYTES = 8
KEY_BYTES = 32
NODES_MAX = 1 << 17  # blocks in the table, about 0.3 KB each; at the bound it is emptied
ROOTS_MAX = 4096  # namespaces; at the bound they are forgotten


class BlockPath(NamedTuple):
    """A prompt's names: the first `shared` ones of request `parent` of this file (-1: none), then `names`, 8 bytes
    each, little-endian."""

    parent: int
    shared: int
    names: bytes


class BlockTable:
    """Names for the blocks of one file's requests, numbered as they come. Not thread-safe."""

    def __init__(self, key: bytes, block_size: int, nodes_max: int = NODES_MAX) -> None:
        self._key = key
        self._block_bytes = 4 * block_size
        self._nodes_max = nodes_max
        self._requests = 0
        self._roots: dict[object, bytes] = {}
        self._forget()

    def _forget(self) -> None:
        # A node is a block with all before it. (the node before or the root's name, its bytes) -> node
        self._nodes: dict[tuple[int | bytes, bytes], int] = {}
        self._names: list[bytes] = []
        self._requests_of = array("q")  # the request that brought a node
        self._roots.clear()

    @property
    def nodes(self) -> int:
        """Blocks in the table."""
        return len(self._names)

    @property
    def namespaces(self) -> int:
        """Namespaces in the table."""
        return len(self._roots)

    def start_file(self) -> None:
        """The next request is a new file's first one."""
        self._requests = 0
        self._forget()

    def add(self, token_ids: npt.NDArray[np.int32], namespace: object) -> BlockPath:
        """The names of a request's prompt, shape [n], int32."""
        if len(self._names) >= self._nodes_max:
            self._forget()
        data, step, nodes = token_ids.tobytes(), self._block_bytes, self._nodes
        before: int | bytes = self._root(namespace)
        at, shared, parent, size = 0, 0, -1, len(data)
        while at < size:
            node = nodes.get((before, data[at : at + step]))
            if node is None:
                break
            before, shared, at = node, shared + 1, at + step
        if isinstance(before, int):
            parent = self._requests_of[before]
        new = self._named(before, data, at)
        self._requests += 1
        return BlockPath(parent, shared, new)

    def take_back(self) -> None:
        """The request that was added last is not in the file: no later one may refer to it."""
        self._requests -= 1
        self._forget()

    def _named(self, before: int | bytes, data: bytes, at: int) -> bytes:
        """Names of the blocks from `at` on, which are new."""
        step, key, names, request = self._block_bytes, self._key, self._names, self._requests
        name = before if isinstance(before, bytes) else names[before]
        found = []
        while at < len(data):
            block = data[at : at + step]
            name = blake2b(name + block, digest_size=NAME_BYTES, key=key).digest()
            found.append(name)
            if len(names) < self._nodes_max:  # a prompt longer than the table is named all the same
                self._nodes[before, block] = before = len(names)
                names.append(name)
                self._requests_of.append(request)
            at += step
        return b"".join(found)

    def _root(self, namespace: object) -> bytes:
        """What the first block of a namespace's prompts is named after."""
        root = self._roots.get(namespace)
        if root is None:
            if len(self._roots) >= ROOTS_MAX:
                self._roots.clear()
            root = self._roots[namespace] = blake2b(
                b"namespace " + repr(namespace).encode(), digest_size=NAME_BYTES, key=self._key
            ).digest()
        return root


def hidden(key: bytes, kind: str, *names: object) -> bytes:
    """The name of a session, tenant or key, 8 bytes; nothing for nothing."""
    if not any(names):
        return b""
    return blake2b(repr((kind, *names)).encode(), digest_size=NAME_BYTES, key=key).digest()
