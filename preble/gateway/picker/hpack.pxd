"""What other compiled modules use of `hpack.pyx`."""

cdef class HeaderDecoder:
    cdef readonly list table  # the oldest first
    cdef readonly Py_ssize_t table_bytes
    cdef Py_ssize_t bytes_max

    cpdef list decode(self, bytes block)
    cdef tuple field_at(self, Py_ssize_t index)
    cdef int evict(self) except -1
