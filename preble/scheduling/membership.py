"""Workers that leave: which prefixes they give away. Owns the plans and what became of them; the marks are changed by
`_placement/prefix_handoff.pyx`, workers come and go by `scheduler.py`.

Who leaves gives its hot prefixes away, those first that are computed again soonest, so that the requests of each
go to one other worker and not to several. Work is done in `tick`, one prefix in a hold of the lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from heapq import nsmallest

from .._placement.prefix_handoff import (
    HotPrefix,
    hand_over,
    hot_prefixes,
    open_workers,
    takes_any,
)
from ..errors import UnknownWorker
from ..lazy_typing import TYPE_CHECKING, Any, dataclass, replace
from .autoscaling import LoadSampler

if TYPE_CHECKING:
    from .._placement.bookings import DecisionCore
    from ..config import SchedulerConfig

NO_REQUEST, ANY_REQUEST, CACHED_ONLY = range(3)  # which requests a worker takes, as `_placement/e2.pxd` has it
MOVES_KEPT = 64  # the last moves, shown by `stats`
TAKERS_MAX = 64  # workers that a leaver's prefixes are shared out to, the least loaded


@dataclass(frozen=True, slots=True)
class PrefixMove:
    """A prefix that changes hands: `prefix_tokens` long in `namespace`, `head` the first ids of its own part.

    `hits`: its requests on `giver` within the window. `loss_seconds`: what it takes to compute it again.
    `moved_at`: by the scheduler's clock; None: not yet.
    """

    namespace: Hashable
    prefix_tokens: int
    head: tuple[int, ...]
    giver: str
    taker: str
    reason: str
    hits: float
    loss_seconds: float
    moved_at: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Its fields. The namespace is the user's own object and is not copied, as `dataclasses.asdict` would."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Handover:
    """What becomes of a draining worker's prefixes, in the order in which they go.

    `left_out`: hot prefixes beyond `handover_prefixes_max`, and those that fit nowhere; their requests are placed like
    new ones. `ends_at`: when the last goes.
    """

    worker: str
    moves: tuple[PrefixMove, ...]
    left_out: int
    ends_at: float

    @property
    def is_over(self) -> bool:
        """Whether every prefix has gone."""
        return all(move.moved_at is not None for move in self.moves)


@dataclass(slots=True)
class _Leaving:
    """A worker that drains, and the prefixes it has still to give away, in order."""

    index: int
    began_at: float
    ends_at: float
    moves: list[PrefixMove]
    prefixes: deque[tuple[HotPrefix, int]]  # and the index of the worker chosen
    left_out: int

    @property
    def is_gradual(self) -> bool:
        """Whether the worker goes on taking requests for what it has; what it gives away, it must forget."""
        return self.ends_at > self.began_at

    def due_at(self, place: int) -> float:
        """When a move is due: evenly, the last at the end."""
        return self.began_at + (self.ends_at - self.began_at) * (place + 1) / len(self.moves)


class Membership:
    """The drains of one scheduler's workers. Takes the writers' lock for each step by itself.

    `gives`: whether prefixes change hands at all; not where another rule than E2 decides, which may not follow marks.
    """

    def __init__(self, core: DecisionCore, config: SchedulerConfig, *, gives: bool) -> None:
        self._core = core
        self._lock = core.tree
        self._prefixes_max = config.handover_prefixes_max if gives else 0
        self._leaving: dict[str, _Leaving] = {}
        self._moves: deque[PrefixMove] = deque(maxlen=MOVES_KEPT)
        self._counts = {"given_by_leavers": 0, "left_out": 0}
        self._load_sampler = LoadSampler(core, config.history_seconds, config.join_seconds)

    def tick(self, now: float) -> None:
        """Give away what is due by now."""
        for name, leaving in list(self._leaving.items()):
            self._give_due(name, leaving, now)
        self._load_sampler.tick(now)

    def advice(self) -> dict[str, Any]:
        """What a worker more, or one less, would do (docs/fleet.md). Under the writers' lock."""
        return self._load_sampler.advice()

    def removed(self, name: str) -> None:
        """A worker has gone, with whatever it had still to give."""
        leaving = self._leaving.pop(name, None)
        if leaving is not None:
            self._counts["left_out"] += len(leaving.prefixes)

    def stats(self) -> dict[str, Any]:
        """Counters, who is on the way out, and the last moves, oldest first."""
        return {
            **self._counts,
            "leaving": {name: len(leaving.prefixes) for name, leaving in self._leaving.items()},
            "moves": [move.as_dict() for move in self._moves],
        }

    # --- leaving ------------------------------------------------------------------------------------------------------

    def leave(self, name: str, index: int, now: float, seconds: float, is_there: Callable[[], bool]) -> Handover:
        """A worker drains: plan its handover, or hurry the one under way. UnknownWorker if it goes meanwhile.
        `is_there`, asked under the lock: whether it is the same worker still, for another may have name and index."""
        plan = self._plan(index, now, seconds) if name not in self._leaving else None
        with self._lock:
            leaving = self._leaving.get(name, plan)
            if not is_there() or leaving is None:
                raise UnknownWorker(f"worker {name!r} was removed while it was drained")
            if self._leaving.setdefault(name, leaving) is plan:
                self._counts["left_out"] += leaving.left_out
            leaving.ends_at = min(leaving.ends_at, now + seconds)
            self._core.set_eligible(index, self.takes(name))
        self._give_due(name, leaving, now)
        with self._lock:
            return Handover(name, tuple(leaving.moves), leaving.left_out, leaving.ends_at)

    def takes(self, name: str) -> int:
        """Which requests a draining worker takes: those that hit its cache, as long as it has prefixes to give."""
        leaving = self._leaving.get(name)
        return CACHED_ONLY if leaving is not None and leaving.is_gradual and leaving.prefixes else NO_REQUEST

    def _plan(self, index: int, now: float, seconds: float) -> _Leaving:
        """The hot prefixes that only this worker has, each with the worker that will have it: by load, the heaviest
        first to the least loaded. They go in the order of what it takes to compute them again."""
        takers = nsmallest(TAKERS_MAX, (row for row in open_workers(self._core, now) if row[1] != index))
        ranked: list[HotPrefix] = []
        if self._prefixes_max and takers:
            ranked = hot_prefixes(self._core, index, now)
            ranked.sort(key=lambda prefix: -prefix.hot_seconds)
        chosen = sorted(ranked[: self._prefixes_max], key=lambda prefix: -prefix.hits)
        rooms = {taker: capacity for _, taker, _, capacity in takers}
        expected = {taker: load for load, taker, _, _ in takers}
        seconds_per_hit = self._seconds_per_request(index)
        planned: list[tuple[HotPrefix, int]] = []
        for prefix in chosen:
            fits = [taker for taker in expected if rooms[taker] >= prefix.tokens]
            if fits:
                taker = min(fits, key=lambda taker: (expected[taker], taker))
                expected[taker] += prefix.hits * seconds_per_hit
                planned.append((prefix, taker))
        planned.sort(key=lambda pair: pair[0].loss_seconds)
        moves = [self._move(prefix, index, taker, "drain") for prefix, taker in planned]
        left_out = len(ranked) - len(planned)
        return _Leaving(index, now, now + seconds, moves, deque(planned), left_out)

    def _seconds_per_request(self, index: int) -> float:
        """A worker's load within the window, for each of its requests."""
        with self._lock:
            account = self._core.loads.account(index)
        return account["load_seconds"] / max(account["window_requests"], 1)

    def _move(self, prefix: HotPrefix, giver: int, taker: int, reason: str) -> PrefixMove:
        known, names = (prefix.namespace, prefix.tokens, prefix.head), self._core.names
        return PrefixMove(*known, str(names[giver]), str(names[taker]), reason, prefix.hits, prefix.loss_seconds)

    def _give_due(self, name: str, leaving: _Leaving, now: float) -> None:
        """Give away what is due by now, one prefix in a hold of the lock."""
        while True:
            with self._lock:
                place = len(leaving.moves) - len(leaving.prefixes)
                if not leaving.prefixes or self._leaving.get(name) is not leaving or now < leaving.due_at(place):
                    return
                self._give(leaving, place, now)
                self._core.set_eligible(leaving.index, self.takes(name))

    def _give(self, leaving: _Leaving, place: int, now: float) -> None:
        """Give the next prefix to the worker chosen for it or, if that one takes no more requests, to the least loaded.
        With nobody left it goes nowhere."""
        (prefix, index), move = leaving.prefixes.popleft(), leaving.moves[place]
        name = move.taker
        if not takes_any(self._core, index, name):
            _, index, name, _ = min(open_workers(self._core, now), default=(0.0, 0, "", 0))
        if not name:
            leaving.left_out += 1
            self._counts["left_out"] += 1
            return
        hand_over(self._core, prefix, leaving.index, index, now, keep=not leaving.is_gradual)
        leaving.moves[place] = replace(move, taker=name, moved_at=now)
        self._counts["given_by_leavers"] += 1
        self._moves.append(leaving.moves[place])
