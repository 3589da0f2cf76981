# The tree with a KV slot per token: contents of `_kv_slots.pyx`.

from cpython.array cimport array as c_array
from libc.stdint cimport int32_t, int64_t, uint32_t

from preble._core.tree.layout cimport Walk
from preble._radix cimport RadixTree

cdef class SlotTree(RadixTree):
    cdef int need_hold(self, Hold hold) except -1
    cdef uint32_t root_above(self, uint32_t i) noexcept
    cdef int hold_walk(self, Hold hold, Walk walk) except -1
    cdef void unpin(self, uint32_t i) noexcept nogil
    cdef void pin(self, uint32_t i, uint32_t above) noexcept nogil
    cdef c_array grow(self, Hold hold, const int32_t* tokens, const int32_t* slots, uint32_t count)
    cdef bint may_append(self, uint32_t i) noexcept
    cdef int append_run(self, Hold hold, const int32_t* tokens, const int32_t* slots, uint32_t count) except -1
    cdef int branch(self, Hold hold, Walk walk, const int32_t* tokens, const int32_t* slots, uint32_t count) except -1
    cdef c_array cut(self, uint32_t i, list reports)
    # for compiled callers: ids and slots that were checked before
    cdef bint walk_ids(self, const int32_t* ids, uint32_t count, object namespace, Walk* walk) except -1
    cdef uint32_t matched_ids(self, const int32_t* ids, uint32_t count, object namespace) except? 0xFFFFFFFF
    cdef int64_t end_of_ids(self, const int32_t* ids, uint32_t count, object namespace) except? -2
    cdef Hold hold_ids(self, const int32_t* ids, uint32_t count, object namespace)
    cdef int copy_slots(self, Hold hold, int32_t* into) except -1
    cdef c_array extend_ids(self, Hold hold, const int32_t* ids, const int32_t* slots, uint32_t count)
    cdef int let_go(self, Hold hold) except -1

cdef class Hold:
    cdef SlotTree tree
    cdef uint32_t node           # where the held prefix ends; pinned, so neither freed nor reused
    cdef readonly uint32_t matched_tokens
    cdef readonly bint released
