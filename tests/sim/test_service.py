"""Measures of agents, tenants and sets of requests, against cases calculated by hand; and closed loops of sessions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from preble import CostModel, LocalConfig, sim
from preble.errors import InvalidInput
from preble.sim.results import FINISHED, REFUSED, UNFINISHED, Result
from preble.sim.service import (
    ended_between,
    entitlements,
    group_makespans,
    jain_index,
    makespan,
    service_seconds,
    turns_per_hour,
    within_deadlines,
)
from preble.workloads import PromptRequest, coding_agents, sessions_at_once

NAN = float("nan")


def result() -> Result:
    """a came at 0 s, had its first token at 1, ended at 2; b at 1, 3 and 10; c was refused at 4; d has not ended."""
    return Result(
        request_ids=("a", "b", "c", "d"),
        workers=("w0",),
        arrival_seconds=np.array([0.0, 1.0, 4.0, 5.0]),
        first_token_seconds=np.array([1.0, 3.0, NAN, 6.0]),
        second_token_seconds=np.full(4, NAN),
        finish_seconds=np.array([2.0, 10.0, NAN, NAN]),
        outcome=np.array([FINISHED, FINISHED, REFUSED, UNFINISHED], np.int8),
        worker=np.array([0, 0, -1, 0]),
        prompt_tokens=np.array([1000, 2000, 10, 10]),
        output_tokens=np.array([5, 1, 0, 1]),
        placed_tokens=np.zeros(4, np.int64),
        cached_tokens=np.array([0, 1500, -1, 0]),
        busy_seconds=np.array([10.0]),
        counts={},
        scheduler_stats={},
    )


def requests(deadlines: list[float | None]) -> list[PromptRequest]:
    part = (np.array([1], np.int32),)
    return [
        PromptRequest(name, part, 1, group=group, deadline_seconds=deadline)
        for name, group, deadline in zip("abcd", "xxyy", deadlines, strict=True)
    ]


def test_turns_an_hour_are_those_that_ended_in_the_time_looked_at() -> None:
    assert turns_per_hour(result(), 0.0, 10.0) == 720.0
    assert turns_per_hour(result(), 2.0, 10.0) == 450.0  # an end at the very beginning is not in it
    assert ended_between(result(), 1.0, 9.0).tolist() == [True, False, False, False]
    with pytest.raises(InvalidInput, match="begin_seconds"):
        turns_per_hour(result(), 3.0, 3.0)


def test_service_is_the_prefill_of_what_was_missed_and_a_share_of_decoding() -> None:
    model = CostModel.preset("mistral-7b/a6000")
    alone, shared = (service_seconds(result(), model, batch) for batch in (1, 8))
    assert alone[0] == pytest.approx(model.prefill_time(1000, 1000) + model.decode_time(5, 1000, 1))
    assert shared[0] == pytest.approx(model.prefill_time(1000, 1000) + model.decode_time(5, 1000, 8) / 8)
    assert alone[1] == pytest.approx(model.prefill_time(500, 2000) + model.decode_time(1, 2000, 1))
    assert alone[2:].tolist() == [0.0, 0.0]


def test_nobody_is_entitled_to_more_than_asked_for_and_the_rest_is_divided_by_weight() -> None:
    assert entitlements({"a": 10.0, "b": 1.0, "c": 10.0}, 9.0) == {"b": 1.0, "a": 4.0, "c": 4.0}
    assert entitlements({"a": 10.0, "b": 10.0}, 9.0, {"a": 2.0}) == {"a": 6.0, "b": 3.0}
    assert entitlements({"a": 1.0, "b": 2.0}, 9.0) == {"a": 1.0, "b": 2.0}
    with pytest.raises(InvalidInput, match="weights"):
        entitlements({"a": 1.0}, 1.0, {"a": 0.0})
    with pytest.raises(InvalidInput, match="demand"):
        entitlements({"a": -1.0}, 1.0)


def test_jains_index_is_one_where_all_are_equal_and_one_nth_where_one_has_everything() -> None:
    assert jain_index([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain_index([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([1.0, 3.0]) == pytest.approx(16 / 20)
    assert np.isnan(jain_index([]))


def test_deadlines_are_kept_by_first_tokens_in_time_of_requests_that_end() -> None:
    assert within_deadlines(result(), requests([1.0, 1.9, 9.0, None])) == pytest.approx(1 / 3)
    assert within_deadlines(result(), requests([1.0, 2.0, None, 9.0])) == pytest.approx(2 / 3)
    with pytest.raises(InvalidInput, match="deadline"):
        within_deadlines(result(), requests([None] * 4))


def test_a_makespan_runs_from_the_first_arrival_to_the_last_end() -> None:
    found = group_makespans(result(), requests([None] * 4))
    assert found["x"] == 10.0 and np.isnan(found["y"])
    assert np.isnan(makespan(result()))


# --- closed loops of sessions -----------------------------------------------------------------------------------------


def test_a_closed_loop_never_has_more_live_sessions_than_seats_and_pauses_after_answers() -> None:
    made = coding_agents(12, 0, scale=64, turns_max=6)
    seated = sessions_at_once(made, 3, 1, pause_max_seconds=5.0)
    found = sim.simulate(seated, sim.SimConfig(workers=2, local=LocalConfig(50_000, max_running=64)))
    assert (found.outcome == FINISHED).all()
    rows = {request.request_id: row for row, request in enumerate(seated.requests)}
    for row, request in enumerate(seated.requests):
        if request.after is not None:
            pause = found.arrival_seconds[row] - found.finish_seconds[rows[request.after]]
            assert pause == pytest.approx(request.pause_seconds)
    own = [row for row, request in enumerate(seated.requests) if request.hint and not request.hint.parent]
    events = [(found.arrival_seconds[row], 1) for row in own] + [(found.finish_seconds[row], -1) for row in own]
    live, most = 0, 0
    for _, step in sorted(events):
        live += step
        most = max(most, live)
    assert most <= 3
    assert turns_per_hour(found, 0.0, makespan(found)) == pytest.approx(len(seated) * 3600 / makespan(found))


def test_closed_loops_are_the_same_again() -> None:
    runs = []
    for _ in range(2):
        seated = sessions_at_once(coding_agents(6, 0, scale=64, turns_max=5), 3, 1, begun=True)
        config = sim.SimConfig(workers=2, local=LocalConfig(50_000, max_running=64))
        runs.append(sim.simulate(seated, replace(config, seed=4)).trace_hash)
    assert runs[0] == runs[1]
