"""What a message says, as `parts.pyx` reads it."""

cdef class PlainParts:
    cdef public object on_output
    cdef public bint is_open
    cdef public Py_ssize_t events

    cpdef bytes passed(self, bytes message)


cdef class Said:
    cdef public int kind
    cdef public list fields
    cdef public bytes body
    cdef public bint end, is_observed
    cdef public tuple modes
    cdef public bytes metadata
