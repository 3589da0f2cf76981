"""Several models behind one gateway: each name leads to its own servers, adapters and aliases included."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import pytest

from preble.errors import HandshakeRefused
from preble.gateway.app import make_app
from preble.gateway.core import models as models_module
from preble.gateway.core.config_sources import Loaded
from preble.gateway.core.config_tables import KeyTable
from preble.gateway.core.models import NAMES_SHOWN_MAX
from preble.gateway.program import Reloading
from preble.gateway.relay.pinned import KeptAnswer, PinnedAnswers
from preble.transport.engine_servers.server_info import NAMES_MAX, ServedName, served_names
from preble.transport.namespaces import joined
from tests.support.relay import Call, Front, ScriptedServer, chat_answer, serving
from tests.support.transport import ScriptedWorker, asynchronous, fast, until

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


def gateway(*servers: ScriptedServer, **config: Any) -> AbstractAsyncContextManager[Front]:
    return serving(*servers, router_config=fast(several_models=True), **config)


async def answers(call: Call) -> None:
    await call.answer(chat_answer())


def server(model: str, *adapters: str, kind: str = "vllm") -> ScriptedServer:
    return ScriptedServer(answers, kind=kind, model=model, adapters=adapters)


async def ask(front: Front, model: str | None) -> tuple[int, Any]:
    status, _, body = await front.post(CHAT, {"messages": MESSAGES, **({} if model is None else {"model": model})})
    return status, json.loads(body)


async def listed(front: Front, path: str = "/v1/models") -> tuple[int, Any]:
    async with front.session.get(f"http://127.0.0.1:{front.port}{path}") as answer:
        return answer.status, json.loads(await answer.read())


@asynchronous
async def test_a_model_goes_to_the_servers_that_have_it() -> None:
    a, b, c = server("a"), server("b"), server("b", kind="sglang")
    async with gateway(a, b, c) as front:
        for _ in range(6):
            assert (await ask(front, "a"))[0] == 200
        assert (len(a.calls), len(b.calls), len(c.calls)) == (6, 0, 0)
        for _ in range(6):
            assert (await ask(front, "b"))[0] == 200
        assert len(a.calls) == 6 and len(b.calls) + len(c.calls) == 6
        await front.settled()


@asynchronous
async def test_a_request_without_model_goes_to_the_only_one_or_is_refused_by_name() -> None:
    async with gateway(server("a")) as front:
        assert (await ask(front, None))[0] == 200
    async with gateway(server("a"), server("b")) as front:
        status, body = await ask(front, None)
        assert status == 400 and body["error"]["param"] == "model" and "a, b" in body["error"]["message"]


@asynchronous
async def test_an_unknown_model_is_404_and_says_which_there_are() -> None:
    a, b = server("a", "lora-1"), server("b")
    async with gateway(a, b) as front:
        status, body = await ask(front, "c")
        assert status == 404 and body["error"]["code"] == "model_not_found"
        assert body["error"]["message"].endswith("this gateway serves a, b, lora-1")
        assert not a.calls and not b.calls
        await front.settled()


@asynchronous
async def test_models_are_listed_and_shown() -> None:
    async with gateway(server("a", "lora-1"), server("org/b", kind="sglang")) as front:
        status, body = await listed(front)
        assert status == 200 and [card["id"] for card in body["data"]] == ["a", "lora-1", "org/b"]
        assert (await listed(front, "/v1/models/org/b"))[1]["max_model_len"] == 4096
        assert (await listed(front, "/v1/models/lora-1"))[1]["parent"] == "a"
        assert "parent" not in (await listed(front, "/v1/models/a"))[1]
        assert (await listed(front, "/v1/models/c"))[0] == 404


@asynchronous
async def test_an_adapter_goes_to_its_servers_under_the_name_they_know() -> None:
    a, b = server("a", "lora-1", kind="sglang"), server("b", "lora-2")
    async with gateway(a, b) as front:
        assert (await ask(front, "lora-1"))[0] == (await ask(front, "lora-2"))[0] == 200
        assert a.calls[-1].json["model"] == "a:lora-1", "SGLang would take the bare name for the model's own"
        assert b.calls[-1].json["model"] == "lora-2"
        assert (await ask(front, "a:other"))[0] == 200, "SGLang says itself whether it has that adapter"
        assert a.calls[-1].json["model"] == "a:other"
        assert (await ask(front, "b:other"))[0] == 404
        models = front.gateway.models
        spaces = [models.get(name).namespace for name in ("a", "lora-1", "a:other", "b", "lora-2")]
        first = front.router.fleet.namespace_of_model("a"), front.router.fleet.namespace_of_model("b")
        assert sorted(first, key=str) == [("model", "a" if first[1] is None else "b"), None]
        a_space, b_space = first
        assert spaces == [
            a_space,
            joined(a_space, ("lora", "lora-1")),
            joined(a_space, ("lora", "other")),
            b_space,
            joined(b_space, ("lora", "lora-2")),
        ]


@asynchronous
async def test_an_adapter_that_is_loaded_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_module, "ASK_SECONDS", 0.0)
    a = server("a")
    async with gateway(a) as front:
        assert (await ask(front, "lora-1"))[0] == 404
        a.adapters.append("lora-1")
        assert (await ask(front, "lora-1"))[0] == 200
        assert [card["id"] for card in (await listed(front))[1]["data"]] == ["a", "lora-1"]


@asynchronous
async def test_servers_are_not_asked_for_every_unknown_name() -> None:
    a = server("a")
    async with gateway(a) as front:
        asked = []
        look = front.router.fleet.look_for_names

        async def looked() -> None:
            asked.append(1)
            await look()

        front.router.fleet.look_for_names = looked  # type: ignore[method-assign]
        for name in ("x", "y", "z"):
            assert (await ask(front, name))[0] == 404
        assert len(asked) == 1


@asynchronous
async def test_names_of_the_configuration_are_the_only_ones_and_lead_to_the_model() -> None:
    a = server("a")
    async with gateway(a, model_names=("gpt-4", "a")) as front:
        assert [card["id"] for card in (await listed(front))[1]["data"]] == ["gpt-4", "a"]
        assert (await ask(front, "gpt-4"))[0] == 200 and a.calls[-1].json["model"] == "a"
        assert (await ask(front, None))[0] == 200 and "model" not in a.calls[-1].json
        assert (await listed(front, "/v1/models/gpt-4"))[1]["parent"] == "a"
    async with gateway(server("a"), model_names=("gpt-4",)) as front:
        assert (await ask(front, "a"))[0] == 404


@asynchronous
async def test_names_of_the_configuration_change_at_a_reload() -> None:
    async with gateway(server("a"), model_names=["gpt-4"]) as front:
        loaded = [Loaded(front.gateway.config, {})]
        reloading = Reloading(front.gateway, make_app(front.gateway), lambda: loaded[-1], [])
        for names, statuses in ((["gpt-5"], (404, 200)), ([], (404, 404)), (["gpt-4"], (200, 404))):
            loaded.append(Loaded(msgspec.structs.replace(front.gateway.config, model_names=names), {}))
            reloading.ask()
            await until(lambda: front.gateway.config == loaded[-1].config, "it is reloaded")
            assert [card["id"] for card in (await listed(front))[1]["data"]] == (names or ["a"])
            assert tuple([(await ask(front, name))[0] for name in ("gpt-4", "gpt-5")]) == statuses
        await reloading.close()


@asynchronous
async def test_a_server_that_comes_or_goes_changes_what_is_served() -> None:
    a, b = server("a"), await server("b").start()
    async with gateway(a) as front:
        assert (await ask(front, "b"))[0] == 404
        await front.router.add_worker(b.url)
        assert (await ask(front, "b"))[0] == 200 and b.calls
        await front.router.fleet.remove(b.url)
        assert (await ask(front, "b"))[0] == 404 and (await ask(front, None))[0] == 200
    await b.stop()


@asynchronous
async def test_without_leave_servers_must_be_of_one_model() -> None:
    a, b = server("a"), await server("b").start()
    async with serving(a) as front:
        with pytest.raises(HandshakeRefused, match="model 'b'"):
            await front.router.add_worker(b.url)
    await b.stop()


@asynchronous
async def test_a_worker_of_our_own_does_not_join_servers_of_other_models() -> None:
    async def no_script(worker: ScriptedWorker, request: Any) -> None:
        """Nobody asks it."""

    ours = ScriptedWorker(no_script, model="c")
    async with gateway(server("a"), server("b")) as front:
        with pytest.raises(HandshakeRefused, match="the servers here have a, b"):
            await front.router.add_worker(ours.endpoint)
    await ours.close()


def test_names_are_read_from_cards_as_far_as_they_are_cards() -> None:
    cards = [{"id": "a", "parent": None}, {"id": "l", "parent": "a"}, {"id": 5}, {"id": ""}, "x", {"id": "y" * 600}]
    assert served_names({"data": cards}) == (ServedName("a"), ServedName("l", "a"))
    assert len(served_names({"data": [{"id": str(i)} for i in range(2 * NAMES_MAX)]})) == NAMES_MAX
    for odd in (None, [], {}, {"data": None}, {"data": {}}):
        assert served_names(odd) == ()


@asynchronous
async def test_an_error_names_a_bounded_number_of_models() -> None:
    a = server("a", *(f"lora-{i:03d}" for i in range(100)))
    async with gateway(a) as front:
        message = (await ask(front, "c"))[1]["error"]["message"]
        assert message.endswith("lora-018, ...") and message.count(",") == NAMES_SHOWN_MAX


# --- answers that one server keeps ------------------------------------------------------------------------------------


@asynchronous
async def test_an_answer_is_asked_for_where_it_is_kept() -> None:
    made: dict[str, ScriptedServer] = {}

    async def keeps(one: ScriptedServer, call: Call) -> None:
        if call.path == "/v1/responses":
            made[f"resp_{len(made)}"] = one
            usage = {"input_tokens": 5, "output_tokens": 1}
            body = {"id": f"resp_{len(made) - 1}", "status": "completed", "output": [], "usage": usage}
            if not call.json.get("stream"):
                return await call.answer(body)
            return await call.stream({"type": "response.completed", "response": body}, end=True)
        await call.answer({"where": one.worker, "method": call.method, "path": call.path})

    servers = [ScriptedServer(kind="vllm") for _ in range(3)]
    for one in servers:
        one.script = lambda call, one=one: keeps(one, call)  # type: ignore[misc]
    async with gateway(*servers) as front:
        for number in range(6):
            body = {"model": "tiny", "input": f"question {number}", "stream": number % 2 == 1}
            assert (await front.post("/v1/responses", body))[0] == 200
        assert len(set(map(id, made.values()))) > 1, "several servers have made answers"
        for name, keeper in list(made.items()):
            status, answer = await listed(front, f"/v1/responses/{name}")
            assert status == 200
            assert answer == {"where": keeper.worker, "method": "GET", "path": f"/v1/responses/{name}"}
            status, _, data = await front.post(f"/v1/responses/{name}/cancel", b"")
            assert status == 200 and json.loads(data)["where"] == keeper.worker
            count = len(keeper.calls)
            await front.post("/v1/responses", {"model": "tiny", "input": "and?", "previous_response_id": name})
            assert len(keeper.calls) == count + 1
        assert (await listed(front, "/v1/responses/unknown"))[0] == 200, "some server says whether it has it"
        await front.settled()


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@asynchronous
async def test_an_answer_that_is_asked_for_again_has_no_tokens_and_is_for_keys_of_its_model(streamed: bool) -> None:
    usage = {"input_tokens": 500, "output_tokens": 5000}
    kept = {"id": "resp_1", "status": "completed", "output": [], "usage": usage}

    async def keeps(call: Call) -> None:
        if streamed and call.path != "/v1/responses":
            return await call.stream({"type": "response.output_text.delta"}, {"response": kept})
        return await call.answer(kept)

    keys = [
        KeyTable(key="key-of-a", name="a", models=["a"], token_budget=10_000),
        KeyTable(key="key-of-b", name="b", models=["b"]),
        KeyTable(key="key-of-all", name="all"),
    ]
    server, other = ScriptedServer(keeps, kind="vllm", model="a"), ScriptedServer(keeps, kind="vllm", model="b")
    async with gateway(server, other, keys=keys) as front:

        async def status_of(key: str, path: str, body: Any = b"") -> int:
            found, _, _ = await front.post(f"/v1/responses{path}", body, {"authorization": f"Bearer {key}"})
            await front.settled()
            return found

        def counted() -> Any:
            lines = front.gateway.metrics.own_text().decode().splitlines()
            tokens = [one for one in lines if one[0] != "#" and "_tokens_total" in one and not one.endswith(" 0.0")]
            return tokens, front.router.counters.output_tokens

        assert await status_of("key-of-a", "", {"model": "a", "input": "hi"}) == 200
        before = counted()
        assert 'preble_output_tokens_total{model="a"} 5000.0' in before[0] and before[1] == 5000
        for _ in range(3):
            for key in ("key-of-a", "key-of-all"):
                assert await status_of(key, "/resp_1/cancel") == 200
        assert await status_of("key-of-b", "/resp_1/cancel") == 403
        assert await status_of("key-of-b", "/unknown/cancel") == await status_of("key-of-a", "/unknown/cancel") == 404
        assert len(server.calls) == 7 and not other.calls
        assert await status_of("key-of-all", "/unknown/cancel") == 200, "some server says whether it has it"
        assert counted() == before
        assert front.router.counters.finished == 8


def test_the_oldest_answers_are_forgotten_first() -> None:
    pinned = PinnedAnswers(3)
    kept = [KeptAnswer(f"w{i}", "m") for i in range(4)]
    for i in range(4):
        pinned.put(f"r{i}", kept[i])
        pinned.put("r1", kept[1]) if i == 2 else None
    assert [pinned.get(f"r{i}") for i in range(4)] == [None, *kept[1:]] and len(pinned) == 3
    assert pinned.get(None) is None
