"""The comparison of router counts: a small cell runs, and the page is made of the recorded ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.scale import routers as module
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def routers() -> Any:
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
