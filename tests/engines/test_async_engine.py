"""Engines that run by themselves, with a scripted one: what is estimated of it, how it fails, who is admitted when.

The engine here is a few lines on its own event loop; real ones are in tests/live.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preble import ManualClock, Policy, SamplingParams
from preble.batching.waiting_queue import OUTPUT_COST
from preble.engines.admission import Admission, AdmissionConfig
from preble.engines.async_engine import BackendInfo, StreamingEngine
from preble.engines.async_requests import EngineJob, Stream, StreamCounters, StreamPart
from preble.engines.base import EngineInfo, GenerationRequest, OutputChunk, SelfRunning
from preble.engines.event_buffer import EventRelay, EventSink
from preble.engines.kv_event_listener import RankListener
from preble.errors import DuplicateRequest, EngineError, InvalidConfig, InvalidInput, QueueFull
from preble.transport.namespaces import salt_of
from preble.types import AllBlocksCleared, BlockRemoved, BlockStored, Claim, TokenLogprob
from preble.worker.engine_thread import EngineThread

HANG_SECONDS = 20.0
INFO = EngineInfo("scripted", "script", kv_capacity_tokens=10_000, block_size=4, max_running=4, max_model_tokens=1000)
Script = Callable[["ScriptedBackend", EngineJob], AsyncIterator[StreamPart]]


class ScriptedBackend:
    """Does what `script` says for each job; `go` lets jobs that wait for it on."""

    def __init__(self, script: Script, *, ranks: int = 1, start: Callable[[], Any] | None = None) -> None:
        self.script = script
        self.ranks = ranks
        self.jobs: list[EngineJob] = []
        self.aborted: list[str] = []
        self.why = ""
        self.closed = False
        self.sink: EventSink | None = None
        self.feed_error: Exception | None = None
        self._start = start
        self._gates: dict[str, asyncio.Event] = {}

    def make_loop(self) -> asyncio.AbstractEventLoop:
        self.loop = asyncio.new_event_loop()
        return self.loop

    async def start(self) -> BackendInfo:
        if self._start is not None:
            await self._start()
        return BackendInfo(INFO, self.ranks, vocab_size=5000)

    async def feed(self, sink: EventSink) -> None:
        self.sink = sink
        while self.feed_error is None:
            await asyncio.sleep(0.005)
        raise self.feed_error

    async def stream(self, job: EngineJob) -> AsyncIterator[StreamPart]:
        self.jobs.append(job)
        async for part in self.script(self, job):
            yield part

    async def abort(self, job_id: str) -> None:
        self.aborted.append(job_id)
        self.gate(job_id).set()

    async def used_tokens(self) -> int:
        return 7

    def failure(self) -> str:
        return self.why

    async def close(self) -> None:
        self.closed = True

    def gate(self, job_id: str) -> asyncio.Event:
        return self._gates.setdefault(job_id, asyncio.Event())

    def go(self, number: int) -> None:
        """Let the job that came `number`th to the engine on."""
        job = self.jobs[number]
        self.loop.call_soon_threadsafe(self.gate(job.id).set)

    def tell(self, rank: int, events: Sequence[Any]) -> None:
        """Cache events, from the loop's thread as a real engine's."""
        until(lambda: self.sink is not None, "the feed runs")
        self.loop.call_soon_threadsafe(self.sink, rank, events)


async def honest(backend: ScriptedBackend, job: EngineJob) -> AsyncIterator[StreamPart]:
    """As many tokens as asked for, one by one: 100, 101, ..."""
    for i in range(job.max_tokens):
        await asyncio.sleep(0)
        yield StreamPart(i, [100 + i], 3, "length" if i == job.max_tokens - 1 else None)


async def gated(backend: ScriptedBackend, job: EngineJob) -> AsyncIterator[StreamPart]:
    """All of it once the gate opens; aborted ones end with "abort"."""
    await backend.gate(job.id).wait()
    if job.id in backend.aborted:
        yield StreamPart(0, [], None, "abort")
    else:
        yield StreamPart(0, [100 + i for i in range(job.max_tokens)], 0, "length")


def saying(*parts: StreamPart | Exception) -> Script:
    """These parts, whatever is asked."""

    async def script(backend: ScriptedBackend, job: EngineJob) -> AsyncIterator[StreamPart]:
        for part in parts:
            if isinstance(part, Exception):
                raise part
            yield part

    return script


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for something to become true; the limit only catches hangs."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.002)


def request(name: str = "r", tokens: Sequence[int] = (1, 2, 3, 4, 5), new: int = 3, **more: Any) -> GenerationRequest:
    return GenerationRequest(name, np.asarray(tokens, np.int32), SamplingParams(max_new_tokens=new), **more)


def drive(engine: StreamingEngine) -> dict[str, list[OutputChunk]]:
    """Step until nothing is live; chunks by request."""
    found: dict[str, list[OutputChunk]] = {}
    deadline = time.monotonic() + HANG_SECONDS
    while engine.has_work():
        assert time.monotonic() < deadline, "the engine hangs"
        for chunk in engine.step():
            found.setdefault(chunk.request_id, []).append(chunk)
        engine.take_events()
    return found


def tokens_of(chunks: Sequence[OutputChunk]) -> list[int]:
    """All tokens; fails unless each came once and in place."""
    tokens: list[int] = []
    for chunk in chunks:
        assert chunk.index == chunks[0].index + len(tokens)
        tokens += chunk.token_ids
    return tokens


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Callable[..., tuple[StreamingEngine, ScriptedBackend]]:
    def build(script: Script = honest, *, ranks: int = 1, **config: Any) -> tuple[StreamingEngine, ScriptedBackend]:
        clock = config.pop("clock", time.monotonic)
        backend = ScriptedBackend(script, ranks=ranks)
        engine = StreamingEngine(backend, AdmissionConfig(**config), clock=clock)
        request.addfinalizer(engine.close)
        return engine, backend

    return build


Make = Callable[..., tuple[StreamingEngine, ScriptedBackend]]


# --- streams ----------------------------------------------------------------------------------------------------------


def test_every_token_comes_once_with_the_hit_first_and_the_reason_last(make: Make) -> None:
    engine, _ = make()
    assert isinstance(engine, SelfRunning)
    for i in range(6):
        engine.submit(request(f"r{i}", new=20))
    found = drive(engine)
    assert sorted(found) == [f"r{i}" for i in range(6)]
    for chunks in found.values():
        assert tokens_of(chunks) == list(range(100, 120))
        assert chunks[0].index == 0
        assert [chunk.cached_tokens for chunk in chunks] == [3] + [None] * (len(chunks) - 1)
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    engine.admission.check()
    load = engine.load()
    assert (load.running, load.waiting, load.kv_used_tokens) == (0, 0, 0)
    assert load.kv_cached_tokens == 5, "the prompt; of outputs only events would report"


def test_a_resumed_request_goes_on_where_it_stopped(make: Make) -> None:
    engine, backend = make()
    engine.submit(request(tokens=[1, 2, 3, 100, 101], new=5, output_offset=2))
    chunks = drive(engine)["r"]
    assert chunks[0].index == 2
    assert backend.jobs[0].max_tokens == len(tokens_of(chunks)) == 3
    engine.submit(request(tokens=[1, 2, 3, 100, 101], new=2, output_offset=2))
    assert drive(engine)["r"] == [OutputChunk("r", 2, (), cached_tokens=0, finish_reason="length")]
    assert len(backend.jobs) == 1, "the second had nothing left to ask for"


def test_an_output_that_would_outgrow_the_context_ends_there(make: Make) -> None:
    engine, _ = make()
    engine.submit(request(tokens=[1] * 998, new=50))
    assert len(tokens_of(drive(engine)["r"])) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": []},
        {"tokens": [-1]},
        {"tokens": [5000]},
        {"tokens": [1] * 1000},
        {"output_offset": 5},
    ],
)
def test_bad_requests_are_refused_and_change_nothing(make: Make, wrong: dict[str, Any]) -> None:
    engine, _ = make()
    with pytest.raises(InvalidInput):
        engine.submit(request(**wrong))
    assert not engine.has_work()
    engine.admission.check()


def test_a_live_id_is_refused_and_an_ended_one_taken_again(make: Make) -> None:
    engine, backend = make(gated)
    engine.submit(request())
    with pytest.raises(DuplicateRequest):
        engine.submit(request())
    until(lambda: backend.jobs, "it is in the engine")
    assert engine.abort("r")
    assert drive(engine)["r"][-1].finish_reason == "abort"
    engine.submit(request())  # the engine may still be busy with the old one
    until(lambda: len(backend.jobs) == 2, "the new one is in the engine")
    backend.go(1)
    assert tokens_of(drive(engine)["r"]) == [100, 101, 102]


# --- what an engine may say wrongly -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "tokens", "reason", "counter"),
    [
        ([StreamPart(0, [7]), RuntimeError("SECRET")], [7], "error", "streams_failed"),
        ([StreamPart(0, [7])], [7], "error", "ends_without_reason"),
        ([], [], "error", "ends_without_reason"),
        ([StreamPart(0, [7, 8]), StreamPart(1, [8, 9], None, "length")], [7, 8, 9], "length", "repeated_tokens"),
        ([StreamPart(0, [7]), StreamPart(2, [9], None, "length")], [7], "error", "gaps"),
        ([StreamPart(0, [7]), StreamPart(1, [5000])], [7], "error", "impossible_tokens"),
        ([StreamPart(0, [7]), StreamPart(1, [-1])], [7], "error", "impossible_tokens"),
        ([StreamPart(0, [7]), StreamPart(1, [1.5])], [7], "error", "impossible_tokens"),
        ([StreamPart(0, [7, 8, 9, 10, 11])], [7, 8, 9], "length", "surplus_tokens"),
        ([StreamPart(0, [7], 6, "stop")], [7], "stop", "impossible_hits"),
        ([StreamPart(0, [7], -1, "stop")], [7], "stop", "impossible_hits"),
        ([StreamPart(0, [7], None, "abort")], [7], "error", "unasked_aborts"),
    ],
)
def test_what_is_wrong_is_not_passed_on_and_counted(
    make: Make, parts: list[Any], tokens: list[int], reason: str, counter: str
) -> None:
    engine, _ = make(saying(*parts))
    engine.submit(request())
    chunks = drive(engine)["r"]
    assert tokens_of(chunks) == tokens
    assert chunks[-1].finish_reason == reason
    assert (chunks[-1].error is not None) == (reason == "error")
    assert "SECRET" not in str(chunks[-1].error), "what an engine raises may quote a prompt"
    assert getattr(engine.counters, counter) >= 1
    assert chunks[0].cached_tokens is None or 0 <= chunks[0].cached_tokens <= 5
    until(lambda: engine.admission.inside == 0, "the place is free again")
    engine.admission.check()


def test_a_request_that_the_engine_refuses_is_told_from_one_that_it_failed(make: Make) -> None:
    engine, _ = make(saying(ValueError("SECRET")))
    engine.submit(request())
    (chunk,) = drive(engine)["r"]
    assert (chunk.finish_reason, chunk.error) == ("invalid", "the engine refuses the request")
    engine, _ = make(saying(StreamPart(0, [], None, "invalid")))
    engine.submit(request())
    assert drive(engine)["r"][-1].finish_reason == "invalid"
    until(lambda: engine.admission.inside == 0, "the place is free again")
    engine.admission.check()


def test_a_field_that_the_engine_lacks_is_refused_by_name(make: Make) -> None:
    engine, backend = make(honest)
    with pytest.raises(InvalidInput, match="^top_k: the engine scripted does not have it"):
        engine.submit(GenerationRequest("r", np.array([1, 2], np.int32), SamplingParams(3, top_k=5)))
    assert not engine.has_work() and not backend.jobs


def test_log_probabilities_go_with_their_tokens_and_none_may_be_left_out(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "INFO", replace(INFO, sampling_fields=("logprobs",)))
    said = [TokenLogprob(-float(i)) for i in range(3)]
    asked = GenerationRequest("r", np.array([1, 2], np.int32), SamplingParams(3, logprobs=0))
    rest = StreamPart(1, [8, 9, 9], None, "length", [*said[1:], said[0]])
    repeats = [StreamPart(0, [7, 8], None, None, said[:2]), rest]
    engine, _ = make(saying(*repeats))
    engine.submit(asked)
    chunks = drive(engine)["r"]
    assert [one for chunk in chunks for one in chunk.logprobs] == said and tokens_of(chunks) == [7, 8, 9]
    engine, _ = make(saying(StreamPart(0, [7, 8], None, None, said[:1])))
    engine.submit(asked)
    assert drive(engine)["r"][-1].finish_reason == "error" and engine.counters.missing_logprobs == 1


def test_a_stream_that_repeats_everything_each_time_is_no_fault(make: Make) -> None:
    parts = [StreamPart(0, [7]), StreamPart(0, [7, 8]), StreamPart(0, [7, 8, 9], None, "length")]
    engine, _ = make(saying(*parts))
    engine.submit(request())
    assert tokens_of(drive(engine)["r"]) == [7, 8, 9]
    assert engine.counters.repeated_tokens == 0


@given(
    st.lists(
        st.builds(
            StreamPart,
            st.integers(0, 8),
            st.lists(st.one_of(st.integers(-5, 60), st.floats(), st.booleans(), st.none()), max_size=5),
            st.one_of(st.none(), st.integers(-5, 20), st.floats()),
            st.sampled_from([None, None, None, "stop", "length", "abort", "error", "banana"]),
        ),
        max_size=8,
    )
)
def test_whatever_is_said_chunks_stay_in_order_and_in_bounds(parts: list[StreamPart]) -> None:
    stream = Stream("j", request(new=6), 6, StreamCounters())
    produced = 0
    for part in parts:
        if stream.finish_reason is None:
            stream.take(part, 50)
            chunk = stream.chunk()
            assert chunk.index == produced
            produced += len(chunk.token_ids)
            assert all(type(token) is int and 0 <= token < 50 for token in chunk.token_ids)
            assert chunk.cached_tokens is None or 0 <= chunk.cached_tokens <= 5
    stream.end_of_stream()
    assert stream.finish_reason in ("stop", "length", "error")
    assert produced <= 6


# --- failing and hanging ----------------------------------------------------------------------------------------------


def test_an_engine_that_dies_ends_everything_with_a_typed_error(make: Make) -> None:
    engine, backend = make(gated)
    engine.submit(request())
    until(lambda: backend.jobs, "it is in the engine")
    backend.why = "its process has died"
    with pytest.raises(EngineError, match="its process has died"):
        drive(engine)
    with pytest.raises(EngineError, match="its process has died"):
        engine.submit(request("another"))


def test_requests_that_end_with_the_engine_are_not_failed_one_by_one(make: Make) -> None:
    async def dying(backend: ScriptedBackend, job: EngineJob) -> AsyncIterator[StreamPart]:
        yield StreamPart(0, [7])
        await backend.gate(job.id).wait()
        backend.why = "its process has died"
        raise RuntimeError

    engine, backend = make(dying)
    engine.submit(request())
    until(lambda: engine.ready(), "it streams")
    chunks = engine.step()
    backend.go(0)
    with pytest.raises(EngineError):
        while True:
            until(engine.ready, "something comes")
            chunks += engine.step()
    assert [chunk.finish_reason for chunk in chunks] == [None], "routers resume it elsewhere"


def test_a_hit_that_is_reported_late_is_reported_once(make: Make) -> None:
    engine, _ = make(saying(StreamPart(0, [7]), StreamPart(1, [8], 4), StreamPart(2, [9], 4, "length")))
    engine.submit(request())
    assert [chunk.cached_tokens for chunk in drive(engine)["r"] if chunk.cached_tokens is not None] == [4]


def test_a_hung_engine_shows_and_its_requests_can_be_taken_away(make: Make) -> None:
    clock = ManualClock()
    engine, backend = make(gated, clock=clock)
    assert engine.stalled_seconds() == 0.0
    clock.advance(50.0)
    engine.submit(request())
    assert engine.stalled_seconds() == 0.0, "idle time is no stall"
    clock.advance(130.0)
    assert engine.stalled_seconds() == 130.0
    until(lambda: backend.jobs, "it is in the engine")
    backend.abort = never  # type: ignore[method-assign, assignment]
    assert engine.abort("r")
    assert drive(engine)["r"][-1].finish_reason == "abort"
    assert engine.stalled_seconds() == 130.0, "the engine is as hung as before"
    assert engine.admission.inside == 1, "and its place as taken"


async def never(job_id: str) -> None:
    """An abort that does nothing."""


@pytest.mark.parametrize(
    ("error", "expected", "text"),
    [
        (RuntimeError("no such model"), EngineError, "RuntimeError: no such model"),
        (InvalidConfig("tp_size"), InvalidConfig, "tp_size"),
    ],
)
def test_an_engine_that_does_not_start_is_closed(error: Exception, expected: type[Exception], text: str) -> None:
    async def start() -> None:
        raise error

    backend = ScriptedBackend(honest, start=start)
    with pytest.raises(expected, match=text):
        StreamingEngine(backend)
    assert backend.closed


def test_an_engine_that_does_not_get_ready_is_given_up() -> None:
    backend = ScriptedBackend(honest, start=asyncio.Event().wait)
    with pytest.raises(EngineError, match="did not start in 0.05 s"):
        StreamingEngine(backend, start_seconds=0.05)
    assert backend.closed


def test_closing_ends_the_loop_and_refuses_more(make: Make) -> None:
    engine, backend = make(gated)
    engine.submit(request())
    engine.close()
    engine.close()
    assert backend.closed and not engine.has_work()
    assert "preble-engine-loop" not in [thread.name for thread in threading.enumerate() if thread.is_alive()]
    with pytest.raises(EngineError, match="closed"):
        engine.submit(request())


# --- admission --------------------------------------------------------------------------------------------------------


def test_the_engine_holds_little_more_than_it_computes(make: Make) -> None:
    engine, backend = make(gated, look_ahead=2, look_ahead_seconds=0.0)
    for i in range(10):
        engine.submit(request(f"r{i}", tokens=[10 * i + j for j in range(8)]))
    until(lambda: len(backend.jobs) == 2, "the look-ahead is used")
    assert (engine.admission.waiting, engine.admission.silent) == (8, 2)
    assert engine.load().waiting == 10
    backend.go(0)
    until(lambda: len(backend.jobs) == 3, "the next goes in as one has output")
    for i in range(10):
        until(lambda i=i: len(backend.jobs) > i, "all go in")
        backend.go(i)
    assert len(drive(engine)) == 10
    assert [job.id.rpartition("-")[2] for job in backend.jobs] == [str(i) for i in range(10)]
    engine.admission.check()


def test_small_prompts_share_an_iteration(make: Make) -> None:
    engine, backend = make(gated, look_ahead_seconds=1.0)  # four places and one ahead
    for i in range(10):
        engine.submit(request(f"r{i}", tokens=[10 * i + j for j in range(30)]))
    until(lambda: len(backend.jobs) == 5, "five times 30 tokens go in")
    assert engine.admission.silent == 5


def test_the_queue_is_bounded(make: Make) -> None:
    engine, _ = make(gated, max_waiting=3, look_ahead=1, look_ahead_seconds=0.0)
    for i in range(4):
        engine.submit(request(f"r{i}"))
    with pytest.raises(QueueFull, match="3 requests wait"):
        engine.submit(request("r4"))
    assert engine.abort("r3")
    engine.submit(request("r4"))
    engine.admission.check()


def test_a_waiting_request_is_aborted_without_the_engine(make: Make) -> None:
    engine, backend = make(gated, look_ahead=1, look_ahead_seconds=0.0)
    engine.submit(request("r0"))
    engine.submit(request("r1"))
    until(lambda: backend.jobs, "the first is in the engine")
    assert engine.abort("r1")
    assert not engine.abort("unknown")
    assert [chunk.finish_reason for chunk in engine.step()] == ["abort"]
    assert backend.aborted == []
    assert engine.admission.waiting == 0 and engine.admission.inside == 1


@pytest.mark.parametrize("shared", [900, 15])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_who_goes_on_from_what_the_engine_still_computes_follows_if_it_would_be_computed_twice(
    engine: str, shared: int
) -> None:
    """Together in one batch SGLang computed both: live, hits fell from 0.83 to 0.76 with a longer look-ahead. vLLM
    computes once what they share; and to compute the head of a template twice takes no time."""
    queue, _ = admission(look_ahead=3, info=replace(INFO, engine=engine))
    document = [7] * 900
    queue.apply(0, [BlockStored(list(range(225)), None, document, 4)] if shared < 900 else [])
    queue.add(request("document", tokens=[*document[:shared], *[1] * (901 - shared)]))
    for name, tokens in (("question", [*document, 2]), ("other", [8] * 20)):
        queue.add(request(name, tokens=tokens))
    chosen = [chosen[0].request_id for chosen in iter(queue.next, None)]
    queue.check()
    if engine == "vllm" or shared < 900:
        assert sorted(chosen) == ["document", "other", "question"]
        return
    assert chosen == ["document", "other"]
    queue.started("document", 0)
    last = queue.next()
    assert last is not None and last[0].request_id == "question"
    queue.check()


def admission(order: str = "priority", info: EngineInfo = INFO, **config: Any) -> tuple[Admission, ManualClock]:
    clock = ManualClock()
    return Admission(AdmissionConfig(order=order, look_ahead_seconds=0.0, **config), info, clock=clock), clock


def drained(queue: Admission) -> list[str]:
    """The order in which requests go in when each has its output at once."""
    order: list[str] = []
    while (chosen := queue.next()) is not None:
        name = chosen[0].request_id
        order.append(name)
        queue.started(name, None)
        queue.ended(name, 1)
    return order


def test_groups_of_the_cached_share_go_in_in_proportion() -> None:
    queue, _ = admission()
    prefix = list(range(40))
    queue.apply(0, [BlockStored(list(range(10)), None, prefix, 4)])
    for i in range(20):  # group 0 is older, group 5 has half of its prompt cached
        queue.add(request(f"cold{i}", tokens=[1000 + i] * 8 + [i] * 72))
    for i in range(20):
        queue.add(request(f"warm{i}", tokens=[*prefix, *[2000 + i] * 40]))
    assert queue._queue.group_sizes()[0] == queue._queue.group_sizes()[5] == 20
    order = drained(queue)
    assert order[:6].count("cold0") == 1 and len([name for name in order[:6] if name.startswith("warm")]) == 5
    assert [name for name in order if name.startswith("warm")] == [f"warm{i}" for i in range(20)], "oldest first"
    queue.check()


def test_who_waited_too_long_has_a_turn() -> None:
    queue, clock = admission(max_wait_seconds=10.0)
    queue.apply(0, [BlockStored(list(range(10)), None, list(range(40)), 4)])
    queue.add(request("old", tokens=[4000] * 50))
    clock.advance(11.0)
    for i in range(30):
        queue.add(request(f"warm{i}", tokens=[*range(40), 100 + i]))
    assert drained(queue)[0] == "old"


def test_an_event_that_empties_the_cache_moves_requests_to_other_groups() -> None:
    queue, _ = admission()
    queue.apply(0, [BlockStored(list(range(10)), None, list(range(40)), 4)])
    queue.add(request("warm", tokens=list(range(41))))
    assert queue._queue.group_sizes()[9] == 1
    queue.apply(0, [AllBlocksCleared()])
    queue.add(request("cold", tokens=[50] * 41))
    assert drained(queue) == ["warm", "cold"], "now both are cold, and the older one goes first"


def test_first_come_first_served_is_an_order_too() -> None:
    queue, _ = admission("fcfs")
    queue.apply(0, [BlockStored(list(range(10)), None, list(range(40)), 4)])
    queue.add(request("cold", tokens=[50] * 41))
    queue.add(request("warm", tokens=list(range(41))))
    assert drained(queue) == ["cold", "warm"]


@pytest.mark.parametrize(("order", "cached_first"), [("priority", True), ("fcfs", False)])
def test_an_engine_reports_whether_cached_prompts_go_first(make: Make, order: str, cached_first: bool) -> None:
    engine, _ = make(order=order)
    assert engine.info.cached_first is cached_first


def test_a_request_goes_to_the_rank_that_has_its_prefix() -> None:
    queue = Admission(AdmissionConfig(), INFO, ranks=2, clock=ManualClock())
    queue.apply(1, [BlockStored(list(range(10)), None, list(range(40)), 4)])
    queue.add(request("warm", tokens=list(range(41))))
    chosen = queue.next()
    assert chosen is not None and chosen[1] == 1


class Failing(Policy):
    """A rule with a mistake."""

    name = "failing"

    def score(self, request: Any, workers: Any) -> Any:
        raise ZeroDivisionError("a mistake")


def test_a_policy_of_one_s_own_chooses_the_rank() -> None:
    config = AdmissionConfig(policy="tests.engines.test_async_engine:SecondRank")
    queue = Admission(config, INFO, ranks=3, clock=ManualClock())
    for number in range(4):
        queue.add(request(f"r{number}", tokens=[number, *range(40)]))
    chosen = [queue.next() for _ in range(2)]
    assert [one[1] for one in chosen if one] == [1, 1]
    assert queue.scheduler.policy == "second"


class SecondRank(Policy):
    """Always the same one."""

    name = "second"

    def score(self, request: Any, workers: Any) -> Any:
        return [name != "1" for name in workers.ids]


def test_a_policy_that_fails_ends_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    queue = Admission(AdmissionConfig(policy=Failing(), look_ahead=4), INFO, ranks=2, clock=ManualClock())
    for number in range(2):
        queue.add(request(f"r{number}", tokens=[number, *range(40)]))
    chosen = [queue.next(), queue.next()]
    assert sorted(one[1] for one in chosen if one) == [0, 1]
    assert "a mistake" in caplog.text and "policy 'failing' failed" in caplog.text
    for number in range(2):
        queue.started(f"r{number}", 0)
        queue.ended(f"r{number}", 3)
    assert queue.inside == 0
    queue.check()


@pytest.mark.parametrize("ended_well", [True, False])
def test_tenants_pay_for_their_output(ended_well: bool) -> None:
    """One asks much and gets little, the other the reverse: what each has had is the same, to a request."""
    queue, _ = admission(info=replace(INFO, max_running=1, kv_capacity_tokens=100_000))
    shapes = {"talks": (100, 500), "asks": (1000, 1)}
    served = dict.fromkeys(shapes, 0)
    for number in range(150):
        for tenant, (prompt, output) in shapes.items():
            tokens = [number, *[1000 + ord(tenant[0])] * (prompt - 1)]
            queue.add(request(f"{tenant} {number}", tokens=tokens, new=output, claim=Claim(tenant)))
    for _ in range(110):
        chosen = queue.next()
        assert chosen is not None
        tenant = chosen[0].request_id.split()[0]
        prompt, output = shapes[tenant]
        queue.started(chosen[0].request_id, 0)
        queue.ended(chosen[0].request_id, output, ended_well=ended_well)
        served[tenant] += prompt + OUTPUT_COST * output
    queue.check()
    assert abs(served["talks"] - served["asks"]) < 100 + OUTPUT_COST * 500 + 2048, "a request, and a quantum"


@pytest.mark.parametrize(
    "wrong", [{"order": "random"}, {"look_ahead": 0}, {"look_ahead_seconds": -1.0}, {"max_waiting": 0}]
)
def test_wrong_settings_name_the_field(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=f"AdmissionConfig.{next(iter(wrong))}"):
        AdmissionConfig(**wrong)


# --- cache events -----------------------------------------------------------------------------------------------------

STORED = BlockStored([1, 2], None, [1, 2, 3, 4, 5, 6, 7, 8], 4)


def test_events_reach_routers_and_the_queue(make: Make) -> None:
    engine, backend = make()
    backend.tell(0, [STORED])
    until(engine.ready, "the event is there")
    assert engine.has_work()
    assert engine.take_events() == [STORED]
    assert engine.admission.scheduler.match([1, 2, 3, 4, 5, 6, 7, 8, 9]).best_tokens == 8


def test_events_that_make_no_sense_and_a_feed_that_ends_clear_what_is_estimated(make: Make) -> None:
    engine, backend = make()
    backend.tell(0, [STORED])
    backend.tell(0, [BlockStored([3], None, [1, 2, 3], 4)])  # three tokens in a block of four
    until(lambda: engine.refused_events, "the event is refused")
    assert engine.take_events() == [STORED, AllBlocksCleared()]
    assert engine.admission.scheduler.match([1, 2, 3, 4, 5]).best_tokens == 0
    backend.tell(0, [STORED])
    until(engine.ready, "the event is there")
    backend.feed_error = RuntimeError("gone")
    until(lambda: engine.admission.scheduler.match([1, 2, 3, 4, 5]).best_tokens == 0, "the estimate is dropped")
    assert engine.take_events() == [STORED, AllBlocksCleared()]


def test_blocks_leave_when_the_last_rank_drops_them() -> None:
    relay = EventRelay(2)
    relay.add(0, [STORED])
    relay.add(1, [STORED])
    relay.add(0, [BlockRemoved([2, 1])])
    relay.add(1, [BlockRemoved([2])])
    assert relay.take() == [STORED, STORED, BlockRemoved([2])]
    relay.add(0, [BlockStored([3], None, [9, 9, 9, 9], 4)])
    relay.take()
    relay.add(0, [AllBlocksCleared()])
    assert relay.take() == [BlockRemoved([3])]
    relay.add(1, [AllBlocksCleared()])
    assert relay.take() == [AllBlocksCleared()]


@pytest.mark.parametrize("bound", [{"events_max": 3}, {"event_tokens_max": 31}])
def test_events_that_nobody_takes_collapse(bound: dict[str, int]) -> None:
    relay = EventRelay(1, **bound)
    for _ in range(4):
        relay.add(0, [STORED])
    assert relay.take() == [AllBlocksCleared()]
    relay.add(0, [STORED])
    assert relay.take() == [STORED]


@pytest.mark.parametrize("namespace", [None, "a", ("b", 1), ("lora", "x"), ("salt", "s")])
def test_namespaces_come_back_from_their_salts_where_engines_put_them(namespace: Any) -> None:
    taken: list[Any] = []
    listener, salt = RankListener(1, lambda rank, events: taken.extend(events)), salt_of(namespace)
    for more in ({"cache_salt": salt}, {"extra_keys": [[salt] if salt else None]}):  # SGLang's place, and vLLM's
        event = {"block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "block_size": 4, **more}
        listener.on_payload(msgpack.packb([1.5, [{"type": "BlockStored", **event}], 0]))
    assert taken == [BlockStored((1,), None, (1, 2, 3, 4), 4, namespace)] * 2
    listener.on_payload(b"no batch")
    assert taken[2:] == [AllBlocksCleared()]


# --- in a worker ------------------------------------------------------------------------------------------------------


def test_the_workers_thread_receives_of_chunks_events_and_failures(make: Make) -> None:
    engine, backend = make(gated)
    outputs: list[Any] = []
    spoken = threading.Event()

    def serve(wait_seconds: float) -> bool:
        spoken.wait(wait_seconds)
        spoken.clear()
        return True

    thread = EngineThread(engine, serve, outputs.append, spoken.set)
    thread.start()

    def seen(what: Callable[[Any], Any]) -> bool:
        return any(what(output) for output in list(outputs))

    backend.tell(0, [STORED])
    until(lambda: seen(lambda output: STORED in output.events), "an idle engine's events come")
    thread.submit(request())
    spoken.set()
    until(lambda: backend.jobs, "the request is in the engine")
    backend.go(0)
    until(lambda: seen(lambda output: output.chunks and output.chunks[-1].finish_reason == "length"), "it ends")
    assert thread.step_seconds(time.monotonic()) == 0.0
    assert thread.load.running == thread.load.waiting == 0
    backend.why = "broken"
    thread.stand_in()  # until the thread ends
    assert isinstance(thread.failure, EngineError)
    assert backend.closed
