"""Which prefix end goes first, and the bounds of what is remembered."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from preble.batching.retention import OTHER, Retention
from preble.batching.return_times import KINDS_MAX
from tests.models.retention import PlainRetention

TOOL, PERSON = (1,), (2,)


def taught() -> Retention:
    """One that has seen pauses: 5 s after tools, 300 s after people."""
    retention = Retention()
    for number in range(200):
        retention.ended(number, TOOL, 0.0)
        retention.asked(number, 5.0)
        retention.forget(number)
        retention.ended(number, PERSON, 0.0)
        retention.asked(number, 300.0)
        retention.forget(number)
    assert len(retention) == 0
    return retention


def order(retention: Retention | PlainRetention, now: float) -> list[int]:
    """All ends as they would go."""
    numbers = []
    while (end := retention.victim(now)) is not None:
        numbers.append(end.number)
        retention.evicted(end, -1, now)  # type: ignore[arg-type]
    return numbers


def test_who_waits_for_a_person_goes_before_who_waits_for_a_tool() -> None:
    retention = taught()
    retention.ended(1, TOOL, 0.0)
    retention.ended(2, PERSON, 1.0)
    retention.ended(3, TOOL, 2.0)
    assert order(retention, 3.0) == [2, 1, 3]


def test_a_tool_that_should_have_been_back_long_ago_goes_before_a_person() -> None:
    retention = taught()
    retention.ended(1, TOOL, 0.0)
    retention.ended(2, PERSON, 600.0)
    assert order(retention, 601.0) == [1, 2]


def test_the_dead_go_first_and_who_is_asked_for_last() -> None:
    retention = taught()
    for number in (1, 2, 3, 4):
        retention.ended(number, TOOL, float(number))
    assert retention.asked(1, 5.0) and retention.asked(2, 6.0)
    retention.die(3, 7.0)
    assert order(retention, 8.0) == [3, 4, 2, 1], "of the wanted the one asked for last goes first: it waits longest"


def test_who_knows_nothing_evicts_the_longest_silent_first() -> None:
    retention = Retention()
    for number in range(20):
        retention.ended(number, TOOL, 3.0 * number)
    assert order(retention, 100.0) == list(range(20))


def test_a_request_that_goes_without_its_prefix_leaves_it_silent() -> None:
    retention = taught()
    retention.ended(1, TOOL, 0.0)
    retention.asked(1, 5.0)
    retention.ended(2, TOOL, 6.0)
    retention.unwanted(1, 7.0)
    assert order(retention, 8.0)[-1] == 2
    retention.unwanted(1, 8.0)
    assert len(retention) == 0


def test_a_prompt_into_a_dead_or_unknown_end_is_nobodys_next_turn() -> None:
    retention = Retention()
    retention.ended(1, TOOL, 0.0)
    retention.die(1, 1.0)
    assert not retention.asked(1, 2.0) and not retention.asked(9, 2.0)


def test_what_is_left_of_an_end_goes_next() -> None:
    retention = taught()
    retention.ended(1, TOOL, 0.0)
    retention.ended(2, TOOL, 1.0)
    first = retention.victim(2.0)
    assert first is not None and first.number == 1
    retention.evicted(first, 7, 2.0)
    assert order(retention, 2.0) == [7, 2]


def test_there_are_no_more_ends_and_kinds_than_may_be() -> None:
    retention = Retention(ends_max=100)
    for number in range(5000):
        retention.ended(number, (number % 1000,), float(number))
    retention.check()
    assert len(retention) == 100
    assert {end.number for end in retention._ends.values()} == set(range(4900, 5000)), "the oldest are forgotten"
    assert set(retention._silent) == {OTHER}, "an ending that is rare is no kind of its own"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ended", "asked", "want", "unwanted", "die", "forget", "evict", "evict in part"]),
        st.integers(0, 12),
        st.integers(0, 3),
    ),
    max_size=80,
)


def do(retention: Retention | PlainRetention, step: str, number: int, ending: int, now: float) -> int | bool | None:
    """One step; returns what it says."""
    if step == "ended":
        retention.ended(number, (ending,), now)
    elif step.startswith("evict"):
        end = retention.victim(now)
        assert (end is None) == (len(retention) == 0)
        if end is None:
            return None
        retention.evicted(end, 20 + number if step == "evict in part" else -1, now)  # type: ignore[arg-type]
        return end.number
    elif step == "forget":
        retention.forget(number)
    else:
        said: bool | None = getattr(retention, step)(number, now)
        return said
    return None


@settings(max_examples=60, deadline=None)
@given(STEPS, st.sampled_from([1.0, 40.0]))
def test_every_end_stands_in_one_line_whatever_happens(steps: list[tuple[str, int, int]], pace: float) -> None:
    """And all is as in plain Python: who goes first, what is learned of pauses."""
    retention, plain = Retention(ends_max=8), PlainRetention(ends_max=8)
    for turn, (step, number, ending) in enumerate(steps):
        now = pace * turn
        assert do(retention, step, number, ending, now) == do(plain, step, number, ending, now)
        retention.check()
    for kind in ((0,), (1,), (2,), (3,), OTHER, "never seen"):
        for silent in (0.1, 3.0, 700.0):
            assert retention.times.value(kind, silent) == plain.times.value(kind, silent)
            assert retention.times.chance(kind, 9.0, silent) == plain.times.chance(kind, 9.0, silent)
    assert len(retention.times) <= KINDS_MAX


def test_thousands_of_answers_are_told_apart_as_in_plain_python() -> None:
    """Endings are counted, halved and forgotten; the rarest goes where there is no room."""
    rng = random.Random(5)
    retention, plain = Retention(ends_max=50), PlainRetention(ends_max=50)
    for turn in range(9000):
        ending = (int(rng.paretovariate(0.4)) % 500,)
        for each in (retention, plain):
            each.ended(turn % 90, ending, float(turn))
        assert set(retention._silent) == set(plain._silent)
    retention.check()
    assert order(retention, 9e3) == order(plain, 9e3)
