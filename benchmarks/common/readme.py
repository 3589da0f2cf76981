"""The README's figures, from the results that are kept: what they are of stands beside them. Measures nothing.

    make demo-docs                                                  # make demo, then its table
    python -m benchmarks.common.readme --demo demo-out/demo.json    # keep that run in benchmarks/results/demo.json
    python -m benchmarks.common.readme                              # all three parts from what is kept

`make bench` and `make paper` write theirs as well.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.common.paths import DOCS, RESULTS, ROOT
from benchmarks.common.tables import markdown, rounded
from benchmarks.decision import report
from benchmarks.live import arm_report

Found = dict[str, Any]
README = ROOT / "README.md"
CELLS = {
    ("toolbench200", 8, False): "ToolBench, 200 tools",
    ("toolbench200", 8, True): "the same as a list of ints",
    ("toolbench200", 512, False): "ToolBench, 200 tools",
    ("embodied", 8, False): "agents, growing prompts",
    ("videoqa", 8, False): "questions on videos, 9,800 tokens",
    ("loogle", 8, False): "questions on documents, 23,600 tokens",
}
OURS_BEFORE_SERVERS = "preble serve"
LIVE_ARMS = ("round robin", "least load", "partition", "sglang-router", "smg")
BULLETS = textwrap.TextWrapper(  # a link stays one
    118, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
)
SHOWN = ("ttft_seconds", "latency_seconds")
RANK = re.compile(r"^\| \**`([\w:-]+)`(?:\\\*)?\** \| ([\d.]+) \| [^|]+\| ([\d.]+) \|", re.MULTILINE)
SURELY = re.compile(
    r"- (p99|mean) TTFT: of (\d+) cells E2 is worse than the best rival in (\d+), better than all in (\d+)"
)


def kept(name: str) -> Found:
    """A committed result."""
    found: Found = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def keep_demo(content: Found) -> Found:
    """What the README shows of `demo.json`, without its requests."""
    return rounded({
        "commit": content["commit"],
        "machine": f"{content['machine']['cores']} x {content['machine']['processor']}",
        "seed": content["settings"]["seed"],
        "engine": "a small model" if content["settings"]["model"] else "simulated engines",
        "phases": [
            {
                "policy": phase["policy"],
                **{name: {key: phase[name][key] for key in ("mean", "p50", "p99")} for name in SHOWN},
                "reused_fraction": phase["reused_fraction"],
                "reused_tokens": sum(share["reused_tokens"] for share in phase["workers"].values()),
                "computed_tokens": sum(share["computed_tokens"] for share in phase["workers"].values()),
                "requests": [share["requests"] for share in phase["workers"].values()],
            }
            for phase in content["phases"]
        ],
    })  # fmt: skip


def of(found: Found) -> str:
    """Commit, machine and seed."""
    return f"commit {found['commit']}, {found['machine']}, seed {found['seed']}"


def demo(found: Found) -> str:
    """Round robin beside E2, as `make demo` measured them."""
    first, last = found["phases"][0], found["phases"][-1]
    rows = []
    for title, name, key in (
        ("TTFT mean", "ttft_seconds", "mean"),
        ("TTFT p50", "ttft_seconds", "p50"),
        ("TTFT p99", "ttft_seconds", "p99"),
        ("latency mean", "latency_seconds", "mean"),
        ("latency p99", "latency_seconds", "p99"),
    ):
        his, ours = first[name][key], last[name][key]
        rows.append([title, f"{his * 1e3:,.0f} ms", f"{ours * 1e3:,.0f} ms", f"{his / ours:.1f}x"])
    reused = [f"{phase['reused_tokens']:,} ({phase['reused_fraction']:.0%})" for phase in (first, last)]
    rows.append(["prompt tokens reused", *reused, ""])
    computed = [phase["computed_tokens"] for phase in (first, last)]
    rows.append(["prompt tokens computed", *(f"{n:,}" for n in computed), f"{computed[0] / computed[1]:.1f}x"])
    rows.append(["requests per worker", *(" / ".join(map(str, phase["requests"])) for phase in (first, last)), ""])
    heads = [f"{sum(first['requests'])} prompts, {len(first['requests'])} workers", first["policy"], last["policy"]]
    return f"{markdown([*heads, 'better'], rows)}\n\n`make demo`: {of(found)}."


def decisions(result: Found) -> str:
    """A decision beside the limit and the fastest peer."""
    peers = report.rows_of(result, "peers", report.PEER_KEYS)
    rows = []
    for key, cells in report.rows_of(result, "cells", report.CELL_KEYS).items():
        if key not in CELLS:
            continue
        rivals = {
            name: report.median(found, "schedule_ns_p50")
            for (name, shape, workers), found in peers.items()
            if (shape, workers) == key[:2]
        }
        best = min(rivals, key=rivals.__getitem__) if rivals else ""
        rows.append([
            CELLS[key], str(key[1]),
            f"{report.median(cells, 'schedule_ns_p50') / 1e3:.1f} us",
            f"{report.median(cells, 'schedule_ns_p99') / 1e3:.1f} us",
            f"{report.median(cells, 'limit_ns_p50') / 1e3:.2f} us",
            f"{rivals[best] / 1e3:.0f} us ({best})" if best else "-",
            f"{report.median(cells, 'hit_fraction'):.0%}",
        ])  # fmt: skip
    heads = ["prompts like", "workers", "p50", "p99", "limit p50", "fastest peer p50", "tokens hit"]
    return f"{markdown(heads, rows)}\n\n`make bench`, medians of {len(result['runs'])} runs: {of(result['facts'])}."


def contest(page: str) -> dict[str, float]:
    """What the page of results ranks: round robin's and the best rival's figures over E2's, and cells surely lost."""
    ranking = page.partition("### Ranking")[2].partition("###")[0]
    ranks = {name: (float(p99), float(mean)) for name, p99, mean in RANK.findall(ranking)}
    ours = ranks.pop("e2")
    rival = min((name for name in ranks if name != "oracle_partition"), key=lambda name: ranks[name][0])
    surely = {name: (int(cells), int(worse), int(better)) for name, cells, worse, better in SURELY.findall(page)}
    return {
        "rivals": len(ranks) - 1,
        "round_robin": ranks["round_robin"][1] / ours[1],
        "rival": ranks[rival][1] / ours[1],
        "cells": surely["mean"][0],
        "worse": surely["mean"][1],
        "better": surely["mean"][2],
        "worse_p99": surely["p99"][1],
        "better_p99": surely["p99"][2],
    }


def live_losses() -> str:
    """In how many of the places that were measured before real engines the gateway is behind another arm."""
    kept_runs = [json.loads(line) for line in (RESULTS / "live-arms.jsonl").read_text().splitlines()]
    runs = arm_report.counted(kept_runs)
    gateway = OURS_BEFORE_SERVERS
    late, places = arm_report.behind(runs, gateway, arm_report.TTFT)
    slow, _ = arm_report.behind(runs, gateway, arm_report.LATENCY)
    times = ", ".join(
        f"{arm} {statistics.geometric_mean(arm_report.times_in_all(runs, gateway, arm)):.2f}" for arm in LIVE_ARMS
    )
    return (
        f"before two real SGLang or vLLM servers, at 0.5 to 0.95 of saturation, `{gateway}` is more than 5 % behind"
        f" the best other way to place requests in {late} of {places} cells by mean time to first token, in {slow} by"
        " mean latency; it runs on the engines' own two cores there. Others' mean time to first token over its, the"
        f" geometric mean of all cells: {times} ([live](docs/results-live.md))."
    )


def numbers(demo_found: Found, result: Found, page: str, paper: Found) -> str:
    """Three figures, the least favourable words beside each, and what is lost."""
    first, last = (phase["ttft_seconds"]["mean"] for phase in (demo_found["phases"][0], demo_found["phases"][-1]))
    ranked = contest(page)
    [cell] = [
        report.median(cells, "schedule_ns_p50")
        for key, cells in report.rows_of(result, "cells", report.CELL_KEYS).items()
        if key == ("toolbench200", 8, False)
    ]
    said = (
        f"**Losses**: {live_losses()}",
        f"**{first / last:.1f} times sooner** comes the mean first token than by round robin: two worker processes with"
        f" {demo_found['engine']}, real prompts. `make demo`: {of(demo_found)}.",
        f"**{ranked['round_robin']:.1f} times** E2's mean time to first token is round robin's in simulation, over ten"
        f" workloads from idle to overload; that of the best of {ranked['rivals']:.0f} other rules is"
        f" {ranked['rival']:.2f} times E2's. Against the best rule of each of {ranked['cells']:.0f} cells, picked with"
        f" hindsight, E2 is surely worse in {ranked['worse']:.0f} and surely better in {ranked['better']:.0f}; by the"
        f" 99th percentile in {ranked['worse_p99']:.0f} and {ranked['better_p99']:.0f}."
        f" `make paper`: commit {paper['commit']}, seeds 0 to {paper['seeds'] - 1}.",
        f"**{cell / 1e3:.1f} us** is a decision at the median, with 8 workers and prompts like ToolBench's."
        f" `make bench`: {of(result['facts'])}.",
    )
    return "\n".join(BULLETS.fill(one) for one in said)


def put(text: str, name: str, part: str) -> str:
    """The README with one part anew. Raises ValueError where its marks are not there once."""
    begin, end = f"<!-- generated by benchmarks/common/readme.py: begin {name} -->", f"<!-- {name}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"the README needs the marks {begin!r} and {end!r}, once each")
    head, tail = text.partition(begin)[0], text.partition(end)[2]
    return f"{head}{begin}\n\n{part}\n\n{end}{tail}"


def written(text: str) -> str:
    """The README with every part anew, from what is kept."""
    demo_found, result, paper = kept("demo"), kept("everything"), kept("paper")
    page = (DOCS / "results.md").read_text()
    text = put(text, "numbers", numbers(demo_found, result, page, paper))
    return put(put(text, "demo", demo(demo_found)), "decisions", decisions(result))


def update() -> None:
    """Write the README anew."""
    README.write_text(written(README.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, help="the demo.json of a run to keep")
    args = parser.parse_args()
    if args.demo:
        found = keep_demo(json.loads(args.demo.read_text()))
        (RESULTS / "demo.json").write_text(json.dumps(found, indent=1) + "\n")
    update()


if __name__ == "__main__":
    main()
