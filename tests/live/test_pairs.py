"""Two real vLLM servers of which one prefills and the other decodes: the gateway sends the request to both, and the KV
goes from the one to the other by files.

Run by `make test-live`. vLLM's ExampleConnector writes the KV of each prompt's whole blocks into a directory and reads
it from there; it needs no GPU and no further package. It finds KV by tokens and answers no `kv_transfer_params`: that
field is tested on the wire (`tests/gateway/relay/test_pairs.py`). SGLang has no connector that moves KV without
another package; its own that needs none (`fake`) moves none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live.live_fleet import ENGINES_DIR, python_of
from tests.live.live_servers import BLOCK_SIZES, MODEL_NAME, LiveServer, post, tools_model_dir
from tests.support.gateway import Client, GatewayProcess

NEW_TOKENS, WORDS, QUESTIONS = 12, 120, 4
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GatewayProcess, list[LiveServer]]]:
    """The gateway, the server that prefills and the one that decodes."""
    if not python_of("vllm").exists():
        pytest.skip(f"no vllm in {ENGINES_DIR}: run tests/live/install.py --engine vllm")
    directory = tmp_path_factory.mktemp("pair")
    moved = {"kv_connector_extra_config": {"shared_storage_path": str(directory / "kv")}}
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", **moved}
    servers = [LiveServer("vllm", number, "--kv-transfer-config", json.dumps(connector)) for number in range(2)]
    gateway = code = None
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        roles = zip(servers, ("prefill", "decode"), strict=True)
        file: Path = directory / "gateway.yaml"
        file.write_text(json.dumps({"servers": [{"url": server.url, "role": role} for server, role in roles]}))
        options = ("--config", str(file), "--tokenizer", str(tools_model_dir()))
        gateway = GatewayProcess(*options, log=directory / "gateway.log")
        yield gateway, servers
    finally:
        code = None if gateway is None else gateway.stop()
        for server in servers:
            server.kill()
    assert code == 0


def question(number: int) -> dict[str, Any]:
    """A long prompt that no other one shares."""
    text = " ".join(f"word{(7 * number + at) % 97}" for at in range(WORDS))
    messages = [{"role": "user", "content": f"{number}: {text}"}]
    greedy = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    return {"model": MODEL_NAME, "messages": messages, **greedy}


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_the_one_that_decodes_has_the_kv_of_prompts_that_it_never_saw(
    pair: tuple[GatewayProcess, list[LiveServer]],
) -> None:
    gateway, (prefills, decodes) = pair
    found = 0
    client = Client(gateway.address)
    try:
        for number in range(QUESTIONS):
            status, headers, answer = client.call("POST", "/v1/chat/completions", question(number), JSON)
            assert status == 200, answer
            assert str(decodes.port) in headers["x-preble-worker"]
            usage = answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            found += cached > usage["prompt_tokens"] - 3 * BLOCK_SIZES["vllm"]  # all but the last blocks came by file
            # The other server, asked for all of it, says the same.
            status, alone = post(f"{prefills.url}/v1/chat/completions", question(number))
            assert status == 200 and text_of(json.loads(alone)) == text_of(answer)
    finally:
        client.close()
    # Of a prompt that is one token longer than whole blocks the connector looks for a block less than it has written.
    assert found >= QUESTIONS - 1
    assert decodes.log.read_text().count("External Cache Hit!") >= found
