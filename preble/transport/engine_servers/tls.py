"""TLS to servers: who may vouch for one. Owns the context with which clients of this package connect."""

from __future__ import annotations

import os
import ssl
from functools import lru_cache

from ...errors import InvalidConfig


def client_context(ca_file: str) -> ssl.SSLContext:
    """A context that checks certificates and names, by the system's authorities and those in `ca_file` (PEM), "" for
    none. Raises `InvalidConfig` for a file that holds none."""
    try:
        return _context(ca_file, os.stat(ca_file).st_mtime_ns if ca_file else 0)
    except (OSError, ssl.SSLError) as error:
        raise InvalidConfig(f"ca_file {ca_file} holds no certificates (PEM): {error.strerror or error}") from error


@lru_cache(64)
def _context(ca_file: str, changed_ns: int) -> ssl.SSLContext:
    """Made once for each file as it is now: reading the system's authorities takes milliseconds."""
    context = ssl.create_default_context()
    if ca_file:
        context.load_verify_locations(ca_file)
    return context
