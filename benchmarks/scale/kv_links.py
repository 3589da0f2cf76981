"""Pulls by the price beside never, always and fixed thresholds, in simulation, on the contest's fleet and workloads.

    python -m benchmarks.scale.kv_links [--workloads mooncake loogle agents] [--loads 0.3 0.9 1.2] [--seeds 0 1 2]
                                        [--workers 4] [--gbits 10 100] [--capacity 1 2] [--policies e2]
                                        [--share 1.0] [--json FILE]

The link is between every two workers, one transfer at a time at either end; KV is a 7B model's in 16 bit. Load is a
share of what the pooled reference ends of a backlog (`benchmarks/paper/contest_cells.py`); agents are sessions in a
closed loop, 8 at once for each worker at load 1. Fleets of other sizes have as many requests a worker, of traces from
several samples. `--capacity`: times the contest's KV memory. Round robin and least load stand beside E2, without pulls
and with those by the price. Means over seeds; the first requests warm the caches and are not counted. The second table:
mean time to first token over that of the best of never, always and the thresholds, and of never, with the standard
error of the paired logarithms; over 1 is a loss.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper.agents_cells import PAUSE_MAX_SECONDS, TRACE, TURNS_MIN, sessions_of
from benchmarks.paper.contest_cells import (
    FLEET,
    SAMPLES,
    SOURCES,
    Rates,
    arriving,
    drained,
    local_config,
    measured,
    requests_of,
    stretched,
    warm_requests,
)
from preble import sim
from preble.workloads import Workload, arrival_times, merged, sessions_at_once

THRESHOLDS = (0, 512, 2048, 8192, 13_600)
OBJECTIVE_SECONDS = 10.0
KV_TOKEN_BYTES = 131_072
FIGURES = ("mean_ttft_seconds", "p99_ttft_seconds", "mean_latency_seconds", "p99_latency_seconds")


@dataclass(frozen=True, slots=True)
class Rule:
    """A policy, and when the worker it chooses pulls: None never, -1 by the price, else from so many tokens on."""

    policy: str
    least_tokens: int | None

    @property
    def name(self) -> str:
        """As the table has it."""
        when = {None: "never", -1: "by the price", 0: "always"}.get(self.least_tokens, f"from {self.least_tokens}")
        return f"{self.policy}, {when}"


RULES = (
    Rule("e2", None),
    *(Rule("e2", tokens) for tokens in THRESHOLDS),
    Rule("e2", -1),
    *(Rule(policy, tokens) for policy in ("least_loaded", "round_robin") for tokens in (None, -1)),
)


def workload_of(name: str, load: float, seed: int, share: float, workers: int, rates: dict[str, Rates]) -> Workload:
    """A workload's requests at a load, for so many workers."""
    if name != "agents":
        if name not in rates:
            rates[name] = drained(name, share)
        times = workers / FLEET.workers
        scaled = Rates(*(times * rate for rate in rates[name]))
        if times > 1.0 and SOURCES[name].trace:
            return stretched(made := several(name, seed, share, round(times)), arrival_times(made), scaled, load)
        return arriving(name, seed, share * times, scaled, load)
    live = max(2, round(load * 8 * workers * share))
    made = sessions_of(TRACE, seed, 2 * live)
    return sessions_at_once(
        made, live, seed, turns_min=TURNS_MIN, pause_max_seconds=PAUSE_MAX_SECONDS, spread_seconds=40.0, begun=True
    )


def several(name: str, seed: int, share: float, count: int) -> Workload:
    """So many of a trace's samples at once."""
    if count > SAMPLES:
        raise SystemExit(f"a trace has {SAMPLES} samples, for {SAMPLES * FLEET.workers} workers at most")
    parts = []
    for number in range(seed, seed + count):
        made = requests_of(name, number, share)
        parts.append(
            replace(made, requests=[replace(one, request_id=f"{number}-{one.request_id}") for one in made.requests])
        )
    return merged(name, parts)


def figures_of(
    workload: Workload, rule: Rule, seed: int, bytes_per_second: float, workers: int, capacity: float
) -> dict[str, float]:
    """What one run finds."""
    link = None
    if rule.least_tokens is not None:
        least = None if rule.least_tokens < 0 else rule.least_tokens
        link = sim.KvLink(bytes_per_second=bytes_per_second, token_bytes=KV_TOKEN_BYTES, least_tokens=least)
    local = local_config()
    config = sim.SimConfig(
        workers=workers,
        policy=rule.policy,
        cost_model=FLEET.cost_model,
        local=replace(local, kv_capacity_tokens=int(capacity * local.kv_capacity_tokens)),
        seed=seed,
        kv_link=link,
    )
    result = sim.simulate(workload, config)
    counted = np.arange(len(workload)) >= warm_requests(len(workload))
    found = measured(result, counted & ~np.isnan(result.arrival_seconds), OBJECTIVE_SECONDS)
    pulls: Any = result.scheduler_stats["pulls"]
    return {**found, "pulls": pulls.get("asked", 0), "moved_tokens": pulls.get("moved_tokens", 0)}


def cells(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each workload, load, link and rule: means over the seeds."""
    rates: dict[str, Rates] = {}
    for name, load in itertools.product(args.workloads, args.loads):
        made = [(seed, workload_of(name, load, seed, args.share, args.workers, rates)) for seed in args.seeds]
        for capacity, gbits, rule in itertools.product(args.capacity, args.gbits, RULES):
            if rule.policy not in args.policies or (rule.least_tokens is None and gbits != args.gbits[0]):
                continue  # never: the link does not matter
            runs = [figures_of(one, rule, seed, gbits / 8 * 1e9, args.workers, capacity) for seed, one in made]
            means = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
            row = {"workload": name, "load": load, "capacity": capacity, "gbits": gbits, "policy": rule.policy}
            seen = [run["mean_ttft_seconds"] for run in runs]
            yield {**row, "rule": rule.name, "least_tokens": rule.least_tokens, **means, "of_seeds": seen}


def print_rows(rows: list[dict[str, Any]]) -> None:
    """The table, and how far the price is behind the best fixed rule."""
    print(
        "| workload | load | KV | Gbit/s | rule | TTFT: mean, s | p99 | latency: mean | p99 | hits | pulls | moved, k |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        times = " | ".join(f"{row[name]:.3f}" for name in FIGURES)
        print(
            f"| {where(row)} | {row['gbits']:g} | {row['rule']} | {times} "
            f"| {row['hit_fraction']:.1%} | {row['pulls']:.0f} | {row['moved_tokens'] / 1000:.0f} |"
        )
    print(
        "\n| workload | load | KV | Gbit/s | best fixed rule | price / best | price / never | the same, p99 | latency |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        if row["policy"] == "e2" and row["least_tokens"] == -1:
            print(f"| {where(row)} | {row['gbits']:g} | {' | '.join(compared(row, rows))} |")


def where(row: dict[str, Any]) -> str:
    """The first cells of a row."""
    return f"{row['workload']} | {row['load']} | {row['capacity']:g}x"


def compared(row: dict[str, Any], rows: list[dict[str, Any]]) -> Iterator[str]:
    """The best fixed rule, and the price's figures over its and over never's."""
    place = ("workload", "load", "capacity", "policy")
    beside = [one for one in rows if [one[key] for key in place] == [row[key] for key in place]]
    never = next(one for one in beside if one["least_tokens"] is None)
    fixed = [one for one in beside if one["gbits"] == row["gbits"] and (one["least_tokens"] or 0) >= 0]
    best = min([never, *fixed], key=lambda one: float(one["mean_ttft_seconds"]))
    yield best["rule"]
    for other in (best, never):
        logs = [math.log(a / b) for a, b in zip(row["of_seeds"], other["of_seeds"], strict=True)]
        error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
        yield f"{row['mean_ttft_seconds'] / other['mean_ttft_seconds']:.3f} ± {error:.3f}"
    for name in ("p99_ttft_seconds", "mean_latency_seconds"):
        yield f"{row[name] / never[name]:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workloads", nargs="+", choices=[*SOURCES, "agents"], default=["mooncake", "loogle", "agents"]
    )
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.9, 1.2])
    parser.add_argument("--workers", type=int, default=FLEET.workers)
    parser.add_argument("--gbits", type=float, nargs="+", default=[10.0, 100.0])
    parser.add_argument("--capacity", type=float, nargs="+", default=[1.0, 2.0], metavar="TIMES")
    policies = list(dict.fromkeys(rule.policy for rule in RULES))
    parser.add_argument("--policies", nargs="+", choices=policies, default=policies)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--share", type=float, default=1.0, help="of each workload's requests (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rows = list(cells(args))
    print_rows(rows)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
