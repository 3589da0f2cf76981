"""Figure 10: the ablation on ToolBench with skewed popularity, one part of Preble after the other. Owns the stages, the
simulating, the picture and the page's section. Paper section 5.4."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper.cells import Store, rounded
from benchmarks.paper.drawing import bars, figure, save
from benchmarks.paper.page import number, prose, ratio, table
from benchmarks.paper.setups import FLEETS, SYSTEMS, local_config, policy_of, workload_of
from preble import SchedulerConfig, sim

FLEET, WORKLOAD = "4xa6000", "toolbench-zipf"
RATES = (24.0, 36.0, 48.0)
SEEDS = 3
NO_DECODING = {"imbalance_share": 1.0}
PLAIN = {"rebalance_ratio": 0.0, "replicas_max": 1, **NO_DECODING}
COLOUR = "#2a6f97"
METRICS = {
    "mean_latency_seconds": "mean latency, s",
    "p99_latency_seconds": "p99 latency, s",
    "mean_ttft_seconds": "mean TTFT, s",
    "p99_ttft_seconds": "p99 TTFT, s",
}
ABOUT = """
    The paper's ablation: 640 tools asked for with Zipf 1.1, four A6000, 36 requests a second for 300 s in the
    authors' configuration, beside a lighter and a heavier load. Each stage adds one part to those before it, on the
    paper's rule ("e2-paper") and then on ours. The oracle knows the tools and deals them out evenly by number. The
    paper has no formula of its prefill/decode balancing; [ours](policies.md#plans) is of the cost model.
"""
REMARK = """
    The paper shows this figure as a picture only; its text says that E2 improves mean and p99, rebalancing and copies
    most of all the p99, prefill/decode balancing both, and the priority queue the p99 alone. Here prefill/decode
    balancing improves both and the paper's E2 the p99, at 48 a second not the mean; plans do the more the heavier the
    load; the queue improves the mean, not the p99. Our price in place of everything but the queue has a lower p99 at
    24 and 36 and a higher mean latency everywhere; as shipped, with the queue, it has the mean of the paper's whole
    system. It needs no plans, since it sees each worker's queue and decoding, which the paper's L does not.
"""


@dataclass(frozen=True)
class Stage:
    """A system of the ablation: what the scheduler and the workers' queues are reported."""

    title: str
    system: str
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    order: str = "fcfs"


STAGES: Mapping[str, Stage] = {
    "oracle": Stage("oracle partition", "oracle"),
    "e2": Stage("the paper's E2 for each request", "e2-paper", PLAIN),
    "shifts": Stage("+ rebalancing and copies", "e2-paper", NO_DECODING),
    "decoding": Stage("+ prefill/decode balancing", "e2-paper"),
    "queue": Stage("+ priority queue", "e2-paper", {}, "priority"),
    "price": Stage("one price in place of all but the queue", "e2"),
    "shipped": Stage("+ priority queue: as shipped", "e2", {}, "priority"),
}


@dataclass(frozen=True)
class AblationCell:
    """A stage at a rate. `share` of the experiment's length is run."""

    rps: float
    seed: int
    stage: str
    share: float

    @property
    def place(self) -> tuple[Any, ...]:
        """Stages have the same requests."""
        return self.rps, self.seed, self.share

    @property
    def cost(self) -> float:
        """Cells of a higher cost are begun first."""
        return self.rps


Found = dict[AblationCell, dict[str, Any]]


def grid(quick: bool) -> Iterator[AblationCell]:
    """Rates by seeds by stages."""
    for rps in RATES[1:2] if quick else RATES:
        for seed in range(1 if quick else SEEDS):
            for stage in STAGES:
                yield AblationCell(rps, seed, stage, 0.1 if quick else 1.0)


def run_place(cells: Sequence[AblationCell], directory: Path) -> Found:
    """Simulate cells one after the other, in this process."""
    store, found = Store(directory), {}
    for cell in cells:
        found[cell] = run_cell(cell)
        store.put(cell, found[cell])
    return found


def run_cell(cell: AblationCell) -> dict[str, Any]:
    """A stage's figures."""
    stage, fleet = STAGES[cell.stage], FLEETS[FLEET]
    system = SYSTEMS[stage.system]
    workload = workload_of(WORKLOAD, FLEET, cell.rps, cell.seed, cell.share)
    local = local_config(fleet, system)
    config = sim.SimConfig(
        workers=fleet.workers,
        policy=policy_of(system, workload),
        cost_model=fleet.cost_model,
        local=local if stage.order == "priority" else replace(local, order=stage.order),
        scheduler=SchedulerConfig(**stage.scheduler),
        seed=cell.seed,
        step_seconds=fleet.step_seconds,
        step_seconds_per_request=fleet.step_seconds_per_request,
    )
    return rounded(sim.simulate(workload, config).summary().as_dict())


def mean(found: Found, rps: float, stage: str, metric: str) -> float:
    """Of the seeds."""
    return float(np.mean([f[metric] for cell, f in found.items() if (cell.rps, cell.stage) == (rps, stage)]))


def rates(found: Found) -> list[float]:
    """Those that ran."""
    return sorted({cell.rps for cell in found})


def draw(found: Found, directory: Path) -> None:
    """Mean and p99 latency of each stage, a column a rate."""
    names = rates(found)
    sheet, axes = figure(2, len(names), max(7.0, 4.2 * len(names)), 5.5)
    axes = np.asarray(axes).reshape(2, len(names))
    for column, rps in enumerate(names):
        for axis, metric in zip(axes[:, column], ("mean_latency_seconds", "p99_latency_seconds"), strict=True):
            values = [mean(found, rps, stage, metric) for stage in STAGES]
            titles = [stage.title for stage in STAGES.values()] if column == 0 else []
            bars(axis, titles, values, [COLOUR] * len(STAGES))
            axis.set_title(f"{rps:g} rps: {METRICS[metric]}", fontsize=9, loc="left")
    save(sheet, directory / "figure10.png", "ToolBench, Zipf 1.1, on 4 x A6000: one part after the other")


def section(found: Found) -> str:
    """Markdown."""
    parts = ["## Figure 10: what each part brings", "", prose(ABOUT)]
    for rps in rates(found):
        lines = []
        before: str | None = None
        for stage in STAGES:
            values = {metric: mean(found, rps, stage, metric) for metric in METRICS}
            gains = [
                ratio(mean(found, rps, before, metric) / values[metric]) if before else ""
                for metric in ("mean_latency_seconds", "p99_latency_seconds")
            ]
            lines.append([f"{rps:g}", STAGES[stage].title, *(number(values[metric]) for metric in METRICS), *gains])
            before = stage
        heads = ["rps", "system", *METRICS.values(), "mean latency, gain over the line above", "p99, gain"]
        parts += [table(heads, lines), ""]
    return "\n".join([*parts, prose(REMARK), "![Figure 10](figures/figure10.png)", ""])
