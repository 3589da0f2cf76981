"""The router's end of one connection: handshake, numbered frames, heartbeats, the event stream. Owns the sockets of a
link.

    DEALER  requests out, output chunks and answers in
    SUB     the worker's events; lost ones are asked for again over DEALER

A `WorkerLink` lives for one session: when its connection breaks, a frame is missing or the worker stays silent, `run`
returns why, and whoever owns the link opens a new one. Frames of an earlier session or of another epoch of the worker
are counted and dropped.

Events and chunks take different sockets, so an eviction may overtake the chunk of a prompt that was computed before it;
applied in that order, the prompt would count as cached for good. Each chunk and each Pong says how many event batches
the worker had made by then. While a request is under way a batch is applied when one of these has been taken that is
younger than it; else at once.

What the worker published before the session began comes first and is reported as past; `on_caught_up` says when all of
it has been.

A worker that is silent for `suspect_after_seconds`, or whose engine has been in one step for `stalled_after_seconds`,
is reported suspect; when it answers again it is reported recovered, with nothing lost in between. Only silence of
`give_up_seconds` ends the link.

Everything here runs on one asyncio loop; nothing is thread-safe.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from ..clock import Clock
from ..errors import HandshakeRefused, ProtocolError, QueueFull, TransportError
from ..types import check_fields
from . import wire
from .event_stream import Batch, EventCursor
from .security import ClientKeys, apply_client_keys
from .socket_reader import NOBLOCK, RECEIVE_QUEUE_MESSAGES, FrameReader, context_of, set_usual_options
from .tasks import first_of

logger = logging.getLogger("preble.transport")

_AUTH_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS_FRAME = frozenset({wire.Events})


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Times and bounds of a link, in seconds, frames and bytes. Raises `InvalidConfig` naming the field.

    `hung_after_seconds` is of servers that are attached (`engine_servers.watch`).
    """

    heartbeat_seconds: float = 0.5
    suspect_after_seconds: float = 3.0
    hung_after_seconds: float = 1.25
    stalled_after_seconds: float = 120.0
    give_up_seconds: float = 30.0
    handshake_seconds: float = 5.0
    send_queue_messages: int = 10_000
    max_held_batches: int = 1024
    max_frame_bytes: int = wire.FRAME_BYTES_MAX

    def __post_init__(self) -> None:
        check_fields(self, "be positive", *self.__slots__)


@dataclass(slots=True)
class LinkCounters:
    """What the links to one worker have seen; the router keeps one of these over all sessions of an address."""

    frames_received: int = 0
    malformed_frames: int = 0
    stale_frames: int = 0
    unsent: int = 0
    requests_failed: int = 0  # by an error that nobody expects
    frame_gaps: int = 0
    frame_duplicates: int = 0
    event_batches: int = 0
    events_early: int = 0
    events_partial: int = 0
    event_gaps: int = 0
    event_duplicates: int = 0
    replays: int = 0
    resyncs: int = 0


class LinkListener(Protocol):
    """What a link reports to its owner. Called on the loop; must not block."""

    def on_message(self, message: wire.OutputChunk | wire.Rejected | wire.PullEnded | wire.Draining) -> None:
        """Something about a request, or the worker drains."""

    def on_pong(self, pong: wire.Pong) -> None:
        """The worker's load, once per heartbeat."""

    def on_events(self, batch: Batch, *, past: bool) -> None:
        """The next batch of events, in order and exactly once; `past`: of the time before the session, or before a
        resync."""

    def on_caught_up(self) -> None:
        """All of the past has been reported: what comes now, comes as it happens."""

    def on_resync(self) -> None:
        """Events are lost for good: forget the estimate of this worker's cache, and others' requests there."""

    def on_suspect(self, reason: str) -> None:
        """The worker does not react for now."""

    def on_recovered(self) -> None:
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
        self.suspect = False
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
        self._joining = False
        self._pong_event_seq = 0
        self._cursor: EventCursor[Batch] = EventCursor(0, config.max_held_batches)
        self._early: deque[Batch] = deque()  # in order, waiting for what the worker sent before them
        self._events_made = 0  # all batches below this number were made before what has been taken
        self._past_end = 0  # all batches below this number are of the past
        self._behind = True
        self._awaited: set[str] = set()  # requests of which chunks may come
        # Plain sockets, see `socket_reader`, in a context whose own sockets are asyncio's.
        self._context = context_of(address) or zmq.Context.shadow(context.underlying)
        self._keys = keys
        self._closed = False
        self._dealer = self._socket(zmq.DEALER)
        self._dealer.sndhwm = config.send_queue_messages
        # The monitor is there before the connection, so that its first failure is seen.
        self._monitor = self._dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | _AUTH_FAILED | _HANDSHAKE_FAILED)
        self._subscriber: zmq.Socket[bytes] | None = None
        self._reader: FrameReader | None = None

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        set_usual_options(socket, self.address)
        socket.maxmsgsize = 4 * self._config.max_frame_bytes
        socket.rcvhwm = RECEIVE_QUEUE_MESSAGES
        if self._keys is not None:
            apply_client_keys(socket, self._keys)
        return socket

    # --- life ---------------------------------------------------------------------------------------------------------

    async def open(self, *, resume_events_at: tuple[int, int] | None = None) -> wire.Welcome:
        """Shake hands. `resume_events_at` is (epoch, next event number) of an earlier session with this worker. Without
        one the event stream is taken from its beginning, so that a new router learns what is cached from an engine that
        reports what it stores.

        Raises `HandshakeRefused` when the two do not fit (naming both), `TransportError` when there is no answer in
        time.
        """
        self._dealer.connect(self.address)
        with suppress(QueueFull):  # the connection has failed already: the monitor says why
            self.send(self._hello)
        envelope = await self._first_answer()
        assert isinstance(envelope.message, wire.Welcome)
        self.welcome, self.epoch = envelope.message, envelope.epoch
        difference = wire.disagreement(self._hello, self.welcome)
        if difference:
            raise HandshakeRefused(difference)
        self._joining = resume_events_at is None or resume_events_at[0] != self.epoch
        first_event = 0
        if resume_events_at is not None and not self._joining:
            first_event = min(self.welcome.next_event_seq, resume_events_at[1])
        self._cursor = EventCursor(first_event, self._config.max_held_batches)
        self._cursor.expect(self.welcome.next_event_seq)
        self._past_end = self.welcome.next_event_seq
        self._pong_event_seq = self.welcome.next_event_seq
        self._subscriber = self._socket(zmq.SUB)
        self._subscriber.subscribe(b"")
        self._subscriber.connect(reached_at(self.address, self.welcome.events_endpoint))
        return self.welcome

    async def run(self) -> str:
        """Serve the session until it ends; return why. Call once, after `open`."""
        assert self._subscriber is not None
        self._reader = FrameReader(self._dealer, self._take)
        readers = [
            self._reader,
            FrameReader(self._subscriber, self._take_event),
            FrameReader(self._monitor, self._take_monitor),
        ]
        try:
            self._close_gap()
            self._joining &= self._replaying
            self._look_caught_up()
            return await first_of(self._heartbeat_loop(), *(reader.ended for reader in readers))
        finally:
            for reader in readers:
                reader.stop()
            self._reader = None

    @property
    def next_event_seq(self) -> int:
        """The event batch to be applied next; with `epoch`, what a later session needs to go on."""
        return self._cursor.next_seq - len(self._early)

    def close(self) -> None:
        """Say Bye if anybody is connected and free the sockets. Idempotent."""
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

    async def _first_answer(self) -> wire.Envelope:
        """The Welcome, or the error that says why there is none."""
        parts: list[bytes] = []

        def take(message: list[bytes]) -> str:
            parts.extend(message)
            return "answered"

        answer = FrameReader(self._dealer, take)
        failure = FrameReader(self._monitor, self._take_failure)
        try:
            await asyncio.wait(
                [answer.ended, failure.ended],
                timeout=self._config.handshake_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if answer.ended.done():
                return self._welcome_of(parts)
            if failure.ended.done():
                failure.ended.result()  # raises
            raise TransportError(f"no answer from {self.address} in {self._config.handshake_seconds} s")
        finally:
            answer.stop()
            failure.stop()

    def _welcome_of(self, parts: list[bytes]) -> wire.Envelope:
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

    def _take_failure(self, parts: list[bytes]) -> str:
        event = int(parse_monitor_message(parts)["event"])
        if event & _AUTH_FAILED:
            raise HandshakeRefused(f"{self.address} does not accept the key of router {self._hello.router_id}")
        if event & (_HANDSHAKE_FAILED | zmq.EVENT_DISCONNECTED):
            raise TransportError(f"{self.address} closed the connection during the handshake")
        return ""

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, message: wire.Message) -> None:
        """Queue one message. Raises `QueueFull` when the worker does not read, `TransportError` after `close`."""
        if self._closed:
            raise TransportError(f"link to {self.address} is closed")
        frame = wire.encode(message, epoch=self.epoch, session=self.session, seq=self._send_seq)
        try:
            self._dealer.send(frame, NOBLOCK)
        except zmq.Again as error:
            raise QueueFull(
                f"{self._config.send_queue_messages} messages wait for the worker at {self.address}"
            ) from error
        except zmq.ZMQError as error:
            raise TransportError(f"cannot send to {self.address}: {error}") from error
        finally:
            if self._reader is not None:
                self._reader.look()
        self._send_seq += 1
        if isinstance(message, wire.GenerationRequest):
            self._awaited.add(message.request_id)
        elif isinstance(message, wire.Abort):
            self._awaited.discard(message.request_id)

    def _send_if_room(self, message: wire.Message) -> bool:
        """Send what can be done without; False, and counted, if the worker does not read."""
        try:
            self.send(message)
        except QueueFull:
            self.counters.unsent += 1
            return False
        return True

    # --- silence ------------------------------------------------------------------------------------------------------

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
        if envelope.seq < self._expected_seq:
            self.counters.frame_duplicates += 1  # taken already: what it says must not count twice
            return ""
        if envelope.seq > self._expected_seq:
            self.counters.frame_gaps += 1
            return f"frames lost: expected {self._expected_seq}, got {envelope.seq}"
        self._expected_seq += 1
        self._silent_seconds = 0.0
        return self._dispatch(message, len(parts[0]))

    def _dispatch(self, message: wire.Message, size_bytes: int) -> str:
        if isinstance(message, wire.OutputChunk):
            self._take_chunks((message,), message.next_event_seq)
        elif isinstance(message, wire.OutputChunks):
            self._take_chunks(message.chunks, message.next_event_seq)
        elif isinstance(message, wire.Rejected):
            self._listener.on_message(message)
            self._await_no_more(message.request_id)
        elif isinstance(message, wire.Draining | wire.PullEnded):
            self._listener.on_message(message)
        elif isinstance(message, wire.Pong):
            self._take_pong(message)
        elif isinstance(message, wire.Events):
            self._offer(message, size_bytes)
            self._apply_events(message.number + 1)
        elif isinstance(message, wire.ReplayEnd):
            self._end_replay(message)
        else:
            return f"unexpected {type(message).__name__} in the session"
        if self.suspect:
            self._judge()
        return ""

    def _take_chunks(self, chunks: Sequence[wire.OutputChunk], next_event_seq: int) -> None:
        self._apply_events(next_event_seq)
        for chunk in chunks:
            self._listener.on_message(chunk)
            if chunk.finish_reason is not None:
                self._await_no_more(chunk.request_id)

    def _take_pong(self, pong: wire.Pong) -> None:
        self._stalled = pong.step_ms >= self._config.stalled_after_seconds * 1000
        self._judge()
        # What the previous Pong announced has had a heartbeat's time to arrive; this one's may still be on its way.
        self._cursor.expect(self._pong_event_seq)
        self._pong_event_seq = pong.next_event_seq
        self._close_gap()
        self._apply_events(pong.next_event_seq)
        self._listener.on_pong(pong)

    def _judge(self) -> None:
        """Report the worker suspect, or recovered, when that has changed."""
        silent = self._silent_seconds >= self._config.suspect_after_seconds
        if (silent or self._stalled) and not self.suspect:
            self.suspect = True
            what = "engine in one step" if self._stalled else "silent"
            self._listener.on_suspect(f"{what} for too long")
        elif self.suspect and not silent and not self._stalled:
            self.suspect = False
            self._listener.on_recovered()

    def _take_monitor(self, parts: list[bytes]) -> str:
        event = int(parse_monitor_message(parts)["event"])
        return "connection lost" if event & (zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED | _AUTH_FAILED) else ""

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
        self._offer(envelope.message, len(parts[0]))
        return ""

    def _offer(self, message: wire.Events, size_bytes: int) -> None:
        if message.complete_for not in ("", self._hello.router_id):
            # The worker takes another router for the only one. What is left out is asked for.
            self.counters.events_partial += 1
            self._cursor.expect(message.number + 1)
            self._close_gap()
            return
        self.counters.event_duplicates += self._cursor.has_had(message.number)
        self._early.extend(self._cursor.offer(message.number, message.events, size_bytes))
        self._apply_events(0)
        self.counters.events_early += bool(self._early)
        self._close_gap()

    def _apply_events(self, made: int) -> None:
        """Apply the batches whose turn has come: those below `made`, all if no chunk can be on its way, and over the
        bound the oldest in any case."""
        self._events_made = max(self._events_made, made)
        while self._early and (
            not self._awaited
            or self.next_event_seq < self._events_made
            or len(self._early) > self._config.max_held_batches
        ):
            self._look_caught_up()
            self.counters.event_batches += 1
            past = self.next_event_seq < self._past_end
            self._listener.on_events(self._early.popleft(), past=past)
        if self._behind:
            self._look_caught_up()

    def _await_no_more(self, request_id: str) -> None:
        self._awaited.discard(request_id)
        self._apply_events(0)

    def _look_caught_up(self) -> None:
        if self._behind and self.next_event_seq >= self._past_end:
            self._behind = False
            self._listener.on_caught_up()

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
            # Too old for the worker's buffer. Forgetting is safe, going on as if nothing had happened is not. From the
            # oldest batch kept on, the stream never says more than is true; a newcomer has nothing to forget.
            self._early.clear()
            self._cursor.skip_to(end.first_kept_seq if end.first_kept_seq > end.from_seq else end.next_event_seq)
            self._cursor.expect(end.next_event_seq)
            if not self._joining:
                self.counters.resyncs += 1
                self._past_end, self._behind = end.next_event_seq, True
                self._listener.on_resync()
        self._joining = False
        self._apply_events(end.next_event_seq)
        if self._cursor.has_gap:
            self._ask_replay()


def reached_at(address: str, made: str) -> str:
    """The worker reports the address it bound, which may be a wildcard; over TCP we know a host that reaches it."""
    if not (address.startswith("tcp://") and made.startswith("tcp://")):
        return made
    return f"{address.rpartition(':')[0]}:{made.rpartition(':')[2]}"
