"""The contest of policies: its requests, its pooled reference, its statistics by hand, its page and its pictures.

What policies decide and what the bounds are worth is tested elsewhere.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from benchmarks.paper import agents_cells, contest_cells, contest_page, contest_stats
from benchmarks.paper import cells as paper_cells
from benchmarks.paper import contest as contest_module
from preble import CostModel, workloads
from tests.support.paths import ROOT, SHARED

PAPER = ROOT / "benchmarks" / "paper"
METRICS = ("p50_ttft_seconds", "mean_ttft_seconds", "p99_ttft_seconds", "mean_latency_seconds", "p50_latency_seconds",
           "p99_latency_seconds", "hit_fraction", "load_spread", "goodput")  # fmt: skip


@pytest.fixture
def contest() -> ModuleType:
    """The module."""
    return contest_module


@pytest.fixture
def cells() -> ModuleType:
    return contest_cells


@pytest.fixture
def stats() -> ModuleType:
    return contest_stats


# --- requests ---------------------------------------------------------------------------------------------------------


def test_the_full_form_has_all_policies_loads_and_seeds(contest: ModuleType, cells: ModuleType) -> None:
    grid = list(contest.grid(quick=False))
    assert len(set(grid)) == len(grid) == len(cells.SOURCES) * 4 * 5
    assert {cell.policies for cell in grid} == {cells.POLICIES}
    assert set(preble_policies()) - set(cells.POLICIES) == {"e2-paper:printed"}
    quick = list(contest.grid(quick=True))
    assert {cell.workload for cell in quick} == set(cells.SOURCES) and len(quick) < len(grid)


def preble_policies() -> list[str]:
    """All that go by a name."""
    from preble.policies import NAMES

    return ["e2", *NAMES]


def test_load_is_the_same_in_the_warm_up_and_after(cells: ModuleType) -> None:
    made = workloads.generate("toolbench", requests=100, groups=10, seed=0)
    rates = cells.Rates(warm_rps=2.0, rps=10.0)
    times = np.cumsum(np.random.default_rng(0).exponential(1.0, 150))
    at = workloads.arrival_times(cells.stretched(made, times, rates, 0.5))
    assert at[0] == 0.0 and (np.diff(at) >= 0.0).all()
    assert at[30] == pytest.approx(30 / 1.0)  # 30 warm ones at half of 2 a second
    assert at[99] - at[30] == pytest.approx(69 / 5.0)
    gaps, given = np.diff(at), np.diff(times[:100])
    assert gaps[:30] / gaps[0] == pytest.approx(given[:30] / given[0])
    assert gaps[30:] / gaps[30] == pytest.approx(given[30:] / given[30])


@pytest.mark.parametrize("name", ["toolbench-zipf", "embodied", "azure-mix", "mooncake"])
def test_seeds_have_requests_of_their_own_and_loads_have_the_same(cells: ModuleType, name: str) -> None:
    rates = cells.Rates(3.0, 4.0)
    slow, fast, other = (cells.arriving(name, seed, 0.1, rates, load) for seed, load in ((0, 0.5), (0, 1.0), (1, 0.5)))
    assert {r.request_id for r in slow.requests} == {r.request_id for r in fast.requests}
    times = sorted(r.arrival_seconds for r in slow.requests)
    assert sorted(2 * r.arrival_seconds for r in fast.requests) == pytest.approx(times)
    assert [r.arrival_seconds for r in other.requests] != [r.arrival_seconds for r in slow.requests]


@pytest.mark.parametrize("seed", range(5))
def test_the_mix_has_a_fifth_of_videos_over_the_same_time(cells: ModuleType, seed: int) -> None:
    requests = cells.arriving("azure-mix", seed, 1.0, cells.Rates(5.0, 10.0), 1.0).requests
    at = np.array([request.arrival_seconds for request in requests])
    videos = np.array([request.request_id.startswith("videoqa") for request in requests])
    assert videos.mean() == pytest.approx(0.2)
    assert at[videos].max() == pytest.approx(at[~videos].max(), rel=0.02)
    warm = cells.warm_requests(len(requests)) / 5.0
    assert (at[videos] < warm).mean() == pytest.approx((at[~videos] < warm).mean(), abs=0.02)


def test_slices_of_traces_are_whole(cells: ModuleType) -> None:
    for source in cells.SOURCES.values():
        if not source.trace:
            continue
        samples = [workloads.read(cells.DATA / f"{source.trace}_{k}.jsonl.gz").requests for k in range(cells.SAMPLES)]
        assert all(len(sample) >= source.requests for sample in samples)
        groups = [{request.group for request in sample} for sample in samples]
        assert sum(map(len, groups)) == len(set().union(*groups)), "a conversation is in two samples"
        assert all(cells.fits(request) for sample in samples for request in sample)
    for kind, part in (("code", cells.TOOLS), ("conv", 1 - cells.TOOLS)):
        for seed in range(cells.SAMPLES):
            assert len(cells.azure(kind, seed, part)) == round(cells.SOURCES["azure-mix"].requests * part)


def test_slices_are_those_that_the_script_makes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    traces = SHARED / "workloads" / "traces"
    if not traces.exists():
        pytest.skip(f"needs the shared traces in {traces}")
    made: dict[str, Any] = {"__name__": "make", "__file__": str(tmp_path / "make.py")}
    exec(compile((PAPER / "data" / "make.py").read_text(), "make.py", "exec"), made)
    made["main"](traces)
    names = sorted({path.name for path in (PAPER / "data").glob("*.gz")} - {"coding_agents.jsonl.gz"})  # of no trace
    assert names == sorted(path.name for path in tmp_path.glob("*.gz"))
    for name in names:  # decompressed: other versions of zlib compress otherwise
        assert lines(tmp_path / name) == lines(PAPER / "data" / name)


def lines(path: Path) -> list[str]:
    import gzip

    return gzip.decompress(path.read_bytes()).decode().splitlines()


# --- simulations ------------------------------------------------------------------------------------------------------


def test_the_pooled_worker_does_the_work_of_all_in_the_time_of_one(cells: ModuleType) -> None:
    one, four = CostModel.preset(cells.FLEET.cost_model), cells.pooled_model(4)
    decodes = [900, 1500, 2000, 3000]
    assert four.iteration_time([], decodes * 4) == pytest.approx(one.iteration_time([], decodes))
    alone = [(512, 9000)]
    assert four.iteration_time(alone * 4) == pytest.approx(one.iteration_time(alone))
    config = cells.pooled_config(4)
    assert (config.workers, config.local.kv_capacity_tokens, config.local.token_budget) == (1, 4 * 198_516, 2048)
    assert config.local.order == cells.local_config().order


@pytest.mark.parametrize("name", ["toolbench", "embodied", "mooncake-synthetic"])
def test_a_cell_has_every_figure_and_none_beats_its_bound(cells: ModuleType, name: str) -> None:
    rates = cells.drained(name, 0.1)
    assert rates.warm_rps > 0.0 and rates.rps > 0.0
    cell = cells.ContestCell(name, 0.9, 1, 0.1, ("e2", "random", cells.ORACLE))
    figures = cells.run_cell(cell, rates)
    assert figures == cells.run_cell(cell, rates) == json.loads(json.dumps(figures))
    assert set(figures["runs"]) == set(cell.policies)
    bounds = figures["bounds"]
    for run in figures["runs"].values():
        assert set(METRICS) <= set(run) and run["unfinished"] == 0
        assert run["hit_fraction"] <= bounds["hit_fraction"] + 1e-5 and run["goodput"] <= bounds["goodput"] + 1e-5
        for metric in set(bounds) - {"hit_fraction", "goodput"}:
            assert run[metric] >= bounds[metric] * (1 - 1e-5), metric


def test_results_depend_on_the_module_of_their_cells(cells: ModuleType) -> None:
    digest = paper_cells.sources_digest
    mine, others = cells.__name__, agents_cells.__name__
    assert digest(others) != digest(mine) == digest(mine)
    assert digest(paper_cells.__name__) == digest(mine)  # the contest's are part of everybody's


def test_a_saturation_is_found_once(cells: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = cells.ContestCell("toolbench", 0.9, 1, 0.05, ("e2",))
    store = cells.Store(tmp_path)
    rates = cells.saturation(cell, store)
    monkeypatch.setattr(cells, "drained", lambda *_: pytest.fail("it is known"))
    assert cells.saturation(cell, store) == rates


# --- statistics, page, pictures ---------------------------------------------------------------------------------------


@pytest.fixture
def found(cells: ModuleType) -> dict[Any, dict[str, Any]]:
    """Made-up figures of two workloads, two loads, three seeds. E2 is twice as slow as lmetric on loogle at 30 %, by
    the same in every seed; elsewhere it is a tenth faster. The oracle is best of all everywhere."""
    policies = ("e2", "lmetric", "random", cells.ORACLE)
    made = {}
    for workload in ("toolbench", "loogle"):
        for load in (0.3, 0.9):
            for seed in range(3):
                lost = (workload, load) == ("loogle", 0.3)
                base = 1.0 + seed
                figure = {"e2": 2.0 if lost else 0.9, "lmetric": 1.0, "random": 3.0, cells.ORACLE: 0.5}
                runs = {p: {**dict.fromkeys(METRICS, figure[p] * base), "unfinished": 0} for p in policies}
                made[cells.ContestCell(workload, load, seed, 1.0, policies)] = {
                    "saturation_rps": 10.0,
                    "requests": 70,
                    "left_out": 0,
                    "runs": runs,
                    "pooled": dict.fromkeys(METRICS, 0.4 * base),
                    "bounds": {m: 0.1 * base for m in METRICS if m[:3] != "p50" and m != "load_spread"},
                }
    return made


def test_losses_are_named_with_the_rival(stats: ModuleType, found: dict[Any, Any]) -> None:
    (lost,) = stats.losses(found, "p99_ttft_seconds")
    assert (lost.workload, lost.load, lost.rival) == ("loogle", 0.3, "lmetric")
    assert (lost.value, lost.low, lost.high) == pytest.approx((2.0, 2.0, 2.0))
    assert [round(cell.value, 6) for cell in stats.against_best(found, "mean_ttft_seconds")] == [0.9, 0.9, 2.0, 0.9]


def test_the_oracle_is_nobody_s_rival(stats: ModuleType, cells: ModuleType, found: dict[Any, Any]) -> None:
    assert cells.ORACLE not in stats.rivals(found) and "e2" not in stats.rivals(found)
    assert [cell.value for cell in stats.to_best(found, "p99_ttft_seconds", cells.ORACLE)] == pytest.approx(
        [0.5 / 0.9, 0.5 / 0.9, 0.5, 0.5 / 0.9]
    )


def test_a_loss_within_the_interval_is_none(stats: ModuleType, found: dict[Any, Any]) -> None:
    for cell, figures in found.items():
        if (cell.workload, cell.load, cell.seed) == ("loogle", 0.3, 0):
            figures["runs"]["e2"]["p99_ttft_seconds"] = 0.5
    assert stats.losses(found, "p99_ttft_seconds") == []
    (cell,) = (c for c in stats.against_best(found, "p99_ttft_seconds") if (c.workload, c.load) == ("loogle", 0.3))
    logs = np.log([0.5, 2.0, 2.0])
    half = 4.303 * np.std(logs, ddof=1) / math.sqrt(3)
    assert (cell.low, cell.high) == pytest.approx((math.exp(logs.mean() - half), math.exp(logs.mean() + half)))


def test_an_interval_by_hand(stats: ModuleType) -> None:
    assert stats.half_width(np.array([1.0, 2.0, 3.0])) == pytest.approx(4.303 / math.sqrt(3))
    assert stats.half_width(np.array([1.0, 3.0])) == pytest.approx(12.706)
    assert math.isnan(stats.half_width(np.array([1.0])))


def test_the_page_names_losses_first(contest: ModuleType, found: dict[Any, Any]) -> None:
    page = contest.section(found)
    assert page == contest.section(found)
    heads = [line for line in page.splitlines() if line.startswith("### ")]
    assert heads[0] == "### Where E2 loses"
    losses = page[page.index(heads[0]) : page.index(heads[1])]
    rows = [line for line in losses.splitlines() if line.startswith("| LooGLE")]
    assert len(rows) == 2 and all("| 30% |" in row and "lmetric" in row and "**2.00**" in row for row in rows)
    assert "ToolBench" not in losses and "nan" not in page and "{" not in page


def test_numbers_have_three_digits_and_no_exponent(contest: ModuleType) -> None:
    number = contest_page.number
    given = (0.0, 0.01234, 0.5, 0.99996, 9.876, 98.76, 12345.6, math.nan)
    assert [number(value) for value in given] == ["0", "0.0123", "0.500", "1.00", "9.88", "98.8", "12,346", "-"]


def test_the_pictures_are_the_same_bytes_again(contest: ModuleType, found: dict[Any, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("one", "two"):
        contest.draw(found, tmp_path / name)
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert names == {"contest-heat.png", "contest-p99.png", "contest-mean.png"}
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
