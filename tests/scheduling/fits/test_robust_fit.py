"""The compiled terms of samples, and the fit of a worker's factors to them, are what the plain ones with numpy are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble import CostModel
from preble.scheduling.calibration_fit import RIDGE, SPREAD_MIN, SPREAD_OF_ONE
from preble.scheduling.fits.robust_fit import robust_factors
from preble.scheduling.fits.sample_terms import decode_terms, prefill_terms
from tests.models import robust_fit

LIMIT = 6.9


def both(terms: Any, seconds: Any, weights: Any) -> tuple[Any, Any]:
    """(compiled, plain)."""
    own = robust_factors(
        terms, seconds, weights, RIDGE, spread_min=SPREAD_MIN, spread_of_one=SPREAD_OF_ONE, limit=LIMIT
    )
    return own, robust_fit.factors(terms, seconds, weights, RIDGE, SPREAD_MIN, SPREAD_OF_ONE, LIMIT)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 128), st.sampled_from([0.0, 0.1, 1.0]))
def test_the_compiled_fit_is_the_plain_one(seed: int, count: int, noise: float) -> None:
    rng = np.random.default_rng(seed)
    terms = rng.exponential([0.02, 0.05, 0.01, 0.001, 0.1], (count, 5)) * rng.integers(0, 2, (count, 5))
    terms[rng.random(count) < 0.1] = 0.0
    seconds = terms @ np.exp(rng.normal(0.0, 1.0, 5)) * np.exp(rng.normal(0.0, noise, count))
    seconds[rng.random(count) < 0.1] *= 30.0
    seconds[rng.random(count) < 0.05] = np.nan
    own, plain = both(terms, seconds, rng.choice([1.0, 0.5, 0.25], count))
    if plain is None:
        assert own is None
        return
    assert own[0] == pytest.approx(plain[0], rel=1e-6, abs=1e-7)
    assert np.array(own[1]) == pytest.approx(plain[1], rel=1e-6, abs=1e-9)


def test_it_finds_factors_and_passes_over_what_cannot_be() -> None:
    rng = np.random.default_rng(1)
    terms = rng.uniform(0.01, 0.1, (400, 5))
    seconds = terms @ np.exp([0.5, -0.5, 1.0, 0.0, 2.0])
    seconds[:50] *= 100.0  # outliers
    own, _ = both(terms, seconds, np.ones(400))
    assert own[0] == pytest.approx((0.5, -0.5, 1.0, 0.0, 2.0), abs=0.15)
    assert both(np.zeros((3, 5)), np.ones(3), np.ones(3)) == (None, None)
    assert both(terms[:3], np.array([np.inf, 0.0, -1.0]), np.ones(3)) == (None, None)


@pytest.mark.parametrize("name", ["mistral-7b/a6000", "one knot", "bent"])
def test_the_compiled_terms_are_the_plain_ones(name: str) -> None:
    models = {
        "one knot": CostModel([(10, 0.01)]),
        "bent": CostModel(
            [(0, 0.01), (7, 0.012), (300, 0.3)], context=(50, 0, 0, 1.7e-6), pair=(9, 1e-7, 0, 3e-7, 2e-7), start=0.03
        ),
    }
    model, rng = models[name] if name in models else CostModel.preset(name), np.random.default_rng(2)
    rows = np.zeros((200, 8))
    rows[:, 2:5] = rng.integers(0, [60, 9000, 30], (200, 3))
    rows[:, 5:7] = rng.integers(0, [4, 2000], (200, 2))
    rows[:, 7] = rng.choice([0.0, 3.0, 7.0], 200)
    assert prefill_terms(model, rows) == pytest.approx(robust_fit.prefill_terms(model, rows), rel=1e-12)
    found, use = decode_terms(model, rows, 0.5)
    plain, plain_use = robust_fit.decode_terms(model, rows, 0.5)
    assert found == pytest.approx(plain, rel=1e-12) and (use == plain_use).all() and 20 < use.sum() < 190
    assert prefill_terms(model, rows[:0]).shape == decode_terms(model, rows[:0], 0.5)[0].shape == (0, 5)
