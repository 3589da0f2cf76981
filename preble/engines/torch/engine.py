"""The embedded engine: one transformers-format model, batched continuously, its KV cache shared between requests.

Owns the requests' output positions and errors. `LocalScheduler` decides what runs and which slots it uses, `Runner`
computes it, `choose_tokens` picks tokens; this file conducts them one step at a time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch

from ...clock import Clock
from ...errors import DuplicateRequest, EngineError, InvalidInput, InvalidTokens
from ...local import Batch, LocalConfig, LocalRequest, LocalScheduler, StepOutput
from ...types import CacheEvent, SamplingParams, check_int
from ..base import EngineInfo, EngineLoad, GenerationRequest, OutputChunk
from .loading import Model, choose_device, choose_dtype, load_model
from .runner import Runner
from .sampling import choose_tokens

# The KV pool's size where none is asked for: a share of the memory left once the model is loaded, within a bound.
KV_MEMORY_SHARE_CPU = 0.25
KV_MEMORY_SHARE_CUDA = 0.85
KV_DEFAULT_TOKENS_MAX = 1 << 18


@dataclass(slots=True)
class _TorchRequest:
    """A request in the scheduler: what it asked for, and the output position of its next token."""

    sampling: SamplingParams
    next_index: int


class TorchEngine:
    """Implements `preble.engines.base.Engine` with torch. Paper section 4.3. Not thread-safe; one thread drives it.

    `local` configures batches and the KV capacity in tokens (None: a capacity that fits into a share of free
    memory). `dtype` is "float32", "bfloat16" or "auto" (bfloat16 where the hardware multiplies it); `device` "cpu",
    "cuda" or "auto". `threads` sets torch's CPU threads for the whole process (None leaves them).
    `max_model_tokens` shortens the longest context. Output that would pass the context or the KV capacity ends
    there with finish_reason "length".

    In float32 greedy output equals transformers' own without a cache, whatever was cached, chunked, evicted or
    preempted.

    Raises `EngineError` naming the path for a model directory that it cannot run, `InvalidConfig` for a
    wrong option.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        *,
        local: LocalConfig | None = None,
        dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        max_model_tokens: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(check_int("threads", threads, 1, 4096))
        if max_model_tokens is not None:
            check_int("max_model_tokens", max_model_tokens, 2, 2**31 - 1)
        chosen_device = choose_device(device)
        model = load_model(
            model_dir,
            device=chosen_device,
            dtype=choose_dtype(dtype, chosen_device),
            max_model_tokens=max_model_tokens,
        )
        config = local or LocalConfig(kv_capacity_tokens=default_kv_capacity(model))
        self._info = _info(model, config)
        self._vocab_size = model.vocab_size
        self._dtype = model.dtype
        self._runner: Runner | None = _make_runner(model, config.kv_capacity_tokens)
        self._scheduler = LocalScheduler(config, clock=clock)
        self._live: dict[str, _TorchRequest] = {}
        self._ended: list[OutputChunk] = []  # last chunks of requests that ended between steps

    @property
    def info(self) -> EngineInfo:
        """What is constant about this engine."""
        return self._info

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in: the outcome of "auto"."""
        return self._dtype

    @property
    def scheduler(self) -> LocalScheduler:
        """The local scheduler, for its counters and its `check`."""
        return self._scheduler

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises `QueueFull`, `InvalidInput` or `EngineError`; then nothing has changed."""
        if self._runner is None:
            raise EngineError("the engine is closed")
        if request.request_id in self._live:
            raise DuplicateRequest(f"request {request.request_id!r} is live")
        self._check_prompt(request)
        sampling, offset = request.sampling, request.output_offset
        room = self._info.max_model_tokens - len(request.token_ids)
        left = min(sampling.max_new_tokens - offset, room)
        if left <= 0:
            # Resumed after its last token: only the news of its end was lost.
            self._ended.append(OutputChunk(request.request_id, offset, (), cached_tokens=0, finish_reason="length"))
            return
        stops = frozenset(sampling.stop_token_ids)
        self._scheduler.add(
            LocalRequest(
                request_id=request.request_id,
                token_ids=request.token_ids,
                max_new_tokens=left,
                stop_token_ids=stops if sampling.ignore_eos else stops | frozenset(self._info.eos_token_ids),
                namespace=request.namespace,
            )
        )
        self._live[request.request_id] = _TorchRequest(sampling, offset)

    def abort(self, request_id: str) -> bool:
        """End a request; its last chunk (finish_reason "abort") comes from the next `step`. False if it is not live."""
        if request_id not in self._live:
            return False
        self._ended.append(self._end(request_id, "abort"))
        return True

    def step(self) -> list[OutputChunk]:
        """Run one iteration and return what it produced; [] when there is nothing to do.

        A failing computation ends the requests of its batch with finish_reason "error"; the engine goes on.
        """
        chunks, self._ended = self._ended, []
        batch = self._scheduler.next_batch()
        if batch:
            chunks.extend(self._run(batch))
        return chunks

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
        """Drop all requests without further chunks and free the model and its KV pool. Idempotent."""
        for request_id in list(self._live):
            self._end(request_id, "abort")
        self._ended.clear()
        self._runner = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # --- one step -----------------------------------------------------------------------------------------------------

    def _run(self, batch: Batch) -> list[OutputChunk]:
        """Compute a batch and book its tokens; requests whose logits are not finite end with an error."""
        assert self._runner is not None, "a closed engine has no live requests"
        sampling = [item.request_id for item in batch.items if item.samples]
        choices = [(self._live[request_id].sampling, self._live[request_id].next_index) for request_id in sampling]
        try:
            tokens = choose_tokens(self._runner.forward(batch.items), choices)
        except RuntimeError as error:  # what torch raises, out of memory included
            self._scheduler.discard(batch)
            return [self._end(item.request_id, "error", f"the forward pass failed: {error}") for item in batch.items]
        chosen = {request_id: token for request_id, token in zip(sampling, tokens, strict=True) if token is not None}
        chunks = [
            self._end(request_id, "error", "the logits are not finite (NaN or overflow)")
            for request_id in sampling
            if request_id not in chosen
        ]
        return chunks + [self._book(output) for output in self._scheduler.complete(batch, chosen)]

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
        self._scheduler.cancel(request_id)
        return OutputChunk(request_id, live.next_index, (), finish_reason=reason, error=error)

    def _check_prompt(self, request: GenerationRequest) -> None:
        tokens = request.token_ids
        if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.size == 0:
            raise InvalidTokens(f"request {request.request_id!r}: token_ids must be a non-empty 1-D integer array")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise InvalidTokens(
                f"request {request.request_id!r}: token_ids must be in [0, {self._vocab_size - 1}], got {wrong}"
            )
        check_int("output_offset", request.output_offset, 0, len(tokens) - 1, InvalidInput)
        longest = self._info.max_model_tokens
        if len(tokens) - request.output_offset >= longest:
            raise InvalidInput(
                f"request {request.request_id!r}: a prompt of {len(tokens)} tokens leaves no room for output, the "
                f"context is {longest} tokens"
            )


def default_kv_capacity(model: Model) -> int:
    """Tokens whose KV fits into the default share of the device's free memory.

    Raises `EngineError` where that is less than a prompt and its output take.
    """
    if model.device.type == "cuda":
        free_bytes = int(torch.cuda.mem_get_info(model.device)[0] * KV_MEMORY_SHARE_CUDA)
    else:
        # Not every system reports how much memory is free; all report how much there is.
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        free_bytes = int(os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") * KV_MEMORY_SHARE_CPU)
    tokens = min(free_bytes // model.kv_bytes_per_token, KV_DEFAULT_TOKENS_MAX)
    if tokens < 2:
        raise EngineError(
            f"no memory for a KV cache on {model.device}: {free_bytes} bytes, {model.kv_bytes_per_token} a token"
        )
    return tokens


def _make_runner(model: Model, kv_slots: int) -> Runner:
    try:
        return Runner(model, kv_slots)
    except RuntimeError as error:
        raise EngineError(
            f"cannot allocate a KV pool of {kv_slots} tokens ({kv_slots * model.kv_bytes_per_token} bytes) on "
            f"{model.device}: {error}"
        ) from error


def _info(model: Model, config: LocalConfig) -> EngineInfo:
    return EngineInfo(
        engine="torch",
        model=model.name,
        kv_capacity_tokens=config.kv_capacity_tokens,
        block_size=1,
        max_running=config.max_running,
        max_model_tokens=min(model.max_model_tokens, config.kv_capacity_tokens),
        tokenizer_fingerprint=model.tokenizer_fingerprint,
        eos_token_ids=model.eos_token_ids,
    )
