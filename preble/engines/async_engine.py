"""Engines that run by themselves behind the step-by-step protocol. Owns the thread of their event loop and the
hand-over between it and the worker's engine thread; knows no engine in particular.

    engine's thread of the worker        one lock            thread of the event loop
      submit, abort  -> Admission  -> next request of the paper's order -> Backend.stream, one task each
      step           <- Stream     <- what can be accepted              <- what it yields
      take_events    <- EventRelay <- cache events                      <- the backend's own feed

The hand-over is bounded by the requests in it: tokens that nobody has taken yet wait as one chunk, a request has
at most as many tokens as it asked for, and `AdmissionConfig.max_waiting` and the engine's places bound the requests.
The engine's own failure ends everything: `step` raises `EngineError`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from msgspec import structs

from ..clock import Clock, monotonic
from ..errors import DuplicateRequest, EngineError, PrebleError
from ..transport.tasks import end_all
from ..types import AllBlocksCleared, CacheEvent
from .admission import Admission, AdmissionConfig
from .async_requests import EngineJob, Stream, StreamCounters, StreamPart
from .base import EngineInfo, EngineLoad, GenerationRequest, OutputChunk, check_prompt, check_sampling
from .event_buffer import EventRelay, EventSink

logger = logging.getLogger("preble.engines")

_POLL_SECONDS = 0.5  # how often the engine is asked for its load and whether it lives
_CLOSE_SECONDS = 20.0
_ABORT_TRIES, _ABORT_SECONDS = 20, 0.5
_TOKEN_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What an engine turned out to be. `vocab_size`: None if unknown."""

    info: EngineInfo
    ranks: int = 1
    vocab_size: int | None = None


class Backend(Protocol):
    """An asynchronous engine, all of it on one event loop."""

    def make_loop(self) -> asyncio.AbstractEventLoop:
        """The loop to run on. Called once, before anything else."""
        return asyncio.new_event_loop()

    async def start(self) -> BackendInfo:
        """Get ready."""

    async def feed(self, sink: EventSink) -> None:
        """Give the cache events of all ranks to `sink`, until cancelled; return where there are none."""

    def stream(self, job: EngineJob) -> AsyncIterator[StreamPart]:
        """Generate. Whatever it raises ends this request, and makes `failure` be asked."""

    async def abort(self, job_id: str) -> None:
        """End a request; its stream ends soon after. Ids that it does not know (yet) are ignored."""

    async def used_tokens(self) -> int:
        """KV tokens in use, as of the engine's last iteration."""

    def failure(self) -> str:
        """Why the engine can do nothing any more; "" while it can. No prompt is quoted in it."""

    async def close(self) -> None:
        """Free everything; also after a failed `start`."""


class StreamingEngine:
    """Implements `Engine` and `SelfRunning` over a `Backend`.

    The constructor returns when the engine is ready; it raises what `Backend.start` raises, and `EngineError` if that
    takes longer than `start_seconds`. `step` waits at most `wait_seconds` for output. Thread-safe.
    """

    def __init__(
        self,
        backend: Backend,
        config: AdmissionConfig | None = None,
        *,
        start_seconds: float = 900.0,
        wait_seconds: float = 0.05,
        clock: Clock = monotonic,
    ) -> None:
        self.counters = StreamCounters()
        self.refused_events = 0
        self._backend = backend
        self._clock = clock
        self._wait_seconds = wait_seconds
        self._changed = threading.Condition()
        self._notify: Callable[[], object] = lambda: None  # until `listen` is called
        self._live: dict[str, Stream] = {}  # by request id: those whose end has not been taken
        self._streams: dict[str, Stream] = {}  # by job id: waiting or in the engine
        self._jobs: dict[str, asyncio.Task[None]] = {}  # by job id: in the engine
        self._helpers: set[asyncio.Task[None]] = set()  # these two are the loop's thread's
        self._news: dict[str, Stream] = {}  # by request id, oldest news first
        self._name = secrets.token_hex(4)  # other workers before the same server number their requests, too
        self._serial = 0
        self._used_tokens = 0
        self._failure = ""
        self._moved_at = clock()
        self._closed = False
        self._loop = backend.make_loop()
        self._thread = threading.Thread(target=self._run_loop, name="preble-engine-loop", daemon=True)
        self._thread.start()
        started = self._start(start_seconds)
        config = config or AdmissionConfig()
        self._info = replace(started.info, cached_first=config.order != "fcfs")  # those that wait are in our queue
        self._vocab_size = started.vocab_size or _TOKEN_MAX + 1
        self._ranks = started.ranks
        self._relay = EventRelay(started.ranks)
        self.admission = Admission(
            config,
            started.info,
            ranks=started.ranks,
            clock=clock,
        )
        self._loop.call_soon_threadsafe(self._start_helpers)

    # --- the engine protocol ------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """What is constant about this engine, as it reported it."""
        return self._info

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises `QueueFull`, `InvalidInput` or `EngineError`; then nothing has changed."""
        check_prompt(request, self._vocab_size, self._info.max_model_tokens)
        check_sampling(request, self._info)
        with self._changed:
            self._check_open()
            if request.request_id in self._live:
                raise DuplicateRequest(f"request {request.request_id!r} is live")
            room = self._info.max_model_tokens - len(request.token_ids)
            left = min(request.sampling.max_new_tokens - request.output_offset, room)
            stream = Stream(f"preble-{self._name}-{self._serial}", request, left, self.counters)
            if left <= 0:  # resumed after its last token: only the news of its end was lost
                stream.cached_tokens, stream.finish_reason = 0, "length"
                self._news[request.request_id] = stream
            else:
                self.admission.add(structs.replace(request, request_id=stream.id))
                self._streams[stream.id] = stream
                self._serial += 1
            self._live[request.request_id] = stream
            self._admit()

    def abort(self, request_id: str) -> bool:
        """End a request; its last chunk (finish_reason "abort") comes from the next `step`. False if it is not live."""
        with self._changed:
            stream = self._live.get(request_id)
            if stream is None:
                return False
            if stream.finish_reason is None:
                stream.finish_reason = "abort"
                self._let_go(stream)
                self._announce(stream)
            return True

    def step(self) -> list[OutputChunk]:
        """What came since the last call; waits a bounded time where nothing did. Raises `EngineError` if it failed."""
        with self._changed:
            if self._live and not self.ready():
                self._changed.wait(self._wait_seconds)
            if self._failure and not self._news:
                raise EngineError(self._failure)
            news, self._news = self._news, {}
            for stream in news.values():
                if stream.finish_reason is not None:
                    del self._live[stream.request.request_id]
            return [stream.chunk() for stream in news.values()]

    def has_work(self) -> bool:
        """True while a request is live, or something waits to be taken."""
        return bool(self._live) or self.ready()

    def take_events(self) -> list[CacheEvent]:
        """Cache events since the last call, oldest first."""
        with self._changed:
            return self._relay.take()

    def load(self) -> EngineLoad:
        """Load at this moment; requests without output count as waiting. Used KV tokens are those of half a second ago,
        cached ones what the engine's events, or else its reports, amount to."""
        with self._changed:
            queue = self.admission
            return EngineLoad(
                running=queue.inside - queue.silent,
                waiting=queue.waiting + queue.silent,
                kv_used_tokens=self._used_tokens if queue.inside else 0,
                kv_cached_tokens=queue.cached_tokens,
                waiting_uncached_tokens=queue.uncached_tokens,
            )

    def close(self) -> None:
        """Drop all requests without further chunks and end the engine. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._live.clear()
            self._news.clear()
            self._streams.clear()
        self._end_loop()

    # --- SelfRunning --------------------------------------------------------------------------------------------------

    def listen(self, notify: Callable[[], None]) -> None:
        """Have `notify` called, from any thread, when `ready` may have turned true."""
        self._notify = notify

    def ready(self) -> bool:
        """True if `step` or `take_events` has something, or `step` would raise."""
        return bool(self._news or self._failure or len(self._relay))

    def stalled_seconds(self) -> float:
        """How long the engine has had requests and said nothing; 0.0 when it has none."""
        with self._changed:
            return max(0.0, self._clock() - self._moved_at) if self.admission.inside else 0.0

    # --- requests, under the lock -------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if self._failure:
            raise EngineError(self._failure)

    def _admit(self) -> None:
        """Hand requests to the engine while it has room for them."""
        idle = not self.admission.inside
        while (chosen := self.admission.next()) is not None:
            if idle:
                self._moved_at = self._clock()
                idle = False
            request, rank = chosen
            job = EngineJob(request.request_id, request, self._streams[request.request_id].max_tokens, rank)
            self._loop.call_soon_threadsafe(self._start_job, job)

    def _announce(self, stream: Stream) -> None:
        """Something of a request is to be taken."""
        self._news[stream.request.request_id] = stream
        self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        self._notify()

    def _let_go(self, stream: Stream) -> None:
        """Nobody wants more of a request; the engine keeps its place until it has really ended there."""
        if self.admission.withdraw(stream.id):
            del self._streams[stream.id]
        else:
            self._loop.call_soon_threadsafe(self._abort_job, stream.id)

    # --- the loop's thread --------------------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _start(self, start_seconds: float) -> BackendInfo:
        """Start the engine and wait for what it says of itself; an engine that does not start is closed again."""
        started = asyncio.run_coroutine_threadsafe(self._backend.start(), self._loop)
        try:
            return started.result(start_seconds)
        except concurrent.futures.TimeoutError:
            started.cancel()
            self._closed = True
            self._end_loop()
            raise EngineError(f"the engine did not start in {start_seconds} s") from None
        except Exception as error:
            self._closed = True
            self._end_loop()
            if isinstance(error, PrebleError):
                raise
            raise EngineError(f"the engine did not start: {type(error).__name__}: {error}") from error

    def _start_helpers(self) -> None:
        self._help(self._watch())
        self._help(self._backend.feed(self._take_events)).add_done_callback(self._end_feed)

    def _help(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something beside the requests until it ends or the engine is closed."""
        task = self._loop.create_task(work)
        self._helpers.add(task)
        task.add_done_callback(self._helpers.discard)
        return task

    def _start_job(self, job: EngineJob) -> None:
        task = self._loop.create_task(self._serve(job))
        self._jobs[job.id] = task
        task.add_done_callback(functools.partial(self._end_job, job))

    def _abort_job(self, job_id: str) -> None:
        self._help(self._abort_until_gone(job_id))

    async def _abort_until_gone(self, job_id: str) -> None:
        """Send the engine the abort; more than once, since it may not have known the request yet."""
        for _ in range(_ABORT_TRIES):
            if job_id not in self._jobs:
                return
            await self._backend.abort(job_id)
            await asyncio.sleep(_ABORT_SECONDS)
        logger.warning("the engine does not end a request that was aborted %s times", _ABORT_TRIES)

    async def _serve(self, job: EngineJob) -> None:
        async for part in self._backend.stream(job):
            self._take(job, part)

    def _take(self, job: EngineJob, part: StreamPart) -> None:
        """Something came out of the engine."""
        with self._changed:
            stream = self._streams.get(job.id)
            if stream is None:
                return
            self._moved_at = self._clock()
            wanted = stream.finish_reason is None
            if wanted:
                stream.take(part, self._vocab_size)
            if part.token_ids:
                self.admission.started(job.id, stream.cached_tokens)
            if part.finish_reason is not None:
                self._leave(stream)
            elif wanted and stream.finish_reason is not None:
                self._let_go(stream)
            self._admit()
            if wanted:
                self._announce(stream)

    def _leave(self, stream: Stream) -> None:
        """A request is no longer in the engine."""
        del self._streams[stream.id]
        ended_well = stream.finish_reason not in ("error", "invalid", "abort")
        self.admission.ended(stream.id, stream.produced, stream.cached_tokens, ended_well=ended_well)

    def _end_job(self, job: EngineJob, task: asyncio.Task[None]) -> None:
        """The engine says no more of a request."""
        self._jobs.pop(job.id, None)
        error = None if task.cancelled() else task.exception()
        with self._changed:
            self._look_for_failure()
            stream = self._streams.get(job.id)
            if stream is None or self._failure:
                return  # what ends with the engine is not this request's fault: routers take it elsewhere
            self._moved_at = self._clock()
            wanted = stream.finish_reason is None
            if wanted:
                if error is not None:
                    self.counters.streams_failed += 1
                    if isinstance(error, ValueError) and not stream.produced:  # so engines refuse what they are asked
                        stream.refuse()
                    # What an engine raises may quote the prompt, so only its kind is reported.
                    else:
                        stream.fail(f"the engine failed the request: {type(error).__name__}")
                stream.end_of_stream()
            self._leave(stream)
            self._admit()
            if wanted:
                self._announce(stream)

    def _take_events(self, rank: int, events: Iterable[CacheEvent]) -> None:
        """The engine's cache has changed."""
        events = list(events)
        with self._changed:
            try:
                self.admission.apply(rank, events)
            except PrebleError as error:
                self.refused_events += len(events)
                logger.warning("cache events of the engine make no sense, forgetting its cache: %s", error)
                events = [AllBlocksCleared()]
                self.admission.apply(rank, events)
            self._relay.add(rank, events)
            self._wake()

    def _end_feed(self, task: asyncio.Task[None]) -> None:
        """Nothing is reported about the cache any more; where that is a fault, what was received counts for nothing."""
        if not task.cancelled() and task.exception() is not None:
            logger.error("the feed of cache events failed", exc_info=task.exception())
            for rank in range(self._ranks):
                self._take_events(rank, [AllBlocksCleared()])

    async def _watch(self) -> None:
        """Ask for load and life, until cancelled."""
        while not self._failure:
            self._used_tokens = await self._backend.used_tokens()
            with self._changed:
                self._look_for_failure()
                self._admit()
            await asyncio.sleep(_POLL_SECONDS)

    def _look_for_failure(self) -> None:
        why = self._backend.failure()
        if why and not self._failure:
            logger.error("the engine failed: %s", why)
            self._failure = f"the engine failed: {why}"
            self._wake()

    def _end_loop(self) -> None:
        """Close the backend and end its loop, within `_CLOSE_SECONDS` each."""
        if self._thread.is_alive():
            closing = asyncio.run_coroutine_threadsafe(self._close_all(), self._loop)
            try:
                closing.result(_CLOSE_SECONDS)
            except concurrent.futures.TimeoutError:
                logger.error("the engine does not close; leaving it behind")
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_SECONDS)

    async def _close_all(self) -> None:
        await end_all(*self._jobs.values(), *self._helpers)
        await self._backend.close()
