"""DualMap: two workers for every prefix, the warmer one while it is in time. Owns that rule."""

from __future__ import annotations

from collections.abc import Sequence

from ..types import check_seconds
from .base import Policy, RequestView, WorkersView
from .known import by_rendezvous


class DualMap(Policy):
    """Of two workers that the prompt's beginning is hashed to, the one that caches more of it; if its first token would
    take more than `ttft_max_seconds`, the one whose would come sooner (arXiv 2602.06502, ICLR 2026).

    Time to the first token: prefill booked and not done, and this request's own. Equals go by fewer prompt tokens of
    live requests, for which DualMap counts running blocks.

    Ours: the beginning that is hashed is that of `known.PromptSession`, which grows where many share it, as DualMap's
    short prefix does by a rule of its own; one rendezvous order for two hash rings, so that the two always differ. Left
    out: the central queue and the requests that move from it between the two, since a request here is placed for good;
    the cost of reading reused KV.
    """

    name = reason = "dualmap"
    needs = ("session",)

    def __init__(self, ttft_max_seconds: float = 5.0) -> None:
        check_seconds("DualMap.ttft_max_seconds", ttft_max_seconds)
        self.ttft_max_seconds = ttft_max_seconds

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        pair = by_rendezvous(request.known["session"].key, workers.ids)[:2]
        ttft = {i: workers.waiting_prefill_seconds[i] + workers.prefill_seconds[i] for i in pair}
        matched, tokens = workers.matched_tokens, workers.live_prompt_tokens
        chosen = min(pair, key=lambda i: (-matched[i], tokens[i]))
        if ttft[chosen] > self.ttft_max_seconds:
            chosen = min(pair, key=lambda i: (ttft[i], tokens[i]))
        return [0.0 if i == chosen else 1.0 if i in pair else 2.0 for i in range(len(workers))]
