"""An engine without a model: the real local scheduler, a cost model for its clock, and a hash for its answers.

Owns how long an iteration takes and which token comes next; `LocalScheduler` owns all the rest, as in any other
engine. Used to run whole fleets without a GPU: in worker processes it sleeps through its iterations, in a simulator
the simulator calls `begin_step` and, the returned seconds later, `end_step`.

The next token is a function of all tokens before it, so a request resumed on another worker goes on with exactly
the same tokens, and one that was handed a wrong, missing or doubled token says something else from there on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from .._cost import CostModel, steady_ends
from ..batching._batch import are_token_ids
from ..batching.kv_cache import HostMemory
from ..clock import Clock, monotonic
from ..errors import InvalidConfig, InvalidInput
from ..local import Batch, LocalConfig, LocalRequest, StepOutput
from ..types import Claim, check_int, check_seconds
from .base import EngineInfo, GenerationRequest, LiveOutput, OutputChunk, ScheduledEngine, check_sampling

NO_BATCH = Batch()
HASH_FACTOR = 0x9E3779B97F4A7C15
MASK64 = (1 << 64) - 1


@dataclass(slots=True)
class _SimulatedRequest(LiveOutput):
    """A live request: the hash of its tokens so far, and whether it may end by itself."""

    state: int
    may_stop: bool


class SimulatedEngine(ScheduledEngine[_SimulatedRequest]):
    """Implements `Engine`. `temperature`, `top_p` and `seed` have no influence, fields that not every engine has are
    refused.

    `time_scale` is seconds slept per simulated second: 1 is real time, 0.05 twenty times faster, 0 does not sleep
    at all. `eos_token_id` comes up, each time with `eos_probability`, only for requests that do not ignore it.
    `host`: memory behind the GPU's; it is loaded from while other tokens are computed, where that is quicker than to
    compute what it has. Raises `InvalidConfig`.
    """

    def __init__(
        self,
        cost_model: CostModel,
        config: LocalConfig,
        *,
        clock: Clock = monotonic,
        sleep: Callable[[float], object] = time.sleep,
        time_scale: float = 1.0,
        vocab_size: int = 32_000,
        eos_token_id: int | None = None,
        eos_probability: float = 0.0,
        model: str = "simulated",
        host: HostMemory | None = None,
    ) -> None:
        check_int("vocab_size", vocab_size, 2, 2**31 - 1)
        if eos_token_id is not None:
            check_int("eos_token_id", eos_token_id, 0, vocab_size - 1)
        check_seconds("time_scale", time_scale)
        if not 0.0 <= eos_probability <= 1.0 or (eos_probability and eos_token_id is None):
            raise InvalidConfig(f"eos_probability must be in [0, 1] and needs an eos_token_id, got {eos_probability!r}")
        info = EngineInfo(
            engine="simulated",
            model=model,
            kv_capacity_tokens=config.kv_capacity_tokens,
            max_running=config.max_running,
            max_model_tokens=config.kv_capacity_tokens + 1,  # the last output token is never computed
            eos_token_ids=() if eos_token_id is None else (eos_token_id,),
            cached_first=config.order != "fcfs",
        )
        super().__init__(info, config, clock, host)
        self._cost_model = cost_model
        self._host = host
        if host is not None:
            host.pays = self._load_pays
        self._sleep = sleep
        self._time_scale = time_scale
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._eos_probability = eos_probability
        self._batch = Batch()

    @property
    def batch_requests(self) -> int:
        """Requests in the batch of the step that has begun and not ended."""
        return len(self._batch)

    @property
    def running_requests(self) -> int:
        """Requests that are admitted, and have not ended."""
        return self.scheduler.running_count

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, planned_ids: npt.NDArray[np.int32] | None = None) -> None:
        """Queue a request; an output that would outgrow the KV capacity ends there, with reason "length".

        `planned_ids` is the answer, where it is known (a replay): as many tokens as the request may still have.
        Raises `DuplicateRequest`, `QueueFull`, `InvalidInput` or `EngineError`; then nothing has changed.
        """
        self._check_new(request.request_id)
        check_sampling(request, self.info)
        tokens = request.token_ids
        check_int("output_offset", request.output_offset, 0, max(0, len(tokens) - 1), InvalidInput)
        self._check_length(request.request_id, tokens)
        local = self._queue(request, planned_ids)
        if local is not None:
            state = prefix_hash(local.token_ids) if planned_ids is None else 0
            may_stop = not request.sampling.ignore_eos
            self._live[request.request_id] = _SimulatedRequest(request.output_offset, state, may_stop)

    def _check_length(self, request_id: str, token_ids: npt.NDArray[np.int32]) -> None:
        if len(token_ids) >= self.info.max_model_tokens:
            raise InvalidInput(
                f"request {request_id!r}: a prompt of {len(token_ids)} tokens leaves no room for output, "
                f"prompt and output together may have {self.info.max_model_tokens} tokens"
            )

    def submit_planned(
        self,
        request_id: str,
        token_ids: npt.NDArray[np.int32],
        planned_ids: npt.NDArray[np.int32],
        claim: Claim | None = None,
    ) -> None:
        """`submit` for a simulator: a request that ends after its `planned_ids` and by nothing else. Raises as that."""
        self._check_new(request_id)
        self._check_length(request_id, token_ids)
        left = min(len(planned_ids), self.info.max_model_tokens - len(token_ids))
        self.scheduler.add(_shared_request(request_id, token_ids, planned_ids[:left], claim))
        self._live[request_id] = _SimulatedRequest(0, 0, False)

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
        self._batch = batch = self.scheduler.next_batch()
        seconds = self._cost_model.iteration_time(batch.chunks(), batch.decode_contexts()) if batch else 0.0
        return seconds if self._host is None else max(seconds, self._host.take_seconds())

    def _load_pays(self, here: int, found: int, prompt_tokens: int) -> bool:
        assert self._host is not None
        loading = (found - here) * self._host.token_seconds
        loading += self._cost_model.prefill_time(prompt_tokens - found, prompt_tokens)
        return loading < self._cost_model.prefill_time(prompt_tokens - here, prompt_tokens)

    def end_step(self) -> list[OutputChunk]:
        """Finish the step that `begin_step` began; returns its chunks, after those of requests aborted before now."""
        batch, self._batch = self._batch, Batch()
        tokens = {request_id: self._next_token(self._live[request_id]) for request_id in batch.sampling()}
        chunks, self._ended = self._ended, []
        chunks.extend(self._book(output) for output in self.scheduler.complete(batch, tokens))
        return chunks

    def end_batch(self) -> list[StepOutput]:
        """`end_step` for a simulator that wants no chunks: the batch's output tokens, of decodes only those that are a
        request's last. Only where every live request has `planned_ids`; raises `InvalidInput` otherwise, and nothing
        has changed."""
        outputs = self.scheduler.complete_planned(self._batch)
        self._batch = NO_BATCH
        for output in outputs:
            if output.finish_reason is not None:
                del self._live[output.request_id]
        if self._ended:
            self._ended.clear()  # nobody asks for the chunks of aborted requests
        return outputs

    # --- iterations that are alike ------------------------------------------------------------------------------------

    def steady_steps(self) -> int:
        """How many iterations to come are alike (`LocalScheduler.steady_steps`); 0 in the middle of a step."""
        return self.scheduler.steady_steps()

    def steady_ends(self, steps: int, begin_seconds: float, beside_seconds: float, slowness: float) -> list[float]:
        """When each of them ends, one beginning at the end of the one before; each takes so much beside what its
        tokens cost, and all of it times `slowness`."""
        contexts = self.scheduler.steady_contexts()
        return steady_ends(self._cost_model, contexts, steps, begin_seconds, beside_seconds, slowness)

    def run_steady(self, steps: int) -> None:
        """So many of them have passed: what `begin_step` and `end_batch` would have done each time."""
        self.scheduler.run_steady(steps)
        if steps:
            self._ended.clear()

    # --- answers ------------------------------------------------------------------------------------------------------

    def _book(self, output: StepOutput) -> OutputChunk:
        live = self._live[output.request_id]
        live.state = extend_hash(live.state, output.token)
        return super()._book(output)

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


_NO_STOPS: frozenset[int] = frozenset()
_PUT = [getattr(LocalRequest, one.name).__set__ for one in fields(LocalRequest)]


def _shared_request(
    request_id: str, token_ids: npt.NDArray[np.int32], planned_ids: npt.NDArray[np.int32], claim: Claim | None
) -> LocalRequest:
    """A request with an answer of `planned_ids` whose arrays are kept as they are, where they are of the right kind:
    nobody may write to them. Raises as `LocalRequest`."""
    is_plain = type(request_id) is str and request_id and (claim is None or isinstance(claim, Claim))
    if not is_plain or not are_token_ids(token_ids) or not are_token_ids(planned_ids):
        return LocalRequest(request_id, token_ids, len(planned_ids), planned_ids=planned_ids, claim=claim)
    made = object.__new__(LocalRequest)
    values = (request_id, token_ids, len(planned_ids), _NO_STOPS, None, planned_ids, claim)
    for put, value in zip(_PUT, values, strict=True):
        put(made, value)
    return made
