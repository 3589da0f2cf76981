# The calls of a request's life: contents of `_placement/request_api.pyx`.

from libc.stdint cimport int64_t, uint32_t

from preble._placement.decision cimport Decision
from preble._placement.bookings cimport DecisionCore
from preble._placement.e2 cimport REASONS, Choice, Order
from preble._core.token_ids cimport TokenView

cdef class RequestCalls:
    cdef public DecisionCore _core
    cdef public object _policy   # None: E2
    cdef public object _books    # of the policy; None: it needs none
    cdef public object _clock
    cdef public int64_t _sequence                # decisions booked so far
    cdef int64_t scheduled
    cdef int64_t finished
    cdef int64_t cancelled
    cdef int64_t late_calls
    cdef int64_t reasons[REASONS]                # of E2
    cdef double now(self) except? -1.0
    cdef object claim(self, object request_id)
    cdef object key_of(self, object request_id)
    cdef Decision place(self, object token_ids, object request_id, object namespace, int64_t limit)
    cdef int walk_and_place(self, TokenView* view, Order* order, Choice* choice, bint checked) noexcept nogil
    cdef int decide(self, TokenView* view, object namespace, Order* order, Choice* choice) except -1
    cdef bint end(self, object request_id, object output_tokens, object cached_tokens) except -1
    cdef bint answer(self, int ending, object request_id, bint ended, int64_t cached_tokens,
                     int64_t output_tokens) except -1
