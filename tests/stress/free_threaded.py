"""Builds the core for CPython without its lock in a copy of its own, `build/free-threaded`, and runs there the core's
tests and threads of every kind: `make test-free-threaded`. The build in place stays as it is.

Owns which tests those are. Exits with a text where the interpreter has its lock on, since the run would mean nothing.
It is pytest's plugin there, too: where msgspec has no build for this Python, tests that reach it are skipped, and so
counted, not failed.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Generator
from typing import Any

import pytest

from tests.stress.sanitize import copy_sources, say
from tests.support.paths import ROOT

MISSING = importlib.util.find_spec("msgspec") is None
SAYS = "No module named 'msgspec'"
REASON = "Skipped: msgspec has no build for this Python"
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
        ["-m", "pytest", "-p", "tests.stress.free_threaded", *TESTS, *arguments],
        ["-m", "tests.stress.threads"],
    ):
        ended = subprocess.run([sys.executable, *command], cwd=TARGET, check=False)
        if ended.returncode:
            return ended.returncode
    return 0


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file whose imports reach it."""
    report = yield
    judge(report, str(collector.path))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that does."""
    report = yield
    judge(report, str(item.path))
    return report


def judge(report: Any, path: str) -> None:
    """Make a failure a skip, if it is for want of msgspec."""
    if MISSING and report.failed and SAYS in str(report.longrepr):
        report.outcome, report.longrepr = "skipped", (path, 0, REASON)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
