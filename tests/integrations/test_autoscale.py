"""Following the scaling advice: bounds, patience, pauses. The advice itself: `scheduling/test_autoscaling`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preble.errors import InvalidConfig
from preble.integrations.autoscale import ADVICES_MAX, AutoscaleConfig, Autoscaler
from preble.scheduling.autoscaling import FleetLoad

QUICK = AutoscaleConfig(min_workers=1, max_workers=8, up_seconds=10.0, down_seconds=60.0, pause_seconds=20.0)
LOAD = FleetLoad(2, requests_per_second=1.0, prefill_load=1.0, observed_seconds=180.0)


def load(seconds: float) -> FleetLoad:
    """So many seconds of work a second; a worker is to have 0.7 of it."""
    return replace(LOAD, prefill_load=seconds)


def followed(scaler: Autoscaler, loads: list[float], workers: int, *, step: float = 5.0) -> list[int]:
    """The sizes of a fleet that does at once what it is reported, a look every `step` seconds."""
    sizes = []
    for number, seconds in enumerate(loads):
        workers = scaler.decide(load(seconds), workers, number * step)
        sizes.append(workers)
    return sizes


def test_up_goes_as_far_as_was_asked_for_all_the_time() -> None:
    assert followed(Autoscaler(QUICK), [2.0, 4.0, 3.0, 3.0], 2) == [2, 2, 3, 3]  # 2.0 asks for 3 workers


def test_a_peak_that_is_over_soon_starts_nobody() -> None:
    assert followed(Autoscaler(QUICK), [4.0, 4.0, 1.0, 4.0, 4.0, 1.0], 2) == [2] * 6


def test_down_goes_one_by_one_and_later() -> None:
    sizes = followed(Autoscaler(QUICK), [0.1] * 40, 4)
    assert sizes[:12] == [4] * 12 and sizes[12] == 3, "after a minute without a break"
    assert sizes[13:25] == [3] * 12 and sizes[25] == 2, "patience begins anew"
    assert sizes[-1] == 1


def test_who_would_miss_the_target_soon_does_not_go() -> None:
    # 1.39 is below 0.7 of two workers, so two would do; but above 0.8 of that.
    assert followed(Autoscaler(QUICK), [1.39] * 60, 3) == [3] * 60
    assert followed(Autoscaler(QUICK), [1.1] * 60, 3)[-1] == 2


def test_after_a_change_nothing_is_changed_for_a_while() -> None:
    patient = replace(QUICK, pause_seconds=60.0)
    sizes = followed(Autoscaler(patient), [2.0] * 3 + [5.0] * 20, 2)
    assert sizes[2] == 3
    assert sizes[3:14] == [3] * 11, "from 10 s to 70 s"
    assert sizes[14] == 8


def test_bounds_hold_at_once() -> None:
    scaler = Autoscaler(replace(QUICK, min_workers=2, max_workers=3))
    assert scaler.decide(load(0.1), 0, 0.0) == 2
    assert scaler.decide(load(9.0), 5, 0.0) == 3
    new = replace(LOAD, observed_seconds=1.0)
    assert scaler.decide(new, 1, 1.0) == 2 and scaler.decide(new, 3, 1.0) == 3, "without a look at the load, too"


def test_a_fleet_that_was_hardly_recorded_is_left_alone() -> None:
    scaler = Autoscaler(QUICK)
    for second in range(0, 100, 5):
        assert scaler.decide(replace(load(5.0), observed_seconds=29.0), 2, float(second)) == 2


def test_first_tokens_that_come_late_ask_for_workers_too() -> None:
    slow = replace(LOAD, waiting_requests=20.0, prefill_load=1.0, workers=2)
    scaler = Autoscaler(replace(QUICK, target_ttft_seconds=2.0, up_seconds=0.0))
    assert scaler.decide(slow, 2, 0.0) > 2
    assert Autoscaler(replace(QUICK, up_seconds=0.0)).decide(slow, 2, 0.0) == 2


@given(
    st.lists(st.floats(0.0, 20.0), max_size=120),
    st.integers(1, 8),
    st.sampled_from([0.0, 10.0, 40.0]),
    st.sampled_from([0.0, 30.0, 200.0]),
)
def test_whatever_comes_it_stays_within_bounds_and_keeps_its_pauses(
    loads: list[float], workers: int, pause: float, down: float
) -> None:
    config = replace(QUICK, pause_seconds=pause, down_seconds=down)
    scaler, changed_at = Autoscaler(config), -math.inf
    for number, seconds in enumerate(loads):
        wanted = scaler.decide(load(seconds), workers, number * 5.0)
        assert config.min_workers <= wanted <= config.max_workers
        assert wanted >= workers - 1
        if wanted != workers:
            assert number * 5.0 - changed_at >= pause
            changed_at = number * 5.0
        workers = wanted
        assert len(scaler._advices) <= ADVICES_MAX


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_workers", 0),
        ("max_workers", 0),
        ("target_utilisation", 0.0),
        ("target_utilisation", math.nan),
        ("down_ratio", 1.5),
        ("target_ttft_seconds", 0.0),
        ("look_seconds", 0.0),
        ("up_seconds", -1.0),
        ("down_seconds", math.inf),
        ("pause_seconds", math.nan),
        ("look_seconds", 0.01),
    ],
)
def test_settings_that_are_none_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidConfig, match=field if field != "max_workers" else "min_workers"):
        replace(QUICK, **{field: value})
