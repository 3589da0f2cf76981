"""Pulls that were asked for and are not over. Owns until when they keep each worker's link busy, as was estimated.

    link of w0  |--a--|--b---------|              a link carries one transfer at a time, or several as slowly:
    link of w1  |--a--|                           who asks for w0's KV now waits until b is over, unless it waits
    link of w2        |--b---------|              longer for its worker

Nothing needs to end: what takes longer than was estimated keeps no link busy any more, and a request that was cancelled
or a worker that died no longer than its pull should have taken.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

PULLS_MAX = 64  # of one worker, over which the one asked for first is forgotten


class _Pull(NamedTuple):
    ends_at: float
    link_seconds: float  # that it was to wait for others


class UnderWay:
    """See the module; times are the caller's. Not thread-safe. Every call is O(PULLS_MAX) at most."""

    def __init__(self) -> None:
        self._by_worker: dict[str, dict[Hashable, _Pull]] = {}

    def busy_until(self, worker: str) -> float:
        """When the last of a worker's pulls should be over; 0.0 where none was asked for."""
        return max((pull.ends_at for pull in self._by_worker.get(worker, {}).values()), default=0.0)

    def link_seconds(self, source: str, target: str, now: float) -> float:
        """How long a pull between two workers waits for their links."""
        return max(self.busy_until(source) - now, self.busy_until(target) - now, 0.0)

    def begin(self, request: Hashable, source: str, target: str, seconds: float, now: float) -> None:
        """A request was sent with a pull that is over in so many seconds, those for the links included."""
        pull = _Pull(now + seconds, self.link_seconds(source, target, now))
        for worker in (source, target):
            pulls = {name: one for name, one in self._by_worker.get(worker, {}).items() if one.ends_at > now}
            pulls.pop(request, None)
            while len(pulls) >= PULLS_MAX:
                del pulls[next(iter(pulls))]
            pulls[request] = pull
            self._by_worker[worker] = pulls

    def end(self, request: Hashable, source: str, target: str) -> float:
        """It is over. Returns the seconds that it was to wait for the links; 0.0 where nothing is known of it."""
        ended = [self._by_worker.get(worker, {}).pop(request, None) for worker in (source, target)]
        return next((pull.link_seconds for pull in ended if pull is not None), 0.0)

    def forget(self, worker: str) -> None:
        """A worker has left."""
        self._by_worker.pop(worker, None)

    def __len__(self) -> int:
        """Pulls of all workers, each once at either end."""
        return sum(map(len, self._by_worker.values()))
