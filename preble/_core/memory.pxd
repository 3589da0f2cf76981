# Byte accounting and slabs, as inline C. Owns no state: the structs live in the tree that uses them.
#
# A Budget counts every allocated byte the way glibc's malloc rounds it (16-byte steps, 8 bytes of header), so that
# the sum follows the process's real growth. A Slab hands out fixed-size items addressed by a 32-bit index; its chunks
# never move and are freed only with the slab. Allocation can be made to fail on purpose (`fail_after`) to test every
# error path.

from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from preble._core.atomic cimport Apart

cdef extern from "stdlib.h" nogil:
    int posix_memalign(void** out, size_t alignment, size_t size)

cdef enum:
    NONE = 0xFFFFFFFF            # no index
    CHUNK_BITS = 10
    CHUNK = 1024                 # items in one chunk
    CHUNK_MASK = 1023
    CHUNKS_MAX = 65536           # so at most 67 million items

cdef struct Budget:
    int64_t used                 # bytes allocated now
    int64_t limit                # callers keep `used` at or below this
    int64_t fail_after           # tests: the n-th allocation from now fails; 0 = never

cdef struct Slab:
    void** chunks
    uint32_t chunk_count
    uint32_t item_bytes
    Apart apart                  # readers look at what is above
    uint32_t free_head           # free items are chained through their first 4 bytes
    uint32_t free_count
    uint32_t live

cdef inline int64_t charged(int64_t size) noexcept nogil:
    # What malloc really takes for `size` bytes.
    return 32 if size <= 24 else (size + 8 + 15) & ~<int64_t> 15

cdef inline bint fails_now(Budget* budget) noexcept nogil:
    if budget.fail_after == 0:
        return False
    budget.fail_after -= 1
    return budget.fail_after == 0

cdef inline void* budget_alloc(Budget* budget, int64_t size) noexcept nogil:
    # NULL when memory is out; the limit is the caller's business.
    cdef void* memory = NULL if fails_now(budget) else malloc(size)
    if memory != NULL:
        budget.used += charged(size)
    return memory

cdef inline void budget_free(Budget* budget, void* memory, int64_t size) noexcept nogil:
    if memory != NULL:
        budget.used -= charged(size)
        free(memory)

cdef inline int slab_init(Slab* slab, uint32_t item_bytes) noexcept nogil:
    memset(slab, 0, sizeof(Slab))
    slab.item_bytes = item_bytes
    slab.free_head = NONE
    slab.chunks = <void**> calloc(CHUNKS_MAX, sizeof(void*))
    return 0 if slab.chunks != NULL else -1

cdef inline void* slab_at(Slab* slab, uint32_t index) noexcept nogil:
    return <char*> slab.chunks[index >> CHUNK_BITS] + (index & CHUNK_MASK) * slab.item_bytes

cdef inline int64_t slab_bytes(Slab* slab) noexcept nogil:
    return <int64_t> slab.chunk_count * (CHUNK * slab.item_bytes + 64)

cdef inline int64_t slab_growth(Slab* slab, uint32_t items) noexcept nogil:
    # Bytes that `slab_reserve(items)` would allocate.
    if slab.free_count >= items:
        return 0
    return <int64_t> ((items - slab.free_count + CHUNK - 1) >> CHUNK_BITS) * (CHUNK * slab.item_bytes + 64)

cdef inline int slab_reserve(Slab* slab, Budget* budget, uint32_t items) noexcept nogil:
    # Make the next `items` calls of slab_take succeed.
    cdef void* memory = NULL
    cdef uint32_t i, base
    while slab.free_count < items:
        if slab.chunk_count == CHUNKS_MAX or fails_now(budget):
            return -1
        if posix_memalign(&memory, 64, CHUNK * slab.item_bytes) != 0:
            return -1
        memset(memory, 0, CHUNK * slab.item_bytes)
        budget.used += CHUNK * slab.item_bytes + 64
        base = slab.chunk_count << CHUNK_BITS
        slab.chunks[slab.chunk_count] = memory
        slab.chunk_count += 1
        for i in range(<uint32_t> CHUNK):   # chained so that the lowest index is taken first
            (<uint32_t*> slab_at(slab, base + i))[0] = base + i + 1 if i + 1 < <uint32_t> CHUNK else slab.free_head
        slab.free_head = base
        slab.free_count += CHUNK
    return 0

cdef inline uint32_t slab_take(Slab* slab) noexcept nogil:
    # Only after slab_reserve. The item keeps whatever bytes it had beyond the first four.
    cdef uint32_t index = slab.free_head
    slab.free_head = (<uint32_t*> slab_at(slab, index))[0]
    slab.free_count -= 1
    slab.live += 1
    return index

cdef inline void slab_give(Slab* slab, uint32_t index) noexcept nogil:
    (<uint32_t*> slab_at(slab, index))[0] = slab.free_head
    slab.free_head = index
    slab.free_count += 1
    slab.live -= 1

cdef inline void slab_close(Slab* slab, Budget* budget) noexcept nogil:
    cdef uint32_t i
    for i in range(slab.chunk_count):
        free(slab.chunks[i])
        budget.used -= CHUNK * slab.item_bytes + 64
    free(slab.chunks)
    memset(slab, 0, sizeof(Slab))
