# The Python face of the tree, for other compiled modules that hold one.

from libc.stdint cimport uint32_t

from preble._layout cimport Tree, Walk

cdef double finite(object now) except? -1.0

cdef class RadixTree:
    cdef Tree t
    cdef dict _roots             # namespace -> root index
    cdef dict _names             # root index -> namespace
    cdef object _root_queue      # roots in the order they are looked at for removal
    cdef object __weakref__
    cdef uint32_t root_of(self, object namespace, bint create) except? 0xFFFFFFFE
    cdef int forget_empty_roots(self) except -1
    cdef int need_worker(self, uint32_t worker) except -1
    cdef int need_beliefs(self) except -1
    cdef bint walk_python(self, object token_ids, object namespace, Walk* walk) except -1
