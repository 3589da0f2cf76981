"""The engine protocol: what a worker process asks of anything that generates tokens. Owns the protocol and its data,
no engine; requests and chunks are those that routers and workers exchange.

Life of a request: `submit` -> any number of `step` calls, each returning chunks for the requests that moved -> a
chunk with
`finish_reason` set, which is the last. `abort` ends it early, with finish_reason "abort".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..transport.messages import FINISH_REASONS, GenerationRequest, OutputChunk
from ..types import CacheEvent

__all__ = ["FINISH_REASONS", "Engine", "EngineInfo", "EngineLoad", "GenerationRequest", "OutputChunk", "SelfRunning"]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine reports in the handshake. `tokenizer_fingerprint` "" means unknown; `max_model_tokens` bounds
    prompt + output."""

    engine: str
    model: str
    kv_capacity_tokens: int
    block_size: int = 1
    max_running: int | None = None
    max_model_tokens: int = 2**31 - 1
    tokenizer_fingerprint: str = ""
    eos_token_ids: tuple[int, ...] = ()


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
