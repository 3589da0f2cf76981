"""The comparison of router counts: a small cell runs, and the page is made of the recorded ones."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def routers() -> Any:
    sys.path.append(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("routers_table", ROOT / "benchmarks/routers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["routers_table"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_recorded_figures(routers: Any) -> None:
    record = json.loads((ROOT / "benchmarks/results/routers.json").read_text())
    assert routers.section(record).strip() in (ROOT / "docs/results.md").read_text()


def test_every_workload_count_and_delay_is_recorded(routers: Any) -> None:
    record = json.loads((ROOT / "benchmarks/results/routers.json").read_text())
    found = {routers.Cell(**line["cell"]) for line in record["cells"]}
    for name in routers.SOURCES:
        for seed in routers.SEEDS:
            assert {routers.Cell(name, seed, 0.05, count) for count in routers.ROUTERS} <= found
            assert {routers.Cell(name, seed, delay, 8) for delay in routers.DELAYS} <= found
    assert all(line["figures"]["unfinished"] == 0 for line in record["cells"])


def test_a_small_cell_runs(routers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "SOURCES", {"toolbench": routers.Source("ToolBench", 60, 200, 20)})
    figures = routers.run(routers.Cell("toolbench", 3, 0.05, 4))
    assert figures["unfinished"] == 0 and 0.5 < figures["hit_fraction"] < 1.0


def test_mooncake_is_all_of_its_samples(routers: Any) -> None:
    workload = routers.mooncake(10.0, 1)
    assert len(workload.requests) == 2401
    assert 200 < workload.requests[-1].arrival_seconds < 280
