"""`preble serve` before servers that the configuration lists as tables: keys, TLS, and what changes at a reload."""

from __future__ import annotations

import asyncio
import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.attach import FakeServer
from tests.support.certificates import make_certificate
from tests.support.gateway import Client, GatewayProcess
from tests.support.transport import asynchronous

AS_ASKED_OF_A_FAKE = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
KEY = "the-key-of-the-server"


def cards(gateway: GatewayProcess) -> dict[str, Any]:
    """The workers, by address."""
    client = Client(gateway.address)
    try:
        return {card["address"]: card for card in client.call("GET", "/workers")[2]["workers"]}
    finally:
        client.close()


def complete(gateway: GatewayProcess, number: int) -> int:
    """The status of a request whose prompt no other one shares."""
    client = Client(gateway.address)
    try:
        body = {"prompt": [number] * 40, "max_tokens": 2, **AS_ASKED_OF_A_FAKE}
        return client.call("POST", "/v1/completions", body)[0]
    finally:
        client.close()


@asynchronous
async def test_servers_with_keys_and_certificates_of_their_own_serve_and_change_at_a_reload(tmp_path: Path) -> None:
    own = make_certificate(tmp_path)
    plain = await FakeServer("vllm", api_key=KEY).start()
    secure = await FakeServer("vllm", tls=own.server_context()).start()
    tables: list[dict[str, Any]] = [
        {"url": plain.url, "api_key_variable": "KEY_OF_A"},
        {"url": secure.url, "ca_file": str(own.certificate)},
    ]
    file = tmp_path / "gateway.yaml"
    file.write_text(json.dumps({"servers": tables}))
    gateway = await asyncio.to_thread(
        partial(GatewayProcess, "--config", str(file), log=tmp_path / "log", environment={"KEY_OF_A": KEY})
    )
    try:
        before = await asyncio.to_thread(cards, gateway)
        assert {address: card["state"] for address, card in before.items()} == {plain.url: "ready", secure.url: "ready"}
        statuses = [await asyncio.to_thread(complete, gateway, number) for number in range(8)]
        assert statuses == [200] * 8 and plain.bodies and secure.bodies, "requests are passed on to both"
        tables[1]["block_size"] = 2 * before[secure.url]["block_size"]
        file.write_text(json.dumps({"servers": tables}))
        gateway.signal(signal.SIGHUP)

        async def is_changed() -> bool:
            now = await asyncio.to_thread(cards, gateway)
            return secure.url in now and now[secure.url].get("block_size") == tables[1]["block_size"]

        while not await is_changed():
            await asyncio.sleep(0.02)
        after = await asyncio.to_thread(cards, gateway)
        assert after[plain.url]["epoch"] == before[plain.url]["epoch"], "the other one stayed"
    finally:
        assert await asyncio.to_thread(gateway.stop) == 0
        await plain.kill()
        await secure.kill()
    assert KEY not in gateway.log.read_text()


@asynchronous
async def test_a_server_nobody_vouches_for_is_not_used_and_the_reason_is_said(tmp_path: Path) -> None:
    own, other = make_certificate(tmp_path), make_certificate(tmp_path, "other")
    secure = await FakeServer("vllm", tls=own.server_context()).start()
    for table in ({"url": secure.url}, {"url": secure.url, "ca_file": str(other.certificate)}):
        file = tmp_path / "gateway.yaml"
        file.write_text(json.dumps({"servers": [table], "connect_seconds": 4}))
        log = tmp_path / "log"
        try:
            await asyncio.to_thread(partial(GatewayProcess, "--config", str(file), log=log))
        except AssertionError as error:
            assert "certificate" in str(error) and "0 of 1 workers are ready" in str(error)
        else:
            raise AssertionError("it serves")
    assert not secure.bodies
    await secure.kill()
