# What is known of one worker's blocks: its structs, no code. Functions on them are in `block_positions.pxd` and
# `block_updates.pyx`, the table of hashes in `block_table.pxd`.

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t

from preble._kv_index.block_table cimport Table

cdef enum:
    COPIES_MAX = 16              # kinds of copies distinguished; those beyond share the last bit
    MEDIUM_BYTES = 24
    PLACES_KEPT = 8              # of recent prompts, and of recent runs that left what was sent
    SPACES_MAX = 65535           # namespaces of one worker at a time
    POSITIONS_MAX = 1 << 28      # tokens of a prompt
    CREDIT_MAX = 1 << 24

cdef struct Place:               # a node as it was when it was noted, and a position on the path to it
    uint32_t node
    uint32_t generation
    uint32_t end

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
    uint16_t gpu_copies          # of these kinds, by bit, those in the GPU's memory
    uint16_t host_copies         # and in the host's
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
    int64_t answers              # runs of new blocks that reached the end of a prompt sent there
    int64_t apart_runs           # runs of new blocks that left what was sent there
    Place apart[PLACES_KEPT]     # the last of these
