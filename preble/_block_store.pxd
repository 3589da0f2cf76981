# Blocks of one worker by hash: layout, and contents of `_block_store.pyx`.

from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t

from preble._block_table cimport Table
from preble._decode cimport Batch
from preble._layout cimport Tree

cdef enum Outcome:
    DONE = 0
    NO_MEMORY = -1
    CONFLICT = 1                 # a hash is known for another place
    OVERFLOW = 2                 # more blocks than may be known
    IGNORED = 3                  # and counted

cdef enum:
    COPIES_MAX = 16              # kinds of copies told apart; those beyond share the last bit
    MEDIUM_BYTES = 24

cdef struct Copy:                # a medium and a KV cache group that held blocks
    uint32_t group
    uint32_t length
    char medium[MEDIUM_BYTES]

cdef struct Space:               # a namespace of this worker's blocks
    uint32_t root                # in the tree, and that root's generation
    uint32_t generation
    uint32_t blocks
    uint64_t call                # the last call that used it
    uint64_t lora                # digests of what its blocks name beside tokens; 0: nothing
    uint64_t salted
    uint64_t extra

cdef struct Blocks:
    Table table
    uint32_t worker
    uint32_t blocks_max
    Space* spaces
    uint32_t space_room
    Copy copies[COPIES_MAX]
    uint32_t copy_count
    int64_t credit               # steps that may be spent on finding lost places again
    int64_t orphans
    int64_t conflicts
    int64_t overflows
    int64_t keyed
    int64_t unknown_blocks
    int64_t unknown_events
    int64_t lost

cdef struct Run:                 # blocks about to be stored: of one event, or of several that continue each other
    uint32_t event               # the first of them, and how many
    uint32_t events
    uint32_t keys_at
    uint32_t count               # blocks
    uint32_t size                # tokens of each
    uint32_t start
    uint32_t end
    uint32_t node                # holds position `start`
    uint32_t parent              # block before them, NONE: they start the prompt
    uint32_t space
    uint16_t copy
    uint64_t parent_name
    const int32_t* tokens        # of the first block
    uint32_t fresh               # blocks not known before
    uint32_t leaf                # holds what the tree took of them, and up to where
    uint32_t leaf_end
    uint32_t marked              # position up to which the worker was believed to cache this prompt before

cdef Outcome apply_batch(Blocks* x, Tree* t, Batch* b, double now, uint32_t* changed) noexcept nogil
