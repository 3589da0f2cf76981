"""The rule "e2" beside rivals where a gate once lost the fleet, in the product's simulator. Owns the cases and the
page's section.

    python -m benchmarks.paper.one_price --json benchmarks/results/one_price.json --docs

Cases: the contest's workloads at loads of their saturation (four workers), and generated traffic that the contest
lacks: one system prompt for all, a prefix that is another one every 30 s, nothing shared; on two workers and on eight.
A figure is a mean over the seeds. Ratios over one are losses.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import facts
from benchmarks.common.paths import DOCS
from benchmarks.common.tables import markdown, rounded
from benchmarks.paper.contest_cells import FLEET, arriving, drained, local_config
from preble import sim
from preble.workloads import PromptRequest, Workload

PAGE = DOCS / "experiments" / "one-price.md"
POLICIES = (
    "e2", "round_robin", "least_loaded", "cache_aware", "cache_aware_spill", "session_least", "kv_cost", "lmetric",
)  # fmt: skip
PLAIN = ("round_robin", "least_loaded")
FIGURES = ("mean TTFT", "p99 TTFT", "mean latency", "p99 latency")
CONTEST = ("toolbench", "toolbench-zipf", "programming", "embodied", "loogle", "azure-mix")
LOADS = (0.1, 0.6, 1.0, 1.2)
SHARE = 0.3  # of a contest workload's requests
WARM = 0.2  # of the requests, that are not counted
Figures = Mapping[str, list[float]]


@dataclass(frozen=True)
class Case:
    """A workload on a fleet. `load`: of saturation (contest), or of `GENERATED`'s rate for each worker."""

    name: str
    load: float
    workers: int
    seed: int


def ids(count: int, *seed: int) -> npt.NDArray[np.int32]:
    """Token ids that differ from those of any other seed."""
    return np.random.default_rng([11, *seed]).integers(0, 32_000, count, dtype=np.int32)


def parts(name: str, number: int, at: float, seed: int, random: np.random.Generator) -> tuple[Any, ...]:
    """The segments of one generated prompt."""
    if name == "system prompt":
        user = int(random.integers(0, 400))
        return ids(3000, 1), ids(800, 2, seed, user), ids(60, 3, seed, number)
    if name == "viral":
        hot = random.random() < 0.7
        document = int(at // 30) if hot else 1000 + int(random.integers(0, 60))
        return ids(6000, 4, seed, document), ids(60, 5, seed, number)
    return (ids(int(max(50, random.normal(1500, 750))), 6, seed, number),)


# Requests a second and worker at load 1, and mean output tokens.
GENERATED = {"system prompt": (1.5, 150), "viral": (3.3, 60), "nothing shared": (3.0, 120)}


def generated(case: Case) -> Workload:
    """Poisson arrivals of generated prompts, a hundred a worker."""
    rate, output = GENERATED[case.name]
    random = np.random.default_rng([12, case.seed])
    times = np.cumsum(random.exponential(1 / (rate * case.load * case.workers), 100 * case.workers))
    return Workload(case.name, [
        PromptRequest(
            str(i), parts(case.name, i, float(at), case.seed, random), max(4, int(random.normal(output, output / 3))),
            arrival_seconds=float(at),
        )
        for i, at in enumerate(times)
    ])  # fmt: skip


def cases(seeds: int) -> Iterator[Case]:
    for seed in range(seeds):
        for load in LOADS:
            for name in CONTEST:
                yield Case(name, load, FLEET.workers, seed)
            for name in GENERATED:
                for workers in (2, 8):
                    yield Case(name, load, workers, seed)


def run(case: Case) -> tuple[Case, dict[str, list[float]]]:
    """Mean and p99 of TTFT and latency, by policy."""
    if case.name in GENERATED:
        workload = generated(case)
    else:
        workload = arriving(case.name, case.seed, SHARE, drained(case.name, SHARE), case.load)
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
        result = sim.simulate(workload, config)
        ttft, latency = result.ttft_seconds[counted], result.latency_seconds[counted]
        found[name] = [
            float(figure) for one in (ttft, latency) for figure in (np.nanmean(one), np.nanpercentile(one, 99))
        ]
    return case, found


def ratios(found: Figures, policy: str, others: tuple[str, ...]) -> list[float]:
    """The policy's figures over the best of the others."""
    return [found[policy][at] / min(found[name][at] for name in others if name != policy) for at in range(len(FIGURES))]


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
