"""Traces: an OpenTelemetry span for each request, with children for tokenising, deciding and the engine's work, and the
trace's name handed on to the servers behind.

Owns what a span says. `traceparent` and `tracestate` of a request are its span's parent, and go on to attached SGLang
and vLLM servers with the span in between; without a span they go on as they came. `preble worker` receives no trace.
A span has ids, times, counts and the decision; never a prompt, an output or a key. Needs the extra `otel`, and nothing
of it is loaded where it is not asked for.

At its bound (2048 spans that wait for the collector, `OTEL_BSP_MAX_QUEUE_SIZE`) spans are dropped, which OpenTelemetry
logs. The variables of OpenTelemetry hold, such as OTEL_SERVICE_NAME and OTEL_TRACES_SAMPLER.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from ... import __version__
from ...clock import Clock
from ...errors import MissingExtra
from ...transport.engine_servers.http_client import TRACE_HEADERS
from .header_fields import HeaderFields
from .request_context import RequestContext
from .telemetry import model_attributes, resource_attributes

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE_CHARS_MAX = 512


def trace_of(headers: HeaderFields | Mapping[str, str]) -> dict[str, str]:
    """The trace that a request belongs to, as headers; {} where it names none, or nonsense."""
    parent, state = headers.get("traceparent", ""), headers.get("tracestate", "")
    if not _TRACEPARENT.fullmatch(parent):
        return {}
    known = state and state.isascii() and state.isprintable() and len(state) <= _TRACESTATE_CHARS_MAX
    return {"traceparent": parent, "tracestate": state} if known else {"traceparent": parent}


def hand_on(trace: Mapping[str, str]) -> None:
    """Send these headers along with what this task, and those that it starts, ask of servers over HTTP."""
    if trace:
        TRACE_HEADERS.set(trace)


class Tracing:
    """Spans that go to the collector at `endpoint`, an OTLP/HTTP URL such as http://host:4318/v1/traces.

    `clock` is the one that requests are timed by. Raises `MissingExtra`. `begin` and `end` belong to the loop; the
    sending has a thread of its own.
    """

    what = "spans"

    def __init__(self, endpoint: str, clock: Clock = time.monotonic) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise MissingExtra(f"traces need {error.name}: pip install 'preble[otel]'") from error
        self._clock = clock
        # `end_senders` ends it, and waits for so long.
        self._provider = TracerProvider(resource=Resource.create(resource_attributes()), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("preble.gateway", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._server_kind = trace.SpanKind.SERVER
        self._kinds = {"engine": trace.SpanKind.CLIENT}
        self._within = trace.SpanKind.INTERNAL
        self._error = trace.StatusCode.ERROR
        self._in_span = trace.set_span_in_context

    def begin(self, headers: HeaderFields | Mapping[str, str]) -> Any:
        """The span of a request that has come, and its name handed on."""
        parent = self._propagator.extract(trace_of(headers))
        span = self._tracer.start_span("request", context=parent, kind=self._server_kind)
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=self._in_span(span))
        hand_on(carrier)
        return span

    def end(self, span: Any, method: str, route: str, status: int, context: RequestContext) -> None:
        """Say what became of it."""
        span.update_name(f"{method} {route}")
        span.set_attributes({"http.request.method": method, "http.route": route, "http.response.status_code": status})
        if span.is_recording():
            span.set_attributes(attributes_of(context, route))
            self._add_parts(span, context, route)
        if status >= 500:
            span.set_attribute("error.type", str(status))
            span.set_status(self._error)
        span.end()

    def _add_parts(self, span: Any, context: RequestContext, route: str) -> None:
        """The children: what was done for the request and when, which is known at its end."""
        now, now_ns = self._clock(), time.time_ns()
        parts = {name: (one.began, one.ended) for name, one in context.phases.items() if name in ("tokenize", "decide")}
        if "decide" in parts and context.progress.choices:
            parts["engine"] = (parts["decide"][1], now)
        within = self._in_span(span)
        for name, (began, ended) in parts.items():
            start, end = (now_ns - round((now - at) * 1e9) for at in (began, ended))
            kind = self._kinds.get(name, self._within)
            part = self._tracer.start_span(name, context=within, kind=kind, start_time=start)
            if name == "engine":
                part.set_attributes({**model_attributes(context, route), **_usage(context)})
            part.end(end_time=end)

    def send_rest(self) -> None:
        """Send what waits, and end; may hang on a collector that does not answer (`telemetry.end_senders`)."""
        self._provider.shutdown()


def attributes_of(context: RequestContext, route: str) -> dict[str, Any]:
    """What a span says of a request beside HTTP; names of OpenTelemetry's conventions where they have one."""
    attributes: dict[str, Any] = {"preble.request_id": context.request_id}
    hint = context.session
    named = {"session.id": hint.session, "gen_ai.conversation.id": hint.session, "gen_ai.agent.id": hint.agent}
    named["preble.session.parent"] = hint.parent
    attributes.update((name, value) for name, value in named.items() if value)
    choices = context.progress.choices
    if not choices:
        return attributes
    attributes |= {**model_attributes(context, route), **_usage(context)}
    first = choices[0]
    if first.decision is not None:
        attributes["preble.worker"] = first.worker or first.decision.worker
        attributes["preble.decision.worker"] = first.decision.worker
        attributes["preble.decision.reason"] = first.decision.reason
        attributes["preble.decision.matched_tokens"] = first.decision.matched_tokens
    return attributes


def _usage(context: RequestContext) -> dict[str, Any]:
    """What a request that was placed used, and how its choices ended."""
    progress = context.progress
    found: dict[str, Any] = {
        "gen_ai.usage.input_tokens": progress.prompt_tokens,
        "gen_ai.usage.output_tokens": progress.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": progress.cached_tokens,
        "gen_ai.response.finish_reasons": [one.finish_reason or "gone" for one in progress.choices],
        "gen_ai.request.stream": context.stream,
    }
    if context.first_token_seconds is not None:
        found["gen_ai.response.time_to_first_chunk"] = context.first_token_seconds
    return found
