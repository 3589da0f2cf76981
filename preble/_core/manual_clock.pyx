"""The manual clock, compiled, so that a scheduler on virtual time reads it without a call. Owns nothing else."""

import math

from ..errors import InvalidTime


cdef double finite(str name, seconds) except? -1.0:
    if not math.isfinite(seconds):
        raise InvalidTime(f"{name} must be finite, got {seconds!r}")
    return seconds


cdef class ManualClock:
    """A clock that moves only when asked to; for tests and simulation. Called, it returns its time in seconds, at first
    `start_seconds`. Not thread-safe."""

    def __init__(self, start_seconds=0.0):
        self.seconds = finite("start_seconds", start_seconds)

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds) -> float:
        """Move by `seconds` (negative is allowed: clocks do jump back). Returns the new time. Raises InvalidTime.
        O(1)."""
        self.seconds += finite("seconds", seconds)
        return self.seconds

    def set(self, now) -> None:
        """Set the time to `now` seconds. Raises InvalidTime. O(1)."""
        self.seconds = finite("now", now)
