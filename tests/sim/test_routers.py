"""Several routers in the simulator: each request has one, all learn of all, and nothing stays booked."""

from __future__ import annotations

import numpy as np
import pytest

from preble import CostModel, LocalConfig, WorkerSpec, sim
from preble.errors import InvalidConfig
from preble.scheduling.flow_control import FlowConfig
from preble.sim.simulation import Simulation
from preble.workloads import PromptRequest, Workload, generate, poisson

LOCAL = LocalConfig(30_000, token_budget=512, max_running=64, max_waiting=10**6)


def workload(requests: int = 400) -> Workload:
    return poisson(generate("toolbench", requests=requests, groups=40, seed=3), 30.0, 4)


def settings(**more: object) -> sim.SimConfig:
    return sim.SimConfig(**{"workers": 6, "local": LOCAL, "network_seconds": 0.001, **more})


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("routers", [2, 5])
def test_every_request_ends_once_and_nothing_stays_booked(routers: int, delay: float) -> None:
    run = Simulation(workload(), settings(routers=routers, event_delay_seconds=delay), None)
    result = run.run()
    assert result.summary().finished == 400
    placed = [scheduler.stats() for scheduler in run.routers.schedulers]
    assert all(stats["scheduled"] > 0 for stats in placed)
    assert sum(stats["scheduled"] for stats in placed) == 400
    for scheduler, stats in zip(run.routers.schedulers, placed, strict=True):
        assert stats["scheduled"] + stats["peer_requests"] == 400
        assert stats["live_requests"] == stats["peer_events_ignored"] == 0
        scheduler.check()


def test_all_routers_expect_the_same_once_all_is_said() -> None:
    run = Simulation(workload(), settings(routers=3, event_delay_seconds=0.05), None)
    run.run()
    first, *rest = (scheduler.stats()["workers"] for scheduler in run.routers.schedulers)
    for other in rest:
        for name, account in first.items():
            assert other[name]["cached_tokens"] == account["cached_tokens"]
            assert other[name]["window_requests"] == account["window_requests"]


def test_the_same_arguments_give_the_same_run() -> None:
    config = settings(routers=4, event_delay_seconds=0.02)
    assert sim.simulate(workload(), config).trace_hash == sim.simulate(workload(), config).trace_hash


def test_many_routers_find_about_as_much_cached_as_one() -> None:
    one = sim.simulate(workload(), settings(event_delay_seconds=0.05)).summary().hit_fraction
    eight = sim.simulate(workload(), settings(event_delay_seconds=0.05, routers=8)).summary().hit_fraction
    assert eight > 0.97 * one


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.5])
def test_routers_before_attached_servers_learn_of_each_other_by_their_own_reports(delay: float) -> None:
    run = Simulation(workload(), settings(routers=5, peer_delay_seconds=delay), None)
    result = run.run()
    assert result.summary().finished == 400
    for scheduler in run.routers.schedulers:
        stats = scheduler.stats()
        assert stats["scheduled"] + stats["peer_requests"] == 400
        assert stats["live_requests"] == stats["peer_events_ignored"] == 0
        scheduler.check()
    one = sim.simulate(workload(), settings()).summary().hit_fraction
    assert delay > 0.05 or result.summary().hit_fraction > 0.97 * one


def test_blind_routers_would_find_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the mirror is worth: without it, each router knows its own requests only."""
    told = sim.simulate(workload(), settings(routers=6)).summary()
    monkeypatch.setattr(sim.routers.SimRouters, "_report_to_others", lambda *_: None)
    blind = sim.simulate(workload(), settings(routers=6)).summary()
    assert blind.hit_fraction < 0.9 * told.hit_fraction


def test_workers_may_die_join_and_leave_under_several_routers() -> None:
    faults = (
        sim.WorkerDeath(2.0, "w0", 0.5),
        sim.WorkerJoin(3.0, WorkerSpec("new", kv_capacity_tokens=30_000)),
        sim.WorkerJoin(6.0, WorkerSpec("w0", kv_capacity_tokens=30_000)),
        sim.WorkerDrain(7.0, "w1", 1.0),
    )
    run = Simulation(workload(), settings(routers=3, event_delay_seconds=0.3, faults=faults), None)
    result = run.run()
    assert result.summary().finished == 400 and result.counts["resumed"] > 0
    for scheduler in run.routers.schedulers:
        assert scheduler.stats()["live_requests"] - scheduler.stats()["peer_bookings"] == 0
        scheduler.check()


@pytest.mark.parametrize("delay", [None, 0.7])
def test_what_is_given_up_at_its_deadline_is_booked_nowhere(delay: float | None) -> None:
    requests = [
        PromptRequest(f"r{n}", (np.arange(3000, dtype=np.int32) + 10_000 * n,), 2, deadline_seconds=0.5)
        for n in range(8)
    ]
    cost, more = CostModel([(0, 0.01), (1000, 1.01)]), {"workers": 1, "routers": 2, "flow": FlowConfig()}
    run = Simulation(Workload("test", requests), settings(cost_model=cost, peer_delay_seconds=delay, **more), None)
    assert (run.run().outcome == 2).all(), "three seconds each"
    for scheduler in run.routers.schedulers:
        stats = scheduler.stats()
        assert stats["peer_requests"] > 0 and stats["peer_events_ignored"] == 0
        assert stats["live_requests"] == stats["workers"]["w0"]["waiting_prefill_seconds"] == 0
        scheduler.check()


@pytest.mark.parametrize("routers", [0, -1, 1.5, 2000, True, None])
def test_a_wrong_number_of_routers_is_refused(routers: object) -> None:
    with pytest.raises(InvalidConfig, match="routers"):
        settings(routers=routers)


@pytest.mark.parametrize("delay", [-1.0, float("nan"), float("inf"), "soon"])
def test_a_wrong_delay_between_routers_is_refused(delay: object) -> None:
    with pytest.raises(InvalidConfig, match="peer_delay_seconds"):
        settings(peer_delay_seconds=delay)
