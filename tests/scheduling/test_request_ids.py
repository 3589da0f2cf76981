"""Ids and namespaces whose hash or equality is Python code: they may call back, fail, or let other threads run, and no
booking is lost or made twice. Owns these objects; races are found by calling back, and by threads that change all the
time."""

from __future__ import annotations

import random
import sys
import uuid
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest

from preble import AllBlocksCleared, BlockStored, GlobalScheduler, ManualClock, SchedulerConfig, SessionHint, WorkerSpec
from preble._core.dict_keys import HashedKey, find_key, key_value
from preble.errors import DuplicateRequest, InvalidInput, UnknownWorker
from preble.scheduling.records import DecisionRecording
from preble.types import RequestEnded, RequestPlaced
from tests.stress.threads import run_together

POLICIES = ["e2", "kv_cost", "cache_aware", "e2-paper", "round_robin"]


@contextmanager
def endless_switches() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


class Calling:
    """An id that calls back when it is hashed (or compared): not the first `after` times, then `times` times."""

    def __init__(
        self, name: Hashable, on_hash: Callable[[], Any] | None = None, times: int = 1, after: int = 0
    ) -> None:
        self.name, self.on_hash, self.times, self.after = name, on_hash, times, after
        self.on_eq: Callable[[], Any] | None = None

    def call(self, what: Callable[[], Any] | None) -> None:
        if what is not None and self.after:
            self.after -= 1
        elif what is not None and self.times:
            self.times -= 1
            what()

    def __hash__(self) -> int:
        self.call(self.on_hash)
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        self.call(self.on_eq)
        return self.name == (other.name if isinstance(other, Calling) else other)

    def __repr__(self) -> str:
        return f"Calling({self.name!r})"


class Name(str):
    """A str whose hash and equality are Python code."""

    def __hash__(self) -> int:
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True


@dataclass(frozen=True)
class Colliding:
    number: int

    def __hash__(self) -> int:
        return 7


def nothing_is_left(sched: GlobalScheduler) -> None:
    stats = sched.stats()
    assert stats["live_requests"] == 0 and not sched.core.leases
    assert stats["scheduled"] == stats["finished"] + stats["cancelled"]
    for worker in stats["workers"].values():
        assert (worker["live_requests"], worker["waiting_requests"], worker["live_output_tokens"]) == (0, 0, 0)
    for book in stats["policy_state"].values():
        assert not book.get("blocks", 0)
    sched.check()


# --- keys -------------------------------------------------------------------------------------------------------------


def test_what_hashes_in_c_is_its_own_key_and_the_rest_is_found_again_by_equality() -> None:
    table: dict[Any, int] = {}
    for value in ("a", 1, b"x", 2.5, None, True, ("lora", ("x", 3))):
        assert find_key(table, value) is value
    one = uuid.UUID(int=5)
    key = find_key(table, one)
    assert type(key) is HashedKey and key_value(key) is one and key_value("a") == "a"
    table[key] = 1
    assert find_key(table, uuid.UUID(int=5)) is key and find_key(table, key) is key
    assert find_key(table, uuid.UUID(int=6)) is not key
    table[find_key(table, (1, Name("a")))] = 2
    assert table[find_key(table, (1, "a"))] == 2
    with pytest.raises(TypeError, match="unhashable"):
        find_key(table, [])
    with pytest.raises(TypeError, match="find_key"):
        HashedKey()


def test_equal_objects_of_different_types_are_one_id() -> None:
    sched = GlobalScheduler(["w"], clock=ManualClock())
    for first, second in (("a", Name("a")), (Name("b"), "b"), (Colliding(1), Colliding(1)), (1, True), (2, 2.0)):
        assert sched.schedule([1], request_id=first).request_id is first
        for again in ({}, {"explain": True}):
            with pytest.raises(DuplicateRequest):
                sched.schedule([1], request_id=second, **again)
        assert sched.first_token(second) and sched.renew(second) and sched.finish(second)
        assert not sched.finish(first)
    nothing_is_left(sched)


def test_ids_of_one_hash_are_kept_apart() -> None:
    sched = GlobalScheduler(["w"], clock=ManualClock())
    for number in range(50):
        sched.schedule([number], request_id=Colliding(number))
    for number in range(0, 50, 2):
        assert sched.finish(Colliding(number)) and not sched.finish(Colliding(number))
    for number in range(50):
        assert sched.cancel(Colliding(number)) == bool(number % 2)
    nothing_is_left(sched)


def test_the_key_of_what_is_never_the_same_when_looked_at_is_refused() -> None:
    table: dict[Any, int] = {}

    class Restless(Colliding):
        def __eq__(self, other: object) -> bool:
            table.clear()
            key = find_key({}, Colliding(random.randrange(10**9)))
            table[key] = 1
            return False

        __hash__ = Colliding.__hash__

    table[find_key(table, Colliding(1))] = 1
    with pytest.raises(InvalidInput, match="cannot be a key"):
        find_key(table, Restless(2))


# --- calling back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("asked", [{}, {"explain": True}, {"exclude": ["gone"]}], ids=["plain", "explain", "exclude"])
def test_a_hash_that_ends_another_request_costs_no_booking(policy: str, asked: dict[str, Any]) -> None:
    """Regression: the other's end made the number of live requests the same as before, and that was taken for a
    duplicate: DuplicateRequest, and an id that stayed live for ever."""
    record = DecisionRecording() if asked else None
    sched = GlobalScheduler(["a", "b", "gone"], policy=policy, clock=ManualClock(), record=record)
    for number in range(20):
        sched.schedule([1, 2, number], request_id=f"other-{number}")
        one = Calling(f"id-{number}", lambda number=number: sched.finish(f"other-{number}"), after=number % 5)
        assert sched.schedule([1, 2, 3], request_id=one, **asked).request_id is one
        assert sched.finish(Calling(f"id-{number}"))
        sched.finish(f"other-{number}")
    nothing_is_left(sched)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_hash_that_books_the_same_id_books_it_once(policy: str) -> None:
    sched = GlobalScheduler(["a", "b"], policy=policy, clock=ManualClock(), record=DecisionRecording())
    for after in range(5):
        for asked in ({}, {"explain": True}):
            one = Calling("id", lambda: sched.schedule([1, 2, 3], request_id="id"), after=after)
            with suppress(DuplicateRequest):
                sched.schedule([1, 2, 3], request_id=one, **asked)
            assert sched.stats()["live_requests"] == 1 and sched.finish("id")
    nothing_is_left(sched)


@pytest.mark.parametrize("call", ["first_token", "finish", "cancel", "renew"])
def test_an_equality_that_ends_the_request_leaves_the_call_late(call: str) -> None:
    sched = GlobalScheduler(["a", "b"], clock=ManualClock(), record=DecisionRecording())
    for _ in range(3):
        one = Calling("id")
        sched.schedule([1, 2, 3], request_id=one)
        one.on_eq = lambda: sched.finish(Calling("id"))
        before = sched.stats()["late_calls"]
        assert getattr(sched, call)(Calling("id")) is False
        assert sched.stats()["late_calls"] == before + 1
    nothing_is_left(sched)


@pytest.mark.parametrize("policy", POLICIES)
def test_calls_that_fail_in_hash_or_equality_change_nothing(policy: str) -> None:
    sched = GlobalScheduler(["a", "b"], policy=policy, clock=ManualClock(), record=DecisionRecording())
    live = Calling("live", times=0)
    sched.schedule([1, 2, 3], request_id=live)
    before = sched.stats()

    def fail() -> None:
        raise LookupError("mine")

    live.on_eq = fail
    for on_hash in (fail, None):
        for asked in ({}, {"explain": True}):
            live.times = 1
            with pytest.raises(LookupError, match="mine"):
                sched.schedule([1, 2, 3], request_id=Calling("live", on_hash), **asked)
        for call in (sched.first_token, sched.finish, sched.cancel, sched.renew):
            live.times = 1
            with pytest.raises(LookupError, match="mine"):
                call(Calling("live", on_hash))
    live.times = 0
    after = sched.stats()
    assert {**after, "records": 0} == {**before, "records": 0}
    assert sched.finish(Calling("live"))
    nothing_is_left(sched)


def test_what_is_listed_and_given_back_is_the_id_that_was_given() -> None:
    clock = ManualClock()
    sched = GlobalScheduler(["a", "b"], config=SchedulerConfig(lease_seconds=5.0), clock=clock)
    ids = [uuid.UUID(int=number) for number in range(6)]
    for one in ids:
        sched.schedule([1, 2, 3], request_id=one, exclude=["b"])
    clock.advance(1.0)
    done = sched.reconcile("a", [*ids[:2], uuid.UUID(int=99)], grace_seconds=0.5)
    assert sorted(done.given_back) == ids[2:] and done.unknown == (uuid.UUID(int=99),)
    assert sorted(sched.remove_worker("a")) == ids[:2]
    with sched.lease([1, 2], request_id=ids[3]) as lease:
        assert (
            lease.live and lease.first_token() and lease.reroute(exclude=[]) if len(sched.workers) > 1 else lease.live
        )
    clock.advance(10.0)
    sched.tick()
    assert sched.stats()["expired_leases"] == 2 and not sched.core.leases
    sched.check()


@pytest.mark.parametrize("request_id", ["plain", uuid.UUID(int=1), Name("name"), Colliding(1), (1, Name("b"))])
def test_what_is_asked_and_noted_about_a_live_request_finds_it_by_any_id(request_id: Hashable) -> None:
    """Regression: one whose hash is Python code was booked for 0.0 s, pulled nothing, and lost its session."""
    sched = GlobalScheduler(["a", "b"], clock=ManualClock(), record=DecisionRecording())
    for name in "ab":
        sched.can_move_kv(name, "x", 1)
    prompt = list(range(1000))
    cached = sched.schedule(prompt, exclude=["b"])
    assert sched.first_token(cached) and sched.finish(cached)
    sched.schedule(prompt, request_id=request_id, tenant="t", exclude=["a"])
    booked = sched.booked_seconds(request_id)
    assert booked > 0.0 and sched.tenant_seconds() == {"t": booked}
    pull = sched.pull_for(request_id, prompt)
    assert pull is not None and pull.source == "a"
    assert sched.pull_ended(request_id, 900) and sched.booked_seconds(request_id) < booked
    sched.note_session(request_id, SessionHint("talk"))
    assert sched.finish(request_id) and sched.records()[-1].session == SessionHint("talk")
    assert sched.booked_seconds(request_id) == 0.0 and not sched.pull_ended(request_id, 900)
    nothing_is_left(sched)


def test_an_id_made_up_for_a_pair_is_nobody_elses() -> None:
    sched = GlobalScheduler([WorkerSpec("p", role="prefill"), WorkerSpec("d", role="decode")], clock=ManualClock())
    taken = sched.schedule_pair([1, 2], request_id=Name("pair-2"))
    assert [sched.schedule_pair([1, 2]).request_id for _ in range(2)] == ["pair-3", "pair-4"]
    assert sched.finish(taken.request_id)
    sched.check()


def test_a_worker_that_an_exclusion_removes_is_not_taken_for_another() -> None:
    sched = GlobalScheduler(["a", "b", "c"], clock=ManualClock())

    class Removing(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            if "a" in sched.workers:
                sched.remove_worker("a")
            return str(self) == other

    assert sched.schedule([1], exclude=["a", Removing("b")]).worker == "c"
    with pytest.raises(UnknownWorker):
        sched.schedule([1], exclude=[Removing("d")])
    assert not sched.core.left_out
    sched.check()


# --- namespaces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_namespaces_that_call_back_are_one_namespace(policy: str) -> None:
    sched = GlobalScheduler(["a", "b"], policy=policy, clock=ManualClock())
    prompt = list(range(100))
    for step in range(6):

        def other(step: int = step) -> None:
            sched.finish(sched.schedule(prompt, namespace="salt" if step % 2 else Calling("salt")).request_id)
            sched.tick()

        for asked in ({}, {"explain": True}):
            sched.finish(sched.schedule(prompt, namespace=Calling("salt", other, times=3), **asked).request_id)
        assert sched.match(prompt, namespace=Calling("salt", other)).known_tokens == 100
        assert sched.explain(prompt, namespace=Calling("salt", other)).matched_tokens > 0
    assert sched.core.tree.stats()["namespaces"] == 1
    nothing_is_left(sched)


def test_a_namespace_that_removes_the_worker_leaves_nothing_marked_on_it() -> None:
    """Regression: marks of a worker that is gone, or a decision for it."""
    for step in range(4):
        sched = GlobalScheduler(["a", "b"], clock=ManualClock())
        gone = Calling("salt", lambda sched=sched: sched.remove_worker("a"))
        event = BlockStored([1], None, (1, 2, 3, 4), 4, namespace=gone)
        if step == 0:
            with pytest.raises(UnknownWorker):
                sched.apply("a", [event])
        elif step == 1:
            sched.schedule([1, 2, 3], namespace=gone, explain=True)
        elif step == 2:
            gone.times = 9
            gone.on_hash = lambda sched=sched: "a" in sched.workers and sched.remove_worker("a")
            sched.schedule([1, 2, 3], namespace=gone)
        else:
            placed = RequestPlaced(router="r", request_id="x", token_ids=[1, 2, 3], namespace=gone)
            with pytest.raises(UnknownWorker):
                sched.apply("a", [placed, RequestEnded(router="r", request_id="x")])
        assert list(sched.workers) == ["b"]
        sched.check()


def test_events_that_call_back_while_they_are_applied_keep_the_index_whole() -> None:
    """Regression: the inner call gave back the rows that the outer one's events were on their way into."""
    sched = GlobalScheduler(["a", "b"], clock=ManualClock())

    def inner() -> None:
        sched.apply("a", [BlockStored([50], None, (9, 9, 9, 9), 4, namespace="inner"), AllBlocksCleared()])

    for number in range(20):
        events = [
            BlockStored([number * 10 + one], None, (number, one, 3, 4), 4, namespace=Calling(("salt", one), inner))
            for one in range(3)
        ]
        sched.apply("a", events)
        assert sched.match([number, 1, 3, 4, 5], namespace=("salt", 1)).matched_tokens == {"a": 4}
        sched.check()
        if number % 5 == 4:
            sched.apply("a", [AllBlocksCleared()])


# --- threads ----------------------------------------------------------------------------------------------------------


class IdsOfThreads:
    """Threads that book under ids of every kind, in every way, and end what they booked."""

    def __init__(self, policy: str) -> None:
        self.sched = GlobalScheduler(["a", "b", "c"], policy=policy, clock=ManualClock())
        self.live: set[tuple[str, str]] = set()

    def turn(self, rng: random.Random, step: int) -> None:
        number = rng.getrandbits(64)
        kinds: list[Hashable] = [uuid.UUID(int=number), Colliding(number), Name(number), None, None, str(number)]
        asked: dict[str, Any] = rng.choice([{}, {"explain": True}, {"exclude": [rng.choice("abc")]}])
        one = rng.choice(kinds)
        space = rng.choice([None, Name("salt"), uuid.UUID(int=1)])
        decision = self.sched.schedule([*range(rng.randrange(1, 60))], request_id=one, namespace=space, **asked)
        assert one is None or decision.request_id is one
        name = type(decision.request_id).__name__, repr(decision.request_id)
        assert name not in self.live, "one id of two live requests"
        self.live.add(name)
        if rng.random() < 0.5:
            assert self.sched.first_token(decision.request_id)
        self.live.remove(name)
        assert (self.sched.finish if rng.random() < 0.7 else self.sched.cancel)(decision.request_id)


@pytest.mark.parametrize("policy", ["e2", "kv_cost"])
def test_no_id_of_many_threads_is_booked_twice_or_left(policy: str) -> None:
    """Regression: another thread's claim or end between the look and the claim made a duplicate of a new id, gave one
    made-up id to two requests, or let `finish` fail with KeyError; what was booked then never ended."""
    crowd = IdsOfThreads(policy)
    with endless_switches():
        run_together([(crowd.turn, 600)] * 4, seed=3)
    assert crowd.sched.stats()["scheduled"] == 2400
    nothing_is_left(crowd.sched)
