"""What a worker's timing samples say of its cost: least squares. Owns the estimate of its four factors and how sure it
is. Needs numpy, so nothing imports it before there are samples.

What the prior says of each sample is a sum of four terms, in seconds: iterations as short as decodes' are (floor), what
more tokens in an iteration take (rise), attention over contexts, attention of long chunks (pair). The factors are those
that make the sums fit best: least squares of logarithms, in which newer samples weigh more and outliers next to
nothing. Where samples cannot distinguish terms, these keep the proportion they have in the prior.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._cost import CostModel
from .cost_factors import DECODE_TOKENS, FACTOR_MAX, PRIOR, Logs

Floats = npt.NDArray[np.float64]

SAMPLES_MIN = 8  # of both kinds together, before anything is known
HALF_LIFE_SAMPLES = 12  # so many samples of its kind later one weighs half
OWN_SHARE_MIN = 0.5  # of a decode's time, by the model, that must be its own and not others' prefills
SURE = 3.0  # standard errors
SPREAD_MIN = 0.1  # of samples, in logarithms; what is smaller is luck
SPREAD_OF_ONE = 1.0  # the same of few, over the root of their number: four factors fit four samples, whatever these are
APART = 1.0  # standard deviation of one factor from all, and of all from 1, before any sample: prior of the fit
TOGETHER = 10.0  # of all far more: with 3, four samples of workers 30 times slower came to 22 times
ROUNDS = 25

(AT, SECONDS, TOKENS, CONTEXT, BATCH, MOMENTS, OTHER, WAITING) = range(8)  # columns of a sample


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


# --- samples ----------------------------------------------------------------------------------------------------------


def rows_of(samples: bytes) -> Floats:
    """Samples as rows, the oldest first."""
    rows = np.frombuffer(samples).reshape(-1, 8)
    return rows[np.argsort(rows[:, AT], kind="stable")]


def estimated(
    prior: CostModel, prefills: Floats, decodes: Floats, since: float, samples_min: int = SAMPLES_MIN
) -> Estimate | None:
    """What samples that ended after `since` say; None where they are too few."""
    parts = CostTerms(prior)
    prefills, decodes = prefills[prefills[:, AT] >= since], decodes[decodes[:, AT] >= since]
    prefill_terms, (decode_terms, use) = prefill_expected(parts, prefills), decode_expected(parts, decodes)
    weights = np.concatenate([_recent(len(prefills)), _recent(int(use.sum()))])
    if len(weights) < samples_min:
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
    least = max(SPREAD_MIN, SPREAD_OF_ONE / math.sqrt(len(logs)))
    found = np.full(4, np.clip(_median(logs - np.log(terms.sum(axis=1)), weights), -limit, limit))
    for _ in range(ROUNDS):
        parts = terms * np.exp(found)
        sums = parts.sum(axis=1)
        errors = logs - np.log(sums)
        spread = max(least, 1.4826 * _median(np.abs(errors), weights))
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
