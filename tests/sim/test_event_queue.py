"""Events happen in the order that sorting them gives, whatever is planned and cancelled meanwhile."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble import ManualClock
from preble.errors import InvalidTime
from preble.sim.timeline import Timeline

PLANS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.25, 1.0, 3.5]), st.integers(0, 5), st.booleans()), min_size=1, max_size=60
)


@settings(max_examples=60)
@given(PLANS)
def test_the_order_is_that_of_sorted_events(plans: list[tuple[float, int, bool]]) -> None:
    """Each event plans the next two of the list; some are cancelled, some get an earlier place."""
    clock, seen = ManualClock(), list[int]()
    timeline, left = Timeline(clock), iter(plans)
    naive = dict[int, tuple[float, float, int, int]]()

    def plan() -> None:
        found = next(left, None)
        if found is None:
            return
        after, what, placed = found
        place = (timeline.now - 0.5, 2) if placed else None
        number = timeline.at(timeline.now + after, happens, len(seen), place)
        planned, order = (timeline.now, number) if place is None else place
        naive[number] = (timeline.now + after, planned, order, number)
        if what == 0 and len(naive) > 1:
            gone = min(naive)
            timeline.cancel(gone)
            del naive[gone]

    def happens(_: object) -> None:
        expected = min(naive.values())
        assert clock() == timeline.now == expected[0] and timeline.place == expected[1:3]
        seen.append(expected[3])
        del naive[expected[3]]
        plan()
        plan()

    for _ in range(5):
        plan()
    timeline.run(math.inf)
    assert not naive and not timeline._planned


def test_what_never_happens_is_let_go() -> None:
    """An event holds who plans it, who holds the timeline."""

    class Planner:
        def __init__(self) -> None:
            self.timeline = Timeline(ManualClock())
            self.timeline.at(5.0, self.act)

        def act(self, _: object) -> None:
            raise AssertionError("it is too late for it")

    planner = Planner()
    planner.timeline.run(1.0)
    gone = weakref.ref(planner)
    del planner
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("moment", [-0.1, math.nan, math.inf])
def test_no_event_for_a_moment_that_cannot_be(moment: float) -> None:
    timeline = Timeline(ManualClock())
    with pytest.raises(InvalidTime):
        timeline.at(moment, print)
    assert not timeline._planned
