"""What keys and clients use at several processes of one gateway, so that their limits hold for all together. Owns what
is said and how it is added up; the limits are `keys`', the way there is the sibling routers'.

What is used at one process is noted to the others within `NOTE_SECONDS`, and taken from their buckets as if it had been
used there. Until then it is not known there: a limit may be passed by what comes in that time. A note that is lost is
missed by rates only. Tokens against budgets travel as sums, each process its own: the next note mends what one has
lost, and a process that has just begun is given all sums and how full the buckets of keys are.

Notes hold digests of keys and names or addresses of clients, and go where only processes of the same user listen.
Not thread-safe.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta, Struct

NOTE_SECONDS = 0.02
PENDING_MAX = 4096  # names in one note; then it goes at once
PROCESSES_MAX = 256  # whose sums are kept, dead ones among them; of more, those of the one seen first are dropped

Count = Annotated[int, Meta(ge=0, le=2**62)]
Digest = Annotated[str, Meta(max_length=64)]
logger = logging.getLogger("preble.gateway")


class UsageNote(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What was used since the last note, of the general rate and of each key's own limits as (requests, tokens); sums
    of tokens by process and key; how full the buckets of a key are, for who has just begun."""

    version: Literal[1] = 1
    rates: dict[Annotated[str, Meta(max_length=256)], Count] = {}
    keys: dict[Digest, tuple[Count, Count]] = {}
    sums: dict[Annotated[str, Meta(max_length=256)], dict[Digest, Count]] = {}
    levels: dict[Digest, tuple[float | None, float | None]] = {}


class SharedLimited(Protocol):
    """What limits are taken from: `access.Access`."""

    def used_elsewhere(self, rates: dict[str, int], keys: dict[str, tuple[int, int]], budgets: dict[str, int]) -> None:
        """So much was used at another process; unknown names are passed by."""

    def levels(self) -> dict[str, tuple[float | None, float | None]]:
        """How full the buckets of each key are, of requests and of tokens."""

    def lower_to(self, levels: dict[str, tuple[float | None, float | None]]) -> None:
        """No bucket is fuller than that."""


_encode = msgspec.msgpack.Encoder().encode
_DECODER = msgspec.msgpack.Decoder(UsageNote)


class SharedLimits:
    """One process's side. `send` takes a note's bytes to all others; `call_later(seconds, what)` is the loop's."""

    def __init__(
        self, own: str, send: Callable[[bytes], object], call_later: Callable[[float, Callable[[], None]], Any]
    ) -> None:
        self._own = own
        self._send = send
        self._call_later = call_later
        self._limited: SharedLimited | None = None
        self._rates: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._sums: OrderedDict[str, dict[str, int]] = OrderedDict({own: {}})
        self._is_due = False

    def follow(self, limited: SharedLimited) -> None:
        """What others use is taken from these limits from now on."""
        self._limited = limited

    # --- used here ----------------------------------------------------------------------------------------------------

    def charged(self, name: str, count: int) -> None:
        """Of the general rate, by a key or an address."""
        self._note(self._rates, name, count)

    def began(self, digest: str) -> None:
        """A request of a key with limits of its own."""
        self._note(self._requests, digest, 1)

    def spent(self, digest: str, tokens: int) -> None:
        """Tokens of such a key."""
        sums = self._sums[self._own]
        sums[digest] = sums.get(digest, 0) + tokens
        self._note(self._tokens, digest, tokens)

    def _note(self, counts: Counter[str], name: str, count: int) -> None:
        counts[name] += count
        if len(counts) >= PENDING_MAX:
            self._flush()
        elif not self._is_due:
            self._is_due = True
            self._call_later(NOTE_SECONDS, self._flush)

    def _flush(self) -> None:
        self._is_due = False
        digests = self._requests.keys() | self._tokens.keys()
        if not digests and not self._rates:
            return
        sums = self._sums[self._own]
        note = UsageNote(
            rates=dict(self._rates),
            keys={digest: (self._requests[digest], self._tokens[digest]) for digest in digests},
            sums={self._own: {digest: sums[digest] for digest in self._tokens}},
        )
        for counts in (self._rates, self._requests, self._tokens):
            counts.clear()
        self._send(_encode(note))

    def came(self) -> None:
        """Another process listens from now on: it is given all sums. To those that have them that says nothing new."""
        levels = {} if self._limited is None else self._limited.levels()
        if levels or any(self._sums.values()):
            self._send(_encode(UsageNote(sums=dict(self._sums), levels=levels)))

    # --- used elsewhere -----------------------------------------------------------------------------------------------

    def take(self, data: bytes) -> None:
        """A note of another process. One that is none is passed by."""
        try:
            note = _DECODER.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            logger.warning("a note of another process cannot be read: %s", type(error).__name__)
            return
        budgets: Counter[str] = Counter()
        for process, sums in note.sums.items():
            if process != self._own:
                self._add(budgets, process, sums)
        if self._limited is not None:
            self._limited.used_elsewhere(note.rates, note.keys, dict(budgets))
            self._limited.lower_to(note.levels)

    def _add(self, budgets: Counter[str], process: str, sums: dict[str, int]) -> None:
        """Take over one process's sums, which only grow; what is new in them goes to `budgets`."""
        known = self._sums.setdefault(process, {})
        for digest, total in sums.items():
            more = total - known.get(digest, 0)
            if more > 0:
                known[digest] = total
                budgets[digest] += more
        if len(self._sums) > PROCESSES_MAX:
            self._sums.pop(next(name for name in self._sums if name != self._own))
