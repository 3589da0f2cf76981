"""Chats as an engine gives them to the model's template: SGLang and vLLM each change messages and tools before.

Owns those two ways (as of SGLang 0.5.23 and vLLM 0.32), and where images, audio and video stand in the prompt: a mark
goes through the template in place of each, and becomes a run of ids by its content. What a chat asks for beyond that
(a template of its own, a cut) is not rendered here: None.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...errors import InvalidInput
from ..text.chat_template import ChatTemplate
from ..text.tokenizing import Piece
from .body import RelayedBody
from .text_key import BILLING, media_ids

MEDIA_MAX = 1024  # of one chat
# With these a prompt is what only the engine makes of it.
ELSEWHERE = ("chat_template", "truncate_prompt_tokens", "mm_processor_kwargs", "audio")
CHAT_FIELDS: tuple[str, ...] = (
    *ELSEWHERE,
    "messages",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "reasoning_effort",
    "documents",
)
CHAT_FIELDS += ("add_special_tokens", "add_generation_prompt", "continue_final_message")
_MARK = re.compile("\ue000preble-part-(\\d{1,6})\ue001")
_FUNCTION = ("name", "description", "parameters", "strict", "defer_loading")
_PART = ("type", "text", "refusal", "thinking", "closed", "uuid")
_SGLANG_MEDIA = ("image", "audio", "video", "vision")


@dataclass(slots=True)
class ChatPrompt:
    """What a template is given, and what follows its text. `media` are the ids of the marks in the messages."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    prefix: str = ""
    media: list[array[int]] = field(default_factory=list)

    def pieces(self, template: ChatTemplate) -> list[Piece]:
        """The prompt: texts, and ids between them. Raises `InvalidInput` where the template refuses it."""
        text = template.render(
            self.messages,
            tools=self.tools,
            variables=self.variables,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )
        pieces: list[Piece] = [text]
        if self.media:
            split = _MARK.split(text)
            pieces = [split[0]]
            for number, after in zip(split[1::2], split[2::2], strict=True):
                pieces += (self.media[int(number)], after) if int(number) < len(self.media) else (after,)
        return [*pieces, self.prefix] if self.prefix else pieces


def chat_of(body: RelayedBody) -> dict[str, Any]:
    """The fields of a body that a chat's prompt depends on, as objects."""
    return {name: body.value(name) for name in CHAT_FIELDS if name in body.fields}


def chat_prompt(chat: Mapping[str, Any], template: ChatTemplate, engine: str) -> ChatPrompt | None:
    """A chat (`chat_of`) as `engine` ("sglang", else vLLM's way) would render it; None where that cannot be known.

    Raises `InvalidInput` for messages that no engine takes.
    """
    messages = chat.get("messages")
    if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
        raise InvalidInput("messages: must be a list of objects")
    if any(chat.get(name) is not None for name in ELSEWHERE) or chat.get("add_special_tokens") is True:
        return None
    tools = chat.get("tools")
    if not isinstance(tools, list | None):
        raise InvalidInput("tools: must be a list")
    return (_sglang if engine == "sglang" else _vllm)(chat, template, messages, tools)


class _Media:
    """The images and clips of one chat, numbered as they come."""

    def __init__(self) -> None:
        self.found: list[array[int]] = []

    def mark(self, part: Mapping[str, Any]) -> dict[str, Any] | None:
        """A part of text that stands for an image or clip; None for a part that is none."""
        ids = media_ids(part)
        if ids is None:
            return None
        if len(self.found) >= MEDIA_MAX:
            raise InvalidInput(f"messages: more than {MEDIA_MAX} images and clips")
        self.found.append(ids)
        return {"type": "text", "text": f"\ue000preble-part-{len(self.found) - 1}\ue001"}


# --- vLLM -------------------------------------------------------------------------------------------------------------


def _vllm(
    chat: Mapping[str, Any], template: ChatTemplate, messages: list[dict[str, Any]], tools: list[Any] | None
) -> ChatPrompt:
    media = _Media()
    given = [_vllm_message(message, template.takes_parts, media) for message in messages]
    if "developer" not in template.source:
        given = [_as_system(one) if one["role"] == "developer" else one for one in given]
    variables = _object(chat, "chat_template_kwargs")
    effort = chat.get("reasoning_effort")
    if effort is not None:
        variables.setdefault("enable_thinking", effort != "none")
        variables["reasoning_effort"] = effort
    if chat.get("documents") is not None:
        variables["documents"] = chat.get("documents")
    generation, going_on = (variables.pop(name, None) for name in ("add_generation_prompt", "continue_final_message"))
    if chat.get("add_generation_prompt") is not None:
        generation = chat.get("add_generation_prompt")
    return ChatPrompt(
        given,
        None if tools is None else [_tool(tool, ordered=True) for tool in tools],
        variables,
        add_generation_prompt=generation is not False,
        continue_final_message=bool(chat.get("continue_final_message") or going_on),
        media=media.found,
    )


def _vllm_message(message: dict[str, Any], takes_parts: bool, media: _Media) -> dict[str, Any]:
    role = _role(message)
    parts = _vllm_parts(message.get("content"), media)
    if role == "system":
        parts = _without_billing(parts)
    texts = [part["text"] for part in parts if part["type"] == "text"]
    as_parts = takes_parts and not (role == "tool" and len(texts) == len(parts))
    given: dict[str, Any] = {"role": role, "content": parts if as_parts else "\n".join(texts)}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            given["tool_calls"] = [_vllm_call(call) for call in _objects(calls)]
        reasoning = message.get("reasoning")
        reasoning = message.get("reasoning_content") if reasoning is None else reasoning
        if reasoning is not None:
            given["reasoning"] = given["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        given["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        given["name"] = message["name"]
    if role == "developer":
        given["tools"] = message.get("tools")
    return given


def _vllm_parts(content: Any, media: _Media) -> list[dict[str, Any]]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    found = []
    for part in [{"type": "text", "text": one} if isinstance(one, str) else one for one in _parts(content)]:
        text = next((part[name] for name in ("text", "refusal", "thinking") if isinstance(part.get(name), str)), None)
        marked = media.mark(part)
        if marked is None and text is None:
            raise InvalidInput("messages: a part of a kind that is not known")
        others = {name: value for name, value in part.items() if name not in _PART}
        found.append(marked or {"type": "text", "text": text, **others})
    return found


def _vllm_call(call: dict[str, Any]) -> dict[str, Any]:
    given = _call(call, strict=False)
    function = {name: given["function"][name] for name in ("arguments", "name") if name in given["function"]}
    return {"id": call.get("id"), "function": function, "type": given["type"]}


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**message, "role": "system"}.items() if name != "tools"}


def _without_billing(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A system message without the line that an agent changes with each request, which vLLM leaves out, too."""
    kept = []
    for part in parts:
        if part["text"].startswith(BILLING):
            part = {**part, "text": part["text"].partition("\n")[2]}
            if not part["text"]:
                continue
        kept.append(part)
    return kept


# --- SGLang -----------------------------------------------------------------------------------------------------------


def _sglang(
    chat: Mapping[str, Any], template: ChatTemplate, messages: list[dict[str, Any]], tools: list[Any] | None
) -> ChatPrompt:
    media = _Media()
    takes_parts = template.takes_parts or any(word in template.source for word in _SGLANG_MEDIA)
    given = [_sglang_message(message, takes_parts, media) for message in messages]
    prefix = ""
    if given[-1]["role"] == "assistant" and isinstance(given[-1]["content"], str):
        if chat.get("continue_final_message"):
            prefix = given.pop()["content"]
        else:
            given[-1] = {"role": "user", "content": given[-1]["content"]}
    effort = chat.get("reasoning_effort")
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    variables.update(_object(chat, "chat_template_kwargs"))
    if effort is not None:
        for name in ("thinking", "enable_thinking"):
            variables.setdefault(name, effort != "none")
    choice = chat.get("tool_choice")
    chosen = _function_of(choice).get("name") if isinstance(choice, dict) else None
    kept = [] if choice == "none" else _objects(tools or [])
    kept = [tool for tool in kept if chosen is None or _function_of(tool).get("name") == chosen]
    return ChatPrompt(
        given, [_tool(tool, ordered=False) for tool in kept] or None, variables, prefix=prefix, media=media.found
    )


def _sglang_message(message: dict[str, Any], takes_parts: bool, media: _Media) -> dict[str, Any]:
    role = _role(message)
    content = message.get("content")
    if isinstance(content, list):
        parts = [one for one in (_sglang_part(part, media) for part in _objects(content)) if one is not None]
        texts = [part["text"] for part in parts]
        content = parts if takes_parts and role != "tool" else " ".join(texts)
    elif not isinstance(content, str | None):
        raise InvalidInput("messages: content must be text or a list of parts")
    given: dict[str, Any] = {"role": role, "content": "" if content is None else content}
    if role == "user":
        return given
    for name in ("tool_call_id", "name", "phase", "reasoning_content", "prefix"):
        if message.get(name) is not None:
            given[name] = message[name]
    if message.get("tool_calls") is not None:
        given["tool_calls"] = [_sglang_call(call) for call in _objects(message["tool_calls"])]
    if message.get("tools") is not None:
        given["tools"] = [_tool(tool, ordered=False) for tool in _objects(message["tools"])]
    if takes_parts and isinstance(message.get("content"), list):
        given["content"] = given.pop("content")  # it comes last then: a template may write a message as it is
    return given


def _sglang_part(part: dict[str, Any], media: _Media) -> dict[str, Any] | None:
    if part.get("type") in ("text", "input_text") and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    return media.mark(part)


def _sglang_call(call: dict[str, Any]) -> dict[str, Any]:
    given = _call(call, strict=True)
    function = {name: given["function"].get(name) for name in ("name", "arguments")}
    return {"id": call.get("id"), "index": call.get("index"), "type": given["type"], "function": function}


# --- both -------------------------------------------------------------------------------------------------------------


def _role(message: dict[str, Any]) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidInput("messages: each needs a role")
    return role


def _object(chat: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = chat.get(name)
    if not isinstance(value, dict | None):
        raise InvalidInput(f"{name}: must be an object")
    return value or {}


def _objects(given: Any) -> list[dict[str, Any]]:
    if not (isinstance(given, list) and all(isinstance(one, dict) for one in given)):
        raise InvalidInput("messages and tools: a list of objects is needed")
    return given


def _parts(content: Any) -> list[Any]:
    if not (isinstance(content, list) and all(isinstance(part, dict | str) for part in content)):
        raise InvalidInput("messages: content must be text or a list of parts")
    return content


def _call(call: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    """A tool call with its arguments as an object, as templates expect them. `strict`: SGLang refuses other JSON."""
    function = _function_of(call)
    arguments = function.get("arguments")
    if isinstance(arguments, str) and (arguments or strict):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
            if strict:
                raise InvalidInput("messages: arguments of a tool call are no JSON") from None
            arguments = {}
    if not strict and not isinstance(arguments, dict):
        arguments = {}
    return {**call, "type": call.get("type", "function"), "function": {**function, "arguments": arguments}}


def _function_of(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidInput("tools: each needs a function")
    return function


def _tool(tool: Any, *, ordered: bool) -> dict[str, Any]:
    """A tool as templates see it: `ordered` in vLLM's order, with what it adds; else as the client wrote it."""
    function = _function_of(tool if isinstance(tool, dict) else {})
    if ordered:
        shown = {name: function.get(name) for name in _FUNCTION if name in function or name in _FUNCTION[:3]}
    else:
        shown = {name: value for name, value in function.items() if name in _FUNCTION}
        shown |= {name: None for name in ("description", "parameters") if name not in shown}
    for name in _FUNCTION[3:]:
        if shown.get(name, 0) is None:
            del shown[name]
    outer = {"type": tool.get("type", "function"), "function": shown}
    defer = tool.get("defer_loading")
    return outer if ordered and defer is None else {**outer, "defer_loading": defer}
