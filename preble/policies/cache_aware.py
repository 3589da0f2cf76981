"""The cache-aware rules of SGLang's gateway (smg): until August 2026 affinity while the fleet is balanced, with both of
its published default sets; since then a request that leaves its prefix does so alone. Owns both rules."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from ..errors import InvalidConfig
from ..types import check_int
from .base import Policy, RequestView, WorkersView
from .known import ActiveBlocks, ranks
from .kv_cost import BLOCK_TOKENS


class CacheAware(Policy):
    """The longest cached prefix if it is long enough and the fleet is balanced, else the fewest live requests. The
    gateway's rule until August 2026.

    The fleet is imbalanced when `most - fewest > balance_requests` and `most > balance_ratio * fewest` live requests;
    then no request follows its prefix, whichever worker is the busy one. A prefix is long enough when it is more than
    `cache_threshold` of the prompt.

    The defaults are those of the gateway's command line; "cache_aware:struct" has those of its policy struct (0.5, 32,
    1.1). Its other two gates, on KV usage, are off by default and left out.
    """

    name = reason = "cache_aware"
    needs = ("placed_requests",)

    def __init__(
        self,
        cache_threshold: float = 0.3,
        balance_requests: int = 64,
        balance_ratio: float = 1.5,
        name: str = "cache_aware",
    ) -> None:
        if not 0.0 <= cache_threshold <= 1.0:
            raise InvalidConfig(f"CacheAware.cache_threshold must be in [0, 1], got {cache_threshold!r}")
        if not balance_ratio >= 1.0:
            raise InvalidConfig(f"CacheAware.balance_ratio must be at least 1, got {balance_ratio!r}")
        self.cache_threshold = cache_threshold
        self.balance_requests = check_int("CacheAware.balance_requests", balance_requests, 0, 1 << 30)
        self.balance_ratio = balance_ratio
        self.name = self.reason = name

    def is_imbalanced(self, live: Sequence[int]) -> bool:
        """Whether affinity is switched off for the whole fleet."""
        most, fewest = max(live), min(live)
        return most - fewest > self.balance_requests and most > self.balance_ratio * fewest

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        placed = request.known["placed_requests"]
        live, matched = workers.live_requests, workers.matched_tokens
        enough = self.cache_threshold * len(request.token_ids)
        if self.is_imbalanced(live) or max(matched) <= enough:
            return ranks([(live[i], placed[name], i) for i, name in enumerate(workers.ids)])
        return ranks([(-matched[i], live[i], workers.cached_tokens[i], i) for i in range(len(workers))])


class CacheAwareSpill(Policy):
    """The longest cached prefix if it is more than half of the prompt, unless the worker is too busy; else the least
    expected wait. smg from 1.13 on (August 2026: pull requests 2161, 2220 and 2341).

    Of the workers with the longest match the one with the fewest live requests takes the request, unless it has more
    than 1.5 times the fleet's mean, and more than the mean and a margin: twice the mean's root, at least 4. Then, and
    where no match is long enough, the least expected wait wins: seconds of prefill booked and not done, and 0.15 s
    times k / (1 - k), k being the share of KV in use. Workers with 8 requests waiting, or 80 % of KV in use, are left
    out while another is not.

    Ours is what the gateway polls from engines: requests before their first token for those that wait, the cost model's
    seconds for queued tokens over throughput, and for KV in use the different blocks of live requests' prompts and
    their expected output, queued ones included. Left out, since they change nothing: at most 8 holders are compared
    (the least loaded is looked for), and a margin of at most 64 (half of the mean is more by then).
    """

    name = reason = "cache_aware_spill"
    needs = ("active_blocks",)
    match_share = 0.5
    load_ratio = 1.5
    margin_min = 4.0
    waiting_max, kv_share_max = 8, 0.8  # from these on a worker is left out
    kv_seconds = 0.15

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        live, matched = workers.live_requests, workers.matched_tokens
        used = self.kv_shares(request.known["active_blocks"], workers)
        waiting = workers.waiting_requests
        out = [waiting[i] >= self.waiting_max or used[i] >= self.kv_share_max for i in range(len(workers))]
        if all(out):
            out = [False] * len(workers)
        longest = max(tokens for tokens, left in zip(matched, out, strict=True) if not left)
        live_max = self.live_max(live) if longest > self.match_share * len(request.token_ids) else -1.0
        keys = []
        for i, share in enumerate(used):
            wait = workers.waiting_prefill_seconds[i] + self.kv_seconds * share / (1 - share)
            follows = not out[i] and matched[i] == longest and live[i] <= live_max
            keys.append((0, live[i], wait, i) if follows else (1 + out[i], wait, live[i], i))
        return ranks(keys)

    def kv_shares(self, active: ActiveBlocks, workers: WorkersView) -> list[float]:
        """The share of each worker's KV that its live requests use; below 1, whatever is booked."""
        return [
            min((BLOCK_TOKENS * active.blocks[name] + output) / capacity, 0.999)
            for name, output, capacity in zip(
                workers.ids, workers.live_output_tokens, workers.kv_capacity_tokens, strict=True
            )
        ]

    def live_max(self, live: Sequence[int]) -> float:
        """With how many live requests a worker still keeps what follows its prefix there."""
        mean = sum(live) / len(live)
        return max(mean + max(2 * sqrt(mean), self.margin_min), self.load_ratio * mean)
