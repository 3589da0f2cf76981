"""Lengths and shares with exactly the statistics asked for. Owns how numbers are spread; knows no workload.

Lengths are the quantiles of a lognormal distribution, shuffled, not independent draws: a workload of 24 documents then
has the mean and deviation of one of 2,400, whatever the seed, and the seed only decides who gets which.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from .table1 import lognormal_parameters

Counts = npt.NDArray[np.int64]
NORMAL = NormalDist()


def spread(rng: np.random.Generator, count: int, moments: tuple[float, float], low: int = 1) -> Counts:
    """`count` lengths of at least `low` whose (mean, std) are `moments`, as near as `low` allows; shape [count]."""
    mean, std = moments
    if std == 0.0 or count < 2:
        return np.full(count, max(low, round(mean)), dtype=np.int64)
    raw = quantiles(count, moments, 1.0)
    # Quantiles miss the tail beyond the last of them; stretching gives back what it adds to the deviation.
    stretched = mean + (raw - raw.mean()) * (std / raw.std())
    return rng.permutation(np.maximum(np.rint(stretched), low).astype(np.int64))


def spread_below(rng: np.random.Generator, count: int, moments: tuple[float, float], high: int) -> Counts:
    """The same from the distribution cut off at `high`, as if longer ones had been dropped and drawn again."""
    mu, sigma = lognormal_parameters(*moments)
    below = NORMAL.cdf((math.log(high) - mu) / sigma)
    return rng.permutation(np.maximum(np.rint(quantiles(count, moments, below)), 1).astype(np.int64))


def quantiles(count: int, moments: tuple[float, float], below: float) -> npt.NDArray[np.float64]:
    """The lognormal's quantiles at the middles of `count` equal parts of (0, `below`), rising."""
    mu, sigma = lognormal_parameters(*moments)
    values: npt.NDArray[np.float64] = np.exp(
        [mu + sigma * NORMAL.inv_cdf((i + 0.5) / count * below) for i in range(count)]
    )
    return values


def shared_out(rng: np.random.Generator, total: int, weights: npt.NDArray[np.float64]) -> Counts:
    """`total` things given out in proportion to `weights`; the rest goes by largest remainder, ties by lot."""
    exact = total * weights / weights.sum()
    counts: Counts = np.floor(exact).astype(np.int64)
    lots = rng.permutation(len(weights))
    order = lots[np.argsort(-(exact - counts)[lots], kind="stable")]
    counts[order[: total - int(counts.sum())]] += 1
    return counts
