"""The waiting queue where requests name tenants, deadlines and classes: shares, order, and that nobody starves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from preble.batching._batch import LiveRequest
from preble.batching.requests import LocalConfig, LocalRequest
from preble.batching.waiting_queue import OUTPUT_COST, OVERDUE_EVERY, QUANTUM_TOKENS, TENANTS_TOGETHER, WaitingQueue
from preble.errors import InvalidInput
from preble.types import BATCH, Claim


class NoCache:
    """Of a prompt of 1s half is cached, of one of 2s all, of one of 0s nothing."""

    version = 0

    def cached_tokens(self, token_ids, namespace):
        return len(token_ids) * int(token_ids[0]) // 2


class Bench:
    """A queue, and the numbers and moments of what is put into it."""

    def __init__(self, **config):
        self.queue = WaitingQueue(LocalConfig(10**6, **config), NoCache())
        self.number = 0

    def add(self, tenant="", tokens=100, now=0.0, *, cached=False, claim=None):
        if claim is None and tenant:
            claim = Claim(tenant)
        ids = np.full(tokens, int(cached), np.int32)
        live = LiveRequest(LocalRequest(f"r{self.number}", ids, 1, claim=claim), self.number, now)
        self.number += 1
        self.queue.add(live)
        return live

    def take(self, now=0.0):
        self.queue.begin_round()
        live = self.queue.peek(now)
        if live is not None:
            self.queue.take(live)
        self.queue.end_round()
        self.queue.check()
        return live

    def take_all(self, now=0.0):
        return [self.take(now).request.request_id for _ in range(len(self.queue))]


def tenant_of(live):
    return "" if live.request.claim is None else live.request.claim.tenant


def test_a_flood_waits_and_the_others_go_first_once_it_has_had_its_share():
    bench = Bench()
    for _ in range(200):
        bench.add("flood", 500)
    for _ in range(20):
        bench.take()
    quiet = bench.add("quiet", 500)
    taken = [bench.take() for _ in range(1 + QUANTUM_TOKENS // 500 + 1)]
    assert quiet in taken


def test_two_that_always_wait_are_served_alike_within_the_quantum():
    bench = Bench()
    served = {"a": 0, "b": 0}
    for turn in range(200):
        bench.add("a", 400, cached=True)
        bench.add("b", 100 + 37 * turn % 900)
    for _ in range(200):
        live = bench.take()
        served[tenant_of(live)] += live.uncached_now
        assert abs(served["a"] - served["b"]) <= QUANTUM_TOKENS + 1000


def test_a_weight_of_two_gets_twice_as_much():
    bench = Bench()
    for _ in range(300):
        bench.add(claim=Claim("heavy", weight=2.0))
        bench.add(claim=Claim("light"))
    taken = [tenant_of(bench.take()) for _ in range(300)]
    assert taken.count("heavy") / taken.count("light") == pytest.approx(2.0, rel=0.25)


def test_outputs_are_paid_for_when_they_have_ended():
    bench = Bench()
    for _ in range(100):
        bench.add("talks", 100)
        bench.add("asks", 100)
    taken = {"talks": 0, "asks": 0}
    for _ in range(100):
        live = bench.take()
        taken[tenant_of(live)] += 1
        if tenant_of(live) == "talks":
            live.make_buffers()
            live.known_tokens += 25
            bench.queue.charge_output(live, live.output_count)
            live.known_tokens -= 25
    assert OUTPUT_COST * 25 == 200  # twice the prompt: three parts to one
    assert 2.0 < taken["asks"] / taken["talks"] < 4.0


def test_within_the_quantum_prefixes_decide():
    bench = Bench()
    cold = [bench.add("a", 100) for _ in range(5)]
    warm = [bench.add("b", 100, cached=True) for _ in range(5)]
    first = [bench.take() for _ in range(4)]
    assert sum(live in warm for live in first) >= 3 and cold


def test_batch_work_goes_when_nobody_else_waits():
    bench = Bench()
    batch = bench.add(claim=Claim("jobs", priority=BATCH))
    people = [bench.add("people") for _ in range(5)]
    assert [bench.take() for _ in range(6)] == [*people, batch]


def test_batch_work_that_waited_too_long_has_every_eighth_turn():
    bench = Bench(max_wait_seconds=10.0)
    bench.add(claim=Claim("jobs", priority=BATCH))
    for _ in range(3 * OVERDUE_EVERY):
        bench.add("people", now=15.0)
    taken = [tenant_of(bench.take(15.0)) for _ in range(OVERDUE_EVERY)]
    assert taken.count("jobs") == 1


def test_the_nearest_deadline_goes_first_within_a_group():
    bench = Bench()
    names = [bench.add(claim=Claim("a", deadline_seconds=limit)).request.request_id for limit in (9.0, 3.0, 6.0)]
    names.append(bench.add("a").request.request_id)  # counts as having the age bound, which is longer
    assert bench.take_all() == [names[1], names[2], names[0], names[3]]


def test_with_a_deadline_all_wait_in_one_order_whatever_of_them_is_cached():
    bench = Bench()
    limits = [(9.0, 1), (3.0, 0), (6.0, 2), (12.0, 2), (4.0, 1), (15.0, 0)]  # and halves of the prompt that are cached
    lives = [bench.add(claim=Claim("", deadline_seconds=limit), cached=halves) for limit, halves in limits]
    assert bench.queue.group_sizes() == [0] * 11 + [len(limits)]
    by_deadline = sorted(lives, key=lambda live: live.request.claim.deadline_seconds)
    assert bench.take_all() == [live.request.request_id for live in by_deadline]


def test_what_has_no_deadline_keeps_its_groups_and_their_turns_beside_what_has_one():
    bench = Bench()
    for _ in range(200):
        bench.add()
        bench.add(cached=True)
    plain = []
    for turn in range(240):
        if turn % 3 == 0:
            bench.add(claim=Claim("", deadline_seconds=2.0), cached=turn % 2)
        live = bench.take()
        plain += [live.cached_now > 0] * (live.request.claim is None)
    assert len(plain) == 160
    assert all(plain[at : at + 6].count(True) == 5 for at in range(0, 156, 6)), "weights 5 and 1"


def test_what_has_a_deadline_is_next_before_whatever_waits_without():
    bench = Bench()
    for number in range(300):
        bench.add(cached=number % 3)
    for turn in range(20):
        urgent = bench.add(claim=Claim("", deadline_seconds=2.0), cached=turn % 3)
        assert bench.take() is urgent
        bench.take()


@pytest.mark.parametrize("cached", [0, 2])
def test_who_has_no_deadline_does_not_starve_behind_more_with_one_than_are_served(cached):
    bench = Bench(max_wait_seconds=10.0)
    patient = bench.add(cached=cached)
    taken = []
    for second in range(10 + OVERDUE_EVERY):
        for _ in range(2):
            bench.add(claim=Claim("", deadline_seconds=2.0), now=float(second), cached=2)
        taken.append(bench.take(float(second)))
    assert patient in taken and patient is not taken[0]


def test_more_tenants_than_are_compared_are_all_served():
    bench = Bench()
    for number in range(3 * TENANTS_TOGETHER):
        bench.add(f"t{number}")
    assert sorted(bench.take_all()) == sorted(f"r{number}" for number in range(3 * TENANTS_TOGETHER))


def test_who_names_no_tenant_is_one_of_them():
    bench = Bench()
    for _ in range(100):
        bench.add("", 500)
    for _ in range(10):
        bench.take()
    named = bench.add("named", 500)
    assert named in [bench.take() for _ in range(2 + QUANTUM_TOKENS // 500)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"tenant": "x" * 129}, {"tenant": 5}, {"weight": 0.0}, {"weight": float("nan")}, {"deadline_seconds": 0},
        {"deadline_seconds": float("inf")}, {"priority": "soon"}, {"weight": True},
    ],
)  # fmt: skip
def test_wrong_claims_are_named(wrong):
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        Claim(**wrong)


class QueueMachine(RuleBasedStateMachine):
    """Requests of few tenants come, are taken, deferred and withdrawn: nobody is lost, one goes whenever one waits, and
    no tenant that waited all the time is left behind by more than two quanta and some requests."""

    def __init__(self):
        super().__init__()
        self.bench = Bench(max_wait_seconds=float("inf"))
        self.waiting = {}
        self.since = {}  # tenant -> what each other one has been served since it began to wait

    @rule(tenant=st.sampled_from(["", "a", "b", "c"]), tokens=st.integers(1, 900), cached=st.booleans())
    def add(self, tenant, tokens, cached):
        live = self.bench.add(tenant, tokens, cached=cached)
        self.waiting[live.number] = live
        self.since.setdefault(tenant, dict.fromkeys(["", "a", "b", "c"], 0))

    @rule()
    def take(self):
        live = self.bench.take()
        assert (live is None) == (not self.waiting), "somebody goes whenever somebody waits"
        if live is None:
            return
        del self.waiting[live.number]
        for served in self.since.values():
            served[tenant_of(live)] += live.uncached_now
        self.forget()

    @rule()
    def defer(self):
        queue = self.bench.queue
        queue.begin_round()
        first = queue.peek(0.0)
        if first is not None:
            queue.defer(first)
            second = queue.peek(0.0)
            assert second is not first
        queue.end_round()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data):
        number = data.draw(st.sampled_from(sorted(self.waiting)))
        self.bench.queue.remove(self.waiting.pop(number))
        self.forget()

    def forget(self):
        there = {tenant_of(live) for live in self.waiting.values()}
        self.since = {tenant: served for tenant, served in self.since.items() if tenant in there}

    @invariant()
    def nobody_is_left_behind(self):
        self.bench.queue.check()
        assert len(self.bench.queue) == len(self.waiting)
        for tenant, served in self.since.items():
            others = [seconds for name, seconds in served.items() if name != tenant and name in self.since]
            assert max(others, default=0) - served[tenant] <= 2 * QUANTUM_TOKENS + 4 * 900


def test_the_queue_is_fair_and_loses_nobody():
    run_state_machine_as_test(QueueMachine, settings=settings(max_examples=40, stateful_step_count=50, deadline=None))
