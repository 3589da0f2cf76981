"""What a relayed request is routed on: each turn's key begins with the one before, and what differs differs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from preble.gateway.core.http_errors import ApiError
from preble.gateway.relay.body import RelayedBody, read_body
from preble.gateway.relay.endpoints import ENDPOINTS, POSTS
from preble.gateway.relay.routing_key import PROMPTS_MAX, TRIED_MIN, Mismatches, RoutingKey, routing_key
from preble.gateway.relay.text_key import text_key
from preble.gateway.relay.text_lengths import PROMPTS_MIN, TOKEN_BYTES, TOKENS_MIN
from preble.gateway.text.tokenizing import TextCodec
from preble.transport.namespaces import check_namespace
from tests.support.gateway import make_tokenizer
from tests.support.transport import asynchronous

BY_PATH = {endpoint.path: endpoint for endpoint in ENDPOINTS}
CHAT = "/v1/chat/completions"
PNG = "data:image/png;base64,iVBORw0KGgo="


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextCodec]:
    """A tokenizer of one token a byte, and a chat template."""
    codec = TextCodec(make_tokenizer(tmp_path_factory.mktemp("model")), threads=1)
    yield codec
    codec.close()


def body_of(path: str, **fields: Any) -> RelayedBody:
    return read_body(json.dumps(fields).encode(), BY_PATH[path])


def text(path: str, **fields: Any) -> list[int]:
    return text_key(body_of(path, **fields)).tolist()


def is_prefix(short: list[int], long: list[int]) -> bool:
    return 0 < len(short) < len(long) and long[: len(short)] == short


async def key(codec: TextCodec | None, path: str, **fields: Any) -> RoutingKey:
    return await routing_key(body_of(path, **fields), codec)


@asynchronous
async def test_the_key_of_a_chat_is_what_the_template_makes_of_it(codec: TextCodec) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]
    found = await key(codec, CHAT, messages=messages)
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert found.exact and found.namespace is None
    assert found.token_ids.tolist() == (await codec.encode_chat(plain)).tolist()
    assert found.token_ids.dtype == np.int32


@asynchronous
async def test_prompts_are_their_tokens(codec: TextCodec) -> None:
    a, b = (await codec.encode("a")).tolist(), (await codec.encode("b")).tolist()
    for path, name in (("/v1/completions", "prompt"), ("/generate", "text")):
        assert (await key(codec, path, **{name: "a"})).token_ids.tolist() == a
        assert (await key(codec, path, **{name: ["a", "b"]})).token_ids.tolist() == a + b
    for path, name in (("/v1/completions", "prompt"), ("/generate", "input_ids")):
        assert (await key(codec, path, **{name: [5, 6]})).token_ids.tolist() == [5, 6]
        assert (await key(codec, path, **{name: [[5, 6], [7]]})).token_ids.tolist() == [5, 6, 7]


@asynchronous
async def test_a_prompt_that_the_engine_takes_otherwise_is_not_guessed(codec: TextCodec) -> None:
    path = "/v1/completions"
    with_begin = (await key(codec, path, prompt="ab")).token_ids.tolist()
    assert (await key(codec, path, prompt="ab", add_special_tokens=False)).token_ids.tolist() == with_begin[1:]
    assert not (await key(codec, path, prompt="ab", truncate_prompt_tokens=1)).exact
    assert not (await key(codec, path, prompt="ab", prompt_embeds="x")).exact
    assert (await key(codec, path, prompt=["a"] * PROMPTS_MAX)).exact
    assert not (await key(codec, path, prompt=["a"] * (PROMPTS_MAX + 1))).exact


@pytest.mark.parametrize(
    "prompt", [None, [], {}, [[]], [1, "a"], [-1], [2**40], [1.5], [None], True, 7, "", [["a"]], [[[1]]]]
)
@asynchronous
async def test_an_odd_prompt_is_the_servers_to_refuse(codec: TextCodec, prompt: Any) -> None:
    for one in (codec, None):
        found = await key(one, "/v1/completions", prompt=prompt)
        assert len(found.token_ids) and found.token_ids.min() >= 0


@asynchronous
@pytest.mark.parametrize(
    "messages", [None, 5, "x", [], [None], [{}], [{"role": 5, "content": 7}], [{"content": [None, 3, {"type": []}]}]]
)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
async def test_odd_messages_are_the_servers_to_refuse(codec: TextCodec, path: str, messages: Any) -> None:
    for one in (codec, None):
        found = await key(one, path, messages=messages, input=messages, system=messages)
        assert len(found.token_ids) and found.token_ids.min() >= 0


@asynchronous
async def test_keys_of_text_never_meet_token_ids(codec: TextCodec) -> None:
    fields = {"messages": [{"role": "user", "content": "a"}]}
    namespaces = set()
    for salt in (None, "text", "s"):
        for one in (codec, None):
            found = await key(one, CHAT, **fields, **({} if salt is None else {"cache_salt": salt}))
            assert found.exact == (one is not None)
            namespaces.add(found.namespace)
    assert len(namespaces) == 6


@asynchronous
async def test_a_salt_and_an_adapter_separate(codec: TextCodec) -> None:
    ways: list[dict[str, Any]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"extra_key": "a"}, {"lora_path": "a"}]
    ways.append({"lora_path": "a", "cache_salt": "a"})
    found = [(await key(codec, "/generate", text="t", **way)).namespace for way in ways]
    assert len(set(found)) == len(ways)
    assert found[1] == ("salt", "a") and found[4:] == [("lora", "a"), ("lora", "a", "salt", "a")]


@asynchronous
async def test_a_prompt_too_long_for_the_model_is_routed_by_its_text(codec: TextCodec) -> None:
    body = body_of("/v1/completions", prompt="x" * 50)
    assert (await routing_key(body, codec, tokens_max=60)).exact
    assert not (await routing_key(body, codec, tokens_max=40)).exact


ODD = st.recursive(
    st.sampled_from([None, True, 0, -1, 1.5, "", "text", "image_url", "tool", "assistant", "user", PNG]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "text", "role", "content", "function", "name", "arguments", "tool_calls", "image_url"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
NAMES = ["messages", "tools", "tool_choice", "chat_template_kwargs", "prompt", "text", "input_ids", "input", "system"]
NAMES += [
    "image_data",
    "instructions",
    "query",
    "documents",
    "lora_path",
    "cache_salt",
    "extra_key",
    "reasoning_effort",
]
NAMES += ["n", "stream", "stream_options", "sampling_params", "continue_final_message", "user", "model"]


@given(st.sampled_from(sorted(POSTS)), st.dictionaries(st.sampled_from(NAMES), ODD, max_size=6))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_body_holds_it_has_a_key(codec: TextCodec, path: str, fields: dict[str, Any]) -> None:
    body = read_body(json.dumps(fields).encode(), POSTS[path])
    for name in ("model", "stream", "include_usage", "salt", "lora", "max_tokens", "n", "prompts"):
        getattr(body, name)
    assert json.loads(body.edited(body.usage_changes())).keys() >= fields.keys()
    for engine in ("sglang", "vllm"):
        found = asyncio.run(routing_key(body, codec, engine=engine))
        assert len(found.token_ids) and found.token_ids.min() >= 0
        check_namespace(found.namespace)


@asynchronous
async def test_a_body_nested_deep_has_a_key(codec: TextCodec) -> None:
    for depth in (500, 900, 100_000):
        nested = b"[" * depth + b"]" * depth
        data = b'{"messages": ' + nested + b', "prompt": ' + nested + b', "image_data": ' + nested + b"}"
        for path in (CHAT, "/v1/completions", "/generate", "/v1/messages", "/v1/responses", "/tokenize"):
            try:
                body = read_body(data, BY_PATH[path])
            except ApiError:
                continue
            for one in (codec, None):
                assert len((await routing_key(body, one)).token_ids)


# --- conversations ----------------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
AGENT: list[dict[str, Any]] = [
    {"role": "system", "content": "You look things up."},
    {"role": "user", "content": "What is in a.txt?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"path": "a.txt"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "forty-two"},
    {"role": "assistant", "content": "Forty-two.", "reasoning_content": "It says so."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "And here?"}, {"type": "image_url", "image_url": {"url": PNG}}],
    },
    {"role": "assistant", "content": "A dot."},
    {"role": "user", "content": "Thanks"},
]
ANTHROPIC: list[dict[str, Any]] = [
    {"role": "user", "content": "What is in a.txt?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Look.", "signature": "s"},
            {"type": "tool_use", "id": "t1", "name": "look", "input": {"path": "a.txt"}},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}]}],
    },
    {"role": "assistant", "content": "Forty-two."},
    {
        "role": "user",
        "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}],
    },
]
RESPONSES: list[dict[str, Any]] = [
    {"role": "user", "content": "What is in a.txt?"},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "42"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Forty-two."}]},
    {"role": "user", "content": [{"type": "input_image", "image_url": PNG}]},
]
CONVERSATIONS = [
    (CHAT, "messages", AGENT, {"tools": TOOLS}),
    ("/v1/messages", "messages", ANTHROPIC, {"system": "You look things up.", "tools": [{"name": "look"}]}),
    ("/v1/responses", "input", RESPONSES, {"instructions": "You look things up.", "tools": TOOLS}),
]


@pytest.mark.parametrize(("path", "name", "messages", "more"), CONVERSATIONS)
def test_each_turns_text_begins_with_the_one_before(
    path: str, name: str, messages: list[dict[str, Any]], more: dict[str, Any]
) -> None:
    turns = [text(path, **more, **{name: messages[:end]}) for end in range(1, len(messages) + 1)]
    for turn, longer in zip(turns, turns[1:], strict=False):
        assert is_prefix(turn, longer)


@pytest.mark.parametrize(("path", "name", "messages", "more"), CONVERSATIONS)
def test_tools_and_instructions_change_the_text_from_the_start(
    path: str, name: str, messages: list[dict[str, Any]], more: dict[str, Any]
) -> None:
    without = text(path, **{name: messages})
    for field, value in more.items():
        assert text(path, **{name: messages, field: value}) != without
    other = text(path, **{**more, "tools": [{"name": "other"}]}, **{name: messages})
    assert other[:4] != text(path, **more, **{name: messages})[:4]


@pytest.mark.parametrize(
    "change",
    [
        {"content": "no"},
        {"role": "user"},
        {"name": "x"},
        {"tool_calls": [{"id": "call_1"}]},
        {"reasoning_content": "because"},
    ],
)
def test_all_of_a_message_is_in_the_text(change: dict[str, Any]) -> None:
    message = {"role": "assistant", "content": "yes"}
    assert text(CHAT, messages=[message]) != text(CHAT, messages=[message | change])


def test_the_order_in_which_a_client_writes_a_message_is_of_no_matter() -> None:
    one = {"role": "assistant", "content": "a", "tool_calls": [{"id": "1", "type": "function"}]}
    other = {"tool_calls": [{"type": "function", "id": "1"}], "content": "a", "role": "assistant"}
    assert text(CHAT, messages=[one]) == text(CHAT, messages=[other])


def test_the_line_that_an_agent_changes_with_each_request_is_left_out() -> None:
    def with_line(value: str, path: str) -> list[int]:
        line = f"x-anthropic-billing-header: cch={value};"
        if path == CHAT:
            return text(path, messages=[{"role": "system", "content": f"{line}\nRules."}])
        return text(path, system=[{"type": "text", "text": line}, {"type": "text", "text": "Rules."}], messages=[])

    for path in (CHAT, "/v1/messages"):
        assert with_line("1", path) == with_line("2", path)


def test_four_letters_are_a_token() -> None:
    assert len(text(CHAT, messages=[{"role": "user", "content": "word" * 1000}])) == pytest.approx(1000, abs=3)


def test_bytes_beyond_the_bound_are_not_compared() -> None:
    body = body_of(CHAT, messages=[{"role": "user", "content": "a" * (5 << 20)}])
    assert len(text_key(body)) == 1 << 20


# --- images, audio ----------------------------------------------------------------------------------------------------

OTHER = "data:image/png;base64,iVBORw0KGgp="


def seen(part: dict[str, Any], path: str = CHAT) -> list[int]:
    fields = {"input": [{"role": "user", "content": [part]}], "messages": [{"role": "user", "content": [part]}]}
    return text(path, **fields)


@pytest.mark.parametrize(
    ("path", "one", "other"),
    [
        (CHAT, *({"type": "image_url", "image_url": {"url": url}} for url in (PNG, OTHER))),
        (
            CHAT,
            *(
                {"type": "image_url", "image_url": {"url": url}}
                for url in ("https://a.test/1.png", "https://a.test/2.png")
            ),
        ),
        (CHAT, *({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}} for data in ("UklG", "UklH"))),
        ("/v1/responses", *({"type": "input_image", "image_url": url} for url in (PNG, OTHER))),
        (
            "/v1/messages",
            *(
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
                for data in ("AA", "AB")
            ),
        ),
    ],
)
def test_an_image_is_a_run_of_ids_by_its_content(path: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    head = seen({"type": "text", "text": ""}, path)
    a, b = seen(one, path), seen(other, path)
    assert a == seen(dict(reversed(one.items())), path)
    start = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    assert a[:start] == head[:start] and len(a) - start == 256
    assert min(a[start:]) >= 2**30


def test_the_same_image_is_the_same_in_every_api() -> None:
    payload = PNG.partition(",")[2]
    ways = [
        seen({"type": "image_url", "image_url": {"url": PNG}}),
        seen(
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": payload}}, "/v1/messages"
        ),
        seen({"type": "input_image", "image_url": PNG}, "/v1/responses"),
        text("/generate", image_data=PNG),
        text("/generate", image_data=[payload]),
    ]
    assert len({tuple(way[-256:]) for way in ways}) == 1


@asynchronous
async def test_an_image_of_generate_is_part_of_the_key(codec: TextCodec) -> None:
    keys = [await key(codec, "/generate", text="what?", image_data=image) for image in (PNG, OTHER, [[PNG]])]
    assert not any(one.exact for one in keys)
    assert keys[0].token_ids.tolist() == keys[2].token_ids.tolist() != keys[1].token_ids.tolist()


# --- mismatches -------------------------------------------------------------------------------------------------------


@asynchronous
async def test_after_some_mismatches_a_kind_and_model_are_routed_by_text(codec: TextCodec, caplog: Any) -> None:
    mismatches = Mismatches(limit=2)
    body = body_of("/v1/completions", prompt="secret")

    async def exact(model: str, kind: str = "/v1/completions") -> bool:
        one = body if kind == "/v1/completions" else body_of("/generate", text="secret")
        return (await routing_key(one, codec, model=model, mismatches=mismatches)).exact

    found = await routing_key(body, codec, model="m", mismatches=mismatches)
    assert not mismatches.compare("completions", "m", found, len(found.token_ids))
    assert not mismatches.compare("completions", "m", found, None)
    assert mismatches.compare("completions", "m", found, 99) and await exact("m")
    assert mismatches.compare("completions", "m", found, 99) and not await exact("m")
    assert await exact("other") and await exact("m", "/generate")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and "99" in lines[0] and "'m'" in lines[0] and "secret" not in lines[0]
    by_text = await routing_key(body, codec, model="m", mismatches=mismatches)
    assert not mismatches.compare("completions", "m", by_text, 99), "a key of text claims no length"


# --- text where no server publishes events ----------------------------------------------------------------------------


@asynchronous
async def test_where_no_server_publishes_events_only_the_first_keys_are_exact(codec: TextCodec) -> None:
    mismatches = Mismatches()

    async def exact(path: str, model: str, *, events: bool) -> bool:
        body = body_of(path, prompt="a", text="a")
        return (await routing_key(body, codec, model=model, mismatches=mismatches, events=events)).exact

    for path, model in (("/v1/completions", "m"), ("/generate", "m"), ("/generate", "other")):
        found = [await exact(path, model, events=False) for _ in range(TRIED_MIN + 3)]
        assert found == [True] * TRIED_MIN + [False] * 3
        assert await exact(path, model, events=True), "events speak of token ids"


@asynchronous
async def test_keys_of_text_get_the_length_that_engines_count(codec: TextCodec) -> None:
    """The tokenizer here makes a token of each byte."""
    mismatches = Mismatches()
    body = body_of(CHAT, messages=[{"role": "user", "content": "x" * 4 * TOKENS_MIN}])
    counted = len((await routing_key(body, codec)).token_ids)

    async def by_text() -> RoutingKey:
        return await routing_key(body, None, model="m", mismatches=mismatches)

    before = await by_text()
    for _ in range(PROMPTS_MIN):
        key = await by_text()
        assert key.namespace == before.namespace
        assert not mismatches.compare("chat", "m", key, counted)
    after = await by_text()
    assert len(before.token_ids) < 0.3 * counted and 0.9 * counted < len(after.token_ids) <= counted
    assert after.namespace != before.namespace and (before.token_bytes, after.token_bytes) == (4, 1)
    assert (await routing_key(body, None, model="n", mismatches=mismatches)).token_bytes == 4


@pytest.mark.parametrize("token_bytes", TOKEN_BYTES)
def test_keys_of_every_length_begin_with_the_turns_before(token_bytes: int) -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Grüße 你好"}, {"role": "assistant", "content": "b"}]
    image = {"type": "image_url", "image_url": {"url": PNG}}
    turns += [{"role": "user", "content": [{"type": "text", "text": "what?"}, image]}, {"role": "user", "content": ""}]
    keys = [text_key(body_of(CHAT, messages=turns[:count]), token_bytes).tolist() for count in range(1, 5)]
    assert all(map(is_prefix, keys, keys[1:]))
    assert all(0 <= one < 2**31 for one in keys[-1])
    text = "0123456789" * 100
    size = len(text_key(body_of("/v1/completions", prompt=text), token_bytes))
    assert size == len(text) // token_bytes
    other = text_key(body_of("/v1/completions", prompt=text[:-1] + "x"), token_bytes)
    assert other[-1] != text_key(body_of("/v1/completions", prompt=text), token_bytes)[-1]


def test_a_message_of_one_text_part_is_the_same_as_its_text() -> None:
    parts = [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]
    plain, cut = ([{"role": "user", "content": one}, {"role": "user", "content": "b"}] for one in ("hello", parts))
    for path in (CHAT, "/v1/messages"):
        assert text(path, messages=plain) == text(path, messages=cut)


def test_what_was_cached_of_a_key_of_text_is_its_share_of_the_prompt() -> None:
    exact = RoutingKey(np.arange(100, dtype=np.int32), None, True)
    assert exact.cached(7, None, 50) == 7 and exact.cached(None, 100, 50) is None
    by_text = RoutingKey(np.arange(100, dtype=np.int32), None, False, 4)
    assert by_text.cached(160, 200, 50) == 80, "more than was expected"
    assert by_text.cached(112, 200, 50) == 50, "about what was expected"
    assert by_text.cached(90, 200, 50) == 50
    assert by_text.cached(20, 200, 50) == 10 and by_text.cached(0, 200, 50) == 0, "it has gone"
    assert [by_text.cached(*one, 50) for one in ((None, 200), (5, None), (5, 0), (300, 200))] == [None] * 4
