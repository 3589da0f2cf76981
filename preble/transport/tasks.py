"""Tasks that live no longer than what they are for. Owns how some run side by side, how they are ended, and a bound on
a wait; knows no work.

A task knows its error, an error the frames that it passed through, and such a frame its task: a cycle, in which all
that the work held would stay until a collection of garbage. So the frames here forget their tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


async def end_all(*tasks: asyncio.Future[Any]) -> None:
    """Cancel them, and wait until all have ended, in whatever way."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def running(*works: Awaitable[T]) -> AsyncIterator[list[asyncio.Future[T]]]:
    """Works as tasks beside a block, at whose end they are ended, and the list is emptied."""
    tasks: list[asyncio.Future[T]] = [asyncio.ensure_future(work) for work in works]
    try:
        yield tasks
    finally:
        await end_all(*tasks)
        tasks.clear()


async def first_of(*works: Awaitable[T]) -> T:
    """What the first to end comes to; the others are ended then."""
    async with running(*works) as tasks:
        return (await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0].pop().result()


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, or `asyncio.TimeoutError`. Before Python 3.12 `asyncio.wait_for` loses a cancellation
    that comes together with the result, and a loop around it then never ends."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=seconds)
        if task.done():
            return task.result()
    finally:
        task.cancel()
        del task
    raise asyncio.TimeoutError
