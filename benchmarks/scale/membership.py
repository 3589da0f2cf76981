"""What users notice of workers that join and leave: tables of docs/experiments/fleet.md. Owns the loads
and what is printed; the rule is `preble/scheduling/membership.py`.

    python -m benchmarks.scale.membership join     # 20 workers become 40
    python -m benchmarks.scale.membership drain    # one of 8 leaves
"""

from __future__ import annotations

import argparse

import numpy as np
import numpy.typing as npt

from preble import SchedulerConfig, WorkerSpec, sim, workloads
from preble.sim import WorkerDrain, WorkerJoin
from preble.sim.config import A6000_KV_TOKENS
from preble.sim.results import Result
from preble.workloads import Workload

MINUTE_SECONDS = 60.0
TAIL_SECONDS = 90.0
JOIN_AT_SECONDS = 150.0
DRAIN_AT_SECONDS = 120.0
ZIPF = 1.1


def tools(rps: float, seconds: float, groups: int, zipf: float | None, seed: int) -> Workload:
    """Tool prompts at `rps` for so long."""
    made = workloads.generate("toolbench", requests=int(rps * seconds), groups=groups, zipf=zipf, seed=seed)
    return workloads.poisson(made, rps=rps, seed=seed)


def within(result: Result, start: float) -> npt.NDArray[np.bool_]:
    """Which requests arrived in the minute from `start` on."""
    return (result.arrival_seconds >= start) & (result.arrival_seconds < start + MINUTE_SECONDS)


def figures(result: Result, minute: npt.NDArray[np.bool_]) -> str:
    """Mean and p99 of the time to first token and of the latency of those requests."""
    both = (result.ttft_seconds[minute], result.latency_seconds[minute])
    return " | ".join(f"{np.nanmean(one):.3f}, {np.nanquantile(one, 0.99):.3f}" for one in both)


def join(rps: float, zipf: float | None, policy: str, newcomers: int) -> str:
    """Newcomers' requests, in multiples of the mean, and all waits in the minute after they joined 20 workers."""
    workload = tools(rps, JOIN_AT_SECONDS + TAIL_SECONDS, 400, zipf, seed=0)
    specs = [WorkerSpec(f"n{i}", kv_capacity_tokens=A6000_KV_TOKENS) for i in range(newcomers)]
    faults = tuple(WorkerJoin(JOIN_AT_SECONDS, spec) for spec in specs)
    result = sim.simulate(workload, sim.SimConfig(workers=20, policy=policy, faults=faults))
    after = within(result, JOIN_AT_SECONDS)
    counts = np.bincount(result.worker[after], minlength=20 + newcomers)
    new = counts[20:] / counts.mean()
    given = f"{new.min():.2f}, {new.mean():.2f}, {new.max():.2f}" if newcomers else ""
    return f"{given} | {figures(result, after)}"


def drain(rps: float, zipf: float | None, policy: str, seconds: float | None, prefixes_max: int) -> str:
    """What requests wait for in the minute after a drain; `seconds`: of its handover, None: nobody drains."""
    workload = tools(rps, DRAIN_AT_SECONDS + TAIL_SECONDS, 200, zipf, seed=1)
    faults = () if seconds is None else (WorkerDrain(DRAIN_AT_SECONDS, "w3", seconds),)
    scheduler = SchedulerConfig(handover_prefixes_max=prefixes_max)
    result = sim.simulate(workload, sim.SimConfig(workers=8, policy=policy, faults=faults, scheduler=scheduler))
    given = result.scheduler_stats["membership"]["given_by_leavers"]
    return f"{given} | {figures(result, within(result, DRAIN_AT_SECONDS))}"


JOINS = (
    ("nobody joins", "e2", 0),
    ("e2", "e2", 20),
    ("round robin", "round_robin", 20),
    ("least load", "least_loaded", 20),
)
DRAINS: tuple[tuple[str, str, float | None, int], ...] = (
    ("nobody drains", "e2", None, 64),
    ("e2, no handover", "e2", 0.0, 0),
    ("e2, at once", "e2", 0.0, 64),
    ("e2, over 30 s", "e2", 30.0, 64),
    ("round robin", "round_robin", 0.0, 0),
    ("least load", "least_loaded", 0.0, 0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("join", "drain"))
    print_table = print_joins if parser.parse_args().what == "join" else print_drains
    print_table()


def print_joins() -> None:
    print("| requests/s, popularity | | newcomers: least, mean, most | TTFT: mean, p99 | latency: mean, p99 |")
    print("|---|---|---|---|---|")
    for rps, zipf in ((60.0, None), (120.0, None), (60.0, ZIPF)):
        for title, policy, newcomers in JOINS:
            print(f"| {load(rps, zipf)} | {title} | {join(rps, zipf, policy, newcomers)} |", flush=True)


def print_drains() -> None:
    print("| requests/s, popularity | | prefixes given | TTFT: mean, p99 | latency: mean, p99 |")
    print("|---|---|---|---|---|")
    for rps, zipf in ((16.0, None), (32.0, None), (32.0, ZIPF)):
        for title, policy, seconds, prefixes_max in DRAINS:
            print(f"| {load(rps, zipf)} | {title} | {drain(rps, zipf, policy, seconds, prefixes_max)} |", flush=True)


def load(rps: float, zipf: float | None) -> str:
    """A row's load in words."""
    return f"{rps:g}, as ToolBench" if zipf is None else f"{rps:g}, Zipf {zipf:g}"


if __name__ == "__main__":
    main()
