"""Messages of a ZeroMQ socket on an asyncio loop, each handed to a function as it comes. Owns that loop's reader, the
cheapest calls of a plain socket, and the options that all sockets have.

ZeroMQ's file descriptor does not say "there are messages" but "something has changed since you last asked", and asking,
sending or setting an option counts as asking. So after it becomes readable everything is read, and whoever sends on the
same socket must call `look` afterwards. pyzmq's asyncio sockets do the same with a future for every message; for a path
where each token is a message that is half of the router's work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import zmq
from zmq.backend import zmq_poll

# As plain ints: pyzmq's are enumerations, whose arithmetic costs more than the call. So does an option that is asked
# for by number, which is looked up in several; `zmq_poll` and `Frame.more` look nothing up.
POLLIN = int(zmq.POLLIN)
NOBLOCK, MORE_NOBLOCK = int(zmq.NOBLOCK), int(zmq.SNDMORE) | int(zmq.NOBLOCK)
RECEIVE_QUEUE_MESSAGES = 128  # of one peer that ZeroMQ keeps for us; what is beyond waits at the peer
_FRAMES_PER_TURN = 128  # messages taken before other tasks of the loop get a turn


def is_inproc(endpoint: str) -> bool:
    """Whether both its ends are in this process: no I/O thread stands between them, and nobody else reaches it."""
    return endpoint.startswith("inproc://")


def context_of(endpoint: str) -> zmq.Context[zmq.Socket[bytes]] | None:
    """The context that both ends of an `inproc://` endpoint must share, the process's own; None for any other."""
    return zmq.Context.instance() if is_inproc(endpoint) else None


def set_usual_options(socket: zmq.Socket[Any], endpoint: str) -> None:
    """What all our sockets have; `endpoint` is where this one will be connected or bound."""
    socket.linger = 0
    socket.tcp_keepalive = 1
    socket.ipv6 = "[" in endpoint


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether there is one to receive; counts as asking for what its descriptor says."""
    return bool(zmq_poll([(socket, POLLIN)], 0))


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    """The parts of a message. Raises `zmq.Again` where there is none."""
    part = socket.recv(NOBLOCK, False)
    parts = [part.bytes]
    while part.more:
        part = socket.recv(NOBLOCK, False)
        parts.append(part.bytes)
    return parts


class FrameReader:
    """Calls `take(parts)` for each message until it returns a reason to stop (not ""), which `ended` then holds.

    An exception out of `take` or the socket ends it, too, and is `ended`'s. Starts at once; needs a running loop.
    """

    def __init__(self, socket: zmq.Socket[bytes], take: Callable[[list[bytes]], str]) -> None:
        self._socket = socket
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.fileno()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._loop.add_reader(self._descriptor, self._read)
        self._loop.call_soon(self._read)  # what has come before is no change

    def look(self) -> None:
        """Read soon what a send may have hidden. No effect once it has ended."""
        if not self.ended.done() and has_message(self._socket):
            self._loop.call_soon(self._read)

    def stop(self) -> None:
        """Read no more; `ended` is cancelled if it was open. Before the socket is closed. Idempotent."""
        self._end()
        self.ended.cancel()

    def _end(self) -> None:
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            self._descriptor = -1

    def _read(self) -> None:
        try:
            reason = self._read_waiting()
        except Exception as error:  # noqa: BLE001 - whatever it is, the task that waits for `ended` raises it
            self._end()
            if not self.ended.done():
                self.ended.set_exception(error)
            return
        if reason:
            self._end()
            self.ended.set_result(reason)

    def _read_waiting(self) -> str:
        """The reason to stop; "" when there is no more, or others must have a turn."""
        for taken in range(_FRAMES_PER_TURN):
            if self.ended.done():
                return ""
            # The descriptor has mostly been made readable by a message; where one may follow it is asked, for an
            # exception for "nothing there" costs as much as receiving something.
            if taken and not has_message(self._socket):
                return ""
            try:
                parts = receive(self._socket)
            except zmq.Again:
                return ""
            reason = self._take(parts)
            if reason:
                return reason
        self._loop.call_soon(self._read)
        return ""
