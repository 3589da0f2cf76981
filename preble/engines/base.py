"""The engine protocol: what a worker process asks of anything that generates tokens. Owns the protocol, its data and
what engines before a `LocalScheduler` share; requests and chunks are those that routers and workers exchange.

Life of a request: `submit` -> any number of `step` calls, each returning chunks for the requests that moved -> a
chunk with `finish_reason` set, which is the last. `abort` ends it early, with finish_reason "abort".
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..batching.kv_cache import HostMemory
from ..clock import Clock
from ..errors import DuplicateRequest, EngineError, InvalidInput, InvalidTokens
from ..local import LocalConfig, LocalRequest, LocalScheduler, StepOutput
from ..transport.messages import FINISH_REASONS as FINISH_REASONS
from ..transport.messages import GenerationRequest as GenerationRequest
from ..transport.messages import OutputChunk as OutputChunk
from ..types import CacheEvent, check_int


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine reports in the handshake. `tokenizer_fingerprint` "" means unknown; `max_model_tokens` bounds
    prompt + output. `sampling_fields`: which of `types.SAMPLING_FIELDS` requests may ask for; `resumable_fields`: those
    of them that it gets right also for a request that has begun elsewhere. `cached_first`: `WorkerSpec`'s. `kv_layout`
    names all that KV depends on beside the tokens (weights, shapes, number format): engines of one layout may hand it
    to each other, those of "" to nobody. It takes `kv_token_bytes` a token.
    """

    engine: str
    model: str
    kv_capacity_tokens: int
    block_size: int = 1
    max_running: int | None = None
    max_model_tokens: int = 2**31 - 1
    tokenizer_fingerprint: str = ""
    eos_token_ids: tuple[int, ...] = ()
    sampling_fields: tuple[str, ...] = ()
    resumable_fields: tuple[str, ...] = ()
    cached_first: bool = False
    kv_layout: str = ""
    kv_token_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load right now: requests running and waiting, KV tokens in use (by running requests and by the cache), uncached
    tokens waiting."""

    running: int
    waiting: int
    kv_used_tokens: int
    kv_cached_tokens: int
    waiting_uncached_tokens: int = 0


class Engine(Protocol):
    """One model instance, driven step by step from a single thread (none of the methods is thread-safe)."""

    @property
    def info(self) -> EngineInfo:
        """What is constant about this engine."""

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises `QueueFull`, `InvalidInput` or `EngineError`; then nothing has changed."""

    def abort(self, request_id: str) -> bool:
        """End a request; its last chunk (finish_reason "abort") comes from the next `step`. False if it is not live."""

    def step(self) -> list[OutputChunk]:
        """Run one iteration and return what it produced; [] when there is nothing to do."""

    def has_work(self) -> bool:
        """True while a request is live or a chunk waits to be returned."""

    def take_events(self) -> list[CacheEvent]:
        """Cache events since the last call, oldest first."""

    def load(self) -> EngineLoad:
        """Load at this moment."""

    def close(self) -> None:
        """Free the device. Idempotent."""


@runtime_checkable
class SelfRunning(Protocol):
    """What an engine adds that computes in threads or processes of its own, whoever calls `step`.

    Its `step` need only be called when `ready` says so. These methods are thread-safe.
    """

    def listen(self, notify: Callable[[], None]) -> None:
        """Have `notify` called, from any thread, whenever `ready` may have turned true."""

    def ready(self) -> bool:
        """True if `step` or `take_events` has something to give, or `step` would raise."""

    def stalled_seconds(self) -> float:
        """How long it has had requests and said nothing; 0.0 when it has none."""


@runtime_checkable
class MovesKv(Protocol):
    """What an engine adds that can hand KV of cached prefixes to another of the same `kv_layout`. Called by the thread
    that calls `step`. The KV of `n` tokens is `n * kv_token_bytes` bytes, in a form of the layout's own."""

    def cached_tokens(self, token_ids: npt.NDArray[np.int32], namespace: Hashable) -> int:
        """How many leading tokens are cached. Changes nothing."""

    def export_kv(self, token_ids: npt.NDArray[np.int32], namespace: Hashable, first: int) -> memoryview:
        """The KV of the tokens from position `first` on, as far as they are cached; empty where they are not. Counts as
        a use of that prefix."""

    def import_kv(
        self, token_ids: npt.NDArray[np.int32], namespace: Hashable, first: int, data: bytes | memoryview
    ) -> int:
        """Cache `token_ids` by their KV from position `first` on; those before must be cached. Returns how many of them
        are cached then, fewer than all where that has not gone. Raises `EngineError` where the bytes are not as many as
        these tokens take, or memory is out; then nothing is added."""


def check_prompt(request: GenerationRequest, vocab_size: int, tokens_max: int) -> None:
    """Raise `InvalidTokens` or `InvalidInput` unless the prompt is one of this vocabulary and `tokens_max` tokens leave
    room for output."""
    tokens, name = request.token_ids, f"request {request.request_id!r}"
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.size == 0:
        raise InvalidTokens(f"{name}: token_ids must be a non-empty 1-D integer array")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise InvalidTokens(f"{name}: token_ids must be in [0, {vocab_size - 1}], got {low if low < 0 else high}")
    check_int("output_offset", request.output_offset, 0, len(tokens) - 1, InvalidInput)
    if len(tokens) - request.output_offset >= tokens_max:
        raise InvalidInput(
            f"{name}: a prompt of {len(tokens)} tokens leaves no room for output, the context is {tokens_max} tokens"
        )


def check_sampling(request: GenerationRequest, info: EngineInfo) -> None:
    """Raise `InvalidInput` naming what a request asks for and this engine does not have, or cannot go on with."""
    needs = request.sampling.needs()
    if not needs:
        return
    fields = info.resumable_fields if request.output_offset else info.sampling_fields
    missing = [name for name in needs if name not in fields]
    if missing:
        what = "cannot go on with a request that has" if request.output_offset else "does not have"
        raise InvalidInput(f"{', '.join(missing)}: the engine {info.engine} {what} it")


@dataclass(slots=True)
class LiveOutput:
    """A request in a `LocalScheduler`: the output position of its next token."""

    next_index: int


Live = TypeVar("Live", bound=LiveOutput)


class ScheduledEngine(Generic[Live]):
    """What engines share of `Engine` that run what a `LocalScheduler` decides: all but `submit` and `step`."""

    def __init__(
        self, info: EngineInfo, config: LocalConfig, clock: Clock | None, host: HostMemory | None = None
    ) -> None:
        self.info = info
        self.scheduler = LocalScheduler(config, clock=clock, host=host)
        self._live: dict[str, Live] = {}
        self._ended: list[OutputChunk] = []  # last chunks of requests that ended between steps
        self._closed = False

    def abort(self, request_id: str) -> bool:
        """End a request; its last chunk (finish_reason "abort") comes from the next `step`. False if it is not live."""
        if request_id not in self._live:
            return False
        self._ended.append(self._end(request_id, "abort"))
        return True

    def has_work(self) -> bool:
        """True while a request is live or a chunk waits to be returned."""
        return bool(self._live or self._ended)

    def take_events(self) -> list[CacheEvent]:
        """Evictions since the last call, oldest first."""
        return list(self.scheduler.take_events())

    def load(self) -> EngineLoad:
        """Load at this moment."""
        return EngineLoad(*self.scheduler.load())

    def close(self) -> None:
        """Drop all requests without further chunks. Idempotent."""
        for request_id in list(self._live):
            self._end(request_id, "abort")
        self._ended.clear()
        self._closed = True

    def _check_new(self, request_id: str) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if request_id in self._live:
            raise DuplicateRequest(f"request {request_id!r} is live")

    def _queue(
        self, request: GenerationRequest, planned_ids: npt.NDArray[np.int32] | None = None
    ) -> LocalRequest | None:
        """What the scheduler got; None for a request resumed after its last token: only the news of its end is lost."""
        sampling, offset = request.sampling, request.output_offset
        left = min(sampling.max_new_tokens - offset, self.info.max_model_tokens - len(request.token_ids))
        if left <= 0:
            self._ended.append(OutputChunk(request.request_id, offset, (), cached_tokens=0, finish_reason="length"))
            return None
        stops = frozenset(sampling.stop_token_ids)
        local = LocalRequest(
            request_id=request.request_id,
            token_ids=request.token_ids,
            max_new_tokens=left,
            stop_token_ids=stops if sampling.ignore_eos else stops | frozenset(self.info.eos_token_ids),
            namespace=request.namespace,
            planned_ids=None if planned_ids is None else planned_ids[:left],
            claim=request.claim,
        )
        self.scheduler.add(local)
        return local

    def _book(self, output: StepOutput) -> OutputChunk:
        """The chunk for one output token."""
        live = self._live[output.request_id]
        chunk = OutputChunk(
            output.request_id,
            live.next_index,
            (output.token,),
            cached_tokens=output.cached_tokens if output.index == 0 else None,
            finish_reason=output.finish_reason,
        )
        live.next_index += 1
        if output.finish_reason is not None:
            del self._live[output.request_id]
        return chunk

    def _end(self, request_id: str, reason: str, error: str | None = None) -> OutputChunk:
        """Forget a live request before its time and return its last chunk."""
        live = self._live.pop(request_id)
        self.scheduler.cancel(request_id)
        return OutputChunk(request_id, live.next_index, (), finish_reason=reason, error=error)
