"""Block hashes to prefixes. Owns, for one worker, what its engine's cache events have said; marks belong to the tree.

Engines name cached blocks by hash; the tree knows tokens. Each stored block is kept with its parent, so that a later
event that names it only by hash can be turned into the tokens of its whole prefix. Bounded: at the bound everything
is forgotten and the worker's cache counts as unknown, which is counted and safe, since beliefs only ever cost a miss.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from .errors import InvalidInput
from .types import BlockHash, BlockStored


@dataclass(frozen=True, slots=True)
class Block:
    """One cached block: its tokens, where it starts, and the hash of the block before it (None: it starts the
    prompt)."""

    tokens: array[int]
    start: int
    parent: BlockHash | None
    namespace: Hashable


class KvIndex:
    """Blocks of one worker by hash. Not thread-safe: its scheduler serialises calls."""

    __slots__ = ("_blocks", "blocks_max", "orphans", "overflows")

    def __init__(self, blocks_max: int) -> None:
        self._blocks: dict[BlockHash, Block] = {}
        self.blocks_max = blocks_max
        self.orphans = 0  # stored blocks whose parent is not known, ignored
        self.overflows = 0  # times the bound was reached

    def __len__(self) -> int:
        return len(self._blocks)

    def store(self, event: BlockStored) -> array[int] | None:
        """Add the event's blocks; returns the tokens from the prompt's start to their end, None if their parent is
        unknown.

        Storing a known block again changes nothing. Raises InvalidInput if tokens and hashes do not fit; nothing is
        added then.
        """
        tokens, size = array("i", event.token_ids), event.block_size
        if size < 1 or len(tokens) != size * len(event.block_hashes):
            raise InvalidInput(
                f"BlockStored: {len(tokens)} token_ids for {len(event.block_hashes)} block_hashes of block_size {size}"
            )
        parent = event.parent_block_hash
        if parent is not None and parent not in self._blocks:
            self.orphans += 1
            return None
        prefix = array("i") if parent is None else self.prefix(parent)
        if len(self._blocks) + len(event.block_hashes) > self.blocks_max:
            self.clear()
            self.overflows += 1
            return None
        start = len(prefix)
        for position, block_hash in enumerate(event.block_hashes):
            own = tokens[position * size : (position + 1) * size]
            self._blocks[block_hash] = Block(own, start + position * size, parent, event.namespace)
            parent = block_hash
        return prefix + tokens

    def get(self, block_hash: BlockHash) -> Block | None:
        """The block of a hash, None if it is unknown."""
        return self._blocks.get(block_hash)

    def prefix(self, block_hash: BlockHash) -> array[int]:
        """Tokens from the prompt's start to the end of a known block. O(prefix)."""
        chain = []
        at: BlockHash | None = block_hash
        while at is not None and at in self._blocks:
            chain.append(self._blocks[at].tokens)
            at = self._blocks[at].parent
        tokens = array("i")
        for part in reversed(chain):
            tokens.extend(part)
        return tokens

    def remove(self, block_hashes: Sequence[BlockHash]) -> list[tuple[array[int], int, Hashable]]:
        """Forget blocks; for each that was known and whole, (prefix tokens, tokens that stay cached, namespace).

        Prefixes are taken before anything is removed, because engines may list a parent before its children.
        """
        cuts = []
        for block_hash in block_hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                continue
            prefix = self.prefix(block_hash)
            if len(prefix) == block.start + len(block.tokens):
                cuts.append((prefix, block.start, block.namespace))
        for block_hash in block_hashes:
            self._blocks.pop(block_hash, None)
        return cuts

    def clear(self) -> None:
        """The worker's cache is empty."""
        self._blocks.clear()
