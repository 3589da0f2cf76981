"""Who waits in front of the workers, who is next and who is refused, with a clock of the test's own."""

from __future__ import annotations

import math

import pytest

from preble.errors import InvalidConfig, Overloaded, QueueFull
from preble.scheduling.charges import Charge
from preble.scheduling.flow_control import (
    OVERDUE_EVERY,
    PATIENCE_SECONDS,
    PLACES_MIN,
    PLACES_SHARE,
    WORK_PATIENCE,
    YIELDING_SHARE,
    FlowConfig,
    FlowControl,
    HeldRequest,
    Turn,
)
from preble.scheduling.predicted_wait import PredictedWait
from preble.types import BATCH, INTERACTIVE, Claim


class Fleet:
    """Workers that start one request after the other; the scheduler takes the first named by a request, else the one
    with the least to do."""

    def __init__(self, workers=("a",), **config):
        self.waits = PredictedWait()
        self.names = list(workers)
        self.yielding = False
        self.control = FlowControl(FlowConfig(**config), self.waits, self)
        self.now = 100.0
        self.there = {name: [] for name in workers}
        self.placed = []
        self.refused = []

    def workers(self):
        return self.names

    def workers_yield(self):
        return self.yielding

    def offer(self, tenant="t", *, seconds=0.1, limit=math.inf, deadline=False, batch=False, wants="", patience=0.0):
        held = HeldRequest(tenant, seconds, limit, deadline, batch, self.now, wants, patience)
        self.control.offer(held, self.now)
        self.control.check()
        return held

    def try_turn(self, held, closed, anywhere):
        choice = [name for name in self.names if not (anywhere and name in closed)]
        worker = held.owner if held.owner in choice else min(choice, key=self.waits.waiting_seconds)
        if worker in closed:
            return Turn(worker, 0.0, False)
        self.waits.placed(str(held.number), worker, held.tenant, held.seconds, self.now)
        self.there[worker].append(held)
        self.placed.append(held)
        return Turn(worker, held.seconds, True)

    def refuse(self, held, error):
        self.refused.append((held, error))

    def start(self, worker="a", after=0.1, *, ends=True, more=None):
        """The first request there gets its first token, and `ends` at once; `more`: seconds that one of a tenant took
        beyond what was booked."""
        self.now += after
        held = self.there[worker].pop(0)
        self.waits.started(str(held.number), self.now)
        if ends:
            self.end(held, worker, (more or {}).get(held.tenant, 0.0))
        self.control.pump(self.now)
        self.control.check()
        return held

    def end(self, held, worker="a", more_seconds=0.0):
        """A request that has its first token ends."""
        claim = Claim(held.tenant, priority=BATCH if held.is_batch else INTERACTIVE)
        self.control.ended(Charge(claim, worker, 100, held.seconds), more_seconds)

    def tenants(self):
        return [held.tenant for held in self.placed]


def test_requests_go_at_once_while_workers_have_room_and_wait_then():
    fleet = Fleet(hold_seconds=0.25)
    for _ in range(5):
        fleet.offer()
    assert (len(fleet.placed), len(fleet.control)) == (3, 2)
    fleet.start()
    assert (len(fleet.placed), len(fleet.control)) == (4, 1)


def test_somebody_goes_whenever_a_worker_has_room():
    fleet = Fleet(("a", "b"), hold_seconds=0.25, spare_seconds=0.05)
    for number in range(40):
        fleet.offer(f"t{number % 3}")
    for _ in range(20):
        fleet.start("a")
        fleet.start("b")
        assert not len(fleet.control) or min(map(fleet.waits.waiting_seconds, "ab")) > 0.05


def test_a_tenant_that_comes_to_a_flood_is_next():
    fleet = Fleet(hold_seconds=0.25)
    for _ in range(100):
        fleet.offer("flood")
    for _ in range(10):
        fleet.start()
    fleet.offer("quiet")
    fleet.start()
    fleet.start()
    assert "quiet" in fleet.tenants()[-2:]


def test_a_flood_gets_only_what_is_spare_and_the_others_go_at_once():
    fleet = Fleet(hold_seconds=1.0, spare_seconds=0.15, burst_seconds=0.5)
    fleet.offer("quiet", seconds=0.001)
    for _ in range(100):
        fleet.offer("flood")
    for _ in range(11):
        fleet.start()
    assert fleet.waits.waiting_seconds("a") <= 0.25
    quiet = fleet.offer("quiet")
    assert quiet in fleet.placed


def test_what_goes_of_a_flood_yields_at_its_worker_and_what_others_ask_for_does_not():
    fleet = Fleet(hold_seconds=1.0, spare_seconds=0.15, burst_seconds=0.5)
    fleet.offer("quiet", seconds=0.001)
    for _ in range(100):
        fleet.offer("flood")
    for _ in range(11):
        fleet.start()
    assert not fleet.placed[0].yields and fleet.placed[-1].tenant == "flood" and fleet.placed[-1].yields
    assert not fleet.offer("quiet").yields
    assert fleet.offer("jobs", batch=True).yields


@pytest.mark.parametrize("yielding", [False, True])
def test_a_flood_holds_half_as_many_places_as_the_others_where_they_run_and_more_where_it_yields(yielding):
    fleet = Fleet(("a", "b"), hold_seconds=1.0, spare_seconds=0.3)
    fleet.yielding = yielding
    others = [fleet.offer(name, seconds=0.01, wants="a") for name in ("quiet", "still") for _ in range(6)]
    for _ in others:
        fleet.start("a", after=0.01, ends=False)
    for _ in range(60):
        fleet.offer("flood", wants="a")
    held = 0
    while fleet.there["a"]:
        fleet.start("a", ends=False)
        held += 1
    assert held == (YIELDING_SHARE if yielding else PLACES_SHARE) * len(others)
    for one in others:
        fleet.end(one)
    fleet.control.pump(fleet.now)
    assert fleet.there["a"], "nobody else runs there any more"


def test_of_two_tenants_neither_is_held_to_less_than_the_other():
    fleet = Fleet(hold_seconds=1.0, spare_seconds=0.3)
    others = [fleet.offer("quiet", seconds=0.01) for _ in range(12)]
    for _ in others:
        fleet.start(after=0.01, ends=False)
    for _ in range(60):
        fleet.offer("flood")
    held = 0
    while fleet.there["a"]:
        fleet.start(after=0.01, ends=False)
        held += 1
    assert held == len(others)


def test_a_backlog_that_a_tenant_once_had_does_not_keep_it_behind_the_others_for_good():
    fleet = Fleet(spare_seconds=0.05)
    for name in ("one", "other"):
        fleet.offer(name)
    for _ in range(20):
        fleet.offer("late")
    for _ in range(40):  # three are offered while two are served
        for name in ("one", "other", "late"):
            fleet.offer(name)
        for _ in range(2):
            fleet.start()
    lately = fleet.tenants()[-60:]
    assert lately.count("late") >= lately.count("one")


def test_a_flood_that_does_not_go_on_is_still_held():
    fleet = Fleet(spare_seconds=0.05)
    quiet = [f"quiet {number}" for number in range(8)]
    for name in (*quiet, *["flood"] * 100):
        fleet.offer(name, seconds=0.1 if name == "flood" else 0.001)
    for _ in quiet:
        fleet.start(after=0.001)
    for step in range(30):
        for name in quiet:
            fleet.offer(name, seconds=0.001)
        while fleet.there["a"][0].tenant != "flood":
            fleet.start(after=0.001)
        fleet.start(after=0.6)
        assert step < 10 or fleet.waits.waiting_seconds("a") <= 0.25, "not at once, though it sends nothing any more"


def test_beside_few_others_a_flood_still_holds_some_places():
    fleet = Fleet(hold_seconds=1.0, spare_seconds=0.3)
    fleet.offer("quiet")
    fleet.start(ends=False)
    for _ in range(60):
        fleet.offer("flood")
    held = 0
    while fleet.there["a"]:
        fleet.start(ends=False)
        held += 1
    assert held == PLACES_MIN + 1  # its first five went as a burst, at 0.1 s each


def test_of_a_tenant_s_requests_those_with_little_work_go_first_until_the_others_are_old():
    fleet = Fleet(hold_seconds=0.05)
    fleet.offer()
    long, short = fleet.offer(seconds=0.5), fleet.offer(seconds=0.1)
    fleet.start()
    assert fleet.placed[-1] is short
    fleet.now += WORK_PATIENCE * 0.5
    later = fleet.offer(seconds=0.01)
    fleet.start()
    assert fleet.placed[-1] is long and later.waits


def test_floods_alike_are_all_given_work_ahead():
    fleet = Fleet(hold_seconds=1.0, spare_seconds=0.15)
    for _ in range(100):
        fleet.offer("one")
        fleet.offer("two")
    for _ in range(10):
        fleet.start()
    assert fleet.waits.waiting_seconds("a") > 0.9


def test_weights_divide_what_there_is():
    fleet = Fleet(hold_seconds=0.25, weights={"heavy": 3.0})
    for _ in range(200):
        fleet.offer("heavy")
        fleet.offer("light")
    for _ in range(200):
        fleet.start()
    tenants = fleet.tenants()[20:200]
    assert tenants.count("heavy") / tenants.count("light") == pytest.approx(3.0, rel=0.2)


def test_what_a_request_really_took_is_made_up_for():
    fleet = Fleet(hold_seconds=0.25)
    for _ in range(200):
        fleet.offer("long")
        fleet.offer("short")
    for _ in range(200):
        fleet.start(more={"long": 0.2})  # three times what was booked
    tenants = fleet.tenants()[20:200]
    assert tenants.count("short") / tenants.count("long") == pytest.approx(3.0, rel=0.25)


def test_batch_work_goes_last_and_only_where_little_waits():
    fleet = Fleet(hold_seconds=0.35, spare_seconds=0.05)
    fleet.offer("people")
    jobs = [fleet.offer("jobs", batch=True) for _ in range(3)]
    assert not any(job in fleet.placed for job in jobs)
    people = [fleet.offer("people") for _ in range(6)]
    for _ in range(7):
        fleet.start()
    assert all(one in fleet.placed for one in people)
    for _ in range(3):
        if fleet.there["a"]:
            fleet.start()
    assert all(job in fleet.placed for job in jobs)


def test_batch_work_does_not_starve():
    fleet = Fleet(hold_seconds=0.25)
    for _ in range(5):
        fleet.offer("people")
    job = fleet.offer("jobs", batch=True)
    fleet.now += PATIENCE_SECONDS + 1.0
    for _ in range(2 * OVERDUE_EVERY):
        fleet.offer("people")
        fleet.start()
    assert job in fleet.placed


def test_the_least_slack_goes_first():
    fleet = Fleet(hold_seconds=0.05)
    fleet.offer()
    late, soon = (fleet.offer(limit=limit, deadline=True) for limit in (9.0, 3.0))
    patient = fleet.offer()
    for _ in range(3):
        fleet.start()
    assert fleet.placed[1:] == [soon, late, patient]


def busy_fleet(**config):
    """One worker at its bound, whose pace of 1 has been measured."""
    fleet = Fleet(hold_seconds=0.25, **config)
    for _ in range(300):
        fleet.offer("before")
    for _ in range(290):
        fleet.start()
    while len(fleet.control):
        fleet.start()
    return fleet


def test_who_would_come_too_late_is_refused_at_once_and_hears_how_long_it_would_take():
    fleet = busy_fleet()
    for _ in range(15):
        fleet.offer(limit=2.0)
    with pytest.raises(Overloaded) as refused:
        for _ in range(10):
            fleet.offer(limit=2.0)
    assert refused.value.retry_after_seconds == pytest.approx(2.0, abs=0.4)
    assert not fleet.refused


def test_a_request_whose_time_is_over_is_refused_when_its_turn_comes():
    fleet = busy_fleet()
    doomed = fleet.offer(limit=1.0, deadline=True)
    fleet.start(after=5.0)
    assert doomed in fleet.placed or [held for held, _ in fleet.refused] == [doomed]
    late = fleet.offer(limit=1.0, deadline=True, seconds=0.2)
    for _ in range(3):
        fleet.offer()
    if late not in fleet.placed:
        fleet.start(after=5.0)
        assert late in [held for held, _ in fleet.refused]


def test_a_request_waits_for_the_worker_that_has_its_prefix_but_not_longer_than_that_is_worth():
    fleet = Fleet(("a", "b"), hold_seconds=0.25)
    for _ in range(3):
        fleet.offer(wants="a")
    waits = fleet.offer(wants="a", patience=0.3)
    assert waits not in fleet.placed  # though b has nothing to do
    other = fleet.offer(wants="b")
    assert other in fleet.placed  # and those behind it go there
    fleet.now += 0.5
    fleet.control.pump(fleet.now)
    assert waits in fleet.there["b"]


def test_at_the_bound_the_newest_of_the_longest_line_is_refused():
    fleet = Fleet(hold_seconds=0.05, waiting_max=10)
    flood = [fleet.offer("flood") for _ in range(11)]
    with pytest.raises(QueueFull, match="10 requests wait"):
        fleet.offer("flood")
    quiet = fleet.offer("quiet")
    assert [held for held, _ in fleet.refused] == [flood[-1]]
    assert isinstance(fleet.refused[0][1], QueueFull) and quiet.waits and len(fleet.control) == 10


def test_of_more_tenants_than_the_bound_those_here_last_are_remembered():
    fleet = Fleet(tenants_max=3)
    for number in range(5):
        fleet.offer(f"t{number}")
    assert list(fleet.control._recent) == ["t2", "t3", "t4"]


def test_who_goes_away_is_forgotten_and_again_nothing():
    fleet = Fleet(hold_seconds=0.05)
    fleet.offer()
    gone = fleet.offer()
    fleet.control.withdraw(gone)
    fleet.control.withdraw(gone)
    assert len(fleet.control) == 0
    fleet.control.check()


@pytest.mark.parametrize(
    "wrong",
    [
        {"hold_seconds": 0.0}, {"hold_seconds": math.nan}, {"spare_seconds": -1.0}, {"burst_seconds": -1.0},
        {"weights": {"a": 0.0}}, {"weights": [1]}, {"waiting_max": 0}, {"tenants_max": 0},
    ],
)  # fmt: skip
def test_wrong_options_are_named(wrong):
    with pytest.raises(InvalidConfig, match=next(iter(wrong))):
        FlowConfig(**wrong)
