"""What the router for Ray Serve decides and books, without ray: replicas are names, a clock is moved by hand.

Ray's own calls are tested in `test_ray_serve`.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

import preble
from preble.config import SchedulerConfig
from preble.errors import InvalidConfig, InvalidInput, NoWorkers, QueueFull, TransportError
from preble.integrations import prompt_extractors, replica_events
from preble.integrations.prompt_extractors import Prompt, PromptReader, ReaderConfig, Tokens
from preble.integrations.replica_events import ReplicaEvents, ReplicaListener
from preble.integrations.replica_scheduler import (
    ReplicaMetadata,
    ReplicaScheduler,
    Ticket,
    metadata_of,
    scheduler_config,
)
from preble.transport.engine_servers.kv_event_subscriber import EventFeed
from tests.support.gateway import make_tokenizer

REPLICAS = {name: ReplicaMetadata() for name in ("a", "b", "c")}


@pytest.fixture
def clock() -> preble.ManualClock:
    return preble.ManualClock()


@pytest.fixture
def books(clock: preble.ManualClock) -> ReplicaScheduler:
    books = ReplicaScheduler(clock=clock, config=SchedulerConfig(lease_seconds=60.0))
    books.update(REPLICAS)
    return books


def ticket(call_id: str = "call", start: int = 0, length: int = 200, **rest: Any) -> Ticket:
    return Ticket(call_id, Tokens(np.arange(start, start + length, dtype=np.int32), **rest))


# --- placing ----------------------------------------------------------------------------------------------------------


def test_prompts_that_share_a_prefix_meet_on_one_replica(books: ReplicaScheduler) -> None:
    for group in range(3):
        homes = set()
        for call in range(5):
            one = ticket(f"{group}-{call}", start=10_000 * group, length=2000)
            homes.add(books.place(one, REPLICAS))
            books.routed(one, one.replica)
            assert books.completed(one.replica, one.call_id)
        assert len(homes) == 1
    books.check()


def test_only_candidates_are_chosen(books: ReplicaScheduler) -> None:
    assert {books.place(ticket(str(n), start=1000 * n), ["b"]) for n in range(4)} == {"b"}
    with pytest.raises(NoWorkers):
        books.place(ticket("other"), ["unheard-of"])
    books.check()


def test_a_call_that_was_not_taken_is_placed_elsewhere_with_one_booking(books: ReplicaScheduler) -> None:
    one = ticket()
    tried = [books.place(one, REPLICAS) for _ in range(3)]
    assert sorted(tried) == ["a", "b", "c"]
    assert books.place(one, REPLICAS) in REPLICAS
    assert books.stats()["open_bookings"] == 1
    books.check()


def test_a_booking_follows_the_call_to_the_replica_that_took_it(books: ReplicaScheduler) -> None:
    one = ticket()
    first = books.place(one, REPLICAS)
    other = next(name for name in REPLICAS if name != first)
    books.routed(one, other)
    assert one.replica == other
    assert books.stats()["booking_moved"] == 1
    assert books.completed(other, one.call_id)
    assert books.stats()["open_bookings"] == 0
    books.check()


# --- the end of a booking ---------------------------------------------------------------------------------------------


def test_the_late_end_of_a_refused_attempt_ends_nothing(books: ReplicaScheduler) -> None:
    one = ticket()
    first = books.place(one, REPLICAS)
    second = books.place(one, REPLICAS)
    assert second != first
    assert not books.completed(first, one.call_id)
    assert books.stats()["open_bookings"] == 1
    assert books.completed(second, one.call_id)
    assert books.stats()["completed_unbooked"] == 1
    books.check()


def test_a_call_that_ends_where_it_was_not_booked_ends_its_booking(books: ReplicaScheduler) -> None:
    one = ticket()
    first = books.place(one, REPLICAS)
    other = next(name for name in REPLICAS if name != first)
    assert books.completed(other, one.call_id)
    assert books.stats()["open_bookings"] == 0


def test_calls_that_share_an_id_end_one_at_a_time(books: ReplicaScheduler) -> None:
    calls = [ticket("shared"), ticket("shared")]
    for one in calls:
        books.routed(one, books.place(one, ["a"]))
    assert books.completed("a", "shared")
    assert [one.booking is None for one in calls] == [True, False]
    assert books.completed("a", "shared")
    assert not books.completed("a", "shared")
    books.check()


def test_a_replica_that_leaves_takes_its_bookings_along(books: ReplicaScheduler) -> None:
    one = ticket()
    home = books.place(one, REPLICAS)
    books.update({name: facts for name, facts in REPLICAS.items() if name != home})
    assert one.booking is None
    assert books.stats()["bookings_of_removed"] == 1
    assert books.place(one, REPLICAS) != home
    assert books.remove(home) == 0
    books.check()


def test_an_end_that_comes_before_the_place_leaves_no_booking_behind(books: ReplicaScheduler) -> None:
    """Two calls of one id are booked on one replica; one goes elsewhere, and its end is reported first."""
    one, two = ticket("shared"), ticket("shared")
    home = books.place(one, REPLICAS)
    assert books.place(two, {home: REPLICAS[home]}) == home
    other = next(name for name in REPLICAS if name != home)
    assert books.completed(other, "shared")
    books.routed(two, other)
    books.routed(one, home)
    assert books.stats()["open_bookings"] == 1
    assert books.completed(home, "shared")
    assert books.stats()["open_bookings"] == 0
    assert not books._by_call
    books.check()


def test_a_call_that_is_given_up_after_its_end_was_reported_keeps_no_sibling_open(books: ReplicaScheduler) -> None:
    """The end of one on the way was taken for that of the other, which went there; then the first is given up."""
    one, two = ticket("shared"), ticket("shared", start=300)
    books.place(one, ["a"])
    books.place(two, ["b"])
    assert books.completed("a", "shared")
    books.routed(two, "a")
    assert books.stats()["open_bookings"] == 1
    books.cancel(one)
    assert books.stats()["open_bookings"] == 0
    books.check()


def test_no_order_of_what_siblings_report_leaves_a_booking(clock: preble.ManualClock) -> None:
    """Calls of one id, each booked on a replica, gone to one, ended there. That the first of two ended where the second
    was booked, before anybody knew where the second went, left a booking open until its lease ended."""
    rng = random.Random(5)
    for trial in range(200):
        count = 2 + trial % 4
        books = ReplicaScheduler(clock=clock)
        books.update(REPLICAS)
        calls = [ticket(start=300 * number) for number in range(count)]
        homes, went = ([rng.choice(sorted(REPLICAS)) for _ in calls] for _ in range(2))
        steps = [number for number in range(count) for _ in range(3)]
        rng.shuffle(steps)
        done: dict[int, list[str]] = {}
        for number in steps:
            before = done.setdefault(number, [])
            step = rng.choice([one for one in ("routed", "ended") if one not in before]) if before else "placed"
            before.append(step)
            if step == "placed":
                books.place(calls[number], [homes[number]])
            elif step == "routed":
                books.routed(calls[number], went[number])
            else:
                books.completed(went[number], "call")
            books.check()
        assert books.stats()["open_bookings"] == 0, (trial, steps, homes, went)
        assert not books._by_call


def test_a_booking_without_an_end_expires(books: ReplicaScheduler, clock: preble.ManualClock) -> None:
    old, young = ticket("old"), ticket("young", start=5000)
    books.place(old, REPLICAS)
    clock.advance(40.0)
    books.place(young, REPLICAS)
    clock.advance(30.0)
    books.tick()
    assert (old.booking, books.stats()["bookings_expired"]) == (None, 1)
    assert young.booking is not None
    books.check()


def test_ticks_are_due_once_a_second(books: ReplicaScheduler, clock: preble.ManualClock) -> None:
    assert not books.tick_due()
    clock.advance(1.5)
    assert [books.tick_due(), books.tick_due()] == [True, False]
    clock.advance(1.5)
    assert not books.tick_due(), "the last one has not ended"
    books.tick()
    assert books.tick_due()


def test_any_order_of_calls_leaves_both_bookings_alike(clock: preble.ManualClock) -> None:
    books = ReplicaScheduler(clock=clock, config=SchedulerConfig(lease_seconds=20.0))
    draws, calls = random.Random(7), [ticket(f"call{n % 9}", start=100 * (n % 4)) for n in range(24)]
    names = [*REPLICAS, "d"]
    for step in range(200):
        one, name = draws.choice(calls), draws.choice(names)
        what = draws.randrange(7)
        if what == 0:
            books.update({n: ReplicaMetadata() for n in draws.sample(names, draws.randint(1, 4))})
        elif what in (1, 2) and books.scheduler.workers:
            books.place(one, books.scheduler.workers)
        elif what == 3:
            books.routed(one, name)
        elif what == 4:
            books.completed(name, one.call_id)
        elif what == 5:
            books.cancel(one)
        else:
            clock.advance(1.0)
            books.tick()
        if step % 20 == 0:
            books.check()
    books.check()
    for one in calls:
        books.cancel(one)
    assert books.stats()["open_bookings"] == 0


# --- what replicas report ---------------------------------------------------------------------------------------------


def test_facts_are_read_from_metadata_and_stats() -> None:
    events = {"endpoint": "tcp://10.0.0.1:5557", "replay_endpoint": "tcp://10.0.0.1:6557", "block_size": 16}
    facts = metadata_of({"kv_capacity_tokens": 1000}, {"kv_event_metadata": {**events, "dp_rank": 0}})
    assert facts == ReplicaMetadata(1000, 16, "tcp://10.0.0.1:5557", "tcp://10.0.0.1:6557")
    assert metadata_of({}, {}) == ReplicaMetadata()


@pytest.mark.parametrize("told", [{"kv_capacity_tokens": 0}, {"block_size": "16"}, {"endpoint": 5557}])
def test_a_wrong_fact_is_refused_by_name(told: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(told))):
        metadata_of(told)


def test_a_replica_that_reports_another_capacity_begins_anew(books: ReplicaScheduler) -> None:
    books.update({**REPLICAS, "a": ReplicaMetadata(kv_capacity_tokens=5000, block_size=16)})
    spec = books.scheduler.workers["a"]
    assert (spec.kv_capacity_tokens, spec.block_size) == (5000, 16)
    assert books.stats()["replica_restated"] == 1
    books.check()


def test_wrong_events_are_counted_and_stop_nothing(books: ReplicaScheduler) -> None:
    counters: Counter[str] = Counter()
    listener = ReplicaListener("a", books.scheduler, counters)
    listener.on_payload(b"\xc1 no messagepack")
    listener.on_resync()
    ReplicaListener("gone", books.scheduler, counters).on_resync()
    assert counters == {"event_batches_malformed": 1, "event_resyncs": 2, "event_batches_of_removed": 1}


def test_feeds_come_and_go_with_replicas(books: ReplicaScheduler) -> None:
    async def follow() -> list[frozenset[str]]:
        events, seen = ReplicaEvents(books.scheduler, books.counters), []
        told = ReplicaMetadata(events_endpoint="ipc:///nowhere-to-be-found")
        for replicas in ({"a": told, "b": ReplicaMetadata()}, {"a": told, "b": told}, {"b": told}):
            events.update(replicas)
            await asyncio.sleep(0)
            seen.append(events.followed)
        events.remove("b")
        await events.close()
        return [*seen, events.followed]

    assert asyncio.run(follow()) == [{"a"}, {"a", "b"}, {"b"}, set()]


def test_a_feed_that_fails_is_followed_again(books: ReplicaScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor is left, then the endpoint is none: each time nothing counts as cached, and it is tried again."""
    failures = iter([OSError(24, "Too many open files"), TransportError("no endpoint")])

    async def run(_: EventFeed) -> None:
        error = next(failures, None)
        if error is not None:
            raise error
        followed.set()
        await asyncio.Event().wait()

    async def follow() -> None:
        events = ReplicaEvents(books.scheduler, books.counters)
        events.update({"b": ReplicaMetadata(events_endpoint="ipc:///nowhere-to-be-found")})
        await asyncio.wait_for(followed.wait(), 60.0)
        await events.close()

    followed = asyncio.Event()
    monkeypatch.setattr(EventFeed, "run", run)
    monkeypatch.setattr(replica_events, "RETRY_MIN_SECONDS", 0.0)
    books.update({"b": ReplicaMetadata(block_size=16)})
    asyncio.run(follow())
    assert (books.counters["event_feeds_failed"], books.counters["event_resyncs"]) == (2, 2)


def test_published_events_become_what_the_scheduler_believes(books: ReplicaScheduler, tmp_path: Path) -> None:
    endpoint, prompt = f"ipc://{tmp_path}/events", list(range(33))
    batch = msgpack.packb([1.0, [["BlockStored", [11, 12], None, prompt[:32], 16, None]], 0])

    async def follow() -> None:
        events, context = ReplicaEvents(books.scheduler, books.counters), zmq.Context()
        socket = context.socket(zmq.PUB)
        try:
            socket.bind(endpoint)
            events.update({"b": ReplicaMetadata(events_endpoint=endpoint)})
            for number in range(500):  # the first ones come before the subscription does
                socket.send_multipart([b"", number.to_bytes(8, "big"), batch])
                await asyncio.sleep(0.01)
                if books.counters["event_batches"]:
                    break
        finally:
            await events.close()
            context.destroy(linger=0)

    books.update({name: ReplicaMetadata(block_size=16) for name in REPLICAS})
    asyncio.run(follow())
    assert books.scheduler.match(prompt).matched_tokens == {"b": 32}
    assert books.place(Ticket("call", Tokens(np.array(prompt, dtype=np.int32))), REPLICAS) == "b"


def test_configuration_comes_from_json_and_is_checked() -> None:
    assert scheduler_config({"lease_seconds": 5.0}).lease_seconds == 5.0
    with pytest.raises(InvalidConfig, match="unheard_of"):
        scheduler_config({"unheard_of": 1})


# --- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([{"prompt": "hi", "max_tokens": 5}], Prompt(text="hi", max_new_tokens=5)),
        ([b'{"prompt": [1, 2]}'], Prompt(token_ids=[1, 2])),
        ([SimpleNamespace(prompt="hi", cache_salt="s")], Prompt(text="hi", namespace=("salt", "s"))),
        ([{"messages": [{"role": "user"}]}], Prompt(messages=[{"role": "user"}])),
        ([{"prompt": "hi", "prompt_token_ids": [7]}], Prompt(token_ids=[7])),
        ([{"prompt": ["hi"]}], Prompt(text="hi")),
        ([{"prompt": [[1, 2]]}], Prompt(token_ids=[1, 2])),
        ([{"prompt": ["hi", "there"]}], None),
        ([{"prompt": [[1, 2], [3]]}], None),
        ([object(), {"other": 1}, b"no json"], None),
        ([], None),
    ],
)
def test_openai_bodies(args: list[Any], expected: Prompt | None) -> None:
    assert prompt_extractors.openai(args, {}) == expected


def test_a_chats_tools_and_settings_go_to_its_template(tmp_path: Path) -> None:
    """They stand in the prompt that the engine makes: two chats with other tools share less than they seem to."""
    user = [{"role": "user", "content": "hello"}]
    tool = SimpleNamespace(model_dump=lambda: {"type": "function", "function": {"name": "search"}})
    body = {
        "messages": user, "tools": [tool], "add_generation_prompt": False,
        "chat_template_kwargs": {"enable_thinking": False, "messages": "not these"},
    }  # fmt: skip
    found = prompt_extractors.openai([body], {})
    assert found is not None
    assert found.messages == user
    assert {**found.template, "messages": None} == {
        "tools": [{"type": "function", "function": {"name": "search"}}],
        "add_generation_prompt": False, "enable_thinking": False, "messages": None,
    }  # fmt: skip

    directory = make_tokenizer(tmp_path)
    source = "{{ tools }}{{ enable_thinking }}{{ messages[0].content }}{% if add_generation_prompt %}!{% endif %}"
    (directory / "chat_template.jinja").write_text(source)
    reader = PromptReader(ReaderConfig(tokenizer=str(directory)))
    with_tools, without = (reader.read_now([one], {}) for one in (body, {"messages": user}))
    reader.close()
    assert with_tools is not None
    assert without is not None
    assert len(with_tools.token_ids) > len(without.token_ids)


def test_a_content_that_can_be_read_but_once_is_left_to_the_replica() -> None:
    parts = iter([{"type": "text", "text": "hello"}])
    assert prompt_extractors.openai([{"messages": [{"role": "user", "content": parts}]}], {}) is None
    assert len(list(parts)) == 1


def test_text_and_token_ids() -> None:
    assert prompt_extractors.text([1, "hi"], {}) == Prompt(text="hi")
    assert prompt_extractors.text([1], {}) is None
    assert prompt_extractors.token_ids(["x", [1, 2]], {}) == Prompt(token_ids=[1, 2])
    assert prompt_extractors.token_ids([], {"token_ids": [3]}) == Prompt(token_ids=[3])
    assert prompt_extractors.token_ids(["x"], {}) is None


@pytest.mark.parametrize("name", ["nothing", "preble.no_such:f", "preble.errors:nothing", "preble.errors:__doc__", 3])
def test_an_extractor_that_cannot_be_had_is_refused(name: Any) -> None:
    with pytest.raises(InvalidConfig, match="extractor"):
        prompt_extractors.extractor_named(name)


def test_text_becomes_tokens_by_the_models_own_tokenizer(tmp_path: Path) -> None:
    reader = PromptReader(ReaderConfig(tokenizer=str(make_tokenizer(tmp_path))))
    plain = reader.read_now([{"prompt": "hello"}], {})
    chat = reader.read_now([{"messages": [{"role": "user", "content": "hello"}]}], {})
    assert plain is not None
    assert chat is not None
    assert plain.token_ids.dtype == np.int32
    assert len(chat.token_ids) > len(plain.token_ids)
    reader.close()


@pytest.mark.parametrize("ids", [[], [[1]], [-1], [2**31], [1.5], [[1], [2, 3]]])
def test_what_are_no_token_ids_is_refused(ids: Any) -> None:
    with pytest.raises(InvalidInput, match="token_ids"):
        prompt_extractors._as_array(ids)


def test_text_without_a_tokenizer_is_refused() -> None:
    reader = PromptReader(ReaderConfig())
    with pytest.raises(InvalidInput, match="tokenizer"):
        reader.read_now([{"prompt": "hello"}], {})
    reader.close()


HELD = threading.Event()


def held_extractor(args: Any, kwargs: Any) -> Prompt:
    HELD.wait()
    return Prompt(token_ids=[1])


def test_the_queue_of_prompts_is_bounded_and_the_wait_ends() -> None:
    HELD.clear()
    config = ReaderConfig(extractor=f"{__name__}:held_extractor", threads=1, queue_max=2, read_seconds=0.05)
    reader = PromptReader(config)

    async def read_three() -> list[Any]:
        try:
            return await asyncio.gather(*(reader.read([], {}) for _ in range(3)), return_exceptions=True)
        finally:
            HELD.set()

    found = asyncio.run(read_three())
    assert [type(one) for one in found] == [asyncio.TimeoutError, asyncio.TimeoutError, QueueFull]
    reader.close()
