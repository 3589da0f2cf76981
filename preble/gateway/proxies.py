"""Clients behind proxies: whose address counts. Owns which proxies are trusted.

`X-Forwarded-For` is a list to which each proxy adds whom it was asked by, at the right. It is read only where the
connection is one of a trusted proxy, and from the right: the first address that is none of a trusted proxy is the
client. What stands further left, anybody may have written.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, MutableMapping
from functools import lru_cache
from typing import Any

from .core.doors import UNIX, door_of
from .core.header_fields import HeaderFields

UNIX_NAME = "unix"  # in `trusted_proxies`: who connects to the Unix socket
_FORWARDED = ("x-forwarded-for", "forwarded")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class TrustedProxies:
    """Networks whose word on their clients is taken. Immutable. Raises `ValueError` for what is no network."""

    def __init__(self, names: Iterable[str]) -> None:
        names = list(names)
        self._trusts_unix = UNIX_NAME in names
        self._networks = [ipaddress.ip_network(name) for name in names if name != UNIX_NAME]
        self.trusts = lru_cache(4096)(self._trusts)

    def _trusts(self, address: str) -> bool:
        found = _address(address)
        return found is not None and any(found in network for network in self._networks)

    def look_through(self, scope: MutableMapping[str, Any], headers: HeaderFields) -> None:
        """Put the client in place of the proxy that it came by; and the scheme that it used."""
        if not (self._networks or self._trusts_unix):
            return
        client = scope.get("client")
        is_unix = client is None and door_of(scope) == UNIX
        if not (self._trusts_unix if is_unix else client is not None and self.trusts(client[0])):
            return
        nearest = None if client is None else client[0]
        entries = [entry for line in headers.getlist("x-forwarded-for") for entry in line.split(",")]
        for entry in reversed(entries):
            address = _without_port(entry.strip())
            if _address(address) is None:
                break
            nearest = address
            if not self.trusts(address):
                break
        if nearest is not None:
            scope["client"] = (nearest, 0)
        scheme = headers.get("x-forwarded-proto", "").rpartition(",")[2].strip().lower()
        if scheme in ("http", "https"):
            scope["scheme"] = scheme


def is_forwarded(headers: HeaderFields) -> bool:
    """Whether a proxy says that it asks for somebody else."""
    return any(name in headers for name in _FORWARDED)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def _without_port(entry: str) -> str:
    """`10.0.0.1:5000` and `[::1]:5000` as some proxies write them."""
    if entry.startswith("["):
        return entry[1:].partition("]")[0]
    return entry.partition(":")[0] if entry.count(":") == 1 else entry
