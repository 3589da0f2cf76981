"""Plans in a scheduler: prefix groups, redirects, bounds, warm-up, and what ends a plan. Proposals are in
`test_rebalance_planner.py`, chance in `test_rebalancer_machine.py`, whole fleets in `sim/test_rebalancing.py`."""

from __future__ import annotations

from typing import Any

import pytest

from preble import AllBlocksCleared, CostModel, GlobalScheduler, ManualClock, SchedulerConfig, WorkerSpec
from preble.errors import CapacityExceeded, InvalidConfig, InvalidInput
from preble.scheduling.rebalance_planner import REBALANCE, REPLICA, Group, Plan, Proposal, SharedPlan
from preble.scheduling.rebalancer import HISTORY_MAX, PLANS_MAX
from tests.support.sticky import Sticky

# 10 ms and a millisecond a token, wherever the tokens stand.
PLAIN = CostModel([(0, 0.010), (1000, 1.010)], name="plain")
PREFIX = list(range(1000))


def fleet(workers: int = 3, **knobs: Any) -> tuple[GlobalScheduler, ManualClock]:
    clock = ManualClock(1000.0)
    specs = [WorkerSpec(f"w{i}", block_size=1) for i in range(workers)]
    config = SchedulerConfig(**knobs)
    return GlobalScheduler(specs, policy=Sticky(), cost_model=PLAIN, config=config, clock=clock), clock


def ask(scheduler: GlobalScheduler, prefix: list[int], number: int, *, tokens: int = 50, **more: Any) -> Any:
    """A request for a prefix and some tokens of its own."""
    own = list(range(10_000 + 100 * number, 10_000 + 100 * number + tokens))
    return scheduler.schedule([*prefix, *own], request_id=more.pop("request_id", None), **more)


def heated(
    scheduler: GlobalScheduler, clock: ManualClock, requests: int = 40, prefix: list[int] = PREFIX, first: int = 0
) -> list[Any]:
    """Ask for one prefix until it waits, a tick a second; decisions in order. The same `first`: the same prompts."""
    decisions = []
    for number in range(first, first + requests):
        decisions.append(ask(scheduler, prefix, number, tokens=500, max_new_tokens=10))
        if number % 10 == 9:
            clock.advance(1.0)
            scheduler.tick()
            scheduler.check()
    return decisions


def plans(scheduler: GlobalScheduler, state: str = "active") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = scheduler.stats()["plans"][state]
    return found


def groups_of(scheduler: GlobalScheduler, clock: ManualClock) -> list[Group]:
    return [Group._make(row) for row in scheduler.core.groups.rows(0, 4096, clock(), 0.0)]


# --- groups -----------------------------------------------------------------------------------------------------------


def test_a_group_is_the_key_portion_and_counts_what_its_requests_cost() -> None:
    scheduler, clock = fleet(1)
    ask(scheduler, PREFIX, 0)
    assert groups_of(scheduler, clock) == []  # explored: nothing was reused
    for number in (1, 2):
        ask(scheduler, PREFIX, number, request_id=number, max_new_tokens=1)
    (row,) = groups_of(scheduler, clock)
    assert (row.worker, row.prefix_tokens, row.requests) == (0, 1000, 2)
    token = scheduler.core.loads.account(0)["load_seconds"]
    prefills = 1.060 + 2 * 0.060
    assert row.window_seconds == pytest.approx(2 * 0.060 + (token - prefills) / 130 * 2, rel=1e-6)
    assert row.load == pytest.approx(row.window_seconds / 10.0)  # a young group is observed for join_seconds
    assert (row.wait_before, row.wait_now) == (-1.0, -1.0)
    clock.advance(2.0)
    scheduler.first_token(1)
    assert groups_of(scheduler, clock)[0].wait_now == pytest.approx(2.0 - 0.060)
    scheduler.cancel(2)
    assert groups_of(scheduler, clock)[0].requests == 1
    scheduler.check()


def test_waits_are_distinguished_by_half() -> None:
    scheduler, clock = fleet(1, history_seconds=36.0)
    clock.advance(8.0)  # 56 halves of 18 s
    ask(scheduler, PREFIX, 0)
    ask(scheduler, PREFIX, 1, request_id="a")
    clock.advance(1.06)
    scheduler.first_token("a")
    clock.advance(18.0)
    ask(scheduler, PREFIX, 2, request_id="b")
    clock.advance(3.06)
    scheduler.first_token("b")
    (row,) = groups_of(scheduler, clock)
    assert (row.wait_before, row.wait_now) == (pytest.approx(1.0), pytest.approx(3.0))
    clock.advance(36.0)
    scheduler.tick()
    assert groups_of(scheduler, clock) == []
    assert scheduler.core.groups.live == 0


def test_what_the_engine_reports_corrects_a_group() -> None:
    scheduler, clock = fleet(1)
    ask(scheduler, PREFIX, 0)
    ask(scheduler, PREFIX, 1, request_id="a", max_new_tokens=1)
    before = groups_of(scheduler, clock)[0].window_seconds
    scheduler.first_token("a", cached_tokens=0)
    assert groups_of(scheduler, clock)[0].window_seconds == pytest.approx(before + 1.0)
    scheduler.finish("a", output_tokens=1001)
    assert groups_of(scheduler, clock)[0].window_seconds > before + 2.0
    scheduler.check()


def test_the_book_of_groups_is_bounded_and_the_least_loaded_make_room() -> None:
    scheduler, _ = fleet(1, history_seconds=1e6)
    hot = list(range(600_000, 600_400))
    ask(scheduler, hot, 0)
    for number in range(200):
        ask(scheduler, hot, 1 + number, max_new_tokens=1)
    for group in range(5000):
        prefix = list(range(1_000_000 + 20 * group, 1_000_000 + 20 * group + 20))
        for number in (1, 2):
            scheduler.schedule([*prefix, number], max_new_tokens=1)
    groups = scheduler.core.groups
    assert groups.live <= 4096
    assert groups.crowded_out == 5001 - groups.live > 0
    assert any(share["now"][0] + share["before"][0] == 200 for share in groups.show())
    scheduler.check()


@pytest.mark.parametrize("policy", ["least_loaded", "e2"])
def test_other_policies_have_no_plans(policy: str) -> None:
    scheduler = GlobalScheduler(["a", "b"], policy=policy, cost_model=PLAIN)
    for number in range(5):
        ask(scheduler, PREFIX, number)
    scheduler.tick()
    assert scheduler.stats()["plans"] == {}
    assert scheduler.core.groups.live == 0
    assert scheduler.warm_ups() == [] and not scheduler.warmed(1)
    scheduler.check()


def test_the_papers_rule_has_plans() -> None:
    """One worker caches a prefix; the rule as printed stays there whatever waits, until a plan gives another some."""
    for knobs, used in (({}, {"w0", "w1"}), ({"rebalance_ratio": 0.0, "replicas_max": 1}, {"w0"})):
        clock = ManualClock(1000.0)
        specs = [WorkerSpec(f"w{i}", block_size=1) for i in range(3)]
        config = SchedulerConfig(**knobs)
        scheduler = GlobalScheduler(specs, policy="e2-paper", cost_model=PLAIN, config=config, clock=clock)
        decisions = heated(scheduler, clock)
        assert {one.worker for one in decisions} == used
        assert {one.reason for one in decisions} == ({"e2-paper", "rebalance"} if len(used) > 1 else {"e2-paper"})
        scheduler.check()


def test_with_both_off_nothing_is_counted() -> None:
    scheduler, clock = fleet(rebalance_ratio=0.0, replicas_max=1)
    decisions = heated(scheduler, clock)
    assert scheduler.stats()["plans"] == {} and scheduler.core.groups.live == 0
    assert {decision.worker for decision in decisions} == {decisions[0].worker}


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("rebalance_ratio", 0.9),
        ("rebalance_ratio", -1.0),
        ("rebalance_ratio", float("nan")),
        ("rebalance_floor_seconds", -0.1),
        ("replicas_max", 0),
        ("replicas_max", 9),
        ("replicas_max", 2.0),
        ("warm_up_seconds", -1.0),
        ("warm_up_seconds", "1"),
    ],
)
def test_knobs_are_checked(knob: str, value: Any) -> None:
    with pytest.raises(InvalidConfig, match=f"SchedulerConfig.{knob}"):
        SchedulerConfig(**{knob: value})


# --- copies and moves -------------------------------------------------------------------------------------------------


def test_a_prefix_hotter_than_a_worker_is_copied() -> None:
    scheduler, clock = fleet(rebalance_ratio=0.0)
    heated(scheduler, clock)
    (first, *_) = plans(scheduler)
    assert (first["kind"], first["prefix_tokens"], first["state"]) == (REPLICA, 1000, "active")
    assert first["saved_seconds"] > 0 and "workers on 1" in first["reason"]
    decisions = heated(scheduler, clock, first=40)  # others: one that is asked again may wait where it is cached
    assert len({decision.worker for decision in decisions}) == 3
    assert "replica" in scheduler.stats()["reasons"]


def test_no_more_copies_than_allowed() -> None:
    scheduler, clock = fleet(5, rebalance_ratio=0.0, replicas_max=2)
    for _ in range(10):
        decisions = heated(scheduler, clock)
    assert len({decision.worker for decision in decisions}) == 2


def test_copies_are_taken_back_when_the_load_falls() -> None:
    scheduler, clock = fleet(rebalance_ratio=0.0)
    for decision in heated(scheduler, clock):
        scheduler.finish(decision.request_id, output_tokens=1)
    assert plans(scheduler)
    for _ in range(400):
        clock.advance(1.0)
        scheduler.tick()
    assert plans(scheduler) == [] and scheduler.stats()["plans"]["redirects"] == 0
    assert {plan["why"] for plan in plans(scheduler, "ended")} == {"the load fell"}
    scheduler.check()


def test_a_heavy_workers_prefix_moves_and_the_others_stay() -> None:
    scheduler, clock = fleet(2, replicas_max=1)
    other = list(range(5000, 6000))
    home = ask(scheduler, PREFIX, 0).worker
    scheduler.drain_worker("w1" if home == "w0" else "w0")  # both prefixes begin on one worker
    ask(scheduler, other, 1)
    scheduler.remove_worker("w1" if home == "w0" else "w0")
    scheduler.add_worker(WorkerSpec("new", block_size=1))
    decisions = heated(scheduler, clock, 10)
    (plan,) = plans(scheduler)
    assert (plan["kind"], plan["from_worker"], plan["to_worker"]) == (REBALANCE, home, "new")
    assert plan["expires_at"] == plan["made_at"] + 180.0
    moved = ask(scheduler, PREFIX, 99)
    assert (moved.worker, moved.reason, moved.matched_tokens) == ("new", "rebalance", 0)
    assert all(decision.worker == home for decision in decisions[1:])
    stays = ask(scheduler, other, 100)
    assert (stays.worker, stays.reason) == (home, "sticky")
    scheduler.check()


def test_what_a_decision_does_is_what_is_explained() -> None:
    scheduler, clock = fleet(rebalance_ratio=0.0)
    heated(scheduler, clock)
    for number in range(60, 80):
        prompt = [*PREFIX, *range(20_000 + 100 * number, 20_000 + 100 * number + 30)]
        explained = scheduler.explain(prompt)
        decision = scheduler.schedule(prompt, explain=number % 2 == 0)
        assert (decision.worker, decision.reason) == (explained.worker, explained.reason)
        assert decision.matched_tokens == explained.matched_tokens


def test_an_excluded_target_is_passed_over() -> None:
    scheduler, clock = fleet(rebalance_ratio=0.0, replicas_max=2)
    home = heated(scheduler, clock)[0].worker
    (plan,) = plans(scheduler)
    for number in range(200, 220):
        decision = ask(scheduler, PREFIX, number, exclude=[plan["to_worker"]])
        assert decision.worker == home


@pytest.mark.parametrize("leave", ["drain_worker", "remove_worker"])
@pytest.mark.parametrize("whose", ["from_worker", "to_worker"])
def test_plans_end_with_their_workers(leave: str, whose: str) -> None:
    scheduler, clock = fleet(rebalance_ratio=0.0, replicas_max=2)
    heated(scheduler, clock)
    (plan,) = plans(scheduler)
    getattr(scheduler, leave)(plan[whose])
    for number in range(300, 310):
        assert ask(scheduler, PREFIX, number).worker != plan[whose]
    scheduler.check()
    if leave == "remove_worker":
        assert plans(scheduler) == []
        scheduler.add_worker(WorkerSpec("another", block_size=1))  # of the same index
        scheduler.check()
    clock.advance(1.0)
    scheduler.tick()
    scheduler.check()
    assert plan["id"] not in {p["id"] for p in plans(scheduler)} or whose == "from_worker"


@pytest.mark.parametrize("reused", [False, True], ids=["its index is free", "its index is another's"])
def test_a_worker_that_leaves_while_a_plan_is_made_gets_no_prefix(reused: bool) -> None:
    """Regression: another thread removed the worker whose cost was being asked for, and the process crashed."""
    scheduler, clock = fleet(2, rebalance_ratio=0.0, replicas_max=2)
    shifts = scheduler._rebalancer
    assert shifts is not None
    ask_cost, left = shifts._recompute, []

    def remove_it_first(group: Group, worker: int) -> float:
        if not left:
            left.append(str(scheduler.core.names[worker]))
            scheduler.remove_worker(left[0])
            if reused:
                scheduler.add_worker(WorkerSpec("another", block_size=1))
        return ask_cost(group, worker)

    shifts._recompute = remove_it_first  # type: ignore[method-assign]
    for number in range(40):
        ask(scheduler, PREFIX, number, tokens=500, max_new_tokens=10)
        if number % 10 == 9 and not left:
            clock.advance(1.0)
            scheduler.tick()
            scheduler.check()
    assert left and plans(scheduler) == []


def test_a_copy_is_not_begun_when_a_worker_that_serves_the_prefix_has_left() -> None:
    """Its index is free, or another worker's, by the time the plan is booked; nothing would take it out again."""
    scheduler, clock = fleet(3, rebalance_ratio=0.0)
    for number in range(6):
        ask(scheduler, PREFIX, number, exclude=["w1", "w2"], max_new_tokens=1)
    scheduler.tick()
    shifts = scheduler._rebalancer
    assert shifts is not None
    (group,) = groups_of(scheduler, clock)
    scheduler.remove_worker("w1")
    proposal = Proposal(REPLICA, group, 2, "test", 1.0)
    assert not shifts._begin(proposal, clock(), {0, 1})
    assert shifts._begin(proposal, clock(), {0})
    scheduler.check()


def test_a_prefix_that_was_forgotten_ends_its_plan() -> None:
    scheduler, clock = fleet(rebalance_ratio=0.0, replicas_max=2)
    for decision in heated(scheduler, clock):
        scheduler.finish(decision.request_id, output_tokens=1)
    for name in scheduler.workers:
        scheduler.apply(name, [AllBlocksCleared()])
    clock.advance(400.0)  # nobody caches it and nobody asked for it within the window
    scheduler.tick()
    assert plans(scheduler) == []
    assert scheduler.stats()["plans"]["redirects"] == 0
    scheduler.check()


def test_a_clock_that_jumps_back_ends_no_copy_and_breaks_nothing() -> None:
    scheduler, clock = fleet()
    heated(scheduler, clock)
    made = scheduler.stats()["plans"]["made"]
    clock.set(1.0)
    scheduler.tick()
    scheduler.check()
    heated(scheduler, clock)
    assert scheduler.stats()["plans"]["made"].keys() >= made.keys()


# --- handing over -----------------------------------------------------------------------------------------------------


def test_a_home_that_lags_behind_is_not_insisted_on() -> None:
    scheduler, clock = fleet(rebalance_ratio=0.0)
    documents = [[*PREFIX, *range(50_000 + 1000 * n, 50_000 + 1000 * n + 200)] for n in range(6)]
    for number in range(80):
        ask(scheduler, documents[number % 6], number, tokens=500, max_new_tokens=10)
        if number % 10 == 9:
            clock.advance(1.0)
            scheduler.tick()
            scheduler.check()
    shifts = scheduler._rebalancer
    assert shifts is not None
    (copied,) = shifts._copied.values()
    assert len(copied.homes) == 6
    with scheduler._lock:
        shifts._waits.update(dict.fromkeys(copied.targets, 0.9))
        shifts.publish()
    homes = [redirect for redirect in scheduler.core.redirects.show() if len(redirect[5]) == 1]
    assert {(redirect[0], redirect[5][0]) for redirect in homes} == set(copied.homes.items())
    lagging = copied.homes[homes[0][0]]
    with scheduler._lock:
        shifts._waits.update({target: 3.0 if target == lagging else 0.9 for target in copied.targets})
        shifts.publish()
    assert {redirect[5] for redirect in scheduler.core.redirects.show() if len(redirect[5]) == 1}.isdisjoint(
        {(lagging,)}
    )
    with scheduler._lock:
        shifts._waits[lagging] = 2.9
        shifts.publish()
    assert [redirect for redirect in scheduler.core.redirects.show() if len(redirect[5]) == 1] == homes


# --- bounds -----------------------------------------------------------------------------------------------------------


def move_of(group: Group) -> Proposal:
    return Proposal(REBALANCE, group, 1 - group.worker, "test", 0.0)


def test_plans_and_history_are_bounded() -> None:
    scheduler, clock = fleet(2)
    shifts = scheduler._rebalancer
    assert shifts is not None
    for number in range(PLANS_MAX + 5):
        prefix = list(range(2000 * number, 2000 * number + 100))
        ask(scheduler, prefix, number)
        ask(scheduler, prefix, number + 1000)
    with scheduler._lock:
        rows = groups_of(scheduler, clock)
        begun = [plan for row in rows if (plan := shifts.begin(move_of(row), clock()))]
        assert shifts.begin(move_of(rows[0]._replace(generation=0)), clock()) is None
        shifts.publish()
    assert len(begun) == PLANS_MAX == len(plans(scheduler))
    assert scheduler.stats()["plans"]["left_out"] == 5
    for _ in range(2):
        clock.advance(181.0)
        for number in range(PLANS_MAX):
            prefix = list(range(2000 * number, 2000 * number + 100))
            ask(scheduler, prefix, number + 5000)
            ask(scheduler, prefix, number + 7000)
        scheduler.tick()
        with scheduler._lock:
            rows = groups_of(scheduler, clock)
            for row in rows:
                shifts.begin(move_of(row), clock())
            shifts.publish()
        scheduler.check()
    assert len(plans(scheduler, "ended")) == HISTORY_MAX
    assert sum(scheduler.stats()["plans"]["why_ended"].values()) == 2 * PLANS_MAX


def test_the_table_refuses_what_is_beyond_its_bounds_and_stays_as_it_was() -> None:
    scheduler, _ = fleet(2)
    redirects = scheduler.core.redirects
    one = (1, 1, 5, None, 3, (0,))
    with scheduler._lock:
        redirects.put([one])
        with pytest.raises(CapacityExceeded):
            redirects.put([(node, 1, 5, None, 3, (0,)) for node in range(1025)])
        with pytest.raises(CapacityExceeded):
            redirects.put([(1, 1, 5, None, 3, tuple(range(9)))])
        assert redirects.show() == [one]
        many = [(node, 1, node, 0 if node % 2 else None, 2, tuple(range(1 + node % 8))) for node in range(1024)]
        redirects.put(many)
        assert redirects.show() == many
        redirects.check()
        redirects.put([])
        assert redirects.show() == [] and redirects.count == 0


# --- warming up -------------------------------------------------------------------------------------------------------


def test_traffic_waits_for_the_warm_up() -> None:
    scheduler, clock = fleet(rebalance_ratio=0.0, replicas_max=2, warm_up_seconds=5.0)
    decisions = heated(scheduler, clock, 20)
    assert len({decision.worker for decision in decisions}) == 1
    (plan,) = plans(scheduler)
    assert plan["state"] == "warming"
    ((number, worker, token_ids, namespace),) = scheduler.warm_ups()
    assert (number, worker, token_ids, namespace) == (plan["id"], plan["to_worker"], PREFIX, None)
    assert scheduler.warm_ups() == []  # handed out once
    assert ask(scheduler, PREFIX, 500).worker != worker
    assert scheduler.warmed(number) and not scheduler.warmed(number)
    assert plans(scheduler)[0]["state"] == "active"
    assert ask(scheduler, PREFIX, 501).worker == worker
    scheduler.check()


def test_a_warm_up_that_never_comes_is_not_waited_for() -> None:
    scheduler, clock = fleet(rebalance_ratio=0.0, replicas_max=2, warm_up_seconds=5.0)
    heated(scheduler, clock, 20)
    assert plans(scheduler)[0]["state"] == "warming"
    for _ in range(6):
        clock.advance(1.0)
        scheduler.tick()
    assert plans(scheduler)[0]["state"] == "active"
    scheduler.check()


def test_a_copy_that_is_warming_is_not_planned_again() -> None:
    """Regression: as soon as the prefix had rested the same copy was planned anew, its worker then served it as often,
    and after eight times the redirect was refused in every tick."""
    scheduler, clock = fleet(2, rebalance_ratio=0.0, warm_up_seconds=30.0)
    for second in range(18):
        for number in range(10 if second < 4 else 2):
            ask(scheduler, PREFIX, 10 * second + number, tokens=500, max_new_tokens=10)
        clock.advance(1.0)
        scheduler.tick()
        scheduler.check()
    (plan,) = plans(scheduler)
    assert (plan["kind"], plan["state"]) == (REPLICA, "warming")
    assert scheduler.stats()["plans"]["made"] == {REPLICA: 1}
    assert scheduler.warmed(plan["id"])
    scheduler.check()
    GlobalScheduler.restore(scheduler.snapshot(), policy=Sticky(), clock=ManualClock(clock())).check()


def copy_from(scheduler: GlobalScheduler, clock: ManualClock, target: int, holders: set[int]) -> Plan:
    """Begin a copy of the one prefix that is counted on worker 0."""
    shifts = scheduler._rebalancer
    assert shifts is not None
    with scheduler._lock:
        (group,) = [row for row in groups_of(scheduler, clock) if row.worker == 0]
        plan = shifts.begin(Proposal(REPLICA, group, target, "test", 1.0), clock(), holders)
        shifts.publish()
    assert plan is not None
    return plan


@pytest.mark.parametrize("how", ["its worker is removed", "its other copy's worker drains"])
def test_a_warming_copy_of_what_nobody_serves_any_more_ends(how: str) -> None:
    """Regression: the worker that shared the load of a draining one left while another was warming. The prefix then had
    no worker, and the next tick raised."""
    scheduler, clock = fleet(4, rebalance_ratio=0.0, warm_up_seconds=30.0)
    for number in range(6):
        ask(scheduler, PREFIX, number, exclude=["w1", "w2", "w3"], max_new_tokens=1)
    scheduler.drain_worker("w0")
    copies = [copy_from(scheduler, clock, 2, {1})]
    if how == "its other copy's worker drains":
        copies.append(copy_from(scheduler, clock, 3, {1}))
        assert scheduler.warmed(copies[1].id)
    scheduler.remove_worker("w1")
    if len(copies) > 1:
        scheduler.drain_worker("w3")
        clock.advance(1.0)
        scheduler.tick()
    scheduler.check()
    assert plans(scheduler) == []
    assert plans(scheduler, "ended")[-1]["why"] == "nobody serves the prefix"
    GlobalScheduler.restore(scheduler.snapshot(), policy=Sticky(), clock=ManualClock(clock())).check()
    for _ in range(3):
        clock.advance(1.0)
        scheduler.tick()
        scheduler.check()


def test_plans_that_are_followed_name_holders_that_nobody_knows_and_come_again() -> None:
    """Regression: a copy whose holders are unknown here had none; one that was planned where the worker served the
    prefix already had that worker twice."""
    scheduler, clock = fleet(3, rebalance_ratio=0.0, warm_up_seconds=30.0)
    for number in range(6):
        ask(scheduler, PREFIX, number, exclude=["w1", "w2"], max_new_tokens=1)
    copied = SharedPlan(REPLICA, None, PREFIX, "w0", "w1", "test", 1.0, 1.0, None, False, ("elsewhere",))
    before = copied._replace(to_worker="w2", holders=("w0", "w1"))
    for plan in (copied, before, copied._replace(holders=("w0",))):
        for is_active in (False, True):
            scheduler.follow_plans([plan._replace(is_active=is_active)])
            scheduler.check()
            clock.advance(1.0)
            scheduler.tick()
        assert [found["to_worker"] for found in plans(scheduler)] == [plan.to_worker]
        assert scheduler.stats()["plans"]["redirects"] == 1
        if plan is copied:
            scheduler.follow_plans([])
            assert scheduler.stats()["plans"]["redirects"] == 0


# --- kept by a snapshot -----------------------------------------------------------------------------------------------


def test_plans_go_on_in_a_restored_scheduler() -> None:
    scheduler, clock = fleet(rebalance_ratio=0.0)
    heated(scheduler, clock)
    other = ManualClock(clock())
    restored = GlobalScheduler.restore(scheduler.snapshot(), policy=Sticky(), clock=other)
    restored.check()
    told, before = restored.stats(), scheduler.stats()
    del told["scaling"], before["scaling"]  # its samples begin anew
    assert told == before
    assert restored.core.redirects.show() == scheduler.core.redirects.show() != []
    assert restored.core.groups.show() == scheduler.core.groups.show() != []
    for one, its_clock in ((scheduler, clock), (restored, other)):
        heated(one, its_clock)
        for request_id in list(one.core.leases):
            one.finish(request_id, output_tokens=1)
        for _ in range(300):
            its_clock.advance(1.0)
            one.tick()
        one.check()
    assert plans(restored, "ended") == plans(scheduler, "ended") != []


@pytest.mark.parametrize(
    ("name", "lie"),
    [
        ("shares", ((0, *[1] * 17),)),
        ("shares", ((5000, *[1] * 17),)),
        ("shares", (("a",),)),
        ("works", ((("plan",), (1,), 0, False),)),
        ("copied", (((1, 1, 0, 5, 1, 0.5, 1.0, -1.0, -1.0), (7,), (), ()),)),
        ("copied", (((1, 1, 0, 5, 1, 0.5, 1.0, -1.0, -1.0), (0, 0), (), ()),)),
        ("resting", ((1, (float("nan"), 0.0)),)),
        ("made", (("replica", -1),)),
        ("numbers", (1,)),
    ],
)
def test_plans_that_cannot_be_are_refused(name: str, lie: Any) -> None:
    scheduler, clock = fleet(rebalance_ratio=0.0)
    heated(scheduler, clock)
    assert scheduler._rebalancer is not None
    state = tuple((key, lie if key == name else value) for key, value in scheduler._rebalancer.state())
    other, _ = fleet(rebalance_ratio=0.0)
    assert other._rebalancer is not None
    with pytest.raises((InvalidInput, TypeError, ValueError)):
        other._rebalancer.restore(state)
