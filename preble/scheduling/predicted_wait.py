"""How long a request would wait for its first token, and whether it is refused at once instead. No socket, no clock of
its own.

The wait at a worker is the work of the requests that wait there over its pace: the work of those whose first token has
come, in a second of backlog (Little's law). Both are in the seconds that the scheduler books, so that errors of the
cost model cancel out; and both are of this router's requests alone, so that the quotient also holds where other
routers send to the same worker.

    pace of a worker     measured while `BACKLOG_MIN` requests or more wait there, fading over `FADE_SECONDS`
    nothing measured     the wait is at least as long as nobody's first token has come, and no more is known; until
                         `STARTS_MIN` have, it is not thought longer than there has been a backlog
    refused              a request that would wait longer than it may at every worker, if `WAITING_MIN` wait in all:
                         an idle fleet, or one that has just been started, refuses nobody
    a burst              passes by itself: until no worker has had room for `BURST_SECONDS`, a request may wait
                         `BURST_FACTOR` times as long. There is room again where one would wait `SPILL_SHARE` of it
    a rush               is no burst: more than `RUSH_RATIO` times the work that workers start comes to them, and not by
                         chance. It takes `COLD_SECONDS` from the first request until anything is one: while caches are
                         cold that is no wonder

A client (an API key, say) that waits for less than its equal part of what may wait is let in beyond the bound, up to
`FAIR_EXCESS` times the bound: so one that asks for too much is refused, not the others. Belongs to one asyncio loop.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

FADE_SECONDS = 10.0
IDLE_WEIGHT_SECONDS = 1.0  # of backlog, that a pace weighs at least, however long ago it was measured
MEASURED_SECONDS = 0.5  # of backlog, after which a pace is said
STARTS_MIN = 4
BACKLOG_MIN = 2
WAITING_MIN = 4
FAIR_EXCESS = 1.5
BURST_SECONDS = 15.0  # in which caches that are cold, or a rush, need not be an overload
BURST_FACTOR = 4.0
RUSH_SECONDS = 5.0  # in which what comes and what starts are compared
RUSH_RATIO = 1.3
COLD_SECONDS = 30.0
SPILL_SHARE = 0.5  # of the bound: who waits less than this elsewhere leaves a full worker


@dataclass(slots=True)
class WorkerPace:
    """One worker: what waits there, and the work that starts there in a second of backlog. Times only grow."""

    requests: int = 0
    waiting_seconds: float = 0.0  # booked, of those requests
    started_seconds: float = 0.0  # booked, of requests whose first token came in a backlog; faded
    backlog_seconds: float = 0.0  # in which they did; faded
    starts: int = 0  # how many did, ever
    at: float = field(default=-math.inf)

    def advance(self, now: float) -> None:
        """Bring the sums to `now`. In a backlog time counts; without one what was measured only fades."""
        passed = max(now - self.at, 0.0) if self.at > -math.inf else 0.0
        self.at = max(now, self.at)
        kept = math.exp(-passed / FADE_SECONDS)
        if self.requests >= BACKLOG_MIN:
            self.started_seconds *= kept
            self.backlog_seconds = self.backlog_seconds * kept + FADE_SECONDS * (1.0 - kept)
        elif self.backlog_seconds > IDLE_WEIGHT_SECONDS:
            kept = max(kept, IDLE_WEIGHT_SECONDS / self.backlog_seconds)
            self.started_seconds *= kept
            self.backlog_seconds *= kept

    def wait_seconds(self) -> float:
        """How long one more request would wait, as things were at the last `advance`."""
        if self.requests < BACKLOG_MIN:
            return 0.0
        if self.started_seconds <= 0.0:
            return self.backlog_seconds
        wait = self.waiting_seconds * self.backlog_seconds / self.started_seconds
        return wait if self.starts >= STARTS_MIN else min(wait, self.backlog_seconds)


@dataclass(slots=True)
class Arrivals:
    """What was asked of all workers lately: requests, refused ones too, and the work of those that were placed; faded
    over `RUSH_SECONDS`. Times only grow."""

    requests: float = 0.0
    placed: float = 0.0
    placed_seconds: float = 0.0
    first_at: float = math.inf
    at: float = -math.inf

    def advance(self, now: float) -> None:
        """Bring the sums to `now`."""
        if now <= self.at:
            return
        kept = math.exp(-(now - self.at) / RUSH_SECONDS)
        self.requests *= kept
        self.placed *= kept
        self.placed_seconds *= kept
        self.at = now

    def add(self, seconds: float | None, now: float) -> None:
        """One more request; `seconds`: its work, None where it was refused."""
        self.advance(now)
        self.first_at = min(self.first_at, now)
        self.requests += 1.0
        if seconds is not None:
            self.placed += 1.0
            self.placed_seconds += seconds

    def exceed(self, pace: float, now: float) -> bool:
        """Whether much more comes than `pace` seconds of work in a second, those that were refused counted like the
        others; a standard deviation more, for requests that come by chance."""
        self.advance(now)
        if not self.placed_seconds or pace <= 0.0:
            return False
        served = pace * RUSH_SECONDS * self.placed / self.placed_seconds
        return self.requests > RUSH_RATIO * served + math.sqrt(served / 2.0)


class _PlacedRequest(NamedTuple):
    worker_id: str
    client: Hashable
    seconds: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one request. `refuse_seconds`: it is refused, and may hope for room after so long. `over`: workers that it
    must not go to; `avoid`: and it shall be placed elsewhere, rather than refused, where those are chosen."""

    refuse_seconds: float | None = None
    over: frozenset[str] = frozenset()
    avoid: bool = False


ADMITTED = Verdict()


class PredictedWait:
    """All workers of a router, and who waits for them. Every request that waits is named; names are never used twice.

    Bounded by the router's live requests and its workers.
    """

    def __init__(self, burst_factor: float = BURST_FACTOR) -> None:
        self._burst_factor = burst_factor
        self._full_since: float | None = None  # no worker has had room since
        self._arrivals = Arrivals()
        self._paces: dict[str, WorkerPace] = {}
        self._waiting: dict[Hashable, _PlacedRequest] = {}
        self._clients: dict[Hashable, list[float]] = {}  # those that wait: requests, their seconds
        self.total_seconds = 0.0  # booked, of all that wait

    # --- what happens -------------------------------------------------------------------------------------------------

    def placed(self, name: Hashable, worker_id: str, client: Hashable, booked_seconds: float, now: float) -> None:
        """A request waits at a worker from now on."""
        self._arrivals.add(booked_seconds, now)
        pace = self._paces.setdefault(worker_id, WorkerPace())
        pace.advance(now)
        pace.requests += 1
        pace.waiting_seconds += booked_seconds
        self.total_seconds += booked_seconds
        self._waiting[name] = _PlacedRequest(worker_id, client, booked_seconds)
        mine = self._clients.setdefault(client, [0, 0.0])
        mine[0] += 1
        mine[1] += booked_seconds

    def started(self, name: Hashable, now: float) -> None:
        """Its first token has come."""
        pace, request = self._leave(name, now)
        if request is None or pace is None:
            return
        if pace.requests + 1 >= BACKLOG_MIN:
            pace.started_seconds += request.seconds
            pace.starts += 1

    def left(self, name: Hashable, now: float) -> None:
        """It waits no more, started or not; again does nothing."""
        self._leave(name, now)

    def forget(self, worker_ids: Collection[str]) -> None:
        """Drop the paces of all workers but these, where nobody waits."""
        for worker_id in [one for one, pace in self._paces.items() if one not in worker_ids and not pace.requests]:
            del self._paces[worker_id]

    def _leave(self, name: Hashable, now: float) -> tuple[WorkerPace | None, _PlacedRequest | None]:
        request = self._waiting.pop(name, None)
        if request is None:
            return None, None
        pace = self._paces[request.worker_id]
        if self.is_calm:
            self._full_since = None
        pace.advance(now)
        pace.requests -= 1
        self.total_seconds = self.total_seconds - request.seconds if self._waiting else 0.0
        pace.waiting_seconds = pace.waiting_seconds - request.seconds if pace.requests else 0.0
        mine = self._clients[request.client]
        mine[0] -= 1
        mine[1] -= request.seconds
        if mine[0] == 0:
            del self._clients[request.client]
        return pace, request

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests without a first token."""
        return len(self._waiting)

    @property
    def is_calm(self) -> bool:
        """Whether so few wait that nobody is refused."""
        return len(self._waiting) < WAITING_MIN

    def client_seconds(self, client: Hashable) -> float:
        """Booked, of a client's requests that wait."""
        return self._clients[client][1] if client in self._clients else 0.0

    def pace(self, worker_id: str) -> float | None:
        """Booked seconds that start at a worker in a second; None while that has not been measured."""
        pace = self._paces.get(worker_id)
        if pace is None or pace.backlog_seconds < MEASURED_SECONDS or pace.started_seconds <= 0.0:
            return None
        return pace.started_seconds / pace.backlog_seconds

    def waiting_seconds(self, worker_id: str) -> float:
        """Booked, of the requests that wait at a worker."""
        pace = self._paces.get(worker_id)
        return 0.0 if pace is None else pace.waiting_seconds

    def wait_seconds(self, worker_id: str, now: float) -> float:
        """How long one more request would wait at a worker."""
        pace = self._paces.get(worker_id)
        if pace is None:
            return 0.0
        pace.advance(now)
        return pace.wait_seconds()

    def verdict(
        self, workers: Iterable[str], client: Hashable, bound_seconds: float, now: float, own_seconds: float = math.inf
    ) -> Verdict:
        """Whether a new request may wait at one of the workers that take requests: `bound_seconds`, longer in a burst,
        and never longer than `own_seconds`. O(workers) where `WAITING_MIN` requests wait, else O(1)."""
        if self.is_calm:
            return ADMITTED
        verdict = self._verdict(workers, client, bound_seconds, now, own_seconds)
        if verdict.refuse_seconds is not None:
            self._arrivals.add(None, now)
        return verdict

    def _verdict(
        self, workers: Iterable[str], client: Hashable, bound_seconds: float, now: float, own_seconds: float
    ) -> Verdict:
        waits = {worker_id: self.wait_seconds(worker_id, now) for worker_id in workers}
        shortest = min(waits.values(), default=0.0)
        if shortest <= SPILL_SHARE * bound_seconds:
            self._full_since = None
        elif shortest > bound_seconds and self._full_since is None:
            self._full_since = now
        longest = min(self.patience_seconds(bound_seconds, now), own_seconds)
        bound = min(bound_seconds, own_seconds)
        over = frozenset(worker_id for worker_id, seconds in waits.items() if seconds > bound)
        if not over:
            return ADMITTED
        if shortest > longest:
            if shortest <= FAIR_EXCESS * longest and self._is_below_its_part(client, shortest / longest):
                return ADMITTED
            return Verdict(refuse_seconds=shortest)
        if shortest <= SPILL_SHARE * bound or (shortest <= bound and self._is_below_its_part(client, 1.0)):
            return Verdict(over=over, avoid=True)
        over = frozenset(worker_id for worker_id in over if waits[worker_id] > longest)
        return Verdict(over=over) if over else ADMITTED

    def patience_seconds(self, bound_seconds: float, now: float) -> float:
        """How long requests may wait now: the bound, or longer in a burst."""
        lasting = self._full_since is not None and now - self._full_since > BURST_SECONDS
        return bound_seconds if lasting or self._is_rush(now) else self._burst_factor * bound_seconds

    def _is_rush(self, now: float) -> bool:
        """Whether much more comes than workers start. O(workers that were busy lately)."""
        if now - self._arrivals.first_at < COLD_SECONDS:
            return False
        started = sum(self.pace(worker_id) or 0.0 for worker_id in self._paces)
        return self._arrivals.exceed(started, now)

    def _is_below_its_part(self, client: Hashable, fill: float) -> bool:
        """Whether a client's requests wait for less than an equal part of what may wait; `fill` times as much does."""
        others = len(self._clients) - (client in self._clients)
        total = sum(seconds for _, seconds in self._clients.values())
        mine = self._clients[client][1] if client in self._clients else 0.0
        return others > 0 and mine < total / fill / (others + 1)

    def check(self) -> None:
        """Assert that the sums are those of the requests that wait."""
        for worker_id, pace in self._paces.items():
            there = [one.seconds for one in self._waiting.values() if one.worker_id == worker_id]
            assert pace.requests == len(there), f"{len(there)} requests wait at {worker_id}, not {pace.requests}"
            assert math.isclose(pace.waiting_seconds, sum(there), abs_tol=1e-6), f"seconds at {worker_id} are off"
        total = math.fsum(one.seconds for one in self._waiting.values())
        assert math.isclose(total, self.total_seconds, abs_tol=1e-6), "seconds of all are off"
        for client, (requests, seconds) in self._clients.items():
            mine = [one.seconds for one in self._waiting.values() if one.client == client]
            assert requests == len(mine) and math.isclose(seconds, sum(mine), abs_tol=1e-6), "a client's sums are off"
        assert {one.client for one in self._waiting.values()} == self._clients.keys(), "clients are those that wait"
