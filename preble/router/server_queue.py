"""Requests that were placed at a server that runs already, until it is sent them. Owns who waits, in which order, and
until when; sends nothing, has no clock of its own.

    placed  ->  waiting, by rank  ->  sent, no first token yet (`look_ahead`)  ->  begun

  1. The rank of a request is its arrival and the seconds of its prefill, at the pace that prefills have there: what is
     cached goes before what is not, and a request waits for those only that come so much later. Batch work is
     `BATCH_PATIENCE` seconds behind.
  2. A request that goes on from tokens which another one is to compute (but for a few, such as a template's) follows
     that one: it does not overtake it, or it would compute them itself. It goes when that one has begun, since together
     in one batch both would compute them; before an engine that shares those (`computes_twice`), when that one is sent.

Where several routers place requests at a server each looks after its own. Belongs to one asyncio loop.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..clock import Clock
from ..transport.look_ahead import TWICE_SECONDS, LookAhead, twice_share

BATCH_PATIENCE = 30.0
PACE_STEP = 1.25  # times: by so much the pace changes before those that wait are put in order anew
FOLLOWED_MAX = 64  # requests that have not begun, the newest, among which the one is looked for that another follows


class Timer(Protocol):
    """A call that is to come."""

    def cancel(self) -> object:
        """It is not to come any more."""


Rank = tuple[float, int]
Later = Callable[[float, Callable[[], object]], Timer]


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request placed at a server. `seconds`: its prefill, as expected; the first `cached_tokens` of `token_ids` count
    as cached there. `go`: it is to be sent now. May not raise."""

    name: str
    token_ids: npt.NDArray[np.int32]
    cached_tokens: int
    seconds: float
    arrived: float
    is_batch: bool
    is_streamed: bool
    go: Callable[[], object]
    namespace: Hashable = None
    number: int = -1
    follows: QueuedRequest | None = None
    is_shared: bool = False  # who goes on from what it computes may go

    def rank(self, pace: float) -> Rank:
        """The order among those that wait, where prefills take so many times what is expected."""
        return self.arrived + pace * self.seconds + (BATCH_PATIENCE if self.is_batch else 0.0), self.number

    @property
    def may_go(self) -> bool:
        """Whether it need not wait for who computes what it goes on from."""
        return self.follows is None or self.follows.is_shared


class ServerQueue:
    """See the module. `later(seconds, call)` makes a call in so many seconds. `seconds` of look-ahead, as for
    `LookAhead`; None: everything is sent at once. `computes_twice` is the engine's, as `look_ahead` says."""

    def __init__(self, seconds: float | None, clock: Clock, later: Later) -> None:
        self.computes_twice = True
        self._ahead = LookAhead(math.inf if seconds is None else seconds)
        self._clock = clock
        self._later = later
        self._waiting: list[tuple[Rank, QueuedRequest]] = []
        self._pace = 1.0  # at which those that wait are in order
        self._unbegun: dict[str, QueuedRequest] = {}  # waiting or sent, the oldest first
        self._numbers = 0
        self._timer: Timer | None = None
        self._timer_at = math.inf

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def enter(self, request: QueuedRequest) -> None:
        """A request is placed: it goes now, or when its turn comes. O(requests that wait, and prompts of `FOLLOWED_MAX`
        of them)."""
        if self._ahead.seconds == math.inf:
            request.go()
            return
        assert request.name not in self._unbegun, f"{request.name!r} is there"
        request.number = self._numbers
        self._numbers += 1
        request.follows = self._followed_by(request)
        self._unbegun[request.name] = request
        insort(self._waiting, (request.rank(self._pace), request), key=_rank)
        self._pump()

    def leave(self, name: str, *, has_begun: bool = False) -> bool:
        """Its first token has come (`has_begun`), or it is over; True if it waited. Of others, nothing."""
        now = self._clock()
        self._expire(now)
        was_sent = self._ahead.begin(name, now) if has_begun else self._ahead.remove(name)
        request = self._unbegun.pop(name, None)
        waited = request is not None and not was_sent
        if request is not None:
            request.is_shared = True
            if waited:
                del self._waiting[bisect_left(self._waiting, request.rank(self._pace), key=_rank)]
        self._pump()
        return waited

    def _pump(self) -> None:
        """Send what can go, and come back when what was sent should have begun."""
        now = self._clock()
        self._expire(now)
        self._keep_order()
        while (place := self._next_place()) is not None:
            _, request = self._waiting.pop(place)
            self._ahead.add(request.name, request.seconds, now, is_streamed=request.is_streamed)
            request.is_shared = not self.computes_twice
            request.go()
        self._set_timer(self._ahead.expires_at if self._waiting else math.inf, now)

    def _expire(self, now: float) -> None:
        """Those that should have begun keep nobody waiting any more."""
        for name in self._ahead.expire(now):
            self._unbegun.pop(name).is_shared = True

    def _keep_order(self) -> None:
        """Rank those that wait anew, where the pace has changed. O(n log n) then."""
        pace = self._ahead.pace
        if max(pace / self._pace, self._pace / pace) >= PACE_STEP:
            self._pace = pace
            self._waiting = sorted(((one.rank(pace), one) for _, one in self._waiting), key=_rank)

    def _next_place(self) -> int | None:
        """Of the first in the order that need not wait for another, if there is room for it, or of one that needs
        none: an answer of which nobody sees how long prefills take."""
        is_full = False
        for place, (_, request) in enumerate(self._waiting):
            if not request.may_go or (is_full and request.is_streamed):
                continue
            if self._ahead.has_room(request.seconds, is_streamed=request.is_streamed):
                return place
            if not self._ahead.is_blind:
                return None
            is_full = True
        return None

    def _set_timer(self, at: float, now: float) -> None:
        if at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = None if at == math.inf else self._later(max(at - now, 0.0), self._ring)

    def _ring(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self._pump()

    def _followed_by(self, request: QueuedRequest) -> QueuedRequest | None:
        """The newest request whose tokens cannot be gone on from yet and which computes some that this one goes on
        from, if to compute them twice would take long."""
        for _, other in zip(range(FOLLOWED_MAX), reversed(self._unbegun.values()), strict=False):
            if other.is_shared or other.cached_tokens >= request.cached_tokens:
                continue  # what it computes is not what this one goes on from
            if request.namespace == other.namespace:
                share = twice_share(request.token_ids, request.cached_tokens, other.token_ids, other.cached_tokens)
                if self._pace * other.seconds * share >= TWICE_SECONDS:
                    return other
        return None

    def check(self) -> None:
        """Assert that lists, sums and order agree, and that nobody waits for nothing."""
        self._ahead.check()
        names = [one.name for _, one in self._waiting]
        assert set(self._unbegun) == {*names, *self._unbegun} and len(set(names)) == len(names), "one waits twice"
        sent = set(self._unbegun) - set(names)
        assert all(name in self._ahead for name in sent) and len(sent) == len(self._ahead), "a request is nowhere"
        assert [rank for rank, _ in self._waiting] == sorted(one.rank(self._pace) for _, one in self._waiting), (
            "no order"
        )
        assert not any(one.is_shared for _, one in self._waiting), "nothing of what waits is computed"
        assert self._next_place() is None, "there is room, and somebody waits"


def _rank(entry: tuple[Rank, QueuedRequest]) -> Rank:
    return entry[0]
