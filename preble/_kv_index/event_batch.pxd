# A batch of cache events as Python sees it: contents of `event_batch.pyx`.

from cpython.buffer cimport Py_buffer
from libc.stdint cimport int64_t

from preble._kv_index.decode cimport Batch, Event, Key

cdef class EventBatch:
    cdef readonly int64_t keyed_blocks
    cdef Batch batch
    cdef Py_buffer buffer
    cdef bint borrowed
    cdef list namespaces         # what its events name, by Event.namespace
    cdef list kept               # what its slices point into
    cdef int failed(self) except -1
    cdef int resolve(self, object namespace, object namespace_of, dict known) except -1
    cdef object names_of(self, Event* event, bint or_bytes)
    cdef object as_object(self, Event* event, object namespace, object namespace_of)
    cdef object namespace_for(self, Event* event, object namespace, object namespace_of, bint or_bytes)
    cdef object medium_of(self, Event* event)
    cdef int add_stored(self, object event) except -1
    cdef int add_tokens(self, object token_ids, Event* event) except -1
    cdef int add_keys(self, object block_hashes, Event* event) except -1
    cdef int add_medium(self, object medium, Event* event) except -1

cdef int check_hashable(str name, object namespace) except -1
cdef int key_of(object block_hash, str name, Key* key) except -1
