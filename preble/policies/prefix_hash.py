"""Consistent hashing of the prompt's beginning with bounded loads, as SGLang's gateway (smg) does it. Owns the ring and
the bound; nothing is remembered between decisions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import InvalidConfig
from ..types import check_int
from .base import Policy, RequestView, WorkersView
from .known import hashed, ranks

POINTS = 150  # of each worker on the ring
RINGS_MAX = 256  # sets of workers whose ring is kept ready


@lru_cache(maxsize=RINGS_MAX)
def ring_of(ids: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(points in order, the position of the worker each belongs to)."""
    points = sorted((hashed(f"{name}#{n}".encode()), i) for i, name in enumerate(ids) for n in range(POINTS))
    return tuple(point for point, _ in points), tuple(i for _, i in points)


class PrefixHash(Policy):
    """The worker whose point on a hash ring follows the hash of the first `prefix_tokens` tokens, unless it is busy.

    A worker is busy with more than `load_factor * (live requests of all + 1) / workers` live requests. Then the least
    loaded takes the request, by order among equals; it is never busy, since the bound is above the mean.
    """

    name = reason = "prefix_hash"

    def __init__(self, prefix_tokens: int = 256, load_factor: float = 1.25) -> None:
        self.prefix_tokens = check_int("PrefixHash.prefix_tokens", prefix_tokens, 1, 1 << 28)
        if not load_factor >= 1.0:
            raise InvalidConfig(f"PrefixHash.load_factor must be at least 1, got {load_factor!r}")
        self.load_factor = load_factor

    def home(self, token_ids: Any, namespace: object, ids: Sequence[str]) -> int:
        """The position of the worker that the ring gives this prompt to."""
        beginning = np.asarray(token_ids[: self.prefix_tokens]).astype("<i4", copy=False)
        points, owners = ring_of(tuple(ids))
        at = bisect_left(points, hashed(repr(namespace).encode() + beginning.tobytes()))
        return owners[at % len(owners)]

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        home = self.home(request.token_ids, request.namespace, workers.ids)
        live = workers.live_requests
        bound = self.load_factor * (sum(live) + 1) / len(workers)
        busy = [requests > bound for requests in live]
        return ranks([(i != home or busy[i], busy[i], live[i]) for i in range(len(workers))])
