"""How long until a session is back: what is learned, what it says, and its bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble.batching.return_times import BIN_ENDS, BINS, FADE_EVENTS, ReturnTimes, bin_of, values_of
from preble.errors import InvalidConfig

PAUSES = st.lists(
    st.tuples(st.sampled_from(["tool", "person", "other"]), st.floats(0.0, 1e5), st.booleans()), max_size=60
)


def learned(pauses: list[tuple[str, float, bool]]) -> ReturnTimes:
    times = ReturnTimes()
    for kind, seconds, returned in pauses:
        (times.returned if returned else times.unseen)(kind, seconds)
    return times


@settings(max_examples=60, deadline=None)
@given(PAUSES, st.sampled_from(["tool", "never seen"]), st.floats(0.0, 1e4), st.floats(0.0, 1e4), st.floats(0.0, 1e4))
def test_a_chance_is_one_and_grows_with_the_time_that_is_given(
    pauses: list[tuple[str, float, bool]], kind: str, silent: float, within: float, more: float
) -> None:
    times = learned(pauses)
    chance = times.chance(kind, within, silent)
    assert 0.0 <= chance <= times.chance(kind, within + more, silent) <= 1.0
    assert times.chance(kind, 0.0, silent) == 0.0
    assert 0.0 < times.value(kind, silent) < math.inf
    assert 0.0 < times.remaining_seconds(kind, silent) < math.inf


@settings(max_examples=60, deadline=None)
@given(PAUSES, st.floats(0.0, 500.0), st.floats(0.0, 500.0), st.floats(0.0, 500.0))
def test_chances_follow_on_each_other(
    pauses: list[tuple[str, float, bool]], silent: float, first: float, then: float
) -> None:
    times = learned(pauses)
    stays = (1.0 - times.chance("tool", first, silent)) * (1.0 - times.chance("tool", then, silent + first))
    assert 1.0 - times.chance("tool", first + then, silent) == pytest.approx(stays, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.3, 1000.0), st.integers(50, 300))
def test_what_is_seen_often_is_expected(seconds: float, count: int) -> None:
    times = learned([("tool", seconds, True)] * count)
    end = BIN_ENDS[bin_of(seconds)]
    assert times.chance("tool", 2.0 * end) > 0.7
    assert times.chance("tool", seconds / 4.0) < 0.3


def test_pauses_of_unknown_end_count_for_as_long_as_they_were_seen() -> None:
    seen = learned([("tool", 4.0, True)] * 50)
    cut = learned([("tool", 4.0, True)] * 50 + [("tool", 3.0, False)] * 200)
    assert cut.chance("tool", 4.0) < 0.5 < seen.chance("tool", 4.0)
    assert cut.value("tool", 20.0) == pytest.approx(seen.value("tool", 20.0)), "nothing was seen of what comes later"


def test_kinds_are_told_apart_and_a_new_one_begins_as_all_are() -> None:
    times = learned([("tool", 5.0, True)] * 100 + [("person", 300.0, True)] * 20)
    assert times.value("tool", 1.0) > 5 * times.value("person", 1.0)
    assert times.remaining_seconds("tool") < times.remaining_seconds("person") / 5
    assert times.value("person", 1.0) < times.value("never seen", 1.0) < times.value("tool", 1.0)


def test_who_knows_nothing_values_the_longest_silent_least() -> None:
    times = ReturnTimes()
    values = [times.value("tool", 0.9 * end) for end in BIN_ENDS[:-1]]
    assert values == sorted(values, reverse=True)


def test_what_was_seen_long_ago_fades() -> None:
    times = learned([("tool", 2.0, True)] * FADE_EVENTS + [("tool", 500.0, True)] * 4 * FADE_EVENTS)
    assert times.chance("tool", 4.0) < 0.15


def test_the_value_is_the_best_of_all_times_of_keeping() -> None:
    rates = [0.001] * BINS
    rates[3] = 1.0  # silence between 1 and 2 s
    values = values_of(rates)
    assert values[3] == max(values) and values[0] > 0.1, "who will be back in a second is worth keeping until then"
    assert values[4] == pytest.approx(0.001)


def test_there_are_no_more_kinds_than_may_be() -> None:
    times = ReturnTimes(kinds_max=4)
    for number in range(1000):
        times.returned("often", 1.0)
        times.returned(number, 1.0)
    assert len(times) == 4
    assert times.value("often", 0.1) > times.value("never seen", 0.1) * 0.5
    with pytest.raises(InvalidConfig, match="kinds_max"):
        ReturnTimes(0)


def test_a_clock_that_was_set_back_teaches_nothing() -> None:
    times = ReturnTimes()
    times.returned("tool", -1.0)
    times.unseen("tool", math.nan)
    assert len(times) == 0
