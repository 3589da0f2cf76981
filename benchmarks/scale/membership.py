"""What users notice of workers that join and leave: the tables of docs/membership.md, in the simulator. Owns the loads
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


def join(rps: float, zipf: float | None, share: float) -> str:
    """How many requests newcomers get, and what first tokens wait for, before and after."""
    workload = tools(rps, JOIN_AT_SECONDS + TAIL_SECONDS, 400, zipf, seed=0)
    specs = [WorkerSpec(f"n{i}", kv_capacity_tokens=A6000_KV_TOKENS) for i in range(20)]
    faults = tuple(WorkerJoin(JOIN_AT_SECONDS, spec) for spec in specs)
    result = sim.simulate(
        workload, sim.SimConfig(workers=20, faults=faults, scheduler=SchedulerConfig(join_share=share))
    )
    after, before = within(result, JOIN_AT_SECONDS), within(result, JOIN_AT_SECONDS - MINUTE_SECONDS)
    counts = np.bincount(result.worker[after], minlength=40)
    new = counts[20:] / counts.mean()
    waits = [np.quantile(result.ttft_seconds[minute], 0.99) for minute in (before, after)]
    return f"least {new.min():.2f}  mean {new.mean():.2f}  most {new.max():.2f}  p99 {waits[0]:.3f} -> {waits[1]:.3f} s"


def drain(rps: float, zipf: float | None, seconds: float | None, prefixes_max: int) -> str:
    """What first tokens wait for in the minute after a drain; `seconds`: of its handover, None: nobody drains."""
    workload = tools(rps, DRAIN_AT_SECONDS + TAIL_SECONDS, 200, zipf, seed=1)
    faults = () if seconds is None else (WorkerDrain(DRAIN_AT_SECONDS, "w3", seconds),)
    scheduler = SchedulerConfig(handover_prefixes_max=prefixes_max)
    result = sim.simulate(workload, sim.SimConfig(workers=8, faults=faults, scheduler=scheduler))
    waits = result.ttft_seconds[within(result, DRAIN_AT_SECONDS)]
    given = result.scheduler_stats["membership"]["given_by_leavers"]
    return f"mean {waits.mean():.3f}  p99 {np.quantile(waits, 0.99):.3f} s  prefixes given {given}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("join", "drain"))
    if parser.parse_args().what == "join":
        for rps, zipf in ((60.0, None), (120.0, None), (60.0, ZIPF)):
            for share in (0.0, 0.75):
                print(f"{rps:g} requests/s, zipf {zipf}, join_share {share:g}: {join(rps, zipf, share)}", flush=True)
        return
    for rps, zipf in ((16.0, None), (32.0, None), (32.0, ZIPF)):
        for seconds, prefixes_max in ((None, 64), (0.0, 0), (0.0, 64), (30.0, 64)):
            plan = "no drain" if seconds is None else f"{prefixes_max} prefixes over {seconds:g} s"
            print(f"{rps:g} requests/s, zipf {zipf}, {plan}: {drain(rps, zipf, seconds, prefixes_max)}", flush=True)


if __name__ == "__main__":
    main()
