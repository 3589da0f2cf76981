"""Bodies looked over and edited: what is not named keeps every byte, and what is read is what servers would read."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preble.gateway.core.http_errors import ApiError
from preble.gateway.relay.body import RelayedBody, edited, read_body
from preble.gateway.relay.endpoints import ENDPOINTS, Endpoint

BY_PATH = {endpoint.path: endpoint for endpoint in ENDPOINTS}
BATCH = BY_PATH["/v1/chat/completions/batch"]
CHAT, COMPLETIONS, GENERATE = (BY_PATH[path] for path in ("/v1/chat/completions", "/v1/completions", "/generate"))

SPACE = st.sampled_from(["", " ", "\n\t ", "\r\n"])
NAMES = st.sampled_from(["model", "stream", "messages", "a", 'quo"te', "back\\slash", "\u4e2d", "", "}", '":{'])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab}"\\', max_size=3), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def objects(draw: st.DrawFn) -> str:
    """A JSON object as odd clients write one: blanks anywhere, escapes in names, names that come twice."""
    parts = []
    for name, value in draw(st.lists(st.tuples(NAMES, VALUES), max_size=6)):
        key = json.dumps(name, ensure_ascii=draw(st.booleans()))
        if name and draw(st.booleans()):
            key = '"' + "".join(f"\\u{ord(letter):04x}" for letter in name) + '"'
        text = json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
        a, b, c, d = (draw(SPACE) for _ in range(4))
        parts.append(f"{a}{key}{b}:{c}{text}{d}")
    return draw(SPACE) + "{" + (",".join(parts) or draw(SPACE)) + "}" + draw(SPACE)


def as_pairs(text: str | bytes) -> list[tuple[str, Any]]:
    """The fields in order, those that come twice too."""
    pairs: list[tuple[str, Any]] = json.loads(text, object_pairs_hook=lambda pairs: pairs)
    return pairs


@given(objects(), st.dictionaries(NAMES.filter(lambda name: name.isalpha() and name.isascii()), VALUES, max_size=3))
def test_an_edited_body_is_the_edited_object(text: str, changes: dict[str, Any]) -> None:
    given = {name: json.dumps(value).encode() for name, value in changes.items()}
    assert json.loads(edited(text.encode(), given)) == {**json.loads(text), **changes}


@given(objects(), st.sampled_from(["model", "stream", "new"]))
def test_every_other_byte_stays(text: str, name: str) -> None:
    data = text.encode()
    after = edited(data, {name: b"\x00"})
    before, _, behind = after.partition(b"\x00")
    if name in json.loads(text):
        assert data.startswith(before) and data.endswith(behind)
        value = data[len(before) : len(data) - len(behind)]
        assert json.loads(value) == json.loads(text)[name]
    else:
        opening, _, _ = before.partition(b'"new":' if name == "new" else f'"{name}":'.encode())
        assert data == opening + behind.removeprefix(b",")


def test_nothing_to_change_is_the_same_bytes() -> None:
    data = b' {"a" : 1}'
    assert edited(data, {}) == data
    assert read_body(data, CHAT).edited({}) is data


def test_a_name_that_comes_twice_counts_as_servers_count_it() -> None:
    data = b'{"model":"first","model":"last"}'
    assert read_body(data, CHAT).model == "last" == json.loads(data)["model"]
    assert edited(data, {"model": b'"x"'}) == b'{"model":"first","model":"x"}'


@pytest.mark.parametrize(
    "data", [b"", b"null", b"[1]", b'"text"', b"{", b'{"a":}', b'{"a":1} 2', b"\xff", b"[" * 10**5]
)
def test_what_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        read_body(data, CHAT)
    assert refused.value.status == 400
    with pytest.raises((msgspec.MsgspecError, RecursionError)):
        edited(data, {"a": b"1"})


@pytest.mark.parametrize(
    ("endpoint", "fields", "expected"),
    [
        (CHAT, {}, {"model": None, "stream": False, "salt": None, "max_tokens": None, "n": 1, "include_usage": False}),
        (
            CHAT,
            {"model": "m", "stream": True, "n": 3, "max_tokens": 7},
            {"model": "m", "stream": True, "n": 3, "max_tokens": 7},
        ),
        (CHAT, {"max_tokens": 7, "max_completion_tokens": 9}, {"max_tokens": 9}),
        (CHAT, {"stream": "true"}, {"stream": True}),
        (
            CHAT,
            {"stream": "no", "n": "x", "max_tokens": -1, "model": 5},
            {"stream": False, "n": 1, "max_tokens": None, "model": None},
        ),
        *(
            (CHAT, {"n": many, "max_tokens": many}, {"n": 64, "max_tokens": 64})
            for many in (64.0, "64", " +64.0", "6_4")
        ),
        *((CHAT, {"n": odd}, {"n": 1}) for odd in (64.5, "64.5", "nan", "inf", True, [64])),
        (BATCH, {"messages": [[{"role": "user"}]] * 50, "n": 2}, {"prompts": 50, "n": 2}),
        (BY_PATH["/inference/v1/generate"], {"sampling_params": {"n": 8}}, {"n": 8}),
        (CHAT, {"messages": [{"role": "user"}] * 50}, {"prompts": 1}),
        (CHAT, {"stream_options": {"include_usage": True}}, {"include_usage": True}),
        (CHAT, {"cache_salt": "s"}, {"salt": "s"}),
        (CHAT, {"cache_salt": "s", "extra_key": "k"}, {"salt": "s\x1fk"}),
        (CHAT, {"extra_key": "k"}, {"salt": "\x1fk"}),
        (CHAT, {"lora_path": "adapter"}, {"lora": "adapter"}),
        (CHAT, {"lora_path": ["adapter", None]}, {"lora": "adapter"}),
        (GENERATE, {"sampling_params": {"max_new_tokens": 5, "n": 2}}, {"max_tokens": 5, "n": 2}),
        (GENERATE, {"sampling_params": [{"max_new_tokens": 5}]}, {"max_tokens": 5}),
        (GENERATE, {"sampling_params": 7}, {"max_tokens": None, "n": 1}),
        (GENERATE, {"input_ids": [1, 2, 3]}, {"prompts": 1}),
        (GENERATE, {"input_ids": [[1], [2]]}, {"prompts": 2}),
        (GENERATE, {"text": ["a", "b", "c"]}, {"prompts": 3}),
        (COMPLETIONS, {"prompt": "a"}, {"prompts": 1}),
        (COMPLETIONS, {"prompt": []}, {"prompts": 1}),
        (
            BY_PATH["/v1/responses"],
            {"previous_response_id": "resp_1", "max_output_tokens": 4},
            {"previous_response_id": "resp_1", "max_tokens": 4},
        ),
        (CHAT, {"previous_response_id": "resp_1"}, {"previous_response_id": None}),
        (BY_PATH["/v1/embeddings"], {"input": ["a", "b"], "stream": True}, {"prompts": 2, "stream": False}),
    ],
)
def test_what_routing_reads(endpoint: Endpoint, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    body = read_body(json.dumps(fields).encode(), endpoint)
    assert {name: getattr(body, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"stream": True}, {"include_usage": True}),
        ({"stream": True, "stream_options": None}, {"include_usage": True}),
        ({"stream": True, "stream_options": {"include_usage": False, "x": [1]}}, {"include_usage": True, "x": [1]}),
        ({"stream": True, "stream_options": {"include_usage": True}}, None),
        ({"stream": True, "stream_options": "odd"}, None),
        ({"stream": False}, None),
    ],
)
def test_usage_is_asked_for_where_the_client_does_not(fields: dict[str, Any], options: Any) -> None:
    for endpoint in (CHAT, COMPLETIONS):
        changes = read_body(json.dumps(fields).encode(), endpoint).usage_changes()
        assert {name: json.loads(value) for name, value in changes.items()} == (
            {} if options is None else {"stream_options": options}
        )
    assert read_body(json.dumps(fields).encode(), GENERATE).usage_changes() == {}


def test_of_a_long_salt_its_hash_separates() -> None:
    salts = {read_body(json.dumps({"cache_salt": "s" * 3000, "extra_key": key}).encode(), CHAT).salt for key in "abc"}
    assert len(salts) == 3 and all(salt is not None and len(salt) == 64 for salt in salts)


def test_a_field_out_of_range_is_the_servers_to_refuse() -> None:
    body = read_body(b'{"n": 1e999, "cache_salt": "\xff", "model": "' + b"m" * 9000 + b'"}', CHAT)
    assert (body.n, body.salt, body.model) == (1, None, None)


def test_paths_are_named_once_and_kinds_are_known() -> None:
    assert len({(endpoint.method, endpoint.path) for endpoint in ENDPOINTS}) == len(ENDPOINTS)
    assert all(endpoint.by_id == ("{id}" in endpoint.path) for endpoint in ENDPOINTS)
    assert isinstance(read_body(b"{}", ENDPOINTS[0]), RelayedBody)
