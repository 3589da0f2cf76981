"""Exchanges as an Envoy 1.40 had them with a picker, by examples/deploy/envoy-picker.yaml: what it said is said again,
and answered with the same bytes. Recorded with a server at the address that the answers name."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from preble.gateway.picker.messages import ProcessingRequest, ProcessingResponse, metadata_of
from preble.gateway.picker.parts import read_said
from tests.support.paths import ROOT
from tests.support.picker import Plane, named, passed, picking
from tests.support.relay import ScriptedServer, chat_answer, chat_events, event
from tests.support.transport import asynchronous

RECORDED = json.loads((ROOT / "tests" / "gateway" / "picker" / "envoy_1_40.json").read_text())
ANSWERS = {
    "whole": json.dumps(chat_answer(cached=2)).encode(),
    "stream": b"".join(map(event, [*chat_events("he", "llo"), b"[DONE]"])),
}


def messages(name: str, way: str) -> list[bytes]:
    """What Envoy said ("in"), or was answered ("out")."""
    return [base64.b64decode(data) for found, data in RECORDED[name] if found == way]


async def answered(plane: Plane, data: bytes, exchange: Any) -> list[bytes]:
    """The answers to one message, as a call gives it to an exchange."""
    found = exchange.take(data)
    return found if isinstance(found, list) else await found


@pytest.mark.parametrize("name", list(ANSWERS))
@asynchronous
async def test_what_an_envoy_said_is_answered_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with picking(ScriptedServer()) as plane:
        monkeypatch.setattr(plane.picker.destinations, "of", lambda url: RECORDED["destination"])
        exchange = plane.exchange()
        found = [one for data in messages(name, "in") for one in await answered(plane, data, exchange)]
        assert found == messages(name, "out")
        exchange.close()
        await plane.settled()
        assert plane.counted('preble_http_requests_total{model="tiny",route="/v1/chat/completions",status="200"} 1.0')
        assert plane.counted('preble_output_tokens_total{model="tiny"} 3.0')


@pytest.mark.parametrize("name", list(ANSWERS))
def test_what_was_recorded_is_what_was_meant(name: str) -> None:
    said = [ProcessingRequest.FromString(one) for one in messages(name, "in")]
    kinds = [one.WhichOneof("one") for one in said]
    assert kinds[0] == "request_headers" and kinds.count("response_headers") == 1
    assert set(kinds) == {"request_headers", "request_body", "response_headers", "response_body"}
    config = said[0].protocol_config
    assert (config.request_body_mode, config.response_body_mode) == (4, 4)
    found = [ProcessingResponse.FromString(one) for one in messages(name, "out")]
    assert named(found[0]) == RECORDED["destination"] and passed(found, "response") == ANSWERS[name]
    sent = json.loads(passed(found))
    assert sent.get("stream_options") == (None if name == "whole" else {"include_usage": True})
    read = [read_said(one) for one in messages(name, "in")]
    assert all(read), "they are read the short way"
    head = read[kinds.index("response_headers")]
    assert (
        head is not None and metadata_of(head, "envoy.lb", "x-gateway-destination-endpoint") == RECORDED["destination"]
    )
