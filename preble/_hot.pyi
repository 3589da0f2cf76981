"""Types of the calls of a request's life; what they do is said in `_hot.pyx`."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from ._answers import Decision
from ._booking import DecisionCore
from .policy import Policy
from .scheduler_books import PolicyBooks

class RequestCalls:
    _core: DecisionCore
    _policy: Policy | None
    _books: PolicyBooks | None
    _clock: Callable[[], float]
    _sequence: int
    def schedule(
        self,
        token_ids: Any,
        *,
        request_id: Hashable = None,
        namespace: Hashable = None,
        max_new_tokens: int | None = None,
        exclude: Iterable[str] = (),
        explain: bool = False,
    ) -> Decision: ...
    def first_token(self, request_id: Hashable, *, cached_tokens: int | None = None) -> bool: ...
    def finish(
        self, request_id: Hashable, *, output_tokens: int | None = None, cached_tokens: int | None = None
    ) -> bool: ...
    def cancel(self, request_id: Hashable) -> bool: ...
    def _give_back(self, request_id: Hashable, now: float) -> bool: ...
    def _counts(self) -> dict[str, int]: ...
    def _e2_reasons(self) -> dict[str, int]: ...
    def _booked(self) -> None: ...
    def _new_id(self) -> str: ...

def finite_time(name: str, seconds: Any) -> float: ...
def hashable(name: str, value: Any) -> None: ...
def output_limit(max_new_tokens: int | None) -> int: ...
