"""The cache-aware rule of SGLang's gateway (smg): affinity while the fleet is balanced. Owns that rule with both of its
published default sets."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidConfig
from ..types import check_int
from .base import Policy, RequestView, WorkersView
from .known import ranks


class CacheAware(Policy):
    """The longest cached prefix if it is long enough and the fleet is balanced, else the fewest live requests.

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
