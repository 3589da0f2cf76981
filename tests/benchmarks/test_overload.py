"""The overload benchmark's figures, from requests whose fate is known, and its engine."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("aiohttp", reason="needs aiohttp: pip install 'preble[test]'")

from benchmarks.gateway import overload
from benchmarks.gateway.overload import Engine, Seen, outcome
from tests.support.transport import asynchronous


def test_what_is_useful_refused_and_strange_is_counted() -> None:
    useful = [Seen(106.0 + number / 10, first_seconds=1.0) for number in range(50)]
    late = [Seen(106.0, first_seconds=5.1), Seen(101.0, first_seconds=1.0), Seen(114.5, first_seconds=1.0)]
    others = [Seen(108.0, refused_seconds=0.01), Seen(108.0, refused_seconds=0.02), Seen(108.0, failed="gave up")]
    calm = [Seen(115.5, first_seconds=1.6), Seen(117.0, refused_seconds=0.01), Seen(118.0, first_seconds=0.2)]
    seen = outcome([*useful, *late, *others], calm, begun=100.0, ended=115.0, capacity=10.0)
    assert seen["useful_share"] == 50 / 10.0 / 10.0
    assert (seen["requests"], seen["refused_share"], seen["gave_up_share"]) == (56, 2 / 56, 1 / 56)
    assert seen["refusal_p99_ms"] == pytest.approx(19.9) and seen["back_after_seconds"] == 2.0


@asynchronous
async def test_an_engine_skips_those_who_have_left_and_runs_no_more_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "PREFILL_SECONDS", 0.0)
    engine = Engine()
    turns = [asyncio.get_running_loop().create_future() for _ in range(overload.RUNNING_MAX + 3)]
    engine.waiting.extend(turns)
    turns[1].cancel()
    serving = asyncio.ensure_future(engine.serve())
    for _ in range(100):
        await asyncio.sleep(0)
    assert [turn.done() for turn in turns] == [True] * (overload.RUNNING_MAX + 1) + [False] * 2
    engine.room.release()
    for _ in range(100):
        await asyncio.sleep(0)
    assert sum(turn.done() for turn in turns) == overload.RUNNING_MAX + 2
    serving.cancel()
