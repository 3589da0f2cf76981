"""What would have been: a recording's requests under another policy, on more workers, with other knobs. Owns the runs
and their figures; what engines cost is `engine_fit.py`'s.

    recording = preble.Recording.read("traffic.rec")
    found = replay(recording, ["round_robin", "e2"], workers=3)
    found.measured, found.recorded, found.runs[1].figures.mean_ttft_seconds

Three kinds of figures stand beside each other: what was measured; what the simulation says of the placements that
really were (how far these two are apart is the model's own error); and what it says of each policy.

A policy's run is compared with that of the real placements, both simulated: the ratio of the two (`ReplayRun.ratios`)
is drawn in pairs, so that what both have wrong in the same way cancels out.

Every figure is of the same requests: those that finished when they were recorded and came after the first
`WARM_SHARE` of the time, in which caches of the simulation are emptier than the real ones were. Its interval holds 95 %
of what comes out when stretches of time are drawn anew with replacement (block bootstrap): how much it depends on what
happened to come. The model's error comes on top.

A token was computed twice if an earlier request of the recording had it in the same prefix, and the worker that its
request ran on did not have it any more, or never had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config import SchedulerConfig
from ..errors import InvalidInput
from ..policies.base import Policy
from ..recording import RecordedWorker, Recording
from ..recording.replaying import BlockNumbers, workload_of
from ..types import check_int
from ..workloads import Workload
from .engine_fit import EngineModel, fit_engines, ran
from .placed import PlacedRun
from .results import FINISHED, Result
from .simulation import simulate

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Progress = Callable[[str, int, int, float], None]

WARM_SHARE = 0.1
BLOCKS = 20  # stretches of time, drawn with replacement
DRAWS = 400
EDGES = (2.5, 97.5)  # percentiles of the draws


@dataclass(frozen=True, slots=True)
class Estimate95:
    """A figure and the interval that holds 95 % of its draws; NaN where it is not known."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Estimate95:
        """So many times it."""
        return Estimate95(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run, or of what was measured. Seconds; `recomputed_tokens` are those computed twice, `hit_fraction` prompt
    tokens that were cached, of all."""

    requests: int
    mean_ttft_seconds: Estimate95
    p99_ttft_seconds: Estimate95
    mean_latency_seconds: Estimate95
    p99_latency_seconds: Estimate95
    recomputed_tokens: Estimate95
    hit_fraction: Estimate95

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


FIGURES = tuple(one.name for one in fields(Figures) if one.name != "requests")
RATIOS = ("mean_ttft_seconds", "p99_ttft_seconds", "mean_latency_seconds", "p99_latency_seconds", "computed_tokens")


@dataclass(frozen=True, slots=True, eq=False)
class ReplayRun:
    """What one policy would have made of it, over all seeds. `ratios`: over the real placements, simulated, by name of
    `RATIOS`; empty where there are none. `not_finished`: requests without an answer there, of those that had one."""

    policy: str
    workers: int
    figures: Figures
    ratios: Mapping[str, Estimate95]
    not_finished: int
    results: tuple[Result, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ReplayAnswer:
    """The answer. `measured` None: the recording has no times. `recorded`: the same placements, simulated, and
    `recorded_ttft_seconds` of each request that counts. `left_out`: requests of the recording that never ran, since
    they were refused or given up before."""

    recording: Recording
    workload: Workload
    engines: EngineModel
    measured: Figures | None
    recorded: Figures | None
    recorded_ttft_seconds: Floats
    runs: tuple[ReplayRun, ...]
    left_out: int

    @property
    def model_error(self) -> dict[str, float]:
        """By figure, simulated over measured less 1, of the placements that really were."""
        if self.measured is None or self.recorded is None:
            return {}
        pairs = {name: (getattr(self.recorded, name).value, getattr(self.measured, name).value) for name in FIGURES}
        return {name: ours / theirs - 1.0 for name, (ours, theirs) in pairs.items() if theirs > 0.0}

    def as_dict(self) -> dict[str, Any]:
        """For JSON. NaN is for what is not known."""
        recording = self.recording
        return {
            "recording": {
                "name": recording.name,
                "requests": len(recording),
                "seconds": recording.seconds,
                "workers": [asdict(worker) for worker in recording.workers],
                "policy": recording.policy,
                "missing": recording.missing,
                "is_cut": recording.is_cut,
                "left_out": self.left_out,
            },
            "engines": {
                "costs": asdict(self.engines.costs),
                "slowness": dict(self.engines.slowness),
                "fitted_to": self.engines.requests,
                "error_of_what_was_kept_apart": dict(self.engines.error),
            },
            "measured": None if self.measured is None else self.measured.as_dict(),
            "recorded": None if self.recorded is None else self.recorded.as_dict(),
            "model_error": self.model_error,
            "runs": [
                {
                    "policy": run.policy,
                    "workers": run.workers,
                    "not_finished": run.not_finished,
                    "trace_hashes": [result.trace_hash for result in run.results],
                    "over_recorded": {name: asdict(ratio) for name, ratio in run.ratios.items()},
                    **run.figures.as_dict(),
                }
                for run in self.runs
            ],
        }


def replay(
    recording: Recording,
    policies: Sequence[str | Policy] = ("e2",),
    *,
    workers: int | None = None,
    engines: EngineModel | None = None,
    scheduler: SchedulerConfig | None = None,
    seeds: Sequence[int] = (0,),
    closed: bool = True,
    progress: Progress | None = None,
) -> ReplayAnswer:
    """Run a recording through the real schedulers, once for each policy and seed. Changes nothing.

    workers: so many, those recorded first, further ones like the first of them; None: as recorded. engines: None fits
    them to the recording. scheduler: knobs of the scheduler. closed: turns of a session wait for the turn before them,
    else all come when they came. `progress(what, done, of, virtual seconds)` is called now and then. The same arguments
    give the same answer. Raises `InvalidInput` for a recording in which nothing ran, or from which no engine can be
    learned, and what `simulate` and the policies raise.
    """
    somewhere = any(one.worker for one in recording.requests)  # else it does not say who ran where
    rows = [row for row, one in enumerate(recording.requests) if one.worker or not somewhere]
    if not rows or not recording.workers:
        raise InvalidInput("the recording has no request that ran on a worker")
    fleet = fleet_of(recording, workers)
    known = progress or (lambda what, done, of, seconds: None)
    if engines is None:
        engines = fit_engines(recording, progress=lambda done, of: known("engines", done, of, 0.0))
    knobs = SchedulerConfig() if scheduler is None else scheduler
    if knobs.calibrate == "auto":
        knobs = replace(knobs, calibrate=True)
    blocks = BlockNumbers([recording.requests[row] for row in rows], recording.block_size)
    table = _Table(recording, rows, seen_before(recording, rows, blocks))
    workload = workload_of(recording, rows, closed=closed, blocks=blocks)
    measured = table.measured()
    recorded = None if measured is None else table.recorded(engines)
    on_the_way = engines.costs.hop + _routed_seconds(recording, rows)
    runs = []
    for policy in policies:
        results = []
        for seed in seeds:
            config = engines.config(fleet, policy=policy, scheduler=knobs, seed=seed)
            config = replace(config, network_seconds=on_the_way)

            def shown(done: int, of: int, seconds: float, name: str = _name(policy)) -> None:
                known(name, done, of, seconds)

            results.append(simulate(workload, config, progress=shown))
        runs.append(table.run_of(_name(policy), len(fleet), results))
    left_out = len(recording) - len(rows)
    return ReplayAnswer(
        recording, workload, engines, measured, recorded, table.recorded_ttft_seconds(), tuple(runs), left_out
    )


def _routed_seconds(recording: Recording, rows: Sequence[int]) -> float:
    """From a request's arrival to its being sent, as the middle one had it: a policy's requests take it, too."""
    requests = (recording.requests[row] for row in rows)
    taken = [one.sent_seconds - one.arrival_seconds for one in requests if one.sent_seconds is not None]
    return max(0.0, float(np.median(taken))) if taken else 0.0


def fleet_of(recording: Recording, workers: int | None) -> tuple[RecordedWorker, ...]:
    """The workers of a replay. Raises `InvalidConfig`."""
    found = list(recording.workers)
    if workers is None:
        return tuple(found)
    check_int("workers", workers, 1, 65_536)
    names = {worker.id for worker in found}
    number = len(found)
    while len(found) < workers:
        number += 1
        name = f"worker-{number}"
        if name not in names:
            found.append(replace(recording.workers[0], id=name))
    return tuple(found[:workers])


def seen_before(recording: Recording, rows: Sequence[int], blocks: BlockNumbers | None = None) -> npt.NDArray[np.int64]:
    """Prompt tokens of each request that an earlier one had in the same prefix, but for the last token, which is always
    computed; shape [rows]. `blocks`: of these rows, where they are known."""
    requests = [recording.requests[row] for row in rows]
    if blocks is None:
        blocks = BlockNumbers(requests, recording.block_size)
    begin, end = blocks.starts[:-1], blocks.starts[1:]
    of = np.repeat(np.arange(len(requests)), end - begin)
    new = np.append(
        np.flatnonzero(blocks.first[blocks.numbers] == of), blocks.starts[-1]
    )  # at its end nothing is known
    known = np.minimum(new[np.searchsorted(new, begin)], end) - begin
    prompts = np.array([one.prompt_tokens for one in requests], np.int64)
    found: npt.NDArray[np.int64] = np.maximum(np.minimum(known * recording.block_size, prompts - 1), 0)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """Of one run or several: times and cached tokens of the requests that count, one run after the other; NaN where
    there is none."""

    ttft: Floats
    latency: Floats
    cached: Floats
    runs: int = 1


class _Table:
    """What figures are made of: the recording's requests that ran, as columns."""

    def __init__(self, recording: Recording, rows: Sequence[int], seen: npt.NDArray[np.int64]) -> None:
        self._recording, self._rows = recording, rows
        self._requests = [recording.requests[row] for row in rows]
        self._arrival = np.array([one.arrival_seconds for one in self._requests])
        finished = np.array([one.finished or one.end_seconds is None for one in self._requests])
        self._counted: Flags = finished & (self._arrival >= self._warm_until(finished))
        if not self._counted.any():
            self._counted = finished if finished.any() else np.ones(len(rows), np.bool_)
        counted = self._counted
        self._prompt = np.array([one.prompt_tokens for one in self._requests], np.float64)[counted]
        self._seen = seen[counted]
        self._draws = _Draws(self._arrival[counted])
        self._placed: _Columns | None = None

    def _warm_until(self, finished: Flags) -> float:
        """When caches are taken for warm."""
        if not finished.any():
            return 0.0
        began, ended = float(self._arrival[finished].min()), float(self._arrival[finished].max())
        return began + WARM_SHARE * (ended - began)

    def measured(self) -> Figures | None:
        """Of the recording itself; None where it has no times."""
        ttft = np.array([one.ttft_seconds for one in self._requests])
        latency = np.array([one.latency_seconds for one in self._requests])
        if np.isnan(latency[self._counted]).all():
            return None
        cached = np.array([math.nan if one.cached_tokens is None else one.cached_tokens for one in self._requests])
        return self._figures(self._columns([ttft], [latency], [cached]))

    def recorded(self, engines: EngineModel) -> Figures:
        """Of the placements that really were, simulated."""
        rows = [row for row, one in zip(self._rows, self._requests, strict=True) if ran(one)]
        prompts = workload_of(self._recording, rows, closed=False).requests
        config = engines.config(self._recording.workers)
        found = PlacedRun([self._recording.requests[row] for row in rows], prompts, config).run()
        places = np.searchsorted(self._rows, rows)
        columns = [np.full(len(self._rows), math.nan) for _ in range(3)]
        cached = np.where(found.cached_tokens < 0, math.nan, found.cached_tokens)
        for column, values in zip(columns, (found.first_token_seconds, found.end_seconds, cached), strict=True):
            column[places] = values
        first, end, cached_tokens = columns
        measured = np.array([one.ttft_seconds for one in self._requests])
        ttft = np.where(np.isnan(measured), math.nan, first - self._arrival)
        self._placed = self._columns([ttft], [end - self._arrival], [cached_tokens])
        return self._figures(self._placed)

    def recorded_ttft_seconds(self) -> Floats:
        """Of the requests that count, as `recorded` found them; none before."""
        return np.empty(0) if self._placed is None else self._placed.ttft

    def run_of(self, policy: str, workers: int, results: Sequence[Result]) -> ReplayRun:
        """The figures of a policy's runs, one a seed."""
        done = [result.outcome == FINISHED for result in results]
        missed = sum(int((self._counted & ~finished).sum()) for finished in done)
        cached = [np.where(result.cached_tokens < 0, math.nan, result.cached_tokens) for result in results]
        ttft = [np.where(ok, result.ttft_seconds, math.nan) for ok, result in zip(done, results, strict=True)]
        columns = self._columns(ttft, [result.latency_seconds for result in results], cached)
        return ReplayRun(policy, workers, self._figures(columns), self._ratios(columns), missed, tuple(results))

    def _columns(self, ttft: Sequence[Floats], latency: Sequence[Floats], cached: Sequence[Floats]) -> _Columns:
        first, whole, hits = (np.concatenate([one[self._counted] for one in each]) for each in (ttft, latency, cached))
        return _Columns(first, whole, hits, len(ttft))

    def _computed(self, of: _Columns) -> Floats:
        """Prompt tokens that were computed."""
        return np.tile(self._prompt, of.runs) - of.cached

    def _figures(self, of: _Columns) -> Figures:
        draws = self._draws
        known = np.where(np.isnan(of.cached), math.nan, np.tile(self._prompt, of.runs))
        again = np.maximum(np.tile(self._seen, of.runs) - of.cached, 0.0)
        return Figures(
            int(self._counted.sum()),
            _estimate(draws.mean(of.ttft)),
            _estimate(draws.p99(of.ttft)),
            _estimate(draws.mean(of.latency)),
            _estimate(draws.p99(of.latency)),
            _estimate(draws.total(again) / of.runs),
            _estimate(_over(draws.total(of.cached), draws.total(known))),
        )

    def _ratios(self, of: _Columns) -> dict[str, Estimate95]:
        placed, draws = self._placed, self._draws
        if placed is None:
            return {}
        pairs = (
            (draws.mean(of.ttft), draws.mean(placed.ttft)),
            (draws.p99(of.ttft), draws.p99(placed.ttft)),
            (draws.mean(of.latency), draws.mean(placed.latency)),
            (draws.p99(of.latency), draws.p99(placed.latency)),
            (draws.mean(self._computed(of)), draws.mean(self._computed(placed))),
        )
        return {name: _estimate(_over(*pair)) for name, pair in zip(RATIOS, pairs, strict=True)}


class _Draws:
    """Stretches of time, as long as each other, drawn anew with replacement. The draws are the same for every figure
    and every run, so that runs are compared under the same ones.

    Each method gives a figure for all requests and for every draw, shape [1 + DRAWS], of values in order of arrival,
    those of several runs one after the other; NaN values do not count, and a figure of none is NaN.
    """

    def __init__(self, arrival: Floats) -> None:
        span = max(float(arrival.max() - arrival.min()), 1e-12) if len(arrival) else 1.0
        stretch = ((arrival - arrival.min()) / span * BLOCKS).astype(np.int64) if len(arrival) else np.empty(0, int)
        self._blocks = np.minimum(stretch, BLOCKS - 1)
        drawn = np.random.default_rng(0).integers(BLOCKS, size=(DRAWS, BLOCKS))
        self._times = np.ones((1 + DRAWS, BLOCKS))
        for row, blocks in enumerate(drawn):
            self._times[row + 1] = np.bincount(blocks, minlength=BLOCKS)

    def total(self, values: Floats) -> Floats:
        """The sum."""
        sums, counts = self._sums(values)
        return np.where(counts > 0, sums, math.nan)

    def mean(self, values: Floats) -> Floats:
        """The mean."""
        return _over(*self._sums(values))

    def p99(self, values: Floats) -> Floats:
        """The 99th percentile, between two values in proportion, as numpy has it."""
        known = ~np.isnan(values)
        order = np.argsort(values[known], kind="stable")
        ascending, blocks = values[known][order], self._blocks_of(values)[known][order]
        found = np.full(len(self._times), math.nan)
        for row, times in enumerate(self._times):
            upto = np.cumsum(times[blocks])
            if len(upto) and upto[-1] > 0:
                at = 0.99 * (upto[-1] - 1.0)
                low, high = np.searchsorted(upto, (math.floor(at), math.ceil(at)), "right")
                found[row] = ascending[low] + (ascending[high] - ascending[low]) * (at - math.floor(at))
        return found

    def _sums(self, values: Floats) -> tuple[Floats, Floats]:
        """The sum of the known values, and how many they are."""
        known = ~np.isnan(values)
        blocks = self._blocks_of(values)[known]
        each = [np.bincount(blocks, weights, BLOCKS) for weights in (values[known], np.ones(len(blocks)))]
        return self._times @ each[0], self._times @ each[1]

    def _blocks_of(self, values: Floats) -> npt.NDArray[np.int64]:
        return np.tile(self._blocks, len(values) // max(1, len(self._blocks)))


def _over(one: Floats, other: Floats) -> Floats:
    """The ratio; NaN over nothing."""
    return np.asarray(np.divide(one, other, out=np.full(len(one), math.nan), where=other > 0.0))


def _estimate(drawn: Floats) -> Estimate95:
    """A figure, first of those given, and the interval of the others."""
    known = drawn[1:][~np.isnan(drawn[1:])]
    if not len(known):
        return Estimate95(float(drawn[0]), math.nan, math.nan)
    low, high = np.percentile(known, EDGES)
    return Estimate95(float(drawn[0]), float(low), float(high))


def _name(policy: str | Policy) -> str:
    return policy if isinstance(policy, str) else policy.name
