"""`preble worker --engine torch` as real processes: the answers of the model itself, also across a `kill -9`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from preble import LocalConfig, SamplingParams
from preble.engines.base import GenerationRequest
from preble.engines.torch import TorchEngine
from preble.errors import PrebleError
from preble.router import Router
from tests.support.transport import (
    FAST,
    FirstByName,
    WorkerProcess,
    assert_bookings_are_even,
    asynchronous,
    collect,
    until,
)

pytest_plugins = ["tests.support.torch_fixtures"]

SAMPLING = SamplingParams(max_new_tokens=120, ignore_eos=True)


def prompt(number: int) -> list[int]:
    """Prompts that share their first 60 tokens."""
    return [*range(20, 80), 5 + number, 11]


@pytest.fixture(scope="module")
def workers(tiny_model_dir: Path) -> Iterator[list[WorkerProcess]]:
    """Two worker processes of one model."""
    options = ["--model", str(tiny_model_dir), "--dtype", "float32", "--device", "cpu", "--threads", "1"]
    options += ["--kv-capacity-tokens", "4000", "--token-budget", "64", "--max-model-tokens", "600"]
    started = [WorkerProcess("--engine", "torch", *options, "--id", name) for name in ("a", "b")]
    yield started
    for one in started:
        one.stop()


@pytest.fixture(scope="module")
def answers(tiny_model_dir: Path) -> list[list[int]]:
    """What one undisturbed engine in this process says to each prompt."""
    engine = TorchEngine(tiny_model_dir, local=LocalConfig(4000), dtype="float32", device="cpu")
    for number in range(4):
        engine.submit(GenerationRequest(str(number), np.array(prompt(number), np.int32), SAMPLING))
    tokens: list[list[int]] = [[] for _ in range(4)]
    while engine.has_work():
        for chunk in engine.step():
            tokens[int(chunk.request_id)] += chunk.token_ids
    engine.close()
    return tokens


@asynchronous
async def test_the_model_answers_through_the_wire_and_a_kill_changes_no_token(
    workers: list[WorkerProcess], answers: list[list[int]]
) -> None:
    async with Router([one.endpoint for one in workers], config=FAST, policy=FirstByName()) as router:
        running = [asyncio.ensure_future(collect(router.generate(prompt(i), SAMPLING))) for i in range(4)]
        await until(lambda: router.stats()["output_tokens"] > 60, "all are under way")
        workers[0].kill()
        done = await asyncio.gather(*running)
        assert [tokens for tokens, _ in done] == answers
        assert router.stats()["resumed"] == 4 and {chunks[-1].worker for _, chunks in done} == {"b"}
        _, chunks = await collect(router.generate(prompt(9), SAMPLING))
        assert chunks[0].cached_tokens is not None and chunks[0].cached_tokens >= 60, "prefixes are reused"
        assert_bookings_are_even(router)


@asynchronous
async def test_a_worker_refuses_a_request_beyond_its_max_model_tokens(workers: list[WorkerProcess]) -> None:
    async with Router([workers[1].endpoint], config=FAST) as router:
        with pytest.raises(PrebleError, match="600"):
            await collect(router.generate(list(range(5, 605)), SAMPLING))
        assert_bookings_are_even(router)
