"""What a request costs the endpoint picker, in instructions: what a data plane says of it is fed to a connection of the
picker's without sockets, and its answers are taken off it. A busy machine does not matter.

    python -m benchmarks.gateway.picker_instructions               per request: a whole answer, streams of 16 events
    python -m benchmarks.gateway.picker_instructions --profile 30  the functions that take the most time instead

The requests are `bench_picker`'s: chats of about 2,000 characters, placed by their text, between two mock servers.
What the picker's process does beside (sockets, questions to servers) is not in it. Needs valgrind, unless it profiles.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import gc
import importlib.util
import json
import os
import pstats
import random
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from benchmarks.common.paths import ROOT
from benchmarks.decision.instructions import request_extension, section_of
from benchmarks.gateway import bench_picker as said
from preble.gateway.core.config import GatewayConfig
from preble.gateway.core.doors import NETWORK
from preble.gateway.core.gateway import Gateway
from preble.gateway.core.metrics import Metrics
from preble.gateway.listeners import GatewayListener
from preble.gateway.picker.pick import Picker
from preble.gateway.picker.server import PickerServer
from preble.gateway.program import COLLECT_AFTER_OBJECTS
from preble.router.fleet import FleetConfig
from preble.router.router import Router, RouterConfig
from preble.transport.client import LinkConfig

EVENTS = (0, 16)  # of an answer; 0: it is whole
WARM, TURNS = 500, 200
NEVER = 3600.0  # seconds: what is done by the clock is not a request's, and is the more the slower the machine


class Wire:
    """The transport of the connection: keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        raise RuntimeError("the picker gave the connection up")

    def pause_reading(self) -> None:
        """There is no end to what is kept."""

    resume_reading = pause_reading


@contextlib.asynccontextmanager
async def picking() -> AsyncIterator[tuple[Any, Wire, Gateway]]:
    """A picker before mock servers, a connection of its own, and what that writes."""
    command = [sys.executable, "-m", "benchmarks.gateway.gateway_mock", "http"]
    mock = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert mock.stdout is not None
    ready = mock.stdout.readline().split()[1:]
    servers = [one if one.startswith("http") else f"http://{one}" for one in ready]
    router = Router(
        servers, config=RouterConfig(fleet=FleetConfig(link=LinkConfig(heartbeat_seconds=NEVER)), tick_seconds=NEVER)
    )
    await router.start(min_workers=len(ready))
    gateway = Gateway(router, None, GatewayConfig(), Metrics(time.monotonic))
    listener = GatewayListener(socket.create_server(("127.0.0.1", 0)), NETWORK)
    connection, wire = PickerServer(Picker(gateway), listener).connection(), Wire()
    connection.connection_made(wire)
    windows = said.frame(said.SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 20))
    windows += said.frame(said.WINDOW, 0, 0, struct.pack(">I", 1 << 30))
    connection.data_received(said.PREFACE + windows)
    wire.written.clear()
    try:
        yield connection, wire, gateway
    finally:
        gateway.close()
        await router.close()
        mock.kill()
        mock.wait()


def lots_of(number: int, body: bytes, answer: list[bytes], is_stream: bool) -> list[bytes]:
    """What is said of the request with this stream's number; each of these is answered before the next comes."""
    opening = said.frame(said.HEADERS, 4, number, said.OPENING) + said.message(number, said.REQUEST_HEAD)
    lots = [opening + said.message(number, said.part(4, body, True))]
    lots.append(said.message(number, said.STREAM_HEAD if is_stream else said.WHOLE_HEAD))
    for place, piece in enumerate(answer, 1):
        is_last = place == len(answer)
        lots.append(said.message(number, said.part(5, piece, is_last), int(is_last)))
    return lots


async def feed(connection: Any, wire: Wire, requests: list[list[bytes]]) -> None:
    """Say it all, one request after the other."""
    written = wire.written
    for request in requests:
        for lot in request:
            connection.data_received(lot)
            while not written:
                await asyncio.sleep(0)
            written.clear()


async def drive(events: int, extension: str | None, lines: int) -> None:
    """Count a warm picker's requests with the extension, or profile them."""
    bodies = said.chats(400, random.Random(7))
    answer = said.events(events) if events else [json.dumps({"id": "1", "choices": [], "usage": said.USAGE}).encode()]
    requests = [lots_of(2 * turn + 1, bodies[turn % len(bodies)], answer, bool(events)) for turn in range(WARM + TURNS)]
    async with picking() as (connection, wire, gateway):
        await feed(connection, wire, requests[:WARM])
        gc.collect()
        gc.freeze()
        gc.set_threshold(COLLECT_AFTER_OBJECTS, 10, 10)
        if extension is None:
            with cProfile.Profile() as profile:
                await feed(connection, wire, requests[WARM:])
            pstats.Stats(profile).sort_stats("tottime").print_stats(lines)
        else:
            counted = loaded(extension)
            counted.begin()
            await feed(connection, wire, requests[WARM:])
            counted.end(str(events))
        assert gateway.live_choices == 0, "every request has ended"


def loaded(path: str) -> Any:
    """The extension that talks to callgrind."""
    spec = importlib.util.spec_from_file_location("callgrind_request", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def counted(events: int, scratch: Path) -> float:
    """Instructions per request whose answer has so many events."""
    out = scratch / f"callgrind.out.{events}"
    valgrind = ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
    command = [sys.executable, "-m", "benchmarks.gateway.picker_instructions", "--events", str(events)]
    done = subprocess.run(
        [*valgrind, *command, "--extension", str(request_extension(scratch))],
        cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"it failed under valgrind:\n{done.stderr.strip()}")
    found = [section for path in sorted(scratch.glob(f"{out.name}*")) if (section := section_of(path))]
    return dict(found)[str(events)] / TURNS


def main() -> int:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, help="of each answer, 0 for whole ones; else both kinds, one by one")
    parser.add_argument("--profile", type=int, default=0, metavar="LINES", help="print a profile of so many lines")
    parser.add_argument("--extension", help=argparse.SUPPRESS)
    args = parser.parse_args()
    kinds = EVENTS if args.events is None else (args.events,)
    if args.profile or args.extension:
        for events in kinds:
            asyncio.run(drive(events, args.extension, args.profile))
        return 0
    with tempfile.TemporaryDirectory(prefix="preble-picker-") as scratch:
        for events in kinds:
            kind = f"a stream of {events} events" if events else "a whole answer"
            print(f"{kind}: {counted(events, Path(scratch)):,.0f} instructions a request", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
