"""What is known of one HTTP request, from the middleware that lets it in to the line in the log. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.requests import Request

from ...types import SessionHint
from ..text.choices import RequestProgress
from .sessions import NO_SESSION


@dataclass(slots=True)
class RequestPhase:
    """One part of a request's way to its worker, by the gateway's clock; of a part that came several times (for each
    prompt or attempt) from its first beginning to its last end."""

    began: float
    ended: float


@dataclass(slots=True)
class RequestContext:
    """What one HTTP request turned out to be, for its log line and the metrics. No prompt, no output."""

    request_id: str
    started: float
    key_name: str = ""
    model: str = ""
    session: SessionHint = NO_SESSION
    timeout_seconds: float | None = None  # after which the client gives up without a token
    stream: bool = False
    progress: RequestProgress = field(default_factory=RequestProgress)
    first_token_seconds: float | None = None
    phases: dict[str, RequestPhase] = field(default_factory=dict)  # "tokenize", "match", "decide"
    charge: Callable[[int], None] = lambda count: None  # takes so many more of the key's rate


_CURRENT: ContextVar[RequestContext | None] = ContextVar("preble_request", default=None)


def now_in(context: RequestContext | None) -> None:
    """What this task, and those that it starts, do from now on is done for this request; None: for no request."""
    _CURRENT.set(context)


def note_phase(name: str, seconds: float, now: float) -> None:
    """A part of the current request's way took so long until `now`; nothing to do outside of any request."""
    context = _CURRENT.get()
    if context is None:
        return
    phase = context.phases.get(name)
    if phase is None:
        context.phases[name] = RequestPhase(now - seconds, now)
    else:
        phase.ended = now


def context_of(request: Request) -> RequestContext:
    """The context of a request, made by the middleware."""
    context: RequestContext = request.scope["preble.context"]
    return context
