"""KV that a worker takes over from others, and hands to them: the thread and the sockets of it. What is asked, and when
a transfer is over, is `transport/kv_transfers.py`'s; the engine is touched by its own thread only, in short jobs
between two steps.

    ROUTER   asks of other workers in, parts out          jobs: the engine copies a part of what it caches
    DEALER   one for each source, asks out, parts in      jobs: the engine takes a part over

Nobody waits for a transfer but the request that it is for, and those that share its prefix (`kv_followers`), and no
longer than computing would take; whatever becomes of it, they are computed from what is there. A source that is lost is
noticed when its connection breaks, one that hangs when the time is over.

With CURVE keys workers know each other by the key pair that all workers of a fleet share: who has it may ask.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import zmq
from msgspec.structs import replace
from zmq.utils.monitor import parse_monitor_message

from ..clock import Clock
from ..engines.base import EngineInfo, GenerationRequest, MovesKv
from ..errors import EngineError, ProtocolError, TransportError
from ..transport import wire
from ..transport.kv_followers import Follower, KvFollowers, Leader
from ..transport.kv_transfers import KvAsked, KvLimits, KvPull, KvSource
from ..transport.security import ClientKeys, ServerKeys, apply_client_keys, apply_server_keys, start_authenticator
from ..transport.server import Waker
from ..transport.socket_reader import NOBLOCK, has_message, set_usual_options

logger = logging.getLogger("preble.worker")

_IDLE_SECONDS = 1.0
_FRAMES_PER_TURN = 64
_SOURCES_MAX = 64  # connections to other workers that are kept
_MESSAGE_BYTES_MAX = 4 * wire.FRAME_BYTES_MAX
_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

Job = Callable[[], None]


@dataclass(slots=True)
class KvCounters:
    """What a worker has handed over, and taken over, since its start."""

    kv_asks: int = 0
    kv_asks_refused: int = 0
    kv_parts_sent: int = 0
    kv_parts_unsent: int = 0
    kv_bytes_sent: int = 0
    kv_bytes_taken: int = 0
    kv_malformed: int = 0
    pulls: int = 0
    pulls_declined: int = 0
    pulls_joined: int = 0


@dataclass(frozen=True, slots=True)
class PullResult:
    """How the pull of a request ended, "" for one that has none and found none to wait for; the fields are those of
    `messages.PullEnded`."""

    engine_id: str
    end: str
    cached_tokens: int = 0
    moved_tokens: int = 0
    moved_bytes: int = 0
    took_us: int = 0
    source_us: int = 0
    target_us: int = 0


@dataclass(slots=True)
class _RunningPull:
    """A pull that is under way, and the connection that it uses."""

    engine_id: str
    number: int
    request: GenerationRequest
    arrived_at: float
    source: _Source
    pull: KvPull | None = None  # until the engine has said what it caches
    target_us: int = 0


@dataclass(slots=True, eq=False)
class _Source:
    """A connection to another worker."""

    endpoint: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    used_at: float
    numbers: set[int] = field(default_factory=set)  # of the pulls that use it


class KvMover:
    """See the module. `engine` is what `call` runs jobs for, in its own thread; `wake` is called when there is a result
    to take. `bind`: for other workers; a free port with `*`.

    Any thread may call `pull`, `cancel` and `take_results`. Raises `TransportError` where the endpoint cannot be had.
    """

    def __init__(
        self,
        engine: MovesKv,
        info: EngineInfo,
        call: Callable[[Job], None],
        wake: Job,
        bind: str,
        *,
        epoch: int,
        keys: ServerKeys | None = None,
        limits: KvLimits | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.counters = KvCounters()
        self.limits = limits or KvLimits()
        self._engine = engine
        self._token_bytes = info.kv_token_bytes
        self._layout = info.kv_layout
        self._call = call
        self._wake_worker = wake
        self._clock = clock
        self._source = KvSource(info.kv_layout, epoch, self.limits)
        self._part_tokens = self.limits.part_tokens(info.kv_token_bytes)
        self._keys = keys
        self._inbox: deque[Job] = deque()
        self._results: deque[PullResult] = deque()
        self._running: dict[int, _RunningPull] = {}
        self._followers = KvFollowers(self.limits.followers)
        self._pulls: set[str] = set()  # asked for, and without a result yet
        self._following: set[str] = set()  # likewise; those that name no pull, or wait for another's
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._sources: dict[str, _Source] = {}
        self._stopping = self._closed = False
        self._waker = Waker()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stop_authenticator = None if keys is None else start_authenticator(self._context, _peers_of(keys))
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self._open(bind)
        except zmq.ZMQError as error:
            self._free()
            raise TransportError(f"cannot bind {bind}: {error}") from error
        self.endpoint: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._waker.descriptor, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="preble-kv", daemon=True)

    def _open(self, bind: str) -> None:
        set_usual_options(self._router, bind)
        self._router.router_mandatory = True
        self._router.maxmsgsize = _MESSAGE_BYTES_MAX
        # ZeroMQ learns what the other end has read in steps of half its mark, so only that half is sure to be there.
        self._router.sndhwm = 2 * self.limits.parts_queued
        self._router.rcvhwm = self.limits.asks
        if self._keys is not None:
            apply_server_keys(self._router, self._keys)
        self._router.bind(bind)

    # --- any thread ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve other workers, and pull, until `close`."""
        self._thread.start()

    def close(self, timeout_seconds: float = 5.0) -> None:
        """End the thread; pulls under way have no result. Idempotent; after `start` or without it."""
        if self._closed:
            return
        self._stopping = True
        self._waker.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
        if not self._thread.is_alive():
            self._free()
            with self._lock:
                self._closed = True
                self._waker.close()

    def pull(self, engine_id: str, request: GenerationRequest) -> bool:
        """Begin the pull that a request names, or have it wait for the pull of another that brings what it lacks.
        False, and nothing is begun, where as many are under way as may be; else `take_results` has a result for it, at
        the latest when the time is over that it is worth."""
        kind, most = self._pulls, self.limits.pulls
        if request.pull is None:
            kind, most = self._following, self.limits.followers
        with self._lock:
            if self._stopping or len(kind) >= most:
                self.counters.pulls_declined += 1
                return False
            kind.add(engine_id)
        self.counters.pulls += request.pull is not None
        arrived = self._clock()
        self._post(lambda: self._begin(engine_id, request, arrived))
        return True

    @property
    def is_pulling(self) -> bool:
        """Whether a request that names no pull might find one to wait for."""
        return bool(self._pulls)

    def cancel(self, engine_id: str) -> None:
        """End a pull, which has a result all the same; of one that is over it does nothing."""
        self._post(lambda: self._cancel(engine_id))

    def take_results(self) -> list[PullResult]:
        """The pulls that have ended since the last call."""
        found = []
        while self._results:
            found.append(self._results.popleft())
        return found

    def _post(self, job: Job) -> None:
        """Have something done by the thread of the sockets; after `close` nothing is."""
        with self._lock:
            if not self._closed:
                self._inbox.append(job)
                self._waker.wake()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception:
            logger.exception("no KV is moved any more")
        finally:
            with self._lock:
                self._stopping = True
            for engine_id in [*self._pulls, *self._following]:
                self._report(PullResult(engine_id, "lost"))

    def _turn(self) -> None:
        ready = dict(self._poller.poll(self._wait_ms()))
        if self._waker.descriptor in ready:
            self._waker.clear()
        for _ in range(len(self._inbox)):
            self._inbox.popleft()()
        if self._router in ready:
            self._receive(self._router, self._take_ask)
        for source in list(self._sources.values()):
            if source.socket in ready:
                self._receive(source.socket, self._take_answer)
            if source.monitor in ready:
                self._look_at(source)
        now = self._clock()
        for running in list(self._running.values()):
            if running.pull is not None:
                running.pull.expire(now)
                self._go_on(running)
        self._let_go(self._followers.expired(now), None)

    def _wait_ms(self) -> int:
        """Until something is due."""
        now = self._clock()
        due = [one.pull.deadline - now for one in self._running.values() if one.pull is not None]
        return int(1000.0 * max(0.0, min([_IDLE_SECONDS, self._followers.due - now, *due])) + 0.999)

    def _receive(self, socket: zmq.Socket[bytes], take: Callable[[list[zmq.Frame]], None]) -> None:
        for taken in range(_FRAMES_PER_TURN):
            if taken and not has_message(socket):
                return
            parts: list[Any] = socket.recv_multipart(NOBLOCK, copy=False)
            try:
                take(parts)
            except ProtocolError as error:
                self.counters.kv_malformed += 1
                logger.warning("malformed KV message: %s", error)

    # --- the source ---------------------------------------------------------------------------------------------------

    def _take_ask(self, parts: list[zmq.Frame]) -> None:
        if len(parts) != 2:
            raise ProtocolError(f"an ask is one frame, got {len(parts) - 1}")
        identity, envelope = parts[0].bytes, wire.decode(parts[1].bytes, wire.KV_ASKS)
        ask = envelope.message
        assert isinstance(ask, wire.KvAsk)
        self.counters.kv_asks += 1
        refusal = self._source.refusal(envelope)
        if refusal is not None:
            self.counters.kv_asks_refused += 1
            self._answer(identity, envelope, refusal)
            return
        end = min(len(ask.token_ids), ask.first_token + self._part_tokens)

        def export() -> None:
            began = self._clock()
            data, why = memoryview(b""), ""
            try:
                if ask.first_token < end:
                    data = self._engine.export_kv(ask.token_ids[:end], ask.namespace, ask.first_token)
            except EngineError as error:
                why = str(error)
            busy_us = _us(self._clock() - began)
            self._post(lambda: self._hand_over(identity, envelope, data, busy_us, why))

        self._call(export)

    def _hand_over(self, identity: bytes, envelope: wire.Envelope, data: memoryview, busy_us: int, why: str) -> None:
        """The engine has copied a part, or says why not."""
        self._source.answered()
        assert isinstance(envelope.message, wire.KvAsk)
        if why:
            self._answer(identity, envelope, wire.KvRefused("engine", why))
            return
        tokens = len(data) // self._token_bytes
        if self._answer(identity, envelope, wire.KvPart(envelope.message.first_token, tokens, busy_us), data):
            self.counters.kv_parts_sent += 1
            self.counters.kv_bytes_sent += len(data)

    def _answer(
        self, identity: bytes, envelope: wire.Envelope, message: wire.KvPart | wire.KvRefused, *data: memoryview
    ) -> bool:
        """Send an answer with the ask's header. False where its asker is gone or takes no more: it is dropped."""
        frame = wire.encode(message, epoch=envelope.epoch, session=envelope.session, seq=envelope.seq)
        try:
            self._router.send_multipart([identity, frame, *data], NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            self.counters.kv_parts_unsent += 1
            logger.debug("an answer was dropped: %s", error)
            return False
        return True

    # --- who pulls ----------------------------------------------------------------------------------------------------

    def _begin(self, engine_id: str, request: GenerationRequest, arrived_at: float) -> None:
        if self._followers.join(engine_id, request, self._leaders(), arrived_at):
            self._count_among(self._following, engine_id)
            self.counters.pulls_joined += 1
            return
        if request.pull is None:
            self._report(PullResult(engine_id, ""))
            return
        source = self._source_at(request.pull.endpoint)
        if source is None:
            self._give_up(engine_id, arrived_at)
            return
        running = _RunningPull(engine_id, next(self._numbers), request, arrived_at, source)
        self._running[running.number] = running
        source.numbers.add(running.number)

        def look() -> None:
            cached = self._engine.cached_tokens(request.token_ids, request.namespace)
            self._post(lambda: self._looked(running, cached))

        self._call(look)

    def _leaders(self) -> Iterator[Leader]:
        for one in self._running.values():
            request, cached = one.request, 0 if one.pull is None else one.pull.cached_tokens
            if request.pull is not None:
                yield Leader(one.number, request.pull, request.token_ids, request.namespace, cached)

    def _let_go(self, followers: list[Follower], pull: KvPull | None) -> None:
        """Report what those who have waited find here."""
        for one in followers:
            cached = 0 if pull is None else min(pull.cached_tokens, one.wanted_tokens)
            took_us = _us(self._clock() - one.arrived_at)
            self._report(PullResult(one.engine_id, "joined", cached, took_us=took_us))

    def _looked(self, running: _RunningPull, cached_tokens: int) -> None:
        """The engine says what it caches: what it lacks is asked for."""
        request = running.request
        if running.number not in self._running or request.pull is None:
            return
        arguments = request.token_ids, cached_tokens, self._token_bytes, self.limits, running.arrived_at
        running.pull = KvPull(request.pull, *arguments)
        self._let_go(self._followers.progressed(running.number, cached_tokens), running.pull)
        self._go_on(running)

    def _go_on(self, running: _RunningPull) -> None:
        """Ask what is to be asked now, or report the end."""
        pull = running.pull
        if pull is None or running.number not in self._running:
            return
        for asked in pull.asks(self.limits.parts_queued - self._ahead_at(running.source)):
            self._ask(running, asked)
        if pull.end:
            self._finish(running, pull.end)

    def _ahead_at(self, source: _Source) -> int:
        """Parts that it was asked for and that are not taken over."""
        pulls = (self._running[number].pull for number in source.numbers)
        return sum(pull.ahead for pull in pulls if pull is not None)

    def _ask(self, running: _RunningPull, asked: KvAsked) -> None:
        request = running.request
        assert request.pull is not None
        ask = wire.KvAsk(self._layout, request.token_ids[: asked.end], asked.first, request.namespace)
        frame = wire.encode(ask, epoch=request.pull.epoch, session=running.number, seq=asked.number)
        try:
            running.source.socket.send(frame, NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("an ask was not sent: %s", error)
            if running.pull is not None:
                running.pull.lose()

    def _take_answer(self, parts: list[zmq.Frame]) -> None:
        envelope = wire.decode(parts[0].bytes, wire.KV_ANSWERS)
        message = envelope.message
        running = self._running.get(envelope.session)
        if running is None or running.pull is None:
            return
        if isinstance(message, wire.KvRefused):
            running.pull.refused(envelope.seq)
        elif isinstance(message, wire.KvPart):
            if len(parts) != 2:
                raise ProtocolError(f"a part is two frames, got {len(parts)}")
            self._take_part(running, running.pull, envelope.seq, message, parts[1].buffer)
        self._go_on(running)

    def _take_part(self, running: _RunningPull, pull: KvPull, number: int, part: wire.KvPart, data: memoryview) -> None:
        taken = pull.take(number, part, data.nbytes)
        if taken is None:
            return
        self.counters.kv_bytes_taken += data.nbytes
        request = running.request

        def take_over() -> None:
            began = self._clock()
            try:
                cached = self._engine.import_kv(request.token_ids[: taken.end], request.namespace, taken.first, data)
            except EngineError as error:
                logger.warning("a part was not taken over: %s", error)
                cached = 0
            busy_us = _us(self._clock() - began)
            self._post(lambda: self._taken_over(running, taken, cached, busy_us))

        self._call(take_over)

    def _taken_over(self, running: _RunningPull, part: KvAsked, cached_tokens: int, busy_us: int) -> None:
        """The engine has a part, or not."""
        running.target_us += busy_us
        if running.pull is not None:
            running.pull.taken_over(part, cached_tokens)
            self._let_go(self._followers.progressed(running.number, running.pull.cached_tokens), running.pull)
            self._go_on(running)

    def _cancel(self, engine_id: str) -> None:
        self._let_go(self._followers.cancelled(engine_id), None)
        for running in list(self._running.values()):
            if running.engine_id == engine_id:
                able = self._followers.able_alone(running.number, self._clock())
                self._count_among(self._pulls, *(one.engine_id for one in able))  # before the place is free for others
                self._finish(running, "cancelled")
                for one in able:
                    self._begin_anew(one)

    def _begin_anew(self, one: Follower) -> None:
        """Begin the pull of a request that has waited for another's, or have it wait once more, for the time left."""
        now, pull = self._clock(), one.request.pull
        assert pull is not None
        left = replace(pull, wait_us=_us(one.deadline - now))
        self._begin(one.engine_id, replace(one.request, pull=left), now)

    def _finish(self, running: _RunningPull, end: str) -> None:
        """Report a result; what comes later counts for nothing."""
        del self._running[running.number]
        running.source.numbers.discard(running.number)
        pull = running.pull
        self._let_go(self._followers.ended(running.number), pull)
        moved = 0 if pull is None else pull.moved_tokens
        self._report(
            PullResult(
                running.engine_id,
                end,
                0 if pull is None else pull.cached_tokens,
                moved,
                moved * self._token_bytes,
                _us(self._clock() - running.arrived_at),
                0 if pull is None else pull.source_us,
                running.target_us,
            )
        )

    def _give_up(self, engine_id: str, arrived_at: float) -> None:
        """There is nobody to ask."""
        self._report(PullResult(engine_id, "lost", took_us=_us(self._clock() - arrived_at)))

    def _count_among(self, kind: set[str], *engine_ids: str) -> None:
        """Count requests as pulls, or as those that follow one."""
        with self._lock:
            for other in (self._pulls, self._following):
                other.difference_update(engine_ids)
            kind.update(engine_ids)

    def _report(self, result: PullResult) -> None:
        with self._lock:
            self._pulls.discard(result.engine_id)
            self._following.discard(result.engine_id)
        self._results.append(result)
        self._wake_worker()

    # --- connections --------------------------------------------------------------------------------------------------

    def _source_at(self, endpoint: str) -> _Source | None:
        """The connection to another worker; over the bound the longest unused one goes. None where none can be had."""
        found = self._sources.get(endpoint)
        if found is None:
            if endpoint.partition("://")[0] != self.endpoint.partition("://")[0]:
                return None  # nobody's that this worker could know
            if len(self._sources) >= _SOURCES_MAX and not self._drop_unused():
                return None
            try:
                found = self._connect(endpoint)
            except zmq.ZMQError as error:
                logger.warning("cannot connect to %s: %s", endpoint, error)
                return None
            self._sources[endpoint] = found
        found.used_at = self._clock()
        return found

    def _connect(self, endpoint: str) -> _Source:
        socket = self._context.socket(zmq.DEALER)
        try:
            set_usual_options(socket, endpoint)
            socket.maxmsgsize = _MESSAGE_BYTES_MAX
            socket.rcvhwm = self.limits.parts_queued
            socket.sndhwm = self.limits.pulls * self.limits.parts_queued
            if self._keys is not None:
                apply_client_keys(socket, ClientKeys(self._keys.public, self._keys.secret, self._keys.public))
            monitor = socket.get_monitor_socket(_BROKEN)
            socket.connect(endpoint)
        except zmq.ZMQError:
            socket.disable_monitor()
            socket.close(linger=0)
            raise
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        return _Source(endpoint, socket, monitor, self._clock())

    def _look_at(self, source: _Source) -> None:
        """Where a connection has broken its pulls are over; the next one makes another."""
        broken = False
        while has_message(source.monitor):
            broken |= bool(int(parse_monitor_message(source.monitor.recv_multipart(NOBLOCK))["event"]) & _BROKEN)
        if broken:
            for number in list(source.numbers):
                self._finish(self._running[number], "lost")
            self._disconnect(source)

    def _drop_unused(self) -> bool:
        unused = [source for source in self._sources.values() if not source.numbers]
        if unused:
            self._disconnect(min(unused, key=lambda source: source.used_at))
        return bool(unused)

    def _disconnect(self, source: _Source) -> None:
        del self._sources[source.endpoint]
        self._poller.unregister(source.socket)
        self._poller.unregister(source.monitor)
        source.socket.disable_monitor()
        source.monitor.close(linger=0)
        source.socket.close(linger=0)

    def _free(self) -> None:
        for source in list(self._sources.values()):
            self._disconnect(source)
        self._router.close(linger=0)
        if self._stop_authenticator is not None:
            self._stop_authenticator()
        self._context.destroy(linger=0)


def _peers_of(keys: ServerKeys) -> ServerKeys:
    """The keys with which a worker lets in other workers: those who have its own pair, and no router."""
    return ServerKeys(keys.public, keys.secret, frozenset({keys.public}))


def _us(seconds: float) -> int:
    return max(0, int(seconds * 1e6))
