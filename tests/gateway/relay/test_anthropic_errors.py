"""The gateway's own errors at Anthropic's paths, as their client raises them. Real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest

from preble.gateway.core.config_tables import KeyTable
from preble.gateway.core.http_errors import ApiError
from tests.support.relay import Call, Front, ScriptedServer, serving
from tests.support.transport import asynchronous

KEY = "k" * 16
MESSAGES: Any = [{"role": "user", "content": "hi"}]


async def never(call: Call) -> None:
    """Nothing comes."""
    await asyncio.Event().wait()


async def whole(call: Call) -> None:
    """An answer of Anthropic's."""
    text = {"type": "text", "text": "hello"}
    usage = {"input_tokens": 1, "output_tokens": 1}
    await call.answer(
        {"id": "m", "type": "message", "role": "assistant", "model": "tiny", "content": [text], "usage": usage}
    )


def client_of(front: Front, key: str = KEY) -> anthropic.AsyncAnthropic:
    """Anthropic's client before a gateway."""
    return anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{front.port}", api_key=key, max_retries=0)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int, Any, str]] = {
    "no key": ({"api_keys": ["o" * 16]}, {}, 401, anthropic.AuthenticationError, "authentication_error"),
    "not this model": ({"keys": [KeyTable(key=KEY, name="a", models=["big"])]}, {}, 403,
                       anthropic.PermissionDeniedError, "permission_error"),
    "no such model": ({}, {"model": "nobody"}, 404, anthropic.NotFoundError, "not_found_error"),
    "too large": ({"max_body_bytes": 1024}, {"system": "x" * 2000}, 413,
                  anthropic.APIStatusError, "request_too_large"),
    "too many": ({"rate_limit_per_minute": 0.001, "rate_limit_burst": 1}, {}, 429,
                 anthropic.RateLimitError, "rate_limit_error"),
    "no room": ({"max_live_requests": 1}, {}, 503, anthropic.ServiceUnavailableError, "overloaded_error"),
    "too late": ({"request_seconds": 0.05}, {}, 504, anthropic.GatewayTimeoutError, "timeout_error"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "more", "status", "error", "kind"), CASES.values(), ids=CASES)
@asynchronous
async def test_anthropics_client_raises_its_own_errors(
    config: dict[str, Any], more: dict[str, Any], status: int, error: Any, kind: str
) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, **more}
    async with (
        serving(ScriptedServer(whole if status == 429 else never), **config) as front,
        client_of(front) as client,
    ):
        if status == 429:
            await client.messages.create(**asked)
        if status == 503:
            front.gateway.live_choices += 1
        try:
            with pytest.raises(error) as raised:
                await client.messages.create(**asked)
        finally:
            if status == 503:
                front.gateway.live_choices -= 1
        assert raised.value.status_code == status and raised.value.type == kind
        assert raised.value.body["type"] == "error" and raised.value.body["error"]["message"]
        assert raised.value.response.headers["x-request-id"]
        await front.settled()


@asynchronous
async def test_a_late_stream_of_anthropics_ends_with_their_error() -> None:
    async def begins(call: Call) -> None:
        await call.stream({"type": "content_block_start", "index": 0}, end=False)
        await asyncio.Event().wait()

    async with serving(ScriptedServer(begins), request_seconds=0.2) as front, client_of(front) as client:
        with pytest.raises(anthropic.APIStatusError, match="took longer than") as raised:
            async for _ in await client.messages.create(model="tiny", messages=MESSAGES, max_tokens=5, stream=True):
                pass
        assert raised.value.type == "timeout_error"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/nothing"])
@asynchronous
async def test_other_paths_keep_openais_shape(path: str) -> None:
    async with serving(ScriptedServer(never)) as front:
        status, _, body = await front.post(path, {"model": "nobody"})
        assert status == 404 and b'"code":' in body and not body.startswith(b'{"type":"error"')


@pytest.mark.parametrize("status", [400, 415, 431, 500, 502])
def test_every_status_has_a_type_of_theirs(status: int) -> None:
    body = ApiError(status, "no").anthropic_body()
    assert body["error"]["type"] == ("api_error" if status >= 500 else "invalid_request_error")
