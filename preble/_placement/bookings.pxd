# Decisions that count: contents of `bookings.pyx`.

from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t

from preble._placement.decision cimport Decision
from preble._cost cimport Lease
from preble._placement.e2 cimport Choice, E2, Placement
from preble._placement.prefix_groups cimport Groups
from preble._placement.redirects cimport Redirects
from preble._placement.timing_samples cimport TimingSamples
from preble._core.tree.layout cimport Walk
from preble._core.token_ids cimport TokenView

cdef enum:
    PENDING = -1                 # in `leases`: a request that is just being placed

cdef enum Outcome:
    BOOKED = 0
    NOBODY_ELIGIBLE = 1
    NO_MEMORY = 2
    ROOT_GONE = 3                # the namespace was forgotten since it was looked up: look again
    NEGATIVE_TOKEN = 4

cdef enum Ending:                # what became of a call about a live request
    DONE = 0
    LATE = 1                     # it is not live
    TOO_MANY_CACHED = 2          # more tokens cached than the prompt has

cdef struct Asked:               # one of several prompts that are placed by one call
    TokenView view
    Placement request
    Choice choice
    bint booked

cdef enum:
    THREADS_KEPT = 64

cdef struct OwnNames:
    uint32_t thread              # (r) its number; 0: nobody's
    uint64_t version             # of names_now
    PyObject* names

cdef class DecisionCore(E2):
    cdef readonly Groups groups
    cdef readonly Redirects redirects
    cdef readonly list names     # worker id by index, None where free
    cdef tuple names_now         # the same, never changed
    cdef uint64_t names_version  # (r) +1 with each of these
    cdef OwnNames[THREADS_KEPT] own_names        # where Python has no lock: each thread's copy, see names_here
    cdef readonly dict leases    # request key (`find_key`) -> lease key, or PENDING
    cdef readonly uint32_t live_max
    cdef readonly TimingSamples timings  # what the workers' speed is known by; None: nobody wants to know
    cdef uint64_t turnover       # +1 whenever a worker may take other requests than before
    cdef readonly dict left_out  # workers left out of the decision being made, by index: which requests they take else
    cdef public int64_t late_calls               # about requests that were not live
    cdef int serve(self, uint32_t index, uint32_t eligible) except -1
    cdef int begin(self, Placement* request, TokenView* view, object space, int64_t max_new_tokens,
                   double now) except -1
    cdef int bind_root(self, Placement* request, object namespace, bint create) except -1
    cdef uint32_t choose_with(self, object policy, object asked, Placement* request) except? 0xFFFFFFFE
    cdef Decision booked(self, Placement* request, Choice* choice, object request_id, object key, object space,
                         str reason, object costs)
    cdef void size_up_one(self, const Placement* request, uint32_t worker) noexcept nogil
    cdef bint redirect(self, const Placement* request, Choice* choice) noexcept nogil
    cdef str choose(self, Placement* request, object policy, object asked, Choice* choice)
    cdef int need_workers(self) except -1
    cdef int need_eligible(self) except -1
    cdef str decide(self, TokenView* view, object namespace, Placement* request, Choice* choice)
    cdef int walk_and_book(self, TokenView* view, Placement* request, Choice* choice, bint checked) noexcept nogil
    cdef int decide_many(self, Asked* asked, uint32_t count, object namespace, list names, uint32_t* at) except -1
    cdef int bind_many(self, Asked* asked, uint32_t count, object namespace, uint32_t* at) except -1
    cdef uint32_t walk_many(self, Asked* asked, uint32_t count) noexcept nogil
    cdef int book_many(self, Asked* asked, uint32_t count) noexcept nogil
    cdef int commit(self, const Placement* request, Choice* choice) noexcept nogil
    cdef int publish_names(self) except -1
    cdef tuple names_here(self)
    cdef int walk_ahead(self, TokenView* view, object namespace, Placement* request) except -1
    cdef str decide_walked(self, TokenView* view, object namespace, Placement* request, Choice* choice)
    cdef str chosen_name(self, const Choice* choice)
    cdef int raise_outcome(self, int outcome) except -1
    cdef Lease* live_lease(self, int64_t key) noexcept nogil
    cdef int64_t lease_key(self, object key) except? -1
    cdef int64_t decodes_on(self, uint32_t worker) noexcept nogil
    cdef int prefilled(self, int64_t key, int64_t cached_tokens, double now) noexcept nogil
    cdef int ended(self, int64_t key, int64_t output_tokens, int64_t cached_tokens, double now) noexcept nogil
    cdef int cancelled(self, int64_t key, double now) noexcept nogil
    cdef void first_seen(self, Lease* lease, int64_t cached_tokens, double now) noexcept nogil
    cdef void correct(self, Lease* lease, int64_t cached_tokens, double now) noexcept nogil
    cdef void learn(self, Lease* lease, int64_t cached_tokens, bint alive, uint32_t key) noexcept nogil
    cdef bint is_remembered(self, Lease* lease) noexcept nogil
    cdef void remark(self, Lease* lease, double now) noexcept nogil
    cdef Walk leaf_walk(self, Lease* lease) noexcept nogil
