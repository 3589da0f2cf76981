# The Python face of the tree, for other compiled modules that hold one.

from libc.stdint cimport uint32_t

from preble._core.tree.layout cimport Tree, Walk
from preble._core.token_ids cimport TokenView

cdef double finite(object now) except? -1.0

cdef enum:
    SHORT_TOKENS = 16384         # a prompt up to here is walked sooner than Python's lock changes hands and comes back

cdef struct Held:                # what each worker holds of a prompt
    Walk walk
    uint32_t prompt              # tokens asked about
    uint32_t workers             # indices looked at
    uint32_t* held               # tokens by worker; owns the memory of `met`, too
    uint32_t* met                # the workers that hold some
    uint32_t count
    uint32_t* here               # of these tokens, those in the GPU's memory, and of the rest
    uint32_t* far                # those not in host memory, either; NULL where no worker has some away

cdef class RadixTree:
    cdef Tree t
    cdef dict _roots             # key of a namespace (`find_key`) -> root index
    cdef uint32_t unnamed_root   # (r) of the namespace None, which most prompts are in; NONE: it has none
    cdef dict _names             # root index -> the same key
    cdef object _root_queue      # roots in the order they are looked at for removal
    cdef object __weakref__
    cdef void enter(self) noexcept
    cdef void leave(self) noexcept
    cdef object key_of(self, object namespace)
    cdef uint32_t root_of(self, object namespace, bint create) except? 0xFFFFFFFE
    cdef int name_root(self, uint32_t i, object key) except -1
    cdef list forget_empty_roots(self)
    cdef tuple path_to(self, uint32_t i, uint32_t end, uint32_t start=*)
    cdef int need_worker(self, uint32_t worker) except -1
    cdef int need_estimates(self) except -1
    cdef int reserve_worker(self, uint32_t i) except -1
    cdef void read_path(self, TokenView* view, Held* found, uint32_t slot) noexcept nogil
    cdef void read_away(self, Held* found) noexcept nogil
    cdef int look(self, object token_ids, object namespace, Held* found) except -1
    cdef int held(self, TokenView* view, Held* found) except -1
    cdef bint walk_python(self, object token_ids, object namespace, Walk* walk) except -1
    cdef uint32_t insert_view(self, TokenView* view, double at, uint32_t worker, object namespace,
                              bint is_hit) except? 0xFFFFFFFF
