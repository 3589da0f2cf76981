"""Clocks. Owns the two ways Preble learns the time: the machine's monotonic clock and a manual one.

A clock is any zero-argument callable that returns seconds as a float. Nothing below floor 4 calls `time` itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from .errors import InvalidTime

Clock = Callable[[], float]

monotonic: Clock = time.monotonic


class ManualClock:
    """A clock that moves only when told to; for tests and simulation. Not thread-safe."""

    __slots__ = ("_now",)

    def __init__(self, start_seconds: float = 0.0) -> None:
        self._now = _finite("start_seconds", start_seconds)

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        """Move by `seconds` (negative is allowed: clocks do jump back) and return the new time."""
        self._now += _finite("seconds", seconds)
        return self._now

    def set(self, now: float) -> None:
        """Set the time to `now` seconds."""
        self._now = _finite("now", now)


def _finite(name: str, seconds: float) -> float:
    if not math.isfinite(seconds):
        raise InvalidTime(f"{name} must be finite, got {seconds!r}")
    return float(seconds)
