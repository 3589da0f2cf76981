"""The scale benchmark's own logic: what is derived from times, and the page. No time is measured or judged here."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.scale import scale as scale_module
from tests.support.paths import ROOT


@pytest.fixture
def scale() -> ModuleType:
    """The module."""
    return scale_module


def measured(scale: ModuleType, **changes: Any) -> dict[str, Any]:
    """A small run of one router."""
    given = {"workload": "toolbench", "requests": 400, "workers": 4, "routers": 4, **changes}
    found: dict[str, Any] = scale.measured(scale.Cell(**given))
    return found


def test_every_request_of_the_fleet_reaches_the_router_once(scale: ModuleType) -> None:
    found = measured(scale)
    own, others = found["calls"]["schedule"]["count"], found["frames"]["placed"]
    assert own + others == found["requests_counted"] == 200
    assert 20 < own < 80, "a fourth of them"
    assert found["frames"]["own placed"] == own
    assert found["counts"]["peer_events_ignored"] == found["counts"]["unknown_requests"] == 0
    assert found["counts"]["peer_requests"] >= others
    for what in ("first_token", "finish"):
        assert found["calls"][what]["count"] >= own, "those that began before times counted end, too"


def test_a_router_that_is_alone_is_reported_of_no_requests(scale: ModuleType) -> None:
    found = measured(scale, routers=1)
    assert found["calls"]["schedule"]["count"] == 200
    assert not {"placed", "own placed", "ended", "prefilled"} & set(found["frames"])
    assert scale.bytes_in(found)["told"] == 0


def test_full_caches_reports_of_evictions_and_blocks_stand_for_them(scale: ModuleType) -> None:
    crowded = {"requests": 1000, "workers": 1}
    assert measured(scale, **crowded)["events"]["evicted"] > 0
    blocks = measured(scale, told="blocks", **crowded)
    assert blocks["events"]["stored"] > 0 and blocks["events"]["evicted"] > 0
    assert "placed" not in blocks["events"]


def calls(**means: float) -> dict[str, Any]:
    return {name.replace("_", " "): {"count": 10, "p50_us": mean} for name, mean in means.items()}


def a_run() -> dict[str, Any]:
    """A run whose sums can be done in the head: 10 own requests, 10 of others."""
    times = calls(schedule=5.0, finish=4.0, submit_encode=10.0, chunk_decode=2.0, tick=100_000.0)
    times |= {"first_token": {"count": 10, "p50_us": 1.0}}
    times |= calls(own_placed_decode=20.0, placed_decode=20.0, placed_apply=40.0, evicted_decode=2.0, evicted_apply=6.0)
    frames = {"chunk": 50, "submit": 10, "own placed": 10, "placed": 10, "evicted": 10}
    sizes = {"chunk": 500, "submit": 1000, "own placed": 1000, "placed": 1000, "evicted": 400}
    return {"calls": times, "frames": frames, "events": frames, "bytes": sizes, "requests_counted": 20}


def test_what_a_request_costs_is_the_sum_of_its_parts(scale: ModuleType) -> None:
    cost = scale.costs(a_run())
    assert cost == {
        "decide_us": 10.0,
        "stream_us": 20.0,
        "passed_by_us": 20.0,
        "decode_us": 20.0,
        "apply_us": 40.0,
        "cache_us": 4.0,
        "tick_share": 0.1,
    }
    assert scale.per_request_us(cost, 1) == 54.0
    assert scale.per_request_us(cost, 10) == pytest.approx(5.0 + 54.0 + 4.0)
    assert scale.full_at(cost, 1) == pytest.approx(0.9e6 / 54.0)
    assert scale.full_at({**cost, "tick_share": 1.2}, 1) == 0.0
    assert scale.bytes_in(a_run()) == {"told": 100.0, "cache": 20.0, "answers": 25.0}
    assert scale.events_per_request(a_run()) == 1.5


def test_the_least_limit_comes_first_and_parts_of_a_core_add_up(scale: ModuleType) -> None:
    run = {
        **a_run(),
        "workers": 10,
        "routers": 2,
        "per_second": 100.0,
        "tree": {"bytes_max": 90, "bytes_used": 10, "nodes": 4, "shed_nodes": 2},
    }
    found = {"placed_us": 90.0, "ended_us": 50.0, "placed_without_us": 50.0, "ended_without_us": 30.0}
    found |= {"raised": {"idle_us_per_second": 500.0}, "default": {"links": 7}}
    assert scale.socket_us(found) == 30.0
    assert scale.frames_in(run, 2) == 1.5 + 2.5
    alone = scale.workers_of_a_core(run, found, 2)
    assert alone["frames through sockets"] == pytest.approx(1e6 / (10 * 4 * 30))
    assert alone["ticks"] == pytest.approx(1e6 / 10_000)
    together = alone.pop("all of these")
    assert 1 / together == pytest.approx(sum(1 / count for count in alone.values()))
    rows = scale.limits(run, found)
    assert rows == sorted(rows) and rows[0] == (7.0, "links with ZeroMQ's default number of sockets")
    assert (60.0, "max_bytes of the prefix tree, by default") in rows


def test_a_quick_run_fills_the_page_and_only_between_its_markers(
    scale: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, kept = tmp_path / "scale.md", scale.Kept(tmp_path / "kept.jsonl")
    monkeypatch.setattr(scale, "in_own_process", lambda work, *arguments: work(*arguments))
    record = scale.run_all(True, kept, "", None)
    page.write_text(f"before\n{scale.BEGIN}\nlast week\n{scale.END}\nafter\n")
    scale.write_docs(record, page)
    text = page.read_text()
    assert text.startswith(f"before\n{scale.BEGIN}\n") and text.endswith(f"{scale.END}\nafter\n")
    assert "last week" not in text and "another's: placed, book" in text and "nothing: 8 were asked for" in text
    again = scale.run_all(True, scale.Kept(tmp_path / "kept.jsonl"), "", None)
    assert [again[name]["runs"] for name in again] == [record[name]["runs"] for name in record], "not run again"
    for rows in text.split("\n\n"):
        widths = {line.count(" | ") for line in rows.splitlines() if line.startswith("| ")}
        assert len(widths) <= 1, rows


def test_the_committed_page_shows_the_committed_result(scale: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(scale.PAGE.read_text())
    scale.write_docs(json.loads((ROOT / "benchmarks/results/scale.json").read_text()), page)
    assert page.read_text() == scale.PAGE.read_text()
