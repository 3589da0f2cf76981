"""Output that engines have made and clients have not read. Owns where it waits, merged by choice, and its bound.

Generations never wait for their client: what they make is taken at once, so that their places at the engine, in the
router and in the gateway end with the engine's work. For how long a client may read nothing is bounded by its
connection; how many bytes wait, of all requests, by `UnreadBudget`: at the bound the request that holds most fails.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ...errors import QueueFull
from ...types import TokenLogprob
from .choices import Choice, TextPiece

TOKEN_BYTES = 8  # one of a tuple
LOGPROB_BYTES = 120  # a number and its token
PIECE_BYTES = 200  # about what a piece costs beside its text and tokens


class UnreadBudget:
    """Bytes that wait, of all requests of one gateway. Belongs to one asyncio loop."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_used = 0
        self._holders: set[UnreadPieces] = set()

    def hold(self, holder: UnreadPieces, count: int) -> None:
        """Count bytes to a holder. At the bound whoever holds most loses them all, and fails."""
        self.bytes_used += count
        holder.bytes_held += count
        self._holders.add(holder)
        while self.bytes_used > self.bytes_max:
            largest = max(self._holders, key=lambda one: one.bytes_held)
            largest.fail(QueueFull("the client left too much of the output unread"))
            largest.drop()

    def give_back(self, holder: UnreadPieces, count: int) -> None:
        """Count them off."""
        self.bytes_used -= count
        holder.bytes_held -= count
        if not holder.bytes_held:
            self._holders.discard(holder)


@dataclass(slots=True)
class _Waiting:
    """All that waits of one choice."""

    choice: Choice
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: bool = False
    cost: int = 0


class UnreadPieces:
    """The pieces of one request that wait, and how it ends. Belongs to one asyncio loop."""

    def __init__(self, budget: UnreadBudget, streams: int) -> None:
        self.bytes_held = 0
        self.error: Exception | None = None
        self._budget = budget
        self._streams = streams
        self._waiting: dict[int, _Waiting] = {}  # choices, the one that has waited longest first
        self._changed = asyncio.Event()

    # --- who writes ---------------------------------------------------------------------------------------------------

    def add(self, piece: TextPiece) -> None:
        """Add to what waits of its choice. Raises the request's error, where it has failed."""
        if self.error is not None:
            raise self.error
        waiting = self._waiting.setdefault(piece.choice.job.index, _Waiting(piece.choice))
        waiting.texts.append(piece.text)
        waiting.token_ids += piece.token_ids
        waiting.logprobs += piece.logprobs
        waiting.last = waiting.last or piece.last
        cost = PIECE_BYTES + len(piece.text.encode("utf-8", "replace")) + TOKEN_BYTES * len(piece.token_ids)
        cost += sum(LOGPROB_BYTES * (1 + len(one.top)) for one in piece.logprobs)
        waiting.cost += cost
        self._changed.set()
        self._budget.hold(self, cost)

    def fail(self, error: Exception) -> None:
        """The request fails, after what waits; the first error counts."""
        self.error = self.error or error
        self._changed.set()

    def end(self) -> None:
        """One of the streams has ended."""
        self._streams -= 1
        self._changed.set()

    # --- who reads ----------------------------------------------------------------------------------------------------

    async def next(self) -> TextPiece | None:
        """All that waits of one choice; None when all streams have ended. Raises the request's error."""
        while not self._waiting:
            if self.error is not None:
                raise self.error
            if not self._streams:
                return None
            self._changed.clear()
            await self._changed.wait()
        waiting = self._waiting.pop(next(iter(self._waiting)))
        self._budget.give_back(self, waiting.cost)
        text, token_ids = "".join(waiting.texts), tuple(waiting.token_ids)
        return TextPiece(waiting.choice, text, token_ids, waiting.last, tuple(waiting.logprobs))

    def drop(self) -> None:
        """Throw away what waits."""
        self._waiting.clear()
        self._budget.give_back(self, self.bytes_held)
