"""Following an engine's event sockets, against a publisher with real sockets: what is lost, cut, doubled, reordered or
restarted reaches the listener once and in order, or is reported as lost. What events mean: test_kv_event_codec.py."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio

from preble.errors import InvalidConfig, TransportError
from preble.transport.engine_servers.kv_event_codec import LoadReport
from preble.transport.engine_servers.kv_event_subscriber import EventFeed, FeedConfig
from preble.transport.engine_servers.server_info import EventSource
from tests.support.attach import FakePublisher, batch
from tests.support.transport import asynchronous, until

RESYNC = "forget"
both_framings = pytest.mark.parametrize("with_topic", [True, False], ids=["topic", "no-topic"])
# Only what a test is about should find a loss.
NO_AUDIT = FeedConfig(audit_seconds=1000.0)


class Heard:
    """What a feed reported, in order: payloads, and RESYNC where it said to forget."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.loads: list[LoadReport] = []

    def on_payload(self, payload: bytes) -> None:
        self.told.append(payload)

    def on_resync(self) -> None:
        self.told.append(RESYNC)

    def on_load(self, report: LoadReport) -> None:
        self.loads.append(report)


@contextlib.asynccontextmanager
async def following(
    publisher: FakePublisher, config: FeedConfig = NO_AUDIT, *, next_seq: int = 0, load: str = ""
) -> AsyncIterator[tuple[EventFeed, Heard]]:
    """A feed that has caught up and is subscribed."""
    heard, context = Heard(), zmq.asyncio.Context()
    source = EventSource(publisher.endpoint, publisher.replay_endpoint, publisher.topic.decode(), load, "load")
    feed = EventFeed(source, heard, config, context=context, next_seq=next_seq)
    running = asyncio.ensure_future(feed.run())
    try:
        await publisher.subscribed.wait()
        await feed.caught_up()
        yield feed, heard
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        context.destroy(linger=0)


@contextlib.asynccontextmanager
async def published(**options: Any) -> AsyncIterator[FakePublisher]:
    publisher = FakePublisher(**options)
    try:
        yield publisher
    finally:
        await publisher.close()


def numbered(count: int, start: int = 0, life: float = 0.0) -> list[bytes]:
    """Batches that differ, each a second after the one before."""
    return [batch(1000.0 + life + n, ["Else", n, life]) for n in range(start, start + count)]


async def received_all(heard: Heard, told: list[Any]) -> None:
    await until(lambda: len(heard.told) >= len(told), f"{len(told)} were reported")
    assert heard.told == told


@pytest.mark.timeout(60)
@asynchronous
async def test_a_context_may_be_destroyed_before_its_feed_has_ended() -> None:
    """An owner that is cancelled twice does not wait: it would for ever, in `term`, for a socket that is open."""
    async with published() as publisher:
        context = zmq.asyncio.Context()
        feed = EventFeed(EventSource(publisher.endpoint, publisher.replay_endpoint, ""), Heard(), context=context)
        running = asyncio.ensure_future(feed.run())
        await feed.caught_up()
        running.cancel()
        context.destroy(linger=0)
        await asyncio.gather(running, return_exceptions=True)
        assert context.closed


@both_framings
@asynchronous
async def test_what_the_publisher_keeps_comes_first_and_then_what_it_publishes(with_topic: bool) -> None:
    batches = numbered(8)
    async with published(with_topic=with_topic) as publisher:
        for payload in batches[:5]:
            await publisher.publish(payload)
        async with following(publisher) as (feed, heard):
            for payload in batches[5:]:
                await publisher.publish(payload)
            await received_all(heard, batches)
            assert feed.next_seq == 8 and feed.counters.resyncs == feed.counters.gaps == 0


@asynchronous
async def test_a_later_session_of_the_same_life_goes_on_where_it_stopped() -> None:
    batches = numbered(6)
    async with published() as publisher:
        for payload in batches[:5]:
            await publisher.publish(payload)
        async with following(publisher, next_seq=3) as (_, heard):
            await publisher.publish(batches[5])
            await received_all(heard, batches[3:])


@both_framings
@asynchronous
async def test_a_gap_is_asked_for_again(with_topic: bool) -> None:
    batches = numbered(9)
    async with published(with_topic=with_topic) as publisher, following(publisher) as (feed, heard):
        for n, payload in enumerate(batches):
            await publisher.publish(payload, lose=n in (3, 4, 5))
        await received_all(heard, batches)
        assert feed.counters.gaps == 1 and feed.counters.resyncs == 0


@asynchronous
async def test_frames_that_come_twice_or_late_are_dropped_and_counted() -> None:
    batches = numbered(6)
    async with published() as publisher, following(publisher) as (feed, heard):
        for seq in (0, 1, 1, 0, 3, 2, 4, 3, 5):
            while publisher.next_seq <= seq:
                await publisher.publish(batches[publisher.next_seq], lose=True)
            await publisher.send(seq, batches[seq])
        await received_all(heard, batches)
        await until(lambda: feed.counters.duplicates >= 3, "what came twice was counted")
        assert feed.counters.restarts == feed.counters.resyncs == 0


@both_framings
@pytest.mark.parametrize("seed", range(3))
@asynchronous
async def test_a_storm_of_lost_doubled_and_reordered_frames_and_cut_replays_loses_nothing(
    with_topic: bool, seed: int
) -> None:
    rng, batches, late = random.Random(seed), numbered(300), list[tuple[int, bytes]]()
    config = FeedConfig(audit_seconds=0.05, replay_seconds=0.5)
    async with published(with_topic=with_topic) as publisher, following(publisher, config) as (feed, heard):
        for n, payload in enumerate(batches):
            await publisher.publish(payload, lose=True)
            fate = rng.random()
            if fate < 0.1:
                continue
            late.append((n, payload))
            if fate < 0.2:
                late.append((n, payload))
            if fate > 0.5:
                rng.shuffle(late)
                for frame in late:
                    await publisher.send(*frame)
                late.clear()
                await asyncio.sleep(0)
            if fate > 0.95:
                publisher.cut_after = rng.randrange(1, 4)
        await received_all(heard, batches)
        assert feed.counters.resyncs == feed.counters.restarts == 0 and feed.counters.gaps > 0


@asynchronous
async def test_a_loss_with_nothing_after_it_is_found_by_an_audit() -> None:
    batches = numbered(4)
    async with published() as publisher, following(publisher, FeedConfig(audit_seconds=0.05)) as (feed, heard):
        for n, payload in enumerate(batches):
            await publisher.publish(payload, lose=n >= 2)
        await received_all(heard, batches)
        before = feed.counters.replays
        await until(lambda: feed.counters.replays > before + 2, "audits went on")
        assert heard.told == batches and feed.counters.restarts == 0


@both_framings
@asynchronous
async def test_a_replay_that_is_cut_short_is_noticed_and_asked_for_again(with_topic: bool) -> None:
    batches = numbered(12)
    config = FeedConfig(audit_seconds=1000.0, replay_seconds=0.1)
    async with published(with_topic=with_topic) as publisher, following(publisher, config) as (feed, heard):
        await publisher.publish(batches[0])
        await received_all(heard, batches[:1])
        publisher.cut_after = 4
        for n, payload in enumerate(batches[1:], 1):
            await publisher.publish(payload, lose=n < 11)
        await received_all(heard, batches)
        assert feed.counters.replays_cut >= 1 and feed.counters.resyncs == 0
        assert publisher.asked[-2:] == [0, 3], "asked again from the newest that came"


@both_framings
@asynchronous
async def test_a_replay_with_a_hole_in_it_is_noticed_and_asked_for_again(with_topic: bool) -> None:
    batches = numbered(12)
    async with published(with_topic=with_topic) as publisher, following(publisher) as (feed, heard):
        await publisher.publish(batches[0])
        await received_all(heard, batches[:1])
        publisher.drop_once = {5, 6, 7}
        for n, payload in enumerate(batches[1:], 1):
            await publisher.publish(payload, lose=n < 11)
        await received_all(heard, batches)
        assert feed.counters.replays_cut == 1 and feed.counters.resyncs == 0


@asynchronous
async def test_what_is_kept_no_more_is_lost_for_good_and_said_so() -> None:
    batches = numbered(20)
    config = FeedConfig(audit_seconds=1000.0, max_held_batches=2)
    async with published(kept=5) as publisher, following(publisher, config) as (feed, heard):
        await publisher.publish(batches[0])
        await received_all(heard, batches[:1])
        for n, payload in enumerate(batches[1:], 1):
            await publisher.publish(payload, lose=n < 19)
        await received_all(heard, [batches[0], RESYNC, *batches[15:]])
        assert feed.counters.resyncs == 1 and feed.next_seq == 20


@asynchronous
async def test_to_come_late_to_a_publisher_that_has_dropped_its_oldest_forgets_nothing() -> None:
    batches = numbered(9)
    async with published(kept=4) as publisher:
        for payload in batches[:8]:
            await publisher.publish(payload)
        async with following(publisher) as (feed, heard):
            await publisher.publish(batches[8])
            await received_all(heard, batches[4:])
            assert feed.counters.resyncs == 0


@asynchronous
async def test_without_a_replay_socket_a_gap_is_a_loss() -> None:
    batches = numbered(7)
    async with published(replay=False) as publisher:
        await publisher.publish(batches[0])
        async with following(publisher) as (feed, heard):
            for n, payload in enumerate(batches[1:], 1):
                await publisher.publish(payload, lose=n == 3)
            await received_all(heard, [*batches[1:3], RESYNC, *batches[4:]])
            assert feed.counters.gaps == feed.counters.resyncs == 1


@asynchronous
async def test_a_replay_that_is_not_answered_makes_a_gap_a_loss_and_is_counted() -> None:
    batches = numbered(4)
    config = FeedConfig(audit_seconds=1000.0, replay_seconds=0.05)
    async with published() as publisher, following(publisher, config) as (feed, heard):
        publisher.mute = True
        for n, payload in enumerate(batches):
            await publisher.publish(payload, lose=n == 2)
        await received_all(heard, [*batches[:2], RESYNC, batches[3]])
        assert feed.counters.replays_unanswered >= 1


# --- another life of the publisher ------------------------------------------------------------------------------------


@asynchronous
async def test_a_number_that_falls_back_at_a_later_time_is_a_restart() -> None:
    old, new = numbered(5), numbered(3, life=100.0)
    async with published() as publisher, following(publisher) as (feed, heard):
        for payload in old:
            await publisher.publish(payload)
        await received_all(heard, old)
        publisher.next_seq = 0
        publisher.buffer.clear()
        for n, payload in enumerate(new):
            await publisher.publish(payload, lose=n < 2)
        await received_all(heard, [*old, RESYNC, *new])
        assert feed.counters.restarts == feed.counters.resyncs == 1 and feed.next_seq == 3


@pytest.mark.parametrize("batches_of_new_life", [2, 9])
@asynchronous
async def test_a_restart_that_no_number_shows_is_found_when_the_connection_is_there_again(
    batches_of_new_life: int,
) -> None:
    """The new life has published less, or more, than the old one, all of it before we could receive it."""
    old, new = numbered(5), numbered(batches_of_new_life, life=100.0)
    first = FakePublisher()
    async with following(first) as (feed, heard):
        for payload in old:
            await first.publish(payload)
        await received_all(heard, old)
        await first.close()
        second = FakePublisher(ports=(first.ports[0], first.ports[1]))
        try:
            for payload in new:
                await second.publish(payload)
            await received_all(heard, [*old, RESYNC, *new])
            assert feed.counters.restarts == 1
        finally:
            await second.close()


@asynchronous
async def test_without_a_replay_socket_a_broken_connection_is_a_loss() -> None:
    old, new = numbered(3), numbered(2, life=100.0)
    first = FakePublisher(replay=False)
    async with following(first) as (_, heard):
        for payload in old:
            await first.publish(payload)
        await received_all(heard, old)
        await first.close()
        second = FakePublisher(ports=(first.ports[0], 0), replay=False)
        try:
            await second.subscribed.wait()
            await until(lambda: RESYNC in heard.told, "the broken connection was noticed")
            for payload in new:
                await second.publish(payload)
            await received_all(heard, [*old, RESYNC, *new])
        finally:
            await second.close()


# --- bounds and nonsense ----------------------------------------------------------------------------------------------


@asynchronous
async def test_more_than_may_wait_behind_a_gap_is_dropped_and_asked_for_again() -> None:
    batches = numbered(40)
    config = FeedConfig(audit_seconds=0.05, replay_seconds=0.1, max_held_batches=3, max_replay_batches=7)
    async with published() as publisher, following(publisher, config) as (feed, heard):
        publisher.cut_after = 1
        for n, payload in enumerate(batches):
            await publisher.publish(payload, lose=n < 2)
        await received_all(heard, batches)
        assert feed.counters.resyncs == 0


@asynchronous
async def test_frames_of_another_shape_are_counted_and_harm_nothing() -> None:
    batches = numbered(2)
    async with published() as publisher, following(publisher) as (feed, heard):
        await publisher.publish(batches[0])
        for parts in ([b"kv"], [b"kv", b"\0" * 8], [b"kv", b"1", b"x"], [b"kv", b"\xff" * 8, b""], [b"kv"] * 5):
            await publisher.publisher.send_multipart(parts)
        await publisher.publish(batches[1])
        await received_all(heard, batches)
        assert feed.counters.malformed_frames == 5


@asynchronous
async def test_load_frames_are_reported_and_nonsense_among_them_is_counted() -> None:
    frame = msgpack.packb(["LoadStat", 3, 5, 1200, 20_000, 0, 2000, 3200, 3, 3612, 142_000])
    async with (
        published() as publisher,
        published(topic=b"load") as loads,
        following(publisher, load=loads.endpoint) as (feed, heard),
    ):
        await loads.subscribed.wait()
        await loads.send(0, b"nonsense")
        await loads.send(1, frame)
        await until(lambda: heard.loads, "the load was reported")
        assert heard.loads == [LoadReport(3, 5, 1200, 20_000, 0, 2000)]
        assert feed.counters.load_frames == feed.counters.malformed_frames == 1


@asynchronous
async def test_an_endpoint_that_is_none_ends_the_feed_with_an_error_that_names_it() -> None:
    context = zmq.asyncio.Context()
    feed = EventFeed(EventSource("nonsense"), Heard(), context=context)
    with pytest.raises(TransportError, match="nonsense"):
        await feed.run()
    context.destroy(linger=0)


@pytest.mark.parametrize("name", FeedConfig.__slots__)
def test_times_and_bounds_must_be_positive(name: str) -> None:
    with pytest.raises(InvalidConfig, match=name):
        FeedConfig(**{name: 0})
