"""The router against scripted workers: exactly-once delivery, resuming, refusals, cancelling, events, and even books.

The scripts give the simulated engine's answers, so a resumed request that was handed one wrong, missing or doubled
token would say something else from there on. `tests/worker/test_process.py` has such stories with real processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from preble import GlobalScheduler, SamplingParams
from preble.clock import ManualClock
from preble.errors import (
    DuplicateRequest,
    EngineError,
    HandshakeRefused,
    InvalidConfig,
    InvalidInput,
    InvalidTokens,
    NoWorkers,
    Overloaded,
    PrebleError,
    ProtocolError,
    QueueFull,
    TransportError,
    UnknownWorker,
    WorkerLost,
)
from preble.router import Router, RouterConfig
from preble.router import fleet as fleet_module
from preble.router.request import RoutedRequest
from preble.scheduling.predicted_wait import Verdict
from preble.transport import client, wire
from preble.transport.tasks import within
from preble.types import AllBlocksCleared, BlockRemoved, PrefixEvicted
from tests.support.transport import (
    FAST,
    HANG_SECONDS,
    FirstByName,
    ScriptedWorker,
    assert_bookings_are_even,
    asynchronous,
    collect,
    expected_tokens,
    fast,
    until,
)

PROMPT = list(range(100, 180))
SHORT = SamplingParams(max_new_tokens=12)


# --- scripts ----------------------------------------------------------------------------------------------------------


def answer(submit: wire.GenerationRequest) -> tuple[int, list[int]]:
    """(index of the first token, tokens) that a good worker would send for this request."""
    left = submit.sampling.max_new_tokens - submit.output_offset
    return submit.output_offset, expected_tokens(submit.token_ids.tolist(), left)


async def good(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
    """Answer token by token, as a worker does."""
    start, tokens = answer(submit)
    for i, token in enumerate(tokens):
        reason = "length" if i == len(tokens) - 1 else None
        cached = 7 if i == 0 else None
        await worker.send(wire.OutputChunk(submit.request_id, start + i, (token,), cached, reason))
        await asyncio.sleep(0)


async def stops_halfway(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
    """Send half of the tokens, then nothing more."""
    start, tokens = answer(submit)
    await worker.send(wire.OutputChunk(submit.request_id, start, tuple(tokens[: len(tokens) // 2]), 3))


async def mute(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
    """Take the request and say nothing."""


def rejecting(code: str) -> Callable[[ScriptedWorker, wire.GenerationRequest], Awaitable[None]]:
    """Refuse every request."""

    async def script(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
        await worker.send(wire.Rejected(submit.request_id, code, f"no: {code}"))

    return script


@contextlib.asynccontextmanager
async def fleet(*scripts: Any, router_options: dict[str, Any] | None = None, **facts: Any) -> AsyncIterator[Any]:
    """(router, workers): one scripted worker for each script, named w0, w1, ...; the bookings are even at the end."""
    workers = [ScriptedWorker(script, worker_id=f"w{i}", **facts) for i, script in enumerate(scripts)]
    own = {} if "scheduler" in (router_options or {}) else {"policy": FirstByName()}
    options: dict[str, Any] = {"config": FAST, **own, **(router_options or {})}
    router = Router([worker.endpoint for worker in workers], **options)
    try:
        await router.start()
        yield router, workers
        assert_bookings_are_even(router)
    finally:
        await router.close()
        for worker in workers:
            await worker.close()


# --- exactly once, one request at a time ------------------------------------------------------------------------------


def live_request(max_new_tokens: int = 30) -> RoutedRequest:
    """A request nobody serves."""
    return RoutedRequest("r", np.array([1, 2], np.int32), SamplingParams(max_new_tokens=max_new_tokens), None)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12), st.booleans()), max_size=60))
def test_whatever_chunks_come_positions_are_delivered_once_and_in_order(arrivals: list[tuple[int, int, bool]]) -> None:
    live = live_request(max_new_tokens=30)
    read: list[int] = []

    async def story() -> None:
        for index, count, reads in arrivals:
            have = live.output_tokens
            chunk = wire.OutputChunk("1", index, tuple(range(index, index + count)))  # token k stands at position k
            if index > have:
                with pytest.raises(ProtocolError, match=f"position {have} is missing"):
                    live.accept(chunk, "w")
            else:
                accepted = live.accept(chunk, "w")
                assert accepted.new + accepted.duplicates + accepted.excess == count
            if reads and live.output_tokens > len(read):
                news = await live.next_chunk()
                assert news is not None and news.index == len(read)
                read.extend(news.token_ids)
        assert live.tokens_so_far().tolist() == [1, 2, *range(live.output_tokens)]

    asyncio.run(story())
    assert live.output_tokens <= 30
    assert read == list(range(len(read)))


@pytest.mark.parametrize(
    ("output", "sampling", "reason"),
    [
        ((5, 6), SamplingParams(max_new_tokens=2), "length"),
        ((5, 6), SamplingParams(max_new_tokens=3), None),
        ((5, 6), SamplingParams(max_new_tokens=9, stop_token_ids=(6,)), "stop"),
        ((5, 2), SamplingParams(max_new_tokens=9), "stop"),
        ((5, 2), SamplingParams(max_new_tokens=9, ignore_eos=True), None),
        ((), SamplingParams(), None),
    ],
)
def test_tokens_reports_by_themselves_whether_more_will_come(
    output: Any, sampling: SamplingParams, reason: Any
) -> None:
    live = RoutedRequest("r", np.array([1], np.int32), sampling, None)
    live.accept(wire.OutputChunk("1", 0, output), "w")
    assert live.reason_if_complete(eos_token_ids=(2,)) == reason


# --- a good day -------------------------------------------------------------------------------------------------------


@asynchronous
async def test_a_request_streams_and_the_scheduler_is_reported() -> None:
    calls: list[Any] = []

    class Spy(GlobalScheduler):
        def first_token(self, request_id: Any, **facts: Any) -> bool:
            calls.append(("first_token", facts))
            return super().first_token(request_id, **facts)

        def finish(self, request_id: Any, **facts: Any) -> bool:
            calls.append(("finish", facts))
            return super().finish(request_id, **facts)

    async with fleet(good, router_options={"scheduler": Spy([])}) as (router, _):
        tokens, chunks = await collect(router.generate(PROMPT, SHORT, request_id="mine"))
        assert tokens == expected_tokens(PROMPT, 12)
        assert {chunk.worker for chunk in chunks} == {"w0"} and {chunk.request_id for chunk in chunks} == {"mine"}
        assert chunks[0].cached_tokens == 7 and chunks[-1].finish_reason == "length"
        assert calls == [
            ("first_token", {"cached_tokens": 7}),
            ("finish", {"output_tokens": 12, "cached_tokens": 7}),
        ]


@asynchronous
async def test_worker_specs_come_from_the_handshake() -> None:
    async with fleet(good, block_size=16, kv_capacity_tokens=4321, max_running=5) as (router, _):
        spec = router.scheduler.workers["w0"]
        assert (spec.block_size, spec.kv_capacity_tokens, spec.max_running) == (16, 4321, 5)


@asynchronous
async def test_many_requests_at_once_do_not_mix() -> None:
    async with fleet(good, good, router_options={"policy": "round_robin"}) as (router, workers):
        prompts = [list(range(i, i + 20)) for i in range(60)]
        answers = await asyncio.gather(*(collect(router.generate(prompt, SHORT)) for prompt in prompts))
        assert [tokens for tokens, _ in answers] == [expected_tokens(prompt, 12) for prompt in prompts]
        assert all(len(worker.got(wire.GenerationRequest)) == 30 for worker in workers)
        assert router.stats()["finished"] == 60


@asynchronous
async def test_sampling_and_namespace_go_along() -> None:
    async with fleet(good) as (router, (worker,)):
        sampling = SamplingParams(max_new_tokens=3, temperature=0.5, top_p=0.9, stop_token_ids=(7,), seed=11)
        await collect(router.generate(PROMPT, sampling, namespace=("lora", 3)))
        (submit,) = worker.got(wire.GenerationRequest)
        assert submit.sampling == sampling and submit.namespace == ("lora", 3) and submit.output_offset == 0


@asynchronous
async def test_a_consumer_that_reads_late_gets_everything_in_few_chunks() -> None:
    read_first = asyncio.Event()

    async def waits(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
        _, tokens = answer(submit)
        await worker.send(wire.OutputChunk(submit.request_id, 0, tuple(tokens[:1]), 0))
        await read_first.wait()
        for i in range(1, 50):
            await worker.send(wire.OutputChunk(submit.request_id, i, (tokens[i],), None, "length" if i == 49 else None))

    async with fleet(waits) as (router, _):
        stream = router.generate(PROMPT, SamplingParams(max_new_tokens=50))
        first = await anext(stream)
        read_first.set()
        await until(lambda: router.stats()["finished"] == 1, "the worker is done")
        rest = [chunk async for chunk in stream]
        assert len(rest) == 1 and rest[0].finish_reason == "length"
        assert [*first.token_ids, *rest[0].token_ids] == expected_tokens(PROMPT, 50)


# --- prompts and arguments --------------------------------------------------------------------------------------------


class Encoding:
    """What the `tokenizers` library returns."""

    ids = PROMPT


class WithEncode:
    """A tokenizer object."""

    def encode(self, text: str) -> Any:
        return Encoding() if text == "hello" else PROMPT


@asynchronous
async def test_text_is_encoded_by_whatever_tokenizer_was_given() -> None:
    for tokenizer in (WithEncode(), lambda text: PROMPT):
        async with fleet(good, router_options={"tokenizer": tokenizer}) as (router, (worker,)):
            for text in ("hello", "again"):
                await collect(router.generate(text, SHORT))
            assert [submit.token_ids.tolist() for submit in worker.got(wire.GenerationRequest)] == [PROMPT, PROMPT]


@pytest.mark.parametrize(
    ("prompt", "error", "complaint"),
    [
        ("text", InvalidInput, "no tokenizer"),
        ([], InvalidTokens, "prompt"),
        ([[1, 2]], InvalidTokens, "list"),
        (np.array([[1, 2]]), InvalidTokens, "2 dimensions"),
        ([1.5], InvalidTokens, "float"),
        ([True], InvalidTokens, "bool"),
        ([-1], InvalidTokens, "-1, outside"),
        (np.array([1, -1], np.int32), InvalidTokens, "token_ids.1. is outside"),
        (np.array([2**63], np.uint64), InvalidTokens, "outside"),
        ([2**31], InvalidTokens, "outside"),
        (None, InvalidTokens, "NoneType"),
    ],
)
@asynchronous
async def test_a_bad_prompt_is_refused_at_once_and_changes_nothing(prompt: Any, error: type, complaint: str) -> None:
    async with fleet(good) as (router, (worker,)):
        with pytest.raises(error, match=complaint):
            router.generate(prompt)
        assert router.stats()["requests"] == 0 and not worker.got(wire.GenerationRequest)


@asynchronous
async def test_other_bad_arguments_are_refused_at_once() -> None:
    async with fleet(mute) as (router, _):
        with pytest.raises(InvalidInput, match="namespace"):
            router.generate(PROMPT, namespace=frozenset())
        running = asyncio.ensure_future(collect(router.generate(PROMPT, request_id="same")))
        await until(lambda: router.stats()["requests"] == 1, "it runs")
        with pytest.raises(DuplicateRequest, match="same"):
            router.generate(PROMPT, request_id="same")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


MISTYPED = (
    "|tcp://|tpc://127.0.0.1:9000|127.0.0.1:9000|tcp://127.0.0.1|tcp://127.0.0.1:99999|tcp://:9000"
    "|tcp://127.0.0.1:9000 |tcp://127.0.0.1:0|tcp://127.0.0.1:*|ipc://|http:/host|http://|http://host:x|http://a b"
)


@pytest.mark.parametrize("address", MISTYPED.split("|"))
@asynchronous
async def test_a_mistyped_address_of_a_worker_is_refused_at_once(address: str) -> None:
    """Regression: it was tried again for ever, with a traceback each time."""
    with pytest.raises(InvalidInput, match=re.escape(repr(address))):
        Router([address])
    router = Router([])
    await router.start(min_workers=0)
    try:
        with pytest.raises(InvalidInput, match=re.escape(repr(address))):
            await router.add_worker(address)
        assert not router.fleet.workers
    finally:
        await router.close()


@asynchronous
async def test_a_closed_or_unstarted_router_says_so() -> None:
    router = Router([])
    with pytest.raises(TransportError, match="not started"):
        await collect(router.generate(PROMPT))
    with pytest.raises(NoWorkers, match="no worker was named"):
        await Router([], config=fast(connect_seconds=HANG_SECONDS)).start()  # at once


@asynchronous
async def test_who_does_not_answer_is_named_with_the_reason_and_an_unknown_host_is_not_waited_for() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(NoWorkers, match="connection refused: nothing listens on port"):
            await Router([nobody], config=fast(connect_seconds=0.05)).start()
    patient = fast(connect_seconds=1000 * HANG_SECONDS)
    for unknown in ("tcp://no-such-host.invalid:5601", "http://no-such-host.invalid"):
        with pytest.raises(NoWorkers, match="unknown host no-such-host.invalid"):
            await within(HANG_SECONDS, Router([unknown], config=patient).start())
    worker = ScriptedWorker(good, worker_id="w0")
    router = Router([worker.endpoint, "tcp://no-such-host.invalid:5601"], config=patient)
    await within(HANG_SECONDS, router.start())
    assert [one.state for one in router.fleet.workers.values()] == ["ready", "connecting"]
    await router.close()
    await worker.close()


@pytest.fixture
def curve_greeter() -> Iterator[str]:
    """The endpoint of somebody who greets as a worker with keys does, and says nothing else. A real one closes the
    connection too, and whether ZeroMQ has read the greeting by then is a race."""
    mechanism, server = b"CURVE".ljust(20, b"\0"), b"\0"
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + mechanism + server + bytes(31)
    listener = socket.create_server(("127.0.0.1", 0))
    open_ones: list[socket.socket] = []

    def greet() -> None:
        with contextlib.suppress(OSError):  # until the listener is shut down
            while True:
                open_ones.append(listener.accept()[0])
                with contextlib.suppress(ConnectionError):  # it was only looked at and left
                    open_ones[-1].sendall(greeting)

    greeting_thread = threading.Thread(target=greet)
    greeting_thread.start()
    yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    greeting_thread.join(HANG_SECONDS)
    for one in (listener, *open_ones):
        one.close()


@asynchronous
async def test_a_connection_that_failed_before_the_hello_was_sent_is_tried_again(
    curve_greeter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket had nobody left to send to, which was taken for a full queue, and the worker for one never to be tried
    again."""
    send, deadline = client.WorkerLink.send, time.monotonic() + HANG_SECONDS

    def late(link: client.WorkerLink, message: wire.Message) -> None:
        while isinstance(message, wire.Hello) and link._dealer.getsockopt(zmq.EVENTS) & zmq.POLLOUT:
            assert time.monotonic() < deadline, "the connection was never given up"
            time.sleep(0.001)  # until ZeroMQ has given the connection up: its other end demands keys
        send(link, message)

    monkeypatch.setattr(client.WorkerLink, "send", late)
    with pytest.raises(NoWorkers, match="closed the connection during the handshake"):
        await Router([curve_greeter], config=fast(connect_seconds=0.2)).start()


@pytest.mark.parametrize("name", ["max_live_requests", "max_attempts", "resume_seconds", "tick_seconds"])
def test_router_bounds_must_be_positive(name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"RouterConfig.{name} must be positive"):
        RouterConfig(**{name: 0})


def test_link_and_fleet_times_are_checked() -> None:
    for bad in ({"heartbeat_seconds": 0}, {"reconnect_min_seconds": 9.0}, {"forget_after_seconds": -1.0}):
        with pytest.raises(InvalidConfig, match=next(iter(bad))):
            fast(**bad)


# --- duplicates, gaps, late and foreign chunks ------------------------------------------------------------------------


@asynchronous
async def test_tokens_sent_twice_are_dropped_and_counted() -> None:
    async def stutters(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
        _, tokens = answer(submit)
        await worker.send(wire.OutputChunk(submit.request_id, 0, tuple(tokens[:4])))
        await worker.send(wire.OutputChunk(submit.request_id, 0, tuple(tokens[:4])))
        await worker.send(wire.OutputChunk(submit.request_id, 2, tuple(tokens[2:]), None, "length"))

    async with fleet(stutters) as (router, _):
        tokens, _ = await collect(router.generate(PROMPT, SHORT))
        assert tokens == expected_tokens(PROMPT, 12)
        assert router.stats()["duplicate_tokens"] == 6 and router.stats()["output_tokens"] == 12


@asynchronous
async def test_a_skipped_position_moves_the_request_and_no_token_is_lost() -> None:
    async def skips(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
        _, tokens = answer(submit)
        await worker.send(wire.OutputChunk(submit.request_id, 0, tuple(tokens[:4])))
        await worker.send(wire.OutputChunk(submit.request_id, 5, tuple(tokens[5:]), None, "length"))

    async with fleet(skips, good) as (router, workers):
        tokens, _ = await collect(router.generate(PROMPT, SHORT))
        assert tokens == expected_tokens(PROMPT, 12)
        assert router.stats()["token_gaps"] == 1 and router.stats()["resumed"] == 1
        (resumed,) = workers[1].got(wire.GenerationRequest)
        assert resumed.output_offset == 4 and resumed.token_ids.tolist() == PROMPT + tokens[:4]
        assert resumed.sampling.max_new_tokens == 12, "counted from the first output token"
        await until(lambda: workers[0].got(wire.Abort), "the first worker is asked to stop")


@asynchronous
async def test_more_tokens_than_asked_for_are_cut_and_counted() -> None:
    async def talkative(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
        await worker.send(wire.OutputChunk(submit.request_id, 0, tuple(range(20))))

    async with fleet(talkative) as (router, (worker,)):
        tokens, chunks = await collect(router.generate(PROMPT, SHORT))
        assert tokens == list(range(12)) and chunks[-1].finish_reason == "length"
        assert router.stats()["excess_tokens"] == 8
        await until(lambda: worker.got(wire.Abort), "it is asked to stop")


@asynchronous
async def test_chunks_of_requests_that_are_over_are_dropped_and_counted() -> None:
    async def lingers(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
        await good(worker, submit)
        await worker.send(wire.OutputChunk(submit.request_id, 12, (1,)))
        await worker.send(wire.OutputChunk("never-heard-of", 0, (1,)))
        await worker.send(wire.Rejected("never-heard-of", "invalid", ""))

    async with fleet(lingers) as (router, _):
        await collect(router.generate(PROMPT, SHORT))
        await until(lambda: router.stats()["late_chunks"] == 3, "the late chunks came")
        assert router.stats()["output_tokens"] == 12


@asynchronous
async def test_frames_of_another_epoch_or_session_are_dropped_and_counted() -> None:
    async def haunted(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
        chunk = wire.OutputChunk(submit.request_id, 0, (666,), None, "stop")
        await worker.send_raw(wire.encode(chunk, epoch=999, session=worker.session, seq=worker.seq))
        await worker.send_raw(wire.encode(chunk, epoch=worker.epoch, session=worker.session + 5, seq=worker.seq))
        await good(worker, submit)

    async with fleet(haunted) as (router, (worker,)):
        tokens, _ = await collect(router.generate(PROMPT, SHORT))
        assert tokens == expected_tokens(PROMPT, 12)
        assert router.stats()["workers"][worker.endpoint]["stale_frames"] == 2


@asynchronous
async def test_a_worker_that_reports_more_cached_tokens_than_there_are_is_not_accepted() -> None:
    async def boasts(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
        await worker.send(wire.OutputChunk(submit.request_id, 0, (1,), 10**6, "stop"))

    async with fleet(boasts) as (router, (worker,)):
        _, chunks = await collect(router.generate(PROMPT, SHORT))
        assert chunks[0].cached_tokens is None and router.stats()["wrong_reports"] == 1
        assert link_stats(router, worker)["losses"] == 0


@asynchronous
async def test_a_worker_that_the_scheduler_cannot_take_is_refused_with_the_reason() -> None:
    class Small(GlobalScheduler):
        def add_worker(self, spec: Any, **rest: Any) -> Any:
            raise InvalidConfig("no room for workers")

    with pytest.raises(HandshakeRefused, match="no room for workers"):
        async with fleet(good, router_options={"scheduler": Small([])}):
            raise AssertionError("it started")


# --- workers that fail ------------------------------------------------------------------------------------------------


async def lost_by_frame_gap(worker: ScriptedWorker) -> None:
    """As if frames had been lost on the way."""
    await worker.send(wire.Pong(0, 0), skip=2)


async def lost_by_malformed_frame(worker: ScriptedWorker) -> None:
    """Bytes that are no frame."""
    await worker.send_raw(b"\xc1 no msgpack")


async def lost_by_two_part_message(worker: ScriptedWorker) -> None:
    """A message that is not one frame."""
    await worker.send_raw(b"a", b"b")


async def lost_by_foreign_message(worker: ScriptedWorker) -> None:
    """A handshake in the middle of a session."""
    await worker.send(worker.facts)


async def lost_by_closing(worker: ScriptedWorker) -> None:
    """The worker ends the session."""
    await worker.send(wire.Closed("slow_reader", "you did not read"))


async def lost_by_fault(worker: ScriptedWorker) -> None:
    """The worker could not read us."""
    await worker.send_raw(wire.encode(wire.Fault("what?"), epoch=worker.epoch))


async def lost_by_disconnect(worker: ScriptedWorker) -> None:
    """The process dies."""
    await worker.close()


WAYS_TO_LOSE_A_WORKER = [
    lost_by_frame_gap,
    lost_by_malformed_frame,
    lost_by_two_part_message,
    lost_by_foreign_message,
    lost_by_closing,
    lost_by_fault,
    lost_by_disconnect,
]


@pytest.mark.parametrize("lose", WAYS_TO_LOSE_A_WORKER, ids=lambda way: way.__name__)
@asynchronous
async def test_however_a_worker_is_lost_the_request_finishes_elsewhere(lose: Any) -> None:
    async with fleet(stops_halfway, good) as (router, workers):
        stream = router.generate(PROMPT, SHORT)
        first = await anext(stream)
        assert first.worker == "w0"
        await lose(workers[0])
        rest = [chunk async for chunk in stream]
        tokens = [token for chunk in (first, *rest) for token in chunk.token_ids]
        assert tokens == expected_tokens(PROMPT, 12) and rest[-1].worker == "w1"
        stats = router.stats()
        assert stats["resumed"] == 1 and stats["duplicate_tokens"] == 0
        assert stats["workers"][workers[0].endpoint]["losses"] >= 1


@asynchronous
async def test_a_malformed_frame_is_counted_and_the_worker_is_reported() -> None:
    async with fleet(good) as (router, (worker,)):
        await worker.send_raw(b"garbage")
        await until(lambda: worker.got(wire.Fault), "the fault arrives")
        await until(lambda: len(worker.got(wire.Hello)) == 2, "the router shakes hands again")
        await until(lambda: router.stats()["workers"][worker.endpoint]["state"] == "ready", "they are one again")
        assert router.stats()["workers"][worker.endpoint]["malformed_frames"] == 1
        tokens, _ = await collect(router.generate(PROMPT, SHORT))
        assert tokens == expected_tokens(PROMPT, 12)


@asynchronous
async def test_a_request_without_output_yet_moves_too() -> None:
    async with fleet(mute, good) as (router, workers):
        running = asyncio.ensure_future(collect(router.generate(PROMPT, SHORT)))
        await until(lambda: workers[0].got(wire.GenerationRequest), "the first worker has it")
        await workers[0].close()
        tokens, _ = await running
        assert tokens == expected_tokens(PROMPT, 12)
        assert workers[1].got(wire.GenerationRequest)[0].output_offset == 0


@asynchronous
async def test_a_lost_last_word_needs_no_other_worker() -> None:
    async def forgets_to_finish(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
        await worker.send(wire.OutputChunk(submit.request_id, 0, tuple(answer(submit)[1])))

    async with fleet(forgets_to_finish) as (router, (worker,)):
        stream = router.generate(PROMPT, SHORT)
        first = await anext(stream)
        await worker.close()
        rest = [chunk async for chunk in stream]
        assert list(first.token_ids) == expected_tokens(PROMPT, 12)
        assert [(chunk.token_ids, chunk.finish_reason) for chunk in rest] == [((), "length")]
        assert router.stats()["completed_by_router"] == 1


@asynchronous
async def test_attempts_are_bounded() -> None:
    scripts = [rejecting("engine_failed")] * 5
    async with fleet(*scripts, router_options={"config": fast(max_attempts=3)}) as (router, workers):
        with pytest.raises(WorkerLost, match="gave up after 3 attempts.*engine_failed"):
            await collect(router.generate(PROMPT, SHORT))
        assert sum(len(worker.got(wire.GenerationRequest)) for worker in workers) == 3
        assert router.stats()["failed"] == 1


@asynchronous
async def test_a_request_that_lost_the_only_worker_waits_for_one_but_not_for_ever() -> None:
    async with fleet(stops_halfway, router_options={"config": fast(resume_seconds=0.2)}) as (router, (worker,)):
        stream = router.generate(PROMPT, SHORT)
        await anext(stream)
        await worker.close()
        with pytest.raises(WorkerLost, match="no worker to go on with"):
            await anext(stream)
        with pytest.raises(NoWorkers):  # a new request does not wait at all
            await collect(router.generate(PROMPT, SHORT))


@asynchronous
async def test_a_waiting_request_goes_on_as_soon_as_a_worker_joins() -> None:
    async with fleet(stops_halfway) as (router, (worker,)):
        stream = router.generate(PROMPT, SHORT)
        first = await anext(stream)
        await worker.close()
        rest = asyncio.ensure_future(anext(stream))
        await until(lambda: router.stats()["workers"][worker.endpoint]["state"] != "ready", "the loss is noticed")
        late_joiner = ScriptedWorker(good, worker_id="late")
        await router.add_worker(late_joiner.endpoint)
        tokens = [*first.token_ids, *(await rest).token_ids]
        async for chunk in stream:
            tokens += chunk.token_ids
        assert tokens == expected_tokens(PROMPT, 12)
        await late_joiner.close()


# --- hung workers -----------------------------------------------------------------------------------------------------


@asynchronous
async def test_requests_leave_a_silent_worker_and_it_is_used_again_when_it_speaks() -> None:
    config = fast(suspect_after_seconds=0.5)
    async with fleet(stops_halfway, good, router_options={"config": config}) as (router, (hung, _)):
        stream = router.generate(PROMPT, SHORT)
        first = await anext(stream)
        hung.silent = True
        rest = [chunk async for chunk in stream]
        assert [t for chunk in (first, *rest) for t in chunk.token_ids] == expected_tokens(PROMPT, 12)
        state = router.stats()["workers"][hung.endpoint]
        assert state["state"] == "suspect" and state["suspect_spells"] == 1 and state["losses"] == 0
        for _ in range(4):  # nothing new goes there
            await collect(router.generate(PROMPT, SHORT))
        assert len(hung.got(wire.GenerationRequest)) == 1
        hung.silent, hung.script = False, good
        (submit,) = hung.got(wire.GenerationRequest)
        await hung.send(wire.OutputChunk(submit.request_id, 6, (1,)))  # what it still had to say
        await until(lambda: router.stats()["workers"][hung.endpoint]["state"] == "ready", "it is back")
        assert router.stats()["late_chunks"] == 1
        assert len(hung.got(wire.Hello)) == 1, "the session went on"
        assert [a.request_id for a in hung.got(wire.Abort)] == [submit.request_id]
        await collect(router.generate(PROMPT, SHORT))
        assert len(hung.got(wire.GenerationRequest)) == 2


@asynchronous
async def test_a_worker_whose_engine_is_stuck_counts_as_hung_though_it_answers() -> None:
    async with fleet(mute, good, router_options={"config": fast(stalled_after_seconds=5.0)}) as (router, (stuck, _)):
        running = asyncio.ensure_future(collect(router.generate(PROMPT, SHORT)))
        await until(lambda: stuck.got(wire.GenerationRequest), "it has the request")
        await stuck.send(wire.Pong(0, 0, step_ms=6000))
        tokens, _ = await running
        assert tokens == expected_tokens(PROMPT, 12)
        await stuck.send(wire.Pong(0, 0))
        await until(lambda: router.stats()["workers"][stuck.endpoint]["state"] == "ready", "its step has ended")
        assert router.stats()["workers"][stuck.endpoint]["suspect_spells"] == 1 and router.stats()["resumed"] == 1


@asynchronous
async def test_a_worker_silent_for_very_long_is_given_up() -> None:
    async with fleet(good, good, router_options={"config": fast(give_up_seconds=0.8)}) as (router, (hung, _)):
        hung.silent = True
        await until(lambda: router.stats()["workers"][hung.endpoint]["losses"] == 1, "it is given up")
        hung.silent = False
        await until(lambda: router.stats()["workers"][hung.endpoint]["state"] == "ready", "it is found again")


# --- refusals ---------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def line(*others: Any, **config: Any) -> AsyncIterator[Any]:
    """(router, workers): the first worker answers one request after another, each a second after the one before by the
    router's clock, which nothing else moves; there have been 14 requests, and four of them have been answered."""
    clock, turns, lock = ManualClock(), itertools.count(), asyncio.Lock()  # a burst: four times the bound may be waited
    held, queued = asyncio.Event(), asyncio.Event()

    async def slow(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
        await queued.wait()  # all of them wait at the time of the first
        async with lock:
            turn = next(turns)
            if turn >= 4:
                await held.wait()
            clock.advance(1.0)
            await good(worker, submit)
            await until(lambda: router.stats()["finished"] >= min(turn + 1, 4), "it has come before time goes on")

    options = {"config": fast(**config), "clock": clock}
    async with fleet(slow, *others, router_options=options) as (router, workers):
        tasks = [ask(router, 1 + number, client="greedy") for number in range(14)]
        await until(lambda: len(workers[0].got(wire.GenerationRequest)) == 14, "all are sent")
        queued.set()
        await until(lambda: router.stats()["finished"] == 4, "four answers")
        yield router, workers
        held.set()
        await asyncio.gather(*tasks)
        assert (await collect(router.generate(PROMPT, SHORT)))[0], "the line is short again"
        router.check()


def ask(router: Router, number: int = 0, **options: Any) -> asyncio.Task[Any]:
    """A request on its way, unlike those of other numbers."""
    prompt = [1000 * number + token for token in PROMPT]
    return asyncio.ensure_future(collect(router.generate(prompt, SHORT, **options)))


@asynchronous
async def test_a_request_that_would_wait_too_long_is_refused_at_once_and_sent_nowhere() -> None:
    async with line(refuse_wait_seconds=2.0) as (router, (worker,)):
        with pytest.raises(Overloaded, match=r"would take 9\.\d s, longer than requests may wait") as refused:
            await collect(router.generate(PROMPT, SHORT, client="greedy"))
        assert refused.value.retry_after_seconds == pytest.approx(9.3, rel=0.05)
        assert len(worker.got(wire.GenerationRequest)) == 14 and router.stats()["refused"] == 1


@asynchronous
async def test_nobody_is_refused_where_the_bound_is_off() -> None:
    async with line(refuse_wait_seconds=None) as (router, (worker,)):
        last = ask(router)
        await until(lambda: len(worker.got(wire.GenerationRequest)) == 15, "it is sent")
        last.cancel()
        assert router.stats()["refused"] == 0


@asynchronous
async def test_a_full_worker_is_passed_over_for_one_with_room_before_anybody_is_refused() -> None:
    async with line(good, refuse_wait_seconds=2.0) as (router, (_, second)):
        assert not second.got(wire.GenerationRequest)  # the policy takes the first by name
        await collect(router.generate(PROMPT, SHORT))
        assert len(second.got(wire.GenerationRequest)) == 1 and router.stats()["refused"] == 0


@asynchronous
async def test_a_client_that_waits_for_less_than_its_part_is_let_in_where_one_with_more_is_refused() -> None:
    async with line(refuse_wait_seconds=2.0) as (router, (worker,)):
        with pytest.raises(Overloaded):
            await collect(router.generate(PROMPT, SHORT, client="greedy"))
        modest = ask(router, client="modest")
        await until(lambda: len(worker.got(wire.GenerationRequest)) == 15, "it is sent")
        modest.cancel()
        assert router.stats()["refused"] == 1


@asynchronous
async def test_a_request_whose_worker_was_lost_is_not_refused() -> None:
    async with fleet(stops_halfway, good) as (router, (first, _)):
        moved = ask(router)
        await until(lambda: router.stats()["output_tokens"] == 6, "half of the tokens")
        refusing = Verdict(refuse_seconds=9.0)
        router._predicted_wait.verdict = lambda *_: refusing  # whoever is asked is refused
        await first.close()
        assert (await moved)[0] == expected_tokens(PROMPT, 12) and router.stats()["refused"] == 0


@asynchronous
async def test_a_request_that_waited_past_its_time_is_given_up_and_aborted_at_its_worker() -> None:
    async with fleet(mute) as (router, (worker,)):
        with pytest.raises(Overloaded, match="no token after 0.05 s"):
            await collect(router.generate(PROMPT, SHORT, first_token_seconds=0.05))
        (submit,) = worker.got(wire.GenerationRequest)
        await until(lambda: worker.got(wire.Abort), "the abort")
        assert worker.got(wire.Abort)[0].request_id == submit.request_id
        assert (router.stats()["shed"], router.stats()["live_requests"]) == (1, 0)


@contextlib.asynccontextmanager
async def waiting() -> AsyncIterator[tuple[Router, RoutedRequest, asyncio.Task[Any]]]:
    """(router, request, who reads it): its only worker is lost, and it waits for one, which never comes."""
    async with fleet(mute, router_options={"config": fast(resume_seconds=10 * HANG_SECONDS)}) as (router, (worker,)):
        task = ask(router)
        await until(lambda: worker.got(wire.GenerationRequest), "the worker has it")
        (live,) = router._live.values()
        await worker.close()
        await until(lambda: live.failures == 1 and live.setback is None, "it waits for another")
        yield router, live, task
        await until(task.done, "it has ended")


@asynchronous
async def test_a_request_that_waits_for_a_worker_is_given_up_when_its_time_is_over() -> None:
    """Regression: it waited on, as long as it would have for a worker."""
    async with waiting() as (router, live, task):
        router._shed(live)
    assert isinstance(task.exception(), Overloaded)


@pytest.mark.parametrize("steps", [1, 2])
@asynchronous
async def test_who_goes_away_as_a_worker_comes_does_not_wait_on(steps: int) -> None:
    """Regression: before Python 3.12 `asyncio.wait_for` lost the cancellation."""
    async with waiting() as (router, _, task):
        router._available.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
    assert task.cancelled()


@asynchronous
async def test_a_request_that_has_begun_in_time_may_take_as_long_as_it_likes() -> None:
    async def dawdling(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
        await stops_halfway(worker, submit)
        await asyncio.sleep(0.2)
        await good(worker, submit)

    async with fleet(dawdling) as (router, _):
        tokens, _ = await collect(router.generate(PROMPT, SHORT, first_token_seconds=0.1))
        assert tokens == expected_tokens(PROMPT, 12) and router.stats()["shed"] == 0


@asynchronous
async def test_a_request_is_refused_where_it_would_wait_longer_than_it_is_of_use() -> None:
    async with line(refuse_wait_seconds=None) as (router, _):
        with pytest.raises(Overloaded):
            await collect(router.generate(PROMPT, SHORT, client="greedy", first_token_seconds=8.0))
        assert (router.stats()["refused"], router.stats()["shed"]) == (1, 0)


@asynchronous
async def test_what_is_said_of_clients_and_times_is_checked_at_once() -> None:
    async with fleet(good) as (router, _):
        with pytest.raises(InvalidInput, match="first_token_seconds must be positive, got 0"):
            router.generate(PROMPT, SHORT, first_token_seconds=0)
        with pytest.raises(InvalidInput, match="first_token_seconds"):
            router.generate(PROMPT, SHORT, first_token_seconds=float("nan"))
        with pytest.raises(InvalidInput, match="client must be hashable"):
            router.generate(PROMPT, SHORT, client=[])
    with pytest.raises(InvalidConfig, match="refuse_wait_seconds"):
        RouterConfig(refuse_wait_seconds=0.0)


@pytest.mark.parametrize("code", ["queue_full", "draining"])
@asynchronous
async def test_a_worker_at_its_bound_is_passed_over(code: str) -> None:
    async with fleet(rejecting(code), good) as (router, (full, _)):
        for _ in range(4):
            tokens, chunks = await collect(router.generate(PROMPT, SHORT))
            assert tokens == expected_tokens(PROMPT, 12) and chunks[0].worker == "w1"
        assert full.got(wire.GenerationRequest) and router.stats()["resumed"] == 0


@asynchronous
async def test_queue_full_is_raised_when_every_worker_is_at_its_bound() -> None:
    async with fleet(rejecting("queue_full"), rejecting("queue_full")) as (router, workers):
        with pytest.raises(QueueFull, match="w0, w1"):
            await collect(router.generate(PROMPT, SHORT))
        assert [len(worker.got(wire.GenerationRequest)) for worker in workers] == [1, 1]
        assert router.stats()["queue_full"] == 1


@asynchronous
async def test_a_request_that_has_run_waits_for_room() -> None:
    async with fleet(stops_halfway, rejecting("queue_full")) as (router, (first, second)):
        stream = router.generate(PROMPT, SHORT)
        tokens = list((await anext(stream)).token_ids)
        await first.close()
        rest = asyncio.ensure_future(anext(stream))
        await until(lambda: len(second.got(wire.GenerationRequest)) >= 3, "it has asked again and again")
        second.script = good
        tokens += (await rest).token_ids
        async for chunk in stream:
            tokens += chunk.token_ids
        assert tokens == expected_tokens(PROMPT, 12)


@asynchronous
async def test_a_request_that_has_run_does_not_wait_for_room_for_ever() -> None:
    """Regression: each refusal gave it as long again."""
    config = fast(resume_seconds=0.2)
    async with fleet(stops_halfway, rejecting("queue_full"), router_options={"config": config}) as (router, (first, _)):
        stream = router.generate(PROMPT, SHORT)
        await anext(stream)
        await first.close()
        with pytest.raises((QueueFull, WorkerLost)):
            await within(HANG_SECONDS, anext(stream))


@asynchronous
async def test_the_router_has_a_bound_of_its_own() -> None:
    async with fleet(mute, router_options={"config": fast(max_live_requests=2)}) as (router, _):
        running = [asyncio.ensure_future(collect(router.generate(PROMPT))) for _ in range(2)]
        await until(lambda: router.stats()["requests"] == 2, "both run")
        with pytest.raises(QueueFull, match="2 requests are live"):
            await collect(router.generate(PROMPT))
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def error_chunk(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
    """The engine fails this request after some output."""
    await worker.send(wire.OutputChunk(submit.request_id, 0, (1, 2)))
    await worker.send(wire.OutputChunk(submit.request_id, 2, (), None, "error", "cache exploded"))


@pytest.mark.parametrize(
    ("script", "error", "complaint"),
    [
        (rejecting("invalid"), InvalidInput, "no: invalid"),
        (rejecting("engine"), EngineError, "no: engine"),
        (error_chunk, EngineError, "cache exploded"),
    ],
    ids=["invalid", "engine", "error_chunk"],
)
@asynchronous
async def test_a_request_that_the_engine_will_not_do_is_not_tried_elsewhere(
    script: Any, error: type, complaint: str
) -> None:
    async with fleet(script, script) as (router, workers):
        with pytest.raises(error, match=complaint):
            await collect(router.generate(PROMPT, SHORT))
        assert sum(len(worker.got(wire.GenerationRequest)) for worker in workers) == 1
        assert router.stats()["failed"] == 1


@asynchronous
async def test_tokens_before_an_error_are_delivered() -> None:
    async with fleet(error_chunk) as (router, _):
        stream = router.generate(PROMPT, SHORT)
        assert (await anext(stream)).token_ids == (1, 2)
        with pytest.raises(EngineError):
            await anext(stream)


# --- going away -------------------------------------------------------------------------------------------------------


async def leave_by_break(router: Router) -> None:
    """Read a little, then close the iterator."""
    stream = router.generate(PROMPT, SHORT)
    async for _ in stream:
        break
    await stream.aclose()


async def leave_by_cancel(router: Router) -> None:
    """Cancel the task that reads."""
    task = asyncio.ensure_future(collect(router.generate(PROMPT, SHORT)))
    await until(lambda: router.stats()["output_tokens"] > 0, "output comes")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def leave_by_exception(router: Router) -> None:
    """An error of the consumer."""
    with contextlib.suppress(RuntimeError):
        async with contextlib.aclosing(router.generate(PROMPT, SHORT)) as stream:
            async for _ in stream:
                raise RuntimeError("the client hung up")


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_cancel, leave_by_exception], ids=lambda way: way.__name__)
@asynchronous
async def test_a_consumer_that_leaves_cancels_the_booking_and_aborts_the_request(leave: Any) -> None:
    async with fleet(stops_halfway) as (router, (worker,)):
        await leave(router)
        assert_bookings_are_even(router)
        assert router.stats()["cancelled"] == 1
        await until(lambda: worker.got(wire.Abort), "the worker is informed")
        assert [a.request_id for a in worker.got(wire.Abort)] == [
            s.request_id for s in worker.got(wire.GenerationRequest)
        ]


@asynchronous
async def test_closing_the_router_ends_running_requests_with_an_error_and_says_bye() -> None:
    async with fleet(stops_halfway) as (router, (worker,)):
        stream = router.generate(PROMPT, SHORT)
        await anext(stream)
        await router.close()
        with pytest.raises(TransportError, match="closed"):
            await anext(stream)
        await until(lambda: worker.got(wire.Bye), "the worker receives Bye")
        await router.close()


@asynchronous
async def test_removing_a_worker_moves_its_requests() -> None:
    async with fleet(stops_halfway, good) as (router, workers):
        stream = router.generate(PROMPT, SHORT)
        tokens = list((await anext(stream)).token_ids)
        await router.remove_worker(workers[0].endpoint)
        async for chunk in stream:
            tokens += chunk.token_ids
        assert tokens == expected_tokens(PROMPT, 12) and list(router.scheduler.workers) == ["w1"]
        with pytest.raises(UnknownWorker):
            await router.remove_worker("tcp://127.0.0.1:1")


@asynchronous
async def test_a_draining_worker_finishes_what_it_has_and_gets_nothing_new() -> None:
    async with fleet(stops_halfway, good) as (router, (drains, _)):
        stream = router.generate(PROMPT, SHORT)
        tokens = list((await anext(stream)).token_ids)
        await drains.send(wire.Draining())
        await until(lambda: router.stats()["workers"][drains.endpoint]["state"] == "draining", "it is known")
        for _ in range(3):
            assert (await collect(router.generate(PROMPT, SHORT)))[1][0].worker == "w1"
        (submit,) = drains.got(wire.GenerationRequest)
        await drains.send(wire.OutputChunk(submit.request_id, 6, tuple(answer(submit)[1][6:]), None, "length"))
        async for chunk in stream:
            assert chunk.worker == "w0"
            tokens += chunk.token_ids
        assert tokens == expected_tokens(PROMPT, 12)
        await drains.close()
        await until(lambda: "w0" not in router.scheduler.workers, "it is forgotten when it goes")


@asynchronous
async def test_a_worker_that_the_application_removed_from_the_scheduler_harms_nobody() -> None:
    config = fast(suspect_after_seconds=0.3)
    async with fleet(good, good, router_options={"config": config}) as (router, workers):
        workers[0].silent = True
        await until(lambda: router.stats()["workers"][workers[0].endpoint]["state"] == "suspect", "it is suspect")
        router.scheduler.remove_worker("w0")
        tokens, _ = await collect(router.generate(PROMPT, SHORT))
        assert tokens == expected_tokens(PROMPT, 12)


# --- deciding only ----------------------------------------------------------------------------------------------------


@asynchronous
async def test_route_books_while_the_block_runs() -> None:
    async with fleet(good) as (router, (worker,)):
        async with router.route(PROMPT, max_new_tokens=5) as decision:
            assert decision.worker == "w0" and decision.prompt_tokens == len(PROMPT)
            assert router.scheduler.stats()["live_requests"] == 1
            router.scheduler.first_token(decision.request_id, cached_tokens=0)
        assert router.scheduler.stats()["finished"] == 1
        with pytest.raises(RuntimeError, match="mine"):
            async with router.route(PROMPT):
                raise RuntimeError("mine")
        assert router.scheduler.stats()["cancelled"] == 1
        async with router.route(PROMPT) as decision:
            router.scheduler.finish(decision.request_id, output_tokens=3)
        assert router.scheduler.stats()["finished"] == 2
        assert not worker.got(wire.GenerationRequest), "sending is the application's business"


# --- handshakes -------------------------------------------------------------------------------------------------------


async def refusal_of(*workers: ScriptedWorker, **options: Any) -> str:
    """What `start` says about these workers."""
    router = Router([worker.endpoint for worker in workers], config=FAST, **options)
    try:
        with pytest.raises(HandshakeRefused) as caught:
            await router.start()
    finally:
        await router.close()
        for worker in workers:
            await worker.close()
    assert not router.scheduler.workers or len(workers) > 1
    return str(caught.value)


@asynchronous
async def test_a_worker_of_another_model_is_refused_naming_both() -> None:
    text = await refusal_of(ScriptedWorker(good, model="mistral"), model="llama")
    assert "'mistral'" in text and "'llama'" in text and "scripted" in text and "router-" in text


@asynchronous
async def test_without_a_model_of_its_own_the_router_wants_all_workers_alike() -> None:
    one, two = ScriptedWorker(good, worker_id="a", model="llama"), ScriptedWorker(good, worker_id="b", model="qwen")
    text = await refusal_of(one, two)
    assert "'llama'" in text and "'qwen'" in text


@asynchronous
async def test_two_workers_of_one_name_are_refused_naming_both_addresses() -> None:
    one, two = ScriptedWorker(good), ScriptedWorker(good)
    text = await refusal_of(one, two)
    assert one.endpoint in text and two.endpoint in text and "'scripted'" in text


@asynchronous
async def test_a_worker_of_another_protocol_version_is_refused_naming_both() -> None:
    class Future(ScriptedWorker):
        async def send(self, message: wire.Message, **_: Any) -> None:
            frame = bytearray(wire.encode(message, epoch=self.epoch, session=self.session))
            frame[frame.index(wire.PROTOCOL_VERSION, 1)] = 99
            await self.send_raw(bytes(frame))

    text = await refusal_of(Future(good))
    assert "version 99" in text and f"speaks {wire.PROTOCOL_VERSION}" in text


@asynchronous
async def test_nobody_there_is_no_workers_with_the_address() -> None:
    router = Router(["tcp://127.0.0.1:9"], config=fast(connect_seconds=0.3, handshake_seconds=0.1))
    with pytest.raises(NoWorkers, match="tcp://127.0.0.1:9"):
        await router.start()


@asynchronous
async def test_a_router_starts_once() -> None:
    async with fleet(good) as (router, _):
        with pytest.raises(InvalidInput, match="before"):
            await router.start()


@asynchronous
async def test_a_fleet_starts_with_the_workers_that_are_there() -> None:
    worker = ScriptedWorker(good)
    config = fast(connect_seconds=0.5, handshake_seconds=0.1)
    async with Router([worker.endpoint, "tcp://127.0.0.1:9"], config=config) as router:
        tokens, _ = await collect(router.generate(PROMPT, SHORT))
        assert tokens == expected_tokens(PROMPT, 12)
    await worker.close()


@asynchronous
async def test_a_worker_added_later_must_fit_too() -> None:
    async with fleet(good, model="llama") as (router, _):
        stranger = ScriptedWorker(good, worker_id="stranger", model="qwen")
        with pytest.raises(HandshakeRefused, match="'qwen'"):
            await router.add_worker(stranger.endpoint)
        assert stranger.endpoint not in router.stats()["workers"]
        await stranger.close()


# --- events -----------------------------------------------------------------------------------------------------------


def evicted(kept_tokens: int) -> tuple[PrefixEvicted, ...]:
    """The worker keeps only the first tokens of PROMPT."""
    return (PrefixEvicted(np.array(PROMPT, np.int32), kept_tokens),)


def estimated(router: Router, worker_id: str = "w0") -> int:
    """Tokens of PROMPT that the scheduler expects cached there."""
    return int(router.scheduler.match([*PROMPT, 1]).matched_tokens.get(worker_id, 0))


@contextlib.asynccontextmanager
async def caching_worker() -> AsyncIterator[Any]:
    """(router, worker): PROMPT has been served, so it is estimated cached."""
    async with fleet(good) as (router, (worker,)):
        await collect(router.generate(PROMPT, SHORT))
        assert estimated(router) == len(PROMPT)
        await subscribed(router, worker)
        yield router, worker


async def subscribed(router: Router, worker: ScriptedWorker) -> None:
    """Wait until published events arrive by themselves, without a replay."""
    while not router.stats()["workers"][worker.endpoint]["event_batches"]:
        worker.batches.append((BlockRemoved((len(worker.batches),)),))
        await worker.publish(len(worker.batches) - 1)
        await asyncio.sleep(0.01)


def link_stats(router: Router, worker: ScriptedWorker) -> dict[str, Any]:
    """Counters of the worker's address."""
    return dict(router.stats()["workers"][worker.endpoint])


@asynchronous
async def test_evictions_reach_the_scheduler() -> None:
    async with caching_worker() as (router, worker):
        worker.batches.append(evicted(32))
        await worker.publish(len(worker.batches) - 1)
        await until(lambda: estimated(router) == 32, "the eviction is known")


@asynchronous
async def test_lost_events_are_replayed_in_order_and_doubled_ones_applied_once() -> None:
    async with caching_worker() as (router, worker):
        start = len(worker.batches)
        worker.batches += [evicted(64), evicted(48), evicted(32), evicted(16)]
        await worker.publish(start + 3)
        await worker.publish(start + 3)
        await worker.publish(start + 2)
        await until(lambda: estimated(router) == 16, "the replay has come")
        await until(lambda: worker.got(wire.Replay), "it was asked for")
        assert worker.got(wire.Replay)[-1].from_seq <= start
        stats = link_stats(router, worker)
        assert stats["event_gaps"] >= 1 and stats["event_duplicates"] >= 1 and stats["resyncs"] == 0
        assert stats["event_batches"] == start + 4


@asynchronous
async def test_a_loss_with_nothing_after_it_is_noticed_by_heartbeat() -> None:
    async with caching_worker() as (router, worker):
        worker.batches.append(evicted(40))  # never published
        await until(lambda: estimated(router) == 40, "a heartbeat has reported")


@asynchronous
async def test_events_too_old_to_replay_end_in_expecting_nothing() -> None:
    async with caching_worker() as (router, worker):
        worker.batches += [evicted(64), evicted(32)]
        worker.first_kept = len(worker.batches) - 1
        await worker.publish(len(worker.batches) - 1)
        await until(lambda: link_stats(router, worker)["resyncs"] == 1, "the router starts afresh")
        assert estimated(router) == 0
        worker.batches.append(evicted(16))
        await worker.publish(len(worker.batches) - 1)
        batches = link_stats(router, worker)["event_batches"]
        await until(lambda: link_stats(router, worker)["event_batches"] > batches, "the stream goes on")


@asynchronous
async def test_events_of_another_epoch_and_malformed_ones_are_dropped_and_counted() -> None:
    async with caching_worker() as (router, worker):
        worker.batches.append((AllBlocksCleared(),))
        await worker.publish(len(worker.batches) - 1, epoch=999)
        worker.batches.pop()
        await worker.publisher.send(b"garbage")
        await until(lambda: link_stats(router, worker)["malformed_frames"] == 1, "the garbage came")
        assert link_stats(router, worker)["stale_frames"] == 1
        assert estimated(router) == len(PROMPT) and link_stats(router, worker)["state"] == "ready"


@asynchronous
async def test_events_that_the_scheduler_refuses_clear_the_estimates() -> None:
    class Picky(GlobalScheduler):
        def apply(self, worker_id: str, events: Any) -> int:
            if any(isinstance(event, PrefixEvicted) for event in events):
                raise InvalidInput("not today")
            return super().apply(worker_id, events)

    async with fleet(good, router_options={"scheduler": Picky([])}) as (router, (worker,)):
        await collect(router.generate(PROMPT, SHORT))
        worker.batches.append(evicted(32))
        await until(lambda: link_stats(router, worker)["events_refused"] == 1, "the event came")
        assert estimated(router) == 0


@asynchronous
async def test_after_a_break_of_the_network_the_same_epoch_keeps_its_cache_and_its_place() -> None:
    async with caching_worker() as (router, worker):
        worker.batches.append(evicted(48))  # while nobody listens
        await worker.send(wire.Pong(0, 0), skip=1)
        await until(lambda: len(worker.got(wire.Hello)) == 2, "a new session")
        await until(lambda: estimated(router) == 48, "what was missed is replayed")
        assert link_stats(router, worker)["restarts"] == 0


@asynchronous
async def test_a_new_epoch_drops_what_was_estimated() -> None:
    async with caching_worker() as (router, worker):
        worker.epoch, worker.batches = worker.epoch + 1, []
        await worker.send_raw(wire.encode(wire.Closed("no_session", ""), epoch=worker.epoch, session=worker.session))
        await until(lambda: link_stats(router, worker)["restarts"] == 1, "the restart is seen")
        assert estimated(router) == 0 and link_stats(router, worker)["state"] == "ready"
        tokens, _ = await collect(router.generate(PROMPT, SHORT))
        assert tokens == expected_tokens(PROMPT, 12)


@asynchronous
async def test_a_worker_gone_for_long_is_forgotten_and_may_come_back() -> None:
    async with fleet(good, router_options={"config": fast(forget_after_seconds=0.2, handshake_seconds=0.1)}) as (
        router,
        (worker,),
    ):
        await collect(router.generate(PROMPT, SHORT))
        worker.silent = True
        await worker.send(wire.Closed("shutdown", ""))
        await until(lambda: "w0" not in router.scheduler.workers, "it is forgotten")
        worker.silent = False
        await until(lambda: "w0" in router.scheduler.workers, "it is back")
        assert estimated(router) == 0, "nothing is known of a cache after so long"


@asynchronous
async def test_a_load_that_differs_from_what_is_booked_is_shown() -> None:
    async with fleet(mute, router_options={"config": fast()}) as (router, (worker,)):

        def drift() -> int:
            return router.scheduler.stats()["workers"]["w0"]["drift_requests"]

        running = asyncio.ensure_future(collect(router.generate(PROMPT, SHORT)))
        await until(lambda: worker.got(wire.GenerationRequest), "it has the request")
        worker.silent = True  # from now on it says only what the test says
        await worker.send(wire.Pong(0, 0, running=3, waiting=1))
        await until(lambda: drift() == 3, "it has three requests that nobody here knows")
        router.scheduler.remove_worker("w0")  # behind the router's back, which is the application's right
        await worker.send(wire.Pong(0, 0, running=5, waiting=1))
        await until(lambda: link_stats(router, worker)["load"]["running"] == 5, "the load came")
        assert link_stats(router, worker)["losses"] == 0, "and did no harm"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert router.scheduler.stats()["live_requests"] == 0


# --- background -------------------------------------------------------------------------------------------------------


@asynchronous
async def test_the_scheduler_ticks_in_the_background_and_survives_a_failing_tick() -> None:
    class Moody(GlobalScheduler):
        def tick(self, now: float | None = None) -> None:
            if ticks.__next__() % 2:
                raise PrebleError("not now")
            super().tick(now)

    ticks = iter(range(10**9))
    async with fleet(good, router_options={"scheduler": Moody([])}) as (router, _):
        await until(lambda: router.stats()["ticks"] >= 2 and router.stats()["ticks_failed"] >= 2, "it ticks")


@asynchronous
async def test_prompts_and_outputs_are_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "preble")
    secret = [987654321, 987654322]
    async with fleet(error_chunk, stops_halfway) as (router, workers):
        for _ in range(2):
            stream = router.generate(secret, SHORT)
            with contextlib.suppress(EngineError):
                await anext(stream)
                await anext(stream)
            await stream.aclose()
        await workers[1].close()
    assert caplog.records and "98765432" not in caplog.text


def test_a_clock_of_the_application_is_used() -> None:
    clock = ManualClock(5.0)
    router = Router([], clock=clock)
    assert router.scheduler.stats()["live_requests"] == 0
    clock.advance(1.0)
    router.scheduler.tick()


@asynchronous
async def test_a_lost_cancellation_does_not_keep_a_router_from_closing(caplog: pytest.LogCaptureFixture) -> None:
    """A library's `wait_for` may swallow one; nobody would end the task then, and `close` would wait for good."""
    lost: list[str] = []

    async with fleet(good) as (router, _):
        worker = next(iter(router.fleet.workers.values()))
        supervise = worker.task

        async def swallows_once() -> None:
            try:
                await supervise
            except asyncio.CancelledError:
                lost.append("once")
                await asyncio.Event().wait()

        worker.task = asyncio.ensure_future(swallows_once())
        await asyncio.sleep(0)
    assert lost == ["once"] and worker.task.cancelled()
    assert not caplog.records


@asynchronous
async def test_a_socket_that_was_left_open_does_not_keep_a_router_from_closing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_module, "CLOSE_SECONDS", 0.05)
    async with fleet(good) as (router, _):
        left = router.fleet._context.socket(zmq.DEALER)
    assert "a socket of this router is still open" in caplog.text
    left.close(linger=0)


@asynchronous
async def test_a_router_has_sockets_for_more_workers_than_zeromq_allows_by_default() -> None:
    """Regression: at 1,023 sockets, four of each link, the 256th worker could not be connected to."""
    router = Router([])
    await router.start(min_workers=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sockets: list[zmq.Socket[bytes]] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
        for _ in range(1100):
            sockets.append(router._fleet._context.socket(zmq.DEALER))
    finally:
        for socket in sockets:
            socket.close(linger=0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await router.close()
    assert len(sockets) == 1100


@asynchronous
async def test_a_supervisor_survives_what_nobody_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor is left when a link is opened, twice: it is counted each time, and the worker is back soon."""
    failures = iter([OSError(24, "Too many open files"), OSError(24, "Too many open files")])
    new_link = fleet_module.Fleet._new_link

    def scarce(self: Any, worker: Any) -> Any:
        error = next(failures, None)
        if error is not None:
            raise error
        return new_link(self, worker)

    async with fleet(good) as (router, (worker,)):
        monkeypatch.setattr(fleet_module.Fleet, "_new_link", scarce)
        await worker.send(wire.Closed("shutdown", ""))
        found = router.fleet.workers[worker.endpoint]
        await until(lambda: found.counters.errors == 2, "both failures are counted")
        await until(lambda: found.state == "ready", "it is found again")
        tokens, _ = await collect(router.generate(PROMPT, SHORT))
        assert tokens == expected_tokens(PROMPT, 12)


@asynchronous
async def test_a_session_that_fails_after_its_handshake_is_lost_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was ready when something failed: its requests go elsewhere, and it does not stay ready without a session.
    Nobody reads its closed sockets: the readers went on, and their errors were nobody's."""
    readers: list[Any] = []

    class Recorded(client.FrameReader):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            readers.append(self)

    monkeypatch.setattr(client, "FrameReader", Recorded)
    async with fleet(good) as (router, (worker,)):
        found, before = router.fleet.workers[worker.endpoint], router.on_available
        calls = iter([RuntimeError("somebody's own")])

        def failing(one: Any) -> None:
            error = next(calls, None)
            if error is not None:
                assert one.state == "ready"
                raise error
            before(one)

        monkeypatch.setattr(router, "on_available", failing)
        await worker.send(wire.Closed("shutdown", ""))
        await until(lambda: found.counters.errors == 1 and found.state == "ready", "it is back")
        router.fleet.check()
        left = [reader.ended for reader in readers[:-3] if not reader.ended.cancelled()]
        assert len(readers) >= 9 and all(ended.done() and ended.exception() is None for ended in left)


@asynchronous
async def test_ticks_go_on_after_an_error_that_is_not_preble_s() -> None:
    class Moody(GlobalScheduler):
        def tick(self, now: float | None = None) -> None:
            if ticks.__next__() % 2:
                raise ZeroDivisionError("a policy of somebody's own")
            super().tick(now)

    ticks = iter(range(10**9))
    async with fleet(good, router_options={"scheduler": Moody([])}) as (router, _):
        await until(lambda: router.stats()["ticks"] >= 2 and router.stats()["ticks_failed"] >= 2, "it ticks")
