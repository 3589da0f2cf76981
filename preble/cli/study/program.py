"""`preble study` from files to table, JSON and figures. Owns options, order and what is said."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ... import workloads
from ...errors import InvalidInput, MissingExtra
from .. import own_data
from ..console import can_draw, positive_int, write_json
from . import plot, report
from .statistics import Study, measure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="prompt or trace files")
    own_data.add_options(parser.add_argument, "mistral where it is installed, else words")
    parser.add_argument("--limit", type=positive_int, metavar="N", help="only the first N requests of each file")
    parser.add_argument(
        "--output", type=Path, default=Path("study-out"), metavar="DIR", help="figures and JSON (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="everything measured (default: DIR/study.json)")


def run(args: argparse.Namespace) -> int:
    """Study `args.files`. Raises `InvalidInput` for too many or one that cannot be read, `MissingExtra`."""
    if len(args.files) > plot.LINES_MAX:
        raise InvalidInput(f"FILE: at most {plot.LINES_MAX} can be distinguished in one figure, got {len(args.files)}")
    studies = [study_file(path, args) for path in args.files]
    report.write_table(studies, sys.stdout)
    for study in studies:
        sys.stdout.write(f"{study.source}\n" + "".join(f"note: {note}\n" for note in study.notes))
    sys.stdout.write(f"{report.made_by()}\n")
    json_path = args.json or args.output / "study.json"
    write_json(json_path, report.document(studies, {"tokenizer": args.tokenizer, "limit": args.limit}))
    sys.stdout.write(f"JSON: {json_path}\n")
    draw_figures(studies, args.output)
    return 0


def default_tokenizer() -> workloads.Tokenizer:
    """The paper's where it is installed."""
    try:
        return workloads.mistral()
    except MissingExtra:
        return workloads.words()


def study_file(path: Path, args: argparse.Namespace) -> Study:
    """Read one file and measure it; says on stderr how long it took."""
    started = time.monotonic()
    workload = own_data.read(args, path, args.limit, default_tokenizer)
    read = time.monotonic()
    study = measure(workload)
    seconds = f"{read - started:.1f} s to read, {time.monotonic() - read:.1f} s to study"
    sys.stderr.write(f"{study.name}: {study.requests} requests, {study.nodes} nodes in the radix tree, {seconds}\n")
    return study


def draw_figures(studies: Sequence[Study], directory: Path) -> None:
    """Draw what there is something for, and say what was left out and why."""
    if not can_draw("No figures: they need"):
        return
    plot.draw_figure_4(directory / "figure4.png", studies, report.made_by())
    sys.stdout.write(f"Figure 4: {directory / 'figure4.png'}\n")
    if any(study.gap_seconds is not None for study in studies):
        plot.draw_figure_5(directory / "figure5.png", studies, report.made_by())
        sys.stdout.write(f"Figure 5: {directory / 'figure5.png'}\n")
    else:
        sys.stdout.write("No figure 5: none of these workloads has arrivals\n")
