"""The terms of timing samples, and the fit of five factors to them, with numpy, to hold the compiled ones against. Owns
nothing of the product."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from preble import CostModel
from preble.scheduling.cost_factors import DECODE_TOKENS
from preble.sim.bounds import CostTerms

Floats = npt.NDArray[np.float64]
ROUNDS = 25

(AT, SECONDS, TOKENS, CONTEXT, BATCH, MOMENTS, OTHER, WAITING) = range(8)  # columns of a sample


def factors(
    terms: Floats,
    seconds: Floats,
    weights: Floats,
    ridge: Floats,
    spread_min: float,
    spread_of_one: float,
    limit: float,
) -> tuple[Floats, Floats] | None:
    """As `robust_factors`."""
    usable = np.isfinite(seconds) & (seconds > 0.0) & (terms.sum(axis=1) > 0.0)
    terms, logs, weights = terms[usable], np.log(seconds[usable]), weights[usable]
    if not len(logs):
        return None
    least = max(spread_min, spread_of_one / np.sqrt(len(logs)))
    found = np.full(5, np.clip(median(logs - np.log(terms.sum(axis=1)), weights), -limit, limit))
    for _ in range(ROUNDS):
        parts = terms * np.exp(found)
        sums = parts.sum(axis=1)
        errors = logs - np.log(sums)
        spread = max(least, 1.4826 * median(np.abs(errors), weights))
        sure = weights / (1.0 + (errors / (2.0 * spread)) ** 2) / spread**2
        slopes = parts / sums[:, None]
        covariance = np.linalg.inv(slopes.T @ (sure[:, None] * slopes) + ridge)
        step = np.clip(covariance @ (slopes.T @ (sure * errors) - ridge @ found), -1.0, 1.0)
        found = np.clip(found + step, -limit, limit)
        if np.abs(step).max() < 1e-3:
            break
    return found, covariance


def median(values: Floats, weights: Floats) -> float:
    """The value below and above which lies half of the weight."""
    order = np.argsort(values, kind="stable")
    sums = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(sums, 0.5 * sums[-1])])


def terms(parts: CostTerms, tokens: Any, context: Any, chunk: Any, chunk_context: Any = None) -> Floats:
    """Rows of (floor, rise, context, pair, start) seconds of iterations of so many tokens, over contexts that sum up to
    `context`, one chunk of a prefill among them."""
    tokens, context, chunk = np.asarray(tokens), np.asarray(context), np.asarray(chunk)
    floor = parts.linear(np.minimum(tokens, DECODE_TOKENS))
    last = np.maximum(chunk, context if chunk_context is None else chunk_context)
    more = parts.linear(tokens) - floor, parts.context_seconds(context), parts.pair_seconds(chunk, last)
    terms = np.where(chunk > 0.0, 0.0, floor), *more, np.where(chunk > 0.0, floor + parts.start, 0.0)
    return np.stack(terms, axis=1)


def prefill_terms(model: CostModel, rows: Floats) -> Floats:
    """The prior's terms of stretches of prefills: each as if it had an iteration of its own, with its share of the
    decodes beside it, and half an iteration of these before it where nothing waited."""
    moments = np.maximum(rows[:, MOMENTS], 1.0)
    requests = np.maximum(rows[:, WAITING], moments)
    tokens, context, share = (rows[:, column] / requests for column in (TOKENS, CONTEXT, BATCH))
    batch, mean = rows[:, BATCH] / moments, (rows[:, CONTEXT] / moments).mean() if len(rows) else 0.0
    beside = batch * mean
    asked = (tokens + share, batch), (context + share * mean, beside), (tokens, 0.0 * batch), (context, beside)
    each = terms(CostTerms(model), *(np.concatenate(pair) for pair in asked))
    residue = np.where(batch > 0.0, 0.5 * rows[:, OTHER], 0.0)
    return requests[:, None] * each[: len(rows)] + residue[:, None] * each[len(rows) :]


def decode_terms(model: CostModel, rows: Floats, own_share_min: float) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """The prior's terms of decodes, with the iterations that ended others' prefills, and which rows can be used: not
    those that stood mostly beside prefills, of which one knows when they ended and not when they began."""
    others, batch = rows[:, MOMENTS], rows[:, BATCH]
    beside, chunk = batch * rows[:, CONTEXT], rows[:, OTHER] / np.maximum(others, 1.0)
    asked = (batch, chunk + batch), (beside, chunk + beside), (0.0 * batch, chunk)
    each = terms(CostTerms(model), *(np.concatenate(pair) for pair in asked))
    own = np.maximum(rows[:, TOKENS] - others, 0.0)[:, None] * each[: len(rows)]
    mixed = others[:, None] * each[len(rows) :]
    alone, shared = own.sum(axis=1), mixed.sum(axis=1)
    return own + mixed, alone >= own_share_min * (alone + shared + rows[:, WAITING])
