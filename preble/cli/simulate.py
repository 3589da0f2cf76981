"""`preble simulate`: policies on a simulated fleet, side by side. Owns its options, its progress and its tables.

preble simulate --workload toolbench --policy round_robin,e2 --workers 4 --rps 10
preble simulate prompts.jsonl.gz --kill w0@30 --json found.json
preble simulate --policy "e2,rules:Mine(weight=0.5)" --rps 4,8,16 --workers 2,8 --seeds 5 --plot sweep.png

With several loads, fleets or seeds every policy runs in each of them, on the same requests, and figures are means over
seeds with half of their 95 % interval. Standard output is the same for the same command, on every run; what is not (how
fast it went) goes to standard error.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import __version__, workloads
from ..config import SchedulerConfig
from ..errors import InvalidInput
from ..local import LocalConfig
from ..policies.base import Policy, resolve
from ..policies.named import split_names
from ..policies.oracle import OraclePartition
from ..sim import Result, SimConfig, WorkerDeath, simulate
from ..sim.results import OUTCOMES
from ..workloads import Workload
from ..workloads.generators import MAKERS
from . import own_data
from .console import Screen, positive_float, positive_int, write_json
from .sweeps import plot
from .sweeps.requests_file import RequestsFile, check_files
from .sweeps.settings import plain, scheduler_config
from .sweeps.statistics import Interval, interval, paired_ratio

REQUESTS = 1000
REQUESTS_PER_GROUP = 10
RPS = 4.0
RUNS_MAX = 10_000  # of one command
NAME_WIDTH = 20  # of the first column, at least
STAGES = ("rebalance_ratio", "replicas_max", "imbalance_share")  # of the scheduler's knobs, those that are options
# (title, width, how to write it): one column each, after the policy's name.
COLUMNS = (
    *(("mean", 9, "mean_ttft_seconds"), ("p50", 8, "p50_ttft_seconds"), ("p99", 8, "p99_ttft_seconds")),
    *(("mean", 10, "mean_latency_seconds"), ("p50", 8, "p50_latency_seconds"), ("p99", 8, "p99_latency_seconds")),
)
# What a row over several seeds shows: (title, metric, as a percentage).
SEED_COLUMNS = (
    ("mean TTFT", "mean_ttft_seconds", False), ("p99 TTFT", "p99_ttft_seconds", False),
    ("mean latency", "mean_latency_seconds", False), ("p99 latency", "p99_latency_seconds", False),
    ("hits", "hit_fraction", True), ("goodput", "goodput", True),
)  # fmt: skip
COMPARED = "mean_latency_seconds"  # with the first policy, paired by seed


def list_of(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """An argument that is one or several of a kind, with commas."""

    def several(text: str) -> tuple[Any, ...]:
        found = tuple(kind(one.strip()) for one in text.split(","))
        if len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(f"names one twice: {text}")
        return found

    several.__name__ = kind.__name__
    return several


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options; each policy gets the same requests at the same moments."""
    add = parser.add_argument_group("requests").add_argument
    add("file", nargs="?", metavar="FILE", help="prompts, chats, sessions or a trace (docs/own-data.md)")
    add("--workload", metavar="NAME|FILE", help="the same, or toolbench, videoqa, ... to generate (default: toolbench)")
    add("--requests", type=positive_int, metavar="N", help="how many (default: 1000, or the file's)")
    add("--groups", type=positive_int, metavar="N", help="prefix groups to generate (default: requests / 10)")
    add("--rps", type=list_of(positive_float), metavar="R[,R...]",
        help="requests a second, on average: Poisson, also of sessions (default: the file's times, or 4)")  # fmt: skip
    add("--sessions", type=positive_int, metavar="N",
        help="so many sessions at once, instead of --rps: when one has ended the next begins")  # fmt: skip
    own_data.add_options(add, "words")
    add("--seed", type=int, default=0, metavar="N", help="of prompts, arrivals and chance (default: 0)")
    add("--seeds", type=positive_int, default=1, metavar="N", help="so many, from --seed on (default: 1)")
    add = parser.add_argument_group("fleet").add_argument
    policy = "names, or module:Class of yours; either with (KEY=VALUE, ...) (default: %(default)s)"
    add("--policy", default="round_robin,e2", metavar="P[,P...]", help=policy)
    add("--workers", type=list_of(positive_int), default=(2,), metavar="N[,N...]", help="w0, w1, ... (default: 2)")
    add("--cost-model", default="mistral-7b/a6000", metavar="PRESET|FILE", help="of a worker (default: %(default)s)")
    add("--kv-capacity", type=positive_int, metavar="N", help="KV tokens of a worker (default: 198516)")
    add("--token-budget", type=positive_int, metavar="N", help="tokens of an iteration (default: 512)")
    add("--order", choices=("priority", "fcfs", "longest_prefix"), help="of a worker's queue (default: priority)")
    add = parser.add_argument_group("scheduler, as of serve").add_argument
    for name in STAGES:
        default = getattr(SchedulerConfig(), name)
        add(f"--scheduler-{name.replace('_', '-')}", type=type(default), default=default, metavar="N",
            help="docs/policies.md (default: %(default)s)")  # fmt: skip
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any field of SchedulerConfig; may be repeated")
    add = parser.add_argument_group("what goes wrong").add_argument
    add("--routers", type=int, default=1, metavar="N", help="schedulers that share the requests (default: 1)")
    add("--event-delay", type=float, default=0.0, metavar="S", help="seconds until events arrive (default: 0)")
    add("--event-loss", type=float, default=0.0, metavar="P", help="share of eviction news lost (default: 0)")
    add("--kill", action="append", default=[], metavar="W@S", help="worker W dies at S seconds; may be repeated")
    add = parser.add_argument_group("results").add_argument
    add(
        "--slo-ttft", type=positive_float, default=1.0, metavar="S", help="goodput counts TTFTs up to this (default: 1)"
    )
    add("--json", type=Path, metavar="FILE", help="write everything found")
    add("--requests-file", type=Path, metavar="FILE", help="a row a request of every run: .csv, or .parquet (pyarrow)")
    add("--plot", type=Path, metavar="FILE", help="a picture (PNG); needs matplotlib")


class SimulationProgress:
    """Progress of one simulation: requests that have ended, and how fast the virtual time goes by."""

    def __init__(self, policy: str, total: int, place: str = "") -> None:
        self.policy, self.total, self.place = policy, total, place
        self.done = self.failed = 0
        self.virtual_seconds = 0.0
        self._started = time.monotonic()

    @property
    def text(self) -> str:
        """ "312 virtual seconds, 2,904 requests/s"."""
        passed = max(time.monotonic() - self._started, 1e-9)
        return f"{self.virtual_seconds:,.0f} virtual seconds, {self.done / passed:,.0f} requests/s{self.place}"


@dataclass(frozen=True, slots=True)
class SweepCell:
    """A fleet and a load; `rps` None: the trace's own arrivals, or the default."""

    workers: int
    rps: float | None


@dataclass(slots=True)
class Runs:
    """What all seeds found for one policy in one cell, in the order of the seeds."""

    policy: str
    cell: SweepCell
    reports: list[dict[str, Any]]
    times: dict[str, list[Any]]

    def values(self, metric: str) -> list[float]:
        """A figure by seed."""
        return [float(found[metric]) for found in self.reports]

    def interval(self, metric: str) -> Interval:
        """Its mean over seeds."""
        return interval(self.values(metric))


def run(args: argparse.Namespace, screen: Screen | None = None) -> int:
    """Check everything, simulate each policy, print the tables. Wrong options raise before anything is simulated."""
    if args.file is not None and args.workload is not None:
        raise InvalidInput("FILE and --workload: name one of them")
    if args.sessions is not None and args.rps is not None:
        raise InvalidInput("--sessions and --rps: name one of them")
    policies = names_of(args.policy)
    cells = [SweepCell(workers, rps) for workers in args.workers for rps in args.rps or (None,)]
    configs = {workers: config_of(args, workers) for workers in args.workers}
    check_outputs(args, len(cells) * len(policies) * args.seeds)
    seeds = range(args.seed, args.seed + args.seeds)
    sweep = Sweep(args, policies, seeds, screen or Screen(), len(cells) * len(policies) * args.seeds)
    found: list[Runs] = []
    with RequestsFile(args.requests_file) if args.requests_file else nullcontext() as into:
        for cell in cells:
            workload = sweep.workload(cell, args.seed)
            if found:
                sys.stdout.write("\n")
            sys.stdout.write(f"{opening(workload, configs[cell.workers])}\n{own_data.said(workload)}\n")
            found += sweep.run_cell(cell, configs[cell.workers], into)
    if args.json is not None:
        write_json(args.json, document(workload, list(configs.values()), found, seeds))
    if args.plot is not None:
        draw(args.plot, found, workload, seeds)
    return 0


class Sweep:
    """The runs of one command: the same requests for every policy. Prints each cell's table while it grows."""

    def __init__(
        self, args: argparse.Namespace, policies: Sequence[str], seeds: range, screen: Screen, total: int
    ) -> None:
        self._args, self._policies, self._seeds, self._screen = args, policies, seeds, screen
        self._total, self._done = total, 0
        self._workloads: tuple[float | None, dict[int, Workload]] = (None, {})

    def workload(self, cell: SweepCell, seed: int) -> Workload:
        """The requests of a seed at a load; made once for all policies."""
        if self._workloads[0] != cell.rps:
            self._workloads = (cell.rps, {})
        kept = self._workloads[1]
        if seed not in kept:
            kept[seed] = workload_of(self._args, cell.rps, seed)
        return kept[seed]

    def run_cell(self, cell: SweepCell, config: SimConfig, into: RequestsFile | None) -> list[Runs]:
        """All policies and seeds of a cell."""
        args, several = self._args, len(self._seeds) > 1
        width = max(NAME_WIDTH, *(len(policy) + 1 for policy in self._policies))
        sys.stdout.write((seeds_header if several else header)(args.slo_ttft, width) + "\n")
        found: list[Runs] = []
        for policy in self._policies:
            runs = Runs(policy, cell, [], {name: [] for name, _ in plot.SAMPLES})
            for seed in self._seeds:
                workload = self.workload(cell, seed)
                own = replace(config, policy=made(policy, workload), seed=seed)
                result = simulated(workload, own, policy, self._screen, self._place())
                runs.reports.append({"seed": seed, **report(result, args.slo_ttft)})
                for name in runs.times if args.plot is not None else ():
                    runs.times[name].append(getattr(result, name))
                if into is not None:
                    into.add((policy, cell.workers, cell.rps, seed), workload, result)
            found.append(runs)
            sys.stdout.write(seeds_row(runs, found[0], width) if several else row(policy, runs.reports[0], width))
            sys.stdout.flush()
        for runs in found:
            for one in runs.reports:
                sys.stdout.write(shortfall(f"{runs.policy}, seed {one['seed']}" if several else runs.policy, one))
        return found

    def _place(self) -> str:
        """Which run of how many comes now."""
        self._done += 1
        return f", run {self._done} of {self._total}" if self._total > len(self._policies) else ""


def check_outputs(args: argparse.Namespace, runs: int) -> None:
    """Raise for what cannot be written or would never end."""
    if runs > RUNS_MAX:
        raise InvalidInput(f"--rps, --workers, --policy and --seeds make {runs} runs, more than {RUNS_MAX}")
    check_files(args)


def simulated(workload: Workload, config: SimConfig, policy: str, screen: Screen, place: str = "") -> Result:
    """One simulation, its progress on the screen."""
    shown = SimulationProgress(policy, len(workload), place)
    with screen.phase(shown) as update:

        def progress(ended: int, requests: int, virtual_seconds: float) -> None:
            shown.done, shown.virtual_seconds = ended, virtual_seconds
            update()

        return simulate(workload, config, progress=progress)


# --- options ----------------------------------------------------------------------------------------------------------


def config_of(args: argparse.Namespace, workers: int) -> SimConfig:
    """A fleet that the options describe, with no policy of its own yet."""
    given = {
        "kv_capacity_tokens": args.kv_capacity,
        "token_budget": args.token_budget,
        "order": args.order,
    }
    local: LocalConfig = SimConfig().local
    return SimConfig(
        workers=workers,
        routers=args.routers,
        cost_model=args.cost_model,
        local=replace(local, **{name: value for name, value in given.items() if value is not None}),
        scheduler=scheduler_config(args.set, **{name: getattr(args, f"scheduler_{name}") for name in STAGES}),
        seed=args.seed,
        event_delay_seconds=args.event_delay,
        event_loss=args.event_loss,
        faults=tuple(death_of(text) for text in args.kill),
    )


def death_of(text: str) -> WorkerDeath:
    """`w0@30` as a death. Raises `InvalidInput`."""
    name, _, seconds = text.rpartition("@")
    try:
        return WorkerDeath(float(seconds), name)
    except ValueError:
        raise InvalidInput(f"--kill must be a worker and seconds, such as w0@30, got {text!r}") from None


def names_of(text: str) -> list[str]:
    """The policies named, each known and each once."""
    names = split_names(text)
    for name in names:
        if name != OraclePartition.name:
            resolve(name)
    if len(set(names)) < len(names):
        raise InvalidInput(f"--policy names one twice: {text}")
    return names


def made(policy: str, workload: Workload) -> str | Policy:
    """What `SimConfig` wants for a policy's name: the oracle must be given the groups."""
    if policy != OraclePartition.name:
        return policy
    return OraclePartition({request.request_id: request.group for request in workload.requests})


def workload_of(args: argparse.Namespace, rps: float | None, seed: int) -> Workload:
    """The requests and when they arrive. A generator's name goes before a file's."""
    name = args.file or args.workload or "toolbench"
    if args.file is None and name in MAKERS:
        if args.format or args.tokenizer:
            raise InvalidInput("--format and --tokenizer are for files; this workload is generated")
        requests = args.requests or REQUESTS
        groups = args.groups or max(1, requests // REQUESTS_PER_GROUP)
        found = workloads.generate(name, requests=requests, groups=groups, seed=seed)
    elif Path(name).exists():
        if args.groups is not None:
            raise InvalidInput("--groups is for workloads that are generated; a file has its own")
        found = own_data.read(args, Path(name), args.requests, workloads.words)
    else:
        raise InvalidInput(f"--workload must be one of {', '.join(MAKERS)}, or a file; got {name!r}")
    return sent(found, args, rps, seed)


def sent(found: Workload, args: argparse.Namespace, rps: float | None, seed: int) -> Workload:
    """The requests with their arrivals: the file's, or drawn."""
    if args.sessions is not None:
        if not found.has_sessions:
            raise InvalidInput(f"--sessions: {found.name} has no sessions; its requests come by --rps")
        begun = sum(request.after is None for request in found.requests)
        if begun < args.sessions:
            raise InvalidInput(f"--sessions: {args.sessions} at once, but {found.name} has {begun} (see --requests)")
        return workloads.sessions_at_once(found, args.sessions, seed)
    if rps is None and found.arrivals != "none":
        return found
    if found.has_sessions and found.arrivals == "none":
        begin = (rps or RPS) * sum(request.after is None for request in found.requests) / len(found)
        return workloads.session_arrivals(found, begin, seed)
    return workloads.poisson(found, rps or RPS, seed)


# --- results ----------------------------------------------------------------------------------------------------------


def report(result: Result, slo_seconds: float) -> dict[str, Any]:
    """All figures of one run, as JSON has them."""
    return {
        "trace_hash": result.trace_hash,
        "goodput": result.goodput(slo_seconds),
        "slo_ttft_seconds": slo_seconds,
        **result.summary().as_dict(),
        "counts": dict(result.counts),
        "scheduler": result.scheduler_stats,
    }


def opening(workload: Workload, config: SimConfig) -> str:
    """What is simulated, in two lines."""
    local = config.local
    return (
        f"{workload.name}: {len(workload)} requests, {workload.source}; arrivals: {workload.arrivals}\n"
        f"{config.workers} workers, {config.cost_model}, {local.kv_capacity_tokens} KV tokens, "
        f"{local.token_budget} tokens an iteration, {local.order} order"
    )


def header(slo_seconds: float, width: int = NAME_WIDTH) -> str:
    """The table's two top lines. Seconds, unless said otherwise."""
    first = f"{'':<{width}}{'TTFT s':>9}{'':>16}{'latency s':>10}{'':>16}{'':>7}{'':>8}{'TTFT <=':>9}"
    titles = "".join(f"{title:>{column}}" for title, column, _ in COLUMNS)
    return f"{first}\n{'policy':<{width}}{titles}{'hits':>7}{'spread':>8}{f'{slo_seconds:g} s':>9}  trace"


def row(policy: str, found: Mapping[str, Any], width: int = NAME_WIDTH) -> str:
    """A policy's line."""
    seconds = "".join(f"{found[name]:>{column}.3f}" for _, column, name in COLUMNS)
    shares = f"{found['hit_fraction']:>7.1%}{found['load_spread']:>8.2f}{found['goodput']:>9.1%}"
    return f"{policy:<{width}}{seconds}{shares}  {found['trace_hash']}\n"


def seeds_header(slo_seconds: float, width: int) -> str:
    """The top line of a table over seeds."""
    titles = "".join(f"{title:>16}" for title, _, _ in SEED_COLUMNS[:-1])
    return f"{'policy':<{width}}{titles}{f'TTFT <= {slo_seconds:g} s':>16}{'latency / first':>22}"


def seeds_row(runs: Runs, first: Runs, width: int) -> str:
    """A policy's line over seeds: means, half of their 95 % intervals, and its latency over the first policy's."""
    text = f"{runs.policy:<{width}}"
    for _, metric, percentage in SEED_COLUMNS:
        found = runs.interval(metric)
        said = f"{found.mean:.1%} ± {found.half:.1%}" if percentage else f"{found.mean:.3f} ± {found.half:.3f}"
        text += f"{said:>16}"
    if runs is not first:
        ratio = paired_ratio(runs.values(COMPARED), first.values(COMPARED))
        text += f"{f'{ratio.mean:.3f} ({ratio.low:.3f}-{ratio.high:.3f})':>22}"
    return f"{text}\n"


def shortfall(policy: str, found: Mapping[str, Any]) -> str:
    """A line on requests that did not finish; nothing where all did."""
    missed = [f"{found[name]} {name.replace('_', ' ')}" for name in OUTCOMES if name != "finished" and found[name]]
    if found["counts"]["truncated"]:
        missed.append(f"{found['counts']['truncated']} truncated")
    if found["counts"]["resumed"]:
        missed.append(f"{found['counts']['resumed']} resumed on another worker")
    return f"{policy}: of {found['requests']} requests {', '.join(missed)}\n" if missed else ""


def document(workload: Workload, configs: Sequence[SimConfig], found: Sequence[Runs], seeds: range) -> dict[str, Any]:
    """Everything found, with what it was found for. A figure that does not exist is null. One cell and one seed have
    "policies"; a sweep has "cells" with the runs of each seed and the means' intervals."""
    config = {
        name: plain(getattr(configs[0], name))
        for name in configs[0].__dataclass_fields__
        if name not in ("policy", "seed", "workers")
    }
    about: dict[str, Any] = {
        "preble": __version__,
        "workload": {"name": workload.name, "requests": len(workload), "source": workload.source,
                     "arrivals": workload.arrivals, "notes": list(workload.notes)},
        "config": {**config, "workers": [plain(one.workers) for one in configs], "seeds": list(seeds)},
    }  # fmt: skip
    if len({runs.cell for runs in found}) == 1 and len(seeds) == 1:
        about["config"] |= {"workers": configs[0].workers, "seed": seeds[0]}
        return {**about, "policies": {runs.policy: runs.reports[0] for runs in found}}
    return {**about, "cells": [cell_document(runs) for runs in found]}


def cell_document(runs: Runs) -> dict[str, Any]:
    """A policy's figures in one cell of a sweep."""
    metrics = [name for name, value in runs.reports[0].items() if isinstance(value, float)]
    return {
        "policy": runs.policy,
        "workers": runs.cell.workers,
        "rps": runs.cell.rps,
        "intervals": {name: runs.interval(name).as_dict() for name in metrics},
        "seeds": runs.reports,
    }


def draw(path: Path, found: Sequence[Runs], workload: Workload, seeds: range) -> None:
    """The picture, and where it lies."""
    import numpy as np

    drawn = [
        plot.Drawn(
            runs.policy, runs.cell.workers, runs.cell.rps,
            {metric: runs.interval(metric) for metric, _ in plot.PANELS},
            {name: np.concatenate(times) for name, times in runs.times.items()},
        )
        for runs in found
    ]  # fmt: skip
    one_fleet = f", {found[0].cell.workers} workers" if len({runs.cell.workers for runs in found}) == 1 else ""
    note = f"; means of {len(seeds)} seeds and their 95 % intervals" if len(seeds) > 1 else f"; seed {seeds[0]}"
    title = f"{workload.name}: {len(workload)} requests{one_fleet}"
    plot.draw(path, drawn, title, f"preble {__version__} simulate{note}")
    sys.stdout.write(f"plot: {path}\n")
