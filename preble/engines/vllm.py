"""Embeds vLLM's `AsyncLLM`: token ids in, token streams out. Owns the translation between vLLM's calls and ours.

Everything about batching, memory, tensor and data parallelism is vLLM's own and set by its own arguments
(`vllm.AsyncEngineArgs`). What the worker needs is set here: prefix caching, cache events over a local socket, and a
tokenizer, which grammars need, only where the model has one. Run with vLLM 0.32.0. vLLM's engine core runs in a child
process of this one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import EngineError, InvalidConfig, InvalidInput, MissingExtra
from ..transport.engine_servers.request_forms import FIELDS, RESUMABLE_FIELDS, number, vllm_sampling
from ..transport.engine_servers.server_info import EventSource
from ..transport.namespaces import salt_of
from ..types import GRAMMAR_KINDS, TokenLogprob
from .async_engine import Backend, BackendInfo
from .async_requests import EngineJob, StreamPart
from .base import EngineInfo
from .event_buffer import EventSink
from .kv_event_listener import listen
from .model_files import eos_token_ids, has_tokenizer, model_name, tokenizer_fingerprint
from .sglang import refuse_ours

logger = logging.getLogger("preble.engines")

TOPIC = "kv-events"
OURS = ("model", "kv_events_config", "skip_tokenizer_init")


class VllmBackend(Backend):
    """Implements `Backend` with vLLM's engine core in child processes of this one.

    `arguments` are fields of vLLM's `AsyncEngineArgs`. Raises `MissingExtra` without vLLM, `InvalidConfig` for
    arguments that it does not have or that are set here; `start` raises `EngineError` if vLLM does not.
    """

    def __init__(self, model: str, arguments: Mapping[str, Any] | None = None) -> None:
        given = dict(arguments or {})
        refuse_ours(given, OURS)
        try:
            from vllm import AsyncEngineArgs
            from vllm.config import KVEventsConfig
        except ImportError as error:
            raise MissingExtra(f"--engine vllm needs vLLM: pip install 'preble[vllm]' ({error})") from error
        self._model = model
        self._has_tokenizer = has_tokenizer(model)
        self._engine: Any = None
        self._usage: dict[int, float] = {}  # by rank: the share of KV blocks in use
        self._capacity_tokens = 0
        self._directory = tempfile.mkdtemp(prefix="preble-vllm-")
        events = {"endpoint": f"ipc://{self._directory}/events", "replay_endpoint": f"ipc://{self._directory}/replay"}
        if int(given.get("data_parallel_size", 1)) > 1:
            # vLLM counts up ports, not file names; with port 0 each rank takes a free one of this address.
            os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
            events = {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
        self._events = EventSource(events["endpoint"], events["replay_endpoint"], TOPIC)
        publisher = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", topic=TOPIC, **events)
        settings = {
            "enable_prefix_caching": True,
            **given,
            "model": model,
            "skip_tokenizer_init": not self._has_tokenizer,
        }
        try:
            self._arguments = AsyncEngineArgs(**settings, kv_events_config=publisher)
        except TypeError as error:
            self._remove_directory()
            raise InvalidConfig(f"vLLM does not take these arguments: {error}") from error

    async def start(self) -> BackendInfo:
        """Load the model and ask the engine what it found: memory, places, lengths."""
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            self._engine = AsyncLLM.from_engine_args(self._arguments, stat_loggers=[self._stat_logger()])
        except (RuntimeError, ValueError, OSError, AssertionError) as error:
            raise EngineError(f"vLLM did not start: {type(error).__name__}: {error}") from error
        config = self._engine.vllm_config
        if config.parallel_config.data_parallel_size > 1 and not hasattr(self._engine, "get_kv_event_sources"):
            raise EngineError("this vLLM does not report where its ranks publish cache events: give it one rank")
        model, ranks = config.model_config, int(config.parallel_config.data_parallel_size)
        block_size = int(config.cache_config.block_size)
        # One block of each rank stands for nothing.
        self._capacity_tokens = (int(config.cache_config.num_gpu_blocks) - 1) * block_size * ranks
        path = Path(self._model)
        served = self._arguments.served_model_name
        info = EngineInfo(
            engine="vllm",
            model=(served if isinstance(served, str) else served[0]) if served else model_name(self._model),
            kv_capacity_tokens=self._capacity_tokens,
            block_size=block_size,
            max_running=int(config.scheduler_config.max_num_seqs),
            max_model_tokens=int(model.max_model_len),
            tokenizer_fingerprint=tokenizer_fingerprint(path),
            eos_token_ids=eos_token_ids(path),
            sampling_fields=_fields_of(FIELDS["vllm"], self._has_tokenizer),
            resumable_fields=_fields_of(RESUMABLE_FIELDS["vllm"], self._has_tokenizer),
        )
        self._eos = info.eos_token_ids
        # Its `max_tokens` is how long answers are where nothing is said; here something always is.
        self._defaults = {k: v for k, v in model.get_diff_sampling_param().items() if k != "max_tokens"}
        return BackendInfo(info, ranks, int(model.get_vocab_size()))

    def _stat_logger(self) -> Any:
        """Makes a listener to vLLM's own statistics for each rank: there is no call that asks for them."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        usage = self._usage

        class Listener(StatLoggerBase):
            """Keeps the last share of KV blocks in use."""

            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                self.rank = engine_index

            def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
                """After each iteration."""
                if scheduler_stats is not None:
                    usage[self.rank] = scheduler_stats.kv_cache_usage

            def log_engine_initialized(self) -> None:
                """Nothing to say."""

        return Listener

    async def feed(self, sink: EventSink) -> None:
        await listen(self._event_sources(), sink)

    def _event_sources(self) -> list[EventSource]:
        """Where each rank publishes cache events. An older vLLM names no places: its one rank is where it was put."""
        if not hasattr(self._engine, "get_kv_event_sources"):
            return [self._events]
        sources = self._engine.get_kv_event_sources()
        return [EventSource(sources[r].endpoint, sources[r].replay_endpoint or "", TOPIC) for r in sorted(sources)]

    async def stream(self, job: EngineJob) -> AsyncIterator[StreamPart]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        wanted = job.sampling
        fields = {**self._defaults, **vllm_sampling(wanted)}
        if not wanted.ignore_eos:
            fields["stop_token_ids"] = [*wanted.stop_token_ids, *self._eos]
        if wanted.temperature == 0.0:
            fields.pop("seed", None)  # nothing is drawn
        if wanted.grammar is not None:
            fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
        sampling = SamplingParams(**fields, detokenize=False, output_kind=RequestOutputKind.DELTA)
        prompt: dict[str, Any] = {"prompt_token_ids": job.request.token_ids.tolist()}
        salt = salt_of(job.request.namespace)
        if salt:
            prompt["cache_salt"] = salt
        rank = job.rank if self._arguments.data_parallel_size > 1 else None
        produced = 0
        try:
            async for output in self._engine.generate(prompt, sampling, job.id, data_parallel_rank=rank):
                part = output.outputs[0]
                token_ids = list(part.token_ids)
                logprobs = _logprobs_of(part.logprobs, token_ids, wanted.logprobs)
                yield StreamPart(produced, token_ids, output.num_cached_tokens, part.finish_reason, logprobs)
                produced += len(token_ids)
        except Exception as error:
            if any(kind.__name__ == "VLLMClientError" for kind in type(error).__mro__):
                raise InvalidInput("vLLM refuses the request") from error
            raise

    async def abort(self, job_id: str) -> None:
        await self._engine.abort(job_id)

    async def used_tokens(self) -> int:
        """KV tokens that running requests hold, as of the last iteration."""
        return round(sum(self._usage.values()) / max(1, len(self._usage)) * self._capacity_tokens)

    def failure(self) -> str:
        """The engine core has died."""
        return "vLLM's engine core has died; its log says why" if self._engine and self._engine.errored else ""

    async def close(self) -> None:
        """End the child processes."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.shutdown)
        self._remove_directory()

    def _remove_directory(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def _fields_of(fields: tuple[str, ...], with_tokenizer: bool) -> tuple[str, ...]:
    """Grammars and bad words need vLLM's own tokenizer."""
    without = () if with_tokenizer else ("bad_words", *GRAMMAR_KINDS)
    return tuple(name for name in fields if name not in without)


def _logprobs_of(
    reported: Sequence[Mapping[int, Any]] | None, token_ids: Sequence[int], wanted: int | None
) -> tuple[TokenLogprob, ...]:
    """vLLM reports the chosen token and the likeliest ones, each with its rank from 1 on."""
    if wanted is None or not reported:
        return ()
    found = []
    for token, there in zip(token_ids, reported, strict=False):
        best = sorted((one.rank, other, one.logprob) for other, one in there.items() if 1 <= (one.rank or 0) <= wanted)
        found.append(TokenLogprob(number(there[token].logprob), tuple((int(o), number(p)) for _, o, p in best)))
    return tuple(found)
