"""Fleets in the simulator when workers come and go: with numbers, what users notice of it.

The parts are in `scheduling/test_membership.py`. Loads are such that a worker is busy for a good part of its time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from preble import SchedulerConfig, WorkerSpec, sim, workloads
from preble.sim import WorkerDeath, WorkerDrain, WorkerJoin
from preble.sim.config import A6000_KV_TOKENS
from preble.sim.results import FINISHED, Result
from preble.workloads import Workload
from tests.sim.test_faults import sent as sent
from tests.support.sim import check

COMMON_TOKENS = 145  # with which all these tool prompts begin
ALIKE_TOKENS = 4  # that some tools have in common beyond


def tools(seconds: float, rps: float, *, groups: int = 200, zipf: float | None = None, seed: int = 0) -> Workload:
    """Tool prompts at `rps` for so long."""
    made = workloads.generate("toolbench", requests=int(rps * seconds), groups=groups, zipf=zipf, seed=seed)
    return workloads.poisson(made, rps=rps, seed=seed)


def run(workload: Workload, workers: int, *faults: sim.Fault, **knobs: float) -> tuple[Result, sim.Simulation]:
    settings = sim.SimConfig(workers=workers, faults=faults, scheduler=SchedulerConfig(**knobs))
    simulation = sim.Simulation(workload, settings, None)
    result = simulation.run()
    check(result, simulation, settings)
    return result, simulation


def joins(count: int, at_seconds: float) -> tuple[WorkerJoin, ...]:
    return tuple(WorkerJoin(at_seconds, WorkerSpec(f"n{i}", kv_capacity_tokens=A6000_KV_TOKENS)) for i in range(count))


def shares(result: Result, start: float, end: float) -> dict[str, float]:
    """Requests of each worker that arrived in a span, as multiples of the mean."""
    then = (result.arrival_seconds >= start) & (result.arrival_seconds < end)
    counts = np.bincount(result.worker[then], minlength=len(result.workers))
    return dict(zip(result.workers, (counts / counts.mean()).tolist(), strict=True))


def p99(result: Result, start: float, end: float) -> float:
    then = (result.arrival_seconds >= start) & (result.arrival_seconds < end)
    return float(np.quantile(result.ttft_seconds[then], 0.99))


# --- joins ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("groups", "zipf", "rps"), [(400, None, 40.0), (400, 1.1, 40.0)], ids=["toolbench", "zipf"])
def test_a_fleet_of_twenty_doubles_and_no_newcomer_is_flooded_or_starved(
    groups: int, zipf: float | None, rps: float
) -> None:
    """Within a minute each newcomer has at least 0.3 and at most 2 times the mean number of requests."""
    result, _ = run(tools(130.0, rps, groups=groups, zipf=zipf), 20, *joins(20, 70.0))
    first_minute = shares(result, 70.0, 130.0)
    new = [share for name, share in first_minute.items() if name.startswith("n")]
    assert len(new) == 20 and min(new) >= 0.3 and max(new) <= 2.0, sorted(new)


def test_one_more_worker_gets_its_share_and_no_more() -> None:
    result, _ = run(tools(220.0, 20.0), 8, *joins(1, 100.0))
    assert 0.3 <= shares(result, 100.0, 160.0)["n0"] <= 2.0
    assert 0.3 <= shares(result, 160.0, 220.0)["n0"] <= 2.0


# --- drains -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.0, 30.0])
def test_a_drain_under_load_loses_nothing_and_delays_little(seconds: float) -> None:
    """One of eight leaves: p99 of the time to first token in the minute after is at most 4 times that without (a cold
    prompt takes that long), and every request ends."""
    requests = tools(180.0, 24.0)
    without, _ = run(requests, 8)
    result, simulation = run(requests, 8, WorkerDrain(100.0, "w3", seconds))
    assert (result.outcome == FINISHED).all()
    assert p99(result, 100.0, 160.0) <= 4.0 * p99(without, 100.0, 160.0)
    last = result.arrival_seconds[result.worker == 3].max()
    assert (last < 100.0) if seconds == 0.0 else (110.0 < last < 131.5)
    told = simulation.scheduler.stats()["membership"]
    assert told["given_by_leavers"] > 10 and told["leaving"] == {"w3": 0}
    moved = [move["moved_at"] for move in told["moves"]]
    assert moved == sorted(moved) and moved[-1] <= 100.0 + seconds + 1.0


def test_what_a_leaver_gave_away_goes_to_those_it_was_given_to() -> None:
    """Of the first requests that come for each prefix after the drain, 9 of 10 meet others of their kind."""
    requests = tools(180.0, 24.0)
    result, _ = run(requests, 8, WorkerDrain(100.0, "w3"))
    groups = np.array([request.group for request in requests.requests])
    before = (result.worker == 3) & (result.arrival_seconds < 100.0)
    hot = [group for group, count in Counter(groups[before].tolist()).items() if count >= 3]
    homes = [
        Counter(result.worker[(groups == group) & (result.arrival_seconds >= 100.0)].tolist()).most_common(1)[0][1]
        / max(((groups == group) & (result.arrival_seconds >= 100.0)).sum(), 1)
        for group in hot
        if ((groups == group) & (result.arrival_seconds >= 100.0)).sum() > 1
    ]
    assert len(homes) > 10 and np.mean(homes) >= 0.9, homes


# --- deaths and restarts ----------------------------------------------------------------------------------------------


def test_a_restarted_worker_gets_no_request_on_the_strength_of_its_old_cache() -> None:
    """It dies with its cache and is back after two seconds. Until a prefix has been asked for there again, nobody
    counts on more of it than the system prompt that all have in common."""
    requests = tools(160.0, 16.0, groups=400)
    faults = (WorkerDeath(100.0, "w1", 1.0), WorkerJoin(102.0, WorkerSpec("w1", kv_capacity_tokens=A6000_KV_TOKENS)))
    result, _ = run(requests, 4, *faults)
    groups = [request.group for request in requests.requests]
    before = {groups[row] for row in np.flatnonzero(result.worker == 1)}
    mine, met = np.flatnonzero(result.worker == 4), set[str]()
    assert result.workers[1] == result.workers[4] == "w1" and len(mine) > 10 and len(before) > 50
    for row in mine.tolist():
        counted_on = result.placed_tokens[row]
        assert groups[row] in met or counted_on <= COMMON_TOKENS + ALIKE_TOKENS, "it cannot have that"
        met.add(groups[row])
    assert (result.outcome == FINISHED).all()


def test_the_death_of_the_worker_with_the_most_loaded_prefix_loses_no_request() -> None:
    """A third of all requests have one prefix. Its worker dies: they go on elsewhere, together, and each one ends."""
    requests = tools(150.0, 20.0, groups=60, zipf=1.1)
    groups = np.array([request.group for request in requests.requests])
    hottest = Counter(groups.tolist()).most_common(1)[0][0]
    undisturbed, _ = run(requests, 4)
    early = (groups == hottest) & (undisturbed.arrival_seconds < 80.0)
    victim = int(np.bincount(undisturbed.worker[early]).argmax())
    result, _ = run(requests, 4, WorkerDeath(80.0, f"w{victim}", 1.0))
    assert (result.outcome == FINISHED).all() and result.counts["resumed"] > 0
    late = (groups == hottest) & (result.arrival_seconds > 82.0)
    homes = Counter(result.worker[late].tolist())
    assert victim not in homes
    reused = result.cached_tokens[late].sum() / result.prompt_tokens[late].sum()
    assert late.sum() > 100 and reused > 0.6, (homes, reused)


def test_eight_siblings_of_a_cold_prompt_land_on_few_workers() -> None:
    """Samples of one prompt arrive at one moment, before anything of it is computed; the fleet is at work. Two or three
    of eight workers compute it, since eight decode slower in one place than on two."""
    background = tools(60.0, 16.0)
    new = workloads.generate("toolbench", requests=1, groups=1, seed=99).requests[0]
    samples = [replace(new, request_id=f"sample-{i}", arrival_seconds=40.0) for i in range(8)]
    result, _ = run(Workload("siblings", (*background.requests, *samples)), 8)
    rows = [row for row, name in enumerate(result.request_ids) if name.startswith("sample-")]
    assert len(rows) == 8 and len(set(result.worker[rows].tolist())) <= 3
