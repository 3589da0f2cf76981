"""What a scheduler's calls take in place of a request's id, and what they say to arguments of a wrong type: a typed
error that names the argument, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from preble import Decision, GlobalScheduler, Lease, ManualClock, SchedulerConfig, SessionHint
from preble.errors import DuplicateRequest, InvalidInput, InvalidTokens, PrebleError
from preble.scheduling.pulls.link_times import Transfer

PROMPT = list(range(200))
Named = Callable[[GlobalScheduler], Any]  # a request that is booked, by what names it


def made(**options: Any) -> GlobalScheduler:
    return GlobalScheduler(["a", "b"], clock=ManualClock(), **options)


def by_id(scheduler: GlobalScheduler) -> object:
    return scheduler.schedule(PROMPT).request_id


def by_decision(scheduler: GlobalScheduler) -> Decision:
    return scheduler.schedule(PROMPT)


def by_many(scheduler: GlobalScheduler) -> Decision:
    return scheduler.schedule_many([PROMPT])[0]


def by_lease(scheduler: GlobalScheduler) -> Lease:
    return scheduler.lease(PROMPT).__enter__()


WAYS = pytest.mark.parametrize("named", [by_id, by_decision, by_many, by_lease])


# --- a request's id, or what stands for it ----------------------------------------------------------------------------


def test_a_finished_decision_leaves_no_booking() -> None:
    """Regression: `finish(decision)` returned False, and the booking stayed until its time to live was over."""
    scheduler = made()
    assert scheduler.finish(scheduler.schedule(PROMPT), output_tokens=5)
    stats = scheduler.stats()
    assert (stats["live_requests"], stats["finished"], stats["late_calls"]) == (0, 1, 0)
    assert stats["workers"]["a"]["live_requests"] == stats["workers"]["b"]["live_requests"] == 0


@WAYS
def test_every_call_about_a_request_takes_what_names_it(named: Named) -> None:
    scheduler = made()
    request = named(scheduler)
    assert scheduler.booked_seconds(request) > 0.0
    assert scheduler.first_token(request, cached_tokens=0)
    assert scheduler.renew(request)
    scheduler.note_session(request, SessionHint("a-session"))
    worker = scheduler.schedule(PROMPT, request_id="other").worker
    assert scheduler.reconcile(worker, [request, "other"], grace_seconds=0.0).given_back == ()
    assert scheduler.finish(request, output_tokens=3)
    assert not scheduler.finish(request)
    assert scheduler.stats()["live_requests"] == 1
    scheduler.check()


@WAYS
def test_a_cancelled_request_gives_its_booking_back_whatever_names_it(named: Named) -> None:
    scheduler = made()
    assert scheduler.cancel(named(scheduler))
    assert scheduler.stats()["live_requests"] == 0
    scheduler.check()


@pytest.mark.parametrize("policy", ["e2", "round_robin"])
def test_a_decision_as_a_new_request_s_id_stands_for_its_id(policy: str) -> None:
    scheduler = made(policy=policy)
    first = scheduler.schedule(PROMPT)
    with pytest.raises(DuplicateRequest, match="request-0"):
        scheduler.schedule(PROMPT, request_id=first)
    with pytest.raises(DuplicateRequest, match="request-0"):
        scheduler.schedule_many([PROMPT], request_ids=[first])
    scheduler.cancel(first)
    assert scheduler.schedule(PROMPT, request_id=first).request_id == "request-0"
    scheduler.cancel("request-0")
    assert scheduler.schedule_many([PROMPT], request_ids=[first])[0].request_id == "request-0"
    assert scheduler.explain(PROMPT, request_id=first).worker


def test_a_lease_whose_block_was_not_entered_names_no_request() -> None:
    scheduler = made()
    lease = scheduler.lease(PROMPT)
    with pytest.raises(InvalidInput, match="nothing is booked"):
        scheduler.finish(lease)
    assert scheduler.stats()["late_calls"] == 0


def test_a_lease_that_the_scheduler_was_asked_to_finish_is_over() -> None:
    scheduler = made()
    with scheduler.lease(PROMPT) as lease:
        assert scheduler.finish(lease, output_tokens=2)
        assert not lease.live
    assert scheduler.stats()["finished"] == 1 and scheduler.stats()["cancelled"] == 0


# --- arguments of a wrong type ----------------------------------------------------------------------------------------

NO_TOKENS = [None, 1.5, "text", b"bytes", bytearray(8), ["a"], [1.5], [True], [None], [], (), range(3), object()]
NO_TOKENS += [np.zeros(3), np.zeros((2, 2), np.int32), np.zeros(3, np.int16), memoryview(b"abcd"), {"a": 1}, iter([1])]
NO_COUNT = [1.5, "3", True, -1, None, b"", [1], float("nan")]
NO_ID: list[Any] = [None, [], {}, {1}]
NO_TIME = [None, "1", True, -1.0, float("nan"), float("inf")]
CAME = Transfer(10, 10, 80, 0.5, 0.0, 0.0)

Call = Callable[[GlobalScheduler], Any]
WRONG: dict[str, Call] = {
    **{f"schedule {x!r:.12}": lambda s, x=x: s.schedule(x) for x in NO_TOKENS},
    **{f"schedule_many {x!r:.12}": lambda s, x=x: s.schedule_many([PROMPT, x]) for x in NO_TOKENS},
    **{f"match {x!r:.12}": lambda s, x=x: s.match(x) for x in NO_TOKENS},
    **{f"explain {x!r:.12}": lambda s, x=x: s.explain(x) for x in NO_TOKENS},
    **{f"lease {x!r:.12}": lambda s, x=x: s.lease(x).__enter__() for x in NO_TOKENS},
    **{f"limit {x!r}": lambda s, x=x: s.schedule(PROMPT, max_new_tokens=x) for x in NO_COUNT if x is not None},
    **{f"id {x!r}": lambda s, x=x: s.schedule(PROMPT, request_id=x) for x in NO_ID if x is not None},
    **{f"group {x!r}": lambda s, x=x: s.schedule(PROMPT, group=x) for x in NO_ID if x is not None},
    **{f"namespace {x!r}": lambda s, x=x: s.schedule(PROMPT, namespace=x) for x in NO_ID if x is not None},
    **{f"exclude {x!r}": lambda s, x=x: s.schedule(PROMPT, exclude=x) for x in (None, "a", 3, ["c"], [None])},
    **{f"session {x!r}": lambda s, x=x: s.schedule(PROMPT, session=x) for x in ("s", 3, ["s"])},
    **{f"prompts {x!r}": lambda s, x=x: s.schedule_many(x) for x in (None, 3, "ab", PROMPT)},
    **{f"request_ids {x!r}": lambda s, x=x: s.schedule_many([PROMPT], request_ids=x) for x in (3, "x", [[]], [])},
    **{f"groups {x!r}": lambda s, x=x: s.schedule_many([PROMPT], groups=x) for x in (3, "x", [[]], [])},
    **{f"first_token {x!r}": lambda s, x=x: s.first_token(x) for x in NO_ID},
    **{f"finish {x!r}": lambda s, x=x: s.finish(x) for x in NO_ID},
    **{f"cancel {x!r}": lambda s, x=x: s.cancel(x) for x in NO_ID},
    **{f"renew {x!r}": lambda s, x=x: s.renew(x) for x in NO_ID},
    **{f"booked_seconds {x!r}": lambda s, x=x: s.booked_seconds(x) for x in NO_ID},
    **{f"note_session {x!r}": lambda s, x=x: s.note_session(x, SessionHint("s")) for x in NO_ID},
    **{f"note_session of {x!r}": lambda s, x=x: s.note_session("live", x) for x in (None, "s", 3)},
    **{f"cached {x!r}": lambda s, x=x: s.first_token("live", cached_tokens=x) for x in NO_COUNT if x is not None},
    **{f"output {x!r}": lambda s, x=x: s.finish("live", output_tokens=x) for x in NO_COUNT if x is not None},
    **{f"more cached {x!r}": lambda s, x=x: s.finish("live", cached_tokens=x) for x in (*NO_COUNT[:3], 201)},
    **{f"reconcile {x!r}": lambda s, x=x: s.reconcile("a", x) for x in (None, 3, "live", [None], [[]])},
    **{f"grace {x!r}": lambda s, x=x: s.reconcile("a", [], grace_seconds=x) for x in (None, "1", -1, True, 1e300)},
    **{f"pull_for {x!r}": lambda s, x=x: s.pull_for(x, PROMPT) for x in NO_ID},
    **{f"pull_ended {x!r}": lambda s, x=x: s.pull_ended(x, 0, "b", CAME) for x in NO_ID},
    **{f"pull's cached {x!r}": lambda s, x=x: s.pull_ended("live", x, "b", CAME) for x in NO_COUNT},
    **{f"transfer {x!r}": lambda s, x=x: s.pull_ended("live", 0, "b", x) for x in (3, (1, 2), CAME[:3])},
    **{f"its seconds {x!r}": lambda s, x=x: s.pull_ended("live", 0, "b", CAME._replace(seconds=x)) for x in NO_TIME},
    **{f"can_move_kv {x!r}": lambda s, x=x: s.can_move_kv(x, "torch", 8) for x in (None, 3, "c", ["a"])},
    **{f"layout {x!r}": lambda s, x=x: s.can_move_kv("a", x, 8) for x in (None, 3, b"torch")},
    **{f"token_bytes {x!r}": lambda s, x=x: s.can_move_kv("a", "torch", x) for x in (*NO_COUNT, 0)},
    **{f"prefill_done {x!r}": lambda s, x=x: s.prefill_done(x) for x in NO_ID},
    **{f"pair without {x!r}": lambda s, x=x: s.schedule_pair(PROMPT, exclude=x) for x in (None, 3, "a", ["c"])},
    **{f"pair's limit {x!r}": lambda s, x=x: s.schedule_pair(PROMPT, max_new_tokens=x) for x in (0, "1", True)},
    **{f"running {x!r}": lambda s, x=x: s.reconcile_counts("a", running=x, waiting=0) for x in NO_COUNT},
    **{f"waiting {x!r}": lambda s, x=x: s.reconcile_counts("a", running=0, waiting=x) for x in NO_COUNT},
    **{f"prefill_seconds {x!r}": lambda s, x=x: s.prefill_seconds("a", x, 0) for x in NO_COUNT},
    **{f"service_seconds {x!r}": lambda s, x=x: s.service_seconds("a", 5, 0, x) for x in NO_COUNT},
    **{f"add_worker {x!r}": lambda s, x=x: s.add_worker(x) for x in (None, 3, "", ["c"], b"c")},
    **{f"drain_worker {x!r}": lambda s, x=x: s.drain_worker(x) for x in (None, 3, "c", ["a"])},
    **{f"handover {x!r}": lambda s, x=x: s.drain_worker("a", handover_seconds=x) for x in (None, "1", -1, True)},
    **{f"remove_worker {x!r}": lambda s, x=x: s.remove_worker(x) for x in (None, 3, "c", ["a"])},
    **{f"clear_worker {x!r}": lambda s, x=x: s.clear_worker(x) for x in (None, 3, "c", ["a"])},
    **{f"forget_peer_bookings {x!r}": lambda s, x=x: s.forget_peer_bookings(x) for x in (None, 3, "c", ["a"])},
    **{f"apply {x!r}": lambda s, x=x: s.apply("a", x) for x in (None, 3, "e", [None], ["e"], [{}])},
    **{f"apply_raw {x!r}": lambda s, x=x: s.apply_raw("a", x) for x in (None, 3, "e", [], b"", b"\xc1")},
    **{f"tick {x!r}": lambda s, x=x: s.tick(x) for x in ("1", True, float("nan"), [])},
    **{f"restore {x!r}": lambda s, x=x: s.restore(x) for x in (None, 3, "snapshot", b"", [])},
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_argument_is_a_typed_error_and_changes_nothing(what: str) -> None:
    scheduler = made(config=SchedulerConfig(calibrate=False))
    scheduler.schedule(PROMPT, request_id="live")
    stats, before = scheduler.stats(), scheduler.snapshot()
    with pytest.raises(PrebleError):
        WRONG[what](scheduler)
    assert scheduler.stats() == stats
    if not what.startswith("apply ["):  # whose first events might have been right: the caches count as reported
        assert scheduler.snapshot() == before
    scheduler.check()


@pytest.mark.parametrize("name", [None, 3, ["a"]])
def test_the_seconds_of_a_worker_that_is_none_are_none(name: Any) -> None:
    assert made().prefill_seconds(name, 100, 0) == made().service_seconds(name, 100, 0, 5) == 0.0


def test_what_is_wrong_with_tokens_is_said_as_such() -> None:
    with pytest.raises(InvalidTokens, match="str"):
        made().schedule("a text")  # type: ignore[arg-type]
