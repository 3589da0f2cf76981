"""Traces: one OpenTelemetry span for each request, and the trace's name handed on to the servers behind.

Owns what a span says. `traceparent` and `tracestate` of a request are its span's parent, and go on to attached SGLang
and vLLM servers with the span in between; without a span they go on as they came. `preble worker` receives no trace.
A span has ids, times, counts and the decision; never a prompt, an output or a key. Needs the extra `otel`, and nothing
of it is loaded where it is not asked for.

At its bound (2048 spans that wait for the collector, `OTEL_BSP_MAX_QUEUE_SIZE`) spans are dropped, which OpenTelemetry
logs. The variables of OpenTelemetry hold, such as OTEL_SERVICE_NAME and OTEL_TRACES_SAMPLER.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from ... import __version__
from ...errors import MissingExtra
from ...transport.engine_servers.http_client import TRACE_HEADERS
from .request_context import RequestContext

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE_CHARS_MAX = 512


def trace_of(headers: Mapping[str, str]) -> dict[str, str]:
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

    Raises `MissingExtra`. `begin` and `end` belong to the loop; the sending has a thread of its own.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise MissingExtra(f"traces need {error.name}: pip install 'preble[otel]'") from error
        name = os.environ.get("OTEL_SERVICE_NAME", "preble-gateway")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("preble.gateway", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._server_kind = trace.SpanKind.SERVER
        self._error = trace.StatusCode.ERROR
        self._in_span = trace.set_span_in_context

    def begin(self, headers: Mapping[str, str]) -> Any:
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
        span.set_attributes(attributes_of(context))
        if status >= 500:
            span.set_status(self._error)
        span.end()

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()


def attributes_of(context: RequestContext) -> dict[str, Any]:
    """What a span says of a request beside HTTP; names of OpenTelemetry's conventions where they have one."""
    attributes: dict[str, Any] = {"preble.request_id": context.request_id}
    hint = context.session
    named = {"session.id": hint.session, "preble.session.parent": hint.parent, "gen_ai.agent.id": hint.agent}
    attributes.update((name, value) for name, value in named.items() if value)
    progress = context.progress
    if not progress.choices:
        return attributes
    attributes["gen_ai.request.model"] = context.model
    attributes["gen_ai.usage.input_tokens"] = progress.prompt_tokens
    attributes["gen_ai.usage.output_tokens"] = progress.output_tokens
    attributes["gen_ai.response.finish_reasons"] = [one.finish_reason or "gone" for one in progress.choices]
    attributes["preble.cached_tokens"] = progress.cached_tokens
    if context.first_token_seconds is not None:
        attributes["preble.first_token_seconds"] = context.first_token_seconds
    first = progress.choices[0]
    if first.decision is not None:
        attributes["preble.worker"] = first.worker or first.decision.worker
        attributes["preble.decision.worker"] = first.decision.worker
        attributes["preble.decision.reason"] = first.decision.reason
        attributes["preble.decision.matched_tokens"] = first.decision.matched_tokens
    return attributes
