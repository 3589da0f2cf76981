"""llm-d's default of 2026, which keeps requests on workers that cache their prompt until these are saturated. Owns that
rule."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from ..errors import InvalidConfig
from ..types import check_seconds
from .base import Policy, RequestView, WorkersView


class LlmdSticky(Policy):
    """Least prefill outstanding, this request's included, among workers that cache at least `hit_share` of the prompt.

    Among all workers if none does, or if the least prefill outstanding on those that do is more than `release_seconds`
    above the least on the others. llm-d's prefix-cache-affinity filter with its token-load scorer and their defaults
    ("Sticky Until Saturated", August 2026).

    Ours: seconds by each worker's cost model for uncached tokens in flight over one peak throughput (15,928 tokens/s).
    Left out: its setting for traffic bound by decoding (fewest requests among the same workers), a threshold of 0.6 for
    images, predicted latencies, and exploring at random, which is off by default.
    """

    name = reason = "llmd_sticky"

    def __init__(self, hit_share: float = 0.8, release_seconds: float = 18.0) -> None:
        if not 0.0 < hit_share <= 1.0:
            raise InvalidConfig(f"LlmdSticky.hit_share must be above 0 and at most 1, got {hit_share!r}")
        self.hit_share = hit_share
        check_seconds("LlmdSticky.release_seconds", release_seconds)
        self.release_seconds = release_seconds

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        queued, enough = workers.waiting_prefill_seconds, self.hit_share * len(request.token_ids)
        warm = [tokens >= enough for tokens in workers.matched_tokens]
        least_warm = min((seconds for seconds, is_warm in zip(queued, warm, strict=True) if is_warm), default=inf)
        least_cold = min((seconds for seconds, is_warm in zip(queued, warm, strict=True) if not is_warm), default=inf)
        sticks = least_warm <= least_cold + self.release_seconds
        return [
            seconds + own if is_warm or not sticks else inf
            for seconds, own, is_warm in zip(queued, workers.prefill_seconds, warm, strict=True)
        ]
