"""Cache events of replicas, followed on the router's event loop. Owns one feed for each replica that reports where its
engine publishes them; sockets, gaps and replays are `kv_event_subscriber`'s, and what the events mean the scheduler's.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping

import zmq.asyncio

from ..errors import InvalidInput, TransportError, UnknownWorker
from ..scheduler import GlobalScheduler
from ..transport.engine_servers.kv_event_subscriber import EventFeed, FeedListener
from ..transport.engine_servers.server_info import EventSource
from ..transport.namespaces import namespace_of
from ..transport.tasks import end_all
from .replica_scheduler import ReplicaMetadata

logger = logging.getLogger("preble.integrations")

RETRY_MIN_SECONDS, RETRY_MAX_SECONDS = 0.5, 30.0  # between attempts to follow a feed that has failed


class ReplicaListener(FeedListener):
    """Takes one replica's events to the scheduler. What is wrong in them is counted, and stops nothing. Ray Serve
    reports the load itself."""

    def __init__(self, name: str, scheduler: GlobalScheduler, counters: Counter[str]) -> None:
        self._name = name
        self._scheduler = scheduler
        self._counters = counters

    def on_payload(self, payload: bytes) -> None:
        """Apply a batch as the engine wrote it."""
        try:
            self._scheduler.apply_raw(self._name, payload, namespace_of=namespace_of)
            self._counters["event_batches"] += 1
        except UnknownWorker:
            self._counters["event_batches_of_removed"] += 1
        except InvalidInput:
            self._counters["event_batches_malformed"] += 1

    def on_resync(self) -> None:
        """Events are lost for good: nothing counts as cached there."""
        self._counters["event_resyncs"] += 1
        try:
            self._scheduler.clear_worker(self._name)
        except UnknownWorker:
            self._counters["event_batches_of_removed"] += 1


class ReplicaEvents:
    """The feeds of all replicas. Belongs to one asyncio loop; nothing here is thread-safe."""

    def __init__(self, scheduler: GlobalScheduler, counters: Counter[str]) -> None:
        self._scheduler = scheduler
        self._counters = counters
        self._context: zmq.asyncio.Context | None = None
        self._feeds: dict[str, tuple[ReplicaMetadata, asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def followed(self) -> frozenset[str]:
        """Names of the replicas whose events are followed."""
        return frozenset(self._feeds)

    def update(self, replicas: Mapping[str, ReplicaMetadata]) -> None:
        """These are the replicas now. A feed whose metadata have changed begins anew, with all that is still kept."""
        for name in [name for name, (metadata, _) in self._feeds.items() if replicas.get(name) != metadata]:
            self.remove(name)
        for name, metadata in replicas.items():
            if metadata.events_endpoint and name not in self._feeds:
                self._feeds[name] = (metadata, asyncio.get_running_loop().create_task(self._follow(name, metadata)))

    def remove(self, name: str) -> None:
        """A replica is gone."""
        found = self._feeds.pop(name, None)
        if found is not None:
            found[1].cancel()
            self._ending.add(found[1])
            found[1].add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Follow nothing any more, and free the sockets. Idempotent."""
        self.update({})
        await end_all(*self._ending)
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def _follow(self, name: str, metadata: ReplicaMetadata) -> None:
        if self._context is None:
            self._context = zmq.asyncio.Context()
        source = EventSource(metadata.events_endpoint, metadata.replay_endpoint, metadata.events_topic)
        listener = ReplicaListener(name, self._scheduler, self._counters)
        pause = RETRY_MIN_SECONDS
        while True:
            try:
                await EventFeed(source, listener, context=self._context).run()
            except TransportError as error:
                logger.warning("cache events of replica %s are not followed: %s", name, error)
            except Exception:
                logger.exception("the cache events of replica %s are not followed", name)
            self._counters["event_feeds_failed"] += 1
            listener.on_resync()  # what comes until it is followed again is lost
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_MAX_SECONDS)
