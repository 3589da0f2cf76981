"""Sampling alone: the draw depends on (seed, position) only, follows the distribution, and never returns garbage."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from preble.engines.torch.sampling import TokenChoice, choose_tokens, uniform  # noqa: E402
from preble.types import SamplingParams  # noqa: E402

PROBABILITIES = [0.5, 0.25, 0.125, 0.0625, 0.0625]


def logits_of(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor([[math.log(p) if p else -math.inf for p in probabilities]])


def frequencies(sampling: SamplingParams, probabilities: list[float], count: int = 4000) -> list[float]:
    """How often each token is chosen over `count` output positions."""
    rows = logits_of(probabilities).expand(count, -1)
    tokens = choose_tokens(rows, [TokenChoice(sampling, position) for position in range(count)])
    return [tokens.count(token) / count for token in range(len(probabilities))]


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**31 - 1))
def test_a_draw_is_a_fraction_and_repeats(seed: int, position: int) -> None:
    assert 0.0 <= uniform(seed, position) < 1.0
    assert uniform(seed, position) == uniform(seed, position)


def test_draws_are_fixed_for_ever() -> None:
    """A worker of another version resumes a request with the same numbers: changing them is a change of protocol."""
    assert uniform(0, 0) == 0.6524484863740322
    assert uniform(12345, 678) == 0.8468128010864124


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_draws_are_even_and_uncorrelated(along: str) -> None:
    draws = [uniform(7, i) if along == "positions" else uniform(i, 7) for i in range(20_000)]
    deviation = math.sqrt(1 / 12 / len(draws))
    assert abs(sum(draws) / len(draws) - 0.5) < 4 * deviation
    tenths = [0] * 10
    for draw in draws:
        tenths[int(draw * 10)] += 1
    assert sum((count - 2000) ** 2 / 2000 for count in tenths) < 27.9  # chi-square, 9 degrees, 0.1 %
    lagged = sum((a - 0.5) * (b - 0.5) for a, b in zip(draws, draws[1:], strict=False)) / len(draws) * 12
    assert abs(lagged) < 4 / math.sqrt(len(draws))


def test_sampling_follows_the_distribution() -> None:
    for got, expected in zip(frequencies(SamplingParams(temperature=1.0), PROBABILITIES), PROBABILITIES, strict=True):
        assert got == pytest.approx(expected, abs=4 * math.sqrt(expected / 4000))


def test_temperature_sharpens_and_flattens() -> None:
    weights = [p**0.5 for p in PROBABILITIES]
    flat = frequencies(SamplingParams(temperature=2.0), PROBABILITIES)
    for got, weight in zip(flat, weights, strict=True):
        assert got == pytest.approx(weight / sum(weights), abs=0.03)
    assert frequencies(SamplingParams(temperature=0.05), PROBABILITIES)[0] > 0.999


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, 1), (0.5, 1), (0.51, 2), (0.76, 3), (0.88, 4), (1.0, 5)])
def test_top_p_keeps_the_smallest_set_with_that_mass(top_p: float, kept: int) -> None:
    got = frequencies(SamplingParams(temperature=1.0, top_p=top_p), PROBABILITIES)
    mass = sum(PROBABILITIES[:kept])
    for token, frequency in enumerate(got):
        expected = PROBABILITIES[token] / mass if token < kept else 0.0
        assert frequency == pytest.approx(expected, abs=0.035)
        assert (frequency > 0) == (token < kept)


def test_top_p_finds_likely_tokens_wherever_they_stand() -> None:
    got = frequencies(SamplingParams(temperature=1.0, top_p=0.7), [0.05, 0.45, 0.05, 0.45], count=500)
    assert got[0] == got[2] == 0 and got[1] > 0.4 and got[3] > 0.4


def test_a_token_of_probability_zero_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    from preble.engines.torch import sampling

    for chance in (0.0, 1 - 2**-53):
        monkeypatch.setattr(sampling, "uniform", lambda seed, position, chance=chance: chance)
        for top_p in (1.0, 0.999):
            params = SamplingParams(temperature=1.0, top_p=top_p)
            (token,) = choose_tokens(logits_of([0.0, 0.3, 0.7, 0.0]), [TokenChoice(params, 0)])
            assert token in (1, 2)


def test_greedy_takes_the_best_whatever_the_seed() -> None:
    for seed in range(5):
        assert choose_tokens(logits_of([0.2, 0.5, 0.3]), [TokenChoice(SamplingParams(seed=seed), seed)]) == [1]


@given(temperature=st.floats(1e-300, 1e-3), seed=st.integers(0, 1000))
def test_tiny_temperatures_are_greedy_and_do_not_overflow(temperature: float, seed: int) -> None:
    params = SamplingParams(temperature=temperature, seed=seed)
    assert choose_tokens(torch.tensor([[1e30, 2e30, -1e30]]), [TokenChoice(params, 0)]) == [1]


def test_rows_are_independent_of_their_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((6, 50), generator=generator)
    choices = [TokenChoice(SamplingParams(temperature=0.7 * (i % 2), top_p=0.9, seed=i), 10 * i) for i in range(6)]
    together = choose_tokens(rows, choices)
    assert together == [choose_tokens(rows[i : i + 1], choices[i : i + 1])[0] for i in range(6)]
    assert choose_tokens(rows[:0], []) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_give_no_token(bad: float, temperature: float) -> None:
    rows = torch.zeros((3, 8))
    rows[1, 5] = bad
    tokens = choose_tokens(rows, [TokenChoice(SamplingParams(temperature=temperature), 0)] * 3)
    assert tokens[1] is None and tokens[0] is not None and tokens[2] is not None
    nothing_possible = torch.full((1, 8), -math.inf)
    assert choose_tokens(nothing_possible, [TokenChoice(SamplingParams(temperature=temperature), 0)]) == [None]
