"""What events about blocks do to the index of one worker and to the tree, as C functions without Python objects. Owns
the algorithms, no state: each function takes the `Blocks` and the `Tree` it works on. The Python face is
`block_index.pyx`, the hash table is in `block_table.pxd`, places in `block_positions.pxd`, decoding in `decode.pyx`.

    event: blocks 7, 8 after block 3                 the tree                       the index
                                                     [ ... 3's tokens ]  w          3 -> this node, position 48
      hash 3 is known and ends at position 48          └─ [ 7's, 8's ]   w:new      7 -> the new one, 64
      the walk begins there, not at the root                                        8 -> the new one, 80

A place is a node and its generation, with the position the block ends at. Nodes are split and forgotten without
notice to this index. After a split the position may be in a node further up, so a look climbs to the one that holds it.
After the node was forgotten its generation differs, and the place is found again from the block before: by the first
token, then by the fingerprint of all of them. This costs a step per block, of which every stored block pays for a few
in advance.

A stored run leaves the tree as a request for the same tokens would: it ends at the end of a node.

Sections: copies, what is away, storing, removing.
"""

from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from preble._core.atomic cimport store32
from preble._kv_index.block_layout cimport (COPIES_MAX, CREDIT_MAX, MEDIUM_BYTES, PLACES_KEPT, POSITIONS_MAX,
                                            Copy, Place, Space)
from preble._kv_index.block_positions cimport (FOUND_NODES, is_chain_known, marked_above, marked_end, place_of,
                                               put_place, space_root)
from preble._kv_index.block_table cimport (NO_ROOM, Block, block_at, clear_table, fetch_slot, find_key, give_block,
                                           link_block, name_of, reserve_blocks, tag_of, take_block, unlink_block)
from preble._kv_index.decode cimport CLEARED, STORED, Batch, Event, Key
from preble._core.tree.layout cimport (AWAITED, CONFIRMED, TOUCHED, Entry, Mark, Node, Tree, Walk, WorkerMarks,
                                       generation, mark_at, node_at, run_end)
from preble._core.tree.parts cimport find_entry, marks_a_child, put_below, touch_mark
from preble._core.memory cimport NONE
from preble._core.tree.nodes cimport at_root, bring_near, send_away, tree_walk
from preble._core.tree.operations cimport (clear_marks, confirm_path, drop_below, load_path, set_limit, sweep_ghosts,
                                           tree_insert)

cdef enum:
    AHEAD = 16                   # blocks whose slots are fetched before they are looked at
    CREDIT = 8                   # steps that each stored block pays for
    BELOW_UNSTATED = 3           # times a worker's capacity, that its host memory and disk hold where nobody says it
    BELOW_MAX = 2147483647
    FORGET_SWEEP = 256           # marks swept at once where all are forgotten


# --- copies -----------------------------------------------------------------------------------------------------------

cdef uint16_t copy_bit(Blocks* x, Event* event, bint is_new) noexcept nogil:
    """The bit for the medium and group that an event names; 0 if none was seen and `is_new` is false."""
    cdef const char* medium = <const char*> event.medium.data
    cdef uint32_t length = event.medium.length, i
    cdef Copy* copy
    for i in range(x.copy_count):
        copy = &x.copies[i]
        if copy.group == event.group and copy.length == length and memcmp(&copy.medium[0], medium, length) == 0:
            return <uint16_t> (1 << i)
    if x.copy_count == COPIES_MAX - 1 or length > MEDIUM_BYTES:
        return 1 << (COPIES_MAX - 1)
    if not is_new:
        return 0
    copy = &x.copies[x.copy_count]
    copy.group = event.group
    copy.length = length
    memcpy(&copy.medium[0], medium, length)
    x.copy_count += 1
    sort_copies(x)
    return <uint16_t> (1 << (x.copy_count - 1))


cdef void sort_copies(Blocks* x) noexcept nogil:
    """Tell which kinds of copies are in the GPU's memory and which in the host's, by the engines' words for them:
    vLLM's GPU, CPU, STORAGE, SGLang's GPU, CPU_PINNED, DISK, EXTERNAL. Any other is further off."""
    cdef uint32_t i
    cdef Copy* copy
    x.gpu_copies = x.host_copies = 0
    for i in range(x.copy_count):
        copy = &x.copies[i]
        if copy.length >= 3 and memcmp(&copy.medium[0], b"GPU", 3) == 0:
            x.gpu_copies |= <uint16_t> (1 << i)
        elif copy.length >= 3 and memcmp(&copy.medium[0], b"CPU", 3) == 0:
            x.host_copies |= <uint16_t> (1 << i)


# --- what is away -----------------------------------------------------------------------------------------------------
# A block that has no copy in the GPU's memory must be loaded before it is of use.

cdef void expect_moves(Tree* t, uint32_t index) noexcept nogil:
    """A worker's engine reports what it keeps beside the GPU's memory. If nobody said how much that is, it is taken to
    be as much as this index may know."""
    cdef WorkerMarks* marks = &t.workers[index]
    if not marks.moves_reported:
        marks.moves_reported = True
        if marks.below == 0:
            put_below(t, marks, min(BELOW_UNSTATED * marks.capacity, <int64_t> BELOW_MAX))
        set_limit(t, index, marks.evictions_reported)


cdef bint place_copies(Blocks* x, Tree* t, Run* run, const uint32_t* found, uint32_t count,
                       uint32_t start) noexcept nogil:
    """Blocks of a run, from position `start` on, have one copy more; those of which none is in the GPU's memory must be
    loaded. Whether that moved anything."""
    cdef uint32_t i, node, end = start + count * run.size
    cdef uint64_t version = t.version
    cdef Block* block
    if run.copy & x.gpu_copies:
        if t.workers[x.index].away:
            load_path(t, run.leaf, x.worker, start, end)
        return t.version != version
    expect_moves(t, x.index)
    if run.copy & x.host_copies:
        bring_near(t, run.leaf, x.worker, start, end)
    for i in range(count):
        block = block_at(&x.table, found[i])
        if not block.copies & x.gpu_copies and block.end <= run_end(node_at(t, run.leaf).run):
            node = place_of(x, t, found[i])
            if node != NONE:
                send_away(t, node, x.worker, block.start, not block.copies & x.host_copies)
    return t.version != version


cdef void lose_copy(Blocks* x, Tree* t, uint32_t index, uint16_t copy) noexcept nogil:
    """A block lost a copy and has others: it may be in the GPU's memory no longer, or not even in the host's."""
    cdef Block* block = block_at(&x.table, index)
    cdef uint32_t node
    if block.copies & x.gpu_copies or (block.copies & x.host_copies and not copy & x.gpu_copies):
        return
    node = place_of(x, t, index)
    if node != NONE:
        send_away(t, node, x.worker, block.start, not block.copies & x.host_copies)


# --- storing ----------------------------------------------------------------------------------------------------------
#   1  find the block before, and with it the namespace (begin_run)
#   2  look every hash up; what is known must mean the same place (look_up)
#   3  enter the new ones into the table (link_run); from here on, out of memory means taking them out again
#   4  remember and mark the tokens, from where the block before ends (remember_run)
#   5  note for each block where it ended (end_run)
# Events that continue each other are one run. If that meets a conflict or the bound, nothing has changed yet, and they
# are taken one by one.

cdef uint32_t allowed_blocks(Blocks* x, Event* event, uint32_t space) noexcept nogil:
    """How many of an event's blocks, from the first, belong to a namespace. Blocks that an engine distinguishes by more
    than tokens from the middle of a prompt on have no namespace of their own, and must not be taken for others."""
    cdef Space* row = &x.spaces[space]
    if event.has_parent and (
        (event.lora and event.lora != row.lora) or (event.salted and event.salted != row.salted)
        or (event.extra_first and event.extra_first != row.extra)
    ):
        return 0
    if event.extra_at < event.key_count and event.extra_later != row.extra:
        return event.extra_at
    return event.extra_cut


cdef Outcome begin_run(Blocks* x, Tree* t, Batch* b, uint32_t first, uint32_t events, Run* run) noexcept nogil:
    """Where a run starts; IGNORED, and counted, if that is not known."""
    cdef Event* event = &b.events[first]
    cdef Event* last = &b.events[first + events - 1]
    cdef uint32_t count = last.keys_at + last.key_count - event.keys_at, allowed
    memset(run, 0, sizeof(Run))
    run.keys_at = event.keys_at
    run.size = event.block_size
    run.tokens = &b.tokens[event.tokens_at]
    run.parent = NONE
    run.space = event.space
    if event.has_parent:
        run.parent = find_key(&x.table, &event.parent)
        if run.parent == NONE:
            x.orphans += count
            return IGNORED
        run.parent_name = name_of(event.parent.lo, event.parent.hi)
        run.space = block_at(&x.table, run.parent).space
        run.start = block_at(&x.table, run.parent).end
    if run.space == NONE or (event.namespace >= 0 and event.space == NONE):
        t.refused_tokens += <int64_t> count * run.size
        return IGNORED
    if event.namespace >= 0 and x.spaces[event.space].root != x.spaces[run.space].root:
        x.conflicts += count
        return IGNORED
    allowed = allowed_blocks(x, event, run.space) if events == 1 else count
    run.keyed = count - allowed
    if (allowed == 0 and (count or run.parent == NONE)) or run.start + <uint64_t> allowed * run.size > POSITIONS_MAX:
        x.conflicts += allowed
        return IGNORED
    run.count = allowed
    run.end = run.start + allowed * run.size
    run.copy = copy_bit(x, event, True)
    return DONE


cdef Outcome look_up(Blocks* x, Batch* b, Run* run) noexcept nogil:
    cdef Key* keys = &b.keys[run.keys_at]
    cdef uint32_t* found = &b.found[run.keys_at]
    cdef uint32_t i, start = run.start
    cdef uint64_t parent = run.parent_name
    cdef Block* block
    for i in range(min(run.count, <uint32_t> AHEAD)):
        fetch_slot(&x.table, tag_of(name_of(keys[i].lo, keys[i].hi)))
    for i in range(run.count):
        if i + AHEAD < run.count:
            fetch_slot(&x.table, tag_of(name_of(keys[i + AHEAD].lo, keys[i + AHEAD].hi)))
        found[i] = find_key(&x.table, &keys[i])
        if found[i] == NONE:
            run.fresh += 1
        else:
            block = block_at(&x.table, found[i])
            if (block.start != start or block.end != start + run.size or (start and block.parent != parent)
                    or block.first != run.tokens[i * run.size] or block.print != keys[i].print
                    or x.spaces[block.space].root != x.spaces[run.space].root):
                return CONFLICT
        start += run.size
        parent = name_of(keys[i].lo, keys[i].hi)
    return DONE


cdef bint is_estimated(Blocks* x, Tree* t, Batch* b, Run* run) noexcept nogil:
    """Whether a run of known blocks is marked cached, confirmed by the engine, and ends at a node's end. Its path is in
    use then."""
    cdef uint32_t i = place_of(x, t, b.found[run.keys_at + run.count - 1])
    cdef Entry entry
    if i == NONE or run_end(node_at(t, i).run) != run.end or marked_end(node_at(t, i), x.worker) < run.end:
        return False
    entry = find_entry(node_at(t, i), x.worker)
    if not mark_at(t, entry.mark).flags & CONFIRMED:
        return False
    touch_path(t, i, x.worker)
    return True


cdef void touch_path(Tree* t, uint32_t i, uint32_t worker) noexcept nogil:
    """Make the path to node `i` the worker's newest."""
    cdef Node* node = node_at(t, i)
    cdef Entry entry
    while node.parent != NONE:
        if not node.state & TOUCHED:
            store32(&node.state, node.state | TOUCHED)
        entry = find_entry(node, worker)
        if entry.end:
            touch_mark(t, entry.mark)
        node = node_at(t, node.parent)


cdef Outcome link_run(Blocks* x, Batch* b, Run* run) noexcept nogil:
    """Enter the blocks that are new, without their places; all or none. `found` has every block's index then."""
    cdef Key* keys = &b.keys[run.keys_at]
    cdef uint32_t* found = &b.found[run.keys_at]
    cdef uint32_t i, fresh
    cdef uint64_t parent = run.parent_name
    cdef Block* block
    cdef int trouble
    if run.fresh and reserve_blocks(&x.table, run.fresh):
        return NO_MEMORY
    for i in range(run.count):
        if found[i] == NONE:
            fresh = take_block(&x.table)
            block = block_at(&x.table, fresh)
            block.lo = keys[i].lo
            block.hi = keys[i].hi
            block.parent = parent
            block.node = NONE
            block.generation = 0
            block.start = run.start + i * run.size
            block.end = block.start + run.size
            block.first = run.tokens[i * run.size]
            block.print = keys[i].print
            block.copies = 0
            block.space = <uint16_t> run.space
            trouble = link_block(&x.table, fresh)
            if trouble:
                give_block(&x.table, fresh)
                unlink_run(x, b, run, i)
                return CONFLICT if trouble == 1 else OVERFLOW if trouble == NO_ROOM else NO_MEMORY
            found[i] = fresh
        parent = name_of(keys[i].lo, keys[i].hi)
    return DONE


cdef void unlink_run(Blocks* x, Batch* b, Run* run, uint32_t count) noexcept nogil:
    """Take out what link_run entered of the first `count` blocks; only these have no copies."""
    cdef uint32_t i
    for i in range(count):
        if block_at(&x.table, b.found[run.keys_at + i]).copies == 0:
            unlink_block(&x.table, b.found[run.keys_at + i])


cdef Outcome remember_run(Blocks* x, Tree* t, Run* run, double now) noexcept nogil:
    """Remember and mark the run's tokens; what the tree has no room for is counted there, and the run ends before
    it."""
    cdef const int32_t* tokens = run.tokens - run.start
    cdef Walk walk = at_root(t, run.node)
    walk.inside = run.start - node_at(t, run.node).run.start
    walk.matched = run.start
    walk = tree_walk(t, walk, tokens, run.end)
    run.marked = min(marked_above(t, walk.node, x.worker), walk.matched)
    if tree_insert(t, walk, tokens, run.end, x.worker, False, now, &run.leaf):
        return NO_MEMORY
    run.leaf_end = run_end(node_at(t, run.leaf).run)
    confirm_path(t, run.leaf, x.worker)
    return DONE


cdef void end_run(Blocks* x, Tree* t, Batch* b, Run* run) noexcept nogil:
    """Note each block's copy and place, from the last one up."""
    cdef uint32_t i = run.count, node = run.leaf
    cdef Block* block
    while i:
        i -= 1
        block = block_at(&x.table, b.found[run.keys_at + i])
        block.copies |= run.copy
        if block.end <= run.leaf_end:
            while node_at(t, node).run.start >= block.end:
                node = node_at(t, node).parent
            put_place(t, block, node)
    x.spaces[run.space].blocks += run.fresh
    x.credit = min(<int64_t> CREDIT_MAX, x.credit + <int64_t> CREDIT * run.fresh)


cdef bint take_awaited(Tree* t, uint32_t i, uint32_t worker) noexcept nogil:
    """Whether a prompt sent to the worker ends at node `i` and was not reported so far; from now on it was."""
    cdef Entry entry = find_entry(node_at(t, i), worker)
    cdef Mark* mark
    if entry.end == 0:
        return False
    mark = mark_at(t, entry.mark)
    if not mark.flags & AWAITED:
        return False
    store32(&mark.flags, mark.flags & ~<uint32_t> AWAITED)
    return True


cdef bint take_below(Tree* t, uint32_t top, uint32_t worker, uint32_t end) noexcept nogil:
    """Whether an awaited prompt ends below node `top` and before `end`, so that no whole block of it is missing; True
    also where there is too much to look at."""
    cdef uint32_t i = node_at(t, top).first_child, looked = 0
    while i != NONE and looked < FOUND_NODES:
        looked += 1
        if run_end(node_at(t, i).run) < end:
            if take_awaited(t, i, worker):
                return True
            if node_at(t, i).first_child != NONE:
                i = node_at(t, i).first_child
                continue
        while node_at(t, i).next_sibling == NONE:
            i = node_at(t, i).parent
            if i == top:
                return False
        i = node_at(t, i).next_sibling
    return i != NONE


cdef bint answers_prompt(Tree* t, Run* run, uint32_t worker) noexcept nogil:
    """Whether a run of blocks reaches the end of an awaited prompt, up to its last whole block."""
    cdef bint found = run.marked >= run.end and take_below(t, run.leaf, worker, run.end + run.size)
    cdef uint32_t i = run.leaf
    while run_end(node_at(t, i).run) > run.start:
        found |= take_awaited(t, i, worker)
        i = node_at(t, i).parent
    return found


cdef void compare_run(Blocks* x, Tree* t, Run* run) noexcept nogil:
    """Count a run of new blocks, and whether it reaches the end of what the worker was sent, or leaves it before. One
    that does neither is a part of a prompt, and says nothing."""
    cdef Place* place
    if run.size != x.block_size and x.block_size:
        x.odd_size = run.size
        x.odd_runs += x.odd_runs < 1 << 30
    else:
        x.odd_runs = 0
    if answers_prompt(t, run, x.worker):
        x.answers += 1
    elif run.marked < run.end:
        place = &x.apart[x.apart_runs % PLACES_KEPT]
        place.node = run.leaf
        place.generation = generation(node_at(t, run.leaf))
        place.end = run.leaf_end
        x.apart_runs += 1


cdef Outcome store_run(Blocks* x, Tree* t, Batch* b, Run* run, double now) noexcept nogil:
    cdef Outcome outcome = look_up(x, b, run)
    if outcome != DONE:
        return outcome
    if run.fresh == 0 and run.count and is_estimated(x, t, b, run):
        run.marked = run.end
        run.leaf = place_of(x, t, b.found[run.keys_at + run.count - 1])
        note_copies(x, b, run)
        return DONE
    if x.table.count + <uint64_t> run.fresh > x.blocks_max:
        return OVERFLOW
    run.node = place_of(x, t, run.parent) if run.start else space_root(x, t, run.space)
    if run.node == NONE and run.start == 0:
        t.refused_tokens += run.end
        return IGNORED
    if run.node == NONE or (run.start and marked_end(node_at(t, run.node), x.worker) < run.start
                            and not is_chain_known(x, run.parent)):
        x.orphans += run.count
        return IGNORED
    outcome = link_run(x, b, run)
    if outcome != DONE:
        return outcome
    outcome = remember_run(x, t, run, now)
    if outcome != DONE:
        unlink_run(x, b, run, run.count)
        return outcome
    end_run(x, t, b, run)
    if run.fresh:
        compare_run(x, t, run)
    return DONE


cdef void note_copies(Blocks* x, Batch* b, Run* run) noexcept nogil:
    cdef uint32_t i
    for i in range(run.count):
        block_at(&x.table, b.found[run.keys_at + i]).copies |= run.copy


cdef bint continues(Event* event, Event* other, Batch* b) noexcept nogil:
    """Whether an event's blocks follow right after another's, in the same place in every respect."""
    cdef Key* last = &b.keys[event.keys_at + max(event.key_count, 1) - 1]
    return (event.key_count and other.key_count and other.kind == STORED and other.has_parent
            and other.parent.lo == last.lo and other.parent.hi == last.hi
            and other.block_size == event.block_size and other.group == event.group
            and other.keys_at == event.keys_at + event.key_count
            and other.tokens_at == event.tokens_at + event.token_count
            and (other.namespace < 0 or (event.namespace >= 0 and other.space == event.space))
            and other.lora == event.lora and other.salted == event.salted
            and event.extra_first == 0 and other.extra_first == 0
            and event.extra_at == event.key_count and other.extra_at == other.key_count
            and other.medium.length == event.medium.length
            and memcmp(other.medium.data, event.medium.data, event.medium.length) == 0)


cdef void count_stored(Blocks* x, Tree* t, Batch* b, uint32_t first, uint32_t events, Run* run,
                       uint32_t* changed) noexcept nogil:
    """Place the copies of a run that was stored; which of its events changed what is cached, or where that is."""
    cdef uint32_t i, count, at = run.keys_at, start = run.start
    cdef bint is_new
    for i in range(first, first + events):
        count = min(b.events[i].key_count, run.keys_at + run.count - at)
        is_new = ((start < run.leaf_end or b.events[i].key_count == 0)             # no block: word of the one before
                  and start + b.events[i].token_count > run.marked)
        changed[0] += place_copies(x, t, run, &b.found[at], count, start) or is_new
        start += b.events[i].token_count
        at += count


cdef Outcome store_events(Blocks* x, Tree* t, Batch* b, uint32_t first, uint32_t events, double now,
                          uint32_t* changed) noexcept nogil:
    """Store some events that continue each other, as one run if that goes. DONE or NO_MEMORY."""
    cdef Run run
    cdef uint32_t i
    cdef uint64_t version = t.version
    cdef int64_t lost = x.lost
    cdef Outcome outcome = begin_run(x, t, b, first, events, &run)
    if outcome == DONE:
        outcome = store_run(x, t, b, &run, now)
    if outcome == NO_MEMORY:                 # counts are of what was applied, so that trying again counts it once
        x.lost = lost
        return NO_MEMORY
    x.keyed += run.keyed
    x.stores += outcome == DONE
    if outcome == DONE:
        count_stored(x, t, b, first, events, &run, changed)
    elif events > 1 and (outcome == CONFLICT or outcome == OVERFLOW):
        for i in range(first, first + events):
            if store_events(x, t, b, i, 1, now, changed) != DONE:
                return NO_MEMORY
    elif outcome == CONFLICT:
        x.conflicts += run.count
    elif outcome == OVERFLOW:
        x.overflows += 1
        forget_all(x, t)
        changed[0] += t.version != version
    return DONE


# --- removing ---------------------------------------------------------------------------------------------------------

cdef uint32_t kept_end(Tree* t, uint32_t i, uint32_t worker, uint32_t start) noexcept nogil:
    """How far, from `start` on, the worker needs the path to node `i` for another prompt that leaves it above that
    node. Changes nothing. Where a node has too many children to look, less than a block that is gone stays marked.
    """
    cdef uint32_t below = i
    cdef Node* node
    i = node_at(t, i).parent
    node = node_at(t, i)
    while node.parent != NONE and run_end(node.run) > start:
        if marks_a_child(t, i, worker, below):
            return run_end(node.run)
        below = i
        i = node.parent
        node = node_at(t, i)
    return start


cdef void unmark_block(Blocks* x, Tree* t, uint32_t index) noexcept nogil:
    """The worker does not cache a block any more: unmark every prefix through the whole of it. Blocks that only begin
    alike stay. O(marks that go)."""
    cdef uint32_t i = place_of(x, t, index), kept, start = block_at(&x.table, index).start
    if i == NONE or marked_above(t, i, x.worker) <= start:
        return
    kept = kept_end(t, i, x.worker, start)
    while node_at(t, i).run.start > kept:
        i = node_at(t, i).parent
    drop_below(t, i, x.worker, kept)


cdef bint goes_below(Blocks* x, Tree* t, uint16_t copy) noexcept nogil:
    """Whether what leaves the GPU's memory goes to the host's without a report of that."""
    cdef WorkerMarks* marks = &t.workers[x.index]
    return marks.below and not marks.moves_reported and copy & x.gpu_copies


cdef void remove_blocks(Blocks* x, Tree* t, Batch* b, Event* event) noexcept nogil:
    """One medium's copies are gone; what has no copy left is not cached. In any order: engines may list a parent before
    its children."""
    cdef uint16_t copy = copy_bit(x, event, False)
    cdef Key* keys = &b.keys[event.keys_at]
    cdef uint32_t i, index
    cdef Block* block
    for i in range(event.key_count):
        if i + AHEAD < event.key_count:
            fetch_slot(&x.table, tag_of(name_of(keys[i + AHEAD].lo, keys[i + AHEAD].hi)))
        index = find_key(&x.table, &keys[i])
        if index == NONE:
            x.unknown_blocks += 1
            continue
        block = block_at(&x.table, index)
        if not block.copies & copy:
            continue
        block.copies &= ~copy
        if block.copies:
            lose_copy(x, t, index, copy)
        else:
            if not goes_below(x, t, copy):
                unmark_block(x, t, index)
            elif place_of(x, t, index) != NONE:
                send_away(t, place_of(x, t, index), x.worker, block.start, False)
            x.spaces[block.space].blocks -= 1
            unlink_block(&x.table, index)


cdef void forget_all(Blocks* x, Tree* t) noexcept nogil:
    """Nothing is known of the worker's cache any more, or it is empty. O(its blocks); marks are swept later."""
    cdef uint32_t i
    clear_table(&x.table)
    for i in range(x.space_room):
        x.spaces[i].blocks = 0
    clear_marks(t, x.index)
    x.worker = t.workers[x.index].key
    sweep_ghosts(t, FORGET_SWEEP)


cdef Outcome apply_batch(Blocks* x, Tree* t, Batch* b, double now, uint32_t* changed) noexcept nogil:
    """Apply a decoded batch, event by event. NO_MEMORY leaves the events before applied, and of the one that failed
    nothing but room for it."""
    cdef uint32_t i = 0, events
    cdef uint64_t version
    while i < b.event_count:
        events = 1
        if b.events[i].kind == STORED:
            while i + events < b.event_count and continues(&b.events[i + events - 1], &b.events[i + events], b):
                events += 1
            if store_events(x, t, b, i, events, now, changed) != DONE:
                return NO_MEMORY
        else:
            version = t.version
            if b.events[i].kind == CLEARED:
                forget_all(x, t)
            else:
                remove_blocks(x, t, b, &b.events[i])
            changed[0] += t.version != version
        i += events
    x.unknown_events += b.unknown
    return DONE
