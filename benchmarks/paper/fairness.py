"""Fairness: what the order of the local queue is worth, and whom it makes wait. Owns the grid, the picture and the
page's section. Paper section 4.3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.paper.cells import Cell, Found
from benchmarks.paper.drawing import COLOURS, bars, figure, save
from benchmarks.paper.page import number, prose, table
from benchmarks.paper.setups import SOURCES

ORDER = ("e2-fcfs", "e2-lpm", "e2-nobound", "e2")
PLACES = (("toolbench-zipf", 12.0), ("videoqa", 2.5), ("loogle", 0.6), ("programming", 2.5))
ABOUT = """
    The same requests and the same global scheduler (E2), two workers near or beyond saturation; only the order of
    the workers' queues differs. Preble's own has the paper's priority groups and an age bound: of those that waited
    for 30 s the oldest has every eighth turn.
"""
ORDERS = {
    "e2-fcfs": "first come first served",
    "e2-lpm": "longest prefix first",
    "e2-nobound": "priority groups, no age bound",
    "e2": "priority groups, age bound (Preble)",
}
SHORT = {"p99_ttft_seconds": "p99 TTFT, s", "max_ttft_seconds": "longest TTFT, s"}
METRICS = {
    "mean_ttft_seconds": "mean TTFT, s",
    "p99_ttft_seconds": "p99 TTFT, s",
    "max_ttft_seconds": "longest wait for a first token, s",
}


def grid(quick: bool) -> Iterator[Cell]:
    """Four workloads near and beyond saturation, each order of the queue."""
    for workload, rps in PLACES:
        for system in ORDER:
            yield Cell("fairness", workload, "2xa6000", system, rps, share=0.1 if quick else 1.0)


def chosen(found: Found, workload: str) -> dict[str, dict[str, float]]:
    """System -> figures of one workload."""
    return {
        cell.system: figures
        for cell, figures in found.items()
        if (cell.experiment, cell.workload) == ("fairness", workload)
    }


def draw(found: Found, directory: Path) -> None:
    """p99 and longest wait of each order, a column a workload."""
    sheet, axes = figure(2, len(PLACES), 13.0, 5.5)
    for column, (workload, rps) in enumerate(PLACES):
        rows = chosen(found, workload)
        for axis, metric in zip(axes[:, column], ("p99_ttft_seconds", "max_ttft_seconds"), strict=True):
            values = [rows[system][metric] for system in ORDER]
            bars(axis, [ORDERS[s] for s in ORDER] if column == 0 else [], values, [COLOURS[s] for s in ORDER])
            axis.set_title(f"{SOURCES[workload].title}, {rps:g} rps:\n{SHORT[metric]}", fontsize=9, loc="left")
    save(sheet, directory / "fairness.png", "The order of the local queue, E2 in front, 2 x A6000")


def section(found: Found) -> str:
    """Markdown."""
    lines = []
    for workload, rps in PLACES:
        for system, figures in chosen(found, workload).items():
            lines.append([
                f"{SOURCES[workload].title}, {rps:g} rps", ORDERS[system],
                *(number(figures[metric]) for metric in METRICS), f"{figures['hit_fraction']:.0%}",
            ])  # fmt: skip
    heads = ["workload", "order", *METRICS.values(), "hits"]
    return "\n".join([
        "## Fairness: the order of the local queue", "", prose(ABOUT), table(heads, lines), "",
        "![The order of the local queue](figures/fairness.png)", "",
    ])  # fmt: skip
