"""The doors by which requests come in. Owns how a request says which one it was.

network   the port that everybody reaches
unix      the socket of `unix_socket`, which the gateway's own user alone may open
process   the socket of another process of this gateway, which has let the request in
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Literal

Door = Literal["network", "unix", "process"]
NETWORK: Door = "network"
UNIX: Door = "unix"
PROCESS: Door = "process"
SCOPE_KEY = "preble.door"


def door_of(scope: MutableMapping[str, Any]) -> Door:
    """By which door it came in; what does not say has come over the network."""
    door: Door = scope.get(SCOPE_KEY, NETWORK)
    return door
