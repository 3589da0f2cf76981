"""Tasks that live no longer than what they are for: who ends them, and that nothing which they held stays."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable

import pytest

from preble.transport.tasks import first_of, running, within
from tests.support.transport import HANG_SECONDS, asynchronous


class Held:
    """What a work reads."""


class Failing:
    """A work that holds something, and fails or waits for ever."""

    def __init__(self) -> None:
        self.held: weakref.ref[Held] | None = None

    async def fail(self) -> None:
        """Raises `OSError`."""
        held = Held()
        self.held = weakref.ref(held)
        await asyncio.sleep(0)
        raise OSError(type(held).__name__)

    async def wait(self) -> None:
        """Never ends by itself."""
        held = Held()
        self.held = weakref.ref(held)
        await asyncio.Event().wait()


async def fails_within(work: Failing) -> None:
    await within(HANG_SECONDS, work.fail())


async def comes_too_late(work: Failing) -> None:
    await within(0.0, work.wait())


async def fails_first(work: Failing) -> None:
    await first_of(work.fail(), asyncio.Event().wait())


async def is_ended_with_the_block(work: Failing) -> None:
    async with running(work.wait(), Failing().wait()):
        await asyncio.sleep(0)
        raise OSError


async def fails_in_a_block(work: Failing) -> None:
    async with running(work.fail(), Failing().wait()) as tasks:
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("fail", [fails_within, comes_too_late, fails_first, is_ended_with_the_block, fails_in_a_block])
@asynchronous
async def test_what_a_work_that_fails_held_is_freed_at_once(
    fail: Callable[[Failing], Awaitable[None]], uncollected: None
) -> None:
    """A task, its error and the frame that waited for it knew each other, and stayed until a collection of garbage."""
    work = Failing()
    with pytest.raises((OSError, asyncio.TimeoutError)) as caught:
        await fail(work)
    assert work.held is not None
    del caught
    await asyncio.sleep(0)  # who was cancelled ends
    await asyncio.sleep(0)
    assert work.held() is None
