# One simulated worker: contents of `worker_core.pyx`.

from libc.stdint cimport int64_t

from preble.batching.iterations cimport IterationCore
from preble.sim.event_queue cimport EventQueue

cdef enum:
    STRETCH_MAX = 32             # iterations; what is computed ahead may be for nothing

cdef class SimWorkerCore:
    cdef readonly object engine
    cdef IterationCore scheduler
    cdef EventQueue timeline
    cdef object deliver
    cdef object reported         # which of its events are
    cdef object on_end, on_stretch_end       # what the timeline calls
    cdef double step_seconds, step_seconds_per_request
    cdef int64_t stretch_min
    cdef double busy             # seconds of the iterations that have ended
    cdef double begun, end_seconds           # when the iteration that runs began, and when it will end
    cdef int64_t iterations_begun
    cdef double slowness         # what an iteration's time is multiplied by
    cdef bint running, dead
    cdef dict left               # output tokens of its requests when it died
    cdef double held_seconds     # by which the next iteration ends later
    cdef double idle_from        # until when one that idles stands still
    cdef list taken_over         # KV that waits for the end of an iteration: (tokens, seconds, what is done then)
    # Iterations that are alike, if any: how many are to end, when each does, when the first of them begins, the event
    # of the last end, and as which of all events each would have been planned.
    cdef int stretch
    cdef int passed              # of `ends`, those that were booked already
    cdef double[STRETCH_MAX] ends
    cdef double stretch_begun
    cdef int64_t stretch_event, stretch_order
    cdef double host_seconds(self, int64_t requests) noexcept
    cdef int begin(self) except -1
    cdef int take_over_waiting(self) except -1
    cdef int begin_stretch(self, int64_t steps) except -1
    cdef double begun_after(self, int ended) noexcept
    cdef int plan_stretch_end(self) except -1
    cdef int cut(self) except -1
    cdef int catch_up(self) except -1
    cdef int ended_by_now(self) noexcept
    cdef int book(self, int ended) except -1
