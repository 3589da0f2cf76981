"""A replay: engines are learned from a recording, and what it says of other policies is what they would have done."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest

from preble import CostModel, LocalConfig, Recording, sim, workloads
from preble.errors import InvalidConfig, InvalidInput
from preble.recording import RecordedRequest, RecordedWorker
from preble.sim.engine_fit import EngineCosts, EngineModel, _Fit, _most_decoding, fit_engines
from preble.sim.replay import BLOCKS, FIGURES, ReplayAnswer, _Draws, fleet_of, replay, seen_before
from preble.workloads import PromptRequest, Workload
from tests.support.recording import recording_of

# Unlike the form that is fitted: it bends at 256 tokens, and attention begins late.
TRUTH = CostModel([(0, 0.010), (256, 0.012), (8192, 0.9)], context=(0, 0, 0, 2e-7), pair=(2e5, 0, 0, 0, 1e-9))
LOCAL = LocalConfig(8_000, max_running=64, max_waiting=10**6)


@cache
def traffic(rps: float = 8.0, requests: int = 300) -> Workload:
    """Questions about 12 documents, unequally often."""
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 30_000, int(rng.integers(200, 1200))).astype(np.int32) for _ in range(12)]
    asked = [
        PromptRequest(
            f"q{number}",
            (
                documents[int(12 * rng.random() ** 2)],
                rng.integers(0, 30_000, int(rng.integers(20, 120))).astype(np.int32),
            ),
            int(rng.integers(2, 16)),
        )
        for number in range(requests)
    ]
    return workloads.poisson(Workload("questions", asked), rps, 4)


def truth(policy: str, workers: int = 2, **more: Any) -> sim.SimConfig:
    """A fleet as it really is."""
    scheduler = dataclasses.replace(sim.SimConfig().scheduler, calibrate=True)
    values: dict[str, Any] = {"cost_model": "mistral-7b/a6000", "local": LOCAL, "scheduler": scheduler}
    names = [f"w{number}" for number in range(workers)]
    return sim.SimConfig(
        workers=workers, policy=policy, engine_cost_models=dict.fromkeys(names, TRUTH), **values, **more
    )


@cache
def recorded() -> Recording:
    """What round robin made of it."""
    config = truth("round_robin")
    return recording_of(traffic(), sim.simulate(traffic(), config), config)


@cache
def found() -> ReplayAnswer:
    """Its replay."""
    return replay(recorded(), ["round_robin", "e2"])


def test_the_model_of_the_engines_is_close_where_nothing_was_fitted_to() -> None:
    engines = found().engines
    assert engines.requests == 300
    assert abs(engines.error["mean_ttft_seconds"]) < 0.10
    assert abs(engines.error["mean_latency_seconds"]) < 0.05
    assert abs(engines.error["p99_latency_seconds"]) < 0.15
    assert abs(found().model_error["mean_ttft_seconds"]) < 0.05


def test_it_says_what_another_policy_would_have_done() -> None:
    for name, run in zip(("round_robin", "e2"), found().runs, strict=True):
        really = sim.simulate(traffic(), truth(name)).summary(0.1 * recorded().seconds)
        for figure, limit in (("mean_ttft_seconds", 0.10), ("mean_latency_seconds", 0.10), ("p99_ttft_seconds", 0.25)):
            assert getattr(run.figures, figure).value == pytest.approx(getattr(really, figure), rel=limit), figure
    one, other = (run.figures for run in found().runs)
    assert other.mean_ttft_seconds.value < one.mean_ttft_seconds.value
    assert other.recomputed_tokens.value < one.recomputed_tokens.value


def test_more_workers_are_like_the_first() -> None:
    more = replay(recorded(), ["round_robin"], workers=3, engines=found().engines)
    really = sim.simulate(traffic(), truth("round_robin", 3)).summary(0.1 * recorded().seconds)
    assert more.runs[0].figures.mean_ttft_seconds.value == pytest.approx(really.mean_ttft_seconds, rel=0.1)
    assert [worker.id for worker in fleet_of(recorded(), 4)] == ["w0", "w1", "worker-3", "worker-4"]
    assert [worker.id for worker in fleet_of(recorded(), 1)] == ["w0"]
    with pytest.raises(InvalidConfig, match="workers"):
        fleet_of(recorded(), 0)


def test_a_slower_worker_is_found() -> None:
    slow = CostModel([(0, 0.015), (256, 0.018), (8192, 1.35)], context=(0, 0, 0, 3e-7), pair=(2e5, 0, 0, 0, 1.5e-9))
    config = dataclasses.replace(truth("round_robin"), engine_cost_models={"w0": TRUTH, "w1": slow})
    few = traffic(requests=140)
    engines = fit_engines(recording_of(few, sim.simulate(few, config), config))
    assert engines.slowness["w1"] / engines.slowness["w0"] == pytest.approx(1.5, rel=0.2)
    assert abs(engines.error["mean_latency_seconds"]) < 0.15


def test_intervals_hold_their_figure_and_the_same_arguments_give_the_same_answer() -> None:
    for run in (found().measured, found().recorded, *(one.figures for one in found().runs)):
        assert run is not None
        for name in FIGURES:
            estimate = getattr(run, name)
            assert estimate.low <= estimate.value <= estimate.high, name
    again = replay(recorded(), ["round_robin", "e2"], engines=found().engines)
    assert again.as_dict() == found().as_dict()


def test_a_seed_each_makes_a_result_each() -> None:
    several = replay(recorded(), ["random"], engines=found().engines, seeds=(1, 2))
    assert len({result.trace_hash for result in several.runs[0].results}) == 2


def test_a_ratio_is_that_of_the_figures() -> None:
    recorded_ttft = found().recorded
    assert recorded_ttft is not None
    for run in found().runs:
        ratio = run.ratios["mean_ttft_seconds"]
        assert ratio.value == pytest.approx(run.figures.mean_ttft_seconds.value / recorded_ttft.mean_ttft_seconds.value)
        assert ratio.low <= ratio.value <= ratio.high
    same, other = (run.ratios["mean_ttft_seconds"] for run in found().runs)
    assert same.value == pytest.approx(1.0, abs=0.05) and other.high < 1.0
    assert found().runs[1].ratios["computed_tokens"].value < 1.0
    assert found().as_dict()["runs"][1]["over_recorded"]["mean_ttft_seconds"]["value"] == other.value


def test_draws_are_samples_of_stretches() -> None:
    """Percentiles and means of drawn stretches once were taken of copies, row by row: slow, and the same."""
    rng = np.random.default_rng(1)
    arrival = np.sort(rng.uniform(3.0, 50.0, 300))
    values = rng.lognormal(size=600)
    values[rng.integers(600, size=20)] = np.nan
    draws = _Draws(arrival)
    blocks = np.tile(draws._blocks, 2)
    for row in (0, 1, 7, 400):
        times = draws._times[row].astype(int)
        sample = np.concatenate([np.tile(values[blocks == block], times[block]) for block in range(BLOCKS)])
        sample = sample[~np.isnan(sample)]
        assert draws.p99(values)[row] == pytest.approx(np.percentile(sample, 99), rel=1e-12)
        assert draws.mean(values)[row] == pytest.approx(sample.mean()) and draws.total(values)[row] == pytest.approx(
            sample.sum()
        )
    assert np.isnan(draws.p99(np.full(300, np.nan))).all() and np.isnan(draws.mean(np.full(300, np.nan))).all()


def test_a_loaded_fleet_is_replayed_as_it_was() -> None:
    """Under load an engine that was fitted to groups alone was 58 % slower in the mean: queues make much of little."""
    config = truth("round_robin")
    loaded = traffic(rps=120.0, requests=240)
    recording = recording_of(loaded, sim.simulate(loaded, config), config)
    said = replay(recording, ["round_robin"])
    assert said.measured is not None and said.measured.mean_ttft_seconds.value > 0.05, "it queues"
    assert abs(said.model_error["mean_ttft_seconds"]) < 0.05
    assert abs(said.model_error["mean_latency_seconds"]) < 0.05
    assert abs(said.model_error["p99_ttft_seconds"]) < 0.25


def test_waits_for_an_engines_places_are_not_taken_for_time_on_the_way() -> None:
    """Regression: of an engine that does not say how many requests it runs at once, 256 were assumed. A request took
    0.2 s from router to engine, so it seemed, and the 99th percentile of TTFT was 77 % too low."""
    few = dataclasses.replace(truth("round_robin"), local=dataclasses.replace(LOCAL, max_running=4))
    loaded = traffic(rps=80.0, requests=160)
    recording = recording_of(loaded, sim.simulate(loaded, few), few)
    silent = tuple(dataclasses.replace(worker, max_running=None) for worker in recording.workers)
    engines = fit_engines(dataclasses.replace(recording, workers=silent))
    assert engines.local.max_running == 4
    assert engines.costs.hop < 0.01
    assert abs(engines.error["mean_ttft_seconds"]) < 0.15
    assert abs(engines.error["p99_ttft_seconds"]) < 0.15


def test_an_engine_with_room_keeps_its_places() -> None:
    """As many as ever decode are for moments only where nobody waits for a place."""
    silent = tuple(dataclasses.replace(worker, max_running=None) for worker in recorded().workers)
    assert _Fit(dataclasses.replace(recorded(), workers=silent), (), None).places() is None
    assert _most_decoding(*(np.array(times, np.float64) for times in ([0, 0, 0], [1, 1, 3], [3, 5, 6]))) == (3, 0.0)
    assert _most_decoding(*(np.array(times, np.float64) for times in ([0, 0, 0], [1, 1, 4], [3, 5, 6]))) == (2, 0.5)


def test_what_a_router_takes_is_taken_of_every_policy() -> None:
    recording = recorded()
    late = [one.later(1.0) for one in recording.requests]
    waited = [dataclasses.replace(one, arrival_seconds=one.arrival_seconds - 0.2) for one in late]
    engines = found().engines
    one, other = (
        replay(dataclasses.replace(recording, requests=tuple(requests)), ["round_robin"], engines=engines)
        for requests in (recording.requests, waited)
    )
    more = other.runs[0].figures.mean_ttft_seconds.value - one.runs[0].figures.mean_ttft_seconds.value
    assert more == pytest.approx(0.2, abs=0.05)


def request(at: float, *names: int, tokens: int | None = None) -> RecordedRequest:
    """A request with blocks of these names."""
    blocks = np.array(names, np.uint64)
    return RecordedRequest(arrival_seconds=at, prompt_tokens=tokens or 16 * len(names), blocks=blocks, output_tokens=1)


def test_tokens_computed_twice_are_those_that_an_earlier_request_had() -> None:
    requests = (
        request(0, 1, 2, 3),
        request(1, 1, 2, 4),
        request(2, 1, 2, 4),
        request(3, 5),
        request(4, 1, 9, tokens=20),
    )
    recording = Recording(workers=(RecordedWorker(id="a", kv_capacity_tokens=9),), requests=requests)
    assert seen_before(recording, range(5)).tolist() == [0, 32, 47, 0, 16]
    assert seen_before(recording, [2, 4]).tolist() == [0, 16]


def test_a_recording_without_times_or_workers_needs_a_model() -> None:
    requests = tuple(request(float(at), at % 3, 10 + at) for at in range(40))
    recording = Recording(workers=(RecordedWorker(id="a", kv_capacity_tokens=10_000),), requests=requests)
    with pytest.raises(InvalidInput, match="0 finished requests with their times"):
        replay(recording)
    engines = EngineModel(EngineCosts(0.01, 1e-3), LOCAL)
    said = replay(recording, engines=engines, workers=2)
    assert said.measured is None and said.recorded is None and said.model_error == {}
    assert said.runs[0].figures.requests == 36 and said.runs[0].not_finished == 0
    with pytest.raises(InvalidInput, match="no request that ran"):
        replay(dataclasses.replace(recording, requests=()))
