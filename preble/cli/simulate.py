"""`preble simulate`: policies on a simulated fleet, side by side. Owns its options, its progress and its tables.

preble simulate --workload toolbench --policy round_robin,e2 --workers 4 --rps 10
preble simulate --workload prompts.jsonl.gz --kill w0@30 --json found.json

Standard output is the same for the same command, on every run; what is not (how fast it went) goes to standard error.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import __version__, workloads
from ..config import SchedulerConfig
from ..errors import InvalidInput
from ..local import LocalConfig
from ..policies.base import Policy, resolve
from ..policies.oracle import OraclePartition
from ..sim import Result, SimConfig, WorkerDeath, simulate
from ..sim.results import OUTCOMES
from ..workloads import Workload
from ..workloads.generators import MAKERS
from .console import Screen, positive_float, positive_int, write_json

REQUESTS = 1000
REQUESTS_PER_GROUP = 10
RPS = 4.0
STAGES = ("rebalance_ratio", "replicas_max", "imbalance_share")  # of the scheduler's knobs, those that are options
# (title, width, how to write it): one column each, after the policy's name.
COLUMNS = (
    *(("mean", 9, "mean_ttft_seconds"), ("p50", 8, "p50_ttft_seconds"), ("p99", 8, "p99_ttft_seconds")),
    *(("mean", 10, "mean_latency_seconds"), ("p50", 8, "p50_latency_seconds"), ("p99", 8, "p99_latency_seconds")),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options; each policy gets the same requests at the same moments."""
    add = parser.add_argument_group("requests").add_argument
    workload = "toolbench, videoqa, ... or a file of prompts or a trace (default: %(default)s)"
    add("--workload", default="toolbench", metavar="NAME|FILE", help=workload)
    add("--requests", type=positive_int, metavar="N", help="how many (default: 1000, or the file's)")
    add("--groups", type=positive_int, metavar="N", help="prefix groups to generate (default: requests / 10)")
    add("--rps", type=positive_float, metavar="R", help="Poisson arrivals a second (default: the trace's own, or 4)")
    add("--tokenizer", choices=("words", "mistral"), default="words", help="for files of text (default: words)")
    add("--seed", type=int, default=0, metavar="N", help="of prompts, arrivals and chance (default: 0)")
    add = parser.add_argument_group("fleet").add_argument
    add("--policy", default="round_robin,e2", metavar="P[,P...]", help="one after the other (default: %(default)s)")
    add("--workers", type=positive_int, default=2, metavar="N", help="named w0, w1, ... (default: 2)")
    add("--cost-model", default="mistral-7b/a6000", metavar="PRESET|FILE", help="of a worker (default: %(default)s)")
    add("--kv-capacity", type=positive_int, metavar="N", help="KV tokens of a worker (default: 198516)")
    add("--token-budget", type=positive_int, metavar="N", help="tokens of an iteration (default: 512)")
    add("--order", choices=("priority", "fcfs", "longest_prefix"), help="of a worker's queue (default: priority)")
    add = parser.add_argument_group("scheduler, as of serve").add_argument
    for name in STAGES:
        default = getattr(SchedulerConfig(), name)
        add(f"--scheduler-{name.replace('_', '-')}", type=type(default), default=default, metavar="N",
            help="docs/rebalancing.md (default: %(default)s)")  # fmt: skip
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


class SimulationProgress:
    """Progress of one simulation: requests that have ended, and how fast the virtual time goes by."""

    def __init__(self, policy: str, total: int) -> None:
        self.policy, self.total = policy, total
        self.done = self.failed = 0
        self.virtual_seconds = 0.0
        self._started = time.monotonic()

    @property
    def text(self) -> str:
        """ "312 virtual seconds, 2,904 requests/s"."""
        passed = max(time.monotonic() - self._started, 1e-9)
        return f"{self.virtual_seconds:,.0f} virtual seconds, {self.done / passed:,.0f} requests/s"


def run(args: argparse.Namespace, screen: Screen | None = None) -> int:
    """Check everything, simulate each policy, print the table. Wrong options raise before anything is simulated."""
    config, policies = config_of(args), names_of(args.policy)
    if args.json is not None and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        raise InvalidInput(f"--json: there is no such file to write: {args.json}")
    workload = workload_of(args)
    sys.stdout.write(opening(workload, config) + "\n\n" + header(args.slo_ttft) + "\n")
    found = {}
    for policy in policies:
        result = simulated(workload, replace(config, policy=made(policy, workload)), policy, screen or Screen())
        found[policy] = report(result, args.slo_ttft)
        sys.stdout.write(row(policy, found[policy]) + "\n")
        sys.stdout.flush()
    for policy in policies:
        sys.stdout.write(shortfall(policy, found[policy]))
    if args.json is not None:
        write_json(args.json, document(workload, config, found))
    return 0


def simulated(workload: Workload, config: SimConfig, policy: str, screen: Screen) -> Result:
    """One simulation, its progress on the screen."""
    shown = SimulationProgress(policy, len(workload))
    with screen.phase(shown) as update:

        def progress(ended: int, requests: int, virtual_seconds: float) -> None:
            shown.done, shown.virtual_seconds = ended, virtual_seconds
            update()

        return simulate(workload, config, progress=progress)


# --- options ----------------------------------------------------------------------------------------------------------


def config_of(args: argparse.Namespace) -> SimConfig:
    """The fleet that the options describe, with no policy of its own yet."""
    given = {
        "kv_capacity_tokens": args.kv_capacity,
        "token_budget": args.token_budget,
        "order": args.order,
    }
    local: LocalConfig = SimConfig().local
    return SimConfig(
        workers=args.workers,
        routers=args.routers,
        cost_model=args.cost_model,
        local=replace(local, **{name: value for name, value in given.items() if value is not None}),
        scheduler=SchedulerConfig(**{name: getattr(args, f"scheduler_{name}") for name in STAGES}),
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
    names = [name.strip() for name in text.split(",")]
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


def workload_of(args: argparse.Namespace) -> Workload:
    """The requests and when they arrive. A generator's name goes before a file's."""
    if args.workload in MAKERS:
        requests = args.requests or REQUESTS
        groups = args.groups or max(1, requests // REQUESTS_PER_GROUP)
        found = workloads.generate(args.workload, requests=requests, groups=groups, seed=args.seed)
    elif Path(args.workload).exists():
        if args.groups is not None:
            raise InvalidInput("--groups is for workloads that are generated; a file has its own")
        tokenizer = workloads.mistral() if args.tokenizer == "mistral" else workloads.words()
        found = workloads.read(args.workload, tokenizer=tokenizer, limit=args.requests)
    else:
        raise InvalidInput(f"--workload must be one of {', '.join(MAKERS)}, or a file; got {args.workload!r}")
    if args.rps is None and found.arrivals != "none":
        return found
    return workloads.poisson(found, args.rps or RPS, args.seed)


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


def header(slo_seconds: float) -> str:
    """The table's two top lines. Seconds, unless said otherwise."""
    first = f"{'':<20}{'TTFT s':>9}{'':>16}{'latency s':>10}{'':>16}{'':>7}{'':>8}{'TTFT <=':>9}"
    titles = "".join(f"{title:>{width}}" for title, width, _ in COLUMNS)
    return f"{first}\n{'policy':<20}{titles}{'hits':>7}{'spread':>8}{f'{slo_seconds:g} s':>9}  trace"


def row(policy: str, found: Mapping[str, Any]) -> str:
    """A policy's line."""
    seconds = "".join(f"{found[name]:>{width}.3f}" for _, width, name in COLUMNS)
    shares = f"{found['hit_fraction']:>7.1%}{found['load_spread']:>8.2f}{found['goodput']:>9.1%}"
    return f"{policy:<20}{seconds}{shares}  {found['trace_hash']}"


def shortfall(policy: str, found: Mapping[str, Any]) -> str:
    """A line on requests that did not finish; nothing where all did."""
    missed = [f"{found[name]} {name.replace('_', ' ')}" for name in OUTCOMES if name != "finished" and found[name]]
    if found["counts"]["truncated"]:
        missed.append(f"{found['counts']['truncated']} truncated")
    if found["counts"]["resumed"]:
        missed.append(f"{found['counts']['resumed']} resumed on another worker")
    return f"{policy}: of {found['requests']} requests {', '.join(missed)}\n" if missed else ""


def document(workload: Workload, config: SimConfig, found: Mapping[str, Any]) -> dict[str, Any]:
    """Everything found, with what it was found for. A figure that does not exist is null."""
    return {
        "preble": __version__,
        "workload": {"name": workload.name, "requests": len(workload), "source": workload.source,
                     "arrivals": workload.arrivals},
        "config": {name: repr(getattr(config, name)) for name in config.__dataclass_fields__ if name != "policy"},
        "policies": found,
    }  # fmt: skip
