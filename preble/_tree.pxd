# The tree's operations: contents of `_tree.pyx`. "-1" means that memory is out and nothing has changed.

from libc.stdint cimport int32_t, int64_t, uint32_t

from preble._layout cimport Entry, Node, TokenRun, Tree, Walk

# reads
cdef Walk at_root(uint32_t root) noexcept nogil
cdef Walk tree_walk(Tree* t, Walk walk, const int32_t* tokens, uint32_t count) noexcept nogil
cdef Entry* find_entry(Node* node, uint32_t worker) noexcept nogil
cdef void tree_matches(Tree* t, Walk walk, uint32_t* matched, uint32_t workers) noexcept nogil
cdef uint32_t key_portion_end(Tree* t, Walk walk, uint32_t limit) noexcept nogil
cdef uint32_t confirmed_tokens(Tree* t, Walk walk, uint32_t worker) noexcept nogil

# writes: whole operations
cdef int tree_insert(Tree* t, Walk walk, const int32_t* tokens, uint32_t count, uint32_t worker, bint is_hit,
                     double now, uint32_t* leaf) noexcept nogil
cdef int split_node(Tree* t, uint32_t lower, uint32_t upper) noexcept nogil
cdef int64_t evict_tokens(Tree* t, uint32_t worker, int64_t need) noexcept nogil
cdef int64_t drop_below(Tree* t, uint32_t node, uint32_t worker, uint32_t kept_tokens) noexcept nogil
cdef int64_t drop_beside(Tree* t, uint32_t leaf, uint32_t worker, uint32_t kept_tokens) noexcept nogil
cdef int64_t take_back(Tree* t, uint32_t leaf, uint32_t worker, uint32_t kept_tokens, double now) noexcept nogil
cdef uint32_t forget_dead(Tree* t, double now, uint32_t nodes_max) noexcept nogil
cdef void confirm_path(Tree* t, uint32_t leaf, uint32_t worker) noexcept nogil

# writes: parts for other owners of trees
cdef uint32_t take_node(Tree* t, TokenRun* run, uint32_t parent) noexcept nogil
cdef void free_node(Tree* t, uint32_t i) noexcept nogil
cdef uint32_t add_leaf(Tree* t, uint32_t parent, TokenRun* run) noexcept nogil
cdef void forget_leaf(Tree* t, uint32_t i) noexcept nogil
cdef Entry* add_entry(Tree* t, uint32_t i, uint32_t worker, uint32_t tokens) noexcept nogil
