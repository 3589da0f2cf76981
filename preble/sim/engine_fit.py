"""What engines cost, from a recording of requests that ran on them. Owns the model's form, what of a recording it is
fitted to, and how far off it is.

An iteration takes, in seconds:   floor + token * new tokens beyond `free` + context * tokens of all contexts
                                  + pair * (chunk * context of each chunk) + request * requests in the batch
and a request takes `hop` from the router to the engine. These seven are found by running the recorded requests on the
workers that they ran on (`placed.py`), again and again: least squares of the logarithms of mean times, simulated over
measured, of groups of requests alike in when they came, in what they had to compute, and in what ran beside them. So
the fit sees queues, batches and chunks as the engines formed them.

Groups are of every other stretch of time. The stretches in between say how far off the model is: nothing was fitted to
them (`EngineModel.error`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .._cost import CostModel
from ..errors import InvalidInput
from ..local import LocalConfig
from ..recording import RecordedRequest, RecordedWorker, Recording
from ..recording.replaying import workload_of
from ..types import WorkerSpec
from .config import SimConfig
from .placed import PlacedRun, PlacedTimes

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Progress = Callable[[int, int], None]

REQUESTS_MAX = 2000  # that a model is fitted to, the first ones
REQUESTS_MIN = 30
BLOCKS = 20  # stretches of time, of as many requests each
EDGES = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.85, 0.92, 0.97, 1.0)  # of requests alike: shares of them, in order
GROUP_MIN = 4  # requests
ROUNDS = 8
STEP = 0.08  # of a logarithm, for slopes
PULL = 0.15  # towards the first guess, where the recording does not say: of a group's weight, for each factor
ROBUST = 0.5  # a group that is further off, in logarithms, weighs less
GAIN_MIN = 0.01  # of what is left, for another round
SPEED_APART = 0.05  # of workers, in logarithms, before they are taken for different
RUNNING_MAX = 256

NAMES = ("floor", "token", "context", "pair", "request", "hop", "free")
FREE_TRIED = (4.0, 256.0)  # where the search for `free` begins
LOOKS = 3  # rounds of each, before the best of them goes on
AT = 8192.0  # the line's last point; it goes on as it was


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """The costs, in seconds, `free` in tokens; see the module. All at least 0, `floor` and `token` above."""

    floor: float
    token: float
    context: float = 0.0
    pair: float = 0.0
    request: float = 0.0
    hop: float = 0.0
    free: float = 0.0

    def model(self, slowness: float = 1.0, name: str = "recorded") -> CostModel:
        """The cost model of a worker that takes `slowness` times as long; `request` and `hop` are beside it."""
        free = min(self.free, AT / 2)
        knots = [(0.0, self.floor * slowness), (AT, (self.floor + self.token * (AT - free)) * slowness)]
        if free:
            knots.insert(1, (free, self.floor * slowness))
        return CostModel(
            knots,
            context=(0.0, 0.0, 0.0, self.context * slowness),
            pair=(0.0, 0.0, 0.0, 0.0, self.pair * slowness),
            name=name,
        )

    def times(self, logs: Floats) -> EngineCosts:
        """Each times e to the power of its logarithm."""
        return EngineCosts(*(getattr(self, name) * math.exp(log) for name, log in zip(NAMES, logs, strict=True)))


@dataclass(frozen=True, slots=True)
class EngineModel:
    """What is taken for the engines of a recording.

    local: how they form batches. slowness: by worker, what its times are multiplied by, 1 where it is not there. error:
    how far off simulated mean and p99 are in stretches of time that nothing was fitted to, simulated over measured
    less 1, by figure; empty where nothing was measured. requests: that it was fitted to.
    """

    costs: EngineCosts
    local: LocalConfig
    slowness: Mapping[str, float] = field(default_factory=dict)
    error: Mapping[str, float] = field(default_factory=dict)
    requests: int = 0

    def config(self, workers: Sequence[RecordedWorker], **more: Any) -> SimConfig:
        """A simulation's configuration for workers; `more` are further fields of it."""
        models = {worker.id: self.costs.model(self.slowness.get(worker.id, 1.0)) for worker in workers}
        return SimConfig(
            workers=tuple(spec_of(worker) for worker in workers),
            local=self.local,
            engine_cost_models=models,
            step_seconds_per_request=self.costs.request,
            network_seconds=self.costs.hop,
            **more,
        )


def spec_of(worker: RecordedWorker) -> WorkerSpec:
    """A recorded worker for a scheduler."""
    return WorkerSpec(
        worker.id,
        kv_capacity_tokens=worker.kv_capacity_tokens,
        block_size=worker.block_size,
        max_running=worker.max_running,
    )


def local_config(workers: Sequence[RecordedWorker]) -> LocalConfig:
    """How engines of that kind form batches, with their defaults: ours as they do; SGLang computes prompts in
    iterations of their own, up to 8,192 tokens in each; vLLM beside decoding, up to 2,048 tokens."""
    engines = {worker.engine for worker in workers}
    capacity = max((worker.kv_capacity_tokens for worker in workers), default=1)
    base = LocalConfig(capacity, max_running=RUNNING_MAX, max_waiting=1_000_000)
    if engines == {"sglang"}:
        return replace(base, token_budget=8192, chunked_prefill=False, order="fcfs", eviction="lru")
    if engines == {"vllm"}:
        return replace(base, token_budget=2048, order="fcfs", eviction="lru")
    return base


# --- fitting ----------------------------------------------------------------------------------------------------------


def fit_engines(recording: Recording, *, progress: Progress | None = None) -> EngineModel:
    """The model of a recording's engines. The same recording gives the same model, everywhere.

    `progress(runs so far, at most)` is called after each simulation. Raises `InvalidInput` for a recording with fewer
    than `REQUESTS_MIN` finished requests whose times are known.
    """
    rows = _measured_rows(recording)
    if len(rows) < REQUESTS_MIN:
        raise InvalidInput(
            f"the recording has {len(rows)} finished requests with their times, {REQUESTS_MIN} are needed to learn what"
            " its engines cost"
        )
    fit = _Fit(recording, progress)
    guess = fit.guess()
    tried = [fit.solve(replace(guess, free=free), {}, LOOKS) for free in FREE_TRIED]
    costs, _ = fit.solve(min(tried, key=lambda one: one[1])[0], {}, ROUNDS)
    slowness = fit.slowness(costs)
    if slowness:
        costs, _ = fit.solve(costs, slowness, LOOKS)
    model = EngineModel(costs, fit.local, slowness, {}, int(fit.known.sum()))
    return replace(model, error=fit.error(costs, slowness))


def ran(request: RecordedRequest) -> bool:
    """Whether it was at a worker, for a time that is known."""
    return bool(request.worker) and request.sent_seconds is not None and request.end_seconds is not None


def _measured_rows(recording: Recording) -> list[int]:
    return [row for row, one in enumerate(recording.requests) if ran(one) and one.finished]


class _Fit:
    """The requests of a fit, what was measured of them, and their groups."""

    def __init__(self, recording: Recording, progress: Progress | None) -> None:
        rows = [row for row, one in enumerate(recording.requests) if ran(one)][:REQUESTS_MAX]
        self.requests = [recording.requests[row] for row in rows]
        self.prompts = workload_of(recording, rows, closed=False).requests
        self.workers = recording.workers
        self.local = local_config(recording.workers)
        self._progress, self._runs = progress, 0
        column = {name: _column(self.requests, name) for name in ("sent_seconds", "first_token_seconds", "end_seconds")}
        self.sent, self.first, self.end = column.values()
        self.output = np.array([one.output_tokens for one in self.requests], np.float64)
        finished = np.array([one.finished for one in self.requests])
        self.known: Flags = finished & (self.end > self.sent)
        self.times = self._spans(self.first, self.end)
        self.block = np.minimum(np.arange(len(rows)) * BLOCKS // max(1, len(rows)), BLOCKS - 1)
        self.judged: Flags = self.block % 2 == 1

    # --- a first guess ------------------------------------------------------------------------------------------------

    def guess(self) -> EngineCosts:
        """Costs of the right size: what the quickest answers took."""
        decoded = self.known & (self.output > 1) & (self.times["decode"] > 0.0)
        prompt = np.array([one.prompt_tokens for one in self.requests], np.float64)
        cached = np.array([one.cached_tokens or 0 for one in self.requests], np.float64)
        missed = np.maximum(prompt - cached, 1.0)
        if decoded.any():
            floor = float(np.percentile(self.times["decode"][decoded] / (self.output[decoded] - 1), 20))
        else:
            floor = 0.2 * float(np.percentile(self.times["whole"][self.known], 20))
        floor = max(floor, 1e-6)
        prefill, whole = self.times["prefill"], self.times["whole"]
        times = np.where(np.isnan(prefill), whole - self.output * floor, prefill)
        long = self.known & (missed >= np.median(missed[self.known]))
        token = float(np.percentile(np.maximum(times[long] - floor, 0.1 * floor) / missed[long], 20))
        context = float(np.mean(prompt))
        return EngineCosts(
            0.8 * floor,
            max(0.7 * token, 1e-9),
            0.05 * floor / context,
            0.1 * token / context,
            0.05 * floor,
            0.05 * floor,
        )

    # --- groups -------------------------------------------------------------------------------------------------------

    def groups(self, use: Flags) -> list[tuple[str, Flags]]:
        """(which time, rows) of each group of rows in use."""
        found: list[tuple[str, Flags]] = []
        prompt = np.array([one.prompt_tokens for one in self.requests], np.float64)
        cached = np.array([one.cached_tokens or 0 for one in self.requests], np.float64)
        beside = self._beside()
        for name, times in self.times.items():
            valid = use & self.known & (times > 0.0)
            for keys in (self.block, prompt - cached, prompt, beside):
                found += [(name, rows) for rows in _alike(keys.astype(np.float64), valid, keys is self.block)]
        return found

    def _beside(self) -> Floats:
        """How many requests of its worker were there when each one was sent."""
        counts = np.zeros(len(self.requests))
        by_worker: dict[str, list[int]] = {}
        for row, one in enumerate(self.requests):
            by_worker.setdefault(one.worker, []).append(row)
        for rows in by_worker.values():
            begins, ends = np.sort(self.sent[rows]), np.sort(self.end[rows])
            at = self.sent[rows]
            counts[rows] = np.searchsorted(begins, at, "right") - np.searchsorted(ends, at, "right")
        return counts

    # --- solving ------------------------------------------------------------------------------------------------------

    def run(self, costs: EngineCosts, slowness: Mapping[str, float]) -> PlacedTimes:
        """The requests where they ran, on engines of these costs."""
        config = EngineModel(costs, self.local, slowness).config(self.workers)
        found = PlacedRun(self.requests, self.prompts, config).run()
        self._runs += 1
        if self._progress is not None:
            self._progress(self._runs, (len(FREE_TRIED) + 2) * (len(NAMES) + LOOKS) + ROUNDS)
        return found

    def _spans(self, first: Floats, end: Floats) -> dict[str, Floats]:
        """From sending to the first token, from there to the last, and both; NaN where a time is not known."""
        decode = np.where(self.output > 1, end - first, np.nan)
        return {"prefill": first - self.sent, "decode": decode, "whole": end - self.sent}

    def residuals(
        self, groups: Sequence[tuple[str, Flags]], costs: EngineCosts, slowness: Mapping[str, float]
    ) -> Floats:
        """Logarithms of mean times, simulated over measured, a group each."""
        found = self.run(costs, slowness)
        spans = self._spans(found.first_token_seconds, found.end_seconds)
        return np.array([_log_ratio(spans[name], self.times[name], rows) for name, rows in groups])

    def solve(self, first: EngineCosts, slowness: Mapping[str, float], rounds: int) -> tuple[EngineCosts, float]:
        """The costs under which the groups' times are closest to those measured (Levenberg and Marquardt), and how far
        they are."""
        groups = self.groups(~self.judged)
        logs, damping = np.zeros(len(NAMES)), 1e-2
        residuals = self.residuals(groups, first, slowness)
        slopes: Floats | None = None
        for _ in range(rounds):
            is_fresh = slopes is None
            if slopes is None:
                base = first.times(logs)
                moved = [self.residuals(groups, base.times(STEP * axis), slowness) for axis in np.eye(len(NAMES))]
                slopes = np.stack([(found - residuals) / STEP for found in moved], axis=1)
            step = _step(slopes, residuals, logs, damping)
            found = self.residuals(groups, first.times(logs + step), slowness)
            gained = _loss(residuals, logs) - _loss(found, logs + step)
            if gained > 0.0:
                # The slopes as the step has shown them (Broyden): a run each would cost seven.
                slopes = slopes + np.outer(found - residuals - slopes @ step, step) / max(float(step @ step), 1e-12)
                logs, residuals, damping = logs + step, found, max(0.2 * damping, 1e-4)
                if gained < GAIN_MIN * _loss(residuals, logs):
                    break
            else:
                damping *= 8.0
                slopes = slopes if is_fresh else None
        return first.times(logs), _loss(residuals, logs)

    def slowness(self, costs: EngineCosts) -> dict[str, float]:
        """By worker, how much longer its requests took than simulated; nothing where all are alike."""
        run = self.run(costs, {})
        whole = self._spans(run.first_token_seconds, run.end_seconds)["whole"]
        found: dict[str, float] = {}
        for worker in self.workers:
            own = np.array([one.worker == worker.id for one in self.requests])
            rows = own & self.known & ~self.judged
            if rows.sum() >= REQUESTS_MIN:
                found[worker.id] = -_log_ratio(whole, self.times["whole"], rows)
        if not found or max(found.values()) - min(found.values()) < SPEED_APART:
            return {}
        middle = float(np.mean(list(found.values())))
        return {name: math.exp(log - middle) for name, log in found.items()}

    def error(self, costs: EngineCosts, slowness: Mapping[str, float]) -> dict[str, float]:
        """Simulated over measured, less 1, in the stretches that were kept apart."""
        found = self.run(costs, slowness)
        arrival = _column(self.requests, "arrival_seconds")
        error = {}
        for name, simulated, measured in (
            ("ttft", found.first_token_seconds, self.first),
            ("latency", found.end_seconds, self.end),
        ):
            rows = self.judged & self.known & ~np.isnan(measured) & ~np.isnan(simulated)
            if not rows.any():
                continue
            ours, theirs = (simulated - arrival)[rows], (measured - arrival)[rows]
            error[f"mean_{name}_seconds"] = float(ours.mean() / theirs.mean() - 1.0)
            error[f"p99_{name}_seconds"] = float(np.percentile(ours, 99) / np.percentile(theirs, 99) - 1.0)
        return error


def _step(slopes: Floats, residuals: Floats, logs: Floats, damping: float) -> Floats:
    """One step of damped least squares, in which far groups weigh less and costs are pulled towards the first guess."""
    weights = 1.0 / (1.0 + (residuals / ROBUST) ** 2)
    usable = np.isfinite(slopes).all(axis=1) & np.isfinite(residuals)
    slopes, residuals, weights = slopes[usable], residuals[usable], weights[usable]
    normal = slopes.T @ (weights[:, None] * slopes) + PULL**2 * np.eye(len(logs))
    aim = slopes.T @ (weights * residuals) + PULL**2 * logs
    scale = np.diag(np.diag(normal))
    return np.asarray(np.clip(-np.linalg.solve(normal + damping * scale, aim), -1.0, 1.0))


def _loss(residuals: Floats, logs: Floats) -> float:
    """What is made small: Cauchy's loss of the groups and the pull."""
    known = residuals[np.isfinite(residuals)]
    return float(ROBUST**2 * np.log1p((known / ROBUST) ** 2).sum() + PULL**2 * (logs @ logs))


def _log_ratio(simulated: Floats, measured: Floats, rows: Flags) -> float:
    """Logarithm of the mean simulated over the mean measured; NaN where nothing was simulated."""
    own = simulated[rows]
    if np.isnan(own).any() or own.sum() <= 0.0:
        return math.nan
    return math.log(float(own.sum()) / float(measured[rows].sum()))


def _alike(keys: Floats, valid: Flags, as_they_are: bool) -> list[Flags]:
    """Groups of the valid rows with like keys; equal keys, or as `EDGES` divide them."""
    if not valid.any():
        return []
    if as_they_are:
        return [valid & (keys == key) for key in np.unique(keys[valid])]
    edges = np.unique(np.quantile(keys[valid], EDGES))
    places = np.searchsorted(edges[1:-1], keys, "right")
    found = [valid & (places == place) for place in range(len(edges))]
    return [rows for rows in found if rows.sum() >= GROUP_MIN]


def _column(requests: Sequence[RecordedRequest], name: str) -> Floats:
    values = (getattr(one, name) for one in requests)
    return np.array([math.nan if value is None else value for value in values], np.float64)
