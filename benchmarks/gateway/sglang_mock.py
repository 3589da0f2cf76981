"""A server that speaks SGLang's HTTP before an engine of a benchmark's own. Owns the endpoints, and how tokens are
streamed; when they come is the engine's affair."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web

from benchmarks.gateway.gateway_mock import CAPACITY_TOKENS, ENVIRONMENT, GETS, LOAD

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class MockServerEngine(Protocol):
    """What answers."""

    def load(self) -> tuple[int, int]:
        """Requests that run, and that wait."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """SGLang's /generate, streamed."""


async def stream_tokens(
    request: web.Request, prompt_tokens: int, count: int, token_seconds: float
) -> web.StreamResponse:
    """The answer of /generate: the first token now, then one each `token_seconds`."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for number in range(count):
        reason = {"type": "length", "length": count} if number == count - 1 else None
        meta = {"id": "r", "finish_reason": reason, "prompt_tokens": prompt_tokens, "cached_tokens": 0}
        line = json.dumps({"output_ids": [300 + number], "meta_info": {**meta, "completion_tokens": number + 1}})
        await response.write(b"data: " + line.encode() + b"\n\n")
        await asyncio.sleep(token_seconds)
    await response.write(b"data: [DONE]\n\n")
    return response


async def start_server(port: int, engine: MockServerEngine, running_max: int, *, cancel: bool = False) -> None:
    """Listen on a port of this machine. `cancel`: a handler ends when its client has left."""
    facts = {**ENVIRONMENT, "max_running_requests": running_max}

    def says(value: Any) -> Handler:
        async def answer(_: web.Request) -> web.StreamResponse:
            return web.json_response(value)

        return answer

    async def loads(_: web.Request) -> web.StreamResponse:
        running, waiting = engine.load()
        load = {**LOAD, "num_running_reqs": running, "num_waiting_reqs": waiting}
        return web.json_response({"loads": [{**load, "max_total_num_tokens": CAPACITY_TOKENS}]})

    app = web.Application()
    for path, value in GETS.items():
        handler = loads if path == "/v1/loads" else says(facts if value is ENVIRONMENT else value)
        app.add_routes([web.get(path, handler)])
    app.add_routes([web.post("/generate", engine.generate), web.post("/abort_request", says({}))])
    runner = web.AppRunner(app, handler_cancellation=cancel)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
