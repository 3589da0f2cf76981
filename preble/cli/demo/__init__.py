"""`preble demo`: real prompts through real worker processes, round robin against E2. Owns the options; see its modules.

`corpus` makes prompts, `fleet` runs workers, `experiment` sends, `plan` sets the rate, `report` and `plot` tell.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `preble demo`."""
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


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if every request of both policies finished."""
    from .program import run_demo

    return run_demo(args)


def positive_int(text: str) -> int:
    """An argument that is a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def positive_float(text: str) -> float:
    """An argument that is a finite number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value
