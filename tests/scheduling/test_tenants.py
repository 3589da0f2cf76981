"""Requests that name a tenant, a deadline or a class, of a scheduler without a queue: what tenants are charged, who is
refused, and that nothing else changes."""

from __future__ import annotations

import uuid
from collections.abc import Hashable
from typing import Any

import pytest

import preble
from preble import GlobalScheduler, ManualClock, WorkerSpec
from preble.errors import DuplicateRequest, InvalidInput, Overloaded, UnknownWorker
from preble.scheduling.tenants import LEARNED_MIN, SCALE_MAX, SPARE_SECONDS, Tenants
from preble.types import BATCH, Claim

COST = preble.CostModel([(1, 0.001), (1001, 1.001)])  # a millisecond a token, whatever else is computed


def prompt(number: int, tokens: int = 500) -> list[int]:
    return [10_000 * (number + 1) + token for token in range(tokens)]


def fleet(*names: str, **options: Any) -> tuple[GlobalScheduler, ManualClock]:
    clock = ManualClock()
    specs = [WorkerSpec(name, kv_capacity_tokens=1_000_000) for name in names or ("a",)]
    return GlobalScheduler(specs, cost_model=COST, clock=clock, **options), clock


def state(scheduler: GlobalScheduler) -> bytes:
    return scheduler.snapshot()


# --- accounts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_id", [None, uuid.UUID(int=1)])
def test_a_tenant_is_charged_what_is_booked_and_in_the_end_what_its_request_took(request_id: Hashable) -> None:
    scheduler, clock = fleet()
    decision = scheduler.schedule(prompt(0), request_id=request_id, tenant="a", max_new_tokens=10)
    booked = scheduler.booked_seconds(decision.request_id)
    assert booked > 0.4 and scheduler.tenant_seconds() == {"a": booked}
    clock.advance(1.0)
    scheduler.first_token(decision.request_id, cached_tokens=400)
    scheduler.finish(decision.request_id, output_tokens=30)
    took = scheduler.service_seconds("a", 500, 400, 30)
    assert scheduler.tenant_seconds()["a"] == pytest.approx(took) and took != pytest.approx(booked)
    scheduler.check()


def test_what_has_no_first_token_is_given_back_with_its_booking_and_what_has_one_is_not() -> None:
    scheduler, _ = fleet()
    kept = scheduler.schedule(prompt(0), tenant="a")
    scheduler.first_token(kept.request_id)
    seconds = scheduler.booked_seconds(kept.request_id)
    gone = scheduler.schedule(prompt(1), tenant="a")
    scheduler.cancel(gone.request_id)
    scheduler.cancel(kept.request_id)
    assert scheduler.tenant_seconds()["a"] == pytest.approx(seconds, rel=0.1)
    scheduler.check()


def test_a_lease_that_expires_and_one_that_is_left_end_the_charge() -> None:
    scheduler, clock = fleet(config=preble.SchedulerConfig(lease_seconds=30.0))
    scheduler.schedule(prompt(0), tenant="a")
    with scheduler.lease(prompt(1), tenant="b", priority="interactive"):
        assert scheduler.stats()["tenants"]["live_requests"] == 2
    clock.advance(60.0)
    scheduler.tick()
    assert scheduler.stats()["tenants"]["live_requests"] == 0
    assert scheduler.tenant_seconds() == {"a": 0.0, "b": 0.0}
    scheduler.check()


def test_requests_that_name_nothing_are_placed_as_ever_and_have_no_account() -> None:
    named, _ = fleet("a", "b", "c")
    plain, _ = fleet("a", "b", "c")
    for number in range(40):
        one = named.schedule(prompt(number % 7), request_id=number, tenant="t", deadline_seconds=1e6)
        other = plain.schedule(prompt(number % 7), request_id=number)
        assert (one.worker, one.matched_tokens) == (other.worker, other.matched_tokens)
    assert plain.tenant_seconds() == {} and plain.stats()["tenants"] == {}


def test_several_prompts_are_charged_to_one_tenant_or_none_of_them_is() -> None:
    scheduler, _ = fleet()
    scheduler.schedule_many([prompt(0), prompt(1)], tenant="a")
    before = scheduler.tenant_seconds()
    assert before["a"] > 0.9
    with pytest.raises(Overloaded):
        scheduler.schedule_many([prompt(2), prompt(3)], tenant="a", deadline_seconds=1.7)
    assert scheduler.tenant_seconds()["a"] == pytest.approx(before["a"])
    assert scheduler.stats()["live_requests"] == 2
    scheduler.check()


def test_a_decision_names_its_request_by_any_id() -> None:
    scheduler, _ = fleet()
    for request_id in (7, ("a", 1), "x", None):
        decision = scheduler.schedule(prompt(0), request_id=request_id, tenant="a")
        scheduler.finish(decision.request_id, output_tokens=1, cached_tokens=0)
    assert scheduler.stats()["tenants"]["live_requests"] == 0
    scheduler.check()


def test_a_scheduler_goes_on_without_accounts_after_a_restart() -> None:
    scheduler, clock = fleet()
    live = scheduler.schedule(prompt(0), tenant="a")
    again = GlobalScheduler.restore(scheduler.snapshot(), clock=clock)
    assert again.tenant_seconds() == {}
    assert again.finish(live.request_id, output_tokens=3)
    again.check()


# --- the bound --------------------------------------------------------------------------------------------------------


def accounts(tenants_max: int) -> Tenants:
    return Tenants(lambda worker, prompt_tokens, cached, output: 1.0, tenants_max=tenants_max)


def begin(tenants: Tenants, name: str, key: str) -> None:
    tenants.placed(key, Claim(name), "a", 100, 2.0, None, 0.0)


def end(tenants: Tenants, key: str) -> None:
    tenants.on_finish(key, 1.0, 0, 5)


def test_beyond_the_bound_who_ended_first_loses_its_account() -> None:
    tenants = accounts(3)
    for name in "abcd":
        begin(tenants, name, name)
        end(tenants, name)
    assert tenants.seconds() == {"b": 1.0, "c": 1.0, "d": 1.0}
    assert tenants.stats()["dropped_seconds"] == 1.0
    tenants.check([])


def test_a_tenant_with_something_running_keeps_its_account_beyond_the_bound_until_that_has_ended() -> None:
    tenants = accounts(2)
    for name in "abcd":
        begin(tenants, name, name)
    assert sorted(tenants.seconds()) == list("abcd")
    for name in "abcd":
        end(tenants, name)
    assert sorted(tenants.seconds()) == ["c", "d"]
    tenants.check([])


def test_a_hundred_thousand_tenants_have_accounts_and_more_do_not() -> None:
    tenants = Tenants(lambda worker, prompt_tokens, cached, output: 1.0)
    for number in range(100_500):
        begin(tenants, f"t{number}", "key")
        end(tenants, "key")
    assert tenants.stats()["accounts"] == 100_000 and tenants.stats()["dropped_seconds"] == 500.0
    assert "t499" not in tenants.seconds() and "t500" in tenants.seconds()


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_what_would_come_too_late_is_refused_with_the_time_that_it_would_take_and_nothing_changes() -> None:
    scheduler, _ = fleet()
    for number in range(4):
        scheduler.schedule(prompt(number))
    before, stats = state(scheduler), scheduler.stats()
    with pytest.raises(Overloaded, match=r"would take 2.5 s, it is of use for 2 s") as refused:
        scheduler.schedule(prompt(9), tenant="a", deadline_seconds=2.0)
    assert refused.value.retry_after_seconds == pytest.approx(2.5, rel=0.01)
    after = scheduler.stats()
    assert after.pop("tenants")["refused"] == 1 and stats.pop("tenants") == {}
    assert after == stats and state(scheduler) == before
    assert scheduler.tenant_seconds() == {}
    assert scheduler.schedule(prompt(9), deadline_seconds=2.6).worker == "a"


def test_a_worker_at_which_nothing_waits_is_never_too_late() -> None:
    scheduler, _ = fleet()
    assert scheduler.schedule(prompt(0), deadline_seconds=1e-6).worker == "a"


def test_a_request_goes_where_it_comes_in_time_and_not_where_it_is_cached() -> None:
    scheduler, _ = fleet("a", "b")
    first = scheduler.schedule(prompt(0, 2000))
    scheduler.first_token(first.request_id)
    home, other = first.worker, "b" if first.worker == "a" else "a"
    for number in range(4):  # a queue where it is cached, a shorter one elsewhere
        scheduler.schedule(prompt(20 + number, 300), exclude=[other])
    scheduler.schedule(prompt(50, 10), exclude=[home])
    patient = scheduler.explain(prompt(0, 2000))
    assert patient.worker == home
    cached = scheduler.schedule(prompt(0, 2000), deadline_seconds=10.0)
    assert cached.worker == home
    with pytest.raises(Overloaded):
        scheduler.schedule(prompt(0, 2000), deadline_seconds=1.0)
    elsewhere = scheduler.schedule([*prompt(0, 2000)[:100], *prompt(77, 100)], deadline_seconds=0.5)
    assert elsewhere.worker == other


def test_workers_that_are_excluded_do_not_make_a_request_timely() -> None:
    scheduler, _ = fleet("a", "b")
    for number in range(4):
        scheduler.schedule(prompt(number), exclude=["b"])
    with pytest.raises(Overloaded):
        scheduler.schedule(prompt(9), deadline_seconds=1.0, exclude=["b"])
    assert scheduler.schedule(prompt(9), deadline_seconds=1.0).worker == "b"
    with pytest.raises(UnknownWorker):
        scheduler.schedule(prompt(9), deadline_seconds=1.0, exclude=["nobody"])


@pytest.mark.parametrize("claim", [{"deadline_seconds": 0.5}, {"priority": BATCH}])
def test_a_worker_that_leaves_slowly_does_not_make_a_request_timely(claim: dict[str, Any]) -> None:
    """Regression: `NoWorkers`, for the one that leaves was alone in time, and takes only what it has cached."""
    scheduler, _ = fleet("a", "b")
    for number in range(6):
        scheduler.finish(scheduler.schedule([*prompt(0), number], exclude=["b"]).request_id, output_tokens=1)
    scheduler.drain_worker("a", handover_seconds=60.0)
    for number in range(1, 4):
        assert scheduler.schedule(prompt(number)).worker == "b"
    before = state(scheduler)
    with pytest.raises(Overloaded) as refused:
        scheduler.schedule(prompt(9), **claim)
    assert refused.value.retry_after_seconds == pytest.approx(2.0, rel=0.01)
    assert state(scheduler) == before and scheduler.stats()["tenants"]["refused"] == 1
    scheduler.check()


def test_what_is_predicted_follows_what_such_requests_have_waited() -> None:
    scheduler, clock = fleet()
    for number in range(3 * LEARNED_MIN):
        decision = scheduler.schedule(prompt(number), tenant="a", deadline_seconds=1e6)
        clock.advance(1.5)  # three times what the cost model says
        scheduler.first_token(decision.request_id, cached_tokens=0)
        scheduler.finish(decision.request_id, output_tokens=1)
    scale = scheduler.stats()["tenants"]["wait_scale"]
    assert scale == pytest.approx(3.0, rel=0.05)
    scheduler.schedule(prompt(100))
    with pytest.raises(Overloaded) as refused:
        scheduler.schedule(prompt(101), deadline_seconds=2.5)
    assert refused.value.retry_after_seconds == pytest.approx(3.0, rel=0.1)


def test_a_prediction_is_never_scaled_without_bound() -> None:
    tenants = accounts(10)
    for number in range(LEARNED_MIN):
        tenants.placed(number, Claim("a", deadline_seconds=1.0), "a", 100, 1.0, 0.02, 0.0)
        tenants.on_first_token(number, 1e6, None)
    assert tenants.scale == SCALE_MAX


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded"])
def test_other_policies_leave_out_who_is_late_too(policy: str) -> None:
    scheduler, _ = fleet("a", "b", policy=policy)
    for number in range(3):
        scheduler.schedule(prompt(number), exclude=["b"])
    assert {scheduler.schedule(prompt(10 + n, 20), deadline_seconds=0.7).worker for n in range(3)} == {"b"}


# --- classes ----------------------------------------------------------------------------------------------------------


def test_batch_work_fills_what_is_left_and_else_is_asked_to_come_again() -> None:
    scheduler, _ = fleet("a", "b")
    first = scheduler.schedule(prompt(0))
    job = scheduler.schedule(prompt(1), priority=BATCH)
    assert job.worker != first.worker
    with pytest.raises(Overloaded, match="before batch work") as refused:
        scheduler.schedule(prompt(2), priority=BATCH)
    assert refused.value.retry_after_seconds > SPARE_SECONDS
    scheduler.first_token(first.request_id)
    assert scheduler.schedule(prompt(2), priority=BATCH).worker == first.worker
    scheduler.schedule(prompt(3), priority="interactive")
    scheduler.check()


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"tenant": 5}, {"tenant": "x" * 129}, {"deadline_seconds": 0.0}, {"deadline_seconds": float("nan")},
        {"deadline_seconds": True}, {"priority": "soon"},
    ],
)  # fmt: skip
def test_wrong_arguments_are_named_and_change_nothing(wrong: dict[str, Any]) -> None:
    scheduler, _ = fleet()
    before = state(scheduler)
    for call in (scheduler.schedule, lambda p, **a: scheduler.schedule_many([p], **a)):
        with pytest.raises(InvalidInput, match=next(iter(wrong))):
            call(prompt(0), **wrong)
    with pytest.raises(InvalidInput), scheduler.lease(prompt(0), **wrong):
        pass
    assert state(scheduler) == before and scheduler.tenant_seconds() == {}


def test_an_id_that_is_live_is_said_before_a_deadline_that_is_over() -> None:
    scheduler, _ = fleet()
    scheduler.schedule(prompt(0, 2000), request_id="r")
    with pytest.raises(DuplicateRequest):
        scheduler.schedule(prompt(1), request_id="r", deadline_seconds=0.1)
    with pytest.raises(InvalidInput, match="token"):
        scheduler.schedule([], request_id="s", deadline_seconds=0.1)
