"""The demo's picture: when first tokens came, who computed what, and how long the queues were. Owns drawing only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..console import GREY, TITLE, caption, duration, new_figure, save_figure, tidy
from .report import Phase, Record, headline

COLOURS = ("#d1603d", "#2b6ca3")
PALE = ("#f0c5b5", "#b7d0e6")


def draw(path: Path, phases: Sequence[Phase], subtitle: str, footnote: str) -> None:
    """Write a PNG comparing the phases (two). Raises `MissingExtra` without matplotlib."""
    figure = new_figure((12.8, 7.2), (0.01, 0.035, 0.98, 0.865))
    grid = figure.add_gridspec(2, 2, width_ratios=(1.25, 1), height_ratios=(1, 1))
    draw_cdf(figure.add_subplot(grid[:, 0]), phases)
    draw_work(figure.add_subplot(grid[0, 1]), phases)
    draw_queue(figure.add_subplot(grid[1, 1]), phases)
    caption(figure, 0.965, headline(phases), size=17, title=True)
    caption(figure, 0.927, subtitle, size=10.5)
    caption(figure, 0.016, footnote)
    save_figure(figure, path)


def draw_cdf(axes: Any, phases: Sequence[Phase]) -> None:
    """Share of requests whose first token came within x seconds."""
    for phase, colour, place in zip(phases, COLOURS, (0.865, 0.60), strict=True):
        seconds = sorted(record.ttft_seconds for record in phase.finished)
        if not seconds:
            continue
        share = [(i + 1) / len(seconds) for i in range(len(seconds))]
        axes.step(seconds, share, where="post", color=colour, linewidth=2.5)
        stats = phase.ttft()
        axes.plot([stats.p50, stats.p99], [0.5, 0.99], "o", color=colour, markersize=7, zorder=5)
        axes.axvline(stats.mean, color=colour, linestyle=(0, (2, 3)), linewidth=1.2)
        lines = (
            phase.policy,
            f"mean {duration(stats.mean)}",
            f"p50  {duration(stats.p50)}",
            f"p99  {duration(stats.p99)}",
        )
        # Below the curves, where no curve can be.
        box = {"facecolor": "white", "edgecolor": colour, "boxstyle": "round,pad=0.45", "alpha": 0.94}
        style = {"color": colour, "fontsize": 11.5, "family": "monospace", "fontweight": "bold"}
        text = "\n".join(line.ljust(12) for line in lines)
        axes.text(place, 0.115, text, transform=axes.transAxes, ha="center", va="center", bbox=box, zorder=6, **style)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: duration(value))
    axes.xaxis.set_minor_formatter("")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_title("Requests whose first token came within ... (dots: p50, p99; dotted: mean)", **TITLE)
    axes.set_xlabel("time to first token, from planned arrival (log scale)", color=GREY)
    tidy(axes)


def draw_work(axes: Any, phases: Sequence[Phase]) -> None:
    """Prompt tokens of every worker under every policy: computed, and reused from its cache."""
    labels, position = [], 0.0
    positions = []
    for phase, colour, pale in zip(phases, COLOURS, PALE, strict=True):
        for worker, share in phase.shares().items():
            computed, reused = share.computed_tokens / 1000, share.reused_tokens / 1000
            axes.barh(position, computed, color=colour, height=0.72)
            axes.barh(position, reused, left=computed, color=pale, height=0.72)
            total = computed + reused
            note = f" {computed:,.0f}k computed, {reused:,.0f}k reused"
            axes.text(total, position, note, va="center", fontsize=9, color=GREY)
            labels.append(f"{phase.policy} {worker}\n{share.requests} requests")
            positions.append(position)
            position += 1
        position += 0.5
    axes.set_yticks(positions, labels, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, axes.get_xlim()[1] * 1.55)
    axes.set_title("Prompt tokens, thousands (dark: computed, pale: reused)", **TITLE)
    tidy(axes, grid="x")


def draw_queue(axes: Any, phases: Sequence[Phase]) -> None:
    for phase, colour in zip(phases, COLOURS, strict=True):
        moments, counts = in_flight(phase.finished)
        axes.step(moments, counts, where="post", color=colour, linewidth=1.6, label=phase.policy)
        axes.fill_between(moments, counts, step="post", color=colour, alpha=0.12)
    axes.set_ylim(0, max(1, axes.get_ylim()[1]) * 1.15)
    axes.set_title("Requests waiting or running, over time", **TITLE)
    axes.set_xlabel("seconds since start", color=GREY)
    axes.legend(frameon=False, loc="upper left", ncols=len(phases), fontsize=9.5)
    tidy(axes)


def in_flight(records: Sequence[Record]) -> tuple[list[float], list[int]]:
    """(moments, requests between planned arrival and last token from that moment on)."""
    changes = [(record.arrival_seconds, 1) for record in records]
    changes += [(record.done_seconds, -1) for record in records if record.done_seconds is not None]
    moments, counts, count = [0.0], [0], 0
    for moment, change in sorted(changes):
        count += change
        moments.append(moment)
        counts.append(count)
    return moments, counts
