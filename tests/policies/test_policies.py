"""The rules of others: each decides as published on hand-made views, and as a naive second statement of it on random
ones.

The bookings that some rules need are tested in `scheduling/test_policy_state.py`, what all share in `test_policy.py`.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble import GlobalScheduler, ManualClock, Policy
from preble.errors import InvalidConfig, InvalidInput
from preble.policies.aibrix import AibrixPreble, AibrixPrefix
from preble.policies.base import NAMES, POLICIES, RequestView, WorkersView, resolve
from preble.policies.cache_aware import CacheAware, CacheAwareSpill
from preble.policies.dualmap import DualMap
from preble.policies.e2_paper import E2Paper
from preble.policies.known import (
    ActiveBlocks,
    PaperHistory,
    PromptSession,
    WindowCosts,
    by_rendezvous,
    drawn_least,
    hashed,
    ranks,
)
from preble.policies.kv_cost import KvCost, LMetric
from preble.policies.llmd import LlmdSticky
from preble.policies.oracle import OraclePartition
from preble.policies.prefix_hash import PrefixHash
from preble.policies.session import SessionHash, SessionLeast
from preble.policies.simple import PowerOfTwo

PROMPT = tuple(range(160))
FEW = settings(max_examples=80, deadline=None, derandomize=True)


def asked(tokens: Sequence[int] = PROMPT, draw: float = 0.0, request_id: Any = None, **known: Any) -> RequestView:
    return RequestView(tokens, None, None, 0, draw, request_id, known)


def fleet(
    live: Sequence[int],
    matched: Sequence[int] | None = None,
    cached: Sequence[int] | None = None,
    prefill_seconds: Sequence[float] | None = None,
    waiting_prefill_seconds: Sequence[float] | None = None,
    **columns: Sequence[Any],
) -> WorkersView:
    """A view of len(live) workers "w0", "w1", ...; what is not given is zero."""
    zeros = [0] * len(live)
    view = WorkersView(
        ids=[f"w{i}" for i in range(len(live))],
        matched_tokens=matched or zeros,
        load_seconds=[0.0] * len(live),
        eviction_seconds=[0.0] * len(live),
        prefill_seconds=prefill_seconds or [0.0] * len(live),
        live_requests=live,
        waiting_requests=zeros,
        waiting_prefill_seconds=waiting_prefill_seconds or [0.0] * len(live),
        live_output_tokens=zeros,
        live_prompt_tokens=zeros,
        mean_output_tokens=zeros,
        context_token_seconds=[0.0] * len(live),
        cached_tokens=cached or zeros,
        kv_capacity_tokens=[1000] * len(live),
        hit_share=0.0,
        pressure=0.0,
    )
    return replace(view, **columns)


def by_id(values: Sequence[Any]) -> dict[str, Any]:
    return {f"w{i}": value for i, value in enumerate(values)}


def decides(policy: Policy, request: RequestView, workers: WorkersView) -> int:
    """What it decides; the same when it is asked again, and always of the lowest score it shows."""
    choice = policy.decide(request, workers)
    scores = policy.checked_scores(request, workers)
    assert policy.decide(request, workers) == choice and scores[choice] == min(scores)
    return choice


@st.composite
def situations(draw: st.DrawFn) -> tuple[int, WorkersView, float]:
    """(prompt tokens, workers, a draw): loads near each other or far apart, matches from none to all but one token."""
    count, prompt = draw(st.integers(1, 6)), draw(st.integers(1, 400))
    most = draw(st.sampled_from([2, 12, 200]))
    column = lambda low, high: draw(st.lists(st.integers(low, high), min_size=count, max_size=count))  # noqa: E731
    matched = [min(m, prompt - 1) for m in column(0, draw(st.sampled_from([0, prompt, 2 * prompt])))]
    seconds = [tokens / 1000 for tokens in column(0, 500)]
    workers = fleet(column(0, most), matched, column(0, 3), seconds)
    return prompt, workers, draw(st.floats(0, 1, exclude_max=True))


# --- names ------------------------------------------------------------------------------------------------------------


def test_every_name_makes_its_policy_and_gives_its_name() -> None:
    for name in NAMES:
        policy = resolve(name)
        assert policy is not None and (policy.name, policy.reason) == (name, name)
    assert ("e2", *NAMES) == POLICIES and len(set(POLICIES)) == len(POLICIES)


def test_an_oracle_cannot_be_had_by_name_and_the_error_says_what_to_do() -> None:
    with pytest.raises(InvalidConfig, match=r"preble\.policies\.oracle\.OraclePartition"):
        GlobalScheduler(["a"], policy="oracle_partition")


def test_a_need_that_no_book_meets_is_refused() -> None:
    class Curious(PowerOfTwo):
        needs = ("weather",)

    with pytest.raises(InvalidConfig, match="weather"):
        GlobalScheduler(["a"], policy=Curious)


def test_the_rules_and_their_books_are_loaded_when_they_are_asked_for() -> None:
    code = (
        "import sys, preble; s = preble.GlobalScheduler(['a']); s.schedule([1, 2]);"
        "before = {m for m in sys.modules if 'preble.policies.' in m or 'policy_state' in m};"
        "before.discard('preble.policies.base');"
        "preble.GlobalScheduler(['a'], policy='kv_cost');"
        "print(before, 'preble.policies.kv_cost' in sys.modules, 'preble.scheduling.policy_state' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["set()", "True", "True"]


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: CacheAware(cache_threshold=1.5), "cache_threshold"),
        (lambda: CacheAware(balance_requests=-1), "balance_requests"),
        (lambda: CacheAware(balance_ratio=float("nan")), "balance_ratio"),
        (lambda: KvCost(prefill_load_scale=-1.0), "prefill_load_scale"),
        (lambda: PrefixHash(prefix_tokens=0), "prefix_tokens"),
        (lambda: PrefixHash(load_factor=0.9), "load_factor"),
        (lambda: LlmdSticky(hit_share=0.0), "hit_share"),
        (lambda: LlmdSticky(hit_share=1.1), "hit_share"),
        (lambda: LlmdSticky(release_seconds=float("nan")), "release_seconds"),
        (lambda: DualMap(ttft_max_seconds=-1.0), "ttft_max_seconds"),
        (lambda: E2Paper(exploit_share=-0.1), "exploit_share"),
        (lambda: E2Paper(exploit_share=float("nan")), "exploit_share"),
        (lambda: OraclePartition({}), "groups"),
        (lambda: OraclePartition({"r": "g"}, {"h": "w0"}), "homes"),
    ],
)
def test_arguments_that_make_no_sense_are_named(make: Any, argument: str) -> None:
    with pytest.raises(InvalidConfig, match=argument):
        make()


# --- helpers of the rules ---------------------------------------------------------------------------------------------


def test_ranks_keep_the_order_and_the_ties() -> None:
    assert ranks([(2, 1), (1, 9), (2, 1), (0, 0)]) == [2.0, 1.0, 2.0, 0.0]


def test_a_draw_reaches_each_of_the_lowest_and_no_other() -> None:
    scores = [3.0, 1.0, 1.0, 2.0, 1.0]
    assert Counter(drawn_least(scores, i / 30) for i in range(30)) == {1: 10, 2: 10, 4: 10}


# --- power_of_two -----------------------------------------------------------------------------------------------------


def test_power_of_two_draws_every_pair_alike_and_takes_the_less_loaded() -> None:
    live, count = [5, 0, 3, 9], 4
    seen = Counter()
    for pair in range(count * (count - 1)):
        scores = PowerOfTwo().score(asked(draw=(pair + 0.5) / 12), fleet(live))
        winner, loser = scores.index(0.0), scores.index(1.0)
        assert live[winner] <= live[loser]
        seen[frozenset((winner, loser))] += 1
    assert len(seen) == 6 and set(seen.values()) == {2}


def test_power_of_two_takes_the_first_drawn_of_two_alike_and_the_only_one_there_is() -> None:
    firsts = Counter(decides(PowerOfTwo(), asked(draw=(pair + 0.5) / 6), fleet([1, 1, 1])) for pair in range(6))
    assert firsts == {0: 2, 1: 2, 2: 2}
    assert decides(PowerOfTwo(), asked(draw=0.999), fleet([7])) == 0


def test_power_of_two_never_takes_the_busiest_of_three() -> None:
    assert all(decides(PowerOfTwo(), asked(draw=i / 50), fleet([1, 9, 2])) != 1 for i in range(50))


# --- cache_aware ------------------------------------------------------------------------------------------------------


def naive_cache_aware(
    prompt: int, w: WorkersView, placed: Sequence[int], threshold: float, requests: int, ratio: float
) -> int:
    everyone, live = range(len(w)), list(w.live_requests)
    idlest = sorted(everyone, key=lambda i: (live[i], placed[i]))[0]
    if max(live) - min(live) > requests and max(live) > ratio * min(live):
        return idlest
    best = sorted(everyone, key=lambda i: (w.matched_tokens[i], -live[i], -w.cached_tokens[i]), reverse=True)[0]
    return best if w.matched_tokens[best] / prompt > threshold else idlest


@FEW
@given(situations(), st.lists(st.integers(0, 5), min_size=6, max_size=6))
def test_cache_aware_is_its_rule_with_both_default_sets(
    situation: tuple[int, WorkersView, float], placed: list[int]
) -> None:
    prompt, workers, _ = situation
    request = asked(range(prompt), placed_requests=by_id(placed))
    for name, numbers in ("cache_aware", (0.3, 64, 1.5)), ("cache_aware:struct", (0.5, 32, 1.1)):
        policy = resolve(name)
        assert policy is not None
        assert decides(policy, request, workers) == naive_cache_aware(prompt, workers, placed, *numbers)


def test_cache_aware_follows_the_prefix_until_the_fleet_is_imbalanced_then_nobody_does() -> None:
    request, matched = asked(placed_requests=by_id([9, 4, 2])), [96, 0, 0]
    assert decides(CacheAware(), request, fleet([64, 0, 0], matched)) == 0
    assert decides(CacheAware(), request, fleet([65, 0, 0], matched)) == 2  # of the idle, the one given fewest
    assert decides(CacheAware(), request, fleet([165, 110, 110], matched)) == 0  # 55 apart only
    assert decides(CacheAware(), request, fleet([210, 141, 141], matched)) == 0  # 69 apart, but less than 1.5 times
    assert decides(CacheAware(), request, fleet([0, 0, 65], matched)) == 1  # affinity is off for everyone


def test_the_two_default_sets_of_cache_aware_differ_where_they_should() -> None:
    request = asked(placed_requests=by_id([1, 0]))
    struct = resolve("cache_aware:struct")
    assert struct is not None
    for workers, line, policy in (
        (fleet([1, 0], [64, 0]), 0, 1),  # 40 % cached
        (fleet([40, 0], [128, 0]), 0, 1),  # 40 apart
    ):
        assert (decides(CacheAware(), request, workers), decides(struct, request, workers)) == (line, policy)


def test_a_match_of_exactly_the_threshold_is_not_enough() -> None:
    request = asked(placed_requests=by_id([1, 0]))
    assert decides(CacheAware(), request, fleet([1, 0], [48, 0])) == 1
    assert decides(CacheAware(), request, fleet([1, 0], [49, 0])) == 0


# --- cache_aware_spill ------------------------------------------------------------------------------------------------


def spills(workers: WorkersView, held: Sequence[int] | None = None, prompt: Sequence[int] = PROMPT) -> int:
    """What it decides where live requests hold so many different blocks on each worker."""
    told = blocks([0] * len(workers), held or [0] * len(workers), [0] * len(workers))
    return decides(CacheAwareSpill(), asked(prompt, active_blocks=told), workers)


def naive_cache_aware_spill(prompt: int, w: WorkersView, held: Sequence[int]) -> int:
    used = [min((16 * held[i] + w.live_output_tokens[i]) / 1000, 0.999) for i in range(len(w))]
    well = [i for i in range(len(w)) if w.waiting_requests[i] < 8 and used[i] < 0.8] or list(range(len(w)))
    mean = sum(w.live_requests) / len(w)
    margin = min(max(4, 2 * math.sqrt(mean)), 64)
    wait = {i: w.waiting_prefill_seconds[i] + 0.15 * used[i] / (1 - used[i]) for i in well}
    longest = max(w.matched_tokens[i] for i in well)
    if longest / prompt > 0.5:
        holders = sorted((i for i in well if w.matched_tokens[i] == longest), key=lambda i: w.live_requests[i])[:8]
        calm = [i for i in holders if not (w.live_requests[i] > mean + margin and w.live_requests[i] > 1.5 * mean)]
        if calm:
            return min(calm, key=lambda i: (w.live_requests[i], wait[i], i))
    return min(well, key=lambda i: (wait[i], w.live_requests[i], i))


@FEW
@given(
    situations(),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 500), st.integers(0, 70)), min_size=6, max_size=6),
    st.lists(st.integers(0, 10), min_size=6, max_size=6),
)
def test_cache_aware_spill_is_its_rule(
    situation: tuple[int, WorkersView, float], books: list[tuple[int, int, int]], waiting: list[int]
) -> None:
    prompt, workers, _ = situation
    seconds, output, held = ([row[at] for row in books][: len(workers)] for at in range(3))
    workers = replace(
        workers,
        waiting_prefill_seconds=[each / 10 for each in seconds],
        live_output_tokens=output,
        waiting_requests=waiting[: len(workers)],
    )
    assert spills(workers, held, range(prompt)) == naive_cache_aware_spill(prompt, workers, held)


def test_a_prefix_is_left_above_one_and_a_half_means_and_a_margin_by_that_request_alone() -> None:
    behind: dict[str, Any] = {"waiting_prefill_seconds": [0.0, 0.3, 0.2]}
    ahead: dict[str, Any] = {"waiting_prefill_seconds": [0.4, 0.3, 0.2]}
    assert spills(fleet([6, 0, 0], [96, 0, 0], **ahead)) == 0  # a mean of 2, and 4
    assert spills(fleet([7, 0, 0], [96, 0, 0], **ahead)) == 2  # more than 2.33 + 4
    assert spills(fleet([7, 0, 0], [96, 0, 0], **behind)) == 0  # left, and found again: nobody waits less
    assert spills(fleet([7, 0, 0], [0, 96, 0], **behind)) == 1  # others follow their prefix still
    assert spills(fleet([15, 6, 6], [96, 0, 0], **ahead)) == 0  # a mean of 9, and twice 3
    assert spills(fleet([16, 6, 6], [96, 0, 0], **ahead)) == 2  # more than 9.33 + 6.11
    assert spills(fleet([165, 83, 82], [96, 0, 0], **ahead)) == 0  # a mean of 110: more than 131, but not than 165
    assert spills(fleet([166, 82, 82], [96, 0, 0], **ahead)) == 2


def test_more_than_half_of_the_prompt_must_match_and_of_equal_holders_the_least_loaded_is_asked() -> None:
    assert spills(fleet([1, 0], [80, 0])) == 1 and spills(fleet([1, 0], [81, 0])) == 0
    assert spills(fleet([2, 1, 0], [96, 96, 90])) == 1  # the longest only
    assert spills(fleet([1, 1, 0], [96, 96, 0], waiting_prefill_seconds=[0.2, 0.1, 0.0])) == 1


def test_expected_wait_is_the_queue_and_the_pressure_on_kv() -> None:
    for held, choice in (46, 0), (31, 1):  # with 14 of output 750 of 1000 tokens, 0.15 * 3 s, or 510
        workers = fleet([0, 0], waiting_prefill_seconds=[0.5, 0.2], live_output_tokens=[0, 14])
        assert spills(workers, [0, held]) == choice
    assert spills(fleet([1, 0], waiting_prefill_seconds=[0.1, 0.1])) == 1  # equals: fewer live requests
    assert spills(fleet([1, 0]), [70, 99]) == 1  # both beyond what there is: as full as each other


def test_workers_with_eight_waiting_or_eighty_percent_of_kv_are_left_out_while_another_is_not() -> None:
    assert spills(fleet([7, 0], [96, 0], waiting_requests=[7, 0], waiting_prefill_seconds=[0, 9])) == 0
    assert spills(fleet([8, 0], [96, 0], waiting_requests=[8, 0], waiting_prefill_seconds=[0, 9])) == 1
    assert spills(fleet([1, 1], [96, 0]), [49, 0]) == 0  # 784 of 1000
    assert spills(fleet([1, 1], [96, 0]), [50, 0]) == 1
    assert spills(fleet([8, 8], [96, 0], waiting_requests=[8, 8], waiting_prefill_seconds=[9, 0])) == 0


# --- kv_cost and lmetric ----------------------------------------------------------------------------------------------


def blocks(prefill: Sequence[int], held: Sequence[int], new: Sequence[int]) -> ActiveBlocks:
    return ActiveBlocks(b"", by_id(prefill), by_id(held), by_id(new))


def test_kv_cost_is_the_published_sum_in_blocks() -> None:
    request = asked(active_blocks=blocks([0, 320, 0], [30, 0, 12], [10, 10, 4]))
    workers = fleet([0, 0, 0], [80, 0, 96])
    assert KvCost().score(request, workers) == [5 + 40, 30 + 10, 4 + 16]
    assert KvCost(prefill_load_scale=2.0).score(request, workers) == [10 + 40, 60 + 10, 8 + 16]
    assert LMetric().score(request, workers) == [5 * 41, 30 * 11, 4 * 17]
    assert decides(KvCost(), request, workers) == 2


def test_kv_cost_leaves_a_hot_worker_when_its_queue_outweighs_the_cache() -> None:
    workers = fleet([3, 0], [144, 0])
    for queued, choice in (64, 0), (320, 1):
        request = asked(active_blocks=blocks([queued, 0], [0, 0], [10, 10]))
        assert decides(KvCost(), request, workers) == choice


def test_kv_cost_draws_among_equals_and_only_among_them() -> None:
    request = [asked(draw=i / 20, active_blocks=blocks([0, 0, 16], [2, 2, 2], [1, 1, 1])) for i in range(20)]
    assert Counter(decides(KvCost(), one, fleet([0, 9, 0])) for one in request) == {0: 10, 1: 10}


@FEW
@given(situations(), st.lists(st.tuples(*[st.integers(0, 90)] * 3), min_size=6, max_size=6))
def test_kv_cost_and_lmetric_are_their_formulas(
    situation: tuple[int, WorkersView, float], books: list[tuple[int, int, int]]
) -> None:
    prompt, workers, draw = situation
    request = asked(range(prompt), draw, active_blocks=blocks(*zip(*books, strict=True)))
    for policy, combine in (KvCost(), lambda p, b: p + b), (LMetric(), lambda p, b: p * (b + 1)):
        costs = []
        for i in range(len(workers)):
            queued, held, new = books[i]
            adjusted = max(queued / 16 + prompt / 16 - workers.matched_tokens[i] / 16, 0)
            costs.append(combine(adjusted, held + new))
        assert policy.score(request, workers) == pytest.approx(costs)
        assert costs[decides(policy, request, workers)] == pytest.approx(min(costs))


# --- prefix_hash ------------------------------------------------------------------------------------------------------


def naive_home(prompt: Sequence[int], ids: Sequence[str]) -> str:
    """Walk the whole ring for the first point at or behind the prompt's."""
    from preble.policies.prefix_hash import POINTS, hashed

    at = hashed(b"None" + np.array(prompt[:256], dtype=np.int32).tobytes())
    distance = {name: min((hashed(f"{name}#{n}".encode()) - at) % 2**64 for n in range(POINTS)) for name in ids}
    return min(distance, key=distance.__getitem__)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(situations(), st.integers(0, 1000))
def test_prefix_hash_is_its_rule(situation: tuple[int, WorkersView, float], first: int) -> None:
    prompt, workers, _ = situation
    tokens = [first, *range(prompt - 1)]
    home = list(workers.ids).index(naive_home(tokens, workers.ids))
    bound = 1.25 * (sum(workers.live_requests) + 1) / len(workers)
    within = [i for i in range(len(workers)) if workers.live_requests[i] <= bound]
    expected = home if home in within or not within else min(within, key=lambda i: workers.live_requests[i])
    assert decides(PrefixHash(), asked(tokens), workers) == expected


def test_prefix_hash_looks_at_the_first_256_tokens_only_whatever_they_come_in() -> None:
    base, workers = list(range(256)), fleet([0] * 8)
    homes = {PrefixHash().home([*base, tail], None, workers.ids) for tail in range(40)}
    homes |= {PrefixHash().home(np.array(base, dtype), None, workers.ids) for dtype in (np.int32, np.uint32, np.int64)}
    assert len(homes) == 1
    assert len({PrefixHash().home([first, *base[1:]], None, workers.ids) for first in range(60)}) == 8


def test_prefix_hash_moves_few_prompts_when_a_worker_goes() -> None:
    ids = [f"w{i}" for i in range(5)]
    before = [ids[PrefixHash().home([i], None, ids)] for i in range(600)]
    after = [ids[:4][PrefixHash().home([i], None, ids[:4])] for i in range(600)]
    assert all(old == new for old, new in zip(before, after, strict=True) if old != "w4")
    assert min(Counter(before).values()) > 60


def test_prefix_hash_stays_at_a_home_that_is_exactly_at_the_bound() -> None:
    home, live = PrefixHash().home(PROMPT, None, [f"w{i}" for i in range(5)]), [4, 4, 3, 3, 3]
    live[home] = 5
    live[home - 1] += 19 - sum(live)  # 1.25 * 20 / 5 is 5
    assert decides(PrefixHash(), asked(), fleet(live)) == home
    live[home] = 6
    assert decides(PrefixHash(), asked(), fleet(live)) != home


def test_prefix_hash_gives_a_busy_homes_request_to_the_least_loaded() -> None:
    home = PrefixHash().home(PROMPT, None, ["w0", "w1", "w2"])
    live = [4, 4, 4]
    live[home], live[home - 1] = 7, 3  # the bound is 6.25
    assert decides(PrefixHash(), asked(), fleet(live)) == (home - 1) % 3
    live[home] = 5  # of 5.4
    assert decides(PrefixHash(), asked(), fleet(live)) == home


# --- session_hash and session_least -----------------------------------------------------------------------------------


def in_session(key: int, home: str | None = None) -> RequestView:
    return asked(session=PromptSession(key, home))


def test_a_sessions_worker_is_the_same_whatever_the_loads_and_few_move_when_a_worker_goes() -> None:
    ids = [f"w{i}" for i in range(5)]
    before = [decides(SessionHash(), in_session(key), fleet([key % 3, 9, 0, 0, 4])) for key in range(600)]
    after = [decides(SessionHash(), in_session(key, "w2"), fleet([0, 0, 7, 0])) for key in range(600)]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != 4)
    assert min(Counter(before).values()) > 90 and len(Counter(after)) == 4
    for key in range(40):
        weights = [hashed(f"{key}:{name}".encode()) for name in ids]
        assert before[key] == weights.index(min(weights)) == by_rendezvous(key, ids)[0]


def test_a_session_stays_where_it_was_and_begins_at_the_least_loaded() -> None:
    assert decides(SessionLeast(), in_session(1), fleet([3, 1, 1])) == 1
    assert decides(SessionLeast(), in_session(1, "w0"), fleet([99, 0, 0])) == 0
    assert decides(SessionLeast(), in_session(1, "w7"), fleet([3, 1, 0])) == 2  # its worker may not take it


@FEW
@given(situations(), st.integers(0, 99), st.integers(0, 7))
def test_session_least_is_its_rule(situation: tuple[int, WorkersView, float], key: int, home: int) -> None:
    _, workers, _ = situation
    live = list(workers.live_requests)
    expected = home if home < len(workers) else live.index(min(live))
    assert decides(SessionLeast(), in_session(key, f"w{home}"), workers) == expected


# --- llmd_sticky ------------------------------------------------------------------------------------------------------


def queued(seconds: Sequence[float], matched: Sequence[int], own: Sequence[float]) -> WorkersView:
    return fleet([0] * len(seconds), matched, prefill_seconds=own, waiting_prefill_seconds=seconds)


def test_sticky_requests_stay_until_the_wait_is_eighteen_seconds_more_than_elsewhere() -> None:
    policy, request = LlmdSticky(), asked()
    assert decides(policy, request, queued([18.5, 0.5], [128, 127], [0.1, 0.9])) == 0  # 128 of 160 are 0.8
    assert decides(policy, request, queued([18.6, 0.5], [128, 127], [0.1, 0.9])) == 1
    assert decides(policy, request, queued([18.6, 0.5], [128, 127], [0.1, 18.9])) == 0  # among all, and cheaper still
    assert decides(policy, request, queued([9.0, 20.0, 0.0], [128, 144, 0], [0.2, 0.1, 1.0])) == 0  # the best warm one
    assert decides(policy, request, queued([0.5, 0.2], [127, 0], [0.2, 0.9])) == 0  # nobody is warm: queue and own
    assert decides(policy, request, queued([40.0, 0.0], [128, 128], [0.1, 0.1])) == 1  # everybody is
    assert decides(LlmdSticky(release_seconds=5.0), request, queued([6.0, 0.5], [128, 0], [0.1, 0.9])) == 1


@FEW
@given(situations(), st.lists(st.integers(0, 300), min_size=6, max_size=6))
def test_llmd_sticky_is_its_rule(situation: tuple[int, WorkersView, float], tenths: list[int]) -> None:
    prompt, view, _ = situation
    workers = replace(view, waiting_prefill_seconds=[each / 10 for each in tenths[: len(view)]])
    queue, everyone = workers.waiting_prefill_seconds, range(len(workers))
    warm = [i for i in everyone if workers.matched_tokens[i] / prompt >= 0.8]
    cold = [i for i in everyone if i not in warm]
    if warm and cold and min(queue[i] for i in warm) - min(queue[i] for i in cold) > 18.0:
        warm = []
    expected = min(queue[i] + workers.prefill_seconds[i] for i in warm or everyone)
    choice = decides(LlmdSticky(), asked(range(prompt)), workers)
    assert choice in (warm or everyone) and queue[choice] + workers.prefill_seconds[choice] == expected


# --- dualmap ----------------------------------------------------------------------------------------------------------


def mapped(pair: Mapping[int, tuple[int, float, float, int]]) -> int:
    """What it decides where the prompt is hashed to w2, then w0 of four, each with (matched, queue, own, tokens)."""
    key = next(key for key in range(999) if by_rendezvous(key, ["w0", "w1", "w2", "w3"])[:2] == [2, 0])
    rows = [pair.get(i, (159, 0.0, 0.0, 0)) for i in range(4)]  # the others would be better each time
    matched, queue, own, tokens = zip(*rows, strict=True)
    workers = fleet(
        [0] * 4, matched, prefill_seconds=own, waiting_prefill_seconds=queue, live_prompt_tokens=tokens
    )  # fmt: skip
    return decides(DualMap(), in_session(key), workers)


def test_dualmap_takes_the_warmer_of_two_while_it_is_in_time_and_then_the_sooner() -> None:
    assert mapped({2: (96, 4.75, 0.25, 9), 0: (95, 0.0, 0.5, 0)}) == 2  # 5 s are in time
    assert mapped({2: (96, 4.75, 0.5, 9), 0: (95, 0.0, 0.5, 0)}) == 0
    assert mapped({2: (96, 5.5, 0.5, 9), 0: (95, 5.75, 0.5, 0)}) == 2  # both late: the sooner
    assert mapped({2: (96, 5.5, 0.5, 9), 0: (95, 5.25, 0.75, 8)}) == 0  # equally late: fewer tokens
    assert mapped({2: (96, 1.0, 0.5, 9), 0: (96, 2.0, 0.5, 8)}) == 0  # equally warm: fewer tokens
    assert mapped({2: (0, 1.0, 0.5, 7), 0: (0, 0.0, 0.5, 8)}) == 2


@FEW
@given(situations(), st.integers(0, 999), st.lists(st.integers(0, 80), min_size=6, max_size=6))
def test_dualmap_is_its_rule(situation: tuple[int, WorkersView, float], key: int, tenths: list[int]) -> None:
    prompt, view, _ = situation
    tokens = [7 * each % 3 for each in tenths[: len(view)]]
    workers = replace(
        view, waiting_prefill_seconds=[each / 10 for each in tenths[: len(view)]], live_prompt_tokens=tokens
    )
    pair = sorted(range(len(view)), key=lambda i: hashed(f"{key}:w{i}".encode()))[:2]
    ttft = [queue + own for queue, own in zip(workers.waiting_prefill_seconds, view.prefill_seconds, strict=True)]
    warmer = sorted(pair, key=lambda i: (-view.matched_tokens[i], tokens[i]))[0]
    late = ttft[warmer] > 5.0
    expected = sorted(pair, key=lambda i: (ttft[i], tokens[i]))[0] if late else warmer
    request = asked(range(prompt), session=PromptSession(key, None))
    assert decides(DualMap(), request, workers) == expected


# --- oracle_partition -------------------------------------------------------------------------------------------------

GROUPS = {"r0": "a", "r1": "b", "r2": "a", "r3": "c", "r4": "d"}


def test_the_oracle_deals_groups_in_turn_and_keeps_each_together() -> None:
    policy, workers = OraclePartition(GROUPS), fleet([9, 0, 5])
    homes = {name: decides(policy, asked(request_id=name), workers) for name in GROUPS}
    assert homes == {"r0": 0, "r1": 1, "r2": 0, "r3": 2, "r4": 0}


def test_the_oracle_follows_homes_that_are_given_while_they_may_take_requests() -> None:
    policy = OraclePartition(GROUPS, {"a": "w2", "d": "gone"})
    choices = [decides(policy, asked(request_id=name), fleet([5, 0, 0])) for name in GROUPS]
    assert choices == [2, 1, 2, 2, 0]  # d's home is not there: dealt like the others
    assert decides(policy, asked(request_id="r0"), fleet([5, 0])) == 0


def test_the_oracle_wants_to_know_every_request() -> None:
    sched = GlobalScheduler(["a", "b"], policy=OraclePartition(GROUPS), clock=ManualClock())
    for name in "stranger", None:
        with pytest.raises(InvalidInput, match="request_id"):
            sched.schedule([1, 2], request_id=name)
    told = sched.explain([1, 2], request_id="r1")
    assert told.worker == "b" == sched.schedule([1, 2], request_id="r1").worker
    assert sched.stats()["scheduled"] == 1


# --- aibrix -----------------------------------------------------------------------------------------------------------


def naive_aibrix_prefix(prompt: int, w: WorkersView) -> set[int]:
    """All it may choose."""
    live = list(w.live_requests)
    idlest = {i for i, n in enumerate(live) if n == min(live)}
    if max(live) - min(live) > 8:
        return idlest
    mean = sum(live) / len(live)
    sigma = math.sqrt(sum((n - mean) ** 2 for n in live) / len(live))
    percent = [int(100 * m / prompt) for m in w.matched_tokens]
    queue = sorted((i for i in range(len(w)) if percent[i] > 0), key=lambda i: (-percent[i], live[i]))
    for i in queue:
        if live[i] <= mean + sigma:
            return {j for j in queue if (percent[j], live[j]) == (percent[i], live[i])}
    return idlest


@FEW
@given(situations())
def test_aibrix_prefix_is_its_rule(situation: tuple[int, WorkersView, float]) -> None:
    prompt, workers, draw = situation
    assert decides(AibrixPrefix(), asked(range(prompt), draw), workers) in naive_aibrix_prefix(prompt, workers)


def test_aibrix_prefix_passes_over_a_worker_beyond_one_standard_deviation() -> None:
    live = [8, 1, 1, 2]
    assert live[0] > statistics.fmean(live) + statistics.pstdev(live)
    assert decides(AibrixPrefix(), asked(), fleet(live, [144, 32, 0, 48])) == 3
    assert decides(AibrixPrefix(), asked(draw=0.6), fleet(live, [144, 0, 0, 0])) == 2  # none left: the least loaded
    assert decides(AibrixPrefix(), asked(), fleet([8, 8, 7, 2], [144, 32, 0, 48])) == 0


def test_aibrix_prefix_ignores_matches_behind_the_gate_and_less_than_a_percent() -> None:
    assert decides(AibrixPrefix(), asked(), fleet([8, 0], [0, 144])) == 1
    assert decides(AibrixPrefix(), asked(), fleet([0, 9], [0, 144])) == 0
    assert decides(AibrixPrefix(), asked(range(1700)), fleet([1, 0], [16, 0])) == 1


def naive_aibrix_preble(prompt: int, w: WorkersView, seconds: Mapping[str, float], requests: Mapping[str, int]) -> int:
    everyone = list(range(len(w)))
    if max(w.live_requests) - min(w.live_requests) > 8:
        everyone = [i for i in everyone if w.live_requests[i] == min(w.live_requests)]
    longest = max(w.matched_tokens[i] for i in everyone)
    if longest / prompt > 0.5:
        return min((i for i in everyone if w.matched_tokens[i] == longest), key=lambda i: requests[f"w{i}"])
    return min(everyone, key=lambda i: seconds[f"w{i}"])


@FEW
@given(situations(), st.lists(st.tuples(st.floats(0, 90), st.integers(0, 9)), min_size=6, max_size=6))
def test_aibrix_preble_is_its_rule(situation: tuple[int, WorkersView, float], window: list[tuple[float, int]]) -> None:
    prompt, workers, _ = situation
    seconds, requests = by_id([s for s, _ in window]), by_id([n for _, n in window])
    request = asked(range(prompt), window_costs=WindowCosts(0, seconds, requests))
    assert decides(AibrixPreble(), request, workers) == naive_aibrix_preble(prompt, workers, seconds, requests)


def test_aibrix_preble_exploits_past_half_explores_by_cost_and_heeds_the_gate() -> None:
    request = asked(window_costs=WindowCosts(0, by_id([50.0, 7.0, 20.0]), by_id([9, 1, 3])))
    assert decides(AibrixPreble(), request, fleet([8, 0, 0], [96, 0, 96])) == 2  # equally long: fewer requests
    assert decides(AibrixPreble(), request, fleet([8, 0, 0], [96, 0, 0])) == 0
    assert decides(AibrixPreble(), request, fleet([9, 0, 0], [96, 0, 0])) == 1  # behind the gate
    assert decides(AibrixPreble(), request, fleet([8, 0, 0], [80, 0, 0])) == 1  # half is not more than half


# --- e2-paper ---------------------------------------------------------------------------------------------------------


def history(
    known: int,
    holders: Sequence[int],
    prefill: Sequence[float],
    decode: Sequence[float],
    evict: Sequence[float],
    output: float = 1.0,
    imbalance: float = 1.0,
) -> PaperHistory:
    count, eviction = len(prefill), by_id(evict)
    names = frozenset(f"w{i}" for i in holders)
    outputs, shares = by_id([output] * count), by_id([imbalance] * count)
    return PaperHistory(known, names, by_id(prefill), by_id(decode), outputs, shares, eviction.__getitem__)


def naive_e2_paper(prompt: int, w: WorkersView, h: PaperHistory, share: float, imbalance: float) -> int:
    total = {
        i: h.prefill_seconds[n] + h.decode_seconds[n] + h.eviction_seconds(n) + w.prefill_seconds[i]
        for i, n in enumerate(w.ids)
    }
    chosen = [i for i, n in enumerate(w.ids) if n in h.holders]
    if h.known_tokens / prompt > share and chosen:
        return min(chosen, key=total.__getitem__)
    outputs = [h.output_seconds[n] for n in w.ids]
    decoding = [o / (o + p) if p else 1.0 for o, p in zip(outputs, w.waiting_prefill_seconds, strict=True)]
    if max(decoding) > imbalance:
        total = {i: cost for i, cost in total.items() if decoding[i] == max(decoding)}
    return min(total, key=total.__getitem__)


@FEW
@given(
    situations(),
    st.lists(st.tuples(st.floats(0, 90), st.floats(0, 90), st.floats(0, 9)), min_size=6, max_size=6),
    st.sets(st.integers(0, 5)),
    st.floats(0, 1),
)
def test_e2_paper_is_algorithms_1_and_2(
    situation: tuple[int, WorkersView, float],
    terms: list[tuple[float, float, float]],
    holders: set[int],
    known: float,
) -> None:
    prompt, workers, _ = situation
    printed = resolve("e2-paper:printed")
    assert printed is not None
    for policy, share, imbalance in (E2Paper(), 0.5, 1.0), (printed, 0.0, 1.0), (E2Paper(), 0.5, 0.6):
        told = history(int(known * prompt), sorted(holders), *zip(*terms, strict=True), imbalance=imbalance)
        request = asked(range(prompt), paper_history=told)
        expected = naive_e2_paper(prompt, workers, told, share, imbalance)
        assert decides(policy, request, workers) == expected


def test_e2_paper_exploits_the_lightest_holder_past_half_or_as_printed_at_the_first_token() -> None:
    workers = fleet([0, 0, 0], prefill_seconds=[0.1, 0.1, 0.3])
    light = history(81, [0, 1], [5.0, 4.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.5, 0.0])
    assert decides(E2Paper(), asked(paper_history=light), workers) == 1
    half = history(80, [0, 1], [5.0, 4.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.5, 0.0])
    assert decides(E2Paper(), asked(paper_history=half), workers) == 2
    assert decides(E2Paper(exploit_share=0.0), asked(paper_history=half), workers) == 1


def test_e2_paper_explores_what_is_known_and_cached_nowhere() -> None:
    nobody = history(159, [], [5.0, 4.0], [1.0, 1.0], [0.0, 0.0])
    assert decides(E2Paper(), asked(paper_history=nobody), fleet([0, 0])) == 1


def test_e2_paper_explores_where_decoding_leaves_room_for_prefill() -> None:
    """A second of decoding against what waits: shares of 0.2, 1 and 1. L is 10, 90 and 80 s."""
    workers = fleet([0, 0, 0], waiting_prefill_seconds=[4.0, 0.0, 0.0])
    terms = [5.0, 45.0, 40.0], [5.0, 45.0, 40.0], [0.0] * 3
    assert decides(E2Paper(), asked(paper_history=history(0, [], *terms, imbalance=0.9)), workers) == 2
    assert decides(E2Paper(), asked(paper_history=history(0, [], *terms, imbalance=1.0)), workers) == 0
    assert decides(E2Paper(), asked(paper_history=history(160, [0], *terms, imbalance=0.9)), workers) == 0  # exploits
    waiting = fleet([0, 0, 0], waiting_prefill_seconds=[4.0, 4.0, 4.0])  # none beyond the share: L + M + P
    assert decides(E2Paper(), asked(paper_history=history(0, [], *terms, imbalance=0.2)), waiting) == 0
    assert decides(E2Paper(), asked(paper_history=history(0, [], *terms, imbalance=0.19)), waiting) == 0


# --- in a scheduler ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [list, tuple, partial(np.array, dtype=np.int32), partial(np.array, dtype=np.int64)])
def test_every_rule_takes_every_kind_of_tokens_and_passes_over_workers_that_are_out(name: str, kind: Any) -> None:
    sched = GlobalScheduler(["w0", "w1", "w2", "w3"], policy=name, clock=ManualClock(5.0), seed=2)
    sched.drain_worker("w0")
    for i in range(12):
        prompt = kind([i % 3] * 40 + [i])
        told = sched.explain(prompt)
        decision = sched.schedule(prompt)
        assert decision.worker == told.worker != "w0"
        assert sched.schedule(prompt, exclude=["w1", "w2"]).worker == "w3"
        if i % 2:
            sched.finish(decision.request_id, output_tokens=3)
    sched.check()


@pytest.mark.parametrize("name", NAMES)
def test_tokens_that_are_none_are_refused_by_every_rule_and_nothing_is_booked(name: str) -> None:
    sched = GlobalScheduler(["w0", "w1"], policy=name, clock=ManualClock(5.0))
    before = sched.stats()
    for tokens in [], [-1], [1.5], "ab", np.zeros((2, 2), np.int32), None, np.array([-3], np.int32):
        for call in sched.schedule, sched.explain:
            with pytest.raises(InvalidInput):
                call(tokens)  # type: ignore[arg-type]
    assert sched.stats() == before
