"""`preble up --on ray` without Ray: its options, and a whole run over workers that are placed in this process. The
command on a cluster is in `integrations/test_ray_fleet`."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from preble import cli
from preble.cli import up_ray
from preble.errors import InsecureBind, InvalidConfig, MissingExtra
from preble.integrations import ray_actor
from preble.integrations.autoscale import AutoscaleConfig
from preble.integrations.ray_actor import NODE, ActorPlan, WorkerActor
from preble.integrations.ray_workers import ActorLost, RayPlan
from preble.transport.security import create_keys
from tests.support.transport import HANG_SECONDS, expected_tokens, until

LOCAL = ["--host", "127.0.0.1"]


class HereActor:
    """A `WorkerActor` of this process, as a fleet sees one; a crash is for good."""

    def __init__(self, plan: ActorPlan) -> None:
        self.crashed = False
        self.actor = WorkerActor(plan, crash=self._crash)

    def _crash(self) -> None:
        self.crashed = True

    async def status(self) -> Mapping[str, Any]:
        if self.crashed:
            raise ActorLost("it crashed", dead=True)
        return self.actor.status()

    async def stop(self) -> None:
        self.actor.stop()

    def remove(self) -> None:
        self.actor._stopping = True  # what a killed actor's watch would say does not matter any more
        self.actor._worker.kill()


class HereCluster:
    """This process as a cluster."""

    def __init__(self) -> None:
        self.actors: list[HereActor] = []

    def place(self, plan: ActorPlan, needs: RayPlan) -> HereActor:
        self.actors.append(HereActor(plan))
        return self.actors[-1]

    def own_node(self) -> str:
        return "127.0.0.1"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actor, "_node_address", lambda: "127.0.0.1")


def parsed(*words: str) -> argparse.Namespace:
    """The options of a command line."""
    given = ["up", "--on", "ray", "--engine", "simulated", *words]
    return cli.build_parser(given).parse_args(given)


def launch(*words: str, prompts: io.StringIO | None = None, **changes: Any) -> up_ray.RayUpPlan:
    """What these options come to, with workers that answer at once."""
    arguments = ["--engine", "simulated", "--time-scale", changes.pop("time_scale", "0")]
    return up_ray.make_launch(parsed(*words), arguments, 30.0, prompts)


def run(what: up_ray.RayUpPlan, meanwhile: Any = None) -> tuple[int, str, HereCluster]:
    """Run it to its end; the exit code, what it wrote, and the workers there were."""
    output, cluster = io.StringIO(), HereCluster()

    async def both() -> int:
        running = up_ray.RayUpRun(what, cluster, output)
        tasks = [asyncio.ensure_future(running.run())]
        if meanwhile is not None:
            tasks.append(asyncio.ensure_future(meanwhile(running, cluster, output)))
        try:
            return (await asyncio.wait_for(asyncio.gather(*tasks), HANG_SECONDS))[0]
        finally:
            for actor in cluster.actors:
                actor.remove()

    return asyncio.run(both()), output.getvalue(), cluster


# --- options ----------------------------------------------------------------------------------------------------------


def test_options_become_a_plan(tmp_path: Path) -> None:
    create_keys(tmp_path)
    words = ["--gpus-per-worker", "2", "--workers", "3", "--max-workers", "6", "--curve-keys", str(tmp_path)]
    found = launch(*words, "--max-restarts", "7")
    assert (found.plan.gpus, found.plan.cpus, found.plan.host, found.plan.max_restarts) == (2, 1, NODE, 7)
    assert found.plan.curve_keys == str(tmp_path) and found.keys is not None
    assert found.autoscale is not None
    assert (found.autoscale.min_workers, found.autoscale.max_workers, found.workers) == (3, 6, 3)
    assert launch(*LOCAL).autoscale is None


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--devices", "cpu:0"], "--devices"),
        (["--port", "5000"], "--port"),
        (["--log-dir", "logs"], "--log-dir"),
        (["--workers", "0"], "--workers"),
        (["--concurrency", "0"], "--concurrency"),
        (["--max-workers", "0"], "max_workers"),
        (["--gpus-per-worker", "-1"], "gpus"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(words: list[str], named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        launch(*LOCAL, *words)


def test_other_machines_are_reached_with_keys_only() -> None:
    with pytest.raises(InsecureBind):
        launch()
    assert launch("--insecure").plan.insecure


def test_without_ray_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"preble\[ray\]"):
        up_ray.run(launch(*LOCAL), "local")
    assert cli.main(["up", "--on", "ray", "--engine", "simulated", *LOCAL]) == 1
    assert "pip install 'preble[ray]'" in capsys.readouterr().err


def test_worker_options_are_checked_before_ray_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "--on", "ray", "--engine", "simulated", *LOCAL, "--", "--id", "me"]) == 2
    assert "--id" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["up", "--on", "ray", "--engine", "simulated", *LOCAL, "--", "--no-such-option"])
    assert "--no-such-option" in capsys.readouterr().err


# --- whole runs -------------------------------------------------------------------------------------------------------


def test_prompts_are_answered_by_all_workers_and_then_it_ends() -> None:
    lines = [json.dumps({"id": n, "token_ids": [n, *range(100 * n, 100 * n + 90)]}) for n in range(8)]
    lines = [line[:-1] + ', "sampling": {"max_new_tokens": 3}}' for line in lines]
    code, written, cluster = run(launch(*LOCAL, "--workers", "2", prompts=io.StringIO("\n".join(lines))))
    assert code == 0 and len(cluster.actors) == 2
    answers: dict[int, list[int]] = {}
    workers = set()
    for line in written.splitlines():
        answer = json.loads(line)
        answers.setdefault(answer["id"], []).extend(answer["token_ids"])
        workers.add(answer["worker"])
    assert answers == {n: expected_tokens([n, *range(100 * n, 100 * n + 90)], 3) for n in range(8)}
    assert workers == {"worker-0", "worker-1"}


def test_addresses_are_reported_and_a_drain_ends_all() -> None:
    async def drain(running: up_ray.RayUpRun, cluster: HereCluster, output: io.StringIO) -> None:
        await until(lambda: output.getvalue().count("READY ") == 2, "both workers serve")
        running.drain()

    code, written, cluster = run(launch(*LOCAL, "--workers", "2"), drain)
    assert code == 0
    for line in written.splitlines():
        word, address, name = line.split()
        assert word == "READY" and address.startswith("tcp://127.0.0.1:") and name.startswith("name=worker-")
    assert all(actor.actor.status()["ended"] for actor in cluster.actors)


def test_the_second_signal_waits_for_nobody() -> None:
    lines = json.dumps({"id": 0, "token_ids": [1, 2, 3], "sampling": {"max_new_tokens": 4000}})

    async def hurry(running: up_ray.RayUpRun, cluster: HereCluster, output: io.StringIO) -> None:
        await until(lambda: output.getvalue(), "the request is under way")
        running.drain()
        await asyncio.sleep(0.1)
        running.drain()

    what = launch(*LOCAL, prompts=io.StringIO(lines), time_scale="1")
    code, written, _ = run(what, hurry)
    assert code == 1
    assert "error" in json.loads(written.splitlines()[-1]), "the request that was cut off says so"


def test_the_advice_of_the_bookings_starts_workers() -> None:
    """Thirty prompts of about a second each, at once, for a worker that is to be busy for 0.7 of its time."""
    quick = AutoscaleConfig(1, 2, up_seconds=0.2, min_observed_seconds=0.0, look_seconds=0.1, down_seconds=60.0)
    prompts = [json.dumps({"id": n, "token_ids": [n, *range(8000)]}) for n in range(30)]
    what = launch(*LOCAL, prompts=io.StringIO("\n".join(prompts)), time_scale="1")
    workers: list[int] = []

    async def watch(running: up_ray.RayUpRun, cluster: HereCluster, output: io.StringIO) -> None:
        await until(lambda: len(cluster.actors) == 2, "a second worker is asked for")
        workers.append(running._router.scheduler.stats()["scaling"]["desired_workers"])
        running.drain()
        running.drain()

    run(replace(what, autoscale=quick), watch)
    assert workers[0] >= 2


def test_when_every_worker_is_given_up_it_ends_with_1() -> None:
    async def crash(running: up_ray.RayUpRun, cluster: HereCluster, output: io.StringIO) -> None:
        await until(lambda: output.getvalue().count("READY ") == 1, "the worker serves")
        cluster.actors[0].actor._worker.kill()

    code, _, cluster = run(launch(*LOCAL), crash)
    assert code == 1 and cluster.actors[0].crashed
