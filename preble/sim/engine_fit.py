"""What engines cost, from a recording of requests that ran on them. Owns the model's form, what of a recording it is
fitted to, and how far off it is.

An iteration takes, in seconds:   floor + token * new tokens beyond `free` + context * tokens of all contexts
                                  + pair * (chunk * context of each chunk) + request * requests in the batch
and a request takes `hop` from the router to the engine. All but the last are found by running the recorded requests on
the workers that they ran on (`placed.py`), again and again: least squares of the logarithms of times, simulated over
measured, of groups of requests alike in when they came, in what they had to compute, and in what ran beside them. So
the fit sees queues, batches and chunks as the engines formed them. The means and the 99th percentiles of all requests
weigh most: they are what a replay is asked for, and under load a small error of a cost is a large one of a queue. `hop`
moves what an engine does as a whole, so that of each run the best one is calculated.

Engines run so many requests at once and no more. Where one does not say how many, waits for another to end would
be taken for slow engines or a long `hop`; so where others waited while as many decoded as ever did, the fit is tried
with that many places, too, and the better of the two goes on (`_Fit.places`).

Groups are first of every other stretch of time. The stretches in between say how far off such a model is: nothing was
fitted to them (`EngineModel.error`). Then the fit goes on with all of them.
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
Statistic = Callable[[Floats], float]
Flags = npt.NDArray[np.bool_]
Progress = Callable[[int, int], None]

REQUESTS_MAX = 2000  # that a model is fitted to, the first ones whose times are known
REQUESTS_MIN = 30
BLOCKS = 20  # stretches of time, of as many requests each
EDGES = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.85, 0.92, 0.97, 1.0)  # of requests alike: shares of them, in order
GROUP_MIN = 4  # requests
MEAN_WEIGHT, P99_WEIGHT = 12.0, 4.0  # of all requests', in groups: a time has some thirty
ROUNDS = 5
STEP = 0.08  # of a logarithm, for slopes
PULL = 0.15  # towards the first guess, where the recording does not say: of a group's weight, for each factor
ROBUST = 0.5  # a group that is further off, in logarithms, weighs less
GAIN_MIN = 0.01  # of what is left, for another round
SPEED_APART = 0.05  # of workers, in logarithms, before they are taken for different
RUNNING_MAX = 256
FULL_SHARE = 0.1  # of the time that others wait, before as many as ever decode are tried for all places

NAMES = ("floor", "token", "context", "pair", "request", "free")
FREE_TRIED = (4.0, 256.0)  # where the search for `free` begins
TOKEN_TRIED = (1.0, 0.3)  # and for `token`, times the guess: all the time may be the way
LOOKS = 3  # rounds of each, before the best of them goes on
BEGIN_RUNS = 2 * len(NAMES) + 2 * LOOKS + 8  # of a beginning, about
RUNS_MAX = 5 * len(NAMES) + ROUNDS + 4 * LOOKS + 12  # of a fit with one
HOPS, ZOOMS = 33, 4  # that are compared at once, and how often closer ones are
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
        """Each of `NAMES` times e to the power of its logarithm."""
        return replace(
            self, **{name: getattr(self, name) * math.exp(log) for name, log in zip(NAMES, logs, strict=True)}
        )


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
    iterations of their own, up to 8,192 tokens in each, and a prefix once for each of those that come together; vLLM
    beside decoding, up to 2,048 tokens."""
    engines = {worker.engine for worker in workers}
    capacity = max((worker.kv_capacity_tokens for worker in workers), default=1)
    base = LocalConfig(capacity, max_running=RUNNING_MAX, max_waiting=1_000_000)
    if engines == {"sglang"}:
        return replace(
            base, token_budget=8192, chunked_prefill=False, order="fcfs", eviction="lru", min_shared_tokens=0
        )
    if engines == {"vllm"}:
        return replace(base, token_budget=2048, order="fcfs", eviction="lru")
    return base


# --- fitting ----------------------------------------------------------------------------------------------------------


def fit_engines(
    recording: Recording, *, together: Sequence[Sequence[int]] = (), progress: Progress | None = None
) -> EngineModel:
    """The model of a recording's engines. The same recording gives the same model, everywhere.

    together: rows of the recording that were measured together only, in order of time; the times that each of them has
    are guesses whose mean is right. Without, every request's own times are taken for measured.
    `progress(runs so far, at most)` is called after each simulation. Raises `InvalidInput` for a recording with fewer
    than `REQUESTS_MIN` finished requests whose times are known.
    """
    rows = _measured_rows(recording)
    if len(rows) < REQUESTS_MIN:
        raise InvalidInput(
            f"the recording has {len(rows)} finished requests with their times, {REQUESTS_MIN} are needed to learn what"
            " its engines cost"
        )
    fit = _Fit(recording, together, progress)
    half = ~fit.judged
    loss, costs = fit.begin(half)
    places = fit.places()
    if places is not None:
        plain, fit.local = fit.local, replace(fit.local, max_running=places)
        fit.runs_max += BEGIN_RUNS
        fuller = fit.begin(half)
        if fuller[0] < loss:
            costs = fuller[1]
        else:
            fit.local = plain
    costs = fit.solve(costs, {}, half, ROUNDS)
    slowness = fit.slowness(costs)
    if slowness:
        costs = fit.solve(costs, slowness, half, LOOKS)
    error = fit.error(costs, slowness)
    costs = fit.solve(costs, slowness, np.ones(len(half), np.bool_), LOOKS)
    return EngineModel(costs, fit.local, slowness, error, int(fit.known.sum()))


def ran(request: RecordedRequest) -> bool:
    """Whether it was at a worker, for a time that is known."""
    return bool(request.worker) and request.sent_seconds is not None and request.end_seconds is not None


def _first_rows(recording: Recording) -> list[int]:
    """Rows of the requests that ran, until `REQUESTS_MAX` of them have times."""
    found, known = [], 0
    for row, one in enumerate(recording.requests):
        if ran(one):
            found.append(row)
            known += one.finished
            if known == REQUESTS_MAX:
                break
    return found


def _measured_rows(recording: Recording) -> list[int]:
    return [row for row, one in enumerate(recording.requests) if ran(one) and one.finished]


def _mean(values: Floats) -> float:
    return float(values.mean())


def _p99(values: Floats) -> float:
    return float(np.percentile(values, 99))


@dataclass(frozen=True, slots=True, eq=False)
class FitGroup:
    """Requests whose times a fit compares: which time, which rows, what of them, and how much it weighs."""

    name: str
    rows: Flags
    of: Statistic = _mean
    weight: float = 1.0


class _Fit:
    """The requests of a fit, what was measured of them, and their groups."""

    def __init__(self, recording: Recording, together: Sequence[Sequence[int]], progress: Progress | None) -> None:
        rows = _first_rows(recording)
        self.requests = [recording.requests[row] for row in rows]
        self.prompts = workload_of(recording, rows, closed=False).requests
        self.workers = recording.workers
        self.local = local_config(recording.workers)
        self._progress, self._runs, self.runs_max = progress, 0, RUNS_MAX
        column = {name: _column(self.requests, name) for name in ("sent_seconds", "first_token_seconds", "end_seconds")}
        self.sent, self.first, self.end = column.values()
        self.output = np.array([one.output_tokens for one in self.requests], np.float64)
        finished = np.array([one.finished for one in self.requests])
        self.known: Flags = finished & (self.end > self.sent)
        self.times = self._spans(self.first, self.end)
        place: npt.NDArray[np.int64] = np.cumsum(self.known) - self.known  # among those whose times are known
        self.block = np.minimum(place * BLOCKS // max(1, int(self.known.sum())), BLOCKS - 1)
        self.together = [np.isin(rows, own) & self.known for own in together]
        if self.together:
            self.block = np.zeros(len(rows), np.int64)
            for number, own in enumerate(self.together):
                self.block[own] = number
        self.judged: Flags = self.block % 2 == 1

    # --- places to run ------------------------------------------------------------------------------------------------

    def places(self) -> int | None:
        """The most requests of a worker that decoded at once, if others waited there meanwhile for FULL_SHARE of the
        time that any waited. None where engines say how many run, where it does not look like it, or where times are
        guesses."""
        found = 0
        for worker in () if self.together else self.workers:
            own = np.array([one.worker == worker.id for one in self.requests])
            if worker.max_running is None and own.any():
                most, share = _most_decoding(self.sent[own], self.first[own], self.end[own])
                found = max(found, most if share >= FULL_SHARE else 0)
        return found if 0 < found < self.local.max_running else None

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
            0.8 * floor, max(0.7 * token, 1e-9), 0.05 * floor / context, 0.1 * token / context, 0.05 * floor
        )

    # --- groups -------------------------------------------------------------------------------------------------------

    def groups(self, use: Flags) -> list[FitGroup]:
        """Of the rows in use."""
        if self.together:
            return self._measured_together(use)
        found: list[FitGroup] = []
        prompt = np.array([one.prompt_tokens for one in self.requests], np.float64)
        cached = np.array([one.cached_tokens or 0 for one in self.requests], np.float64)
        beside = self._beside()
        for name, times in self.times.items():
            valid = use & self.known & (times > 0.0)
            for keys in (self.block, prompt - cached, prompt, beside):
                found += [FitGroup(name, rows) for rows in _alike(keys.astype(np.float64), valid, keys is self.block)]
            if valid.any():
                found += [FitGroup(name, valid, _mean, MEAN_WEIGHT), FitGroup(name, valid, _p99, P99_WEIGHT)]
        return found

    def _measured_together(self, use: Flags) -> list[FitGroup]:
        """Times to first token of what was measured together, and the means of all."""
        found = [FitGroup("prefill", own & use) for own in self.together if (own & use).any()]
        for name, times in self.times.items():
            valid = use & self.known & (times > 0.0)
            found += [FitGroup(name, valid, _mean, MEAN_WEIGHT)] if valid.any() else []
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

    def begin(self, use: Flags) -> tuple[float, EngineCosts]:
        """The best of some beginnings, a few rounds on, and how far off it is."""
        guess = self.guess()
        begins = [[replace(guess, free=free, token=one * guess.token) for one in TOKEN_TRIED] for free in FREE_TRIED]
        tried = [self.solve(min(own, key=lambda one: self.loss(one, use)), {}, use, LOOKS) for own in begins]
        losses = [self.loss(one, use) for one in tried]
        best = int(np.argmin(losses))
        return losses[best], tried[best]

    def run(self, costs: EngineCosts, slowness: Mapping[str, float]) -> PlacedTimes:
        """The requests where they ran, on engines of these costs."""
        config = EngineModel(costs, self.local, slowness).config(self.workers)
        found = PlacedRun(self.requests, self.prompts, config).run()
        self._runs += 1
        if self._progress is not None:
            self._progress(self._runs, self.runs_max)
        return found

    def _spans(self, first: Floats, end: Floats) -> dict[str, Floats]:
        """From sending to the first token, from there to the last, and both; NaN where a time is not known."""
        decode = np.where(self.output > 1, end - first, np.nan)
        return {"prefill": first - self.sent, "decode": decode, "whole": end - self.sent}

    def compare(self, groups: Sequence[FitGroup], costs: EngineCosts, slowness: Mapping[str, float]) -> Compared:
        """Each group's time, simulated and measured, with the hop that fits them best."""
        found = self.run(replace(costs, hop=0.0), slowness)
        spans = self._spans(found.first_token_seconds, found.end_seconds)
        simulated = np.array([_figure(one, spans[one.name]) for one in groups])
        measured = np.array([_figure(one, self.times[one.name]) for one in groups])
        is_moved = np.array([one.name != "decode" for one in groups])
        weights = np.array([one.weight for one in groups])
        hop = _best_hop(simulated, measured, is_moved, weights)
        return Compared(_logs(simulated + hop * is_moved, measured), weights, hop)

    def loss(self, costs: EngineCosts, use: Flags) -> float:
        """How far off costs are."""
        return self.compare(self.groups(use), costs, {}).loss(np.zeros(len(NAMES)))

    def solve(self, first: EngineCosts, slowness: Mapping[str, float], use: Flags, rounds: int) -> EngineCosts:
        """The costs under which the times of the groups of rows in use are closest to those measured (Levenberg and
        Marquardt)."""
        groups = self.groups(use)
        logs, damping = np.zeros(len(NAMES)), 1e-2
        now = self.compare(groups, first, slowness)
        slopes: Floats | None = None
        for _ in range(rounds):
            is_fresh = slopes is None
            if slopes is None:
                base = first.times(logs)
                moved = [self.compare(groups, base.times(STEP * axis), slowness) for axis in np.eye(len(NAMES))]
                slopes = np.stack([(one.residuals - now.residuals) / STEP for one in moved], axis=1)
            step = _step(slopes, now, logs, damping)
            found = self.compare(groups, first.times(logs + step), slowness)
            gained = now.loss(logs) - found.loss(logs + step)
            if gained > 0.0:
                # The slopes as the step has shown them (Broyden): a run each would cost six.
                change = found.residuals - now.residuals - slopes @ step
                slopes = slopes + np.outer(change, step) / max(float(step @ step), 1e-12)
                logs, now, damping = logs + step, found, max(0.2 * damping, 1e-4)
                if gained < GAIN_MIN * now.loss(logs):
                    break
            else:
                damping *= 8.0
                slopes = slopes if is_fresh else None
        return replace(first.times(logs), hop=now.hop)

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


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """Logarithms of the groups' times, simulated over measured, NaN where nothing was simulated; their weights; and the
    hop that they hold for."""

    residuals: Floats
    weights: Floats
    hop: float

    def loss(self, logs: Floats) -> float:
        """What is made small: Cauchy's loss of the groups, and the pull towards the first guess."""
        return float(_cauchy(self.residuals, self.weights)) + PULL**2 * float(logs @ logs)


def _most_decoding(sent: Floats, first: Floats, end: Floats) -> tuple[int, float]:
    """The most requests at once that had their first token and not their last, and for which share of the time that
    others waited they were as many. Without a first token one waits to its end. O(n log n)."""
    first = np.where(np.isnan(first), end, first)
    times = np.concatenate([first, end, sent])
    decodes = np.repeat([1, -1, 0], len(sent))
    waits = np.repeat([-1, 0, 1], len(sent))
    order = np.argsort(times, kind="stable")  # at one moment those that begin to decode come before those that end
    decoding, waiting = np.cumsum(decodes[order]), np.cumsum(waits[order])
    spans = np.diff(times[order], append=times[order[-1]]) * (waiting > 0)
    most = int(decoding.max())
    return most, float(spans[decoding == most].sum() / max(float(spans.sum()), 1e-9))


def _step(slopes: Floats, now: Compared, logs: Floats, damping: float) -> Floats:
    """One step of damped least squares, in which far groups weigh less and costs are pulled towards the first guess."""
    weights, residuals = now.weights / (1.0 + (now.residuals / ROBUST) ** 2), now.residuals
    usable = np.isfinite(slopes).all(axis=1) & np.isfinite(residuals)
    slopes, residuals, weights = slopes[usable], residuals[usable], weights[usable]
    normal = slopes.T @ (weights[:, None] * slopes) + PULL**2 * np.eye(len(logs))
    aim = slopes.T @ (weights * residuals) + PULL**2 * logs
    scale = np.diag(np.diag(normal))
    return np.asarray(np.clip(-np.linalg.solve(normal + damping * scale, aim), -1.0, 1.0))


def _cauchy(residuals: Floats, weights: Floats) -> Floats:
    """The loss of groups, along the last axis; those that are not known cost nothing."""
    known = np.where(np.isfinite(residuals), residuals, 0.0)
    return np.asarray(ROBUST**2 * (weights * np.log1p((known / ROBUST) ** 2)).sum(axis=-1))


def _best_hop(simulated: Floats, measured: Floats, is_moved: Flags, weights: Floats) -> float:
    """What is to be added to those times that a hop moves, so that all are closest to those measured."""
    low, high = 0.0, float(np.nanmax(measured, initial=0.0))
    best = 0.0
    for _ in range(ZOOMS):
        hops = np.linspace(low, high, HOPS)
        losses = _cauchy(_logs(simulated + hops[:, None] * is_moved, measured), weights)
        best, apart = float(hops[int(losses.argmin())]), (high - low) / (HOPS - 1)
        low, high = max(0.0, best - apart), best + apart
    return best


def _figure(group: FitGroup, times: Floats) -> float:
    """A group's, NaN where one of its times is not known."""
    return float(group.of(times[group.rows]))


def _logs(simulated: Floats, measured: Floats) -> Floats:
    """Logarithms of ratios; NaN where either is 0."""
    usable = (simulated > 0.0) & (measured > 0.0)
    ratios = np.divide(simulated, measured, out=np.full(usable.shape, math.nan), where=usable)
    return np.asarray(np.log(ratios))


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
