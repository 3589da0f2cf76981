# What the tree has unlinked, as inline C: kinds of retired things and how each is freed. Owns no state; the queue is
# the tree's `epochs`.
#
# Bytes stay in the budget, and items in their slab's count, until they are really freed. With no reader about, that is
# when the writer leaves (`RadixTree.leave`), so that between operations nothing is owed.

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free

from preble._core.atomic cimport pause
from preble._core.epochs cimport QUEUE_MAX, Retired, least_reader, retire
from preble._core.tree.layout cimport Tree
from preble._core.memory cimport budget_free, slab_give

cdef enum:
    MEMORY = 0                   # thing: an allocation of `amount` bytes
    NODE = 1                     # amount: its index
    MARK = 2                     # amount: its index
    PLAIN = 3                    # thing: an allocation outside the tree's budget
    RECLAIM_TRIES = 64

cdef inline void free_retired(Tree* t, const Retired* entry) noexcept nogil:
    cdef uint64_t amount = entry.what >> 2
    if entry.what & 3 == MEMORY:
        budget_free(&t.budget, entry.thing, <int64_t> amount)
    elif entry.what & 3 == NODE:
        slab_give(&t.nodes, <uint32_t> amount)
    elif entry.what & 3 == MARK:
        slab_give(&t.marks, <uint32_t> amount)
    else:
        free(entry.thing)

cdef inline void reclaim(Tree* t) noexcept nogil:
    # Free what no reader can be looking at. O(freed + reader slots ever used).
    cdef uint64_t least
    if t.epochs.count == 0:
        return
    least = least_reader(&t.epochs)
    while t.epochs.count and t.epochs.queue[t.epochs.first].stamp < least:
        free_retired(t, &t.epochs.queue[t.epochs.first])
        t.epochs.first = (t.epochs.first + 1) % <uint32_t> QUEUE_MAX
        t.epochs.count -= 1

cdef inline void reclaim_soon(Tree* t) noexcept nogil:
    # Free everything, giving the readers that are about a moment to go; it is not waited for longer than that.
    cdef uint32_t _tries
    for _tries in range(RECLAIM_TRIES):
        reclaim(t)
        if t.epochs.count == 0:
            return
        pause()

cdef inline void retire_thing(Tree* t, void* thing, uint64_t kind, uint64_t amount) noexcept nogil:
    # Where QUEUE_MAX things wait already, wait for the oldest reader, which is some microseconds from its end.
    while t.epochs.count == <uint32_t> QUEUE_MAX:
        reclaim(t)
        if t.epochs.count == <uint32_t> QUEUE_MAX:
            pause()
    retire(&t.epochs, thing, amount << 2 | kind)

cdef inline uint32_t retired_of(Tree* t, uint64_t kind) noexcept nogil:
    # Things of a kind that wait for readers to go.
    cdef uint32_t at, count = 0
    for at in range(t.epochs.count):
        count += t.epochs.queue[(t.epochs.first + at) % <uint32_t> QUEUE_MAX].what & 3 == kind
    return count

cdef inline void retire_memory(Tree* t, void* memory, int64_t size) noexcept nogil:
    if memory != NULL:
        retire_thing(t, memory, MEMORY, <uint64_t> size)
