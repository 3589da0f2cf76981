"""Chooses output tokens from logits: greedy, or by temperature, min-p, top-k and top-p. Owns the random draw; keeps no
state. What a request does to its logits before is `shaping`'s.

The draw for output position k is a hash of (seed, k) and nothing else, so the same request gives the same tokens in
any batch, after preemption, and when it resumes on another worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...types import SamplingParams, TokenLogprob
from .shaping import LogitShaper

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


class TokenChoice(NamedTuple):
    """How the token at output position `position` of a request is chosen."""

    params: SamplingParams
    position: int
    shaper: LogitShaper | None = None


@torch.inference_mode()
def choose_tokens(logits: torch.Tensor, choices: Sequence[TokenChoice]) -> list[int | None]:
    """A token for each row of `logits` [n, vocab] (float32), which stays as it is.

    None for a row without a finite maximum (NaN or overflow), where any token would be garbage. Cost: a pass over the
    logits, and a sort of each row that samples with top_p < 1 or top_k.
    """
    if not choices:
        return []
    if any(choice.shaper is not None for choice in choices):
        rows = zip(logits, choices, strict=True)
        logits = torch.stack([row if one.shaper is None else one.shaper.shaped(row, one.position) for row, one in rows])
    greedy = logits.argmax(-1)
    best = logits.gather(-1, greedy[:, None])[:, 0]
    tokens: list[int | None] = list(greedy.tolist())
    for row, finite in enumerate(torch.isfinite(best).tolist()):
        params, position, _ = choices[row]
        if not finite:
            tokens[row] = None
        elif params.temperature:
            tokens[row] = _draw(logits[row], best[row], params, uniform(params.seed or 0, position))
    return tokens


@torch.inference_mode()
def logprobs_of(row: torch.Tensor, token: int, count: int) -> TokenLogprob:
    """What the model itself says of a token, before temperature and shaping, and of the `count` likeliest."""
    logprobs = row.double().log_softmax(-1)
    best = logprobs.topk(min(count, len(row)))
    top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprob(float(logprobs[token]), tuple(top))


def _draw(logits: torch.Tensor, best: torch.Tensor, params: SamplingParams, chance: float) -> int:
    """The token at `chance` of the cumulative distribution of what min_p, then top_k, then top_p leave.

    Subtracting the maximum first keeps tiny temperatures finite; float64 sums keep large vocabularies exact enough.
    """
    weights = ((logits - best).double() / params.temperature).exp()
    if params.min_p:
        weights = torch.where(weights < params.min_p, 0.0, weights)
    top_k = params.top_k if params.top_k is not None and 0 < params.top_k < len(weights) else None
    top_p = 1.0 if params.top_p is None else params.top_p
    if top_k is None and top_p >= 1.0:
        return _at(weights.cumsum(0), chance)
    sorted_weights, order = weights.sort(descending=True, stable=True)
    sums = sorted_weights[:top_k].cumsum(0)
    if top_p < 1.0:
        sums = sums[: int(torch.searchsorted(sums, top_p * sums[-1])) + 1]
    return int(order[_at(sums, chance)])


def _at(sums: torch.Tensor, chance: float) -> int:
    """First index whose cumulative sum exceeds `chance` of the whole; never one of weight 0, whatever is rounded."""
    last = int(torch.searchsorted(sums, sums[-1]))
    return min(int(torch.searchsorted(sums, chance * sums[-1], right=True)), last)
