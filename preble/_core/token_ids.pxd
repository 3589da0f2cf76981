# Token ids from Python objects: borrow an int32 buffer, convert anything else once.

from cpython.buffer cimport Py_buffer
from libc.stdint cimport int32_t, uint32_t

cdef struct TokenView:
    const int32_t* data
    uint32_t count
    bint checked                 # every id is known to be in [0, 2**31 - 1]
    bint borrowed                # `buffer` must be released
    int32_t* owned               # converted copy, or NULL
    Py_buffer buffer

cdef int view_tokens(object token_ids, TokenView* view, bint allow_empty=*) except -1
cdef int check_tokens(TokenView* view, uint32_t first) except -1
cdef bint any_negative(const int32_t* ids, uint32_t count) noexcept nogil
cdef bint has_negative(const TokenView* view, uint32_t first) noexcept nogil
cdef void release_tokens(TokenView* view) noexcept
