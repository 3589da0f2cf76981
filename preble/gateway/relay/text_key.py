"""Prompts as what routing compares where their token ids are not known: their text in prompt order, some bytes a
"token" (4, or what `text_lengths.py` has learned).

Owns which fields of a body bear the prompt and in which order they stand in it. Every message is padded to whole
tokens, so that a conversation's key begins with the key of the turns before. Images, audio and video are runs of ids by
their content; where a part names an address, the address is its content.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ...multimodal import content_token_ids
from .body import RelayedBody
from .form import UploadBody

TokenIds = npt.NDArray[np.int32]

TEXT_BYTES_MAX = 4 << 20  # of one prompt that are compared
MEDIA_TOKENS = {"image": 256, "audio": 256, "video": 1024}  # what a part costs, about: only the engine knows
UPLOAD_TOKEN_BYTES, UPLOAD_TOKENS_MAX = 512, 16_384  # a token of an audio file, about
PARTS_MAX = 16_384
BILLING = "x-anthropic-billing-header"  # begins a line that Claude Code changes with each request; engines drop it

_INT31 = 2**31 - 1
_ODD = np.uint64(0x9E3779B97F4A7C15)
_PADDING = bytes(7)
_encode = msgspec.json.Encoder(order="sorted").encode
_MEDIA = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
    "video_url": "video",
    "video": "video",
    "document": "image",
    "input_file": "image",
}


class KeyBuilder:
    """A key as it grows: texts, and runs of ids between them. Stops to grow at its bound.

    `token_bytes`: so many bytes of text are a token, one of `TOKEN_BYTES`. `has_ids`: there is more in it than text.
    """

    def __init__(self, token_bytes: int = 4, bytes_max: int = TEXT_BYTES_MAX) -> None:
        self.has_ids = False
        self._token_bytes = token_bytes
        self._left = bytes_max
        self._parts: list[bytes] = []
        self._runs: list[TokenIds] = []

    def text(self, data: bytes) -> None:
        """Add text, padded to whole tokens."""
        if self._left <= 0:
            return
        data = data[: self._left]
        self._left -= len(data)
        self._parts += (data, _PADDING[: -len(data) % self._token_bytes])

    def ids(self, ids: array[int]) -> None:
        """Add token ids."""
        if self._left <= 0:
            return
        self.has_ids = True
        ids = ids[: -(-self._left // 4)]
        self._left -= 4 * len(ids)
        if self._parts:
            self._runs.append(_words(b"".join(self._parts), self._token_bytes))
            self._parts.clear()
        self._runs.append(np.frombuffer(ids, dtype=np.int32) & np.int32(_INT31))

    def finish(self) -> TokenIds:
        """The key: non-negative int32."""
        words = _words(b"".join(self._parts), self._token_bytes)
        return np.concatenate((*self._runs, words)) if self._runs else words


def _words(text: bytes, token_bytes: int) -> TokenIds:
    """Whole tokens of so many bytes each as non-negative int32: as they are, or what they are hashed to."""
    words: TokenIds
    if token_bytes == 8:
        words = (np.frombuffer(text, dtype="<u8") * _ODD >> np.uint64(33)).astype(np.int32)
    elif token_bytes == 4:
        words = np.frombuffer(text, dtype="<i4") & np.int32(_INT31)
    else:
        words = np.frombuffer(text, dtype=f"<u{token_bytes}").astype(np.int32)
    return words


def media_ids(part: Any) -> array[int] | None:
    """The run of ids that stands for an image, audio clip or video of a message; None for another part."""
    kind = part.get("type") if isinstance(part, dict) else None
    medium = _MEDIA.get(kind) if isinstance(kind, str) else None
    return None if medium is None else _content_ids(medium, part)


def text_key(body: RelayedBody, token_bytes: int = 4) -> TokenIds:
    """The prompt of a body as far as it can be made out; empty where there is none. Any thread may call it."""
    return prompt_text(body, token_bytes).finish()


def prompt_text(body: RelayedBody, token_bytes: int) -> KeyBuilder:
    """The same, before it is finished."""
    key = KeyBuilder(token_bytes)
    try:
        _ORDERS.get(body.endpoint.kind, _rest)(body, key)
    except RecursionError:  # nested deeper than it can be written again
        key = KeyBuilder(token_bytes)
        key.text(body.data)
    return key


# --- by kind of endpoint ----------------------------------------------------------------------------------------------


def _chat(body: RelayedBody, key: KeyBuilder) -> None:
    _tools(body, key)
    _messages(body.value("messages"), key)


def _anthropic(body: RelayedBody, key: KeyBuilder) -> None:
    _tools(body, key)
    _content(body.value("system"), key)
    _messages(body.value("messages"), key)


def _responses(body: RelayedBody, key: KeyBuilder) -> None:
    _tools(body, key)
    _content(body.value("instructions"), key)
    given = body.value("input")
    if isinstance(given, list):
        _messages(given, key)
    else:
        _content(given, key)


def _completions(body: RelayedBody, key: KeyBuilder) -> None:
    _prompts(body.value("prompt"), key)


def _generate(body: RelayedBody, key: KeyBuilder) -> None:
    for kind in ("image", "audio", "video"):
        for content in _flat(body.value(f"{kind}_data")):
            key.ids(_content_ids(kind, content))
    for name in ("text", "input_ids"):
        _prompts(body.value(name), key)


def _embeddings(body: RelayedBody, key: KeyBuilder) -> None:
    _prompts(body.value("input"), key)
    _messages(body.value("messages"), key)


def _rerank(body: RelayedBody, key: KeyBuilder) -> None:
    _content(body.value("query"), key)
    for document in _flat(body.value("documents")):
        _content(document, key)


def _upload(body: RelayedBody, key: KeyBuilder) -> None:
    """A file by its content: as many ids as it is long, about."""
    if isinstance(body, UploadBody):
        key.ids(content_token_ids(body.digest, min(body.file_bytes // UPLOAD_TOKEN_BYTES, UPLOAD_TOKENS_MAX) + 1))


def _rest(body: RelayedBody, key: KeyBuilder) -> None:
    """Endpoints of which only the length matters: tokenising, scoring, pooling."""
    for name in sorted(body.fields.keys() - {"model", "cache_salt", "extra_key"}):
        key.text(bytes(body.fields[name]))


_ORDERS: dict[str, Callable[[RelayedBody, KeyBuilder], None]] = {
    "chat": _chat,
    "completions": _completions,
    "responses": _responses,
    "messages": _anthropic,
    "count_tokens": _anthropic,
    "generate": _generate,
    "embeddings": _embeddings,
    "rerank": _rerank,
    "audio": _upload,
}


# --- parts of prompts -------------------------------------------------------------------------------------------------


def _tools(body: RelayedBody, key: KeyBuilder) -> None:
    """Tool definitions, which chat templates put before the messages; what else the template reads goes with them."""
    for name in ("chat_template", "chat_template_kwargs", "documents", "tools", "functions"):
        if name in body.fields and body.given(name):
            key.text(_encode(body.value(name)))


def _messages(messages: Any, key: KeyBuilder) -> None:
    if not isinstance(messages, list):
        _content(messages, key)
        return
    for message in messages:
        if isinstance(message, dict):
            _message(message, key)
        else:
            key.text(_encode(message))


def _message(message: dict[str, Any], key: KeyBuilder) -> None:
    """Role, content, then the rest in an order of its own: two clients may write the same message differently."""
    content = message.get("content")
    role = message.get("role")
    others: dict[str, Any] = {}
    if len(message) > 2 or content is None or role is None:
        others = {one: value for one, value in message.items() if one not in ("role", "content") and value is not None}
    head = role if isinstance(role, str) else ""
    if isinstance(content, list) and len(content) == 1 and _is_text(content[0]):  # the same, written otherwise
        content = content[0]["text"]
    if head == "system" and isinstance(content, str) and content.startswith(BILLING):
        content = content.partition("\n")[2]
    if isinstance(content, str) and not others:
        key.text(f"{head}\n{content}".encode("utf-8", "replace"))
        return
    key.text(head.encode("utf-8", "replace"))
    _content(content, key)
    if others:
        key.text(_encode(others))


def _content(content: Any, key: KeyBuilder) -> None:
    if isinstance(content, str):
        key.text(content.encode("utf-8", "replace"))
    elif isinstance(content, list):
        for part in content[:PARTS_MAX]:
            _part(part, key)
    elif content is not None:
        key.text(_encode(content))


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _part(part: Any, key: KeyBuilder) -> None:
    if isinstance(part, str):
        key.text(part.encode("utf-8", "replace"))
        return
    if not isinstance(part, dict):
        key.text(_encode(part))
        return
    text, kind, ids = part.get("text"), part.get("type"), media_ids(part)
    if ids is not None:
        key.ids(ids)
    elif isinstance(text, str):
        if text.startswith(BILLING):
            text = text.partition("\n")[2]
        key.text(text.encode("utf-8", "replace"))
    elif kind == "tool_result":
        key.text(_encode({name: value for name, value in part.items() if name not in ("content", "cache_control")}))
        _content(part.get("content"), key)
    else:
        key.text(_encode({name: value for name, value in part.items() if name != "cache_control"}))


def _content_ids(medium: str, part: Any) -> array[int]:
    return content_token_ids(sha256(_payload(part)).digest(), MEDIA_TOKENS[medium])


def _payload(part: Any) -> bytes:
    """What makes an image or clip the one it is: its base64 text, or its address, wherever an API puts it."""
    if isinstance(part, str):
        head, comma, data = part.partition(",")
        inline = comma and head.startswith("data:")
        return (data if inline else part).encode("utf-8", "replace")
    if not isinstance(part, dict):
        return bytes(_encode(part))
    for name in ("source", "image_url", "audio_url", "video_url", "input_audio", "url", "data", "image", "file_id"):
        inner = part.get(name)
        if inner is not None:
            return _payload(inner)
    return bytes(_encode(part))


def _prompts(given: Any, key: KeyBuilder) -> None:
    """Text, token ids, or a list of either."""
    if isinstance(given, list) and given and all(type(one) is int for one in given):
        key.ids(array("i", [one & _INT31 for one in given]))
    elif isinstance(given, list):
        for one in given:
            _prompts(one, key)
    else:
        _content(given, key)


def _flat(given: Any) -> Iterable[Any]:
    if isinstance(given, list):
        for one in given:
            yield from _flat(one)
    elif given is not None:
        yield given
