"""Cache events of an engine in the same process group, from its own sockets to the streaming engine. Owns one feed per
data-parallel rank.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import zmq.asyncio

from .._kv_index.event_batch import EventBatch
from ..errors import InvalidInput
from ..transport.engine_servers.kv_event_subscriber import EventFeed, FeedListener
from ..transport.engine_servers.server_info import EventSource
from ..transport.namespaces import sendable_namespace_of
from ..transport.tasks import running
from ..types import AllBlocksCleared
from .event_buffer import EventSink

logger = logging.getLogger("preble.engines")


async def listen(sources: Sequence[EventSource], sink: EventSink) -> None:
    """Give the cache events of all ranks to `sink`, on one event loop, until cancelled."""
    context = zmq.asyncio.Context()
    feeds = [EventFeed(source, RankListener(rank, sink), context=context) for rank, source in enumerate(sources)]
    try:
        async with running(*(feed.run() for feed in feeds)) as tasks:
            await asyncio.gather(*tasks)
    finally:
        context.destroy(linger=0)


class RankListener(FeedListener):
    """Listens to the feed of one rank. An embedded engine is asked for its load directly."""

    def __init__(self, rank: int, sink: EventSink) -> None:
        self._rank = rank
        self._sink = sink

    def on_payload(self, payload: bytes) -> None:
        """Decode a batch; one that cannot be read makes everything estimated so far doubtful."""
        try:
            events = EventBatch(payload).events(namespace_of=sendable_namespace_of)
        except InvalidInput as error:
            logger.warning("a batch of cache events cannot be read: %s", error)
            self.on_resync()
            return
        self._sink(self._rank, events)

    def on_resync(self) -> None:
        """Events are lost: nothing counts as cached."""
        self._sink(self._rank, [AllBlocksCleared()])
