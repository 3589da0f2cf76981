"""The evaluation's command: what is simulated has definitions, results are kept and made again byte for byte, and the
page's arithmetic is right. The simulations themselves are the simulator's tests'."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytest.importorskip("matplotlib", reason="the evaluation draws with matplotlib (extra bench)")

from benchmarks.paper import (
    cells,
    figure7,
    figure9,
    figure10,
    measured,
    page,
    published,
    run,
    setups,
    terms,
    throughput,
)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", [name for name in run.EXPERIMENTS if name not in ("contest", "figure10", "fleets")])
def test_every_cell_of_the_grids_is_defined_and_there_once(name: str, quick: bool) -> None:
    grid = list(run.EXPERIMENTS[name].grid(quick))
    assert len(set(grid)) == len(grid)
    for cell in grid:
        assert cell.system in setups.SYSTEMS and cell.fleet in setups.FLEETS
        assert cell.workload in {**setups.SOURCES, **setups.AZURE_TIMES}
        assert cell.share == (0.1 if quick else 1.0)


def test_the_ablation_adds_one_part_at_a_time() -> None:
    """Each stage of a rule has what the one before has, and its plans or the queue's order more; the last ships."""
    stages = list(figure10.STAGES.values())
    assert stages[0].system == "oracle" and stages[-1] == replace(
        stages[-1], system="e2", scheduler={}, order="priority"
    )
    for before, after in pairwise(stages[1:]):
        changed = (before.scheduler != after.scheduler) + (before.order != after.order)
        assert changed == 1 or (before.system, after.system) == ("e2-paper", "e2")
    quick, full = list(figure10.grid(True)), list(figure10.grid(False))
    assert len(set(full)) == len(full) and {cell.stage for cell in quick} == set(figure10.STAGES)
    assert {(cell.rps, cell.seed, cell.stage) for cell in quick} < {(cell.rps, cell.seed, cell.stage) for cell in full}


def test_quick_grids_are_parts_of_the_full_ones() -> None:
    def places(quick: bool) -> set[tuple[str, ...]]:
        return {(c.workload, c.fleet, c.system, str(c.rps)) for c in [*figure7.grid(quick), *figure9.grid(quick)]}

    assert places(True) < places(False)


def small(store: Path, out: Path) -> bytes:
    """Figure 9 in its quick form through the command; the page and its picture."""
    arguments = ["--quick", "--only", "figure9", "--store", str(store), "--out", str(out)]
    assert run.main(arguments) == 0
    return (out / "results.md").read_bytes() + (out / "figures/figure9.png").read_bytes()


def test_the_page_is_the_same_from_what_is_kept_and_made_anew(tmp_path: Path) -> None:
    first = small(tmp_path / "store", tmp_path / "a")
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "store").iterdir()}
    assert len(kept) == len(list(figure9.grid(True)))
    assert small(tmp_path / "store", tmp_path / "b") == first
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "store").iterdir()} == kept, "nothing ran again"
    assert small(tmp_path / "other", tmp_path / "c") == first


def test_an_interrupted_evaluation_runs_only_what_is_missing(tmp_path: Path) -> None:
    grid = list(figure9.grid(True))[:4]
    ran: list[cells.Cell] = []

    found = cells.run_all(grid, tmp_path, "test")
    store = cells.Store(tmp_path)
    for cell in grid:
        assert store.get(cell) == found[cell]
    again = cells.run_all(grid, tmp_path, "test", lambda place, directory: ran.extend(place) or {})
    assert again == found and ran == []


def test_other_sources_are_other_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = next(iter(figure9.grid(True)))
    store = cells.Store(tmp_path)
    store.put(cell, {"mean": 1.0})
    assert store.get(cell) == {"mean": 1.0}
    monkeypatch.setattr(cells, "sources_digest", lambda *_: "changed")
    assert store.get(cell) is None


def test_what_is_kept_is_rounded_to_what_is_shown_at_most() -> None:
    assert cells.rounded({"a": 1.23456789, "b": 7, "c": "x"}) == {"a": 1.23457, "b": 7, "c": "x"}


def test_deviation_is_over_points_below_the_knee() -> None:
    curve = published.Curve(
        "7", "video_qa", 2, "preble", "mean_latency",
        tuple(published.Point(rps, value) for rps, value in ((1, 2.0), (2, 4.0), (3, 8.0), (4, 80.0))),
        "digitised", None, "test",
    )  # fmt: skip
    cell = cells.Cell("figure7", "videoqa", "2xa6000", "e2", 0.0)
    values = {1: 2.2, 2: 2.0, 3: 8.0, 4: 1.0}
    found = {
        cells.Cell("figure7", "videoqa", "2xa6000", "e2", rps): {"mean_latency_seconds": value}
        for rps, value in values.items()
    }
    both = terms.pairs(found, [curve], cell)
    assert both == [(2.0, 2.2), (4.0, 2.0), (8.0, 8.0)], "80 is beyond four times the lowest"
    assert terms.deviation(both) == pytest.approx(0.1)
    assert math.isnan(terms.deviation([]))


def test_gains_are_the_baseline_over_ours() -> None:
    found = {}
    for rps, ours, theirs in ((1, 1.0, 1.5), (2, 2.0, 9.0), (3, 10.0, 20.0)):
        for system, value in (("e2", ours), ("rr", theirs)):
            found[cells.Cell("figure7", "loogle", "2xa6000", system, rps)] = {"mean_latency_seconds": value}
    assert figure7.best_gain(found, "2xa6000", "loogle", "e2", "rr", "mean_latency_seconds") == (2, 4.5)


def test_numbers_and_tables_read_well() -> None:
    assert [page.number(x) for x in (0.01234, 12.345, 1234.5, math.nan)] == ["0.0123", "12.3", "1,234", "-"]
    assert [page.ratio(x) for x in (0.5, 12.34, math.nan)] == ["0.50x", "12.3x", "-"]
    assert page.table(["a", "b"], [["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"


def test_prose_is_wrapped_in_paragraphs_and_items() -> None:
    text = page.prose("    One\n    two.\n\n    - first\n      item\n    - second\n\n    End.\n")
    assert text == "One two.\n\n- first item\n- second\n\nEnd.\n"
    assert all(len(line) <= 120 for line in page.prose("word " * 100).splitlines())


def test_the_throughput_table_says_what_the_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {f"{title}|{workers}": 634 * workers for title in throughput.STREAMS for workers in (2, 64)}
    kept = {"commit": "abc", "machine": {"processor": "P", "cores": 2}, "requests": 50_000, "rows": rows}
    (tmp_path / "t.json").write_text(json.dumps(kept))
    monkeypatch.setattr(throughput, "RESULTS", tmp_path / "t.json")
    text = throughput.section({})
    assert "abc on P, 2 cores" in text and "| ToolBench, 200 tools | 634 | 1,268 | 40,576 | 2x |" in text


def test_measured_sections_stand_at_the_pages_end_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "ray.md").write_text("## Ray\n\nfirst\n")
    page_text = measured.with_sections("# Results\n\nown\n", tmp_path)
    assert page_text == f"# Results\n\nown\n\n{measured.MARKER}\n\n## Ray\n\nfirst\n"
    (tmp_path / "routers.md").write_text("## Routers\n")
    (tmp_path / "ray.md").write_text("## Ray\n\nsecond\n")
    page_text = measured.with_sections(page_text, tmp_path)
    assert page_text == f"# Results\n\nown\n\n{measured.MARKER}\n\n## Routers\n\n## Ray\n\nsecond\n"
    assert measured.with_sections(page_text, tmp_path) == page_text


def test_the_committed_page_ends_with_the_committed_sections() -> None:
    text = (ROOT / "docs/results.md").read_text()
    again = measured.with_sections(text, ROOT / "benchmarks/results")
    assert text == again, "run: python -m benchmarks.paper.measured"
