"""The contest's pictures: heat maps of ours over the best rival, and curves of all policies over load. Owns drawing
only."""

from __future__ import annotations

from math import log2
from pathlib import Path
from typing import Any

from benchmarks.paper import contest_stats as stats
from benchmarks.paper.contest_cells import ORACLE, SOURCES
from preble.cli.console import GREY, TITLE, tidy
from preble.errors import MissingExtra

METRICS = {"p99_ttft_seconds": "p99 TTFT", "mean_ttft_seconds": "mean TTFT"}
DEEPEST = 2.0  # ratios of this and more (its inverse and less) have the full colour
SHORT = {"cache_aware:struct": "c_a:struct", "longest_prefix": "longest_pref.", "power_of_two": "power_of_2"}
LINES: dict[str, dict[str, Any]] = {
    "e2": {"color": "#2b6ca3", "linewidth": 3.0, "zorder": 5},
    "e2-paper": {"color": "#9b86bd"},
    "cache_aware": {"color": "#d1603d"},
    "kv_cost": {"color": "#d9a13b"},
    "lmetric": {"color": "#8a6d3b"},
    "prefix_hash": {"color": "#c77cb4"},
    "round_robin": {"color": "#777777", "linestyle": (0, (1, 1))},
    ORACLE: {"color": "#5b8c5a", "linestyle": (0, (5, 2))},
    stats.POOLED: {"color": "#222222", "linestyle": (0, (3, 1, 1, 1))},
    stats.BOUND: {"color": "#222222", "linestyle": (0, (1, 2)), "linewidth": 2.0},
}
OTHERS = {"color": "#d5d5d5", "linewidth": 1.2, "zorder": 1}


def draw(found: stats.Found, directory: Path) -> None:
    """Write contest-heat.png, contest-p99.png and contest-mean.png. Raises `MissingExtra` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra('the pictures need matplotlib: pip install "preble[bench]"') from error
    directory.mkdir(parents=True, exist_ok=True)
    rows, columns = len(stats.workloads(found)), len(stats.loads(found))
    heat = Figure(figsize=(5.0 + 2.1 * columns, 1.8 + 0.52 * rows), layout="constrained", facecolor="white")
    for axes, (metric, title) in zip(heat.subplots(1, 2, sharey=True), METRICS.items(), strict=True):
        draw_heat(axes, found, metric, title)
    heat.suptitle("E2 over the best rival of each cell: below 1 (blue) E2 is better, above 1 (red) worse", **HEADING)
    heat.supxlabel(
        "load, share of the pooled reference's saturation. Under each ratio the best rival; frame: 95 % interval off 1",
        fontsize=9, color=GREY,
    )  # fmt: skip
    heat.savefig(directory / "contest-heat.png", dpi=110, metadata={"Software": None})
    for metric, name in (("p99_ttft_seconds", "contest-p99.png"), ("mean_ttft_seconds", "contest-mean.png")):
        sheet = Figure(figsize=(15.0, 7.4), layout="constrained", facecolor="white")
        draw_curves(sheet, found, metric)
        sheet.suptitle(
            f"{METRICS[metric]} over load, 4 x A6000, mean over seeds (log scale; what is far above is cut off)",
            **HEADING,
        )
        sheet.savefig(directory / name, dpi=100, metadata={"Software": None})


def draw_heat(axes: Any, found: stats.Found, metric: str, title: str) -> None:
    """A square a cell, with the ratio and the rival."""
    names, loads = stats.workloads(found), stats.loads(found)
    cells = stats.against_best(found, metric)
    depth = log2(DEEPEST)
    colours = [[log2(cell.value) for cell in cells if cell.workload == name] for name in names]
    axes.imshow(colours, cmap=soft_colours(), vmin=-depth, vmax=depth, aspect="auto")
    for place, cell in enumerate(cells):
        y, x = divmod(place, len(loads))
        sure = cell.low > 1.0 or cell.high < 1.0
        ink = "white" if abs(log2(cell.value)) > 0.85 * depth else "#222222"
        weight = "bold" if sure else "normal"
        axes.text(x, y - 0.13, f"{cell.value:.2f}", ha="center", va="center", color=ink, fontsize=12, fontweight=weight)
        rival = SHORT.get(cell.rival, cell.rival)
        axes.text(x, y + 0.27, rival, ha="center", va="center", color=ink, fontsize=7)
        if sure:
            frame = {"fill": False, "edgecolor": ink, "linewidth": 1.6}
            axes.add_patch(rectangle(x - 0.46, y - 0.45, 0.92, 0.9, frame))
    axes.set_xticks(range(len(loads)), [f"{load:.0%}" for load in loads])
    axes.set_yticks(range(len(names)), [SOURCES[name].title for name in names])
    axes.tick_params(length=0, colors="#222222")
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_title(title, **TITLE)


def soft_colours() -> Any:
    """Blue over white to red, without the darkest ends, on which nothing can be read."""
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap

    whole = colormaps["RdBu_r"]
    return LinearSegmentedColormap.from_list("soft", [whole(0.12 + 0.76 * step / 32) for step in range(33)])


def rectangle(x: float, y: float, width: float, height: float, style: dict[str, Any]) -> Any:
    """A patch; matplotlib is imported only where something is drawn."""
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, **style)


def draw_curves(sheet: Any, found: stats.Found, metric: str) -> None:
    """A panel a workload, a line a policy. Grey lines far above all others are cut off: they would flatten the rest."""
    from matplotlib.ticker import LogLocator

    names, loads = stats.workloads(found), stats.loads(found)
    columns = -(-len(names) // 2)
    grid = sheet.subplots(2, columns, squeeze=False).flat
    for axes, workload in zip(grid, names, strict=False):
        highest = 0.0
        for policy in (*stats.policies(found), stats.POOLED, stats.BOUND):
            middles = [float(stats.values(found, workload, load, policy, metric).mean()) for load in loads]
            style = {"linewidth": 1.7, **LINES.get(policy, OTHERS)}
            highest = max([highest, *middles]) if policy in LINES else highest
            axes.plot([100 * load for load in loads], middles, label=policy, **style)
        axes.set_yscale("log")
        axes.set_ylim(top=1.6 * highest)
        axes.set_title(SOURCES[workload].title, **TITLE)
        axes.set_xticks([100 * load for load in loads])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} %")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} s")
        axes.yaxis.set_minor_formatter("")
        tidy(axes)
    handles, labels = axes.get_legend_handles_labels()
    known = [(h, name) for h, name in zip(handles, labels, strict=True) if name in LINES]
    grey = [(h, "other policies") for h, name in zip(handles, labels, strict=True) if name not in LINES][:1]
    shown = [*known, *grey]
    sheet.legend(
        [h for h, _ in shown], [name for _, name in shown], loc="outside lower center", ncols=len(shown), frameon=False,
        fontsize=9,
    )  # fmt: skip


HEADING: dict[str, Any] = {"fontsize": 12, "fontweight": "bold", "x": 0.01, "ha": "left"}
