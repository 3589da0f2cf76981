"""The router's end of one connection: handshake, numbered frames, heartbeats, the event stream. Owns the sockets of a
link.

    DEALER  requests out, output chunks and answers in
    SUB     the worker's cache events; lost ones are asked for again over DEALER

A `WorkerLink` lives for one session: when its connection breaks, a frame is missing or the worker stays silent, `run`
returns why, and whoever owns the link opens a new one. Frames of an earlier session or of another epoch of the worker
are counted and dropped.

A worker that is silent for `quiet_after_seconds`, or whose engine has been in one step for `stalled_after_seconds`, is
reported quiet; when it speaks again it is reported heard, with nothing lost in between. Only silence of
`give_up_seconds` ends the link.

Everything here runs on one asyncio loop; nothing is thread-safe.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from ..clock import Clock
from ..errors import HandshakeRefused, InvalidConfig, ProtocolError, QueueFull, TransportError
from . import wire
from .events import Batch, EventCursor
from .security import ClientKeys, apply_client_keys

logger = logging.getLogger("preble.transport")

_FRAMES_PER_TURN = 128  # frames taken before other tasks of the loop get a turn
_AUTH_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS_FRAME = frozenset({wire.Events})


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Times and bounds of a link, in seconds, frames and bytes. Raises `InvalidConfig` naming the field."""

    heartbeat_seconds: float = 0.5
    quiet_after_seconds: float = 3.0
    stalled_after_seconds: float = 120.0
    give_up_seconds: float = 30.0
    handshake_seconds: float = 5.0
    send_queue_messages: int = 10_000
    max_held_batches: int = 1024
    max_frame_bytes: int = wire.MAX_FRAME_BYTES

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise InvalidConfig(f"LinkConfig.{name} must be positive, got {getattr(self, name)!r}")


@dataclass(slots=True)
class LinkCounters:
    """What the links to one worker have seen; the router keeps one of these over all sessions of an address."""

    frames_received: int = 0
    malformed_frames: int = 0
    stale_frames: int = 0
    unsent: int = 0
    frame_gaps: int = 0
    event_batches: int = 0
    event_gaps: int = 0
    event_duplicates: int = 0
    replays: int = 0
    resyncs: int = 0


class LinkListener(Protocol):
    """What a link tells its owner. Called on the loop; must not block."""

    def on_message(self, message: wire.Chunk | wire.Rejected | wire.Draining) -> None:
        """Something about a request, or the worker drains."""

    def on_pong(self, pong: wire.Pong) -> None:
        """The worker's load, once per heartbeat."""

    def on_events(self, batch: Batch) -> None:
        """The next batch of cache events, in order and exactly once."""

    def on_resync(self) -> None:
        """Events are lost for good: forget what is believed about this worker's cache."""

    def on_quiet(self, reason: str) -> None:
        """The worker does not react for now."""

    def on_heard(self) -> None:
        """It does again."""


class WorkerLink:
    """One session with the worker at `address`; `session` is a positive number that is never used twice there."""

    def __init__(
        self,
        address: str,
        hello: wire.Hello,
        listener: LinkListener,
        config: LinkConfig,
        *,
        session: int,
        context: zmq.asyncio.Context,
        keys: ClientKeys | None = None,
        counters: LinkCounters | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.address = address
        self.session = session
        self.counters = counters or LinkCounters()
        self.quiet = False
        self.welcome: wire.Welcome
        self.epoch = 0
        self._hello = hello
        self._listener = listener
        self._config = config
        self._clock = clock
        self._send_seq = 0
        self._expected_seq = 1  # Welcome was 0
        self._silent_seconds = 0.0
        self._stalled = False
        self._replaying = False
        self._pong_event_seq = 0
        self._cursor: EventCursor[Batch] = EventCursor(0, config.max_held_batches)
        self._context = context
        self._keys = keys
        self._closed = False
        self._dealer = self._socket(zmq.DEALER)
        self._dealer.sndhwm = config.send_queue_messages
        # The monitor is there before the connection, so that its first failure is seen.
        self._monitor = self._dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | _AUTH_FAILED | _HANDSHAKE_FAILED)
        self._subscriber: zmq.asyncio.Socket | None = None

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.tcp_keepalive = 1
        socket.ipv6 = "[" in self.address
        socket.maxmsgsize = 4 * self._config.max_frame_bytes
        if self._keys is not None:
            apply_client_keys(socket, self._keys)
        return socket

    # --- life ---------------------------------------------------------------------------------------------------------

    async def open(self, *, resume_events_at: tuple[int, int] | None = None) -> wire.Welcome:
        """Shake hands. `resume_events_at` is (epoch, next event number) of an earlier session with this worker.

        Raises `HandshakeRefused` when the two do not fit (naming both), `TransportError` when there is no answer in
        time.
        """
        self._dealer.connect(self.address)
        self.send(self._hello)
        envelope = await self._first_of(self._await_welcome(), self._await_failure())
        self.welcome, self.epoch = envelope.message, envelope.epoch
        difference = wire.disagreement(self._hello, self.welcome)
        if difference:
            raise HandshakeRefused(difference)
        first_event = self.welcome.next_event_seq
        if resume_events_at is not None and resume_events_at[0] == self.epoch:
            first_event = min(first_event, resume_events_at[1])
        self._cursor = EventCursor(first_event, self._config.max_held_batches)
        self._cursor.expect(self.welcome.next_event_seq)
        self._pong_event_seq = self.welcome.next_event_seq
        self._subscriber = self._socket(zmq.SUB)
        self._subscriber.subscribe(b"")
        self._subscriber.connect(_events_endpoint(self.address, self.welcome.events_endpoint))
        return self.welcome

    async def run(self) -> str:
        """Serve the session until it ends; return why. Call once, after `open`."""
        self._close_gap()
        loops = (self._receive_loop(), self._event_loop(), self._heartbeat_loop(), self._monitor_loop())
        tasks = [asyncio.ensure_future(loop) for loop in loops]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            await _cancel_all(tasks)

    @property
    def next_event_seq(self) -> int:
        """The event batch to come next; with `epoch`, what a later session needs to go on."""
        return self._cursor.next_seq

    def close(self) -> None:
        """Say Bye if anybody hears it and free the sockets. Idempotent."""
        if self._closed:
            return
        if self.epoch:
            self._send_if_room(wire.Bye())
        self._closed = True
        self._dealer.disable_monitor()
        self._monitor.close(linger=0)
        # A moment for Bye and the last aborts; a dead worker's frames are dropped after it.
        self._dealer.close(linger=200)
        if self._subscriber is not None:
            self._subscriber.close(linger=0)

    # --- handshake ----------------------------------------------------------------------------------------------------

    async def _first_of(self, *attempts: Coroutine[Any, Any, wire.Envelope]) -> Any:
        tasks = [asyncio.ensure_future(attempt) for attempt in attempts]
        try:
            done, _ = await asyncio.wait(
                tasks, timeout=self._config.handshake_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise TransportError(f"no answer from {self.address} in {self._config.handshake_seconds} s")
            return next(iter(done)).result()
        finally:
            await _cancel_all(tasks)

    async def _await_welcome(self) -> wire.Envelope:
        parts = await self._dealer.recv_multipart()
        try:
            envelope = self._decode(parts)
        except wire.VersionMismatch as error:
            raise HandshakeRefused(
                f"worker at {self.address} speaks protocol version {error.version}, "
                f"router {self._hello.router_id} speaks {wire.PROTOCOL_VERSION}"
            ) from error
        if isinstance(envelope.message, wire.Refused):
            raise HandshakeRefused(envelope.message.text)
        if not isinstance(envelope.message, wire.Welcome) or envelope.session != self.session or not envelope.epoch:
            raise ProtocolError(f"{self.address} answered the handshake with {type(envelope.message).__name__}")
        return envelope

    async def _await_failure(self) -> wire.Envelope:
        while True:
            event = await self._next_monitor_event()
            if event & _AUTH_FAILED:
                raise HandshakeRefused(f"{self.address} does not accept the key of router {self._hello.router_id}")
            if event & (_HANDSHAKE_FAILED | zmq.EVENT_DISCONNECTED):
                raise TransportError(f"{self.address} closed the connection during the handshake")

    async def _next_monitor_event(self) -> int:
        message = await _awaitable(recv_monitor_message(self._monitor))
        return int(message["event"])

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, message: wire.Message) -> None:
        """Queue one message. Raises `QueueFull` when the worker does not read, `TransportError` after `close`."""
        if self._closed:
            raise TransportError(f"link to {self.address} is closed")
        frame = wire.encode(message, epoch=self.epoch, session=self.session, seq=self._send_seq)
        # With NOBLOCK the future is done when it comes back: sent, or not.
        future = cast("asyncio.Future[Any]", self._dealer.send(frame, zmq.NOBLOCK))
        error = future.exception()
        if isinstance(error, zmq.Again):
            raise QueueFull(f"{self._config.send_queue_messages} messages wait for the worker at {self.address}")
        if error is not None:
            raise TransportError(f"cannot send to {self.address}: {error}") from error
        self._send_seq += 1

    def _send_if_room(self, message: wire.Message) -> bool:
        """Send what can be done without; False, and counted, if the worker does not read."""
        try:
            self.send(message)
        except QueueFull:
            self.counters.unsent += 1
            return False
        return True

    # --- the four loops; each returns why the session is over ---------------------------------------------------------

    async def _receive_loop(self) -> str:
        return await self._take_frames(self._dealer, self._take)

    async def _event_loop(self) -> str:
        assert self._subscriber is not None
        return await self._take_frames(self._subscriber, self._take_event)

    async def _take_frames(self, socket: zmq.asyncio.Socket, take: Callable[[list[bytes]], str]) -> str:
        # asyncio wakes us for the first frame; what has come with it is read without a future for each.
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        while True:
            for parts in chain([await socket.recv_multipart()], _waiting_frames(plain)):
                reason = take(parts)
                if reason:
                    return reason
            await asyncio.sleep(0)

    async def _heartbeat_loop(self) -> str:
        nonce = 0
        before = self._clock()
        while True:
            await asyncio.sleep(self._config.heartbeat_seconds)
            now = self._clock()
            # If this process itself was asleep, the worker is not to blame for all of the time that has passed.
            self._silent_seconds += min(max(now - before, 0.0), 2 * self._config.heartbeat_seconds)
            before = now
            if self._silent_seconds >= self._config.give_up_seconds:
                return f"silent for {self._silent_seconds:.1f} s"
            self._judge()
            nonce += 1
            self._send_if_room(wire.Ping(nonce))

    async def _monitor_loop(self) -> str:
        while True:
            event = await self._next_monitor_event()
            if event & (zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED | _AUTH_FAILED):
                return "connection lost"

    # --- receiving ----------------------------------------------------------------------------------------------------

    def _decode(self, parts: list[bytes], allowed: frozenset[type] = wire.WORKER_MESSAGES) -> wire.Envelope:
        if len(parts) != 1:
            raise ProtocolError(f"a message is one frame, got {len(parts)}")
        return wire.decode(parts[0], allowed, max_bytes=self._config.max_frame_bytes)

    def _take(self, parts: list[bytes]) -> str:
        """Handle one frame of the session; return why the session is over, "" if it is not."""
        self.counters.frames_received += 1
        try:
            envelope = self._decode(parts)
        except ProtocolError as error:
            self.counters.malformed_frames += 1
            self._send_if_room(wire.Fault(str(error)))
            return f"malformed frame from the worker: {error}"
        message = envelope.message
        if isinstance(message, wire.Closed) and envelope.session == self.session:
            return f"closed by the worker: {message.code}, {message.text}"
        if envelope.session != self.session or envelope.epoch != self.epoch:
            self.counters.stale_frames += 1
            return "" if not isinstance(message, wire.Fault) else f"the worker could not read a frame: {message.text}"
        if envelope.seq != self._expected_seq:
            self.counters.frame_gaps += 1
            return f"frames lost: expected {self._expected_seq}, got {envelope.seq}"
        self._expected_seq += 1
        self._silent_seconds = 0.0
        return self._dispatch(message)

    def _dispatch(self, message: wire.Message) -> str:
        if isinstance(message, wire.Chunk | wire.Rejected | wire.Draining):
            self._listener.on_message(message)
        elif isinstance(message, wire.Pong):
            self._take_pong(message)
        elif isinstance(message, wire.Events):
            self._offer(message)
        elif isinstance(message, wire.ReplayEnd):
            self._end_replay(message)
        else:
            return f"unexpected {type(message).__name__} in the session"
        if self.quiet:
            self._judge()
        return ""

    def _take_pong(self, pong: wire.Pong) -> None:
        self._stalled = pong.step_ms >= self._config.stalled_after_seconds * 1000
        self._judge()
        # What the previous Pong announced has had a heartbeat's time to arrive; this one's may still be on its way.
        self._cursor.expect(self._pong_event_seq)
        self._pong_event_seq = pong.next_event_seq
        self._close_gap()
        self._listener.on_pong(pong)

    def _judge(self) -> None:
        """Report the worker quiet, or heard again, when that has changed."""
        silent = self._silent_seconds >= self._config.quiet_after_seconds
        if (silent or self._stalled) and not self.quiet:
            self.quiet = True
            what = "engine in one step" if self._stalled else "silent"
            self._listener.on_quiet(f"{what} for too long")
        elif self.quiet and not silent and not self._stalled:
            self.quiet = False
            self._listener.on_heard()

    # --- events -------------------------------------------------------------------------------------------------------

    def _take_event(self, parts: list[bytes]) -> str:
        try:
            envelope = self._decode(parts, _EVENTS_FRAME)
        except ProtocolError as error:
            # The hole that this frame leaves is closed by a replay, over the other socket.
            self.counters.malformed_frames += 1
            logger.warning("malformed event frame from %s: %s", self.address, error)
            return ""
        if envelope.epoch != self.epoch:
            self.counters.stale_frames += 1
            return ""
        assert isinstance(envelope.message, wire.Events)
        self._offer(envelope.message)
        return ""

    def _offer(self, message: wire.Events) -> None:
        duplicates = self._cursor.counters.duplicates
        for batch in self._cursor.offer(message.number, message.events):
            self.counters.event_batches += 1
            self._listener.on_events(batch)
        self.counters.event_duplicates += self._cursor.counters.duplicates - duplicates
        self._close_gap()

    def _close_gap(self) -> None:
        if self._cursor.has_gap and not self._replaying:
            self.counters.event_gaps += 1
            self._ask_replay()

    def _ask_replay(self) -> None:
        # Without room, the next heartbeat finds the gap again.
        self._replaying = self._send_if_room(wire.Replay(self._cursor.next_seq))
        self.counters.replays += self._replaying

    def _end_replay(self, end: wire.ReplayEnd) -> None:
        self._replaying = False
        stuck = end.to_seq == end.from_seq and self._cursor.has_gap and self._cursor.next_seq == end.from_seq
        if stuck:
            # Too old for the worker's buffer. Forgetting is safe, going on as if nothing had happened is not.
            self.counters.resyncs += 1
            self._cursor.skip_to(end.next_event_seq)
            self._listener.on_resync()
        elif self._cursor.has_gap:
            self._ask_replay()


def _events_endpoint(address: str, told: str) -> str:
    """The worker tells the address it bound, which may be a wildcard; over TCP we know a host that reaches it."""
    if not (address.startswith("tcp://") and told.startswith("tcp://")):
        return told
    return f"{address.rpartition(':')[0]}:{told.rpartition(':')[2]}"


def _waiting_frames(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """Messages that are there already, at most `_FRAMES_PER_TURN` of them."""
    for _ in range(_FRAMES_PER_TURN):
        try:
            parts = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield parts


async def _awaitable(message: Any) -> Any:
    return await message if isinstance(message, Awaitable) else message


async def _cancel_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
