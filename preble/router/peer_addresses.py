"""Where the gateways of other machines are found: addresses as an operator names them, the ports of their processes,
and names that stand for several addresses. Owns looking names up again; connecting is `sibling_routers`'.

    tcp://10.0.0.7:7070            one gateway
    tcp://preble-peers:7070        all addresses that the name has, such as those of a headless service

Every gateway of a deployment has as many processes as this one: process N listens N ports behind the first. A name that
cannot be looked up now keeps the addresses that it had. Belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from ..errors import InvalidConfig, InvalidInput
from ..transport.security import check_bind, is_loopback
from ..transport.worker_address import check_worker_address

logger = logging.getLogger("preble.router")

LOOK_UP_SECONDS = 5.0
ADDRESSES_MAX = 256  # of one name; what is beyond is not connected
_SCHEME = "tcp://"
_ANY = "*"

LookUp = Callable[[str, int], Awaitable[Sequence[str]]]


def check_peers(peers: Sequence[str], bind: str | None, *, processes: int, has_keys: bool, insecure: bool) -> None:
    """Raise `InvalidConfig` for what can be no peer's address or no place to listen, or lets strangers in; nothing
    changes."""
    if bind is None:
        if peers:
            raise InvalidConfig("peers needs peer_bind: where they find this gateway")
        return
    host, port = _host_and_port("peer_bind", bind.replace(f"{_SCHEME}{_ANY}:", f"{_SCHEME}0.0.0.0:"))
    if port + processes - 1 > 65_535:
        raise InvalidConfig(f"peer_bind {bind}: {processes} processes need as many ports from there on")
    check_bind(f"{_SCHEME}{host}:{port}", has_keys=has_keys, insecure=insecure)
    for peer in peers:
        _host_and_port("peers", peer)
        if not (has_keys or insecure or is_loopback(peer)):
            raise InvalidConfig(
                f"peers: {peer} is beyond loopback, and without peer_keys anyone there could report requests; give "
                "them, or set insecure: true where something else keeps strangers out"
            )


def _host_and_port(name: str, address: str) -> tuple[str, int]:
    try:
        check_worker_address(address)
    except InvalidInput as error:
        raise InvalidConfig(f"{name}: {error}") from error
    if not address.startswith(_SCHEME):
        raise InvalidConfig(f"{name}: gateways report to each other over tcp://HOST:PORT, got {address!r}")
    return split(address)


def split(address: str) -> tuple[str, int]:
    """(host, port) of tcp://HOST:PORT; an IPv6 address keeps its brackets."""
    host, _, port = address[len(_SCHEME) :].rpartition(":")
    return host, int(port)


def bound_at(bind: str, process: int) -> str:
    """Where a process of this gateway listens."""
    host, _, port = bind[len(_SCHEME) :].rpartition(":")
    return f"{_SCHEME}{host}:{int(port) + process}"


class PeerAddresses:
    """The endpoints of `peers`, each with `processes` of them. `found(endpoints)` is called with all of them at the
    first look and whenever they are others. `look_up(host, port)` gives a name's addresses; raises OSError."""

    def __init__(
        self,
        peers: Sequence[str],
        processes: int,
        found: Callable[[Sequence[str]], object],
        *,
        look_up: LookUp | None = None,
        look_up_seconds: float = LOOK_UP_SECONDS,
    ) -> None:
        self._peers = [split(peer) for peer in peers]
        self._processes = processes
        self._found = found
        self._look_up = look_up or _system_look_up
        self._seconds = look_up_seconds
        self._known: dict[str, tuple[str, ...]] = {}  # name -> its addresses, when it was looked up last

    async def run(self) -> None:
        """Look, and look again, until cancelled. `found` is called each time: who is gone may have ended meanwhile."""
        while True:
            await self.look()
            await asyncio.sleep(self._seconds)

    async def look(self) -> None:
        """Look all names up once."""
        endpoints = []
        for host, port in self._peers:
            for address in await self._addresses(host, port):
                endpoints += [f"{_SCHEME}{address}:{port + process}" for process in range(self._processes)]
        self._found(list(dict.fromkeys(endpoints)))

    async def _addresses(self, host: str, port: int) -> Sequence[str]:
        if _is_address(host):
            return (host,)
        try:
            found = sorted(set(await self._look_up(host, port)))
        except OSError as error:
            level = logging.DEBUG if host in self._known else logging.WARNING
            logger.log(level, "the name %s of peers cannot be looked up: %s", host, error)
            return self._known.setdefault(host, ())
        if len(found) > ADDRESSES_MAX:
            logger.warning("the name %s has %d addresses; %d are used", host, len(found), ADDRESSES_MAX)
        self._known[host] = tuple(f"[{one}]" if ":" in one else one for one in found[:ADDRESSES_MAX])
        return self._known[host]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


async def _system_look_up(host: str, port: int) -> Sequence[str]:
    rows = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(row[4][0]) for row in rows]
