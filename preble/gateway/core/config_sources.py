"""Where the gateway's configuration comes from, and how it is checked. Owns files, variables and flags, and what is
said of a wrong one.

A value comes from the first of these that has it: a flag (`--drain-seconds 5`), a variable
(`PREBLE_DRAIN_SECONDS=5`), the file (`drain_seconds: 5`), another router's command line, the default. The scheduler's
fields are under `scheduler`: `--scheduler-max-bytes`, `PREBLE_SCHEDULER_MAX_BYTES`. Lists are separated by commas in
variables.

A name that is none is refused, with the nearest one. Of variables, which other programs share, only those are refused
that are nearly a name.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...errors import InvalidConfig, InvalidInput, MissingExtra
from ...policies.base import resolve
from ...router.peer_addresses import check_peers
from ...transport.security import is_loopback
from ...transport.worker_address import check_worker_address
from ..migration.counterparts import ALL
from ..migration.translation import translate
from ..yaml_text import decode_yaml
from .addresses import is_network, is_origin, is_url
from .config import FIELDS, LISTS, PREFIX, TABLES, FieldPath, GatewayConfig, flag_of, is_keyless, variable_of
from .config_tables import check_servers, discovery_with_secrets, keys_with_secrets, with_secrets

SOCKET_PATH_BYTES_MAX = 107
FILE_BYTES_MAX = 1 << 20
TOO_DEEP = "lists and tables are nested too deeply"
NEAR = 0.75  # how alike two names are that were meant to be the same


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and where each value came from, by dotted name. `remarks`: of another router's command line."""

    config: GatewayConfig
    origins: Mapping[str, str]
    remarks: Sequence[str] = ()


def load(
    file: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[FieldPath, Any],
    routers: Mapping[str, str] = {},
) -> Loaded:
    """The configuration of all sources together; `routers`: command lines of other routers, by their names. Raises
    `InvalidConfig` naming the source and the field."""
    values: dict[FieldPath, Any] = {}
    origins: dict[str, str] = {}
    remarks: list[str] = []
    sources: list[tuple[Mapping[FieldPath, Any], Callable[[FieldPath], str]]] = []
    for router, line in routers.items():
        translation = translate(router, line)
        sources.append((translation.values, lambda _, router=router: f"from {router}"))  # type: ignore[misc]
        remarks += translation.remarks
    sources += [
        ({} if file is None else _from_file(file), lambda path: str(file)),
        (_from_environment(environment), variable_of),
        (flags, flag_of),
    ]
    for found, origin in sources:
        values.update(found)
        origins.update({".".join(path): origin(path) for path in found})
    return Loaded(_checked(values, origins, environment), origins, remarks)


def load_for(args: argparse.Namespace, environment: Mapping[str, str]) -> Loaded:
    """The configuration for a command line, whose options are named as `add_arguments` names them. Raises as `load`."""
    flags = {path: value for path in FIELDS if (value := getattr(args, "/".join(path), None)) is not None}
    routers = {name: line for name in ALL if (line := getattr(args, router_option(name), None)) is not None}
    return load(args.config, environment, flags, routers)


def router_option(router: str) -> str:
    """Under which name a parsed command line holds another router's."""
    return f"from {router}"


def _from_file(file: Path) -> dict[FieldPath, Any]:
    content = _parse(file)
    values: dict[FieldPath, Any] = {}
    for name, value in content.items():
        inner = value if name == "scheduler" else None
        if name == "scheduler" and not isinstance(inner, dict):
            raise InvalidConfig(f"{file}: scheduler must be a table")
        for path, one in [((name,), value)] if inner is None else [((name, key), inner[key]) for key in inner]:
            if path not in FIELDS:
                raise InvalidConfig(f"{file}: no such key {'.'.join(map(str, path))}{_nearest(path)}")
            values[path] = one
    return values


def _parse(file: Path) -> dict[Any, Any]:
    """The file's content, by its suffix. Raises `InvalidConfig`."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InvalidConfig(f"{file} cannot be read: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise InvalidConfig(f"{file} has {len(data)} bytes, the limit is {FILE_BYTES_MAX}")
    try:
        if file.suffix == ".toml":
            content = msgspec.toml.decode(data)
        elif file.suffix in (".yaml", ".yml"):
            content = decode_yaml(data)
        else:
            raise InvalidConfig("the name must end in .yaml, .yml or .toml")
    except ImportError as error:
        raise MissingExtra(f"{file.suffix} files need the extra: pip install 'preble[gateway]'") from error
    except RecursionError as error:
        raise InvalidConfig(f"{file}: {TOO_DEEP}") from error
    except (msgspec.DecodeError, ValueError) as error:  # a number of 5,000 digits, a month 13
        raise InvalidConfig(f"{file}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidConfig(f"{file} must hold a table of keys and values")
    return content


def _from_environment(environment: Mapping[str, str]) -> dict[FieldPath, Any]:
    names = {variable_of(path): path for path in FIELDS}
    values: dict[FieldPath, Any] = {}
    for name, text in environment.items():
        if name in names:
            path = names[name]
            if path[-1] in TABLES:
                values[path] = _tables(name, text)
                continue
            items = [item.strip() for item in text.split(",") if item.strip()]
            values[path] = items if path[-1] in LISTS else text
        elif name.startswith(PREFIX):
            near = difflib.get_close_matches(name, names, 1, NEAR + 0.1)
            if near:
                raise InvalidConfig(f"no such variable {name}; did you mean {near[0]}?")
    return values


def _tables(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except RecursionError as error:
        raise InvalidConfig(f"{name} must be a list of tables in JSON: {TOO_DEEP}") from error
    except msgspec.DecodeError as error:  # its message quotes nothing
        raise InvalidConfig(f"{name} must be a list of tables in JSON: {error}") from error


def _nearest(path: Sequence[Any]) -> str:
    known = [".".join(one) for one in FIELDS]
    near = difflib.get_close_matches(".".join(map(str, path)), known, 1, NEAR)
    return f"; did you mean {near[0]}?" if near else ""


def _checked(
    values: Mapping[FieldPath, Any], origins: Mapping[str, str], environment: Mapping[str, str]
) -> GatewayConfig:
    content: dict[str, Any] = {"scheduler": {}}
    for path, value in values.items():
        place = content["scheduler"] if len(path) == 2 else content
        place[path[-1]] = value
    try:
        config = msgspec.convert(content, GatewayConfig, strict=False)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`").partition("[")[0]
        origin = f" ({origins[name]})" if name in origins else ""
        raise InvalidConfig(f"{name + ': ' if name else ''}{message}{origin}") from error
    config = msgspec.structs.replace(
        config,
        servers=with_secrets(config.servers, environment),
        discovery=discovery_with_secrets(config.discovery, environment),
        keys=keys_with_secrets(config.keys, environment),
    )
    resolve(config.policy)
    if config.picker_port == 0 and config.processes > 1:
        raise InvalidConfig("picker_port: 0 takes a free port, and several processes must share one: name it")
    _check_addresses(config, origins)
    _check_access(config)
    check_peers(
        config.peers,
        config.peer_bind,
        processes=config.processes,
        has_keys=config.peer_keys is not None,
        insecure=config.insecure,
    )
    if not config.insecure and is_keyless(config) and not is_loopback(f"tcp://{config.host}:0"):
        raise InvalidConfig(
            f"host {config.host} is not loopback and there are no api_keys: anyone could use the workers. "
            "Set api_keys, or insecure: true where something else keeps strangers out"
        )
    return config


def _check_access(config: GatewayConfig) -> None:
    """Raise `InvalidConfig` for origins, proxies and certificates that can be none."""
    for origin in config.allowed_origins:
        if origin == "*" and is_keyless(config):
            raise InvalidConfig("allowed_origins: * needs keys: without, any page could use the workers")
        if origin != "*" and not is_origin(origin):
            raise InvalidConfig(f"allowed_origins: an origin is like https://chat.example.com, got {origin!r}")
    for name in config.trusted_proxies:
        if name != "unix" and not is_network(name):
            raise InvalidConfig(f"trusted_proxies: a proxy is an address, a network like 10.0.0.0/8, got {name!r}")
    if (config.tls_certificate is None) != (config.tls_key is None):
        raise InvalidConfig("tls_certificate and tls_key belong together: one of them is missing")
    if config.unix_socket is not None and len(os.fsencode(config.unix_socket)) > SOCKET_PATH_BYTES_MAX:
        raise InvalidConfig(f"unix_socket: a path has at most {SOCKET_PATH_BYTES_MAX} bytes, so Linux wants it")


def _check_addresses(config: GatewayConfig, origins: Mapping[str, str]) -> None:
    """Raise `InvalidConfig` for an address that can be none, with what to write instead."""
    for address in config.workers:
        try:
            check_worker_address(address)
        except InvalidInput as error:
            origin = f" ({origins['workers']})" if "workers" in origins else ""
            raise InvalidConfig(f"workers: {error}{origin}") from error
    check_servers(config.servers, config.workers)
    for name in ("traces_endpoint", "metrics_endpoint"):
        url = getattr(config, name)
        if url is not None and not is_url(url):
            raise InvalidConfig(f"{name} must be like http://HOST:PORT/PATH, got {url!r}")
