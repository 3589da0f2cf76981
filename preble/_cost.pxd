# Cost model and load accounting: contents of `_cost.pyx`.

from libc.stdint cimport int32_t, int64_t, uint32_t

from preble._core.atomic cimport Apart
from preble._core.memory cimport Slab, Budget

cdef enum:
    KNOTS_MAX = 16
    BUCKETS = 36                 # the window is this many ring buckets
    LEASES_MAX = 1 << 26         # at once; a key is serial * LEASES_MAX + index

cdef struct Cost:                # coefficients of one engine, in seconds and tokens
    uint32_t knots               # points of the monotone piecewise-linear part over tokens in the batch
    double at[KNOTS_MAX]
    double seconds[KNOTS_MAX]
    double context_from          # attention over the context: `context_flat` up to here, else base + slope * context
    double context_flat
    double context_base
    double context_slope
    double pair_from             # attention of a chunk of q tokens ending at context s: only where q * s > pair_from
    double pair_base
    double pair_q
    double pair_s
    double pair_qs
    double start                 # more than an iteration of decodes takes, where there is a prefill in it

cdef struct Work:                # of one iteration, summed up
    double tokens
    double context
    double pair_seconds

cdef double prefill_seconds(const Cost* cost, double missed, double context) noexcept nogil
cdef double token_seconds(const Cost* cost, double context, double batch) noexcept nogil
cdef int64_t nanoseconds(double seconds) noexcept nogil

cdef class CostModel:
    cdef Cost cost
    cdef readonly str name
    cdef double pair_jump(self, double root)
    cdef void add_decode(self, Work* work, double context) noexcept
    cdef bint add_array(self, Work* work, object contexts) except -1

cdef struct Bucket:              # what one worker was assigned in one slice of the window
    int64_t prefill_ns
    int64_t requests
    int64_t prompt_tokens
    int64_t matched_tokens       # of these, what the decisions counted as cached
    int64_t output_tokens        # expected at booking, corrected at the end
    int64_t finished
    int64_t finished_tokens

cdef struct Lease:               # one live request
    uint32_t index               # of the lease itself; the free list goes through here
    float renewed_seconds        # from the booking to its last renewal, rounded up; 0: never renewed
    int64_t serial               # of this booking, never used again; 0 once it has ended
    uint32_t worker
    uint32_t worker_generation   # shows whether the worker is still the same one
    uint32_t leaf                # the prompt's last node
    uint32_t leaf_generation
    uint32_t prompt_tokens
    uint32_t matched_tokens      # what the decision counted as cached
    uint32_t confirmed_tokens    # what the worker was known, not only predicted, to hold before this request
    uint32_t expected_output
    int64_t prefill_ns           # booked now
    int64_t bucket               # slice of the window it was booked in
    double booked_at
    bint prefilled               # its first token has come
    uint32_t hit_reported        # its cached tokens have been reported
    uint32_t share               # of a prefix group it was counted in, and 1; 0: in none
    uint32_t first_decodes       # requests that decoded then, with it
    uint32_t seen_tokens         # its worker's samples then: tokens prefilled, moments
    uint32_t seen_moments
    uint32_t loaded[2]           # of the matched tokens, those in host memory and on disk
    bint alone                   # nothing waited on the worker when it was booked
    double first_at              # when it came
    double began_at              # the same, kept by snapshots: since when it has its place

# What decisions read of a worker, side by side with the other workers' and in memory that never moves. Every field is
# also read without a lock, so it is written with atomic stores.
cdef struct Row:                 # 80 bytes
    double load_seconds          # L, unscaled
    double joined_at
    double queue_seconds         # prefill booked and not seen done
    double working_since         # when a first token was seen last, or some of it began to wait where none did
    const Cost* cost             # NULL: no worker has this index
    uint32_t live_requests
    uint32_t live_output_tokens  # of these, and of their prompts: 2^32 - 1 at most
    uint32_t live_prompt_tokens
    uint32_t waiting_requests    # of the live ones, before their first token
    uint32_t block_size          # tokens
    uint32_t eligible            # may take requests
    uint32_t alike               # one of the workers with the same cost model, the same one for all of them
    uint32_t name                # a number made of its name, which is the same for every router
    uint32_t cached_first        # lets what it caches more of pass what waits
    uint32_t place_us            # until a place is free for one more request, in microseconds, 71 minutes at most

cdef struct WorkerLoad:
    bint used
    uint32_t generation
    double joined_at
    double output_token_seconds  # seconds of worker time one output token takes, at the fleet's usual batch
    Bucket window                # sums over the ring
    int64_t live_requests        # leases
    int64_t waiting_requests     # of these, before their first token
    int64_t waiting_prefill_ns   # prefill work booked and not yet seen done
    int64_t live_output_tokens   # expected output of live requests
    int64_t live_prompt_tokens
    int64_t places               # requests that it runs at once; 0: not known
    double stay_seconds          # that a request runs, lately; 0 before any has ended
    int64_t longer_ns            # by how much a wait for a place is longer than for what waits
    Bucket ring[BUCKETS]

cdef class LoadTracker:
    cdef WorkerLoad* workers
    cdef Row* rows
    cdef uint32_t room
    cdef readonly uint32_t end   # one past the highest index in use
    cdef Apart apart             # `match` looks at what is above
    cdef uint32_t generations
    cdef int64_t serials
    cdef Slab leases
    cdef Budget budget
    cdef Bucket fleet            # sums over all workers
    cdef int64_t fleet_output    # mean_output_tokens of all workers (r)
    cdef double oldest_joined    # (r)
    cdef double fleet_load       # seconds assigned to all workers within the window (r)
    cdef int64_t fleet_places_ns  # by how much waits for a place are longer than for prefills, sum of the rows (r)
    cdef int64_t fleet_waiting_ns  # and outstanding: sums of what their accounts say (r)
    cdef int64_t fleet_requests  # (r)
    cdef int64_t fleet_prompt_tokens  # (r)
    cdef double output_seconds   # of worker time for one output token, mean of the workers (r)
    cdef uint32_t used           # workers (r)
    cdef double others           # share of the requests booked lately that other routers placed (r)
    cdef double hit_share        # of the window's prompt tokens, those cached where they went (r)
    cdef int64_t now_bucket
    cdef double bucket_seconds
    cdef readonly double window_seconds
    cdef readonly double join_seconds

    cdef int open(self, uint32_t worker, const Cost* cost, int64_t places, double now) except -1
    cdef const Cost* close(self, uint32_t worker) noexcept
    cdef Lease* lease_at(self, uint32_t index) noexcept nogil
    cdef Lease* lease_of(self, int64_t key) noexcept nogil
    cdef uint32_t index_of(self, int64_t key) noexcept nogil
    cdef void advance(self, double now) noexcept nogil
    cdef bint is_behind(self, double now) noexcept nogil
    cdef double scale(self, uint32_t worker, double now, double longest) noexcept nogil
    cdef double pressure(self, double load_seconds, uint32_t workers, double longest) noexcept nogil
    cdef double whole_pressure(self, double load_seconds, uint32_t workers, double longest) noexcept nogil
    cdef double longest_observed(self, double now) noexcept nogil
    cdef double done_seconds(self, uint32_t worker, double now) noexcept nogil
    cdef double load_seconds(self, uint32_t worker) noexcept nogil
    cdef int64_t expected_of_fleet(self, int64_t max_new_tokens) noexcept nogil
    cdef uint32_t expected_output(self, uint32_t worker, int64_t max_new_tokens) noexcept nogil
    cdef int64_t book(self, uint32_t worker, Lease lease, double now) noexcept nogil
    cdef void correct_prefill(self, Lease* lease, int64_t prefill_ns) noexcept nogil
    cdef void reprice(self, uint32_t worker, double factor) noexcept nogil
    cdef void book_again(self, uint32_t worker, int64_t sign) noexcept nogil
    cdef bint is_of(self, Lease* lease, uint32_t worker) noexcept nogil
    cdef void prefilled(self, Lease* lease, double now) noexcept nogil
    cdef void end_lease(self, Lease* lease, int64_t output_tokens, double now) noexcept nogil
    cdef void drop_lease(self, Lease* lease) noexcept nogil
    cdef void void_lease(self, Lease* lease, double now) noexcept nogil
    cdef bint is_current(self, Lease* lease) noexcept nogil
    cdef void retune(self) noexcept nogil
    cdef void settle(self) noexcept nogil
    cdef void enter(self, Lease* lease, const Bucket* change, int64_t sign) noexcept nogil
    cdef void wait_change(self, WorkerLoad* loads, int64_t prefill_ns) noexcept nogil
    cdef void live_change(self, WorkerLoad* loads, const Lease* lease, int64_t requests) noexcept nogil
    cdef void publish(self, uint32_t worker) noexcept nogil
    cdef void note_stay(self, const Lease* lease, double now) noexcept nogil
    cdef void publish_place(self, uint32_t worker) noexcept nogil
    cdef void find_oldest(self) noexcept nogil
    cdef void join_alike(self, uint32_t worker) noexcept
    cdef void leave_alike(self, uint32_t worker) noexcept
    cdef check_alike(self)
    cdef tuple ring_sums(self, uint32_t worker)
