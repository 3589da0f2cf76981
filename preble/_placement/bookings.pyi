"""Types of the compiled scheduler state; what it owns is said in `_placement/bookings.pyx`."""

from collections.abc import Hashable
from typing import Any

from .._cost import CostModel, LoadBook
from .._radix import RadixTree, TokenIds
from ..errors import NoWorkers
from ..policies.base import Policy, RequestView, WorkersView
from .decision import Decision, Match
from .e2 import E2
from .timing_samples import Gauges

class DecisionCore(E2):
    names: list[str | None]
    leaves_out: bool
    leases: dict[Hashable, int]
    live_max: int
    gauges: Gauges | None
    eligible_workers: int
    def __init__(
        self,
        tree: RadixTree,
        book: LoadBook,
        *,
        exploit_ratio: float,
        escape_seconds: float,
        decode_ratio: float,
        victims_max: int,
        live_max: int,
        calibrate: bool = True,
    ) -> None: ...
    def hear(self, worker: int, facts: object) -> None: ...
    def open_worker(self, name: str, capacity_tokens: int, block_size: int, cost: CostModel, now: float) -> int: ...
    def close_worker(self, index: int) -> list[Hashable]: ...
    def set_eligible(self, index: int, eligible: int) -> None: ...
    def need_eligible(self) -> None: ...
    def nobody(self) -> NoWorkers: ...
    def need_room(self, request_id: Hashable) -> None: ...
    def need_chosen(self, worker: int, reason: str) -> None: ...
    def advance(self, now: float) -> None: ...
    def costs(self) -> dict[str, float]: ...
    def view(self, indices: list[int]) -> WorkersView: ...
    def schedule(
        self,
        token_ids: TokenIds,
        request_id: Hashable,
        namespace: Hashable,
        max_new_tokens: int,
        now: float,
        policy: Policy | None,
        asked: RequestView | None,
        with_costs: bool,
    ) -> Decision: ...
    def book_on(
        self,
        worker: int,
        token_ids: TokenIds,
        request_id: Hashable,
        namespace: Hashable,
        max_new_tokens: int,
        now: float,
    ) -> Decision: ...
    def explain(
        self,
        token_ids: TokenIds,
        namespace: Hashable,
        max_new_tokens: int,
        now: float,
        policy: Policy | None,
        asked: RequestView | None,
    ) -> tuple[int, str, int, list[tuple[Any, ...]], tuple[str, ...]]: ...
    def match(self, token_ids: TokenIds, namespace: Hashable) -> Match: ...
    def renew(self, request_id: Hashable, now: float) -> bool: ...
    def seen_at(self, request_id: Hashable) -> float: ...
    def unseen_since(self, then: float) -> list[Hashable]: ...
    def live_on(self, worker: int) -> list[Hashable]: ...
    def lease(self, request_id: Hashable) -> dict[str, Any]: ...
    def scheduled_heads(self, worker: int) -> list[tuple[Hashable, list[int]]]: ...
    def check(self) -> None: ...
