"""What an answer says of itself, read in passing: usage, cached tokens, finish reasons, its id, whether output has
begun. Owns where engines write it; changes no byte, but for the usage event that the gateway itself asked for.

Only events that hold what is looked for are decoded: a JSON string cannot hold an unescaped quote, so that a name in
quotes with a colon behind it is a field. Most of a stream are whole events with one more token each; those pass after
two searches for bytes (`_is_plain`).
"""

from __future__ import annotations

import itertools
import re
from typing import Any, TypeGuard

import msgspec

from .endpoints import Endpoint

WHOLE_BYTES_MAX = 256 << 10  # of an answer that is no stream, kept to be read at its end; of a longer one, its tail
EVENT_BYTES_MAX = 1 << 20  # of one event; a longer one passes unread
TAIL_BYTES = 16 << 10

_END = re.compile(rb"\r?\n\r?\n")
# One quote begins all of it, so that the search goes from quote to quote.
_OF_INTEREST = re.compile(rb'"(?:(?:usage|prompt_tokens)"\s*:\s*[{\d]|(?:finish_reason|stop_reason)"\s*:\s*["{])')
_ENDS_CHOICE = re.compile(rb'"finish_reason"\s*:\s*"')
_OUTPUT = re.compile(rb"delta|content_block|output_item")
_NUMBER = re.compile(rb'"([a-z_]+_tokens)"\s*:\s*(\d{1,10})')
_ID = re.compile(rb'"response"\s*:\s*\{\s*"id"\s*:\s*"([\w-]{1,120})"')
_NULL = (b":null", b": null")
# Looked for by `find`: where `in` is asked of bytes, it first tries whether it was given a number.
_REASON, _USAGE, _COUNTS, _INDEX = b'_reason"', b'usage"', b'prompt_tokens"', b'"index"'
_USAGE_FIELD = b'"usage"'
_PROMPT = ("prompt_tokens", "input_tokens")
_OUTPUTS = ("completion_tokens", "output_tokens")


class UsageReader:
    """Reads one answer as its bytes pass. `first_token`: output has begun. Counts are None while they are not known.

    `remove_usage`: take the event with nothing but the usage out of the stream; events pass whole then, and what has
    come of one that is not whole yet is held back, at most `EVENT_BYTES_MAX`. So is an event that ends a choice until
    the next one is there: vLLM's last event has the `system_fingerprint`, which goes back to where it would have been.
    """

    def __init__(self, endpoint: Endpoint, stream: bool, *, remove_usage: bool = False) -> None:
        self.first_token = False
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.output_tokens: int | None = None
        self.finish_reasons: tuple[str, ...] = ()
        self.answer_id: str | None = None
        self._kind = endpoint.kind
        self._stream = stream
        self._remove = remove_usage and stream
        self._held = b""
        self._unread = b""  # of /generate: the latest events, whose counts stand for all before them
        self._begun = False  # the answer's id and that its output has begun are known
        self._whole: list[bytes] = []
        self._size = 0
        self._by_index: dict[int, tuple[int | None, int | None, int | None]] = {}  # /generate with several choices

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes of the answer; what of them, and of what was held back, is to be passed on."""
        if not self._stream:
            self._keep(chunk)
            return chunk
        if not self._held and chunk.endswith(b"\n\n") and self._is_plain(chunk):
            if not self._begun:
                self._read_beginning(chunk)
            return chunk
        return self._feed_removing(chunk) if self._remove else self._feed_reading(chunk)

    def end(self) -> bytes:
        """The answer has ended; what was held back."""
        if self._stream:
            held, self._held = self._held, b""
            if self._unread:
                self._read_events(self._unread)
            if held:
                self._read_event(held)
            return held if self._remove else b""
        self._read_whole(b"".join(self._whole))
        self._whole.clear()
        return b""

    @property
    def is_between_events(self) -> bool:
        """Whether plain events that come next say nothing new: output has begun, and nothing is held back."""
        return self._begun and not self._held

    # --- streams ------------------------------------------------------------------------------------------------------

    def _is_plain(self, events: bytes) -> bool:
        """Whether whole events say nothing that must be read now: no usage, and no choice ends."""
        if not (_is_null(events, _REASON) and _is_null(events, _USAGE)):
            return False
        if self._kind == "generate" and _COUNTS in events:
            if _INDEX in events or self._by_index.keys() != {0}:
                return False
            self._unread = events
        return True

    def _feed_reading(self, chunk: bytes) -> bytes:
        data = self._held + chunk if self._held else chunk
        last = _last_end(data)
        if last:
            self._read_events(data[:last] if last < len(data) else data)
        rest = data[last:]
        self._held = rest if len(rest) <= EVENT_BYTES_MAX else rest[-TAIL_BYTES:]
        return chunk

    def _feed_removing(self, chunk: bytes) -> bytes:
        data = self._held + chunk if self._held else chunk
        last = _end_to_pass(data)
        self._held = data[last:]
        whole = data[:last]
        if len(self._held) > EVENT_BYTES_MAX:
            whole, self._held, self._remove = data, b"", False
        if not whole:
            return b""
        self._read_events(whole)
        return _without_usage(whole) if whole.find(_USAGE_FIELD) >= 0 else whole

    def _read_events(self, data: bytes) -> None:
        if data.find(_COUNTS) >= 0:
            self._unread = b""
        if not self._begun:
            self._read_beginning(data)
        if _OF_INTEREST.search(data) is None:
            return
        events = _events_of(data)
        if self._kind == "generate" and len(events) > 2 and not self._by_index and b'"index"' not in data:
            events = [event for event in events if event.startswith(b"data: {")][-1:]
        for event in events:
            if _OF_INTEREST.search(event) is not None:
                self._read_event(event)

    def _read_beginning(self, data: bytes) -> None:
        if self.answer_id is None and self._kind == "responses":
            found = _ID.search(data)
            self.answer_id = None if found is None else found[1].decode()
        if not self.first_token:
            self.first_token = self._kind in ("chat", "completions", "generate") or _OUTPUT.search(data) is not None
        self._begun = self.first_token and (self.answer_id is not None or self._kind != "responses")

    def _read_event(self, event: bytes) -> None:
        self._take(_json_of(event))

    # --- whole answers ------------------------------------------------------------------------------------------------

    def _keep(self, chunk: bytes) -> None:
        self._whole.append(chunk)
        self._size += len(chunk)
        if self._size > WHOLE_BYTES_MAX:
            tail = b"".join(self._whole)[-TAIL_BYTES:]
            self._whole[:] = [tail]

    def _read_whole(self, data: bytes) -> None:
        if self._size > WHOLE_BYTES_MAX:
            self._numbers({name.decode(): int(count) for name, count in _NUMBER.findall(data)})
            return
        value = _decoded(data)
        if isinstance(value, dict) and isinstance(value.get("id"), str):
            self.answer_id = value["id"]
        self._take(value)

    # --- both ---------------------------------------------------------------------------------------------------------

    def _take(self, value: Any) -> None:
        """What an event or a whole answer says."""
        if isinstance(value, list):
            for number, one in enumerate(value):
                if isinstance(one, dict):
                    self._take({"index": number, **one})
            return
        if not isinstance(value, dict):
            return
        for holder in (value, value.get("response"), value.get("message"), value.get("delta")):
            if isinstance(holder, dict):
                self._usage(holder.get("usage"))
                self._reasons(holder)
        meta = value.get("meta_info")
        if isinstance(meta, dict):
            self._meta(meta, value.get("index"))

    def _usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        read = _count(usage.get("cache_read_input_tokens"))
        self._numbers({**usage, "cached_tokens": read if cached is None else cached})
        if self._kind == "messages" and "input_tokens" in usage and self.prompt_tokens is not None:
            self.prompt_tokens += (read or 0) + (_count(usage.get("cache_creation_input_tokens")) or 0)

    def _numbers(self, given: dict[str, Any]) -> None:
        prompt, output = _first_count(given, _PROMPT), _first_count(given, _OUTPUTS)
        cached = _count(given.get("cached_tokens"))
        self.prompt_tokens = self.prompt_tokens if prompt is None else prompt
        self.output_tokens = self.output_tokens if output is None else output
        self.cached_tokens = self.cached_tokens if cached is None else cached

    def _reasons(self, holder: dict[str, Any]) -> None:
        choices = holder.get("choices")
        found = [choice.get("finish_reason") for choice in choices if isinstance(choice, dict)] if choices else []
        if self._kind == "messages":
            found.append(holder.get("stop_reason"))
        if self._kind == "responses" and holder.get("status") in ("completed", "incomplete", "failed", "cancelled"):
            found.append(holder["status"])
        self.finish_reasons += tuple(reason for reason in found if isinstance(reason, str))

    def _meta(self, meta: dict[str, Any], index: Any) -> None:
        """SGLang's own: a choice's counts so far. Of several choices they are added up."""
        names = ("prompt_tokens", "cached_tokens", "completion_tokens")
        prompt, cached, output = (_count(meta.get(name)) for name in names)
        self._by_index[index if type(index) is int else 0] = (prompt, cached, output)
        self.prompt_tokens, self.cached_tokens, self.output_tokens = map(
            _sum, zip(*self._by_index.values(), strict=True)
        )
        reason = meta.get("finish_reason")
        if isinstance(reason, dict) and isinstance(reason.get("type"), str):
            self.finish_reasons += (reason["type"],)


class CountedBefore(UsageReader):
    """Of an answer that was counted when it was made, and is asked for again: it has no tokens, whatever it says."""

    def __init__(self, endpoint: Endpoint, stream: bool) -> None:
        super().__init__(endpoint, stream)
        self.prompt_tokens = self.output_tokens = 0
        self.finish_reasons = ("stop",)

    def feed(self, chunk: bytes) -> bytes:
        """All is passed on."""
        self.first_token = self._stream
        return chunk

    def end(self) -> bytes:
        """Nothing was held back."""
        return b""


def usage_reader(endpoint: Endpoint, stream: bool, *, remove_usage: bool = False) -> UsageReader:
    """A reader for one answer."""
    if endpoint.by_id:
        return CountedBefore(endpoint, stream)
    return UsageReader(endpoint, stream, remove_usage=remove_usage)


def _is_null(events: bytes, name: bytes) -> bool:
    """Whether a field, whose name ends so, is null wherever it stands."""
    at = events.find(name)
    while at >= 0:
        at += len(name)
        if not events.startswith(_NULL, at):
            return False
        at = events.find(name, at)
    return True


def _last_end(data: bytes) -> int:
    """Where the last whole event ends; 0 if none does."""
    plain, other = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
    return max(plain + 2 if plain >= 0 else 0, other + 4 if other >= 0 else 0)


def _events_of(data: bytes) -> list[bytes]:
    """Whole events without their ends, and what is behind the last one."""
    return data.split(b"\n\n") if data.find(b"\r") < 0 else _END.split(data)


def _end_to_pass(data: bytes) -> int:
    """Where the last whole event ends that need not wait for the next one."""
    last = _last_end(data)
    start = _last_end(data[: max(last - 2, 0)])
    return start if _ENDS_CHOICE.search(data, start, last) else last


def _without_usage(data: bytes) -> bytes:
    """Whole events without those that hold nothing but the usage."""
    kept: list[bytes] = []
    at = 0
    for event in _with_ends(data):
        at += len(event)
        value = _json_of(event) if event.find(_USAGE_FIELD) >= 0 else None
        if not _is_usage(value):
            kept.append(event)
        elif kept:
            kept[-1] = _with_fingerprint(kept[-1], value.get("system_fingerprint"))
    return b"".join(kept) + data[at:]


def _with_ends(data: bytes) -> list[bytes]:
    """Whole events with their ends; without what is behind the last one."""
    if data.find(b"\r") < 0:
        return [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]
    ends = [0, *(end.end() for end in _END.finditer(data))]
    return [data[start:end] for start, end in itertools.pairwise(ends)]


def _with_fingerprint(event: bytes, fingerprint: Any) -> bytes:
    """A choice's last event as the engine writes it where nobody asks for the usage."""
    end = event.rfind(b"}")
    if end < 0 or not isinstance(fingerprint, str) or b'"system_fingerprint"' in event:
        return event
    return event[:end] + b',"system_fingerprint":' + msgspec.json.encode(fingerprint) + event[end:]


def _is_usage(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict) and value.get("choices") == [] and isinstance(value.get("usage"), dict)


def _json_of(event: bytes) -> Any:
    at = event.find(b"data:")
    return _decoded(event[at + 5 :]) if at >= 0 else None


def _decoded(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _sum(counts: tuple[int | None, ...]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _first_count(given: dict[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        count = _count(given.get(name))
        if count is not None:
            return count
    return None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**31 else None
