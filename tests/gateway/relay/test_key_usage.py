"""What keys may use, and what is counted of them, where requests are relayed. Real sockets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from preble.gateway.core import metrics as metrics_module
from preble.gateway.core.config_tables import KeyTable
from preble.gateway.core.metrics import Metrics
from preble.gateway.core.request_context import RequestContext
from tests.support.relay import (
    STREAM_HEAD,
    Call,
    Front,
    ScriptedServer,
    chat_answer,
    chat_events,
    chunk,
    event,
    serving,
)
from tests.support.transport import asynchronous, fast, until

CHAT = "/v1/chat/completions"
KEYS = [
    KeyTable(key="key-of-team-a", name="team-a", models=["tiny"]),
    KeyTable(key="key-of-team-b", name="team-b", requests_per_minute=1),
    KeyTable(key="key-without-name", requests_per_minute=100),
]


async def whole(call: Call) -> None:
    """A chat, whole."""
    await call.answer(chat_answer(prompt=7, cached=2, output=3))


def asking(model: str) -> dict[str, Any]:
    """A chat with a model."""
    return {"model": model, "messages": [{"role": "user", "content": "hi"}]}


def bearer(key: str) -> dict[str, str]:
    """The header that has a key."""
    return {"authorization": f"Bearer {key}"}


def counted(front: Front) -> dict[str, float]:
    """What is counted of keys."""
    lines = front.gateway.metrics.own_text().decode().splitlines()
    return {
        name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines) if name.startswith("preble_key_")
    }


@asynchronous
async def test_a_key_may_use_its_models_only_and_sees_no_others() -> None:
    servers = ScriptedServer(whole, model="tiny"), ScriptedServer(whole, model="big")
    async with serving(*servers, router_config=fast(several_models=True), keys=KEYS) as front:
        status, _, body = await front.post(CHAT, asking("big"), bearer("key-of-team-a"))
        assert status == 403 and json.loads(body)["error"]["code"] == "model_not_allowed"
        assert not servers[1].calls
        assert (await front.post(CHAT, asking("tiny"), bearer("key-of-team-a")))[0] == 200
        for key, seen in (("key-of-team-a", {"tiny"}), ("key-of-team-b", {"tiny", "big"})):
            async with front.session.get(f"http://127.0.0.1:{front.port}/v1/models", headers=bearer(key)) as answer:
                assert {card["id"] for card in (await answer.json())["data"]} == seen
        await front.settled()


@pytest.mark.parametrize(
    ("models", "lora_path", "status"),
    [
        (["a"], ..., 200), (["a"], None, 200), (["a"], "", 200), (["a"], [None, None], 200),
        (["a"], "lora-1", 403), (["a"], ["lora-1"], 403), (["a"], [None, "lora-1"], 403),
        (["a"], 5, 403), (["a"], [["lora-1"]], 403), (["a"], {"name": "lora-1"}, 403),
        (["a", "lora-1"], [None, "lora-1"], 200), (["a", "a:lora-1"], "lora-1", 200), ([], "lora-1", 200),
        (["a", "b:lora-1"], "lora-1", 403),
    ],
)  # fmt: skip
@asynchronous
async def test_a_key_may_use_no_other_adapters_beside_its_models(
    models: list[str], lora_path: Any, status: int
) -> None:
    server = ScriptedServer(whole, model="a", adapters=["lora-1"])
    more = {} if lora_path is ... else {"lora_path": lora_path}
    async with serving(server, keys=[KeyTable(key="a-key", models=models)]) as front:
        for path, body in ((CHAT, asking("a")), ("/generate", {"text": "hi"})):
            found, _, answer = await front.post(path, {**body, **more}, bearer("a-key"))
            assert found == status and (status == 200 or json.loads(answer)["error"]["code"] == "model_not_allowed")
        assert len(server.calls) == (2 if status == 200 else 0)
        await front.settled()


@asynchronous
async def test_what_named_keys_use_is_counted_and_why_they_are_refused() -> None:
    servers = ScriptedServer(whole, model="tiny"), ScriptedServer(whole, model="big")
    async with serving(*servers, router_config=fast(several_models=True), keys=KEYS) as front:
        for model, key in (
            ("tiny", "key-of-team-a"), ("tiny", "key-of-team-a"), ("big", "key-of-team-a"),
            ("tiny", "key-of-team-b"), ("tiny", "key-of-team-b"), ("tiny", "key-without-name"), ("tiny", "wrong-key"),
        ):  # fmt: skip
            await front.post(CHAT, asking(model), bearer(key))
        await front.settled()
        assert counted(front) == {
            'preble_key_requests_total{key="team-a"}': 2.0,
            'preble_key_prompt_tokens_total{key="team-a"}': 14.0,
            'preble_key_cached_tokens_total{key="team-a"}': 4.0,
            'preble_key_output_tokens_total{key="team-a"}': 6.0,
            'preble_key_refused_total{key="team-a",why="model_not_allowed"}': 1.0,
            'preble_key_requests_total{key="team-b"}': 1.0,
            'preble_key_prompt_tokens_total{key="team-b"}': 7.0,
            'preble_key_cached_tokens_total{key="team-b"}': 2.0,
            'preble_key_output_tokens_total{key="team-b"}': 3.0,
            'preble_key_refused_total{key="team-b",why="requests_per_minute"}': 1.0,
        }


GENERATED = {"text": "a b c", "meta_info": {"prompt_tokens": 9, "completion_tokens": 5, "cached_tokens": 4}}
LEFT = {  # path, what is asked, the events that its client reads, and the tokens of prompt and output then counted
    "chat": (CHAT, {**asking("tiny"), "stream": True}, chat_events("one", " two", " three", reason=None), (None, 3)),
    "not resumable": (CHAT, {**asking("tiny"), "stream": True, "logprobs": True},
                      chat_events("one", " two", reason=None), (None, 2)),
    "generate": ("/generate", {"text": "hi", "stream": True}, [GENERATED], (9, 5)),
    "only opened": (CHAT, {**asking("tiny"), "stream": True}, chat_events(reason=None), (None, 0)),
}  # fmt: skip


@pytest.mark.parametrize(("path", "asked", "events", "expected"), LEFT.values(), ids=LEFT)
@asynchronous
async def test_what_clients_were_sent_that_left_early_is_counted(
    path: str, asked: Any, events: list[Any], expected: tuple[int | None, int]
) -> None:
    has_seen = asyncio.Event()

    async def script(call: Call) -> None:
        await call.write(STREAM_HEAD)
        for number, one in enumerate(events):
            if number == len(events) - 1 and expected[1]:
                await has_seen.wait()  # the last one comes alone
            await call.write(chunk(event(one)))
        await asyncio.Event().wait()

    server = ScriptedServer(script)
    async with serving(server, keys=[KeyTable(key="key-of-team-c", name="c", token_budget=1000)]) as front:
        if expected[1]:
            if len(events) == 1:
                has_seen.set()
            async with front.send(path, asked, bearer("key-of-team-c")) as answer:
                if len(events) > 1:
                    await answer.content.readuntil(json.dumps(events[-2]).encode())
                has_seen.set()
                await answer.content.readuntil(json.dumps(events[-1]).encode())
                answer.close()
        else:
            asking_task = asyncio.ensure_future(front.post(path, asked, bearer("key-of-team-c")))
            await until(lambda: len(server.calls) == 1, "the server was asked")
            asking_task.cancel()
        await front.settled()
        await until(lambda: counted(front).get('preble_key_requests_total{key="c"}') == 1.0, "it is counted")
        prompt, output = expected
        got = counted(front)
        assert got['preble_key_output_tokens_total{key="c"}'] == output
        assert got['preble_key_prompt_tokens_total{key="c"}'] > 0
        if prompt is not None:
            assert got['preble_key_prompt_tokens_total{key="c"}'] == prompt


@asynchronous
async def test_clients_that_leave_early_use_up_their_budget() -> None:
    async def script(call: Call) -> None:
        await call.write(STREAM_HEAD + chunk(event(GENERATED)))
        await asyncio.Event().wait()

    async with serving(
        ScriptedServer(script), keys=[KeyTable(key="key-of-team-c", name="c", token_budget=20)]
    ) as front:
        for _ in range(2):
            async with front.send("/generate", {"text": "hi", "stream": True}, bearer("key-of-team-c")) as answer:
                await answer.content.readuntil(b"\n\n")
                answer.close()
            await front.settled()
        status, _, body = await front.post("/generate", {"text": "hi"}, bearer("key-of-team-c"))
        assert status == 429 and json.loads(body)["error"]["code"] == "insufficient_quota"


@asynchronous
async def test_a_whole_answer_is_taken_from_its_keys_limits_before_the_next_request() -> None:
    keys = [
        KeyTable(key="key-of-team-c", name="c", token_budget=20),
        KeyTable(key="key-of-team-d", name="d", tokens_per_minute=20),
    ]
    async with serving(ScriptedServer(whole), keys=keys) as front:  # 7 tokens of prompt and 3 of output, by its word
        for key, code in (("key-of-team-c", "insufficient_quota"), ("key-of-team-d", "tokens_per_minute")):
            answers = [await front.post(CHAT, asking("tiny"), bearer(key)) for _ in range(3)]
            assert [status for status, _, _ in answers] == [200, 200, 429]
            assert json.loads(answers[2][2])["error"]["code"] == code
        await front.settled()


def test_names_of_keys_beyond_the_bound_are_counted_together(monkeypatch: Any) -> None:
    monkeypatch.setattr(metrics_module, "KEY_LABELS_MAX", 2)
    metrics = Metrics(lambda: 0.0)
    for name in ("a", "b", "c", "d", "a"):
        context = RequestContext("id", 0.0)
        context.key_label = name
        metrics.request("/v1/models", 200, 0.0, context)
    lines = dict(line.rsplit(" ", 1) for line in metrics.own_text().decode().splitlines() if line[:1] != "#")
    found = {name: value for name, value in lines.items() if name.startswith("preble_key_requests_total")}
    assert {name.split('"')[1]: float(value) for name, value in found.items()} == {"a": 2.0, "b": 1.0, "other": 2.0}
