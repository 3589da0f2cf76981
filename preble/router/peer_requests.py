"""What one worker reports about other routers' requests, before it reaches the scheduler. Owns which of it is of the
past; booking is the scheduler's (`peer_bookings`).

As it happens, everything is passed on but the events of this router's own requests, which it has booked itself.

A router that comes late, or comes back, is first given the past. A request that was over by then is no load now, and
one that is still running should be booked once, as it stands at the end. So while it catches up

    placed       waits
    first token  reports that its prompt is cached, now: what was evicted afterwards is reported afterwards
    ended        takes it out of those that wait, and ends what was booked before a break
    caught up    books those that still wait

No socket, no clock; not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..types import CacheEvent, PrefixStored, RequestEnded, RequestPlaced, RequestPrefilled

RequestEvent = RequestPlaced | RequestPrefilled | RequestEnded
WAITING_MAX = 65_536  # a worker has fewer requests at a time, unless ends were lost

_Key = tuple[str, str]


@dataclass(slots=True)
class PeerCounters:
    """What one worker has reported about requests. `peer_requests_dropped`: over the bound while catching up."""

    peer_requests: int = 0
    peer_requests_past: int = 0
    peer_requests_dropped: int = 0


class PeerRequests:
    """See the module. `router_id` is this router's own; over `max_waiting` requests of the past, the oldest are dropped
    and counted."""

    def __init__(self, router_id: str, max_waiting: int = WAITING_MAX) -> None:
        self.counters = PeerCounters()
        self._router_id = router_id
        self._max_waiting = max_waiting
        self._waiting: dict[_Key, tuple[RequestPlaced, RequestPrefilled | None]] = {}

    def begin(self) -> None:
        """Nothing that was reported holds: the worker is another one, or events were lost for good."""
        self._waiting.clear()

    def take(self, batch: Sequence[CacheEvent], *, past: bool) -> Sequence[CacheEvent]:
        """What the scheduler is given of a batch, in order."""
        if not any(isinstance(event, RequestEvent) for event in batch):
            return batch
        return [*self._past(batch)] if past else [event for event in batch if self._is_news(event)]

    def caught_up(self) -> list[CacheEvent]:
        """What the scheduler is given when the past is over: the requests that run now."""
        waiting, self._waiting = self._waiting, {}
        reports: list[CacheEvent] = []
        for placed, prefilled in waiting.values():
            if placed.router != self._router_id:  # our own run elsewhere by now
                self.counters.peer_requests += 1
                reports += [placed] if prefilled is None else [placed, prefilled]
        return reports

    def _is_news(self, event: CacheEvent) -> bool:
        if isinstance(event, RequestEvent) and event.router == self._router_id:
            return False
        self.counters.peer_requests += isinstance(event, RequestPlaced)
        return True

    def _past(self, batch: Iterable[CacheEvent]) -> Iterable[CacheEvent]:
        for event in batch:
            if isinstance(event, RequestPlaced):
                self._wait(event)
                continue
            if not isinstance(event, RequestEvent):
                yield event
                continue
            key = (event.router, event.request_id)
            waits = self._waiting.get(key)
            if waits is None:
                if event.router != self._router_id:
                    yield event  # it was booked before a break
            elif isinstance(event, RequestPrefilled):
                self._waiting[key] = (waits[0], event)
                yield PrefixStored(waits[0].token_ids, waits[0].namespace)
            else:
                del self._waiting[key]
                self.counters.peer_requests_past += 1
                if event.router != self._router_id:
                    yield event  # it may have been booked before a break, and reported again since

    def _wait(self, placed: RequestPlaced) -> None:
        self._waiting.setdefault((placed.router, placed.request_id), (placed, None))
        if len(self._waiting) > self._max_waiting:
            del self._waiting[next(iter(self._waiting))]
            self.counters.peer_requests_dropped += 1
