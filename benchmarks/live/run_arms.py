"""Ways to place requests over live engines, at parts of what a fixed partition can take: TTFT, latency, hits.

    python -m benchmarks.live.run_arms                                  whole: some 25 hours; it may be stopped
    python -m benchmarks.live.run_arms --engine sglang --traffic documents --load 0.95 --repetitions 2 --arms smg ...
    python -m benchmarks.live.run_arms --report                         measures nothing: the page of what there is

For each engine and traffic the saturation of the fixed partition is found first: the highest rate at which it keeps up.
Then every arm (`arm_fleet.ARMS`) runs at parts of it. Within a repetition all arms meet the same requests at the same
times, one after the other in an order drawn for the repetition. Every run begins with empty caches and a router or
gateway that has just started: the minute in which it learns is measured with the rest. Servers run on between runs and
are emptied (SGLang `/flush_cache`, vLLM `/reset_prefix_cache`); workers cannot be, so there each run has other tokens.

Each run is appended to a file of JSON lines as it ends, with what was measured of the machine's quiet; what is in the
file is not measured again, if settings and seed are the same. A noisy run is kept, marked, and repeated, twice at most.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.facts import commit, machine
from benchmarks.common.paths import RESULTS, ROOT
from benchmarks.common.tables import rounded
from benchmarks.live import arm_fleet, arm_noise, arm_report, engine_fleet
from benchmarks.live.arm_traffic import TRAFFICS, Session, Sources, TextRequest, make_sessions
from benchmarks.live.engine_load import Ask, Outcome, Request, outcome_of, shifted
from benchmarks.live.run_engines import stdlib_files
from preble.engines.torch.tiny_models import make_tiny_model

LOADS = (0.5, 0.8, 0.95)
TRIES = 3  # of a noisy run
KEPT_UP = 1.15  # times the arrivals' duration that all answers may take
FIRST_RATE, RATE_MAX, RATE_RATIO = 2.0, 64.0, 1.1
WARM_UP_REQUESTS = 2  # to each server, once after its start
MODEL = "llama-20m"
Found = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One run's place in the result."""

    engine: str
    traffic: str
    load: float
    repetition: int
    arm: str

    def matches(self, run: Found) -> bool:
        """Whether a kept run is of this place."""
        return run["kind"] == "run" and all(run[name] == value for name, value in vars(self).items())


# --- kept results -----------------------------------------------------------------------------------------------------


def read_lines(file: Path) -> list[Found]:
    """What is kept; a last line that was cut off in writing is not."""
    if not file.exists():
        return []
    lines = file.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def append_line(file: Path, found: Found) -> None:
    """Keep a result, after whatever is complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and not (text := file.read_text()).endswith("\n"):
        file.write_text(text[: text.rfind("\n") + 1])
    with open(file, "a") as output:
        output.write(json.dumps(rounded(found)) + "\n")


def is_done(cell: Cell, kept: Sequence[Found]) -> bool:
    """Whether a place has a run on a quiet machine, or as many noisy ones as are tried."""
    runs = [run for run in kept if cell.matches(run)]
    return len(runs) >= TRIES or any(not run["noisy"] for run in runs)


def saturation_of(engine: str, traffic: str, kept: Sequence[Found]) -> float | None:
    """The newest kept saturation, requests a second."""
    searches = [one for one in kept if one["kind"] == "saturation"]
    found = [one["rps"] for one in searches if (one["engine"], one["traffic"]) == (engine, traffic)]
    return found[-1] if found else None


def probe_of(engine: str, traffic: str, rps: float, kept: Sequence[Found]) -> bool | None:
    """Whether a rate was kept up with on a quiet machine, or at the last of as many noisy tries as there are; None: it
    is not known."""
    probes = [one for one in kept if one["kind"] == "probe" and math.isclose(one["rps"], rps, rel_tol=1e-4)]
    probes = [one for one in probes if (one["engine"], one["traffic"]) == (engine, traffic)]
    for one in probes:
        if not one["noisy"]:
            return bool(one["kept_up"])
    return bool(probes[-1]["kept_up"]) if len(probes) >= TRIES else None


def order_of(arms: Sequence[str], seed: int, repetition: int) -> list[str]:
    """The arms as they are run in a repetition: where one stands does not depend on which others are chosen."""
    drawn = np.random.default_rng([seed, repetition]).permutation(len(arm_fleet.ARMS))
    return [arm_fleet.ARMS[place] for place in drawn if arm_fleet.ARMS[place] in arms]


# --- the saturation ---------------------------------------------------------------------------------------------------


async def saturation(keeps_up: Callable[[float], Awaitable[bool]]) -> float:
    """The highest rate that is kept up with, within a tenth: doubled until it is not, then halved in between. Raises
    RuntimeError if the lowest rate that is tried is too much, or none is."""
    low, high = 0.0, FIRST_RATE
    while await keeps_up(high):
        low, high = high, 2.0 * high
        if high > RATE_MAX:
            raise RuntimeError(f"the engines keep up with {low:g} requests a second: they are not what is measured")
    while low == 0.0:
        high /= 2.0
        if high < FIRST_RATE / 32.0:
            raise RuntimeError(f"the engines do not keep up with {2 * high:g} requests a second")
        if await keeps_up(high):
            low, high = high, 2.0 * high
    while high / low > RATE_RATIO:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if await keeps_up(middle) else (low, middle)
    return low


def kept_up(outcomes: Sequence[tuple[float, Outcome]], seconds: float) -> bool:
    """Whether all was answered soon after the last arrival. `outcomes`: (arrival in seconds, what came of it)."""
    return all(
        not one.error and arrival + one.latency_seconds <= KEPT_UP * max(seconds, arrival) for arrival, one in outcomes
    )


# --- a run ------------------------------------------------------------------------------------------------------------


async def outcomes_of(
    ask: Ask, session: Session, output_tokens: int, start: float, change: Callable[[Request], Request]
) -> list[tuple[float, Outcome]]:
    """(arrival, outcome) of a session's turns; those after one that failed are failures, too."""
    found: list[tuple[float, Outcome]] = []
    at = session.arrival_seconds
    for number, turn in enumerate(session.turns):
        request = change(TextRequest(session.key, turn.token_ids, at, turn.text))
        outcome = await outcome_of(ask, request, output_tokens, start)
        found.append((at, outcome))
        if outcome.error:
            return found + [(at, replace(outcome, error="not asked")) for _ in session.turns[number + 1 :]]
        if number + 1 < len(session.turns):
            at = time.perf_counter() - start + session.turns[number + 1].pause_seconds
    return found


async def send_all(
    ask: Ask, sessions: Sequence[Session], output_tokens: int, change: Callable[[Request], Request] = lambda one: one
) -> list[tuple[float, Outcome]]:
    """Every session from its arrival on; returns when all have ended."""
    start = time.perf_counter()
    each = await asyncio.gather(*(outcomes_of(ask, one, output_tokens, start, change) for one in sessions))
    return list(itertools.chain.from_iterable(each))


def summary(outcomes: Sequence[Outcome]) -> Found:
    """What a run is compared by. Requests that failed are counted, and in nothing else."""
    answered = [one for one in outcomes if not one.error]
    failures = [one.error for one in outcomes if one.error]
    result: Found = {"requests": len(outcomes), "failed": len(failures)}
    result["failures"] = {kind: failures.count(kind) for kind in sorted(set(failures))}
    engines = [one.engine for one in answered]
    result["requests_by_engine"] = sorted(engines.count(name) for name in set(engines))
    for name in ("ttft_seconds", "latency_seconds"):
        values = [getattr(one, name) for one in answered]
        if values:
            result[f"mean_{name}"] = statistics.fmean(values)
            result[f"p99_{name}"] = float(np.percentile(values, 99))
            result[name] = [round(value, 4) for value in values]
    if answered:
        prompts = sum(one.prompt_tokens for one in answered)
        result["hit_fraction"] = sum(one.cached_tokens for one in answered) / prompts
    return result


class Bench:
    """The engines of one kind and what is kept of their runs."""

    def __init__(self, args: argparse.Namespace, fleet: arm_fleet.EngineFleet, sources: Sources, vocabulary: int):
        self.args, self.fleet, self.sources, self.vocabulary = args, fleet, sources, vocabulary
        mine = (settings_of(args), args.seed)
        self.kept = [one for one in read_lines(args.json) if (one["settings"], one["seed"]) == mine]
        self._runs = 0
        self._warm: set[str] = set()

    async def measured(self, arm: str, sessions: Sequence[Session]) -> tuple[list[tuple[float, Outcome]], Found]:
        """(outcomes, the machine's quiet meanwhile) of one run."""
        await self._warm_up(arm)
        self._runs += 1
        change: Callable[[Request], Request] = lambda one: one  # noqa: E731
        if arm == "preble workers":
            by = int(np.random.default_rng([os.getpid(), self._runs]).integers(1, self.vocabulary))
            change = lambda one: shifted([one], by, self.vocabulary)[0]  # noqa: E731
        async with arm_fleet.asked(arm, self.fleet, self.args.peers, self.args.output_tokens) as ask:
            load, first = os.getloadavg()[0], arm_noise.now()
            outcomes = await send_all(ask, sessions, self.args.output_tokens, change)
            return outcomes, arm_noise.between(first, arm_noise.now(), load)

    async def _warm_up(self, arm: str) -> None:
        """What an engine loads at its first request is no part of any arm. Raises RuntimeError if one fails."""
        kind = "preble workers" if arm == "preble workers" else "round robin"
        if kind in self._warm:
            return
        self._warm.add(kind)
        count = WARM_UP_REQUESTS * self.args.workers
        sessions = make_sessions("documents", self.sources, 100.0, 10.0, self.args.seed)[:count]
        async with arm_fleet.asked(kind, self.fleet, self.args.peers, self.args.output_tokens) as ask:
            failed = [one.error for _, one in await send_all(ask, sessions, self.args.output_tokens) if one.error]
        if failed:
            raise RuntimeError(f"{self.fleet.engine} fails to answer: {', '.join(failed)}; logs are in build/engines")

    def sessions(self, traffic: str, rps: float, repetition: int) -> list[Session]:
        """The traffic of a repetition."""
        return make_sessions(traffic, self.sources, rps, self.args.seconds, self.args.seed + repetition)

    async def find_saturation(self, traffic: str) -> float:
        """The kept one, or a new one, kept."""
        known = saturation_of(self.fleet.engine, traffic, self.kept)
        if known is not None:
            return known

        rps = await saturation(lambda rate: self.keeps_up(traffic, rate))
        self.keep({"kind": "saturation", "engine": self.fleet.engine, "traffic": traffic, "rps": rps})
        return rps

    async def keeps_up(self, traffic: str, rps: float) -> bool:
        """Whether the partition keeps up with a rate: kept, or tried now, again where the machine was noisy."""
        while (known := probe_of(self.fleet.engine, traffic, rps, self.kept)) is None:
            outcomes, quiet = await self.measured("partition", self.sessions(traffic, rps, 0))
            answer, noisy = kept_up(outcomes, self.args.seconds), arm_noise.is_noisy(quiet)
            found = {"kind": "probe", "engine": self.fleet.engine, "traffic": traffic, "rps": rps, "kept_up": answer}
            self.keep({**found, **quiet, "noisy": noisy})
            told = f"{'is' if answer else 'is not'} kept up with{', NOISY' if noisy else ''}"
            print(f"{self.fleet.engine} {traffic}: {rps:.2f} requests a second {told}", flush=True)
        return known

    def keep(self, found: Found) -> None:
        """Append a result with where it is from."""
        facts = {"commit": commit(), "machine": machine(), "date": datetime.date.today().isoformat()}
        found = {**found, **facts, "settings": settings_of(self.args), "seed": self.args.seed}
        append_line(self.args.json, found)
        self.kept.append(found)

    async def run(self, cell: Cell, rps: float) -> Found:
        """One run, kept."""
        outcomes, quiet = await self.measured(cell.arm, self.sessions(cell.traffic, cell.load * rps, cell.repetition))
        found = {"kind": "run", **vars(cell), "rps": cell.load * rps, **summary([one for _, one in outcomes])}
        self.keep({**found, **quiet, "noisy": arm_noise.is_noisy(quiet)})
        return self.kept[-1]


def settings_of(args: argparse.Namespace) -> Found:
    """What a run depends on and no cell says."""
    names = ("workers", "capacity_tokens", "max_running", "seconds", "output_tokens")
    return {"model": MODEL, **{name: getattr(args, name) for name in names}}


def line(run: Found) -> str:
    """A run for the person who waits."""
    where = f"{run['engine']} {run['traffic']} {run['load']:g} {run['repetition']} {run['arm']:15}"
    if "mean_ttft_seconds" not in run:
        return f"{where} all {run['failed']} requests failed: {run['failures']}"
    times = f"TTFT {run['mean_ttft_seconds']:.3f} / {run['p99_ttft_seconds']:.3f} s"
    noise = f"stolen {run['stolen_share']:.3f}, others {run['others_share']:.3f}{' NOISY' if run['noisy'] else ''}"
    return f"{where} {times}, hits {run['hit_fraction']:.3f}, failed {run['failed']}, {noise}"


# --- the command ------------------------------------------------------------------------------------------------------


async def measure(args: argparse.Namespace, engine: str) -> None:
    """All chosen runs of an engine that are not kept yet."""
    from tokenizers import Tokenizer

    python = args.engines / engine / "bin" / "python"
    if not python.exists():
        print(f"{engine} is left out: tests/live/install.py --engine {engine} installs it", flush=True)
        return
    model = make_tiny_model(MODEL, args.engines / "models")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    sources = Sources(tuple(stdlib_files()), args.agents, lambda text: list(tokenizer.encode(text).ids))
    shape = engine_fleet.Shape(model, "cpu", args.workers, args.capacity_tokens, args.max_running, args.base_port)
    with contextlib.ExitStack() as stack:
        fleet = arm_fleet.EngineFleet(engine, python, shape, stack)
        bench = Bench(args, fleet, sources, tokenizer.get_vocab_size())
        for traffic in args.traffic:
            if traffic == "agents" and not args.agents.exists():
                print(f"agents are left out: {args.agents.name} is missing", flush=True)
                continue
            await measure_traffic(bench, traffic)


async def measure_traffic(bench: Bench, traffic: str) -> None:
    """All chosen loads, repetitions and arms: a repetition's arms one after the other."""
    args = bench.args
    arms = [arm for arm in args.arms if is_there(arm, args.peers)]
    for load, repetition in itertools.product(args.load, range(1, args.repetitions + 1)):
        for arm in order_of(arms, args.seed, repetition):
            cell = Cell(bench.fleet.engine, traffic, load, repetition, arm)
            while not is_done(cell, bench.kept):
                print(line(await bench.run(cell, await bench.find_saturation(traffic))), flush=True)


def is_there(arm: str, peers: Path) -> bool:
    """Whether an arm can be measured; says so if not."""
    if arm in arm_fleet.GATEWAYS and not arm_fleet.peer_version(peers, arm):
        print(f"{arm} is left out: it is not installed (make peers)", flush=True)
        return False
    return True


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = Path(os.environ.get("PREBLE_SHARED", ROOT.parent / "shared"))
    made.add_argument("--engine", nargs="+", choices=arm_fleet.ENGINES, default=list(arm_fleet.ENGINES))
    made.add_argument("--traffic", nargs="+", choices=TRAFFICS, default=list(TRAFFICS))
    made.add_argument("--load", nargs="+", type=float, default=list(LOADS), help="parts of the saturation")
    made.add_argument("--arms", nargs="+", choices=arm_fleet.ARMS, default=list(arm_fleet.ARMS))
    made.add_argument("--repetitions", type=int, default=5)
    made.add_argument("--seconds", type=float, default=40.0, help="of arrivals in a run (%(default)s)")
    made.add_argument("--output-tokens", type=int, default=12)
    made.add_argument("--workers", type=int, default=2, help="engines, each on a core (%(default)s)")
    made.add_argument("--capacity-tokens", type=int, default=22_000, help="KV cache of each engine (%(default)s)")
    made.add_argument("--max-running", type=int, default=8, help="requests in an engine's batch (%(default)s)")
    made.add_argument("--base-port", type=int, default=24_000, help="the first of 200 ports (%(default)s)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--engines", type=Path, default=ROOT / ".engines", help="environments of tests/live/install.py")
    made.add_argument("--peers", type=Path, default=ROOT / ".venv-peers/bin/python", help="Python with the gateways")
    agents = shared / "workloads" / "agents" / "taubench_gpt4o_airline.json.gz"
    made.add_argument("--agents", type=Path, default=agents, help="dialogues of tau-bench")
    made.add_argument("--json", type=Path, default=RESULTS / "live-arms.jsonl", help="where runs are kept")
    made.add_argument("--report", action="store_true", help="measure nothing")
    made.add_argument("--docs", action="store_true", help="write the tables into docs/results-live.md")
    return made


def main() -> None:
    """Measure what is missing, then show all."""
    args = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # engines end with this process
    if not args.report:
        for engine in args.engine:
            asyncio.run(measure(args, engine))
    kept = read_lines(args.json)
    if args.docs or args.report:
        arm_report.write_docs(kept)
    print(arm_report.page(kept))


if __name__ == "__main__":
    main()
