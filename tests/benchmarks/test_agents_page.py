"""The page on agents: its cells are measured the same again, its bars say what is missed, it goes between its marks.
What is measured of a run is `tests/sim/test_service.py`."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the evaluation draws with matplotlib (extra bench)")

from benchmarks.paper import agents, agents_cells
from benchmarks.paper.agents_cells import KINDS, POLICIES, AgentCell, Store
from preble import GlobalScheduler
from preble.workloads import PromptRequest, Workload


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of seconds, with few rules."""
    for name, value in {
        "LIVE_OF": {"sessions": 2},
        "WARM_SECONDS": 5.0,
        "END_SECONDS": 40.0,
        "GROUPS": 3,
        "SAMPLES": 4,
    }.items():
        monkeypatch.setattr(agents_cells, name, value)
    monkeypatch.setattr(
        agents_cells,
        "POLICIES",
        {"sessions": (agents_cells.OURS_WHOLE, "session_ids"), "samples": ("e2", "cache_aware")},
    )


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["sessions", "samples"])
def test_a_cell_measures_the_same_again(kind: str, tmp_path: Path) -> None:
    first, second = (KINDS[kind](AgentCell(kind, 2, 1.0, 0), Store(tmp_path)) for _ in range(2))
    assert first == second and len(first["runs"]) == 2
    for figures in first["runs"].values():
        assert not any(math.isnan(value) for value in figures.values())
        assert 0.0 < figures["hit_fraction"] < 1.0


def test_who_waits_when_a_run_is_broken_off_has_waited_and_who_was_refused_has_no_times() -> None:
    result: Any = SimpleNamespace(
        arrival_seconds=np.array([0.0, 1.0, 2.0, 3.0]),
        ttft_seconds=np.array([1.0, np.nan, 2.0, 9.0]),
        latency_seconds=np.array([3.0, np.nan, np.nan, 9.0]),
    )
    own = np.array([True, True, True, False])
    assert agents_cells.times(result, own)["mean_ttft_seconds"] == pytest.approx(1.5)
    open_ones = agents_cells.times(result, own, 11.0)
    assert open_ones["mean_ttft_seconds"] == pytest.approx((1.0 + 10.0 + 2.0) / 3)
    assert open_ones["mean_latency_seconds"] == pytest.approx((3.0 + 10.0 + 9.0) / 3)
    assert open_ones["p99_ttft_seconds"] == pytest.approx(np.percentile([1.0, 10.0, 2.0], 99))


def test_the_bar_of_goodput_is_of_the_fleet_whose_saturation_is_known() -> None:
    runs = {"runs": {policy: {"of_bound": 0.8} for policy in POLICIES["deadlines"]}}
    cells = {AgentCell("deadlines", workers, share, 0): runs for workers in (2, 4) for share in (1.2, 0.1)}
    assert [bar.value for bar in agents.bars_of(cells)] == pytest.approx([0.8, 0.8]), "ours, and that evict by use"


def test_affinity_that_is_told_sessions_keeps_a_sub_agent_with_its_session() -> None:
    policy = agents_cells.SessionIds({"a.0": "a", "b.0": "b", "a/x.0": "a", "c.0": "c"})
    scheduler = GlobalScheduler(["w0", "w1"], policy=policy)
    placed = {
        name: scheduler.schedule([k * 100 + i for i in range(50)], request_id=name).worker
        for k, name in enumerate(("a.0", "b.0", "a/x.0", "c.0"))
    }
    assert placed["a.0"] != placed["b.0"]
    assert placed["a/x.0"] == placed["a.0"]
    assert placed["c.0"] == placed["b.0"]  # which has fewer live requests by then


def test_consistent_hashing_sends_a_group_to_one_worker_and_groups_to_several() -> None:
    groups = {f"{group}.{sample}": group for group in "abcdefgh" for sample in range(3)}
    scheduler = GlobalScheduler(["w0", "w1", "w2"], policy=agents_cells.GroupHash(groups))
    homes: dict[str, set[str]] = {}
    for name, group in groups.items():
        homes.setdefault(group, set()).add(scheduler.schedule([1, 2, 3], request_id=name).worker)
    assert all(len(workers) == 1 for workers in homes.values())
    assert len(set.union(*homes.values())) > 1


def found(turns: dict[str, list[float]]) -> dict[AgentCell, dict[str, Any]]:
    """Cells of one fleet in which the rules end so many turns an hour, by seed; every other figure is 1."""
    metrics = ("p99_ttft_seconds", "mean_ttft_seconds", "p99_latency_seconds", "hit_fraction")
    seeds = len(next(iter(turns.values())))
    return {
        AgentCell("sessions", 4, 0.3, seed): {
            "runs": {
                policy: {"turns_per_hour": turns.get(policy, [1.0] * seeds)[seed], **dict.fromkeys(metrics, 1.0)}
                for policy in POLICIES["sessions"]
            }
        }
        for seed in range(seeds)
    }


def bar_of(cells: dict[AgentCell, dict[str, Any]], begins: str, ends: str = "evict by use") -> agents.Bar:
    """The one bar of that name."""
    [found] = [bar for bar in agents.bars_of(cells) if bar.what.startswith(begins) and bar.what.endswith(ends)]
    return found


def test_bars_compare_with_the_best_rival_by_seed_and_the_furthest_missed_is_first() -> None:
    rules = {"e2": [110.0, 220.0], agents_cells.OURS_WHOLE: [130.0, 260.0], "kv_cost": [100.0, 200.0]}
    cells = found({**rules, "round_robin": [500.0, 500.0], agents_cells.IDS_WHOLE: [500.0, 500.0]})
    waits, turns = bar_of(cells, "best rival's p99"), bar_of(cells, "turns an hour")
    assert (turns.rival, turns.bar) == ("kv_cost", 1.15)  # round robin is no rival of the bars
    assert (turns.value, turns.low, turns.high) == pytest.approx((1.1, 1.1, 1.1))
    assert turns.short == pytest.approx(1.15 / 1.1)
    assert waits.value == pytest.approx(1.0) and waits.short == pytest.approx(1.3)
    assert turns.verdict == "missed"
    assert bar_of(cells, "turns an hour", "our workers").value == pytest.approx(1.3), (
        "rivals have the workers of others"
    )
    assert [bar.short for bar in agents.bars_of(cells)] == sorted(bar.short for bar in agents.bars_of(cells))[::-1]


def test_headroom_is_what_the_best_rule_does_with_caches_for_all_over_the_best_rival() -> None:
    short = found({"e2": [90.0], "kv_cost": [80.0], "round_robin": [95.0]})
    whole = {replace(cell, share=1.0): figures for cell, figures in found({"e2": [120.0], "kv_cost": [100.0]}).items()}
    assert agents.headroom({**short, **whole}, 4) == ["4", "120", "1.50", "1.20"]


def test_what_names_of_sessions_are_worth_is_compared_by_seed_over_all_caches() -> None:
    short = found({agents_cells.OURS_WHOLE: [100.0, 100.0], agents_cells.UNNAMED: [90.0, 99.0]})
    other = found({agents_cells.OURS_WHOLE: [50.0, 200.0], agents_cells.UNNAMED: [50.0, 198.0]})
    cells = {**short, **{replace(cell, share=1.0): figures for cell, figures in other.items()}}
    assert agents.unnamed_over_named(cells, 4) == pytest.approx([math.sqrt(0.9), 0.99])
    assert bar_of(cells, "turns an hour, sessions not named", "4 workers").bar == 0.97


def test_of_what_is_kept_a_seed_counts_where_all_its_cells_are_known(tmp_path: Path) -> None:
    wanted = [AgentCell("sessions", 8, share, seed) for share in (0.3, 1.0) for seed in (0, 1)]
    store = Store(tmp_path)
    for cell in wanted[:3]:
        store.put(cell, {"runs": {}})
    assert list(agents.known(wanted, store)) == [wanted[0], wanted[2]]


def test_one_seed_has_no_interval() -> None:
    turns = bar_of(found({"e2": [120.0], "kv_cost": [100.0]}), "turns an hour")
    assert math.isnan(turns.low) and "(" not in agents.bar_table([turns]).split("\n")[-1]
    assert "held, open" in agents.bar_table([turns])


@pytest.mark.parametrize(
    ("value", "low", "high", "at_least", "said"),
    [
        (1.2, 1.16, 1.3, True, "held"),
        (1.2, 1.1, 1.3, True, "held, open"),
        (1.0, 0.9, 1.1, True, "missed"),
        (1.0, 0.9, 1.1, False, "held"),
        (1.3, 1.4, 1.2, False, "missed"),
    ],
)
def test_a_verdict_is_open_where_the_bar_is_inside_of_the_interval(
    value: float, low: float, high: float, at_least: bool, said: str
) -> None:
    assert agents.Bar("x", value, low, high, 1.15, at_least).verdict == said


def test_text_goes_between_the_marks_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "agents.md"
    page.write_text(f"before\n{agents.BEGIN}\nold\n{agents.END}\nafter\n")
    agents.update(page, "new")
    assert page.read_text() == f"before\n{agents.BEGIN}\nnew\n{agents.END}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="marks"):
        agents.update(page, "new")


def test_the_grid_has_every_cell_once_and_its_rules_have_titles_and_inks() -> None:
    for quick in (False, True):
        grid = list(agents.grid(quick, ""))
        assert len(set(grid)) == len(grid) and {cell.kind for cell in grid} == set(KINDS)
    for policy in {policy for rules in POLICIES.values() for policy in rules}:
        assert policy in agents.TITLES and policy in agents.INKS


def test_copies_of_sessions_share_what_all_sessions_have_and_nothing_else() -> None:
    head, own = np.arange(10, dtype=np.int32), np.array([5000, 5001], np.int32)
    first = PromptRequest("a.0", (head, own), 1, "a")
    given = Workload("made", [first, replace(first, request_id="a.1", after="a.0")])
    copies = agents_cells.copied(given, 1)
    assert [request.request_id for request in copies] == ["1:a.0", "1:a.1"]
    assert copies[1].after == "1:a.0" and copies[1].group == "1:a"
    assert (copies[0].token_ids[:10] == head).all() and not np.isin(copies[0].token_ids[10:], own).any()
    assert copies[0].parts[1] is copies[1].parts[1]
    assert agents_cells.copied(given, 0) == list(given.requests)
