"""Ways to place requests over live engines, at parts of what a fixed partition can take: TTFT, latency, hits.

    python -m benchmarks.live.run_arms                     0.95 of the saturation, three repetitions: some five hours
    python -m benchmarks.live.run_arms --minutes 5                             as far as it gets; the next call goes on
    python -m benchmarks.live.run_arms --engine sglang --traffic documents --repetitions 2 --arms smg "round robin"
    python -m benchmarks.live.run_arms --load 0.95 0.8 0.5 --repetitions 5     whole: more than a day
    python -m benchmarks.live.run_arms --anew --engine vllm --traffic documents       on another machine
    python -m benchmarks.live.run_arms --report            measures nothing: the page of what there is

What the bars are about comes first: the highest load, SGLang before vLLM, documents and agents before the rest.
For each engine and traffic the saturation of the fixed partition is found first: the highest rate at which no answer is
later than `LATE` of the run's seconds, of the rates that are tried. A rate is given up at the first answer that is.
Then every arm (`arm_fleet.ARMS`) runs at parts of it. Within a repetition all arms meet the same requests at the same
times, one after the other in an order drawn for the repetition. Every run begins with empty caches and a gateway that
has just started: the minute in which it learns is measured with the rest. Servers run on between runs and are emptied
(SGLang `/flush_cache`, vLLM `/reset_prefix_cache`); workers cannot be, so they are started anew for each run. Our torch
engine (`--engine torch`) has workers only: with the eviction it has by itself, and with another.

Each run is appended to a file of JSON lines as it ends, with what was measured of the machine's quiet; what is in the
file is not measured again, if settings and seed are the same. A noisy run is kept, marked, and repeated, twice at most.
What is kept may be of another machine: `--anew` finds the saturation again, and from then on only runs that follow it
count, here and on the page. A traffic has its own length and pace (`SECONDS`, `TURN_SECONDS`) if none is named.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import functools
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

from benchmarks.common.facts import commit, first_line, machine
from benchmarks.common.paths import RESULTS, ROOT, SHARED
from benchmarks.common.tables import rounded
from benchmarks.live import arm_fleet, arm_noise, arm_plot, arm_report, arm_traffic, engine_fleet
from benchmarks.live.arm_traffic import TRAFFICS, Session, Sources, TextRequest, make_sessions
from benchmarks.live.core_speed import CoreSpeed
from benchmarks.live.engine_load import Ask, Outcome, outcome_of
from benchmarks.live.run_engines import stdlib_files
from preble.engines.torch.tiny_models import SPECS, make_tiny_model

LOADS = (0.95, 0.8, 0.5)
SECONDS = {"coding agents": 120.0}  # of arrivals in a run; of others:
OTHER_SECONDS = 60.0
TURN_SECONDS = {"agents": 6.0, "coding agents": 6.0}  # between an agent's turns
TRIES = 3  # of a noisy run
LATE = 0.2  # of a run's seconds: a rate is too high when an answer comes so long after its request was due
FIRST_RATE, RATE_STEP, RATE_RATIO, RATE_MIN, RATE_MAX = 6.0, 1.5, 1.12, 0.1, 128.0
SEARCH_SEED = 1_000_000  # the repetition whose traffic the search has: no run is of it
FILES = {"cpu": "live-arms.jsonl", "cuda": "live-arms-gpu.jsonl"}
CARD_MODEL = "mistral-7b-shaped-no-weights"
WARM_UP_REQUESTS = 2  # to each server, once after its start
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


async def saturation(keeps_up: Callable[[float], Awaitable[bool]], first: float = FIRST_RATE) -> float:
    """A rate that is kept up with although one at most `RATE_RATIO` times as high is not: stepwise up or down from the
    first to a pair of which one is kept up with, then halved in between. Raises RuntimeError if there is none between
    `RATE_MIN` and `RATE_MAX`."""
    is_kept_up = await keeps_up(first)
    low = high = first
    while True:
        if not RATE_MIN < low < RATE_MAX:
            raise RuntimeError(f"the engines {'' if is_kept_up else 'do not '}keep up with {low:g} requests a second")
        if is_kept_up:
            low, high = high, high * RATE_STEP
            if not await keeps_up(high):
                break
            low = high
        else:
            low, high = low / RATE_STEP, low
            if await keeps_up(low):
                break
    while high / low > RATE_RATIO:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if await keeps_up(middle) else (low, middle)
    return low


# --- a run ------------------------------------------------------------------------------------------------------------


class Late(Exception):
    """An answer took longer than this rate may let it."""


async def outcomes_of(
    ask: Ask, session: Session, output_tokens: int, start: float, late_seconds: float | None = None
) -> list[Outcome]:
    """What came of a session's turns; those after one that failed are failures, too. Raises Late as soon as a turn has
    not been answered `late_seconds` after it was due."""
    found: list[Outcome] = []
    at = session.arrival_seconds
    for number, turn in enumerate(session.turns):
        waiting = outcome_of(ask, TextRequest(session.key, turn.token_ids, at, turn.text), output_tokens, start)
        if late_seconds is not None:
            left = start + session.due_seconds(number) + late_seconds - time.perf_counter()
            try:
                outcome = await asyncio.wait_for(waiting, left)
            except asyncio.TimeoutError as error:
                raise Late from error
        else:
            outcome = await waiting
        found.append(outcome)
        if outcome.error:
            return found + [replace(outcome, error="not asked") for _ in session.turns[number + 1 :]]
        if number + 1 < len(session.turns):
            at = time.perf_counter() - start + session.turns[number + 1].pause_seconds
    return found


async def send_all(
    ask: Ask, sessions: Sequence[Session], output_tokens: int, late_seconds: float | None = None
) -> list[Outcome]:
    """Every session from its arrival on; returns when all have ended. Raises Late, with nothing left running."""
    start = time.perf_counter()
    tasks = [asyncio.ensure_future(outcomes_of(ask, one, output_tokens, start, late_seconds)) for one in sessions]
    try:
        return list(itertools.chain.from_iterable(await asyncio.gather(*tasks)))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def failures_of(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many failed, by kind."""
    kinds = [one.error for one in outcomes if one.error]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def summary(outcomes: Sequence[Outcome]) -> Found:
    """What a run is compared by. Requests that failed are counted, and in nothing else."""
    answered = [one for one in outcomes if not one.error]
    result: Found = {"requests": len(outcomes), "failed": len(outcomes) - len(answered)}
    result["failures"] = failures_of(outcomes)
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

    def __init__(self, args: argparse.Namespace, fleet: arm_fleet.EngineFleet, sources: Sources) -> None:
        self.args, self.fleet, self.sources = args, fleet, sources
        mine = [one for one in read_lines(args.json)[args.kept_before :] if one["seed"] == args.seed]
        self.kept = arm_report.current([one for one in mine if one["settings"] == settings_of(args, one["traffic"])])
        self._warm: set[str] = set()

    async def measured(
        self, arm: str, sessions: Sequence[Session], late_seconds: float | None = None, name: str = ""
    ) -> tuple[list[Outcome] | None, Found]:
        """(outcomes, the machine's quiet meanwhile) of one run; None for the outcomes where an answer was late."""
        await self._warm_up(arm)
        decisions = self.args.decisions / f"{name}.jsonl" if name and self.args.decisions else None
        if decisions is not None:
            decisions.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            async with arm_fleet.asked(arm, self.fleet, self.args.peers, self.args.output_tokens, decisions) as ask:
                speed = CoreSpeed(self.fleet.cores(), stack)
                load, first = os.getloadavg()[0], arm_noise.now()
                try:
                    outcomes = await send_all(ask, sessions, self.args.output_tokens, late_seconds)
                except Late:
                    outcomes = None
                last = arm_noise.now()
                return outcomes, {**arm_noise.between(first, last, load), **speed.stop()}

    async def _warm_up(self, arm: str) -> None:
        """What an engine loads at its first request is no part of any arm; new workers have none of a run's documents
        then. Raises RuntimeError if a request fails."""
        kind = arm_fleet.kind_of(arm)
        if self.fleet.begins_anew(kind):
            self.fleet.end(kind)
        elif kind in self._warm:
            return
        self._warm.add(kind)
        count = WARM_UP_REQUESTS * self.args.workers
        sessions = make_sessions("documents", self.sources, 100.0, 10.0, self.args.seed)[:count]
        sessions = [of_other_text(session, "warm-up") for session in sessions]
        warming = "round robin" if kind == "servers" else arm
        async with arm_fleet.asked(warming, self.fleet, self.args.peers, self.args.output_tokens) as ask:
            failed = [one.error for one in await send_all(ask, sessions, self.args.output_tokens) if one.error]
        if failed:
            raise RuntimeError(f"{self.fleet.engine} fails to answer: {', '.join(failed)}; logs are in build/engines")

    def sessions(self, traffic: str, rps: float, repetition: int) -> list[Session]:
        """The traffic of a repetition."""
        seconds, pause = seconds_of(self.args, traffic), turn_seconds_of(self.args, traffic)
        return make_sessions(traffic, self.sources, rps, seconds, self.args.seed + repetition, pause)

    async def find_saturation(self, traffic: str) -> float:
        """The kept one, or a new one, kept."""
        known = saturation_of(self.fleet.engine, traffic, self.kept)
        if known is not None:
            return known

        rps = await saturation(lambda rate: self.keeps_up(traffic, rate), self.args.first_rate)
        self.keep({"kind": "saturation", "engine": self.fleet.engine, "traffic": traffic, "rps": rps})
        return rps

    async def keeps_up(self, traffic: str, rps: float) -> bool:
        """Whether the partition keeps up with a rate: kept, or tried now, again where the machine was noisy."""
        while (known := probe_of(self.fleet.engine, traffic, rps, self.kept)) is None:
            sessions = self.sessions(traffic, rps, SEARCH_SEED)
            outcomes, quiet = await self.measured("partition", sessions, LATE * seconds_of(self.args, traffic))
            answer, noisy = kept_up(outcomes), arm_noise.is_noisy(quiet)
            found = {"kind": "probe", "engine": self.fleet.engine, "traffic": traffic, "rps": rps, "kept_up": answer}
            found["failures"] = failures_of(outcomes or ())  # none where an answer was late
            self.keep({**found, **quiet, "noisy": noisy})
            told = f"{'is' if answer else 'is not'} kept up with{', NOISY' if noisy else ''}"
            print(f"{self.fleet.engine} {traffic}: {rps:.2f} requests a second {told}", flush=True)
        return known

    def keep(self, found: Found) -> None:
        """Append a result with where it is from."""
        facts = {"commit": commit(), "machine": machine(), "date": datetime.date.today().isoformat()}
        found = {**found, **facts, "seed": self.args.seed}
        found["settings"] = settings_of(self.args, found["traffic"])
        append_line(self.args.json, found)
        self.kept.append(found)

    async def run(self, cell: Cell, rps: float) -> Found:
        """One run, kept."""
        sessions = self.sessions(cell.traffic, cell.load * rps, cell.repetition)
        began = time.perf_counter()
        outcomes, quiet = await self.measured(cell.arm, sessions, name="-".join(map(str, vars(cell).values())))
        assert outcomes is not None, "nothing is late in a run"
        found = {"kind": "run", **vars(cell), "rps": cell.load * rps, **summary(outcomes)}
        found["run_seconds"] = time.perf_counter() - began
        noisy = arm_noise.is_noisy(quiet, [one for one in self.kept if of_one_repetition(one, found)])
        self.keep({**found, **quiet, "noisy": noisy})
        return self.kept[-1]


def of_one_repetition(kept: Found, run: Found) -> bool:
    """Whether a kept run is a quiet one of the run's own repetition."""
    names = ("engine", "traffic", "load", "repetition")
    return kept["kind"] == "run" and not kept["noisy"] and all(kept[name] == run[name] for name in names)


def of_other_text(session: Session, word: str) -> Session:
    """A session whose prompts share nothing with those that do not begin with the word."""
    turns = tuple(replace(turn, text=f"{word}\n{turn.text}") for turn in session.turns)
    return replace(session, turns=turns)


def kept_up(outcomes: Sequence[Outcome] | None) -> bool:
    """Whether all was answered, and in time."""
    return outcomes is not None and not any(one.error for one in outcomes)


def seconds_of(args: argparse.Namespace, traffic: str) -> float:
    """How long requests of a traffic arrive."""
    return float(SECONDS.get(traffic, OTHER_SECONDS) if args.seconds is None else args.seconds)


def turn_seconds_of(args: argparse.Namespace, traffic: str) -> float:
    """How far apart the turns of its agents are."""
    own = TURN_SECONDS.get(traffic, arm_traffic.TURN_SECONDS)
    return float(own if args.turn_seconds is None else args.turn_seconds)


def settings_of(args: argparse.Namespace, traffic: str) -> Found:
    """What a run depends on and no cell says."""
    names = ("model", "workers", "capacity_tokens", "max_running")
    found = {name: getattr(args, name) for name in names} | {"seconds": seconds_of(args, traffic)}
    found["output_tokens"] = args.output_tokens
    found |= {"device": card()} if args.device != "cpu" else {}
    turn_seconds = turn_seconds_of(args, traffic)
    return found | ({"turn_seconds": turn_seconds} if turn_seconds != arm_traffic.TURN_SECONDS else {})


@functools.lru_cache(maxsize=1)
def card() -> str:
    """The GPU that engines share."""
    return first_line(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])


def line(run: Found) -> str:
    """A run for the person who waits."""
    where = f"{run['engine']} {run['traffic']} {run['load']:g} {run['repetition']} {run['arm']:15}"
    if "mean_ttft_seconds" not in run:
        return f"{where} all {run['failed']} requests failed: {run['failures']}"
    times = f"TTFT {run['mean_ttft_seconds']:.3f} / {run['p99_ttft_seconds']:.3f} s"
    noise = f"stolen {run['stolen_share']:.3f}, others {run['others_share']:.3f}"
    noise += f", a product {1e3 * run['product_seconds']:.2f} ms" if "product_seconds" in run else ""
    noise += " NOISY" if run["noisy"] else ""
    return f"{where} {times}, hits {run['hit_fraction']:.3f}, failed {run['failed']}, {noise}"


# --- the command ------------------------------------------------------------------------------------------------------


async def measure(args: argparse.Namespace, engine: str, load: float, until: float) -> None:
    """All chosen runs of an engine at a load that are not kept yet; none begins after `until`."""
    from tokenizers import Tokenizer

    python = Path(sys.executable) if engine == "torch" else args.engines / engine / "bin" / "python"
    if not python.exists():
        print(f"{engine} is left out: tests/live/install.py --engine {engine} installs it", flush=True)
        return
    model = model_of(args)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    sources = Sources(
        tuple(stdlib_files()), args.agents, args.coding_agents, lambda text: list(tokenizer.encode(text).ids)
    )
    needs = {"agents": args.agents, "coding agents": args.coding_agents}
    shape = engine_fleet.Shape(model, args.device, args.workers, args.capacity_tokens, args.max_running, args.base_port)
    with contextlib.ExitStack() as stack:
        bench = Bench(args, arm_fleet.EngineFleet(engine, python, shape, stack), sources)
        for traffic in args.traffic:
            if traffic in needs and not needs[traffic].exists():
                option = f"--{traffic.replace(' ', '-')}"
                print(f"{traffic} are left out: {needs[traffic].name} is missing ({option} names it)", flush=True)
                continue
            await measure_traffic(bench, traffic, load, until)


def model_of(args: argparse.Namespace) -> Path:
    """The model's directory, made where it is missing."""
    models = args.engines / "models"
    return card_model(models) if args.model == CARD_MODEL else make_tiny_model(args.model, models)


def card_model(models: Path) -> Path:
    """A model of Mistral 7B's shape without weights, which its engine draws at random, and with the tiny model's
    tokenizer and as many tokens as that has."""
    from transformers import AutoTokenizer, MistralConfig

    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model("llama-20m", models))
    config = MistralConfig(max_position_embeddings=32_768, sliding_window=None, vocab_size=len(tokenizer))
    config.architectures = ["MistralForCausalLM"]
    for part in (config, tokenizer):
        part.save_pretrained(models / CARD_MODEL)
    return models / CARD_MODEL


async def measure_traffic(bench: Bench, traffic: str, load: float, until: float = math.inf) -> None:
    """All chosen repetitions and arms: a repetition's arms one after the other."""
    args = bench.args
    arms = [arm for arm in args.arms if arm_fleet.suits(arm, bench.fleet.engine) and is_there(arm, args.peers)]
    for repetition in range(1, args.repetitions + 1):
        for arm in order_of(arms, args.seed, repetition):
            cell = Cell(bench.fleet.engine, traffic, load, repetition, arm)
            while time.monotonic() < until and not is_done(cell, bench.kept):
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
    made.add_argument("--engine", nargs="+", choices=arm_fleet.ENGINES, default=["sglang", "vllm"])
    traffics = sorted(TRAFFICS, key=lambda traffic: traffic not in arm_report.BAR_TRAFFICS)
    made.add_argument("--traffic", nargs="+", choices=TRAFFICS, default=traffics)
    made.add_argument("--load", nargs="+", type=float, default=[LOADS[0]], help="parts of the saturation (0.95)")
    made.add_argument("--arms", nargs="+", choices=arm_fleet.ARMS, default=list(arm_fleet.ARMS))
    made.add_argument("--repetitions", type=int, default=3)
    made.set_defaults(kept_before=0)  # so many kept lines do not count
    made.add_argument("--anew", action="store_true", help="nothing that is kept counts: another machine, or other code")
    made.add_argument("--minutes", type=float, default=math.inf, help="after so long no run begins")
    made.add_argument("--first-rate", type=float, default=FIRST_RATE, help="where the search begins (%(default)s)")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: vLLM servers that share one card")
    models = [*sorted(SPECS), CARD_MODEL]
    made.add_argument("--model", choices=models, default="llama-20m", help="of random weights (%(default)s)")
    made.add_argument("--seconds", type=float, help="of arrivals in a run (a traffic's own)")
    made.add_argument("--turn-seconds", type=float, help="between agents' turns (6)")
    made.add_argument("--output-tokens", type=int, default=12)
    made.add_argument("--workers", type=int, default=2, help="engines, each on a core (%(default)s)")
    made.add_argument("--capacity-tokens", type=int, default=22_000, help="KV cache of each engine (%(default)s)")
    made.add_argument("--max-running", type=int, default=8, help="requests in an engine's batch (%(default)s)")
    made.add_argument("--base-port", type=int, default=24_000, help="the first of 200 ports (%(default)s)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--engines", type=Path, default=ROOT / ".engines", help="environments of tests/live/install.py")
    made.add_argument("--peers", type=Path, default=ROOT / ".venv-peers/bin/python", help="Python with the gateways")
    agents = SHARED / "workloads" / "agents"
    dialogues, traces = agents / "taubench_gpt4o_airline.json.gz", agents / "lmcache_agent_traces.tar.xz"
    made.add_argument("--agents", type=Path, default=dialogues, help="dialogues of tau-bench")
    made.add_argument("--coding-agents", type=Path, default=traces, help="sessions of mini-swe-agent")
    made.add_argument("--json", type=Path, help="where runs are kept (live-arms.jsonl, of a GPU live-arms-gpu.jsonl)")
    made.add_argument("--decisions", type=Path, help="a directory for all decisions of Preble, for who asks why")
    made.add_argument("--report", action="store_true", help="measure nothing")
    made.add_argument("--docs", action="store_true", help="write the tables into docs, too")
    return made


def main() -> None:
    """Measure what is missing, then show all."""
    args = parser().parse_args()
    args.json = args.json or RESULTS / FILES[args.device]
    args.kept_before = len(read_lines(args.json)) if args.anew else 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # engines end with this process
    if not args.report:
        until = time.monotonic() + 60.0 * args.minutes
        for load, engine in itertools.product(sorted(args.load, reverse=True), args.engine):
            asyncio.run(measure(args, engine, load, until))
    kept = read_lines(args.json)
    if args.docs or args.report:
        arm_report.write_docs(kept, args.device)
        arm_plot.draw(kept, args.device)
    print(arm_report.page(kept, args.device))


if __name__ == "__main__":
    main()
