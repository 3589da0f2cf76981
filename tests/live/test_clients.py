"""The official clients before two real servers of each engine, through the gateway: answers are the servers' own.

Run by `make test-live`. The tests of one engine share its two servers and the gateway, with `test_attached_costs.py`,
which comes before, and run in the order they stand here; the last one kills a server.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.live.live_servers import BLOCK_SIZES, MODEL_NAME, Front, post, without_blanks

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city, by its name.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["short", "long"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
ASK = [
    {"role": "system", "content": "You answer in one line. " * 20},
    {"role": "user", "content": "Which module reads files line by line?"},
]
# What two answers to the same question may differ in: names and times, and what was cached.
UNEQUAL = (
    rb'"(id|created|created_at|completed_at|response_id|item_id|e2e_latency|weight_version|call_id|request_id)":\s*'
    rb'("[^"]*"|[0-9.]+|null)',
    rb'"(cached_tokens|cache_read_input_tokens|cache_creation_input_tokens|input_tokens)":\s*([0-9]+|null)',
    rb'"(cached_tokens_details|prompt_tokens_details)":\s*(null|\{[^{}]*\})',
    rb'"[a-z_]*(latency|time|throughput|_ts)[a-z_]*":\s*([0-9.eE+-]+|null)',
)


def both(front: Front, path: str, body: Any) -> tuple[Any, Any]:
    """The answers of a server and of the gateway to the same bytes, without what may differ."""
    own_status, own = post(front.direct + path, body)
    status, answer = post(front.gateway.url + path, body)
    assert status == own_status, (own[:500], answer[:500])
    return (merged(own), merged(answer)) if body.get("stream") else (alike(own), alike(answer))


def alike(answer: bytes) -> bytes:
    """An answer without names, times, and what happened to be cached."""
    for pattern in UNEQUAL:
        answer = re.sub(pattern, lambda found: b'"' + found[1] + b'": 0', answer)
    return answer


def merged(stream: bytes) -> tuple[list[bytes], str]:
    """The events of a stream without their text, each kind once, and all the text: how many tokens share an event, and
    whether the last ones come with the end, is a matter of time."""
    kinds: dict[bytes, None] = {}
    text = ""
    for event in alike(stream).split(b"\n\n"):
        found = re.search(rb'"(?:content|text)": ?("(?:[^"\\]|\\.)*"),?', event)
        if found is not None:
            event = event[: found.start()] + event[found.end() :]
            text += json.loads(found[1])
        kinds[event] = None
    return list(kinds), text


@pytest.fixture
def api(front: Front) -> Iterator[openai.OpenAI]:
    """OpenAI's client at the gateway."""
    with openai.OpenAI(base_url=f"{front.gateway.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def own(front: Front) -> Iterator[openai.OpenAI]:
    """OpenAI's client at a server."""
    with openai.OpenAI(base_url=f"{front.direct}/v1", api_key="unused", max_retries=0) as client:
        yield client


GREEDY: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0, "max_tokens": 24}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**GREEDY, "messages": ASK}),
    "chat streamed": ("/v1/chat/completions", {**GREEDY, "messages": ASK, "stream": True}),
    "chat streamed with usage": (
        "/v1/chat/completions",
        {**GREEDY, "messages": ASK, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "chat with logprobs": ("/v1/chat/completions", {**GREEDY, "messages": ASK, "logprobs": True, "top_logprobs": 3}),
    "chat with penalties": (
        "/v1/chat/completions",
        {**GREEDY, "messages": ASK, "frequency_penalty": 0.5, "presence_penalty": 0.1, "logit_bias": {"300": -50}},
    ),
    "chat with engine fields": (
        "/v1/chat/completions",
        {**GREEDY, "messages": ASK, "top_k": 1, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True},
    ),
    "two choices": ("/v1/chat/completions", {**GREEDY, "messages": ASK, "n": 2}),
    "structured": (
        "/v1/chat/completions",
        {
            **GREEDY,
            "max_tokens": 200,
            "messages": ASK,
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
        },
    ),
    "tool choice": (
        "/v1/chat/completions",
        {
            **GREEDY,
            "max_tokens": 120,
            "messages": ASK,
            "tools": [WEATHER],
            "tool_choice": NAMED,
        },
    ),
    "tools streamed": (
        "/v1/chat/completions",
        {**GREEDY, "messages": ASK, "tools": [WEATHER], "tool_choice": "auto", "stream": True},
    ),
    "completion": ("/v1/completions", {**GREEDY, "prompt": "def read_lines(path):"}),
    "completion of ids, streamed": ("/v1/completions", {**GREEDY, "prompt": [5, 300, 301, 302, 9], "stream": True}),
    "several prompts": ("/v1/completions", {**GREEDY, "prompt": ["import os", "class File:"]}),
    "echo and logprobs": ("/v1/completions", {**GREEDY, "prompt": "import os", "logprobs": 2, "echo": True}),
    "wrong temperature": ("/v1/chat/completions", {**GREEDY, "messages": ASK, "temperature": -1}),
    "no messages": ("/v1/chat/completions", {**GREEDY}),
    "tokenize": ("/tokenize", {"model": MODEL_NAME, "prompt": "def read_lines(path):"}),
    "detokenize": ("/detokenize", {"model": MODEL_NAME, "tokens": [5, 300, 301, 302]}),
}


@pytest.mark.parametrize("name", list(BODIES))
def test_an_answer_is_the_servers_own_byte_for_byte(front: Front, name: str) -> None:
    path, body = BODIES[name]
    if "tool_choice" in body or "response_format" in body:
        body = {**body, "logit_bias": without_blanks()}
    own, answer = both(front, path, body)
    assert answer == own


def test_generate_is_answered_as_by_the_server(front: Front) -> None:
    if front.engine != "sglang":
        pytest.skip("/generate is SGLang's")
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    for body in (
        {"text": "import os", "sampling_params": sampling},
        {"input_ids": [5, 300, 301, 302], "sampling_params": sampling, "return_logprob": True},
    ):
        own, answer = both(front, "/generate", body)
        assert answer == own
    streamed = {"text": "import os", "sampling_params": sampling, "stream": True}
    ends = [post(url + "/generate", streamed)[1].split(b"\n\n")[-3] for url in (front.direct, front.gateway.url)]
    assert alike(ends[0]) == alike(ends[1])  # each event has the whole text so far


def test_chat_and_stream_through_the_openai_client(api: openai.OpenAI, own: openai.OpenAI) -> None:
    expected = own.chat.completions.create(messages=ASK, **GREEDY)
    whole = api.chat.completions.create(messages=ASK, **GREEDY)
    assert whole.choices[0].message.content == expected.choices[0].message.content
    assert whole.usage.completion_tokens == expected.usage.completion_tokens
    parts = [
        event.choices[0].delta.content or ""
        for event in api.chat.completions.create(messages=ASK, stream=True, **GREEDY)
    ]
    assert len(parts) > 3 and "".join(parts) == whole.choices[0].message.content


def test_structured_output_is_json_of_the_schema(api: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    reply = api.chat.completions.create(messages=ASK, response_format=form, logit_bias=without_blanks(), **GREEDY)
    answer = json.loads(reply.choices[0].message.content)
    assert set(answer) == {"ok", "kind"} and answer["kind"] in ("short", "long")


def test_logprobs_come_with_each_token(api: openai.OpenAI) -> None:
    reply = api.chat.completions.create(messages=ASK, logprobs=True, top_logprobs=2, **GREEDY)
    content = reply.choices[0].logprobs.content
    assert len(content) == reply.usage.completion_tokens and all(len(token.top_logprobs) == 2 for token in content)


def test_responses_are_made_streamed_and_followed_up(front: Front, api: openai.OpenAI, own: openai.OpenAI) -> None:
    asked = {"model": MODEL_NAME, "input": "Which module reads files?", "temperature": 0, "max_output_tokens": 16}
    try:
        expected = own.responses.create(**asked)
    except openai.APIStatusError as error:  # the gateway must fail alike
        with pytest.raises(openai.APIStatusError) as failed:
            api.responses.create(**asked)
        assert failed.value.status_code == error.status_code
        return
    made = api.responses.create(**asked)
    assert made.output_text == expected.output_text
    text = "".join(event.delta for event in api.responses.create(stream=True, **asked) if "text.delta" in event.type)
    assert text == expected.output_text


def test_messages_through_the_anthropic_client(front: Front) -> None:
    asked = {
        "model": MODEL_NAME,
        "max_tokens": 16,
        "system": "Be brief.",
        "extra_body": {"temperature": 0},
    }
    talk = [{"role": "user", "content": "Which module reads files line by line?"}]
    with anthropic.Anthropic(base_url=front.direct, api_key="unused", max_retries=0) as direct:
        expected = direct.messages.create(messages=talk, **asked)
    with anthropic.Anthropic(base_url=front.gateway.url, api_key="unused", max_retries=0) as client:
        reply = client.messages.create(messages=talk, **asked)
        assert [block.text for block in reply.content] == [block.text for block in expected.content]
        assert reply.usage.output_tokens == expected.usage.output_tokens
        with client.messages.stream(messages=talk, **asked) as stream:
            assert "".join(stream.text_stream) == "".join(block.text for block in expected.content)


def test_an_agent_of_ten_turns_hits_its_own_prefix_each_turn(front: Front, api: openai.OpenAI) -> None:
    """Tool calls and their results go into the next prompt: all of it but the last block is cached, each turn."""
    talk: list[Any] = [*ASK]
    block, known, bias = BLOCK_SIZES[front.engine], 0, without_blanks()
    workers = set()
    for turn in range(10):
        raw = api.chat.completions.with_raw_response.create(
            messages=talk, tools=[WEATHER], tool_choice=NAMED, logit_bias=bias, **{**GREEDY, "max_tokens": 60}
        )
        reply = raw.parse()
        workers.add(raw.headers["x-preble-worker"])
        (call, *_) = reply.choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        details = reply.usage.prompt_tokens_details
        cached = 0 if details is None else details.cached_tokens or 0
        assert cached >= (known - 1) // block * block - block if turn else True, f"turn {turn}: {cached} of {known}"
        known = reply.usage.prompt_tokens
        talk.append(reply.choices[0].message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        talk[-1].setdefault("content", "")
        talk.append({"role": "tool", "tool_call_id": call.id, "content": f"Turn {turn}: {'sunny and warm, ' * 6}"})
    assert len(workers) == 1, "a conversation stays where its prefix is"


def test_sessions_models_and_what_is_unknown(front: Front, api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == [MODEL_NAME]
    assert api.models.retrieve(MODEL_NAME).id == MODEL_NAME
    with pytest.raises(openai.NotFoundError):
        api.chat.completions.create(messages=ASK, **{**GREEDY, "model": "another"})
    with urllib.request.urlopen(f"{front.gateway.url}/metrics", timeout=30.0) as answer:
        text = answer.read().decode()
    assert re.search(r"preble_actual_cached_tokens_total(\{[^}]*\})? [1-9]", text)


def test_a_server_that_is_killed_mid_stream_costs_no_character(front: Front, own: openai.OpenAI) -> None:
    """The text goes on at the other server: what had come stays, and as many tokens come as were asked for."""
    talk = [{"role": "user", "content": "Which module reads files line by line?"}]
    asked = {**GREEDY, "max_tokens": 200, "messages": talk, "extra_body": {"ignore_eos": True}}
    expected = own.chat.completions.create(**asked).choices[0].message.content
    with openai.OpenAI(base_url=f"{front.gateway.url}/v1", api_key="unused", max_retries=0) as api:
        raw = api.chat.completions.with_raw_response.create(
            stream=True, stream_options={"include_usage": True}, **asked
        )
        victim = next(server for server in front.servers if str(server.port) in raw.headers["x-preble-worker"])
        text, before, usage, ends = "", "", None, []
        for number, event in enumerate(raw.parse()):
            if number == 20:
                victim.kill()
                before = text
            for choice in event.choices:
                text += choice.delta.content or ""
                ends += [choice.finish_reason] * (choice.finish_reason is not None)
            usage = event.usage or usage
    assert len(before) > 20 and expected.startswith(before) and text.startswith(before)
    assert len(text) > len(before) and ends == ["length"]
    assert (usage.prompt_tokens > 0, usage.completion_tokens) == (True, 200)
