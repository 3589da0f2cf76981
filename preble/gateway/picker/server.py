"""Where data planes reach the endpoint picker: connections of gRPC clients at one port. Owns the listening, the open
connections and their end.

When a stop is asked for, every connection is informed that it gets no new streams, and is closed when those that it has
are over. What is not over after a while is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from ..listeners import BACKLOG, GatewayListener
from .calls import CALLS, UnknownCall
from .http2 import Http2Call, Http2Connection, Http2Stream
from .messages import Fields
from .pick import Picker

STREAMS_PER_REQUEST = 2  # so that one beyond `max_live_requests` is answered, not refused
MESSAGE_MARGIN_BYTES = 1 << 20  # of a message beyond the body in it: headers, metadata


class PickerServer:
    """The connections of one picker. Belongs to its loop."""

    def __init__(self, picker: Picker, listener: GatewayListener) -> None:
        self.listener = listener
        self.is_stopping = False
        self._picker = picker
        self._connections: set[Http2Connection] = set()
        self._server: asyncio.Server | None = None
        self._idle = asyncio.Event()

    async def start(self) -> None:
        """Listen."""
        loop, listener = asyncio.get_running_loop(), self.listener
        self._server = await loop.create_server(
            self.connection, sock=listener.socket, ssl=listener.tls, backlog=BACKLOG
        )

    def connection(self) -> Any:
        """A new connection, as asyncio wants protocols: an `Http2Connection`."""
        self._idle.clear()
        streams_max = STREAMS_PER_REQUEST * self._picker.gateway.config.max_live_requests
        connection = Http2Connection(self._accept, self._gone, streams_max)
        self._connections.add(connection)
        return connection

    def _accept(self, stream: Http2Stream, fields: Fields) -> Http2Call:
        path = dict(reversed(fields)).get(b":path", b"")
        message_bytes_max = self._picker.gateway.config.max_body_bytes + MESSAGE_MARGIN_BYTES
        return CALLS.get(path, UnknownCall)(stream, message_bytes_max, self._picker)

    def _gone(self, connection: Http2Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._idle.set()

    async def stop(self, grace_seconds: float) -> None:
        """Take no more streams; those that run may take so long to end, then they are cut off. Again it only waits
        less."""
        self.is_stopping = True
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.stop()
        if self._connections and grace_seconds > 0.0:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), grace_seconds)
        for connection in list(self._connections):
            connection.abort()
