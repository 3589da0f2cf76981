"""`benchmarks.transport.bench_transport` runs, checks its tokens and fills its table. Says nothing about speed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.transport import bench_transport
from preble import SamplingParams
from preble.engines.base import GenerationRequest


@pytest.fixture
def bench() -> Any:
    """The script as a module."""
    return bench_transport


def test_a_small_round_has_every_figure_and_its_page(
    run_python: Callable[..., Any], tmp_path: Path, bench: Any
) -> None:
    file = tmp_path / "result.json"
    program = "benchmarks.transport.bench_transport"
    done = run_python("-m", program, "--rounds", "1", "--requests", "40", "--tokens", "20", "--json", str(file))
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    (run,) = result["runs"]
    assert run["flood"]["tokens"] == 4 * 64 * 20 and run["cost"]["tokens"] == 64 * 5
    for name in bench.ROUND_TRIPS:
        assert 0 < run[name]["us_p50"] <= run[name]["us_p99"]
    assert run["flood"]["router_cpu_us_per_token"] > 0 and run["flood"]["tokens_per_chunk"] >= 1
    page = bench.page(result)
    assert page.startswith("| round |") and f"python -m {program}" in page and str(tmp_path) not in page


def test_the_page_says_which_bar_does_not_hold(bench: Any) -> None:
    cell = {"us_p50": 10.0, "us_p99": 20.0, "router_cpu_us_per_token": 1.0, "worker_cpu_us_per_token": 1.0}
    cell |= {"tokens_per_second": 5, "tokens_per_chunk": 1.0}
    run = dict.fromkeys((*bench.ROUND_TRIPS, "cost", "flood"), cell)
    result = {"facts": {"command": "c", "seed": 0}, "runs": [run]}
    assert bench.page(result).count(": holds in every round") == len(bench.BARS)
    for text, part, name, most in bench.BARS:
        slow = {**run, part: {**cell, name: most + 1}}
        assert f"- {text} under {most:g}: **does not hold" in bench.page({**result, "runs": [run, slow]})


def test_the_docs_have_room_for_the_page(bench: Any) -> None:
    text = bench.PAGE.read_text()
    assert text.count(bench.BEGIN) == 1 and text.index(bench.BEGIN) < text.index(bench.END)


def test_the_engine_answers_by_position_and_goes_on_after_a_resumption(bench: Any) -> None:
    engine = bench.InstantEngine(0.0)
    prompt = np.arange(7, 11, dtype=np.int32)
    engine.submit(GenerationRequest("a", prompt, SamplingParams(max_new_tokens=3), output_offset=1))
    chunks = [engine.step()[0] for _ in range(2)]
    assert [c.token_ids for c in chunks] == [(bench.token_at(7, 1),), (bench.token_at(7, 2),)]
    assert chunks[-1].finish_reason == "length" and not engine.has_work()
