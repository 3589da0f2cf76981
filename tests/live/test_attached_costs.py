"""What real servers cost: profiled over their own interface, said by their own metrics, and learned from requests where
the model that was given is wrong by far.

Run by `make test-live`, before `test_clients.py`, whose servers these are. Nothing is asked of the clock: the machine
may be busy with anything else, so what is compared are predictions, and each may be off by as much as that changes.
"""

from __future__ import annotations

import asyncio
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from preble import CostModel, Router, SamplingParams
from preble._snapshot.accounts import cost_at
from preble.gateway.core.config_tables import ServerTable, options_of
from preble.scheduling.cost_factors import scaled
from preble.transport.engine_servers.http_client import EngineServer
from preble.transport.engine_servers.server_info import ServerOptions
from tests.cli.test_attach import preble
from tests.live.live_servers import Front
from tests.support.transport import collect, until

LIMIT_SECONDS = 600.0
PROFILE_SECONDS = 20
PER_WORKER, AT_ONCE, NEW_TOKENS = 50, 3, 12
FACTOR = 30.0
NEARER = 3.0  # a learned model is nearer than its prior by this power: 30 times off becomes 3.1 times at the most
PROMPTS = (64, 640)  # tokens, from and below
LENGTHS = (256, 640)


@pytest.fixture(scope="module")
def profiles() -> dict[str, CostModel]:
    """What was measured of each engine."""
    return {}


def test_a_running_server_is_profiled(front: Front, tmp_path: Path, profiles: dict[str, CostModel]) -> None:
    asked = ["profile", "--url", front.direct, "--out", str(tmp_path), "--seconds", str(PROFILE_SECONDS), "--seed", "1"]
    code, out, err = asyncio.run(preble(*asked))
    assert code == 0, err
    announced = re.search(r"at most ([\d,]+) requests with ([\d,]+) prompt tokens", out)
    assert announced and front.engine in out.splitlines()[0], out
    assert "Cold prefill" in out and "Error of the fit" in out and re.search(r"decode +median [\d.]+%", out), out
    for name in ("IMBALR", "Th_bal"):
        assert re.search(rf"\({name}\).* [\d.]+$", out, re.MULTILINE), out
    table: Any = yaml.safe_load(out[out.index("servers:") :])["servers"]
    options = options_of(ServerTable(**table[0]))
    assert table[0]["url"] == front.direct
    model = CostModel.load(options.cost_model)
    model.assert_monotone()
    assert 0.0 < model.prefill_time(64) < model.prefill_time(1024) < math.inf
    profiles[front.engine] = model


def test_the_metrics_of_a_server_are_the_first_model(front: Front) -> None:
    """It has served a profile; a router that comes now has no time of its own."""

    async def story() -> None:
        async with EngineServer(front.direct) as server:
            work = (await server.info()).work
        assert work is not None and work.token_seconds is not None and work.requests >= 16
        assert 1 <= work.missed_tokens <= work.prompt_tokens <= 4096
        async with Router([front.direct]) as router:
            await until(lambda: len(router.scheduler.workers) == 1, "the server is there")
            found = cost_at(router.scheduler.core, 0)
        seconds = found.prefill_time(int(work.missed_tokens), int(work.prompt_tokens))
        assert seconds == pytest.approx(work.prefill_seconds, rel=0.3)
        assert found.decode_time(1, int(work.prompt_tokens)) == pytest.approx(work.token_seconds, rel=0.1)

    asyncio.run(asyncio.wait_for(story(), LIMIT_SECONDS))


async def learned(front: Front, prior: Path, seed: int) -> list[CostModel]:
    """What is taken for both servers, said to be `prior`, after `PER_WORKER` requests each."""
    rng = np.random.default_rng(seed)
    options = ServerOptions(cost_model=str(prior))
    gate = asyncio.Semaphore(AT_ONCE)
    async with Router([(server.url, options) for server in front.servers]) as router:
        await until(lambda: len(router.scheduler.workers) == 2, "both servers are there")

        async def ask() -> str:
            prompt = rng.integers(100, 1000, int(rng.integers(*PROMPTS)), dtype=np.int32)
            async with gate:
                _, chunks = await collect(
                    router.generate(prompt, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
                )
            return chunks[0].worker

        placed = await asyncio.gather(*(ask() for _ in range(2 * PER_WORKER)))
        router.scheduler.tick()
        assert len(set(placed)) == 2, "no model is so wrong that a server gets nothing"
        return [cost_at(router.scheduler.core, index) for index in range(2)]


def test_a_model_wrong_by_far_gives_way_to_what_requests_take(
    front: Front, tmp_path: Path, profiles: dict[str, CostModel]
) -> None:
    if front.engine not in profiles:
        pytest.skip("nothing was profiled")
    right, found = profiles[front.engine], {}

    async def story() -> None:
        for number, factor in enumerate((1.0, FACTOR, 1.0 / FACTOR)):
            path = tmp_path / f"{number}.json"
            scaled(right, (math.log(factor),) * 5).save(path)
            found[factor] = await learned(front, path, number)

    asyncio.run(asyncio.wait_for(story(), LIMIT_SECONDS))
    most = FACTOR ** (1.0 / NEARER)
    for factor in (FACTOR, 1.0 / FACTOR):
        for one, other in zip(found[factor], found[1.0], strict=True):
            ratios = [one.prefill_time(length) / other.prefill_time(length) for length in LENGTHS]
            ratios.append(one.decode_time(NEW_TOKENS, 1024, 2) / other.decode_time(NEW_TOKENS, 1024, 2))
            assert all(1.0 / most <= ratio <= most for ratio in ratios), (factor, ratios)
