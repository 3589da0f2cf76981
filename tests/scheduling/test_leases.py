"""Leases: the block ends the booking whatever happens in it, time and engines end the others, and no late call touches
a booking that is not its own. Random histories are in `test_leases_machine.py` and `test_leases_histories.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from preble import Decision, GlobalScheduler, ManualClock, SchedulerConfig
from preble.errors import (
    DuplicateRequest,
    InvalidConfig,
    InvalidInput,
    InvalidTokens,
    NoWorkers,
    QueueFull,
    UnknownWorker,
)
from preble.scheduling.leases import Lease, Reconciliation
from preble.types import RequestEnded, RequestPlaced

PROMPT = list(range(100, 140))


def scheduler(*names: str, **more: Any) -> GlobalScheduler:
    config = SchedulerConfig(**{key: more.pop(key) for key in list(more) if key in SchedulerConfig.__slots__})
    return GlobalScheduler(names or ("a", "b", "c"), clock=ManualClock(100.0), config=config, **more)


def nothing_is_booked(sched: GlobalScheduler) -> None:
    """Every book that a live request stands in is at zero."""
    stats = sched.stats()
    assert stats["live_requests"] == 0 and not sched.core.leases
    for name, worker in stats["workers"].items():
        held = [worker[key] for key in ("live_requests", "waiting_requests", "live_output_tokens")]
        assert (held, worker["waiting_prefill_seconds"]) == ([0, 0, 0], 0.0), name
    sched.check()


# --- the block --------------------------------------------------------------------------------------------------------


def test_a_lease_books_when_it_is_entered_and_not_before() -> None:
    sched = scheduler()
    lease = sched.lease(PROMPT, request_id="mine", max_new_tokens=7, explain=True)
    nothing_is_booked(sched)
    with lease as entered:
        assert entered is lease and isinstance(lease.decision, Decision)
        assert (lease.request_id, lease.worker) == ("mine", lease.decision.worker)
        assert lease.live and sched.stats()["live_requests"] == 1
        assert sched.stats()["workers"][lease.worker]["live_output_tokens"] == 7
        assert set(lease.decision.costs) == {"a", "b", "c"}
    nothing_is_booked(sched)


def test_leaving_without_finish_cancels() -> None:
    sched = scheduler()
    with sched.lease(PROMPT):
        pass
    assert (sched.stats()["cancelled"], sched.stats()["finished"], sched.stats()["late_calls"]) == (1, 0, 0)
    assert sched.match(PROMPT).matched_tokens == {}, "nobody computed it"
    nothing_is_booked(sched)


def test_an_error_in_the_block_cancels_and_goes_on() -> None:
    sched = scheduler()
    with pytest.raises(KeyError, match="mine"), sched.lease(PROMPT) as lease:
        assert lease.first_token(cached_tokens=0)
        raise KeyError("mine")
    assert sched.stats()["cancelled"] == 1
    nothing_is_booked(sched)


def test_leaving_after_finish_does_nothing_even_when_it_fails() -> None:
    sched = scheduler()
    with pytest.raises(KeyError), sched.lease(PROMPT) as lease:
        assert lease.finish(output_tokens=5, cached_tokens=0)
        raise KeyError
    assert (sched.stats()["finished"], sched.stats()["cancelled"], sched.stats()["late_calls"]) == (1, 0, 0)
    assert sched.stats()["workers"][lease.worker]["mean_output_tokens"] == 5.0
    nothing_is_booked(sched)


def test_a_booking_ended_by_its_id_is_over_for_its_lease_too() -> None:
    sched = scheduler()
    with sched.lease(PROMPT) as lease:
        assert sched.finish(lease.request_id)
        assert not lease.live
    assert (sched.stats()["finished"], sched.stats()["cancelled"], sched.stats()["late_calls"]) == (1, 0, 0)


def test_the_second_end_of_whatever_kind_is_late_and_changes_nothing() -> None:
    for first in ("finish", "cancel"):
        sched = scheduler()
        with sched.lease(PROMPT) as lease:
            assert getattr(lease, first)()
            for again in (lease.finish, lease.cancel, lease.first_token, lease.renew):
                assert again() is False
        assert lease.finish() is False
        assert sched.stats()["late_calls"] == 5
        nothing_is_booked(sched)


def test_a_lease_is_entered_once() -> None:
    sched = scheduler()
    with sched.lease(PROMPT) as lease:
        with pytest.raises(InvalidInput, match="entered once"), lease:
            raise AssertionError("entered twice")
        assert lease.live, "the failed second entry ended nothing"
    with pytest.raises(InvalidInput, match="entered once"), lease:
        raise AssertionError("entered after it was left")
    nothing_is_booked(sched)


def test_nothing_can_be_reported_before_the_block() -> None:
    sched = scheduler()
    lease = sched.lease(PROMPT)
    calls: list[Callable[[], Any]] = [lease.first_token, lease.finish, lease.cancel, lease.renew, lease.reroute]
    for call in [*calls, lambda: lease.worker]:
        with pytest.raises(InvalidInput, match="with scheduler.lease"):
            call()
    assert not lease.live
    with lease:
        assert lease.live, "the early calls did no harm"
    nothing_is_booked(sched)


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"token_ids": []}, InvalidTokens),
        ({"max_new_tokens": 0}, InvalidInput),
        ({"namespace": []}, InvalidInput),
        ({"request_id": []}, InvalidInput),
        ({"request_id": "taken"}, DuplicateRequest),
        ({"exclude": ["nobody"]}, UnknownWorker),
        ({"exclude": ["a", "b", "c"]}, NoWorkers),
        ({"exclude": "a"}, InvalidInput),
        ({"exclude": 3}, InvalidInput),
    ],
)
def test_what_cannot_be_booked_raises_what_schedule_raises(asked: dict[str, Any], error: type[Exception]) -> None:
    sched = scheduler()
    sched.schedule([1], request_id="taken")
    before = sched.stats()
    arguments = {"token_ids": PROMPT, **asked}
    with pytest.raises(error), sched.lease(arguments.pop("token_ids"), **arguments):
        raise AssertionError("the block ran")
    assert sched.stats() == before


def test_a_full_scheduler_books_no_lease() -> None:
    sched = scheduler(live_requests_max=1)
    with sched.lease(PROMPT), pytest.raises(QueueFull), sched.lease([1]):
        raise AssertionError("the block ran")
    nothing_is_booked(sched)


def test_bad_numbers_end_nothing() -> None:
    sched = scheduler()
    with sched.lease(PROMPT) as lease:
        with pytest.raises(InvalidInput, match="output_tokens"):
            lease.finish(output_tokens=-1)
        with pytest.raises(InvalidInput, match="cached_tokens"):
            lease.finish(cached_tokens=1000)
        assert lease.live
        assert lease.finish()


def test_a_worker_that_dies_under_a_lease_leaves_nothing_behind() -> None:
    for ending in ("finish", "cancel", "leave"):
        sched = scheduler("a")
        with sched.lease(PROMPT, request_id="mine") as lease:
            assert sched.remove_worker("a") == ["mine"]
            sched.add_worker("a")
            assert lease.live and lease.first_token() and lease.renew()
            assert ending == "leave" or getattr(lease, ending)()
        nothing_is_booked(sched)


# --- reroute ----------------------------------------------------------------------------------------------------------


def test_reroute_goes_to_workers_that_have_not_failed_it_and_keeps_the_id() -> None:
    sched = scheduler("a", "b", "c")
    with sched.lease(PROMPT, request_id="mine", exclude=["c"]) as lease:
        first = lease.decision
        second = lease.reroute()
        assert {first.worker, second.worker} == {"a", "b"} and lease.decision is second
        assert second.request_id == "mine" and sched.stats()["live_requests"] == 1
        with pytest.raises(NoWorkers):
            lease.reroute()
        assert not lease.live and sched.stats()["live_requests"] == 0
        sched.add_worker("d")
        assert lease.reroute().worker == "d", "it may be tried again"
        assert lease.finish(output_tokens=3)
    nothing_is_booked(sched)


def test_reroute_forgets_workers_that_have_left() -> None:
    """A worker that failed and came back under the same name is avoided; one that has gone is no error."""
    sched = scheduler("a", "b")
    with sched.lease(PROMPT, exclude=["b"]) as lease:
        sched.remove_worker("a")
        sched.remove_worker("b")
        sched.add_worker("b")
        sched.add_worker("c")
        assert lease.reroute(exclude=[]).worker == "c"
        sched.add_worker("a")
        assert lease.reroute().worker == "a", "this a is another one"
    nothing_is_booked(sched)


def test_reroute_refuses_bad_input_before_anything_changes() -> None:
    sched = scheduler()
    with sched.lease(PROMPT) as lease:
        before = sched.stats()
        for bad, error in (("a", InvalidInput), (7, InvalidInput), (["x"], UnknownWorker), ([[]], UnknownWorker),
                           ([None], UnknownWorker)):  # fmt: skip
            with pytest.raises(error):
                lease.reroute(exclude=bad)
        sched.remove_worker("c")
        with pytest.raises(UnknownWorker):
            lease.reroute(exclude=[None])
        sched.add_worker("c")
        assert lease.live and sched.stats()["scheduled"] == before["scheduled"]
        lease.finish()
        with pytest.raises(InvalidInput, match="over"):
            lease.reroute()
    with pytest.raises(InvalidInput, match="over"):
        lease.reroute()
    nothing_is_booked(sched)


def test_reroute_books_an_expired_lease_anew() -> None:
    sched = scheduler(lease_seconds=60.0)
    with sched.lease(PROMPT) as lease:
        sched._clock.advance(61.0)
        sched.tick()
        assert not lease.live
        assert lease.reroute().request_id == lease.request_id and lease.live
    assert (sched.stats()["expired_leases"], sched.stats()["cancelled"]) == (1, 1)
    nothing_is_booked(sched)


# --- time to live -----------------------------------------------------------------------------------------------------


def test_renewing_restarts_the_time_to_live_and_nothing_else_does() -> None:
    sched = scheduler(lease_seconds=60.0)
    with sched.lease(PROMPT) as renewed, sched.lease(PROMPT) as streaming:
        sched._clock.advance(50.0)
        assert renewed.renew() and streaming.first_token()
        sched._clock.advance(11.0)
        sched.tick()
        assert renewed.live and not streaming.live
        sched._clock.advance(49.0)
        sched.tick()
        assert renewed.live, "exactly at the bound it lives"
        sched._clock.advance(0.5)
        sched.tick()
        assert not renewed.live
        assert not renewed.renew() and not sched.renew("nobody")
    assert sched.stats()["expired_leases"] == 2
    nothing_is_booked(sched)


def test_a_renewal_is_never_rounded_down() -> None:
    """It is kept in 4 bytes. After years of renewals a lease may live a little longer, never shorter."""
    sched = scheduler(lease_seconds=0.001)
    with sched.lease(PROMPT) as lease:
        for seconds in (0.1, 33.3, 1e5 / 3, 1e7 / 7, 1e8 / 9):
            sched._clock.advance(seconds)
            assert lease.renew()
            late = sched.core.seen_at(lease.request_id) - sched._clock()
            assert 0.0 <= late <= (sched._clock() - 100.0) * 2**-22 + 1e-9
            sched.tick()
            assert lease.live


def test_a_clock_that_jumps_back_takes_no_life_away() -> None:
    sched = scheduler(lease_seconds=60.0)
    with sched.lease(PROMPT) as lease:
        sched._clock.advance(50.0)
        lease.renew()
        sched._clock.advance(-100.0)
        assert lease.renew()
        sched._clock.set(205.0)
        sched.tick()
        assert lease.live, "renewed at 150, whatever was said at 50"
    with pytest.raises(InvalidInput, match="request_id must be hashable"):
        sched.renew([])


def test_a_lease_leaves_the_next_booking_of_its_id_alone() -> None:
    """It expires, the client asks again under the same id, and then the first handler wakes up."""
    sched = scheduler(lease_seconds=60.0)
    with sched.lease(PROMPT, request_id="chat-7") as slow:
        sched._clock.advance(61.0)
        sched.tick()
        with sched.lease(PROMPT, request_id="chat-7") as retry:
            for call in (slow.first_token, slow.renew, slow.finish, slow.cancel):
                assert call() is False
            assert sched.stats()["late_calls"] == 4
            slow.__exit__(None, None, None)
            assert retry.live and not slow.live
            assert sched.stats()["workers"][retry.worker]["waiting_requests"] == 1
            assert retry.finish(output_tokens=2)
    assert (sched.stats()["finished"], sched.stats()["cancelled"]) == (1, 0)
    nothing_is_booked(sched)


# --- reconciliation ---------------------------------------------------------------------------------------------------


def test_what_the_engine_lacks_is_given_back_after_the_grace() -> None:
    sched = scheduler("a")
    for name in ("old", "kept", "done"):
        sched.schedule(PROMPT, request_id=name)
    sched.first_token("done")
    sched._clock.advance(10.0)
    sched.schedule([1, 2], request_id="young")
    found = sched.reconcile("a", ["kept"], grace_seconds=10.0)
    assert found == Reconciliation((), ()), "exactly at the grace it stays"
    sched._clock.advance(1.0)
    found = sched.reconcile("a", {"kept"}, grace_seconds=10.0)
    assert found == Reconciliation(("old", "done"), ())
    assert (sched.stats()["reconciled_leases"], sched.stats()["cancelled"]) == (2, 0)
    assert not sched.finish("old") and not sched.cancel("done")
    assert sched.reconcile("a", iter(["kept", "young"]), grace_seconds=0.0) == Reconciliation((), ())
    sched._clock.advance(0.5)
    assert sched.reconcile("a", [], grace_seconds=0).given_back == ("kept", "young")
    nothing_is_booked(sched)


def test_what_the_engine_has_is_renewed() -> None:
    """So the grace of a request begins when the engine last had it: its last message may be on its way."""
    sched = scheduler("a", lease_seconds=60.0)
    sched.schedule(PROMPT, request_id="long")
    for _ in range(3):
        sched._clock.advance(50.0)
        assert sched.reconcile("a", ["long"]) == Reconciliation((), ())
        sched.tick()
    sched._clock.advance(4.0)
    assert sched.reconcile("a", []).given_back == ()
    assert sched.finish("long", output_tokens=9), "the report of the end came late, and still teaches its length"
    nothing_is_booked(sched)


def test_requests_the_engine_should_not_have_are_reported_and_counted() -> None:
    sched = scheduler("a", "b")
    sched.schedule([1, 2], request_id="moved", exclude=["a"])
    sched.schedule([3, 4], request_id="here", exclude=["b"])
    found = sched.reconcile("a", ["ghost", "here", "moved", "ghost", 17])
    assert found == Reconciliation((), ("ghost", "moved", 17))
    assert sched.stats()["unknown_requests"] == 3
    sched._clock.advance(7.0)
    assert sched.reconcile("b", ["moved"]) == Reconciliation((), ())
    assert sched.reconcile("a", ["moved"], grace_seconds=6.0) == Reconciliation(("here",), ("moved",))
    assert sched.cancel("moved")
    nothing_is_booked(sched)


def test_bookings_for_other_routers_are_neither_given_back_nor_unknown() -> None:
    """Regression: no caller can name such a booking, so each was given back, and its request reported for abortion."""
    sched = scheduler("w", "v", lease_seconds=60.0)
    sched.schedule(PROMPT, request_id="mine", exclude=["v"])
    sched.schedule([1, 2], request_id="8", exclude=["w"])
    sched.apply("w", [RequestPlaced("router-A", "7", [5, 6]), RequestPlaced("router-A", "8", [7, 8])])
    sched._clock.advance(50.0)
    sched.apply("w", [RequestPlaced("router-A", "9", [9, 9])])
    sched.apply("v", [RequestPlaced("router-A", "10", [3, 3])])
    sched._clock.advance(9.0)
    assert sched.reconcile("w", ["mine", "7", "8", "10"]) == Reconciliation((), ("10",))
    assert sched.stats()["peer_bookings"] == 4 and sched.stats()["reconciled_leases"] == 0
    sched._clock.advance(2.0)
    sched.tick()
    assert sched.stats()["expired_leases"] == 1, "8 of this router, on v; what the engine has is renewed"
    assert sched.stats()["workers"]["w"]["live_requests"] == 4
    sched.apply("w", [RequestEnded("router-A", name, 1) for name in ("7", "8", "9")])
    assert sched.reconcile("w", ["mine", "7"]).unknown == ("7",)
    sched.check()


def test_the_word_of_another_engine_renews_nothing() -> None:
    sched = scheduler("a", "b", lease_seconds=60.0)
    sched.schedule([1, 2], request_id="moved", exclude=["a"])
    sched._clock.advance(50.0)
    assert sched.reconcile("a", ["moved"]).unknown == ("moved",)
    sched._clock.advance(11.0)
    sched.tick()
    assert sched.stats()["expired_leases"] == 1


def test_a_request_of_a_removed_worker_is_neither_lost_nor_unknown() -> None:
    """The network broke, the worker was forgotten and has come back with the request still running."""
    sched = scheduler("a", "b", lease_seconds=60.0)
    sched.schedule([1, 2], request_id="runs", exclude=["b"])
    assert sched.remove_worker("a") == ["runs"]
    sched.add_worker("a")
    sched._clock.advance(50.0)
    assert sched.reconcile("a", ["runs"]) == Reconciliation((), ())
    assert sched.reconcile("b", [], grace_seconds=0.0) == Reconciliation((), ())
    sched._clock.advance(50.0)
    sched.tick()
    assert sched.stats()["live_requests"] == 1, "its engine has renewed it"
    assert sched.finish("runs")
    nothing_is_booked(sched)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"worker_id": "nobody"}, UnknownWorker, "nobody"),
        ({"worker_id": None}, UnknownWorker, "None"),
        ({"live_request_ids": "mine"}, InvalidInput, "live_request_ids"),
        ({"live_request_ids": 4}, InvalidInput, "live_request_ids"),
        ({"live_request_ids": ["mine", []]}, InvalidInput, "live_request_ids must be hashable"),
        ({"grace_seconds": -0.1}, InvalidInput, "grace_seconds"),
        ({"grace_seconds": float("nan")}, InvalidInput, "grace_seconds"),
        ({"grace_seconds": "5"}, InvalidInput, "grace_seconds"),
    ],
)
def test_reconcile_refuses_bad_input_and_changes_nothing(arguments: Any, error: type[Exception], words: str) -> None:
    sched = scheduler("a", "b")
    sched.remove_worker("b")  # a free place among the workers' indices
    sched.schedule(PROMPT, request_id="mine")
    sched._clock.advance(100.0)
    before = sched.stats()
    asked = {"worker_id": "a", "live_request_ids": [], **arguments}
    with pytest.raises(error, match=words):
        sched.reconcile(asked.pop("worker_id"), asked.pop("live_request_ids"), **asked)
    assert sched.stats() == before


def drift(sched: GlobalScheduler) -> tuple[int, float]:
    worker = sched.stats()["workers"]["a"]
    return worker["drift_requests"], worker["drift_seconds"]


def test_counts_alone_show_the_difference_and_end_nothing() -> None:
    sched = scheduler("a")
    assert drift(sched) == (0, 0.0)
    for name in range(3):
        sched.schedule(PROMPT, request_id=name)
    assert sched.reconcile_counts("a", running=2, waiting=1) == 0
    sched._clock.advance(10.0)
    assert sched.reconcile_counts("a", running=1, waiting=0) == -2
    assert drift(sched) == (-2, 0.0), "it may be a message on its way"
    sched._clock.advance(10.0)
    assert sched.reconcile_counts("a", running=2, waiting=0) == -1
    assert drift(sched) == (-1, 10.0), "it lasts"
    sched._clock.advance(5.0)
    assert sched.reconcile_counts("a", running=4, waiting=4) == 5
    assert drift(sched) == (5, 0.0), "the other way round, it is another difference"
    sched._clock.advance(5.0)
    sched.reconcile_counts("a", running=9, waiting=0)
    assert drift(sched) == (6, 5.0)
    sched.reconcile_counts("a", running=3, waiting=0)
    assert drift(sched) == (0, 0.0)
    assert sched.stats()["workers"]["a"]["load_reports"] == 6
    assert sched.stats()["live_requests"] == 3
    sched.remove_worker("a")
    sched.add_worker("a")
    assert drift(sched) == (0, 0.0) and sched.stats()["workers"]["a"]["load_reports"] == 0


def test_counts_that_cannot_be_are_refused() -> None:
    sched = scheduler("a")
    before = sched.stats()
    for bad in ({"running": -1, "waiting": 0}, {"running": 0, "waiting": 1.5}, {"running": True, "waiting": 0}):
        with pytest.raises(InvalidInput, match="running|waiting") as raised:
            sched.reconcile_counts("a", **bad)
        assert not isinstance(raised.value, InvalidConfig)
    with pytest.raises(UnknownWorker):
        sched.reconcile_counts("b", running=0, waiting=0)
    assert sched.stats() == before


# --- asyncio ----------------------------------------------------------------------------------------------------------


class Pause:
    """An await that hands control to whoever drives the coroutine."""

    def __await__(self) -> Any:
        yield


async def serve(sched: GlobalScheduler, log: list[Lease]) -> None:
    """One request with an await between any two calls."""
    await Pause()
    async with sched.lease(PROMPT) as lease:
        log.append(lease)
        await Pause()
        lease.first_token()
        await Pause()
        lease.reroute()
        await Pause()
        lease.renew()
        await Pause()
        lease.finish(output_tokens=2)
        await Pause()
    await Pause()


SERVE_AWAITS = 7


@pytest.mark.parametrize("policy", ["e2", "kv_cost", "e2-paper"])
@pytest.mark.parametrize("awaits", range(SERVE_AWAITS + 1))
@pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit, RuntimeError])
def test_a_cancellation_at_any_await_leaves_nothing(policy: str, awaits: int, error: type[BaseException]) -> None:
    sched, log = scheduler(policy=policy), []
    served = serve(sched, log)
    for _ in range(awaits):
        served.send(None)
    if awaits < SERVE_AWAITS:
        with pytest.raises(error):
            served.throw(error())
    else:
        with pytest.raises(StopIteration):
            served.send(None)
    finished = sched.stats()["finished"]
    assert finished == (awaits > 5) and len(log) == (awaits > 1), "the awaits are where they are thought to be"
    nothing_is_booked(sched)


def test_tasks_cancelled_at_every_turn_of_the_loop_leave_nothing() -> None:
    """Tasks that wait on each other, cancelled one by one after so many turns, some of them twice."""

    async def one(sched: GlobalScheduler, number: int) -> None:
        async with sched.lease([*PROMPT, number]) as lease:
            for _ in range(3):
                await asyncio.sleep(0)
            lease.first_token(cached_tokens=0)
            async for _ in stream(2):
                lease.renew()
            lease.finish(output_tokens=number)

    async def stream(chunks: int) -> AsyncIterator[int]:
        for chunk in range(chunks):
            await asyncio.sleep(0)
            yield chunk

    async def main(turns: int) -> tuple[int, int]:
        sched = scheduler()
        tasks = [asyncio.ensure_future(one(sched, n)) for n in range(6)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        nothing_is_booked(sched)
        stats = sched.stats()
        assert stats["scheduled"] == stats["finished"] + stats["cancelled"]
        return stats["finished"], sum(isinstance(result, asyncio.CancelledError) for result in results)

    ends = [asyncio.run(main(turns)) for turns in range(9)]
    assert all(finished + cancelled == 6 for finished, cancelled in ends)
    assert {cancelled for _, cancelled in ends} >= {0, 3}, "from all in time to all too late"


def test_a_task_cancelled_before_it_starts_books_nothing() -> None:
    async def main() -> GlobalScheduler:
        sched = scheduler()

        async def one() -> None:
            async with sched.lease(PROMPT):
                raise AssertionError("the block ran")

        task = asyncio.ensure_future(one())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return sched

    sched = asyncio.run(main())
    assert sched.stats()["scheduled"] == 0
    nothing_is_booked(sched)
