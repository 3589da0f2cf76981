"""Prometheus metrics of what the gateway counts itself: requests, tokens, times, by route and by model.

Owns their names (docs/gateway.md lists them) and the bounds on labels: paths are those of the routes, statuses those
that exist, and beyond `MODEL_LABELS_MAX` models the rest is counted as "other". What can be read when it is asked for
is `metric_families`'.

A generation's tokens are counted as they come; its lengths and times when its request has ended (`ended`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...clock import Clock
from ...errors import MissingExtra
from ...scheduling.records import DecisionRecord
from ..text.choices import Choice, ChoiceJob, TextPiece
from .metric_families import OTHER, read_text
from .request_context import RequestContext, note_phase
from .sessions import NO_SESSION
from .tallies import Buckets, Counts

try:
    from prometheus_client import (
        CONTENT_TYPE_LATEST,
        CollectorRegistry,
        ProcessCollector,
        generate_latest,
    )
except ImportError as error:
    raise MissingExtra("metrics need prometheus_client: pip install 'preble[gateway]'") from error

if TYPE_CHECKING:
    from ...scheduler import GlobalScheduler
    from .otlp_metrics import OtlpMetrics

MODEL_LABELS_MAX = 100
MODEL_CHARS_MAX = 128
KEY_LABELS_MAX = 1000
KEY_CHARS_MAX = 128
# Why requests are turned away, by the code of the error that they are answered with.
REFUSALS = frozenset(
    {"requests_per_minute", "tokens_per_minute", "insufficient_quota", "rate_limit", "model_not_allowed"}
    | {"admin_only", "overloaded", "queue_full", "no_workers", "draining"}
)
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
DECISION_SECONDS = (5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.1, 1.0)
TOKENS = (1, 4, 16, 64, 128, 256, 512, *(1 << bits for bits in range(10, 19)), 1 << 20)


class Metrics:
    """The metrics of one gateway. Counted by its loop; `record` alone is called by the thread of the records' sink.

    `otlp`: who else is informed of every request that generated.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, clock: Clock, otlp: OtlpMetrics | None = None) -> None:
        self.clock = clock
        self._otlp = otlp
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counts:
            found = Counts(f"preble_{name}", text, labels)
            registry.register(found)
            return found

        def seconds(name: str, text: str, labels: Sequence[str] = (), buckets: Sequence[float] = SECONDS) -> Buckets:
            found = Buckets(f"preble_{name}", text, labels, buckets)
            registry.register(found)
            return found

        self._http = counter(
            "http_requests",
            "HTTP requests; status 499 is a client that went away; what generates nothing has no model",
            ("route", "status", "model"),
        )
        self._http_seconds = seconds(
            "http_request_duration_seconds", "Time of HTTP requests, whole streams", ("route",)
        )
        self._decision = seconds(
            "decision_duration_seconds",
            "From text to a worker, by phase: tokenize (its wait for a thread included), match (how much of the prompt "
            "each worker has), decide (match, costs, choice and booking)",
            ("phase",),
            DECISION_SECONDS,
        )
        self._connections_refused = counter(
            "connections_refused",
            "Connections that were refused or cut off: head_too_large, not_http, pipelined, many, many_of_address, "
            "slow_head, slow_body, unread",
            ("why",),
        )
        self._sessions = counter(
            "session_requests", "Generations whose client named a session, a parent of it, an agent", ("names",)
        )
        self._routed = counter(
            "relayed_requests", "Relayed requests by kind and what they were routed by: tokens, text", ("kind", "by")
        )
        self._mismatches = counter(
            "prompt_token_mismatches", "Relayed requests of which the engine counts other prompt tokens", ("kind",)
        )
        self._broken = counter("relayed_streams_broken", "Relayed streams that ended with an error event", ("kind",))
        self._of_keys = {name: counter(f"key_{name}", text, labels) for name, text, labels in _KEY_COUNTERS}
        self._key_labels: set[str] = set()
        regret = seconds("regret_seconds", "First token later than the best prediction for another worker")
        self._regret = regret.labels()
        self._families: dict[str, Any] = {
            **{name: counter(name, text, labels) for name, text, labels in _MODEL_COUNTERS},
            **{name: seconds(name, text, labels, bounds) for name, text, labels, bounds in _MODEL_HISTOGRAMS},
        }
        self._of_models: dict[str, ModelMetrics] = {}

    def of_model(self, name: str) -> ModelMetrics:
        """What is counted of one model; those beyond the bound share one."""
        name = name[:MODEL_CHARS_MAX]
        found = self._of_models.get(name)
        if found is None:
            if len(self._of_models) >= MODEL_LABELS_MAX and name != OTHER:
                return self.of_model(OTHER)
            found = self._of_models[name] = ModelMetrics(name, self._families)
        return found

    def request(self, route: str, status: int, seconds: float, context: RequestContext) -> None:
        """An HTTP request has ended, which took so long."""
        model = self.of_model(context.model).name if context.progress.choices else ""
        self._http.labels(route, str(status), model).inc()
        self._http_seconds.labels(route).observe(seconds)
        if context.key_label:
            self._used(context)
        if context.progress.choices:
            self._generated(context)
            if self._otlp is not None:
                self._otlp.ended(context, route, status, seconds)

    def _used(self, context: RequestContext) -> None:
        """Count what the request has used of its key, or why it was turned away."""
        label, labels, progress = context.key_label[:KEY_CHARS_MAX], self._key_labels, context.progress
        if label not in labels:
            if len(labels) >= KEY_LABELS_MAX:
                label = OTHER
            labels.add(label)
        if context.refused is not None:
            why = context.refused if context.refused in REFUSALS else OTHER
            self._of_keys["refused"].labels(label, why).inc()
            return
        self._of_keys["requests"].labels(label).inc()
        for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
            self._of_keys[name].labels(label).inc(getattr(progress, name))

    def _generated(self, context: RequestContext) -> None:
        """The request was placed, or waited for that; whatever came of it."""
        if context.session is not NO_SESSION:
            for name in ("session", "parent", "agent"):
                if getattr(context.session, name):
                    self._sessions.labels(name).inc()
        own, progress = self.of_model(context.model), context.progress
        if context.first_token_seconds is None and not progress.output_tokens:
            return
        own.prompt_tokens.observe(progress.prompt_tokens)
        own.output_tokens.observe(progress.output_tokens)
        for choice in progress.choices:
            if choice.seconds_per_token is not None:
                own.seconds_per_token.observe(choice.seconds_per_token)
        decided = context.phases.get("decide")
        if decided is not None:
            own.gateway_queue_seconds.observe(max(decided.ended - context.started, 0.0))

    def connection_refused(self, why: str) -> None:
        """A connection was refused, or cut off; `why` is one of `connections.Why`."""
        self._connections_refused.labels(why).inc()

    def relayed(self, kind: str, *, exact: bool) -> None:
        """A request was placed by its tokens (`exact`), or by its text."""
        self._routed.labels(kind, "tokens" if exact else "text").inc()

    def tokens_differ(self, kind: str) -> None:
        """An engine counts other prompt tokens than the gateway."""
        self._mismatches.labels(kind).inc()

    def broken_off(self, kind: str) -> None:
        """A relayed stream has ended with an error event."""
        self._broken.labels(kind).inc()

    def record(self, record: DecisionRecord) -> None:
        """A recorded decision's request has ended; a sink for `preble.scheduling.records.DecisionRecording`."""
        if record.regret_seconds is not None:
            self._regret.observe(record.regret_seconds)

    def phase(self, name: str, seconds: float) -> None:
        """A part of placing a request took so long, until now."""
        self._decision.labels(name).observe(seconds)
        note_phase(name, seconds, self.clock())

    def watch(self, scheduler: GlobalScheduler, jobs: Sequence[ChoiceJob], context: RequestContext) -> Watch:
        """Follow the jobs of one request; call it before they are placed."""
        began = self.clock()
        best = _best_tokens(scheduler, jobs)
        self.phase("match", self.clock() - began)
        return Watch(self, scheduler, best, context)

    def own_text(self) -> bytes:
        """What it counts itself, in Prometheus' text format."""
        text: bytes = generate_latest(self._registry)
        return text

    def render(self, scheduler: GlobalScheduler, router: Mapping[str, Any], gateway: Mapping[str, Any]) -> bytes:
        """Everything in Prometheus' text format. `router` and `gateway` are their `stats`. Any thread may call it."""
        return self.own_text() + read_text(scheduler, router, gateway)


# --- by key -----------------------------------------------------------------------------------------------------------

_KEY = ("key",)
_KEY_COUNTERS = (
    ("requests", "Requests of a named key that were let in; beyond 1,000 names other", _KEY),
    (
        "prompt_tokens",
        "Prompt tokens of requests of a named key, by the engine's count; where a client left before it, by ours",
        _KEY,
    ),
    ("cached_tokens", "Those of them that were cached by the engine's word", _KEY),
    ("output_tokens", "Output tokens of requests of a named key", _KEY),
    (
        "refused",
        "Requests of a named key that were turned away, by the code of the error",
        ("key", "why"),
    ),
)

# --- by model ---------------------------------------------------------------------------------------------------------

_MODEL = ("model",)
_MODEL_COUNTERS = (
    ("prompt_tokens", "Prompt tokens of choices that got a first token", _MODEL),
    ("output_tokens", "Output tokens", _MODEL),
    ("choices_ended", "Choices by how they ended", ("model", "finish_reason")),
    ("predicted_cached_tokens", "Prompt tokens estimated cached on the chosen worker", _MODEL),
    ("actual_cached_tokens", "Prompt tokens cached by the engine's word", _MODEL),
    ("best_eligible_cached_tokens", "Prompt tokens estimated cached where most were", _MODEL),
    ("selected_cached_tokens", "Those on the chosen worker, of the same decisions", _MODEL),
    ("non_max_overlap_selections", "Decisions for a worker that had less than the best", _MODEL),
)
_MODEL_HISTOGRAMS = (
    ("time_to_first_token_seconds", "From the request's arrival to its first token", _MODEL, SECONDS),
    ("time_per_output_token_seconds", "Between output tokens of a choice, its mean", _MODEL, TOKEN_SECONDS),
    (
        "queue_seconds",
        "Waiting in the gateway (until a worker was chosen), and at the engine (from then to the first token, less the "
        "prefill by the cost model)",
        ("model", "at"),
        SECONDS,
    ),
    ("request_prompt_tokens", "Prompt tokens of a request", _MODEL, TOKENS),
    ("request_output_tokens", "Output tokens of a request, all choices", _MODEL, TOKENS),
)


class ModelMetrics:
    """What is counted of one model. Made once, for looking up a label takes longer than counting."""

    def __init__(self, name: str, families: Mapping[str, Any]) -> None:
        self.name = name
        self._ends = families["choices_ended"]

        def of(family: str, *more: str) -> Any:
            return families[family].labels(name, *more)

        self.prompt_tokens_total = of("prompt_tokens")
        self.output_tokens_total = of("output_tokens")
        self.predicted_cached_tokens = of("predicted_cached_tokens")
        self.actual_cached_tokens = of("actual_cached_tokens")
        self.best_cached_tokens = of("best_eligible_cached_tokens")
        self.selected_cached_tokens = of("selected_cached_tokens")
        self.non_max_selections = of("non_max_overlap_selections")
        self.first_token_seconds = of("time_to_first_token_seconds")
        self.seconds_per_token = of("time_per_output_token_seconds")
        self.gateway_queue_seconds = of("queue_seconds", "gateway")
        self.engine_queue_seconds = of("queue_seconds", "engine")
        self.prompt_tokens = of("request_prompt_tokens")
        self.output_tokens = of("request_output_tokens")

    def choice_ended(self, finish_reason: str | None) -> None:
        """A choice has ended so."""
        self._ends.labels(self.name, finish_reason or OTHER).inc()


class Watch:
    """What one request's pieces mean for the metrics."""

    def __init__(
        self, metrics: Metrics, scheduler: GlobalScheduler, best: Mapping[int, int], context: RequestContext
    ) -> None:
        self.first_token_seconds: float | None = None
        self._clock = metrics.clock
        self._own = metrics.of_model(context.model)
        self._scheduler = scheduler
        self._best = best
        self._context = context
        self._placed: set[int] = set()
        self._first: dict[int, tuple[float, int]] = {}  # by choice: when its first tokens came, and how many

    def saw(self, piece: TextPiece) -> bool:
        """Count a piece; whether it is the first of its choice."""
        own, choice = self._own, piece.choice
        if piece.token_ids:
            own.output_tokens_total.inc(len(piece.token_ids))
            self._saw_tokens(choice, len(piece.token_ids))
        is_first = choice.job.index not in self._placed
        if is_first:
            self._placed.add(choice.job.index)
            self._saw_decision(choice)
        if piece.last:
            own.choice_ended(choice.finish_reason)
            choice.seconds_per_token = self._seconds_per_token(choice)
        return is_first

    def first_token(self, choice: Choice) -> float:
        """Count the first token of all, which is this choice's; the seconds until it came."""
        now = self._clock()
        seconds = self.first_token_seconds = now - self._context.started
        self._first.setdefault(choice.job.index, (now, 1))
        self._own.first_token_seconds.observe(seconds)
        self._saw_engine_queue(choice, now)
        return seconds

    def ended(self, choice: Choice) -> None:
        """Count all of a choice at its end, for one whose pieces nobody looks at. The first has the tokens of all."""
        self.left(choice)
        self._own.choice_ended(choice.finish_reason)
        if len(self._context.progress.choices) == 1:
            choice.seconds_per_token = self._seconds_per_token(choice)

    def left(self, choice: Choice) -> None:
        """Count the tokens of such a choice, whose end nobody waits for."""
        self._own.output_tokens_total.inc(choice.output_tokens)
        if choice.job.index == 0:
            self._saw_decision(choice)

    def _saw_tokens(self, choice: Choice, count: int) -> None:
        if choice.job.index not in self._first:
            self._first[choice.job.index] = self._clock(), count
        if self.first_token_seconds is None:
            self.first_token(choice)

    def _saw_engine_queue(self, choice: Choice, now: float) -> None:
        decided = self._context.phases.get("decide")
        if choice.decision is None or decided is None:
            return
        prompt = choice.decision.prompt_tokens
        cached = choice.decision.matched_tokens if choice.cached_tokens is None else min(choice.cached_tokens, prompt)
        prefill = self._scheduler.prefill_seconds(choice.worker, prompt, cached)
        self._own.engine_queue_seconds.observe(max(now - decided.ended - prefill, 0.0))

    def _seconds_per_token(self, choice: Choice) -> float | None:
        """The mean time between its tokens after the first ones; None where there were no more."""
        began, count = self._first.get(choice.job.index, (0.0, choice.output_tokens))
        more = choice.output_tokens - count
        return (self._clock() - began) / more if more > 0 else None

    def _saw_decision(self, choice: Choice) -> None:
        own = self._own
        own.prompt_tokens_total.inc(choice.prompt_tokens)
        own.actual_cached_tokens.inc(choice.cached_tokens or 0)
        if choice.decision is None:
            return
        matched = choice.decision.matched_tokens
        best = max(matched, self._best.get(choice.job.index, matched))
        own.predicted_cached_tokens.inc(matched)
        own.best_cached_tokens.inc(best)
        own.selected_cached_tokens.inc(matched)
        if matched < best:
            own.non_max_selections.inc()


def _best_tokens(scheduler: GlobalScheduler, jobs: Sequence[ChoiceJob]) -> dict[int, int]:
    """The most tokens that any worker is estimated to cache, for the first job of each prompt: the others follow it."""
    if len(jobs) == 1:
        job = jobs[0]
        return {job.index: scheduler.match(job.token_ids, namespace=job.namespace).best_tokens}
    best: dict[int, int] = {}
    seen: set[int] = set()
    for job in jobs:
        if id(job.token_ids) not in seen:
            seen.add(id(job.token_ids))
            best[job.index] = scheduler.match(job.token_ids, namespace=job.namespace).best_tokens
    return best
