"""Fits a cost model to measured iterations. Owns the regression; knows the formula of `CostModel`, not the class.

Time over tokens has a knee (flat while the machine is not busy, then linear) and may have steps where an engine
switches kernels, so the linear part is fitted in two forms: a convex one, bent at powers of two, and a monotone one,
bent at measured token counts. Attention may start only above some product of chunk and context, which is searched
for. Every weight is at least 0, so whatever comes out is monotone; the Bayesian information criterion decides how many
bends the samples are worth. Paper sections 2.1 and 4.2. Needs numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEAST_SECONDS = 1e-6  # what a fitted model charges at the least
BENDS = (64, 128, 256, 512, 1024, 2048)  # of the convex form
CONVEX_END = 8192.0  # its last knot: beyond it goes on as a line
KNOTS_MAX = 16
THRESHOLDS_MAX = 64  # products of chunk and context that are tried as where attention starts
THRESHOLDS_KEPT = 3
SMALLEST_ERROR = 1e-4  # relative; nothing is gained by fitting closer than this


@dataclass(frozen=True, slots=True)
class Samples:
    """Measured iterations, one row each: `count` sequences, each with `chunk` new tokens ending at `context`."""

    count: Floats
    chunk: Floats
    context: Floats
    seconds: Floats

    @property
    def tokens(self) -> Floats:
        """New tokens of the whole batch."""
        return self.count * self.chunk


@dataclass(frozen=True, slots=True)
class Fit:
    """Weights of one form: `knots` is where its linear part bends, `threshold` where attention starts."""

    weights: Floats
    residuals: Floats  # relative
    knots: tuple[float, ...]
    convex: bool
    threshold: float

    @property
    def score(self) -> float:
        """The information criterion: lower is better, and every weight in use counts against it."""
        rows = len(self.residuals)
        spread = float(self.residuals @ self.residuals) / rows + SMALLEST_ERROR**2
        return float(rows * np.log(spread) + np.count_nonzero(self.weights) * np.log(rows))


def fitted(
    prefills: Sequence[tuple[float, float, float]], decodes: Sequence[tuple[float, float, float]]
) -> dict[str, object]:
    """`knots`, `context` and `pair` of `CostModel`, in seconds and tokens.

    `prefills`: (missed tokens, context tokens, seconds > 0) of single prompts; `decodes`: (batch, context tokens of
    each, seconds > 0). At least one row in total.
    """
    rows = [(1.0, missed, max(missed, context), seconds) for missed, context, seconds in prefills]
    rows += [(batch, 1.0, context, seconds) for batch, context, seconds in decodes]
    samples = Samples(*np.asarray(rows, np.float64).T)
    thresholds = [0.0, *_likely_thresholds(samples)]
    fits = [_solve(samples, (0.0, *BENDS, CONVEX_END), threshold, convex=True) for threshold in thresholds]
    for threshold in thresholds:
        fits.extend(_bent_where_it_errs(samples, threshold))
    return _coefficients(min(fits, key=lambda fit: fit.score))


def _likely_thresholds(samples: Samples) -> list[float]:
    """The products of chunk and context, above which attention may start, that explain the samples best."""
    products = np.unique((samples.chunk * samples.context)[samples.chunk > 1])[:-1]
    if not len(products):
        return []
    tried = products[np.unique(np.linspace(0, len(products) - 1, THRESHOLDS_MAX).astype(int))]
    knots = _spread(samples)
    fits = [_solve(samples, knots, float(threshold)) for threshold in tried]
    return [fit.threshold for fit in sorted(fits, key=lambda fit: fit.score)[:THRESHOLDS_KEPT]]


def _possible_knots(samples: Samples) -> Floats:
    """Measured token counts at which the linear part may bend.

    None but the last lies in the upper half of the range: the last two say how it goes on beyond, and a short piece
    would make a line of noise.
    """
    tokens = np.unique(samples.tokens)
    possible: Floats = np.unique(np.concatenate((tokens[tokens <= tokens[-1] / 2], tokens[-1:])))
    return possible


def _spread(samples: Samples) -> tuple[float, ...]:
    """As many possible knots as are allowed, evenly chosen."""
    possible = _possible_knots(samples)
    chosen = np.unique(np.linspace(0, len(possible) - 1, KNOTS_MAX).astype(int))
    return tuple(possible[chosen].tolist())


def _bent_where_it_errs(samples: Samples, threshold: float) -> list[Fit]:
    """Fits with more and more knots, each one added at the possible place where the one before errs most."""
    possible = _possible_knots(samples)
    knots = {float(possible[0]), float(possible[-1])}
    fits: list[Fit] = []
    while True:
        fits.append(_solve(samples, tuple(sorted(knots)), threshold))
        missing = np.isin(samples.tokens, possible) & ~np.isin(samples.tokens, list(knots))
        if len(knots) == KNOTS_MAX or not missing.any():
            return fits
        knots.add(float(samples.tokens[np.argmax(np.where(missing, np.abs(fits[-1].residuals), -1.0))]))


def _solve(samples: Samples, knots: tuple[float, ...], threshold: float, *, convex: bool = False) -> Fit:
    linear = _hinges(samples.tokens, knots) if convex else _ramps(samples.tokens, knots)
    features = np.column_stack(
        [np.ones(len(samples.seconds)), samples.count * samples.context, *_pairs(samples, threshold), *linear]
    )
    scaled = features / samples.seconds[:, None]
    weights = non_negative_least_squares(scaled, np.ones(len(scaled)))
    return Fit(weights, scaled @ weights - 1.0, knots, convex, threshold)


def _pairs(samples: Samples, threshold: float) -> list[Floats]:
    """The four columns of attention over a chunk. Without a threshold three of them say what others say already."""
    chunk, context = samples.chunk, samples.context
    active = samples.count * (chunk * context > threshold)
    whole = active * chunk * context
    return [active * 0.0] * 3 + [whole] if threshold == 0 else [active, active * chunk, active * context, whole]


def _hinges(tokens: Floats, knots: tuple[float, ...]) -> list[Floats]:
    """One slope that starts at each knot but the last: with weights of at least 0, a convex line."""
    return [np.maximum(tokens - knot, 0.0) for knot in knots[:-1]]


def _ramps(tokens: Floats, knots: tuple[float, ...]) -> list[Floats]:
    """One rise from 0 to 1 between neighbours: with weights of at least 0, a monotone line. The last goes on rising."""
    rises = [np.maximum((tokens - low) / (high - low), 0.0) for low, high in zip(knots, knots[1:], strict=False)]
    return [np.minimum(rise, 1.0) for rise in rises[:-1]] + rises[-1:]


def _coefficients(fit: Fit) -> dict[str, object]:
    """Turn weights into knots and slopes. No iteration is free."""
    constant, context, *pair = fit.weights[:6].tolist()
    at = np.asarray(fit.knots)
    parts = _hinges(at, fit.knots) if fit.convex else _ramps(at, fit.knots)
    rises = sum((weight * part for weight, part in zip(fit.weights[6:], parts, strict=True)), np.zeros(len(at)))
    seconds = np.maximum.accumulate(max(constant, LEAST_SECONDS) + rises)
    return {
        "knots": list(zip(at.tolist(), seconds.tolist(), strict=True)),
        "context": (0.0, 0.0, 0.0, context),
        "pair": (fit.threshold, *pair),
    }


def non_negative_least_squares(features: Floats, target: Floats) -> Floats:
    """The weights >= 0, one a column, whose sum of columns is nearest to `target` [rows] (Lawson and Hanson, 1974).

    Columns are let in one by one where they help most; whichever would fall below 0 leaves again. O(columns) solutions
    as a rule, and never more than three times the columns; the last feasible weights are returned at that bound.
    """
    norms: Floats = np.maximum(np.linalg.norm(features, axis=0), 1e-300)
    scaled: Floats = features / norms
    weights: Floats
    used: npt.NDArray[np.bool_]
    weights, used = np.zeros(scaled.shape[1]), np.zeros(scaled.shape[1], bool)
    for _ in range(3 * scaled.shape[1]):
        gain = np.where(used, -np.inf, scaled.T @ (target - scaled @ weights))
        best = int(np.argmax(gain))
        if used.all() or gain[best] <= 1e-12 * max(1.0, float(np.linalg.norm(target))):
            break
        used[best] = True
        weights = _feasible(scaled, target, weights, used)
    return weights / norms


def _feasible(scaled: Floats, target: Floats, weights: Floats, used: npt.NDArray[np.bool_]) -> Floats:
    """The least-squares weights of the columns in use, after those have left (in `used`) that it made negative."""
    while used.any():
        solution = np.zeros(len(weights))
        solution[used] = np.linalg.lstsq(scaled[:, used], target, rcond=None)[0]
        negative = used & (solution <= 0)
        if not negative.any():
            return solution
        step = np.min(weights[negative] / np.maximum(weights[negative] - solution[negative], 1e-300))
        weights = np.maximum(weights + step * (solution - weights), 0.0)
        used &= (weights > 1e-15) & ~(negative & (weights <= 1e-15))
    return np.zeros(len(weights))
