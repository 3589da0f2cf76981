"""One figure of a simulation: lines over load or fleet size where these were swept, else distributions. Owns drawing
only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..console import GREY, TITLE, caption, new_figure, save_figure, tidy
from .statistics import Interval

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#333333")
DASHES = ("solid", "dashed", "dotted")
PANELS = (
    ("mean_ttft_seconds", "mean TTFT, s"),
    ("p99_ttft_seconds", "p99 TTFT, s"),
    ("mean_latency_seconds", "mean latency, s"),
    ("p99_latency_seconds", "p99 latency, s"),
)
SAMPLES = (("ttft_seconds", "TTFT, s"), ("latency_seconds", "latency, s"))
WIDTH_INCHES, HEIGHT_INCHES = 4.0, 3.2  # of a panel
TICKS_MAX = 8
TOP_INCHES, BOTTOM_INCHES, LEGEND_INCHES = 0.55, 0.35, 0.28
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What is drawn of one policy on one fleet at one load: intervals by metric, and its requests' times by name, shape
    [requests of all seeds]."""

    policy: str
    workers: int
    rps: float | None
    intervals: Mapping[str, Interval]
    times: Mapping[str, Floats]


def draw(path: Path, found: Sequence[Drawn], title: str, footnote: str) -> None:
    """Write a PNG. A row of panels a fleet over load, one row over fleets, or distributions of times. Raises
    `MissingExtra` without matplotlib."""
    fleets = list(dict.fromkeys(one.workers for one in found))
    loads = list(dict.fromkeys(one.rps for one in found))
    swept = "rps" if len(loads) > 1 else "workers" if len(fleets) > 1 else ""
    down = len(fleets) if swept == "rps" else 1
    across = len(PANELS) if swept else len(SAMPLES)
    policies = list(dict.fromkeys(one.policy for one in found))
    legend_rows = -(-len(policies) // max(1, int(WIDTH_INCHES * across / (0.75 + 0.085 * max(map(len, policies))))))
    top = TOP_INCHES + LEGEND_INCHES * legend_rows
    height = HEIGHT_INCHES * down + top + BOTTOM_INCHES
    box = (0.01, BOTTOM_INCHES / height, 0.98, 1 - (top + BOTTOM_INCHES) / height)
    figure = new_figure((WIDTH_INCHES * across, height), box)
    axes = figure.subplots(down, across, squeeze=False)
    if swept:
        for at, row in enumerate(axes):
            own = [one for one in found if swept == "workers" or one.workers == fleets[at]]
            for place, (metric, name) in zip(row, PANELS, strict=True):
                draw_lines(place, own, policies, metric, swept)
                place.set_title(f"{fleets[at]} workers: {name}" if swept == "rps" else name, **TITLE)
    else:
        for place, (name, words) in zip(axes[0], SAMPLES, strict=True):
            draw_distributions(place, found, policies, name)
            place.set_title(words, **TITLE)
    lines, _ = axes[0][0].get_legend_handles_labels()
    figure.legend(lines, policies, loc="upper left", bbox_to_anchor=(0.012, 1 - 0.4 / height), frameon=False,
                  fontsize=9.5, ncols=-(-len(policies) // legend_rows))  # fmt: skip
    caption(figure, 1 - 0.2 / height, title, size=12.5, title=True)
    caption(figure, 0.16 / height, footnote)
    save_figure(figure, path)


def style(at: int) -> dict[str, Any]:
    """Of the line of a policy."""
    return {"color": COLOURS[at % len(COLOURS)], "linestyle": DASHES[at // len(COLOURS) % len(DASHES)]}


def draw_lines(axes: Any, found: Sequence[Drawn], policies: Sequence[str], metric: str, swept: str) -> None:
    """A line a policy, with its 95 % intervals where there are several seeds."""
    for at, policy in enumerate(policies):
        own = sorted((one for one in found if one.policy == policy), key=lambda one: getattr(one, swept) or 0.0)
        xs = [getattr(one, swept) for one in own]
        means = [one.intervals[metric].mean for one in own]
        halves = [np.nan_to_num(one.intervals[metric].half) for one in own]
        axes.errorbar(xs, means, yerr=halves, label=policy, marker="o", markersize=4, capsize=3, **style(at))
    axes.set_ylim(0, axes.get_ylim()[1] * 1.04)  # lines that are nearly level have no margin of their own
    axes.set_xticks(sorted({getattr(one, swept) for one in found}))
    axes.set_xlabel("requests a second" if swept == "rps" else "workers", color=GREY, fontsize=9.5)
    tidy(axes)


def draw_distributions(axes: Any, found: Sequence[Drawn], policies: Sequence[str], name: str) -> None:
    """The share of requests that had so short a time, a line a policy; what has none counts as longer."""
    for at, policy in enumerate(policies):
        times = np.concatenate([one.times[name] for one in found if one.policy == policy])
        known = np.sort(times[~np.isnan(times)])
        shares = np.arange(1, len(known) + 1) / max(1, len(times))
        axes.step(known, shares, where="post", label=policy, linewidth=2.0, **style(at))
    positive = np.concatenate([one.times[name][one.times[name] > 0.0] for one in found])
    if len(positive):
        ticks = round_ticks(float(positive.min()), float(positive.max()))
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.xaxis.set_minor_formatter("")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylabel("of requests", color=GREY, fontsize=9.5)
    tidy(axes)


def round_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten from `low` to `high`, or where these are many only the powers."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [float(f"{first}e{power}") for power in powers for first in (1, 2, 5)]
    inside = [tick for tick in found if low <= tick <= high]
    if len(inside) > TICKS_MAX:
        inside = [tick for tick in inside if math.log10(tick).is_integer()]
    return inside or [low]
