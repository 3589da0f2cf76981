"""The published workload statistics (Preble, Table 1) and lognormal lengths with a given mean and deviation.

Owns the numbers that generators aim at and that readers draw output lengths from; measures nothing.
"""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

import numpy as np


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
