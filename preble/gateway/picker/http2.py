"""HTTP/2 connections of gRPC clients (RFC 9113), as much as a server of streams needs. Owns frames, flow control both
ways, and the bounds on what one connection may make us hold; fields are `hpack`'s, messages and calls `calls`'.

A data plane has a few connections, each with the streams of many requests. All that came at once is taken at once and
answered with one write, so that under load a message costs a fraction of what it does alone.

    bound                                                  beyond it
    streams of a connection, `streams_max`                 the stream is refused (REFUSED_STREAM)
    bytes of a stream that were not taken, `STREAM_BYTES`  the stream is reset (FLOW_CONTROL_ERROR)
    bytes that wait for the other side to read             no more are let in: of that stream, or of all
    a frame of `FRAME_BYTES`, a head of `HEAD_BYTES`       the connection ends (GOAWAY)
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Protocol

from ...errors import ProtocolError
from .hpack import HeaderDecoder
from .messages import Fields

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES = 128 << 10
HEAD_BYTES = 64 << 10
STREAM_BYTES = 256 << 10
CONNECTION_BYTES = 16 << 20
OTHER_FRAME_BYTES = 16_384  # what the other side takes in one frame until it says otherwise, and never less
WINDOW = 65_535  # of streams and connections until somebody says otherwise
WINDOW_MAX = 2**31 - 1
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, REFUSED_STREAM, CANCEL = 0, 1, 3, 7, 8

_DATA, _HEADERS, _PRIORITY, _RST_STREAM, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = range(10)
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_STREAMS_SETTING, _WINDOW_SETTING, _FRAME_SETTING, _HEAD_SETTING = 3, 4, 5, 6
_PREFIX = struct.Struct(">I")
_HEAD = struct.Struct(">HBBBI")
_SETTING = struct.Struct(">HI")


class Http2Call(Protocol):
    """What becomes of one stream."""

    def on_data(self, data: bytes) -> None:
        """Bytes of its body have come."""

    def on_end(self) -> None:
        """Its body is whole."""

    def on_reset(self) -> None:
        """The other side has given it up, or has gone; nothing can be sent any more."""


class Http2Stream:
    """One stream, as its call sees it. Belongs to its connection."""

    __slots__ = (
        "call",
        "connection",
        "half_closed",
        "id",
        "is_sent",
        "pending",
        "receive_window",
        "send_window",
        "used",
    )

    def __init__(self, connection: Http2Connection, number: int, send_window: int) -> None:
        self.connection = connection
        self.id = number
        self.call: Http2Call | None = None
        self.half_closed = False  # the other side says no more
        self.is_sent = False  # we have said all
        self.send_window = send_window
        self.receive_window = STREAM_BYTES
        self.used = 0  # bytes that were taken, and that the other side may send anew
        self.pending: list[tuple[int, bytes]] = []  # frames, by kind, that wait for the window

    def send(self, data: bytes) -> None:
        """Send a part of the answer's body."""
        if not self.is_sent:
            self.connection.send_data(self, data)

    def head(self, block: bytes, *, end: bool = False) -> None:
        """Send fields; with `end` nothing follows them."""
        if not self.is_sent:
            self.is_sent = end
            self.connection.send_head(self, block, end)

    def take(self, count: int) -> None:
        """So many bytes of its body need not be held any more. Who does not read our answer need not send more."""
        self.used += count
        if self.used >= STREAM_BYTES // 2 and not (self.half_closed or self.pending):
            self.connection.open_window(self.id, self.used)
            self.receive_window += self.used
            self.used = 0


class Http2Connection(asyncio.Protocol):
    """One connection. `accept` makes the call of a new stream out of its fields; `gone` is called when it is closed."""

    def __init__(
        self,
        accept: Callable[[Http2Stream, Fields], Http2Call],
        gone: Callable[[Http2Connection], object],
        streams_max: int,
    ) -> None:
        self.streams: dict[int, Http2Stream] = {}
        self._accept = accept
        self._gone = gone
        self._streams_max = streams_max
        self._transport: Any = None
        self._decoder = HeaderDecoder()
        self._greeted = False
        self._rest = b""
        self._out: list[bytes] = []
        self._is_taking = False
        self._is_ending = False
        self._last_id = 0
        self._head: tuple[int, int, bytearray] | None = None  # fields whose continuation is to come
        self._send_window = WINDOW
        self._stream_send_window = WINDOW
        self._frame_bytes = OTHER_FRAME_BYTES
        self._receive_window = CONNECTION_BYTES
        self._used = 0
        self._handlers: dict[int, Callable[[int, int, bytes], None]] = {
            _DATA: self._take_data,
            _HEADERS: self._take_head,
            _CONTINUATION: self._take_continuation,
            _RST_STREAM: self._take_reset,
            _SETTINGS: self._take_settings,
            _PING: self._take_ping,
            _WINDOW_UPDATE: self._take_window,
            _PUSH: self._take_push,
        }

    # --- asyncio's ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Say what we take."""
        self._transport = transport
        settings = (_STREAMS_SETTING, self._streams_max), (_WINDOW_SETTING, STREAM_BYTES), (_FRAME_SETTING, FRAME_BYTES)
        settings += ((_HEAD_SETTING, HEAD_BYTES),)  # type: ignore[assignment]
        self._frame(_SETTINGS, 0, 0, b"".join(_SETTING.pack(*one) for one in settings))
        self.open_window(0, CONNECTION_BYTES - WINDOW)

    def connection_lost(self, error: Exception | None) -> None:
        """All of its calls are over."""
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            self._drop(stream)
        self._gone(self)

    def pause_writing(self) -> None:
        """The other side does not read: nothing more is read from it."""
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """It reads again."""
        self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Take all frames that are whole, then write what there is to say."""
        if self._rest:
            data = self._rest + data
        self._is_taking = True
        try:
            self._rest = data[self._take_frames(data) :]
        except ProtocolError as error:
            self._end(PROTOCOL_ERROR, str(error))
        finally:
            self._is_taking = False
            self._flush()

    def stop(self) -> None:
        """Take no more streams; it is closed when those that run have ended."""
        if not self._is_ending:
            self._is_ending = True
            self._frame(_GOAWAY, 0, 0, _PREFIX.pack(self._last_id) + _PREFIX.pack(NO_ERROR))
        self._close_if_idle()

    def abort(self) -> None:
        """Close it now."""
        if self._transport is not None:
            self._transport.abort()

    # --- frames in ----------------------------------------------------------------------------------------------------

    def _take_frames(self, data: bytes) -> int:
        """How many of these bytes were whole frames. Raises `ProtocolError`."""
        at, end = 0, len(data)
        if not self._greeted:
            if end < len(PREFACE):
                if not PREFACE.startswith(data):
                    raise ProtocolError("no HTTP/2")
                return 0
            if not data.startswith(PREFACE):
                raise ProtocolError("no HTTP/2")
            self._greeted, at = True, len(PREFACE)
        handlers = self._handlers
        while end - at >= 9:
            high, low, kind, flags, number = _HEAD.unpack_from(data, at)
            length = high << 8 | low
            if length > FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes")
            stop = at + 9 + length
            if stop > end:
                break
            if self._head is not None and kind != _CONTINUATION:
                raise ProtocolError("fields that are interrupted")
            handler = handlers.get(kind)
            if handler is not None:
                handler(flags, number & WINDOW_MAX, data[at + 9 : stop])
            at = stop
        return at

    def _take_data(self, flags: int, number: int, data: bytes) -> None:
        size = len(data)
        self._receive_window -= size
        if self._receive_window < 0 or number == 0:
            raise ProtocolError("more bytes than were allowed")
        self._used += size
        if self._used >= CONNECTION_BYTES // 2:
            self.open_window(0, self._used)
            self._receive_window += self._used
            self._used = 0
        stream = self.streams.get(number)
        if stream is None or stream.half_closed:
            if number > self._last_id:
                raise ProtocolError("bytes of a stream that was never begun")
            return
        stream.receive_window -= size
        if stream.receive_window < 0:
            self._reset(stream, FLOW_CONTROL_ERROR)
            return
        if flags & _PADDED:
            data = _unpadded(data)
            stream.used += size - len(data)
        if flags & _END_STREAM:
            stream.half_closed = True
        call = stream.call
        if call is None:
            return
        if data:
            call.on_data(data)
        if flags & _END_STREAM:
            call.on_end()

    def _take_head(self, flags: int, number: int, data: bytes) -> None:
        if flags & _PADDED:
            data = _unpadded(data)
        if flags & _HAS_PRIORITY:
            data = data[5:]
        if flags & _END_HEADERS:
            self._take_fields(flags, number, data)
        else:
            self._head = number, flags, bytearray(data)

    def _take_continuation(self, flags: int, number: int, data: bytes) -> None:
        head = self._head
        if head is None or head[0] != number:
            raise ProtocolError("fields that continue none")
        head[2].extend(data)
        if len(head[2]) > HEAD_BYTES:
            raise ProtocolError(f"more than {HEAD_BYTES} bytes of fields")
        if flags & _END_HEADERS:
            self._head = None
            self._take_fields(head[1], number, bytes(head[2]))

    def _take_fields(self, flags: int, number: int, block: bytes) -> None:
        if len(block) > HEAD_BYTES:
            raise ProtocolError(f"more than {HEAD_BYTES} bytes of fields")
        fields = self._decoder.decode(block)
        ended = bool(flags & _END_STREAM)
        stream = self.streams.get(number)
        if stream is not None:  # trailers
            stream.half_closed = True
            if stream.call is not None:
                stream.call.on_end()
            return
        if number <= self._last_id:
            return  # of a stream that is over here
        if number % 2 == 0:
            raise ProtocolError("a stream with an even number")
        if self._is_ending or len(self.streams) >= self._streams_max:
            if not self._is_ending:
                self._last_id = number
            self._frame(_RST_STREAM, 0, number, _PREFIX.pack(REFUSED_STREAM))
            return
        self._last_id = number
        stream = self.streams[number] = Http2Stream(self, number, self._stream_send_window)
        stream.half_closed = ended
        stream.call = self._accept(stream, fields)
        if ended:
            stream.call.on_end()

    def _take_reset(self, flags: int, number: int, data: bytes) -> None:
        stream = self.streams.pop(number, None)
        if stream is not None:
            self._drop(stream)
            self._close_if_idle()
        elif number > self._last_id:
            raise ProtocolError("the end of a stream that was never begun")

    def _take_settings(self, flags: int, number: int, data: bytes) -> None:
        if flags & _ACK:
            return
        if len(data) % _SETTING.size or number:
            raise ProtocolError("settings that are none")
        for name, value in _SETTING.iter_unpack(data):
            if name == _WINDOW_SETTING:
                if value > WINDOW_MAX:
                    raise ProtocolError("a window that is too large")
                change = value - self._stream_send_window
                self._stream_send_window = value
                for stream in self.streams.values():
                    stream.send_window += change
            elif name == _FRAME_SETTING and OTHER_FRAME_BYTES <= value <= 2**24 - 1:
                self._frame_bytes = value
        self._frame(_SETTINGS, _ACK, 0, b"")
        self._send_pending()

    def _take_ping(self, flags: int, number: int, data: bytes) -> None:
        if len(data) != 8:
            raise ProtocolError("a ping of another length than 8")
        if not flags & _ACK:
            self._frame(_PING, _ACK, 0, data)

    def _take_window(self, flags: int, number: int, data: bytes) -> None:
        if len(data) != 4:
            raise ProtocolError("a window of another length than 4")
        more = _PREFIX.unpack(data)[0] & WINDOW_MAX
        if number == 0:
            self._send_window += more
            if self._send_window > WINDOW_MAX or not more:
                raise ProtocolError("a window that is too large, or no larger")
            self._send_pending()
            return
        stream = self.streams.get(number)
        if stream is None:
            return
        stream.send_window += more
        if stream.send_window > WINDOW_MAX or not more:
            self._reset(stream, FLOW_CONTROL_ERROR)
        elif stream.pending:
            self._send_frames(stream)

    def _take_push(self, flags: int, number: int, data: bytes) -> None:
        raise ProtocolError("a client that pushes")

    # --- frames out ---------------------------------------------------------------------------------------------------

    def send_data(self, stream: Http2Stream, data: bytes) -> None:
        """Send a part of a body, as far as the windows allow; the rest follows when they do."""
        size = len(data)
        if (
            not stream.pending
            and size <= self._frame_bytes
            and size <= stream.send_window
            and size <= self._send_window
        ):
            stream.send_window -= size
            self._send_window -= size
            self._frame(_DATA, 0, stream.id, data)
            return
        stream.pending.append((_DATA, data))
        self._send_frames(stream)

    def send_head(self, stream: Http2Stream, block: bytes, end: bool) -> None:
        """Send fields, behind what waits."""
        if stream.pending:
            stream.pending.append((_HEADERS, block))
            return
        self._frame(_HEADERS, _END_HEADERS | (_END_STREAM if end else 0), stream.id, block)
        if end:
            self._finish(stream)

    def open_window(self, number: int, size: int) -> None:
        """Let the other side send so many bytes more, of one stream or (0) of all."""
        self._frame(_WINDOW_UPDATE, 0, number, _PREFIX.pack(size))

    def _send_pending(self) -> None:
        for stream in [one for one in self.streams.values() if one.pending]:
            self._send_frames(stream)

    def _send_frames(self, stream: Http2Stream) -> None:
        """Send of what waits as much as the windows allow."""
        pending = stream.pending
        while pending:
            kind, data = pending[0]
            if kind == _HEADERS:
                pending.pop(0)
                self.send_head(stream, data, stream.is_sent)
                continue
            room = min(stream.send_window, self._send_window, self._frame_bytes)
            if room <= 0:
                return
            part, rest = data[:room], data[room:]
            stream.send_window -= len(part)
            self._send_window -= len(part)
            self._frame(_DATA, 0, stream.id, part)
            if rest:
                pending[0] = kind, rest
            else:
                pending.pop(0)
        if not stream.is_sent:
            stream.take(0)

    def _finish(self, stream: Http2Stream) -> None:
        """All of the answer is sent. Where the other side still speaks, it need not."""
        if self.streams.pop(stream.id, None) is not None and not stream.half_closed:
            stream.half_closed = True  # what it still says is passed over
            self._frame(_RST_STREAM, 0, stream.id, _PREFIX.pack(NO_ERROR))
        self._close_if_idle()

    def _reset(self, stream: Http2Stream, code: int) -> None:
        self.streams.pop(stream.id, None)
        self._frame(_RST_STREAM, 0, stream.id, _PREFIX.pack(code))
        self._drop(stream)

    def _drop(self, stream: Http2Stream) -> None:
        stream.is_sent = stream.half_closed = True
        stream.pending.clear()
        if stream.call is not None:
            stream.call.on_reset()

    def _end(self, code: int, text: str) -> None:
        """The connection cannot be understood any more."""
        self._is_ending = True
        self._frame(_GOAWAY, 0, 0, _PREFIX.pack(self._last_id) + _PREFIX.pack(code) + text.encode())
        self._flush()
        self._transport.close()

    def _close_if_idle(self) -> None:
        if self._is_ending and not self.streams:
            self._flush()
            self._transport.close()

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._out += (_HEAD.pack(size >> 8, size & 0xFF, kind, flags, number), payload)
        if not self._is_taking:
            self._flush()

    def _flush(self) -> None:
        if self._out:
            out, self._out = self._out, []
            if not self._transport.is_closing():
                self._transport.write(b"".join(out))


def _unpadded(data: bytes) -> bytes:
    """Raises `ProtocolError` where the padding is more than there is."""
    if not data or data[0] >= len(data):
        raise ProtocolError("more padding than bytes")
    return data[1 : len(data) - data[0]]
