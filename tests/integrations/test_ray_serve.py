"""The router inside Ray Serve: a local cluster, three small replicas, and one that is killed. Skipped without ray.

What is decided and booked is tested without ray, in `test_replica_scheduler`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="the router for Ray Serve is tested where ray is: pip install 'preble[ray]'")

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from preble.integrations.replica_scheduler import ReplicaScheduler

ROUTER = "preble.integrations.ray_serve:PrebleRequestRouter"
GROUPS = 12
PREFIX_TOKENS = 512


def classes() -> tuple[type, type]:
    """Made in a function, so that Ray sends the classes themselves: its processes cannot import this file."""

    class Replica:
        """Answers with its process id."""

        def __call__(self, body: Any) -> int:
            return os.getpid()

        def record_replica_metadata(self) -> dict[str, Any]:
            return {"kv_capacity_tokens": 40_000, "block_size": 16}

    class Front:
        """Makes several calls at once in the course of one request; they share its id in Ray."""

        def __init__(self, engine: Any) -> None:
            self.engine = engine

        async def __call__(self, calls: int) -> list[int]:
            bodies = [{"prompt": [*range(7000, 7300), call]} for call in range(calls)]
            answers = asyncio.gather(*(self.engine.remote(body) for body in bodies))
            return list(await asyncio.wait_for(answers, 20.0))

    return Replica, Front


def caller() -> type:
    """A process of its own that holds a handle, and with it another router."""

    class Caller:
        async def ask(self, group: int) -> int:
            engine = serve.get_deployment_handle("Replica", "preble-test")
            prompt = [*range(1000 * group, 1000 * group + PREFIX_TOKENS), 77_777]
            return int(await engine.remote({"prompt": prompt}))

        def heard(self) -> int:
            """How many bookings of other routers this process's router has reported."""
            routers = [one for one in gc.get_objects() if isinstance(one, ReplicaScheduler)]
            return sum(one.stats().get("peer_bookings", 0) for one in routers)

    return Caller


@pytest.fixture(scope="module")
def all_bookings() -> list[ReplicaScheduler]:
    """The bookings of every router that Ray makes in this process. Ray sends the router's class by value, so it cannot
    be watched itself."""
    return []


@pytest.fixture(scope="module")
def handle(ray_environment: None, all_bookings: list[ReplicaScheduler]) -> Iterator[Any]:
    patch = pytest.MonkeyPatch()
    initialize = ReplicaScheduler.__init__

    def noted(books: ReplicaScheduler, **kwargs: Any) -> None:
        initialize(books, **kwargs)
        all_bookings.append(books)

    folder = tempfile.mkdtemp(prefix="preble-ray-")  # short: sockets lie in it, and their paths have a largest length
    try:
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=folder)
        serve.start(proxy_location="Disabled")
        engine, front = classes()
        config = RequestRouterConfig(
            request_router_class=ROUTER,
            request_router_kwargs={"extractor": "openai", "config": {"lease_seconds": 30.0}, "read_seconds": 10.0},
        )
        deployment = serve.deployment(
            engine,
            num_replicas=3,
            ray_actor_options={"num_cpus": 0.1},
            max_ongoing_requests=8,
            request_router_config=config,
        )
        patch.setattr(ReplicaScheduler, "__init__", noted)
        fronts = serve.deployment(front, ray_actor_options={"num_cpus": 0.1})
        yield serve.run(fronts.bind(deployment.bind()), name="preble-test", route_prefix=None)
    finally:
        patch.undo()
        if ray.is_initialized():
            serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def engine(handle: Any) -> Any:
    """A handle of the replicas themselves."""
    return serve.get_deployment_handle("Replica", "preble-test")


def ask(handle: Any, group: int, call: int) -> int:
    prompt = [*range(1000 * group, 1000 * group + PREFIX_TOKENS), 50_000 + call]
    return int(handle.remote({"prompt": prompt, "max_tokens": 8}).result(timeout_s=60))


def until(condition: Callable[[], bool]) -> None:
    """Wait for what other processes bring about."""
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it does not come about")


def opened(books: ReplicaScheduler) -> list[tuple[str, str, str, bool]]:
    """The bookings that are open: for who looks why."""
    return [(one.call_id, one.peer, one.replica, one.routed) for one, _ in books._tickets.values()]


def settled(books: ReplicaScheduler) -> dict[str, Any]:
    """The stats once the ends of all calls have arrived: they come after the answers."""
    for _ in range(200):
        if books.stats()["open_bookings"] == 0:
            break
        time.sleep(0.05)
    books.check()
    return books.stats()


@pytest.mark.timeout(240)
def test_calls_made_at_once_in_one_request_are_all_answered(handle: Any) -> None:
    answers = handle.remote(12).result(timeout_s=60)
    assert len(answers) == 12


@pytest.mark.timeout(240)
def test_a_router_in_another_process_sends_siblings_to_the_same_replicas(
    engine: Any, all_bookings: list[ReplicaScheduler]
) -> None:
    other = ray.remote(num_cpus=0.1)(caller()).remote()
    ray.get(other.ask.remote(30))  # makes its router
    groups = [20, 21, 22, 23, 24]
    homes = [ask(engine, group, 0) for group in groups]
    until(lambda: ray.get(other.heard.remote()) >= len(groups))
    assert [ray.get(other.ask.remote(group)) for group in reversed(groups)] == homes[::-1]
    until(lambda: all_bookings[0].stats().get("peer_bookings", 0) >= len(groups) + 1)
    settled(all_bookings[0])  # its words that they are over have arrived, too
    ray.kill(other)


@pytest.mark.timeout(240)
def test_prefixes_meet_and_a_killed_replica_stops_nothing(engine: Any, all_bookings: list[ReplicaScheduler]) -> None:
    before = settled(all_bookings[0])
    homes: list[set[int]] = [set() for _ in range(GROUPS)]
    for call in range(6):
        for group in range(GROUPS):
            homes[group].add(ask(engine, group, call))
            settled(all_bookings[0])  # what is not yet reported as done is worth leaving a home for
    assert [len(home) for home in homes] == [1] * GROUPS
    assert len(set.union(*homes)) > 1, "one replica was given everything"

    (books,) = all_bookings
    stats = settled(books)
    done = (stats["choice_scheduled"] - before["choice_scheduled"], stats["completed"] - before["completed"])
    seen = {**stats, "scheduler": "", "open": opened(books)}
    assert (done, stats["open_bookings"]) == ((6 * GROUPS, 6 * GROUPS), 0), seen
    specs = books.scheduler.workers.values()
    assert [(spec.kv_capacity_tokens, spec.block_size) for spec in specs] == [(40_000, 16)] * 3

    assert int(engine.remote("no body").result(timeout_s=60)) > 0
    assert books.stats()["choice_no_tokens"] == 1

    killed = next(iter(homes[0]))
    os.kill(killed, signal.SIGKILL)
    after = []
    for call in range(10, 16):
        after.append(ask(engine, 0, call))
        settled(books)
    assert killed not in after
    assert len(set(after)) == 1, "the prefix has no new home"
    stats = settled(books)
    assert stats["replicas_removed"] >= 1
    assert stats.get("hook_failed", 0) == 0
    assert stats["open_bookings"] == 0
