"""What other compiled modules use of `plain_events.pyx`."""

cdef bint is_plain(const char* data, Py_ssize_t size) noexcept nogil
cdef Py_ssize_t event_count(const char* data, Py_ssize_t size) noexcept nogil
