"""What the transport's tests share: raw routers, scripted workers, real worker processes, and what they should answer.

Nothing here waits for a fixed time: waits end when something happens, and time limits only catch hangs.
"""

from __future__ import annotations

import asyncio
import functools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import zmq
import zmq.asyncio
from msgspec import structs

from preble import CostModel, LocalConfig, Policy, SamplingParams
from preble.engines.base import GenerationRequest
from preble.engines.simulated import SimulatedEngine
from preble.router import Router, RouterConfig
from preble.router.fleet import FleetConfig
from preble.transport import wire
from preble.transport.client import LinkConfig
from tests.support.paths import ROOT

HANG_SECONDS = 30.0

# Small times, so that tests see hours of a fleet's life in seconds. Only stories about hanging workers may call one
# quiet soon: on a busy machine any process is silent for half a second now and then.
FAST_LINK = LinkConfig(
    heartbeat_seconds=0.05,
    suspect_after_seconds=10.0,
    hung_after_seconds=10.0,
    give_up_seconds=20.0,
    handshake_seconds=2.0,
)
FAST_FLEET = FleetConfig(FAST_LINK, reconnect_min_seconds=0.02, reconnect_max_seconds=0.1, forget_after_seconds=30.0)
FAST = RouterConfig(FAST_FLEET, resume_seconds=15.0, retry_full_seconds=0.05, connect_seconds=15.0, tick_seconds=0.05)


def fast(**changes: Any) -> RouterConfig:
    """`FAST` with other fields of any of its three levels."""
    config: Any = FAST
    for part, name in ((FAST.fleet.link, "link"), (FAST.fleet, "fleet"), (FAST, "")):
        mine = {key: changes.pop(key) for key in list(changes) if key in part.__slots__}
        if name == "link":
            link = replace(part, **mine)
        elif name == "fleet":
            fleet = replace(part, link=link, **mine)
        else:
            config = replace(part, fleet=fleet, **mine)
    assert not changes, f"no such fields: {changes}"
    return config


@functools.lru_cache(maxsize=1000)
def _answer(prompt: bytes, max_new_tokens: int) -> tuple[int, ...]:
    engine = SimulatedEngine(CostModel.preset("mistral-7b/a6000"), LocalConfig(1 << 20), time_scale=0.0)
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    engine.submit(GenerationRequest("r", np.frombuffer(prompt, np.int32), sampling))
    tokens: list[int] = []
    while engine.has_work():
        for chunk in engine.step():
            tokens += chunk.token_ids
    return tuple(tokens)


def expected_tokens(prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """What the simulated engine answers when nothing disturbs it."""
    return list(_answer(np.asarray(prompt, np.int32).tobytes(), max_new_tokens))


class FirstByName(Policy):
    """The first worker by name that may take the request, so that stories can say which."""

    name = reason = "first_by_name"

    def score(self, request: Any, workers: Any) -> Sequence[float]:
        return [float(sorted(workers.ids).index(worker_id)) for worker_id in workers.ids]


# --- a router reduced to its socket -----------------------------------------------------------------------------------


class Peer:
    """A raw router: sends and receives frames. `pump` is called while it waits, for servers of the same thread."""

    def __init__(
        self, endpoint: str, *, pump: Callable[[], Any] | None = None, receive_queue: int = 0, receive_bytes: int = 0
    ) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        if receive_queue:
            self.socket.rcvhwm = receive_queue
        if receive_bytes:
            self.socket.rcvbuf = receive_bytes
        self.socket.connect(endpoint)
        self.epoch = 0
        self.session = 1
        self.seq = 0
        self._pump = pump
        self._held: list[wire.OutputChunk] = []  # nobody has expected yet

    def send(self, message: wire.Message) -> None:
        """Send the next message of the session."""
        self.send_raw(wire.encode(message, epoch=self.epoch, session=self.session, seq=self.seq))
        self.seq += 1

    def send_raw(self, *parts: bytes) -> None:
        """Send frames as they are."""
        self.socket.send_multipart(parts)

    def receive(self, timeout_seconds: float = HANG_SECONDS) -> wire.Message | None:
        """The next message; None if none comes in time."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            if self._pump is not None:
                self._pump()
            if self.socket.poll(10):
                envelope = wire.decode(self.socket.recv(), wire.WORKER_MESSAGES)
                self.epoch = envelope.epoch
                return envelope.message
        return None

    def hello(self, router_id: str = "raw-router") -> wire.Welcome:
        """Shake hands."""
        self.send(wire.Hello(router_id))
        welcome = self.receive()
        assert isinstance(welcome, wire.Welcome), welcome
        return welcome

    def expect(self, kind: type, timeout_seconds: float = HANG_SECONDS) -> Any:
        """The next message of that class; others are skipped, but chunks are kept for whoever expects one: they count
        one by one."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            if kind is wire.OutputChunk and self._held:
                return self._held.pop(0)
            message = self.receive(deadline - time.monotonic())
            if isinstance(message, kind):
                return message
            if isinstance(message, wire.OutputChunks):
                self._held += message.chunks
            elif isinstance(message, wire.OutputChunk):
                self._held.append(message)
        raise AssertionError(f"no {kind.__name__} came")

    def close(self) -> None:
        """Vanish without a word."""
        self.socket.close(linger=0)


# --- a worker that says what the test wants ---------------------------------------------------------------------------


class ScriptedWorker:
    """A worker on the test's own loop: handshakes, heartbeats and replays by the book, requests by the script.

    `script(worker, submit)` is called for each request and sends what it likes. Event batches are published by hand, so
    that they can be lost, doubled and reordered.
    """

    def __init__(
        self, script: Callable[[ScriptedWorker, wire.GenerationRequest], Awaitable[None]], **facts: Any
    ) -> None:
        self.script = script
        self.epoch = 1000
        self.context = zmq.asyncio.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.publisher = self.context.socket(zmq.PUB)
        self.router.linger = self.publisher.linger = 0
        port = self.router.bind_to_random_port("tcp://127.0.0.1")
        events_port = self.publisher.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        basic = wire.Welcome("scripted", "script", "", "", 1, 100_000, None, 1 << 20, (), "", 0, wire.FRAME_BYTES_MAX)
        self.facts = structs.replace(basic, events_endpoint=f"tcp://127.0.0.1:{events_port}", **facts)
        self.batches: list[tuple[Any, ...]] = []  # by number: what a replay gives
        self.first_kept = 0
        self.received: list[wire.Message] = []
        self.silent = False
        self.identity = b""
        self.session = 0
        self.seq = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._start(self._serve())

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

    async def _serve(self) -> None:
        while True:
            self.identity, frame = await self.router.recv_multipart()
            envelope = wire.decode(frame, wire.ROUTER_MESSAGES)
            message = envelope.message
            self.received.append(message)
            if self.silent:
                continue
            if isinstance(message, wire.Hello):
                self.session, self.seq = envelope.session, 0
                await self.send(structs.replace(self.facts, next_event_seq=len(self.batches)))
            elif isinstance(message, wire.Ping):
                await self.send(wire.Pong(message.nonce, len(self.batches)))
            elif isinstance(message, wire.Replay):
                await self._replay(message.from_seq)
            elif isinstance(message, wire.GenerationRequest):
                self._start(self.script(self, message))

    async def _replay(self, from_seq: int) -> None:
        stop = from_seq
        if from_seq >= self.first_kept:
            stop = len(self.batches)
            for number in range(from_seq, stop):
                await self.send(wire.Events(number, self.batches[number]))
        await self.send(wire.ReplayEnd(from_seq, stop, self.first_kept, len(self.batches)))

    async def send(self, message: wire.Message, *, skip: int = 0, epoch: int | None = None) -> None:
        """Send the next message of the session; `skip` leaves a hole in the numbering."""
        self.seq += skip
        epoch = self.epoch if epoch is None else epoch
        await self.send_raw(wire.encode(message, epoch=epoch, session=self.session, seq=self.seq))
        self.seq += 1

    async def send_raw(self, *parts: bytes) -> None:
        """Send frames as they are."""
        await self.router.send_multipart([self.identity, *parts])

    async def publish(self, number: int, *, epoch: int | None = None) -> None:
        """Send batch `number` to subscribers."""
        message = wire.Events(number, self.batches[number])
        await self.publisher.send(wire.encode(message, epoch=self.epoch if epoch is None else epoch))

    def got(self, kind: type) -> list[Any]:
        """Messages of one class, in order."""
        return [message for message in self.received if isinstance(message, kind)]

    async def close(self) -> None:
        """Vanish without a word."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.context.destroy(linger=0)


# --- real worker processes --------------------------------------------------------------------------------------------


class WorkerProcess:
    """`preble worker ARGS...` as a process, simulated unless they say otherwise. Ready when constructed.

    `prefix` is put before the command; `command` stands for `preble worker` and all options but --bind and `arguments`.
    """

    def __init__(
        self,
        *arguments: str,
        endpoint: str = "tcp://127.0.0.1:*",
        time_scale: float = 0.05,
        prefix: Sequence[str] = (),
        command: Sequence[str] = (),
        start_seconds: float = HANG_SECONDS,
    ) -> None:
        if not command:
            command = [sys.executable, "-m", "preble.cli", "worker", "--log-level", "warning"]
            if "--engine" not in arguments:
                command += ["--engine", "simulated", "--time-scale", str(time_scale)]
        command = [*prefix, *command, "--bind", endpoint, *arguments]
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        word, self.endpoint, *facts = self._first_line(start_seconds).split()
        assert word == "READY"
        self.facts = dict(fact.split("=", 1) for fact in facts)

    def _first_line(self, timeout_seconds: float) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_seconds)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.process.kill()
            raise AssertionError(f"the worker did not get ready, exit code {self.process.wait()}")
        return line

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(HANG_SECONDS)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            code = self.process.wait(HANG_SECONDS)
        finally:
            self.process.kill()
            if self.process.stdout is not None:
                self.process.stdout.close()
        return code


# --- small things -----------------------------------------------------------------------------------------------------


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test on a loop of its own; it fails rather than hangs."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 2 * HANG_SECONDS))

    return run


async def until(condition: Callable[[], Any], what: str, seconds: float = HANG_SECONDS) -> None:
    """Wait for something to become true, at most so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        await asyncio.sleep(0.005)


async def collect(stream: Any) -> tuple[list[int], list[Any]]:
    """All tokens of a stream, and its chunks; fails unless every token came once and in place."""
    tokens: list[int] = []
    chunks = []
    async for chunk in stream:
        assert chunk.index == len(tokens), "each token once, none left out"
        tokens += chunk.token_ids
        chunks.append(chunk)
    assert chunks and [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason is not None
    return tokens, chunks


async def until_others_ended(router: Router) -> None:
    """Wait until every request of other routers has ended in this one's bookings, too."""
    await until(lambda: not router.scheduler.stats()["peer_bookings"], "other routers' requests ended here, too")


def assert_bookings_are_even(router: Router) -> None:
    """No request, attempt or booking is left over anywhere in the router."""
    router.check()
    router.scheduler.check()
    assert router.stats()["live_requests"] == 0
    assert router.scheduler.stats()["live_requests"] == 0
    for worker in router.scheduler.stats()["workers"].values():
        assert worker["live_requests"] == worker["waiting_requests"] == worker["live_output_tokens"] == 0
