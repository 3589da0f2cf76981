# The child table as inline C: (parent, first token) -> child, one open-addressed hash table for the whole tree. Owns no
# state; each function takes the Tree.
#
# A slot is one word, so readers see whole slots. Growing moves the children to a new table a few at a time, with each
# child added, so that no single decision pays for all:
#
#     table      [ . a . . b . . . ]    looked at first; every new child goes here
#     draining   [ a b c d ]            looked at next; a and b have moved (their copies here stay until it is dropped)
#                      ^ drained
#
# Whatever changes a child's slot changes it in both. A reader that meets neither table's child has seen a moment when
# it was in neither. A table is full when three quarters are used or deleted.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc

from preble._core.atomic cimport load32, load64, store64
from preble._core.tree.layout cimport (ChildTable, Node, TokenRun, Tree, load_run, load_table, node_at, run_end,
                                       store_table)
from preble._core.memory cimport NONE, Budget, charged, fails_now
from preble._core.tree.reclaim cimport retire_memory

cdef enum:
    EMPTY_SLOT = 0
    DELETED_SLOT = 1             # tag 0, child 1
    DRAIN_STEP = 16              # slots moved with each child added
    TABLE_START = 1024           # slots of an empty tree

cdef inline uint32_t child_hash(uint32_t parent, int32_t token) noexcept nogil:
    cdef uint64_t h = ((<uint64_t> parent << 32) | <uint32_t> token) * <uint64_t> 0x9E3779B97F4A7C15
    return <uint32_t> ((h ^ (h >> 29)) * <uint64_t> 0xBF58476D1CE4E5B9 >> 32)

cdef inline uint64_t tagged(uint32_t hashed, uint32_t child) noexcept nogil:
    # Tag 0 is left to the reserved slots.
    return <uint64_t> (hashed if hashed else 1) << 32 | child

cdef inline int64_t table_bytes(uint32_t size) noexcept nogil:
    return sizeof(ChildTable) + <int64_t> (size - 1) * sizeof(uint64_t)

cdef inline ChildTable* new_table(Budget* budget, uint32_t size) noexcept nogil:
    # calloc leaves a large table untouched, so that its pages are paid for as they fill.
    cdef ChildTable* table = NULL if fails_now(budget) else <ChildTable*> calloc(1, table_bytes(size))
    if table != NULL:
        budget.used += charged(table_bytes(size))
        table.size = size
    return table

# --- finding ----------------------------------------------------------------------------------------------------------

cdef inline bint is_child(Tree* t, uint32_t i, uint32_t parent, int32_t token, uint32_t at) noexcept nogil:
    # Whether node `i` hangs below `parent` and its tokens go on with `token` at position `at` of the path. In the
    # middle of a split the lower half still looks like its whole: a sibling of `parent` that begins where `parent`
    # begins.
    cdef Node* node = node_at(t, i)
    cdef Node* above = node_at(t, parent)
    cdef uint32_t claimed = load32(&node.parent)
    cdef TokenRun* run = load_run(&node.run)
    cdef TokenRun* whole
    if at < run.start or at >= run_end(run) or run.tokens[at - run.start] != token:
        return False
    if claimed == parent:
        return True
    whole = load_run(&above.run)
    return claimed == load32(&above.parent) and run.start == whole.start and run.tokens[0] == whole.tokens[0]

cdef inline uint64_t* slot_in(Tree* t, ChildTable* table, uint32_t parent, int32_t token, uint32_t at,
                              uint32_t* child) noexcept nogil:
    # The slot of the child of `parent` that begins with `token`, and the child it holds; NULL if there is none.
    cdef uint32_t hashed = child_hash(parent, token), mask = table.size - 1, place = hashed & mask
    cdef uint64_t tag = tagged(hashed, 0), word = load64(&table.slots[place])
    while word != EMPTY_SLOT:
        if word & <uint64_t> 0xFFFFFFFF00000000 == tag and is_child(t, <uint32_t> word, parent, token, at):
            child[0] = <uint32_t> word
            return &table.slots[place]
        if load64(&table.slots[place]) == word:                  # else a split has just put the upper half here
            place = (place + 1) & mask
        word = load64(&table.slots[place])
    return NULL

cdef inline uint32_t find_child(Tree* t, uint32_t parent, int32_t token, uint32_t at) noexcept nogil:
    # The child of `parent` whose tokens go on with `token`, at position `at` of the path; NONE if there is none.
    cdef uint32_t child = NONE
    cdef ChildTable* draining
    cdef ChildTable* table
    while True:
        draining = load_table(&t.draining)
        table = load_table(&t.table)
        if slot_in(t, table, parent, token, at, &child) != NULL:
            return child
        if draining != NULL and slot_in(t, draining, parent, token, at, &child) != NULL:
            return child
        if load_table(&t.draining) == draining and load_table(&t.table) == table:
            return NONE

# --- changing ---------------------------------------------------------------------------------------------------------

cdef inline void put_slot(ChildTable* table, uint32_t parent, int32_t token, uint32_t child) noexcept nogil:
    cdef uint32_t hashed = child_hash(parent, token), mask = table.size - 1, place = hashed & mask
    while table.slots[place] > DELETED_SLOT:
        place = (place + 1) & mask
    table.deleted -= table.slots[place] == DELETED_SLOT
    table.used += 1
    store64(&table.slots[place], tagged(hashed, child))

cdef inline void replace_child(Tree* t, uint32_t parent, int32_t token, uint32_t at, uint32_t child) noexcept nogil:
    # Let a split's upper half take the place of the whole.
    cdef uint32_t old = NONE
    cdef uint64_t* slot = slot_in(t, t.table, parent, token, at, &old)
    if slot != NULL:
        store64(slot, (slot[0] & <uint64_t> 0xFFFFFFFF00000000) | child)
    if t.draining != NULL:
        slot = slot_in(t, t.draining, parent, token, at, &old)
        if slot != NULL:
            store64(slot, (slot[0] & <uint64_t> 0xFFFFFFFF00000000) | child)

cdef inline void clear_slot(ChildTable* table, uint64_t* slot) noexcept nogil:
    cdef uint32_t after = <uint32_t> (slot - &table.slots[0] + 1) & (table.size - 1)
    table.used -= 1
    if table.slots[after] == EMPTY_SLOT:         # nothing probes past an empty slot
        store64(slot, EMPTY_SLOT)
    else:
        store64(slot, DELETED_SLOT)
        table.deleted += 1

cdef inline void remove_child(Tree* t, uint32_t parent, int32_t token, uint32_t at) noexcept nogil:
    cdef uint32_t old = NONE
    cdef uint64_t* slot = slot_in(t, t.table, parent, token, at, &old)
    if slot != NULL:
        clear_slot(t.table, slot)
    if t.draining != NULL:
        slot = slot_in(t, t.draining, parent, token, at, &old)
        if slot != NULL:
            clear_slot(t.draining, slot)

# --- growing ----------------------------------------------------------------------------------------------------------

cdef inline bint table_is_tight(Tree* t, uint32_t more) noexcept nogil:
    # A new table starts with room for twice the children of the old one, and the old one is drained long before a
    # quarter of it has been added, so this is never so while children move.
    return <uint64_t> (t.table.used + t.table.deleted + more) * 4 > <uint64_t> t.table.size * 3

cdef inline uint32_t table_size_for(Tree* t, uint32_t more) noexcept nogil:
    # A table that is tight by its deleted slots alone is renewed in its size.
    return t.table.size * 2 if (t.table.used + more) * 2 > t.table.size else t.table.size

cdef inline int64_t table_growth(Tree* t, uint32_t more) noexcept nogil:
    # Bytes that `table_reserve(more)` would allocate; the old table goes once its children have moved.
    return charged(table_bytes(table_size_for(t, more))) if table_is_tight(t, more) else 0

cdef inline void drain(Tree* t, uint32_t slots) noexcept nogil:
    # Move some slots' children to the new table, and retire the old one after its last.
    cdef ChildTable* old = t.draining
    cdef Node* child
    while slots and t.drained < old.size:
        if old.slots[t.drained] > DELETED_SLOT:
            child = node_at(t, <uint32_t> old.slots[t.drained])
            put_slot(t.table, child.parent, child.run.tokens[0], <uint32_t> old.slots[t.drained])
        t.drained += 1
        slots -= 1
    if t.drained == old.size:
        store_table(&t.draining, NULL)
        retire_memory(t, old, table_bytes(old.size))

cdef inline int table_reserve(Tree* t, uint32_t more) noexcept nogil:
    # Make room for `more` children; -1 when memory is out. Deleted slots go when a table is renewed.
    cdef ChildTable* table
    if not table_is_tight(t, more):
        return 0
    table = new_table(&t.budget, table_size_for(t, more))
    if table == NULL:
        return -1
    if t.draining != NULL:
        drain(t, t.draining.size)
    t.drained = 0
    store_table(&t.draining, t.table)            # first, so that a reader that meets the new table finds the old one
    store_table(&t.table, table)
    return 0

cdef inline void add_child(Tree* t, uint32_t parent, int32_t token, uint32_t child) noexcept nogil:
    # Needs table_reserve.
    put_slot(t.table, parent, token, child)
    if t.draining != NULL:
        drain(t, DRAIN_STEP)
