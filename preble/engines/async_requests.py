"""One request in an engine that streams: what it is asked, what it says, and what of that is accepted.

Owns the checks of an engine's answers; knows no threads. Tokens that were sent already are dropped, a gap, an
impossible token or an end without a reason ends the request with "error", tokens beyond the number asked for are cut
off, and an impossible number of cached tokens counts as not reported. Each is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..types import SamplingParams, TokenLogprob
from .base import FINISH_REASONS, GenerationRequest, OutputChunk


@dataclass(frozen=True, slots=True)
class EngineJob:
    """A request as the engine gets it. `id` is unique in this process; it may produce `max_tokens` more tokens."""

    id: str
    request: GenerationRequest
    max_tokens: int
    rank: int

    @property
    def sampling(self) -> SamplingParams:
        """What is asked of the tokens to come."""
        return self.request.sampling.left(self.max_tokens, self.request.output_offset)


@dataclass(frozen=True, slots=True)
class StreamPart:
    """What an engine says of one request. `index` is the position of `token_ids[0]` in what it has generated.

    So an engine that repeats all tokens each time says 0. `finish_reason` is one of `base.FINISH_REASONS`, or None.
    `logprobs` has one for each of `token_ids`, where they are asked for.
    """

    index: int
    token_ids: Sequence[int]
    cached_tokens: int | None = None
    finish_reason: str | None = None
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(slots=True)
class StreamCounters:
    """What was wrong with what the engine said, since the start."""

    repeated_tokens: int = 0
    surplus_tokens: int = 0
    impossible_tokens: int = 0
    impossible_hits: int = 0
    gaps: int = 0
    ends_without_reason: int = 0
    unasked_aborts: int = 0
    streams_failed: int = 0
    missing_logprobs: int = 0


@dataclass(slots=True, eq=False)
class Stream:
    """A live request: what came of it, and what of that nobody has taken. `id` is its job's."""

    id: str
    request: GenerationRequest
    max_tokens: int
    counters: StreamCounters
    produced: int = 0
    pending: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of what is pending
    _hit_reported: bool = False

    def take(self, part: StreamPart, vocab_size: int) -> None:
        """Accept what can be accepted. Afterwards `finish_reason` may be set, by the engine or by what was wrong."""
        if part.index > self.produced:
            self.counters.gaps += 1
            self.fail(f"the engine left out {part.index - self.produced} tokens")
            return
        known = self.produced - part.index
        new = part.token_ids[known:]
        if part.index:  # one that says 0 repeats all it has said on purpose
            self.counters.repeated_tokens += min(known, len(part.token_ids))
        if not all(type(token) is int and 0 <= token < vocab_size for token in new):
            self.counters.impossible_tokens += 1
            self.fail("the engine sent a token that its vocabulary does not have")
            return
        if self.request.sampling.logprobs is not None and len(part.logprobs) != len(part.token_ids):
            self.counters.missing_logprobs += 1
            self.fail("the engine left out log probabilities that it was asked for")
            return
        self._take_hit(part.cached_tokens)
        room = self.max_tokens - self.produced
        self.counters.surplus_tokens += max(0, len(new) - room)
        self.pending += new[:room]
        self.logprobs += part.logprobs[known:][:room]
        self.produced += min(room, len(new))
        if part.finish_reason is not None:
            self._take_end(part.finish_reason)
        elif self.produced == self.max_tokens and len(new) > room:
            self.finish_reason = "length"  # it would go on for ever

    def _take_hit(self, cached_tokens: int | None) -> None:
        if cached_tokens is None or self.cached_tokens is not None:
            return
        if type(cached_tokens) is not int or not 0 <= cached_tokens <= len(self.request.token_ids):
            self.counters.impossible_hits += 1
        else:
            self.cached_tokens = cached_tokens

    def _take_end(self, reason: str) -> None:
        if reason == "abort":
            self.counters.unasked_aborts += 1
            self.fail("the engine aborted the request by itself")
        elif reason == "invalid":
            self.refuse()
        elif reason not in FINISH_REASONS or reason == "error":
            self.fail(f"the engine ended the request: {reason[:200]}")
        else:
            self.finish_reason = reason

    def fail(self, error: str) -> None:
        """End with finish_reason "error"."""
        self.finish_reason, self.error = "error", error

    def refuse(self) -> None:
        """End with finish_reason "invalid". What an engine says of a request may quote it, so only who said no is
        reported."""
        asked = ", ".join(self.request.sampling.needs())
        self.finish_reason = "invalid"
        self.error = "the engine refuses the request" + (f", which asks for {asked}" if asked else "")

    def end_of_stream(self) -> None:
        """The engine says no more."""
        if self.finish_reason is None:
            self.counters.ends_without_reason += 1
            self.fail("the engine's answer broke off")

    def chunk(self) -> OutputChunk:
        """What has not been taken; the hit comes once, as soon as it is known, the reason with the last chunk."""
        token_ids, self.pending = tuple(self.pending), []
        logprobs, self.logprobs = tuple(self.logprobs), []
        hit = None if self._hit_reported else self.cached_tokens
        self._hit_reported = self._hit_reported or hit is not None
        return OutputChunk(
            self.request.request_id,
            self.request.output_offset + self.produced - len(token_ids),
            token_ids,
            cached_tokens=hit,
            finish_reason=self.finish_reason,
            error=self.error,
            logprobs=logprobs,
        )
