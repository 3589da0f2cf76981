"""1,000 workers, 10 routers, 10^6 requests: what one router does for them and where the first limit lies. Owns the list
of runs, what is derived from them, and the tables of docs/experiments/scale.md; `router.py` and `links.py` measure.

    python -m benchmarks.scale.scale --docs

Each run is a process of its own. A run that is kept from this commit (build/scale-*.jsonl) is not run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.facts import environment, typed_today
from benchmarks.common.paths import DOCS, RESULTS, ROOT
from benchmarks.scale import links as scale_links
from benchmarks.scale.router import KV_TOKENS, SOURCES, Cell, measured
from preble import LocalConfig, sim
from preble.workloads import generate, poisson

PAGE = DOCS / "experiments/scale.md"
BEGIN, END = "<!-- scale: begin -->", "<!-- scale: end -->"
DELAY_SECONDS = 0.05
LINK_BYTES_PER_SECOND = 10e9 / 8
CALLS = {
    "schedule": "own: decision",
    "first_token": "own: first token",
    "finish": "own: end",
    "submit encode": "own: frame to the worker",
    "chunk decode": "own: frame of one token",
    **{f"own {what} decode": f"own, reported anyway: {what}, decode" for what in ("placed", "prefilled", "ended")},
    "placed decode": "another's: placed, decode",
    "placed apply": "another's: placed, book",
    "prefilled decode": "another's: first token, decode",
    "prefilled apply": "another's: first token, book",
    "ended decode": "another's: end, decode",
    "ended apply": "another's: end, book",
    "evicted decode": "evictions, decode",
    "evicted apply": "evictions, apply",
    "tick": "tick, once a second",
}
Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Fleet:
    """A whole simulation from empty caches, of which the last requests are counted."""

    workers: int
    routers: int
    requests: int
    groups: int
    counted_share: float
    seed: int = 0


def cells(quick: bool) -> dict[str, list[Cell]]:
    """The runs of one router, by table; the first is the one of the title."""
    workers, scale = (20, 0.03) if quick else (1000, 1.0)

    def cell(routers: int = 10, count: int = workers, workload: str = "toolbench", **more: Any) -> Cell:
        requests = int({"toolbench": 16_000, "videoqa": 6_000, "loogle": 3_000}[workload] * scale)
        return Cell(workload, requests, count, routers, **more)

    return {
        "title": [Cell("toolbench", int(1_000_000 * scale / (10 if quick else 1)), workers, 10)],
        "routers": [cell(routers) for routers in (1, 2, 5, 10, 20)],
        "workers": [cell(count=count) for count in (workers // 10, workers * 3 // 10, workers)],
        "prompts": [cell(workload=name) for name in SOURCES],
        "told": [cell(), cell(told="blocks"), cell(calibrate=True)],
    }


def fleets(quick: bool) -> list[Fleet]:
    """The whole simulations: one router and ten."""
    if quick:
        return [Fleet(8, routers, 200, 20, 0.7) for routers in (1, 2)]
    starting = [Fleet(1000, routers, 100_000, 16_000, 0.7) for routers in (1, 10)]
    return starting + [Fleet(300, routers, 30_000, 4_800, 0.3) for routers in (1, 10)]


# --- running ----------------------------------------------------------------------------------------------------------


def simulated(fleet: Fleet) -> dict[str, Any]:
    """The figures of a whole simulation."""
    made = generate("toolbench", requests=fleet.requests, groups=fleet.groups, seed=fleet.seed)
    workload = poisson(made, SOURCES["toolbench"][0] * fleet.workers, fleet.seed + 1)
    config = sim.SimConfig(
        workers=fleet.workers,
        routers=fleet.routers,
        event_delay_seconds=DELAY_SECONDS,
        network_seconds=0.0005,
        local=LocalConfig(
            KV_TOKENS, token_budget=512, max_running=512, max_waiting=10**6, eviction="lru", short_first=False
        ),
        seed=fleet.seed,
    )
    started = time.process_time()
    result = sim.simulate(workload, config)
    summary = result.summary(float(np.nanquantile(result.arrival_seconds, 1.0 - fleet.counted_share)))
    return {
        **asdict(fleet),
        "hit_fraction": summary.hit_fraction,
        "mean_ttft_seconds": summary.mean_ttft_seconds,
        "p99_ttft_seconds": summary.p99_ttft_seconds,
        "load_spread": summary.load_spread,
        "unfinished": summary.requests - summary.finished,
        "cpu_seconds": time.process_time() - started,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def in_own_process(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What `work` returns, from a new process: nothing of an earlier run is in its memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def measured_beside(cell: Cell, beside: str) -> dict[str, Any]:
    """A run of one router; the command starts when its times begin to count."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        if beside:
            started.append(subprocess.Popen(shlex.split(beside)))

    found = measured(cell, start)
    for process in started:
        process.wait()
    return found


def links(quick: bool) -> dict[str, Any]:
    """What the sockets of one router cost, and how many it may have."""
    return scale_links.measured(200 if quick else 5_000, 8 if quick else 400)


class Kept:
    """Results by what was run, one line a run, so that a run that was broken off goes on. Of one commit."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._found = {line["key"]: line["figures"] for line in map(json.loads, lines)}

    def get(self, key: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The figures of a run, which is made if it is not kept."""
        if key not in self._found:
            sys.stderr.write(f"{key}\n")
            self._found[key] = run()
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps({"key": key, "figures": self._found[key]}) + "\n")
        found: dict[str, Any] = self._found[key]
        return found


def run_all(quick: bool, kept: Kept, beside: str, only: str | None) -> dict[str, Any]:
    """Everything, or one part; parts that are not wanted are left out. Of each: its runs, and how to repeat them."""
    record: dict[str, Any] = {}
    for name, listed in cells(quick).items():
        if only in (None, name):
            more = beside if name == "title" else ""
            runs = [kept.get(json.dumps(asdict(cell)), partial(in_own_process, measured_beside, cell, more))
                    for cell in listed]  # fmt: skip
            record[name] = {"facts": environment(0), "runs": runs}
    if only in (None, "links"):
        runs = [kept.get("links", partial(in_own_process, links, quick))]
        record["links"] = {"facts": environment(0), "runs": runs}
    if only in (None, "fleet"):
        runs = [kept.get(json.dumps(asdict(fleet)), partial(in_own_process, simulated, fleet))
                for fleet in fleets(quick)]  # fmt: skip
        record["fleet"] = {"facts": environment(0), "runs": runs}
    return record


# --- what follows from the runs ---------------------------------------------------------------------------------------


def total_us(run: Figures, names: Iterable[str]) -> float:
    """Microseconds of all calls of these kinds, each taken as long as their median: other programs ran beside."""
    return sum(run["calls"][name]["count"] * run["calls"][name]["p50_us"] for name in names if name in run["calls"])


def costs(run: Figures) -> dict[str, float]:
    """Microseconds of one router for a request of its own, for another router's, and, for any request, for cache
    events; and the share of a core that its ticks take."""
    calls, frames = run["calls"], run["frames"]
    own = calls["schedule"]["count"]
    others = run["requests_counted"] - own
    tokens = frames["chunk"] / own
    life = ("placed", "prefilled", "ended")
    found = {
        "decide_us": total_us(run, ("schedule", "first_token", "finish")) / own,
        "stream_us": (total_us(run, ("submit encode",)) / own) + tokens * calls["chunk decode"]["p50_us"],
        "passed_by_us": total_us(run, [f"own {what} decode" for what in life]) / own,
        "decode_us": total_us(run, [f"{what} decode" for what in life]) / max(1, others),
        "apply_us": total_us(run, [f"{what} apply" for what in life]) / max(1, others),
        "cache_us": total_us(run, [f"{what} {step}" for what in ("evicted", "stored") for step in ("decode", "apply")])
        / run["requests_counted"],
        "tick_share": calls["tick"]["p50_us"] / 1e6 if "tick" in calls else 0.0,
    }
    return found


def per_request_us(cost: Mapping[str, float], routers: int) -> float:
    """What a request of the fleet costs each router, on average over its own and others'."""
    own = cost["decide_us"] + cost["stream_us"] + cost["passed_by_us"]
    other = cost["decode_us"] + cost["apply_us"]
    return own / routers + other * (1 - 1 / routers) + cost["cache_us"]


def full_at(cost: Mapping[str, float], routers: int) -> float:
    """Requests a second of the fleet at which a core of each router is full; 0 if ticks alone fill it."""
    return max(0.0, 1.0 - cost["tick_share"]) * 1e6 / per_request_us(cost, routers)


def frames_in(run: Figures, routers: int) -> float:
    """Frames that come to each of so many routers for a request of the fleet, its share of the answers' included."""
    frames = run["frames"]
    told = sum(n for what, n in frames.items() if what not in ("submit", "chunk"))
    return told / run["requests_counted"] + frames["chunk"] / frames["submit"] / routers


def socket_us(found: Figures) -> float:
    """What sockets and event loop add to a frame: the mean of a long one and a short one."""
    return sum(found[f"{what}_us"] - found[f"{what}_without_us"] for what in ("placed", "ended")) / 2


def workers_of_a_core(run: Figures, found: Figures, routers: int) -> dict[str, float]:
    """Of how many workers the core of each of so many routers is full: by what fills it."""
    rate, cost = run["per_second"] / run["workers"], costs(run)
    books = rate * per_request_us(cost, routers)
    ticks = cost["tick_share"] * 1e6 / run["workers"]
    sockets = rate * frames_in(run, routers) * socket_us(found)
    idle = found["raised"]["idle_us_per_second"]
    loads = {"decisions, decoding and books": books, "ticks": ticks, "frames through sockets": sockets}
    loads |= {"heartbeats of idle links": idle, "all of these": books + ticks + sockets + idle}
    return {name: 1e6 / load for name, load in loads.items() if load}


def limits(run: Figures, found: Figures) -> list[tuple[float, str]]:
    """How many workers each limit allows a router, the least first."""
    rate = run["per_second"] / run["workers"]
    bytes_each = rate * sum(bytes_in(run).values())
    tree = run["tree"]
    rows = [(count, f"one core: {name}") for name, count in workers_of_a_core(run, found, run["routers"]).items()]
    rows.append((float(found["default"]["links"]), "links with ZeroMQ's default number of sockets"))
    rows.append((LINK_BYTES_PER_SECOND / bytes_each, "10 Gbit/s into a router"))
    # What was given up is what did not fit, in nodes, which are alike.
    wanted = tree["bytes_used"] * (1 + tree["shed_nodes"] / tree["nodes"])
    rows.append((run["workers"] * tree["bytes_max"] / wanted, "max_bytes of the prefix tree, by default"))
    return sorted(rows)


def bytes_in(run: Figures) -> dict[str, float]:
    """Bytes that a request of the fleet sends to each router: of requests, of cache events, of its share of answers."""
    count, sizes = run["requests_counted"], run["bytes"]
    cache = sum(sizes.get(what, 0) for what in ("evicted", "stored"))
    answers = sizes.get("chunk", 0)
    told = sum(sizes.values()) - cache - answers - sizes.get("submit", 0)
    return {"told": told / count, "cache": cache / count, "answers": answers / count}


def events_per_request(run: Figures) -> float:
    """Events that a router is informed for each request of the fleet."""
    return sum(n for what, n in run["events"].items() if what not in ("chunk", "submit")) / run["requests_counted"]


# --- the page ---------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def calls_table(run: Figures) -> str:
    """Every kind of call of the big run."""
    rows = []
    for name in [*(name for name in CALLS if name in run["calls"]), *sorted(set(run["calls"]) - set(CALLS))]:
        call, what = run["calls"][name], name.rpartition(" ")[0]
        frames = run["frames"].get(what, 0) if name.endswith("code") else 0
        times = [f"{call[key]:,.1f}" for key in ("p50_us", "mean_us", "p99_us")]
        size = f"{run['bytes'][what] / frames:,.0f}" if frames else ""
        rows.append([CALLS.get(name, name), f"{call['count']:,}", *times, size])
    return table(["call", "counted", "p50 us", "mean us", "p99 us", "bytes of a frame"], rows)


def summary_table(run: Figures) -> str:
    """What the big run comes to, each router."""
    cost, size, rate, routers = costs(run), bytes_in(run), run["per_second"], run["routers"]
    told = sum(size.values())
    per = events_per_request(run)
    share = rate * per_request_us(cost, routers) / 1e6
    rows = [
        ["requests of the fleet a second", f"{rate:,.0f}"],
        ["mean prompt; of it cached", f"{run['prompt_tokens_mean']:,.0f} tokens; {run['hit_fraction']:.1%}"],
        ["events reported to each router", f"{per:.2f} a request, {per * rate:,.0f} a second"],
        ["bytes to each router", f"{told:,.0f} a request, {told * rate / 1e6:,.0f} MB/s"],
        ["of them prompts of placed requests; of evictions; answers",
         "; ".join(f"{size[name]:,.0f}" for name in ("told", "cache", "answers"))],
        ["bytes from each router", f"{run['bytes']['submit'] / run['requests_counted']:,.0f} a request of the fleet"],
        ["time for an own request: decision and life; frames; events about it",
         "; ".join(f"{cost[name]:,.1f} us" for name in ("decide_us", "stream_us", "passed_by_us"))],
        ["time for another router's: decode; apply", f"{cost['decode_us']:,.1f} us; {cost['apply_us']:,.1f} us"],
        ["time for cache events, a request", f"{cost['cache_us']:,.1f} us"],
        ["time for a request of the fleet, each router", f"{per_request_us(cost, routers):,.1f} us"],
        ["cores of each router at that rate: requests; ticks", f"{share:.2f}; {cost['tick_share']:.2f}"],
        ["one core of each router is full at", f"{full_at(cost, routers):,.0f} requests a second"],
        ["requests live at the end", f"{run['live_requests']:,}"],
        ["prefix tree", f"{run['tree']['bytes_used'] / 1e6:,.0f} MB of {run['tree']['bytes_max'] / 1e6:,.0f}, "
         f"{run['tree']['nodes']:,} nodes; given up for want of room: {run['tree']['shed_nodes']:,}"],
    ]  # fmt: skip
    return table(["each of the routers", ""], rows)


def sweep_table(runs: Iterable[Figures], what: Callable[[Figures], str], head: str) -> str:
    """A line a run."""
    rows = []
    for run in runs:
        cost, size = costs(run), bytes_in(run)
        other = f"{cost['decode_us']:,.0f} + {cost['apply_us']:,.0f}"
        full = full_at(cost, run["routers"])
        rows.append(
            [
                what(run),
                f"{run['calls']['schedule']['p50_us']:,.1f}",
                f"{cost['decide_us'] + cost['stream_us'] + cost['passed_by_us']:,.0f}",
                other if cost["decode_us"] else "-",
                f"{cost['cache_us']:,.1f}",
                f"{per_request_us(cost, run['routers']):,.0f}",
                f"{sum(size.values()):,.0f}",
                f"{cost['tick_share'] * 1e3:,.0f}",
                f"{full:,.0f}",
                f"{full / run['per_second']:.2f}",
            ]
        )
    columns = [
        *(head, "decision p50 us", "own request us", "other's: decode + apply us", "cache us", "a request us"),
        *("bytes in", "tick ms", "core full at, requests/s", "of the fleet's rate"),
    ]
    return table(columns, rows)


def fleet_table(runs: Sequence[Figures]) -> str:
    """The whole simulations."""
    rows = []
    ones = {(run["workers"], run["counted_share"]): run for run in runs if run["routers"] == 1}
    for run in runs:
        one = ones[run["workers"], run["counted_share"]]
        ratio = [f"{run[key] / one[key]:.3f}" for key in ("hit_fraction", "mean_ttft_seconds", "p99_ttft_seconds")]
        rows.append(
            [
                *(f"{run['workers']:,}", f"{run['requests']:,}", f"last {run['counted_share']:.0%}"),
                *(f"{run['routers']}", f"{run['hit_fraction']:.2%}", f"{run['mean_ttft_seconds']:.3f} s"),
                *(f"{run['p99_ttft_seconds']:.3f} s", ", ".join(ratio), f"{run['unfinished']}"),
                *(f"{run['cpu_seconds']:,.0f} s", f"{run['peak_rss_bytes'] / 1e9:.1f} GB"),
            ]
        )
    head = ["workers", "requests", "counted", "routers", "hit", "mean TTFT", "p99 TTFT", "to one router"]
    return table([*head, "unfinished", "CPU", "memory"], rows)


def limits_table(run: Figures, found: Figures) -> str:
    """Where it ends, in workers."""
    return table(["workers", "limit of one router"], [[f"{count:,.0f}", name] for count, name in limits(run, found)])


def parts_table(run: Figures, found: Figures) -> str:
    """How many routers a fleet of 1,000 workers needs, by how many stand before each part of it."""
    rows = []
    for routers in (2, 5, 10, 20):
        count = workers_of_a_core(run, found, routers)["all of these"]
        rows.append([f"{routers}", f"{count:,.0f}", f"{1000 / count:.1f}", f"{1000 / count * routers:,.0f}"])
    head = ["routers of a part", "workers at which their cores are full", "parts of 1,000 workers", "routers in all"]
    return table(head, rows)


def links_table(found: Figures) -> str:
    """Sockets."""
    rows = [
        ["CPU for a frame of a placed request: sockets, loop, decode and apply", f"{found['placed_us']:,.0f} us"],
        ["the same for a frame of a request's end", f"{found['ended_us']:,.0f} us"],
        ["without sockets", f"{found['placed_without_us']:,.0f} us; {found['ended_without_us']:,.0f} us"],
    ]
    for name, title in (("default", "with ZeroMQ's default"), ("raised", "with more sockets allowed")):
        opened = found[name]
        rows += [
            [f"links that one router opens {title}", f"{opened['links']:,}"],
            ["what ended it; file descriptors of a link", f"{opened['ended_by']}; {opened['files_per_link']:.1f}"],
        ]
    rows.append(["CPU for an idle link a second, heartbeats only", f"{found['raised']['idle_us_per_second']:,.0f} us"])
    return table(["one router's links", ""], rows)


def sections(record: Figures) -> Iterator[str]:
    """The tables, in order."""
    if {"title", "links"} <= set(record):
        run = record["title"]["runs"][0]
        yield (
            f"### Limits\n\nOne of {run['routers']} routers, ToolBench, {run['per_second'] / run['workers']:.1f} "
            "requests a second on each worker."
        )
        yield limits_table(run, record["links"]["runs"][0])
        yield f"Parts of a fleet, by the same figures:\n\n{parts_table(run, record['links']['runs'][0])}"
    if "title" in record:
        run = record["title"]["runs"][0]
        yield f"### {run['requests']:,} requests, {run['workers']:,} workers, {run['routers']} routers"
        yield f"{made_by(record['title'])}\n\n{summary_table(run)}"
        yield f"Every call for the last {run['requests_counted']:,} requests:\n\n{calls_table(run)}"
    sweeps: Mapping[str, tuple[str, Callable[[Figures], str]]] = {
        "routers": ("Routers", lambda run: f"{run['routers']}"),
        "workers": ("Workers", lambda run: f"{run['workers']:,}"),
        "prompts": ("Prompts", lambda run: f"{run['workload']}, {run['prompt_tokens_mean']:,.0f} tokens"),
        "told": ("What workers report", reported_title),
    }
    for name, (title, what) in sweeps.items():
        if name in record:
            yield f"### {title}\n\n{made_by(record[name])}"
            yield sweep_table(record[name]["runs"], what, title.lower())
    if "links" in record:
        yield f"### Links\n\n{made_by(record['links'])}\n\n{links_table(record['links']['runs'][0])}"
    if "fleet" in record:
        about = f"ToolBench, {SOURCES['toolbench'][0]:.1f} requests a second and worker"
        yield (
            f"### The whole fleet in simulation\n\n{made_by(record['fleet'])} {about}, events "
            f"{DELAY_SECONDS * 1e3:.0f} ms late; caches are empty at the start."
        )
        yield fleet_table(record["fleet"]["runs"])


def made_by(part: Figures) -> str:
    """How to repeat a part."""
    about = part["facts"]
    return (
        f"`{typed_today(about['command'])}` at {about['commit']}, seed {about['seed']}, {about['machine']}, "
        f"Python {about['python']}."
    )


def reported_title(run: Figures) -> str:
    """What differs in that table."""
    told = "blocks only" if run["told"] == "blocks" else "requests and evictions"
    return f"{told}; calibrating" if run["calibrate"] else told


def write_docs(record: Figures, page: Path = PAGE) -> None:
    """The tables of the page; what stands around them stays."""
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{page} must have the markers {BEGIN} and {END} once")
    before, rest = text.split(BEGIN)
    page.write_text(before + BEGIN + "\n" + "\n\n".join(sections(record)) + "\n" + END + rest.split(END)[1])


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Everything asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "scale.json")
    parser.add_argument("--docs", action="store_true", help="write the tables of docs/experiments/scale.md")
    parser.add_argument("--quick", action="store_true", help="small numbers, for tests; nothing is kept")
    parser.add_argument("--only", choices=[*cells(True), "links", "fleet"], help="this part; the JSON keeps the others")
    parser.add_argument("--beside", default="", help="start this command when the big run's times begin to count")
    args = parser.parse_args(arguments)
    kept = Kept(ROOT / "build" / f"scale-{'quick-' * args.quick}{environment(0)['commit']}.jsonl")
    earlier = json.loads(args.json.read_text()) if args.only and args.json.exists() else {}
    record = {**earlier, **run_all(args.quick, kept, args.beside, args.only)}
    args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.docs:
        write_docs(record)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
