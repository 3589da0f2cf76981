"""Several routers before the same workers, each a process of its own: the bookings of each are of the whole fleet,
whoever placed what, and whoever dies or comes late. The parts are tested in test_peer_requests and worker/test_process.

Every answer is compared with what the simulated engine says undisturbed. Waits end when something happens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from preble.router import Router
from preble.transport import wire
from preble.types import BlockStored, RequestEnded, RequestPlaced, RequestPrefilled
from tests.stress.load import Probe
from tests.support.faults import network
from tests.support.routers import RemoteRouter, RouterGone
from tests.support.transport import (
    HANG_SECONDS,
    ScriptedWorker,
    WorkerProcess,
    asynchronous,
    expected_tokens,
    fast,
    until,
)

WORKERS, ROUTERS = 4, 3
PROMPT = list(range(200, 400))
SLOW = 0.5  # time scale at which a long answer takes seconds
LONG = 300


@pytest.fixture
def workers() -> Iterator[Callable[..., list[WorkerProcess]]]:
    """Start worker processes that are stopped at the end."""
    started: list[WorkerProcess] = []

    def start(*arguments: str, count: int = WORKERS, **options: Any) -> list[WorkerProcess]:
        started.extend(WorkerProcess("--id", f"w{i}", *arguments, **options) for i in range(count))
        return started

    yield start
    for process in started:
        process.stop()


Start = Callable[..., list[WorkerProcess]]


@contextlib.asynccontextmanager
async def routers(*endpoints: str, count: int = ROUTERS, **options: Any) -> AsyncIterator[list[RemoteRouter]]:
    """That many routers before the same workers; more may be added to the list."""
    made = list(await asyncio.gather(*(RemoteRouter.start(*endpoints, **options) for _ in range(count))))
    try:
        yield made
    finally:
        for router in made:
            await router.kill()


async def until_said(condition: Callable[[], Any], what: str) -> None:
    """Wait for a coroutine's answer to become true."""
    deadline = asyncio.get_running_loop().time() + HANG_SECONDS
    while not await condition():
        assert asyncio.get_running_loop().time() < deadline, f"waited in vain until {what}"
        await asyncio.sleep(0.01)


def prompt_of(family: int, member: int, tokens: int = 200) -> list[int]:
    """A long beginning shared by a family, and one token of its own."""
    return [*range(family * 1000 + 1, family * 1000 + tokens), 20_000 + member]


async def none_left(made: list[RemoteRouter], processes: list[WorkerProcess]) -> None:
    """Wait until no booking is left anywhere; every invariant holds then."""

    async def even() -> bool:
        states = [await router.do("state") for router in made]
        return not any(state["mirrored"] or state["own"] for state in states)

    for process in processes:
        probe = Probe(process.endpoint)
        await asyncio.to_thread(probe.wait_until_idle)
        probe.close()
    await until_said(even, "no booking is left")
    for router in made:
        await router.do("check")
        assert (await router.do("state"))["events_refused"] == 0


@asynchronous
async def test_siblings_that_come_to_different_routers_meet_on_one_worker(workers: Start) -> None:
    processes = workers(time_scale=0.0)
    async with routers(*(one.endpoint for one in processes)) as made:
        first = [await made[i % ROUTERS].ask(prompt_of(i, 0, 1500), 2) for i in range(6)]

        async def known() -> bool:
            found = [await router.matches([prompt_of(i, 1, 1500) for i in range(6)]) for router in made]
            return all(
                each[i].get(first[i]["worker"], 0) >= 1499 and len(each[i]) == 1 for each in found for i in range(6)
            )

        await until_said(known, "every router has reported every prompt")
        for i in range(6):
            for other in (1, 2):
                answer = await made[(i + other) % ROUTERS].ask(prompt_of(i, other, 1500), 2)
                assert (answer["worker"], answer["cached"]) == (first[i]["worker"], 1499)
        await none_left(made, processes)


@asynchronous
async def test_each_router_books_what_the_others_have_running(workers: Start) -> None:
    processes = workers(time_scale=SLOW)
    async with routers(*(one.endpoint for one in processes)) as made:
        asked = [asyncio.ensure_future(made[i % ROUTERS].ask(prompt_of(i, 0), LONG)) for i in range(9)]

        async def seen() -> bool:
            states = [await router.do("state") for router in made]
            return all((state["own"], state["mirrored"]) == (3, 6) for state in states)

        await until_said(seen, "each has three of its own and six of the others")
        spread = [(await router.do("state"))["by_worker"] for router in made]
        assert spread[0] == spread[1] == spread[2] and sum(spread[0].values()) == 9, "the same books in all"

        async def no_drift() -> bool:
            return not any([any((await router.do("state"))["drift"].values()) for router in made])

        await until_said(no_drift, "the workers' own counts agree")
        assert [(await answer)["tokens"] for answer in asked] == [
            expected_tokens(prompt_of(i, 0), LONG) for i in range(9)
        ]
        await none_left(made, processes)


async def insistent(made: list[RemoteRouter], start: int, prompt: list[int], tokens: int, name: str) -> dict[str, Any]:
    """A client that goes to the next router when one is gone, with the same id for its request."""
    for attempt in range(ROUTERS):
        try:
            answer = await made[(start + attempt) % ROUTERS].ask(prompt, tokens, name)
        except RouterGone:
            continue
        return {**answer, "attempts": attempt + 1}
    raise AssertionError("no router is left")


@asynchronous
async def test_a_killed_router_loses_no_request_that_is_retried_and_leaves_no_booking(workers: Start) -> None:
    processes = workers("--session-timeout", "2", time_scale=SLOW)
    async with routers(*(one.endpoint for one in processes)) as made:
        asked = [
            asyncio.ensure_future(insistent(made, i % ROUTERS, prompt_of(i, 0), LONG, f"client-{i}")) for i in range(12)
        ]

        async def all_known() -> bool:
            states = [await router.do("state") for router in made]
            return all(state["own"] + state["mirrored"] == 12 for state in states)

        await until_said(all_known, "every router has all requests in its bookings")
        await made[0].kill()
        answers = await asyncio.gather(*asked)
        assert [answer["tokens"] for answer in answers] == [expected_tokens(prompt_of(i, 0), LONG) for i in range(12)]
        assert [answer["attempts"] for answer in answers] == [2, 1, 1] * 4, "those of the killed one were retried"
        await none_left(made[1:], processes)


@asynchronous
async def test_a_router_that_joins_midway_knows_what_the_others_placed_before(workers: Start) -> None:
    processes = workers(time_scale=SLOW)
    endpoints = [one.endpoint for one in processes]
    prompts = [prompt_of(i, 0) for i in range(40)]
    async with routers(*endpoints, count=2) as made:
        for i in range(0, 40, 4):
            await asyncio.gather(*(made[j % 2].ask(prompts[j], 2) for j in range(i, i + 4)))
        running = [asyncio.ensure_future(made[i % 2].ask(prompt_of(50 + i, 0), LONG)) for i in range(4)]

        async def placed() -> bool:
            states = [await router.do("state") for router in made]
            return all(state["own"] + state["mirrored"] == 4 for state in states)

        await until_said(placed, "four are running")
        made.append(await RemoteRouter.start(*endpoints))

        async def like_the_others() -> bool:
            found = [await router.matches(prompts) for router in made]
            return found[2] == found[0] == found[1]

        await until_said(like_the_others, "it expects what the others expect")

        async def has_the_load() -> bool:
            return bool((await made[2].do("state"))["mirrored"] == 4)

        await until_said(has_the_load, "it has booked what runs")
        state = await made[2].do("state")
        assert state["peer_requests_past"] == 40 and state["peer_requests"] == 4, "and nothing that was over"
        for answer in running:
            assert len((await answer)["tokens"]) == LONG
        await none_left(made, processes)


@asynchronous
async def test_with_event_frames_lost_doubled_and_swapped_the_bookings_come_out_even(workers: Start) -> None:
    processes = workers(count=2, time_scale=0.02)
    with network(processes[0], seed=1) as one, network(processes[1], seed=2) as two:
        for net in (one, two):
            net.events.faulty(loss=0.1, double=0.1, swap=0.1)
        async with routers(one.endpoint, two.endpoint, connect_seconds=HANG_SECONDS) as made:
            round_number = 0
            while min(net.events.counts[what] for net in (one, two) for what in ("lost", "doubled", "swapped")) < 5:
                prompts = [prompt_of(i % 7, 100 * round_number + i) for i in range(30)]
                answers = await asyncio.gather(*(made[i % ROUTERS].ask(p, 8) for i, p in enumerate(prompts)))
                assert [answer["tokens"] for answer in answers] == [expected_tokens(p, 8) for p in prompts]
                round_number += 1
            for net in (one, two):
                net.heal()
            await none_left(made, processes)
            states = [await router.do("state") for router in made]
            assert sum(state["replays"] for state in states) > 0 and not any(state["resyncs"] for state in states)


# --- one router, and a worker that says what the test wants -----------------------------------------------------------


@contextlib.asynccontextmanager
async def scripted(*batches: tuple[Any, ...], **options: Any) -> AsyncIterator[tuple[Router, ScriptedWorker]]:
    """A router before a worker that has published these batches."""
    worker = ScriptedWorker(None)  # type: ignore[arg-type]
    worker.batches += batches
    try:
        async with Router([worker.endpoint], config=fast(**options)) as router:
            yield router, worker
    finally:
        await worker.close()


def mirrored(router: Router) -> int:
    """Bookings for others."""
    return int(router.scheduler.stats()["peer_bookings"])


def placed(request_id: str) -> RequestPlaced:
    """Another router's request has come."""
    return RequestPlaced("other", request_id, PROMPT, None, 100)


@asynchronous
async def test_where_events_are_lost_for_good_others_requests_are_forgotten_with_the_cache() -> None:
    running = (placed("1"), RequestPrefilled("other", "1", 0))
    async with scripted(running) as (router, worker):
        await until(lambda: mirrored(router) == 1, "it is booked")
        assert router.scheduler.match([*PROMPT, 1]).matched_tokens["scripted"] == len(PROMPT)
        worker.batches += [
            (RequestEnded("other", "1", 5),),
            (placed("2"),),
            (placed("3"),),
            (RequestEnded("other", "3"),),
        ]
        worker.first_kept = 2  # the end of the first one is not to be had any more
        await until(lambda: router.stats()["workers"][worker.endpoint]["resyncs"] == 1, "it is found out")
        await until(lambda: router.stats()["workers"][worker.endpoint]["event_batches"] == 4, "the rest has come")
        assert mirrored(router) == 1, "the one that runs, of those that can be known"
        assert router.stats()["workers"][worker.endpoint]["peer_requests_past"] == 1
        worker.batches.append((RequestEnded("other", "2", 9),))
        await until(lambda: mirrored(router) == 0, "and it ends")
        router.scheduler.check()


@asynchronous
async def test_a_batch_that_is_complete_for_another_router_only_is_asked_for() -> None:
    async with scripted() as (router, worker):
        worker.batches.append((placed("1"),))
        partial = wire.encode(wire.Events(0, (), "somebody-else"), epoch=worker.epoch)

        async def announced() -> bool:
            await worker.publisher.send(partial)
            return bool(router.stats()["workers"][worker.endpoint]["events_partial"])

        while not await announced():
            await asyncio.sleep(0.01)
        await until(lambda: mirrored(router) == 1, "what was left out has come")
        assert router.stats()["workers"][worker.endpoint]["event_batches"] == 1


@asynchronous
async def test_a_batch_that_is_complete_for_this_router_is_taken_as_it_is() -> None:
    async with scripted(heartbeat_seconds=HANG_SECONDS, suspect_after_seconds=4 * HANG_SECONDS) as (router, worker):
        complete = wire.encode(wire.Events(0, (), router.router_id), epoch=worker.epoch)
        worker.batches.append((RequestPlaced(router.router_id, "1", PROMPT),))
        while not router.stats()["workers"][worker.endpoint]["event_batches"]:
            await worker.publisher.send(complete)
            await asyncio.sleep(0.01)
        stats = router.stats()["workers"][worker.endpoint]
        assert (stats["events_partial"], stats["replays"], mirrored(router)) == (0, 0, 0)


@asynchronous
async def test_a_worker_that_comes_back_within_its_life_ends_what_ended_meanwhile() -> None:
    """The link breaks, requests end and begin behind the router's back, and it takes the story up where it stopped."""
    async with scripted((placed("1"), placed("2"))) as (router, worker):
        await until(lambda: mirrored(router) == 2, "both are booked")
        await worker.send(wire.Closed("expired", "silent for too long"))
        worker.batches += [(RequestEnded("other", "1", 3),), (placed("3"), RequestEnded("other", "3", 1), placed("4"))]
        await until(lambda: len(worker.got(wire.Hello)) == 2, "it says Hello again")
        await until(lambda: router.stats()["workers"][worker.endpoint]["event_batches"] == 3, "it has caught up")
        assert mirrored(router) == 2, "the second and the fourth"
        stats = router.stats()["workers"][worker.endpoint]
        assert (stats["peer_requests"], stats["peer_requests_past"], stats["resyncs"]) == (3, 1, 0)


@asynchronous
async def test_a_worker_with_a_new_epoch_takes_the_bookings_of_its_earlier_life_along() -> None:
    async with scripted((placed("1"),)) as (router, worker):
        await until(lambda: mirrored(router) == 1, "it is booked")
        await worker.send(wire.Closed("shutdown", "restarting"))
        worker.epoch += 1
        worker.batches = [(placed("9"), RequestEnded("other", "9"))]
        await until(lambda: router.stats()["workers"][worker.endpoint]["restarts"] == 1, "it is another one")
        await until(lambda: mirrored(router) == 0, "nothing of the earlier life is booked")
        router.scheduler.check()


@asynchronous
async def test_events_that_the_scheduler_refuses_cost_its_estimates_and_leave_no_booking() -> None:
    async with scripted((placed("1"),)) as (router, worker):
        await until(lambda: mirrored(router) == 1, "it is booked")
        worker.batches.append((BlockStored((1,), None, [1, 2, 3], 7),))  # three tokens make no block of seven
        await until(lambda: router.stats()["workers"][worker.endpoint]["events_refused"] == 1, "they are refused")
        assert mirrored(router) == 0
