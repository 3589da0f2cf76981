"""Chooses output tokens from logits: greedy, or by temperature and top-p. Owns the random draw; keeps no state.

The draw for output position k is a hash of (seed, k) and nothing else, so the same request gives the same tokens in
any batch, after preemption, and when it resumes on another worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...types import SamplingParams

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends only on (seed, position): splitmix64 twice, the upper 53 bits."""
    mixed = _mix((_mix(seed & _MASK) + position * 0x9E3779B97F4A7C15) & _MASK)
    return (mixed >> 11) / (1 << 53)


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@torch.inference_mode()
def choose_tokens(logits: torch.Tensor, choices: Sequence[tuple[SamplingParams, int]]) -> list[int | None]:
    """A token for each row of `logits` [n, vocab] (float32), given its parameters and output position.

    None for a row without a finite maximum (NaN or overflow), where any token would be garbage. Cost: a pass over the
    logits, and a sort of each row that samples with top_p < 1.
    """
    if not choices:
        return []
    greedy = logits.argmax(-1)
    best = logits.gather(-1, greedy[:, None])[:, 0]
    tokens: list[int | None] = list(greedy.tolist())
    for row, finite in enumerate(torch.isfinite(best).tolist()):
        params, position = choices[row]
        if not finite:
            tokens[row] = None
        elif params.temperature > 0.0:
            tokens[row] = _draw(logits[row], best[row], params, uniform(params.seed, position))
    return tokens


def _draw(logits: torch.Tensor, best: torch.Tensor, params: SamplingParams, chance: float) -> int:
    """The token at `chance` of the cumulative distribution of the likeliest tokens that together have mass top_p.

    Subtracting the maximum first keeps tiny temperatures finite; float64 sums keep large vocabularies exact enough.
    """
    weights = ((logits - best).double() / params.temperature).exp()
    if params.top_p >= 1.0:
        return _at(weights.cumsum(0), chance)
    sorted_weights, order = weights.sort(descending=True, stable=True)
    sums = sorted_weights.cumsum(0)
    kept = int(torch.searchsorted(sums, params.top_p * sums[-1])) + 1
    return int(order[_at(sums[:kept], chance)])


def _at(sums: torch.Tensor, chance: float) -> int:
    """First index whose cumulative sum exceeds `chance` of the whole; never one of weight 0, whatever is rounded."""
    last = int(torch.searchsorted(sums, sums[-1]))
    return min(int(torch.searchsorted(sums, chance * sums[-1], right=True)), last)
