"""Requests that cannot make their deadline any more, in a worker's queue: they are put last, and go all the same."""

from __future__ import annotations

import numpy as np
import pytest

from preble import LocalConfig, LocalRequest, LocalScheduler
from preble.types import Claim

STEP = 1.0  # second an iteration


class Worker:
    """A local scheduler and a clock that its iterations move."""

    def __init__(self, **config):
        self.scheduler = LocalScheduler(LocalConfig(5_000, **{"token_budget": 100, **config}), clock=lambda: self.now)
        self.now = 10.0
        self.first = []  # ids in the order of their first tokens
        self.number = 0

    def add(self, name, tokens=50, deadline=None, tenant=""):
        self.number += 1
        claim = None if deadline is None and not tenant else Claim(tenant, deadline_seconds=deadline)
        self.scheduler.add(LocalRequest(name, np.full(tokens, self.number, np.int32), 1, claim=claim))

    def step(self):
        batch = self.scheduler.next_batch()
        self.now += STEP
        done = self.scheduler.complete(batch, {item.request_id: 7 for item in batch.items if item.samples})
        self.first += [output.request_id for output in done if output.index == 0]
        self.scheduler.check()

    def serve(self):
        while self.scheduler.load().running or self.scheduler.load().waiting:
            self.step()


def warm(**config):
    """One whose iterations are known to take a second."""
    worker = Worker(**config)
    worker.add("before")
    worker.step()
    worker.first.clear()
    return worker


@pytest.mark.parametrize("order", ["priority", "fcfs", "longest_prefix"])
def test_what_would_come_too_late_goes_after_those_that_need_not(order):
    worker = warm(order=order)
    worker.add("late", deadline=0.5)
    worker.add("timely", tokens=100, deadline=5.0)
    worker.add("patient", tokens=100)
    worker.serve()
    assert worker.first[-1] == "late" and worker.scheduler.stats()["too_late"] == 1


def test_a_long_prompt_is_late_where_a_short_one_is_not():
    worker = warm()
    worker.add("long", tokens=350, deadline=3.5)  # four iterations
    worker.add("short", tokens=90, deadline=3.5)
    worker.add("other", tokens=90)
    worker.serve()
    assert worker.first == ["short", "other", "long"]


def test_nobody_is_late_while_no_iteration_is_known_or_where_nobody_named_a_deadline():
    worker = Worker()
    worker.add("first", tokens=100, deadline=1e-3)
    worker.add("second", tokens=100)
    worker.serve()
    assert worker.first == ["first", "second"] and worker.scheduler.stats()["too_late"] == 0


def test_a_late_request_may_be_cancelled():
    worker = warm()
    worker.add("late", deadline=0.5)
    worker.add("other", tokens=100)
    worker.step()
    assert worker.scheduler.cancel("late")
    worker.serve()
    assert worker.first == ["other"]


def test_a_late_request_does_not_starve():
    worker = warm(max_wait_seconds=5.0)
    worker.add("late", deadline=0.5)
    for number in range(40):
        worker.add(f"r{number}", tokens=100)
        worker.add(f"s{number}", tokens=100)
        worker.step()
    assert "late" in worker.first and worker.scheduler.load().waiting > 30
    assert worker.scheduler.stats()["oldest_arrival_seconds"] is not None


def test_of_two_deadlines_that_cannot_both_be_kept_the_one_that_costs_little_is():
    worker = warm(order="fcfs", token_budget=500)
    worker.add("running", tokens=500)
    worker.step()
    worker.add("long", tokens=1000, deadline=2.5)  # alone it would be in time
    worker.add("short", tokens=400, deadline=2.6)
    worker.serve()
    assert worker.first == ["running", "short", "long"] and worker.scheduler.stats()["too_late"] == 1
