"""Figures 4 and 5 of the paper for any workloads: cumulative distributions, one line a workload. Owns drawing only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..console import GREY, caption, new_figure, save_figure, tidy
from .statistics import Study, Values

# An axis of fractions near 1: equally far apart are 0, 90, 99 and 99.9 %, and what is above lies on the right edge.
FRACTION_TICKS = (0.0, 0.5, 0.9, 0.99, 0.999)
FRACTION_LABELS = ("0%", "50%", "90%", "99%", "99.9%+")
# Colours that stay apart for the colour-blind; with more workloads than colours they come again in another dash.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#333333")
DASHES = ("solid", (0, (5, 1.5)), (0, (1.5, 1.2)))
LINES_MAX = len(COLOURS) * len(DASHES)  # as many can be distinguished
WIDTH_INCHES = 4.6  # of a panel
LEGEND_LINE_INCHES, LEGEND_LETTER_INCHES = 0.75, 0.1  # of an entry, at the font size below
LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 11, "handlelength": 2.4, "columnspacing": 1.8}


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes: what is on x (a column of `Study`), and of what y is the share.

    The x axis is logarithmic; `fractions` makes it one of fractions of 1 (see `FRACTION_TICKS`).
    """

    title: str
    column: str
    fractions: bool = False
    sharing: bool = False
    of: str = "requests"

    def shown(self, study: Study) -> Values | None:
        """What to draw of a workload, if it has it: nothing of sharing in a trace that does not say what is shared."""
        found: Values | None = getattr(study, self.column)
        return found if study.has_sharing or not self.sharing else None


PROMPT = Panel("Prompt length, tokens", "prompt_tokens")
OUTPUT = Panel("Output length, tokens", "output_tokens")
RATIO = Panel("Prompt tokens per output token", "prompt_to_output")
FIGURE_4 = (
    PROMPT,
    OUTPUT,
    RATIO,
    Panel("Shared prefix, part of the prompt (uneven scale)", "shared_fraction", fractions=True, sharing=True),
    Panel("Key portion, part of the prompt (uneven scale)", "key_fraction", fractions=True, sharing=True),
    Panel("Requests that share a key portion", "requests_per_key", sharing=True, of="key portions"),
)
FIGURE_5 = (
    Panel("Time between arrivals, ms (0 at the left edge)", "gap_milliseconds", of="gaps"),
    PROMPT,
    OUTPUT,
    RATIO,
)


def draw_figure_4(path: Path, studies: Sequence[Study], footnote: str) -> None:
    """Write a PNG of the prompts' properties. Raises `MissingExtra` without matplotlib."""
    draw(path, studies, FIGURE_4, 3, "Prompts: length, sharing and key portions (as the paper's Figure 4)", footnote)


def draw_figure_5(path: Path, studies: Sequence[Study], footnote: str) -> None:
    """Write a PNG of arrivals and lengths of those workloads that have arrivals; there must be one."""
    timed = [study for study in studies if study.gap_seconds is not None]
    draw(path, timed, FIGURE_5, 2, "Traces: arrivals and lengths (as the paper's Figure 5)", footnote)


def draw(path: Path, studies: Sequence[Study], panels: Sequence[Panel], across: int, title: str, footnote: str) -> None:
    """Write one figure. Raises `MissingExtra` without matplotlib."""
    names = [study.name for study in studies]
    legend_rows = rows_of_legend(names, WIDTH_INCHES * across)
    top = 0.925 - 0.032 * legend_rows
    figure = new_figure((WIDTH_INCHES * across, 8.2), (0.01, 0.03, 0.98, top - 0.03))
    axes = figure.subplots(2, across).flat
    for place, panel in zip(axes, panels, strict=True):
        draw_panel(place, panel, studies)
    lines, _ = axes[0].get_legend_handles_labels()  # the first panel has every workload
    columns = -(-len(names) // legend_rows)
    figure.legend(lines, names, loc="upper left", bbox_to_anchor=(0.012, 0.945), ncols=columns, **LEGEND)
    caption(figure, 0.968, title, size=16, title=True)
    caption(figure, 0.015, footnote)
    save_figure(figure, path)


def rows_of_legend(names: Sequence[str], width_inches: float) -> int:
    """Rows that the legend needs so that its columns, each as wide as the longest name, stay inside the figure."""
    longest_inches = LEGEND_LINE_INCHES + LEGEND_LETTER_INCHES * max(map(len, names))
    across = max(1, int(width_inches // longest_inches))
    return -(-len(names) // across)


def draw_panel(axes: Any, panel: Panel, studies: Sequence[Study]) -> None:
    """The distributions of one quantity, a line for each workload that has it."""
    shown = [
        (number, study, values) for number, study in enumerate(studies) if (values := panel.shown(study)) is not None
    ]
    low, high = scale_x(axes, panel, [values for _, _, values in shown])
    for number, study, values in shown:
        x, share = distribution(nines(values) if panel.fractions else values, low)
        dash = DASHES[number // len(COLOURS) % len(DASHES)]
        colour = COLOURS[number % len(COLOURS)]
        axes.step(x, share, where="post", color=colour, linestyle=dash, linewidth=2.0, label=study.name)
    axes.set_xlim(low, high)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_title(panel.title, fontsize=11, loc="left", color="#222222")
    axes.set_ylabel(f"of {panel.of}", color=GREY, fontsize=9.5)
    tidy(axes)


def scale_x(axes: Any, panel: Panel, columns: Sequence[Values]) -> tuple[float, float]:
    """Set the scale and ticks of the x axis; returns its ends, the lower a little below the smallest value above 0."""
    if panel.fractions:
        ticks = nines(np.array(FRACTION_TICKS))
        axes.set_xticks(ticks, FRACTION_LABELS)
        return 0.0, float(ticks[-1]) * 1.01
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    axes.xaxis.set_minor_formatter("")
    above = [column[column > 0] for column in columns]
    everything = np.concatenate(above) if any(map(len, above)) else np.ones(1)
    return float(everything.min()) * 0.8, float(everything.max()) * 1.25


def nines(fractions: Values) -> Values:
    """Fractions as how many nines they have: 0.9 is 1, 0.99 is 2; at most those of the last tick."""
    return np.asarray(-np.log10(1 - np.minimum(fractions, FRACTION_TICKS[-1])))


def short(value: float) -> str:
    """A number for an axis: "0.1", "100", "10k"."""
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def distribution(values: Values, low: float) -> tuple[Values, Values]:
    """(x, share of values up to x) as the corners of a step line; values below `low` count from the left edge on."""
    x, counts = np.unique(np.maximum(values, low), return_counts=True)
    share = np.cumsum(counts) / len(values)
    return np.concatenate(([x[0]], x)), np.concatenate(([0.0], share))
