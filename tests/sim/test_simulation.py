"""The simulator on runs that can be calculated by hand, its closed loop, its bounds and its reproducibility.

Faults are in `test_faults.py`, chance in `test_simulation_machine.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from preble import CostModel, ManualClock, SchedulerConfig, WorkerSpec, sim
from preble.errors import DuplicateWorker, InvalidConfig, InvalidInput, InvalidTime
from preble.policies.base import POLICIES
from preble.sim.results import CUT_OFF, FINISHED, REFUSED, UNFINISHED
from preble.sim.timeline import Timeline
from preble.workloads import generate, poisson
from tests.support.sim import PLAIN, asked, config, run, tokens, tools, workload

SHARED = tokens(40)
# Two requests that share 40 tokens: of A 100 tokens and 3 of output at 0 s, of B 60 tokens and 2 of output at 50 ms.
PAIR = [asked("a", 0.0, SHARED, 60, out=3), asked("b", 0.05, SHARED, 20, out=2)]

# The trace hash of `tools(40)` on three workers with E2. It changes when the simulator, the local or the global
# scheduler decide otherwise than before. If that was meant, run the test and put the new one here, in the commit that
# changes the behaviour, and say there why; if it was not meant, something is no longer reproducible.
GOLDEN = "104ec9224cc60768"


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_two_requests_on_one_worker_take_what_the_cost_model_says() -> None:
    result, _ = run(PAIR, config())
    # 0.000  A's 100 tokens: 10 ms + 100 ms. B comes meanwhile and waits.
    # 0.110  A's second token and B's 20 tokens that are not cached: 10 ms + 21 ms.
    # 0.141  A's third and B's second token: 10 ms + 2 ms.
    # 0.153  Both have ended.
    assert result.first_token_seconds == pytest.approx([0.110, 0.141], abs=1e-12)
    assert result.finish_seconds == pytest.approx([0.153, 0.153], abs=1e-12)
    assert result.arrival_seconds.tolist() == [0.0, 0.05]
    assert result.cached_tokens.tolist() == [0, 40]
    assert result.placed_tokens.tolist() == [0, 40]
    assert result.busy_seconds == pytest.approx([0.153])
    assert result.counts["iterations"] == 3


def test_the_summary_of_two_requests() -> None:
    result, _ = run(PAIR, config())
    found = result.summary()
    assert (found.requests, found.finished, found.refused, found.cut_off, found.unfinished) == (2, 2, 0, 0, 0)
    assert found.mean_ttft_seconds == pytest.approx((0.110 + 0.091) / 2)
    assert found.mean_latency_seconds == pytest.approx((0.153 + 0.103) / 2)
    assert found.p50_latency_seconds == pytest.approx((0.153 + 0.103) / 2)
    assert found.max_ttft_seconds == pytest.approx(0.110)
    assert found.p99_latency_seconds == pytest.approx(0.103 + 0.99 * 0.05)
    assert found.mean_tpot_seconds == pytest.approx(((0.153 - 0.110) / 2 + (0.153 - 0.141)) / 2)
    assert found.mean_normalised_seconds == pytest.approx((0.153 / 3 + 0.103 / 2) / 2)
    assert found.hit_fraction == pytest.approx(40 / 160)
    assert found.load_spread == pytest.approx(1.0)
    assert found.busy_fraction == pytest.approx(1.0)
    assert found.makespan_seconds == pytest.approx(0.153)
    assert [result.goodput(slo) for slo in (0.09, 0.10, 0.12)] == [0.0, 0.5, 1.0]
    late = result.summary(warmup_seconds=0.05)
    assert (late.requests, late.mean_ttft_seconds) == (1, pytest.approx(0.091))
    assert result.goodput(0.1, warmup_seconds=0.01) == 1.0


def test_two_workers_share_the_work() -> None:
    result, _ = run(PAIR, config(workers=2, policy="round_robin"))
    a, b = 0.110 + 2 * 0.011, 0.070 + 0.011  # nothing is cached for B on its worker
    assert result.finish_seconds == pytest.approx([a, 0.05 + b])
    assert result.worker.tolist() == [0, 1]
    assert result.workers == ("w0", "w1")
    found = result.summary()
    assert found.load_spread == pytest.approx(a / ((a + b) / 2))
    assert found.busy_fraction == pytest.approx((a + b) / 2 / a)
    assert found.hit_fraction == 0.0


def test_contexts_reach_the_cost_model() -> None:
    model = CostModel.preset("mistral-7b/a6000")
    result, _ = run([PAIR[0], PAIR[1].at(0.01)], config(cost_model="mistral-7b/a6000"))
    first = model.iteration_time([(100, 100)])
    assert first > 0.01  # or B would come later than this test thinks
    second = first + model.iteration_time([(20, 60)], [101])
    third = second + model.iteration_time([], [102, 61])
    assert result.first_token_seconds == pytest.approx([first, second])
    assert result.finish_seconds == pytest.approx([third, third])


def test_a_long_prompt_is_computed_in_chunks() -> None:
    result, _ = run([asked("a", 0.0, 250, out=2)], config(local={"token_budget": 100}))
    assert result.first_token_seconds == pytest.approx([2 * 0.110 + 0.060])
    assert result.finish_seconds == pytest.approx([2 * 0.110 + 0.060 + 0.011])


def test_network_and_step_delays() -> None:
    result, _ = run(PAIR, config(network_seconds=0.5, step_seconds=0.002))
    assert result.first_token_seconds == pytest.approx([0.5 + 0.112, 0.5 + 0.112 + 0.033])
    assert result.finish_seconds == pytest.approx([0.5 + 0.112 + 0.033 + 0.014] * 2)
    assert result.busy_seconds == pytest.approx([0.112 + 0.033 + 0.014])


def test_what_an_iteration_takes_for_each_request() -> None:
    result, _ = run(PAIR, config(step_seconds=0.002, step_seconds_per_request=0.0005))
    ends = np.cumsum([0.110 + 0.0025, 0.031 + 0.003, 0.012 + 0.003])  # one request, then two, and two
    assert result.first_token_seconds == pytest.approx(ends[:2])
    assert result.finish_seconds == pytest.approx([ends[2], ends[2]])


def test_workers_of_different_kinds() -> None:
    slow = CostModel([(0, 0.020), (1000, 2.020)])
    workers = (WorkerSpec("fast", cost_model=PLAIN), WorkerSpec("slow", kv_capacity_tokens=80, cost_model=slow))
    requests = [asked("a", 0.0, 70, out=1), asked("b", 0.0, 70, out=1), asked("c", 0.0, 90), asked("d", 0.0, 90)]
    result, simulation = run(requests, config(workers=workers, policy="round_robin", cost_model="mistral-7b/a100"))
    assert result.first_token_seconds[:2] == pytest.approx([0.080, 0.160])
    assert result.outcome.tolist() == [FINISHED, FINISHED, FINISHED, REFUSED]  # the slow one has no room for 90
    assert simulation.workers[1].engine.info.kv_capacity_tokens == 80


def test_work_that_takes_no_time_is_done() -> None:
    """A worker took an iteration of 0 s for one with nothing in it, and stood still for ever."""
    result, _ = run(PAIR, config(cost_model=CostModel([(0, 0.0), (10, 0.0)])))
    assert result.finish_seconds.tolist() == [0.0, 0.05]
    assert result.counts["iterations"] == 5


def test_max_running_of_a_worker() -> None:
    requests = [asked(f"r{i}", 0.0, 10, out=5) for i in range(4)]
    result, simulation = run(requests, config(workers=(WorkerSpec("w", max_running=2),)))
    assert simulation.workers[0].engine.info.max_running == 2
    assert result.first_token_seconds[2] >= result.finish_seconds[0]


# --- closed loops -----------------------------------------------------------------------------------------------------


def test_a_successor_is_sent_when_its_turn_has_come() -> None:
    requests = [
        asked("a", 0.0, 100, out=1),
        asked("b", 0.0, 50, out=1, after="a", pause_seconds=0.25),
        asked("c", 9.0, 50, out=1, after="a"),
    ]
    result, _ = run(requests, config())
    assert result.arrival_seconds == pytest.approx([0.0, 0.110 + 0.25, 9.0])
    assert result.finish_seconds == pytest.approx([0.110, 0.360 + 0.060, 9.060])


def test_successors_of_a_refused_request_are_cut_off_and_counted() -> None:
    requests = [
        asked("long", 0.5, 101, out=1),
        asked("next", 0.0, 10, after="long"),
        asked("last", 0.0, 10, after="next"),
        asked("other", 0.7, 10),
    ]
    result, _ = run(requests, config(local={"kv_capacity_tokens": 100}))
    assert result.outcome.tolist() == [REFUSED, CUT_OFF, CUT_OFF, FINISHED]
    assert result.arrival_seconds.tolist() == [0.5, 0.5, 0.5, 0.7]
    assert np.isnan(result.latency_seconds[:3]).all()
    found = result.summary()
    assert (found.requests, found.finished, found.refused, found.cut_off, found.unfinished) == (4, 1, 1, 2, 0)
    assert result.goodput(math.inf) == 0.25
    assert result.summary(warmup_seconds=0.6).refused == 0


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ([], "no requests"),
        ([asked("a", 0.0, 1), asked("a", 1.0, 1)], "more than once"),
        ([asked("a", 0.0, 1, after="b")], "'b', which is not there"),
        ([asked("a", 0.0, 1, after="a")], "'a' among them"),
        ([asked("a", 0.0, 1, after="b"), asked("b", 0.0, 1, after="a"), asked("c", 0.0, 1)], "2 requests wait"),
        ([asked("a", 0.0, 1, out=3, output_ids=tokens(2))], "2 output_ids"),
    ],
)
def test_workloads_that_cannot_be_run(requests: list, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        sim.simulate(workload(*requests), config())


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_is_counted() -> None:
    requests = [asked(f"r{i}", 0.001 * i, 100, out=1) for i in range(6)]
    result, _ = run(requests, config(local={"max_running": 1, "max_waiting": 2}))
    assert result.outcome.tolist() == [FINISHED] * 3 + [REFUSED] * 3
    assert result.summary().refused == 3
    assert result.worker.tolist() == [0] * 6


def test_a_full_scheduler_refuses_and_is_counted() -> None:
    requests = [asked(f"r{i}", 0.001 * i, 100, out=1) for i in range(4)]
    result, _ = run(requests, config(scheduler=SchedulerConfig(live_requests_max=2)))
    assert result.outcome.tolist() == [FINISHED] * 2 + [REFUSED] * 2
    assert result.worker.tolist() == [0, 0, -1, -1]


def test_an_answer_without_room_ends_early_and_is_counted() -> None:
    result, _ = run([asked("a", 0.0, 90, out=50)], config(local={"kv_capacity_tokens": 100}))
    assert result.outcome.tolist() == [FINISHED]
    assert result.output_tokens.tolist() == [11]
    assert result.counts["truncated"] == 1
    assert result.summary().mean_tpot_seconds == pytest.approx(0.011)


def test_until_breaks_the_run_off() -> None:
    requests = [*PAIR, asked("late", 7.0, 10), asked("never", 0.0, 10, after="late")]
    result, simulation = run(requests, config(until_seconds=0.12))
    assert result.outcome.tolist() == [UNFINISHED] * 4
    assert result.first_token_seconds[0] == pytest.approx(0.110)
    assert result.output_tokens.tolist() == [1, 0, 0, 0]
    assert np.isnan(result.arrival_seconds[2:]).all()
    assert result.busy_seconds == pytest.approx([0.12])  # not the end of the iteration that runs
    assert simulation.scheduler.stats()["live_requests"] == 2
    assert (result.summary().requests, result.summary().unfinished) == (2, 2)


def test_a_first_token_without_an_end_is_no_good_answer() -> None:
    """Goodput counted requests whose first token came and whose end did not."""
    result, _ = run(PAIR, config(until_seconds=0.12))
    assert result.ttft_seconds[0] < 1.0
    assert result.goodput(1.0) == 0.0


def test_an_expired_lease_changes_the_bookings_only() -> None:
    requests = [asked("a", 0.0, 100, out=400)]
    result, simulation = run(requests, config(scheduler=SchedulerConfig(lease_seconds=1.0)))
    assert result.output_tokens.tolist() == [400]
    found = simulation.scheduler.stats()
    assert (found["expired_leases"], found["late_calls"]) == (1, 1)


def test_nothing_measured_is_an_error() -> None:
    result, _ = run(PAIR, config())
    for question in (lambda: result.summary(1.0), lambda: result.goodput(1.0, 1.0)):
        with pytest.raises(InvalidInput, match="warmup_seconds"):
            question()


def test_a_run_in_which_nothing_finishes_has_a_summary() -> None:
    result, _ = run([asked("a", 0.0, 200)], config(local={"kv_capacity_tokens": 100}))
    found = result.summary()
    assert (found.finished, found.refused, found.makespan_seconds) == (0, 1, 0.0)
    assert math.isnan(found.mean_latency_seconds)


# --- events, late and lost --------------------------------------------------------------------------------------------


# A's prompt is evicted, but for 51 tokens, as B's output grows; C and D ask for 180 tokens of it again.
EVICTED = [
    asked("a", 0.0, tokens(180), 20, out=1),
    asked("b", 1.0, 50, out=200),
    asked("c", 6.0, tokens(180), 30, out=1),
    asked("d", 8.0, tokens(180), 40, out=1),
]


@pytest.mark.parametrize(
    ("chance", "estimated"),
    [
        ({}, 51),
        ({"event_delay_seconds": 0.5}, 51),  # reported in time
        ({"event_delay_seconds": 6.5}, 180),  # too late for C
        ({"event_loss": 1.0}, 180),  # never; C's own first token reports how little there was
    ],
)
def test_evictions_unreported_of_make_the_scheduler_expect_too_much(chance: dict[str, float], estimated: int) -> None:
    result, _ = run(EVICTED, config(local={"kv_capacity_tokens": 300}, **chance))
    assert result.cached_tokens.tolist() == [0, 0, 51, 180]
    assert result.placed_tokens.tolist() == [0, 0, estimated, 180]
    batches, lost = result.counts["event_batches"], result.counts["lost_event_batches"]
    assert batches > 100
    assert lost == (batches if "event_loss" in chance else 0)


def crowded(**more: object) -> sim.SimConfig:
    """Two workers whose caches hold a part of the prefixes, so that evictions must be reported."""
    return config(workers=2, local={"kv_capacity_tokens": 900}, **more)


def test_a_share_of_the_events_is_lost() -> None:
    some, simulation = run(tools(150, groups=12), crowded(event_loss=0.5))
    lost = some.counts["lost_event_batches"]
    assert 0.4 < lost / some.counts["event_batches"] < 0.6
    assert simulation.scheduler.stats()["events"] >= some.counts["event_batches"] - lost


def test_delayed_events_arrive() -> None:
    requests = tools(150, groups=12)
    late, simulation = run(requests, crowded(event_delay_seconds=1.5))
    assert simulation.scheduler.stats()["events"] > 20
    assert late.trace_hash != run(requests, crowded())[0].trace_hash
    assert simulation.scheduler.stats()["late_calls"] == 0


def test_a_delay_is_that_long() -> None:
    """B comes after A has ended; where the scheduler does not know that yet, it avoids A's worker."""
    requests = [asked("a", 0.0, 100, out=1), asked("b", 0.5, 100, out=1)]
    for delay, workers in ((0.3, [0, 0]), (0.5, [0, 1])):
        result, _ = run(requests, config(workers=2, policy="least_loaded", event_delay_seconds=delay))
        assert result.worker.tolist() == workers


# --- the same again ---------------------------------------------------------------------------------------------------


def golden() -> sim.Result:
    """The run of which `GOLDEN` is the trace hash."""
    death = sim.WorkerDeath(1.0, "w1", noticed_after_seconds=0.5)
    more = {"event_loss": 0.3, "event_delay_seconds": 0.01, "network_seconds": 0.002, "faults": (death,)}
    return sim.simulate(tools(40), config(workers=3, local={"kv_capacity_tokens": 1200}, **more))


def test_the_golden_run() -> None:
    assert golden().trace_hash == GOLDEN


def test_the_same_run_in_processes_that_hash_differently(run_python: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from tests.sim import test_simulation; print(test_simulation.golden().trace_hash)"
    found = []
    for seed in ("1", "4242"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        result = run_python("-c", code)
        assert result.returncode == 0, result.stderr
        found.append(result.stdout.strip())
    assert found == [GOLDEN] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_runs_and_runs_alike_again(policy: str) -> None:
    requests = poisson(generate("toolbench", requests=60, groups=8, seed=3), rps=12.0, seed=4)
    settings = sim.SimConfig(workers=3, policy=policy)
    first, _ = run(requests, settings)
    assert (first.outcome == FINISHED).all()
    assert first.scheduler_stats["policy"] == policy
    # All prompts begin alike, and only these rules follow that: "dualmap" to the warmer one of two.
    used = {"longest_prefix": 1, "e2-paper:printed": 1, "dualmap": 2}
    assert len(set(first.worker.tolist())) == used.get(policy, 3)
    assert run(requests, settings)[0].trace_hash == first.trace_hash


def test_the_seed_matters_where_there_is_chance() -> None:
    runs = [run(tools(40), config(workers=3, policy="random", seed=seed))[0] for seed in (0, 1)]
    assert runs[0].trace_hash != runs[1].trace_hash


def test_the_hash_sees_every_column() -> None:
    result = golden()
    seen = {result.trace_hash}
    for name in ("arrival_seconds", "first_token_seconds", "finish_seconds", "outcome", "worker", "output_tokens",
                 "prompt_tokens", "placed_tokens", "cached_tokens", "busy_seconds"):  # fmt: skip
        column = getattr(result, name).copy()
        column[1] += 1
        seen.add(replace(result, **{name: column}).trace_hash)
    assert len(seen) == 11


def test_progress_is_reported_about_once_a_second_and_at_the_end() -> None:
    seen: list[tuple[int, int, float]] = []
    result = sim.simulate(tools(60), config(), progress=lambda *told: seen.append(told))
    assert seen[-1][:2] == (60, 60)
    assert [told[2] for told in seen[:-1]] == [float(second) for second in range(1, len(seen))]
    assert seen[-1][2] >= result.finish_seconds.max()
    assert [told[0] for told in seen] == sorted(told[0] for told in seen)


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("workers", bad) for bad in (0, -1, True, 1.5, "w", (), ("w0",), (WorkerSpec("a", cost_model=3),))),
        *(("seed", bad) for bad in (-1, 1.0, None)),
        *(("step_seconds", bad) for bad in (-1.0, math.nan, math.inf, "1", None, True)),
        *(("step_seconds_per_request", bad) for bad in (-1e-9, math.nan)),
        *(("network_seconds", bad) for bad in (-1e-9, math.nan, math.inf)),
        *(("event_delay_seconds", bad) for bad in (-1e-9, math.nan, math.inf)),
        *(("event_loss", bad) for bad in (-0.1, 1.1, math.nan, "much")),
        *(("until_seconds", bad) for bad in (0.0, -1.0, math.nan, -math.inf, "soon")),
        *(("local", bad) for bad in (None, {})),
        *(("scheduler", bad) for bad in (None, {})),
        *(("cost_model", bad) for bad in ("no such preset", 3)),
    ],
)
def test_wrong_settings_are_named(field: str, value: object) -> None:
    with pytest.raises(InvalidConfig) as error:
        sim.SimConfig(**{field: value})
    assert any(word in str(error.value) for word in (field, "preset", "cost_model"))


def test_a_wrong_policy_and_a_name_twice() -> None:
    with pytest.raises(InvalidConfig, match="policy"):
        sim.simulate(workload(*PAIR), config(policy="no such policy"))
    with pytest.raises(DuplicateWorker, match="twice"):
        config(workers=(WorkerSpec("a"), WorkerSpec("a")))


# --- the timeline -----------------------------------------------------------------------------------------------------


def test_events_happen_in_order_of_time_and_of_planning() -> None:
    clock, seen = ManualClock(), list[tuple[float, str]]()
    timeline = Timeline(clock)

    def note(subject: str) -> None:
        seen.append((clock(), subject))
        if subject == "b":
            timeline.at(timeline.now, note, "again")
            timeline.at(5.0, note, "at the bound")
            timeline.at(5.1, note, "beyond it")

    for seconds, subject in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")):
        timeline.at(seconds, note, subject)
    timeline.run(5.0)
    assert seen == [(1.0, "a"), (1.0, "b"), (1.0, "again"), (2.0, "c"), (2.0, "d"), (5.0, "at the bound")]
    assert len(timeline._planned) == 1
    for bad in (4.9, math.nan, math.inf, -math.inf):
        with pytest.raises(InvalidTime):
            timeline.at(bad, note)
    assert len(timeline._planned) == 1
