"""What E2 would have made of traffic that went round robin: runs of the real scheduler on simulated engines."""

from __future__ import annotations

import math

import numpy as np
import pytest

from preble import WorkerSpec
from preble.cli.audit.ledger import Unit
from preble.cli.audit.requests import SeenRequest
from preble.cli.audit.what_if import (
    AuditedFleet,
    EngineSpeed,
    ratio_of_means,
    slowness_of,
    speed_of,
    traffic_of,
    what_if,
)
from preble.transport.engine_servers.served_totals import ServedTotals, Total

SPEED = EngineSpeed(0.01, 1e-4)


def fleet(workers: int) -> AuditedFleet:
    specs = {rank: WorkerSpec(f"s{rank}", 20_000, 16, SPEED.model(1.0)) for rank in range(workers)}
    return AuditedFleet(specs, SPEED, frozenset({"sglang"}))


def document(number: int, units: int = 100) -> Unit:
    last = None
    for place in range(units):
        last = Unit(1000 * number + place, last, 16 * (place + 1), b"")
    assert last is not None
    return last


def round_robin(workers: int, documents: int, count: int, rps: float) -> list[SeenRequest]:
    """Questions about documents of 1,600 tokens, each to the next server."""
    rng = np.random.default_rng(0)
    ends = [document(number) for number in range(documents)]
    times = np.cumsum(rng.exponential(1.0 / rps, count))
    return [
        SeenRequest(row % workers, float(at), ends[int(rng.integers(documents))], 1600, 0, 8)
        for row, at in enumerate(times)
    ]


def test_documents_that_went_round_robin_would_have_been_computed_less() -> None:
    """Twenty documents in caches of 12 each: each server meets all of them, and forgets."""
    engines = fleet(2)
    traffic = traffic_of(round_robin(2, 20, 300, 6.0), engines, {}, 16, 0.0)
    found = what_if(traffic, engines)
    assert found is not None and found.replayed == 300
    assert found.computed_ratio < 0.5 and found.ttft_ratio.high < 0.8
    assert found.ttft_ratio.low < found.ttft_ratio.value < found.ttft_ratio.high
    assert what_if(traffic, engines) == found, "the same again"


def test_one_server_is_as_it_was() -> None:
    engines = fleet(1)
    found = what_if(traffic_of(round_robin(1, 5, 60, 3.0), engines, {}, 16, 0.0), engines)
    assert found is not None and found.workers_enough == 1
    assert found.ttft_ratio.value == pytest.approx(1.0) and found.computed_ratio == pytest.approx(1.0)


def test_what_was_cached_before_comes_first_and_is_not_counted() -> None:
    engines = fleet(2)
    held = {0: [document(0), document(1)], 1: [document(2)]}
    traffic = traffic_of(round_robin(2, 3, 20, 3.0), engines, held, 16, 0.0)
    assert traffic.before == 3 and len(traffic.workload) == 23
    assert [traffic.servers[f"r{row}"] for row in range(3)].count("s0") == 2
    first = traffic.workload.requests[3]
    assert first.arrival_seconds >= max(one.arrival_seconds for one in traffic.workload.requests[:3])
    assert first.prompt_tokens == 1608, "and half a unit of its own"
    found = what_if(traffic, engines)
    assert found is not None and found.replayed == 20
    assert what_if(traffic_of([], engines, held, 16, 0.0), engines) is None


def test_the_speed_is_what_the_metrics_say() -> None:
    served = ServedTotals(
        prefill=Total(20.0, 100), computed=Total(100_000, 100), ttft=Total(24.0, 100), queue=Total(1.0, 100),
        token=Total(50.0, 1000), buckets={"token": {0.04: 1000.0}},
    )  # fmt: skip
    found = speed_of(served)
    assert found == EngineSpeed(pytest.approx(0.02), pytest.approx(0.18 / 1000), pytest.approx(0.03))
    # Prompts computed in one batch once made a token as many times too dear.
    assert speed_of(served, 5.0).token == pytest.approx((5.0 / 100 - 0.02) / 1000)
    assert speed_of(ServedTotals()).token > 0.0, "without metrics, a model of a large engine"
    slow = ServedTotals(prefill=Total(40.0, 100), computed=Total(100_000, 100))
    assert slowness_of(slow, served) == pytest.approx(2.0) and slowness_of(served, served) == 1.0
    assert slowness_of(None, served) == 1.0


def test_an_interval_of_equal_times_is_a_point_and_of_none_is_unknown() -> None:
    one = ratio_of_means(np.full(50, 0.2), np.full(50, 0.4))
    assert (one.value, one.low, one.high) == pytest.approx((0.5, 0.5, 0.5))
    assert math.isnan(ratio_of_means(np.full(5, np.nan), np.ones(5)).value)
