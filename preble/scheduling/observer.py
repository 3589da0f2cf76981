"""Who looks on while a scheduler places requests. Owns the calls that it gets; `request_api` makes them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .._placement.bookings import DecisionCore
    from .._placement.decision import Decision


class RequestObserver:
    """Base of those who follow requests: whoever looks on overrides what concerns it. Every call comes under the
    writers' lock, with the clock's time in seconds. A call that fails, or is late, is not reported. `key`: what the
    request is distinguished by while it is live; its hash and equality run no code of users."""

    def on_decision(self, key: Hashable, decision: Decision, before: Any, now: float) -> None:
        """A request was placed. `before`: what this observer was given, or has noted itself, before the decision."""

    def on_first_token(self, key: Hashable, now: float, cached_tokens: int | None) -> None:
        """A live request has its first token; `cached_tokens` is None where the engine did not say."""

    def on_finish(self, key: Hashable, now: float, cached_tokens: int | None, output_tokens: int | None) -> None:
        """A live request is done, its id not free yet; what nobody said is None."""

    def on_cancel(self, key: Hashable, now: float) -> None:
        """A live request's booking was given back, its id not free yet."""

    # What only the observer of a `RequestApi` is asked, not its policy's state.

    def explains(self, now: float) -> bool:
        """Whether the decision to come shall carry its costs, which nobody has asked for. Asked once a decision."""
        return False

    def watches(self, sequence: int) -> bool:
        """Whether `before_decision` wants to see the decision of this number."""
        return True

    def before_decision(self, core: DecisionCore, policy: Any, request: Any, now: float, explain: bool) -> object:
        """What to note of a `RequestView` that is about to be placed by `policy` (None: E2). Changes nothing."""
