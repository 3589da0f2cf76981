"""What an audit claims of E2, judged by fleets whose truth is known: simulated servers whose events and metrics say no
more than real ones' do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from preble import CostModel, LocalConfig, WorkerSpec, sim, workloads
from preble.cli.audit.ledger import Unit
from preble.cli.audit.requests import Counted, SeenRequest
from preble.cli.audit.traffic import EngineSpeed, RankTraffic, ServerTraffic, prompt_token_seconds, speed_of, traffic_of
from preble.cli.audit.what_if import WhatIf, what_if
from preble.recording import RecordedWorker
from preble.sim.replay import Estimate95
from preble.sim.results import Result
from preble.transport.engine_servers.served_totals import ServedTotals, Total
from preble.workloads import PromptRequest, Workload

UNIT = 16
DOCUMENTS, DOCUMENT_UNITS, OWN_UNITS = 20, 60, 3
CAPACITY = 13_000
TRUTH = CostModel([(0, 0.012), (256, 0.04), (8192, 1.1)], context=(0, 0, 0, 3e-7))
POLL_SECONDS = 2.0


def unit(number: int, places: int, after: Unit | None = None) -> Unit:
    """A prefix, or what follows one."""
    last, start = after, after.end if after is not None else 0
    for place in range(places):
        last = Unit(1 + 10_000 * (number + 1) + place, last, start + UNIT * (place + 1), b"")
    assert last is not None
    return last


DOCUMENT_ENDS = [unit(number, DOCUMENT_UNITS) for number in range(DOCUMENTS)]


@cache
def asked(rps: float, count: int = 150) -> tuple[Workload, tuple[int, ...]]:
    """Questions about documents of 960 tokens, each with 48 tokens of its own; and which documents."""
    rng = np.random.default_rng(5)
    chosen = tuple(int(one) for one in rng.integers(DOCUMENTS, size=count))
    made = []
    for row, document in enumerate(chosen):
        parts = [np.arange(first, first + size, dtype=np.int32) for first, size in
                 ((100_000 * document, UNIT * DOCUMENT_UNITS), (10**8 + 1000 * row, UNIT * OWN_UNITS))]  # fmt: skip
        made.append(PromptRequest(f"r{row}", tuple(parts), int(rng.integers(4, 12))))
    return workloads.poisson(Workload("questions", made), rps, 4), chosen


def really(policy: str, rps: float, way: float = 0.0, workers: int = 2) -> Result:
    """What these servers do under a policy. `way`: seconds of each request beside its engine."""
    local = LocalConfig(CAPACITY, token_budget=8192, chunked_prefill=False, order="fcfs", eviction="lru",
                        min_shared_tokens=0, max_running=32, max_waiting=10**6)  # fmt: skip
    specs = tuple(WorkerSpec(f"s{number}", CAPACITY) for number in range(workers))
    scheduler = replace(sim.SimConfig().scheduler, calibrate=True)
    return sim.simulate(
        asked(rps)[0],
        sim.SimConfig(workers=specs, policy=policy, cost_model=TRUTH, local=local, network_seconds=way,
                      scheduler=scheduler),
    )  # fmt: skip


def total(values: np.ndarray) -> Total:
    return Total(float(values.sum()), float(len(values)))


def audited(result: Result, rps: float, way: float = 0.0) -> list[ServerTraffic]:
    """What its events and metrics say of a run."""
    chosen = asked(rps)[1]
    found = []
    for number, name in enumerate(result.workers):
        rows = np.flatnonzero(result.worker == number)
        first, ttft = result.first_token_seconds[rows], result.ttft_seconds[rows]
        missed = (result.prompt_tokens - result.cached_tokens)[rows]
        seen = [
            SeenRequest(
                number,
                float(result.first_token_seconds[row]),
                unit(1000 + int(row), OWN_UNITS, DOCUMENT_ENDS[chosen[row]]),
                int(result.prompt_tokens[row]),
                int(result.prompt_tokens[row] - result.cached_tokens[row]),
                int(result.output_tokens[row]),
                end_seconds=float(result.finish_seconds[row]),
            )
            for row in rows
        ]
        moments = np.arange(0.0, float(np.nanmax(result.finish_seconds)) + 2 * POLL_SECONDS, POLL_SECONDS)
        counted = []
        for start, end in pairwise(moments.tolist()):
            own = (first > start) & (first <= end)
            counted.append(Counted(start, end, float(own.sum()), float(own.sum()), float(ttft[own].sum())))
        decoded = (result.finish_seconds - result.first_token_seconds)[rows] / (result.output_tokens[rows] - 1)
        bounds = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 8.0)
        served = ServedTotals(
            prompt=total(result.prompt_tokens[rows]), computed=total(missed), output=total(result.output_tokens[rows]),
            ttft=total(ttft), latency=total(result.latency_seconds[rows]), token=total(decoded),
            queue=total(0.3 * (ttft - way)),
            prefill=total(0.7 * (ttft - way)),  # as engines count it: with the others of a batch
            buckets={"ttft": {bound: float((ttft <= bound).sum()) for bound in bounds},
                     "token": {bound: float((decoded <= bound).sum()) for bound in bounds}},
        )  # fmt: skip
        worker = RecordedWorker(id=name, kv_capacity_tokens=CAPACITY, block_size=UNIT, max_running=32, engine="sglang")
        speed = speed_of(served, float(np.nanmax(result.finish_seconds)))
        found.append(ServerTraffic([RankTraffic(worker, seen)], speed, served, counted))
    return found


def found_of(result: Result, rps: float, way: float = 0.0) -> WhatIf:
    found = what_if(audited(result, rps, way), UNIT, 60.0, lambda _: None)
    assert found is not None
    return found


def ratio(of: Result, over: Result) -> float:
    return float(np.nanmean(of.ttft_seconds) / np.nanmean(over.ttft_seconds))


def test_what_it_claims_is_what_e2_then_does() -> None:
    was = really("round_robin", 5.0)
    found = found_of(was, 5.0)
    assert found.error is not None and abs(found.error) < 0.1 and found.claims_ttft
    assert found.ttft_ratio.low <= found.ttft_ratio.value <= found.ttft_ratio.high
    assert found.ttft_ratio.value == pytest.approx(ratio(really("e2", 5.0), was), abs=0.15)
    assert found.computed_ratio.value < 0.75 and found.replayed == 150 and found.fitted_to == 150
    assert found.workers == 2 and found.workers_enough in (1, 2)


def test_a_way_that_no_policy_shortens_is_not_taken_for_prefill() -> None:
    """An audit once multiplied all of the measured time by the ratio of the engines' share: 0.46, and 0.91 came."""
    was = really("round_robin", 3.0, way=0.5)
    found = found_of(was, 3.0, 0.5)
    truth = ratio(really("e2", 3.0, way=0.5), was)
    assert truth > 0.75, "most of the time is the way"
    assert found.ttft_ratio.value == pytest.approx(truth, abs=0.1)


def test_nothing_is_claimed_that_the_models_own_error_could_be() -> None:
    known = Estimate95(0.80, 0.70, 0.90)
    made = WhatIf(100, 100, 1.0, 2.0, 0.1, 0.05, 0.3, known, known, known, 4, None)
    assert made.claims_ttft and not made.claims_p99, "the error of the 99th percentile is larger than its change"
    assert not replace(made, error=-0.25).claims_ttft
    assert not replace(made, error_apart=0.25).claims_ttft, "where nothing was fitted it is"
    assert not replace(made, error=None).claims_ttft, "nothing was measured"
    assert replace(made, error_apart=None, p99_error=-0.1).claims_p99


def test_servers_that_measure_nothing_are_replayed_and_nothing_is_claimed_of_time() -> None:
    servers = audited(really("round_robin", 5.0), 5.0)
    for server in servers:
        server.served, server.counted, server.speed = None, (), speed_of(ServedTotals())
    found = what_if(servers, UNIT, 60.0, lambda _: None)
    assert found is not None and found.fitted_to == 0
    assert found.error is None and not found.claims_ttft and found.workers_enough is None
    assert found.computed_ratio.value < 0.8
    assert what_if([], UNIT, 60.0, lambda _: None) is None


# --- the recording ----------------------------------------------------------------------------------------------------


def server(seen: Sequence[SeenRequest], held: Sequence[Unit] = (), **more: object) -> ServerTraffic:
    worker = RecordedWorker(id="s", kv_capacity_tokens=20_000, block_size=UNIT, engine="sglang")
    made = ServerTraffic([RankTraffic(worker, seen, held)], EngineSpeed(0.01, 1e-4), None)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_times_add_up_to_what_the_server_measured() -> None:
    rng = np.random.default_rng(0)
    seen = [
        SeenRequest(0, float(at), DOCUMENT_ENDS[row % 5], 960, 960, 6)
        for row, at in enumerate(np.sort(rng.uniform(1.0, 40.0, 80)))
    ]
    counted = []
    for start in range(0, 40, 2):
        own = sum(start < one.seconds <= start + 2 for one in seen)
        counted.append(Counted(float(start), start + 2.0, own, own, own * (0.2 + 0.01 * start)))
    served = ServedTotals(ttft=Total(sum(one.ttft_seconds for one in counted), 80), latency=Total(80 * 0.9, 80),
                          output=Total(480, 80))  # fmt: skip
    traffic = traffic_of([server(seen, served=served, counted=counted)], UNIT)
    assert traffic is not None
    requests = traffic.recording.requests
    assert len(requests) == 80 and sum(len(rows) for rows in traffic.together) > 70
    assert np.mean([one.ttft_seconds for one in requests]) == pytest.approx(served.ttft.sum / 80, rel=0.1)
    for rows in traffic.together:
        mean = np.mean([requests[row].ttft_seconds for row in rows])
        ends = [requests[row].first_token_seconds for row in rows]
        assert len(rows) >= 8 and 0.2 <= mean <= 0.6 and max(ends) - min(ends) < 12.0
    late = [np.mean([requests[row].ttft_seconds for row in rows]) for rows in traffic.together]
    assert late[-1] > late[0] + 0.2, "as it was measured"
    assert np.mean([one.latency_seconds for one in requests]) == pytest.approx(0.9, rel=0.1)


def test_prompts_of_one_iteration_came_while_the_one_before_ran() -> None:
    seen = [SeenRequest(0, at, DOCUMENT_ENDS[row], 960, 960, 4) for row, at in enumerate((1.0, 1.2, 1.2, 5.0))]
    traffic = traffic_of([server(seen)], UNIT)
    assert traffic is not None
    one, two, three, last = (request.ttft_seconds for request in traffic.recording.requests)
    assert one == pytest.approx(0.106 + 0.005) and last == pytest.approx(one), "nothing ran before them"
    assert 0.2 < three < two < 0.31, "they waited for the first"


def test_what_was_cached_before_comes_first_and_is_not_counted() -> None:
    seen = [SeenRequest(0, 1.0 + at, DOCUMENT_ENDS[0], 960, 16, 4) for at in range(5)]
    traffic = traffic_of([server(seen, held=[DOCUMENT_ENDS[0], DOCUMENT_ENDS[1]])], UNIT)
    assert traffic is not None
    requests = traffic.recording.requests
    assert [one.finished for one in requests] == [False, False, *[True] * 5]
    assert [one.prompt_tokens for one in requests[:3]] == [960, 960, 968], "and half a unit of its own"
    assert requests[0].blocks.tolist() == requests[2].blocks[:60].tolist()
    assert requests[2].arrival_seconds > requests[1].arrival_seconds + 0.1
    found = what_if([server(seen, held=[DOCUMENT_ENDS[0]])], UNIT, 60.0, lambda _: None)
    assert found is not None and found.replayed == 5 and found.computed_ratio.value == pytest.approx(1.0)


def test_an_unseen_request_waits_for_a_prompt_that_is_computed() -> None:
    seen = [SeenRequest(0, 2.0, DOCUMENT_ENDS[0], 960, 9600, 4)]
    unseen = [SeenRequest(0, at, DOCUMENT_ENDS[1], 960, 0, 4, is_seen=False) for at in (1.5, 5.0)]
    traffic = traffic_of([server([*seen, *unseen])], UNIT)
    assert traffic is not None
    _, waits, free = (one.ttft_seconds for one in traffic.recording.requests)
    assert (waits, free) == (pytest.approx(0.51), pytest.approx(0.01))


def test_the_speed_is_what_the_metrics_say() -> None:
    served = ServedTotals(
        prefill=Total(20.0, 100), computed=Total(100_000, 100), ttft=Total(24.0, 100), queue=Total(1.0, 100),
        token=Total(50.0, 1000), buckets={"token": {0.04: 1000.0}},
    )  # fmt: skip
    found = speed_of(served)
    assert found == EngineSpeed(pytest.approx(0.02), pytest.approx(0.18 / 1000), pytest.approx(0.03))
    # Prompts computed in one batch once made a token as many times too dear.
    assert speed_of(served, 5.0).token == pytest.approx((5.0 / 100 - 0.02) / 1000)
    assert speed_of(ServedTotals()).token > 0.0 and prompt_token_seconds(ServedTotals()) is None
    again = EngineSpeed.of(found.costs(), 2.0)
    assert (again.floor, again.token) == (pytest.approx(2 * (0.02 + 0.00018)), pytest.approx(2 * 0.18 / 1000))
