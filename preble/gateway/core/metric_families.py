"""Metrics that are there already, read from scheduler, router and gateway when they are asked for. Owns these families'
names, and the bound on labels: beyond `WORKER_LABELS_MAX` workers the rest is summed under the label "other".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import MissingExtra
from ...router.shared_bookings import COUNTED as SIBLING_REPORTS
from ...scheduling.autoscaling import TARGET_UTILISATION

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
except ImportError as error:
    raise MissingExtra("metrics need prometheus_client: pip install 'preble[gateway]'") from error

if TYPE_CHECKING:
    from ...scheduler import GlobalScheduler

WORKER_LABELS_MAX = 1000
OTHER = "other"

Family = Any  # a CounterMetricFamily or a GaugeMetricFamily


def read_text(scheduler: GlobalScheduler, router: Mapping[str, Any], gateway: Mapping[str, Any]) -> bytes:
    """All of them in Prometheus' text format. `router` and `gateway` are their `stats`. Any thread may call it."""
    registry = CollectorRegistry()
    stats = scheduler.stats()
    registry.register(_Snapshot(_scheduler_families(stats)))
    registry.register(_Snapshot(scaling_families(stats["scaling"])))
    registry.register(_Snapshot(_worker_families(stats["workers"], router["workers"])))
    registry.register(_Snapshot(replica_families(stats["scaling"], router["workers"], gateway.get("model_of", {}))))
    registry.register(_Snapshot(_router_families(router, gateway)))
    registry.register(_Snapshot(discovery_families(gateway.get("discovery", ()))))
    text: bytes = generate_latest(registry)
    return text


class _Snapshot:
    """A collector of what is there already."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = list(families)

    def collect(self) -> list[Family]:
        """What Prometheus' library asks for."""
        return self._families


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"preble_{name}", text, value)


def _level(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"preble_{name}", text, value)


def _labelled(
    kind: type, name: str, text: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], float]]
) -> Family:
    """A family with a sample for each (values of the labels, value)."""
    family = kind(f"preble_{name}", text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _scheduler_families(stats: Mapping[str, Any]) -> list[Family]:
    tree, policy, made = stats["tree"], stats["policy"], stats["plans"].get("made", {})
    decisions = [((policy, reason), count) for reason, count in stats["reasons"].items()]
    plans = [((kind,), count) for kind, count in made.items()]
    evicted = [(("expired",), stats["expired_nodes"]), (("full",), tree["shed_nodes"])]
    pulls = stats["pulls"]
    return [
        _labelled(CounterMetricFamily, "requests", "Decisions by policy and reason", ("policy", "reason"), decisions),
        _labelled(CounterMetricFamily, "replication_plans", "Plans that move or copy hot prefixes", ("kind",), plans),
        _labelled(CounterMetricFamily, "index_evictions", "Nodes that left the index", ("why",), evicted),
        _level("index_bytes", "Memory of the prefix index", tree["bytes_used"]),
        _level("index_nodes", "Nodes of the prefix index", tree["nodes"]),
        _level("leases_active", "Bookings of requests that have not ended", stats["live_requests"]),
        _level("leases_of_peers", "Of these, bookings of other routers' requests", stats["peer_bookings"]),
        _counter("lease_expired", "Bookings given back because nobody ended them", stats["expired_leases"]),
        _counter("scheduler_ticks_failed", "Background rounds that failed", stats["failed_ticks"]),
        _counter("pulls", "Requests sent with a pull of KV from another worker", pulls.get("asked", 0)),
        _counter("pulled_tokens", "Tokens whose KV came so, instead of being computed", pulls.get("moved_tokens", 0)),
    ]


_SCALING_METRICS = {
    "workers": "Workers that take any request",
    "prefill_load": "Seconds of prefill that arrive in a second",
    "decode_load": "Seconds of decoding, at full batches, that arrive in a second",
    "desired_workers": "The fewest workers that are busy for at most 0.7 of their time",
    "one_more_saves_seconds": "Mean time to first token that a worker more would save",
    "one_less_costs_seconds": "And that a worker less would cost; none where there is one worker",
}


def scaling_families(scaling: Mapping[str, Any]) -> list[Family]:
    """The advice; what a drain costs is known of some workers only, the least loaded."""
    advice = [
        _level(f"scaling_{name}", text, scaling[name])
        for name, text in _SCALING_METRICS.items()
        if scaling[name] is not None
    ]
    text = "Seconds to compute again what only this worker caches"
    drains = [((worker,), seconds) for worker, seconds in scaling["drain_seconds"].items()]
    return [*advice, _labelled(GaugeMetricFamily, "scaling_drain_seconds", text, ("worker",), drains)]


OBSERVED_SECONDS_MIN = 60.0  # of a fleet seen for less nobody is to take anything away
ROUNDING = 1e-9


def replica_families(scaling: Mapping[str, Any], workers: Mapping[str, Any], models: Mapping[str, str]) -> list[Family]:
    """How many servers there should be, in all and of each model, where `workers`, by address, are all ranks of those
    that there are, and `models` what they serve. A model's part is by the load of its workers; what workers asked for
    that are gone is shared out in the same way."""
    ready = {address: row.get("worker_id", "") for address, row in workers.items() if row.get("state") == "ready"}
    of_models: defaultdict[str, list[str]] = defaultdict(list)
    for address in ready:
        of_models[models.get(address, "")].append(address)
    loads, observed = scaling["worker_loads"], scaling["observed_seconds"]
    known = sum(loads.values())
    more = (scaling["prefill_load"] + scaling["decode_load"]) / known if known > 0.0 else 1.0

    def replicas(model: str) -> int:
        load = more * sum(loads.get(ready[address], 0.0) for address in of_models[model])
        return _replicas(math.ceil(load / TARGET_UTILISATION - ROUNDING), of_models[model], observed)

    named = sorted(model for model in of_models if model)[:WORKER_LABELS_MAX]
    text = "Servers, of all ranks, that would have the desired workers"
    return [
        _level("scaling_desired_replicas", text, _replicas(scaling["desired_workers"], ready, observed)),
        _labelled(
            GaugeMetricFamily, "scaling_desired_replicas_of_model", "The same of the servers of one model", ("model",),
            [((model,), replicas(model)) for model in named],
        ),
    ]  # fmt: skip


def _replicas(desired_workers: int, addresses: Collection[str], observed_seconds: float) -> int:
    """The servers, of as many ranks as those at these addresses have, with so many workers. A gateway that has just
    come has seen little work: it says that there are enough until it has looked on for a while."""
    servers = len({address.partition("#")[0] for address in addresses})
    ranks = len(addresses) / servers if servers else 1.0
    desired = max(1, math.ceil(desired_workers / ranks))
    return max(desired, servers) if observed_seconds < OBSERVED_SECONDS_MIN else desired


_DISCOVERY_COUNTS = {
    "age_seconds": "Since a source of discovery last confirmed its servers",
    "is_doubted": "1 while an answer that lacks most servers takes nobody away",
    "left_out": "Servers found that are not used: beyond the bound, or wrong",
}


def discovery_families(sources: Sequence[Mapping[str, Any]]) -> list[Family]:
    """Each source of discovery, and how its servers are."""
    servers = [((one["source"], phase), count) for one in sources for phase, count in one["servers"].items()]
    failures = [((one["source"],), one["failures"]) for one in sources]
    text = "Servers of a source by phase: serving, withheld (not ready), draining"
    return [
        _labelled(GaugeMetricFamily, "discovery_servers", text, ("source", "phase"), servers),
        *(
            _labelled(
                GaugeMetricFamily,
                f"discovery_{name.removeprefix('is_')}",
                text,
                ("source",),
                [((one["source"],), float(one[name])) for one in sources if one[name] is not None],
            )
            for name, text in _DISCOVERY_COUNTS.items()
        ),
        _labelled(
            CounterMetricFamily, "discovery_failures", "Times a source could not be asked", ("source",), failures
        ),
    ]


# Of one worker, by the scheduler's bookings: name, text, field.
_BOOKING_METRICS = (
    ("worker_requests", "Live requests booked on it", "live_requests"),
    ("worker_inflight_tokens", "Output tokens that its live requests are expected to have", "live_output_tokens"),
    ("worker_load_seconds", "Its load in the window", "load_seconds"),
    ("worker_cached_tokens", "Tokens estimated cached", "cached_tokens"),
    ("worker_away_tokens", "Of these, tokens in host memory or on disk", "away_tokens"),
    ("worker_kv_capacity_tokens", "Tokens that fit into its GPU's memory", "kv_capacity_tokens"),
)
_LOADED_TEXT = "Cached prompt tokens that were to be loaded, by medium: host, disk"
# Of one worker, by the router: name, text, field; and the field of its feed's counters where a server is attached,
# whose events come on sockets beside its link.
_LINK_METRICS = (
    ("worker_restarts", "Starts after the first", "restarts", None),
    ("worker_losses", "Connections lost", "losses", None),
    ("kv_event_batches", "Batches of cache events", "event_batches", "batches"),
    ("kv_event_gaps", "Holes in the stream of events", "event_gaps", "gaps"),
    ("kv_replays", "Replays asked for", "replays", "replays"),
    ("kv_resyncs", "Events lost for good", "resyncs", "resyncs"),
)
_EVENT_TYPES = {
    "BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared", "PrefixEvicted": "evicted",
    "RequestPlaced": "placed", "RequestPrefilled": "prefilled", "RequestEnded": "ended",
}  # fmt: skip
_EVENTS_TEXT = "Cache events, and reports of requests, by type; of attached servers batches are counted only"


def _worker_families(loads: Mapping[str, Any], routers: Mapping[str, Any]) -> list[Family]:
    """One family for each metric, one sample for each worker; those beyond the bound are summed."""
    rows = [(row.get("worker_id") or address, row) for address, row in sorted(routers.items())]
    labelled = [(name if i < WORKER_LABELS_MAX else OTHER, name, row) for i, (name, row) in enumerate(rows)]

    def family(kind: type, name: str, text: str, value_of: Callable[[str, Mapping[str, Any]], float]) -> Family:
        sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for label, worker, row in labelled:
            sums[label,] += float(value_of(worker, row))
        return _labelled(kind, name, text, ("worker",), sums.items())

    def booked(field: str) -> Callable[[str, Mapping[str, Any]], float]:
        return lambda worker, _: loads.get(worker, {}).get(field, 0)

    def reported(own: str, feed: str | None) -> Callable[[str, Mapping[str, Any]], float]:
        return lambda _, row: row.get(own, 0) + (row.get("feed") or {}).get(feed, 0)

    events: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for label, _, row in labelled:
        for kind, count in row.get("events", {}).items():
            events[_EVENT_TYPES.get(kind, OTHER), label] += count
    loaded: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for label, worker, _ in labelled:
        for medium in ("host", "disk"):
            loaded[label, medium] += booked(f"{medium}_loaded_tokens")(worker, {})
    epochs = [((worker,), row["epoch"] / 1e9) for worker, row in rows[:WORKER_LABELS_MAX]]
    started = "When it was started, seconds since 1970"
    return [
        family(GaugeMetricFamily, "worker_up", "1 while it may take requests", lambda _, r: r.get("state") == "ready"),
        *(family(GaugeMetricFamily, name, text, booked(field)) for name, text, field in _BOOKING_METRICS),
        _labelled(CounterMetricFamily, "worker_loaded_tokens", _LOADED_TEXT, ("worker", "medium"), loaded.items()),
        *(family(CounterMetricFamily, name, text, reported(own, feed)) for name, text, own, feed in _LINK_METRICS),
        _labelled(CounterMetricFamily, "kv_events", _EVENTS_TEXT, ("type", "worker"), events.items()),
        _labelled(GaugeMetricFamily, "worker_epoch", started, ("worker",), epochs),
    ]


_ROUTER_COUNTERS = {
    "finished": "Generations that finished",
    "failed": "Generations that failed",
    "cancelled": "Generations whose client, or a stop string, ended them",
    "resumed": "Generations that went on elsewhere after a loss",
    "queue_full": "Generations refused because every worker was at its bound",
    "refused": "Generations refused because their first token would have taken too long",
    "shed": "Generations given up because it had not come in their client's time",
}


def _router_families(router: Mapping[str, Any], gateway: Mapping[str, Any]) -> list[Family]:
    return [
        *(_counter(f"generations_{name}", text, router[name]) for name, text in _ROUTER_COUNTERS.items()),
        _level("generations_live", "Generations that go on", router["live_requests"]),
        _level("choices_live", "Choices that the gateway holds", gateway["live_choices"]),
        _level("tasks", "Tasks of the event loop", gateway["tasks"]),
        _level("ready", "1 while a request would find a worker", gateway["ready"]),
        *_sibling_families(router["siblings"]),
    ]


def _sibling_families(siblings: Mapping[str, Any]) -> list[Family]:
    """What the routers of several processes, and of peers, report to each other."""
    reports = [((what,), siblings.get(what, 0)) for what in SIBLING_REPORTS]
    text = (
        "Reports of requests between the routers of several processes and peers: sent, received; lost, doubled, "
        "malformed messages; snapshots; bookings given_back because one was restarted or silent; not booked: "
        "unknown_worker, refused, over_bound, left_out"
    )
    return [
        _labelled(CounterMetricFamily, "sibling_reports", text, ("what",), reports),
        _level("siblings_connected", "Other processes and peers whose reports come", siblings.get("connected", 0)),
        _level("siblings_silent", "Other processes and peers whose reports do not come", siblings.get("silent", 0)),
    ]
