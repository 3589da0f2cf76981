"""Traces of the gateway as a collector gets them, and as attached servers are informed of them."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from preble.gateway.core.tracing import trace_of
from tests.support.attach import FakeServer
from tests.support.gateway import Client, GatewayProcess
from tests.support.transport import asynchronous

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


class Collector:
    """An OTLP/HTTP collector that keeps what it is sent."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        bodies = self.bodies

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def spans(self) -> dict[str, Any]:
        """Spans by name."""
        wire = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        requests = [wire.ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        spans = [span for one in requests for rs in one.resource_spans for ss in rs.scope_spans for span in ss.spans]
        return {span.name: span for span in spans}

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


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
        assert set(spans) == {"POST /v1/completions", "POST /generate"}
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
        refused = {one.key: one.value for one in spans["POST /v1/completions"].attributes}
        assert refused["http.response.status_code"].int_value == 400 and "preble.worker" not in refused

    story()


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
