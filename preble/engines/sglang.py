"""Embeds `sglang.Engine`: token ids in, token streams out. Owns the translation between SGLang's calls and ours.

Everything about batching, memory, tensor and data parallelism is SGLang's own and set by its own arguments
(`sglang.srt.server_args.ServerArgs`). What the worker needs is set here: streams that bring new tokens only, cache
events over a local socket, and a tokenizer, which grammars need, only where the model has one. Run with SGLang 0.5.23.

SGLang's scheduler processes are children of this one, and closing the engine ends all children of this process.
Constructed in the main thread, for only there SGLang can see that a child has died.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..errors import EngineError, InvalidConfig, MissingExtra
from ..transport.engine_servers.request_forms import (
    FIELDS,
    RESUMABLE_FIELDS,
    read_sglang_logprobs,
    sglang_logprobs,
    sglang_sampling,
)
from ..transport.engine_servers.server_info import EventSource
from ..transport.namespaces import salt_of
from ..types import GRAMMAR_KINDS
from .async_engine import Backend, BackendInfo
from .async_requests import EngineJob, StreamPart
from .base import EngineInfo
from .event_buffer import EventSink
from .kv_event_listener import listen
from .model_files import eos_token_ids, has_tokenizer, model_name, tokenizer_fingerprint

logger = logging.getLogger("preble.engines")

TOPIC = "kv-events"
OURS = ("model_path", "kv_events_config", "skip_tokenizer_init", "custom_sigquit_handler", "stream_output")

_child_died = threading.Event()


class SglangBackend(Backend):
    """Implements `Backend` with SGLang in child processes of this one.

    `arguments` are fields of SGLang's `ServerArgs`. Raises `MissingExtra` without SGLang, `InvalidConfig` for arguments
    that it does not have or that are set here, `EngineError` if it does not start.
    """

    def __init__(self, model: str, arguments: Mapping[str, Any] | None = None) -> None:
        given = dict(arguments or {})
        refuse_ours(given, OURS)
        try:
            import sglang
        except ImportError as error:
            raise MissingExtra(f"--engine sglang needs SGLang: pip install 'preble[sglang]' ({error})") from error
        self._model = model
        self._has_tokenizer = has_tokenizer(model)
        self._directory = tempfile.mkdtemp(prefix="preble-sglang-")
        self._sources, events = _event_sockets(int(given.get("dp_size", 1)), self._directory)
        settings = {
            "log_level": "warning",
            "incremental_streaming_output": True,
            **given,
            "model_path": model,
            "skip_tokenizer_init": not self._has_tokenizer,
            "kv_events_config": json.dumps(events),
            "custom_sigquit_handler": _on_child_death,
        }
        try:
            self._engine = sglang.Engine(**settings)
        except (RuntimeError, ValueError, OSError, AssertionError) as error:
            self._remove_directory()
            raise EngineError(f"SGLang did not start: {type(error).__name__}: {error}") from error
        except TypeError as error:
            self._remove_directory()
            raise InvalidConfig(f"SGLang does not take these arguments: {error}") from error

    def make_loop(self) -> asyncio.AbstractEventLoop:
        """SGLang's own."""
        loop: asyncio.AbstractEventLoop = self._engine.loop
        return loop

    async def start(self) -> BackendInfo:
        """Ask the engine what it found: memory, places, lengths."""
        manager, arguments = self._engine.tokenizer_manager, self._engine.server_args.resolved_dict()
        loads = await manager.get_loads()
        reported = self._engine._scheduler_init_result.scheduler_infos[0]
        ranks = int(arguments.get("dp_size") or 1)
        places = max((load.max_running_requests for load in loads), default=0)
        path = Path(self._model)
        info = EngineInfo(
            engine="sglang",
            model=arguments.get("served_model_name") or model_name(self._model),
            kv_capacity_tokens=int(reported["max_total_num_tokens"]) * ranks,
            block_size=int(arguments.get("page_size") or 1),
            max_running=int(places or arguments.get("max_running_requests") or 0) or None,
            max_model_tokens=min(int(manager.model_config.context_len), int(reported["max_req_input_len"]) + 1),
            tokenizer_fingerprint=tokenizer_fingerprint(path),
            eos_token_ids=eos_token_ids(path) or tuple(sorted(manager.model_config.hf_eos_token_id or ())),
            sampling_fields=_fields_of(FIELDS["sglang"], self._has_tokenizer),
            resumable_fields=_fields_of(RESUMABLE_FIELDS["sglang"], self._has_tokenizer),
        )
        self._defaults = dict(manager.model_config.get_default_sampling_params())
        self._eos = info.eos_token_ids
        return BackendInfo(info, ranks, int(manager.model_config.vocab_size))

    async def feed(self, sink: EventSink) -> None:
        await listen(self._sources, sink)

    async def stream(self, job: EngineJob) -> AsyncIterator[StreamPart]:
        wanted = job.sampling
        sampling = {**self._defaults, **sglang_sampling(wanted)}
        if not wanted.ignore_eos:
            sampling["stop_token_ids"] = [*wanted.stop_token_ids, *self._eos]
        outputs = await self._engine.async_generate(
            input_ids=job.request.token_ids.tolist(),
            sampling_params=sampling,
            stream=True,
            rid=job.id,
            routed_dp_rank=job.rank if len(self._sources) > 1 else None,
            cache_salt=salt_of(job.request.namespace) or None,
            **sglang_logprobs(wanted),
        )
        async for output in outputs:
            reported, token_ids = output["meta_info"], output["output_ids"]
            reason = reported["finish_reason"]
            yield StreamPart(
                reported["completion_tokens"] - len(token_ids),
                token_ids,
                reported.get("cached_tokens"),
                _reason_of(reason),
                read_sglang_logprobs(reported, 0, wanted.logprobs) if token_ids else (),
            )

    async def abort(self, job_id: str) -> None:
        self._engine.tokenizer_manager.abort_request(rid=job_id)

    async def used_tokens(self) -> int:
        """KV tokens of all ranks, as the schedulers last said."""
        return sum(load.num_used_tokens for load in await self._engine.tokenizer_manager.get_loads())

    def failure(self) -> str:
        """A child process has died, or has said that it cannot go on."""
        return "a process of SGLang has died; its log says why" if _child_died.is_set() else ""

    async def close(self) -> None:
        """End all child processes."""
        await asyncio.to_thread(self._engine.shutdown)
        self._remove_directory()

    def _remove_directory(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def _reason_of(reason: Mapping[str, Any] | None) -> str | None:
    """How SGLang ended a request; it aborts those that it refuses."""
    if reason is None:
        return None
    refused = reason["type"] == "abort" and reason.get("status_code") == 400
    return "invalid" if refused else str(reason["type"])


def _fields_of(fields: tuple[str, ...], with_tokenizer: bool) -> tuple[str, ...]:
    """Grammars and the least number of tokens need SGLang's own tokenizer."""
    without = () if with_tokenizer else ("min_new_tokens", *GRAMMAR_KINDS)
    return tuple(name for name in fields if name not in without)


def _on_child_death(*_: object) -> None:
    """SGLang copies all settings to its processes, so this must not be a method of something that cannot be copied."""
    _child_died.set()


def refuse_ours(given: Mapping[str, Any], ours: tuple[str, ...]) -> None:
    """Raise `InvalidConfig` for engine arguments that the worker sets itself."""
    taken = sorted(set(given) & set(ours))
    if taken:
        raise InvalidConfig(f"--engine-arg {', '.join(taken)}: set by the worker itself")


def _event_sockets(ranks: int, directory: str) -> tuple[list[EventSource], dict[str, Any]]:
    """Where each rank publishes, and what SGLang needs to be given for that."""
    if ranks == 1:
        source = EventSource(f"ipc://{directory}/events", f"ipc://{directory}/replay", TOPIC)
        sources, base = [source], source
    else:  # SGLang counts up ports, not file names
        port = _free_ports(2 * ranks)
        ends = [(f"tcp://127.0.0.1:{port + r}", f"tcp://127.0.0.1:{port + ranks + r}") for r in range(ranks)]
        sources = [EventSource(events, replay, TOPIC) for events, replay in ends]
        base = sources[0]
    ours = {"endpoint": base.endpoint, "replay_endpoint": base.replay_endpoint, "topic": TOPIC}
    return sources, {"publisher": "zmq", "bind": True, **ours}


def _free_ports(count: int, tries: int = 64) -> int:
    """The first of `count` consecutive ports that are free now. Raises `EngineError` if there are none."""
    for _ in range(tries):
        with ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            if port + count > 65_536:
                continue
            try:
                for offset in range(1, count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port + offset))
            except OSError:
                continue
            return port
    raise EngineError(f"found no {count} free ports in a row")
