"""Types of `halves.pyx`; what the functions promise stands there."""

from collections.abc import Hashable

from ..._core.token_types import TokenIds
from ..bookings import DecisionCore
from ..decision import Decision

Row = tuple[int, int, int, float, float, float, float, float, float, float, float, float, float]

def half_terms(
    core: DecisionCore,
    token_ids: TokenIds,
    namespace: Hashable,
    max_new_tokens: int,
    workers: list[int],
    now: float,
    of_session: bool,
) -> tuple[int, float, list[Row]]: ...
def book_half(
    core: DecisionCore,
    worker: int,
    token_ids: TokenIds,
    request_id: Hashable,
    namespace: Hashable,
    max_new_tokens: int,
    now: float,
    *,
    decodes: bool,
    reason: str,
) -> Decision: ...
def decode_to_begin(core: DecisionCore, key: Hashable, now: float) -> None: ...
def decode_began(core: DecisionCore, key: Hashable, now: float) -> None: ...
def give_back_half(core: DecisionCore, key: Hashable, now: float) -> bool: ...
