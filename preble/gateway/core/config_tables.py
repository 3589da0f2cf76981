"""Tables of the gateway's configuration: servers that run already, each with what is known of it, and keys, each with
its limits. Owns their fields; a secret is given itself or by the name of the variable that holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from ..._cost import CostModel
from ...errors import InvalidConfig, InvalidInput
from ...transport.engine_servers.server_info import ServerOptions
from ...transport.engine_servers.tls import client_context
from ...transport.worker_address import check_worker_address, is_server

Name = Annotated[str, Meta(min_length=1, max_length=1024)]
Rate = Annotated[float, Meta(gt=0, le=1e12)]
KEY_CHARS_MIN = 8
Secret = Annotated[str, Meta(min_length=1, max_length=4096)]
AnyServer = TypeVar("AnyServer", bound="ServerFields")


class ServerFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is known of an SGLang or vLLM server; what is not given is what the server says of itself."""

    api_key: Annotated[Secret | None, Meta(description="Its own API key, as its --api-key is.")] = None
    api_key_variable: Annotated[
        Name | None, Meta(description="Name of the environment variable that holds its API key, instead.")
    ] = None
    ca_file: Annotated[
        Name | None,
        Meta(description="Certificates (PEM) of who may vouch for an https:// server, beside the system's own."),
    ] = None
    rank: Annotated[
        Annotated[int, Meta(ge=0, le=65_535)] | None,
        Meta(description="The data-parallel rank of it to use; each rank is a table of its own. Without, rank 0."),
    ] = None
    model: Annotated[Name | None, Meta(description="The model to use there, of several that it serves.")] = None
    block_size: Annotated[
        Annotated[int, Meta(ge=1, le=65_536)] | None, Meta(description="Tokens of a block of its cache.")
    ] = None
    kv_capacity_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=2**31 - 1)] | None, Meta(description="Tokens that its cache holds.")
    ] = None
    below_capacity_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=2**31 - 1)] | None,
        Meta(description="Tokens that its host memory and disk hold, where its events say nothing of them."),
    ] = None
    role: Annotated[
        Literal["both", "prefill", "decode"] | None,
        Meta(
            description="What it does of a request: prefill the prompt, decode the output, or both. SGLang says so "
            "itself (--disaggregation-mode); vLLM needs a --kv-transfer-config."
        ),
    ] = None
    by_priority: Annotated[
        bool | None,
        Meta(
            description="Whether it serves by the `priority` of requests: then batch work, and what a tenant wants "
            "beyond its share, is sent one that comes later. SGLang says so itself (--enable-priority-scheduling); for "
            "vLLM started with --scheduling-policy priority it must be said."
        ),
    ] = None
    events_endpoint: Annotated[
        Name | None,
        Meta(description="ZeroMQ endpoint of its cache events, of rank 0; further ranks use the next ports."),
    ] = None
    replay_endpoint: Annotated[
        Name | None, Meta(description="Where lost events can be asked for again, of rank 0.")
    ] = None
    events_topic: Annotated[Name | None, Meta(description="Topic of its events.")] = None
    require_events: Annotated[
        bool, Meta(description="Refuse it where it publishes no cache events, rather than estimate what it caches.")
    ] = False
    cost_model: Annotated[
        Name | None,
        Meta(
            description="What work takes there: a file that `preble profile --url` wrote, or a preset's name; without, "
            "it is learned from the first requests."
        ),
    ] = None


class ServerTable(ServerFields, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One of these servers, and where it is."""

    url: Annotated[Name, Meta(description="Where it is: http://HOST:PORT or https://HOST:PORT.")]


class DiscoveryTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where servers are looked for while the gateway runs."""

    source: Annotated[
        Literal["kubernetes", "dns", "file"],
        Meta(description="kubernetes (needs `preble[kubernetes]`), dns (SRV records; needs `preble[dns]`), or file."),
    ]
    namespace: Annotated[Name | None, Meta(description="kubernetes: the namespace; else the gateway's own.")] = None
    service: Annotated[
        Name | None, Meta(description="kubernetes: the Service whose EndpointSlices name the servers.")
    ] = None
    selector: Annotated[
        Name | None,
        Meta(
            description="kubernetes: labels of the pods, as kubectl takes them; beside `service`, of those "
            "of its endpoints that count, whose annotations are read then, too."
        ),
    ] = None
    name: Annotated[
        Name | None, Meta(description="dns: the name of the SRV records, such as _http._tcp.engines.example.com.")
    ] = None
    resolver: Annotated[
        Name | None, Meta(description="dns: address and port of the DNS server to ask; else the system's.")
    ] = None
    path: Annotated[
        Name | None,
        Meta(description="file: a YAML or JSON list of tables as in `servers`, or of addresses as in `workers`."),
    ] = None
    port: Annotated[
        str | int | None,
        Meta(description="kubernetes: name or number of the servers' port, where there are several."),
    ] = None
    scheme: Annotated[
        Literal["http", "https", "tcp"],
        Meta(description="kubernetes, dns: http (without), https, or tcp of `preble worker`."),
    ] = "http"
    look_seconds: Annotated[
        Annotated[float, Meta(ge=0.05, le=3600)],
        Meta(description="dns, file: between two looks (5); Kubernetes reports by itself."),
    ] = 5.0
    doubt_seconds: Annotated[
        Annotated[float, Meta(ge=0, le=1e6)],
        Meta(
            description="An answer that lacks more than half of the servers that serve, an empty one too, takes "
            "nobody away for so long (30)."
        ),
    ] = 30.0
    drain_seconds: Annotated[
        Annotated[float, Meta(ge=0, le=1e6)],
        Meta(description="A server that terminates or is gone ends its requests in so long (30); then it is left."),
    ] = 30.0
    servers_max: Annotated[
        Annotated[int, Meta(ge=1, le=65_535)],
        Meta(description="Servers at most (1024); what is found beyond is left out, and counted."),
    ] = 1024
    keep: Annotated[
        Name | None,
        Meta(
            description="File for the servers that were known last, without keys: a gateway that starts while the "
            "source cannot be asked begins with them, where they are at most a day old."
        ),
    ] = None
    deletion_costs: Annotated[
        bool,
        Meta(
            description="kubernetes: write on each pod what its end would cost, so that a scale-down ends the cheapest "
            "first."
        ),
    ] = False
    server: Annotated[
        ServerFields,
        Meta(description="What holds for every server found, as in `servers`: `api_key_variable`, `ca_file`, ..."),
    ] = ServerFields()


class KeyTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A client's key with limits of its own; what is not given is not limited."""

    key: Annotated[Annotated[str, Meta(min_length=8, max_length=512)] | None, Meta(description="The key.")] = None
    key_variable: Annotated[
        Name | None, Meta(description="Name of the environment variable that holds the key, instead.")
    ] = None
    name: Annotated[Name | None, Meta(description="What the log calls it; else the beginning of its SHA-256.")] = None
    models: Annotated[list[Name], Meta(description="The models that it may use; none named: all.")] = []
    requests_per_minute: Annotated[
        Rate | None, Meta(description="Requests a minute, so many at once; beyond them 429 with Retry-After.")
    ] = None
    tokens_per_minute: Annotated[
        Rate | None,
        Meta(
            description="Tokens a minute of prompts and outputs, as used; once they are, 429 with Retry-After for the "
            "next request."
        ),
    ] = None
    weight: Annotated[
        Annotated[float, Meta(gt=0, le=1e6)] | None,
        Meta(
            description="Of its share of the workers. Where any key has one, what a key wants beyond its share waits "
            "for the others', and keys without have 1."
        ),
    ] = None
    token_budget: Annotated[
        Annotated[int, Meta(ge=1, le=2**62)] | None,
        Meta(description="Tokens of prompts and outputs in all, since the gateway began; then 429."),
    ] = None


def keys_with_secrets(keys: Sequence[KeyTable], environment: Mapping[str, str]) -> list[KeyTable]:
    """The same with the keys that variables hold. Raises `InvalidConfig` naming the place."""
    found: list[KeyTable] = []
    for number, table in enumerate(keys):
        place = f"keys[{number}]"
        if (table.key is None) == (table.key_variable is None):
            raise InvalidConfig(f"{place}: one of key and key_variable must be given")
        if table.key_variable is not None:
            key = environment.get(table.key_variable, "")
            if len(key) < KEY_CHARS_MIN:
                raise InvalidConfig(
                    f"{place}.key_variable: the variable {table.key_variable} must be set, to at least "
                    f"{KEY_CHARS_MIN} characters"
                )
            table = msgspec.structs.replace(table, key=key, key_variable=None)
        if any(table.key == other.key for other in found):
            raise InvalidConfig(f"{place}: the same key stands in two tables")
        found.append(table)
    return found


def with_secrets(servers: Sequence[ServerTable], environment: Mapping[str, str]) -> list[ServerTable]:
    """The same with the API keys that variables hold. Raises `InvalidConfig` naming the place."""
    return [_with_secret(server, f"servers[{number}]", environment) for number, server in enumerate(servers)]


def _with_secret(server: AnyServer, place: str, environment: Mapping[str, str]) -> AnyServer:
    name = server.api_key_variable
    if name is None:
        return server
    if server.api_key is not None:
        raise InvalidConfig(f"{place}.api_key_variable: api_key is given, too; one of them is enough")
    if not environment.get(name):
        raise InvalidConfig(f"{place}.api_key_variable: no variable {name} is set")
    return msgspec.structs.replace(server, api_key=environment[name], api_key_variable=None)


def source_name(table: DiscoveryTable) -> str:
    """What a source of discovery is called in metrics, logs and on the live page: where it looks."""
    if table.source == "kubernetes":
        what = "&".join(filter(None, [table.service, table.selector]))
        where = f"{table.namespace}/" if table.namespace else ""
        return f"kubernetes:{where}{what}" + (f":{table.port}" if table.port else "")
    where = f"@{table.resolver}" if table.resolver else ""
    return f"{table.source}:{table.name or table.path}{where}"


def discovery_with_secrets(tables: Sequence[DiscoveryTable], environment: Mapping[str, str]) -> list[DiscoveryTable]:
    """The same with the API keys that variables hold, each table checked; no two are of one name, for the first would
    have all servers of the second. Raises `InvalidConfig` naming the place."""
    found: list[DiscoveryTable] = []
    for number, table in enumerate(tables):
        place, name = f"discovery[{number}]", source_name(table)
        _check_fields_of_source(table, place)
        if any(source_name(other) == name for other in found):
            raise InvalidConfig(f"{place}: {name} is another table's, too: a place is looked at once")
        if table.keep is not None and any(table.keep == other.keep for other in found):
            raise InvalidConfig(f"{place}.keep: {table.keep} is another source's, too")
        server = _with_secret(table.server, f"{place}.server", environment)
        check_servers([server_at("http://host:1", server)], [], f"{place}.server")
        found.append(msgspec.structs.replace(table, server=server))
    return found


_OF_SOURCE = {
    "kubernetes": {"namespace", "service", "selector", "port", "scheme", "deletion_costs"},
    "dns": {"name", "resolver", "scheme", "look_seconds"},
    "file": {"path", "look_seconds"},
}
_SERVER_OF_SOURCE = set().union(*_OF_SOURCE.values())


def _check_fields_of_source(table: DiscoveryTable, place: str) -> None:
    """Raise `InvalidConfig` where a field is missing, or another source's."""
    given = {name for name in _SERVER_OF_SOURCE if name in msgspec.to_builtins(table)}
    foreign = sorted(given - _OF_SOURCE[table.source])
    if foreign:
        raise InvalidConfig(f"{place}.{foreign[0]}: is no field of the source {table.source}")
    needed = {"kubernetes": ("service", "selector"), "dns": ("name",), "file": ("path",)}[table.source]
    if not given & set(needed):
        raise InvalidConfig(f"{place}: the source {table.source} needs {' or '.join(needed)}")
    if table.scheme == "tcp" and table.server != ServerFields():
        raise InvalidConfig(f"{place}.server: is for servers over HTTP, and the scheme is tcp")


def server_at(url: str, fields: ServerFields, **more: Any) -> ServerTable:
    """A server's table of what holds for all that are found, and what is said of this one."""
    known = {name: getattr(fields, name) for name in fields.__struct_fields__}
    return ServerTable(url=url, **{**known, **more})


def check_servers(servers: Sequence[ServerTable], workers: Sequence[str], name: str = "") -> None:
    """Raise `InvalidConfig` for a table that can be none, or whose server is named twice. `name`: what a wrong one is
    called, where that is not its place in `servers`."""
    seen = set(workers)
    for number, server in enumerate(servers):
        place = name or f"servers[{number}]"
        try:
            check_worker_address(server.url)
            if not is_server(server.url):
                raise InvalidConfig(f"url must be http://HOST:PORT, got {server.url!r}; others belong to workers")
            options = options_of(server)
            if options.ca_file:
                client_context(options.ca_file)
            if options.cost_model:
                CostModel.preset(options.cost_model)
            address = address_of(server)
        except InvalidInput as error:
            raise InvalidConfig(f"{place}: {error}") from error
        if address in seen:
            raise InvalidConfig(f"{place}: {address} is named twice")
        seen.add(address)


def address_of(server: ServerTable) -> str:
    """The worker's address: the server's, with the rank where it is not the first. Raises `InvalidConfig`."""
    if server.rank is None:
        return server.url
    if "#" in server.url:
        raise InvalidConfig(f"rank is {server.rank}, and the url {server.url!r} names one, too; one of them is enough")
    return f"{server.url}#rank={server.rank}" if server.rank else server.url


def options_of(server: ServerTable) -> ServerOptions:
    """What the operator knows of a server. Raises `InvalidConfig`."""
    given = {
        name: getattr(server, name)
        for name in server.__struct_fields__
        if name not in ("url", "rank", "api_key_variable")
    }
    return ServerOptions(**{name: value for name, value in given.items() if value is not None})


def without_secrets(table: ServerTable | KeyTable | DiscoveryTable) -> dict[str, Any]:
    """What may be shown of it."""
    shown: dict[str, Any] = msgspec.to_builtins(table)
    shown = {name: value for name, value in shown.items() if name not in ("api_key", "key")}
    if isinstance(table, DiscoveryTable) and "server" in shown:
        shown["server"] = {name: value for name, value in shown["server"].items() if name != "api_key"}
    return shown


def has_secret(table: ServerTable | KeyTable | DiscoveryTable) -> bool:
    """Whether it holds a key that is not shown."""
    shown: dict[str, Any] = msgspec.to_builtins(table)
    return without_secrets(table) != shown
