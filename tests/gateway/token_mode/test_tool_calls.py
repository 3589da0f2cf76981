"""Tools before workers of ours: which chats have them, what a model's calls look like, and that they come out of text
in pieces as they do out of the whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preble.errors import InvalidInput
from preble.gateway.api import schemas
from preble.gateway.api.tools import ToolUse, is_plain, prompt_maker, tool_use
from preble.gateway.core.http_errors import ApiError
from preble.gateway.text.chat_template import ChatTemplate
from preble.gateway.text.tool_calls import CALLS_MAX, ToolCall, ToolCallReader, format_of
from preble.transport import wire
from tests.support.gateway import TEMPLATE, GatewayProcess, make_tokenizer
from tests.support.transport import ScriptedWorker, asynchronous

openai = pytest.importorskip("openai", reason="needs the openai client: pip install 'preble[test]'")

CALL = '{"name": "weather", "arguments": {"city": "Ulm", "days": [1, 2]}}'
LLAMA = '{"name": "weather", "parameters": {"city": "Ulm"}}'
PARSED = ToolCall("weather", '{"city": "Ulm", "days": [1, 2]}')
ULM = ToolCall("weather", '{"city": "Ulm"}')
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"
# (format, function, what the model writes, the text that is shown, the calls)
ANSWERS: list[tuple[str, str, str, str, list[ToolCall]]] = [
    ("hermes", "", HERMES, "", [PARSED]),
    ("hermes", "", f"I look. {HERMES}", "I look. ", [PARSED]),
    ("hermes", "", f"{HERMES}\n{HERMES}", "", [PARSED, PARSED]),
    ("hermes", "", f"{HERMES}\n {HERMES}\n Done.\n", "\n Done.\n", [PARSED, PARSED]),
    ("hermes", "", "a < b <tool", "a < b <tool", []),
    ("hermes", "", "<tool_call>{}</tool_call> no", "<tool_call>{}</tool_call> no", []),
    ("hermes", "", "<tool_call>" + CALL, "<tool_call>" + CALL, []),
    ("mistral", "", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", [PARSED, PARSED]),
    ("mistral", "", f"So: [TOOL_CALLS][{CALL}]", "So: ", [PARSED]),
    ("mistral", "", "[TOOL_CALLS] not a list", "[TOOL_CALLS] not a list", []),
    ("mistral", "", "none [TOOL", "none [TOOL", []),
    ("llama", "", LLAMA, "", [ULM]),
    ("llama", "", f"  <|python_tag|>{LLAMA}", "", [ULM]),
    ("llama", "", f"{LLAMA}; {LLAMA}", "", [ULM, ULM]),
    ("llama", "", '{"answer": 42}', '{"answer": 42}', []),
    ("llama", "", "A plain answer {1}", "A plain answer {1}", []),
    ("list", "", f"[{LLAMA}, {LLAMA}]", "", [ULM, ULM]),
    ("list", "", '[{"na', '[{"na', []),
    ("arguments", "weather", '{"city": "Ulm"}', "", [ULM]),
    ("arguments", "weather", '{"city": "U', '{"city": "U', []),
]


def read(reader: ToolCallReader, *pieces: str) -> tuple[str, list[ToolCall]]:
    """All text and calls."""
    text, calls = "", []
    for found in (*map(reader.add, pieces), reader.flush()):
        text += found.text
        calls += found.calls
    assert reader.count == len(calls)
    return text, calls


@pytest.mark.parametrize(("kind", "function", "said", "text", "calls"), ANSWERS)
def test_calls_are_read_whole_and_in_any_pieces(
    kind: str, function: str, said: str, text: str, calls: list[ToolCall]
) -> None:
    assert read(ToolCallReader(kind, function), said) == (text, calls)
    assert read(ToolCallReader(kind, function), *said) == (text, calls)
    for cut in range(len(said)):
        assert read(ToolCallReader(kind, function), said[:cut], said[cut:]) == (text, calls)


@pytest.mark.parametrize(("kind", "function", "said", "text", "calls"), ANSWERS)
def test_where_one_call_is_wanted_further_ones_are_left_out(
    kind: str, function: str, said: str, text: str, calls: list[ToolCall]
) -> None:
    for pieces in ([said], list(said)):
        assert read(ToolCallReader(kind, function, single=True), *pieces) == (text, calls[:1])


def test_one_call_only_is_asked_for() -> None:
    one = use(tools=[TOOL], parallel_tool_calls=False)
    assert one == ToolUse("hermes", single=True) and use(tools=[TOOL], parallel_tool_calls=True) == ToolUse("hermes")
    required = use(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    assert required is not None and required.grammar is not None and required.single
    assert json.loads(required.grammar.text)["maxItems"] == 1
    assert read(one.reader(), HERMES * 2) == ("", [PARSED])


def test_text_that_is_no_call_is_shown_at_once() -> None:
    for kind in ("hermes", "mistral", "llama"):
        reader = ToolCallReader(kind)
        assert reader.add("It is ").text == "It is " and reader.add("warm").text == "warm"


def test_more_calls_than_the_bound_are_text() -> None:
    text, calls = read(ToolCallReader("hermes"), HERMES * (CALLS_MAX + 1))
    assert len(calls) == CALLS_MAX and text.endswith(f"<tool_call>\n{CALL}\n</tool_call>")
    many = f"[{', '.join([CALL] * (CALLS_MAX + 1))}]"
    assert read(ToolCallReader("list"), many) == (many, [])


def test_arguments_that_are_a_text_are_that_text() -> None:
    reader = ToolCallReader("hermes")
    assert read(reader, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>')[1] == [
        ToolCall("f", '{"a": 1}')
    ]
    assert read(ToolCallReader("hermes"), '<tool_call>{"name": "f"}</tool_call>')[1] == [ToolCall("f", "{}")]


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ('{"name": function name, "parameters": dictionary} {% if message.role == "ipython" %}', "llama"),
        ("<tool_call><function=name>", None),
        (TEMPLATE, None),
    ],
)
def test_the_template_says_which_format_its_model_writes(source: str, wanted: str | None) -> None:
    assert format_of(source) == wanted


# --- what a chat asks for ---------------------------------------------------------------------------------------------

TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
USER = [{"role": "user", "content": "Ulm?"}]
HERMES_TEMPLATE = (
    "{% if tools %}<|user|>tools: {{ tools | tojson }} in <tool_call><|end|>{% endif %}"
    "{% for message in messages %}<|user|>{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
)


def chat(**said: Any) -> schemas.ChatRequest:
    """A chat's body."""
    body = json.dumps({"messages": USER, **said}).replace('"HUGE"', "1e999")
    return schemas.decode(body.encode(), schemas.ChatRequest)


def use(template: str = HERMES_TEMPLATE, **said: Any) -> ToolUse | None:
    """What it wants of its tools."""
    return tool_use(chat(**said), lambda: ChatTemplate(template, {}))


def test_a_choice_of_tools_is_a_format_or_a_grammar() -> None:
    assert use() is None and use(tools=[]) is None and use(tools=[TOOL], tool_choice="none") is None
    assert use(tools=[TOOL]) == use(tools=[TOOL], tool_choice="auto") == ToolUse("hermes")
    named = use(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}})
    assert named is not None and (named.format, named.function) == ("arguments", "weather")
    assert named.grammar is not None and json.loads(named.grammar.text) == TOOL["function"]["parameters"]
    required = use(TEMPLATE, tools=[TOOL], tool_choice="required")
    assert required is not None and required.format == "list" and required.grammar is not None
    (call,) = json.loads(required.grammar.text)["items"]["anyOf"]
    assert call["properties"]["name"]["enum"] == ["weather"]


@pytest.mark.parametrize(
    ("template", "said", "param"),
    [
        (TEMPLATE, {"tools": [TOOL]}, "tools"),
        (HERMES_TEMPLATE, {"tools": [{"type": "function"}]}, "tools"),
        (
            HERMES_TEMPLATE,
            {"tools": [{"function": {"name": "f", "parameters": "HUGE"}}], "tool_choice": "required"},
            "tools",
        ),
        (HERMES_TEMPLATE, {"tools": {}, "tool_choice": "required"}, "tool_choice"),
        (HERMES_TEMPLATE, {"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice"),
        (HERMES_TEMPLATE, {"tools": [TOOL], "tool_choice": {"function": {"name": "other"}}}, "tool_choice"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(template: str, said: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        use(template, **said)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("said", "plain"),
    [
        ({}, True),
        ({"tools": [], "chat_template_kwargs": {}, "reasoning_effort": None}, True),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [], "refusal": None}]}, True),
        ({"tools": [TOOL]}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"continue_final_message": True}, False),
        ({"messages": [{"role": "tool", "content": "x"}]}, False),
        ({"messages": [{"role": "assistant", "reasoning_content": "x"}]}, False),
    ],
)
def test_plain_chats_take_the_short_way(said: dict[str, Any], plain: bool) -> None:
    assert is_plain(chat(**said)) is plain


def test_what_is_no_json_in_a_chat_is_refused_when_it_is_rendered() -> None:
    template = ChatTemplate(HERMES_TEMPLATE, {})
    for body in (b'{"messages": [{"role": "tool", "content": 1e999}]}', b'{"messages": [], "documents": ["\xff"]}'):
        with pytest.raises(InvalidInput):
            prompt_maker(body, template, "vllm")()


# --- through the gateway ----------------------------------------------------------------------------------------------


def saying(text: str, seen: list[str]) -> Callable[..., Any]:
    """A worker that writes this, a token a byte, and keeps the prompts."""

    async def script(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
        seen.append(bytes(token for token in submit.token_ids.tolist() if token < 256).decode())
        for i, token in enumerate(text.encode()):
            reason = "stop" if i == len(text.encode()) - 1 else None
            await worker.send(wire.OutputChunk(submit.request_id, i, (token,), 0, reason))

    return script


@asynchronous
async def test_an_agent_gets_its_calls_whole_and_streamed(tmp_path: Path) -> None:
    seen: list[str] = []
    worker = ScriptedWorker(saying(f"I look. {HERMES}", seen), worker_id="w", model="tiny", max_model_tokens=4000)
    model = make_tokenizer(tmp_path / "model", template=HERMES_TEMPLATE)
    log, arguments = tmp_path / "log", ("--tokenizer", str(model))
    gateway = await asyncio.to_thread(lambda: GatewayProcess("--workers", worker.endpoint, *arguments, log=log))
    try:
        await asyncio.to_thread(talk, gateway.url)
    finally:
        assert await asyncio.to_thread(gateway.stop) == 0
        await worker.close()
    assert all("tools: [{" in prompt and '"weather"' in prompt for prompt in seen)
    assert f"<tool_call>{json.dumps({'name': 'weather', 'arguments': {'city': 'Ulm', 'days': [1, 2]}})}" in seen[
        -1
    ].replace('{"arguments": {"city": "Ulm", "days": [1, 2]}, "name": "weather"}', CALL)


def talk(url: str) -> None:
    """A turn in one, the same streamed, and the next one with the tool's answer."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as api:
        asked: dict[str, Any] = {"model": "tiny", "messages": USER, "tools": [TOOL]}
        choice = api.chat.completions.create(**asked).choices[0]
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look. ")
        assert (call.function.name, call.function.arguments) == (PARSED.name, PARSED.arguments)
        text, calls, reason = "", [], None
        for event in api.chat.completions.create(stream=True, **asked):
            text += event.choices[0].delta.content or ""
            calls += event.choices[0].delta.tool_calls or []
            reason = event.choices[0].finish_reason or reason
        assert (text, reason, [one.index for one in calls]) == ("I look. ", "tool_calls", [0])
        assert calls[0].function.arguments == PARSED.arguments
        history = [*USER, choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "warm"}]
        assert api.chat.completions.create(**{**asked, "messages": history}).choices[0].message.tool_calls
        with pytest.raises(openai.BadRequestError) as refused:
            api.chat.completions.create(**asked, tool_choice="required")
        assert refused.value.param == "tool_choice"
