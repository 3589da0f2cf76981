"""The turns in which requests are placed: what need not wait is answered first, and who is given up leaves nothing."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

from preble.gateway.picker.hpack import encoded
from preble.gateway.picker.http2 import PREFACE
from preble.gateway.picker.messages import SERVICE, ProcessingResponse
from preble.gateway.picker.turns import PlacingTurns
from tests.gateway.picker.test_http2 import DATA, HEADERS, RST, SETTINGS, Transport, frame
from tests.gateway.picker.test_parts import PLAIN
from tests.support.picker import STREAMED, Plane, body, named, picking, request_headers, response_headers
from tests.support.relay import ScriptedServer
from tests.support.transport import asynchronous

PROCESS = encoded(((b":method", b"POST"), (b":path", f"/{SERVICE}/Process".encode()), (b"te", b"trailers")))


class Taker:
    """Notes its turn, and may fail at it."""

    def __init__(self, name: str, noted: list[str], *, fails: bool = False) -> None:
        self._name, self._noted, self._fails = name, noted, fails

    def on_turn(self) -> None:
        self._noted.append(self._name)
        if self._fails:
            raise ValueError(self._name)


@asynchronous
async def test_each_has_a_turn_of_the_loop_to_itself_in_the_order_in_which_they_came() -> None:
    noted: list[str] = []
    turns = PlacingTurns()
    for name in "abc":
        turns.add(Taker(name, noted))
    turn = 0
    while len(noted) < 3:
        await asyncio.sleep(0)
        turn += 1
        noted_then = len(noted)
        assert noted_then <= turn and len(turns) == 3 - noted_then
    assert noted == ["a", "b", "c"]
    turns.add(Taker("d", noted))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert noted[-1] == "d"


@asynchronous
async def test_one_that_fails_ends_nobody_elses_turn() -> None:
    noted: list[str] = []
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    turns = PlacingTurns()
    turns.add(Taker("a", noted, fails=True))
    turns.add(Taker("b", noted))
    while len(turns):
        await asyncio.sleep(0)
    assert noted == ["a", "b"] and [str(error) for error in errors] == ["a"]


@asynchronous
async def test_who_is_given_up_takes_no_place() -> None:
    noted: list[str] = []
    turns = PlacingTurns()
    last = Taker("last", noted)
    for number in range(10_000):
        taker = Taker(str(number), noted)
        turns.add(taker)
        turns.give_up(taker)
        turns.give_up(taker)
        assert len(turns) == 0
    turns.add(last)
    while len(turns):
        await asyncio.sleep(0)
    assert noted == ["last"]


def said(number: int, *messages: Any) -> bytes:
    """gRPC messages of one stream, each in a frame."""
    texts = [message.SerializeToString() for message in messages]
    return b"".join(frame(DATA, 0, number, b"\0" + struct.pack(">I", len(text)) + text) for text in texts)


class Line:
    """A connection to a picker, without a network."""

    def __init__(self, plane: Plane) -> None:
        self.transport = Transport()
        self.connection: Any = plane.serving.connection()
        self.connection.connection_made(self.transport)
        self.answers(PREFACE + frame(SETTINGS, 0, 0))

    def answers(self, lot: bytes) -> list[tuple[int, Any]]:
        """What is answered at once to what comes at once: streams and messages."""
        self.connection.data_received(lot)
        return self.latest()

    def latest(self) -> list[tuple[int, Any]]:
        """What was answered since."""
        found = []
        for kind, _, number, payload in self.transport.take():
            while kind == DATA and payload:
                size = int.from_bytes(payload[1:5], "big")
                found.append((number, ProcessingResponse.FromString(payload[5 : 5 + size])))
                payload = payload[5 + size :]
        return found

    async def next(self) -> list[tuple[int, Any]]:
        """The next answers."""
        while not self.transport.written:
            await asyncio.sleep(0)
        return self.latest()


def asked(number: int) -> bytes:
    """A request with all of its body."""
    return frame(HEADERS, 0x4, number, PROCESS) + said(number, request_headers(), body(STREAMED))


@asynchronous
async def test_what_need_not_wait_is_answered_before_requests_are_placed_and_those_one_by_one() -> None:
    async with picking(ScriptedServer()) as plane:
        line = Line(plane)
        assert line.answers(asked(1)) == []
        assert [number for number, _ in await line.next()] == [1, 1]
        part = body(PLAIN, end=False, of="response")
        line.answers(said(1, response_headers(content_type="text/event-stream"), part))
        at_once = line.answers(asked(3) + asked(5) + said(1, part))
        assert [(number, answer.WhichOneof("one")) for number, answer in at_once] == [(1, "response_body")]
        assert len(plane.picker.turns) == 2
        for number in (3, 5):
            answers = await line.next()
            assert {one for one, _ in answers} == {number} and named(answers[0][1]) == plane.servers[0].worker
        line.connection.connection_lost(None)
        await plane.settled()


@asynchronous
async def test_a_request_that_is_given_up_before_its_turn_is_never_placed() -> None:
    async with picking(ScriptedServer()) as plane:
        line = Line(plane)
        for number in range(1, 201, 2):
            reset = frame(RST, 0, number, (8).to_bytes(4, "big"))
            assert line.answers(asked(number) + said(number, body(b"x")) + reset) == []
            assert len(plane.picker.turns) == 0
        line.answers(asked(301) + asked(303))
        line.connection.connection_lost(None)
        assert len(plane.picker.turns) == 0
        await asyncio.sleep(0)
        await plane.settled()
        assert plane.gateway.router.counters.requests == 0
