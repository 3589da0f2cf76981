"""The histograms of OpenTelemetry's conventions for servers of generative AI, sent to a collector. Owns their names and
buckets; /metrics has the same times for Prometheus (`metrics`). Needs the extra `otel`, and nothing of it is loaded
where it is not asked for.

They are sent every OTEL_METRIC_EXPORT_INTERVAL ms (a minute), and at the end. A collector that does not answer costs a
warning of OpenTelemetry's; memory is one histogram for each model, operation and kind of error, of at most
MODELS_MAX models.
"""

from __future__ import annotations

from typing import Any

from ...errors import MissingExtra
from .request_context import RequestContext
from .telemetry import model_attributes, resource_attributes

DURATION = "gen_ai.server.request.duration"
FIRST_TOKEN = "gen_ai.server.time_to_first_token"
PER_TOKEN = "gen_ai.server.time_per_output_token"
MODELS_MAX = 100
# Upper bounds of the buckets in seconds, as the conventions have them.
BUCKETS = {
    DURATION: (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    FIRST_TOKEN: (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    PER_TOKEN: (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
}
_TEXTS = {
    DURATION: "From a request's arrival to its last byte",
    FIRST_TOKEN: "From a request's arrival to its first token",
    PER_TOKEN: "Between output tokens after the first, the mean of a choice",
}


class OtlpMetrics:
    """The histograms, sent to the collector at `endpoint`, an OTLP/HTTP URL such as http://host:4318/v1/metrics.

    Raises `MissingExtra`. `ended` may be called from any thread; the sending has a thread of its own.
    """

    what = "metrics"

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
            from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
            from opentelemetry.sdk.resources import Resource
        except ImportError as error:
            raise MissingExtra(f"metrics_endpoint needs {error.name}: pip install 'preble[otel]'") from error
        self._provider = MeterProvider(
            [PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=endpoint))],
            resource=Resource.create(resource_attributes()),
            views=[
                View(instrument_name=name, aggregation=ExplicitBucketHistogramAggregation(bounds))
                for name, bounds in BUCKETS.items()
            ],
            shutdown_on_exit=False,  # `end_senders` ends it, and waits for so long
        )
        meter = self._provider.get_meter("preble.gateway")
        self._histograms: dict[str, Any] = {
            name: meter.create_histogram(name, unit="s", description=text) for name, text in _TEXTS.items()
        }
        self._models: set[str] = set()

    def ended(self, context: RequestContext, route: str, status: int, seconds: float) -> None:
        """A request that was placed has ended, after so long."""
        attributes = model_attributes(context, route)
        if context.model not in self._models and len(self._models) >= MODELS_MAX:
            attributes |= {"gen_ai.request.model": "other", "gen_ai.response.model": "other"}
        else:
            self._models.add(context.model)
        if status >= 400:
            self._histograms[DURATION].record(seconds, {**attributes, "error.type": str(status)})
            return
        self._histograms[DURATION].record(seconds, attributes)
        if context.first_token_seconds is not None:
            self._histograms[FIRST_TOKEN].record(context.first_token_seconds, attributes)
        for choice in context.progress.choices:
            if choice.seconds_per_token is not None:
                self._histograms[PER_TOKEN].record(choice.seconds_per_token, attributes)

    def send_rest(self) -> None:
        """Send what waits, and end; may hang on a collector that does not answer (`telemetry.end_senders`)."""
        self._provider.shutdown()
