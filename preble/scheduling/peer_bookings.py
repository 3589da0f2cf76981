"""What workers report about requests and prompts that this scheduler did not place, because other routers did. Owns
how they are booked; the bookings themselves are the scheduler's.

    router A -- request --> worker -- RequestPlaced, RequestPrefilled, RequestEnded --> router B
                                                                                         books it as if placed there

So the bookings of each router are of the whole fleet, as late as the network: queues, load, hits and predicted caches.
A peer booking is a booking like any other, under an id that no request of this scheduler has; it expires with its
lease, and leaves with its worker. Its events may come twice, or late, or for a booking that is gone: that is counted,
and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import groupby

from .._core.dict_keys import key_value
from .._placement.bookings import DecisionCore
from ..errors import InvalidInput
from ..lazy_typing import TYPE_CHECKING, Any, dataclass
from ..types import PrefixStored, RequestEnded, RequestPlaced, RequestPrefilled

if TYPE_CHECKING:
    from typing import TypeGuard

    from .pairs.halves import PairHalves

Cancel = Callable[[Hashable, float], bool]  # a live request, at a time; uncounted
PEER_EVENTS = (PrefixStored, RequestPlaced, RequestPrefilled, RequestEnded)
COUNTED = ("peer_requests", "peer_events_ignored")
_TYPES = frozenset(PEER_EVENTS)
_MARK = "mirrored"
PeerId = tuple[str, str, str, str]


def peer_id(worker_id: str, router: str, request_id: str) -> PeerId:
    """What another router's request is booked under."""
    return (_MARK, worker_id, router, request_id)


def is_peer(request_id: Hashable) -> TypeGuard[PeerId]:
    """Whether a live request was booked for another router."""
    return type(request_id) is tuple and len(request_id) == 4 and request_id[0] == _MARK


def runs_of(events: Iterable[Any]) -> Iterable[tuple[bool, Iterable[Any]]]:
    """Cut events into those of an engine's blocks and those reported by a worker (True); the usual lot stays whole."""
    if type(events) in (list, tuple) and _TYPES.isdisjoint(map(type, events)):
        return ((False, events),)
    return groupby(events, lambda event: isinstance(event, PEER_EVENTS))


@dataclass(slots=True, eq=False)
class PeerBookings:
    """Books what workers report, always under the writers' lock.

    `book_on(worker index, token_ids, request_id, namespace, max_new_tokens, now)`, `first_token`, `end(request_id,
    output_tokens)` and `cancel` are a scheduler's, and `count(counter, times)` is its counter.
    """

    core: DecisionCore
    book_on: Callable[[int, Any, Hashable, Hashable, int | None, float], bool]
    first_token: Callable[..., bool]
    end: Callable[[Hashable, int | None], bool]
    cancel: Cancel
    count: Callable[[str, int], None]
    pairs: PairHalves | None = None  # of the scheduler, where it has any

    def take(self, worker_id: str, index: int, event: Any, now: float) -> bool:
        """Book an event; whether it was news. Raises InvalidInput; then nothing has changed."""
        if isinstance(event, PrefixStored):
            news = self._store(index, event, now)
            self.count("events", 1)
            return news
        request_id = peer_id(worker_id, _name("router", event.router), _name("request_id", event.request_id))
        if isinstance(event, RequestPlaced):
            news = self._place(request_id, index, event, now)
        else:
            news = self.core.live_key(request_id) is not None and self._go_on(request_id, event, now)
        self.count("events" if news else "peer_events_ignored", 1)
        return news

    def _store(self, index: int, event: PrefixStored, now: float) -> bool:
        """Mark what a worker says it caches."""
        tree, space = self.core.tree, event.namespace
        known = tree.matched(event.token_ids, index, namespace=space)
        tree.insert(event.token_ids, now, worker=index, namespace=space, is_hit=False)
        return known < len(event.token_ids)

    def _place(self, request_id: Hashable, index: int, event: RequestPlaced, now: float) -> bool:
        """Book a request where it is. One that is booked already, or finds no room, is not."""
        news = self.book_on(index, event.token_ids, request_id, event.namespace, event.max_new_tokens, now)
        if news and self.pairs is not None:
            self.pairs.placed_by_peer(self.core.live_key(request_id), str(self.core.names[index]), event.half, now)
        self.count("peer_requests", int(news))
        return news

    def _go_on(self, request_id: PeerId, event: RequestPrefilled | RequestEnded, now: float) -> bool:
        """A live request has its first token or is over. Records, which are of own requests, are passed by."""
        if isinstance(event, RequestPrefilled):
            return self.first_token(request_id, cached_tokens=event.cached_tokens)
        if event.output_tokens is None:
            return self.cancel(request_id, now)
        only_prefilled = self.pairs is not None and self.pairs.is_only_prefilled(self.core.live_key(request_id))
        return self.end(request_id, None if only_prefilled else event.output_tokens)


def forget(cancel: Cancel, keys: Iterable[Hashable], now: float) -> list[Hashable]:
    """Give the peer bookings among these live ones, known by their keys, back; returns the ids of the others, in order.
    Under the writers' lock."""
    kept = []
    for key in keys:
        if is_peer(key):
            cancel(key, now)
        else:
            kept.append(key_value(key))
    return kept


def _name(what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"{what} of an event must be a str, got {value!r}")
    return str.__str__(value)  # that of a subclass could not be distinguished from an id of this scheduler
