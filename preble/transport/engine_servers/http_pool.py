"""A small HTTP/1.1 client for answers that are passed on as they come: kept connections to one server, and one answer
after the other on each. Owns the bounds on what a server may send, and when a connection may be used again; what is
asked, and what an answer means, is its users'.

    answer = await pool.send(head, body)        # when the answer's head is here: answer.status, answer.headers
    while part := await answer.read():          # bytes of the body as they come, without chunks' frames
        ...                                     # or, without a task in between: answer.flow(sink); await answer.flown()
    answer.close()                              # before its end, this hangs up, at which engines abort

At its bounds: a head, or fields after a chunked body, over `head_bytes` or `fields_max`, `ProtocolError`; a reader that
is slower than the server, the connection is not read while `buffer_bytes` wait; connections without a request beyond
`idle_max` or older than `idle_seconds` are closed. There is no bound on requests at a time, that is the router's.

A kept connection that the server closes before a byte of its answer has come says nothing of the server: the request is
sent once more, on a new one. Needs httptools (the extra `gateway`). Belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ...errors import InvalidInput, MissingExtra, ProtocolError, TransportError
from ...types import check_fields
from ..tasks import within
from .chunks import of_chunks
from .http_client import Unreachable

FEED_BYTES = 4096  # of a head, given to the parser at once: its bounds are exact to so many bytes
_BODILESS = frozenset({204, 304})

Fields = list[tuple[bytes, bytes]]
# Says what it did with bytes that came: 0, nothing; 1, they are passed on; 2, they are, and nothing more is to be read
# until `go_on`. It must not raise.
Splice = Callable[[bytes], int]


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What a server's answers may cost, and how long connections are kept: for less than SGLang and vLLM keep them (5
    s), so that they are not closed under a request. Raises `InvalidConfig`."""

    head_bytes: int = 64 << 10
    fields_max: int = 200
    buffer_bytes: int = 256 << 10
    idle_max: int = 256
    idle_seconds: float = 4.0
    connect_seconds: float = 5.0

    def __post_init__(self) -> None:
        check_fields(self, "be positive", *self.__slots__)


class HttpPool:
    """Connections to the server at `url`, from the first request until `close`."""

    def __init__(self, url: str, limits: PoolLimits | None = None, *, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidInput(f"url must be http://host:port, got {url!r}")
        self.url = url
        self.limits = limits or PoolLimits()
        self.open: set[_Connection] = set()
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._parser = _response_parser()
        self._idle: deque[_Connection] = deque()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    async def send(
        self, head: bytes, body: bytes = b"", *, on_sent: Callable[[Answer], object] | None = None
    ) -> Answer:
        """Send a request, head and body as they are; its answer when that one's head is here. `on_sent` is given the
        answer as soon as the request is on its way, each time it is.

        Raises `Unreachable` where no connection can be had, `TransportError` for one that breaks off, `ProtocolError`.
        """
        while (kept := self._take_idle()) is not None:
            answer = kept.begin(head, body)
            if on_sent is not None:
                on_sent(answer)
            try:
                return await answer.begun()
            except TransportError:
                if answer.received or answer.given_up or self._closed:
                    raise
        connection = await self._connect()
        answer = connection.begin(head, body)
        if on_sent is not None:
            on_sent(answer)
        return await answer.begun()

    def close(self) -> None:
        """Hang up everything; answers that are read end with `TransportError`. Idempotent."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connection in list(self.open):
            connection.abort(TransportError(f"the connections to {self.url} were closed"))
        self._idle.clear()

    @property
    def idle(self) -> int:
        """Connections that wait for a request."""
        return len(self._idle)

    async def _connect(self) -> _Connection:
        if self._closed:
            raise TransportError(f"the connections to {self.url} were closed")
        loop = asyncio.get_running_loop()
        connection = _Connection(self, loop)
        connecting = loop.create_connection(lambda: connection, self._host, self._port, ssl=self._tls)
        try:
            await within(self.limits.connect_seconds, connecting)
        except asyncio.TimeoutError:
            raise Unreachable(f"{self.url} takes no connection in {self.limits.connect_seconds:g} s") from None
        except OSError as error:
            raise Unreachable(f"{self.url} cannot be reached: {type(error).__name__}") from error
        except asyncio.CancelledError:
            connection.abort(None)  # it may be there by now, and nobody would know
            raise
        return connection

    def _take_idle(self) -> _Connection | None:
        oldest = asyncio.get_running_loop().time() - self.limits.idle_seconds
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_since >= oldest:
                return connection
            connection.abort(None)
        return None

    def keep(self, connection: _Connection, now: float) -> None:
        """A connection is free again; the oldest is closed where there are too many."""
        if self._closed:
            connection.abort(None)
            return
        self._idle.append(connection)
        if len(self._idle) > self.limits.idle_max:
            self._idle.popleft().abort(None)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self.limits.idle_seconds, self._close_old)

    def _close_old(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweep = None
        oldest = loop.time() - self.limits.idle_seconds
        while self._idle and (self._idle[0].idle_since <= oldest or not self._idle[0].is_open):
            self._idle.popleft().abort(None)
        if self._idle:
            left = self._idle[0].idle_since - oldest
            self._sweep = loop.call_later(max(left, 0.01), self._close_old)

    def forget(self, connection: _Connection) -> None:
        """A connection is closed."""
        self.open.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)


class Answer:
    """One answer as it comes. Read by one task; made by `HttpPool.send`."""

    __slots__ = (
        "_buffered", "_connection", "_error", "_parts", "_sink", "_waiter", "given_up", "head_is_here", "headers",
        "is_whole", "last_at", "received", "splice", "status",
    )  # fmt: skip

    def __init__(self, connection: _Connection, now: float) -> None:
        self.status = 0
        self.headers: Fields = []
        self.received = False  # a byte has come
        self.given_up = False  # by who asked for it
        self.head_is_here = False
        self.is_whole = False  # all has come, read or not
        self.last_at = now  # when something last came, on the loop's clock
        self._connection: _Connection | None = connection
        self._parts: list[bytes] = []
        self._buffered = 0
        self._error: TransportError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[bytes], bool] | None = None
        self.splice: Splice | None = None

    # --- read ---------------------------------------------------------------------------------------------------------

    async def begun(self) -> Answer:
        """The answer itself, when its head is here. Raises `TransportError`; cancelled, it is closed."""
        try:
            while not self.head_is_here and self._error is None:
                await self._wait()
        except BaseException:
            self.close()
            raise
        if not self.head_is_here and self._error is not None:
            raise self._error
        return self

    async def read(self) -> bytes:
        """What of the body has come since, b"" at its end. Raises `TransportError`, after what had come before."""
        while not self._parts:
            if self.is_whole:
                return b""
            if self._error is not None:
                raise self._error
            await self._wait()
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._parts = []
        self._buffered = 0
        self.go_on()
        return data

    def flow(self, sink: Callable[[bytes], bool], splice: Splice | None = None) -> None:
        """From now on `sink` is given what comes, as soon as it has come; where it says False, nothing more is read
        until `go_on`. It must not raise. Before it, `splice` is given what comes where whole chunks may come, frames
        and all; see `Splice`."""
        self._sink, self.splice = sink, splice
        self.came()

    async def flown(self) -> None:
        """Wait until the sink was given all, and let go of it. Raises `TransportError`, after what had come before."""
        try:
            while not self.is_whole and self._error is None:
                await self._wait()
        finally:
            self._sink = self.splice = None  # they know who holds this answer
        if self._error is not None:
            raise self._error

    @property
    def is_paused(self) -> bool:
        """Whether nothing more is read until `go_on`, or until what waits is read."""
        return self._connection is not None and self._connection.is_paused

    def go_on(self) -> None:
        """Read on, if that had stopped."""
        if self._connection is not None and self._connection.is_paused:
            self._connection.go_on()

    def close(self) -> None:
        """Hang up, unless all has come; what waits to be read is lost. Idempotent."""
        connection = self._connection
        if connection is not None and not self.is_whole:
            connection.abort(TransportError("the answer was given up"))

    def break_off(self, error: TransportError) -> None:
        """The same, and who reads is given the error."""
        self.given_up = True
        if self._connection is not None:
            self._connection.abort(error)
        else:
            self.lost(error)

    async def _wait(self) -> None:
        assert self._waiter is None, "one task reads an answer"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # --- written by the connection ------------------------------------------------------------------------------------

    def take(self, data: bytes) -> None:
        """A part of the body."""
        self._parts.append(data)
        self._buffered += len(data)

    def came(self) -> int:
        """Bytes that were received are parsed: hand on what they brought. The bytes that wait to be read now."""
        parts = self._parts
        if not parts:
            return 0
        if self._sink is None:
            self.wake()
            return self._buffered
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._parts = []
        self._buffered = 0
        if not self._sink(data) and self._connection is not None:
            self._connection.pause()
        return 0

    def whole(self) -> None:
        """All has come."""
        self.is_whole = True
        self._connection = None
        self.wake()

    def lost(self, error: TransportError) -> None:
        """No more will come."""
        self._connection = None
        if self._error is None and not self.is_whole:
            self._error = error
            self.wake()

    def wake(self) -> None:
        """Something has come."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class _Connection(asyncio.Protocol):
    """One connection; with an answer to come, or kept."""

    def __init__(self, pool: HttpPool, loop: asyncio.AbstractEventLoop) -> None:
        self.idle_since = 0.0
        self._pool = pool
        self._loop = loop
        self._limits = pool.limits
        self._transport: Any = None
        self._parser: Any = None
        self._answer: Answer | None = None
        self._error: TransportError | None = None
        self.is_paused = False
        self._ends_with_connection = False
        self._ended_chunk = self._is_between_chunks = False
        self._head_bytes = self._loose_bytes = self._fields = 0

    # --- asyncio's callbacks ------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """It is there."""
        self._transport = transport
        self._pool.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._pool.forget(self)
        answer, self._answer, self._transport = self._answer, None, None
        if answer is None:
            return
        if self._error is None and exc is None and answer.head_is_here and self._ends_with_connection:
            answer.whole()
        else:
            name = "" if exc is None else f": {type(exc).__name__}"
            answer.lost(self._error or TransportError(f"{self._pool.url} broke off{name}"))

    def data_received(self, data: bytes) -> None:
        """Bytes of the answer; without a request they are an error of the server's."""
        answer = self._answer
        if answer is None:
            self.abort(None)
            return
        answer.received = True
        answer.last_at = self._loop.time()
        if self._is_between_chunks and answer.splice is not None and (taken := answer.splice(data)):
            if taken > 1:
                self.pause()
            return
        try:
            if self._is_between_chunks and (part := of_chunks(data)):
                answer.take(part)
            elif answer.head_is_here or len(data) <= FEED_BYTES:
                self._feed(data)
            else:
                for start in range(0, len(data), FEED_BYTES):
                    self._feed(data[start : start + FEED_BYTES])
        except ProtocolError as error:
            self.abort(error)
        except Exception as error:  # noqa: BLE001  the parser's own, which hide what a callback raised
            inner = error.__context__
            self.abort(
                inner if isinstance(inner, ProtocolError) else ProtocolError(f"{self._pool.url} does not speak HTTP")
            )
        if answer.came() > self._limits.buffer_bytes:
            self.pause()

    def _feed(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._answer is None:
            raise ProtocolError(f"{self._pool.url} sent more than one answer")
        self._loose_bytes += len(data)
        self._ended_chunk = False
        self._parser.feed_data(data)
        # Nothing of the next chunk is here yet, or it would end otherwise.
        self._is_between_chunks = self._ended_chunk and data.endswith(b"\r\n") and self._answer is not None
        if self._head_bytes + self._loose_bytes > self._limits.head_bytes and self._answer is not None:
            raise self._head_too_large()

    def _head_too_large(self) -> ProtocolError:
        limits = self._limits
        text = f"more than {limits.fields_max} header fields, or {limits.head_bytes} bytes of them"
        return ProtocolError(f"{self._pool.url} sent {text}")

    # --- one answer ---------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a request may be sent on it."""
        return self._transport is not None and not self._transport.is_closing()

    def begin(self, head: bytes, body: bytes) -> Answer:
        """Send a request."""
        if self._parser is None:
            self._parser = self._pool._parser(self)
        self._head_bytes = self._loose_bytes = self._fields = 0
        self._answer = answer = Answer(self, self._loop.time())
        if not self.is_open:
            self.connection_lost(None)
        elif len(body) <= FEED_BYTES * 4:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        return answer

    def pause(self) -> None:
        """Nobody takes what comes: read nothing more."""
        if not self.is_paused and self._answer is not None and self._transport is not None:
            self.is_paused = True
            self._transport.pause_reading()

    def go_on(self) -> None:
        """Read on."""
        if self.is_paused and self._transport is not None:
            self.is_paused = False
            self._transport.resume_reading()
            if self._answer is not None:
                self._answer.last_at = self._loop.time()

    def abort(self, error: TransportError | None) -> None:
        """Hang up at once."""
        if self._error is None:
            self._error = error
        if self._transport is not None:
            self._transport.abort()
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.lost(error or TransportError(f"the connection to {self._pool.url} was closed"))

    # --- the parser's callbacks ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """An answer, or one that only says to wait, begins."""
        answer = self._answer
        if answer is None or answer.head_is_here:
            raise ProtocolError(f"{self._pool.url} sent more than one answer")
        answer.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head, or of what comes after a chunked body, which nobody reads."""
        self._loose_bytes = 0
        self._fields += 1
        self._head_bytes += len(name) + len(value)
        if self._fields > self._limits.fields_max or self._head_bytes > self._limits.head_bytes:
            raise self._head_too_large()
        answer = self._answer
        if answer is not None and not answer.head_is_here:
            answer.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._loose_bytes = 0
        answer = self._answer
        status = self._parser.get_status_code()
        if answer is None or status < 200:
            return
        answer.status = status
        answer.head_is_here = True
        framed = any(name == b"content-length" or name == b"transfer-encoding" for name, _ in answer.headers)
        self._ends_with_connection = not framed and status not in _BODILESS
        answer.wake()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._loose_bytes = 0
        answer = self._answer
        if answer is not None:
            answer.take(body)

    def on_chunk_header(self) -> None:
        """The length of a chunk is here, the chunk is not yet whole."""
        self._ended_chunk = False

    def on_chunk_complete(self) -> None:
        """A chunk is whole."""
        self._ended_chunk = True

    def on_message_complete(self) -> None:
        """The answer is whole, and the connection free."""
        answer = self._answer
        if answer is None or not answer.head_is_here:
            return
        self._answer = None
        answer.whole()
        if self._parser.should_keep_alive() and not self._ends_with_connection:
            self.go_on()
            self.idle_since = self._loop.time()
            self._pool.keep(self, self.idle_since)
        else:
            self._transport.close()


def _response_parser() -> Any:
    try:
        import httptools
    except ImportError as error:
        raise MissingExtra("relaying needs httptools: pip install 'preble[gateway]'") from error
    return httptools.HttpResponseParser
