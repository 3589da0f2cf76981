"""A naive model of leases beside a real scheduler, and a world that does the same to both. Owns nothing of the product.

The model knows which requests are live, on which worker of which life, and when they were last seen; where a request
goes it takes from the real one (`models/scheduler.py` has that). After every step the real books must say what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from preble import GlobalScheduler, ManualClock, SchedulerConfig, WorkerSpec
from preble.errors import DuplicateRequest, InvalidInput, NoWorkers, QueueFull
from preble.scheduling.leases import Lease

LEASE_SECONDS = 60.0
LIVE_MAX = 6
IDS: tuple[Hashable, ...] = ("x", "y", ("z", 1))
WORKERS = ("a", "b", "c")
STEPS_SECONDS = (0.5, 4.0, 6.0, 30.0, 61.0, -20.0)
PROMPTS = tuple(list(range(100 * (n % 3), 100 * (n % 3) + 20)) + [9000 + n] * (n + 1) for n in range(8))
COUNTED = ("scheduled", "finished", "cancelled", "late_calls", "expired_leases", "reconciled_leases")


@dataclass(eq=False)
class Life:
    """One worker from joining to leaving."""

    eligible: bool = True


@dataclass(eq=False)
class Booking:
    """One booking; `seen` is when it was made or renewed last."""

    request_id: Hashable
    life: Life
    booked: float
    seen: float
    prefilled: bool = False


@dataclass(eq=False)
class Held:
    """A lease in its block, and the booking it should have."""

    lease: Lease
    booking: Booking | None
    request_id: Hashable
    avoid: set[str] = field(default_factory=set)
    over: bool = False


class World:
    """`steps` are what can happen, each given two numbers to choose by."""

    def __init__(self, policy: str) -> None:
        self.clock = ManualClock(1000.0)
        config = SchedulerConfig(lease_seconds=LEASE_SECONDS, live_requests_max=LIVE_MAX, history_seconds=36.0)
        self.real = GlobalScheduler(policy=policy, clock=self.clock, config=config)
        self.workers: dict[str, Life] = {}
        self.live: dict[Hashable, Booking] = {}
        self.held: list[Held] = []
        self.counts = dict.fromkeys((*COUNTED, "unknown_requests"), 0)
        self.steps: tuple[Callable[[int, int], None], ...] = (
            *(self.open, self.open, self.book, self.tell, self.tell, self.tell_by_id, self.leave, self.reroute),
            *(self.pass_time, self.tick, self.join_or_leave, self.drain, self.reconcile, self.count),
        )
        for name in WORKERS[:2]:
            self.join(name)

    # --- requests ---

    def open(self, a: int, b: int) -> None:
        """Enter a block."""
        request_id = (*IDS, None, None)[a % 5]
        if len(self.held) == LIVE_MAX:
            return
        held = Held(self.real.lease(PROMPTS[b % 8], request_id=request_id), None, request_id)
        if self.can_book(request_id, set(), held.lease.__enter__):
            held.request_id = held.lease.request_id
            held.booking = self.booked(held.request_id, held.lease.worker)
            self.held.append(held)

    def book(self, a: int, b: int) -> None:
        """Schedule without a lease."""
        request_id = IDS[a % 3]
        decision = self.can_book(request_id, set(), lambda: self.real.schedule(PROMPTS[b % 8], request_id=request_id))
        if decision:
            self.booked(request_id, decision.worker)

    def can_book(self, request_id: Hashable, avoid: set[str], call: Callable[[], Any]) -> Any:
        """Make a call that books: it must succeed exactly if the model has a place for it. What it returned, or
        None."""
        is_open = any(life.eligible and name not in avoid for name, life in self.workers.items())
        possible = is_open and len(self.live) < LIVE_MAX and request_id not in self.live
        try:
            booked = call()
        except (NoWorkers, QueueFull, DuplicateRequest):
            assert not possible, "a request was refused that has a place"
            return None
        assert possible, "a request was taken that has no place"
        return booked

    def booked(self, request_id: Hashable, worker: str) -> Booking:
        self.counts["scheduled"] += 1
        booking = Booking(request_id, self.workers[worker], self.clock(), self.clock())
        self.live[request_id] = booking
        return booking

    def tell(self, a: int, b: int) -> None:
        """Something is said through a lease, perhaps once more, perhaps too late."""
        if self.held:
            held = self.held[a % len(self.held)]
            what = ("first_token", "renew", "finish", "cancel")[b % 4]
            own = held.booking is not None and self.live.get(held.request_id) is held.booking
            assert getattr(held.lease, what)() == self.said(what, held.booking if own else None)
            held.over |= what in ("finish", "cancel")

    def tell_by_id(self, a: int, b: int) -> None:
        request_id = (*self.live, *IDS, "nobody")[a % (len(self.live) + 4)]
        what = ("first_token", "renew", "finish", "cancel")[b % 4]
        assert getattr(self.real, what)(request_id) == self.said(what, self.live.get(request_id))

    def said(self, what: str, booking: Booking | None) -> bool:
        """What a call does to the model; None stands for a booking that is over."""
        if booking is None:
            self.counts["late_calls"] += 1
            return False
        if what == "renew":
            booking.seen = max(booking.seen, self.clock())
        elif what == "first_token":
            booking.prefilled |= booking.life in self.workers.values()
        else:
            self.end(booking, "finished" if what == "finish" else "cancelled")
        return True

    def end(self, booking: Booking, how: str) -> None:
        del self.live[booking.request_id]
        self.counts[how] += 1

    def leave(self, a: int, b: int) -> None:
        """The block ends, one way or the other."""
        if self.held:
            held = self.held.pop(a % len(self.held))
            error = KeyError() if b % 2 else None
            held.lease.__exit__(type(error) if error else None, error, None)
            self.left(held)

    def left(self, held: Held) -> None:
        if held.booking is not None and self.live.get(held.request_id) is held.booking:
            self.end(held.booking, "cancelled")
        assert not held.lease.live

    def reroute(self, a: int, b: int) -> None:
        if not self.held:
            return
        held, given = self.held[a % len(self.held)], [name for name in self.workers if b % 4 == 0][:1]
        if held.over:
            try:
                held.lease.reroute(exclude=given)
            except InvalidInput:
                return
            raise AssertionError("a lease that is over was rerouted")
        if held.booking is not None and self.live.get(held.request_id) is held.booking:
            self.end(held.booking, "cancelled")
        held.avoid = {name for name in (*held.avoid, held.lease.worker, *given) if name in self.workers}
        held.booking = None
        if self.can_book(held.request_id, held.avoid, lambda: held.lease.reroute(exclude=given)):
            held.booking = self.booked(held.request_id, held.lease.worker)

    # --- time and workers ---

    def pass_time(self, a: int, b: int) -> None:
        self.clock.advance(STEPS_SECONDS[a % len(STEPS_SECONDS)])

    def tick(self, a: int, b: int) -> None:
        self.real.tick()
        for booking in list(self.live.values()):
            if self.clock() - LEASE_SECONDS <= booking.booked <= self.clock():
                break  # they are looked at in booking order
            if booking.seen < self.clock() - LEASE_SECONDS:
                self.end(booking, "expired_leases")

    def join(self, name: str) -> None:
        self.real.add_worker(WorkerSpec(name, kv_capacity_tokens=60))
        self.workers[name] = Life()

    def join_or_leave(self, a: int, b: int) -> None:
        name = WORKERS[a % 3]
        if name not in self.workers:
            self.join(name)
        elif b % 2:
            life = self.workers.pop(name)
            there = [booking.request_id for booking in self.live.values() if booking.life is life]
            assert self.real.remove_worker(name) == there

    def drain(self, a: int, b: int) -> None:
        if b % 4 == 0 and WORKERS[a % 3] in self.workers:
            self.real.drain_worker(WORKERS[a % 3])
            self.workers[WORKERS[a % 3]].eligible = False

    def reconcile(self, a: int, b: int) -> None:
        """An engine says which requests it has: each live one if a bit of `b` says so, and one that never was."""
        if not self.workers:
            return
        name = list(self.workers)[a % len(self.workers)]
        told = [one for bit, one in enumerate((*self.live, "ghost")) if b >> bit & 1]
        lives = {one: booking.life for one, booking in self.live.items()}
        elsewhere = [life for other, life in self.workers.items() if other != name]
        unknown = tuple(one for one in told if one not in lives or lives[one] in elsewhere)
        now, missing = self.clock(), []
        for booking in self.live.values():
            if booking.request_id in told and booking.request_id not in unknown:
                booking.seen = max(booking.seen, now)
            elif booking.life is self.workers[name] and booking.seen < now - 5.0:
                missing.append(booking)
        found = self.real.reconcile(name, told)
        assert found.unknown == unknown
        assert found.given_back == tuple(booking.request_id for booking in missing)
        self.counts["unknown_requests"] += len(unknown)
        for booking in missing:
            self.end(booking, "reconciled_leases")

    def count(self, a: int, b: int) -> None:
        if self.workers:
            name = list(self.workers)[a % len(self.workers)]
            booked = sum(booking.life is self.workers[name] for booking in self.live.values())
            assert self.real.reconcile_counts(name, running=b % 5, waiting=b % 3) == b % 5 + b % 3 - booked
            assert self.real.stats()["workers"][name]["drift_requests"] == b % 5 + b % 3 - booked

    # --- what always holds ---

    def compare(self) -> None:
        """The bookings are the model's."""
        stats = self.real.stats()
        assert {key: stats[key] for key in self.counts} == self.counts
        assert list(self.real.core.leases) == list(self.live)
        for name, life in self.workers.items():
            own = [booking for booking in self.live.values() if booking.life is life]
            worker = stats["workers"][name]
            assert worker["live_requests"] == len(own)
            assert worker["waiting_requests"] == sum(not booking.prefilled for booking in own)
        for held in self.held:
            assert held.lease.live == (held.booking is not None and self.live.get(held.request_id) is held.booking)

    def wind_up(self) -> None:
        """All blocks are left, what has no block expires; then nothing is booked anywhere."""
        while self.held:
            self.leave(0, 0)
        self.compare()
        self.clock.set(max([self.clock(), *(booking.seen for booking in self.live.values())]) + LEASE_SECONDS + 1.0)
        self.tick(0, 0)
        self.compare()
        assert not self.live and not self.real.core.leases
        stats = self.real.stats()
        for worker in stats["workers"].values():
            assert (worker["live_requests"], worker["waiting_requests"], worker["live_output_tokens"]) == (0, 0, 0)
            assert worker["waiting_prefill_seconds"] == 0.0
        for need, book in stats["policy_state"].items():
            assert not any(book[key] for key in ("requests", "blocks") if key in book and need != "window_costs"), need
        self.real.check()


def play(policy: str, history: list[tuple[int, int, int]], *, check_each: bool) -> dict[str, int]:
    """Play a history, (step, number, number) each, and wind up; returns the counts. Raises where the bookings
    differ."""
    world = World(policy)
    for step, a, b in history:
        world.steps[step % len(world.steps)](a, b)
        world.compare()
        if check_each:
            world.real.check()
    world.wind_up()
    world.steps = ()  # they refer to the world; without them it goes now, and with it memory no collector knows of
    return world.counts
