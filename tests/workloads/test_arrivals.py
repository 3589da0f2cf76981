"""Arrival processes, popularity, samples and closed loops, on small workloads made here. Readers and generators have
files of their own."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from preble.errors import InvalidInput
from preble.workloads import (
    PromptRequest,
    Workload,
    arrival_times,
    azure_times,
    closed_loop,
    merged,
    poisson,
    read,
    take,
    traced,
    zipf,
)
from preble.workloads.arrivals import SUFFIX_IDS
from tests.support import paths

DATA = paths.DATA / "workloads"


def prompts(sizes: dict[str, int], name: str = "made") -> Workload:
    """`sizes[group]` requests of each group, whose prompts are the group's token and one of their own."""
    requests = [
        PromptRequest(f"{group}{i}", (np.array([ord(group), 1000 + i], np.int32),), 3, group)
        for group, size in sizes.items()
        for i in range(size)
    ]
    return Workload(name, requests, "made here")


def chains(lengths: list[int]) -> Workload:
    """Closed-loop chains of these lengths: "c0.0", "c0.1" after it, and so on."""
    requests = []
    for k, length in enumerate(lengths):
        for turn in range(length):
            after = f"c{k}.{turn - 1}" if turn else None
            part = np.array([k, turn], np.int32)
            requests.append(PromptRequest(f"c{k}.{turn}", (part,), 3, f"c{k}", after=after))
    return Workload("chains", requests, "made here")


def ids(workload: Workload) -> list[str]:
    return [request.request_id for request in workload.requests]


# --- arrivals ---------------------------------------------------------------------------------------------------------


def test_poisson_arrivals_are_independent_at_the_rate_asked_for() -> None:
    given = prompts({"a": 20_000})
    drawn = poisson(given, 4.0, seed=1)
    times = arrival_times(drawn)
    gaps = np.diff(times, prepend=0.0)
    # 20,000 exponential gaps: their mean has a deviation of 0.7 %, and as many lie below the median.
    assert gaps.mean() == pytest.approx(0.25, rel=0.03) and gaps.std() == pytest.approx(0.25, rel=0.03)
    assert np.mean(gaps < 0.25 * np.log(2.0)) == pytest.approx(0.5, abs=0.02)
    assert np.corrcoef(gaps[:-1], gaps[1:])[0, 1] == pytest.approx(0.0, abs=0.03)
    assert ids(drawn) == ids(given) and drawn.arrivals == "poisson 4 rps, seed 1"
    assert given.requests[0].arrival_seconds == 0.0 and given.arrivals == "none"
    assert arrival_times(poisson(given, 4.0, seed=1)).tolist() == times.tolist()
    assert arrival_times(poisson(given, 4.0, seed=2)).tolist() != times.tolist()


def test_traced_arrivals_start_at_0_and_are_scaled() -> None:
    trace = read(DATA / "azure.csv")
    drawn = traced(prompts({"a": 2}), arrival_times(trace)[1:], scale=0.5)
    assert arrival_times(drawn) == pytest.approx([0.0, (2.000472 - 0.052) / 2])
    assert drawn.arrivals == "traced, times 0.5"


@pytest.mark.parametrize(("kind", "mean", "median"), [("code", 0.390, 0.064), ("conversation", 0.181, 0.118)])
def test_azure_times_have_the_published_mean_and_median_gap(kind: str, mean: float, median: float) -> None:
    times = azure_times(kind, 200_000, seed=3)
    gaps = np.diff(times)
    assert times[0] == 0.0 and times.shape == (200_000,)
    assert gaps.mean() == pytest.approx(mean, rel=0.05)
    assert np.median(gaps) == pytest.approx(median, rel=0.02)
    assert gaps.std() > gaps.mean()  # burstier than Poisson
    assert azure_times(kind, 200_000, seed=3).tolist() == times.tolist()


def test_merged_workloads_are_served_in_order_of_arrival() -> None:
    tools = traced(prompts({"a": 2}), [0.0, 2.0])
    videos = traced(prompts({"b": 2}), [0.0, 1.0])
    both = merged("both", [tools, videos])
    assert ids(both) == ["a0", "b0", "b1", "a1"]
    assert (both.name, both.source, both.arrivals) == ("both", "made here + made here", "traced, times 1")
    with pytest.raises(InvalidInput, match="twice"):
        merged("both", [tools, tools])


# --- popularity and samples -------------------------------------------------------------------------------------------


def test_zipf_ranks_groups_by_their_requests_and_draws_by_rank() -> None:
    given = prompts({"a": 5, "b": 30, "c": 10, "d": 30})
    drawn = zipf(given, 1.1, 40_000, seed=5)
    counts = Counter(request.group for request in drawn.requests)
    shares = np.arange(1, 5) ** -1.1
    for group, share in zip("bdca", shares / shares.sum(), strict=True):  # b before d: as many, but it came first
        assert counts[group] / 40_000 == pytest.approx(share, rel=0.03)
    assert len(set(ids(drawn))) == len(drawn) == 40_000
    assert ids(zipf(given, 1.1, 40_000, seed=5)) == ids(drawn)
    assert drawn.arrivals == "none" and "zipf 1.1" in drawn.source


def test_zipf_repeats_nothing_before_a_group_is_used_up() -> None:
    drawn = zipf(prompts({"a": 100, "b": 100}), 1.0, 60, seed=0)
    assert all("#" not in name for name in ids(drawn)) and ids(drawn)[:2] != ["a0", "a1"]


def test_repeats_have_ids_of_their_own_and_where_asked_a_token_of_their_own() -> None:
    given = prompts({"a": 2})
    plain = zipf(given, 1.0, 6, seed=0)
    assert sorted(ids(plain)) == ["a0", "a0#2", "a0#3", "a1", "a1#2", "a1#3"]
    by_id = {request.request_id: request for request in plain.requests}
    assert by_id["a0#2"].token_ids.tolist() == by_id["a0"].token_ids.tolist()
    suffixed = zipf(given, 1.0, 6, seed=0, unique_suffix=True)
    assert ids(suffixed) == ids(plain)
    whole = [tuple(request.token_ids.tolist()) for request in suffixed.requests]
    assert len(set(whole)) == 6
    for request, twin in zip(suffixed.requests, plain.requests, strict=True):
        repeat = "#" in request.request_id
        assert request.token_ids[:2].tolist() == twin.token_ids.tolist()
        assert request.prompt_tokens == 2 + repeat and (not repeat or request.token_ids[2] >= SUFFIX_IDS)


def test_take_keeps_whole_groups_in_their_order() -> None:
    given = prompts({"a": 7, "b": 7, "c": 7, "d": 7, "e": 7})
    taken = take(given, 15, seed=2)
    assert len(taken) == 21
    assert set(Counter(request.group for request in taken.requests).values()) == {7}
    assert ids(taken) == [name for name in ids(given) if name in set(ids(taken))]
    assert ids(take(given, 35, seed=2)) == ids(given)
    kept = {frozenset(request.group for request in take(given, 15, seed=s).requests) for s in range(20)}
    assert len(kept) > 3, "the seed decides which groups are kept"


def test_take_refuses_to_part_a_request_from_the_one_it_follows() -> None:
    first, second = prompts({"a": 1, "b": 1}).requests
    tied = PromptRequest(second.request_id, second.parts, 3, "b", after=first.request_id)
    with pytest.raises(InvalidInput, match="another group"):
        for seed in range(20):
            take(Workload("tied", [first, tied]), 1, seed=seed)


# --- closed loops -----------------------------------------------------------------------------------------------------


def test_a_closed_loop_keeps_so_many_agents_busy() -> None:
    given = chains([3, 1, 2, 4, 2])
    loop = closed_loop(given, 2, seed=1, pause_seconds=0.5)
    assert sorted(ids(loop)) == sorted(ids(given)) and len(loop) == 12
    assert sum(request.after is None for request in loop.requests) == 2
    seen: set[str] = set()
    for request in loop.requests:
        assert request.arrival_seconds == 0.0
        assert request.after is None or request.after in seen, "whoever follows stands after whom it follows"
        assert request.pause_seconds == (0.0 if request.after is None else 0.5)
        seen.add(request.request_id)
    followed = Counter(request.after for request in loop.requests if request.after is not None)
    assert set(followed.values()) == {1}, "an agent sends one request at a time"
    by_id = {request.request_id: request for request in loop.requests}
    for request in given.requests:
        assert request.after is None or by_id[request.request_id].after == request.after, "turns stay in their order"
    assert loop.arrivals == "closed loop of 2 agents, pause 0.5 s, seed 1"
    assert {ids(closed_loop(given, 2, seed=s))[0] for s in range(20)} > {"c0.0"}, "the seed decides who starts"


def test_more_agents_than_chains_leave_some_idle() -> None:
    loop = closed_loop(chains([2, 2]), 9, seed=0)
    assert [request.after for request in loop.requests[:2]] == [None, None] and len(loop) == 4
    assert closed_loop(Workload("none", []), 9, seed=0).requests == []


def test_a_read_log_becomes_a_closed_loop() -> None:
    loop = closed_loop(read(DATA / "alfworld.jsonl"), 1, seed=0)
    assert [request.after for request in loop.requests] == [None, *ids(loop)[:-1]]


# --- what is wrong ----------------------------------------------------------------------------------------------------

SMALL = prompts({"a": 3})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: poisson(SMALL, 0.0, 0), "rps"),
        (lambda: poisson(SMALL, float("nan"), 0), "rps"),
        (lambda: poisson(SMALL, 1.0, -1), "seed"),
        (lambda: traced(SMALL, [0.0, 1.0]), "times_seconds must be 3 times or more"),
        (lambda: traced(SMALL, [0.0, 2.0, 1.0]), "must not fall"),
        (lambda: traced(SMALL, [0.0, 1.0, float("inf")]), "finite"),
        (lambda: traced(SMALL, [[0.0], [1.0], [2.0]]), "times_seconds"),
        (lambda: traced(SMALL, [0.0, 1.0, 2.0], scale=0.0), "scale"),
        (lambda: azure_times("chat", 3, 0), "kind must be one of"),
        (lambda: azure_times("code", 0, 0), "requests"),
        (lambda: zipf(SMALL, 0.0, 3, 0), "exponent"),
        (lambda: zipf(SMALL, 1.0, 0, 0), "requests"),
        (lambda: zipf(SMALL, 1.0, 2**29 + 1, 0), "requests"),
        (lambda: zipf(chains([2]), 1.0, 3, 0), "closed loop"),
        (lambda: zipf(Workload("none", []), 1.0, 3, 0), "no requests"),
        (lambda: take(SMALL, 4, 0), "requests"),
        (lambda: closed_loop(SMALL, 0, 0), "agents"),
        (lambda: closed_loop(SMALL, 1, 0, pause_seconds=-1.0), "pause_seconds"),
        (lambda: closed_loop(Workload("cut", chains([2]).requests[1:]), 1, 0), "'c0.1' follows 'c0.0'"),
    ],
)
def test_a_wrong_argument_is_named(call: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        call()
