"""What a running SGLang or vLLM server is: engine, model, cache, ranks, event sockets. Owns how its answers are read
and which flag to name when something is missing; asks nothing itself (`http_client` does).

| fact            | SGLang: GET /server_info                    | vLLM                                                 |
|-----------------|---------------------------------------------|------------------------------------------------------|
| model, length   | served_model_name, context_length           | /v1/models: id, max_model_len                        |
| block size      | page_size                                   | /metrics: vllm:cache_config_info block_size          |
| capacity        | max_total_num_tokens                        | there: kv_cache_size_tokens, else num_gpu_blocks     |
| ranks           | dp_size                                     | there: one line for each engine                      |
| event sockets   | kv_events, else kv_events_config            | /kv_event_sources (0.32), else `ServerOptions`       |
| start           | startup_time: how long each step took       | /metrics: when the counters were made                |
| priority        | enable_priority_scheduling                  | `ServerOptions`                                      |
| speed so far    | /metrics, where it has them: `served_metrics`| there                                               |
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import urlsplit

from ...errors import HandshakeRefused, InvalidConfig, ProtocolError
from ...types import BATCH, BOTH, DECODE, PREFILL, Claim, Role, ServedWork, check_fields, check_int, check_role
from .metrics_text import samples
from .served_metrics import served_work

NAMES_MAX = 4096  # of models and adapters that one server is asked for
NAME_CHARACTERS_MAX = 512
RANKS_MAX = 256  # each is a worker, some half a megabyte of its scheduler's
_INT31, _INT63 = 2**31 - 1, 2**63 - 1
_REPLAY = '"replay_endpoint" in --kv-events-config lets lost events be asked for again'
_WILDCARDS = ("*", "0.0.0.0", "::", "[::]", "")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What the operator knows of a server and the server does not say; "" and None mean: take what it reports.

    `events_endpoint` and `replay_endpoint` are ZeroMQ endpoints of rank 0, further ranks use the next ports.
    `require_events`: refuse a server that publishes no cache events, rather than estimate what it caches.
    `below_capacity_tokens`: `WorkerSpec`'s, where it reports no moves. `role`: `WorkerSpec`'s, "" as the server says.
    `by_priority`: whether it serves by the `priority` of requests, which SGLang reports; False: it is sent none.
    `cost_model`: a preset's name or a file that
    `preble profile` wrote; without, its cost is learned. `ca_file`: certificates (PEM) of who may vouch for it, beside
    the system's. Times in seconds, bodies in bytes. Raises `InvalidConfig` naming the field.
    """

    api_key: str = field(default="", repr=False)
    ca_file: str = ""
    model: str = ""
    block_size: int | None = None
    kv_capacity_tokens: int | None = None
    below_capacity_tokens: int = 0
    role: Role | Literal[""] = ""
    by_priority: bool | None = None
    events_endpoint: str = ""
    replay_endpoint: str = ""
    events_topic: str = ""
    require_events: bool = False
    cost_model: str = ""
    answer_seconds: float = 5.0
    max_body_bytes: int = 8 << 20
    max_line_bytes: int = 8 << 20
    max_requests: int = 4096

    def __post_init__(self) -> None:
        for name, high in (("block_size", 65_536), ("kv_capacity_tokens", _INT31)):
            if getattr(self, name) is not None:
                check_int(f"ServerOptions.{name}", getattr(self, name), 1, high)
        for name in ("max_body_bytes", "max_line_bytes", "max_requests"):
            check_int(f"ServerOptions.{name}", getattr(self, name), 1, _INT31)
        check_int("ServerOptions.below_capacity_tokens", self.below_capacity_tokens, 0, _INT31)
        if self.role != "":
            check_role("ServerOptions.role", self.role)
        check_fields(self, "be positive", "answer_seconds")
        for name in ("events_endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value and not re.fullmatch(r"tcp://.+:\d+|ipc://.+|inproc://.+", value):
                raise InvalidConfig(f"ServerOptions.{name} must be a ZeroMQ endpoint, got {value!r}")
        if self.replay_endpoint and not self.events_endpoint:
            raise InvalidConfig("ServerOptions.replay_endpoint is of no use without events_endpoint")


@dataclass(frozen=True, slots=True)
class EventSource:
    """The sockets of one data-parallel rank, as endpoints to connect to; "" where there is none."""

    endpoint: str
    replay_endpoint: str = ""
    topic: str = ""
    load_endpoint: str = ""
    load_topic: str = ""


@dataclass(frozen=True, slots=True)
class ServedName:
    """A name that requests to a server may use; `base`: the model that it is a LoRA adapter of, "" for a model."""

    name: str
    base: str = ""


@dataclass(frozen=True, slots=True)
class EnginePriorities:
    """The engine's own `priority` of requests of each class; None: it is sent none, which counts as `unsaid` there. Of
    two, vLLM serves the lower one first, SGLang the higher one unless --schedule-low-priority-values-first. They differ
    by 1, at which SGLang preempts nobody unless its operator says so (--priority-scheduling-preemption-threshold)."""

    interactive: int | None = None
    batch: int | None = None
    unsaid: int = 0

    def of(self, claim: Claim | None) -> int | None:
        """For a request with such a claim."""
        return self.batch if claim is not None and claim.priority == BATCH else self.interactive

    def capped(self, claim: Claim, given: Any) -> int | None:
        """For one whose client gave a priority itself: that, where it is an integer and no earlier than what its class
        has; else what its class has. None: the server is not known to serve by it."""
        if self.batch is None:
            return None
        usual = self.unsaid if self.interactive is None else self.interactive
        own = self.batch if claim.priority == BATCH else usual
        return given if type(given) is int and (given - own) * (self.batch - usual) > 0 else own


_NO_PRIORITIES = EnginePriorities()


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server reported. `events` has a source for each rank, or none at all.

    `start` is a text that differs from one start of the server to the next, "" if it gives nothing of the kind.
    `cumulative`: each line of a stream repeats all output tokens so far. `advice`: what is missing, and the flag.
    `cached_first`, `role`: `WorkerSpec`'s. `bootstrap_port`: where SGLang's decode servers ask a prefill server for KV.
    `priorities`: what is sent to it as a request's own `priority`. `served`: the names that /v1/models lists, at most
    `NAMES_MAX`. `work`: what its metrics say of requests that it served before, None where that is too little.
    """

    engine: str
    version: str
    model: str
    block_size: int
    kv_capacity_tokens: int
    max_model_tokens: int
    max_running: int | None = None
    ranks: int = 1
    start: str = ""
    events: tuple[EventSource, ...] = ()
    cumulative: bool = True
    advice: tuple[str, ...] = ()
    served: tuple[ServedName, ...] = ()
    work: ServedWork | None = None
    cached_first: bool = False
    role: Role = BOTH
    bootstrap_port: int = 0
    priorities: EnginePriorities = _NO_PRIORITIES

    def with_metrics(self, text: str) -> ServerInfo:
        """The same with what the text of /metrics says of its speed; what cannot be right is named in `advice`."""
        work, problem = served_work(self.engine, text)
        return replace(self, work=work, advice=(*self.advice, *([problem] if problem else [])))


# --- SGLang -----------------------------------------------------------------------------------------------------------

_SGLANG_EVENTS = (
    """--kv-events-config '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}' """
    "turns cache events on; without them what it caches is guessed"
)
_SGLANG_CACHED_FIRST = ("lpm", "dfs-weight")  # of its --schedule-policy
_BOOTSTRAP_PORT = 8998  # where it says nothing
_SGLANG_LOAD = "--load-publish-endpoint auto (0.5.23 on) reports the load at once"
_SGLANG_HITS = "--enable-cache-report lets answers of /v1 report their hit; without it a gateway counts none"


def sglang_info(url: str, answer: Mapping[str, Any], options: ServerOptions) -> ServerInfo:
    """What the body says, of /server_info. Raises `ProtocolError` naming a field that is not what it should be."""
    name = f"{url}/server_info"
    ranks = _int(answer, "dp_size", name, 1, RANKS_MAX, 1)
    events = _given_sources(options, ranks) or _sglang_sources(url, answer, ranks)
    max_length = _int(answer, "context_length", name, 1, _INT31, None)
    if max_length is None:
        max_length = _int(answer, "max_req_input_len", name, 1, _INT31, _INT31)
    advice = _advice(url, options, events, _SGLANG_EVENTS, _SGLANG_LOAD)
    if answer.get("enable_cache_report") is False:
        advice = (*advice, _SGLANG_HITS)
    return ServerInfo(
        "sglang",
        str(answer.get("version") or ""),
        options.model or str(answer.get("served_model_name") or answer.get("model_path") or ""),
        options.block_size or _int(answer, "page_size", name, 1, 65_536, 1),
        options.kv_capacity_tokens or _int(answer, "max_total_num_tokens", name, 1, _INT31),
        max_length,
        _int(answer, "max_running_requests", name, 1, _INT31, None),
        ranks,
        _digest(answer.get("startup_time")),
        events,
        not (answer.get("incremental_streaming_output") or answer.get("stream_output")),
        advice,
        cached_first=answer.get("schedule_policy") in _SGLANG_CACHED_FIRST,
        role=options.role or _sglang_role(answer),
        bootstrap_port=_int(answer, "disaggregation_bootstrap_port", name, 0, 65_535, _BOOTSTRAP_PORT),
        priorities=_sglang_priorities(answer, options),
    )


def _sglang_priorities(answer: Mapping[str, Any], options: ServerOptions) -> EnginePriorities:
    """By its --enable-priority-scheduling. A request without a priority has --default-priority-value there; where none
    is set it would come last of all, so interactive ones are sent 0."""
    if answer.get("enable_priority_scheduling") is not True or options.by_priority is False:
        return _NO_PRIORITIES
    usual, later = answer.get("default_priority_value"), 1 if answer.get("schedule_low_priority_values_first") else -1
    if type(usual) is not int:
        return EnginePriorities(0, later)
    return EnginePriorities(None, min(max(usual + later, -_INT63 - 1), _INT63), usual)


def _sglang_role(answer: Mapping[str, Any]) -> Role:
    """By its --disaggregation-mode."""
    mode = answer.get("disaggregation_mode")
    return PREFILL if mode == PREFILL else DECODE if mode == DECODE else BOTH


def _sglang_sources(url: str, answer: Mapping[str, Any], ranks: int) -> tuple[EventSource, ...]:
    described = answer.get("kv_events")
    if isinstance(described, Mapping):
        name = f"{url}/server_info kv_events"
        if described.get("publisher") != "zmq":
            return ()
        host = _reachable(url, str(described.get("endpoint_host") or ""))
        events, replay, load = (
            _int(described, f"{what}endpoint_port_base", name, 1, 65_536 - ranks, None if what else 0)
            for what in ("", "replay_", "load_")
        )
        topic, load_topic = str(described.get("topic") or ""), str(described.get("load_topic") or "")
        return tuple(
            EventSource(_port(host, events, r), _port(host, replay, r), topic, _port(host, load, r), load_topic)
            for r in range(ranks)
        )
    try:
        config = json.loads(answer.get("kv_events_config") or "{}")
    except (ValueError, TypeError):
        return ()
    return tuple(_configured(url, config, r) for r in range(ranks)) if _publishes(config) else ()


def _port(host: str, base: int | None, rank: int) -> str:
    return f"tcp://{host}:{base + rank}" if base else ""


# --- vLLM -------------------------------------------------------------------------------------------------------------

_VLLM_EVENTS = (
    """--kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", """
    """"replay_endpoint": "tcp://*:5657"}' turns cache events on; """
    "a server older than 0.32 may not report them, give ServerOptions.events_endpoint"
)
_CACHE = "vllm:cache_config_info"
_CREATED = ("process_start_time_seconds", "vllm:request_success_created")
_CREATED_MAX = 16 * RANKS_MAX  # samples: one for each rank and way in which a request may end


def vllm_info(
    url: str, models: Mapping[str, Any], metrics: str, sources: Mapping[str, Any], version: str, options: ServerOptions
) -> ServerInfo:
    """What is read from /v1/models, the text of /metrics ("" if it has none), /kv_event_sources ({} if it has none) and
    /version. Raises `ProtocolError` naming what is not as it should be, `HandshakeRefused` naming the option that says
    what the server does not."""
    data = models.get("data")
    if not isinstance(data, list) or not all(isinstance(card, Mapping) for card in data):
        raise ProtocolError(f"{url}/v1/models: data must be a list of objects")
    cards: list[Mapping[str, Any]] = data
    card = next((card for card in cards if options.model in ("", card.get("id"))), None)
    if card is None or not card.get("id"):
        raise HandshakeRefused(f"{url}/v1/models has no model {options.model or 'at all'}")
    engines = [sample.labels for sample in samples(metrics, (_CACHE,), RANKS_MAX)]
    created = sorted(sample.value for sample in samples(metrics, _CREATED, _CREATED_MAX))
    cache = engines[0] if engines else {}
    block_size = options.block_size or _label(cache, "block_size")
    capacity = options.kv_capacity_tokens or _label(cache, "kv_cache_size_tokens")
    if not capacity and block_size and _label(cache, "num_gpu_blocks"):
        capacity = block_size * _label(cache, "num_gpu_blocks")
    for name, value in (("block_size", block_size), ("kv_capacity_tokens", capacity)):
        if not value:
            raise HandshakeRefused(f"{url}/metrics does not say {name}: give ServerOptions.{name}")
    ranks = max(len(engines), 1)
    events = _given_sources(options, ranks) or _vllm_sources(url, sources, ranks)
    advice = _advice(url, options, events, _VLLM_EVENTS)
    return ServerInfo(
        "vllm",
        version,
        str(card["id"]),
        block_size,
        min(capacity, _INT31),
        _int(card, "max_model_len", f"{url}/v1/models", 1, _INT31, _INT31),
        None,
        ranks,
        _digest(created),
        events,
        False,
        advice,
        served_names(models),
        role=options.role or BOTH,
        priorities=EnginePriorities(None, 1) if options.by_priority else _NO_PRIORITIES,
    ).with_metrics(metrics)


def _label(labels: Mapping[str, str], name: str) -> int:
    """A positive number among a metric's labels, 0 if there is none."""
    return digits(labels.get(name, "")) or 0


def served_names(models: Any) -> tuple[ServedName, ...]:
    """The names in a body of /v1/models; what is no card with a name is left out."""
    cards = models.get("data") if isinstance(models, Mapping) else None
    found = []
    for card in cards[:NAMES_MAX] if isinstance(cards, list) else ():
        name, base = (card.get(key) for key in ("id", "parent")) if isinstance(card, Mapping) else (None, None)
        if isinstance(name, str) and 0 < len(name) <= NAME_CHARACTERS_MAX:
            found.append(ServedName(name, base if isinstance(base, str) else ""))
    return tuple(found)


def digits(text: str) -> int | None:
    """A number written in digits, None for anything else and from 12 digits on."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else None


def _vllm_sources(url: str, sources: Mapping[str, Any], ranks: int) -> tuple[EventSource, ...]:
    """/kv_event_sources: rank -> config with the endpoints that this rank has bound."""
    configs = [sources.get(str(rank)) for rank in range(ranks)]
    if not all(isinstance(config, Mapping) and _publishes(config) for config in configs):
        return ()
    return tuple(_configured(url, config, 0) for config in configs if config is not None)


# --- both -------------------------------------------------------------------------------------------------------------


def _advice(
    url: str, options: ServerOptions, events: tuple[EventSource, ...], turn_on: str, load: str = ""
) -> tuple[str, ...]:
    """What is missing, and the flag. Raises `HandshakeRefused` where that is cache events, which must not be."""
    if not events and options.require_events:
        raise HandshakeRefused(f"{url} publishes no cache events: {turn_on}")
    if not events:
        return (turn_on,)
    replay = "" if events[0].replay_endpoint else _REPLAY
    return tuple(text for text in (replay, "" if events[0].load_endpoint else load) if text)


def _publishes(config: Any) -> bool:
    return isinstance(config, Mapping) and config.get("publisher") == "zmq" and bool(config.get("endpoint"))


def _configured(url: str, config: Mapping[str, Any], rank: int) -> EventSource:
    """The sockets of a rank where the server reports the configuration that it was started with."""
    endpoint, replay = (_dialled(url, str(config.get(name) or "")) for name in ("endpoint", "replay_endpoint"))
    return EventSource(_of_rank(endpoint, rank), _of_rank(replay, rank), str(config.get("topic") or ""))


def _given_sources(options: ServerOptions, ranks: int) -> tuple[EventSource, ...]:
    if not options.events_endpoint:
        return ()
    return tuple(
        EventSource(_of_rank(options.events_endpoint, r), _of_rank(options.replay_endpoint, r), options.events_topic)
        for r in range(ranks)
    )


def _of_rank(endpoint: str, rank: int) -> str:
    """Rank r uses the r-th port from the base, or a suffix where there are no ports."""
    if not endpoint or rank == 0:
        return endpoint
    head, colon, port = endpoint.rpartition(":")
    base = digits(port)
    return f"{endpoint}_dp{rank}" if base is None else f"{head}{colon}{base + rank}"


def _dialled(url: str, endpoint: str) -> str:
    """An endpoint that was bound, as one to connect to: a wildcard is the host of the URL."""
    if not endpoint.startswith("tcp://"):
        return endpoint
    host, _, port = endpoint[len("tcp://") :].rpartition(":")
    return "" if digits(port) is None else f"tcp://{_reachable(url, host)}:{port}"


def _reachable(url: str, host: str) -> str:
    if host not in _WILDCARDS:
        return host
    name = urlsplit(url).hostname or "127.0.0.1"
    return f"[{name}]" if ":" in name else name


def _int(answer: Mapping[str, Any], key: str, where: str, low: int, high: int, default: Any = 0) -> Any:
    """An int of an answer; `default` where it is absent or null, 0 meaning that it must be there."""
    value = answer.get(key)
    if value is None and default != 0:
        return default
    if type(value) is not int or not low <= value <= high:
        shown = value if type(value) in (int, float) else type(value).__name__
        raise ProtocolError(f"{where}: {key} must be an int in [{low}, {high}], got {shown}")
    return value


def _digest(values: Any) -> str:
    """A short text for what differs from start to start; "" if there is nothing."""
    if not values:
        return ""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]
