"""Numbers for names, in the order in which names come first. Owns that one loop; what the numbers mean is
`replaying.py`'s.

A recording has hundreds of names a request: a dictionary takes longer over them than the request takes to be placed.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, realloc

import numpy as np

cdef enum:
    ROOM_MIN = 1024

cdef uint64_t SPREAD = 0x9E3779B97F4A7C15    # 2 ** 64 over the golden ratio: spreads names that follow each other

cdef struct Name:
    uint64_t name
    int64_t number               # and 1; 0: nothing is here


cdef inline Name* place_of(Name* table, int64_t room, uint64_t name) noexcept nogil:
    """Where a name is, or is to be."""
    cdef int64_t at = <int64_t> ((name * SPREAD) >> 20) & (room - 1)
    while table[at].number and table[at].name != name:
        at = (at + 1) & (room - 1)
    return &table[at]


cdef Name* grown(Name* table, int64_t room) noexcept nogil:
    """A table of twice the room with the same names; NULL, and the old one is still there, without memory."""
    cdef Name* more = <Name*> calloc(2 * room, sizeof(Name))
    cdef Name* found
    cdef int64_t at
    if more == NULL:
        return NULL
    for at in range(room):
        if table[at].number:
            found = place_of(more, 2 * room, table[at].name)
            found[0] = table[at]
    free(table)
    return more


cdef int64_t number_all(const uint64_t* names, int64_t count, int32_t* numbers, int64_t** firsts) noexcept nogil:
    """How many different names there are; -1 without memory."""
    cdef int64_t room = ROOM_MIN, known = 0, i, space = 0
    cdef Name* table = <Name*> calloc(room, sizeof(Name))
    cdef Name* found
    cdef Name* more
    cdef int64_t* longer
    if table == NULL:
        return -1
    for i in range(count):
        found = place_of(table, room, names[i])
        if not found.number:
            if known == space:
                space = max(ROOM_MIN, 2 * space)
                longer = <int64_t*> realloc(firsts[0], space * sizeof(int64_t))
                if longer == NULL:
                    free(table)
                    return -1
                firsts[0] = longer
            firsts[0][known] = i
            known += 1
            found.name = names[i]
            found.number = known
            if 2 * known > room:
                more = grown(table, room)
                if more == NULL:
                    free(table)
                    return -1
                table = more
                room *= 2
                found = place_of(table, room, names[i])
        numbers[i] = <int32_t> (found.number - 1)
    free(table)
    return known


def numbered(const uint64_t[::1] names):
    """The numbers of names, shape [names], int32, and where each number's name comes first, shape [numbers], int64.
    Memory: 32 to 64 bytes a different name, while it runs. Raises MemoryError. O(names)."""
    cdef int64_t count = names.shape[0], known = 0, i
    cdef int64_t* firsts = NULL
    cdef int64_t[::1] into_firsts
    cdef int32_t[::1] into
    numbers = np.empty(count, np.int32)
    if not count:
        return numbers, np.empty(0, np.int64)
    into = numbers
    try:
        with nogil:
            known = number_all(&names[0], count, &into[0], &firsts)
        if known < 0:
            raise MemoryError("numbered")
        found = np.empty(known, np.int64)
        into_firsts = found
        for i in range(known):
            into_firsts[i] = firsts[i]
        return numbers, found
    finally:
        free(firsts)
