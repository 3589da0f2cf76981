"""The worker process: one engine served to many routers. Owns the loop between transport and engine, and `preble
worker`.

    routers <-> transport.server.Server <-> Worker <-> EngineThread <-> engine

The engine's thread serves the routers between two steps, `run`'s while one is long (`engine_thread` says how).

A request that names a pull waits beside the engine until it is over (`kv_mover`), and is computed whatever came of it.

At its bounds: over `max_requests` live requests, a new one is answered "queue_full"; a router that does not read loses
its session (`transport.outbox`), never anybody's time. A router that goes away takes its requests along: they are
aborted. What becomes of each request is reported to all routers, so that their bookings are of the whole fleet. SIGTERM
drains: no new requests, the running ones finish (at most `drain_seconds`), routers are sent Draining, exit code 0.

`preble worker` prints one line `READY <endpoint> id=... epoch=... events=...` when routers may connect.
Exit codes: 0 drained, 1 the engine or the transport failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from msgspec.structs import replace

from ..clock import Clock
from ..engines.base import Engine, EngineInfo, GenerationRequest, MovesKv, OutputChunk
from ..errors import EngineError, InvalidConfig
from ..launch.processes import end_with_stdin
from ..transport import wire
from ..transport.kv_transfers import KvLimits
from ..transport.security import ServerKeys, check_bind, load_server_keys
from ..transport.server import Request, Server, ServerConfig, Session, SessionEnded, bind_beside
from ..transport.socket_reader import is_inproc
from ..types import BOTH, ROLES, RequestEnded, RequestPlaced, RequestPrefilled, Role, check_fields, check_role
from . import engine_options
from .engine_thread import EngineThread, Output, Refusal
from .kv_mover import KvMover, PullResult

logger = logging.getLogger("preble.worker")

_WILDCARDS = ("0.0.0.0", "*", "[::]")
_LAST_SECONDS = 15.0  # for the engine's last step and the sockets, after a drain
_RESULTS = ("stop", "length")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """A worker's name and bounds. `worker_id` "" takes host:port of the endpoint. `drain_seconds` bounds a drain.
    `kv_bind`: where other workers may ask for KV, if the engine can move it; "" takes a free port beside the endpoint,
    "none" lets nobody ask and asks nobody. `kv`: bounds of that. `role`: `WorkerSpec`'s; who does not do both must be
    able to move KV.
    """

    server: ServerConfig
    worker_id: str = ""
    max_requests: int = 4096
    drain_seconds: float = 30.0
    kv_bind: str = ""
    kv: KvLimits = field(default_factory=KvLimits)
    role: Role = BOTH

    def __post_init__(self) -> None:
        check_role("WorkerConfig.role", self.role)
        check_fields(self, "be positive", "max_requests")
        check_fields(self, "not be negative", "drain_seconds")


@dataclass(slots=True)
class WorkerCounters:
    """What happened to requests in this worker, since its start."""

    submitted: int = 0
    finished: int = 0
    refused_queue_full: int = 0
    refused_draining: int = 0
    refused_duplicate: int = 0
    refused_by_engine: int = 0
    aborts: int = 0
    aborted_with_session: int = 0
    orphan_chunks: int = 0


@dataclass(slots=True)
class _Ticket:
    """Whose a live request is, and what is reported of it to routers: `reported_at` is the first event batch that may
    say so. `tokens_end`: the output position where its tokens end so far, `offset` where they began."""

    session: Session
    placed: RequestPlaced
    reported_at: int
    offset: int
    tokens_end: int
    prefilled: RequestPrefilled | None = None
    pulling: GenerationRequest | None = None  # waits for its pull, with the engine's id
    aborted: bool = False  # while it did

    @property
    def request_id(self) -> str:
        """Its name in the session."""
        return self.placed.request_id


class Worker:
    """One engine behind one server; `run` serves until `drain`. `epoch` must differ at every start.

    Raises `InsecureBind` or `TransportError` when the endpoint cannot be had. `run` belongs to one thread;
    meanwhile only `drain` may be called.
    """

    def __init__(
        self,
        engine: Engine,
        config: WorkerConfig,
        *,
        epoch: int,
        keys: ServerKeys | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        worker_id = config.worker_id or _default_id(config.server.bind)
        self.config = config
        self.counters = WorkerCounters()
        self.server = Server(config.server, _welcome(worker_id, engine.info), epoch=epoch, keys=keys, clock=clock)
        if not config.worker_id:
            self.server.welcome = replace(self.server.welcome, worker_id=_default_id(self.server.endpoint))
        self.engine = EngineThread(engine, self._serve, self._pass_on, self.server.waker.wake, clock=clock)
        self.kv_mover = self._open_kv(engine, epoch, keys, clock)
        self.server.welcome = replace(self.server.welcome, role=config.role)
        if config.role != BOTH and self.kv_mover is None:
            self.server.close()
            raise InvalidConfig(f"role {config.role}: engine {engine.info.engine} moves no KV here, so it must do both")
        self._clock = clock
        self._live: dict[str, _Ticket] = {}  # engine's request id -> whose it is
        self._sessions_opened = 0
        self._drain_asked = False
        self._draining_since: float | None = None
        self._error: Exception | None = None  # of the transport

    def _open_kv(self, engine: Engine, epoch: int, keys: ServerKeys | None, clock: Clock) -> KvMover | None:
        """What moves KV, where the engine can and may; the handshake says where."""
        bind, info = self.config.kv_bind, engine.info
        if not isinstance(engine, MovesKv) or not info.kv_layout or bind == "none" or is_inproc(self.server.endpoint):
            return None
        if bind:
            check_bind(bind, has_keys=keys is not None, insecure=self.config.server.insecure)
        try:
            found = KvMover(
                engine,
                info,
                self.engine.call,
                self.server.waker.wake,
                bind or bind_beside(self.server.endpoint, ".kv"),
                epoch=epoch,
                keys=keys,
                limits=self.config.kv,
                clock=clock,
            )
        except BaseException:
            self.server.close()
            raise
        self.server.welcome = replace(self.server.welcome, kv_endpoint=found.endpoint)
        return found

    @property
    def worker_id(self) -> str:
        """The name that routers see."""
        return self.server.welcome.worker_id

    @property
    def live_requests(self) -> int:
        """Requests taken and not yet ended."""
        return len(self._live)

    def drain(self) -> None:
        """Ask `run` to end when the running requests have; twice: at once. Any thread or signal handler may call it."""
        if self._drain_asked:
            self._draining_since = -float("inf")
        self._drain_asked = True

    def run(self) -> None:
        """Serve until drained. Raises `EngineError` when the engine fails, after closing the routers' sessions."""
        self.engine.start()
        if self.kv_mover is not None:
            self.kv_mover.start()
        try:
            self.engine.stand_in()
            if self._error is not None:
                raise self._error
            if self.engine.failure is not None:
                self._fail()
        finally:
            if self.kv_mover is not None:
                self.kv_mover.close()
            if not self.engine.stop():
                logger.error("the engine's step does not end; leaving it behind")
            self.server.close()

    # --- from routers -------------------------------------------------------------------------------------------------

    def _serve(self, wait_seconds: float) -> bool:
        """Take what routers have sent, waiting for it if need be; False when it is time to end."""
        try:
            for session, request in self.server.poll(wait_seconds):
                self._take(session, request)
            if self.kv_mover is not None:
                self._end_pulls(self.kv_mover)
            self._report_again()
            self.server.publish_reports()
            return self._error is None and not self._done()
        except Exception as error:  # noqa: BLE001 - whatever it is, `run` raises it
            self._error = error
            return False

    def _take(self, session: Session, request: Request) -> None:
        if isinstance(request, GenerationRequest):
            self._submit(session, request)
        elif isinstance(request, wire.Abort):
            engine_id = _engine_id(session, request.request_id)
            ticket = self._live.get(engine_id)
            if ticket is not None:
                self.counters.aborts += 1
                self._abort(engine_id, ticket)
        elif isinstance(request, wire.Ping):
            self.server.send(session, self._pong(request.nonce))
        elif isinstance(request, SessionEnded):
            self._abort_all(session)

    def _submit(self, session: Session, request: GenerationRequest) -> None:
        if not session.open:
            return
        engine_id = _engine_id(session, request.request_id)
        refusal = self._refusal(engine_id)
        if refusal is not None:
            self.server.send(session, wire.Rejected(request.request_id, *refusal))
            return
        self.counters.submitted += 1
        placed, offset = _placed(session.router_id, request), request.output_offset
        self._live[engine_id] = _Ticket(session, placed, self.server.replay.next_seq, offset, offset)
        self.server.report(placed)
        request = replace(request, request_id=engine_id)
        if request.pull is None and not (self.kv_mover is not None and self.kv_mover.is_pulling):
            self.engine.submit(request)
        else:
            self._pull(engine_id, self._live[engine_id], request)

    def _pull(self, engine_id: str, ticket: _Ticket, request: GenerationRequest) -> None:
        """Let a request wait for its pull, or one that brings what it lacks; where none can be begun it is over."""
        ticket.pulling = request
        if self.kv_mover is None or not self.kv_mover.pull(engine_id, request):
            self._end_pull(ticket, PullResult(engine_id, "" if request.pull is None else "refused"))

    def _end_pulls(self, mover: KvMover) -> None:
        for result in mover.take_results():
            ticket = self._live.get(result.engine_id)
            if ticket is not None:
                self._end_pull(ticket, result)

    def _end_pull(self, ticket: _Ticket, result: PullResult) -> None:
        """A pull is over: report what came of it, and have the request computed."""
        request, ticket.pulling = ticket.pulling, None
        assert request is not None, "a request has one pull"
        if result.end:
            said = asdict(result)
            del said["engine_id"]
            self.server.send(ticket.session, wire.PullEnded(ticket.request_id, **said))
        self.engine.submit(request)
        if ticket.aborted:
            self.engine.abort(request.request_id)

    def _abort(self, engine_id: str, ticket: _Ticket) -> None:
        """Have the engine end a request, after its pull, which ends now."""
        if ticket.pulling is None:
            self.engine.abort(engine_id)
            return
        ticket.aborted = True
        if self.kv_mover is not None:
            self.kv_mover.cancel(engine_id)

    def _refusal(self, engine_id: str) -> tuple[str, str] | None:
        """(code, reason) why a request cannot be taken now, or None."""
        if self._draining_since is not None:
            self.counters.refused_draining += 1
            return "draining", f"worker {self.worker_id} is draining"
        if engine_id in self._live:
            self.counters.refused_duplicate += 1
            return "duplicate", "a request of that id is live in this session"
        if len(self._live) >= self.config.max_requests:
            self.counters.refused_queue_full += 1
            return "queue_full", f"worker {self.worker_id} has {len(self._live)} live requests, its bound"
        return None

    def _abort_all(self, session: Session) -> None:
        """The router is gone. The requests stay live, and count against the bound, until the engine has ended them."""
        for engine_id, ticket in self._live.items():
            if ticket.session is session:
                self.counters.aborted_with_session += 1
                self._abort(engine_id, ticket)

    def _pong(self, nonce: int) -> wire.Pong:
        return wire.Pong(
            nonce,
            self.server.replay.next_seq,
            step_ms=int(self.engine.step_seconds(self._clock()) * 1000),
            draining=self._draining_since is not None,
            **asdict(self.engine.load),
        )

    # --- from the engine ----------------------------------------------------------------------------------------------

    def _pass_on(self, output: Output) -> None:
        try:
            if output.events:
                self.server.publish(output.events)
            for refusal in output.refusals:
                self._pass_refusal(refusal)
            self._pass_chunks(output.chunks)
            self.server.publish_reports()
        except Exception as error:  # noqa: BLE001 - whatever it is, `run` raises it
            self._error = error

    def _pass_refusal(self, refusal: Refusal) -> None:
        ticket = self._live.pop(refusal.request_id, None)
        self.counters.refused_by_engine += 1
        if ticket is not None:
            self.server.report(RequestEnded(ticket.session.router_id, ticket.request_id))
            self.server.send(ticket.session, wire.Rejected(ticket.request_id, refusal.code, refusal.text))

    def _pass_chunks(self, chunks: Sequence[OutputChunk]) -> None:
        """Send each router what a step made for its requests."""
        lots: dict[Session, list[OutputChunk]] = {}
        news = [(ticket, chunk) for chunk in chunks if (ticket := self._sort_out(chunk, lots)) is not None]
        for session, lot in lots.items():
            self.server.send_chunks(session, lot)
        for ticket, chunk in news:
            self._report_progress(ticket, chunk)  # nobody waits for it as for a token

    def _sort_out(self, chunk: OutputChunk, lots: dict[Session, list[OutputChunk]]) -> _Ticket | None:
        """Put a chunk with those of its router, under its name there; returns whose it is, if anybody's."""
        ticket = self._live.get(chunk.request_id)
        if ticket is not None and chunk.finish_reason is not None:
            # Before the router can know: it may send the next request at once, and there is room for it.
            del self._live[chunk.request_id]
            self.counters.finished += 1
        if ticket is None or not ticket.session.open:
            self.counters.orphan_chunks += 1
        else:
            event_seq = self.server.replay.next_seq
            rest = chunk.cached_tokens, chunk.finish_reason, chunk.error, event_seq, chunk.logprobs
            outgoing = OutputChunk(ticket.request_id, chunk.index, chunk.token_ids, *rest)
            lots.setdefault(ticket.session, []).append(outgoing)
        return ticket

    # --- to the other routers -----------------------------------------------------------------------------------------

    def _report_again(self) -> None:
        """Report requests older than what a replay has kept, for routers that have come. The others know them."""
        opened, self._sessions_opened = self._sessions_opened, self.server.counters.sessions_opened
        if opened == self._sessions_opened or not self.server.replay.first_seq:
            return
        for ticket in self._live.values():
            if ticket.reported_at < self.server.replay.first_seq:
                ticket.reported_at = self.server.replay.next_seq
                self.server.report(ticket.placed)
                if ticket.prefilled is not None:
                    self.server.report(ticket.prefilled)

    def _report_progress(self, ticket: _Ticket, chunk: OutputChunk) -> None:
        """Report a request's first token and its end. One that was aborted or failed ends without a result."""
        router_id = ticket.session.router_id
        if chunk.token_ids:
            ticket.tokens_end = chunk.index + len(chunk.token_ids)
            if ticket.prefilled is None:
                ticket.prefilled = RequestPrefilled(router_id, ticket.request_id, _cached_of(ticket, chunk))
                self.server.report(ticket.prefilled)
        if chunk.finish_reason is not None:
            output_tokens = ticket.tokens_end - ticket.offset if chunk.finish_reason in _RESULTS else None
            self.server.report(RequestEnded(router_id, ticket.request_id, output_tokens))

    # --- ending -------------------------------------------------------------------------------------------------------

    def _done(self) -> bool:
        if not self._drain_asked:
            return False
        if self._draining_since is None:
            logger.info("draining %d requests", len(self._live))
            self._draining_since = self._clock()
            self.server.welcome = replace(self.server.welcome, draining=True)
            self.server.broadcast(wire.Draining())
        overdue = self._clock() - self._draining_since > self.config.drain_seconds
        if overdue and self._live:
            logger.warning("%d requests did not finish in time; routers take them elsewhere", len(self._live))
        waiting = any(session.outbox for session in self.server.sessions)
        return overdue or not (self._live or waiting)

    def _fail(self) -> None:
        """The engine is gone: hand every request back to its router, then give up."""
        text = f"engine of worker {self.worker_id} failed: {type(self.engine.failure).__name__}"
        for session in list(self.server.sessions):
            self.server.end(session, "engine_failed", text)
        raise EngineError(text) from self.engine.failure

    def stats(self) -> dict[str, int]:
        """Counters of requests and transport. Changes nothing."""
        moved = {} if self.kv_mover is None else asdict(self.kv_mover.counters)
        return {**asdict(self.counters), **asdict(self.server.counters), **moved, "live_requests": len(self._live)}


def _default_id(endpoint: str) -> str:
    """host:port, or the path of a local socket. A wildcard is no name, so it becomes the name of this machine."""
    name = endpoint.partition("://")[2]
    host, _, port = name.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in _WILDCARDS else name


def _cached_of(ticket: _Ticket, chunk: OutputChunk) -> int | None:
    """How much of a prompt was cached; None if the engine does not say, or what cannot be."""
    cached = chunk.cached_tokens
    return cached if cached is not None and 0 <= cached <= len(ticket.placed.token_ids) else None


def _placed(router_id: str, request: GenerationRequest) -> RequestPlaced:
    """The report of a request that comes; of one that is resumed, the output that it may still have."""
    left = max(1, request.sampling.max_new_tokens - request.output_offset)
    token_ids: Any = request.token_ids
    return RequestPlaced(router_id, request.request_id, token_ids, request.namespace, left, request.half)


def _engine_id(session: Session, request_id: str) -> str:
    """Routers choose their ids alone, so the engine's say whose they are."""
    return f"{session.serial}/{request_id}"


def _welcome(worker_id: str, info: EngineInfo) -> wire.Welcome:
    """What the handshake reports; the server fills in its own part."""
    return wire.Welcome(
        worker_id=worker_id,
        events_endpoint="",
        next_event_seq=0,
        max_frame_bytes=wire.FRAME_BYTES_MAX,
        **asdict(info),
    )


# --- the command ------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `preble worker`."""
    engine_options.add_arguments(parser)
    parser.add_argument("--bind", default="tcp://127.0.0.1:*", help="endpoint for routers; port * takes a free one")
    parser.add_argument("--events-bind", default="", metavar="ENDPOINT", help="for cache events; default: a free port")
    parser.add_argument(
        "--kv-bind",
        default="",
        metavar="ENDPOINT",
        help='where other workers may ask for cached KV (torch); default: a free port; "none": no KV is moved',
    )
    parser.add_argument(
        "--role",
        choices=ROLES,
        default=BOTH,
        help="what it does of a request: prefill the prompt, decode the output, or both (%(default)s)",
    )
    parser.add_argument("--id", default="", metavar="NAME", help="name of this worker; default host:port")
    parser.add_argument("--max-requests", type=int, default=4096, help="live requests, then 'queue full' (%(default)s)")
    parser.add_argument("--drain-seconds", type=float, default=30.0, help="time to finish after SIGTERM (%(default)s)")
    parser.add_argument(
        "--session-timeout",
        type=float,
        default=15.0,
        metavar="SECONDS",
        help="silence after which a router counts as gone (%(default)s)",
    )
    parser.add_argument("--curve-keys", metavar="DIR", help="CURVE keys: server.key_secret and clients/")
    parser.add_argument("--insecure", action="store_true", help="allow a non-loopback endpoint without keys")
    parser.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="the least serious of what is logged (%(default)s)",
    )
    parser.add_argument(
        "--until-stdin-closes", action="store_true", help="drain and end when standard input closes: for launchers"
    )


def run(args: argparse.Namespace) -> int:
    """`preble worker`: serve until SIGTERM or SIGINT; returns the exit code. Raises typed errors for wrong options."""
    logging.basicConfig(
        level=args.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # What can be refused at once is refused before a model is loaded.
    keys = load_server_keys(args.curve_keys) if args.curve_keys else None
    for bind in (args.bind, *([] if args.kv_bind in ("", "none") else [args.kv_bind])):
        check_bind(bind, has_keys=keys is not None, insecure=args.insecure)
    if args.cpu is not None:
        _pin(args.cpu)
    if args.until_stdin_closes:
        end_with_stdin(args.drain_seconds + _LAST_SECONDS)
    server = ServerConfig(
        bind=args.bind,
        events_bind=args.events_bind,
        insecure=args.insecure,
        session_timeout_seconds=args.session_timeout,
    )
    config = WorkerConfig(server, args.id, args.max_requests, args.drain_seconds, args.kv_bind, role=args.role)
    worker = Worker(engine_options.make_engine(args), config, epoch=time.time_ns(), keys=keys)
    return serve(worker)


def serve(worker: Worker) -> int:
    """Run a worker as this process's main job: signals drain it, READY goes to stdout. Main thread only."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.drain())
    server = worker.server
    sys.stdout.write(
        f"READY {server.endpoint} id={worker.worker_id} epoch={server.epoch} events={server.events_endpoint}\n"
    )
    sys.stdout.flush()
    worker.run()
    logger.info("drained; %s", worker.stats())
    return 0


def _pin(cpu: int) -> None:
    if not hasattr(os, "sched_setaffinity"):
        raise InvalidConfig("--cpu: this system cannot pin a process to a core")
    try:
        os.sched_setaffinity(0, {cpu})
    except (OSError, ValueError, OverflowError) as error:
        raise InvalidConfig(f"--cpu {cpu}: {error}; available: {sorted(os.sched_getaffinity(0))}") from error
