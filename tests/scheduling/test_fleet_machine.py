"""State machine: a fleet that lives. Workers join, drain, die and come back while requests run, engines lie about their
caches, the clock jumps both ways, prefixes change hands, and now and then the scheduler is restored from a snapshot.

What every prompt's decision must be is the subject of `test_scheduler_machine.py`; here it is what holds whatever was
decided: each step leaves every invariant of `check`, the bookings say who is live where, and in the end they are at
zero.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from preble import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CostModel,
    GlobalScheduler,
    ManualClock,
    PrefixEvicted,
    SchedulerConfig,
    WorkerSpec,
)
from preble.errors import DuplicateWorker, InvalidInput, NoWorkers, QueueFull

NAMES = [f"w{i}" for i in range(6)]
LIVE_MAX = 40
LEASE_SECONDS = 150.0
WINDOW_SECONDS = 36.0
# Prefixes in three lengths, of which the longer ones go on from the shorter: key portions in key portions.
PREFIXES = [tuple(range(100 * tool, 100 * tool + size)) for tool in range(4) for size in (12, 33, 80)]
SLOW = CostModel([(0, 0.5), (16, 0.5), (64, 2.0)], name="slow")  # so slow that a few requests are a busy fleet
SPACES = (None, "tenant")
numbers = st.integers(0, 999)
specs = st.builds(
    WorkerSpec,
    st.sampled_from(NAMES),
    kv_capacity_tokens=st.sampled_from([40, 150, 400, 1000]),
    block_size=st.sampled_from([1, 1, 16]),
)
knobs = {
    "history_seconds": WINDOW_SECONDS,
    "join_seconds": 2.0,
    "lease_seconds": LEASE_SECONDS,
    "live_requests_max": LIVE_MAX,
    "max_bytes": 1 << 20,
}
# Where the fleet can do more than this file knows of, it is all on, and acts as soon as it may.
eager = {"rebalance_ratio": 1.1, "replicas_max": 3}
knobs |= {name: value for name, value in eager.items() if name in {field.name for field in fields(SchedulerConfig)}}
configs = st.builds(
    lambda prefixes: SchedulerConfig(**knobs, handover_prefixes_max=prefixes),
    st.sampled_from([64, 64, 2, 0]),
)


class FleetMachine(RuleBasedStateMachine):
    """`live`: request -> (worker's life, prompt tokens) of every booking; `lives`: the life that a worker's name is
    on; `closed`: workers that may be given nothing any more."""

    @initialize(config=configs, first=st.lists(specs, min_size=2, max_size=4, unique_by=lambda spec: spec.id))
    def start(self, config: SchedulerConfig, first: list[WorkerSpec]) -> None:
        self.clock = ManualClock(1000.0)
        self.sched = GlobalScheduler([], config=config, clock=self.clock, cost_model=SLOW)
        self.number = 0
        self.lives: dict[str, int] = {}
        self.closed: set[str] = set()
        self.leaving: set[str] = set()
        self.live: dict[int, tuple[int, int]] = {}
        for spec in first:
            self.join(spec)

    # --- requests ---

    @rule(chosen=st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6))
    def ask(self, chosen: list[tuple[int, int]]) -> None:
        """Requests with prefixes that others have, each with an end of its own."""
        for a, b in chosen:
            prefix = PREFIXES[a % len(PREFIXES)]
            self.place([*prefix, *range(10_000 + 50 * b, 10_000 + 50 * b + 1 + b % 7)], SPACES[a % 7 == 0])

    @rule(which=numbers, times=st.integers(2, 12), serve=st.booleans())
    def ask_for_the_same(self, which: int, times: int, serve: bool) -> None:
        """A prefix becomes hot."""
        for turn in range(times):
            request = self.place([*PREFIXES[which % len(PREFIXES)], 20_000 + 100 * which + turn], None)
            if serve and request is not None:
                assert self.sched.finish(request, output_tokens=turn)
                del self.live[request]

    @rule(which=numbers, then=st.sampled_from(["join", "join", "drain", "drain slowly", "die"]))
    def busy_and_then(self, which: int, then: str) -> None:
        """A fleet at work for a few seconds, and then what prefixes change hands at."""
        for turn in range(4):
            self.pass_time(1.0)
            for tool in range(5):
                self.ask_for_the_same(which + tool, 2, serve=turn % 2 == 0)
        absent = [name for name in NAMES if name not in self.lives]
        if then == "join" and absent:
            self.join(WorkerSpec(absent[which % len(absent)], kv_capacity_tokens=400))
        elif then == "die" and len(self.lives) > 1:
            self.die(which, back=True, dice=0)
        elif then.startswith("drain") and len(self.lives) > 1:
            self.drain(which, 30.0 if then == "drain slowly" else 0.0, dice=0)
        self.pass_time(6.0)
        self.tick()

    def place(self, tokens: list[int], space: Any, exclude: tuple[str, ...] = ()) -> int | None:
        self.number += 1
        is_open = bool(self.lives.keys() - self.closed - self.leaving - set(exclude))
        try:
            decision = self.sched.schedule(
                tokens, request_id=self.number, namespace=space, max_new_tokens=20, exclude=exclude
            )
        except (NoWorkers, QueueFull):
            assert not is_open or len(self.live) >= LIVE_MAX, "a request was refused that has a place"
            return None
        assert decision.worker in self.lives, "it went to a worker that is not there"
        assert decision.worker not in self.closed, "it went to a worker that has drained"
        assert decision.worker not in exclude
        assert decision.worker not in self.leaving or decision.reason != "explore", "a leaver was given something new"
        self.live[self.number] = (self.lives[decision.worker], len(tokens))
        return self.number

    @precondition(lambda self: self.lives)
    @rule(which=numbers, name=st.sampled_from(NAMES))
    def ask_elsewhere(self, which: int, name: str) -> None:
        if name in self.lives:
            self.place(list(PREFIXES[which % len(PREFIXES)]), None, (name,))

    @precondition(lambda self: self.live)
    @rule(chosen=st.lists(st.tuples(numbers, st.integers(0, 3), st.floats(0.0, 1.0)), min_size=1, max_size=6))
    def hear(self, chosen: list[tuple[int, int, float]]) -> None:
        """News of requests, in which the engine says anything about its cache that a prompt has room for."""
        for which, what, share in chosen:
            if not self.live:
                return
            request = list(self.live)[which % len(self.live)]
            cached = int(share * self.live[request][1]) if which % 3 else None
            if what == 0:
                assert self.sched.first_token(request, cached_tokens=cached)
            elif what == 1:
                assert self.sched.renew(request)
            else:
                end = self.sched.cancel if what == 2 else self.sched.finish
                assert end(request)
                assert not end(request), "it was over"
                del self.live[request]

    @precondition(lambda self: self.lives)
    @rule(which=numbers, keep=st.integers(0, 3), strangers=st.integers(0, 2))
    def reconcile(self, which: int, keep: int, strangers: int) -> None:
        name = self.some(which)
        told = [request for request in self.live if request % 4 <= keep] + [-1 - n for n in range(strangers)]
        found = self.sched.reconcile(name, told, grace_seconds=float(which % 20))
        for request in found.given_back:
            assert self.live.pop(request)[0] == self.lives[name]

    # --- workers ---

    @rule(spec=specs)
    def join(self, spec: WorkerSpec) -> None:
        if spec.id in self.lives:
            try:
                self.sched.add_worker(spec)
                raise AssertionError("two workers of one name")
            except DuplicateWorker:
                return
        self.sched.add_worker(spec)
        self.lives[spec.id] = max(self.lives.values(), default=self.number) + 1 + self.number
        assert self.sched.stats()["workers"][spec.id]["cached_tokens"] == 0

    @precondition(lambda self: len(self.lives) > 1)
    @rule(which=numbers, seconds=st.sampled_from([0.0, 0.0, 5.0, 30.0]), dice=st.integers(0, 2))
    def drain(self, which: int, seconds: float, dice: int) -> None:
        if dice:
            return
        name = self.some(which)
        handover = self.sched.drain_worker(name, handover_seconds=seconds)
        assert len(handover.moves) <= self.sched.config.handover_prefixes_max
        losses = [move.loss_seconds for move in handover.moves]
        assert losses == sorted(losses)
        self.leaving.add(name)
        self.note_leavers()

    @precondition(lambda self: self.lives)
    @rule(which=numbers, back=st.booleans(), dice=st.integers(0, 2))
    def die(self, which: int, back: bool, dice: int) -> None:
        """A worker goes with requests on it; perhaps another comes under its name at once."""
        if dice:
            return
        name = self.some(which)
        life = self.lives.pop(name)
        orphans = self.sched.remove_worker(name)
        assert sorted(orphans) == sorted(request for request, (home, _) in self.live.items() if home == life)
        self.closed.discard(name)
        self.leaving.discard(name)
        if back:
            self.join(WorkerSpec(name, kv_capacity_tokens=400))
            assert not self.sched.match(list(PREFIXES[2])).matched_tokens.get(name)

    def some(self, which: int) -> str:
        return list(self.lives)[which % len(self.lives)]

    # --- what engines say of their caches ---

    @precondition(lambda self: self.lives)
    @rule(which=numbers, what=st.integers(0, 5), a=numbers, b=numbers)
    def cache_event(self, which: int, what: int, a: int, b: int) -> None:
        """True or not: blocks stored under parents that are unknown, removed that never were, all of it cleared."""
        tokens, space = PREFIXES[a % len(PREFIXES)], SPACES[a % 5 == 0]
        count = len(tokens) // 8
        hashes = [1000 * a + i for i in range(count)]
        parent = None if b % 2 else 1000 * (b % 12) + b % 3
        event: Any = BlockStored(hashes, parent, tokens[: 8 * count], 8, space)
        if what == 2:
            event = BlockRemoved([1000 * (b % 12) + i for i in range(3)])
        elif what == 3:
            event = PrefixEvicted(tokens, b % 90, space)
        elif what == 4 and b % 3 == 0:
            event = AllBlocksCleared()
        self.sched.apply(self.some(which), [event])

    @precondition(lambda self: self.lives)
    @rule(which=numbers, payload=st.binary(max_size=12))
    def nonsense(self, which: int, payload: bytes) -> None:
        with suppress(InvalidInput):
            self.sched.apply_raw(self.some(which), payload)

    # --- time, and all of it as bytes ---

    @rule(seconds=st.sampled_from([0.1, 1.0, 1.0, 5.0, 5.0, 36.0, 100.0, -3.0, -500.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def tick(self) -> None:
        before = self.sched.stats()["expired_leases"]
        self.sched.tick()
        gone = [request for request in self.live if request not in self.sched.core.leases]
        assert self.sched.stats()["expired_leases"] - before == len(gone)
        for request in gone:
            del self.live[request]
        self.note_leavers()

    @rule(dice=st.integers(0, 3))
    def restart(self, dice: int) -> None:
        if not dice:
            self.sched = GlobalScheduler.restore(self.sched.snapshot(), clock=self.clock)
            self.note_leavers()

    def note_leavers(self) -> None:
        """Who has nothing more to give takes no more requests."""
        giving = self.sched.stats()["membership"]["leaving"]
        self.closed |= {name for name in self.leaving if not giving.get(name)}
        self.leaving -= self.closed

    # --- what always holds ---

    @invariant()
    def every_invariant_holds(self) -> None:
        self.sched.check()

    @invariant()
    def the_bookings_say_who_is_where(self) -> None:
        told = self.sched.stats()
        assert told["live_requests"] == len(self.live)
        for name, life in self.lives.items():
            mine = sum(1 for home, _ in self.live.values() if home == life)
            assert told["workers"][name]["live_requests"] == mine
            assert told["workers"][name]["cached_tokens"] <= told["workers"][name]["kv_capacity_tokens"] * 1.25
        assert set(told["membership"]["leaving"]) <= set(self.lives)

    def teardown(self) -> None:
        """Once everything has ended nothing is left."""
        if not hasattr(self, "sched"):
            return
        for request in list(self.live):
            assert self.sched.finish(request)
        for name in list(self.lives):
            self.sched.apply(name, [AllBlocksCleared()])
        self.clock.set(max(self.clock(), 1000.0) + 1e6)
        for _ in range(12):
            self.clock.advance(WINDOW_SECONDS)
            self.sched.tick()
        told = self.sched.stats()
        assert (told["tree"]["nodes"], told["tree"]["marks"], told["live_requests"]) == (0, 0, 0)
        books = ("live_requests", "waiting_requests", "live_output_tokens", "waiting_prefill_seconds", "load_seconds")
        for account in told["workers"].values():
            assert [account[key] for key in (*books, "window_requests")] == [0] * 6
        self.sched.check()


FleetMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=30, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
test_a_fleet_lives = FleetMachine.TestCase
