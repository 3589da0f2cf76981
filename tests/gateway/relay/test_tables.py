"""What docs/gateway.md says of endpoints and fields is what the relay does."""

from __future__ import annotations

import json

import pytest

from preble.gateway.relay.body import read_body
from preble.gateway.relay.endpoints import POSTS
from tests.gateway.relay import tables


def test_the_page_has_todays_tables() -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.written(page) == page, "run python -m tests.gateway.relay.tables"


@pytest.mark.parametrize("path", tables.LETTERS)
def test_every_field_of_both_engines_reaches_the_server_as_it_is(path: str) -> None:
    data = tables.sample(path)
    body = read_body(data, POSTS[path])
    sent = json.loads(body.edited(body.usage_changes()))
    wanted = json.loads(data)
    if "stream_options" in tables.changed_by_relay(path):
        wanted["stream_options"] = {"chunks": 1, "include_usage": True}
    assert sent == wanted and len(wanted) > 20
    assert tables.changed_by_relay(path) <= {"stream_options"}


def test_what_routing_needs_is_read() -> None:
    for path, names in {
        "/v1/chat/completions": {"messages", "tools", "model", "cache_salt", "lora_path", "stream", "n"},
        "/generate": {"text", "input_ids", "image_data", "sampling_params"},
        "/v1/responses": {"input", "instructions", "previous_response_id"},
        "/v1/messages": {"system", "messages", "tools"},
    }.items():
        assert names - {"n"} <= tables.read_by_relay(path) | {"n"}
        assert "temperature" not in tables.read_by_relay(path)


def test_every_path_of_an_engine_is_relayed_or_left_out_on_purpose() -> None:
    left_out = {"/api/chat", "/api/generate", "/cohere/v2/chat", "/invocations", "/v1/models", "/v1/models/{id}"}
    left_out |= {
        "/v1/responses/{id}",
        "/v1/responses/{id}/cancel",
    }
    for engine in ("sglang", "vllm"):
        paths = set(tables.KNOWN[engine]["paths"])
        assert paths - left_out <= POSTS.keys()
        assert {one.path for one in POSTS.values() if engine in one.engines} <= paths
