"""Tables of the gateway's configuration: servers that run already, each with what is known of it, and keys, each with
its limits. Owns their fields; a secret is given itself or by the name of the variable that holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

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


class ServerTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An SGLang or vLLM server that runs already; what is not given is what the server says of itself."""

    url: Annotated[Name, Meta(description="Where it is: http://HOST:PORT or https://HOST:PORT.")]
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
    found = []
    for number, server in enumerate(servers):
        name = server.api_key_variable
        if name is not None:
            place = f"servers[{number}].api_key_variable"
            if server.api_key is not None:
                raise InvalidConfig(f"{place}: api_key is given, too; one of them is enough")
            if not environment.get(name):
                raise InvalidConfig(f"{place}: no variable {name} is set")
            server = msgspec.structs.replace(server, api_key=environment[name], api_key_variable=None)
        found.append(server)
    return found


def check_servers(servers: Sequence[ServerTable], workers: Sequence[str]) -> None:
    """Raise `InvalidConfig` for a table that can be none, or whose server is named twice."""
    seen = set(workers)
    for number, server in enumerate(servers):
        place = f"servers[{number}]"
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


def without_secrets(table: ServerTable | KeyTable) -> dict[str, Any]:
    """What may be shown of it."""
    shown: dict[str, Any] = msgspec.to_builtins(table)
    return {name: value for name, value in shown.items() if name not in ("api_key", "key")}
