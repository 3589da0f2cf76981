"""The live page's endpoints. Owns the page's files and the headers that keep everything foreign out of it.

    GET /                               the page
    GET /page/{name}                    its script, style and icon
    GET /v1/preble/state?after=TICK     everything it shows, with the history after that tick; no history without it
    GET /v1/preble/decisions/{n}        one decision with every worker's terms

The files are those of page/, read once; they know nothing, so they need no key. What they ask for does, where keys are
configured. The policy lets the browser load from this gateway and run nothing that stands in the page itself.
"""

from __future__ import annotations

import asyncio
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ... import __version__
from ..core.gateway import Gateway
from ..core.http_errors import ApiError, unavailable, wrong
from ..core.sibling_processes import from_other_process
from .http import json_response

KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Page:
    """The handlers, for one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        folder = resources.files("preble.gateway.dashboard") / "page"
        self._files = {file.name: file.read_bytes() for file in folder.iterdir() if _kind(file.name)}

    async def index(self, request: Request) -> Response:
        """GET /."""
        return self._answer("index.html")

    async def file(self, request: Request) -> Response:
        """GET /page/{name}."""
        return self._answer(request.path_params["name"])

    def _answer(self, name: str) -> Response:
        if name not in self._files:
            raise ApiError(404, "no such file", code="not_found")
        return Response(self._files[name], headers=HEADERS, media_type=_kind(name))

    async def state(self, request: Request) -> Response:
        """GET /v1/preble/state."""
        elsewhere = await self._of_first_process(request)
        if elsewhere is not None:
            return elsewhere
        after = request.query_params.get("after")
        tick = None if after is None else _whole(after, "after")
        body = await asyncio.to_thread(self._gateway.live.state, tick, self._info())
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})

    async def decision(self, request: Request) -> Response:
        """GET /v1/preble/decisions/{sequence}."""
        elsewhere = await self._of_first_process(request)
        if elsewhere is not None:
            return elsewhere
        sequence = _whole(request.path_params["sequence"], "sequence")
        found = await asyncio.to_thread(self._gateway.live.decision, sequence)
        if found is None:
            raise ApiError(404, "that decision is not kept any more, or was not recorded", code="not_found")
        return json_response(found, headers={"cache-control": "no-store"})

    async def _of_first_process(self, request: Request) -> Response | None:
        """What the first of several processes says, so that a page sees one history whichever process it reaches; None
        where this is the first one. While that one does not answer, 503."""
        processes = self._gateway.processes
        if processes is None or processes.slot.index == 0 or from_other_process(processes, request.scope):
            return None
        query = request.url.query
        answer = await processes.ask_one(0, request.url.path + (f"?{query}" if query else ""))
        if answer.status is None:
            raise unavailable("the first process of this gateway does not answer", "unavailable")
        return Response(answer.body, answer.status, {"cache-control": "no-store"}, "application/json")

    def _info(self) -> dict[str, Any]:
        gateway = self._gateway
        info = {"version": __version__, "models": gateway.model_names, "record_share": gateway.config.record_share}
        return {**info, **gateway.stats()}


def _kind(name: str) -> str:
    return KINDS.get(name.rpartition(".")[2], "")


def _whole(text: str, name: str) -> int:
    """A whole number from 0 on, of at most 15 digits. Raises `ApiError`."""
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise wrong(f"{name} must be a whole number", name)
    return int(text)
