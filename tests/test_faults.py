"""Faults between real processes: each promise of docs/faults.md that no other test file has. Owns stories; networks that
lose frames, namespaces and router processes are `faults_support`'s, the long random run is stress/chaos.py's.

Every answer is compared with what the simulated engine says undisturbed. Waits end when something happens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from faults_support import Island, Lane, NamespaceDenied, Network, RouterProcess, network
from transport_support import (
    HANG_SECONDS,
    FirstByName,
    ScriptedWorker,
    WorkerProcess,
    assert_books_are_even,
    asynchronous,
    collect,
    expected_tokens,
    fast,
    until,
)

from preble import PrefixEvicted, SamplingParams
from preble.router import Router
from preble.transport import wire
from preble.types import BlockRemoved, BlockStored

PROMPT = list(range(200, 400))
LONG = SamplingParams(max_new_tokens=150)
SHORT = SamplingParams(max_new_tokens=3)


@contextlib.asynccontextmanager
async def routing(*endpoints: str, **options: Any) -> AsyncIterator[Router]:
    """A router; its books are even at the end."""
    policy = options.pop("policy", FirstByName())
    async with Router(endpoints, policy=policy, config=fast(**options)) as router:
        yield router
        assert_books_are_even(router)


@contextlib.asynccontextmanager
async def scripted(script: Any = None, **options: Any) -> AsyncIterator[tuple[Router, ScriptedWorker]]:
    """A router before a worker that does what the test says."""
    worker = ScriptedWorker(script)
    try:
        async with routing(worker.endpoint, **options) as router:
            yield router, worker
    finally:
        await worker.close()


def stats_of(router: Router, endpoint: str) -> dict[str, Any]:
    """What the router says of one worker."""
    return dict(router.stats()["workers"][endpoint])


def believed(router: Router, worker_id: str, prompt: list[int] = PROMPT) -> int:
    """Tokens of a prompt that the scheduler believes cached there."""
    return int(router.scheduler.match([*prompt, 1]).matched_tokens.get(worker_id, 0))


# --- events and chunks ------------------------------------------------------------------------------------------------


@asynchronous
async def test_an_eviction_that_overtakes_the_chunk_of_what_it_evicts_is_believed_after_it() -> None:
    computed = asyncio.Event()

    async def answers_late(worker: ScriptedWorker, submit: wire.Submit) -> None:
        await computed.wait()
        chunk = wire.Chunk(submit.request_id, 0, (5,), 0, "length", None, len(worker.batches) - 1)
        await worker.send(chunk)

    async with scripted(answers_late) as (router, worker):
        await published(router, worker)
        answer = asyncio.ensure_future(collect(router.generate(PROMPT, SamplingParams(max_new_tokens=1))))
        await until(lambda: worker.got(wire.Submit), "the request is there")
        worker.silent = True  # no Pong says meanwhile what came first
        before = stats_of(router, worker.endpoint)
        worker.batches.append((PrefixEvicted(np.array(PROMPT, np.int32), 0),))
        await worker.publish(len(worker.batches) - 1)
        await until(
            lambda: any(
                stats_of(router, worker.endpoint)[name] > before[name] for name in ("events_early", "event_batches")
            ),
            "the eviction has come",
        )
        computed.set()
        await answer
        assert believed(router, "scripted") == len(PROMPT), "as when the chunk was sent"
        worker.silent = False
        made = len(worker.batches)
        await until(lambda: stats_of(router, worker.endpoint)["event_batches"] == made, "its turn has come")
        assert believed(router, "scripted") == 0, "computed, then evicted"


async def published(router: Router, worker: ScriptedWorker) -> None:
    """Wait until published events arrive by themselves, without a replay."""
    while not stats_of(router, worker.endpoint)["events_early"]:
        worker.batches.append((BlockRemoved((len(worker.batches),)),))
        await worker.publish(len(worker.batches) - 1)
        await asyncio.sleep(0.01)
