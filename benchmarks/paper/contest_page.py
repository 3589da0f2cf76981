"""The contest's section of the page of results: losses first, then the pictures, the ranking, the tables, the method.

Owns its words and tables; every number in it comes from the cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.paper import contest_cells as cells
from benchmarks.paper import contest_stats as stats
from benchmarks.paper.contest_stats import BOUND, OURS, POOLED, Found

METRICS = {"p99_ttft_seconds": "p99 TTFT", "mean_ttft_seconds": "mean TTFT"}
LATENCIES = ("mean_latency_seconds", "p50_latency_seconds", "p99_latency_seconds")


def section(found: Found) -> str:
    """Markdown. The same cells make the same bytes."""
    return "\n".join([
        "## The contest: every policy, every workload, four workers", "", opening(found), "",
        "### Where E2 loses", "", losses(found), "",
        "### Heat map and curves", "",
        "![E2 over the best rival](figures/contest-heat.png)", "",
        "![p99 TTFT over load](figures/contest-p99.png)", "",
        "![mean TTFT over load](figures/contest-mean.png)", "",
        "### Ranking", "", ranking(found), "",
        "### All cells", "", KEY, "",
        *(part for workload in stats.workloads(found) for part in tables(found, workload)),
        "### Method", "", method(found), "",
    ])  # fmt: skip


def opening(found: Found) -> str:
    """How it ended, in a few lines."""
    lines = [
        f"{len(stats.policies(found))} policies on the same requests, engines and local schedulers; only placement"
        " differs."
        " A ratio is E2's figure over that of the best rival *of that cell*, picked with hindsight; 95 % intervals over"
        f" {seeds(found)} seeds, paired. The rival is the best of {len(stats.rivals(found))}, so that E2 would lose"
        " some cells to luck alone."
    ]
    for metric, title in METRICS.items():
        every = stats.against_best(found, metric)
        worse = sum(cell.low > 1.0 for cell in every)
        better = sum(cell.high < 1.0 for cell in every)
        unsure = sum(cell.value > 1.05 and cell.low <= 1.0 for cell in every)
        middle = stats.geometric([cell.value for cell in every])
        lines.append(
            f"- {title}: of {len(every)} cells E2 is worse than the best rival in {worse}, better than all in {better},"
            f" and within the interval in {len(every) - worse - better}, of which {unsure} with a ratio above 1.05;"
            f" geometric mean ratio {middle:.2f}."
        )
    return "\n".join([lines[0], "", *lines[1:]])


def losses(found: Found) -> str:
    """All cells where E2 is worse beyond the interval, of both metrics, the worst first."""
    lost = [(cell, metric) for metric in METRICS for cell in stats.losses(found, metric)]
    if not lost:
        return "In no cell beyond the interval."
    rows = []
    for cell, metric in sorted(lost, key=lambda pair: -pair[0].value):
        ours, theirs = (
            stats.values(found, cell.workload, cell.load, name, metric).mean() for name in (OURS, cell.rival)
        )
        rows.append([
            title(cell.workload), f"{cell.load:.0%}", METRICS[metric], cell.rival,
            f"**{cell.value:.2f}** ({cell.low:.2f} to {cell.high:.2f})", f"{number(ours)} s", f"{number(theirs)} s",
        ])  # fmt: skip
    return table(["workload", "load", "figure", "best rival", "E2 over it (95 %)", "E2", "rival"], rows)


def ranking(found: Found) -> str:
    """Policies by their p99 TTFT over the best in each cell."""
    rows = []
    names = [*stats.policies(found), POOLED]
    by_p99 = sorted(names, key=lambda name: middle_ratio(found, "p99_ttft_seconds", name))
    for name in by_p99:
        row = [marked(name)]
        for metric in METRICS:
            ratios = stats.to_best(found, metric, name)
            worst = max(ratios, key=lambda cell: cell.value)
            row += [f"{stats.geometric([cell.value for cell in ratios]):.2f}", worst_of(worst)]
        row += [f"{over_bound(found, name):.1f}"]
        rows.append(row)
    heads = [
        "policy",
        "p99 TTFT over the best",
        "worst cell",
        "mean TTFT over the best",
        "worst cell",
        "over the bound",
    ]
    said = (
        "Ratio to the best deployable policy of each cell (1 would be the best everywhere), geometric mean over cells,"
        " and the worst cell; last, mean TTFT over its lower bound."
    )
    return f"{said}\n\n{table(heads, rows)}"


def middle_ratio(found: Found, metric: str, name: str) -> float:
    """Geometric mean over cells of a policy over the best."""
    return stats.geometric([cell.value for cell in stats.to_best(found, metric, name)])


def over_bound(found: Found, name: str) -> float:
    """Geometric mean over cells of a policy's mean TTFT over the bound's."""
    return stats.geometric([
        stats.ratio(found, workload, load, "mean_ttft_seconds", name, BOUND).value
        for workload in stats.workloads(found)
        for load in stats.loads(found)
    ])  # fmt: skip


def worst_of(cell: stats.Ratio) -> str:
    """A ratio and where it is."""
    return f"{number(cell.value)}: {title(cell.workload)}, {cell.load:.0%}"


def tables(found: Found, workload: str) -> list[str]:
    """One workload: TTFT, and folded away the other figures."""
    loads = stats.loads(found)
    names = sorted(
        stats.policies(found),
        key=lambda name: stats.geometric(
            [stats.geometric(stats.values(found, workload, load, name, "p99_ttft_seconds")) for load in loads]
        ),
    )
    rows = [*names, POOLED, BOUND]
    rate = next(figures["saturation_rps"] for cell, figures in found.items() if cell.workload == workload)
    source = cells.SOURCES[workload]
    heads = ["policy", *(f"{load:.0%}" for load in loads)]
    return [
        f"#### {source.title}", "",
        f"Saturation {number(rate)} requests/s; {counted(found, workload)} requests counted a cell; objective"
        f" {source.objective_seconds:g} s.", "",
        table(heads, [[marked(name), *(ttft(found, workload, load, name) for load in loads)] for name in rows]), "",
        "<details><summary>Latency, hits, load spread, goodput</summary>", "",
        table(heads, [[marked(name), *(other(found, workload, load, name) for load in loads)] for name in rows]), "",
        "</details>", "",
    ]  # fmt: skip


KEY = """\
TTFT in seconds: mean ± half of its 95 % interval / p50 / **p99** ± half of its interval, over seeds. Folded
away: latency in seconds (mean / p50 / p99); prompt tokens that were cached; the busiest worker's busy time
over the mean; goodput, the share of requests whose first token came within the workload's objective. Policies
in order of their p99 TTFT. `oracle_partition`\\* knows the groups of all requests. In the row of the lower
bound, hits and goodput are upper bounds."""


def ttft(found: Found, workload: str, load: float, name: str) -> str:
    """A square of the first table."""
    mean, p50, p99 = (
        stats.values(found, workload, load, name, f"{part}_ttft_seconds") for part in ("mean", "p50", "p99")
    )
    if name == BOUND:
        return f"{number(mean.mean())} / - / **{number(p99.mean())}**"
    mean_half, p99_half = number(stats.half_width(mean)), number(stats.half_width(p99))
    return f"{number(mean.mean())} ± {mean_half} / {number(p50.mean())} / **{number(p99.mean())}** ± {p99_half}"


def other(found: Found, workload: str, load: float, name: str) -> str:
    """A square of the second table."""
    latencies = [number(stats.values(found, workload, load, name, metric).mean()) for metric in LATENCIES]
    hits, spread, goodput = (
        float(stats.values(found, workload, load, name, metric).mean())
        for metric in ("hit_fraction", "load_spread", "goodput")
    )
    said = "-" if math.isnan(spread) else f"{spread:.2f}"
    return f"{' / '.join(latencies)}; {hits:.0%}; {said}; {goodput:.0%}"


def method(found: Found) -> str:
    """What was run, and what the words mean."""
    fleet = cells.FLEET
    generated = [f"{source.title} {source.groups}" for source in cells.SOURCES.values() if source.groups]
    unfinished = sum(figures["runs"][name]["unfinished"] for cell, figures in found.items() for name in cell.policies)
    left_out = sum(figures["left_out"] for figures in found.values())
    return METHOD.format(
        fleet=fleet.title, kv=f"{fleet.kv_tokens:,}", budget=cells.local_config().token_budget,
        pooled_budget=cells.local_config().token_budget * fleet.workers, workers=fleet.workers,
        groups=", ".join(generated), warm=f"{cells.WARM:.0%}", drains=cells.DRAINS, together=cells.DRAINED_TOGETHER,
        seeds=seeds(found), unfinished=unfinished, left_out=left_out,
    )  # fmt: skip


METHOD = """\
- **Fleet.** {fleet}, {kv} tokens of KV each, {budget} tokens an iteration, chunked prefill, the paper's priority
  groups as local order, no delays. All policies decide from the same tree and books ([policies.md](policies.md)), with
  their published defaults.
- **Workloads.** Generated ones have Poisson arrivals and so many groups: {groups} (agents and conversations are closed
  loops: a turn is not sent before the one before it has ended). "Azure's times": four fifths of the requests are tools
  at the times of the code trace, the others videos at those of the conversation trace. Mooncake's traces come in
  samples of whole conversations, a sample a seed ([data](../benchmarks/paper/data/README.md)), as recorded: a turn
  does not wait for the one before. Requests that do not fit a worker's KV are left out: {left_out} in all cells.
- **Saturation** favours no policy. The pooled reference, one worker {workers} times as fast with {workers} times the
  KV and {pooled_budget} tokens an iteration, is given all requests at once, in order of arrival, at most {together} at
  a time for each worker; the rate at which it ends them after the warm-up, up to the last tenth, is 100 %; mean over
  {drains} samples. An iteration of the pooled worker takes what it would take one worker with a {workers}th of its
  tokens and contexts.
- **Warm-up.** The first {warm} of the requests fill the caches and are not counted, but for the load spread. The
  pooled reference is slower while caches are cold; arrivals of the warm-up are stretched by its rate there, so that
  the load is the same throughout. Times of traces are stretched likewise, with their gaps' proportions within each
  part.
- **Few requests.** With a few hundred requests a cell, p99 is near the largest; its interval says how far to trust it.
  Loads above 100 % last until the requests are used up: their figures grow with the length of the run and compare
  policies only.
- **Seeds.** {seeds} a cell: prompts, arrivals (of traces the sample) and policies' own draws. Intervals are Student's
  t, for ratios of the logarithms, paired by seed.
- **Pooled reference** in the tables: the same machine, the same local order, the cell's arrivals. It shows what is in
  reach where placement does not matter. It is no bound: short requests that pass long ones do better; nor do the
  bounds hold for it, as it serves a single request as fast as {workers} workers together would.
- **Lower bounds** hold for every policy, clairvoyant ones too, and every cache size (`preble.sim.bounds`). Of a
  prompt's tokens those that no earlier prompt has must be computed once, after it arrives, by the worker that serves
  it; charged at the best price any batch gives, they are jobs on one machine as fast as the fleet. Mean: the largest
  of the requests' own floors, shortest remaining work first, and the mean-busy-time bound; p99 and goodput: Moore and
  Hodgson's rule. Requests of the warm-up own tokens and are not jobs. Loose where misses come from full caches or
  decoding holds up prefill, and in closed loops, where only floors remain.
- Requests without an answer: {unfinished:.0f}."""


def title(workload: str) -> str:
    """For people."""
    return cells.SOURCES[workload].title


def counted(found: Found, workload: str) -> str:
    """How many requests a cell counts; traces' samples differ."""
    sizes = sorted({figures["requests"] for cell, figures in found.items() if cell.workload == workload})
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


def seeds(found: Found) -> int:
    """How many there are."""
    return len({cell.seed for cell in found})


def marked(name: str) -> str:
    """As the tables print a policy."""
    if name == cells.ORACLE:
        return f"`{name}`\\*"
    return f"**`{name}`**" if name == OURS else f"*{name}*" if name in (POOLED, BOUND) else f"`{name}`"


def number(value: float) -> str:
    """Three significant digits, and none of them an exponent; "-" for what there is not."""
    if math.isnan(value):
        return "-"
    value = float(f"{value:.3g}") if abs(value) < 1000.0 else value
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(0, min(digits, 4))}f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
