"""Chats as engines give them to the model's template: held against what SGLang and vLLM have made of them, and against
transformers. `tests/data/rendered_chats.json` was asked of SGLang 0.5.23 (`return_prompt_token_ids`) and vLLM 0.32
(`return_token_ids`), with templates that show everything they are given; of messages and responses, the engines told
the number of tokens.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from preble.errors import InvalidInput
from preble.gateway.relay.body import read_body
from preble.gateway.relay.chat_prompt import MEDIA_MAX, chat_of, chat_prompt
from preble.gateway.relay.endpoints import POSTS
from preble.gateway.relay.messages_prompt import chat_of_messages
from preble.gateway.relay.responses_prompt import chat_of_responses
from preble.gateway.relay.text_key import media_ids
from preble.gateway.text.chat_template import ChatTemplate
from tests.support.paths import ROOT

RENDERED = json.loads((ROOT / "tests" / "data" / "rendered_chats.json").read_text())
TEMPLATES = {name: ChatTemplate(source, {"bos_token": "<|begin|>"}) for name, source in RENDERED["templates"].items()}
PLAIN = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", {})
PARTS = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}",
    {},
)
PNG = "data:image/png;base64,iVBORw0KGgo="
IMAGE = {"type": "image_url", "image_url": {"url": PNG}}


def chat(**fields: Any) -> dict[str, Any]:
    return chat_of(read_body(json.dumps(fields).encode(), POSTS["/v1/chat/completions"]))


SEEN = [(way, i) for i, case in enumerate(RENDERED["chats"]) for way, text in case["rendered"].items() if text]


@pytest.mark.parametrize(("way", "number"), SEEN)
def test_a_chat_is_rendered_as_the_engine_rendered_it(way: str, number: int) -> None:
    case = RENDERED["chats"][number]
    engine, _, form = way.partition(" ")
    prompt = chat_prompt(chat(**case["chat"]), TEMPLATES[form], engine)
    assert prompt is not None
    assert "".join(map(str, prompt.pieces(TEMPLATES[form]))) == case["rendered"][way]


MADE = {"messages": chat_of_messages, "responses": chat_of_responses}
TURNS = [
    (kind, engine, i)
    for kind in MADE
    for i, case in enumerate(RENDERED[kind])
    for engine, text in case["rendered"].items()
    if text
]


@pytest.mark.parametrize(("kind", "engine", "number"), TURNS)
def test_other_apis_are_rendered_as_long_as_the_engine_said(kind: str, engine: str, number: int) -> None:
    case = RENDERED[kind][number]
    fields = MADE[kind](read_body(json.dumps(case["chat"]).encode(), POSTS[f"/v1/{kind}"]), engine)
    assert fields is not None
    prompt = chat_prompt(fields, TEMPLATES["tools"], engine)
    assert prompt is not None and "".join(map(str, prompt.pieces(TEMPLATES["tools"]))) == case["rendered"][engine]


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "x", "previous_response_id": "resp_1"},
        {"input": "x", "reasoning": {"effort": "low"}},
        {"input": [{"type": "reasoning", "summary": []}]},
        {"input": [{"role": "developer", "content": "x"}]},
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text"}]}]},
        {"input": "x", "tools": [{"type": "web_search"}]},
        {"input": "x", "instructions": ["x"]},
        {"input": [{"role": "assistant", "content": [{"type": "output_text", "text": "a"}] * 2}]},
    ],
)
def test_what_only_the_engine_knows_of_responses_is_not_guessed(fields: dict[str, Any]) -> None:
    for engine in ("sglang", "vllm"):
        assert chat_of_responses(read_body(json.dumps(fields).encode(), POSTS["/v1/responses"]), engine) is None


USER = {"role": "user", "content": "x"}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}


@pytest.mark.parametrize(
    ("engine", "fields"),
    [
        ("sglang", {"messages": [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}]}]}),
        ("sglang", {"messages": [{"role": "user", "content": [{"type": "search_result"}]}]}),
        ("vllm", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}),
        ("vllm", {"messages": [{"role": "system", "content": "x"}]}),
        ("vllm", {"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("vllm", {"messages": [USER], "output_config": {"effort": "low"}}),
        ("vllm", {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "x"}]}]}]}),
    ],
)
def test_what_only_the_engine_knows_of_messages_is_not_guessed(engine: str, fields: dict[str, Any]) -> None:
    assert chat_of_messages(read_body(json.dumps(fields).encode(), POSTS["/v1/messages"]), engine) is None


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_images_in_messages_and_in_results_of_tools_are_runs_of_ids(engine: str) -> None:
    image = {"type": "image", "source": SOURCE}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "see"}, image]}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, image]},
        {"role": "user", "content": [result]},
    ]
    body = read_body(json.dumps({"messages": messages}).encode(), POSTS["/v1/messages"])
    fields = chat_of_messages(body, engine)
    assert fields is not None
    prompt = chat_prompt(fields, PLAIN, engine)
    assert prompt is not None and len(prompt.media) == 2 and prompt.media[0] == prompt.media[1] == media_ids(IMAGE)


def test_enough_was_compared() -> None:
    seen = [way for way, _ in SEEN]
    assert all(seen.count(way) >= 18 for way in ("sglang text", "sglang parts", "vllm text", "vllm parts"))
    assert TEMPLATES["parts"].takes_parts and not TEMPLATES["text"].takes_parts


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": "text"},
        {"messages": ["text"]},
        {"messages": [{}]},
        {"messages": [{"role": 5, "content": "x"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [5]}]},
        {"messages": [{"role": "assistant", "tool_calls": [5]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": 5},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{}]},
    ],
)
def test_what_no_engine_takes_is_refused(fields: dict[str, Any]) -> None:
    for engine in ("sglang", "vllm"):
        with pytest.raises(InvalidInput):
            chat_prompt(chat(**fields), PLAIN, engine)


@pytest.mark.parametrize(
    "fields", [{"chat_template": "x"}, {"truncate_prompt_tokens": 5}, {"add_special_tokens": True}]
)
def test_what_only_the_engine_renders_is_not_guessed(fields: dict[str, Any]) -> None:
    assert chat_prompt(chat(messages=[{"role": "user", "content": "x"}], **fields), PLAIN, "vllm") is None


@pytest.mark.parametrize("engine", ["sglang", "vllm", ""])
@pytest.mark.parametrize("template", [PLAIN, PARTS])
def test_images_stand_where_the_template_puts_them(engine: str, template: ChatTemplate) -> None:
    content = [{"type": "text", "text": "before"}, IMAGE, {"type": "text", "text": "after"}, IMAGE]
    prompt = chat_prompt(chat(messages=[{"role": "user", "content": content}]), template, engine)
    assert prompt is not None
    pieces = prompt.pieces(template)
    runs = [piece for piece in pieces if not isinstance(piece, str)]
    assert len(runs) == 2 and runs[0] == runs[1] and len(runs[0]) == 256 and min(runs[0]) >= 2**30
    texts = [piece.strip() for piece in pieces if isinstance(piece, str)]
    assert texts == ["<user>before", "after", ""]


def test_what_a_client_writes_as_our_mark_stands_for_nothing() -> None:
    mark = "\ue000preble-part-7\ue001"
    messages = [{"role": "user", "content": [{"type": "text", "text": f"a{mark}b"}, IMAGE]}]
    prompt = chat_prompt(chat(messages=messages), PARTS, "vllm")
    assert prompt is not None and [piece for piece in prompt.pieces(PARTS) if isinstance(piece, str)] == [
        "<user>a",
        "b",
        "",
    ]


def test_images_are_bounded() -> None:
    with pytest.raises(InvalidInput, match=str(MEDIA_MAX)):
        chat_prompt(chat(messages=[{"role": "user", "content": [IMAGE] * (MEDIA_MAX + 1)}]), PARTS, "vllm")


# --- transformers -----------------------------------------------------------------------------------------------------

HERMES = (
    "{{ bos_token }}{%- if tools %}<tools>\n"
    "{%- for tool in tools %}{{ tool | tojson }}\n{%- endfor %}</tools>{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' and message.tool_calls %}<assistant>{{ message.content or '' }}"
    "{%- for call in message.tool_calls %}{%- set call = call.function %}"
    '<tool_call>{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}</tool_call>{%- endfor %}'
    "{%- elif message.role == 'tool' %}<tool>{{ message.content }}{%- else %}"
    "<{{ message.role }}>{{ message.content | trim }}"
    "{%- endif %}<end>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<assistant>"
    "{%- if enable_thinking is defined and not enable_thinking %}<think></think>{%- endif %}{%- endif %}"
)
LLAMA = (
    "{{- bos_token }}{% set ns = namespace(system='') %}{% if messages[0]['role'] == 'system' %}"
    "{% set ns.system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}{% endif %}"
    "<sys>{{ ns.system }}{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}</sys>"
    "{% for message in messages %}<{{ message['role'] }}>{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}{{ content['text'] }}{% endfor %}{% endif %}<eot>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "x": "<é>"}}}]
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Hi\n"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": {"p": "ü"}}}]},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "  So far "},
]


@pytest.mark.parametrize("source", [HERMES, LLAMA])
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False, "tools": TOOLS},
        {"add_generation_prompt": True, "tools": TOOLS, "enable_thinking": False},
        {"add_generation_prompt": False, "continue_final_message": True, "tools": TOOLS},
    ],
)
def test_templates_render_as_transformers_renders_them(source: str, options: dict[str, Any]) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install 'preble[torch]'")
    from transformers.utils.chat_template_utils import render_jinja_template

    talk = [{**message, "content": message["content"] or ""} for message in TALK]
    theirs, _ = render_jinja_template([talk], chat_template=source, bos_token="B", **options)
    named = {
        name: options[name] for name in ("tools", "add_generation_prompt", "continue_final_message") if name in options
    }
    variables = {name: value for name, value in options.items() if name not in named}
    ours = ChatTemplate(source, {"bos_token": "B"}).render(talk, variables=variables, **named)
    assert ours == theirs[0]


def test_a_message_in_parts_is_gone_on_with() -> None:
    talk = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert PARTS.render(talk, continue_final_message=True) == "<assistant>ab"


@pytest.mark.parametrize("content", [None, [], [{"type": "image"}], 5])
def test_what_cannot_be_gone_on_with_is_refused(content: Any) -> None:
    with pytest.raises(InvalidInput, match="no text that could be continued"):
        PLAIN.render([{"role": "assistant", "content": content}], continue_final_message=True)
    with pytest.raises(InvalidInput, match="leaves out the end"):
        ChatTemplate("nothing", {}).render([{"role": "assistant", "content": "x"}], continue_final_message=True)


def test_chats_with_tools_have_a_template_of_their_own_where_the_model_has_one() -> None:
    template = ChatTemplate("plain", {}, "tools: {{ tools | length }}")
    assert (template.render([]), template.render([], tools=[]), template.render([], tools=[1])) == (
        "plain",
        "plain",
        "tools: 1",
    )
