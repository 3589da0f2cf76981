# The blocks of one worker by hash, as inline C: a hash table that grows a segment at a time. Owns the memory of blocks
# and slots; what a block means, and everything about the tree, is in `block_updates.pyx`.
#
#     directory (2 ** depth pointers)      segments                     slab of blocks
#       00 ---------------------------\     [tag block, tag block, ...]   48 bytes each, addressed by index
#       01 ----------------------------->   [ ... ]
#       10 ------------------------------>  [ ... ]
#       11 ------------------------------/
#
# A tag's first `depth` bits choose the directory's entry, its last bits the slot in the segment where probing begins. A
# full segment is split in two by the next bit of its tags; only its own slots move, and when the directory is too short
# for that it doubles. So no insertion moves more than one segment, however many blocks there are. Segments never
# shrink: clearing gives all of them back.

from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from preble._kv_index.decode cimport Key
from preble._core.memory cimport (NONE, Budget, Slab, budget_alloc, budget_free, slab_at, slab_close, slab_give,
                                  slab_init, slab_reserve, slab_take)

cdef extern from *:
    """
    #if defined(__GNUC__)
    #define preble_prefetch(address) __builtin_prefetch(address)
    #else
    #define preble_prefetch(address) ((void) (address))
    #endif
    """
    void preble_prefetch(const void* address) noexcept nogil

cdef enum:
    SEGMENT = 512                # slots, a power of two
    SEGMENT_FULL = 384           # slots in use at which a segment is split
    DEPTH_MAX = 18               # bits of the directory; beyond it, tags chosen to collide find the table full
    NO_ROOM = -2                 # the table is full; -1 is memory

cdef struct Block:               # 48 bytes
    uint64_t lo                  # the hash, see `Key`
    uint64_t parent              # `name_of` the block before it; of no meaning where `start` is 0
    uint32_t hi
    uint32_t node                # where in the tree it ended when last looked at, and that node's generation
    uint32_t generation
    uint32_t start               # tokens before it
    uint32_t end                 # tokens up to its end
    int32_t first                # its first token
    uint32_t print               # fingerprint of its tokens
    uint16_t copies              # a bit for each medium and group that holds it
    uint16_t space               # its namespace's row

cdef struct Slot:
    uint32_t tag
    uint32_t block               # NONE: empty

cdef struct Segment:
    uint32_t depth               # bits that its tags share
    uint32_t used
    Slot slots[SEGMENT]

cdef struct Table:
    Segment** directory          # NULL while empty
    uint32_t depth
    uint32_t segments
    uint32_t count               # blocks
    Slab blocks
    Budget budget


cdef inline uint64_t name_of(uint64_t lo, uint32_t hi) noexcept nogil:
    # A block as its children name it: 64 bits, exact for ints.
    return lo ^ (<uint64_t> hi * <uint64_t> 0x9FB21C651E98DF25)

cdef inline uint32_t tag_of(uint64_t name) noexcept nogil:
    name = (name ^ name >> 32) * <uint64_t> 0xE7037ED1A0B428DB
    return <uint32_t> ((name ^ name >> 29) * <uint64_t> 0x8EBC6AF09C88C6E3 >> 32)

cdef inline Block* block_at(Table* table, uint32_t i) noexcept nogil:
    return <Block*> slab_at(&table.blocks, i)

cdef inline uint32_t entry_of(uint32_t depth, uint32_t tag) noexcept nogil:
    return <uint32_t> ((<uint64_t> tag << depth) >> 32)

cdef inline Segment* segment_of(Table* table, uint32_t tag) noexcept nogil:
    return table.directory[entry_of(table.depth, tag)]

cdef inline void fetch_slot(Table* table, uint32_t tag) noexcept nogil:
    # Ask for the cache lines that a search for the tag, and entering it, will need.
    cdef Segment* segment
    if table.directory != NULL:
        segment = segment_of(table, tag)
        preble_prefetch(segment)
        preble_prefetch(&segment.slots[tag & (SEGMENT - 1)])

cdef inline Slot* probe(Table* table, Segment* segment, uint64_t name, uint32_t tag) noexcept nogil:
    # The slot of a name, or the empty one where it belongs.
    cdef uint32_t at = tag & (SEGMENT - 1)
    cdef Block* block
    while segment.slots[at].block != NONE:
        if segment.slots[at].tag == tag:
            block = block_at(table, segment.slots[at].block)
            if name_of(block.lo, block.hi) == name:
                break
        at = (at + 1) & (SEGMENT - 1)
    return &segment.slots[at]

cdef inline uint32_t find_name(Table* table, uint64_t name) noexcept nogil:
    # The block of a name, or NONE.
    cdef uint32_t tag = tag_of(name)
    if table.directory == NULL:
        return NONE
    return probe(table, segment_of(table, tag), name, tag).block

cdef inline uint32_t find_key(Table* table, Key* key) noexcept nogil:
    cdef uint32_t i = find_name(table, name_of(key.lo, key.hi))
    return i if i == NONE or block_at(table, i).hi == key.hi else <uint32_t> NONE

cdef inline Segment* new_segment(Table* table, uint32_t depth) noexcept nogil:
    cdef Segment* segment = <Segment*> budget_alloc(&table.budget, sizeof(Segment))
    if segment != NULL:
        memset(&segment.slots[0], 0xff, sizeof(Slot) * SEGMENT)
        segment.depth = depth
        segment.used = 0
        table.segments += 1
    return segment

cdef inline void put_slot(Segment* segment, Slot slot) noexcept nogil:
    cdef uint32_t at = slot.tag & (SEGMENT - 1)
    while segment.slots[at].block != NONE:
        at = (at + 1) & (SEGMENT - 1)
    segment.slots[at] = slot
    segment.used += 1

cdef inline int open_table(Table* table) noexcept nogil:
    cdef Segment** directory = <Segment**> budget_alloc(&table.budget, sizeof(Segment*))
    if directory == NULL:
        return -1
    directory[0] = new_segment(table, 0)
    if directory[0] == NULL:
        budget_free(&table.budget, directory, sizeof(Segment*))
        return -1
    table.directory = directory
    table.depth = 0
    return 0

cdef inline int double_directory(Table* table) noexcept nogil:
    cdef uint32_t i, entries = <uint32_t> 1 << table.depth
    cdef Segment** wider
    if table.depth == DEPTH_MAX:
        return NO_ROOM
    wider = <Segment**> budget_alloc(&table.budget, 2 * <int64_t> entries * sizeof(Segment*))
    if wider == NULL:
        return -1
    for i in range(entries):
        wider[2 * i] = wider[2 * i + 1] = table.directory[i]
    budget_free(&table.budget, table.directory, <int64_t> entries * sizeof(Segment*))
    table.directory = wider
    table.depth += 1
    return 0

cdef inline int split_segment(Table* table, uint32_t tag) noexcept nogil:
    # Two segments instead of the tag's one. 0, -1 or NO_ROOM; content is the same in any case.
    cdef Segment* low = segment_of(table, tag)
    cdef Segment* high
    cdef Slot slots[SEGMENT]
    cdef uint32_t i, first, span
    cdef int trouble = double_directory(table) if low.depth == table.depth else 0
    if trouble:
        return trouble
    high = new_segment(table, low.depth + 1)
    if high == NULL:
        return -1
    memcpy(&slots[0], &low.slots[0], sizeof(slots))
    memset(&low.slots[0], 0xff, sizeof(slots))
    low.depth += 1
    low.used = 0
    for i in range(<uint32_t> SEGMENT):
        if slots[i].block != NONE:
            put_slot(high if slots[i].tag >> (32 - low.depth) & 1 else low, slots[i])
    span = <uint32_t> 1 << (table.depth - low.depth)
    first = entry_of(table.depth, tag) & ~(2 * span - 1)
    for i in range(span):
        table.directory[first + span + i] = high
    return 0

cdef inline int link_block(Table* table, uint32_t i) noexcept nogil:
    # Enter a filled block. 0; 1 where its key is there already; -1; NO_ROOM. Nothing has changed unless 0.
    cdef uint64_t name = name_of(block_at(table, i).lo, block_at(table, i).hi)
    cdef uint32_t tag = tag_of(name)
    cdef int trouble
    cdef Segment* segment
    cdef Slot* slot
    if table.directory == NULL and open_table(table):
        return -1
    while True:
        segment = segment_of(table, tag)
        slot = probe(table, segment, name, tag)
        if slot.block != NONE:
            return 1
        if segment.used < SEGMENT_FULL:
            break
        trouble = split_segment(table, tag)
        if trouble:
            return trouble
    slot.tag = tag
    slot.block = i
    segment.used += 1
    table.count += 1
    return 0

cdef inline void unlink_block(Table* table, uint32_t i) noexcept nogil:
    # Take a block out and give it back. What was probed past it moves up, so that no search meets a hole.
    cdef Block* block = block_at(table, i)
    cdef uint32_t tag = tag_of(name_of(block.lo, block.hi)), at = tag & (SEGMENT - 1), other
    cdef Segment* segment = segment_of(table, tag)
    while segment.slots[at].block != i:
        at = (at + 1) & (SEGMENT - 1)
    other = (at + 1) & (SEGMENT - 1)
    while segment.slots[other].block != NONE:
        if (other - segment.slots[other].tag) & (SEGMENT - 1) >= (other - at) & (SEGMENT - 1):
            segment.slots[at] = segment.slots[other]
            at = other
        other = (other + 1) & (SEGMENT - 1)
    segment.slots[at].block = NONE
    segment.used -= 1
    table.count -= 1
    slab_give(&table.blocks, i)

cdef inline int reserve_blocks(Table* table, uint32_t count) noexcept nogil:
    # Make the next `count` takes succeed.
    if table.blocks.chunks == NULL and slab_init(&table.blocks, sizeof(Block)):
        return -1
    return slab_reserve(&table.blocks, &table.budget, count)

cdef inline uint32_t take_block(Table* table) noexcept nogil:
    return slab_take(&table.blocks)

cdef inline void give_block(Table* table, uint32_t i) noexcept nogil:
    slab_give(&table.blocks, i)

cdef inline void clear_table(Table* table) noexcept nogil:
    # Forget all blocks and give all memory back, also of a directory that a refused snapshot has filled in part.
    cdef uint32_t i = 0, entries = <uint32_t> 1 << table.depth
    cdef Segment* segment
    while table.directory != NULL and i < entries and table.directory[i] != NULL:
        segment = table.directory[i]
        i += <uint32_t> 1 << (table.depth - segment.depth)
        budget_free(&table.budget, segment, sizeof(Segment))
    budget_free(&table.budget, table.directory, <int64_t> entries * sizeof(Segment*))
    if table.blocks.chunks != NULL:
        slab_close(&table.blocks, &table.budget)
    table.directory = NULL
    table.depth = table.segments = table.count = 0
