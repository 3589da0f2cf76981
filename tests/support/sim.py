"""Small workloads and a cost model that one can calculate with, for the tests of the simulator. Owns no test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from preble import CostModel, LocalConfig, sim
from preble.sim.results import CUT_OFF, FINISHED, UNFINISHED, Result
from preble.sim.worker import SimWorker
from preble.workloads import PromptRequest, Workload

# An iteration takes 10 ms and a millisecond a token, wherever the tokens stand.
PLAIN = CostModel([(0, 0.010), (1000, 1.010)], name="plain")


def tokens(count: int, first: int = 0) -> npt.NDArray[np.int32]:
    """Token ids `first`, `first` + 1, ..."""
    return np.arange(first, first + count, dtype=np.int32)


def asked(name: str, at: float, *parts: Any, out: int = 2, **more: Any) -> PromptRequest:
    """A request for `out` tokens at a moment. A part is an array, or a number of tokens unlike all other parts'."""
    arrays = [
        tokens(part, 1_000_000 + 1000 * sum(map(ord, f"{name}/{i}"))) if isinstance(part, int) else part
        for i, part in enumerate(parts)
    ]
    return PromptRequest(name, tuple(arrays), out, arrival_seconds=at, **more)


def workload(*requests: PromptRequest) -> Workload:
    """These requests."""
    return Workload("test", requests)


def config(**more: Any) -> sim.SimConfig:
    """One worker with a plain cost model and room for everything, unless configured otherwise."""
    local = {"kv_capacity_tokens": 100_000, **more.pop("local", {})}
    return sim.SimConfig(**{"workers": 1, "cost_model": PLAIN, "local": LocalConfig(**local), **more})


def tools(count: int, *, groups: int = 6, rps: float = 20.0, seed: int = 0) -> Workload:
    """Requests that share one of a few long prefixes each, at random moments."""
    rng = np.random.default_rng(seed)
    prefixes = [tokens(int(rng.integers(100, 400)), 10_000 * (g + 1)) for g in range(groups)]
    moments = np.cumsum(rng.exponential(1 / rps, count))
    requests = []
    for i, moment in enumerate(moments):
        prefix, suffix = prefixes[int(rng.integers(groups))], tokens(int(rng.integers(10, 60)), 1_000_000 + 100 * i)
        requests.append(asked(f"r{i}", float(moment), prefix, suffix, out=int(rng.integers(1, 30))))
    return Workload("tools", requests)


def run(requests: Workload | Sequence[PromptRequest], settings: sim.SimConfig) -> tuple[Result, sim.Simulation]:
    """Simulate, check all bookings, and return what was found and the simulation itself."""
    requests = requests if isinstance(requests, Workload) else workload(*requests)
    simulation = sim.Simulation(requests, settings, None)
    result = simulation.run()
    check(result, simulation, settings)
    return result, simulation


def check(result: Result, simulation: sim.Simulation, settings: sim.SimConfig) -> None:
    """What is true of every run, whatever happened in it."""
    simulation.scheduler.check()
    for worker in simulation.workers:
        worker.engine.scheduler.check()
        check_work(result, worker)
    finished, placed = result.outcome == FINISHED, result.worker >= 0
    assert result.counts["iterations"] == sum(worker.iterations for worker in simulation.workers)
    assert (~np.isnan(result.finish_seconds) == finished).all()
    assert (result.arrival_seconds[finished] <= result.first_token_seconds[finished]).all()
    assert (result.first_token_seconds[finished] <= result.finish_seconds[finished]).all()
    assert (result.cached_tokens < result.prompt_tokens).all()
    assert placed[finished].all() and not placed[result.outcome == CUT_OFF].any()
    assert (result.busy_seconds >= 0.0).all()
    if settings.until_seconds == float("inf"):
        assert not (result.outcome == UNFINISHED).any()
        check_quiet(simulation)


def check_work(result: Result, worker: SimWorker) -> None:
    """Every token of a prompt was either cached or computed, once, and every token of an output but the last computed.

    Not so where a worker died or memory ran out: then some are computed again.
    """
    found = worker.engine.scheduler.stats()
    if result.counts["resumed"] or found["preempted"] or found["cancelled"] or found["running"] or found["waiting"]:
        return
    outputs = int(result.output_tokens[result.worker == worker.number].sum())
    assert found["admitted"] == found["finished"]
    missed = found["prompt_tokens"] - found["cached_tokens"]
    assert found["computed_tokens"] == missed + outputs - found["finished"]


def check_quiet(simulation: sim.Simulation) -> None:
    """Everything has ended: no bookings are open, no engine has anything to do."""
    found = simulation.scheduler.stats()
    assert found["live_requests"] == 0
    for books in found["workers"].values():
        assert (books["live_requests"], books["waiting_requests"], books["live_output_tokens"]) == (0, 0, 0)
        assert books["waiting_prefill_seconds"] == 0.0
    for worker in simulation.workers:
        load = worker.engine.load()
        assert (load.running, load.waiting, load.kv_used_tokens) == (0, 0, 0)
