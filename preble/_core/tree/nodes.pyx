"""The parts a token radix tree is made of, as C functions without Python objects: nodes and their links, entries and
marks, walks, the split. Owns no state: each function takes the `Tree` it works on. Whole operations on a tree are in
`operations.pyx`.

Layout, pictures and invariants are in `layout.pxd`. Nothing here is recursive; whatever allocates does so before it
changes content. Paper section 4.2.

Sections: nodes, entries and marks, what is away, reads, split. Only the reads, `on_gpu` among them, may run while a
writer works; they hold a reader slot.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from preble._core.atomic cimport load32, load64, store32, store64
from preble._core.prefix_compare cimport common_prefix
from preble._core.tree.layout cimport (AWAY_SHIFT, CONFIRMED, FAR, LIVE, NOBODY, STATE_BITS, Entry, EntryBlock, Mark,
                                       Node, TokenRun, Tree, Walk, WorkerMarks, end_of, generation, index_of,
                                       load_block, load_run, load_workers, mark_at, node_at, owner_of, run_end,
                                       state_of, store_block, store_run, worker_of)
from preble._core.tree.parts cimport (add_tokens, age_move, age_push, age_remove, block_bytes, block_marks, entry_count,
                                      find_entry, free_run, gpu_end, marks_of, new_run, place_in, put_gpu_end,
                                      recency_push_after, recency_remove, retire_run, run_slots, set_end, touch_mark,
                                      word_count, words_of)
from preble._core.memory cimport NONE, budget_alloc, budget_free, slab_reserve, slab_take
from preble._core.tree.reclaim cimport MARK, NODE, retire_memory, retire_thing
from preble._core.tree.child_table cimport add_child, find_child, remove_child, replace_child, table_reserve


# --- nodes ------------------------------------------------------------------------------------------------------------

cdef uint32_t take_node(Tree* t, TokenRun* run, uint32_t parent) noexcept nogil:
    """A fresh node owning `run`, not linked anywhere yet. Needs slab_reserve.

    The generation moves on here as well as in free_node: a reader that met the node just as it was freed has noted the
    number between, which no live node has.
    """
    cdef uint32_t i = slab_take(&t.nodes)
    cdef Node* node = node_at(t, i)
    store_run(&node.run, run)
    store_block(&node.block, NULL)
    node.hits = 0
    store64(&node.only, NOBODY)
    store32(&node.parent, parent)
    node.first_child = node.prev_sibling = node.next_sibling = NONE
    node.older = node.newer = NONE
    store32(&node.state, (generation(node) + 1) << STATE_BITS | LIVE)
    return i


cdef void list_child(Tree* t, uint32_t parent, uint32_t i) noexcept nogil:
    """Put node `i` at the head of `parent`'s child list."""
    cdef Node* node = node_at(t, i)
    cdef Node* above = node_at(t, parent)
    node.prev_sibling = NONE
    node.next_sibling = above.first_child
    if above.first_child != NONE:
        node_at(t, above.first_child).prev_sibling = i
    store32(&above.first_child, i)


cdef void unlist_child(Tree* t, uint32_t i) noexcept nogil:
    cdef Node* node = node_at(t, i)
    if node.prev_sibling != NONE:
        node_at(t, node.prev_sibling).next_sibling = node.next_sibling
    else:
        store32(&node_at(t, node.parent).first_child, node.next_sibling)
    if node.next_sibling != NONE:
        node_at(t, node.next_sibling).prev_sibling = node.prev_sibling


cdef void free_node(Tree* t, uint32_t i) noexcept nogil:
    """Retire a node that nothing links to any more. Its generation moves on, so that old references are recognised."""
    cdef Node* node = node_at(t, i)
    store32(&node.state, (generation(node) + 1) << STATE_BITS)       # first: a root is found by its generation alone
    retire_run(t, node.run)
    if node.block != NULL:
        retire_memory(t, node.block, block_bytes(node.block.room))
    retire_thing(t, NULL, NODE, i)


cdef uint32_t add_leaf(Tree* t, uint32_t parent, TokenRun* run) noexcept nogil:
    """A new child of `parent` owning `run`. Needs slab_reserve and table_reserve."""
    cdef uint32_t i = take_node(t, run, parent)
    list_child(t, parent, i)
    age_push(t, &t.unmarked, i)
    add_child(t, parent, run.tokens[0], i)
    return i


cdef void forget_leaf(Tree* t, uint32_t i) noexcept nogil:
    """Remove a childless, unpinned node with all its marks."""
    cdef Node* node = node_at(t, i)
    cdef uint32_t at
    while entry_count(node):
        at = 0
        while end_of(words_of(node)[at]) == 0:
            at += 1
        drop_mark(t, marks_of(node)[at])
    age_remove(t, &t.unmarked, i)
    remove_child(t, node.parent, node.run.tokens[0], node.run.start)
    unlist_child(t, i)
    free_node(t, i)


# --- entries and marks ------------------------------------------------------------------------------------------------
# A node's block is replaced, not moved about in, when it has no room; within a block the words above a new one move up
# by one, from the top, so that a reader going up may meet a worker twice but misses none.

cdef int reserve_entry(Tree* t, Node* node, uint32_t worker) noexcept nogil:
    """Make the next add_entry of `worker` succeed; -1 when memory is out. The node's marks stay what they are."""
    cdef uint32_t live = entry_count(node), room, at, kept = 0
    cdef EntryBlock* old = node.block
    cdef EntryBlock* block
    if live == 0 and old == NULL:
        return 0
    if old != NULL and (old.count < old.room or has_place(old, worker)):
        return 0
    room = max(2, live * 2)
    block = <EntryBlock*> budget_alloc(&t.budget, block_bytes(room))
    if block == NULL:
        return -1
    block.room = room
    for at in range(word_count(node)):
        if end_of(words_of(node)[at]):
            block.words[kept] = words_of(node)[at]
            block_marks(block)[kept] = marks_of(node)[at]
            kept += 1
    block.count = block.live = kept
    store_block(&node.block, block)
    if old != NULL:
        retire_memory(t, old, block_bytes(old.room))
    return 0


cdef bint has_place(EntryBlock* block, uint32_t worker) noexcept nogil:
    """Whether a removed entry of this worker can be filled again."""
    cdef uint32_t at = place_in(block, worker)
    return at < block.count and worker_of(block.words[at]) == worker


cdef void put_word(Node* node, uint32_t worker, uint32_t end, uint32_t mark) noexcept nogil:
    """Enter a word that is not there, or was removed. Needs reserve_entry."""
    cdef EntryBlock* block = node.block
    cdef uint64_t word = <uint64_t> worker << 32 | end
    cdef uint32_t place, at
    if block == NULL:
        store32(&node.only_mark, mark)
        store64(&node.only, word)
        return
    place = place_in(block, worker)
    if place == block.count or worker_of(block.words[place]) != worker:
        at = block.count
        store64(&block.words[at], word if at == place else block.words[at - 1])
        store32(&block_marks(block)[at], mark if at == place else block_marks(block)[at - 1])
        store32(&block.count, at + 1)
        while at > place + 1:
            at -= 1
            store64(&block.words[at], block.words[at - 1])
            store32(&block_marks(block)[at], block_marks(block)[at - 1])
    store32(&block_marks(block)[place], mark)
    store64(&block.words[place], word)
    block.live += 1


cdef uint32_t add_entry(Tree* t, uint32_t i, uint32_t worker, uint32_t end) noexcept nogil:
    """A new mark of `worker` on node `i`, up to `end`, as its newest; returns the mark. Needs reserve_entry and a
    reserved mark."""
    cdef Node* node = node_at(t, i)
    cdef uint32_t index = slab_take(&t.marks)
    cdef Mark* mark = mark_at(t, index)
    cdef WorkerMarks* state = state_of(t, worker)
    if entry_count(node) == 0:
        age_move(t, &t.unmarked, &t.marked, i)
    put_word(node, worker, end, index)
    store64(&mark.hits, 0)
    store32(&mark.node, i)
    mark.worker = worker
    mark.pins = 0
    store32(&mark.flags, 0)
    recency_push_after(t, &state.recency, state.recency.newest, index)
    add_tokens(state, end - node.run.start)
    state.marks += 1
    return index


cdef void remove_entry(Tree* t, uint32_t i, uint32_t worker) noexcept nogil:
    """Take the worker's entry out of node `i`; an unmarked node moves to the other aging list, and keeps the worker as
    its home."""
    cdef Node* node = node_at(t, i)
    cdef EntryBlock* block = node.block
    if block == NULL:
        store64(&node.only, <uint64_t> worker << 32)
    else:
        store64(&block.words[place_in(block, worker)], <uint64_t> worker << 32)
        block.live -= 1
        if block.live <= 1:
            shrink_block(t, node)
    if entry_count(node) == 0:
        age_move(t, &t.marked, &t.unmarked, i)


cdef void shrink_block(Tree* t, Node* node) noexcept nogil:
    """A block with one entry or none is not worth its memory."""
    cdef EntryBlock* block = node.block
    cdef uint64_t left = NOBODY
    cdef uint32_t at
    for at in range(block.count):
        if end_of(block.words[at]):
            left = block.words[at]
            store32(&node.only_mark, block_marks(block)[at])
    store64(&node.only, left)
    store_block(&node.block, NULL)
    retire_memory(t, block, block_bytes(block.room))


cdef int64_t drop_mark(Tree* t, uint32_t index) noexcept nogil:
    """Remove an unpinned mark; returns its tokens."""
    cdef Mark* mark = mark_at(t, index)
    cdef Node* node = node_at(t, mark.node)
    cdef uint32_t worker = mark.worker
    cdef WorkerMarks* state = owner_of(t, worker)
    cdef int64_t tokens = find_entry(node, worker).end - node.run.start
    if mark.flags >> AWAY_SHIFT:
        put_gpu_end(t, state, mark, node.run.start + tokens, node.run.start + tokens, 0)
    recency_remove(t, &state.recency, index)
    add_tokens(state, -tokens)
    state.marks -= 1
    remove_entry(t, mark.node, worker)
    retire_thing(t, NULL, MARK, index)
    t.version += 1
    return tokens


cdef int64_t trim_entry(Tree* t, uint32_t i, uint32_t worker, uint32_t end) noexcept nogil:
    """Let the worker's entry at node `i` reach only to `end`, past the node's start; returns how many tokens were
    dropped."""
    cdef Node* node = node_at(t, i)
    cdef Entry entry = find_entry(node, worker)
    cdef int64_t dropped = <int64_t> entry.end - end
    if dropped <= 0:
        return 0
    if mark_at(t, entry.mark).flags >> AWAY_SHIFT:
        cut_away(t, state_of(t, worker), mark_at(t, entry.mark), entry.end, end)
    set_end(node, worker, entry, end)
    add_tokens(state_of(t, worker), -dropped)
    t.version += 1
    return dropped


cdef void cut_away(Tree* t, WorkerMarks* state, Mark* mark, uint32_t before, uint32_t end) noexcept nogil:
    """A mark some of whose tokens are away ends at `end` from now on, not at `before`."""
    cdef uint32_t at = min(gpu_end(mark.flags, before), end), far = mark.flags & FAR
    put_gpu_end(t, state, mark, before, before, 0)
    put_gpu_end(t, state, mark, end, at, far)


# --- what is away: not in the GPU's memory, but in the host's or on disk ----------------------------------------------

cdef void send_away(Tree* t, uint32_t i, uint32_t worker, uint32_t start, bint far) noexcept nogil:
    """The worker's copy of node `i` from position `start` on has left the GPU's memory; `far`: it is not in host
    memory, either. A prompt finds nothing on the GPU from there on."""
    cdef Node* node = node_at(t, i)
    cdef Entry entry = find_entry(node, worker)
    cdef Mark* mark
    cdef uint32_t at
    if entry.end == 0 or start >= entry.end:
        return
    mark = mark_at(t, entry.mark)
    at = min(max(start, node.run.start), gpu_end(mark.flags, entry.end))
    if at == gpu_end(mark.flags, entry.end) and (not far or mark.flags & FAR):
        return
    put_gpu_end(t, state_of(t, worker), mark, entry.end, at, <uint32_t> FAR if far else mark.flags & FAR)
    t.version += 1


cdef void bring_back(Tree* t, uint32_t i, uint32_t worker, uint32_t start, uint32_t end) noexcept nogil:
    """What the worker caches of the path to node `i`, from position `start` to `end`, is in the GPU's memory; the path
    becomes its newest. O(path)."""
    cdef Node* node = node_at(t, i)
    cdef Entry entry
    cdef Mark* mark
    cdef uint32_t away
    while node.parent != NONE:
        entry = find_entry(node, worker)
        if entry.end:
            mark = mark_at(t, entry.mark)
            away = gpu_end(mark.flags, entry.end)
            if start <= away < entry.end and away < end:
                put_gpu_end(t, state_of(t, worker), mark, entry.end, min(end, entry.end), mark.flags & FAR)
                t.version += 1
            touch_mark(t, entry.mark)
        node = node_at(t, node.parent)


cdef void bring_near(Tree* t, uint32_t i, uint32_t worker, uint32_t start, uint32_t end) noexcept nogil:
    """What the worker has away of the path to node `i`, from position `start` to `end`, is in host memory. O(path)."""
    cdef Node* node = node_at(t, i)
    cdef Entry entry
    cdef Mark* mark
    while node.parent != NONE and run_end(node.run) > start:
        entry = find_entry(node, worker)
        if entry.end and entry.end <= end:
            mark = mark_at(t, entry.mark)
            if mark.flags & FAR and gpu_end(mark.flags, entry.end) >= start:
                store32(&mark.flags, mark.flags & ~<uint32_t> FAR)
                t.version += 1
        node = node_at(t, node.parent)


cdef uint32_t on_gpu(Tree* t, Walk walk, uint32_t worker, uint32_t held, uint32_t* far) noexcept nogil:
    """How much of the `held` tokens that a worker caches of the walked prefix is in its GPU's memory, from the prompt's
    start on; `far` receives how many of the rest are in nodes some of which is not in host memory, either. For readers,
    too, as `confirmed_tokens`. O(path)."""
    cdef uint32_t i = walk.node, end = held, at, flags
    cdef Entry entry
    far[0] = 0
    while i != NONE and load32(&node_at(t, i).parent) != NONE:
        entry = seen_entry(node_at(t, i), worker)
        if entry.end:
            flags = load32(&mark_at(t, entry.mark).flags)
            at = gpu_end(flags, entry.end)
            if at < min(entry.end, held):
                end = min(end, at)
                if flags & FAR:
                    far[0] += min(entry.end, held) - at
        i = load32(&node_at(t, i).parent)
    return end


# --- reads ------------------------------------------------------------------------------------------------------------

cdef Walk at_root(Tree* t, uint32_t root) noexcept nogil:
    """Where every prompt of a namespace begins; NONE is passed on."""
    cdef Walk walk
    walk.node = root
    walk.inside = walk.matched = 0
    walk.generation = generation(node_at(t, root)) if root != NONE else 0
    return walk


cdef Walk tree_walk(Tree* t, Walk walk, const int32_t* tokens, uint32_t count) noexcept nogil:
    """Follow `tokens` down from `walk` as far as the tree goes. Changes nothing; O(matched tokens). Reads only
    tokens[walk.matched:count].

    A child may have been split since it was found: its run then starts further down, and it is looked for again.
    """
    cdef TokenRun* run = load_run(&node_at(t, walk.node).run)
    cdef uint32_t child, step
    walk.inside = walk.matched - run.start
    while True:
        step = min(run.length - walk.inside, count - walk.matched)
        if step:
            step = common_prefix(&run.tokens[walk.inside], tokens + walk.matched, step)
            walk.inside += step
            walk.matched += step
        if walk.inside < run.length or walk.matched == count:
            return walk
        child = find_child(t, walk.node, tokens[walk.matched], walk.matched)
        if child == NONE:
            return walk
        run = load_run(&node_at(t, child).run)
        if walk.matched < run.start:
            run = load_run(&node_at(t, walk.node).run)
            walk.inside = walk.matched - run.start
            continue
        walk.node = child
        walk.inside = walk.matched - run.start
        walk.generation = generation(node_at(t, child))


cdef bint walk_holds(Tree* t, Walk walk) noexcept nogil:
    """Whether a walk made before the lock was taken still leads where it led. For writers."""
    cdef Node* node = node_at(t, walk.node)
    return (node.state & LIVE and generation(node) == walk.generation and node.run.start + walk.inside == walk.matched
            and walk.inside <= node.run.length)


cdef uint32_t held_at(Tree* t, uint32_t i, uint32_t matched, uint32_t* held, uint32_t* met, uint32_t met_count,
                      uint32_t workers) noexcept nogil:
    """Note the entries of node `i`: held[worker] = its end, at most `matched`, where none was noted before; new workers
    are added to `met`. Returns how many are met now."""
    cdef Node* node = node_at(t, i)
    cdef EntryBlock* block = load_block(&node.block)
    cdef uint64_t* words = &block.words[0] if block != NULL else &node.only
    cdef WorkerMarks* states = load_workers(&t.workers)
    cdef uint32_t at = 0, worker, end
    cdef uint64_t word
    while at < (load32(&block.count) if block != NULL else 1):   # words may move up while this looks
        word = load64(&words[at])
        worker = index_of(worker_of(word))
        end = end_of(word)
        if end and worker < workers and held[worker] == 0 and load32(&states[worker].key) == worker_of(word):
            held[worker] = end if end < matched else matched
            met[met_count] = worker
            met_count += 1
        at += 1
    return met_count


cdef uint64_t last_word(Node* node) noexcept nogil:
    """The entry of a node that reaches furthest, of equals that of the lowest worker; where there is none, the last one
    that there was, its end 0. O(entries)."""
    cdef EntryBlock* block = load_block(&node.block)
    cdef uint64_t word, last
    cdef uint32_t at
    if block == NULL:
        return load64(&node.only)
    last = NOBODY
    for at in range(load32(&block.count)):
        word = load64(&block.words[at])
        if end_of(word) > end_of(last) or (end_of(word) == end_of(last) and index_of(worker_of(word)) < index_of(
                worker_of(last))):
            last = word
    return last


cdef uint32_t held_on_path(Tree* t, Walk walk, uint32_t* held, uint32_t* met, uint32_t workers) noexcept nogil:
    """For each worker the tokens of the walked prefix it is estimated to cache, into `held`, all zero before; those
    above zero are listed in `met`. Returns how many. Changes nothing; O(marks on the path).

    Climbs from the deepest node: by prefix closure the first mark met of a worker is its deepest.
    """
    cdef uint32_t i = walk.node, count = 0
    while i != NONE and load32(&node_at(t, i).parent) != NONE:
        count = held_at(t, i, walk.matched, held, met, count, workers)
        i = load32(&node_at(t, i).parent)
    return count


cdef uint32_t confirmed_tokens(Tree* t, Walk walk, uint32_t worker) noexcept nogil:
    """How much of the walked prefix the worker is known, not only predicted, to cache. For readers, too: one that meets
    a block whose words are just moving up may miss a mark or take another's. O(path)."""
    cdef uint32_t i = walk.node
    cdef Entry entry
    while i != NONE and load32(&node_at(t, i).parent) != NONE:
        entry = seen_entry(node_at(t, i), worker)
        if entry.end and load32(&mark_at(t, entry.mark).flags) & CONFIRMED:
            return min(entry.end, walk.matched)
        i = load32(&node_at(t, i).parent)
    return 0


cdef Entry seen_entry(Node* node, uint32_t worker) noexcept nogil:
    """What `find_entry` finds, for readers. O(log entries)."""
    cdef EntryBlock* block = load_block(&node.block)
    cdef uint64_t* words = &block.words[0] if block != NULL else &node.only
    cdef uint32_t low = 0, high = load32(&block.count) if block != NULL else 1, count = high, middle
    cdef Entry entry
    while low < high:
        middle = (low + high) >> 1
        if worker_of(load64(&words[middle])) < worker:
            low = middle + 1
        else:
            high = middle
    entry.at = low
    entry.end = 0
    entry.mark = NONE
    if low < count and worker_of(load64(&words[low])) == worker:
        entry.end = end_of(load64(&words[low]))
        entry.mark = load32(&block_marks(block)[low]) if block != NULL else load32(&node.only_mark)
    return entry


# --- split ------------------------------------------------------------------------------------------------------------
# Splitting L, below P, at `upper` tokens (see the picture in the .pxd). Each step leaves a tree that a reader can use:
#   1  allocate the two new runs, the new node U, its entries and one mark for each entry that reaches below the split
#   2  build U: P above it, L below it, an entry for each of L's, cut off at the split
#   3  the table leads from U to L, which still looks like the whole; then from P to U instead of L
#   4  L hangs below U, then gets the lower run; entries that end above the split leave it

cdef int split_node(Tree* t, uint32_t lower, uint32_t upper) noexcept nogil:
    """Split node `lower` after its first `upper` tokens. Content is unchanged; -1 when memory is out, nothing
    changed."""
    cdef Node* low = node_at(t, lower)
    cdef TokenRun* old = low.run
    cdef uint32_t count = entry_count(low), i, parent = low.parent
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
    i = take_node(t, head, parent)                                                                                # 2
    node_at(t, i).hits = low.hits
    if block != NULL:
        block.room = count
        block.count = block.live = 0
        node_at(t, i).block = block
    copy_entries(t, lower, i)
    unlist_child(t, lower)
    list_child(t, parent, i)
    list_child(t, i, lower)
    add_child(t, i, tail.tokens[0], lower)                                                                        # 3
    replace_child(t, parent, head.tokens[0], head.start, i)
    store32(&low.parent, i)                                                                                       # 4
    store_run(&low.run, tail)
    retire_run(t, old)
    age_push(t, &t.marked if count else &t.unmarked, i)
    drop_upper_entries(t, lower)
    return 0


cdef void copy_entries(Tree* t, uint32_t lower, uint32_t i) noexcept nogil:
    """Give the upper node `i` an entry for each of the lower one's. One that goes on below gets a mark of its own, one
    that ends above takes its mark along."""
    cdef Node* low = node_at(t, lower)
    cdef Node* top = node_at(t, i)
    cdef uint32_t at, mark, worker, end
    if entry_count(low) == 0:
        store64(&top.only, low.only)
    for at in range(word_count(low)):
        worker = worker_of(words_of(low)[at])
        end = end_of(words_of(low)[at])
        mark = marks_of(low)[at]
        if end == 0:
            continue
        if end <= run_end(top.run):
            store32(&mark_at(t, mark).node, i)
        else:
            end = run_end(top.run)
            mark = copy_mark_newer(t, mark, i)
        put_word(top, worker, end, mark)


cdef uint32_t copy_mark_newer(Tree* t, uint32_t index, uint32_t i) noexcept nogil:
    """A mark for the upper node `i`, like mark `index` and just newer than it."""
    cdef uint32_t copied = slab_take(&t.marks)
    cdef Mark* mark = mark_at(t, copied)
    cdef Mark* source = mark_at(t, index)
    cdef WorkerMarks* state = owner_of(t, source.worker)
    store64(&mark.hits, source.hits)
    store32(&mark.node, i)
    mark.worker = source.worker
    mark.pins = source.pins
    store32(&mark.flags, source.flags & CONFIRMED)
    if source.flags >> AWAY_SHIFT:
        split_away(mark, source, run_end(node_at(t, i).run))
    if mark.pins == 0:
        recency_push_after(t, &state.recency, index, copied)
    state.marks += 1
    return copied


cdef void split_away(Mark* upper, Mark* lower, uint32_t border) noexcept nogil:
    """A mark some of whose tokens are away is split at position `border`. What is away adds up to as much as before."""
    cdef uint32_t at = gpu_end(lower.flags, border), far = lower.flags & FAR
    if at < border:
        store32(&upper.flags, upper.flags | far | (at + 1) << AWAY_SHIFT)
        store32(&lower.flags, lower.flags & ((1 << AWAY_SHIFT) - 1) | (border + 1) << AWAY_SHIFT)


cdef void drop_upper_entries(Tree* t, uint32_t lower) noexcept nogil:
    """Take out of the lower node what ends above it; those marks belong to the upper node now."""
    cdef Node* low = node_at(t, lower)
    cdef EntryBlock* block = low.block
    cdef uint32_t at, before = entry_count(low)
    if block == NULL:
        if end_of(low.only) <= low.run.start:
            store64(&low.only, <uint64_t> worker_of(low.only) << 32)
    else:
        for at in range(block.count):
            if end_of(block.words[at]) and end_of(block.words[at]) <= low.run.start:
                store64(&block.words[at], <uint64_t> worker_of(block.words[at]) << 32)
                block.live -= 1
        if block.live <= 1:
            shrink_block(t, low)
    if before and entry_count(low) == 0:
        age_move(t, &t.marked, &t.unmarked, lower)
