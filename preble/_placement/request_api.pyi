"""Types of the calls of a request's life; what they do is said in `request_api.pyx`."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

from .._core.token_types import TokenIds
from ..errors import InvalidInput
from ..policies.base import Policy, RequestView
from ..types import Claim, Explanation, Priority, SessionHint
from .bookings import DecisionCore
from .decision import Decision, Match

T = TypeVar("T")

class RequestHandle: ...

class RequestApi:
    core: DecisionCore
    _clock: Callable[[], float]
    _seed: int
    _policy: Policy | None
    _reasons: dict[str, int]
    def __init__(
        self,
        core: DecisionCore,
        clock: Callable[[], float],
        seed: int,
        *,
        policy: Policy | None = None,
        policy_state: Any = None,  # a RequestObserver
        observer: Any = None,  # a RequestObserver
    ) -> None: ...
    def schedule(
        self,
        token_ids: TokenIds,
        *,
        request_id: Hashable = None,
        namespace: Hashable = None,
        max_new_tokens: int | None = None,
        exclude: Iterable[str] = (),
        explain: bool = False,
        group: Hashable = None,
        session: SessionHint | None = None,
        tenant: str | None = None,
        deadline_seconds: float | None = None,
        priority: Priority | None = None,
    ) -> Decision: ...
    def _place_claimed(
        self, claim: Claim, token_ids: Any, exclude: Iterable[str], asked: dict[str, Any]
    ) -> Decision: ...
    def schedule_many(
        self,
        prompts: Iterable[TokenIds],
        *,
        request_ids: Iterable[Hashable] | None = None,
        namespace: Hashable = None,
        max_new_tokens: int | None = None,
        groups: Iterable[Hashable] | None = None,
        tenant: str | None = None,
        deadline_seconds: float | None = None,
        priority: Priority | None = None,
    ) -> list[Decision]: ...
    def match(self, token_ids: TokenIds, *, namespace: Hashable = None) -> Match: ...
    def explain(
        self,
        token_ids: TokenIds,
        *,
        request_id: Hashable = None,
        namespace: Hashable = None,
        max_new_tokens: int | None = None,
        group: Hashable = None,
        session: SessionHint | None = None,
    ) -> Explanation: ...
    def first_token(self, request_id: Hashable, *, cached_tokens: int | None = None) -> bool: ...
    def finish(
        self, request_id: Hashable, *, output_tokens: int | None = None, cached_tokens: int | None = None
    ) -> bool: ...
    def cancel(self, request_id: Hashable) -> bool: ...
    def renew(self, request_id: Hashable) -> bool: ...
    def now(self) -> float: ...
    def _book_on(
        self,
        worker: int,
        token_ids: Any,
        request_id: Hashable,
        namespace: Hashable,
        max_new_tokens: int | None,
        now: float,
    ) -> bool: ...
    def _end(self, request_id: Hashable, output_tokens: int | None) -> bool: ...
    def _give_back(self, request_id: Hashable, now: float) -> bool: ...
    def _note_decision(self, reason: str) -> int: ...
    def _counts(self) -> dict[str, int]: ...
    def _reason_counts(self, beyond: bool = False) -> dict[str, int]: ...

def choice_to_come(
    core: DecisionCore,
    policy: Policy | None,
    token_ids: Any,
    namespace: Hashable,
    max_new_tokens: int,
    now: float,
    request: RequestView | None,
    of_session: bool = False,
) -> tuple[int, str, int, list[tuple[Any, ...]], tuple[str, ...]]: ...
def explanation(
    core: DecisionCore,
    policy: Policy | None,
    token_ids: Any,
    namespace: Hashable,
    max_new_tokens: int,
    now: float,
    request: RequestView | None,
    of_session: bool = False,
) -> Explanation: ...
def names_session(session: SessionHint) -> bool: ...
def scores_of(
    core: DecisionCore, policy: Policy | None, request: RequestView | None, rows: list[tuple[Any, ...]]
) -> list[float]: ...
def policy_name(policy: Policy | None) -> str: ...
def request_id_of(value: Hashable) -> Hashable: ...
def finite_time(name: str, seconds: Any) -> float: ...
def iterable(name: str, values: Iterable[T], error: type[InvalidInput] = ...) -> Iterable[T]: ...
def hashable(name: str, value: Any) -> Any: ...
def output_limit(max_new_tokens: int | None) -> int: ...
