"""Servers from a file that somebody keeps up to date, read whenever it has changed. Owns its form and bounds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ...clock import Clock
from ...errors import InvalidInput, TransportError
from ..core.config_tables import DiscoveryTable, ServerTable, with_secrets
from ..yaml_text import decode_yaml
from .known_servers import FoundServer
from .source import DiscoverySource, FoundServers, found_at, found_server

FILE_BYTES_MAX = 8 << 20
_Signature = tuple[int, int, int]


class FileSource(DiscoverySource):
    """A list of tables as in `servers`, or of addresses, in YAML or JSON. A file that is gone, or wrong, says nothing:
    the servers stay."""

    def __init__(
        self,
        table: DiscoveryTable,
        clock: Clock,
        on_news: Callable[[], object],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        super().__init__(table, clock, on_news)
        self._environment = environment
        self._signature: _Signature | None = None
        self._found = FoundServers()

    def found(self) -> FoundServers:
        """The latest answer."""
        return self._found

    async def run(self) -> None:
        """Look at the file again and again. Raises `TransportError` with what is wrong with it."""
        while True:
            signature, found = await asyncio.to_thread(self._look)
            if found is not None:
                self._found, self._signature = found, signature
            self.confirm(news=found is not None)
            await asyncio.sleep(self.table.look_seconds)

    def _look(self) -> tuple[_Signature, FoundServers | None]:
        """The file's content, where it has changed. A directory of Kubernetes is changed by another link in the path,
        which `stat` follows."""
        path = Path(self.table.path or "")
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                signature = (status.st_mtime_ns, status.st_size, status.st_ino)
                if signature == self._signature:
                    return signature, None
                data = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            self._signature = None
            raise TransportError(f"{path} cannot be read: {error.strerror}") from error
        self._signature = None  # until it has been read as a whole
        return signature, servers_of(data, path, self.table, self._environment)


def servers_of(data: bytes, path: Path, table: DiscoveryTable, environment: Mapping[str, str]) -> FoundServers:
    """The servers of a file. Raises `TransportError` naming what is wrong: a file that is half right is not taken."""
    if len(data) > FILE_BYTES_MAX:
        raise TransportError(f"{path} has more than {FILE_BYTES_MAX} bytes")
    try:
        content = msgspec.json.decode(data) if path.suffix == ".json" else decode_yaml(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise TransportError(f"{path}: {error}") from error
    if not isinstance(content, list):
        raise TransportError(f"{path} must hold a list of servers")
    found = FoundServers()
    for number, item in enumerate(content):
        try:
            server = _server(item, table, environment)
        except (msgspec.ValidationError, InvalidInput) as error:
            raise TransportError(f"{path}, entry {number}: {error}") from error
        if server.address in found.servers:
            raise TransportError(f"{path}, entry {number}: {server.address} is named twice")
        found.servers[server.address] = server
    return found


def _server(item: Any, table: DiscoveryTable, environment: Mapping[str, str]) -> FoundServer:
    if isinstance(item, str):
        return found_at(item, table.server)
    given = item if isinstance(item, dict) else {}
    known = msgspec.to_builtins(table.server)
    if {"api_key", "api_key_variable"} & given.keys():
        known.pop("api_key", None)
    (server,) = with_secrets([msgspec.convert({**known, **given}, ServerTable)], environment)
    return found_server(server)
