# Small parts of the tree as inline C: window counters, linked lists, token runs, entries. They own no state; each takes
# the Tree or the counter it works on. `operations.pyx` builds the tree's operations from them.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport malloc
from libc.string cimport memcpy, memset

from preble._core.atomic cimport store32, store64, store_signed
from preble._core.tree.layout cimport (AWAITED, AWAY_SHIFT, CONFIRMED, Entry, EntryBlock, List, Mark, Node, Recency,
                                       TokenRun, Tree, Walk, WorkerMarks, end_of, mark_at, node_at, state_of,
                                       worker_of)
from preble._core.memory cimport NONE, budget_alloc, budget_free, charged, fails_now
from preble._core.tree.reclaim cimport retire_memory

cdef enum:
    HITS_MAX = (1 << 20) - 1     # a window counter saturates here
    WINDOW_MAX = (1 << 24) - 1   # window numbers run over here
    CHILDREN_LOOKED = 64         # before an estimate is kept


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

cdef inline uint64_t hits_take(uint64_t counter, uint64_t window, uint64_t then) noexcept nogil:
    # Take back a hit that was added in window `then`; one that has rolled off is not there, and the others are others'.
    cdef uint64_t later
    counter = rolled(counter, window)
    later = ((counter >> 40) - then) & WINDOW_MAX
    if later == 0 and (counter >> 20) & HITS_MAX:
        return counter - (1 << 20)
    return counter - 1 if later == 1 and counter & HITS_MAX else counter

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

cdef inline void fresh_rows(WorkerMarks* rows, uint32_t first, uint32_t end) noexcept nogil:
    # Rows of workers that have not been there yet: empty, in their first epoch.
    cdef uint32_t i
    memset(&rows[first], 0, (end - first) * sizeof(WorkerMarks))
    for i in range(first, end):
        rows[i].key = i

cdef inline void add_tokens(WorkerMarks* state, int64_t tokens) noexcept nogil:
    store_signed(&state.tokens, state.tokens + tokens)

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

cdef inline void age_move(Tree* t, List* old, List* ages, uint32_t i) noexcept nogil:
    # Take a node out of one aging list, and put it at the end of another or of the same.
    age_remove(t, old, i)
    age_push(t, ages, i)

cdef inline void recency_push_after(Tree* t, Recency* recency, uint32_t older, uint32_t i) noexcept nogil:
    # Link mark `i` as the next newer one of `older` (NONE: as the oldest of all).
    cdef uint32_t newer = mark_at(t, older).newer if older != NONE else recency.oldest
    cdef Mark* mark = mark_at(t, i)
    mark.older = older
    store32(&mark.newer, newer)
    if older != NONE:
        store32(&mark_at(t, older).newer, i)
    else:
        store32(&recency.oldest, i)
    if newer != NONE:
        mark_at(t, newer).older = i
    else:
        recency.newest = i

cdef inline void recency_remove(Tree* t, Recency* recency, uint32_t i) noexcept nogil:
    cdef Mark* mark = mark_at(t, i)
    if recency.warm == i:
        recency.warm = mark.newer
    if mark.older != NONE:
        store32(&mark_at(t, mark.older).newer, mark.newer)
    else:
        store32(&recency.oldest, mark.newer)
    if mark.newer != NONE:
        mark_at(t, mark.newer).older = mark.older
    else:
        recency.newest = mark.older

cdef inline void touch_mark(Tree* t, uint32_t i) noexcept nogil:
    # Make an unpinned mark its worker's newest.
    cdef Mark* mark = mark_at(t, i)
    cdef Recency* recency = &state_of(t, mark.worker).recency
    if mark.pins == 0 and recency.newest != i:
        recency_remove(t, recency, i)
        recency_push_after(t, recency, recency.newest, i)

# --- what is away -----------------------------------------------------------------------------------------------------

cdef inline uint32_t gpu_end(uint32_t flags, uint32_t end) noexcept nogil:
    # Up to which position a mark that ends at `end` has its tokens in the GPU's memory.
    cdef uint32_t away = flags >> AWAY_SHIFT
    return away - 1 if away else end

cdef inline void add_away(Tree* t, WorkerMarks* state, int64_t tokens) noexcept nogil:
    store_signed(&state.away, state.away + tokens)
    if state != &t.ghost:
        store_signed(&t.away, t.away + tokens)

cdef inline void put_below(Tree* t, WorkerMarks* state, int64_t tokens) noexcept nogil:
    # Let a worker's host memory and disk hold so many tokens.
    store_signed(&t.below, t.below + tokens - state.below)
    store_signed(&state.below, tokens)

cdef inline void put_gpu_end(Tree* t, WorkerMarks* state, Mark* mark, uint32_t end, uint32_t at,
                             uint32_t far) noexcept nogil:
    # Let a mark that ends at `end` have its tokens in the GPU's memory up to position `at` and no further; none is away
    # where the two are one. `far`: FAR or 0.
    cdef uint32_t flags = mark.flags & (CONFIRMED | AWAITED)
    add_away(t, state, <int64_t> gpu_end(mark.flags, end) - at)
    if at < end:
        flags |= far | (at + 1) << AWAY_SHIFT
    store32(&mark.flags, flags)

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

cdef inline TokenRun* copied_run(const Walk* walk, const int32_t* tokens, uint32_t count) noexcept nogil:
    # A run of what a walk left of a prompt, in nobody's budget yet; NULL where nothing is left, or no memory.
    cdef TokenRun* run = NULL
    if count > walk.matched:
        run = <TokenRun*> malloc(8 + 4 * <size_t> (count - walk.matched))
    if run != NULL:
        run.start = walk.matched
        run.length = count - walk.matched
        memcpy(&run.tokens[0], tokens + walk.matched, run.length * 4)
    return run

cdef inline TokenRun* ready_run(Tree* t, uint32_t start, uint32_t length) noexcept nogil:
    # The run that this writer has at hand, if it is what comes after position `start`; the tree's from now on.
    cdef TokenRun* run = t.ready
    if run == NULL or run.start != start or run.length != length or fails_now(&t.budget):
        return NULL
    t.ready = NULL
    t.budget.used += charged(run_bytes(t, length))
    return run

cdef inline void free_run(Tree* t, TokenRun* run) noexcept nogil:
    # A run that was never linked.
    if run != NULL:
        budget_free(&t.budget, run, run_bytes(t, run.length))

cdef inline void retire_run(Tree* t, TokenRun* run) noexcept nogil:
    retire_memory(t, run, run_bytes(t, run.length))

cdef inline int64_t block_bytes(uint32_t room) noexcept nogil:
    return 16 + <int64_t> room * (sizeof(uint64_t) + sizeof(uint32_t))

cdef inline uint32_t* block_marks(EntryBlock* block) noexcept nogil:
    return <uint32_t*> &block.words[block.room]

cdef inline uint32_t entry_count(Node* node) noexcept nogil:
    if node.block != NULL:
        return node.block.live
    return 1 if end_of(node.only) else 0

cdef inline uint32_t word_count(Node* node) noexcept nogil:
    # Words of a node's entries, those that say nothing included.
    return node.block.count if node.block != NULL else 1

cdef inline uint64_t* words_of(Node* node) noexcept nogil:
    return &node.block.words[0] if node.block != NULL else &node.only

cdef inline uint32_t* marks_of(Node* node) noexcept nogil:
    # The mark behind each word.
    return block_marks(node.block) if node.block != NULL else &node.only_mark

cdef inline uint32_t place_in(EntryBlock* block, uint32_t worker) noexcept nogil:
    # The place of the worker's word in a block, or where it belongs. O(log entries).
    cdef uint32_t low = 0, high = block.count, middle
    while low < high:
        middle = (low + high) >> 1
        if worker_of(block.words[middle]) < worker:
            low = middle + 1
        else:
            high = middle
    return low

cdef inline Entry find_entry(Node* node, uint32_t worker) noexcept nogil:
    # The worker's entry at a node; end == 0 if it has none. For writers. O(log entries).
    cdef Entry entry
    cdef EntryBlock* block = node.block
    entry.at = 0
    entry.end = 0
    entry.mark = NONE
    if block == NULL:
        if worker_of(node.only) == worker:
            entry.end = end_of(node.only)
            entry.mark = node.only_mark
        return entry
    entry.at = place_in(block, worker)
    if entry.at < block.count and worker_of(block.words[entry.at]) == worker:
        entry.end = end_of(block.words[entry.at])
        entry.mark = block_marks(block)[entry.at]
    return entry

cdef inline bint marks_a_child(Tree* t, uint32_t i, uint32_t worker, uint32_t spared) noexcept nogil:
    # Whether the worker marks a child of node `i` other than `spared`; True also where there are too many to look.
    cdef uint32_t child = node_at(t, i).first_child, looked = 0
    while child != NONE:
        if looked == CHILDREN_LOOKED or (find_entry(node_at(t, child), worker).end and child != spared):
            return True
        looked += 1
        child = node_at(t, child).next_sibling
    return False

cdef inline void set_end(Node* node, uint32_t worker, Entry entry, uint32_t end) noexcept nogil:
    # Let an entry that is there end elsewhere.
    cdef uint64_t word = <uint64_t> worker << 32 | end
    store64(&words_of(node)[entry.at], word)
