r"""The router's workers: connecting, losing and finding them again, and what the scheduler learns of it.

    connecting -> ready <-> suspect        suspect: silent for a while; its requests went elsewhere, its cache remains
                    |  \-> draining        draining: it asked for no new requests
                    v
                  lost -> (forgotten) -> ready again, or refused when the two sides do not fit

A lost worker stays in the scheduler, unused, for `forget_after_seconds`: after a short break of the network its cache
is as it was, and its events go on where they stopped. A worker with a new epoch has been restarted: it is removed from
the scheduler and added afresh, so that its cache counts as empty.

Owns membership in the scheduler and the supervisor task of each address. Requests are `router`'s, bytes `transport`'s.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import zmq.asyncio
from msgspec import structs

from .._cost import CostModel
from ..clock import Clock
from ..errors import (
    HandshakeRefused,
    InvalidConfig,
    InvalidInput,
    PrebleError,
    TransportError,
    UnknownWorker,
)
from ..scheduling.pairs.halves import GUESSED_TOKEN_BYTES
from ..transport import wire
from ..transport.client import LinkConfig, LinkCounters, WorkerLink
from ..transport.engine_servers.kv_event_subscriber import FeedConfig, FeedCounters
from ..transport.engine_servers.link import ServerLink
from ..transport.engine_servers.server_info import ServedName, ServerOptions
from ..transport.event_stream import Batch
from ..transport.look_ahead import LOOK_AHEAD_SECONDS, computes_twice
from ..transport.namespaces import joined, namespace_of
from ..transport.security import ClientKeys
from ..transport.worker_address import UnknownHost, check_worker_address, find_host, is_server, why_silent
from ..types import BOTH, AllBlocksCleared, BlockKeys, ServedWork, WorkerSpec, check_fields
from .peer_requests import PeerRequests
from .pulls import Pulls
from .server_queue import ServerQueue

if TYPE_CHECKING:
    from ..scheduler import GlobalScheduler
    from .stats import RouterWorkerStats, WorkerState

SGLANG = "sglang"  # the engine
logger = logging.getLogger("preble.router")

SOCKETS_MAX = 16_384  # four of each link; ZeroMQ's own bound of 1,023 would end a router's fleet at 255 workers
CLOSE_SECONDS = 5.0  # for the last frames of all sockets
_CLOSE_STEP_SECONDS = 0.005
YIELDING_ENGINES = ("torch", "simulated")
_CANCEL_SECONDS, _CANCELS_MAX = 2.0, 5

STATES = ("connecting", "ready", "suspect", "draining", "lost", "refused")


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """How workers are found and lost, in seconds. Each failed connection doubles the wait before the next.

    `several_models`: servers may be of other models than the first worker; whoever places requests says by `exclude`
    where each may go. Workers of our own must be of the first worker's model. `look_ahead_seconds`: of prefills that a
    server which runs already is sent ahead of what it computes (`server_queue`); None: all that is placed there.
    `catch_up_seconds`: a worker is ready when all has been taken that it published before, or after so long; until then
    it would be chosen for what it has long evicted.
    """

    link: LinkConfig = field(default_factory=LinkConfig)
    feed: FeedConfig = field(default_factory=FeedConfig)
    reconnect_min_seconds: float = 0.05
    reconnect_max_seconds: float = 2.0
    forget_after_seconds: float = 30.0
    catch_up_seconds: float = 2.0
    several_models: bool = False
    look_ahead_seconds: float | None = LOOK_AHEAD_SECONDS

    def __post_init__(self) -> None:
        if not 0.0 < self.reconnect_min_seconds <= self.reconnect_max_seconds:
            raise InvalidConfig(
                f"FleetConfig.reconnect_min_seconds must be positive and at most reconnect_max_seconds, "
                f"got {self.reconnect_min_seconds} and {self.reconnect_max_seconds}"
            )
        check_fields(self, "not be negative", "forget_after_seconds", "catch_up_seconds")
        if self.look_ahead_seconds is not None:
            check_fields(self, "not be negative", "look_ahead_seconds")


@dataclass(slots=True)
class AddressCounters:
    """What happened to one address. `errors`: sessions that ended by an error nobody expects; they are tried again."""

    connections: int = 0
    errors: int = 0
    handshakes_refused: int = 0
    losses: int = 0
    restarts: int = 0
    suspect_spells: int = 0
    forgotten: int = 0
    events_refused: int = 0


class RequestsOwner(Protocol):
    """What the fleet reports to the router about requests."""

    def on_message(self, worker: FleetWorker, message: wire.OutputChunk | wire.Rejected) -> None:
        """Something about one request."""

    def on_unavailable(self, worker: FleetWorker, why: str) -> None:
        """The requests running there must go elsewhere."""

    def on_available(self, worker: FleetWorker) -> None:
        """A worker may take requests (again)."""


class FleetWorker:
    """One address, and the worker found there. `requests` are the wire ids running on it, kept by the router."""

    def __init__(self, address: str, fleet: Fleet, options: ServerOptions | None = None) -> None:
        self.address = address
        self.options = options  # of a server that is attached
        self.state: WorkerState = "connecting"
        self.why = ""
        self.is_unknown_host = False  # at the last attempt nobody had that name
        self.worker_id = ""
        self.epoch = 0
        self.welcome: wire.Welcome | None = None
        self.link: WorkerLink | ServerLink | None = None
        self.pong: wire.Pong | None = None
        self.counters = AddressCounters()
        self.link_counters = LinkCounters()
        self.events: Counter[str] = Counter()  # taken, by type; an attached server's are counted in batches only
        self.peers = PeerRequests(fleet.router_id)
        self.feed_counters = FeedCounters() if is_server(address) else None
        self.namespace: Hashable = None  # of what it caches without a salt or an adapter
        self.relayed = 0  # requests that are sent there by others than its link, kept by `placement`
        self.queue = ServerQueue(fleet.look_ahead_seconds, fleet.clock, asyncio.get_running_loop().call_later)
        self.withheld = False  # no new requests go there, by the word of who found it
        self.settled = asyncio.Event()  # the first handshake has been tried
        self.task: asyncio.Task[None] | None = None
        self._fleet = fleet

    @property
    def served(self) -> tuple[ServedName, ...]:
        """The names that requests to it may use; () before it has answered."""
        names = self.link.info.served if isinstance(self.link, ServerLink) else ()
        return names or (() if self.welcome is None else (ServedName(self.welcome.model),))

    def namespace_of(self, keys: BlockKeys) -> Hashable:
        """The namespace of blocks that its engine distinguishes by more than tokens."""
        return joined(self.namespace, namespace_of(keys))

    @property
    def waiting(self) -> int:
        """Requests that wait there, by its last report, and here until it is sent them."""
        return len(self.queue) + (0 if self.pong is None else self.pong.waiting)

    # --- LinkListener -------------------------------------------------------------------------------------------------

    def on_message(self, message: wire.OutputChunk | wire.Rejected | wire.PullEnded | wire.Draining) -> None:
        """A request's message goes to the router; draining takes the worker out of the choice."""
        if isinstance(message, wire.PullEnded):
            self._fleet.pulls.ended(self, message)
        elif not isinstance(message, wire.Draining):
            self._fleet.owner.on_message(self, message)
        elif self.state in ("connecting", "ready", "suspect"):
            self.turn("draining", "it asked for no new requests")

    def on_pong(self, pong: wire.Pong) -> None:
        """Keep the load for `stats`, and let the scheduler compare it with what is booked."""
        self.pong = pong
        self._fleet.compare_load(self, pong)

    def on_events(self, batch: Batch, *, past: bool) -> None:
        """Report to the scheduler what the worker's cache lost or got, and what other routers' requests do there."""
        self.events.update(type(event).__name__ for event in batch)
        self._fleet.apply(self, self.peers.take(batch, past=past))

    def on_caught_up(self) -> None:
        """Book what other routers have running there, and take requests."""
        self._fleet.apply(self, self.peers.caught_up())
        self.join()

    def join(self) -> None:
        """Take requests from now on, if it was only what it caches that was not known. Again it does nothing."""
        if self.state == "connecting" and self.link is not None:
            self.turn("ready", "")
            if self.link.suspect:
                self.on_suspect("it does not react")
            else:
                self._fleet.owner.on_available(self)
        self.settled.set()

    def on_payload(self, payload: bytes) -> None:
        """The same, as the engine wrote it."""
        self._fleet.apply_raw(self, payload)

    def on_resync(self) -> None:
        """Events are lost for good: nothing counts as cached."""
        logger.warning("events of worker %r are lost, forgetting what is estimated of it", self.worker_id)
        self.peers.begin()
        self._fleet.forget_reports(self)

    def on_suspect(self, reason: str) -> None:
        """Its requests go elsewhere; if it wakes up, late chunks are dropped."""
        if self.state == "ready":
            self.counters.suspect_spells += 1
            self.turn("suspect", reason)
        self._fleet.owner.on_unavailable(self, reason)

    def on_recovered(self) -> None:
        """It may take requests again."""
        if self.state == "suspect":
            self.turn("ready", "")
            self._fleet.owner.on_available(self)

    # --- state --------------------------------------------------------------------------------------------------------

    def fields(self, resumed: bool) -> frozenset[str]:
        """What requests may ask of its engine beyond plain sampling, where they begin there or go on there."""
        if self.welcome is None:
            return frozenset()
        return frozenset(self.welcome.resumable_fields if resumed else self.welcome.sampling_fields)

    def turn(self, state: WorkerState, why: str) -> None:
        """Change state, with a line in the log."""
        if state != self.state:
            logger.info("worker %s at %s: %s -> %s %s", self.worker_id or "?", self.address, self.state, state, why)
        self.state = state
        self.why = why
        self._fleet.update_unusable()

    def stats(self) -> RouterWorkerStats:
        """Where this worker stands. Changes nothing."""
        found = {
            "worker_id": self.worker_id,
            "state": self.state,
            "why": self.why,
            "epoch": self.epoch,
            "waiting": len(self.queue),
            **asdict(self.counters),
            **asdict(self.link_counters),
            **asdict(self.peers.counters),
            "events": dict(self.events),
            "feed": None if self.feed_counters is None else asdict(self.feed_counters),
            "load": None if self.pong is None else structs.asdict(self.pong),
        }
        return cast("RouterWorkerStats", found)


class Fleet:
    """All workers of one router. Belongs to one asyncio loop. `expect` is what every worker must agree with."""

    def __init__(
        self,
        scheduler: GlobalScheduler,
        owner: RequestsOwner,
        config: FleetConfig,
        *,
        expect: wire.Hello,
        keys: ClientKeys | None,
        clock: Clock,
    ) -> None:
        self.owner = owner
        self.workers: dict[str, FleetWorker] = {}  # by address
        self._by_id: dict[str, FleetWorker] = {}  # those the scheduler knows
        self.roles: dict[str, str] = {}  # of workers that do not do both, by id
        self.server_roles: dict[str, str] = {}  # and of servers
        self.pulls = Pulls(self)
        self._scheduler = scheduler
        self.router_id = expect.router_id
        self._config = config
        self._expect = expect
        self._keys = keys
        self.clock = clock
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
        self._sessions = 0
        self._background: set[asyncio.Task[None]] = set()  # connections that are being closed
        self.unusable: frozenset[str] = frozenset()  # ids that the scheduler knows and that cannot take a request now
        self.eos_token_ids: tuple[int, ...] = ()
        self.membership = 0  # another number whenever workers, or the names they serve, have changed
        self._first_model = ""
        self.all_servers = False  # every worker is a server over HTTP, and there is one

    # --- asked by the router ------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> GlobalScheduler:
        """Who decides; another one learns which workers move KV."""
        return self._scheduler

    @scheduler.setter
    def scheduler(self, scheduler: GlobalScheduler) -> None:
        self._scheduler = scheduler
        for worker in self._by_id.values():
            if worker.welcome is not None:
                self._introduce_kv(worker, worker.welcome)

    @property
    def worker_ids(self) -> Collection[str]:
        """Workers that the scheduler knows, usable or not; do not keep it."""
        return self._by_id.keys()

    def workers_yield(self) -> bool:
        """Whether all engines are driven by a `LocalScheduler`, so that batch work yields also once it runs."""
        return all(one.welcome is not None and one.welcome.engine in YIELDING_ENGINES for one in self._by_id.values())

    def unable(self, needs: Sequence[str], *, resumed: bool) -> frozenset[str]:
        """Workers whose engines lack one of these fields (`types.SAMPLING_FIELDS`) for a request that begins there, or
        one that has begun elsewhere."""
        return frozenset(name for name, worker in self._by_id.items() if not set(needs) <= worker.fields(resumed))

    def missing(self, needs: Sequence[str], *, resumed: bool) -> str | None:
        """The fields that no worker has, joined; all of them where each is had by some, and None where one worker has
        all, or none is there."""
        found = [worker.fields(resumed) for worker in self._by_id.values()]
        if not found or any(set(needs) <= fields for fields in found):
            return None
        return ", ".join(name for name in needs if not any(name in fields for fields in found)) or ", ".join(needs)

    def worker(self, worker_id: str) -> FleetWorker:
        """The worker of that id. Raises `UnknownWorker`."""
        found = self._by_id.get(worker_id)
        if found is None:
            raise UnknownWorker(f"no worker {worker_id!r} is connected to this router")
        return found

    def send(self, worker_id: str, message: wire.Message) -> None:
        """Send to a worker. Raises `UnknownWorker`, `TransportError` if disconnected, `QueueFull` if unread."""
        worker = self.worker(worker_id)
        if worker.link is None:
            raise TransportError(f"worker {worker_id} was never connected")
        worker.link.send(message)

    def queue_before(self, worker_id: str) -> ServerQueue | None:
        """Where a request waits until its worker is sent it; None where that has a queue of our own. Raises
        `UnknownWorker`, `TransportError` for one that is away, `QueueFull` at its bound."""
        worker = self.worker(worker_id)
        if not isinstance(worker.link, ServerLink):
            return None
        worker.link.check_room(len(worker.queue))
        return worker.queue

    def refused(self, worker_id: str, wire_id: str, text: str) -> None:
        """A server did not take what waited for it; reported as if it had said so."""
        refusal = wire.Rejected(wire_id, "queue_full", text)
        asyncio.get_running_loop().call_soon(self.owner.on_message, self.worker(worker_id), refusal)

    def began(self, worker_id: str, wire_id: str) -> None:
        """The first token of a request has come."""
        worker = self._by_id.get(worker_id)
        if worker is not None:
            worker.queue.leave(wire_id, has_begun=True)

    def expect(self, worker_id: str, wire_id: str, seconds: float) -> None:
        """A request was given to a worker, by that name, whose prefill is expected to take so long: a server is judged
        by when it begins. Raises `UnknownWorker`."""
        link = self.worker(worker_id).link
        if isinstance(link, ServerLink):
            link.expects(wire_id, seconds)

    def add(self, address: str, options: ServerOptions | None = None) -> FleetWorker:
        """Start to connect to an address. Raises `InvalidInput` if it is there already, or is no address."""
        check_worker_address(address)
        if address in self.workers:
            raise InvalidInput(f"worker address {address!r} is there already")
        if options is not None and not is_server(address):
            raise InvalidInput(f"options are for servers, and {address!r} is not one")
        worker = FleetWorker(address, self, options)
        worker.task = asyncio.ensure_future(self._supervise(worker))
        worker.task.add_done_callback(_log_failure)
        self.workers[address] = worker
        self._look_at_kinds()
        return worker

    async def look_for_names(self) -> None:
        """Ask all servers anew which names they are asked by; one that does not answer keeps those it had."""
        links = [worker.link for worker in self.workers.values() if worker.state == "ready"]
        asked = [link.look_for_names() for link in links if isinstance(link, ServerLink) and link.rank == 0]
        for failed in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(failed, Exception) and not isinstance(failed, PrebleError):
                raise failed
        self.membership += 1

    def namespace_of_model(self, model: str) -> Hashable:
        """Where requests and caches of a model are kept apart from others'; None for the first model that there was."""
        return None if model in ("", self._first_model) else ("model", model)

    def _look_at_kinds(self) -> None:
        self.membership += 1
        self.all_servers = bool(self.workers) and all(map(is_server, self.workers))

    async def remove(self, address: str) -> None:
        """Leave a worker, or all ranks of a server. Its requests go elsewhere. Raises `UnknownWorker`."""
        if address not in self.workers:
            raise UnknownWorker(f"no worker at {address!r}")
        for worker in self.at(address):
            del self.workers[worker.address]
            await self._stop(worker)
            self._forget(worker)
        self._look_at_kinds()

    def at(self, address: str) -> list[FleetWorker]:
        """The worker at an address, or all ranks of a server; none where nobody is known there. O(workers)."""
        if address not in self.workers:
            return []
        ranks = [other for other in self.workers if is_server(address) and other.startswith(f"{address}#")]
        return [self.workers[one] for one in (address, *ranks)]

    def withhold(self, address: str, withheld: bool) -> None:
        """Give new requests to a worker, or all ranks of a server, no more, or again; what runs there goes on.
        O(workers)."""
        for worker in self.at(address):
            worker.withheld = withheld
            worker.why = "who found it says that it is not ready" if withheld else ""
            self.update_unusable()
            if not withheld and worker.state == "ready":
                self.owner.on_available(worker)

    async def close(self) -> None:
        """Leave all workers and free the sockets."""
        for worker in list(self.workers.values()):
            await self._stop(worker)
        await asyncio.gather(*self._background, return_exceptions=True)
        # Waits for the last frames (Bye, aborts) to leave, so not on the loop; and not for good, if a socket was left.
        ending = threading.Thread(target=self._context.term, name="preble-router-end", daemon=True)
        ending.start()
        for _ in range(round(CLOSE_SECONDS / _CLOSE_STEP_SECONDS)):
            if not ending.is_alive():
                return
            await asyncio.sleep(_CLOSE_STEP_SECONDS)
        logger.error("a socket of this router is still open after %.0f s; it is left behind", CLOSE_SECONDS)

    async def _stop(self, worker: FleetWorker) -> None:
        """Cancel, again if that was lost: before Python 3.12 a library's `wait_for` may swallow it."""
        if worker.task is not None:
            for _ in range(_CANCELS_MAX):
                worker.task.cancel()
                if (await asyncio.wait([worker.task], timeout=_CANCEL_SECONDS))[0]:
                    return
            logger.error("the task of worker %s does not end; it is left behind", worker.worker_id or worker.address)

    # --- one address --------------------------------------------------------------------------------------------------

    async def _supervise(self, worker: FleetWorker) -> None:
        """Connect, serve, and connect again, until cancelled. Nothing else ends it: an error that nobody expects (no
        descriptor is left, a policy of somebody's own fails) is logged, counted, and tried again after a pause."""
        pause = self._config.reconnect_min_seconds
        lost_at = self.clock()
        while True:
            try:
                if await self._attempt(worker):
                    lost_at, pause = self.clock(), self._config.reconnect_min_seconds
                if worker.worker_id and self.clock() - lost_at >= self._config.forget_after_seconds:
                    self._forget(worker)
            except Exception as error:  # noqa: BLE001  who is not supervised never comes back
                self._fail(worker, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._config.reconnect_max_seconds)

    async def _attempt(self, worker: FleetWorker) -> bool:
        """One session; whether it was served."""
        link = None
        worker.is_unknown_host = False
        try:
            await find_host(worker.address)
            link = self._new_link(worker)
            return await self._serve(worker, link)
        except HandshakeRefused as error:
            self._refuse(worker, str(error))
        except TransportError as error:
            worker.is_unknown_host = isinstance(error, UnknownHost)
            # Over HTTP the error has the reason; ZeroMQ connects again and again, and says none.
            reason = "" if is_server(worker.address) else await why_silent(worker.address)
            self._note_silence(worker, reason or str(error))
        except PrebleError as error:
            logger.exception("worker at %s cannot be used", worker.address)
            self._refuse(worker, str(error))
        finally:
            if link is not None:
                link.close()
            worker.settled.set()
        return False

    def _note_silence(self, worker: FleetWorker, why: str) -> None:
        """Nobody answers at an address: a warning at first, and when the reason is another one."""
        logger.log(
            logging.DEBUG if why == worker.why else logging.WARNING,
            "worker at %s does not answer, and is tried again: %s",
            worker.address,
            why,
        )
        worker.why = why

    def _fail(self, worker: FleetWorker, error: Exception) -> None:
        """A session ended by an error that nobody expects: its requests go elsewhere, and it is tried again."""
        worker.counters.errors += 1
        why = f"{type(error).__name__}: {error}"
        logger.error("the session with worker at %s failed; it is tried again", worker.address, exc_info=error)
        if worker.state in ("ready", "suspect", "draining"):
            worker.turn("lost", why)
            self.owner.on_unavailable(worker, why)
        worker.why = why

    def _new_link(self, worker: FleetWorker) -> WorkerLink | ServerLink:
        self._sessions += 1
        ends = worker.address, self._expect, worker, self._config.link
        shared: dict[str, Any] = {
            "session": self._sessions,
            "context": self._context,
            "counters": worker.link_counters,
            "clock": self.clock,
        }
        if not is_server(worker.address):
            return WorkerLink(*ends, keys=self._keys, **shared)
        return ServerLink(
            *ends,
            background=self._background,
            options=worker.options,
            feed_config=self._config.feed,
            feed_counters=worker.feed_counters,
            **shared,
        )

    async def _serve(self, worker: FleetWorker, link: WorkerLink | ServerLink) -> bool:
        """One session from handshake to loss."""
        resume_at = None
        if worker.link is not None and self._by_id.get(worker.worker_id) is worker:
            resume_at = (worker.epoch, worker.link.next_event_seq)  # the estimate up to there still holds
        welcome = await link.open(resume_events_at=resume_at)
        self._adopt(worker, link, welcome)
        self._add_ranks(worker, link)
        why = "router closes"
        late = asyncio.get_running_loop().call_later(self._config.catch_up_seconds, worker.join)
        try:
            why = await link.run()
        finally:
            late.cancel()
            worker.counters.losses += 1
            drained = worker.state == "draining"
            worker.turn("lost", why)
            self.owner.on_unavailable(worker, why)
            if drained:
                self._forget(worker)
        return True

    def _add_ranks(self, worker: FleetWorker, link: WorkerLink | ServerLink) -> None:
        """The other ranks of a server are workers of their own."""
        for address in link.more_addresses if isinstance(link, ServerLink) else ():
            if address not in self.workers and self.workers.get(worker.address) is worker:
                self.add(address, worker.options).withheld = worker.withheld

    def _adopt(self, worker: FleetWorker, link: WorkerLink | ServerLink, welcome: wire.Welcome) -> None:
        """A handshake went well: bring the scheduler up to date. Raises `HandshakeRefused` if others disagree."""
        other = self._by_id.get(welcome.worker_id)
        if other is not None and other is not worker:
            raise HandshakeRefused(
                f"workers at {other.address} and {worker.address} both call themselves {welcome.worker_id!r}"
            )
        difference = wire.disagreement(self._expect, welcome) or self._mixed(worker, welcome)
        if difference:
            raise HandshakeRefused(difference)
        several = self._config.several_models and is_server(worker.address)
        if not self._expect.model and not several:
            # One router serves one model: what the first worker says is what the others must say.
            self._expect = structs.replace(
                self._expect, model=welcome.model, tokenizer_fingerprint=welcome.tokenizer_fingerprint
            )
        self._first_model = self._first_model or welcome.model
        worker.namespace = self.namespace_of_model(welcome.model)
        same = worker.epoch == link.epoch and worker.welcome is not None and worker.worker_id in self._by_id
        if not same:
            if worker.epoch and worker.epoch != link.epoch:
                worker.counters.restarts += 1
            self._forget(worker)
            self._introduce(worker, welcome, link.info.work if isinstance(link, ServerLink) else None)
        worker.link, worker.epoch, worker.welcome = link, link.epoch, welcome
        worker.queue.computes_twice = computes_twice(welcome.engine)
        self.eos_token_ids = welcome.eos_token_ids
        worker.counters.connections += 1
        if welcome.draining:
            worker.turn("draining", "it was draining when we came")
            worker.settled.set()
        else:
            worker.turn("connecting", "what it caches is not known yet")

    def _mixed(self, worker: FleetWorker, welcome: wire.Welcome) -> str:
        """What keeps a worker of our own from a fleet of servers of several models; "" if nothing does."""
        others = {one.welcome.model for one in self._by_id.values() if one.welcome is not None} - {welcome.model, ""}
        if is_server(worker.address) or not others:
            return ""
        there = ", ".join(sorted(others))
        return f"worker {welcome.worker_id} has model {welcome.model!r}, and the servers here have {there}"

    def _introduce(self, worker: FleetWorker, welcome: wire.Welcome, work: ServedWork | None) -> None:
        served = is_server(worker.address)
        spec = WorkerSpec(
            welcome.worker_id,
            kv_capacity_tokens=welcome.kv_capacity_tokens,
            block_size=welcome.block_size,
            max_running=welcome.max_running,
            cost_model=_cost_of(worker.options),
            cached_first=welcome.cached_first or (served and self.look_ahead_seconds is not None),
            below_capacity_tokens=0 if worker.options is None else worker.options.below_capacity_tokens,
            role=welcome.role,
        )
        worker.worker_id = welcome.worker_id
        worker.peers.begin()
        # An embedding application may have known it already, but nobody can say whether its marks are of this epoch.
        self._remove_from_scheduler(welcome.worker_id)
        self.scheduler.add_worker(spec, served=work)
        self._by_id[welcome.worker_id] = worker
        if welcome.role != BOTH:
            (self.server_roles if served else self.roles)[welcome.worker_id] = welcome.role
        self._introduce_kv(worker, welcome)

    def _introduce_kv(self, worker: FleetWorker, welcome: wire.Welcome) -> None:
        """Report to the scheduler with which others a worker, which it knows, can move KV."""
        if is_server(worker.address) and welcome.engine == SGLANG and welcome.role != BOTH:
            # With one that does both it makes no pair.
            self.scheduler.can_move_kv(welcome.worker_id, SGLANG, GUESSED_TOKEN_BYTES)
        self.pulls.introduce(welcome)

    @property
    def look_ahead_seconds(self) -> float | None:
        """Of prefills that a server is sent ahead."""
        return self._config.look_ahead_seconds

    def update_unusable(self) -> None:
        """Keep the set that every decision needs, so that a decision need not look at every worker."""
        self.membership += 1
        self.unusable = frozenset(
            name for name, worker in self._by_id.items() if worker.state != "ready" or worker.withheld
        )

    def _refuse(self, worker: FleetWorker, why: str) -> None:
        worker.counters.handshakes_refused += 1
        worker.turn("refused", why)
        self._forget(worker)

    def _forget(self, worker: FleetWorker) -> None:
        """Take a worker out of the scheduler, and with it the estimate of its cache."""
        if self._by_id.get(worker.worker_id) is worker:
            worker.counters.forgotten += 1
            del self._by_id[worker.worker_id]
            self.roles.pop(worker.worker_id, None)
            self.server_roles.pop(worker.worker_id, None)
            self.update_unusable()
            self._remove_from_scheduler(worker.worker_id)

    def _remove_from_scheduler(self, worker_id: str) -> None:
        try:
            self.scheduler.remove_worker(worker_id)
        except UnknownWorker:
            logger.debug("worker %r was not in the scheduler", worker_id)

    def apply(self, worker: FleetWorker, batch: Batch) -> None:
        """Give events to the scheduler; if it refuses them, it is asked to forget what it was given before."""
        if batch:
            self._apply(worker, lambda: self.scheduler.apply(worker.worker_id, batch))

    def apply_raw(self, worker: FleetWorker, payload: bytes) -> None:
        """The same with a batch as an engine wrote it."""
        spaces: dict[str, Any] = {"namespace": worker.namespace, "namespace_of": worker.namespace_of}
        self._apply(worker, lambda: self.scheduler.apply_raw(worker.worker_id, payload, **spaces))

    def _apply(self, worker: FleetWorker, change: Callable[[], object]) -> None:
        if self._by_id.get(worker.worker_id) is not worker:
            return
        try:
            change()
        except PrebleError as error:
            worker.counters.events_refused += 1
            logger.warning("scheduler refused events of worker %r: %s", worker.worker_id, error)
            self.forget_reports(worker)

    def forget_reports(self, worker: FleetWorker) -> None:
        """Forget what a worker has reported: its cache, and other routers' requests. Of requests at a server it is
        siblings that report."""
        if self._by_id.get(worker.worker_id) is worker:
            self.scheduler.apply(worker.worker_id, (AllBlocksCleared(),))
            if not is_server(worker.address):
                self.scheduler.forget_peer_bookings(worker.worker_id)

    def compare_load(self, worker: FleetWorker, pong: wire.Pong) -> None:
        """Report to the scheduler how many requests the worker has; what differs from the bookings of all routers is in
        the scheduler's `stats`."""
        if self._by_id.get(worker.worker_id) is not worker:
            return
        try:
            self.scheduler.reconcile_counts(worker.worker_id, running=pong.running, waiting=worker.waiting)
        except PrebleError as error:
            logger.debug("the load of worker %r was not compared: %s", worker.worker_id, error)

    def stats(self) -> dict[str, RouterWorkerStats]:
        """By address. Changes nothing."""
        return {address: worker.stats() for address, worker in self.workers.items()}

    def check(self) -> None:
        """Assert that states, ids and the set of unusable workers agree."""
        for worker_id, worker in self._by_id.items():
            assert worker.worker_id == worker_id and self.workers.get(worker.address) is worker, "ids lead to workers"
            is_unusable = worker.state != "ready" or worker.withheld
            assert (worker_id in self.unusable) == is_unusable, f"unusable is stale for {worker_id}"
        for worker in self.workers.values():
            worker.queue.check()
            assert worker.state in STATES, f"unknown state {worker.state!r}"
            assert worker.state != "ready" or worker.worker_id in self._by_id, "a ready worker is in the scheduler"


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("the supervisor of a worker failed", exc_info=task.exception())


def _cost_of(options: ServerOptions | None) -> CostModel | None:
    """The cost model that a server's options name. Raises `HandshakeRefused` where its file is gone or damaged."""
    if options is None or not options.cost_model:
        return None
    try:
        return CostModel.preset(options.cost_model)
    except InvalidConfig as error:
        raise HandshakeRefused(str(error)) from error
