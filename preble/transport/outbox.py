"""What a router has not taken yet. Owns the worker's waiting messages of one session and their bound; sends nothing
itself.

ZeroMQ queues a fixed number of frames per router. Behind that stands this box, so that a router that reads slowly
neither stalls the worker nor loses a token: output chunks of the same request merge while they wait, which keeps the
box as small as the number of live requests. At the bound `push` raises `QueueFull`, and the worker closes the session.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ..errors import QueueFull
from ..types import TokenLogprob
from .messages import CHUNKS_MAX, Message, OutputChunk, OutputChunks

_LOT_TOKENS = 1 << 16  # of one frame, alternatives included; one chunk may have more
_PEEKED_CHUNKS = 64  # made into one frame at a time: it may not be taken, and is made anew then


@dataclass(slots=True)
class _Merged:
    """Consecutive chunks of one request, waiting as one."""

    first: OutputChunk
    token_ids: list[int]
    last: OutputChunk
    logprobs: list[TokenLogprob]
    weight: int

    def add(self, chunk: OutputChunk) -> None:
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.weight += _weight(chunk)
        self.last = chunk

    def chunk(self) -> OutputChunk:
        if self.last is self.first:
            return self.first
        cached_tokens = self.last.cached_tokens if self.first.cached_tokens is None else self.first.cached_tokens
        return OutputChunk(
            self.first.request_id,
            self.first.index,
            tuple(self.token_ids),
            cached_tokens,
            self.last.finish_reason,
            self.last.error,
            self.first.next_event_seq,
            tuple(self.logprobs),
        )


def _weight(chunk: OutputChunk) -> int:
    """Its tokens, and the alternatives to them as if they were some more."""
    tokens = len(chunk.token_ids)
    return tokens + sum(1 + len(one.top) for one in chunk.logprobs) if chunk.logprobs else tokens


def chunk_lots(chunks: Sequence[OutputChunk]) -> Iterator[Sequence[OutputChunk]]:
    """Cut chunks into lots that fit a frame each."""
    start = tokens = 0
    for end, chunk in enumerate(chunks):
        tokens += _weight(chunk)
        if end > start and (end - start >= CHUNKS_MAX or tokens > _LOT_TOKENS):
            yield chunks[start:end]
            start, tokens = end, _weight(chunk)
    if chunks:
        yield chunks[start:]


def together(chunks: Sequence[OutputChunk]) -> OutputChunk | OutputChunks:
    """A lot as one message. What is younger than its first chunk is younger than it."""
    return chunks[0] if len(chunks) == 1 else OutputChunks(tuple(chunks), chunks[0].next_event_seq)


class Outbox:
    """Waiting messages in order, at most `max_messages`, with at most `max_tokens` output tokens, alternatives
    included. Not thread-safe."""

    def __init__(self, max_messages: int, max_tokens: int) -> None:
        self.max_messages = max_messages
        self.max_tokens = max_tokens
        self.tokens = 0
        self.merged = 0
        self._queue: deque[Message | _Merged] = deque()
        self._open: dict[str, _Merged] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, message: Message) -> None:
        """Queue a message. Raises `QueueFull` at either bound; then nothing has changed."""
        tokens = _weight(message) if isinstance(message, OutputChunk) else 0
        waiting = self._open.get(message.request_id) if isinstance(message, OutputChunk) else None
        if self.tokens + tokens > self.max_tokens or (waiting is None and len(self._queue) >= self.max_messages):
            raise QueueFull(f"outbox holds {len(self._queue)} messages and {self.tokens} output tokens")
        self.tokens += tokens
        if not isinstance(message, OutputChunk):
            self._queue.append(message)
        elif waiting is not None:
            waiting.add(message)
            self.merged += 1
        else:
            entry = _Merged(message, list(message.token_ids), message, list(message.logprobs), tokens)
            self._open[message.request_id] = entry
            self._queue.append(entry)

    def peek(self) -> Message:
        """The oldest message, or as many of the oldest chunks as travel together. Changes nothing."""
        head = self._queue[0]
        if not isinstance(head, _Merged):
            return head
        chunks: list[OutputChunk] = []
        for entry in islice(self._queue, _PEEKED_CHUNKS):
            if not isinstance(entry, _Merged):
                break
            chunks.append(entry.chunk())
        return together(next(chunk_lots(chunks)))

    def pop(self, count: int = 1) -> None:
        """Drop the oldest messages: they have been sent."""
        for _ in range(count):
            head = self._queue.popleft()
            if isinstance(head, _Merged):
                self.tokens -= head.weight
                del self._open[head.first.request_id]
