"""Following running servers without asking them for a token: their cache events into a ledger, their /metrics into
totals. Owns the connections, when it counts, and what went wrong with whom; what it means is `findings`'s.

A server is asked for nothing but what it is (`EngineServer.info`), its load and its metrics, every `POLL_SECONDS`. One
that does not answer is named and does not hold up the others; one that comes back, or was restarted, is followed on.
Counting begins once every rank has replayed what its engine still keeps, at the latest after `CATCH_UP_SECONDS`: so
what was cached before is known where there is a replay socket, and counted nowhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import zmq.asyncio

from ..._kv_index.event_batch import EventBatch
from ...errors import InvalidInput, PrebleError
from ...transport.engine_servers.http_client import EngineServer
from ...transport.engine_servers.kv_event_subscriber import EventFeed, FeedListener
from ...transport.engine_servers.served_totals import ServedTotals, served_totals
from ...transport.engine_servers.server_info import ServerInfo, ServerOptions
from ...transport.namespaces import namespace_of
from ...transport.tasks import end_all, within
from .ledger import CacheLedger, LedgerBounds, Unit, unit_tokens_of
from .requests import Counted

POLL_SECONDS = 2.0
CATCH_UP_SECONDS = 10.0
SETTLE_SECONDS, SETTLE_ROUNDS = 0.2, 5
COUNTED_MAX = 1_000  # intervals of a server that are kept; at that many, neighbours become one
PROBLEMS_MAX = 8  # of a server that are named


@dataclass(slots=True, eq=False)
class AuditedServer:
    """What is known of one server. `ranks`: the ledger's numbers of its caches. `served`: between the first reading of
    its metrics and the last, None where it has none. `running`: requests that ran when counting began, and at its
    end."""

    url: str
    info: ServerInfo | None = None
    ranks: range = range(0)
    served: ServedTotals | None = None
    running: list[int] = field(default_factory=list)
    counted: list[Counted] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unanswered: int = 0
    restarts: int = 0
    feeds: list[EventFeed] = field(default_factory=list)
    unreadable: int = 0
    _last: ServedTotals | None = None
    _last_at: float = 0.0

    @property
    def has_events(self) -> bool:
        return bool(self.feeds)

    @property
    def in_flight(self) -> int:
        """By how many more requests ran at the end than at the start; 0 where it did not say it twice."""
        return self.running[-1] - self.running[0] if len(self.running) > 1 else 0

    def name_problem(self, text: str) -> None:
        """Keep it once; no more than `PROBLEMS_MAX`."""
        if text not in self.problems and len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)

    def take_metrics(self, text: str, now: float) -> None:
        """One more reading of its metrics."""
        if self.info is None:
            return
        totals, problems = served_totals(self.info.engine, text)
        for problem in problems:
            self.name_problem(problem)
        if totals is None:
            return
        if self._last is not None:
            between = totals.since(self._last)
            if between is None:
                self.restarts += 1
                between = totals  # all it has served since then
            self.served = between if self.served is None else self.served.plus(between)
            self._keep(Counted(self._last_at, now, between.requests, between.ttft.count, between.ttft.sum))
        self._last, self._last_at = totals, now

    def start_counting(self) -> None:
        """What came before does not count; the last reading stands."""
        self.served, self.counted, self.restarts = None, [], 0

    def _keep(self, one: Counted) -> None:
        self.counted.append(one)
        if len(self.counted) > COUNTED_MAX:
            pairs = zip(self.counted[::2], self.counted[1::2], strict=False)
            odd = self.counted[-1:] if len(self.counted) % 2 else []
            self.counted = [one.plus(other) for one, other in pairs] + odd


class _RankListener(FeedListener):
    """Puts one rank's batches into the ledger."""

    def __init__(self, ledger: CacheLedger, rank: int, server: AuditedServer, clock: Callable[[], float]) -> None:
        self._ledger, self._rank, self._server, self._clock = ledger, rank, server, clock

    def on_payload(self, payload: bytes) -> None:
        """A batch; one that cannot be read is counted, and makes what is cached there unknown."""
        try:
            events = EventBatch(payload).events(namespace_of=namespace_of)
        except InvalidInput:
            self._server.unreadable += 1
            self._ledger.forget(self._rank)
            return
        now = self._clock()
        for event in events:
            self._ledger.apply(self._rank, event, now)

    def on_resync(self) -> None:
        """Events are lost for good, or the engine was restarted."""
        self._ledger.forget(self._rank)


@dataclass(slots=True, eq=False)
class Received:
    """All that was received. `seconds`: how long it was counted; `held`: what each rank cached when that began."""

    servers: list[AuditedServer]
    ledger: CacheLedger
    seconds: float = 0.0
    started: float = 0.0
    held: dict[int, list[Unit]] = field(default_factory=dict)
    is_interrupted: bool = False


async def listen(
    urls: Sequence[str], options: ServerOptions, seconds: float, *, clock: Callable[[], float],
    stop: asyncio.Event, bounds: LedgerBounds | None = None, poll_seconds: float = POLL_SECONDS,
    on_poll: Callable[[Received], None] = lambda _: None,
) -> Received:  # fmt: skip
    """Follow the servers for so long, or until `stop`. `on_poll` is called when counting begins, and at every poll.
    Raises the first server's `PrebleError` where none answers."""
    servers = [AuditedServer(url.rstrip("/")) for url in urls]
    clients = [EngineServer(url, replace(options, require_events=False)) for url in urls]
    context = zmq.asyncio.Context()
    tasks: list[asyncio.Future[None]] = []
    try:
        errors = await asyncio.gather(*map(_introduce, servers, clients))
        if all(errors):
            raise next(error for error in errors if error)
        received = Received(servers, _ledger_of(servers, bounds))
        tasks = [asyncio.ensure_future(_follow(feed)) for feed in _feeds(received, context, clock)]
        await _caught_up(received, stop)
        await asyncio.gather(*(_poll(one, client, clock) for one, client in zip(servers, clients, strict=True)))
        await asyncio.gather(*(_ask_load(one, client) for one, client in zip(servers, clients, strict=True)))
        for one in servers:
            one.start_counting()
        received.held = {rank: received.ledger.resident_leaves(rank) for rank in range(len(received.ledger.ranks))}
        received.ledger.counts = True
        received.started = clock()
        on_poll(received)
        tasks += [
            asyncio.ensure_future(_poll_on(one, client, clock, poll_seconds))
            for one, client in zip(servers, clients, strict=True)
        ]
        await _wait(received, seconds, clock, stop, poll_seconds, on_poll)
        ends = [_poll(one, client, clock) for one, client in zip(servers, clients, strict=True)]
        ends += [_ask_load(one, client) for one, client in zip(servers, clients, strict=True)]
        await _briefly(asyncio.gather(*ends), options)
        received.seconds = clock() - received.started
        received.is_interrupted = stop.is_set()
        await _settle(received)
        return received
    finally:
        await end_all(*tasks)
        await asyncio.gather(*(client.close() for client in clients))
        context.destroy(linger=0)


async def _introduce(server: AuditedServer, client: EngineServer) -> PrebleError | None:
    try:
        server.info = await client.info()
    except PrebleError as error:
        server.name_problem(str(error))
        return error
    if not server.info.events:
        server.name_problem(f"{server.url} publishes no cache events: {server.info.advice[0]}")
    for text in server.info.advice:
        if text.startswith("/metrics"):
            server.name_problem(f"{server.url}: {text}")
    return None


def _ledger_of(servers: Sequence[AuditedServer], bounds: LedgerBounds | None) -> CacheLedger:
    """A ledger with a number for each rank of each server that answered."""
    count = 0
    for server in servers:
        ranks = server.info.ranks if server.info is not None else 0
        server.ranks = range(count, count + ranks)
        count += ranks
    sizes = [server.info.block_size for server in servers if server.info is not None]
    return CacheLedger(count, unit_tokens_of(sizes), bounds)


def _feeds(received: Received, context: zmq.asyncio.Context, clock: Callable[[], float]) -> list[EventFeed]:
    found = []
    for server in received.servers:
        for rank, source in zip(server.ranks, server.info.events if server.info is not None else (), strict=False):
            listener = _RankListener(received.ledger, rank, server, clock)
            server.feeds.append(EventFeed(replace(source, load_endpoint=""), listener, context=context))
        found += server.feeds
    return found


async def _follow(feed: EventFeed) -> None:
    with suppress(PrebleError):  # an endpoint that is none: nothing comes, which its counters say
        await feed.run()


async def _caught_up(received: Received, stop: asyncio.Event) -> None:
    waits = [feed.caught_up() for server in received.servers for feed in server.feeds]
    with suppress(asyncio.TimeoutError):
        await within(CATCH_UP_SECONDS, _first(asyncio.gather(*waits), stop.wait()))


async def _first(*works: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_all(*tasks)


async def _briefly(work: Awaitable[object], options: ServerOptions) -> None:
    with suppress(asyncio.TimeoutError):
        await within(min(2.0, options.answer_seconds), _first(work))


async def _wait(
    received: Received, seconds: float, clock: Callable[[], float], stop: asyncio.Event, poll_seconds: float,
    on_poll: Callable[[Received], None],
) -> None:  # fmt: skip
    while not stop.is_set() and (left := received.started + seconds - clock()) > 0.0:
        with suppress(asyncio.TimeoutError):
            await within(min(poll_seconds, left), stop.wait())
        received.seconds = clock() - received.started
        on_poll(received)


async def _settle(received: Received) -> None:
    """What was published before the end may still be on its way: wait until nothing comes for a moment."""
    for _ in range(SETTLE_ROUNDS):
        before = [feed.counters.batches for server in received.servers for feed in server.feeds]
        await asyncio.sleep(SETTLE_SECONDS)
        if before == [feed.counters.batches for server in received.servers for feed in server.feeds]:
            return


async def _poll_on(server: AuditedServer, client: EngineServer, clock: Callable[[], float], seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        await _poll(server, client, clock)


async def _poll(server: AuditedServer, client: EngineServer, clock: Callable[[], float]) -> None:
    """Read its metrics once; a server that does not answer is counted."""
    if server.info is None:
        return
    try:
        text = await client.metrics()
    except PrebleError as error:
        server.unanswered += 1
        server.name_problem(f"{server.url} did not answer: {error}")
        return
    if text is not None:
        server.take_metrics(text, clock())


async def _ask_load(server: AuditedServer, client: EngineServer) -> None:
    if server.info is None:
        return
    with suppress(PrebleError):
        server.running.append(sum(load.running + load.waiting for load in await client.load()))
