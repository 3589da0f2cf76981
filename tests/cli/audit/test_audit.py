"""`preble audit` before faked servers, each a process of its own: what is counted, who is named, what is survived."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from preble import SamplingParams
from preble.cli import main
from preble.cli.audit.findings import AuditFindings, find
from preble.cli.audit.listening import Received, listen
from preble.cli.audit.report import headline, lines
from preble.transport.engine_servers.http_client import EngineServer
from preble.transport.engine_servers.server_info import ServerOptions
from tests.cli.test_attach import start
from tests.support.metered_server import ServerProcess
from tests.support.transport import HANG_SECONDS, asynchronous

OPTIONS = ServerOptions(answer_seconds=1.0)
DOCUMENTS = [[100 * number + place for place in range(64)] for number in range(1, 5)]


def question(document: int, number: int) -> list[int]:
    """A document and 20 tokens that only this question has: two units of 16 beyond it, one of them whole."""
    return DOCUMENTS[document] + [10_000 + 100 * number + place for place in range(20)]


@pytest.fixture
def servers() -> Iterator[list[ServerProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(ServerProcess(kind)) for kind in ("sglang", "vllm")]


async def ask(url: str, prompt: Sequence[int]) -> None:
    """One request, its answer read to the end."""
    async with EngineServer(url, OPTIONS) as server:
        async for _ in server.generate(prompt, SamplingParams(max_new_tokens=4), request_id=str(prompt[-1])):
            pass


async def audited(urls: Sequence[str], traffic: Callable[[Received], Awaitable[None]]) -> Received:
    """Listen to the servers while traffic runs."""
    stop, began = asyncio.Event(), asyncio.Event()
    received: list[Received] = []

    def on_poll(one: Received) -> None:
        received.append(one)
        began.set()

    async def run() -> None:
        await began.wait()
        await traffic(received[0])
        stop.set()

    listening = asyncio.ensure_future(
        listen(urls, OPTIONS, HANG_SECONDS, clock=time.monotonic, stop=stop, poll_seconds=0.05, on_poll=on_poll)
    )
    running = asyncio.ensure_future(run())
    try:
        done, _ = await asyncio.wait([listening, running], return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()
        return await listening
    finally:
        running.cancel()


def text(found: AuditFindings) -> str:
    return "\n".join(lines(found))


@asynchronous
async def test_round_robin_computes_documents_twice_and_the_count_is_exact(servers: list[ServerProcess]) -> None:
    urls = [server.url for server in servers]
    await ask(urls[0], question(3, 90))  # before anybody listens: known by the replay

    async def traffic(_: Received) -> None:
        for number in range(16):
            await ask(urls[number % 2], question(number // 2 % 4, number))
        await ask(urls[0], question(0, 0))  # all of it is cached: no event shows it

    received = await audited(urls, traffic)
    found = find(received)
    # Each document at each server, less the one that the first had: 3 new ones, 4 for another time. The whole blocks
    # of 16 questions are new; 4 tokens of each lie beyond the last unit of 16 and are compared with nothing.
    assert found.elsewhere_tokens == 4 * 64 and found.again_tokens == 0
    assert sum(one.stored.computed for one in found.servers) == 7 * 64 + 16 * 20
    assert (found.requests, found.seen) == (17, 16)
    assert found.computed_tokens == 7 * 64 + 16 * 20 + 4, "as the metrics say; the last token is always computed"
    assert found.twice_share.value == pytest.approx(256 / (7 * 64 + 324))
    (first, *_) = found.prefixes
    assert (first.end, first.servers, first.repeated_tokens) == (64, 2, 64) and len(first.head) == 8
    assert found.e2 is not None and found.e2.replayed == 17 and found.e2.workers == 2
    assert found.lost.resyncs == 0
    said = text(found)
    assert "256 of them" in said and "no event lost" in said and "17 requests" in said
    assert "fewer tokens" in headline(found) and len(headline(found)) < 95, "a longer one was cut off in the picture"


@asynchronous
async def test_a_restart_empties_a_cache_and_does_not_end_the_audit(servers: list[ServerProcess]) -> None:
    server = servers[0]

    async def traffic(received: Received) -> None:
        await ask(server.url, question(0, 1))
        while received.ledger.stored().computed < 84 or received.servers[0].served is None:
            await asyncio.sleep(0.01)
        server.obey("restart")
        await ask(server.url, question(0, 1))
        while received.ledger.stored().computed < 168:
            await asyncio.sleep(0.01)

    found = find(await audited([server.url], traffic))
    assert found.again_tokens == 80 and found.elsewhere_tokens == 0
    assert found.lost.restarts >= 1 and "restart" in text(found)


@asynchronous
async def test_a_server_without_events_is_named_with_its_flag_and_counted_by_its_metrics() -> None:
    with ServerProcess("vllm", events=False) as silent, ServerProcess("sglang") as open_one:

        async def traffic(_: Received) -> None:
            for number in range(4):
                await ask(silent.url, question(0, number))
                await ask(open_one.url, question(0, number))

        found = find(await audited([silent.url, open_one.url], traffic))
    assert found.requests == 8 and found.servers[0].requests == 4 and found.servers[0].seen == 0
    assert found.servers[0].computed == 64 + 4 * 20 and found.servers[0].stored.computed == 0
    assert found.lost.silent_servers == 1 and found.sure != "good"
    assert "--kv-events-config" in text(found) and silent.url in text(found)


@asynchronous
async def test_a_hung_server_holds_nobody_up(servers: list[ServerProcess]) -> None:
    hung, well = servers

    async def traffic(received: Received) -> None:
        hung.obey("hang")
        await ask(well.url, question(0, 1))
        while not received.servers[0].unanswered:
            await asyncio.sleep(0.01)

    found = find(await audited([hung.url, well.url], traffic))
    assert found.requests == 1 and found.lost.unanswered >= 1
    assert "did not answer" in text(found) and hung.url in text(found)
    # And one that hangs from the start is named; the others are audited.
    found = find(await audited([hung.url, well.url], lambda _: ask(well.url, question(1, 1))))
    assert found.servers[0].engine == "no answer" and found.requests == 1


@asynchronous
async def test_a_metric_that_cannot_be_is_named_and_not_used(servers: list[ServerProcess]) -> None:
    server = servers[0]
    server.obey("lie")

    async def traffic(_: Received) -> None:
        for number in range(4):
            await ask(server.url, question(0, number))

    found = find(await audited([server.url], traffic))
    assert found.ttft_seconds is None and found.requests == 4
    assert "which cannot be" in text(found) and "nothing is claimed of it" in text(found)


@asynchronous
async def test_requests_whose_events_are_lost_are_counted_and_make_it_unsure(servers: list[ServerProcess]) -> None:
    server = servers[0]

    async def traffic(_: Received) -> None:
        await ask(server.url, question(0, 0))
        server.obey("lose")
        for number in range(1, 9):
            await ask(server.url, question(number % 4, number))

    found = find(await audited([server.url], traffic))
    assert (found.requests, found.seen) == (9, 1)
    assert found.sure == "poor" and "events show 11%" in text(found)


@asynchronous
async def test_interrupted_it_prints_what_there_is(servers: list[ServerProcess], tmp_path: Path) -> None:
    urls = [server.url for server in servers]
    files = [str(tmp_path / name) for name in ("a.json", "a.png")]
    process = await start("-m", "preble.cli", "audit", *urls, "--json", files[0], "--picture", files[1])
    assert process.stderr is not None
    while b"listening to 2 servers" not in (line := await process.stderr.readline()):
        assert line, "it ended before it listened"
    for number in range(8):
        await ask(urls[number % 2], question(number // 2, number))
    process.send_signal(signal.SIGINT)
    out, error = (part.decode() for part in await asyncio.wait_for(process.communicate(), HANG_SECONDS))
    assert process.returncode == 0, error
    assert "(interrupted)" in out and "256 of them" in out and "E2" in out
    figures = json.loads(Path(files[0]).read_text())
    assert figures["elsewhere_tokens"] == 256 and figures["requests"] == 8 and figures["is_interrupted"]
    assert Path(files[1]).read_bytes().startswith(b"\x89PNG")


def test_wrong_usage_and_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "tcp://127.0.0.1:1"]) == 2
    assert main(["audit", "http://127.0.0.1:1", "http://127.0.0.1:1/"]) == 2
    assert main(["audit", "http://127.0.0.1:1", "--minutes", "100000"]) == 2
    assert main(["audit", "http://127.0.0.1:1"]) == 1
    assert "named twice" in (error := capsys.readouterr().err) and "cannot be reached" in error
