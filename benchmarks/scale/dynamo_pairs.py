"""Pairs in NVIDIA Dynamo's simulator and in Preble's, the same requests side by side.

    python -m benchmarks.scale.dynamo_pairs [--workloads mooncake loogle] [--workers 4] [--loads 0.3 0.9 1.2]
                                            [--seeds 0 1 2] [--gbits 100] [--json FILE] [--peers-env .venv-peers]

NVIDIA's offline replay routes as its router does, to workers that do both, or from those that prefill to those that
decode; Preble's simulator has engines of the same memory, places and token budget, whose costs were measured in that
replay. Requests and loads are `dynamo_replay`'s. KV is a 7B model's in 16 bit; here a link carries one transfer at a
time, there each has the whole of it. Seconds of one simulator are not those of the other: what compares is the last
columns, over as many workers that do both in the same simulator, with its own router there and E2 here. Means over the
seeds.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import preble
from benchmarks.common.tables import markdown
from benchmarks.paper.contest_cells import FLEET, SOURCES, local_config, warm_requests
from benchmarks.scale.dynamo_replay import (
    MAX_RUNNING,
    OWN_RUNS,
    Asked,
    Replay,
    Served,
    add_options,
    asked_of,
    at_load,
    means,
    profiled,
    rows_of,
    workload_of,
)
from benchmarks.scale.pairs import FIGURES, KV_TOKEN_BYTES, NO_PULLS, Arm, counted_figures, summed_up
from preble import sim
from preble.types import DECODE
from preble.workloads import Workload, arrival_times, traced

TOKEN_BUDGET = 8192  # that package's default
THEIRS = "NVIDIA's"
OURS = "Preble's"
OUR_ARMS = (
    Arm("round_robin"),
    Arm("e2"),
    Arm("e2", among_all=True),
    Arm("e2", 0.25),
    Arm("round_robin", 0.5, DECODE),
    Arm("e2", 0.5, DECODE),
)


def theirs(replay: Replay, asked: Asked, workers: int, gbits: float) -> Iterator[tuple[str, dict[str, float]]]:
    """That package's router and its round robin, on workers that do both and on pairs."""
    moving = {"kv_transfer_bandwidth": gbits / 8, "kv_transfer_bytes_per_token": KV_TOKEN_BYTES}
    for mode, prefills in itertools.product(("round_robin", "kv_router"), (0, workers // 2)):
        options: dict[str, Any] = {"router_mode": mode, "num_workers": workers}
        if prefills:
            options = {
                "router_mode": mode,
                "num_prefill_workers": prefills,
                "num_decode_workers": workers - prefills,
                "prefill_engine_args": moving | {"worker_type": "prefill"},
                "decode_engine_args": moving | {"worker_type": "decode"},
            }
        name = f"{mode}, {prefills} prefill, {workers - prefills} decode" if prefills else mode
        runs = [replay.run(range(len(asked.prompts)), **options) for _ in range(OWN_RUNS)]
        yield name, means([figures_of(served, asked) for served in runs])


def figures_of(served: Sequence[Served], asked: Asked) -> dict[str, float]:
    """As `pairs.counted_figures`, without those that warm the caches."""
    warm = warm_requests(len(served))
    ttft, latency = (np.array([one[i] for one in served[warm:]]) for i in (0, 1))
    output = np.array(asked.output_tokens[warm:])
    tpot = ((latency - ttft) / np.maximum(output - 1, 1))[output > 1]
    return summed_up(ttft, latency, tpot)


def ours(made: Workload, arm: Arm, workers: int, seed: int, gbits: float, cost: preble.CostModel) -> dict[str, float]:
    """One run of Preble's simulator."""
    local = replace(local_config(), token_budget=TOKEN_BUDGET, max_running=MAX_RUNNING, order="fcfs")
    link = sim.KvLink(bytes_per_second=gbits / 8 * 1e9, token_bytes=KV_TOKEN_BYTES, least_tokens=NO_PULLS)
    config = sim.SimConfig(
        **arm.fleet(workers, FLEET.kv_tokens),
        policy=arm.policy,
        cost_model=cost,
        local=local,
        seed=seed,
        kv_link=link if arm.has_pairs else None,
    )
    found = counted_figures(sim.simulate(made, config), made, agents=False)
    return {name: found[name] for name in FIGURES}


def cells(args: argparse.Namespace, python: Path) -> Iterator[dict[str, Any]]:
    """A row for each workload, load, simulator and fleet: means over the seeds."""
    cost = profiled(python)
    for name, load in itertools.product(args.workloads, args.loads):
        found: dict[tuple[str, str], list[dict[str, float]]] = {}
        for seed in args.seeds:
            made = workload_of(name, seed, args.workers, args.share)
            with Replay(python, asked := asked_of(made)) as replay:
                at = at_load(asked, replay.backlog_rps(args.workers), load)
            with Replay(python, at) as replay:
                for arm, figures in theirs(replay, at, args.workers, args.gbits):
                    found.setdefault((THEIRS, arm), []).append(figures)
            same = in_order(made, at)
            for one in OUR_ARMS:
                figures = ours(same, one, args.workers, seed, args.gbits, cost)
                found.setdefault((OURS, one.name(args.workers)), []).append(figures)
        for (simulator, arm), runs in found.items():
            yield {"workload": name, "load": load, "simulator": simulator, "arm": arm, **means(runs)}
        sys.stderr.write(f"{name} {load}\n")


def in_order(made: Workload, asked: Asked) -> Workload:
    """A workload's requests at the times of `asked`, which has them in the order of their arrival."""
    order = np.argsort(np.asarray(arrival_times(made)), kind="stable")
    ordered = replace(made, requests=[made.requests[i] for i in order])
    return traced(ordered, asked.arrival_seconds)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Seconds, and over the same simulator's workers that do both."""
    both = {THEIRS: "kv_router", OURS: "e2"}
    found = {(row["workload"], row["load"], row["simulator"], row["arm"]): row for row in rows}
    lines = []
    for row in rows:
        other = found[row["workload"], row["load"], row["simulator"], both[row["simulator"]]]
        lines.append(
            [
                f"{row['workload']}, {row['load']}",
                row["simulator"],
                row["arm"],
                *(f"{row[name]:.3g}" for name in FIGURES),
                *(f"{row[name] / other[name]:.2f}" for name in ("mean_ttft", "p99_ttft", "mean_latency", "mean_tpot")),
            ]
        )
    times = ["TTFT: mean", "p99", "latency: mean", "p99", "TPOT: mean", "p99"]
    over = ["mean TTFT, over both", "p99", "mean latency", "TPOT"]
    return markdown(["workload, load", "simulator", "", *times, *over], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=[*SOURCES], default=["mooncake", "loogle"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--gbits", type=float, default=100.0)
    add_options(parser)
    rows = rows_of(cells, parser.parse_args())
    if rows:
        sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    main()
