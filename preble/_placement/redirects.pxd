# Redirects: contents of `redirects.pyx`.

from libc.stdint cimport uint32_t

from preble._core.tree.layout cimport Tree, Walk
from preble._radix cimport RadixTree

cdef enum:
    REDIRECTS_MAX = 1024
    TARGETS_MAX = 8

cdef struct Redirect:            # requests for one prefix
    uint32_t node                # that the prefix ends with; NONE: an empty place of the table
    uint32_t generation          # of the node
    uint32_t tokens              # of the prefix
    uint32_t source              # only those the rule would let this worker reuse it for; NONE: all
    uint32_t reason
    uint32_t count               # of `targets`
    uint32_t targets[TARGETS_MAX]

cdef struct RedirectTable:       # never changed once published
    uint32_t size                # places, a power of two
    uint32_t shortest            # least tokens of a redirected prefix
    Redirect redirects[1]        # `size` of them, by node

cdef extern from * nogil:
    RedirectTable* load_redirects "preble_load"(RedirectTable** p)

cdef inline uint32_t redirect_place(uint32_t node, uint32_t size) noexcept nogil:
    return (node * <uint32_t> 2654435761) >> 7 & (size - 1)

cdef const Redirect* find_redirect(const RedirectTable* table, Tree* t, Walk walk, uint32_t source) noexcept nogil

cdef class Redirects:
    cdef readonly RadixTree tree
    cdef RedirectTable* table    # (r) NULL: nothing is redirected
    cdef readonly uint32_t count
