"""Many routers before one fleet, in simulation: what the second, fourth and eighth cost. Owns the cells and the table.

    python -m benchmarks.scale.routers --json benchmarks/results/routers.json --docs

Each request comes to one of the routers by chance; the others learn of it from its worker, `event_delay_seconds` after
it got there. One router learns of its own requests' tokens as late. Every cell runs with all seeds; ratios are to one
router with the same requests and the same delay, geometric means over the seeds. See docs/fleet.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.facts import commit, typed_today
from benchmarks.common.paths import RESULTS, ROOT
from benchmarks.paper import measured
from preble import LocalConfig, sim
from preble.workloads import Workload, arrival_times, generate, merged, poisson, read, traced

DATA = ROOT / "benchmarks" / "paper" / "data"
WORKERS = 32
KV_TOKENS = 198_516
ROUTERS = (1, 2, 4, 8)
DELAYS = (0.0, 0.05, 0.2, 0.5)
SEEDS = (10, 11, 12, 13, 14, 15)  # those below served to find the constants of the rule
WARM = 0.3  # of the requests: they fill the caches and are not counted
SAMPLES = 5


@dataclass(frozen=True)
class Source:
    """A workload: `requests` over `groups` at `rps`, for all workers together. Mooncake: its ten samples at once."""

    title: str
    rps: float
    requests: int = 0
    groups: int = 0


SOURCES: Mapping[str, Source] = {
    "toolbench": Source("ToolBench", 250, 10_000, 1600),
    "embodied": Source("Embodied agents", 100, 6000, 1600),
    "programming": Source("Programming", 30, 5000, 800),
    "videoqa": Source("Video QA", 40, 4000, 1200),
    "loogle": Source("LooGLE", 10, 4000, 380),
    "mooncake": Source("Mooncake", 9),
}


@dataclass(frozen=True)
class Cell:
    """One simulation."""

    workload: str
    seed: int
    delay_seconds: float
    routers: int


# --- running ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def workload_of(name: str, seed: int) -> Workload:
    """A workload's requests with their times."""
    source = SOURCES[name]
    if name == "mooncake":
        return mooncake(source.rps, seed)
    return poisson(generate(name, requests=source.requests, groups=source.groups, seed=seed), source.rps, seed + 1)


def mooncake(rps: float, seed: int, count: int = SAMPLES) -> Workload:
    """So many samples of both traces at once, in the time that `rps` asks for, each at a speed of its own within
    10 %."""
    kinds = itertools.product(("conversation", "synthetic"), range(count))
    samples = [read(DATA / f"mooncake_{kind}_{number}.jsonl.gz") for kind, number in kinds]
    seconds = sum(len(sample.requests) for sample in samples) / rps
    speeds = np.random.default_rng(seed).uniform(0.9, 1.1, len(samples))
    times = [arrival_times(sample) for sample in samples]
    return merged(
        "mooncake",
        [
            traced(sample, at, seconds * speed / float(at[-1] - at[0]))
            for sample, at, speed in zip(samples, times, speeds, strict=True)
        ],
    )


def run(cell: Cell) -> dict[str, float]:
    """Simulate a cell; its figures."""
    workload = workload_of(cell.workload, cell.seed)
    config = sim.SimConfig(
        workers=WORKERS,
        routers=cell.routers,
        event_delay_seconds=cell.delay_seconds,
        network_seconds=0.0005,
        local=LocalConfig(
            KV_TOKENS, token_budget=512, max_running=512, max_waiting=10**6, eviction="lru", short_first=False
        ),
        seed=cell.seed,
    )
    result = sim.simulate(workload, config)
    summary = result.summary(float(np.nanquantile(result.arrival_seconds, WARM)))
    return {
        "hit_fraction": summary.hit_fraction,
        "mean_ttft_seconds": summary.mean_ttft_seconds,
        "p99_ttft_seconds": summary.p99_ttft_seconds,
        "load_spread": summary.load_spread,
        "unfinished": summary.requests - summary.finished,
    }


def run_all(cells: Sequence[Cell], kept: Path) -> dict[Cell, dict[str, float]]:
    """Run what is not kept yet, on all cores; one line of `kept` a cell."""
    found = {Cell(**line["cell"]): line["figures"] for line in map(json.loads, _lines(kept))}
    left = [cell for cell in cells if cell not in found]
    started = time.monotonic()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool, kept.open("a") as file:
        for cell, figures in zip(left, pool.map(run, left), strict=True):
            found[cell] = figures
            file.write(json.dumps({"cell": cell.__dict__, "figures": figures}) + "\n")
            file.flush()
            sys.stderr.write(f"{len(found)} of {len(cells)} cells, {time.monotonic() - started:.0f} s\n")
    return {cell: found[cell] for cell in cells}


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


# --- the table --------------------------------------------------------------------------------------------------------


def ratio(found: Mapping[Cell, Mapping[str, float]], cell: Cell, what: str, seeds: Iterable[int]) -> float:
    """A figure over that of one router, geometric mean over the seeds."""
    logs = []
    for seed in seeds:
        one, many = (Cell(cell.workload, seed, cell.delay_seconds, count) for count in (1, cell.routers))
        logs.append(math.log(found[many][what] / found[one][what]))
    return math.exp(sum(logs) / len(logs))


def table(found: Mapping[Cell, Mapping[str, float]], what: str, show: Callable[[float], str]) -> list[str]:
    """Rows of workloads, columns of router counts and delays."""
    seeds = sorted({cell.seed for cell in found})
    columns = sorted({(cell.delay_seconds, cell.routers) for cell in found if cell.routers > 1})
    head = [f"{routers} routers, {delay * 1000:.0f} ms" for delay, routers in columns]
    rows = ["| | one router, 50 ms | " + " | ".join(head) + " |", "|---|---|" + "---|" * len(head)]
    for name in dict.fromkeys(cell.workload for cell in found):
        one = [found[Cell(name, seed, 0.05, 1)][what] for seed in seeds]
        cells = [f"{ratio(found, Cell(name, 0, delay, routers), what, seeds):.3f}" for delay, routers in columns]
        rows.append(f"| {SOURCES[name].title} | {show(sum(one) / len(one))} | {' | '.join(cells)} |")
    return rows


def section(record: Mapping[str, Any]) -> str:
    """What stands in docs/results.md."""
    found = {Cell(**line["cell"]): line["figures"] for line in record["cells"]}
    seeds = sorted({cell.seed for cell in found})
    at_50 = [cell for cell in found if cell.routers == 8 and cell.delay_seconds == 0.05 and cell.seed == seeds[0]]
    late = [
        f"{SOURCES[cell.workload].title} ({ratio(found, cell, 'p99_ttft_seconds', seeds):.2f})"
        for cell in at_50
        if ratio(found, cell, "p99_ttft_seconds", seeds) > 1.1
    ]
    fewer = [
        f"{SOURCES[cell.workload].title} ({ratio(found, cell, 'hit_fraction', seeds):.3f})"
        for cell in at_50
        if ratio(found, cell, "hit_fraction", seeds) < 0.97
    ]
    lines = [
        "## One, two, four, eight routers",
        "",
        f"{WORKERS} workers (A6000, Mistral-7B) in simulation; each request comes to one of the routers by chance, the",
        "others learn of it as late as the column says. Ratios to one router that learns of its own requests' tokens",
        f"as late; geometric means over seeds {', '.join(map(str, seeds))}.",
        "How routers agree: [fleets](fleet.md#many-routers).",
        "",
        "At 50 ms, eight routers have a p99 TTFT more than 10 % over one router's in: "
        + (", ".join(late) or "none")
        + "; less than 97 % of its hit fraction in: "
        + (", ".join(fewer) or "none")
        + ".",
        "",
        "p99 TTFT:",
        "",
        *table(found, "p99_ttft_seconds", lambda seconds: f"{seconds:.3g} s"),
        "",
        "Mean TTFT:",
        "",
        *table(found, "mean_ttft_seconds", lambda seconds: f"{seconds:.3g} s"),
        "",
        "Hit fraction:",
        "",
        *table(found, "hit_fraction", lambda share: f"{share:.1%}"),
        "",
        f"Made by `{typed_today(record['command'])}` at {record['commit']}, {record['python']}.",
        "",
    ]
    return "\n".join(lines)


# --- the command ------------------------------------------------------------------------------------------------------


def grid(args: argparse.Namespace) -> list[Cell]:
    """The cells, those with the same requests side by side: every count at 50 and 500 ms, one and eight at the rest."""
    cells = []
    for name, seed in itertools.product(args.workload or SOURCES, args.seeds):
        for delay, routers in itertools.product(DELAYS, ROUTERS):
            if routers in (1, 8) or delay in (0.05, 0.5):
                cells.append(Cell(name, seed, delay, routers))
    return cells


def main(arguments: list[str]) -> int:
    """Everything asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", action="append", choices=list(SOURCES), help="this one; may be repeated")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--json", type=Path, default=RESULTS / "routers.json")
    parser.add_argument("--docs", action="store_true", help="write the section of docs/results.md")
    args = parser.parse_args(arguments)
    kept = ROOT / "build" / f"routers-{commit()}.jsonl"
    kept.parent.mkdir(exist_ok=True)
    found = run_all(grid(args), kept)
    record = {
        "command": f"python -m benchmarks.scale.routers --seeds {' '.join(map(str, args.seeds))} --docs",
        "commit": commit(),
        "python": f"Python {platform.python_version()}",
        "cells": [{"cell": cell.__dict__, "figures": figures} for cell, figures in found.items()],
    }
    args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.docs:
        write_docs(record)
    return 0


def write_docs(record: Mapping[str, Any]) -> None:
    """The section, and with it the page."""
    (RESULTS / "routers.md").write_text(section(record))
    measured.update()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
