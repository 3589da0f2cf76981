# The compiled decision step: contents of `_e2.pyx`.

from libc.stdint cimport int64_t, uint32_t

from preble._cost cimport Lease, LoadBook
from preble._layout cimport Walk
from preble._radix cimport RadixTree
from preble._tokens cimport TokenView

cdef enum Reason:
    EXPLOIT = 0
    EXPLORE = 1
    OTHER = 2                    # a Python policy names its own

cdef struct Terms:               # one worker in one decision; seconds unless said
    bint eligible                # may take requests
    bint candidate               # was compared
    uint32_t block_size          # tokens
    uint32_t held                # tokens of the prompt its marks cover
    uint32_t whole               # of these, whole blocks
    uint32_t usable              # of these, at most prompt - 1, in whole blocks
    double load                  # L
    double eviction              # M
    double prefill               # P
    double total

cdef struct Choice:
    uint32_t worker              # NONE: nobody may take it
    Reason reason

cdef class Decision:
    cdef readonly object request_id
    cdef readonly str worker
    cdef readonly uint32_t matched_tokens
    cdef readonly uint32_t prompt_tokens
    cdef readonly str reason
    cdef readonly object costs

cdef class DecisionCore:
    cdef readonly RadixTree tree
    cdef readonly LoadBook book
    cdef readonly list names     # worker id by index, None where free
    cdef readonly dict leases    # request id -> lease index
    cdef Terms* terms
    cdef uint32_t room
    cdef uint32_t* held
    cdef double exploit_ratio
    cdef uint32_t victims_max
    cdef uint32_t live_max
    cdef int grow(self, uint32_t room) except -1
    cdef int prepare(self, TokenView* view, object token_ids, object namespace, Walk* walk) except -1
    cdef int follow(self, TokenView* view, object namespace, Walk* walk) except -1
    cdef void look(self, Walk walk, uint32_t count) noexcept nogil
    cdef double eviction_seconds(self, uint32_t worker, Walk walk, int64_t need, double now) noexcept nogil
    cdef void weigh(self, uint32_t worker, Walk walk, uint32_t count, int64_t max_new_tokens, double now,
                    double longest) noexcept nogil
    cdef Choice choose_e2(self, Walk walk, uint32_t count, int64_t max_new_tokens, double now,
                          bint everyone) noexcept nogil
    cdef bint better(self, uint32_t a, uint32_t b) noexcept nogil
    cdef Choice choose_with(self, object policy, object asked, Walk walk, uint32_t count, int64_t max_new_tokens,
                            double now) except *
    cdef Walk new_root(self, object namespace, uint32_t count) except *
    cdef int commit(self, object request_id, uint32_t worker, TokenView* view, object namespace, Walk walk,
                    int64_t max_new_tokens, double now) except -1
    cdef void correct(self, Lease* lease, int64_t cached_tokens, double now) noexcept
    cdef bint is_remembered(self, Lease* lease) noexcept
    cdef void remark(self, Lease* lease, double now) noexcept
    cdef Walk leaf_walk(self, Lease* lease) noexcept
