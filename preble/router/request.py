"""One request in the router: which of its tokens have come, and what its consumer may read. No socket, no scheduler.

Exactly once: a request has one list of output tokens, and position k is appended when, and only when, it holds k
tokens. A chunk that repeats positions is cut, one that skips any is an error, whichever worker sent it and in whichever
attempt.

A consumer that does not read costs memory for its own tokens (and their log probabilities) only, at most
`max_new_tokens`: they merge into one chunk.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from ..errors import PrebleError, ProtocolError
from ..transport.messages import Abort, GenerationRequest, OutputChunk
from ..types import (
    BATCH,
    DECODE,
    PREFILL,
    Claim,
    FinishReason,
    PairDecision,
    Role,
    SamplingParams,
    SessionHint,
    TokenLogprob,
    WorkerSpec,
)
from .server_queue import QueuedRequest, ServerQueue

if TYPE_CHECKING:
    from .._placement.decision import Decision
    from .fleet import Fleet

TokenIds = npt.NDArray[np.int32]


class StreamChunk(Struct, frozen=True):
    """New output tokens of the request with `request_id`. `index` is the output position of `token_ids[0]`, counted
    from the prompt's end.

    `cached_tokens` (prompt tokens whose KV the first worker reused) comes once, with the first chunk or as soon as the
    worker reports it; `decision` (which sent the request to its first worker) with the first chunk; `finish_reason`
    ("stop", "length" or "abort") with the last, which may hold no tokens. `worker` computed the newest of the tokens.
    `logprobs`, where they were asked for, has one for each token.
    """

    request_id: Hashable
    index: int
    token_ids: tuple[int, ...]
    worker: str
    cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    decision: Decision | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True)
class Attempt:
    """One try at one worker. `wire_id` is the request's name there, `offset` the output tokens sent as prompt. `pair`:
    the two that serve it, this one first for one token; once `handed_over` it is the one that decodes. `matched_tokens`
    of its prompt counted as cached where it was placed."""

    wire_id: str
    worker_id: str
    offset: int
    first_seen: bool = False
    cached_tokens: int | None = None
    pair: PairDecision | None = None
    handed_over: bool = False
    matched_tokens: int = 0


def half_of(attempt: Attempt) -> Role | None:
    """Which half of a pair's request an attempt is; None for a whole one."""
    if attempt.pair is None:
        return None
    return DECODE if attempt.handed_over else PREFILL


def sampling_of(sampling: SamplingParams, attempt: Attempt) -> SamplingParams:
    """What an attempt's worker is asked for: one that only prefills, for one token."""
    if attempt.pair is None or attempt.handed_over:
        return sampling
    most = attempt.offset + 1
    fewest = None if sampling.min_new_tokens is None else min(sampling.min_new_tokens, most)
    return replace(sampling, max_new_tokens=most, min_new_tokens=fewest)


@dataclass(frozen=True, slots=True)
class Setback:
    """An attempt ended before the request did; another may follow. `full`: the worker is at its bound, nothing ran."""

    text: str
    full: bool = False


@dataclass(slots=True)
class RequestTimes:
    """A live request's moments, by the router's clock, and what its last attempt came to."""

    arrived_at: float
    prompt: TokenIds | None = None  # as it was sent first
    sent_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    worker: WorkerSpec | None = None
    cached_tokens: int | None = None


class Accepted(NamedTuple):
    """What a chunk brought: tokens that were new, tokens that had come before, tokens beyond what was asked for."""

    new: int
    duplicates: int
    excess: int


class PlacedRequest:
    """What the router knows of any request while it places it: whose it is, and where it was tried."""

    def __init__(
        self,
        request_id: Hashable,
        token_ids: TokenIds,
        namespace: Hashable,
        *,
        client: Hashable = None,
        first_token_seconds: float = math.inf,
        session: SessionHint | None = None,
        exclude: frozenset[str] = frozenset(),
        claim: Claim | None = None,
        group: Hashable = None,
    ) -> None:
        self.request_id = request_id
        self.client = client
        self.claim = claim  # on whose account, and how soon; None where nothing was said of it
        self.yields = False  # its tenant wants more than its share: its worker takes it as batch work
        self.session = session
        self.group = group  # of samples of one prompt, all of which are waited for
        self.first_token_seconds = first_token_seconds  # in which the first token is of use
        self.prompt = token_ids
        self.namespace = namespace
        self.exclude = exclude  # workers that it must not go to
        self.needs: tuple[str, ...] = ()  # fields that not every worker's engine has
        self.is_streamed = True  # its first token will be seen when it comes
        self.is_separable = False  # one worker may prefill it and another decode it
        self.attempt: Attempt | None = None
        self.decision: Decision | None = None  # the one that placed it first
        self.arrived_at: float | None = None  # when it was placed first
        self.failures = 0  # attempts that were lost under it
        self.full_workers: set[str] = set()  # at their bound when last asked
        self.failed_workers: set[str] = set()  # lost it; another one is preferred, whatever they have cached
        self.resume_by: float | None = None  # when it has waited long enough for a worker to go on with
        self.setback: Setback | None = None
        self.finish_reason: FinishReason | None = None
        self.error: PrebleError | None = None
        self.times: RequestTimes | None = None  # where requests are recorded

    @property
    def worker_claim(self) -> Claim | None:
        """What its worker is given of it."""
        return replace(self.claim, priority=BATCH) if self.claim is not None and self.yields else self.claim

    @property
    def output_tokens(self) -> int:
        """Output tokens that have come so far."""
        raise NotImplementedError

    @property
    def output_limit(self) -> int | None:
        """Output tokens that its client allows; None where it names no limit."""
        return None if self.tokens_left is None else self.tokens_left + self.output_tokens

    @property
    def tokens_left(self) -> int | None:
        """Output tokens that may still come; None where nothing says."""
        raise NotImplementedError

    def tokens_so_far(self) -> TokenIds:
        """Prompt and output: what another worker needs to go on. Changes nothing."""
        raise NotImplementedError

    def hand_over(self, attempt: Attempt, fleet: Fleet) -> None:
        """Give the request to the attempt's worker. Raises `QueueFull`, `TransportError`, `UnknownWorker` where it
        cannot be had, `InvalidInput` for a request that no worker takes."""
        raise NotImplementedError

    def expected(self, attempt: Attempt, fleet: Fleet, seconds: float, now: float) -> None:
        """Its attempt is booked; its prefill is expected to take so long. `now` is the router's clock's."""
        raise NotImplementedError

    def queued(self, attempt: Attempt, seconds: float, now: float, go: Callable[[], object]) -> QueuedRequest:
        """Its attempt as one that waits before a server until `go` is called."""
        self.arrived_at = now if self.arrived_at is None else self.arrived_at
        claim = self.worker_claim
        return QueuedRequest(
            attempt.wire_id,
            self.tokens_so_far(),
            attempt.matched_tokens,
            seconds,
            self.arrived_at,
            is_batch=claim is not None and claim.priority == BATCH,
            is_streamed=self.is_streamed,
            go=go,
            namespace=self.namespace,
        )

    def take_back(self, attempt: Attempt, fleet: Fleet, *, abort: bool) -> None:
        """The attempt is over; with `abort` its worker shall stop. Raises as `hand_over`, but for `InvalidInput`."""
        raise NotImplementedError

    def fail(self, error: PrebleError) -> None:
        """The request ends with an error."""
        raise NotImplementedError

    def conclude(self, reason: FinishReason) -> None:
        """The request has come to its end; the first reason counts."""
        self.finish_reason = self.finish_reason or reason

    def set_back(self, setback: Setback) -> None:
        """The attempt is over, the request is not."""
        raise NotImplementedError

    def reason_if_complete(self, eos_token_ids: tuple[int, ...]) -> FinishReason | None:
        """The finish reason if the tokens that came are all there will be, though nobody said so; None if not."""
        return None


class RoutedRequest(PlacedRequest):
    """A request from `generate` until its end. Belongs to one asyncio loop."""

    def __init__(
        self,
        request_id: Hashable,
        token_ids: TokenIds,
        sampling: SamplingParams,
        namespace: Hashable,
        *,
        client: Hashable = None,
        first_token_seconds: float = math.inf,
        session: SessionHint | None = None,
        claim: Claim | None = None,
        group: Hashable = None,
    ) -> None:
        super().__init__(
            request_id,
            token_ids,
            namespace,
            client=client,
            first_token_seconds=first_token_seconds,
            session=session,
            claim=claim,
            group=group,
        )
        self.sampling = sampling
        self.needs = sampling.needs()
        self.is_separable = not self.needs  # what not every engine has may not go on elsewhere
        self.cached_tokens: int | None = None
        self._output = array("i")
        self._logprobs: list[TokenLogprob] = []  # of all tokens or, where they are not asked for, of none
        self._read = 0
        self._hit_reported = False
        self._last_worker = ""
        self._queue: ServerQueue | None = None  # before the attempt's server
        self._unsent: GenerationRequest | None = None  # what that is to be sent
        self._waiter: asyncio.Future[None] | None = None  # of the consumer, which is one

    # --- written by the router ----------------------------------------------------------------------------------------

    @property
    def output_tokens(self) -> int:
        """Output tokens that have come so far."""
        return len(self._output)

    @property
    def tokens_left(self) -> int:
        """Output tokens that may still come."""
        return self.sampling.max_new_tokens - len(self._output)

    def hand_over(self, attempt: Attempt, fleet: Fleet) -> None:
        """Send prompt and output so far to a worker. Raises as `Fleet.send` does."""
        request = GenerationRequest(
            attempt.wire_id,
            self.tokens_so_far(),
            sampling_of(self.sampling, attempt),
            self.namespace,
            output_offset=attempt.offset,
            claim=self.worker_claim,
            pull=fleet.pulls.asked_for(attempt, self),
            half=half_of(attempt),
        )
        try:
            self._queue = None if attempt.pair is not None else fleet.queue_before(attempt.worker_id)
            if self._queue is None:
                fleet.send(attempt.worker_id, request)
            else:
                self._unsent = request
        except PrebleError:
            fleet.pulls.forget(attempt.wire_id)
            raise

    def expected(self, attempt: Attempt, fleet: Fleet, seconds: float, now: float) -> None:
        """A server is sent it when its turn comes, and judged by when it begins."""
        if self._queue is None:
            fleet.expect(attempt.worker_id, attempt.wire_id, seconds)
            return
        self._queue.enter(self.queued(attempt, seconds, now, lambda: self._go(attempt, fleet, seconds)))

    def _go(self, attempt: Attempt, fleet: Fleet, seconds: float) -> None:
        request, self._unsent = self._unsent, None
        assert request is not None, "it was handed over"
        try:
            fleet.send(attempt.worker_id, request)
            fleet.expect(attempt.worker_id, attempt.wire_id, seconds)
        except PrebleError as error:  # it had room; should that be gone, it is tried elsewhere
            fleet.refused(attempt.worker_id, attempt.wire_id, str(error))

    def take_back(self, attempt: Attempt, fleet: Fleet, *, abort: bool) -> None:
        """With `abort`, send the worker one. Raises as `Fleet.send` does."""
        fleet.pulls.forget(attempt.wire_id)
        if self._queue is not None and self._queue.leave(attempt.wire_id):
            return
        if abort:
            fleet.send(attempt.worker_id, Abort(attempt.wire_id))

    def tokens_so_far(self) -> TokenIds:
        """Prompt and output: what another worker needs to go on. Changes nothing."""
        if not self._output:
            return self.prompt
        return np.concatenate([self.prompt, np.frombuffer(self._output, dtype=np.int32)])

    def accept(self, chunk: OutputChunk, worker_id: str) -> Accepted:
        """Append what is new in a chunk. Raises `ProtocolError`, changing nothing, if some are missing."""
        have = len(self._output)
        if chunk.index > have:
            raise ProtocolError(f"output position {have} is missing: worker {worker_id} sent position {chunk.index}")
        fresh = chunk.token_ids[have - chunk.index :]
        wanted = fresh[: self.sampling.max_new_tokens - have]
        if self.sampling.logprobs is not None:
            if len(chunk.logprobs) != len(chunk.token_ids):
                raise ProtocolError(f"log probabilities are missing: worker {worker_id} sent {len(chunk.logprobs)}")
            self._logprobs.extend(chunk.logprobs[have - chunk.index :][: len(wanted)])
        self._output.extend(wanted)
        if wanted:
            self.resume_by = None
            self._last_worker = worker_id
            self._notify()
        return Accepted(len(wanted), len(chunk.token_ids) - len(fresh), len(fresh) - len(wanted))

    def conclude(self, reason: FinishReason) -> None:
        """No more tokens will come; the first reason counts."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self._notify()

    def fail(self, error: PrebleError) -> None:
        """The request ends with an error, raised where it is read, after the tokens that have come."""
        if self.error is None:
            self.error = error
            self._notify()

    def set_back(self, setback: Setback) -> None:
        """The attempt is over, the request is not."""
        self.setback = setback
        self._notify()

    def _notify(self) -> None:
        """There is news for the consumer."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def reason_if_complete(self, eos_token_ids: tuple[int, ...]) -> FinishReason | None:
        """The finish reason if the tokens that came are all there will be, though nobody said so; None if not.

        A worker can die between the last token and saying that it was the last.
        """
        if not self._output:
            return None
        sampling, last = self.sampling, self._output[-1]
        if last in sampling.stop_token_ids or (last in eos_token_ids and not sampling.ignore_eos):
            return "stop"
        return "length" if len(self._output) >= sampling.max_new_tokens else None

    # --- read by the consumer -----------------------------------------------------------------------------------------

    async def next_chunk(self) -> StreamChunk | None:
        """Wait for news: a chunk, or None after a setback or when all is read. Raises the request's error."""
        while True:
            if self._read < len(self._output):
                return self.read_chunk()
            if self.error is not None:
                raise self.error
            if self.finish_reason is not None or self.setback is not None:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def read_chunk(self) -> StreamChunk:
        """All that has not been read, which may be nothing but how it ended."""
        start, self._read = self._read, len(self._output)
        return StreamChunk(
            self.request_id,
            start,
            tuple(self._output[start:]),
            self._last_worker,
            self._unreported_hit(),
            self.finish_reason,
            self.decision if start == 0 else None,
            tuple(self._logprobs[start:]),
        )

    def _unreported_hit(self) -> int | None:
        """What was cached, for the first chunk that can report it."""
        reported, self._hit_reported = self._hit_reported, self._hit_reported or self.cached_tokens is not None
        return None if reported else self.cached_tokens
