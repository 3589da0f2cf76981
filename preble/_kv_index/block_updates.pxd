# Events about one worker's blocks: contents of `block_updates.pyx`.

from libc.stdint cimport int32_t, uint16_t, uint32_t, uint64_t

from preble._kv_index.block_layout cimport Blocks
from preble._kv_index.decode cimport Batch
from preble._core.tree.layout cimport Tree

cdef enum Outcome:
    DONE = 0
    NO_MEMORY = -1
    CONFLICT = 1                 # a hash is known for another place
    OVERFLOW = 2                 # more blocks than may be known
    IGNORED = 3                  # and counted

cdef struct Run:                 # blocks about to be stored: of one event, or of several that continue each other
    uint32_t keys_at
    uint32_t count               # blocks
    uint32_t keyed               # more blocks, which are distinguished by more than tokens and so are left out
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
    uint32_t marked              # position up to which the worker was estimated to cache this prompt before

cdef void sort_copies(Blocks* x) noexcept nogil
cdef void expect_moves(Tree* t, uint32_t index) noexcept nogil
cdef Outcome apply_batch(Blocks* x, Tree* t, Batch* b, double now, uint32_t* changed) noexcept nogil
