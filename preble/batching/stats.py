"""What `LocalScheduler.stats` returns, as a type. Owns no figure."""

from __future__ import annotations

from typing import TypedDict


class LocalStats(TypedDict):
    """Counters since the start and sizes now, in requests and tokens. `prompt_tokens` and `cached_tokens` count each
    request once, at its first admission; `deferred` the times a request was delayed because a running one was computing
    its prefix. `too_late`: requests whose deadline was over before
    they began. `group_sizes`: newcomers in each priority group, lowest first, and last
    those with a deadline."""

    admitted: int
    finished: int
    cancelled: int
    preempted: int
    deferred: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    running: int
    waiting: int
    kv_used_tokens: int
    kv_cached_tokens: int
    waiting_uncached_tokens: int
    steps: int
    arrived: int
    overdue_picks: int
    cache_looks: int
    group_sizes: list[int]
    oldest_arrival_seconds: float | None
    too_late: int
    free_tokens: int
    evictions: int
    evicted_tokens: int
    collapsed_events: int
