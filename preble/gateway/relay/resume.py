"""Going on with a stream at another server after the first one was lost: whether that can be done, what the other
server is asked, and how its events go on where the first one's stopped. Owns the rules; sends nothing.

What can be gone on with is plain text: one choice of one prompt that is text or messages, with nothing in the request
but the fields of `_PLAIN`. Penalties, structured output, tools, log probabilities, echoes and fields nobody here knows
depend on tokens that the other server would not have made, so such a stream ends where it broke.

| endpoint             | what the other server is asked                                                                |
|----------------------|-----------------------------------------------------------------------------------------------|
| /v1/chat/completions | the messages and the text so far as an assistant's, `continue_final_message`                  |
| /v1/completions      | the prompt and the text so far                                                                |
| /generate            | the same, or the prompt's token ids and those so far                                          |

Its limit on output is less by the tokens that have come: as many as /generate says; elsewhere those of the text, by the
model's tokenizer where there is one, else one for each event. Its events get the first server's id, time and model;
the role is not said again; tokens in `usage` and `meta_info` are those of both.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...errors import InvalidInput, QueueFull
from ..api.openai import COMPLETION_MAX_TOKENS
from ..text.tokenizing import TextCodec
from .body import RelayedBody

KINDS = frozenset({"chat", "completions", "generate"})
DONE_DATA = b"[DONE]"

_COMMON = frozenset(
    {"model", "stream", "stream_options", "user", "metadata", "cache_salt", "prompt_cache_key", "priority"}
)
_SAMPLING = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed", "sampling_seed", "stop", "stop_token_ids", "ignore_eos", "n"}
    | {"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "include_stop_str_in_output"}
)
_LIMITS = {"chat": ("max_completion_tokens", "max_tokens"), "completions": ("max_tokens",)}
GENERATE_TOKENS = 128  # the limit that engines take at /generate where none is named
_PLAIN = {
    "chat": _COMMON | _SAMPLING | {"messages", "max_tokens", "max_completion_tokens", "chat_template_kwargs"},
    "completions": _COMMON | _SAMPLING | {"prompt", "max_tokens"},
    "generate": _COMMON | {"text", "input_ids", "sampling_params", "rid"},
}
_ENVELOPE = ("id", "created", "model", "system_fingerprint")
_encode = msgspec.json.encode


def can_resume(body: RelayedBody) -> bool:
    """Whether the stream that a body asks for could be gone on with elsewhere."""
    kind = body.endpoint.kind
    if kind not in KINDS or not body.stream or body.n != 1 or body.prompts != 1:
        return False
    if any(body.given(name) for name in body.fields.keys() - _PLAIN[kind]):
        return False
    options = body.small("stream_options") or {}
    if not isinstance(options, dict) or options.keys() - {"include_usage"}:
        return False
    sampling = body.value("sampling_params") or {}
    if not isinstance(sampling, dict) or sampling.keys() - _SAMPLING - {"max_new_tokens"}:
        return False
    if not all(type(limit) is int for limit in _limits(body).values()):
        return False  # engines may take it for a number
    if kind == "chat":
        return body.given("messages")
    if kind == "completions":
        return _is_text(body, "prompt")
    return _is_text(body, "text") or (body.given("input_ids") and not body.given("text"))


def output_limit(body: RelayedBody) -> int | None:
    """The most output tokens that an engine makes for a body that can be gone on with; None where there is no limit."""
    return next(iter(_limits(body).values()), None)


def _limits(body: RelayedBody) -> dict[str, Any]:
    """What bounds the output, by the names of its fields; the first one counts. Where none is given, what engines take
    then."""
    kind = body.endpoint.kind
    if kind == "generate":
        limit = (body.value("sampling_params") or {}).get("max_new_tokens", GENERATE_TOKENS)
        return {} if limit is None else {"max_new_tokens": limit}
    if kind == "completions" and "max_tokens" not in body.fields:
        return {"max_tokens": COMPLETION_MAX_TOKENS}
    return {name: body.small(name) for name in _LIMITS[kind] if body.given(name)}


def names_enough(body: RelayedBody, first: bytes) -> bool:
    """Whether a stream that begins so says what another server needs: after a prompt of ids, those that came."""
    return body.endpoint.kind != "generate" or body.given("text") or b'"output_ids"' in first


async def count_tokens(found: Emitted, codec: TextCodec | None) -> None:
    """Count the tokens of the text by the model's tokenizer, where the events do not say and may hold several each."""
    if codec is None or found.kind == "generate" or not found.text:
        return
    with contextlib.suppress(QueueFull, InvalidInput):
        found.tokens = max(found.tokens, len(await codec.encode(found.text, special_tokens=False)))


def _is_text(body: RelayedBody, name: str) -> bool:
    return body.given(name) and bytes(memoryview(body.fields[name])[:1]) == b'"'


@dataclass(slots=True)
class Emitted:
    """What a client has been sent of one stream."""

    kind: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # of /generate, where the server names them
    tokens: int = 0  # at least so many; see `count_tokens`
    envelope: dict[str, Any] = field(default_factory=dict)  # of the first event
    has_role: bool = False
    finish_reason: Any = None
    has_usage: bool = False  # in an event of its own
    is_cumulative: bool = False  # each event repeats all text

    @property
    def reason(self) -> str | None:
        """Why it ended, in one word; None where it has not."""
        reason = self.finish_reason.get("type") if isinstance(self.finish_reason, dict) else self.finish_reason
        return reason if isinstance(reason, str) else None

    def has_all(self, limit: int | None) -> bool:
        """Whether as many tokens have come as there may be."""
        return limit is not None and self.tokens >= limit


def emitted_by(kind: str, events: bytes, cumulative: bool = False) -> Emitted | None:
    """What these events have said; None where they hold more than plain text."""
    found = Emitted(kind, is_cumulative=cumulative)
    for event in events.split(b"\n\n"):
        if event.startswith(b":") or not event.strip():
            continue
        data = event.partition(b"data:")[2].strip()
        if data == DONE_DATA:
            continue
        try:
            value = msgspec.json.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        if not isinstance(value, dict) or not (_take_meta(found, value) if kind == "generate" else _take(found, value)):
            return None
    return found


def _take(found: Emitted, event: dict[str, Any]) -> bool:
    """Add an event in OpenAI's shape; whether it is plain text."""
    if not found.envelope:
        found.envelope = {name: event[name] for name in _ENVELOPE if name in event}
    choices = event.get("choices")
    if not isinstance(choices, list) or len(choices) > 1 or "error" in event:
        return False
    found.has_usage |= not choices and isinstance(event.get("usage"), dict)
    for choice in choices:
        if not isinstance(choice, dict) or choice.get("index") not in (0, None) or choice.get("logprobs"):
            return False
        delta = choice.get("delta", {}) if found.kind == "chat" else {"content": choice.get("text")}
        if not isinstance(delta, dict):
            return False
        others = [name for name, value in delta.items() if value and name not in ("role", "content")]
        text = delta.get("content") or ""
        if others or not isinstance(text, str):
            return False
        found.has_role |= bool(delta.get("role"))
        found.text += text
        found.tokens += bool(text)
        found.finish_reason = choice.get("finish_reason") or found.finish_reason
    return True


def _take_meta(found: Emitted, event: dict[str, Any]) -> bool:
    """Add an event of /generate; whether it is plain text."""
    meta, text, ids = event.get("meta_info"), event.get("text", ""), event.get("output_ids")
    if not isinstance(meta, dict) or not isinstance(text, str) or meta.get("output_token_logprobs"):
        return False
    if not found.envelope:
        found.envelope = {name: meta[name] for name in ("id", "prompt_tokens") if name in meta}
    found.text = text if found.is_cumulative else found.text + text
    if isinstance(ids, list):
        found.token_ids = ids if found.is_cumulative else found.token_ids + ids
    count = meta.get("completion_tokens")
    found.tokens = max(found.tokens, count) if type(count) is int else found.tokens + 1
    found.finish_reason = meta.get("finish_reason") or found.finish_reason
    return True


def continuation(body: RelayedBody, found: Emitted) -> dict[str, bytes] | None:
    """What is edited into the body so that another server goes on; {} where nothing has come yet, None where it cannot
    be said."""
    if not found.text and not found.token_ids:
        return {}
    left = {name: max(limit - found.tokens, 1) for name, limit in _limits(body).items()}
    if body.endpoint.kind == "generate":
        return _continued_generate(body, found, left)
    limits = {name: _encode(count) for name, count in left.items()}
    if body.endpoint.kind == "completions":
        return {"prompt": _encode(str(body.value("prompt")) + found.text), **limits}
    messages = body.value("messages")
    if not isinstance(messages, list) or not messages:
        return None
    further = {"role": "assistant", "content": found.text}
    return {
        "messages": _encode([*messages, further]),
        "continue_final_message": b"true",
        "add_generation_prompt": b"false",
        **limits,
    }


def _continued_generate(body: RelayedBody, found: Emitted, left: dict[str, int]) -> dict[str, bytes] | None:
    changes = {"sampling_params": _encode({**(body.value("sampling_params") or {}), **left})}
    if body.given("text"):
        return {"text": _encode(str(body.value("text")) + found.text), **changes}
    ids = body.value("input_ids")
    if not isinstance(ids, list) or len(found.token_ids) != found.tokens:
        return None
    return {"input_ids": _encode([*ids, *found.token_ids]), **changes}


class Continued:
    """The events of another server, as those that go on with what a client was sent."""

    def __init__(self, found: Emitted) -> None:
        self._found = found

    def event(self, event: bytes) -> bytes:
        """One event, without the blank line behind it; b"" for one that says nothing new."""
        data = event.partition(b"data:")[2].strip()
        if data == DONE_DATA or not data:
            return event
        try:
            value = msgspec.json.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return event
        if not isinstance(value, dict) or "error" in value:
            return event
        changed = self._meta(value) if self._found.kind == "generate" else self._openai(value)
        return b"data: " + _encode(changed) if changed else b""

    def _openai(self, value: dict[str, Any]) -> dict[str, Any]:
        found = self._found
        value |= {name: found.envelope[name] for name in _ENVELOPE if name in found.envelope and name in value}
        usage = value.get("usage")
        if isinstance(usage, dict):
            _add(usage, "prompt_tokens", -found.tokens)
            _add(usage, "completion_tokens", found.tokens)
        for choice in value.get("choices") or ():
            delta = choice.get("delta") if isinstance(choice, dict) else None
            if not (found.has_role and isinstance(delta, dict) and delta.pop("role", None)):
                continue
            if not any(delta.values()) and not choice.get("finish_reason"):
                return {}
        return value

    def _meta(self, value: dict[str, Any]) -> dict[str, Any]:
        found, meta, text, ids = self._found, value.get("meta_info"), value.get("text"), value.get("output_ids")
        if isinstance(meta, dict):
            meta |= found.envelope
            _add(meta, "completion_tokens", found.tokens)
            reason = meta.get("finish_reason")
            if isinstance(reason, dict):
                _add(reason, "length", found.tokens)
        if found.is_cumulative:
            if isinstance(text, str):
                value["text"] = found.text + text
            if isinstance(ids, list):
                value["output_ids"] = [*found.token_ids, *ids]
        return value


def _add(counts: dict[str, Any], name: str, by: int) -> None:
    if type(counts.get(name)) is int:
        counts[name] += by


def closing(found: Emitted, prompt_tokens: int, include_usage: bool) -> bytes:
    """The events that end a stream whose tokens have all come, as far as its server has not sent them."""
    events: list[dict[str, Any]] = []
    kind = "chat.completion.chunk" if found.kind == "chat" else "text_completion"
    envelope = {**found.envelope, "object": kind}
    if found.finish_reason is None and found.kind != "generate":
        body: dict[str, Any] = {"delta": {}} if found.kind == "chat" else {"text": ""}
        events.append({**envelope, "choices": [{"index": 0, **body, "logprobs": None, "finish_reason": "length"}]})
    if include_usage and not found.has_usage:
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": found.tokens}
        events.append({**envelope, "choices": [], "usage": {**usage, "total_tokens": prompt_tokens + found.tokens}})
    return b"".join(b"data: " + one + b"\n\n" for one in (*map(_encode, events), DONE_DATA))
