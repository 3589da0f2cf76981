"""Pairs of simulated workers: when tokens come, what deaths make of them, and that nothing changes without roles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from preble import CostModel, WorkerSpec
from preble.errors import InvalidConfig
from preble.scheduling.flow_control import FlowConfig
from preble.sim import KvLink, SimConfig, Simulation, WorkerDeath, WorkerJoin, simulate
from preble.sim.bounds import lower_bounds
from preble.workloads import PromptRequest, Workload, generate, poisson

# 1 ms a token, 10 ms an iteration at least.
COST = CostModel([(0, 0.01), (10, 0.01), (1010, 1.01)], name="linear")
LINK = KvLink(latency_seconds=0.02, bytes_per_second=1e6, token_bytes=100, copy_byte_seconds=1e-8)
P, D = WorkerSpec("p", role="prefill"), WorkerSpec("d", role="decode")


def request(name: str, at: float, tokens: int = 1000, output: int = 5) -> PromptRequest:
    own = np.arange(tokens, dtype=np.int32) + 10_000 * sum(map(ord, name))
    return PromptRequest(name, (own,), output, arrival_seconds=at)


def run(*requests: PromptRequest, workers: tuple[WorkerSpec, ...] = (P, D), **config: Any) -> Any:
    made = Workload("test", list(requests))
    return simulate(made, SimConfig(**{"workers": workers, "cost_model": COST, "kv_link": LINK, **config}))


def test_the_first_token_comes_from_the_one_and_the_rest_from_the_other_after_the_transfer() -> None:
    found = run(request("a", 0.0))
    assert found.ttft_seconds[0] == pytest.approx(1.0, abs=0.05)
    # 20 ms, 100 kB at 1 MB/s, and four more tokens: the last of the prompt is computed with the first.
    assert found.finish_seconds[0] - found.first_token_seconds[0] == pytest.approx(0.02 + 0.1 + 4 * 0.01, abs=0.005)
    assert found.second_token_seconds[0] - found.first_token_seconds[0] == pytest.approx(0.02 + 0.1 + 0.01, abs=0.005)
    assert found.workers[found.worker[0]] == "d" and found.output_tokens.tolist() == [5]
    assert found.scheduler_stats["policy_state"]["pairs"] == {"live": 0, "placed": 1, "separated": 1}
    assert found.scheduler_stats["live_requests"] == 0
    assert found.scheduler_stats["pulls"]["moved_tokens"] == 1000


def test_an_answer_of_one_token_needs_nobody_to_decode() -> None:
    found = run(request("a", 0.0, output=1))
    assert found.outcome.tolist() == [1] and found.finish_seconds[0] == found.first_token_seconds[0]
    assert found.scheduler_stats["live_requests"] == 0 and found.scheduler_stats["pulls"]["ended"] == 0


def test_prefills_do_not_hold_up_a_decode() -> None:
    requests = [request("a", 0.0, tokens=100, output=300), *(request(f"b{n}", 1.0 + 0.5 * n) for n in range(6))]
    apart = run(*requests)
    together = run(*requests, workers=(WorkerSpec("x"), WorkerSpec("y")), policy="round_robin")
    decode = [one.finish_seconds[0] - one.first_token_seconds[0] for one in (apart, together)]
    assert decode[0] < 0.75 * decode[1]


@pytest.mark.parametrize(("worker", "at"), [("p", 0.5), ("p", 1.05), ("d", 0.5), ("d", 1.05), ("d", 1.15)])
def test_a_death_on_either_side_costs_time_and_no_token(worker: str, at: float) -> None:
    """In the prefill, in the transfer, in the decode."""
    spare = (P, D, replace(P, id="p2"), replace(D, id="d2"))
    death = WorkerDeath(at, worker, noticed_after_seconds=0.5)
    one = Simulation(
        Workload("test", [request("a", 0.0), request("b", 3.0)]),
        SimConfig(workers=spare, cost_model=COST, kv_link=LINK, faults=(death,)),
        None,
    )
    found = one.run()
    assert found.outcome.tolist() == [1, 1] and found.output_tokens.tolist() == [5, 5]
    assert found.finish_seconds[0] > 1.2
    assert found.scheduler_stats["live_requests"] == 0
    one.scheduler.check()


def test_a_decode_worker_that_falls_silent_is_noticed_and_its_requests_go_to_another() -> None:
    deaths = (WorkerDeath(4.0, "d", noticed_after_seconds=1.0), WorkerJoin(3.0, replace(D, id="d2")))
    requests = [request(f"r{n}", 0.2 * n, tokens=100, output=400) for n in range(20)]
    one = Simulation(
        Workload("test", requests), SimConfig(workers=(P, D), cost_model=COST, kv_link=LINK, faults=deaths), None
    )
    found = one.run()
    assert (found.outcome == 1).all() and (found.output_tokens == 400).all()
    assert found.counts["resumed"] > 5
    assert {found.workers[i] for i in found.worker[-5:]} == {"d2"}
    one.scheduler.check()


def test_a_run_under_memory_pressure_ends_every_request_and_is_the_same_again() -> None:
    made = poisson(generate("toolbench", requests=150, groups=12, seed=1), rps=30.0, seed=1)
    local = replace(SimConfig().local, kv_capacity_tokens=12_000)
    specs = tuple(
        WorkerSpec(name, kv_capacity_tokens=12_000, role=role)  # type: ignore[arg-type]
        for name, role in (("p", "prefill"), ("q", "prefill"), ("b", "both"), ("d", "decode"))
    )
    config = SimConfig(workers=specs, local=local, kv_link=KvLink(bytes_per_second=1e10))
    one, two = Simulation(made, config, None), Simulation(made, config, None)
    first, second = one.run(), two.run()
    assert (first.outcome == 1).all()
    pairs = first.scheduler_stats["policy_state"]["pairs"]
    assert 0 < pairs["separated"] < pairs["placed"] == 150
    assert np.array_equal(first.finish_seconds, second.finish_seconds)
    one.scheduler.check()
    for worker in one.workers:
        worker.engine.scheduler.check()
    assert first.scheduler_stats["live_requests"] == 0


def test_reports_that_are_late_end_what_they_are_about() -> None:
    made = poisson(generate("toolbench", requests=60, groups=6, seed=3), rps=20.0, seed=3)
    config = SimConfig(workers=(P, D), kv_link=KvLink(), event_delay_seconds=0.05, network_seconds=0.01)
    one = Simulation(made, config, None)
    assert (one.run().outcome == 1).all()
    one.scheduler.check()
    assert one.scheduler.stats()["live_requests"] == 0


def test_several_routers_learn_of_both_halves() -> None:
    made = poisson(generate("toolbench", requests=90, groups=8, seed=4), rps=30.0, seed=4)
    specs = (*(replace(P, id=f"p{n}") for n in range(2)), WorkerSpec("b"), replace(D, id="d0"), replace(D, id="d1"))
    death = WorkerDeath(1.0, "d1", noticed_after_seconds=0.3)
    config = SimConfig(
        workers=specs, kv_link=KvLink(), routers=3, event_delay_seconds=0.02, network_seconds=0.01, faults=(death,)
    )
    one = Simulation(made, config, None)
    found = one.run()
    assert (found.outcome == 1).all()
    separated = [each.stats()["policy_state"]["pairs"]["separated"] for each in one.routers.schedulers]
    assert all(separated), "each router makes pairs"
    for each in one.routers.schedulers:
        each.check()
        stats = each.stats()
        assert stats["live_requests"] == stats["peer_bookings"] == 0 and stats["peer_requests"] > 40


def test_a_prompt_that_is_placed_anew_on_its_way_is_queued_once() -> None:
    """Its decode's worker dies before the prompt has reached the other, which is chosen again."""
    workers, death = (P, replace(D, id="d0"), replace(D, id="d1")), WorkerDeath(0.1, "d0", 0.0)
    found = run(request("a", 0.0, tokens=300), workers=workers, network_seconds=0.4, faults=(death,))
    assert found.outcome.tolist() == [1] and found.output_tokens.tolist() == [5]
    assert found.ttft_seconds[0] == pytest.approx(0.1 + 0.4 + 0.3, abs=0.02)
    assert found.counts["resumed"] == 1 and found.scheduler_stats["live_requests"] == 0
    small = (replace(P, kv_capacity_tokens=100), *workers[1:])
    refused = run(request("a", 0.0, tokens=300), workers=small, network_seconds=0.4, faults=(death,))
    assert refused.outcome.tolist() == [2], "too long for who prefills"


def test_routers_that_learn_late_of_a_half_learn_of_its_end_later() -> None:
    requests = [request(f"r{n}", float(n), tokens=300) for n in range(6)]
    config = SimConfig(workers=(P, D), cost_model=COST, kv_link=KvLink(), routers=2, peer_delay_seconds=0.5)
    one = Simulation(Workload("test", requests), config, None)
    assert (one.run().outcome == 1).all()
    for each in one.routers.schedulers:
        each.check()
        stats = each.stats()
        assert stats["peer_requests"] > 0 and stats["live_requests"] == stats["peer_events_ignored"] == 0


def test_tenants_and_deadlines_wait_for_who_prefills() -> None:
    tenants = [replace(request(f"r{n}", 0.05 * n), tenant="ab"[n % 2], deadline_seconds=4.0) for n in range(30)]
    one = Simulation(
        Workload("test", tenants), SimConfig(workers=(P, D), cost_model=COST, kv_link=LINK, flow=FlowConfig()), None
    )
    found = one.run()
    served = found.outcome == 1
    assert 2 <= served.sum() <= 6, "a second of prefill each, four seconds for it"
    assert (found.ttft_seconds[served] <= 4.0).all() and set(found.outcome) == {1, 2}
    one.scheduler.check()
    assert one.scheduler.stats()["live_requests"] == 0


def test_samples_of_a_set_go_to_who_does_both() -> None:
    made = [replace(request(f"r{n}", 0.0, tokens=100), group="g", sampled=True) for n in range(4)]
    found = run(*made, workers=(P, WorkerSpec("b"), D))
    assert {found.workers[i] for i in found.worker} == {"b"}
    found = run(*made)
    assert {found.workers[i] for i in found.worker} == {"d"}, "where nobody does, to pairs"


@pytest.mark.parametrize("seed", range(3))
def test_the_bounds_hold_for_pairs(seed: int) -> None:
    made = poisson(generate("loogle", requests=40, groups=8, seed=seed), rps=2.0, seed=seed)
    specs = (P, WorkerSpec("b"), D)
    found = simulate(made, SimConfig(workers=specs, kv_link=KvLink(bytes_per_second=1e11, copy_byte_seconds=0.0)))
    assert found.scheduler_stats["policy_state"]["pairs"]["separated"] > 5
    budget = SimConfig().local.token_budget
    all_of_them, who_prefill = (
        lower_bounds(made.requests, CostModel.preset("mistral-7b/a6000"), workers, budget) for workers in (3, 2)
    )
    assert found.ttft_seconds.mean() >= who_prefill.mean_ttft_seconds >= all_of_them.mean_ttft_seconds
    assert np.percentile(found.ttft_seconds, 99) >= who_prefill.p99_ttft_seconds
    assert found.latency_seconds.mean() >= all_of_them.mean_latency_seconds
    assert np.percentile(found.latency_seconds, 99) >= all_of_them.p99_latency_seconds


def test_roles_need_a_link() -> None:
    with pytest.raises(InvalidConfig, match="a worker with a role needs a kv_link"):
        SimConfig(workers=(P, D))
