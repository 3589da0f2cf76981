"""What several routers of one deployment tell each other: where each has booked its calls. Owns the notes, the board
where they hang (a process of its own, which a framework starts), and a router's way there. Books nothing.

    router: a booking begins or ends -> tell (queue, bounded) -> board (bounded) -> hear -> the other routers' books

Routers work without it, each by what it knows itself: while the board cannot be reached, notes wait and the oldest of
too many are dropped; a board that died is made anew by whoever misses it first, and begins empty. A router that comes
late hears what the board still has. Prompts are in notes, as token ids: they stay in memory.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .prompt_extractors import Tokens

logger = logging.getLogger("preble.integrations")

BYTES_MAX = 64 << 20  # of the notes on a board
NOTE_BYTES = 400  # of a note beside its token ids, about
QUEUE_MAX = 8192  # notes of a router that wait to be told
BATCH_MAX = 256  # notes in one message
HEAR_SECONDS = 10.0
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
        """What it takes on a board, about."""
        return NOTE_BYTES + (0 if self.tokens is None else self.tokens.token_ids.nbytes)


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer of a board: notes of other routers, (router, note), oldest first, and where to go on. `missed`: some
    were dropped before they were heard. `epoch` is the board's; another one counts anew."""

    epoch: str
    after: int
    missed: bool
    notes: list[tuple[str, Note]]


class Board:
    """Notes of all routers, the latest in at most `bytes_max` bytes. Belongs to one asyncio loop."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._epoch = secrets.token_hex(8)
        self._bytes_max = bytes_max
        self._notes: deque[tuple[str, Note]] = deque()
        self._first = 0  # the number of the oldest note
        self._bytes = 0
        self._news = asyncio.Event()

    async def tell(self, router: str, notes: Sequence[Note]) -> None:
        """Hang notes of a router; the oldest of too many go."""
        for note in notes:
            self._notes.append((router, note))
            self._bytes += note.bytes
        while self._bytes > self._bytes_max:
            self._bytes -= self._notes.popleft()[1].bytes
            self._first += 1
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def hear(self, router: str, epoch: str, after: int, wait_seconds: float) -> Heard:
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
                return Heard(self._epoch, after, missed, found)
            if after == self._first + len(self._notes):
                await _until(self._news, left)


async def _until(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except asyncio.TimeoutError:
        return


class BoardCalls(Protocol):
    """A board as a router reaches it."""

    async def tell(self, router: str, notes: Sequence[Note]) -> None:
        """As `Board.tell`. Raises whatever ends the connection."""

    async def hear(self, router: str, epoch: str, after: int, wait_seconds: float) -> Heard:
        """As `Board.hear`. Raises whatever ends the connection."""


class BoardClient:
    """A router's way to the board. `connect` finds or makes it; `take` is given the notes of others, in a thread.

    `tell` may be called from any thread, the rest belongs to one asyncio loop. Counts `notes_told`, `notes_heard`,
    `notes_dropped` (over `QUEUE_MAX`), `notes_missed` (times that the board had dropped some), `notes_failed` (`take`
    raised) and `board_failed`.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[BoardCalls]],
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
        self._told = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._epoch, self._after = "", 0

    def start(self) -> None:
        """Begin, or begin again after `close`, in the running loop. Idempotent."""
        if self._task is None:
            self._loop = asyncio.get_running_loop()
            self._task = self._loop.create_task(self._run())

    def tell(self, note: Note) -> None:
        """Have a note told as soon as may be. Before `start` it waits."""
        self._queue.append(note)
        if len(self._queue) > QUEUE_MAX:
            self._queue.popleft()
            self._counters["notes_dropped"] += 1
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._told.set)

    def close(self) -> None:
        """Tell and hear nothing more, and let go of the board. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while True:
            try:
                board = await self._connect()
                await self._both(board)
            except Exception as error:  # noqa: BLE001  of whatever kind: the router goes on without the others
                self._counters["board_failed"] += 1
                logger.info("the board of routers is not reached: %s", type(error).__name__)
                await asyncio.sleep(self._retry_seconds)

    async def _both(self, board: BoardCalls) -> None:
        """Tell and hear until one of them fails, and end both then."""
        tasks = [asyncio.ensure_future(self._send(board)), asyncio.ensure_future(self._listen(board))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _send(self, board: BoardCalls) -> None:
        while True:
            self._told.clear()
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), BATCH_MAX))]
            if not batch:
                await self._told.wait()
                continue
            try:
                await board.tell(self.router, batch)
            except BaseException:  # perhaps it was told, perhaps not: twice does no harm
                self._queue.extendleft(reversed(batch))
                raise
            self._counters["notes_told"] += len(batch)

    async def _listen(self, board: BoardCalls) -> None:
        while True:
            heard = await board.hear(self.router, self._epoch, self._after, HEAR_SECONDS)
            self._epoch, self._after = heard.epoch, heard.after
            self._counters["notes_missed"] += heard.missed
            self._counters["notes_heard"] += len(heard.notes)
            if heard.notes:
                await asyncio.to_thread(self._take_all, heard.notes)

    def _take_all(self, notes: Sequence[tuple[str, Note]]) -> None:
        """Every note is taken for itself: one that fails must not take the others along."""
        for router, note in notes:
            try:
                self._take(router, note)
            except Exception as error:  # noqa: BLE001  whatever it is, the books go on without this note
                self._counters["notes_failed"] += 1
                logger.error("a note of another router failed: %s", type(error).__name__)
