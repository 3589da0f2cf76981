"""What goes wrong, as HTTP: status, the error object of OpenAI's API or of Anthropic's, Retry-After. Owns the mapping
from Preble's errors to it.

    400 the request is wrong            401, 403 key missing or not enough    404 no such model, worker or path
    413, 415 body too large, not JSON   429 rate used up, or overloaded       499 (log only) the client went away
    500 the engine failed               502 no worker could finish it         503 overloaded, draining, no worker

No message quotes a prompt: what comes from a request is named by its place in the body.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ...errors import (
    CapacityExceeded,
    EngineError,
    InvalidInput,
    NoWorkers,
    Overloaded,
    PrebleError,
    TransportError,
    UnknownWorker,
    WorkerLost,
)

RETRY_SECONDS = 1.0  # after which a client may hope that an overloaded fleet has room
# Anthropic's type by status; of others "invalid_request_error" below 500, "api_error" from there on.
_ANTHROPIC = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
# Of the first that an error is: status, OpenAI's type, code.
_ANSWERS: tuple[tuple[Any, ...], ...] = (
    (InvalidInput, 400, "invalid_request_error", None),
    (UnknownWorker, 404, "invalid_request_error", "unknown_worker"),
    (Overloaded, 429, "overloaded_error", "overloaded"),
    (CapacityExceeded, 503, "overloaded_error", "queue_full"),
    (NoWorkers, 503, "overloaded_error", "no_workers"),
    (WorkerLost, 502, "server_error", "worker_lost"),
    (TransportError, 503, "overloaded_error", "unavailable"),
    (EngineError, 500, "server_error", "engine_error"),
    (PrebleError, 500, "server_error", "internal_error"),
)


@dataclass(eq=False, repr=False)
class ApiError(PrebleError):
    """An answer that is an error: `status`, and OpenAI's `type` (`kind`), `param` and `code`."""

    status: int
    message: str
    _: KW_ONLY
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after_seconds: float | None = None

    def __post_init__(self) -> None:
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """The error in Anthropic's shape."""
        kind = _ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def headers(self) -> dict[str, str]:
        """`Retry-After` in whole seconds, where trying again makes sense."""
        if self.retry_after_seconds is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_seconds)))}


def wrong(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that will not do; `param` is the field that is wrong."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str) -> ApiError:
    """Not now; trying again soon makes sense."""
    return ApiError(503, message, kind="overloaded_error", code=code, retry_after_seconds=RETRY_SECONDS)


def refusal_of(error: PrebleError) -> str | None:
    """Why a request was turned away, for want of a right or of room; None for an error of another kind."""
    api_error = api_error_of(error)
    return (api_error.code or str(api_error.status)) if api_error.status in (403, 429, 503) else None


def api_error_of(error: PrebleError) -> ApiError:
    """The answer for an error that a request met."""
    if isinstance(error, ApiError):
        return error
    status, kind, code = next(answer for cls, *answer in _ANSWERS if isinstance(error, cls))
    retry_after_seconds = RETRY_SECONDS if status in (502, 503) else getattr(error, "retry_after_seconds", None)
    return ApiError(status, str(error), kind=kind, code=code, retry_after_seconds=retry_after_seconds)
