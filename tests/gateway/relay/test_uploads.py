"""Uploads through a gateway: byte for byte, routed by model and load, and never read in two ways. Real sockets."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from preble.gateway.core.config_tables import KeyTable
from preble.gateway.core.http_errors import ApiError
from preble.gateway.relay.endpoints import POSTS
from preble.gateway.relay.form import PARTS_MAX, UploadBody, read_form
from preble.gateway.relay.text_key import text_key
from tests.support.relay import Call, Front, ScriptedServer, event, serving
from tests.support.transport import asynchronous, fast

PATH = "/v1/audio/transcriptions"
TYPE = "multipart/form-data; boundary=X-1"
AUDIO = bytes(range(256)) * 20


def part(name: str, value: bytes, more: str = "") -> bytes:
    """One part of a form."""
    return f'--X-1\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


def form(*parts: bytes, end: bytes = b"--X-1--\r\n") -> bytes:
    """A form."""
    return b"".join(parts) + end


FILE = part("file", AUDIO, '; filename="a.wav"')
GOOD = form(part("model", b"tiny"), FILE)


async def transcribed(call: Call) -> None:
    """A transcription."""
    await call.answer({"text": "hello"})


def read(data: bytes, content_type: str = TYPE) -> UploadBody:
    """What is read of a form."""
    return read_form(data, POSTS[PATH], content_type)


@asynchronous
async def test_an_upload_of_the_official_client_reaches_the_server_of_its_model() -> None:
    tiny, big = ScriptedServer(transcribed, model="tiny"), ScriptedServer(transcribed, model="big")
    async with serving(tiny, big, router_config=fast(several_models=True)) as front:
        url = f"http://127.0.0.1:{front.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
            for model, server in (("tiny", tiny), ("big", big)):
                answer = await client.audio.transcriptions.create(
                    model=model, file=("größe.wav", AUDIO), timestamp_granularities=["word", "segment"]
                )
                assert answer.text == "hello"
                (call,) = server.calls
                assert call.path == PATH and AUDIO in call.body
                sent = read(call.body, call.headers["content-type"])
                assert sent.model == model and sent.file_bytes == len(AUDIO)
        await front.settled()


@asynchronous
async def test_a_form_goes_on_byte_for_byte_and_the_same_file_to_the_same_server() -> None:
    servers = [ScriptedServer(transcribed) for _ in range(3)]
    async with serving(*servers) as front:
        seen = []
        for language in (b"en", b"de", b"fr", b"it"):
            data = form(FILE, part("model", b"tiny"), part("language", language))
            status, headers, body = await front.post(PATH, data, {"content-type": TYPE})
            assert status == 200 and json.loads(body) == {"text": "hello"}
            seen.append(headers["x-preble-worker"])
            server = next(one for one in servers if one.worker == seen[-1])
            assert server.calls[-1].body == data and server.calls[-1].headers["content-type"] == TYPE
        assert len(set(seen)) == 1
        used = set()
        for number in range(6):
            data = form(part("file", AUDIO + bytes([number]) * 9, '; filename="a.wav"'))
            _, headers, _ = await front.post(PATH, data, {"content-type": TYPE})
            used.add(headers["x-preble-worker"])
        assert len(used) > 1, "other files go by load"
        await front.settled()


@asynchronous
async def test_an_alias_is_replaced_in_the_form() -> None:
    server = ScriptedServer(transcribed)
    async with serving(server, model_names=["nice"]) as front:
        status, _, _ = await front.post(PATH, form(part("model", b"nice"), FILE), {"content-type": TYPE})
        (call,) = server.calls
        assert status == 200 and call.body == GOOD


@asynchronous
async def test_a_streamed_transcription_comes_as_events() -> None:
    async def streams(call: Call) -> None:
        await call.stream({"choices": [{"delta": {"content": "he"}}]})

    async with serving(ScriptedServer(streams)) as front:
        data = form(part("stream", b"True"), FILE)
        status, headers, body = await front.post(PATH, data, {"content-type": TYPE})
        assert status == 200 and headers["content-type"] == "text/event-stream"
        assert body == event({"choices": [{"delta": {"content": "he"}}]}) + event(b"[DONE]")
        await front.settled()


async def status_of(front: Front, data: bytes, content_type: str = TYPE, **headers: str) -> int:
    """The status of an upload."""
    return (await front.post(PATH, data, {"content-type": content_type, **headers}))[0]


@asynchronous
async def test_uploads_are_bounded_and_belong_to_their_endpoints() -> None:
    server = ScriptedServer(transcribed)
    async with serving(server, max_body_bytes=2048) as front:
        assert await status_of(front, GOOD) == 413
        assert await status_of(front, b"{}", "application/json") == 415
        assert (await front.post("/v1/embeddings", GOOD, {"content-type": TYPE}))[0] == 415
        assert await status_of(front, b"nothing of a form") == 400
        assert not server.calls
        await front.settled()


@asynchronous
async def test_a_key_uploads_for_its_models_only() -> None:
    servers = ScriptedServer(transcribed, model="tiny"), ScriptedServer(transcribed, model="big")
    keys = [KeyTable(key="key-of-team-a", name="team-a", models=["tiny"])]
    async with serving(*servers, router_config=fast(several_models=True), keys=keys) as front:
        key = {"authorization": "Bearer key-of-team-a"}
        assert await status_of(front, GOOD, **key) == 200
        assert await status_of(front, form(part("model", b"big"), FILE), **key) == 403
        assert await status_of(front, form(part("model", b"tiny"), FILE, part("model", b"big")), **key) == 400
        assert not servers[1].calls


TWICE_READ = {
    "twice": form(part("model", b"tiny"), part("model", b"big")),
    "before": b"before\r\n" + GOOD,
    "no end": GOOD.removesuffix(b"--X-1--\r\n"),
    "other end": form(part("model", b"tiny"), end=b"--X-1x\r\n"),
    "two names": form(part("model", b"tiny", '; name="b"')),
    "encoded": form(part("a", b"tiny", "; name*=utf-8''model")),
    "escaped": form(part('mo\\"del', b"tiny")),
    "folded": form(b'--X-1\r\nContent-Disposition: form-data;\r\n name="model"\r\n\r\ntiny\r\n'),
    "two heads": form(b'--X-1\r\nContent-Disposition: form-data; name="a"\r\nContent-Disposition: form-data; '
                      b'name="model"\r\n\r\ntiny\r\n'),
    "bare": form(b'--X-1\r\nX: y\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n'),
    "no name": form(b"--X-1\r\nContent-Disposition: form-data\r\n\r\ntiny\r\n"),
    "long head": form(part("a" * 5000, b"tiny")),
    "long model": form(part("model", b"x" * 5000)),
    "many": form(*(part(f"a{number}", b"") for number in range(PARTS_MAX + 1))),
}  # fmt: skip


@pytest.mark.parametrize("data", TWICE_READ.values(), ids=TWICE_READ)
def test_a_form_that_could_be_read_in_two_ways_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as raised:
        read(data)
    assert raised.value.status == 400


@pytest.mark.parametrize("content_type", ["multipart/form-data", "multipart/form-data; boundary="])
def test_a_form_without_a_boundary_is_refused(content_type: str) -> None:
    with pytest.raises(ApiError, match="boundary"):
        read(GOOD, content_type)


def test_what_a_form_has_is_read_and_its_bytes_are_changed_where_they_stand() -> None:
    parts = part("prompt", b""), part("model", "größe".encode()), FILE, part("include[]", b"a"), part("include[]", b"b")
    body = read(form(*parts), 'Multipart/Form-Data; charset=utf-8; Boundary="X-1"')
    assert (body.model, body.text("prompt"), body.stream, body.file_bytes) == ("größe", "", False, len(AUDIO))
    changed = read(body.edited({"model": b'"other"'}))
    assert changed.model == "other" and changed.digest == body.digest
    assert body.edited({}) == body.data
    unquoted = form(b"--X-1\r\ncontent-disposition:form-data;name=model\r\n\r\ntiny\r\n")
    assert read(unquoted).model == "tiny"


def test_the_key_of_an_upload_is_its_files_content() -> None:
    keys: list[Any] = [
        text_key(read(data)).tolist() for data in (GOOD, form(FILE), form(part("file", b"b", '; filename="a"')))
    ]
    assert keys[0] == keys[1] and keys[0][0] != keys[2][0]
    assert len(keys[0]) == len(AUDIO) // 512 + 1
