"""KV between simulated workers: what a pull takes and brings, who waits with it, and what deaths make of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from preble import CostModel, WorkerSpec
from preble.errors import InvalidConfig
from preble.sim import KvLink, SimConfig, Simulation, WorkerDeath, simulate
from preble.sim.bounds import lower_bounds
from preble.workloads import PromptRequest, Workload, generate, poisson

# 1 ms a token, 10 ms an iteration at least.
COST = CostModel([(0, 0.01), (10, 0.01), (1010, 1.01)], name="linear")
LINK = KvLink(latency_seconds=0.02, bytes_per_second=1e6, token_bytes=100, copy_byte_seconds=1e-8)
PREFIX = np.arange(1000, dtype=np.int32)


def request(name: str, at: float, *, prefix: int = 1000, tail: int = 10, output: int = 2) -> PromptRequest:
    """A prompt that begins with so much of the prefix."""
    own = np.arange(5000, 5000 + tail, dtype=np.int32) + 100 * sum(map(ord, name))
    return PromptRequest(name, (PREFIX[:prefix], own), output, arrival_seconds=at)


def run(*requests: PromptRequest, **config: Any) -> Any:
    """Round robin over two workers, so that every second request lacks what the first computed."""
    made = Workload("test", list(requests))
    return simulate(made, SimConfig(**{"workers": 2, "policy": "round_robin", "cost_model": COST, **config}))


def test_a_prefix_that_is_elsewhere_is_taken_over_in_the_time_of_the_link() -> None:
    found = run(request("a", 0.0), request("b", 5.0), kv_link=LINK)
    assert found.cached_tokens.tolist() == [0, 1000]
    # 20 ms, 100 kB at 1 MB/s, and the last ten tokens; the engine of b copied meanwhile.
    assert found.ttft_seconds[1] == pytest.approx(0.02 + 0.1 + 0.01, abs=0.003)
    assert found.scheduler_stats["pulls"]["moved_tokens"] == 1000
    assert run(request("a", 0.0), request("b", 5.0)).ttft_seconds[1] == pytest.approx(1.01, abs=0.01)


def test_what_costs_more_than_computing_is_computed() -> None:
    slow = replace(LINK, bytes_per_second=5e4)  # 2 s
    found = run(request("a", 0.0), request("b", 5.0), request("c", 10.0), request("d", 15.0), kv_link=slow)
    assert found.scheduler_stats["pulls"]["ended"] <= 1, "one, by the guess that a link is fast"
    assert found.ttft_seconds[1] < 2.1, "it waited as long as computing takes, at most"
    always = run(request("a", 0.0), request("b", 5.0), kv_link=replace(slow, least_tokens=0))
    assert always.scheduler_stats["pulls"]["asked"] == 1


def test_a_threshold_is_one() -> None:
    for least, pulls in ((1000, 1), (1001, 0)):
        found = run(request("a", 0.0), request("b", 5.0), kv_link=replace(LINK, least_tokens=least))
        assert found.scheduler_stats["pulls"]["ended"] == pulls


def test_links_carry_one_transfer_at_a_time_and_who_shares_the_prefix_waits_with_it() -> None:
    requests = [request("a", 0.0), *(request(f"b{n}", 5.0) for n in range(3)), request("c", 5.0, prefix=0, tail=20)]
    found = run(*requests, workers=2, kv_link=LINK)
    assert found.scheduler_stats["pulls"]["asked"] == 1, "round robin: a and b1 have it, b0 and b2 share one pull"
    assert found.cached_tokens.tolist()[1:4] == [1000, 1000, 1000]
    assert all(found.ttft_seconds[1:4] < 0.25)


def test_a_source_that_has_died_brings_nothing_and_nobody_waits_for_ever() -> None:
    death = WorkerDeath(4.9, "w0", noticed_after_seconds=50.0)
    found = run(request("a", 0.0), request("b", 5.0), kv_link=LINK, faults=(death,), until_seconds=30.0)
    assert found.cached_tokens.tolist() == [0, 0] and found.outcome.tolist() == [1, 1]
    assert found.ttft_seconds[1] < 1.2


def test_a_worker_that_dies_in_its_pull_gives_its_request_back() -> None:
    death = WorkerDeath(5.05, "w1", noticed_after_seconds=1.0)
    found = run(request("a", 0.0), request("b", 5.0), kv_link=LINK, faults=(death,))
    assert found.outcome.tolist() == [1, 1] and found.workers[found.worker[1]] == "w0"
    assert found.cached_tokens[1] == 1000


def test_a_request_that_is_placed_anew_waits_for_its_own_pull_and_not_for_the_one_before() -> None:
    """The old transfer's end took the new hold away, and the request was never sent: the simulation never ended."""
    slow = replace(LINK, bytes_per_second=8e4, least_tokens=0)
    death = WorkerDeath(5.1, "w2", noticed_after_seconds=0.1)
    requests = [request("a", 0.0), request("b", 5.0), request("c", 5.0)]
    found = run(*requests, workers=3, kv_link=slow, faults=(death,), until_seconds=60.0)
    assert found.outcome.tolist() == [1, 1, 1]
    assert found.scheduler_stats["live_requests"] == 0


def test_who_asks_too_late_for_what_is_not_there_gets_nothing() -> None:
    """A dead worker caches nothing, and the latency alone takes longer than the pull is worth."""
    short = [request("a", 0.0, prefix=60, tail=0), request("b", 1.0, prefix=60, tail=5)]
    link, death = KvLink(latency_seconds=0.5, least_tokens=0), WorkerDeath(0.5, "w0", 2.0)
    found = run(*short, kv_link=link, faults=(death,))
    assert found.outcome.tolist() == [1, 1] and found.cached_tokens[1] == 0
    assert found.scheduler_stats["pulls"]["asked"] == 1 and found.scheduler_stats["pulls"]["moved_tokens"] == 0


def test_an_idle_engine_stands_still_while_it_copies() -> None:
    copying = replace(LINK, copy_byte_seconds=5e-6)  # half a second for 1000 tokens
    found = run(request("a", 0.0), request("b", 5.0), kv_link=copying)
    assert found.scheduler_stats["pulls"]["moved_tokens"] == 1000
    assert found.ttft_seconds[1] == pytest.approx(0.02 + 0.1 + 0.5 + 0.01, abs=1e-6)


def test_who_holds_the_most_of_a_prefix_copies_only_what_it_lacks() -> None:
    copying = replace(LINK, copy_byte_seconds=5e-6, least_tokens=0)
    first = [request("a", 0.0), request("d", 0.0, prefix=900), request("e", 5.0, prefix=0, tail=20)]
    other = request("f", 5.0, prefix=0, tail=20, output=300)  # decodes at w1 while the rest of the prefix comes
    found = run(*first, other, request("g", 6.0, prefix=0, tail=20), request("b", 6.5), kv_link=copying)
    alone = run(*first, other, request("g", 6.0, prefix=0, tail=20), request("b", 6.5, prefix=900), kv_link=copying)
    assert found.scheduler_stats["pulls"]["moved_tokens"] == alone.scheduler_stats["pulls"]["moved_tokens"] + 100
    assert found.latency_seconds[3] - alone.latency_seconds[3] == pytest.approx(0.05, abs=0.011), "100 tokens, not 1000"


def test_a_run_under_memory_pressure_ends_every_request_and_is_the_same_again() -> None:
    made = poisson(generate("toolbench", requests=150, groups=12, seed=1), rps=30.0, seed=1)
    local = replace(SimConfig().local, kv_capacity_tokens=12_000)
    config = SimConfig(workers=3, policy="least_loaded", local=local, kv_link=KvLink(bytes_per_second=1e10))
    one, two = Simulation(made, config, None), Simulation(made, config, None)
    first, second = one.run(), two.run()
    assert (first.outcome == 1).all()
    assert first.scheduler_stats["pulls"]["moved_tokens"] > 1000
    assert np.array_equal(first.finish_seconds, second.finish_seconds)
    one.scheduler.check()
    for worker in one.workers:
        worker.engine.scheduler.check()
    assert first.scheduler_stats["live_requests"] == 0


def test_without_a_link_nothing_changes() -> None:
    made = poisson(generate("toolbench", requests=60, groups=8, seed=2), rps=20.0, seed=2)
    plain = simulate(made, SimConfig(workers=2))
    never = simulate(made, SimConfig(workers=2, kv_link=KvLink(least_tokens=2**31 - 1)))
    assert np.array_equal(plain.finish_seconds, never.finish_seconds)


@pytest.mark.parametrize("field", ["latency_seconds", "bytes_per_second", "copy_byte_seconds", "token_bytes"])
def test_a_wrong_link_is_named(field: str) -> None:
    with pytest.raises(InvalidConfig, match=f"KvLink.{field}"):
        KvLink(**{field: -1})
    with pytest.raises(InvalidConfig, match="kv_link"):
        SimConfig(kv_link="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("host_tokens", [0, 200_000])
def test_the_bounds_hold_for_pulls_and_host_memory(seed: int, host_tokens: int) -> None:
    """Links and loads that take next to no time: whoever asks for a prefix first computes it, and nobody else."""
    made = poisson(generate("loogle", requests=40, groups=8, seed=seed), rps=2.0, seed=seed)
    free = KvLink(latency_seconds=0.0, bytes_per_second=1e14, copy_byte_seconds=0.0, least_tokens=0)
    specs = tuple(WorkerSpec(name, kv_capacity_tokens=60_000) for name in "abc")
    tiers: dict[str, Any] = {"host_tokens": host_tokens, "host_token_seconds": 1e-9}
    found = simulate(made, SimConfig(workers=specs, policy="round_robin", kv_link=free, **tiers))
    assert found.scheduler_stats["pulls"]["moved_tokens"] > 0
    accounts: Any = found.scheduler_stats["workers"]
    assert any(one["host_loaded_tokens"] for one in accounts.values()) == bool(host_tokens)
    budget = SimConfig().local.token_budget
    least = lower_bounds(made.requests, CostModel.preset("mistral-7b/a6000"), 3, budget)
    assert found.ttft_seconds.mean() >= least.mean_ttft_seconds
    assert np.percentile(found.ttft_seconds, 99) >= least.p99_ttft_seconds
    assert found.latency_seconds.mean() >= least.mean_latency_seconds
    assert np.percentile(found.latency_seconds, 99) >= least.p99_latency_seconds
    assert found.cached_tokens.sum() <= least.hit_fraction_ceiling * sum(one.prompt_tokens for one in made.requests)
