"""The event kernel: what happens when, in order. Owns the queue of future events and the virtual time; knows no fleet.

Events of one moment happen in the order in which they were planned, so a run depends on nothing but its inputs. Who
computes many events at once says when each would have been planned (`Place`): then their order is the same as if each
had been an event of its own. `benchmarks/scale/kernel.py` measures what an event costs beside SimPy, which would have
to move this clock besides.
"""

from __future__ import annotations

from .event_queue import EventQueue

Place = tuple[float, int]  # among the events of one moment: when it was planned, and as which of all


class Timeline(EventQueue):
    """Future events on a manual clock. Not thread-safe."""
