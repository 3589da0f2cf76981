"""Addresses: URLs that people write, and what clients connect from. Owns which of the former are none, so that a slip
is refused, not waited for; and which of the latter count as one. Those of workers are `transport.worker_address`'."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

_HOST = r"([\w.-]+|\[[0-9a-fA-F:.]+\])"
_URL = re.compile(rf"https?://{_HOST}(:(?P<port>\d{{1,5}}))?(/[!-~]*)?", re.ASCII)


def is_url(text: str) -> bool:
    """Whether it can be a URL over HTTP."""
    found = _URL.fullmatch(text)
    return found is not None and int(found["port"] or 1) in range(1, 65_536)


def is_origin(text: str) -> bool:
    """Whether it can be where a page comes from: a scheme, a name, perhaps a port, and nothing more."""
    return is_url(text) and text.count("/") == 2


def is_network(text: str) -> bool:
    """Whether it is an address or a network, as 10.0.0.0/8."""
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


@lru_cache(4096)
def counted_as(address: str) -> str:
    """What a client's address counts as where addresses are limited: of IPv6 its network of 64 bits, all of which one
    client may have; of IPv4 in IPv6 the former."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if found.version == 4:
        return address
    mapped = found.ipv4_mapped
    return str(mapped or ipaddress.ip_network((found, 64), strict=False))


def is_loopback_address(address: str) -> bool:
    """Whether a client of that address is on this machine."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback
