# The tree's operations: contents of `operations.pyx`. "-1" means that memory is out and nothing has changed.

from libc.stdint cimport int32_t, int64_t, uint32_t

from preble._core.tree.layout cimport Tree, Walk

cdef int tree_insert(Tree* t, Walk walk, const int32_t* tokens, uint32_t count, uint32_t worker, bint is_hit,
                     double now, uint32_t* leaf) noexcept nogil
cdef int64_t limit_of(int64_t capacity, int64_t below, bint reports_evictions) noexcept nogil
cdef void set_limit(Tree* t, uint32_t index, bint reports_evictions) noexcept nogil
cdef void load_path(Tree* t, uint32_t i, uint32_t worker, uint32_t start, uint32_t end) noexcept nogil
cdef int64_t clear_marks(Tree* t, uint32_t index) noexcept nogil
cdef uint32_t sweep_ghosts(Tree* t, uint32_t marks_max) noexcept nogil
cdef int64_t drop_below(Tree* t, uint32_t i, uint32_t worker, uint32_t kept_tokens) noexcept nogil
cdef int64_t drop_beside(Tree* t, uint32_t leaf, uint32_t worker, uint32_t kept_tokens) noexcept nogil
cdef int64_t take_back(Tree* t, uint32_t leaf, uint32_t worker, uint32_t kept_tokens, double booked_at,
                       double now) noexcept nogil
cdef void await_blocks(Tree* t, uint32_t leaf, uint32_t worker) noexcept nogil
cdef void confirm_path(Tree* t, uint32_t leaf, uint32_t worker) noexcept nogil
cdef int64_t fixed_bytes(Tree* t) noexcept nogil
cdef bint make_room_for_root(Tree* t, int64_t name_bytes, uint32_t steps_max) noexcept nogil
cdef uint32_t forget_dead(Tree* t, double now, uint32_t nodes_max) noexcept nogil
cdef bint has_dead(Tree* t, double now) noexcept nogil
