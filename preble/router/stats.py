"""What `Router.stats` returns, as types. Owns no figure, and is loaded only when somebody asks for these names.

An int counts events since the start, or is a size now.
"""

from __future__ import annotations

from typing import Literal, TypedDict

WorkerState = Literal["connecting", "ready", "suspect", "draining", "lost", "refused"]


class FeedStats(TypedDict):
    """What the sockets of an attached server's cache events have brought."""

    batches: int
    duplicates: int
    gaps: int
    replays: int
    replays_cut: int
    replays_unanswered: int
    resyncs: int
    restarts: int
    malformed_frames: int
    load_frames: int


class ReportedLoad(TypedDict):
    """What a worker last reported of its load. `step_ms`: milliseconds that its engine has been in its current step."""

    nonce: int
    next_event_seq: int
    running: int
    waiting: int
    kv_used_tokens: int
    kv_cached_tokens: int
    waiting_uncached_tokens: int
    step_ms: int
    draining: bool


class RouterWorkerStats(TypedDict):
    """One address, and the worker found there. `why`: what its state comes from. `epoch`: another one after a restart.
    `waiting`: placed there and not sent yet. `events`: taken, by type. `feed`: of an attached server; `load`: None
    before its first report."""

    worker_id: str
    state: WorkerState
    why: str
    epoch: int
    waiting: int
    connections: int
    errors: int
    handshakes_refused: int
    losses: int
    restarts: int
    suspect_spells: int
    forgotten: int
    events_refused: int
    frames_received: int
    malformed_frames: int
    stale_frames: int
    unsent: int
    requests_failed: int
    frame_gaps: int
    frame_duplicates: int
    event_batches: int
    events_early: int
    events_partial: int
    event_gaps: int
    event_duplicates: int
    replays: int
    resyncs: int
    peer_requests: int
    peer_requests_past: int
    peer_requests_dropped: int
    events: dict[str, int]
    feed: FeedStats | None
    load: ReportedLoad | None


class RouterStats(TypedDict):
    """All of `Router.stats`: what happened to requests, those alive and those held before the workers now, the reports
    of sibling routers (empty without any), and each worker by its address."""

    requests: int
    finished: int
    failed: int
    cancelled: int
    resumed: int
    handed_over: int
    queue_full: int
    refused: int
    shed: int
    output_tokens: int
    duplicate_tokens: int
    excess_tokens: int
    late_chunks: int
    token_gaps: int
    wrong_reports: int
    completed_by_router: int
    aborts_unsent: int
    ticks: int
    ticks_failed: int
    warm_ups: int
    warm_ups_done: int
    warm_ups_failed: int
    live_requests: int
    held_requests: int
    siblings: dict[str, int]
    workers: dict[str, RouterWorkerStats]
