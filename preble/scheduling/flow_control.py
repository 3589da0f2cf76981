"""Requests wait here, in front of the workers, once those have enough to do: by tenants' shares, by deadlines, batch
work last. Owns who waits, who is next and who is refused; places nothing, opens no socket, has no clock of its own.

An engine serves what it has in its own order, so what is sent there early is out of reach, and what waits there moves
the places that are chosen for others. So what a tenant wants beyond its share, and batch work, waits here while workers
have work for `spare_seconds` ahead (of requests without a first token, by what the scheduler books). The rest goes on
at once, for the queues of workers know best which prefixes they have:

    offered -> interactive, within its tenant's share -> placed
               interactive, beyond it, by tenant      -> placed where little waits
               batch, by tenant                       -> placed where little waits, after those

  1. Of the tenants that wait the one with the least service over its weight is next (`batching/fair_shares`); service
     is in seconds of worker time, as booked, and corrected as requests end.
  2. Of a tenant's requests that have a deadline the one with the least slack: the time until its first token is of no
     use, less its own work. One without counts as having `PATIENCE_SECONDS`, and as much again for each second of its
     work: of a flood what is cached goes first, as it costs nobody much, and what is not goes by its age.
  3. Batch work goes when nobody interactive can; a request of it that has waited for `PATIENCE_SECONDS` has every
     eighth turn, so that it does not starve.
  4. The scheduler chooses the worker. A request whose worker has no room waits for it, for as long as computing it
     anew would take, and those behind it may go to others; after that it goes where there is room.
  5. A request that would come too late is refused at once; one that waits and cannot make its deadline any more is
     refused when its turn comes, so that nothing is computed in vain. While nobody waits nobody is refused.
  6. A tenant wants more than its share if for more of its work nobody has a first token yet than `burst_seconds`, and
     than `OVER_SHARE` times the mean of the tenants that were here lately; but not while it is served less than their
     mean, or a backlog that it once had would keep it behind the others for good. Where others run at a worker it holds
     at most half as many places as they do (`PLACES_SHARE`), or its equal part where that is more, and `PLACES_MIN` in
     any case: every request that decodes lengthens the iterations in which the others are prefilled. What goes of it
     goes as batch work (`HeldRequest.yields`): workers of ours let others pass, and there it holds more
     (`YIELDING_SHARE`).

What a request would wait is the work that goes before it by these rules over the pace of the workers, as measured
(`predicted_wait`).

At the bound of requests that wait, the newest of the tenant with the most of them is refused. Belongs to one loop.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ..batching.fair_shares import TENANTS_MAX, FairShares
from ..errors import CapacityExceeded, InvalidConfig, Overloaded, QueueFull
from ..types import BATCH, check_int, check_seconds
from .charges import Charge
from .predicted_wait import PredictedWait

PATIENCE_SECONDS = 30.0
OVERDUE_EVERY = 8
LOOK_AHEAD = 16  # requests that are looked at for one that can go
PLACES_SHARE, PLACES_MIN = 0.5, 4  # that a flood holds beside others' requests
YIELDING_SHARE = 1.0  # where workers let others pass it
WORK_PATIENCE = 30.0  # seconds that a request stands further behind for each second of its work
KEPT_SHARE = 0.98  # of what is known of requests placed before, with each one placed
RECENT_SECONDS = 10.0
OVER_SHARE = 1.5  # times the mean: more is a flood
FADE_RENEW = 50.0  # times `RECENT_SECONDS`, after which sums are brought up to date


@dataclass(frozen=True, slots=True)
class FlowConfig:
    """How requests wait in front of workers. Raises `InvalidConfig` naming the field.

    `spare_seconds`: work that a worker is given ahead of batch work, and of tenants that want more than their share;
    `hold_seconds`: of any (None: no bound). `weights`: of tenants' shares, 1 where none is named.
    `burst_seconds`: of service, that a tenant which asked for less than its share may go ahead by. `waiting_max` bounds
    the requests that wait, `tenants_max` the tenants whose service is remembered while they do not.
    """

    hold_seconds: float | None = None
    spare_seconds: float = 0.15
    weights: Mapping[str, float] = field(default_factory=dict, hash=False)
    burst_seconds: float = 0.5
    waiting_max: int = 65_536
    tenants_max: int = TENANTS_MAX

    def __post_init__(self) -> None:
        if self.hold_seconds is not None:
            check_seconds("FlowConfig.hold_seconds", self.hold_seconds)
        check_seconds("FlowConfig.spare_seconds", self.spare_seconds)
        check_seconds("FlowConfig.burst_seconds", self.burst_seconds)
        if self.hold_seconds == 0.0:
            raise InvalidConfig("FlowConfig.hold_seconds must be positive, got 0")
        checked_weights("FlowConfig.weights", self.weights)
        check_int("FlowConfig.waiting_max", self.waiting_max, 1, 10_000_000)
        check_int("FlowConfig.tenants_max", self.tenants_max, 1, 10_000_000)


@dataclass(slots=True, eq=False)
class HeldRequest:
    """A request that may wait here. `seconds`: of work, as estimated; `limit_seconds`: it is of no use to let it wait
    longer; `has_deadline`: and its client said so, then it may be refused later on, too. `owner`: whose it is.
    `yields`: its worker should take it as batch work, for it is that or its tenant wants more than its share; said
    before each try."""

    tenant: str
    seconds: float
    limit_seconds: float
    has_deadline: bool
    is_batch: bool
    arrived: float
    owner: Any
    patience_seconds: float = 0.0
    number: int = -1
    due: float = math.inf
    blocked_on: str = ""
    blocked_since: float = math.inf
    waits: bool = False
    yields: bool = False

    @property
    def rank(self) -> tuple[float, int]:
        """The order among requests of a tenant: those with a deadline by slack, others by age and work."""
        if self.has_deadline:
            return min(self.due, self.arrived + PATIENCE_SECONDS) - self.seconds, self.number
        return self.arrived + PATIENCE_SECONDS + WORK_PATIENCE * self.seconds, self.number


_NO_WORKERS: frozenset[str] = frozenset()


class Turn(NamedTuple):
    """What became of a try: the worker that the scheduler chose, and the seconds booked there; 0 and not `placed` where
    it has no room."""

    worker: str
    seconds: float
    placed: bool


class FlowOwner(Protocol):
    """What is asked of whoever places requests."""

    def workers(self) -> Collection[str]:
        """Those that take requests."""

    def workers_yield(self) -> bool:
        """Whether all of them let others pass what they are given as batch work, also once it runs."""

    def try_turn(self, held: HeldRequest, closed: frozenset[str], anywhere: bool) -> Turn | None:
        """Place a request; where the scheduler chooses one of `closed`, leave it, or `anywhere`, choose among the
        others. None: it has ended otherwise."""

    def refuse(self, held: HeldRequest, error: CapacityExceeded) -> None:
        """A request that waited is refused."""


class _HeldLine:
    """The requests of one tenant and class, by rank."""

    __slots__ = ("entries", "seconds")

    def __init__(self) -> None:
        self.entries: list[tuple[tuple[float, int], HeldRequest]] = []
        self.seconds = 0.0

    def add(self, held: HeldRequest) -> None:
        insort(self.entries, (held.rank, held), key=_rank)
        self.seconds += held.seconds

    def remove(self, held: HeldRequest) -> None:
        del self.entries[bisect_left(self.entries, held.rank, key=_rank)]
        self.seconds = self.seconds - held.seconds if self.entries else 0.0

    def ahead_seconds(self, held: HeldRequest) -> float:
        """Of the work of those before it."""
        if not self.entries or self.entries[-1][0] < held.rank:
            return self.seconds
        place = bisect_left(self.entries, held.rank, key=_rank)
        return math.fsum(other.seconds for _, other in self.entries[:place])


def _rank(entry: Any) -> Any:
    return entry[0] if isinstance(entry[1], HeldRequest) else entry


class _HeldClass:
    """All lines of a class, and the shares of their tenants."""

    def __init__(self, config: FlowConfig) -> None:
        self.lines: dict[str, _HeldLine] = {}
        self.shares = FairShares(burst_seconds=config.burst_seconds, tenants_max=config.tenants_max)
        self.count = 0
        self.seconds = 0.0  # of work

    def add(self, held: HeldRequest) -> None:
        line = self.lines.get(held.tenant)
        if line is None:
            line = self.lines[held.tenant] = _HeldLine()
            self.shares.join(held.tenant)
        line.add(held)
        held.waits = True
        self.count += 1
        self.seconds += held.seconds

    def remove(self, held: HeldRequest) -> None:
        line = self.lines[held.tenant]
        line.remove(held)
        held.waits = False
        self.count -= 1
        self.seconds = self.seconds - held.seconds if self.count else 0.0
        if not line.entries:
            del self.lines[held.tenant]
            self.shares.leave(held.tenant)

    def candidates(self) -> Iterator[HeldRequest]:
        """In the order in which they may go. Not to be changed meanwhile."""
        for _, tenant in self.shares.lowest():
            for _, held in self.lines[tenant].entries:
                yield held


class _FloodPlaces:
    """How many requests of each tenant run at each worker, of those that were placed here."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, int]] = {}
        self._all: dict[str, int] = {}

    def take(self, tenant: str, worker: str) -> None:
        """A request runs there from now on."""
        own = self._of.setdefault(tenant, {})
        own[worker] = own.get(worker, 0) + 1
        self._all[worker] = self._all.get(worker, 0) + 1

    def leave(self, tenant: str, worker: str) -> None:
        """One of them has ended."""
        own = self._of[tenant]
        for counts, key in ((own, worker), (self._all, worker)):
            counts[key] -= 1
            if not counts[key]:
                del counts[key]
        if not own:
            del self._of[tenant]

    def full(self, tenant: str, workers: Collection[str], share: float) -> frozenset[str]:
        """The workers at which a flood holds `share` of what the others hold there, or more. O(workers)."""
        own = self._of.get(tenant, {})
        return frozenset(name for name in workers if self._is_full(own.get(name, 0), self._all.get(name, 0), share))

    @staticmethod
    def _is_full(own: int, together: int, share: float) -> bool:
        others = together - own
        return others > 0 and own >= max(PLACES_MIN, share * others)

    def check(self) -> None:
        """Assert that the sums are those of the tenants."""
        for worker, count in self._all.items():
            assert count == sum(own.get(worker, 0) for own in self._of.values()), f"places at {worker} are off"


class _RecentService:
    """Seconds over weight that each tenant was served lately, fading over `RECENT_SECONDS`, and the sum of all. Holds
    those that it is given until `forget`. All calls are O(1)."""

    def __init__(self) -> None:
        self._of: dict[str, float] = {}  # as if served at `_since`
        self._total = 0.0
        self._since = 0.0

    def add(self, tenant: str, seconds: float, now: float) -> None:
        """It is served so many seconds, over its weight."""
        grown = self._grown(now)
        self._of[tenant] = self._of.get(tenant, 0.0) + seconds * grown
        self._total += seconds * grown

    def forget(self, tenant: str) -> None:
        """It has not been here lately."""
        self._total -= self._of.pop(tenant, 0.0)
        if not self._of:
            self._total = 0.0

    def is_below(self, tenant: str, tenants: int) -> bool:
        """Whether it was served less than the mean of so many."""
        return self._of.get(tenant, 0.0) * tenants < self._total

    def check(self, recent: Collection[str]) -> None:
        """Assert that the sum is that of these tenants."""
        assert self._of.keys() <= set(recent), "service is kept of a tenant that was not here lately"
        assert math.isclose(self._total, math.fsum(self._of.values()), rel_tol=1e-6, abs_tol=1e-6), "the sum is off"

    def _grown(self, now: float) -> float:
        """What a second is worth now beside those since `_since`: all fade alike, so the new grow instead."""
        if now - self._since > FADE_RENEW * RECENT_SECONDS:
            kept = math.exp((self._since - now) / RECENT_SECONDS)
            self._of = {tenant: seconds * kept for tenant, seconds in self._of.items()}
            self._total *= kept
            self._since = now
        return math.exp((now - self._since) / RECENT_SECONDS)


class FlowControl:
    """See the module."""

    def __init__(self, config: FlowConfig, waits: PredictedWait, owner: FlowOwner) -> None:
        self.config = config
        self.refused = 0
        self._waits = waits
        self._owner = owner
        self._classes = {False: _HeldClass(config), True: _HeldClass(config)}  # by is_batch
        self._numbers = 0
        self._turns = 0
        self._places = _FloodPlaces()
        self._recent: OrderedDict[str, float] = OrderedDict()  # tenants, and when they were here last
        self._served = _RecentService()  # of those
        self._estimated_seconds = self._booked_seconds = 0.0  # of those placed lately

    def __len__(self) -> int:
        """Requests that wait."""
        return self._classes[False].count + self._classes[True].count

    # --- requests -----------------------------------------------------------------------------------------------------

    def offer(self, held: HeldRequest, now: float) -> None:
        """Place a request, or let it wait. Raises `Overloaded` or `QueueFull` where it is refused at once."""
        held.number = self._numbers
        self._numbers += 1
        held.due = held.arrived + held.limit_seconds
        held.yields = held.is_batch
        own = self._classes[held.is_batch]
        if not held.is_batch:
            self._note_tenant(held.tenant, now)
        if len(self) >= self.config.waiting_max:
            self._make_room(held)
        if self._must_wait(held):
            self._check_wait(held, now)
        own.add(held)
        self.pump(now)

    def withdraw(self, held: HeldRequest) -> None:
        """A request that waits does so no more: its client has gone, or it goes without a turn. Of others,
        nothing."""
        if held.waits:
            self._classes[held.is_batch].remove(held)

    def held(self) -> Iterator[HeldRequest]:
        """All that wait, interactive ones first. Not to be changed meanwhile."""
        for one in self._classes.values():
            yield from one.candidates()

    def ended(self, charge: Charge, more_seconds: float) -> None:
        """A request that was placed has ended, and took so many seconds more than was booked, or less."""
        claim = charge.claim
        self._places.leave(claim.tenant, charge.worker)
        self._classes[claim.priority == BATCH].shares.correct(claim.tenant, more_seconds / self._weight(claim.tenant))

    def pump(self, now: float) -> None:
        """Place what can go. To be called whenever a worker may have room again."""
        while len(self) and self._place_one(now):
            pass

    def _weight(self, tenant: str) -> float:
        return self.config.weights.get(tenant, 1.0)

    def _place_one(self, now: float) -> bool:
        """Place or refuse somebody; False if nobody can go."""
        batch, interactive = self._classes[True], self._classes[False]
        closed = self._closed(self.config.hold_seconds)
        if closed is None:
            return False
        spare = self._closed(self.config.spare_seconds)
        overdue = self._overdue(now)
        if overdue is not None and self._try(overdue, closed, now):
            self._turns = 0
            return True
        if interactive.count and self._try_class(interactive, closed, spare, now):
            self._turns += 1
            return True
        if batch.count and spare is not None and self._try_class(batch, spare, spare, now):
            self._turns = 0
            return True
        return False

    def _is_over(self, tenant: str) -> bool:
        """Whether a tenant wants more than its share: whether for more of its work nobody has a first token yet than
        `burst_seconds`, and than half as much again as the mean of those that were here lately, over its weight; and
        whether it was served as much as their mean."""
        mine = self._backlog_seconds(tenant)
        if mine <= self.config.burst_seconds:
            return False
        if tenant in self._recent and self._served.is_below(tenant, len(self._recent)):
            return False
        total = self._waits.total_seconds + self._classes[False].seconds
        return mine * max(1, len(self._recent)) > OVER_SHARE * total

    def _backlog_seconds(self, tenant: str) -> float:
        line = self._classes[False].lines.get(tenant)
        here = 0.0 if line is None else line.seconds
        return (here + self._waits.client_seconds(tenant)) / self._weight(tenant)

    def _note_tenant(self, tenant: str, now: float) -> None:
        self._recent[tenant] = now
        self._recent.move_to_end(tenant)
        while len(self._recent) > self.config.tenants_max or now - next(iter(self._recent.values())) > RECENT_SECONDS:
            self._served.forget(self._recent.popitem(last=False)[0])

    def _overdue(self, now: float) -> HeldRequest | None:
        """A batch request whose turn it is by its age."""
        batch = self._classes[True]
        if not batch.count or self._turns < OVERDUE_EVERY - 1:
            return None
        first = next(batch.candidates())
        return first if now - first.arrived > PATIENCE_SECONDS else None

    def _try_class(self, one: _HeldClass, closed: frozenset[str], spare: frozenset[str] | None, now: float) -> bool:
        looked = 0
        for _, tenant in one.shares.lowest():
            is_over = self._is_over(tenant)
            room = self._room_of(tenant, spare) if is_over else closed
            if room is None:
                continue
            for _, held in one.lines[tenant].entries:
                held.yields = is_over or held.is_batch
                if self._try(held, room, now):
                    return True
                looked += 1
                if looked >= LOOK_AHEAD:
                    return False
        return False

    def _room_of(self, tenant: str, spare: frozenset[str] | None) -> frozenset[str] | None:
        """The workers without room for a tenant that wants more than its share; None if there are some and that is
        all."""
        if spare is None:
            return None
        workers = self._owner.workers()
        share = YIELDING_SHARE if self._owner.workers_yield() else PLACES_SHARE
        share = max(share, self._weight(tenant) / max(len(self._recent) - 1, 1))  # its due is never less
        full = spare | self._places.full(tenant, workers, share)
        return None if workers and len(full) == len(workers) else full

    def _try(self, held: HeldRequest, closed: frozenset[str], now: float) -> bool:
        """Whether a request does not wait any more."""
        own = self._classes[held.is_batch]
        if held.has_deadline and now > held.arrived and now + self._own_seconds(held) > held.due:
            self._refuse(held, self._overloaded(held, now - held.arrived))
            return True
        anywhere = now - held.blocked_since >= held.patience_seconds
        if not anywhere and held.blocked_on in closed:
            return False
        turn = self._owner.try_turn(held, closed, anywhere)
        if turn is None:
            own.remove(held)
            return True
        if not turn.placed:
            held.blocked_on = turn.worker
            held.blocked_since = min(held.blocked_since, now)
            return False
        own.shares.charge(held.tenant, turn.seconds / self._weight(held.tenant))
        if not held.is_batch and held.tenant in self._recent:
            self._served.add(held.tenant, turn.seconds / self._weight(held.tenant), now)
        self._places.take(held.tenant, turn.worker)
        self._estimated_seconds = KEPT_SHARE * self._estimated_seconds + held.seconds
        self._booked_seconds = KEPT_SHARE * self._booked_seconds + turn.seconds
        own.remove(held)
        return True

    def _closed(self, hold_seconds: float | None) -> frozenset[str] | None:
        """The workers without room; None if there are some and that is all. Where there is none, who places what waits
        ends it."""
        if hold_seconds is None:
            return _NO_WORKERS
        workers = self._owner.workers()
        closed = frozenset(name for name in workers if self._waits.waiting_seconds(name) > hold_seconds)
        return None if workers and len(closed) == len(workers) else closed

    # --- refusing -----------------------------------------------------------------------------------------------------

    def _must_wait(self, held: HeldRequest) -> bool:
        """Whether somebody of its tenant and class does, or no worker has room for anybody."""
        return held.tenant in self._classes[held.is_batch].lines or self._closed(self.config.hold_seconds) is None

    def _check_wait(self, held: HeldRequest, now: float) -> None:
        """Raise `Overloaded` for one that would come too late."""
        if held.limit_seconds < math.inf and self._pace() is not None:
            wait = self.wait_seconds(held)
            if now + wait > held.due:
                self.refused += 1
                raise self._overloaded(held, wait)

    def _refuse(self, held: HeldRequest, error: CapacityExceeded) -> None:
        self.refused += 1
        self._classes[held.is_batch].remove(held)
        self._owner.refuse(held, error)

    def _overloaded(self, held: HeldRequest, wait: float) -> Overloaded:
        text = f"the first token would take {wait:.1f} s, it is of use for {held.limit_seconds:.3g} s"
        return Overloaded(text, retry_after_seconds=max(wait, 1e-3))

    def _make_room(self, held: HeldRequest) -> None:
        """At the bound. Raises `QueueFull` for the newcomer, or refuses the newest of the tenant with the most."""
        lines = [line for one in self._classes.values() for line in one.lines.values()]
        longest = max(lines, key=lambda line: len(line.entries))
        own = self._classes[held.is_batch].lines.get(held.tenant)
        error = QueueFull(f"{len(self)} requests wait before the workers, the bound of this router")
        if len(longest.entries) <= 1 + (0 if own is None else len(own.entries)):
            self.refused += 1
            raise error
        self._refuse(max((entry[1] for entry in longest.entries), key=lambda one: one.number), error)

    # --- time ---------------------------------------------------------------------------------------------------------

    def wait_seconds(self, held: HeldRequest) -> float:
        """How long a request would wait for its first token if it came now, its own work included; 0.0 while no pace is
        known."""
        pace = self._pace()
        if pace is None:
            return 0.0
        one = self._classes[held.is_batch]
        line = one.lines.get(held.tenant)
        mine = held.seconds + (0.0 if line is None else line.ahead_seconds(held))
        weight = self._weight(held.tenant)
        ahead = mine - held.seconds  # as estimated, which is without outputs
        for tenant, other in one.lines.items():
            if tenant != held.tenant:
                ahead += min(other.seconds, mine * self._weight(tenant) / weight)
        if held.is_batch:
            ahead += self._classes[False].seconds
        return (ahead * self._scale() + self._waits.total_seconds) / pace + self._own_seconds(held)

    def _scale(self) -> float:
        """Seconds that are booked for one that was estimated."""
        return self._booked_seconds / self._estimated_seconds if self._estimated_seconds > 0.0 else 1.0

    def _own_seconds(self, held: HeldRequest) -> float:
        """How long a request's own work keeps its first token waiting, beside what its worker does meanwhile; 0.0 while
        no pace is known."""
        pace = self._pace()
        return 0.0 if pace is None else held.seconds * self._scale() * max(1, len(self._owner.workers())) / pace

    def _pace(self) -> float | None:
        """Seconds of work that the fleet begins in a second; None while none of its workers has been measured."""
        workers = self._owner.workers()
        known = [pace for name in workers if (pace := self._waits.pace(name)) is not None]
        return math.fsum(known) / len(known) * len(workers) if known else None

    # --- checks -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that lines, sums and shares agree. O(requests that wait + places taken)."""
        self._places.check()
        self._served.check(self._recent)
        for is_batch, one in self._classes.items():
            one.shares.check()
            tenants = {tenant for _, tenant in one.shares.lowest()}
            assert set(one.lines) == tenants, "shares and lines list different tenants"
            assert one.count == sum(len(line.entries) for line in one.lines.values()), "the count is off"
            seconds = math.fsum(line.seconds for line in one.lines.values())
            assert math.isclose(seconds, one.seconds, abs_tol=1e-6), "seconds of a class are off"
            for tenant, line in one.lines.items():
                assert line.entries, "an empty line is kept"
                assert line.entries == sorted(line.entries, key=_rank), "a line is out of order"
                assert all(held.tenant == tenant and held.is_batch == is_batch for _, held in line.entries)
                total = math.fsum(held.seconds for _, held in line.entries)
                assert math.isclose(total, line.seconds, abs_tol=1e-6), "seconds of a line are off"


def checked_weights(name: str, weights: Mapping[str, float]) -> dict[str, float]:
    """A copy. Raises `InvalidConfig` for a weight that is no positive finite number."""
    if not isinstance(weights, Mapping):
        raise InvalidConfig(f"{name} must be a dict of numbers by tenant, got {weights!r}")
    for tenant, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0.0 < weight < math.inf:
            raise InvalidConfig(f"{name}[{tenant!r}] must be a positive number, got {weight!r}")
    return dict(weights)
