"""The parts a token radix tree is made of, as C functions without Python objects: nodes and their links, entries and
marks, walks, the split. Owns no state: each function takes the `Tree` it works on. Whole operations on a tree are in
`_tree.pyx`.

Layout, pictures and invariants are in `_layout.pxd`. Nothing here is recursive; whatever allocates does so before it
changes content. Paper section 4.2.

Sections: nodes, entries and marks, reads, split.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.string cimport memcpy, memset

from preble._layout cimport (
    LIVE,
    Entry,
    EntryBlock,
    Mark,
    Node,
    TokenRun,
    Tree,
    Walk,
    WorkerMarks,
    entries_of,
    entry_count,
    generation,
    mark_at,
    node_at,
)
from preble._layout_parts cimport (
    add_slot,
    age_push,
    age_remove,
    block_bytes,
    common_prefix,
    find_child,
    find_entry,
    free_run,
    new_run,
    recency_push_after,
    recency_remove,
    remove_slot,
    run_slots,
    table_reserve,
)
from preble._memory cimport NONE, budget_alloc, budget_free, slab_give, slab_reserve, slab_take


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


cdef uint32_t add_leaf(Tree* t, uint32_t parent, TokenRun* run) noexcept nogil:
    cdef uint32_t i = take_node(t, run, parent)
    link_child(t, parent, i)
    age_push(t, &t.unmarked, i)
    return i


cdef void forget_leaf(Tree* t, uint32_t i) noexcept nogil:
    """Remove a childless, unpinned node with all its marks."""
    cdef Node* node = node_at(t, i)
    while entry_count(node):
        drop_mark(t, entries_of(node)[0].mark)
    age_remove(t, &t.unmarked, i)
    unlink_child(t, i)
    free_node(t, i)


# --- entries and marks ------------------------------------------------------------------------------------------------

cdef int reserve_entry(Tree* t, Node* node) noexcept nogil:
    """Make the next add_entry succeed; -1 when memory is out. The node's marks stay what they are."""
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
        if block.count <= 1:                     # 0: an insert reserved room for a second mark, then failed
            node.only = block.entries[0]
            node.only.worker = node.only.worker if block.count else <uint32_t> NONE
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


# --- split ------------------------------------------------------------------------------------------------------------
# Splitting L at `upper` tokens (see the picture in the .pxd):
#   1  allocate the two new runs, the new node U, its entries and one mark for each entry that reaches below the split
#   2  U takes L's place under the parent; L becomes U's only child and keeps its index
#   3  each entry of L: wholly above the split -> it moves to U with its mark; else U gets a copy of `upper` tokens,
#      its mark linked just newer than L's (leaf-first order holds) or pinned like L's

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
