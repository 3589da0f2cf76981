"""One worker's blocks by hash in a snapshot. Owns how the table, its segments, places and namespaces are written, and
what is checked of them; the tree they lie in has been read before, by `tree.pyx`.

Hashes are kept, since engines go on speaking in them. A place is kept as it was noted, and one whose node has gone is
read as lost, which it is. What a caller's `namespace_of` has answered is not kept; it is asked again.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from preble._kv_index.block_layout cimport (COPIES_MAX, CREDIT_MAX, MEDIUM_BYTES, POSITIONS_MAX, SPACES_MAX, Blocks,
                                            Copy, Space)
from preble._kv_index.block_positions cimport print_above, seen_place
from preble._kv_index.block_table cimport (DEPTH_MAX, SEGMENT, SEGMENT_FULL, Block, Segment, Table, block_at, find_name,
                                           name_of, new_segment, reserve_blocks, tag_of)
from preble._kv_index.block_index cimport BlockIndex
from preble._kv_index.block_updates cimport sort_copies
from preble._core.tree.layout cimport Tree, generation, is_same_node, node_at, run_end
from preble._core.memory cimport CHUNK, CHUNKS_MAX, NONE, budget_alloc, slab_at
from preble._snapshot.codec cimport Reader, Writer, allocated, chain_free, load_items, refuse, save_slab

cdef enum:
    COUNTERS = 7

cdef struct BlocksHead:
    uint64_t calls
    int64_t credit
    int64_t counters[COUNTERS]
    uint32_t copy_count
    uint32_t space_room
    uint32_t chunks              # of the slab; NONE: there is none
    uint32_t free_blocks
    uint32_t depth
    uint32_t segments            # 0: no directory


# --- writing ----------------------------------------------------------------------------------------------------------

def write_blocks(Writer w not None, BlockIndex index not None) -> None:
    """Write what is known of a worker's blocks, as the tree's writer."""
    cdef Blocks* b = &index.b
    cdef BlocksHead head
    memset(&head, 0, sizeof(head))
    head.calls = index.calls
    head.credit = b.credit
    head.counters = [b.orphans, b.conflicts, b.overflows, b.keyed, b.unknown_blocks, b.unknown_events, b.lost]
    head.copy_count = b.copy_count
    head.space_room = b.space_room
    head.chunks = b.table.blocks.chunk_count if b.table.blocks.chunks != NULL else <uint32_t> NONE
    head.free_blocks = b.table.blocks.free_count
    head.depth = b.table.depth
    head.segments = b.table.segments
    w.put(&head, sizeof(head))
    w.put(&b.copies[0], sizeof(Copy) * COPIES_MAX)
    w.put(b.spaces, <int64_t> b.space_room * sizeof(Space))
    w.value(tuple(index.names), "a namespace of blocks")
    w.value(tuple(index.free_rows), "a row of blocks")
    if b.table.blocks.chunks != NULL:
        save_slab(w, &b.table.blocks)
    write_segments(w, &b.table)


cdef int write_segments(Writer w, Table* table) except -1:
    """Each segment once, in the directory's order: its depth, and the block in each slot."""
    cdef uint32_t i = 0, at
    cdef uint32_t blocks[SEGMENT]
    cdef Segment* segment
    if table.directory == NULL:
        return 0
    while i < <uint32_t> 1 << table.depth:
        segment = table.directory[i]
        for at in range(<uint32_t> SEGMENT):
            blocks[at] = segment.slots[at].block
        w.put(&segment.depth, 4)
        w.put(&blocks[0], sizeof(blocks))
        i += <uint32_t> 1 << (table.depth - segment.depth)
    return 0


# --- reading ----------------------------------------------------------------------------------------------------------

def read_blocks(Reader r not None, BlockIndex index not None) -> None:
    """Fill an empty index. Raises SnapshotRefused; then it is of no use."""
    cdef Blocks* b = &index.b
    cdef BlocksHead head
    r.copy(&head, sizeof(head))
    r.copy(&b.copies[0], sizeof(Copy) * COPIES_MAX)
    if (head.copy_count > <uint32_t> COPIES_MAX - 1 or head.space_room > <uint32_t> SPACES_MAX
            or not 0 <= head.credit <= CREDIT_MAX or min(head.counters) < 0):
        refuse(b"values about blocks are out of their range")
    for i in range(head.copy_count):
        if b.copies[i].length > <uint32_t> MEDIUM_BYTES:
            refuse(b"values about blocks are out of their range")
    index.calls = head.calls
    b.credit = head.credit
    b.orphans, b.conflicts, b.overflows, b.keyed = [head.counters[i] for i in range(4)]
    b.unknown_blocks, b.unknown_events, b.lost = [head.counters[i] for i in range(4, COUNTERS)]
    b.copy_count = head.copy_count
    sort_copies(b)
    read_spaces(r, index, head.space_room)
    read_slab(r, b, &head)
    read_segments(r, b, &head)
    check_blocks(index)


cdef int read_spaces(Reader r, BlockIndex index, uint32_t room) except -1:
    cdef Blocks* b = &index.b
    cdef Space* space
    cdef uint32_t row
    if room:
        b.spaces = <Space*> allocated(budget_alloc(&b.table.budget, <int64_t> room * sizeof(Space)))
        b.space_room = room
        r.copy(b.spaces, <int64_t> room * sizeof(Space))
    names, free_rows = r.value(), r.value()
    if type(names) is not tuple or type(free_rows) is not tuple or len(names) != room:
        refuse(b"namespaces of blocks do not fit")
    if (len(set(free_rows)) != len(free_rows) or len(free_rows) + len(names) - names.count(None) != room
            or not all(type(row) is int and 0 <= row < room and names[row] is None for row in free_rows)):
        refuse(b"namespaces of blocks do not fit")
    index.names = list(names)
    index.free_rows = list(free_rows)
    for row in range(room):
        space = &b.spaces[row]
        if names[row] is not None:
            if type(names[row]) is not tuple or len(names[row]) != 4 or names[row] in index.rows:
                refuse(b"namespaces of blocks do not fit")
            index.rows[names[row]] = row
        if (names[row] is None or space.root not in index.tree._names
                or generation(node_at(&index.tree.t, space.root)) != space.generation):
            space.root = NONE                    # the namespace's root is not there any more
    return 0


cdef int read_slab(Reader r, Blocks* b, BlocksHead* head) except -1:
    cdef Table* table = &b.table
    cdef bytearray taken
    cdef const char* order
    if head.chunks == NONE:
        return 0
    if head.chunks > <uint32_t> CHUNKS_MAX or reserve_blocks(table, 0):
        refuse(b"more blocks than there may be")
    load_items(r, &table.blocks, &table.budget, head.chunks)
    order = r.take(<int64_t> head.free_blocks * 4)
    taken = bytearray(head.chunks * <uint32_t> CHUNK)
    if not chain_free(&table.blocks, <const uint32_t*> order, head.free_blocks, <uint8_t*> <char*> taken):
        refuse(b"its list of free blocks is wrong")
    return 0


cdef int read_segments(Reader r, Blocks* b, BlocksHead* head) except -1:
    """Segments into a directory that fits them."""
    cdef Table* table = &b.table
    cdef uint32_t entries, i = 0
    if head.segments == 0:
        return 0
    # Each doubling of the directory came with one segment more.
    if (head.depth > <uint32_t> DEPTH_MAX or head.depth >= head.segments or head.chunks == <uint32_t> NONE
            or <int64_t> head.segments * (SEGMENT + 1) * 4 > r.left()):
        refuse(b"its table of blocks is wrong")
    entries = <uint32_t> 1 << head.depth
    table.directory = <Segment**> allocated(budget_alloc(&table.budget, <int64_t> entries * sizeof(Segment*)))
    memset(table.directory, 0, entries * sizeof(Segment*))
    table.depth = head.depth
    while i < entries:
        i += read_segment(r, b, i)
    if table.segments != head.segments:
        refuse(b"its table of blocks is wrong")
    return 0


cdef uint32_t read_segment(Reader r, Blocks* b, uint32_t first) except 0:
    """One segment, which the directory's entries from `first` on lead to; returns how many."""
    cdef Table* table = &b.table
    cdef uint32_t blocks[SEGMENT]
    cdef uint32_t depth, span, at
    cdef Segment* segment
    cdef Block* block
    r.copy(&depth, 4)
    r.copy(&blocks[0], sizeof(blocks))
    if depth > table.depth or first % (<uint32_t> 1 << (table.depth - depth)):
        refuse(b"its table of blocks is wrong")
    span = <uint32_t> 1 << (table.depth - depth)
    segment = <Segment*> allocated(new_segment(table, depth))
    for at in range(span):
        table.directory[first + at] = segment
    for at in range(<uint32_t> SEGMENT):
        if blocks[at] == <uint32_t> NONE:
            continue
        if blocks[at] >= table.blocks.chunk_count * <uint32_t> CHUNK:
            refuse(b"its table of blocks leads nowhere")
        block = block_at(table, blocks[at])
        segment.slots[at].block = blocks[at]
        segment.slots[at].tag = tag_of(name_of(block.lo, block.hi))
        segment.used += 1
        table.count += 1
    if segment.used > <uint32_t> SEGMENT_FULL:
        refuse(b"its table of blocks is too full")
    return span


# --- what is checked --------------------------------------------------------------------------------------------------

cdef int check_blocks(BlockIndex index) except -1:
    """Every block that is not free is found by its hash, so each is in one slot, and lies where it says."""
    cdef Blocks* b = &index.b
    cdef uint32_t i, row, items = b.table.blocks.chunk_count * <uint32_t> CHUNK
    cdef bytearray is_free = bytearray(items)
    spaces = [0] * b.space_room
    i = b.table.blocks.free_head if items else <uint32_t> NONE
    while i != NONE:
        is_free[i] = 1
        i = (<uint32_t*> slab_at(&b.table.blocks, i))[0]
    if b.table.count != b.table.blocks.live or b.table.count > b.blocks_max:
        refuse(b"its table of blocks is wrong")
    for i in range(items):
        if not is_free[i]:
            refuse(check_block(b, &index.tree.t, i))
            spaces[block_at(&b.table, i).space] += 1
    for row in range(b.space_room):
        b.spaces[row].blocks = spaces[row]
        if spaces[row] and index.names[row] is None:
            refuse(b"a block is in no namespace")
    if b.table.count == 0 and b.table.budget.used:
        refuse(b"an index without blocks holds memory")
    return 0


cdef const char* check_block(Blocks* b, Tree* t, uint32_t i) noexcept:
    cdef Block* block = block_at(&b.table, i)
    cdef uint32_t node
    if find_name(&b.table, name_of(block.lo, block.hi)) != i:
        return b"a block is not found by its hash"
    if not block.copies or not block.start < block.end <= <uint32_t> POSITIONS_MAX or block.space >= b.space_room:
        return b"a block is out of its range"
    if block.node >= t.nodes.chunk_count * <uint32_t> CHUNK or not is_same_node(t, block.node, block.generation):
        block.node = NONE
        block.generation = 0
        return NULL
    node = seen_place(t, block)              # where the block notes it, as long as nobody asks: a place may get lost
    if run_end(node_at(t, node).run) < block.end or print_above(t, node, block.start, block.end) != block.print:
        return b"a block is not where it should be"
    return NULL
