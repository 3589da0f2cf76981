"""Load that shifts, in the simulator: a prefix too hot for one worker, heavy workers, and what must not happen. Each
scenario runs with plans and without, on the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from preble import LocalConfig, SchedulerConfig, sim
from preble.sim.results import Result
from preble.sim.simulation import Simulation
from preble.workloads import PromptRequest, Workload
from tests.support.sim import asked, tokens
from tests.support.sticky import Sticky

OFF = SchedulerConfig(rebalance_ratio=0.0, replicas_max=1)
MOVES = SchedulerConfig(replicas_max=1)
COPIES = SchedulerConfig(rebalance_ratio=0.0)
HOT_TOKENS, QUESTION_TOKENS = 4000, 800


def requests_for(
    name: str,
    prefix: npt.NDArray[np.int32],
    rps: float,
    start: float,
    end: float,
    *,
    question: int = QUESTION_TOKENS,
    seed: int = 0,
) -> list[PromptRequest]:
    """Poisson requests for one prefix, each with a question of its own."""
    rng = np.random.default_rng([seed, len(name), int(start)])
    moments = start + np.cumsum(rng.exponential(1 / rps, int(2 * rps * (end - start)) + 20))
    base = 2_000_000 + 100_000_000 * (sum(map(ord, name)) % 17)
    found = []
    for i, moment in enumerate(moments[moments < end]):
        own = tokens(question, base + 1000 * i)
        found.append(asked(f"{name}{i}", float(moment), prefix, own, out=20))
    return found


def run(
    requests: Sequence[PromptRequest], config: SchedulerConfig, workers: int = 6, **more: Any
) -> tuple[Result, Simulation]:
    """Simulate, and check all bookings at the end. The rule stays where prompts are cached, so that plans are what
    spreads the load."""
    made = Workload("shifts", sorted(requests, key=lambda request: request.arrival_seconds))
    local = LocalConfig(198_516, max_running=256, max_waiting=10**6)
    simulation = Simulation(
        made, sim.SimConfig(workers=workers, policy=Sticky(), scheduler=config, local=local, **more), None
    )
    result = simulation.run()
    simulation.scheduler.check()
    return result, simulation


def plans(result: Result, kind: str) -> list[dict[str, Any]]:
    """All plans of a kind, by when they were made."""
    told = result.scheduler_stats["plans"]
    found = [plan for plan in [*told["active"], *told["ended"]] if plan["kind"] == kind]
    return sorted(found, key=lambda plan: plan["made_at"])


@pytest.fixture(scope="module")
def three_workers_worth() -> list[PromptRequest]:
    """One prefix at three times what a worker can do, for 60 s, then at a trickle."""
    hot = tokens(HOT_TOKENS, 10_000)
    trickle = requests_for("after", hot, 0.5, 60.0, 330.0)
    return [*requests_for("hot", hot, 27.0, 0.0, 60.0), *trickle]


def test_a_prefix_too_hot_for_a_worker_spreads_within_a_window_and_shrinks_after(
    three_workers_worth: list[PromptRequest],
) -> None:
    alone, _ = run([r for r in three_workers_worth if r.arrival_seconds < 60.0], OFF)
    spread, _ = run(three_workers_worth, COPIES)
    worth = float(alone.busy_seconds.sum()) / 60.0
    assert worth > 2.9  # one worker is busy with it for three times as long as it is asked for
    made = plans(spread, "replica")
    assert len(made) >= 3 - 1
    assert made[-1]["made_at"] < 60.0  # a third of the window
    late = (spread.arrival_seconds > 30.0) & (spread.arrival_seconds < 60.0)
    assert len(set(spread.worker[late].tolist())) >= 3
    assert np.mean(spread.ttft_seconds[: len(alone.ttft_seconds)]) < 0.1 * np.mean(alone.ttft_seconds)
    assert all(plan["why"] == "the load fell" for plan in made)  # all are over
    assert {plan["state"] for plan in made} == {"ended"}
    assert max(plan["ended_at"] for plan in made) < 60.0 + 180.0 + 90.0


def test_moves_alone_help_a_hot_prefix_but_less(three_workers_worth: list[PromptRequest]) -> None:
    first = [r for r in three_workers_worth if r.arrival_seconds < 60.0]
    off, moves, copies = (float(np.mean(run(first, config)[0].ttft_seconds)) for config in (OFF, MOVES, COPIES))
    assert copies < moves < off


def test_a_shared_system_prompt_before_unique_questions_stays_spread() -> None:
    shared = tokens(300, 10_000)
    asks = requests_for("q", shared, 20.0, 0.0, 60.0, question=900)
    result, _ = run(asks, SchedulerConfig())
    counts = np.bincount(result.worker, minlength=6)
    assert counts.min() > 0.8 * counts.mean()
    assert plans(result, "replica") == [] and plans(result, "rebalance") == []


def test_a_long_system_prompt_does_not_collapse_onto_few_workers() -> None:
    """Half of each prompt and more is shared by all: plain E2 keeps them where it is cached."""
    shared = tokens(2000, 10_000)
    asks = requests_for("q", shared, 40.0, 0.0, 60.0, question=1000)
    collapsed, _ = run(asks, OFF)
    spread, _ = run(asks, SchedulerConfig())
    assert len(set(collapsed.worker.tolist())) == 1
    late = spread.worker[spread.arrival_seconds > 30.0]
    assert np.bincount(late, minlength=6).max() < 0.5 * len(late)
    assert spread.summary().p99_ttft_seconds < 0.3 * collapsed.summary().p99_ttft_seconds


def heavy_and_light(prefix_tokens: int, groups: int, rps: float, start: float) -> tuple[list[PromptRequest], Any]:
    """Prefixes that all begin on one worker, for the other joins just before most requests come."""
    asks = []
    for group in range(groups):
        prefix = tokens(prefix_tokens, 10_000 + 40_000 * group)
        asks.append(asked(f"seed{group}", 0.01 * group, prefix, 10, out=2))
        asks += requests_for(f"{chr(97 + group)}", prefix, rps / groups, start, start + 60.0, question=400, seed=group)
    spec = sim.SimConfig(workers=1).specs()[0]
    return asks, sim.WorkerJoin(start - 0.5, type(spec)("w1", kv_capacity_tokens=198_516))


def test_a_heavy_worker_gives_prefixes_to_a_light_one() -> None:
    asks, joins = heavy_and_light(1000, 8, 26.0, 1.5)
    off, _ = run(asks, OFF, workers=1, faults=(joins,))
    on, _ = run(asks, MOVES, workers=1, faults=(joins,))
    assert set(off.worker.tolist()) == {0}
    moved = plans(on, "rebalance")
    assert moved and all(plan["from_worker"] == "w0" and plan["to_worker"] == "w1" for plan in moved[:2])
    assert on.busy_seconds[1] > 0.5 * on.busy_seconds[0]
    assert on.summary().mean_ttft_seconds < 0.5 * off.summary().mean_ttft_seconds


def test_a_move_that_would_cost_more_than_it_saves_is_not_made() -> None:
    """The same imbalance, with little to wait for and prefixes of seconds."""
    asks, joins = heavy_and_light(20_000, 4, 3.0, 20.0)
    on, _ = run(asks, SchedulerConfig(), workers=1, faults=(joins,))
    loads = on.busy_seconds
    assert loads[0] > 1.5 * loads[1] + 5.0  # ratio and floor alone would move some
    assert plans(on, "rebalance") == [] and plans(on, "replica") == []


def test_one_hot_worker_leaves_the_others_their_prefixes(three_workers_worth: list[PromptRequest]) -> None:
    """Beside a hot prefix, quiet ones keep to the workers that cache them."""
    asks = [r for r in three_workers_worth if r.arrival_seconds < 60.0]
    for group in range(5):
        quiet = tokens(3000, 500_000 + 10_000 * group)
        asks += requests_for(f"quiet{'x' * group}", quiet, 0.5, 0.0, 60.0, question=100, seed=group)
    result, _ = run(asks, SchedulerConfig())
    assert plans(result, "replica")
    quiet_rows = np.array([name.startswith("quiet") for name in result.request_ids])
    prompt, cached = result.prompt_tokens[quiet_rows].sum(), result.cached_tokens[quiet_rows].sum()
    off, _ = run([r for r in asks if r.request_id.startswith("quiet")], OFF)
    assert cached / prompt > 0.95 * off.cached_tokens.sum() / off.prompt_tokens.sum()


def test_a_hot_prefix_that_changes_is_followed() -> None:
    """Every 30 s another prefix is asked for twice as often as one worker can answer."""
    asks = []
    for turn in range(3):
        prefix, start = tokens(HOT_TOKENS, 10_000 * (turn + 1)), 30.0 * turn
        asks += requests_for("t" * (turn + 1), prefix, 20.0, start, start + 30.0)
    off, _ = run(asks, OFF)
    on, _ = run(asks, SchedulerConfig())
    assert {plan["prefix_tokens"] for plan in plans(on, "replica")} == {HOT_TOKENS}
    assert len(plans(on, "replica")) >= 3
    assert on.summary().mean_ttft_seconds < 0.2 * off.summary().mean_ttft_seconds


def test_children_of_a_copied_prefix_keep_their_home() -> None:
    """Documents below a shared prefix, each asked about again and again: once it is copied, each has one worker."""
    shared = tokens(3000, 10_000)
    asks = []
    for number in range(12):
        document = np.concatenate([shared, tokens(1500, 100_000 + 5000 * number)])
        asks += requests_for("d" * (number + 1), document, 2.5, 0.0, 60.0, question=400, seed=number)
    off, _ = run(asks, OFF)
    result, _ = run(asks, SchedulerConfig())
    assert plans(result, "replica")
    homes = []
    for number in range(12):
        rows = np.array([name.rstrip("0123456789") == "d" * (number + 1) for name in result.request_ids])
        late = result.worker[rows & (result.arrival_seconds > 40.0)]
        homes.append(np.bincount(late).max() / len(late))
    assert np.mean(homes) > 0.9
    assert result.summary().mean_ttft_seconds < off.summary().mean_ttft_seconds
    assert result.summary().hit_fraction > 0.97 * off.summary().hit_fraction


def test_warm_ups_let_the_first_requests_find_the_prefix(three_workers_worth: list[PromptRequest]) -> None:
    """What a host does with `warm_ups`, on the simulator's own workers: one-token requests."""
    first = [r for r in three_workers_worth if r.arrival_seconds < 30.0]
    warm = SchedulerConfig(rebalance_ratio=0.0, warm_up_seconds=20.0)
    made = Workload("shifts", sorted(first, key=lambda request: request.arrival_seconds))
    local = LocalConfig(198_516, max_running=256, max_waiting=10**6)
    simulation = Simulation(made, sim.SimConfig(workers=6, policy=Sticky(), scheduler=warm, local=local), None)
    asked_for: list[int] = []

    def prefill(_: object) -> None:
        for plan, worker, token_ids, namespace in simulation.scheduler.warm_ups():
            assert namespace is None and len(token_ids) == HOT_TOKENS
            asked_for.append(plan)
            found = simulation.scheduler.workers[worker]
            seconds = simulation._config.model_of(found).prefill_time(len(token_ids))
            simulation._timeline.at(simulation._timeline.now + seconds, simulation.scheduler.warmed, plan)
        if simulation._timeline.now < 30.0:
            simulation._timeline.at(simulation._timeline.now + 0.25, prefill, None)

    simulation._timeline.at(0.25, prefill, None)
    result = simulation.run()
    simulation.scheduler.check()
    assert len(asked_for) == len(plans(result, "replica")) >= 2
    assert result.scheduler_stats["reasons"]["replica"] > 0
