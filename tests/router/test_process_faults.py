"""Faults between real processes: each promise of docs/faults.md that no other test file has. Owns stories; networks
that lose frames, namespaces and router processes are `support/faults.py`'s, the long random run is stress/chaos.py's.

Every answer is compared with what the simulated engine says undisturbed. Waits end when something happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from preble import PrefixEvicted, SamplingParams
from preble.router import Router
from preble.transport import wire
from preble.types import BlockRemoved, BlockStored
from tests.stress.load import Probe
from tests.support.faults import Island, Lane, NamespaceDenied, RouterProcess, network
from tests.support.transport import (
    HANG_SECONDS,
    FirstByName,
    ScriptedWorker,
    WorkerProcess,
    assert_bookings_are_even,
    asynchronous,
    collect,
    expected_tokens,
    fast,
    until,
    until_others_ended,
)

PROMPT = list(range(200, 400))
ENDLESS = SamplingParams(max_new_tokens=1000)
SHORT = SamplingParams(max_new_tokens=3)


@contextlib.asynccontextmanager
async def routing(*endpoints: str, **options: Any) -> AsyncIterator[Router]:
    """A router; its bookings are even at the end."""
    policy = options.pop("policy", FirstByName())
    async with Router(endpoints, policy=policy, config=fast(**options)) as router:
        yield router
        await until_others_ended(router)
        assert_bookings_are_even(router)


@contextlib.asynccontextmanager
async def scripted(script: Any = None, **options: Any) -> AsyncIterator[tuple[Router, ScriptedWorker]]:
    """A router before a worker that does what the test says."""
    worker = ScriptedWorker(script)
    try:
        async with routing(worker.endpoint, **options) as router:
            yield router, worker
    finally:
        await worker.close()


def stats_of(router: Router, endpoint: str) -> dict[str, Any]:
    """What the router says of one worker."""
    return dict(router.stats()["workers"][endpoint])


def estimated(router: Router, worker_id: str, prompt: list[int] = PROMPT) -> int:
    """Tokens of a prompt that the scheduler expects cached there."""
    return int(router.scheduler.match([*prompt, 1]).matched_tokens.get(worker_id, 0))


# --- events and chunks ------------------------------------------------------------------------------------------------


@asynchronous
async def test_an_eviction_that_overtakes_the_chunk_of_what_it_evicts_is_estimated_after_it() -> None:
    computed, over = asyncio.Event(), asyncio.Event()

    async def answers_late(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
        await computed.wait()
        await worker.send(wire.OutputChunk(submit.request_id, 0, (5,), 0, None, None, len(worker.batches) - 1))
        await over.wait()
        await worker.send(wire.OutputChunk(submit.request_id, 1, (6,), None, "length", None, len(worker.batches)))

    async with scripted(answers_late) as (router, worker):
        await published(router, worker)
        stream = router.generate(PROMPT, SamplingParams(max_new_tokens=2))
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: worker.got(wire.GenerationRequest), "the request is there")
        worker.silent = True  # no Pong says meanwhile what came first
        before = stats_of(router, worker.endpoint)
        worker.batches.append((PrefixEvicted(np.array(PROMPT, np.int32), 0),))
        await worker.publish(len(worker.batches) - 1)
        await until(
            lambda: any(
                stats_of(router, worker.endpoint)[name] > before[name] for name in ("events_early", "event_batches")
            ),
            "the eviction has come",
        )
        computed.set()
        await first
        assert estimated(router, "scripted") == len(PROMPT), "as when the chunk was sent"
        over.set()
        assert (await anext(stream)).finish_reason == "length"
        assert stats_of(router, worker.endpoint)["event_batches"] == len(worker.batches), "its turn has come"
        assert estimated(router, "scripted") == 0, "computed, then evicted"
        await stream.aclose()  # type: ignore[attr-defined]
        worker.silent = False


@asynchronous
async def test_an_event_need_not_wait_for_a_chunk_where_no_request_is_under_way() -> None:
    """So what other routers do is known a network delay later, not a heartbeat."""
    async with scripted(heartbeat_seconds=HANG_SECONDS, suspect_after_seconds=4 * HANG_SECONDS) as (router, worker):
        await published(router, worker)
        worker.batches.append((BlockRemoved((7,)),))
        await worker.publish(len(worker.batches) - 1)
        made = len(worker.batches)
        await until(lambda: stats_of(router, worker.endpoint)["event_batches"] == made, "no Pong came before it")


async def published(router: Router, worker: ScriptedWorker) -> None:
    """Wait until published events arrive by themselves, without a replay."""
    heard = asked = 0
    while not heard or asked:
        before = stats_of(router, worker.endpoint)
        worker.batches.append((BlockRemoved((len(worker.batches),)),))
        await worker.publish(len(worker.batches) - 1)
        await asyncio.sleep(0.01)
        after = stats_of(router, worker.endpoint)
        heard, asked = (after[name] - before[name] for name in ("event_batches", "replays"))


@asynchronous
async def test_a_lost_event_is_asked_for_by_the_second_heartbeat_after_it() -> None:
    async with scripted() as (router, worker):
        await published(router, worker)
        await until(lambda: stats_of(router, worker.endpoint)["event_batches"] == len(worker.batches), "all came")
        asked, pinged = len(worker.got(wire.Replay)), len(worker.got(wire.Ping))
        worker.batches.append((PrefixEvicted(np.array(PROMPT, np.int32), 0),))  # never published
        await until(lambda: len(worker.got(wire.Replay)) > asked, "it is asked for")
        after = worker.received.index(worker.got(wire.Replay)[asked])
        pings = sum(isinstance(message, wire.Ping) for message in worker.received[:after])
        # One was on its way; the next Pong reports of the event; when the one after it comes, the event is overdue.
        assert pings - pinged <= 3


@pytest.mark.parametrize("first_kept", [0, 1])
@asynchronous
async def test_a_new_router_learns_from_the_events_before_it_what_is_cached(first_kept: int) -> None:
    blocks = [tuple(range(100 * i, 100 * i + 16)) for i in range(1, 4)]
    worker = ScriptedWorker(None, block_size=16)
    worker.batches = [(BlockStored((i,), None, block, 16),) for i, block in enumerate(blocks)]
    worker.batches.append((BlockRemoved((2,)),))
    worker.first_kept = first_kept  # what is older nobody can know; the rest counts
    try:
        async with routing(worker.endpoint) as router:
            await until(lambda: estimated(router, "scripted", list(blocks[1])), "the replay has come")
            await until(lambda: stats_of(router, worker.endpoint)["event_batches"] == 4 - first_kept, "all of it")
            assert [estimated(router, "scripted", list(block)) for block in blocks] == [0 if first_kept else 16, 16, 0]
            assert stats_of(router, worker.endpoint)["resyncs"] == 0, "who comes has nothing to forget"
    finally:
        await worker.close()


# --- frames lost, doubled, swapped ------------------------------------------------------------------------------------


@pytest.fixture
def worker() -> Iterator[Callable[..., WorkerProcess]]:
    """Start worker processes that are stopped at the end."""
    started: list[WorkerProcess] = []

    def start(*arguments: str, **options: Any) -> WorkerProcess:
        started.append(WorkerProcess(*arguments, **options))
        return started[-1]

    yield start
    for process in started:
        process.stop()


Start = Callable[..., WorkerProcess]


def test_the_same_seed_loses_the_same_frames() -> None:
    frames = [[b"%d" % i] for i in range(1000)]
    runs = []
    for seed in (1, 1, 2):
        lane = Lane(seed, loss=0.1, double=0.1, swap=0.1, budget=250)
        out = [part for frame in frames for part in lane.passes(frame)]
        assert sum(lane.counts.values()) == 1000 and 1000 - lane.counts["passed"] == 250
        runs.append(out)
    assert runs[0] == runs[1] != runs[2]


def prompt_of(number: int) -> list[int]:
    """A few long beginnings, many ends: more than a cache of 1,000 tokens holds."""
    start = number % 7 * 1000
    return [*range(start, start + 300), number]


async def answered(router: Router, numbers: range, max_new_tokens: int = 12) -> None:
    """Ask at most six at a time; fails unless every answer is whole."""
    places = asyncio.Semaphore(6)

    async def ask(number: int) -> None:
        async with places:
            tokens, _ = await collect(router.generate(prompt_of(number), SamplingParams(max_new_tokens=max_new_tokens)))
            assert tokens == expected_tokens(prompt_of(number), max_new_tokens)

    await asyncio.gather(*map(ask, numbers))


async def assert_no_more_estimated_than_cached(router: Router, endpoint: str, asked: int) -> None:
    """Wait until all events are applied, before each look; ask the engine itself, past the router, and begin with the
    newest of the prompts `asked`: each that it has not cached evicts others."""
    (link,) = (one.link for one in router.fleet.workers.values() if one.address == endpoint)
    probe = Probe(endpoint)
    seen = 0
    try:
        for number in range(asked - 1, max(asked - 21, -1), -1):
            end = await asyncio.to_thread(probe.event_end)
            await until(lambda end=end: link.next_event_seq >= end, "all events are applied")
            held = min(estimated(router, "a", prompt_of(number)), 300)
            assert held <= await asyncio.to_thread(probe.cached_tokens, prompt_of(number))
            seen += held
        assert seen > 0, "something is estimated at all"
    finally:
        probe.close()


@asynchronous
async def test_with_a_tenth_of_the_events_lost_doubled_and_swapped_estimates_stay_true(worker: Start) -> None:
    process = worker("--id", "a", "--kv-capacity-tokens", "1000", time_scale=0.0)
    with network(process) as net:
        net.events.faulty(loss=0.1, double=0.1, swap=0.1)
        async with routing(net.endpoint) as router:
            number = 0
            while min(net.events.counts[what] for what in ("lost", "doubled", "swapped")) < 5:
                await answered(router, range(number, number + 20))
                number += 20
            await assert_no_more_estimated_than_cached(router, net.endpoint, number)
            stats = stats_of(router, net.endpoint)
            assert stats["replays"] > 0 and stats["event_duplicates"] > 0 and stats["resyncs"] == 0
            assert stats["losses"] == 0, "lost events cost no session"


@asynchronous
async def test_doubled_frames_are_dropped_and_cost_nothing(worker: Start) -> None:
    process = worker("--id", "a", time_scale=0.0)
    with network(process) as net:
        for lane in (net.up, net.down):
            lane.faulty(double=0.2)
        async with routing(net.endpoint, connect_seconds=HANG_SECONDS) as router:
            while min(net.up.counts["doubled"], net.down.counts["doubled"]) < 10:
                await answered(router, range(20))
            stats = stats_of(router, net.endpoint)
            assert stats["frame_duplicates"] > 5 and stats["frame_gaps"] == 0
            assert router.stats()["resumed"] == 0 and router.stats()["duplicate_tokens"] == 0


@pytest.mark.parametrize("fault", ["loss", "swap"])
@pytest.mark.parametrize("way", ["up", "down"])
@asynchronous
async def test_lost_and_swapped_frames_end_the_session_and_no_request(worker: Start, fault: str, way: str) -> None:
    process = worker("--id", "a", time_scale=0.01)
    with network(process) as net:
        async with routing(net.endpoint, max_attempts=50) as router:
            lane = getattr(net, way)
            for number in range(0, 40, 10):
                lane.faulty(**{fault: 0.2}, budget=1)
                await answered(router, range(number, number + 10), 30)
            await until(lambda: lane.budget == 0 and stats_of(router, net.endpoint)["state"] == "ready", "it is back")
            stats = stats_of(router, net.endpoint)
            assert stats["losses"] >= 1 and router.stats()["token_gaps"] == 0
            if way == "down":
                assert stats["frame_gaps"] >= 1
            assert stats["restarts"] == 0, "its cache is as it was"
            await assert_no_more_estimated_than_cached(router, net.endpoint, 40)


# --- a partition ------------------------------------------------------------------------------------------------------


@pytest.fixture
def island() -> Iterator[Island]:
    """A network namespace; skips where this is not permitted."""
    try:
        made = Island(1)
    except NamespaceDenied as error:
        pytest.skip(f"needs network namespaces: {error}")
    yield made
    made.close()


def start_on(island: Island, worker: Start, *arguments: str) -> WorkerProcess:
    """Worker "a" beyond the cable. It would need more than a minute for an answer of ENDLESS."""
    options = ("--id", "a", "--insecure", *arguments)
    return worker(*options, endpoint=f"tcp://{island.host}:22511", time_scale=3.0, prefix=island.prefix)


@asynchronous
async def test_a_partition_that_heals_in_time_costs_no_session(worker: Start, island: Island) -> None:
    far, near = start_on(island, worker), worker("--id", "b")
    async with routing(far.endpoint, near.endpoint, suspect_after_seconds=1.0) as router:
        prompts = [[*PROMPT, i] for i in range(4)]
        answers = [asyncio.ensure_future(collect(router.generate(prompt, ENDLESS))) for prompt in prompts]
        await until(lambda: router.stats()["output_tokens"] > 40, "all are under way")
        island.cut()
        assert [tokens for tokens, _ in await asyncio.gather(*answers)] == [expected_tokens(p, 1000) for p in prompts]
        await until(lambda: stats_of(router, far.endpoint)["state"] == "suspect", "it is left alone")
        island.heal()
        await until(lambda: stats_of(router, far.endpoint)["state"] == "ready", "it is back")
        await until(lambda: stats_of(router, far.endpoint)["load"]["running"] == 0, "what was left there is aborted")
        assert stats_of(router, far.endpoint)["losses"] == 0
        _, chunks = await collect(router.generate(PROMPT, SHORT))
        assert chunks[0].worker == "a" and chunks[0].cached_tokens == len(PROMPT) - 1
        assert router.stats()["duplicate_tokens"] == router.stats()["token_gaps"] == 0


@asynchronous
async def test_a_partition_that_outlasts_all_patience_ends_even_on_both_sides(worker: Start, island: Island) -> None:
    far, near = start_on(island, worker, "--session-timeout", "1"), worker("--id", "b")
    async with routing(far.endpoint, near.endpoint, suspect_after_seconds=0.5, give_up_seconds=1.5) as router:
        prompts = [[*PROMPT, i] for i in range(4)]
        answers = [asyncio.ensure_future(collect(router.generate(prompt, ENDLESS))) for prompt in prompts]
        await until(lambda: router.stats()["output_tokens"] > 40, "all are under way")
        island.cut()
        assert [tokens for tokens, _ in await asyncio.gather(*answers)] == [expected_tokens(p, 1000) for p in prompts]
        await until(lambda: stats_of(router, far.endpoint)["state"] == "lost", "the router has given up")
        assert_bookings_are_even(router)
        island.heal()
        await until(lambda: stats_of(router, far.endpoint)["state"] == "ready", "a new session")
        await until(lambda: stats_of(router, far.endpoint)["load"]["running"] == 0, "the worker has given up, too")
        assert stats_of(router, far.endpoint)["restarts"] == 0, "the same process, so its cache counts"
        _, chunks = await collect(router.generate(PROMPT, SHORT))
        assert chunks[0].worker == "a" and chunks[0].cached_tokens == len(PROMPT) - 1


# --- routers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def load() -> Iterator[Callable[..., RouterProcess]]:
    """Start router processes that are killed at the end."""
    started: list[RouterProcess] = []

    def start(*arguments: str) -> RouterProcess:
        started.append(RouterProcess(*arguments))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def busy(router: RouterProcess) -> RouterProcess:
    """The router, when answers have come."""
    router.ask("load")
    while router.ask("progress")["counts"].get("answered", 0) < 5:
        continue
    return router


def test_a_killed_router_leaves_nothing_behind_and_its_successor_serves_on(
    worker: Start, load: Callable[..., RouterProcess]
) -> None:
    process = worker("--max-requests", "8", "--session-timeout", "1", time_scale=0.1)
    first = load(process.endpoint, "--output-tokens", "100000")
    first.ask("load")
    probe = Probe(process.endpoint)
    while not probe.running():
        continue
    first.kill()
    probe.wait_until_idle()  # long before so many tokens could have been computed
    probe.close()
    second = busy(load(process.endpoint, "--seed", "1"))
    second.ask("stop")
    report = second.ask("check")
    assert report["findings"] == [] and report["counts"]["estimated_tokens"] > 0


def test_a_stopped_router_delays_nobody_loses_its_places_and_goes_on_when_it_wakes(
    worker: Start, load: Callable[..., RouterProcess]
) -> None:
    process = worker("--session-timeout", "1", time_scale=5.0)  # requests take longer than that
    sleeper = busy(load(process.endpoint))
    sleeper.process.send_signal(signal.SIGSTOP)
    probe = Probe(process.endpoint)
    probe.wait_until_idle()  # its requests are aborted: they would hold their places for good
    probe.close()
    other = busy(load(process.endpoint, "--seed", "1"))
    sleeper.process.send_signal(signal.SIGCONT)
    before = sleeper.ask("progress")
    while sleeper.ask("progress")["counts"]["answered"] < before["counts"]["answered"] + 20:
        continue
    for router in (other, sleeper):
        router.ask("stop")
    reports = [router.ask("check") for router in (other, sleeper)]
    assert [report["findings"] for report in reports] == [[], []]
    assert reports[1]["resumed"] > 0, "what it had under way was taken up again"


@asynchronous
async def test_a_consumer_that_does_not_read_keeps_nobody_waiting_and_gets_all_at_once(worker: Start) -> None:
    process = worker("--id", "a", time_scale=0.01)
    async with routing(process.endpoint) as router:
        idle = router.generate(PROMPT, SamplingParams(max_new_tokens=500))
        first = await anext(idle)
        await answered(router, range(10))
        await until(lambda: router.stats()["output_tokens"] >= 500 + 120, "the worker has long ended it")
        second = await anext(idle)
        assert [*first.token_ids, *second.token_ids] == expected_tokens(PROMPT, 500)
        assert second.finish_reason == "length" and router.scheduler.stats()["live_requests"] == 0
        await idle.aclose()  # type: ignore[attr-defined]
