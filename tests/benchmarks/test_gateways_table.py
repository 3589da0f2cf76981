"""The table of several gateways before attached servers: what stands on the page is what was recorded, and a small cell
runs."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from benchmarks.common.paths import RESULTS
from benchmarks.scale import gateways, routers

SOURCES: Any = gateways.SOURCES
FLEETS: Any = gateways.FLEETS


def test_the_page_has_the_recorded_figures_and_says_where_they_miss_the_bars() -> None:
    record = json.loads((RESULTS / "gateways.json").read_text())
    page = gateways.PAGE.read_text()
    assert gateways.section(record) in page
    found = {gateways._cell(line["cell"]): line["figures"] for line in record["cells"]}
    cells = {(cell.workload, cell.fleet) for cell in found}
    assert cells == set(itertools.product(gateways.SOURCES, gateways.FLEETS))
    summary = page.partition(gateways.BEGIN)[2].partition("\n\n")[0]
    hits, late = summary.split("times its p99 TTFT")
    for workload, fleet in cells:
        named = f"{routers.SOURCES[workload].title} ({gateways.FLEETS[fleet].title.lower()})"
        ratios = [gateways.ratio(found, workload, fleet, gateways.EIGHT, name) for name in gateways.MEASURES]
        assert (ratios[0] < 0.98) == (named in hits) and (ratios[2] > 1.1) == (named in late.partition(";")[0])
        assert ratios[0] > 0.94 and ratios[2] < 1.25
    assert all(figures["unfinished"] == 0 for figures in found.values())


def test_a_small_cell_runs_and_silent_gateways_find_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "toolbench", routers.Source("ToolBench", 200, 6400, 200))
    monkeypatch.setitem(FLEETS, "few", gateways.BusyFleet("Few", 6, 1.0, 1 / 16))
    arms = (gateways.ONE, gateways.EIGHT, gateways.SILENT)
    gateways.requests_of.cache_clear()
    try:
        found = {arm: gateways.run(gateways.GatewayCell("toolbench", 3, arm, "few")) for arm in arms}
    finally:
        gateways.requests_of.cache_clear()
    one, told, silent = (found[arm]["hit_fraction"] for arm in arms)
    assert told >= 0.95 * one > silent
    assert all(figures["unfinished"] == 0 for figures in found.values())


def test_each_fleet_has_requests_of_its_own_number_and_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "toolbench", routers.Source("ToolBench", 200, 3200, 320))
    gateways.requests_of.cache_clear()
    try:
        for name, fleet in gateways.FLEETS.items():
            for workload, count in {
                "toolbench": 3200 * fleet.size,
                **({"mooncake": 480} if name == "two" else {}),
            }.items():
                times = [one.arrival_seconds for one in gateways.requests_of(workload, 3, name).requests]
                wanted = routers.SOURCES[workload].rps * fleet.speed * fleet.workers / routers.WORKERS
                assert len(times) == count
                assert len(times) / (max(times) - min(times)) == pytest.approx(wanted, rel=0.15), (name, workload)
    finally:
        gateways.requests_of.cache_clear()
