"""What several routers of one deployment report to each other: where each has booked its calls. Owns the notes, the
exchange where they are kept (a process of its own, which a framework starts), and a router's way there. Books nothing.

    router: a booking begins or ends -> publish (queue, bounded) -> exchange (bounded) -> poll -> other routers book

Routers work without it, each by what it knows itself: while the exchange cannot be reached, notes wait and the oldest
of too many are dropped; an exchange that died is made anew by whoever misses it first, and begins empty. A router that
comes late receives what the exchange still has. Prompts are in notes, as token ids: they stay in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..transport.tasks import running
from .prompt_extractors import Tokens

logger = logging.getLogger("preble.integrations")

BYTES_MAX = 64 << 20  # of the notes on an exchange
NOTE_BYTES = 400  # of a note beside its token ids, about
QUEUE_MAX = 8192  # notes of a router that wait to be published
BATCH_MAX = 256  # notes in one message
POLL_SECONDS = 10.0
RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Note:
    """One booking of a router begins (`tokens` are its prompt's) or ends (None). `given_back`: it ends because the
    call was not made there."""

    booking: int
    replica: str
    tokens: Tokens | None = None
    given_back: bool = False

    @property
    def bytes(self) -> int:
        """What it takes on an exchange, about."""
        return NOTE_BYTES + (0 if self.tokens is None else self.tokens.token_ids.nbytes)


@dataclass(frozen=True, slots=True)
class ReceivedNotes:
    """An answer of an exchange: notes of other routers, (router, note), oldest first, and where to go on. `missed`:
    some were dropped before they were received. `epoch` is the exchange's; another one counts anew."""

    epoch: str
    after: int
    missed: bool
    notes: list[tuple[str, Note]]


class BookingExchange:
    """Notes of all routers, the latest in at most `bytes_max` bytes. Belongs to one asyncio loop."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._epoch = secrets.token_hex(8)
        self._bytes_max = bytes_max
        self._notes: deque[tuple[str, Note]] = deque()
        self._first = 0  # the number of the oldest note
        self._bytes = 0
        self._news = asyncio.Event()

    async def publish(self, router: str, notes: Sequence[Note]) -> None:
        """Keep notes of a router; the oldest of too many go."""
        for note in notes:
            self._notes.append((router, note))
            self._bytes += note.bytes
        while self._bytes > self._bytes_max:
            self._bytes -= self._notes.popleft()[1].bytes
            self._first += 1
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def poll(self, router: str, epoch: str, after: int, wait_seconds: float) -> ReceivedNotes:
        """Other routers' notes from number `after` on, at most `BATCH_MAX` at once; waits until there is one, or for
        `wait_seconds`."""
        ends = asyncio.get_running_loop().time() + wait_seconds
        after = after if epoch == self._epoch else 0
        missed = after < self._first and after > 0
        while True:
            after = max(after, self._first)
            places = range(after - self._first, min(len(self._notes), after - self._first + BATCH_MAX))
            fresh = [self._notes[place] for place in places]  # mostly the latest: those are found from the end
            after += len(fresh)
            found = [(who, note) for who, note in fresh if who != router]
            left = ends - asyncio.get_running_loop().time()
            if found or missed or left <= 0.0:
                return ReceivedNotes(self._epoch, after, missed, found)
            if after == self._first + len(self._notes):
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._news.wait(), left)


class ExchangeCalls(Protocol):
    """An exchange as a router reaches it."""

    async def publish(self, router: str, notes: Sequence[Note]) -> None:
        """As `BookingExchange.publish`. Raises whatever ends the connection."""

    async def poll(self, router: str, epoch: str, after: int, wait_seconds: float) -> ReceivedNotes:
        """As `BookingExchange.poll`. Raises whatever ends the connection."""


class ExchangeClient:
    """A router's way to the exchange. `connect` finds or makes it; `take` is given the notes of others, in a thread.

    `publish` may be called from any thread, the rest belongs to one asyncio loop. Counts `notes_published`,
    `notes_received`, `notes_dropped` (over `QUEUE_MAX`), `notes_missed` (times that the exchange had dropped some),
    `notes_failed` (`take` raised) and `exchange_failed`.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[ExchangeCalls]],
        take: Callable[[str, Note], object],
        counters: Counter[str],
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self.router = secrets.token_hex(8)
        self._connect = connect
        self._take = take
        self._counters = counters
        self._retry_seconds = retry_seconds
        self._queue: deque[Note] = deque()
        self._queued = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._epoch, self._after = "", 0

    def start(self) -> None:
        """Begin, or begin again after `close`, in the running loop. Idempotent."""
        if self._task is None:
            self._loop = asyncio.get_running_loop()
            self._task = self._loop.create_task(self._run())

    def publish(self, note: Note) -> None:
        """Have a note published as soon as may be. Before `start` it waits."""
        self._queue.append(note)
        if len(self._queue) > QUEUE_MAX:
            self._queue.popleft()
            self._counters["notes_dropped"] += 1
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queued.set)

    def close(self) -> None:
        """Publish and poll no more, and let go of the exchange. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while True:
            try:
                await self._both(await self._connect())
            except Exception as error:  # noqa: BLE001  of whatever kind: the router goes on without the others
                self._counters["exchange_failed"] += 1
                logger.info("the booking exchange is not reached: %s", type(error).__name__)
                await asyncio.sleep(self._retry_seconds)

    async def _both(self, exchange: ExchangeCalls) -> None:
        """Publish and poll until one of them fails, and end both then."""
        async with running(self._send(exchange), self._listen(exchange)) as tasks:
            await asyncio.gather(*tasks)

    async def _send(self, exchange: ExchangeCalls) -> None:
        while True:
            self._queued.clear()
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), BATCH_MAX))]
            if not batch:
                await self._queued.wait()
                continue
            try:
                await exchange.publish(self.router, batch)
            except BaseException:  # perhaps it was published, perhaps not: twice does no harm
                self._queue.extendleft(reversed(batch))
                raise
            self._counters["notes_published"] += len(batch)

    async def _listen(self, exchange: ExchangeCalls) -> None:
        while True:
            received = await exchange.poll(self.router, self._epoch, self._after, POLL_SECONDS)
            self._epoch, self._after = received.epoch, received.after
            self._counters["notes_missed"] += received.missed
            self._counters["notes_received"] += len(received.notes)
            if received.notes:
                await asyncio.to_thread(self._take_all, received.notes)

    def _take_all(self, notes: Sequence[tuple[str, Note]]) -> None:
        """Every note is taken for itself: one that fails must not take the others along."""
        for router, note in notes:
            try:
                self._take(router, note)
            except Exception as error:  # noqa: BLE001  whatever it is, the bookings go on without this note
                self._counters["notes_failed"] += 1
                logger.error("a note of another router failed: %s", type(error).__name__)
