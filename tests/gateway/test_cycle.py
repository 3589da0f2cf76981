"""The two doors of a request: ASGI's messages and the direct calls give the same bytes, and the same refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl

from preble.gateway.cycle import RequestCycle


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False
        self.reads = True

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


class Case:
    """A request, and what was made of it."""

    def __init__(self, *, method: str = "POST", keep_alive: bool = True, waits: bool = False) -> None:
        self.wire, self.completed = Wire(), 0
        self.flow = FlowControl(self.wire)  # type: ignore[arg-type]
        self.cycle = RequestCycle(
            {"method": method}, self.wire, self.flow, self._complete,
            keep_alive=keep_alive, default_headers=[(b"date", b"today")], waits_to_be_asked=waits,
        )  # fmt: skip

    def _complete(self) -> None:
        self.completed += 1

    def asked(self, body: bytes) -> Case:
        self.cycle.take(body)
        self.cycle.end_body()
        return self

    def seen(self) -> tuple[bytes, bool, int]:
        return self.wire.written, self.wire.closed, self.completed


async def by_asgi(case: Case, status: int, headers: list[tuple[bytes, bytes]], parts: list[bytes]) -> None:
    """Answer with messages."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for part in parts[:-1]:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": parts[-1]})

    await case.cycle.run_asgi(app)


async def directly(case: Case, status: int, headers: list[tuple[bytes, bytes]], parts: list[bytes]) -> None:
    """Answer by calls."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        case.cycle.start(status, headers)
        for part in parts[:-1]:
            case.cycle.write_part(part)
        case.cycle.write(parts[-1], more=False)

    await case.cycle.run_asgi(app)


HEAD = b"HTTP/1.1 200 OK\r\ndate: today\r\n"
WHOLE = [(b"Content-Length", b"4")]
TABLE: dict[str, tuple[dict[str, Any], int, list[tuple[bytes, bytes]], list[bytes], bytes, bool]] = {
    "whole": ({}, 200, WHOLE, [b"ab", b"cd"], HEAD + b"content-length: 4\r\n\r\nabcd", False),
    "chunked": (
        {}, 200, [], [b"ab", b"", b"cd", b""],
        HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n2\r\ncd\r\n0\r\n\r\n", False,
    ),
    "head": ({"method": "HEAD"}, 200, WHOLE, [b"abcd"], HEAD + b"content-length: 4\r\n\r\n", False),
    "no content": ({}, 204, [], [b""], b"HTTP/1.1 204 No Content\r\ndate: today\r\n\r\n", False),
    "client closes": (
        {"keep_alive": False}, 200, WHOLE, [b"abcd"],
        HEAD + b"content-length: 4\r\nconnection: close\r\n\r\nabcd", True,
    ),
    "we close": (
        {}, 200, [*WHOLE, (b"connection", b"close")], [b"abcd"],
        HEAD + b"content-length: 4\r\nconnection: close\r\n\r\nabcd", True,
    ),
    "nameless status": (
        {}, 599, WHOLE, [b"abcd"], b"HTTP/1.1 599 \r\ndate: today\r\ncontent-length: 4\r\n\r\nabcd", False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("door", [by_asgi, directly])
@pytest.mark.parametrize("name", TABLE)
def test_both_doors_give_the_same_bytes(name: str, door: Callable[..., Any]) -> None:
    given, status, headers, parts, written, closed = TABLE[name]
    case = Case(**given)
    asyncio.run(door(case, status, headers, parts))
    assert case.seen() == (written, closed, 1)


WRONG: dict[str, tuple[list[tuple[bytes, bytes]], list[bytes]]] = {
    "a value that ends its line": ([*WHOLE, (b"x", b"1\r\nset-cookie: 2")], [b"abcd"]),
    "a name that is none": ([*WHOLE, (b"x:y", b"1")], [b"abcd"]),
}


@pytest.mark.parametrize("door", [by_asgi, directly])
@pytest.mark.parametrize("name", WRONG)
def test_a_field_that_is_none_never_gets_out(name: str, door: Callable[..., Any]) -> None:
    case = Case()
    asyncio.run(door(case, 200, *WRONG[name]))
    assert case.wire.written.startswith(b"HTTP/1.1 500 ")
    assert b"cookie" not in case.wire.written
    assert case.wire.closed


@pytest.mark.parametrize("door", [by_asgi, directly])
@pytest.mark.parametrize("parts", [[b"abc"], [b"ab", b"cde"]])
def test_a_body_of_another_length_than_was_said_ends_the_connection(
    parts: list[bytes], door: Callable[..., Any]
) -> None:
    case = Case()
    asyncio.run(door(case, 200, WHOLE, parts))
    assert case.wire.closed
    assert not case.cycle.response_complete


def test_what_is_left_unanswered_is_answered_with_500() -> None:
    case = Case()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        return

    asyncio.run(case.cycle.run_asgi(app))
    assert case.wire.written.startswith(b"HTTP/1.1 500 Internal Server Error\r\n")
    assert case.wire.closed


@pytest.mark.parametrize("parts", [[b""], [b"abc"], [b"a" * 70_000, b"b"]])
def test_a_body_is_the_same_through_both_doors(parts: list[bytes]) -> None:
    whole, read = Case(), Case()
    for case in (whole, read):
        for part in parts:
            case.cycle.take(part)
        case.cycle.end_body()
    message = asyncio.run(read.cycle.receive())
    assert message == {"type": "http.request", "body": whole.cycle.whole_body(), "more_body": False}
    assert whole.cycle.whole_body() == b""  # it is handed over once


def test_a_body_that_is_not_whole_is_not_handed_over() -> None:
    case = Case()
    case.cycle.take(b"a" * (HIGH_WATER_LIMIT + 1))
    assert case.cycle.whole_body() is None
    assert not case.wire.reads
    assert asyncio.run(case.cycle.receive())["more_body"]
    assert case.wire.reads


def test_a_client_that_waits_to_be_asked_is_asked_when_the_body_is_read() -> None:
    case = Case(waits=True).asked(b"abc")
    assert case.cycle.whole_body() is None
    assert case.wire.written == b""
    assert asyncio.run(case.cycle.receive())["body"] == b"abc"
    assert case.wire.written == b"HTTP/1.1 100 Continue\r\n\r\n"


def test_after_the_body_the_only_news_is_that_the_client_has_gone() -> None:
    async def run() -> None:
        case = Case().asked(b"abc")
        assert (await case.cycle.receive())["type"] == "http.request"
        waiting = asyncio.ensure_future(case.cycle.receive())
        await asyncio.sleep(0)
        assert not waiting.done()
        case.cycle.disconnected = True
        case.cycle.message_event.set()
        assert (await waiting) == {"type": "http.disconnect"}
        case.cycle.start(200, WHOLE)
        assert case.cycle.write(b"abcd", more=False)
        assert case.seen() == (b"", False, 0)

    asyncio.run(run())


def test_a_slow_reader_is_waited_for() -> None:
    async def run() -> None:
        case = Case().asked(b"")
        case.cycle.start(200, [])
        case.flow.pause_writing()
        assert not case.cycle.write_part(b"abc")
        sending = asyncio.ensure_future(case.cycle.send({"type": "http.response.body", "body": b"de"}))
        await asyncio.sleep(0)
        assert not sending.done()
        case.flow.resume_writing()
        await sending
        assert case.cycle.response_complete
        written = case.wire.written
        assert case.cycle.write_part(b"late")  # it was given another end
        assert case.wire.written == written

    asyncio.run(run())
