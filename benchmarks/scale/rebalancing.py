"""What plans bring where load shifts: the table of docs/rebalancing.md, in the simulator. Owns the loads and what is
printed; the rule is `preble/scheduling/rebalance_planner.py`.

    python -m benchmarks.scale.rebalancing

Six simulated A6000 workers (in the last scenario one, and another that joins). Mean / p99 seconds to the first token,
and mean / p99 latency, on the same requests: by "e2"; by "e2-paper" without plans, with moves, with copies, with both;
by round robin and least load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from preble import LocalConfig, SchedulerConfig, WorkerSpec, sim
from preble.sim.config import A6000_KV_TOKENS
from preble.workloads import PromptRequest, Workload

PLANS = {
    "e2-paper": {"rebalance_ratio": 0.0, "replicas_max": 1},
    "and moves": {"rebalance_ratio": 1.5, "replicas_max": 1},
    "and copies": {"rebalance_ratio": 0.0, "replicas_max": 8},
    "and both": {"rebalance_ratio": 1.5, "replicas_max": 8},
}
RULES = ("e2", *PLANS, "round_robin", "least_loaded")
VOCABULARY = 32_000
Scenario = tuple[list[PromptRequest], int, tuple[sim.WorkerJoin, ...]]


def ids(count: int, *seed: int) -> npt.NDArray[np.int32]:
    """Token ids that differ from those of any other seed."""
    return np.random.default_rng([7, *seed]).integers(0, VOCABULARY, count, dtype=np.int32)


def asks(
    number: int, prefix_tokens: int, rps: float, start: float, end: float, question: int
) -> Iterator[PromptRequest]:
    """Poisson requests for prefix `number`, each with a question of its own."""
    random = np.random.default_rng([8, number])
    moments = start + np.cumsum(random.exponential(1 / rps, int(2 * rps * (end - start)) + 20))
    prefix = ids(prefix_tokens, number)
    for i, moment in enumerate(moments[moments < end]):
        yield PromptRequest(f"{number}/{i}", (prefix, ids(question, number, i)), 20, arrival_seconds=float(moment))


def one_hot() -> Scenario:
    """One prefix of 4,000 tokens at 27 requests a second for a minute."""
    return list(asks(0, 4000, 27.0, 0.0, 60.0, 800)), 6, ()


def changing() -> Scenario:
    """Every 30 s another prefix of 4,000 tokens, at 20 requests a second."""
    return [r for turn in range(3) for r in asks(turn, 4000, 20.0, 30.0 * turn, 30.0 * (turn + 1), 800)], 6, ()


def all_on_one() -> Scenario:
    """Eight prefixes of 1,000 tokens that all began on one worker, just before another joins."""
    first = [
        PromptRequest(f"first{n}", (ids(1000, n), ids(10, n, 10**6)), 2, arrival_seconds=0.01 * n) for n in range(8)
    ]
    later = [r for n in range(8) for r in asks(n, 1000, 26.0 / 8, 1.5, 61.5, 400)]
    return first + later, 1, (sim.WorkerJoin(1.0, WorkerSpec("w1", kv_capacity_tokens=A6000_KV_TOKENS)),)


def measured(made: Scenario, rule: str) -> list[str]:
    """Mean / p99 seconds to the first token, and of latency. Newcomers are given nothing, so that plans are what moves
    load."""
    requests, workers, joins = made
    config = sim.SimConfig(
        workers=workers,
        policy="e2-paper" if rule in PLANS else rule,
        scheduler=SchedulerConfig(join_share=0.0, **PLANS.get(rule, {})),
        local=LocalConfig(A6000_KV_TOKENS, max_running=256, max_waiting=10**6),
        faults=joins,
    )
    ordered = sorted(requests, key=lambda request: request.arrival_seconds)
    summary = sim.simulate(Workload("shifts", ordered), config).summary()
    return [
        f"{summary.mean_ttft_seconds:.3g} / {summary.p99_ttft_seconds:.3g}",
        f"{summary.mean_latency_seconds:.3g} / {summary.p99_latency_seconds:.3g}",
    ]


def main() -> None:
    """Print the table."""
    scenarios: list[Callable[[], Scenario]] = [one_hot, changing, all_on_one]
    print("| | |", " | ".join(RULES), "|")
    print("|---|---|" + "---|" * len(RULES))
    for scenario in scenarios:
        found = [measured(scenario(), rule) for rule in RULES]
        for figure, row in zip(("TTFT", "latency"), zip(*found, strict=True), strict=True):
            print(f"| {(scenario.__doc__ or '').rstrip('.')} | {figure} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
