"""What a recording holds: requests by names of their blocks, and the workers they ran on. Owns the data and its
validation; files are `lines.py`'s, token ids `replaying.py`'s, `Recording` with both `recording.py`'s."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ..errors import InvalidInput
from ..types import PRIORITIES, check_int, check_seconds

BLOCK_TOKENS = 16  # of a block in a recording; vLLM's, too
FINISHED, CANCELLED = "", "cancelled"  # of `RecordedRequest.error`
BlockNames = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedRequest:
    """One request and what became of it. Raises `InvalidInput` naming the field.

    blocks: names of its prompt's blocks, shape [ceil(prompt_tokens / block size)], uint64; the last may be a partial
    block. A name stands for the block and all before it: two requests share a prefix as far as their names are equal.
    Times are seconds from the recording's start, as the router saw them; None for what did not happen or was not seen.
    `sent_seconds`: handed to the worker that ran it first; `end_seconds`: the last token, or the failure.
    worker: that ran it last, "" for none. cached_tokens: of the prompt, as the engine reported; matched_tokens: as the
    scheduler estimated. session, parent_session, agent, tenant: hashed names, "" for none. error: "" where it finished,
    "cancelled" where its client went away, else the name of the error's class.
    """

    arrival_seconds: float
    prompt_tokens: int
    blocks: BlockNames
    output_tokens: int
    worker: str = ""
    max_new_tokens: int | None = None
    sent_seconds: float | None = None
    first_token_seconds: float | None = None
    end_seconds: float | None = None
    cached_tokens: int | None = None
    matched_tokens: int | None = None
    session: str = ""
    parent_session: str = ""
    agent: str = ""
    tenant: str = ""
    deadline_seconds: float | None = None
    priority: str = PRIORITIES[0]
    error: str = FINISHED

    def __post_init__(self) -> None:
        check_int("RecordedRequest.prompt_tokens", self.prompt_tokens, 1, 2**31 - 1, InvalidInput)
        check_int("RecordedRequest.output_tokens", self.output_tokens, 0, 2**31 - 1, InvalidInput)
        if not isinstance(self.blocks, np.ndarray) or self.blocks.dtype != np.uint64 or self.blocks.ndim != 1:
            raise InvalidInput("RecordedRequest.blocks must be a 1-D array of uint64")
        for name in ("arrival_seconds", "sent_seconds", "first_token_seconds", "end_seconds", "deadline_seconds"):
            value = getattr(self, name)
            if value is not None:
                check_seconds(f"RecordedRequest.{name}", value, InvalidInput)
        for name in ("max_new_tokens", "cached_tokens", "matched_tokens"):
            value = getattr(self, name)
            if value is not None:
                check_int(f"RecordedRequest.{name}", value, 0, 2**31 - 1, InvalidInput)
        if self.priority not in PRIORITIES:
            raise InvalidInput(
                f"RecordedRequest.priority must be one of {', '.join(PRIORITIES)}, got {self.priority!r}"
            )

    @property
    def finished(self) -> bool:
        """Whether its answer came whole."""
        return self.error == FINISHED and self.end_seconds is not None

    @property
    def ttft_seconds(self) -> float:
        """Arrival to first token; NaN where that was not seen."""
        return math.nan if self.first_token_seconds is None else self.first_token_seconds - self.arrival_seconds

    @property
    def latency_seconds(self) -> float:
        """Arrival to last token; NaN where it did not finish."""
        end = self.end_seconds if self.error == FINISHED else None
        return math.nan if end is None else end - self.arrival_seconds

    def later(self, seconds: float) -> RecordedRequest:
        """The same, by a clock that began so much earlier."""
        times = ("arrival_seconds", "sent_seconds", "first_token_seconds", "end_seconds")
        known = {name: getattr(self, name) for name in times}
        return replace(self, **{name: at + seconds for name, at in known.items() if at is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedWorker:
    """A worker as the scheduler knew it: `preble.WorkerSpec` has the fields. `engine`: "sglang", "vllm", "torch", ...,
    "" where nobody said. Raises `InvalidInput` naming the field."""

    id: str
    kv_capacity_tokens: int
    block_size: int = 1
    max_running: int | None = None
    engine: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise InvalidInput(f"RecordedWorker.id must be a non-empty text, got {self.id!r}")
        check_int("RecordedWorker.kv_capacity_tokens", self.kv_capacity_tokens, 1, 2**31 - 1, InvalidInput)
        check_int("RecordedWorker.block_size", self.block_size, 1, 65_536, InvalidInput)
        if self.max_running is not None:
            check_int("RecordedWorker.max_running", self.max_running, 1, 2**31 - 1, InvalidInput)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedTraffic:
    """Requests on record, in the order of their arrival. Raises `InvalidInput` naming what is wrong.

    block_size: tokens of a block in `RecordedRequest.blocks`. policy: that placed them, "" where unknown.
    started_unix_seconds: when its clock was 0. missing: requests that came meanwhile and are not in it, since the disk
    did not keep up. is_cut: a file ended within a record, as one does whose process was killed.
    name: for titles. Thread-safe: nothing changes it.
    """

    workers: tuple[RecordedWorker, ...]
    requests: tuple[RecordedRequest, ...] = field(repr=False)
    block_size: int = BLOCK_TOKENS
    policy: str = ""
    started_unix_seconds: float = 0.0
    missing: int = 0
    is_cut: bool = False
    name: str = "recording"

    def __post_init__(self) -> None:
        check_int("Recording.block_size", self.block_size, 1, 65_536, InvalidInput)
        check_int("Recording.missing", self.missing, 0, 2**63 - 1, InvalidInput)
        known = {worker.id for worker in self.workers}
        if len(known) < len(self.workers):
            raise InvalidInput("Recording.workers: a worker is there twice")
        before = 0.0
        for number, request in enumerate(self.requests):
            if len(request.blocks) != -(-request.prompt_tokens // self.block_size):
                raise InvalidInput(
                    f"Recording.requests[{number}]: {request.prompt_tokens} tokens are not {len(request.blocks)} blocks"
                )
            if request.worker and request.worker not in known:
                raise InvalidInput(f"Recording.requests[{number}]: worker {request.worker!r} is not among the workers")
            if request.arrival_seconds < before:
                raise InvalidInput(f"Recording.requests[{number}] arrived before the one before it")
            before = request.arrival_seconds

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last; 0 where there are none."""
        return self.requests[-1].arrival_seconds - self.requests[0].arrival_seconds if self.requests else 0.0


def sorted_by_arrival(requests: Iterable[RecordedRequest]) -> tuple[RecordedRequest, ...]:
    """Requests that are written as they end, in the order in which they came."""
    return tuple(sorted(requests, key=lambda request: request.arrival_seconds))
