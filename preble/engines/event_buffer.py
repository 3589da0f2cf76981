"""Cache events of an engine on their way to routers. Owns the buffer between them, and what several ranks amount to.

A worker whose engine has data-parallel ranks is one worker to routers: it caches what any of its ranks caches. So a
block is reported as removed when the last rank has dropped it. The buffer is bounded: where nobody takes the events,
all pending ones collapse into one `AllBlocksCleared`, so that routers expect less than is cached, never more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from ..types import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, CacheEvent

EVENTS_MAX = 65_536
EVENT_TOKENS_MAX = 1 << 23

EventSink = Callable[[int, Iterable[CacheEvent]], None]  # takes a rank and its events


class EventRelay:
    """Events of all ranks, oldest first, as those of one cache. Not thread-safe."""

    def __init__(self, ranks: int, *, events_max: int = EVENTS_MAX, event_tokens_max: int = EVENT_TOKENS_MAX) -> None:
        self._owners: dict[tuple[BlockHash, str | None], int] | None = {} if ranks > 1 else None  # bit r: rank r has it
        self._events: list[CacheEvent] = []
        self._event_tokens = 0
        self._events_max = events_max
        self._event_tokens_max = event_tokens_max

    def __len__(self) -> int:
        return len(self._events)

    def add(self, rank: int, events: Iterable[CacheEvent]) -> None:
        """Append events of one rank."""
        for event in events:
            self._append(event if self._owners is None else self._joined(rank, event))

    def take(self) -> list[CacheEvent]:
        """All events since the last call, oldest first."""
        events, self._events, self._event_tokens = self._events, [], 0
        return events

    def _append(self, event: CacheEvent | None) -> None:
        if event is None:
            return
        self._events.append(event)
        self._event_tokens += len(event.token_ids) if isinstance(event, BlockStored) else 0
        if len(self._events) > self._events_max or self._event_tokens > self._event_tokens_max:
            self._events, self._event_tokens = [AllBlocksCleared()], 0

    # --- several ranks ------------------------------------------------------------------------------------------------

    def _joined(self, rank: int, event: CacheEvent) -> CacheEvent | None:
        """What the event of one rank means for all of them together; None if nothing."""
        assert self._owners is not None, "one rank needs no joining"
        if isinstance(event, BlockStored):
            for block in event.block_hashes:
                key = block, event.medium
                self._owners[key] = self._owners.get(key, 0) | 1 << rank
            return event
        if isinstance(event, BlockRemoved):
            gone = [block for block in event.block_hashes if self._dropped(rank, (block, event.medium))]
            return replace(event, block_hashes=gone) if gone else None
        if isinstance(event, AllBlocksCleared):
            return self._cleared(rank)
        return event

    def _dropped(self, rank: int, key: tuple[BlockHash, str | None]) -> bool:
        """One rank has dropped a block; True if no other has it."""
        assert self._owners is not None
        left = self._owners.get(key, 0) & ~(1 << rank)
        if left:
            self._owners[key] = left
        else:
            self._owners.pop(key, None)
        return not left

    def _cleared(self, rank: int) -> CacheEvent | None:
        """One rank's cache was emptied. What is left on others is distinguished by a removal of all that is gone."""
        assert self._owners is not None
        mine = [key for key, owners in self._owners.items() if owners >> rank & 1]
        gone = [key for key in mine if self._dropped(rank, key)]
        if not self._owners:
            return AllBlocksCleared()
        for medium in {medium for _, medium in gone}:
            self._append(BlockRemoved([block for block, where in gone if where == medium], medium))
        return None
