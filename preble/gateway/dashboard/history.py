"""Short histories of numbers, in fixed memory: a ring of values, and shares of what came within some seconds. Owns no
clock; one value is one tick of whoever keeps them.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence

UNKNOWN = math.nan


class Series:
    """The latest `size` values of one number, 8 bytes each, kept with 4 digits; `UNKNOWN` where there was none."""

    __slots__ = ("_at", "_values", "count")

    def __init__(self, size: int) -> None:
        self._values = array("d", bytes(8 * size))
        self._at = 0
        self.count = 0

    def push(self, value: float) -> None:
        """Add a value; at the bound the oldest goes."""
        self._values[self._at] = round(value, 4)
        self._at = (self._at + 1) % len(self._values)
        self.count = min(self.count + 1, len(self._values))

    def last(self, count: int) -> list[float]:
        """The latest `count` values or as many as there are, oldest first. JSON has null for what is unknown."""
        count = min(count, self.count)
        start = self._at - count
        values = self._values[start:] + self._values[: self._at] if start < 0 else self._values[start : self._at]
        return values.tolist()


class Ratio:
    """What part of one running sum another is, over the latest `ticks`; or a rate, where the whole is time, which does
    not begin with the sums (`from_zero` False)."""

    __slots__ = ("_sums",)

    def __init__(self, ticks: int, *, from_zero: bool = True) -> None:
        self._sums: deque[tuple[float, float]] = deque([(0.0, 0.0)] if from_zero else [], maxlen=ticks + 1)

    def push(self, part: float, whole: float) -> float:
        """Add the sums so far; the ratio, `UNKNOWN` where the whole has not grown."""
        self._sums.append((part, whole))
        first_part, first_whole = self._sums[0]
        return (part - first_part) / (whole - first_whole) if whole > first_whole else UNKNOWN


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` of all are not above; `UNKNOWN` of none. `ordered` is sorted."""
    if not ordered:
        return UNKNOWN
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1 if share > 0 else 0)]
