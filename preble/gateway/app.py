"""The gateway as an ASGI application: which path leads to which handler. Owns the table of routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router, request_response

from ..clock import Clock
from .api.admin import Admin
from .api.dashboard import Page
from .api.http import Receive, Send, json_response
from .api.openai import OpenAI
from .api.openapi import document
from .api.sglang import Sglang
from .core.gateway import Gateway
from .core.http_errors import ApiError
from .core.sibling_processes import KEEPERS_PATH, SharedWork, from_other_process, merged
from .middleware import App, Middleware
from .relay.endpoints import ENDPOINTS
from .relay.relay import Relay
from .shared_limits import SharedLimits


def make_app(gateway: Gateway, clock: Clock = time.monotonic, shared: SharedLimits | None = None) -> Middleware:
    """The application for one gateway; of several processes, `shared` has what the others use of limits."""
    openai, sglang, admin, page = OpenAI(gateway), Sglang(gateway), Admin(gateway), Page(gateway)

    processes = gateway.processes

    async def own_metrics() -> bytes:
        """Counters are read on the loop, the text is made beside it."""
        stats, own = gateway.router.stats(), {**gateway.stats(), "model_of": gateway.model_of()}
        return await asyncio.to_thread(gateway.metrics.render, gateway.router.scheduler, stats, own)

    async def all_metrics() -> bytes:
        text = await ours.result()
        if processes is None:
            return text
        answers = await processes.ask("GET", "/metrics")
        texts = {answer.index: answer.body if answer.status == 200 else None for answer in answers}
        return merged(dict(sorted({processes.slot.index: text, **texts}.items())))

    ours, everybodys = SharedWork(own_metrics), SharedWork(all_metrics)

    async def metrics(request: Request) -> Response:
        """GET /metrics."""
        text = await (ours if from_other_process(processes, request.scope) else everybodys).result()
        return Response(text, media_type=gateway.metrics.content_type)

    described, relayed = (json_response(document(relayed=relayed)) for relayed in (False, True))

    async def openapi_document(request: Request) -> Response:
        """GET /openapi.json."""
        return relayed if gateway.router.fleet.all_servers else described

    own = {
        "/v1/chat/completions": openai.chat,
        "/v1/completions": openai.completions,
        "/generate": sglang.generate,
    }
    relay = Relay(gateway)

    async def keeper(request: Request) -> Response:
        """Where an answer is kept, asked by another process."""
        if not from_other_process(processes, request.scope):
            raise ApiError(404, "no such path", code="not_found")
        kept = relay.pinned.get(request.path_params["id"])
        return json_response(None if kept is None else kept._asdict())

    gateway.on_close.append(relay.pools.close)
    routes = [
        *(
            Route(one.path, _ByFleet(gateway, relay.at(one), own.get(one.path)), methods=[one.method])
            for one in ENDPOINTS
        ),
        Route("/v1/models", openai.models),
        Route("/v1/models/{name:path}", openai.model),
        Route("/health", admin.health),
        Route("/ready", admin.ready),
        Route("/metrics", metrics),
        Route("/workers", admin.workers),
        Route("/workers", admin.add_worker, methods=["POST"]),
        Route("/workers/{worker_id:path}/drain", admin.drain_worker, methods=["POST"]),
        Route("/workers/{worker_id:path}", admin.remove_worker, methods=["DELETE"]),
        Route("/v1/preble/explain", admin.explain, methods=["POST"]),
        Route("/openapi.json", openapi_document),
        Route(KEEPERS_PATH + "{id}", keeper),
        Route("/v1/preble/state", page.state),
        Route("/v1/preble/decisions/{sequence}", page.decision),
        Route("/", page.index),
        Route("/page/{name}", page.file),
    ]
    return Middleware(_Routes(routes), gateway, clock, shared)


class _Routes:
    """The table of routes. Paths without a variable part are found at once, by far the most requests have one."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._router = Router(routes, redirect_slashes=False, default=_no_such_path)
        self._fixed = {
            (method, one.path): one for one in reversed(routes) if "{" not in one.path for method in one.methods or ()
        }

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """One request."""
        route = self._fixed.get((scope["method"], scope["path"]))
        if route is None:
            await self._router(scope, receive, send)
            return
        scope["route"], scope["path_params"], scope["endpoint"] = route, {}, route.endpoint
        await route.app(scope, receive, send)


class _ByFleet:
    """Where every worker is a server that runs already, requests are relayed; else `own` handles them, where there is
    one: workers of ours are sent token ids."""

    def __init__(self, gateway: Gateway, relayed: App, own: Callable[[Request], Awaitable[Response]] | None) -> None:
        self._gateway = gateway
        self._relayed = relayed
        self._own: App = _no_such_path if own is None else request_response(own)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """One request."""
        is_relayed = self._gateway.router.fleet.all_servers
        await (self._relayed if is_relayed else self._own)(scope, receive, send)


async def _no_such_path(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
    raise ApiError(404, "no such path", code="not_found")
