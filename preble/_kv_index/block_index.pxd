# The blocks of one worker as Python sees them: contents of `block_index.pyx`.

from libc.stdint cimport uint32_t, uint64_t

from preble._kv_index.block_layout cimport Blocks, Place
from preble._kv_index.event_batch cimport EventBatch
from preble._radix cimport RadixTree
from preble._kv_index.cache_accuracy cimport CacheAccuracy

cdef class BlockIndex:
    cdef Blocks b
    cdef RadixTree tree
    cdef CacheAccuracy accuracy  # is given the events that come; None: unused
    cdef dict rows               # (key of the namespace in the tree, digests) -> row in `spaces`
    cdef list names              # the same by row, None where free
    cdef list free_rows
    cdef list let_go             # names of rows given up by this call, kept until it is done: letting go may run code
    cdef bint closed
    cdef uint64_t calls
    cdef dict known_namespaces   # see EventBatch.resolve
    cdef object namespace_of     # the callable whose answers those are
    cdef readonly uint32_t taken  # events of the last call
    cdef list space_keys(self, EventBatch batch, object namespace)
    cdef uint32_t row_of(self, object space, uint64_t lora, uint64_t salted, uint64_t extra) except? 0xFFFFFFFE
    cdef uint32_t free_row(self) except? 0xFFFFFFFE
    cdef int release_room(self) except -1
    cdef int place_events(self, EventBatch batch, list keys) except -1
    cdef uint32_t run_batch(self, EventBatch batch, object namespace, double now) except? 0xFFFFFFFE
    cdef tuple beyond(self, const Place* place, uint32_t start, uint32_t tokens_max)
    cdef bint evicted(self, object event) except -1
    cdef check_bytes(self, int segments, int entries)
    cdef uint32_t index_of(self, object block_hash) except? 0xFFFFFFFE
