"""Workers that join and leave: which prefixes they are given and give away, to whom, when, and what is counted.

Whole fleets under load are in `sim/test_fleet_scenarios.py`, random histories in `test_fleet_machine.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from preble import AllBlocksCleared, GlobalScheduler, ManualClock, PrefixEvicted, SchedulerConfig, WorkerSpec
from preble import scheduler as module
from preble._placement.bookings import DecisionCore
from preble._placement.prefix_handoff import HotPrefix, hand_over, hot_prefixes
from preble._radix import RadixTree
from preble.errors import InvalidConfig, InvalidInput, UnknownWorker
from preble.scheduling import autoscaling, membership
from preble.scheduling.membership import MOVES_KEPT, Handover
from preble.scheduling.rebalance_planner import Plan

SYSTEM = list(range(40))


def tool(number: int, tokens: int = 200) -> list[int]:
    """A tool's prompt behind the system prompt; its own ids begin at 10,000 times its number plus one."""
    return [*SYSTEM, *range(10_000 * (number + 1), 10_000 * (number + 1) + tokens)]


def fleet(*workers: str | WorkerSpec, **config: Any) -> tuple[GlobalScheduler, ManualClock]:
    clock = ManualClock(1000.0)
    return GlobalScheduler(workers, config=SchedulerConfig(**config), clock=clock), clock


def serve(sched: GlobalScheduler, prompt: list[int], worker: str, times: int = 1) -> None:
    """Requests for a prompt, each with a question of its own, on a worker."""
    others = set(sched.workers) - {worker}
    for _ in range(times):
        serve.questions += 1
        question = [5_000_000 + serve.questions, 7, 8]
        decision = sched.schedule(prompt + question, exclude=others, max_new_tokens=10)
        assert decision.worker == worker
        sched.finish(decision.request_id, output_tokens=10)


serve.questions = 0


def placed(sched: GlobalScheduler, prompt: list[int], times: int = 3) -> Counter[tuple[str, str]]:
    """Who gets the next requests for a prompt, one after the other, and why."""
    found: Counter[tuple[str, str]] = Counter()
    for _ in range(times):
        serve.questions += 1
        decision = sched.schedule([*prompt, 6_000_000 + serve.questions], max_new_tokens=1)
        found[decision.worker, decision.reason] += 1
        sched.finish(decision.request_id, output_tokens=1)
    return found


# --- what is hot ------------------------------------------------------------------------------------------------------


def test_hot_prefixes_are_the_key_portions_that_were_used_again() -> None:
    sched, clock = fleet("a", "b")
    serve(sched, tool(0), "a", 5)
    serve(sched, tool(1), "a", 2)
    serve(sched, tool(2), "a", 1)  # once: nothing was ever saved by it
    found = {prefix.head[0]: prefix for prefix in hot_prefixes(sched.core, 0, clock())}
    assert set(found) == {10_000, 20_000}, "the system prompt's own request went on to tool 2 and is one only"
    assert (found[10_000].hits, found[20_000].hits) == (5.0, 2.0)
    assert found[10_000].tokens == 240 and found[10_000].namespace is None
    once = sched._cost_model.prefill_time(200, 240)
    assert found[10_000].loss_seconds == pytest.approx(once)
    assert found[10_000].hot_seconds == pytest.approx(5 * once)


def test_what_another_open_worker_has_is_left_out() -> None:
    sched, clock = fleet("a", "b", "c")
    for worker in "ab":
        serve(sched, tool(0), worker, 3)
    assert hot_prefixes(sched.core, 0, clock()) == []
    sched.drain_worker("b")
    assert [prefix.tokens for prefix in hot_prefixes(sched.core, 0, clock())] == [240]


def test_a_longer_hot_prefix_takes_its_requests_out_of_the_shorter_one() -> None:
    sched, clock = fleet("a")
    longer = [*tool(0), *range(77_000, 77_600)]
    serve(sched, tool(0), "a", 3)
    serve(sched, longer, "a", 4)
    found = {prefix.tokens: prefix.hits for prefix in hot_prefixes(sched.core, 0, clock())}
    assert found == {240: 3.0, 840: 4.0}


def test_a_prefix_that_went_meanwhile_is_not_marked_again() -> None:
    sched, clock = fleet("a", "b")
    serve(sched, tool(0), "a", 3)
    (prefix,) = hot_prefixes(sched.core, 0, clock())
    sched.apply("a", [AllBlocksCleared()])
    assert hand_over(sched.core, prefix, 0, 1, clock(), keep=True) == 0
    clock.advance(1000.0)
    for _ in range(5):
        sched.tick()
    serve(sched, tool(3), "a", 3)  # its nodes may have the places of those that have gone
    assert hand_over(sched.core, prefix, 0, 1, clock(), keep=False) == 0
    assert sched.match(tool(3)).matched_tokens["a"] == 239
    sched.check()


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_each_prefix_of_a_leaver_goes_to_one_worker_and_the_load_to_several() -> None:
    sched, _ = fleet("a", "b", "c")
    for number in range(6):
        serve(sched, tool(number, 200 + 20 * number), "a", 6 - number)
    handover = sched.drain_worker("a")
    assert isinstance(handover, Handover) and handover.is_over and handover.left_out == 0
    assert [move.prefix_tokens for move in handover.moves] == [240, 260, 280, 300, 320], "cheapest first"
    losses = [move.loss_seconds for move in handover.moves]
    assert losses == sorted(losses) and losses[0] > 0.0
    hits = Counter()
    for move in handover.moves:
        assert (move.giver, move.reason, move.moved_at) == ("a", "drain", 1000.0)
        hits[move.taker] += move.hits
    assert hits == {"b": 6 + 3 + 2, "c": 5 + 4} or hits == {"c": 6 + 3 + 2, "b": 5 + 4}, "longest processing time first"
    for number, move in enumerate(handover.moves):
        assert placed(sched, tool(number, 200 + 20 * number)) == {(move.taker, "exploit"): 3}
    assert sched.stats()["membership"]["given_by_leavers"] == 5
    assert [move["prefix_tokens"] for move in sched.stats()["membership"]["moves"]] == [240, 260, 280, 300, 320]
    sched.check()


def test_draining_twice_is_draining_once() -> None:
    sched, _ = fleet("a", "b")
    serve(sched, tool(0), "a", 4)
    assert sched.drain_worker("a") == sched.drain_worker("a")
    assert sched.stats()["membership"]["given_by_leavers"] == 1


def test_the_most_loaded_go_up_to_the_bound_and_the_rest_is_counted() -> None:
    sched, _ = fleet("a", "b", handover_prefixes_max=2)
    for number in range(5):
        serve(sched, tool(number), "a", 2 + number)
    handover = sched.drain_worker("a")
    assert sorted(move.head[0] for move in handover.moves) == [40_000, 50_000]
    assert handover.left_out == 3 == sched.stats()["membership"]["left_out"]


def test_nothing_changes_hands_where_it_is_switched_off_or_another_rule_decides() -> None:
    for more in ({"config": SchedulerConfig(handover_prefixes_max=0)}, {"policy": "least_loaded"}):
        sched = GlobalScheduler(["a", "b"], clock=ManualClock(1000.0), **more)
        serve(sched, tool(0), "a", 4)
        handover = sched.drain_worker("a", handover_seconds=10.0)
        assert handover.moves == () and handover.is_over
        assert sched.match(tool(0)).matched_tokens.get("b", 0) == 0
        assert {worker for worker, _ in placed(sched, tool(0))} == {"b"}


def test_a_prefix_goes_only_where_it_fits() -> None:
    small, large = WorkerSpec("small", kv_capacity_tokens=100), WorkerSpec("large", kv_capacity_tokens=1000)
    sched, _ = fleet(WorkerSpec("a", kv_capacity_tokens=1000), small, large)
    serve(sched, tool(0), "a", 2)
    serve(sched, tool(9), "large", 9)
    assert [move.taker for move in sched.drain_worker("a").moves] == ["large"]
    alone, _ = fleet(WorkerSpec("a", kv_capacity_tokens=1000), small)
    serve(alone, tool(0), "a", 2)
    assert alone.drain_worker("a").left_out == 1


def test_a_gradual_leaver_serves_what_it_has_not_given_away() -> None:
    sched, clock = fleet("a", "b", "c")
    for number in range(4):
        serve(sched, tool(number, 200 + 20 * number), "a", 3)
    handover = sched.drain_worker("a", handover_seconds=40.0)
    assert len(handover.moves) == 4 and not handover.is_over and handover.ends_at == 1040.0
    assert sched.stats()["workers"]["a"]["draining"] is True
    assert sched.stats()["membership"]["leaving"] == {"a": 4}
    assert placed(sched, tool(0)) == {("a", "exploit"): 3}
    assert sched.explain(tool(0)).worker == "a"
    assert all(worker != "a" for worker, _ in placed(sched, tool(8))), "a new prefix goes elsewhere"
    assert not next(row for row in sched.explain(tool(8)).workers if row.worker == "a").candidate
    for moved in range(1, 5):
        clock.advance(10.0)
        sched.tick()
        homes = [next(iter(placed(sched, tool(number, 200 + 20 * number), 1))) for number in range(4)]
        assert [home == ("a", "exploit") for home in homes] == [False] * moved + [True] * (4 - moved)
        assert all(reason == "exploit" for _, reason in homes)
        sched.check()
    assert sched.stats()["membership"]["leaving"] == {"a": 0}
    assert sched.remove_worker("a") == []
    assert sched.stats()["membership"]["leaving"] == {}


def test_a_gradual_leaver_that_is_excluded_once_takes_requests_again() -> None:
    sched, _ = fleet("a", "b")
    serve(sched, tool(0), "a", 3)
    sched.drain_worker("a", handover_seconds=10.0)
    assert sched.schedule([*tool(0), 1], exclude=["a"]).worker == "b"
    assert sched.match(tool(0)).matched_tokens["a"] == 239
    sched.drain_worker("a")  # now at once
    assert sched.schedule([*tool(0), 2], exclude=[]).worker == "b"
    assert {worker for worker, _ in placed(sched, tool(0))} == {"b"}


def test_a_leaver_can_be_hurried_and_not_held_up() -> None:
    sched, clock = fleet("a", "b")
    for number in range(4):
        serve(sched, tool(number), "a", 2)
    assert sched.drain_worker("a", handover_seconds=100.0).ends_at == 1100.0
    assert sched.drain_worker("a", handover_seconds=500.0).ends_at == 1100.0
    clock.advance(10.0)
    assert sched.drain_worker("a", handover_seconds=20.0).ends_at == 1030.0
    assert sched.drain_worker("a").is_over
    assert {worker for worker, _ in placed(sched, tool(0))} == {"b"}


def test_a_taker_that_has_gone_is_replaced_and_with_nobody_left_nothing_is_lost_silently() -> None:
    sched, clock = fleet("a", "b", "c")
    for number in range(4):
        serve(sched, tool(number), "a", 2)
    takers = {move.taker for move in sched.drain_worker("a", handover_seconds=100.0).moves}
    assert takers == {"b", "c"}
    sched.remove_worker("b")
    clock.advance(50.0)
    sched.tick()
    assert [move.taker for move in sched.drain_worker("a", handover_seconds=50.0).moves[:2]] == ["c", "c"]
    sched.remove_worker("c")
    clock.advance(50.0)
    sched.tick()
    told = sched.stats()["membership"]
    assert (told["given_by_leavers"], told["left_out"]) == (2, 2)
    sched.check()


class Uncopied:
    """A namespace that fails where it is copied."""

    def __deepcopy__(self, known: object) -> Uncopied:
        raise TypeError("it was copied")


def test_a_namespace_in_stats_is_the_users_own_object() -> None:
    """Regression: `stats` copied it, which ran code of users and failed for what cannot be copied."""
    sched, _ = fleet("a", "b")
    space = Uncopied()
    for _ in range(2):
        decision = sched.schedule(tool(0), exclude={"b"}, namespace=space)
        sched.finish(decision.request_id, output_tokens=1)
    assert len(sched.drain_worker("a").moves) == 1
    (move,) = sched.stats()["membership"]["moves"]
    assert move["namespace"] is space and (move["giver"], move["taker"]) == ("a", "b")
    plan = Plan(1, "replica", space, 9, "a", "b", "load", 0.5, 1.0, None)
    assert plan.as_dict()["namespace"] is space and set(plan.as_dict()) == {field.name for field in fields(Plan)}


def test_a_leaver_that_is_removed_in_the_middle_has_its_rest_counted() -> None:
    sched, _ = fleet("a", "b")
    for number in range(3):
        serve(sched, tool(number), "a", 2)
    sched.drain_worker("a", handover_seconds=100.0)
    sched.remove_worker("a")
    told = sched.stats()["membership"]
    assert (told["left_out"], told["leaving"]) == (3, {})
    sched.add_worker("a")
    assert {worker for worker, _ in placed(sched, tool(7), 8)} == {"a"}, "it is a new worker"


def test_drains_that_make_no_sense_change_nothing() -> None:
    sched, _ = fleet("a", "b")
    for bad in (-1.0, float("nan"), "soon", None):
        with pytest.raises(InvalidInput, match="handover_seconds"):
            sched.drain_worker("a", handover_seconds=bad)
    with pytest.raises(UnknownWorker):
        sched.drain_worker("nobody")
    assert sched.stats()["workers"]["a"]["draining"] is False
    for field, bad in (("handover_prefixes_max", -1), ("handover_prefixes_max", 1.5)):
        with pytest.raises(InvalidConfig, match=f"SchedulerConfig.{field}"):
            SchedulerConfig(**{field: bad})


class Replaces:
    """A search for hot prefixes during which, the first time, worker "a" is removed and added again."""

    def __init__(self, sched: GlobalScheduler, clock: ManualClock) -> None:
        self.sched, self.clock, self.looked = sched, clock, 0

    def __call__(self, core: DecisionCore, worker: int, now: float) -> list[HotPrefix]:
        found = hot_prefixes(core, worker, now)
        self.looked += 1
        if self.looked == 1:
            self.sched.remove_worker("a")
            self.clock.advance(0.001)
            self.sched.add_worker("a")
        return found


def test_a_worker_that_replaces_a_leaver_of_its_name_is_not_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it had the name and the index that the drain was for, and never got a request."""
    sched, clock = fleet("a", "b")
    serve(sched, tool(0), "a", 3)
    monkeypatch.setattr(membership, "hot_prefixes", Replaces(sched, clock))
    with pytest.raises(UnknownWorker, match="removed while it was drained"):
        sched.drain_worker("a", handover_seconds=10.0)
    stats = sched.stats()
    assert not stats["workers"]["a"]["draining"] and stats["membership"]["leaving"] == {}
    assert sched.schedule(tool(5), exclude={"b"}).worker == "a"
    sched.check()
    assert sched.drain_worker("a").is_over


def test_what_a_drain_would_cost_is_not_noted_for_the_worker_that_replaced_the_one_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sched, clock = fleet("a")
    serve(sched, tool(0), "a", 3)
    monkeypatch.setattr(autoscaling, "hot_prefixes", Replaces(sched, clock))
    sched.tick()
    assert sched.stats()["scaling"]["drain_seconds"] == {}
    clock.advance(1.0)
    sched.tick()
    assert sched.stats()["scaling"]["drain_seconds"] == {"a": 0.0}


# --- joining, and what is kept ---------------------------------------------------------------------------------------


def busy(workers: int = 2, tools: int = 8, each: int = 30, **config: Any) -> tuple[GlobalScheduler, ManualClock]:
    """Workers at work for a minute, each with prefixes of its own that are asked for alike."""
    sched, clock = fleet(*(f"w{i}" for i in range(workers)), **config)
    for _ in range(each):
        clock.advance(60.0 / each)
        for number in range(tools):
            serve(sched, tool(number), f"w{number % workers}")
    return sched, clock


def test_a_newcomer_begins_with_nothing_and_gets_what_is_new() -> None:
    sched, _ = busy()
    sched.add_worker("late")
    sched.tick()
    assert all("late" not in sched.match(tool(number)).matched_tokens for number in range(8))
    assert placed(sched, tool(90), 1) == {("late", "explore"): 1}, "who has nothing to do gets what is new"


def test_a_restarted_worker_begins_with_nothing() -> None:
    sched, clock = busy()
    serve(sched, tool(0), "w0", 3)
    sched.remove_worker("w0")
    sched.add_worker("w0")
    assert sched.stats()["workers"]["w0"]["cached_tokens"] == 0
    assert all(sched.match(tool(number)).matched_tokens.get("w0", 0) == 0 for number in range(8))
    assert sched.match(tool(1)).matched_tokens == {"w1": 239}
    assert sched.schedule(tool(0)).matched_tokens == 0
    clock.advance(1.0)
    sched.tick()
    sched.check()


def test_the_moves_that_are_kept_are_bounded() -> None:
    sched, _ = fleet("a", "b", handover_prefixes_max=4096)
    for number in range(MOVES_KEPT + 6):
        serve(sched, tool(number), "a", 2)
    handover = sched.drain_worker("a")
    assert len(handover.moves) == MOVES_KEPT + 6
    assert len(sched.stats()["membership"]["moves"]) == MOVES_KEPT
    assert sched.stats()["membership"]["moves"][-1]["prefix_tokens"] == handover.moves[-1].prefix_tokens


class Interrupted(RadixTree):
    """A tree in which something happens after a hold of its lock."""

    then: Callable[[], object] | None = None

    def __exit__(self, *why: object) -> None:
        super().__exit__(*why)
        then, self.then = self.then, None
        if then is not None:
            then()


def test_a_search_for_hot_prefixes_ends_where_it_was_when_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next mark is evicted between two slices: what had been freed was read on, which could crash."""
    monkeypatch.setattr(module, "RadixTree", Interrupted)
    sched, clock = fleet("a")
    for number in [number for number in range(140) for _ in range(2)]:
        sched.finish(sched.schedule([number, *range(1000, 1020)]).request_id)
    tree = sched.core.tree
    assert isinstance(tree, Interrupted) and len(hot_prefixes(sched.core, 0, clock())) == 140
    tree.then = lambda: [sched.apply("a", [PrefixEvicted([n, *range(1000, 1020)], 0)]) for n in range(14)]
    found = hot_prefixes(sched.core, 0, clock())
    assert sorted(prefix.head[0] for prefix in found) == list(range(12, 140)), "the first slice"
    sched.check()
