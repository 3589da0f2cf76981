"""`preble attach` and the example of attaching, before faked servers in this process. What the client understands is in
transport/engine_servers/test_link.py."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import signal
import sys

import pytest

from preble.cli import main
from tests.support.attach import FakeServer
from tests.support.paths import ROOT
from tests.support.transport import HANG_SECONDS, asynchronous


async def start(*arguments: str) -> asyncio.subprocess.Process:
    """Python, in a process of its own that sees this checkout, and that SIGINT interrupts: where these tests run in the
    background of a shell it would be ignored, which children inherit."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    pipe = asyncio.subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": path}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdout=pipe,
        stderr=pipe,
        env=environment,
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


async def preble(*arguments: str) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr of `preble ARGUMENTS`."""
    process = await start("-m", "preble.cli", *arguments)
    out, error = await process.communicate()
    return process.returncode, out.decode(), error.decode()


@asynchronous
async def test_what_servers_reports_is_a_table_with_a_row_for_each_rank() -> None:
    sglang, vllm = await FakeServer("sglang", ranks=2).start(), await FakeServer("vllm").start()
    await sglang._store([1] * 8, 1)
    code, out, error = await preble("attach", sglang.url, vllm.url)
    endpoints = [one.endpoint for one in (*sglang.publishers, *vllm.publishers)]
    await sglang.kill()
    await vllm.kill()
    rows = [re.split(r"  +", line) for line in out.splitlines()]
    assert code == 0 and rows[0][:4] == ["server", "engine", "model", "block"]
    assert [row[1] for row in rows[1:]] == ["sglang 0.5.23", "sglang 0.5.23", "vllm 0.32.0"]
    assert [row[5] for row in rows[1:]] == ["0/2", "1/2", "0/1"]
    assert [row[6] for row in rows[1:]] == endpoints
    assert [row[7] for row in rows[1:]] == ["answers, 0 batches", "answers, 2 batches", "answers, 0 batches"]
    assert "--load-publish-endpoint" in error


@asynchronous
async def test_what_is_missing_is_said_with_its_flag_and_fails_only_where_it_must() -> None:
    silent, locked = await FakeServer("sglang", events=False).start(), await FakeServer("vllm", api_key="k").start()
    code, out, error = await preble("attach", silent.url, locked.url)
    assert code == 1 and len(out.splitlines()) == 2 and "none" in out
    assert "--kv-events-config" in error and "api_key" in error
    key = ROOT / "tests" / "data" / "README.md"
    code, _, error = await preble("attach", locked.url, "--api-key-file", str(key))
    assert code == 1 and "api_key" in error
    await silent.kill()
    code, _, error = await preble("attach", silent.url)
    assert code == 1 and "cannot be reached" in error and len(error.splitlines()) == 1
    await locked.kill()


@asynchronous
async def test_watching_says_what_is_received_until_interrupted() -> None:
    server = await FakeServer("vllm").start()
    await server._store(list(range(12)), 0)
    process = await start("-X", "faulthandler", "-m", "preble.cli", "attach", server.url, "--watch")
    assert process.stdout is not None
    while not re.search(r"ready  blocks 3  batches 3  gaps 0", (await process.stdout.readline()).decode()):
        assert not process.stdout.at_eof(), "it ended before it received the events"
    process.send_signal(signal.SIGINT)
    ended = asyncio.ensure_future(process.communicate())
    if not (await asyncio.wait([ended], timeout=HANG_SECONDS / 2))[0]:
        process.send_signal(signal.SIGABRT)  # and it says on which line it hangs
    _, error = await ended
    assert process.returncode == 130, error.decode()
    await server.kill()


@asynchronous
async def test_the_example_sends_each_document_where_it_is_cached() -> None:
    servers = [await FakeServer(kind).start() for kind in ("sglang", "vllm")]
    process = await start(str(ROOT / "examples" / "attach.py"), *(server.url for server in servers))
    out, error = await process.communicate()
    for server in servers:
        await server.kill()
    assert process.returncode == 0, error.decode()
    lines = out.decode().splitlines()
    assert len(lines) == 8 and len({(line.split()[0], line.split()[2]) for line in lines}) == 2
    assert sum(" 600 of 620 cached, 8 tokens" in line for line in lines) == 6


@asynchronous
async def test_the_readmes_five_lines_run_before_two_servers() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.search(r"<!-- example: attach -->\n```python\n(.*?)```", readme, re.DOTALL)
    assert example is not None and sum(map(bool, example.group(1).splitlines())) == 5
    servers = [await FakeServer("sglang").start() for _ in range(2)]
    code = example.group(1)
    for host, server in zip("ab", servers, strict=True):
        code = code.replace(f"http://host-{host}:30000", server.url)
    process = await start("-c", f"{code}\nasyncio.run(main([1, 2, 3]))")
    out, error = await process.communicate()
    for server in servers:
        await server.kill()
    assert process.returncode == 0, error.decode()
    assert out.decode().rstrip().endswith("length")


@pytest.mark.parametrize("arguments", [["tcp://127.0.0.1:1"], ["http://h:1", "--block-size", "0"]])
def test_wrong_usage_is_exit_code_two_or_names_what_is_wrong(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attach", *arguments]) in (1, 2)
    assert re.search("url must be|block_size", capsys.readouterr().err)
