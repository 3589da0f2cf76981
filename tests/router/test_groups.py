"""Samples of one prompt through the router: the scheduler is asked with their group, by every way to a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Any

import pytest

from preble.errors import InvalidInput
from preble.router import Router
from preble.transport import wire
from tests.support.relay import ScriptedServer
from tests.support.transport import FAST, FirstByName, ScriptedWorker, asynchronous, collect


class Groups(FirstByName):
    """Notes which group each request was of."""

    def __init__(self) -> None:
        self.seen: list[Hashable] = []

    def score(self, request: Any, workers: Any) -> Any:
        self.seen.append(request.group)
        return super().score(request, workers)


async def answer(worker: Any, submit: Any) -> None:
    await worker.send(wire.OutputChunk(submit.request_id, 0, (7,), 0, "length"))


@asynchronous
async def test_a_request_takes_its_group_to_the_scheduler_also_where_it_waits_for_its_turn() -> None:
    worker, policy = ScriptedWorker(answer), Groups()
    async with Router([worker.endpoint], policy=policy, config=FAST) as router:
        for group in ("set", None):
            await collect(router.generate([1, 2, 3], group=group))
            await collect(router.generate([1, 2, 3], group=group, tenant="a"))
        with pytest.raises(InvalidInput, match="group"):
            router.generate([1], group=[])
    await worker.close()
    assert policy.seen == ["set", "set", None, None]


@asynchronous
async def test_e2_names_its_choice_for_samples_group() -> None:
    workers = [ScriptedWorker(answer, worker_id=name) for name in ("a", "b")]
    async with Router([worker.endpoint for worker in workers], config=FAST) as router:
        streams = [collect(router.generate(list(range(300)), group="set")) for _ in range(4)]
        found = [chunks[0].decision for _, chunks in await asyncio.gather(*streams)]
    for worker in workers:
        await worker.close()
    assert [decision.reason for decision in found] == ["group"] * 4


@asynchronous
async def test_a_placement_takes_its_group_to_the_scheduler() -> None:
    server, policy = ScriptedServer(), Groups()
    await server.start()
    router = Router([server.url], policy=policy, config=FAST)
    await router.start()
    try:
        for options in ({}, {"group": "set"}, {"group": "set", "priority": "batch"}):
            placement = await router.place([1, 2, 3], **options)
            placement.cancel()
    finally:
        await router.close()
        await server.stop()
    assert policy.seen == [None, "set", "set"]
