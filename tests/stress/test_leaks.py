"""Memory over a hundred thousand operations, and that a leak would be seen. Owns sizes only; `stress/leaks.py` owns the
traffic and the bound, and runs a million operations with `make leaks`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from tests.stress.leaks import measure

RunPython = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = pytest.mark.skipif(measure() is None, reason="this C library does not say what malloc has given out")


def test_a_hundred_thousand_operations_of_every_kind_leak_nothing(run_python: RunPython) -> None:
    ended = run_python("-m", "tests.stress.leaks", "--operations", "100000")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "memory stays flat" in ended.stdout


def test_a_block_lost_in_one_of_a_hundred_operations_is_seen(run_python: RunPython) -> None:
    """Else the test above could not fail."""
    ended = run_python("-m", "tests.stress.leaks", "--operations", "100000", "--lose", "24")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "LEAK" in ended.stdout
