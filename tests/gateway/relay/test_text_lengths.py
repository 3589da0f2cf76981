"""How many bytes a token of a key of text has: learned from what engines count, and changed seldom."""

from __future__ import annotations

import pytest

from preble.gateway.relay.text_lengths import MODELS_MAX, PROMPTS_MIN, TOKENS_MIN, USUAL, TextLengths


def learned(lengths: TextLengths, bytes_per_token: float, prompts: int, model: str = "m") -> int:
    """What it takes for a token after so many prompts with that many bytes a token."""
    for _ in range(prompts):
        size = lengths.token_bytes(model)
        lengths.learn(model, size, 40_000 // size, round(40_000 / bytes_per_token))
    return lengths.token_bytes(model)


@pytest.mark.parametrize(
    ("seen", "taken"),
    [(1.0, 1), (1.3, 1), (1.9, 2), (2.5, 2), (2.8, 4), (3.3, 4), (4.4, 4), (5.8, 4), (6.3, 8), (30, 8)],
)
def test_a_length_that_is_clearly_another_is_taken_after_some_prompts(seen: float, taken: int) -> None:
    lengths = TextLengths()
    assert learned(lengths, seen, PROMPTS_MIN - 1) == USUAL
    assert learned(lengths, seen, 1) == taken
    assert learned(lengths, seen, 100 * PROMPTS_MIN) == taken, "it stays"


def test_each_change_needs_more_prompts_than_the_one_before() -> None:
    lengths = TextLengths()
    assert learned(lengths, 1.0, PROMPTS_MIN) == 1
    assert learned(lengths, 8.0, 4 * PROMPTS_MIN - 1) == 1 and learned(lengths, 8.0, 1) == 8
    assert learned(lengths, 4.0, 16 * PROMPTS_MIN - 1) == 8 and learned(lengths, 4.0, 1) == 4


def test_short_prompts_and_keys_of_another_length_say_nothing() -> None:
    lengths = TextLengths()
    for _ in range(2 * PROMPTS_MIN):
        lengths.learn("m", USUAL, TOKENS_MIN - 1, 100_000)
        lengths.learn("m", 8, TOKENS_MIN, 100_000)
        lengths.learn("m", USUAL, TOKENS_MIN, 0)
    assert lengths.token_bytes("m") == USUAL


def test_so_many_models_are_learned_of() -> None:
    lengths = TextLengths()
    for number in range(MODELS_MAX):
        lengths.learn(f"m{number}", USUAL, TOKENS_MIN, TOKENS_MIN)
    assert learned(lengths, 1.0, PROMPTS_MIN, "one more") == USUAL
    assert learned(lengths, 1.0, PROMPTS_MIN, "m0") == 1
