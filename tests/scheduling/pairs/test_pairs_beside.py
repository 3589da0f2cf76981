"""Pairs beside what else a scheduler keeps of requests: counts, records, tenants and deadlines, other routers' work."""

from __future__ import annotations

from typing import Any

import pytest

from preble import GlobalScheduler
from preble.cli.explain import text_of
from preble.errors import InvalidInput, NoWorkers, Overloaded, UnknownWorker
from preble.scheduling.admission import AdmissionQueue
from preble.scheduling.flow_control import FlowConfig
from preble.scheduling.records import DecisionRecording, from_json, to_json
from preble.types import PairDecision, RequestEnded, RequestPlaced, RequestPrefilled
from tests.scheduling.pairs.test_pairs import fleet, live, prompt, waiting_seconds

TERMS = ("queue", "prefill", "others", "decode", "eviction", "balance", "credit", "loading")


def sum_of(terms: Any) -> float:
    return float(sum(getattr(terms, f"{name}_seconds") for name in TERMS))


# --- counts -----------------------------------------------------------------------------------------------------------


def test_a_pair_is_one_request_in_the_counts() -> None:
    scheduler, _ = fleet({"p": "prefill", "b": "both"})
    scheduler.schedule_pair(prompt(0))
    for n in range(1, 4):
        scheduler.schedule(prompt(n))
    assert scheduler.schedule_pair(prompt(4), request_id="r").prefill_worker == "p"
    assert scheduler.prefill_done("r") and scheduler.first_token("r") and scheduler.finish("r")
    stats = scheduler.stats()
    assert stats["scheduled"] == 5 and stats["finished"] == 1 and stats["reasons"] == {"explore": 4, "pair": 1}
    assert stats["policy_state"]["pairs"] == {"live": 0, "placed": 2, "separated": 1}
    restored = GlobalScheduler.restore(scheduler.snapshot())
    assert restored.stats()["scheduled"] == 5 and restored.stats()["reasons"]["pair"] == 1


# --- why --------------------------------------------------------------------------------------------------------------


def test_what_explains_is_what_is_done_and_changes_nothing() -> None:
    scheduler, _ = fleet({"p0": "prefill", "p1": "prefill", "b": "both", "d": "decode"})
    seen = set()
    for n in range(12):
        tokens, before = prompt(n % 5, 200 + 100 * n), scheduler.snapshot()
        why = scheduler.explain_pair(tokens, max_new_tokens=50)
        assert scheduler.snapshot() == before
        found = scheduler.schedule_pair(tokens, max_new_tokens=50)
        assert (why.reason, why.matched_tokens) == (found.reason, found.matched_tokens)
        assert why.worker == (found.prefill_worker or found.worker) and why.pair is not None
        seen.add(found.prefill_worker is None)
        if found.prefill_worker is None:
            assert why.pair.one_seconds == pytest.approx(found.price_seconds)
            assert why.pair.price_seconds == pytest.approx(found.other_seconds)
            continue
        assert (why.pair.decode_worker, why.pair.moved_tokens) == (found.worker, found.moved_tokens)
        assert why.pair.one_seconds == found.other_seconds
        assert {cost.worker for cost in why.workers} == {"p0", "p1", "b"}, "who may prefill"
        assert all(sum_of(cost) == pytest.approx(cost.total_seconds) for cost in why.workers)
        own = next(cost for cost in why.workers if cost.worker == why.worker)
        assert own.total_seconds == pytest.approx(found.price_seconds) and why.margin >= -1e-9
    assert seen == {True, False}
    with pytest.raises(NoWorkers):
        fleet({"p": "prefill", "d": "decode"})[0].explain(prompt(0))


def test_where_all_do_both_it_is_explained_as_schedule_is() -> None:
    scheduler, _ = fleet({"a": "both", "b": "both"})
    assert scheduler.explain_pair(prompt(0)) == scheduler.explain(prompt(0))


@pytest.mark.parametrize("roles", [{"a": "both", "b": "both"}, {"a": "both", "b": "both", "p": "prefill"}])
def test_who_is_excluded_is_not_explained_as_the_one_worker_that_is_chosen(roles: dict[str, str]) -> None:
    """Regression: the explanation named an excluded worker where one worker wins, and took unknown ones."""
    scheduler, _ = fleet(roles)
    for name in ("a", "b"):
        before = scheduler.snapshot()
        why = scheduler.explain_pair(prompt(0), exclude=[name])
        assert scheduler.snapshot() == before
        found = scheduler.schedule_pair(prompt(0), exclude=[name])
        assert found.prefill_worker is None and why.worker == found.worker != name
        scheduler.cancel(found.request_id)
    with pytest.raises(UnknownWorker):
        scheduler.explain_pair(prompt(0), exclude=["zz"])
    with pytest.raises(NoWorkers):
        scheduler.explain_pair(prompt(0), exclude=["a", "b"])
    assert scheduler.explain(prompt(0)) is not None, "they are taken back"
    scheduler.check()


@pytest.mark.parametrize("policy", ["e2", "round_robin"])
def test_a_pair_is_recorded_once_with_the_first_token_where_it_was_prefilled(policy: str) -> None:
    scheduler, clock = fleet({"p": "prefill", "d": "decode"}, record=DecisionRecording(), policy=policy)
    scheduler.schedule_pair(prompt(9))
    clock.advance(0.25)
    found = scheduler.schedule_pair(prompt(0), request_id="r", max_new_tokens=10)
    clock.advance(1.0)
    scheduler.prefill_done("r", cached_tokens=0)
    clock.advance(0.5)
    scheduler.first_token("r")
    scheduler.finish("r", output_tokens=7)
    scheduler.check()
    _, record = scheduler.records()
    assert (record.worker, record.reason, record.sequence, record.policy) == ("p", "pair", 1, policy)
    assert record.pair is not None and record.pair.decode_worker == "d"
    assert record.chosen.backlog_seconds == pytest.approx(0.5), "what was booked before it"
    assert record.chosen.predicted_seconds == pytest.approx(1.0)
    assert record.outcome is not None and record.outcome.first_token_seconds == pytest.approx(1.0)
    assert (record.outcome.cached_tokens, record.outcome.output_tokens) == (0, 7)
    assert record.late_seconds == pytest.approx(0.0, abs=1e-6) and record.regret_seconds == 0.0
    if policy == "e2":
        assert record.chosen.total_seconds == pytest.approx(found.price_seconds)
    assert from_json(to_json(record)) == record
    assert "chosen p (pair)" in text_of(record) and "decoded by d, 500 tokens moved" in text_of(record)


def test_a_share_of_pairs_is_recorded_as_a_share_of_others_is() -> None:
    scheduler, _ = fleet({"p": "prefill", "d": "decode"}, record=DecisionRecording(share=0.3), seed=1)
    for n in range(100):
        scheduler.cancel(scheduler.schedule_pair(prompt(n, 50)).request_id)
    assert 15 < len(scheduler.records()) < 45
    scheduler.check()


def test_a_shadow_s_state_sees_the_pairs_of_e2() -> None:
    """Regression: both halves were booked, then the state looked for what E2 was not given."""
    scheduler, _ = fleet({"p": "prefill", "d": "decode"}, shadow="kv_cost")
    found = scheduler.schedule_pair(prompt(0), request_id="r")
    assert (found.prefill_worker, found.worker) == ("p", "d")
    scheduler.check()
    assert scheduler.prefill_done("r") and scheduler.first_token("r") and scheduler.finish("r")
    scheduler.check()
    assert live(scheduler) == {"p": 0, "d": 0}


# --- tenants, deadlines, batch work -----------------------------------------------------------------------------------


def test_a_deadline_leaves_out_who_prefills_too_late_and_not_who_decodes() -> None:
    scheduler, _ = fleet({"p": "prefill", "b": "both"})
    scheduler.schedule(prompt(0))  # b has half a second of prefill
    found = scheduler.schedule_pair(prompt(1), deadline_seconds=0.6, tenant="t")
    assert (found.prefill_worker, found.worker) == ("p", "b")
    with pytest.raises(Overloaded, match=r"the first token would take 1 s, it is of use for 0.6 s"):
        scheduler.schedule_pair(prompt(2), deadline_seconds=0.6)
    assert live(scheduler) == {"p": 1, "b": 2}
    scheduler.check()


def test_on_one_worker_a_deadline_is_that_of_schedule() -> None:
    scheduler, _ = fleet({"p": "prefill", "b": "both"})
    for n in range(3):
        scheduler.schedule_pair(prompt(n), tenant="t")
    before = live(scheduler)
    with pytest.raises(Overloaded):
        scheduler.schedule_pair(prompt(3), deadline_seconds=0.1)
    with pytest.raises(Overloaded):
        scheduler.schedule_pair(prompt(3), priority="batch")
    with pytest.raises(InvalidInput, match="tenant"):
        scheduler.schedule_pair(prompt(3), tenant=3)  # type: ignore[arg-type]
    assert live(scheduler) == before
    scheduler.check()


@pytest.mark.parametrize("claim", [{"deadline_seconds": 0.2}, {"priority": "batch"}])
def test_who_prefills_in_time_and_can_hand_over_to_nobody_makes_no_request_timely(claim: dict[str, Any]) -> None:
    """Regression: `NoWorkers`, for the late were excluded before the one worker was chosen."""
    scheduler, _ = fleet({"p": "prefill", "b": "both"})
    for name in ("p", "b"):
        scheduler.can_move_kv(name, f"layout of {name}", 1)
    for n in range(3):
        scheduler.schedule(prompt(n))
    with pytest.raises(Overloaded) as refused:
        scheduler.schedule_pair(prompt(9), **claim)
    assert refused.value.retry_after_seconds == pytest.approx(2.0, rel=0.01)
    assert live(scheduler) == {"p": 0, "b": 3}
    scheduler.check()


@pytest.mark.parametrize("policy", ["e2", "least_loaded"])
def test_a_tenant_is_charged_for_both_halves_and_the_charge_becomes_what_it_took(policy: str) -> None:
    scheduler, clock = fleet({"p": "prefill", "d": "decode"}, policy=policy)
    scheduler.schedule_pair(prompt(0), request_id="r", tenant="t", max_new_tokens=10)
    booked = scheduler.tenant_seconds()["t"]
    assert booked > 0.5
    clock.advance(0.5)
    scheduler.prefill_done("r", cached_tokens=400)
    scheduler.first_token("r")
    scheduler.finish("r", output_tokens=10)
    assert scheduler.tenant_seconds()["t"] == pytest.approx(booked - 0.4)
    scheduler.schedule_pair(prompt(1), request_id="s", tenant="u")
    scheduler.cancel("s")
    assert scheduler.tenant_seconds()["u"] == 0.0
    scheduler.check()


def test_a_queue_in_front_lets_pairs_wait_for_who_prefills() -> None:
    scheduler, clock = fleet({"p": "prefill", "d": "decode"})
    sent: list[PairDecision] = []
    queue = AdmissionQueue(
        scheduler, lambda _, found: sent.append(found), print, config=FlowConfig(hold_seconds=0.7), pairs=True
    )
    for n in range(5):
        queue.offer(prompt(n), request_id=n, tenant="t", max_new_tokens=5)
        queue.check()
    assert [one.request_id for one in sent] == [0, 1], "who decodes has nothing to do, and makes no room"
    clock.advance(0.5)
    assert queue.prefill_done(0, cached_tokens=0)
    queue.check()
    assert [one.request_id for one in sent] == [0, 1, 2] and {one.prefill_worker for one in sent} == {"p"}
    assert queue.finish(0, output_tokens=5) and len(queue) == 2
    queue.check()


def test_a_queue_without_pairs_waits_for_those_that_do_both() -> None:
    scheduler, _ = fleet({"p": "prefill", "b": "both"})
    sent: list[Any] = []
    queue = AdmissionQueue(scheduler, lambda name, _: sent.append(name), print, config=FlowConfig(hold_seconds=0.7))
    for n in range(4):
        queue.offer(prompt(n), request_id=n, tenant="t")
    assert sent == [0, 1] and len(queue) == 2, "one that gets nothing is not free"


# --- other routers' requests ------------------------------------------------------------------------------------------


def test_another_router_s_request_has_no_prefill_where_it_is_decoded() -> None:
    scheduler, clock = fleet({"p": "prefill", "b": "both", "d": "decode"})
    for name in ("p", "b", "d"):
        scheduler.apply(name, [RequestPlaced("A", "r", prompt(0), None, 1 if name == "p" else 40)])
        scheduler.check()
    assert [waiting_seconds(scheduler, name) for name in ("p", "b", "d")] == pytest.approx([0.5, 0.5, 0.0])
    assert live(scheduler) == {"p": 1, "b": 1, "d": 1}
    clock.advance(0.5)
    scheduler.apply("d", [RequestPrefilled("A", "r", 499)])
    clock.advance(0.5)
    scheduler.apply("d", [RequestEnded("A", "r", 40)])
    scheduler.apply("p", [RequestPrefilled("A", "r", 0), RequestEnded("A", "r", 1)])
    assert live(scheduler) == {"p": 0, "b": 1, "d": 0}
    scheduler.check()
    # An answer of 40 tokens was seen, and none of one: that was the prefill's.
    found = scheduler.schedule_pair(prompt(5), request_id="s")
    assert found.prefill_worker is not None
    assert scheduler.core.lease("s")["expected_output_tokens"] == 40


def test_the_halves_of_another_router_s_pair_are_known_on_workers_that_do_both() -> None:
    """A half that a worker with both roles prefilled was a request for one token, whose end taught an answer of one;
    one that it decoded was booked with all of its prompt."""
    scheduler, clock = fleet({"p": "prefill", "b": "both", "c": "both"})
    scheduler.apply("b", [RequestPlaced("A", "r", prompt(0), None, 1, half="prefill")])
    scheduler.apply("c", [RequestPlaced("A", "r", prompt(0), None, 40, half="decode")])
    scheduler.check()
    assert [waiting_seconds(scheduler, name) for name in ("b", "c")] == pytest.approx([0.5, 0.0])
    clock.advance(0.5)
    scheduler.apply("b", [RequestPrefilled("A", "r", 0), RequestEnded("A", "r", 1)])
    scheduler.apply("c", [RequestPrefilled("A", "r", 499)])
    clock.advance(0.5)
    scheduler.apply("c", [RequestEnded("A", "r", 40)])
    assert live(scheduler) == {"p": 0, "b": 0, "c": 0}
    scheduler.check()
    accounts = scheduler.stats()["workers"]
    assert [accounts[name]["mean_output_tokens"] for name in ("b", "c")] == [0.0, 40.0]


def test_a_decode_half_makes_no_prefill_for_its_prefix_group() -> None:
    """Regression: the group kept the prefill that its worker's window had given up."""
    scheduler, clock = fleet({"p": "prefill", "b": "both"})
    scheduler.core.groups.start()
    first = scheduler.schedule(prompt(0))
    scheduler.first_token(first.request_id)
    before = scheduler.stats()["workers"]["b"]["window_prefill_seconds"]
    scheduler.apply("b", [RequestPlaced("A", "r", [*prompt(0), *prompt(1, 200)], None, 40, half="decode")])
    (share,) = scheduler.core.groups.show()
    requests, prefill_ns, output_tokens, *_ = share["now"]
    assert (requests, prefill_ns, output_tokens) == (1, 0, 40)
    assert scheduler.stats()["workers"]["b"]["window_prefill_seconds"] == before
    scheduler.apply("b", [RequestEnded("A", "r")])
    assert scheduler.core.groups.show()[0]["now"][:3] == (0, 0, 0)
    scheduler.check()


@pytest.mark.parametrize("end", ["cancelled", "lost"])
@pytest.mark.parametrize("half", ["prefill", "decode"])
def test_a_half_of_another_router_s_that_ends_without_a_result_leaves_nothing(half: Any, end: str) -> None:
    scheduler, _ = fleet({"p": "prefill", "b": "both"})
    scheduler.apply("b", [RequestPlaced("A", "r", prompt(0), None, 1, half=half)])
    if end == "cancelled":
        scheduler.apply("b", [RequestEnded("A", "r")])
    else:
        scheduler.remove_worker("b")
    scheduler.check()
    assert scheduler.stats()["live_requests"] == 0


# --- samples of a set -------------------------------------------------------------------------------------------------


def test_a_set_stays_whole_where_somebody_does_both() -> None:
    scheduler, _ = fleet({"p": "prefill", "b": "both", "d": "decode"})
    for n in range(3):  # so that a pair is cheaper than b
        scheduler.schedule(prompt(n))
    assert scheduler.schedule_pair(prompt(9)).prefill_worker == "p"
    for _ in range(4):
        found = scheduler.schedule_pair(prompt(10), group="set", tenant="t")
        assert (found.worker, found.prefill_worker, found.reason) == ("b", None, "group")
    assert scheduler.schedule_pair(prompt(11), group="set", exclude=["b"]).prefill_worker == "p", "b is not to be had"
    with pytest.raises(InvalidInput, match="group must be hashable"):
        scheduler.schedule_pair(prompt(10), group=[])  # type: ignore[arg-type]
    scheduler.check()


def test_where_nobody_does_both_a_set_s_prompt_is_computed_and_moved_once_until_another_place_is_cheaper() -> None:
    roles = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
    scheduler, _ = fleet(roles)
    found = [scheduler.schedule_pair(prompt(0, 2000), group="set", max_new_tokens=500) for _ in range(48)]
    first, last = found[:5], found[-1]
    assert {(one.prefill_worker, one.worker) for one in first} == {("p0", "d0")}
    assert [one.matched_tokens for one in first] == [0] + 4 * [1999] and first[0].moved_tokens == 2000
    assert last.worker == "d1", "d0 has much to decode"
    assert sum(one.moved_tokens > 16 for one in found) == 2, "the KV goes to either once"
    scheduler.check()


def test_where_all_do_both_a_group_is_schedule_s() -> None:
    scheduler, _ = fleet({"a": "both", "b": "both"})
    assert scheduler.schedule_pair(prompt(0), group="set").reason == "group"
