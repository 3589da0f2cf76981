"""The comparison of threads by interpreter runs, and its table holds medians. Owns no figures."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.decision.free_threads import COLUMNS, KINDS, table
from tests.support.paths import ROOT


def test_one_interpreter_gets_a_line_for_each_kind_of_work() -> None:
    command = [sys.executable, "-m", "benchmarks.decision.free_threads", "--rounds", "1", "--count", "64"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.strip().splitlines()
    assert [line.split(" | ")[2] for line in lines[2:]] == list(KINDS)
    assert all(line.count("|") == len(COLUMNS) + 1 for line in lines)


def test_figures_are_medians_of_each_rounds_own_ratio() -> None:
    rounds = [
        {"interpreter": "3.13.0", "gil": False, **dict.fromkeys(KINDS, {"one": one, "two": two, "apart": 2 * one})}
        for one, two in ((1000.0, 1500.0), (2000.0, 2000.0), (500.0, 800.0))
    ]
    assert table({"python": rounds}).splitlines()[2] == "| 3.13.0 | off | match | 1 | 2 | 1.50 | 2.00 |"


def test_an_interpreter_that_is_not_there_is_named() -> None:
    command = [sys.executable, "-m", "benchmarks.decision.free_threads", "no-such-python"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "there is no interpreter 'no-such-python'" in done.stderr
