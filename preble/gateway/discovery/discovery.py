"""Discovery as the gateway runs it: asks every source, and lets the router's fleet follow. Owns the pauses after a
source has failed, who found which address first, what is kept over a restart, and what is shown of it; what is to be
done is `known_servers`'.

A server that the configuration names is not discovery's. Of two sources that find the same address, the first one has
it for as long as it knows it. Each gateway process discovers for itself; the first one writes what is kept.

Sources change while the gateway runs: one whose table is the same goes on, one that looks at the same place in another
way takes over what was known there, and the servers of one that is gone are drained when the others have answered,
or after `doubt_seconds`; those that another source names stay, as its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from ...clock import Clock
from ...errors import InvalidInput, PrebleError, TransportError
from ...router.fleet import STATES, FleetWorker
from ...router.router import Router
from ...transport.engine_servers.server_info import ServerOptions
from ...transport.tasks import end_all, within
from ..core.config_tables import DiscoveryTable
from .kept_servers import read_kept, write_kept
from .known_servers import (
    Change,
    DiscoveryLimits,
    FoundServer,
    KnownServer,
    KnownServers,
    PodName,
    Readiness,
    reconcile,
)
from .pod_costs import PodCosts
from .source import DiscoverySource, FoundServers

logger = logging.getLogger("preble.gateway")

PAUSE_MIN_SECONDS, PAUSE_MAX_SECONDS = 0.5, 30.0  # after a failure; each one more doubles it
STEP_SECONDS = 1.0  # between two looks at drains and doubts
GATHER_SECONDS = 0.05  # news that come together are followed together
UNUSABLE_SHOWN = 20
KEEP_APART_SECONDS, KEEP_AGAIN_SECONDS = 1.0, 60.0  # between two writes of other lists, and of the same one
NO_USE = frozenset({"connecting", "lost", "refused"})  # states of workers that take no requests

_Written = tuple[tuple[str, ServerOptions | None, PodName | None], ...]
SourceMaker = Callable[[DiscoveryTable, Clock, Callable[[], object], Random], DiscoverySource]


def make_source(table: DiscoveryTable, clock: Clock, on_news: Callable[[], object], rng: Random) -> DiscoverySource:
    """The source of a table. Raises `MissingExtra` where what it needs is not installed, `InvalidConfig`."""
    if table.source == "kubernetes":
        from .kubernetes_source import KubernetesSource

        return KubernetesSource(table, clock, on_news, rng=rng)
    if table.source == "dns":
        from .dns_source import DnsSource

        return DnsSource(table, clock, on_news)
    from .file_source import FileSource

    return FileSource(table, clock, on_news)


class _Followed:
    """One source, and what is known of its servers."""

    def __init__(self, source: DiscoverySource) -> None:
        self.source = source
        table = source.table
        self.limits = DiscoveryLimits(table.doubt_seconds, table.drain_seconds, table.servers_max)
        self.known = KnownServers()
        self.failures = 0
        self.failing = ""  # why it could not be asked the last time
        self.failed_at = 0.0
        self.task: asyncio.Task[None] | None = None  # which asks it
        self.before_at: float | None = None  # when what it began with was last known to hold; None: it began with none
        self.left_at: float | None = None  # when its table went; None: it is there
        self.has_looked = False  # at what was kept
        self.writing: asyncio.Task[None] | None = None
        self.written: _Written = ()
        self.written_at = -math.inf
        self.keep_failing = ""  # why that was not possible the last time
        self._found = FoundServers()
        self._version = -1

    @property
    def confirmed_at(self) -> float | None:
        """When its servers were last known to be what it says, here or before; None: never yet."""
        return self.before_at if self.source.confirmed_at is None else self.source.confirmed_at

    def found(self) -> FoundServers:
        """The latest answer, made anew where it is another one."""
        if self.source.version != self._version:
            self._version = self.source.version
            before, self._found = self._found, self.source.found()
            for name, why in self._found.unusable.items():
                if before.unusable.get(name) != why:
                    logger.warning("%s: %s is left out: %s", self.source.label, name, why)
        return self._found

    def answer(self) -> Mapping[str, FoundServer]:
        """The servers of the latest answer; none before the first."""
        return {} if self.source.confirmed_at is None else self.found().servers

    def adopt(self, other: _Followed) -> None:
        """Go on from what another one knew of the same place."""
        self.known, self.before_at = other.known, other.confirmed_at

    def own(self, server: KnownServer) -> None:
        """It is this source's from now on."""
        servers = {**self.known.servers, server.found.address: server}
        self.known = replace(self.known, servers=servers)

    def disown(self, address: str) -> KnownServer:
        """It is not this source's any more."""
        servers = dict(self.known.servers)
        server = servers.pop(address)
        self.known = replace(self.known, servers=servers)
        return server


class Discovery:
    """The sources of one gateway process. Belongs to its loop.

    `static`: addresses that the configuration names. `rng`: of the pauses. `unix_clock`: seconds since 1970, of what is
    kept.
    """

    def __init__(
        self,
        tables: Sequence[DiscoveryTable],
        router: Router,
        static: Collection[str],
        *,
        clock: Clock,
        unix_clock: Clock,
        rng: Random,
        make: SourceMaker = make_source,
    ) -> None:
        self._router = router
        self.static = static
        self._clock = clock
        self._unix_clock = unix_clock
        self._rng = rng
        self._make = make
        self._news = asyncio.Event()
        self._lock = asyncio.Lock()  # of a step, and of a change of sources
        self._followed = [self._new(table) for table in tables]
        self._left: list[_Followed] = []  # whose tables are gone
        self._tasks: list[asyncio.Task[None]] = []
        self._costs: PodCosts | None = None
        self._is_running = self._is_first = False

    def _new(self, table: DiscoveryTable) -> _Followed:
        return _Followed(self._make(table, self._clock, self._news.set, self._rng))

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self, *, is_first: bool = True) -> None:
        """Begin to ask, and to follow. `is_first`: of several processes one alone writes, on pods and on files."""
        self._is_running, self._is_first = True, is_first
        self._tasks = [asyncio.ensure_future(self._follow())]
        self._ask_all()

    def _ask_all(self) -> None:
        """Begin to ask whom nobody asks yet."""
        for one in self._followed:
            if one.task is None:
                one.task = asyncio.ensure_future(self._ask(one))
        if self._is_first and self._costs is None and any(one.source.table.deletion_costs for one in self._followed):
            self._costs = PodCosts(self._pods, self._drain_seconds, self._write_cost, self._clock)
            self._tasks.append(asyncio.ensure_future(self._costs.run()))

    async def close(self) -> None:
        """Ask nobody any more; the fleet stays as it is. Idempotent."""
        await end_all(*self._tasks)
        for one in self._followed:
            await _end(one)

    # --- changing sources ---------------------------------------------------------------------------------------------

    def prepare(self, tables: Sequence[DiscoveryTable]) -> list[_Followed]:
        """What `change` takes: the sources of these tables, new ones where the table is another. Changes nothing.
        Raises as `make_source`."""
        known = list(self._followed)
        followed: list[_Followed] = []
        for table in tables:
            same = next((one for one in known if one.source.table == table), None)
            if same is not None:
                known.remove(same)
            followed.append(same or self._new(table))
        return followed

    async def change(self, followed: list[_Followed], static: Collection[str]) -> None:
        """Follow these sources from now on, beside addresses that the configuration names now. Those of the latter that
        a source has are no longer its; one that drains is left, to be joined anew."""
        async with self._lock:
            gone = [one for one in self._followed if one not in followed]
            for one in followed:
                if one not in self._followed:
                    before = next((other for other in gone if _place(other) == _place(one)), None)
                    if before is not None:
                        one.adopt(before)
                        before.known = KnownServers()
            self._followed = followed
            for one in gone:
                one.left_at = self._clock()
                await _end(one)
            self._left += [one for one in gone if one.known.servers]
            self.static = static
            for one in (*self._followed, *self._left):
                for address in [address for address in one.known.servers if address in static]:
                    await self._let_go(one.disown(address))
        if self._is_running:
            self._ask_all()
        self._news.set()

    async def _let_go(self, server: KnownServer) -> None:
        """The configuration names it: what its source said of it does not count."""
        address = server.found.address
        if server.phase == "withheld":
            self._router.fleet.withhold(address, False)
        elif server.phase == "draining" and address in self._router.fleet.workers:
            await self._router.fleet.remove(address)

    def _hand_over(self) -> None:
        """Servers of sources that are gone, and that others name, are theirs."""
        for left in self._left:
            for one in self._followed:
                for address in [name for name in left.known.servers if name in one.answer()]:
                    one.own(left.disown(address))

    def _may_drain(self, left: _Followed, now: float) -> bool:
        """Whether the servers of a source that is gone are needed no more."""
        assert left.left_at is not None, "its table is gone"
        others_know = all(one.source.confirmed_at is not None for one in self._followed)
        return others_know or now - left.left_at >= left.limits.doubt_seconds

    # --- asking -------------------------------------------------------------------------------------------------------

    async def _ask(self, one: _Followed) -> None:
        """Let a source ask for ever; after a failure once more, later and later, as long as nothing comes."""
        failed = 0
        while True:
            version, confirmed_at = one.source.version, one.source.confirmed_at
            try:
                await one.source.run()
            except TransportError as error:
                self._note_failure(one, str(error), logging.WARNING)
            except Exception as error:
                logger.exception("discovery: %s failed", one.source.label)
                self._note_failure(one, f"{type(error).__name__}: {error}", logging.DEBUG)
            await self._begin_with_kept(one)
            is_better = (version, confirmed_at) != (one.source.version, one.source.confirmed_at)
            failed = 1 if is_better else min(failed + 1, 16)
            pause = min(PAUSE_MIN_SECONDS * 2 ** (failed - 1), PAUSE_MAX_SECONDS)
            await asyncio.sleep(pause * self._rng.uniform(0.5, 1.0))

    def _note_failure(self, one: _Followed, why: str, level: int) -> None:
        one.failures += 1
        level = level if why != one.failing else logging.DEBUG
        logger.log(level, "discovery: %s cannot be asked, its servers stay: %s", one.source.label, why)
        one.failing, one.failed_at = why, self._clock()

    async def _follow(self) -> None:
        while True:
            try:
                await self.step()
            except Exception:
                logger.exception("discovery: a step failed")
            try:
                await within(STEP_SECONDS, self._wait_for_news())
            except asyncio.TimeoutError:
                continue
            await asyncio.sleep(GATHER_SECONDS)
            self._news.clear()

    async def _wait_for_news(self) -> None:
        await self._news.wait()

    # --- following ----------------------------------------------------------------------------------------------------

    async def step(self) -> None:
        """Follow what every source says now."""
        async with self._lock:
            now, accounts = self._clock(), self._accounts()
            self._hand_over()
            for one in self._followed:
                if one.source.confirmed_at is not None:
                    await self._step(one, self._answer_beside(one), one.limits, accounts, now)
                    self._keep(one, now)
            for one in self._left:
                if self._may_drain(one, now):
                    await self._step(one, {}, replace(one.limits, doubt_seconds=0.0), accounts, now)
            self._left = [one for one in self._left if one.known.servers]

    def _answer_beside(self, one: _Followed) -> dict[str, FoundServer]:
        """What a source names, without what others have."""
        all_of_them = (*self._followed, *self._left)
        others = set(self.static).union(*(other.known.servers for other in all_of_them if other is not one))
        return {address: found for address, found in one.answer().items() if address not in others}

    async def _step(
        self,
        one: _Followed,
        answer: Mapping[str, FoundServer],
        limits: DiscoveryLimits,
        accounts: Mapping[str, Any],
        now: float,
    ) -> None:
        one.known, changes = reconcile(one.known, answer, self._live(one.known, accounts), now, limits)
        for change in changes:
            await self._change(one, change)

    def _accounts(self) -> Mapping[str, Any]:
        """Of the scheduler's workers, where somebody drains."""
        every = (*self._followed, *self._left)
        if not any(server.phase == "draining" for one in every for server in one.known.servers.values()):
            return {}
        accounts: Mapping[str, Any] = self._router.scheduler.stats()["workers"]
        return accounts

    def _live(self, known: KnownServers, accounts: Mapping[str, Any]) -> dict[str, int]:
        """Requests at those that drain. One that was restarted meanwhile is drained again."""
        live: dict[str, int] = {}
        for address, server in known.servers.items():
            if server.phase == "draining":
                for name in self._workers_at(address):
                    account = accounts.get(name)
                    if account is not None and not account["draining"]:
                        self._router.scheduler.drain_worker(name)
                    live[address] = live.get(address, 0) + (0 if account is None else account["live_requests"])
        return live

    def _workers_at(self, address: str) -> list[str]:
        """Ids of the workers at an address, all ranks."""
        return [worker.worker_id for worker in self._router.fleet.at(address) if worker.worker_id]

    async def _change(self, one: _Followed, change: Change) -> None:
        """Do one thing. What the fleet refuses is logged: an operator may have been faster."""
        fleet, found = self._router.fleet, change.found
        logger.info("discovery: %s: %s %s", one.source.label, change.action, found.address)
        try:
            if change.action == "join":
                await self._join(found)
            elif change.action == "remove":
                if found.address in fleet.workers:
                    await fleet.remove(found.address)
            elif change.action == "drain":
                for name in self._workers_at(found.address):
                    if name in self._router.scheduler.workers:
                        self._router.scheduler.drain_worker(name)
            else:
                fleet.withhold(found.address, change.action == "withhold")
        except PrebleError as error:
            logger.warning("discovery: %s %s was refused: %s", change.action, found.address, error)

    async def _join(self, found: FoundServer) -> None:
        """Add it to the fleet. One that is there already stays, unless it was joined with other options, as by a
        process that was started again."""
        fleet = self._router.fleet
        there = fleet.workers.get(found.address)
        if there is not None and there.options != found.options:
            await fleet.remove(found.address)
            there = None
        if there is None:
            fleet.add(found.address, found.options)

    # --- kept over a restart ------------------------------------------------------------------------------------------

    async def _begin_with_kept(self, one: _Followed) -> None:
        """A source cannot be asked, and never could since the start: begin with what was known of it before."""
        table, label = one.source.table, one.source.label
        if one.has_looked or table.keep is None or one.confirmed_at is not None:
            return
        one.has_looked = True
        try:
            kept = await asyncio.to_thread(read_kept, table, label, self._unix_clock())
        except InvalidInput as error:
            logger.warning("discovery: %s: what was kept is not used: %s", label, error)
            return
        if kept is None:
            return
        async with self._lock:
            if one.source.confirmed_at is not None or one.left_at is not None:
                return
            now = self._clock()
            one.before_at = now - kept.age_seconds
            logger.warning(
                "discovery: %s: begins with %d servers of %s, %.0f s old",
                *(label, len(kept.servers), table.keep, kept.age_seconds),
            )
            others = set(self.static).union(*(other.known.servers for other in self._followed))
            for found in kept.servers:
                if found.address not in others:
                    one.own(KnownServer(found, "serving", now))
                    await self._change(one, Change("join", found))

    def _keep(self, one: _Followed, now: float) -> None:
        """Write down what is known, where that is another list, or the one that was written grows old."""
        if not self._is_first or one.source.table.keep is None or not (one.writing is None or one.writing.done()):
            return
        servers = [server.found for server in one.known.servers.values() if server.phase != "draining"]
        said = tuple((found.address, found.options, found.pod) for found in servers)
        if now - one.written_at < (KEEP_AGAIN_SECONDS if said == one.written else KEEP_APART_SECONDS):
            return
        one.written, one.written_at = said, now
        confirmed_at = now if one.source.confirmed_at is None else one.source.confirmed_at
        at = self._unix_clock() - max(now - confirmed_at, 0.0)
        one.writing = asyncio.ensure_future(self._write(one, servers, at))

    async def _write(self, one: _Followed, servers: Sequence[FoundServer], at: float) -> None:
        """In a thread: a disk that hangs holds nobody up."""
        try:
            await asyncio.to_thread(write_kept, one.source.table, one.source.label, servers, at)
        except TransportError as error:
            logger.log(logging.WARNING if not one.keep_failing else logging.DEBUG, "discovery: %s", error)
            one.keep_failing = str(error)
        else:
            one.keep_failing = ""

    # --- costs of pods ------------------------------------------------------------------------------------------------

    def _drain_seconds(self) -> Mapping[str, float]:
        costs: Mapping[str, float] = self._router.scheduler.stats()["scaling"]["drain_seconds"]
        return costs

    async def _write_cost(self, pod: PodName, cost: int) -> None:
        for one in self._followed:
            if one.source.table.deletion_costs and any(
                server.found.pod == pod for server in one.known.servers.values()
            ):
                await one.source.write_cost(pod, cost)
                return

    def _pods(self) -> dict[PodName, tuple[FoundServer, list[str]]]:
        """The pods that serve, each with its server and the ids of its workers."""
        return {
            server.found.pod: (server.found, self._workers_at(server.found.address))
            for one in self._followed
            if one.source.table.deletion_costs
            for server in one.known.servers.values()
            if server.found.pod is not None and server.phase != "draining"
        }

    # --- questions ----------------------------------------------------------------------------------------------------

    def stats(self) -> list[dict[str, Any]]:
        """Each source, and how its servers are. Changes nothing. O(servers + workers)."""
        now = self._clock()
        workers = self._workers()
        return [self._stats_of(one, workers, now) for one in self._followed]

    def _workers(self) -> Mapping[str, list[FleetWorker]]:
        """The workers by the address at which they were found, all ranks."""
        found: dict[str, list[FleetWorker]] = {}
        for address, worker in self._router.fleet.workers.items():
            found.setdefault(address, []).append(worker)
            server = address.partition("#")[0]
            if server != address:
                found.setdefault(server, []).append(worker)
        return found

    def _stats_of(self, one: _Followed, workers: Mapping[str, list[FleetWorker]], now: float) -> dict[str, Any]:
        asked_at, confirmed_at = one.source.confirmed_at, one.confirmed_at
        found = FoundServers() if asked_at is None else one.found()
        phases = Counter(server.phase for server in one.known.servers.values())
        readiness = Counter(server.readiness for server in found.servers.values())
        there = [worker for address in one.known.servers for worker in workers.get(address, ())]
        states: Counter[str] = Counter(worker.state for worker in there)
        refused = {worker.address: f"{worker.state}: {worker.why}" for worker in there if worker.state in NO_USE}
        return {
            "source": one.source.label,
            "age_seconds": None if confirmed_at is None else max(now - confirmed_at, 0.0),
            "has_answered": asked_at is not None,
            "servers": {phase: phases[phase] for phase in ("serving", "withheld", "draining")},
            "named": len(found.servers) + len(found.unusable),
            "found": {state.value: readiness[state] for state in Readiness},
            "left_out": one.known.left_out + len(found.unusable),
            "unusable": dict(list(found.unusable.items())[:UNUSABLE_SHOWN]),
            "workers": {state: states[state] for state in STATES if states[state]},
            "refused": dict(list(refused.items())[:UNUSABLE_SHOWN]),
            "is_doubted": one.known.doubted_since is not None,
            "failures": one.failures,
            "failing": one.failing if asked_at is None or asked_at < one.failed_at else "",
            "keep_failing": one.keep_failing,
        }


async def _end(one: _Followed) -> None:
    """Ask it no more."""
    await end_all(*(task for task in (one.task, one.writing) if task is not None))
    await one.source.close()


def _place(one: _Followed) -> tuple[object, ...]:
    """Where a source looks, whatever else its table says."""
    table = one.source.table
    return table.source, table.namespace, table.service, table.selector, table.name, table.path
