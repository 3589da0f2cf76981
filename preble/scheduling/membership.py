"""Workers that join and leave: which prefixes they are given and which they give away. Owns the plans and what became
of them; the marks are changed by `_placement/prefix_handoff.pyx`, workers come and go by `scheduler.py`.

Who leaves gives its hot prefixes away, those first that are computed again soonest, so that the requests of each
go to one other worker and not to several. Who joins is given hot prefixes of the busiest, up to a share of the mean
load: as long as everything asked for is cached somewhere, the rule alone would leave it idle. Work is done in `tick`,
one worker's marks or one prefix in a hold of the lock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field, replace
from heapq import nlargest, nsmallest
from typing import TYPE_CHECKING, Any

from .._placement.prefix_handoff import (
    HotPrefix,
    hand_over,
    hot_prefixes,
    joined_at,
    oldest_joined,
    open_workers,
    takes_any,
)
from ..errors import UnknownWorker
from .autoscaling import LoadSampler

if TYPE_CHECKING:
    from .._placement.bookings import DecisionCore
    from ..config import SchedulerConfig

OpenWorker = tuple[float, int, str, int]  # load seconds, index, name, capacity in tokens
NO_REQUEST, ANY_REQUEST, CACHED_ONLY = range(3)  # which requests a worker takes, as `_placement/e2.pxd` has it
MOVES_KEPT = 64  # the last moves, shown by `stats`
TAKERS_MAX = 64  # workers that a leaver's prefixes are shared out to, the least loaded
GIVERS_MAX = 64  # workers searched for prefixes that newcomers could have, the busiest first
GIVERS_A_TICK = 8
ROUND_SECONDS = 5.0  # between two rounds of giving to newcomers who have not got their share
LOAD_SECONDS_MIN = 1.0  # of the mean worker within the window; below that nobody needs relief
REPLICAS_MAX = 64  # newcomers that one prefix is given to in a round


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


@dataclass(slots=True)
class _Newcomer:
    """A worker that has joined a fleet at work."""

    joined_at: float
    given_seconds: float = 0.0  # load, as the givers had it within the window
    has_seconds: float = 0.0  # that, or its own load where that is more
    taken: set[tuple[Hashable, int, tuple[int, ...]]] = field(default_factory=set)


class Membership:
    """The joins and drains of one scheduler's workers. Takes the writers' lock for each step by itself.

    `gives`: whether prefixes change hands at all; not where another rule than E2 decides, which may not follow marks.
    """

    def __init__(self, core: DecisionCore, config: SchedulerConfig, *, gives: bool) -> None:
        self._core = core
        self._lock = core.tree
        self._config = config
        self._prefixes_max = config.handover_prefixes_max if gives else 0
        self._join_share = config.join_share if gives else 0.0
        self._leaving: dict[str, _Leaving] = {}
        self._newcomers: dict[str, _Newcomer] = {}
        self._given: dict[str, float] = {}  # load that givers have given to newcomers, while there are any
        self._givers: deque[str] = deque()  # who is still to be searched in this round
        self._next_round = float("-inf")
        self._moves: deque[PrefixMove] = deque(maxlen=MOVES_KEPT)
        self._counts = {"given_by_leavers": 0, "given_to_newcomers": 0, "left_out": 0}
        self._load_sampler = LoadSampler(core, config.history_seconds, config.join_seconds)

    def tick(self, now: float) -> None:
        """Give away what is due by now."""
        for name, leaving in list(self._leaving.items()):
            self._give_due(name, leaving, now)
        if self._newcomers:
            self._welcome(now)
        self._load_sampler.tick(now)

    def advice(self) -> dict[str, Any]:
        """What a worker more, or one less, would do (docs/scaling.md). Under the writers' lock."""
        return self._load_sampler.advice()

    def removed(self, name: str) -> None:
        """A worker has gone, with whatever it had still to give."""
        self._newcomers.pop(name, None)
        self._given.pop(name, None)
        leaving = self._leaving.pop(name, None)
        if leaving is not None:
            self._counts["left_out"] += len(leaving.prefixes)

    def stats(self) -> dict[str, Any]:
        """Counters, who is on the way in and out, and the last moves, oldest first."""
        return {
            **self._counts,
            "leaving": {name: len(leaving.prefixes) for name, leaving in self._leaving.items()},
            "newcomers": {name: newcomer.given_seconds for name, newcomer in self._newcomers.items()},
            "moves": [asdict(move) for move in self._moves],
        }

    # --- leaving ------------------------------------------------------------------------------------------------------

    def leave(self, name: str, index: int, now: float, seconds: float) -> Handover:
        """A worker drains: plan its handover, or hurry the one under way. UnknownWorker if it goes meanwhile."""
        plan = self._plan(index, now, seconds) if name not in self._leaving else None
        with self._lock:
            leaving = self._leaving.get(name, plan)
            if self._core.names[index] != name or leaving is None:
                raise UnknownWorker(f"worker {name!r} was removed while it was drained")
            if self._leaving.setdefault(name, leaving) is plan:
                self._counts["left_out"] += leaving.left_out
            self._newcomers.pop(name, None)
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
            ranked = hot_prefixes(self._core, index, now, exclusive=True)
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

    # --- joining ------------------------------------------------------------------------------------------------------

    def joined(self, name: str, index: int) -> None:
        """A worker is there; into a fleet that has been there for a while it comes as a newcomer."""
        joined = joined_at(self._core, index)
        if self._join_share and joined - oldest_joined(self._core) >= self._config.join_seconds:
            self._newcomers[name] = _Newcomer(joined)
            self._next_round = min(self._next_round, joined)

    def _welcome(self, now: float) -> None:
        """Give newcomers prefixes of the busiest, until what they were given makes up their share of the mean load."""
        if not self._givers and now < self._next_round <= now + ROUND_SECONDS:  # later: a clock has jumped back
            return
        with self._lock:
            loads = {row[2]: row for row in open_workers(self._core, now)}
            self._look_at_newcomers(loads, now)
            old = {name: row[0] for name, row in loads.items() if name not in self._newcomers}
            mean = sum(old.values()) / max(len(loads), 1)
            if not self._givers:
                self._next_round = now + ROUND_SECONDS
                self._givers.extend(nlargest(GIVERS_MAX, old, key=lambda name: old[name] - self._given.get(name, 0.0)))
        if not self._newcomers or mean < LOAD_SECONDS_MIN:
            self._givers.clear()
        for _ in range(GIVERS_A_TICK):
            with self._lock:
                name = self._givers.popleft() if self._givers else None
            if name is None:
                return
            if name in old and not self._share_out(name, loads, mean, now):
                self._givers.clear()
                return

    def _look_at_newcomers(self, loads: Mapping[str, OpenWorker], now: float) -> None:
        """Who has been there for a window is no newcomer; others have come by load also without being given it."""
        for name, newcomer in list(self._newcomers.items()):
            if name not in loads or now - newcomer.joined_at > self._config.history_seconds:
                del self._newcomers[name]
            else:
                newcomer.has_seconds = max(newcomer.given_seconds, loads[name][0])
        if not self._newcomers:
            self._given.clear()

    def _share_out(self, name: str, loads: Mapping[str, OpenWorker], mean: float, now: float) -> bool:
        """Give newcomers what a worker has above the mean, first what is computed soonest for its requests; False if
        they have their share. The giver keeps its copies: from then on the less loaded of the two takes a request."""
        load, index, _, _ = loads[name]
        surplus = load - self._given.get(name, 0.0) - mean
        with self._lock:
            if surplus <= 0.0 or not takes_any(self._core, index, name):
                return True
            seconds_per_hit = self._seconds_per_request(index)
        try:
            prefixes = hot_prefixes(self._core, index, now, exclusive=False)
        except UnknownWorker:  # it left just now
            return True
        prefixes.sort(key=lambda prefix: prefix.loss_seconds / prefix.hits)
        for prefix in prefixes:
            seconds = min(prefix.hits * seconds_per_hit, surplus)
            with self._lock:
                takers = self._takers(prefix, seconds, mean, loads)
                if takers is None:
                    return False
                for taker in takers:
                    self._give_newcomer(prefix, (name, index), taker, loads[taker][1], seconds / len(takers), now)
            if takers:
                surplus -= seconds
            if surplus <= 0.0:
                break
        return True

    def _takers(
        self, prefix: HotPrefix, seconds: float, mean: float, loads: Mapping[str, OpenWorker]
    ) -> list[str] | None:
        """The newcomers who have least of their share, so many that none is given more than the mean load with it; none
        where they have it already, None if nobody needs anything."""
        share = self._join_share * mean
        has = {name: newcomer.has_seconds for name, newcomer in self._newcomers.items() if name in loads}
        has = {name: load for name, load in has.items() if load < share}
        if not has:
            return None
        known = (prefix.namespace, prefix.tokens, prefix.head)
        fits = [name for name in has if loads[name][3] >= prefix.tokens]
        free = [name for name in fits if known not in self._newcomers[name].taken]
        most = mean * (1.0 + 1e-9)  # equal sums of seconds may differ in the last bits
        count = min(math.ceil(seconds / most), REPLICAS_MAX)
        chosen = nsmallest(count, free, key=lambda name: (has[name], name))
        return [name for name in chosen if has[name] + seconds / len(chosen) <= most]

    def _give_newcomer(
        self, prefix: HotPrefix, giver: tuple[str, int], taker: str, index: int, seconds: float, now: float
    ) -> None:
        """One prefix to one newcomer, if both workers are still there."""
        name, giver_index = giver
        newcomer, names = self._newcomers.get(taker), self._core.names
        if newcomer is None or names[giver_index] != name or names[index] != taker:
            return
        hand_over(self._core, prefix, giver_index, index, now, keep=True)
        newcomer.given_seconds += seconds
        newcomer.has_seconds += seconds
        newcomer.taken.add((prefix.namespace, prefix.tokens, prefix.head))
        self._given[name] = self._given.get(name, 0.0) + seconds
        self._counts["given_to_newcomers"] += 1
        self._moves.append(replace(self._move(prefix, giver_index, index, "join"), moved_at=now))
