"""The demo's worker processes. Owns starting, watching and stopping them, and their logs; sends no requests."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ...errors import PrebleError
from ...launch.processes import preble_command

LOG_LINES_SHOWN = 25
STOP_SECONDS = 10.0
READY_SECONDS = 120.0
POLL_SECONDS = 0.05


class WorkerFailed(PrebleError):
    """A worker process ended or never got ready; the message ends with the tail of its log."""


class Fleet:
    """`preble worker` processes on loopback, each pinned to a core where there are enough. An async context manager.

    `arguments` follow `preble worker` for every process; the fleet adds each one's id, address and core. A new fleet
    has empty caches.
    """

    def __init__(self, count: int, arguments: Sequence[str], log_directory: Path, label: str) -> None:
        self.worker_ids = [f"worker-{number}" for number in range(count)]
        self.endpoints: list[str] = []  # known once the workers are ready
        self._arguments = list(arguments)
        self._logs = [log_directory / f"{label}-{worker}.log" for worker in self.worker_ids]
        self._processes: list[subprocess.Popen[bytes]] = []

    async def __aenter__(self) -> Fleet:
        try:
            for number in range(len(self.worker_ids)):
                self._processes.append(self._start(number))
            await self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def command(self, number: int) -> list[str]:
        """What a user would type to start this worker."""
        command = [*preble_command(), "worker", "--id", self.worker_ids[number]]
        command += ["--bind", "tcp://127.0.0.1:*", *self._arguments]
        cores = available_cores()
        return [*command, "--cpu", str(cores[number])] if len(cores) >= len(self.worker_ids) else command

    def check(self) -> None:
        """Raise `WorkerFailed` if a process has ended."""
        for number, process in enumerate(self._processes):
            if process.poll() is not None:
                raise self.failure(number, f"ended with exit code {process.returncode}")

    def failure(self, number: int, what: str) -> WorkerFailed:
        """The error that says what happened to a worker, with the tail of its log."""
        log = self._logs[number]
        return WorkerFailed(f"{self.worker_ids[number]} {what}. The end of its log, {log}:\n{tail(log)}")

    def log_tails(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"--- {log}\n{tail(log)}" for log in self._logs)

    async def _wait_ready(self) -> None:
        """Wait for every worker's READY line, which tells its endpoint."""
        deadline = time.monotonic() + READY_SECONDS
        for number, log in enumerate(self._logs):
            while (endpoint := ready_endpoint(log)) is None:
                self.check()
                if time.monotonic() > deadline:
                    raise self.failure(number, f"was not ready within {READY_SECONDS:g} s")
                await asyncio.sleep(POLL_SECONDS)
            self.endpoints.append(endpoint)

    def stop(self) -> None:
        """Ask every process to end, then make it. Idempotent."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        log = self._logs[number]
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as output:
            return subprocess.Popen(
                self.command(number),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(),
            )


def environment() -> dict[str, str]:
    """The workers' environment: this one's, with this very `preble` first on the path, and output not held back."""
    here = str(Path(__file__).resolve().parent.parent.parent)
    path = os.pathsep.join(part for part in (here, os.environ.get("PYTHONPATH")) if part)
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def available_cores() -> list[int]:
    """Cores this process may run on; [] where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def ready_endpoint(log: Path) -> str | None:
    """The endpoint in a worker's READY line; None while there is none."""
    lines = log.read_text(errors="replace").split("\n")[:-1]
    return next((line.split()[1] for line in lines if line.startswith("READY ")), None)


def tail(log: Path, lines: int = LOG_LINES_SHOWN) -> str:
    """The last lines of a log, indented."""
    try:
        text = log.read_text(errors="replace").rstrip().split("\n")
    except OSError as error:
        return f"    (not readable: {error})"
    return "\n".join(f"    {line}" for line in text[-lines:])
