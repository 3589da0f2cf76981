# What requests have saved up for copies of a prefix, as inline C. Owns the table and how its rows age; `e2.pyx` says
# what is saved and what it pays for, `bookings.pyx` books it.
#
# Who stays with a prefix though the request would be served sooner elsewhere, were the prefix there, does not gain by
# copying it: only those that come later would. So each leaves the difference here, and whoever comes when that pays for
# a copy makes it: rent until the rent is the price, then buy.
#
#     node 7  0.31 s at 12.4      one row for each node & (CREDITS - 1); a row that is taken goes to whoever has saved
#     (none)                      more, so that prefixes seen once do not drive out the hot ones
#     node 2  1.02 s at 13.0
#
# Readers beside the writer may see a row half written: an explanation may be off by one request.

from libc.math cimport exp
from libc.stdint cimport uint32_t

from preble._core.atomic cimport load32, load_double, store32, store_double
from preble._core.tree.layout cimport Tree, Walk, generation, load_run, node_at, run_end
from preble._core.memory cimport NONE

cdef enum:
    CREDITS = 1024               # rows; a power of two
    AGE_SECONDS = 60             # in which what was saved shrinks to 1 / e

cdef struct Credit:
    uint32_t node
    uint32_t generation          # of the node; 0: nobody has the row, since those of live nodes are odd
    double seconds               # saved up
    double at                    # when that was

cdef inline double aged(const Credit* row, double now) noexcept nogil:
    # What is left of it.
    cdef double seconds = load_double(&row.seconds)
    return seconds * exp(-max(now - load_double(&row.at), 0.0) / AGE_SECONDS) if seconds > 0.0 else 0.0

cdef inline uint32_t credited_node(Tree* t, Walk walk, uint32_t held) noexcept nogil:
    # The highest node on the walk that ends at `held` tokens or after them.
    cdef uint32_t i = walk.node, above = load32(&node_at(t, i).parent)
    while above != NONE and run_end(load_run(&node_at(t, above).run)) >= held:
        i = above
        above = load32(&node_at(t, i).parent)
    return i

cdef inline double saved(const Credit* rows, Tree* t, uint32_t node, double now) noexcept nogil:
    # Seconds saved up for copies of a node.
    cdef const Credit* row = &rows[node & (CREDITS - 1)]
    if load32(&row.node) != node or load32(&row.generation) != generation(node_at(t, node)):
        return 0.0
    return aged(row, now)

cdef inline void save(Credit* rows, Tree* t, uint32_t node, double seconds, double now) noexcept nogil:
    # Note what is saved up for a node now.
    cdef Credit* row = &rows[node & (CREDITS - 1)]
    cdef uint32_t number = generation(node_at(t, node))
    if (row.node != node or row.generation != number) and aged(row, now) >= seconds:
        return
    store32(&row.node, node)
    store32(&row.generation, number)
    store_double(&row.seconds, seconds)
    store_double(&row.at, now)
