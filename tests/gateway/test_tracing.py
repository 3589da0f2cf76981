"""Traces and metrics of the gateway as a collector gets them, and traces as attached servers are informed of them."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preble import GlobalScheduler, ManualClock, SamplingParams
from preble.gateway.core import otlp_metrics
from preble.gateway.core.otlp_metrics import BUCKETS, DURATION, FIRST_TOKEN, PER_TOKEN, OtlpMetrics
from preble.gateway.core.request_context import RequestContext, RequestPhase
from preble.gateway.core.telemetry import CLOSE_SECONDS, Sender, end_senders, operation_of
from preble.gateway.core.tracing import Tracing, trace_of
from preble.gateway.text.choices import Choice, ChoiceJob
from preble.types import SessionHint
from tests.support.attach import FakeServer
from tests.support.gateway import Client, GatewayProcess
from tests.support.transport import HANG_SECONDS, asynchronous

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


class Collector:
    """An OTLP/HTTP collector that keeps what it is sent."""

    def __init__(self) -> None:
        self.bodies: dict[str, list[bytes]] = {"/v1/traces": [], "/v1/metrics": []}
        bodies = self.bodies

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies[self.path].append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        base = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.url, self.metrics_url = f"{base}/v1/traces", f"{base}/v1/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def spans(self) -> dict[str, Any]:
        """Spans by name."""
        wire = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        requests = [wire.ExportTraceServiceRequest.FromString(body) for body in self.bodies["/v1/traces"]]
        spans = [span for one in requests for rs in one.resource_spans for ss in rs.scope_spans for span in ss.spans]
        return {span.name: span for span in spans}

    def histograms(self) -> dict[str, Any]:
        """The points of histograms by name, as they were last sent."""
        wire = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
        last = wire.ExportMetricsServiceRequest.FromString(self.bodies["/v1/metrics"][-1])
        metrics = [one for rm in last.resource_metrics for sm in rm.scope_metrics for one in sm.metrics]
        return {one.name: [(values(point.attributes), point) for point in one.histogram.data_points] for one in metrics}

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def values(attributes: Any) -> dict[str, Any]:
    """Attributes as a dict."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector."""
    pytest.importorskip("opentelemetry.sdk", reason="needs OpenTelemetry: pip install 'preble[otel]'")
    one = Collector()
    yield one
    one.close()


def ask(gateway: GatewayProcess) -> None:
    """A request within a trace, one outside of any, and one that fails."""
    client = Client(gateway.address)
    body = {"input_ids": list(range(100)), "sampling_params": {"max_new_tokens": 3}, "stream": True}
    named = {"traceparent": PARENT, "tracestate": "a=b", "x-session-id": "talk-1", "x-request-id": "mine"}
    assert client.call("POST", "/generate", body, headers=named)[0] == 200
    assert client.call("POST", "/v1/completions", b"no JSON")[0] == 400
    assert client.call("GET", "/health")[0] == 200
    client.close()


async def served(tmp_path: Path, *arguments: str) -> list[Any]:
    """Let a gateway before an attached server serve those; the headers that the server got with generations."""
    server = await FakeServer("sglang").start()
    try:
        gateway = await asyncio.to_thread(
            lambda: GatewayProcess("--workers", server.url, *arguments, log=tmp_path / "log")
        )
        try:
            await asyncio.to_thread(ask, gateway)
        finally:
            assert await asyncio.to_thread(gateway.stop) == 0
        assert "Traceback" not in gateway.log.read_text()
        return [headers for headers in server.headers if "traceparent" in headers]
    finally:
        await server.kill()


def test_a_span_says_where_a_request_went_and_its_trace_goes_on(collector: Collector, tmp_path: Path) -> None:
    @asynchronous
    async def story() -> None:
        (told,) = await served(tmp_path, "--traces-endpoint", collector.url)
        spans = collector.spans()
        assert set(spans) == {"POST /v1/completions", "POST /generate", "tokenize", "decide", "engine"}
        span = spans["POST /generate"]
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, SPAN)
        assert told["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01" and told["tracestate"] == "a=b"
        attributes = {one.key: one.value for one in span.attributes}
        assert attributes["http.response.status_code"].int_value == 200
        assert attributes["gen_ai.usage.input_tokens"].int_value == 100
        assert attributes["gen_ai.usage.output_tokens"].int_value == 3
        assert attributes["preble.decision.reason"].string_value == "explore"
        assert attributes["preble.worker"].string_value == attributes["preble.decision.worker"].string_value != ""
        assert attributes["session.id"].string_value == "talk-1"
        assert attributes["preble.request_id"].string_value == "mine"
        assert attributes["gen_ai.operation.name"].string_value == "text_completion"
        assert attributes["gen_ai.provider.name"].string_value == "preble"
        assert attributes["gen_ai.request.model"].string_value == attributes["gen_ai.response.model"].string_value != ""
        for part in ("tokenize", "decide", "engine"):
            assert (spans[part].trace_id, spans[part].parent_span_id) == (span.trace_id, span.span_id)
            assert span.start_time_unix_nano <= spans[part].start_time_unix_nano <= spans[part].end_time_unix_nano
        assert spans["decide"].end_time_unix_nano <= spans["engine"].start_time_unix_nano + 1000
        assert values(spans["engine"].attributes)["gen_ai.usage.output_tokens"] == 3
        refused = {one.key: one.value for one in spans["POST /v1/completions"].attributes}
        assert refused["http.response.status_code"].int_value == 400 and "preble.worker" not in refused

    story()


def a_request(model: str = "llama") -> RequestContext:
    """One that came at 100, was tokenised and placed, and has its answer."""
    context = RequestContext("id", 100.0, model=model, session=SessionHint("talk", "root", "agent"), stream=True)
    job = ChoiceJob(0, "id", np.arange(40, dtype=np.int32), SamplingParams())
    decision = GlobalScheduler(["a"]).schedule(job.token_ids)
    context.progress.choices = [Choice(job, 8, 16, decision, "a", "stop", seconds_per_token=0.03)]
    context.phases = {"tokenize": RequestPhase(100.5, 101.0), "decide": RequestPhase(101.0, 101.25)}
    context.phases["match"] = RequestPhase(101.0, 101.0)
    context.first_token_seconds = 2.0
    return context


def test_a_requests_parts_are_spans_of_their_own_with_their_times(collector: Collector) -> None:
    clock = ManualClock(100.0)
    tracing = Tracing(collector.url, clock)
    span = tracing.begin({})
    clock.advance(5.0)
    tracing.end(span, "POST", "/v1/chat/completions", 200, a_request())
    end_senders([tracing], HANG_SECONDS)
    spans = collector.spans()
    assert set(spans) == {"POST /v1/chat/completions", "tokenize", "decide", "engine"}
    lengths = {name: round((one.end_time_unix_nano - one.start_time_unix_nano) / 1e9, 6) for name, one in spans.items()}
    assert {name: lengths[name] for name in ("tokenize", "decide", "engine")} == {
        "tokenize": 0.5,
        "decide": 0.25,
        "engine": 3.75,
    }
    assert [spans[name].kind for name in ("POST /v1/chat/completions", "tokenize", "engine")] == [2, 1, 3]
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "preble",
        "gen_ai.request.model": "llama",
        "gen_ai.response.model": "llama",
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "gen_ai.response.time_to_first_chunk": 2.0,
    }
    for name in ("POST /v1/chat/completions", "engine"):
        assert values(spans[name].attributes).items() >= expected.items()
    root = values(spans["POST /v1/chat/completions"].attributes)
    named = {"session.id": "talk", "gen_ai.conversation.id": "talk", "gen_ai.agent.id": "agent"}
    assert root.items() >= {**named, "preble.session.parent": "root", "preble.worker": "a"}.items()


def test_a_request_that_was_never_placed_has_no_engine_span_and_says_its_error(collector: Collector) -> None:
    tracing = Tracing(collector.url)
    context = RequestContext("id", 0.0)
    tracing.end(tracing.begin({}), "POST", "/generate", 503, context)
    end_senders([tracing], HANG_SECONDS)
    ((name, span),) = collector.spans().items()
    assert name == "POST /generate" and values(span.attributes)["error.type"] == "503" and span.status.code == 2


def test_metrics_of_the_conventions_are_sent(collector: Collector) -> None:
    otlp = OtlpMetrics(collector.metrics_url)
    otlp.ended(a_request(), "/v1/chat/completions", 200, 3.5)
    otlp.ended(a_request("other"), "/v1/completions", 429, 0.25)
    end_senders([otlp], HANG_SECONDS)
    found = collector.histograms()
    assert set(found) == {DURATION, FIRST_TOKEN, PER_TOKEN}
    chat = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "preble"}
    chat |= {"gen_ai.request.model": "llama", "gen_ai.response.model": "llama"}
    sums = {name: [point.sum for attributes, point in found[name] if attributes == chat] for name in found}
    assert sums == {DURATION: [3.5], FIRST_TOKEN: [2.0], PER_TOKEN: [0.03]}
    refused = [attributes for attributes, _ in found[DURATION] if attributes.get("error.type") == "429"]
    assert len(refused) == 1 and refused[0]["gen_ai.operation.name"] == "text_completion"
    assert len(found[FIRST_TOKEN]) == 1, "what was refused had no token"
    assert [tuple(point.explicit_bounds) for _, point in found[PER_TOKEN]] == [BUCKETS[PER_TOKEN]]


def test_models_of_metrics_are_bounded(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_metrics, "MODELS_MAX", 2)
    otlp = OtlpMetrics(collector.metrics_url)
    for name in ("a", "b", "c", "d", "a"):
        otlp.ended(a_request(name), "/v1/completions", 200, 1.0)
    end_senders([otlp], HANG_SECONDS)
    counts = {told["gen_ai.request.model"]: point.count for told, point in collector.histograms()[DURATION]}
    assert counts == {"a": 2, "b": 1, "other": 2}


def test_a_gateway_sends_metrics_where_it_is_told_to(collector: Collector, tmp_path: Path) -> None:
    @asynchronous
    async def story() -> None:
        await served(tmp_path, "--metrics-endpoint", collector.metrics_url)
        ((attributes, point),) = collector.histograms()[FIRST_TOKEN]
        assert attributes["gen_ai.operation.name"] == "text_completion" and point.count == 1

    story()


@pytest.mark.parametrize("route", ["/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank", "/", "other"])
def test_every_endpoint_has_an_operation(route: str) -> None:
    known = {"/v1/responses": "chat", "/v1/messages": "chat", "/v1/embeddings": "embeddings", "/v1/rerank": "rerank"}
    assert operation_of(route) == known.get(route, "other" if route == "other" else "unknown")


class Hanging(Sender):
    """One whose collector takes nothing until the test lets it."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.let, self.ended = threading.Event(), threading.Event()

    def send_rest(self) -> None:
        """Wait."""
        self.let.wait()
        self.ended.set()


def test_collectors_that_hang_hold_up_no_end_and_are_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    """Each was waited for in turn, 5 s each."""
    spans, metrics = Hanging("spans"), Hanging("metrics")
    end_senders([spans, metrics], 0.001)
    assert [one.getMessage() for one in caplog.records] == [
        "the collector did not take all spans and metrics in 0.001 s; the rest is lost"
    ]
    assert not spans.ended.is_set() and not metrics.ended.is_set()
    caplog.clear()
    metrics.let.set()
    end_senders([metrics], HANG_SECONDS)
    assert metrics.ended.is_set() and not caplog.text
    spans.let.set()
    assert spans.ended.wait(HANG_SECONDS)


def test_senders_end_at_the_same_time_within_two_seconds_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(threading.Thread, "join", lambda self, seconds: waited.append(seconds))
    spans, metrics = Hanging("spans"), Hanging("metrics")
    end_senders([spans, metrics])
    assert CLOSE_SECONDS == 2.0 and len(waited) == 2 and CLOSE_SECONDS >= waited[0] >= waited[1] > 0.0
    for one in (spans, metrics):
        one.let.set()
        assert one.ended.wait(HANG_SECONDS), "both were begun"


def test_without_tracing_a_trace_goes_on_as_it_came(tmp_path: Path) -> None:
    @asynchronous
    async def story() -> None:
        (told,) = await served(tmp_path)
        assert (told["traceparent"], told["tracestate"]) == (PARENT, "a=b")

    story()


@pytest.mark.parametrize(
    ("headers", "trace"),
    [
        ({"traceparent": PARENT, "tracestate": "a=b"}, {"traceparent": PARENT, "tracestate": "a=b"}),
        ({"traceparent": PARENT, "tracestate": "x" * 513}, {"traceparent": PARENT}),
        ({"traceparent": PARENT, "tracestate": "a\r\nb: c"}, {"traceparent": PARENT}),
        ({"traceparent": PARENT + "\r\nx: y"}, {}),
        ({"tracestate": "a=b"}, {}),
    ],
)
def test_only_what_is_a_trace_goes_on(headers: dict[str, str], trace: dict[str, str]) -> None:
    assert trace_of(headers) == trace
