"""What each corrective of the paper brings where load shifts, and what one price makes of the same: the table of
docs/experiments/rebalancing.md, in the simulator. Owns the loads and what is printed; moves and copies are planned in
`preble/scheduling/rebalance_planner.py`.

    python -m benchmarks.scale.rebalancing --seeds 3

Simulated A6000 workers, six where nothing else is said. Mean / p99 seconds to the first token, and mean / p99 latency,
means over the seeds, on the same requests: by "e2"; by "e2-paper" with all correctives off, with each by itself, with
all; by round robin and least load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from benchmarks.common import facts
from preble import LocalConfig, SchedulerConfig, WorkerSpec, sim
from preble.sim.config import A6000_KV_TOKENS
from preble.workloads import PromptRequest, Workload, generate, poisson

OFF: dict[str, Any] = {"rebalance_ratio": 0.0, "replicas_max": 1, "imbalance_share": 1.0}
STAGES: dict[str, dict[str, Any]] = {
    "e2-paper": OFF,
    "and moves": {**OFF, "rebalance_ratio": 1.5},
    "and copies": {**OFF, "replicas_max": 8},
    "and IMBALR": {**OFF, "imbalance_share": 0.0},
    "and all": {"rebalance_ratio": 1.5, "replicas_max": 8, "imbalance_share": 0.0},
}
RULES = ("e2", *STAGES, "round_robin", "least_loaded")
VOCABULARY = 32_000
Scenario = tuple[list[PromptRequest], int, tuple[sim.WorkerJoin, ...]]


def ids(count: int, *seed: int) -> npt.NDArray[np.int32]:
    """Token ids that differ from those of any other seed."""
    return np.random.default_rng([7, *seed]).integers(0, VOCABULARY, count, dtype=np.int32)


def asks(
    number: int, prefix_tokens: int, rps: float, start: float, end: float, question: int, seed: int, output: int = 20
) -> Iterator[PromptRequest]:
    """Poisson requests for prefix `number`, each with a question of its own."""
    random = np.random.default_rng([8, number, seed])
    moments = start + np.cumsum(random.exponential(1 / rps, int(2 * rps * (end - start)) + 20))
    prefix = ids(prefix_tokens, number)
    for i, moment in enumerate(moments[moments < end]):
        yield PromptRequest(f"{number}/{i}", (prefix, ids(question, number, i)), output, arrival_seconds=float(moment))


def one_hot(seed: int) -> Scenario:
    """One prefix of 4,000 tokens at 27 requests a second for a minute."""
    return list(asks(0, 4000, 27.0, 0.0, 60.0, 800, seed)), 6, ()


def changing(seed: int) -> Scenario:
    """Every 30 s another prefix of 4,000 tokens, at 20 requests a second."""
    turns = [asks(turn, 4000, 20.0, 30.0 * turn, 30.0 * (turn + 1), 800, seed) for turn in range(3)]
    return [request for turn in turns for request in turn], 6, ()


def all_on_one(seed: int) -> Scenario:
    """Eight prefixes of 1,000 tokens that all began on one worker, just before another joins."""
    first = [
        PromptRequest(f"first{n}", (ids(1000, n), ids(10, n, 10**6)), 2, arrival_seconds=0.01 * n) for n in range(8)
    ]
    later = [request for n in range(8) for request in asks(n, 1000, 26.0 / 8, 1.5, 61.5, 400, seed)]
    return first + later, 1, (sim.WorkerJoin(1.0, WorkerSpec("w1", kv_capacity_tokens=A6000_KV_TOKENS)),)


def skewed_tools(seed: int) -> Scenario:
    """Tool prompts of Zipf 1.1 at 27 requests a second, four workers."""
    made = generate("toolbench", requests=2400, groups=320, seed=seed, zipf=1.1)
    return list(poisson(made, 27.0, seed + 1).requests), 4, ()


def long_answers(seed: int) -> Scenario:
    """Answers of 600 tokens to 60 s of short prompts at 12 requests a second, beside 4 a second of 3,000 new tokens."""
    answers = asks(0, 30, 12.0, 0.0, 60.0, 60, seed, output=600)
    prompts = asks(1, 30, 4.0, 0.0, 60.0, 3000, seed, output=10)
    return [*answers, *prompts], 6, ()


def measured(made: Scenario, rule: str) -> list[float]:
    """Mean and p99 seconds to the first token, and of latency."""
    requests, workers, joins = made
    config = sim.SimConfig(
        workers=workers,
        policy="e2-paper" if rule in STAGES else rule,
        scheduler=SchedulerConfig(**STAGES.get(rule, {})),
        local=LocalConfig(A6000_KV_TOKENS, max_running=256, max_waiting=10**6, eviction="lru", short_first=False),
        faults=joins,
    )
    ordered = sorted(requests, key=lambda request: request.arrival_seconds)
    summary = sim.simulate(Workload("shifts", ordered), config).summary()
    return [
        summary.mean_ttft_seconds,
        summary.p99_ttft_seconds,
        summary.mean_latency_seconds,
        summary.p99_latency_seconds,
    ]


def main(seeds: Annotated[int, typer.Option(min=1)] = 3) -> None:
    """Print the table."""
    scenarios: list[Callable[[int], Scenario]] = [one_hot, changing, all_on_one, skewed_tools, long_answers]
    print(f"{facts.commit()}, seeds 0 to {seeds - 1}, {facts.machine()}\n")
    print("| | |", " | ".join(RULES), "|")
    print("|---|---|" + "---|" * len(RULES))
    for scenario in scenarios:
        made = [scenario(seed) for seed in range(seeds)]
        found = {rule: np.mean([measured(one, rule) for one in made], axis=0) for rule in RULES}
        for name, at in (("TTFT", 0), ("latency", 2)):
            row = [f"{figures[at]:.3g} / {figures[at + 1]:.3g}" for figures in found.values()]
            print(f"| {(scenario.__doc__ or '').rstrip('.')} | {name} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
