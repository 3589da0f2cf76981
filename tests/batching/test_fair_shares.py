"""Accounts of tenants: against a naive model, at their bound, and what an idle tenant may not save up."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from preble.batching.fair_shares import FairShares
from preble.errors import InvalidConfig

TENANTS = st.sampled_from("abcde")
SECONDS = st.sampled_from([0.25, 0.5, 1.0, 3.0])


class NaiveShares:
    """All accounts that ever were, in a dict; virtual time beside it."""

    def __init__(self, burst):
        self.burst = burst
        self.now = 0.0
        self.accounts = {}
        self.waiting = []  # in the order in which they were placed

    def account(self, tenant):
        least = self.now - self.burst
        if tenant in self.waiting:
            return self.accounts[tenant]
        return max(self.accounts.get(tenant, least), least)

    def move(self, tenant, account):
        self.accounts[tenant] = max(account, self.now - self.burst)
        if tenant in self.waiting:
            self.waiting.remove(tenant)
            self.waiting.append(tenant)

    def charge(self, tenant, seconds):
        before = self.account(tenant)
        self.now = max(self.now, min([before, *(self.accounts[one] for one in self.waiting)]))
        self.move(tenant, before + seconds)

    def lowest(self):
        return [(self.accounts[one], one) for one in sorted(self.waiting, key=lambda one: self.accounts[one])]


class SharesMachine(RuleBasedStateMachine):
    """Tenants come, are served and go."""

    def __init__(self):
        super().__init__()
        self.real, self.naive = FairShares(burst_seconds=0.5), NaiveShares(0.5)

    @rule(tenant=TENANTS)
    def join(self, tenant):
        self.real.join(tenant)
        if tenant not in self.naive.waiting:
            self.naive.accounts[tenant] = self.naive.account(tenant)
            self.naive.waiting.append(tenant)

    @rule(tenant=TENANTS)
    def leave(self, tenant):
        self.real.leave(tenant)
        if tenant in self.naive.waiting:
            self.naive.waiting.remove(tenant)

    @rule(tenant=TENANTS, seconds=SECONDS)
    def charge(self, tenant, seconds):
        self.real.charge(tenant, seconds)
        self.naive.charge(tenant, seconds)

    @rule(seconds=SECONDS)
    def serve_the_next(self, seconds):
        found = next(iter(self.real.lowest()), None)
        if found is not None:
            self.charge(found[1], seconds)

    @rule(tenant=TENANTS, seconds=st.sampled_from([-0.5, 0.25]))
    def correct(self, tenant, seconds):
        self.real.correct(tenant, seconds)
        self.naive.move(tenant, self.naive.account(tenant) + seconds)

    @invariant()
    def agree(self):
        self.real.check()
        assert list(self.real.lowest()) == self.naive.lowest()
        for tenant in "abcde":
            assert self.real.account(tenant) == self.naive.account(tenant)


def test_shares_agree_with_the_naive_model():
    run_state_machine_as_test(SharesMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


def test_who_always_waits_gets_equal_parts_within_one_request():
    shares = FairShares()
    served = dict.fromkeys("abc", 0.0)
    for tenant in served:
        shares.join(tenant)
    for turn in range(300):
        _, tenant = next(iter(shares.lowest()))
        seconds = 0.1 + (turn * 7 % 10) / 10
        shares.charge(tenant, seconds)
        served[tenant] += seconds
        assert max(served.values()) - min(served.values()) <= 1.0 + 1e-9


def test_a_tenant_does_not_save_up_what_it_did_not_ask_for():
    shares = FairShares(burst_seconds=0.5)
    shares.join("flood")
    for _ in range(100):
        shares.charge("flood", 1.0)
    shares.join("late")
    virtual_time = shares.account("flood") - 1.0  # before its last turn
    assert shares.account("late") == pytest.approx(virtual_time - 0.5)


def test_what_was_taken_while_nobody_else_wanted_it_is_no_debt():
    shares = FairShares()
    for _ in range(100):
        shares.charge("busy", 1.0)
    shares.join("new")
    assert shares.account("busy") - shares.account("new") <= 1.0


def test_accounts_of_a_hundred_thousand_tenants_are_bounded_and_the_oldest_start_anew():
    shares = FairShares(tenants_max=1000)
    shares.join("waits")  # it holds virtual time down, so that no account is dropped for saying nothing
    for number in range(100_000):
        shares.charge(f"t{number}", 5.0)
    assert len(shares) == 1001
    assert shares.account("t99999") == 5.0
    assert shares.account("t0") == shares.account("unknown") == 0.0
    shares.check()


def test_accounts_that_say_nothing_are_dropped():
    shares = FairShares()
    for number in range(100):
        shares.charge(f"t{number}", 0.0)
    assert len(shares) == 0


@pytest.mark.parametrize("wrong", [{"burst_seconds": -1.0}, {"tenants_max": 0}])
def test_wrong_bounds_are_named(wrong):
    with pytest.raises(InvalidConfig, match=next(iter(wrong))):
        FairShares(**wrong)
