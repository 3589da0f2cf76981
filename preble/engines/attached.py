"""Puts a worker in front of an SGLang or vLLM server that runs already: requests over HTTP, cache events over its
sockets. Owns the translation between the server's client (`http_client`) and ours.

A router can attach to such a server by itself (`Router.attach`); a worker beside it adds the paper's queue in front,
and serves several routers that then see each other's load. Needs aiohttp.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

from ..clock import Clock
from ..errors import TransportError
from ..transport.engine_servers.http_client import EngineServer
from ..transport.engine_servers.request_forms import FIELDS, RESUMABLE_FIELDS
from ..transport.engine_servers.server_info import EventSource, ServerOptions
from ..transport.namespaces import salt_of
from .async_engine import Backend, BackendInfo
from .async_requests import EngineJob, StreamPart
from .base import EngineInfo
from .event_buffer import EventSink
from .kv_event_listener import listen

logger = logging.getLogger("preble.engines")


class AttachedBackend(Backend):
    """Implements `Backend` with the server at `url`; a server that does not answer for `gone_seconds` has
    failed. `start` raises `TransportError` or `HandshakeRefused`."""

    def __init__(
        self,
        url: str,
        options: ServerOptions | None = None,
        *,
        gone_seconds: float = 30.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._server = EngineServer(url, options)
        self._sources: tuple[EventSource, ...] = ()
        self._ranks = 1
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by job id: who reads its stream
        self._gone_seconds = gone_seconds
        self._clock = clock
        self._received_at = clock()
        self._failure = ""

    async def start(self) -> BackendInfo:
        """Ask the server what it is."""
        server = await self._server.info()
        for advice in server.advice:
            logger.warning("%s", advice)
        self._sources, self._ranks = server.events, server.ranks
        self._received_at = self._clock()
        info = EngineInfo(
            engine=server.engine,
            model=server.model,
            kv_capacity_tokens=server.kv_capacity_tokens,
            block_size=server.block_size,
            max_running=server.max_running,
            max_model_tokens=server.max_model_tokens,
            sampling_fields=FIELDS[server.engine],
            resumable_fields=RESUMABLE_FIELDS[server.engine],
        )
        return BackendInfo(info, server.ranks)

    async def feed(self, sink: EventSink) -> None:
        """Cache events of all ranks, where the server publishes any."""
        if self._sources:
            await listen(self._sources, sink)

    async def stream(self, job: EngineJob) -> AsyncIterator[StreamPart]:
        task = asyncio.current_task()
        assert task is not None, "streams are read by tasks"
        self._tasks[job.id] = task
        produced = 0
        try:
            async for piece in self._server.generate(
                job.request.token_ids,
                job.sampling,
                request_id=job.id,
                rank=job.rank if self._ranks > 1 else None,
                salt=salt_of(job.request.namespace),
                claim=job.request.claim,
            ):
                yield StreamPart(produced, piece.token_ids, piece.cached_tokens, piece.finish_reason, piece.logprobs)
                produced += len(piece.token_ids)
        except TransportError:
            await self._note_if_gone()
            raise
        finally:
            self._tasks.pop(job.id, None)

    async def _note_if_gone(self) -> None:
        """A stream has broken off: a server that does not even say how it is takes all others along."""
        try:
            await self._server.load()
        except TransportError as error:
            self._failure = f"{self._server.url} broke off and does not answer: {error}"

    async def abort(self, job_id: str) -> None:
        """End a request: the server is sent an abort, and the connection is closed."""
        task = self._tasks.get(job_id)
        if task is not None:
            task.cancel()
            await self._server.abort(job_id)

    async def used_tokens(self) -> int:
        """KV tokens of all ranks. Notes whether the server answers."""
        try:
            loads = await self._server.load()
        except TransportError as error:
            if self._clock() - self._received_at >= self._gone_seconds:
                self._failure = f"{self._server.url} has not answered for {self._gone_seconds} s: {error}"
            return 0
        self._received_at = self._clock()
        return sum(load.used_tokens for load in loads)

    def failure(self) -> str:
        """The server is gone."""
        return self._failure

    async def close(self) -> None:
        """Close the connections; the server goes on."""
        await self._server.close()
