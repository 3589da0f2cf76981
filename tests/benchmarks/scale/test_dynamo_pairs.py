"""Pairs in two simulators: the same requests at the same times, and each compared with its own. What asks NVIDIA's
needs the peers' environment (`make peers`)."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.common.paths import ROOT
from benchmarks.paper.contest_cells import FLEET
from benchmarks.scale.dynamo_pairs import OUR_ARMS, OURS, THEIRS, figures_of, in_order, ours, table, theirs
from benchmarks.scale.dynamo_replay import Replay, Served, asked_of, at_load, workload_of
from benchmarks.scale.pairs import FIGURES
from preble import CostModel

PYTHON = ROOT / ".venv-peers" / "bin" / "python"


def test_both_get_the_same_requests_at_the_same_times() -> None:
    made = workload_of("loogle", 3, 2, 0.2)
    at = at_load(asked_of(made), rps=5.0, load=0.5)
    same = in_order(made, at)
    assert [one.arrival_seconds for one in same.requests] == pytest.approx(list(at.arrival_seconds))
    for one, tokens, output in zip(same.requests, at.prompts, at.output_tokens, strict=True):
        assert np.array_equal(np.concatenate(one.parts), tokens) and one.output_tokens == output


def test_of_two_that_prefill_no_prompt_is_decoded_there() -> None:
    made = workload_of("loogle", 3, 4, 0.1)
    at = at_load(asked_of(made), rps=5.0, load=0.5)
    cost = CostModel.preset(FLEET.cost_model)
    found = {arm.name(4): ours(in_order(made, at), arm, 4, 3, 100.0, cost) for arm in OUR_ARMS}
    assert all(set(figures) == set(FIGURES) for figures in found.values())
    assert found["e2, 2 prefill, 2 decode"] != found["e2"]
    assert min(value for figures in found.values() for value in figures.values()) > 0.0


def test_a_token_s_time_is_what_is_left_over_the_other_tokens() -> None:
    made = asked_of(workload_of("loogle", 3, 2, 0.2))
    served = [Served(1.0, 1.0 + 0.5 * (output - 1), 0, 0) for output in made.output_tokens]
    assert figures_of(served, made)["mean_tpot"] == pytest.approx(0.5)


def test_each_simulator_is_compared_with_itself() -> None:
    rows = [
        {"workload": "loogle", "load": 0.9, "simulator": simulator, "arm": arm, **dict.fromkeys(FIGURES, seconds)}
        for simulator, arm, seconds in (
            (THEIRS, "kv_router", 2.0),
            (THEIRS, "round_robin", 5.0),
            (OURS, "e2", 1.0),
            (OURS, "e2, 2 prefill, 2 decode", 3.0),
        )
    ]
    lines = table(rows).splitlines()[2:]
    assert [line.split("|")[-3].strip() for line in lines] == ["1.00", "2.50", "1.00", "3.00"]


@pytest.mark.skipif(not PYTHON.exists(), reason="`make peers` installs that simulator")
def test_there_too_some_prefill_and_the_others_decode() -> None:
    at = at_load(asked_of(workload_of("loogle", 3, 4, 0.1)), rps=5.0, load=0.5)
    with Replay(PYTHON, at) as replay:
        fast, slow = dict(theirs(replay, at, 4, 100.0)), dict(theirs(replay, at, 4, 1.0))
    separate = "kv_router, 2 prefill, 2 decode"
    assert list(fast) == ["round_robin", "round_robin, 2 prefill, 2 decode", "kv_router", separate]
    assert fast["round_robin"] == slow["round_robin"]
    assert slow[separate]["mean_ttft"] > fast[separate]["mean_ttft"] > fast["kv_router"]["mean_ttft"]
