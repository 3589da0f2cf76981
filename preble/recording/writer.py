"""A recording that grows while requests end. Owns its files: their size, their rotation, what happens when the disk is
full or too slow; names are `names.py`'s, lines `lines.py`'s.

    offer (any thread's, never waits) --> bounded queue --> one thread: names, a line, the file

Files: FILE is written, FILE.1 was before it, and so on; at the bound the oldest goes. A FILE that is there at the start
is rotated, too, so that a restart loses nothing. Each can be read by itself.
What is not in any file is counted, and the next line that can be written says how many these are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InvalidConfig
from ..scheduling.record_sink import Sink
from ..types import Claim, SessionHint, WorkerSpec, check_int
from .frames import MAGIC, is_recording
from .lines import Line, MissingLine, RequestLine, WorkerLine, framed, header_line
from .names import KEY_BYTES, BlockPath, BlockTable, hidden
from .recorded import BLOCK_TOKENS, FINISHED

BYTES_MAX = 1 << 30  # of all files
FILES = 4
FILE_BYTES_MIN = 4096
WAITING_MAX = 4096  # requests that may wait for the thread
WAITING_TOKENS_MAX = 16 << 20  # and their prompts, 64 MiB


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that is over, as its router knows it. Times are of the router's clock, None where nothing happened or
    was seen. `prompt` must not change any more. `client`: whose it is."""

    prompt: npt.NDArray[np.int32]
    namespace: Hashable
    arrived_at: float
    output_tokens: int
    sent_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    worker: WorkerSpec | None = None
    max_new_tokens: int | None = None
    cached_tokens: int | None = None
    matched_tokens: int | None = None
    client: Hashable = None
    session: SessionHint | None = None
    claim: Claim | None = None
    error: str = FINISHED


class RecordingWriter:
    """Writes what is offered to `path`. One thread at a time may call `offer`; `close` and `stats` any.

    now: the clock of the times offered, at the moment of `started_unix_seconds`. policy: for the header. max_bytes: of
    all `files` files together, to which a request may be added. key: what names are made with, 32 bytes; drawn where
    None, as it should be but for processes whose files are to be read together.
    Raises `InvalidConfig` for a file that cannot be written, or that is there and is no recording.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        now: float,
        started_unix_seconds: float,
        policy: str = "",
        max_bytes: int = BYTES_MAX,
        files: int = FILES,
        key: bytes | None = None,
        block_size: int = BLOCK_TOKENS,
    ) -> None:
        check_int("files", files, 1, 1000)
        check_int("max_bytes", max_bytes, files * FILE_BYTES_MIN, 2**62)
        check_int("block_size", block_size, 1, 65_536)
        if key is not None and len(key) != KEY_BYTES:
            raise InvalidConfig(f"key must be {KEY_BYTES} bytes, got {len(key)}")
        self._path, self._files, self._file_bytes_max = Path(path), files, max_bytes // files
        self._key = os.urandom(KEY_BYTES) if key is None else key
        self._policy, self._block_size = policy, block_size
        self._began, self._unix = now, started_unix_seconds
        self._name = os.urandom(8).hex()
        self._part = 0
        self._table = BlockTable(self._key, block_size)
        self._workers: dict[WorkerSpec, int] = {}  # in this file
        self._offered_tokens = self._handled_tokens = 0  # each changed by one thread only
        self._too_many = 0
        self._closed = False
        self._said_missing = 0
        self._file: Any = None
        self._bytes = 0
        self._open_first()
        self._sink = Sink(self._take, str, WAITING_MAX)

    # --- the requests' side -------------------------------------------------------------------------------------------

    def offer(self, ended: EndedRequest) -> None:
        """Record a request; drop and count it where too many wait. Never waits for the disk."""
        tokens = len(ended.prompt)
        if self._closed or self._offered_tokens - self._handled_tokens + tokens > WAITING_TOKENS_MAX:
            self._too_many += 1
            return
        before = self._sink.dropped
        self._sink.offer(ended)
        if self._sink.dropped == before:
            self._offered_tokens += tokens

    def stats(self) -> dict[str, int]:
        """Requests written, missing (dropped, or failed to be written), and waiting."""
        return {
            "written": self._sink.written,
            "missing": self._missing,
            "waiting": self._sink.stats()["waiting"],
        }

    @property
    def _missing(self) -> int:
        return self._too_many + self._sink.dropped + self._sink.errors

    def close(self) -> None:
        """Write what waits, 10 seconds at most, and how many are missing. What is offered later is dropped and counted.
        Idempotent."""
        self._closed = True
        self._sink.close()
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                self._append_missing(file)
            file.close()

    # --- the thread's side --------------------------------------------------------------------------------------------

    def _take(self, ended: EndedRequest) -> None:
        """Write a request. Raises OSError, and the file is as before."""
        self._handled_tokens += len(ended.prompt)
        if self._file is not None and self._bytes >= self._file_bytes_max:
            self._rotate()
        file = self._start_file() if self._file is None else self._file
        self._append_missing(file)
        worker = -1 if ended.worker is None else self._number_of(file, ended.worker)
        path = self._table.add(ended.prompt, ended.namespace)
        try:
            self._append(file, self._line_of(ended, worker, path))
        except OSError:
            self._table.take_back()
            raise

    def _append(self, file: Any, line: Line) -> None:
        """Write a line whole, or leave the file as it was."""
        data = framed(line)
        try:
            written = file.write(data)
            if written != len(data):
                raise OSError("the file system took a part only")
        except OSError:
            file.truncate(self._bytes)
            file.seek(self._bytes)
            raise
        self._bytes += len(data)

    def _append_missing(self, file: Any) -> None:
        missing = self._missing
        if missing != self._said_missing:
            self._append(file, MissingLine(missing))
            self._said_missing = missing

    def _number_of(self, file: Any, spec: WorkerSpec) -> int:
        """The worker's number in this file; its line is written where it is new, or has another capacity now."""
        key = WorkerSpec(spec.id, spec.kv_capacity_tokens, spec.block_size, None, spec.max_running)
        found = self._workers.get(key)
        if found is None:
            engine = (spec.labels or {}).get("engine", "")
            self._append(file, WorkerLine(spec.id, spec.kv_capacity_tokens, spec.block_size, spec.max_running, engine))
            found = self._workers[key] = len(self._workers)
        return found

    def _line_of(self, ended: EndedRequest, worker: int, path: BlockPath) -> RequestLine:
        key, client, claim = self._key, ended.client, ended.claim
        session = ended.session or SessionHint()
        is_one = bool(session.session) and not session.shared  # else turns would wait for those of others
        return RequestLine(
            arrival_seconds=self._since(ended.arrived_at) or 0.0,
            sent_seconds=self._since(ended.sent_at),
            first_token_seconds=self._since(ended.first_token_at),
            end_seconds=self._since(ended.ended_at),
            worker=worker,
            prompt_tokens=len(ended.prompt),
            output_tokens=ended.output_tokens,
            max_new_tokens=ended.max_new_tokens,
            cached_tokens=ended.cached_tokens,
            matched_tokens=ended.matched_tokens,
            parent=path.parent,
            shared=path.shared,
            names=path.names,
            session=hidden(key, "session", client, session.session) if is_one else b"",
            parent_session=hidden(key, "session", client, session.parent) if session.parent else b"",
            agent=hidden(key, "session", client, session.agent) if session.agent else b"",
            tenant=hidden(key, "tenant", claim.tenant) if claim is not None else b"",
            deadline_seconds=None if claim is None else claim.deadline_seconds,
            priority="interactive" if claim is None else claim.priority,
            error=ended.error,
        )

    def _since(self, at: float | None) -> float | None:
        return None if at is None else max(at - self._began, 0.0)

    # --- files --------------------------------------------------------------------------------------------------------

    def _open_first(self) -> None:
        path = self._path
        try:
            if path.exists() and path.stat().st_size:
                if not is_recording(path):
                    raise InvalidConfig(f"{path} is there and is no recording; it is left as it is")
                self._rotate()
            self._start_file()
        except OSError as error:
            raise InvalidConfig(f"a recording cannot be written to {path}: {error.strerror or error}") from None

    def _start_file(self) -> Any:
        """A new FILE with its header."""
        self._table.start_file()
        self._workers.clear()
        check = blake2b(b"key check", digest_size=8, key=self._key).digest()
        header = header_line(self._name, self._part, check, self._block_size, self._unix, self._policy)
        file = open(self._path, "wb", buffering=0)  # noqa: SIM115  it stays open
        self._bytes = 0
        try:
            file.write(MAGIC)
            self._bytes = len(MAGIC)
            self._append(file, header)
        except OSError:
            file.close()
            raise
        self._file = file
        self._part += 1
        self._said_missing = 0
        return file

    def _rotate(self) -> None:
        """FILE becomes FILE.1, and so on; the oldest goes."""
        names = [self._path, *(Path(f"{self._path}.{number}") for number in range(1, self._files))]
        for older, newer in zip(names[:0:-1], names[-2::-1], strict=True):
            if newer.exists():
                os.replace(newer, older)
        file, self._file = self._file, None  # not before, or one that could not be renamed would be begun anew
        if file is not None:
            file.close()
