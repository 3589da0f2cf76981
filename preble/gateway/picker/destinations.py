"""Servers as the data plane names them, `ip:port`. Owns that name of each server, the way back from a name to its
workers, and which of them a request may go to by the subset that the data plane allows.

The table is made anew when servers come, go or change their state; it has an entry for each address, and a server that
is added or removed while the picker runs, by whomever, needs nothing more.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from typing import Any
from urllib.parse import urlsplit

from ...errors import InvalidConfig
from ...router.router import Router
from ...types import BOTH, Role

_PORTS = {"http": 80, "https": 443}


class Destinations:
    """The servers of one router. Belongs to its loop."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._membership = -1
        self._names: dict[str, str] = {}  # by URL
        self._workers: dict[str, frozenset[str]] = {}  # ids, by destination

    def of(self, url: str) -> str:
        """What the data plane calls the server at a URL; "" for one that it cannot be sent to."""
        self._refresh()
        found = self._names.get(url)
        return destination_of(url) if found is None else found

    def outside(self, allowed: Any) -> frozenset[str]:
        """The ids of the workers that a request must not go to: those that a subset leaves out, which is a list of
        destinations, or text with commas (None: all are in it), and those without a destination."""
        self._refresh()
        if allowed is None:
            return self._workers.get("", frozenset())
        names = allowed.split(",") if isinstance(allowed, str) else allowed
        inside: set[str] = set()
        for name in filter(None, names):
            inside |= self._workers.get(name.strip(), frozenset())
        return frozenset(self._router.fleet.worker_ids) - inside

    def workers_at(self, destination: str) -> frozenset[str]:
        """The ids of the workers of a destination; of a server with several ranks there are as many."""
        self._refresh()
        return self._workers.get(destination, frozenset())

    def others(self, chosen: str, exclude: Iterable[str], count: int, roles: Collection[Role] = (BOTH,)) -> list[str]:
        """At most `count` further destinations, of workers with these roles, those with the fewest requests first.
        O(workers)."""
        if count <= 0:
            return []
        self._refresh()
        fleet, left_out = self._router.fleet, {*exclude, *self._router.fleet.unusable}
        if fleet.server_roles:
            left_out.update(name for name in fleet.worker_ids if fleet.server_roles.get(name, BOTH) not in roles)
        at: dict[str, int] = {}
        for name, ids in self._workers.items():
            usable = ids - left_out
            if usable and name not in ("", chosen):
                at[name] = sum(fleet.worker(worker_id).relayed for worker_id in usable)
        return sorted(at, key=lambda name: (at[name], name))[:count]

    def have_both(self, exclude: Collection[str]) -> bool:
        """Whether a worker does both, prefill and decode, and is not in `exclude`. O(workers) where any does not."""
        roles = self._router.fleet.server_roles
        return not roles or any(name not in roles and name not in exclude for name in self._router.fleet.worker_ids)

    def _refresh(self) -> None:
        fleet = self._router.fleet
        if fleet.membership == self._membership:
            return
        self._membership = fleet.membership
        self._names.clear()
        found: dict[str, set[str]] = {}
        for address, worker in fleet.workers.items():
            url = address.partition("#")[0]
            if url not in self._names:
                self._names[url] = destination_of(url)
            if worker.worker_id in fleet.worker_ids:
                found.setdefault(self._names[url], set()).add(worker.worker_id)
        self._workers = {name: frozenset(ids) for name, ids in found.items()}


def destination_of(url: str) -> str:
    """`ip:port` of a server's URL; "" where its host is a name, or it has a path: the data plane knows neither."""
    parts = urlsplit(url)
    try:
        address = ipaddress.ip_address(parts.hostname or "")
        port = _PORTS[parts.scheme] if parts.port is None else parts.port
    except (ValueError, KeyError):
        return ""
    if parts.path.strip("/") or parts.scheme not in _PORTS:
        return ""
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def check_destinations(addresses: Iterable[str]) -> None:
    """Raise `InvalidConfig` for an address that a data plane cannot be sent to."""
    for address in addresses:
        if not destination_of(address):
            raise InvalidConfig(
                f"workers: {address} is no server that a data plane can be sent to: it knows servers by address and "
                "port, like http://10.0.0.1:8000"
            )
