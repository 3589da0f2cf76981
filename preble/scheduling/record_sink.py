"""Where records go when a scheduler is done with them: to a callable or a file, by a thread of their own. Owns the
bounded queue in between; what is in a record is `records.py`'s.

Whoever offers a record never waits: where the queue is full the record is dropped, and counted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from ..errors import InvalidConfig

CLOSE_SECONDS_MAX = 10.0  # how long `close` waits for a sink that does not come back
Write = Callable[[Any], object]


class Sink:
    """Hands each item to `target`, in order, on a thread that starts with the first one.

    `target`: a callable, or the path of a file that lines are added to, made by `line_of` and written as soon as no
    other item waits. `items_max`: bound of the queue. Raises InvalidConfig for a file that cannot be opened. One thread
    at a time may call `offer`; `close` and `stats` any.
    """

    def __init__(self, target: Write | str | os.PathLike[str], line_of: Callable[[Any], str], items_max: int) -> None:
        self._target, self._line_of, self._items_max = target, line_of, items_max
        if not callable(target):
            try:
                open(target, "a", encoding="utf-8").close()
            except OSError as error:
                raise InvalidConfig(f"sink {os.fspath(target)!r} cannot be written: {error.strerror}") from None
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # of the thread's coming and going; held for no longer than that takes
        self.written = self.dropped = self.errors = 0

    def offer(self, item: Any) -> None:
        """Queue an item; drop and count it where the queue is full. Never waits for the sink."""
        if self._queue.qsize() >= self._items_max:
            self.dropped += 1
            return
        with self._lock:
            self._queue.put(item)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(self._queue,), name="preble-records", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Wait until everything offered has been handed over, 10 seconds at most. The next offer starts anew."""
        with self._lock:  # a thread and its queue go together, so that nothing is offered behind the end of one
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put(None)
                self._queue = SimpleQueue()
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_SECONDS_MAX)

    def stats(self) -> dict[str, int]:
        """Items handed over, refused by the target (its exceptions), dropped at the queue's bound, waiting."""
        counts = {"written": self.written, "errors": self.errors, "dropped": self.dropped}
        return {**counts, "waiting": self._queue.qsize()}

    def _run(self, queue: SimpleQueue[Any]) -> None:
        try:
            with self._opened(queue) as write:
                while (item := queue.get()) is not None:
                    self._hand_over(write, item)
        except OSError:  # the file was there and has gone: what waits is lost, and the next offer tries again
            with self._lock:
                if self._queue is queue:
                    self._thread = None
                while not queue.empty():
                    self.errors += queue.get() is not None

    def _hand_over(self, write: Write, item: Any) -> None:
        try:
            write(item)
            self.written += 1
        except Exception:  # noqa: BLE001  whatever a sink raises is its own affair, and no reason to end the thread
            self.errors += 1

    @contextmanager
    def _opened(self, queue: SimpleQueue[Any]) -> Iterator[Write]:
        """What takes an item: the callable itself, or something that adds a line to the file."""
        if callable(self._target):
            yield self._target
            return
        with open(self._target, "a", encoding="utf-8") as file:

            def write(item: Any) -> None:
                file.write(self._line_of(item) + "\n")
                if queue.empty():
                    file.flush()

            yield write
