"""Order in a worker's event stream. Owns the numbering of batches, the worker's replay buffer and the router's cursor;
no socket.

The worker numbers its event batches 0, 1, 2, ... in every epoch and keeps the last ones. The router applies each batch
exactly once and in order: a batch that came twice is dropped, one that came early is held back, and a hole is asked for
again. When the hole is older than what the worker kept, the router starts afresh: it forgets all it estimated and goes
on from now.

          lost on the way                 asked for again             gone for good
    seen  0 1 2 . . 5 6    -> Replay(3) -> 3 4, then 5 6       or  -> forget everything, go on at the worker's next
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from ..errors import InvalidConfig
from ..types import CacheEvent

Batch = Sequence[CacheEvent]
T = TypeVar("T")


class ReplayBuffer:
    """The last event frames of a worker, bounded in count and bytes; at either bound the oldest go. Not thread-safe."""

    def __init__(self, max_batches: int = 10_000, max_bytes: int = 32 << 20) -> None:
        if max_batches < 1 or max_bytes < 1:
            raise InvalidConfig(f"replay buffer needs room, got max_batches={max_batches}, max_bytes={max_bytes}")
        self.max_batches = max_batches
        self.max_bytes = max_bytes
        self.next_seq = 0
        self.bytes_used = 0
        self._batches: deque[tuple[Batch, int]] = deque()

    @property
    def first_seq(self) -> int:
        """Number of the oldest batch still kept; equal to `next_seq` when none is."""
        return self.next_seq - len(self._batches)

    def append(self, batch: Batch, size_bytes: int) -> None:
        """Keep the batch of number `next_seq`, which takes `size_bytes`."""
        self._batches.append((batch, size_bytes))
        self.bytes_used += size_bytes
        self.next_seq += 1
        while len(self._batches) > self.max_batches or self.bytes_used > self.max_bytes:
            self.bytes_used -= self._batches.popleft()[1]

    def page(self, from_seq: int, max_batches: int) -> list[tuple[int, Batch]]:
        """Up to `max_batches` numbered batches from `from_seq` on; [] if gone or not yet made. Changes nothing."""
        start = from_seq - self.first_seq
        if start < 0:
            return []
        stop = min(start + max_batches, len(self._batches))
        return [(self.first_seq + i, self._batches[i][0]) for i in range(start, stop)]


class EventCursor(Generic[T]):
    """The router's place in one worker's event stream, of batches in whatever form. Not thread-safe.

    `offer` takes batches in any order and returns those whose turn has come. At most `max_held` early batches wait, of
    `max_held_bytes` together; one more drops them all, which loses nothing: they are inside the hole that will be asked
    for again.
    """

    def __init__(self, next_seq: int, max_held: int = 1024, max_held_bytes: int = 32 << 20) -> None:
        self.next_seq = next_seq
        self.max_held = max_held
        self.max_held_bytes = max_held_bytes
        self._held: dict[int, tuple[T, int]] = {}
        self._held_bytes = 0
        self._known_end = next_seq

    @property
    def has_gap(self) -> bool:
        """True while a batch is known to exist that could not be applied yet."""
        return self._known_end > self.next_seq

    def expect(self, end_seq: int) -> None:
        """Learn that all batches below `end_seq` should have come by now: a loss at the very end is noticed, too."""
        self._known_end = max(self._known_end, end_seq)

    def has_had(self, seq: int) -> bool:
        """Whether batch number `seq` has come before, or was given up."""
        return seq < self.next_seq or seq in self._held

    def offer(self, seq: int, batch: T, size_bytes: int = 0) -> list[T]:
        """Take batch number `seq`, which takes `size_bytes`; return the batches that may be applied now, in order."""
        self.expect(seq + 1)
        if self.has_had(seq):
            return []
        if seq > self.next_seq and (
            len(self._held) >= self.max_held or self._held_bytes + size_bytes > self.max_held_bytes
        ):
            self._hold({})
        if seq == self.next_seq or size_bytes <= self.max_held_bytes:
            self._held[seq] = (batch, size_bytes)
            self._held_bytes += size_bytes
        return self._next_held()

    def _next_held(self) -> list[T]:
        ready = []
        while self.next_seq in self._held:
            batch, size_bytes = self._held.pop(self.next_seq)
            self._held_bytes -= size_bytes
            ready.append(batch)
            self.next_seq += 1
        return ready

    def _hold(self, held: dict[int, tuple[T, int]]) -> None:
        self._held = held
        self._held_bytes = sum(size_bytes for _, size_bytes in held.values())

    def skip_to(self, seq: int) -> None:
        """Give up on everything before `seq`; the caller forgets what it estimated.

        Held batches go too: they would be half a story.
        """
        self.next_seq = self._known_end = seq
        self._hold({})

    def skip_gap(self, to: int | None = None) -> list[T]:
        """Give up on what is missing before number `to` (None: before the first batch held back) and return those that
        may be applied then; the caller forgets what it estimated before them."""
        if to is None:
            to = min(self._held, default=max(self._known_end, self.next_seq))
        self.next_seq = to
        self._hold({seq: held for seq, held in self._held.items() if seq >= to})
        self.expect(to)
        return self._next_held()
