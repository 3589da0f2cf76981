# Small parts of the tree as inline C: window counters, linked lists, the child table, token runs. They own no state;
# each takes the Tree or the counter it works on. `_tree.pyx` builds the tree's operations from them.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from preble._memory cimport NONE, budget_alloc, budget_free, charged
from preble._layout cimport ChildSlot, Entry, List, Mark, Node, TokenRun, Tree, mark_at, node_at

cdef enum:
    EMPTY_TAG = 0
    DELETED_TAG = 1
    COMPARE_STEP = 64            # tokens compared by one memcmp
    HITS_MAX = (1 << 20) - 1     # a window counter saturates here
    WINDOW_MAX = (1 << 24) - 1   # window numbers run over here


# --- window counters --------------------------------------------------------------------------------------------------
# A counter is (window number: 24 bits | hits in it: 20 | hits in the window before: 20). The estimate weighs the
# older window by how much of it still lies within the last `window_seconds`. Window numbers run over, so they are
# compared as on a circle: up to half way round is later, the other half is earlier.

cdef inline uint64_t window_of(double now, double window_seconds) noexcept nogil:
    return (<uint64_t> (now / window_seconds)) & WINDOW_MAX if now > 0 else 0

cdef inline uint64_t rolled(uint64_t counter, uint64_t window) noexcept nogil:
    # The counter as seen from `window`; an earlier window (a clock that jumped back) leaves it alone.
    cdef uint64_t later = (window - (counter >> 40)) & WINDOW_MAX
    if counter << 24 == 0:       # no hits: it may stand for any window
        return window << 40
    if later == 0 or later > WINDOW_MAX >> 1:
        return counter
    if later == 1:
        return (window << 40) | ((counter >> 20) & HITS_MAX)
    return window << 40

cdef inline uint64_t hits_add(uint64_t counter, uint64_t window) noexcept nogil:
    counter = rolled(counter, window)
    return counter + (1 << 20) if (counter >> 20) & HITS_MAX < HITS_MAX else counter

cdef inline uint64_t hits_take(uint64_t counter, uint64_t window) noexcept nogil:
    # Take one hit back, from the current window if it has one, else from the one before.
    counter = rolled(counter, window)
    if (counter >> 20) & HITS_MAX:
        return counter - (1 << 20)
    return counter - 1 if counter & HITS_MAX else counter

cdef inline uint64_t hits_seen(uint64_t counter, uint64_t window) noexcept nogil:
    # Hits in this window and the one before.
    counter = rolled(counter, window)
    return ((counter >> 20) & HITS_MAX) + (counter & HITS_MAX)

cdef inline double hits_estimate(uint64_t counter, double now, double window_seconds) noexcept nogil:
    # Estimated hits within the last `window_seconds`. Changes nothing.
    cdef uint64_t window = window_of(now, window_seconds)
    cdef double part = now / window_seconds - <double> <uint64_t> (now / window_seconds) if now > 0 else 0.0
    counter = rolled(counter, window)
    if counter >> 40 != window:
        part = 0.0
    return <double> ((counter >> 20) & HITS_MAX) + <double> (counter & HITS_MAX) * (1.0 - part)

# --- lists ------------------------------------------------------------------------------------------------------------

cdef inline void age_push(Tree* t, List* ages, uint32_t i) noexcept nogil:
    cdef Node* node = node_at(t, i)
    node.older = ages.newest
    node.newer = NONE
    if ages.newest != NONE:
        node_at(t, ages.newest).newer = i
    else:
        ages.oldest = i
    ages.newest = i

cdef inline void age_remove(Tree* t, List* ages, uint32_t i) noexcept nogil:
    cdef Node* node = node_at(t, i)
    if node.older != NONE:
        node_at(t, node.older).newer = node.newer
    else:
        ages.oldest = node.newer
    if node.newer != NONE:
        node_at(t, node.newer).older = node.older
    else:
        ages.newest = node.older

cdef inline void recency_push_after(Tree* t, List* recency, uint32_t older, uint32_t i) noexcept nogil:
    # Link mark `i` as the next newer one of `older` (NONE: as the oldest of all).
    cdef uint32_t newer = mark_at(t, older).newer if older != NONE else recency.oldest
    cdef Mark* mark = mark_at(t, i)
    mark.older = older
    mark.newer = newer
    if older != NONE:
        mark_at(t, older).newer = i
    else:
        recency.oldest = i
    if newer != NONE:
        mark_at(t, newer).older = i
    else:
        recency.newest = i

cdef inline void recency_remove(Tree* t, List* recency, uint32_t i) noexcept nogil:
    cdef Mark* mark = mark_at(t, i)
    if mark.older != NONE:
        mark_at(t, mark.older).newer = mark.newer
    else:
        recency.oldest = mark.newer
    if mark.newer != NONE:
        mark_at(t, mark.newer).older = mark.older
    else:
        recency.newest = mark.older

cdef inline void touch_mark(Tree* t, uint32_t i) noexcept nogil:
    # Make an unpinned mark its worker's newest.
    cdef Mark* mark = mark_at(t, i)
    cdef List* recency = &t.workers[mark.worker].recency
    if mark.pins == 0 and recency.newest != i:
        recency_remove(t, recency, i)
        recency_push_after(t, recency, recency.newest, i)

# --- child table ------------------------------------------------------------------------------------------------------

cdef inline uint32_t child_hash(uint32_t parent, int32_t token) noexcept nogil:
    cdef uint64_t h = ((<uint64_t> parent << 32) | <uint32_t> token) * <uint64_t> 0x9E3779B97F4A7C15
    return <uint32_t> ((h ^ (h >> 29)) * <uint64_t> 0xBF58476D1CE4E5B9 >> 32)

cdef inline uint32_t tag_of(uint32_t hashed) noexcept nogil:
    return hashed if hashed > DELETED_TAG else hashed + 2

cdef inline ChildSlot* find_slot(Tree* t, uint32_t parent, int32_t token) noexcept nogil:
    # The slot of (parent, token), or NULL.
    cdef uint32_t hashed = child_hash(parent, token)
    cdef uint32_t tag = tag_of(hashed), mask = t.table_size - 1, at = hashed & mask
    cdef Node* child
    while t.table[at].tag != EMPTY_TAG:
        if t.table[at].tag == tag:
            child = node_at(t, t.table[at].child)
            if child.parent == parent and child.run.tokens[0] == token:
                return &t.table[at]
        at = (at + 1) & mask
    return NULL

cdef inline uint32_t find_child(Tree* t, uint32_t parent, int32_t token) noexcept nogil:
    cdef ChildSlot* slot = find_slot(t, parent, token)
    return slot.child if slot != NULL else NONE

cdef inline void add_slot(Tree* t, ChildSlot* table, uint32_t size, uint32_t parent, int32_t token,
                          uint32_t child) noexcept nogil:
    cdef uint32_t hashed = child_hash(parent, token)
    cdef uint32_t at = hashed & (size - 1)
    while table[at].tag > DELETED_TAG:
        at = (at + 1) & (size - 1)
    if table[at].tag == DELETED_TAG:
        t.table_deleted -= 1
    table[at].tag = tag_of(hashed)
    table[at].child = child

cdef inline void remove_slot(Tree* t, uint32_t parent, int32_t token) noexcept nogil:
    cdef ChildSlot* slot = find_slot(t, parent, token)
    cdef uint32_t next_at = <uint32_t> (slot - t.table + 1) & (t.table_size - 1)
    slot.child = NONE
    t.table_used -= 1
    if t.table[next_at].tag == EMPTY_TAG:        # nothing probes past an empty slot
        slot.tag = EMPTY_TAG
    else:
        slot.tag = DELETED_TAG
        t.table_deleted += 1

cdef inline bint table_is_tight(Tree* t, uint32_t more) noexcept nogil:
    return (t.table_used + t.table_deleted + more) * 4 > t.table_size * 3

cdef inline uint32_t table_size_for(Tree* t, uint32_t more) noexcept nogil:
    # A table that is tight by its deleted slots alone is rebuilt in its size.
    return t.table_size * 2 if (t.table_used + more) * 2 > t.table_size else t.table_size

cdef inline int64_t table_growth(Tree* t, uint32_t more) noexcept nogil:
    # Bytes that `table_reserve(more)` would allocate; it frees the old table after that.
    return charged(<int64_t> table_size_for(t, more) * sizeof(ChildSlot)) if table_is_tight(t, more) else 0

cdef inline int table_reserve(Tree* t, uint32_t more) noexcept nogil:
    # Make room for `more` children; deleted slots go when the table is rebuilt.
    cdef uint32_t i, size = table_size_for(t, more)
    cdef ChildSlot* table
    cdef Node* child
    if not table_is_tight(t, more):
        return 0
    table = <ChildSlot*> budget_alloc(&t.budget, size * sizeof(ChildSlot))
    if table == NULL:
        return -1
    memset(table, 0, size * sizeof(ChildSlot))
    for i in range(t.table_size):
        if t.table[i].tag > DELETED_TAG:
            child = node_at(t, t.table[i].child)
            add_slot(t, table, size, child.parent, child.run.tokens[0], t.table[i].child)
    budget_free(&t.budget, t.table, t.table_size * sizeof(ChildSlot))
    t.table = table
    t.table_size = size
    t.table_deleted = 0
    return 0

# --- runs and entry blocks --------------------------------------------------------------------------------------------

cdef inline int64_t run_bytes(Tree* t, uint32_t length) noexcept nogil:
    return 8 + <int64_t> (length if length else 1) * (8 if t.with_slots else 4)

cdef inline int32_t* run_slots(TokenRun* run) noexcept nogil:
    return &run.tokens[0] + run.length

cdef inline TokenRun* new_run(Tree* t, uint32_t start, const int32_t* tokens, const int32_t* slots,
                              uint32_t length) noexcept nogil:
    cdef TokenRun* run = <TokenRun*> budget_alloc(&t.budget, run_bytes(t, length))
    if run == NULL:
        return NULL
    run.start = start
    run.length = length
    if tokens != NULL:
        memcpy(&run.tokens[0], tokens, length * 4)
        if t.with_slots and slots != NULL:
            memcpy(run_slots(run), slots, length * 4)
    return run

cdef inline void free_run(Tree* t, TokenRun* run) noexcept nogil:
    if run != NULL:
        budget_free(&t.budget, run, run_bytes(t, run.length))

cdef inline uint32_t common_prefix(const int32_t* a, const int32_t* b, uint32_t count) noexcept nogil:
    # How many leading tokens agree. memcmp compares whole steps with the machine's widest instructions.
    cdef uint32_t i = 0
    if memcmp(a, b, count * 4) == 0:
        return count
    while i + COMPARE_STEP <= count and memcmp(a + i, b + i, COMPARE_STEP * 4) == 0:
        i += COMPARE_STEP
    while a[i] == b[i]:
        i += 1
    return i

cdef inline int64_t block_bytes(uint32_t room) noexcept nogil:
    return 8 + <int64_t> room * sizeof(Entry)

cdef inline Entry* find_entry(Node* node, uint32_t worker) noexcept nogil:
    # The worker's entry at a node, or NULL. O(log entries).
    cdef uint32_t low = 0, high, middle
    if node.block == NULL:
        return &node.only if node.only.worker == worker else NULL
    high = node.block.count
    while low < high:
        middle = (low + high) >> 1
        if node.block.entries[middle].worker < worker:
            low = middle + 1
        else:
            high = middle
    if low < node.block.count and node.block.entries[low].worker == worker:
        return &node.block.entries[low]
    return NULL
