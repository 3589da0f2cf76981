"""Figures of several seeds: their mean, its interval, and ratios paired by seed. Owns the arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Of Student's distribution, 97.5 %, by degrees of freedom from 1 on; beyond, the last is a little too wide.
T_POINTS = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the 95 % interval of it; NaN ends where there are fewer than two values."""

    mean: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half of its width."""
        return (self.high - self.low) / 2

    def as_dict(self) -> dict[str, float]:
        """As JSON has it."""
        return {"mean": self.mean, "low": self.low, "high": self.high}


def interval(values: Sequence[float]) -> Interval:
    """Of the mean of some values, by Student's t."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Interval(mean, math.nan, math.nan)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = T_POINTS[min(count - 2, len(T_POINTS) - 1)] * deviation / math.sqrt(count)
    return Interval(mean, mean - half, mean + half)


def paired_ratio(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Geometric mean of the ratios by seed and its interval, from their logarithms; NaN where one is not positive."""
    if not all(value > 0.0 for value in (*values, *others)):
        return Interval(math.nan, math.nan, math.nan)
    logs = interval([math.log(value / other) for value, other in zip(values, others, strict=True)])
    return Interval(*(math.exp(value) for value in (logs.mean, logs.low, logs.high)))
