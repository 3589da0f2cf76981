"""Pairs: which requests two workers serve, and what is booked of them until which end."""

from __future__ import annotations

from typing import Any, cast

import pytest

import preble
from preble import GlobalScheduler, ManualClock, SchedulerConfig, WorkerSpec
from preble.errors import DuplicateRequest, InvalidConfig, InvalidInput, InvalidTokens, NoWorkers, UnknownWorker
from preble.policies.base import POLICIES
from preble.scheduling.pairs.handovers import HandOvers
from preble.scheduling.pairs.price import HalfTerms, cheapest_pair, room_price, wait_for_prefills
from preble.types import PairDecision, Role

COST = preble.CostModel([(1, 0.001), (1001, 1.001)])  # a millisecond a token, whatever else is computed


def prompt(number: int, tokens: int = 500) -> list[int]:
    return [10_000 * (number + 1) + token for token in range(tokens)]


def fleet(roles: dict[str, str], **options: Any) -> tuple[GlobalScheduler, ManualClock]:
    clock = ManualClock()
    said: dict[str, Any] = {"kv_capacity_tokens": options.pop("kv_capacity_tokens", 1_000_000)}
    specs = [WorkerSpec(name, **said, role=cast("Role", role)) for name, role in roles.items()]
    return GlobalScheduler(specs, cost_model=COST, clock=clock, **options), clock


def live(scheduler: GlobalScheduler) -> dict[str, int]:
    return {name: worker["live_requests"] for name, worker in scheduler.stats()["workers"].items()}


def waiting_seconds(scheduler: GlobalScheduler, worker: str) -> float:
    return scheduler.stats()["workers"][worker]["waiting_prefill_seconds"]


# --- roles ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["", "prefil", None, 1, ["prefill"]])
def test_a_role_that_is_none_is_named(role: Any) -> None:
    with pytest.raises(InvalidConfig, match="WorkerSpec.role must be one of both, prefill, decode"):
        WorkerSpec("a", role=role)


def test_who_does_not_do_both_gets_nothing_from_schedule() -> None:
    scheduler, _ = fleet({"p": "prefill", "b": "both", "d": "decode"})
    assert {scheduler.schedule(prompt(n)).worker for n in range(20)} == {"b"}
    only, _ = fleet({"p": "prefill", "d": "decode"})
    with pytest.raises(NoWorkers):
        only.schedule(prompt(0))
    assert only.schedule_pair(prompt(0)).prefill_worker == "p"
    only.drain_worker("p")
    with pytest.raises(NoWorkers):
        only.schedule_pair(prompt(1))
    only.check()


def test_where_all_do_both_a_pair_is_never_chosen_and_the_decisions_are_those_of_schedule() -> None:
    one, _ = fleet({"a": "both", "b": "both"})
    other, _ = fleet({"a": "both", "b": "both"})
    for n in range(30):
        found, expected = one.schedule_pair(prompt(n % 7, 50 * n + 1)), other.schedule(prompt(n % 7, 50 * n + 1))
        assert (found.worker, found.reason, found.matched_tokens) == (
            expected.worker,
            expected.reason,
            expected.matched_tokens,
        )
        assert found.prefill_worker is None and found.prefill_request_id is None
    assert one._pairs is None and one._policy_state is None and one.snapshot() == other.snapshot()


@pytest.mark.parametrize("name", ["zz", [], 5, None])
def test_who_is_excluded_and_is_no_worker_is_named_as_schedule_does(name: Any) -> None:
    """Regression: one that is not hashable was a bare TypeError."""
    for roles in ({"a": "both"}, {"a": "both", "p": "prefill"}, {"p": "prefill", "d": "decode"}):
        scheduler, _ = fleet(roles)
        for call in (scheduler.schedule_pair, scheduler.explain_pair):
            with pytest.raises(UnknownWorker, match="no worker"):
                call(prompt(0), exclude=[name])
        assert scheduler.stats()["live_requests"] == 0
        scheduler.check()


# --- which it is ------------------------------------------------------------------------------------------------------


def test_a_queue_separates_and_what_is_cached_or_waits_for_nobody_stays() -> None:
    scheduler, _ = fleet({"p": "prefill", "b": "both"})
    idle = scheduler.schedule_pair(prompt(0))
    assert idle.prefill_worker is None and idle.price_seconds < idle.other_seconds, "a transfer, and nothing gained"
    scheduler.first_token(idle.request_id)
    cached = scheduler.schedule_pair([*prompt(0), 7])
    assert cached.prefill_worker is None and cached.matched_tokens == 500
    scheduler.first_token(cached.request_id)
    for n in range(1, 4):
        scheduler.schedule(prompt(n))
    long = scheduler.schedule_pair(prompt(4))
    assert (long.prefill_worker, long.worker, long.reason, long.moved_tokens) == ("p", "b", "pair", 500)
    assert long.price_seconds < long.other_seconds
    scheduler.check()


def test_load_separates_without_a_queue() -> None:
    scheduler, clock = fleet({"p": "prefill", "b": "both"})
    for n in range(60):  # half of the time of b goes into prefills
        decision = scheduler.schedule(prompt(n))
        clock.advance(0.6)
        scheduler.finish(decision.request_id, output_tokens=400)
        clock.advance(0.4)
    assert waiting_seconds(scheduler, "b") == 0.0
    assert scheduler.schedule_pair(prompt(100), max_new_tokens=400).prefill_worker == "p"
    assert scheduler.schedule_pair([*prompt(59), 1], max_new_tokens=400).prefill_worker is None, "it is cached there"


def test_the_link_is_part_of_the_price_and_learned() -> None:
    scheduler, _ = fleet({"p": "prefill", "b": "both"})
    for name in ("p", "b"):
        scheduler.can_move_kv(name, "layout", 100_000_000)  # 50 GB of a prompt, 40 s
    for n in range(4):
        scheduler.schedule(prompt(n))
    assert scheduler.schedule_pair(prompt(4)).prefill_worker is None
    for name in ("p", "b"):
        scheduler.can_move_kv(name, "layout", 1000)
    assert scheduler.schedule_pair(prompt(5)).prefill_worker == "p"


def test_the_cheapest_of_many_is_a_pair_of_two() -> None:
    scheduler, _ = fleet({"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"})
    found = [scheduler.schedule_pair(prompt(n), max_new_tokens=50) for n in range(8)]
    assert sorted(one.prefill_worker or "" for one in found) == ["p0"] * 4 + ["p1"] * 4
    assert sorted(one.worker for one in found) == ["d0"] * 4 + ["d1"] * 4
    again = scheduler.schedule_pair([*prompt(3), 1], exclude=["p0"])
    assert again.prefill_worker == "p1"
    scheduler.check()


def test_one_worker_is_chosen_as_if_those_with_a_role_were_not_there() -> None:
    """An idle worker that takes no whole request once made copies look cheap: the mean of the fleet was with it."""
    roles = {"a": "both", "b": "both", "c": "both"}
    (alone, clock), (beside, clock_beside) = (
        fleet(roles),
        fleet({**roles, "p": "prefill", "q": "prefill", "d": "decode"}),
    )
    document, chosen = prompt(0, 4000), []
    for n in range(60):
        question = [*(document if n % 3 else prompt(n, 900)), 10**6 + n]
        chosen.append([one.schedule(question, request_id=n).worker for one in (alone, beside)])
        clock.advance(0.15)
        clock_beside.advance(0.15)
        for one in (alone, beside):
            if n >= 4:
                one.first_token(n - 4)
            if n >= 12:
                one.finish(n - 12, output_tokens=40)
    assert [mine for mine, _ in chosen] == [other for _, other in chosen]
    why = [one.explain([*document, 7]).workers for one in (alone, beside)]
    assert [cost.others_seconds for cost in why[0]] == pytest.approx([cost.others_seconds for cost in why[1]], rel=0.02)


def test_a_decode_waits_for_the_prefills_that_are_ahead_of_it() -> None:
    one = HalfTerms(0, 3, 0, 0.0, 1.5, 0.25, 0.75, *([0.0] * 6))
    other = HalfTerms(1, 5, 0, 0.0, 0.0, 0.0, 4.02, *([0.0] * 5), 0.4)
    assert wait_for_prefills(one, other, 0.5) == pytest.approx(4.0 - 0.6 * 3.0)
    assert wait_for_prefills(one, other, 60.0) == 0.0, "until then they are done"
    scheduler, _ = fleet({"p": "prefill", "a": "both", "b": "both"})
    for n in range(20):
        scheduler.schedule(prompt(n), exclude=["b"])
    for n in range(20, 40):  # as many requests, whose prompts are computed
        scheduler.first_token(scheduler.schedule(prompt(n), exclude=["a"]).request_id)
    found = scheduler.schedule_pair(prompt(40), exclude=[])
    assert found.worker == "b"


def test_who_only_prefills_takes_from_a_queue_what_would_make_it_longer() -> None:
    """Priced with the wait where it is decoded, a pair was the dearer the longer that queue was, and more went whole to
    the one worker that does both: p99 TTFT 12 times that of two that do both, and 1.2 since."""
    one = HalfTerms(0, 0, 0, 0.0, 1.0, *([0.0] * 8))
    other = HalfTerms(1, 0, 0, 0.0, 0.0, 0.0, 30.0, *([0.0] * 6))

    def price(role: str) -> float:
        found = cheapest_pair([(1.0, one, role)], [(0.5, other)], 100, lambda one, other, moved: 0.1)
        assert found is not None
        return found.seconds

    assert price("prefill") == pytest.approx(1.6)
    assert price("both") == pytest.approx(1.6 + wait_for_prefills(one, other, 0.1))


@pytest.mark.parametrize("end", ["first_token", "cancel"])
def test_a_prompt_on_its_way_is_not_estimated_cached_where_it_will_be_decoded(end: str) -> None:
    """Who shared it was sent there meanwhile, and computed all of it once more."""
    scheduler, _ = fleet({"p": "prefill", "b": "both"})
    for n in range(3):
        scheduler.schedule(prompt(n))
    found = scheduler.schedule_pair(prompt(4), request_id="r")
    assert (found.prefill_worker, found.worker) == ("p", "b")
    assert scheduler.match(prompt(4)).matched_tokens == {"p": 499}
    scheduler.prefill_done("r")
    assert scheduler.match(prompt(4)).matched_tokens == {"p": 499}
    getattr(scheduler, end)("r")
    scheduler.check()
    assert scheduler.match(prompt(4)).matched_tokens == {"p": 499, **({"b": 499} if end == "first_token" else {})}


def test_who_keeps_one_waiting_that_was_handed_over_decodes_no_other() -> None:
    """Those that were handed over to a full worker waited for a minute, and more were sent after them."""
    scheduler, clock = fleet({"p": "prefill", "d0": "decode", "d1": "decode"})
    first = scheduler.schedule_pair(prompt(0), request_id="r", max_new_tokens=50)
    scheduler.cancel(scheduler.schedule_pair(prompt(1), request_id="s", max_new_tokens=50).request_id)
    clock.advance(0.5)
    assert scheduler.prefill_done("r")
    clock.advance(10.0)
    for n in range(2, 12):
        found = scheduler.schedule_pair(prompt(n), request_id=n, max_new_tokens=50)
        assert found.worker != first.worker and found.transfer_seconds < 5.0
        scheduler.prefill_done(n)
        scheduler.first_token(n)
    scheduler.first_token("r")
    scheduler.check()
    assert scheduler.schedule_pair(prompt(12), max_new_tokens=50).worker == first.worker
    scheduler.remove_worker(first.worker)
    scheduler.check()


def test_it_is_known_how_much_kv_is_on_its_way_to_whom() -> None:
    of = HandOvers()
    for key in "abc":
        of.booked(key, "d", 100)
    of.prefilled("b", 10.0)
    of.prefilled("c", 11.0)
    of.prefilled("e", 12.0)  # is no pair's
    of.check("abc")
    assert of.coming_tokens("d") == 300 and of.waiting_seconds("d", 13.0) == 3.0
    of.ended("b")
    assert of.coming_tokens("d") == 200 and of.waiting_seconds("d", 13.0) == 2.0
    of.closed("d")
    of.ended("c")
    of.booked("f", "d", 50)  # a worker of the same name
    of.ended("a")
    of.check("f")
    assert of.coming_tokens("d") == 50 and of.waiting_seconds("d", 14.0) == 0.0


def test_a_second_place_for_kv_is_priced_only_where_who_prefills_could_decode() -> None:
    """Pairs among workers that do both filled each other's memory beyond saturation, and waited there."""
    of = HalfTerms(0, 3, 0, *([0.0] * 8), 2.0, 0.5)
    assert room_price(of, 300, 1000) == pytest.approx(2.0 * 300 / 500)
    prices = {}
    for role in ("both", "prefill"):
        scheduler, _ = fleet({"a": role, "b": "both", "p": "prefill"}, kv_capacity_tokens=2000)
        exclude = ["p"] if role == "both" else ["a"]
        for n in range(3):
            scheduler.schedule(prompt(n), exclude=["a"] if role == "both" else [])
        why = scheduler.explain_pair(prompt(5), exclude=exclude)
        assert why.pair is not None
        prices[role] = why.pair.transfer_seconds
    assert prices["both"] > prices["prefill"] + 0.1


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "kv_cost"])
def test_another_policy_chooses_either_half(policy: str) -> None:
    scheduler, _ = fleet({"p0": "prefill", "p1": "prefill", "b": "both", "d": "decode"}, policy=policy)
    found = [scheduler.schedule_pair(prompt(n), max_new_tokens=50) for n in range(4)]
    assert sorted(one.prefill_worker or "" for one in found) == ["p0", "p0", "p1", "p1"]
    assert sorted(one.worker for one in found) == ["b", "b", "d", "d"]
    for one in found:
        assert scheduler.prefill_done(one.request_id) and scheduler.finish(one.request_id, output_tokens=5)
    assert sum(live(scheduler).values()) == 0
    scheduler.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_workers_that_cannot_hand_kv_to_each_other_make_no_pair(policy: str) -> None:
    """Regression: policies other than E2 chose who decodes among all, and half of the prompts were computed twice."""
    scheduler, _ = fleet({"p": "prefill", "d": "decode", "b": "both"}, policy=policy)
    for name in ("p", "d"):
        scheduler.can_move_kv(name, "layout", 1000)
    found = [scheduler.schedule_pair(prompt(n), max_new_tokens=50) for n in range(8)]
    pairs = {(one.prefill_worker, one.worker) for one in found}
    assert ("p", "d") in pairs and pairs <= {("p", "d"), (None, "b")}
    apart = scheduler.explain_pair(prompt(8), exclude=["d"])
    alone = scheduler.schedule_pair(prompt(8), exclude=["d"])
    assert (alone.prefill_worker, alone.worker, apart.worker) == (None, "b", "b")
    scheduler.check()


# --- bookings ---------------------------------------------------------------------------------------------------------


def separated(**config: Any) -> tuple[GlobalScheduler, ManualClock, PairDecision]:
    scheduler, clock = fleet({"p": "prefill", "d": "decode"}, config=SchedulerConfig(**config))
    return scheduler, clock, scheduler.schedule_pair(prompt(0), request_id="r", max_new_tokens=10)


def test_both_halves_are_booked_where_they_are_and_end_in_turn() -> None:
    scheduler, clock, found = separated()
    assert live(scheduler) == {"p": 1, "d": 1} and waiting_seconds(scheduler, "p") == pytest.approx(0.5)
    assert waiting_seconds(scheduler, "d") == 0.0
    assert scheduler.stats()["workers"]["d"]["live_output_tokens"] == 10
    clock.advance(0.5)
    assert scheduler.prefill_done("r", cached_tokens=0) and not scheduler.prefill_done("r")
    assert live(scheduler) == {"p": 0, "d": 1} and waiting_seconds(scheduler, "p") == 0.0
    assert scheduler.first_token("r")
    assert scheduler.match(prompt(0)).matched_tokens == {"p": 499, "d": 499}
    assert scheduler.finish("r", output_tokens=10) and not scheduler.finish("r")
    assert live(scheduler) == {"p": 0, "d": 0} and found.request_id == "r"
    scheduler.check()


def test_whatever_ends_a_request_ends_its_prefill() -> None:
    for end in ("finish", "cancel", "expire", "reconcile"):
        scheduler, clock, _ = separated(lease_seconds=60.0)
        if end == "expire":
            clock.advance(100.0)
            scheduler.tick()
        elif end == "reconcile":
            clock.advance(10.0)
            scheduler.reconcile("d", [])
        else:
            getattr(scheduler, end)("r")
        assert live(scheduler) == {"p": 0, "d": 0}, end
        assert scheduler.stats()["live_requests"] == 0
        scheduler.check()


def test_who_renews_a_request_renews_the_half_that_is_prefilled() -> None:
    """Regression: that half expired from its booking on, and its worker, which prefilled still, looked idle."""
    scheduler, clock, found = separated(lease_seconds=60.0)
    clock.advance(50.0)
    assert scheduler.renew("r")
    clock.advance(20.0)
    scheduler.tick()
    assert scheduler.stats()["expired_leases"] == 0 and live(scheduler) == {"p": 1, "d": 1}
    assert scheduler.prefill_done("r") and scheduler.renew("r") and not scheduler.renew(found.prefill_request_id)
    clock.advance(70.0)
    scheduler.tick()
    assert scheduler.stats()["expired_leases"] == 1 and not scheduler.renew("r")
    scheduler.check()


def test_a_prefill_that_its_worker_does_not_have_is_given_back_alone() -> None:
    scheduler, clock, found = separated()
    clock.advance(10.0)
    assert scheduler.reconcile("p", [found.prefill_request_id]).given_back == ()
    clock.advance(1.0)
    scheduler.reconcile("p", [], grace_seconds=0.0)
    assert live(scheduler) == {"p": 0, "d": 1} and not scheduler.prefill_done("r")
    scheduler.check()
    scheduler.finish("r")


@pytest.mark.parametrize("lost", ["p", "d"])
def test_a_worker_that_leaves_names_the_request_whichever_half_it_had(lost: str) -> None:
    scheduler, _, _ = separated()
    assert scheduler.remove_worker(lost) == ["r"]
    scheduler.check()
    assert scheduler.cancel("r")
    assert sum(live(scheduler).values()) == 0 and scheduler.stats()["live_requests"] == 0
    scheduler.check()


def test_an_error_books_neither_half() -> None:
    scheduler, _, _ = separated(live_requests_max=3)
    before = scheduler.snapshot()
    for error, asked in (
        (DuplicateRequest, {"request_id": "r"}),
        (UnknownWorker, {"exclude": ["x"]}),
        (InvalidInput, {"exclude": "p"}),
        (InvalidInput, {"max_new_tokens": 0}),
        (InvalidInput, {"request_id": []}),
        (preble.errors.NoWorkers, {"exclude": ["d"]}),
    ):
        with pytest.raises(error):
            scheduler.schedule_pair(prompt(1), **asked)  # type: ignore[arg-type]
    with pytest.raises(InvalidTokens):
        scheduler.schedule_pair([])
    scheduler.check()
    assert scheduler.snapshot() == before
    with pytest.raises(preble.errors.QueueFull):  # there is room for one half
        scheduler.schedule_pair(prompt(1))
    assert live(scheduler) == {"p": 1, "d": 1}
    scheduler.check()


def test_a_prefill_that_nobody_can_have_cached_changes_nothing() -> None:
    scheduler, _, _ = separated()
    with pytest.raises(InvalidInput, match="cached_tokens"):
        scheduler.prefill_done("r", cached_tokens=501)
    assert live(scheduler) == {"p": 1, "d": 1}
    assert not scheduler.prefill_done("unknown")


def test_a_restored_scheduler_knows_roles_and_gives_back_what_belongs_to_nobody() -> None:
    scheduler, clock, _ = separated()
    restored = GlobalScheduler.restore(scheduler.snapshot(), clock=clock)
    assert {name: spec.role for name, spec in restored.workers.items()} == {"p": "prefill", "d": "decode"}
    assert live(restored) == {"p": 0, "d": 1}
    restored.check()
    assert restored.finish("r") and restored.schedule_pair(prompt(1)).prefill_worker == "p"
    restored.check()


def test_halves_are_given_back_by_the_time_that_goes_on_in_a_restored_scheduler() -> None:
    """Regression: by the new clock as it is, which may be far ahead; then all that was assigned had expired."""
    scheduler, clock = fleet({"p": "prefill", "d": "decode", "b": "both"})
    clock.advance(1000.0)
    for n in range(5):
        scheduler.schedule(prompt(n))
    assert scheduler.schedule_pair(prompt(5), max_new_tokens=9).prefill_worker == "p"
    other = ManualClock(clock() + 600.0)
    restored = GlobalScheduler.restore(scheduler.snapshot(), clock=other)
    assert restored.now() == clock() and live(restored) == {"p": 0, "d": 1, "b": 5}
    assert {name: one["window_requests"] for name, one in restored.stats()["workers"].items()} == live(restored)
    other.advance(400.0)
    restored.tick()
    assert restored.stats()["workers"]["b"]["window_requests"] == 0
    restored.check()


def test_what_a_decode_worker_does_teaches_it_no_prefill() -> None:
    scheduler, clock = fleet({"p": "prefill", "d": "decode"}, config=SchedulerConfig(calibrate=True))
    for n in range(30):
        found = scheduler.schedule_pair(prompt(n), max_new_tokens=50)
        clock.advance(0.5)
        scheduler.prefill_done(found.request_id, cached_tokens=0)
        clock.advance(0.3)
        scheduler.first_token(found.request_id)
        clock.advance(0.05)
        scheduler.finish(found.request_id, output_tokens=50)
    timings = scheduler.core.timings
    assert timings is not None
    worker = {name: timings.counts(scheduler.core.index_of(name)) for name in ("p", "d")}
    assert worker["d"][0] == 0 and worker["d"][1] == 30, "decodes, from where they began"
    assert worker["p"][0] > 10 and worker["p"][1] == 0
    scheduler.check()
