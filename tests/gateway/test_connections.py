"""Connections of the gateway with raw bytes: heads and trailers without end, clients that send or read nothing, offers
of other protocols. The times are arguments; what is waited for is the other side's hanging up.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.transport import asynchronous

uvicorn = pytest.importorskip("uvicorn", reason="needs uvicorn: pip install 'preble[gateway]'")
from uvicorn.server import ServerState  # noqa: E402

from preble.gateway.connections import FEED_BYTES, BoundedProtocol, ConnectionLimits, Connections  # noqa: E402

SHORT = 0.05
GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: a\r\n"
PATIENT = ConnectionLimits()


@dataclass
class Front:
    """A server with an application that answers with what it was sent."""

    limits: ConnectionLimits
    connections: Connections = field(init=False)
    refused: Counter[str] = field(default_factory=Counter)
    protocols: list[Any] = field(default_factory=list)
    answer_bytes: int = 0
    reads: bool = True
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0

    def __post_init__(self) -> None:
        self.connections = Connections(self.limits, lambda why: self.refused.update([why]))
        self.may_answer.set()

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """The application."""
        body, more = b"", self.reads
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone.set()
                return
            body, more = body + message["body"], message["more_body"]
        if not self.may_answer.is_set():
            answering = asyncio.ensure_future(self.may_answer.wait())
            gone = asyncio.ensure_future(receive())
            await asyncio.wait([answering, gone], return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                self.gone.set()
            for task in (answering, gone):
                task.cancel()
        body = b"x" * self.answer_bytes or body
        head = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": body})

    async def connect(self, *sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection, and what is sent first."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        for part in sent:
            writer.write(part)
        return reader, writer

    async def said(self, *sent: bytes) -> bytes:
        """All that comes back until the connection is closed."""
        reader, writer = await self.connect(*sent)
        answer = await read_to_end(reader)
        writer.close()
        return answer


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    """What came before the other side hung up, in whatever way."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(1 << 16):
            found += part
    return found


@contextlib.asynccontextmanager
async def front(limits: ConnectionLimits = PATIENT, **given: Any) -> AsyncIterator[Front]:
    """A server; at the end all that was counted must be given back."""
    one = Front(limits, **given)
    config = uvicorn.Config(
        one.app, interface="asgi3", lifespan="off", ws="none", log_config=None, access_log=False, timeout_keep_alive=600
    )
    config.load()
    state = ServerState()

    def protocol() -> BoundedProtocol:
        made = BoundedProtocol(one.connections, config=config, server_state=state, app_state={})
        one.protocols.append(made)
        return made

    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    one.port = server.sockets[0].getsockname()[1]
    yield one
    server.close()
    for made in one.protocols:
        made.transport.abort()
    while one.connections.open:
        await asyncio.sleep(0)
    assert not one.connections._of_address


async def flood(front: Front, first: bytes, part: bytes) -> bytes:
    """Send `first`, then `part` until the server hangs up; what it said."""
    reader, writer = await front.connect(first)
    answer = asyncio.ensure_future(read_to_end(reader))
    with contextlib.suppress(ConnectionError):
        while not answer.done():
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
    writer.close()
    return await answer


# --- heads and trailers -----------------------------------------------------------------------------------------------


CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("first", "part"),
    [
        (b"GET / HTTP/1.1\r\nhost: ", b"a" * 5000),
        (b"GET / HTTP/1.1\r\n", b"a" * 5000),
        (b"GET / HTTP/1.1\r\n", b"x-a: b\r\n" * 9),
        (b"GET /", b"a" * 5000),
        (b"", b"\r\n" * 2500),
        (CHUNKED + b"0\r\n", b"x-a: b\r\n" * 9),
        (CHUNKED + b"0\r\nx-a: ", b"a" * 5000),
        (CHUNKED + b"0\r\n", b"a" * 5000),
        (CHUNKED + b"1;a=", b"a" * 5000),
        (CHUNKED + b"1\r\nz\r\n0\r\nx-b: c\r\n", b"x-a: b\r\n" * 9),
    ],
)
@asynchronous
async def test_endless_heads_and_trailers_are_refused_at_a_bound(first: bytes, part: bytes) -> None:
    async with front() as one:
        answer = await flood(one, first, part)
        assert answer.startswith(b"HTTP/1.1 431 "), answer[:80]
        assert one.refused == {"head_too_large": 1}
        made = one.protocols[0]
        held = sum(len(name) + len(value) for name, value in made.headers or ())
        assert held <= PATIENT.head_bytes + FEED_BYTES and len(made.headers or ()) <= PATIENT.fields_max + 1


@asynchronous
async def test_who_goes_on_sending_reads_the_answer_all_the_same() -> None:
    """A connection that is closed while bytes still come is reset, and its client may see that and no answer."""
    async with front() as one:
        reader, writer = await one.connect(b"GET / HTTP/1.1\r\nhost: ", b"a" * 40_000)
        while not one.refused:
            await asyncio.sleep(0)
        for _ in range(4):
            writer.write(b"a" * 5000)
            await writer.drain()
            await asyncio.sleep(0.001)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ") and b"head_too_large" in await reader.read()
        assert one.connections.open == 1
        writer.close()
        while one.connections.open:
            await asyncio.sleep(0)
        assert one.refused == {"head_too_large": 1}


@asynchronous
async def test_who_does_not_hang_up_after_such_an_answer_is_cut_off() -> None:
    async with front(ConnectionLimits(linger_seconds=SHORT)) as one:
        reader, writer = await one.connect(b"\x16\x03\x01\x02\x00\x01\x00")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        while one.connections.open:
            await asyncio.sleep(0.01)
        assert one.refused == {"not_http": 1}
        writer.close()


@asynchronous
async def test_what_is_within_the_bounds_is_answered_in_any_pieces() -> None:
    head = POST + b"".join(b"x-%d: %s\r\n" % (i, b"v" * 200) for i in range(90)) + b"content-length: 90000\r\n\r\n"
    async with front() as one:
        reader, writer = await one.connect()
        for size in (1 << 20, 777, 13):
            whole = head + b"b" * 90_000
            for start in range(0, len(whole), size):
                writer.write(whole[start : start + size])
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(90_000) == b"b" * 90_000
        chunks = b"".join(b"1\r\n%c\r\n" % letter for letter in b"chunk") + b"0\r\nx-trailer: t\r\n\r\n"
        writer.write(CHUNKED + chunks)
        assert (await reader.readuntil(b"chunk")).startswith(b"HTTP/1.1 200 ")
        assert not one.refused
        writer.close()


@asynchronous
async def test_what_is_no_http_is_answered_in_json() -> None:
    async with front() as one:
        answer = await one.said(b"\x16\x03\x01\x02\x00\x01\x00")
        assert answer.startswith(b"HTTP/1.1 400 ") and b'"code":"not_http"' in answer
        assert (await one.said(b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


# --- slow clients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"GET", b"GET / HTTP/1.1\r\nhost: a\r\nx"])
@asynchronous
async def test_a_head_that_does_not_come_ends_the_connection(sent: bytes) -> None:
    async with front(ConnectionLimits(head_seconds=SHORT)) as one:
        answer = await one.said(sent)
        assert answer.startswith(b"HTTP/1.1 408 ") if sent else not answer
        assert one.refused == {"slow_head": 1}


@asynchronous
async def test_the_second_head_of_a_connection_has_to_come_too() -> None:
    async with front(ConnectionLimits(head_seconds=SHORT)) as one:
        assert b"HTTP/1.1 408 " in await one.said(GET + b"GET / HT")


@pytest.mark.parametrize("reads", [True, False])
@asynchronous
async def test_a_body_that_does_not_come_ends_the_connection(reads: bool) -> None:
    limits = ConnectionLimits(body_seconds=SHORT, linger_seconds=SHORT)
    async with front(limits, reads=reads) as one:
        answer = await one.said(POST + b"content-length: 100\r\n\r\n", b"abc")
        assert answer.startswith(b"HTTP/1.1 200 ") is not reads
        assert one.refused == {"slow_body": 1}
        assert one.gone.is_set() is reads


@asynchronous
async def test_the_rest_of_a_body_that_was_answered_is_read_and_the_next_request_is_too() -> None:
    async with front(reads=False) as one:
        reader, writer = await one.connect(POST + b"content-length: 100000\r\n\r\n", b"a" * 50_000)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"a" * 50_000 + GET)
        await reader.readuntil(b"\r\n\r\n")
        assert one.protocols[0].timeout_keep_alive_task is not None, "it waits for the next one, not for ever"
        writer.close()


@asynchronous
async def test_a_client_that_reads_nothing_is_cut_off() -> None:
    async with front(ConnectionLimits(write_seconds=SHORT), answer_bytes=32 << 20) as one:
        reader, writer = await one.connect(GET)
        while not one.refused["unread"]:
            await asyncio.sleep(0.01)
        assert len(await read_to_end(reader)) < 32 << 20
        writer.close()


@asynchronous
async def test_a_client_that_asked_to_close_and_reads_nothing_is_cut_off() -> None:
    limits = ConnectionLimits(linger_seconds=SHORT)
    async with front(limits, answer_bytes=32 << 20) as one:
        _, writer = await one.connect(b"GET / HTTP/1.0\r\n\r\n")
        while one.connections.open or not one.protocols:
            await asyncio.sleep(0.01)
        assert one.refused == {"unread": 1}
        writer.close()


class Hours:
    """A loop whose time goes on by hand, and a transport whose bytes wait as the test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Any]] = []
        self.waiting_bytes = 0
        self.closed = self.aborted = False

    def call_later(self, seconds: float, what: Any, *given: Any) -> asyncio.Handle:
        handle = asyncio.Handle(what, given, asyncio.get_running_loop())
        self.timers.append((self.now + seconds, handle))
        return handle

    def go_on(self, seconds: float) -> None:
        self.now += seconds
        due = [handle for at, handle in self.timers if at <= self.now and not handle.cancelled()]
        self.timers = [(at, handle) for at, handle in self.timers if at > self.now]
        for handle in due:
            handle._run()

    def get_write_buffer_size(self) -> int:
        return self.waiting_bytes

    def get_extra_info(self, name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize("ends", [False, True], ids=["write_seconds", "linger_seconds"])
@asynchronous
async def test_a_client_that_reads_slowly_is_cut_off_when_it_reads_no_more(ends: bool) -> None:
    hours: Any = Hours()
    refused: list[str] = []
    limits = ConnectionLimits(write_seconds=30.0, linger_seconds=30.0)
    connections = Connections(limits, refused.append)
    config = uvicorn.Config(Front(limits).app, interface="asgi3", lifespan="off", ws="none", log_config=None)
    config.load()
    protocol = BoundedProtocol(connections, config=config, server_state=ServerState(), app_state={}, _loop=hours)
    protocol.connection_made(hours)
    hours.waiting_bytes = 100_000
    if ends:
        hours.closed = True
        protocol.on_response_complete()
    else:
        protocol.pause_writing()
    protocol._stop_waiting()
    for _ in range(50):
        hours.waiting_bytes -= 100
        hours.go_on(30.0)
        assert not hours.aborted and not refused
    hours.go_on(30.0)
    assert hours.aborted and refused == ["unread"]
    protocol.connection_lost(ConnectionResetError())


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has these")
@asynchronous
async def test_the_kernel_asks_after_clients_that_are_silent() -> None:
    async with front() as one:
        _, writer = await one.connect()
        while not one.protocols:
            await asyncio.sleep(0)
        connected = one.protocols[0].transport.get_extra_info("socket")
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
        writer.close()


# --- how many ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limits", "why"), [((2, 9), "many"), ((9, 2), "many_of_address")])
@asynchronous
async def test_connections_beyond_the_bound_are_refused_until_one_ends(limits: tuple[int, int], why: str) -> None:
    async with front(ConnectionLimits(*limits)) as one:
        first, second = [await one.connect() for _ in range(2)]
        while one.connections.open < 2:
            await asyncio.sleep(0)
        answer = await one.said()
        assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1\r\n" in answer
        assert one.refused == {why: 1}
        first[1].close()
        while one.connections.open > 1:
            await asyncio.sleep(0)
        third = await one.connect(GET)
        assert (await third[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        for _, writer in (second, third):
            writer.close()


# --- offers and pipelines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 60, 10_000])
@asynchronous
async def test_a_request_that_offers_another_protocol_keeps_its_body(size: int) -> None:
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    request = POST + offer + b"content-length: 5\r\n\r\nhello"
    async with front() as one:
        reader, writer = await one.connect()
        for _ in range(2):
            for start in range(0, len(request), size):
                writer.write(request[start : start + size])
                await writer.drain()
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200 ")
        writer.close()


@asynchronous
async def test_a_request_that_comes_before_the_answer_is_not_read_and_the_client_may_still_leave() -> None:
    async with front() as one:
        one.may_answer.clear()
        reader, writer = await one.connect(POST + b"content-length: 5\r\n\r\nfirst" + GET * 500)
        while not one.refused:
            await asyncio.sleep(0)
        one.may_answer.set()
        answer = await read_to_end(reader)
        assert answer.count(b"HTTP/1.1") == 1 and answer.endswith(b"first")
        writer.close()

        one.may_answer.clear()
        _, writer = await one.connect(GET * 500)
        while one.refused["pipelined"] < 2:
            await asyncio.sleep(0)
        writer.close()
        await one.gone.wait()
