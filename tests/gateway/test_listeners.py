"""Where `preble serve` listens and how it ends: HTTPS, a Unix socket, lame duck; and the time a request may take."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from preble.errors import InvalidConfig
from preble.gateway.certificate_times import certificate_times
from preble.gateway.core.config import GatewayConfig
from preble.gateway.listeners import open_listeners, say_expiry
from tests.support.certificates import make_certificate
from tests.support.gateway import Client, GatewayProcess
from tests.support.transport import HANG_SECONDS, WorkerProcess


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    """One simulated worker, at the speed of a real one."""
    process = WorkerProcess("--id", "a", time_scale=1.0)
    yield process
    process.stop()


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=HANG_SECONDS)
        self._path = str(path)

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: Any = None, **headers: str) -> Any:
    """(status, body) of one request."""
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def until(condition: Any, what: str) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)


# --- HTTPS ------------------------------------------------------------------------------------------------------------


def peer_certificate(gateway: GatewayProcess) -> bytes:
    """The certificate that the gateway shows now, whoever vouches for it."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, _, port = gateway.url.removeprefix("https://").partition(":")
    with socket.create_connection((host, int(port)), HANG_SECONDS) as plain, context.wrap_socket(plain) as secure:
        return secure.getpeercert(binary_form=True) or b""


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_port_speaks_https_and_takes_a_renewed_certificate(
    worker: WorkerProcess, tmp_path: Path, processes: str
) -> None:
    own = make_certificate(tmp_path)
    gateway = GatewayProcess(
        *("--workers", worker.endpoint, "--processes", processes),
        *("--tls-certificate", str(own.certificate), "--tls-key", str(own.key)),
        log=tmp_path / "log",
    )
    try:
        assert gateway.url.startswith("https://")
        address = gateway.url.removeprefix("https://")
        secure = http.client.HTTPSConnection(address, timeout=HANG_SECONDS, context=own.client_context())
        status, answer = ask(secure, "POST", "/v1/completions", {"prompt": [1, 2], "max_tokens": 2})
        assert status == 200 and answer["usage"]["completion_tokens"] == 2
        with pytest.raises((http.client.HTTPException, OSError)):
            ask(http.client.HTTPConnection(address, timeout=HANG_SECONDS), "GET", "/health")
        before = peer_certificate(gateway)
        right = own.key.read_bytes()
        own.key.write_text("no key")
        gateway.signal(signal.SIGHUP)
        until(lambda: "was not reloaded" in gateway.log.read_text(), "it says so")
        assert peer_certificate(gateway) == before and right
        make_certificate(tmp_path)
        gateway.signal(signal.SIGHUP)
        until(lambda: peer_certificate(gateway) != before, "the new one is shown")
        assert ask(secure, "GET", "/health")[0] == 200, "connections that were there go on"
    finally:
        assert gateway.stop() == 0


def test_a_certificate_that_is_none_is_named(tmp_path: Path) -> None:
    one, other = make_certificate(tmp_path), make_certificate(tmp_path, "other")
    for certificate, key in ((one.certificate, other.key), (tmp_path / "none", one.key), (one.key, one.key)):
        config = GatewayConfig(port=0, tls_certificate=str(certificate), tls_key=str(key))
        with pytest.raises(InvalidConfig, match=f"tls_certificate {certificate}, tls_key {key}"):
            open_listeners(config, None)
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-in", str(one.key), "-aes256", "-passout", "pass:word", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(InvalidConfig, match="locked.key"):
        open_listeners(GatewayConfig(port=0, tls_certificate=str(one.certificate), tls_key=str(locked)), None)


def test_a_certificate_that_expires_is_a_sentence_with_its_file_and_date(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, later = make_certificate(tmp_path), make_certificate(tmp_path, "later", days=400)
    ((begin, end),) = certificate_times(own.certificate)
    command = ["openssl", "x509", "-in", str(own.certificate), "-noout", "-enddate"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().partition("=")[2]
    assert end == datetime.strptime(shown, "%b %d %H:%M:%S %Y GMT").replace(tzinfo=timezone.utc)
    assert end - begin == timedelta(days=2)

    def said(unix_seconds: float, certificate: Path = own.certificate) -> list[str]:
        caplog.clear()
        say_expiry(GatewayConfig(tls_certificate=str(certificate), tls_key=str(own.key)), unix_seconds)
        return [record.getMessage() for record in caplog.records]

    date, ends = f"{end:%Y-%m-%d %H:%M} UTC", end.timestamp()
    assert said(ends - 5 * 3600) == [], "a tenth of two days is less"
    assert said(ends - 4 * 3600) == [f"tls_certificate {own.certificate} expires on {date}: renew it, then send SIGHUP"]
    assert said(ends) == [f"tls_certificate {own.certificate} expired on {date}: clients refuse it"]
    far = certificate_times(later.certificate)[0][1].timestamp()
    assert said(far - 15 * 86400, later.certificate) == [] and len(said(far - 13 * 86400, later.certificate)) == 1
    chain = tmp_path / "chain.pem"
    chain.write_bytes(later.certificate.read_bytes() + own.certificate.read_bytes())
    assert said(ends, chain) == [f"tls_certificate {chain} expired on {date}: clients refuse it"]
    chain.write_text("-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n")
    assert said(ends, chain) == said(ends, tmp_path / "none") == []


# --- the Unix socket --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_unix_socket_is_the_operators_door(worker: WorkerProcess, tmp_path: Path, processes: str) -> None:
    path = tmp_path / "gateway.sock"
    gateway = GatewayProcess(
        *("--workers", worker.endpoint, "--unix-socket", str(path), "--processes", processes),
        log=tmp_path / "log",
        environment={"PREBLE_API_KEYS": "a-user-key"},
    )
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        local = UnixConnection(path)
        assert ask(local, "GET", "/workers")[0] == 200
        assert ask(local, "POST", "/v1/completions", {"prompt": [1, 2], "max_tokens": 2})[0] == 200
        assert ask(local, "POST", "/workers/a/drain")[0] == 202
        assert ask(local, "DELETE", "/workers/a")[0] == 200
        status, added = ask(local, "POST", "/workers", {"address": worker.endpoint})
        assert (status, added["state"]) == (201, "ready")
        assert ask(local, "POST", "/workers", {"address": "a,b"})[0] == 400
        for name, value in (("x-forwarded-for", "1.1.1.1"), ("forwarded", "for=1.1.1.1")):
            assert ask(local, "GET", "/workers", **{name: value})[0] == 401, "a proxy's client is no operator"
        assert ask(local, "GET", "/workers", content_type="text/plain")[0] == 200
        assert ask(local, "DELETE", "/workers/a", content_type="text/plain")[0] == 415
        outside = Client(gateway.address)
        assert outside.call("GET", "/workers")[0] == 401
        outside.close()
    finally:
        assert gateway.stop() == 0
    assert not path.exists()


def test_a_socket_left_behind_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    config = GatewayConfig(port=0, unix_socket=str(path))
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listeners = open_listeners(config, None)
    assert [listener.door for listener in listeners] == ["network", "unix"]
    with pytest.raises(InvalidConfig, match="somebody listens there"):
        open_listeners(config, None)
    for listener in listeners:
        listener.close()
    path.write_text("precious")
    with pytest.raises(InvalidConfig, match="it is no socket"):
        open_listeners(config, None)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidConfig, match="it is no socket"):
        open_listeners(config, None)
    with pytest.raises(InvalidConfig, match="No such file"):
        open_listeners(GatewayConfig(port=0, unix_socket=str(tmp_path / "none" / "a.sock")), None)
    assert os.listdir(tmp_path) == ["gateway.sock"]


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", ["1", "2"])
def test_after_sigterm_requests_are_taken_while_ready_says_no_and_the_second_one_ends_it(
    worker: WorkerProcess, tmp_path: Path, processes: str
) -> None:
    gateway = GatewayProcess(
        *("--workers", worker.endpoint, "--lame-duck-seconds", str(1000 * HANG_SECONDS), "--processes", processes),
        log=tmp_path / "log",
    )

    def fresh(method: str, path: str, body: Any = None) -> tuple[int, Any]:
        client = Client(gateway.address)  # each on a connection of its own
        try:
            status, _, answer = client.call(method, path, body)
            return status, answer
        finally:
            client.close()

    try:
        assert fresh("GET", "/ready")[0] == 200
        gateway.signal(signal.SIGTERM)
        until(lambda: all(fresh("GET", "/ready")[0] == 503 for _ in range(8)), "every process says no")
        assert fresh("GET", "/ready")[1]["draining"] is True and fresh("GET", "/health")[0] == 200
        assert fresh("POST", "/v1/completions", {"prompt": [1, 2], "max_tokens": 2})[0] == 200
        gateway.signal(signal.SIGTERM)
        gateway.process.wait(HANG_SECONDS)
    finally:
        gateway.stop()


@pytest.mark.parametrize(
    ("number", "seconds", "processes"),
    [
        (signal.SIGTERM, "0.2", "1"),
        (signal.SIGINT, str(1000 * HANG_SECONDS), "1"),
        (signal.SIGINT, str(1000 * HANG_SECONDS), "2"),
    ],
)
def test_lame_duck_ends_by_itself_and_sigint_does_without(
    worker: WorkerProcess, tmp_path: Path, number: signal.Signals, seconds: str, processes: str
) -> None:
    gateway = GatewayProcess(
        *("--workers", worker.endpoint, "--lame-duck-seconds", seconds, "--processes", processes), log=tmp_path / "log"
    )
    gateway.signal(number)
    try:
        assert gateway.process.wait(HANG_SECONDS) == 0
    finally:
        gateway.stop()


# --- a request's time -------------------------------------------------------------------------------------------------


def test_a_request_that_takes_too_long_is_ended_at_the_worker_too(worker: WorkerProcess, tmp_path: Path) -> None:
    gateway = GatewayProcess("--workers", worker.endpoint, "--request-seconds", "2", log=tmp_path / "log")
    client = Client(gateway.address)
    long = {"prompt": [1, 2, 3], "max_tokens": 20_000, "ignore_eos": True}
    try:
        status, _, answer = client.call("POST", "/v1/completions", long)
        assert (status, answer["error"]["code"]) == (504, "request_timeout")
        status, _, text = client.call("POST", "/v1/completions", {**long, "stream": True})
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert status == 200 and events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "request_timeout"
        until(
            lambda: client.call("GET", "/workers")[2]["workers"][0]["load"]["running"] == 0,
            "the worker has given it up",
        )
        assert client.call("POST", "/v1/completions", {"prompt": [1, 2], "max_tokens": 1})[0] == 200
    finally:
        client.close()
        assert gateway.stop() == 0


def test_serve_without_workers_ends_at_once_with_what_to_do() -> None:
    command = [sys.executable, "-m", "preble.cli", "serve", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert ended.returncode == 2 and "workers: none is named" in ended.stderr and ended.stderr.count("\n") == 1
