"""A rule that stays where prompts are cached, whatever waits there: what plans are for. Owns that rule."""

from __future__ import annotations

from collections.abc import Sequence

from preble.policies.base import Policy, RequestView, WorkersView


class Sticky(Policy):
    """Of those that cache nine tenths of the longest hit, if that is half of the prompt or more, the one with the
    least prefill ahead; else of all."""

    name = reason = "sticky"
    takes_plans = True

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        longest = max(workers.matched_tokens)
        enough = 0.9 * longest if longest > 0.5 * len(request.token_ids) else 0.0
        columns = zip(workers.matched_tokens, workers.waiting_prefill_seconds, workers.prefill_seconds, strict=True)
        return [waits + prefill if held >= enough else float("inf") for held, waits, prefill in columns]
