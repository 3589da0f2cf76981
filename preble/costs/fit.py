"""Fits a cost model to measured iterations. Owns the regression; knows the formula of `CostModel`, not the class.

Time over tokens has a knee (flat while the machine is not busy, then linear) and may have steps where an engine
switches kernels, so the linear part is fitted in two forms: a convex one, bent at powers of two, and a monotone one,
bent at measured token counts. Attention may start only above some product of chunk and context, which is searched
for. Where prefills and decodes were measured, what an iteration takes longer with a prefill in it is set apart from the
rest. The Bayesian information criterion decides how many bends the samples are worth.

Every weight is at least 0, so that what comes out is monotone. One may fall below, attention by chunk, as published
fits have it: whether the rest makes up for it is `CostModel`'s to say, and there is always a fit in which nothing
falls. Paper sections 2.1 and 4.2. Needs numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

SECONDS_MIN = 1e-6  # what a fitted model charges at the least
BENDS = (64, 128, 256, 512, 1024, 2048)  # of the convex form
CONVEX_END = 8192.0  # its last knot: beyond it goes on as a line
KNOTS_MAX = 16
PARTS = 8  # columns before the linear part's
KNOTS_TRIED = 24  # before the least useful ones are dropped
THRESHOLDS_KEPT = 8
THRESHOLDS_FALLING = 2
THRESHOLDS_MIN = 12
THRESHOLDS_MAX = 128  # products of chunk and context that are tried as where attention starts
GOOD_ERROR = 1e-3  # relative; where no sample is further off, no other form is tried
SMALLEST_ERROR = 1e-4  # relative; nothing is gained by fitting closer than this


@dataclass(frozen=True, slots=True)
class Samples:
    """Measured iterations, one row each: `count` sequences, each with `chunk` new tokens ending at `context`. `start`:
    1 where these are a prefill, or 0 in all rows where no decodes were measured."""

    count: Floats
    chunk: Floats
    context: Floats
    seconds: Floats
    start: Floats

    @property
    def tokens(self) -> Floats:
        """New tokens of the whole batch."""
        return self.count * self.chunk


@dataclass(frozen=True, slots=True)
class Form:
    """Where the linear part bends and attention starts; `falling`: attention may fall with the chunk."""

    knots: tuple[float, ...]
    threshold: float
    convex: bool = False
    falling: bool = False


@dataclass(frozen=True, slots=True)
class Fit:
    """Weights of one form, in the order of its columns."""

    form: Form
    weights: Floats
    residuals: Floats  # relative

    @property
    def score(self) -> float:
        """The information criterion: lower is better, and every weight in use counts against it."""
        rows = len(self.residuals)
        spread = float(self.residuals @ self.residuals) / rows + SMALLEST_ERROR**2
        return float(rows * np.log(spread) + np.count_nonzero(self.weights) * np.log(rows))

    def line(self) -> Floats:
        """Seconds of the linear part at its knots."""
        at = np.asarray(self.form.knots)
        parts = (_hinges if self.form.convex else _ramps)(at, self.form.knots)
        rises = sum(
            (weight * part for weight, part in zip(self.weights[PARTS:], parts, strict=True)), np.zeros(len(at))
        )
        return np.asarray(np.maximum.accumulate(max(float(self.weights[0]), SECONDS_MIN) + rises))


def fitted(
    prefills: Sequence[tuple[float, float, float]], decodes: Sequence[tuple[float, float, float]]
) -> Iterator[dict[str, object]]:
    """`knots`, `context`, `pair` and `start` of `CostModel`, in seconds and tokens: the best fit first, then others.

    `prefills`: (missed tokens, context tokens, seconds > 0) of single prompts; `decodes`: (batch, context tokens of
    each, seconds > 0). At least one row in total. The last fit is monotone, as are most.
    """
    start = 1.0 if decodes else 0.0
    rows = [(1.0, missed, max(missed, context), seconds, start) for missed, context, seconds in prefills]
    rows += [(batch, 1.0, context, seconds, 0.0) for batch, context, seconds in decodes]
    samples = Samples(*np.asarray(rows, np.float64).T)
    convex = _solve(samples, Form((0.0, *BENDS, CONVEX_END), 0.0, convex=True))
    fits = [convex, *_with_fewer_knots(samples, 0.0, falling=False)]
    if min(float(np.abs(fit.residuals).max()) for fit in fits) > GOOD_ERROR:
        fits += _with_late_attention(samples, _knots_where_it_errs(samples, 0.0))
    fits.sort(key=lambda fit: fit.score)
    yield from (_coefficients(fit) for fit in fits)
    yield _coefficients(convex)


def _with_late_attention(samples: Samples, knots: tuple[float, ...]) -> list[Fit]:
    """Fits in which attention starts above some product of chunk and context. `knots` do for a first look at all."""
    rough = [_solve(samples, Form(knots, threshold)) for threshold in _thresholds(samples)]
    likely = sorted(rough, key=lambda fit: fit.score)[:THRESHOLDS_KEPT]
    found = [_with_fewer_knots(samples, fit.form.threshold, falling=False) for fit in likely]
    found.sort(key=lambda fits: min(fit.score for fit in fits))
    falling = [_with_fewer_knots(samples, fits[0].form.threshold, falling=True) for fits in found[:THRESHOLDS_FALLING]]
    return list(chain.from_iterable(found + falling))


def _thresholds(samples: Samples) -> list[float]:
    """Products of chunk and context that were measured, above which attention may start; none of few samples, which
    would not say."""
    products = np.unique((samples.chunk * samples.context)[samples.chunk > 1])[:-1]
    if len(products) < THRESHOLDS_MIN:
        return []
    chosen = np.unique(np.linspace(0, len(products) - 1, THRESHOLDS_MAX).astype(int))
    return [float(products[i]) for i in chosen]


def _possible_knots(samples: Samples) -> Floats:
    """Measured token counts at which the linear part may bend.

    None but the last lies in the upper half of the range: the last two say how it goes on beyond, and a short piece
    would make a line of noise.
    """
    tokens = np.unique(samples.tokens)
    possible: Floats = np.unique(np.concatenate((tokens[tokens <= tokens[-1] / 2], tokens[-1:])))
    return possible


def _knots_where_it_errs(samples: Samples, threshold: float) -> tuple[float, ...]:
    """More knots than are allowed, each one put at the possible place where the fit with those before errs most."""
    possible = _possible_knots(samples)
    knots = {float(possible[0]), float(possible[-1])}
    while True:
        missing = np.isin(samples.tokens, possible) & ~np.isin(samples.tokens, list(knots))
        if len(knots) == KNOTS_TRIED or not missing.any():
            return tuple(sorted(knots))
        errors = np.abs(_solve(samples, Form(tuple(sorted(knots)), threshold)).residuals)
        knots.add(float(samples.tokens[np.argmax(np.where(missing, errors, -1.0))]))


def _with_fewer_knots(samples: Samples, threshold: float, *, falling: bool) -> list[Fit]:
    """Fits with fewer and fewer knots: those go at which the line bends least, one by one once there are few enough."""
    knots, fits = list(_knots_where_it_errs(samples, threshold)), []
    while True:
        fit = _solve(samples, Form(tuple(knots), threshold, falling=falling))
        if len(knots) <= KNOTS_MAX:
            fits.append(fit)
        if len(knots) <= 2:
            return fits
        at, seconds = np.asarray(knots), fit.line()
        share = (at[1:-1] - at[:-2]) / (at[2:] - at[:-2])
        bends = np.abs(seconds[:-2] + share * (seconds[2:] - seconds[:-2]) - seconds[1:-1]) / seconds[1:-1]
        surplus = max(1, (len(knots) - KNOTS_MAX + 1) // 2)
        for index in sorted(np.argsort(bends)[:surplus].tolist(), reverse=True):
            del knots[1 + index]


def _solve(samples: Samples, form: Form) -> Fit:
    linear = (_hinges if form.convex else _ramps)(samples.tokens, form.knots)
    whole = np.ones(len(samples.seconds))
    columns = [whole, samples.start, samples.count * samples.context, *_pairs(samples, form), *linear]
    scaled = np.column_stack(columns) / samples.seconds[:, None]
    weights = non_negative_least_squares(scaled, np.ones(len(scaled)))
    return Fit(form, weights, scaled @ weights - 1.0)


def _pairs(samples: Samples, form: Form) -> list[Floats]:
    """The columns of attention over a chunk: constant, falling and rising with it, with the context, with both.

    Without a threshold all but the last say what other columns say already.
    """
    chunk, context = samples.chunk, samples.context
    active = samples.count * (chunk * context > form.threshold)
    own = active * float(form.threshold > 0)
    return [own, -own * chunk * form.falling, own * chunk, own * context, active * chunk * context]


def _hinges(tokens: Floats, knots: tuple[float, ...]) -> list[Floats]:
    """One slope that starts at each knot but the last: with weights of at least 0, a convex line."""
    return [np.maximum(tokens - knot, 0.0) for knot in knots[:-1]]


def _ramps(tokens: Floats, knots: tuple[float, ...]) -> list[Floats]:
    """One rise from 0 to 1 between neighbours: with weights of at least 0, a monotone line. The last goes on rising."""
    rises = [np.maximum((tokens - low) / (high - low), 0.0) for low, high in zip(knots, knots[1:], strict=False)]
    return [np.minimum(rise, 1.0) for rise in rises[:-1]] + rises[-1:]


def _coefficients(fit: Fit) -> dict[str, object]:
    """Turn weights into knots and slopes. No iteration is free."""
    start, context, base, fall, rise, *others = fit.weights[1:PARTS].tolist()
    return {
        "knots": list(zip(fit.form.knots, fit.line().tolist(), strict=True)),
        "context": (0.0, 0.0, 0.0, context),
        "pair": (fit.form.threshold, base, rise - fall, *others),
        "start": start,
    }


def non_negative_least_squares(features: Floats, target: Floats) -> Floats:
    """The weights >= 0, one a column, whose sum of columns is nearest to `target` [rows] (Lawson and Hanson, 1974).

    From the columns that stay positive among all, further ones are let in one by one where they help most; whichever
    would fall below 0 leaves again. Few solutions as a rule, and never more than three times the columns; the last
    feasible weights are returned at that bound.
    """
    norms: Floats = np.maximum(np.linalg.norm(features, axis=0), 1e-300)
    scaled: Floats = features / norms
    # A trace of the diagonal is added, since columns may be alike.
    gram, aim = scaled.T @ scaled + 1e-12 * np.eye(scaled.shape[1]), scaled.T @ target
    weights, used = _feasible(gram, aim, np.zeros(len(aim)), np.ones(len(aim), bool))
    for _ in range(3 * len(aim)):
        gain = np.where(used, -np.inf, aim - gram @ weights)
        best = int(np.argmax(gain))
        if gain[best] <= 1e-10 * max(1.0, float(np.linalg.norm(target))):
            break
        used[best] = True
        weights, used = _feasible(gram, aim, weights, used)
    return np.asarray(weights / norms)


def _feasible(gram: Floats, aim: Floats, weights: Floats, used: Flags) -> tuple[Floats, Flags]:
    """The best weights of the columns in use, and these columns: without those that would have become negative."""
    while used.any():
        solution = np.zeros(len(aim))
        solution[used] = np.linalg.solve(gram[np.ix_(used, used)], aim[used])
        negative = used & (solution <= 0)
        if not negative.any():
            return solution, used
        steps = np.full(len(aim), np.inf)
        steps[negative] = weights[negative] / np.maximum(weights[negative] - solution[negative], 1e-300)
        weights = np.maximum(weights + steps.min() * (solution - weights), 0.0)
        used = used & (steps > steps.min())
        weights[~used] = 0.0
    return np.zeros(len(aim)), used
