"""An audit as one picture: what every server computed, the prefixes that were computed again, the time to first token
now and with E2. Owns drawing only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...sim.replay import Estimate95
from ..console import GREY, TITLE, caption, duration, new_figure, save_figure, tidy
from .findings import AuditFindings
from .report import headline, losses, share, tokens

NOW = "#8a8a8a"
NEW, ELSEWHERE, AGAIN, REUSED = "#2b6ca3", "#d1603d", "#e8a488", "#d5e1ec"
SERVERS_SHOWN = 12


def draw(path: Path, found: AuditFindings) -> None:
    """Write a PNG. Raises `MissingExtra` without matplotlib."""
    figure = new_figure((11.0, 5.4), (0.01, 0.06, 0.98, 0.80))
    grid = figure.add_gridspec(2, 2, width_ratios=(1.55, 1))
    draw_work(figure.add_subplot(grid[:, 0]), found)
    draw_ttft(figure.add_subplot(grid[0, 1]), found)
    draw_prefixes(figure.add_subplot(grid[1, 1]), found)
    caption(figure, 0.955, headline(found), size=12.5, title=True)
    length = duration(found.seconds)
    caption(figure, 0.905, f"{found.requests:,} requests to {len(found.servers)} servers in {length}", size=10.5)
    caption(figure, 0.025, note(found))
    save_figure(figure, path)


def note(found: AuditFindings) -> str:
    """How sure, in one line."""
    words = [f"How sure: {found.sure}", f"events show {share(found.seen / max(1, found.requests))} of the requests"]
    if found.model_error is not None:
        words.append(f"the replay of what was is {found.model_error:+.0%} off the measured TTFT")
    return "; ".join([*words, *losses(found.lost)[:2]])


def draw_work(axes: Any, found: AuditFindings) -> None:
    """Prompt tokens of every server, by where they came from."""
    servers = sorted(found.servers, key=lambda one: -one.stored.twice)[:SERVERS_SHOWN]
    servers.sort(key=lambda one: one.url)
    names = ("computed, first time", "computed, though cached at another server", "computed again after eviction",
             "found in its cache")  # fmt: skip
    rows = []
    for one in servers:
        computed = one.computed if one.computed is not None else float(one.stored.computed)
        first = max(0.0, computed - one.stored.twice)
        rows.append((first, float(one.stored.elsewhere), float(one.stored.again), one.reused or 0.0))
    for part, (name, colour) in enumerate(zip(names, (NEW, ELSEWHERE, AGAIN, REUSED), strict=True)):
        if any(row[part] for row in rows):
            left = [sum(row[:part]) / 1000 for row in rows]
            axes.barh(range(len(rows)), [row[part] / 1000 for row in rows], left=left, color=colour, label=name,
                      height=0.62)  # fmt: skip
    axes.set_yticks(range(len(rows)), [one.url.split("://")[-1] for one in servers], fontsize=9.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_title("Prompt tokens by server, thousands", **TITLE)
    axes.legend(frameon=False, fontsize=9.5, loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=2)
    tidy(axes, grid="x")


def draw_ttft(axes: Any, found: AuditFindings) -> None:
    """Mean and 99th percentile, now and with E2, as far as they can be claimed."""
    axes.set_title("Time to first token", **TITLE)
    rows: list[tuple[str, Estimate95, str]] = []
    for name, now, mine in (
        ("mean", found.ttft_seconds, found.e2_ttft()),
        ("p99", found.ttft_p99_seconds, found.e2_ttft_p99()),
    ):
        rows += [(f"{name}, now", Estimate95(now, now, now), NOW)] if now else []
        rows += [(f"{name}, E2", mine, NEW)] if mine is not None else []
    if not rows:
        _say(axes, "not measured: SGLang counts it with --enable-metrics")
        return
    values = [one.value for _, one, _ in rows]
    axes.barh(range(len(rows)), values, color=[colour for *_, colour in rows], height=0.62)
    widest = max(max(one.high, one.value) for _, one, _ in rows)
    for at, (_, one, colour) in enumerate(rows):
        if colour == NEW:
            spread = [[max(0.0, one.value - one.low)], [max(0.0, one.high - one.value)]]
            axes.errorbar([one.value], [at], xerr=spread, color="#222222", capsize=3, linewidth=1.2)
        axes.text(max(one.value, one.high) + 0.02 * widest, at, duration(one.value), va="center", fontsize=9.5,
                  color=GREY)  # fmt: skip
    axes.set_xlim(0, 1.22 * widest)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows], fontsize=9.5)
    axes.set_ylim(3.5, -0.5)
    axes.xaxis.set_major_formatter(lambda value, _: duration(value) if value else "0")
    tidy(axes, grid="x")
    if found.e2_ttft() is None and found.e2 is not None:
        axes.text(0.02, 0.12, "no claim of E2's: the replay's own error\nis larger than the change it shows",
                  transform=axes.transAxes, color=GREY, fontsize=9.5)  # fmt: skip


def draw_prefixes(axes: Any, found: AuditFindings) -> None:
    """The prefixes with the most tokens computed again."""
    axes.set_title("Computed again most, thousands of tokens", **TITLE)
    if not found.prefixes:
        _say(axes, "no prefix was computed again")
        return
    values = [one.repeated_tokens / 1000 for one in found.prefixes]
    axes.barh(range(len(values)), values, color=ELSEWHERE, height=0.55)
    for at, (one, value) in enumerate(zip(found.prefixes, values, strict=True)):
        text = f" {tokens(one.end - one.start)} tokens, {one.requests:,} requests, {one.servers} servers"
        axes.text(value, at, text, va="center", fontsize=9.5, color=GREY)
    axes.set_xlim(0, 2.3 * max(values))
    axes.set_yticks(range(len(values)), [one.name[:8] for one in found.prefixes], fontsize=9.5, family="monospace")
    axes.set_ylim(max(2.5, len(values) - 0.5), -0.5)
    tidy(axes, grid="x")


def _say(axes: Any, text: str) -> None:
    """Words in the place of bars."""
    axes.text(0.02, 0.5, text, transform=axes.transAxes, color=GREY, fontsize=10)
    axes.set_axis_off()
