"""Whole chunks of an HTTP/1.1 body, found without the parser. Owns what counts as one: a length of one to six
hexadecimal digits that is not 0, without extensions, and all of its bytes. Whatever else comes is the parser's.
"""

from libc.string cimport memcpy

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE


cdef int hex_digit(char byte) noexcept nogil:
    if 48 <= byte <= 57:
        return byte - 48
    if 65 <= byte <= 70:
        return byte - 55
    return byte - 87 if 97 <= byte <= 102 else -1


cdef Py_ssize_t find_chunk(const char* data, Py_ssize_t size, Py_ssize_t at, Py_ssize_t* start) noexcept nogil:
    """Where the bytes of the chunk at `at` end; they start at `start`. 0 where no whole chunk is there."""
    cdef Py_ssize_t length = 0, first = at
    cdef int digit
    while at < size and at - first < DIGITS_MAX:
        digit = hex_digit(data[at])
        if digit < 0:
            break
        length = length * 16 + digit
        at += 1
    if length == 0 or at + 4 + length > size or data[at] != 13 or data[at + 1] != 10:
        return 0
    start[0] = at + 2
    at += 2 + length
    return at if data[at] == 13 and data[at + 1] == 10 else 0


cpdef bytes of_chunks(bytes data):
    """What whole chunks hold, which an event mostly comes in; b"" for anything else, the last chunk included."""
    cdef const char* given = PyBytes_AS_STRING(data)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(data), at = 0, start = 0, end, total = 0
    cdef bytes found
    while at < size:
        end = find_chunk(given, size, at, &start)
        if end == 0:
            return b""
        total += end - start
        at = end + 2
    found = PyBytes_FromStringAndSize(NULL, total)
    at = total = 0
    while at < size:
        end = find_chunk(given, size, at, &start)
        memcpy(PyBytes_AS_STRING(found) + total, given + start, end - start)
        total += end - start
        at = end + 2
    return found
