# The KV cache of one worker: contents of `kv_cache.pyx`.

from libc.stdint cimport int32_t, int64_t

from preble.batching._batch cimport LiveRequest
from preble.batching._kv_slots cimport Hold, SlotTree
from preble.batching.retention cimport Retention

cdef class SlotPool:
    cdef object stack            # int32 array; the first `free_count` are free
    cdef int32_t* data           # of it
    cdef int64_t capacity
    cdef readonly int64_t free_count
    cdef int32_t* taken(self, int64_t count) except NULL
    cdef int given(self, const int32_t* slots, int64_t count) except -1

cdef class KvCache:
    cdef readonly int64_t capacity_tokens
    cdef readonly int64_t version            # +1 at each change of what is cached
    cdef readonly int64_t evicted_tokens, evictions, collapsed_events
    cdef readonly Retention _retention         # None: what was used least recently goes first
    cdef object host             # where what is evicted goes, a HostMemory; None: it is gone
    cdef SlotTree tree
    cdef SlotPool pool
    cdef list events
    cdef int64_t event_tokens, events_max, event_tokens_max
    # reads
    cdef int64_t available(self) noexcept
    cdef int64_t matched_of(self, LiveRequest live) except -1
    # changes
    cdef Hold hold_of(self, LiveRequest live, int64_t max_tokens, double now)
    cdef int load(self, object token_ids, object namespace, int64_t max_tokens, double now) except -1
    cdef Hold published(self, LiveRequest live)
    cdef int let_go(self, Hold hold) except -1
    cdef int32_t* slots_for(self, int64_t count, double now) except NULL
    cdef int make_room(self, int64_t count, double now) except -1
    cdef int give_back(self, const int32_t* slots, int64_t count) except -1
    # whose prefix it is
    cdef int64_t asked(self, LiveRequest live, double now) except? -2
    cdef int admitted(self, int64_t end) except -1
    cdef int ended(self, Hold hold, object ending, int64_t end, double now) except -1
    # evictions
    cdef int evict(self, int64_t need_tokens, double now) except -1
    cdef int book_eviction(self, object freed, list reports, double now) except -1
    cdef int report_lost(self) except -1
    cdef int report(self, object event) except -1
