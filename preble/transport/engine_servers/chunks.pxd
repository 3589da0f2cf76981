# Whole chunks of an HTTP/1.1 body: contents of `chunks.pyx`.

cdef enum:
    DIGITS_MAX = 6               # of a chunk's length

cdef Py_ssize_t find_chunk(const char* data, Py_ssize_t size, Py_ssize_t at, Py_ssize_t* start) noexcept nogil
cpdef bytes of_chunks(bytes data)
