"""Snapshots: what is kept, that a restored scheduler decides as the original, and that nothing damaged is read."""

from __future__ import annotations

import os
import random
import struct
import threading
import zlib
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from preble import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CostModel,
    GlobalScheduler,
    ManualClock,
    Policy,
    SchedulerConfig,
    WorkerSpec,
)
from preble._snapshot.accounts import cost_at
from preble.errors import InvalidConfig, InvalidInput, InvalidTime, PrebleError, SnapshotRefused
from preble.scheduling.leases import Drift
from preble.scheduling.records import DecisionRecording

NAMESPACES = (None, "tenant", 7, b"raw", ("lora", "x", (None, True, -(2**80))))
HEADER_BYTES = 24


class Life:
    """Random calls on one scheduler; the same seed makes the same calls."""

    def __init__(self, scheduler: GlobalScheduler, clock: ManualClock, seed: int, ticks: bool = True) -> None:
        self.scheduler, self.clock, self.random, self.ticks = scheduler, clock, random.Random(seed), ticks
        self.live = sorted(scheduler.core.leases, key=repr)
        self.log: list[Any] = []

    def step(self) -> None:
        calls = (
            (self.schedule, 30),
            (self.first_token, 8),
            (self.finish, 10),
            (self.cancel, 3),
            (self.renew, 4),
            (self.reconcile, 2),
            (self.block, 8),
            (self.pass_time, 4),
            (self.join, 1),
        )
        self.random.choices([call for call, _ in calls], [weight for _, weight in calls])[0]()

    def schedule(self) -> None:
        tokens = self.tokens()
        try:
            decision = self.scheduler.schedule(
                tokens, namespace=self.random.choice(NAMESPACES), explain=self.random.random() < 0.3 or not self.ticks
            )
        except PrebleError as error:
            self.log.append(str(error))
            return
        self.log.append((decision.request_id, decision.worker, decision.matched_tokens, decision.reason))
        self.log.append(decision.costs)
        self.live.append(decision.request_id)

    def tokens(self) -> list[int]:
        head = [self.random.randrange(4)] * self.random.randrange(1, 40)
        return head + [self.random.randrange(3) for _ in range(self.random.randrange(20))]

    def first_token(self) -> None:
        if self.live:
            self.log.append(self.scheduler.first_token(self.random.choice(self.live), cached_tokens=0))

    def finish(self) -> None:
        if self.live:
            which = self.live.pop(self.random.randrange(len(self.live)))
            self.log.append(self.scheduler.finish(which, output_tokens=self.random.randrange(300)))

    def cancel(self) -> None:
        if self.live:
            self.log.append(self.scheduler.cancel(self.live.pop(self.random.randrange(len(self.live)))))

    def renew(self) -> None:
        if self.live:
            self.log.append(self.scheduler.renew(self.random.choice(self.live)))

    def reconcile(self) -> None:
        """An engine reports which requests it has, or only how many."""
        worker = self.random.choice(sorted(self.scheduler.workers))
        told = [one for one in self.live if self.random.random() < 0.8]
        self.log.append(self.scheduler.reconcile(worker, told, grace_seconds=self.random.choice([0.0, 5.0])))
        running = self.random.randrange(6)
        self.log.append(self.scheduler.reconcile_counts(worker, running=running, waiting=0))

    def block(self) -> None:
        """Events name blocks by their tokens, so that continuing and removing meet blocks that are known."""
        worker = self.random.choice(sorted(self.scheduler.workers))
        tokens, space = self.tokens()[:48] + [1] * 8, self.random.choice(NAMESPACES)
        count = len(tokens) // 8
        hashes = [hash_of(tokens[: 8 * (i + 1)], space) for i in range(count)]
        event: Any = BlockStored(hashes, None, tokens[: 8 * count], 8, namespace=space, medium="GPU")
        if self.random.random() < 0.4:
            event = BlockRemoved(hashes[self.random.randrange(count) :], medium="GPU")
        elif self.random.random() < 0.03:
            event = AllBlocksCleared()
        self.log.append(self.scheduler.apply(worker, [event]))

    def pass_time(self) -> None:
        self.clock.advance(self.random.choice([0.25, 2.0, 30.0, -1.0]))
        if self.ticks:
            self.scheduler.tick()

    def join(self) -> None:
        if len(self.scheduler.workers) > 3:
            self.log.append(self.scheduler.remove_worker(self.random.choice(sorted(self.scheduler.workers))))
        else:
            self.scheduler.add_worker(WorkerSpec(f"late-{self.random.randrange(10**9)}", kv_capacity_tokens=120))


def hash_of(tokens: list[int], space: Any) -> int | bytes:
    number = zlib.crc32(repr((tokens, space)).encode())
    return number if number % 2 else struct.pack("<Q", number)


def lived(seed: int, steps: int, calibrate: bool = False) -> tuple[GlobalScheduler, ManualClock]:
    """A scheduler with a history. Where it learns what workers cost it does not go on as its restored twin, which has
    the models and not the samples: the two differ from the next tick on."""
    clock = ManualClock(1000.0)
    own = CostModel([(0, 0.01), (100, 0.2)], context=(0, 0, 0, 1e-4), name="own")
    specs = [
        WorkerSpec("a", kv_capacity_tokens=100),
        WorkerSpec("b", kv_capacity_tokens=300, block_size=8, cost_model=own, labels={"rack": "1"}, max_running=3),
        WorkerSpec("c", kv_capacity_tokens=10**6, cost_model="mistral-7b/a100"),
        WorkerSpec("d", kv_capacity_tokens=200, cached_first=True),
    ]
    config = SchedulerConfig(history_seconds=36.0, lease_seconds=100.0, max_bytes=1 << 20, calibrate=calibrate)
    scheduler = GlobalScheduler(specs, config=config, clock=clock, seed=seed)
    life = Life(scheduler, clock, seed)
    for _ in range(steps):
        life.step()
    if calibrate:
        work(scheduler, clock, seed)
    return scheduler, clock


def work(scheduler: GlobalScheduler, clock: ManualClock, seed: int) -> None:
    """Requests one after the other, each as long as its worker takes, so that these are measured."""
    random_one = random.Random(seed)
    seconds = {name: random_one.choice([0.05, 0.5, 5.0]) for name in sorted(scheduler.workers)}
    for number in range(10 * len(seconds)):
        others = [name for place, name in enumerate(seconds) if place != number % len(seconds)]
        try:
            decision = scheduler.schedule([9, number] * 20, exclude=others, request_id=("work", number))
        except PrebleError:
            continue
        took = seconds[decision.worker] * random_one.uniform(0.9, 1.1)
        clock.advance(took)
        scheduler.first_token(decision.request_id, cached_tokens=0)
        clock.advance(took)
        scheduler.finish(decision.request_id, output_tokens=random_one.randrange(2, 20))
        scheduler.tick()


def kept_stats(scheduler: GlobalScheduler) -> dict[str, Any]:
    """Stats without what was measured of the workers' speed, of which a snapshot keeps what it led to, and without the
    joins and drains of before and the samples that scaling advice rests on."""
    told = scheduler.stats()
    del told["membership"], told["scaling"]
    for worker in told["workers"].values():
        del worker["cost"]
    return told


def resealed(data: bytes) -> bytes:
    """The bytes with a checksum and a length that fit."""
    start = struct.pack("<8sIIQ", data[:8], struct.unpack_from("<I", data, 8)[0], 0, len(data))
    check = zlib.crc32(data[HEADER_BYTES:], zlib.crc32(start[16:], zlib.crc32(start[:12])))
    return start[:12] + struct.pack("<I", check) + start[16:] + data[HEADER_BYTES:]


@example(seed=65, steps=136, shift=0.0)  # one joins later at the place of one that left as the last, a home
@example(seed=162, steps=234, shift=0.0)  # the same, and it takes 32 bytes less there
@example(seed=57697, steps=115, shift=0.0)  # a node goes to which a block's place still led
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 250), shift=st.sampled_from([0.0, 4096.0, -1024.0]))
@settings(max_examples=60)
def test_a_restored_scheduler_goes_on_as_the_original(seed: int, steps: int, shift: float) -> None:
    original, clock = lived(seed, steps)
    other_clock = ManualClock(clock() + shift)
    restored = GlobalScheduler.restore(original.snapshot(), clock=other_clock)
    restored.check()
    assert kept_stats(restored) == kept_stats(original)
    assert repr(restored.workers) == repr(original.workers)
    assert restored.config == original.config
    one, other = Life(original, clock, seed + 1), Life(restored, other_clock, seed + 1)
    for _ in range(120):
        one.step()
        other.step()
        assert one.log == other.log
    restored.check()
    original.check()
    assert kept_stats(restored) == kept_stats(original)


def models_of(scheduler: GlobalScheduler) -> dict[str, Any]:
    """What decisions reckon with, by worker."""
    return {
        name: cost_at(scheduler.core, scheduler.core.names.index(name)).coefficients() for name in scheduler.workers
    }


def priors_of(scheduler: GlobalScheduler) -> dict[str, Any]:
    """What workers were said to cost when they came."""
    plain = GlobalScheduler(scheduler.workers.values(), config=SchedulerConfig(calibrate=False), clock=ManualClock())
    return models_of(plain)


@given(seed=st.integers(0, 2**32), steps=st.integers(60, 250), shift=st.sampled_from([0.0, 4096.0, -1024.0]))
@settings(max_examples=30)
def test_learned_models_are_kept_decided_by_and_learned_on(seed: int, steps: int, shift: float) -> None:
    original, clock = lived(seed, steps, calibrate=True)
    data, later = original.snapshot(), ManualClock(clock() + shift)
    one_clock, other_clock = ManualClock(later()), ManualClock(later())
    at_once = GlobalScheduler.restore(data, clock=later)
    assert models_of(at_once) == models_of(original)
    go_on_alike(Life(original, clock, seed + 1, ticks=False), Life(at_once, later, seed + 1, ticks=False))
    restored = GlobalScheduler.restore(data, clock=one_clock)
    twin = GlobalScheduler.restore(GlobalScheduler.restore(data, clock=other_clock).snapshot(), clock=other_clock)
    lives = Life(restored, one_clock, seed + 2), Life(twin, other_clock, seed + 2)
    for _ in range(60):
        for life in lives:
            life.step()
        assert lives[0].log == lives[1].log
    assert models_of(restored) == models_of(twin)
    for scheduler in (original, at_once, restored, twin):
        scheduler.check()


def go_on_alike(one: Life, other: Life) -> None:
    """Both decide alike. What was priced anew is a sum of other roundings than what was restored: costs are equal but
    for these, and where the two best are, so may be the choice, with which the lives part."""
    for _ in range(60):
        one.log.clear()
        other.log.clear()
        one.step()
        other.step()
        if one.log and isinstance(one.log[-1], dict):
            assert one.log[-1] == pytest.approx(other.log[-1], rel=1e-9)
            if one.log[0] != other.log[0]:
                costs = one.log[-1]
                assert costs[one.log[0][1]] == pytest.approx(costs[other.log[0][1]], rel=1e-9)
                return
        else:
            assert one.log == other.log


def test_histories_do_learn_models() -> None:
    """Else the test above would say nothing."""
    schedulers = [lived(seed, 60 + 20 * seed, calibrate=True)[0] for seed in range(8)]
    learned = [[models_of(one)[name] != priors_of(one)[name] for name in one.workers] for one in schedulers]
    assert sum(any(each) for each in learned) >= 6 and sum(map(sum, learned)) > len(learned), learned


def test_after_a_restart_a_handover_is_over() -> None:
    clock = ManualClock(1000.0)
    original = GlobalScheduler(["a", "b"], clock=clock)
    for number in range(40):
        original.schedule([number % 4, *range(500)], request_id=number)
    clock.advance(60.0)
    original.add_worker("late")
    handover = original.drain_worker("a", handover_seconds=30.0)
    assert handover.moves and not handover.is_over
    restored = GlobalScheduler.restore(original.snapshot(), clock=clock)
    told = restored.stats()["membership"]
    assert told["leaving"] == {} and told["moves"] == []
    assert restored.stats()["workers"]["a"]["draining"] is True
    assert {restored.schedule([number, *range(500)]).worker for number in range(4)} <= {"b", "late"}


def test_a_long_history_at_the_byte_bound_is_kept_to_the_byte() -> None:
    clock = ManualClock(1000.0)
    original = GlobalScheduler(["a", "b", "c"], config=SchedulerConfig(max_bytes=1 << 20), clock=clock)
    random_one = random.Random(5)
    prompts = [[random_one.randrange(50) for _ in range(random_one.randrange(1, 90))] for _ in range(6000)]
    for prompt in prompts[:4000]:
        original.schedule(prompt)
    restored = GlobalScheduler.restore(original.snapshot(), clock=clock)
    restored.check()
    for prompt in prompts[4000:]:
        assert original.schedule(prompt).worker == restored.schedule(prompt).worker
        assert original.core.tree.bytes_used == restored.core.tree.bytes_used
    assert kept_stats(restored) == kept_stats(original)
    assert restored.stats()["tree"]["shed_nodes"] > 0


def test_an_empty_scheduler_and_one_that_never_had_a_worker() -> None:
    for names in ((), ("a",)):
        original = GlobalScheduler(names, clock=ManualClock(5.0))
        restored = GlobalScheduler.restore(original.snapshot(), clock=ManualClock(5.0))
        restored.check()
        assert kept_stats(restored) == kept_stats(original)


def test_draining_workers_stay_so_and_free_indices_stay_free() -> None:
    original = GlobalScheduler(["a", "b", "c"], clock=ManualClock(5.0))
    original.remove_worker("b")
    original.drain_worker("a")
    restored = GlobalScheduler.restore(original.snapshot(), clock=ManualClock(5.0))
    assert restored.schedule([1, 2]).worker == "c"
    assert restored.stats()["workers"]["a"]["draining"]
    restored.add_worker("d")
    assert restored.core.names == ["a", "d", "c"]
    restored.check()


def test_where_no_worker_with_a_role_is_left_prefill_halves_are_given_back() -> None:
    """Nobody knows any more which requests they are of."""
    clock, cost = ManualClock(), CostModel([(0, 0.01), (1000, 0.2)], context=(0, 0.0, 0.001, 1e-3))
    scheduler = GlobalScheduler([WorkerSpec("b"), WorkerSpec("d", role="decode")], clock=clock, cost_model=cost)
    made = [scheduler.schedule_pair([n] * 500, request_id=f"r{n}", max_new_tokens=1000) for n in range(30)]
    assert sum(decision.prefill_worker == "b" for decision in made) > 20
    scheduler.remove_worker("d")
    restored = GlobalScheduler.restore(scheduler.snapshot(), clock=clock)
    restored.check()
    for each in (scheduler, restored):
        for n in range(30):
            each.cancel(f"r{n}")
        worker = each.stats()["workers"]["b"]
        assert each.stats()["live_requests"] == worker["live_requests"] == worker["waiting_prefill_seconds"] == 0
        each.check()


def test_ages_are_kept_on_another_clock_and_the_time_between_is_reported() -> None:
    clock = ManualClock(5000.0)
    original = GlobalScheduler(["a"], config=SchedulerConfig(lease_seconds=100.0), clock=clock)
    original.schedule([1, 2, 3], request_id="old")
    clock.advance(60.0)
    data = original.snapshot()
    for elapsed, left in ((0.0, 40.0), (30.0, 10.0)):
        other = ManualClock(-7.0)
        restored = GlobalScheduler.restore(data, clock=other, elapsed_seconds=elapsed)
        restored.tick(now=other() + left - 0.5)
        assert restored.stats()["live_requests"] == 1
        restored.tick(now=other() + left + 0.5)
        assert restored.stats()["live_requests"] == 0
        assert restored.stats()["expired_leases"] == 1


def test_renewals_and_what_engines_counts_differ_by_are_kept() -> None:
    clock = ManualClock(0.0)
    original = GlobalScheduler(["a", "b"], config=SchedulerConfig(lease_seconds=100.0), clock=clock)
    for request_id in ("renewed", "not"):
        original.schedule([1, 2, 3], request_id=request_id)
    original.reconcile_counts("a", running=9, waiting=0)
    clock.advance(60.0)
    original.reconcile("b", ["stranger"], grace_seconds=1000.0)
    original.renew("renewed")
    original.reconcile_counts("a", running=9, waiting=0)
    other = ManualClock(77.0)
    restored = GlobalScheduler.restore(original.snapshot(), clock=other, elapsed_seconds=60.0)
    assert kept_stats(restored) == kept_stats(original)
    assert restored.stats()["unknown_requests"] == 1
    restored.tick()
    assert list(restored.core.leases) == ["renewed"]
    restored.reconcile_counts("a", running=9, waiting=0)
    assert restored.stats()["workers"]["a"]["drift_seconds"] == 120.0
    restored.tick(now=other() + 41.0)
    assert restored.stats()["expired_leases"] == 2


@pytest.mark.parametrize("elapsed", [-1.0, float("nan"), 1e10, "soon"])
def test_a_time_between_must_be_a_time(elapsed: Any) -> None:
    data = GlobalScheduler(["a"]).snapshot()
    with pytest.raises((InvalidInput, InvalidTime), match="elapsed_seconds"):
        GlobalScheduler.restore(data, elapsed_seconds=elapsed)


# --- what is not kept -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [frozenset({1}), 1j, (1, (2, frozenset()))])
def test_a_namespace_or_request_id_of_another_kind_is_named(name: Any) -> None:
    for asked, word in (({"namespace": name}, "namespace"), ({"request_id": name}, "request's id")):
        scheduler = GlobalScheduler(["a"])
        scheduler.schedule([1, 2], **asked)
        with pytest.raises(InvalidInput, match=word):
            scheduler.snapshot()
        scheduler.check()


def test_keys_come_back_as_what_they_were() -> None:
    keys = [None, True, 2, -(2**70), 0.5, "\ud800é", b"\x00\xff", (), ("a", (1, None), b"")]
    original = GlobalScheduler(["a"])
    for key in keys:
        original.schedule([1, 2], request_id=("id", key), namespace=key)
    restored = GlobalScheduler.restore(original.snapshot())
    assert list(restored.core.leases) == [("id", key) for key in keys]
    assert [type(key[1]) for key in restored.core.leases] == [type(key) for key in keys]
    assert all(restored.match([1, 2], namespace=key).known_tokens == 2 for key in keys)


class Last(Policy):
    """Always the last worker."""

    name = "last"

    def score(self, request: Any, workers: Any) -> list[float]:
        return [-i for i in range(len(workers))]


def test_built_in_policies_are_known_by_name_and_others_are_given_anew() -> None:
    named = GlobalScheduler(["a", "b"], policy="least_loaded", seed=3)
    assert GlobalScheduler.restore(named.snapshot()).policy == "least_loaded"
    assert GlobalScheduler.restore(named.snapshot(), policy="e2").policy == "e2"
    data = GlobalScheduler(["a", "b"], policy=Last).snapshot()
    with pytest.raises(InvalidConfig, match="policy must be given.*'last'"):
        GlobalScheduler.restore(data)
    assert GlobalScheduler.restore(data, policy=Last).schedule([1]).worker == "b"
    with pytest.raises(InvalidConfig, match="policy must be"):
        GlobalScheduler.restore(data, policy="no such")


def test_a_policy_with_books_of_its_own_is_refused_and_named() -> None:
    with pytest.raises(InvalidInput, match="e2-paper"):
        GlobalScheduler(["a"], policy="e2-paper").snapshot()


def test_every_attribute_of_a_scheduler_is_kept_or_left_out_on_purpose() -> None:
    """Whoever gives a scheduler more state must say here what a snapshot does with it, and do it."""
    kept = {"_rebalancer", "config", "_cost_model", "_workers", "_counts_here"}  # and what RequestApi counts
    new_each_time = {"_lock", "_thread", "_stop", "_ahead_seconds", "_membership", "_calibrator"}
    left_out = {"_recorder"}
    scheduler = GlobalScheduler(["a"])
    assert set(vars(scheduler)) == kept | new_each_time | left_out
    assert set(vars(GlobalScheduler(["a"], record=DecisionRecording()))) == kept | new_each_time | left_out
    worker_kept = {"spec", "index", "blocks", "draining", "drift", "cache_mismatches"}
    assert {field.name for field in fields(scheduler._workers["a"])} == worker_kept
    assert {field.name for field in fields(Drift)} == {"reports", "requests", "since", "reported_at"}


def test_a_recording_scheduler_is_restored_as_a_plain_one() -> None:
    clock = ManualClock(0.0)
    watched = GlobalScheduler(["a", "b"], record=DecisionRecording(), shadow="round_robin", clock=clock)
    for number in range(20):
        watched.schedule([number % 3] * 9, request_id=number, explain=True)
    assert len(watched.records()) == 20
    plain = {name: value for name, value in kept_stats(watched).items() if name not in ("records", "shadow")}
    restored = [kind.restore(watched.snapshot(), clock=clock) for kind in (GlobalScheduler, type(watched))]
    for one in restored:
        assert type(one) is GlobalScheduler
        assert one.records() == ()
        assert kept_stats(one) == plain
        one.check()
    for number in range(20):
        prompt = [number % 5] * (5 + number)
        assert len({one.schedule(prompt).worker for one in (watched, *restored)}) == 1


# --- damage -----------------------------------------------------------------------------------------------------------


def test_every_flipped_byte_and_every_truncation_is_refused() -> None:
    data = lived(3, 60)[0].snapshot()
    places = [*range(400), *random.Random(0).sample(range(len(data)), 400), len(data) - 1]
    for at in places:
        bad = bytearray(data)
        bad[at] ^= 1 << at % 8
        with pytest.raises(SnapshotRefused):
            GlobalScheduler.restore(bytes(bad))
    for length in {*range(200), *places}:
        with pytest.raises(SnapshotRefused):
            GlobalScheduler.restore(data[:length])
    with pytest.raises(SnapshotRefused):
        GlobalScheduler.restore(data + b"\x00")


def test_the_reason_of_a_refusal_is_reported() -> None:
    data = GlobalScheduler(["a"]).snapshot()
    for bad, words in (
        (b"", "empty"),
        (b"PK\x03\x04 something else", "no snapshot"),
        (data[:8] + struct.pack("<I", 1) + data[12:], "version 1.*version 7"),
        (data[:-1], f"{len(data) - 1} of {len(data)} bytes"),
        (data[:-1] + b"\xaa", "checksum"),
    ):
        with pytest.raises(SnapshotRefused, match=words):
            GlobalScheduler.restore(bad)
    for foreign in (None, "text", 5):
        with pytest.raises(InvalidInput, match="data must be bytes"):
            GlobalScheduler.restore(foreign)  # type: ignore[arg-type]


@given(st.data())
@settings(max_examples=400)
def test_a_lie_with_a_right_checksum_is_refused_or_makes_a_sound_scheduler(choices: st.DataObject) -> None:
    data = bytearray(LIVED)
    for _ in range(choices.draw(st.integers(1, 3))):
        at = choices.draw(st.one_of(st.sampled_from(PLACES), st.integers(HEADER_BYTES, len(data) - 9)))
        word = choices.draw(st.sampled_from([0, 1, 2, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x80000000, 1023, 1024, 5, 33]))
        data[at : at + 4] = struct.pack("<I", word)
    if choices.draw(st.integers(0, 9)) == 0:
        del data[choices.draw(st.integers(HEADER_BYTES, len(data))) :]
    clock = ManualClock(2000.0)
    try:
        scheduler = GlobalScheduler.restore(resealed(bytes(data)), clock=clock)
    except (SnapshotRefused, InvalidInput):
        return
    scheduler.core.tree.check()
    for worker in scheduler._workers.values():
        worker.blocks.check()
    life = Life(scheduler, clock, 1)
    for _ in range(20):
        if scheduler.workers:
            life.step()
    scheduler.core.tree.check()


@pytest.mark.parametrize("renewed", [-1.0, float("nan"), float("inf")])
def test_a_lease_that_was_renewed_before_it_was_booked_is_refused(renewed: float) -> None:
    clock = ManualClock(7.0)
    scheduler = GlobalScheduler(["a"], clock=clock)
    scheduler.schedule([1, 2], request_id="one")
    clock.advance(1.5)
    scheduler.renew("one")
    data, start = scheduler.snapshot(), struct.pack("<Ifq", 0, 1.5, 1)  # index, renewal and serial of the lease
    assert data.count(start) == 1
    with pytest.raises(SnapshotRefused, match="a lease is out of its range"):
        GlobalScheduler.restore(resealed(data.replace(start, struct.pack("<Ifq", 0, renewed, 1))))


def test_a_slot_of_another_child_in_a_table_that_is_drained_is_refused() -> None:
    """Were it read, it would lead to its node still when that has been freed."""
    scheduler = GlobalScheduler(["a"])
    for token in range(800):  # more than the first table holds; a part of it has moved
        scheduler.schedule([token])
    data = bytearray(scheduler.snapshot())
    moved = [token for token in range(800) if data.count(slot_of(token)) == 2]
    assert 100 < len(moved) < 700
    at = data.rindex(slot_of(moved[0]))
    data[at : at + 4] = slot_of(moved[1])[:4]
    with pytest.raises(SnapshotRefused, match="child table"):
        GlobalScheduler.restore(resealed(bytes(data)))


def test_a_child_table_with_no_end_of_a_search_in_sight_is_refused() -> None:
    """Every search of many would go through all of the slots in a row."""
    scheduler = GlobalScheduler(["a"])
    for token in range(30_000):
        scheduler.core.tree.insert([token], 0.0)
    data = bytearray(scheduler.snapshot())
    at = data.index(slot_of(min(range(30_000), key=lambda token: slot_of(token)[4:6][::-1])))  # near its beginning
    GlobalScheduler.restore(resealed(bytes(data))).check()
    for place in range(at, at + 20_000 * 8, 8):
        if not any(data[place : place + 8]):
            data[place] = 1  # a child was here
    with pytest.raises(SnapshotRefused, match="full in one place"):
        GlobalScheduler.restore(resealed(bytes(data)))


def slot_of(token: int) -> bytes:
    """The child table's slot of the node of a prompt of one token, the token-th of its tree."""
    mixed = token * 0x9E3779B97F4A7C15 % 2**64
    hashed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 % 2**64 >> 32
    return struct.pack("<II", token + 1, max(hashed, 1))


LIVED = lived(7, 120)[0].snapshot()
# Words that are not zero: where something is said.
PLACES = [at for at in range(HEADER_BYTES, len(LIVED) - 4, 4) if any(LIVED[at : at + 4])]


LIMITED = """
import resource
from tests.snapshot import test_snapshot as t
def room():
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ({spare} << 20), resource.RLIM_INFINITY))
refused = 0
room()
for at in range(t.HEADER_BYTES, len(t.LIVED) - 4, {step}):
    data = bytearray(t.LIVED)
    data[at:at + 4] = bytes([255, 255, 255, 127])
    try:
        t.GlobalScheduler.restore(t.resealed(bytes(data)), clock=t.ManualClock(2000.0))
    except t.InvalidInput:
        refused += 1
print(refused)
"""


def test_a_length_that_the_bytes_do_not_bear_is_refused_before_memory_is_asked_for(run_python: Any) -> None:
    """With a hundred megabytes to spare no lie about any number ends in a MemoryError."""
    spare = 1024 if "ASAN_OPTIONS" in os.environ else 96  # asan keeps freed memory for a while
    done = run_python("-c", LIMITED.format(step=97, spare=spare))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


# --- threads ----------------------------------------------------------------------------------------------------------


def test_snapshots_beside_other_threads_are_whole() -> None:
    scheduler = GlobalScheduler(["a", "b"])

    def work(number: int) -> None:
        own = random.Random(number)
        for _ in range(2000):
            decision = scheduler.schedule([own.randrange(9) for _ in range(12)])
            scheduler.first_token(decision.request_id)
            if own.random() < 0.95:
                scheduler.finish(decision.request_id, output_tokens=5)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    taken = [scheduler.snapshot() for _ in range(10)]
    for thread in threads:
        thread.join()
    for data in [*taken, scheduler.snapshot()]:
        restored = GlobalScheduler.restore(data)
        restored.check()
        for request_id in list(restored.core.leases):
            assert restored.finish(request_id)
        restored.check()
        assert restored.core.loads.live == 0
