"""The gateway's configuration: its fields, what each is, and what a running gateway can take over. Owns no behaviour.

Values come from `config_sources`; how options are shown, to whom, is `config_text`'s. Keys are secrets: they have no
flags, and nothing shows them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ...config import SchedulerConfig
from ...transport.look_ahead import LOOK_AHEAD_SECONDS
from .config_tables import DiscoveryTable, KeyTable, ServerTable

PREFIX = "PREBLE_"
END_MARGIN_SECONDS = 10.0  # what a process may take to end beyond what it was given

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Key = Annotated[str, Meta(min_length=8, max_length=512)]
Name = Annotated[str, Meta(min_length=1, max_length=1024)]

TABLES = frozenset({"servers", "discovery", "keys"})  # lists of tables: in the file, or as JSON in a variable
SECRET = frozenset({"api_keys", "admin_keys"}) | TABLES  # no flags, for process lists show those
# What a running gateway takes over on SIGHUP; the rest needs a restart.
RELOADABLE = frozenset(
    {
        "workers",
        "servers",
        "discovery",
        "policy",
        "api_keys",
        "admin_keys",
        "keys",
        "allowed_origins",
        "host_names",
        "lame_duck_seconds",
        "picker_fallbacks",
        "request_seconds",
        "rate_limit_per_minute",
        "rate_limit_burst",
        "refuse_wait_seconds",
        "stalled_after_seconds",
        "model_names",
    }
    | {"default_max_tokens", "choices_max", "max_live_requests", "max_body_bytes", "drain_seconds"}
)


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every option of `preble serve`. Each is described here and nowhere else: `--help`, docs/configuration.md and the
    JSON schema show these sentences."""

    workers: Annotated[
        list[Name],
        Meta(
            description="Workers to place requests on: tcp://HOST:PORT or ipc://PATH of `preble worker`, "
            "http://HOST:PORT of an SGLang or vLLM server that runs."
        ),
    ] = []
    servers: Annotated[
        list[ServerTable],
        Meta(
            max_length=65_535,
            description="SGLang and vLLM servers that run already, each as a table: with its API key, or what it does "
            "not say of itself.",
        ),
    ] = []
    discovery: Annotated[
        list[DiscoveryTable],
        Meta(
            max_length=64,
            description="Where servers are looked for while the gateway runs, as tables: Kubernetes, DNS, a file.",
        ),
    ] = []
    min_workers: Annotated[
        int, Meta(ge=0, le=65535, description="So many must be ready before requests are taken; 0 starts without any.")
    ] = 1
    connect_seconds: Annotated[
        float, Meta(gt=0, le=1e6, description="The start fails when `min_workers` are not ready after so long.")
    ] = 30.0
    curve_keys: Annotated[
        Name | None, Meta(description="Directory of the CURVE keys for workers, made by `preble keygen`.")
    ] = None
    peers: Annotated[
        list[Name],
        Meta(
            description="Other gateways before the same servers, tcp://HOST:PORT of their `peer_bind`: they report "
            "their requests to each other. A name stands for all its addresses, and is looked up again every 5 s."
        ),
    ] = []
    peer_bind: Annotated[
        Name | None,
        Meta(
            description="Where `peers` find this gateway, tcp://HOST:PORT; process N of several listens N ports "
            "further. Beyond loopback it needs `peer_keys` or `insecure`."
        ),
    ] = None
    peer_keys: Annotated[
        Name | None,
        Meta(description="Directory of the CURVE keys of gateways for each other, by `preble keygen`: one for all."),
    ] = None
    host: Annotated[
        Name, Meta(description="Address to listen on; one beyond loopback needs `api_keys` or `insecure`.")
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")] = 8000
    unix_socket: Annotated[
        Name | None,
        Meta(
            description="Path of a Unix socket to listen on, too. Only the gateway's own user can open it, and needs "
            "no key there, also for operators' paths."
        ),
    ] = None
    picker_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(
            description="Port of the endpoint picker (ext_proc over gRPC, docs/endpoint-picker.md) at the same host; "
            "none unless it is set, 9002 for `preble epp`. Needs `preble[epp]`."
        ),
    ] = None
    picker_fallbacks: Annotated[
        int,
        Meta(
            ge=0,
            le=16,
            description="Further servers that the picker names for a request, for a data plane that takes a list and "
            "tries the next one.",
        ),
    ] = 0
    tls_certificate: Annotated[
        Name | None,
        Meta(description="Certificates (PEM), the gateway's own first: the port speaks HTTPS. SIGHUP reads them anew."),
    ] = None
    tls_key: Annotated[Name | None, Meta(description="The certificate's private key (PEM), without a password.")] = None
    processes: Annotated[
        int, Meta(ge=1, le=64, description="Gateway processes that share the port; each uses one core.")
    ] = 1
    max_connections: Annotated[
        Count, Meta(description="Connections of clients at a time, at each process; one more is answered with 503.")
    ] = 8192
    max_connections_per_address: Annotated[
        Count, Meta(description="The same for each client address; IPv6 addresses of one /64 are one.")
    ] = 4096
    lame_duck_seconds: Annotated[
        Seconds,
        Meta(
            description="After SIGTERM, for so long requests are still taken while `/ready` answers 503, so that load "
            "balancers turn away first. SIGINT does without."
        ),
    ] = 2.0
    drain_seconds: Annotated[
        Seconds, Meta(description="After SIGTERM, answers that go on may take so long to end; then they are cut off.")
    ] = 30.0
    api_keys: Annotated[
        list[Key],
        Meta(description="Keys of clients, of at least 8 characters; without any, everybody who can connect may ask."),
    ] = []
    keys: Annotated[
        list[KeyTable],
        Meta(
            max_length=10_000,
            description="Further keys of clients, each as a table: with the models that it may use, its requests and "
            "tokens a minute, its budget.",
        ),
    ] = []
    admin_keys: Annotated[
        list[Key], Meta(description="Keys that may change and look at the fleet, too, beside what `api_keys` may.")
    ] = []
    insecure: Annotated[bool, Meta(description="Allow a `host` or `peer_bind` beyond loopback without keys.")] = False
    host_names: Annotated[
        list[Name],
        Meta(
            description="Names by which the gateway is reached where there are no keys, beside addresses, "
            "names without a dot and *.localhost."
        ),
    ] = []
    allowed_origins: Annotated[
        list[Name],
        Meta(
            description="Other sites whose pages may use the gateway from a browser (CORS), such as "
            "https://chat.example.com; * is all of them, and needs keys. Operators' paths are not for them."
        ),
    ] = []
    trusted_proxies: Annotated[
        list[Name],
        Meta(
            description="Addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are taken; "
            "`unix` is whoever connects to `unix_socket`."
        ),
    ] = []
    rate_limit_per_minute: Annotated[
        Annotated[float, Meta(gt=0, le=1e9)] | None,
        Meta(
            description="Choices a minute for each key, or for each client address where there are no keys; beyond "
            "them 429. Of all processes together."
        ),
    ] = None
    rate_limit_burst: Annotated[Count, Meta(description="Choices that may come at once, where there is a rate.")] = 60
    policy: Annotated[
        Name, Meta(description="Rule that chooses the worker, or module:Class of yours; docs/policies.md.")
    ] = "e2"
    model_names: Annotated[
        list[Name], Meta(description="Names that requests may use for the model, in place of what workers call it.")
    ] = []
    default_max_tokens: Annotated[
        Count | None,
        Meta(
            description="Output tokens where a request names no limit; unset, a chat may fill the model's context, and "
            "completions have 16 and `/generate` 128 tokens, as in the engines."
        ),
    ] = None
    choices_max: Annotated[int, Meta(ge=1, le=1024, description="Prompts times `n` in one request.")] = 64
    max_live_requests: Annotated[
        Count, Meta(description="Choices that are generated at a time, at each process; one more is answered with 503.")
    ] = 4096
    stalled_after_seconds: Annotated[
        Annotated[float, Meta(gt=0, le=1e6)],
        Meta(
            description="A relayed stream that can go on at another server does so after such a silence; any other "
            "ends with an error after four times as long, or goes elsewhere then where it has only begun."
        ),
    ] = 30.0
    refuse_wait_seconds: Annotated[
        Annotated[float, Meta(gt=0, le=1e9)] | None,
        Meta(
            description="A request whose first token would take longer is refused with 429, four times as long in a "
            "burst of at most 15 s; null refuses none."
        ),
    ] = 3.0
    look_ahead_seconds: Annotated[
        Annotated[float, Meta(ge=0, le=1e6)] | None,
        Meta(
            description="An SGLang or vLLM server is sent one request, and beside the longest that it has not begun as "
            "much as it prefills in such a time; what waits is sent with cached prompts first. Null sends all at once."
        ),
    ] = LOOK_AHEAD_SECONDS
    request_seconds: Annotated[
        Annotated[float, Meta(gt=0, le=1e9)] | None,
        Meta(
            description="A request may take so long, its whole answer included; then 504, or an error event where a "
            "stream has begun."
        ),
    ] = None
    max_body_bytes: Annotated[
        int, Meta(ge=1024, le=1 << 30, description="Bytes of one body; a larger one is answered with 413.")
    ] = 8 << 20
    max_bodies_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            le=1 << 40,
            description="Bytes of all bodies until their prompts are token ids, or relayed ones are answered, beyond "
            "the first 64 KiB of each, at each process; then 503. One body alone is always read.",
        ),
    ] = 256 << 20
    tokenizer: Annotated[
        Name | None,
        Meta(
            description="Model directory with tokenizer.json, tokenizer_config.json and chat_template.jinja, or a "
            "hub's name for it (org/name), whose files are fetched; without one, only token ids are taken."
        ),
    ] = None
    tokenizer_mismatch: Annotated[
        Literal["refuse", "warn"],
        Meta(description="A worker with another tokenizer.json: refuse it, or warn with the first token that differs."),
    ] = "refuse"
    tokenizer_threads: Annotated[
        int, Meta(ge=1, le=64, description="Threads that tokenise, beside the one for long texts.")
    ] = 2
    tokenizer_queue: Annotated[
        Count, Meta(description="Texts that may wait to be tokenised, at each process; then 503.")
    ] = 1024
    tokenizer_cache_bytes: Annotated[
        int, Meta(ge=0, le=1 << 40, description="Cache of the parts of conversations that were tokenised before.")
    ] = 64 << 20
    record_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of decisions that are recorded for regret and the live page, beside the first 10 of "
            "each second.",
        ),
    ] = 0.1
    record: Annotated[
        Name | None,
        Meta(
            description="File for what `preble replay` needs: every request's times, and its prompt as keyed hashes of "
            "blocks, no text. Process N of several writes FILE.process-N."
        ),
    ] = None
    record_max_bytes: Annotated[
        int, Meta(ge=1 << 20, le=1 << 50, description="Bytes of all files of `record`; beyond them the oldest goes.")
    ] = 1 << 30
    record_files: Annotated[
        int, Meta(ge=1, le=1000, description="Files of `record`: FILE, FILE.1 before it, and so on.")
    ] = 4
    traces_endpoint: Annotated[
        Name | None,
        Meta(
            description="OTLP/HTTP URL of a collector of traces, such as http://host:4318/v1/traces; needs "
            "`preble[otel]`."
        ),
    ] = None
    metrics_endpoint: Annotated[
        Name | None,
        Meta(
            description="OTLP/HTTP URL of a collector of metrics, such as http://host:4318/v1/metrics; needs "
            "`preble[otel]`. /metrics has them for Prometheus in any case."
        ),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="The least severe lines that are logged.")
    ] = "info"
    scheduler: Annotated[SchedulerConfig, Meta(description="The scheduler's own options.")] = SchedulerConfig()


# The headings of `--help` and of the page of options, each before the field with which its part begins.
SECTIONS: Mapping[str, str] = {
    "workers": "Workers",
    "host": "Listening and ending",
    "api_keys": "Who may ask",
    "policy": "Requests",
    "tokenizer": "Text",
    "record_share": "What it reports",
    "scheduler": "The scheduler",
}


FieldPath = tuple[str, ...]
FIELDS: tuple[FieldPath, ...] = (
    *((name,) for name in GatewayConfig.__struct_fields__ if name != "scheduler"),
    *(("scheduler", one.name) for one in dataclasses.fields(SchedulerConfig)),
)
LISTS = frozenset(
    {"workers", "peers", "model_names", "api_keys", "admin_keys", "host_names", "allowed_origins", "trusted_proxies"}
)


def flag_of(path: FieldPath) -> str:
    """`--scheduler-max-bytes`."""
    return "--" + "-".join(path).replace("_", "-")


def variable_of(path: FieldPath) -> str:
    """`PREBLE_SCHEDULER_MAX_BYTES`."""
    return PREFIX + "_".join(path).upper()


def end_seconds(config: GatewayConfig) -> float:
    """How long a process may take to end after SIGTERM."""
    return config.lame_duck_seconds + config.drain_seconds + END_MARGIN_SECONDS


def is_keyless(config: GatewayConfig) -> bool:
    """Whether requests need no key."""
    return not (config.api_keys or config.admin_keys or config.keys)


def value_of(config: GatewayConfig, path: FieldPath) -> Any:
    """One value by its path."""
    value: Any = config
    for name in path:
        value = getattr(value, name)
    return value


def changes(old: GatewayConfig, new: GatewayConfig) -> tuple[set[str], set[str]]:
    """Dotted names of what differs: what a running gateway can take over, and what needs a restart."""
    different = {".".join(path) for path in FIELDS if value_of(old, path) != value_of(new, path)}
    return different & RELOADABLE, different - RELOADABLE
