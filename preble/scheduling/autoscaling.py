"""How many workers a fleet should have: what one more would save, which one less would cost least. Owns the estimate
and the samples that it rests on; it starts and stops nobody. docs/experiments/fleet.md has the figures.

With n workers the time to first token is the prompt's own prefill and the wait for prefills that came before it:

    own(n)  = S / (1 - d)       S: mean seconds of missed prefill a request
    step    = mean seconds until the iteration under way ends, which no number of workers changes
    wait(n) = T/4 ((u - 1) + sqrt((u - 1)^2 + 8 k p own(n) / T))
              p, d: shares of a worker's time that prefills and decodes ask for, u = p + d; T: the window; k: see below

A decode is counted at what it costs in a full batch, its own tokens and context, which is less than what the scheduler
books for it: reading the weights once for every iteration is shared by the more requests the busier a worker is, so
that booked loads of 1 and 2 are usual and no sign of a queue.

The last line is the time-dependent queue of traffic engineering (Kimber and Hollis 1979; Akcelik 1980). For u < 1 and
a long T it is k p own / (1 - u), Pollaczek and Khinchine's wait of an M/G/1 queue with k = (1 + c^2) / 2 whose
server is slowed by decodes; for u > 1 it is T (u - 1) / 2, the mean wait while a backlog grows for T seconds. So it is
finite and falls with n everywhere.

k is not assumed but read off the load tracker: requests that wait for their first token are counted once a second,
their mean number divided by arrivals a second is the mean time to first token (Little 1961: true of any system), and k
is such that the formula gives it for the workers that are there. Only the step to n + 1 and n - 1 is a model's.

Assumed: load spreads evenly over workers, whatever their number; the hit rate stays (a worker more adds cache, and is
cold at first); arrivals go on as in the window; all workers are alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from heapq import nsmallest

from .._placement.prefix_handoff import hot_prefixes, joined_at, open_workers
from .._snapshot.accounts import cost_at
from ..errors import InvalidInput, UnknownWorker
from ..lazy_typing import TYPE_CHECKING, Any, dataclass

if TYPE_CHECKING:
    from .._cost import CostModel
    from .._placement.bookings import DecisionCore

TARGET_UTILISATION = 0.7  # where `desired_workers` is given no other; at 0.7 a queue's wait is a third of that at 0.9
WORKERS_MAX = 65_536
VARIABILITY_MIN, VARIABILITY_MAX = 0.05, 8.0  # of k; what is beyond is noise, or a backlog from before the window
DECODE_SHARE_MAX = 0.95  # a prefill is slowed by decodes at most twentyfold: engines leave it some of each batch
SAMPLE_SECONDS = 1.0  # between two looks at who waits
SLICE = 64  # workers in one hold of the lock
BATCH_MIN, BATCH_MAX = 8, 64  # the usual batch, as the load tracker reckons it
FULL_BATCHES = (4096, 8192)  # requests; between these a token costs what it costs where weights are read anyway
CANDIDATES = 16  # workers looked at in turn for what their drain would cost, the least loaded
DEPARTED_MAX = 64  # workers whose work is still to be expected elsewhere; of more the oldest are forgotten


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """What a fleet is asked to do. Loads are seconds of worker time that arrive in a second.

    `decode_load` is that of full batches. `workers` take any request. `step_seconds`: until an iteration under way
    ends. `waiting_requests`: without a first token, mean over the window; `waiting_seconds`: of prefill booked for
    those that wait now. `observed_seconds`: how far back all this goes, at most the window. Of several routers before
    the same attached servers, add the loads up (`+`): each knows of its own requests only.
    """

    workers: int
    requests_per_second: float = 0.0
    prefill_load: float = 0.0
    decode_load: float = 0.0
    step_seconds: float = 0.0
    waiting_requests: float = 0.0
    waiting_seconds: float = 0.0
    observed_seconds: float = 0.0
    window_seconds: float = 180.0

    @classmethod
    def from_stats(cls, scaling: Mapping[str, Any]) -> FleetLoad:
        """The load in `stats()["scaling"]`."""
        return cls(**{name: scaling[name] for name in cls.__slots__})

    def __add__(self, other: FleetLoad) -> FleetLoad:
        """Two routers' requests on the workers of both, where neither learns of the other's."""
        return FleetLoad(
            workers=max(self.workers, other.workers),
            requests_per_second=self.requests_per_second + other.requests_per_second,
            prefill_load=self.prefill_load + other.prefill_load,
            decode_load=self.decode_load + other.decode_load,
            step_seconds=max(self.step_seconds, other.step_seconds),
            waiting_requests=self.waiting_requests + other.waiting_requests,
            waiting_seconds=self.waiting_seconds + other.waiting_seconds,
            observed_seconds=min(self.observed_seconds, other.observed_seconds),
            window_seconds=max(self.window_seconds, other.window_seconds),
        )


# --- the model --------------------------------------------------------------------------------------------------------


def utilisation(load: FleetLoad, workers: int) -> float:
    """Share of each worker's time that is asked for, with so many; above 1 a backlog grows."""
    return (load.prefill_load + load.decode_load) / workers


def own_seconds(load: FleetLoad, workers: int) -> float:
    """A request's own prefill, slowed by the decodes beside it; 0 where nothing arrives."""
    if load.requests_per_second <= 0.0:
        return 0.0
    decode_share = min(load.decode_load / workers, DECODE_SHARE_MAX)
    return load.prefill_load / load.requests_per_second / (1.0 - decode_share)


def wait_seconds(load: FleetLoad, workers: int, variability: float) -> float:
    """Mean wait before a request's own prefill begins, the module's formula."""
    beyond = utilisation(load, workers) - 1.0
    spread = 8.0 * variability * _work(load, workers) / load.window_seconds
    return load.window_seconds / 4.0 * (beyond + math.hypot(beyond, math.sqrt(spread)))


def variability_of(load: FleetLoad) -> float:
    """The k with which the formula gives the wait that the bookings show; 1 where they show no requests."""
    work = _work(load, load.workers) if load.workers else 0.0
    if work <= 0.0:
        return 1.0
    waited = max(0.0, measured_ttft_seconds(load) - own_seconds(load, load.workers) - load.step_seconds)
    slack = 1.0 - utilisation(load, load.workers)
    found = (2.0 * waited * waited / load.window_seconds + waited * slack) / work
    return min(max(found, VARIABILITY_MIN), VARIABILITY_MAX)


def _work(load: FleetLoad, workers: int) -> float:
    """p own(n): what a request that arrives finds of prefills under way."""
    return load.prefill_load / workers * own_seconds(load, workers)


def measured_ttft_seconds(load: FleetLoad) -> float:
    """Mean time from booking to first token by Little's law; 0 where nothing arrives."""
    return load.waiting_requests / load.requests_per_second if load.requests_per_second > 0.0 else 0.0


def ttft_seconds(load: FleetLoad, workers: int, variability: float) -> float:
    """Mean time to first token to expect with so many workers."""
    if load.requests_per_second <= 0.0:
        return 0.0
    return own_seconds(load, workers) + load.step_seconds + wait_seconds(load, workers, variability)


def desired_workers(
    load: FleetLoad, *, target_utilisation: float = TARGET_UTILISATION, target_ttft_seconds: float = math.inf
) -> int:
    """The fewest workers, at least 1, with which neither target is missed; 65,536 where no number would do. Raises
    `InvalidInput`. O(log)."""
    if not 0.0 < target_utilisation <= 1.0:
        raise InvalidInput(f"target_utilisation must be in (0, 1], got {target_utilisation!r}")
    if not target_ttft_seconds > 0.0:
        raise InvalidInput(f"target_ttft_seconds must be positive, got {target_ttft_seconds!r}")
    variability = variability_of(load)

    def enough(workers: int) -> bool:
        busy = utilisation(load, workers) <= target_utilisation
        return busy and ttft_seconds(load, workers, variability) <= target_ttft_seconds

    low, high = 1, WORKERS_MAX
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low


# --- the advice -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drain:
    """What it costs to drain a worker: `recompute_seconds`, to compute once elsewhere what only this one caches and was
    asked for more than once within the window. `moved_load`: share of its time that is work others must then take.
    `seen_at`: when it was looked at, by the scheduler's clock."""

    worker: str
    recompute_seconds: float
    moved_load: float
    seen_at: float


@dataclass(frozen=True, slots=True)
class Advice:
    """What a worker more or less would do to the mean time to first token. `ttft_seconds` is the bookings' own; the
    others are estimates. None: there is no worker to take away."""

    load: FleetLoad
    utilisation: float
    variability: float
    ttft_seconds: float
    ttft_with_one_more_seconds: float
    one_more_saves_seconds: float
    ttft_with_one_less_seconds: float | None
    one_less_costs_seconds: float | None
    desired_workers: int
    cheapest_drain: Drain | None

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        from dataclasses import asdict

        flat = asdict(self)
        return {**flat.pop("load"), **flat}


def advise(load: FleetLoad, drains: Mapping[str, Drain] | None = None) -> Advice:
    """The advice for a load; `drains` are those of workers that may go, by name."""
    known, now = variability_of(load), max(load.workers, 1)
    here, more = ttft_seconds(load, now, known), ttft_seconds(load, now + 1, known)
    less = ttft_seconds(load, now - 1, known) if now > 1 else None
    candidates = drains.values() if drains and load.workers > 1 else ()
    return Advice(
        load=load,
        utilisation=utilisation(load, now),
        variability=known,
        ttft_seconds=measured_ttft_seconds(load),
        ttft_with_one_more_seconds=more,
        one_more_saves_seconds=here - more,
        ttft_with_one_less_seconds=less,
        one_less_costs_seconds=None if less is None else less - here,
        desired_workers=desired_workers(load),
        cheapest_drain=min(
            candidates, key=lambda one: (one.recompute_seconds, one.moved_load, one.worker), default=None
        ),
    )


# --- what is read off the load tracker --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Rates:
    """One worker's share of the load, a second."""

    requests: float
    prefill_load: float
    decode_load: float
    step_seconds: float


def _rates_of(account: Mapping[str, float], observed_seconds: float, cost: CostModel, batch: float) -> _Rates:
    """A worker's load. The load tracker has decode seconds at the usual batch; the part of them that is for contexts
    stays in a full batch, the rest becomes what a token more costs there."""
    prefill_seconds, tokens = account["window_prefill_seconds"], account["window_output_tokens"]
    booked = account["load_seconds"] - prefill_seconds
    contexts = max(0.0, booked - tokens * cost.decode_time(1, 0, batch) / batch)
    few, many = FULL_BATCHES
    token_seconds = max(0.0, cost.decode_time(1, 0, many) - cost.decode_time(1, 0, few)) / (many - few)
    decode_seconds = min(booked, contexts + tokens * token_seconds)
    # Half an iteration is left in the mean when a request comes, if one runs: as the bookings have it, at the usual
    # batch.
    busy = min(1.0, (prefill_seconds + booked) / observed_seconds)
    step_seconds = busy * cost.decode_time(1, 0, batch) / 2.0
    return _Rates(
        account["window_requests"] / observed_seconds,
        prefill_seconds / observed_seconds,
        decode_seconds / observed_seconds,
        step_seconds,
    )


class LoadSampler:
    """Samples of one scheduler's load. `tick` takes the writers' lock for each slice by itself; `advice` is asked
    under it, and rests on the last sample."""

    def __init__(self, core: DecisionCore, window_seconds: float, join_seconds: float) -> None:
        self._core = core
        self._window_seconds = window_seconds
        self._join_seconds = join_seconds
        self._next_sample = float("-inf")
        self._sampled_at = 0.0
        self._waiting_sum = self._weight = 0.0  # of samples, each with a weight that fades as the window passes
        self._rates: dict[str, _Rates] = {}
        self._departed: deque[tuple[float, _Rates]] = deque(maxlen=DEPARTED_MAX)
        self._load = FleetLoad(0, window_seconds=window_seconds)
        self._drains: dict[str, Drain] = {}
        self._turn: deque[tuple[str, int]] = deque()  # who is looked at next

    def advice(self) -> dict[str, Any]:
        """The advice as plain values; as `drain_seconds` what each drain would cost that was looked at; as
        `worker_loads` how much of each worker's time is asked for."""
        costs = {name: drain.recompute_seconds for name, drain in self._drains.items()}
        loads = {name: rates.prefill_load + rates.decode_load for name, rates in self._rates.items()}
        return {**advise(self._load, self._drains).as_dict(), "drain_seconds": costs, "worker_loads": loads}

    def tick(self, now: float) -> None:
        """Look at who waits, and at one worker's cache; once a second."""
        if now < self._next_sample <= now + SAMPLE_SECONDS:  # later: a clock has jumped back
            return
        self._next_sample = now + SAMPLE_SECONDS
        accounts: dict[str, tuple[dict[str, float], float, CostModel]] = {}
        for start in range(0, len(self._core.names), SLICE):
            with self._core.tree:
                for index, name in enumerate(self._core.names[start : start + SLICE], start):
                    if name is not None:
                        observed = max(now - joined_at(self._core, index), self._join_seconds)
                        observed = min(observed, self._window_seconds)
                        accounts[name] = self._core.loads.account(index), observed, cost_at(self._core, index)
        live = sum(account["live_requests"] for account, _, _ in accounts.values())
        batch = min(max(live / max(len(accounts), 1), BATCH_MIN), BATCH_MAX)
        rates = {name: _rates_of(*found, batch) for name, found in accounts.items()}
        opened = open_workers(self._core, now)
        with self._core.tree:
            self._note([account for account, _, _ in accounts.values()], rates, now)
            since = min((joined_at(self._core, index) for _, index, _, _ in opened), default=now)
            self._load = self._loaded(len(opened), [account for account, _, _ in accounts.values()], now - since)
        self._look_at_one(opened, now)

    def _note(self, accounts: Sequence[Mapping[str, float]], rates: dict[str, _Rates], now: float) -> None:
        """Add a sample. Its weight falls by e in half a window, so that samples are as old, in the mean, as the
        window's requests."""
        passed = max(now - self._sampled_at, 0.0) if self._weight else 0.0
        kept = math.exp(-2.0 * passed / self._window_seconds)
        self._waiting_sum = self._waiting_sum * kept + sum(account["waiting_requests"] for account in accounts)
        self._weight = self._weight * kept + 1.0
        self._sampled_at = now
        while self._departed and not 0.0 <= now - self._departed[0][0] <= self._window_seconds:
            self._departed.popleft()
        self._departed.extend((now, self._rates[name]) for name in sorted(self._rates.keys() - rates.keys()))
        self._rates = rates

    def _loaded(self, workers: int, accounts: Sequence[Mapping[str, float]], observed_seconds: float) -> FleetLoad:
        counted = [*self._rates.values(), *self._expected()]
        return FleetLoad(
            workers=workers,
            requests_per_second=sum(rates.requests for rates in counted),
            prefill_load=sum(rates.prefill_load for rates in counted),
            decode_load=sum(rates.decode_load for rates in counted),
            step_seconds=sum(rates.step_seconds for rates in self._rates.values()) / max(len(self._rates), 1),
            waiting_requests=self._waiting_sum / self._weight,
            waiting_seconds=sum(account["waiting_prefill_seconds"] for account in accounts),
            observed_seconds=min(max(observed_seconds, 0.0), self._window_seconds),
            window_seconds=self._window_seconds,
        )

    def _expected(self) -> list[_Rates]:
        """Work of workers that are gone: their requests come to others, whose windows do not show all of them yet."""
        shares = [(1.0 - (self._sampled_at - at) / self._window_seconds, rates) for at, rates in self._departed]
        return [
            _Rates(rates.requests * share, rates.prefill_load * share, rates.decode_load * share, rates.step_seconds)
            for share, rates in shares
            if 0.0 < share <= 1.0
        ]

    def _look_at_one(self, opened: Sequence[tuple[float, int, str, int]], now: float) -> None:
        """What one worker's drain would cost: the least loaded are looked at in turn, and only they are candidates."""
        with self._core.tree:
            if not self._turn:
                self._turn.extend((name, index) for _, index, name, _ in nsmallest(CANDIDATES, opened))
                self._keep_drains({name for name, _ in self._turn})
            names = {name for _, _, name, _ in opened}
            self._keep_drains(names)
            name, index = self._turn.popleft() if self._turn else ("", 0)
            joined = joined_at(self._core, index)
        if name not in names:  # it left, or drains; or there is nobody
            return
        try:
            lost = sum(prefix.loss_seconds for prefix in hot_prefixes(self._core, index, now))
        except UnknownWorker:  # it left just now
            return
        with self._core.tree:
            is_same = self._core.names[index] == name and joined_at(self._core, index) == joined
            if is_same and name in self._rates:
                rates = self._rates[name]
                self._drains[name] = Drain(name, lost, rates.prefill_load + rates.decode_load, now)

    def _keep_drains(self, names: set[str]) -> None:
        self._drains = {name: drain for name, drain in self._drains.items() if name in names}
