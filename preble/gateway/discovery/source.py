"""What every source of discovery has: its latest answer, and when that was last known to hold. Owns no I/O: each kind
of source has its module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ...clock import Clock
from ...errors import TransportError
from ...transport.worker_address import check_worker_address, is_server
from ..core.config_tables import (
    DiscoveryTable,
    ServerFields,
    ServerTable,
    address_of,
    check_servers,
    options_of,
    server_at,
    source_name,
)
from .known_servers import FoundServer, PodName

OBJECTS_PER_SERVER = 4  # pods or records that are kept for each server that there may be


@dataclass(slots=True)
class FoundServers:
    """The servers by address; and `unusable`, those that cannot be used, by name, with the reason."""

    servers: dict[str, FoundServer] = field(default_factory=dict)
    unusable: dict[str, str] = field(default_factory=dict)


class DiscoverySource:
    """One source. Belongs to one asyncio loop. `run` is called again, after a pause, when it raises `TransportError`:
    the source could not be asked, and its answer stays. `on_news`: called when the answer is another one."""

    def __init__(self, table: DiscoveryTable, clock: Clock, on_news: Callable[[], object]) -> None:
        self.table = table
        self.confirmed_at: float | None = None  # when the source last said something, by the clock; None: never yet
        self.version = 0  # another number with every other answer
        self._clock = clock
        self._on_news = on_news

    @property
    def label(self) -> str:
        """What it is called in metrics and logs."""
        return source_name(self.table)

    async def run(self) -> None:
        """Ask until cancelled. Raises `TransportError`."""
        raise NotImplementedError

    def found(self) -> FoundServers:
        """The latest answer."""
        raise NotImplementedError

    async def write_cost(self, pod: PodName, cost: int) -> None:
        """Write on a pod what its end would cost. Raises `TransportError`."""
        raise TransportError(f"{self.label} has no pods")

    async def close(self) -> None:
        """Hang up. Idempotent."""

    def confirm(self, *, news: bool, at: float | None = None) -> None:
        """The source has spoken, now or `at`; with `news` its answer is another one."""
        self.confirmed_at = self._clock() if at is None else at
        if news:
            self.version += 1
            self._on_news()


def found_server(server: ServerTable) -> FoundServer:
    """A server that a table describes. Raises `InvalidConfig` for one that can be none."""
    check_servers([server], [], "server")
    return FoundServer(address_of(server), options_of(server))


def found_at(url: str, fields: ServerFields) -> FoundServer:
    """A server of which an address alone is known: over HTTP with what holds for all of them, else a `preble worker`.
    Raises `InvalidInput` for what is no address."""
    if is_server(url):
        return found_server(server_at(url, fields))
    check_worker_address(url)
    return FoundServer(url)
