"""Reading a plain ZeroMQ socket on an asyncio loop: nothing is overlooked, whatever else is done with the socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import zmq

from preble.transport.server import Waker
from preble.transport.socket_reader import FrameReader
from tests.support.transport import HANG_SECONDS, asynchronous, until

Pair = tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two connected sockets, over TCP: in one process there is no I/O thread to be late."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ours, theirs = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    port = ours.bind_to_random_port("tcp://127.0.0.1")
    theirs.connect(f"tcp://127.0.0.1:{port}")
    yield ours, theirs
    context.destroy(linger=0)


@asynchronous
async def test_messages_come_whole_and_in_order_those_from_before_too(pair: Pair) -> None:
    ours, theirs = pair
    theirs.send_multipart([b"first", b"two parts"])
    assert ours.poll(1000 * HANG_SECONDS)  # so that it is there before the reader is
    got: list[list[bytes]] = []
    reader = FrameReader(ours, lambda parts: got.append(parts) or "")
    for number in range(500):  # several turns
        theirs.send(b"%d" % number)
    await until(lambda: len(got) == 501, "all have come")
    assert got == [[b"first", b"two parts"], *([b"%d" % number] for number in range(500))]
    reader.stop()


@asynchronous
async def test_what_a_send_hides_is_found_by_looking(pair: Pair) -> None:
    ours, theirs = pair
    got: list[list[bytes]] = []
    reader = FrameReader(ours, lambda parts: got.append(parts) or "")
    await asyncio.sleep(0)  # its first look is over
    for number in range(200):
        theirs.send(b"in")
        assert ours.poll(1000 * HANG_SECONDS), "it is there, and the descriptor has been asked about it"
        ours.send(b"out", zmq.NOBLOCK)
        reader.look()
        await until(lambda n=number: len(got) == n + 1, "the message was found")
    reader.stop()


@asynchronous
async def test_a_reason_ends_it_and_what_follows_is_left_in_the_socket(pair: Pair) -> None:
    ours, theirs = pair
    reader = FrameReader(ours, lambda parts: "enough" if parts == [b"stop"] else "")
    for frame in (b"go", b"stop", b"later"):
        theirs.send(frame)
    assert await reader.ended == "enough"
    reader.look()
    await asyncio.sleep(0)
    assert ours.poll(1000 * HANG_SECONDS) and ours.recv() == b"later"


@asynchronous
async def test_an_error_ends_it_and_is_passed_on(pair: Pair) -> None:
    ours, theirs = pair

    def take(parts: list[bytes]) -> str:
        raise KeyError("what the owner thinks of it")

    reader = FrameReader(ours, take)
    theirs.send(b"x")
    with pytest.raises(KeyError, match="thinks"):
        await reader.ended


@asynchronous
async def test_a_stopped_reader_takes_nothing_more(pair: Pair) -> None:
    ours, theirs = pair
    got: list[list[bytes]] = []
    reader = FrameReader(ours, lambda parts: got.append(parts) or "")
    reader.stop()
    reader.stop()
    theirs.send(b"x")
    assert ours.poll(1000 * HANG_SECONDS)
    await asyncio.sleep(0)
    assert not got and reader.ended.cancelled()


@asynchronous
async def test_others_get_their_turn_while_messages_keep_coming(pair: Pair) -> None:
    ours, theirs = pair
    taken = 0

    def take(parts: list[bytes]) -> str:
        nonlocal taken
        taken += 1
        theirs.send(b"another")  # there is always one more
        return ""

    reader = FrameReader(ours, take)
    theirs.send(b"x")
    await until(lambda: taken > 1000, "it has read for several turns, and we are asked in between")
    reader.stop()


def test_wake_ups_do_not_add_up_and_never_block() -> None:
    waker = Waker()
    poller = zmq.Poller()
    poller.register(waker.descriptor, zmq.POLLIN)
    assert not poller.poll(0)
    for _ in range(200_000):  # more than a pipe holds
        waker.wake()
    assert poller.poll(0)
    for _ in range(100):
        waker.clear()
    assert not poller.poll(0)
    waker.close()
    with pytest.raises(OSError):
        waker.wake()
