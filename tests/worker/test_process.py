"""Real worker processes, killed, stopped, restarted and crowded; and the worker's loop with an engine on a leash.

Every answer is compared with what the simulated engine says undisturbed: it is a function of all tokens before, so one
token lost, doubled or out of place on the way would change the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from preble import GlobalScheduler, SamplingParams, cli
from preble.engines.base import EngineInfo, EngineLoad, GenerationRequest, OutputChunk
from preble.errors import EngineError, HandshakeRefused, InvalidInput, NoWorkers, QueueFull
from preble.router import Router
from preble.transport import wire
from preble.transport.messages import PullFrom
from preble.transport.security import create_keys, load_client_keys
from preble.transport.server import ServerConfig
from preble.types import (
    AllBlocksCleared,
    CacheEvent,
    PrefixEvicted,
    RequestEnded,
    RequestPlaced,
    RequestPrefilled,
    Role,
)
from preble.worker import Worker, WorkerConfig
from tests.support.transport import (
    FAST,
    HANG_SECONDS,
    FirstByName,
    Peer,
    WorkerProcess,
    assert_bookings_are_even,
    asynchronous,
    collect,
    expected_tokens,
    fast,
    until,
    until_others_ended,
)

PROMPT = list(range(200, 400))
LONG = SamplingParams(max_new_tokens=150)


@pytest.fixture
def worker() -> Iterator[Callable[..., WorkerProcess]]:
    """Start worker processes that are stopped at the end."""
    started: list[WorkerProcess] = []

    def start(*arguments: str, **options: Any) -> WorkerProcess:
        started.append(WorkerProcess(*arguments, **options))
        return started[-1]

    yield start
    for process in started:
        process.stop()


Start = Callable[..., WorkerProcess]


@contextlib.asynccontextmanager
async def routing(*workers: WorkerProcess, **options: Any) -> Any:
    """A router before these workers; its bookings are even at the end."""
    options = {"config": FAST, **({} if "scheduler" in options else {"policy": FirstByName()}), **options}
    async with Router([one.endpoint for one in workers], **options) as router:
        yield router
        await until_others_ended(router)
        assert_bookings_are_even(router)


def link(router: Router, worker: WorkerProcess) -> dict[str, Any]:
    """What the router says of one worker."""
    return dict(router.stats()["workers"][worker.endpoint])


# --- a good day -------------------------------------------------------------------------------------------------------


@asynchronous
async def test_two_processes_serve_many_requests_and_report_hits_and_load(worker: Start) -> None:
    one, two = worker("--id", "a"), worker("--id", "b")
    async with routing(one, two, policy="e2") as router:
        prompts = [[*range(1000 * (i % 4) + 1, 1000 * (i % 4) + 300), 7 + i] for i in range(40)]
        first = await collect(router.generate(prompts[0], SamplingParams(max_new_tokens=5)))
        assert first[1][0].cached_tokens == 0
        answers = await asyncio.gather(
            *(collect(router.generate(p, SamplingParams(max_new_tokens=8))) for p in prompts)
        )
        assert [tokens for tokens, _ in answers] == [expected_tokens(prompt, 8) for prompt in prompts]
        hits = [chunks[0].cached_tokens for _, chunks in answers]
        assert all(hit is not None for hit in hits) and max(hits) >= 299
        await until(lambda: link(router, one)["load"] and link(router, two)["load"], "heartbeats reported the load")
        assert router.scheduler.stats()["finished"] == 41


def test_ready_reports_the_facts_and_sigterm_ends_with_0(worker: Start) -> None:
    process = worker("--id", "w7", "--kv-capacity-tokens", "5000", "--max-running", "3")
    peer = Peer(process.endpoint)
    welcome = peer.hello()
    assert process.facts["id"] == "w7" == welcome.worker_id
    assert process.facts["epoch"] == str(peer.epoch) and process.facts["events"] == welcome.events_endpoint
    assert (welcome.engine, welcome.kv_capacity_tokens, welcome.max_running) == ("simulated", 5000, 3)
    process.signal(signal.SIGTERM)
    assert isinstance(peer.expect(wire.Closed), wire.Closed)
    assert process.process.wait(HANG_SECONDS) == 0
    peer.close()


@asynchronous
async def test_two_routers_share_a_worker_and_both_learn_its_evictions(worker: Start) -> None:
    process = worker("--kv-capacity-tokens", "600", time_scale=0.01)
    async with routing(process) as one, routing(process) as two:
        answers = await asyncio.gather(
            *(
                collect(router.generate([*PROMPT, i], SamplingParams(max_new_tokens=6)))
                for i in range(6)
                for router in (one, two)
            )
        )
        assert [tokens for tokens, _ in answers[::2]] == [tokens for tokens, _ in answers[1::2]]
        assert [tokens for tokens, _ in answers[::2]] == [expected_tokens([*PROMPT, i], 6) for i in range(6)]
        before = [link(router, process)["event_batches"] for router in (one, two)]
        for i in range(5):  # only one of them makes the cache overflow
            await collect(one.generate(list(range(i * 500, i * 500 + 400)), SamplingParams(max_new_tokens=4)))
        for router, count in zip((one, two), before, strict=True):
            await until(
                lambda router=router, count=count: link(router, process)["event_batches"] > count, "evictions came"
            )
        (worker_id,) = two.scheduler.workers
        await until(
            lambda: two.scheduler.match([*PROMPT, 1]).matched_tokens.get(worker_id, 0) < len(PROMPT),
            "the other router no longer expects its prompt cached",
        )


# --- handshake --------------------------------------------------------------------------------------------------------


@asynchronous
async def test_a_real_worker_refuses_a_router_that_expects_another_model(worker: Start) -> None:
    process = worker("--id", "w")
    with pytest.raises(HandshakeRefused, match="worker w has model 'simulated', router .* expects 'llama'"):
        await Router([process.endpoint], config=FAST, model="llama").start()


@asynchronous
async def test_curve_lets_in_whom_it_knows_and_nobody_else(worker: Start, tmp_path: Path) -> None:
    create_keys(tmp_path / "ours")
    create_keys(tmp_path / "theirs")
    process = worker("--curve-keys", str(tmp_path / "ours"))
    good = load_client_keys(tmp_path / "ours")
    async with routing(process, keys=good) as router:
        tokens, _ = await collect(router.generate(PROMPT, SamplingParams(max_new_tokens=10)))
        assert tokens == expected_tokens(PROMPT, 10)
    stranger = load_client_keys(tmp_path / "theirs")
    impostor = type(good)(
        stranger.public, stranger.secret, good.server
    )  # knows the server's key, but is not on the list
    with pytest.raises(HandshakeRefused, match="does not accept the key"):
        await Router([process.endpoint], config=FAST, keys=impostor).start()
    impatient = fast(connect_seconds=0.5, handshake_seconds=0.2)
    for keys in (stranger, None):  # wrong server key; no encryption at all
        with pytest.raises(NoWorkers):
            await Router([process.endpoint], config=impatient, keys=keys).start()
    async with routing(process, keys=good) as router:
        await collect(router.generate(PROMPT, SamplingParams(max_new_tokens=3)))


def test_a_stranger_gets_no_cache_events_either(worker: Start, tmp_path: Path) -> None:
    create_keys(tmp_path)
    process = worker("--curve-keys", str(tmp_path), "--kv-capacity-tokens", "100")
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.linger = 0
    subscriber.subscribe(b"")
    subscriber.connect(process.facts["events"])

    async def evict() -> None:
        async with routing(process, keys=load_client_keys(tmp_path)) as router:
            for i in range(5):
                await collect(router.generate(list(range(i * 100, i * 100 + 80)), SamplingParams(max_new_tokens=3)))
            await until(lambda: link(router, process)["event_batches"], "the router has its events")

    asyncio.run(evict())
    assert not subscriber.poll(100)
    subscriber.close()


# --- death, restart, hanging ------------------------------------------------------------------------------------------


@asynchronous
async def test_kill_9_in_mid_stream_loses_and_doubles_no_token(worker: Start) -> None:
    doomed, other = worker("--id", "a", time_scale=0.3), worker("--id", "b")
    async with routing(doomed, other) as router:
        prompts = [[*PROMPT, i] for i in range(8)]
        answers = [asyncio.ensure_future(collect(router.generate(prompt, LONG))) for prompt in prompts]
        await until(lambda: router.stats()["output_tokens"] > 100, "all are under way")
        doomed.kill()
        done = await asyncio.gather(*answers)
        assert [tokens for tokens, _ in done] == [expected_tokens(prompt, 150) for prompt in prompts]
        assert all({chunk.worker for chunk in chunks} == {"a", "b"} for _, chunks in done)
        stats = router.stats()
        assert stats["resumed"] == 8 and stats["duplicate_tokens"] == 0 and stats["token_gaps"] == 0


@asynchronous
async def test_a_restart_on_the_same_port_drops_the_estimated_cache_and_serves_on(worker: Start) -> None:
    first = worker("--id", "a", time_scale=0.3)
    async with routing(first) as router:
        await collect(router.generate(PROMPT, SamplingParams(max_new_tokens=3)))
        assert router.scheduler.match([*PROMPT, 1]).matched_tokens == {"a": len(PROMPT)}
        running = asyncio.ensure_future(collect(router.generate([5, *PROMPT], LONG)))
        await until(lambda: router.stats()["output_tokens"] > 10, "output comes")
        first.kill()
        worker("--id", "a", endpoint=first.endpoint)
        tokens, _ = await running
        assert tokens == expected_tokens([5, *PROMPT], 150), "it went on at the restarted worker"
        assert link(router, first)["restarts"] == 1
        assert router.scheduler.match([*PROMPT, 1]).matched_tokens == {}
        _, chunks = await collect(router.generate(PROMPT, SamplingParams(max_new_tokens=3)))
        assert chunks[0].cached_tokens == 0


@asynchronous
async def test_requests_leave_a_stopped_worker_and_its_late_chunks_are_dropped(worker: Start) -> None:
    hung, other = worker("--id", "a", time_scale=0.3), worker("--id", "b")
    async with routing(hung, other, config=fast(suspect_after_seconds=1.0)) as router:
        prompts = [[*PROMPT, i] for i in range(4)]
        answers = [asyncio.ensure_future(collect(router.generate(prompt, LONG))) for prompt in prompts]
        await until(lambda: router.stats()["output_tokens"] > 40, "all are under way")
        hung.signal(signal.SIGSTOP)
        done = await asyncio.gather(*answers)
        assert [tokens for tokens, _ in done] == [expected_tokens(prompt, 150) for prompt in prompts]
        assert link(router, hung)["state"] == "suspect"
        assert router.scheduler.match([*PROMPT, 1]).matched_tokens["a"] >= len(PROMPT), "its cache is still there"
        hung.signal(signal.SIGCONT)
        await until(lambda: link(router, hung)["state"] == "ready", "it is back")
        await until(lambda: router.stats()["late_chunks"] >= 4, "what it still had to say came, and was dropped")
        assert router.stats()["duplicate_tokens"] == 0 and link(router, hung)["losses"] == 0
        tokens, chunks = await collect(router.generate(PROMPT, SamplingParams(max_new_tokens=5)))
        assert tokens == expected_tokens(PROMPT, 5) and chunks[0].worker == "a" and chunks[0].cached_tokens > 0


@asynchronous
async def test_sigterm_finishes_running_requests_and_takes_no_new_ones(worker: Start) -> None:
    leaving, other = worker("--id", "a", time_scale=0.3), worker("--id", "b")
    async with routing(leaving, other) as router:
        running = asyncio.ensure_future(collect(router.generate(PROMPT, SamplingParams(max_new_tokens=60))))
        await until(lambda: router.stats()["output_tokens"] > 5, "output comes")
        leaving.signal(signal.SIGTERM)
        await until(lambda: link(router, leaving)["state"] == "draining", "the router knows")
        _, chunks = await collect(router.generate(PROMPT, SamplingParams(max_new_tokens=3)))
        assert chunks[0].worker == "b"
        tokens, chunks = await running
        assert tokens == expected_tokens(PROMPT, 60) and {chunk.worker for chunk in chunks} == {"a"}
        await until(lambda: "a" not in router.scheduler.workers, "it is gone")
        assert leaving.process.wait(HANG_SECONDS) == 0 and router.stats()["resumed"] == 0


@asynchronous
async def test_a_drain_that_takes_too_long_hands_the_rest_over(worker: Start) -> None:
    leaving, other = worker("--id", "a", "--drain-seconds", "0.1", time_scale=0.5), worker("--id", "b")
    async with routing(leaving, other) as router:
        running = asyncio.ensure_future(collect(router.generate(PROMPT, LONG)))
        await until(lambda: router.stats()["output_tokens"] > 5, "output comes")
        leaving.signal(signal.SIGTERM)
        tokens, _ = await running
        assert tokens == expected_tokens(PROMPT, 150) and router.stats()["resumed"] == 1
        assert leaving.process.wait(HANG_SECONDS) == 0


# --- bounds and manners -----------------------------------------------------------------------------------------------


@asynchronous
async def test_a_full_worker_is_passed_over_and_when_all_are_full_the_caller_receives_it(worker: Start) -> None:
    one, two = (worker("--id", name, "--max-requests", "2", time_scale=1.0) for name in "ab")
    async with routing(one, two) as router:
        streams = [router.generate([*PROMPT, i], LONG) for i in range(4)]
        firsts = [await anext(stream) for stream in streams]
        assert [chunk.worker for chunk in firsts] == ["a", "a", "b", "b"]
        with pytest.raises(QueueFull, match="a, b"):
            await anext(router.generate(PROMPT, LONG))
        for stream in streams:
            await stream.aclose()
        # Aborting takes a moment at the worker, then there is room again.
        for _ in range(1000):
            with contextlib.suppress(QueueFull):
                tokens, _ = await collect(router.generate(PROMPT, SamplingParams(max_new_tokens=2)))
                assert tokens == expected_tokens(PROMPT, 2)
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError("cancelled requests kept their places")


@asynchronous
async def test_a_cancelled_request_stops_computing_at_the_worker(worker: Start) -> None:
    process = worker(time_scale=0.5)
    async with routing(process) as router:
        stream = router.generate(PROMPT, SamplingParams(max_new_tokens=100_000))
        await anext(stream)
        await until(lambda: (link(router, process)["load"] or {}).get("running") == 1, "it runs")
        await stream.aclose()
        await until(lambda: link(router, process)["load"]["running"] == 0, "the engine has ended it")
        assert router.stats()["cancelled"] == 1


def test_requests_of_a_router_that_vanishes_are_aborted(worker: Start) -> None:
    process = worker("--max-requests", "1", time_scale=0.2)
    lost = Peer(process.endpoint)
    lost.hello()
    lost.send(wire.GenerationRequest("r", np.array(PROMPT, np.int32), SamplingParams(max_new_tokens=100_000)))
    assert isinstance(lost.receive(), wire.OutputChunk)
    lost.close()
    other = Peer(process.endpoint)
    other.hello()
    deadline = time.monotonic() + HANG_SECONDS
    answer: Any = None
    while not isinstance(answer, wire.OutputChunk):
        assert time.monotonic() < deadline, "the place was never given back"
        other.send(wire.GenerationRequest("r", np.array(PROMPT, np.int32), SamplingParams(max_new_tokens=1)))
        answer = other.receive()
        assert isinstance(answer, wire.OutputChunk) or answer.code == "queue_full"
    other.close()


def test_malformed_frames_are_answered_and_the_process_serves_on(worker: Start) -> None:
    process = worker()
    vandal, honest = Peer(process.endpoint), Peer(process.endpoint)
    honest.hello()
    short = bytes([0x95, wire.PROTOCOL_VERSION, 2, 0, 0, 0])
    for junk in (b"", b"\xc1", os.urandom(500), short, b"\0" * (17 << 20)):
        vandal.send_raw(junk)
        assert isinstance(vandal.receive(), wire.Fault)
    honest.send(wire.GenerationRequest("r", np.array(PROMPT, np.int32), SamplingParams(max_new_tokens=1)))
    chunk = honest.receive()
    assert isinstance(chunk, wire.OutputChunk) and list(chunk.token_ids) == expected_tokens(PROMPT, 1)
    vandal.close()
    honest.close()


def test_what_the_engine_refuses_comes_back_with_its_reason(worker: Start) -> None:
    process = worker("--kv-capacity-tokens", "100")
    peer = Peer(process.endpoint)
    peer.hello()
    peer.send(wire.GenerationRequest("big", np.arange(500, dtype=np.int32)))
    answer = peer.receive()
    assert isinstance(answer, wire.Rejected)
    assert answer.request_id == "big" and answer.code == "invalid" and "500 tokens" in answer.text
    peer.send(wire.GenerationRequest("r", np.array([1, 2], np.int32), SamplingParams(max_new_tokens=50)))
    peer.send(wire.GenerationRequest("r", np.array([1, 2], np.int32), SamplingParams(max_new_tokens=50)))
    assert peer.expect(wire.Rejected).code == "duplicate"
    peer.close()


@asynchronous
async def test_a_reader_that_stalls_delays_nobody_else(worker: Start) -> None:
    process = worker(time_scale=0.002)
    slow = Peer(process.endpoint, receive_queue=1, receive_bytes=4096)
    slow.hello()
    count = 3000
    slow.send(wire.GenerationRequest("r", np.array(PROMPT, np.int32), SamplingParams(max_new_tokens=count)))
    async with routing(process) as router:
        for i in range(20):
            tokens, _ = await collect(router.generate([*PROMPT, i], SamplingParams(max_new_tokens=20)))
            assert tokens == expected_tokens([*PROMPT, i], 20)
    got: list[int] = []
    while len(got) < count:
        chunk = slow.receive()
        assert isinstance(chunk, wire.OutputChunk) and chunk.index == len(got)
        got += chunk.token_ids
    assert got == expected_tokens(PROMPT, count)
    slow.close()


@asynchronous
async def test_evictions_keep_the_routers_estimates_within_what_the_engine_holds(worker: Start) -> None:
    process = worker("--id", "a", "--kv-capacity-tokens", "1000", time_scale=0.0)
    async with routing(process) as router:
        for i in range(30):
            prompt = [*range(i % 7 * 1000, i % 7 * 1000 + 300), i]
            tokens, chunks = await collect(router.generate(prompt, SamplingParams(max_new_tokens=4)))
            assert tokens == expected_tokens(prompt, 4)
        stats = link(router, process)
        assert stats["event_batches"] > 5 and stats["resyncs"] == 0 and stats["events_refused"] == 0
        await until(
            lambda: router.scheduler.stats()["workers"]["a"]["cached_tokens"] <= 1000, "estimates are in bounds"
        )


# --- wrong usage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["--engine", "simulated", "--bind", "tcp://0.0.0.0:*"], 1, "without keys"),
        (["--engine", "simulated", "--bind", "nonsense"], 2, "endpoint must be"),
        (["--engine", "simulated", "--cpu", "4096"], 2, "--cpu 4096"),
        (["--engine", "simulated", "--curve-keys", "nowhere"], 2, "server.key_secret"),
        (["--engine", "simulated", "--token-budget", "0"], 2, "token_budget"),
        (["--engine", "simulated", "--time-scale", "-1"], 2, "time_scale"),
        (["--engine", "simulated", "--cost-model", "abacus"], 2, "abacus"),
        (["--engine", "simulated", "--max-requests", "0"], 2, "max_requests"),
        (["--engine", "simulated", "--drain-seconds", "-1"], 2, "drain_seconds"),
        (["--engine", "simulated", "--kv-bind", "anywhere"], 2, "anywhere"),
        (["--engine", "simulated", "--kv-bind", "tcp://0.0.0.0:*"], 1, "without keys"),
        (["--engine", "torch"], 2, "--model"),
        (["--engine", "torch", "--model", "nowhere"], 2, "nowhere"),
    ],
)
def test_wrong_usage_ends_with_one_line_and_a_code(
    arguments: list[str], code: int, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["worker", *arguments]) == code
    lines = capsys.readouterr().err.strip().split("\n")
    assert len(lines) == 1 and lines[0].startswith("preble worker: ") and complaint in lines[0]


def test_a_port_in_use_is_named(worker: Start, capsys: pytest.CaptureFixture[str]) -> None:
    process = worker()
    assert cli.main(["worker", "--engine", "simulated", "--bind", process.endpoint]) == 1
    assert f"cannot bind {process.endpoint}" in capsys.readouterr().err


# --- the worker's loop with an engine on a leash ----------------------------------------------------------------------


class LeashedEngine:
    """An engine whose every step waits for the test. Each step gives one token to each request."""

    def __init__(self) -> None:
        self.info = EngineInfo("leashed", "leashed", 1000)
        self.allowed = threading.Semaphore(0)
        self.live: dict[str, list[int]] = {}  # id -> [next index, tokens left]
        self.ended: list[OutputChunk] = []
        self.events: list[CacheEvent] = []
        self.aborted: list[str] = []
        self.closed = False
        self.explode: Exception | None = None

    def submit(self, request: GenerationRequest) -> None:
        if request.token_ids[0] == 13:
            raise EngineError("unlucky prompt")
        if request.token_ids[0] == 14:
            raise InvalidInput("wrong prompt")
        if request.token_ids[0] == 15:
            raise QueueFull("crowded engine")
        self.live[request.request_id] = [request.output_offset, request.sampling.max_new_tokens]

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        found = self.live.pop(request_id, None)
        if found is not None:
            self.ended.append(OutputChunk(request_id, found[0], (), finish_reason="abort"))
        return found is not None

    def step(self) -> list[OutputChunk]:
        if self.live:
            self.allowed.acquire()
        if self.explode is not None:
            raise self.explode
        chunks, self.ended = self.ended, []
        for request_id, (index, left) in list(self.live.items()):
            reason = "length" if index + 1 >= left else None
            chunks.append(OutputChunk(request_id, index, (index,), 0 if index == 0 else None, reason))
            self.live[request_id][0] += 1
            if reason:
                del self.live[request_id]
        return chunks

    def has_work(self) -> bool:
        return bool(self.live or self.ended)

    def take_events(self) -> list[CacheEvent]:
        events, self.events = self.events, []
        return events

    def load(self) -> EngineLoad:
        return EngineLoad(len(self.live), 0, 0, 0)

    def close(self) -> None:
        self.closed = True


class Leashed:
    """A worker in a thread of this process, with its engine on a leash."""

    def __init__(
        self, *, max_frame_bytes: int = wire.FRAME_BYTES_MAX, replay_batches: int = 10_000, **config: Any
    ) -> None:
        self.engine = LeashedEngine()
        server = ServerConfig(max_frame_bytes=max_frame_bytes, replay_batches=replay_batches)
        worker_config = WorkerConfig(server, "leashed", **config)
        self.worker = Worker(self.engine, worker_config, epoch=5)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.peer = Peer(self.worker.server.endpoint)
        self.peer.hello()

    def _run(self) -> None:
        try:
            self.worker.run()
        except EngineError as error:
            self.error = error

    def submit(self, request_id: str, first_token: int = 1, max_new_tokens: int = 3, half: Role | None = None) -> None:
        """Send a request."""
        sampling = SamplingParams(max_new_tokens=max_new_tokens)
        self.peer.send(wire.GenerationRequest(request_id, np.array([first_token, 2], np.int32), sampling, half=half))

    def close(self) -> None:
        """End it, whatever state it is in."""
        self.worker.drain()
        self.worker.drain()
        for _ in range(1000):
            self.engine.allowed.release()
        self.thread.join(HANG_SECONDS)
        self.peer.close()
        assert not self.thread.is_alive() and self.engine.closed


@pytest.fixture
def leashed() -> Iterator[Callable[..., Leashed]]:
    """Make workers with engines on a leash."""
    made: list[Leashed] = []

    def make(**config: Any) -> Leashed:
        made.append(Leashed(**config))
        return made[-1]

    yield make
    for one in made:
        one.close()


Make = Callable[..., Leashed]


def test_heartbeats_are_answered_while_the_engine_is_in_a_long_step(leashed: Make) -> None:
    one = leashed()
    one.submit("r")
    step_ms = 0
    for nonce in range(10_000):  # until the step is visibly long
        one.peer.send(wire.Ping(nonce))
        pong = one.peer.receive()
        assert isinstance(pong, wire.Pong) and pong.nonce == nonce
        step_ms = pong.step_ms
        if step_ms > 30:
            break
    assert step_ms > 30, "the worker says that its engine is busy with one step"
    one.engine.allowed.release()
    assert one.peer.expect(wire.OutputChunk).token_ids == (0,)


def test_an_abort_reaches_the_engine_between_steps(leashed: Make) -> None:
    one = leashed()
    one.submit("r", max_new_tokens=1000)
    one.engine.allowed.release()
    assert one.peer.expect(wire.OutputChunk).index == 0
    one.peer.send(wire.Abort("r"))
    one.peer.send(wire.Abort("nobody"))
    one.peer.send(wire.Ping(1))
    one.peer.expect(wire.Pong)
    one.engine.allowed.release()
    chunk = one.peer.expect(wire.OutputChunk)
    while chunk.finish_reason is None:
        chunk = one.peer.expect(wire.OutputChunk)
    assert chunk.finish_reason == "abort" and len(one.engine.aborted) == 1
    assert one.worker.live_requests == 0


def test_jobs_are_done_between_steps_and_few_at_a_time(leashed: Make) -> None:
    one = leashed()
    one.submit("r", max_new_tokens=6)
    waited_until = time.monotonic() + HANG_SECONDS
    while not one.worker.engine.step_seconds(time.monotonic()) and time.monotonic() < waited_until:
        time.sleep(0.001)
    done: list[tuple[int, int]] = []
    for number in range(5):
        one.worker.engine.call(lambda number=number: done.append((number, one.engine.live["1/r"][0])))
    for _ in range(4):
        one.engine.allowed.release()
        one.peer.expect(wire.OutputChunk)
    assert done == [(0, 1), (1, 1), (2, 2), (3, 2), (4, 3)], "which job, and how many steps there had been"


def test_a_job_wakes_an_engine_that_has_nothing_to_do(leashed: Make) -> None:
    done = threading.Event()
    leashed().worker.engine.call(done.set)
    assert done.wait(HANG_SECONDS)


def test_an_engine_that_moves_no_kv_computes_what_it_should_have_pulled(leashed: Make) -> None:
    one = leashed()
    pull = PullFrom("tcp://127.0.0.1:9", 7, 2, 1_000_000)
    one.peer.send(wire.GenerationRequest("r", np.array([1, 2], np.int32), SamplingParams(max_new_tokens=1), pull=pull))
    assert one.peer.expect(wire.PullEnded) == wire.PullEnded("r", "refused", 0, 0, 0, 0, 0, 0)
    one.engine.allowed.release()
    assert one.peer.expect(wire.OutputChunk).finish_reason == "length"
    assert one.worker.server.welcome.kv_endpoint == ""


@pytest.mark.parametrize(("first_token", "code"), [(13, "engine"), (14, "invalid"), (15, "queue_full")])
def test_what_an_engine_raises_for_one_request_is_answered_and_frees_its_place(
    leashed: Make, first_token: int, code: str
) -> None:
    one = leashed(max_requests=1)
    one.submit("bad", first_token)
    answer = one.peer.expect(wire.Rejected)
    assert (answer.request_id, answer.code) == ("bad", code)
    one.submit("good", max_new_tokens=1)
    one.engine.allowed.release()
    assert one.peer.expect(wire.OutputChunk).finish_reason == "length"


def test_the_queue_bound_counts_requests_until_they_end(leashed: Make) -> None:
    one = leashed(max_requests=2)
    for name in ("a", "b", "c"):
        one.submit(name, max_new_tokens=1)
    refusal = one.peer.expect(wire.Rejected)
    assert (refusal.request_id, refusal.code) == ("c", "queue_full") and "2 live requests" in refusal.text
    for _ in range(3):
        one.engine.allowed.release()
    assert {one.peer.expect(wire.OutputChunk).request_id for _ in range(2)} == {"a", "b"}
    one.submit("d", max_new_tokens=1)
    assert one.peer.expect(wire.OutputChunk).request_id == "d"


def test_an_engine_that_fails_ends_the_worker_and_reports_the_routers(leashed: Make) -> None:
    one = leashed()
    one.submit("r")
    one.engine.explode = RuntimeError("device lost")
    one.engine.allowed.release()
    closed = one.peer.expect(wire.Closed)
    assert closed.code == "engine_failed" and "RuntimeError" in closed.text
    one.thread.join(HANG_SECONDS)
    assert isinstance(one.error, EngineError) and isinstance(one.error.__cause__, RuntimeError)


@pytest.mark.parametrize("broken", ["poll", "send_chunks"])
def test_an_error_of_the_transport_ends_the_worker_and_is_raised(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    engine = LeashedEngine()
    engine.allowed.release(9)
    worker = Worker(engine, WorkerConfig(ServerConfig(), "leashed"), epoch=5)
    peer = Peer(worker.server.endpoint)
    if broken == "send_chunks":
        peer.send(wire.Hello("raw-router"))
        while not worker.server.counters.sessions_opened:
            worker.server.poll(0.01)
        assert isinstance(peer.receive(), wire.Welcome)
        peer.send(wire.GenerationRequest("r", np.array([1, 2], np.int32)))

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(worker.server, broken, fail)
    with pytest.raises(ZeroDivisionError, match="broken"):
        worker.run()
    peer.close()
    assert engine.closed


def test_events_go_out_before_the_chunks_of_the_same_step(leashed: Make) -> None:
    one = leashed()
    one.submit("r")
    one.engine.events = [PrefixEvicted((1, 2, 3), 1)]
    one.engine.allowed.release()
    one.peer.expect(wire.OutputChunk)
    one.peer.send(wire.Replay(0))
    events = one.peer.expect(wire.Events)
    assert events.number == 0 and events.events[-1].kept_tokens == 1


def replayed(peer: Peer, worker: Leashed | None = None) -> list[CacheEvent]:
    """All events so far; those that the worker has kept."""
    peer.send(wire.Replay(0 if worker is None else worker.worker.server.replay.first_seq))
    events: list[CacheEvent] = []
    while not isinstance(message := peer.receive(), wire.ReplayEnd):
        if isinstance(message, wire.Events):
            assert message.complete_for == "", "a replay leaves nothing out"
            events += message.events
    return events


def story(events: list[CacheEvent]) -> list[tuple[Any, ...]]:
    """Events about requests in short."""
    told: list[tuple[Any, ...]] = []
    for event in events:
        if isinstance(event, RequestPlaced):
            told.append((event.router, event.request_id, list(event.token_ids), event.max_new_tokens))
        elif isinstance(event, RequestPrefilled):
            told.append((event.router, event.request_id, "prefilled", event.cached_tokens))
        elif isinstance(event, RequestEnded):
            told.append((event.router, event.request_id, "ended", event.output_tokens))
    return told


def test_what_becomes_of_each_request_is_reported_to_routers_that_come_later_and_to_others(leashed: Make) -> None:
    one = leashed()
    one.submit("alone", max_new_tokens=1)
    one.engine.allowed.release()
    one.peer.expect(wire.OutputChunk)
    other = Peer(one.worker.server.endpoint)
    assert other.hello("other").next_event_seq == 1, "what waited for a number has one before the first new router"
    one.submit("r", max_new_tokens=2)
    for _ in range(2):
        one.engine.allowed.release()
        one.peer.expect(wire.OutputChunk)
    one.submit("refused", first_token=13)
    one.peer.expect(wire.Rejected)
    one.submit("left", max_new_tokens=5)
    one.engine.allowed.release()
    one.peer.expect(wire.OutputChunk)
    one.peer.send(wire.Abort("left"))
    one.peer.send(wire.Ping(1))
    one.peer.expect(wire.Pong)
    one.engine.allowed.release()
    while one.peer.expect(wire.OutputChunk).finish_reason != "abort":
        continue
    assert story(replayed(other)) == [
        *(("raw-router", "alone", [1, 2], 1), ("raw-router", "alone", "prefilled", 0)),
        ("raw-router", "alone", "ended", 1),
        *(("raw-router", "r", [1, 2], 2), ("raw-router", "r", "prefilled", 0), ("raw-router", "r", "ended", 2)),
        *(("raw-router", "refused", [13, 2], 3), ("raw-router", "refused", "ended", None)),
        *(("raw-router", "left", [1, 2], 5), ("raw-router", "left", "prefilled", 0)),
        ("raw-router", "left", "ended", None),
    ]
    other.close()


def test_a_resumed_request_is_reported_with_the_tokens_it_may_still_have(leashed: Make) -> None:
    one = leashed()
    prompt = np.array([1, 2, 3, 4], np.int32)
    one.peer.send(wire.GenerationRequest("r", prompt, SamplingParams(max_new_tokens=5), output_offset=3))
    for _ in range(2):
        one.engine.allowed.release()
        one.peer.expect(wire.OutputChunk)
    other = Peer(one.worker.server.endpoint)
    other.hello("other")
    told = story(replayed(other))
    assert told == [
        ("raw-router", "r", [1, 2, 3, 4], 2),
        *(("raw-router", "r", "prefilled", None), ("raw-router", "r", "ended", 2)),
    ]
    other.close()


def test_the_requests_of_a_router_that_goes_are_reported_as_ended(leashed: Make) -> None:
    one = leashed()
    other = Peer(one.worker.server.endpoint)
    other.hello("other")
    one.submit("r", max_new_tokens=50)
    one.engine.allowed.release()
    one.peer.expect(wire.OutputChunk)
    one.peer.send(wire.Bye())
    deadline = time.monotonic() + HANG_SECONDS
    while ("raw-router", "r", "ended", None) not in story(replayed(other)):
        assert time.monotonic() < deadline, "nobody is informed that it ended"
        one.engine.allowed.release()
    assert one.worker.live_requests == 0
    other.close()


def test_a_request_older_than_what_a_replay_keeps_is_reported_again_to_a_router_that_comes(leashed: Make) -> None:
    one = leashed(replay_batches=2)
    others = [Peer(one.worker.server.endpoint) for _ in range(2)]
    others[0].hello("first")
    one.submit("old", max_new_tokens=50)
    for _ in range(4):
        one.engine.allowed.release()
        one.peer.expect(wire.OutputChunk)
    for number in range(4):
        one.submit(f"short{number}", max_new_tokens=1)
        one.engine.allowed.release()
        while one.peer.expect(wire.OutputChunk).request_id == "old":
            one.engine.allowed.release()
    others[1].hello("second")
    deadline = time.monotonic() + HANG_SECONDS
    while ("raw-router", "old", "prefilled", 0) not in (told := story(replayed(others[1], one))):
        assert time.monotonic() < deadline, "it is not reported"
    assert told[told.index(("raw-router", "old", "prefilled", 0)) - 1] == ("raw-router", "old", [1, 2], 50)
    for other in others:
        other.close()


def test_a_router_that_is_alone_is_not_sent_its_own_requests_and_misses_no_number(leashed: Make) -> None:
    one = leashed()
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.linger = 0
    subscriber.subscribe(b"")
    subscriber.connect(one.worker.server.events_endpoint)

    def heard() -> wire.Events:
        """The next batch on the wire."""
        assert subscriber.poll(HANG_SECONDS * 1000)
        message = wire.decode(subscriber.recv(), wire.WORKER_MESSAGES).message
        assert isinstance(message, wire.Events)
        return message

    def event() -> wire.Events | None:
        """An event of the engine, and what comes of it; None if the subscription is not there yet."""
        one.engine.events = [AllBlocksCleared()]
        one.submit("r", max_new_tokens=1)
        one.engine.allowed.release()
        one.peer.expect(wire.OutputChunk)
        return heard() if subscriber.poll(200) else None

    while (first := event()) is None:
        continue
    assert first.complete_for == "raw-router"
    second = event()
    assert second is not None and second.number == first.number + 1
    assert [type(one) for one in second.events] == [AllBlocksCleared], "but what its engine says"
    other = Peer(one.worker.server.endpoint)
    other.hello("other")
    last = heard()
    assert (last.number, last.events, last.complete_for) == (second.number + 1, (), "raw-router")
    one.submit("r", max_new_tokens=1, half="prefill")
    one.engine.allowed.release()
    told: list[CacheEvent] = []
    while len(told) < 3:
        message = heard()
        assert message.complete_for == ""
        told += message.events
    placed, *rest = told
    assert isinstance(placed, RequestPlaced) and placed.half == "prefill", "as its router has sent it"
    assert [type(one) for one in rest] == [RequestPrefilled, RequestEnded]
    other.close()
    subscriber.close()


def test_a_draining_worker_refuses_new_requests_and_ends_when_the_last_one_does(leashed: Make) -> None:
    one = leashed()
    one.submit("r", max_new_tokens=2)
    one.engine.allowed.release()
    one.peer.expect(wire.OutputChunk)
    one.worker.drain()
    one.peer.expect(wire.Draining)
    one.submit("late")
    assert one.peer.expect(wire.Rejected).code == "draining"
    one.engine.allowed.release()
    assert one.peer.expect(wire.OutputChunk).finish_reason == "length"
    assert one.peer.expect(wire.Closed).code == "shutdown"
    one.thread.join(HANG_SECONDS)
    assert not one.thread.is_alive() and one.error is None


@pytest.mark.parametrize(
    ("bind", "worker_id"), [("tcp://127.0.0.1:*", "127.0.0.1:{port}"), ("tcp://0.0.0.0:*", "{host}:{port}")]
)
def test_a_worker_without_a_name_is_called_after_its_endpoint(bind: str, worker_id: str) -> None:
    worker = Worker(LeashedEngine(), WorkerConfig(ServerConfig(bind, insecure=True)), epoch=1)
    port = worker.server.endpoint.rpartition(":")[2]
    assert worker.worker_id == worker_id.format(host=socket.gethostname(), port=port)
    worker.server.close(linger_seconds=0)


def test_two_routers_may_use_the_same_request_ids(leashed: Make) -> None:
    one = leashed()
    other = Peer(one.worker.server.endpoint)
    other.hello()
    one.submit("r", max_new_tokens=1)
    other.send(wire.GenerationRequest("r", np.array([7], np.int32), SamplingParams(max_new_tokens=1)))
    for _ in range(4):
        one.engine.allowed.release()
    assert one.peer.expect(wire.OutputChunk).request_id == other.expect(wire.OutputChunk).request_id == "r"
    other.close()


# --- a scheduler shared with the application --------------------------------------------------------------------------


@asynchronous
async def test_a_given_scheduler_gets_the_workers_and_outlives_the_router(worker: Start) -> None:
    process = worker("--id", "a", "--kv-capacity-tokens", "1234")
    scheduler = GlobalScheduler(["a"])  # known before, with guessed facts
    async with routing(process, scheduler=scheduler) as router:
        assert router.scheduler is scheduler and scheduler.workers["a"].kv_capacity_tokens == 1234
        await collect(router.generate(PROMPT, SamplingParams(max_new_tokens=2)))
    scheduler.check()
    assert scheduler.stats()["finished"] == 1
