# The E2 rule: contents of `e2.pyx`.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from preble._cost cimport Cost, LoadTracker
from preble._placement.prefix_groups cimport Groups
from preble._core.tree.layout cimport Victim, Walk
from preble._radix cimport RadixTree
from preble._placement.redirects cimport Redirects
from preble._kv_index.cache_accuracy cimport CacheAccuracy

cdef enum Reason:
    EXPLOIT = 0
    EXPLORE = 1
    ESCAPE = 2
    REBALANCE = 3
    REPLICA = 4
    RENDEZVOUS = 5
    REASONS = 6

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
    double queue                 # Q
    double price                 # of a second of P in this place
    double delay                 # what the request waits and makes wait
    double total                 # what is compared
    double height                # what is compared with the level of a draw (`E2.agree`)

cdef struct Scratch:             # what one decision writes down
    uint32_t room                # rows
    uint32_t workers             # of these, looked at
    uint32_t* held               # tokens of the prompt by worker; all zero between decisions
    uint32_t* met                # the workers that hold some, in the order they were met
    uint32_t count               # how many
    Terms* terms                 # by worker; only where every worker is weighed
    uint32_t next                # node to climb on from

cdef struct Placement:           # a prompt to be placed
    const int32_t* tokens
    uint32_t count
    int64_t max_new_tokens       # 0: not given
    double now
    bint everyone                # weigh every worker, for an explanation
    bint writer                  # the writer lock is held: victims may be noted
    bint from_peer               # another router has placed it
    uint32_t root                # of its namespace; NONE: it has none
    uint32_t root_generation
    Walk walk

cdef struct Prices:              # what is the same for all workers in one decision
    double now
    double longest               # seconds that the oldest worker has been observed
    double delay_weight          # 1 + kappa
    double reuse                 # of a second of load, for what stays there

cdef struct Choice:
    uint32_t worker              # NONE: nobody may take it
    Reason reason
    uint32_t usable
    int64_t lease                # its key, once booked
    uint64_t changes             # the tree's worker_changes when it was booked

cdef int new_scratch(Scratch* s, uint32_t room) noexcept nogil
cdef void free_scratch(Scratch* s) noexcept nogil
cdef void clear_scratch(Scratch* s) noexcept nogil
cdef list rows_of(Scratch* s)

cdef class E2:
    cdef readonly RadixTree tree
    cdef readonly LoadTracker loads
    cdef readonly CacheAccuracy accuracy
    cdef readonly Groups groups
    cdef readonly Redirects redirects
    cdef Scratch scratch         # the writer's
    cdef double exploit_ratio
    cdef double escape_seconds
    cdef double decode_ratio
    cdef uint32_t victims_max
    cdef int grow(self, uint32_t room) except -1
    cdef void discount(self, Scratch* s, uint32_t first) noexcept nogil
    cdef void gather(self, Scratch* s, Walk walk, uint32_t least) noexcept nogil
    cdef uint32_t best_whole(self, Scratch* s, Walk walk) noexcept nogil
    cdef void see_victim(self, uint32_t mark, uint32_t worker, const Cost* cost, Victim* victim) noexcept nogil
    cdef double eviction_seconds(self, uint32_t worker, const Placement* request, int64_t need) noexcept nogil
    cdef void size_up(self, Terms* terms, uint32_t worker, uint32_t held, uint32_t count) noexcept nogil
    cdef int64_t needed(self, const Terms* terms, uint32_t worker, const Placement* request) noexcept nogil
    cdef Prices prices(self, double now) noexcept nogil
    cdef void weigh_queue(self, Terms* terms, uint32_t worker, const Prices* prices) noexcept nogil
    cdef void add_up(self, Terms* terms, const Prices* prices) noexcept nogil
    cdef double missing_seconds(self, const Terms* terms, uint32_t worker, const Placement* request) noexcept nogil
    cdef double eviction_of(self, const Terms* terms, uint32_t worker, const Placement* request) noexcept nogil
    cdef void weigh(self, Terms* terms, uint32_t worker, const Placement* request, const Prices* prices) noexcept nogil
    cdef bint better(self, const Terms* one, uint32_t a, const Terms* two, uint32_t b) noexcept nogil
    cdef void redirect(self, Scratch* s, const Placement* request, const Prices* prices, Choice* choice) noexcept nogil
    cdef Choice choose_e2(self, Scratch* s, const Placement* request) noexcept nogil
    cdef Choice exploit(self, Scratch* s, const Placement* request, uint32_t best, const Prices* prices) noexcept nogil
    cdef void escape(self, Scratch* s, const Placement* request, uint32_t best, double bound, const Prices* prices,
                     Choice* choice) noexcept nogil
    cdef Choice explore(self, Scratch* s, const Placement* request, uint32_t held, const Prices* prices) noexcept nogil
    cdef void note_placer(self, bint from_peer) noexcept nogil
    cdef void draw(self, Scratch* s, double level, uint64_t head, Choice* choice) noexcept nogil
    cdef void agree(self, Scratch* s, const Placement* request, uint32_t held, double bound, const Prices* prices,
                    Choice* choice) noexcept nogil
    cdef void prefer_decoding(self, Scratch* s, const Placement* request, double bound, const Prices* prices,
                              Choice* choice) noexcept nogil
    cdef double decode_share(self, uint32_t worker) noexcept nogil
    cdef void weigh_all(self, Scratch* s, const Placement* request, const Prices* prices) noexcept nogil
    cdef void set_candidates(self, Scratch* s, uint32_t least_held) noexcept nogil
    cdef void compare_delay(self, Scratch* s) noexcept nogil
