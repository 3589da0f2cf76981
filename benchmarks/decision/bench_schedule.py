"""How long a decision takes: `GlobalScheduler.schedule` with E2 and everything on, beside the machine's limit and
beside peers for the same prompts. Owns the choice of what is measured and the result's file; each cell is measured in a
process of its own (`cells.py`, `peers.py`, `scheduling/autoscaling.py`, `long_run.py`), and `report.py` makes the
tables.

Placement (hit fraction, load spread) is printed with the speed, because speed bought with bad placement does not count.

    python -m benchmarks.decision.bench_schedule                    every shape, 8, 64 and 512 workers, buffers, lists
    python -m benchmarks.decision.bench_schedule --shapes toolbench200 --workers 8 --tokens buffer
    python -m benchmarks.decision.bench_schedule --threads 1 2      also two threads against one
    python -m benchmarks.decision.bench_schedule --peers            also the peers (`make peers` installs them)
    python -m benchmarks.decision.bench_schedule --long-run 1000000 also the long run
    python -m benchmarks.decision.bench_schedule --everything --runs 3 --json RESULT --docs     what `make bench` runs
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.facts import environment
from benchmarks.common.paths import ROOT
from benchmarks.common.tables import rounded
from benchmarks.decision import report
from benchmarks.decision.shapes import DEFAULT_TRACE, LONG, SHAPES

PEERS = ("dynamo-radix", "dynamo-select", "ray")
PEER_SHAPES_MANY_WORKERS = ("toolbench200", "toolbench1500-zipf")  # elsewhere peers are driven with 8 workers only
SCALING_CELLS = (("toolbench200", False), ("toolbench200", True), ("videoqa", False), ("loogle", False))
CELL_SECONDS_MAX = 900
Found = dict[str, Any]


def run_child(module: str, wanted: Found, python: str = sys.executable) -> Found | str:
    """The line of JSON that a measuring process prints, or what it said when it failed."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    done = subprocess.run(
        [python, "-m", f"benchmarks.decision.{module}", json.dumps(wanted)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=CELL_SECONDS_MAX,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        found: Found = json.loads(lines[-1])
        return found
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"exit status {done.returncode}"


class Measurement:
    """One run of everything that was asked for; what could not be measured is kept with its reason."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.shapes = [shape for shape in args.shapes if shape != "mooncake" or args.trace.exists()]
        self.left_out: dict[str, str] = {}
        if len(self.shapes) < len(args.shapes):
            self.leave_out("mooncake", "its trace is not there; --trace PATH names it")

    def leave_out(self, what: str, why: str) -> None:
        """Say it now and keep it for the result."""
        if what not in self.left_out:
            print(f"{what} left out: {why}", file=sys.stderr)
        self.left_out[what] = why

    def wanted(self, shape: str, workers: int, **more: Any) -> Found:
        """What every measuring process is reported."""
        count = self._args.count // 4 if shape in LONG else self._args.count
        cell = {"shape": shape, "workers": workers, "count": count, "seed": self._args.seed}
        return {**cell, "trace": str(self._args.trace), **more}

    def one_run(self) -> Found:
        """All parts, one after the other."""
        found: Found = {"load_1_minute": round(os.getloadavg()[0], 2), "cells": list(self.cells())}
        if max(self._args.threads) > 1:
            found["scaling"] = list(self.scaling())
        if self._args.long_run:
            workers = self._args.workers[0]
            wanted = {"requests": self._args.long_run, "workers": workers, "seed": self._args.seed}
            found["long_run"] = list(self.kept("long run", run_child("long_run", wanted)))
        if self._args.core:
            found["core"] = list(self.core())
        if self._args.peers:
            digests = {cell["shape"]: cell["digest"] for cell in found["cells"]}
            found["peers"] = list(self.peers(digests))
        return found

    def kept(self, what: str, found: Found | str) -> Iterator[Found]:
        """The figures, or nothing and a note."""
        if isinstance(found, str):
            self.leave_out(what, found)
            return
        print(report.progress(what, found), flush=True)
        yield found

    def cells(self) -> Iterator[Found]:
        """Preble beside the limit."""
        for shape in self.shapes:
            for workers in self._args.workers:
                for tokens in self._args.tokens:
                    wanted = self.wanted(shape, workers, as_list=tokens == "list")
                    yield from self.kept(f"{shape}, {workers} workers, {tokens}", run_child("cells", wanted))

    def scaling(self) -> Iterator[Found]:
        """Two threads against one."""
        for shape, as_list in SCALING_CELLS:
            if shape in self.shapes:
                ceiling = (shape, as_list) == SCALING_CELLS[0]
                wanted = self.wanted(shape, self._args.workers[0], as_list=as_list, ceiling=ceiling)
                yield from self.kept(f"threads, {shape}, as_list {as_list}", run_child("scaling", wanted))

    def core(self) -> Iterator[Found]:
        """The rows of bench_core.py."""
        out = Path(self._args.scratch) / "core.json"
        command = [sys.executable, "-m", "benchmarks.decision.bench_core"]
        command += ["--seed", str(self._args.seed), "--json", str(out)]
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL)
        if done.returncode:
            self.leave_out("core operations", "bench_core.py failed; run it alone")
            return
        yield from json.loads(out.read_text())["rows"]

    def peers(self, digests: dict[str, str]) -> Iterator[Found]:
        """The peers on the same streams."""
        python = self._args.peers_env / "bin/python"
        if not python.exists():
            self.leave_out("peers", f"no environment {self._args.peers_env.name}; `make peers` installs them")
            return
        for shape in self.shapes:
            many = shape in PEER_SHAPES_MANY_WORKERS
            for workers in self._args.workers if many else self._args.workers[:1]:
                for peer in PEERS:
                    what = f"{peer}, {shape}, {workers} workers"
                    found = run_child("peers", self.wanted(shape, workers, peer=peer), str(python))
                    if not isinstance(found, str) and found["digest"] != digests.get(shape, found["digest"]):
                        found = "its environment's numpy makes other prompts from the seed"
                    yield from self.kept(what, found)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """What to measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--workers", nargs="+", type=int, default=[8, 64, 512])
    parser.add_argument("--tokens", nargs="+", choices=("buffer", "list"), default=["buffer", "list"])
    parser.add_argument("--threads", nargs="+", type=int, choices=(1, 2), default=[1])
    parser.add_argument("--count", type=int, default=10_000, help="prompts of a shape; long ones take a quarter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=1, help="repeat all so often; tables give median and least")
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE, help="Mooncake's conversation trace")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--peers-env", type=Path, default=ROOT / ".venv-peers")
    parser.add_argument("--long-run", type=int, nargs="?", const=1_000_000, default=0, metavar="REQUESTS")
    parser.add_argument("--core", action="store_true", help="also bench_core.py")
    parser.add_argument("--everything", action="store_true", help="--threads 1 2 --long-run --core --peers")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/benchmarks.md")
    parser.add_argument("--scratch", type=Path, default=ROOT / "benchmarks/out", help="where parts are kept meanwhile")
    args = parser.parse_args(words)
    if args.everything:
        args.threads, args.core, args.peers = [1, 2], True, True
        args.long_run = args.long_run or 1_000_000
    return args


def measured(args: argparse.Namespace) -> Found:
    """Every run's figures with the facts that repeat them."""
    measurement, started = Measurement(args), time.monotonic()
    args.scratch.mkdir(parents=True, exist_ok=True)
    runs = []
    for number in range(args.runs):
        print(f"run {number + 1} of {args.runs}", flush=True)
        runs.append(measurement.one_run())
    minutes = round((time.monotonic() - started) / 60, 1)
    return {"facts": {**environment(args.seed), "minutes": minutes}, "left_out": measurement.left_out, "runs": runs}


def lines_of(parts: Iterable[str]) -> str:
    """Tables with a blank line between."""
    return "\n\n".join(part for part in parts if part)


def main() -> int:
    args = arguments()
    result = measured(args)
    print("\n" + lines_of(report.tables(result, report.before())))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rounded(result), indent=1) + "\n")
    if args.docs:
        report.write_docs(rounded(result))
    return 1 if not result["runs"][0]["cells"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
