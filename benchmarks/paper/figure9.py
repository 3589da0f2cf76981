"""Figure 9: Video QA on a backend like vLLM in spring 2024, prefix caching without chunked prefill. Owns the grid, the
picture and the page's section."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.paper.cells import Cell, Found
from benchmarks.paper.drawing import COLOURS, figure, line, logarithmic, save
from benchmarks.paper.page import number, prose, ratio, table
from benchmarks.paper.setups import SYSTEMS

ORDER = ("vllm_rr", "vllm_oracle", "vllm_e2-paper", "vllm_e2", "e2")
GAINS = ("vllm_e2-paper", "vllm_e2")  # over round robin on the same engine
RATES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
ABOUT = """
    Prompts are computed whole and before all decoding, first come first served; the cost model is the authors'
    regression of vLLM with Llama-2-7B on an A6000, the only one of vLLM that is known. The last system has our
    engine with chunked prefill and the priority groups instead.
"""
REMARK = """
    No points of this figure are published. The paper says that the gain is smaller than with SGLang, for a reason
    that is modelled here (no chunks beside caching) and two that are not (a slower prefix cache, other kernels).
"""
METRICS = {"mean_latency_seconds": "mean latency, s", "p99_latency_seconds": "p99 latency, s"}


def grid(quick: bool) -> Iterator[Cell]:
    """Rates by systems."""
    for rps in RATES[1::2] if quick else RATES:
        for system in ORDER:
            yield Cell("figure9", "videoqa", "2xa6000-vllm", system, rps, share=0.1 if quick else 1.0)


def curve(found: Found, system: str, metric: str) -> tuple[list[float], list[float]]:
    """(rates, values)."""
    points = sorted(
        (cell.rps, figures[metric])
        for cell, figures in found.items()
        if (cell.experiment, cell.system) == ("figure9", system)
    )
    return [rate for rate, _ in points], [value for _, value in points]


def draw(found: Found, directory: Path) -> None:
    """Mean and p99 against the rate."""
    sheet, axes = figure(1, 2, 10.0, 4.0)
    for axis, (metric, title) in zip(axes.flat, METRICS.items(), strict=True):
        for system in ORDER:
            line(axis, *curve(found, system, metric), COLOURS[system], SYSTEMS[system].title)
        axis.set_title(title, fontsize=10, loc="left")
        logarithmic(axis)
        axis.set_xlabel("requests a second")
    axes.flat[0].legend(fontsize=8, frameon=False)
    save(sheet, directory / "figure9.png", "Video QA on 2 x A6000, vLLM-like engines")


def section(found: Found) -> str:
    """Markdown."""
    rates = curve(found, "vllm_rr", "mean_latency_seconds")[0]
    lines = []
    for i, rps in enumerate(rates):
        means = {system: curve(found, system, "mean_latency_seconds")[1][i] for system in ORDER}
        tails = {system: curve(found, system, "p99_latency_seconds")[1][i] for system in ORDER}
        lines.append([
            f"{rps:g}", *(f"{number(means[system])} / {number(tails[system])}" for system in ORDER),
            *(ratio(of["vllm_rr"] / of[system]) for system in GAINS for of in (means, tails)),
        ])  # fmt: skip
    heads = [f"{SYSTEMS[system].title}: mean / p99, s" for system in ORDER]
    parts = ["## Figure 9: a vLLM-like backend", "", prose(ABOUT)]
    gains = [f"{SYSTEMS[system].policy}: {of}, gain" for system in GAINS for of in ("mean", "p99")]
    parts += [table(["rps", *heads, *gains], lines), "", prose(REMARK)]
    return "\n".join([*parts, "![Figure 9](figures/figure9.png)", ""])
