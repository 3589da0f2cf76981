"""`preble serve` as its clients see it: the `openai` client, plain HTTP, and real simulated workers behind it.

What the simulated engine says is a function of the prompt's tokens, so every answer is known in advance: a wrong chat
template, tokenizer, stop or stream would say something else.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from preble.gateway.text.tokenizing import TextCodec
from tests.support.gateway import BOS, END, USER, Client, GatewayProcess, make_tokenizer
from tests.support.transport import HANG_SECONDS, WorkerProcess, expected_tokens

openai = pytest.importorskip("openai", reason="needs the openai client: pip install 'preble[test]'")

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüezi, wie gaht's?"}]
RENDERED = f"{BOS}{USER}system: Be brief.{END}{USER}user: Grüezi, wie gaht's?{END}{USER}assistant: "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tokenizer."""
    return make_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def codec(model: Path) -> Iterator[TextCodec]:
    """The same tokenizer, to say what answers must be."""
    codec = TextCodec(model, threads=1)
    yield codec
    codec.close()


@pytest.fixture(scope="module")
def workers() -> Iterator[list[WorkerProcess]]:
    """Two simulated workers."""
    processes = [WorkerProcess("--id", name, time_scale=0.01) for name in ("a", "b")]
    yield processes
    for process in processes:
        process.stop()


@pytest.fixture(scope="module")
def gateway(
    workers: list[WorkerProcess], model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway in front of both."""
    log = tmp_path_factory.mktemp("gateway") / "log"
    endpoints = [worker.endpoint for worker in workers]
    process = GatewayProcess("--workers", *endpoints, "--tokenizer", str(model), "--model-names", "tiny", log=log)
    yield process
    assert process.stop() == 0


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[Client]:
    """Plain HTTP."""
    client = Client(gateway.address)
    yield client
    client.close()


@pytest.fixture(scope="module")
def api(gateway: GatewayProcess) -> Iterator[Any]:
    """The official client."""
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as api:
        yield api


def answer(codec: TextCodec, prompt: str, count: int, *, special_tokens: bool = True) -> str:
    """What the engine says to a prompt, as text."""
    ids = codec.encode_now(prompt, special_tokens)
    return codec.decode(expected_tokens(ids.tolist(), count))


def cached_after(client: Client, what: str = "preble_leases_active 0.0") -> bool:
    """Whether the metrics say so."""
    return what in client.call("GET", "/metrics")[2]


def wait_until(condition: Any, what: str) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)


# --- OpenAI's endpoints -----------------------------------------------------------------------------------------------


def test_a_chat_is_answered_as_the_template_and_the_engine_say(api: Any, codec: TextCodec) -> None:
    reply = api.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=40)
    assert reply.choices[0].message.content == answer(codec, RENDERED, 40, special_tokens=False)
    assert (reply.choices[0].finish_reason, reply.object, reply.model) == ("length", "chat.completion", "tiny")
    assert reply.usage.prompt_tokens == len(codec.encode_now(RENDERED, False))
    assert (reply.usage.completion_tokens, reply.usage.total_tokens) == (40, 40 + reply.usage.prompt_tokens)


def test_a_prompt_that_came_before_is_reported_as_cached(api: Any) -> None:
    prompt = "The same prompt twice. " * 20
    first, second = (api.completions.create(model="tiny", prompt=prompt, max_tokens=2).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens <= 1, "at most the token that all prompts begin with"
    assert second.prompt_tokens_details.cached_tokens == second.prompt_tokens - 1


def test_a_stream_says_what_the_whole_answer_says(api: Any, codec: TextCodec) -> None:
    stream = api.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=60, stream=True, stream_options={"include_usage": True}
    )
    events = list(stream)
    assert events[0].choices[0].delta.role == "assistant"
    pieces = [event.choices[0].delta.content or "" for event in events if event.choices]
    assert "".join(pieces) == answer(codec, RENDERED, 60, special_tokens=False)
    assert len([piece for piece in pieces if piece]) > 5, "it comes in pieces"
    assert events[-1].usage.completion_tokens == 60 and not events[-1].choices
    assert [event.choices[0].finish_reason for event in events if event.choices][-1] == "length"
    assert all(event.usage is None for event in events[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_puts_each_prompt_before_its_output(api: Any, codec: TextCodec, stream: bool) -> None:
    ids = codec.encode_now("three words here", special_tokens=False).tolist()
    for prompt, begins in (
        ("one two", ["one two"]),
        (ids, [codec.decode(ids)]),
        (["one two", ids], ["one two", codec.decode(ids)]),
    ):
        plain, echoed = ["", ""], ["", ""]
        for found, more in ((plain, {}), (echoed, {"echo": True})):
            answer = api.completions.create(
                model="tiny", prompt=prompt, max_tokens=6, temperature=0, stream=stream, extra_body=more
            )
            for event in answer if stream else [answer]:
                for choice in event.choices:
                    found[choice.index] += choice.text
        assert echoed[: len(begins)] == [begin + text for begin, text in zip(begins, plain, strict=False)]
        assert all(plain[: len(begins)])


def test_completions_take_text_ids_and_lists_of_both(api: Any, codec: TextCodec) -> None:
    ids = codec.encode_now("as ids").tolist()
    for prompt in ("as text", ids, ["as text", "more"], [ids, [1, 2, 3]]):
        several = prompt if isinstance(prompt[0], (str, list)) and not isinstance(prompt, str) else [prompt]
        reply = api.completions.create(model="tiny", prompt=prompt, max_tokens=8)
        wanted = [
            answer(codec, one, 8) if isinstance(one, str) else codec.decode(expected_tokens(one, 8)) for one in several
        ]
        assert [choice.text for choice in reply.choices] == wanted
        assert [choice.index for choice in reply.choices] == list(range(len(several)))


def test_several_choices_come_together_and_share_the_prompt(api: Any, codec: TextCodec) -> None:
    wanted = answer(codec, "three of me", 30)
    reply = api.completions.create(model="tiny", prompt="three of me", max_tokens=30, n=3)
    assert [choice.text for choice in reply.choices] == [wanted] * 3
    assert reply.usage.completion_tokens == 90
    assert reply.usage.prompt_tokens == len(codec.encode_now("three of me"))
    texts = ["", "", ""]
    for event in api.completions.create(model="tiny", prompt="three of me", max_tokens=30, n=3, stream=True):
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == [wanted] * 3


def test_choices_of_a_prompt_and_requests_that_name_a_group_are_placed_as_one_set(api: Any) -> None:
    def decision(**asked: Any) -> str:
        raw = api.completions.with_raw_response.create(model="tiny", prompt="samples", max_tokens=2, **asked)
        return str(raw.headers["x-preble-decision"])

    assert not decision().startswith("reason=group,")
    assert decision(n=2).startswith("reason=group,")
    assert decision(extra_headers={"x-preble-group": "step-1"}).startswith("reason=group,")
    with pytest.raises(openai.BadRequestError, match="x-preble-group must be"):
        decision(extra_headers={"x-preble-group": "two words"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_before_it(api: Any, codec: TextCodec, client: Client, stream: bool) -> None:
    whole = answer(codec, "stop here", 400)
    stop = whole[60:66]  # may begin inside one token and end inside another
    reply = api.completions.create(
        model="tiny", prompt="stop here", max_tokens=400, stop=[stop, "nowhere"], stream=stream
    )
    if stream:
        events = list(reply)
        text, last = "".join(e.choices[0].text for e in events), events[-1].choices[0]
    else:
        text, last = reply.choices[0].text, reply.choices[0]
        assert reply.usage.completion_tokens < 400
    assert text == whole[: whole.find(stop)]
    assert last.finish_reason == "stop"
    wait_until(lambda: cached_after(client), "the engine was asked to stop")


def test_a_stop_token_ends_the_answer_and_is_not_shown(api: Any, codec: TextCodec) -> None:
    tokens = expected_tokens(codec.encode_now("stop token").tolist(), 20)
    place = next(i for i in range(5, 20) if tokens[i] not in tokens[:i])
    reply = api.completions.create(
        model="tiny", prompt="stop token", max_tokens=20, extra_body={"stop_token_ids": [tokens[place]]}
    )
    assert reply.choices[0].text == codec.decode(tokens[:place])
    assert (reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("stop", place + 1)


def test_models_are_listed_and_others_refused(api: Any) -> None:
    assert [model.id for model in api.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError) as caught:
        api.chat.completions.create(model="huge", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_salted_requests_share_no_cache(api: Any) -> None:
    prompt = "who may see my cache? " * 10
    cached = [
        api.completions.create(
            model="tiny", prompt=prompt, max_tokens=1, extra_body={"cache_salt": salt}
        ).usage.prompt_tokens_details.cached_tokens
        for salt in ("mine", "yours", "mine")
    ]
    assert cached[:2] == [0, 0] and cached[2] > 0


# --- SGLang's endpoint ------------------------------------------------------------------------------------------------


def test_generate_answers_as_sglang_does(client: Client, codec: TextCodec) -> None:
    body = {"text": "native", "sampling_params": {"max_new_tokens": 12}, "rid": "mine"}
    status, _, reply = client.call("POST", "/generate", body)
    tokens = expected_tokens(codec.encode_now("native").tolist(), 12)
    assert (status, reply["output_ids"], reply["text"]) == (200, tokens, codec.decode(tokens))
    meta = reply["meta_info"]
    assert (meta["id"], meta["completion_tokens"], meta["finish_reason"]) == (
        "mine",
        12,
        {"type": "length", "length": 12},
    )
    many = client.call("POST", "/generate", {"input_ids": [[1, 2], [3]], "sampling_params": {"max_new_tokens": 3}})[2]
    assert [one["output_ids"] for one in many] == [expected_tokens([1, 2], 3), expected_tokens([3], 3)]


def test_a_generate_stream_repeats_all_so_far(client: Client, codec: TextCodec) -> None:
    tokens = expected_tokens(codec.encode_now("native").tolist(), 12)
    body = {"text": "native", "sampling_params": {"max_new_tokens": 12}, "stream": True}
    _, headers, text = client.call("POST", "/generate", body)
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]" and headers["content-type"].startswith("text/event-stream")
    seen = [json.loads(event)["output_ids"] for event in events[:-1]]
    assert seen[-1] == tokens
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(seen))


# --- headers, errors, operators ---------------------------------------------------------------------------------------


def test_headers_reports_where_a_request_went_and_why(client: Client) -> None:
    body = {"prompt": "where am I", "max_tokens": 2}
    _, headers, reply = client.call("POST", "/v1/completions", body, {"x-request-id": "mine-1"})
    assert headers["x-request-id"] == "mine-1" and reply["id"] == "cmpl-mine-1"
    caches_it = headers["x-preble-worker"]
    assert caches_it in ("a", "b")
    assert headers["x-preble-decision"].startswith("reason=explore, matched_tokens=")
    _, headers, _ = client.call("POST", "/v1/completions", body, {"x-request-id": "with space"})
    assert headers["x-request-id"] != "with space"
    decision = headers["x-preble-decision"]
    if headers["x-preble-worker"] == caches_it:
        assert decision.startswith("reason=exploit, matched_tokens=10, ")
    else:  # of so short a prompt little is saved, so that it may go where less waits
        assert re.match(r"reason=escape, matched_tokens=[0-8], ", decision)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", b"{", 400, None),
        ("/v1/completions", b"[" * 100_000, 400, None),
        ("/v1/completions", b'{"logit_bias": ' + b"[" * 100_000, 400, "logit_bias"),
        ("/v1/completions", b'{"metadata": ' + b"[" * 100_000, 400, None),
        ("/v1/completions", {"prompt": "x", "logitbias": {}}, 400, "logitbias"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "contents": "x"}]}, 400, "messages[0].contents"),
        ("/generate", {"text": "x", "sampling_params": {"max_tokens": 5}}, 400, "sampling_params.max_tokens"),
        ("/generate", {"text": "x", "sampling_params": {"watermark": {}}}, 400, "sampling_params.watermark"),
        ("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 1}, 400, "echo"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "echo": True}, 400, "echo"),
        ("/v1/completions", {"prompt": "x", "min_tokens": 2}, 400, "min_tokens"),
        ("/v1/completions", {"prompt": "x", "min_tokens": 17}, 400, "min_tokens"),
        ("/v1/completions", {"prompt": "x", "response_format": {"type": "json_object"}}, 400, "response_format"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {}}, 400, "structured_outputs"),
        ("/v1/completions", {"prompt": "x", "regex": "a", "ebnf": "b"}, 400, "ebnf"),
        ("/v1/completions", b'{"prompt": "\xff"}', 400, None),
        ("/v1/completions", {"prompt": []}, 400, "prompt"),
        ("/v1/completions", {"prompt": [1, "a"]}, 400, "prompt"),
        ("/v1/completions", {"prompt": [-1]}, 400, "prompt"),
        ("/v1/completions", {"prompt": [True]}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "n": 65}, 400, "n"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"7": 1}}, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 2**30}, 400, "max_tokens"),
        ("/generate", {"text": "x", "sampling_params": {"regex": "a+"}}, 400, "sampling_params.regex"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            400,
            None,
        ),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "bishop", "content": "x"}]}, 400, None),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages[0].content",
        ),
        ("/generate", {}, 400, "text"),
        ("/generate", {"text": "x", "input_ids": [1]}, 400, "text"),
        ("/v1/nothing", {}, 404, None),
    ],
)
def test_what_is_wrong_is_said_in_openais_shape(client: Client, path: str, body: Any, status: int, param: str) -> None:
    got, _, reply = client.call("POST", path, body)
    assert got == status
    assert set(reply["error"]) == {"message", "type", "param", "code"}
    assert reply["error"]["param"] == param


def test_a_body_that_is_too_large_is_refused(client: Client) -> None:
    assert client.call("POST", "/v1/completions", b" " * ((8 << 20) + 1))[0] == 413


def test_health_readiness_and_workers(client: Client) -> None:
    assert client.call("GET", "/health")[0] == 200
    status, _, reply = client.call("GET", "/ready")
    assert status == 200 and reply == {"ready": True, "draining": False, "workers": 2}
    cards = client.call("GET", "/workers")[2]["workers"]
    assert sorted((card["id"], card["state"]) for card in cards) == [("a", "ready"), ("b", "ready")]


def test_workers_can_be_added_drained_and_removed(gateway: GatewayProcess) -> None:
    third = WorkerProcess("--id", "c", time_scale=0.01)
    client = Client(gateway.address, gateway.admin_token)
    try:
        status, _, card = client.call("POST", "/workers", {"address": third.endpoint})
        assert (status, card["id"], card["state"]) == (201, "c", "ready")
        assert client.call("POST", "/workers", {"address": third.endpoint})[0] == 409
        status, _, card = client.call("POST", "/workers/c/drain")
        assert (status, card["state"]) == (202, "draining")
        for i in range(6):
            headers = client.call("POST", "/v1/completions", {"prompt": f"new {i}", "max_tokens": 1})[1]
            assert headers["x-preble-worker"] != "c"
        assert client.call("DELETE", f"/workers/{third.endpoint}")[2] == {"removed": "c"}
        assert client.call("DELETE", "/workers/c")[0] == 404
    finally:
        third.stop()
    for address in ("nowhere", "tcp://", "tcp://host:port", "tcp://h:99999", "tcp://h h:1", "file:///etc/passwd"):
        assert client.call("POST", "/workers", {"address": address})[0] == 400, address


def test_without_keys_what_changes_the_fleet_needs_the_printed_token(gateway: GatewayProcess, client: Client) -> None:
    address = {"address": "tcp://127.0.0.1:9"}
    for key in (None, "wrong-token"):
        one = Client(gateway.address, key)
        for method, path, body in (
            ("POST", "/workers", address),
            ("POST", "/workers/a/drain", None),
            ("DELETE", "/workers/a", None),
        ):
            status, _, reply = one.call(method, path, body)
            assert (status, reply["error"]["code"]) == (401, "invalid_api_key")
        one.close()
    assert [card["state"] for card in client.call("GET", "/workers")[2]["workers"]] == ["ready", "ready"]
    assert gateway.admin_token not in gateway.log.read_text()


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "rebound.example.com"},
        {"origin": "https://example.com"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    ],
)
def test_without_keys_pages_of_other_sites_are_refused(
    gateway: GatewayProcess, client: Client, headers: dict[str, str]
) -> None:
    for method, path, body in (
        ("GET", "/", None),
        ("GET", "/v1/preble/state", None),
        ("GET", "/metrics", None),
        ("POST", "/v1/completions", {"prompt": "spend their time", "max_tokens": 1}),
        ("DELETE", "/workers/a", None),
    ):
        status, _, reply = client.call(method, path, body, headers)
        assert (status, reply["error"]["type"]) == (403, "permission_error"), path
    assert client.call("GET", "/health", None, headers)[0] == client.call("GET", "/ready", None, headers)[0] == 200
    own = {"host": gateway.address, "origin": gateway.url, "sec-fetch-site": "same-origin"}
    assert client.call("POST", "/v1/completions", {"prompt": "ours", "max_tokens": 1}, own)[0] == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_a_body_that_a_form_could_send_is_refused(client: Client, kind: str) -> None:
    status, _, reply = client.call("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, {"content-type": kind})
    assert (status, reply["error"]["code"]) == (415, "unsupported_media_type")


def test_explain_says_where_a_prompt_would_go_and_books_nothing(client: Client) -> None:
    status, _, reply = client.call("POST", "/v1/preble/explain", {"messages": MESSAGES})
    assert status == 200 and reply["worker"] in ("a", "b")
    assert {row["worker"] for row in reply["workers"]} == {"a", "b"}
    assert client.call("POST", "/v1/preble/explain", {})[0] == 400
    assert cached_after(client)


def test_metrics_count_what_happened(client: Client) -> None:
    client.call("POST", "/v1/completions", {"prompt": "count me " * 30, "max_tokens": 4})
    client.call("POST", "/v1/completions", {"prompt": "count me " * 30, "max_tokens": 4})
    ok = 'preble_http_requests_total{model="tiny",route="/v1/completions",status="200"}'
    counted = (ok, *(f'preble_queue_seconds_count{{at="{at}",model="tiny"}}' for at in ("gateway", "engine")))
    deadline = time.monotonic() + HANG_SECONDS  # a request is counted once its answer has been sent
    while True:
        text = client.call("GET", "/metrics")[2]
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        if all(float(values.get(name, 0)) >= 2 for name in counted) or time.monotonic() > deadline:
            break
    assert float(values['preble_requests_total{policy="e2",reason="exploit"}']) >= 1
    assert float(values['preble_actual_cached_tokens_total{model="tiny"}']) >= 200
    assert float(values['preble_selected_cached_tokens_total{model="tiny"}']) <= float(
        values['preble_best_eligible_cached_tokens_total{model="tiny"}']
    )
    assert values['preble_worker_up{worker="a"}'] == values['preble_worker_up{worker="b"}'] == "1.0"
    for name in ("time_to_first_token", "time_per_output_token"):
        assert float(values[f'preble_{name}_seconds_count{{model="tiny"}}']) >= 2
    for at in ("gateway", "engine"):
        assert float(values[f'preble_queue_seconds_count{{at="{at}",model="tiny"}}']) >= 2
    assert float(values['preble_request_output_tokens_sum{model="tiny"}']) >= 8
    assert float(values['preble_request_prompt_tokens_count{model="tiny"}']) >= 2
    assert float(values[ok]) >= 2
    assert not [name for name in values if "_created" in name]
    assert values["preble_choices_live"] == "0.0"


# --- clients that go away ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_is_cancelled_at_the_engine(
    gateway: GatewayProcess, client: Client, stream: bool
) -> None:
    def cancelled() -> float:
        text = client.call("GET", "/metrics")[2]
        return float(
            next(line for line in text.splitlines() if line.startswith("preble_generations_cancelled")).split()[1]
        )

    before = cancelled()
    host, _, port = gateway.address.rpartition(":")
    body = b'{"prompt": "gone", "max_tokens": 100000, "n": 2, "stream": %s}' % str(stream).lower().encode()
    with socket.create_connection((host, int(port)), HANG_SECONDS) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        if stream:
            assert raw.recv(100)
        else:
            wait_until(lambda: cached_after(client, "preble_choices_live 2.0"), "the request runs")
    wait_until(lambda: cached_after(client) and cached_after(client, "preble_choices_live 0.0"), "all was given back")
    assert cancelled() == before + 2

    def idle() -> bool:
        cards = client.call("GET", "/workers")[2]["workers"]
        return all(card["load"]["running"] == card["load"]["waiting"] == 0 for card in cards)

    wait_until(idle, "the engines have stopped")


def test_a_stream_that_nobody_reads_holds_no_places_when_the_engine_is_done(
    gateway: GatewayProcess, client: Client
) -> None:
    body = b'{"input_ids": [7, 7], "sampling_params": {"max_new_tokens": 3000, "n": 8}, "stream": true}'
    host, _, port = gateway.address.rpartition(":")
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect((host, int(port)))
        raw.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        wait_until(lambda: cached_after(client, "preble_choices_live 8.0"), "it has its places")
        wait_until(lambda: cached_after(client, "preble_choices_live 0.0"), "the engine is done")
        text = client.call("GET", "/metrics")[2]
        assert "preble_leases_active 0.0" in text and "preble_generations_live 0.0" in text
        assert 'preble_connections_refused_total{why="unread"}' not in text, "the client is still there"
        raw.settimeout(HANG_SECONDS)
        assert raw.recv(12) == b"HTTP/1.1 200"


def test_prompts_and_answers_are_not_in_the_log(client: Client, gateway: GatewayProcess, api: Any) -> None:
    secret = "xyzzy-plugh"
    api.completions.create(model="tiny", prompt=f"my secret is {secret}", max_tokens=3)
    client.call("POST", "/v1/chat/completions", {"messages": [{"role": secret, "content": secret}]})
    client.call("POST", "/v1/completions", {"prompt": [secret, 7], "stop": secret * 99})
    log = gateway.log.read_text()
    assert secret not in log
    lines = [line for line in gateway.log_lines() if line["message"] == "request"]
    assert any(line["output_tokens"] == 3 and line["worker"] in ("a", "b") for line in lines)


def test_what_a_client_says_of_sessions_is_in_the_log_the_metrics_and_the_record(
    client: Client, gateway: GatewayProcess
) -> None:
    headers = {"x-claude-code-session-id": "talk", "x-claude-code-agent-id": "agent-2", "x-request-id": "of-a-session"}
    headers["x-parent-session-id"] = "root"
    body = {"prompt": [1, 2, 3], "max_tokens": 2, "user": "somebody@example.org"}
    assert client.call("POST", "/v1/completions", body, headers)[0] == 200
    assert client.call("POST", "/v1/completions", body, {"x-request-id": "of-a-user"})[0] == 200

    def named() -> dict[str, Any]:
        return {line.get("request_id", ""): line for line in gateway.log_lines()}

    wait_until(lambda: {"of-a-session", "of-a-user"} <= named().keys(), "both are in the log")
    line, of_user = named()["of-a-session"], named()["of-a-user"]
    assert [line[part] for part in ("session", "parent_session", "agent")] == ["talk", "root", "agent-2"]
    assert of_user["session"].startswith("user-") and "somebody" not in gateway.log.read_text()
    state = client.call("GET", "/v1/preble/state")[2]
    assert 'preble_session_requests_total{names="agent"}' in client.call("GET", "/metrics")[2]
    (sequence,) = [one["sequence"] for one in state["decisions"] if one["request_id"].startswith("of-a-session")]
    told = client.call("GET", f"/v1/preble/decisions/{sequence}")[2]
    assert told["session"] == {"session": "talk", "parent": "root", "agent": "agent-2", "shared": False}


# --- keys, rates, bounds, ends ----------------------------------------------------------------------------------------


def test_keys_and_rates(workers: list[WorkerProcess], model: Path, tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text(
        "api_keys: [user-key-1]\nadmin_keys: [admin-key-1]\nrate_limit_per_minute: 1\nrate_limit_burst: 2\n"
    )
    arguments = ("--config", str(config), "--workers", workers[0].endpoint, "--tokenizer", str(model))
    process = GatewayProcess(*arguments, log=tmp_path / "log")
    try:
        nobody, user = Client(process.address), Client(process.address, "user-key-1")
        admin = Client(process.address, "admin-key-1")
        assert nobody.call("GET", "/v1/models")[0] == 401
        assert Client(process.address, "user-key-2").call("GET", "/v1/models")[0] == 401
        assert nobody.call("GET", "/health")[0] == nobody.call("GET", "/metrics")[0] == 200
        assert user.call("GET", "/workers")[0] == 403
        assert admin.call("GET", "/workers")[0] == 200
        assert [user.call("GET", "/v1/models")[0] for _ in range(2)] == [200, 200]
        status, headers, reply = user.call("GET", "/v1/models")
        assert (status, reply["error"]["type"]) == (429, "rate_limit_error")
        assert 1 <= int(headers["retry-after"]) <= 60
        assert admin.call("GET", "/workers")[0] == 200, "each key has its own rate"
        assert "user-key-1" not in process.log.read_text()
    finally:
        assert process.stop() == 0


def test_a_rate_holds_for_an_address_whatever_it_calls_itself_and_counts_choices(
    workers: list[WorkerProcess], tmp_path: Path
) -> None:
    limits = ("--rate-limit-per-minute", "1", "--rate-limit-burst", "3")
    process = GatewayProcess("--workers", workers[0].endpoint, *limits, log=tmp_path / "log")
    client = Client(process.address)
    try:
        forwarded = [{"x-forwarded-for": f"10.0.0.{i}"} for i in range(5)]
        found = [client.call("GET", "/v1/models", headers=one)[0] for one in forwarded]
        assert found == [200, 200, 200, 429, 429]
    finally:
        assert process.stop() == 0
    process = GatewayProcess("--workers", workers[0].endpoint, *limits, log=tmp_path / "log")
    client = Client(process.address)
    try:
        assert client.call("POST", "/v1/completions", {"prompt": [1], "max_tokens": 1, "n": 3})[0] == 200
        assert client.call("GET", "/v1/models")[0] == 429
    finally:
        assert process.stop() == 0


def test_at_its_bound_the_gateway_says_when_to_come_back(
    workers: list[WorkerProcess], model: Path, tmp_path: Path
) -> None:
    arguments = ("--workers", workers[0].endpoint, "--tokenizer", str(model), "--max-live-requests", "1")
    process = GatewayProcess(*arguments, log=tmp_path / "log")
    try:
        with openai.OpenAI(base_url=f"{process.url}/v1", api_key="x", max_retries=0) as api:
            stream = api.completions.create(model="simulated", prompt="long", max_tokens=100_000, stream=True)
            next(iter(stream))
            status, headers, reply = Client(process.address).call("POST", "/v1/completions", {"prompt": "one more"})
            assert (status, headers["retry-after"], reply["error"]["code"]) == (503, "1", "queue_full")
            stream.close()
    finally:
        assert process.stop() == 0


# --- too much at once -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_place(model: Path, tmp_path: Path, **config: Any) -> Iterator[GatewayProcess]:
    """A gateway before a worker that runs one request at a time, and runs one without an end."""
    file = tmp_path / "gateway.yaml"
    worker = WorkerProcess("--max-running", "1", time_scale=0.05)
    write_config(file, workers=[worker.endpoint], tokenizer=str(model), **config)
    process = GatewayProcess("--config", str(file), log=tmp_path / "log")
    try:
        with openai.OpenAI(base_url=f"{process.url}/v1", api_key="x", max_retries=0) as api:
            stream = api.completions.create(model="simulated", prompt="long", max_tokens=190_000, stream=True)
            next(iter(stream))
            yield process
            stream.close()
    finally:
        assert process.stop() == 0
        worker.stop()


def write_config(file: Path, **content: Any) -> None:
    """A gateway's configuration."""
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in content.items()))


def leave(process: GatewayProcess, count: int, prompt: str = "one that waits") -> list[socket.socket]:
    """Ask so many times, on connections of their own, and read nothing."""
    host, port = process.address.rsplit(":", 1)
    body = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    sockets = []
    for _ in range(count):
        sockets.append(socket.create_connection((host, int(port)), HANG_SECONDS))
        sockets[-1].sendall(head % (host.encode(), len(body)) + body)
    return sockets


def sample(process: GatewayProcess, name: str) -> float:
    """A metric without labels."""
    text = Client(process.address).call("GET", "/metrics")[2]
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    assert found is not None, f"{name} is exported"
    return float(found[1])


def test_a_request_that_would_wait_too_long_is_answered_429_at_once_and_a_reload_changes_the_bound(
    model: Path, tmp_path: Path
) -> None:
    # less than any call takes: where no pace is known yet, the wait is as long as the backlog has lasted
    with one_place(model, tmp_path, refuse_wait_seconds=1e-6) as process:
        waiting = leave(process, 4)
        wait_until(lambda: sample(process, "preble_leases_active") == 5, "four wait")
        client = Client(process.address)
        status, headers, reply = client.call("POST", "/v1/completions", {"prompt": "one more"})
        assert (status, reply["error"]["type"], reply["error"]["code"]) == (429, "overloaded_error", "overloaded")
        assert int(headers["retry-after"]) >= 1
        assert sample(process, "preble_generations_refused_total") == 1
        file = tmp_path / "gateway.yaml"
        write_config(file, **{**json_config(file), "refuse_wait_seconds": None})
        process.signal(signal.SIGHUP)
        wait_until(lambda: "reloaded: refuse_wait_seconds" in process.log.read_text(), "the bound is off")
        waiting += leave(process, 1)
        wait_until(lambda: sample(process, "preble_leases_active") == 6, "five wait")
        for one in waiting:
            one.close()


def json_config(file: Path) -> dict[str, Any]:
    """What `write_config` wrote."""
    return {key: json.loads(value) for key, value in (line.split(": ", 1) for line in file.read_text().splitlines())}


@pytest.mark.parametrize("header", ["x-request-timeout", "x-stainless-read-timeout"])
def test_a_request_that_waited_as_long_as_its_client_would_is_given_up(
    model: Path, tmp_path: Path, header: str
) -> None:
    with one_place(model, tmp_path) as process:
        client = Client(process.address)
        status, _, reply = client.call("POST", "/v1/completions", {"prompt": "late"}, headers={header: "0.2"})
        assert (status, reply["error"]["code"]) == (429, "overloaded")
        assert sample(process, "preble_generations_shed_total") == 1
        wait_until(lambda: sample(process, "preble_leases_active") == 1, "it is booked no more")


def test_what_clients_that_left_had_asked_is_dropped_before_anything_of_it_is_computed(
    model: Path, tmp_path: Path
) -> None:
    with one_place(model, tmp_path) as process:
        gone = leave(process, 3)
        wait_until(lambda: load_of_worker(process)["waiting"] == 3, "three wait at the worker")
        for one in gone:
            one.close()
        wait_until(lambda: load_of_worker(process)["waiting"] == 0, "none waits")
        wait_until(lambda: sample(process, "preble_generations_cancelled_total") == 3, "they are counted")
        assert sample(process, "preble_leases_active") == load_of_worker(process)["running"] == 1


def load_of_worker(process: GatewayProcess) -> dict[str, int]:
    """What the worker reported last."""
    card = Client(process.address).call("GET", "/workers")[2]["workers"][0]
    return dict(card["load"] or {"waiting": 0, "running": 0})


def test_sigterm_lets_answers_end_and_takes_no_new_ones(model: Path, tmp_path: Path) -> None:
    worker = WorkerProcess(time_scale=0.3)
    process = GatewayProcess("--workers", worker.endpoint, "--tokenizer", str(model), log=tmp_path / "log")
    try:
        with openai.OpenAI(base_url=f"{process.url}/v1", api_key="x", max_retries=0) as api:
            stream = iter(api.completions.create(model="simulated", prompt="the last", max_tokens=100, stream=True))
            events = [next(stream)]
            process.signal(signal.SIGTERM)
            events += stream
            assert events[-1].choices[0].finish_reason == "length"
        assert process.process.wait(HANG_SECONDS) == 0
        with pytest.raises(OSError), contextlib.closing(Client(process.address)) as client:
            client.call("GET", "/health")
    finally:
        process.stop()
        worker.stop()


def test_a_worker_that_dies_does_not_show_in_the_stream(model: Path, codec: TextCodec, tmp_path: Path) -> None:
    pair = [WorkerProcess("--id", name, time_scale=0.2) for name in ("x", "y")]
    endpoints = [worker.endpoint for worker in pair]
    process = GatewayProcess("--workers", *endpoints, "--tokenizer", str(model), log=tmp_path / "log")
    try:
        with openai.OpenAI(base_url=f"{process.url}/v1", api_key="x", max_retries=0) as api:
            raw = api.completions.with_raw_response.create(
                model="simulated", prompt="survivor", max_tokens=150, stream=True
            )
            there = raw.headers["x-preble-worker"]
            stream = iter(raw.parse())
            text = next(stream).choices[0].text
            pair["xy".index(there)].kill()
            text += "".join(event.choices[0].text for event in stream)
        assert text == answer(codec, "survivor", 150)
    finally:
        process.stop()
        for worker in pair:
            worker.stop()


def test_answers_may_take_as_long_to_end_as_the_configuration_says_when_it_ends(tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    worker = WorkerProcess(time_scale=20.0)
    config.write_text(json.dumps({"workers": [worker.endpoint], "drain_seconds": 10 * HANG_SECONDS}))
    process = GatewayProcess("--config", str(config), log=tmp_path / "log")
    client = Client(process.address)
    try:
        body = {"prompt": [1], "max_tokens": 10_000, "stream": True}
        client.connection.request("POST", "/v1/completions", json.dumps(body))
        wait_until(lambda: load_of_worker(process)["running"] == 1, "it runs")
        config.write_text(json.dumps({"workers": [worker.endpoint], "drain_seconds": 0}))
        process.signal(signal.SIGHUP)
        wait_until(lambda: "reloaded: drain_seconds" in process.log.read_text(), "it is reloaded")
    finally:
        assert process.stop() == 0, "before `HANG_SECONDS`"
        worker.kill()


def test_sighup_reloads_workers_policy_and_limits(workers: list[WorkerProcess], model: Path, tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"

    def write(**changes: Any) -> None:
        content = {"workers": [workers[0].endpoint], "tokenizer": str(model), **changes}
        config.write_text("".join(f"{key}: {value}\n" for key, value in content.items()))

    write()
    process = GatewayProcess("--config", str(config), log=tmp_path / "log")
    client = Client(process.address)
    try:
        client.call("POST", "/v1/completions", {"prompt": "known before " * 9, "max_tokens": 1})
        write(workers=[worker.endpoint for worker in workers], policy="longest_prefix", choices_max=2)
        process.signal(signal.SIGHUP)
        wait_until(lambda: len(client.call("GET", "/workers")[2]["workers"]) == 2, "the worker has joined")
        reply = client.call("POST", "/v1/preble/explain", {"prompt": "known before " * 9})[2]
        assert reply["policy"] == "longest_prefix" and reply["matched_tokens"] > 0, "caches are not forgotten"
        assert client.call("POST", "/v1/completions", {"prompt": "x", "n": 3})[0] == 400
        write(workers=[], polici="e2")
        process.signal(signal.SIGHUP)
        wait_until(lambda: "did you mean policy" in process.log.read_text(), "the wrong file is refused")
        assert len(client.call("GET", "/workers")[2]["workers"]) == 2
    finally:
        assert process.stop() == 0
