"""What is known of the servers that one source of discovery names, and what is to be done about them. Owns the rules,
as one function of what was known, what the source says, what runs, and the time; it asks and changes nobody.

    the source says                              the server is
    ready                                        joined
    not ready                                    given no new requests; but where more than half of all are not ready,
                                                 nobody's word is taken but the servers' own
    terminating, or nothing more of it           drained; but an answer that says nothing of more than half of those
                                                 that serve is doubted for `doubt_seconds`
    (it drains, and nothing runs there,          removed
    or `drain_seconds` have passed)
    ready, while it drains                       removed and joined anew: a drain has no way back
    something else of its port, model or cost    removed and joined anew
    ready, beyond `servers_max`                  left out, and counted; those that are known stay

A source that cannot be reached says nothing, and nothing is what changes. Doubts cost little: a server that is really
gone does not answer, and gets no requests for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal, NamedTuple

from ...transport.engine_servers.server_info import ServerOptions


class Readiness(Enum):
    """What a source says of a server."""

    READY = "ready"
    NOT_READY = "not_ready"
    TERMINATING = "terminating"


class PodName(NamedTuple):
    """A pod of Kubernetes."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class FoundServer:
    """A server as a source names it. `address`: a worker's; `options`: None of a `preble worker`. `pod`: where it runs,
    and `deletion_cost` what is written on that, None where that is not known."""

    address: str
    options: ServerOptions | None = None
    readiness: Readiness = Readiness.READY
    pod: PodName | None = None
    deletion_cost: int | None = None


Phase = Literal["serving", "withheld", "draining"]


@dataclass(frozen=True, slots=True)
class KnownServer:
    """A server that was joined. `since`: when its phase began, by the gateway's clock."""

    found: FoundServer
    phase: Phase
    since: float


@dataclass(frozen=True, slots=True)
class KnownServers:
    """All that were joined, by address. `doubted_since`: when the source's answer began to lack more than half of
    them; None: it does not. `left_out`: found beyond the bound."""

    servers: Mapping[str, KnownServer] = field(default_factory=dict)
    doubted_since: float | None = None
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class DiscoveryLimits:
    """Times in seconds, and how many servers a source may name."""

    doubt_seconds: float = 30.0
    drain_seconds: float = 30.0
    servers_max: int = 1024


class Change(NamedTuple):
    """What is to be done with a server."""

    action: Literal["join", "withhold", "release", "drain", "remove"]
    found: FoundServer


def reconcile(
    known: KnownServers,
    answer: Mapping[str, FoundServer],
    live: Mapping[str, int],
    now: float,
    limits: DiscoveryLimits,
) -> tuple[KnownServers, list[Change]]:
    """What is known after the latest `answer` of the source, by address, and what is to be done, in order.

    `live`: requests that run at each address; of those that drain, no entry means none. To be called again as time
    passes, with the same answer. O(servers).
    """
    doubted_since = _doubted_since(known, answer, now, limits)
    withholds = _may_withhold(known, answer)
    kept: dict[str, KnownServer] = {}
    changes: list[Change] = []
    for address, server in known.servers.items():
        found = answer.get(address)
        if server.phase == "draining":
            is_over = not live.get(address) or now - server.since >= limits.drain_seconds
            after, done = _draining(server, found, is_over, now)
        elif found is None:
            after, done = (server, []) if doubted_since is not None else _drain(server, now)
        elif found.readiness is Readiness.TERMINATING:
            after, done = _drain(server, now)
        else:
            after, done = _serving(server, found, withholds, now)
        if after is not None:
            kept[address] = after
        changes += done
    left_out = 0
    for address, found in answer.items():
        if found.readiness is not Readiness.READY or address in known.servers:
            continue
        if len(kept) >= limits.servers_max:
            left_out += 1
            continue
        kept[address] = KnownServer(found, "serving", now)
        changes.append(Change("join", found))
    return KnownServers(kept, doubted_since, left_out), changes


def _doubted_since(
    known: KnownServers, answer: Mapping[str, FoundServer], now: float, limits: DiscoveryLimits
) -> float | None:
    """When the doubt about such an answer began; None where there is none, or it has lasted long enough."""
    serving = [address for address, server in known.servers.items() if server.phase != "draining"]
    missing = sum(address not in answer for address in serving)
    if 2 * missing <= len(serving):
        return None
    since = now if known.doubted_since is None else known.doubted_since
    return since if now - since < limits.doubt_seconds else None


def _may_withhold(known: KnownServers, answer: Mapping[str, FoundServer]) -> bool:
    """Whether at most half of those that serve, and that the source names, are not ready."""
    named = [
        answer[address].readiness
        for address, server in known.servers.items()
        if server.phase != "draining" and address in answer
    ]
    return 2 * named.count(Readiness.NOT_READY) <= len(named)


_After = tuple[KnownServer | None, list[Change]]


def _drain(server: KnownServer, now: float) -> _After:
    return replace(server, phase="draining", since=now), [Change("drain", server.found)]


def _draining(server: KnownServer, found: FoundServer | None, is_over: bool, now: float) -> _After:
    if found is not None and found.readiness is Readiness.READY:
        return _anew(server, found, now)
    if is_over:
        return None, [Change("remove", server.found)]
    return server, []


def _serving(server: KnownServer, found: FoundServer, withholds: bool, now: float) -> _After:
    if found.options != server.found.options:
        return _anew(server, found, now)
    phase: Phase = "withheld" if withholds and found.readiness is Readiness.NOT_READY else "serving"
    if phase == server.phase:
        return replace(server, found=found), []
    return KnownServer(found, phase, now), [Change("withhold" if phase == "withheld" else "release", found)]


def _anew(server: KnownServer, found: FoundServer, now: float) -> _After:
    """Left, and joined again where it is ready; else when it will be."""
    gone = Change("remove", server.found)
    if found.readiness is not Readiness.READY:
        return None, [gone]
    return KnownServer(found, "serving", now), [gone, Change("join", found)]
