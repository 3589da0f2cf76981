"""Samples of one prompt (`schedule(..., group=...)`): they stay together on a busy fleet, part on an idle one, and the
hint changes nothing for anybody else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from preble import GlobalScheduler, ManualClock, Policy, sim
from preble.errors import InvalidInput
from preble.local import LocalConfig
from preble.policies.base import RequestView, WorkersView
from preble.policies.sample_groups import SAMPLE_GROUPS
from preble.scheduling.records import DecisionRecording
from preble.sim.service import makespan
from preble.workloads import sample_groups

WORKERS = ("a", "b", "c", "d")


def scheduler(policy: Any = "e2", **more: Any) -> GlobalScheduler:
    return GlobalScheduler(WORKERS, policy=policy, cost_model="mistral-7b/a6000", clock=ManualClock(100.0), **more)


def prompt(group: int, tokens: int = 2000) -> list[int]:
    return [group * 10_000 + at for at in range(tokens)]


def view(waiting: Sequence[float], matched: Sequence[int], missed: Sequence[float]) -> WorkersView:
    """Workers with nothing but waiting prefill."""
    count = len(waiting)
    zeros, ones = [0.0] * count, [0] * count
    return WorkersView(
        ids=WORKERS[:count],
        matched_tokens=matched,
        load_seconds=zeros,
        eviction_seconds=zeros,
        prefill_seconds=missed,
        live_requests=ones,
        waiting_requests=ones,
        waiting_prefill_seconds=waiting,
        live_output_tokens=ones,
        live_prompt_tokens=ones,
        mean_output_tokens=[128] * count,
        context_token_seconds=zeros,
        cached_tokens=ones,
        kv_capacity_tokens=[10**6] * count,
        hit_share=0.0,
        pressure=0.0,
    )


def picked(workers: WorkersView, tokens: int = 100) -> int:
    request = RequestView([1] * tokens, None, None, 0, 0.0, group="g")
    return SAMPLE_GROUPS.decide(request, workers)


def test_the_first_sample_goes_where_the_least_is_outstanding() -> None:
    assert picked(view([3.0, 1.0, 2.0], [0, 0, 0], [0.5, 0.5, 0.5])) == 1


@pytest.mark.parametrize(("ahead", "chosen"), [(2.9, 0), (3.1, 1)])
def test_a_sibling_leaves_for_more_than_a_second_prefill_twice_and_the_mean(ahead: float, chosen: int) -> None:
    """The holder has `ahead` seconds, the other none: the mean is half of it, and a prefill takes 0.75 s."""
    assert picked(view([ahead, 0.0], [99, 0], [0.0, 0.75])) == chosen


def test_a_prefix_of_less_than_half_makes_nobody_a_holder() -> None:
    assert picked(view([1.0, 0.0], [40, 0], [0.3, 0.5])) == 1


def test_groups_that_come_at_once_are_computed_once_each_and_dealt_evenly() -> None:
    sched = scheduler()
    decisions = [[sched.schedule(prompt(group), group=group) for _ in range(16)] for group in range(1, 33)]
    late = decisions[8:]
    assert all(decision.reason == "group" for decision in late[0])
    whole = sum(len({decision.worker for decision in group}) == 1 for group in late)
    assert whole >= len(late) - 1, "on a busy fleet groups stay whole"
    count = Counter(decision.worker for group in decisions for decision in group)
    assert max(count.values()) - min(count.values()) <= 16, count
    sched.check()


def test_a_group_that_comes_alone_to_an_idle_fleet_is_split() -> None:
    sched = scheduler()
    used = {sched.schedule(prompt(1), group="one").worker for _ in range(32)}
    assert len(used) > 1


def test_explain_says_what_schedule_does() -> None:
    sched = scheduler()
    for at in range(40):
        told = sched.explain(prompt(at % 5 + 1), group=at % 5)
        decision = sched.schedule(prompt(at % 5 + 1), group=at % 5)
        assert (told.worker, told.reason) == (decision.worker, decision.reason)


def test_several_at_once_are_placed_as_one_after_the_other() -> None:
    many, one = scheduler(), scheduler()
    prompts, groups = [prompt(at // 4 + 1) for at in range(24)], [None if at % 5 == 0 else at // 4 for at in range(24)]
    placed = many.schedule_many(prompts, groups=groups)
    single = [one.schedule(tokens, group=group) for tokens, group in zip(prompts, groups, strict=True)]
    assert [(d.worker, d.reason, d.matched_tokens) for d in placed] == [
        (d.worker, d.reason, d.matched_tokens) for d in single
    ]
    assert many.stats()["reasons"] == one.stats()["reasons"]


class SeesGroups(Policy):
    """Every group has its worker."""

    name = reason = "sees"

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        return [float(request.group != at) for at in range(len(workers))]


def test_other_policies_are_given_the_group_and_decide_themselves() -> None:
    sched = scheduler(SeesGroups())
    assert [sched.schedule(prompt(1), group=group).worker for group in (2, 0, 3)] == ["c", "a", "d"]
    assert scheduler("round_robin").schedule(prompt(1), group=1).reason == "round_robin"


def test_records_keep_what_was_weighed() -> None:
    sched = scheduler(record=DecisionRecording())
    decision = sched.schedule(prompt(1), group="g")
    assert decision.reason == "group"
    assert sched.records()[0].worker == decision.worker


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda sched: sched.schedule([1, 2], group=[1]), "group must be hashable, got a list"),
        (lambda sched: sched.explain([1, 2], group={}), "group must be hashable, got a dict"),
        (lambda sched: sched.schedule_many([[1]], groups=[1, 2]), "groups are 2 for 1 prompts"),
        (lambda sched: sched.schedule_many([[1], [2]], groups=[1, []]), r"groups\[1\] must be hashable"),
        (lambda sched: sched.schedule_many([[1]], groups="g"), "groups must be an iterable"),
    ],
)
def test_a_group_that_is_none_is_named_and_nothing_changes(call: Any, words: str) -> None:
    sched = scheduler()
    with pytest.raises(InvalidInput, match=words):
        call(sched)
    assert not sched.core.leases
    sched.check()


def small_set(sampled: bool = True) -> Any:
    made = sample_groups(12, 8, 3, prompt_tokens=600, output_tokens=60)
    return made if sampled else replace(made, requests=[replace(one, sampled=False) for one in made.requests])


def run(workload: Any, policy: str) -> sim.Result:
    local = LocalConfig(100_000, max_running=256, max_waiting=10_000)
    return sim.simulate(workload, sim.SimConfig(workers=4, policy=policy, local=local))


def test_in_simulation_a_set_with_hints_is_computed_less_often_and_ends_no_later() -> None:
    hinted, plain = run(small_set(), "e2"), run(small_set(sampled=False), "e2")
    assert hinted.cached_tokens.sum() > plain.cached_tokens.sum()
    assert makespan(hinted) <= 1.02 * makespan(plain)
    assert set(hinted.scheduler_stats["reasons"]) == {"group"}
    assert np.bincount(hinted.worker, minlength=4).min() > 0


@pytest.mark.parametrize("policy", ["least_loaded", "cache_aware"])
def test_the_rules_of_others_do_not_see_the_hint(policy: str) -> None:
    assert run(small_set(), policy).trace_hash == run(small_set(sampled=False), policy).trace_hash
