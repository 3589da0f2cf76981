"""How the evaluation's figures look: colours by system, lines, points, bars. Owns style, no data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

GREY = "#555555"
COLOURS = {
    "sglang_rr": "#d1603d", "vllm_rr": "#d1603d", "rr": "#e8a58f", "sglang_oracle": "#5b8c5a", "vllm_oracle": "#5b8c5a",
    "oracle": "#a7c7a5", "e2-paper": "#9b86bd", "e2": "#2b6ca3", "vllm_e2": "#7fb1d9", "vllm_e2-paper": "#9b86bd",
    "e2-fcfs": "#d1603d", "e2-lpm": "#5b8c5a", "e2-nobound": "#9b86bd",
}  # fmt: skip


def figure(rows: int, columns: int, width: float, height: float) -> tuple[Figure, Any]:
    """A sheet and its axes, shape [rows, columns]."""
    sheet = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    return sheet, sheet.subplots(rows, columns, squeeze=False)


def tidy(axis: Any) -> None:
    """Fewer lines, paler ones."""
    axis.grid(True, color="#e4e4e4", linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color("#bbbbbb")
    axis.tick_params(colors=GREY, labelsize=8)


def logarithmic(axis: Any) -> None:
    """A logarithmic y axis with plain numbers at 1, 2, 5."""
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_locator(NullLocator())


def line(axis: Any, x: Sequence[float], y: Sequence[float], colour: str, label: str, **style: Any) -> None:
    """A simulated curve."""
    axis.plot(x, y, "-o", color=colour, label=label, **{"markersize": 3.5, "linewidth": 1.8, **style})
    tidy(axis)


def points(axis: Any, x: Sequence[float], y: Sequence[float], colour: str, label: str) -> None:
    """Published points."""
    axis.plot(x, y, "x", color=colour, label=label, markersize=7, markeredgewidth=1.8)


def bars(axis: Any, names: Sequence[str], values: Sequence[float], colours: Sequence[str]) -> None:
    """Lying bars with their values, and their names where there are any."""
    axis.barh(range(len(values)), values, color=colours, height=0.7)
    for i, value in enumerate(values):
        axis.text(value, i, f" {value:.3g}", va="center", fontsize=8, color=GREY)
    axis.set_yticks(range(len(values)), names or [""] * len(values), fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, max(values) * 1.25 or 1.0)
    tidy(axis)


def save(sheet: Figure, path: Path, title: str) -> None:
    """Write a PNG, without a date in it."""
    sheet.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.savefig(path, dpi=100, metadata={"Software": None})
