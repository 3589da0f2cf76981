"""Prometheus metrics: what the gateway counts itself, and what it reads from scheduler and router when it is asked.

Owns their names (docs/gateway.md lists them) and the bound on labels: paths are those of the routes, statuses those
that exist, and beyond `WORKER_LABELS_MAX` workers the rest is summed under the label "other".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...clock import Clock
from ...errors import MissingExtra
from ...scheduling.records import DecisionRecord
from ...types import SessionHint
from ..text.choices import Choice, ChoiceJob, TextPiece

try:
    from prometheus_client import (
        CONTENT_TYPE_LATEST,
        CollectorRegistry,
        Counter,
        Histogram,
        ProcessCollector,
        generate_latest,
    )
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
except ImportError as error:
    raise MissingExtra("metrics need prometheus_client: pip install 'preble[gateway]'") from error

if TYPE_CHECKING:
    from ...scheduler import GlobalScheduler

WORKER_LABELS_MAX = 1000
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
DECISION_SECONDS = (5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.1, 1.0)
OTHER = "other"

Family = Any  # a CounterMetricFamily or a GaugeMetricFamily


class Metrics:
    """The metrics of one gateway. What it counts itself may be counted from any thread."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Any:
            return Counter(f"preble_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str, labels: Sequence[str] = (), buckets: Sequence[float] = SECONDS) -> Any:
            return Histogram(f"preble_{name}", text, labels, registry=registry, buckets=buckets)

        self._http = counter("http_requests", "HTTP requests by route and status", ("route", "status"))
        self._http_seconds = seconds("http_request_duration_seconds", "HTTP requests, whole streams", ("route",))
        self.first_token_seconds = seconds(
            "time_to_first_token_seconds", "From the request's arrival to its first token"
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of choices that got a first token")
        self.output_tokens = counter("output_tokens", "Output tokens")
        self.choices_ended = counter("choices_ended", "Choices by how they ended", ("finish_reason",))
        self._decision = seconds(
            "decision_duration_seconds",
            "From text to a worker, by phase: tokenize, match, decide",
            ("phase",),
            DECISION_SECONDS,
        )
        self.predicted_cached_tokens = counter(
            "predicted_cached_tokens", "Prompt tokens estimated cached on the chosen worker"
        )
        self.actual_cached_tokens = counter("actual_cached_tokens", "Prompt tokens cached by the engine's word")
        self.best_cached_tokens = counter(
            "best_eligible_cached_tokens", "Prompt tokens estimated cached where most were"
        )
        self.selected_cached_tokens = counter(
            "selected_cached_tokens", "Those on the chosen worker, of the same decisions"
        )
        self.non_max_selections = counter(
            "non_max_overlap_selections", "Decisions for a worker that had less than the best"
        )
        self._connections_refused = counter(
            "connections_refused", "Connections that were refused or cut off, by reason", ("why",)
        )
        self._sessions = counter(
            "session_requests", "Generations whose client named a session, a parent of it, an agent", ("names",)
        )
        self._regret = seconds("regret_seconds", "First token later than the best prediction for another worker")

    def request(self, route: str, status: int, seconds: float) -> None:
        """An HTTP request has ended."""
        self._http.labels(route, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def session(self, session: SessionHint) -> None:
        """A request has ended that generated; what its client named of a session is counted."""
        for name in ("session", "parent", "agent"):
            if getattr(session, name):
                self._sessions.labels(name).inc()

    def connection_refused(self, why: str) -> None:
        """A connection was refused, or cut off; `why` is one of `connections.Why`."""
        self._connections_refused.labels(why).inc()

    def record(self, record: DecisionRecord) -> None:
        """A recorded decision's request has ended; a sink for `preble.scheduling.records.Recording`."""
        if record.regret_seconds is not None:
            self._regret.observe(record.regret_seconds)

    def phase(self, name: str, seconds: float) -> None:
        """A part of placing a request took so long."""
        self._decision.labels(name).observe(seconds)

    def watch(self, scheduler: GlobalScheduler, jobs: Sequence[ChoiceJob], started: float) -> Watch:
        """Follow the jobs of one request that arrived at `started`; call it before they are placed."""
        began = self.clock()
        best = _best_tokens(scheduler, jobs)
        self.phase("match", self.clock() - began)
        return Watch(self, best, started)

    def own_text(self) -> bytes:
        """What it counts itself, in Prometheus' text format."""
        text: bytes = generate_latest(_WithoutCreated(self._registry))
        return text

    def render(self, scheduler: GlobalScheduler, router: Mapping[str, Any], gateway: Mapping[str, Any]) -> bytes:
        """Everything in Prometheus' text format. `router` and `gateway` are their `stats`. Any thread may call it."""
        registry = CollectorRegistry()
        stats = scheduler.stats()
        registry.register(_Snapshot(_scheduler_families(stats)))
        registry.register(_Snapshot(_scaling_families(stats["scaling"])))
        registry.register(_Snapshot(_worker_families(stats["workers"], router["workers"])))
        registry.register(_Snapshot(_router_families(router, gateway)))
        text: bytes = self.own_text() + generate_latest(registry)
        return text


class Watch:
    """What one request's pieces mean for the metrics."""

    def __init__(self, metrics: Metrics, best: Mapping[int, int], started: float) -> None:
        self.first_token_seconds: float | None = None
        self._metrics = metrics
        self._best = best
        self._started = started
        self._placed: set[int] = set()

    def saw(self, piece: TextPiece) -> bool:
        """Count a piece; whether it is the first of its choice."""
        metrics, choice = self._metrics, piece.choice
        metrics.output_tokens.inc(len(piece.token_ids))
        if piece.token_ids and self.first_token_seconds is None:
            self.first_token()
        is_first = choice.job.index not in self._placed
        if is_first:
            self._placed.add(choice.job.index)
            self._saw_decision(choice)
        if piece.last:
            metrics.choices_ended.labels(choice.finish_reason or OTHER).inc()
        return is_first

    def first_token(self) -> float:
        """Count the first token of all; the seconds until it came."""
        seconds = self.first_token_seconds = self._metrics.clock() - self._started
        self._metrics.first_token_seconds.observe(seconds)
        return seconds

    def ended(self, choice: Choice) -> None:
        """Count all of a choice at its end, for one whose pieces nobody looks at."""
        self._metrics.output_tokens.inc(choice.output_tokens)
        if choice.job.index == 0:
            self._saw_decision(choice)
        self._metrics.choices_ended.labels(choice.finish_reason or OTHER).inc()

    def _saw_decision(self, choice: Choice) -> None:
        metrics = self._metrics
        metrics.prompt_tokens.inc(choice.prompt_tokens)
        metrics.actual_cached_tokens.inc(choice.cached_tokens or 0)
        if choice.decision is None:
            return
        matched = choice.decision.matched_tokens
        best = max(matched, self._best.get(choice.job.index, matched))
        metrics.predicted_cached_tokens.inc(matched)
        metrics.best_cached_tokens.inc(best)
        metrics.selected_cached_tokens.inc(matched)
        if matched < best:
            metrics.non_max_selections.inc()


def _best_tokens(scheduler: GlobalScheduler, jobs: Sequence[ChoiceJob]) -> dict[int, int]:
    """The most tokens that any worker is estimated to cache, for the first job of each prompt: the others follow it."""
    best: dict[int, int] = {}
    seen: set[int] = set()
    for job in jobs:
        if id(job.token_ids) not in seen:
            seen.add(id(job.token_ids))
            best[job.index] = scheduler.match(job.token_ids, namespace=job.namespace).best_tokens
    return best


# --- read when asked --------------------------------------------------------------------------------------------------


class _WithoutCreated:
    """A registry without the time at which each counter and histogram began: a line more for every one of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Family]:
        """What Prometheus' library asks for."""
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


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
    ]


_SCALING_METRICS = {
    "workers": "Workers that take any request",
    "prefill_load": "Seconds of prefill that arrive in a second",
    "decode_load": "Seconds of decoding, at full batches, that arrive in a second",
    "desired_workers": "The fewest workers that are busy for at most 0.7 of their time",
    "one_more_saves_seconds": "Mean time to first token that a worker more would save",
    "one_less_costs_seconds": "And that a worker less would cost; none where there is one worker",
}


def _scaling_families(scaling: Mapping[str, Any]) -> list[Family]:
    """The advice; what a drain costs is known of some workers only, the least loaded."""
    advice = [
        _level(f"scaling_{name}", text, scaling[name])
        for name, text in _SCALING_METRICS.items()
        if scaling[name] is not None
    ]
    text = "Seconds to compute again what only this worker caches"
    drains = [((worker,), seconds) for worker, seconds in scaling["drain_seconds"].items()]
    return [*advice, _labelled(GaugeMetricFamily, "scaling_drain_seconds", text, ("worker",), drains)]


# Of one worker, by the scheduler's bookings: name, text, field.
_BOOKING_METRICS = (
    ("worker_requests", "Live requests booked on it", "live_requests"),
    ("worker_inflight_tokens", "Output tokens that its live requests are expected to have", "live_output_tokens"),
    ("worker_load_seconds", "Its load in the window", "load_seconds"),
    ("worker_cached_tokens", "Tokens estimated cached", "cached_tokens"),
    ("worker_kv_capacity_tokens", "Tokens that fit", "kv_capacity_tokens"),
)
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
    epochs = [((worker,), row["epoch"] / 1e9) for worker, row in rows[:WORKER_LABELS_MAX]]
    started = "When it was started, seconds since 1970"
    return [
        family(GaugeMetricFamily, "worker_up", "1 while it may take requests", lambda _, r: r.get("state") == "ready"),
        *(family(GaugeMetricFamily, name, text, booked(field)) for name, text, field in _BOOKING_METRICS),
        *(family(CounterMetricFamily, name, text, reported(own, feed)) for name, text, own, feed in _LINK_METRICS),
        _labelled(CounterMetricFamily, "kv_events", "Cache events by type", ("type", "worker"), events.items()),
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
    ]
