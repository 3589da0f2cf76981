"""The demo's worker processes. Owns what is run, and the errors with the ends of logs; sends no requests."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ...errors import PrebleError
from ...launch.processes import ChildProcess, LogBook, preble_command, ready_endpoints
from ...launch.supervisor import Supervisor, SupervisorConfig

LOG_LINES_SHOWN = 25
POLL_SECONDS = 0.05
# A worker that ends spoils the measurement: none is started again.
SUPERVISION = SupervisorConfig(max_restarts=0, start_seconds=120.0, drain_seconds=10.0)


class WorkerFailed(PrebleError):
    """A worker process ended or never got ready; the message ends with the tail of its log."""


class DemoFleet:
    """`preble worker` processes on loopback, each pinned to a core where there are enough. An async context manager.

    `arguments` follow `preble worker` for every process; the fleet adds each one's id, address and core. A new fleet
    has empty caches.
    """

    def __init__(self, count: int, arguments: Sequence[str], log_directory: Path, label: str) -> None:
        self.worker_ids = [f"worker-{number}" for number in range(count)]
        self.endpoints = [""] * count  # known once the workers are ready
        self._arguments = list(arguments)
        names = [f"{label}-{worker}" for worker in self.worker_ids]
        self._logs = [log_directory / f"{name}.log" for name in names]
        for log in self._logs:
            log.unlink(missing_ok=True)
        self._book = LogBook(names, log_directory)
        self._writers = [partial(self._book.write, name) for name in names]
        self._supervisor = Supervisor(count, self._spawn, SUPERVISION, clock=time.monotonic)

    async def __aenter__(self) -> DemoFleet:
        try:
            while not all(self.endpoints):
                self.check()
                await asyncio.sleep(POLL_SECONDS)
        except BaseException:
            self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()

    def command(self, number: int) -> list[str]:
        """What a user would type to start this worker."""
        command = [*preble_command(), "worker", "--id", self.worker_ids[number]]
        command += ["--bind", "tcp://127.0.0.1:*", "--until-stdin-closes", *self._arguments]
        cores = available_cores()
        return [*command, "--cpu", str(cores[number])] if len(cores) >= len(self.worker_ids) else command

    def check(self) -> None:
        """Look at every process. Raises `WorkerFailed` if one has ended, or is not ready in time."""
        for news in self._supervisor.turn():
            if news.kind == "ready":
                self.endpoints[news.child], _ = ready_endpoints(news.text)
            elif news.is_trouble:
                what, log = news.text.partition(";")[0], self._logs[news.child]
                raise WorkerFailed(f"{self.worker_ids[news.child]} {what}. The end of its log, {log}:\n{tail(log)}")

    def log_tails(self) -> str:
        return "\n".join(f"--- {log}\n{tail(log)}" for log in self._logs)

    def stop(self) -> None:
        """Ask every process to end, then make it."""
        self._supervisor.drain()
        try:
            while not self._supervisor.done:
                self._supervisor.turn()
                time.sleep(POLL_SECONDS)
        finally:
            self._supervisor.kill()
            self._book.close()

    def _spawn(self, number: int) -> ChildProcess:
        write = self._writers[number]
        return ChildProcess(self.command(number), on_output=write, on_log=write)


def available_cores() -> list[int]:
    """Cores this process may run on; [] where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def tail(log: Path, lines: int = LOG_LINES_SHOWN) -> str:
    """The last lines of a log, indented."""
    try:
        text = log.read_text(errors="replace").rstrip().split("\n")
    except OSError as error:
        return f"    (not readable: {error})"
    return "\n".join(f"    {line}" for line in text[-lines:])
