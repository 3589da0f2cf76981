"""The table of several gateways before attached servers: what stands on the page is what was recorded, and a small cell
runs."""

from __future__ import annotations

import json

import pytest

from benchmarks.common.paths import RESULTS
from benchmarks.scale import gateways, routers


def test_the_page_has_the_recorded_figures_and_they_keep_the_bars() -> None:
    record = json.loads((RESULTS / "gateways.json").read_text())
    assert gateways.section(record) in gateways.PAGE.read_text()
    found = {gateways._cell(line["cell"]): line["figures"] for line in record["cells"]}
    eight = gateways.Arm("e2", 8, gateways.DELAY_SECONDS)
    for workload in {cell.workload for cell in found}:
        assert gateways.ratio(found, workload, eight, "hit_fraction") >= 0.98
        assert gateways.ratio(found, workload, eight, "p99_ttft_seconds") <= 1.1


def test_a_small_cell_runs_and_silent_gateways_find_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "WORKERS", 6)
    source = routers.Source("ToolBench", 40, 400, 40)
    monkeypatch.setitem(routers.SOURCES, "toolbench", source)  # type: ignore[arg-type]
    routers.workload_of.cache_clear()
    try:
        found = {arm: gateways.run(gateways.GatewayCell("toolbench", 3, arm)) for arm in gateways.ARMS[:3]}
    finally:
        routers.workload_of.cache_clear()
    one, told, silent = (found[arm]["hit_fraction"] for arm in gateways.ARMS[:3])
    assert told >= 0.95 * one > silent
    assert all(figures["unfinished"] == 0 for figures in found.values())
