"""What would have been: a recording's requests under another policy, on more workers, with other knobs. Owns the runs
and their figures; what engines cost is `engine_fit.py`'s.

    recording = preble.Recording.read("traffic.rec")
    found = replay(recording, ["round_robin", "e2"], workers=3)
    found.measured, found.recorded, found.runs[1].figures.mean_ttft_seconds

Three kinds of figures stand beside each other: what was measured; what the simulation says of the placements that
really were (how far these two are apart is the model's own error); and what it says of each policy.

Every figure is of the same requests: those that finished when they were recorded and came after the first
`WARM_SHARE` of the time, in which caches of the simulation are emptier than the real ones were. Its interval holds 95 %
of what comes out when stretches of time are drawn anew with replacement (block bootstrap): how much it depends on what
happened to come. The model's error comes on top.

A token was computed twice if an earlier request of the recording had it in the same prefix, and the worker that its
request ran on did not have it any more, or never had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config import SchedulerConfig
from ..errors import InvalidInput
from ..policies.base import Policy
from ..recording import RecordedWorker, Recording
from ..recording.replaying import workload_of
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


@dataclass(frozen=True, slots=True, eq=False)
class ReplayRun:
    """What one policy would have made of it, over all seeds. `not_finished`: requests without an answer there, of those
    that had one."""

    policy: str
    workers: int
    figures: Figures
    not_finished: int
    results: tuple[Result, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ReplayAnswer:
    """The answer. `measured` None: the recording has no times. `recorded`: the same placements, simulated. `left_out`:
    requests of the recording that never ran, since they were refused or given up before."""

    recording: Recording
    workload: Workload
    engines: EngineModel
    measured: Figures | None
    recorded: Figures | None
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
    table = _Table(recording, rows)
    workload = workload_of(recording, rows, closed=closed)
    runs = []
    for policy in policies:
        results = []
        for seed in seeds:
            config = engines.config(fleet, policy=policy, scheduler=knobs, seed=seed)

            def shown(done: int, of: int, seconds: float, name: str = _name(policy)) -> None:
                known(name, done, of, seconds)

            results.append(simulate(workload, config, progress=shown))
        runs.append(table.run_of(_name(policy), len(fleet), results))
    measured = table.measured()
    recorded = None if measured is None else table.recorded(engines)
    return ReplayAnswer(recording, workload, engines, measured, recorded, tuple(runs), len(recording) - len(rows))


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


def seen_before(recording: Recording, rows: Sequence[int]) -> npt.NDArray[np.int64]:
    """Prompt tokens of each request that an earlier one had in the same prefix, but for the last token, which is always
    computed; shape [rows]."""
    known: set[int] = set()
    found = np.zeros(len(rows), np.int64)
    for place, row in enumerate(rows):
        one = recording.requests[row]
        names = one.blocks.tolist()
        low, high = 0, len(names)
        while low < high:  # a known name has known ones before it
            middle = (low + high) // 2
            low, high = (middle + 1, high) if names[middle] in known else (low, middle)
        found[place] = max(0, min(low * recording.block_size, one.prompt_tokens - 1))
        known.update(names[low:])
    return found


class _Table:
    """What figures are made of: the recording's requests that ran, as columns."""

    def __init__(self, recording: Recording, rows: Sequence[int]) -> None:
        self._recording, self._rows = recording, rows
        self._requests = [recording.requests[row] for row in rows]
        self._arrival = np.array([one.arrival_seconds for one in self._requests])
        self._prompt = np.array([one.prompt_tokens for one in self._requests], np.float64)
        self._seen = seen_before(recording, rows)
        began, ended = float(self._arrival.min()), float(self._arrival.max())
        finished = np.array([one.finished or one.end_seconds is None for one in self._requests])
        self._counted: Flags = finished & (self._arrival >= began + WARM_SHARE * (ended - began))
        if not self._counted.any():
            self._counted = finished

    def measured(self) -> Figures | None:
        """Of the recording itself; None where it has no times."""
        ttft = np.array([one.ttft_seconds for one in self._requests])
        latency = np.array([one.latency_seconds for one in self._requests])
        if np.isnan(latency[self._counted]).all():
            return None
        cached = np.array([math.nan if one.cached_tokens is None else one.cached_tokens for one in self._requests])
        return self._figures([ttft], [latency], [cached])

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
        return self._figures([ttft], [end - self._arrival], [cached_tokens])

    def run_of(self, policy: str, workers: int, results: Sequence[Result]) -> ReplayRun:
        """The figures of a policy's runs, one a seed."""
        done = [result.outcome == FINISHED for result in results]
        missed = sum(int((self._counted & ~finished).sum()) for finished in done)
        cached = [np.where(result.cached_tokens < 0, math.nan, result.cached_tokens) for result in results]
        ttft = [np.where(ok, result.ttft_seconds, math.nan) for ok, result in zip(done, results, strict=True)]
        latency = [result.latency_seconds for result in results]
        return ReplayRun(policy, workers, self._figures(ttft, latency, cached), missed, tuple(results))

    def _figures(self, ttft: Sequence[Floats], latency: Sequence[Floats], cached: Sequence[Floats]) -> Figures:
        counted = self._counted
        blocks = np.concatenate([_blocks(self._arrival[counted])] * len(ttft))
        first, whole = (np.concatenate([one[counted] for one in columns]) for columns in (ttft, latency))
        again = np.concatenate([np.maximum(self._seen - one, 0.0)[counted] for one in cached])
        hits = np.concatenate([one[counted] for one in cached])
        prompt = np.where(np.isnan(hits), 0.0, np.concatenate([self._prompt[counted]] * len(cached)))
        seeds = len(ttft)
        return Figures(
            int(counted.sum()),
            _estimate(blocks, lambda rows: _mean(first[rows])),
            _estimate(blocks, lambda rows: _p99(first[rows])),
            _estimate(blocks, lambda rows: _mean(whole[rows])),
            _estimate(blocks, lambda rows: _p99(whole[rows])),
            _estimate(blocks, lambda rows: _sum(again[rows]) / seeds),
            _estimate(blocks, lambda rows: _sum(hits[rows]) / max(1.0, float(prompt[rows].sum()))),
        )


def _blocks(arrival: Floats) -> npt.NDArray[np.int64]:
    """The stretch of time of each request, all of them as long."""
    span = max(float(arrival.max() - arrival.min()), 1e-12)
    stretch = ((arrival - arrival.min()) / span * BLOCKS).astype(np.int64)
    return np.asarray(np.minimum(stretch, BLOCKS - 1))


def _estimate(blocks: npt.NDArray[np.int64], figure: Callable[[Any], float]) -> Estimate95:
    """A figure of all rows, and of stretches drawn with replacement; the draws are the same for all figures, so that
    runs are compared under the same ones."""
    rows_of = [np.flatnonzero(blocks == block) for block in range(BLOCKS)]
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(DRAWS):
        rows = np.concatenate([rows_of[block] for block in rng.integers(BLOCKS, size=BLOCKS)])
        if len(rows):
            drawn.append(figure(rows))
    known = np.array([value for value in drawn if not math.isnan(value)])
    if not len(known):
        return Estimate95(figure(slice(None)), math.nan, math.nan)
    low, high = np.percentile(known, EDGES)
    return Estimate95(figure(slice(None)), float(low), float(high))


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def _p99(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(np.percentile(known, 99)) if len(known) else math.nan


def _sum(values: Floats) -> float:
    """Of what is known; NaN where nothing is."""
    known = values[~np.isnan(values)]
    return float(known.sum()) if len(known) else math.nan


def _name(policy: str | Policy) -> str:
    return policy if isinstance(policy, str) else policy.name
