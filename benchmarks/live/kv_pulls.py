"""What it takes to take a prefix over from another worker, and to compute it: real torch workers, KV through ZeroMQ.

    python -m benchmarks.live.kv_pulls times [--spec llama-20m] [--tokens 256 1024 4096] [--repeats 7] [--seed 0]
    python -m benchmarks.live.kv_pulls arms [--documents 12] [--document-tokens 2048] [--loads 0.3 0.9] [--seconds 60]

`times`: the time to first token of a prompt of which a worker caches nothing, of the same prompt at another worker that
takes it over, and of that again where it is cached; with how long each of the two engines was held up. Medians, and the
10th and 90th percentile.

`arms`: questions to some documents, Zipf 1.0, arrive at random (open loop) at a share of what the fleet computes
without any cache, and E2 places them. The arms differ in when the chosen worker pulls what it lacks: never; always;
where it lacks at least so many tokens (`--thresholds`); by the price. All arms get the same requests at the same
moments, in an order that is drawn for each seed, on workers that are started anew; costs are learned in each. Time to
first token and latency, mean and 99th percentile, and how many tokens were moved.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from preble import CostModel, GlobalScheduler, Policy, Router, SamplingParams
from preble.engines.torch.tiny_models import SPECS, make_tiny_model

ONE_TOKEN = SamplingParams(max_new_tokens=1, ignore_eos=True)
DEAR_PREFILL = CostModel([(0, 0.1), (1000, 100.0)])  # so that every pull is worth while, however long it takes
QUESTION_TOKENS = 32
START_SECONDS = 120.0


class Chosen(Policy):
    """The worker that the benchmark names."""

    name = reason = "chosen"
    worker = "a"

    def score(self, request: Any, workers: Any) -> list[float]:
        """0 for it, 1 for others."""
        return [float(worker_id != Chosen.worker) for worker_id in workers.ids]


class Threshold(GlobalScheduler):
    """Pulls at any price, where at least `least_tokens` are missing; None: never."""

    least_tokens: int | None = None

    def pull_for(self, request_id: Hashable, token_ids: Any, **asked: Any) -> Any:
        """As the rule says."""
        if self.least_tokens is None:
            return None
        return super().pull_for(request_id, token_ids, **asked, least_tokens=self.least_tokens)


class TorchWorkers:
    """Worker processes of one model, one thread each."""

    def __init__(self, model: Path, count: int, kv_tokens: int, token_budget: int) -> None:
        options = [
            "--engine",
            "torch",
            "--model",
            str(model),
            "--dtype",
            "float32",
            "--device",
            "cpu",
            "--threads",
            "1",
        ]
        options += ["--kv-capacity-tokens", str(kv_tokens), "--token-budget", str(token_budget)]
        command = [sys.executable, "-m", "preble.cli", "worker", "--log-level", "warning", "--until-stdin-closes"]
        self._processes = [
            subprocess.Popen(
                [*command, *options, "--id", "abcdefgh"[number], "--drain-seconds", "0"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(count)
        ]
        self.endpoints = [self._ready(process) for process in self._processes]

    @staticmethod
    def _ready(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("READY "):
            raise SystemExit(f"a worker did not start: exit code {process.wait()}")
        return line.split()[1]

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait(START_SECONDS)


@contextlib.asynccontextmanager
async def routed(args: argparse.Namespace, model: Path, **options: Any) -> AsyncIterator[Router]:
    """A router before new workers."""
    workers = await asyncio.to_thread(TorchWorkers, model, args.workers, args.kv_tokens, args.token_budget)
    try:
        async with Router(workers.endpoints, **options) as router:
            yield router
    finally:
        await asyncio.to_thread(workers.close)


def quantile(values: list[float], share: float) -> float:
    """Of a list, by the nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# --- times ------------------------------------------------------------------------------------------------------------


async def first_token_seconds(router: Router, prompt: np.ndarray, worker: str) -> float:
    """How long a worker takes for one token."""
    Chosen.worker = worker
    began = time.perf_counter()
    async for _ in router.generate(prompt, ONE_TOKEN):
        pass
    return time.perf_counter() - began


async def measure_times(args: argparse.Namespace, model: Path, vocab_size: int) -> list[dict[str, Any]]:
    """A row for each prompt length."""
    rng = np.random.default_rng(args.seed)
    rows = []
    async with routed(args, model, policy=Chosen(), cost_model=DEAR_PREFILL) as router:
        for tokens in (min(args.tokens), *args.tokens):  # the first warms up
            found: dict[str, list[float]] = {"compute": [], "pull": [], "hit": []}
            before = dict(router.scheduler.stats()["pulls"])
            for _ in range(args.repeats):
                prompt = rng.integers(3, vocab_size, tokens).astype(np.int32)
                found["compute"].append(await first_token_seconds(router, prompt, "a"))
                found["pull"].append(await first_token_seconds(router, prompt, "b"))
                found["hit"].append(await first_token_seconds(router, prompt, "b"))
            after = router.scheduler.stats()["pulls"]
            row: dict[str, Any] = {"tokens": tokens, "moved": after["moved_tokens"] - before.get("moved_tokens", 0)}
            for name, seconds in found.items():
                spread = {"p10": quantile(seconds, 0.1), "p90": quantile(seconds, 0.9)}
                row[name] = {"median": statistics.median(seconds), **spread}
            rows.append(row)
    return rows[1:]


def print_times(rows: list[dict[str, Any]], repeats: int) -> None:
    """The table."""
    print("| prompt tokens | computed, ms | taken over, ms | cached, ms | computed / taken over | moved of asked |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        cells = [
            f"{1e3 * one['median']:.1f} ({1e3 * one['p10']:.1f} to {1e3 * one['p90']:.1f})"
            for one in (row["compute"], row["pull"], row["hit"])
        ]
        ratio = row["compute"]["median"] / row["pull"]["median"]
        share = row["moved"] / (repeats * (row["tokens"] - 1))
        print(f"| {row['tokens']} | {' | '.join(cells)} | {ratio:.2f} | {share:.0%} |")


# --- arms -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Arm:
    """One rule, and what came of it."""

    name: str
    least_tokens: int | None = None
    by_price: bool = False
    first_token_seconds: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failed: int = 0
    pulls: dict[str, int] = field(default_factory=dict)


def arms_of(args: argparse.Namespace) -> list[Arm]:
    """Never, always, thresholds, the price."""
    fixed = [Arm(f"from {tokens}", tokens) for tokens in args.thresholds]
    return [Arm("never"), Arm("always", 0), *fixed, Arm("price", by_price=True)]


@dataclass(frozen=True, slots=True)
class Question:
    """When it comes, and its prompt."""

    at: float
    prompt: np.ndarray


def questions(args: argparse.Namespace, vocab_size: int, rate: float, seed: int) -> list[Question]:
    """Arrivals of `--seconds` at `rate` a second, on documents by Zipf 1.0."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(3, vocab_size, args.document_tokens).astype(np.int32) for _ in range(args.documents)]
    weights = 1.0 / np.arange(1, args.documents + 1)
    found, now = [], 0.0
    while (now := now + rng.exponential(1.0 / rate)) < args.seconds:
        document = documents[rng.choice(args.documents, p=weights / weights.sum())]
        question = rng.integers(3, vocab_size, QUESTION_TOKENS).astype(np.int32)
        found.append(Question(now, np.concatenate((document, question))))
    return found


async def run_arm(args: argparse.Namespace, model: Path, arm: Arm, asked: list[Question]) -> None:
    """Ask all of it, on new workers."""
    scheduler = GlobalScheduler([]) if arm.by_price else Threshold([])
    if isinstance(scheduler, Threshold):
        scheduler.least_tokens = arm.least_tokens
    sampling = SamplingParams(max_new_tokens=args.output_tokens, ignore_eos=True)
    async with routed(args, model, scheduler=scheduler) as router:
        began = time.perf_counter()

        async def ask(question: Question) -> None:
            await asyncio.sleep(max(0.0, began + question.at - time.perf_counter()))
            due, first = time.perf_counter(), None
            try:
                async for chunk in router.generate(question.prompt, sampling):
                    first = time.perf_counter() if first is None and chunk.token_ids else first
            except Exception as error:  # noqa: BLE001 - one that is refused is counted
                arm.failed += 1
                print(f"{arm.name}: {type(error).__name__}: {error}", file=sys.stderr)
                return
            arm.first_token_seconds.append((first or time.perf_counter()) - due)
            arm.seconds.append(time.perf_counter() - due)

        await asyncio.gather(*(ask(question) for question in asked))
        stats = router.scheduler.stats()["pulls"]
        for name in ("asked", "moved_tokens", "wanted_tokens"):
            arm.pulls[name] = arm.pulls.get(name, 0) + stats[name]  # type: ignore[literal-required]


async def measure_arms(args: argparse.Namespace, model: Path, vocab_size: int) -> list[dict[str, Any]]:
    """A row for each load and arm."""
    probe = argparse.Namespace(**{**vars(args), "tokens": [args.document_tokens + QUESTION_TOKENS], "repeats": 3})
    alone = (await measure_times(probe, model, vocab_size))[0]["compute"]["median"]
    rows = []
    for load in args.loads:
        rate, arms = load * args.workers / alone, arms_of(args)
        for seed in args.seeds:
            order = list(arms)
            random.Random(f"{load}/{seed}").shuffle(order)
            asked = questions(args, vocab_size, rate, seed)
            for arm in order:
                await run_arm(args, model, arm, asked)
        rows += [row_of(load, arm) for arm in arms]
    return rows


def row_of(load: float, arm: Arm) -> dict[str, Any]:
    """What an arm came to, in seconds."""
    row: dict[str, Any] = {"load": load, "arm": arm.name, "requests": len(arm.seconds), "failed": arm.failed}
    for name, values in (("first_token", arm.first_token_seconds), ("latency", arm.seconds)):
        row[name] = {"mean": statistics.fmean(values), "p99": quantile(values, 0.99)} if values else None
    return {**row, **arm.pulls}


def print_arms(rows: list[dict[str, Any]]) -> None:
    """The table."""
    print("| load | pulls | requests | first token, ms: mean | p99 | latency, ms: mean | p99 | pulls | tokens moved |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        times = [1e3 * row[name][of] for name in ("first_token", "latency") for of in ("mean", "p99")]
        cells = " | ".join(f"{one:.0f}" for one in times)
        print(
            f"| {row['load']} | {row['arm']} | {row['requests']} ({row['failed']} failed) | {cells} | {row['asked']} "
            f"| {row['moved_tokens']} |"
        )


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("times", "arms"))
    parser.add_argument("--spec", choices=sorted(SPECS), default="llama-20m", help="the tiny model (%(default)s)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kv-tokens", type=int, default=40_000, help="KV capacity of a worker (%(default)s)")
    parser.add_argument("--token-budget", type=int, default=512)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--document-tokens", type=int, default=2048)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.9, 1.2])
    parser.add_argument("--thresholds", type=int, nargs="*", default=[256, 1024, 2048])
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals, for each arm and seed (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = make_tiny_model(args.spec, scratch)
        measure = measure_times if args.what == "times" else measure_arms
        rows = asyncio.run(measure(args, model, SPECS[args.spec].vocab_size))
    if args.what == "times":
        print_times(rows, args.repeats)
    else:
        print_arms(rows)
    if args.json is not None:
        args.json.write_text(json.dumps({"arguments": {**vars(args), "json": None}, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
