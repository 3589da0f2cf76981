"""Child processes as the launcher runs them: starting, signals, where they may run, and where their output goes.

Owns processes, pipes and log files; when to start and stop is `supervisor`'s. A child runs in a session of its own, so
that Ctrl-C in a terminal reaches the launcher alone, which then drains; and its standard input is a pipe that the
launcher never writes to: when the launcher ends in whatever way, also by SIGKILL, the pipe closes and the child ends
(`end_with_stdin`). A child serves from its first line `READY ...` on.

Output: each line of a child, cut at 8 KiB, goes to one stream under the child's name, and with a directory to a file of
its own, which keeps 5 x 10 MiB. Who does not read the stream makes the children wait when they log.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

from ..errors import InvalidConfig

LOG_FILE_BYTES = 10 << 20
LOG_FILES = 5  # the one being written and four before it
LINE_BYTES = 8192
READY = "READY "  # how the line begins with which a child says that it serves
# The directory that this `preble` is imported from.
INSTALLED_IN = str(Path(sys.modules[__name__.partition(".")[0]].__path__[0]).parent)


# --- the command ------------------------------------------------------------------------------------------------------


def preble_command() -> list[str]:
    """The start of a command line that runs `preble` in another process: this installation, whatever the directory.

    With `-m`, Python would look in the current directory first, and find the sources, not compiled, of a clone.
    """
    start = (
        "import sys; sys.path[:] = [path for path in sys.path if path]; "
        f"{INSTALLED_IN!r} in sys.path or sys.path.insert(0, {INSTALLED_IN!r}); "
        "from preble.cli import main; sys.exit(main())"
    )
    return [sys.executable, "-c", start]


# --- where a worker runs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """The devices of one child: CUDA devices it sees, or CPU cores it may use."""

    kind: str
    numbers: tuple[int, ...]

    @property
    def environment(self) -> dict[str, str]:
        """What to add to the child's environment."""
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
    """Where the output of named children goes: with `stream` to one stream, each line under its child's name, and with
    `directory` to a file for each, `NAME.log`.

    Any thread may call `write`. Raises `InvalidConfig` when the files cannot be had.
    """

    def __init__(self, names: Sequence[str], directory: Path | None, *, stream: TextIO | None = None) -> None:
        self._files: list[logging.Handler] = []
        self._handlers: dict[str, list[logging.Handler]] = {name: [] for name in names}
        if stream is not None:
            shared = logging.StreamHandler(stream)
            shared.setFormatter(logging.Formatter("[%(child)s] %(message)s"))
            for handlers in self._handlers.values():
                handlers.append(shared)
        self._directory = directory
        for name, handlers in self._handlers.items():
            handlers += self._open_files(name)

    def _open_files(self, name: str) -> list[logging.Handler]:
        """The file of that name, where there is a directory."""
        if self._directory is None:
            return []
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            file = logging.handlers.RotatingFileHandler(
                self._directory / f"{name}.log", maxBytes=LOG_FILE_BYTES, backupCount=LOG_FILES - 1, encoding="utf-8"
            )
        except OSError as error:
            raise InvalidConfig(f"--log-dir {self._directory}: {error}") from error
        self._files.append(file)
        return [file]

    @contextlib.contextmanager
    def including(self, name: str, form: logging.Formatter) -> Iterator[None]:
        """With a directory, what this process logs meanwhile goes to a file of that name, too."""
        handlers = self._open_files(name)
        for handler in handlers:
            handler.setFormatter(form)
            logging.getLogger().addHandler(handler)
        try:
            yield
        finally:
            for handler in handlers:
                logging.getLogger().removeHandler(handler)

    def write(self, child: str, line: str) -> None:
        """One line of a child's output."""
        record = logging.LogRecord("preble.up", logging.INFO, "", 0, line, None, None)
        record.child = child
        for handler in self._handlers[child]:
            handler.handle(record)

    def close(self) -> None:
        for file in self._files:
            file.close()


# --- a process --------------------------------------------------------------------------------------------------------


class ChildProcess:
    """A started `argv`; implements `supervisor.Child`. `on_output` gets each line of its standard output, `on_log` each
    of its standard error, from threads of their own. Raises `OSError` if it cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        place: Place | None = None,
        *,
        on_output: Callable[[str], None],
        on_log: Callable[[str], None],
    ) -> None:
        self.ready_line = ""
        self._on_output = on_output
        self._process = subprocess.Popen(
            argv,
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
            _reader(self._process.stdout, self._take_output),
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
        """SIGTERM to the child alone: what it has started is its own to end."""
        self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        """A signal to the child alone; none once it has ended."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to the child and to all it has started, also after its own end."""
        with contextlib.suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.poll() is not None and self._process.stdin is not None:
            self._process.stdin.close()
            for reader in self._readers:
                reader.join(0.2)  # its last words; a pipe that somebody else still holds open is left to its thread

    def _take_output(self, line: str) -> None:
        self._on_output(line)
        if line.startswith(READY):
            self.ready_line = line


def ready_endpoints(line: str) -> tuple[str, str]:
    """Of a worker's READY line: where it serves requests, and where its events are to be had, "" if it does not say."""
    _, endpoint, *named = line.split()
    return endpoint, next((word.partition("=")[2] for word in named if word.startswith("events=")), "")


def _environment(place: Place | None) -> Mapping[str, str]:
    """This process's environment, with this very `preble` first on the path, and output not held back."""
    path = os.pathsep.join(part for part in (INSTALLED_IN, os.environ.get("PYTHONPATH")) if part)
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


# --- the child's side -------------------------------------------------------------------------------------------------


def end_with_stdin(grace_seconds: float) -> None:
    """In a child: when standard input closes, end as after SIGTERM; after `grace_seconds` more, whatever happens."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_seconds)
        os._exit(1)

    threading.Thread(target=watch, name="preble-parent-watch", daemon=True).start()
