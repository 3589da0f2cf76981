"""Batch work at real engines that serve by priority: whoever is interactive passes it in the engine's own queue.

Run by `make test-live`. Nothing depends on the clock: one request runs, others wait, and what is compared is the order
in which they begin.
"""

from __future__ import annotations

import asyncio

import pytest

from preble import SamplingParams
from preble.transport.engine_servers.http_client import EngineServer
from preble.transport.engine_servers.server_info import EnginePriorities, ServerOptions
from preble.types import Claim
from tests.live.live_fleet import ENGINES_DIR, python_of
from tests.live.live_servers import LiveServer

OPTIONS = {
    "sglang": ("--enable-priority-scheduling", "--schedule-policy", "fcfs", "--max-running-requests", "1"),
    "vllm": ("--scheduling-policy", "priority", "--max-num-seqs", "1"),
}
PRIORITIES = {"sglang": EnginePriorities(0, -1), "vllm": EnginePriorities(None, 1)}
BATCH, LONG_TOKENS = Claim(priority="batch"), 1500


async def waiting(server: EngineServer, count: int) -> None:
    """Until so many requests wait in the engine's queue."""
    while sum(load.waiting for load in await server.load()) < count:
        await asyncio.sleep(0.02)


async def order_at(server: EngineServer) -> list[str]:
    """In which order requests begin, of which one runs, then two of batch work come, then one that is not."""
    began: list[str] = []

    async def ask(name: str, claim: Claim | None, tokens: int) -> None:
        sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        stream = server.generate([7, 8, 9, 10 + len(name)], sampling, request_id=name, claim=claim)
        async for _ in stream:
            if name not in began:
                began.append(name)

    tasks = [asyncio.ensure_future(ask("runs", None, LONG_TOKENS))]
    while not began:
        await asyncio.sleep(0.02)
    for count, (name, claim) in enumerate([("batch 1", BATCH), ("batch 2", BATCH), ("passes", None)], 1):
        tasks.append(asyncio.ensure_future(ask(name, claim, 2)))
        await waiting(server, count)
    assert began == ["runs"], "it was over before the others waited"
    await asyncio.gather(*tasks)
    return began


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_interactive_requests_pass_batch_work_in_the_engine_s_queue(engine: str) -> None:
    if not python_of(engine).exists():
        pytest.skip(f"no {engine} in {ENGINES_DIR}: run tests/live/install.py --engine {engine}")
    live = LiveServer(engine, 0, *OPTIONS[engine])
    live.start()

    async def scenario() -> list[str]:
        server = EngineServer(live.url, ServerOptions(by_priority=True if engine == "vllm" else None))
        try:
            assert (await server.info()).priorities == PRIORITIES[engine]
            return await asyncio.wait_for(order_at(server), 300.0)
        finally:
            await server.close()

    try:
        live.wait()
        assert asyncio.run(scenario()) == ["runs", "passes", "batch 1", "batch 2"]
    finally:
        live.kill()
