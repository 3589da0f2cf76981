"""Calls of tools in what a model writes. Owns the formats that are known here, which of them a chat template asks for,
and reading them out of text that comes in pieces.

    hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them, text around them
    mistral   [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...] at the end
    llama     {"name": ..., "parameters": {...}} is the whole answer, several with ";" between them
    list      [{"name": ..., "parameters": {...}}, ...] is the whole answer: what a grammar makes of `required`
    arguments the whole answer is one function's arguments: what a grammar makes of a named function

Text that may yet become a call is held back; what turns out to be none is text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

_BEGIN, _END = "<tool_call>", "</tool_call>"
_MISTRAL, _LLAMA = "[TOOL_CALLS]", "<|python_tag|>"
CALLS_MAX = 128  # in one answer; more are text
# What stands in a template whose model writes so, most telling first.
_SIGNS = (("mistral", (_MISTRAL,)), ("hermes", (_BEGIN,)), ("llama", ('"parameters"', "ipython")))
# Formats whose marks are special tokens, which are left out of text otherwise.
SPECIAL_MARKS = frozenset({"mistral", "llama"})


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


@dataclass(slots=True)
class Found:
    """What a piece of text brought: text that may be shown, and calls."""

    text: str = ""
    calls: Sequence[ToolCall] = ()


def format_of(template_source: str) -> str | None:
    """The format that a chat template asks its model for; None where it is none of those known here."""
    for name, signs in _SIGNS:
        if all(sign in template_source for sign in signs):
            # A template that gives arguments as XML shows no JSON between its marks.
            return None if "<function=" in template_source else name
    return None


class ToolCallReader:
    """Reads one answer as it comes. `function`: whose arguments the answer is, with "arguments". `single`: only the
    first call is wanted, further ones are left out. Not thread-safe.

    Cost: O(text) over all pieces, but for the mark's length.
    """

    def __init__(self, format: str, function: str = "", *, single: bool = False) -> None:
        self.count = 0
        self._single = single
        self._function = function
        self._step = {"hermes": self._hermes, "mistral": self._mistral, "llama": self._llama}.get(format, self._hold)
        self._read = {"mistral": _calls_of_list, "llama": _calls_of_objects, "list": _calls_of_list}.get(format)
        self._waiting = ""  # text that may become a call
        self._inside = False  # a call has begun
        self._after_call = False

    def add(self, text: str) -> Found:
        """What this text brings."""
        self._waiting += text
        return self._step()

    def flush(self) -> Found:
        """What was held back, when no more text comes."""
        text, self._waiting = self._waiting, ""
        if self._function:
            return self._as_calls(text, [ToolCall(self._function, text)] if _is_object(text) else None)
        if self._read is None or not (self._inside or self._step == self._hold):
            blank = self._after_call and not text.strip()
            return Found("" if blank else (_BEGIN if self._inside else "") + text)
        return self._as_calls(text, self._read(text.removeprefix(_MISTRAL).removeprefix(_LLAMA)))

    def _as_calls(self, text: str, calls: Sequence[ToolCall] | None) -> Found:
        if not calls or self.count + len(calls) > CALLS_MAX:
            return Found(text)
        if self._single:
            calls = calls[: 1 - self.count]
        self.count += len(calls)
        return Found("", calls)

    def _hold(self) -> Found:
        return Found()

    def _hermes(self) -> Found:
        """Blanks after a call are no text, unless text follows."""
        texts: list[str] = []
        calls: list[ToolCall] = []
        while True:
            before, found, after = self._waiting.partition(_END if self._inside else _BEGIN)
            if not found:
                break
            if self._inside:
                call = self._as_calls(_BEGIN + before + _END, _one_call(before))
                texts.append(call.text)
                calls += call.calls
                self._after_call = not call.text
            elif before.strip() or not self._after_call:
                texts.append(before)
            self._inside, self._waiting = not self._inside, after
        if not self._inside:
            shown = len(self._waiting) - _overlap(self._waiting, _BEGIN)
            if self._waiting[:shown].strip() or not self._after_call:
                texts.append(self._waiting[:shown])
                self._waiting = self._waiting[shown:]
                self._after_call = False
        return Found("".join(texts), calls)

    def _mistral(self) -> Found:
        return Found() if self._inside else self._until(_MISTRAL)

    def _until(self, mark: str) -> Found:
        """Text before a mark; from the mark on all is kept."""
        before, found, after = self._waiting.partition(mark)
        if found:
            self._inside, self._waiting = True, mark + after
            return Found(before)
        kept = _overlap(before, mark)
        self._waiting = before[len(before) - kept :]
        return Found(before[: len(before) - kept])

    def _llama(self) -> Found:
        """An answer that begins with an object, or with the mark, may be calls; any other is text."""
        begun = self._waiting.lstrip()
        if self._inside or not begun or _LLAMA.startswith(begun):
            return Found()
        if self._step == self._llama and (begun.startswith("{") or begun.startswith(_LLAMA)):
            self._inside, self._waiting = True, begun
            return Found()
        self._step = self._all_text
        return self._all_text()

    def _all_text(self) -> Found:
        text, self._waiting = self._waiting, ""
        return Found(text)


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of `text` that are a beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))
    parameters: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b""))

    def call(self) -> ToolCall:
        """As it goes to a client; arguments that are a text are that text."""
        raw = bytes(self.parameters) or bytes(self.arguments)
        return ToolCall(self.name, msgspec.json.decode(raw) if raw.startswith(b'"') else raw.decode())


def _decoded(text: str, kind: Any) -> Any:
    """The value, None where the text is none of that kind."""
    try:
        return msgspec.json.decode(text.encode("utf-8", "replace"), type=kind)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _one_call(text: str) -> list[ToolCall] | None:
    found = _decoded(text.strip(), _Call)
    return None if found is None else [found.call()]


def _calls_of_list(text: str) -> list[ToolCall] | None:
    found = _decoded(text.strip(), list[_Call])
    return None if not found else [one.call() for one in found]


def _calls_of_objects(text: str) -> list[ToolCall] | None:
    whole = _one_call(text)
    if whole is not None:
        return whole
    found = _decoded("[" + text.strip().replace("};", "},").replace("}; ", "},") + "]", list[_Call])
    return None if not found else [one.call() for one in found]


def _is_object(text: str) -> bool:
    return isinstance(_decoded(text.strip(), dict[str, msgspec.Raw]), Mapping)
