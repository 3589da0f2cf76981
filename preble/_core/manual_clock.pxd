# The manual clock, for those who read it without a call. Contents of `manual_clock.pyx`.

cdef class ManualClock:
    cdef double seconds
