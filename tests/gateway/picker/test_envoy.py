"""A real Envoy before scripted servers, with the picker as its external processor: the configuration of
examples/deploy/envoy-picker.yaml, and one with fallbacks. Left out where there is no Envoy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.support.paths import ROOT
from tests.support.picker import CHAT, Plane, picking
from tests.support.relay import Call, InOrder, ScriptedServer, chat_answer, chat_events, event, usage_event
from tests.support.transport import HANG_SECONDS, asynchronous, until

EXAMPLE = ROOT / "examples" / "deploy" / "envoy-picker.yaml"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi there, how are you?"}]}


def envoy() -> str | None:
    """Where an Envoy is: on the path, or in the package that brings one."""
    return shutil.which("envoy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


pytestmark = pytest.mark.skipif(envoy() is None, reason="there is no Envoy here")


def free_port() -> int:
    """A port that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def configured(plane: Plane, front: int) -> dict[str, Any]:
    """The example, with the ports of a test."""
    config: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    del config["admin"]
    resources = config["static_resources"]
    resources["listeners"][0]["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": front}
    (picker,) = (one for one in resources["clusters"] if one["name"] == "picker")
    place = picker["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
    place["address"]["socket_address"]["port_value"] = plane.port
    return config


def with_fallbacks(config: dict[str, Any], plane: Plane) -> None:
    """Let Envoy know the servers, try the next one that was named, and say which one answered."""
    kind = "type.googleapis.com/envoy.extensions.load_balancing_policies"
    own = {
        "@type": f"{kind}.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"metadata": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}}
        ],
        "selected_host_key": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint-served"}]},
        "fallback_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.round_robin",
                        "typed_config": {"@type": f"{kind}.round_robin.v3.RoundRobin"},
                    }
                }
            ]
        },
    }
    policy = {"typed_extension_config": {"name": "envoy.load_balancing_policies.override_host", "typed_config": own}}
    places = [
        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": server.port}}}}
        for server in plane.servers
    ]
    resources = config["static_resources"]
    resources["clusters"][0] = {
        "name": "servers",
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_balancing_policy": {"policies": [policy]},
        "load_assignment": {"cluster_name": "servers", "endpoints": [{"lb_endpoints": places}]},
    }
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    route = manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
    route["retry_policy"] = {"retry_on": "connect-failure,5xx", "num_retries": 1}


class Front:
    """An Envoy and a client of it."""

    def __init__(self, plane: Plane, port: int, session: aiohttp.ClientSession) -> None:
        self.plane, self.session = plane, session
        self.url = f"http://127.0.0.1:{port}"

    async def post(self, body: Any, path: str = CHAT) -> tuple[int, bytes]:
        """Status and body of one request."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(
            self.url + path, data=data, headers={"content-type": "application/json"}
        ) as answer:
            return answer.status, await answer.read()


@contextlib.asynccontextmanager
async def fronting(plane: Plane, directory: Path, *, fallbacks: bool = False) -> AsyncIterator[Front]:
    """An Envoy before a picker's servers."""
    port = free_port()
    config = configured(plane, port)
    if fallbacks:
        with_fallbacks(config, plane)
    file = directory / "envoy.yaml"
    file.write_text(yaml.safe_dump(config))
    base = os.getpid() * 1000 % 60_000 + port % 1000  # of its shared memory
    command = [envoy() or "", "-c", str(file), "--concurrency", "1", "--base-id", str(base), "-l", "warning"]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + HANG_SECONDS
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            assert process.poll() is None and time.monotonic() < deadline, (directory / "log").read_text()
            await asyncio.sleep(0.02)
        async with aiohttp.ClientSession() as session:
            yield Front(plane, port, session)
    finally:
        process.terminate()
        process.wait()


async def answer(call: Call) -> None:
    """A chat, whole or streamed, or what else was asked for."""
    if call.path != CHAT:
        await call.answer({"data": [call.path]})
    elif call.json.get("stream"):
        events = chat_events("he", "llo")
        if (call.json.get("stream_options") or {}).get("include_usage"):
            events.append(usage_event(cached=2))
        await call.stream(*events)
    else:
        await call.answer(chat_answer(cached=2))


@asynchronous
async def test_requests_go_where_the_picker_says_and_answers_are_observed(tmp_path: Path) -> None:
    first, second = await ScriptedServer(answer).start(), await ScriptedServer(answer).start()
    async with (
        picking(first, second, policy=InOrder(second, first)) as plane,
        fronting(plane, tmp_path) as front,
    ):
        long = {**BODY, "user": "x" * 300_000}
        for body in (BODY, long):
            assert await front.post(body) == (200, json.dumps(chat_answer(cached=2)).encode())
            assert second.calls[-1].json == body
        status, streamed = await front.post({**BODY, "stream": True})
        assert status == 200 and streamed == b"".join(map(event, [*chat_events("he", "llo"), b"[DONE]"]))
        assert second.calls[-1].json["stream_options"] == {"include_usage": True}
        assert second.calls[-1].headers["x-gateway-destination-endpoint"] == second.worker
        async with front.session.get(front.url + "/v1/models") as models:
            assert models.status == 200
        assert len(second.calls) == 3 and not first.calls
        await plane.settled()
        assert plane.counted('preble_output_tokens_total{model="tiny"} 9.0')
        assert plane.counted('preble_actual_cached_tokens_total{model="tiny"} 6.0')
        status, refused = await front.post(b"{")
        assert status == 400 and json.loads(refused)["error"]["type"] == "invalid_request_error"
        await plane.gateway.router.remove_worker(first.url)
        await plane.gateway.router.remove_worker(second.url)
        status, refused = await front.post(BODY)
        assert status == 503 and json.loads(refused)["error"]["code"] == "no_workers"


@asynchronous
async def test_a_client_that_goes_away_leaves_no_booking(tmp_path: Path) -> None:
    async def hang(call: Call) -> None:
        if call.json.get("stream"):
            await call.stream(*chat_events("he", reason=None), end=False)
        await asyncio.Event().wait()

    server = ScriptedServer(hang)
    async with picking(server) as plane, fronting(plane, tmp_path) as front:
        for body in (BODY, {**BODY, "stream": True}):
            asking = asyncio.ensure_future(front.post(body))
            await until(lambda: plane.gateway.router.stats()["live_requests"] == 1, "it is booked")
            asking.cancel()
            await plane.settled()


@asynchronous
async def test_a_server_that_cannot_be_reached_is_passed_over_and_the_booking_moves(tmp_path: Path) -> None:
    async def refuse(call: Call) -> None:
        await call.answer({"error": {}}, 503)

    first, second = await ScriptedServer(refuse).start(), await ScriptedServer(answer).start()
    async with (
        picking(first, second, policy=InOrder(first, second), picker_fallbacks=1) as plane,
        fronting(plane, tmp_path, fallbacks=True) as front,
    ):
        status, _ = await front.post(BODY)
        assert status == 200 and len(first.calls) == 1 and len(second.calls) == 1
        await plane.settled()
        spans = plane.gateway.router.scheduler.stats()["workers"]
        assert spans[second.worker]["live_requests"] == 0
        assert plane.counted('preble_output_tokens_total{model="tiny"} 3.0')
