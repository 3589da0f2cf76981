"""Two rules of AIBrix's gateway: `prefix-cache`, and `prefix-cache-preble`, its variant of Preble's algorithm. Owns
both rules; the costs of the second one's window are kept by the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt

from .base import Policy, RequestView, WorkersView
from .known import WindowCosts, drawn_least, ranks

IMBALANCE_REQUESTS = 8  # live requests between the most and the least loaded worker, beyond which the gate closes


def is_imbalanced(live: Sequence[int]) -> bool:
    """Whether only the least loaded workers may take a request."""
    return max(live) - min(live) > IMBALANCE_REQUESTS


class AibrixPrefix(Policy):
    """`prefix-cache`: the best match in whole percent, then the fewest live requests, among the workers that cache
    something and have no more live requests than the mean and one standard deviation of all.

    If there is none, or the fleet is imbalanced (8 live requests between most and fewest): the fewest live requests,
    equals drawn among.
    """

    name = reason = "aibrix_prefix"

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        live = workers.live_requests
        percent = [100 * matched // len(request.token_ids) for matched in workers.matched_tokens]
        mean = sum(live) / len(live)
        most = mean + sqrt(sum((requests - mean) ** 2 for requests in live) / len(live))
        if is_imbalanced(live):
            return [float(requests) for requests in live]
        # The least loaded is never above the mean, so where no match counts it comes out first.
        return ranks([(live[i] > most, -percent[i], live[i]) for i in range(len(workers))])

    def pick(self, scores: Sequence[float], request: RequestView, workers: WorkersView) -> int:
        return drawn_least(scores, request.draw)


class AibrixPreble(Policy):
    """`prefix-cache-preble`: more than half of the prompt cached, then of the workers with the longest match the one
    with the fewest requests in the window; else the lowest cost in the window.

    If the fleet is imbalanced, only workers with the fewest live requests are looked at. The cost of a worker: for
    each different prompt it served in the last three minutes, `miss rate * count * prefill seconds + 45 * 0.15`.
    """

    name = reason = "aibrix_preble"
    needs = ("window_costs",)
    match_share = 0.5

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        window: WindowCosts = request.known["window_costs"]
        live = workers.live_requests
        fewest = min(live) if is_imbalanced(live) else max(live)
        open_to = [requests <= fewest for requests in live]
        matched = [tokens if may else -1 for tokens, may in zip(workers.matched_tokens, open_to, strict=True)]
        longest = max(matched)
        if longest > self.match_share * len(request.token_ids):
            return [
                float(window.requests[name]) if tokens == longest else inf
                for name, tokens in zip(workers.ids, matched, strict=True)
            ]
        return [window.seconds[name] if may else inf for name, may in zip(workers.ids, open_to, strict=True)]

    def pick(self, scores: Sequence[float], request: RequestView, workers: WorkersView) -> int:
        """Equals go by order: the cost counts what a worker served, so they are rare."""
        return min(range(len(scores)), key=scores.__getitem__)
