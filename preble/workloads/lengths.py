"""The published workload statistics (Preble, Table 1), and lengths and shares with exactly the statistics asked for.

Owns the numbers that generators aim at and that readers draw output lengths from; knows no workload. Lengths are the
quantiles of a lognormal distribution, shuffled, not independent draws: a workload of 24 documents then has the mean and
deviation of one of 2,400, whatever the seed, and the seed only decides who gets which.
"""

from __future__ import annotations

import math
import zlib
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
NORMAL = NormalDist()


class Table1Row(NamedTuple):
    """Mean and standard deviation of a workload's lengths in tokens, and of its sharing in percent of the prompt."""

    prompt_tokens: tuple[float, float]
    output_tokens: tuple[float, float]
    shared_percent: tuple[float, float]
    key_portion_percent: tuple[float, float]
    key_portion_requests: tuple[float, float]


TABLE1 = {
    "toolbench": Table1Row((1835, 742), (43, 16), (85, 13), (76, 16), (39, 64)),
    "embodied": Table1Row((2285, 471), (16, 13), (97, 14), (76, 12), (48, 8)),
    "programming": Table1Row((3871, 1656), (190, 343), (97, 7.4), (78, 13), (126, 2157)),
    "videoqa": Table1Row((9865, 5976), (4, 1.5), (88, 32), (99, 0.2), (8.6, 2)),
    "loogle": Table1Row((23474, 6105), (16, 9.9), (91, 24), (94, 15), (18, 8.6)),
}


def lognormal_parameters(mean: float, std: float) -> tuple[float, float]:
    """(mu, sigma) of the lognormal distribution with this mean and standard deviation."""
    sigma = math.sqrt(math.log1p((std / mean) ** 2))
    return math.log(mean) - sigma * sigma / 2.0, sigma


def drawn_output_tokens(workload: str, key: str) -> int:
    """An output length drawn from `workload`'s row for whatever `key` names: alike in every run, whatever the order."""
    mu, sigma = lognormal_parameters(*TABLE1[workload].output_tokens)
    rng = np.random.default_rng(zlib.crc32(key.encode("utf-8", "surrogatepass")))
    return max(1, round(float(rng.lognormal(mu, sigma))))


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
