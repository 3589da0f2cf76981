"""Texts that wait for a thread to be tokenised. Owns their order, their bound, and the threads.

Shorter texts go first: each has the place that it would have if all were served a character at a time, so that what
comes later and is short does not wait, and what is long is overtaken by at most its own length. Texts over
`LONG_CHARACTERS` have one thread for themselves: they never hold the threads of the others, and never need more memory
than one of them does. Who no longer wants a text takes it out; where it runs already, its work can ask.

At its bound of `waiting_max` texts: `QueueFull`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...errors import QueueFull

T = TypeVar("T")

LONG_CHARACTERS = 256 << 10


@dataclass(order=True, slots=True)
class _Text:
    """One that waits or is being tokenised."""

    place: int
    number: int
    work: Callable[[threading.Event], Any] = field(compare=False)
    result: asyncio.Future[Any] = field(compare=False)
    stop: threading.Event = field(compare=False, default_factory=threading.Event)


class _Lane:
    """Texts of one kind, and the threads that are free for them."""

    def __init__(self, threads: int) -> None:
        self.free = threads
        self.served = 0  # the place of the last that was begun
        self.waiting: list[_Text] = []


class TextQueue:
    """Runs the tokenising of texts, in threads of its own. Belongs to one asyncio loop."""

    def __init__(self, threads: int, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._short, self._long = _Lane(threads), _Lane(1)
        self._numbers = itertools.count()
        self._pool = ThreadPoolExecutor(threads + 1, thread_name_prefix="preble-tokenizer")

    async def run(self, characters: int, work: Callable[[threading.Event], T]) -> T:
        """What `work` returns, done in a thread; it is given an event that is set when nobody wants it any more.

        Raises `QueueFull`, or what `work` raises. Cancelled, it takes the text out.
        """
        lane = self._long if characters > LONG_CHARACTERS else self._short
        if not lane.free and len(self._short.waiting) + len(self._long.waiting) >= self._waiting_max:
            raise QueueFull(f"{self._waiting_max} texts wait to be tokenised, the bound of this gateway")
        loop = asyncio.get_running_loop()
        text = _Text(lane.served + characters, next(self._numbers), work, loop.create_future())
        heapq.heappush(lane.waiting, text)
        self._start(lane)
        try:
            result: T = await text.result
            return result
        except asyncio.CancelledError:
            text.stop.set()
            if text in lane.waiting:
                lane.waiting.remove(text)
                heapq.heapify(lane.waiting)
            raise

    def close(self) -> None:
        """End the threads; texts that wait are not tokenised. Idempotent."""
        for lane in (self._short, self._long):
            for text in lane.waiting:
                text.result.cancel()
            lane.waiting.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _start(self, lane: _Lane) -> None:
        while lane.free and lane.waiting:
            text = heapq.heappop(lane.waiting)
            lane.free -= 1
            lane.served = text.place
            task = asyncio.get_running_loop().run_in_executor(self._pool, text.work, text.stop)
            task.add_done_callback(lambda done, text=text: self._ended(lane, text, done))  # type: ignore[misc]

    def _ended(self, lane: _Lane, text: _Text, done: asyncio.Future[Any]) -> None:
        lane.free += 1
        error = None if done.cancelled() else done.exception()
        if text.result.done():
            pass
        elif done.cancelled():
            text.result.cancel()
        elif error is not None:
            text.result.set_exception(error)
        else:
            text.result.set_result(done.result())
        self._start(lane)
