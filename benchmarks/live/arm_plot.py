"""The picture of docs/results-live.md: mean TTFT of every arm, a panel for each engine, traffic and load. Measures
nothing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.live.arm_fleet import ARMS, GATEWAYS, suits
from benchmarks.live.arm_report import OURS, PAGES, PICTURES, Found, counted, runs_of, traffics

FILES = {device: PAGES[device].parent / picture for device, picture in PICTURES.items()}
COLUMNS = 4
INK, OURS_COLOUR, GATEWAY_COLOUR, OTHER_COLOUR = "#333333", "#2b6ca3", "#d1603d", "#8a8a8a"


def colour(arm: str) -> str:
    """Ours, gateways, and what a client can do alone."""
    return OURS_COLOUR if arm in OURS else GATEWAY_COLOUR if arm in GATEWAYS else OTHER_COLOUR


def draw(kept: Sequence[Found], device: str = "cpu", file: Path | None = None) -> None:
    """Write the picture of what was measured; none if nothing was."""
    from matplotlib.figure import Figure

    runs = counted(kept)
    places = list(traffics(runs))
    if not places:
        return
    columns = min(COLUMNS, len(places))
    rows = -(-len(places) // columns)
    sheet = Figure(figsize=(1.6 + 3.4 * columns, 0.7 + 2.7 * rows), layout="constrained", facecolor="white")
    shown = [arm for arm in ARMS if any(suits(arm, engine) for engine, _, _ in places)]
    panels = sheet.subplots(rows, columns, squeeze=False, sharey=True).flat
    for number, axes in enumerate(panels):
        if number < len(places):
            engine, traffic, load = places[number]
            panel(axes, {arm: runs_of(runs, engine, traffic, load, arm) for arm in shown})
            axes.set_title(f"{engine}, {traffic}, {load:g}", fontsize=9, color=INK)
        else:
            axes.set_visible(False)
    told = "mean TTFT, s; shorter is better\na dot for each repetition (hollow: noisy), a bar at their mean"
    sheet.supxlabel(told, fontsize=8, color=INK)
    file = file or FILES[device].resolve()
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet.savefig(file, dpi=110, metadata={"Software": None})


def panel(axes: Any, found: dict[str, dict[int, Found]]) -> None:
    """A row for each arm, the first on top; dots of noisy runs are hollow."""
    for row, (arm, runs) in enumerate(found.items()):
        answered = [run for run in runs.values() if "mean_ttft_seconds" in run]
        if not answered:
            axes.text(0.02, row, "missing", transform=axes.get_yaxis_transform(), fontsize=7, color=INK, va="center")
            continue
        mean = statistics.fmean(run["mean_ttft_seconds"] for run in answered)
        axes.barh(row, mean, height=0.62, color=colour(arm), alpha=0.35, zorder=2)
        for run in answered:
            face = "white" if run["noisy"] else colour(arm)
            axes.plot(run["mean_ttft_seconds"], row, "o", ms=4.5, mfc=face, mec=colour(arm), zorder=3)
        style = {"textcoords": "offset points", "fontsize": 8, "color": INK, "va": "center"}
        axes.annotate(f"{mean:.2f}", (max(run["mean_ttft_seconds"] for run in answered), row), (6, 0), **style)
    axes.set_yticks(range(len(found)), list(found), fontsize=8)
    for label in axes.get_yticklabels():
        label.set_color(colour(label.get_text()))
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.margins(x=0.16)
    axes.set_xlim(left=0.0)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8, zorder=0)
    axes.tick_params(axis="x", labelsize=8, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
