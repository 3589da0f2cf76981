"""Two threads against one, on several interpreters: what a shared scheduler scales to without Python's lock, and with
it. Owns that comparison; the work of a thread is `scaling.py`'s.

Each interpreter given (by path or name; the core must be built for it, `python setup.py build_ext --inplace`) runs in
a process of its own, in turn, `rounds` times. There one thread does a piece of work, then two threads do such a piece
each on one scheduler, then on a scheduler each: the last is what interpreter and machine allow where nothing of
Preble's is shared. Methods are bound once a thread: looked up at each call, two threads count references to one object.
Figures are medians over the rounds.

    python -m benchmarks.decision.free_threads .venv-free/bin/python .venv/bin/python --shape toolbench200 --rounds 5
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from functools import partial
from typing import Any

from benchmarks.common.paths import ROOT
from benchmarks.common.tables import markdown
from benchmarks.decision.scaling import Work, seconds_together, warmed_operations
from benchmarks.decision.shapes import prompts

KINDS = ("match", "mixed", "schedule")
COLUMNS = ["interpreter", "GIL", "work", "1 thread, k/s", "2 threads, k/s", "2 / 1", "two schedulers, 2 / 1"]


def each_its_own(works: list[Work], parts: list[list[Any]], part: list[Any]) -> None:
    """A thread's work on the scheduler that is its own."""
    works[next(at for at, one in enumerate(parts) if one is part)](part)


def measured(cell: dict[str, Any]) -> dict[str, Any]:
    """Operations per second of every kind of work, in this process."""
    stream = prompts(cell["shape"], cell["count"], seed=cell["seed"])
    warm, rest = stream[: len(stream) // 4], stream[len(stream) // 4 :]
    half = len(rest) // 2
    parts: list[list[Any]] = [list(rest[:half]), list(rest[half : 2 * half])]
    gc.collect()
    gc.freeze()
    found: dict[str, Any] = {
        "interpreter": platform.python_version(),
        "gil": getattr(sys, "_is_gil_enabled", lambda: True)(),
        "cores": len(os.sched_getaffinity(0)),
    }
    for kind in KINDS:
        fresh = partial(warmed_operations, warm, cell["workers"], kind)
        one = seconds_together(fresh(), parts[:1])
        two = seconds_together(fresh(), parts)
        apart = seconds_together(partial(each_its_own, [fresh(), fresh()], parts), parts)
        found[kind] = {"one": half / one, "two": 2 * half / two, "apart": 2 * half / apart}
    return found


def run_child(interpreter: str, cell: dict[str, Any]) -> dict[str, Any]:
    """`measured` by another interpreter."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    command = [interpreter, "-m", "benchmarks.decision.free_threads", "--child", json.dumps(cell)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """The medians, one line for each interpreter and kind of work."""
    lines = []
    for rounds in runs.values():
        for kind in KINDS:
            one, two = (statistics.median(run[kind][name] for run in rounds) for name in ("one", "two"))
            shared, apart = (
                statistics.median(run[kind][name] / run[kind]["one"] for run in rounds) for name in ("two", "apart")
            )
            line = [rounds[0]["interpreter"], "on" if rounds[0]["gil"] else "off", kind]
            lines.append([*line, f"{one / 1e3:.0f}", f"{two / 1e3:.0f}", f"{shared:.2f}", f"{apart:.2f}"])
    return markdown(COLUMNS, lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Two threads against one, by several interpreters in turn.")
    parser.add_argument("interpreters", nargs="*", help="paths or names; the first is usually a free-threaded one")
    parser.add_argument("--shape", default="toolbench200")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--count", type=int, default=8000, help="prompts; the first quarter warms the scheduler up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="also write every round's figures here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        print(json.dumps(measured(json.loads(chosen.child))))
        return 0
    cell = {name: getattr(chosen, name) for name in ("shape", "workers", "count", "seed")}
    runs: dict[str, list[dict[str, Any]]] = {}
    for interpreter in chosen.interpreters or [sys.executable]:
        if shutil.which(interpreter) is None:
            parser.error(f"there is no interpreter {interpreter!r}")
        runs[interpreter] = []
    for _ in range(chosen.rounds):
        for interpreter, rounds in runs.items():
            rounds.append(run_child(interpreter, cell))
    print(table(runs))
    if chosen.json:
        with open(chosen.json, "w") as out:
            json.dump({**cell, "runs": runs}, out, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
