"""examples/fastapi_service.py as its user runs it: uvicorn with the example, two workers as processes, HTTP."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.transport import HANG_SECONDS, WorkerProcess, expected_tokens

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

EXAMPLE = ROOT / "examples" / "fastapi_service.py"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where the service listens."""
    workers = [WorkerProcess(time_scale=0.0) for _ in range(2)]
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        free = int(listening.getsockname()[1])
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    addresses = ",".join(worker.endpoint for worker in workers)
    service = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "examples.fastapi_service:app", "--port", str(free), "--log-level", "error"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PREBLE_WORKERS": addresses},
    )
    try:
        wait_until_it_listens(service, free)
        yield free
        service.send_signal(signal.SIGTERM)
        service.wait(HANG_SECONDS)
    finally:
        service.kill()
        service.wait()
        assert [worker.stop() for worker in workers] == [0, 0]


def wait_until_it_listens(service: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        assert service.poll() is None, "the service ended"
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("the service does not listen")


def asked(port: int, content: dict[str, Any]) -> tuple[int, list[Any]]:
    """The status, and each line of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_SECONDS)
    try:
        connection.request("POST", "/generate", json.dumps(content), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, [json.loads(one) for one in answer.read().decode().splitlines()]
    finally:
        connection.close()


def test_a_prompt_s_tokens_stream_out_of_one_worker(port: int) -> None:
    prompt = "The ferry leaves at nine. " * 8
    for _ in range(2):
        status, lines = asked(port, {"prompt": prompt, "max_new_tokens": 12})
        assert status == 200
        assert [token for one in lines for token in one["tokens"]] == expected_tokens(list(prompt.encode()), 12)
        assert lines[-1]["ends"] == "length" and lines[0]["worker"]


def test_what_is_wrong_has_a_status(port: int) -> None:
    assert asked(port, {"prompt": ""})[0] == 422
    status, lines = asked(port, {"prompt": "x" * 300_000})  # longer than a worker's cache
    assert status == 400 and "tokens" in lines[0]["error"]


def test_a_client_that_hangs_up_leaves_nothing_behind(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_SECONDS)
    content = json.dumps({"prompt": "a long answer", "max_new_tokens": 4096})
    connection.request("POST", "/generate", content, {"content-type": "application/json"})
    assert connection.getresponse().readline()
    connection.close()
    assert asked(port, {"prompt": "another", "max_new_tokens": 4})[0] == 200


def test_the_example_is_at_most_sixty_lines() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 60
