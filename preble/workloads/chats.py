"""Reads chats: OpenAI's batch files and lines of messages, ShareGPT's conversations. Owns how messages become a prompt.

A message is its role, a colon, its text and a line end; the prompt ends in "assistant:". A model's own chat template
has other signs and about as many. Every message is tokenised on its own, and an answer is what was generated for it, so
that a conversation's next prompt begins with all of the one before and its answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..types import SessionHint
from .files import Collector, Row, json_objects
from .own import ids_of
from .types import Int32Array, PromptRequest

ANSWER = "assistant"
ANSWERERS = {"gpt", "chatgpt", "assistant", "model", "bot", "bing", "bard", "function_call"}
ASKERS = {"human": "user", "prompter": "user"}
GROUP_ROLES = ("system", "developer")
GENERATING = ("/chat/completions", "/completions", "/responses", "/messages")  # ends of paths
NO_TEXT = "parts of messages that are no text (images, audio, files), left out"


def read_chat(into: Collector) -> None:
    """OpenAI's batch lines (`custom_id`, `url`, `body` with `messages`, `prompt` or `input`), or objects with
    `messages`, the last of which is the answer where the assistant says it.

    Output lengths are `output_tokens` of the line, the answer's, else the default, at most `max_completion_tokens`,
    `max_tokens` or `max_output_tokens`. Requests for what generates nothing (embeddings) are left out and counted.
    Group: a hash of the system prompt.
    """
    for row in into.until_full(json_objects(into.path)):
        batched = "body" in row.values
        body = replace(row, values=fields_of(row)) if batched else row
        if "url" in row.values and not str(row.values["url"]).endswith(GENERATING):
            into.notes[f"requests to {str(row.values['url'])[:40]}, which generate nothing, left out"] += 1
            continue
        if not {"messages", "prompt", "input"} & set(body.values):
            raise row.wrong("a request must have 'messages', 'prompt' or 'input'")
        name = row.text("custom_id") if "custom_id" in row.values else f"{into.stem}-{row.line}"
        add_chat(into, row, body, name)


def fields_of(row: Row) -> dict[str, Any]:
    """The body of a batch line."""
    body = row.values["body"]
    if not isinstance(body, dict):
        raise row.wrong(f"'body' must be an object, got {body!r:.80}")
    return body


def add_chat(into: Collector, row: Row, body: Row, name: str) -> None:
    """A request of one line."""
    if "messages" not in body.values and "prompt" in body.values:
        parts = prompt_parts(into, body)
        group, output = name, into.length(row, most_of(body))
    else:
        messages = list(messages_of(into, body))
        answer = messages.pop()[1] if body is row and len(messages) > 1 and messages[-1][0] == ANSWER else None
        parts = [into.bos, *tools_of(into, body)]
        for role, text in messages:
            parts += message_parts(into, role, text)
        parts.append(into.encode(f"{ANSWER}:"))
        role, text = messages[0]
        group = f"{role}-{digest_of(text)}" if role in GROUP_ROLES else name
        output = answered(into, row, answer, most_of(body))
    into.add(row, name, parts, output, group=group, arrival_seconds=into.arrival(row))


def digest_of(text: str) -> str:
    """A short name of a text, which shows nothing of it: groups stand in tables and files."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def answered(into: Collector, row: Row, answer: str | None, most: int | None = None) -> tuple[int, Int32Array | None]:
    """(length, ids) of an answer that is recorded, else (what the line or the default says, None)."""
    if answer is None or row.values.get("output_tokens") is not None:
        return into.length(row, most)
    return into.output("", "", f" {answer}" if answer else "")


def prompt_parts(into: Collector, body: Row) -> list[Int32Array]:
    """The `prompt` of a completion: a text, or token ids."""
    prompt = body.values["prompt"]
    if isinstance(prompt, list):
        return [ids_of(body, prompt, "prompt")]
    return [into.bos, into.encode(body.text("prompt"))]


def most_of(body: Row) -> int | None:
    """The bound of an answer that the request asks for."""
    names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    return next((body.integer(name, 1) for name in names if body.values.get(name) is not None), None)


def tools_of(into: Collector, body: Row) -> list[Int32Array]:
    """The tools that a request offers, which stand in front."""
    tools = body.values.get("tools")
    return [into.encode(f"tools: {as_json(body, 'tools', tools)}\n")] if tools else []


def messages_of(into: Collector, body: Row) -> Iterator[tuple[str, str]]:
    """(role, text) of each message."""
    if isinstance(body.values.get("instructions"), str):
        yield "system", body.text("instructions")
    if isinstance(body.values.get("input"), str) and "messages" not in body.values:
        yield "user", body.text("input")
        return
    name = "messages" if "messages" in body.values else "input"
    for number, message in enumerate(body.items(name), 1):
        if not isinstance(message, dict):
            raise body.wrong(f"{name!r}, message {number} must be an object, got {message!r:.80}")
        role = message.get("role") or message.get("type") or "user"
        yield str(role), text_of(into, body, message, f"message {number}")


def text_of(into: Collector, row: Row, message: dict[str, Any], place: str) -> str:
    """What a message says: its text, the texts of its parts, the calls of tools, one after the other."""
    content = message.get("content", message.get("output"))
    texts = [content] if isinstance(content, str) else []
    if isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                texts.append(text)
            else:
                into.notes[NO_TEXT] += 1
    elif content is not None and not isinstance(content, str):
        raise row.wrong(f"{place}: 'content' must be text or a list of parts, got {content!r:.80}")
    for name in ("tool_calls", "function_call", "arguments"):
        if message.get(name):
            texts.append(as_json(row, name, message[name]))
    return "\n".join(texts)


def as_json(row: Row, name: str, value: Any) -> str:
    """A value that stands in a prompt as JSON."""
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise row.wrong(f"{name!r} cannot be written as JSON: {error}") from error


def message_parts(into: Collector, role: str, text: str) -> list[Int32Array]:
    """A message as parts; the assistant's so that what was generated is a part of its own."""
    if role != ANSWER:
        return [into.encode(f"{role}: {text}\n")]
    answer = [into.encode(f" {text}")] if text else []
    return [into.encode(f"{ANSWER}:"), *answer, into.encode("\n")]


# --- ShareGPT ---------------------------------------------------------------------------------------------------------


def read_sharegpt(into: Collector) -> None:
    """ShareGPT's list of `conversations`, of objects with `from` and `value` (or `role` and `content`): a closed loop.

    Every answer is a request, sent as soon as the one before is answered; a question at the end without an answer is
    one of the default length. A conversation without a question is left out, and counted. Group: the conversation.
    """
    for row in into.until_full(json_objects(into.path)):
        turns = row.values.get("conversations")
        if not isinstance(turns, list):
            raise row.wrong(f"'conversations' must be a list, got {turns!r:.80}")
        add_conversation(into, row, [turn_of(into, row, turn, number) for number, turn in enumerate(turns, 1)])


def turn_of(into: Collector, row: Row, turn: Any, number: int) -> tuple[str, str]:
    """(role, text) of a turn; who answers is the assistant."""
    if not isinstance(turn, dict):
        raise row.wrong(f"'conversations', turn {number} must be an object, got {turn!r:.80}")
    role = turn.get("from", turn.get("role"))
    if not isinstance(role, str):
        raise row.wrong(f"'conversations', turn {number} must have 'from', got {turn!r:.80}")
    value = turn.get("value", turn.get("content"))
    text = text_of(into, row, {**turn, "content": value}, f"'conversations', turn {number}")
    return ANSWER if role.lower() in ANSWERERS else ASKERS.get(role.lower(), role), text


def add_conversation(into: Collector, row: Row, turns: list[tuple[str, str]]) -> None:
    """The requests of a conversation, each after the one before."""
    session, after = f"{into.stem}-{row.line}", None
    parts, asked, count = [into.bos], False, 0
    for role, text in [*turns, ("", "")]:
        if into.full:
            return
        if asked and role in (ANSWER, ""):
            output = answered(into, row, None if not role else text)
            opened = tuple(part for part in (*parts, into.encode(f"{ANSWER}:")) if len(part))
            into.add_request(row, PromptRequest(
                f"{session}.{count:03d}", opened, output[0], session, into.arrival(row) if not count else 0.0, after,
                output_ids=output[1], hint=SessionHint(session=session),
            ))  # fmt: skip
            after, count, asked = into.requests[-1].request_id, count + 1, False
        elif role == ANSWER:
            into.notes["answers without a question, read as context"] += 1
        asked = asked or role not in (ANSWER, *GROUP_ROLES, "")
        parts += message_parts(into, role, text) if role else []
    if not count:
        into.notes["conversations without a question, left out"] += 1
