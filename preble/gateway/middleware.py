"""The door: request ids, who may come in, time limits, errors as answers, one log line and the metrics of a request.

Owns what holds for every endpoint alike. A log line has ids, times and token counts; it never holds
a prompt, an output or a key: a key's name is the beginning of its SHA-256.

At its bounds: over a key's rate, 429 with Retry-After. A request passes where one is left of the rate, and takes one
for each of its choices.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ..clock import Clock
from ..errors import PrebleError
from .access import Access, is_unlogged
from .api.http import Receive, Send, error_response
from .core.config import GatewayConfig
from .core.gateway import Gateway
from .core.header_fields import headers_of
from .core.http_errors import ApiError, refusal_of
from .core.request_context import RequestContext, now_in
from .core.request_headers import group_of, request_id_of, timeout_of, urgency_of
from .core.request_log import CLIENT_GONE, OTHER_ROUTE, note_request
from .core.sessions import hint_of_headers
from .core.sibling_processes import from_other_process
from .core.tracing import hand_on, trace_of
from .shared_limits import SharedLimits
from .time_limit import in_time

logger = logging.getLogger("preble.gateway")

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Middleware:
    """ASGI: everything that comes in passes here. `configure` may be called again at any time, on the loop."""

    def __init__(self, app: App, gateway: Gateway, clock: Clock, shared: SharedLimits | None = None) -> None:
        self._app = app
        self._gateway = gateway
        self._clock = clock
        processes = gateway.processes
        self._own = [] if processes is None else [(b"x-preble-process", str(processes.slot.index).encode())]
        self._shared = shared
        self._access = Access(gateway.config, gateway.admin_token, clock, shared=shared)
        self.configure(gateway.config)

    def configure(self, config: GatewayConfig) -> None:
        """Take over keys and limits. What keys with limits of their own have used stays; other buckets start afresh."""
        self._access = Access(config, self._gateway.admin_token, self._clock, self._access, shared=self._shared)
        self._request_seconds = config.request_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; other kinds of connection are refused."""
        if scope["type"] != "http":
            raise NotImplementedError(f"no {scope['type']} here")
        started = self._clock()
        headers = headers_of(scope)
        context = RequestContext(request_id_of(headers), started)
        context.session = hint_of_headers(scope["headers"])
        context.timeout_seconds = timeout_of(headers)
        tracing = None if is_unlogged(scope["path"]) else self._gateway.tracing
        span = None if tracing is None else tracing.begin(headers)
        if tracing is None:
            hand_on(trace_of(headers))
        scope["preble.context"], scope["app"] = context, self
        now_in(context)
        status = 0
        own = [(b"x-request-id", context.request_id.encode()), *self._own]
        own += self._access.cors_headers(scope["path"], headers)

        async def answer(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *own]
            elif not message.get("more_body", False):
                context.settle()  # before the client knows that it may ask again
            await send(message)

        try:
            await self._pass_on(scope, receive, answer, context, headers)
        except ClientDisconnect:
            status = CLIENT_GONE
        except PrebleError as error:
            await self._refuse(error, scope, receive, answer, status)
        except HTTPException as error:
            await self._refuse(ApiError(error.status_code, str(error.detail)), scope, receive, answer, status)
        except Exception:
            logger.exception("a request failed, which is a defect of the gateway")
            defect = ApiError(500, "internal error", kind="server_error", code="internal_error")
            await self._refuse(defect, scope, receive, answer, status)
        finally:
            context.settle()
            self._note(scope, context, status, self._clock() - started)
            if tracing is not None:
                route = getattr(scope.get("route"), "path", OTHER_ROUTE)
                tracing.end(span, scope["method"], route, status or CLIENT_GONE, context)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, context: RequestContext, headers: Any) -> None:
        path = scope["path"]
        if from_other_process(self._gateway.processes, scope):
            await self._app(scope, receive, send)
        elif self._access.is_preflight(scope, headers):
            await Response(status_code=204)(scope, receive, send)
        else:
            self._access.admit(scope, headers, context)
            context.deadline_seconds, context.priority = urgency_of(headers)
            context.group = group_of(headers)
            if self._request_seconds is None or is_unlogged(path):
                await self._app(scope, receive, send)
            else:
                await in_time(self._request_seconds, self._app, scope, receive, send)

    async def _refuse(self, error: PrebleError, scope: Scope, receive: Receive, send: Send, status: int) -> None:
        """Answer with an error, unless an answer has begun."""
        if status == 0:
            scope["preble.context"].refused = refusal_of(error)
            await error_response(error, scope["path"])(scope, receive, send)

    def _note(self, scope: Scope, context: RequestContext, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", OTHER_ROUTE)
        note_request(
            self._gateway,
            context,
            method=scope["method"],
            route=route,
            status=status or CLIENT_GONE,
            seconds=seconds,
            logged=not is_unlogged(route),
        )
