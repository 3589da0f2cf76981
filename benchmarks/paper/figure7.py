"""Figure 7: five workloads on three fleets, latency against request rate. Owns the grid, its comparison with what was
published, and the check of the paper's ratios."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.paper import published
from benchmarks.paper.cells import Cell, Found
from benchmarks.paper.drawing import COLOURS, figure, line, logarithmic, points, save
from benchmarks.paper.page import number, prose, ratio, table
from benchmarks.paper.setups import FLEETS, SOURCES
from benchmarks.paper.setups import SYSTEMS as TITLES

WORKLOADS = ("toolbench", "embodied", "programming", "videoqa", "loogle")
SYSTEMS = ("sglang_rr", "rr", "sglang_oracle", "oracle", "e2-paper", "e2")

# Rates of the published pictures; for H100 such as reach saturation. The published configurations for it go to 5.5 a
# second (Programming) and 18 (Embodied agent), which this cost model cannot serve: it charges a token of context in
# decoding what was measured when extending single prompts.
RATES: dict[tuple[str, str], tuple[float, ...]] = {
    ("2xa6000", "toolbench"): (3, 6, 9, 12, 15, 18),
    ("2xa6000", "embodied"): (5, 10, 20, 30, 40),
    ("2xa6000", "programming"): (1, 2, 2.5, 3, 3.5, 4),
    ("2xa6000", "videoqa"): (0.5, 1, 2, 3, 4, 5, 7),
    ("2xa6000", "loogle"): (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0),
    ("4xa6000", "toolbench"): (6, 12, 18, 24, 30, 36),
    ("4xa6000", "embodied"): (10, 20, 40, 60, 80),
    ("4xa6000", "programming"): (2, 4, 5, 6, 7, 8),
    ("4xa6000", "videoqa"): (1, 2, 4, 6, 8, 10),
    ("4xa6000", "loogle"): (0.2, 0.4, 0.6, 1.0, 1.4, 1.6, 1.8),
    ("2xh100-tp4", "toolbench"): (1, 2, 3, 4, 5, 6),
    ("2xh100-tp4", "embodied"): (2, 4, 6, 8, 12),
    ("2xh100-tp4", "programming"): (0.2, 0.4, 0.6, 0.8, 1.0),
    ("2xh100-tp4", "videoqa"): (1, 2, 3, 4, 5),
    ("2xh100-tp4", "loogle"): (0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
}


def grid(quick: bool) -> Iterator[Cell]:
    """All cells; `quick`: three rates of each row, a tenth of the requests, without the oracle on the older engine."""
    for (fleet, workload), rates in RATES.items():
        chosen = (rates[0], rates[len(rates) // 2], rates[-1]) if quick else rates
        for rps in chosen:
            for system in SYSTEMS:
                if not (quick and system == "sglang_oracle"):
                    yield Cell("figure7", workload, fleet, system, rps, share=0.1 if quick else 1.0)


def curve(found: Found, fleet: str, workload: str, system: str, metric: str) -> tuple[list[float], list[float]]:
    """(rates, values) of one line of the figure."""
    points = sorted(
        (cell.rps, figures[metric])
        for cell, figures in found.items()
        if (cell.experiment, cell.fleet, cell.workload, cell.system) == ("figure7", fleet, workload, system)
    )
    return [rate for rate, _ in points], [value for _, value in points]


# --- beside what was published ----------------------------------------------------------------------------------------

PUBLISHED = {
    "toolbench": "tool_use",
    "embodied": "embodied_agent",
    "programming": "programming",
    "videoqa": "video_qa",
    "loogle": "document_qa",
}
COUNTERPARTS = {"round_robin": "sglang_rr", "preble": "e2", "oracle": "sglang_oracle"}
GPUS = {"2xa6000": 2, "4xa6000": 4}


# --- picture and page -------------------------------------------------------------------------------------------------

ABOUT = """
    Requests for 300 s (LooGLE 561 s, Programming 625 s, Embodied agent 180 s) at each rate, Poisson arrivals, from
    empty caches. The paper compared its system, with chunked prefill, to round robin over SGLang without; here both
    engines are under round robin and under the oracle, so that what placement is worth stands alone. "Gain" is
    round robin's latency over the rule's. "e2-paper" is the paper's whole system, "e2" is ours.
"""
ABOUT_RANGES = """
    The paper: 1.5 to 14.5 times better in the mean and 2 to 10 times at p99 than round robin, over all workloads;
    for Programming 1.56 to 1.8 and 3 to 4 times. Where a line says "no", the workload's section above has the
    numbers: Programming's time is in decoding here, which no placement shortens, and round robin caches its system
    prompt, 2,400 of 3,700 tokens, on every worker just as well. The published gain there is largely the engine's:
    chunked prefill against none.
"""
# The third row: latency per output token, in which most curves were published.
NORMALISED = {
    "toolbench": "p50_normalised_seconds",
    "embodied": "mean_normalised_seconds",
    "programming": "mean_normalised_seconds",
    "videoqa": "mean_normalised_seconds",
    "loogle": "p50_normalised_seconds",
}
METRICS = {"mean_latency_seconds": "mean latency, s", "p99_latency_seconds": "p99 latency, s"}
DRAWN = ("sglang_rr", "rr", "oracle", "e2-paper", "e2")


def draw(found: Found, directory: Path) -> None:
    """A sheet a fleet: a column a workload, mean above p99; crosses are what was published."""
    for fleet in dict.fromkeys(fleet for fleet, _ in RATES):
        sheet, axes = figure(3, len(WORKLOADS), 17.0, 9.5)
        for column, workload in enumerate(WORKLOADS):
            normalised = NORMALISED[workload]
            titles = {**METRICS, normalised: f"{normalised.split('_')[0]}, s per output token"}
            for axis, (metric, title) in zip(axes[:, column], titles.items(), strict=True):
                draw_panel(axis, found, fleet, workload, metric)
                axis.set_title(f"{SOURCES[workload].title}: {title}", fontsize=10, loc="left")
        named = {
            label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        sheet.legend(named.values(), named.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
        save(sheet, directory / f"figure7-{fleet}.png", f"Latency against requests a second: {FLEETS[fleet].title}")


def draw_panel(axis: Any, found: Found, fleet: str, workload: str, metric: str) -> None:
    """One workload's curves."""
    for system in DRAWN:
        rates, values = curve(found, fleet, workload, system, metric)
        if rates:
            line(axis, rates, values, COLOURS[system], TITLES[system].title)
    real = published.find(PUBLISHED[workload], GPUS.get(fleet, 0), metric.removesuffix("_seconds"))
    for policy, name in (("round_robin", "round robin"), ("preble", "Preble")):
        if policy in real:
            shown = real[policy]
            points(axis, shown.rps, shown.values, COLOURS[COUNTERPARTS[policy]], f"published, on GPUs: {name}")
    logarithmic(axis)


def section(found: Found) -> str:
    """Markdown: the gains, the paper's ranges, and how near the simulation is to what was measured."""
    parts = ["## Figure 7: five workloads, three fleets", "", prose(ABOUT)]
    for fleet in dict.fromkeys(fleet for fleet, _ in RATES):
        parts += [f"### {FLEETS[fleet].title}", "", *gains(found, fleet), ""]
        parts += [f"![Figure 7, {FLEETS[fleet].title}](figures/figure7-{fleet}.png)", ""]
    return "\n".join([*parts, *paper_ranges(found), ""])


def gains(found: Found, fleet: str) -> list[str]:
    """A row a workload and rate."""
    rows = []
    for workload in WORKLOADS:
        rates = curve(found, fleet, workload, "e2", "mean_latency_seconds")[0]
        for i, rps in enumerate(rates):
            row = [SOURCES[workload].title if i == 0 else "", f"{rps:g}"]
            for metric in METRICS:
                shown = {system: curve(found, fleet, workload, system, metric)[1][i] for system in SHOWN}
                row += [number(value) for value in shown.values()]
                row += [ratio(shown[base] / shown[rule]) for rule in RULES for base in BASES]
            rows.append(row)
    heads = ["workload", "rps"]
    for short in ("mean", "p99"):
        heads += [f"{short}: RR, SGLang", "RR, ours", "oracle, ours", "e2-paper", "e2"]
        heads += [f"{rule}: gain{engine}" for rule in RULES for engine in ("", ", same engine")]
    return [table(heads, rows)]


BASES = {"sglang_rr": "SGLang engine, as in the paper", "rr": "same engine"}
RULES = ("e2-paper", "e2")
SHOWN = (*BASES, "oracle", *RULES)


def paper_ranges(found: Found) -> list[str]:
    """The gains near saturation beside the paper's ranges."""
    rows = []
    for fleet, workload in RATES:
        for rule, (base, name) in product(RULES, BASES.items()):
            best = [best_gain(found, fleet, workload, rule, base, metric) for metric in METRICS]
            rows.append([
                SOURCES[workload].title, FLEETS[fleet].title, rule, name,
                f"{ratio(best[0][1])} at {best[0][0]:g} rps", f"{ratio(best[1][1])} at {best[1][0]:g} rps",
                "yes" if best[0][1] >= 1.5 and best[1][1] >= 2.0 else "no",
            ])  # fmt: skip
    heads = [
        "workload",
        "fleet",
        "rule",
        "round robin with",
        "largest mean gain",
        "largest p99 gain",
        "reaches 1.5x and 2x",
    ]
    return ["### The paper's ranges", "", prose(ABOUT_RANGES), table(heads, rows)]


def best_gain(found: Found, fleet: str, workload: str, rule: str, base: str, metric: str) -> tuple[float, float]:
    """(rate, gain) where the gain of a rule over a baseline is largest."""
    rates, ours = curve(found, fleet, workload, rule, metric)
    theirs = curve(found, fleet, workload, base, metric)[1]
    return max(((rps, b / a) for rps, a, b in zip(rates, ours, theirs, strict=True)), key=lambda pair: pair[1])
