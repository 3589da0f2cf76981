# Bytes of a snapshot, written and read: contents of `codec.pyx`.

from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from preble._core.memory cimport Budget, Slab

cdef class Writer:
    cdef PyObject* whole         # the bytes object that grows; nobody else has it before `finish`
    cdef Py_ssize_t room
    cdef Py_ssize_t size
    cdef char* reserve(self, int64_t more) except NULL
    cdef int put(self, const void* data, int64_t size) except -1
    cdef int number(self, uint64_t value) except -1

cdef class Reader:
    cdef bytes data
    cdef const char* at
    cdef const char* end
    cdef int64_t left(self) noexcept
    cdef const char* take(self, int64_t size) except NULL
    cdef int copy(self, void* into, int64_t size) except -1
    cdef uint64_t number(self) except? 0xFFFFFFFFFFFFFFFE

cdef const char* NO_MEMORY     # a reason that is not the snapshot's fault

cdef int refuse(const char* reason) except -1
cdef void* allocated(void* memory) except NULL
cdef int load_slab(Reader r, Slab* slab, Budget* budget, uint32_t chunks) except -1
cdef int load_items(Reader r, Slab* slab, Budget* budget, uint32_t chunks) except -1
cdef int save_slab(Writer w, Slab* slab) except -1
cdef bint chain_free(Slab* slab, const uint32_t* order, uint32_t count, uint8_t* taken) noexcept nogil
