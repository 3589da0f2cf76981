"""Addresses that people write: of workers and servers. Owns which are none: a slip is refused, not waited for."""

from __future__ import annotations

import re

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
