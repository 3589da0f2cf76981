"""What a router counts. Owns no counting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RouterCounters:
    """What happened to requests in this router."""

    requests: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    resumed: int = 0
    handed_over: int = 0
    queue_full: int = 0
    refused: int = 0
    shed: int = 0
    output_tokens: int = 0
    duplicate_tokens: int = 0
    excess_tokens: int = 0
    late_chunks: int = 0
    token_gaps: int = 0
    wrong_reports: int = 0
    completed_by_router: int = 0
    aborts_unsent: int = 0
    ticks: int = 0
    ticks_failed: int = 0
