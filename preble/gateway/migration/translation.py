"""A router's command line as values of the gateway's configuration, and what to know of them. Owns how such a line is
read and what becomes of each value; `counterparts` owns which option is what.

    sglang_router.launch_router --worker-urls http://a:1 --policy cache_aware --max-concurrent-requests 2000
        words before the first option     the program: dropped
        each option and its words         a value of the configuration, or a remark why there is none
        what a fleet cannot do without    `InvalidConfig`: nothing is translated

Where a line says nothing, host and port are the router's own defaults, so that clients find the gateway where it was;
everything else is Preble's default.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ...errors import InvalidConfig
from ...types import DECODE, PREFILL
from .counterparts import OLD, SGLANG, SMG, VLLM, Counterpart, Takes, of_router

Path = tuple[str, ...]
Words = dict[str, list[str]]
LENGTH_MAX = 65_536
HOSTS: Mapping[str, str] = {SGLANG: "0.0.0.0", SMG: "0.0.0.0", VLLM: "127.0.0.1"}
PORT = 30_000
POLICIES: Mapping[str, str] = {
    "random": "random",
    "round_robin": "round_robin",
    "power_of_two": "power_of_two",
    "least_load": "least_loaded",
    "consistent_hashing": "session_hash",
    "consistent_hash": "session_hash",
    "prefix_hash": "prefix_hash",
}
THRESHOLDS = {
    "cache_threshold": ("--cache-threshold", "--cache-match-threshold"),
    "balance_requests": ("--balance-abs-threshold", "--spill-abs-threshold"),
    "balance_ratio": ("--balance-rel-threshold", "--spill-rel-threshold"),
}
OTLP_HTTP_PORT = 4318


@dataclass(slots=True)
class Translation:
    """`values`: of the configuration, by path, as a file would have them. `remarks`: a line each, for a person."""

    values: dict[Path, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def translate(router: str, line: str) -> Translation:
    """What a command line of a router is here. Raises `InvalidConfig` naming the option that is none of the router's,
    that lacks its value, or that a fleet needs which cannot be served."""
    words = _words(router, line)
    known = of_router(router)
    refused = [f"{option}: {known[option][0].why}" for option in words if known[option][0].refused]
    if refused:
        raise InvalidConfig(f"of {router}'s options these have no counterpart: {'; '.join(refused)}")
    found = Translation()
    found.values |= {("host",): HOSTS[router], ("port",): PORT}
    for option, given in words.items():
        row = known[option][0]
        if option in _SIMPLE:
            name, convert = _SIMPLE[option]
            found.values[(name,)] = _converted(option, given, convert)
        if row.why and not _is_silent(row, option):
            found.remarks.append(f"{option}: {row.key.replace(' ', ', ') + ', ' if row.key else ''}{row.why}")
    _place(found, router, words)
    _reach(found, router, words)
    _discover(found, router, words)
    _allow(found, router, words)
    _trace(found, words)
    return found


# --- reading ----------------------------------------------------------------------------------------------------------


def _words(router: str, line: str) -> Words:
    """The options of a line with their words, in its order; of one that stands twice all words."""
    if len(line) > LENGTH_MAX:
        raise InvalidConfig(f"a command line of {router} has at most {LENGTH_MAX} characters, got {len(line)}")
    try:
        texts = shlex.split(line.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InvalidConfig(f"the command line of {router} cannot be read: {error}") from None
    unset = [text for text in texts if "$" in text]
    if unset:
        raise InvalidConfig(f"{unset[0]!r} is for a shell to fill in: write its value")
    found: Words = {}
    option = ""
    for text in texts:
        if text.startswith("--"):
            option, has_value, value = text.partition("=")
            _check_known(router, option)
            found.setdefault(option, []).extend([value] if has_value else [])
        elif option:
            found[option].append(text)
    for option, given in found.items():
        _check_count(option, given, of_router(router)[option][1])
    return found


def _check_known(router: str, option: str) -> None:
    known = of_router(router)
    if option not in known:
        near = difflib.get_close_matches(option, known, 1)
        raise InvalidConfig(f"{option} is no option of {router}{f'; did you mean {near[0]}?' if near else ''}")


def _check_count(option: str, given: list[str], takes: Takes) -> None:
    if takes is Takes.NONE and given:
        raise InvalidConfig(f"{option} takes no value, got {given[0]!r}")
    if takes is Takes.ONE and not given:
        raise InvalidConfig(f"{option} lacks its value")


def _converted(option: str, given: list[str], convert: Callable[[str], Any] | None) -> Any:
    """The value of an option: of its words the last, or, without a way to convert one, all."""
    if convert is None:
        return given
    try:
        return convert(given[-1])
    except ValueError:
        raise InvalidConfig(f"{option} takes a number, got {given[-1]!r}") from None


_SIMPLE: Mapping[str, tuple[str, Callable[[str], Any] | None]] = {
    "--host": ("host", str),
    "--port": ("port", int),
    "--tls-cert-path": ("tls_certificate", str),
    "--tls-key-path": ("tls_key", str),
    "--cors-allowed-origins": ("allowed_origins", None),
    "--shutdown-grace-period-secs": ("drain_seconds", float),
    "--worker-urls": ("workers", None),
    "--worker-startup-timeout-secs": ("connect_seconds", float),
    "--max-payload-size": ("max_body_bytes", int),
    "--request-timeout-secs": ("request_seconds", float),
    "--model-path": ("tokenizer", str),
    "--model": ("tokenizer", str),
    "--tokenizer-path": ("tokenizer", str),
    "--tokenizer-cache-l1-max-memory": ("tokenizer_cache_bytes", int),
    "--log-level": ("log_level", lambda text: {"warn": "warning", "critical": "error"}.get(text, text)),
}
_EXACT = frozenset({"--host", "--port", "--worker-urls", "--max-payload-size", "--shutdown-grace-period-secs"}) | {
    "--cors-allowed-origins", "--worker-startup-timeout-secs", "--request-timeout-secs", "--model-path", "--model",
    "--tokenizer-path", "--tokenizer-cache-l1-max-memory", "--log-level", "--max-concurrent-requests",
}  # fmt: skip
_APART = {f"--{role}{what}": role for role in (PREFILL, DECODE) for what in ("", "-selector")}


def _is_silent(row: Counterpart, option: str) -> bool:
    """Whether the value is the same here, or is spoken of where it is made."""
    if option in _APART:
        return False
    return option in _EXACT or row.key in ("policy", "servers", "keys", "admin_keys", "traces_endpoint", "model_names")


# --- what several options make together -------------------------------------------------------------------------------


def _place(found: Translation, router: str, words: Words) -> None:
    """The rule, its thresholds, and bounds."""
    name = words.get("--policy", [""])[-1]
    thresholds = {key: words[option][-1] for key, names in THRESHOLDS.items() for option in names if option in words}
    if name == "cache_aware" and router in OLD:
        given = ", ".join(f"{key}={value}" for key, value in thresholds.items())
        found.values["policy",] = f"cache_aware({given})" if given else name
        thresholds = {}
    elif name == "cache_aware":
        found.values["policy",] = "cache_aware_spill"
    elif name in POLICIES:
        found.values["policy",] = POLICIES[name]
    elif name:
        raise InvalidConfig(f"--policy {name} has no counterpart; without --policy E2 places")
    if thresholds:
        found.remarks.append(f"{', '.join(THRESHOLDS[key][0] for key in thresholds)}: not used by the rule")
    if not name:
        found.remarks.append("no --policy: E2 places, not cache_aware")
    bound = int(_converted("--max-concurrent-requests", words.get("--max-concurrent-requests", ["-1"]), int))
    if bound > 0:
        found.values["max_live_requests",] = bound
    if "--rate-limit-tokens-per-second" in words:
        rate = float(_converted("--rate-limit-tokens-per-second", words["--rate-limit-tokens-per-second"], float))
        if rate > 0:
            found.values["rate_limit_per_minute",] = 60.0 * rate
    if "--model-alias" in words:
        pairs = [text.partition("=") for text in words["--model-alias"]]
        found.values["model_names",] = list(dict.fromkeys(name for one, _, other in pairs for name in (one, other)))


def _reach(found: Translation, router: str, words: Words) -> None:
    """Workers, as `servers` where each needs a key or certificates."""
    key = words.get("--api-key", [""])[-1]
    authorities = words.get("--ca-cert-paths", [])
    if len(authorities) > 1:
        raise InvalidConfig("--ca-cert-paths: a server has one ca_file; put the certificates into one file")
    more = ({"api_key": key} if key else {}) | ({"ca_file": authorities[0]} if authorities else {})
    urls, apart = found.values.get(("workers",), []), _apart(words)
    if any(urlsplit(url).scheme in ("grpc", "zmq", "ipc") for url in (*urls, *(one["url"] for one in apart))):
        raise InvalidConfig(
            "--worker-urls: servers are reached by http:// or https://, `preble worker` by tcp:// or ipc://"
        )
    if more:
        apart = [{"url": url} for url in found.values.pop(("workers",), [])] + apart
    if apart:
        found.values["servers",] = [{**table, **more} for table in apart]
    if key:
        found.values["api_keys",] = [key]
        found.remarks.append("--api-key: clients need it, too, as before; in a file it is in no list of processes")


def _apart(words: Words) -> list[dict[str, str]]:
    """Servers that prefill or decode only. The port behind one is where its KV is asked for, which it says itself."""
    return [
        {"url": text, "role": role}
        for role in (PREFILL, DECODE)
        for text in words.get(f"--{role}", [])
        if not text.isdecimal() and text.lower() != "none"
    ]


def _discover(found: Translation, router: str, words: Words) -> None:
    """Pods by their labels, or a file."""
    tables: list[dict[str, Any]] = []
    if "--discovery-file" in words:
        tables = [{"source": "file", "path": words["--discovery-file"][-1]}]
    elif "--service-discovery" in words:
        selectors = [(option, words[option]) for option in ("--selector", *_APART) if words.get(option)]
        tables = [_pods(words, labels, _APART.get(option)) for option, labels in selectors if "selector" in option]
        if not tables:
            raise InvalidConfig("--service-discovery needs --selector: labels of the servers' pods")
    if tables:
        key = words.get("--api-key", [""])[-1]
        for table in tables if key else ():
            table["server"] = {**table.get("server", {}), "api_key": key}
        found.values["discovery",] = tables
        found.values["min_workers",] = 0  # as there, it begins without any


def _pods(words: Words, labels: list[str], role: str | None) -> dict[str, Any]:
    """Where pods with these labels are looked for; `role`: what they do, where that is not all."""
    port = int(_converted("--service-discovery-port", words.get("--service-discovery-port", ["80"]), int))
    table: dict[str, Any] = {"source": "kubernetes", "selector": ",".join(labels), "port": port}
    if "--service-discovery-namespace" in words:
        table["namespace"] = words["--service-discovery-namespace"][-1]
    return table if role is None else {**table, "server": {"role": role}}


def _allow(found: Translation, router: str, words: Words) -> None:
    """Keys of operators, users and tenants."""
    for text in words.get("--control-plane-api-keys", []):
        parts = text.split(":", 3)
        if len(parts) != 4 or parts[2] not in ("admin", "user"):
            raise InvalidConfig("--control-plane-api-keys takes ID:NAME:ROLE:KEY, with the role admin or user")
        name = "admin_keys" if parts[2] == "admin" else "api_keys"
        found.values.setdefault((name,), []).append(parts[3])
    for text in words.get("--tenant-api-key", []):
        tenant, separator, key = text.partition(":")
        if not separator:
            raise InvalidConfig("--tenant-api-key takes TENANT:KEY")
        found.values.setdefault(("keys",), []).append({"key": key, "name": tenant})


def _trace(found: Translation, words: Words) -> None:
    """Where traces go: the collector's port for HTTP, whatever its port for gRPC is."""
    if "--enable-trace" not in words:
        if "--otlp-traces-endpoint" in words:
            found.remarks.append("--otlp-traces-endpoint: does nothing without --enable-trace")
        return
    address = words.get("--otlp-traces-endpoint", ["localhost:4317"])[-1]
    host = urlsplit(address if "//" in address else f"//{address}").hostname or "localhost"
    found.values["traces_endpoint",] = f"http://{f'[{host}]' if ':' in host else host}:{OTLP_HTTP_PORT}/v1/traces"
    found.remarks.append(f"--otlp-traces-endpoint: OTLP over HTTP, so port {OTLP_HTTP_PORT} of the collector")
