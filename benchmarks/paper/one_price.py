"""The rule "e2" beside rivals where a gate once lost the fleet, in the product's simulator. Owns the cases and the
page's section.

    python -m benchmarks.paper.one_price --json benchmarks/results/one_price.json --docs

Cases: the contest's workloads at loads of their saturation (four workers), and of `fleet_cases` one system prompt for
all, a prefix that is another one every few seconds, nothing shared; on two workers and on eight.
A figure is a mean over the seeds. Ratios over one are losses.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import facts
from benchmarks.common.paths import DOCS
from benchmarks.common.tables import markdown, rounded
from benchmarks.paper import fleet_cases
from benchmarks.paper.contest_cells import FLEET, arriving, drained, local_config
from benchmarks.paper.fleet_cases import FIGURES, Case
from benchmarks.paper.fleets import PLAIN, ratios
from preble import sim

PAGE = DOCS / "experiments" / "one-price.md"
POLICIES = (
    "e2", "round_robin", "least_loaded", "cache_aware", "cache_aware_spill", "session_least", "kv_cost", "lmetric",
)  # fmt: skip
CONTEST = ("toolbench", "toolbench-zipf", "programming", "embodied", "loogle", "azure-mix")
GENERATED = ("system prompt", "viral", "nothing shared")
LOADS = (0.1, 0.6, 1.0, 1.2)
SHARE = 0.3  # of a contest workload's requests, and
GENERATED_SHARE = 0.5  # of the others'
WARM = 0.2  # of the requests, that are not counted
Figures = Mapping[str, list[float]]


def cases(seeds: int) -> Iterator[Case]:
    for seed in range(seeds):
        for load in LOADS:
            for name in CONTEST:
                yield Case(name, load, FLEET.workers, seed, SHARE)
            for name in GENERATED:
                for workers in (2, 8):
                    yield Case(name, load, workers, seed, GENERATED_SHARE)


def run(case: Case) -> tuple[Case, dict[str, list[float]]]:
    """Mean and p99 of TTFT and latency, by policy."""
    if case.name in GENERATED:
        return case, fleet_cases.measured(case, POLICIES)
    workload = arriving(case.name, case.seed, case.share, drained(case.name, case.share), case.load)
    counted = np.arange(len(workload)) >= WARM * len(workload)
    found = {}
    for name in POLICIES:
        config = sim.SimConfig(
            workers=case.workers,
            policy=name,
            cost_model=FLEET.cost_model,
            local=local_config(),
            seed=case.seed,
        )
        found[name] = fleet_cases.figures_of(sim.simulate(workload, config), counted)
    return case, found


def means(results: list[dict[str, Any]]) -> dict[tuple[str, float, int], dict[str, list[float]]]:
    """Figures by case and policy, over its seeds; of the policies that were run."""
    by: dict[tuple[str, float, int], list[Figures]] = {}
    for one in results:
        by.setdefault((one["case"], one["load"], one["workers"]), []).append(one["figures"])
    return {
        key: {name: [float(x) for x in np.mean([one[name] for one in found], axis=0)] for name in found[0]}
        for key, found in by.items()
    }


def summary(cells: Mapping[tuple[str, float, int], Figures]) -> str:
    """Each policy against the best of the others of each cell."""
    rows, policies = [], tuple(next(iter(cells.values())))
    for policy in policies:
        each = [(ratios(found, policy, policies), key) for key, found in cells.items()]
        geometric = [f"{exp(sum(log(row[at]) for row, _ in each) / len(each)):.2f}" for at in range(len(FIGURES))]
        worst, figure, key = max((row[at], FIGURES[at], key) for row, key in each for at in range(len(FIGURES)))
        rows.append([policy, *geometric, f"{worst:.2f} ({figure}, {key[0]} at {key[1]:g}, {key[2]} workers)"])
    return markdown(["rule", *FIGURES, "worst cell"], rows)


def losses(cells: Mapping[tuple[str, float, int], Figures]) -> str:
    """Every cell: "e2" against the better of round robin and least load; the worst first."""
    rows = []
    for (name, load, workers), found in cells.items():
        mine = ratios(found, POLICIES[0], PLAIN)
        rows.append((max(mine), [name, f"{load:g}", str(workers), *(f"{ratio:.2f}" for ratio in mine)]))
    rows.sort(key=lambda row: -row[0])
    return markdown(["case", "load", "workers", *FIGURES], [row for _, row in rows])


def write_docs(result: dict[str, Any], page: Path = PAGE) -> None:
    """Put the tables between the page's markers."""
    made, cells = result["facts"], means(result["cells"])
    text = page.read_text()
    before, _, rest = text.partition("<!-- one price: start -->\n")
    _, marker, after = rest.partition("<!-- one price: end -->")
    told = f"`{made['command']}` at {made['commit']}, seeds 0 to {result['seeds'] - 1}, {made['machine']}."
    section = f"{told}\n\n{summary(cells)}\n\n### Beside round robin and least load\n\n{losses(cells)}\n"
    page.write_text(f"{before}<!-- one price: start -->\n{section}{marker}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--docs", action="store_true", help="write the page's section")
    args = parser.parse_args()
    with ProcessPoolExecutor() as pool:
        found = list(pool.map(run, cases(args.seeds)))
    result = {
        "facts": facts.environment(0),
        "seeds": args.seeds,
        "cells": [
            {"case": case.name, "load": case.load, "workers": case.workers, "seed": case.seed, "figures": figures}
            for case, figures in found
        ],
    }
    if args.json:
        args.json.write_text(json.dumps(rounded(result), indent=1) + "\n")
    if args.docs:
        write_docs(result)
    print(summary(means(result["cells"])))


if __name__ == "__main__":
    main()
