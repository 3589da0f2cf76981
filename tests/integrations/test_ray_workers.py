"""Workers on Ray, without Ray: which actors a fleet asks for, what it reports its router, and the actor's own process.
A local cluster is in `test_ray_fleet`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from preble import SamplingParams
from preble.errors import HandshakeRefused, InsecureBind, InvalidConfig, InvalidInput, TransportError, UnknownWorker
from preble.integrations import ray_actor
from preble.integrations.autoscale import AutoscaleConfig
from preble.integrations.ray_actor import NODE, ActorPlan, WorkerActor
from preble.integrations.ray_workers import ActorLost, Placed, RayFleet, RayPlan
from preble.router import Router
from preble.scheduling.autoscaling import FleetLoad
from preble.transport.security import create_keys
from tests.support.transport import HANG_SECONDS, asynchronous, collect, expected_tokens, until

linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")

PLAN = RayPlan(("--engine", "simulated"), host="127.0.0.1", look_seconds=0.01)
OWN_NODE, OTHER_NODE = "10.0.0.1", "10.0.0.2"


@dataclass(eq=False)
class FakeActor:
    """Says what the test wants."""

    plan: ActorPlan
    address: str = ""
    node: str = OWN_NODE
    failed: str = ""
    lost: ActorLost | None = None
    stopped: bool = False
    ended: bool = False
    removed: int = 0
    placed: asyncio.Event = field(default_factory=asyncio.Event)

    def serve(self, address: str) -> None:
        self.address = address
        self.lost = None
        self.placed.set()

    def lose(self, *, dead: bool) -> None:
        self.lost = ActorLost("it was killed", dead=dead)
        self.placed.set()

    async def status(self) -> Mapping[str, Any]:
        await self.placed.wait()
        if self.lost is not None:
            raise self.lost
        return {"address": self.address, "node": self.node, "failed": self.failed, "ended": self.ended}

    async def stop(self) -> None:
        if self.lost is not None:
            raise self.lost
        self.stopped = True

    def remove(self) -> None:
        self.removed += 1


class FakeCluster:
    """Actors in the order in which they were asked for."""

    def __init__(self) -> None:
        self.actors: list[FakeActor] = []

    def place(self, plan: ActorPlan, needs: RayPlan) -> FakeActor:
        self.actors.append(FakeActor(plan))
        return self.actors[-1]

    def own_node(self) -> str:
        return OWN_NODE


class FakeRouter:
    """Notes what it is reported."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.closed = False
        self.drained: list[str] = []
        self.costs: dict[str, float] = {}
        self.refuses: set[str] = set()
        self.scheduler = self

    async def add_worker(self, address: str) -> None:
        if address in self.refuses:
            raise HandshakeRefused("another model")
        assert address not in self.addresses
        self.addresses.append(address)

    async def remove_worker(self, address: str) -> None:
        if self.closed:
            raise TransportError("the router is closed")
        if address not in self.addresses:
            raise UnknownWorker(address)
        self.addresses.remove(address)

    def drain_worker(self, worker_id: str) -> None:
        self.drained.append(worker_id)

    def stats(self) -> dict[str, Any]:
        return {"scaling": {"drain_seconds": self.costs}}


class World:
    """A fleet, its fakes, and what it reported of its workers."""

    def __init__(self, plan: RayPlan = PLAN) -> None:
        self.cluster, self.router, self.news = FakeCluster(), FakeRouter(), list[tuple[str, str]]()
        router: Any = self.router
        self.fleet = RayFleet(router, plan, cluster=self.cluster, on_change=self._note)

    def _note(self, worker: Placed) -> None:
        self.news.append((worker.name, worker.state))

    async def serving(self, count: int) -> None:
        await self.fleet.scale(count)
        for number, actor in enumerate(self.cluster.actors):
            if not actor.placed.is_set():
                actor.serve(f"tcp://127.0.0.1:{5000 + number}")
        await self.fleet.wait()

    def states(self) -> dict[str, str]:
        return {name: one["state"] for name, one in self.fleet.stats().items()}


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_a_plan_becomes_a_workers_command_line() -> None:
    plan = RayPlan(("--engine", "vllm"), gpus=4, host=NODE, curve_keys="keys", drain_seconds=7.0)
    assert plan.bundle == {"CPU": 1, "GPU": 4}
    command = plan.actor_plan("worker-3").command("fe80::1")
    words = command[command.index("worker") + 1 :]
    assert words[words.index("--bind") + 1] == "tcp://[fe80::1]:*"
    assert words[words.index("--id") + 1] == "worker-3"
    assert words[words.index("--curve-keys") + 1] == "keys"
    assert words[words.index("--drain-seconds") + 1] == "7.0"
    assert "--until-stdin-closes" in words and "--insecure" not in words


def test_addresses_that_others_reach_need_keys_or_a_word() -> None:
    with pytest.raises(InsecureBind):
        RayPlan(("--engine", "simulated"))
    with pytest.raises(InsecureBind):
        RayPlan(("--engine", "simulated"), host="0.0.0.0")
    assert "--insecure" in RayPlan(("--engine", "simulated"), insecure=True).actor_plan("w").arguments


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gpus": -1}, "gpus"),
        ({"gpus": 1.5}, "gpus"),
        ({"cpus": float("nan")}, "cpus"),
        ({"cpus": 0}, "cpus"),
        ({"start_seconds": 0.0}, "start_seconds"),
        ({"drain_seconds": -1.0}, "drain_seconds"),
        ({"look_seconds": 0.0}, "look_seconds"),
        ({"max_restarts": -2}, "max_restarts"),
        ({"arguments": ("--engine", "torch", "--id=me")}, "--id"),
        ({"arguments": ("--bind", "tcp://127.0.0.1:1")}, "--bind"),
    ],
)
def test_a_plan_that_is_none_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        RayPlan(**{"arguments": ("--engine", "simulated"), "host": "127.0.0.1", **changes})


# --- the fleet --------------------------------------------------------------------------------------------------------


@asynchronous
async def test_workers_are_placed_and_the_router_is_reported_where_they_are() -> None:
    world = World()
    await world.serving(2)
    assert world.states() == {"worker-0": "ready", "worker-1": "ready"}
    assert sorted(world.router.addresses) == ["tcp://127.0.0.1:5000", "tcp://127.0.0.1:5001"]
    assert [actor.plan.name for actor in world.cluster.actors] == ["worker-0", "worker-1"]
    await world.fleet.close()
    assert world.router.addresses == [] and [actor.removed for actor in world.cluster.actors] == [1, 1]
    assert world.fleet.stats() == {} and world.news[-1][1] == "gone"


@asynchronous
async def test_a_fleet_can_be_closed_after_its_router() -> None:
    world = World()
    await world.serving(2)
    world.router.closed = True
    await world.fleet.close()
    assert [actor.removed for actor in world.cluster.actors] == [1, 1]


@asynchronous
async def test_a_restarted_actor_is_found_at_its_new_address() -> None:
    world = World()
    await world.serving(2)
    actor = world.cluster.actors[0]
    actor.lose(dead=False)
    await until(lambda: world.router.addresses == ["tcp://127.0.0.1:5001"], "the lost one's address is forgotten")
    assert world.states()["worker-0"] == "restarting" and world.fleet.size == 2
    actor.serve("")
    await asyncio.sleep(0.05)
    assert world.router.addresses == ["tcp://127.0.0.1:5001"]
    actor.serve("tcp://127.0.0.1:6000")
    await world.fleet.wait()
    assert sorted(world.router.addresses) == ["tcp://127.0.0.1:5001", "tcp://127.0.0.1:6000"]
    assert world.fleet.stats()["worker-0"]["restarts"] == 1
    await world.fleet.close()


@asynchronous
async def test_an_actor_that_was_restarted_between_two_looks_is_found_too() -> None:
    world = World()
    await world.serving(1)
    world.cluster.actors[0].serve("tcp://127.0.0.1:6000")
    await until(lambda: world.router.addresses == ["tcp://127.0.0.1:6000"], "the router has the new address alone")
    assert world.fleet.stats()["worker-0"]["restarts"] == 1
    await world.fleet.close()


@asynchronous
async def test_an_actor_that_ray_gives_up_is_given_up_and_made_up_for() -> None:
    world = World()
    await world.serving(2)
    world.cluster.actors[1].lose(dead=True)
    await until(lambda: world.states()["worker-1"] == "failed", "it is given up")
    assert "killed" in world.fleet.stats()["worker-1"]["why"]
    assert world.fleet.size == 1 and world.cluster.actors[1].removed
    await world.serving(2)
    assert world.states() == {"worker-0": "ready", "worker-2": "ready"}
    await world.fleet.close()


@asynchronous
async def test_a_death_that_ray_takes_back_gives_nobody_up() -> None:
    world = World(RayPlan(PLAN.arguments, host=PLAN.host, look_seconds=0.2))
    await world.serving(1)
    actor = world.cluster.actors[0]
    actor.lose(dead=True)  # what was asked when it died fails so, even if it is being restarted
    await until(lambda: world.states()["worker-0"] == "restarting", "it is missed")
    actor.serve("tcp://127.0.0.1:6000")
    await world.fleet.wait()
    assert world.states()["worker-0"] == "ready"
    await world.fleet.close()


@asynchronous
async def test_wrong_usage_and_wrong_models_are_given_up_with_the_reason() -> None:
    world = World()
    world.router.refuses.add("tcp://127.0.0.1:5001")
    await world.fleet.scale(3)
    usage, model, other_node = world.cluster.actors
    usage.failed = "error: argument --engine"
    usage.serve("")
    model.serve("tcp://127.0.0.1:5001")
    other_node.node = OTHER_NODE
    other_node.serve("tcp://127.0.0.1:5002")
    await world.fleet.wait()
    found = world.fleet.stats()
    assert {one["state"] for one in found.values()} == {"failed"}
    assert found["worker-0"]["why"] == "error: argument --engine"
    assert found["worker-1"]["why"] == "another model"
    assert OTHER_NODE in found["worker-2"]["why"], "loopback of another machine"
    assert world.router.addresses == [] and world.fleet.size == 0
    await world.fleet.close()


@asynchronous
async def test_a_worker_that_does_not_come_to_serve_is_given_up() -> None:
    world = World(RayPlan(PLAN.arguments, host=PLAN.host, look_seconds=0.01, start_seconds=0.05))
    await world.fleet.scale(2)
    world.cluster.actors[0].serve("")  # placed, and loads its model; the other one waits for room, which is no fault
    await until(lambda: world.states()["worker-0"] == "failed", "it is given up")
    assert world.states()["worker-1"] == "placing"
    await world.fleet.close()


@asynchronous
async def test_who_waits_for_room_is_reported_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("preble.integrations.ray_workers._ROOM_SECONDS", 0.01)
    world = World()
    await world.fleet.scale(1)
    await until(lambda: world.fleet.stats()["worker-0"]["why"], "the operator is informed")
    assert "CPU 1" in world.fleet.stats()["worker-0"]["why"]
    world.cluster.actors[0].serve("tcp://127.0.0.1:5000")
    await world.fleet.wait()
    assert world.fleet.stats()["worker-0"]["why"] == ""
    await world.fleet.close()


# --- fewer ------------------------------------------------------------------------------------------------------------


@asynchronous
async def test_the_cheapest_is_drained_and_only_then_taken_away() -> None:
    world = World()
    await world.serving(3)
    world.router.costs = {"worker-0": 5.0, "worker-1": 1.0}  # worker-2 is busier than those that were looked at
    scaling = asyncio.ensure_future(world.fleet.scale(2))
    actor = world.cluster.actors[1]
    await until(lambda: actor.stopped, "it is asked to drain")
    assert world.router.drained == ["worker-1"], "the scheduler sends it nothing more"
    assert "tcp://127.0.0.1:5001" in world.router.addresses and not actor.removed, "it still has requests"
    assert world.states()["worker-1"] == "draining" and world.fleet.size == 2
    actor.ended = True
    await scaling
    assert actor.removed and "tcp://127.0.0.1:5001" not in world.router.addresses
    assert set(world.states()) == {"worker-0", "worker-2"}
    await world.fleet.close()


@asynchronous
async def test_who_serves_nobody_yet_goes_first_and_at_once() -> None:
    world = World()
    await world.serving(1)
    await world.fleet.scale(3)
    await world.fleet.scale(1)
    assert world.states() == {"worker-0": "ready"}
    assert [actor.removed for actor in world.cluster.actors] == [0, 1, 1]
    await world.fleet.close()


@asynchronous
async def test_a_drain_that_takes_too_long_or_dies_ends_anyway() -> None:
    world = World(RayPlan(PLAN.arguments, host=PLAN.host, look_seconds=0.01, drain_seconds=0.1))
    await world.serving(2)
    world.cluster.actors[1].lose(dead=True)
    await world.fleet.scale(0)
    assert [actor.removed > 0 for actor in world.cluster.actors] == [True, True]
    assert world.router.addresses == [] and world.fleet.stats() == {}


@asynchronous
async def test_an_actor_that_does_not_answer_holds_up_no_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("preble.integrations.ray_workers._ROOM_SECONDS", 0.02)
    world = World(RayPlan(PLAN.arguments, host=PLAN.host, look_seconds=0.01, drain_seconds=0.1))
    await world.serving(1)
    world.cluster.actors[0].placed.clear()  # its node cannot be reached
    await until(lambda: world.fleet.stats()["worker-0"]["why"] == "does not answer", "the operator is informed")
    await world.fleet.scale(0)
    assert world.cluster.actors[0].removed and world.router.addresses == []


@asynchronous
async def test_sizes_that_are_none_are_refused() -> None:
    world = World()
    for count in (-1, 1025, 1.5, None):
        with pytest.raises(InvalidInput, match="count"):
            await world.fleet.scale(count)  # type: ignore[arg-type]
    assert world.cluster.actors == []


@asynchronous
async def test_a_fleet_follows_the_advice_it_is_given() -> None:
    world = World()
    await world.serving(1)
    load = FleetLoad(1, requests_per_second=1.0, prefill_load=2.0, observed_seconds=180.0)
    loads = [load]
    config = AutoscaleConfig(1, 4, up_seconds=0.0, down_seconds=0.0, pause_seconds=0.0, look_seconds=0.01)
    following = asyncio.ensure_future(world.fleet.autoscale(config, lambda: loads[0]))
    await until(lambda: world.fleet.size == 3, "three workers do for two seconds of work a second")
    await world.serving(3)
    for actor in world.cluster.actors:
        actor.ended = True
    loads[0] = FleetLoad(3, requests_per_second=1.0, prefill_load=0.1, observed_seconds=180.0)
    await until(lambda: world.fleet.size == 1, "one does for a tenth of a second")
    following.cancel()
    await world.fleet.close()


# --- the actor's own process, which is a real one ---------------------------------------------------------------------


class LiveActor:
    """A `WorkerActor` in this process; `crashed` is set where a real one would end it."""

    def __init__(self, *arguments: str, host: str = "127.0.0.1") -> None:
        self.crashed = threading.Event()
        self.actor = WorkerActor(ActorPlan("worker-0", host, arguments), crash=self.crashed.set)

    def wait(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + HANG_SECONDS
        while not (found := condition()):
            assert time.monotonic() < deadline, "the actor's worker does nothing"
            time.sleep(0.01)
        return found

    def address(self) -> str:
        return str(self.wait(lambda: self.actor.status()["address"]))

    def end(self) -> None:
        self.actor._worker.kill()


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(ray_actor, "_node_address", lambda: "127.0.0.1")
    started: list[LiveActor] = []

    def start(*arguments: str, **more: str) -> LiveActor:
        started.append(LiveActor(*arguments, **more))
        return started[-1]

    yield start
    for one in started:
        one.end()


def children(pid: int) -> list[int]:
    """All processes that one has started, and they."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


def alive(pid: int) -> bool:
    """Whether a process runs, and is not only waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_actor_serves_and_drains(live: Any) -> None:
    one = live("--engine", "simulated", "--time-scale", "0", host=NODE)
    address = one.address()
    assert address.startswith("tcp://127.0.0.1:")

    async def ask() -> None:
        async with Router([address]) as router:
            stream = router.generate([1, 2, 3], SamplingParams(max_new_tokens=4))
            assert (await collect(stream))[0] == expected_tokens([1, 2, 3], 4)
            assert list(router.scheduler.workers) == ["worker-0"]

    asyncio.run(ask())
    one.actor.stop()
    one.wait(lambda: one.actor.status()["ended"])
    assert not one.crashed.is_set()


@linux
@pytest.mark.parametrize("depth", [0, 1], ids=["guard", "worker"])
def test_when_its_worker_dies_the_actor_ends_too(live: Any, depth: int) -> None:
    one = live("--engine", "simulated")
    one.address()
    pids = [one.actor._worker.pid, *children(one.actor._worker.pid)]
    os.kill(pids[depth], signal.SIGKILL)
    assert one.crashed.wait(HANG_SECONDS)
    assert one.actor.status()["address"] == ""
    one.wait(lambda: not any(map(alive, pids)))


def test_wrong_usage_is_reported_and_not_tried_again(live: Any) -> None:
    one = live("--engine", "no-such-engine")
    assert "no-such-engine" in one.wait(lambda: one.actor.status()["failed"])
    assert not one.crashed.is_set()


@linux
def test_when_the_actor_dies_its_worker_does_within_the_grace(tmp_path: Path) -> None:
    """The worker is busy, and reported to take half a minute for its drain: the guard does not let it."""
    code = (
        "import sys, time; from preble.integrations import ray_actor as ra; ra._node_address = lambda: '127.0.0.1'; "
        "plan = ra.ActorPlan('w', '127.0.0.1', ('--engine', 'simulated', '--time-scale', '50')); "
        "actor = ra.WorkerActor(plan)\n"
        "while not actor.status()['address']: time.sleep(0.01)\n"
        "print(actor.status()['address'], flush=True); time.sleep(600)"
    )
    import subprocess

    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        pids = children(process.pid)
        assert len(pids) == 2

        async def keep_busy() -> None:
            async with Router([address]) as router:
                stream = router.generate([1, 2, 3], SamplingParams(max_new_tokens=1000))
                asking = asyncio.ensure_future(collect(stream))
                await asyncio.sleep(0.2)
                process.kill()
                await until(lambda: not any(map(alive, pids)), "the worker ends")
                asking.cancel()

        asyncio.run(keep_busy())


def test_keys_of_a_fleet_are_those_of_its_workers(live: Any, tmp_path: Path) -> None:
    create_keys(tmp_path)
    plan = RayPlan(("--engine", "simulated", "--time-scale", "0"), host=NODE, curve_keys=str(tmp_path))
    one = live(*plan.actor_plan("worker-0").arguments, host=NODE)
    from preble.transport.security import load_client_keys

    async def ask() -> None:
        async with Router([one.address()], keys=load_client_keys(tmp_path)) as router:
            stream = router.generate([1, 2, 3], SamplingParams(max_new_tokens=2))
            assert (await collect(stream))[0] == expected_tokens([1, 2, 3], 2)

    asyncio.run(ask())
