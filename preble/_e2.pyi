from collections.abc import Hashable, Mapping
from typing import Any

from ._cost import CostModel, LoadBook
from ._radix import RadixTree, TokenIds
from .policy import Policy, RequestView, WorkersView

class Decision:
    request_id: Hashable
    worker: str
    matched_tokens: int
    prompt_tokens: int
    reason: str
    costs: Mapping[str, float] | None

def unit_draw(seed: int, sequence: int) -> float: ...

class DecisionCore:
    tree: RadixTree
    book: LoadBook
    names: list[str | None]
    leases: dict[Hashable, int]
    def __init__(
        self, tree: RadixTree, book: LoadBook, *, exploit_ratio: float, victims_max: int, live_max: int
    ) -> None: ...
    def open_worker(
        self, name: str, capacity_tokens: int, block_size: int, cost: CostModel, now: float
    ) -> int: ...
    def close_worker(self, index: int) -> None: ...
    def set_eligible(self, index: int, eligible: bool) -> None: ...
    def need_eligible(self) -> None: ...
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
    def explain(
        self,
        token_ids: TokenIds,
        namespace: Hashable,
        max_new_tokens: int,
        now: float,
        policy: Policy | None,
        asked: RequestView | None,
    ) -> tuple[int, str, int, list[tuple[Any, ...]]]: ...
    def match(self, token_ids: TokenIds, namespace: Hashable) -> tuple[int, int, dict[str, int]]: ...
    def first_token(self, request_id: Hashable, cached_tokens: int, now: float) -> bool: ...
    def finish(self, request_id: Hashable, output_tokens: int, cached_tokens: int, now: float) -> bool: ...
    def cancel(self, request_id: Hashable, now: float) -> bool: ...
    def lease(self, request_id: Hashable) -> dict[str, Any]: ...
    def check(self) -> None: ...
