"""Does the scaling advice come true? Makes tables of docs/experiments/fleet.md. Owns the loads and what is
printed; the estimate is `preble/scheduling/autoscaling.py`.

    python -m benchmarks.scale.scaling_advice sizes     # fleets of one more and one less from the start
    python -m benchmarks.scale.scaling_advice changes   # a worker joins, or drains, in the middle
    python -m benchmarks.scale.scaling_advice drains    # each worker drained in turn: is the cheapest one cheap
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from benchmarks.common.facts import commit
from preble import WorkerSpec, sim, workloads
from preble.sim import WorkerDrain, WorkerJoin
from preble.sim.config import A6000_KV_TOKENS
from preble.workloads import Workload

END_SECONDS = 300.0
WINDOW_SECONDS = 180.0
CHANGE_AT_SECONDS = 200.0
AFTER_SECONDS = 100.0
RATES = {"toolbench": (16.0, 32.0, 48.0, 64.0), "programming": (6.0, 12.0, 16.0)}
GROUPS = 200
WORKERS = 4
DRAIN_WORKERS = 6


def traffic(kind: str, rps: float, seed: int) -> Workload:
    """Requests at `rps` to the end of a run and beyond."""
    made = workloads.generate(kind, requests=int(rps * END_SECONDS * 1.05), groups=GROUPS, zipf=1.1, seed=seed)
    return workloads.poisson(made, rps=rps, seed=seed)


def run(workload: Workload, workers: int, *faults: Any) -> tuple[Any, dict[str, Any]]:
    """One run, broken off while requests still arrive; and the advice from just before `CHANGE_AT_SECONDS`."""
    seen: dict[str, Any] = {}

    def look(ended: int, requests: int, seconds: float) -> None:
        if seconds < CHANGE_AT_SECONDS:
            seen.update(simulation.scheduler.stats()["scaling"])

    config = sim.SimConfig(workers=workers, faults=faults, until_seconds=END_SECONDS)
    simulation = sim.Simulation(workload, config, look)
    return simulation.run(), seen


def mean_ttft(result: Any, start: float) -> float:
    """Of requests that arrived from `start` on; one without a first token has waited until the end, at least."""
    waited = np.where(np.isnan(result.ttft_seconds), END_SECONDS - result.arrival_seconds, result.ttft_seconds)
    return float(np.mean(waited[result.arrival_seconds >= start]))


def row(kind: str, rps: float, advice: dict[str, Any], real: list[float]) -> str:
    """Real: mean time to first token as it is, with one more, with one less."""
    here, more, less = real
    return (
        f"| {kind}, {rps:g} | {advice['utilisation']:.2f} | {advice['variability']:.1f} | {advice['ttft_seconds']:.3f} "
        f"| {here:.3f} | {advice['one_more_saves_seconds']:.3f} | {here - more:.3f} "
        f"| {advice['one_less_costs_seconds']:.3f} | {less - here:.3f} | {advice['desired_workers']} |"
    )


def sizes(kind: str, rps: float, seed: int) -> str:
    """Fleets that have had one more, or one less, all the time."""
    workload = traffic(kind, rps, seed)
    results = [run(workload, count)[0] for count in (WORKERS, WORKERS + 1, WORKERS - 1)]
    real = [mean_ttft(result, END_SECONDS - WINDOW_SECONDS) for result in results]
    return row(kind, rps, results[0].scheduler_stats["scaling"], real)


def changes(kind: str, rps: float, seed: int) -> str:
    """A fleet that one joins, and one that the cheapest leaves, at `CHANGE_AT_SECONDS`."""
    workload = traffic(kind, rps, seed)
    base, advice = run(workload, WORKERS)
    joins = WorkerJoin(CHANGE_AT_SECONDS, WorkerSpec("new", kv_capacity_tokens=A6000_KV_TOKENS))
    drains = WorkerDrain(CHANGE_AT_SECONDS, advice["cheapest_drain"]["worker"])
    results = [base, run(workload, WORKERS, joins)[0], run(workload, WORKERS, drains)[0]]
    return row(kind, rps, advice, [mean_ttft(result, CHANGE_AT_SECONDS) for result in results])


def drains(kind: str, rps: float, seed: int) -> str:
    """What the drain of each worker is said to cost, and how much later first tokens came for it, all added up."""
    workload = traffic(kind, rps, seed)
    base, advice = run(workload, DRAIN_WORKERS)
    after = (base.arrival_seconds >= CHANGE_AT_SECONDS) & (base.arrival_seconds < CHANGE_AT_SECONDS + AFTER_SECONDS / 2)
    cells = []
    for name, said in sorted(advice["drain_seconds"].items(), key=lambda item: item[1]):
        drained, _ = run(workload, DRAIN_WORKERS, WorkerDrain(CHANGE_AT_SECONDS, name))
        cells.append(f"{said:.2f} / {np.nansum((drained.ttft_seconds - base.ttft_seconds)[after]):.1f}")
    return f"| {kind}, {rps:g} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sizes", "changes", "drains"))
    parser.add_argument("--kind", choices=tuple(RATES), nargs="+", default=list(RATES))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    table = {"sizes": sizes, "changes": changes, "drains": drains}[args.what]
    print(f"commit {commit()}, seed {args.seed}", flush=True)
    for kind in args.kind:
        for rps in RATES[kind]:
            print(table(kind, rps, args.seed), flush=True)


if __name__ == "__main__":
    main()
