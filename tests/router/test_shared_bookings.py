"""What routers tell each other of their requests: what is told, what is made of it, and what is lost, doubled, late or
nonsense. No socket; those are in test_sibling_routers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from preble import GlobalScheduler
from preble.errors import InvalidInput, ProtocolError
from preble.router import shared_bookings
from preble.router.shared_bookings import SharedBookings, SiblingBookings, decode, encode
from preble.scheduling.peer_bookings import peer_id
from preble.transport import wire
from preble.transport.messages import INT31, Events
from preble.types import AllBlocksCleared, RequestEnded, RequestPlaced, RequestPrefilled

PROMPT = np.arange(1, 9, dtype=np.int32)
WORKERS = ("a:1", "b:1")


class Pair:
    """One router's side, and what a sibling with a scheduler of its own makes of it. The test is the network."""

    def __init__(self, router_id: str = "r1", workers: tuple[str, ...] = WORKERS, **bounds: int) -> None:
        self.counters: Counter[str] = Counter()
        self.full: list[bool] = []
        self.scheduler = GlobalScheduler(workers)
        self.sibling = SiblingBookings(self.scheduler.apply, self.counters, **bounds)
        self.begin(router_id)

    def begin(self, router_id: str) -> None:
        """The router is started."""
        self.router_id, self.number = router_id, 0
        self.own = SharedBookings(router_id, lambda worker: worker != "own", self.full.append, self.counters)

    def place(
        self, name: str, worker: str = "a:1", prompt: Any = PROMPT, limit: int | None = 8, space: Any = None
    ) -> None:
        self.own.placed(name, worker, prompt, space, limit)

    def message(self) -> bytes:
        """What is new, as it is sent."""
        data = encode(self.router_id, self.number, self.own.take_news())
        self.number += 1
        return data

    def snapshot(self) -> bytes:
        return encode(self.router_id, self.number, self.own.snapshot())

    def meet(self) -> None:
        """The sibling is up to date."""
        self.message()
        self.sibling.take_snapshot(self.snapshot())

    def tell(self) -> None:
        self.sibling.take(self.message())

    def booked(self) -> dict[str, tuple[int, int]]:
        """Live and waiting requests by worker."""
        stats = self.scheduler.stats()["workers"]
        return {name: (row["live_requests"], row["waiting_requests"]) for name, row in stats.items()}


def test_a_request_is_booked_prefilled_and_ended_at_the_sibling() -> None:
    pair = Pair()
    pair.meet()
    pair.place("1")
    pair.tell()
    assert pair.booked() == {"a:1": (1, 1), "b:1": (0, 0)}
    pair.own.first_token("1", 3)
    pair.tell()
    assert pair.booked()["a:1"] == (1, 0)
    pair.own.ended("1", 5)
    pair.tell()
    assert pair.booked()["a:1"] == (0, 0) and len(pair.sibling) == len(pair.own) == 0
    assert pair.scheduler.match(PROMPT).best_tokens == len(PROMPT) - 1, (
        "what was computed there is expected to be cached"
    )
    assert pair.counters["received"] == 3 and pair.scheduler.stats()["peer_requests"] == 1
    pair.scheduler.check()


def test_one_that_was_given_up_leaves_no_expectation_of_output() -> None:
    pair = Pair()
    pair.meet()
    pair.place("1")
    pair.own.ended("1", None)
    pair.tell()
    assert pair.booked()["a:1"] == (0, 0) and pair.scheduler.stats()["peer_requests"] == 1


def test_workers_that_report_themselves_are_not_told_of() -> None:
    pair = Pair()
    pair.place("1", worker="own")
    pair.own.first_token("1", 0)
    pair.own.ended("1", 1)
    assert pair.own.take_news() == {} and len(pair.own) == 0 and pair.full == []


def test_a_second_first_token_and_a_second_end_are_told_once() -> None:
    pair = Pair()
    pair.place("1")
    for _ in range(2):
        pair.own.first_token("1", None)
    for _ in range(2):
        pair.own.ended("1", 2)
    kinds = [type(report) for report in pair.own.take_news()["a:1"]]
    assert kinds == [RequestPlaced, RequestPrefilled, RequestEnded]
    assert pair.own.take_news() == {}


def test_a_namespace_travels_and_one_that_cannot_is_left_out() -> None:
    pair = Pair()
    pair.meet()
    pair.place("1", space=("salt", "tenant", b"\x00", 7, (None,)))
    pair.place("2", space=("salt", 1.5))
    pair.tell()
    assert pair.booked()["a:1"][0] == 1 and pair.counters["left_out"] == 1
    assert (
        pair.scheduler.match(PROMPT, namespace=("salt", "tenant", b"\x00", 7, (None,))).best_tokens == len(PROMPT) - 1
    )
    assert pair.scheduler.match(PROMPT).best_tokens == 0


def test_an_output_limit_beyond_what_travels_is_cut() -> None:
    pair = Pair()
    pair.meet()
    pair.place("1", limit=10**15)
    (report,) = pair.own.snapshot()["a:1"]
    assert isinstance(report, RequestPlaced) and report.max_new_tokens == INT31
    pair.tell()
    assert pair.booked()["a:1"][0] == 1 and pair.counters["malformed"] == 0


def test_too_much_news_asks_to_be_taken_at_once() -> None:
    pair = Pair()
    pair.place("1")
    assert pair.full == [False]
    pair.place("2", prompt=np.zeros(shared_bookings.NEWS_BYTES_MAX // 4, np.int32))
    assert pair.full == [False, True]
    pair.own.take_news()
    for number in range(shared_bookings.NEWS_MAX):
        pair.place(f"n{number}")
    assert pair.full[-2:] == [False, True]


def test_a_snapshot_leaves_out_the_oldest_of_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    for number in range(10):
        pair.place(str(number))
    size = shared_bookings.bytes_of(RequestPlaced("r1", "0", PROMPT)) + shared_bookings.REPORT_BYTES
    monkeypatch.setattr(shared_bookings, "SNAPSHOT_BYTES_MAX", 4 * size)
    assert [report.request_id for report in pair.own.snapshot()["a:1"]] == ["6", "7", "8", "9"]
    assert pair.counters["left_out"] == 6


def test_many_reports_on_one_worker_are_several_frames_of_one_message() -> None:
    pair = Pair()
    pair.meet()
    for number in range(5000):
        pair.place(str(number))
    message = pair.message()
    assert len(decode(message).lots) == 2
    pair.sibling.take(message)
    assert pair.booked()["a:1"][0] == 5000
    big = np.zeros(2 << 20, np.int32)
    for number in range(3):
        pair.place(f"big{number}", worker="b:1", prompt=big)
    message = pair.message()
    assert len(decode(message).lots) == 3
    pair.sibling.take(message)
    assert pair.booked()["b:1"][0] == 3


# --- what the network does --------------------------------------------------------------------------------------------


def test_nothing_is_booked_before_the_first_snapshot_which_says_all() -> None:
    pair = Pair()
    pair.place("1")
    pair.own.first_token("1", 0)
    pair.tell()
    assert pair.booked()["a:1"] == (0, 0) and pair.sibling.behind
    pair.place("2")
    pair.meet()
    assert pair.booked()["a:1"] == (2, 1) and not pair.sibling.behind


def test_a_lost_message_is_noticed_by_the_next_and_mended_by_a_snapshot() -> None:
    pair = Pair()
    pair.meet()
    pair.place("1")
    pair.place("2")
    pair.tell()
    pair.own.ended("1", 4)
    pair.message()
    pair.message()
    pair.place("3")
    pair.tell()
    assert pair.sibling.behind and pair.counters["lost"] == 2 and pair.booked()["a:1"][0] == 2
    pair.own.first_token("2", 1)
    pair.meet()
    assert pair.booked()["a:1"] == (2, 1) and pair.counters["given_back"] == 1
    pair.tell()
    assert not pair.sibling.behind and pair.counters["lost"] == 2
    pair.scheduler.check()


def test_a_message_that_comes_again_and_an_old_snapshot_change_nothing() -> None:
    pair = Pair()
    pair.meet()
    pair.place("1")
    old = pair.snapshot()
    message = pair.message()
    pair.own.ended("1", 2)
    end = pair.message()
    for data in (message, end, message, end):
        pair.sibling.take(data)
    pair.sibling.take_snapshot(old)
    assert pair.booked()["a:1"] == (0, 0) and not pair.sibling.behind
    assert pair.counters["doubled"] == 3 and pair.scheduler.stats()["peer_requests"] == 1


def test_a_restarted_router_has_none_of_its_earlier_requests() -> None:
    pair = Pair()
    pair.meet()
    pair.place("1")
    pair.place("2", worker="b:1")
    pair.tell()
    pair.begin("r2")
    pair.place("1")
    pair.tell()
    assert pair.booked() == {"a:1": (0, 0), "b:1": (0, 0)} and pair.counters["given_back"] == 2
    pair.meet()
    assert pair.booked() == {"a:1": (1, 1), "b:1": (0, 0)}


def test_a_snapshot_repeats_no_first_token() -> None:
    """Policies count them."""
    pair = Pair()
    pair.meet()
    pair.place("1")
    pair.own.first_token("1", 0)
    pair.tell()
    applied: list[type] = []

    def apply(worker: str, reports: Sequence[Any]) -> int:
        applied.extend(map(type, reports))
        return pair.scheduler.apply(worker, reports)

    pair.sibling._apply = apply
    pair.sibling.take_snapshot(pair.snapshot())
    assert applied == [RequestPlaced], "which is booked already"
    assert pair.booked()["a:1"] == (1, 0)


def test_a_silent_router_has_nothing_until_it_says_so_again() -> None:
    pair = Pair()
    pair.meet()
    pair.place("1")
    pair.tell()
    pair.sibling.drop()
    assert pair.booked()["a:1"][0] == 0 and pair.counters["given_back"] == 1
    pair.tell()
    assert pair.booked()["a:1"][0] == 0 and pair.sibling.behind
    pair.meet()
    assert pair.booked()["a:1"][0] == 1


def test_a_worker_that_is_not_known_yet_is_counted_and_booked_with_the_next_snapshot() -> None:
    pair = Pair()
    pair.meet()
    pair.place("1", worker="c:1")
    pair.tell()
    pair.own.first_token("1", 0)
    pair.tell()
    assert pair.counters["unknown_worker"] == 1
    pair.scheduler.add_worker("c:1")
    pair.sibling.take_snapshot(pair.snapshot())
    assert pair.booked()["c:1"] == (1, 0)


def test_a_worker_that_was_removed_and_is_back_has_its_requests_with_the_next_snapshot() -> None:
    pair = Pair()
    pair.meet()
    pair.place("1")
    pair.own.first_token("1", 0)
    pair.tell()
    pair.scheduler.remove_worker("a:1")
    pair.scheduler.add_worker("a:1")
    assert pair.booked()["a:1"] == (0, 0)
    pair.sibling.take_snapshot(pair.snapshot())
    assert pair.booked()["a:1"] == (1, 0)
    pair.own.ended("1", 1)
    pair.tell()
    assert pair.booked()["a:1"] == (0, 0)


def test_what_the_scheduler_refuses_is_counted() -> None:
    pair = Pair()
    pair.meet()
    pair.place("1")
    pair.own.first_token("1", 100)  # more than the prompt has
    pair.tell()
    assert pair.counters["refused"] == 1 and pair.booked()["a:1"] == (1, 1)
    pair.own.ended("1", 2)
    pair.tell()
    assert pair.booked()["a:1"] == (0, 0)


def test_requests_beyond_the_bound_are_counted_and_not_booked() -> None:
    pair = Pair(peers_max=2)
    pair.meet()
    for name in "123":
        pair.place(name)
    pair.tell()
    assert pair.booked()["a:1"][0] == len(pair.sibling) == 2 and pair.counters["over_bound"] == 1
    for name in "123":
        pair.own.ended(name, 1)
    pair.tell()
    assert pair.booked()["a:1"][0] == len(pair.sibling) == 0


# --- nonsense ---------------------------------------------------------------------------------------------------------


def frame(*events: Any) -> bytes:
    return wire.encode(Events(0, events))


def packed(*fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


PLACED = RequestPlaced("r1", "1", PROMPT)
NONSENSE = {
    "no MessagePack": b"\xc1",
    "nothing": b"",
    "another version": packed("r1", 0, [], 2),
    "a field too many": packed("r1", 0, [], 1, 1),
    "a negative number": packed("r1", -1, [], 1),
    "no router": packed("", 0, [], 1),
    "a worker without a name": packed("r1", 0, [["", frame(PLACED)]], 1),
    "a frame that is none": packed("r1", 0, [["a:1", b"frame"]], 1),
    "another router's request": packed("r1", 0, [["a:1", frame(RequestPlaced("r2", "1", PROMPT))]], 1),
    "a cache event": packed("r1", 0, [["a:1", frame(AllBlocksCleared())]], 1),
    "another message": packed("r1", 0, [["a:1", wire.encode(wire.Bye())]], 1),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_is_counted_and_changes_nothing(what: str) -> None:
    pair = Pair()
    pair.sibling.take_snapshot(packed("r1", 0, [], 1))
    pair.sibling.take(NONSENSE[what])
    assert pair.counters["malformed"] == 1 and pair.booked()["a:1"] == (0, 0)
    pair.number = max(1, pair.number)
    pair.place("1")
    pair.tell()
    assert pair.sibling.behind, "what it said is missing"
    pair.sibling.take_snapshot(pair.snapshot())
    assert pair.booked()["a:1"] == (1, 1)


def test_a_message_that_is_wrong_in_its_middle_is_taken_up_to_there_and_asked_for_again() -> None:
    pair = Pair()
    pair.meet()
    pair.sibling.take(packed("r1", pair.number, [["a:1", frame(PLACED)], ["b:1", b"frame"]], 1))
    assert pair.booked()["a:1"] == (1, 1) and pair.sibling.behind and pair.counters["malformed"] == 1


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 400))
def test_any_bytes_raise_nothing_but_protocol_errors(data: bytes, at: int) -> None:
    whole = encode("r1", 3, {"a:1": [PLACED, RequestPrefilled("r1", "1", 2), RequestEnded("r1", "1", 3)]})
    for damaged in (data, whole[:at] + data, whole[:at] + data + whole[at + len(data) :]):
        try:
            for _, report in decode(damaged).reports():
                assert report.router == decode(damaged).router_id
        except ProtocolError:
            pass


def test_reports_that_do_not_travel_are_the_senders_fault() -> None:
    with pytest.raises(InvalidInput):
        encode("r1", 0, {"a:1": [RequestPlaced("r1", "", PROMPT)]})


# --- everything in any order ------------------------------------------------------------------------------------------


class Siblings(RuleBasedStateMachine):
    """A router, a network that loses, doubles, delays and damages, and a sibling; beside them a list of what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()
        self.lives = 1
        self.names = 0
        self.running: dict[str, tuple[str, bool]] = {}  # the model: worker, prefilled
        self.wire: deque[tuple[str, bytes]] = deque()  # in order, as a socket keeps it
        self.old: list[tuple[str, bytes]] = []

    def some(self, place: int) -> str:
        return list(self.running)[place % len(self.running)]

    @rule(worker=st.sampled_from(WORKERS), length=st.integers(1, 8), space=st.sampled_from([None, "x"]))
    def place(self, worker: str, length: int, space: str | None) -> None:
        self.names += 1
        self.pair.place(str(self.names), worker, PROMPT[:length], space=space)
        self.running[str(self.names)] = (worker, False)

    @precondition(lambda self: self.running)
    @rule(place=st.integers(0, 99))
    def first_token(self, place: int) -> None:
        name = self.some(place)
        self.pair.own.first_token(name, 0)
        self.running[name] = (self.running[name][0], True)

    @precondition(lambda self: self.running)
    @rule(place=st.integers(0, 99), output=st.sampled_from([None, 0, 3]))
    def end(self, place: int, output: int | None) -> None:
        name = self.some(place)
        self.pair.own.ended(name, output)
        del self.running[name]

    @rule()
    def send(self) -> None:
        self.wire.append(("reports", self.pair.message()))

    @rule()
    def answer_with_a_snapshot(self) -> None:
        self.send()
        self.wire.append(("snapshot", self.pair.snapshot()))

    @precondition(lambda self: self.wire)
    @rule(count=st.integers(1, 5))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.wire))):
            self._take(*self.wire.popleft())

    def _take(self, kind: str, data: bytes) -> None:
        self.old = [*self.old[-5:], (kind, data)]
        (self.pair.sibling.take if kind == "reports" else self.pair.sibling.take_snapshot)(data)

    @precondition(lambda self: self.wire)
    @rule()
    def lose(self) -> None:
        self.wire.popleft()

    @precondition(lambda self: self.wire)
    @rule(at=st.integers(0, 500), byte=st.integers(0, 255))
    def damage(self, at: int, byte: int) -> None:
        """A byte of it is another one; only where that can be seen, for who writes here is one of us."""
        kind, data = self.wire.popleft()
        changed = bytearray(data)
        changed[at % len(data)] = byte
        try:
            [*decode(bytes(changed)).reports()]
        except ProtocolError:
            self._take(kind, bytes(changed))

    @precondition(lambda self: [one for one in self.old if decodes(one[1], self.pair.router_id)])
    @rule(place=st.integers(0, 99))
    def again(self, place: int) -> None:
        """What has come comes again; of an earlier life nothing does, for its connection is gone."""
        known = [one for one in self.old if decodes(one[1], self.pair.router_id)]
        self._take(*known[place % len(known)])

    @rule()
    def restart(self) -> None:
        self.lives += 1
        self.pair.begin(f"r{self.lives}")
        self.running.clear()
        self.wire.clear()

    @rule()
    def silence(self) -> None:
        self.pair.sibling.drop()

    @rule(worker=st.sampled_from(WORKERS))
    def lose_the_worker(self, worker: str) -> None:
        """It leaves here and comes back, so a snapshot is asked for."""
        self.pair.scheduler.remove_worker(worker)
        self.pair.scheduler.add_worker(worker)
        self.pair.sibling.behind = True

    @rule()
    def settle(self) -> None:
        """All that is under way comes, and a snapshot if one is needed: then both know the same."""
        self.send()
        while self.wire:
            self._take(*self.wire.popleft())
        if self.pair.sibling.behind or self.pair.sibling.router_id != self.pair.router_id:
            self.answer_with_a_snapshot()
            while self.wire:
                self._take(*self.wire.popleft())
        core, router = self.pair.scheduler.core, self.pair.router_id
        live = set(core.leases)
        assert live == {peer_id(worker, router, name) for name, (worker, _) in self.running.items()}
        waiting = Counter(worker for worker, prefilled in self.running.values() if not prefilled)
        assert {worker: row[1] for worker, row in self.pair.booked().items()} == {w: waiting[w] for w in WORKERS}

    @invariant()
    def nothing_else_is_booked(self) -> None:
        self.pair.scheduler.check()
        assert len(self.pair.scheduler.core.leases) <= len(self.pair.sibling)
        assert len(self.pair.own) == len(self.running)


def decodes(data: bytes, router_id: str) -> bool:
    """Whether it is a message of that router."""
    try:
        return decode(data).router_id == router_id
    except ProtocolError:
        return False


TestSiblings = Siblings.TestCase
TestSiblings.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
