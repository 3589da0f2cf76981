"""The scaling advice: known cases of its queue, what must hold for any load, what it reads off a scheduler's bookings,
and in the simulator whether it comes true. Over a range of loads: docs/experiments/fleet.md."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preble import CostModel, GlobalScheduler, ManualClock, SchedulerConfig, sim, workloads
from preble.errors import InvalidInput
from preble.scheduling.autoscaling import (
    CANDIDATES,
    VARIABILITY_MAX,
    VARIABILITY_MIN,
    WORKERS_MAX,
    Drain,
    FleetLoad,
    advise,
    desired_workers,
    measured_ttft_seconds,
    own_seconds,
    ttft_seconds,
    utilisation,
    variability_of,
    wait_seconds,
)
from tests.support.sim import PLAIN

LOADS = st.builds(
    FleetLoad,
    workers=st.integers(1, 64),
    requests_per_second=st.floats(0.01, 1e4),
    prefill_load=st.floats(1e-3, 100.0),
    decode_load=st.floats(0.0, 100.0),
    waiting_requests=st.floats(0.0, 1e4),
    observed_seconds=st.just(180.0),
)


def queue(workers: int, prefill_load: float, **more: Any) -> FleetLoad:
    """A load of 10 requests a second, without decodes unless reported."""
    return FleetLoad(workers, requests_per_second=10.0, prefill_load=prefill_load, observed_seconds=180.0, **more)


# --- the model --------------------------------------------------------------------------------------------------------


def test_a_long_window_gives_pollaczek_and_khinchine() -> None:
    load = queue(1, 0.8, window_seconds=1e9)  # service 0.08 s, so M/M/1 waits 0.8 * 0.08 / 0.2 and M/D/1 half of it
    assert wait_seconds(load, 1, 1.0) == pytest.approx(0.32)
    assert wait_seconds(load, 1, 0.5) == pytest.approx(0.16)
    assert ttft_seconds(load, 1, 1.0) == pytest.approx(0.40)


def test_an_iteration_under_way_is_waited_for_whatever_the_number_of_workers() -> None:
    load = queue(2, 0.4, step_seconds=0.5, waiting_requests=5.4)  # 0.54 s, of which 0.04 s are its own prefill
    assert variability_of(load) == VARIABILITY_MIN
    assert advise(load).one_more_saves_seconds < 0.01


def test_an_overloaded_queue_grows_for_the_window() -> None:
    load = queue(1, 1.5, window_seconds=1e6)  # half a second of work too much every second
    assert wait_seconds(load, 1, 1.0) == pytest.approx(1e6 * 0.5 / 2.0, rel=1e-3)


def test_decodes_slow_prefills_and_take_their_time() -> None:
    load = queue(2, 0.4, decode_load=1.0)
    assert own_seconds(load, 2) == pytest.approx(0.04 / 0.5)
    assert utilisation(load, 2) == pytest.approx(0.7)


def test_the_mean_time_to_first_token_is_littles() -> None:
    assert measured_ttft_seconds(queue(1, 0.5, waiting_requests=3.0)) == pytest.approx(0.3)
    assert measured_ttft_seconds(FleetLoad(3)) == 0.0


def test_no_load_needs_one_worker_and_gains_nothing() -> None:
    advice = advise(FleetLoad(3, observed_seconds=180.0))
    assert advice.desired_workers == 1
    assert advice.utilisation == advice.one_more_saves_seconds == advice.one_less_costs_seconds == 0.0


def test_without_workers_there_is_advice_too() -> None:
    advice = advise(FleetLoad(0))
    assert advice.desired_workers == 1 and advice.ttft_with_one_less_seconds is None


@pytest.mark.parametrize(
    ("load", "target", "workers"), [(0.69, 0.7, 1), (0.71, 0.7, 2), (7.0, 0.7, 10), (7.1, 0.7, 11), (3.0, 1.0, 3)]
)
def test_desired_workers_meet_the_target_utilisation(load: float, target: float, workers: int) -> None:
    assert desired_workers(queue(4, load), target_utilisation=target) == workers


def test_desired_workers_meet_the_target_time() -> None:
    load = queue(4, 3.0, waiting_requests=12.0)
    by_time = desired_workers(load, target_utilisation=1.0, target_ttft_seconds=0.4)
    known = variability_of(load)
    assert ttft_seconds(load, by_time, known) <= 0.4 < ttft_seconds(load, by_time - 1, known)
    hopeless = desired_workers(load, target_ttft_seconds=0.299)  # a request's own prefill takes 0.3 s
    assert hopeless == WORKERS_MAX


@pytest.mark.parametrize(
    "targets",
    [
        {"target_utilisation": 0.0},
        {"target_utilisation": 1.01},
        {"target_utilisation": math.nan},
        {"target_ttft_seconds": 0.0},
        {"target_ttft_seconds": math.nan},
    ],
)
def test_targets_that_are_none_are_refused_by_name(targets: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(targets))):
        desired_workers(queue(1, 0.5), **targets)


@given(LOADS, st.integers(1, 100))
def test_a_worker_more_never_makes_it_slower(load: FleetLoad, workers: int) -> None:
    known = variability_of(load)
    assert VARIABILITY_MIN <= known <= VARIABILITY_MAX
    more, here = ttft_seconds(load, workers + 1, known), ttft_seconds(load, workers, known)
    assert 0.0 <= more <= here * (1 + 1e-9) < math.inf
    assert own_seconds(load, workers) <= here


@given(LOADS, st.floats(1.0, 10.0))
def test_more_work_never_asks_for_fewer_workers(load: FleetLoad, times: float) -> None:
    heavier = replace(load, prefill_load=load.prefill_load * times, decode_load=load.decode_load * times)
    assert desired_workers(heavier) >= desired_workers(load)


@given(LOADS, st.floats(0.05, 1.0))
def test_desired_workers_are_the_fewest(load: FleetLoad, target: float) -> None:
    found = desired_workers(load, target_utilisation=target)
    assert found == WORKERS_MAX or utilisation(load, found) <= target
    assert found == 1 or utilisation(load, found - 1) > target


@given(LOADS)
def test_the_formula_gives_the_wait_it_was_fitted_to(load: FleetLoad) -> None:
    known = variability_of(load)
    if VARIABILITY_MIN < known < VARIABILITY_MAX:
        assert ttft_seconds(load, load.workers, known) == pytest.approx(measured_ttft_seconds(load), rel=1e-6)


@given(LOADS, LOADS)
def test_loads_of_two_routers_add_up(one: FleetLoad, other: FleetLoad) -> None:
    both = one + other
    assert both.prefill_load == one.prefill_load + other.prefill_load
    assert both.waiting_requests == one.waiting_requests + other.waiting_requests
    assert both.workers == max(one.workers, other.workers)
    assert (one + other) == (other + one)


@given(LOADS)
def test_advice_fits_itself(load: FleetLoad) -> None:
    advice = advise(load)
    assert advice.one_more_saves_seconds >= -1e-9
    assert (advice.one_less_costs_seconds is None) == (load.workers == 1)
    assert advice.one_less_costs_seconds is None or advice.one_less_costs_seconds >= -1e-9
    assert FleetLoad.from_stats(advice.as_dict()) == load


def test_the_cheapest_drain_loses_least_then_moves_least() -> None:
    drains = [Drain("a", 2.0, 0.1, 0.0), Drain("b", 1.0, 0.6, 0.0), Drain("c", 1.0, 0.5, 0.0)]
    by_name = {drain.worker: drain for drain in drains}
    assert advise(queue(3, 1.0), by_name).cheapest_drain == drains[2]
    assert advise(queue(1, 1.0), {"a": drains[0]}).cheapest_drain is None, "the last worker is none to drain"


# --- what is read off the load tracker --------------------------------------------------------------------------------

TENTH = CostModel([(0, 0.0), (1000, 1.0)], name="a millisecond a token")


def fleet(*names: str) -> tuple[GlobalScheduler, ManualClock]:
    """Workers that have been there for a window."""
    clock = ManualClock(1000.0)
    scheduler = GlobalScheduler(names, clock=clock, cost_model=TENTH, config=SchedulerConfig(calibrate=False))
    clock.advance(180.0)
    return scheduler, clock


def told(scheduler: GlobalScheduler) -> dict[str, Any]:
    """The advice."""
    advice: dict[str, Any] = scheduler.stats()["scaling"]
    return advice


def test_before_the_first_tick_nothing_is_known() -> None:
    advice = told(GlobalScheduler(["a", "b"]))
    assert advice["workers"] == 0 and advice["observed_seconds"] == 0.0 and advice["cheapest_drain"] is None


def test_the_load_is_what_was_booked_a_second() -> None:
    scheduler, clock = fleet("a", "b")
    for number in range(90):  # one every two seconds, each with a second of prefill and no answer
        scheduler.schedule([number, *range(999)], request_id=number)
        clock.advance(0.5)
        scheduler.first_token(number, cached_tokens=0)
        scheduler.finish(number, output_tokens=0)
        clock.advance(1.5)
        scheduler.tick()
    advice = told(scheduler)
    # The window's 36 slices are let go of as a whole.
    assert advice["requests_per_second"] == pytest.approx(0.5, rel=0.05)
    assert advice["prefill_load"] == pytest.approx(0.5, rel=0.05)
    assert advice["utilisation"] == pytest.approx(advice["prefill_load"] / 2)
    assert advice["waiting_requests"] == 0.0, "nobody waited at a tick"
    assert advice["workers"] == 2 and advice["observed_seconds"] == 180.0


def test_who_waits_is_counted_once_a_second() -> None:
    scheduler, clock = fleet("a")
    for number in range(3):
        scheduler.schedule([number, *range(99)], request_id=number)
    for _ in range(50):
        clock.advance(0.1)
        scheduler.tick()
    assert told(scheduler)["waiting_requests"] == pytest.approx(3.0)
    assert told(scheduler)["waiting_seconds"] == pytest.approx(0.3)
    for number in range(3):
        scheduler.cancel(number)
    clock.advance(1.0)
    scheduler.tick()
    assert 2.0 < told(scheduler)["waiting_requests"] < 3.0, "one look does not make the mean"
    for _ in range(1000):
        clock.advance(1.0)
        scheduler.tick()
    assert told(scheduler)["waiting_requests"] == pytest.approx(0.0, abs=1e-3)


def test_a_clock_that_jumps_back_stops_nothing() -> None:
    scheduler, clock = fleet("a")
    scheduler.tick(5000.0)
    scheduler.schedule([1, 2, 3])
    scheduler.tick(1200.0)
    assert told(scheduler)["waiting_requests"] > 0.0
    assert 0.0 <= told(scheduler)["step_seconds"] < 0.01, "half an iteration of eight requests takes 4 ms"
    assert math.isfinite(told(scheduler)["ttft_seconds"])


def test_the_work_of_a_worker_that_is_gone_is_still_to_be_done() -> None:
    scheduler, clock = fleet("a", "b")
    for number in range(60):
        scheduler.schedule([number, *range(999)], request_id=number)
        clock.advance(1.0)
        scheduler.finish(number, output_tokens=0)
        scheduler.tick()
    before = told(scheduler)["prefill_load"]
    scheduler.remove_worker("a")
    clock.advance(1.0)
    scheduler.tick()
    assert told(scheduler)["workers"] == 1
    assert told(scheduler)["prefill_load"] == pytest.approx(before, rel=0.02)
    clock.advance(180.0)
    scheduler.tick()
    assert told(scheduler)["prefill_load"] == pytest.approx(0.0), "after a window the others' books show all of it"


def test_a_draining_worker_is_no_worker_but_its_load_counts() -> None:
    scheduler, clock = fleet("a", "b")
    for number in range(20):
        scheduler.schedule([number, *range(999)], request_id=number)
    scheduler.tick()
    before = told(scheduler)["prefill_load"]
    scheduler.drain_worker("a")
    clock.advance(1.0)
    scheduler.tick()
    assert told(scheduler)["workers"] == 1
    assert told(scheduler)["prefill_load"] == pytest.approx(before, rel=0.02)
    assert told(scheduler)["cheapest_drain"] is None and set(told(scheduler)["drain_seconds"]) <= {"b"}


def test_a_drain_costs_what_only_that_worker_has() -> None:
    scheduler, clock = fleet("a", "b")
    first, second = [1, *range(1999)], [2, *range(499)]
    placed = {}
    for name, prompt in (("long", first), ("short", second)):
        for number in range(4):
            decision = scheduler.schedule([*prompt, 5000 + number], request_id=(name, number))
            scheduler.finish((name, number), output_tokens=0)
            placed[name] = decision.worker
    assert placed["long"] != placed["short"]
    for _ in range(4):
        clock.advance(1.0)
        scheduler.tick()
    advice = told(scheduler)
    assert advice["drain_seconds"][placed["long"]] == pytest.approx(2.0, rel=0.01)
    assert advice["drain_seconds"][placed["short"]] == pytest.approx(0.5, rel=0.01)
    assert advice["cheapest_drain"]["worker"] == placed["short"]


def test_of_many_workers_only_the_least_loaded_are_candidates() -> None:
    names = [f"w{i}" for i in range(3 * CANDIDATES)]
    scheduler, clock = fleet(*names)
    busy = set()
    for number in range(2 * CANDIDATES):
        busy.add(scheduler.schedule([number, *range(999)], request_id=number).worker)
    assert len(busy) == 2 * CANDIDATES
    for _ in range(2 * CANDIDATES):
        clock.advance(1.0)
        scheduler.tick()
    assert set(told(scheduler)["drain_seconds"]) == set(names) - busy


def test_the_gateway_exports_the_advice() -> None:
    metrics = pytest.importorskip("preble.gateway.core.metric_families", reason="metrics need the extra gateway")
    scheduler, clock = fleet("a", "b")
    for _ in range(2):
        clock.advance(1.0)
        scheduler.tick()
    found = {family.name: family.samples for family in metrics.scaling_families(told(scheduler))}
    assert found["preble_scaling_workers"][0].value == 2.0
    assert found["preble_scaling_desired_workers"][0].value == 1.0
    assert {sample.labels["worker"] for sample in found["preble_scaling_drain_seconds"]} == {"a", "b"}
    scheduler.remove_worker("b")
    clock.advance(1.0)
    scheduler.tick()
    names = {family.name for family in metrics.scaling_families(told(scheduler))}
    assert "preble_scaling_one_less_costs_seconds" not in names, "there is none to take away"
    assert "preble_scaling_one_more_saves_seconds" in names


# --- does it come true ------------------------------------------------------------------------------------------------


def simulated(rps: float, workers: int, seed: int) -> Any:
    """200 s of tool prompts, broken off while they still come."""
    made = workloads.generate("toolbench", requests=int(rps * 200.0), groups=60, zipf=1.1, seed=seed)
    workload = workloads.poisson(made, rps=rps, seed=seed)
    return sim.simulate(workload, sim.SimConfig(workers=workers, until_seconds=200.0))


@pytest.mark.parametrize("rps", [10.0, 20.0])
def test_the_saving_of_a_worker_more_comes_true(rps: float) -> None:
    here, more = simulated(rps, 2, seed=1), simulated(rps, 3, seed=1)
    ttft = [float(np.nanmean(one.ttft_seconds[one.arrival_seconds >= 20.0])) for one in (here, more)]
    advice = here.scheduler_stats["scaling"]
    assert advice["ttft_seconds"] == pytest.approx(ttft[0], rel=0.25)
    assert advice["ttft_with_one_more_seconds"] == pytest.approx(ttft[1], rel=0.25)
    assert advice["one_more_saves_seconds"] > 0.0


def test_a_fleet_that_is_too_small_is_reported_so() -> None:
    made = workloads.generate("toolbench", requests=4000, groups=60, zipf=1.1, seed=2)
    workload = workloads.poisson(made, rps=40.0, seed=2)
    small = sim.simulate(workload, sim.SimConfig(workers=1, until_seconds=90.0)).scheduler_stats["scaling"]
    assert small["utilisation"] > 1.0 and small["desired_workers"] >= 3
    fitting = sim.simulate(workload, sim.SimConfig(workers=small["desired_workers"], until_seconds=90.0))
    assert float(np.nanmean(fitting.ttft_seconds)) < 0.5 < small["ttft_seconds"]


def test_asking_for_advice_changes_no_run() -> None:
    made = workloads.generate("toolbench", requests=200, groups=10, seed=3)
    workload = workloads.poisson(made, rps=10.0, seed=3)
    simulation = sim.Simulation(workload, sim.SimConfig(workers=2, cost_model=PLAIN), None)
    reported_at: list[float] = []
    simulation._progress = lambda ended, requests, seconds: reported_at.append(
        simulation.scheduler.stats()["scaling"]["workers"]
    )
    assert simulation.run().trace_hash == sim.simulate(workload, sim.SimConfig(workers=2, cost_model=PLAIN)).trace_hash
    assert max(reported_at) == 2
