"""Streams of data planes that are given up anywhere, before an endpoint picker: does a booking stay behind?

    python -m tests.stress.picker_aborts                     100,000 streams over 4 connections
    python -m tests.stress.picker_aborts --streams 2000 --seed 3

Of each stream so many messages are sent and so many answers read, as the seed says; then it is cancelled. For each
thousand streams a connection is broken off as a whole. Afterwards the picker must hold no request, no booking, no bytes
and no place at a server. Exit code 0 when that holds; needs grpcio.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from typing import Any

from preble.gateway.picker.messages import SERVICE, ProcessingRequest, ProcessingResponse
from tests.support.picker import STREAMED, Plane, body, picking, request_headers, response_headers
from tests.support.relay import ScriptedServer, chat_events, event

AT_ONCE = 50
CONNECTIONS = 4
BREAKS_EVERY = 1_000
EVENTS = b"".join(map(event, chat_events("he", "llo")))
SAID = [
    message.SerializeToString()
    for message in (
        request_headers(),
        body(STREAMED[:20], end=False),
        body(STREAMED[20:]),
        response_headers(content_type="text/event-stream"),
        body(EVENTS, end=False, of="response"),
    )
]
PLACED = 3  # after so many messages it is answered


def channel(plane: Plane) -> Any:
    """A connection of its own."""
    import grpc.aio

    return grpc.aio.insecure_channel(f"127.0.0.1:{plane.port}", options=[("grpc.use_local_subchannel_pool", 1)])


def process(connection: Any) -> Any:
    """Begin an exchange; messages go in as they are."""
    return connection.stream_stream(
        f"/{SERVICE}/Process",
        request_serializer=lambda one: one if isinstance(one, bytes) else ProcessingRequest.SerializeToString(one),
        response_deserializer=ProcessingResponse.FromString,
    )()


async def _abort(connection: Any, count: int, reads: bool) -> None:
    call = process(connection)
    for message in SAID[:count]:
        await call.write(message)
    if count >= PLACED and reads:
        await call.read()
    call.cancel()


async def abort_streams(plane: Plane, streams: int, seed: int) -> None:
    """Begin so many streams and give them all up; what is left is the caller's to see."""
    rng = random.Random(seed)
    connections = [channel(plane) for _ in range(CONNECTIONS)]
    for number in range(0, streams, AT_ONCE):
        aborted = (
            _abort(rng.choice(connections), rng.randrange(1, len(SAID) + 1), rng.random() < 0.5)
            for _ in range(min(AT_ONCE, streams - number))
        )
        await asyncio.gather(*aborted)
        if number % BREAKS_EVERY == 0:
            place = rng.randrange(CONNECTIONS)
            broken, connections[place] = connections[place], channel(plane)
            call = process(broken)
            await call.write(SAID[0])
            await broken.close(None)
    for connection in connections:
        await connection.close(None)


async def run(streams: int, seed: int) -> None:
    """All of it, before two servers. Raises AssertionError for what stays behind."""
    async with picking(ScriptedServer(), ScriptedServer()) as plane:
        began = time.monotonic()
        await abort_streams(plane, streams, seed)
        await plane.settled()
        counters = plane.gateway.router.counters
        assert counters.requests > 0 and counters.cancelled == counters.requests, counters
        sys.stdout.write(
            f"{streams} streams, {counters.requests} of them booked, in {time.monotonic() - began:.0f} s: none left\n"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=22)
    args = parser.parse_args()
    asyncio.run(run(args.streams, args.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
