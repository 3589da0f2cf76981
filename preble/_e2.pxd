# The E2 rule: contents of `_e2.pyx`.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from preble._cost cimport Cost, LoadBook
from preble._layout cimport Victim, Walk
from preble._radix cimport RadixTree

cdef enum Reason:
    EXPLOIT = 0
    EXPLORE = 1

cdef enum Service:               # which requests a worker takes: `eligible` of its row
    NO_REQUEST = 0
    ANY_REQUEST = 1
    CACHED_ONLY = 2              # it leaves, and takes what would be exploited there

cdef struct Terms:               # one worker in one decision; seconds unless said
    bint weighed                 # might take the request
    bint candidate               # was compared
    uint32_t whole               # tokens of the prompt its marks cover, in whole blocks
    uint32_t usable              # of these, at most prompt - 1, in whole blocks
    double load                  # L
    double eviction              # M
    double prefill               # P
    double total

cdef struct Scratch:             # what one decision writes down
    uint32_t room                # rows
    uint32_t workers             # of these, looked at
    uint32_t* held               # tokens of the prompt by worker; all zero between decisions
    uint32_t* met                # the workers that hold some, in the order they were met
    uint32_t count               # how many
    Terms* terms                 # by worker; only where every worker is weighed
    uint32_t next                # node to climb on from

cdef struct Order:               # a prompt to be placed
    const int32_t* tokens
    uint32_t count
    int64_t max_new_tokens       # 0: not told
    double now
    bint everyone                # weigh every worker, for an explanation
    bint writer                  # the guard is held: victims may be noted
    uint32_t root                # of its namespace; NONE: it has none
    uint32_t root_generation
    Walk walk

cdef struct Choice:
    uint32_t worker              # NONE: nobody may take it
    Reason reason
    uint32_t usable
    int64_t lease                # its key, once booked
    uint64_t changes             # the tree's worker_changes when it was booked

cdef int new_scratch(Scratch* s, uint32_t room) noexcept nogil
cdef void free_scratch(Scratch* s) noexcept nogil
cdef void clear_scratch(Scratch* s) noexcept nogil

cdef class E2:
    cdef readonly RadixTree tree
    cdef readonly LoadBook book
    cdef Scratch scratch         # the writer's
    cdef double exploit_ratio
    cdef uint32_t victims_max
    cdef int grow(self, uint32_t room) except -1
    cdef void gather(self, Scratch* s, Walk walk, uint32_t least) noexcept nogil
    cdef uint32_t best_whole(self, Scratch* s, Walk walk) noexcept nogil
    cdef void see_victim(self, uint32_t mark, uint32_t worker, const Cost* cost, Victim* victim) noexcept nogil
    cdef double eviction_seconds(self, uint32_t worker, const Order* order, int64_t need) noexcept nogil
    cdef void size_up(self, Terms* terms, uint32_t worker, uint32_t held, uint32_t count) noexcept nogil
    cdef int64_t needed(self, const Terms* terms, uint32_t worker, const Order* order) noexcept nogil
    cdef void weigh(self, Terms* terms, uint32_t worker, const Order* order, double longest) noexcept nogil
    cdef bint better(self, const Terms* one, uint32_t a, const Terms* two, uint32_t b) noexcept nogil
    cdef void weigh_all(self, Scratch* s, const Order* order) noexcept nogil
    cdef Choice exploit(self, Scratch* s, const Order* order, uint32_t best) noexcept nogil
    cdef Choice explore(self, Scratch* s, const Order* order) noexcept nogil
    cdef Choice best_of_all(self, Scratch* s, const Order* order, uint32_t key_end) noexcept nogil
    cdef Choice choose_e2(self, Scratch* s, const Order* order) noexcept nogil
