"""Streams and connections of `http2.pyx`, as other compiled modules use them."""

from preble.gateway.picker.hpack cimport HeaderDecoder


cdef class Http2Call:
    cpdef object on_data(self, bytes data)
    cpdef object on_end(self)
    cpdef object on_reset(self)


cdef class Http2Stream:
    cdef readonly Http2Connection connection
    cdef readonly long long id
    cdef Http2Call call
    cdef readonly bint half_closed  # the other side says no more
    cdef readonly bint is_sent  # we have said all
    cdef long long send_window, receive_window
    cdef long long used  # bytes that were taken, and that the other side may send anew
    cdef list pending  # frames, by kind, that wait for the window

    cpdef object send(self, bytes data)
    cpdef object head(self, bytes block, bint end=*)
    cpdef object take(self, Py_ssize_t count)


cdef class Http2Connection:
    cdef readonly dict streams  # by their numbers
    cdef dict waiting  # those of them that have frames which wait for a window
    cdef object accept, gone, transport
    cdef HeaderDecoder decoder
    cdef bint is_greeted, is_held, is_ending, is_heading
    cdef long long streams_max
    cdef long long last_id  # of the streams that were not refused because we stop: what GOAWAY says
    cdef long long seen_id  # of all streams that the other side has begun
    cdef list parts  # of what is not a whole frame yet
    cdef Py_ssize_t missing  # bytes of it, as far as is known
    cdef bytearray head_block  # fields whose continuation is to come, of which stream, with which flags
    cdef long long head_id
    cdef int head_flags
    cdef char* out  # frames that were not written yet
    cdef Py_ssize_t out_size, out_room
    cdef long long send_window, stream_send_window, frame_bytes, receive_window, used

    cpdef object data_received(self, bytes data)
    cdef int hold(self) except -1
    cdef int let_go(self) except -1
    cdef Py_ssize_t take_frames(self, bytes data) except -1
    cdef int take_frame(
        self, int kind, int flags, long long number, bytes data, Py_ssize_t at, Py_ssize_t stop
    ) except -1
    cdef int take_data(self, int flags, long long number, bytes data, Py_ssize_t at, Py_ssize_t stop) except -1
    cdef int take_head(self, int flags, long long number, bytes data) except -1
    cdef int take_continuation(self, int flags, long long number, bytes data) except -1
    cdef int take_fields(self, int flags, long long number, bytes block) except -1
    cdef int take_reset(self, long long number) except -1
    cdef int take_settings(self, int flags, long long number, bytes data) except -1
    cdef int change_windows(self, long long value) except -1
    cdef int take_window(self, long long number, bytes data) except -1
    cdef int send_data(self, Http2Stream stream, bytes data) except -1
    cdef int send_head(self, Http2Stream stream, bytes block, bint end) except -1
    cdef int send_frames(self, Http2Stream stream) except -1
    cdef int send_waiting(self) except -1
    cdef int open_window(self, long long number, long long size) except -1
    cdef int finish(self, Http2Stream stream) except -1
    cdef int reset(self, Http2Stream stream, int code) except -1
    cdef int drop(self, Http2Stream stream) except -1
    cdef int end(self, int code, str text) except -1
    cdef int close_if_idle(self) except -1
    cdef int frame(self, int kind, int flags, long long number, const char* payload, Py_ssize_t size) except -1
    cdef int number_frame(self, int kind, long long number, long long value) except -1
    cdef int flush(self) except -1
