"""Discovery as the gateway runs it: asks every source, and lets the router's fleet follow. Owns the pauses after a
source has failed, who found which address first, and what is shown of it; what is to be done is `known_servers`'.

A server that the configuration names is not discovery's. Of two sources that find the same address, the first one has
it for as long as it knows it. Each gateway process discovers for itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import Any

from ...clock import Clock
from ...errors import PrebleError, TransportError
from ...router.router import Router
from ...transport.tasks import end_all, within
from ..core.config_tables import DiscoveryTable
from .known_servers import Change, DiscoveryLimits, FoundServer, KnownServers, PodName, Readiness, reconcile
from .pod_costs import PodCosts
from .source import DiscoverySource, FoundServers

logger = logging.getLogger("preble.gateway")

PAUSE_MIN_SECONDS, PAUSE_MAX_SECONDS = 0.5, 30.0  # after a failure; each one more doubles it
STEP_SECONDS = 1.0  # between two looks at drains and doubts
GATHER_SECONDS = 0.05  # news that come together are followed together
UNUSABLE_SHOWN = 20

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
        self._found = FoundServers()
        self._version = -1

    def found(self) -> FoundServers:
        """The latest answer, made anew where it is another one."""
        if self.source.version != self._version:
            self._version = self.source.version
            before, self._found = self._found, self.source.found()
            for name, why in self._found.unusable.items():
                if before.unusable.get(name) != why:
                    logger.warning("%s: %s is left out: %s", self.source.label, name, why)
        return self._found


class Discovery:
    """The sources of one gateway process. Belongs to its loop.

    `static`: addresses that the configuration names; it may change them. `rng`: of the pauses.
    """

    def __init__(
        self,
        tables: Sequence[DiscoveryTable],
        router: Router,
        static: Collection[str],
        *,
        clock: Clock,
        rng: Random,
        make: SourceMaker = make_source,
    ) -> None:
        self._router = router
        self.static = static
        self._clock = clock
        self._rng = rng
        self._news = asyncio.Event()
        self._followed = [_Followed(make(table, clock, self._news.set, rng)) for table in tables]
        self._tasks: list[asyncio.Task[None]] = []
        self._costs: PodCosts | None = None

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self, *, writes_costs: bool = True) -> None:
        """Begin to ask, and to follow. `writes_costs`: of several processes one alone writes on pods."""
        self._tasks = [asyncio.ensure_future(self._ask(one)) for one in self._followed]
        self._tasks.append(asyncio.ensure_future(self._follow()))
        if writes_costs and any(one.source.table.deletion_costs for one in self._followed):
            self._costs = PodCosts(self._pods, self._drain_seconds, self._write_cost, self._clock)
            self._tasks.append(asyncio.ensure_future(self._costs.run()))

    async def close(self) -> None:
        """Ask nobody any more; the fleet stays as it is. Idempotent."""
        await end_all(*self._tasks)
        for one in self._followed:
            await one.source.close()

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
        now, taken = self._clock(), set(self.static)
        accounts = self._accounts()
        for one in self._followed:
            others = taken.union(*(other.known.servers for other in self._followed if other is not one))
            if one.source.confirmed_at is None:
                continue
            answer = {address: found for address, found in one.found().servers.items() if address not in others}
            live = self._live(one.known, accounts)
            one.known, changes = reconcile(one.known, answer, live, now, one.limits)
            for change in changes:
                await self._change(one, change)

    def _accounts(self) -> Mapping[str, Any]:
        """Of the scheduler's workers, where somebody drains."""
        if not any(server.phase == "draining" for one in self._followed for server in one.known.servers.values()):
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
        """Each source, and how its servers are. Changes nothing."""
        now = self._clock()
        return [self._stats_of(one, now) for one in self._followed]

    def _stats_of(self, one: _Followed, now: float) -> dict[str, Any]:
        confirmed_at = one.source.confirmed_at
        found = FoundServers() if confirmed_at is None else one.found()
        phases = Counter(server.phase for server in one.known.servers.values())
        readiness = Counter(server.readiness for server in found.servers.values())
        age = None if confirmed_at is None else max(now - confirmed_at, 0.0)
        return {
            "source": one.source.label,
            "age_seconds": age,
            "servers": {phase: phases[phase] for phase in ("serving", "withheld", "draining")},
            "found": {state.value: readiness[state] for state in Readiness},
            "left_out": one.known.left_out + len(found.unusable),
            "unusable": dict(list(found.unusable.items())[:UNUSABLE_SHOWN]),
            "is_doubted": one.known.doubted_since is not None,
            "failures": one.failures,
            "failing": one.failing if confirmed_at is None or confirmed_at < one.failed_at else "",
        }
