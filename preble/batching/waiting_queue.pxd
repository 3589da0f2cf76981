# The waiting queue of one worker: contents of `waiting_queue.pyx`.

from libc.stdint cimport int64_t

from preble.batching._batch cimport LiveRequest
from preble.batching.kv_cache cimport KvCache

cdef class TenantLine:           # the newcomers of one tenant and class, without deferred ones
    cdef str tenant
    cdef bint is_batch
    cdef list arrivals           # numbers in order
    cdef list groups             # lists of (rank, number), sorted

cdef class WaitingQueue:
    cdef public int64_t overdue_picks, cache_looks
    cdef readonly int64_t uncached_tokens    # sum over all that wait
    cdef object view             # what is asked of a cache that is none of ours
    cdef KvCache cache           # else None
    cdef int64_t priority_groups
    cdef bint by_priority, by_length
    cdef double max_wait_seconds
    cdef int64_t rebin_per_round, looks_left
    cdef dict live               # number -> every waiting request
    cdef object preempted        # a deque
    cdef list arrivals           # numbers of newcomers in order, without deferred ones and those put last
    cdef dict last               # newcomers that were put last, by number, the longest so first
    cdef TenantLine nobody       # of requests that name no tenant
    cdef dict lines              # (is_batch, tenant) -> its line; others than nobody's only while they have requests
    cdef tuple unshared
    cdef tuple open              # whose requests may be next; empty where that is to be found anew
    cdef dict shares
    cdef double latest_arrival
    cdef list credits
    cdef bint has_credit         # some group has
    cdef list deferred
    cdef bint picked_by_turn
    cdef int64_t turns           # picks by turn since one for age
    cdef int64_t round_version   # the cache's version as the round began
    cdef int64_t sweep_left, sweep_next      # and the number at which it goes on
    # for the scheduler
    cdef int begin(self) except -1
    cdef LiveRequest next_at(self, double now)
    cdef int take_it(self, LiveRequest found) except -1
    cdef int put_off(self, LiveRequest found) except -1
    cdef int end(self) except -1
    # helpers
    cdef int64_t version(self) except? -1
    cdef int enter(self, LiveRequest found) except -1
    cdef int leave(self, LiveRequest found) except -1
    cdef int charge_prompt(self, LiveRequest found) except -1
    cdef bint is_shared(self) noexcept
    cdef TenantLine line_of(self, LiveRequest found)
    cdef int open_line(self, TenantLine line) except -1
    cdef int close_line(self, TenantLine line) except -1
    cdef tuple open_lines(self)
    cdef list near(self, bint is_batch)
    cdef LiveRequest oldest_overdue(self, double now)
    cdef int64_t next_group(self) except -1
    cdef bint is_urgent(self, int64_t group) noexcept
    cdef bint is_filled(self, tuple lines, int64_t group) noexcept
    cdef int charge(self, int64_t picked) except -1
    cdef LiveRequest head_by_turn(self)
    cdef int rebin(self, LiveRequest found) except -1
    cdef int move(self, LiveRequest found, int64_t group, double rank) except -1
    cdef int place(self, LiveRequest found, double rank) except -1
    cdef int file(self, LiveRequest found) except -1
    cdef int withdraw(self, LiveRequest found) except -1
    cdef int put_into_group(self, LiveRequest found) except -1
    cdef int drop_from_group(self, LiveRequest found) except -1
    cdef int look(self, LiveRequest found) except -1
    cdef int check_line(self, TenantLine line) except -1
