"""What a router writes down of its requests, for `preble replay`. Owns which moments count; the file is
`recording.writer`'s.

A router without a recording has a recorder that does nothing.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, Union

from ..clock import Clock
from ..recording import EndedRequest, RecordingWriter
from ..recording.recorded import CANCELLED, FINISHED
from ..types import WorkerSpec
from .request import Attempt, PlacedRequest, RequestTimes

if TYPE_CHECKING:
    from ..scheduler import GlobalScheduler
    from ..transport.messages import Welcome
    from .fleet import Fleet

Record = Union[str, "os.PathLike[str]", RecordingWriter, None]  # of a router: a file, or who writes it


class RecordedRouter(Protocol):
    """What a recorder asks of its router."""

    scheduler: GlobalScheduler

    @property
    def fleet(self) -> Fleet:
        """The workers."""


class NoRecorder:
    """Nothing is written down."""

    def admitted(self, live: PlacedRequest) -> None:
        """A request has come."""

    def sent(self, live: PlacedRequest, worker_id: str) -> None:
        """It was handed to a worker."""

    def first_token(self, live: PlacedRequest) -> None:
        """Its output has begun."""

    def left(self, live: PlacedRequest, attempt: Attempt) -> None:
        """An attempt is over."""

    def dismissed(self, live: PlacedRequest) -> None:
        """It is over."""

    def close(self) -> None:
        """There will be no more."""


class TrafficRecorder(NoRecorder):
    """Writes each request down when it is over. Belongs to its router's loop."""

    def __init__(self, writer: RecordingWriter, router: RecordedRouter, clock: Clock) -> None:
        self._writer, self._router, self._clock = writer, router, clock
        self._specs: dict[str, tuple[Welcome | None, WorkerSpec]] = {}

    def admitted(self, live: PlacedRequest) -> None:
        live.times = RequestTimes(self._clock())

    def sent(self, live: PlacedRequest, worker_id: str) -> None:
        times = live.times
        if times is None:
            return
        if times.sent_at is None:
            times.sent_at, times.prompt = self._clock(), live.prompt
        times.worker = self._spec(worker_id)

    def first_token(self, live: PlacedRequest) -> None:
        times = live.times
        if times is not None and times.first_token_at is None and live.is_streamed:
            times.first_token_at = self._clock()

    def left(self, live: PlacedRequest, attempt: Attempt) -> None:
        times = live.times
        if times is not None:
            times.ended_at = self._clock()
            if attempt.offset == 0 and attempt.cached_tokens is not None:
                times.cached_tokens = attempt.cached_tokens

    def dismissed(self, live: PlacedRequest) -> None:
        times = live.times
        if times is None or not len(live.prompt):  # a text that was not tokenised any more
            return
        self._writer.offer(
            EndedRequest(
                live.prompt if times.prompt is None else times.prompt,
                live.namespace,
                times.arrived_at,
                live.output_tokens,
                times.sent_at,
                times.first_token_at,
                self._clock() if times.ended_at is None else times.ended_at,
                times.worker,
                live.output_limit,
                times.cached_tokens,
                None if live.decision is None else live.decision.matched_tokens,
                live.client,
                live.session,
                live.claim,
                _error_of(live),
            )
        )

    def close(self) -> None:
        self._writer.close()

    def _spec(self, worker_id: str) -> WorkerSpec | None:
        """A worker as the scheduler knows it, with its engine's name; asked for once in its life."""
        welcome = self._router.fleet.worker(worker_id).welcome
        known = self._specs.get(worker_id)
        if known is not None and known[0] is welcome:
            return known[1]
        spec = self._router.scheduler.workers.get(worker_id)
        if spec is None:
            return None
        spec = replace(spec, cost_model=None, labels={"engine": "" if welcome is None else welcome.engine})
        self._specs[worker_id] = welcome, spec
        return spec


def recorder_for(record: Record, router: RecordedRouter, clock: Clock) -> NoRecorder:
    """The recorder for a router's `record`. Raises `InvalidConfig` for a file that cannot be written."""
    if record is None:
        return NoRecorder()
    if not isinstance(record, RecordingWriter):
        policy = router.scheduler.policy
        record = RecordingWriter(record, now=clock(), started_unix_seconds=time.time(), policy=policy)
    return TrafficRecorder(record, router, clock)


def _error_of(live: PlacedRequest) -> str:
    if live.finish_reason is not None:
        return CANCELLED if live.finish_reason == "abort" else FINISHED
    return CANCELLED if live.error is None else type(live.error).__name__
