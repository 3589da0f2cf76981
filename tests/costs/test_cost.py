"""The cost model: published numbers to the digit, never negative, never falling, fits, refusals, pickling."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble import CostModel
from preble.errors import InvalidConfig, InvalidInput
from tests.models.scheduler import NaiveCost

# Measured by the paper's authors on H100 (tensor parallel, 70B): new tokens, tokens of the sequence, milliseconds.
H100_POINTS = [
    *[(1, 8192, 56.57), (16, 8192, 56.6), (64, 8192, 66.4), (128, 8192, 63.72), (256, 8192, 67.42), (512, 8192, 80.15)],
    *[(1024, 8192, 122.98), (2048, 8192, 191.95), (4096, 8192, 357.6), (8192, 8192, 771.88), (512, 4096, 66.37)],
    *[(14166, 14166, 1338.21), (28232, 28232, 2942.76), (256, 4096, 52.29), (1024, 4096, 106.91)],
    *[(512, 16384, 106.89), (512, 32768, 158.81), (4096, 4096, 368.25)],
]
tokens = st.integers(1, 200_000)
amounts = st.floats(0.0, 1e-2)
presets = st.sampled_from(CostModel.presets()).map(CostModel.preset)


def milliseconds(model: CostModel, missed: int, context: int) -> float:
    return model.prefill_time(missed, context) * 1000


# --- published numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missed", "context", "published", "digits"),
    [
        *[(512, 2000, 66.9, 1), (1800, 1800, 235.7, 1), (512, 8192, 95, 0)],
        *[(8192, 8192, 1183, 0), (512, 23500, 147, 0), (23500, 23500, 4260, 0)],
    ],
)
def test_mistral_on_a6000_takes_as_long_as_published(missed: int, context: int, published: float, digits: int) -> None:
    assert round(milliseconds(CostModel.preset("mistral-7b/a6000"), missed, context), digits) == published


def test_mistral_on_a6000_decodes_32_sequences_of_2000_in_38_milliseconds() -> None:
    model = CostModel.preset("mistral-7b/a6000")
    assert round(model.iteration_time(decode_contexts=[2000] * 32) * 1000, 1) == 37.8
    assert model.decode_time(1, 2000, batch=32) * 1000 == pytest.approx(37.85, abs=0.01)


@pytest.mark.parametrize(("missed", "context", "measured"), H100_POINTS)
def test_llama_70b_on_h100_is_within_ten_percent_of_every_measurement(
    missed: int, context: int, measured: float
) -> None:
    assert milliseconds(CostModel.preset("llama-3-70b/h100-tp4"), missed, context) == pytest.approx(measured, rel=0.1)


def test_mistral_on_a100_follows_its_own_line_not_the_a6000s() -> None:
    model = CostModel.preset("mistral-7b/a100")
    for n in (256, 512, 1024):
        published = (0.05031337 * n + 5.505997 + 0.159 + 1.86e-4 * 2000) / 0.85 if n * 2000 < 2**20 else None
        assert published is None or milliseconds(model, n, 2000) == pytest.approx(published, rel=1e-4)
    pairs = 0.123864 - 7.45358651e-4 * 8192 + 1.72022673e-3 * 8192 + 1.36265841e-6 * 8192 * 8192
    assert milliseconds(model, 8192, 8192) == pytest.approx((0.05031337 * 8192 + 5.505997 + pairs) / 0.85, rel=1e-3)


def test_a_70b_batch_is_charged_its_intercept_once() -> None:
    """The published 70B fits add it for every request, so that a batch of 32 decodes would take a second."""
    model = CostModel.preset("llama-3-70b/a100-tp4")
    assert model.iteration_time(decode_contexts=[1000] * 32) * 1000 == pytest.approx(
        28.931389 + 0.182233431 * 32 + 4.00365142e-3 * 32_000 + 2.55050069e-6 * 32_000, rel=1e-6
    )


def test_what_begins_a_prefill_is_charged_once_an_iteration_and_never_to_decodes() -> None:
    knots = [(0, 0.02), (1000, 0.12)]
    plain, model = CostModel(knots), CostModel(knots, start=0.1)
    assert model.decode_time(10, 100, 4) == plain.decode_time(10, 100, 4)
    assert model.iteration_time([], [100] * 4) == plain.iteration_time([], [100] * 4)
    assert model.prefill_time(0, 50) == 0.0
    assert model.prefill_time(500) == pytest.approx(plain.prefill_time(500) + 0.1)
    for chunks in ([(5, 9)], [(5, 9), (7, 7)]):
        for decodes in ([], [100] * 4):
            assert model.iteration_time(chunks, decodes) == pytest.approx(plain.iteration_time(chunks, decodes) + 0.1)
    assert model.iteration_time([(0, 9)], [100]) == plain.iteration_time([(0, 9)], [100]), "a chunk of nothing"


# --- shape ------------------------------------------------------------------------------------------------------------


def test_the_originals_regression_fell_below_zero_at_383_tokens_and_ours_does_not() -> None:
    original = (-118 + 1.25 * 383 - 2.56e-3 * 383**2) / 0.9
    assert original < -16
    ours = CostModel.preset("mistral-7b/a6000")
    assert milliseconds(ours, 192, 192) < milliseconds(ours, 383, 383) < milliseconds(ours, 384, 384)
    assert milliseconds(ours, 383, 383) == pytest.approx(51.2, abs=0.1)


@given(presets, tokens, tokens, tokens, st.integers(1, 256))
def test_no_preset_is_ever_negative_or_falls(model: CostModel, a: int, b: int, context: int, batch: int) -> None:
    assert_monotone(model, a, b, context, batch)


def assert_monotone(model: CostModel, a: int, b: int, context: int, batch: int) -> None:
    """More missed tokens, a longer context, more output, more in the batch: nothing of it is ever cheaper."""
    small, large = sorted((a, b))
    context = max(context, large)
    assert 0 < model.prefill_time(small, context) <= model.prefill_time(large, context)
    assert model.prefill_time(small, context) <= model.prefill_time(small, context + a)
    assert model.prefill_time(small) <= model.prefill_time(large)
    assert 0 <= model.decode_time(small, context, batch) <= model.decode_time(large, context, batch)
    assert model.decode_time(3, small, batch) <= model.decode_time(3, large, batch) * (1 + 1e-12)
    assert model.decode_time(3, small, batch) <= model.decode_time(3, small, batch + 1) * (1 + 1e-12)


@st.composite
def any_model(draw: st.DrawFn) -> CostModel | None:
    """A cost model of random coefficients; None where the constructor refused them."""
    steps = draw(st.lists(st.tuples(st.integers(1, 5000), amounts), min_size=1, max_size=6))
    knots, at, seconds = [], draw(st.integers(0, 100)), draw(st.floats(1e-4, 0.1))
    for width, rise in steps:
        knots.append((at, seconds))
        at, seconds = at + width, seconds + rise
    flat, rates = draw(amounts), st.floats(0.0, 1e-5)
    context = (draw(st.sampled_from([0, 1000])), flat, flat + draw(st.floats(-1e-3, 1e-2)), draw(rates))
    start = draw(st.sampled_from([0, 100, 2**20]))
    pair = (start, draw(st.floats(-1e-2, 1e-2)), draw(st.floats(-5e-6, 5e-6)), draw(rates), draw(st.floats(0.0, 1e-8)))
    try:
        return CostModel(knots, context=context, pair=pair, start=draw(st.sampled_from([0.0, 1e-4, 0.2])))
    except InvalidConfig:
        return None


@given(any_model(), tokens, tokens, tokens, st.integers(1, 256))
@settings(max_examples=600)
def test_what_the_constructor_accepts_never_falls(
    model: CostModel | None, a: int, b: int, context: int, batch: int
) -> None:
    if model is not None:
        assert_monotone(model, a, b, context, batch)


@given(st.one_of(presets, any_model()), st.integers(0, 40_000), st.integers(0, 40_000), st.integers(1, 100))
def test_the_formula_is_the_documented_one(model: CostModel | None, missed: int, context: int, batch: int) -> None:
    if model is None:
        return
    naive = NaiveCost(model)
    context = max(missed, context)
    assert math.isclose(model.prefill_time(missed, context), naive.prefill(missed, context), rel_tol=1e-12)
    steps = model.iteration_time(decode_contexts=[context] * batch)
    assert math.isclose(steps, naive.decode_step(context, batch), rel_tol=1e-9)


def test_nothing_missed_costs_nothing_and_a_short_context_is_at_least_the_prompt() -> None:
    model = CostModel.preset("mistral-7b/a6000")
    assert model.prefill_time(0, 5000) == 0.0
    assert model.decode_time(0, 5000) == 0.0
    assert model.iteration_time() == 0.0
    assert model.prefill_time(700, 10) == model.prefill_time(700) == model.prefill_time(700, 700)


@given(presets, st.integers(1, 30_000), st.integers(0, 30_000))
def test_one_chunk_alone_is_a_prefill(model: CostModel, missed: int, before: int) -> None:
    assert model.iteration_time([(missed, before + missed)]) == model.prefill_time(missed, before + missed)


def test_a_mixed_batch_shares_the_fixed_part() -> None:
    model = CostModel.preset("mistral-7b/a6000")
    mixed = model.iteration_time([(480, 2000)], [2000] * 32)
    apart = model.prefill_time(480, 2000) + model.iteration_time(decode_contexts=[2000] * 32)
    assert max(model.prefill_time(512, 2000), apart / 2) < mixed < apart


# --- fits -------------------------------------------------------------------------------------------------------------


def test_a_fit_recovers_the_model_that_made_the_samples() -> None:
    truth = CostModel([(0, 0.02), (256, 0.02), (8192, 0.8)], context=(0, 0, 0, 2e-6), pair=(0, 0, 0, 0, 1e-9))
    grid = [(q, s) for q in (1, 64, 300, 700, 2500, 9000) for s in (9000, 12_000, 30_000)]
    decodes = [(batch, context) for batch in (1, 16, 64) for context in (500, 4000)]
    model = CostModel.fit(
        [(q, s, truth.prefill_time(q, s)) for q, s in grid],
        decode=[(n, c, truth.iteration_time(decode_contexts=[c] * n)) for n, c in decodes],
        name="mine",
    )
    assert model.name == "mine"
    for q, s in [*grid, (100, 20_000), (5000, 5000), (20_000, 20_000)]:
        assert model.prefill_time(q, s) == pytest.approx(truth.prefill_time(q, s), rel=1e-3)


@pytest.mark.parametrize("start", [0.0, 0.14])
def test_a_fit_finds_what_begins_a_prefill_where_decodes_were_measured_too(start: float) -> None:
    truth = CostModel([(0, 0.02), (8192, 0.8)], context=(0, 0, 0, 2e-6), start=start)
    prefills = [(q, s, truth.prefill_time(q, s)) for q in (16, 64, 300, 700, 2500) for s in (3000, 12_000)]
    decodes = [(n, c, truth.iteration_time(decode_contexts=[c] * n)) for n in (1, 16, 64) for c in (500, 4000)]
    model = CostModel.fit(prefills, decode=decodes)
    assert model.coefficients()["start"] == pytest.approx(start, abs=1e-4)
    assert model.decode_time(1, 1000, 32) == pytest.approx(truth.decode_time(1, 1000, 32), rel=1e-3)
    assert model.prefill_time(32, 5000) == pytest.approx(truth.prefill_time(32, 5000), rel=1e-3)
    assert CostModel.fit(prefills).coefficients()["start"] == 0.0, "of prefills alone it is part of every iteration"


def test_a_fit_of_the_h100_measurements_is_within_ten_percent_of_each() -> None:
    model = CostModel.fit([(q, s, ms / 1000) for q, s, ms in H100_POINTS])
    for q, s, ms in H100_POINTS:
        assert milliseconds(model, q, s) == pytest.approx(ms, rel=0.1)


@given(
    st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 30_000), st.floats(1e-4, 10)), min_size=3, max_size=9),
    *(tokens, tokens, tokens),
)
@settings(max_examples=25)
def test_a_fit_of_any_samples_never_falls(samples: list[tuple[int, int, float]], a: int, b: int, context: int) -> None:
    assert_monotone(CostModel.fit(samples), a, b, context, 8)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([(1, 1, 0.1)] * 2, "3 samples"),
        ([(1, 1, 0.1)] * 2 + [(1, 0.1)], "three numbers"),
        ([(1, 1, 0.1)] * 2 + [7], "three numbers"),
        ([(1, 1, 0.1)] * 2 + [(-1, 1, 0.1)], "samples: tokens"),
        ([(1, 1, 0.1)] * 2 + [(1, float("nan"), 0.1)], "samples: context tokens"),
        ([(1, 1, 0.1)] * 2 + [(1, "x", 0.1)], "samples: context tokens"),
        ([(1, 1, 0.1)] * 2 + [(1, 1, 0.0)], "samples: seconds"),
    ],
)
def test_a_fit_refuses_samples_that_are_none(samples: list, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        CostModel.fit(samples)
    with pytest.raises(InvalidInput, match=message.replace("samples:", "decode:")):
        CostModel.fit([], decode=samples)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"knots": []}, "knots"),
        ({"knots": [(n, 1.0) for n in range(17)]}, "knots: 1 to 16"),
        ({"knots": [(0, 1.0), (0, 2.0)]}, "knots must ascend"),
        ({"knots": [(0, 1.0), (5, 0.5)]}, "knots must ascend"),
        ({"knots": [(0, -1.0)]}, "knots must ascend"),
        ({"knots": [(0, float("nan"))]}, "knots"),
        ({"knots": [(0,)]}, "knots"),
        ({"knots": [("a", 1.0)]}, "knots"),
        ({"knots": [(0, 1.0)], "context": (0, 0, 0)}, "context"),
        ({"knots": [(0, 1.0)], "context": (0, 0, 0, -1e-9)}, "context"),
        ({"knots": [(0, 1.0)], "context": (1000, 0.5, 0.0, 1e-9)}, "context"),
        ({"knots": [(0, 1.0)], "pair": (0, 0, 0, 0)}, "pair"),
        ({"knots": [(0, 1.0)], "pair": (0, 0, 0, float("inf"), 0)}, "pair"),
        ({"knots": [(0, 1.0)], "pair": (0, 0, 0, -1e-9, 0)}, "pair"),
        ({"knots": [(0, 1.0)], "pair": (2**20, -0.1, 1e-9, 0, 0)}, "pair"),
        ({"knots": [(0, 1.0)], "start": -1e-9}, "start must not be negative"),
        ({"knots": [(0, 1.0)], "start": None}, "start must be"),
        ({"knots": [(0, 1.0)], "start": float("nan")}, "start must be"),
        ({"knots": [(0, 1.0), (8192, 1.5)], "pair": (2**20, 0.2, -1e-4, 1e-4, 0)}, "more tokens cost less"),
    ],
)
def test_a_cost_model_that_could_fall_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        CostModel(**arguments)


def test_a_falling_term_is_allowed_where_the_rest_makes_up_for_it() -> None:
    """The published A100 fit has one: attention falls with the chunk, but its matrix products grow faster."""
    assert CostModel.preset("mistral-7b/a100").coefficients()["pair"][2] < 0


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "x", None, [1]])
def test_questions_that_make_no_sense_are_refused_by_name(value: object) -> None:
    model = CostModel.preset("mistral-7b/a6000")
    with pytest.raises(InvalidInput, match="missed_tokens"):
        model.prefill_time(value)
    if value is not None:
        with pytest.raises(InvalidInput, match="context_tokens"):
            model.prefill_time(5, value)
    with pytest.raises(InvalidInput, match="output_tokens"):
        model.decode_time(value)
    with pytest.raises(InvalidInput, match="batch"):
        model.decode_time(5, 5, value)
    with pytest.raises(InvalidInput, match="prefill_chunks"):
        model.iteration_time([(value, 5)])
    with pytest.raises(InvalidInput, match="decode_contexts"):
        model.iteration_time([], [value])


def test_an_unknown_preset_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(InvalidConfig, match=r"'gpu'.*llama-3-70b/h100-tp4.*mistral-7b/a6000"):
        CostModel.preset("gpu")


# --- carrying around --------------------------------------------------------------------------------------------------


def test_a_model_with_a_start_survives_too() -> None:
    model = CostModel([(0, 0.02), (1000, 0.12)], start=0.1)
    for copy in (pickle.loads(pickle.dumps(model)), CostModel(**model.coefficients())):
        assert copy.coefficients() == model.coefficients()
        assert copy.prefill_time(20) == pytest.approx(0.122)


@pytest.mark.parametrize("name", CostModel.presets())
def test_a_model_survives_pickling_and_its_own_coefficients(name: str) -> None:
    model = CostModel.preset(name)
    copies = [pickle.loads(pickle.dumps(model)), CostModel(**model.coefficients())]
    for copy in copies:
        assert copy.coefficients() == model.coefficients()
        assert copy.prefill_time(1234, 5678) == model.prefill_time(1234, 5678)
    assert name in repr(model)
