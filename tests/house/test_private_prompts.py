"""Prompts and outputs are in no log record and in no error text, at debug level, whatever goes wrong. Owns the search;
the faults it needs are small copies of those that other files test."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from msgspec import structs

from preble import GlobalScheduler, SamplingParams
from preble.errors import EngineError, InvalidInput, PrebleError
from preble.router import Router
from preble.transport import wire
from preble.types import BlockStored, PrefixEvicted
from tests.support.transport import (
    FirstByName,
    Peer,
    ScriptedWorker,
    WorkerProcess,
    asynchronous,
    collect,
    expected_tokens,
    fast,
    until,
)
from tests.worker.test_process import Leashed

SECRET_TEXT = "the diagnosis of patient Zebulon"
SECRET_IDS = [1987650000 + i for i in range(120)]
SECRET = np.array(SECRET_IDS, np.int32)


def leaks(text: str) -> list[str]:
    """Parts of the prompt, or of its answer, that a text holds, in whatever form."""
    words = ["19876500", "Zebulon", "diagnosis", repr(struct.pack("<i", SECRET_IDS[3]))[2:-1]]
    words += [f"{expected_tokens(SECRET_IDS, 4)}"[1:-1], struct.pack("<i", SECRET_IDS[3]).hex()]
    return [word for word in words if word in text]


async def outcome(router: Router, prompt: Any, **options: Any) -> str:
    """Ask for some tokens; the text of what went wrong."""
    try:
        await collect(router.generate(prompt, SamplingParams(max_new_tokens=40), **options))
    except PrebleError as error:
        return f"{error!r} {error.__cause__!r}"
    return ""


@asynchronous
async def test_no_process_of_a_fleet_in_trouble_logs_what_it_was_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    log = tmp_path / "worker.log"
    prefix = ("sh", "-c", f'exec "$@" 2>>{log}', "sh")
    options = ("--log-level", "debug", "--kv-capacity-tokens", "400", "--max-requests", "2")
    first, second = (WorkerProcess("--id", name, *options, time_scale=0.3, prefix=prefix) for name in "ab")
    texts = []
    tokenizer = {SECRET_TEXT: SECRET_IDS}.__getitem__
    try:
        endpoints = [first.endpoint, second.endpoint]
        async with Router(endpoints, policy=FirstByName(), config=fast(), tokenizer=tokenizer) as router:
            many = [outcome(router, [*SECRET_IDS, i]) for i in range(7)]  # some find every worker full
            texts += await asyncio.gather(outcome(router, SECRET_TEXT), *many)
            texts.append(await outcome(router, SECRET_IDS * 20))  # refused by the engine
            for junk in ([1.5, *SECRET_IDS], [-1, *SECRET_IDS], [SECRET_IDS], [2**40, *SECRET_IDS]):
                with pytest.raises(PrebleError) as caught:
                    router.generate(junk)
                texts.append(str(caught.value))
            vandalise(first.endpoint)
            running = asyncio.ensure_future(outcome(router, SECRET_TEXT))
            await until(lambda: router.stats()["output_tokens"] > 40 * 3, "it is under way")
            first.kill()
            texts.append(await running)
    finally:
        first.stop()
        second.stop()
    assert sum(map(bool, texts)) >= 6, "things went wrong"
    assert "malformed frame" in log.read_text() and caplog.records, "and were logged"
    for text in (*texts, log.read_text(), caplog.text):
        assert not leaks(text)


def vandalise(endpoint: str) -> None:
    """Frames with the prompt where it does not belong."""
    peer = Peer(endpoint)
    peer.hello()
    good = msgpack.unpackb(wire.encode(wire.GenerationRequest("r", SECRET)))
    for place in range(len(good)):
        for wrong in (SECRET_TEXT, SECRET_IDS, SECRET.tobytes() + b"x"):
            peer.send_raw(msgpack.packb([*good[:place], wrong, *good[place + 1 :]]))
            fault = peer.expect(wire.Fault | wire.Refused | wire.Closed)
            assert not leaks(fault.text)
    peer.close()


@asynchronous
async def test_a_worker_that_talks_nonsense_gets_no_prompt_into_the_routers_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)

    async def rambles(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
        await worker.send(wire.OutputChunk(submit.request_id, 7, tuple(SECRET_IDS)))  # positions are missing

    class Picky(GlobalScheduler):
        def apply(self, worker_id: str, events: Any) -> int:
            if any(isinstance(event, PrefixEvicted) for event in events):
                raise InvalidInput("not today")
            return super().apply(worker_id, events)

    worker = ScriptedWorker(rambles)
    worker.batches = [(BlockStored((1,), None, SECRET, 120),), (PrefixEvicted(SECRET, 0),)]
    try:
        config = fast(max_attempts=2, resume_seconds=0.2)
        async with Router([worker.endpoint], config=config, scheduler=Picky([])) as router:
            assert not leaks(await outcome(router, SECRET_IDS))
            await until(lambda: router.stats()["workers"][worker.endpoint]["events_refused"], "the event came")
            good = msgpack.unpackb(wire.encode(wire.Events(5, worker.batches[0]), epoch=worker.epoch))
            await worker.publisher.send(msgpack.packb([*good[:6], [["S", SECRET_TEXT, SECRET_IDS]]]))
            await until(lambda: router.stats()["workers"][worker.endpoint]["malformed_frames"], "nonsense came")
    finally:
        await worker.close()
    assert "token gap" in caplog.text and "malformed event frame" in caplog.text and not leaks(caplog.text)


def test_an_engine_that_fails_with_the_prompt_in_its_error_does_not_get_it_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    one = Leashed()
    with contextlib.closing(one):
        one.submit("r")
        one.engine.explode = RuntimeError(f"cannot compute {SECRET_IDS} {SECRET_TEXT}")
        one.engine.allowed.release()
        closed = one.peer.expect(wire.Closed)
        one.thread.join(30)
    assert isinstance(one.error, EngineError) and not leaks(closed.text + str(one.error))
    assert "the engine failed: RuntimeError" in caplog.text and "in step" in caplog.text
    assert not leaks(caplog.text)


# --- sizes ------------------------------------------------------------------------------------------------------------


def frame_of(size_bytes: int) -> bytes:
    """A request of exactly that size."""
    submit = wire.GenerationRequest("r", SECRET, namespace="")
    spare = size_bytes - len(wire.encode(structs.replace(submit, namespace=b"x" * 300), epoch=5, session=1, seq=1))
    frame = wire.encode(structs.replace(submit, namespace=b"x" * (300 + spare)), epoch=5, session=1, seq=1)
    assert len(frame) == size_bytes
    return frame


@pytest.fixture
def small() -> Any:
    """A worker that takes frames of 2,000 bytes."""
    return lambda: Leashed(max_frame_bytes=2000)


@pytest.mark.parametrize(("size_bytes", "answer"), [(2000, wire.OutputChunk), (2001, wire.Fault)])
def test_a_frame_at_the_limit_is_served_and_one_byte_more_is_a_fault(
    small: Callable[[], Leashed], size_bytes: int, answer: type
) -> None:
    with contextlib.closing(small()) as one:
        one.peer.send_raw(frame_of(size_bytes))
        one.engine.allowed.release()
        assert isinstance(one.peer.receive(), answer)


def test_at_four_times_the_limit_zeromq_itself_cuts_the_sender_off(small: Callable[[], Leashed]) -> None:
    with contextlib.closing(small()) as one:
        bad = Peer(one.worker.server.endpoint)
        bad.send_raw(b"\0" * 8000)
        assert isinstance(bad.receive(), wire.Fault), "over the limit, but it is reported"
        bad.send_raw(b"\0" * 8001)
        one.peer.send(wire.Ping(1))
        assert isinstance(one.peer.expect(wire.Pong), wire.Pong), "nobody else is harmed"
        assert one.worker.server.counters.malformed_frames == 1, "not even read"
        bad.close()
