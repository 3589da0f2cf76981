# The token radix tree: layout, pictures and invariants. `_layout_parts.pxd` has its smallest parts, `_nodes.pyx` nodes,
# marks and the split, `_tree.pyx` its operations, `_radix.pyx` its Python face.
#
# One forest of path-compressed trees over token ids, one root per namespace. A node owns a run of tokens; every path
# from a root spells a prompt. Marks say which worker is believed to cache how much of a node.
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
#   R2  the child table holds exactly the (parent, first token) -> child pairs
#   M1  a mark covers 1..length tokens; a worker marks a node only if it marks the whole of the parent (prefix closure)
#   M2  a worker's tokens are the sum over its marks, and at most its capacity
#   L1  a worker's recency list holds exactly its unpinned marks, a node always older than its parent, so that the
#       oldest is a leaf of what the worker caches
#   L2  the aging list "marked" holds the non-root nodes with a mark, "unmarked" those without
#   P1  a mark's pin count is the number of holds at or below its node; pinned marks are in no recency list
#   B1  budget.used is the sum of all live allocations
#
# Memory: nodes and marks live in slabs of fixed chunks that never move, addressed by 32-bit index; token runs are
# separate blocks that are never changed after they are linked (a split makes two new ones), so a reader sees a whole
# run or another whole run. All walks are loops. Every function that allocates does so before it changes anything.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from preble._memory cimport CHUNK_BITS, CHUNK_MASK, NONE, Budget, Slab

cdef struct TokenRun:            # immutable once linked
    uint32_t start               # tokens before this run on the path
    uint32_t length              # tokens in this run
    int32_t tokens[1]            # `length` tokens, then (with_slots) `length` KV slots

cdef struct Entry:               # who caches a node
    uint32_t worker
    uint32_t tokens              # how many of the node's first tokens
    uint32_t mark                # index of the Mark behind it

cdef struct EntryBlock:          # entries of a node with two or more marks, by worker
    uint32_t count               # 1 only where adding the second mark failed
    uint32_t room
    Entry entries[1]

cdef struct Node:                # 64 bytes, one cache line
    TokenRun* run
    EntryBlock* block            # NULL: at most one mark, held by `only`
    uint64_t hits                # window counter over all workers (see _layout_parts)
    Entry only                   # the single mark, or worker == NONE
    uint32_t parent              # NONE for a root
    uint32_t first_child
    uint32_t prev_sibling
    uint32_t next_sibling
    uint32_t older               # aging list (marked or unmarked)
    uint32_t newer
    uint32_t state               # generation << 2 | TOUCHED | LIVE

cdef enum:
    LIVE = 1
    TOUCHED = 2                  # a prompt passed since it was made or last looked at for max_bytes

cdef struct Mark:                # a worker's recency and hits at one node, 32 bytes
    uint64_t hits                # window counter of this worker's requests
    uint32_t node
    uint32_t worker
    uint32_t older               # the worker's recency list
    uint32_t newer
    uint32_t pins                # holds at or below; pinned marks are in no list
    uint32_t confirmed           # an engine has reported, or finished computing, this prefix

cdef struct List:                # a doubly linked list over slab indices
    uint32_t oldest
    uint32_t newest

cdef struct WorkerMarks:         # one worker's side of the tree
    int64_t capacity             # tokens; 0 = index not in use
    int64_t tokens               # sum over its marks
    int64_t pinned               # of these, pinned
    uint32_t marks               # number of marks
    List recency

cdef struct ChildSlot:           # child table: (parent, first token) -> child
    uint32_t tag                 # hash bits; EMPTY_TAG and DELETED_TAG are reserved
    uint32_t child

cdef struct Tree:
    Budget budget
    Slab nodes
    Slab marks
    ChildSlot* table
    uint32_t table_size          # a power of two
    uint32_t table_used
    uint32_t table_deleted
    WorkerMarks* workers
    uint32_t worker_room
    uint32_t worker_end          # one past the highest index in use
    List marked                  # aging lists of nodes
    List unmarked
    double window_seconds
    bint with_slots
    uint64_t version             # +1 at each change of what is cached
    int64_t shed_nodes           # nodes forgotten because of max_bytes
    int64_t refused_tokens       # prompt tokens not remembered because of max_bytes

cdef struct Walk:                # where a prompt leaves the tree
    uint32_t node                # deepest node reached
    uint32_t inside              # tokens of that node's run that matched
    uint32_t matched             # tokens matched from the root

cdef inline Node* node_at(Tree* t, uint32_t i) noexcept nogil:
    return (<Node*> t.nodes.chunks[i >> CHUNK_BITS]) + (i & CHUNK_MASK)

cdef inline Mark* mark_at(Tree* t, uint32_t i) noexcept nogil:
    return (<Mark*> t.marks.chunks[i >> CHUNK_BITS]) + (i & CHUNK_MASK)

cdef inline uint32_t entry_count(Node* node) noexcept nogil:
    if node.block != NULL:
        return node.block.count
    return 0 if node.only.worker == NONE else 1

cdef inline Entry* entries_of(Node* node) noexcept nogil:
    return &node.block.entries[0] if node.block != NULL else &node.only

cdef inline uint32_t generation(Node* node) noexcept nogil:
    return node.state >> 2
