"""The figures of the benchmark of gateway processes, from requests whose fate is known, its engine, and its table."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="needs aiohttp: pip install 'preble[test]'")

import aiohttp

from benchmarks.gateway import bench_processes
from benchmarks.gateway.bench_processes import Seen, cells, figures, name_of, offer, prompt_tokens, rate, table
from benchmarks.gateway.overload import served
from tests.support.transport import asynchronous


def test_times_are_of_what_was_answered_and_cpu_is_of_all() -> None:
    seen = [Seen(0.1, 0.2)] * 98 + [Seen(1.1, 2.2), Seen(0.3, None)]
    found = figures(seen, cpu=2.0)
    assert (found["requests"], found["failed"], found["cpu_ms"]) == (100, 1, 20.0)
    assert found["ttft_mean"] == pytest.approx((98 * 100 + 1100) / 99)
    assert found["latency_p99"] > 200.0
    with pytest.raises(AssertionError, match="2 of 100 requests failed"):
        figures([*seen[:98], Seen(), Seen()], cpu=2.0)


def test_both_kinds_of_prompts_are_as_much_work() -> None:
    rng = random.Random(1)
    lengths = [prompt_tokens("mixed", rng) for _ in range(20_000)]
    assert set(lengths) == {bench_processes.LONG_TOKENS, bench_processes.SHORT_TOKENS}
    assert sum(lengths) / len(lengths) == pytest.approx(prompt_tokens("equal", rng), rel=0.05)
    assert rate(0.6) * prompt_tokens("equal", rng) == pytest.approx(0.6 * 8 * bench_processes.TOKENS_PER_SECOND)


def row(processes: int, together: bool, ttft_p99: float, policy: str = "e2") -> dict[str, Any]:
    cell = {"prompts": "mixed", "load": 0.6, "policy": policy, "processes": processes, "together": together}
    return {**cell, "ttft_mean": 50.0, "ttft_p99": ttft_p99, "latency_mean": 1.0, "latency_p99": 2.0, "cpu_ms": 1.25}


def test_what_loses_comes_first_in_the_table() -> None:
    rows = [row(1, False, 100.0), row(2, True, 80.0), row(2, False, 160.0), row(4, True, 300.0), row(4, False, 200.0)]
    lines = table(rows).splitlines()[2:]
    assert len(lines) == 2
    assert lines[0].startswith("| mixed | 0.6 | `e2` | 4 |") and lines[0].endswith("| 1.50 |")
    assert "| 100 / 200 / 300 |" in lines[0] and "| 1.25 / 1.25 / 1.25 |" in lines[0]
    assert lines[1].endswith("| 0.50 |")
    assert "| - / 160 / 80 |" in table(rows[1:])


def test_every_arm_has_a_name_of_its_own_and_one_to_compare_with() -> None:
    names = [name_of(cell) for cell in cells()]
    assert len(names) == len(set(names)) == 2 * 2 * (5 + 3 + 3)
    assert all(name.replace("together", "apart") in names for name in names)


@asynchronous
async def test_an_engine_computes_one_prompt_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_processes, "TOKENS_PER_SECOND", 20_000)
    monkeypatch.setattr(bench_processes, "SERVERS", 1)
    monkeypatch.setattr(bench_processes, "TOKEN_SECONDS", 0.0)
    port = bench_processes.free_port()
    engines = bench_processes.asyncio.ensure_future(bench_processes.serve_engines([port]))
    async with aiohttp.ClientSession() as session:
        assert await served(session, f"http://127.0.0.1:{port}")
    seen = await offer(f"http://127.0.0.1:{port}", "equal", 1.0, 0.5, seed=0)
    engines.cancel()
    assert len(seen) >= 5 and all(one.first_seconds and one.first_seconds >= 580 / 20_000 for one in seen)
    assert all(one.all_seconds and one.first_seconds and one.all_seconds >= one.first_seconds for one in seen)
