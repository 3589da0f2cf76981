"""Pulls in the second simulator: its own times where nothing is pulled, the way of one transfer, and that nothing is
left of any. Without that simulator, which is not part of this project, there is nothing to test."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks.scale.second_pairs import Places
from benchmarks.scale.second_pulls import ALL_ARMS, NEVER, Arm, PullFleet, Pulling, rule_of

BYTES_PER_SECOND = 1.25e10


class OneEach(Pulling):
    """E2, which may not place the second request where the first one went."""

    def choose(self, request: Any, now: float) -> Places:
        left_out = ["0"] if request.rid == 1 else ["1"]
        self._at(now).schedule(request.tokens, request_id=request.rid, exclude=left_out)
        return None, request.rid


def run(second: Any, requests: Sequence[Any], arm: Arm, workers: int, capacity: float = 1.0) -> PullFleet:
    """One run; nothing is left of it."""
    fleet = PullFleet(second, workers, capacity, BYTES_PER_SECOND)
    fleet.play(requests, rule_of(second, arm, fleet.workers))
    assert all(one.t_done >= one.t_first for one in requests)
    for one in fleet.workers:
        assert not (one.run or one.wait or one.pins or one.used_private)
        assert len(one.cache) <= one.cap
    return fleet


def test_without_pulls_it_is_the_second_simulator(modules: tuple[Any, Any]) -> None:
    second, cases = modules
    own, theirs = (cases.unique(80, 9.0, 1) for _ in range(2))
    assert run(second, own, ALL_ARMS["round_robin"], 3).pulls == 0
    second.simulate(theirs, second.RoundRobin(), n=3)
    assert [(one.t_first, one.t_done) for one in own] == [(one.t_first, one.t_done) for one in theirs]


def test_a_prefix_is_handed_over_and_sooner_than_computed(modules: tuple[Any, Any]) -> None:
    """A document, and a longer prompt that begins with it, on another worker."""
    second, _ = modules
    first, rest = np.arange(3, 8195, dtype=np.int32), np.arange(100_000, 106_400, dtype=np.int32)
    asked = [second.Req(0, 1.0, first, 20), second.Req(1, 30.0, np.concatenate([first, rest]), 20)]
    found = {}
    for arm in (NEVER, ALL_ARMS["e2, always"]):
        requests = second.prep(copy.deepcopy(asked))
        fleet = PullFleet(second, 2, 1.0, BYTES_PER_SECOND)
        fleet.play(requests, OneEach(fleet.workers, second.BLOCK, arm))
        found[arm.name] = (requests[1].t_first - requests[1].t, fleet.pulls, fleet.moved_tokens)
    assert found[NEVER.name][1:] == (0, 0)
    assert found["e2, always"][1:] == (1, 8192)
    assert found["e2, always"][0] < 0.8 * found[NEVER.name][0]


@pytest.mark.parametrize("name", ["e2, always", "e2, from 2048", "e2, by the price"])
@pytest.mark.parametrize("capacity", [1.0, 2.0])
def test_of_those_that_pulled_nothing_is_left(modules: tuple[Any, Any], name: str, capacity: float) -> None:
    second, cases = modules
    build, workers = cases.CASES["docs"]
    requests = build(0.5, 3)[:120]
    fleet = run(second, requests, ALL_ARMS[name], workers, capacity)
    assert fleet.pulls and fleet.moved_tokens
