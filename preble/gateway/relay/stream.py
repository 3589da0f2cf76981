"""One stream on its way to a client: whole events, what is remembered of them, and what is read in passing. Owns the
bytes between server and client; sends nothing itself.

A stream that may be gone on with elsewhere passes in whole events, and those that have passed are remembered, at most
`REMEMBERED_BYTES`; beyond that, and where an event is longer than `EVENT_BYTES`, it is passed on as any other.

Between two events, where nothing is held back, the way is open for those that nobody must read (`plain_events`).
"""

from __future__ import annotations

import re

from .plain_events import PlainEvents
from .resume import Continued, Emitted, emitted_by
from .stream_errors import server_fault
from .usage import UsageReader

REMEMBERED_BYTES = 1 << 20
EVENT_BYTES = 256 << 10
_END = b"\n\n"
_DONE = re.compile(rb"^data: ?\[DONE\]", re.MULTILINE)  # a line of its own: in JSON there is none


class PassingStream:
    """The events of one answer, of one server after the other."""

    def __init__(self, kind: str, reader: UsageReader, *, resumable: bool, cumulative: bool = False) -> None:
        self.resumable = resumable
        self.cumulative = cumulative and kind == "generate"  # each event repeats what came before
        self._kind = kind
        self._reader = reader
        self._held = b""
        self.plain = PlainEvents(bytes_max=REMEMBERED_BYTES, remembers=resumable)
        self._continued: Continued | None = None
        self.fault_text = ""  # the server's own error, where it sent one and the stream can go on elsewhere

    @property
    def last(self) -> bytes:
        """What has passed last, of a stream that is not remembered."""
        return self.plain.last

    def take(self, data: bytes) -> bytes:
        """Bytes that came from the server; those that go on to the client now."""
        data = self._take(data)
        self.plain.passed += data.count(_END)
        self.plain.is_open = not (self._held or self._continued or self.fault_text or self.cumulative) and (
            self._reader.is_between_events
        )
        return data

    def _take(self, data: bytes) -> bytes:
        if not self.resumable and self._continued is None:
            self.plain.last = data = self._reader.feed(data)
            return data
        if self.fault_text:
            return b""
        if self._held:
            data = self._held + data
            self._held = b""
        if not data.endswith(_END):
            cut = data.rfind(_END) + len(_END)
            cut = cut if cut >= len(_END) else 0
            data, self._held = data[:cut], data[cut:]
            if len(self._held) > EVENT_BYTES:
                self._forget()
                self._continued = None
                return self._reader.feed(data + self._let_go())
        if self._continued is not None:
            events = [self._continued.event(event) for event in data.split(_END)[:-1]]
            data = b"".join(event + _END for event in events if event)
        if self.resumable and (fault := server_fault(data)) is not None:
            self.fault_text, self._held = fault.text, b""
            data = data[: fault.start]
        if not data:
            return b""
        if self.resumable and not self._remembers(data) and self._continued is None:
            data += self._let_go()
        return self._reader.feed(data)

    def _remembers(self, data: bytes) -> bool:
        """Remember what passes, unless it is too much by now; then nothing is."""
        plain = self.plain
        if self.cumulative and len(plain.events) > 1:
            plain.size -= len(plain.events.pop())
        plain.events.append(data)
        plain.size += len(data)
        if plain.size > REMEMBERED_BYTES:
            self._forget()
        return self.resumable

    def end(self) -> bytes:
        """The server has sent all; what goes on to the client at the end."""
        held = self._let_go()
        rest = self._reader.feed(held) if held else b""
        return rest + self._reader.end()

    def cut(self) -> bytes:
        """The server is lost; what came whole and waited for the next event goes on to the client."""
        self._held = b""
        return self._reader.end()

    @property
    def is_ended(self) -> bool:
        """Whether the last event that passed is the one that ends a stream; not known where nothing is remembered."""
        return not self.resumable or any(_DONE.search(event) for event in self.plain.events[-2:])

    def emitted(self) -> Emitted | None:
        """What the client has been sent; None where that cannot be gone on with."""
        return emitted_by(self._kind, b"".join(self.plain.events), self.cumulative) if self.resumable else None

    def go_on(self, found: Emitted) -> None:
        """Another server goes on after what was found."""
        self._held, self.fault_text = b"", ""
        self.plain.is_open = False
        self._continued = Continued(found)

    def _forget(self) -> None:
        """Go on as any other stream."""
        self.resumable = self.plain.remembers = False
        self.plain.events.clear()
        self.plain.size = 0

    def _let_go(self) -> bytes:
        """What was held back of an event that is not whole, and is no more."""
        held, self._held = self._held, b""
        return held
