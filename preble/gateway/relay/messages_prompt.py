"""Anthropic's messages (/v1/messages) as the chat that SGLang and vLLM make of them before they render it.

Owns those two ways (as of SGLang 0.5.23 and vLLM 0.32), for texts, images, tool calls and their results, and vLLM's
thinking. What else a conversation holds is for the engine to render, and the request is routed by its text.
"""

from __future__ import annotations

import json
from typing import Any

from ...errors import InvalidInput
from .body import RelayedBody
from .text_key import BILLING

Message = dict[str, Any]


def chat_of_messages(body: RelayedBody, engine: str) -> dict[str, Any] | None:
    """The fields of a chat (as `chat_prompt` takes them); None where only the engine knows.

    Raises `InvalidInput` for what no engine takes.
    """
    if body.given("output_config"):
        return None
    sglang = engine == "sglang"
    chat: list[Message] = []
    try:
        system = _system(body.value("system"), sglang)
        chat += [{"role": "system", "content": system}] if system else []
        for message in _objects(body.value("messages")):
            _Turn(message, chat, sglang).take()
        tools = body.value("tools")
        fields: dict[str, Any] = {"messages": chat}
        if tools:
            fields["tools"] = [_tool(tool, sglang) for tool in _objects(tools)]
    except _OnlyTheEngine:
        return None
    if sglang:  # vLLM shows all tools, whatever the choice
        fields["tool_choice"] = _choice(body.small("tool_choice"))
    if body.given("chat_template_kwargs"):
        fields["chat_template_kwargs"] = body.value("chat_template_kwargs")
    thinking = body.small("thinking")
    if not sglang and isinstance(thinking, dict) and thinking.get("type") == "disabled":
        fields["reasoning_effort"] = "none"
    return fields


class _OnlyTheEngine(Exception):
    """What a conversation holds is rendered in a way that is not known here."""


class _Turn:
    """One of Anthropic's messages, which may become several of a chat."""

    def __init__(self, message: Message, chat: list[Message], sglang: bool) -> None:
        self._role = message.get("role")
        if self._role not in ("user", "assistant"):
            raise _OnlyTheEngine
        self._content = message.get("content")
        self._chat = chat
        self._sglang = sglang
        self._parts: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []
        self._reasoning: list[str] = []

    def take(self) -> None:
        """Add it to the chat."""
        if isinstance(self._content, str):
            self._chat.append({"role": self._role, "content": self._content})
            return
        for block in _objects(self._content):
            self._block(block)
        made: Message = {"role": self._role}
        if self._reasoning:
            made["reasoning"] = "".join(self._reasoning)
        if self._calls:
            made["tool_calls"] = self._calls
        if self._parts:
            made["content"] = _content(self._parts)
        elif self._role == "user":
            return  # nothing but results of tools, which are messages of their own
        elif self._sglang and not self._calls:
            made["content"] = ""
        self._chat.append(made)

    def _block(self, block: dict[str, Any]) -> None:
        kind, text = block.get("type"), block.get("text")
        if kind == "text" and isinstance(text, str):
            if text or self._sglang:
                self._parts.append({"type": "text", "text": text})
        elif kind == "image":
            self._parts.append(_image(block))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            function = {"name": block.get("name") or "", "arguments": arguments}
            self._calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and self._role == "user":
            self._result(block)
        elif kind == "thinking" and not self._sglang:
            self._reasoning.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking" or self._sglang:
            raise _OnlyTheEngine

    def _result(self, block: dict[str, Any]) -> None:
        content = block.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else _objects(content or [])
        if any(part.get("type") not in ("text", "image") for part in parts):
            raise _OnlyTheEngine
        texts = [part.get("text") or "" for part in parts if part["type"] == "text"]
        images = [_image(part) for part in parts if part["type"] == "image"]
        made: Message = {"role": "tool", "tool_call_id": block.get("tool_use_id") or ""}
        if not self._sglang:
            self._chat.append({**made, "content": "\n".join(texts)})
            self._chat += [{"role": "user", "content": images}] if images else []
            return
        if self._parts:
            self._chat.append({"role": "user", "content": _content(self._parts)})
            self._parts = []
        kept = [_image(part) if part["type"] == "image" else part for part in parts if part.get("text") != ""]
        shown = [part if part["type"] != "text" else {"type": "text", "text": part.get("text")} for part in kept]
        self._chat.append({**made, "content": _content(shown) if shown else ""})


def _content(parts: list[dict[str, Any]]) -> Any:
    """The content of a message: a single text as it is, else parts."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else list(parts)


def _image(block: dict[str, Any]) -> dict[str, Any]:
    """An image as a part of a chat; what makes it the one it is stays as it was."""
    return {"type": "image_url", "image_url": block.get("source")}


def _system(system: Any, sglang: bool) -> str:
    if system is None or isinstance(system, str):
        return system or "" if not sglang or (system or "").strip() else ""
    texts = [block.get("text") or "" for block in _objects(system) if block.get("type") == "text"]
    if sglang:
        return "\n".join(text for text in texts if text)
    return "".join(text for text in texts if not text.startswith(BILLING))


def _tool(tool: dict[str, Any], sglang: bool) -> dict[str, Any]:
    if "input_schema" not in tool:  # of the engine's or Anthropic's own
        raise _OnlyTheEngine
    description = tool.get("description")
    function = {"name": tool.get("name"), "description": (description or "") if sglang else description}
    function |= {"parameters": tool["input_schema"], "strict": tool.get("strict", False if sglang else None)}
    if sglang:
        return {"type": "function", "function": function, "defer_loading": tool.get("defer_loading")}
    return {"type": "function", "function": {**function, "defer_loading": tool.get("defer_loading")}}


def _choice(choice: Any) -> Any:
    kind = choice.get("type") if isinstance(choice, dict) else None
    return {"function": {"name": choice.get("name")}} if kind == "tool" else "none" if kind == "none" else None


def _objects(given: Any) -> list[dict[str, Any]]:
    if not (isinstance(given, list) and all(isinstance(one, dict) for one in given)):
        raise InvalidInput("messages, system and tools: a list of objects is needed")
    return given
