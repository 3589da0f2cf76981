"""The servers that a source of discovery knew last, in a file, for a gateway that starts while the source cannot be
asked. Owns the file's form, its bounds and how old it may be; when it is written and read is `discovery`'s.

No key is in it: what the source's table says of all its servers holds for those of the file, too, and a server with a
key of its own is left out. The file appears whole or not at all, for its user alone; one that another user owns is not
read, for whoever writes it chooses where requests and the servers' key go.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from ...errors import InvalidInput, TransportError
from ...transport.engine_servers.server_info import ServerOptions
from ...transport.worker_address import check_worker_address, is_server
from ..core.config_tables import DiscoveryTable, options_of, server_at
from .known_servers import FoundServer, PodName

FORMAT, VERSION = "preble-servers", 1
FILE_BYTES_MAX = 16 << 20
AGE_SECONDS_MAX = 86_400.0  # by then an address may be somebody else's
_OPTIONS = tuple(one.name for one in fields(ServerOptions))

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class _KeptServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One of them. `options`: what differs from what the table says of all."""

    address: Text
    options: dict[str, Any] = {}
    pod: tuple[Text, Text] | None = None


class _KeptFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of it. `confirmed_at`: when the source last said so, in seconds since 1970."""

    format: str
    version: int
    source: str
    confirmed_at: float
    servers: Annotated[list[_KeptServer], msgspec.Meta(max_length=65_535)]


class KeptServers(NamedTuple):
    """What a file says: the servers, and how many seconds ago their source did."""

    servers: list[FoundServer]
    age_seconds: float


def write_kept(table: DiscoveryTable, source: str, servers: Iterable[FoundServer], confirmed_at: float) -> None:
    """Write what a source knows into its table's file; `source`: what it is called, `confirmed_at`: when it last said
    so, in seconds since 1970. Raises `TransportError` where that is not possible; then the file is as it was."""
    final = Path(table.keep or "")
    kept = [entry for server in servers if (entry := _entry(server, table)) is not None]
    data = msgspec.json.encode(_KeptFile(FORMAT, VERSION, source, confirmed_at, kept))
    if len(data) > FILE_BYTES_MAX:
        raise TransportError(f"{final} would have {len(data)} bytes, the limit is {FILE_BYTES_MAX}")
    building = final.with_name(f".{final.name}.{os.getpid()}")
    try:
        building.unlink(missing_ok=True)  # of an earlier process of that number
        with os.fdopen(os.open(building, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(building, final)
    except OSError as error:
        with contextlib.suppress(OSError):
            building.unlink()
        raise TransportError(f"{final} cannot be written: {error.strerror or error}") from error


def read_kept(table: DiscoveryTable, source: str, now: float) -> KeptServers | None:
    """What a table's file says at `now`, in seconds since 1970; None where there is none. Raises `InvalidInput` naming
    the file, for one that is damaged, too old, of another source or another user."""
    path = Path(table.keep or "")
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                raise InvalidInput(f"{path} belongs to another user")
            data = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror or error}") from error
    if len(data) > FILE_BYTES_MAX:
        raise InvalidInput(f"{path} has more than {FILE_BYTES_MAX} bytes")
    try:
        content = msgspec.json.decode(data, type=_KeptFile)
        if (content.format, content.version) != (FORMAT, VERSION):
            raise InvalidInput(f"{path} is no list of servers of version {VERSION}")
        if content.source != source:
            raise InvalidInput(f"{path} is of {content.source}, not of {source}")
        age = max(now - content.confirmed_at, 0.0)
        if not age <= AGE_SECONDS_MAX:
            raise InvalidInput(f"{path} is {age / 3600:.0f} hours old, the limit is {AGE_SECONDS_MAX / 3600:.0f}")
        return KeptServers([_found(entry, table) for entry in content.servers[: table.servers_max]], age)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise InvalidInput(f"{path} is damaged: {error}") from error


def _usual(address: str, table: DiscoveryTable) -> ServerOptions | None:
    """What the table says of a server at an address; None of a `preble worker`."""
    if not is_server(address):
        return None
    return options_of(server_at(address.partition("#")[0], table.server))


def _entry(server: FoundServer, table: DiscoveryTable) -> _KeptServer | None:
    usual, options = _usual(server.address, table), server.options
    said: dict[str, Any] = {}
    if usual is not None and options is not None:
        said = {name: getattr(options, name) for name in _OPTIONS if getattr(options, name) != getattr(usual, name)}
    if "api_key" in said:
        return None
    return _KeptServer(server.address, said, None if server.pod is None else (server.pod.namespace, server.pod.name))


def _found(entry: _KeptServer, table: DiscoveryTable) -> FoundServer:
    """Raises `InvalidInput`, `ValidationError` for what can be no server."""
    try:
        check_worker_address(entry.address)
    except InvalidInput as error:
        raise InvalidInput(f"{table.keep}: {error}") from error
    usual = _usual(entry.address, table)
    if "api_key" in entry.options or (usual is None and entry.options):
        raise InvalidInput(f"{table.keep}: {entry.address} has options that are not kept")
    options = usual
    if usual is not None and entry.options:
        known = {name: getattr(usual, name) for name in _OPTIONS}
        options = msgspec.convert({**known, **entry.options}, ServerOptions)
    return FoundServer(entry.address, options, pod=None if entry.pod is None else PodName(*entry.pod))
