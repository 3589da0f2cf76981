# The E2 rule: contents of `e2.pyx`.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from preble._core.atomic cimport Apart
from preble._cost cimport Lease, LoadTracker
from preble._core.tree.layout cimport Walk
from preble._radix cimport RadixTree
from preble._kv_index.cache_accuracy cimport CacheAccuracy
from preble._placement.copy_credits cimport Credit
from preble._kv_index.load_rates cimport DISK, HOST, MEDIA, LoadRates

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
    bint must_evict              # has no room in its GPU's memory for what it lacks and the output
    uint32_t whole               # tokens of the prompt its marks cover, in whole blocks
    uint32_t usable              # of these, at most prompt - 1, in whole blocks
    uint32_t passes              # the same, where they let the prompt pass what waits there; else 0
    double load                  # L
    double prefill               # P; with the next six what adds up to the total
    double queue
    double others
    double decode
    double eviction
    double balance
    double credit                # 0 or less
    double repeated              # of `others`, for what it would compute though somebody caches it
    double loading               # bringing what is cached, and not in the GPU's memory, there
    uint32_t loaded[MEDIA]       # tokens of `usable` that are, by medium
    double total                 # what is compared
    double height                # what is compared with the level of a draw (`E2.agree`)

cdef struct Away:                # what a worker caches of a prompt beside its GPU's memory
    uint32_t loaded[MEDIA]       # tokens
    double seconds               # to load them

cdef struct Scratch:             # what one decision writes down
    uint32_t room                # rows
    uint32_t workers             # of these, looked at
    uint32_t* held               # tokens of the prompt by worker; all zero between decisions
    uint32_t* met                # the workers that hold some, in the order they were met
    uint32_t count               # how many
    Terms* terms                 # by worker; only where every worker is weighed
    Away* away                   # by worker; of those met, and only if
    bint some_away               # some tokens of some worker are

cdef struct Placement:           # a prompt to be placed
    const int32_t* tokens
    uint32_t count
    int64_t max_new_tokens       # 0: not given
    double now
    bint everyone                # weigh every worker, for an explanation
    bint from_peer               # another router has placed it
    bint of_session              # its client names a session
    uint32_t root                # of its namespace; NONE: it has none
    uint32_t root_generation
    Walk walk

cdef struct Outstanding:         # of some workers together
    uint32_t workers
    double ahead                 # Q - D; of the fleet Q
    double live_requests
    double prompt_tokens         # of these
    double load                  # L; of the fleet only

cdef struct Prices:              # what is the same for all workers in one decision
    double now
    double longest               # seconds that the oldest worker has been observed
    double pressure              # kappa
    double repeated_pressure     # 3 (kappa' - kappa), for work that need not be done at all
    uint32_t best                # tokens of the prompt that some worker caches, at most all but the last
    double output_tokens         # o
    double evicted_uses          # 2 h
    bint some_below              # host memory or a disk is behind some worker's GPU memory
    Outstanding fleet            # of the workers that take requests; W is its mean
    double passed                # of what is ahead, by share of the prompt that is cached
    uint32_t home                # of a known prefix that nobody holds: whose cache it was in last; NONE: it has none
    uint32_t home_alike          # the kind of that worker: equal for equal cost models
    uint32_t alike               # the last worker weighed had this cost model and held so much:
    uint32_t usable
    double prefill               # P of such a worker
    double context_seconds       # 0.3 o b of such a worker
    double own                   # P (1 + kappa) of such a worker
    double repeated              # P - P*, computed though somebody caches it; 0 on a fleet with nothing to do
    double each_live             # what each request that it has adds to a total there
    double full_share            # of a second of load, of one half of the time observed

cdef struct Choice:
    uint32_t worker              # NONE: nobody may take it
    Reason reason
    uint32_t usable
    uint32_t loaded[MEDIA]       # of these, by medium
    uint32_t credited            # node for whose copies something is saved up; NONE: no choice of E2, or no such node
    double credit                # how much, this request's share included
    int64_t lease                # its key, once booked
    uint64_t changes             # the tree's worker_changes when it was booked

cdef int new_scratch(Scratch* s, uint32_t room) noexcept nogil
cdef void free_scratch(Scratch* s) noexcept nogil
cdef void clear_scratch(Scratch* s) noexcept nogil
cdef list rows_of(Scratch* s)
cdef void load(Terms* terms, const Scratch* s, uint32_t worker) noexcept nogil

cdef inline void use(Choice* choice, const Terms* terms) noexcept nogil:
    # Book what a worker can use of the prompt.
    choice.usable = terms.usable
    choice.loaded[HOST] = terms.loaded[HOST]
    choice.loaded[DISK] = terms.loaded[DISK]

cdef class E2:
    cdef readonly RadixTree tree
    cdef readonly LoadTracker loads
    cdef readonly CacheAccuracy accuracy
    cdef Credit* credits
    cdef LoadRates* rates        # by worker
    cdef int64_t* loaded         # tokens that were to be loaded, by worker and medium
    cdef double[MEDIA] stated_rates
    cdef double exploit_ratio
    cdef double unseen_seconds   # of other routers' work that a decision reckons with
    cdef readonly uint32_t eligible_workers      # that take any request
    cdef Apart apart             # readers look at what is above
    cdef Scratch scratch         # the writer's
    cdef int grow(self, uint32_t room) except -1
    cdef void state_rates(self, uint32_t worker) noexcept nogil
    cdef double pressure_now(self) noexcept nogil
    cdef void book_load(self, Lease* lease, const Choice* choice, bint from_peer) noexcept nogil
    cdef double loading_of(self, const Lease* lease) noexcept nogil
    cdef void learn_load(self, Lease* lease, int64_t cached_tokens, double now) noexcept nogil
    cdef void discount(self, Scratch* s) noexcept nogil
    cdef void look_for_away(self, Scratch* s, const Placement* request) noexcept nogil
    cdef uint32_t gather(self, Scratch* s, const Placement* request) noexcept nogil
    cdef Outstanding of_fleet(self) noexcept nogil
    cdef bint goes_on(self, const Placement* request) noexcept nogil
    cdef uint32_t home_of(self, const Scratch* s, const Placement* request, uint32_t best) noexcept nogil
    cdef void size_up(self, Terms* terms, uint32_t worker, uint32_t held, uint32_t count) noexcept nogil
    cdef Prices prices(self, const Placement* request, uint32_t best) noexcept nogil
    cdef void price_of(self, Prices* prices, uint32_t worker, uint32_t usable, uint32_t count) noexcept nogil
    cdef double sent_away_seconds(self, uint32_t worker, int64_t missed, const Terms* terms,
                                  const Prices* prices) noexcept nogil
    cdef double ahead_seconds(self, uint32_t worker, double stays, double now) noexcept nogil
    cdef void add_outstanding(self, Outstanding* of, uint32_t worker, double now) noexcept nogil
    cdef void weigh_most(self, Terms* terms, uint32_t worker, const Placement* request, double ahead,
                         Prices* prices) noexcept nogil
    cdef void weigh_behind(self, Terms* terms, uint32_t worker, const Placement* request,
                           const Prices* prices) noexcept nogil
    cdef void weigh(self, Terms* terms, uint32_t worker, const Placement* request, Prices* prices) noexcept nogil
    cdef double price_of_mean(self, const Placement* request, const Terms* home, const Outstanding* of,
                              const Prices* prices) noexcept nogil
    cdef void set_credit(self, Terms* terms, uint32_t worker, const Placement* request, const Terms* home,
                         double credit, const Prices* prices) noexcept nogil
    cdef bint drives_out_reused(self, uint32_t worker, int64_t need, double now) noexcept nogil
    cdef bint better(self, const Terms* one, uint32_t a, const Terms* two, uint32_t b) noexcept nogil
    cdef uint32_t least_held(self, uint32_t best, uint32_t count) noexcept nogil
    cdef Choice choose_e2(self, Scratch* s, const Placement* request) noexcept nogil
    cdef Choice cheapest(self, Scratch* s, const Placement* request, uint32_t least_held, Prices* prices,
                         Terms* there) noexcept nogil
    cdef void save_up(self, const Placement* request, uint32_t least_held, uint32_t home, const Outstanding* holders,
                      const Terms* there, Prices* prices, Choice* choice) noexcept nogil
    cdef bint takes(self, uint32_t worker, uint32_t whole, uint32_t least_held) noexcept nogil
    cdef void agree(self, Scratch* s, const Placement* request, uint32_t held, uint32_t least_held, Prices* prices,
                    Choice* choice) noexcept nogil
    cdef void note_placer(self, bint from_peer) noexcept nogil
    cdef void draw(self, Scratch* s, double level, uint64_t head, Choice* choice) noexcept nogil
    cdef void weigh_all(self, Scratch* s, const Placement* request, uint32_t least_held,
                        Prices* prices) noexcept nogil
    cdef void set_candidates(self, Scratch* s, uint32_t least_held) noexcept nogil
    cdef void take_credit(self, Scratch* s, const Placement* request, uint32_t least_held, const Terms* home,
                          double credit, const Prices* prices) noexcept nogil
