"""Worker processes as the launcher runs them: starting, signals, where they may run, and where their output goes.

Owns processes, pipes and log files; when to start and stop is `launcher`'s. A child runs in a session of its own, so
that Ctrl-C in a terminal reaches the launcher alone, which then drains; and its standard input is a pipe that the
launcher never writes to: when the launcher ends in whatever way, also by SIGKILL, the pipe closes and the worker ends
(`end_with_stdin`).

Output: each line of a worker, cut at 8 KiB, goes to one stream under the worker's name, and with a directory to a file
of its own, which keeps 5 x 10 MiB. Who does not read the stream makes the workers wait when they log.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..errors import InvalidConfig

LOG_FILE_BYTES = 10 << 20
LOG_FILES = 5  # the one being written and four before it
LINE_BYTES = 8192


# --- the command ------------------------------------------------------------------------------------------------------


def preble_command() -> list[str]:
    """The start of a command line that runs `preble` in another process: this installation, whatever the directory.

    With `-m`, Python would look in the current directory first, and find the sources, not compiled, of a clone.
    """
    root = str(Path(__file__).resolve().parent.parent)
    start = (
        "import sys; sys.path[:] = [path for path in sys.path if path]; "
        f"{root!r} in sys.path or sys.path.insert(0, {root!r}); "
        "from preble.cli import main; sys.exit(main())"
    )
    return [sys.executable, "-c", start]


# --- where a worker runs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """The devices of one worker: CUDA devices it sees, or CPU cores it may use."""

    kind: str
    numbers: tuple[int, ...]

    @property
    def environment(self) -> dict[str, str]:
        """What to add to the worker's environment."""
        return {} if self.kind == "cpu" else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.numbers))}


def parse_places(text: str, workers: int) -> list[Place]:
    """`cuda:0,cuda:1+2` or `cpu:0,cpu:1+2`: one place for each worker. Raises `InvalidConfig`."""
    entries = text.split(",")
    if len(entries) != workers:
        raise InvalidConfig(f"--devices names {len(entries)} places for {workers} workers: give one for each")
    return [_place(entry.strip()) for entry in entries]


def _place(entry: str) -> Place:
    kind, _, numbers = entry.partition(":")
    words = numbers.split("+")
    # isdecimal alone would let other scripts' digits through to the environment.
    if kind not in ("cuda", "cpu") or not all(word.isascii() and word.isdecimal() for word in words):
        raise InvalidConfig(f"--devices {entry!r}: a place is cuda:N or cpu:N, several numbers joined by +")
    place = Place(kind, tuple(map(int, words)))
    if kind == "cpu":
        _check_cores(entry, place.numbers)
    return place


def _check_cores(entry: str, cores: Sequence[int]) -> None:
    if not hasattr(os, "sched_getaffinity"):
        raise InvalidConfig(f"--devices {entry}: this system cannot pin a process to a core")
    available = os.sched_getaffinity(0)
    if not set(cores) <= available:
        raise InvalidConfig(f"--devices {entry}: available cores are {sorted(available)}")


# --- logs -------------------------------------------------------------------------------------------------------------


class LogBook:
    """One stream for all workers, each line under its worker's name, and with `directory` a file for each.

    `launcher_file`, beside those, is for what the launcher itself logs. Any thread may call `write`. Raises
    `InvalidConfig` when the files cannot be had.
    """

    def __init__(self, names: Sequence[str], directory: Path | None) -> None:
        stream = logging.StreamHandler(sys.stderr)
        stream.setFormatter(logging.Formatter("[%(worker)s] %(message)s"))
        self._handlers: dict[str, list[logging.Handler]] = {name: [stream] for name in names}
        self._files: list[logging.Handler] = []
        self.launcher_file: logging.Handler | None = None
        if directory is not None:
            self._open_files(directory)

    def _open_files(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for name, handlers in self._handlers.items():
                handlers.append(self._open_file(directory / f"{name}.log"))
            self.launcher_file = self._open_file(directory / "up.log")
        except OSError as error:
            raise InvalidConfig(f"--log-dir {directory}: {error}") from error

    def _open_file(self, path: Path) -> logging.Handler:
        file = logging.handlers.RotatingFileHandler(
            path, maxBytes=LOG_FILE_BYTES, backupCount=LOG_FILES - 1, encoding="utf-8"
        )
        self._files.append(file)
        return file

    def write(self, worker: str, line: str) -> None:
        """One line of a worker's output."""
        record = logging.LogRecord("preble.up", logging.INFO, "", 0, line, None, None)
        record.worker = worker
        for handler in self._handlers[worker]:
            handler.handle(record)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


# --- a process --------------------------------------------------------------------------------------------------------


class WorkerProcess:
    """A started `command`; implements `launcher.Child`. `on_line(process, line)` gets each line of its standard output,
    `on_log(line)` each of its standard error, from threads of their own. Raises `OSError` if it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        place: Place | None,
        *,
        on_line: Callable[[WorkerProcess, str], None],
        on_log: Callable[[str], None],
    ) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(place),
            start_new_session=True,
        )
        if place is not None and place.kind == "cpu":
            # Before its interpreter has started any thread, so that all of them inherit it.
            os.sched_setaffinity(self._process.pid, place.numbers)
        assert self._process.stdout is not None and self._process.stderr is not None
        self._readers = [
            _reader(self._process.stdout, lambda line: on_line(self, line)),
            _reader(self._process.stderr, on_log),
        ]

    @property
    def pid(self) -> int:
        """The process, and the group of what it starts."""
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """SIGTERM to the worker alone: what it has started is its own to end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the worker and to all it has started, also after its own end."""
        with contextlib.suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.poll() is not None:
            self._close()

    def _close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        for reader in self._readers:
            reader.join(0.2)  # its last words; a pipe that somebody else still holds open is left to its thread


def _environment(place: Place | None) -> Mapping[str, str]:
    """This process's environment, with this very `preble` first on the path, and output not held back."""
    here = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(part for part in (here, os.environ.get("PYTHONPATH")) if part)
    own = {} if place is None else place.environment
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **own}


def _reader(pipe: IO[bytes], take: Callable[[str], None]) -> threading.Thread:
    """A thread that hands on each line until the pipe closes."""

    def read() -> None:
        with pipe:
            while data := pipe.readline(LINE_BYTES):
                line = data.decode("utf-8", "replace").rstrip()
                if line:
                    take(line)

    thread = threading.Thread(target=read, name="preble-up-log", daemon=True)
    thread.start()
    return thread


# --- the worker's side ------------------------------------------------------------------------------------------------


def end_with_stdin(grace_seconds: float) -> None:
    """In a worker: when standard input closes, end as after SIGTERM; after `grace_seconds` more, whatever happens."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_seconds)
        os._exit(1)

    threading.Thread(target=watch, name="preble-parent-watch", daemon=True).start()
