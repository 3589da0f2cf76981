"""The event kernel: what happens when, in order. Owns the queue of future events and the virtual time; knows no fleet.

Events of one moment happen in the order in which they were planned, so a run depends on nothing but its inputs. Who
computes many events at once says when each would have been planned (`Place`): then their order is the same as if each
had been an event of its own. SimPy, measured beside it by `benchmarks/scale/kernel.py`, takes 1.1 times (bare
callbacks, 8 events pending) to 3.2 times as long an event (processes, 10,000 pending), and would have to move this
clock besides. That is some hundredths of a simulation's time either way; what decides is that eighty lines without a
dependency do all that is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any

from ..clock import ManualClock
from ..errors import InvalidTime

Action = Callable[[Any], None]
Place = tuple[float, int]  # among the events of one moment: when it was planned, and as which of all


class Timeline:
    """Future events on a manual clock. Not thread-safe."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self._planned: list[tuple[float, float, int, int, Action, Any]] = []
        self._cancelled: set[int] = set()
        self._count = 0
        self.now = clock()
        self.place: Place = (self.now, -1)  # of the event that happens

    def at(self, seconds: float, action: Action, subject: Any = None, place: Place | None = None) -> int:
        """Plan `action(subject)` for a finite moment, not before now; among those of that moment in order of planning,
        or at a `place`. Returns its number, for `cancel`. Raises `InvalidTime`."""
        if not self.now <= seconds < inf:
            raise InvalidTime(f"an event cannot be planned for {seconds!r}, it is {self.now!r}")
        number = self._count
        planned, order = (self.now, number) if place is None else place
        heappush(self._planned, (seconds, planned, order, number, action, subject))
        self._count = number + 1
        return number

    def take_number(self) -> int:
        """Returns a number as the next event would have had it, for a `Place`."""
        self._count += 1
        return self._count - 1

    def cancel(self, number: int) -> None:
        """A planned event that has not happened does not."""
        self._cancelled.add(number)

    def pass_by(self, seconds: float) -> None:
        """It is so late, if it is not later; between events only."""
        if seconds > self.now:
            self.now = seconds
            self.clock.set(seconds)

    def run(self, until_seconds: float) -> None:
        """Let events happen, in order, up to and including that moment, or until there are none."""
        planned, set_clock, cancelled = self._planned, self.clock.set, self._cancelled
        while planned and planned[0][0] <= until_seconds:
            seconds, since, order, number, action, subject = heappop(planned)
            if cancelled and number in cancelled:
                cancelled.remove(number)
                continue
            self.place = (since, order)
            if seconds != self.now:
                self.now = seconds
                set_clock(seconds)
            action(subject)
