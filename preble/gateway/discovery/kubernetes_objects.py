"""Servers in what Kubernetes says: from pods and EndpointSlices to addresses, readiness and options. Owns which fields,
annotations and labels are read; asks nobody.

Of a pod, an annotation, else a label, `preble/NAME` says what a table of `servers` would: `model`, `rank`, `role`,
`block-size`, `kv-capacity-tokens`, `events-topic`, `require-events`, and `cost-model`, which may name a preset but no
file. `port`, `events-port` and `replay-port` are ports of the pod. None of them can name a secret. EndpointSlices have
the labels of their Service; where pods are read, too, the pod's go first. A pod that says no `preble/role` has the one
that llm-d's label gives it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from ..._cost import CostModel
from ...errors import InvalidConfig
from ...transport.engine_servers.server_info import ServerOptions
from ...types import BOTH, DECODE, PREFILL
from ..core.config_tables import DiscoveryTable, ServerTable, address_of, check_servers, options_of, server_at
from .known_servers import FoundServer, PodName, Readiness
from .source import FoundServers

PREFIX = "preble/"
LLMD_ROLE = "llm-d.ai/role"
LLMD_ROLES = {
    **dict.fromkeys(("prefill", "encode-prefill"), PREFILL),
    **dict.fromkeys(("decode", "encode-decode"), DECODE),
    **dict.fromkeys(("prefill-decode", "both", "encode-prefill-decode"), BOTH),
}  # one that encodes only is no server
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
FIELDS = ("model", "rank", "role", "block-size", "kv-capacity-tokens", "events-topic", "require-events", "cost-model")
PORTS = {"events-port": "events_endpoint", "replay-port": "replay_endpoint"}
OWN = frozenset({*FIELDS, *PORTS, "port"})
SERVERS_KEPT = 65_536  # whose tables are kept, not made anew for each report


# --- what Kubernetes has, as far as it is read ------------------------------------------------------------------------


class ObjectMeta(msgspec.Struct, rename="camel"):
    """The head of every object."""

    name: str = ""
    namespace: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None

    def said(self) -> tuple[tuple[str, str], ...]:
        """Its annotations and labels that are for us."""
        both = {**(self.labels or {}), **(self.annotations or {})}
        found = {name[len(PREFIX) :]: both[name] for name in both if name.startswith(PREFIX)}
        if LLMD_ROLE in both:
            found.setdefault("role", LLMD_ROLES.get(both[LLMD_ROLE], both[LLMD_ROLE]))
        return tuple(sorted(found.items()))


class ContainerPort(msgspec.Struct, rename="camel"):
    """A port of a container."""

    container_port: int
    name: str = ""
    protocol: str = "TCP"


class PodContainer(msgspec.Struct, rename="camel"):
    """A container, of which ports alone count."""

    ports: list[ContainerPort] | None = None


class PodSpec(msgspec.Struct, rename="camel"):
    """What a pod is to have."""

    containers: list[PodContainer] | None = None


class PodCondition(msgspec.Struct, rename="camel"):
    """Something that is so of a pod, or not."""

    type: str = ""
    status: str = ""


class PodStatus(msgspec.Struct, rename="camel"):
    """How a pod is."""

    phase: str = ""
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: list[PodCondition] | None = None


class Pod(msgspec.Struct, rename="camel"):
    """A pod."""

    metadata: ObjectMeta
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)

    @property
    def readiness(self) -> Readiness:
        """By its condition Ready, which is what a Service goes by."""
        if self.metadata.deletion_timestamp:
            return Readiness.TERMINATING
        is_ready = any(one.type == "Ready" and one.status == "True" for one in self.status.conditions or ())
        return Readiness.READY if is_ready else Readiness.NOT_READY

    @property
    def ports(self) -> tuple[tuple[str, int], ...]:
        """Names and numbers of its containers' TCP ports."""
        ports = [port for container in self.spec.containers or () for port in container.ports or ()]
        return tuple((port.name, port.container_port) for port in ports if port.protocol == "TCP")

    @property
    def deletion_cost(self) -> int | None:
        """What is written on it; None for nothing, or no number."""
        text = (self.metadata.annotations or {}).get(DELETION_COST, "")
        return int(text) if text[:12].removeprefix("-").isdecimal() and len(text) <= 11 else None


class EndpointConditions(msgspec.Struct, rename="camel"):
    """How an endpoint is; None: not known."""

    ready: bool | None = None
    terminating: bool | None = None


class ObjectReference(msgspec.Struct, rename="camel"):
    """Another object."""

    kind: str = ""
    name: str = ""
    namespace: str = ""


class SliceEndpoint(msgspec.Struct, rename="camel"):
    """One of a Service's endpoints."""

    addresses: list[str] | None = None
    conditions: EndpointConditions | None = None
    target_ref: ObjectReference | None = None

    @property
    def readiness(self) -> Readiness:
        """Kubernetes wants an endpoint whose readiness is not known taken as ready."""
        conditions = self.conditions or EndpointConditions()
        if conditions.terminating:
            return Readiness.TERMINATING
        return Readiness.NOT_READY if conditions.ready is False else Readiness.READY


class EndpointPort(msgspec.Struct, rename="camel"):
    """A port of all endpoints of a slice."""

    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class EndpointSlice(msgspec.Struct, rename="camel"):
    """Some of a Service's endpoints."""

    metadata: ObjectMeta
    address_type: str = "IPv4"
    endpoints: list[SliceEndpoint] | None = None
    ports: list[EndpointPort] | None = None


# --- what it is for the gateway ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A pod or an endpoint. `ports`: (name, number)."""

    name: str
    host: str
    readiness: Readiness
    ports: tuple[tuple[str, int], ...]
    said: tuple[tuple[str, str], ...]
    pod: PodName | None
    deletion_cost: int | None = None


def servers_in(
    table: DiscoveryTable, pods: Mapping[str, Pod] | None, slices: Mapping[str, EndpointSlice] | None
) -> FoundServers:
    """What pods, by name, and EndpointSlices, by name, say of a table's servers; None: they are not asked for. With
    both, an endpoint counts whose pod is among the pods. Of one pod's several addresses the first counts. O(both)."""
    found = FoundServers()
    seen: set[PodName] = set()
    for one in _of_pods(pods or {}) if slices is None else _of_slices(slices, pods):
        if one.pod is not None and one.pod in seen:
            continue
        try:
            address, options = _place(one.host, one.ports, one.said, table)
        except InvalidConfig as error:
            found.unusable[one.name] = str(error)
            continue
        if one.pod is not None:
            seen.add(one.pod)
        found.servers.setdefault(address, FoundServer(address, options, one.readiness, one.pod, one.deletion_cost))
    return found


def _of_pods(pods: Mapping[str, Pod]) -> Iterator[_Candidate]:
    for name, pod in sorted(pods.items()):
        if pod.status.pod_ip and pod.status.phase not in ("Succeeded", "Failed"):
            place = PodName(pod.metadata.namespace, name)
            said = pod.metadata.said()
            yield _Candidate(name, pod.status.pod_ip, pod.readiness, pod.ports, said, place, pod.deletion_cost)


def _of_slices(slices: Mapping[str, EndpointSlice], pods: Mapping[str, Pod] | None) -> Iterator[_Candidate]:
    """Slices of IPv4 come before those of IPv6: a pod that has both is one server."""
    for name, one in sorted(slices.items(), key=lambda item: (item[1].address_type, item[0])):
        ports = tuple(
            (port.name or "", port.port) for port in one.ports or () if port.port and port.protocol in (None, "TCP")
        )
        for number, endpoint in enumerate(one.endpoints or ()):
            target = endpoint.target_ref
            is_pod = target is not None and target.kind == "Pod"
            pod = pods.get(target.name) if pods is not None and target is not None and is_pod else None
            if not endpoint.addresses or (pods is not None and pod is None):
                continue
            is_ending = pod is not None and pod.readiness is Readiness.TERMINATING
            said = dict(one.metadata.said()) | dict(() if pod is None else pod.metadata.said())
            place = None
            if target is not None and is_pod:
                place = PodName(target.namespace or one.metadata.namespace, target.name)
            yield _Candidate(
                f"{name}[{number}]" if place is None else place.name,
                endpoint.addresses[0],
                Readiness.TERMINATING if is_ending else endpoint.readiness,
                ports,
                tuple(sorted(said.items())),
                place,
                None if pod is None else pod.deletion_cost,
            )


@lru_cache(SERVERS_KEPT)
def _place(
    host: str, ports: tuple[tuple[str, int], ...], said: tuple[tuple[str, str], ...], table: DiscoveryTable
) -> tuple[str, ServerOptions | None]:
    """A server's address and options. Raises `InvalidConfig` with what is wrong with what is said of it."""
    names = dict(said)
    unknown = sorted(names.keys() - OWN)
    if unknown:
        raise InvalidConfig(f"{PREFIX}{unknown[0]} is no annotation of ours; there are {', '.join(sorted(OWN))}")
    port = _number(names["port"], "port") if "port" in names else _port(ports, table.port)
    shown = f"[{host}]" if _is_ipv6(host) else host
    if table.scheme == "tcp":
        return f"tcp://{shown}:{port}", None
    server = _table(f"{table.scheme}://{shown}:{port}", shown, names, table)
    check_servers([server], [], f"{PREFIX}*")
    return address_of(server), options_of(server)


def _table(url: str, host: str, said: Mapping[str, str], table: DiscoveryTable) -> ServerTable:
    given: dict[str, Any] = {name.replace("-", "_"): said[name] for name in FIELDS if name in said}
    cost = given.get("cost_model")
    if cost is not None and cost not in CostModel.presets():
        raise InvalidConfig(f"{PREFIX}cost-model must name a preset, got {cost[:80]!r}; `server` may name a file")
    given |= {key: f"tcp://{host}:{_number(said[name], name)}" for name, key in PORTS.items() if name in said}
    try:
        checked = msgspec.convert({"url": url, **given}, ServerTable, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidConfig(f"{PREFIX}*: {error}") from error
    return server_at(url, table.server, **{name: getattr(checked, name) for name in given})


def _port(ports: tuple[tuple[str, int], ...], wanted: str | int | None) -> int:
    if isinstance(wanted, str) and wanted.isdecimal():
        wanted = int(wanted)
    if isinstance(wanted, int):
        return wanted
    fitting = sorted({number for name, number in ports if wanted is None or name == wanted})
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(name or str(number) for name, number in ports) or "none"
    if wanted is not None:
        raise InvalidConfig(f"no port is called {wanted!r}; there are: {names}")
    raise InvalidConfig(f"one port must be named (`port`, or {PREFIX}port); there are: {names}")


def _number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and 0 < int(text) <= 65_535):
        raise InvalidConfig(f"{PREFIX}{name} must be a port from 1 to 65535, got {text[:40]!r}")
    return int(text)


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
