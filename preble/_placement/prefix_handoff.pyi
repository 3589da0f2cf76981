# Types of `prefix_handoff.pyx`; what the functions promise stands there.

from collections.abc import Hashable

from .bookings import DecisionCore

class HotPrefix:
    namespace: Hashable
    head: tuple[int, ...]
    tokens: int
    hits: float
    hot_seconds: float
    loss_seconds: float

class Search: ...

def hot_prefixes(core: DecisionCore, worker: int, now: float) -> list[HotPrefix]: ...
def hand_over(core: DecisionCore, prefix: HotPrefix, giver: int, taker: int, now: float, *, keep: bool) -> int: ...
def open_workers(core: DecisionCore, now: float) -> list[tuple[float, int, str, int]]: ...
def takes_any(core: DecisionCore, index: int, name: str) -> bool: ...
def joined_at(core: DecisionCore, index: int) -> float: ...
