"""Workers run so many requests at once (`WorkerSpec.max_running`): what a wait for a place is worth to E2."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import preble
from preble import ManualClock, SchedulerConfig, WorkerSpec
from preble.sim import SimConfig, simulate
from preble.sim.config import engine_config
from preble.workloads.types import PromptRequest, Workload

PLACES, STAY_SECONDS = 8, 8.0


def scheduler_of(*places: int | None) -> tuple[preble.GlobalScheduler, ManualClock]:
    """Workers w0, w1, ... that run so many requests at once."""
    clock = ManualClock(100.0)
    specs = [WorkerSpec(f"w{i}", 100_000, max_running=count) for i, count in enumerate(places)]
    return preble.GlobalScheduler(specs, config=SchedulerConfig(calibrate=False), clock=clock), clock


def prompt(number: int) -> list[int]:
    """One that shares nothing with others."""
    return [1000 + number, *range(20)]


def has_run(scheduler: preble.GlobalScheduler, clock: ManualClock, worker: str, number: int = 99) -> None:
    """A request has kept a place there for STAY_SECONDS."""
    others = frozenset(scheduler.workers) - {worker}
    scheduler.schedule(prompt(number), request_id=number, exclude=others)
    scheduler.first_token(number)
    clock.advance(STAY_SECONDS)
    scheduler.finish(number, output_tokens=50)


def fill(scheduler: preble.GlobalScheduler, worker: str, count: int, first: int = 0) -> None:
    """So many requests decode there: nothing of them is left to prefill."""
    others = frozenset(scheduler.workers) - {worker}
    for number in range(first, first + count):
        scheduler.schedule(prompt(number), request_id=number, exclude=others)
        scheduler.first_token(number)


def wait_of(scheduler: preble.GlobalScheduler, worker: str) -> float:
    return scheduler.stats()["workers"][worker]["place_wait_seconds"]


def test_who_has_no_place_waits_until_one_ends() -> None:
    scheduler, clock = scheduler_of(PLACES)
    has_run(scheduler, clock, "w0")
    fill(scheduler, "w0", PLACES - 1)
    assert wait_of(scheduler, "w0") == 0.0
    fill(scheduler, "w0", 1, first=PLACES)
    assert wait_of(scheduler, "w0") == pytest.approx(STAY_SECONDS / PLACES, rel=0.01)
    before = scheduler.explain(prompt(50)).workers[0].queue_seconds
    fill(scheduler, "w0", 1, first=PLACES + 1)
    assert scheduler.explain(prompt(50)).workers[0].queue_seconds - before == pytest.approx(1.0, rel=0.01)
    scheduler.check()


def test_a_request_goes_where_a_place_is_free() -> None:
    """Regression: ten requests that only decode looked like 40 ms, and a server of eight places was kept for hits
    while they waited for seconds."""
    for places, chosen in ((4, "w1"), (None, "w0")):
        scheduler, clock = scheduler_of(places, places)
        has_run(scheduler, clock, "w0")
        fill(scheduler, "w0", 5)
        assert scheduler.schedule([*prompt(0), 5], request_id="again").worker == chosen


def test_without_a_limit_nobody_waits_for_a_place() -> None:
    scheduler, clock = scheduler_of(None, None)
    has_run(scheduler, clock, "w0")
    fill(scheduler, "w0", PLACES + 1)
    assert wait_of(scheduler, "w0") == 0.0


def test_before_any_has_ended_no_stay_is_known() -> None:
    scheduler, _ = scheduler_of(PLACES)
    fill(scheduler, "w0", PLACES + 1)
    assert wait_of(scheduler, "w0") == 0.0


def test_an_answer_that_is_not_streamed_says_nothing_of_a_stay() -> None:
    """It shows no first token, and its time has the queue in it."""
    scheduler, clock = scheduler_of(1)
    scheduler.schedule(prompt(0), request_id=0)
    clock.advance(30.0)
    scheduler.finish(0, output_tokens=50)
    fill(scheduler, "w0", 1, first=1)
    assert wait_of(scheduler, "w0") == 0.0


def test_far_too_many_count_as_a_quarter_of_a_stay() -> None:
    """Who waits there waits anywhere; what is computed twice to wait less makes all wait longer."""
    scheduler, clock = scheduler_of(PLACES)
    has_run(scheduler, clock, "w0")
    fill(scheduler, "w0", 5 * PLACES)
    assert wait_of(scheduler, "w0") == pytest.approx(0.25 * STAY_SECONDS, rel=0.01)
    for number in range(5 * PLACES):
        scheduler.finish(number)
    assert wait_of(scheduler, "w0") == 0.0
    scheduler.check()


def test_a_stay_is_of_late() -> None:
    """The last one says an eighth of it."""
    scheduler, clock = scheduler_of(1)
    has_run(scheduler, clock, "w0")
    scheduler.schedule(prompt(7), request_id=7)
    scheduler.first_token(7)
    clock.advance(3 * STAY_SECONDS)
    scheduler.finish(7, output_tokens=50)
    fill(scheduler, "w0", 1)
    assert wait_of(scheduler, "w0") == pytest.approx(0.25 * STAY_SECONDS * (1 + 2 / 8), rel=0.01)


def questions(documents: int, count: int, output_tokens: int, rps: float, seed: int) -> Workload:
    """Questions about documents of some 1,800 tokens."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(5, 30_000, int(1800 * rng.uniform(0.6, 1.4))).astype(np.int32) for _ in range(documents)]
    weights = 1.0 / np.arange(1, documents + 1)
    requests, at = [], 0.0
    for number in range(count):
        at += float(rng.exponential(1.0 / rps))
        document = int(rng.choice(documents, p=weights / weights.sum()))
        output = min(max(2, int(rng.geometric(1.0 / output_tokens))), 8 * output_tokens)
        own = rng.integers(5, 30_000, 25).astype(np.int32)
        parts = (texts[document], own)
        requests.append(PromptRequest(f"r{number}", parts, output, str(document), arrival_seconds=at))
    return Workload("questions", requests)


def test_simulated_workers_of_few_places_answer_sooner_where_these_are_known() -> None:
    """Decoding fills eight places of each worker, while little is left to prefill: hits are not worth a wait there."""

    def ttft(seed: int, places: int | None, policy: str = "e2") -> float:
        local = replace(engine_config(), max_running=8)
        workers = tuple(WorkerSpec(f"w{i}", local.kv_capacity_tokens, max_running=places) for i in range(4))
        config = SimConfig(workers, policy=policy, local=local, seed=seed)
        return simulate(questions(40, 600, 60, 14.0, seed), config).summary().mean_ttft_seconds

    seeds = range(3)
    known, unknown = (float(np.mean([ttft(seed, places) for seed in seeds])) for places in (8, None))
    assert known < 0.92 * unknown
    for policy in ("round_robin", "least_loaded"):
        assert known < 0.8 * float(np.mean([ttft(seed, 8, policy) for seed in seeds]))
