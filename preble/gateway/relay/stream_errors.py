"""A server's errors inside of streams whose status was 200: which of them are its own fault, so that the request can
go on elsewhere. Owns their shapes; sends nothing.

SGLang and vLLM answer 200 before they know whether a request will do. What goes wrong then is an event: OpenAI's error
object with a code that is a status, Anthropic's with a type, at /v1/responses a response that failed or an error, both
with a code in words, or, at /generate, a finish reason "abort" with a status.
A bad request (4xx, but for 429) is passed on as it is; so is an error that does not say whose fault it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

# Of events that hold no output, held back until it is known how a stream begins; those of /v1/responses repeat the
# request's instructions and tools, each of them.
OPENING_BYTES = 64 << 10
OPENING_BYTES_RESPONSES = 512 << 10
_END = re.compile(rb"\r?\n\r?\n")
_SERVERS = frozenset({"server_error", "internal_error", "internalservererror", "api_error"})
_FULL = frozenset({"overloaded_error", "serviceunavailableerror", "service_unavailable", "rate_limit_error"})
_FULL |= {"rate_limit_exceeded"}
_FAILURES = frozenset({"response.failed", "error"})
_OPENINGS = {
    "messages": frozenset({"message_start", "ping"}),
    "responses": frozenset({"response.created", "response.queued", "response.in_progress"}),
}


@dataclass(frozen=True, slots=True)
class ServerFault:
    """An error that is the server's fault. `full`: it takes no more requests. `start`: where in the bytes it stands."""

    text: str
    full: bool
    start: int


def server_fault(data: bytes) -> ServerFault | None:
    """The first event that is an error of the server's own; None where there is none. Looks closer only where one of
    the names of errors stands in the bytes."""
    if b'"error"' not in data and b'"abort"' not in data:
        return None
    for start, event in _events(data):
        status = _status_of(_json_of(event))
        if status is not None and (status >= 500 or status == 429):
            return ServerFault(f"the server's stream says error {status}", status in (429, 503), start)
    return None


def is_opening(kind: str, data: bytes) -> bool:
    """Whether this says only that an answer begins; what comes next may still be an error."""
    if len(data) > (OPENING_BYTES_RESPONSES if kind == "responses" else OPENING_BYTES):
        return False
    if _END.search(data) is None:
        return True
    if kind not in ("chat", "messages", "responses"):
        return False
    return all(_opens(kind, _json_of(event)) for _, event in _events(data) if event.strip())


def _events(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    for end in _END.finditer(data):
        yield at, data[at : end.start()]
        at = end.end()


def _json_of(event: bytes) -> Any:
    at = event.find(b"data:")
    try:
        return msgspec.json.decode(event[at + 5 :]) if at >= 0 else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _status_of(value: Any) -> int | None:
    """The status that an event would have had, were it an answer; None where it is no error, or does not say."""
    if not isinstance(value, dict):
        return None
    meta = value.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    if isinstance(reason, dict) and reason.get("type") == "abort":
        return _whole(reason.get("status_code"))
    error = value if value.get("object") == "error" else value.get("error")
    if not isinstance(error, dict) and value.get("type") in _FAILURES:
        response = value.get("response")
        error = response.get("error") if isinstance(response, dict) else value
    if not isinstance(error, dict):
        return None
    code = _whole(error.get("code"))
    if code is not None:
        return code
    words = {str(error.get(name) or "").lower() for name in ("type", "code")}
    return 503 if words & _FULL else 500 if words & _SERVERS else None


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value[:9])
    return value if type(value) is int else None


def _opens(kind: str, value: Any) -> bool:
    if not isinstance(value, dict):
        return value is None  # a comment
    if kind in _OPENINGS:
        return value.get("type") in _OPENINGS[kind]
    choices = value.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return False
    delta = choices[0].get("delta")
    return (
        choices[0].get("finish_reason") is None
        and isinstance(delta, dict)
        and bool(delta.get("role"))
        and not any(text for name, text in delta.items() if name != "role")
    )
