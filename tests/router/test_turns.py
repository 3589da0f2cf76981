"""Requests of a router that name a tenant, a deadline or a class: over a socket, to a worker that is let answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from preble import SamplingParams
from preble.errors import InvalidInput, Overloaded, QueueFull, TransportError
from preble.router import Router
from preble.scheduling.flow_control import FlowConfig
from preble.transport import wire
from preble.transport.tasks import within
from tests.support.transport import FirstByName, ScriptedWorker, assert_bookings_are_even, asynchronous, collect, fast

from tests.support.transport import HANG_SECONDS, expected_tokens, until  # isort: skip

SHORT = SamplingParams(max_new_tokens=4)
WORK = 0.3  # seconds that a prompt below takes by the scheduler's cost model, or more


def prompt(number: int) -> list[int]:
    return [1000 * number + token for token in range(2000)]


class Door:
    """A worker that answers so many requests as it is let."""

    def __init__(self) -> None:
        self.permits = asyncio.Semaphore(0)

    async def __call__(self, worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
        await self.permits.acquire()
        tokens = expected_tokens(submit.token_ids.tolist(), 4)
        await worker.send(
            wire.OutputChunk(submit.request_id, 0, tuple(tokens), cached_tokens=0, finish_reason="length")
        )

    def let(self, count: int = 1) -> None:
        for _ in range(count):
            self.permits.release()


@contextlib.asynccontextmanager
async def line(**flow: Any) -> AsyncIterator[tuple[Router, ScriptedWorker, Door]]:
    """(router, its worker, the worker's door)."""
    door = Door()
    worker = ScriptedWorker(door, worker_id="w0", kv_capacity_tokens=1_000_000)
    config = fast(refuse_wait_seconds=None, flow=FlowConfig(**{"hold_seconds": WORK, **flow}))
    router = Router([worker.endpoint], config=config, policy=FirstByName())
    try:
        await router.start()
        yield router, worker, door
        door.let(1000)
        await until(lambda: router.stats()["live_requests"] == 0, "all have ended")
        assert_bookings_are_even(router)
    finally:
        await router.close()
        await worker.close()


def ask(router: Router, number: int, **options: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(collect(router.generate(prompt(number), SHORT, **options)))


def tenants_at(worker: ScriptedWorker) -> list[str | None]:
    return [request.claim and request.claim.tenant for request in worker.got(wire.GenerationRequest)]


@asynchronous
async def test_what_a_worker_cannot_begin_soon_waits_at_the_router_and_other_tenants_pass_it() -> None:
    async with line() as (router, worker, door):
        flood = [ask(router, number, tenant="flood") for number in range(20)]
        await until(lambda: router.stats()["held_requests"] > 10, "the flood waits here")
        sent = len(worker.got(wire.GenerationRequest))
        quiet = ask(router, 99, tenant="quiet")
        await until(lambda: router.stats()["requests"] == 21, "it has come")
        door.let(sent + 1)
        await until(lambda: "quiet" in tenants_at(worker), "its turn")
        assert tenants_at(worker).index("quiet") <= sent + 2
        door.let(1000)
        await asyncio.gather(*flood, quiet)
        classes = {claim.tenant: claim.priority for r in worker.got(wire.GenerationRequest) if (claim := r.claim)}
        assert classes["quiet"] == "interactive"


@asynchronous
async def test_requests_that_name_nothing_do_not_wait_at_the_router() -> None:
    async with line() as (router, worker, door):
        tasks = [ask(router, number, client="somebody") for number in range(12)]
        await until(lambda: len(worker.got(wire.GenerationRequest)) == 12, "all are sent")
        assert router.stats()["held_requests"] == 0 and tenants_at(worker) == [None] * 12
        door.let(12)
        await asyncio.gather(*tasks)


@asynchronous
async def test_batch_work_waits_for_the_others() -> None:
    async with line() as (router, worker, door):
        first = [ask(router, number, tenant="people") for number in range(6)]
        await until(lambda: router.stats()["held_requests"] > 0, "some wait")
        job = ask(router, 50, tenant="jobs", priority="batch")
        door.let(1000)
        await asyncio.gather(*first, job)
        assert tenants_at(worker)[-1] == "jobs"
        assert worker.got(wire.GenerationRequest)[-1].claim.priority == "batch"


@asynchronous
async def test_a_deadline_that_cannot_be_kept_is_refused_at_once_with_the_time_it_would_take() -> None:
    async with line() as (router, worker, _):
        tasks = [ask(router, number, tenant="a") for number in range(30)]
        await until(lambda: router.stats()["held_requests"] > 10, "many wait")
        sent = len(worker.got(wire.GenerationRequest))
        router._predicted_wait.pace = lambda _: 1.0  # as if measured
        with pytest.raises(Overloaded, match="it is of use for 0.5 s") as refused:
            await collect(router.generate(prompt(77), SHORT, tenant="a", deadline_seconds=0.5))
        assert refused.value.retry_after_seconds > 0.5
        assert len(worker.got(wire.GenerationRequest)) == sent and router.stats()["refused"] == 1
        for task in tasks:
            task.cancel()


@asynchronous
async def test_a_request_whose_time_is_over_while_it_waits_here_is_given_up() -> None:
    async with line() as (router, worker, _):
        tasks = [ask(router, number, tenant="a") for number in range(3)]
        await until(lambda: len(worker.got(wire.GenerationRequest)) >= 1, "the worker has enough")
        late = ask(router, 9, tenant="b", first_token_seconds=0.05)
        with pytest.raises(Overloaded):
            await late
        assert all(number != 9 for number in (r.token_ids[0] // 1000 for r in worker.got(wire.GenerationRequest)))
        for task in tasks:
            task.cancel()


@asynchronous
async def test_who_goes_away_while_it_waits_here_leaves_nothing() -> None:
    async with line() as (router, _, _):
        tasks = [ask(router, number, tenant="a") for number in range(10)]
        await until(lambda: router.stats()["held_requests"] > 0, "some wait")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: router.stats()["held_requests"] == 0, "nobody waits")


@asynchronous
async def test_at_the_bound_of_those_that_wait_the_flood_is_refused() -> None:
    async with line(waiting_max=5) as (router, _, _):
        tasks = [ask(router, number, tenant="flood") for number in range(12)]
        await until(lambda: any(task.done() for task in tasks), "somebody is refused")
        quiet = ask(router, 50, tenant="quiet")
        await until(lambda: router.stats()["requests"] == 13, "it has come")
        ended = [task for task in tasks if task.done()]
        assert ended and all(isinstance(task.exception(), QueueFull) for task in ended) and not quiet.done()
        for task in [*tasks, quiet]:
            task.cancel()


@asynchronous
async def test_requests_that_wait_do_not_do_so_for_ever_where_the_last_worker_is_lost() -> None:
    async with line() as (router, worker, _):
        tasks = [ask(router, number, tenant="a") for number in range(10)]
        await until(lambda: router.stats()["held_requests"] > 0, "some wait")
        await worker.close()
        await until(lambda: router.stats()["held_requests"] == 0, "nobody waits for a worker that is gone")
        for task in tasks:
            task.cancel()


@asynchronous
async def test_a_router_that_closes_ends_what_waits_here_and_leaves_no_session_open() -> None:
    """Regression: as one request ended another was placed, and those that still waited did so for ever."""
    async with line(hold_seconds=None) as (router, worker, _):
        tasks = [ask(router, number, tenant="a", priority="batch") for number in range(12)]
        await until(lambda: router.stats()["held_requests"] == 11, "all but the first wait")
        tasks.append(ask(router, 50, tenant="b", priority="batch"))
        await until(lambda: router.stats()["held_requests"] == 12, "and another tenant's")
        sessions = [one.task for one in router.fleet.workers.values()]
        await within(HANG_SECONDS, router.close())
        await asyncio.wait(tasks, timeout=HANG_SECONDS)
        assert all(isinstance(task.exception(), TransportError) for task in tasks)
        assert all(session is not None and session.done() for session in sessions)
        assert len(worker.got(wire.GenerationRequest)) == 1, "none was sent as others ended"


@asynchronous
async def test_what_is_said_of_tenants_deadlines_and_classes_is_checked_at_once() -> None:
    async with line() as (router, _, _):
        for wrong in ({"tenant": 5}, {"deadline_seconds": 0.0}, {"priority": "soon"}):
            with pytest.raises(InvalidInput, match=next(iter(wrong))):
                router.generate(prompt(0), SHORT, **wrong)
