"""Places at servers for requests that others send: what is booked is given back on every way out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from preble import ManualClock
from preble.clock import Clock
from preble.errors import (
    DuplicateRequest,
    InvalidConfig,
    InvalidInput,
    NoWorkers,
    Overloaded,
    QueueFull,
    TransportError,
    WorkerLost,
)
from preble.router.router import Router
from preble.scheduling.flow_control import FlowConfig
from preble.transport.engine_servers.server_info import ServerOptions
from preble.types import SamplingParams
from tests.support.relay import Call, InOrder, ScriptedServer
from tests.support.transport import (
    ScriptedWorker,
    assert_bookings_are_even,
    asynchronous,
    collect,
    fast,
    until,
)

PROMPT = np.arange(100, dtype=np.int32)


@contextlib.asynccontextmanager
async def routed(
    *servers: ScriptedServer, options: ServerOptions | None = None, clock: Clock = time.monotonic, **config: Any
) -> AsyncIterator[Router]:
    """A router before these servers, the first of them preferred; at the end nothing is left of any request."""
    for server in servers:
        await server.start()
    addresses = [(server.url, options or ServerOptions()) for server in servers]
    router = Router(addresses, policy=InOrder(*servers), config=fast(**config), clock=clock)
    await router.start()
    try:
        yield router
        assert_bookings_are_even(router)
        assert all(worker.relayed == 0 for worker in router.fleet.workers.values())
        assert router._predicted_wait.waiting == 0
    finally:
        await router.close()
        router.scheduler.close()
        for server in servers:
            await server.stop()


@asynchronous
async def test_a_placement_says_where_and_its_end_is_counted() -> None:
    server = ScriptedServer()
    async with routed(server, options=ServerOptions(api_key="k")) as router:
        placement = await router.place(PROMPT, request_id="r", max_new_tokens=20)
        assert (placement.worker, placement.url, placement.rank) == (server.worker, server.url, None)
        assert placement.options.api_key == "k" and placement.info.engine == "sglang"
        assert placement.decision is not None and placement.decision.worker == server.worker
        assert router.stats()["live_requests"] == 1 and router.scheduler.stats()["live_requests"] == 1
        placement.first_token(7)
        placement.finish(12, None, "length")
        placement.finish(99)
        placement.cancel()
        counters = router.counters
        assert (counters.requests, counters.finished, counters.cancelled, counters.output_tokens) == (1, 1, 0, 12)


@asynchronous
async def test_a_placement_that_nobody_wants_is_cancelled_once() -> None:
    async with routed(ScriptedServer()) as router:
        placement = await router.place(PROMPT)
        placement.cancel()
        placement.cancel()
        assert router.counters.cancelled == 1
        with pytest.raises(TransportError, match="has ended"):
            await placement.failed("too late")


@asynchronous
async def test_a_failed_attempt_goes_elsewhere_until_there_are_no_more() -> None:
    one, two = ScriptedServer(), ScriptedServer()
    async with routed(one, two, max_attempts=3) as router:
        placement = await router.place(PROMPT, max_new_tokens=20)
        await placement.failed("broke off")
        assert placement.worker == two.worker
        await placement.failed("broke off")
        with pytest.raises(WorkerLost, match="3 attempts, the last: the third"):
            await placement.failed("the third")
        placement.cancel()
        assert (router.counters.failed, router.counters.resumed, router.counters.cancelled) == (1, 2, 0)


@asynchronous
async def test_after_a_resume_the_first_output_ends_the_wait_at_the_new_place() -> None:
    """Regression: it was counted as waiting there to its end, and newcomers were refused for it."""
    one, two = ScriptedServer(), ScriptedServer()
    async with routed(one, two) as router:
        placement = await router.place(PROMPT, max_new_tokens=20)
        placement.first_token(7)
        placement.emitted(np.arange(105, dtype=np.int32), 5)
        await placement.failed("broke off")
        assert placement.worker == two.worker and router._predicted_wait.waiting == 1
        placement.saw_output()
        attempt = placement.attempt
        assert attempt is not None and attempt.first_seen and attempt.cached_tokens is None
        assert router.scheduler.stats()["workers"][two.worker]["waiting_requests"] == 0
        assert router._predicted_wait.waiting == 0
        placement.saw_output()
        placement.finish(12)


@asynchronous
async def test_full_servers_are_passed_over_and_when_all_are_the_request_ends() -> None:
    one, two = ScriptedServer(), ScriptedServer()
    async with routed(one, two) as router:
        placement = await router.place(PROMPT)
        await placement.failed("full", full=True)
        assert placement.worker == two.worker
        with pytest.raises(QueueFull, match="at their bound"):
            await placement.failed("full", full=True)
        assert router.counters.queue_full == 1


@asynchronous
async def test_what_a_server_holds_below_its_gpu_is_as_its_options_say() -> None:
    async with routed(ScriptedServer(), options=ServerOptions(below_capacity_tokens=77)) as router:
        assert [spec.below_capacity_tokens for spec in router.scheduler.workers.values()] == [77]
    with pytest.raises(InvalidConfig, match="below_capacity_tokens"):
        ServerOptions(below_capacity_tokens=-1)


@asynchronous
async def test_a_server_takes_as_many_as_its_options_allow() -> None:
    async with routed(ScriptedServer(), options=ServerOptions(max_requests=2)) as router:
        first, second = await router.place(PROMPT), await router.place(PROMPT)
        with pytest.raises(QueueFull):
            await router.place(PROMPT)
        first.finish(1)
        third = await router.place(PROMPT)
        second.cancel()
        third.cancel()


@asynchronous
async def test_a_router_places_as_many_as_it_may() -> None:
    async with routed(ScriptedServer(), max_live_requests=1) as router:
        placement = await router.place(PROMPT, request_id="r")
        with pytest.raises(DuplicateRequest):
            await router.place(PROMPT, request_id="r")
        with pytest.raises(QueueFull, match="the bound of this router"):
            await router.place(PROMPT)
        placement.cancel()


@asynchronous
async def test_excluded_servers_are_never_chosen() -> None:
    one, two = ScriptedServer(), ScriptedServer()
    async with routed(one, two) as router:
        placement = await router.place(PROMPT, exclude={one.worker})
        assert placement.worker == two.worker
        with pytest.raises(NoWorkers):
            await router.place(PROMPT, exclude={one.worker, two.worker})
        placement.cancel()


@asynchronous
async def test_a_lost_server_is_reported_and_its_booking_given_back() -> None:
    one, two = ScriptedServer(), ScriptedServer()
    async with routed(one, two) as router:
        placement = await router.place(PROMPT)
        lost: list[str] = []
        placement.on_lost = lambda: lost.append(placement.worker)
        await router.remove_worker(one.url)
        assert lost == [one.worker] and router.scheduler.stats()["live_requests"] == 0
        await placement.failed("it was lost")
        assert placement.worker == two.worker
        placement.finish(3)


@asynchronous
async def test_an_answer_that_came_in_spite_of_a_loss_is_an_answer() -> None:
    one = ScriptedServer()
    async with routed(one) as router:
        placement = await router.place(PROMPT)
        await router.remove_worker(one.url)
        placement.finish(3)
        assert router.counters.finished == 1


@asynchronous
async def test_without_a_first_token_in_time_a_request_is_given_up() -> None:
    async with routed(ScriptedServer()) as router:
        placement = await router.place(PROMPT, first_token_seconds=0.05)
        over = asyncio.Event()
        placement.on_lost = over.set
        await over.wait()
        with pytest.raises(Overloaded, match="no token after"):
            await placement.failed("it was cut off")
        assert router.counters.shed == 1
        kept = await router.place(PROMPT, first_token_seconds=60.0)
        kept.first_token()
        assert kept.timer is None
        kept.finish(1)


@asynchronous
async def test_one_that_was_given_up_is_not_placed_again_though_it_names_a_tenant() -> None:
    """Regression: it was given a turn, and computed again for a client that had its error."""
    async with routed(ScriptedServer()) as router:
        placement = await router.place(PROMPT, first_token_seconds=0.05, tenant="a")
        over = asyncio.Event()
        placement.on_lost = over.set
        await over.wait()
        with pytest.raises(Overloaded, match="no token after"):
            await placement.failed("it was cut off")
        assert router.scheduler.stats()["live_requests"] == 0 and router.counters.shed == 1


@asynchronous
async def test_who_is_cancelled_while_waiting_for_a_place_has_none() -> None:
    one = ScriptedServer()
    async with routed(one) as router:
        placement = await router.place(PROMPT)
        await router.remove_worker(one.url)
        waiting = asyncio.ensure_future(placement.failed("it was lost"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        placement.cancel()
        assert router.stats()["live_requests"] == 0


@asynchronous
async def test_a_router_that_closes_ends_its_placements() -> None:
    server = await ScriptedServer().start()
    router = Router([server.url], config=fast())
    await router.start()
    placement = await router.place(PROMPT)
    lost = asyncio.Event()
    placement.on_lost = lost.set
    await router.close()
    assert lost.is_set() and router.scheduler.stats()["live_requests"] == 0
    with pytest.raises(TransportError):
        await placement.failed("closed")
    assert_bookings_are_even(router)
    await server.stop()


async def silent(worker: ScriptedWorker, submit: Any) -> None:
    """No answer."""


@asynchronous
async def test_a_worker_that_is_no_server_is_no_place() -> None:
    worker = ScriptedWorker(silent)
    router = Router([worker.endpoint], config=fast())
    await router.start()
    with pytest.raises(NoWorkers):
        await router.place(PROMPT)
    assert_bookings_are_even(router)
    await router.close()
    await worker.close()


@asynchronous
async def test_requests_whose_first_token_nobody_sees_wait_for_nothing() -> None:
    async with routed(ScriptedServer()) as router:
        whole = await router.place(PROMPT, streamed=False)
        assert router._predicted_wait.waiting == 0
        streamed = await router.place(PROMPT)
        assert router._predicted_wait.waiting == 1
        streamed.first_token()
        assert router._predicted_wait.waiting == 0
        whole.finish(1)
        streamed.finish(1)


@pytest.mark.parametrize("with_room", [False, True])
@asynchronous
async def test_an_attached_server_where_all_wait_too_long_is_passed_over_and_else_the_request_refused(
    with_room: bool,
) -> None:
    """Known from what was sent there and how fast first tokens came: the server is asked nothing."""
    servers = [ScriptedServer() for _ in range(1 + with_room)]
    clock = ManualClock(0.0)
    async with routed(*servers, clock=clock, refuse_wait_seconds=2.0) as router:
        waiting = [await router.place(PROMPT + 1000 * number) for number in range(14)]
        assert {one.worker for one in waiting} == {servers[0].worker}
        for done in waiting[:4]:
            clock.advance(1.0)
            done.first_token()
            done.finish(1)
        if with_room:
            elsewhere = await router.place(PROMPT + 50_000)
            assert elsewhere.worker == servers[1].worker
            elsewhere.finish(1)
        else:
            with pytest.raises(Overloaded):
                await router.place(PROMPT + 50_000)
        for left in waiting[4:]:
            left.cancel()


@asynchronous
async def test_an_impossible_hit_is_counted_and_not_reported() -> None:
    async with routed(ScriptedServer()) as router:
        placement = await router.place(PROMPT)
        placement.first_token(101)
        placement.finish(1)
        assert router.counters.wrong_reports == 1


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
@asynchronous
async def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    async with routed(ScriptedServer()) as router:
        with pytest.raises(InvalidInput):
            await router.place(PROMPT, first_token_seconds=seconds)
        with pytest.raises(InvalidInput, match="session"):
            await router.place(PROMPT, session="s")  # type: ignore[arg-type]


@asynchronous
async def test_a_server_that_sends_output_is_not_silent() -> None:
    server = ScriptedServer()
    async with routed(server, heartbeat_seconds=0.05, suspect_after_seconds=0.3, give_up_seconds=30.0) as router:
        placement = await router.place(PROMPT)
        server.awake.clear()
        (worker,) = router.fleet.workers.values()
        await until(lambda: worker.state == "suspect", "it is silent")
        placement.saw_output()
        assert worker.state == "ready"
        server.awake.set()
        placement.cancel()


# --- what waits before a server ---------------------------------------------------------------------------------------


def other_prompt(number: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """A prompt that shares nothing with others."""
    return np.arange(100, dtype=np.int32) + 1000 * number


@asynchronous
async def test_a_placement_in_turn_goes_when_the_one_before_it_has_begun() -> None:
    server = ScriptedServer()
    async with routed(server, look_ahead_seconds=0.0) as router:
        first, second, third = [await router.place(other_prompt(i), in_turn=True) for i in range(3)]
        await first.turn()
        turns = [asyncio.ensure_future(one.turn()) for one in (second, third)]
        await asyncio.sleep(0)
        (worker,) = router.stats()["workers"].values()
        assert worker["waiting"] == 2 and not any(turn.done() for turn in turns)
        first.first_token()
        await turns[0]
        assert not turns[1].done()
        third.cancel()
        turns[1].cancel()
        second.finish(1)
        first.finish(1)
        router.check()


@asynchronous
async def test_one_who_does_not_wait_for_its_turn_goes_at_once() -> None:
    async with routed(ScriptedServer(), look_ahead_seconds=0.0) as router:
        first, second = [await router.place(other_prompt(i)) for i in range(2)]
        await second.turn()
        (worker,) = router.stats()["workers"].values()
        assert worker["waiting"] == 0
        first.cancel()
        second.cancel()


@asynchronous
async def test_without_a_look_ahead_everything_goes_at_once() -> None:
    async with routed(ScriptedServer(), look_ahead_seconds=None) as router:
        placements = [await router.place(other_prompt(i), in_turn=True) for i in range(3)]
        for one in placements:
            await one.turn()
            one.cancel()
    with pytest.raises(InvalidConfig, match="look_ahead_seconds"):
        fast(look_ahead_seconds=-1.0)


@asynchronous
async def test_a_server_lost_under_one_that_waits_sends_it_elsewhere() -> None:
    one, two = ScriptedServer(), ScriptedServer()
    async with routed(one, two, look_ahead_seconds=0.0) as router:
        first, second = [await router.place(other_prompt(i), in_turn=True) for i in range(2)]
        turn = asyncio.ensure_future(second.turn())
        await asyncio.sleep(0)
        await router.remove_worker(one.url)
        with pytest.raises(TransportError, match="is lost"):
            await turn
        await second.failed("it was lost")
        assert second.worker == two.worker
        await second.turn()
        second.finish(1)
        first.cancel()


@asynchronous
async def test_the_client_s_time_runs_while_a_request_waits_for_its_turn() -> None:
    async with routed(ScriptedServer(), look_ahead_seconds=0.0) as router:
        first = await router.place(other_prompt(0), in_turn=True)
        second = await router.place(other_prompt(1), in_turn=True, first_token_seconds=0.05)
        with pytest.raises(TransportError, match="is lost"):
            await second.turn()
        with pytest.raises(Overloaded, match="no token after"):
            await second.failed("its turn did not come")
        first.cancel()


@asynchronous
async def test_a_batch_request_waits_for_the_others() -> None:
    flow = FlowConfig(spare_seconds=60.0)  # else it would wait before it has a place
    async with routed(ScriptedServer(), look_ahead_seconds=0.0, flow=flow) as router:
        first = await router.place(other_prompt(0), in_turn=True)
        batch = await router.place(other_prompt(1), in_turn=True, priority="batch")
        soon = await router.place(other_prompt(2), in_turn=True)
        turn = asyncio.ensure_future(batch.turn())
        first.first_token()
        await soon.turn()
        assert not turn.done()
        soon.first_token()
        await turn
        for one in (first, batch, soon):
            one.finish(1)


@asynchronous
async def test_generated_requests_wait_before_a_server_and_are_withdrawn_unsent() -> None:
    asked: list[Call] = []
    go = asyncio.Event()

    async def answer(call: Call) -> None:
        asked.append(call)
        await go.wait()
        meta = {"prompt_tokens": 100, "completion_tokens": 1, "cached_tokens": 0, "finish_reason": {"type": "stop"}}
        await call.stream({"text": "", "output_ids": [5], "meta_info": meta})

    async with routed(ScriptedServer(answer), look_ahead_seconds=0.0) as router:
        first, second, third = [
            asyncio.ensure_future(collect(router.generate(other_prompt(i), SamplingParams(max_new_tokens=1))))
            for i in range(3)
        ]
        await until(lambda: asked, "the first is sent")
        (worker,) = router.stats()["workers"].values()
        assert worker["waiting"] == 2
        third.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await third
        assert len(asked) == 1 and next(iter(router.stats()["workers"].values()))["waiting"] == 1
        go.set()
        for task in (first, second):
            assert (await task)[0] == [5]
        assert len([call for call in asked if "generate" in call.path]) == 2
