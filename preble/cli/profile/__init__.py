"""`preble profile`: how long an engine takes, as figures and as a cost model. Owns the options; see its modules.

`points` says what is measured, `targets` run an engine step by step, `bench` measures, `parts` splits a torch prefill
into attention and linear layers, `profile` fits and judges, `plot` draws, `program` conducts. Paper section 2.1.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `preble profile`."""
    parser.add_argument("--engine", choices=("torch", "simulated"), default="torch", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter prompts, seconds instead of minutes")
    parser.add_argument("--out", type=Path, metavar="DIR", help="model file and figures (default: a new directory)")
    parser.add_argument("--name", metavar="NAME", help="of the fitted model (default: model and device)")
    parser.add_argument("--seconds", type=float, metavar="S", help="measure no longer (default: 70, quick 5)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="runs of each point at most (default: 5)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and their order (default: 0)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="the longest prompt (default: by engine)")
    parser.add_argument("--max-batch", type=int, metavar="N", help="the largest decode batch (default: by engine)")
    torch = parser.add_argument_group("torch engine")
    torch.add_argument(
        "--model", default="tiny", metavar="DIR", help="a model directory, or tiny: a small random one (the default)"
    )
    torch.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    torch.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default: %(default)s)")
    torch.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: 1)")
    simulation = parser.add_argument_group("simulated engine")
    simulation.add_argument(
        "--cost-model", default="mistral-7b/a6000", metavar="PRESET", help="what it runs by (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, fit, draw; 0 when the files are written."""
    from .program import run_profile

    return run_profile(args)
