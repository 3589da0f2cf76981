"""Servers from Kubernetes: EndpointSlices of a Service, pods by their labels, or both. Owns the list and the watch of
each, by which what is known follows the API server.

    list                      all objects, page by page, and the version that they are of
    watch from that version   each change; bookmarks move the version on
    the watch ends            watch on from the version: nothing was missed
    410 Gone                  what has changed since is not known there any more: list again; after a pause, where it
                              was listed just now
    anything else             `TransportError`: after a pause, watch on from the version

What is known stays until a list or a watch says something else.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Generic, TypeVar

import msgspec

from ...clock import Clock
from ...errors import TransportError
from ...transport.tasks import first_of
from ..core.config_tables import DiscoveryTable
from .known_servers import PodName
from .kubernetes_api import GONE, KubernetesApi, ResourceExpired
from .kubernetes_objects import DELETION_COST, EndpointSlice, ObjectMeta, Pod, servers_in
from .source import OBJECTS_PER_SERVER, DiscoverySource, FoundServers

PAGE = 500
WATCH_SECONDS = 60.0  # at most: what a watch that ends in peace confirms is no older
AT_ONCE_SECONDS = 0.5  # a watch that ends so soon, without a word, has failed
LISTS_APART_SECONDS = 1.0  # sooner a list is tried again after a pause only
SERVICE_LABEL = "kubernetes.io/service-name"

Object = TypeVar("Object", Pod, EndpointSlice)


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _WatchEvent(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _AnyObject(msgspec.Struct):
    metadata: ObjectMeta


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class ListWatch(Generic[Object]):
    """The objects of one resource that a selector has, by name. Belongs to one asyncio loop.

    `objects_max`: of more the API server is not asked, and `left_out` says that there are. `confirm` is called with
    whether something has changed, whenever the API server has spoken.
    """

    def __init__(
        self,
        api: KubernetesApi,
        path: str,
        selector: str,
        kind: type[Object],
        *,
        objects_max: int,
        confirm: Callable[[bool], object],
        rng: Random,
        clock: Clock,
    ) -> None:
        self.objects: dict[str, Object] = {}
        self.left_out = False
        self.version = ""  # that `objects` are of; "": they must be listed
        self.confirmed_at: float | None = None  # when the API server last spoke, once all had been listed
        self._listed_at = float("-inf")
        self._api = api
        self._path = path
        self._query = {"labelSelector": selector}
        self._object: Any = msgspec.json.Decoder(kind)
        items: Any = list[kind] | None  # type: ignore[valid-type]
        page = msgspec.defstruct("Page", [("metadata", _ListMeta), ("items", items, None)])
        self._page: Any = msgspec.json.Decoder(page)
        self._objects_max = objects_max
        self._confirm = confirm
        self._rng = rng
        self._clock = clock

    async def run(self) -> None:
        """Follow the API server until cancelled. Raises `TransportError`; called again it goes on where it was."""
        while True:
            try:
                if not self.version:
                    await self._list()
                await self._watch()
            except ResourceExpired:
                was_listed_now = not self.version or self._clock() - self._listed_at < LISTS_APART_SECONDS
                self.version = ""
                if was_listed_now:
                    raise

    async def _list(self) -> None:
        found: dict[str, Object] = {}
        query: dict[str, str | int] = {**self._query, "limit": PAGE}
        while True:
            page = _decoded(self._page, await self._api.list(self._path, query))
            found.update((one.metadata.name, one) for one in page.items or ())
            if not page.metadata.continue_ or len(found) > self._objects_max:
                break
            query["continue"] = page.metadata.continue_
        self.left_out = len(found) > self._objects_max
        self.objects = dict(list(found.items())[: self._objects_max])
        self.version, self._listed_at = page.metadata.resource_version, self._clock()
        self._spoke(True)

    async def _watch(self) -> None:
        began, spoke = self._clock(), False
        seconds = WATCH_SECONDS * self._rng.uniform(0.5, 1.0)  # so that gateways do not come back together
        query = {**self._query, "resourceVersion": self.version}
        async for line in self._api.watch(self._path, query, seconds):
            spoke = True
            self._spoke(self._take(_decoded(_EVENTS, line)))
        if not spoke and self._clock() - began < AT_ONCE_SECONDS:
            raise TransportError("the API server ends watches at once")
        self._spoke(False)

    def _spoke(self, news: bool) -> None:
        self.confirmed_at = self._clock()
        self._confirm(news)

    def _take(self, event: _WatchEvent) -> bool:
        """Follow one change; whether it is one. Raises as `run`."""
        if event.type == "ERROR":
            status = _decoded(_STATUSES, event.object)
            raise (ResourceExpired if status.code == GONE else TransportError)(
                f"the watch ended with {status.code}: {status.message[:200]}"
            )
        head = _decoded(_HEADS, event.object).metadata
        self.version = head.resource_version or self.version
        if event.type == "DELETED":
            return self.objects.pop(head.name, None) is not None
        if event.type not in ("ADDED", "MODIFIED"):
            return False
        if head.name not in self.objects and len(self.objects) >= self._objects_max:
            self.left_out = True
            return False
        self.objects[head.name] = _decoded(self._object, event.object)
        return True


_EVENTS: Any = msgspec.json.Decoder(_WatchEvent)
_HEADS: Any = msgspec.json.Decoder(_AnyObject)
_STATUSES: Any = msgspec.json.Decoder(_Status)


def _decoded(decoder: Any, data: bytes | msgspec.Raw) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise TransportError(f"the API server's answer cannot be read: {error}") from error


class KubernetesSource(DiscoverySource):
    """The servers of one table in the API server's words."""

    def __init__(
        self,
        table: DiscoveryTable,
        clock: Clock,
        on_news: Callable[[], object],
        *,
        rng: Random,
        api: KubernetesApi | None = None,
    ) -> None:
        super().__init__(table, clock, on_news)
        self.api = api or KubernetesApi()
        self._rng = rng
        self._pods: ListWatch[Pod] | None = None
        self._slices: ListWatch[EndpointSlice] | None = None

    def found(self) -> FoundServers:
        """The latest answer."""
        pods = None if self._pods is None else self._pods.objects
        slices = None if self._slices is None else self._slices.objects
        found = servers_in(self.table, pods, slices)
        for name, followed in (("pods", self._pods), ("EndpointSlices", self._slices)):
            if followed is not None and followed.left_out:
                found.unusable[f"further {name}"] = "there are more than are kept"
        return found

    async def run(self) -> None:
        """Follow the API server. Raises `TransportError`."""
        await self.api.connect()
        if self._pods is None and self._slices is None:
            self._begin(self.table.namespace or self.api.namespace)
        await first_of(*(one.run() for one in (self._pods, self._slices) if one is not None))

    def _begin(self, namespace: str) -> None:
        table = self.table
        more: dict[str, Any] = {"objects_max": OBJECTS_PER_SERVER * table.servers_max, "confirm": self._spoken}
        more |= {"rng": self._rng, "clock": self._clock}
        if table.selector is not None:
            self._pods = ListWatch(self.api, f"/api/v1/namespaces/{namespace}/pods", table.selector, Pod, **more)
        if table.service is not None:
            path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
            self._slices = ListWatch(self.api, path, f"{SERVICE_LABEL}={table.service}", EndpointSlice, **more)

    def _spoken(self, news: bool) -> None:
        """With two resources an answer is one when both have been listed, and as old as the older."""
        times = [one.confirmed_at for one in (self._pods, self._slices) if one is not None]
        known = [time for time in times if time is not None]
        if len(known) == len(times):
            self.confirm(news=news, at=min(known))

    async def write_cost(self, pod: PodName, cost: int) -> None:
        """Write on a pod what its end would cost. Raises `TransportError`."""
        await self.api.annotate(f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}", {DELETION_COST: str(cost)})

    async def close(self) -> None:
        """Hang up. Idempotent."""
        await self.api.close()
