"""How much work each hot prefix makes, and where. Owns the table of prefix groups: for a prefix on a worker, the work
assigned and the waits seen within the history window. What to do about it is `scheduling/rebalance_planner.py`'s
business.

A group is the key portion of a request that went where its prefix is cached: the deepest node of the tree that is
longer than all before it (paper section 3). A share is a group on one worker. It counts in two halves of the window, so
that its load and whether its waits have doubled are read off without a scan (paper section 4.2, autoscaling).

    half      9 (before)              10 (now)                shares live in 1024 sets of 4, by (node, worker)
              |---------- 90 s ------|----- 90 s --- ...      a set that is full gives up its least loaded share

The table is bounded; what is crowded out is counted. All calls come under the tree's writers' lock.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from preble._cost cimport Lease, LoadTracker, nanoseconds, prefill_seconds
from preble._core.tree.layout cimport Node, TokenRun, Tree, generation, is_same_node, node_at, run_end
from preble._core.tree.parts cimport find_entry, hits_estimate
from preble._core.memory cimport CHUNK_BITS, NONE
from preble._radix cimport RadixTree

from ..errors import InvalidInput

cdef uint64_t SPREAD = 0x9E3779B97F4A7C15


cdef uint32_t key_node(Tree* t, uint32_t i, uint32_t limit) noexcept nogil:
    """The node from `i` up that holds the end of the key portion of the first `limit` tokens, the deepest node
    longer than all before it; NONE if there is none. The prompt has been inserted."""
    cdef Node* node = node_at(t, i)
    cdef TokenRun* run
    while node.parent != NONE:
        run = node.run
        if min(run_end(run), limit) > 2 * <int64_t> run.start:
            return i
        i = node.parent
        node = node_at(t, i)
    return NONE


cdef uint32_t set_of(uint32_t node, uint32_t worker) noexcept nogil:
    """Which of the SETS a share belongs to."""
    return <uint32_t> ((<uint64_t> node << 20 ^ worker) * SPREAD >> 54)


cdef class Groups:
    """The prefix groups of one scheduler. Counts nothing until `start`."""

    def __init__(self, RadixTree tree not None, LoadTracker loads not None):
        self.tree = tree
        self.loads = loads

    def __dealloc__(self):
        free(self.shares)

    def start(self) -> None:
        """Count from now on. Raises MemoryError. Idempotent."""
        if self.shares == NULL:
            self.shares = <Share*> calloc(SHARES, sizeof(Share))
            if self.shares == NULL:
                raise MemoryError("Groups.start")

    # --- places ---

    cdef int64_t half_now(self) noexcept nogil:
        return <int64_t> (<uint64_t> self.loads.now_bucket // HALF_BUCKETS)

    cdef bint is_stale(self, const Share* share) noexcept nogil:
        """Whether nothing of it is within the window: no request whose booking counts."""
        cdef int64_t later = self.half_now() - share.half
        return later > 1 or (share.now.requests == 0 and (later == 1 or share.before.requests == 0))

    cdef bint is_live(self, uint32_t node, uint32_t node_generation) noexcept nogil:
        """Whether a node is still the one that was meant."""
        return (node >> 10) < self.tree.t.nodes.chunk_count and is_same_node(&self.tree.t, node, node_generation)

    cdef int64_t weight(self, const Share* share) noexcept nogil:
        """What would be lost with a share: its tokens of prefill, in time, and one for being there; 0 if nothing."""
        if share.opened == 0 or self.is_stale(share) or not self.is_live(share.node, share.generation):
            return 0
        return 1 + max(share.now.prefill_ns + share.before.prefill_ns, 0)

    cdef uint32_t place_for(self, const Lease* lease, uint32_t node, uint32_t node_generation) noexcept nogil:
        """The place of the share of a node on the lease's worker, opened if need be."""
        cdef uint32_t first = set_of(node, lease.worker) * WAYS, at, place = first
        cdef int64_t least = -1, weight
        cdef Share* share
        for at in range(first, first + WAYS):
            share = &self.shares[at]
            if (share.node == node and share.worker == lease.worker and share.generation == node_generation
                    and share.worker_generation == lease.worker_generation and share.opened):
                return at
        for at in range(first, first + WAYS):
            weight = self.weight(&self.shares[at])
            if least < 0 or weight < least:
                least = weight
                place = at
        self.crowded_out += least > 0
        share = &self.shares[place]
        memset(share, 0, sizeof(Share))
        share.node = node
        share.generation = node_generation
        share.worker = lease.worker
        share.worker_generation = lease.worker_generation
        share.opened = lease.serial
        share.since = lease.bucket
        share.half = self.half_now()
        return place

    cdef void roll(self, Share* share) noexcept nogil:
        """Bring a share to the half that is now."""
        cdef int64_t later = self.half_now() - share.half
        if later <= 0:
            return
        if later == 1:
            share.before = share.now
        else:
            memset(&share.before, 0, sizeof(Half))
        memset(&share.now, 0, sizeof(Half))
        share.half += later

    cdef Share* share_of(self, const Lease* lease) noexcept nogil:
        """The share a lease was counted in; NULL if it was in none, or that has made room for another since."""
        cdef Share* share
        if lease.share == 0 or self.shares == NULL or lease.share > SHARES:
            return NULL
        share = &self.shares[lease.share - 1]
        return share if share.opened and lease.serial >= share.opened else NULL

    cdef Half* half_of(self, const Lease* lease) noexcept nogil:
        """The half a lease was counted in; NULL if it is not within the window."""
        cdef Share* share = self.share_of(lease)
        cdef int64_t half = <int64_t> (<uint64_t> lease.bucket // HALF_BUCKETS)
        if share == NULL or half < share.half - 1:
            return NULL
        return &share.now if half == share.half else &share.before

    # --- what happens to a request ---

    cdef void booked(self, Lease* lease, uint32_t leaf, uint32_t usable) noexcept nogil:
        """A request was booked on a worker that has `usable` tokens of it; its prompt ends at `leaf`."""
        cdef Tree* t = &self.tree.t
        cdef uint32_t node
        cdef Share* share
        if self.shares == NULL:
            return
        node = key_node(t, leaf, usable)
        if node == NONE:
            return
        lease.share = 1 + self.place_for(lease, node, generation(node_at(t, node)))
        share = &self.shares[lease.share - 1]
        self.roll(share)
        share.now.requests += 1                  # it was booked just now
        share.now.prefill_ns += lease.prefill_ns
        share.now.output_tokens += lease.expected_output

    cdef void first_token(self, const Lease* lease, double now) noexcept nogil:
        """Its first token came: whatever was not its own prefill, it waited. Counts if its booking still does."""
        cdef Share* share = self.share_of(lease)
        cdef double seconds = now - lease.booked_at - lease.prefill_ns * 1e-9
        if share == NULL:
            return
        self.roll(share)
        if lease.bucket < (share.half - 1) * HALF_BUCKETS:
            return
        share.now.first_tokens += 1
        share.now.queue_ns += <int64_t> (min(max(seconds, 0.0), 1e6) * 1e9)

    cdef void corrected(self, const Lease* lease, int64_t prefill_ns, int64_t output_tokens) noexcept nogil:
        """The request was so much more work than expected."""
        cdef Half* half = self.half_of(lease)
        if half != NULL:
            half.prefill_ns += prefill_ns
            half.output_tokens += output_tokens

    cdef void taken_back(self, const Lease* lease) noexcept nogil:
        """The booking is given back; a prefill that was done stays work done."""
        cdef Half* half = self.half_of(lease)
        if half != NULL:
            half.requests -= 1
            half.prefill_ns -= 0 if lease.prefilled else lease.prefill_ns
            half.output_tokens -= lease.expected_output

    cdef void count_live(self, uint32_t worker, int64_t sign) noexcept nogil:
        """Add the prefill of a worker's live bookings to their shares, or (-1) take it out. O(leases)."""
        cdef uint32_t index
        cdef Lease* lease
        cdef Half* half
        for index in range(self.loads.leases.chunk_count << CHUNK_BITS if self.shares != NULL else 0):
            lease = self.loads.lease_at(index)
            if self.loads.is_of(lease, worker):
                half = self.half_of(lease)
                if half != NULL:
                    half.prefill_ns += sign * lease.prefill_ns

    cdef void reprice(self, uint32_t worker, double factor) noexcept nogil:
        """The prefill of a worker's ended requests takes `factor` times as long as was booked. The caller has taken
        live bookings out and adds them again, so that a share never holds less than them. O(SHARES)."""
        cdef uint32_t at
        cdef Share* share
        for at in range(SHARES if self.shares != NULL else 0):
            share = &self.shares[at]
            if (share.opened and share.worker == worker
                    and share.worker_generation == self.loads.workers[worker].generation):
                share.now.prefill_ns = nanoseconds(share.now.prefill_ns * 1e-9 * factor)
                share.before.prefill_ns = nanoseconds(share.before.prefill_ns * 1e-9 * factor)

    # --- questions ---

    cdef double seconds_of(self, const Share* share, const Half* half) noexcept nogil:
        """Seconds of the worker's time."""
        return half.prefill_ns * 1e-9 + half.output_tokens * self.loads.workers[share.worker].output_token_seconds

    cdef double observed_seconds(self, const Share* share, double now) noexcept nogil:
        """Over how many seconds a share's recent work came: half a window, or less for a younger one."""
        cdef double age = now - share.since * self.loads.bucket_seconds
        return max(self.loads.join_seconds, min(age, self.loads.window_seconds / 2))

    def rows(self, uint32_t start, uint32_t count, double now, double least_load) -> list[tuple]:
        """Shares at places from `start` on that take `least_load` of their worker or more, as tuples of

        (node, generation, worker, prefix tokens, requests, load, window seconds, wait before, wait now): `load` is the
        share of the worker's time over the last half window, `window seconds` its work within two halves; waits are
        means in seconds, -1.0 where no first token came. Shares of nodes or workers that have gone are emptied.
        """
        cdef uint32_t at, end
        cdef Share* share
        cdef double part, load, window
        found = []
        if self.shares == NULL or self.loads.now_bucket < 0:
            return found
        part = (now / self.loads.bucket_seconds) / HALF_BUCKETS - self.half_now()
        part = min(max(part, 0.0), 1.0)
        for at in range(start, min(start + count, <uint32_t> SHARES)):
            share = &self.shares[at]
            if share.opened == 0:
                continue
            if self.is_stale(share) or not self.is_live(share.node, share.generation) or not self.is_on_worker(at):
                share.opened = 0
                continue
            self.roll(share)
            window = self.seconds_of(share, &share.now) + self.seconds_of(share, &share.before)
            load = self.seconds_of(share, &share.now) + self.seconds_of(share, &share.before) * (1.0 - part)
            load /= self.observed_seconds(share, now)
            if load >= least_load:
                end = run_end(node_at(&self.tree.t, share.node).run)
                found.append((share.node, share.generation, share.worker, end,
                              share.now.requests + share.before.requests, load, window, mean_wait(&share.before),
                              mean_wait(&share.now)))
        return found

    def is_on_worker(self, uint32_t at) -> bool:
        """Whether the worker of a share is still the one it was."""
        cdef Share* share = &self.shares[at]
        return (share.worker < self.loads.end
                and self.loads.workers[share.worker].generation == share.worker_generation)

    def workers(self, double now) -> list[tuple]:
        """Of each worker (index, eligible, L in seconds scaled as decisions do, seconds of prefill that wait)."""
        cdef double longest = self.loads.longest_observed(now)
        cdef uint32_t i
        return [(i, self.loads.rows[i].eligible != 0, self.loads.rows[i].load_seconds * self.loads.scale(i, now,
                                                                                                         longest),
                 self.loads.workers[i].waiting_prefill_ns * 1e-9)
                for i in range(self.loads.end) if self.loads.workers[i].used]

    def lives(self, uint32_t node, uint32_t node_generation) -> bool:
        """Whether a prefix is still the one that was meant."""
        return bool(self.is_live(node, node_generation))

    def held(self, uint32_t node, uint32_t worker) -> int:
        """Tokens of the prefix that ends with a live node that a worker is estimated to cache. O(depth)."""
        cdef Tree* t = &self.tree.t
        cdef uint32_t i = node, end, key = t.workers[worker].key
        while i != NONE and node_at(t, i).parent != NONE:
            end = find_entry(node_at(t, i), key).end
            if end:
                return end
            i = node_at(t, i).parent
        return 0

    def recompute_seconds(self, uint32_t node, uint32_t worker) -> float:
        """Seconds a worker would take to prefill what it lacks of the prefix that ends with a live node."""
        cdef uint32_t end = run_end(node_at(&self.tree.t, node).run)
        return prefill_seconds(self.loads.rows[worker].cost, end - <uint32_t> self.held(node, worker), end)

    def children(self, uint32_t node, double now, uint32_t looked_max) -> list[tuple]:
        """(node, generation, prefix tokens, requests within the window) of the children of a live node that had more
        than one, looking at `looked_max` children at most."""
        cdef Tree* t = &self.tree.t
        cdef uint32_t i = node_at(t, node).first_child, looked = 0
        cdef double hits
        found = []
        while i != NONE and looked < looked_max:
            hits = hits_estimate(node_at(t, i).hits, now, t.window_seconds)
            if hits > 1.0:
                found.append((i, generation(node_at(t, i)), run_end(node_at(t, i).run), hits))
            i = node_at(t, i).next_sibling
            looked += 1
        return found

    def prefix(self, uint32_t node) -> tuple:
        """(namespace, token ids) of the prefix that ends with a live node."""
        return self.tree.path_to(node, NONE)

    def namespace(self, uint32_t node) -> object:
        """The namespace of a live node."""
        return self.tree.path_to(node, 0)[0]

    @property
    def live(self) -> int:
        """Shares open now. O(SHARES)."""
        cdef uint32_t at
        return 0 if self.shares == NULL else sum(self.shares[at].opened != 0 for at in range(SHARES))

    def show(self) -> list[dict]:
        """All shares as they stand, for tests and doubt."""
        cdef uint32_t at
        if self.shares == NULL:
            return []
        return [{"node": self.shares[at].node, "generation": self.shares[at].generation,
                 "worker": self.shares[at].worker, "half": self.shares[at].half, "since": self.shares[at].since,
                 "now": half_tuple(&self.shares[at].now), "before": half_tuple(&self.shares[at].before)}
                for at in range(SHARES) if self.shares[at].opened]

    def shares_kept(self) -> list[tuple]:
        """All open shares, for a snapshot: (place, node, generation, worker, worker's generation, opened, since, half,
        the five numbers of each half)."""
        cdef uint32_t at
        cdef Share* share
        found = []
        for at in range(SHARES if self.shares != NULL else 0):
            share = &self.shares[at]
            if share.opened:
                found.append((at, share.node, share.generation, share.worker, share.worker_generation, share.opened,
                              share.since, share.half, *half_tuple(&share.now), *half_tuple(&share.before)))
        return found

    def keep_shares(self, list rows, int64_t crowded_out) -> None:
        """Let these be the open shares, as `shares_kept` gave them. Raises InvalidInput for a place that there is not
        or numbers that cannot be, TypeError, ValueError and OverflowError for what are none."""
        cdef Share* share
        cdef uint32_t at
        self.start()
        for row in rows:
            if len(row) != 18 or not all(type(number) is int and 0 <= number < 1 << 62 for number in row):
                raise InvalidInput("a prefix group's numbers")
            at = row[0]
            if at >= <uint32_t> SHARES or set_of(row[1], row[3]) != at // WAYS:
                raise InvalidInput("a prefix group's place")
            share = &self.shares[at]
            share.node, share.generation, share.worker, share.worker_generation = row[1:5]
            share.opened, share.since, share.half = row[5:8]
            half_from(&share.now, row[8:13])
            half_from(&share.before, row[13:18])
        self.crowded_out = crowded_out

    def check(self) -> None:
        """Assert that each share is where it is looked for, once, and that none has taken back more than it had."""
        cdef uint32_t at
        cdef Share* share
        seen = set()
        if self.shares == NULL:
            return
        for at in range(SHARES):
            share = &self.shares[at]
            if share.opened == 0:
                continue
            key = (share.node, share.generation, share.worker, share.worker_generation)
            assert set_of(share.node, share.worker) == at // WAYS, f"share {at} is in the wrong set"
            assert key not in seen, f"two shares of {key}"
            assert share.half <= self.half_now() and share.since <= self.loads.now_bucket, f"share {at} is of later"
            assert min(half_tuple(&share.now)) >= 0 and min(half_tuple(&share.before)) >= 0, f"share {at} below zero"
            seen.add(key)


cdef double mean_wait(const Half* half) noexcept nogil:
    return half.queue_ns * 1e-9 / half.first_tokens if half.first_tokens else -1.0


cdef int half_from(Half* half, tuple numbers) except -1:
    half.requests, half.prefill_ns, half.output_tokens, half.first_tokens, half.queue_ns = numbers
    return 0


cdef tuple half_tuple(const Half* half):
    return (half.requests, half.prefill_ns, half.output_tokens, half.first_tokens, half.queue_ns)
