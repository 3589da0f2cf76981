"""OpenAI's responses (/v1/responses) as the chat that SGLang and vLLM make of them before they render it.

Owns those two ways (as of SGLang 0.5.23 and vLLM 0.32), for instructions, messages, calls of functions and their
outputs. What else there is (an answer to go on from, reasoning, developer messages, tools of the server's own) is for
the engine to render, and the request is routed by its text.
"""

from __future__ import annotations

from typing import Any

from ...errors import InvalidInput
from .body import RelayedBody

Message = dict[str, Any]
_ELSEWHERE = ("previous_response_id", "reasoning", "prompt", "conversation", "previous_input_messages")
_ROLES = ("user", "assistant")


def chat_of_responses(body: RelayedBody, engine: str) -> dict[str, Any] | None:
    """The fields of a chat (as `chat_prompt` takes them); None where only the engine knows.

    Raises `InvalidInput` for what no engine takes.
    """
    if any(body.given(name) for name in _ELSEWHERE):
        return None
    instructions, given = body.value("instructions"), body.value("input")
    if not isinstance(instructions, str | None):
        return None
    chat: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else _objects(given)
    for item in items:
        made = _message(item, engine)
        if made is None:
            return None
        if not (
            made["role"] == "assistant" and chat and chat[-1]["role"] == "assistant" and _merge(chat[-1], made, engine)
        ):
            chat.append(made)
    tools = _objects(body.value("tools") or [])
    if any(tool.get("type") != "function" for tool in tools):
        return None
    fields: dict[str, Any] = {"messages": chat}
    if tools:
        fields["tools"] = [_tool(tool, engine) for tool in tools]
    for name in ("tool_choice", "chat_template_kwargs"):
        if body.given(name):
            fields[name] = body.value(name)
    return fields


def _message(item: dict[str, Any], engine: str) -> Message | None:
    """The message of an item; None for a kind that only the engine knows."""
    kind = item.get("type")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {
            "role": "assistant",
            "tool_calls": [{"id": item.get("call_id"), "type": "function", "function": function}],
        }
    if kind == "function_call_output":
        output = item.get("output")
        made = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
        return made if isinstance(output, str) else None
    role, content = item.get("role"), item.get("content")
    if kind not in (None, "message") or role not in _ROLES:
        return None
    if isinstance(content, list):
        parts = [_part(part) for part in _objects(content)]
        if role == "assistant" and not (len(parts) == 1 and "text" in parts[0]):
            return None  # vLLM takes the first part only, SGLang all
        content = parts if role == "user" or engine == "sglang" else parts[0]["text"]
    return {"role": role, "content": content}


def _part(part: dict[str, Any]) -> dict[str, Any]:
    """Text as chats name it; images as they are."""
    is_text = part.get("type") in ("input_text", "output_text", "text")
    return {"type": "text", "text": part.get("text")} if is_text else part


def _merge(before: Message, made: Message, engine: str) -> bool:
    """Make one message of two of the assistant, as the engine does; whether it does."""
    calls, content = made.get("tool_calls"), made.get("content")
    if calls:
        before["tool_calls"] = [*before.get("tool_calls", []), *calls]
        return True
    if before.get("content") is None:
        before["content"] = content
        return True
    if engine != "sglang":
        return False
    if isinstance(before["content"], str) and isinstance(content, str):
        before["content"] = f"{before['content']}\n\n{content}"
    else:
        before["content"] = [*_as_parts(before["content"]), *_as_parts(content)]
    return True


def _as_parts(content: Any) -> list[Any]:
    return list(content) if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def _tool(tool: dict[str, Any], engine: str) -> dict[str, Any]:
    function = {name: value for name, value in tool.items() if name != "type"}
    if engine == "sglang":
        function = {name: tool.get(name) for name in ("name", "description", "parameters")}
        function["strict"] = bool(tool.get("strict", False))
    return {"type": "function", "function": function}


def _objects(given: Any) -> list[dict[str, Any]]:
    if not (isinstance(given, list) and all(isinstance(one, dict) for one in given)):
        raise InvalidInput("input and tools: a list of objects is needed")
    return given
