"""The end of a request, whichever door it came in by: what is counted of it and its line in the log. A line has ids,
times and token counts; it never holds a prompt, an output or a key."""

from __future__ import annotations

import logging

from .gateway import Gateway
from .request_context import RequestContext

logger = logging.getLogger("preble.gateway")

CLIENT_GONE = 499  # never sent; what the log and the metrics call it
OTHER_ROUTE = "other"


def note_request(
    gateway: Gateway, context: RequestContext, *, method: str, route: str, status: int, seconds: float, logged: bool
) -> None:
    """A request has ended with this status, after so long; without `logged` it is only counted."""
    gateway.metrics.request(route, status, seconds, context)
    if not logged:
        return
    gateway.live.answered(status, context)
    if not logger.isEnabledFor(logging.INFO):
        return
    progress = context.progress
    first = progress.choices[0] if progress.choices else None
    line = {
        "request_id": context.request_id,
        "method": method,
        "route": route,
        "status": status,
        "seconds": round(seconds, 6),
        "key": context.key_name,
        "session": context.session.session,
        "parent_session": context.session.parent,
        "agent": context.session.agent,
        "model": context.model,
        "stream": context.stream,
        "first_token_seconds": context.first_token_seconds,
        "choices": len(progress.choices),
        "prompt_tokens": progress.prompt_tokens,
        "cached_tokens": progress.cached_tokens,
        "output_tokens": progress.output_tokens,
        "worker": "" if first is None else first.worker,
        "reason": "" if first is None or first.decision is None else first.decision.reason,
        "finish_reasons": [choice.finish_reason for choice in progress.choices],
    }
    logger.info("request", extra={"fields": line})
