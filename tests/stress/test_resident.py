"""`max_bytes` against what the process grows by: within 2 %, when it is full, when a third has been shed, and after a
churn of lengths. Owns the bounds; `stress/resident.py` owns the traffic and the measure."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

from tests.stress.leaks import measure
from tests.stress.resident import SMAPS

RunPython = Callable[..., subprocess.CompletedProcess[str]]
MAX_BYTES = 64 << 20
WITHIN = 0.02  # of what the scheduler says; a longer churn fragments malloc's memory further (docs/benchmarks.md)

pytestmark = pytest.mark.skipif(
    measure() is None or not SMAPS.exists(), reason="this system reports neither malloc's sum nor a process's pages"
)


def test_the_process_grows_by_what_the_scheduler_says(run_python: RunPython) -> None:
    ended = run_python("-m", "tests.stress.resident", "--max-bytes", str(MAX_BYTES), "--churn", "9000")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    phases = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [phase["phase"] for phase in phases] == ["full", "shed", "churned", "churned", "churned"]
    for phase in phases:
        assert 0.95 * MAX_BYTES < phase["says_bytes"] <= phase["max_bytes"] == MAX_BYTES
        for measured in ("malloc_bytes", "resident_bytes"):
            assert abs(phase[measured] - phase["says_bytes"]) <= WITHIN * phase["says_bytes"], (phase, measured)
    assert phases[-1]["shed_nodes"] > phases[1]["shed_nodes"] > 10_000
