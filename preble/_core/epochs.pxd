# Epochs: memory that readers may still look at is freed only when they have gone. Owns the reader slots and the queue
# of retired things; what a retired thing is, and how it is freed, is its owner's business.
#
#     reader                                   writer (one at a time)
#       slot := epoch (a full barrier)           unlink a thing, so that no new reader can find it
#       ... read, without any lock ...           retire it, stamped with the epoch
#       slot := 0                                epoch += 1 (a full barrier); least := the lowest slot in use
#                                                free all that is stamped below `least`
#
# Why that is enough: a reader whose slot the writer did not see has announced itself after the writer's barrier, so it
# sees the unlinking and cannot reach the thing. One that was seen with a slot above the stamp began after the epoch was
# raised, so after the unlinking. Readers never wait. A writer waits only when QUEUE_MAX things are retired and the
# oldest reader still runs; no reader holds a slot while it waits for the writer's lock or for Python's.

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from preble._core.atomic cimport Apart, claim64, load32, load64, pause, raise32, store64, swap64, thread_number

cdef enum:
    READERS_MAX = 128            # at once; one more spins until a slot is free
    SLOT_WORDS = 8               # a cache line each
    QUEUE_MAX = 4096             # retired things

cdef struct Retired:
    void* thing
    uint64_t stamp               # the epoch in which it was unlinked
    uint64_t what                # its owner's: kind and size

cdef struct Epochs:
    uint64_t* slots              # READERS_MAX lines; 0 = free, else the epoch in which its reader began
    uint32_t used                # slots below this have ever been claimed
    uint64_t epoch               # never 0
    Apart apart                  # readers look at what is above
    Retired* queue               # a ring, oldest first
    uint32_t first
    uint32_t count

cdef inline int epochs_init(Epochs* e) noexcept nogil:
    memset(e, 0, sizeof(Epochs))
    e.epoch = 1
    e.slots = <uint64_t*> calloc(READERS_MAX * SLOT_WORDS, sizeof(uint64_t))
    e.queue = <Retired*> malloc(QUEUE_MAX * sizeof(Retired))
    return 0 if e.slots != NULL and e.queue != NULL else -1

cdef inline void epochs_close(Epochs* e) noexcept nogil:
    free(e.slots)
    free(e.queue)

cdef inline bint reader_try(Epochs* e, uint32_t* slot) noexcept nogil:
    # Begin to read if this thread's first slot is free.
    slot[0] = (thread_number() - 1) % <uint32_t> READERS_MAX
    raise32(&e.used, slot[0] + 1)
    return claim64(&e.slots[slot[0] * SLOT_WORDS], load64(&e.epoch))

cdef inline uint32_t reader_enter(Epochs* e) noexcept nogil:
    # Begin to read; returns the slot to leave with.
    cdef uint32_t slot = (thread_number() - 1) % <uint32_t> READERS_MAX
    while True:
        raise32(&e.used, slot + 1)               # before the claim, so that whoever sees the claim looks this far
        if claim64(&e.slots[slot * SLOT_WORDS], load64(&e.epoch)):
            return slot
        slot = (slot + 1) % <uint32_t> READERS_MAX
        pause()

cdef inline void reader_leave(Epochs* e, uint32_t slot) noexcept nogil:
    store64(&e.slots[slot * SLOT_WORDS], 0)

cdef inline uint64_t least_reader(Epochs* e) noexcept nogil:
    # Raise the epoch; returns the epoch in which the oldest reader began, or the new one if nobody reads.
    cdef uint64_t least = e.epoch + 1, began
    cdef uint32_t slot
    swap64(&e.epoch, least)
    for slot in range(load32(&e.used)):
        began = load64(&e.slots[slot * SLOT_WORDS])
        if began != 0 and began < least:
            least = began
    return least

cdef inline void retire(Epochs* e, void* thing, uint64_t what) noexcept nogil:
    # The caller has unlinked the thing, and keeps `count` below QUEUE_MAX by reclaiming.
    cdef Retired* entry = &e.queue[(e.first + e.count) % <uint32_t> QUEUE_MAX]
    entry.thing = thing
    entry.stamp = e.epoch
    entry.what = what
    e.count += 1
