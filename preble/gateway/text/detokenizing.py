"""Output tokens as text, piece by piece. Owns what may be shown already: whole characters, and nothing that may turn
out to be the beginning of a stop string. Runs no tokenizer of its own: `decode` is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how a decoder shows bytes that are no character, or not yet
CHARACTER_BYTES_MAX = 4  # and so the tokens that one character may be spread over
PENDING_TOKENS_MAX = 64  # after which bytes that decode to nothing whole are shown as they are

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """The text of one output, as tokens come. Not thread-safe.

    A token's text may depend on the one before it (a space at the start of a word), so every piece is decoded together
    with the piece before. Cost: O(tokens since the last whole character) for each `add`.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._context: list[int] = []  # the tokens of the last piece that was shown
        self._pending: list[int] = []

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; "" while a character is incomplete."""
        self._pending += token_ids
        if not self._pending:
            return ""
        before = self._decode(self._context) if self._context else ""
        text = self._decode([*self._context, *self._pending])
        if not text.endswith(UNFINISHED):
            return self._show(len(self._pending), text[len(before) :])
        return self._show_whole_part(before, text)

    def flush(self) -> str:
        """What is left at the end, whole or not."""
        if not self._pending:
            return ""
        before = self._decode(self._context) if self._context else ""
        return self._show(len(self._pending), self._decode([*self._context, *self._pending])[len(before) :])

    def _show_whole_part(self, before: str, text: str) -> str:
        """The text before an incomplete character at the end, whose tokens are among the last three.

        A cut is good where both sides decode alone to what they decode to together: it splits no character.
        """
        count = len(self._pending)
        for kept in range(CHARACTER_BYTES_MAX - 1, 0, -1):
            if kept < count:
                head = self._decode([*self._context, *self._pending[:-kept]])
                if head + self._decode(self._pending[-kept:]) == text:
                    return self._show(count - kept, head[len(before) :])
        if count >= PENDING_TOKENS_MAX:
            return self._show(count, text[len(before) :])
        return ""

    def _show(self, count: int, piece: str) -> str:
        if piece:
            self._context = self._pending[:count]
        else:  # tokens that show nothing (special ones) are no context
            self._context += self._pending[:count]
            self._context = self._context[-PENDING_TOKENS_MAX:]
        self._pending = self._pending[count:]
        return piece


class StopStrings:
    """Cuts text before the first stop string, or after it with `keep`. What could be the beginning of one is held back.
    Not thread-safe."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._stops = tuple(stops)
        self._keep = keep
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str) -> str:
        """The text that may be shown now. When a stop string is complete, `matched` is set and the rest is dropped."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            place, self.matched = min(found, key=lambda one: (one[0], -len(one[1])))
            self._held = ""
            return text[: place + (len(self.matched) if self._keep else 0)]
        held = max(_overlap(text, stop) for stop in self._stops)
        shown, self._held = text[: len(text) - held], text[len(text) - held :]
        return shown

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that are a beginning of `stop`, not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
