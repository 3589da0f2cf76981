"""HTTP/2 connections of gRPC clients (RFC 9113), as much as a server of streams needs. Owns frames, flow control both
ways, and the bounds on what one connection may make us hold; fields are `hpack`'s, messages and calls `calls`'.

A data plane has a few connections, each with the streams of many requests. All that came at once is taken at once, and
what of it is answered at once with one write, so that under load a message costs a fraction of what it does alone.

    bound                                                  beyond it
    streams of a connection, `streams_max`                 the stream is refused (REFUSED_STREAM)
    bytes of a stream that were not taken, `STREAM_BYTES`  the stream is reset (FLOW_CONTROL_ERROR)
    bytes that wait for the other side to read             no more are let in: of that stream, or of all
    a frame of `FRAME_BYTES`, a head of `HEAD_BYTES`       the connection ends (GOAWAY)
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.string cimport memcpy

from preble.gateway.picker.hpack cimport HeaderDecoder

from preble.errors import ProtocolError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, REFUSED_STREAM, CANCEL = 0, 1, 3, 7, 8

cdef enum:
    FRAME_LIMIT = 128 << 10
    HEAD_LIMIT = 64 << 10
    STREAM_LIMIT = 256 << 10
    CONNECTION_LIMIT = 16 << 20
    OTHER_FRAME = 16_384  # what the other side takes in one frame until it says otherwise, and never less
    WINDOW = 65_535  # of streams and connections until somebody says otherwise
    WINDOW_MAX = 0x7FFF_FFFF
    KEPT_ROOM = 1 << 20  # for frames; more is given back when they are written

    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    SETTINGS = 4
    PUSH = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9

    END_STREAM = 0x1
    ACK = 0x1
    END_HEADERS = 0x4
    PADDED = 0x8
    HAS_PRIORITY = 0x20

    STREAMS_SETTING = 3
    WINDOW_SETTING = 4
    FRAME_SETTING = 5
    HEAD_SETTING = 6

    OF_PROTOCOL = 1  # `PROTOCOL_ERROR` and so on
    OF_FLOW = 3
    REFUSED = 7

FRAME_BYTES, HEAD_BYTES = FRAME_LIMIT, HEAD_LIMIT
STREAM_BYTES, CONNECTION_BYTES = STREAM_LIMIT, CONNECTION_LIMIT


cdef long long read_number(const char* data, int size) noexcept nogil:
    """A number of so many bytes."""
    cdef long long value = 0
    cdef int at
    for at in range(size):
        value = value << 8 | <unsigned char> data[at]
    return value


cdef void write_number(char* data, int size, long long value) noexcept nogil:
    cdef int at
    for at in range(size):
        data[at] = <char> (value >> 8 * (size - 1 - at) & 0xFF)


cdef class Http2Call:
    """What becomes of one stream."""

    cpdef object on_data(self, bytes data):
        """Bytes of its body have come."""

    cpdef object on_end(self):
        """Its body is whole."""

    cpdef object on_reset(self):
        """The other side has given it up, or has gone; nothing can be sent any more."""


@cython.final
cdef class Http2Stream:
    """One stream, as its call sees it. Belongs to its connection."""

    def __init__(self, Http2Connection connection, long long number, long long send_window):
        self.connection = connection
        self.id = number
        self.send_window = send_window
        self.receive_window = STREAM_LIMIT

    cpdef object send(self, bytes data):
        """Send a part of the answer's body."""
        if not self.is_sent:
            self.connection.send_data(self, data)

    cpdef object head(self, bytes block, bint end=False):
        """Send fields; with `end` nothing follows them."""
        if not self.is_sent:
            self.is_sent = end
            self.connection.send_head(self, block, end)

    cpdef object take(self, Py_ssize_t count):
        """So many bytes of its body need not be held any more. Who does not read our answer need not send more."""
        self.used += count
        if self.used >= STREAM_LIMIT // 2 and not self.half_closed and not self.pending:
            self.connection.open_window(self.id, self.used)
            self.receive_window += self.used
            self.used = 0


cdef class Http2Connection:
    """One connection, an asyncio protocol. `accept` makes the call of a new stream out of its fields; `gone` is called
    when it is closed."""

    def __init__(self, accept, gone, long long streams_max):
        self.streams = {}
        self.waiting = {}
        self.accept = accept
        self.gone = gone
        self.streams_max = streams_max
        self.decoder = HeaderDecoder()
        self.parts = []
        self.send_window = self.stream_send_window = WINDOW
        self.frame_bytes = OTHER_FRAME
        self.receive_window = CONNECTION_LIMIT

    def __dealloc__(self):
        PyMem_Free(self.out)

    # --- asyncio's ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport):
        """Say what we take."""
        cdef char settings[24]
        cdef int at = 0
        self.transport = transport
        for name, value in (
            (STREAMS_SETTING, self.streams_max),
            (WINDOW_SETTING, STREAM_LIMIT),
            (FRAME_SETTING, FRAME_LIMIT),
            (HEAD_SETTING, HEAD_LIMIT),
        ):
            write_number(&settings[at], 2, name)
            write_number(&settings[at + 2], 4, value)
            at += 6
        self.frame(SETTINGS, 0, 0, settings, at)
        self.open_window(0, CONNECTION_LIMIT - WINDOW)

    def connection_lost(self, error):
        """All of its calls are over."""
        cdef Http2Stream stream
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            self.drop(stream)
        self.gone(self)

    def eof_received(self):
        """The other side says no more: the connection is closed."""

    def pause_writing(self):
        """The other side does not read: nothing more is read from it."""
        self.transport.pause_reading()

    def resume_writing(self):
        """It reads again."""
        self.transport.resume_reading()

    cpdef object data_received(self, bytes data):
        """Take all frames that are whole, then write what there is to say."""
        cdef Py_ssize_t taken
        if self.parts:
            self.parts.append(data)
            self.missing -= PyBytes_GET_SIZE(data)
            if self.missing > 0:
                return
            data = b"".join(self.parts)
            self.parts = []
        self.hold()
        try:
            taken = self.take_frames(data)
            if taken < PyBytes_GET_SIZE(data):
                self.parts.append(data[taken:] if taken else data)
        except ProtocolError as error:
            self.end(OF_PROTOCOL, str(error))
        finally:
            self.let_go()

    cdef int hold(self) except -1:
        """Write nothing until `let_go`, for more will be said at once."""
        self.is_held = True
        return 0

    cdef int let_go(self) except -1:
        self.is_held = False
        return self.flush()

    def stop(self):
        """Take no more streams; it is closed when those that run have ended."""
        if not self.is_ending:
            self.is_ending = True
            self.say_last(NO_ERROR, b"")
        self.close_if_idle()

    def abort(self):
        """Close it now."""
        if self.transport is not None:
            self.transport.abort()

    # --- frames in ----------------------------------------------------------------------------------------------------

    cdef Py_ssize_t take_frames(self, bytes data) except -1:
        """How many of these bytes were whole frames; `missing` are needed for one more. Raises `ProtocolError`."""
        cdef const char* given = PyBytes_AS_STRING(data)
        cdef Py_ssize_t at = 0, end = PyBytes_GET_SIZE(data), length, stop
        cdef int kind
        if not self.is_greeted:
            if end < len(PREFACE):
                if not PREFACE.startswith(data):
                    raise ProtocolError("no HTTP/2")
                self.missing = len(PREFACE) - end
                return 0
            if not data.startswith(PREFACE):
                raise ProtocolError("no HTTP/2")
            self.is_greeted, at = True, len(PREFACE)
        while end - at >= 9:
            length = read_number(given + at, 3)
            if length > FRAME_LIMIT:
                raise ProtocolError(f"a frame of {length} bytes")
            stop = at + 9 + length
            if stop > end:
                self.missing = stop - end
                return at
            kind = <unsigned char> given[at + 3]
            if self.is_heading and kind != CONTINUATION:
                raise ProtocolError("fields that are interrupted")
            self.take_frame(
                kind, <unsigned char> given[at + 4], read_number(given + at + 5, 4) & WINDOW_MAX, data, at + 9, stop
            )
            at = stop
        self.missing = at + 9 - end
        return at

    cdef int take_frame(
        self, int kind, int flags, long long number, bytes data, Py_ssize_t at, Py_ssize_t stop
    ) except -1:
        """One frame, whose payload stands so in the data."""
        cdef bytes payload
        if kind == DATA:
            return self.take_data(flags, number, data, at, stop)
        payload = data[at:stop]
        if kind == HEADERS:
            return self.take_head(flags, number, payload)
        if kind == CONTINUATION:
            return self.take_continuation(flags, number, payload)
        if kind == WINDOW_UPDATE:
            return self.take_window(number, payload)
        if kind == RST_STREAM:
            return self.take_reset(number)
        if kind == SETTINGS:
            return self.take_settings(flags, number, payload)
        if kind == PING:
            if len(payload) != 8:
                raise ProtocolError("a ping of another length than 8")
            if not flags & ACK:
                self.frame(PING, ACK, 0, PyBytes_AS_STRING(payload), 8)
        elif kind == PUSH:
            raise ProtocolError("a client that pushes")
        return 0

    cdef int take_data(self, int flags, long long number, bytes data, Py_ssize_t at, Py_ssize_t stop) except -1:
        cdef Py_ssize_t size = stop - at
        cdef Http2Stream stream
        cdef Http2Call call
        self.receive_window -= size
        if self.receive_window < 0 or number == 0:
            raise ProtocolError("more bytes than were allowed")
        self.used += size
        if self.used >= CONNECTION_LIMIT // 2:
            self.open_window(0, self.used)
            self.receive_window += self.used
            self.used = 0
        stream = self.streams.get(number)
        if stream is None or stream.half_closed:
            if number > self.seen_id:
                raise ProtocolError("bytes of a stream that was never begun")
            return 0
        stream.receive_window -= size
        if stream.receive_window < 0:
            return self.reset(stream, OF_FLOW)
        if flags & PADDED:
            at, stop = unpadded(PyBytes_AS_STRING(data), at, stop)
            stream.used += size - (stop - at)
        if flags & END_STREAM:
            stream.half_closed = True
        call = stream.call
        if call is None:
            return 0
        if stop > at:
            call.on_data(PyBytes_FromStringAndSize(PyBytes_AS_STRING(data) + at, stop - at))
        if flags & END_STREAM:
            call.on_end()
        return 0

    cdef int take_head(self, int flags, long long number, bytes data) except -1:
        cdef Py_ssize_t at = 0, stop = PyBytes_GET_SIZE(data)
        if flags & PADDED:
            at, stop = unpadded(PyBytes_AS_STRING(data), at, stop)
        if flags & HAS_PRIORITY:
            at = min(at + 5, stop)
        data = data[at:stop]
        if flags & END_HEADERS:
            return self.take_fields(flags, number, data)
        self.is_heading = True
        self.head_id, self.head_flags, self.head_block = number, flags, bytearray(data)
        return 0

    cdef int take_continuation(self, int flags, long long number, bytes data) except -1:
        if not self.is_heading or self.head_id != number:
            raise ProtocolError("fields that continue none")
        if not data and not flags & END_HEADERS:
            raise ProtocolError("fields that go on with nothing")
        self.head_block.extend(data)
        if len(self.head_block) > HEAD_LIMIT:
            raise ProtocolError(f"more than {HEAD_LIMIT} bytes of fields")
        if flags & END_HEADERS:
            self.is_heading = False
            block, self.head_block = bytes(self.head_block), None
            self.take_fields(self.head_flags, number, block)
        return 0

    cdef int take_fields(self, int flags, long long number, bytes block) except -1:
        cdef Http2Stream stream
        cdef Http2Call call
        cdef bint ended = flags & END_STREAM
        if PyBytes_GET_SIZE(block) > HEAD_LIMIT:
            raise ProtocolError(f"more than {HEAD_LIMIT} bytes of fields")
        fields = self.decoder.decode(block)
        stream = self.streams.get(number)
        if stream is not None:  # trailers
            stream.half_closed = True
            call = stream.call
            if call is not None:
                call.on_end()
            return 0
        if number <= self.seen_id:
            return 0  # of a stream that is over here
        if number % 2 == 0:
            raise ProtocolError("a stream with an even number")
        self.seen_id = number
        if self.is_ending or <long long> len(self.streams) >= self.streams_max:
            if not self.is_ending:
                self.last_id = number
            return self.number_frame(RST_STREAM, number, REFUSED)
        self.last_id = number
        stream = self.streams[number] = Http2Stream(self, number, self.stream_send_window)
        stream.half_closed = ended
        call = self.accept(stream, fields)
        if not stream.is_sent:
            stream.call = call
        if ended:
            call.on_end()
        return 0

    cdef int take_reset(self, long long number) except -1:
        cdef Http2Stream stream = self.streams.pop(number, None)
        if stream is not None:
            self.drop(stream)
            return self.close_if_idle()
        if number > self.seen_id:
            raise ProtocolError("the end of a stream that was never begun")
        return 0

    cdef int take_settings(self, int flags, long long number, bytes data) except -1:
        cdef const char* given = PyBytes_AS_STRING(data)
        cdef Py_ssize_t at = 0, end = PyBytes_GET_SIZE(data)
        cdef long long name, value, window = self.stream_send_window
        if flags & ACK:
            return 0
        if end % 6 or number:
            raise ProtocolError("settings that are none")
        while at < end:
            name, value = read_number(given + at, 2), read_number(given + at + 2, 4)
            at += 6
            if name == WINDOW_SETTING:
                if value > WINDOW_MAX:
                    raise ProtocolError("a window that is too large")
                window = value
            elif name == FRAME_SETTING and OTHER_FRAME <= value < 1 << 24:
                self.frame_bytes = value
        if window != self.stream_send_window:  # once, however often a frame says so: it is done for all streams
            self.change_windows(window)
        self.frame(SETTINGS, ACK, 0, b"", 0)
        return self.send_waiting()

    cdef int change_windows(self, long long value) except -1:
        """Let each stream have another window from the start."""
        cdef long long change = value - self.stream_send_window
        cdef Http2Stream stream
        self.stream_send_window = value
        for stream in self.streams.values():
            stream.send_window += change
            if stream.send_window > WINDOW_MAX:
                raise ProtocolError("a window that is too large")
        return 0

    cdef int take_window(self, long long number, bytes data) except -1:
        cdef long long more
        cdef Http2Stream stream
        if PyBytes_GET_SIZE(data) != 4:
            raise ProtocolError("a window of another length than 4")
        more = read_number(PyBytes_AS_STRING(data), 4) & WINDOW_MAX
        if number == 0:
            self.send_window += more
            if self.send_window > WINDOW_MAX or not more:
                raise ProtocolError("a window that is too large, or no larger")
            return self.send_waiting()
        stream = self.streams.get(number)
        if stream is None:
            return 0
        stream.send_window += more
        if stream.send_window > WINDOW_MAX or not more:
            return self.reset(stream, OF_FLOW)
        if stream.pending:
            self.send_frames(stream)
        return 0

    # --- frames out ---------------------------------------------------------------------------------------------------

    cdef int send_data(self, Http2Stream stream, bytes data) except -1:
        """Send a part of a body, as far as the windows allow; the rest follows when they do."""
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
        if (
            not stream.pending
            and size <= self.frame_bytes
            and size <= stream.send_window
            and size <= self.send_window
        ):
            stream.send_window -= size
            self.send_window -= size
            return self.frame(DATA, 0, stream.id, PyBytes_AS_STRING(data), size)
        if stream.pending is None:
            stream.pending = []
        stream.pending.append((DATA, data))
        self.waiting[stream.id] = stream
        return self.send_frames(stream)

    cdef int send_head(self, Http2Stream stream, bytes block, bint end) except -1:
        """Send fields, behind what waits."""
        if stream.pending:
            stream.pending.append((HEADERS, block))
            return 0
        self.frame(
            HEADERS,
            END_HEADERS | (END_STREAM if end else 0),
            stream.id,
            PyBytes_AS_STRING(block),
            PyBytes_GET_SIZE(block),
        )
        return self.finish(stream) if end else 0

    cdef int open_window(self, long long number, long long size) except -1:
        """Let the other side send so many bytes more, of one stream or (0) of all."""
        return self.number_frame(WINDOW_UPDATE, number, size)

    cdef int send_waiting(self) except -1:
        """Send what may be sent of all that waits, those that wait longest first."""
        cdef Http2Stream stream
        if self.waiting and self.send_window > 0:
            for stream in list(self.waiting.values()):
                self.send_frames(stream)
                if self.send_window <= 0:
                    break
        return 0

    cdef int send_frames(self, Http2Stream stream) except -1:
        """Send of what waits as much as the windows allow."""
        cdef list pending = stream.pending
        cdef long long room
        cdef bytes data
        while pending:
            kind, data = pending[0]
            if kind == HEADERS:
                pending.pop(0)
                self.send_head(stream, data, stream.is_sent)
                continue
            room = min(stream.send_window, self.send_window, self.frame_bytes)
            if room <= 0:
                return 0
            room = min(room, PyBytes_GET_SIZE(data))
            stream.send_window -= room
            self.send_window -= room
            self.frame(DATA, 0, stream.id, PyBytes_AS_STRING(data), room)
            if room < PyBytes_GET_SIZE(data):
                pending[0] = kind, data[room:]
            else:
                pending.pop(0)
        self.waiting.pop(stream.id, None)
        if not stream.is_sent:
            stream.take(0)
        return 0

    cdef int finish(self, Http2Stream stream) except -1:
        """All of the answer is sent. Where the other side still speaks, it need not."""
        stream.call = None  # which holds the stream
        if self.streams.pop(stream.id, None) is not None and not stream.half_closed:
            stream.half_closed = True  # what it still says is passed over
            self.number_frame(RST_STREAM, stream.id, 0)
        return self.close_if_idle()

    cdef int reset(self, Http2Stream stream, int code) except -1:
        self.streams.pop(stream.id, None)
        self.number_frame(RST_STREAM, stream.id, code)
        return self.drop(stream)

    cdef int drop(self, Http2Stream stream) except -1:
        cdef Http2Call call
        stream.is_sent = stream.half_closed = True
        stream.pending = None
        self.waiting.pop(stream.id, None)
        call, stream.call = stream.call, None
        if call is not None:
            call.on_reset()
        return 0

    cdef int end(self, int code, str text) except -1:
        """The connection cannot be understood any more."""
        self.is_ending = True
        self.say_last(code, text.encode())
        self.flush()
        self.transport.close()
        return 0

    def say_last(self, code, text):
        """That no more streams are taken, and why."""
        said = self.last_id.to_bytes(4, "big") + code.to_bytes(4, "big") + text
        self.frame(GOAWAY, 0, 0, said, len(said))

    cdef int close_if_idle(self) except -1:
        if self.is_ending and not self.streams:
            self.flush()
            self.transport.close()
        return 0

    cdef int number_frame(self, int kind, long long number, long long value) except -1:
        """A frame with a number of four bytes."""
        cdef char payload[4]
        write_number(payload, 4, value)
        return self.frame(kind, 0, number, payload, 4)

    cdef int frame(self, int kind, int flags, long long number, const char* payload, Py_ssize_t size) except -1:
        cdef char* at
        if self.out_size + 9 + size > self.out_room:
            at = <char*> PyMem_Realloc(self.out, 2 * (self.out_size + 9 + size))
            if at == NULL:
                raise MemoryError
            self.out, self.out_room = at, 2 * (self.out_size + 9 + size)
        at = self.out + self.out_size
        write_number(at, 3, size)
        at[3], at[4] = <char> kind, <char> flags
        write_number(at + 5, 4, number)
        memcpy(at + 9, payload, size)
        self.out_size += 9 + size
        if not self.is_held:
            self.flush()
        return 0

    cdef int flush(self) except -1:
        cdef bytes said
        if not self.out_size:
            return 0
        said = PyBytes_FromStringAndSize(self.out, self.out_size)
        self.out_size = 0
        if self.out_room > KEPT_ROOM:
            PyMem_Free(self.out)
            self.out, self.out_room = NULL, 0
        if not self.transport.is_closing():
            self.transport.write(said)
        return 0


cdef (Py_ssize_t, Py_ssize_t) unpadded(const char* data, Py_ssize_t at, Py_ssize_t stop) except *:
    """Where the payload of a padded frame begins and ends. Raises `ProtocolError` where the padding is more than there
    is."""
    if at == stop or <unsigned char> data[at] >= stop - at:
        raise ProtocolError("more padding than bytes")
    return at + 1, stop - <unsigned char> data[at]
