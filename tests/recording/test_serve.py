"""`preble serve --record` with real processes: what comes is in the file, with no word of it."""

from __future__ import annotations

import asyncio
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from preble import Recording
from tests.support.attach import FakeServer
from tests.support.gateway import Client, GatewayProcess
from tests.support.transport import HANG_SECONDS, WorkerProcess, asynchronous

AS_ASKED_OF_A_FAKE = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}


def complete(address: str, prompt: list[int], session: str, **more: Any) -> int:
    """The status of a request."""
    client = Client(address)
    try:
        body = {"prompt": prompt, "max_tokens": 3, **more}
        return client.call("POST", "/v1/completions", body, {"x-session-id": session})[0]
    finally:
        client.close()


def until_recorded(file: Path, requests: int) -> Recording:
    """The file, once so many requests are in it."""
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        if file.exists() and len(found := Recording.read(file)) >= requests:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{file} never held {requests} requests")


@asynchronous
async def test_requests_before_servers_are_recorded_and_a_killed_gateway_leaves_them(tmp_path: Path) -> None:
    file = tmp_path / "traffic.rec"
    servers = [await FakeServer("vllm").start() for _ in range(2)]
    arguments = ["--workers", *(server.url for server in servers), "--record", str(file), "--policy", "round_robin"]
    gateway = await asyncio.to_thread(partial(GatewayProcess, *arguments, log=tmp_path / "log"))
    try:
        prompts = [list(range(100, 140)), list(range(100, 132)) + [7] * 8, [5] * 20]
        for number, prompt in enumerate(prompts):
            asked = partial(complete, gateway.address, prompt, f"session-{number % 2}", **AS_ASKED_OF_A_FAKE)
            assert await asyncio.to_thread(asked) == 200
        await asyncio.to_thread(until_recorded, file, 3)
        gateway.signal(signal.SIGKILL)
        await asyncio.to_thread(gateway.process.wait, HANG_SECONDS)
    finally:
        await asyncio.to_thread(gateway.stop)
        for server in servers:
            await server.kill()
    found = Recording.read(file)
    assert (len(found), found.policy, len(found.workers)) == (3, "round_robin", 2)
    assert {worker.engine for worker in found.workers} == {"vllm"}
    one, other, third = found.requests
    assert len({request.worker for request in found.requests}) == 2, "round robin"
    assert [request.prompt_tokens for request in found.requests] == [40, 40, 20]
    assert one.blocks[:2].tolist() == other.blocks[:2].tolist() and one.blocks[2] != other.blocks[2]
    assert one.session == third.session != other.session
    for request in found.requests:
        assert request.finished and request.error == ""
        assert request.sent_seconds is not None and request.first_token_seconds is not None
        assert request.arrival_seconds <= request.sent_seconds <= request.first_token_seconds
    assert b"session-" not in file.read_bytes()


def test_processes_write_a_file_each_that_are_one_recording(tmp_path: Path) -> None:
    file = tmp_path / "traffic.rec"
    worker = WorkerProcess("--id", "a", time_scale=0.0)
    gateway = GatewayProcess(
        "--workers", worker.endpoint, "--processes", "2", "--record", str(file), log=tmp_path / "log"
    )
    try:
        for number in range(24):  # a connection each: the kernel chooses the process
            assert complete(gateway.address, list(range(50)) + [number], "s") == 200
    finally:
        assert gateway.stop() == 0
        worker.stop()
    files = sorted(tmp_path.glob("traffic.rec.process-*"))
    assert len(files) == 2
    found = Recording.read(*files)
    assert len(found) == 24 and {request.worker for request in found.requests} == {"a"}
    assert {request.output_tokens for request in found.requests} == {3}
    assert len({request.blocks[2] for request in found.requests}) == 1, "one key"
    assert found.missing == 0


def test_a_recording_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    worker = WorkerProcess("--id", "a", time_scale=0.0)
    (tmp_path / "notes").write_text("mine")
    try:
        GatewayProcess("--workers", worker.endpoint, "--record", str(tmp_path / "notes"), log=tmp_path / "log")
    except AssertionError as error:
        assert "is no recording" in str(error)
    else:
        raise AssertionError("it started")
    finally:
        worker.stop()
    assert (tmp_path / "notes").read_text() == "mine"
