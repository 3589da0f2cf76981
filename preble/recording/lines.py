"""What is in a recording's frames, and a recording as files and back. Owns the format's version and its fields.

Each frame is one MessagePack array, its first element says what it is; a reader passes over further elements at the
end, so that fields may be added. The first frame is the `FileHeader`, and names the fields of requests. A worker is
there before the first request that names it. A request is written when it ends, so requests are not in the order of
their arrival; its blocks are those of an earlier request of the file, as far as they are shared, and new ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import fields
from hashlib import blake2b
from pathlib import Path as FilePath
from typing import Any

import msgspec
import numpy as np

from .. import __version__
from ..errors import InvalidInput
from .frames import MAGIC, FileCut, frame, payloads
from .names import NAME_BYTES
from .recorded import BlockNames, RecordedRequest, RecordedTraffic, RecordedWorker, sorted_by_arrival

VERSION = 1
FILES_MAX = 1000  # of one recording, rotated


class FileHeader(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A file's first frame. `recording` and `part` name the recording and the place of the file in it; `key_check` is
    equal for files whose names are made with the same key, and says nothing of the key. `started_unix_seconds` is when
    the clock of all times was 0."""

    version: int
    recording: str
    part: int
    key_check: bytes
    block_size: int
    started_unix_seconds: float
    policy: str
    preble: str
    fields: tuple[str, ...]


class WorkerLine(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A worker, numbered as they come in the file."""

    id: str
    kv_capacity_tokens: int
    block_size: int
    max_running: int | None
    engine: str


class RequestLine(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A request that has ended; see `RecordedRequest`. `worker` -1: none. Its names are the first `shared` of the
    file's request number `parent` (-1: of none), then `names`, 8 bytes each, little-endian."""

    arrival_seconds: float
    sent_seconds: float | None
    first_token_seconds: float | None
    end_seconds: float | None
    worker: int
    prompt_tokens: int
    output_tokens: int
    max_new_tokens: int | None
    cached_tokens: int | None
    matched_tokens: int | None
    parent: int
    shared: int
    names: bytes
    session: bytes
    parent_session: bytes
    agent: bytes
    tenant: bytes
    deadline_seconds: float | None
    priority: str
    error: str


class MissingLine(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """So many requests of the recording are in no file, up to here."""

    requests: int


Line = FileHeader | WorkerLine | RequestLine | MissingLine
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Line).decode
_SAME = tuple(name for name in RequestLine.__struct_fields__ if name in {one.name for one in fields(RecordedRequest)})
_HIDDEN = ("session", "parent_session", "agent", "tenant")


def framed(line: Line) -> bytes:
    """A line as a frame."""
    return frame(_encode(line))


def header_line(
    recording: str, part: int, key_check: bytes, block_size: int, started_unix_seconds: float, policy: str
) -> FileHeader:
    """The first line of a file."""
    about = (VERSION, recording, part, key_check, block_size, started_unix_seconds, policy, __version__)
    return FileHeader(*about, RequestLine.__struct_fields__)


# --- reading ----------------------------------------------------------------------------------------------------------


class _FileReader:
    """One file's lines as data."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.is_cut = False
        self.missing = 0
        self.workers: list[RecordedWorker] = []
        self.requests: list[RecordedRequest] = []
        lines = self._lines()
        header = next(lines, None)
        if not isinstance(header, FileHeader):
            raise InvalidInput(f"{self.path} is empty" if header is None else f"{self.path} has no header")
        self.header = header
        for line in lines:
            self._take(line)

    def _lines(self) -> Iterator[Line]:
        try:
            for number, payload in enumerate(payloads(self.path)):
                if number == 0:
                    self._check_version(payload)
                try:
                    yield _decode(payload)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise InvalidInput(f"{self.path}, frame {number}: {error}") from None
        except FileCut:
            self.is_cut = True

    def _check_version(self, payload: bytes) -> None:
        """Of a later version nothing is known but this."""
        try:
            found = msgspec.msgpack.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError):
            found = None
        version = found[1] if isinstance(found, list) and len(found) > 1 and found[0] == 0 else None
        if version != VERSION:
            raise InvalidInput(f"{self.path} is of version {version!r}; this Preble reads version {VERSION}")

    def _take(self, line: Line) -> None:
        try:
            if isinstance(line, RequestLine):
                self.requests.append(self._request(line))
            elif isinstance(line, WorkerLine):
                self.workers.append(RecordedWorker(**{name: getattr(line, name) for name in line.__struct_fields__}))
            elif isinstance(line, MissingLine):
                self.missing = max(self.missing, line.requests)
            else:
                raise InvalidInput("a second header")
        except InvalidInput as error:
            raise InvalidInput(f"{self.path}, request {len(self.requests)}: {error}") from None

    def _request(self, line: RequestLine) -> RecordedRequest:
        if not -1 <= line.worker < len(self.workers):
            raise InvalidInput(f"worker {line.worker} is not there")
        known: dict[str, Any] = {name: getattr(line, name) for name in _SAME}
        known |= {name: getattr(line, name).hex() for name in _HIDDEN}
        known["worker"] = "" if line.worker < 0 else self.workers[line.worker].id
        found = RecordedRequest(blocks=self._blocks(line), **known)
        if len(found.blocks) != -(-found.prompt_tokens // self.header.block_size):
            raise InvalidInput(f"{found.prompt_tokens} tokens are not {len(found.blocks)} blocks")
        return found

    def _blocks(self, line: RequestLine) -> BlockNames:
        if len(line.names) % NAME_BYTES:
            raise InvalidInput("names are cut")
        new = np.frombuffer(line.names, "<u8").astype(np.uint64, copy=False)
        if not line.shared:
            return new
        if not 0 <= line.parent < len(self.requests) or not 0 < line.shared <= len(self.requests[line.parent].blocks):
            raise InvalidInput(f"request {line.parent} has no {line.shared} blocks to share")
        shared = self.requests[line.parent].blocks[: line.shared]
        return np.concatenate([shared, new]) if len(new) else shared


def read_files(paths: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
    """The fields of a recording; see `Recording.read`."""
    if not paths:
        raise InvalidInput("Recording.read needs a file")
    files = [found for path in paths for found in _with_rotated(path)]
    first = files[0]
    for other in files[1:]:
        if other.header.key_check != first.header.key_check or other.header.block_size != first.header.block_size:
            raise InvalidInput(f"{other.path} is not of the same recording as {first.path}")
    started = min(file.header.started_unix_seconds for file in files)
    missing: dict[str, int] = {}
    workers: dict[str, RecordedWorker] = {}
    requests: list[RecordedRequest] = []
    for file in files:
        missing[file.header.recording] = max(missing.get(file.header.recording, 0), file.missing)
        workers |= {worker.id: worker for worker in file.workers}
        later = file.header.started_unix_seconds - started
        requests += file.requests if later == 0.0 else [request.later(later) for request in file.requests]
    return {
        "workers": tuple(workers.values()),
        "requests": sorted_by_arrival(requests),
        "block_size": first.header.block_size,
        "policy": first.header.policy,
        "started_unix_seconds": started,
        "missing": sum(missing.values()),
        "is_cut": any(file.is_cut for file in files),
        "name": FilePath(paths[0]).name,
    }


def _with_rotated(path: str | os.PathLike[str]) -> list[_FileReader]:
    """A file and those that were rotated away and have names of the same key, the oldest first."""
    found = [_FileReader(path)]
    for number in range(1, FILES_MAX):
        older = f"{os.fspath(path)}.{number}"
        if not os.path.exists(older):
            break
        file = _FileReader(older)
        if file.header.key_check != found[0].header.key_check:
            break
        found.append(file)
    return found[::-1]


# --- writing a whole one ----------------------------------------------------------------------------------------------


def write_file(path: str | os.PathLike[str], recording: RecordedTraffic) -> None:
    """See `Recording.write`."""
    final = FilePath(path)
    building = final.with_name(f".{final.name}.{os.getpid()}")
    try:
        with open(building, "wb") as file:
            file.write(MAGIC)
            file.writelines(map(framed, _lines_of(recording)))
        os.replace(building, final)
    except OSError as error:
        building.unlink(missing_ok=True)
        raise InvalidInput(f"{final} cannot be written: {error.strerror or error}") from None


def _lines_of(recording: RecordedTraffic) -> Iterator[Line]:
    """All of it. Names are given already, so nobody needs a key; what they are equal to is known by its content."""
    content = blake2b(repr(recording.workers).encode(), digest_size=8)
    for request in recording.requests:
        content.update(request.blocks.tobytes())
    check = content.digest()
    about = recording.block_size, recording.started_unix_seconds, recording.policy
    yield header_line(check.hex(), 0, check, *about)
    for worker in recording.workers:
        yield WorkerLine(*(getattr(worker, name) for name in WorkerLine.__struct_fields__))
    if recording.missing:
        yield MissingLine(recording.missing)
    numbers = {worker.id: number for number, worker in enumerate(recording.workers)}
    brought: dict[int, tuple[int, int]] = {}  # name -> (request that brought it, its blocks up to there)
    for number, request in enumerate(recording.requests):
        names = request.blocks.tolist()
        shared = _shared(names, brought)
        parent = brought[names[shared - 1]][0] if shared else -1
        for depth in range(shared, len(names)):
            brought[names[depth]] = number, depth + 1
        yield _line_of(request, numbers.get(request.worker, -1), parent, shared)


def _shared(names: Sequence[int], brought: dict[int, tuple[int, int]]) -> int:
    """How many of the first names have been brought by earlier requests, at the same place."""
    shared = 0
    while shared < len(names) and brought.get(names[shared], (-1, -1))[1] == shared + 1:
        shared += 1
    return shared


def _line_of(request: RecordedRequest, worker: int, parent: int, shared: int) -> RequestLine:
    known: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    known |= {name: _bytes_of(getattr(request, name)) for name in _HIDDEN}
    names = request.blocks[shared:].astype("<u8").tobytes()
    return RequestLine(**{**known, "worker": worker, "parent": parent, "shared": shared, "names": names})


def _bytes_of(name: str) -> bytes:
    try:
        return bytes.fromhex(name)
    except ValueError:
        raise InvalidInput(f"a name must be hexadecimal in a file, got {name!r}") from None
