"""`preble serve --peers` as real processes before one server: what a gateway of another machine has running is booked
here, until it is killed or the cable between them is cut, and again when that is mended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from preble.transport.security import create_keys
from tests.router.test_peer_gateways import Gateway, known
from tests.support.attach import FakeServer
from tests.support.faults import Island, NamespaceDenied
from tests.support.gateway import Client, GatewayProcess
from tests.support.transport import asynchronous


@contextlib.asynccontextmanager
async def peers(
    directory: Path, *, host: str = "127.0.0.1", far: str = "127.0.0.2", prefix: tuple[str, ...] = ()
) -> AsyncIterator[tuple[Gateway, GatewayProcess]]:
    """A gateway here, which gives others half a second, and a process at `far`, before one server at `host`."""
    create_keys(directory / "keys")
    server = await FakeServer("sglang", events=False, host=host).start()
    server.pause_seconds = 0.05
    times = {"beat_seconds": 0.05, "silent_seconds": 0.5}
    near = Gateway(directory / "keys", bind=f"tcp://{host}:*", server=f"{host}:{server.port}", **times)
    there = near.endpoint.replace(host, far)
    options = ["--workers", server.url, "--host", far, "--insecure", "--peers", near.endpoint, "--peer-bind", there]
    options += ["--peer-keys", str(directory / "keys")]
    process = await asyncio.to_thread(GatewayProcess, *options, log=directory / "log", prefix=prefix)
    try:
        near.siblings.follow([there])
        await known(lambda: near.connected() == 1 and not near.siblings._siblings[0].bookings.behind)
        yield near, process
    finally:
        await asyncio.to_thread(process.stop)
        await near.siblings.close()
        await server.kill()


def stream(process: GatewayProcess) -> Client:
    """Begin a long answer there."""
    client = Client(process.address)
    sampling = {"max_new_tokens": 4000, "ignore_eos": True}
    body = json.dumps({"input_ids": [7, 8, 9], "sampling_params": sampling, "stream": True})
    client.connection.request("POST", "/generate", body, {"content-type": "application/json"})
    assert client.connection.getresponse().status == 200
    return client


def booked_there(process: GatewayProcess) -> int:
    """Requests that the process has booked on the one server, its own and others'."""
    client = Client(process.address)
    try:
        return int(client.call("GET", "/workers")[2]["workers"][0]["live_requests"])
    finally:
        client.close()


async def knows(process: GatewayProcess, count: int) -> None:
    """Until the process has so many booked."""
    while await asyncio.to_thread(booked_there, process) != count:
        await asyncio.sleep(0.02)


@asynchronous
async def test_a_killed_gateway_leaves_no_booking_after_its_lease(tmp_path: Path) -> None:
    async with peers(tmp_path) as (near, process):
        near.place("1", worker=near.server)
        await knows(process, 1)
        client = await asyncio.to_thread(stream, process)
        await known(lambda: near.booked() == 1)
        process.signal(signal.SIGKILL)
        await known(lambda: near.booked() == 0)
        assert (near.count("given_back"), near.connected()) == (1, 0)
        near.router.scheduler.check()
        client.close()


@asynchronous
async def test_a_partition_between_gateways_costs_the_bookings_and_heals(tmp_path: Path) -> None:
    try:
        island = Island(2)
    except NamespaceDenied as error:
        pytest.skip(f"needs network namespaces: {error}")
    try:
        here = island.host.rpartition(".")[0] + ".1"
        async with peers(tmp_path, host=here, far=island.host, prefix=island.prefix) as (near, process):
            near.place("1", worker=near.server)
            await knows(process, 1)
            client = await asyncio.to_thread(stream, process)
            await known(lambda: near.booked() == 1)
            island.cut()
            await known(lambda: near.booked() == 0)
            near.place("2", worker=near.server)
            near.own.ended("1", 3)
            island.heal()
            await known(lambda: near.connected() == 1)
            client.close()
            await known(lambda: near.booked() == 0)
            await knows(process, 1)
            near.own.ended("2", 3)
            await knows(process, 0)
            near.router.scheduler.check()
    finally:
        island.close()
