"""Connections of clients: how large a head and how many fields a request may have, for how long a client may let us
wait, and how many connections there are. Owns the bounds; HTTP itself is uvicorn's and httptools'.

A connection waits for one thing at a time, each with its own time:

    first byte and whole head     `head_seconds`         then 408, or nothing where not a byte came
    the body                      `body_seconds`         then it is cut off; a handler that reads it has answered 408
    the rest of a body that was answered already          `linger_seconds`, what comes is thrown away
    a client that reads nothing of what was written       `write_seconds`, then it is cut off
    the next request              uvicorn's keep-alive

At its bounds: a head, or the fields after a chunked body, over `head_bytes` or `fields_max`, 431; over `open_max`
connections, or `open_of_address_max` of one address, 503. After any such answer but 503 what still comes is read and
thrown away until the client hangs up, `linger_seconds` at most; not over TLS. A request that comes before the one
before it is answered is not read, and the connection ends with that answer: its client may send it again. All are
counted, by `Why`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .core.addresses import counted_as
from .core.doors import NETWORK, PROCESS, SCOPE_KEY, Door
from .core.http_errors import ApiError, unavailable
from .cycle import RequestCycle

logger = logging.getLogger("preble.gateway")

FEED_BYTES = 4096  # read at once by the parser: the bounds are exact to so many bytes
Why = Literal["head_too_large", "not_http", "pipelined", "many", "many_of_address", "slow_head", "slow_body", "unread"]
# What an offer to change the protocol consists of; nobody is obliged to take it up, and we go on in HTTP/1.1.
_OFFER_FIELDS = frozenset({b"upgrade", b"http2-settings", b"connection"})


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one connection may cost, and how many there may be."""

    open_max: int = 8192
    open_of_address_max: int = 4096
    head_bytes: int = 32 << 10
    fields_max: int = 100
    head_seconds: float = 10.0
    body_seconds: float = 65.0  # longer than `read_body` waits, which can say why
    linger_seconds: float = 5.0
    write_seconds: float = 30.0


class Connections:
    """The open connections of one server. `on_refused` is given why one was refused or cut off. Belongs to one loop."""

    def __init__(
        self,
        limits: ConnectionLimits,
        on_refused: Callable[[Why], None],
        is_proxy: Callable[[str], bool] = lambda address: False,
    ) -> None:
        self.limits = limits
        self.is_proxy = is_proxy
        self.open = 0
        self._on_refused = on_refused
        self._of_address: Counter[str] = Counter()

    def enter(self, address: str | None) -> Why | None:
        """Count one more; why it must not be, and then it is not. Other processes of this gateway have no address, and
        are always let in; trusted proxies and the Unix socket have "", and share no bound of one address."""
        if address is not None and self.open >= self.limits.open_max:
            return "many"
        if address:
            if self._of_address[address] >= self.limits.open_of_address_max:
                return "many_of_address"
            self._of_address[address] += 1
        self.open += 1
        return None

    def leave(self, address: str | None) -> None:
        """Count one less."""
        self.open -= 1
        if address:
            self._of_address[address] -= 1
            if not self._of_address[address]:
                del self._of_address[address]

    def refuse(self, why: Why, address: str | None) -> None:
        """One was refused or cut off."""
        self._on_refused(why)
        logger.warning("connection refused", extra={"fields": {"why": why, "client": address or ""}})


class RefusedConnection(Exception):
    """What the parser is given to stop at."""

    def __init__(self, why: Why, error: ApiError | None = None) -> None:
        super().__init__(why)
        self.why, self.error = why, error


class BoundedProtocol(HttpToolsProtocol):
    """One connection. uvicorn's, within the bounds of `connections`."""

    def __init__(self, connections: Connections, door: Door = NETWORK, **given: Any) -> None:
        super().__init__(**given)
        self._door = door
        self.parser: Any = self.parser
        self._connections = connections
        self._limits = connections.limits
        self._address: str | None = None
        self._is_counted = False
        self._is_receiving = False  # a message has begun and is not whole
        self._has_head = False
        self._offers_upgrade = False
        self._is_deaf = False  # what else comes is thrown away
        self._is_ending = False  # nothing more is written
        self._head_bytes = self._fields = self._loose_bytes = 0
        self._waiting: asyncio.TimerHandle | None = None  # for bytes of the client
        self._waiting_for: Why = "slow_head"
        self._unread: asyncio.TimerHandle | None = None  # for the client to take bytes
        self._on_gone: Callable[[], object] | None = None  # of the request that is being answered
        self._on_read: Callable[[], object] | None = None

    # --- the connection -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Count it, or refuse it; then the head has to come."""
        super().connection_made(transport)
        self._address = self._counted_as()
        why = self._connections.enter(self._address)
        if why is not None:
            self._refuse(
                RefusedConnection(why, unavailable("this gateway has as many connections as it takes", "connections"))
            )
            return
        self._is_counted = True
        _notice_vanishing(transport.get_extra_info("socket"))
        self._wait_for("slow_head", self._limits.head_seconds)

    def _counted_as(self) -> str | None:
        if self._door == PROCESS:
            return None
        if self.client is None or self._connections.is_proxy(self.client[0]):
            return ""
        return counted_as(self.client[0])

    def connection_lost(self, exc: Exception | None) -> None:
        """Give everything back."""
        self._stop_waiting()
        self._stop_unread()
        self._unset_keepalive_if_required()
        if self._is_counted:
            self._is_counted = False
            self._connections.leave(self._address)
        super().connection_lost(exc)
        if self._on_gone is not None:
            self._on_gone()

    # --- bytes in -----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse what came, a little at a time."""
        if self._is_deaf:
            return
        self._unset_keepalive_if_required()
        self._parse(memoryview(data))
        if not self._is_deaf:
            self._wait_for_rest()

    def _wait_for_rest(self) -> None:
        """After what came: a message that is not whole has its time, from its first bytes on."""
        if self._is_receiving and self._has_head:
            if self._waiting is None or self._waiting_for != "slow_body":
                self._wait_for("slow_body", self._limits.body_seconds)
        elif self._is_receiving or not (self._is_answering or self.timeout_keep_alive_task):
            if self._waiting is None or self._waiting_for != "slow_head":
                self._wait_for("slow_head", self._limits.head_seconds)
        else:
            self._stop_waiting()

    def _parse(self, data: memoryview) -> None:
        try:
            for start in range(0, len(data), FEED_BYTES):
                if self._is_deaf:
                    return
                rest = data[start:]
                self._feed(rest[:FEED_BYTES])
        except httptools.HttpParserUpgrade as error:
            self._go_on_without_offer(rest[error.args[0] :])
        except httptools.HttpParserError as error:
            refused = error.__context__
            if not isinstance(refused, RefusedConnection):
                refused = RefusedConnection("not_http", ApiError(400, "this is not HTTP/1.1", code="not_http"))
            self._refuse(refused)
        except RefusedConnection as refused:
            self._refuse(refused)

    def _feed(self, data: memoryview) -> None:
        self._loose_bytes += len(data)
        self.parser.feed_data(data)
        self._check_head()

    def _check_head(self) -> None:
        """Bytes that are no body: of fields that are whole, and those since that belong to nothing yet."""
        limits = self._limits
        if self._head_bytes + self._loose_bytes > limits.head_bytes or self._fields > limits.fields_max:
            message = f"a request has at most {limits.fields_max} header fields in {limits.head_bytes} bytes"
            raise RefusedConnection("head_too_large", ApiError(431, message, code="head_too_large"))

    def _go_on_without_offer(self, rest: memoryview) -> None:
        """The parser stops at an offer to change the protocol: give it the same head without, and what came after."""
        method = self.parser.get_method()
        if not self._offers_upgrade or method == b"CONNECT":
            self._refuse(RefusedConnection("not_http", ApiError(400, "this is no proxy", code="not_http")))
            return
        head = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
        head += [b"%s: %s" % field for field in self.headers if field[0] not in _OFFER_FIELDS]
        self.parser = httptools.HttpRequestParser(self)
        self._begin_message()
        self._parse(memoryview(b"\r\n".join([*head, b"", b""])))
        self._parse(rest)

    # --- the parser's callbacks ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope[SCOPE_KEY] = self._door
        self._begin_message()

    def _begin_message(self) -> None:
        self.scope["preble.connection"] = self
        self._is_receiving, self._has_head, self._offers_upgrade = True, False, False
        self._head_bytes = self._fields = 0

    def on_url(self, url: bytes) -> None:
        """A part of the request's target."""
        self._loose_bytes = 0
        self._head_bytes += len(url)
        self._check_head()
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head, or of what comes after a chunked body, which nobody reads."""
        self._loose_bytes = 0
        self._fields += 1
        self._head_bytes += len(name) + len(value)
        self._check_head()
        if not self._has_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole: the request may be answered, and its body has to come."""
        self._loose_bytes = 0
        if self.parser.should_upgrade():
            self._offers_upgrade = True
            return
        if self._is_answering:
            raise RefusedConnection("pipelined")
        self._has_head = True
        self._begin_cycle()

    def _begin_cycle(self) -> None:
        """Let the request be answered, by a task of its own."""
        parser, scope = self.parser, self.scope
        version = parser.get_http_version()
        scope["method"] = parser.get_method().decode("ascii")
        if version != "1.1":
            scope["http_version"] = version
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"], scope["query_string"] = url.path, url.query or b""
        self.cycle: Any = RequestCycle(
            scope,
            self.transport,
            self.flow,
            self.on_response_complete,
            keep_alive=version != "1.0" and parser.should_keep_alive(),
            default_headers=self.server_state.default_headers,
            waits_to_be_asked=self.expect_100_continue,
        )
        self._start_asgi_task(self.cycle, self.app)

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._loose_bytes = 0
        if not self.cycle.response_complete:
            self.cycle.take(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._loose_bytes = 0
        if self._offers_upgrade:
            return
        self._is_receiving = False
        if self._is_answering:
            self.cycle.end_body()
        else:  # it was answered before it was whole
            self._wait_for_next()

    # --- the answer ---------------------------------------------------------------------------------------------------

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_next(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    @property
    def has_request(self) -> bool:
        """Whether the request that is being answered is here as a whole."""
        return not self.cycle.more_body

    def attend(self, on_gone: Callable[[], object] | None, on_read: Callable[[], object] | None = None) -> bool:
        """Call `on_gone` when the client goes away before its answer is whole, `on_read` when it has read after
        `RequestCycle.write` said False. Whether the whole request is here and the client too."""
        self._on_gone, self._on_read = on_gone, on_read
        self.flow.resume_reading()  # after a large body nothing is read, and who does not read sees nobody go
        return self.has_request and not self.cycle.disconnected

    def on_response_complete(self) -> None:
        """The answer is written. What is left of the request is thrown away, for a moment."""
        self._on_gone = self._on_read = None
        super().on_response_complete()
        if self.transport.is_closing():
            self._wait_until_read(self._limits.linger_seconds)
        elif self._is_receiving:
            self._unset_keepalive_if_required()
            if self._has_head:
                self._wait_for("slow_body", self._limits.linger_seconds)

    def timeout_keep_alive_handler(self) -> None:
        """No further request came."""
        super().timeout_keep_alive_handler()
        self._wait_until_read(self._limits.linger_seconds)

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        super().pause_writing()
        self._wait_until_read(self._limits.write_seconds)

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        if not (self._is_ending or self.transport.is_closing()):
            self._stop_unread()
        if self._on_read is not None:
            self._on_read()

    def _refuse(self, refused: RefusedConnection) -> None:
        """Read nothing more. Say what is wrong, unless an answer has begun, and hang up."""
        self._is_deaf = True
        self._stop_waiting()
        self._connections.refuse(refused.why, self._address)
        if refused.error is None:  # there is a request to be answered first
            self.cycle.keep_alive = False
            return
        if self._is_answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not (self._is_answering and self.cycle.response_started):
            self.transport.write(_answer(refused.error))
        self._hang_up()

    def _hang_up(self) -> None:
        """Write nothing more, and read until the client hangs up, too: where a connection is closed while bytes still
        come it is reset, and its client may not see the answer. One that is not counted is closed at once."""
        self._is_ending = True
        self._wait_until_read(self._limits.linger_seconds)
        if self._is_counted and self.transport.can_write_eof():
            self.flow.resume_reading()
            self.transport.write_eof()
        else:
            self.transport.close()

    # --- times --------------------------------------------------------------------------------------------------------

    def _wait_for(self, why: Why, seconds: float) -> None:
        self._stop_waiting()
        self._waiting_for = why
        self._waiting = self.loop.call_later(seconds, self._waited, seconds)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _waited(self, seconds: float) -> None:
        # It may be we who do not read; and between requests a blank line is no head, while one is answered.
        if self.flow.read_paused or (self._waiting_for == "slow_head" and self._is_answering):
            self._wait_for(self._waiting_for, seconds)
            return
        self._waiting = None
        if self._waiting_for == "slow_head" and (self._is_receiving or self._loose_bytes):
            message = f"the head of the request did not come in {seconds:g} s"
            self._refuse(RefusedConnection("slow_head", ApiError(408, message, code="timeout")))
            return
        self._connections.refuse(self._waiting_for, self._address)
        self.transport.abort()

    def _wait_until_read(self, seconds: float) -> None:
        self._stop_unread()
        self._unread = self.loop.call_later(seconds, self._look, seconds, self.transport.get_write_buffer_size())

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _look(self, seconds: float, before: int) -> None:
        """Cut the client off, unless it has taken some of the bytes that waited for it, and more of them wait."""
        self._unread = None
        left = self.transport.get_write_buffer_size()
        if 0 < left < before:
            self._wait_until_read(seconds)
            return
        if left or not self._is_ending:
            self._connections.refuse("unread", self._address)
        self.transport.abort()


def _notice_vanishing(connected: Any) -> None:
    """Let the kernel ask a silent client whether it is there, and give up one that takes nothing it is sent."""
    if connected is None or connected.family == socket.AF_UNIX:
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # systems differ
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# Asked after so many seconds of silence, then every so many, so often; bytes may go unconfirmed for so many ms.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
_PHRASES = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large",
            503: b"Service Unavailable"}  # fmt: skip


def _answer(error: ApiError) -> bytes:
    """An answer that needs no application, for a connection that ends with it."""
    body = msgspec.json.encode(error.body())
    head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n"
    fields = b"".join(b"%s: %s\r\n" % (name.encode(), value.encode()) for name, value in error.headers().items())
    return head % (error.status, _PHRASES[error.status], len(body)) + fields + b"\r\n" + body
