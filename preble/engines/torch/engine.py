"""The embedded engine: one transformers-format model, batched continuously, its KV cache shared between requests.

Owns the requests' output positions and errors. `LocalScheduler` decides what runs and which slots it uses, `Runner`
computes it, `choose_tokens` picks tokens; this file conducts them one step at a time.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from ...clock import Clock
from ...errors import EngineError, InvalidConfig, InvalidInput
from ...local import Batch, LocalConfig
from ...types import GRAMMAR_KINDS, SAMPLING_FIELDS, SamplingParams, check_int
from ..base import (
    EngineInfo,
    GenerationRequest,
    LiveOutput,
    OutputChunk,
    ScheduledEngine,
    check_prompt,
    check_sampling,
)
from ..model_files import sampling_defaults
from .layout import kv_layout
from .loading import Model, choose_device, choose_dtype, load_model
from .runner import Runner
from .sampling import TokenChoice, choose_tokens, logprobs_of
from .shaping import LogitShaper, shaper_for

# The KV pool's size where none is asked for: a share of the memory left once the model is loaded, within a bound.
KV_MEMORY_SHARE_CPU = 0.25
KV_MEMORY_SHARE_CUDA = 0.85
KV_DEFAULT_TOKENS_MAX = 1 << 18
_FIELDS = tuple(name for name in SAMPLING_FIELDS if name not in (*GRAMMAR_KINDS, "bad_words"))


@dataclass(slots=True)
class _TorchRequest(LiveOutput):
    """A request in the scheduler, with what it asked for: nothing of it unsaid, a seed of its own included."""

    sampling: SamplingParams
    shaper: LogitShaper | None


class TorchEngine(ScheduledEngine[_TorchRequest]):
    """Implements `preble.engines.base.Engine` with torch. Paper section 4.3. Not thread-safe; one thread drives it.

    `local` configures batches and the KV capacity in tokens (None: a capacity that fits into a share of free
    memory). `dtype` is "float32", "bfloat16" or "auto" (bfloat16 where the hardware multiplies it); `device` "cpu",
    "cuda" or "auto". `threads` sets torch's CPU threads for the whole process (None leaves them).
    `max_model_tokens` shortens the longest context. Output that would pass the context or the KV capacity ends
    there with finish_reason "length".

    In float32 greedy output equals transformers' own without a cache, whatever was cached, chunked, evicted or
    preempted, and whoever else is in the batch. In bfloat16 it does not: the batch decides how sums are rounded, and
    near-equal tokens change places (docs/engines.md, "Limits").

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
        super().__init__(_info(model, config), config, clock)
        self.dtype = model.dtype  # what the model computes in: the outcome of "auto"
        self._vocab_size = model.vocab_size
        self._device = model.device
        self._defaults = _defaults(model_dir)
        self._runner: Runner | None = _make_runner(model, config.kv_capacity_tokens)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises `QueueFull`, `InvalidInput` or `EngineError`; then nothing has changed."""
        self._check_new(request.request_id)
        check_prompt(request, self._vocab_size, self.info.max_model_tokens)
        check_sampling(request, self.info)
        asked = request.sampling
        for name, tokens in (("logit_bias", asked.logit_bias), ("allowed_token_ids", asked.allowed_token_ids)):
            if tokens and max(tokens) >= self._vocab_size:
                raise InvalidInput(f"{name}: token ids must be below {self._vocab_size}")
        ends = {*asked.stop_token_ids, *self.info.eos_token_ids}
        if asked.allowed_token_ids and asked.min_new_tokens and ends.issuperset(asked.allowed_token_ids):
            raise InvalidInput("allowed_token_ids: all of them end the output, which min_new_tokens forbids")
        local = self._queue(request)
        if local is not None:
            sampling = self._with_defaults(request.sampling)
            stops = sorted(local.stop_token_ids | frozenset(self.info.eos_token_ids))
            shaper = shaper_for(
                sampling, request.token_ids, request.output_offset, stops, self._vocab_size, self._device
            )
            self._live[request.request_id] = _TorchRequest(request.output_offset, sampling, shaper)

    def _with_defaults(self, sampling: SamplingParams) -> SamplingParams:
        """Fill in what a request does not say: the model's own way, and a seed that nobody else has."""
        said: dict[str, Any] = {name: v for name, v in self._defaults.items() if getattr(sampling, name) is None}
        if sampling.temperature is None:
            said.setdefault("temperature", 1.0)
        if sampling.seed is None:
            said["seed"] = secrets.randbits(62)
        return replace(sampling, **said)

    def step(self) -> list[OutputChunk]:
        """Run one iteration and return what it produced; [] when there is nothing to do.

        A failing computation ends the requests of its batch with finish_reason "error"; the engine goes on.
        """
        chunks, self._ended = self._ended, []
        batch = self.scheduler.next_batch()
        if batch:
            chunks.extend(self._run(batch))
        return chunks

    # --- KV from engine to engine -------------------------------------------------------------------------------------

    def cached_tokens(self, token_ids: npt.NDArray[np.int32], namespace: Hashable) -> int:
        """How many leading tokens are cached. Changes nothing."""
        return self.scheduler.cached_tokens(token_ids, namespace)

    def export_kv(self, token_ids: npt.NDArray[np.int32], namespace: Hashable, first: int) -> memoryview:
        """The KV of the tokens from position `first` on, as far as they are cached: a copy. Counts as a use. Raises
        `EngineError` where memory is out."""
        slots = self.scheduler.cached_slots(token_ids, namespace)[first:]
        if not len(slots) or self._runner is None:
            return memoryview(b"")
        try:
            data: memoryview = self._runner.read_kv(slots)
        except RuntimeError as error:
            raise EngineError(f"the KV of {len(slots)} tokens cannot be read: {error}") from error
        return data

    def import_kv(
        self, token_ids: npt.NDArray[np.int32], namespace: Hashable, first: int, data: bytes | memoryview
    ) -> int:
        """Cache `token_ids` by their KV from position `first` on, what `export_kv` of an engine of the same layout has
        given; those before must be cached. Returns how many are cached then. Raises `EngineError`; then nothing is
        added."""
        tokens = len(token_ids) - first
        if tokens * self.info.kv_token_bytes != len(data):
            raise EngineError(f"{len(data)} bytes are not the KV of {tokens} tokens")
        cached = self.cached_tokens(token_ids, namespace)
        if cached < first or self._runner is None:
            return cached
        runner = self._runner

        def write(known: int, slots: npt.NDArray[np.int32]) -> None:
            runner.write_kv(slots, data, known - first)

        try:
            return self.scheduler.adopt(token_ids, namespace, write)
        except RuntimeError as error:
            raise EngineError(f"the KV of {tokens} tokens cannot be stored: {error}") from error

    def close(self) -> None:
        """Drop all requests without further chunks and free the model and its KV pool. Idempotent."""
        super().close()
        self._runner = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # --- one step -----------------------------------------------------------------------------------------------------

    def _run(self, batch: Batch) -> list[OutputChunk]:
        """Compute a batch and book its tokens; requests whose logits are not finite end with an error."""
        assert self._runner is not None, "a closed engine has no live requests"
        sampling = [item.request_id for item in batch.items if item.samples]
        lives = [self._live[request_id] for request_id in sampling]
        choices = [TokenChoice(live.sampling, live.next_index, live.shaper) for live in lives]
        try:
            logits = self._runner.forward(batch.items)
            tokens = choose_tokens(logits, choices)
        except RuntimeError as error:  # what torch raises, out of memory included
            self.scheduler.discard(batch)
            return [self._end(item.request_id, "error", f"the forward pass failed: {error}") for item in batch.items]
        chosen = {request_id: token for request_id, token in zip(sampling, tokens, strict=True) if token is not None}
        chunks = [
            self._end(request_id, "error", "the logits are not finite (NaN or overflow)")
            for request_id in sampling
            if request_id not in chosen
        ]
        rows = {request_id: row for row, request_id in enumerate(sampling)}
        for output in self.scheduler.complete(batch, chosen):
            row = rows[output.request_id]
            params, shaper = lives[row].sampling, lives[row].shaper
            chunk = self._book(output)
            if shaper is not None:
                shaper.saw(output.token)
            if params.logprobs is not None:
                chunk = structs.replace(chunk, logprobs=(logprobs_of(logits[row], output.token, params.logprobs),))
            chunks.append(chunk)
        return chunks


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
        sampling_fields=_FIELDS,
        resumable_fields=_FIELDS,
        cached_first=config.order != "fcfs",
        kv_layout=kv_layout(model),
        kv_token_bytes=model.kv_bytes_per_token,
    )


def _defaults(model_dir: str | os.PathLike[str]) -> dict[str, float]:
    """How the model's maker says to sample. Raises `EngineError` where that makes no sense."""
    found = sampling_defaults(Path(model_dir))
    try:
        SamplingParams(**found)  # type: ignore[arg-type]
    except (InvalidConfig, InvalidInput) as error:
        raise EngineError(f"generation_config.json in {model_dir}: {error}") from error
    return found
