"""The published numbers: all there, in the order of their rates, and a few of them by hand."""

from __future__ import annotations

from types import ModuleType

import pytest

from benchmarks.paper import published as published_module


@pytest.fixture
def published() -> ModuleType:
    """The module."""
    return published_module


# (workload, GPUs, simulated): lines, values
COUNTS = {
    ("video_qa", 2, False): (6, 48),
    ("document_qa", 2, False): (9, 72),
    ("document_qa", 4, False): (9, 63),
    ("document_qa", 4, True): (6, 18),
    ("tool_use", 2, False): (12, 72),
    ("tool_use", 4, False): (9, 49),
    ("programming", 2, False): (4, 24),
    ("programming", 4, False): (4, 24),
    ("programming", 2, True): (15, 55),
    ("video_qa", 4, False): (6, 32),
    ("embodied_agent", 2, False): (4, 21),
}


def test_every_panel_is_complete(published: ModuleType) -> None:
    found: dict[tuple[str, int, bool], tuple[int, int]] = {}
    for curve in published.CURVES:
        key = (curve.workload, curve.gpus, curve.simulated)
        lines, values = found.get(key, (0, 0))
        found[key] = (lines + 1, values + len(curve.points))
    assert found == COUNTS


def test_no_line_is_there_twice(published: ModuleType) -> None:
    keys = [(c.workload, c.gpus, c.simulated, c.metric, c.policy) for c in published.CURVES]
    assert len(set(keys)) == len(keys)


def test_rates_ascend_and_values_are_positive(published: ModuleType) -> None:
    for curve in published.CURVES:
        assert list(curve.rps) == sorted(set(curve.rps)), curve
        assert min(curve.values) > 0.0 and min(curve.rps) > 0.0, curve
        assert curve.source and (curve.error == 0.0) == (curve.kind == published.PRINTED), curve


def test_percentiles_do_not_cross(published: ModuleType) -> None:
    """A misplaced line or digit would show as a median above the 99th percentile."""
    lines = {
        (c.workload, c.gpus, c.simulated, c.policy, c.metric): {p.rps: p.value for p in c.points}
        for c in published.CURVES
    }
    compared = 0
    for (*key, metric), low in lines.items():
        kind = metric.partition("_")[2]
        for above in {"p50": ("p90", "p99"), "p90": ("p99",), "mean": ("p99",)}.get(metric.partition("_")[0], ()):
            high = lines.get((*key, f"{above}_{kind}"), {})
            for rps in low.keys() & high.keys():
                assert low[rps] <= high[rps], (key, metric, above, rps)
                compared += 1
    assert compared > 150


@pytest.mark.parametrize(
    ("workload", "gpus", "metric", "policy", "rps", "value"),
    [
        ("video_qa", 2, "mean_latency", "round_robin", 4.0, 45.8),
        ("video_qa", 2, "p99_latency", "preble", 7.0, 52.9),
        ("document_qa", 2, "p99_normalised", "oracle", 0.9, 8.7),
        ("document_qa", 4, "p50_normalised", "round_robin", 1.0, 0.95),
        ("tool_use", 2, "p50_tpot", "round_robin", 9.0, 0.68),
        ("tool_use", 4, "mean_latency", "preble", 36.0, 123.0),
        ("programming", 2, "mean_normalised", "preble", 3.5, 0.56),
        ("programming", 4, "p99_normalised", "round_robin", 8.0, 9.42),
        ("video_qa", 4, "mean_normalised", "round_robin", 10.0, 21.5),
        ("embodied_agent", 2, "p99_ttft", "preble", 40.0, 23.0),
    ],
)
def test_values_by_hand(
    published: ModuleType, workload: str, gpus: int, metric: str, policy: str, rps: float, value: float
) -> None:
    curve = published.find(workload, gpus, metric)[policy]
    assert curve.at(rps) == value
    assert curve.at(rps + 0.01) is None


def test_the_printed_table_is_exact(published: ModuleType) -> None:
    assert published.find("programming", 2, "p99_latency") == {}
    curves = published.find("programming", 2, "p99_latency", simulated=None)
    assert curves["round_robin"].values == (21.41, 31.88, 140.87, 672.28, 815.37)
    assert curves["preble"].values == (21.16, 29.87, 70.18, 122.74, 199.97)
    assert curves["preble_lpm"].points == (published.Point(2.0, 73.13),)
    assert curves["preble"].simulated and curves["preble"].kind == published.PRINTED


def test_hidden_markers_and_reading_errors_are_kept(published: ModuleType) -> None:
    curve = published.find("video_qa", 2, "p99_latency")["oracle"]
    assert [point.hidden for point in curve.points] == [True, True, *[False] * 6]
    assert curve.error == 0.7
    unread = published.find("tool_use", 2, "p99_ttft")["preble"]
    assert unread.error is None and "1.5 %" in unread.error_note


def test_the_log_of_the_azure_mix(published: ModuleType) -> None:
    log = published.AZURE_MIX
    assert sum(published.AZURE_MIX_REQUESTS_BY_GPU) == log["requests"] == log["tools"] + log["videos"] == 4025
    for kind in ("latency", "ttft", "tpot"):
        assert log[f"p50_{kind}"] < log[f"p90_{kind}"] < log[f"p99_{kind}"]
    assert (log["mean_latency"], log["p99_ttft"], log["p50_tpot"]) == (1.939, 3.81, 0.0416)


def test_ratios_and_rates_of_the_text(published: ModuleType) -> None:
    ratios = {(r.workload, r.baseline, r.metric): (r.low, r.high) for r in published.RATIOS}
    assert len(ratios) == len(published.RATIOS) == 6
    assert ratios["all", "round_robin", "mean_latency"] == (1.5, 14.5)
    assert all(1.0 <= low < high for low, high in ratios.values())
    assert published.SCHEDULER_REQUESTS_PER_SECOND["tool_use", 1500] == 245.0


def test_measured_iterations_are_in_seconds(published: ModuleType) -> None:
    assert [len(published.A6000_ITERATIONS), len(published.H100_ITERATIONS), len(published.A100_ITERATIONS)] == [
        6,
        18,
        18,
    ]
    a100 = {(one.new_tokens, one.context_tokens): one.seconds for one in published.A100_ITERATIONS}
    for one in published.H100_ITERATIONS:
        assert one.new_tokens <= one.context_tokens
        assert one.seconds < a100[one.new_tokens, one.context_tokens]


@pytest.mark.parametrize("line", ["mean_latency preble 1/2/3", "mean_speed preble 1/2", "mean_latency best 1/2"])
def test_a_line_that_does_not_fit_its_panel_is_refused(published: ModuleType, line: str) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        list(published.Panel("video_qa", 2, "nowhere", "1/2", line, {}).curves())
