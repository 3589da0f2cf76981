"""Threads on one scheduler and on the trees alone, at small size. Owns sizes and seeds; `stress/threads.py` owns the
traffic and what must hold, and is what ThreadSanitizer runs at full size (`make tsan`)."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from preble import Decision, GlobalScheduler, ManualClock, Policy
from preble.errors import NoWorkers
from preble.policies.base import RequestView, WorkersView
from preble.scheduling import peer_bookings
from tests.stress.threads import run_together, stress_scheduler, stress_slots, stress_tree

OPERATIONS = 600  # of each thread
WITH_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()
claims_first = pytest.mark.skipif(not WITH_GIL, reason="without a GIL a request is claimed under the writers' lock")


@pytest.fixture(params=[5e-3, 1e-6], ids=["usual-switches", "endless-switches"], autouse=True)
def switch_interval(request: pytest.FixtureRequest) -> Iterator[None]:
    """How long a thread may keep the GIL: as usual, and so short that it changes hands wherever it can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(request.param)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.parametrize("policy", ["e2", "least_loaded", "longest_prefix"])
def test_threads_on_one_scheduler_leave_the_bookings_right(policy: str) -> None:
    stats = stress_scheduler(OPERATIONS, seed=3, policy=policy)
    assert stats["scheduled"] >= OPERATIONS, "two writers, each of whose turns opens a request more often than not"
    assert stats["events"] > 0 and stats["late_calls"] > 0


@pytest.mark.parametrize("policy", ["e2", "kv_cost"])
def test_threads_whose_ids_and_namespaces_are_objects_leave_the_bookings_right(policy: str) -> None:
    stats = stress_scheduler(OPERATIONS // 3, seed=6, policy=policy, objects=True)
    assert stats["scheduled"] >= OPERATIONS // 3 and stats["tree"]["namespaces"] <= 3


def test_threads_on_a_restored_scheduler_leave_the_bookings_right() -> None:
    stats = stress_scheduler(OPERATIONS // 2, seed=7, restored=True)
    assert stats["scheduled"] >= OPERATIONS and stats["late_calls"] > 0


def test_threads_on_one_tree_see_nothing_that_was_never_stored() -> None:
    stats = stress_tree(OPERATIONS, seed=4)
    assert stats["nodes"] > 50 and stats["namespaces"] == 3


def test_threads_on_one_slot_tree_lose_no_slot() -> None:
    stats = stress_slots(OPERATIONS, seed=5)
    assert stats["short"] < 3 * OPERATIONS, "some were stored; what is left of them, the last eviction decides"


def test_a_failure_in_a_thread_is_not_lost_and_stops_the_others() -> None:
    """Else no stress could fail."""
    go_on = threading.Event()

    def fail(rng: random.Random, step: int) -> None:
        raise AssertionError("seen")

    def wait(rng: random.Random, step: int) -> None:
        done.append(step)
        go_on.wait(0.001)

    done: list[int] = []
    with pytest.raises(AssertionError, match="seen"):
        run_together([(fail, 1), (wait, 1_000_000)], seed=0)
    assert len(done) < 1_000_000


@claims_first
def test_a_worker_removed_between_the_booking_and_the_answer_is_not_answered() -> None:
    """Regression: the answer was a Decision whose worker is None, and the request was among nobody's orphans."""
    sched = GlobalScheduler(["stays", "goes"], clock=ManualClock())
    sched.cancel(sched.schedule([1, 2, 3], request_id="first", exclude=["stays"]).request_id)
    decisions: list[Decision] = []
    sys.setswitchinterval(1000.0)  # this thread keeps Python's lock until it waits
    other = threading.Thread(target=lambda: decisions.append(sched.schedule([1, 2, 3], request_id="asked")))
    sched.drain_worker("stays")
    with sched._lock:
        other.start()
        while "asked" not in sched.core.leases:
            time.sleep(0.001)
    while not sched.core.loads.live:  # the other thread books it without Python's lock
        pass
    sched.add_worker("new")
    orphans = sched.remove_worker("goes")
    other.join()
    assert [decision.worker for decision in decisions] == ["new"] or orphans == ["asked"]
    sched.check()


def while_left_out(sched: GlobalScheduler, excluded: list[str], question: Callable[[], Any]) -> Any:
    """What a thread receives that asks while another one's decision leaves workers out."""
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(question())
        except NoWorkers as error:
            answers.append(error)

    other = threading.Thread(target=ask)
    with sched._lock:
        left_out = sched.core.leave_out(excluded)
        other.start()
        other.join(0.05)
        sched.core.take_back(left_out)
    other.join()
    return answers[0]


def test_workers_left_out_of_one_decision_are_there_for_all_others() -> None:
    """Regression: a decision that excluded all workers made another thread's request fail with NoWorkers, and an
    explanation left out whom another thread's decision excluded."""
    sched = GlobalScheduler(["a", "b"], clock=ManualClock())
    holder = sched.schedule(list(range(100))).worker
    for excluded in ([holder], ["a", "b"]):
        assert while_left_out(sched, excluded, lambda: sched.schedule([7]).worker) in ("a", "b")
        told = while_left_out(sched, excluded, lambda: sched.explain(list(range(100))))
        assert told.worker == holder and len(told.workers) == 2
    assert not sched.core.left_out
    sched.check()


@claims_first
def test_a_worker_that_comes_just_after_nobody_was_eligible_is_too_late() -> None:
    """Regression: the refusal looked again, found the newcomer, and went on with a choice that had not been made."""
    sched = GlobalScheduler(["goes"], clock=ManualClock())
    sched.schedule([9], request_id="first")
    answers: list[object] = []

    def ask() -> None:
        try:
            answers.append(sched.schedule([1, 2, 3], request_id="asked").worker)
        except NoWorkers as error:
            answers.append(error)

    sys.setswitchinterval(1000.0)  # this thread keeps Python's lock until it waits
    other = threading.Thread(target=ask)
    with sched._lock:
        other.start()
        while "asked" not in sched.core.leases:
            time.sleep(0.001)
        time.sleep(0.01)  # the other thread waits for the lock by now
        sched.drain_worker("goes")
    for _ in range(1_000_000):  # it decides meanwhile, without Python's lock
        pass
    sched.add_worker("new")
    other.join()
    assert answers == ["new"] or isinstance(answers[0], NoWorkers)
    assert sched.stats()["live_requests"] == 1 + (answers == ["new"])
    sched.check()


@claims_first
def test_requests_may_come_while_statistics_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: RuntimeError, since a request that waits for the lock is among the live ones already."""
    sched = GlobalScheduler(["a"], clock=ManualClock())
    for number in range(3):
        sched.schedule([1, 2, 3], request_id=number)
    others: list[threading.Thread] = []

    def let_one_come(request_id: object) -> bool:
        number = 10 + len(others)
        others.append(threading.Thread(target=lambda: sched.schedule([4, 5, 6], request_id=number)))
        others[-1].start()
        while number not in sched.core.leases:
            time.sleep(0.001)
        return False

    monkeypatch.setattr(peer_bookings, "is_peer", let_one_come)
    assert sched.stats()["peer_bookings"] == 0
    for other in others:
        other.join()
    assert len(others) == 3 and sched.stats()["live_requests"] == 6


def test_a_policy_is_asked_for_an_explanation_with_the_bookings_held_still() -> None:
    """Regression: the scores shown were of rows that another thread's decision had filled meanwhile."""
    others: list[threading.Thread] = []

    class RecordingScheduler(Policy):
        name = reason = "watched"

        def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
            other = threading.Thread(target=lambda: sched.finish(first))
            other.start()
            other.join(0.02)
            assert other.is_alive(), "a request ended while the policy looked at the bookings"
            others.append(other)
            return [0.0] * len(workers)

    sched = GlobalScheduler(["a", "b"], policy="least_loaded", clock=ManualClock())
    first = sched.schedule([1, 2, 3]).request_id
    sched._policy = RecordingScheduler()
    assert sched.explain([1, 2, 3]).worker == "b", "fewer live requests, as the scores are alike"
    for other in others:
        other.join()
    assert len(others) == 2, "once to choose, once to show"
