"""KV of a cached prefix on its way from one worker to another: what is asked, in which parts, and when it is over. No
socket, no clock, no engine: those are `worker/kv_mover.py`'s.

    who pulls                                          the source
    KvAsk: tokens up to here, KV from this one on  ->  its engine copies what it has of that
                            <-  KvPart and the bytes, or KvRefused
    its engine takes them over, and the next is asked

The source keeps nothing of a transfer between two asks: each names the tokens whose KV it wants, and what the engine
caches at that moment is what counts. So nothing of it can be stale, and nobody who vanishes leaves anything behind.

A prefix is taken over from its beginning, part by part in order, and whatever has been taken over is complete in
itself. So a transfer ends at the first thing that is not as it should be, keeps what has come, and the rest is
computed: a part that was lost (the next one does not follow), that is short (the source caches no more), or late (the
whole took as long as it was worth), a refusal, memory that is needed for other things. What comes twice, or after the
end, counts for nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..types import check_fields
from . import wire
from .messages import PullEnd, PullFrom

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class KvLimits:
    """Bounds of transfers, at either end. Raises `InvalidConfig` naming the field.

    `part_bytes` of one message, or one token; `parts_ahead` of a pull that are asked for and not yet taken over, so
    that their product is what it holds in memory; `pull_bytes` of one pull in all, which is cut there; `pulls` at a
    time, one more is not begun; `followers` that wait for those, one more does not. At the source: `asks` that wait for
    the engine, one more is refused, and `parts_queued` that ZeroMQ keeps for one worker that does not read, and
    twice as many at the most, what is beyond is dropped; that worker asks it for no more at a time, of all its pulls
    together.
    """

    part_bytes: int = 4 << 20
    parts_ahead: int = 4
    pull_bytes: int = 8 << 30
    pulls: int = 16
    followers: int = 1024
    asks: int = 64
    parts_queued: int = 8

    def __post_init__(self) -> None:
        check_fields(self, "be positive", *self.__slots__)

    def part_tokens(self, token_bytes: int) -> int:
        """Tokens of one part."""
        return max(self.part_bytes // token_bytes, 1)


@dataclass(frozen=True, slots=True)
class KvAsked:
    """One ask of a transfer: the KV of the tokens [`first`, `end`)."""

    number: int
    first: int
    end: int


class KvPull:
    """One transfer, at the worker that takes over. `cached_tokens` of the prompt are there already. Not thread-safe.

    `asks` says what to ask now, `take` judges an answer, `taken_over` is called when the engine has a part; `end` is
    "" until it is over.
    """

    def __init__(
        self, pull: PullFrom, token_ids: Int32Array, cached_tokens: int, token_bytes: int, limits: KvLimits, now: float
    ) -> None:
        self.token_ids = token_ids
        self.cached_tokens = cached_tokens
        self.first_cached = cached_tokens
        self.source_us = 0
        self.end: PullEnd = ""
        self.began_at = now
        self.deadline = now + pull.wait_us * 1e-6
        self.tokens = min(pull.tokens, len(token_ids) - 1, cached_tokens + limits.pull_bytes // token_bytes)
        self._token_bytes = token_bytes
        self._part_tokens = limits.part_tokens(token_bytes)
        self._ahead_max = limits.parts_ahead
        self._asked_tokens = cached_tokens
        self._asked = 0
        self._ahead: deque[KvAsked] = deque()  # asked for, and not taken over
        self._received = 0  # of these
        self._closing: PullEnd = ""  # why nothing more is taken
        if cached_tokens >= self.tokens:
            self.end = "done"

    @property
    def moved_tokens(self) -> int:
        """Tokens whose KV came from the source."""
        return self.cached_tokens - self.first_cached

    @property
    def ahead(self) -> int:
        """Parts that were asked for, and are not taken over."""
        return len(self._ahead)

    def asks(self, most: int = 1 << 30) -> list[KvAsked]:
        """What is to be asked now, in order, at most so many; each is returned once."""
        new: list[KvAsked] = []
        if self.end or self._closing:
            return new
        while len(self._ahead) < self._ahead_max and self._asked_tokens < self.tokens and len(new) < most:
            end = min(self._asked_tokens + self._part_tokens, self.tokens)
            new.append(KvAsked(self._asked, self._asked_tokens, end))
            self._ahead.append(new[-1])
            self._asked_tokens = end
            self._asked += 1
        return new

    def take(self, number: int, part: wire.KvPart, data_bytes: int) -> KvAsked | None:
        """What part of the prompt an answer to ask `number` brings, for the engine; None where it is of no use."""
        if self.end or self._closing or self._received >= len(self._ahead):
            return None
        asked = self._ahead[self._received]
        if number < asked.number:
            return None  # it came before
        wanted = asked.end - asked.first
        fits = number == asked.number and part.first_token == asked.first and part.tokens <= wanted
        if not fits or data_bytes != part.tokens * self._token_bytes:
            self._close("lost")
            return None
        self.source_us += part.busy_us
        if part.tokens == 0:
            self._close("partial")
            return None
        self._received += 1
        if part.tokens < wanted:
            self._close("partial")
        return KvAsked(number, asked.first, asked.first + part.tokens)

    def taken_over(self, part: KvAsked, cached_tokens: int) -> None:
        """The engine was given a part, and caches so many tokens of the prompt now."""
        if not self._received or self._ahead[0].number != part.number:
            return  # it was over when it came
        self._ahead.popleft()
        self._received -= 1
        self.cached_tokens = max(self.cached_tokens, min(cached_tokens, part.end))
        if self.end:
            return
        if cached_tokens < part.end:
            self.end = "full"
        elif self._closing:
            self._close(self._closing)
        elif self.cached_tokens >= self.tokens:
            self.end = "done"

    def refused(self, number: int) -> None:
        """The source declines an ask; of one that is not waited for it counts for nothing."""
        if not self.end and not self._closing and any(asked.number == number for asked in self._ahead):
            self._close("refused")

    def lose(self) -> None:
        """An ask could not be sent: nothing more will come."""
        if not self.end and not self._closing:
            self._close("lost")

    def _close(self, why: PullEnd) -> None:
        """Ask and take no more: it is over when the engine has what has come."""
        self._closing = why
        if not self._received:
            self.end = why

    def expire(self, now: float) -> None:
        """End it where it has taken as long as it is worth."""
        if not self.end and now >= self.deadline:
            self.end = "late"

    def cancel(self) -> None:
        """Nobody wants the request any more."""
        self.end = self.end or "cancelled"


class KvSource:
    """The asks that wait for the engine of one worker, each with whose it is. Not thread-safe."""

    def __init__(self, layout: str, epoch: int, limits: KvLimits) -> None:
        self.refusals = 0
        self._layout = layout
        self._epoch = epoch
        self._limits = limits
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """Asks that the engine has not answered yet."""
        return self._waiting

    def refusal(self, envelope: wire.Envelope) -> wire.KvRefused | None:
        """Why an ask is not answered; None where it is, and counts as waiting until `answered`."""
        ask = envelope.message
        assert isinstance(ask, wire.KvAsk)
        found = None
        if envelope.epoch != self._epoch:
            found = wire.KvRefused("epoch", "this worker has been started again: its cache is another one")
        elif ask.layout != self._layout:
            found = wire.KvRefused("layout", "the KV of this worker's engine is of another kind")
        elif self._waiting >= self._limits.asks:
            found = wire.KvRefused("busy", f"{self._waiting} asks wait for the engine, its bound")
        self._waiting += found is None
        self.refusals += found is not None
        return found

    def answered(self) -> None:
        """The engine has answered an ask, in whatever way."""
        assert self._waiting > 0, "an answer without an ask"
        self._waiting -= 1
