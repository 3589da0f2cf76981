"""Workers on a local Ray cluster: real actors, real workers, requests under way while they die, come and go. Skipped
without ray. What a fleet decides is tested without Ray, in `test_ray_workers`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

pytest.importorskip("ray", reason="workers on Ray are tested where ray is: pip install 'preble[ray]'")

import ray

from preble import SamplingParams
from preble.integrations.ray_workers import RayFleet, RayPlan
from preble.router import Router
from tests.support.transport import assert_bookings_are_even, asynchronous, collect, expected_tokens, until

CLUSTER_SECONDS = 60.0
OUTPUT_TOKENS = 60
# An iteration takes some milliseconds, so that requests are under way for about half a second.
ARGUMENTS = ("--engine", "simulated", "--time-scale", "0.3")

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def cluster(ray_environment: None) -> Iterator[str]:
    """A cluster of eight logical CPUs and four logical GPUs; the directory it keeps its files in."""
    patch = pytest.MonkeyPatch()
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    patch.setenv("PYTHONPATH", path)
    directory = tempfile.mkdtemp(prefix="ray")  # short: Ray's sockets are in it
    start(directory)
    yield directory
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)
    patch.undo()


def start(directory: str) -> None:
    """Ray gives its own processes 30 s to come up, which a very busy machine may not manage the first time."""
    for attempt in range(3):
        try:
            ray.init(
                address="local",
                num_cpus=8,
                num_gpus=4,
                include_dashboard=False,
                object_store_memory=200 << 20,
                _temp_dir=directory,
                log_to_driver=False,
                logging_level="error",
            )
            return
        except Exception as error:  # of no class of its own
            ray.shutdown()
            if attempt == 2 or "timed out during startup" not in str(error):
                raise


@contextlib.asynccontextmanager
async def serving(workers: int, **needs: Any) -> AsyncIterator[tuple[Router, RayFleet]]:
    """A router and a fleet that serves; afterwards Ray has everything back."""
    router = Router([])
    await router.start(min_workers=0)
    fleet = RayFleet(router, RayPlan(ARGUMENTS, host="127.0.0.1", **needs))
    try:
        await fleet.scale(workers)
        await asyncio.wait_for(fleet.wait(), CLUSTER_SECONDS)
        assert fleet.ready == workers, fleet.stats()
        yield router, fleet
    finally:
        await fleet.close()
        await router.close()
    total = ray.cluster_resources()
    await until(lambda: ray.available_resources().get("CPU") == total["CPU"], "Ray has its CPUs back")


def prompt(number: int) -> list[int]:
    """Prompts of four groups."""
    return [number % 4, *range(300), number]


async def answered(router: Router, number: int) -> bool:
    """Ask, and compare with what an undisturbed worker would have said: lost and doubled tokens would show."""
    tokens, _ = await collect(router.generate(prompt(number), SamplingParams(max_new_tokens=OUTPUT_TOKENS)))
    return tokens == expected_tokens(prompt(number), OUTPUT_TOKENS)


def ask(router: Router, count: int, start: int = 0) -> list[asyncio.Future[bool]]:
    """So many requests, under way."""
    return [asyncio.ensure_future(answered(router, number)) for number in range(start, start + count)]


async def pid_of(fleet: RayFleet, name: str) -> int:
    """The process of an actor."""
    return int((await fleet.workers[name].actor.status())["pid"])


def children(pid: int) -> list[int]:
    """The processes that one has started."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


@asynchronous
async def test_a_killed_actor_is_restarted_and_found_and_no_request_is_lost(cluster: str) -> None:
    async with serving(2) as (router, fleet):
        asked = ask(router, 12)
        await until(lambda: router.stats()["output_tokens"] > 0, "requests are under way")
        name = next(iter(fleet.workers))
        before = fleet.stats()[name]["address"]
        os.kill(await pid_of(fleet, name), signal.SIGKILL)
        await until(lambda: fleet.stats()[name]["state"] == "restarting", "the fleet misses it")
        asked += ask(router, 12, start=12)
        assert all(await asyncio.gather(*asked))
        await asyncio.wait_for(fleet.wait(), CLUSTER_SECONDS)
        after = fleet.stats()[name]
        assert after["state"] == "ready" and after["restarts"] == 1 and after["address"] != before
        workers = router.stats()["workers"]
        assert before not in workers
        await until(lambda: router.stats()["workers"][after["address"]]["state"] == "ready", "the router has it")
        assert all(await asyncio.gather(*ask(router, 8, start=100)))
        assert router.stats()["failed"] == 0
        assert_bookings_are_even(router)


@asynchronous
async def test_a_worker_that_crashes_alone_is_restarted_with_its_actor(cluster: str) -> None:
    async with serving(1) as (router, fleet):
        actor = await pid_of(fleet, "worker-0")
        guard = children(actor)[0]
        asked = ask(router, 4)
        await until(lambda: router.stats()["output_tokens"] > 0, "requests are under way")
        os.kill(children(guard)[0], signal.SIGKILL)
        assert all(await asyncio.gather(*asked))
        await asyncio.wait_for(fleet.wait(), CLUSTER_SECONDS)
        assert await pid_of(fleet, "worker-0") != actor
        assert router.stats()["failed"] == 0


@asynchronous
async def test_scaling_up_and_down_under_load_loses_no_request(cluster: str) -> None:
    async with serving(2) as (router, fleet):
        going, asked = True, list[bool]()

        async def client(number: int) -> None:
            while going:
                asked.append(await answered(router, number + 10 * len(asked)))

        clients = [asyncio.ensure_future(client(number)) for number in range(6)]
        await fleet.scale(3)
        await asyncio.wait_for(fleet.wait(), CLUSTER_SECONDS)
        await until(lambda: len(router.stats()["workers"]) == 3, "the router knows three")
        seen = len(asked)
        await until(lambda: len(asked) > seen + 6, "requests go on")
        await asyncio.wait_for(fleet.scale(1), CLUSTER_SECONDS)
        assert fleet.ready == fleet.size == len(router.stats()["workers"]) == 1
        seen = len(asked)
        await until(lambda: len(asked) > seen + 6, "requests go on")
        going = False
        await asyncio.gather(*clients)
        assert all(asked)
        assert router.stats()["failed"] == 0
        assert_bookings_are_even(router)


@asynchronous
async def test_tensor_parallel_workers_get_their_gpus_on_one_node(cluster: str) -> None:
    async with serving(2, gpus=2) as (_, fleet):
        seen = []
        for name in fleet.workers:
            guard = children(await pid_of(fleet, name))[0]
            words = Path(f"/proc/{children(guard)[0]}/environ").read_text().split("\0")
            visible = next(word.partition("=")[2] for word in words if word.startswith("CUDA_VISIBLE_DEVICES="))
            seen.append(set(visible.split(",")))
        assert [len(one) for one in seen] == [2, 2] and not seen[0] & seen[1]
        await fleet.scale(3)
        await asyncio.sleep(1.0)
        assert fleet.stats()["worker-2"]["state"] == "placing", "there are four GPUs"
        await fleet.scale(2)
        assert set(fleet.workers) == {"worker-0", "worker-1"}


@asynchronous
async def test_a_worker_that_cannot_start_is_given_up_with_the_reason(cluster: str) -> None:
    router = Router([])
    await router.start(min_workers=0)
    wrong = RayFleet(router, RayPlan(("--engine", "nonsense"), host="127.0.0.1"))
    crashing = RayFleet(router, RayPlan(("--engine", "torch", "--model", cluster), host="127.0.0.1", max_restarts=1))
    await asyncio.gather(wrong.scale(1), crashing.scale(1))
    await asyncio.wait_for(asyncio.gather(wrong.wait(), crashing.wait()), CLUSTER_SECONDS)
    for fleet in (wrong, crashing):
        assert fleet.stats()["worker-0"]["state"] == "failed", fleet.stats()
    assert "nonsense" in wrong.stats()["worker-0"]["why"]
    await asyncio.gather(wrong.close(), crashing.close())
    await router.close()


def command(*words: str) -> list[str]:
    """`preble up` on the cluster of these tests."""
    address = ray.get_runtime_context().gcs_address
    start = [sys.executable, "-m", "preble.cli", "up", "--on", "ray", "--ray-address", address]
    more = ["--engine", "simulated", "--workers", "2", "--host", "127.0.0.1", *words]
    return [*start, *more, "--", "--time-scale", "0"]


def test_a_signal_drains_the_command(cluster: str) -> None:
    with subprocess.Popen(command(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        assert [line.split()[0] for line in lines] == ["READY", "READY"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_the_command_serves_prompts_and_gives_everything_back(cluster: str) -> None:
    lines = [json.dumps({"id": n, "token_ids": prompt(n), "sampling": {"max_new_tokens": 3}}) for n in range(6)]
    done = subprocess.run(
        command("--prompts", "-"),
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: dict[int, list[int]] = {}
    for line in done.stdout.splitlines():
        answer = json.loads(line)
        answers.setdefault(answer["id"], []).extend(answer["token_ids"])
    assert answers == {n: expected_tokens(prompt(n), 3) for n in range(6)}
