# What is known of one worker's blocks: its structs, no code. Functions on them are in `_block_places.pxd` and
# `_block_store.pyx`, the table of hashes in `_block_table.pxd`.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from preble._block_table cimport Table

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
    uint32_t index               # of the worker
    uint32_t worker              # its key (see _layout.pxd), as of this call
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
