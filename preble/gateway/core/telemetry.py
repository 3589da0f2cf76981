"""What traces and metrics for OpenTelemetry share: the names of its conventions for generative AI, and how the senders
are ended. Owns these words, and CLOSE_SECONDS, in which what waits may still be sent; then it is given up, and logged.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from typing import Any, Protocol

from ... import __version__
from .request_context import RequestContext

logger = logging.getLogger("preble.gateway")

CLOSE_SECONDS = 2.0  # of all senders together: a gateway's end waits for no collector
PROVIDER = "preble"
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/v1/embeddings": "embeddings",
}


class Sender(Protocol):
    """What goes to a collector."""

    what: str  # is sent, for a sentence

    def send_rest(self) -> None:
        """Send what waits, and end; may hang on a collector that does not answer."""


def operation_of(route: str) -> str:
    """The convention's name for what an endpoint does; its last part where there is none."""
    return OPERATIONS.get(route) or route.rpartition("/")[2] or "unknown"


def model_attributes(context: RequestContext, route: str) -> dict[str, Any]:
    """Operation, provider and model of a request that generated."""
    named = {"gen_ai.operation.name": operation_of(route), "gen_ai.provider.name": PROVIDER}
    if context.model:
        named |= {"gen_ai.request.model": context.model, "gen_ai.response.model": context.model}
    return named


def resource_attributes() -> dict[str, Any]:
    """Who sends: the service and its version."""
    return {
        "service.name": os.environ.get("OTEL_SERVICE_NAME", "preble-gateway"),
        "service.version": __version__,
    }


def end_senders(senders: Iterable[Sender], seconds: float = CLOSE_SECONDS) -> None:
    """Let all send what waits, at the same time; what is not sent after so long is given up, in one sentence."""
    threads = {
        one.what: threading.Thread(target=one.send_rest, name=f"preble-end-{one.what}", daemon=True) for one in senders
    }
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    lost = " and ".join(what for what, thread in threads.items() if thread.is_alive())
    if lost:
        logger.warning("the collector did not take all %s in %g s; the rest is lost", lost, seconds)
