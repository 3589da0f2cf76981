"""What traces and metrics for OpenTelemetry share: the names of its conventions for generative AI, and how a sender is
ended. Owns these words, and CLOSE_SECONDS, in which what waits may still be sent; then it is given up, and logged.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from ... import __version__
from .request_context import RequestContext

logger = logging.getLogger("preble.gateway")

CLOSE_SECONDS = 5.0
PROVIDER = "preble"
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/v1/embeddings": "embeddings",
}


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


def end_within(seconds: float, end: Callable[[], object], what: str) -> None:
    """Call `end`, which sends what waits and may hang on a collector that does not answer; give it up after so long."""
    thread = threading.Thread(target=end, name=f"preble-end-{what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        logger.warning("the collector did not take all %s in %g s; the rest is lost", what, seconds)
