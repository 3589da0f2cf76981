"""The simulator on small random workloads, fleets and faults: what must hold whatever happens. Owns no hand-made run.

`support.sim.check` says what: every request ends once, no token is computed twice, all bookings return to zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from preble import SchedulerConfig, WorkerSpec, sim
from preble.policies.base import POLICIES
from preble.sim.results import CUT_OFF, FINISHED, REFUSED
from preble.workloads import Workload
from tests.support.sim import PLAIN, asked, config, run, tokens, workload

moments = st.integers(0, 60).map(lambda n: n / 20)
short_times = st.sampled_from([0.0, 0.004, 0.05, 0.4])


@st.composite
def workloads(draw: Any) -> Workload:
    """Up to 25 requests with prefixes in common; some wait for one before them."""
    requests = []
    for i in range(draw(st.integers(1, 25))):
        prefix = tokens(draw(st.sampled_from([20, 60, 120])), 10_000 * draw(st.integers(1, 3)))
        after = draw(st.none() | st.integers(0, i - 1)) if i else None
        requests.append(
            asked(
                f"r{i}",
                draw(moments),
                prefix,
                draw(st.integers(1, 60)),
                out=draw(st.integers(1, 40)),
                after=None if after is None else f"r{after}",
                pause_seconds=draw(short_times),
            )  # fmt: skip
        )
    return workload(*requests)


@st.composite
def fleets(draw: Any) -> sim.SimConfig:
    """Up to four workers, of which w0 stays; the others may die, drain or come back."""
    workers = draw(st.integers(1, 4))
    faults: list[Any] = []
    for i in range(1, workers):
        at, noticed = draw(moments), draw(short_times)
        kind = draw(st.sampled_from(["stays", "dies", "drains", "returns"]))
        if kind in ("dies", "returns"):
            faults.append(sim.WorkerDeath(at, f"w{i}", noticed))
        if kind == "returns":
            faults.append(sim.WorkerJoin(at + noticed + 0.1, WorkerSpec(f"w{i}", draw(st.integers(150, 400)))))
        if kind == "drains":
            faults.append(sim.WorkerDrain(at, f"w{i}"))
    if draw(st.booleans()):
        faults.append(sim.WorkerJoin(draw(moments), WorkerSpec("new", draw(st.integers(150, 400)), cost_model=PLAIN)))
    local = {
        "kv_capacity_tokens": draw(st.sampled_from([150, 230, 1000])),
        "token_budget": draw(st.sampled_from([16, 64, 512])),
        "max_running": draw(st.sampled_from([1, 3, 64])),
        "max_waiting": draw(st.sampled_from([2, 1000])),
        "order": draw(st.sampled_from(["priority", "fcfs", "longest_prefix"])),
        "chunked_prefill": draw(st.booleans()),
    }
    return config(
        workers=workers,
        policy=draw(st.sampled_from(POLICIES)),
        local=local,
        scheduler=SchedulerConfig(live_requests_max=draw(st.sampled_from([4, 1000]))),
        seed=draw(st.integers(0, 3)),
        step_seconds=draw(short_times),
        step_seconds_per_request=draw(st.sampled_from([0.0, 0.001])),
        network_seconds=draw(short_times),
        event_delay_seconds=draw(short_times),
        event_loss=draw(st.sampled_from([0.0, 0.5, 1.0])),
        faults=tuple(faults),
        until_seconds=draw(st.sampled_from([float("inf"), 0.7, 2.0])),
    )


@given(workloads(), fleets())
def test_whatever_happens(requests: Workload, settings: sim.SimConfig) -> None:
    result, _ = run(requests, settings)
    finished = result.outcome == FINISHED
    asked_for = np.array([request.output_tokens for request in requests.requests])
    short = finished & (result.output_tokens < asked_for)
    assert (result.output_tokens <= asked_for).all()
    assert int(short.sum()) == result.counts["truncated"]
    rows = {name: row for row, name in enumerate(result.request_ids)}
    for row, request in enumerate(requests.requests):
        if request.after is not None:
            before = rows[request.after]
            if result.outcome[row] == CUT_OFF:
                assert result.outcome[before] in (REFUSED, CUT_OFF)
            elif not np.isnan(result.arrival_seconds[row]):
                due = result.finish_seconds[before] + request.pause_seconds
                assert result.arrival_seconds[row] == max(due, request.arrival_seconds)
        elif not np.isnan(result.arrival_seconds[row]):
            assert result.arrival_seconds[row] == request.arrival_seconds
    assert sim.simulate(requests, settings).trace_hash == result.trace_hash
