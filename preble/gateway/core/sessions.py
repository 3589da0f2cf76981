"""What a request belongs to, as its client says: sessions, their parents, their agents. Owns the names of the headers
and of the body's fields that say so, which of them counts, and how they become one bounded `SessionHint`.

    session   x-session-id, x-dynamo-session-id, x-claude-code-session-id, x-codex-session-id, session-id, session_id,
              x-codex-conversation-id, conversation_id, x-codex-turn-metadata, x-codex-window-id, x-session-affinity,
              x-smg-routing-key; then, of the body, prompt_cache_key, user
    parent    x-parent-session-id, x-dynamo-parent-session-id, x-claude-code-parent-agent-id, x-codex-parent-thread-id,
              x-codex-turn-metadata
    agent     x-claude-code-agent-id, x-codex-thread-id, thread-id, x-codex-turn-metadata

Of each the first counts that is there and is a name: 1 to 128 visible ASCII characters. What is none is passed over,
and no request fails for it. The fields of a body may name a person, so they become a keyless hash of theirs; several
conversations may have the same, so no request is placed by them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from ...types import SessionHint, is_session_name

SESSION_HEADERS = (
    "x-session-id",
    "x-dynamo-session-id",
    "x-claude-code-session-id",
    "x-codex-session-id",
    "session-id",
    "session_id",
    "x-codex-conversation-id",
    "conversation_id",
    "x-codex-turn-metadata",
    "x-codex-window-id",
    "x-session-affinity",
    "x-smg-routing-key",
)
PARENT_HEADERS = (
    "x-parent-session-id",
    "x-dynamo-parent-session-id",
    "x-claude-code-parent-agent-id",
    "x-codex-parent-thread-id",
    "x-codex-turn-metadata",
)
AGENT_HEADERS = ("x-claude-code-agent-id", "x-codex-thread-id", "thread-id", "x-codex-turn-metadata")
METADATA = b"x-codex-turn-metadata"  # JSON with session_id, thread_id, parent_thread_id
METADATA_BYTES_MAX = 4096
WINDOW = b"x-codex-window-id"  # SESSION:NUMBER
NO_SESSION = SessionHint()

_RANKS = tuple(
    {name.encode(): rank for rank, name in enumerate(names)}
    for names in (SESSION_HEADERS, PARENT_HEADERS, AGENT_HEADERS)
)
HINT_HEADERS = frozenset().union(*_RANKS)


class _TurnMetadata(msgspec.Struct):
    """What of x-codex-turn-metadata is read."""

    session_id: object = None
    parent_thread_id: object = None
    thread_id: object = None


def hint_of_headers(headers: Iterable[tuple[bytes, bytes]]) -> SessionHint:
    """The hint in ASGI headers, whose names are in small letters; of a header that comes twice the first counts."""
    given = [(name, value) for name, value in headers if name in HINT_HEADERS]
    return _hint_of(given) if given else NO_SESSION


def _hint_of(given: list[tuple[bytes, bytes]]) -> SessionHint:
    found = ["", "", ""]
    best = [len(HINT_HEADERS)] * 3
    for name, value in given:
        texts = _texts(name, value)
        for part, ranks in enumerate(_RANKS):
            rank = ranks.get(name, len(HINT_HEADERS))
            if rank < best[part] and is_session_name(texts[part]):
                best[part], found[part] = rank, texts[part]
    return SessionHint(found[0], found[1], found[2]) if any(found) else NO_SESSION


def _texts(name: bytes, value: bytes) -> tuple[str, str, str]:
    """What a header says of session, parent and agent."""
    if name == METADATA:
        return _metadata(value)
    text = value.decode("latin-1")
    if name == WINDOW:
        text = text.partition(":")[0]
    return text, text, text


def _metadata(value: bytes) -> tuple[str, str, str]:
    if len(value) > METADATA_BYTES_MAX:
        return "", "", ""
    try:
        read = msgspec.json.decode(value, type=_TurnMetadata)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return "", "", ""
    texts = [one if isinstance(one, str) else "" for one in (read.session_id, read.parent_thread_id, read.thread_id)]
    return texts[0], texts[1], texts[2]


def with_body(hint: SessionHint, *, prompt_cache_key: object = None, user: object = None) -> SessionHint:
    """The hint with what the body's fields say, where no header names a session. Fields that are no text, or none, say
    nothing."""
    if hint.session:
        return hint
    for kind, value in (("key", prompt_cache_key), ("user", user)):
        if isinstance(value, str) and value:
            digest = hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
            return replace(hint, session=f"{kind}-{digest}", shared=True)
    return hint
