"""What a recording said of each policy beside what that policy then did: live runs before real engines, two by two.

    python -m benchmarks.replay.what_if --seconds 120 --rates 3 4.5 --repetitions 3 --json build/what-if.json
    python -m benchmarks.replay.what_if --seconds 20 --rates 3 --repetitions 1                  a look
    python -m benchmarks.replay.what_if --urls http://127.0.0.1:30000 http://127.0.0.1:30001    before SGLang's servers

Within a repetition every policy meets the same clients, at fresh workers with empty caches (servers are emptied with
/flush_cache). Each run is recorded; then each recording is replayed under all policies, and every answer about another
policy stands beside that policy's own run. A pair is two policies in one replay: it is ranked right if the one with
the lower predicted mean TTFT had the lower one in its run. Pairs of runs that differ by less than `LIKE` are no pair.

Clients ask about documents, one question each, or go on in turns: the answer, a pause, the next question.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.facts import commit, machine
from benchmarks.common.paths import ROOT
from benchmarks.common.tables import rounded
from preble import Recording, Router, SamplingParams
from preble.cli.demo.fleet import DemoFleet
from preble.engines.torch.tiny_models import make_tiny_model
from preble.errors import PrebleError
from preble.router import RouterConfig
from preble.sim.replay import FIGURES, ReplayAnswer, replay
from preble.types import SessionHint

MODEL = "llama-20m"
LIKE = 0.03  # of the mean TTFT
DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS = 16, (400, 1600), (16, 80)
OUTPUT_TOKENS = (8, 32)
TURNS_SHARE, TURNS, PAUSE_SECONDS = 0.3, (2, 4), 0.5
VOCABULARY = (300, 4000)
BARS = {"mean_ttft_seconds": 0.10, "mean_latency_seconds": 0.10, "p99_ttft_seconds": 0.25, "p99_latency_seconds": 0.25}
Found = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """What a turn adds to the conversation, how long its answer is, and the seconds before it."""

    token_ids: list[int]
    output_tokens: int
    pause_seconds: float


@dataclass(frozen=True)
class AskingClient:
    """One that comes at a moment, with a document and questions."""

    name: str
    arrival_seconds: float
    document: list[int]
    questions: list[Question]


def make_clients(rate: float, seconds: float, seed: int) -> list[AskingClient]:
    """Clients that come as a Poisson process, so many a second; documents are asked about unequally often (Zipf)."""
    rng = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [int(token) for token in rng.integers(*VOCABULARY, size=int(rng.integers(low, high)))]

    documents = [tokens(*DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    weights = 1.0 / np.arange(1, DOCUMENTS + 1)
    found, now = [], 0.0
    while (now := now + float(rng.exponential(1.0 / rate))) < seconds:
        turns = int(rng.integers(*TURNS)) if rng.random() < TURNS_SHARE else 1
        questions = [
            Question(tokens(*QUESTION_TOKENS), int(rng.integers(*OUTPUT_TOKENS)), float(rng.exponential(PAUSE_SECONDS)))
            for _ in range(turns)
        ]
        document = documents[int(rng.choice(DOCUMENTS, p=weights / weights.sum()))]
        found.append(AskingClient(f"client-{len(found)}", now, document, questions))
    return found


async def ask_all(router: Router, clients: Sequence[AskingClient]) -> int:
    """Every client from its arrival on; how many requests failed."""
    loop = asyncio.get_running_loop()
    start = loop.time()

    async def ask(client: AskingClient) -> int:
        await asyncio.sleep(max(0.0, start + client.arrival_seconds - loop.time()))
        so_far = list(client.document)
        session = SessionHint(client.name) if len(client.questions) > 1 else None
        for number, question in enumerate(client.questions):
            if number:
                await asyncio.sleep(question.pause_seconds)
            so_far += question.token_ids
            sampling = SamplingParams(max_new_tokens=question.output_tokens, ignore_eos=True)
            try:
                async for chunk in router.generate(np.array(so_far, np.int32), sampling, session=session):
                    so_far += chunk.token_ids
            except PrebleError:
                return 1
        return 0

    return sum(await asyncio.gather(*map(ask, clients)))


# --- live -------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def engines(args: argparse.Namespace, model: Path | None, label: str) -> AsyncIterator[list[str]]:
    """Endpoints of engines with empty caches."""
    if args.urls:
        for url in args.urls:
            await asyncio.to_thread(urllib.request.urlopen, urllib.request.Request(f"{url}/flush_cache", method="POST"))
        yield args.urls
        return
    arguments = ["--engine", "torch", "--kv-capacity-tokens", str(args.kv_capacity), "--model", str(model)]
    async with DemoFleet(args.workers, [*arguments, "--threads", "1"], args.directory / "logs", label) as fleet:
        yield fleet.endpoints


async def live(args: argparse.Namespace, model: Path | None, policy: str, rate: float, seed: int) -> Recording:
    """One policy's run, as it was recorded."""
    label = f"{policy}-{rate:g}-{seed}"
    file = args.directory / f"{label}.rec"
    async with engines(args, model, label) as endpoints:
        config = RouterConfig(refuse_wait_seconds=None)
        async with Router(endpoints, config=config) as router:  # what is loaded at the first request is no part of it
            warm = [AskingClient(f"warm-{n}", 0.0, [9, 8 + n] * 300, [Question([7], 8, 0.0)]) for n in range(8)]
            await ask_all(router, warm)
        if args.urls:
            async with engines(args, model, label):
                pass
        async with Router(endpoints, policy=policy, config=config, record=file) as router:
            failed = await ask_all(router, make_clients(rate, args.seconds, seed))
    found = Recording.read(file)
    print(f"{label}: {len(found)} requests, {failed} failed, mean TTFT {mean_ttft(found):.3f} s", flush=True)
    return found


def mean_ttft(recording: Recording) -> float:
    """Of what finished."""
    return float(np.mean([one.ttft_seconds for one in recording.requests if one.finished]))


# --- beside each other ------------------------------------------------------------------------------------------------


def compared(said: ReplayAnswer, runs: dict[str, ReplayAnswer], recorded: str, cell: Found) -> list[Found]:
    """A replay's answer about each policy beside that policy's run."""
    found = []
    for run in said.runs:
        really = runs[run.policy].measured
        assert really is not None
        row: Found = {**cell, "recorded": recorded, "policy": run.policy}
        for name in FIGURES:
            predicted, measured = getattr(run.figures, name).value, getattr(really, name).value
            row[name] = {
                "predicted": predicted,
                "measured": measured,
                "error": predicted / measured - 1.0 if measured else math.nan,
            }
        found.append(row)
    return found


def ranked(rows: Sequence[Found]) -> list[bool]:
    """Of each pair of policies in each replay, whether it is ranked right."""
    found = []

    def key(row: Found) -> tuple[Any, ...]:
        return row["rate"], row["seed"], row["recorded"]

    for _, group in itertools.groupby(sorted(rows, key=key), key):
        for one, other in itertools.combinations(group, 2):
            a, b = one["mean_ttft_seconds"], other["mean_ttft_seconds"]
            if abs(math.log(a["measured"] / b["measured"])) >= LIKE:
                found.append((a["predicted"] < b["predicted"]) == (a["measured"] < b["measured"]))
    return found


def report(rows: Sequence[Found], pairs: Sequence[bool]) -> str:
    """The rows and how the bars were met."""
    lines = [f"{'recorded':<14}{'policy':<14}{'rate':>5}{'seed':>5}" + "".join(f"{name:>30}" for name in BARS)]
    for row in rows:
        cells = "".join(
            f"{row[name]['predicted']:>12.3f} / {row[name]['measured']:.3f} {row[name]['error']:>+7.1%}"
            for name in BARS
        )
        lines.append(f"{row['recorded']:<14}{row['policy']:<14}{row['rate']:>5g}{row['seed']:>5}{cells}")
    for name, bar in BARS.items():
        errors = np.abs([row[name]["error"] for row in rows])
        text = f"{name}: median error {np.median(errors):.1%}, worst {errors.max():.1%}"
        lines.append(f"{text}, {np.mean(errors <= bar):.0%} within {bar:.0%}")
    if pairs:
        lines.append(f"ranked right: {sum(pairs)} of {len(pairs)} pairs")
    return "\n".join(lines)


async def measure(args: argparse.Namespace) -> list[Found]:
    """All runs, then all replays."""
    model = None if args.urls else make_tiny_model(MODEL, ROOT / "build" / "models")
    rows: list[Found] = []
    for rate, seed in itertools.product(args.rates, range(args.seed, args.seed + args.repetitions)):
        recordings = {policy: await live(args, model, policy, rate, seed) for policy in args.policies}
        said = {name: replay(recording, args.policies) for name, recording in recordings.items()}
        for name, one in said.items():
            print(f"recorded {name}: the model's error {one.model_error}", flush=True)
            rows += compared(one, said, name, {"rate": rate, "seed": seed})
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["round_robin", "least_loaded", "e2"])
    parser.add_argument("--rates", nargs="+", type=float, default=[3.0], help="clients a second")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each run")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kv-capacity", type=int, default=12_000)
    parser.add_argument("--urls", nargs="+", default=[], help="SGLang servers that run, in the place of torch workers")
    parser.add_argument("--directory", type=Path, help="for recordings and logs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if args.directory is None:
            args.directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="preble-what-if-")))
        (args.directory / "logs").mkdir(parents=True, exist_ok=True)
        rows = asyncio.run(measure(args))
    pairs = ranked(rows)
    print(report(rows, pairs))
    if args.json is not None:
        settings = {name: value for name, value in vars(args).items() if name not in ("directory", "json")}
        content = {"commit": commit(), "machine": machine(), "settings": settings, "rows": rows, "pairs_right": pairs}
        args.json.write_text(json.dumps(rounded(content), indent=1) + "\n")


if __name__ == "__main__":
    main()
