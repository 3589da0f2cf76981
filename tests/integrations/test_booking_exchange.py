"""What routers of one deployment report to each other: the exchange and its bounds, the way there and back, and that
prompts which share a prefix meet although they come to different routers. Needs no ray; the actor is
`test_ray_serve`'s.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import preble
from preble.config import SchedulerConfig
from preble.integrations import booking_exchange as module
from preble.integrations.booking_exchange import (
    NOTE_BYTES,
    QUEUE_MAX,
    BookingExchange,
    ExchangeClient,
    Note,
    ReceivedNotes,
)
from preble.integrations.prompt_extractors import Tokens
from preble.integrations.replica_scheduler import PEER_SECONDS, ReplicaMetadata, ReplicaScheduler, Ticket

REPLICAS = {name: ReplicaMetadata() for name in "abcd"}


def tokens(start: int, own: int = 0, count: int = 300) -> Tokens:
    """A prompt: a prefix that `start` names, and one token of its own."""
    return Tokens(np.array([*range(start, start + count), 90_000 + own], dtype=np.int32))


# --- the exchange -----------------------------------------------------------------------------------------------------


def test_a_router_receives_the_others_and_not_itself() -> None:
    async def talk() -> None:
        exchange = BookingExchange()
        await exchange.publish("one", [Note(1, "a"), Note(2, "b")])
        await exchange.publish("two", [Note(1, "c")])
        received = await exchange.poll("one", "", 0, 0.0)
        assert received.notes == [("two", Note(1, "c"))]
        assert not received.missed
        assert (await exchange.poll("one", received.epoch, received.after, 0.0)).notes == []
        await exchange.publish("two", [Note(1, "c", given_back=True)])
        assert (await exchange.poll("one", received.epoch, received.after, 0.0)).notes == [
            ("two", Note(1, "c", None, True))
        ]

    asyncio.run(talk())


def test_hearing_waits_for_news_of_others() -> None:
    async def talk() -> list[tuple[str, Note]]:
        exchange = BookingExchange()
        waiting = asyncio.ensure_future(exchange.poll("one", "", 0, 60.0))
        await asyncio.sleep(0)
        await exchange.publish("one", [Note(7, "a")])
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await exchange.publish("two", [Note(8, "a")])
        return (await waiting).notes

    assert asyncio.run(talk()) == [("two", Note(8, "a"))]


def test_the_exchange_keeps_so_many_bytes_and_says_what_was_missed() -> None:
    async def talk() -> None:
        exchange = BookingExchange(bytes_max=10 * NOTE_BYTES)
        await exchange.publish("one", [Note(0, "a")])
        first = await exchange.poll("two", "", 0, 0.0)
        await exchange.publish("one", [Note(number, "a") for number in range(1, 31)])
        received = await exchange.poll("two", first.epoch, first.after, 0.0)
        assert received.missed
        assert [note.booking for _, note in received.notes] == list(range(21, 31))
        late = await exchange.poll("three", "", 0, 0.0)
        assert not late.missed, "one that comes late has missed nothing that it was waiting for"
        assert len(late.notes) == 10
        again = await exchange.poll("two", "another exchange's", 5, 0.0)
        assert len(again.notes) == 10

    asyncio.run(talk())


def test_many_notes_come_in_several_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_MAX", 4)

    async def talk() -> list[int]:
        exchange, found, received = BookingExchange(), [], ReceivedNotes("", 0, False, [])
        await exchange.publish("one", [Note(number, "a") for number in range(10)])
        for _ in range(3):
            received = await exchange.poll("two", received.epoch, received.after, 0.0)
            found += [note.booking for _, note in received.notes]
        return found

    assert asyncio.run(talk()) == list(range(10))


# --- the way there ----------------------------------------------------------------------------------------------------


class Broken:
    """An exchange that fails, or is not there."""

    async def publish(self, router: str, notes: Sequence[Note]) -> None:
        raise ConnectionError

    async def poll(self, router: str, epoch: str, after: int, wait_seconds: float) -> ReceivedNotes:
        raise ConnectionError


async def until(condition: Any) -> None:
    """Wait for something that other tasks bring about."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it does not come about")


def test_notes_arrive_although_exchange_fail() -> None:
    async def talk() -> None:
        exchanges: list[Any] = [Broken(), Broken()]
        real, taken = BookingExchange(), []
        counters: Counter[str] = Counter()

        async def connect() -> Any:
            return exchanges.pop() if exchanges else real

        one = ExchangeClient(connect, lambda *_: None, counters, retry_seconds=0.001)
        two = ExchangeClient(connect, lambda *note: taken.append(note), Counter(), retry_seconds=0.001)
        one.publish(Note(1, "a"))
        one.start()
        await until(lambda: counters["exchange_failed"] == 2)
        two.start()
        one.publish(Note(2, "b"))
        await until(lambda: len(taken) == 2)
        assert taken == [(one.router, Note(1, "a")), (one.router, Note(2, "b"))]
        assert counters["notes_published"] == 2
        one.close()
        two.close()

    asyncio.run(talk())


def test_a_note_that_fails_takes_no_other_along() -> None:
    async def talk() -> None:
        exchange, taken = BookingExchange(), []
        counters: Counter[str] = Counter()

        async def connect() -> Any:
            return exchange

        def take(router: str, note: Note) -> None:
            if note.booking == 2:
                raise KeyError
            taken.append(note.booking)

        client = ExchangeClient(connect, take, counters)
        await exchange.publish("other", [Note(1, "a"), Note(2, "a"), Note(3, "a")])
        client.start()
        await until(lambda: taken == [1, 3])
        assert (counters["notes_failed"], counters["exchange_failed"]) == (1, 0)
        client.close()

    asyncio.run(talk())


def test_notes_that_wait_are_bounded() -> None:
    async def nowhere() -> Any:
        raise ConnectionError

    counters: Counter[str] = Counter()
    client = ExchangeClient(nowhere, lambda *_: None, counters)
    for number in range(QUEUE_MAX + 5):
        client.publish(Note(number, "a"))
    assert counters["notes_dropped"] == 5
    client.close()


# --- books that learn of each other -----------------------------------------------------------------------------------


class Routers:
    """Two routers of one deployment; what one reports, the other receives at once."""

    def __init__(self) -> None:
        self.clock = preble.ManualClock()
        self.one, self.two = (self._router(name) for name in ("one", "two"))

    def _router(self, name: str) -> ReplicaScheduler:
        config = SchedulerConfig(lease_seconds=3600.0)
        books = ReplicaScheduler(
            clock=self.clock, config=config, publish=lambda note: self._restore_accuracy(name, note)
        )
        books.update(REPLICAS)
        return books

    def _restore_accuracy(self, name: str, note: Note) -> None:
        (self.two if name == "one" else self.one).peer(name, note)

    def check(self) -> None:
        self.one.check()
        self.two.check()


@pytest.fixture
def routers() -> Routers:
    return Routers()


def test_siblings_meet_although_they_come_to_different_routers(routers: Routers) -> None:
    for group in range(6):
        homes = set()
        for call in range(4):
            books = (routers.one, routers.two)[call % 2]
            one = Ticket(f"{group}-{call}", tokens(10_000 * group, call, 3000))
            homes.add(books.place(one, REPLICAS))
            books.routed(one, one.replica)
            assert books.completed(one.replica, one.call_id)
        assert len(homes) == 1
    routers.check()


def test_a_booking_ends_everywhere(routers: Routers) -> None:
    done, left = Ticket("done", tokens(0)), Ticket("left", tokens(5000))
    home = routers.one.place(done, REPLICAS)
    routers.one.routed(done, home)
    routers.one.place(left, REPLICAS)
    assert routers.two.stats()["open_bookings"] == 2
    routers.one.completed(home, "done")
    routers.one.cancel(left)
    assert routers.two.stats()["open_bookings"] == 0
    match = routers.two.scheduler.match(tokens(0).token_ids)
    assert match.known_tokens > 0, "what was computed stays known"
    routers.check()


def test_a_call_that_moves_moves_everywhere(routers: Routers) -> None:
    call = Ticket("call", tokens(0))
    home = routers.one.place(call, REPLICAS)
    other = next(name for name in REPLICAS if name != home)
    routers.one.routed(call, other)
    assert routers.two.stats()["open_bookings"] == 1
    assert routers.two.scheduler.stats()["live_requests"] == 1
    routers.check()


def test_of_a_router_that_is_gone_nothing_stays_booked(routers: Routers) -> None:
    routers.one.place(Ticket("call", tokens(0)), REPLICAS)
    routers.clock.advance(PEER_SECONDS + 1.0)
    routers.two.tick()
    stats = routers.two.stats()
    assert (stats["open_bookings"], stats["bookings_ended_unreported"]) == (0, 1)
    assert routers.one.stats()["open_bookings"] == 1, "its own call has the lease's time"
    routers.check()


def test_notes_of_unknown_replicas_and_twice_the_same_change_nothing(routers: Routers) -> None:
    note = Note(1, "a", tokens(0))
    for _ in range(2):
        routers.two.peer("gone", note)
    routers.two.peer("gone", Note(2, "not reported", tokens(0)))
    routers.two.peer("gone", Note(3, "a"))
    assert routers.two.stats()["peer_bookings"] == 1
    routers.two.remove("a")
    assert routers.two.stats()["open_bookings"] == 0
    routers.check()
