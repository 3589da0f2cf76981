"""What a process pays before its first decision: CPU milliseconds of fresh processes, in turn, medians.

    python -m benchmarks.decision.first_scheduler --repetitions 20

Prints one JSON object: for each step its own milliseconds beyond Python's start, and these. Modules are compiled to
bytecode beforehand, as they are where they were installed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys

from benchmarks.common.facts import environment
from benchmarks.common.paths import ROOT

START = "python itself"
PROGRAMS = {
    START: "pass",
    "import preble": "import preble",
    "a first decision": "import preble; preble.GlobalScheduler(['a', 'b']).schedule([1, 2, 3])",
    "import dataclasses": "import dataclasses",
    "import numpy": "import numpy",
}


def cpu_ms(program: str) -> float:
    """CPU milliseconds, of user and system, of a process that runs a program. Raises RuntimeError if it fails."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = os.posix_spawn(sys.executable, [sys.executable, "-c", program], {**kept, "PYTHONPATH": str(ROOT)})
    _, status, used = os.wait4(process, 0)
    if status:
        raise RuntimeError(f"{program!r} ended with {os.waitstatus_to_exitcode(status)}")
    return 1e3 * (used.ru_utime + used.ru_stime)


def measured(repetitions: int) -> dict[str, float]:
    """Median milliseconds of each program; those of the steps beyond Python's start."""
    taken: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for repetition in range(repetitions + 1):
        for name, program in PROGRAMS.items():
            used = cpu_ms(program)
            taken[name] += [used] if repetition else []  # the first ones compile
    medians = {name: statistics.median(values) for name, values in taken.items()}
    return {name: round(value - (medians[START] if name != START else 0.0), 2) for name, value in medians.items()}


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20)
    asked = parser.parse_args()
    sys.stdout.write(
        json.dumps({"cpu_ms": measured(asked.repetitions), "environment": environment(0)}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
