"""Types of the compiled scheduler state; what it owns is said in `bookings.pyx`."""

from collections.abc import Hashable
from typing import Any

from .._cost import CostModel, LoadTracker
from .._radix import RadixTree, TokenIds
from ..errors import NoWorkers
from ..policies.base import Policy, RequestView, WorkersView
from .decision import Decision
from .e2 import E2
from .prefix_groups import Groups
from .redirects import Redirects
from .timing_samples import TimingSamples

class DecisionCore(E2):
    groups: Groups
    redirects: Redirects
    names: list[str | None]
    left_out: dict[int, int]
    late_calls: int
    leases: dict[Hashable, int]
    live_max: int
    timings: TimingSamples | None
    def __init__(
        self,
        tree: RadixTree,
        loads: LoadTracker,
        *,
        live_max: int,
        calibrate: bool = True,
        **rule: float,
    ) -> None: ...
    def restore_accuracy(self, worker: int, state: object) -> None: ...
    def open_worker(
        self,
        name: str,
        capacity_tokens: int,
        block_size: int,
        cost: CostModel,
        now: float,
        *,
        cached_first: bool = False,
        places: int = 0,
    ) -> int: ...
    def close_worker(self, index: int) -> list[Hashable]: ...
    def set_eligible(self, index: int, eligible: int) -> None: ...
    def leave_out(self, names: list[str]) -> list[int]: ...
    def take_back(self, left_out: list[int]) -> None: ...
    def index_of(self, name: object) -> int: ...
    def nobody(self) -> NoWorkers: ...
    def need_room(self, key: Hashable) -> None: ...
    def advance(self, now: float) -> None: ...
    def costs(self) -> dict[str, float]: ...
    def view(self, indices: list[int]) -> WorkersView: ...
    def schedule(
        self,
        token_ids: TokenIds,
        request_id: Hashable,
        key: Hashable,
        namespace: Hashable,
        max_new_tokens: int,
        now: float,
        policy: Policy | None,
        asked: RequestView | None,
        with_costs: bool,
        of_session: bool,
    ) -> Decision: ...
    def book_on(
        self,
        worker: int,
        token_ids: TokenIds,
        request_id: Hashable,
        key: Hashable,
        namespace: Hashable,
        max_new_tokens: int,
        now: float,
    ) -> Decision: ...
    def live_key(self, request_id: Hashable) -> Hashable | None: ...
    def renew(self, request_id: Hashable, now: float) -> bool: ...
    def seen_at(self, request_id: Hashable) -> float: ...
    def unseen_since(self, then: float, now: float) -> list[Hashable]: ...
    def live_on(self, worker: int) -> list[Hashable]: ...
    def lease(self, request_id: Hashable) -> dict[str, Any]: ...
    def check(self) -> None: ...
