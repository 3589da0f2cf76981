"""Requests that two workers of the fleet serve. Owns what of a request's life differs then; the rest is that of one
that goes on elsewhere.

Preble's workers: the one that prefills is sent the prompt for one token, which the client gets at once; then the one
that decodes is sent prompt and token, and takes over the KV as by a pull (`pulls.py`). If that does not come, or not in
the time that computing it would take, it computes it. Servers that run already hand over KV themselves: a `Placement`
has a place at both, and whoever sends the request says to either who the other is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING, Any

from ..transport.messages import OutputChunk
from ..types import DECODE, PREFILL, PairDecision
from .request import Attempt, PlacedRequest, RoutedRequest, half_of

if TYPE_CHECKING:
    from .._placement.decision import Decision
    from ..scheduler import GlobalScheduler
    from .fleet import Fleet
    from .shared_bookings import SharedBookings


def schedule_for(scheduler: GlobalScheduler, fleet: Fleet, live: PlacedRequest | None) -> Callable[..., Any]:
    """How a request is placed: on one worker, or where some do not do both also on two."""
    if live is None or not live.is_separable:
        return scheduler.schedule
    roles = fleet.roles if isinstance(live, RoutedRequest) else fleet.server_roles
    return scheduler.schedule_pair if roles else scheduler.schedule


def prefilling(fleet: Fleet, unusable: Collection[str]) -> list[str]:
    """The workers at which a request may wait for its first token: all but `unusable`, and who decodes only."""
    out = {name for roles in (fleet.roles, fleet.server_roles) for name, role in roles.items() if role == DECODE}
    return [name for name in fleet.worker_ids if name not in unusable and name not in out]


def sent_first(live: PlacedRequest, decision: Decision | PairDecision) -> str:
    """The worker that a request is sent to first, or with which its attempt stands and falls."""
    if isinstance(decision, PairDecision) and isinstance(live, RoutedRequest):
        return decision.prefill_worker or decision.worker
    return decision.worker


def prefilled_on(decision: Decision | PairDecision) -> str:
    """The worker at which a request waits for its first token."""
    pair = decision if isinstance(decision, PairDecision) else None
    return decision.worker if pair is None or pair.prefill_worker is None else pair.prefill_worker


def first_attempt(wire_id: str, live: PlacedRequest, decision: Decision | PairDecision) -> Attempt:
    """The attempt at that worker. One at a server that decodes begins with the prefill at the other."""
    pair = decision if isinstance(decision, PairDecision) and decision.prefill_worker is not None else None
    is_second = pair is not None and not isinstance(live, RoutedRequest)
    worker, matched = sent_first(live, decision), 0 if pair is not None else decision.matched_tokens
    return Attempt(wire_id, worker, live.output_tokens, pair=pair, handed_over=is_second, matched_tokens=matched)


def next_attempt(wire_id: str, pair: PairDecision, offset: int) -> Attempt:
    """The attempt at the one that decodes."""
    return Attempt(wire_id, pair.worker, offset, pair=pair, handed_over=True)


def hands_over(live: RoutedRequest, attempt: Attempt, chunk: OutputChunk) -> bool:
    """Whether a prompt is prefilled, and more is to come than this worker was asked for."""
    is_first = attempt.pair is not None and not attempt.handed_over
    return is_first and chunk.finish_reason == "length" and live.tokens_left > 0


def report_first_token(scheduler: GlobalScheduler, live: PlacedRequest, attempt: Attempt) -> None:
    """An attempt's first token has come. What a worker has cached that decodes is what it was handed."""
    if attempt.pair is None:
        scheduler.first_token(live.request_id, cached_tokens=attempt.cached_tokens)
    elif not attempt.handed_over:
        scheduler.prefill_done(live.request_id, cached_tokens=attempt.cached_tokens)
    else:
        scheduler.prefill_done(live.request_id)
        scheduler.first_token(live.request_id)


def waits_at(live: PlacedRequest, attempt: Attempt) -> tuple[str, Hashable] | None:
    """The worker at which an attempt waits for its first token, and the id under which that work is booked; None for
    one that has its first token."""
    pair = attempt.pair
    if pair is None or pair.prefill_worker is None:
        return attempt.worker_id, live.request_id
    if attempt.handed_over and isinstance(live, RoutedRequest):
        return None
    return pair.prefill_worker, pair.prefill_request_id


# --- reported to other routers, of servers that do not report themselves ----------------------------------------------


def share_placed(own: SharedBookings, live: PlacedRequest, attempt: Attempt) -> None:
    """An attempt was booked and sent; one at two servers is two bookings."""
    tokens, space = live.tokens_so_far(), live.namespace
    own.placed(attempt.wire_id, attempt.worker_id, tokens, space, live.tokens_left, half_of(attempt))
    pair = attempt.pair
    if pair is not None and pair.prefill_worker is not None and not isinstance(live, RoutedRequest):
        own.placed(_of_prefill(attempt), pair.prefill_worker, tokens, space, 1, PREFILL)


def share_first_token(own: SharedBookings, attempt: Attempt) -> None:
    """An attempt's first token has come, and so its prefill elsewhere is over. What a worker has cached that decodes is
    what it was handed."""
    own.first_token(attempt.wire_id, None if attempt.pair is not None else attempt.cached_tokens)
    if attempt.pair is not None:
        own.ended(_of_prefill(attempt), 1)


def share_ended(own: SharedBookings, attempt: Attempt, output_tokens: int | None) -> None:
    """An attempt has ended; `output_tokens` None: without a result."""
    own.ended(attempt.wire_id, output_tokens)
    if attempt.pair is not None:
        own.ended(_of_prefill(attempt), None)


def _of_prefill(attempt: Attempt) -> str:
    return f"{attempt.wire_id}-prefill"
