"""`preble serve --processes 2` with real processes: what one learns or books the other knows, crashes, and the end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from preble.gateway.core.config import END_MARGIN_SECONDS
from preble.gateway.core.config_sources import load_for
from preble.gateway.core.sibling_processes import (
    GatewayProcesses,
    ProcessAnswer,
    ProcessSlot,
    SharedWork,
    merged,
    statuses,
)
from preble.gateway.processes import _Fleet
from tests.support.attach import FakeServer
from tests.support.gateway import Client, GatewayProcess
from tests.support.relay import Call, ScriptedServer
from tests.support.transport import HANG_SECONDS, WorkerProcess, asynchronous

CONNECTIONS_MAX = 200  # the kernel chooses the process of each; so many are never all with one


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    """One simulated worker."""
    process = WorkerProcess("--id", "a", time_scale=0.0)
    yield process
    process.stop()


@pytest.fixture
def gateway(worker: WorkerProcess, tmp_path: Path) -> Iterator[GatewayProcess]:
    """Two processes in front of it."""
    process = GatewayProcess("--workers", worker.endpoint, "--processes", "2", log=tmp_path / "log")
    yield process
    assert process.stop() == 0


def connections(gateway: GatewayProcess, key: str | None = None) -> list[Client]:
    """A connection to each of the processes, in their order; with a key, or the admin token."""
    found: dict[str, Client] = {}
    for _ in range(CONNECTIONS_MAX):
        client = Client(gateway.address, key or gateway.admin_token)
        _, headers, _ = client.call("GET", "/health")
        if headers["x-preble-process"] in found:
            client.close()
        found.setdefault(headers["x-preble-process"], client)
        if len(found) == 2:
            return [found["0"], found["1"]]
    raise AssertionError(f"{CONNECTIONS_MAX} connections went to {sorted(found)}")


def until(condition: Any, what: str) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)


def complete(client: Client, prompt: list[int]) -> tuple[int, dict[str, str], Any]:
    """Two tokens for a prompt."""
    return client.call("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 2})


def pid_of(gateway: GatewayProcess, index: int) -> int:
    """The process at that place, by its command line; 0 if there is none now."""
    children = Path(f"/proc/{gateway.process.pid}/task/{gateway.process.pid}/children").read_text().split()
    for pid in map(int, children):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        if "preble.gateway.processes" in words and json.loads(words[3])["slot"]["index"] == index:
            return pid
    return 0


def test_processes_may_take_as_long_to_end_as_the_configuration_says_now(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text('{"drain_seconds": 1, "lame_duck_seconds": 1}')
    args = argparse.Namespace(config=file)
    fleet = _Fleet(args, load_for(args, {}).config, ("127.0.0.1", 1), str(tmp_path))

    def given(content: str) -> float:
        """How long, after a reload of a file with that."""
        file.write_text(content)
        fleet._take_signal(signal.SIGHUP)
        return fleet._supervisor.config.drain_seconds

    assert given('{"drain_seconds": 100, "lame_duck_seconds": 5}') == 105.0 + END_MARGIN_SECONDS
    assert given('{"drain_seconds": -1}') == 105.0 + END_MARGIN_SECONDS, "one that is wrong changes nothing"


def test_what_one_process_served_the_other_knows_is_cached(gateway: GatewayProcess) -> None:
    """Reported only by the worker's events: the two share nothing else."""
    first, second = connections(gateway)
    prompt = list(range(1000, 1640))

    before = second.call("POST", "/v1/preble/explain", {"token_ids": prompt})[2]
    assert complete(first, prompt)[0] == 200
    until(
        lambda: second.call("POST", "/v1/preble/explain", {"token_ids": prompt})[2] != before, "the other has received"
    )
    status, headers, answer = complete(second, prompt)
    assert (status, headers["x-preble-process"]) == (200, "1")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 600
    assert "reason=exploit" in headers["x-preble-decision"]


def test_each_process_books_what_the_other_has_running(tmp_path: Path) -> None:
    slow = WorkerProcess("--id", "slow", time_scale=1.0)
    gateway = GatewayProcess("--workers", slow.endpoint, "--processes", "2", log=tmp_path / "log")
    try:
        first, second = connections(gateway)
        body = json.dumps({"prompt": [7, 8, 9], "max_tokens": 10_000, "stream": True})
        first.connection.request("POST", "/v1/completions", body)
        first.connection.getresponse()

        def booked(client: Client) -> int:
            return int(client.call("GET", "/workers")[2]["workers"][0]["live_requests"])

        until(lambda: booked(second) == 1, "the other process has booked it, too")
        assert 'preble_leases_of_peers{process="1"} 1.0' in second.call("GET", "/metrics")[2]
        os.kill(pid_of(gateway, 0), signal.SIGKILL)
        until(lambda: booked(second) == 0, "it has received that the request is over")
    finally:
        gateway.stop()
        slow.stop()


@contextlib.contextmanager
def loop_beside() -> Iterator[Any]:
    """A loop in a thread of its own; runs works there to their end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(HANG_SECONDS)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A server in a thread of its own, whose answers take as long as the test."""

    async def start() -> FakeServer:
        made = FakeServer("sglang", events=False)
        made.pause_seconds = 0.1
        return await made.start()

    with loop_beside() as run:
        made = run(start())
        yield made
        run(made.kill())


def booked(client: Client) -> int:
    """Requests that a process has booked on the one worker."""
    return int(client.call("GET", "/workers")[2]["workers"][0]["live_requests"])


def serves(gateway: GatewayProcess, index: int) -> bool:
    """Whether a process answers, by one that does."""
    client = Client(gateway.address)
    try:
        return f'preble_process_up{{process="{index}"}} 1.0' in client.call("GET", "/metrics")[2]
    finally:
        client.close()


def stream(client: Client) -> None:
    """Begin a long answer."""
    sampling = {"max_new_tokens": 4000, "ignore_eos": True}
    body = json.dumps({"input_ids": [7, 8, 9], "sampling_params": sampling, "stream": True})
    client.connection.request("POST", "/generate", body, {"content-type": "application/json"})
    assert client.connection.getresponse().status == 200


def test_processes_before_a_server_book_each_others_requests(server: FakeServer, tmp_path: Path) -> None:
    """Servers do not report them: the processes do, also to one that has just been started."""
    gateway = GatewayProcess("--workers", server.url, "--processes", "2", log=tmp_path / "log")
    try:
        first, second = connections(gateway)
        hears = 'preble_siblings_connected{process="1"} 1.0'
        until(lambda: hears in second.call("GET", "/metrics")[2], "what the first reports reaches the second")
        stream(first)
        until(lambda: booked(second) == 1, "the other process has booked it, too")
        text = second.call("GET", "/metrics")[2]
        assert 'preble_leases_of_peers{process="1"} 1.0' in text
        sent = 'preble_sibling_reports_total{process="0",what="sent"} 2.0'
        until(lambda: sent in second.call("GET", "/metrics")[2], "the first token is reported, too")
        killed = pid_of(gateway, 1)
        os.kill(killed, signal.SIGKILL)
        until(lambda: pid_of(gateway, 1) not in (0, killed), "it was started again")
        until(lambda: serves(gateway, 1), "it serves")
        again = connections(gateway)[1]
        until(lambda: booked(again) == 1, "the new one has booked it")
        killed = pid_of(gateway, 0)
        os.kill(killed, signal.SIGKILL)
        until(lambda: booked(again) == 0, "what the killed one had is given back")
    finally:
        assert gateway.stop() == 0


def test_limits_and_kept_answers_are_those_of_all_processes(tmp_path: Path) -> None:
    async def respond(call: Call) -> None:
        usage = {"input_tokens": 5, "output_tokens": 5}
        answer = {"id": "resp_1", "object": "response", "status": "completed", "output": [], "usage": usage}
        await call.answer(answer)

    servers = [ScriptedServer(respond) for _ in range(2)]
    with loop_beside() as run:
        for one in servers:
            run(one.start())
        keys = [
            {"key": "key-of-a-team", "models": ["tiny"], "token_budget": 40},
            {"key": "seldom-key", "requests_per_minute": 3},
        ]
        config = {"workers": [one.url for one in servers], "processes": 2, "keys": keys, "policy": "round_robin"}
        (tmp_path / "c.yaml").write_text(json.dumps({**config, "admin_keys": ["admin-of-all"]}))
        gateway = GatewayProcess("--config", str(tmp_path / "c.yaml"), log=tmp_path / "log")
        try:
            pair = connections(gateway, "admin-of-all")
            asked = {"model": "tiny", "input": "hi"}

            def ask(client: Client, key: str, path: str = "/v1/responses", **more: Any) -> int:
                return int(client.call("POST", path, {**asked, **more}, {"authorization": f"Bearer {key}"})[0])

            connected = 'preble_siblings_connected{process="%d"} 1.0'
            until(
                lambda: all(connected % i in pair[0].call("GET", "/metrics")[2] for i in (0, 1)), "they are connected"
            )
            assert ask(pair[0], "key-of-a-team") == 200
            (kept,) = [one for one in servers if one.calls]
            for path in ("/v1/responses", "/v1/responses/resp_1/cancel"):
                assert ask(pair[1], "key-of-a-team", path, previous_response_id="resp_1") == 200
                assert ask(pair[1], "key-of-a-team", path, previous_response_id="resp_1") in (200, 429)
            assert all(one is kept or not one.calls for one in servers), "the other process asks where it is kept"
            until(lambda: ask(pair[1], "key-of-a-team") == 429 == ask(pair[0], "key-of-a-team"), "the budget is used")
            for key, status in (("key-of-a-team", 403), ("admin-of-all", 404)):
                bearer = {"authorization": f"Bearer {key}"}
                got = pair[1].call("GET", "/v1/preble/keepers/resp_1", None, bearer)[0]
                assert got == status, "it is for other processes only"
            let_in = 0
            for number in range(8):
                let_in += ask(pair[number % 2], "seldom-key") == 200
                time.sleep(0.05)
            assert let_in == 3
        finally:
            assert gateway.stop() == 0
            for one in servers:
                run(one.stop())


def test_a_process_that_hangs_has_no_bookings_until_it_wakes(server: FakeServer, tmp_path: Path) -> None:
    gateway = GatewayProcess("--workers", server.url, "--processes", "2", log=tmp_path / "log")
    hung = 0
    try:
        first, second = connections(gateway)
        stream(first)
        until(lambda: booked(second) == 1, "the other process has booked it, too")
        hung = pid_of(gateway, 0)
        os.kill(hung, signal.SIGSTOP)
        until(lambda: booked(second) == 0, "it is silent for too long")
        os.kill(hung, signal.SIGCONT)
        until(lambda: booked(second) == 1, "it is back")
        first.close()
        until(lambda: booked(second) == 0, "its client has left")
    finally:
        if hung:
            os.kill(hung, signal.SIGCONT)
        gateway.stop()


def test_metrics_of_any_process_reports_all(gateway: GatewayProcess) -> None:
    first, second = connections(gateway)
    assert complete(first, [1, 2, 3])[0] == 200
    text = second.call("GET", "/metrics")[2]
    assert text.count("# TYPE preble_requests_total counter") == 1
    for sample in (
        'preble_process_up{process="0"} 1.0',
        'preble_prompt_tokens_total{process="0",model="simulated"} 3.0',
        'preble_http_requests_total{process="0",model="simulated",route="/v1/completions",status="200"} 1.0',
        'preble_worker_up{process="1",worker="a"} 1.0',
    ):
        assert sample in text, sample


def test_metrics_asked_for_by_many_at_once_show_every_live_process(gateway: GatewayProcess) -> None:
    """Processes that ask each other do not wait for each other's threads."""

    def ask(_: int) -> str:
        client = Client(gateway.address)
        try:
            return str(client.call("GET", "/metrics")[2])
        finally:
            client.close()

    with ThreadPoolExecutor(60) as pool:
        texts = list(pool.map(ask, range(60)))
    for text in texts:
        assert 'preble_process_up{process="0"} 1.0' in text and 'preble_process_up{process="1"} 1.0' in text


@asynchronous
async def test_work_that_is_under_way_is_shared_and_begun_anew_later() -> None:
    begun = 0
    gate = asyncio.Event()

    async def work() -> int:
        nonlocal begun
        begun += 1
        await gate.wait()
        return begun

    shared = SharedWork(work)
    first, second, third = [asyncio.ensure_future(shared.result()) for _ in range(3)]
    await asyncio.sleep(0)
    first.cancel()
    gate.set()
    assert await asyncio.gather(second, third) == [1, 1] and first.cancelled()
    assert await shared.result() == 2


@asynchronous
async def test_a_process_that_hangs_up_or_answers_nonsense_is_left_out(tmp_path: Path) -> None:
    answers = [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", b"nonsense\r\n\r\n"]
    answers.append(b"HTTP/1.1 207 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\ngood\r\n0\r\n\r\n")
    processes = GatewayProcesses(ProcessSlot(4, 6, 1, str(tmp_path)))

    async def serve(index: int) -> asyncio.AbstractServer:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answers[index])
            writer.close()

        return await asyncio.start_unix_server(answer, processes.slot.socket_path(index))

    servers = [await serve(index) for index in range(4)]  # nobody is at 5
    found = await processes.ask("GET", "/metrics")
    assert [(one.index, one.status, one.body) for one in found] == [
        *((0, None, b""), (1, None, b""), (2, None, b""), (3, 207, b"good"), (5, None, b""))
    ]
    for server in servers:
        server.close()


def test_a_change_of_workers_is_made_in_all_processes_and_outlives_a_crash(gateway: GatewayProcess) -> None:
    more = WorkerProcess("--id", "b", time_scale=0.0)
    try:
        first, second = connections(gateway)
        status, _, told = first.call("POST", "/workers", {"address": more.endpoint})
        assert (status, told["processes"]) == (201, [{"process": 0, "status": 201}, {"process": 1, "status": 201}])
        assert [card["id"] for card in second.call("GET", "/workers")[2]["workers"]] == ["a", "b"]
        assert second.call("POST", "/workers/b/drain")[0] == 202
        states = {card["id"]: card["state"] for card in first.call("GET", "/workers")[2]["workers"]}
        assert states == {"a": "ready", "b": "draining"}

        killed = pid_of(gateway, 1)
        os.kill(killed, signal.SIGKILL)
        until(lambda: pid_of(gateway, 1) not in (0, killed), "it was started again")
        until(lambda: 'preble_process_up{process="1"} 1.0' in first.call("GET", "/metrics")[2], "it serves")
        assert complete(first, [4, 5])[0] == 200
        again = connections(gateway)[1]
        states = {card["id"]: card["state"] for card in again.call("GET", "/workers")[2]["workers"]}
        assert states == {"a": "ready", "b": "draining"}

        assert again.call("DELETE", "/workers/b")[0] == 200
        assert [card["id"] for card in first.call("GET", "/workers")[2]["workers"]] == ["a"]
        assert any(line["message"].startswith("process exited") for line in gateway.log_lines())
    finally:
        more.stop()


def test_a_process_that_hangs_is_killed_and_started_again(gateway: GatewayProcess) -> None:
    connections(gateway)
    hung = pid_of(gateway, 1)
    os.kill(hung, signal.SIGSTOP)
    until(lambda: pid_of(gateway, 1) not in (0, hung), "another one was started in its place")
    assert not Path(f"/proc/{hung}/cwd").exists()
    until(lambda: any("process hangs" in line["message"] for line in gateway.log_lines()), "it is in the log")


def test_a_process_hangs_where_it_is_there_and_says_nothing(tmp_path: Path) -> None:
    slot = ProcessSlot(0, 1, 1, str(tmp_path))
    assert not slot.hangs(0.05), "nobody is there"
    with slot.listen() as listener:
        listener.listen(8)
        assert slot.hangs(0.05), "somebody is, and says nothing"

        def answer() -> None:
            for _ in range(2):  # the one that was given up, and the next
                connection, _ = listener.accept()
                with connection, contextlib.suppress(BrokenPipeError):
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 503 ")

        thread = threading.Thread(target=answer)
        thread.start()
        assert not slot.hangs(HANG_SECONDS)
        thread.join()
    assert not slot.hangs(0.05), "it has ended"


def test_sigterm_lets_the_answers_of_all_processes_end(tmp_path: Path) -> None:
    slow = WorkerProcess("--id", "slow", time_scale=1.0)
    gateway = GatewayProcess("--workers", slow.endpoint, "--processes", "2", log=tmp_path / "log")
    try:
        body = json.dumps({"prompt": [7, 8, 9], "max_tokens": 20, "stream": True})
        clients = connections(gateway)
        for client in clients:
            client.connection.request("POST", "/v1/completions", body)
        answers = [client.connection.getresponse() for client in clients]  # both stream now
        gateway.signal(signal.SIGTERM)
        assert all(answer.read().endswith(b"data: [DONE]\n\n") for answer in answers)
        assert gateway.process.wait(HANG_SECONDS) == 0
    finally:
        gateway.stop()
        slow.stop()


def test_the_processes_end_when_their_parent_is_killed(gateway: GatewayProcess) -> None:
    pids = [pid_of(gateway, 0), pid_of(gateway, 1)]
    gateway.process.kill()
    until(lambda: not any(Path(f"/proc/{pid}/cwd").exists() for pid in pids), "both have ended")
    gateway.process.returncode = 0  # the fixture asks how it ended


def test_a_configuration_that_cannot_work_ends_it(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit code 1"):
        GatewayProcess(
            *("--workers", "tcp://127.0.0.1:9", "--connect-seconds", "0.2", "--processes", "2"), log=tmp_path / "log"
        )
    assert "0 of 1 workers are ready" in (tmp_path / "log").read_text()


def test_metrics_are_merged_by_family_and_say_who_is_silent() -> None:
    text = b'# HELP a A\n# TYPE a counter\na 1.0\n# HELP b B\n# TYPE b gauge\nb{x="{ }"} 2.0\n'
    lines = merged({0: text, 1: None, 2: text}).decode().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        *('preble_process_up{process="0"} 1.0', 'preble_process_up{process="1"} 0.0'),
        'preble_process_up{process="2"} 1.0',
        *('a{process="0"} 1.0', 'a{process="2"} 1.0'),
        *('b{process="0",x="{ }"} 2.0', 'b{process="2",x="{ }"} 2.0'),
    ]
    assert lines.index("# TYPE b gauge") == lines.index('b{process="0",x="{ }"} 2.0') - 1


def test_what_each_process_said_is_reported_in_order() -> None:
    said = statuses(201, 1, [ProcessAnswer(0, None), ProcessAnswer(2, 409)])
    assert said == [{"process": 0, "status": None}, {"process": 1, "status": 201}, {"process": 2, "status": 409}]
