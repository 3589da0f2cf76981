"""Servers from SRV records of DNS. Owns what a record means here; the wire is dnspython's.

Every record is a server: priorities and weights are for clients that choose one by themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from ...clock import Clock
from ...errors import InvalidConfig, InvalidInput, MissingExtra, TransportError
from ...transport.tasks import within
from ..core.config_tables import DiscoveryTable
from .known_servers import FoundServer
from .source import OBJECTS_PER_SERVER, DiscoverySource, FoundServers, found_at

LOOK_UP_SECONDS = 5.0
DNS_PORT = 53


class DnsSource(DiscoverySource):
    """The SRV records of a name. A name without records is an answer, an empty one; no answer is none."""

    def __init__(self, table: DiscoveryTable, clock: Clock, on_news: Callable[[], object]) -> None:
        super().__init__(table, clock, on_news)
        self._resolver = _resolver(table.resolver)
        self._records: list[tuple[str, int]] = []
        self._found = FoundServers()

    def found(self) -> FoundServers:
        """The latest answer."""
        return self._found

    async def run(self) -> None:
        """Ask again and again. Raises `TransportError` where there is no answer."""
        while True:
            records = await self._ask()
            is_new = records != self._records or self.confirmed_at is None
            if is_new:
                self._records, self._found = records, servers_of(records, self.table)
            self.confirm(news=is_new)
            await asyncio.sleep(self.table.look_seconds)

    async def _ask(self) -> list[tuple[str, int]]:
        import dns.exception
        import dns.resolver

        name = self.table.name or ""
        asked = self._resolver.resolve(name, "SRV", lifetime=LOOK_UP_SECONDS, raise_on_no_answer=False)
        try:
            # It bounds itself, by `asyncio.wait_for`, which may lose a cancellation: this loop would never end.
            answer = await within(2.0 * LOOK_UP_SECONDS, asked)
        except dns.resolver.NXDOMAIN:
            return []
        except (dns.exception.DNSException, OSError, asyncio.TimeoutError) as error:
            raise TransportError(f"no answer for the SRV records of {name}: {error}") from error
        records = answer.rrset or ()
        return sorted((one.target.to_text(omit_final_dot=True), one.port) for one in records if one.port)


def servers_of(records: Iterable[tuple[str, int]], table: DiscoveryTable) -> FoundServers:
    """The servers of records: targets and ports. One whose target is "." says that there is none."""
    found = FoundServers()
    for target, port in list(records)[: OBJECTS_PER_SERVER * table.servers_max]:
        if target in ("", "."):
            continue
        try:
            server = _server(f"{table.scheme}://{target}:{port}", table)
        except InvalidInput as error:
            found.unusable[f"{target}:{port}"] = str(error)
            continue
        found.servers[server.address] = server
    return found


@lru_cache(65_536)
def _server(url: str, table: DiscoveryTable) -> FoundServer:
    return found_at(url, table.server)


def _resolver(address: str | None) -> Any:
    """A resolver that asks the DNS server at HOST:PORT, or the system's. Raises `InvalidConfig`, `MissingExtra`."""
    try:
        import dns.asyncresolver
    except ImportError as error:
        raise MissingExtra("discovery by DNS needs dnspython: pip install 'preble[dns]'") from error
    resolver = dns.asyncresolver.Resolver(configure=address is None)
    if address is not None:
        host, _, port = address.rpartition(":") if address.count(":") == 1 or "]:" in address else (address, "", "")
        try:
            resolver.nameservers = [host.strip("[]")]
            resolver.port = int(port or DNS_PORT)
        except ValueError as error:
            raise InvalidConfig(f"discovery: resolver must be ADDRESS:PORT, got {address!r}: {error}") from error
    resolver.cache = None
    return resolver
