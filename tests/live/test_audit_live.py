"""`preble audit` before two real servers of each engine: documents go round robin, and what it counts is compared with
what the engines said of each request.

Run by `make test-live`, on the servers of `test_clients.py`. No figure depends on the clock: tokens are compared.
"""

from __future__ import annotations

import asyncio
import time
import urllib.request

import numpy as np

from preble import SamplingParams
from preble.cli.audit.findings import find
from preble.cli.audit.listening import Received, listen
from preble.cli.audit.report import lines
from preble.transport.engine_servers.http_client import EngineServer
from preble.transport.engine_servers.served_totals import served_totals
from preble.transport.engine_servers.server_info import ServerOptions
from tests.live.live_servers import BLOCK_SIZES, Front

LIMIT_SECONDS = 60.0
DOCUMENTS, QUESTIONS = 5, 4
DOCUMENT_TOKENS, QUESTION_TOKENS, NEW_TOKENS = 640, 45, 6  # the first a multiple of both block sizes


async def traffic(front: Front, rng: np.random.Generator) -> tuple[int, int]:
    """Each document's questions to the servers in turn, the last one asked again. Returns (prompt tokens, cached)."""
    prompt_tokens = cached_tokens = 0
    async with EngineServer(front.servers[0].url) as first, EngineServer(front.servers[1].url) as second:
        for _ in range(DOCUMENTS):
            document = rng.integers(100, 1000, DOCUMENT_TOKENS)
            prompts = [np.append(document, rng.integers(100, 1000, QUESTION_TOKENS)) for _ in range(QUESTIONS)]
            for number, prompt in enumerate([*prompts, prompts[-1]]):
                server = (first, second)[min(number, QUESTIONS - 1) % 2]
                ids = prompt.astype(np.int32)
                sampling = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
                prompt_tokens += len(ids)
                async for piece in server.generate(ids, sampling, request_id=f"audit-{rng.integers(2**60)}"):
                    cached_tokens += piece.cached_tokens or 0
    return prompt_tokens, cached_tokens


def requests_counted(front: Front) -> list[int]:
    """The requests that each server's metrics count."""
    found = []
    for server in front.servers:
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=10.0) as response:
            totals, _ = served_totals(front.engine, response.read().decode())
        assert totals is not None
        found.append(totals.requests)
    return found


def wait_until_all_are_counted(front: Front) -> None:
    """Until no request of before is counted any more: an engine counts one some time after its answer has ended."""
    counted = requests_counted(front)
    for _ in range(10):
        time.sleep(2.0)
        before, counted = counted, requests_counted(front)
        if before == counted:
            return
    raise AssertionError("the servers are never idle")


def test_what_is_counted_is_what_the_engines_said(front: Front) -> None:
    wait_until_all_are_counted(front)
    served: list[tuple[int, int]] = []
    requests = DOCUMENTS * (QUESTIONS + 1)

    async def story() -> Received:
        stop, began = asyncio.Event(), asyncio.Event()
        seen: list[Received] = []

        def on_poll(one: Received) -> None:
            seen.append(one)
            began.set()

        async def run() -> None:
            await began.wait()
            served.append(await traffic(front, np.random.default_rng(5)))
            while sum(one.served.requests for one in seen[0].servers if one.served is not None) < requests:
                await asyncio.sleep(0.05)
            stop.set()

        running = asyncio.ensure_future(run())
        try:
            urls = [server.url for server in front.servers]
            return await listen(
                urls, ServerOptions(), LIMIT_SECONDS, clock=time.monotonic, stop=stop, poll_seconds=0.2, on_poll=on_poll
            )
        finally:
            running.cancel()

    received = asyncio.run(asyncio.wait_for(story(), 2 * LIMIT_SECONDS))
    found = find(received)
    ((prompt_tokens, cached_tokens),) = served
    block = BLOCK_SIZES[front.engine]
    assert found.requests == requests and found.prompt_tokens == prompt_tokens
    assert found.computed_tokens == prompt_tokens - cached_tokens
    assert found.elsewhere_tokens == DOCUMENTS * DOCUMENT_TOKENS and found.again_tokens == 0
    # A prompt's whole blocks are stored, and perhaps one of its output. Asked again, it shows nothing, or a block.
    stored = sum(one.stored.computed for one in found.servers)
    least = DOCUMENTS * (2 * DOCUMENT_TOKENS + QUESTIONS * (QUESTION_TOKENS // block) * block)
    assert least <= stored <= least + requests * block
    assert DOCUMENTS * QUESTIONS <= found.seen <= requests
    # Requests that showed nothing are given prompts that were seen: so many of one that its question looks shared, too.
    assert len(found.prefixes) == 3 and all(one.repeated_tokens == DOCUMENT_TOKENS for one in found.prefixes)
    assert all(0 <= one.end - DOCUMENT_TOKENS < QUESTION_TOKENS for one in found.prefixes)
    assert found.ttft_seconds and found.e2 is not None and found.e2.computed_ratio.value < 1.0
    assert found.lost.resyncs == found.lost.dropped == found.lost.silent_servers == 0
    assert any("no event lost" in line for line in lines(found))
