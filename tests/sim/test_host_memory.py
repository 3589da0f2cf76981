"""Fleets whose engines keep host memory behind the GPU's, and what schedulers make of it."""

from __future__ import annotations

import numpy as np
import pytest

from preble import LocalConfig, SchedulerConfig, sim, workloads
from preble.errors import InvalidConfig
from preble.sim import SimConfig
from preble.sim.results import Result
from tests.support.sim import check

HOST = {"host_tokens": 400_000, "host_token_seconds": 1e-5}


def fleet(**more: object) -> SimConfig:
    """Engines whose GPU memory holds some of the documents asked about."""
    local = LocalConfig(60_000, max_running=64, max_waiting=10**6, eviction="lru", short_first=False)
    return SimConfig(workers=4, local=local, **more)  # type: ignore[arg-type]


def run(config: SimConfig, seed: int = 0, rps: float = 1.0) -> Result:
    made = workloads.generate("loogle", requests=160, groups=16, seed=seed)
    workload = workloads.poisson(made, rps=rps, seed=seed)
    simulation = sim.Simulation(workload, config, None)
    result = simulation.run()
    check(result, simulation, config)
    return result


def test_host_memory_saves_what_was_computed_before() -> None:
    without, behind = run(fleet()), run(fleet(**HOST))
    assert behind.cached_tokens.sum() > 1.2 * without.cached_tokens.sum()
    assert behind.ttft_seconds.mean() < 0.8 * without.ttft_seconds.mean()


def test_a_fleet_without_host_memory_is_as_it_was() -> None:
    """Whatever is said of it."""
    plain = run(fleet()).trace_hash
    assert run(fleet(host_reports="kept")).trace_hash == plain
    assert run(fleet(scheduler=SchedulerConfig(host_token_seconds=1.0))).trace_hash == plain


def test_the_same_run_twice() -> None:
    assert run(fleet(**HOST)).trace_hash == run(fleet(**HOST)).trace_hash


@pytest.mark.parametrize("reports", ["media", "none"])
def test_schedulers_know_what_must_be_loaded(reports: str) -> None:
    """By events, or by what fits where nobody reports."""
    found = run(fleet(**HOST, host_reports=reports))
    done = found.cached_tokens >= 0
    assert np.abs(found.placed_tokens - found.cached_tokens)[done].mean() < 0.1 * found.prompt_tokens.mean()
    workers = found.scheduler_stats["workers"].values()
    assert sum(worker["away_tokens"] for worker in workers) > 0


def test_the_link_is_learned() -> None:
    """Stated four times too slow, where engines load beside computing: it comes down."""
    config = SchedulerConfig(host_token_seconds=8e-5)
    found = run(fleet(host_tokens=400_000, host_token_seconds=2e-5, scheduler=config), rps=0.5)
    seconds = [worker["host_token_seconds"] for worker in found.scheduler_stats["workers"].values()]
    assert np.mean(seconds) < 6e-5


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="host_reports"):
        SimConfig(host_reports="all")  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="host_tokens"):
        SimConfig(host_tokens=-1)
