"""Plans between routers: one makes them, all carry them out, and another goes on where that one is gone. The test is
the network; the sockets are in `test_peer_gateways`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from preble import GlobalScheduler, ManualClock, WorkerSpec
from preble.router.plan_messages import PLANS_BYTES_MAX, REPEAT_BEATS, PlanSharing
from preble.scheduling.rebalance_planner import SHARED_MAX, SharedPlan
from tests.scheduling.test_rebalancer import PLAIN, PREFIX, ask, plans

SPACE = ("model", "m")


class Planner:
    """One router: its scheduler, which had all requests, and what it shares."""

    def __init__(self, name: str, *, space: Any = None, workers: int = 3) -> None:
        self.name = name
        self.clock = ManualClock(1000.0)
        specs = [WorkerSpec(f"w{i}", block_size=1) for i in range(workers)]
        self.scheduler = GlobalScheduler(specs, policy="e2-paper", cost_model=PLAIN, clock=self.clock)
        self.counters: Counter[str] = Counter()
        self.sharing = PlanSharing(name, lambda: self.scheduler, lambda worker: space, self.counters)

    def seen(self, state: str = "active") -> set[tuple[Any, ...]]:
        return {(p["kind"], p["from_worker"], p["to_worker"], p["prefix_tokens"]) for p in plans(self.scheduler, state)}


def beat(*routers: Planner) -> None:
    """All hear each other, and half a second passes."""
    messages = [one.sharing.beat([other.name for other in routers if other is not one]) for one in routers]
    for number, data in enumerate(messages):
        for other in routers if data is not None else ():
            if other is not routers[number]:
                other.sharing.take(data)  # type: ignore[arg-type]


def heat(*routers: Planner, first: int = 0, requests: int = 10) -> None:
    """The same requests come to all, so that each has counted them, as bookings of peers are."""
    for number in range(first, first + requests):
        for one in routers:
            ask(one.scheduler, PREFIX, number, tokens=500, max_new_tokens=10)
        if number % 10 == 9:
            for one in routers:
                one.clock.advance(1.0)
                one.scheduler.tick()
                one.scheduler.check()
            beat(*routers)


def test_one_makes_plans_and_all_carry_them_out() -> None:
    low, high = Planner("a"), Planner("b")
    beat(low, high)
    heat(low, high)
    beat(low, high)
    assert low.seen() and high.seen() == low.seen()
    assert {low.sharing.leader, high.sharing.leader} == {"a"}
    before = high.scheduler.stats()["plans"]["redirects"]
    assert before == low.scheduler.stats()["plans"]["redirects"] > 0
    for one in (low, high):
        one.scheduler.check()


def test_each_alone_would_have_planned_for_itself() -> None:
    low, high = Planner("a"), Planner("b")
    for one in (low, high):
        heat(one)
        assert one.seen()
        assert one.sharing.leader == one.name


def test_a_follower_goes_on_with_the_plans_when_it_is_left_alone() -> None:
    low, high = Planner("a"), Planner("b")
    beat(low, high)
    heat(low, high)
    beat(low, high)
    followed = high.seen()
    assert followed
    beat(high)
    assert high.sharing.leader == "b" and high.seen() == followed
    high.clock.advance(high.scheduler.config.history_seconds + 60.0)
    for _ in range(4):
        high.clock.advance(1.0)
        high.scheduler.tick()
    assert not high.seen(), "it ends what is over"
    high.scheduler.check()


def test_a_lower_one_that_comes_takes_over_what_the_others_plan_next() -> None:
    high = Planner("b")
    beat(high)
    heat(high)
    assert high.seen()
    low = Planner("a")
    beat(low, high)
    beat(low, high)
    assert high.sharing.leader == "a" and high.seen() == low.seen() == set()
    assert {p["why"] for p in plans(high.scheduler, "ended")} >= {"it ended where it was made"}


def test_a_lost_message_is_mended_by_the_next() -> None:
    low, high = Planner("a"), Planner("b")
    beat(low, high)
    heat(low)
    for number in range(10):
        ask(high.scheduler, PREFIX, number, tokens=500, max_new_tokens=10)
    low.sharing.beat(["b"])  # nobody receives it
    assert low.seen() and not high.seen()
    for _ in range(REPEAT_BEATS):
        beat(low, high)
    assert high.seen() == low.seen()


def test_models_have_their_own_place_in_each_routers_namespaces() -> None:
    low, high = Planner("a"), Planner("b", space=SPACE)
    plan = SharedPlan("rebalance", ("text",), PREFIX, "w0", "w1", "why", 3.0, 1.0, 100.0, True)
    data = low.sharing._message([plan])
    found: list[SharedPlan] = []
    high.sharing.leader = "a"
    high.sharing._scheduler_now = lambda: _Taker(found)
    high.sharing.take(data)
    assert found == [plan._replace(namespace=("text", *SPACE), token_ids=PREFIX)]


class _Taker:
    """A scheduler that keeps what it is to follow."""

    plan_changes = 0

    def __init__(self, found: list[SharedPlan]) -> None:
        self._found = found

    def shared_plans(self) -> list[SharedPlan]:
        return []

    def follow_plans(self, plans: Any) -> None:
        self._found.extend(plans)


@pytest.mark.parametrize(
    "data",
    [b"", b"nonsense", b"\xc1", msgspec.msgpack.encode(["a", 7]), msgspec.msgpack.encode(["a", [["move"]]]),
     msgspec.msgpack.encode(["a", [["rebalance", b"\xc1", b"", "w0", "w1", "", 0.0, 0.0, None, True]]]),
     msgspec.msgpack.encode(["a", [["rebalance", b"\xc0", b"123", "w0", "w1", "", 0.0, 0.0, None, True]]]),
     msgspec.msgpack.encode(["a", [["rebalance", b"\xc0", b"", "w0", "w1", "", float("nan"), 0.0, None, True]]])],
)  # fmt: skip
def test_nonsense_is_counted_and_changes_nothing(data: bytes) -> None:
    high = Planner("b")
    high.sharing.leader = "a"
    high.sharing.take(data)
    assert high.counters["malformed"] == 1 and not high.seen()


def test_what_a_router_sends_that_is_not_to_plan_is_passed_by() -> None:
    low, high = Planner("a"), Planner("b")
    beat(low, high)
    heat(high)
    message = high.sharing._message([SharedPlan("replica", None, PREFIX, "w0", "w1", "", 1.0, 1.0, None, True)])
    low.sharing.take(message)
    assert not low.seen() and not low.counters


def test_plans_of_prefixes_or_workers_that_are_not_known_here_wait() -> None:
    low, high = Planner("a"), Planner("b")
    beat(low, high)
    heat(low)
    message = low.sharing._message(low.scheduler.shared_plans())
    high.sharing.take(message)
    assert low.seen() and not high.seen(), "it has counted no such prefix"
    for number in range(10):
        ask(high.scheduler, PREFIX, number, tokens=500, max_new_tokens=10)
    high.sharing.take(message)
    assert high.seen() == low.seen()
    narrow = Planner("c", workers=1)
    narrow.sharing.leader = "a"
    narrow.sharing.take(message)
    assert not narrow.seen()


def test_bounds_of_a_message() -> None:
    low = Planner("a")
    long = list(range(PLANS_BYTES_MAX // 16))
    many = [SharedPlan("replica", None, long, "w0", "w1", "", 1.0, 1.0, None, True) for _ in range(SHARED_MAX)]
    data = low.sharing._message(many)
    assert len(data) < 2 * PLANS_BYTES_MAX and low.counters["left_out"] == 1
    low.sharing._message([many[0]._replace(namespace=1.5)])
    assert low.counters["left_out"] == 2


def test_a_scheduler_whose_policy_takes_no_plans_shares_none() -> None:
    clock = ManualClock(0.0)
    scheduler = GlobalScheduler(["w0"], clock=clock)
    sharing = PlanSharing("a", lambda: scheduler, lambda worker: None, Counter())
    assert scheduler.plan_changes is None and sharing.beat(["b"]) is None
    scheduler.follow_plans([])
    assert scheduler.shared_plans() == []
