"""What a router has not taken yet. Owns the worker's waiting messages of one session and their bound; sends nothing
itself.

ZeroMQ queues a fixed number of frames per router. Behind that stands this box, so that a router that reads slowly
neither stalls the worker nor loses a token: output chunks of the same request merge while they wait, which keeps the
box as small as the number of live requests. At the bound `push` raises `QueueFull`, and the worker closes the session.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..errors import QueueFull
from ..types import TokenLogprob
from .messages import Message, OutputChunk


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
    return len(chunk.token_ids) + sum(1 + len(one.top) for one in chunk.logprobs)


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
        """The oldest message. Changes nothing."""
        head = self._queue[0]
        return head.chunk() if isinstance(head, _Merged) else head

    def pop(self) -> None:
        """Drop the oldest message: it has been sent."""
        head = self._queue.popleft()
        if isinstance(head, _Merged):
            self.tokens -= head.weight
            del self._open[head.first.request_id]
