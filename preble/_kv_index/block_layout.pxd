# What is known of one worker's blocks: its structs, no code. Functions on them are in `block_positions.pxd` and
# `block_updates.pyx`, the table of hashes in `block_table.pxd`.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from preble._kv_index.block_table cimport Table

cdef enum:
    COPIES_MAX = 16              # kinds of copies distinguished; those beyond share the last bit
    MEDIUM_BYTES = 24
    ODD_MAX = 4
    ODD_TOKENS = 128
    SPACES_MAX = 65535           # namespaces of one worker at a time
    POSITIONS_MAX = 1 << 28      # tokens of a prompt
    CREDIT_MAX = 1 << 24
    OVERLAP_TOKENS = 16          # at least so many must agree, or all, with blocks of a few tokens

cdef struct Odd:                 # how a stored prompt began that was like none sent there
    uint32_t root                # of its namespace, and that root's generation
    uint32_t generation
    uint32_t count
    int32_t tokens[ODD_TOKENS]

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
    uint32_t worker              # its key (see _core/tree/layout.pxd), as of this call
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
    uint32_t block_size          # as was said; 0: nobody has
    uint32_t odd_size            # the last other one, and runs of it in a row
    uint32_t odd_runs
    int64_t stores               # events of stored blocks that were taken
    int64_t runs                 # runs of new blocks
    int64_t overlaps             # of these, begun like what the worker was sent
    uint32_t odd_count
    Odd odd[ODD_MAX]             # the last runs from a prompt's start that were not
