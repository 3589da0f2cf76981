"""Iterations that only decode are computed many at once: every figure is, to the bit, what single ones give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble import CostModel, LocalConfig, ManualClock, sim
from preble._cost import steady_ends
from preble.errors import InvalidInput
from preble.local import LocalRequest, LocalScheduler
from preble.sim import worker as sim_worker
from preble.sim.results import Result
from preble.sim.timeline import Timeline
from preble.workloads import Workload
from tests.sim.test_simulation_machine import fleets, workloads
from tests.support.sim import asked, config, tokens, tools, workload

BENT = CostModel([(0, 0.0103), (7, 0.0117), (300, 0.31)], context=(50, 0, 0, 1.7e-6), pair=(9, 1e-7, 0, 3e-7, 2e-7))


def both(requests: Workload, fleet: sim.SimConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Result, Result]:
    """(as it is, one iteration after the other)."""
    quick = sim.Simulation(requests, fleet, None).run()
    with monkeypatch.context() as patch:
        patch.setattr(sim_worker, "STRETCH_MIN", 1 << 60)
        return quick, sim.Simulation(requests, fleet, None).run()


def assert_same(one: Result, other: Result) -> None:
    for name in ("arrival_seconds", "first_token_seconds", "finish_seconds", "busy_seconds"):
        assert np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True), name
    assert one.trace_hash == other.trace_hash
    assert one.counts == other.counts
    assert repr(one.scheduler_stats) == repr(other.scheduler_stats)


@settings(max_examples=25)
@given(workloads(), fleets())
def test_whatever_happens_the_run_is_the_same(requests: Workload, fleet: sim.SimConfig) -> None:
    with pytest.MonkeyPatch.context() as patch:
        assert_same(*both(requests, fleet, patch))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"local": {"chunked_prefill": False, "decodes_per_look": 3}},
        {"local": {"kv_capacity_tokens": 900, "eviction": "lru"}},
        {"local": {"max_running": 4}, "event_delay_seconds": 0.01, "network_seconds": 0.003},
        {"faults": (sim.WorkerSlowdown(1.0, "w0", 2.5), sim.WorkerDeath(1.5, "w1", 0.3), sim.WorkerDrain(2.0, "w2"))},
        {"until_seconds": 2.3},
        {"routers": 3, "step_seconds": 0.002, "step_seconds_per_request": 0.0003},
    ],
    ids=["plain", "whole prompts", "small cache", "few places", "faults", "broken off", "routers"],
)
def test_a_fleet_does_the_same(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = config(**{"workers": 3, "cost_model": BENT, **more})
    quick, slow = both(tools(120, rps=40.0), fleet, monkeypatch)
    assert_same(quick, slow)
    assert np.isfinite(slow.finish_seconds).sum() > 20


def test_workers_in_step_with_each_other_end_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal work from the same moment on: what is first among simultaneous ends decides what follows."""
    requests = [asked(f"r{i}", 0.0, tokens(64, 1000 * i), out=20 + i // 4) for i in range(8)]
    requests += [asked(f"s{i}", 0.0, 30, out=12, after=f"r{i}", pause_seconds=0.011) for i in range(8)]
    assert_same(*both(workload(*requests), config(workers=4, policy="round_robin"), monkeypatch))


def test_few_events_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request of 400 tokens once was 400 events."""
    happened = []
    at = Timeline.at
    monkeypatch.setattr(Timeline, "at", lambda self, *rest: happened.append(rest[1]) or at(self, *rest))
    result = sim.simulate(workload(asked("a", 0.0, 50, out=400)), config())
    assert result.counts["iterations"] == 400
    assert len([one for one in happened if "SimWorker" in one.__qualname__]) < 20


def local(**more: Any) -> LocalScheduler:
    found = LocalScheduler(LocalConfig(**{"kv_capacity_tokens": 500, **more}), clock=ManualClock())
    for number in range(3):
        planned = tokens(20 + number, 5000 * (number + 1))
        found.add(LocalRequest(f"r{number}", tokens(30 + number, 700 * number), len(planned), planned_ids=planned))
    while not found.steady_steps():
        found.complete(found.next_batch(), {})
    return found


@given(st.integers(0, 18), st.booleans())
def test_steps_at_once_are_steps_one_by_one(steps: int, chunked: bool) -> None:
    one, other = (local(chunked_prefill=chunked, decodes_per_look=4) for _ in range(2))
    steps = min(steps, one.steady_steps())
    one.run_steady(steps)
    for _ in range(steps):
        batch = other.next_batch()
        assert not batch.prefills
        other.complete(batch, {})
    one.check()
    for found in (one, other):
        while found.output_counts():
            found.complete(found.next_batch(), {})
    assert one.stats() == other.stats() and one.show() == other.show()


def test_what_is_alike_ends_before_anything_can_happen() -> None:
    scheduler = local()
    assert scheduler.steady_steps() == min(
        20 + n - count - 1 for n, count in enumerate(scheduler.output_counts().values())
    )
    scheduler.add(LocalRequest("late", tokens(9, 9000), 4, planned_ids=tokens(4)))
    assert scheduler.steady_steps() == 0, "it can be admitted"
    full = local(max_running=3)
    full.add(LocalRequest("late", tokens(9, 9000), 4, planned_ids=tokens(4)))
    assert full.steady_steps() > 0, "there is no place for it"
    with pytest.raises(AssertionError):
        full.run_steady(full.steady_steps() + 1)
    tight = local(kv_capacity_tokens=120)
    assert tight.steady_steps() <= 27 // 3, "memory ends first"
    batch = full.next_batch()
    assert full.steady_steps() == 0, "a batch is in flight"
    full.discard(batch)
    sampled = LocalScheduler(LocalConfig(500), clock=ManualClock())
    sampled.add(LocalRequest("a", tokens(9), 4))
    sampled.complete(sampled.next_batch(), {"a": 1})
    assert sampled.steady_steps() == 0, "any token may be its last"


@given(st.lists(st.integers(1, 5000), max_size=8), st.integers(0, 20))
def test_seconds_of_many_iterations_are_those_of_each(contexts: list[int], steps: int) -> None:
    found = steady_ends(BENT, contexts, steps, 3.7, 0.0011, 1.3)
    end = 3.7
    for step in range(steps):
        end += (BENT.iteration_time((), [one + step for one in contexts]) + 0.0011) * 1.3
        assert found[step] == end
    assert len(found) == steps
    with pytest.raises(InvalidInput, match="contexts"):
        steady_ends(BENT, [-1], 1, 0.0, 0.0, 1.0)


def test_an_event_may_be_cancelled_and_have_the_place_of_an_earlier_one() -> None:
    clock, seen = ManualClock(), list[tuple[float, str]]()
    timeline = Timeline(clock)

    def note(subject: str) -> None:
        seen.append((clock(), subject))
        if subject == "first":
            timeline.cancel(last)
            timeline.at(3.0, note, "planned late")
            timeline.at(3.0, note, "as if planned at 0.5", (0.5, number))

    number = timeline.take_number()
    timeline.at(1.0, note, "first")
    timeline.at(3.0, note, "planned at once")
    last = timeline.at(9.0, note, "cancelled")
    timeline.run(10.0)
    assert [subject for _, subject in seen] == ["first", "planned at once", "as if planned at 0.5", "planned late"]
    assert clock() == 3.0, "what is cancelled moves no clock"
    timeline.pass_by(2.0)
    assert timeline.now == 3.0
    timeline.pass_by(4.0)
    assert timeline.now == clock() == 4.0
