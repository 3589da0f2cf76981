"""The default rule is nowhere behind plain rules, on no fleet and in no traffic that can lose one; and what its page
says is what was measured. Simulations with fixed seeds: the same figures everywhere."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper import fleet_cases, fleets
from benchmarks.paper.fleet_cases import KINDS, Case

QUICK = [cell.case for cell in fleets.grid(quick=True)]


def name_of(case: Case) -> str:
    return f"{case.name} at {case.load:g}, {case.workers} workers"


@pytest.mark.parametrize("case", QUICK, ids=name_of)
def test_the_default_is_never_behind_round_robin_or_least_load(case: Case) -> None:
    """2 % in mean TTFT and latency, 5 % in their p99s. A change of the rule that fails here loses somebody's fleet."""
    figures = fleet_cases.measured(case, (fleets.OURS, *fleets.PLAIN))
    assert fleets.behind(figures) == [], figures


@pytest.mark.parametrize("policy", ["longest_prefix", "random"])
def test_the_guard_sees_a_rule_that_loses_the_fleet(policy: str) -> None:
    """All to where one system prompt is cached; and to nobody in particular."""
    case = Case("system prompt", 0.6, 8, 0, fleets.QUICK_SHARE)
    figures = fleet_cases.measured(case, (policy, *fleets.PLAIN))
    assert fleets.behind({**figures, fleets.OURS: figures[policy]}) == list(fleet_cases.FIGURES)


def test_the_quick_grid_has_every_kind_on_small_and_large_fleets_from_idle_to_overload() -> None:
    assert {case.name for case in QUICK} == set(KINDS)
    for name in KINDS:
        mine = [case for case in QUICK if case.name == name]
        assert {case.workers for case in mine} == {2, 8, 32}
        assert (min(case.load for case in mine), max(case.load for case in mine)) == (0.02, 1.2)
    full = list(fleets.grid(quick=False))
    assert len(full) == len(KINDS) * 5 * 3 * 3 == len(set(full))


@pytest.mark.parametrize("name", KINDS)
def test_load_one_is_what_the_pooled_reference_ends(name: str) -> None:
    """Of the seed the rates were taken from; documents fit the pooled cache or do not, by the seed."""
    assert fleet_cases.drained_rps(name, seed=0) == pytest.approx(KINDS[name].rps, rel=0.15)


def test_traffic_is_as_its_name_says() -> None:
    made = {name: fleet_cases.requests(Case(name, 1.0, 2, 0, 0.3)).requests for name in KINDS}
    shared = {name: len({request.parts[0].tobytes() for request in requests}) for name, requests in made.items()}
    assert shared["system prompt"] == 1 and shared["coding agents"] == 4
    assert 10 < shared["viral"] < 100 and shared["nothing shared"] == len(made["nothing shared"])
    hottest = Counter(request.parts[0].tobytes() for request in made["viral"]).most_common(2)
    assert all(count > 20 for _, count in hottest), "one after another, each wanted by most"
    agents = {request.request_id: request for request in made["coding agents"]}
    follow = [one for one in agents.values() if one.after]
    assert len(follow) == len(agents) * 7 / 8
    assert all(one.prompt_tokens > agents[one.after].prompt_tokens for one in follow if one.after)
    for requests in made.values():
        arrivals = [request.arrival_seconds for request in requests]
        assert arrivals == sorted(arrivals)


def test_every_second_worker_of_the_uneven_fleet_is_slow() -> None:
    config = fleet_cases.config_of(Case("tools, uneven fleet", 1.0, 4, 0), "e2")
    fast, slow, *rest = (config.model_of(spec) for spec in config.specs())
    assert [model.coefficients() for model in rest] == [fast.coefficients(), slow.coefficients()]
    for missed, context in ((700, 700), (100, 4000), (2048, 9000)):
        assert slow.prefill_time(missed, context) == pytest.approx(2.0 * fast.prefill_time(missed, context))
    assert slow.decode_time(10, 3000, 8) == pytest.approx(2.0 * fast.decode_time(10, 3000, 8))


@pytest.mark.parametrize(
    ("by_load", "found"),
    [
        ([(0.1, 1.0), (0.6, 1.5), (1.2, 1.9)], ("≥ ", 1.2)),
        ([(0.1, 3.0), (0.6, 1.0)], ("< ", 0.1)),
        ([(0.5, 1.0), (1.0, 4.0)], ("", 0.75)),
        ([(0.2, 2.0), (0.7, 2.1), (1.2, 1.0)], ("", 0.2)),
    ],
)
def test_requests_a_second_within_an_objective(by_load: Any, found: tuple[str, float]) -> None:
    sign, load = fleets.load_within(by_load, 2.0)
    assert (sign, load) == (found[0], pytest.approx(found[1]))


def test_the_page_shows_losses_first_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    """Of made-up figures, in which ours loses in one place."""
    cells = list(fleets.grid(quick=True))[:10]
    found = {
        cell: {"runs": {name: [1.0 + 0.1 * k, 2.0, 3.0, 4.0] for k, name in enumerate(cell.policies)}} for cell in cells
    }
    found[cells[3]]["runs"][fleets.OURS] = [1.0, 2.2, 3.0, 4.0]
    text = fleets.section(found)
    assert text == fleets.section({cell: json.loads(json.dumps(figures)) for cell, figures in found.items()})
    lines = text.splitlines()
    assert "1 of 10 places (2 % in a mean, 5 % in a p99). E2 over the better of the two, in these:" in lines
    assert f"| {cells[3].case.name} | 120% | 8 | 0.91 | 1.10 | 1.00 | 1.00 |" in lines
    assert text.index("Behind round robin") < text.index("Behind the best rival") < text.index("All rules")
    fleets.draw(found, tmp_path)
    assert (tmp_path / "fleets-heat.png").stat().st_size > 10_000
