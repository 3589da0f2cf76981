"""`preble epp` as a process: its port, its options, its end."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from preble.cli import build_parser
from preble.cli.epp import PORT, run
from preble.errors import InvalidConfig
from preble.gateway import loaded_from
from tests.support.paths import ROOT
from tests.support.picker import BODY, named
from tests.support.relay import ScriptedServer
from tests.support.transport import asynchronous

grpc = pytest.importorskip("grpc")


def test_without_a_port_it_takes_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int | None] = []
    monkeypatch.setattr("preble.gateway.run", lambda args: taken.append(loaded_from(args).config.picker_port) or 0)
    for more in ([], ["--picker-port", "7"]):
        args = build_parser(["epp"]).parse_args(["epp", "--workers", "http://127.0.0.1:1", *more])
        assert run(args) == 0
    assert taken == [PORT, 7]


def test_several_processes_cannot_share_a_port_that_nobody_named() -> None:
    words = ["epp", "--workers", "http://127.0.0.1:1", "--picker-port", "0", "--processes", "2"]
    with pytest.raises(InvalidConfig, match="picker_port: 0"):
        run(build_parser(words).parse_args(words))


@pytest.mark.parametrize("servers", ["named", "discovered"])
@asynchronous
async def test_a_process_answers_data_planes_beside_its_own_port_and_ends_when_asked(
    servers: str, tmp_path: Path
) -> None:
    server = await ScriptedServer().start()
    given = ["--workers", server.url]
    if servers == "discovered":
        (tmp_path / "servers.yaml").write_text(f"- {server.url}\n")
        (tmp_path / "epp.yaml").write_text(f"discovery: [{{source: file, path: {tmp_path / 'servers.yaml'}}}]\n")
        given = ["--config", str(tmp_path / "epp.yaml")]
    command = [sys.executable, "-m", "preble.cli", "epp", *given, "--port", "0", "--picker-port", "0"]
    process = await asyncio.create_subprocess_exec(
        *command, "--lame-duck-seconds", "0", cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        said: dict[str, str] = {}
        while not {"PICKER", "READY"} <= said.keys():
            word, _, rest = (await process.stdout.readline()).decode().partition(" ")
            assert word, "it ended"
            said[word] = rest.strip()
        found = await asyncio.to_thread(_exchange, said["PICKER"])
        assert found == server.worker
        metrics = await asyncio.to_thread(lambda: urllib.request.urlopen(said["READY"] + "/metrics").read().decode())
        assert 'preble_http_requests_total{model="tiny",route="/v1/chat/completions",status="499"} 1.0' in metrics
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await server.stop()


def _exchange(address: str) -> str:
    """Ask for a server, in the usual, blocking way."""
    from tests.stress.picker_aborts import ProcessingResponse
    from tests.support.picker import body, request_headers

    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process", response_deserializer=ProcessingResponse.FromString
        )
        said = iter([request_headers().SerializeToString(), body(BODY).SerializeToString()])
        return named(next(iter(call(said))))
