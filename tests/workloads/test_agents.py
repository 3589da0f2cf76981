"""Agents' sessions, samples of one prompt, and tenants: what is read, what generators hit, when things are sent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preble.errors import InvalidInput
from preble.types import SessionHint
from preble.workloads import (
    Flood,
    PromptRequest,
    Workload,
    coding_agents,
    read,
    read_sessions,
    read_tenant_rates,
    sample_groups,
    session_arrivals,
    sessions_at_once,
    tenant_arrivals,
    tenant_rates,
)


def turn(session: str, i: int, keep: int, new: list[list[int]], **more: Any) -> dict[str, Any]:
    """A line of the trace."""
    return {"session": session, "i": i, "t": 10.0 * i, "in": 0, "out": 128, "keep": keep, "new": new, **more}


def trace(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    path = tmp_path / "agents.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


A = turn("a", 0, 0, [[0, 4]], api=2.0, tool_tokens=64, system_tokens=64)
A1 = turn("a", 1, 3, [[9, 2]], think=7.0, after_tool=1)
SUB = turn("a/x@0", 0, 0, [[0, 3]], t=5.0, parent=["a", 0])
B = turn("b", 0, 0, [[0, 3]], tool_tokens=64, system_tokens=128)


def by_id(workload: Workload) -> dict[str, PromptRequest]:
    return {request.request_id: request for request in workload.requests}


def shared(one: PromptRequest, other: PromptRequest) -> int:
    """Leading tokens that are equal."""
    count = min(one.prompt_tokens, other.prompt_tokens)
    unlike = np.flatnonzero(one.token_ids[:count] != other.token_ids[:count])
    return int(unlike[0]) if len(unlike) else count


# --- the trace --------------------------------------------------------------------------------------------------------


def test_a_turn_keeps_what_it_says_of_the_turn_before_and_sessions_share_their_head(tmp_path: Path) -> None:
    found = by_id(read_sessions(trace(tmp_path, SUB, A, A1, B), scale=16))
    first, second, sub, other = (found[name] for name in ("a.0000", "a.0001", "a/x@0.0000", "b.0000"))
    assert [one.prompt_tokens for one in (first, second, sub, other)] == [16, 20, 12, 12]
    assert shared(first, second) == 12  # three blocks of 64 tokens, a sixteenth
    assert shared(first, other) == 8  # tools and system prompt of the shorter one
    assert shared(first, sub) == 0  # a sub-agent without a head has none
    assert (second.after, second.pause_seconds, second.after_tool) == ("a.0000", 7.0, True)
    assert (sub.after, sub.pause_seconds) == ("a.0000", 3.0)  # 5 s after the turn was sent, which took 2 s
    assert sub.hint == SessionHint(session="a/x@0", parent="a") and sub.group == "a"
    assert first.output_tokens == 8


def test_a_sub_agent_has_the_ids_of_its_session(tmp_path: Path) -> None:
    bare = {**A, "tool_tokens": 0, "system_tokens": 0}
    found = by_id(read(trace(tmp_path, bare, SUB)))
    assert shared(found["a.0000"], found["a/x@0.0000"]) == 192  # all three of its blocks, whole


def test_a_session_ends_before_a_prompt_that_is_too_long_and_its_later_sub_agents_with_it(tmp_path: Path) -> None:
    late = {**SUB, "session": "a/y@1", "parent": ["a", 1]}
    found = read_sessions(trace(tmp_path, A, A1, SUB, late), scale=16, prompt_tokens_max=16)
    assert list(by_id(found)) == ["a.0000", "a/x@0.0000"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({**A, "new": [[0]]}, "'new'"),
        ({**A, "new": []}, "empty"),
        ({**A, "keep": -1}, "'keep'"),
        ({**A1, "think": "long"}, "'think'"),
        ({**SUB, "parent": ["a"]}, "'parent'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    before = [] if row["session"] == "a" and row["i"] == 0 else [A]
    with pytest.raises(InvalidInput, match=rf"agents.jsonl, line {len(before) + 1}: .*{said}"):
        read_sessions(trace(tmp_path, *before, row))


# --- generated --------------------------------------------------------------------------------------------------------


def test_generated_sessions_have_the_statistics_of_the_trace() -> None:
    made = coding_agents(120, 3, scale=16)
    found = by_id(made)
    kept = total = 0
    pauses: dict[bool, list[float]] = {True: [], False: []}
    for request in made.requests:
        before = found.get(request.after or "")
        if before is not None and before.hint == request.hint:
            kept += shared(before, request)
            total += request.prompt_tokens
            pauses[request.after_tool].append(request.pause_seconds)
    assert 0.95 < kept / total < 0.98
    assert np.percentile(pauses[True], [50, 90]) == pytest.approx([8, 68], rel=0.12)
    assert np.percentile(pauses[False], 50) == pytest.approx(126, rel=0.2)
    prompts = np.mean([request.prompt_tokens for request in made.requests])
    assert prompts * 16 == pytest.approx(118_000, rel=0.25)
    assert np.mean([request.output_tokens for request in made.requests]) * 16 == pytest.approx(440, rel=0.12)


def test_a_generated_sub_agent_opens_with_all_of_its_parents_prompt() -> None:
    made = coding_agents(30, 0)
    found = by_id(made)
    subs = [request for request in made.requests if request.hint and request.hint.parent and request.after]
    firsts = [request for request in subs if found[request.after or ""].hint != request.hint]
    assert firsts
    for request in firsts:
        parent = found[request.after or ""]
        assert shared(parent, request) == parent.prompt_tokens
        assert parent.hint is not None
        own = request.request_id.rpartition(".")[0]
        assert request.hint == SessionHint(session=own, parent=parent.hint.session)


def test_the_same_seed_makes_the_same_sessions() -> None:
    one, same, other = (coding_agents(5, seed) for seed in (1, 1, 2))
    assert [r.request_id for r in one.requests] == [r.request_id for r in same.requests]
    assert all((a.token_ids == b.token_ids).all() for a, b in zip(one.requests, same.requests, strict=True))
    assert [r.output_tokens for r in one.requests] != [r.output_tokens for r in other.requests]


def test_samples_of_a_group_have_one_prompt_and_answers_of_their_own() -> None:
    made = sample_groups(64, 16, 0)
    assert len(made) == 1024
    one = made.requests[:16]
    assert all(request.parts is one[0].parts or request.parts == one[0].parts for request in one)
    assert len({request.output_tokens for request in one}) > 8
    assert shared(one[0], made.requests[16]) == 500
    assert np.mean([request.output_tokens for request in made.requests]) == pytest.approx(400, rel=0.1)


# --- when sessions begin ----------------------------------------------------------------------------------------------


def test_so_many_sessions_are_there_at_once_and_each_seat_goes_on() -> None:
    made = coding_agents(12, 0, turns_max=6)
    seated = sessions_at_once(made, 4, 1, pause_max_seconds=20.0, spread_seconds=30.0)
    firsts = [request for request in seated.requests if request.after is None]
    assert len(firsts) == 4 and len(seated) == len(made)
    assert all(0.0 <= request.arrival_seconds < 30.0 for request in firsts)
    assert max(request.pause_seconds for request in seated.requests) == 20.0
    known: set[str] = set()
    for request in seated.requests:
        assert request.after is None or request.after in known
        known.add(request.request_id)


def test_a_session_that_has_begun_is_the_rest_of_one() -> None:
    made = coding_agents(8, 0, turns_max=40)
    seated = sessions_at_once(made, 8, 1, begun=True)
    starts = [request.request_id for request in seated.requests if request.after is None]
    assert len(starts) == 8 and any(not name.endswith(".0000") for name in starts)
    assert len(seated) < len(made)


def test_sessions_come_by_a_poisson_process_and_turns_wait() -> None:
    made = session_arrivals(coding_agents(400, 0, turns_max=2), 4.0, 7)
    firsts = [request.arrival_seconds for request in made.requests if request.after is None]
    assert len(firsts) == 400 and firsts == sorted(firsts)
    assert np.mean(np.diff(firsts)) == pytest.approx(0.25, rel=0.15)
    assert all(request.arrival_seconds == 0.0 for request in made.requests if request.after is not None)


def test_more_seats_than_sessions_are_refused() -> None:
    with pytest.raises(InvalidInput, match="live"):
        sessions_at_once(coding_agents(3, 0, turns_max=2), 4, 0)


# --- tenants ----------------------------------------------------------------------------------------------------------


def two_groups() -> Workload:
    part = np.array([1, 2, 3], np.int32)
    return Workload("made", [PromptRequest(name, (part,), 2, name) for name in "ab"], "made here")


def test_a_flood_leaves_the_others_requests_as_they_are() -> None:
    rates = {"x": 2.0, "y": 2.0}
    calm = tenant_arrivals(two_groups(), rates, 200.0, 0)
    flooded = tenant_arrivals(two_groups(), rates, 200.0, 0, [Flood("x", 10.0, 50.0, 150.0)])

    def times(workload: Workload, tenant: str) -> list[float]:
        return [request.arrival_seconds for request in workload.requests if request.tenant == tenant]

    assert times(calm, "y") == times(flooded, "y") and len(times(calm, "y")) == pytest.approx(400, rel=0.15)
    more = len(times(flooded, "x")) - len(times(calm, "x"))
    assert more == pytest.approx(1800, rel=0.1)
    inside = [at for at in times(flooded, "x") if 50.0 <= at < 150.0]
    assert len(inside) == pytest.approx(2000, rel=0.1)


def test_rates_of_clients_are_read_busiest_first(tmp_path: Path) -> None:
    path = tmp_path / "rates.csv"
    path.write_text("client,window_start_s,rate_per_s\n1,0,2.0\n1,600,4.0\n2,0,9.0\n3,0,1.0\n")
    assert read_tenant_rates(path, 2) == {"2": 9.0, "1": 3.0}
    with pytest.raises(InvalidInput, match="clients"):
        read_tenant_rates(path, 4)
    path.write_text("client,window_start_s,rate_per_s\n1,0,much\n")
    with pytest.raises(InvalidInput, match="line 2: 'rate_per_s'"):
        read_tenant_rates(path, 1)


def test_drawn_rates_sum_to_what_was_asked_for() -> None:
    rates = tenant_rates(50, 12.0, 0)
    assert sum(rates.values()) == pytest.approx(12.0) and max(rates.values()) > 10 * np.median(list(rates.values()))
    alike = tenant_rates(5, 10.0, 0, sigma=0.0)
    assert set(alike.values()) == {2.0}


@pytest.mark.parametrize("flood", [("x", 0.0, 0.0, 1.0), ("x", 2.0, 5.0, 5.0), ("z", 2.0, 0.0, 1.0)])
def test_a_wrong_flood_is_refused(flood: tuple[str, float, float, float]) -> None:
    with pytest.raises(InvalidInput, match="lood"):
        tenant_arrivals(two_groups(), {"x": 1.0}, 10.0, 0, [Flood(*flood)])


def test_a_deadline_must_be_a_time() -> None:
    with pytest.raises(InvalidInput, match="deadline_seconds"):
        replace(two_groups().requests[0], deadline_seconds=-1.0)


def test_a_deadline_of_no_time_is_refused() -> None:
    """So it is by the scheduler; here before a simulation is half over."""
    with pytest.raises(InvalidInput, match="deadline_seconds must be positive"):
        replace(two_groups().requests[0], deadline_seconds=0.0)
