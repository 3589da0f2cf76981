# Parts of a tree: contents of `nodes.pyx`. "-1" means that memory is out and nothing has changed.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from preble._core.tree.layout cimport Node, TokenRun, Tree, Walk

# nodes
cdef uint32_t take_node(Tree* t, TokenRun* run, uint32_t parent) noexcept nogil
cdef void free_node(Tree* t, uint32_t i) noexcept nogil
cdef uint32_t add_leaf(Tree* t, uint32_t parent, TokenRun* run) noexcept nogil
cdef void forget_leaf(Tree* t, uint32_t i) noexcept nogil

# entries and marks
cdef int reserve_entry(Tree* t, Node* node, uint32_t worker) noexcept nogil
cdef uint32_t add_entry(Tree* t, uint32_t i, uint32_t worker, uint32_t end) noexcept nogil
cdef int64_t drop_mark(Tree* t, uint32_t index) noexcept nogil
cdef int64_t trim_entry(Tree* t, uint32_t i, uint32_t worker, uint32_t end) noexcept nogil

# what is away
cdef void send_away(Tree* t, uint32_t i, uint32_t worker, uint32_t start, bint far) noexcept nogil
cdef void bring_near(Tree* t, uint32_t i, uint32_t worker, uint32_t start, uint32_t end) noexcept nogil
cdef void bring_back(Tree* t, uint32_t i, uint32_t worker, uint32_t start, uint32_t end) noexcept nogil

# reads: with a reader slot or the writer lock
cdef Walk at_root(Tree* t, uint32_t root) noexcept nogil
cdef Walk tree_walk(Tree* t, Walk walk, const int32_t* tokens, uint32_t count) noexcept nogil
cdef bint walk_holds(Tree* t, Walk walk) noexcept nogil
cdef uint32_t held_at(Tree* t, uint32_t i, uint32_t matched, uint32_t* held, uint32_t* met, uint32_t met_count,
                      uint32_t workers) noexcept nogil
cdef uint64_t last_word(Node* node) noexcept nogil
cdef uint32_t held_on_path(Tree* t, Walk walk, uint32_t* held, uint32_t* met, uint32_t workers) noexcept nogil
cdef uint32_t confirmed_tokens(Tree* t, Walk walk, uint32_t worker) noexcept nogil
cdef uint32_t on_gpu(Tree* t, Walk walk, uint32_t worker, uint32_t held, uint32_t* far) noexcept nogil

# split
cdef int split_node(Tree* t, uint32_t lower, uint32_t upper) noexcept nogil
