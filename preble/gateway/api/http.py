"""Small things between Starlette and the handlers: bodies with a limit, JSON and SSE answers, clients that go away.

A client that goes away is noticed while a handler works, not only when it writes: its work is cancelled, and with it
the generation at the engine.
"""

from __future__ import annotations

import asyncio
import contextvars
import re
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from ...errors import PrebleError
from ...transport.tasks import running, within
from ..core.byte_budget import ByteShare
from ..core.gateway import Gateway, TokenIds
from ..core.header_fields import headers_of
from ..core.http_errors import ApiError, api_error_of

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BODY_SECONDS = 60.0
LOOP_BYTES = 16 << 10  # parsed on the loop; more, beside it
READERS = 2  # threads for that: with one lock to share, more would only hold more memory
JSON = "application/json"
DONE = b"data: [DONE]\n\n"
ANTHROPIC_PATH, RESPONSES_PATH = "/v1/messages", "/v1/responses"
_SEQUENCE = re.compile(rb'"sequence_number"\s*:\s*(\d{1,15})')
_readers = ThreadPoolExecutor(READERS, "preble-bodies")


@asynccontextmanager
async def body_of(request: Request, gateway: Gateway) -> AsyncIterator[bytes]:
    """The whole body, counted to what the gateway holds until the block ends. Raises `ApiError`: 415 if it is no JSON,
    413 as soon as it is known to be too long, 408 if it does not come, 503 if bodies are too many bytes already."""
    with gateway.bodies.share() as share:
        yield await read_whole(request.scope, request.receive, gateway.config.max_body_bytes, share)


async def read_whole(
    scope: MutableMapping[str, Any], receive: Receive, bytes_max: int, share: ByteShare, media_type: str = JSON
) -> bytes:
    """The whole body, which must be of this type, counted in `share`. Raises as `body_of`."""
    headers = headers_of(scope)
    given = headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if given != media_type:  # forms are what pages of other sites may send
        raise ApiError(415, f"the body must be {media_type}", code="unsupported_media_type")
    declared = headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > bytes_max:
        raise _too_large(bytes_max)
    connection = scope.get("preble.connection")
    body: bytes | None = None if connection is None else connection.cycle.whole_body()
    if body is not None:  # it is here, nothing need watch over it
        _count(len(body), bytes_max, share)
        return body
    try:
        return await within(BODY_SECONDS, _read(Request(scope, receive), bytes_max, share))
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not come in {BODY_SECONDS:.0f} s", code="timeout") from None


async def _read(request: Request, bytes_max: int, share: ByteShare) -> bytes:
    parts: list[bytes] = []
    total = 0
    async for part in request.stream():
        parts.append(part)
        total += len(part)
        _count(total, bytes_max, share)
    return b"".join(parts)


def _count(total: int, bytes_max: int, share: ByteShare) -> None:
    if total > bytes_max:
        raise _too_large(bytes_max)
    share.hold(total)


async def off_loop(size: int, function: Callable[..., T], *given: Any) -> T:
    """`function(*given)`, which takes a body of `size` bytes apart: in a thread, where that would hold the loop. At
    most `READERS` are at work at once; others wait, at no more cost than their bodies."""
    if size <= LOOP_BYTES:
        return function(*given)
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_readers, partial(context.run, function, *given))


def start_readers() -> None:
    """Start the threads in which large bodies are read: none could be started where memory is short."""
    barrier = threading.Barrier(READERS)
    wait([_readers.submit(barrier.wait) for _ in range(READERS)])


def _too_large(bytes_max: int) -> ApiError:
    return ApiError(413, f"the body is larger than {bytes_max} bytes", code="request_too_large")


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in JSON."""
    return Response(msgspec.json.encode(content), status, headers, media_type=JSON)


def error_response(error: PrebleError, path: str = "") -> Response:
    """An error, in Anthropic's shape where the path is of their API, else in OpenAI's."""
    api_error = api_error_of(error)
    body = api_error.anthropic_body() if path.startswith(ANTHROPIC_PATH) else api_error.body()
    return json_response(body, api_error.status, api_error.headers())


def error_events(error: PrebleError, path: str = "", last: bytes = b"") -> bytes:
    """What ends a stream at this path with an error, as clients of its API know one. `last`: the latest bytes that were
    sent, of which the numbers of events go on."""
    api_error = api_error_of(error)
    if path.startswith(ANTHROPIC_PATH):
        return b"event: error\n" + sse(api_error.anthropic_body())
    body = api_error.body()
    if not path.startswith(RESPONSES_PATH):
        return sse(body) + DONE
    numbers = _SEQUENCE.findall(last)
    own = {name: body["error"][name] for name in ("code", "message", "param")}
    number = int(numbers[-1]) + 1 if numbers else 0
    return b"event: error\n" + sse({"type": "error", "sequence_number": number, **own, **body})


def sse(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


async def attended(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, unless the client goes away first: then it is cancelled, `ClientDisconnect` is raised.

    The body must have been read: from then on the only news from a client is that it has gone.
    """
    task = asyncio.ensure_future(work)
    try:
        async with running(task, _gone(receive)) as both:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientDisconnect
    finally:
        del task  # its error knows this frame


async def token_ids_of(
    request: Request, gateway: Gateway, prompts: Sequence[str | TokenIds], param: str
) -> list[TokenIds]:
    """Token ids of a request's prompts; texts are given up when the client goes away. Raises as `attended` does,
    `ApiError` or `QueueFull`."""
    ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
    if len(ids) == len(prompts):
        return ids
    return await attended(request.receive, gateway.tokens_of_all(prompts, param))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events as they come. `events`, and the `source` they are made from, are closed when the last is
    written or the client has gone.

    An error on the way is sent as an event, since the status has been sent before.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], source: AsyncGenerator[Any, None], headers: Mapping[str, str]
    ) -> None:
        super().__init__(events, headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events
        self._source = source

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Write the answer. Raises `ClientDisconnect` if the client goes away."""
        async with aclosing(self._source), aclosing(self._events):
            await attended(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except PrebleError as error:
            await send({"type": "http.response.body", "body": error_events(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
