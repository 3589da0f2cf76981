"""Chats that are more than plain messages: tools, calls in the history, reasoning, variables of the template. Owns what
of that a body may say, how it becomes a prompt, and what grammar a choice of tools asks for; calls are read out of
answers by `text.tool_calls`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from ...errors import InvalidInput
from ...types import Grammar, SamplingParams
from ..core.gateway import Gateway
from ..core.http_errors import ApiError, wrong
from ..relay.chat_prompt import CHAT_FIELDS, ChatPrompt, chat_prompt
from ..text.chat_template import ChatTemplate
from ..text.tool_calls import SPECIAL_MARKS, ToolCall, ToolCallReader, format_of
from .fields import is_given, is_one_of
from .schemas import ChatRequest, Message

TOOLS_MAX = 1024
_NO_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_BESIDE_TEXT = ("tool_calls", "tool_call_id", "reasoning", "reasoning_content")
_FIELDS = ("tools", "chat_template_kwargs", "reasoning_effort", "documents")
_NOTHING: tuple[Any, ...] = ([], {}, "", 0, None)


class ToolUse(msgspec.Struct, frozen=True):
    """What a chat wants done with its tools: the format of calls in the answer, whose arguments it is where a function
    is named, the grammar that makes it so, and whether one call is all that is wanted."""

    format: str
    function: str = ""
    grammar: Grammar | None = None
    single: bool = False

    def reader(self) -> ToolCallReader:
        """For one answer."""
        return ToolCallReader(self.format, self.function, single=self.single)

    def shown(self, number: int, call: ToolCall) -> dict[str, Any]:
        """A call as answers have it. Mistral's templates take ids of nine letters and digits only."""
        name = secrets.token_hex(5)[:9] if self.format == "mistral" else f"call_{secrets.token_hex(12)}"
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": number, "id": name, "type": "function", "function": function}

    @property
    def shows_special_tokens(self) -> bool:
        """Whether its marks are special tokens."""
        return self.format in SPECIAL_MARKS


def _says(raw: msgspec.Raw) -> bool:
    return is_given(raw) and not is_one_of(raw, _NOTHING)


def is_plain(request: ChatRequest) -> bool:
    """Whether messages are all that a template needs to know."""
    if request.continue_final_message or request.add_generation_prompt is False:
        return False
    if any(_says(getattr(request, name)) for name in _FIELDS):
        return False
    return not any(_has_more(message) for message in request.messages)


def _has_more(message: Message) -> bool:
    return message.role == "tool" or any(_says(getattr(message, name)) for name in _BESIDE_TEXT)


def prompt_maker(body: bytes, template: ChatTemplate, engine: str) -> Callable[[], list[Any]]:
    """Makes the prompt of a chat, to be called in a thread: it may be long. That raises `InvalidInput`."""

    def make() -> list[Any]:
        try:
            chat = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            given = {name: msgspec.json.decode(chat[name]) for name in CHAT_FIELDS if name in chat}
        except _NO_JSON as error:
            raise InvalidInput(f"the chat is not JSON: {type(error).__name__}") from error
        prompt: ChatPrompt | None = chat_prompt(given, template, engine)
        if prompt is None or prompt.media:
            raise InvalidInput("messages: only text is taken here")
        return prompt.pieces(template)

    return make


class _Function(msgspec.Struct):
    name: str
    parameters: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))

    def schema(self) -> Any:
        """What its arguments must be. Raises `ApiError`."""
        try:
            return msgspec.json.decode(self.parameters) or {"type": "object"}
        except _NO_JSON as error:
            raise wrong("tools: parameters must be a JSON schema", "tools") from error


class _Tool(msgspec.Struct):
    function: _Function
    type: str = "function"


class _Named(msgspec.Struct):
    name: str


class _Choice(msgspec.Struct):
    function: _Named
    type: str = "function"


def tool_use(request: ChatRequest, template: Callable[[], ChatTemplate | None]) -> ToolUse | None:
    """What is wanted, by the model's template where that says how; None where there are no tools, or none shall be
    called. Raises `ApiError`."""
    if not _says(request.tools):
        if _says(request.tool_choice) and not is_one_of(request.tool_choice, ("none", "auto")):
            raise wrong("tool_choice needs tools", "tool_choice")
        return None
    functions = {tool.function.name: tool.function for tool in _tools(request.tools)}
    choice = _choice(request.tool_choice)
    if choice == "none":
        return None
    single = request.parallel_tool_calls is False
    if choice == "required":
        return ToolUse("list", grammar=_grammar(_any_call(functions, single)), single=single)
    if isinstance(choice, _Choice):
        function = functions.get(choice.function.name)
        if function is None:
            raise wrong("tool_choice names none of the tools", "tool_choice")
        return ToolUse("arguments", function.name, _grammar(function.schema()))
    found = template()
    known = None if found is None else format_of(found.tool_source)
    if known is None:
        message = "tools: how this model writes calls is not known here; tool_choice may be required, or name one"
        raise ApiError(400, message, param="tools", code="unsupported_parameter")
    return ToolUse(known, single=single)


def _tools(raw: msgspec.Raw) -> list[_Tool]:
    try:
        tools = msgspec.json.decode(raw, type=list[_Tool])
    except _NO_JSON as error:
        raise wrong("tools must be a list of functions, each with a name", "tools") from error
    if len(tools) > TOOLS_MAX:
        raise wrong(f"tools: {len(tools)} are more than {TOOLS_MAX}", "tools")
    return tools


def _choice(raw: msgspec.Raw) -> str | _Choice:
    if not is_given(raw):
        return "auto"
    try:
        choice: str | _Choice = msgspec.json.decode(raw, type=str | _Choice)
    except _NO_JSON as error:
        raise wrong("tool_choice must be none, auto, required, or name a function", "tool_choice") from error
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise wrong("tool_choice must be none, auto, required, or name a function", "tool_choice")
    return choice


def _any_call(functions: dict[str, _Function], single: bool) -> dict[str, Any]:
    """One call, or more where not just one is wanted, as a schema."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"type": "string", "enum": [name]}, "parameters": function.schema()},
            "required": ["name", "parameters"],
        }
        for name, function in functions.items()
    ]
    return {"type": "array", "minItems": 1, **({"maxItems": 1} if single else {}), "items": {"anyOf": calls}}


def _grammar(schema: Any) -> Grammar:
    try:
        return Grammar("json_schema", json.dumps(schema))
    except InvalidInput as error:
        raise wrong(f"tools: {str(error).removeprefix('Grammar.text: ')}", "tools") from error


def with_tools(gateway: Gateway, sampling: SamplingParams, tools: ToolUse) -> SamplingParams:
    """What else is asked for where a call must come. Raises `ApiError` where no worker's engine can make sure of it, or
    another grammar is asked for."""
    if tools.grammar is None:
        return sampling
    if sampling.grammar is not None:
        raise wrong("tool_choice: a call cannot have another form as well", "tool_choice")
    asked = replace(sampling, grammar=tools.grammar)
    if gateway.missing_field(asked) == tools.grammar.kind:
        message = "tool_choice: no worker's engine has structured output, so that only auto and none are possible"
        raise ApiError(400, message, param="tool_choice", code="unsupported_parameter")
    return asked
