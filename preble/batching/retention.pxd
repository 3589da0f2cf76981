# Which cached prefix goes first: contents of `retention.pyx`.

from libc.stdint cimport int64_t

from preble.batching.return_times cimport ReturnTimes

cdef class PrefixEnd             # below

cdef class EndLine:              # prefix ends in an order
    cdef PrefixEnd first, last
    cdef Py_ssize_t count
    cdef int append(self, PrefixEnd end) except -1
    cdef int prepend(self, PrefixEnd end) except -1
    cdef int remove(self, PrefixEnd end) except -1

cdef class PrefixEnd:
    cdef readonly int64_t number
    cdef readonly object kind
    cdef readonly double since_seconds
    cdef EndLine line
    cdef PrefixEnd before, after     # in its line

cdef class Retention:
    cdef readonly ReturnTimes times
    cdef Py_ssize_t ends_max
    cdef readonly dict _ends     # by number, the oldest first
    cdef readonly dict _silent   # by kind, without empty lines
    cdef EndLine dead, wanted    # every line is in order
    cdef dict endings            # how many answers ended so
    cdef dict once               # endings of which only one is counted, in the same order
    cdef int64_t answers
    cdef PrefixEnd end_at(self, int64_t number)
    cdef int note_end(self, int64_t number, object ending, double now) except -1
    cdef bint note_asked(self, int64_t number, double now) except -1
    cdef int drop(self, int64_t number) except -1
    cdef int note_evicted(self, PrefixEnd end, int64_t left, double now) except -1
    cdef PrefixEnd first_to_go(self, double now)
    cdef object kind_of(self, object ending)
    cdef PrefixEnd put(self, int64_t number, object kind, double since_seconds, EndLine line)
    cdef int leave(self, PrefixEnd end) except -1
