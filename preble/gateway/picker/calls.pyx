"""gRPC's calls: messages with their lengths, over the bodies of HTTP/2 streams, and how a call ends. Owns external
processing, one call for each request of a data plane, and health checks; what is answered is `exchange`'s.

    bound                                                 beyond it
    a message of `message_bytes_max`                      RESOURCE_EXHAUSTED
    messages that wait while one is being answered        no more are let in (`http2.STREAM_BYTES`)
"""

from collections import deque

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.string cimport memcpy

from preble.gateway.picker.http2 cimport Http2Call, Http2Connection, Http2Stream
from preble.gateway.picker.parts cimport PlainParts

from google.protobuf.message import DecodeError

from preble.gateway.picker.beginning import begun
from preble.gateway.picker.exchange import PickExchange
from preble.gateway.picker.hpack import encoded
from preble.gateway.picker.messages import (
    HEALTH_SERVICE,
    NOT_SERVING,
    SERVICE,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
)

cdef enum:
    OK = 0
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    PREFIX = 5  # bytes before a message: whether it is packed, its size

LIVENESS = "liveness"  # of the process; any other service is asked whether requests are taken
cdef bytes HEAD = encoded(((b":status", b"200"), (b"content-type", b"application/grpc")))
cdef dict TRAILERS = {
    status: encoded(((b"grpc-status", b"%d" % status),)) for status in (OK, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL)
}


cdef class GrpcCall(Http2Call):
    """One call: cuts what comes into messages, and sends answers."""

    cdef readonly bint is_over
    cdef Http2Stream stream
    cdef Py_ssize_t bytes_max
    cdef list parts  # of a message that is not whole
    cdef Py_ssize_t missing  # bytes of it, as far as is known
    cdef bint has_begun

    def __init__(self, Http2Stream stream, Py_ssize_t message_bytes_max):
        self.stream = stream
        self.bytes_max = message_bytes_max

    cpdef object on_data(self, bytes data):
        """Take all messages that are whole; of one that is not, let the rest come."""
        cdef const unsigned char* given
        cdef Py_ssize_t at = 0, end, stop, size
        if self.parts is not None:
            self.parts.append(data)
            self.missing -= PyBytes_GET_SIZE(data)
            if self.missing > 0:
                return
            data = b"".join(self.parts)
            self.parts = None
        given, end = <const unsigned char*> PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data)
        while not self.is_over and at < end:
            stop = at + PREFIX
            if stop <= end:
                size = <Py_ssize_t> given[at + 1] << 24 | given[at + 2] << 16 | given[at + 3] << 8 | given[at + 4]
                if given[at] or size > self.bytes_max:
                    self.on_wrong(UNIMPLEMENTED if given[at] else RESOURCE_EXHAUSTED)
                    return
                stop += size
            if stop > end:
                self.parts, self.missing = [data[at:]], stop - end
                return
            self.on_message(data[at + PREFIX : stop])
            at = stop

    cdef int on_wrong(self, int status) except -1:
        """What comes cannot be taken."""
        return self.finish(status)

    cdef int on_message(self, bytes message) except -1:
        """One message has come."""
        return 0

    cpdef object on_reset(self):
        """Nobody wants an answer any more."""
        self.is_over = True

    cdef int send(self, list messages) except -1:
        """Answer."""
        cdef bytes message, said
        cdef char* at
        cdef Py_ssize_t total = 0, size
        if not messages or self.is_over:
            return 0
        if not self.has_begun:
            self.has_begun = True
            self.stream.head(HEAD)
        for message in messages:
            total += PREFIX + PyBytes_GET_SIZE(message)
        said = PyBytes_FromStringAndSize(NULL, total)
        at = PyBytes_AS_STRING(said)
        for message in messages:
            size = PyBytes_GET_SIZE(message)
            at[0] = 0
            at[1], at[2] = <char> (size >> 24 & 0xFF), <char> (size >> 16 & 0xFF)
            at[3], at[4] = <char> (size >> 8 & 0xFF), <char> (size & 0xFF)
            memcpy(at + PREFIX, PyBytes_AS_STRING(message), size)
            at += PREFIX + size
        self.stream.send(said)
        return 0

    cdef int finish(self, int status=OK) except -1:
        """It is over: say how. Again it does nothing."""
        if self.is_over:
            return 0
        self.is_over = True
        self.stream.head(TRAILERS[status] if self.has_begun else HEAD + TRAILERS[status], end=True)
        return 0


@cython.final
cdef class ProcessCall(GrpcCall):
    """The exchange of one request with a data plane. Messages are taken one after the other, in order; what cannot be
    answered at once waits for its turn."""

    cdef object exchange, turns
    cdef PlainParts plain
    cdef object waiting  # messages, a deque; None where there were none
    cdef object work  # what finds the answer, a coroutine until its turn, and then, where it waits, a task
    cdef bint has_begun_work
    cdef Py_ssize_t untaken  # bytes of what waits, which the other side may not send anew
    cdef bint has_ended

    def __init__(self, Http2Stream stream, Py_ssize_t message_bytes_max, picker):
        super().__init__(stream, message_bytes_max)
        self.exchange = PickExchange(picker)
        self.turns = picker.turns
        self.plain = self.exchange.plain

    cpdef object on_data(self, bytes data):
        """Take messages; while an answer is being found, keep them."""
        GrpcCall.on_data(self, data)
        if self.work is None:
            self.stream.take(PyBytes_GET_SIZE(data))
        else:
            self.untaken += PyBytes_GET_SIZE(data)

    cdef int on_message(self, bytes message) except -1:
        """The next of the data plane's."""
        if self.work is None:
            return self.take(message)
        if self.waiting is None:
            self.waiting = deque()
        self.waiting.append(message)
        return 0

    cdef int on_wrong(self, int status) except -1:
        """The request cannot be followed any further."""
        self.finish(status)
        self.on_reset()
        return 0

    cpdef object on_end(self):
        """The data plane says no more."""
        self.has_ended = True
        if self.work is None:
            self.conclude()

    cpdef object on_reset(self):
        """The data plane has given the request up."""
        self.is_over = True
        if self.work is not None and self.has_begun_work:
            self.work.cancel()  # its end closes the exchange
            return
        if self.work is not None:
            self.turns.give_up(self)
            work, self.work = self.work, None
            work.close()
        self.exchange.close()

    cdef int take(self, bytes message) except -1:
        if self.plain.on_output is not None:  # most of all that is ever said
            try:
                answer = self.plain.passed(message)
            except Exception as error:
                return self.answer(self.exchange.failed(error))
            if answer is not None:
                return self.send([answer])
        try:
            answers = self.exchange.take(message)
        except DecodeError:
            return self.on_wrong(INTERNAL)
        if isinstance(answers, list):
            return self.answer(<list> answers)
        self.work, self.has_begun_work = answers, False
        self.turns.add(self)
        return 0

    def on_turn(self):
        """What could not be answered at once is begun, and mostly done."""
        found = begun(self.work, self.exchange.failed)
        if isinstance(found, list):
            self.go_on(found)
            return
        self.work, self.has_begun_work = found, True
        found.add_done_callback(self.answer_found)

    def answer_found(self, task):
        """What waited is known, or was given up."""
        if task.cancelled() or self.is_over:
            self.work = None
            self.exchange.close()
            return
        error = task.exception()
        self.go_on(task.result() if error is None else self.exchange.failed(error))

    cdef int go_on(self, list answers) except -1:
        """Answer, then take what came meanwhile."""
        cdef Http2Connection connection = self.stream.connection
        self.work = None
        connection.hold()
        try:
            self.answer(answers)
            while self.waiting and self.work is None and not self.is_over:
                self.take(self.waiting.popleft())
            if self.work is None:
                untaken, self.untaken = self.untaken, 0
                self.stream.take(untaken)
                if self.has_ended:
                    self.conclude()
        finally:
            connection.let_go()
        return 0

    cdef int answer(self, list answers) except -1:
        self.send(answers)
        return self.conclude() if self.exchange.is_over else 0

    cdef int conclude(self) except -1:
        self.exchange.close()
        return self.finish()


@cython.final
cdef class CheckCall(GrpcCall):
    """One health check (grpc.health.v1)."""

    cdef object picker

    def __init__(self, Http2Stream stream, Py_ssize_t message_bytes_max, picker):
        super().__init__(stream, message_bytes_max)
        self.picker = picker

    cdef int on_message(self, bytes message) except -1:
        """The question."""
        try:
            service = HealthCheckRequest.FromString(message).service
        except DecodeError:
            return self.finish(INTERNAL)
        is_fine = service == LIVENESS or self.picker.gateway.ready
        self.send([HealthCheckResponse(status=SERVING if is_fine else NOT_SERVING).SerializeToString()])
        return self.finish()

    cpdef object on_end(self):
        """A call without a question."""
        self.finish(INTERNAL)


@cython.final
cdef class UnknownCall(GrpcCall):
    """A call of something that is not served here."""

    def __init__(self, Http2Stream stream, Py_ssize_t message_bytes_max, picker):
        super().__init__(stream, message_bytes_max)
        self.finish(UNIMPLEMENTED)

    cpdef object on_data(self, bytes data):
        """Nothing is read of it."""

    cpdef object on_end(self):
        """Nor waited for."""


CALLS = {
    f"/{SERVICE}/Process".encode(): ProcessCall,
    f"/{HEALTH_SERVICE}/Check".encode(): CheckCall,
}
