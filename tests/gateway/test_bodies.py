"""Bodies that nobody should send: whatever comes, the gateway answers with a 2xx or a 4xx, never with a 5xx, and lives.

Bodies are made by hypothesis: valid ones with some values replaced, JSON of any shape, and any bytes. Schemathesis
makes requests for every operation of /openapi.json, right ones and wrong ones, and a few are such as no library sends.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from preble.gateway.api.openapi import document
from tests.support.gateway import Client, GatewayProcess, make_tokenizer
from tests.support.transport import HANG_SECONDS, WorkerProcess

# An answer of these says how things are: 503 is no failure.
UNREADY_PATHS = {"/ready"}
# (method, path, kind of request); without a body there is nothing to be wrong.
OPERATIONS = [
    (method.upper(), path, mode)
    for path, operations in document()["paths"].items()
    for method, operation in operations.items()
    for mode in ("positive", "negative")
    if mode == "positive" or "requestBody" in operation
]


def to_bytes(body: Any) -> bytes:
    """A body in JSON, lone surrogates included."""
    return json.dumps(body).encode()


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
ID_LISTS = st.lists(st.one_of(st.integers(-2, 2**31), st.sampled_from([2**31 - 1, 2**63, True, None])), max_size=5)
PROMPTS = st.one_of(
    st.text(max_size=30), ID_LISTS, st.lists(st.one_of(st.text(max_size=5), ID_LISTS), max_size=3), ANYTHING
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool", ""])},
        optional={
            "content": st.one_of(
                st.text(max_size=20),
                st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=5)}), max_size=2),
                ANYTHING,
            ),
            "name": SCALARS,
        },
    ),
    max_size=3,
)
SAMPLING = {
    "temperature": st.one_of(st.floats(-1, 3), SCALARS),
    "top_p": st.one_of(st.floats(-1, 2), SCALARS),
    "n": st.one_of(st.integers(0, 3), SCALARS),
    "seed": SCALARS,
    "stop": st.one_of(st.text(max_size=3), st.lists(st.text(max_size=3), max_size=3), ANYTHING),
    "stop_token_ids": st.one_of(ID_LISTS, ANYTHING),
    "stream": st.one_of(st.booleans(), SCALARS),
    "stream_options": st.one_of(st.fixed_dictionaries({"include_usage": st.booleans()}), ANYTHING),
    "model": st.one_of(st.just("simulated"), SCALARS),
    "cache_salt": st.one_of(st.text(max_size=300), SCALARS),
    "logprobs": SCALARS,
    "tools": st.one_of(
        ANYTHING,
        st.lists(
            st.fixed_dictionaries(
                {"function": st.fixed_dictionaries({"name": st.just("f")}, optional={"parameters": ANYTHING})}
            ),
            max_size=2,
        ),
    ),
    "tool_choice": st.one_of(st.sampled_from(["auto", "required"]), ANYTHING),
    "response_format": st.one_of(st.fixed_dictionaries({"type": st.just("json_object")}), ANYTHING),
    "chat_template_kwargs": ANYTHING,
    "documents": ANYTHING,
    "continue_final_message": SCALARS,
    "reasoning_effort": SCALARS,
}
FEW = st.one_of(
    st.integers(-1, 3), st.just(2), SCALARS
)  # mostly few: an answer has a thousand tokens where none is said
BODIES = {
    "/v1/completions": st.fixed_dictionaries({"prompt": PROMPTS, "max_tokens": FEW}, optional=SAMPLING),
    "/v1/chat/completions": st.fixed_dictionaries({"messages": MESSAGES, "max_tokens": FEW}, optional=SAMPLING),
    "/generate": st.fixed_dictionaries(
        {"sampling_params": st.fixed_dictionaries({"max_new_tokens": FEW}, optional=SAMPLING)},
        optional={"text": PROMPTS, "input_ids": PROMPTS, "stream": st.booleans(), "rid": SCALARS, "lora_path": SCALARS},
    ),
    "/v1/preble/explain": st.fixed_dictionaries(
        {}, optional={"prompt": PROMPTS, "token_ids": PROMPTS, "messages": MESSAGES}
    ),
    "/workers": st.fixed_dictionaries({}, optional={"address": SCALARS}),
}
REQUESTS = st.one_of(
    st.sampled_from(sorted(BODIES)).flatmap(lambda path: st.tuples(st.just(path), BODIES[path].map(to_bytes))),
    st.tuples(st.sampled_from(sorted(BODIES)), ANYTHING.map(to_bytes)),
    st.tuples(st.sampled_from(sorted(BODIES)), st.binary(max_size=60)),
)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway with one worker."""
    model = make_tokenizer(tmp_path_factory.mktemp("model"))
    worker = WorkerProcess(time_scale=0.0)
    # Where nothing is said an answer may fill the model's context, and this engine never ends one by itself.
    arguments = ("--workers", worker.endpoint, "--tokenizer", str(model), "--default-max-tokens", "16")
    process = GatewayProcess(*arguments, log=tmp_path_factory.mktemp("gateway") / "log")
    yield process
    assert process.stop() == 0
    assert worker.stop() == 0


@pytest.fixture(scope="module")
def client(gateway: GatewayProcess) -> Iterator[Client]:
    """One connection for all of them."""
    client = Client(gateway.address, gateway.admin_token)
    yield client
    client.close()


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(request=REQUESTS)
def test_no_body_makes_a_5xx(client: Client, request: tuple[str, bytes]) -> None:
    path, body = request
    status, headers, reply = client.call("POST", path, body)
    assert 200 <= status < 500, f"{status}: {reply}"
    if status >= 400:
        assert set(reply["error"]) == {"message", "type", "param", "code"}
    elif headers["content-type"].startswith("text/event-stream"):
        assert reply.endswith("data: [DONE]\n\n") and '"error"' not in reply


@pytest.fixture(scope="module")
def schema(gateway: GatewayProcess) -> Any:
    """What the gateway says can be asked, as Schemathesis reads it."""
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis, which needs Python 3.11")
    client = Client(gateway.address)
    status, _, document = client.call("GET", "/openapi.json")
    client.close()
    assert status == 200
    return schemathesis.openapi.from_dict(document)


@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS)
def test_no_request_that_the_document_allows_or_forbids_makes_a_5xx(
    schema: Any, gateway: GatewayProcess, method: str, path: str, mode: str
) -> None:
    modes = {one.value: one for one in sys.modules["schemathesis"].GenerationMode}

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def ask(data: Any) -> None:
        case = data.draw(schema[path][method].as_strategy(generation_mode=modes[mode]))
        if isinstance(case.body, dict):
            shorten(case.body)
        answer = case.call(base_url=gateway.url, headers={"authorization": f"Bearer {gateway.admin_token}"})
        expected = answer.status_code < 500 or (answer.status_code == 503 and path in UNREADY_PATHS)
        assert expected, f"{answer.status_code}: {answer.text[:200]}"

    ask()


def shorten(body: dict[str, Any]) -> None:
    """Let an answer be short where its length may be chosen: what is looked for is in the other fields."""
    sampling = body.get("sampling_params")
    for place, names in ((body, ("max_tokens", "max_completion_tokens")), (sampling, ("max_new_tokens",))):
        for name in names if isinstance(place, dict) else ():
            if type(place.get(name)) in (int, type(None)):
                place[name] = 2


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /%ff%00/../workers HTTP/1.1\r\nhost: a\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc",
        b"GET /workers HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\nauthorization: \xff\xfe\r\nx-request-id: \xe4\r\n\r\n",
        b"DELETE /workers/%2e%2e%2f%00 HTTP/1.1\r\nhost: a\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    ],
)
def test_no_bytes_make_a_5xx(gateway: GatewayProcess, raw: bytes) -> None:
    host, _, port = gateway.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=HANG_SECONDS) as connection:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):  # who is refused before all was read of it may be cut off
            while part := connection.recv(4096):
                answer += part
    assert not answer or answer.split(b" ")[1][:1] in b"1234", answer[:100]


def test_after_all_of_them_nothing_is_left(client: Client, gateway: GatewayProcess) -> None:
    text = client.call("GET", "/metrics")[2]
    assert "preble_choices_live 0.0" in text and "preble_leases_active 0.0" in text
    assert "defect" not in gateway.log.read_text() and "Traceback" not in gateway.log.read_text()
    assert client.call("POST", "/v1/completions", {"prompt": "well?", "max_tokens": 2})[0] == 200
