"""Builds the core for CPython without its lock in a copy of its own, `build/free-threaded`, and runs there the core's
tests and threads of every kind: `make test-free-threaded`. The build in place stays as it is.

Owns which tests those are. Exits with a text where the interpreter has its lock on, since the run would mean nothing.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from tests.stress.sanitize import copy_sources, say
from tests.stress.without_msgspec import MISSING
from tests.support.paths import ROOT

TARGET = ROOT / "build" / "free-threaded"
TESTS = (
    *("tests/core", "tests/costs", "tests/kv_index", "tests/policies", "tests/scheduling", "tests/snapshot"),
    *("tests/test_scheduler.py", "tests/test_scheduler_machine.py"),
    "tests/stress/test_threads.py",  # not test_allocation.py: it wants malloc for Python's own, which this has not
)


def main(arguments: list[str]) -> int:
    """Copy, build, run; the exit status."""
    has_lock: Any = getattr(sys, "_is_gil_enabled", lambda: True)
    if has_lock():
        sys.exit(f"the lock is on: {sys.executable} is built with it")
    if MISSING:
        say("no msgspec for this Python: tests that reach it are skipped")
    copy_sources(TARGET)
    for command in (
        ["setup.py", "--quiet", "build_ext", "--inplace"],
        ["-m", "pytest", "-p", "tests.stress.without_msgspec", *TESTS, *arguments],
        ["-m", "tests.stress.threads"],
    ):
        ended = subprocess.run([sys.executable, *command], cwd=TARGET, check=False)
        if ended.returncode:
            return ended.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
