"""What a gRPC library costs by itself: a server on `grpc.aio` that is asked as the endpoint picker is, and decides
nothing. It neither reads nor makes messages: of their bytes it looks at which one came, and answers with constants.

Started by `bench_picker`; prints where it listens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

SERVICE, METHOD = "envoy.service.ext_proc.v3.ExternalProcessor", "Process"
REQUEST_HEAD = b"\x12"  # the first byte of the message: 2 of a request's head
DECIDED = b"\x0a\x20x-gateway-destination-endpoint=1"
SEEN, END_OF_STREAM = b"\x0a\x00", b"\x10\x01"


async def answers(messages: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
    """An answer to each message but the request's head, whose answer waits for the body."""
    decided = False
    async for message in messages:
        if message.startswith(REQUEST_HEAD):
            continue
        if not decided:
            decided = True
            yield DECIDED
        else:
            yield SEEN + END_OF_STREAM if message.endswith(END_OF_STREAM) else SEEN


async def serve() -> None:
    """Listen until killed."""
    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(answers)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"PICKER 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve())
