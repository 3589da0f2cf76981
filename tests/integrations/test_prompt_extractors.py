"""What Ray Serve LLM's routers are given, and that a prompt is found in it: vLLM's request classes by their published
fields, with OpenAI's own message types; SGLang's; and the namespaces of direct streaming.

Ray 2.60 calls the deployment with `(request, raw_request_info)`, or asks for a place with a `SimpleNamespace` of the
body.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from preble.integrations import prompt_extractors

pydantic = pytest.importorskip("pydantic", reason="request classes are pydantic's: pip install 'preble[ray]'")
openai_types = pytest.importorskip("openai.types.chat", reason="message types are OpenAI's: pip install openai")

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
]
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]


class Tool(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    type: str
    function: dict[str, Any]


class ChatCompletionRequest(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    """As vLLM's, in what a router looks at."""

    messages: list[openai_types.ChatCompletionMessageParam]  # type: ignore[valid-type, name-defined]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: list[Tool] | None = None
    documents: list[dict[str, str]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None


class CompletionRequest(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    """As vLLM's, in what a router looks at."""

    prompt: list[int] | list[list[int]] | str | list[str] | None = None
    model: str | None = None
    max_tokens: int | None = 16
    cache_salt: str | None = None


class SglangMessage(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    """SGLang's messages are models themselves."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None


class SglangChatRequest(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    """As SGLang's, in what a router looks at."""

    messages: list[SglangMessage]
    max_tokens: int | None = None


RAW = SimpleNamespace(headers={"x-request-id": "1"})  # Ray's RawRequestInfo, the second argument


def as_ray_sends_it(request: Any) -> Any:
    """Ray's ingress makes lists of the contents that pydantic leaves as iterators."""
    for message in request.messages:
        if not isinstance(message.get("content"), str | None):
            message["content"] = list(message["content"])
    return request


def test_a_chat_request_of_vllms_class() -> None:
    request = ChatCompletionRequest(messages=MESSAGES, tools=TOOLS, max_completion_tokens=7, cache_salt="s")
    found = prompt_extractors.openai([as_ray_sends_it(request), RAW], {})
    assert found is not None
    assert found.messages == MESSAGES
    assert found.template == {"tools": TOOLS, "add_generation_prompt": True}
    assert (found.max_new_tokens, found.namespace) == (7, ("salt", "s"))


def test_a_chat_whose_contents_are_iterators_is_not_read_up() -> None:
    """A request of that class that did not come through Ray's ingress: its parts can be read once, by the engine."""
    request = ChatCompletionRequest(messages=MESSAGES)
    assert prompt_extractors.openai([request], {}) is None
    assert [list(message["content"]) for message in request.messages[1:]] == [MESSAGES[1]["content"]]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", {"text": "hello", "token_ids": None}),
        ([1, 2, 3], {"text": None, "token_ids": [1, 2, 3]}),
        (["hello"], {"text": "hello", "token_ids": None}),
        ([[1, 2, 3]], {"text": None, "token_ids": [1, 2, 3]}),
    ],
)
def test_a_completion_request_of_vllms_class(prompt: Any, expected: dict[str, Any]) -> None:
    found = prompt_extractors.openai([CompletionRequest(prompt=prompt), RAW], {})
    assert found is not None
    assert {"text": found.text, "token_ids": found.token_ids} == expected
    assert found.max_new_tokens == 16


def test_a_completion_request_with_several_prompts_has_none() -> None:
    assert prompt_extractors.openai([CompletionRequest(prompt=["one", "two"]), RAW], {}) is None
    assert prompt_extractors.openai([CompletionRequest(), RAW], {}) is None


def test_sglangs_messages_become_plain_ones() -> None:
    request = SglangChatRequest(messages=[SglangMessage(role="user", content="hello")], max_tokens=3)
    found = prompt_extractors.openai([request, RAW], {})
    assert found is not None
    assert (found.messages, found.max_new_tokens) == ([{"role": "user", "content": "hello"}], 3)


def test_the_namespace_of_direct_streaming() -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 5, "stream": True}
    found = prompt_extractors.openai([SimpleNamespace(**json.loads(json.dumps(body)))], {})
    assert found is not None
    assert (found.messages, found.template, found.max_new_tokens) == (MESSAGES, {"tools": TOOLS}, 5)
    assert prompt_extractors.openai([], {}) is None, "a body that was cut off leaves no argument"
