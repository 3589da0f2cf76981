"""The two thresholds of the paper that come "from profiling GPU and LLM types", for which it has no formula: Th_bal and
IMBALR of a cost model. Owns how we derive them (why: docs/experiments/rebalancing.md); reads times, knows no worker.

Paper section 4.2, "Post-assignment load adjustment" and "Prefill-decoding balancing".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Protocol

from ..errors import InvalidInput

GROWTH_MAX = 1.1  # of an iteration, for tokens that come along "almost freely"
FREE_TOKENS_MAX = 8192
PROMPT_TOKENS = 4096  # of the prefill that says what a token costs where it is not free


class Times(Protocol):
    """What is asked of a cost model; all in seconds."""

    def prefill_time(self, missed_tokens: float, context_tokens: float | None = None) -> float: ...
    def decode_time(self, output_tokens: float, context_tokens: float = 0, batch: float = 1) -> float: ...
    def iteration_time(
        self, prefill_chunks: Iterable[tuple[int, int]] = (), decode_contexts: Iterable[int] = ()
    ) -> float: ...


def free_prefill_tokens(cost: Times) -> int:
    """Prompt tokens that an iteration which decodes takes along while it grows by no more than a tenth."""
    most = GROWTH_MAX * cost.iteration_time((), [0])
    return bisect_right(range(FREE_TOKENS_MAX + 1), most, lo=1, key=lambda n: cost.iteration_time([(n, n)], [0])) - 1


def imbalance_share(cost: Times) -> float:
    """IMBALR: the share of decoding, in seconds, beyond which a worker has prefill to give away; in [0, 1].

    An iteration that decodes takes T and has room for n tokens of prefill, which alone would take n p. A worker whose
    decoding takes more than T / (T + n p) of its time does not fill that room. 1, which no share exceeds, where none
    is free, and where nothing takes any time. Changes nothing; a dozen looks at the model.
    """
    iteration = cost.iteration_time((), [0])
    prefill = free_prefill_tokens(cost) * cost.prefill_time(PROMPT_TOKENS, PROMPT_TOKENS) / PROMPT_TOKENS
    return iteration / (iteration + prefill) if iteration + prefill > 0.0 else 1.0


def rebalance_ratio(cost: Times, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> float:
    """Th_bal: how many times more a request costs where its prefix is not cached; at least 1. Raises InvalidInput.

    A request takes as long as its own work times how loaded its worker is. Moved, it is computed anew: that pays where
    the other worker's load is lower by more than its work grows.
    """
    if not 0 <= cached_tokens < prompt_tokens or output_tokens < 1:
        raise InvalidInput(
            f"cached_tokens must be in [0, prompt_tokens) and output_tokens at least 1, got {cached_tokens} of "
            f"{prompt_tokens} and {output_tokens}"
        )
    decode = cost.decode_time(output_tokens, prompt_tokens)
    cached = cost.prefill_time(prompt_tokens - cached_tokens, prompt_tokens) + decode
    return max(1.0, (cost.prefill_time(prompt_tokens, prompt_tokens) + decode) / cached)
