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
from .types import BlockHash, BlockStored, check_int

DEFAULT_MEDIUM = "GPU"  # what an event that names no medium speaks of


@dataclass(slots=True)
class Block:
    """One cached block: its tokens, where it starts, the hash of the block before it (None: it starts the prompt), and
    the media that hold a copy."""

    tokens: array[int]
    start: int
    parent: BlockHash | None
    namespace: Hashable
    media: tuple[str, ...]

    @property
    def end(self) -> int:
        """Tokens from the prompt's start to the end of the block."""
        return self.start + len(self.tokens)


class KvIndex:
    """Blocks of one worker by hash. Not thread-safe: its scheduler serialises calls."""

    __slots__ = ("_blocks", "blocks_max", "conflicts", "orphans", "overflows")

    def __init__(self, blocks_max: int) -> None:
        self._blocks: dict[BlockHash, Block] = {}
        self.blocks_max = blocks_max
        self.orphans = 0  # stored blocks whose way to the prompt's start is not known, ignored
        self.conflicts = 0  # stored blocks whose hash is known for another place, ignored
        self.overflows = 0  # times the bound was reached

    def __len__(self) -> int:
        return len(self._blocks)

    def store(self, event: BlockStored) -> array[int] | None:
        """Add the event's blocks; returns the tokens from the prompt's start to their end, None if they were ignored.

        Storing a known block again only adds its medium. Raises InvalidInput if tokens and hashes do not fit; nothing
        is added then.
        """
        tokens, hashes, size = _checked(event)
        parent = event.parent_block_hash
        prefix = array("i") if parent is None else self.prefix(parent)
        if prefix is None:
            self.orphans += len(hashes)
            return None
        medium = event.medium or DEFAULT_MEDIUM
        blocks = {}
        for position, block_hash in enumerate(hashes):
            own = tokens[position * size : (position + 1) * size]
            blocks[block_hash] = Block(own, len(prefix) + position * size, parent, event.namespace, (medium,))
            parent = block_hash
        if len(blocks) < len(hashes) or any(self._conflicts(key, block) for key, block in blocks.items()):
            self.conflicts += len(hashes)
            return None
        if len(self._blocks) + sum(key not in self._blocks for key in blocks) > self.blocks_max:
            self.clear()
            self.overflows += 1
            return None
        for block_hash, block in blocks.items():
            known = self._blocks.setdefault(block_hash, block)
            if medium not in known.media:
                known.media += (medium,)
        return prefix + tokens

    def _conflicts(self, block_hash: BlockHash, block: Block) -> bool:
        known = self._blocks.get(block_hash)
        return known is not None and (
            (known.start, known.parent, known.tokens) != (block.start, block.parent, block.tokens)
        )

    def get(self, block_hash: BlockHash) -> Block | None:
        """The block of a hash, None if it is unknown."""
        return self._blocks.get(block_hash)

    def prefix(self, block_hash: BlockHash) -> array[int] | None:
        """Tokens from the prompt's start to the end of a block, None unless every block on the way is known.

        O(prefix). Positions fall from block to block, so a chain that bites its tail ends too.
        """
        chain = []
        block = self._blocks.get(block_hash)
        while block is not None and block.parent is not None:
            chain.append(block.tokens)
            below, block = block, self._blocks.get(block.parent)
            if block is not None and block.end != below.start:
                return None
        if block is None:
            return None
        tokens = block.tokens[:]
        for part in reversed(chain):
            tokens.extend(part)
        return tokens

    def remove(
        self, block_hashes: Sequence[BlockHash], medium: str | None = None
    ) -> list[tuple[array[int], int, Hashable]]:
        """Forget blocks' copies in a medium; returns what is cached nowhere now as (prefix tokens, tokens that stay
        cached, namespace).

        Only the first removed block of a chain is returned: what follows it goes along. Prefixes are taken before
        anything is removed, because engines may list a parent before its children.
        """
        medium = medium or DEFAULT_MEDIUM
        try:
            named = {key: self._blocks[key] for key in block_hashes if key in self._blocks}
        except TypeError:
            raise InvalidInput(f"BlockRemoved.block_hashes must be ints or bytes, got {block_hashes!r}") from None
        gone = {key: block for key, block in named.items() if block.media == (medium,)}
        cuts = []
        for block_hash, block in gone.items():
            prefix = None if block.parent in gone else self.prefix(block_hash)
            if prefix is not None:
                cuts.append((prefix, block.start, block.namespace))
        for block_hash, block in named.items():
            block.media = tuple(other for other in block.media if other != medium)
            if not block.media:
                del self._blocks[block_hash]
        return cuts

    def clear(self) -> None:
        """The worker's cache is empty."""
        self._blocks.clear()


def _checked(event: BlockStored) -> tuple[array[int], list[BlockHash], int]:
    """The event's tokens, hashes and block size. Raises InvalidInput naming the field."""
    size = check_int("BlockStored.block_size", event.block_size, 1, 2**31 - 1, InvalidInput)
    try:
        tokens = array("i", event.token_ids)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"BlockStored.token_ids must be ints in [0, {2**31 - 1}]: {error}") from None
    if tokens and min(tokens) < 0:
        raise InvalidInput(f"BlockStored.token_ids must not be negative, got {min(tokens)}")
    try:
        hashes = list(event.block_hashes)
        hash((event.parent_block_hash, *hashes))
    except TypeError:
        raise InvalidInput(f"BlockStored.block_hashes must be ints or bytes, got {event.block_hashes!r}") from None
    if len(tokens) != size * len(hashes):
        raise InvalidInput(
            f"BlockStored.token_ids: {len(tokens)} tokens for {len(hashes)} block_hashes of block_size {size}"
        )
    return tokens, hashes, size
