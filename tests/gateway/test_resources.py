"""Gateway, router and worker as real processes with 64 descriptors and little memory: what they cannot take they
refuse, nothing ends, and they serve again when there is room."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.gateway import Client, GatewayProcess
from tests.support.paths import ROOT
from tests.support.transport import HANG_SECONDS, WorkerProcess

if sys.platform != "linux":
    pytest.skip("limits of another process are Linux's", allow_module_level=True)
if "ASAN_OPTIONS" in os.environ or "TSAN_OPTIONS" in os.environ:
    pytest.skip("a sanitizer's own memory is beyond these limits", allow_module_level=True)

DESCRIPTORS = 64
SPARE_BYTES = 192 << 20  # more than a process holds when it is ready
BODIES_BYTES = 32 << 20  # of bodies at a time: what is made of those that are read has room beside them
PROMPT = list(range(40))


def limit(pid: int, spare_bytes: int = SPARE_BYTES) -> None:
    """Give a process that is ready 64 descriptors and not much more memory than it has."""
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    held = re.search(r"VmData:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert held is not None
    data = int(held[1]) * 1024 + spare_bytes
    resource.prlimit(pid, resource.RLIMIT_DATA, (data, data))


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.05)


def descriptors_of(pid: int) -> int:
    """How many are open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


@contextlib.contextmanager
def strangers(address: tuple[str, int], first_words: bytes) -> Iterator[None]:
    """300 connections that say a little and then nothing."""
    callers = [socket.socket() for _ in range(300)]
    try:
        for caller in callers:
            caller.setblocking(False)  # beyond the listener's backlog a call only waits
            caller.connect_ex(address)
        for caller in callers:
            with contextlib.suppress(OSError):
                caller.sendall(first_words)
        yield
    finally:
        for caller in callers:
            caller.close()


def serves(gateway: GatewayProcess) -> bool:
    """Whether a new client gets two tokens."""
    client = Client(gateway.address)
    try:
        return client.call("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 2})[0] == 200
    except OSError:
        return False
    finally:
        client.close()


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    """One simulated worker, without limits."""
    process = WorkerProcess("--id", "a", time_scale=0.0)
    yield process
    process.stop()


@pytest.fixture
def gateway(worker: WorkerProcess, tmp_path: Path) -> Iterator[GatewayProcess]:
    """One before it, with limits."""
    bodies = ("--max-bodies-bytes", str(BODIES_BYTES))
    process = GatewayProcess("--workers", worker.endpoint, *bodies, log=tmp_path / "log")
    assert serves(process)
    limit(process.process.pid)
    yield process
    assert process.stop() == 0
    assert process.log_lines(), "all of it is JSON"


def test_a_gateway_without_a_descriptor_left_gets_its_worker_and_its_clients_back(
    worker: WorkerProcess, gateway: GatewayProcess
) -> None:
    host, port = gateway.address.split(":")
    with strangers((host, int(port)), b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"):
        until(lambda: descriptors_of(gateway.process.pid) >= DESCRIPTORS - 2, "none is left")
        worker.kill()
        again = WorkerProcess("--id", "a", time_scale=0.0, endpoint=worker.endpoint)
        time.sleep(1.0)  # the link is tried again meanwhile, without a descriptor for it
        assert gateway.process.poll() is None
    try:
        until(lambda: serves(gateway), "it serves again")
    finally:
        again.stop()


def test_large_bodies_that_are_all_there_at_once_fit_into_little_memory(gateway: GatewayProcess) -> None:
    """Of 24, more than four times what is bounded, all but the last bytes are sent before any is whole: those that are
    refused make room for the others, and there is memory for those."""
    body = json.dumps({"prompt": [7] * 2_000_000, "max_tokens": 2}).encode()
    host, port = gateway.address.split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"

    def send(client: socket.socket, data: bytes) -> None:
        with contextlib.suppress(OSError):  # who was answered long ago has been cut off, and can read why
            client.sendall(data)

    def begin(_: int) -> socket.socket:
        client = socket.create_connection((host, int(port)), timeout=HANG_SECONDS)
        send(client, head.encode() + body[:-1])
        return client

    def end(client: socket.socket) -> int:
        with client:
            send(client, body[-1:])
            answer = http.client.HTTPResponse(client)
            answer.begin()
            answer.read()
            return answer.status

    with ThreadPoolExecutor(24) as threads:
        clients = list(threads.map(begin, range(24)))
        statuses = Counter(threads.map(end, clients))
    assert set(statuses) == {400, 503}, "too long, or too many bytes at once; none failed for want of memory"
    assert statuses[400] >= BODIES_BYTES // len(body), "who is refused makes room for the others"
    until(lambda: serves(gateway), "it serves again")


def test_a_worker_without_a_descriptor_left_serves_who_is_there_and_who_comes_later(tmp_path: Path) -> None:
    worker = WorkerProcess("--id", "a", time_scale=0.0)
    early = GatewayProcess("--workers", worker.endpoint, log=tmp_path / "early")
    late = None
    try:
        assert serves(early)
        limit(worker.process.pid)
        host, port = worker.endpoint.removeprefix("tcp://").split(":")
        with strangers((host, int(port)), b"\xff\x00\x00"):
            until(lambda: descriptors_of(worker.process.pid) >= DESCRIPTORS - 2, "none is left")
            assert serves(early)
        late = GatewayProcess("--workers", worker.endpoint, log=tmp_path / "late")
        until(lambda: late is not None and serves(late), "a new router is let in")
    finally:
        early.stop()
        if late is not None:
            late.stop()
        assert worker.stop() == 0


_ROUTER = """
import asyncio, sys, preble

async def ask(router):
    return [chunk async for chunk in router.generate([1, 2, 3], preble.SamplingParams(max_new_tokens=2))]

async def main():
    router = preble.Router(sys.argv[1:])
    await router.start(min_workers=len(sys.argv) - 1)
    print("READY", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        try:
            print(sum(len(chunk.token_ids) for chunk in await asyncio.wait_for(ask(router), 10)), flush=True)
        except Exception as error:
            print(repr(error), flush=True)
    await router.close()

asyncio.run(main())
"""


def test_a_router_whose_workers_come_and_go_needs_no_more_than_its_64_descriptors() -> None:
    """Each broken link must give its sockets back: ten deaths of a worker, two links each."""
    stays, comes = WorkerProcess("--id", "stays", time_scale=0.0), WorkerProcess("--id", "comes", time_scale=0.0)
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    router = subprocess.Popen(
        [sys.executable, "-c", _ROUTER, stays.endpoint, comes.endpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert router.stdin is not None and router.stdout is not None
    try:
        assert router.stdout.readline() == "READY\n"
        limit(router.pid)
        for _ in range(10):
            comes.kill()
            comes = WorkerProcess("--id", "comes", time_scale=0.0, endpoint=comes.endpoint)
            router.stdin.write("\n")
            router.stdin.flush()
            assert router.stdout.readline() == "2\n"
            assert descriptors_of(router.pid) < DESCRIPTORS // 2
        router.stdin.close()
        assert router.wait(HANG_SECONDS) == 0
    finally:
        router.kill()
        router.stdout.close()
        stays.stop()
        comes.stop()
