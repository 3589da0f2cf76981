"""What a worker's timing samples say of its cost: least squares. Owns the estimate of its five factors and how sure it
is. Needs numpy, so nothing imports it before there are samples.

What the prior says of each sample is a sum of five terms, in seconds: iterations as short as decodes' are, without a
prefill in them (floor) and with one (start), what more tokens in an iteration take (rise), attention over contexts,
attention of long chunks (pair). The factors are those that make the sums fit best: least squares of logarithms, in
which newer samples weigh more and outliers next to nothing. Where samples cannot distinguish terms, these keep the
proportion they have in the prior.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from operator import mul

import numpy as np
import numpy.typing as npt

from .._cost import CostModel
from .cost_factors import FACTOR_MAX, PRIOR, Logs
from .fits.robust_fit import robust_factors
from .fits.sample_terms import decode_terms, prefill_terms

Floats = npt.NDArray[np.float64]
Covariance = list[list[float]]  # shape [5, 5]

SAMPLES_MIN = 8  # of both kinds together, before anything is known
HALF_LIFE_SAMPLES = 12  # so many samples of its kind later one weighs half
OWN_SHARE_MIN = 0.5  # of a decode's time, by the model, that must be its own and not others' prefills
SURE = 3.0  # standard errors
MEDIAN_VARIANCE = math.pi / 2.0  # of a median, as a multiple of a mean's
SPREAD_MIN = 0.1  # of samples, in logarithms; what is smaller is luck
SPREAD_OF_ONE = 1.0  # the same of few, over the root of their number: five factors fit five samples, whatever these are
APART = 1.0  # standard deviation of one factor from all, and of all from 1, before any sample: prior of the fit
TOGETHER = 10.0  # of all far more: with 3, four samples of workers 30 times slower came to 22 times
NEAR = 1.0  # of start from floor: what a prefill adds to an iteration is as likely nothing as more than all of it
FREE = APART**2 * np.eye(5)
FREE[0, 4] = FREE[4, 0] = APART**2
FREE[4, 4] += NEAR**2
RIDGE: Floats = np.linalg.inv((FREE + TOGETHER**2 * np.ones((5, 5))).astype(np.float64))

AT, SECONDS = 0, 1  # columns of a sample; the others are read in `fits/sample_terms.pyx`
BATCH_OF_EIGHT = np.array([[0.0, 0.0, 1.0, 512.0, 8.0, 0.0, 0.0, 0.0]])  # a decode's sample, of one iteration


@dataclass(frozen=True, slots=True)
class Estimate:
    """What samples say of a worker: its factors, and, for its usual prefill and decode iteration, the prior's terms and
    how sure the fit is of their sums (standard errors of logarithms)."""

    logs: Logs
    prefill_terms: Logs  # seconds
    decode_terms: Logs
    prefill_error: float
    decode_error: float

    def factors(self, logs: Logs) -> tuple[float, float]:
        """Logarithms of what these factors make of the usual prefill and decode, as parts of the prior's."""
        return _gain(self.prefill_terms, logs), _gain(self.decode_terms, logs)

    def differs(self, logs: Logs, by: float) -> bool:
        """Whether prefill or decode is surely further from what these factors say than `by`."""
        prefill, decode = self._distances(logs)
        return prefill > by + SURE * self.prefill_error or decode > by + SURE * self.decode_error

    def is_other(self, middle: Estimate, workers: int, by: float) -> bool:
        """Whether prefill or decode is surely further from those of the middle one of so many workers than `by`: what
        is middle is not sure, either, but the more so the more there are."""
        share = min(1.0, MEDIAN_VARIANCE / workers)
        errors = ((self.prefill_error, middle.prefill_error), (self.decode_error, middle.decode_error))
        limits = (by + SURE * math.hypot(own, other * math.sqrt(share)) for own, other in errors)
        return any(distance > limit for distance, limit in zip(self._distances(middle.logs), limits, strict=True))

    def is_apart(self, logs: Logs, by: float) -> bool:
        """Whether prefill or decode is further from what these factors say than `by`, as far as is known."""
        return max(self._distances(logs)) > by

    def _distances(self, logs: Logs) -> tuple[float, float]:
        """How far prefill and decode are from what these factors say."""
        (prefill, decode), (other_prefill, other_decode) = self.factors(self.logs), self.factors(logs)
        return abs(prefill - other_prefill), abs(decode - other_decode)


# --- samples ----------------------------------------------------------------------------------------------------------


def rows_of(samples: bytes) -> Floats:
    """Samples as rows, the oldest first."""
    rows = np.frombuffer(samples).reshape(-1, 8)
    return rows[np.argsort(rows[:, AT], kind="stable")]


def estimated(
    prior: CostModel, prefills: Floats, decodes: Floats, since: float, samples_min: int = SAMPLES_MIN
) -> Estimate | None:
    """What samples that ended after `since` say; None where they are too few."""
    prefills, decodes = prefills[prefills[:, AT] >= since], decodes[decodes[:, AT] >= since]
    prefill, (decode, use) = prefill_terms(prior, prefills), decode_terms(prior, decodes, OWN_SHARE_MIN)
    decode, decode_seconds = decode[use], decodes[use, SECONDS]
    prefill_weights, decode_weights = _recent(len(prefill)), _recent(len(decode))
    weights = np.concatenate([prefill_weights, decode_weights])
    if len(weights) < samples_min:
        return None
    seconds = np.concatenate([prefills[:, SECONDS], decode_seconds])
    logs, doubt = fitted(np.concatenate([prefill, decode]), seconds, weights)
    usual_prefill = _usual(prefill, prefill_weights, prior)
    usual_decode = _usual(decode, decode_weights, prior)
    errors = _error(usual_prefill, logs, doubt), _error(usual_decode, logs, doubt)
    return Estimate(logs, usual_prefill, usual_decode, *errors)


@lru_cache(maxsize=256)
def _recent(count: int) -> Floats:
    """The weights of so many samples, the newest last. Not to be written to."""
    return np.asarray(0.5 ** (np.arange(count)[::-1] / HALF_LIFE_SAMPLES))


def _usual(terms: Floats, weights: Floats, prior: CostModel) -> Logs:
    """The terms of a worker's usual sample of a kind; where it has none, of a batch of eight."""
    found = weights @ terms / weights.sum() if len(weights) else decode_terms(prior, BATCH_OF_EIGHT, 0.0)[0][0]
    floor, rise, context, pair, start = found.tolist()
    return floor, rise, context, pair, start


def fitted(terms: Floats, seconds: Floats, weights: Floats) -> tuple[Logs, Covariance]:
    """Logarithms of the factors under which the terms' sums are closest to the seconds, and their covariance.

    The ridge, factors near each other, keeps apart nothing that the samples do not.
    """
    limit = math.log(FACTOR_MAX)
    known = robust_factors(
        np.ascontiguousarray(terms),
        seconds,
        weights,
        RIDGE,
        spread_min=SPREAD_MIN,
        spread_of_one=SPREAD_OF_ONE,
        limit=limit,
    )
    return (PRIOR, np.linalg.inv(RIDGE).tolist()) if known is None else known


def _gain(terms: Logs, logs: Logs) -> float:
    """Logarithm of what factors make of a sum of terms."""
    total = sum(terms)
    return math.log(sum(_parts(terms, logs)) / total) if total > 0.0 else 0.0


def _error(terms: Logs, logs: Logs, covariance: Covariance) -> float:
    """Standard error of the logarithm of a sum of terms."""
    parts = _parts(terms, logs)
    total = max(sum(parts), 1e-300)
    slopes = [part / total for part in parts]
    variance = sum(one * sum(map(mul, row, slopes)) for one, row in zip(slopes, covariance, strict=True))
    return math.sqrt(max(variance, 0.0))


def _parts(terms: Logs, logs: Logs) -> list[float]:
    return [term * math.exp(log) for term, log in zip(terms, logs, strict=True)]
