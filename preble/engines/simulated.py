"""An engine without a model: the real local scheduler, a cost model for its clock, and a hash for its answers.

Owns how long an iteration takes and which token comes next; `LocalScheduler` owns all the rest, as in any other
engine. Used to run whole fleets without a GPU: in worker processes it sleeps through its iterations, in a simulator
the simulator calls `begin_step` and, the returned seconds later, `end_step`.

The next token is a function of all tokens before it, so a request resumed on another worker goes on with exactly
the same tokens, and one that was handed a wrong, missing or doubled token says something else from there on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..clock import Clock, monotonic
from ..errors import DuplicateRequest, EngineError, InvalidConfig, InvalidInput
from ..local import Batch, LocalConfig, LocalRequest, LocalScheduler, StepOutput
from ..types import CacheEvent, check_int
from .base import EngineInfo, EngineLoad, GenerationRequest, OutputChunk

NO_TOKENS: Mapping[str, int] = {}
HASH_FACTOR = 0x9E3779B97F4A7C15
MASK64 = (1 << 64) - 1


class IterationCost(Protocol):
    """What the engine asks of a cost model; `preble.CostModel` has it."""

    def iteration_time(
        self, prefill_chunks: Iterable[tuple[int, int]] = (), decode_contexts: Iterable[int] = ()
    ) -> float:
        """Seconds of one iteration: chunks of (new tokens, context after them), and the context of each decode."""


@dataclass(slots=True)
class _SimulatedRequest:
    """A live request: the hash of its tokens so far, its next output position, and whether it may end by itself."""

    state: int
    next_index: int
    may_stop: bool


class SimulatedEngine:
    """Implements `Engine`. Sampling settings other than lengths, stop tokens and `ignore_eos` have no influence.

    `time_scale` is seconds slept per simulated second: 1 is real time, 0.05 twenty times faster, 0 does not sleep
    at all. `eos_token_id` comes up, each time with `eos_probability`, only for requests that do not ignore it.
    Raises `InvalidConfig`.
    """

    def __init__(
        self,
        cost_model: IterationCost,
        config: LocalConfig,
        *,
        clock: Clock = monotonic,
        sleep: Callable[[float], object] = time.sleep,
        time_scale: float = 1.0,
        vocab_size: int = 32_000,
        eos_token_id: int | None = None,
        eos_probability: float = 0.0,
        model: str = "simulated",
    ) -> None:
        check_int("vocab_size", vocab_size, 2, 2**31 - 1)
        if eos_token_id is not None:
            check_int("eos_token_id", eos_token_id, 0, vocab_size - 1)
        if not 0.0 <= time_scale < float("inf"):
            raise InvalidConfig(f"time_scale must be finite and at least 0, got {time_scale!r}")
        if not 0.0 <= eos_probability <= 1.0 or (eos_probability and eos_token_id is None):
            raise InvalidConfig(f"eos_probability must be in [0, 1] and needs an eos_token_id, got {eos_probability!r}")
        self._cost_model = cost_model
        self._scheduler = LocalScheduler(config, clock=clock)
        self._sleep = sleep
        self._time_scale = time_scale
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._eos_probability = eos_probability
        self._info = EngineInfo(
            engine="simulated",
            model=model,
            kv_capacity_tokens=config.kv_capacity_tokens,
            max_running=config.max_running,
            max_model_tokens=config.kv_capacity_tokens + 1,  # the last output token is never computed
            eos_token_ids=() if eos_token_id is None else (eos_token_id,),
        )
        self._live: dict[str, _SimulatedRequest] = {}
        self._ended: list[OutputChunk] = []  # last chunks of requests that ended between steps
        self._batch = Batch()
        self._closed = False

    @property
    def info(self) -> EngineInfo:
        """What is constant about this engine."""
        return self._info

    @property
    def scheduler(self) -> LocalScheduler:
        """The local scheduler, for its counters and its `check`."""
        return self._scheduler

    @property
    def batch_requests(self) -> int:
        """Requests in the batch of the step that has begun and not ended."""
        return len(self._batch)

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, planned_ids: npt.NDArray[np.int32] | None = None) -> None:
        """Queue a request; an output that would outgrow the KV capacity ends there, with reason "length".

        `planned_ids` is the answer, where it is known (a replay): as many tokens as the request may still have.
        Raises `DuplicateRequest`, `QueueFull`, `InvalidInput` or `EngineError`; then nothing has changed.
        """
        if self._closed:
            raise EngineError("the engine is closed")
        if request.request_id in self._live:
            raise DuplicateRequest(f"request {request.request_id!r} is live")
        tokens, sampling = request.token_ids, request.sampling
        check_int("output_offset", request.output_offset, 0, max(0, len(tokens) - 1), InvalidInput)
        room = self._info.max_model_tokens - len(tokens)
        if room <= 0:
            raise InvalidInput(
                f"request {request.request_id!r}: a prompt of {len(tokens)} tokens leaves no room for output, "
                f"prompt and output together may have {self._info.max_model_tokens} tokens"
            )
        left = sampling.max_new_tokens - request.output_offset
        if left <= 0:  # resumed after its last token: only the news of its end was lost
            chunk = OutputChunk(request.request_id, request.output_offset, (), cached_tokens=0, finish_reason="length")
            self._ended.append(chunk)
            return
        stops = frozenset(sampling.stop_token_ids)
        local = LocalRequest(
            request_id=request.request_id,
            token_ids=tokens,
            max_new_tokens=min(left, room),
            stop_token_ids=stops if sampling.ignore_eos else stops | frozenset(self._info.eos_token_ids),
            namespace=request.namespace,
            planned_ids=None if planned_ids is None else planned_ids[: min(left, room)],
        )
        self._scheduler.add(local)
        state = prefix_hash(local.token_ids) if planned_ids is None else 0
        self._live[request.request_id] = _SimulatedRequest(state, request.output_offset, not sampling.ignore_eos)

    def abort(self, request_id: str) -> bool:
        """End a request; its last chunk (finish_reason "abort") comes from the next `step`. False if it is not live."""
        live = self._live.pop(request_id, None)
        if live is None:
            return False
        self._scheduler.cancel(request_id)
        self._ended.append(OutputChunk(request_id, live.next_index, (), finish_reason="abort"))
        return True

    # --- iterations ---------------------------------------------------------------------------------------------------

    def step(self) -> list[OutputChunk]:
        """Run one iteration, sleeping as long as it takes, and return what it produced."""
        seconds = self.begin_step() * self._time_scale
        if seconds > 0.0:
            self._sleep(seconds)
        return self.end_step()

    def begin_step(self) -> float:
        """Form the next batch; returns the simulated seconds it takes, 0.0 where there is nothing to compute.

        Call `end_step` when they have passed. Until then requests may be submitted and aborted. Raises
        `InvalidInput` where the step before has not ended.
        """
        self._batch = batch = self._scheduler.next_batch()
        return self._cost_model.iteration_time(batch.chunks(), batch.decode_contexts()) if batch else 0.0

    def end_step(self) -> list[OutputChunk]:
        """Finish the step that `begin_step` began; returns its chunks, after those of requests aborted before now."""
        batch, self._batch = self._batch, Batch()
        tokens = {request_id: self._next_token(self._live[request_id]) for request_id in batch.sampling()}
        chunks, self._ended = self._ended, []
        chunks.extend(self._book(output) for output in self._scheduler.complete(batch, tokens))
        return chunks

    def end_batch(self) -> list[StepOutput]:
        """`end_step` for a simulator that wants no chunks: the batch's output tokens. Only where every live request has
        `planned_ids`; raises `InvalidInput` otherwise, and nothing has changed."""
        unplanned = self._batch.sampling()
        if unplanned:
            raise InvalidInput(f"end_batch is for requests with planned_ids; {unplanned[0]!r} has none")
        batch, self._batch = self._batch, Batch()
        outputs = self._scheduler.complete(batch, NO_TOKENS)
        for output in outputs:
            if output.finish_reason is not None:
                del self._live[output.request_id]
        self._ended.clear()  # nobody asks for the chunks of aborted requests
        return outputs

    def has_work(self) -> bool:
        """True while a request is live or a chunk waits to be returned."""
        return bool(self._live or self._ended)

    def take_events(self) -> list[CacheEvent]:
        """Evictions since the last call, oldest first."""
        return list(self._scheduler.take_events())

    def load(self) -> EngineLoad:
        """Load at this moment."""
        return EngineLoad(*self._scheduler.load())

    def close(self) -> None:
        """Drop all requests without further chunks. Idempotent."""
        for request_id in list(self._live):
            self.abort(request_id)
        self._ended.clear()
        self._closed = True

    # --- answers ------------------------------------------------------------------------------------------------------

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
        live.state = extend_hash(live.state, output.token)
        live.next_index += 1
        if output.finish_reason is not None:
            del self._live[output.request_id]
        return chunk

    def _next_token(self, live: _SimulatedRequest) -> int:
        """The token after the tokens hashed so far. The end-of-sequence token is drawn apart from all others."""
        draw = _mix(live.state)
        if self._eos_token_id is None:
            return draw % self._vocab_size
        if live.may_stop and _mix(draw) < self._eos_probability * 2.0**64:
            return self._eos_token_id
        token = draw % (self._vocab_size - 1)
        return token + (token >= self._eos_token_id)


def prefix_hash(token_ids: npt.NDArray[np.int32]) -> int:
    """A rolling 64-bit hash of all tokens, in order. `extend_hash` adds one more in O(1)."""
    powers = np.full(len(token_ids), HASH_FACTOR, np.uint64)
    powers[0] = 1
    terms = (token_ids.astype(np.uint64) + np.uint64(1)) * np.multiply.accumulate(powers)[::-1]
    return int(terms.sum(dtype=np.uint64))


def extend_hash(state: int, token: int) -> int:
    """The hash of a sequence with hash `state` and one more token."""
    return (state * HASH_FACTOR + token + 1) & MASK64


def _mix(state: int) -> int:
    """Spread a 64-bit state evenly over 64 bits (the finaliser of splitmix64)."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK64
    return state ^ (state >> 31)
