"""Routers that tell each other their bookings over real sockets: who comes, goes, hangs, restarts or reads too slowly.
What messages mean is tested in test_shared_bookings. Waits end when something happens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq

from preble import GlobalScheduler, SamplingParams
from preble.errors import InvalidConfig
from preble.router import Router, shared_bookings
from preble.router.sibling_routers import SiblingRouters
from tests.support.attach import FakeServer
from tests.support.transport import assert_bookings_are_even, asynchronous, fast, until

PROMPT = np.arange(1, 9, dtype=np.int32)
SERVER, OWN_WORKER = "127.0.0.1:30000", "mine"
ADDRESSES = {SERVER: "http://127.0.0.1:30000", OWN_WORKER: "tcp://127.0.0.1:5000"}
_lives = itertools.count(1)


async def known(condition: Callable[[], Any]) -> None:
    """Wait until what happened at one side has come to another."""
    await until(condition, "the sibling knows")


class Side:
    """One router, as far as its siblings are concerned."""

    def __init__(self, directory: Path, index: int, count: int, **times: Any) -> None:
        self.router: Any = SimpleNamespace(
            router_id=f"router-{next(_lives)}",
            scheduler=GlobalScheduler([SERVER, OWN_WORKER]),
            fleet=SimpleNamespace(
                worker=lambda worker_id: SimpleNamespace(address=ADDRESSES[worker_id], namespace=None)
            ),
            siblings=None,
        )
        ends = [f"ipc://{directory}/{i}.bookings" for i in range(count)]
        usual = {"report_seconds": 0.005, "beat_seconds": 0.02, "silent_seconds": 60.0}
        others = [end for i, end in enumerate(ends) if i != index]
        self.siblings = SiblingRouters(self.router, ends[index], others, **{**usual, **times})
        self.siblings.start()

    @property
    def own(self) -> shared_bookings.SharedBookings:
        return self.siblings.own

    def place(self, name: str, worker: str = SERVER, prompt: Any = PROMPT) -> None:
        self.own.placed(name, worker, prompt, None, 8)

    def booked(self) -> int:
        """Requests of others."""
        return int(self.router.scheduler.stats()["peer_bookings"])

    def count(self, what: str) -> int:
        return int(self.siblings.stats()[what])

    async def know(self, others: int = 1) -> None:
        """Until it hears so many others, and is up to date."""
        await known(
            lambda: (
                self.count("connected") >= others and not any(one.bookings.behind for one in self.siblings._siblings)
            )
        )


@contextlib.asynccontextmanager
async def sides(directory: Path, count: int = 2, **times: Any) -> AsyncIterator[list[Side]]:
    """So many siblings that know each other; those in the list at the end are closed."""
    made = [Side(directory, index, count, **times) for index in range(count)]
    try:
        for side in made:
            await side.know(count - 1)
        yield made
    finally:
        for side in made:
            await side.siblings.close()


@asynchronous
async def test_each_books_what_the_others_have_at_servers(tmp_path: Path) -> None:
    async with sides(tmp_path, 3) as (one, two, three):
        one.place("1")
        one.place("2", worker=OWN_WORKER)
        two.place("1")
        await known(lambda: (one.booked(), two.booked(), three.booked()) == (1, 1, 2))
        one.own.first_token("1", 0)
        await known(lambda: three.router.scheduler.stats()["workers"][SERVER]["waiting_requests"] == 1)
        one.own.ended("1", 3)
        two.own.ended("1", None)
        await known(lambda: (one.booked(), two.booked(), three.booked()) == (0, 0, 0))
        assert three.count("received") == 5 and one.count("sent") == 3
        assert not any(side.count(what) for side in (one, two, three) for what in ("lost", "malformed", "refused"))


@asynchronous
async def test_a_newcomer_is_told_all_that_runs(tmp_path: Path) -> None:
    old = Side(tmp_path, 0, 2)
    for number in range(10):
        old.place(str(number))
    old.own.first_token("3", 2)
    new = Side(tmp_path, 1, 2)
    try:
        await known(lambda: new.booked() == 10)
        assert new.router.scheduler.stats()["workers"][SERVER]["waiting_requests"] == 9
        assert new.count("snapshots_received") >= 1
    finally:
        for side in (old, new):
            await side.siblings.close()


@asynchronous
async def test_one_that_leaves_in_order_takes_its_bookings_along(tmp_path: Path) -> None:
    async with sides(tmp_path, report_seconds=60.0) as made:
        one, two = made
        one.place("1")
        await known(lambda: two.booked() == 1)
        one.own.ended("1", None)  # as a router does that is closed
        await one.siblings.close()
        await known(lambda: two.booked() == 0)
        assert two.count("given_back") == 0 and one.router.siblings is None
        one.place("2")
        await one.siblings.close()


@asynchronous
async def test_a_restarted_one_has_nothing_left_of_its_earlier_life(tmp_path: Path) -> None:
    async with sides(tmp_path) as made:
        two = made[1]
        made[0].place("1")
        await known(lambda: two.booked() == 1)
        made[0].own.take_news()
        await made[0].siblings.close()  # it was killed: nothing was told of the end
        assert two.booked() == 1
        made[0] = Side(tmp_path, 0, 2)
        await known(lambda: two.booked() == 0)
        made[0].place("1")
        made[0].place("2")
        await known(lambda: two.booked() == 2)
        two.place("1")
        await known(lambda: made[0].booked() == 1)


@asynchronous
async def test_one_that_is_silent_has_nothing_until_it_speaks_again(tmp_path: Path) -> None:
    async with sides(tmp_path, silent_seconds=0.5) as (one, two):
        one.place("1")
        await known(lambda: two.booked() == 1)
        assert one.siblings._beating is not None
        one.siblings._beating.cancel()  # it hangs
        await known(lambda: two.booked() == 0)
        assert (two.count("connected"), two.count("silent"), two.count("given_back")) == (0, 1, 1)
        one.siblings._beating = asyncio.ensure_future(one.siblings._beat())
        await known(lambda: two.booked() == 1)
        assert two.count("connected") == 1


@asynchronous
async def test_who_reads_too_slowly_loses_messages_and_is_told_again(tmp_path: Path) -> None:
    async with sides(tmp_path, queue_messages=4) as (one, two):
        reader = two.siblings._siblings[0]._reader
        assert reader is not None
        descriptor, reader._descriptor = reader._descriptor, -1
        asyncio.get_running_loop().remove_reader(descriptor)  # it is busy elsewhere
        for number in range(400):
            one.place(str(number), prompt=np.zeros(2000, np.int32))
            one.siblings._flush()
        for number in range(390):
            one.own.ended(str(number), 1)
        one.siblings._flush()
        reader._descriptor = descriptor
        asyncio.get_running_loop().add_reader(descriptor, reader._read)
        reader._read()
        await known(lambda: two.booked() == 10)
        assert two.count("lost") > 0 and two.count("malformed") == 0
        two.router.scheduler.check()


@asynchronous
async def test_a_lost_last_message_is_noticed_by_the_next_sign_of_life(tmp_path: Path) -> None:
    async with sides(tmp_path) as (one, two):
        one.siblings._number += 1  # a message that never arrives
        one.place("1")
        one.own.take_news()
        await known(lambda: two.booked() == 1)
        assert two.count("lost") == 1


@asynchronous
async def test_a_worker_that_comes_is_asked_for(tmp_path: Path) -> None:
    async with sides(tmp_path) as (one, two):
        two.router.scheduler.remove_worker(SERVER)
        one.place("1")
        await known(lambda: two.count("unknown_worker") == 1)
        two.router.scheduler.add_worker(SERVER)
        two.siblings.worker_available()
        await known(lambda: two.booked() == 1)


@asynchronous
async def test_nonsense_on_the_socket_ends_nothing(tmp_path: Path) -> None:
    async with sides(tmp_path) as (one, two):
        (near,) = one.siblings._publishers
        publisher = near.socket
        for parts in ([b"r"], [b"r", b"nonsense"], [b"r", b"", b"\xff"], [b"s", b"x"], [b"rumour", b"x"]):
            publisher.send_multipart(parts)
        context = zmq.Context()
        stranger = context.socket(zmq.SUB)
        stranger.connect(two.siblings._own_endpoint)
        for topic in (b"", b"s", b"s\xff\x00", b"x" * 1000):
            stranger.subscribe(topic)
        one.place("1")
        await known(lambda: two.booked() == 1)
        assert two.count("malformed") >= 3
        two.place("1")
        await known(lambda: one.booked() == 1)
        stranger.close(0)
        context.term()


@asynchronous
async def test_reports_of_one_moment_share_a_message(tmp_path: Path) -> None:
    async with sides(tmp_path, beat_seconds=30.0) as (one, two):
        before = one.siblings._number
        for number in range(100):
            one.place(str(number))
        await known(lambda: two.booked() == 100)
        assert one.siblings._number == before + 1


@asynchronous
async def test_news_waits_until_some_time_after_the_last_message(tmp_path: Path) -> None:
    async with sides(tmp_path, report_seconds=60.0) as (one, two):
        one.place("1")
        await known(lambda: two.booked() == 1)
        one.place("2")
        assert one.siblings._due is not None
        assert one.siblings._due.when() == one.siblings._sent_at + 60.0
        one.place("3", prompt=np.zeros(shared_bookings.NEWS_BYTES_MAX // 4, np.int32))  # too much to wait
        await known(lambda: two.booked() == 3)
        assert one.siblings._due is None


@asynchronous
async def test_a_snapshot_is_not_asked_for_again_at_once(tmp_path: Path) -> None:
    async with sides(tmp_path, beat_seconds=30.0) as (one, two):
        sibling = two.siblings._siblings[0]
        sibling._ask_beats = 0  # the last asking was long ago
        asked = sibling._asked
        for _ in range(10):
            two.siblings.worker_available()
        assert sibling._asked == asked + 1
        await known(lambda: not sibling.bookings.behind)
        two.siblings.worker_available()
        assert sibling._asked == asked + 1 and sibling.bookings.behind
        sibling.beat(100)
        sibling.beat(100)
        assert sibling._asked == asked + 2
        await known(lambda: not sibling.bookings.behind)


@asynchronous
async def test_a_lone_router_sends_nothing_of_its_requests(tmp_path: Path) -> None:
    one = Side(tmp_path, 0, 2)
    try:
        one.place("1")
        await known(lambda: one.siblings._due is None)
        assert one.count("sent") == 0 and one.count("shared") == 1
        assert one.siblings._number >= 1, "who should have had it will see that it is lost"
    finally:
        await one.siblings.close()


@asynchronous
async def test_an_endpoint_that_cannot_be_had_is_said_and_leaves_nothing_open(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot listen"):
        Side(tmp_path / "nowhere", 0, 2)


# --- with routers -----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def attached(directory: Path, server: FakeServer) -> AsyncIterator[list[Router]]:
    """Two routers before a server, as two processes have them."""
    ends = [f"ipc://{directory}/{i}.bookings" for i in range(2)]
    made = [Router.attach(server.url, config=fast()) for _ in ends]
    siblings = []
    try:
        for router, own, other in zip(made, ends, reversed(ends), strict=True):
            await router.start()
            siblings.append(SiblingRouters(router, own, [other], beat_seconds=0.02, silent_seconds=60.0))
            siblings[-1].start()
        await known(lambda: all(router.stats()["siblings"]["connected"] for router in made))
        yield made
    finally:
        for router in made:
            await router.close()
        for one in siblings:
            await one.close()
        await server.kill()


def of_peers(router: Router) -> tuple[int, int]:
    """Bookings for the sibling, and those of them without a first token."""
    row = next(iter(router.scheduler.stats()["workers"].values()))
    return int(router.scheduler.stats()["peer_bookings"]), int(row["waiting_requests"])


@asynchronous
async def test_a_request_is_shared_from_its_sending_to_its_end(tmp_path: Path) -> None:
    server = await FakeServer("sglang", events=False).start()
    async with attached(tmp_path, server) as (one, two):
        gate = asyncio.Event()

        async def ask() -> list[int]:
            tokens, chunks = [], one.generate([1, 2, 3, 4, 5], SamplingParams(max_new_tokens=4))
            async for chunk in chunks:
                tokens += chunk.token_ids
                await gate.wait()
            return tokens

        server.pause_seconds = 0.02
        asked = asyncio.ensure_future(ask())
        await known(lambda: of_peers(two)[0] == 1)
        gate.set()
        assert len(await asked) == 4
        await known(lambda: of_peers(two)[0] == 0)
        assert two.stats()["siblings"]["received"] == 3
        placement = await one.place([1, 2, 3], max_new_tokens=5)
        await known(lambda: of_peers(two) == (1, 1))
        placement.first_token()
        placement.first_token()
        await known(lambda: of_peers(two) == (1, 0))
        placement.finish(5)
        await known(lambda: of_peers(two) == (0, 0))
        assert two.stats()["siblings"]["received"] == 6
        for router in (one, two):
            assert_bookings_are_even(router)


@asynchronous
async def test_one_that_is_given_up_or_moved_is_given_back(tmp_path: Path) -> None:
    server = await FakeServer("sglang", events=False).start()
    async with attached(tmp_path, server) as (one, two):
        placement = await one.place([1, 2, 3], max_new_tokens=5)
        await known(lambda: of_peers(two)[0] == 1)
        await placement.failed("it broke off")  # and goes on at the only server that there is
        await known(lambda: two.stats()["siblings"]["received"] == 3)
        assert of_peers(two)[0] == 1
        placement.cancel()
        await known(lambda: of_peers(two)[0] == 0)


@asynchronous
async def test_lost_cache_events_of_a_server_leave_what_siblings_have_there(tmp_path: Path) -> None:
    server = await FakeServer("sglang", events=False).start()
    async with attached(tmp_path, server) as (one, two):
        placement = await one.place([1, 2, 3], max_new_tokens=5)
        await known(lambda: of_peers(two)[0] == 1)
        next(iter(two.fleet.workers.values())).on_resync()
        assert of_peers(two)[0] == 1
        placement.cancel()
