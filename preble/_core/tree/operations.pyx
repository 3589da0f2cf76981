"""The operations on a token radix tree, as C functions without Python objects. Owns the algorithms, no state: each
function takes the `Tree` it works on. The Python face is `_radix.pyx`; KV slots are in `batching/_kv_slots.pyx`.

Layout, pictures and invariants are in `layout.pxd`, nodes, marks and splits in `nodes.pyx`, the small parts in
`parts.pxd`. Nothing here is recursive; whatever allocates does so before it changes content. Paper section 4.2.

Sections: insert, eviction, corrections, room under max_bytes, forgetting.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from preble._core.atomic cimport FREE_THREADED, store32, store64
from preble._core.tree.layout cimport (AWAITED, AWAY_SHIFT, CONFIRMED, EPOCH_MAX, FAR, INDEX_BITS, TOUCHED, Entry, List,
                                       Mark, Node, TokenRun, Tree, Walk, WorkerMarks, end_of, mark_at, node_at, run_end,
                                       state_of)
from preble._core.tree.parts cimport (add_away, add_tokens, age_move, block_bytes, entry_count, find_entry, gpu_end,
                                      hits_add, hits_seen, hits_take, marks_a_child, new_run, put_gpu_end, ready_run,
                                      run_bytes, set_end, touch_mark, window_of)
from preble._core.memory cimport NONE, charged, slab_bytes, slab_growth, slab_reserve
from preble._core.tree.nodes cimport (add_entry, add_leaf, bring_back, drop_mark, forget_leaf, reserve_entry,
                                      split_node, trim_entry)
from preble._core.tree.reclaim cimport reclaim_soon
from preble._core.tree.child_table cimport table_bytes, table_growth, table_reserve

cdef enum:
    SHED_STEPS = 256             # aging nodes looked at in one insert, at most
    SHED_IDLE = 8                # uncached nodes passed over in a row before cached ones are tried
    LATE_PART = 4                # of its capacity a worker may be estimated to hold more while its report is awaited

cdef struct Needs:               # what an operation will allocate, at most
    int64_t bytes                # runs and entry blocks
    uint32_t nodes               # of the slab and the child table
    uint32_t marks


# --- insert -----------------------------------------------------------------------------------------------------------
# Inserting a prompt that was walked to (node, inside):
#   1  make room under max_bytes by forgetting old leaves; if that fails only what is known already is used
#   2  split the node if the prompt leaves it in the middle (content stays the same)
#   3  allocate the new leaf and room for every mark that is missing on the path
#   4  link the leaf; mark, count and touch the path from leaf to root
#   5  evict the worker's oldest leaves until it is within its limit; where host memory is behind the GPU's, let the
#      oldest go there until the rest fits

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
        t.refused_tokens += count - known_part(t, &walk, worker)
        count = walk.matched
    if walk.inside < node_at(t, walk.node).run.length:                                      # 2
        if split_node(t, walk.node, walk.inside):
            return -1
        walk.node = node_at(t, walk.node).parent
    if worker != NONE and reserve_path(t, walk.node, worker, count > walk.matched):         # 3
        return -1
    if count > walk.matched:
        if slab_reserve(&t.nodes, &t.budget, 1) or table_reserve(t, 1):
            return -1
        run = ready_run(t, walk.matched, count - walk.matched) if FREE_THREADED else NULL
        if run == NULL:
            run = new_run(t, walk.matched, tokens + walk.matched, NULL, count - walk.matched)
        if run == NULL:
            return -1
        walk.node = add_leaf(t, walk.node, run)                                             # 4
    mark_path(t, walk.node, worker, is_hit, now)
    if run != NULL:
        untouch(node_at(t, walk.node))                         # its first request is no second chance
    if worker != NONE and state_of(t, worker).tokens > state_of(t, worker).limit:           # 5
        evict_tokens(t, worker, state_of(t, worker).tokens - state_of(t, worker).limit)
    if worker != NONE and state_of(t, worker).below:
        send_oldest_away(t, state_of(t, worker))
    leaf[0] = walk.node
    return 0


cdef uint32_t known_part(Tree* t, Walk* walk, uint32_t worker) noexcept nogil:
    """Move a walk back to the end of a node, as deep as the worker's marks still fit under max_bytes or are there
    already; returns the tokens matched then."""
    if walk.inside < node_at(t, walk.node).run.length:
        step_up(t, walk)
    if not fits(t, insert_needs(t, walk[0], walk.matched, worker)):
        while walk.matched and worker != NONE and find_entry(node_at(t, walk.node), worker).end == 0:
            step_up(t, walk)
    return walk.matched


cdef void step_up(Tree* t, Walk* walk) noexcept nogil:
    walk.matched = node_at(t, walk.node).run.start
    walk.node = node_at(t, walk.node).parent
    walk.inside = node_at(t, walk.node).run.length


cdef int reserve_path(Tree* t, uint32_t i, uint32_t worker, uint32_t leaves) noexcept nogil:
    """Room for a mark of `worker` on each node from `i` to the root that lacks one, and on `leaves` new ones below."""
    cdef Node* node = node_at(t, i)
    cdef uint32_t missing = leaves
    while node.parent != NONE:
        if find_entry(node, worker).end == 0:
            missing += 1
            if reserve_entry(t, node, worker):
                return -1
        node = node_at(t, node.parent)
    return slab_reserve(&t.marks, &t.budget, missing)


cdef void mark_path(Tree* t, uint32_t i, uint32_t worker, bint is_hit, double now) noexcept nogil:
    """From leaf to root: mark whole nodes as cached on `worker`, count the hit, make them the worker's newest."""
    cdef uint64_t window = window_of(now, t.window_seconds)
    cdef Node* node = node_at(t, i)
    cdef Mark* mark
    while node.parent != NONE:
        if not node.state & TOUCHED:
            store32(&node.state, node.state | TOUCHED)
        if is_hit:
            node.hits = hits_add(node.hits, window)
            if worker == NONE and entry_count(node) == 0:      # forget_dead wants the unmarked by their last use
                age_move(t, &t.unmarked, &t.unmarked, i)
        if worker != NONE:
            mark = mark_node(t, i, worker)
            if is_hit:
                store64(&mark.hits, hits_add(mark.hits, window))
        i = node.parent
        node = node_at(t, i)


cdef Mark* mark_node(Tree* t, uint32_t i, uint32_t worker) noexcept nogil:
    """Let the worker's mark cover all of node `i`, as its newest. What is added is a prediction. Needs reserve_path."""
    cdef Node* node = node_at(t, i)
    cdef Entry entry = find_entry(node, worker)
    cdef Mark* mark
    if entry.end == 0:
        t.version += 1
        return mark_at(t, add_entry(t, i, worker, run_end(node.run)))
    mark = mark_at(t, entry.mark)
    touch_mark(t, entry.mark)
    if entry.end < run_end(node.run):
        add_tokens(state_of(t, worker), run_end(node.run) - entry.end)
        if mark.flags >> AWAY_SHIFT:
            add_away(t, state_of(t, worker), run_end(node.run) - entry.end)
        set_end(node, worker, entry, run_end(node.run))
        t.version += 1
    return mark


cdef void untouch(Node* node) noexcept nogil:
    store32(&node.state, node.state & ~<uint32_t> TOUCHED)


# --- eviction ---------------------------------------------------------------------------------------------------------
# What is evicted here is an estimate: engines choose their victims when they need the memory, among whole blocks. One
# that reports what it drops is estimated to hold the rest, so there the estimate waits until its report must be late.

cdef int64_t limit_of(int64_t capacity, int64_t below, bint reports_evictions) noexcept nogil:
    """Tokens that a worker's marks may cover; `reports_evictions`: its engine reports what it drops. Host memory, where
    there is any, holds a copy of what is in the GPU's."""
    return max(capacity + (capacity // LATE_PART if reports_evictions else 0), below)


cdef void set_limit(Tree* t, uint32_t index, bint reports_evictions) noexcept nogil:
    """Bound a worker's marks by its capacity or, if its engine reports what it drops, further up."""
    cdef WorkerMarks* state = &t.workers[index]
    state.evictions_reported = reports_evictions
    state.limit = limit_of(state.capacity, state.below, reports_evictions)
    if state.tokens > state.limit:
        evict_tokens(t, state.key, state.tokens - state.limit)
    if state.below:
        send_oldest_away(t, state)


cdef void send_oldest_away(Tree* t, WorkerMarks* state) noexcept nogil:
    """Where a worker's marks cover more than fits into the GPU's memory, its oldest tokens go to the host's, leaves
    first, the last node in part. The report of an engine that sends any may be late by a part of its capacity.
    O(marks that go), and those that are away and were used since."""
    cdef int64_t need = state.tokens - state.away - state.capacity, here
    cdef uint32_t i, end, start
    cdef Mark* mark
    if need <= 0:
        return
    if (state.moves_reported or state.evictions_reported) and need <= state.capacity // LATE_PART:
        return
    i = state.recency.warm if state.recency.warm != NONE else state.recency.oldest
    while i != NONE:
        mark = mark_at(t, i)
        start = node_at(t, mark.node).run.start
        end = find_entry(node_at(t, mark.node), state.key).end
        here = gpu_end(mark.flags, end) - start
        if here > need:
            put_gpu_end(t, state, mark, end, <uint32_t> (start + here - need), mark.flags & FAR)
            break
        put_gpu_end(t, state, mark, end, start, mark.flags & FAR)
        need -= here
        i = mark.newer
    state.recency.warm = i
    t.version += 1


cdef void load_path(Tree* t, uint32_t i, uint32_t worker, uint32_t start, uint32_t end) noexcept nogil:
    """What the worker caches of the path to node `i`, from position `start` to `end`, has come into the GPU's memory,
    and something else has left it. O(path + marks that go)."""
    bring_back(t, i, worker, start, end)
    if state_of(t, worker).below:
        send_oldest_away(t, state_of(t, worker))


cdef int64_t evict_tokens(Tree* t, uint32_t worker, int64_t need) noexcept nogil:
    """Unmark the worker's oldest tokens, leaves first, the last node in part; returns how many (fewer if all is
    pinned)."""
    cdef int64_t freed = 0
    cdef uint32_t oldest, i
    cdef Entry entry
    while freed < need and state_of(t, worker).recency.oldest != NONE:
        oldest = state_of(t, worker).recency.oldest
        i = mark_at(t, oldest).node
        entry = find_entry(node_at(t, i), worker)
        if entry.end - node_at(t, i).run.start > need - freed:
            freed += trim_entry(t, i, worker, <uint32_t> (entry.end - (need - freed)))
        else:
            freed += drop_mark(t, oldest)
    return freed


cdef int64_t clear_marks(Tree* t, uint32_t index) noexcept nogil:
    """A worker's cache is empty: all its marks become ghosts, and it is nobody's home; returns the tokens that they
    covered. O(1): the epoch of its key moves on, and its recency list is hung onto that of the ghosts. Its marks must
    not be pinned.

    Once in 65,534 times the epochs begin anew, and then there must be no ghosts: they are swept first.
    """
    cdef WorkerMarks* state = &t.workers[index]
    cdef int64_t dropped = state.tokens
    if state.marks:
        hang_onto_ghosts(t, state)
    if state.key >> INDEX_BITS == EPOCH_MAX:
        store32(&state.key, NONE)
        sweep_ghosts(t, t.ghost.marks)
        store32(&state.key, index)
    else:
        store32(&state.key, state.key + (1 << INDEX_BITS))
    return dropped


cdef void hang_onto_ghosts(Tree* t, WorkerMarks* state) noexcept nogil:
    """Give all marks of a worker, of which there are some, to nobody."""
    if t.ghost.recency.newest == NONE:
        t.ghost.recency.oldest = state.recency.oldest
    else:
        store32(&mark_at(t, t.ghost.recency.newest).newer, state.recency.oldest)
        mark_at(t, state.recency.oldest).older = t.ghost.recency.newest
    t.ghost.recency.newest = state.recency.newest
    t.ghost.tokens += state.tokens
    t.ghost.away += state.away
    t.ghost.marks += state.marks
    store32(&state.recency.oldest, NONE)
    state.recency.newest = state.recency.warm = NONE
    add_tokens(state, -state.tokens)
    add_away(t, state, -state.away)
    state.marks = 0
    t.version += 1


cdef uint32_t sweep_ghosts(Tree* t, uint32_t marks_max) noexcept nogil:
    """Give back the memory of ghosts, no more than `marks_max` of them; returns how many."""
    cdef uint32_t swept = 0
    while swept < marks_max and t.ghost.recency.oldest != NONE:
        drop_mark(t, t.ghost.recency.oldest)
        swept += 1
    return swept


# --- corrections: what engines report and requests give back ----------------------------------------------------------

cdef int64_t drop_subtree(Tree* t, uint32_t top, uint32_t worker) noexcept nogil:
    """Drop the worker's marks on `top` and below; returns the tokens. Visits only nodes the worker marks, and their
    children."""
    cdef uint32_t i = top
    cdef Entry entry
    cdef int64_t dropped = 0
    cdef bint down
    while True:
        entry = find_entry(node_at(t, i), worker)
        down = False
        if entry.end and mark_at(t, entry.mark).pins == 0:
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
    cdef Entry entry = find_entry(node, worker)
    if entry.end == 0:
        return 0
    if kept_tokens <= node.run.start:
        return drop_subtree(t, i, worker)
    if entry.end <= kept_tokens:
        return 0
    return drop_children(t, i, worker, NONE) + trim_entry(t, i, worker, kept_tokens)


cdef int64_t drop_beside(Tree* t, uint32_t leaf, uint32_t worker, uint32_t kept_tokens) noexcept nogil:
    """The worker held only `kept_tokens` of this path before computing it again: what hangs off the rest is gone;
    returns tokens."""
    cdef uint32_t i = leaf, below = NONE
    cdef Node* node = node_at(t, i)
    cdef int64_t dropped = 0
    while node.parent != NONE and node.run.start + node.run.length > kept_tokens:
        if find_entry(node, worker).end:
            dropped += drop_children(t, i, worker, below)
        below = i
        i = node.parent
        node = node_at(t, i)
    return dropped


cdef int64_t take_back(Tree* t, uint32_t leaf, uint32_t worker, uint32_t kept_tokens, double booked_at,
                       double now) noexcept nogil:
    """A request ended before it was computed: take its hit off the path, and its marks beyond `kept_tokens` where no
    other request of the worker has passed since. Returns the tokens unmarked."""
    cdef uint64_t window = window_of(now, t.window_seconds), then = window_of(booked_at, t.window_seconds)
    cdef uint32_t i = leaf
    cdef Node* node = node_at(t, i)
    cdef Entry entry
    cdef Mark* mark
    cdef int64_t dropped = 0
    cdef bint undo = True
    while node.parent != NONE:
        node.hits = hits_take(node.hits, window, then)
        entry = find_entry(node, worker)
        if entry.end:
            mark = mark_at(t, entry.mark)
            store64(&mark.hits, hits_take(mark.hits, window, then))
            undo = undo and entry.end > kept_tokens and mark.pins == 0
            undo = undo and hits_seen(mark.hits, window) == 0 and not marks_a_child(t, i, worker, NONE)
            if undo and kept_tokens > node.run.start:
                dropped += trim_entry(t, i, worker, kept_tokens)
            elif undo:
                dropped += drop_mark(t, entry.mark)
        i = node.parent
        node = node_at(t, i)
    return dropped


cdef void await_blocks(Tree* t, uint32_t leaf, uint32_t worker) noexcept nogil:
    """A prompt that ends at node `leaf` was sent to the worker: its engine should report new blocks up to there."""
    cdef Entry entry = find_entry(node_at(t, leaf), worker)
    if entry.end:
        store32(&mark_at(t, entry.mark).flags, mark_at(t, entry.mark).flags | AWAITED)


cdef void confirm_path(Tree* t, uint32_t leaf, uint32_t worker) noexcept nogil:
    """The worker has this path in its cache for certain now. Where a mark is confirmed those above it are too."""
    cdef Node* node = node_at(t, leaf)
    cdef Entry entry
    while node.parent != NONE:
        entry = find_entry(node, worker)
        if entry.end:
            if mark_at(t, entry.mark).flags & CONFIRMED:
                return
            store32(&mark_at(t, entry.mark).flags, mark_at(t, entry.mark).flags | CONFIRMED)
        node = node_at(t, node.parent)


# --- room under max_bytes ---------------------------------------------------------------------------------------------
# A second-chance queue: nodes are looked at in the order they entered the aging lists, uncached ones first; one that
# was hit since, or still has children, goes to the end instead. The search is bounded, so a request is never held up.

cdef Needs insert_needs(Tree* t, Walk walk, uint32_t count, uint32_t worker) noexcept nogil:
    """What tree_insert would take, at most. Changes nothing; O(path)."""
    cdef Node* node = node_at(t, walk.node)
    cdef uint32_t entries = entry_count(node)
    cdef Needs needs
    needs.bytes = needs.nodes = needs.marks = 0
    if count > walk.matched:
        needs.nodes = 1
        needs.marks = worker != NONE
        needs.bytes = charged(run_bytes(t, count - walk.matched))
    if walk.inside < node.run.length:
        needs.nodes += 1
        needs.marks += entries
        needs.bytes += charged(run_bytes(t, walk.inside)) + charged(run_bytes(t, node.run.length - walk.inside))
        needs.bytes += 2 * charged(block_bytes(2 * entries + 1))
    while worker != NONE and node.parent != NONE:
        if find_entry(node, worker).end == 0:
            needs.marks += 1
            entries = entry_count(node)
            if node.block != NULL or entries:
                needs.bytes += charged(block_bytes(2 * entries + 2))
        node = node_at(t, node.parent)
    return needs


cdef Needs needs_at_most(Tree* t, Walk walk, uint32_t count) noexcept nogil:
    """No less than insert_needs, in O(1): as if each token matched were a node that all workers mark."""
    cdef int64_t path = min(walk.matched, t.nodes.live) + 2
    cdef Needs needs
    needs.nodes = 2
    needs.marks = <uint32_t> path + t.worker_end
    needs.bytes = charged(run_bytes(t, count)) + charged(run_bytes(t, node_at(t, walk.node).run.length)) + 64
    needs.bytes += path * charged(block_bytes(2 * t.worker_end + 1))
    return needs


cdef bint fits(Tree* t, Needs needs) noexcept nogil:
    """Whether all that can be allocated under max_bytes. O(1)."""
    return (t.budget.used + needs.bytes + slab_growth(&t.nodes, needs.nodes) + slab_growth(&t.marks, needs.marks)
            + table_growth(t, needs.nodes)) <= t.budget.limit


cdef int64_t fixed_bytes(Tree* t) noexcept nogil:
    """What forgetting never gives back: slabs, table, workers."""
    return (slab_bytes(&t.nodes) + slab_bytes(&t.marks) + charged(table_bytes(t.table.size)) + workers_bytes(t))


cdef int64_t workers_bytes(Tree* t) noexcept nogil:
    """What the workers' rows take."""
    return charged(<int64_t> t.worker_room * sizeof(WorkerMarks))


cdef bint make_room(Tree* t, Walk walk, uint32_t count, uint32_t worker) noexcept nogil:
    """Forget old leaves until an insert fits under max_bytes; False if it does not fit after a bounded search.

    A prompt that would not fit into an empty tree costs nobody else's place.
    """
    if fits(t, needs_at_most(t, walk, count)):
        return True
    if fixed_bytes(t) + run_bytes(t, count - walk.matched) > t.budget.limit:
        return False
    return shed_until(t, insert_needs(t, walk, count, worker), walk.node, SHED_STEPS)


cdef bint make_room_for_root(Tree* t, int64_t name_bytes, uint32_t steps_max) noexcept nogil:
    """Forget old leaves until one more root and its name fit, looking at no more than `steps_max` nodes; False if they
    do not."""
    cdef Needs needs
    needs.bytes = charged(run_bytes(t, 0)) + name_bytes
    needs.nodes = 1
    needs.marks = 0
    return shed_until(t, needs, NONE, steps_max)


cdef bint shed_until(Tree* t, Needs needs, uint32_t spared, uint32_t steps_max) noexcept nogil:
    """Give aging nodes their turns until something fits; False if it does not after `steps_max`."""
    cdef uint32_t steps = 0, idle = 0
    while not fits(t, needs):
        if steps == steps_max or not shed_next(t, spared, &idle):
            return False
        steps += 1
        reclaim_soon(t)
    return True


cdef bint shed_next(Tree* t, uint32_t spared, uint32_t* idle) noexcept nogil:
    """Give the next aging node its turn, uncached ones first unless `idle` in a row were passed over; False if there is
    none."""
    cdef bint uncached = t.unmarked.oldest != NONE and (idle[0] < SHED_IDLE or t.marked.oldest == NONE)
    cdef List* ages = &t.unmarked if uncached else &t.marked
    if ages.oldest == NONE:
        return False
    idle[0] = 0 if shed_oldest(t, ages, spared) else idle[0] + 1
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
    untouch(node)
    age_move(t, ages, ages, i)
    return False


cdef bint is_pinned(Tree* t, Node* node) noexcept nogil:
    """Only slot trees pin, and their nodes have one mark."""
    return node.block == NULL and end_of(node.only) and mark_at(t, node.only_mark).pins > 0


# --- forgetting -------------------------------------------------------------------------------------------------------

cdef uint32_t forget_dead(Tree* t, double now, uint32_t nodes_max) noexcept nogil:
    """Remove nodes cached nowhere and unhit for a window, oldest first, looking at no more than `nodes_max`; returns
    how many (paper 4.2).

    A node joins the end of the unmarked list when its last mark goes and whenever it is hit after that. So the search
    stops at the first that was hit in this window or the one before: a leaf goes between one and two windows after its
    last hit (at most two after its last mark went, if that was later), and its parent once all children have gone.
    """
    cdef uint32_t removed = 0, _step, i
    for _step in range(nodes_max):
        if not has_dead(t, now):
            break
        i = t.unmarked.oldest
        if node_at(t, i).first_child == NONE:
            forget_leaf(t, i)
            removed += 1
        else:
            age_move(t, &t.unmarked, &t.unmarked, i)
    return removed


cdef bint has_dead(Tree* t, double now) noexcept nogil:
    """Whether the oldest unmarked node was not hit in this window or the one before. O(1)."""
    cdef uint32_t i = t.unmarked.oldest
    return i != NONE and hits_seen(node_at(t, i).hits, window_of(now, t.window_seconds)) == 0
