"""Pairs of workers beside as many that do both, in simulation: the tables of docs/experiments/pairs.md. Owns fleets,
loads and what is printed.

    python -m benchmarks.scale.pairs [--workloads agents loogle mooncake] [--workers 2 4 8] [--loads 0.1 0.6 0.9 1.2]
                                     [--seeds 10 11 12] [--arms NAME ...] [--gbits 100] [--share 0.5]
                                     [--json FILE]

Workloads, engines and what is counted are the contest's (`benchmarks/paper/contest_cells.py`); load is a share of what
its pooled reference ends of a backlog, for so many workers. Agents are sessions in a closed loop, at load 1 as many for
each worker as the work, and no pause, limits (`agents_cells.CROWD`); they are broken off at `agents_cells.END_SECONDS`,
and who has no first token then has waited until then. KV is a 7B model's in 16 bit, on one link a worker. Of so many
workers a quarter or a half prefills only; the others do both, or decode only. E2 chooses by price, another policy
always a pair. Beside these: fleets without the workers that prefill only, which shows what of a loss is theirs, as they
cannot decode; and as many that do both, of which any two may be a pair. Means over the seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.paper.agents_cells import (
    CROWD,
    END_SECONDS,
    PAUSE_MAX_SECONDS,
    TRACE,
    TURNS_MIN,
    WARM_SECONDS,
    sessions_of,
)
from benchmarks.paper.contest_cells import FLEET, SOURCES, Rates, arriving, drained, local_config, warm_requests
from preble import WorkerSpec, sim
from preble.types import BOTH, DECODE, PREFILL, Role
from preble.workloads import Workload, sessions_at_once

KV_TOKEN_BYTES = 131_072
NO_PULLS = 2**31 - 1
Floats = npt.NDArray[np.float64]
FIGURES = ("mean_ttft", "p99_ttft", "mean_latency", "p99_latency", "mean_tpot", "p99_tpot")


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy, how many of the workers prefill only (a share), and what the others do. `is_without`: those are left
    out; `among_all`: nobody has a role, and any two may be a pair."""

    policy: str
    prefill_share: float = 0.0
    others: Role = BOTH
    is_without: bool = False
    among_all: bool = False

    def name(self, workers: int) -> str:
        """As the table has it."""
        prefills = self.prefills(workers)
        if self.among_all:
            return f"{self.policy}, {workers} both, pairs among them"
        if self.is_without:
            return f"{self.policy}, {workers - prefills} both"
        return f"{self.policy}, {prefills} prefill, {workers - prefills} {self.others}" if prefills else self.policy

    def prefills(self, workers: int) -> int:
        """How many prefill only, or are left out."""
        return max(1, round(self.prefill_share * workers)) if self.prefill_share else 0

    def fleet(self, workers: int, kv_capacity_tokens: int) -> dict[str, Any]:
        """Its workers, as `SimConfig` takes them. Pairs are thought of once somebody with a role has been there, so
        where any two may be one there was."""
        count = self.prefills(workers)
        roles: list[Role] = [] if self.is_without else [PREFILL] * count
        roles += [self.others if count else BOTH] * (workers - count)
        specs = [WorkerSpec(f"w{i}", kv_capacity_tokens=kv_capacity_tokens, role=role) for i, role in enumerate(roles)]
        if not self.among_all:
            return {"workers": tuple(specs)}
        spare = WorkerSpec("spare", kv_capacity_tokens=kv_capacity_tokens, role=PREFILL)
        return {"workers": (*specs, spare), "faults": (sim.WorkerDeath(0.0, spare.id, noticed_after_seconds=0.0),)}

    @property
    def has_pairs(self) -> bool:
        """Whether a request may have two workers."""
        return self.among_all or (self.prefill_share > 0.0 and not self.is_without)


ARMS = (
    *(Arm(policy) for policy in ("round_robin", "least_loaded", "e2")),
    Arm("e2", among_all=True),
    *(Arm("e2", share, is_without=alone) for share in (0.25, 0.5) for alone in (True, False)),
    *(Arm(policy, 0.5, DECODE) for policy in ("round_robin", "least_loaded", "e2")),
)


def workload_of(name: str, workers: int, load: float, seed: int, share: float, rates: dict[str, Rates]) -> Workload:
    """A workload's requests at a load of so many workers."""
    if name != "agents":
        if name not in rates:
            rates[name] = drained(name, share)
        return arriving(name, seed, share, rates[name], load * workers / FLEET.workers)
    live = max(2, round(load * CROWD * workers))  # whatever the share: fewer sessions are another load
    return sessions_at_once(
        sessions_of(TRACE, seed, 2 * live),
        live,
        seed,
        turns_min=TURNS_MIN,
        pause_max_seconds=PAUSE_MAX_SECONDS,
        spread_seconds=40.0,
        begun=True,
    )


def figures_of(workload: Workload, arm: Arm, workers: int, seed: int, bytes_per_second: float) -> dict[str, float]:
    """What one run finds."""
    local = local_config()
    link = sim.KvLink(bytes_per_second=bytes_per_second, token_bytes=KV_TOKEN_BYTES, least_tokens=NO_PULLS)
    config = sim.SimConfig(
        **arm.fleet(workers, local.kv_capacity_tokens),
        policy=arm.policy,
        cost_model=FLEET.cost_model,
        local=local,
        seed=seed,
        kv_link=link if arm.has_pairs else None,
    )
    agents = any(one.after is not None for one in workload.requests)
    if agents:
        config = replace(config, until_seconds=END_SECONDS)
    return counted_figures(sim.simulate(workload, config), workload, agents)


def counted_figures(result: sim.Result, workload: Workload, agents: bool) -> dict[str, float]:
    """Of what came after the warm-up; times to first token and latencies of all, also of those that have waited in
    vain, times per output token of those that ended."""
    if agents:
        counted = result.arrival_seconds > WARM_SECONDS
    else:
        counted = np.arange(len(workload)) >= warm_requests(len(workload))
    open_for = END_SECONDS - result.arrival_seconds
    ttft = np.where(np.isnan(result.ttft_seconds), open_for, result.ttft_seconds)[counted]
    latency = np.where(np.isnan(result.latency_seconds), open_for, result.latency_seconds)[counted]
    done = counted & ~np.isnan(result.latency_seconds) & (result.output_tokens > 1)
    tpot = ((result.latency_seconds - result.ttft_seconds) / np.maximum(result.output_tokens - 1, 1))[done]
    found = summed_up(ttft, latency, tpot)
    pairs: Any = result.scheduler_stats["policy_state"].get("pairs", {})
    found["separated"] = pairs.get("separated", 0) / max(pairs.get("placed", 0), 1)
    handed_over = (result.second_token_seconds - result.first_token_seconds)[counted]
    handed_over = handed_over[~np.isnan(handed_over)]
    found["mean_handover"] = float(np.mean(handed_over)) if len(handed_over) else 0.0
    found["turns"] = float((result.outcome == sim.results.FINISHED).sum())
    return found


def summed_up(ttft: Floats, latency: Floats, tpot: Floats) -> dict[str, float]:
    """Mean and 99th percentile of each: `FIGURES`."""
    found: dict[str, float] = {}
    for what, values in (("ttft", ttft), ("latency", latency), ("tpot", tpot)):
        found[f"mean_{what}"], found[f"p99_{what}"] = float(np.mean(values)), float(np.percentile(values, 99))
    return found


def cells(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each workload, fleet, load and arm: means over the seeds."""
    rates: dict[str, Rates] = {}
    for name in args.workloads:
        for workers in args.workers:
            for load in args.loads:
                made = [(seed, workload_of(name, workers, load, seed, args.share, rates)) for seed in args.seeds]
                for arm in {one.name(workers): one for one in ARMS}.items():
                    if args.arms is not None and arm[0] not in args.arms:
                        continue
                    runs = [
                        figures_of(workload, arm[1], workers, seed, args.gbits / 8 * 1e9) for seed, workload in made
                    ]
                    means = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
                    yield {"workload": name, "workers": workers, "load": load, "arm": arm[0], **means}


def print_row(row: dict[str, Any], aggregated: dict[str, Any] | None) -> None:
    """One line, of pairs with the mean time from their first token to the first of who decodes. Beside it, of E2 with
    other fleets, p99 TTFT and mean TPOT over those with as many that do both."""
    times = " | ".join(f"{row[name]:.4f}" if "tpot" in name else f"{row[name]:.3f}" for name in FIGURES)
    ratios = " | "
    if aggregated is not None and row["arm"].startswith("e2, "):
        ratios = " | ".join(f"{row[name] / aggregated[name]:.3f}" for name in ("p99_ttft", "mean_tpot"))
    print(
        f"| {row['workload']}, {row['workers']}, {row['load']} | {row['arm']} | {times} | {row['separated']:.0%} "
        f"| {row['mean_handover']:.2f} | {ratios} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workloads", nargs="+", choices=[*SOURCES, "agents"], default=["agents", "loogle", "mooncake"]
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.1, 0.6, 0.9, 1.2])
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="only these, as the table has them")
    parser.add_argument("--gbits", type=float, default=100.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12])
    parser.add_argument("--share", type=float, default=0.5, help="of each workload's requests (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    print("| workload, workers, load | | TTFT: mean, s | p99 | latency: mean | p99 | TPOT: mean | p99 | in two | "
          "second token after, s | p99 TTFT / E2's | TPOT / E2's |\n" + "|---" * 12 + "|")  # fmt: skip
    rows, aggregated = [], None
    for row in cells(args):
        if row["arm"] == "e2":
            aggregated = row
        elif row["arm"] == "round_robin":
            aggregated = None
        print_row(row, aggregated)
        rows.append(row)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
