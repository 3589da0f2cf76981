"""Following the event sockets of one rank of a running engine. Owns the SUB and replay sockets, gaps, restarts and the
bounds on what waits; frames are `kv_event_codec`'s, and what the events mean is `preble._kv_index.decode`'s and the
scheduler's.

Every payload reaches the listener once and in order, or the listener is asked to forget:

    a gap                     what is missing is asked for again; if that is not to be had, or there is no replay
                              socket: `on_resync`, and on with the oldest that is
    a replay cut short        asked again from where it broke off
    lost, and nothing after   found by the next audit: a replay of the newest batch and what follows, every
                              `audit_seconds` and after a broken connection
    the publisher restarted   a number falls back at a later time, or the newest batch we know is another one in a
                              replay: `on_resync`, and everything from its first batch on
    a batch twice, or late    dropped

All of it is counted. To follow an engine that has run for a while, everything it still keeps is asked for at the start.
Without a replay socket that is not possible, and the start is what comes next.
Everything here runs on one asyncio loop; nothing is thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from ...errors import ProtocolError, TransportError
from ...types import check_fields
from ..event_stream import EventCursor
from ..socket_reader import NOBLOCK, FrameReader, set_usual_options
from ..tasks import running, within
from .kv_event_codec import PAYLOAD_MAX_BYTES, LoadReport, decode_load, published, replay_request, replayed, time_of
from .server_info import EventSource

logger = logging.getLogger("preble.transport")

_IN_VAIN_MAX = 4  # replays in a row that break off, or stay out, and bring nothing, before we give up
_ALL, _BROKEN = "that is all there is", "it broke off"  # how a replay ends


@dataclass(frozen=True, slots=True)
class FeedConfig:
    """Times in seconds, and bounds. Raises `InvalidConfig` naming the field.

    `replay_seconds`: how long a replay may say nothing. `max_held_batches` wait behind a gap, `queue_batches` in the
    socket; at either bound they are dropped, which is a gap and asked for again. A replay is left after
    `max_replay_batches` and gone on with in the next one.
    """

    replay_seconds: float = 5.0
    audit_seconds: float = 10.0
    max_held_batches: int = 1024
    queue_batches: int = 10_000
    max_replay_batches: int = 100_000

    def __post_init__(self) -> None:
        check_fields(self, "be positive", *self.__slots__)


@dataclass(slots=True)
class FeedCounters:
    """What one rank's sockets have brought."""

    batches: int = 0
    duplicates: int = 0
    gaps: int = 0
    replays: int = 0
    replays_cut: int = 0
    replays_unanswered: int = 0
    resyncs: int = 0
    restarts: int = 0
    malformed_frames: int = 0
    load_frames: int = 0


@dataclass(slots=True)
class _Replay:
    """One that is under way, from number `start` on. `anchor` is the batch of that number, where we have it; `life`
    counts the publisher's restarts before it, `taken` what has come, the last of it at `came_at` of the loop's time."""

    start: int
    anchor: bytes | None
    life: int
    came_at: float
    taken: int = 0


class FeedListener(Protocol):
    """What a feed reports to its owner. Called on the loop; must not block."""

    def on_payload(self, payload: bytes) -> None:
        """The next batch as the engine wrote it, in order and exactly once."""

    def on_resync(self) -> None:
        """Events are lost for good, or the engine was restarted: forget the estimate of its cache."""

    def on_load(self, report: LoadReport) -> None:
        """SGLang's load, as often as it changes; who asks for it elsewhere need not listen."""
        return


class EventFeed:
    """The event sockets of one rank. `next_seq` 0 begins with all that the publisher keeps; a later session of the same
    life of the engine goes on with the `next_seq` of the one before."""

    def __init__(
        self,
        source: EventSource,
        listener: FeedListener,
        config: FeedConfig | None = None,
        *,
        context: zmq.asyncio.Context,
        next_seq: int = 0,
        counters: FeedCounters | None = None,
    ) -> None:
        self.source = source
        self.counters = counters or FeedCounters()
        self._listener = listener
        self._config = config or FeedConfig()
        self._context = context
        self._cursor: EventCursor[bytes] = EventCursor(next_seq, self._config.max_held_batches)
        self._has_estimate = next_seq > 0  # somebody holds estimates that came from this stream
        self._newest: bytes | None = None  # the batch before `next_seq`: the anchor of every replay
        self._newest_time = float("-inf")
        self._wanted = asyncio.Event()
        self._caught_up = asyncio.Event()
        self._is_cut_off = False  # the connection was broken, and is not back

    @property
    def next_seq(self) -> int:
        """Number of the batch to come next."""
        return self._cursor.next_seq

    async def caught_up(self) -> None:
        """Wait until what the publisher kept has come, or cannot be had."""
        await self._caught_up.wait()

    async def run(self) -> None:
        """Follow the sockets until cancelled. Call once."""
        loops = [self._live_loop()]
        if self.source.replay_endpoint:
            loops.append(self._replay_loop())
        else:
            self._caught_up.set()
        if self.source.load_endpoint:
            loops.append(self._load_loop())
        async with running(*loops) as tasks:
            await asyncio.gather(*tasks)

    def _plain_socket(self, kind: int) -> zmq.Socket[bytes]:
        """One that is not asyncio's, see `socket_reader`. Who destroys the context closes it with the others."""
        plain: Any = zmq.Socket
        return cast("zmq.Socket[bytes]", self._context.socket(kind, socket_class=plain))

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._plain_socket(kind)
        set_usual_options(socket, endpoint)
        socket.rcvhwm = self._config.queue_batches
        socket.maxmsgsize = 2 * PAYLOAD_MAX_BYTES
        return socket

    def _connect(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise TransportError(f"{endpoint!r} is no endpoint to connect to: {error}") from error

    # --- live events --------------------------------------------------------------------------------------------------

    async def _live_loop(self) -> None:
        socket = self._socket(zmq.SUB, self.source.endpoint)
        monitor = self._monitor_of(socket)
        try:
            socket.subscribe(self.source.topic.encode())
            self._connect(socket, self.source.endpoint)
            await _read((socket, self._take_live), (monitor, self._take_monitor))
        finally:
            # Nothing is waited for here: who is cancelled twice would leave the sockets open.
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)

    def _monitor_of(self, socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        """A plain socket that receives when a connection comes and goes."""
        address = f"inproc://feed-{socket.fileno()}"
        socket.monitor(address, zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECTED)
        monitor = self._plain_socket(zmq.PAIR)
        monitor.connect(address)
        return monitor

    def _take_monitor(self, parts: list[bytes]) -> str:
        """A connection that was broken may lead to another life of the publisher, or have lost what it published."""
        if int(parse_monitor_message(parts)["event"]) == zmq.EVENT_DISCONNECTED:
            self._is_cut_off = True
        elif self._is_cut_off:
            self._is_cut_off = False
            self._wanted.set()
            if not self.source.replay_endpoint:
                self._forget()
                self._cursor.skip_to(0)
                self._newest = None
        return ""

    def _take_live(self, parts: list[bytes]) -> str:
        try:
            seq, payload = published(parts)
        except ProtocolError:
            self.counters.malformed_frames += 1
            return ""
        if seq < self.next_seq and time_of(payload) > self._newest_time:
            self._restarted()
        if self._newest is None and not self.source.replay_endpoint and not self._has_estimate:
            self._cursor.skip_to(seq)  # nothing came before, for us
        had_gap = self._cursor.has_gap
        self._offer(seq, payload)
        if self._cursor.has_gap and not had_gap:
            self.counters.gaps += self._has_estimate
            self._close_gap()
        return ""

    def _offer(self, seq: int, payload: bytes) -> None:
        self.counters.duplicates += self._cursor.has_had(seq)
        self._apply(self._cursor.offer(seq, payload, len(payload)))

    def _apply(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            self.counters.batches += 1
            self._has_estimate = True
            self._listener.on_payload(payload)
        if payloads:
            self._newest = payloads[-1]
            self._newest_time = time_of(self._newest)

    def _close_gap(self) -> None:
        if self.source.replay_endpoint:
            self._wanted.set()
        else:
            self._give_up()

    def _give_up(self) -> None:
        """What is missing cannot be had: forget, and go on after it."""
        self._forget()
        self._apply(self._cursor.skip_gap())

    def _forget(self) -> None:
        if self._has_estimate:
            self.counters.resyncs += 1
            self._listener.on_resync()
        self._has_estimate = False

    def _restarted(self) -> None:
        """Another life of the publisher: nothing of the earlier one is true, and its numbers begin again."""
        logger.info("the publisher at %s was restarted", self.source.endpoint)
        self.counters.restarts += 1
        self._forget()
        self._cursor.skip_to(0)
        self._newest, self._newest_time = None, float("-inf")
        self._wanted.set()

    # --- replay -------------------------------------------------------------------------------------------------------

    async def _replay_loop(self) -> None:
        in_vain = 0  # replays in a row that brought nothing new
        while True:
            self._wanted.clear()
            before, had_gap = self.next_seq, self._cursor.has_gap
            ended = await self._replay()
            if self._cursor.has_gap:
                in_vain = in_vain + 1 if self.next_seq == before else 0
                if had_gap and in_vain and (ended or in_vain >= _IN_VAIN_MAX):
                    self._give_up()
                    in_vain = 0
                self._wanted.set()  # a gap that came up meanwhile may be behind what was asked for
            elif ended or self.next_seq == before:
                self._caught_up.set()
            else:
                self._wanted.set()  # it broke off
            with contextlib.suppress(asyncio.TimeoutError):
                await within(self._config.audit_seconds, self._wanted.wait())

    async def _replay(self) -> bool:
        """Ask for the newest batch we have and all after it, and take what comes. True if that is all there is."""
        self.counters.replays += 1
        start = self.next_seq - (self._newest is not None)
        replay = _Replay(start, self._newest, self.counters.restarts, asyncio.get_running_loop().time())
        # A socket of its own, so that the rest of an earlier replay is never taken for this one.
        socket = self._socket(zmq.DEALER, self.source.replay_endpoint)
        try:
            self._connect(socket, self.source.replay_endpoint)
            socket.send_multipart(replay_request(start), NOBLOCK)
            reader = FrameReader(socket, lambda parts: self._take_reply(replay, parts))
            try:
                return await self._until_silent(reader.ended, replay) == _ALL
            finally:
                reader.stop()
        except asyncio.TimeoutError:
            if replay.taken:
                self.counters.replays_cut += 1
            else:
                self.counters.replays_unanswered += 1
                self._caught_up.set()  # nobody answers
            logger.warning("the replay at %s stopped after %d batches", self.source.replay_endpoint, replay.taken)
        finally:
            socket.close(linger=0)
        return False

    async def _until_silent(self, reading: asyncio.Future[str], replay: _Replay) -> str:
        """How a replay ended. Raises `asyncio.TimeoutError` where nothing of it has come for `replay_seconds`."""
        now = asyncio.get_running_loop().time
        while (left := replay.came_at + self._config.replay_seconds - now()) > 0.0:
            await asyncio.wait([reading], timeout=left)
            if reading.done():
                return reading.result()
        raise asyncio.TimeoutError

    def _take_reply(self, replay: _Replay, parts: list[bytes]) -> str:
        """Take one message of a replay: "", or how it has ended. What is no batch is counted and passed over."""
        try:
            reply = replayed(parts)
        except ProtocolError:
            self.counters.malformed_frames += 1
            return ""
        if self.counters.restarts != replay.life:
            return _BROKEN  # what was asked for is of an earlier life
        if reply is None:
            if replay.taken == 0 and replay.anchor is not None and replay.anchor is self._newest:
                self._restarted()  # who has published less than we have received is another one
            elif replay.taken and self._cursor.has_gap:
                self.counters.replays_cut += 1  # some of its middle was dropped
            return _ALL
        if not self._take_replayed(*reply, replay.start, replay.anchor, first=replay.taken == 0):
            return _BROKEN
        replay.taken += 1
        replay.came_at = asyncio.get_running_loop().time()
        return _BROKEN if replay.taken >= self._config.max_replay_batches else ""

    def _take_replayed(self, seq: int, payload: bytes, start: int, anchor: bytes | None, *, first: bool) -> bool:
        """Take one batch of a replay; False if it shows that the publisher is another one."""
        if seq == start and anchor is not None:
            if payload != anchor:
                self._restarted()
                return False
            return True
        if first and seq > self.next_seq:
            # The first that comes is the oldest that is kept, and what we need is older. A later jump is a cut.
            self.counters.gaps += self._has_estimate
            self._forget()
            self._apply(self._cursor.skip_gap(seq))
        self._offer(seq, payload)
        return True

    # --- load ---------------------------------------------------------------------------------------------------------

    async def _load_loop(self) -> None:
        socket = self._socket(zmq.SUB, self.source.load_endpoint)
        try:
            socket.subscribe(self.source.load_topic.encode())
            self._connect(socket, self.source.load_endpoint)
            await _read((socket, self._take_load))
        finally:
            socket.close(linger=0)

    def _take_load(self, parts: list[bytes]) -> str:
        try:
            report = decode_load(parts[-1])
        except ProtocolError as error:
            self.counters.malformed_frames += 1
            logger.debug("load of %s: %s", self.source.load_endpoint, error)
            return ""
        self.counters.load_frames += 1
        self._listener.on_load(report)
        return ""


async def _read(*sources: tuple[zmq.Socket[bytes], Callable[[list[bytes]], str]]) -> None:
    """Hand on what comes from each socket, until cancelled. Raises what one of them does, or who takes it."""
    readers = [FrameReader(socket, take) for socket, take in sources]
    try:
        await asyncio.gather(*(reader.ended for reader in readers))
    finally:
        for reader in readers:
            reader.stop()
