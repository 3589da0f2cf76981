"""Addresses: those that people write, of workers and servers, and those of clients. Owns which of the former are none,
so that a slip is refused, not waited for; and which of the latter count as one."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

ADDRESS_FORMS = "tcp://HOST:PORT, ipc://PATH or http://HOST:PORT"
_HOST = r"([\w.-]+|\[[0-9a-fA-F:.]+\])"
_URL = rf"https?://{_HOST}(:(?P<http>\d{{1,5}}))?(/[!-~]*)?"
_ADDRESS = re.compile(rf"tcp://{_HOST}:(?P<tcp>\d{{1,5}})|ipc:///?[\w./@-]{{1,100}}|{_URL}", re.ASCII)


def is_address(text: str) -> bool:
    """Whether it can be a worker's endpoint or a server's URL."""
    found = _ADDRESS.fullmatch(text)
    return found is not None and int(found["tcp"] or found["http"] or 1) in range(1, 65_536)


def is_url(text: str) -> bool:
    """Whether it can be a URL over HTTP."""
    return text.startswith("http") and is_address(text)


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
