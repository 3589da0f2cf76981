"""NVIDIA Dynamo's own simulator with its own router, beside Preble's rules in that same simulator.

    python -m benchmarks.scale.dynamo_replay [--workloads mooncake mooncake-synthetic loogle toolbench]
                                             [--workers 2 4 8] [--loads 0.3 0.9 1.2] [--seeds 0 1 2]
                                             [--host-times 0] [--json FILE] [--rows FILE ...]
                                             [--peers-env .venv-peers]

The offline replay of `ai-dynamo-runtime` (`make peers` installs it) has engines, caches and times of its own, and two
ways to route: round robin and its KV router. It takes no other rule. So Preble's are led through it from outside:

    arrival k -> who has had a first token, who has ended by now: from a replay of each worker alone, of what was
                 placed there before k -> `schedule` -> that worker's replay again, now with k

What comes after a moment changes nothing before it, which is checked; so this is what the simulator would do if it
asked Preble, and round robin led so is its own round robin, to the last digit. E2 gets what a router gets
of servers without KV events: first tokens with their cached tokens, and ends. Its costs are measured before, one prompt
at a time, as `preble profile` does; "e2, costs unknown" is given none.

Load 1 is the rate at which NVIDIA's KV router ends a backlog of the requests. Engines are as that package makes them
(vLLM's rules, 64 tokens a block, its polynomial of times), with the contest's KV memory. Means over the seeds; the
first requests warm the caches and are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import preble
from benchmarks.common.paths import ROOT
from benchmarks.common.tables import markdown, rounded
from benchmarks.paper.contest_cells import FLEET, SOURCES, requests_of, warm_requests
from benchmarks.scale.kv_links import KV_TOKEN_BYTES, several
from preble.clock import ManualClock
from preble.workloads import Workload, arrival_times, poisson

BLOCK_TOKENS = 64
ENGINE = {"backend": "vllm", "num_gpu_blocks": FLEET.kv_tokens // BLOCK_TOKENS, "block_size": BLOCK_TOKENS}
ALIKE: dict[str, Any] = {"extra_engine_args": {}}  # engines that all do the same
MAX_RUNNING = 256  # that package's default
PROFILED_TOKENS = (64, 256, 1024, 4096, 16_384, 65_536, 131_072)
PROFILED_BATCHES = (1, 4, 16, 64)
PROFILED_OUTPUT = 64
ERROR_CHARACTERS = 2000
FIGURES = ("mean_ttft", "p99_ttft", "mean_latency", "p99_latency")
SHOWN = ("mean_ttft", "p99_ttft", "mean_latency")
ITS_OWN = {"kv router": "kv_router", "its round robin": "round_robin"}
OWN_RUNS = 5  # its router draws among equals, without a seed: the mean of so many stands for it
LED = ("round_robin", "least_loaded", "kv_cost", "e2")
UNKNOWN = "e2, costs unknown"
Tokens = npt.NDArray[np.int32]
Rows = list[dict[str, Any]]


class Served(NamedTuple):
    """A request in that simulator: seconds from its arrival to its first and last token, prompt tokens that were
    cached, and the worker."""

    ttft_seconds: float
    latency_seconds: float
    cached_tokens: int
    worker: int


@dataclass(frozen=True, slots=True)
class Asked:
    """The requests of a run: tokens of the prompt, of the output, and when each arrives."""

    prompts: Sequence[Tokens]
    output_tokens: Sequence[int]
    arrival_seconds: npt.NDArray[np.float64]

    def lines(self) -> Iterator[str]:
        """As the replay reads them, but for the time. A block's id stands for it and all that is before it."""
        ids: dict[tuple[int, bytes], int] = {}
        for tokens, output in zip(self.prompts, self.output_tokens, strict=True):
            parent, blocks = 0, []
            for start in range(0, len(tokens), BLOCK_TOKENS):
                parent = ids.setdefault((parent, tokens[start : start + BLOCK_TOKENS].tobytes()), len(ids) + 1)
                blocks.append(parent)
            yield json.dumps({"input_length": len(tokens), "output_length": output, "hash_ids": blocks})


class Replay:
    """The simulator, in a process of the environment that has it; a context manager."""

    def __init__(self, python: Path, asked: Asked, host_times: float = 0.0) -> None:
        self._asked = asked
        self.host_tokens = int(host_times * FLEET.kv_tokens)  # of host memory behind each engine's
        self._engine = ENGINE if not self.host_tokens else ENGINE | with_host_memory(self.host_tokens)
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            requests = folder / "requests.jsonl"
            requests.write_text("".join(line + "\n" for line in asked.lines()))
            self._errors = stack.enter_context((folder / "errors").open("w+"))
            self._process = subprocess.Popen(
                [str(python), "-m", "benchmarks.scale.dynamo_engine", str(requests)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
            stack.callback(self._process.communicate)
            stack.callback(self._process.kill)
            self._stack = stack.pop_all()

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            raise SystemExit(f"the replay ended with exit code {code}: {self._errors.read()[-ERROR_CHARACTERS:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ask(self, numbers: Sequence[int], times: Sequence[float], options: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        requests = [[number, time * 1000.0] for number, time in zip(numbers, times, strict=True)]
        options = {"trace_block_size": BLOCK_TOKENS} | (
            options if "prefill_engine_args" in options else ALIKE | options
        )
        self._process.stdin.write(json.dumps({"requests": requests, "engine": self._engine, "options": options}) + "\n")
        self._process.stdin.flush()
        return self._line()

    def run(self, numbers: Sequence[int], **options: Any) -> list[Served]:
        """Those requests at their times; `options` as that package names them."""
        found = self._ask(numbers, [float(self._asked.arrival_seconds[number]) for number in numbers], options)
        assert [row[4] for row in found["served"]] == [len(self._asked.prompts[number]) for number in numbers]
        # A last block that is not full counts there as if it were.
        return [Served(row[0] / 1000, row[1] / 1000, min(row[2], row[4]), row[3]) for row in found["served"]]

    def backlog_rps(self, workers: int) -> float:
        """Requests a second that the KV router ends when all are there at once."""
        count = len(self._asked.prompts)
        times = [number * 1e-6 for number in range(count)]
        ended = self._ask(range(count), times, {"num_workers": workers, "router_mode": "kv_router"})
        return float(count / ended["duration_ms"] * 1000)


class Led:
    """Preble's scheduler led through the simulator, arrival by arrival."""

    def __init__(self, replay: Replay, asked: Asked, workers: int, policy: str, cost: preble.CostModel | None) -> None:
        self._replay = replay
        self._asked = asked
        self._clock = ManualClock(0.0)
        specs = [
            preble.WorkerSpec(
                str(i),
                FLEET.kv_tokens,
                BLOCK_TOKENS,
                cost,
                MAX_RUNNING,
                below_capacity_tokens=replay.host_tokens,
            )
            for i in range(workers)
        ]
        self._scheduler = preble.GlobalScheduler(specs, policy=policy, clock=self._clock)
        self._placed: list[list[int]] = [[] for _ in range(workers)]
        self._served: dict[int, Served] = {}
        self._seen: dict[int, list[float]] = {}  # of each request: when its first token and its end were seen
        self._ticked = 0

    def run(self) -> list[Served]:
        """All requests, by number."""
        for number, tokens in enumerate(self._asked.prompts):
            now = float(self._asked.arrival_seconds[number])
            self._catch_up(now)
            self._clock.set(now)
            decision = self._scheduler.schedule(tokens, request_id=number)
            self._place(number, int(decision.worker))
        return [self._served[number] for number in range(len(self._asked.prompts))]

    def _place(self, number: int, worker: int) -> None:
        placed = self._placed[worker]
        placed.append(number)
        for one, served in zip(placed, self._replay.run(placed, num_workers=1), strict=True):
            self._served[one] = served._replace(worker=worker)
        for one in placed:
            times = self._times(one)
            for before, after in zip(self._seen.get(one, ()), times, strict=False):
                assert math.isclose(before, after, abs_tol=1e-6), "what was seen has changed"

    def _times(self, number: int) -> list[float]:
        served, arrival = self._served[number], float(self._asked.arrival_seconds[number])
        return [arrival + served.ttft_seconds, arrival + served.latency_seconds]

    def _catch_up(self, now: float) -> None:
        """Report what has happened by now, in order."""
        events: list[tuple[float, int, int]] = []
        for number in self._served:
            done = self._seen.setdefault(number, [])
            events += [(time, number, kind) for kind, time in enumerate(self._times(number)) if kind >= len(done)]
        for time, number, kind in sorted(events):
            if time > now:
                break
            self._tick(time)
            self._clock.set(time)
            self._seen[number].append(time)
            if kind == 0:
                self._scheduler.first_token(number, cached_tokens=self._served[number].cached_tokens)
            else:
                self._scheduler.finish(number, output_tokens=self._asked.output_tokens[number])
        self._tick(now)

    def _tick(self, now: float) -> None:
        while self._ticked + 1 <= now:
            self._ticked += 1
            self._clock.set(float(self._ticked))
            self._scheduler.tick()


def with_host_memory(tokens: int) -> dict[str, Any]:
    """What an engine is given for room in host memory; how fast that is, is that package's default."""
    return {
        "native_host_offload": {"num_host_blocks": tokens // BLOCK_TOKENS},
        "kv_cache_bytes_per_token": KV_TOKEN_BYTES,
    }


def profiled(python: Path) -> preble.CostModel:
    """What a prefill and an iteration of decoding take there, measured one prompt and one batch at a time."""
    prompts = [np.arange(tokens, dtype=np.int32) for tokens in PROFILED_TOKENS]
    prompts += [np.arange(1024 * n, 1024 * (n + 1), dtype=np.int32) + 10**6 for n in range(max(PROFILED_BATCHES))]
    asked = Asked(prompts, [PROFILED_OUTPUT] * len(prompts), np.arange(float(len(prompts))) * 1e-6)
    first, decodes = len(PROFILED_TOKENS), []
    with Replay(python, asked) as replay:
        alone = [replay.run([number])[0] for number in range(first)]
        for batch in PROFILED_BATCHES:
            last = replay.run(range(first, first + batch))[-1]
            step = (last.latency_seconds - last.ttft_seconds) / (PROFILED_OUTPUT - 1)
            decodes.append((batch, 1024 + PROFILED_OUTPUT // 2, step))
    for tokens, one in zip(PROFILED_TOKENS, alone, strict=True):
        decodes.append((1, tokens, (one.latency_seconds - one.ttft_seconds) / (PROFILED_OUTPUT - 1)))
    prefills = [(tokens, tokens, one.ttft_seconds) for tokens, one in zip(PROFILED_TOKENS, alone, strict=True)]
    return preble.CostModel.fit(prefills, decode=decodes, name="dynamo's replay")


def workload_of(name: str, seed: int, workers: int, share: float) -> Workload:
    """A workload's requests for so many workers, at their own times or Poisson's."""
    times = workers / FLEET.workers
    if SOURCES[name].trace:
        return several(name, seed, share, round(times)) if times > 1.0 else requests_of(name, seed, share * times)
    return poisson(requests_of(name, seed, share * times), 1.0, seed + 1000)


def asked_of(made: Workload) -> Asked:
    """The requests, in the order of their arrival; no two arrive at once."""
    times = np.asarray(arrival_times(made))
    order = np.argsort(times, kind="stable")
    requests = [made.requests[i] for i in order]
    prompts = [np.ascontiguousarray(np.concatenate(one.parts), dtype=np.int32) for one in requests]
    apart = times[order] - times[order[0]] + np.arange(len(order)) * 1e-6
    return Asked(prompts, [int(one.output_tokens or 1) for one in requests], apart)


def at_load(asked: Asked, rps: float, load: float) -> Asked:
    """The same requests at `load` times `rps`."""
    span = float(asked.arrival_seconds[-1])
    scale = (len(asked.prompts) - 1) / (load * rps) / span
    return Asked(asked.prompts, asked.output_tokens, asked.arrival_seconds * scale)


def figures_of(served: Sequence[Served], asked: Asked) -> dict[str, float]:
    """Means and tails, and the share of prompt tokens that was cached; without those that warm the caches."""
    counted = served[warm_requests(len(served)) :]
    ttft, latency = (np.array([one[i] for one in counted]) for i in (0, 1))
    prompt = sum(len(tokens) for tokens in asked.prompts[warm_requests(len(served)) :])
    values = (ttft.mean(), np.percentile(ttft, 99), latency.mean(), np.percentile(latency, 99))
    return {**dict(zip(FIGURES, map(float, values), strict=True)), "hit": sum(one[2] for one in counted) / prompt}


def arms(replay: Replay, asked: Asked, workers: int, cost: preble.CostModel) -> Iterator[tuple[str, dict[str, float]]]:
    """Every rule and what it comes to: that package's own two, then Preble's."""
    numbers = range(len(asked.prompts))
    for name, mode in ITS_OWN.items():
        runs = [replay.run(numbers, num_workers=workers, router_mode=mode) for _ in range(OWN_RUNS)]
        yield name, means([figures_of(served, asked) for served in runs])
    for policy in LED:
        yield policy, figures_of(Led(replay, asked, workers, policy, cost).run(), asked)
    yield UNKNOWN, figures_of(Led(replay, asked, workers, "e2", None).run(), asked)


def means(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each figure."""
    return {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}


def cells(args: argparse.Namespace, python: Path) -> Iterator[dict[str, Any]]:
    """A row for each workload, fleet, load and rule: means over the seeds, and figures by seed."""
    cost = profiled(python)
    for name, workers in itertools.product(args.workloads, args.workers):
        made = [asked_of(workload_of(name, seed, workers, args.share)) for seed in args.seeds]
        for load in args.loads:
            found: dict[str, list[dict[str, float]]] = {}
            for asked in made:
                with Replay(python, asked, args.host_times) as replay:
                    rps = replay.backlog_rps(workers)
                at = at_load(asked, rps, load)
                with Replay(python, at, args.host_times) as replay:
                    for arm, figures in arms(replay, at, workers, cost):
                        found.setdefault(arm, []).append(figures)
            for arm, runs in found.items():
                by_seed = {f"{key}_by_seed": [run[key] for run in runs] for key in FIGURES}
                yield {"workload": name, "workers": workers, "load": load, "arm": arm, **means(runs), **by_seed}
            sys.stderr.write(f"{name} {workers} {load}\n")


def ratio(row: dict[str, Any], other: dict[str, Any], figure: str) -> str:
    """Geometric mean of the ratios by seed, and the standard error of their logarithms."""
    logs = [math.log(a / b) for a, b in zip(row[f"{figure}_by_seed"], other[f"{figure}_by_seed"], strict=True)]
    spread = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    return f"{math.exp(statistics.fmean(logs)):.2f}±{spread:.2f}"


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """E2 over NVIDIA's router, and over its round robin; and seconds."""
    by_cell: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_cell.setdefault((row["workload"], row["workers"], row["load"]), {})[row["arm"]] = row
    over, seconds = [], []
    for cell, found in by_cell.items():
        where = ", ".join(map(str, cell))
        for arm in ("e2", UNKNOWN):
            compared = [ratio(found[arm], found["kv router"], figure) for figure in FIGURES]
            hits = f"{found[arm]['hit']:.2f}, {found['kv router']['hit']:.2f}"
            over.append([where, arm, *compared, hits, ratio(found[arm], found["its round robin"], "mean_ttft")])
        shown = [" / ".join(f"{found[arm][key]:.3g}" for key in SHOWN) for arm in found]
        seconds.append([where, *shown])
    arms_of = next(iter(by_cell.values()))
    names = ["TTFT: mean", "p99", "latency: mean", "p99", "cached, there", "mean TTFT, over round robin"]
    first = markdown(["workload, workers, load", "over the KV router", *names], over)
    return f"{first}\n\n{markdown(['mean TTFT / its p99 / mean latency, s', *arms_of], seconds)}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What a run in that simulator is asked for, but the workloads and workers."""
    parser.add_argument("--loads", nargs="+", type=float, default=[0.3, 0.9, 1.2])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--share", type=float, default=1.0, help="of a workload's requests (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    parser.add_argument("--peers-env", type=Path, default=ROOT / ".venv-peers")


def rows_of(run: Callable[[argparse.Namespace, Path], Iterator[dict[str, Any]]], args: argparse.Namespace) -> Rows:
    """What a run finds, written where it was asked to be; nothing, and a word about it, where that package is
    missing."""
    python = args.peers_env / "bin/python"
    if not python.exists():
        sys.stdout.write(f"left out: no environment {args.peers_env.name}; `make peers` installs it\n")
        return []
    rows = list(run(args, python))
    if args.json is not None:
        args.json.write_text(json.dumps(rounded(rows), indent=1) + "\n")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ("mooncake", "mooncake-synthetic", "loogle", "toolbench")
    parser.add_argument("--workloads", nargs="+", choices=[*SOURCES], default=[*known])
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--host-times", type=float, default=0.0, help="host memory, in GPU memories (%(default)s)")
    parser.add_argument("--rows", nargs="+", type=Path, help="run nothing: print what such files have")
    add_options(parser)
    args = parser.parse_args()
    rows = [row for file in args.rows for row in json.loads(file.read_text())] if args.rows else rows_of(cells, args)
    if rows:
        sys.stdout.write(tables(rows) + "\n")


if __name__ == "__main__":
    main()
