"""An engine in the router's own process: `inproc://` reaches it without ZeroMQ's I/O threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import zmq

from preble import CostModel, SamplingParams
from preble.engines.simulated import SimulatedEngine
from preble.errors import InvalidConfig, TransportError
from preble.local import LocalConfig
from preble.router import Router
from preble.transport.server import ServerConfig
from preble.worker import Worker, WorkerConfig
from tests.support.transport import (
    FAST,
    HANG_SECONDS,
    assert_bookings_are_even,
    asynchronous,
    collect,
    expected_tokens,
    until,
)

PROMPT = list(range(200, 400))
TEN = SamplingParams(max_new_tokens=10)


@contextlib.contextmanager
def embedded(endpoint: str, epoch: int = 1) -> Iterator[Worker]:
    """A worker in a thread of this process."""
    engine = SimulatedEngine(CostModel.preset("mistral-7b/a6000"), LocalConfig(kv_capacity_tokens=10_000), time_scale=0)
    worker = Worker(engine, WorkerConfig(ServerConfig(endpoint)), epoch=epoch)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield worker
    finally:
        worker.drain()
        worker.drain()
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()


@asynchronous
async def test_engines_of_the_routers_own_process_are_workers_like_others() -> None:
    with embedded("inproc://one") as one, embedded("inproc://two"):
        assert (one.server.endpoint, one.worker_id) == ("inproc://one", "one")
        async with Router(["inproc://one", "inproc://two"], config=FAST) as router:
            for first in range(8):
                prompt = [first, *PROMPT]
                tokens, _ = await collect(router.generate(prompt, TEN))
                assert tokens == expected_tokens(prompt, 10)
            seen = [worker["frames_received"] for worker in router.stats()["workers"].values()]
            assert len(seen) == 2 and all(seen)
            assert_bookings_are_even(router)


@asynchronous
async def test_a_worker_that_ends_may_come_again_under_its_name() -> None:
    async with contextlib.AsyncExitStack() as stack:
        with embedded("inproc://again"):
            router = await stack.enter_async_context(Router(["inproc://again"], config=FAST))
            assert (await collect(router.generate(PROMPT, TEN)))[0] == expected_tokens(PROMPT, 10)
        worker = router.fleet.workers["inproc://again"]
        await until(lambda: worker.state != "ready", "the router knows that it is gone")
        with embedded("inproc://again", epoch=2):
            await until(lambda: worker.state == "ready", "it is found again")
            assert (await collect(router.generate(PROMPT, TEN)))[0] == expected_tokens(PROMPT, 10)


@asynchronous
async def test_several_routers_come_and_go_and_leave_the_processs_context_to_others() -> None:
    with embedded("inproc://many"):
        for _ in range(3):
            async with Router(["inproc://many"], config=FAST) as router, Router(["inproc://many"], config=FAST):
                assert (await collect(router.generate(PROMPT, TEN)))[0] == expected_tokens(PROMPT, 10)
    assert not zmq.Context.instance().closed


def test_a_name_that_is_taken_and_ends_that_do_not_fit_are_refused() -> None:
    with embedded("inproc://taken"), pytest.raises(TransportError, match="cannot bind inproc://taken"):
        Worker(SimulatedEngine(CostModel.preset("mistral-7b/a6000"), LocalConfig(kv_capacity_tokens=1000)),
               WorkerConfig(ServerConfig("inproc://taken")), epoch=2)  # fmt: skip
    for bind, events in (("inproc://a", "tcp://127.0.0.1:*"), ("tcp://127.0.0.1:*", "inproc://a")):
        with pytest.raises(InvalidConfig, match="events_bind"):
            ServerConfig(bind, events)
