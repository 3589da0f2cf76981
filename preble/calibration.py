"""What workers really cost, learned from requests' own times. Owns the estimate of two factors for each worker, on the
prefill and on the decode of the cost model it was given, and the rule by which a better model is published.

`_gauges.pyx` notes samples on the hot path; `Calibrator.tick` reads them in the background. docs/calibration.md tells
an operator what is behind it. Knows nothing of requests, prompts or policies.

  1. Each sample is compared with what the worker's prior says of it: log(seconds / seconds predicted).
  2. A factor is the median of these, newer samples weighing more, so that outliers are counted and not felt. A worker
     of which only one of the two is known has it for both.
  3. Workers with the same prior are a group, and its factors are the medians of theirs. They are taken for each of its
     workers, newcomers too, as long as its own are not clearly others.
  4. A group's prior is believed until it is clearly wrong. Factors are rounded, and a model is published only where it
     differs enough from the one that is: workers that are alike stay exactly alike.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ._cost import CostModel
from ._gauges import swap_cost
from .errors import InvalidConfig

Floats = npt.NDArray[np.float64]

SAMPLES_LEAST = 12  # of a kind, before a factor is known
HALF_LIFE_SAMPLES = 8  # so many samples later one weighs half
WORKERS_PER_TICK = 64  # looked at in one tick, in turn; each is some 200 microseconds
OWN_SHARE_LEAST = 0.5  # of a decode's time, by the model, that must be its own and not others' prefills
DECODE_TOKENS = 64  # in a batch, up to which an iteration is taken for one of decodes
KNOTS_MAX = 16
FACTOR_MOST = 1e3
ERROR_MOST = 0.25  # standard error in logarithms; beyond it a factor is not known
STEP = 0.05  # factors are rounded to multiples of it, in logarithms
PRIOR_WRONG = 0.25  # in logarithms: 28 %. The samples' own bias is up to 12 %
OTHER_THAN_GROUP = 0.2
WORTH_PUBLISHING = 0.1
SURE = 2.0  # standard errors

(AT, SECONDS, TOKENS, CONTEXT, BATCH, MOMENTS, OTHER, WAITING) = range(8)  # columns of a sample


@dataclass(frozen=True, slots=True)
class Factors:
    """Logarithms of the factors on a prior's prefill and decode seconds, and their standard errors; infinite: not
    known."""

    prefill: float = 0.0
    decode: float = 0.0
    prefill_error: float = math.inf
    decode_error: float = math.inf

    @property
    def known(self) -> bool:
        """Whether either is."""
        return min(self.prefill_error, self.decode_error) < math.inf

    def differs(self, other: Factors, by: float) -> bool:
        """Whether either factor is surely further from the other's than `by`."""
        return (
            abs(self.prefill - other.prefill) > by + SURE * self.prefill_error
            or abs(self.decode - other.decode) > by + SURE * self.decode_error
        )

    def rounded(self) -> Factors:
        """The same in whole steps."""
        return Factors(round(self.prefill / STEP) * STEP, round(self.decode / STEP) * STEP, 0.0, 0.0)


PRIOR = Factors(0.0, 0.0, 0.0, 0.0)


@dataclass(slots=True)
class _Measured:
    """One worker as the calibrator sees it."""

    index: int
    prior: CostModel
    published: Factors
    found: Factors = field(default_factory=Factors)
    own: bool = False  # its factors are not its group's
    seen: tuple[int, int, int] = (0, 0, 0)
    changes: int = 0


class Calibrator:
    """Estimates and publishes the workers' costs. Its scheduler calls it in single steps, and `tick` without its
    lock."""

    def __init__(self, core: Any, window_seconds: float) -> None:
        self._core = core
        self._window_seconds = window_seconds
        self._workers: dict[str, _Measured] = {}
        self._groups: dict[Hashable, Factors] = {}  # what is taken for a group's workers

    def opened(self, name: str, index: int, prior: CostModel, published: CostModel) -> None:
        """A worker joined, whose decisions reckon with `published`: its prior, unless it was restored."""
        self._workers[name] = _Measured(index, prior, factors_between(prior, published))

    def closed(self, name: str) -> None:
        """A worker left."""
        self._workers.pop(name, None)

    def tick(self, now: float) -> None:
        """Look at new samples of some workers in turn, and publish what changes decisions. Takes the writers' lock for
        microseconds at a time."""
        for name in list(self._workers)[:WORKERS_PER_TICK]:
            self._measure(name, now)
        self._regroup()
        for name in list(self._workers):
            self._publish(name)

    def _measure(self, name: str, now: float) -> None:
        with self._core.tree:
            worker = self._workers.pop(name, None)
            if worker is None:
                return
            self._workers[name] = worker  # in turn: it is the last now
            seen = self._core.gauges.counts(worker.index)
            if seen == worker.seen:
                return
            prefills, decodes = self._core.gauges.samples(worker.index)
        worker.seen = seen
        worker.found = estimated(worker.prior, rows_of(prefills), rows_of(decodes), now - self._window_seconds)

    def _regroup(self) -> None:
        """The factors of each group, moved where that is worth it, and who differs from its group."""
        members: dict[Hashable, list[_Measured]] = {}
        for worker in self._workers.values():
            members.setdefault(key_of(worker.prior), []).append(worker)
        self._groups = {key: self._group(self._groups.get(key, PRIOR), group) for key, group in members.items()}
        for key, group in members.items():
            for worker in group:
                by = 0.5 * OTHER_THAN_GROUP if worker.own else OTHER_THAN_GROUP
                worker.own = worker.found.known and worker.found.differs(self._groups[key], by)

    def _group(self, taken: Factors, group: Iterable[_Measured]) -> Factors:
        known = [worker.found for worker in group if worker.found.known]
        if not known:
            return taken
        found = Factors(
            _middle(factors.prefill for factors in known),
            _middle(factors.decode for factors in known),
            _middle(factors.prefill_error for factors in known),
            _middle(factors.decode_error for factors in known),
        )
        by = PRIOR_WRONG if taken == PRIOR else WORTH_PUBLISHING
        return found.rounded() if found.differs(taken, by) else taken

    def _publish(self, name: str) -> None:
        with self._core.tree:
            worker = self._workers.get(name)
            if worker is None:
                return
            wanted = self._groups.get(key_of(worker.prior), PRIOR)
            if worker.own:
                wanted = worker.found.rounded()
                if not worker.found.differs(worker.published, WORTH_PUBLISHING):
                    return
            if wanted == worker.published:
                return
            swap_cost(self._core.tree, self._core.book, worker.index, scaled(worker.prior, wanted))
            worker.published = wanted
            worker.changes += 1

    def stats(self, name: str) -> dict[str, Any]:
        """What is known of a worker's cost: factors on its prior as measured and as decisions reckon, confidence."""
        worker = self._workers[name]
        found = worker.found
        return {
            "prior": worker.prior.name,
            "prefill_factor": math.exp(worker.published.prefill),
            "decode_factor": math.exp(worker.published.decode),
            "measured_prefill_factor": math.exp(found.prefill) if found.prefill_error < math.inf else None,
            "measured_decode_factor": math.exp(found.decode) if found.decode_error < math.inf else None,
            "prefill_confidence": confidence(found.prefill_error),
            "decode_confidence": confidence(found.decode_error),
            "prefill_samples": worker.seen[0],
            "decode_samples": worker.seen[1],
            "ignored_samples": worker.seen[2],
            "cost_changes": worker.changes,
        }


def confidence(error: float) -> float:
    """How sure a factor is, from 0 to 1: one half where its standard error is 10 %."""
    return 1.0 / (1.0 + 10.0 * error)


# --- samples ----------------------------------------------------------------------------------------------------------


def rows_of(samples: bytes) -> Floats:
    """Samples as rows, the oldest first."""
    rows = np.frombuffer(samples).reshape(-1, 8)
    return rows[np.argsort(rows[:, AT], kind="stable")]


def estimated(prior: CostModel, prefills: Floats, decodes: Floats, since: float) -> Factors:
    """Both factors on a prior from samples that ended after `since`."""
    parts = Parts(prior)
    prefills, decodes = prefills[prefills[:, AT] >= since], decodes[decodes[:, AT] >= since]
    prefill, prefill_error = middle(np.log(prefills[:, SECONDS] / prefill_predicted(parts, prefills)))
    taken = prefill if prefill_error < math.inf else 0.0
    decode, decode_error = middle(decode_ratios(parts, decodes, math.exp(taken)))
    if decode_error == math.inf:
        decode = prefill
    elif prefill_error == math.inf:
        prefill = decode
    return Factors(prefill, decode, prefill_error, decode_error)


def prefill_predicted(parts: Parts, rows: Floats) -> Floats:
    """Seconds the prior gives stretches of prefills: an iteration a moment, with the decodes beside it, and half an
    iteration of these before it where nothing waited."""
    moments = np.maximum(rows[:, MOMENTS], 1.0)
    tokens, context, batch = (rows[:, column] / moments for column in (TOKENS, CONTEXT, BATCH))
    beside = batch * (context.mean() if len(context) else 0.0)
    alone = parts.linear(tokens + batch) + parts.context(context + beside) + parts.pair(tokens, context)
    residue = np.where(batch > 0.0, 0.5 * (parts.linear(batch) + parts.context(beside)), 0.0)
    return np.maximum(moments * alone + rows[:, OTHER] * residue, 1e-9)


def decode_ratios(parts: Parts, rows: Floats, prefill_factor: float) -> Floats:
    """Logarithms of seconds / predicted, of decodes whose time was mostly their own. Iterations that ended another's
    prefill are taken out on both sides."""
    others, batch = rows[:, MOMENTS], rows[:, BATCH]
    beside = parts.context(batch * rows[:, CONTEXT])
    own = np.maximum(rows[:, TOKENS] - others, 0.0) * (parts.linear(batch) + beside)
    chunk = rows[:, OTHER] / np.maximum(others, 1.0)
    mixed = others * (parts.linear(chunk + batch) + beside + parts.pair(chunk, chunk))
    left = rows[:, SECONDS] - prefill_factor * mixed
    use = (own > 0.0) & (left > 0.0) & (own >= OWN_SHARE_LEAST * (own + mixed + rows[:, WAITING]))
    return np.log(left[use] / own[use])


def middle(logs: Floats) -> tuple[float, float]:
    """Median of logarithms, oldest first, in which newer ones weigh more, and its standard error: infinite where there
    are too few, or the median cannot be a factor."""
    logs = logs[np.isfinite(logs)]
    if len(logs) < SAMPLES_LEAST:
        return 0.0, math.inf
    weights = 0.5 ** (np.arange(len(logs))[::-1] / HALF_LIFE_SAMPLES)
    found = weighted_median(logs, weights)
    spread = 1.4826 * weighted_median(np.abs(logs - found), weights)
    count = weights.sum() ** 2 / (weights**2).sum()
    limit = math.log(FACTOR_MOST)
    error = float(1.2533 * spread / math.sqrt(count))
    return min(max(found, -limit), limit), error if error <= ERROR_MOST else math.inf


def weighted_median(values: Floats, weights: Floats) -> float:
    """The value below and above which lies half of the weight."""
    order = np.argsort(values, kind="stable")
    sums = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(sums, 0.5 * sums[-1])])


def _middle(values: Iterable[float]) -> float:
    """The median; of two in the middle the lower, so that of two workers the faster one makes the group."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


# --- cost models ------------------------------------------------------------------------------------------------------


class Parts:
    """The parts of a cost model, for arrays."""

    def __init__(self, model: CostModel) -> None:
        found: dict[str, Any] = model.coefficients()
        self.at = np.array([tokens for tokens, _ in found["knots"]])
        self.seconds = np.array([seconds for _, seconds in found["knots"]])
        self._context = found["context"]
        self._pair = found["pair"]

    def linear(self, tokens: Any) -> Floats:
        """Seconds of the layers that see tokens only; beyond the last knot as between the last two."""
        inside = np.interp(tokens, self.at, self.seconds)
        if len(self.at) == 1:
            return np.asarray(inside)
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.at[-1] - self.at[-2])
        return np.asarray(inside + slope * np.maximum(np.asarray(tokens) - self.at[-1], 0.0))

    def context(self, tokens: Floats) -> Floats:
        """Seconds of attention over a context."""
        start, flat, base, slope = self._context
        return np.where(tokens <= start, flat, base + slope * tokens)

    def pair(self, chunk: Floats, context: Floats) -> Floats:
        """Seconds of attention of a chunk over its context."""
        start, base, q, s, qs = self._pair
        return np.where(chunk * context <= start, 0.0, base + q * chunk + s * context + qs * chunk * context)


def scaled(prior: CostModel, factors: Factors) -> CostModel:
    """A prior times its factors: iterations of up to DECODE_TOKENS tokens and attention over contexts times that of
    decode, longer prefills times that of prefill and at least what the longest decode takes.

    Monotone whatever the factors; where the prior's terms do not allow that apart, both get the factor between.
    """
    if factors == PRIOR:
        return prior
    decode, prefill = math.exp(factors.decode), math.exp(factors.prefill)
    with suppress(InvalidConfig):
        return _times(prior, prefill, decode)
    both = math.sqrt(decode * prefill)
    return _times(prior, both, both)


def _times(prior: CostModel, prefill: float, decode: float) -> CostModel:
    found: dict[str, Any] = prior.coefficients()
    start, *context = found["context"]
    pair_start, *pair = found["pair"]
    return CostModel(
        [(tokens, decode * seconds) for tokens, seconds in found["knots"]]
        if prefill == decode
        else _knots(Parts(prior), prefill, decode),
        context=(start, *(decode * number for number in context)),
        pair=(pair_start, *(prefill * number for number in pair)),
        name=found["name"],
    )


def _knots(parts: Parts, prefill: float, decode: float) -> list[tuple[float, float]]:
    """The linear part with two factors, as knots."""
    least = decode * float(parts.linear(DECODE_TOKENS))
    ends = {0.0, float(DECODE_TOKENS), 2.0 * DECODE_TOKENS, *(float(tokens) for tokens in parts.at)}
    ends.add(2.0 * max(ends))
    ends |= _crossings(parts, sorted(ends), least / prefill)
    ends.add(2.0 * max(ends))
    points = []
    for tokens in _thinned(sorted(ends)):
        seconds = float(parts.linear(tokens))
        points.append((tokens, decode * seconds if tokens <= DECODE_TOKENS else max(least, prefill * seconds)))
    return points


def _crossings(parts: Parts, ends: list[float], seconds: float) -> set[float]:
    """Where the linear part rises above `seconds`, if it does beyond what decodes take."""
    slope = (parts.linear(ends[-1]) - parts.linear(ends[-2])) / (ends[-1] - ends[-2])
    beyond = ends[-1] + (seconds - float(parts.linear(ends[-1]))) / slope if slope > 0.0 else 0.0
    for low, high in zip(ends, [*ends[1:], max(beyond, ends[-1])], strict=True):
        a, b = float(parts.linear(low)), float(parts.linear(high))
        if a < seconds < b and low >= DECODE_TOKENS:
            return {low + (seconds - a) * (high - low) / (b - a)}
    return set()


def _thinned(ends: list[float]) -> list[float]:
    """At most as many as a cost model may have, the first few and the last few among them."""
    if len(ends) <= KNOTS_MAX:
        return ends
    places = np.linspace(0, len(ends) - 1, KNOTS_MAX).round().astype(int)
    return [ends[place] for place in places]


def factors_between(prior: CostModel, published: CostModel) -> Factors:
    """The factors by which a model was published, if it was; read off where each of them rules."""
    if key_of(prior) == key_of(published):
        return PRIOR
    decode = float(Parts(published).linear(1.0)) / max(float(Parts(prior).linear(1.0)), 1e-12)
    prefill = published.prefill_time(65536) / max(prior.prefill_time(65536), 1e-12)
    logs = [math.log(min(max(factor, 1 / FACTOR_MOST), FACTOR_MOST)) for factor in (prefill, decode)]
    return Factors(logs[0], logs[1], 0.0, 0.0).rounded()


def key_of(model: CostModel) -> Hashable:
    """Equal for models that cost the same."""
    found: dict[str, Any] = model.coefficients()
    return tuple(found["knots"]), found["context"], found["pair"]
