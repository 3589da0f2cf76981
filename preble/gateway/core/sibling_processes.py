"""Several gateway processes behind one port, as one of them sees the others: its slot, and how it asks them.

Each process serves its whole API on a Unix socket in a directory that only their user may enter. What comes in there
was let in by another process: it is asked for no key, counts for no rate, and is not passed on again. So
  - an operator's change of workers, made at any process, is made in all;
  - `/metrics` of any process has the samples of all, each with its `process`;
  - a process that was started again finds the workers that the others have;
  - an answer that one server keeps is found, whichever process passed it on.
Prompts never go that way. Routers report bookings to each other, and processes what was used of limits, on other
sockets in the same directory (`router.sibling_routers`). A process that does not answer within `ANSWER_SECONDS` is left
out, and shown as such.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from ...errors import MissingExtra
from ...transport.tasks import running, within
from .doors import PROCESS, door_of

try:
    import httptools
except ImportError as error:
    raise MissingExtra("the gateway needs httptools: pip install 'preble[gateway]'") from error

T = TypeVar("T")
logger = logging.getLogger("preble.gateway")

ANSWER_SECONDS = 5.0
KEEPER_SECONDS = 1.0  # for a client that waits
KEEPERS_PATH = "/v1/preble/keepers/"  # of answers by their id; open to other processes only
ANSWER_BYTES_MAX = 64 << 20
READ_BYTES = 256 << 10
_ANSWER_ID = re.compile(r"[A-Za-z0-9_-]{1,120}")


@dataclass(frozen=True, slots=True)
class ProcessSlot:
    """One process's place among `count`: they share `port`, and meet in `directory`."""

    index: int
    count: int
    port: int
    directory: str

    def socket_path(self, index: int) -> str:
        """Where process `index` listens for the others."""
        return str(Path(self.directory) / f"{index}.sock")

    def bookings_endpoint(self, index: int) -> str:
        """Where process `index` reports its bookings to the others."""
        return f"ipc://{Path(self.directory) / f'{index}.bookings'}"

    @property
    def _token_path(self) -> Path:
        return Path(self.directory) / "admin-token"

    def keep_token(self, token: str) -> None:
        """Leave the admin token for all processes; the parent does, before it starts them."""
        self._token_path.write_text(token)

    def token(self) -> str | None:
        """The admin token that the parent left; None if there is none."""
        return self._token_path.read_text() if self._token_path.exists() else None

    @property
    def _record_key_path(self) -> Path:
        return Path(self.directory) / "record-key"

    def keep_record_key(self, key: bytes) -> None:
        """Leave what recordings name blocks with for all processes; the parent does, before it starts them."""
        self._record_key_path.write_bytes(key)

    def record_key(self) -> bytes | None:
        """What the parent left; None if there is none."""
        return self._record_key_path.read_bytes() if self._record_key_path.exists() else None

    def hangs(self, seconds: float) -> bool:
        """Whether the process takes a question and says nothing for so long. One that is not there, or ends, does not
        hang."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(seconds)
                connection.connect(self.socket_path(self.index))
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                connection.recv(64)
        except socket.timeout:  # noqa: UP041 - Python 3.10 has no other name for it
            return True
        except OSError:
            return False
        return False

    def listen(self) -> socket.socket:
        """The socket of this process. What an earlier life has left there is replaced."""
        path = Path(self.socket_path(self.index))
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        return listener


def say_ready(address: Sequence[Any], admin_token: str | None = None, *, scheme: str = "http") -> None:
    """The line on stdout that says where requests are answered; `address` is a socket's own name. And one with the
    token that changes of the fleet need, where there is one."""
    host, port = address[:2]
    sys.stdout.write(f"READY {scheme}://{f'[{host}]' if ':' in host else host}:{port}\n")
    if admin_token is not None:
        sys.stdout.write(f"ADMIN-TOKEN {admin_token}\n")
    sys.stdout.flush()


def say_picker(address: Sequence[Any]) -> None:
    """The line on stdout that says where data planes are answered, before the one of requests."""
    host, port = address[:2]
    sys.stdout.write(f"PICKER {f'[{host}]' if ':' in host else host}:{port}\n")
    sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class ProcessAnswer:
    """What process `index` said; `status` None: nothing."""

    index: int
    status: int | None
    body: bytes = b""


class GatewayProcesses:
    """The other processes. Belongs to one asyncio loop."""

    def __init__(self, slot: ProcessSlot) -> None:
        self.slot = slot

    async def ask(self, method: str, path: str, body: bytes = b"") -> list[ProcessAnswer]:
        """Ask all of them at once; one answer for each, in the order of their indices."""
        others = [index for index in range(self.slot.count) if index != self.slot.index]
        return list(await asyncio.gather(*(self._ask(i, method, path, body) for i in others)))

    async def ask_one(self, index: int, path: str) -> ProcessAnswer:
        """What process `index` says to a GET."""
        return await self._ask(index, "GET", path, b"")

    async def keeper(self, answer_id: str) -> tuple[str, str] | None:
        """The worker that keeps an answer which another process passed on, and its model; None where none knows."""
        if _ANSWER_ID.fullmatch(answer_id) is None:
            return None
        path = KEEPERS_PATH + answer_id
        others = [index for index in range(self.slot.count) if index != self.slot.index]
        async with running(*(self._ask(i, "GET", path, b"", KEEPER_SECONDS) for i in others)) as asked:
            for next_one in asyncio.as_completed(asked):
                answer = await next_one
                if answer.status == 200 and (found := json.loads(answer.body)) is not None:
                    return found["worker"], found["model"]
        return None

    async def _ask(
        self, index: int, method: str, path: str, body: bytes, seconds: float = ANSWER_SECONDS
    ) -> ProcessAnswer:
        """On the loop, not in a thread: processes that ask each other must not wait for threads that wait for them."""
        try:
            return await within(seconds, self._answer(index, method, path, body))
        except (OSError, asyncio.TimeoutError, httptools.HttpParserError) as error:
            logger.debug("process %d does not answer: %s", index, type(error).__name__)
            return ProcessAnswer(index, None)

    async def _answer(self, index: int, method: str, path: str, body: bytes) -> ProcessAnswer:
        reader, writer = await asyncio.open_unix_connection(self.slot.socket_path(index))
        try:
            fields = f"host: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(f"{method} {path} HTTP/1.1\r\n{fields}".encode("ascii") + body)
            answer = _Response()
            while not answer.is_whole and (part := await reader.read(READ_BYTES)):
                answer.feed(part)
            if not answer.is_whole:
                raise ConnectionError("it hung up")
            return ProcessAnswer(index, answer.status, bytes(answer.body))
        finally:
            writer.close()

    async def workers(self) -> list[dict[str, Any]] | None:
        """The workers that the first process to answer has; None if none answers."""
        for answer in await self.ask("GET", "/workers"):
            if answer.status == 200:
                cards: list[dict[str, Any]] = json.loads(answer.body)["workers"]
                return cards
        return None


class _Response:
    """One answer, as it comes. Raises `httptools.HttpParserError`, and `ConnectionError` if it is too long."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.body = bytearray()
        self.is_whole = False
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """More of it."""
        self._parser.feed_data(data)
        if len(self.body) > ANSWER_BYTES_MAX:
            raise ConnectionError("the answer is too long")

    def on_headers_complete(self) -> None:
        """What the parser calls."""
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """What the parser calls."""
        self.body += body

    def on_message_complete(self) -> None:
        """What the parser calls."""
        self.is_whole = True


class SharedWork(Generic[T]):
    """Work that is under way once at most: whoever asks meanwhile gets the same result. Belongs to one loop."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._work = work
        self._task: asyncio.Task[T] | None = None

    async def result(self) -> T:
        """What it comes to; it goes on when who asks is cancelled, for others wait for it, too."""
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._work())
        return await asyncio.shield(self._task)


def from_other_process(processes: GatewayProcesses | None, scope: MutableMapping[str, Any]) -> bool:
    """Whether a request came in on the socket that is for the other processes."""
    return processes is not None and door_of(scope) == PROCESS


def merged(texts: Mapping[int, bytes | None]) -> bytes:
    """One text of metrics out of those of several processes, each sample with its `process`.

    None: that process did not answer; `preble_process_up` says so.
    """
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}  # name -> comments, samples
    for index, text in texts.items():
        family: tuple[list[bytes], list[bytes]] = ([], [])
        for line in (text or b"").splitlines():
            if line.startswith(b"# HELP "):
                comments, samples = families.setdefault(line.split(b" ")[2], ([], []))
                family = ([], samples) if comments else (comments, samples)
            if line.startswith(b"#"):
                family[0].append(line)
            elif line:
                family[1].append(_with_process(line, index))
    lines = [b"# HELP preble_process_up 1 where the process answered", b"# TYPE preble_process_up gauge"]
    lines += [b'preble_process_up{process="%d"} %d.0' % (index, text is not None) for index, text in texts.items()]
    for comments, samples in families.values():
        lines += comments + samples
    return b"\n".join(lines) + b"\n"


def _with_process(sample: bytes, index: int) -> bytes:
    """`name{labels} value` or `name value` with one label more."""
    ends = [place for mark in (b"{", b" ") if (place := sample.find(mark)) >= 0]
    name, rest = sample[: min(ends)], sample[min(ends) :]
    label = b'process="%d"' % index
    return name + (b"{%s,%s" % (label, rest[1:]) if rest.startswith(b"{") else b"{%s}%s" % (label, rest))


def statuses(own: int, index: int, answers: Sequence[ProcessAnswer]) -> list[dict[str, int | None]]:
    """What each process said, this one included, for an operator."""
    said = {index: own, **{answer.index: answer.status for answer in answers}}
    return [{"process": number, "status": said[number]} for number in sorted(said)]
