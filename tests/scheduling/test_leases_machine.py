"""Random histories of leases against the naive model: successes, errors, late and doubled calls, workers that die and
come back, expiry, reconciliation. After each step the bookings agree, and in the end they are at zero.

Long (`PREBLE_HYPOTHESIS=long`) it is 10^5 histories.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.leases import play

HISTORIES = 100_000 if os.environ.get("PREBLE_HYPOTHESIS") == "long" else 1_000
STEPS = 24
POLICIES = ("e2", "kv_cost", "e2-paper", "least_loaded")  # two keep books of their own of live requests
numbers = st.integers(0, 255)


@settings(max_examples=300)
@given(st.sampled_from(POLICIES), st.lists(st.tuples(numbers, numbers, numbers), max_size=60))
def test_the_bookings_are_the_models_whatever_happens(policy: str, history: list[tuple[int, int, int]]) -> None:
    play(policy, history, check_each=True)


@pytest.mark.timeout(3600)
def test_many_random_histories_end_with_nothing_booked() -> None:
    total: Counter[str] = Counter()
    for seed in range(HISTORIES):
        draw = random.Random(seed).randrange
        history = [(draw(256), draw(256), draw(256)) for _ in range(STEPS)]
        try:
            total.update(play(POLICIES[seed % 16 if seed % 16 < 4 else 0], history, check_each=False))
        except AssertionError as error:
            raise AssertionError(f"history {seed}") from error
    assert min(total.values()) >= HISTORIES // 20, f"something hardly ever happens: {total}"
