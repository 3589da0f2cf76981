"""The worker's end of the transport: who is connected, what they may be sent, and the event stream. Owns the sockets of
a worker.

    ROUTER  requests in, output chunks and answers out, one session per router
    PUB     events to all routers; a replay of lost ones goes over ROUTER, page by page
    a pipe  (in the process) lets other threads end a wait for routers

Handshakes, numbering, replay, expiry and errors are settled here; `poll` hands requests, aborts and pings to the
worker. Nothing here ever waits for a router: what one does not take waits in its bounded outbox, and at the bound its
session is closed.

A session lives until the router says Bye, its connection breaks, a frame is missing, its outbox is full, or it has been
silent for `session_timeout_seconds`. Then its requests are the worker's to abort, and the router may say Hello again.

All methods belong to one thread at a time, except those of `Waker`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import zmq
from msgspec import structs

from ..clock import Clock
from ..errors import InvalidConfig, InvalidInput, ProtocolError, QueueFull, TransportError
from ..types import AllBlocksCleared, CacheEvent, RequestEnded, RequestPlaced, RequestPrefilled, check_fields
from . import wire
from .event_stream import Batch, ReplayBuffer
from .messages import EVENTS_MAX
from .outbox import Outbox, chunk_lots, together
from .security import ServerKeys, apply_server_keys, check_bind, start_authenticator
from .socket_reader import (
    MORE_NOBLOCK,
    NOBLOCK,
    RECEIVE_QUEUE_MESSAGES,
    context_of,
    has_message,
    is_inproc,
    receive,
    set_usual_options,
)

logger = logging.getLogger("preble.transport")

_FRAMES_PER_POLL_MAX = 256  # then the engine's output gets its turn
_BACKLOG_POLL_SECONDS = 0.005  # ZeroMQ does not say when one router's queue has room again, so it is tried
_EXPIRY_LOOK_SECONDS = 0.1  # between two looks at who has been silent
_REPLAY_PAGE_BATCHES = 64
_EVENT_FRAME_BYTES = 1 << 16  # larger lots of events are cut into several batches
_SUBSCRIBER_BATCHES_MIN = 64  # that may wait for a router that is slow, whatever their size
_EVENT_BYTES = 64  # of an event without its tokens and hashes
_EMPTY_FRAME_BYTES = 512  # of a batch without its events, at most
_REPORTS_MAX = 1024  # events about requests that wait for a number, while there is no other router
_REPORT_BYTES_MAX = 1 << 20  # of them together

_PASSED_ON = (wire.GenerationRequest, wire.Abort, wire.Ping)  # to the worker
_RequestEvent = RequestPlaced | RequestPrefilled | RequestEnded
_REQUEST_EVENTS = (RequestPlaced, RequestPrefilled, RequestEnded)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Endpoints and bounds of a worker's transport. `bind` and `events_bind`: port `*` takes a free one; `events_bind`
    "" derives one from `bind`. `inproc://NAME` is for routers of this process; then both are, and keys count for
    nothing. `send_queue_messages` is ZeroMQ's own queue per router, `max_pending_*` the outbox behind it.
    """

    bind: str = "tcp://127.0.0.1:*"
    events_bind: str = ""
    insecure: bool = False
    max_sessions: int = 64
    session_timeout_seconds: float = 15.0
    send_queue_messages: int = 1000
    max_pending_messages: int = 16_384
    max_pending_tokens: int = 1 << 20
    max_frame_bytes: int = wire.FRAME_BYTES_MAX
    replay_batches: int = 10_000
    replay_bytes: int = 32 << 20

    def __post_init__(self) -> None:
        settings = ("bind", "events_bind", "insecure")
        check_fields(self, "be positive", *(name for name in self.__slots__ if name not in settings))
        if self.events_bind and is_inproc(self.bind) != is_inproc(self.events_bind):
            raise InvalidConfig(
                f"ServerConfig.events_bind {self.events_bind!r} cannot go with bind {self.bind!r}: both or "
                "neither must be inproc://"
            )


@dataclass(slots=True)
class ServerCounters:
    """What a worker's transport has seen, since its start."""

    sessions_opened: int = 0
    sessions_refused: int = 0
    sessions_expired: int = 0
    sessions_overflowed: int = 0
    sessions_unreachable: int = 0
    frames_received: int = 0
    frames_sent: int = 0
    malformed_frames: int = 0
    stale_frames: int = 0
    frame_gaps: int = 0
    frame_duplicates: int = 0
    faults_unsent: int = 0
    faults_received: int = 0
    chunks_merged: int = 0
    event_batches: int = 0
    events_too_large: int = 0
    replays: int = 0
    replays_too_old: int = 0


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A router is gone; `code` is one of `messages.CLOSING_CODES`, "bye" or "unreachable"."""

    code: str


Request = wire.GenerationRequest | wire.Abort | wire.Ping | SessionEnded


@dataclass(slots=True, eq=False)
class Session:
    """One connection of one router. `serial` is unique in this worker process."""

    serial: int
    identity: bytes
    number: int
    router_id: str
    outbox: Outbox
    received_at: float
    expected_seq: int = 1  # Hello was 0
    send_seq: int = 0
    open: bool = True


class Waker:
    """Lets other threads interrupt `Server.poll`. `wake` never blocks; `descriptor` is readable after it until `clear`.

    A pipe, not a ZeroMQ socket, because waking is a third of what a short answer costs.
    """

    def __init__(self) -> None:
        self.descriptor, self._writer = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._writer, False)

    def wake(self) -> None:
        """Make the current or the next `poll` return."""
        try:
            os.write(self._writer, b"w")
        except BlockingIOError:
            return  # enough wake-ups are waiting already; one would do

    def clear(self) -> None:
        """Forget the wake-ups so far. Those that come meanwhile may be left for the next time."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 4096)

    def close(self) -> None:
        """Give the pipe back. A thread that was left behind must not write to what has its number next."""
        writer, self._writer = self._writer, -1
        os.close(writer)
        os.close(self.descriptor)


class Server:
    """See the module. `welcome` says what the worker is; its event fields are filled in here.

    `epoch` must differ at every start.
    """

    def __init__(
        self,
        config: ServerConfig,
        welcome: wire.Welcome,
        *,
        epoch: int,
        keys: ServerKeys | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        check_bind(config.bind, has_keys=keys is not None, insecure=config.insecure)
        if config.events_bind:
            check_bind(config.events_bind, has_keys=keys is not None, insecure=config.insecure)
        self.config = config
        self.epoch = epoch
        self.counters = ServerCounters()
        self.replay = ReplayBuffer(config.replay_batches, config.replay_bytes)
        self._clock = clock
        self._polled_at = clock()
        self._alive_seconds = 0.0
        self._expiry_look_at = 0.0
        self._sessions: dict[bytes, Session] = {}
        self._router_alone = ""
        self._serial = 0
        self._inbox: list[tuple[Session, Request]] = []
        self._reports: list[_RequestEvent] = []
        self._report_bytes = 0
        self._reports_due = False
        keys = None if is_inproc(config.bind) else keys  # nobody else reaches it
        self._context: zmq.Context[zmq.Socket[bytes]] = context_of(config.bind) or zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._stop_authenticator = start_authenticator(self._context, keys) if keys is not None else None
        try:
            self._open_sockets(keys)
        except zmq.ZMQError as error:
            self._close_context()
            raise TransportError(f"cannot bind {config.bind}: {error}") from error
        self.welcome = structs.replace(
            welcome, events_endpoint=self.events_endpoint, max_frame_bytes=config.max_frame_bytes
        )

    # --- sockets ------------------------------------------------------------------------------------------------------

    def _open_sockets(self, keys: ServerKeys | None) -> None:
        router = self._socket(zmq.ROUTER, keys)
        # Without this ROUTER drops frames for a full or vanished router without a word.
        router.router_mandatory = True
        # A frame over the limit gets an answer; only one far over it gets its sender cut off by ZeroMQ itself.
        router.maxmsgsize = 4 * self.config.max_frame_bytes
        router.rcvhwm = RECEIVE_QUEUE_MESSAGES
        router.sndhwm = self.config.send_queue_messages
        router.bind(self.config.bind)
        self._router = router
        self.endpoint: str = router.getsockopt_string(zmq.LAST_ENDPOINT)
        publisher = self._socket(zmq.PUB, keys)
        # What a router that does not read may leave waiting; it asks again for what it misses. (To lower this of a
        # connection that is there would stop it for good.)
        most = max(self.config.replay_bytes // _EVENT_FRAME_BYTES, _SUBSCRIBER_BATCHES_MIN)
        publisher.sndhwm = min(most, self.config.replay_batches)
        publisher.bind(self.config.events_bind or bind_beside(self.endpoint, ".events"))
        self._publisher = publisher
        self.events_endpoint: str = publisher.getsockopt_string(zmq.LAST_ENDPOINT)
        self.waker = Waker()
        self._poller = zmq.Poller()
        self._poller.register(router, zmq.POLLIN)
        self._poller.register(self.waker.descriptor, zmq.POLLIN)

    def _socket(self, kind: int, keys: ServerKeys | None) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        set_usual_options(socket, self.config.bind)
        if keys is not None:
            apply_server_keys(socket, keys)
        return socket

    def close(self, linger_seconds: float = 1.0) -> None:
        """Close every session, give the last frames `linger_seconds` to leave, and free the sockets.

        The waker's thread has ended.
        """
        for session in list(self._sessions.values()):
            self.end(session, "shutdown", f"worker {self.welcome.worker_id} stops")
        self.waker.close()
        self._close_context(linger_seconds)

    def _close_context(self, linger_seconds: float = 0.0) -> None:
        for socket in self._sockets:
            socket.close(linger=int(linger_seconds * 1000))
        if self._stop_authenticator is not None:
            self._stop_authenticator()
        if not is_inproc(self.config.bind):  # that context is the process's
            self._context.destroy()

    # --- receiving ----------------------------------------------------------------------------------------------------

    @property
    def sessions(self) -> Iterable[Session]:
        """The open sessions."""
        return self._sessions.values()

    def poll(self, timeout_seconds: float) -> list[tuple[Session, Request]]:
        """Wait for frames, a wake-up or the timeout; answer what is answered here and return the rest, in order."""
        backlog = any(session.outbox for session in self._sessions.values())
        timeout = min(timeout_seconds, _BACKLOG_POLL_SECONDS) if backlog else timeout_seconds
        if self._inbox:
            timeout = 0.0  # a session ended while something was sent: that is news already
        ready = dict(self._poller.poll(int(timeout * 1000 + 0.999)))
        if self.waker.descriptor in ready:
            self.waker.clear()
        if self._router in ready:
            self._receive()
        if backlog:
            for session in list(self._sessions.values()):
                self._flush(session)
        self._expire(timeout)
        inbox, self._inbox = self._inbox, []
        return inbox

    def _receive(self) -> None:
        for taken in range(_FRAMES_PER_POLL_MAX):
            if taken and not has_message(self._router):
                return
            parts = receive(self._router)
            self.counters.frames_received += 1
            try:
                self._take(parts)
            except ProtocolError as error:
                self.counters.malformed_frames += 1
                logger.warning("malformed frame: %s", error)
                self._answer_malformed(parts[0], error)

    def _take(self, parts: list[bytes]) -> None:
        identity = parts[0]
        if len(parts) != 2:
            raise ProtocolError(f"a message is one frame, got {len(parts) - 1}")
        envelope = wire.decode(parts[1], wire.ROUTER_MESSAGES, max_bytes=self.config.max_frame_bytes)
        if isinstance(envelope.message, wire.Hello):
            self._greet(identity, envelope, envelope.message)
            return
        session = self._sessions.get(identity)
        if session is None or envelope.session != session.number or envelope.epoch != self.epoch:
            self.counters.stale_frames += 1
            self._send_bare(
                identity, wire.Closed("no_session", "no such session with this worker's epoch"), envelope.session
            )
            return
        if envelope.seq < session.expected_seq:
            self.counters.frame_duplicates += 1
            return
        if envelope.seq > session.expected_seq:
            self.counters.frame_gaps += 1
            self.end(session, "gap", f"expected frame {session.expected_seq}, got {envelope.seq}")
            return
        session.expected_seq += 1
        session.received_at = self._alive_seconds
        self._handle(session, envelope.message)

    def _handle(self, session: Session, message: wire.Message) -> None:
        if isinstance(message, _PASSED_ON):
            self._inbox.append((session, message))
        elif isinstance(message, wire.Replay):
            self._replay(session, message.from_seq)
        elif isinstance(message, wire.Fault):
            self.counters.faults_received += 1
            logger.warning("router %r could not read a frame: %r", session.router_id, message.text)
        elif isinstance(message, wire.Bye):
            self._forget(session, "bye")

    def _answer_malformed(self, identity: bytes, error: ProtocolError) -> None:
        if isinstance(error, wire.VersionMismatch):
            self.counters.sessions_refused += 1
            ours = f"worker {self.welcome.worker_id} speaks protocol version {wire.PROTOCOL_VERSION}"
            self._send_bare(identity, wire.Refused(f"{ours}, the router speaks version {error.version}"), 0)
        else:
            self._send_bare(identity, wire.Fault(str(error)), 0)

    def _expire(self, timeout: float) -> None:
        """Close sessions that have been silent too long while this process was awake.

        A worker that was stopped for a while must not blame its routers: time it slept through does not count.
        """
        now = self._clock()
        self._alive_seconds += min(max(now - self._polled_at, 0.0), timeout + 0.5)
        self._polled_at = now
        if self._alive_seconds < self._expiry_look_at:
            return
        self._expiry_look_at = self._alive_seconds + min(_EXPIRY_LOOK_SECONDS, self.config.session_timeout_seconds / 8)
        deadline = self._alive_seconds - self.config.session_timeout_seconds
        for session in [s for s in self._sessions.values() if s.received_at < deadline]:
            self.counters.sessions_expired += 1
            self.end(session, "expired", f"silent for {self.config.session_timeout_seconds} s")

    # --- handshake ----------------------------------------------------------------------------------------------------

    def _greet(self, identity: bytes, envelope: wire.Envelope, hello: wire.Hello) -> None:
        refusal = self._refusal(identity, hello)
        if refusal:
            self.counters.sessions_refused += 1
            logger.warning("handshake refused: %r", refusal)
            self._send_bare(identity, wire.Refused(refusal), envelope.session)
            return
        old = self._sessions.get(identity)
        if old is not None:
            self._forget(old, "replaced")
        if self._reports:
            self.publish(())  # while the others are as many as they were: a lone one need not be sent these
        self._serial += 1
        outbox = Outbox(self.config.max_pending_messages, self.config.max_pending_tokens)
        session = Session(self._serial, identity, envelope.session, hello.router_id, outbox, self._alive_seconds)
        self._sessions[identity] = session
        self._note_who_is_alone()
        self.counters.sessions_opened += 1
        self.send(session, structs.replace(self.welcome, next_event_seq=self.replay.next_seq))

    def _refusal(self, identity: bytes, hello: wire.Hello) -> str:
        """Why this router cannot be served, naming both sides; "" if it can."""
        full = len(self._sessions) >= self.config.max_sessions and identity not in self._sessions
        crowd = f"worker {self.welcome.worker_id} serves {len(self._sessions)} routers, no room for {hello.router_id}"
        return wire.disagreement(hello, self.welcome) or (crowd if full else "")

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, session: Session, message: wire.Message) -> None:
        """Send to a router, or keep the message in its outbox until it reads. No effect if the session has ended."""
        if session.open and (session.outbox or not self._try_send(session, message)):
            self._keep(session, (message,))

    def send_chunks(self, session: Session, chunks: Sequence[wire.OutputChunk]) -> None:
        """`send` what a step made for a router's requests, in as few frames as hold it."""
        for lot in chunk_lots(chunks):
            if session.open and (session.outbox or not self._try_send(session, together(lot))):
                self._keep(session, lot)

    def _keep(self, session: Session, messages: Sequence[wire.Message]) -> None:
        """Leave messages in the outbox of a session, if it is still open."""
        before = session.outbox.merged
        try:
            for message in messages if session.open else ():
                session.outbox.push(message)
        except QueueFull as full:
            self.counters.sessions_overflowed += 1
            self.end(session, "slow_reader", str(full))
            return
        self.counters.chunks_merged += session.outbox.merged - before

    def broadcast(self, message: wire.Message) -> None:
        """Send to every router."""
        for session in list(self._sessions.values()):
            self.send(session, message)

    def end(self, session: Session, code: str, text: str) -> None:
        """Close a session. The router is sent that if it has room for it, else as the answer to its next frame."""
        if session.open:
            logger.info("session of router %r closed: %s, %s", session.router_id, code, text)
            self._send_bare(session.identity, wire.Closed(code, text), session.number)
            self._forget(session, code)

    def _flush(self, session: Session) -> None:
        while session.open and session.outbox:
            message = session.outbox.peek()
            if not self._try_send(session, message):
                return
            session.outbox.pop(len(message.chunks) if isinstance(message, wire.OutputChunks) else 1)

    def _try_send(self, session: Session, message: wire.Message) -> bool:
        """True if ZeroMQ took the frame; False if this router's queue is full or the session is over."""
        frame = wire.encode(message, epoch=self.epoch, session=session.number, seq=session.send_seq)
        try:
            self._send_to(session.identity, frame)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.counters.sessions_unreachable += 1
            logger.info("router %r is gone", session.router_id)
            self._forget(session, "unreachable")
            return False
        session.send_seq += 1
        self.counters.frames_sent += 1
        return True

    def _send_bare(self, identity: bytes, message: wire.Message, session_number: int) -> None:
        """Send outside the numbering of a session: to a peer that has none, or is about to lose it."""
        frame = wire.encode(message, epoch=self.epoch, session=session_number)
        try:
            self._send_to(identity, frame)
        except zmq.ZMQError:
            self.counters.faults_unsent += 1

    def _send_to(self, identity: bytes, frame: bytes) -> None:
        """Raises `zmq.ZMQError` where the peer is gone or takes no more, which its identity's part finds out."""
        self._router.send(identity, MORE_NOBLOCK)
        self._router.send(frame, NOBLOCK)

    def _forget(self, session: Session, code: str) -> None:
        session.open = False
        del self._sessions[session.identity]
        self._note_who_is_alone()
        self._inbox.append((session, SessionEnded(code)))

    # --- events -------------------------------------------------------------------------------------------------------

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Number events, keep them for replay, send them to all routers. One that is too slow will see a gap.

        What `report` was given before goes first.
        """
        reports, self._reports, self._report_bytes, self._reports_due = self._reports, [], 0, False
        alone = self._router_alone
        for lot in _lots([*reports, *events], min(_EVENT_FRAME_BYTES, self.config.max_frame_bytes // 2)):
            batch, frame, batch_bytes = self._event_frame(tuple(lot), alone)
            self.replay.append(batch, batch_bytes)
            self._publisher.send(frame, zmq.NOBLOCK)
            self.counters.event_batches += 1

    def report(self, event: _RequestEvent) -> None:
        """Take what became of a router's request. Where another router is there it is published by the next
        `publish_reports`; else it waits for the next batch, for another router, or until many wait, and is only kept
        for replay: a router that is alone receives no events of its own requests. What would need a frame of its own
        over the limit is counted and left out; nobody knows the request then."""
        size = bytes_of(event)
        if size > self.config.max_frame_bytes - _EMPTY_FRAME_BYTES:
            self.counters.events_too_large += 1
            return
        self._reports.append(event)
        self._report_bytes += size
        self._reports_due = self._reports_due or event.router != self._router_alone
        if len(self._reports) >= _REPORTS_MAX or self._report_bytes >= _REPORT_BYTES_MAX:
            self.publish(())

    def publish_reports(self) -> None:
        """Publish what `report` was given, where somebody waits for it."""
        if self._reports_due:
            self.publish(())

    def _note_who_is_alone(self) -> None:
        """Note the router that has the only session; "" if there are several, or none."""
        self._router_alone = next(iter(self._sessions.values())).router_id if len(self._sessions) == 1 else ""

    def _event_frame(self, lot: tuple[CacheEvent, ...], alone: str) -> tuple[Batch, bytes, int]:
        """The batch to keep for replay, the frame to send now, and the bytes that the batch takes."""
        number, limit = self.replay.next_seq, self.config.max_frame_bytes
        sent = tuple(event for event in lot if not _is_of(event, alone)) if alone else lot
        try:
            frame = wire.encode(wire.Events(number, sent, alone), epoch=self.epoch, max_bytes=limit)
            return lot, frame, len(frame) + sum(bytes_of(event) for event in lot if alone and _is_of(event, alone))
        except InvalidInput as error:
            # Forgetting everything is the one thing that is never wrong: expecting too much sends requests astray.
            self.counters.events_too_large += 1
            logger.warning("event does not fit a frame, publishing a cleared cache instead: %s", error)
            message = wire.Events(number, (AllBlocksCleared(),))
            frame = wire.encode(message, epoch=self.epoch)
            return message.events, frame, len(frame)

    def _replay(self, session: Session, from_seq: int) -> None:
        self.counters.replays += 1
        replay = self.replay
        self.counters.replays_too_old += from_seq < replay.first_seq
        page = replay.page(from_seq, _REPLAY_PAGE_BATCHES)
        for number, batch in page:
            self.send(session, wire.Events(number, tuple(batch)))
        self.send(session, wire.ReplayEnd(from_seq, from_seq + len(page), replay.first_seq, replay.next_seq))


def bind_beside(endpoint: str, ending: str) -> str:
    """Where another socket of the same process is bound when nobody said: a free port of the same host, a path beside
    the other."""
    if endpoint.startswith("tcp://"):
        return endpoint.rpartition(":")[0] + ":*"
    return endpoint + ending


def _is_of(event: CacheEvent, router_id: str) -> bool:
    """Whether the event is about a request of that router."""
    return isinstance(event, _REQUEST_EVENTS) and event.router == router_id


def _lots(events: Sequence[CacheEvent], max_bytes: int) -> Iterable[list[CacheEvent]]:
    """Cut events into lots that fit a frame each; one oversized event makes a lot of its own."""
    lot: list[CacheEvent] = []
    size = 0
    for event in events:
        event_bytes = bytes_of(event)
        if lot and (len(lot) >= EVENTS_MAX or size + event_bytes > max_bytes):
            yield lot
            lot, size = [], 0
        lot.append(event)
        size += event_bytes
    if lot:
        yield lot


def bytes_of(event: CacheEvent) -> int:
    """About what an event takes in a frame; of one about a request, at most."""
    if isinstance(event, RequestPlaced):
        space = 0 if event.namespace is None else len(repr(event.namespace))
        return _EVENT_BYTES + 4 * (len(event.token_ids) + len(event.router) + len(event.request_id) + space)
    if isinstance(event, RequestPrefilled | RequestEnded):
        return _EVENT_BYTES + 4 * (len(event.router) + len(event.request_id))
    return _EVENT_BYTES + 4 * len(getattr(event, "token_ids", ())) + 40 * len(getattr(event, "block_hashes", ()))
