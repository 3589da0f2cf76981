"""The operations on a token radix tree, as C functions without Python objects. Owns the algorithms, no state: each
function takes the `Tree` it works on. The Python face is `_radix.pyx`; KV slots are in `_slots.pyx`.

Layout, pictures and invariants are in `_layout.pxd`, the small parts in `_layout_parts.pxd`. Nothing here is
recursive; whatever allocates does so before it changes content. Paper section 4.2.

Sections: nodes, entries and marks, reads, split, insert, eviction, forgetting.
"""

from libc.stdint cimport int64_t, int32_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from preble._layout cimport (
    entries_of,
    Entry,
    entry_count,
    EntryBlock,
    generation,
    List,
    LIVE,
    Mark,
    mark_at,
    Node,
    node_at,
    TokenRun,
    TOUCHED,
    Tree,
    Walk,
    WorkerMarks,
)
from preble._layout_parts cimport (
    add_slot,
    age_push,
    age_remove,
    block_bytes,
    common_prefix,
    find_child,
    free_run,
    hits_add,
    hits_seen,
    hits_take,
    new_run,
    recency_push_after,
    recency_remove,
    remove_slot,
    run_bytes,
    run_slots,
    table_growth,
    table_reserve,
    touch_mark,
    window_of,
)
from preble._memory cimport (
    budget_alloc,
    budget_free,
    charged,
    NONE,
    slab_give,
    slab_growth,
    slab_reserve,
    slab_take,
)

cdef enum:
    SHED_STEPS = 256             # aging entries looked at in one insert, at most
    SHED_IDLE = 8                # uncached entries passed over in a row before cached ones are tried
    UNDO_CHILDREN = 64           # children looked at before a belief is kept

cdef int64_t PLENTY = 1 << 20    # bytes; with more than this left no exact sum is made


# --- nodes ------------------------------------------------------------------------------------------------------------

cdef uint32_t take_node(Tree* t, TokenRun* run, uint32_t parent) noexcept nogil:
    """A fresh node owning `run`, not linked anywhere yet. Needs slab_reserve."""
    cdef uint32_t i = slab_take(&t.nodes)
    cdef Node* node = node_at(t, i)
    node.run = run
    node.block = NULL
    node.hits = 0
    node.only.worker = NONE
    node.parent = parent
    node.first_child = node.prev_sibling = node.next_sibling = NONE
    node.older = node.newer = NONE
    node.state = (generation(node) << 2) | LIVE
    return i


cdef void link_child(Tree* t, uint32_t parent, uint32_t i) noexcept nogil:
    """Put node `i` into `parent`'s child list and the table. Needs table_reserve."""
    cdef Node* node = node_at(t, i)
    cdef Node* above = node_at(t, parent)
    node.parent = parent
    node.prev_sibling = NONE
    node.next_sibling = above.first_child
    if above.first_child != NONE:
        node_at(t, above.first_child).prev_sibling = i
    above.first_child = i
    add_slot(t, t.table, t.table_size, parent, node.run.tokens[0], i)
    t.table_used += 1


cdef void unlink_child(Tree* t, uint32_t i) noexcept nogil:
    cdef Node* node = node_at(t, i)
    remove_slot(t, node.parent, node.run.tokens[0])
    if node.prev_sibling != NONE:
        node_at(t, node.prev_sibling).next_sibling = node.next_sibling
    else:
        node_at(t, node.parent).first_child = node.next_sibling
    if node.next_sibling != NONE:
        node_at(t, node.next_sibling).prev_sibling = node.prev_sibling


cdef void free_node(Tree* t, uint32_t i) noexcept nogil:
    """Give back a node that nothing links to any more. Its generation moves on, so that old references are
    recognised."""
    cdef Node* node = node_at(t, i)
    free_run(t, node.run)
    if node.block != NULL:
        budget_free(&t.budget, node.block, block_bytes(node.block.room))
        node.block = NULL
    node.state = (generation(node) + 1) << 2
    slab_give(&t.nodes, i)


cdef void forget_leaf(Tree* t, uint32_t i) noexcept nogil:
    """Remove a childless, unpinned node with all its marks."""
    cdef Node* node = node_at(t, i)
    while entry_count(node):
        drop_mark(t, entries_of(node)[0].mark)
    age_remove(t, &t.unmarked, i)
    unlink_child(t, i)
    free_node(t, i)


# --- entries and marks ------------------------------------------------------------------------------------------------

cdef Entry* find_entry(Node* node, uint32_t worker) noexcept nogil:
    """The worker's entry at a node, or NULL. Changes nothing; O(log entries)."""
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


cdef int reserve_entry(Tree* t, Node* node) noexcept nogil:
    """Make the next add_entry succeed. The node's marks stay what they are."""
    cdef uint32_t count = entry_count(node), room
    cdef EntryBlock* block
    if count == 0 or (node.block != NULL and count < node.block.room):
        return 0
    room = 2 if count == 1 else count * 2
    block = <EntryBlock*> budget_alloc(&t.budget, block_bytes(room))
    if block == NULL:
        return -1
    block.count = count
    block.room = room
    memcpy(&block.entries[0], entries_of(node), count * sizeof(Entry))
    if node.block != NULL:
        budget_free(&t.budget, node.block, block_bytes(node.block.room))
    node.block = block
    return 0


cdef Entry* add_entry(Tree* t, uint32_t i, uint32_t worker, uint32_t tokens) noexcept nogil:
    """A new mark of `worker` on node `i`, as its newest. Needs reserve_entry and a reserved mark."""
    cdef Node* node = node_at(t, i)
    cdef uint32_t index = slab_take(&t.marks), at = 0
    cdef Mark* mark = mark_at(t, index)
    cdef Entry* entry
    if entry_count(node) == 0:
        age_remove(t, &t.unmarked, i)
        age_push(t, &t.marked, i)
    if node.block == NULL:
        entry = &node.only
    else:
        at = node.block.count
        while at > 0 and node.block.entries[at - 1].worker > worker:
            node.block.entries[at] = node.block.entries[at - 1]
            at -= 1
        node.block.count += 1
        entry = &node.block.entries[at]
    entry.worker = worker
    entry.tokens = tokens
    entry.mark = index
    mark.hits = 0
    mark.node = i
    mark.worker = worker
    mark.pins = 0
    mark.confirmed = 0
    recency_push_after(t, &t.workers[worker].recency, t.workers[worker].recency.newest, index)
    t.workers[worker].tokens += tokens
    t.workers[worker].marks += 1
    return entry


cdef void remove_entry(Tree* t, uint32_t i, uint32_t worker) noexcept nogil:
    """Take the worker's entry out of node `i`; an unmarked node moves to the other aging list."""
    cdef Node* node = node_at(t, i)
    cdef EntryBlock* block = node.block
    cdef uint32_t at
    if block == NULL:
        node.only.worker = NONE
    else:
        at = <uint32_t> (find_entry(node, worker) - &block.entries[0])
        block.count -= 1
        while at < block.count:
            block.entries[at] = block.entries[at + 1]
            at += 1
        if block.count == 1:
            node.only = block.entries[0]
            node.block = NULL
            budget_free(&t.budget, block, block_bytes(block.room))
    if entry_count(node) == 0:
        age_remove(t, &t.marked, i)
        age_push(t, &t.unmarked, i)


cdef int64_t drop_mark(Tree* t, uint32_t index) noexcept nogil:
    """Remove an unpinned mark; returns its tokens."""
    cdef Mark* mark = mark_at(t, index)
    cdef WorkerMarks* state = &t.workers[mark.worker]
    cdef int64_t tokens = find_entry(node_at(t, mark.node), mark.worker).tokens
    recency_remove(t, &state.recency, index)
    state.tokens -= tokens
    state.marks -= 1
    remove_entry(t, mark.node, mark.worker)
    slab_give(&t.marks, index)
    t.version += 1
    return tokens


cdef int64_t trim_entry(Tree* t, Entry* entry, uint32_t tokens) noexcept nogil:
    """Let an entry cover only its first `tokens` (>= 1) tokens; returns how many were dropped."""
    cdef int64_t dropped = <int64_t> entry.tokens - tokens
    if dropped <= 0:
        return 0
    entry.tokens = tokens
    t.workers[entry.worker].tokens -= dropped
    t.version += 1
    return dropped


# --- reads ------------------------------------------------------------------------------------------------------------

cdef Walk at_root(uint32_t root) noexcept nogil:
    cdef Walk walk
    walk.node = root
    walk.inside = walk.matched = 0
    return walk


cdef Walk tree_walk(Tree* t, Walk walk, const int32_t* tokens, uint32_t count) noexcept nogil:
    """Follow `tokens` down from `walk` as far as the tree goes. Changes nothing; O(matched tokens)."""
    cdef Node* node = node_at(t, walk.node)
    cdef uint32_t child, step
    while True:
        step = min(node.run.length - walk.inside, count - walk.matched)
        if step:
            step = common_prefix(&node.run.tokens[walk.inside], tokens + walk.matched, step)
            walk.inside += step
            walk.matched += step
        if walk.inside < node.run.length or walk.matched == count:
            return walk
        child = find_child(t, walk.node, tokens[walk.matched])
        if child == NONE:
            return walk
        walk.node = child
        walk.inside = 0
        node = node_at(t, child)


cdef void tree_matches(Tree* t, Walk walk, uint32_t* matched, uint32_t workers) noexcept nogil:
    """For each worker the tokens of the walked prefix it is believed to cache. Changes nothing; O(workers + marks on
    the path).

    Climbs from the deepest node: by prefix closure the first mark met of a worker is its deepest.
    """
    cdef uint32_t i = walk.node, at, start, tokens
    cdef Node* node = node_at(t, i)
    cdef Entry* entries
    memset(matched, 0, workers * sizeof(uint32_t))
    while node.parent != NONE:
        start = node.run.start
        entries = entries_of(node)
        for at in range(entry_count(node)):
            if matched[entries[at].worker] == 0:
                tokens = start + entries[at].tokens
                matched[entries[at].worker] = tokens if tokens < walk.matched else walk.matched
        node = node_at(t, node.parent)


cdef uint32_t key_portion_end(Tree* t, Walk walk, uint32_t limit) noexcept nogil:
    """Where the key portion of the first `limit` walked tokens ends: the deepest node longer than all before it
    (paper section 3)."""
    cdef Node* node = node_at(t, walk.node)
    cdef uint32_t start, end
    while node.parent != NONE:
        start = node.run.start
        end = min(start + node.run.length, limit)
        if end > start and end - start > start:
            return end
        node = node_at(t, node.parent)
    return 0


# --- split ------------------------------------------------------------------------------------------------------------
# Splitting L at `upper` tokens (see the picture in the .pxd):
#   1  allocate the two new runs, the new node U, its entries and one mark for each entry that reaches below the split
#   2  U takes L's place under the parent; L becomes U's only child and keeps its index
#   3  each entry of L: wholly above the split -> it moves to U with its mark; else U gets a copy of `upper` tokens
# whose mark
#      is linked just newer than L's (leaf-first order holds) or pinned like L's

cdef int split_node(Tree* t, uint32_t lower, uint32_t upper) noexcept nogil:
    """Split node `lower` after its first `upper` tokens. Content is unchanged; -1 when memory is out, nothing
    changed."""
    cdef Node* low = node_at(t, lower)
    cdef TokenRun* old = low.run
    cdef uint32_t count = entry_count(low), i
    cdef TokenRun* head
    cdef TokenRun* tail
    cdef EntryBlock* block = NULL
    if slab_reserve(&t.nodes, &t.budget, 1) or slab_reserve(&t.marks, &t.budget, count) or table_reserve(t, 1):   # 1
        return -1
    head = new_run(t, old.start, &old.tokens[0], run_slots(old), upper)
    tail = new_run(t, old.start + upper, &old.tokens[upper], run_slots(old) + upper, old.length - upper)
    if count > 1:
        block = <EntryBlock*> budget_alloc(&t.budget, block_bytes(count))
    if head == NULL or tail == NULL or (count > 1 and block == NULL):
        free_run(t, head)
        free_run(t, tail)
        budget_free(&t.budget, block, block_bytes(count))
        return -1
    i = take_node(t, head, low.parent)                                                                            # 2
    unlink_child(t, lower)
    low.run = tail
    link_child(t, node_at(t, i).parent, i)
    link_child(t, i, lower)
    node_at(t, i).hits = low.hits
    node_at(t, i).state |= low.state & TOUCHED
    free_run(t, old)
    divide_entries(t, lower, i, upper, block, count)                                                              # 3
    return 0


cdef void divide_entries(Tree* t, uint32_t lower, uint32_t i, uint32_t upper, EntryBlock* block,
                         uint32_t count) noexcept nogil:
    """Step 3 of the split: node `i` is the new upper node, `block` holds its entries when there are two or more."""
    cdef Node* low = node_at(t, lower)
    cdef Node* top = node_at(t, i)
    cdef Entry* source = entries_of(low)
    cdef Entry* target = &top.only
    cdef uint32_t at, kept = 0
    if block != NULL:
        block.count = block.room = count
        top.block = block
        target = &block.entries[0]
    for at in range(count):
        target[at] = source[at]
        if source[at].tokens <= upper:
            mark_at(t, source[at].mark).node = i
        else:
            target[at].tokens = upper
            target[at].mark = copy_mark_newer(t, source[at].mark, i)
            source[kept] = source[at]
            source[kept].tokens -= upper
            kept += 1
    age_push(t, &t.marked if count else &t.unmarked, i)
    if kept < count:
        shrink_entries(t, lower, kept)


cdef uint32_t copy_mark_newer(Tree* t, uint32_t index, uint32_t i) noexcept nogil:
    """A mark for the upper node `i`, like mark `index` and just newer than it."""
    cdef uint32_t copied = slab_take(&t.marks)
    cdef Mark* mark = mark_at(t, copied)
    cdef Mark* source = mark_at(t, index)
    mark.hits = source.hits
    mark.node = i
    mark.worker = source.worker
    mark.pins = source.pins
    mark.confirmed = source.confirmed
    if mark.pins == 0:
        recency_push_after(t, &t.workers[mark.worker].recency, index, copied)
    t.workers[mark.worker].marks += 1
    return copied


cdef void shrink_entries(Tree* t, uint32_t i, uint32_t kept) noexcept nogil:
    """Only the first `kept` entries of node `i` remain; their marks' owners have moved."""
    cdef Node* node = node_at(t, i)
    cdef EntryBlock* block = node.block
    if block != NULL:
        block.count = kept
        if kept <= 1:
            node.only = block.entries[0]
            node.block = NULL
            budget_free(&t.budget, block, block_bytes(block.room))
    if kept == 0:
        node.only.worker = NONE
        age_remove(t, &t.marked, i)
        age_push(t, &t.unmarked, i)


# --- insert -----------------------------------------------------------------------------------------------------------
# Inserting a prompt that was walked to (node, inside):
#   1  make room under max_bytes by forgetting old leaves; if that fails only the known prefix is used
#   2  split the node if the prompt leaves it in the middle (content stays the same)
#   3  allocate the new leaf and room for every mark that is missing on the path
#   4  link the leaf; mark, count and touch the path from leaf to root
#   5  evict the worker's oldest leaves until it is within its capacity

cdef int tree_insert(Tree* t, Walk walk, const int32_t* tokens, uint32_t count, uint32_t worker, bint is_hit,
                     double now, uint32_t* leaf) noexcept nogil:
    """Remember a prompt, mark it cached on `worker` (NONE: on none), count a hit if `is_hit`. 0, or -1 when memory is
    out.

    `walk` is where `tree_walk` ended for these tokens. `leaf` receives the prompt's last node. O(path + missing
    tokens).
    """
    cdef TokenRun* run = NULL
    leaf[0] = NONE
    if not make_room(t, walk, count, worker):                                               # 1
        t.refused_tokens += count - up_to_border(t, &walk)
        count = walk.matched
    if walk.inside < node_at(t, walk.node).run.length:                                      # 2
        if split_node(t, walk.node, walk.inside):
            return -1
        walk.node = node_at(t, walk.node).parent
    if slab_reserve(&t.nodes, &t.budget, 1) or table_reserve(t, 1):                         # 3
        return -1
    if worker != NONE and reserve_path(t, walk.node, worker):
        return -1
    if count > walk.matched:
        run = new_run(t, walk.matched, tokens + walk.matched, NULL, count - walk.matched)
        if run == NULL:
            return -1
        walk.node = add_leaf(t, walk.node, run)                                             # 4
    mark_path(t, walk.node, worker, is_hit, now)
    if run != NULL:
        node_at(t, walk.node).state &= ~<uint32_t> TOUCHED     # its first request is no second chance
    if worker != NONE and t.workers[worker].tokens > t.workers[worker].capacity:            # 5
        evict_tokens(t, worker, t.workers[worker].tokens - t.workers[worker].capacity)
    leaf[0] = walk.node
    return 0


cdef uint32_t up_to_border(Tree* t, Walk* walk) noexcept nogil:
    """Move a walk that ended inside a node back to the node above; returns the tokens matched then."""
    if walk.inside < node_at(t, walk.node).run.length:
        walk.matched -= walk.inside
        walk.node = node_at(t, walk.node).parent
        walk.inside = node_at(t, walk.node).run.length
    return walk.matched


cdef uint32_t add_leaf(Tree* t, uint32_t parent, TokenRun* run) noexcept nogil:
    cdef uint32_t i = take_node(t, run, parent)
    link_child(t, parent, i)
    age_push(t, &t.unmarked, i)
    return i


cdef int reserve_path(Tree* t, uint32_t i, uint32_t worker) noexcept nogil:
    """Room for a mark of `worker` on each node from `i` to the root that lacks one, and on a new leaf below."""
    cdef Node* node = node_at(t, i)
    cdef uint32_t missing = 1
    while node.parent != NONE:
        if find_entry(node, worker) == NULL:
            missing += 1
            if reserve_entry(t, node):
                return -1
        node = node_at(t, node.parent)
    return slab_reserve(&t.marks, &t.budget, missing)


cdef void mark_path(Tree* t, uint32_t i, uint32_t worker, bint is_hit, double now) noexcept nogil:
    """From leaf to root: mark whole nodes as cached on `worker`, count the hit, make them the worker's newest."""
    cdef uint64_t window = window_of(now, t.window_seconds)
    cdef Node* node = node_at(t, i)
    cdef Entry* entry
    while node.parent != NONE:
        node.state |= TOUCHED
        if is_hit:
            node.hits = hits_add(node.hits, window)
        if worker != NONE:
            entry = find_entry(node, worker)
            if entry == NULL:
                entry = add_entry(t, i, worker, node.run.length)
                t.version += 1
            else:
                if entry.tokens < node.run.length:
                    t.workers[worker].tokens += node.run.length - entry.tokens
                    entry.tokens = node.run.length
                    t.version += 1
                touch_mark(t, entry.mark)
            if is_hit:
                mark_at(t, entry.mark).hits = hits_add(mark_at(t, entry.mark).hits, window)
        i = node.parent
        node = node_at(t, i)


# --- eviction ---------------------------------------------------------------------------------------------------------

cdef int64_t evict_tokens(Tree* t, uint32_t worker, int64_t need) noexcept nogil:
    """Unmark the worker's oldest tokens, leaves first, the last node in part; returns how many (fewer if all is
    pinned)."""
    cdef int64_t freed = 0
    cdef uint32_t oldest
    cdef Entry* entry
    while freed < need and t.workers[worker].recency.oldest != NONE:
        oldest = t.workers[worker].recency.oldest
        entry = find_entry(node_at(t, mark_at(t, oldest).node), worker)
        if entry.tokens > need - freed:
            freed += trim_entry(t, entry, <uint32_t> (entry.tokens - (need - freed)))
        else:
            freed += drop_mark(t, oldest)
    return freed


cdef int64_t drop_subtree(Tree* t, uint32_t top, uint32_t worker) noexcept nogil:
    """Drop the worker's marks on `top` and below; returns the tokens. Visits only nodes the worker marks, and their
    children."""
    cdef uint32_t i = top
    cdef Entry* entry
    cdef int64_t dropped = 0
    cdef bint down
    while True:
        entry = find_entry(node_at(t, i), worker)
        down = False
        if entry != NULL and mark_at(t, entry.mark).pins == 0:
            dropped += drop_mark(t, entry.mark)
            down = node_at(t, i).first_child != NONE
        if down:
            i = node_at(t, i).first_child
            continue
        while i != top and node_at(t, i).next_sibling == NONE:
            i = node_at(t, i).parent
        if i == top:
            return dropped
        i = node_at(t, i).next_sibling


cdef int64_t drop_children(Tree* t, uint32_t i, uint32_t worker, uint32_t but) noexcept nogil:
    cdef uint32_t child = node_at(t, i).first_child
    cdef int64_t dropped = 0
    while child != NONE:
        if child != but:
            dropped += drop_subtree(t, child, worker)
        child = node_at(t, child).next_sibling
    return dropped


cdef int64_t drop_below(Tree* t, uint32_t i, uint32_t worker, uint32_t kept_tokens) noexcept nogil:
    """The worker keeps only `kept_tokens` of the path to node `i`, which holds that position, and nothing below;
    returns tokens."""
    cdef Node* node = node_at(t, i)
    cdef Entry* entry = find_entry(node, worker)
    cdef int64_t dropped
    if entry == NULL:
        return 0
    if kept_tokens <= node.run.start:
        return drop_subtree(t, i, worker)
    if node.run.start + entry.tokens <= kept_tokens:
        return 0
    dropped = drop_children(t, i, worker, NONE)
    return dropped + trim_entry(t, find_entry(node, worker), kept_tokens - node.run.start)


cdef int64_t drop_beside(Tree* t, uint32_t leaf, uint32_t worker, uint32_t kept_tokens) noexcept nogil:
    """The worker held only `kept_tokens` of this path before computing it again: what hangs off the rest is gone;
    returns tokens."""
    cdef uint32_t i = leaf, below = NONE
    cdef Node* node = node_at(t, i)
    cdef int64_t dropped = 0
    while node.parent != NONE and node.run.start + node.run.length > kept_tokens:
        if find_entry(node, worker) != NULL:
            dropped += drop_children(t, i, worker, below)
        below = i
        i = node.parent
        node = node_at(t, i)
    return dropped


cdef bint marks_a_child(Tree* t, uint32_t i, uint32_t worker) noexcept nogil:
    """Whether the worker marks a child of node `i`; True also when there are too many children to look."""
    cdef uint32_t child = node_at(t, i).first_child, looked = 0
    while child != NONE:
        if looked == UNDO_CHILDREN or find_entry(node_at(t, child), worker) != NULL:
            return True
        looked += 1
        child = node_at(t, child).next_sibling
    return False


cdef int64_t take_back(Tree* t, uint32_t leaf, uint32_t worker, uint32_t kept_tokens, double now) noexcept nogil:
    """A request ended before it was computed: take its hit off the path, and its marks beyond `kept_tokens` where no
    other request of the worker has passed since. Returns the tokens unmarked."""
    cdef uint64_t window = window_of(now, t.window_seconds)
    cdef uint32_t i = leaf
    cdef Node* node = node_at(t, i)
    cdef Entry* entry
    cdef int64_t dropped = 0
    cdef bint undo = True
    while node.parent != NONE:
        node.hits = hits_take(node.hits, window)
        entry = find_entry(node, worker)
        if entry != NULL:
            mark_at(t, entry.mark).hits = hits_take(mark_at(t, entry.mark).hits, window)
            undo = undo and node.run.start + entry.tokens > kept_tokens and mark_at(t, entry.mark).pins == 0
            undo = undo and hits_seen(mark_at(t, entry.mark).hits, window) == 0 and not marks_a_child(t, i, worker)
            if undo and kept_tokens > node.run.start:
                dropped += trim_entry(t, entry, kept_tokens - node.run.start)
            elif undo:
                dropped += drop_mark(t, entry.mark)
        i = node.parent
        node = node_at(t, i)
    return dropped


cdef uint32_t confirmed_tokens(Tree* t, Walk walk, uint32_t worker) noexcept nogil:
    """How much of the walked prefix the worker is known, not only predicted, to cache. Changes nothing; O(path)."""
    cdef Node* node = node_at(t, walk.node)
    cdef Entry* entry
    while node.parent != NONE:
        entry = find_entry(node, worker)
        if entry != NULL and mark_at(t, entry.mark).confirmed:
            return min(node.run.start + entry.tokens, walk.matched)
        node = node_at(t, node.parent)
    return 0


cdef void confirm_path(Tree* t, uint32_t leaf, uint32_t worker) noexcept nogil:
    """The worker has this path in its cache for certain now. O(path)."""
    cdef Node* node = node_at(t, leaf)
    cdef Entry* entry
    while node.parent != NONE:
        entry = find_entry(node, worker)
        if entry != NULL:
            mark_at(t, entry.mark).confirmed = True
        node = node_at(t, node.parent)


# --- forgetting -------------------------------------------------------------------------------------------------------
# max_bytes is kept by a second-chance queue: nodes are looked at in the order they entered the aging lists, uncached
# ones first; one that was hit since, or still has children, goes to the end instead. The search is bounded, so a
# request is never held up.

cdef int64_t insert_bytes(Tree* t, Walk walk, uint32_t count, uint32_t worker) noexcept nogil:
    """What tree_insert would allocate, exactly, but for blocks it replaces."""
    cdef Node* node = node_at(t, walk.node)
    cdef bint split = walk.inside < node.run.length
    cdef uint32_t marks = 1 + (entry_count(node) if split else 0), entries
    cdef int64_t need = charged(run_bytes(t, count - walk.matched)) if count > walk.matched else 0
    if split:
        need += charged(run_bytes(t, walk.inside)) + charged(run_bytes(t, node.run.length - walk.inside))
        need += 2 * charged(block_bytes(2 * entry_count(node) + 1))
    while worker != NONE and node.parent != NONE:
        if find_entry(node, worker) == NULL:
            marks += 1
            entries = entry_count(node)
            if entries and (node.block == NULL or entries == node.block.room):
                need += charged(block_bytes(entries * 2))
        node = node_at(t, node.parent)
    return need + slab_growth(&t.nodes, 2) + slab_growth(&t.marks, marks) + table_growth(t, 2)


cdef bint make_room(Tree* t, Walk walk, uint32_t count, uint32_t worker) noexcept nogil:
    """Forget old leaves until an insert fits under max_bytes; False if it does not fit after a bounded search."""
    cdef uint32_t steps = 0, idle = 0
    cdef int64_t need
    cdef List* ages
    if t.budget.used + run_bytes(t, count) * 2 + PLENTY <= t.budget.limit:
        return True
    need = insert_bytes(t, walk, count, worker)
    while t.budget.used + need > t.budget.limit:
        ages = &t.unmarked if t.unmarked.oldest != NONE and idle < SHED_IDLE else &t.marked
        if steps == SHED_STEPS or ages.oldest == NONE:
            return False
        idle = 0 if shed_oldest(t, ages, walk.node) else idle + 1
        steps += 1
        need = insert_bytes(t, walk, count, worker)
    return True


cdef bint shed_oldest(Tree* t, List* ages, uint32_t spared) noexcept nogil:
    """Forget the node that entered the list first, or move it to the end if it was hit since, has children or is in
    use."""
    cdef uint32_t i = ages.oldest
    cdef Node* node = node_at(t, i)
    if node.first_child == NONE and i != spared and not node.state & TOUCHED and not is_pinned(t, node):
        forget_leaf(t, i)
        t.shed_nodes += 1
        return True
    node.state &= ~<uint32_t> TOUCHED
    age_remove(t, ages, i)
    age_push(t, ages, i)
    return False


cdef bint is_pinned(Tree* t, Node* node) noexcept nogil:
    return entry_count(node) > 0 and mark_at(t, entries_of(node)[0].mark).pins > 0


cdef uint32_t forget_dead(Tree* t, double now, uint32_t nodes_max) noexcept nogil:
    """Remove nodes cached nowhere and unhit for a window, in the order they lost their last mark; returns how many
    (paper 4.2).

    Stops at the first that was hit lately, so a node goes between one and two windows after its last hit.
    """
    cdef uint64_t window = window_of(now, t.window_seconds)
    cdef uint32_t removed = 0, steps, i
    for steps in range(nodes_max):
        i = t.unmarked.oldest
        if i == NONE or hits_seen(node_at(t, i).hits, window):
            break
        if node_at(t, i).first_child == NONE:
            forget_leaf(t, i)
            removed += 1
        else:
            age_remove(t, &t.unmarked, i)
            age_push(t, &t.unmarked, i)
    return removed
