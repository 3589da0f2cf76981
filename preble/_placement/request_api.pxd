# The calls of a request's life: contents of `request_api.pyx`.

from libc.stdint cimport int64_t

from preble._core.atomic cimport Apart
from preble._placement.decision cimport Decision
from preble._placement.bookings cimport Asked, DecisionCore
from preble._placement.e2 cimport REASONS, Placement

cdef enum Call:                  # what is reported to observers
    FIRST_TOKEN = 0
    FINISHED = 1
    CANCELLED = 2

cdef class RequestApi:
    cdef readonly DecisionCore core
    cdef public object _clock
    cdef readonly int64_t _seed
    cdef public object _policy       # None: E2
    cdef public object _policy_state             # None: the policy needs none
    cdef public object _observer     # None: nobody looks on
    cdef public object _tenants      # None: no request has named a tenant, a deadline or a class
    cdef readonly dict _reasons      # decisions where every worker was weighed
    cdef Apart apart                 # what every call reads is above, what every call writes below
    cdef int64_t sequence            # decisions booked so far
    cdef int64_t scheduled
    cdef int64_t finished
    cdef int64_t cancelled
    cdef int64_t reasons[REASONS]    # of the quick way
    cdef double time(self) except? -1.0
    cdef bint is_observed(self, bint* explain) except -1
    cdef object claim(self, object request_id, int64_t number)
    cdef int give_up(self, object key) except -1
    cdef Decision place(self, object token_ids, object request_id, object namespace, int64_t limit, bint of_session)
    cdef Decision place_walked(self, object token_ids, object request_id, object namespace, Placement* request)
    cdef list place_many(self, list prompts, list request_ids, object namespace, int64_t limit)
    cdef list answer_many(self, Asked* asked, list names, list keys, list request_ids)
    cdef list place_each(self, list prompts, list request_ids, object namespace, object max_new_tokens, list groups,
                         object claim)
    cdef int check_many(self, list prompts, list request_ids) except -1
    cdef Decision place_weighed(self, object token_ids, object request_id, object namespace, object max_new_tokens,
                                object exclude, bint explain, object group, bint of_session)
    cdef int count_reason(self, str reason) except -1
    cdef object rule_for(self, object group)
    cdef object seen(self, object token_ids, object namespace, object max_new_tokens, object request_id, double now,
                     object group)
    cdef object key_of(self, object request_id)
    cdef int64_t lease_of(self, object key) except? -1
    cdef bint end(self, object request_id, object output_tokens, object cached_tokens) except -1
    cdef bint give_back(self, object key, double now) except -1
    cdef bint is_over_unseen(self, int ending, object key) noexcept
    cdef bint answer(self, int ending, Call call, object key, double now, int64_t cached_tokens,
                     int64_t output_tokens) except -1
    cdef int report_ending(self, Call call, object key, double now, int64_t cached_tokens,
                           int64_t output_tokens) except -1
