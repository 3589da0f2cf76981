"""gRPC's calls: messages with their lengths, over the bodies of HTTP/2 streams, and how a call ends. Owns external
processing, one call for each request of a data plane, and health checks; what is answered is `exchange`'s.

    bound                                                 beyond it
    a message of `message_bytes_max`                      RESOURCE_EXHAUSTED
    messages that wait while one is being answered        no more are let in (`http2.STREAM_BYTES`)
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from .exchange import PickExchange
from .hpack import encoded
from .http2 import Http2Stream
from .messages import (
    HEALTH_SERVICE,
    NOT_SERVING,
    SERVICE,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
)
from .pick import Picker

OK, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 0, 8, 12, 13
LIVENESS = "liveness"  # of the process; any other service is asked whether requests are taken
_PREFIX = struct.Struct(">BI")
_HEAD = encoded(((b":status", b"200"), (b"content-type", b"application/grpc")))


def _trailers(status: int) -> bytes:
    return encoded(((b"grpc-status", b"%d" % status),))


class GrpcCall:
    """One call: cuts what comes into messages, and sends answers."""

    def __init__(self, stream: Http2Stream, message_bytes_max: int) -> None:
        self.is_over = False
        self._stream = stream
        self._bytes_max = message_bytes_max
        self._parts: list[bytes] = []  # of a message that is not whole
        self._missing = 0  # bytes of it, as far as is known
        self._has_begun = False

    def on_data(self, data: bytes) -> None:
        """Take all messages that are whole; of one that is not, let the rest come."""
        if self._parts:
            self._parts.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return
            data = b"".join(self._parts)
            self._parts = []
        at, end = 0, len(data)
        while not self.is_over and at < end:
            stop = at + _PREFIX.size
            if stop <= end:
                is_packed, size = _PREFIX.unpack_from(data, at)
                if is_packed or size > self._bytes_max:
                    self.on_wrong(UNIMPLEMENTED if is_packed else RESOURCE_EXHAUSTED)
                    return
                stop += size
            if stop > end:
                self._parts, self._missing = [data[at:]], stop - end
                return
            self.on_message(data[at + _PREFIX.size : stop])
            at = stop

    def on_wrong(self, status: int) -> None:
        """What comes cannot be taken."""
        self.finish(status)

    def on_message(self, message: bytes) -> None:
        """One message has come."""
        raise NotImplementedError

    def on_end(self) -> None:
        """No more messages come."""
        raise NotImplementedError

    def on_reset(self) -> None:
        """Nobody wants an answer any more."""
        self.is_over = True

    def send(self, messages: Sequence[bytes]) -> None:
        """Answer."""
        if not messages or self.is_over:
            return
        if not self._has_begun:
            self._has_begun = True
            self._stream.head(_HEAD)
        parts: list[bytes] = []
        for message in messages:
            parts += (_PREFIX.pack(0, len(message)), message)
        self._stream.send(b"".join(parts))

    def finish(self, status: int = OK) -> None:
        """It is over: say how. Again it does nothing."""
        if self.is_over:
            return
        self.is_over = True
        self._stream.head(_trailers(status) if self._has_begun else _HEAD + _trailers(status), end=True)


class ProcessCall(GrpcCall):
    """The exchange of one request with a data plane. Messages are taken one after the other, in order."""

    def __init__(self, stream: Http2Stream, message_bytes_max: int, picker: Picker) -> None:
        super().__init__(stream, message_bytes_max)
        self._exchange = PickExchange(picker)
        self._waiting: deque[bytes] = deque()
        self._task: asyncio.Task[list[bytes]] | None = None
        self._untaken = 0  # bytes of what waits, which the other side may not send anew
        self._has_ended = False

    def on_data(self, data: bytes) -> None:
        """Take messages; while an answer is being found, keep them."""
        super().on_data(data)
        if self._task is None:
            self._stream.take(len(data))
        else:
            self._untaken += len(data)

    def on_message(self, message: bytes) -> None:
        """The next of the data plane's."""
        if self._task is None:
            self._take(message)
        else:
            self._waiting.append(message)

    def on_wrong(self, status: int) -> None:
        """The request cannot be followed any further."""
        self.finish(status)
        self.on_reset()

    def on_end(self) -> None:
        """The data plane says no more."""
        self._has_ended = True
        if self._task is None:
            self._conclude()

    def on_reset(self) -> None:
        """The data plane has given the request up."""
        super().on_reset()
        if self._task is None:
            self._exchange.close()
        else:
            self._task.cancel()  # its end closes the exchange

    def _take(self, message: bytes) -> None:
        part = self._exchange.take_part(message)
        if part is not None:
            self._answer(part)
            return
        try:
            answers = self._exchange.take(ProcessingRequest.FromString(message))
        except DecodeError:
            self.on_wrong(INTERNAL)
            return
        if isinstance(answers, list):
            self._answer(answers)
            return
        task = self._task = asyncio.ensure_future(answers)
        task.add_done_callback(self._answer_found)

    def _answer_found(self, task: asyncio.Task[list[bytes]]) -> None:
        self._task = None
        if task.cancelled() or self.is_over:
            self._exchange.close()
            return
        error = task.exception()
        self._answer(task.result() if error is None else self._exchange.failed(error))
        while self._waiting and self._task is None and not self.is_over:
            self._take(self._waiting.popleft())
        if self._task is None:
            untaken, self._untaken = self._untaken, 0
            self._stream.take(untaken)
            if self._has_ended:
                self._conclude()

    def _answer(self, answers: list[bytes]) -> None:
        self.send(answers)
        if self._exchange.is_over:
            self._conclude()

    def _conclude(self) -> None:
        self._exchange.close()
        self.finish()


class CheckCall(GrpcCall):
    """One health check (grpc.health.v1)."""

    def __init__(self, stream: Http2Stream, message_bytes_max: int, picker: Picker) -> None:
        super().__init__(stream, message_bytes_max)
        self._picker = picker

    def on_message(self, message: bytes) -> None:
        """The question."""
        try:
            service = HealthCheckRequest.FromString(message).service
        except DecodeError:
            self.finish(INTERNAL)
            return
        is_fine = service == LIVENESS or self._picker.gateway.ready
        self.send([HealthCheckResponse(status=SERVING if is_fine else NOT_SERVING).SerializeToString()])
        self.finish()

    def on_end(self) -> None:
        """A call without a question."""
        self.finish(INTERNAL)


class UnknownCall(GrpcCall):
    """A call of something that is not served here."""

    def __init__(self, stream: Http2Stream, message_bytes_max: int, picker: Picker) -> None:
        super().__init__(stream, message_bytes_max)
        self.finish(UNIMPLEMENTED)

    def on_data(self, data: bytes) -> None:
        """Nothing is read of it."""

    def on_end(self) -> None:
        """Nor waited for."""


CALLS: dict[bytes, type[CheckCall] | type[ProcessCall] | type[UnknownCall]] = {
    f"/{SERVICE}/Process".encode(): ProcessCall,
    f"/{HEALTH_SERVICE}/Check".encode(): CheckCall,
}
