"""One request of a connection and its answer. Owns how an answer becomes bytes, and how a body is handed over; bounds
and times are `connections`'.

It has two doors with the same bytes behind them. Most handlers use ASGI's `receive` and `send`. Who forwards answers of
others reads `whole_body` where that is here already, and passes parts on with `write_part`, without a task's turn and a
message for each of them.

Who writes faster than the client reads, waits: `send` does, and `write` says so.
"""

from __future__ import annotations

import asyncio
import http
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl

logger = logging.getLogger("preble.gateway")

Message = MutableMapping[str, Any]
App = Callable[[MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Any]

_NO_NAME = re.compile(rb"[^!#$%&'*+\-.^_`|~0-9A-Za-z]")  # of a field (RFC 9110, 5.6.2)
_NO_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_BODILESS = frozenset({204, 304})
DEFECT = b"Internal Server Error"
DEFECT_HEADERS = (
    (b"content-type", b"text/plain; charset=utf-8"),
    (b"content-length", b"%d" % len(DEFECT)),
    (b"connection", b"close"),
)


def _status_line(status: int) -> bytes:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


_STATUS_LINES = {status: _status_line(status) for status in range(100, 600)}


class News:
    """Something has come: an event for one waiter, made for each request."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """There is news."""
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def taken(self) -> None:
        """Wait until there is news, and take it."""
        while not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False


class RequestCycle:
    """One request and its answer. `on_complete`: the answer is written. The connection writes `body`, `more_body`,
    `disconnected` and `keep_alive`."""

    __slots__ = (
        "_default_headers", "_flow", "_on_complete", "_scope", "_transport", "_waits_to_be_asked", "body",
        "chunked_encoding", "disconnected", "expected_content_length", "keep_alive", "message_event", "more_body",
        "response_complete", "response_started",
    )  # fmt: skip

    def __init__(
        self,
        scope: MutableMapping[str, Any],
        transport: Any,
        flow: FlowControl,
        on_complete: Callable[[], object],
        *,
        keep_alive: bool,
        default_headers: Sequence[tuple[bytes, bytes]] = (),
        waits_to_be_asked: bool = False,
    ) -> None:
        self._scope, self._transport, self._flow, self._on_complete = scope, transport, flow, on_complete
        self._default_headers = default_headers
        self._waits_to_be_asked = waits_to_be_asked  # for its body: `Expect: 100-continue`
        self.message_event = News()
        self.disconnected = False
        self.keep_alive = keep_alive
        self.body = bytearray()
        self.more_body = True
        self.response_started = False
        self.response_complete = False
        self.chunked_encoding: bool | None = None
        self.expected_content_length = 0

    # --- the request --------------------------------------------------------------------------------------------------

    def take(self, body: bytes) -> None:
        """A part of the body has come. Where too much waits to be read, nothing more is received."""
        self.body += body
        if len(self.body) > HIGH_WATER_LIMIT:
            self._flow.pause_reading()
        self.message_event.set()

    def end_body(self) -> None:
        """The body is whole."""
        self.more_body = False
        self.message_event.set()

    def whole_body(self) -> bytes | None:
        """The body, where it is here as a whole and nobody has begun to read it; it is handed over once."""
        if self.more_body or self.disconnected or self._waits_to_be_asked or self.response_complete:
            return None
        body, self.body = bytes(self.body), bytearray()
        return body

    async def receive(self) -> Message:
        """ASGI's: the next part of the body, or that the client has gone."""
        if self._waits_to_be_asked and not self._transport.is_closing():
            self._waits_to_be_asked = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self.disconnected and not self.response_complete:
            self._flow.resume_reading()
            await self.message_event.taken()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    # --- the answer ---------------------------------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        """ASGI's: the head of the answer, or a part of its body; while the client reads nothing, this waits."""
        if self._flow.write_paused and not self.disconnected:
            await self._flow.drain()
        kind = message["type"]
        if kind == "http.response.start":
            self.start(message["status"], message.get("headers", ()))
        elif kind == "http.response.body":
            self.write(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"no {kind} here")

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """The head of the answer. Raises `RuntimeError` for a second one, and for what is no field."""
        if self.disconnected:
            return
        if self.response_started:
            raise RuntimeError("an answer has begun already")
        fields = [*self._default_headers, *headers]
        _check(fields)
        self._waits_to_be_asked = False
        parts = [_STATUS_LINES[status]]
        says_close = False
        for name, value in fields:
            name = name.lower()
            if name == b"content-length" and self.chunked_encoding is None:
                self.expected_content_length, self.chunked_encoding = int(value), False
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                self.expected_content_length, self.chunked_encoding = 0, True
            elif name == b"connection" and b"close" in [one.strip().lower() for one in value.split(b",")]:
                self.keep_alive, says_close = False, True
            parts += (name, b": ", value, b"\r\n")
        if not self.keep_alive and not says_close:
            parts.append(b"connection: close\r\n")
        if self.chunked_encoding is None and self._scope["method"] != "HEAD" and status not in _BODILESS:
            self.chunked_encoding = True
            parts.append(b"transfer-encoding: chunked\r\n")
        parts.append(b"\r\n")
        self.response_started = True
        self._transport.write(b"".join(parts))

    def write(self, body: bytes, *, more: bool = True) -> bool:
        """A part of the body, the last one unless there is `more`; False where the client reads too slowly for more.
        To a client that has gone nothing is written. Raises `RuntimeError` where the body is not as long as was said,
        and where there is no answer that has begun."""
        if self.disconnected:
            return True
        if not self.response_started or self.response_complete:
            raise RuntimeError("there is no answer that this belongs to")
        if self._scope["method"] == "HEAD":
            self.expected_content_length = 0
        elif self.chunked_encoding:
            frame = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if frame or not more:
                self._transport.write(frame if more else frame + b"0\r\n\r\n")
        else:
            if len(body) > self.expected_content_length:
                raise RuntimeError("the body is longer than was said")
            self.expected_content_length -= len(body)
            if body:
                self._transport.write(body)
        if not more:
            self._complete()
        return not self._flow.write_paused

    def write_part(self, part: bytes) -> bool:
        """`write`, with more to come, for who may not know that the answer was given another end meanwhile."""
        if self.disconnected or self.response_complete or not self.response_started:
            return not self._flow.write_paused
        if not self.chunked_encoding or not part:
            return self.write(part)
        self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return not self._flow.write_paused

    def way_of_chunks(self) -> tuple[FlowControl, Callable[[bytes], object]] | None:
        """Where whole chunks of a body are written that somebody else has framed, and what says whether the client
        reads; nothing may be written there after the answer's end. None where it has no chunks."""
        return (self._flow, self._transport.write) if self.response_started and self.chunked_encoding else None

    def _complete(self) -> None:
        if self.expected_content_length:
            raise RuntimeError("the body is shorter than was said")
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self._transport.close()
        self._on_complete()

    async def run_asgi(self, app: App) -> None:
        """Let the application answer. What it does not finish is a defect, and ends the connection."""
        try:
            await app(self._scope, self.receive, self.send)
        except Exception:
            logger.exception("a request failed, which is a defect of the gateway")
        finally:
            self._abandon()
            self._on_complete = _nothing  # nobody keeps the connection for its sake

    def _abandon(self) -> None:
        """Nobody answers any more."""
        if self.disconnected or self.response_complete:
            return
        if self.response_started:
            self._transport.close()
        else:
            self.start(500, DEFECT_HEADERS)
            self.write(DEFECT, more=False)


def _nothing() -> None:
    """What is called where nobody waits."""


def _check(fields: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise `RuntimeError` where one of them is no field: what others say must not end a line."""
    names, values = b"".join([name for name, _ in fields]), b"".join([value for _, value in fields])
    if _NO_NAME.search(names) or _NO_VALUE.search(values):
        raise RuntimeError("an answer has an invalid header field")
