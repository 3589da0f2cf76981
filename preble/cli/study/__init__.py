"""`preble study`: the paper's study of prompts (section 3) on any workload. Owns the options; see its modules.

`tree` finds what prompts share, `statistics` measures, `report` and `plot` tell, `program` reads files and calls them.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `preble study`."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="prompt or trace files")
    parser.add_argument("--tokenizer", choices=("mistral", "words"), default="mistral", help="default: %(default)s")
    parser.add_argument("--limit", type=positive_int, metavar="N", help="only the first N requests of each file")
    parser.add_argument(
        "--output", type=Path, default=Path("study-out"), metavar="DIR", help="figures and JSON (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="everything measured (default: DIR/study.json)")


def run(args: argparse.Namespace) -> int:
    """Study the files; 0 when table, JSON and figures are written."""
    from .program import run_study

    return run_study(args)


def positive_int(text: str) -> int:
    """An argument that is a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value
