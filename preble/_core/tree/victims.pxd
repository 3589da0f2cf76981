# What a worker would evict next, kept from one decision to the next. Owns the layout of that list and what a change of
# the tree does to it; `_placement/e2.pyx` fills it, since a victim's seconds are a matter of cost.
#
#     recency list, oldest first      m3 - m9 - m1 - m7 - m4 - ...
#     victims                        [m3   m9   m1]                 the same marks in the same order, as far as it goes
#
# Marks in it carry LISTED. So a decision over many idle workers reads a few numbers of each that lie side by side, in
# place of following links from mark to node to run. A mark that leaves the recency list, or becomes its newest, leaves
# this one; a mark that changes otherwise cuts the list short before itself.

from libc.stdint cimport uint32_t
from libc.string cimport memmove

from preble._core.tree.layout cimport LISTED, VICTIMS_MAX, Tree, Victim, Victims, WorkerMarks, mark_at, state_of
from preble._core.memory cimport budget_alloc, charged

cdef inline uint32_t victim_place(Victims* v, uint32_t mark) noexcept nogil:
    cdef uint32_t at = v.first
    while v.known[at].mark != mark:
        at += 1
    return at

cdef inline void victims_gone(Tree* t, uint32_t worker, uint32_t mark) noexcept nogil:
    # A listed mark leaves its place in the recency list.
    cdef Victims* v = state_of(t, worker).victims
    cdef uint32_t at = victim_place(v, mark)
    mark_at(t, mark).flags &= ~<uint32_t> LISTED
    if at > v.first:
        memmove(&v.known[at], &v.known[at + 1], (v.first + v.count - at - 1) * sizeof(Victim))
    else:
        v.first += 1
    v.count -= 1

cdef inline void victims_cut(Tree* t, uint32_t worker, uint32_t mark) noexcept nogil:
    # A listed mark changes: it and all newer ones must be looked at again.
    cdef Victims* v = state_of(t, worker).victims
    cdef uint32_t at = victim_place(v, mark), i
    for i in range(at, v.first + v.count):
        mark_at(t, v.known[i].mark).flags &= ~<uint32_t> LISTED
    v.count = at - v.first

cdef inline Victims* victims_of(Tree* t, uint32_t worker) noexcept nogil:
    # The worker's list, made when it is first asked for; NULL if there is no memory for it, then one does without.
    cdef WorkerMarks* marks = state_of(t, worker)
    if marks.victims == NULL and t.budget.used + charged(sizeof(Victims)) <= t.budget.limit:
        marks.victims = <Victims*> budget_alloc(&t.budget, sizeof(Victims))
        if marks.victims != NULL:
            marks.victims.first = marks.victims.count = 0
    return marks.victims

cdef inline Victim* victims_append(Tree* t, uint32_t worker, uint32_t mark) noexcept nogil:
    # A place for the next mark of the recency list; NULL when the list is full.
    cdef Victims* v = state_of(t, worker).victims
    if v.count == <uint32_t> VICTIMS_MAX:
        return NULL
    if v.first + v.count == <uint32_t> VICTIMS_MAX:
        memmove(&v.known[0], &v.known[v.first], v.count * sizeof(Victim))
        v.first = 0
    mark_at(t, mark).flags |= LISTED
    v.count += 1
    v.known[v.first + v.count - 1].mark = mark
    return &v.known[v.first + v.count - 1]
