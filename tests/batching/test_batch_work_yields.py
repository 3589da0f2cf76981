"""Batch work at a worker yields: what others compute goes before its prefills, and while they prefill it decodes
nothing, but not for long."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from preble.clock import ManualClock
from preble.local import LocalConfig, LocalRequest, LocalScheduler
from preble.types import BATCH, Claim
from tests.models.local import PretendDevice, expected_output

BUDGET = 64
RESTS = 8  # iterations in a row
JOB = Claim("jobs", priority=BATCH)


class Worker:
    """A local scheduler with planned answers, and what each iteration computed."""

    def __init__(self, capacity: int = 4000, budget: int = BUDGET, **config: Any) -> None:
        self.scheduler = LocalScheduler(LocalConfig(capacity, token_budget=budget, **config), clock=ManualClock())
        self.firsts: list[str] = []
        self.ended: list[str] = []

    def add(self, name: str, tokens: int, output: int = 2, claim: Claim | None = None) -> None:
        prompt = np.full(tokens, 10 + len(self.scheduler._live), np.int32)
        planned = np.arange(output, dtype=np.int32) + 7
        self.scheduler.add(LocalRequest(name, prompt, output, planned_ids=planned, claim=claim))

    def step(self) -> tuple[dict[str, int], list[str]]:
        """One iteration: (tokens computed of each prompt, who decoded)."""
        batch = self.scheduler.next_batch()
        chunks = {live.request.request_id: live.scheduled for live in batch.prefills}
        decoded = [live.request.request_id for live in batch.lives[: batch.decode_count]]
        for out in self.scheduler.complete(batch, {}):
            self.firsts += [out.request_id] * (out.index == 0)
            self.ended += [out.request_id] * (out.finish_reason is not None)
        self.scheduler.check()
        return chunks, decoded

    def until(self, name: str) -> list[tuple[dict[str, int], list[str]]]:
        """Iterations until its first token."""
        steps = []
        while name not in self.firsts:
            steps.append(self.step())
        return steps


def test_who_waits_goes_before_the_next_chunk_of_batch_work() -> None:
    worker = Worker()
    worker.add("job", 1000, claim=JOB)
    assert worker.step() == ({"job": BUDGET}, [])
    worker.add("asks", 100)
    assert [chunks for chunks, _ in worker.until("asks")] == [{"asks": BUDGET}, {"asks": 36, "job": BUDGET - 36}]


def test_a_prefill_under_way_goes_before_one_of_batch_work_that_came_earlier() -> None:
    worker = Worker(short_first=False)
    worker.add("job", 500, claim=JOB)
    worker.step()
    worker.add("long", 300)
    assert all(chunks["long"] == min(BUDGET, 300 - BUDGET * at) for at, (chunks, _) in enumerate(worker.until("long")))
    worker.until("job")


def test_of_two_that_are_alike_the_earlier_goes_on() -> None:
    worker = Worker(short_first=False)
    worker.add("job", 500, claim=JOB)
    worker.step()
    worker.add("other job", 20, claim=JOB)
    assert worker.step() == ({"job": BUDGET}, [])


def test_batch_work_rests_while_others_prefill_but_not_for_long() -> None:
    worker = Worker()
    worker.add("job", 10, output=200, claim=JOB)
    worker.add("talks", 10, output=200)
    worker.step()
    worker.add("long", 63 * (2 * RESTS + 3))
    decoded = [names for _, names in worker.until("long")]
    rested = [at for at, names in enumerate(decoded) if "job" not in names]
    assert all("talks" in names for names in decoded)
    assert rested == [at for at in range(len(decoded)) if at and at % (RESTS + 1)]
    assert "job" in worker.step()[1]


def test_what_rests_gives_way_where_it_has_the_memory_that_others_lack() -> None:
    worker = Worker(capacity=200, short_first=False)
    worker.add("job", 90, output=60, claim=JOB)
    worker.step()
    worker.step()
    worker.add("asks", 100, output=2)
    while "asks" not in worker.ended or "job" not in worker.ended:
        chunks, decoded = worker.step()
        assert chunks or decoded


def test_what_was_preempted_leaves_its_memory_to_the_prefill_in_the_same_iteration() -> None:
    """The only one that decoded was batch work and the newest: without it the iteration was empty, and the engine's
    thread ended."""
    worker = Worker(capacity=83, budget=4, max_running=8)
    worker.add("asks", 80, output=1)
    worker.step()
    worker.add("job", 2, output=20, claim=JOB)
    while "asks" not in worker.ended or "job" not in worker.ended:
        chunks, decoded = worker.step()
        assert chunks or decoded
    assert worker.scheduler.stats()["preempted"] == 1


def test_who_goes_before_leaves_batch_work_the_memory_that_it_needs() -> None:
    worker = Worker(capacity=1130)
    worker.add("job", 1000, claim=JOB)
    worker.step()
    for number in range(8):
        worker.add(f"asks {number}", 30)
    worker.until("job")
    assert worker.scheduler.stats()["preempted"] == 0


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_comes_everybody_is_answered_and_rightly(seed: int, chunked: bool) -> None:
    rng = np.random.default_rng(seed)
    config = LocalConfig(
        int(rng.integers(30, 70)), token_budget=int(rng.choice([2, 5, 9, 16])), max_running=int(rng.choice([2, 4, 8])),
        short_first=bool(rng.integers(2)), chunked_prefill=chunked, max_wait_seconds=2.0,
    )  # fmt: skip
    clock, device = ManualClock(), PretendDevice()
    scheduler = LocalScheduler(config, clock=clock)
    prompts: dict[str, tuple[int, ...]] = {}
    answers: dict[str, list[int]] = {}

    def add(name: str) -> None:
        stem = [(1, 2, 3, 4, 5, 6), (1, 2, 9, 9, 9, 9, 9, 9, 9), (5, 5)][int(rng.integers(3))]
        prompts[name] = stem + tuple(int(token) for token in rng.integers(0, 4, int(rng.integers(0, 7))))
        claim = [None, JOB, Claim("other", priority=BATCH), Claim("asks")][int(rng.integers(4))]
        scheduler.add(LocalRequest(name, prompts[name], 6, claim=claim))
        answers[name] = []

    def run() -> None:
        batch = scheduler.next_batch()
        assert len(batch) or not prompts.keys() - done
        known = {name: (None, prompts[name] + tuple(tokens)) for name, tokens in answers.items() if name not in done}
        tokens = device.run(batch, known)
        if rng.random() < 0.1:
            scheduler.discard(batch)
        else:
            for out in scheduler.complete(batch, tokens):
                answers[out.request_id].append(out.token)
                if out.finish_reason is not None:
                    done.add(out.request_id)
        scheduler.check()
        clock.advance(0.1)

    done: set[str] = set()
    for number in range(60):
        if rng.random() < 0.6:
            add(f"r{number}")
        run()
    for _ in range(2000):
        if not prompts.keys() - done:
            break
        run()
    assert all(answers[name] == expected_output(prompt, 6, frozenset()) for name, prompt in prompts.items())
