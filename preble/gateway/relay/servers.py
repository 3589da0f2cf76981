"""Connections to the servers that requests are relayed to, one pool for each URL. Owns when a pool is closed: when its
server has left the fleet and nothing runs there, or the gateway ends."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import urldefrag, urlsplit

from ...router.placement import Placement, PrefillPlace
from ...router.router import Router
from ...transport.engine_servers.http_pool import HttpPool, PoolLimits
from ...transport.engine_servers.tls import client_context

URLS_KEPT = 4096  # whose parts are kept; of the others they are found again


class ServerPools:
    """The pools of one gateway. Belongs to its loop."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._pools: dict[tuple[str, str], HttpPool] = {}  # by URL and who may vouch for it

    def of(self, placement: Placement | PrefillPlace) -> HttpPool:
        """The pool of a placement's server, or of the one that prefills for it."""
        url, ca_file = key = placement.url, placement.options.ca_file
        pool = self._pools.get(key)
        if pool is None:
            self._close_left()
            limits = PoolLimits(connect_seconds=placement.options.answer_seconds)
            tls = client_context(ca_file) if url.startswith("https://") else None
            pool = self._pools[key] = HttpPool(_base(url), limits, tls=tls)
        return pool

    def close(self) -> None:
        """Hang up everything. Idempotent."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def stats(self) -> dict[str, int]:
        """Connections, and those of them that wait for a request."""
        pools = self._pools.values()
        return {"open": sum(len(pool.open) for pool in pools), "idle": sum(pool.idle for pool in pools)}

    def _close_left(self) -> None:
        """Close the pools of servers that have left, where nothing runs any more."""
        here = {urldefrag(address)[0] for address in self._router.fleet.workers}
        for key, pool in list(self._pools.items()):
            if key[0] not in here and len(pool.open) == pool.idle:
                pool.close()
                del self._pools[key]


def _base(url: str) -> str:
    return url.rstrip("/")


@lru_cache(URLS_KEPT)
def parts_of(url: str) -> tuple[bytes, bytes]:
    """Of a server's URL: the host as a request names it, and what stands before every path."""
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2].encode(), parts.path.rstrip("/").encode()
