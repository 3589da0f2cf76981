"""The profile from start to end: engine, measurements, fit, file, figures. Owns options, order and time."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..._cost import CostModel
from ...errors import InvalidInput
from ...types import check_int
from ..console import Screen, can_draw, machine, need_torch, output_directory, versions
from . import points, profile
from .bench import DECODE_STEPS, Bench, Results, sample_of
from .points import Limits, Point
from .targets import SimulatedTarget, Target, TorchTarget, check_fits, local_config

TINY_MODEL, TINIEST_MODEL = "llama-20m", "llama-1m"  # what "tiny" is, and what it is for a quick run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=("torch", "simulated"), help="default: torch, unless there is a --url")
    parser.add_argument("--url", metavar="URL", help="http://host:port of an SGLang or vLLM server that runs, instead")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter prompts, seconds instead of minutes")
    parser.add_argument("--out", type=Path, metavar="DIR", help="model file and figures (default: a new directory)")
    parser.add_argument("--name", metavar="NAME", help="of the fitted model (default: model and device)")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="measure no longer (default: 70, quick 5; url: 120, quick 20)"
    )
    parser.add_argument("--repeats", type=int, metavar="N", help="runs of each point at most (default: 5, url: 3)")
    parser.add_argument("--seed", type=int, metavar="N", help="of prompts and their order (default: 0, url: drawn)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="the longest prompt (default: by engine)")
    parser.add_argument("--max-batch", type=int, metavar="N", help="the largest decode batch (default: by engine)")
    torch = parser.add_argument_group("torch engine")
    torch.add_argument(
        "--model",
        metavar="DIR",
        help="a model directory, or tiny: a small random one (the default); with --url the model's name there",
    )
    torch.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    torch.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default: %(default)s)")
    torch.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: 1)")
    simulation = parser.add_argument_group("simulated engine")
    simulation.add_argument(
        "--cost-model", default="mistral-7b/a6000", metavar="PRESET", help="what it runs by (default: %(default)s)"
    )
    server = parser.add_argument_group("running server")
    server.add_argument("--json", action="store_true", help="print the profile as JSON, and all else on stderr")
    server.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the server's API key")
    server.add_argument("--block-size", type=int, metavar="TOKENS", help="of its cache, where it does not say it")
    server.add_argument("--kv-capacity-tokens", type=int, metavar="TOKENS", help="the same")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: `tolerance` is how far from a line (fraction) a length must lie to be looked at closer."""

    limits: Limits
    repeats: int
    seconds: float
    tolerance: float
    closer_looks: int


def effort_of(args: argparse.Namespace) -> Effort:
    """What the options ask for. The simulated engine has no noise and takes no time: once is enough, and exactly.

    Fills in the defaults of --engine, --repeats and --seed. Raises `InvalidInput` naming the option.
    """
    args.engine = args.engine or "torch"
    args.repeats = 5 if args.repeats is None else args.repeats
    args.seed = 0 if args.seed is None else args.seed
    seconds = (5.0 if args.quick else 70.0) if args.seconds is None else args.seconds
    if not 0 < seconds < float("inf"):
        raise InvalidInput(f"--seconds must be a number above 0, got {seconds}")
    check_int("--seed", args.seed, 0, 2**63 - 1, InvalidInput)
    repeats = check_int("--repeats", args.repeats, 1, 1000, InvalidInput)
    if args.engine == "simulated":
        limits = Limits(args.max_tokens or (2048 if args.quick else 8192), args.max_batch or (16 if args.quick else 64))
        return Effort(limits, 1, seconds, tolerance=0.005, closer_looks=80)
    limits = Limits(args.max_tokens or (1024 if args.quick else 2048), args.max_batch or (4 if args.quick else 8))
    return Effort(limits, repeats, seconds, tolerance=0.2, closer_looks=4 if args.quick else 8)


def run(args: argparse.Namespace) -> int:
    """Measure, fit, write, draw; 0. Raises `MissingExtra`, `InvalidInput` or `EngineError`."""
    if args.url is not None:
        if args.engine is not None:
            raise InvalidInput(f"--engine {args.engine}: a server that runs, --url, has its own")
        from .server import run as run_server

        return run_server(args)
    if args.json or args.api_key_env is not None:
        raise InvalidInput("--json and --api-key-env are for a server that runs: give its --url")
    effort = effort_of(args)
    if args.engine == "torch":
        need_torch()
    out = output_directory(args.out, "--out", "profile")
    started, screen = time.monotonic(), Screen()
    target = make_target(args, effort, out)
    check_fits(target, effort.limits)
    sys.stdout.write(f"Profile of {where(target)}, into {out}\n")
    found, parts = measure(args, effort, target, screen)
    screen.clear()
    target.engine.close()
    result = profile.fit(found.samples, parts, args.name or f"{target.model}/{target.device}")
    sys.stdout.write(f"\n{profile.table(result)}\n\n")
    if found.skipped or found.short:
        note = f"{found.skipped} points were not measured and {found.short} fewer than {effort.repeats} times"
        sys.stdout.write(f"Time was up after {effort.seconds:g} s: {note}.\n")
    about = {**about_run(args, effort, target), "skipped_points": found.skipped, "short_points": found.short}
    path = out / "cost_model.json"
    result.model.save(path, profile.document(result, about))
    sys.stdout.write(f'Cost model: {path}, to be used as cost_model="{path}"\n')
    draw_figures(result, out, where(target))
    sys.stdout.write(f"The profile took {time.monotonic() - started:.0f} s.\n")
    return 0


def make_target(args: argparse.Namespace, effort: Effort, out: Path) -> Target:
    config = local_config(effort.limits, DECODE_STEPS)
    if args.engine == "simulated":
        return SimulatedTarget(CostModel.preset(args.cost_model), config)
    args.model = str(model_directory(args.model or "tiny", TINIEST_MODEL if args.quick else TINY_MODEL, out))
    return TorchTarget(Path(args.model), config, device=args.device, dtype=args.dtype, threads=args.threads)


def model_directory(model: str, tiny_spec: str, out: Path) -> Path:
    """The directory of a model; "tiny" is made by that spec. Raises `InvalidInput` where there is none."""
    if model == "tiny":
        from ...engines.torch.tiny_models import make_tiny_model

        return make_tiny_model(tiny_spec, out / "models")
    if not Path(model).is_dir():
        raise InvalidInput(f"--model {model}: no such directory")
    return Path(model)


def measure(
    args: argparse.Namespace, effort: Effort, target: Target, screen: Screen
) -> tuple[Results, list[profile.PrefillParts]]:
    """All samples of the target, and the parts of cold prefills. A fifth of the time is kept for the parts."""
    rng = np.random.default_rng(args.seed)
    bench = Bench(target, rng)
    deadline = time.monotonic() + effort.seconds

    def out_of_time(reserve: float = 0.0) -> bool:
        return time.monotonic() > deadline - reserve * effort.seconds

    chosen = points.plan(effort.limits, rng)
    bench.warm_up([Point(points.PREFILL, effort.limits.tokens_max // 4), Point(points.DECODE, 1, 16)])
    found = bench.measure(
        chosen,
        effort.repeats,
        lambda: out_of_time(0.35),
        lambda done, total: screen.show(f"  measured {done} of {total} points, runs repeated"),
    )
    look_closer(bench, found, effort, lambda: out_of_time(0.2), screen)
    if args.engine != "torch":
        return found, []
    from .parts import measure_parts

    screen.show("  taking cold prefills apart")
    lengths = points.cold_lengths(effort.limits)
    options = {"device": args.device, "dtype": args.dtype}
    return found, measure_parts(Path(args.model), lengths, effort.repeats, rng, out_of_time, **options)


def look_closer(bench: Bench, found: Results, effort: Effort, out_of_time: Callable[[], bool], screen: Screen) -> None:
    """Measure lengths between those of the plan where time is not a straight line, and add them to `found`."""
    known = {s.tokens: s.seconds for s in found.samples if s.point.cold and not s.point.held_out}
    runs: dict[int, list[float]] = {}

    def measure_length(length: int) -> float:
        runs[length] = [bench.run(Point(points.PREFILL, length)) for _ in range(min(3, effort.repeats))]
        return float(np.median(runs[length]))

    for length, _ in points.refine(known, measure_length, tolerance=effort.tolerance, room=effort.closer_looks):
        found.samples.append(sample_of(Point(points.PREFILL, length), runs[length]))
        screen.show(f"  looked closer at {len(runs)} lengths")
        if out_of_time():
            return


def where(target: Target) -> str:
    """Model and device in words."""
    return f"{target.model} on {'the simulated engine' if target.device == 'simulated' else target.device}"


def about_run(args: argparse.Namespace, effort: Effort, target: Target) -> dict[str, Any]:
    """Where the numbers come from."""
    return {
        "engine": args.engine,
        "model": target.model,
        "device": target.device,
        "clock": target.clock_name,
        "machine": machine(),
        "versions": versions(),
        "settings": {**asdict(effort), "seed": args.seed, "dtype": args.dtype, "threads": args.threads},
    }


def draw_figures(result: profile.Profile, out: Path, subtitle: str) -> None:
    """Write both figures, or say why there are none."""
    if not can_draw("No figures: they need"):
        return
    from .plot import draw_decode, draw_prefill

    for name, draw in (("figure1_prefill.png", draw_prefill), ("figure2_decode.png", draw_decode)):
        draw(out / name, result, subtitle)
        sys.stdout.write(f"Figure: {out / name}\n")
