# The token radix tree: layout, pictures and invariants. `parts.pxd` has its smallest parts, `nodes.pyx` nodes,
# marks and the split, `child_table.pxd` the child table, `operations.pyx` its operations, `_radix.pyx` its Python face.
#
# One forest of path-compressed trees over token ids, one root per namespace. A node owns a run of tokens; every path
# from a root spells a prompt. Marks say which worker is estimated to cache how much of a node.
#
#     before                          after inserting  1 2 3 9 9  for worker b
#
#     (root)                          (root)
#       └─ [1 2 3 4 5]  a:5             └─ [1 2 3]  a:3 b:3       U, a new node, takes the upper part
#            ├─ [6 7]   a:2                  ├─ [4 5]  a:2        L keeps its index: children stay valid
#            └─ [8]     a:1                  │   ├─ [6 7]  a:2
#                                            │   └─ [8]    a:1
#                                            └─ [9 9]  b:2        the new leaf
#
#     eviction for worker a, 2 tokens, oldest leaf first: [6 7] was touched least recently
#
#     [4 5]  a:2                       [4 5]  a:2
#       ├─ [6 7]  a:2                    ├─ [6 7]   (unmarked: forgotten once unhit for a window)
#       └─ [8]    a:1                    └─ [8]  a:1
#
# Invariants (`RadixTree.check` asserts each)
#   R1  children of a node start with different tokens; only roots have empty runs; a run starts where its parent's ends
#   G1  a live node's generation is odd, a freed one's even: a number that a reader noted of a node just freed is never
#       that of a live one, so a walk that ended there is not taken for one that holds
#   R2  the child table holds exactly the (parent, first token) -> child pairs
#   M1  an entry ends within its node, past its start; a worker marks a node only if it marks the whole of the parent
#       (prefix closure)
#   M2  a worker's tokens are the sum over its marks, and at most its limit
#   L1  a worker's recency list holds exactly its unpinned marks, a node always older than its parent, so that the
#       oldest is a leaf of what the worker caches
#   L2  the aging list "marked" holds the non-root nodes with a mark, "unmarked" those without
#   P1  a mark's pin count is the number of holds at or below its node; pinned marks are in no recency list
#   A1  what a mark has away begins within it; only such a mark is far
#   A2  a worker's tokens that are away are the sum over its marks, the tree's that over its workers; so is `below`
#   A3  every mark of a worker older than `warm` is wholly away
#   E1  ghosts (see EntryBlock) are in one list of their own, which keeps leaves before their parents
#   B1  budget.used is the sum of all live allocations, retired ones included, and of what the keys of namespaces take;
#       directories of slabs, reader slots and the queue of retired things are not counted: their size is fixed
#
# Memory: nodes and marks live in slabs of fixed chunks that never move, addressed by 32-bit index; token runs are
# separate blocks that are never changed after they are linked (a split makes two new ones), so a reader sees a whole
# run or another whole run. All walks are loops. Every function that allocates does so before it changes anything.
#
# Threads: writers hold `writer_lock`, one at a time. Readers (`tree_walk`, `held_on_path` and what they call) hold a
# reader slot of `epochs` and nothing else. Fields marked (r) are read by them, so they are written with atomic stores;
# what is unlinked is retired, and freed when no reader can be looking at it. docs/radix.md explains it with pictures.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from preble._core.atomic cimport Apart, load32
from preble._core.epochs cimport Epochs
from preble._core.writer_lock cimport WriterLock
from preble._core.memory cimport CHUNK_BITS, CHUNK_MASK, NONE, Budget, Slab

cdef struct TokenRun:            # immutable once linked
    uint32_t start               # tokens before this run on the path
    uint32_t length              # tokens in this run
    int32_t tokens[1]            # `length` tokens, then (with_slots) `length` KV slots

# An entry says who caches a node: one word, key << 32 | end, so that a reader gets both or neither. `end` counts
# tokens from the prompt's start, so a split leaves the entries below it as they are. end == 0: no entry.
#
# A worker's key is epoch << 16 | index. When its cache is cleared its epoch moves on, and everything marked under the
# key before is a ghost at once: nobody counts it, and it is swept away little by little. Functions of the tree that
# change marks take the key as `worker`.
cdef struct EntryBlock:          # entries of a node with two or more marks, by key; removed ones stay with end == 0
    uint32_t count               # (r) words in use
    uint32_t room
    uint32_t live                # words with end > 0
    uint32_t unused
    uint64_t words[1]            # (r) `room` words, then (r) `room` indices of the Marks behind them

cdef struct Node:                # 64 bytes, one cache line
    TokenRun* run                # (r)
    EntryBlock* block            # (r) NULL: at most one mark, held by `only`
    uint64_t hits                # window counter over all workers (see _layout_parts)
    uint64_t only                # (r) the single entry; the last one, its end 0 (home); or NOBODY. Stale beside a block
    uint32_t only_mark           # (r)
    uint32_t parent              # (r) NONE for a root
    uint32_t first_child         # (r)
    uint32_t prev_sibling
    uint32_t next_sibling
    uint32_t older               # aging list (marked or unmarked)
    uint32_t newer
    uint32_t state               # (r) generation << STATE_BITS | TOUCHED | LIVE

cdef enum:
    NAMESPACE_BYTES = 256        # of a namespace beside its key and its root: two dictionaries, a queue, three numbers

cdef enum:
    INDEX_BITS = 16              # of a worker's key
    INDEX_MASK = 65535
    EPOCH_MAX = 65534            # one less than would fit, so that no key is NONE

cdef enum:
    LIVE = 1
    TOUCHED = 2                  # a prompt passed since it was made or last looked at for max_bytes
    STATE_BITS = 2

cdef enum:
    CONFIRMED = 1                # an engine has reported, or finished computing, this prefix
    AWAITED = 2                  # a prompt with new blocks ends at this node, and no event has reached that end yet
    FAR = 4                      # some of what is away is not even in host memory: on disk, or further off
    AWAY_SHIFT = 3               # above: 1 + the position from which on this node's tokens are away; 0: none is

# Tokens that are away left the GPU's memory, and lie in host memory or on disk. What a prompt finds on the GPU ends
# where the first node on its path has some away; so a mark needs one position, and every mark below keeps its own.
cdef struct Mark:                # a worker's recency and hits at one node, 32 bytes
    uint64_t hits                # (r) window counter of this worker's requests
    uint32_t node                # (r)
    uint32_t worker              # its key
    uint32_t older               # the worker's recency list
    uint32_t newer               # (r)
    uint32_t pins                # holds at or below; pinned marks are in no list
    uint32_t flags               # (r)

cdef struct List:                # a doubly linked list over slab indices
    uint32_t oldest              # (r)
    uint32_t newest

cdef struct Recency:             # a worker's marks in the order of use
    uint32_t oldest              # (r)
    uint32_t newest
    uint32_t warm                # every mark older than this one is wholly away; NONE: begin to look at the oldest
    uint32_t unused

cdef struct WorkerMarks:         # one worker's side of the tree
    int64_t capacity             # (r) tokens; 0 = index not in use
    int64_t tokens               # (r) sum over its marks
    int64_t away                 # (r) of these, not in the GPU's memory
    int64_t below                # (r) tokens that host memory and disk hold; 0: nothing, what leaves the GPU is gone
    int64_t limit                # tokens its marks may cover, see set_limit
    int64_t pinned               # tokens of marks that are
    uint32_t marks               # number of marks
    uint32_t key                 # (r) epoch << 16 | index
    bint evictions_reported      # its engine reports what it drops
    bint moves_reported          # and what leaves the GPU's memory for host memory or disk
    Recency recency

cdef struct ChildTable:          # (parent, first token) -> child
    uint32_t size                # a power of two
    uint32_t used
    uint32_t deleted
    uint32_t unused
    uint64_t slots[1]            # (r) `size` of tag << 32 | child; EMPTY_SLOT and DELETED_SLOT are reserved

cdef struct Tree:                # what readers look at lies apart from what writers change each time
    ChildTable* table            # (r)
    ChildTable* draining         # (r) the table before, while its children move over a few at a time; else NULL
    WorkerMarks* workers         # (r)
    uint64_t worker_changes      # (r) +1 whenever an index is given out or back
    int64_t away                 # (r) tokens of all workers that are not in a GPU's memory
    int64_t below                # (r) tokens that host memory and disk of all workers hold
    uint32_t worker_end          # (r) one past the highest index in use
    bint with_slots
    double window_seconds
    Slab nodes                   # (r)
    Slab marks                   # (r)
    Budget budget
    WorkerMarks ghost            # marks under keys of the past: nobody's, in the order they will be swept
    uint32_t drained             # slots of the draining table that have moved
    uint32_t worker_room
    List marked                  # aging lists of nodes
    List unmarked
    uint64_t version             # +1 at each change of what is cached
    int64_t shed_nodes           # nodes forgotten because of max_bytes
    int64_t refused_tokens       # prompt tokens not remembered because of max_bytes
    TokenRun* ready              # what the writer copied before it was one, see `ready_run`; else NULL
    WriterLock writer_lock
    Apart apart
    Epochs epochs                # (r)

cdef struct Walk:                # where a prompt leaves the tree
    uint32_t node                # deepest node reached; NONE: not even a root
    uint32_t inside              # tokens of that node's run that matched
    uint32_t matched             # tokens matched from the root
    uint32_t generation          # of that node

cdef struct Entry:               # a copy of an entry, for writers
    uint32_t at                  # its place in the block
    uint32_t end                 # 0: none
    uint32_t mark

cdef extern from * nogil:
    """
    #define PREBLE_NOBODY ((uint64_t)0xFFFFFFFF << 32)
    """
    uint64_t NOBODY "PREBLE_NOBODY"
    TokenRun* load_run "preble_load"(TokenRun** p)
    EntryBlock* load_block "preble_load"(EntryBlock** p)
    ChildTable* load_table "preble_load"(ChildTable** p)
    WorkerMarks* load_workers "preble_load"(WorkerMarks** p)
    void store_run "preble_store"(TokenRun** p, TokenRun* value)
    void store_block "preble_store"(EntryBlock** p, EntryBlock* value)
    void store_table "preble_store"(ChildTable** p, ChildTable* value)
    void store_workers "preble_store"(WorkerMarks** p, WorkerMarks* value)

cdef inline Node* node_at(Tree* t, uint32_t i) noexcept nogil:
    return (<Node*> t.nodes.chunks[i >> CHUNK_BITS]) + (i & CHUNK_MASK)

cdef inline Mark* mark_at(Tree* t, uint32_t i) noexcept nogil:
    return (<Mark*> t.marks.chunks[i >> CHUNK_BITS]) + (i & CHUNK_MASK)

cdef inline uint32_t generation(Node* node) noexcept nogil:
    return load32(&node.state) >> STATE_BITS

cdef inline bint is_same_node(Tree* t, uint32_t i, uint32_t number) noexcept nogil:
    # Whether node `i` is still the live one of that generation. A split leaves its lower part under the index.
    return node_at(t, i).state & LIVE and generation(node_at(t, i)) == number

cdef inline uint32_t run_end(TokenRun* run) noexcept nogil:
    # Tokens from the prompt's start to the end of the run.
    return run.start + run.length

cdef inline uint32_t worker_of(uint64_t word) noexcept nogil:
    return <uint32_t> (word >> 32)

cdef inline uint32_t end_of(uint64_t word) noexcept nogil:
    return <uint32_t> word

cdef inline uint32_t index_of(uint32_t key) noexcept nogil:
    return key & INDEX_MASK

cdef inline WorkerMarks* state_of(Tree* t, uint32_t key) noexcept nogil:
    # The side of a worker whose key is that of now.
    return &t.workers[key & INDEX_MASK]

cdef inline WorkerMarks* owner_of(Tree* t, uint32_t key) noexcept nogil:
    # Who has the marks under a key: its worker, or nobody any more.
    cdef WorkerMarks* state = &t.workers[key & INDEX_MASK]
    return state if state.key == key else &t.ghost
