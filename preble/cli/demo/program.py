"""The demo from start to end: model, documents, calibration, a phase per policy, results. Owns options and order."""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from ...errors import EngineError, MissingExtra, PrebleError
from ..console import (
    Screen,
    can_draw,
    need_torch,
    output_directory,
    positive_float,
    positive_int,
    write_json,
)
from . import corpus, plan, report
from .experiment import Calibration, calibrate, run_phase, warm_up
from .fleet import DemoFleet
from .plot import draw
from .progress import Tally

T = TypeVar("T")

POLICIES = ("round_robin", "e2")
MODEL = "llama-20m"
OUTPUT_TOKENS = 12
ENDINGS = (signal.SIGINT, signal.SIGTERM)  # ways in which a process is asked to end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=("torch", "simulated"), default="torch", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a shorter run: fewer documents and requests")
    parser.add_argument("--workers", type=positive_int, default=2, metavar="N", help="worker processes (default: 2)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default: 0)")
    parser.add_argument("--requests", type=positive_int, metavar="N", help="prompts per policy (default: by speed)")
    parser.add_argument("--rate", type=positive_float, metavar="R", help="requests per second (default: by speed)")
    parser.add_argument("--seconds", type=positive_float, metavar="S", help="aim of one policy's run, in seconds")
    parser.add_argument(
        "--time-scale",
        type=positive_float,
        default=0.25,
        metavar="X",
        help="simulated engine: seconds waited per simulated second (default: 0.25)",
    )
    parser.add_argument("--workdir", type=Path, metavar="DIR", help="model, logs and results (default: a new one)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="everything measured (default: DIR/demo.json)")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="the picture (default: DIR/demo.png)")


@dataclass(frozen=True, slots=True)
class Settings:
    """What is run. `seconds` is the aim for one phase; `requests` and `rate` None follow from the speed found."""

    engine: str
    workers: int
    documents: int
    output_tokens: int
    seconds: float
    seed: int
    requests: int | None
    rate: float | None
    time_scale: float


def settings_of(args: argparse.Namespace) -> Settings:
    usual_seconds = 7.0 if args.engine == "simulated" else 75.0
    return Settings(
        engine=args.engine,
        workers=args.workers,
        documents=args.workers * (5 if args.quick else 8),
        output_tokens=OUTPUT_TOKENS,
        seconds=args.seconds or (usual_seconds / 3 if args.quick else usual_seconds),
        seed=args.seed,
        requests=args.requests,
        rate=args.rate,
        time_scale=args.time_scale,
    )


def run(args: argparse.Namespace, screen: Screen | None = None) -> int:
    """Run it all; 0 if every request finished. Raises `MissingExtra` before anything is done, `WorkerFailed` later."""
    screen, settings = screen or Screen(), settings_of(args)
    check_extras(settings, plot_wanted=args.plot is not None)
    workdir = output_directory(args.workdir, "--workdir", "demo")
    started = time.monotonic()
    demo = Demo(settings, workdir, screen)
    demo.prepare()
    phases = asyncio.run(until_asked_to_end(demo.measure()))
    note = demo.note()
    sys.stdout.write(f"\n{report.table(phases)}\n\n{report.headline(phases)}.\n")
    sys.stdout.write(note.replace(". ", ".\n") + "\n")
    content = report.document({**asdict(settings), **demo.found()}, phases, note)
    json_path = args.json or workdir / "demo.json"
    write_json(json_path, content)
    sys.stdout.write(f"Everything measured: {json_path}\n")
    plot_path = args.plot or workdir / "demo.png"
    if can_draw("No picture: it needs"):
        draw(plot_path, phases, demo.subtitle(), footnote(content))
        sys.stdout.write(f"Picture: {plot_path}\n")
    sys.stdout.write(f"The demo took {time.monotonic() - started:.0f} s.\n")
    return say_failures(phases, demo)


async def until_asked_to_end(work: Awaitable[T]) -> T:
    """Await `work`; when this process is asked to end, cancel it and then end as the signal would have it.

    An exception out of a signal handler comes between any two instructions: a socket that was just made would belong to
    nobody yet, and closing the router waits for all of them. A cancelled task unwinds from where it waits.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    asked: list[int] = []

    def ask_to_end(number: int) -> None:
        asked.append(number)
        if len(asked) == 1 and task is not None:  # once, since a second time would interrupt the unwinding
            task.cancel()

    if sys.platform != "win32":
        for number in ENDINGS:
            loop.add_signal_handler(number, ask_to_end, number)
    try:
        return await work
    except asyncio.CancelledError:
        if not asked:
            raise
        if asked[0] == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + asked[0]) from None


def check_extras(settings: Settings, *, plot_wanted: bool) -> None:
    """Raise `MissingExtra` for what the run will need and this Python lacks."""
    if settings.engine == "torch":
        need_torch()
    if plot_wanted and find_spec("matplotlib") is None:
        raise MissingExtra('--plot needs matplotlib: pip install "preble[bench]"')


class Demo:
    """One run. `prepare` makes the prompts, `measure` serves them; both report to the screen."""

    def __init__(self, settings: Settings, workdir: Path, screen: Screen) -> None:
        self.settings, self.workdir, self.screen = settings, workdir, screen
        self.rng = random.Random(settings.seed)
        self.model: Path | None = None
        self.documents: list[corpus.Document] = []
        self.prompts: list[corpus.DemoPrompt] = []
        self.calibration: Calibration | None = None
        self.plan: plan.DemoPlan | None = None
        self.logs = ""

    # --- preparation --------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Model, tokenizer, documents and more prompts than will be needed."""
        settings = self.settings
        tokenize: corpus.Tokenize = corpus.word_tokens
        self.screen.say(f"Preble demo in {self.workdir}: {settings.workers} workers, seed {settings.seed}")
        if settings.engine == "torch":
            started = time.monotonic()
            self.screen.say(f"1/5 model: a random {MODEL}, and a tokenizer trained on this Python's standard library")
            from ...engines.torch.tiny_models import make_tiny_model

            self.model = make_tiny_model(MODEL, self.workdir / "models")
            tokenize = corpus.model_tokenizer(self.model)
            self.screen.say(f"      {self.model} ({time.monotonic() - started:.1f} s)")
        else:
            self.screen.say(
                f"1/5 model: none; the simulated engine {1 / settings.time_scale:g} times faster than a GPU"
            )
        self.documents = corpus.load_documents(settings.documents, tokenize, self.rng)
        count = settings.requests or plan.REQUESTS_MAX
        self.prompts = corpus.choose_prompts(self.documents, count, tokenize, self.rng)
        tokens = sum(document.tokens for document in self.documents)
        self.screen.say(
            f"2/5 documents: {len(self.documents)} standard-library modules, {tokens:,} tokens; "
            f"a worker's KV cache holds {self.kv_capacity_tokens:,}: its share, not all"
        )

    @property
    def kv_capacity_tokens(self) -> int:
        """KV cache of one worker, in tokens."""
        return plan.kv_capacity(self.documents, self.settings.workers)

    # --- serving ------------------------------------------------------------------------------------------------------

    async def measure(self) -> list[report.Phase]:
        """Calibrate, plan, and run every policy on fresh workers over the same prompts and arrivals."""
        await self._calibrate()
        assert self.plan is not None
        timed = corpus.with_arrivals(self.prompts[: self.plan.requests], self.plan.rate_per_second, self.rng)
        return [await self._run(number, policy, timed) for number, policy in enumerate(POLICIES, 4)]

    async def _calibrate(self) -> None:
        settings = self.settings
        self.screen.say("3/5 calibration: how fast these workers are, so that round robin nearly saturates them")
        async with self._fleet("calibration") as fleet:
            self.calibration = await self._watching_fleet(
                fleet, calibrate(fleet, self._foreign_tokens(), settings.output_tokens)
            )
        speed = self.calibration.speed
        self.plan = plan.make_plan(
            self.documents,
            self.prompts,
            speed,
            workers=settings.workers,
            seconds=settings.seconds,
            requests=settings.requests,
            rate_per_second=settings.rate,
        )
        self.screen.say(
            f"      a worker prefills {speed.prefill_tokens_per_second:,.0f} tokens/s, "
            f"a cached request takes {speed.cached_request_seconds * 1000:.0f} ms of it"
        )
        self.screen.say(
            f"      so {self.plan.requests} prompts at {self.plan.rate_per_second:.2f}/s: should keep workers "
            f"{self.plan.round_robin_utilisation:.0%} busy with round_robin, {self.plan.e2_utilisation:.0%} with e2"
        )

    async def _run(self, number: int, policy: str, prompts: Sequence[corpus.DemoPrompt]) -> report.Phase:
        assert self.calibration is not None
        self.screen.say(f"{number}/5 {policy}: fresh workers with empty caches, the same prompts at the same times")
        tally = Tally(policy, len(prompts))
        async with self._fleet(policy) as fleet:
            await self._watching_fleet(fleet, warm_up(fleet, self._foreign_tokens()))
            with self.screen.phase(tally) as update:
                phase = run_phase(
                    policy,
                    prompts,
                    fleet,
                    output_tokens=self.settings.output_tokens,
                    cost_model=self.calibration.cost_model,
                    seed=self.settings.seed,
                    tally=tally,
                    update=update,
                )
                done = await self._watching_fleet(fleet, phase)
            self.logs = fleet.log_tails()
        return done

    async def _watching_fleet(self, fleet: DemoFleet, work: Awaitable[T]) -> T:
        """Await `work`; if it fails for want of a worker, say what became of the worker."""
        try:
            return await work
        except PrebleError as error:
            fleet.check()
            raise EngineError(f"{error}\nThe ends of the workers' logs:\n{fleet.log_tails()}") from error

    def _fleet(self, label: str) -> DemoFleet:
        settings = self.settings
        arguments = ["--engine", settings.engine, "--kv-capacity-tokens", str(self.kv_capacity_tokens)]
        if self.model is not None:
            arguments += ["--model", str(self.model), "--threads", "1"]
        else:
            arguments += ["--time-scale", str(settings.time_scale)]
        return DemoFleet(settings.workers, arguments, self.workdir / "logs", label)

    def _foreign_tokens(self) -> list[int]:
        """Tokens of real text that no prompt starts with: a document backwards."""
        longest = max(self.prompts, key=lambda prompt: len(prompt.token_ids))
        return list(reversed(longest.token_ids))

    # --- results ------------------------------------------------------------------------------------------------------

    def note(self) -> str:
        """What the numbers do and do not mean."""
        if self.model is not None:
            return report.RANDOM_WEIGHTS
        return report.SIMULATED.format(faster=1 / self.settings.time_scale)

    def subtitle(self) -> str:
        """What was run, in one line."""
        assert self.plan is not None
        engine = f"{MODEL} on one core each" if self.model is not None else "simulated engine"
        return (
            f"{self.plan.requests} questions about {len(self.documents)} source files of 1-3k tokens, "
            f"{self.plan.rate_per_second:.1f}/s · {self.settings.workers} workers, {engine}, "
            f"each with KV for {plan.KV_SHARES / self.settings.workers:.0%} of the files"
        )

    def found(self) -> dict[str, Any]:
        """What calibration and planning chose, for the record."""
        assert self.plan is not None and self.calibration is not None
        return {
            "policies": list(POLICIES),
            "model": None if self.model is None else self.model.name,
            "kv_capacity_tokens": self.kv_capacity_tokens,
            "speed": asdict(self.calibration.speed),
            "cost_model": self.calibration.cost_model.coefficients(),
            "plan": asdict(self.plan),
            "document_tokens": {document.module: document.tokens for document in self.documents},
        }


def footnote(content: dict[str, Any]) -> str:
    """Machine, versions and seed, for the foot of the picture."""
    machine, versions = content["machine"], content["versions"]
    torch = f", torch {versions['torch']}" if content["settings"]["model"] else ""
    return (
        f"{content['note'].split('.')[0]}. {machine['processor']}, {machine['cores']} cores; "
        f"Preble {versions['preble']}{torch}; seed {content['settings']['seed']}"
    )


def say_failures(phases: Sequence[report.Phase], demo: Demo) -> int:
    """Exit code 0, or 1 after saying which requests failed and why."""
    failed = [(phase.policy, record) for phase in phases for record in phase.records if record.error is not None]
    if not failed:
        return 0
    lines = [f"  {policy}, request {record.number}: {record.error}" for policy, record in failed[:5]]
    text = "\n".join([f"{len(failed)} requests failed:", *lines, "The ends of the workers' logs:", demo.logs])
    sys.stderr.write(text + "\n")
    return 1
