"""`preble up` as real processes: served prompts, crashes, signals, and the launcher's own violent death.

Every answer is compared with what the simulated engine says undisturbed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from preble import SamplingParams
from preble.cli.prompt_lines import parse_sampling
from preble.errors import InvalidInput
from preble.router import Router
from preble.transport.security import create_keys, load_client_keys
from preble.types import Grammar
from tests.support.paths import ROOT
from tests.support.transport import HANG_SECONDS, asynchronous, collect, expected_tokens

linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for the workers in /proc")


class Up:
    """`preble up --engine simulated ARGS...`; what it writes is collected by two threads."""

    def __init__(self, *arguments: str, workers: int = 2, time_scale: float = 0.05) -> None:
        command = [sys.executable, "-m", "preble.cli", "up", "--engine", "simulated", "--workers", str(workers)]
        worker_arguments = ["--", "--time-scale", str(time_scale)]
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
        self.process = subprocess.Popen(
            [*command, *arguments, *worker_arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self.log: list[str] = []
        self._threads = [
            threading.Thread(target=self._collect, args=(self.process.stdout, self.lines.put), daemon=True),
            threading.Thread(target=self._collect, args=(self.process.stderr, self.log.append), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _collect(pipe: Any, put: Callable[[str], None]) -> None:
        for line in pipe:
            put(line.rstrip("\n"))

    def line(self) -> str:
        """The next line of standard output."""
        return self.lines.get(timeout=HANG_SECONDS)

    def ready(self) -> dict[str, str]:
        """The next READY line, as facts."""
        word, endpoint, *facts = self.line().split()
        assert word == "READY"
        return {"endpoint": endpoint, **dict(fact.split("=", 1) for fact in facts)}

    def ask(self, name: str, prompt: list[int], max_new_tokens: int) -> None:
        """Write a request."""
        assert self.process.stdin is not None
        request = {"id": name, "token_ids": prompt, "sampling": {"max_new_tokens": max_new_tokens}}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer line."""
        return json.loads(self.line())

    def until_logged(self, text: str) -> str:
        """The first log line with that text, as soon as there is one."""
        deadline = time.monotonic() + HANG_SECONDS
        while time.monotonic() < deadline:
            for line in list(self.log):
                if text in line:
                    return line
            time.sleep(0.01)
        raise AssertionError(f"nothing was logged with {text!r}: {self.log[-5:]}")

    def worker_pids(self) -> list[int]:
        """The launcher's child processes, oldest first."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return sorted(map(int, children.split()))

    def wait(self) -> int:
        """The exit code, once all output has come."""
        code = self.process.wait(2 * HANG_SECONDS)
        for thread in self._threads:
            thread.join(HANG_SECONDS)
        return code

    def rest(self) -> list[dict[str, Any]]:
        """The answers that have come and were not read yet."""
        return [json.loads(self.lines.get()) for _ in range(self.lines.qsize())]

    def close(self) -> None:
        """Whatever it takes: workers end when their launcher does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


Start = Callable[..., Up]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts launchers and ends them."""
    ups: list[Up] = []

    def make(*arguments: str, **options: Any) -> Up:
        ups.append(Up(*arguments, **options))
        return ups[-1]

    yield make
    for one in ups:
        one.close()


def gone(pid: int) -> bool:
    """True when the process has ended, whoever has to collect it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pids: list[int]) -> None:
    """Fails when one of the processes lives on."""
    deadline = time.monotonic() + HANG_SECONDS
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline, "a worker outlived its launcher"
        time.sleep(0.02)


def tokens_of(answers: list[dict[str, Any]], name: Any) -> list[int]:
    """The tokens of one request, each in its place and the last one said to be the last."""
    mine = [answer for answer in answers if answer["id"] == name]
    tokens: list[int] = []
    for answer in mine:
        assert answer["index"] == len(tokens)
        tokens += answer["token_ids"]
    assert [answer["finish_reason"] for answer in mine] == [None] * (len(mine) - 1) + ["length"]
    return tokens


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_prompts_of_a_file_are_answered_and_then_it_ends_with_0(start: Start, tmp_path: Path) -> None:
    prompts = {f"r{n}": list(range(10 * n, 10 * n + 50)) for n in range(12)}
    lines = [json.dumps({"id": k, "token_ids": p, "sampling": {"max_new_tokens": 20}}) for k, p in prompts.items()]
    (tmp_path / "prompts").write_text("\n\n".join(lines))  # an empty line is no request
    up = start("--prompts", str(tmp_path / "prompts"), "--log-dir", str(tmp_path / "logs"), "--concurrency", "5")
    assert up.wait() == 0
    answers = up.rest()
    for name, prompt in prompts.items():
        assert tokens_of(answers, name) == expected_tokens(prompt, 20)
    assert len({answer["worker"] for answer in answers}) == 2, "both workers serve"
    assert {line.split()[0] for line in up.log} == {"[up]", "[worker-0]", "[worker-1]"}
    for name in ("worker-0.log", "worker-1.log"):
        assert "READY tcp://127.0.0.1:" in (tmp_path / "logs" / name).read_text()
    assert "requests: live_requests 0, finished 12, failed 0" in (tmp_path / "logs/up.log").read_text()


def test_a_request_that_is_none_is_answered_with_its_error_and_the_rest_is_served(start: Start, tmp_path: Path) -> None:
    wrong = ["{", "[]", '{"token_ids": "secret"}', '{"token_ids": []}', '{"token_ids": [1], "colour": 1}']
    wrong += ['{"token_ids": [1], "sampling": {"heat": 1}}', '{"token_ids": [1], "sampling": {"max_new_tokens": 0}}']
    wrong += ['{"token_ids": [99999999999999999999999]}', '{"token_ids": [1], "sampling": {"stop_token_ids": 3}}']
    good = '{"token_ids": [1, 2, 3], "sampling": {"max_new_tokens": 3}}'
    (tmp_path / "prompts").write_text("\n".join([*wrong, good]))
    up = start("--prompts", str(tmp_path / "prompts"), workers=1)
    assert up.wait() == 1
    answers = up.rest()
    errors = {answer["id"]: answer["error"] for answer in answers if "error" in answer}
    assert sorted(errors) == list(range(1, len(wrong) + 1)), "lines are named by their numbers"
    assert all(error.startswith("Invalid") and "secret" not in error for error in errors.values())
    assert tokens_of(answers, len(wrong) + 1) == expected_tokens([1, 2, 3], 3)


def test_status_lines_reports_workers_and_requests(start: Start) -> None:
    up = start("--status-seconds", "0.05", workers=1)
    up.ready()
    assert "worker-0 ready, running 0, waiting 0, restarts 0; requests: live_requests 0" in up.until_logged("running 0")


# --- crashes ----------------------------------------------------------------------------------------------------------


@linux
def test_kill_9_of_a_worker_loses_no_token_and_it_comes_back_at_its_endpoint(start: Start) -> None:
    prompt = list(range(100))
    up = start("--prompts", "-")
    up.ask("long", prompt, 400)
    answers = [up.answer() for _ in range(5)]
    served = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in up.worker_pids()}
    assert len(served) == 2
    ready = [up.until_logged(f"[worker-{n}] READY").split() for n in range(2)]
    victim = next(n for n in range(2) if f"id={answers[-1]['worker']}" in ready[n])
    os.kill(sorted(served)[victim], signal.SIGKILL)
    up.until_logged(f"worker-{victim} exited ended with exit code -9; starts again in 0.5 s")
    up.until_logged(f"worker-{victim} started restart 1")
    up.process.stdin.close()  # type: ignore[union-attr]
    while not answers[-1]["finish_reason"]:
        answers.append(up.answer())
    assert tokens_of(answers, "long") == expected_tokens(prompt, 400)
    assert len({answer["worker"] for answer in answers}) == 2, "another worker went on"
    again = [line.split() for line in up.log if f"[worker-{victim}] READY" in line]
    assert up.wait() == 0
    if len(again) == 2:  # it may drain before it is ready again
        assert again[0][2:4] != again[1][2:4] and again[0][2] == again[1][2], "the same address, another epoch"


@linux
@asynchronous
async def test_a_worker_that_came_back_serves_routers_of_others_at_the_same_address(start: Start) -> None:
    up = start(workers=1)
    before = up.ready()
    async with Router([before["endpoint"]]) as router:
        tokens, _ = await collect(router.generate([5, 6, 7], SamplingParams(max_new_tokens=5)))
        os.kill(up.worker_pids()[0], signal.SIGKILL)
        after = up.ready()
        assert (after["endpoint"], after["events"]) == (before["endpoint"], before["events"])
        assert after["epoch"] != before["epoch"] and after["name"] == "worker-0"
    async with Router([after["endpoint"]]) as router:
        again, _ = await collect(router.generate([5, 6, 7], SamplingParams(max_new_tokens=5)))
    assert tokens == again == expected_tokens([5, 6, 7], 5)


def test_a_worker_that_cannot_start_is_given_up_after_the_bound_and_the_exit_code_reports(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        up = start("--port", str(taken.getsockname()[1]), "--max-restarts", "1", workers=1)
        assert up.wait() == 1
    assert sum("cannot bind" in line for line in up.log) == 2
    assert "worker-0 gave up ended with exit code 1; given up: 2 times in a row" in up.until_logged("gave up")


# --- signals ----------------------------------------------------------------------------------------------------------


def test_sigterm_finishes_what_runs_and_ends_with_0(start: Start) -> None:
    up = start("--prompts", "-")
    up.ask("running", [1, 2, 3], 300)
    first = up.answer()
    up.process.send_signal(signal.SIGTERM)
    up.until_logged("draining 2 workers")
    assert up.wait() == 0, "though standard input is still open"
    assert tokens_of([first, *up.rest()], "running") == expected_tokens([1, 2, 3], 300)


def test_the_second_sigterm_ends_at_once_and_says_what_was_lost(start: Start) -> None:
    up = start("--prompts", "-", time_scale=100.0)
    up.ask("slow", [1, 2, 3], 100_000)
    up.answer()
    up.process.send_signal(signal.SIGTERM)
    up.until_logged("draining 1 requests")
    up.process.send_signal(signal.SIGTERM)
    assert up.wait() == 1
    assert any(answer["id"] == "slow" and "error" in answer for answer in up.rest())


def test_ctrl_c_in_a_terminal_drains_the_workers_once(start: Start) -> None:
    up = start("--prompts", "-")
    up.ask("running", [1, 2, 3], 200)
    first = up.answer()
    os.killpg(up.process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    assert up.wait() == 0
    assert tokens_of([first, *up.rest()], "running") == expected_tokens([1, 2, 3], 200)


@linux
def test_workers_end_when_their_launcher_is_killed(start: Start) -> None:
    up = start()
    up.ready(), up.ready()
    pids = up.worker_pids()
    assert len(pids) == 2 and not any(map(gone, pids))
    os.kill(up.process.pid, signal.SIGKILL)
    wait_until_gone(pids)


@linux
def test_workers_end_when_their_launcher_is_killed_before_they_serve(start: Start) -> None:
    up = start()
    up.until_logged("worker-1 started")
    pids = up.worker_pids()
    os.kill(up.process.pid, signal.SIGKILL)
    wait_until_gone(pids)


# --- places and keys --------------------------------------------------------------------------------------------------


@linux
def test_each_worker_sees_the_devices_and_cores_it_was_given(start: Start) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    pinned = start("--devices", ",".join(f"cpu:{core}" for core in cores), workers=len(cores))
    cards = start("--devices", "cuda:3,cuda:4+5")
    for one, count in ((pinned, len(cores)), (cards, 2)):
        for _ in range(count):
            one.ready()
    assert [os.sched_getaffinity(pid) for pid in pinned.worker_pids()] == [{core} for core in cores]
    environments = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in cards.worker_pids()]
    assert b"CUDA_VISIBLE_DEVICES=3" in environments[0] and b"CUDA_VISIBLE_DEVICES=4,5" in environments[1]


@asynchronous
async def test_with_keys_its_own_router_and_others_that_have_them_are_served(start: Start, tmp_path: Path) -> None:
    create_keys(tmp_path)
    (tmp_path / "prompts").write_text('{"token_ids": [1, 2], "sampling": {"max_new_tokens": 4}}')
    own = start("--curve-keys", str(tmp_path), "--prompts", str(tmp_path / "prompts"), workers=1)
    others = start("--curve-keys", str(tmp_path), "--host", "0.0.0.0", workers=1)
    port = others.ready()["endpoint"].rpartition(":")[2]
    async with Router([f"tcp://127.0.0.1:{port}"], keys=load_client_keys(tmp_path)) as router:
        tokens, _ = await collect(router.generate([1, 2], SamplingParams(max_new_tokens=4)))
    assert own.wait() == 0
    assert tokens == tokens_of(own.rest(), 1) == expected_tokens([1, 2], 4)


def test_sampling_in_a_line_is_all_that_requests_may_ask_for() -> None:
    said = {"max_new_tokens": 3, "logit_bias": {"7": -1.5}, "grammar": {"kind": "regex", "text": "a+"}, "logprobs": 2}
    asked = parse_sampling({**said, "stop_token_ids": [5]})
    assert asked == SamplingParams(
        3, stop_token_ids=(5,), logit_bias={7: -1.5}, grammar=Grammar("regex", "a+"), logprobs=2
    )
    for wrong in (
        {"grammar": "a+"},
        {"grammar": {"kind": "verse", "text": "a"}},
        {"logit_bias": {"x": 1}},
        {"top_k": 0.5},
    ):
        with pytest.raises(InvalidInput):
            parse_sampling(wrong)
