"""The radix tree in a snapshot. Owns how slabs of nodes and marks, token runs, entries, child table and namespaces are
written, and every check that makes a tree out of bytes one that `RadixTree.check` passes.

Items keep their indices, so links, leases and places of blocks mean the same after as before; the order in which free
items are handed out, the table's deleted slots and the room of entry blocks are kept too, so that the tree takes the
same memory at every later step. Pointers are written as what they point to. Nothing in the bytes is accepted unchecked:
links are followed only after they are known to lead to items, and lists only as long as each item's way back is right.

Sections: writing, reading, what is checked. The layout of the bytes is in docs/fleet.md.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from preble._core.dict_keys cimport key_value
from preble._core.tree.layout cimport (AWAY_SHIFT, EPOCH_MAX, FAR, INDEX_BITS, LIVE, NOBODY, ChildTable, Entry,
                                       EntryBlock, List, Mark, Node, Recency, TokenRun, Tree, WorkerMarks, end_of,
                                       generation, index_of, mark_at, node_at, run_end, worker_of)
from preble._core.epochs cimport QUEUE_MAX
from preble._core.tree.parts cimport (add_away, block_bytes, block_marks, entry_count, find_entry, fresh_rows, gpu_end,
                                      marks_of, new_run, put_below, word_count, words_of)
from preble._core.memory cimport CHUNK, NONE, Slab, budget_alloc, budget_free, slab_at
from preble._core.token_ids cimport any_negative
from preble._radix cimport RadixTree
from preble._core.tree.reclaim cimport MARK, NODE, reclaim_soon, retired_of
from preble._snapshot.codec cimport NO_MEMORY, Reader, Writer, allocated, chain_free, load_items, load_slab, refuse
from preble._core.tree.child_table cimport DELETED_SLOT, EMPTY_SLOT, TABLE_START, new_table, slot_in, table_bytes
from preble._core.tree.operations cimport limit_of, sweep_ghosts

cdef enum:
    TOKENS_MAX = 2147483647
    WORKER_ROWS_MAX = 1 << 17    # rows of a tree that once had the most workers allowed
    FILLED_MAX = 1 << 14         # slots of a child table in a row; of those that are 3/4 full, some hundreds may be
    CLAIMED = 1                  # in `seen` of marks: a node has it; beyond, its place in a recency list

cdef struct TreeHead:            # what a snapshot says of a tree before its parts
    uint64_t version
    uint64_t worker_changes
    int64_t shed_nodes
    int64_t refused_tokens
    uint32_t node_chunks
    uint32_t mark_chunks
    uint32_t free_nodes
    uint32_t free_marks
    uint32_t table_size
    uint32_t draining_size       # 0: none
    uint32_t drained
    uint32_t worker_room
    uint32_t worker_end
    uint32_t unused
    List marked
    List unmarked

cdef struct WorkerRow:           # of one worker index
    int64_t capacity             # 0: free
    List recency
    uint32_t below               # tokens in host memory and on disk; the top bit: what goes there is reported
    uint32_t epoch               # of its key; 0 until its cache is cleared for the first time

cdef struct Load:                # a tree that is being read
    Tree* t
    uint32_t nodes               # items of the slabs
    uint32_t marks
    uint32_t live_nodes
    uint32_t children            # live nodes that are no roots
    uint32_t* seen               # by mark


# --- writing ----------------------------------------------------------------------------------------------------------

cdef int write_tree(Writer w, RadixTree tree) except -1:
    """Write a tree, as its writer. What waits for readers to go is written as free."""
    cdef Tree* t = &tree.t
    cdef TreeHead head
    sweep_ghosts(t, NONE)
    reclaim_soon(t)
    memset(&head, 0, sizeof(head))
    head.version = t.version
    head.worker_changes = t.worker_changes
    head.shed_nodes = t.shed_nodes
    head.refused_tokens = t.refused_tokens
    head.node_chunks = t.nodes.chunk_count
    head.mark_chunks = t.marks.chunk_count
    head.free_nodes = t.nodes.free_count + retired_of(t, NODE)
    head.free_marks = t.marks.free_count + retired_of(t, MARK)
    head.table_size = t.table.size
    head.draining_size = t.draining.size if t.draining != NULL else 0
    head.drained = t.drained if t.draining != NULL else 0
    head.worker_room = t.worker_room
    head.worker_end = t.worker_end
    head.marked = t.marked
    head.unmarked = t.unmarked
    w.put(&head, sizeof(head))
    write_workers(w, t)
    write_slabs(w, t)
    w.put(&t.table.slots[0], <int64_t> t.table.size * 8)
    if t.draining != NULL:
        w.put(&t.draining.slots[0], <int64_t> t.draining.size * 8)
    w.number(len(tree._root_queue))
    for root in tree._root_queue:
        w.number(root)
        w.value(key_value(tree._names[root]), "a namespace")
    return 0


cdef int write_workers(Writer w, Tree* t) except -1:
    cdef WorkerRow row
    cdef uint32_t i, epoch
    for i in range(t.worker_end):
        memset(&row, 0, sizeof(row))
        row.capacity = t.workers[i].capacity
        row.recency.oldest = t.workers[i].recency.oldest
        row.recency.newest = t.workers[i].recency.newest
        row.below = <uint32_t> t.workers[i].below | <uint32_t> t.workers[i].moves_reported << 31
        row.epoch = t.workers[i].key >> INDEX_BITS
        w.put(&row, sizeof(row))
    for i in range(t.worker_end, rows_with_keys(t.worker_room)):
        epoch = t.workers[i].key >> INDEX_BITS
        w.put(&epoch, sizeof(epoch))
    return 0


cdef inline uint32_t rows_with_keys(uint32_t room) noexcept nogil:
    """How many of so many rows may become a worker's. Those behind the last worker have an epoch, too, if there was one
    before: what nobody caches any more is still known as the home of whoever has left, not of who joins there."""
    return min(room, <uint32_t> 1 << INDEX_BITS)


cdef int write_slabs(Writer w, Tree* t) except -1:
    """Nodes, free nodes, marks, free marks, tokens, entry blocks. Python's lock is let go meanwhile."""
    cdef int64_t nodes = <int64_t> t.nodes.chunk_count * CHUNK, marks = <int64_t> t.marks.chunk_count * CHUNK
    cdef int64_t tokens = 0, blocks = 0
    cdef char* at = w.reserve(nodes * (sizeof(Node) + 4) + marks * (sizeof(Mark) + 4))
    cdef char* start = at
    with nogil:
        at = put_nodes(t, at, &tokens, &blocks)
        at = put_free(t, &t.nodes, NODE, at)
        at = put_marks(t, at)
        at = put_free(t, &t.marks, MARK, at)
    w.size += at - start
    w.number(tokens)
    at = start = w.reserve(tokens * 4 + blocks)
    with nogil:
        at = put_tokens(t, at)
        at = put_blocks(t, at)
    w.size += at - start
    return 0


cdef char* put_nodes(Tree* t, char* at, int64_t* tokens, int64_t* blocks) noexcept nogil:
    """Each node as it lies in memory: for the run its place and length, for the block whether there is one."""
    cdef uint32_t i
    cdef Node* node
    cdef Node copy
    for i in range(t.nodes.chunk_count * <uint32_t> CHUNK):
        node = node_at(t, i)
        memset(&copy, 0, sizeof(Node))
        copy.state = node.state
        if node.state & LIVE:
            copy = node[0]
            copy.run = <TokenRun*> <size_t> (<uint64_t> node.run.start << 32 | node.run.length)
            copy.block = <EntryBlock*> <size_t> (node.block != NULL)
            tokens[0] += node.run.length
            if node.block != NULL:
                blocks[0] += 8 + <int64_t> node.block.count * 12
        memcpy(at, &copy, sizeof(Node))
        at += sizeof(Node)
    return at


cdef char* put_free(Tree* t, Slab* slab, uint64_t kind, char* at) noexcept nogil:
    """Free items in the order in which they will be handed out, first those that are retired."""
    cdef uint32_t i, place = t.epochs.count
    cdef uint64_t what
    while place:
        place -= 1
        what = t.epochs.queue[(t.epochs.first + place) % <uint32_t> QUEUE_MAX].what
        if what & 3 == kind:
            i = <uint32_t> (what >> 2)
            memcpy(at, &i, 4)
            at += 4
    i = slab.free_head
    while i != NONE:
        memcpy(at, &i, 4)
        at += 4
        i = (<uint32_t*> slab_at(slab, i))[0]
    return at


cdef char* put_marks(Tree* t, char* at) noexcept nogil:
    """Each mark as it lies in memory."""
    cdef uint32_t i
    for i in range(t.marks.chunk_count * <uint32_t> CHUNK):
        memcpy(at, mark_at(t, i), sizeof(Mark))
        at += sizeof(Mark)
    return at


cdef char* put_tokens(Tree* t, char* at) noexcept nogil:
    cdef uint32_t i
    cdef TokenRun* run
    for i in range(t.nodes.chunk_count * <uint32_t> CHUNK):
        if node_at(t, i).state & LIVE:
            run = node_at(t, i).run
            memcpy(at, &run.tokens[0], <size_t> run.length * 4)
            at += <size_t> run.length * 4
    return at


cdef char* put_blocks(Tree* t, char* at) noexcept nogil:
    cdef uint32_t i
    cdef EntryBlock* block
    for i in range(t.nodes.chunk_count * <uint32_t> CHUNK):
        if node_at(t, i).state & LIVE and node_at(t, i).block != NULL:
            block = node_at(t, i).block
            memcpy(at, &block.count, 8)          # and room
            memcpy(at + 8, &block.words[0], <size_t> block.count * 8)
            at += 8 + <size_t> block.count * 8
            memcpy(at, block_marks(block), <size_t> block.count * 4)
            at += <size_t> block.count * 4
    return at


# --- reading ----------------------------------------------------------------------------------------------------------

cdef int read_tree(Reader r, RadixTree tree) except -1:
    """Fill an empty tree. Raises SnapshotRefused; then the tree is of no use."""
    cdef TreeHead head
    cdef Load x
    cdef Tree* t = &tree.t
    cdef const char* reason
    memset(&x, 0, sizeof(x))
    r.copy(&head, sizeof(head))
    t.version = head.version
    t.worker_changes = head.worker_changes
    t.shed_nodes = head.shed_nodes
    t.refused_tokens = head.refused_tokens
    t.marked = head.marked
    t.unmarked = head.unmarked
    x.t = t
    read_workers(r, t, &head)
    try:
        read_slabs(r, &x, &head)
        read_tables(r, t, &head)
        with nogil:
            reason = check_links(&x) or check_tables(&x) or check_marks(&x) or check_ages(&x)
        refuse(reason)
    finally:
        free(x.seen)
    read_roots(r, tree, &x)
    return 0


cdef int read_workers(Reader r, Tree* t, TreeHead* head) except -1:
    """Rows of workers, as many as there were, at most some megabytes."""
    cdef WorkerRow row
    cdef uint32_t i, epoch
    if head.worker_room > <uint32_t> WORKER_ROWS_MAX or head.worker_end > min(head.worker_room, <uint32_t> 65536):
        refuse(b"more workers than there may be")
    if head.worker_room:
        t.workers = <WorkerMarks*> allocated(budget_alloc(&t.budget, head.worker_room * sizeof(WorkerMarks)))
        fresh_rows(t.workers, 0, head.worker_room)
        t.worker_room = head.worker_room
    for i in range(head.worker_end):
        r.copy(&row, sizeof(row))
        if not 0 <= row.capacity <= TOKENS_MAX or row.epoch > <uint32_t> EPOCH_MAX:
            refuse(b"a capacity or an epoch is out of its range")
        t.workers[i].capacity = row.capacity
        t.workers[i].recency.oldest = row.recency.oldest
        t.workers[i].recency.newest = row.recency.newest
        t.workers[i].recency.warm = NONE
        put_below(t, &t.workers[i], row.below & TOKENS_MAX if row.capacity else 0)
        t.workers[i].moves_reported = row.below >> 31
        t.workers[i].key = row.epoch << INDEX_BITS | i
        t.worker_end = i + 1
        if row.capacity == 0:
            t.workers[i].recency.oldest = t.workers[i].recency.newest = NONE
    for i in range(head.worker_end, rows_with_keys(head.worker_room)):
        r.copy(&epoch, sizeof(epoch))
        if epoch > <uint32_t> EPOCH_MAX:
            refuse(b"a capacity or an epoch is out of its range")
        t.workers[i].key = epoch << INDEX_BITS | i
    if t.worker_end and t.workers[t.worker_end - 1].capacity == 0:
        refuse(b"its last row of a worker is free")
    return 0


cdef int read_slabs(Reader r, Load* x, TreeHead* head) except -1:
    cdef Tree* t = x.t
    cdef const char* nodes
    cdef const char* tokens
    cdef const char* reason
    cdef const uint32_t* free_nodes
    cdef const uint32_t* free_marks
    cdef int64_t count, used
    load_slab(r, &t.nodes, &t.budget, head.node_chunks)
    x.nodes = head.node_chunks * <uint32_t> CHUNK
    nodes = r.take(<int64_t> x.nodes * sizeof(Node))
    free_nodes = <const uint32_t*> r.take(<int64_t> head.free_nodes * 4)
    load_items(r, &t.marks, &t.budget, head.mark_chunks)
    x.marks = head.mark_chunks * <uint32_t> CHUNK
    free_marks = <const uint32_t*> r.take(<int64_t> head.free_marks * 4)
    x.seen = <uint32_t*> allocated(calloc(max(x.marks, 1), sizeof(uint32_t)))
    count = r.number()
    if not 0 <= count <= r.left() // 4:
        refuse(b"it ends too early")
    tokens = r.take(count * 4)
    with nogil:
        reason = (make_nodes(x, nodes, tokens, count)
                  or free_items(&t.nodes, free_nodes, head.free_nodes, x, True))
    refuse(reason)
    with nogil:
        used = r.end - r.at
        reason = (make_blocks(x, r.at, &used) or claim_marks(x)
                  or free_items(&t.marks, free_marks, head.free_marks, x, False))
    refuse(reason)
    r.take(used)
    return 0


cdef const char* make_nodes(Load* x, const char* records, const char* tokens, int64_t count) noexcept nogil:
    """Nodes with runs of their own and without marks. Links are known to lead to items then, nothing more."""
    cdef uint32_t i
    cdef uint64_t place
    cdef Node copy
    cdef Node* node
    for i in range(x.nodes):
        memcpy(&copy, records + <size_t> i * sizeof(Node), sizeof(Node))
        node = node_at(x.t, i)
        node.state = copy.state & ~<uint32_t> LIVE
        if not copy.state & LIVE:
            if generation(&copy) & 1:
                return b"a free node has the number of a live one"
            continue
        if not generation(&copy) & 1 or not (is_item(copy.parent, x.nodes) and is_item(copy.first_child, x.nodes)
                                             and is_item(copy.prev_sibling, x.nodes)
                                             and is_item(copy.next_sibling, x.nodes)
                                             and is_item(copy.older, x.nodes) and is_item(copy.newer, x.nodes)):
            return b"a node leads nowhere"
        place = <uint64_t> <size_t> copy.run
        if (<uint32_t> place == 0) != (copy.parent == NONE) or (place >> 32) + <uint32_t> place > TOKENS_MAX:
            return b"a node has no tokens, or a root has"
        if <int64_t> <uint32_t> place > count:
            return b"it has fewer tokens than its nodes"
        copy.run = new_run(x.t, <uint32_t> (place >> 32), <const int32_t*> tokens, NULL, <uint32_t> place)
        if copy.run == NULL:
            return NO_MEMORY
        tokens += <size_t> <uint32_t> place * 4
        count -= <uint32_t> place
        if copy.block != NULL:
            copy.only = NOBODY
        node[0] = copy
        node.block = NULL
        if end_of(node.only) == 0:               # its mark is of no meaning then; here it notes whether a block follows
            node.only_mark = NONE if copy.block != NULL else 0
        x.live_nodes += 1
        x.children += copy.parent != NONE
        if any_negative(&copy.run.tokens[0], copy.run.length):
            return b"a token is negative"
    return NULL if count == 0 else <const char*> b"it has more tokens than its nodes"


cdef bint is_item(uint32_t i, uint32_t items) noexcept nogil:
    """Whether a link leads to an item or nowhere."""
    return i < items or i == NONE


cdef const char* make_blocks(Load* x, const char* at, int64_t* left) noexcept nogil:
    """Entry blocks of the nodes that have one; `left` goes from bytes there are to bytes taken."""
    cdef const char* start = at
    cdef const char* end = at + left[0]
    cdef uint32_t i, count, room, word, live
    cdef EntryBlock* block
    for i in range(x.nodes):
        if not node_at(x.t, i).state & LIVE or not is_noted(node_at(x.t, i)):
            continue
        if end - at < 8:
            return b"it ends too early"
        memcpy(&count, at, 4)
        memcpy(&room, at + 4, 4)
        if count == 0 or room < count or room > 2 * <uint64_t> count or (end - at - 8) // 12 < <int64_t> count:
            return b"the marks of a node do not fit"
        block = <EntryBlock*> budget_alloc(&x.t.budget, block_bytes(room))
        if block == NULL:
            return NO_MEMORY
        block.count = count
        block.room = room
        block.unused = live = 0
        memcpy(&block.words[0], at + 8, <size_t> count * 8)
        memcpy(block_marks(block), at + 8 + <size_t> count * 8, <size_t> count * 4)
        for word in range(count):
            live += end_of(block.words[word]) != 0
            if word and worker_of(block.words[word]) <= worker_of(block.words[word - 1]):
                live = x.marks + 1               # not in order
        block.live = live
        node_at(x.t, i).block = block
        at += 8 + <size_t> count * 12
        if live == 0 or live > x.marks or node_at(x.t, i).parent == NONE:
            return b"the marks of a node are not in order"
    left[0] = at - start
    return NULL


cdef bint is_noted(Node* node) noexcept nogil:
    """Whether `make_nodes` has noted that this node has an entry block."""
    return node.only == NOBODY and node.only_mark == NONE


cdef const char* claim_marks(Load* x) noexcept nogil:
    """Give every entry its mark, and count what each worker has."""
    cdef uint32_t i, at
    cdef Node* node
    cdef const char* reason
    for i in range(x.nodes):
        node = node_at(x.t, i)
        if not node.state & LIVE:
            continue
        for at in range(word_count(node)):
            reason = claim(x, i, words_of(node)[at], marks_of(node)[at])
            if reason != NULL:
                return reason
    for i in range(x.t.worker_end):
        if x.t.workers[i].tokens > limit_of(x.t.workers[i].capacity, x.t.workers[i].below, True):
            return b"a worker caches more than it can"
    return NULL


cdef const char* claim(Load* x, uint32_t i, uint64_t word, uint32_t index) noexcept nogil:
    cdef TokenRun* run = node_at(x.t, i).run
    cdef uint32_t key = worker_of(word), end = end_of(word), worker = index_of(key)
    cdef Mark* mark
    if end == 0:
        return NULL
    if worker >= x.t.worker_end or x.t.workers[worker].capacity == 0 or x.t.workers[worker].key != key:
        return b"a mark is of no worker"
    if node_at(x.t, i).parent == NONE or not run.start < end <= run_end(run):
        return b"a mark ends beyond its node"
    if index >= x.marks or x.seen[index]:
        return b"a mark belongs to two nodes, or there is none"
    mark = mark_at(x.t, index)
    if (mark.node != i or mark.worker != key or mark.pins or not is_away_right(mark.flags, run.start, end)
            or not is_item(mark.older, x.marks) or not is_item(mark.newer, x.marks)):
        return b"a mark is of another node"
    x.seen[index] = CLAIMED
    x.t.workers[worker].tokens += end - run.start
    x.t.workers[worker].marks += 1
    add_away(x.t, &x.t.workers[worker], end - gpu_end(mark.flags, end))
    return NULL


cdef bint is_away_right(uint32_t flags, uint32_t start, uint32_t end) noexcept nogil:
    """Whether what a mark says to be away lies within it."""
    if flags >> AWAY_SHIFT:
        return start <= gpu_end(flags, end) < end
    return not flags & FAR


cdef const char* free_items(Slab* slab, const uint32_t* order, uint32_t count, Load* x, bint nodes) noexcept nogil:
    """The free list, with exactly the items that nothing has."""
    cdef uint32_t items = x.nodes if nodes else x.marks, i, live = 0
    cdef uint8_t* taken = <uint8_t*> calloc(max(items, 1), 1)
    cdef bint right
    if taken == NULL:
        return NO_MEMORY
    for i in range(items):
        taken[i] = node_at(x.t, i).state & LIVE if nodes else x.seen[i] != 0
        live += taken[i]
    right = <uint64_t> live + count == items and chain_free(slab, order, count, taken)
    free(taken)
    return NULL if right else <const char*> b"its list of free items is wrong"


cdef int read_tables(Reader r, Tree* t, TreeHead* head) except -1:
    budget_free(&t.budget, t.table, table_bytes(t.table.size))
    t.table = NULL
    t.table = read_table(r, t, head.table_size)
    if head.draining_size:
        t.draining = read_table(r, t, head.draining_size)
        t.drained = head.drained
        if t.drained >= t.draining.size:
            refuse(b"its child table is wrong")
    return 0


cdef ChildTable* read_table(Reader r, Tree* t, uint32_t size) except NULL:
    cdef ChildTable* table
    if size < <uint32_t> TABLE_START or size & (size - 1) or <int64_t> size * 8 > r.left():
        refuse(b"its child table has an impossible size")
    table = <ChildTable*> allocated(new_table(&t.budget, size))
    r.copy(&table.slots[0], <int64_t> size * 8)
    return table


cdef int read_roots(Reader r, RadixTree tree, Load* x) except -1:
    cdef uint64_t count = r.number(), root
    if count != x.live_nodes - x.children:
        refuse(b"roots and namespaces differ")
    for _ in range(count):
        root = r.number()
        name = r.value()
        if (root >= x.nodes or not node_at(x.t, <uint32_t> root).state & LIVE
                or node_at(x.t, <uint32_t> root).parent != NONE or root in tree._names or name in tree._roots):
            refuse(b"roots and namespaces differ")
        tree.name_root(<uint32_t> root, name)
    return 0


# --- what is checked --------------------------------------------------------------------------------------------------
# In this order, each relying on the ones before: links between nodes (R1), the child table (R2), marks (M1, L1), aging
# lists (L2). The letters are those of `_core/tree/layout.pxd`.

cdef const char* check_links(Load* x) noexcept nogil:
    """Runs go on where the parent's end, so the way up ends at a root; child lists hold each node once."""
    cdef uint32_t i, child, before, listed = 0
    cdef Node* node
    for i in range(x.nodes):
        node = node_at(x.t, i)
        if not node.state & LIVE:
            continue
        if node.parent == NONE:
            if node.run.start:
                return b"a root begins in the middle"
        elif not node_at(x.t, node.parent).state & LIVE or run_end(node_at(x.t, node.parent).run) != node.run.start:
            return b"a node does not start where its parent ends"
        before = NONE
        child = node.first_child
        while child != NONE:                     # whoever is met again would have two before it
            if not node_at(x.t, child).state & LIVE or node_at(x.t, child).parent != i:
                return b"a node is in the child list of another"
            if node_at(x.t, child).prev_sibling != before:
                return b"a child list is broken"
            listed += 1
            before = child
            child = node_at(x.t, child).next_sibling
    return NULL if listed == x.children else <const char*> b"a node is in no child list"


cdef const char* check_tables(Load* x) noexcept nogil:
    """Each child is in one table, or has moved and is in both. No other slot is in use: its node may be freed."""
    cdef Tree* t = x.t
    cdef uint32_t i, found = 0, found_draining = 0
    cdef uint64_t* slot
    cdef uint64_t* old
    cdef const char* reason = count_slots(x, t.table) or (count_slots(x, t.draining) if t.draining != NULL else NULL)
    if reason != NULL:
        return reason
    for i in range(x.nodes):
        if not node_at(t, i).state & LIVE or node_at(t, i).parent == NONE:
            continue
        slot = slot_of(t, t.table, i)
        old = slot_of(t, t.draining, i) if t.draining != NULL else NULL
        if slot == NULL and old == NULL or old != NULL and (old - &t.draining.slots[0] < t.drained) != (slot != NULL):
            return b"a child is not found"
        found += slot != NULL
        found_draining += old != NULL
    if (found != t.table.used or (t.draining != NULL and found_draining != t.draining.used)
            or (<uint64_t> x.children + t.table.deleted) * 8 > <uint64_t> t.table.size * 7):
        return b"its child table holds too much"
    return NULL


cdef uint64_t* slot_of(Tree* t, ChildTable* table, uint32_t i) noexcept nogil:
    """The slot where a search for a node ends, if it finds it."""
    cdef Node* node = node_at(t, i)
    cdef uint32_t child = NONE
    cdef uint64_t* slot = slot_in(t, table, node.parent, node.run.tokens[0], node.run.start, &child)
    return slot if child == i else NULL


cdef const char* count_slots(Load* x, ChildTable* table) noexcept nogil:
    cdef uint32_t i, child, filled = 0, most = min(<uint32_t> FILLED_MAX, table.size - 1)
    for i in range(table.size):
        filled = filled + 1 if table.slots[i] != EMPTY_SLOT else 0
        if filled > most:
            return b"its child table is full, or full in one place"
        if table.slots[i] > DELETED_SLOT:
            child = <uint32_t> table.slots[i]
            if child >= x.nodes or not node_at(x.t, child).state & LIVE or node_at(x.t, child).parent == NONE:
                return b"its child table leads nowhere"
            table.used += 1
        table.deleted += table.slots[i] == DELETED_SLOT
    return NULL


cdef const char* check_marks(Load* x) noexcept nogil:
    """Recency lists hold each mark once; a worker marks the whole of what is above a mark, as its newer."""
    cdef uint32_t i, at
    cdef Node* node
    for i in range(x.t.worker_end):
        if not is_recency_right(x, i):
            return b"the recency list of a worker is broken"
    for i in range(x.nodes):
        node = node_at(x.t, i)
        if not node.state & LIVE or node.parent == NONE or entry_count(node) == 0:
            continue
        for at in range(word_count(node)):
            if not is_closed(x, node, words_of(node)[at]):
                return b"a worker marks a node and not what is above it"
    return NULL


cdef bint is_recency_right(Load* x, uint32_t worker) noexcept nogil:
    """Walk the list and note each mark's place in it."""
    cdef Recency* recency = &x.t.workers[worker].recency
    cdef uint32_t i = recency.oldest, before = NONE, place = CLAIMED, key = x.t.workers[worker].key
    if x.t.workers[worker].capacity == 0:
        return True
    while i != NONE:
        if i >= x.marks or x.seen[i] != CLAIMED or mark_at(x.t, i).worker != key or mark_at(x.t, i).older != before:
            return False
        place += 1
        x.seen[i] = place
        before = i
        i = mark_at(x.t, i).newer
    return place - CLAIMED == x.t.workers[worker].marks and recency.newest == before


cdef bint is_closed(Load* x, Node* node, uint64_t word) noexcept nogil:
    cdef Node* above = node_at(x.t, node.parent)
    cdef Entry own, entry
    if end_of(word) == 0 or above.parent == NONE:
        return True
    own = find_entry(node, worker_of(word))
    entry = find_entry(above, worker_of(word))
    return entry.end == run_end(above.run) and x.seen[entry.mark] > x.seen[own.mark]


cdef const char* check_ages(Load* x) noexcept nogil:
    cdef uint32_t marked = 0, unmarked = 0
    if not walk_ages(x, &x.t.marked, True, &marked) or not walk_ages(x, &x.t.unmarked, False, &unmarked):
        return b"a list of nodes by age is broken"
    return NULL if marked + unmarked == x.children else <const char*> b"a node is in no list by age"


cdef bint walk_ages(Load* x, List* ages, bint marked, uint32_t* count) noexcept nogil:
    cdef uint32_t i = ages.oldest, before = NONE
    cdef Node* node
    while i != NONE:
        if i >= x.nodes:
            return False
        node = node_at(x.t, i)
        if not node.state & LIVE or node.parent == NONE or node.older != before or (entry_count(node) > 0) != marked:
            return False
        count[0] += 1
        before = i
        i = node.newer
    return ages.newest == before
