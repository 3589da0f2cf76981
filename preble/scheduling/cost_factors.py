"""Factors on a cost model's terms. Owns how a model is scaled by them and how they are read off a scaled one. What they
should be is estimated in `calibration_fit.py`."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from .._cost import CostModel
from ..errors import InvalidConfig
from ..lazy_typing import Any
from ..types import ServedWork

Logs = tuple[float, float, float, float, float]  # logarithms of the factors on floor, rise, context, pair and start
Knots = Sequence[tuple[float, float]]  # (tokens, seconds)

PRIOR: Logs = (0.0, 0.0, 0.0, 0.0, 0.0)
DECODE_TOKENS = 64.0  # in a batch, up to which an iteration is taken for one of decodes
KNOTS_MAX = 16
FACTOR_MAX = 1e3
STEP = 0.05  # factors are rounded to multiples of it, in logarithms


def rounded(logs: Logs) -> Logs:
    """The nearest factors that may be published."""
    floor, rise, context, pair, start = (round(log / STEP) * STEP for log in logs)
    return floor, rise, context, pair, start


def linear_seconds(knots: Knots, tokens: float) -> float:
    """Seconds of the layers that see tokens only: straight between knots, beyond the last as between the last two."""
    if len(knots) == 1 or tokens <= knots[0][0]:
        return knots[0][1]
    for (at, seconds), (next_at, next_seconds) in zip(knots, knots[1:], strict=False):
        if tokens < next_at:
            return (next_seconds - seconds) / (next_at - at) * (tokens - at) + seconds
    return next_seconds + (next_seconds - seconds) / (next_at - at) * (tokens - next_at)


def scaled(prior: CostModel, logs: Logs) -> CostModel:
    """A prior with its terms times the factors. Monotone, positive and finite whatever these are: only the pair term
    may fall in one of its tokens, and where the others do not make up for it, it gets the least factor of all."""
    if logs == PRIOR:
        return prior
    floor, rise, context, pair, start = (math.exp(log) for log in logs)
    try:
        return _times(prior, floor, rise, context, pair, start)
    except InvalidConfig:
        return _times(prior, floor, rise, context, min(floor, rise, context, pair), start)


def _times(prior: CostModel, floor: float, rise: float, context: float, pair: float, start: float) -> CostModel:
    """`start` is the factor on the least that an iteration with a prefill takes, so on what it takes more than one of
    decodes and these together: most priors know no difference, of which no factor would make any."""
    found: dict[str, Any] = prior.coefficients()
    knots: Knots = found["knots"]
    least = linear_seconds(knots, DECODE_TOKENS)
    points = []
    for tokens in _ends(knots):
        short = linear_seconds(knots, min(tokens, DECODE_TOKENS))
        points.append((tokens, floor * short + rise * max(linear_seconds(knots, tokens) - least, 0.0)))
    context_from, *rest = found["context"]
    pair_from, *pairs = found["pair"]
    return CostModel(
        points,
        context=(context_from, *(context * number for number in rest)),
        pair=(pair_from, *(pair * number for number in pairs)),
        start=max(start * (found["start"] + least) - floor * least, 0.0),
        name=found["name"],
    )


def _ends(knots: Knots) -> list[float]:
    """The knots of a scaled model: the prior's, and where decodes end. Where these are more than there may be, one goes
    that is inside."""
    ends = sorted({*(tokens for tokens, _ in knots), DECODE_TOKENS})
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
    floor, rise, context, pair, start = (min(max(instead if log is None else log, -limit), limit) for log in logs)
    return rounded((floor, rise, context, pair, start))


def logs_of_served(prior: CostModel, served: ServedWork) -> Logs:
    """The factors under which a prior takes as long for what a worker has served as the worker says that it took.
    Decodes say how long iterations without a prefill are and what they take over contexts; one factor for all the rest
    is what prefills say, for their mean does not show how much of it begins one and how much is its tokens. Of short
    prompts, or where nearly all of each was cached, much of it is others' prefills in the same iterations: all changes
    as decodes did. What takes no time by the prior stays so."""
    missed, context = max(round(served.missed_tokens), 1), max(round(served.prompt_tokens), 1)
    found: dict[str, Any] = prior.coefficients()
    expected = prior.prefill_time(missed, context)
    short = min(found["start"] + linear_seconds(found["knots"], min(missed, DECODE_TOKENS)), expected)
    prefill = _ratio(served.prefill_seconds, expected)
    decode = prefill if served.token_seconds is None else _ratio(served.token_seconds, prior.decode_time(1, context))
    if short >= 0.75 * expected:
        prefill = decode
    decode, prefill = (min(max(factor, 1.0 / FACTOR_MAX), FACTOR_MAX) for factor in (decode, prefill))
    return rounded((math.log(decode), math.log(prefill), math.log(decode), math.log(prefill), math.log(prefill)))


def _ratio(seconds: float, expected: float) -> float:
    """How many times as long it took."""
    return seconds / expected if expected > 0.0 else 1.0


def _marks(model: CostModel) -> tuple[float, float, float, float, float]:
    """A number of each term that its factor multiplies."""
    found: dict[str, Any] = model.coefficients()
    floor = linear_seconds(found["knots"], DECODE_TOKENS)
    rise = linear_seconds(found["knots"], 65536.0) - floor
    return floor, rise, found["context"][3], found["pair"][4], found["start"] + floor


def key_of(model: CostModel) -> Hashable:
    """Equal for models of one name that cost the same."""
    found: dict[str, Any] = model.coefficients()
    return found["name"], tuple(found["knots"]), found["context"], found["pair"], found["start"]
