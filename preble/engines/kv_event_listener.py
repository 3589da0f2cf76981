"""Cache events of an engine in the same process group, from its own sockets to the streaming engine. Owns one feed per
data-parallel rank, and which of our namespaces an engine's cache salts stand for.

Engines keep prompts apart by a salt, a short text; routers by a namespace, any hashable. Each namespace gets a salt of
its own, and an event that names the salt is given the namespace back. The table is bounded: of the `salts_max` + 1st
namespace on the oldest is forgotten, and the engine's blocks in it are no longer believed to be cached for anybody.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

import zmq.asyncio

from ..errors import InvalidInput
from ..transport.engine_servers.kv_event_codec import DecodeCounters, LoadReport, decode
from ..transport.engine_servers.kv_event_subscriber import EventFeed
from ..transport.engine_servers.server_info import EventSource
from ..types import AllBlocksCleared, BlockStored, CacheEvent

logger = logging.getLogger("preble.engines")

EventSink = Callable[[int, Iterable[CacheEvent]], None]


class Salts:
    """Namespaces and the salts that stand for them. Not thread-safe."""

    def __init__(self, salts_max: int = 65_536) -> None:
        self._salts_max = salts_max
        self._namespaces: dict[str, Hashable] = {}

    def salt_of(self, namespace: Hashable) -> str | None:
        """The salt for an engine; None for the namespace None, which needs none."""
        if namespace is None:
            return None
        salt = hashlib.sha256(repr(namespace).encode()).hexdigest()[:32]
        self._namespaces.pop(salt, None)
        self._namespaces[salt] = namespace
        if len(self._namespaces) > self._salts_max:
            del self._namespaces[next(iter(self._namespaces))]
        return salt

    def restored(self, event: CacheEvent) -> CacheEvent:
        """The event with our namespace instead of the salt that the engine tells; others as they are."""
        if not isinstance(event, BlockStored) or not isinstance(event.namespace, tuple) or len(event.namespace) != 2:
            return event
        kind, told = event.namespace
        if kind == "extra" and isinstance(told, tuple) and len(told) == 1:
            told = told[0]  # vLLM lists all that keeps a block apart, the salt as one of them
        if kind not in ("salt", "extra") or told not in self._namespaces:
            return event
        return replace(event, namespace=self._namespaces[told])


class KvListener:
    """Feeds of all ranks of one engine, on one event loop."""

    def __init__(self, sources: Sequence[EventSource], salts: Salts) -> None:
        self.salts = salts
        self._sources = sources

    async def run(self, sink: EventSink) -> None:
        """Give events to `sink` until cancelled."""
        context = zmq.asyncio.Context()
        feeds = [
            EventFeed(source, _Rank(rank, sink, self.salts), context=context)
            for rank, source in enumerate(self._sources)
        ]
        try:
            await asyncio.gather(*(feed.run() for feed in feeds))
        finally:
            context.destroy(linger=0)


class _Rank:
    """Listens to the feed of one rank."""

    def __init__(self, rank: int, sink: EventSink, salts: Salts) -> None:
        self._rank = rank
        self._sink = sink
        self._salts = salts
        self._counters = DecodeCounters()

    def on_payload(self, payload: bytes) -> None:
        """Decode a batch; one that cannot be read makes everything believed so far doubtful."""
        try:
            events = decode(payload, counters=self._counters)
        except InvalidInput as error:
            logger.warning("a batch of cache events cannot be read: %s", error)
            self.on_resync()
            return
        self._sink(self._rank, [self._salts.restored(event) for event in events])

    def on_resync(self) -> None:
        """Events are lost: believe nothing."""
        self._sink(self._rank, [AllBlocksCleared()])

    def on_load(self, report: LoadReport) -> None:
        """An embedded engine is asked for its load directly."""
