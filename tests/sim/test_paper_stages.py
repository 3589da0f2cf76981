"""The stages of the paper's system under "e2-paper": each acts where it should, and its knob switches off it alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from preble import LocalConfig, SchedulerConfig, sim
from preble.sim.results import Result
from preble.workloads import PromptRequest, Workload, generate, poisson
from tests.sim.test_rebalancing import requests_for
from tests.support.sim import asked, tokens

LOCAL = LocalConfig(198_516, max_running=256, max_waiting=10**6)
OFF: dict[str, Any] = {"rebalance_ratio": 0.0, "replicas_max": 1, "imbalance_share": 1.0}
ON = {name: getattr(SchedulerConfig(), name) for name in OFF}
STAGES = {"rebalance_ratio": "rebalance", "replicas_max": "replica"}


def run(requests: list[PromptRequest], workers: int = 6, **stages: Any) -> Result:
    """By the paper's rule."""
    config = sim.SimConfig(workers=workers, policy="e2-paper", scheduler=SchedulerConfig(**stages), local=LOCAL)
    return sim.simulate(Workload("stages", requests), config)


@pytest.fixture(scope="module")
def hot() -> list[PromptRequest]:
    """One prefix at three times what a worker can do."""
    return requests_for("hot", tokens(4000, 10_000), 27.0, 0.0, 30.0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_plan_is_made_by_its_stage_and_by_no_other(hot: list[PromptRequest], stage: str) -> None:
    off, on = run(hot, **OFF), run(hot, **{**OFF, stage: ON[stage]})
    assert "made" not in off.scheduler_stats["plans"] and len(set(off.worker.tolist())) == 1
    made = on.scheduler_stats["plans"]["made"]
    assert set(made) == {STAGES[stage]} and len(set(on.worker.tolist())) > 1
    others = run(hot, **{**ON, stage: OFF[stage]}).scheduler_stats["plans"]["made"]
    assert STAGES[stage] not in others and set(others) == set(STAGES.values()) - {STAGES[stage]}
    assert set(run(hot).scheduler_stats["plans"]["made"]) == set(STAGES.values())


def test_a_copied_prefix_has_its_children_split_and_shrinks_when_the_load_falls() -> None:
    """Twelve documents below one instruction that is too hot for a worker: each goes to one worker, not to all."""
    instruction = tokens(3000, 10_000)
    documents = [tokens(1500, 50_000 + 2_000 * n) for n in range(12)]
    asks = requests_for("hot", instruction, 24.0, 0.0, 60.0, question=300)
    asks = [replace(r, parts=(instruction, documents[n % 12], r.parts[1])) for n, r in enumerate(asks)]
    asks += requests_for("after", instruction, 0.5, 60.0, 330.0)
    found = run(asks, **{**OFF, "replicas_max": 8})
    told = found.scheduler_stats["plans"]
    assert told["made"]["replica"] >= 1 and told["why_ended"]["the load fell"] == told["made"]["replica"]
    late = [n for n in range(len(asks)) if 40.0 < asks[n].arrival_seconds < 60.0]
    served = {n: {int(found.worker[i]) for i in late if i % 12 == n} for n in range(12)}
    assert len(set().union(*served.values())) > 1
    assert sum(map(len, served.values())) < 24  # of 72


def test_imbalr_spares_explored_requests_workers_with_prefill_in_the_queue() -> None:
    skewed = poisson(generate("toolbench", requests=2400, groups=320, seed=0, zipf=1.1), 27.0, 1).requests
    off, on = run(skewed, 4, **OFF), run(skewed, 4, **{**OFF, "imbalance_share": ON["imbalance_share"]})
    assert "made" not in on.scheduler_stats["plans"]
    assert off.worker.tolist() != on.worker.tolist()
    assert on.summary().p99_ttft_seconds < 0.7 * off.summary().p99_ttft_seconds


def test_priority_groups_change_the_order_of_a_queue_and_no_placement() -> None:
    prefix = tokens(3000, 10_000)
    first = asked("first", 0.0, prefix, 100)
    asks = [asked(f"r{n}", 1.0, *((prefix, 100) if n % 2 else (3100,))) for n in range(12)]
    local = replace(LOCAL, short_first=False)  # the paper's
    config = sim.SimConfig(workers=1, policy="e2-paper", scheduler=SchedulerConfig(**OFF), local=local)
    made = Workload("queue", [first, *asks])
    grouped = sim.simulate(made, config).ttft_seconds[1:]
    in_turn = sim.simulate(made, replace(config, local=replace(local, order="fcfs"))).ttft_seconds[1:]
    assert in_turn.tolist() == sorted(in_turn.tolist())
    assert max(grouped[1:11:2]) < min(grouped[2::2])  # who is cached, but for the last, before who is not
