"""Leases under threads: each booking ends once, in one way, and an id that is booked anew is nobody else's. Owns its
traffic, which is seeded and counted; the naive model is `test_leases_machine.py`'s."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from itertools import count
from typing import Any

import pytest

from preble import GlobalScheduler, SchedulerConfig
from preble.errors import DuplicateRequest, InvalidInput, NoWorkers, QueueFull, UnknownWorker
from preble.scheduling.leases import Lease
from tests.stress.threads import run_together


class Crowd:
    """Threads that hold leases under few ids, among others that end, expire and reconcile them and remove workers."""

    def __init__(self, policy: str, seed: int) -> None:
        ticks = count(1)
        self.seed = seed
        self.sched = GlobalScheduler(
            ["a", "b", "c"],
            policy=policy,
            config=SchedulerConfig(lease_seconds=2.0, live_requests_max=12, history_seconds=36.0),
            clock=lambda: next(ticks) * 0.01,
        )
        self.ids = [f"id-{n}" for n in range(6)]
        self.entered = Counter[str]()
        self.shared: list[Lease] = []

    def hold(self, rng: random.Random, step: int) -> None:
        """A whole block. Others may end the booking at any time, and book its id anew once it has ended."""
        asked = {"request_id": rng.choice([*self.ids, None])}
        try:
            with self.sched.lease([*range(rng.randrange(1, 40)), 99], **asked) as lease:
                self.shared.append(lease)
                for _ in range(rng.randrange(5)):
                    self.act(rng, lease)
                if rng.random() < 0.2:
                    raise KeyError("the engine failed")
        except (DuplicateRequest, NoWorkers, QueueFull) as error:
            self.entered[type(error).__name__] += 1
        except KeyError:
            self.entered["failed"] += 1
        else:
            self.entered["left"] += 1
        del self.shared[:-8]

    def act(self, rng: random.Random, lease: Lease) -> None:
        kind = rng.randrange(6)
        if kind == 0:
            try:
                lease.reroute()
            except InvalidInput:
                self.entered["over"] += 1
        else:
            (lease.first_token, lease.renew, lease.finish, lease.cancel, lease.first_token)[kind - 1]()

    def meddle(self, rng: random.Random, step: int) -> None:
        """Late and doubled calls, by id and through the leases of other threads."""
        one = rng.choice(self.ids)
        rng.choice([self.sched.first_token, self.sched.finish, self.sched.cancel, self.sched.renew])(one)
        for lease in self.shared[-2:]:
            rng.choice([lease.first_token, lease.renew, lease.finish, lease.cancel])()

    def look_after(self, rng: random.Random, step: int) -> None:
        """Ticks, engines that report, workers that come and go."""
        name = rng.choice("abc")
        try:
            if step % 4 == 0:
                self.sched.tick()
            elif step % 4 == 1:
                self.sched.reconcile(name, rng.sample(self.ids, 3), grace_seconds=0.05)
            elif step % 4 == 2:
                self.sched.reconcile_counts(name, running=2, waiting=0)
            elif name in self.sched.workers and len(self.sched.workers) > 1:
                self.sched.remove_worker(name)
            else:
                self.sched.add_worker(name)
        except (UnknownWorker, InvalidInput):
            self.entered["not there"] += 1
        if step % 20 == 0:
            self.sched.check()

    def run(self, operations: int) -> dict[str, Any]:
        run_together(
            [(self.hold, operations)] * 3 + [(self.meddle, operations), (self.look_after, operations)], self.seed
        )
        stats = self.sched.stats()
        ended = ("finished", "cancelled", "expired_leases", "reconciled_leases")
        assert stats["scheduled"] == sum(stats[how] for how in ended), "each booking ended once, in one way"
        assert stats["live_requests"] == 0 and not self.sched.core.leases
        for worker in stats["workers"].values():
            assert (worker["live_requests"], worker["waiting_requests"], worker["live_output_tokens"]) == (0, 0, 0)
            assert worker["waiting_prefill_seconds"] == 0.0
        assert not any(book.get("blocks", 0) for book in stats["policy_state"].values())
        self.sched.check()
        return stats


@pytest.mark.parametrize("interval", [5e-3, 1e-6], ids=["usual-switches", "endless-switches"])
@pytest.mark.parametrize("policy", ["e2", "kv_cost"])
def test_leases_of_many_threads_end_once_each(policy: str, interval: float) -> None:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    try:
        crowd = Crowd(policy, seed=5)
        stats = crowd.run(1500)
    finally:
        sys.setswitchinterval(usual)
    assert stats["scheduled"] > 1500 and stats["finished"] > 100 and stats["late_calls"] > 100


@pytest.mark.parametrize("call", ["first_token", "finish", "cancel", "leave"])
def test_an_id_booked_anew_between_a_look_and_a_call_is_left_alone(call: str) -> None:
    """By schedule: the first lease has seen that it is live, and before it says so another thread ends it and books the
    id anew. The writers' lock makes the other wait; without it the call would be about the second booking."""
    sched = GlobalScheduler(["a"])
    order: list[str] = []

    class RecordingScheduler(Lease):
        __slots__ = ()

        @property
        def live(self) -> bool:
            found = super().live
            if not order:
                order.append("seen")
                other.start()
                other.join(0.05)
            return found

    def rebook() -> None:
        sched.cancel("x")
        sched.schedule([1, 2, 3], request_id="x")
        order.append("booked anew")

    other = threading.Thread(target=rebook)
    lease = RecordingScheduler(sched, [1, 2, 3], (), {"request_id": "x"})
    lease.__enter__()
    if call == "leave":
        lease.__exit__(None, None, None)
    else:
        assert getattr(lease, call)(), "it was live when it was asked"
    other.join()
    lease.__exit__(None, None, None)
    assert order == ["seen", "booked anew"]
    worker = sched.stats()["workers"]["a"]
    assert (worker["live_requests"], worker["waiting_requests"]) == (1, 1), "the second booking is as it was made"
    assert sched.cancel("x")
    sched.check()
