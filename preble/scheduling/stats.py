"""What `GlobalScheduler.stats` returns, as types: one TypedDict for each dict in it. Owns no figure, and is loaded only
when somebody asks for these names.

Unless a name says otherwise an int counts events since the start or is a size now. Names that end in `_seconds` are
seconds, in `_tokens` tokens, in `_bytes` bytes. What has `total=False` may be empty.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, TypedDict

CacheSource = Literal["estimate", "reports", "events"]


class TreeStats(TypedDict):
    """The prefix tree. `bytes_max`: its bound (`SchedulerConfig.max_bytes`). `shed_nodes`: forgotten at the bound.
    `refused_tokens`: of prompts that found no room. `ghost_marks`: marks of caches that were cleared, not swept yet."""

    bytes_used: int
    bytes_max: int
    nodes: int
    marks: int
    ghost_marks: int
    namespaces: int
    shed_nodes: int
    refused_tokens: int


class PlanStats(TypedDict):
    """One plan: a prefix that moves, or gets a copy. Times are the scheduler's clock's; `why` says how it ended."""

    id: int
    kind: str
    namespace: Hashable
    prefix_tokens: int
    from_worker: str
    to_worker: str
    reason: str
    saved_seconds: float
    made_at: float
    expires_at: float | None
    state: Literal["warming", "active", "ended"]
    ended_at: float | None
    why: str | None


class RebalancerStats(TypedDict, total=False):
    """Plans that are active, and the latest that have ended; empty where prefixes are neither moved nor copied."""

    active: list[PlanStats]
    ended: list[PlanStats]
    made: dict[str, int]
    why_ended: dict[str, int]
    left_out: int
    groups: int
    crowded_out: int
    redirects: int


class PrefixMoveStats(TypedDict):
    """A prefix that changed hands because its worker leaves; `head`: the first token ids of its own part."""

    namespace: Hashable
    prefix_tokens: int
    head: tuple[int, ...]
    giver: str
    taker: str
    reason: str
    hits: float
    loss_seconds: float
    moved_at: float | None


class MembershipStats(TypedDict):
    """Workers on the way out: prefixes each has still to give, and the last moves, oldest first."""

    given_by_leavers: int
    left_out: int
    leaving: dict[str, int]
    moves: list[PrefixMoveStats]


class DrainStats(TypedDict):
    """What it costs to drain a worker."""

    worker: str
    recompute_seconds: float
    moved_load: float
    seen_at: float


class ScalingStats(TypedDict):
    """What a worker more, or one less, would do (docs/fleet.md). Loads are seconds of worker time that arrive in a
    second. None: there is no worker to take away."""

    workers: int
    requests_per_second: float
    prefill_load: float
    decode_load: float
    step_seconds: float
    waiting_requests: float
    waiting_seconds: float
    observed_seconds: float
    window_seconds: float
    utilisation: float
    variability: float
    ttft_seconds: float
    ttft_with_one_more_seconds: float
    one_more_saves_seconds: float
    ttft_with_one_less_seconds: float | None
    one_less_costs_seconds: float | None
    desired_workers: int
    cheapest_drain: DrainStats | None
    drain_seconds: dict[str, float]
    worker_loads: dict[str, float]


class CostStats(TypedDict, total=False):
    """A worker's cost as decisions reckon with it: the arguments of its `CostModel`, factors on the one it began with,
    and how sure they are, from 0 to 1. Empty where costs are not learned."""

    name: str
    knots: list[tuple[float, float]]
    context: tuple[float, float, float, float]
    pair: tuple[float, float, float, float, float]
    start: float
    prefill_factor: float
    decode_factor: float
    measured_prefill_factor: float | None
    measured_decode_factor: float | None
    prefill_confidence: float
    decode_confidence: float
    prefill_samples: int
    decode_samples: int
    ignored_samples: int
    cost_changes: int


class CacheMismatchStats(TypedDict):
    """What a worker's engine and the prompts sent there differ in. `position`: index of the first such token."""

    worker: str
    cause: str
    message: str
    position: int | None
    scheduled_token: int | None
    stored_token: int | None


class WorkerStats(TypedDict):
    """One worker. `live_*` is booked now, `waiting_*` of that without a first token, `window_*` booked within the last
    `SchedulerConfig.history_seconds`; `load_seconds` is L of the paper; `place_wait_seconds` is until one of
    `WorkerSpec.max_running` places is free for one more. Of `cached_tokens`, `away_tokens` are in host
    memory or on disk; a token takes `host_token_seconds` and `disk_token_seconds` to load from there.
    `host_loaded_tokens` and `disk_loaded_tokens`: of the hits of requests placed here, those to be loaded.
    `drift_requests`: how many more requests its engine reports than are booked, for `drift_seconds`. `cache_accuracy`:
    from 0 to 1, how much of what was known to be cached was found there."""

    live_requests: int
    waiting_requests: int
    waiting_prefill_seconds: float
    place_wait_seconds: float
    live_output_tokens: int
    live_prompt_tokens: int
    window_requests: int
    window_prefill_seconds: float
    window_output_tokens: int
    load_seconds: float
    mean_output_tokens: float
    cached_tokens: int
    away_tokens: int
    host_token_seconds: float
    disk_token_seconds: float
    host_loaded_tokens: int
    disk_loaded_tokens: int
    kv_capacity_tokens: int
    draining: bool
    known_blocks: int
    block_index_bytes: int
    orphan_blocks: int
    conflicting_blocks: int
    keyed_blocks: int
    unknown_blocks: int
    unknown_events: int
    block_overflows: int
    lost_places: int
    load_reports: int
    drift_requests: int
    drift_seconds: float
    cache_source: CacheSource
    cache_accuracy: float
    judged_reports: int
    known_tokens: int
    kept_tokens: int
    surplus_tokens: int
    cache_mismatches: list[CacheMismatchStats]
    cost: CostStats


class RecordsStats(TypedDict, total=False):
    """Decision records: made, joined with their request's end, pushed out at the bound; `sink`: what was handed over.
    Empty without `record`."""

    made: int
    joined: int
    pushed_out: int
    pushed_out_live: int
    errors: int
    kept: int
    live: int
    sink: dict[str, int]


class ShadowStats(TypedDict, total=False):
    """A shadow's decisions beside the real ones; seconds by E2's totals, had the different ones been followed. Empty
    without a shadow."""

    policy: str
    decisions: int
    agreements: int
    differences: int
    errors: int
    differences_by_reason: dict[str, int]
    seconds_saved: float
    seconds_lost: float
    last_error: str | None


class TenantsStats(TypedDict, total=False):
    """Accounts of tenants; empty while no request has named a tenant, a deadline or a class. `wait_scale`: how much
    longer requests with deadlines have really waited than was predicted. `dropped_seconds`: of accounts beyond the
    bound."""

    accounts: int
    live_requests: int
    refused: int
    wait_scale: float
    dropped_seconds: float


class PullsStats(TypedDict, total=False):
    """KV that workers take over from each other: `workers` that can, `links` that were measured; pulls that requests
    were sent with and that have ended, the tokens that were wanted and that came. Empty while no worker can."""

    workers: int
    links: int
    asked: int
    ended: int
    wanted_tokens: int
    moved_tokens: int


class _Recorded(TypedDict, total=False):
    records: RecordsStats
    shadow: ShadowStats


class SchedulerStats(_Recorded):
    """All of `GlobalScheduler.stats`. `late_calls`: about requests that were not live. `reasons`: decisions by reason.
    `records` and `shadow` are there only in a scheduler that keeps records or has a shadow."""

    policy: str
    scheduled: int
    finished: int
    cancelled: int
    late_calls: int
    events: int
    expired_leases: int
    expired_nodes: int
    failed_ticks: int
    reconciled_leases: int
    unknown_requests: int
    peer_requests: int
    peer_events_ignored: int
    live_requests: int
    peer_bookings: int
    reasons: dict[str, int]
    tree: TreeStats
    policy_state: dict[str, dict[str, int]]
    plans: RebalancerStats
    membership: MembershipStats
    scaling: ScalingStats
    tenants: TenantsStats
    pulls: PullsStats
    workers: dict[str, WorkerStats]
