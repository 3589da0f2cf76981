"""Events that hold one more token and nothing that must be read, straight from a server's connection to a client's.
Owns which ones pass so; all others go by `stream.py`, which says when the way is open.

What a server sent as whole chunks goes on in the same chunks, byte for byte. One look at each byte finds what must not
pass unread: an error, the end of a choice, a usage.
"""

cimport cython
from libc.string cimport memchr, memcmp

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE

from preble.transport.engine_servers.chunks cimport find_chunk

cdef enum:
    NOT_TAKEN = 0
    TAKEN = 1
    TAKEN_BUT_WAIT = 2


cdef bint ends_with(const char* data, Py_ssize_t at, const char* word, Py_ssize_t size) noexcept nogil:
    """Whether `word` ends before `at`."""
    return at >= size and memcmp(data + at - size, word, size) == 0


cdef bint is_null(const char* data, Py_ssize_t size, Py_ssize_t at) noexcept nogil:
    """Whether the field whose name ends before `at` is null."""
    if size - at >= 5 and memcmp(data + at, b":null", 5) == 0:
        return True
    return size - at >= 6 and memcmp(data + at, b": null", 6) == 0


cdef bint is_plain(const char* data, Py_ssize_t size) noexcept nogil:
    """Whether these are whole events without anything that must be read: as `usage.UsageReader` and
    `stream_errors.server_fault` see it, or stricter."""
    cdef const char* quote = data
    cdef Py_ssize_t at
    cdef char last
    if size < 2 or data[size - 1] != 10 or data[size - 2] != 10:
        return False
    while True:
        quote = <const char*> memchr(quote + 1, 34, data + size - quote - 1)  # one that ends a name
        if quote == NULL:
            return True
        at = quote - data
        last = data[at - 1]
        if last == 110:
            if ends_with(data, at, b"_reason", 7) and not is_null(data, size, at + 1):
                return False
        elif last == 101:
            if ends_with(data, at, b"usage", 5) and not is_null(data, size, at + 1):
                return False
        elif last == 114:
            if ends_with(data, at, b'"error', 6):
                return False
        elif last == 116:
            if ends_with(data, at, b'"abort', 6):
                return False
        elif last == 115:
            if ends_with(data, at, b"prompt_tokens", 13):
                return False


cdef Py_ssize_t event_count(const char* data, Py_ssize_t size) noexcept nogil:
    """How many events end in these bytes."""
    cdef const char* end = data + size
    cdef const char* at = <const char*> memchr(data, 10, size)
    cdef Py_ssize_t count = 0
    while at != NULL and at + 1 < end:
        if at[1] == 10:
            count += 1
            at += 1
        at = <const char*> memchr(at + 1, 10, end - at - 1)
    return count


@cython.final
cdef class PlainEvents:
    """The plain events of one stream. Belongs to one asyncio loop.

    `is_open`: the stream stands between two events, and nothing of it is held back. `events`, at most `bytes_max`
    (`size` now), are what has passed, where it is remembered (`remembers`); else `last` alone is. `passed`: how many
    events have passed at least, on either way.
    """

    cdef public bint is_open, remembers
    cdef public list events
    cdef public Py_ssize_t size, passed
    cdef public bytes last
    cdef Py_ssize_t bytes_max
    cdef object cycle, flow, write, on_output

    def __init__(self, *, Py_ssize_t bytes_max, bint remembers):
        self.is_open = False
        self.remembers = remembers
        self.events = []
        self.size = self.passed = 0
        self.last = b""
        self.bytes_max = bytes_max

    def connect(self, cycle, flow, write, on_output):
        """Where they go: `write` takes bytes of the connection, while neither the client nor `cycle` has ended; `flow`
        knows whether it reads too slowly. `on_output` is called for each lot."""
        self.cycle, self.flow, self.write, self.on_output = cycle, flow, write, on_output

    def take(self, bytes data) -> int:
        """Pass on what came between two chunks, if these are whole chunks of plain events: 1, or 2 where the client
        reads too slowly for more. 0: nothing was done."""
        cdef const char* given = PyBytes_AS_STRING(data)
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data), at = 0, start = 0, end
        cdef list parts
        cdef bytes part
        if not self.is_open or self.size + size > self.bytes_max:
            return NOT_TAKEN
        end = find_chunk(given, size, 0, &start)
        if end == 0 or not is_plain(given + start, end - start):
            return NOT_TAKEN
        part = PyBytes_FromStringAndSize(given + start, end - start)
        at = end + 2
        if at < size:
            parts = [part]
            while at < size:
                end = find_chunk(given, size, at, &start)
                if end == 0 or not is_plain(given + start, end - start):
                    return NOT_TAKEN
                parts.append(PyBytes_FromStringAndSize(given + start, end - start))
                at = end + 2
            part = b"".join(parts)
            self.passed += len(parts) - 1
        self.passed += 1  # a chunk is an event mostly
        if self.remembers:
            self.events.append(part)
            self.size += PyBytes_GET_SIZE(part)
        else:
            self.last = part
        self.on_output()
        if not (self.cycle.disconnected or self.cycle.response_complete):
            self.write(data)
        return TAKEN_BUT_WAIT if self.flow.write_paused else TAKEN
