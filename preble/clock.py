"""Clocks. Owns the two ways Preble learns the time: the machine's monotonic clock and a manual one.

A clock is any zero-argument callable that returns seconds as a float. Nothing below floor 4 calls `time` itself. Where
a scheduler's clock is `monotonic`, compiled code reads the same clock in C (`_core/manual_clock.pxd`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ._core.manual_clock import ManualClock as ManualClock

Clock = Callable[[], float]

monotonic: Clock = time.monotonic
