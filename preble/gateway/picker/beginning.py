"""Work that mostly need not wait: done at once, and only where it must wait after all in a task. Owns how a coroutine
is begun without one; what is worked on is its caller's.

A task costs a turn of the loop and all that is made for that, which is as much as a tenth of a request. asyncio has
tasks that begin at once (`eager_start`) since Python 3.12; before that it is done by hand here, and what runs until the
coroutine first waits must not ask for its task, as asyncio's time limits of those versions do not.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Generator
from contextvars import copy_context
from typing import Any, TypeVar

T = TypeVar("T")


def begun(work: Coroutine[Any, Any, T], failed: Callable[[BaseException], T]) -> T | asyncio.Task[T]:
    """What `work` comes to, or `failed` makes of its error, where it need not wait; else the task that does the rest of
    it. In a context of its own, as a task. On the loop only."""
    if sys.version_info >= (3, 12):
        task = asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)
        if not task.done():
            return task
        error = task.exception()
        return task.result() if error is None else failed(error)
    context = copy_context()
    try:
        awaited = context.run(work.send, None)
    except StopIteration as end:
        found: T = end.value
        return found
    except Exception as error:  # noqa: BLE001  whatever a task would have kept
        return failed(error)
    return context.run(asyncio.ensure_future, RestOfWork(work, awaited))


class RestOfWork(Coroutine[Any, Any, T]):
    """A coroutine that waits already, for `awaited`: its task begins with that. A task that is cancelled before it has
    begun cancels what is awaited, as it would behind its beginning."""

    def __init__(self, work: Coroutine[Any, Any, T], awaited: Any) -> None:
        self._work = work
        self._awaited = awaited
        self._is_new = True

    def send(self, value: Any) -> Any:
        """Go on."""
        if self._is_new:
            self._is_new = False
            return self._awaited
        return self._work.send(value)

    def throw(self, error: Any, value: Any = None, traceback: Any = None) -> Any:
        """Go on with an error."""
        if self._is_new:
            self._is_new = False
            if self._awaited is not None:
                self._awaited.cancel()
        return self._work.throw(error if value is None else value)

    def close(self) -> None:
        """Give it up."""
        self._work.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._work.__await__()
