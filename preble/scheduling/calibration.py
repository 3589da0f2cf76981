"""What workers really cost, learned from requests' own times. Owns the estimate of four factors for each worker, on the
terms of the cost model it was given, and the rule by which a better model is published.

`_placement/timing_samples.pyx` notes samples on the hot path; `Calibrator.tick` reads them in the background.
docs/calibration.md explains to an operator what is behind it. Knows nothing of requests, prompts or policies.

  1. What the prior says of each sample is a sum of four terms, in seconds: iterations as short as decodes' are (floor),
     what more tokens in an iteration take (rise), attention over contexts, attention of long chunks (pair). The factors
     are those that make the sums fit best: least squares of logarithms, in which newer samples weigh more and outliers
     next to nothing. Where samples cannot distinguish terms, these keep the proportion they have in the prior.
  2. Workers with the same prior are a group, and the factors of its middle worker are taken for all of them, newcomers
     too, as long as a worker's own are not clearly others. Where few are measured, nobody else is taken for slower than
     they are: who looks slow without a sample gets no request, and without one no sample.
  3. A prior is kept until it is clearly wrong for what the worker usually does, and a model is published only where
     it differs enough from the one that is: workers that are alike stay exactly alike.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._cost import CostModel
from .._placement.timing_samples import swap_cost
from ..errors import InvalidConfig

Floats = npt.NDArray[np.float64]
Logs = tuple[float, float, float, float]  # logarithms of the factors on floor, rise, context and pair

SAMPLES_MIN = 8  # of both kinds together, before anything is known
HALF_LIFE_SAMPLES = 12  # so many samples of its kind later one weighs half
FRESH_MIN = 16  # samples since the last fit, for another one at once
FIT_AGAIN_SECONDS = 10.0  # for fewer
WORKERS_PER_TICK = 32  # looked at in one tick, in turn; each is some milliseconds
OWN_SHARE_MIN = 0.5  # of a decode's time, by the model, that must be its own and not others' prefills
DECODE_TOKENS = 64  # in a batch, up to which an iteration is taken for one of decodes
KNOTS_MAX = 16
FACTOR_MAX = 1e3
STEP = 0.05  # factors are rounded to multiples of it, in logarithms
PRIOR_WRONG = 0.5  # in logarithms: 65 %. The samples' own bias is up to 25 % where a fleet is overloaded
OTHER_THAN_GROUP = 0.5
WORTH_PUBLISHING = 0.1
SURE = 3.0  # standard errors
SPREAD_MIN = 0.1  # of samples, in logarithms; what is smaller is luck
APART = 1.5  # standard deviation of one factor from all, and of all from 1, before any sample: prior of the fit
TOGETHER = 3.0
ROUNDS = 25

(AT, SECONDS, TOKENS, CONTEXT, BATCH, MOMENTS, OTHER, WAITING) = range(8)  # columns of a sample
PRIOR: Logs = (0.0, 0.0, 0.0, 0.0)

# For an engine about which nothing is known: of the shape that measured ones have, of a size between theirs, and not
# relied on, so that it gives way as soon as there are samples.
NEUTRAL = CostModel(
    [(0, 0.02), (256, 0.02), (8192, 0.64)],
    context=(0.0, 0.0, 0.0, 1e-6),
    pair=(0.0, 0.0, 0.0, 0.0, 1e-9),
    name="neutral",
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What samples say of a worker: its factors, and, for its usual prefill and decode iteration, the prior's terms and
    how sure the fit is of their sums (standard errors of logarithms)."""

    logs: Logs
    prefill_terms: Floats
    decode_terms: Floats
    prefill_error: float
    decode_error: float

    def factors(self, logs: Logs) -> tuple[float, float]:
        """Logarithms of what these factors make of the usual prefill and decode, as parts of the prior's."""
        return _gain(self.prefill_terms, logs), _gain(self.decode_terms, logs)

    def differs(self, logs: Logs, by: float) -> bool:
        """Whether prefill or decode is surely further from what these factors say than `by`."""
        (prefill, decode), (other_prefill, other_decode) = self.factors(self.logs), self.factors(logs)
        return (
            abs(prefill - other_prefill) > by + SURE * self.prefill_error
            or abs(decode - other_decode) > by + SURE * self.decode_error
        )


@dataclass(slots=True)
class _Measured:
    """One worker as the calibrator sees it."""

    index: int
    prior: CostModel
    key: Hashable  # equal for equal priors
    published: Logs
    found: Estimate | None = None
    own: bool = False  # its factors are not its group's
    seen: tuple[int, int, int] = (0, 0, 0)
    changes: int = 0
    fitted_at: float = -math.inf


class Calibrator:
    """Estimates and publishes the workers' costs. Its scheduler calls it in single steps, and `tick` without its
    lock."""

    def __init__(self, core: Any, window_seconds: float) -> None:
        self._core = core
        self._window_seconds = window_seconds
        self._workers: dict[str, _Measured] = {}
        self._groups: dict[Hashable, Logs] = {}  # what is taken for a group's workers
        self._unmeasured: dict[Hashable, Logs] = {}  # and for those of them without samples

    def opened(self, name: str, index: int, prior: CostModel, published: CostModel) -> None:
        """A worker joined, whose decisions reckon with `published`: its prior, unless it was restored."""
        logs = logs_between(prior, published)
        worker = _Measured(index, prior, key_of(prior), logs)
        self._workers[name] = worker
        self._groups.setdefault(worker.key, logs)

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
            seen = self._core.timings.counts(worker.index)
            fresh = sum(seen) - sum(worker.seen)
            if not fresh or (fresh < FRESH_MIN and abs(now - worker.fitted_at) < FIT_AGAIN_SECONDS):
                return
            prefills, decodes = self._core.timings.samples(worker.index)
        worker.seen = seen
        worker.fitted_at = now
        found = estimated(worker.prior, rows_of(prefills), rows_of(decodes), now - self._window_seconds)
        worker.found = worker.found if found is None else found

    def _regroup(self) -> None:
        """The factors of each group, moved where that is worth it, and who differs from its group."""
        members: dict[Hashable, list[_Measured]] = {}
        with self._core.tree:
            for worker in self._workers.values():
                members.setdefault(worker.key, []).append(worker)
            self._groups = {key: _of_group(self._groups.get(key, PRIOR), group) for key, group in members.items()}
        for key, group in members.items():
            for worker in group:
                by = 0.5 * OTHER_THAN_GROUP if worker.own else OTHER_THAN_GROUP
                worker.own = worker.found is not None and worker.found.differs(self._groups[key], by)
            self._unmeasured[key] = _of_unmeasured(self._groups[key], group)

    def _publish(self, name: str) -> None:
        with self._core.tree:
            worker = self._workers.get(name)
            if worker is None:
                return
            wanted = (self._unmeasured if worker.found is None else self._groups).get(worker.key, PRIOR)
            if worker.own and worker.found is not None:
                wanted = _rounded(worker.found.logs)
                if not worker.found.differs(worker.published, WORTH_PUBLISHING):
                    return
            if wanted == worker.published:
                return
            swap_cost(self._core.tree, self._core.loads, worker.index, scaled(worker.prior, wanted))
            worker.published = wanted
            worker.changes += 1

    def stats(self, name: str) -> dict[str, Any]:
        """What is known of a worker's cost: the model that decisions reckon with, as coefficients; the factors on its
        prior for the usual prefill and decode, as they reckon and as measured; and how sure these are, from 0 to 1."""
        worker = self._workers[name]
        found = worker.found
        taken = (0.0, 0.0) if found is None else found.factors(worker.published)
        factors = (None, None) if found is None else tuple(math.exp(log) for log in found.factors(found.logs))
        return {
            **scaled(worker.prior, worker.published).coefficients(),
            "prefill_factor": math.exp(taken[0]),
            "decode_factor": math.exp(taken[1]),
            "measured_prefill_factor": factors[0],
            "measured_decode_factor": factors[1],
            "prefill_confidence": 0.0 if found is None else confidence(found.prefill_error),
            "decode_confidence": 0.0 if found is None else confidence(found.decode_error),
            "prefill_samples": worker.seen[0],
            "decode_samples": worker.seen[1],
            "ignored_samples": worker.seen[2],
            "cost_changes": worker.changes,
        }


def confidence(error: float) -> float:
    """How sure a factor is, from 0 to 1: one half where its standard error is 10 %."""
    return 1.0 / (1.0 + 10.0 * error)


def _of_group(taken: Logs, group: list[_Measured]) -> Logs:
    """The factors of a group's middle worker, where they are worth a change. Of two in the middle it is the faster
    one's."""
    known = [worker.found for worker in group if worker.found is not None]
    if 2 * len(known) <= len(group):  # else the first one known would speak for all
        return taken
    known.sort(key=lambda found: sum(found.factors(found.logs)))
    found = known[(len(known) - 1) // 2]
    kept = taken == PRIOR and group[0].prior.name != NEUTRAL.name
    by = PRIOR_WRONG if kept else WORTH_PUBLISHING
    return _rounded(found.logs) if found.differs(taken, by) else taken


def _of_unmeasured(taken: Logs, group: list[_Measured]) -> Logs:
    """What decisions reckon with for the middle one of those that are measured, where that is faster than what is taken
    for the group: a worker that nobody has tried must not look slower than those that were."""
    known = [(sum(worker.found.factors(worker.published)), worker) for worker in group if worker.found is not None]
    if not known:
        return taken
    known.sort(key=lambda pair: pair[0])
    gain, worker = known[(len(known) - 1) // 2]
    found = worker.found
    assert found is not None
    return worker.published if gain < sum(found.factors(taken)) else taken


def _rounded(logs: Logs) -> Logs:
    floor, rise, context, pair = (round(log / STEP) * STEP for log in logs)
    return floor, rise, context, pair


# --- samples ----------------------------------------------------------------------------------------------------------


def rows_of(samples: bytes) -> Floats:
    """Samples as rows, the oldest first."""
    rows = np.frombuffer(samples).reshape(-1, 8)
    return rows[np.argsort(rows[:, AT], kind="stable")]


def estimated(prior: CostModel, prefills: Floats, decodes: Floats, since: float) -> Estimate | None:
    """What samples that ended after `since` say; None where they are too few."""
    parts = CostTerms(prior)
    prefills, decodes = prefills[prefills[:, AT] >= since], decodes[decodes[:, AT] >= since]
    prefill_terms, (decode_terms, use) = prefill_expected(parts, prefills), decode_expected(parts, decodes)
    weights = np.concatenate([_recent(len(prefills)), _recent(int(use.sum()))])
    if len(weights) < SAMPLES_MIN:
        return None
    seconds = np.concatenate([prefills[:, SECONDS], decodes[use, SECONDS]])
    logs, doubt = fitted(np.concatenate([prefill_terms, decode_terms[use]]), seconds, weights)
    few = parts.terms([8.0], [4096.0], [0.0])[0]  # a batch of eight, where nothing is known of batches
    prefill = _usual(prefill_terms, _recent(len(prefills)), few)
    decode = _usual(decode_terms[use], _recent(int(use.sum())), few)
    return Estimate(logs, prefill, decode, _error(prefill, logs, doubt), _error(decode, logs, doubt))


def _recent(count: int) -> Floats:
    return np.asarray(0.5 ** (np.arange(count)[::-1] / HALF_LIFE_SAMPLES))


def _usual(terms: Floats, weights: Floats, instead: Floats) -> Floats:
    """The terms of a worker's usual sample of a kind; `instead` where it has none."""
    return np.asarray(weights @ terms / weights.sum()) if len(weights) else instead


def prefill_expected(parts: CostTerms, rows: Floats) -> Floats:
    """The prior's terms of stretches of prefills: an iteration a moment, with the decodes beside it, and half an
    iteration of these before it where nothing waited."""
    moments = np.maximum(rows[:, MOMENTS], 1.0)
    tokens, context, batch = (rows[:, column] / moments for column in (TOKENS, CONTEXT, BATCH))
    beside = batch * (context.mean() if len(context) else 0.0)
    alone = parts.terms(tokens + batch, context + beside, tokens, context)
    residue = np.where(batch > 0.0, 0.5 * rows[:, OTHER], 0.0)
    return moments[:, None] * alone + residue[:, None] * parts.terms(batch, beside, 0.0 * batch)


def decode_expected(parts: CostTerms, rows: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """The prior's terms of decodes, with the iterations that ended others' prefills, and which rows can be used: not
    those that stood mostly beside prefills, of which one knows when they ended and not when they began."""
    others, batch = rows[:, MOMENTS], rows[:, BATCH]
    beside, chunk = batch * rows[:, CONTEXT], rows[:, OTHER] / np.maximum(others, 1.0)
    own = np.maximum(rows[:, TOKENS] - others, 0.0)[:, None] * parts.terms(batch, beside, 0.0 * batch)
    mixed = others[:, None] * parts.terms(chunk + batch, chunk + beside, chunk)
    alone, shared = own.sum(axis=1), mixed.sum(axis=1)
    return own + mixed, alone >= OWN_SHARE_MIN * (alone + shared + rows[:, WAITING])


def fitted(terms: Floats, seconds: Floats, weights: Floats) -> tuple[Logs, Floats]:
    """Logarithms of the factors under which the terms' sums are closest to the seconds, and their covariance.

    Gauss-Newton on log(seconds / sum), each sample weighed by 1 / (1 + (its error / 2 spreads)^2) anew each round. The
    ridge, factors near each other, keeps apart nothing that the samples do not.
    """
    usable = np.isfinite(seconds) & (seconds > 0.0) & (terms.sum(axis=1) > 0.0)
    terms, logs, weights = terms[usable], np.log(seconds[usable]), weights[usable]
    ridge = np.linalg.inv(APART**2 * np.eye(4) + TOGETHER**2 * np.ones((4, 4)))
    limit, covariance = math.log(FACTOR_MAX), np.linalg.inv(ridge)
    if not len(logs):
        return PRIOR, covariance
    found = np.full(4, np.clip(_median(logs - np.log(terms.sum(axis=1)), weights), -limit, limit))
    for _ in range(ROUNDS):
        parts = terms * np.exp(found)
        sums = parts.sum(axis=1)
        errors = logs - np.log(sums)
        spread = max(SPREAD_MIN, 1.4826 * _median(np.abs(errors), weights))
        sure = weights / (1.0 + (errors / (2.0 * spread)) ** 2) / spread**2
        slopes = parts / sums[:, None]
        covariance = np.linalg.inv(slopes.T @ (sure[:, None] * slopes) + ridge)
        step = np.clip(covariance @ (slopes.T @ (sure * errors) - ridge @ found), -1.0, 1.0)
        found = np.clip(found + step, -limit, limit)
        if np.abs(step).max() < 1e-3:
            break
    floor, rise, context, pair = (float(log) for log in found)
    return (floor, rise, context, pair), covariance


def _gain(terms: Floats, logs: Logs) -> float:
    """Logarithm of what factors make of a sum of terms."""
    return math.log(float(terms @ np.exp(logs)) / float(terms.sum())) if terms.sum() > 0.0 else 0.0


def _error(terms: Floats, logs: Logs, covariance: Floats) -> float:
    """Standard error of the logarithm of a sum of terms."""
    parts = terms * np.exp(logs)
    slopes = parts / max(float(parts.sum()), 1e-300)
    return math.sqrt(max(float(slopes @ covariance @ slopes), 0.0))


def _median(values: Floats, weights: Floats) -> float:
    """The value below and above which lies half of the weight."""
    order = np.argsort(values, kind="stable")
    sums = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(sums, 0.5 * sums[-1])])


# --- cost models ------------------------------------------------------------------------------------------------------


class CostTerms:
    """The terms of a cost model, for arrays."""

    def __init__(self, model: CostModel) -> None:
        found: dict[str, Any] = model.coefficients()
        self.at = np.array([tokens for tokens, _ in found["knots"]])
        self.seconds = np.array([seconds for _, seconds in found["knots"]])
        self.context: tuple[float, ...] = found["context"]
        self.pair: tuple[float, ...] = found["pair"]

    def linear(self, tokens: Any) -> Floats:
        """Seconds of the layers that see tokens only; beyond the last knot as between the last two."""
        inside = np.interp(tokens, self.at, self.seconds)
        if len(self.at) == 1:
            return np.asarray(inside)
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.at[-1] - self.at[-2])
        return np.asarray(inside + slope * np.maximum(np.asarray(tokens) - self.at[-1], 0.0))

    def terms(self, tokens: Any, context: Any, chunk: Any, chunk_context: Any = None) -> Floats:
        """Rows of (floor, rise, context, pair) seconds of iterations of so many tokens, over contexts that sum up to
        `context`, one chunk of a prefill among them."""
        tokens, context, chunk = np.asarray(tokens), np.asarray(context), np.asarray(chunk)
        floor = self.linear(np.minimum(tokens, DECODE_TOKENS))
        last = np.maximum(chunk, context if chunk_context is None else chunk_context)
        terms = [floor, self.linear(tokens) - floor, self.context_seconds(context), self.pair_seconds(chunk, last)]
        return np.stack(terms, axis=1)

    def context_seconds(self, context: Floats) -> Floats:
        """Seconds of attention over contexts that sum up to so many tokens."""
        start, flat, base, slope = self.context
        return np.where(context <= start, flat, base + slope * context)

    def pair_seconds(self, chunk: float | Floats, last: Floats) -> Floats:
        """Seconds of attention of chunks that end at so many tokens; of an empty one none."""
        start, base, q, s, qs = self.pair
        return np.where(chunk * last > max(start, 0.0), base + q * chunk + s * last + qs * chunk * last, 0.0)


def scaled(prior: CostModel, logs: Logs) -> CostModel:
    """A prior with its terms times the factors. Monotone, positive and finite whatever these are: only the pair term
    may fall in one of its tokens, and where the others do not make up for it, it gets the least factor of all."""
    if logs == PRIOR:
        return prior
    floor, rise, context, pair = (math.exp(log) for log in logs)
    with suppress(InvalidConfig):
        return _times(prior, floor, rise, context, pair)
    return _times(prior, floor, rise, context, min(floor, rise, context, pair))


def _times(prior: CostModel, floor: float, rise: float, context: float, pair: float) -> CostModel:
    found: dict[str, Any] = prior.coefficients()
    parts = CostTerms(prior)
    least = float(parts.linear(DECODE_TOKENS))
    points = []
    for tokens in _ends(parts):
        short = float(parts.linear(min(tokens, float(DECODE_TOKENS))))
        points.append((tokens, floor * short + rise * max(float(parts.linear(tokens)) - least, 0.0)))
    context_from, *rest = found["context"]
    pair_from, *pairs = found["pair"]
    return CostModel(
        points,
        context=(context_from, *(context * number for number in rest)),
        pair=(pair_from, *(pair * number for number in pairs)),
        name=found["name"],
    )


def _ends(parts: CostTerms) -> list[float]:
    """The knots of a scaled model: the prior's, and where decodes end. Where these are more than there may be, one goes
    that is inside."""
    ends = sorted({*(float(tokens) for tokens in parts.at), float(DECODE_TOKENS)})
    if ends[-1] <= DECODE_TOKENS:
        ends.append(2.0 * DECODE_TOKENS)
    while len(ends) > KNOTS_MAX:
        inside = [at for at in range(1, len(ends) - 2) if ends[at] != DECODE_TOKENS]
        del ends[min(inside, key=lambda at: ends[at + 1] - ends[at - 1])]
    return ends


def logs_between(prior: CostModel, published: CostModel) -> Logs:
    """The factors with which a model was made from its prior, by `scaled`."""
    pairs = list(zip(_marks(prior), _marks(published), strict=True))
    logs = [math.log(after / before) if before > 0.0 and after > 0.0 else None for before, after in pairs]
    instead = next((log for log in logs if log is not None), 0.0)
    limit = math.log(FACTOR_MAX)
    floor, rise, context, pair = (min(max(instead if log is None else log, -limit), limit) for log in logs)
    return _rounded((floor, rise, context, pair))


def _marks(model: CostModel) -> tuple[float, float, float, float]:
    """A number of each term that its factor multiplies."""
    parts, found = CostTerms(model), model.coefficients()
    floor = float(parts.linear(DECODE_TOKENS))
    return floor, float(parts.linear(65536.0)) - floor, found["context"][3], found["pair"][4]  # type: ignore[index]


def key_of(model: CostModel) -> Hashable:
    """Equal for models of one name that cost the same."""
    found: dict[str, Any] = model.coefficients()
    return found["name"], tuple(found["knots"]), found["context"], found["pair"]
