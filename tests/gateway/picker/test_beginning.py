"""Work that is done at once where it need not wait: as a task would do it, without one."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

import pytest

from preble.gateway.picker.beginning import begun
from tests.support.transport import asynchronous

PLACE: ContextVar[str] = ContextVar("place", default="outside")


def failed(error: BaseException) -> Any:
    """What becomes of an error."""
    return type(error).__name__, str(error)


async def work(gate: asyncio.Event | None = None, error: Exception | None = None) -> list[str]:
    """Says where it runs, before and behind the gate."""
    found = [PLACE.get()]
    PLACE.set("inside")
    if gate is not None:
        await asyncio.sleep(0)
        await gate.wait()
        await asyncio.wait_for(gate.wait(), 30.0)
    if error is not None:
        raise error
    return [*found, PLACE.get()]


@asynchronous
async def test_what_need_not_wait_is_done_at_once_and_leaves_no_trace() -> None:
    tasks = asyncio.all_tasks()
    assert begun(work(), failed) == ["outside", "inside"]
    assert begun(work(error=ValueError("no")), failed) == ("ValueError", "no")
    assert PLACE.get() == "outside" and asyncio.all_tasks() == tasks


@asynchronous
async def test_what_waits_goes_on_in_a_task() -> None:
    gate = asyncio.Event()
    tasks = [begun(work(gate), failed), begun(work(gate, ValueError("late")), failed)]
    assert all(isinstance(task, asyncio.Task) for task in tasks)
    await asyncio.sleep(0)
    gate.set()
    assert await tasks[0] == ["outside", "inside"]
    with pytest.raises(ValueError, match="late"):
        await tasks[1]
    assert PLACE.get() == "outside"


@asynchronous
async def test_a_cancellation_reaches_what_waits() -> None:
    seen: list[str] = []

    async def waits(catches: bool) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            if not catches:
                raise
        await asyncio.sleep(0)
        return "went on"

    for at_once in (True, False):
        stubborn, task = begun(waits(True), failed), begun(waits(False), failed)
        assert isinstance(stubborn, asyncio.Task) and isinstance(task, asyncio.Task)
        if not at_once:
            await asyncio.sleep(0)
        stubborn.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await stubborn == "went on"
    assert seen == ["cancelled"] * 4
