"""The HTTP client for answers that are passed on, against servers that write raw bytes: framing, bounds, back pressure,
kept connections, and servers that lie."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble.errors import InvalidConfig, InvalidInput, ProtocolError, TransportError
from preble.transport.engine_servers.http_client import Unreachable
from preble.transport.engine_servers.http_pool import Answer, HttpPool, PoolLimits, _Connection
from tests.support.transport import asynchronous, until

HEAD = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
Meet = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class RawServer:
    """A server that answers each request on a connection with what `answers` gives next, or as `meet` does."""

    def __init__(self, *answers: bytes, meet: Meet | None = None) -> None:
        self.answers, self.meet = list(answers), meet
        self.requests: list[bytes] = []
        self.connections = 0
        self.writers: set[asyncio.StreamWriter] = set()
        self.url = ""

    @contextlib.asynccontextmanager
    async def pool(self, **limits: Any) -> AsyncIterator[HttpPool]:
        """A pool of connections to it."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        pool = HttpPool(self.url, PoolLimits(**limits))
        try:
            yield pool
        finally:
            pool.close()
            await until(lambda: not pool.open, "its connections are closed")
            server.close()
            for writer in self.writers:
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            if self.meet is not None:
                await self.meet(reader, writer)
                return
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(2))
                answer = self.answers.pop(0)
                writer.write(answer.removesuffix(b"<close>"))
                await writer.drain()
                if answer.endswith(b"<close>"):
                    writer.close()
                    return


async def body_of(answer: Answer) -> bytes:
    """All of a body."""
    parts = []
    while part := await answer.read():
        parts.append(part)
    return b"".join(parts)


FRAMINGS = {
    "length": (OK + b"Content-Length: 3\r\n\r\nabc", True),
    "chunks": (OK + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n", True),
    "trailers": (OK + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx: y\r\n\r\n", True),
    "until closed": (OK + b"\r\nabc<close>", False),
    "closing": (OK + b"connection: close\r\ncontent-length: 3\r\n\r\nabc<close>", False),
    "wait": (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"content-length: 3\r\n\r\nabc", True),
}


@pytest.mark.parametrize(("data", "is_kept"), FRAMINGS.values(), ids=FRAMINGS)
@asynchronous
async def test_bodies_are_read_however_they_are_framed(data: bytes, is_kept: bool) -> None:
    server = RawServer(data, data)
    async with server.pool() as pool:
        for _ in range(2):
            answer = await pool.send(HEAD, b"{}")
            assert answer.status == 200 and await body_of(answer) == b"abc" and answer.is_whole
        assert server.requests == [HEAD + b"{}"] * 2
        assert server.connections == (1 if is_kept else 2) and pool.idle == (1 if is_kept else 0)


@given(parts=st.lists(st.binary(min_size=1, max_size=30), max_size=5), cuts=st.lists(st.integers(0, 400), max_size=8))
@settings(max_examples=30, deadline=None)
def test_however_bytes_arrive_the_body_is_the_same(parts: list[bytes], cuts: list[int]) -> None:
    data = OK + b"transfer-encoding: chunked\r\nx-a: b\r\n\r\n"
    data += b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        at = 0
        for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
            writer.write(data[at:cut])
            await writer.drain()
            await asyncio.sleep(0)
            at = cut
        await reader.read()

    @asynchronous
    async def story() -> None:
        async with RawServer(meet=meet).pool() as pool:
            answer = await pool.send(HEAD, b"{}")
            assert answer.headers == [(b"transfer-encoding", b"chunked"), (b"x-a", b"b")]
            assert await body_of(answer) == b"".join(parts)

    story()


BROKEN = {
    "nothing": (b"<close>", TransportError),
    "half a head": (OK[:9] + b"<close>", TransportError),
    "not HTTP": (b"SSH-2.0\r\n", ProtocolError),
    "a long field": (OK + b"x: " + b"y" * 70_000, ProtocolError),
    "many fields": (OK + b"x: y\r\n" * 202, ProtocolError),
    "two lengths": (OK + b"content-length: 1\r\ncontent-length: 2\r\n\r\n", ProtocolError),
    "a negative length": (OK + b"content-length: -1\r\n\r\n", ProtocolError),
    "another protocol": (b"HTTP/1.1 101 X\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", TransportError),
}


@pytest.mark.parametrize(("data", "error"), BROKEN.values(), ids=BROKEN)
@asynchronous
async def test_a_head_that_is_none_is_an_error(data: bytes, error: type[Exception]) -> None:
    server = RawServer(data + (b"" if data.endswith(b"<close>") else b"<close>"))
    async with server.pool() as pool:
        with pytest.raises(error):
            await pool.send(HEAD, b"{}")
        assert pool.idle == 0 and len(server.requests) == 1


LYING = {
    "too little": OK + b"content-length: 10\r\n\r\nabc<close>",
    "a chunk cut off": OK + b"transfer-encoding: chunked\r\n\r\n9\r\nabc<close>",
    "no last chunk": OK + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n<close>",
    "a chunk that is none": OK + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n<close>",
    "endless trailers": OK + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx: " + b"y" * 70_000 + b"<close>",
}


@pytest.mark.parametrize("data", LYING.values(), ids=LYING)
@asynchronous
async def test_a_body_that_is_not_whole_is_an_error_after_what_came(data: bytes) -> None:
    async with RawServer(data).pool() as pool:
        answer = await pool.send(HEAD, b"{}")
        got = b""
        with pytest.raises(TransportError):
            while part := await answer.read():
                got += part
        assert got in (b"abc", b"") and not answer.is_whole and pool.idle == 0


@asynchronous
async def test_bytes_beyond_an_answer_end_the_connection() -> None:
    doubled = OK + b"content-length: 1\r\n\r\na" + OK + b"content-length: 1\r\n\r\nb"
    server = RawServer(doubled, OK + b"content-length: 1\r\n\r\nc")
    async with server.pool() as pool:
        assert await body_of(await pool.send(HEAD, b"{}")) == b"a"
        assert await body_of(await pool.send(HEAD, b"{}")) == b"c"
        assert server.connections == 2


@asynchronous
async def test_a_kept_connection_that_was_just_closed_is_no_failure() -> None:
    served = asyncio.Event()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(2)
        writer.write(OK + b"content-length: 1\r\n\r\na")
        if not served.is_set():
            served.set()
            await reader.readuntil(b"\r\n\r\n")  # and hangs up without a byte
            writer.transport.abort()
        else:
            await reader.read()

    server = RawServer(meet=meet)
    async with server.pool() as pool:
        for _ in range(2):
            assert await body_of(await pool.send(HEAD, b"{}")) == b"a"
        assert server.connections == 2


@asynchronous
async def test_a_new_connection_that_is_closed_is_a_failure() -> None:
    server = RawServer(b"<close>", OK + b"content-length: 1\r\n\r\na")
    async with server.pool() as pool:
        with pytest.raises(TransportError, match="broke off"):
            await pool.send(HEAD, b"{}")
        assert len(server.requests) == 1


@asynchronous
async def test_who_cannot_be_reached_is_named_without_a_wait() -> None:
    async with RawServer().pool() as pool:
        nobody = HttpPool("http://127.0.0.1:1")
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1 cannot be reached: ConnectionRefusedError"):
            await nobody.send(HEAD, b"{}")
        pool.close()
        with pytest.raises(TransportError, match="were closed"):
            await pool.send(HEAD, b"{}")


@asynchronous
async def test_a_slow_reader_holds_the_server_back() -> None:
    sent = 0
    size = 32 << 20

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"content-length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(b"x" * 65_536)
            await writer.drain()
            sent += 65_536
        await reader.read()

    async with RawServer(meet=meet).pool(buffer_bytes=1 << 16) as pool:
        answer = await pool.send(HEAD, b"{}")
        await until(lambda: answer.is_paused, "the server is held back")
        assert answer._buffered < 4 << 20
        assert len(await body_of(answer)) == size


@asynchronous
async def test_a_sink_is_given_what_comes_and_may_hold_the_server_back() -> None:
    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"content-length: 6\r\n\r\nab")
        await go.wait()
        writer.write(b"cdef")
        await reader.read()

    go = asyncio.Event()
    got: list[bytes] = []

    def sink(part: bytes) -> bool:
        got.append(part)
        return False

    async with RawServer(meet=meet).pool() as pool:
        answer = await pool.send(HEAD, b"{}")
        await until(lambda: answer._parts, "a part is here")
        answer.flow(sink)
        assert got == [b"ab"] and answer.is_paused
        go.set()
        answer.go_on()
        await answer.flown()
        assert b"".join(got) == b"abcdef" and pool.idle == 1


@pytest.mark.parametrize("framing", ["length", "cut"])
@asynchronous
async def test_an_answer_that_has_flown_lets_go_of_its_sink(framing: str) -> None:
    """Who passes an answer on holds it, and its sink knows who: a request would be kept until a collection."""

    class Passing:
        answer: Answer

        def take(self, part: bytes) -> bool:
            return bool(part)

    data = FRAMINGS["length"][0] if framing == "length" else OK + b"content-length: 9\r\n\r\nabc<close>"
    async with RawServer(data).pool() as pool:
        passing = Passing()
        passing.answer = await pool.send(HEAD, b"{}")
        passing.answer.flow(passing.take)
        with contextlib.suppress(TransportError):
            await passing.answer.flown()
        kept = weakref.ref(passing)
        gc.disable()
        try:
            del passing
            assert kept() is None
        finally:
            gc.enable()


@asynchronous
async def test_an_answer_that_is_given_up_hangs_up() -> None:
    gone = asyncio.Event()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            if server.connections == 1:
                writer.write(OK + b"content-length: 9\r\n\r\nab")
            await reader.read()
        finally:
            gone.set()

    server = RawServer(meet=meet)
    async with server.pool() as pool:
        answer = await pool.send(HEAD, b"{}")
        answer.close()
        answer.close()
        await gone.wait()
        gone.clear()
        asking = asyncio.ensure_future(pool.send(HEAD, b"{}"))
        await until(lambda: server.connections == 2, "it is connected")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await gone.wait()


@asynchronous
async def test_who_waits_for_a_head_may_be_broken_off_for_good() -> None:
    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    server = RawServer(meet=meet)
    async with server.pool() as pool:
        with pytest.raises(TransportError, match="enough"):
            await pool.send(HEAD, b"{}", on_sent=lambda answer: answer.break_off(TransportError("enough")))
        assert server.connections <= 1


@asynchronous
async def test_idle_connections_are_few_and_not_kept_for_long() -> None:
    answer = OK + b"content-length: 1\r\n\r\na"
    server = RawServer(*[answer] * 3)
    async with server.pool(idle_max=2, idle_seconds=0.2) as pool:
        answers = await asyncio.gather(*(pool.send(HEAD, b"{}") for _ in range(3)))
        assert [await body_of(one) for one in answers] == [b"a"] * 3
        assert pool.idle <= 2
        await until(lambda: not pool.open, "they are closed")
        assert pool.idle == 0


@pytest.mark.parametrize("url", ["127.0.0.1:1", "ftp://a", "http://"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput):
        HttpPool(url)


def test_limits_are_positive() -> None:
    with pytest.raises(InvalidConfig, match="idle_max"):
        PoolLimits(idle_max=0)


class Cut:
    """A transport to a server whose bytes the test hands over."""

    def write(self, data: bytes) -> None:
        """A request, which nobody reads."""

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        raise AssertionError("the connection was cut off")

    close = abort


CHUNKS = (b"data: 1\r\n\r\n", b"5\r\n", b"\r\n0\r\n\r\n", b"z" * 17, b"end")
HEAD_OF_CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_chunks_that_are_cut_anywhere_make_the_same_body() -> None:
    """Whole chunks are taken past the parser; what looks like one, within another or across reads, must not be."""
    framed = [b"%X\r\n%b\r\n" % (len(one), one) for one in CHUNKS]
    sent = b"".join([*framed, b"0\r\n\r\n"])

    async def run() -> None:
        pool = HttpPool("http://127.0.0.1:1")
        for first in range(len(sent) + 1):
            for second in range(first, len(sent) + 1):
                connection = _Connection(pool, asyncio.get_running_loop())
                connection.connection_made(Cut())
                for _ in range(2):  # the second answer finds the parser as the first has left it
                    answer = connection.begin(b"", b"")
                    for part in (HEAD_OF_CHUNKS, sent[:first], sent[first:second], sent[second:]):
                        if part:
                            connection.data_received(part)
                    assert answer.is_whole
                    assert await answer.read() == b"".join(CHUNKS)
                pool._idle.clear()  # more than it would keep
                pool.forget(connection)
        pool.close()

    asyncio.run(run())
