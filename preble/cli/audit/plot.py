"""An audit as one picture: what every server computed, the prefixes that were computed again, the time to first token
now and with E2. Owns drawing only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    """Mean and 99th percentile, now and with E2."""
    axes.set_title("Time to first token", **TITLE)
    mine, e2 = found.e2_ttft(), found.e2
    if mine is None or e2 is None:
        _say(axes, "no request to try E2 on")
        return
    now = found.ttft_seconds or e2.ttft_seconds
    p99 = found.ttft_p99_seconds or e2.ttft_p99_seconds
    rows = [("mean, now", now, NOW), ("mean, E2", mine.value, NEW)]
    rows += [("p99, now", p99, NOW), ("p99, E2", p99 * e2.p99_ratio, NEW)]
    axes.barh(range(4), [value for _, value, _ in rows], color=[colour for *_, colour in rows], height=0.62)
    axes.errorbar(
        [mine.value], [1], xerr=[[max(0.0, mine.value - mine.low)], [max(0.0, mine.high - mine.value)]],
        color="#222222", capsize=3, linewidth=1.2,
    )  # fmt: skip
    widest = max(value for _, value, _ in rows)
    for at, (_, value, _) in enumerate(rows):
        axes.text(max(value, mine.high if at == 1 else 0.0) + 0.02 * widest, at, duration(value), va="center",
                  fontsize=9.5, color=GREY)  # fmt: skip
    axes.set_xlim(0, 1.22 * widest)
    axes.set_yticks(range(4), [name for name, *_ in rows], fontsize=9.5)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda value, _: duration(value) if value else "0")
    tidy(axes, grid="x")


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
