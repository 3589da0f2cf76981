"""What is known of one HTTP request, from the middleware that lets it in to the line in the log. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import Request

from ...types import SessionHint
from ..text.choices import RequestProgress
from .sessions import NO_SESSION


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
    charge: Callable[[int], None] = lambda count: None  # takes so many more of the key's rate


def context_of(request: Request) -> RequestContext:
    """The context of a request, made by the middleware."""
    context: RequestContext = request.scope["preble.context"]
    return context
