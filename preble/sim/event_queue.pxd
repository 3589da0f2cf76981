# Future events in order: contents of `event_queue.pyx`.

from libc.stdint cimport int64_t

from preble._core.manual_clock cimport ManualClock

cdef struct Event:               # by which they are ordered, in this order
    double seconds               # when it happens
    double planned               # among those of one moment: when it was planned,
    int64_t order                # and as which of all
    int64_t number

cdef class EventQueue:
    cdef readonly ManualClock clock
    cdef readonly double now
    cdef double since            # of the event that happens: when it was planned, and as which of all
    cdef int64_t order
    cdef Event* heap             # the first of them is next; none comes before the one at half its place
    cdef Py_ssize_t count, room
    cdef int64_t numbers
    cdef dict actions            # by number: (action, subject)
    cdef set cancelled
    cdef int64_t plan(self, double seconds, object action, object subject, double planned, int64_t order) except -1
