# How long it takes until a session is back: contents of `return_times.pyx`.

cdef enum:
    BINS_HERE = 16               # `BINS`, for arrays

cdef class Pauses:               # of one kind
    cdef double[BINS_HERE] returns
    cdef double[BINS_HERE] seconds
    cdef double events
    cdef long fresh              # events since the table was made
    cdef bint made               # the table, once
    cdef double[BINS_HERE] rates     # of return, a second
    cdef double[BINS_HERE] values    # see `ReturnTimes.value`
    cdef void add(self, double silent_seconds, bint returned) noexcept

cdef class ReturnTimes:
    cdef long kinds_max
    cdef Pauses all              # of all kinds
    cdef dict kinds
    cdef int add(self, object kind, double silent_seconds, bint returned) except -1
    cdef object rarest(self)
    cdef double value_of(self, object kind, double silent_seconds) except? -1.0
    cdef Pauses renewed(self, object kind)
    cdef int renew(self, Pauses pauses) except -1
