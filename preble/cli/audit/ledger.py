"""What a fleet's cache events say, added up: which tokens were computed, which of them for another time, and in what
chains they came. Owns the units of content, what each rank holds, and the bounds on both; who asked for what is
`requests`'s to guess.

A *unit* is `unit_tokens` tokens after a given prefix, whoever caches it: the same prefix has the same unit at every
server, whatever its engine calls the blocks and however long they are. A unit that a rank stores and that is known
already was computed for another time:

    elsewhere   another rank holds it at that moment: a router that knew would have sent the request there
    again       nobody holds it any more: it was evicted, cleared, or lost with a restart

A *chain* is what a rank stores one after the other, each with the one before as its parent: a prompt, its chunks, its
output, the next turn. What was loaded from another medium of the same rank (host memory, disk) was not computed.

Bounded: units, hashes and chain segments have a most each. At it, units that nobody holds and that were computed once
are forgotten; where that is not enough, new ones go uncompared. Both are counted, and make `twice` too low, never too
high. Not thread-safe.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import lcm

from ...types import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored

UNIT_TOKENS_MIN = 16
UNIT_TOKENS_MAX = 1024  # where block sizes have a larger common multiple, fewer repeats are seen
BIN_SECONDS = 5.0  # of `bins`, from which intervals are drawn
RETRY_UNITS = 65_536  # refused, before room is looked for again
HEAD_TOKENS = 8  # of each unit, to be shown
_DEVICE = (None, "GPU", "gpu")


def unit_tokens_of(block_sizes: Sequence[int]) -> int:
    """Tokens of a unit for servers of these block sizes: a multiple of all of them, at least `UNIT_TOKENS_MIN`."""
    common = lcm(*block_sizes)
    if common > UNIT_TOKENS_MAX:
        common = max(block_sizes)
    return common * -(-UNIT_TOKENS_MIN // common)


@dataclass(frozen=True, slots=True)
class LedgerBounds:
    """The most of each that is kept: some 200, 100 and 150 bytes each."""

    units: int = 2_000_000
    hashes: int = 4_000_000
    segments: int = 500_000
    leaves: int = 50_000  # of each rank: ends of chains that may go on


class Unit:
    """Some tokens after a prefix. `held`, `ever`: bits of the ranks that cache it, and that computed it; `repeats`: its
    tokens that were computed for another time while it was counted; `head`: its first tokens, int32."""

    __slots__ = ("end", "ever", "head", "held", "key", "parent", "repeats")

    def __init__(self, key: int, parent: Unit | None, end: int, head: bytes) -> None:
        self.key, self.parent, self.end, self.head = key, parent, end, head
        self.held = self.ever = self.repeats = 0

    def chain(self) -> list[Unit]:
        """The units of its prefix, itself last."""
        found: list[Unit] = []
        unit: Unit | None = self
        while unit is not None:
            found.append(unit)
            unit = unit.parent
        return found[::-1]


class Run:
    """Blocks that one event stored, where they are shorter than a unit: how to find the place after any of them.
    `pending`: tokens at its end that were computed and belong to no whole unit yet, so that nobody compared them."""

    __slots__ = ("hashes", "pending", "size", "tokens", "unit", "units")

    def __init__(self, unit: Unit | None, tokens: array[int], hashes: Sequence[BlockHash], size: int) -> None:
        self.unit, self.tokens, self.hashes, self.size = unit, tokens, hashes, size
        self.units: list[Unit | None] = [unit]
        self.pending = 0

    def after(self, block: BlockHash, unit_tokens: int) -> tuple[Unit | None, array[int], int]:
        """(last whole unit, tokens since, how many of these were pending and are not any more) after a block."""
        before = len(self.tokens) - len(self.hashes) * self.size
        total = before + (self.hashes.index(block) + 1) * self.size
        whole = min(total // unit_tokens, len(self.units) - 1)
        pending = max(0, total - (len(self.tokens) - self.pending))
        self.pending -= pending
        return self.units[whole], self.tokens[whole * unit_tokens : total], pending


@dataclass(slots=True)
class Segment:
    """What a chain grew by at once: `seconds` is when, `tokens` how many, of `blocks` blocks; `unit` the last whole
    unit after it, `end` the tokens up to its end."""

    seconds: float
    tokens: int
    blocks: int
    unit: Unit | None
    end: int


@dataclass(slots=True, eq=False)
class Chain:
    """Stored one after the other at one rank, after a prefix of `start` tokens that was there."""

    rank: int
    start: int
    segments: list[Segment] = field(default_factory=list)


@dataclass(slots=True)
class Stored:
    """Tokens of blocks that were stored while it was counted. `elsewhere` and `again` were computed for another time,
    of `compared` in whole units; `loaded` came from another medium, `unplaced` had a start that nobody saw."""

    computed: int = 0
    compared: int = 0
    elsewhere: int = 0
    again: int = 0
    unplaced: int = 0
    loaded: int = 0

    @property
    def twice(self) -> int:
        return self.elsewhere + self.again


class Rank:
    """One cache: its blocks by hash, and the ends of its chains."""

    def __init__(self, number: int) -> None:
        self.bit = 1 << number
        self.number = number
        self.ends: dict[BlockHash, Unit] = {}  # blocks at whose end a unit ends
        self.inner: dict[BlockHash, Run] = {}  # the others
        self.other_media: dict[BlockHash, None] = {}
        self.leaves: dict[BlockHash, Chain] = {}
        self.stored = Stored()


class CacheLedger:
    """The ledger of a fleet of `ranks` caches. `counts` False (the start) takes events as what was there before."""

    def __init__(self, ranks: int, unit_tokens: int, bounds: LedgerBounds | None = None) -> None:
        self.unit_tokens = unit_tokens
        self.bounds = bounds or LedgerBounds()
        self.ranks = [Rank(number) for number in range(ranks)]
        self.units: dict[int, Unit] = {}
        self.chains: list[Chain] = []
        self.counts = False
        self.bins: dict[int, list[int]] = {}  # by BIN_SECONDS: tokens compared, computed for another time
        self.forgotten_units = self.refused_units = 0
        self.dropped_hashes = self.dropped_segments = 0
        self._hashes = self._segments = 0
        self._bits = (1 << ranks) - 1
        self._full = False

    # --- events -------------------------------------------------------------------------------------------------------

    def apply(self, rank: int, event: BlockStored | BlockRemoved | AllBlocksCleared, seconds: float) -> None:
        """Take one event of a rank. O(tokens)."""
        cache = self.ranks[rank]
        if isinstance(event, AllBlocksCleared):
            self.forget(rank)
        elif event.medium not in _DEVICE:
            self._take_other_medium(cache, event)
        elif isinstance(event, BlockRemoved):
            self._remove(cache, event.block_hashes)
        else:
            self._store(cache, event, seconds)

    def forget(self, rank: int) -> None:
        """A rank's cache was emptied, or what it holds is not known any more."""
        cache = self.ranks[rank]
        for unit in cache.ends.values():
            unit.held &= ~cache.bit
        self._hashes -= len(cache.ends) + len(cache.inner) + len(cache.other_media)
        cache.ends, cache.inner, cache.other_media, cache.leaves = {}, {}, {}, {}

    def _take_other_medium(self, cache: Rank, event: BlockStored | BlockRemoved) -> None:
        """Of another group of layers ("GPU/1"): the same tokens once more. Of host or disk: what may be loaded."""
        if (event.medium or "").startswith("GPU"):
            return
        for block in event.block_hashes:
            if isinstance(event, BlockRemoved):
                self._hashes -= cache.other_media.pop(block, 0) is None
            elif block not in cache.other_media and self._has_room():
                cache.other_media[block] = None
                self._hashes += 1

    def _remove(self, cache: Rank, hashes: Sequence[BlockHash]) -> None:
        for block in hashes:
            unit = cache.ends.pop(block, None)
            if unit is not None:
                unit.held &= ~cache.bit
                self._hashes -= 1
            elif cache.inner.pop(block, None) is not None:
                self._hashes -= 1
            cache.leaves.pop(block, None)

    def _store(self, cache: Rank, event: BlockStored, seconds: float) -> None:
        hashes, size = event.block_hashes, event.block_size
        new = [block for block in hashes if block not in cache.ends and block not in cache.inner]
        if not new:
            return
        parent = event.parent_block_hash
        skipped = len(hashes) - len(new)
        if skipped:  # what is there is reported once more: the rest follows it
            first = next(at for at, block in enumerate(hashes) if block not in cache.ends and block not in cache.inner)
            if first:
                parent = hashes[first - 1]
            hashes = hashes[first:]
            tokens = event.token_ids[first * size :]
        else:
            tokens = event.token_ids
        unit, tail, pending, placed = self._place(cache, parent, event.namespace)
        self._count_blocks(cache, new, size, placed)
        ids = tail + array("i", tokens)
        start = (unit.end if unit is not None else 0) + len(tail)
        last = self._add(cache, hashes, size, unit, ids, len(tail), pending, event.namespace, seconds)
        self._grow_chain(cache, parent, hashes[-1], Segment(seconds, len(new) * size, len(new), last, 0), start)

    def _place(
        self, cache: Rank, parent: BlockHash | None, namespace: Hashable
    ) -> tuple[Unit | None, array[int], int, bool]:
        """(last whole unit, tokens since, those that were pending, whether the start is known) after a block."""
        if parent is None:
            return None, array("i"), 0, True
        unit = cache.ends.get(parent)
        if unit is not None:
            return unit, array("i"), 0, True
        run = cache.inner.get(parent)
        if run is not None:
            return *run.after(parent, self.unit_tokens), True
        # Nobody saw how it begins. SGLang's hashes are of the whole prefix, so the same parent is the same prefix.
        key = _key(b"start" + repr((parent, namespace)).encode(), b"")
        return self.units.get(key) or Unit(key, None, 0, b""), array("i"), 0, False

    def _count_blocks(self, cache: Rank, new: Sequence[BlockHash], size: int, placed: bool) -> None:
        if not self.counts:
            return
        loaded = sum(block in cache.other_media for block in new) if cache.other_media else 0
        cache.stored.loaded += loaded * size
        cache.stored.computed += (len(new) - loaded) * size
        cache.stored.unplaced += 0 if placed else len(new) * size

    def _add(
        self, cache: Rank, hashes: Sequence[BlockHash], size: int, unit: Unit | None, ids: array[int], tail: int,
        pending: int, namespace: Hashable, seconds: float,
    ) -> Unit | None:  # fmt: skip
        """Enter blocks that follow `unit` and `tail` tokens, `pending` of which nobody compared; `ids` are those tokens
        and theirs. Returns the last unit."""
        width = self.unit_tokens
        run = Run(unit, ids, hashes, size) if size < width else None
        done = 0
        for at, block in enumerate(hashes):
            total = tail + (at + 1) * size
            while (done + 1) * width <= total:
                unit = self._unit(unit, ids[done * width : (done + 1) * width], namespace)
                done += 1
                fresh = min(width, done * width - tail + pending)  # of its tokens, those to be compared
                self._hold(cache, unit, seconds, 0 if block in cache.other_media else fresh)
                if run is not None:
                    run.units.append(unit)
            if block in cache.ends or block in cache.inner:
                continue
            if not self._has_room():
                self.dropped_hashes += 1
            elif done * width == total and unit is not None:
                cache.ends[block] = unit
                self._hashes += 1
            elif run is not None:
                cache.inner[block] = run
                self._hashes += 1
        if run is not None and self.counts:
            run.pending = len(ids) - done * width if done else pending + len(ids) - tail
        return unit

    def _unit(self, parent: Unit | None, tokens: array[int], namespace: Hashable) -> Unit:
        """The unit of these tokens after a prefix, known or new."""
        before = repr(namespace).encode() if parent is None else parent.key.to_bytes(8, "big")
        key = _key(before, tokens.tobytes())
        unit = self.units.get(key)
        if unit is None:
            unit = Unit(key, parent, (parent.end if parent else 0) + len(tokens), tokens[:HEAD_TOKENS].tobytes())
            if len(self.units) >= self.bounds.units or (self._full and self.refused_units % RETRY_UNITS == 0):
                self._make_room()
            if self._full:
                self.refused_units += 1
            else:
                self.units[key] = unit
        return unit

    def _hold(self, cache: Rank, unit: Unit, seconds: float, fresh: int) -> None:
        """A rank stores a unit, of which it computed `fresh` tokens; compare with who has, or had, it."""
        if unit.held & cache.bit:
            return
        if self.counts and fresh:
            cache.stored.compared += fresh
            counted = self.bins.setdefault(int(seconds // BIN_SECONDS), [0, 0])
            counted[0] += fresh
            if unit.ever:
                unit.repeats += fresh
                counted[1] += fresh
                cache.stored.elsewhere += fresh * (unit.held != 0)
                cache.stored.again += fresh * (unit.held == 0)
        unit.held |= cache.bit
        unit.ever |= cache.bit

    # --- chains -------------------------------------------------------------------------------------------------------

    def _grow_chain(self, cache: Rank, parent: BlockHash | None, last: BlockHash, segment: Segment, start: int) -> None:
        """Add to the chain that ends at `parent`, else begin one."""
        segment.end = start + segment.tokens
        if self._segments >= self.bounds.segments:
            self.dropped_segments += self.counts
            return
        chain = cache.leaves.pop(parent, None) if parent is not None else None
        if chain is None:
            chain = Chain(cache.number, start)
        if self.counts:
            if not chain.segments:
                chain.start = start
                self.chains.append(chain)
            self._segments += 1
            chain.segments.append(segment)
        if len(cache.leaves) >= self.bounds.leaves:
            del cache.leaves[next(iter(cache.leaves))]
        cache.leaves[last] = chain

    # --- bounds -------------------------------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        return self._hashes < self.bounds.hashes

    def _make_room(self) -> None:
        """Forget units that nobody holds and that were computed once."""
        kept = {key: unit for key, unit in self.units.items() if unit.held or unit.repeats}
        self.forgotten_units += len(self.units) - len(kept)
        self.units = kept
        self._full = len(kept) > 0.9 * self.bounds.units

    @property
    def bytes_used(self) -> int:
        """About, of units and hashes."""
        return 200 * len(self.units) + 100 * self._hashes + 150 * self._segments

    # --- totals -------------------------------------------------------------------------------------------------------

    def stored(self) -> Stored:
        """Of all ranks."""
        each = [cache.stored for cache in self.ranks]
        return Stored(*(sum(getattr(one, name) for one in each) for name in Stored.__slots__))

    def resident_leaves(self, rank: int) -> list[Unit]:
        """The longest prefixes that a rank holds now, oldest first."""
        bit = self.ranks[rank].bit
        held = {unit.key: unit for unit in self.ranks[rank].ends.values() if unit.held & bit}
        parents = {unit.parent.key for unit in held.values() if unit.parent is not None}
        return [unit for key, unit in held.items() if key not in parents]


def _key(before: bytes, tokens: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(before + tokens, digest_size=8).digest(), "big")
