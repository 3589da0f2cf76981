"""The statistics of the comparison inside Ray Serve, and its section of docs/results.md. Runs no cluster."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.paths import ROOT

pytest.importorskip("aiohttp", reason="the benchmarks' reports need aiohttp: pip install 'preble[attach]'")

from benchmarks.ray import report as ray_report
from benchmarks.ray.report import Case


def answer(number: int, seconds: float, cached: int = 50, error: str = "") -> Any:
    return SimpleNamespace(
        number=number, ttft_seconds=seconds, latency_seconds=2 * seconds, reach_seconds=0.01, prompt_tokens=100,
        cached_tokens=cached, replica="a" if number % 2 else "b", error=error,
    )  # fmt: skip


def test_a_runs_first_requests_fill_caches_and_failures_are_counted() -> None:
    answers = [
        answer(0, 9.0, cached=0),
        answer(1, 1.0),
        answer(2, 3.0, cached=100),
        answer(3, 0.0, error="TimeoutError"),
    ]
    found = ray_report.summary(answers, 0.25)
    assert (found["counted"], found["failed"], found["failures"]) == (2, 1, {"TimeoutError": 1})
    assert (found["mean_ttft_seconds"], found["mean_latency_seconds"], found["hit_fraction"]) == (2.0, 4.0, 0.75)
    assert found["requests_by_replica"] == [1, 1]
    assert "mean_ttft_seconds" not in ray_report.summary(answers[3:], 0.0)


def test_costs_are_of_each_request() -> None:
    played = [
        {"choice_ms": [1.0, 3.0], "after_ms": [0.5], "cpu_seconds": 0.2, "reasons": {"choice_scheduled": 2}},
        {"choice_ms": [2.0], "after_ms": [1.5], "cpu_seconds": 0.1, "reasons": {}},
    ]
    found = ray_report.costs(played, 6.0, 3)
    assert (found["mean_choice_ms"], found["mean_after_ms"], found["choices_per_request"]) == (2.0, 1.0, 1.0)
    assert (found["client_cpu_ms"], found["machine_cpu_ms"]) == (pytest.approx(100.0), 2000.0)
    assert found["reasons"] == [{"choice_scheduled": 2}]


def result(preble: list[float], other: list[float]) -> dict[str, Any]:
    """Two arms in one case, by repetition."""
    runs = []
    for arm, seconds in (("preble", preble), ("power_of_two", other)):
        for repetition, mean in enumerate(seconds):
            measures = {name: mean for name, _, _ in ray_report.MEASURES}
            runs.append({"arm": arm, "workload": "even", "load": 0.8, "clients": 1, "repetition": repetition,
                         "failed": 0, **measures})  # fmt: skip
    return {"runs": runs}


def test_losses_are_reported_with_what_chance_may_have_done() -> None:
    case = Case("even", 0.8, 1)
    found = list(ray_report.losses(result([2.0, 2.1, 2.0], [1.0, 1.1, 1.0])))
    assert len(found) == 5, "more hits are no loss"
    assert all("excludes 0" in one and case.title() in one for one in found)
    assert all("includes 0" in one for one in ray_report.losses(result([1.0, 1.2], [1.0, 1.1])))
    (hits,) = ray_report.losses(result([1.0], [2.0]))
    assert hits.startswith(f"{case.title()}: hit fraction worse by 1.000")
    assert "one repetition" in hits


def test_the_order_of_arms_rotates() -> None:
    arms = ["a", "b", "c"]
    assert [ray_report.order_of(arms, repetition)[0] for repetition in range(4)] == ["a", "b", "c", "a"]


def test_the_committed_result_makes_its_section() -> None:
    committed = json.loads((ROOT / "benchmarks/results/ray.json").read_text())
    assert (ROOT / "benchmarks/results/ray.md").read_text() == ray_report.section(committed), (
        "run: python -m benchmarks.ray.report"
    )
    assert committed["facts"]["commit"].isalnum(), "measured with uncommitted changes"
