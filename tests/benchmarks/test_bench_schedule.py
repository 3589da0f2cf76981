"""The benchmarks' own logic: where a perfect store keeps prompts, the bars, the page. No time is measured here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from benchmarks.decision import bench_schedule, limits, report, shapes
from tests.support.paths import ROOT

PLACEHOLDER = "Not measured yet: `make bench` writes this part."


@pytest.fixture
def benchmarks() -> dict[str, ModuleType]:
    """The modules by name."""
    return {"bench_schedule": bench_schedule, "limits": limits, "report": report, "shapes": shapes}


def test_shared_data_is_looked_for_where_the_environment_says(
    run_python: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Regression: the trace was looked for beside the checkout alone, so a clone elsewhere left its cell out."""
    monkeypatch.setenv("PREBLE_SHARED", str(tmp_path))
    code = "from benchmarks.decision import shapes; from benchmarks.scale import second_pairs as second"
    found = run_python("-c", f"{code}; print(shapes.DEFAULT_TRACE, second.CONTEST)").stdout.split()
    assert len(found) == 2 and all(Path(path).is_relative_to(tmp_path) for path in found)


def stored_naively(prompts: list[Any]) -> int:
    """Tokens that a store without copies of shared prefixes holds."""
    seen: set[bytes] = set()
    for tokens in prompts:
        seen.update(tokens[:end].tobytes() for end in range(1, len(tokens) + 1))
    return len(seen)


@pytest.mark.parametrize("seed", range(20))
def test_a_perfect_store_keeps_shared_prefixes_once(benchmarks: dict[str, ModuleType], seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 3, 150).astype(np.int32)]
    for _ in range(40):
        donor = prompts[rng.integers(len(prompts))]
        tail = rng.integers(0, 32_000, rng.integers(1, 120)).astype(np.int32)
        prompts.append(np.concatenate([donor[: rng.integers(0, len(donor) + 1)], tail]))
    places = benchmarks["limits"].Places(max(map(len, prompts)))
    pool = np.full(sum(map(len, prompts)), -1, np.int32)
    for tokens in prompts:
        end = places.end
        pieces, shared = places.place(tokens)
        assert sum(count for _, count in pieces) == shared
        stored = [pool[offset : offset + count] for offset, count in pieces]
        assert np.array_equal(np.concatenate([*stored, tokens[shared:]]), tokens)
        assert all(offset + count <= end for offset, count in pieces), "only what is stored already is compared"
        pool[end : places.end] = tokens[shared:]
    slack = benchmarks["limits"].STEP_TOKENS * len(prompts)  # shared tokens behind the last known step may be copied
    assert stored_naively(prompts) <= places.end <= stored_naively(prompts) + slack


def test_the_limit_compares_what_is_stored_and_says_so_when_it_differs(benchmarks: dict[str, ModuleType]) -> None:
    module = benchmarks["limits"].compiled()
    stored, other = np.arange(64, dtype=np.int32), np.arange(64, dtype=np.int32)
    module.reset(200)
    module.prepare(np.array([], np.int64), 0)
    assert module.decide(stored) is True
    module.prepare(np.array([0, 32], np.int64), 32)
    assert module.decide(other) is True
    assert module.decide(other.tolist()) is True
    other[5] = 77
    assert module.decide(other) is False
    assert module.decide(other.tolist()) is False
    with pytest.raises(ValueError, match="full"):
        module.decide(other)
    with pytest.raises(ValueError, match="add up"):
        module.prepare(np.array([0, 32], np.int64), 31)
    with pytest.raises(TypeError, match="no int"):
        module.convert([1, "2"])


def test_streams_repeat_and_endless_prompts_are_new_but_share_their_tools(benchmarks: dict[str, ModuleType]) -> None:
    shapes = benchmarks["shapes"]
    for shape in shapes.SHAPES:
        if shape != "mooncake":
            assert shapes.digest(shapes.prompts(shape, 5, seed=3)) == shapes.digest(shapes.prompts(shape, 5, seed=3))
            assert shapes.digest(shapes.prompts(shape, 5, seed=3)) != shapes.digest(shapes.prompts(shape, 5, seed=4))
    endless = shapes.EndlessTools(2, seed=0)
    made = [endless.next_prompt().copy() for _ in range(20)]
    assert len({tokens[:500].tobytes() for tokens in made}) == 2
    assert len({tokens.tobytes() for tokens in made}) == 20


def a_run(p50_us: float, limit_us: float = 0.5, **parts: Any) -> dict[str, Any]:
    """A run in which every cell that has a bar took so long."""
    cells = []
    for shape, workers, as_list in (
        *(("toolbench200", 8, False), ("toolbench200", 8, True), ("toolbench1500-zipf", 64, False)),
        *(("toolbench200", 512, False), ("videoqa", 8, False), ("loogle", 8, False), ("mooncake", 8, False)),
    ):
        cell = {"shape": shape, "workers": workers, "as_list": as_list, "digest": "d", "ratio_to_limit": 2.0}
        cell |= {"schedule_ns_p50": p50_us * 1e3, "schedule_ns_p99": 9e3, "limit_ns_p50": limit_us * 1e3}
        cell |= {"compare_and_copy_ns_p50": 300.0, "floor_ns_p50": 100.0, "finish_ns_p50": 250.0}
        cell |= {"hit_fraction": 0.84, "load_spread": 1.1, "rss_bytes_per_prompt": 1500.0}
        cells.append({**cell, "tree_bytes_per_prompt": 1300.0})
    return {"cells": cells, **parts}


def a_result(*runs: dict[str, Any]) -> dict[str, Any]:
    return {"facts": {"commit": "abc", "command": "python x"}, "left_out": {}, "runs": list(runs)}


def verdicts(report: ModuleType, result: dict[str, Any]) -> dict[str, str]:
    """Bar -> what the table says of it."""
    rows = [line.strip("| ").split(" | ") for line in report.bars_table(result).splitlines()[2:]]
    return {row[0]: row[-1] for row in rows}


def test_a_bar_holds_only_if_it_holds_in_every_run(benchmarks: dict[str, ModuleType]) -> None:
    report, name = benchmarks["report"], "decision, toolbench200, 8 workers"
    assert verdicts(report, a_result(a_run(2.9), a_run(3.0)))[name] == "yes"
    assert verdicts(report, a_result(a_run(2.9), a_run(3.1)))[name] == "**no**"
    assert name in "\n".join(report.losses(a_result(a_run(2.9), a_run(3.1))))
    assert name not in "\n".join(report.losses(a_result(a_run(2.9), a_run(3.0))))


def test_what_was_not_measured_does_not_hold(benchmarks: dict[str, ModuleType]) -> None:
    said = verdicts(benchmarks["report"], a_result(a_run(1.0)))
    assert len(said) == len(benchmarks["report"].BARS)
    assert {name for name, verdict in said.items() if verdict == "not measured"} == {
        "rate after the long run / of a new scheduler",
        "2 threads / 1, half match, half schedule",
        "stored blocks a second, from bytes",
    }


def test_bars_on_rates_want_more(benchmarks: dict[str, ModuleType]) -> None:
    core = [{"operation": "events as bytes, 64 blocks an event", "tokens": "msgpack", "limit_ns_p50": None}]
    run = a_run(1.0, long_run=[{"ratio": 0.89}], core=[{**core[0], "per_second": 3.1e6}])
    said = verdicts(benchmarks["report"], a_result(run))
    assert said["rate after the long run / of a new scheduler"] == "**no**"
    assert said["stored blocks a second, from bytes"] == "yes"


def test_every_table_has_a_name_for_every_column(benchmarks: dict[str, ModuleType]) -> None:
    work = {"per_second_1": 9e5, "per_second_2": 1e6, "ratio": 1.1}
    ceiling = [{"releasing_gil_call_us": 1.0, "releasing_gil_ratio": 1.0, "holding_gil_ratio": 1.0}]
    scaling = {"shape": "toolbench200", "workers": 8, "as_list": False, "mixed": work, "match": work, "schedule": work}
    long_run = {"requests": 10, "per_second": [5e4, 6e4], "p50_ns": [9e3, 8e3], "ratio": 0.97, "ratio_in_time": 1.2}
    names = ("rss_grown_warm_bytes", "rss_grown_end_bytes", "tree_warm_bytes", "tree_end_bytes")
    long_run |= {"hit_fraction": 0.6, **dict.fromkeys(names, 1e6)}
    core = [{"operation": "match", "tokens": "list", "limit_ns_p50": 4e3, "ns_p50": 5e3}]
    core.append({"operation": "evict", "tokens": "-", "limit_ns_p50": None, "per_second": 5e6})
    run = a_run(1.0, scaling=[{**scaling, "ceiling": ceiling}], long_run=[long_run], core=core)
    tables = list(benchmarks["report"].tables(a_result(run, run), {"runs": []}))
    assert len(tables) == 8, "all but peers and placement"
    for table in tables:
        widths = {line.replace(" | ", "|").count("|") for line in table.splitlines() if line.startswith("|")}
        assert len(widths) <= 1, table
    assert "| 0.970 | 1.200 | 9.00, 8.00 |" in "\n".join(tables)


def test_a_peer_that_is_better_in_anything_is_a_loss(benchmarks: dict[str, ModuleType]) -> None:
    peer = {"peer": "p", "version": "1", "shape": "loogle", "workers": 8, "schedule_ns_p50": 5e5}
    peer |= {"schedule_ns_p99": 9e5, "hit_fraction": 0.9, "load_spread": 1.1, "rss_bytes_per_prompt": 2000.0}
    result = a_result(a_run(9.0, peers=[peer]))
    said = [loss for loss in benchmarks["report"].losses(result) if loss.startswith("loogle")]
    assert len(said) == 1 and "finds more tokens cached" in said[0]
    page = "\n".join(benchmarks["report"].tables(result, {"runs": []}))
    assert "| p 1 | 500.00 |" in page and "56x" in page


def test_placement_is_held_against_the_earlier_result(benchmarks: dict[str, ModuleType]) -> None:
    earlier, now = a_result(a_run(9.0)), a_result(a_run(1.0))
    assert benchmarks["report"].placement_table(now, earlier).startswith("7 of 7 cells")
    now["runs"][0]["cells"][3]["hit_fraction"] -= 0.006
    table = benchmarks["report"].placement_table(now, earlier)
    assert table.startswith("6 of 7 cells") and "| 512 | buffer | -0.60 | +0.00 |" in table


def test_the_page_is_written_between_its_markers_only(benchmarks: dict[str, ModuleType], tmp_path: Path) -> None:
    report, page = benchmarks["report"], tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nlast week\n{report.END}\nafter\n")
    report.write_docs(a_result(a_run(1.0)), page)
    text = page.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n") and text.endswith(f"{report.END}\nafter\n")
    assert "last week" not in text and "toolbench1500-zipf" in text
    report.write_docs(a_result(a_run(1.0)), page)
    assert page.read_text() == text, "writing twice changes nothing"
    page.write_text("no markers")
    with pytest.raises(ValueError, match="markers"):
        report.write_docs(a_result(a_run(1.0)), page)


def test_the_committed_page_shows_the_committed_result(benchmarks: dict[str, ModuleType], tmp_path: Path) -> None:
    report, committed = benchmarks["report"], ROOT / "benchmarks/results/everything.json"
    text = report.PAGE.read_text()
    if not committed.exists():
        assert PLACEHOLDER in text.partition(report.BEGIN)[2].partition(report.END)[0]
        return
    page = tmp_path / "page.md"
    page.write_text(text)
    report.write_docs(json.loads(committed.read_text()), page)
    assert page.read_text() == text, f"run: python -m benchmarks.decision.report {committed} --docs"


def test_everything_means_every_part_and_a_missing_trace_is_said(
    benchmarks: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = benchmarks["bench_schedule"]
    args = bench.arguments(["--everything", "--trace", str(tmp_path / "none"), "--peers-env", str(tmp_path)])
    assert (args.threads, args.core, args.peers, args.long_run) == ([1, 2], True, True, 1_000_000)
    measurement = bench.Measurement(args)
    assert "mooncake" not in measurement.shapes and "mooncake" in measurement.left_out
    assert list(measurement.peers({})) == []
    assert "make peers" in measurement.left_out["peers"]
    assert capsys.readouterr().err.count("left out") == 2
