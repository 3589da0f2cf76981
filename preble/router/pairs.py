"""Requests that two workers of the fleet serve. Owns what of a request's life differs then; the rest is that of one
that goes on elsewhere.

Preble's workers: the one that prefills is sent the prompt for one token, which the client gets at once; then the one
that decodes is sent prompt and token, and takes over the KV as by a pull (`pulls.py`). If that does not come, or not in
the time that computing it would take, it computes it. Servers that run already hand over KV themselves: a `Placement`
has a place at both, and whoever sends the request says to either who the other is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from ..transport.messages import OutputChunk
from ..types import PairDecision
from .request import Attempt, PlacedRequest, RoutedRequest

if TYPE_CHECKING:
    from .._placement.decision import Decision
    from ..scheduler import GlobalScheduler
    from .fleet import Fleet


def schedule_for(
    scheduler: GlobalScheduler, fleet: Fleet, live: PlacedRequest | None, asked: dict[str, Any]
) -> Callable[..., Any]:
    """How a request is placed: on one worker, or where some do not do both also on two. Takes out of `asked` what does
    not count then."""
    if live is None or not live.is_separable:
        return scheduler.schedule
    if not (fleet.roles if isinstance(live, RoutedRequest) else fleet.server_roles):
        return scheduler.schedule
    asked.pop("group", None)
    return scheduler.schedule_pair


def sent_first(live: PlacedRequest, decision: Decision | PairDecision) -> str:
    """The worker that a request is sent to first, or with which its attempt stands and falls."""
    if isinstance(decision, PairDecision) and isinstance(live, RoutedRequest):
        return decision.prefill_worker or decision.worker
    return decision.worker


def first_attempt(wire_id: str, live: PlacedRequest, decision: Decision | PairDecision) -> Attempt:
    """The attempt at that worker. One at a server that decodes begins with the prefill at the other."""
    pair = decision if isinstance(decision, PairDecision) and decision.prefill_worker is not None else None
    is_second = pair is not None and not isinstance(live, RoutedRequest)
    return Attempt(wire_id, sent_first(live, decision), live.output_tokens, pair=pair, handed_over=is_second)


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
