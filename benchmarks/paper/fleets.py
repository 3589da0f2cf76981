"""Fleets of 2, 8 and 32 workers from idle to overload, and traffic that can lose them: "e2" beside plain and caching
rules. Owns the grid, the comparison, the pictures and the page's section; the cases are `fleet_cases`.

Ratios are of means over seeds. Over 1 is a loss, and losses come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import exp, log, log2
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.paper.contest_plot import DEEPEST, rectangle, soft_colours
from benchmarks.paper.drawing import figure, save
from benchmarks.paper.fleet_cases import FIGURES, KINDS, Case, FleetCell
from benchmarks.paper.fleet_cases import run_place as run_place
from benchmarks.paper.page import number, prose, table

OURS, PLAIN = "e2", ("round_robin", "least_loaded")
POLICIES = (
    OURS, *PLAIN, "e2-paper", "cache_aware", "cache_aware_spill", "session_least", "session_hash", "llmd_sticky",
    "dualmap", "kv_cost", "lmetric",
)  # fmt: skip
WORKERS = (2, 8, 32)
LOADS = (0.02, 0.3, 0.6, 0.9, 1.2)
SEEDS = 3
QUICK_POLICIES = (OURS, *PLAIN, "cache_aware", "cache_aware_spill", "session_least")
QUICK_PLACES = ((0.02, 8), (0.6, 2), (0.6, 8), (1.2, 8), (0.6, 32))
QUICK_SHARE = 0.3
BEHIND = (1.02, 1.05, 1.02, 1.05)  # of round robin and least load, in each figure: more is a loss
P99_TTFT = FIGURES.index("p99 TTFT")
ABOUT = """
    Workers are of the contest's fleet; load 100 % is what a pooled reference ends of a backlog
    (`benchmarks/paper/fleet_cases.py`). Means over {seeds}; the first fifth of the requests is not counted. On the
    uneven fleet every second worker takes twice as long. Agents are closed loops: a turn is sent after the answer
    before it.
"""


class Place(NamedTuple):
    """What a row of the tables is of."""

    name: str
    load: float
    workers: int


Found = Mapping[FleetCell, Mapping[str, Any]]
Figures = Mapping[str, Sequence[float]]  # by policy, as FIGURES


def grid(quick: bool) -> Iterator[FleetCell]:
    """All cells; `quick`: five places of each kind, one seed, six policies, three tenths of the requests."""
    for name in KINDS:
        if quick:
            for load, workers in QUICK_PLACES:
                yield FleetCell(Case(name, load, workers, 0, QUICK_SHARE), QUICK_POLICIES)
            continue
        for load in LOADS:
            for workers in WORKERS:
                for seed in range(SEEDS):
                    yield FleetCell(Case(name, load, workers, seed), POLICIES)


# --- comparing --------------------------------------------------------------------------------------------------------


def means(found: Found) -> dict[Place, Figures]:
    """Figures by place and policy, over the seeds."""
    by: dict[Place, list[Figures]] = {}
    for cell, figures in found.items():
        by.setdefault(Place(cell.case.name, cell.case.load, cell.case.workers), []).append(figures["runs"])
    return {
        place: {name: [float(x) for x in np.mean([one[name] for one in runs], axis=0)] for name in runs[0]}
        for place, runs in by.items()
    }


def ratios(figures: Figures, policy: str, others: Sequence[str]) -> list[float]:
    """The policy's figures over the best of the others, each figure with its own best."""
    return [figures[policy][at] / min(figures[name][at] for name in others if name != policy) for at in range(4)]


def behind(figures: Figures) -> list[str]:
    """In which figures ours is behind round robin or least load, by more than `BEHIND`."""
    ours = ratios(figures, OURS, PLAIN)
    return [name for name, ratio, most in zip(FIGURES, ours, BEHIND, strict=True) if ratio > most]


def load_within(by_load: Sequence[tuple[float, float]], objective_seconds: float) -> tuple[str, float]:
    """The load up to which p99 TTFT stays within the objective, between two measured ones by logarithms; before it a
    sign where it is below the lowest of them, or not below the highest. `by_load`: (load, p99 TTFT), ascending."""
    before: tuple[float, float] | None = None
    for load, seconds in by_load:
        if seconds > objective_seconds:
            if before is None:
                return "< ", load
            part = log(objective_seconds / before[1]) / log(seconds / before[1])
            return "", before[0] + part * (load - before[0])
        before = load, seconds
    return "≥ ", by_load[-1][0]


def fleets_of(cells: Mapping[Place, Figures]) -> list[tuple[str, int]]:
    """Kinds in their order, each with its fleets from the smallest."""
    return sorted({(place.name, place.workers) for place in cells}, key=lambda one: (list(KINDS).index(one[0]), one[1]))


# --- the page ---------------------------------------------------------------------------------------------------------


def section(found: Found) -> str:
    """Markdown. The same cells make the same bytes."""
    cells = means(found)
    seeds = len({cell.case.seed for cell in found})
    about = ABOUT.format(seeds=f"{seeds} seed{'s' * (seeds > 1)}")
    return "\n".join([
        "## Fleets: 2, 8 and 32 workers, from idle to overload", "", prose(about),
        "### Behind round robin or least load", "", plain_losses(cells), "",
        "### Behind the best rival", "", rival_losses(cells), "",
        "![E2 over the best rival, four figures](figures/fleets-heat.png)", "",
        "### All rules", "", ranking(cells), "",
        "### Requests a second within a p99 of TTFT", "", throughput(cells), "",
    ])  # fmt: skip


def plain_losses(cells: Mapping[Place, Figures]) -> str:
    """Places where ours is behind by more than 2 % in a mean or 5 % in a p99; else the nearest."""
    lost = [place for place, figures in cells.items() if behind(figures)]
    nearest = sorted(cells, key=lambda place: -max(ratios(cells[place], OURS, PLAIN)))
    said = f"{len(lost)} of {len(cells)} places (2 % in a mean, 5 % in a p99). E2 over the better of the two, "
    said += "in these:" if lost else "where it is nearest to 1:"
    return f"{said}\n\n{ratio_table(cells, lost or nearest[:6], PLAIN)}"


def rival_losses(cells: Mapping[Place, Figures]) -> str:
    """The twelve places where ours is furthest behind the best of all others, each figure with its own."""
    rivals = [name for name in next(iter(cells.values())) if name != OURS]
    worst = sorted(cells, key=lambda place: -max(ratios(cells[place], OURS, rivals)))[:12]
    said = f"E2 over the best of {len(rivals)} in that place and figure, picked with hindsight; the worst twelve:"
    return f"{said}\n\n{ratio_table(cells, worst, rivals)}"


def ratio_table(cells: Mapping[Place, Figures], places: Sequence[Place], others: Sequence[str]) -> str:
    """Rows of places."""
    rows = [
        [place.name, f"{place.load:.0%}", str(place.workers),
         *(f"{ratio:.2f}" for ratio in ratios(cells[place], OURS, others))]
        for place in places
    ]  # fmt: skip
    return table(["case", "load", "workers", *FIGURES], rows)


def ranking(cells: Mapping[Place, Figures]) -> str:
    """Each policy over the best of the others: geometric means, and its worst place."""
    rows = []
    policies = list(next(iter(cells.values())))
    for policy in policies:
        each = {place: ratios(figures, policy, policies) for place, figures in cells.items()}
        middle = [exp(sum(log(row[at]) for row in each.values()) / len(each)) for at in range(4)]
        worst, at, place = max((row[at], at, place) for place, row in each.items() for at in range(4))
        where = f"{number(worst)} ({FIGURES[at]}, {place.name}, {place.load:.0%}, {place.workers} workers)"
        rows.append((middle[P99_TTFT], [f"`{policy}`", *(f"{value:.2f}" for value in middle), where]))
    rows.sort(key=lambda row: row[0])
    said = "Over the best of the others in each place: geometric means, and the worst place."
    return f"{said}\n\n{table(['rule', *FIGURES, 'worst place'], [row for _, row in rows])}"


def throughput(cells: Mapping[Place, Figures]) -> str:
    """Requests a second and worker at which p99 TTFT reaches its objective, between the measured loads."""
    policies = list(next(iter(cells.values())))
    rows = []
    for name, workers in fleets_of(cells):
        row = [f"{name}, {workers} workers, {KINDS[name].objective_seconds:g} s"]
        for policy in policies:
            by_load = sorted(
                (place.load, figures[policy][P99_TTFT])
                for place, figures in cells.items()
                if (place.name, place.workers) == (name, workers)
            )
            sign, load = load_within(by_load, KINDS[name].objective_seconds)
            row.append(f"{sign}{number(load * KINDS[name].rps)}")
        rows.append(row)
    said = "A worker, by logarithms between the measured loads; < and ≥ where it is beyond these."
    return f"{said}\n\n{table(['case, fleet, objective', *(f'`{name}`' for name in policies)], rows)}"


# --- the picture ------------------------------------------------------------------------------------------------------


def draw(found: Found, directory: Path) -> None:
    """Write fleets-heat.png: a panel a figure, a row a case and fleet, a column a load."""
    cells = means(found)
    rows = fleets_of(cells)
    loads = sorted({place.load for place in cells})
    sheet, axes = figure(1, 4, 19.0, 2.0 + 0.36 * len(rows))
    for at, axis in enumerate(axes[0]):
        draw_panel(axis, cells, rows, loads, at)
        axis.set_title(FIGURES[at], fontsize=11, loc="left")
        axis.set_yticks(range(len(rows)), [f"{name}, {workers}" for name, workers in rows] if at == 0 else [])
    save(sheet, directory / "fleets-heat.png", "E2 over the best rival (blue: better), and framed: over the better of"
         " round robin and least load, where that is above 1")  # fmt: skip


def draw_panel(axis: Any, cells: Mapping[Place, Figures], rows: Sequence[tuple[str, int]], loads: Sequence[float],
               at: int) -> None:  # fmt: skip
    """One figure's squares."""
    depth = log2(DEEPEST)
    colours = np.full((len(rows), len(loads)), np.nan)
    for place, figures in cells.items():
        y, x = rows.index((place.name, place.workers)), loads.index(place.load)
        ratio = ratios(figures, OURS, list(figures))[at]
        plain = ratios(figures, OURS, PLAIN)[at]
        colours[y, x] = log2(ratio)
        ink = "white" if abs(log2(ratio)) > 0.85 * depth else "#222222"
        axis.text(x, y, f"{ratio:.2f}", ha="center", va="center", color=ink, fontsize=8)
        if plain > 1.0:
            axis.add_patch(rectangle(x - 0.46, y - 0.45, 0.92, 0.9, {"fill": False, "edgecolor": ink, "linewidth": 1}))
    axis.imshow(colours, cmap=soft_colours(), vmin=-depth, vmax=depth, aspect="auto")
    axis.set_xticks(range(len(loads)), [f"{load:.0%}" for load in loads], fontsize=8)
    axis.tick_params(length=0, labelsize=8)
    for side in axis.spines.values():
        side.set_visible(False)
