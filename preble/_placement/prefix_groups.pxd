# Prefix groups: contents of `prefix_groups.pyx`.

from libc.stdint cimport int64_t, uint32_t

from preble._cost cimport Lease, LoadTracker
from preble._core.tree.layout cimport Tree
from preble._radix cimport RadixTree

cdef enum:
    WAYS = 4                     # places a share may have
    SETS = 1024
    SHARES = 4096                # WAYS * SETS
    HALF_BUCKETS = 18            # slices of the load window in half of it

cdef struct Half:                # what came in one half of the window
    int64_t requests
    int64_t prefill_ns
    int64_t output_tokens        # expected when booked, corrected at the end
    int64_t first_tokens
    int64_t queue_ns             # their waits before the prefill began

cdef struct Share:               # one prefix on one worker
    uint32_t node
    uint32_t generation          # of the node
    uint32_t worker
    uint32_t worker_generation
    int64_t opened               # serial of the request that it was opened for; 0: empty
    int64_t since                # slice of the window that was in
    int64_t half                 # number of the half that `now` is
    Half now
    Half before

cdef uint32_t key_node(Tree* t, uint32_t i, uint32_t limit) noexcept nogil

cdef class Groups:
    cdef readonly RadixTree tree
    cdef readonly LoadTracker loads
    cdef Share* shares           # NULL: nothing is counted
    cdef readonly int64_t crowded_out
    cdef int64_t half_now(self) noexcept nogil
    cdef bint is_stale(self, const Share* share) noexcept nogil
    cdef int64_t weight(self, const Share* share) noexcept nogil
    cdef uint32_t place_for(self, const Lease* lease, uint32_t node, uint32_t node_generation) noexcept nogil
    cdef void roll(self, Share* share) noexcept nogil
    cdef Share* share_of(self, const Lease* lease) noexcept nogil
    cdef Half* half_of(self, const Lease* lease) noexcept nogil
    cdef void booked(self, Lease* lease, uint32_t leaf, uint32_t usable) noexcept nogil
    cdef void first_token(self, const Lease* lease, double now) noexcept nogil
    cdef void corrected(self, const Lease* lease, int64_t prefill_ns, int64_t output_tokens) noexcept nogil
    cdef void taken_back(self, const Lease* lease) noexcept nogil
    cdef void count_live(self, uint32_t worker, int64_t sign) noexcept nogil
    cdef void reprice(self, uint32_t worker, double factor) noexcept nogil
    cdef bint is_live(self, uint32_t node, uint32_t node_generation) noexcept nogil
    cdef double seconds_of(self, const Share* share, const Half* half) noexcept nogil
    cdef double observed_seconds(self, const Share* share, double now) noexcept nogil
