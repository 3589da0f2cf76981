"""A bound on the time of a whole request. Owns what its client gets when the time is over: 504, or an error event where
a stream of events has begun. An answer of another kind that has begun is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ..transport.tasks import end_all
from .api.http import Receive, Send, error_events
from .core.http_errors import ApiError

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


async def in_time(seconds: float, app: App, scope: Scope, receive: Receive, send: Send) -> None:
    """Let the application answer, for so long. Raises `ApiError` 504 where it has not begun by then, and whatever it
    raises itself."""
    kind = ""
    has_begun = is_whole = False

    async def note(message: MutableMapping[str, Any]) -> None:
        nonlocal kind, has_begun, is_whole
        if message["type"] == "http.response.start":
            has_begun = True
            kind = next((value.decode() for name, value in message["headers"] if name == b"content-type"), "")
        else:
            is_whole = not message.get("more_body", False)
        await send(message)

    task = asyncio.ensure_future(_run(app, scope, receive, note))
    try:
        await asyncio.wait([task], timeout=seconds)
        if task.done():
            task.result()
            return
    finally:
        if not task.done():
            await end_all(task)
        del task  # its error knows this frame
    late = ApiError(504, f"the answer took longer than {seconds:g} s", kind="timeout_error", code="request_timeout")
    if not has_begun:
        raise late
    if not is_whole and kind.startswith("text/event-stream"):
        await send({"type": "http.response.body", "body": error_events(late, scope["path"]), "more_body": False})


async def _run(app: App, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)
