"""Pairs in the second simulator: its own times where nothing is shared out, the way of one request, and that nothing is
left of any. Without that simulator, which is not part of this project, there is nothing to test."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.scale import second_pairs
from benchmarks.scale.second_pairs import Arm, PairFleet, rule_of
from preble.types import DECODE

BYTES_PER_SECOND = 1.25e10


def run(second: Any, requests: list[Any], arm: Arm, workers: int, blocks: int = 0) -> PairFleet:
    """One run, on workers with so many blocks; nothing is left of it."""
    fleet = PairFleet(second, arm.roles(workers), "mistral7b_a6000", BYTES_PER_SECOND)
    for one in fleet.workers:
        one.cap = blocks or one.cap
    fleet.run(requests, rule_of(arm, fleet.workers, second.BLOCK))
    assert all(one.t_done >= one.t_first > one.t for one in requests)
    for one in fleet.workers:
        assert not (one.run or one.wait or one.handed or one.pins or one.used_private or one.pulling)
    return fleet


def test_without_pairs_it_is_the_second_simulator(modules: tuple[Any, Any]) -> None:
    second, cases = modules
    own, theirs = (cases.unique(80, 9.0, 1) for _ in range(2))
    assert run(second, own, Arm("round_robin"), 3).separated == 0
    second.simulate(theirs, second.RoundRobin(), n=3)
    assert [(one.t_first, one.t_done) for one in own] == [(one.t_first, one.t_done) for one in theirs]


def test_the_first_token_comes_from_who_decodes_after_the_transfer(modules: tuple[Any, Any]) -> None:
    second, _ = modules
    tokens = np.arange(3, 4003, dtype=np.int32)
    whole, apart, again = (second.prep([second.Req(0, 1.0, tokens, 20)]) for _ in range(3))
    run(second, whole, Arm("round_robin"), 2)
    fleet = run(second, apart, Arm("round_robin", 0.5, DECODE), 2)
    moved = 4000 * second_pairs.KV_TOKEN_BYTES / BYTES_PER_SECOND + second_pairs.LATENCY_SECONDS
    assert apart[0].t_first == pytest.approx(whole[0].t_first + moved, abs=0.05) and fleet.separated == 1
    again[0].after, again[0].rid = 0, 1  # what is cached where it is decoded is not moved
    run(second, [*second.prep([second.Req(0, 1.0, tokens, 20)]), *again], Arm("round_robin", 0.5, DECODE), 2)
    assert again[0].t_first - again[0].t < apart[0].t_first - apart[0].t - 0.9 * moved


@pytest.mark.parametrize("rule", ["round_robin", "least_load", "e2"])
def test_where_memory_is_short_every_request_ends(modules: tuple[Any, Any], rule: str) -> None:
    second, cases = modules
    for arm in (Arm(rule, 0.5, DECODE), Arm(rule, 0.5)):
        assert run(second, cases.unique(60, 40.0, 2), arm, 4, blocks=150).separated > 0


def test_arms_are_named_by_what_the_workers_do() -> None:
    assert Arm("e2", 0.25, DECODE).name(8) == "e2, 2 prefill, 6 decode" and Arm("e2").name(8) == "e2"
    assert Arm("e2", 0.25).roles(2) == ["prefill", "both"]
