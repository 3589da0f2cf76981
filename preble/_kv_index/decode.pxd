# A batch of an engine's cache events as C arrays: contents of `decode.pyx`.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from preble._core.memory cimport Budget
from preble._core.msgpack_reader cimport Item, Reader, Trouble

cdef enum:
    HASH_BYTES_MAX = 1024

cdef enum Field:
    OTHER = 0
    HASHES = 1
    PARENT = 2
    TOKENS = 3
    SIZE = 4
    LORA_ID = 5
    MEDIUM = 6
    LORA_NAME = 7
    EXTRA = 8
    GROUP = 9
    SALT = 10
    METADATA = 11
    TIME = 12
    EVENTS = 13
    TAG = 14
    BATCH = 15

cdef enum EventTrouble:          # more than MessagePack's own, numbered after them
    WRONG_TYPE = 16
    NAMED_TWICE = 17
    MISSING = 18
    NO_FIT = 19
    HASH_TOO_LONG = 20
    LEFT_OVER = 21
    OUT_OF_MEMORY = 22

cdef struct Key:                 # one block as an event names it
    uint64_t lo                  # the hash itself, or half of a digest of its bytes
    uint32_t hi                  # 0: an int of 0 or more, 1: a negative one, else the digest's other half
    uint32_t print               # of the block's tokens

cdef struct Slice:               # bytes of the payload; NULL: absent or nil
    const uint8_t* data
    uint32_t length

cdef enum EventKind:
    UNKNOWN_EVENT = 0            # counted, not kept
    STORED = 1
    REMOVED = 2
    CLEARED = 3

cdef struct Event:
    EventKind kind
    bint has_parent
    Key parent
    uint32_t keys_at             # its blocks are keys[keys_at : keys_at + key_count]
    uint32_t key_count
    uint32_t tokens_at
    uint32_t token_count
    uint32_t block_size
    uint32_t group               # KV cache group of a hybrid model; 0 where the engine names none
    Slice medium
    Slice lora_name              # whole values, as MessagePack
    Slice lora_id
    Slice salt
    Slice extra                  # one element per block
    uint64_t lora                # digests; 0: none
    uint64_t salted
    uint64_t extra_first         # of the first block's own extra keys
    uint64_t extra_later         # of the first later block that has some
    uint32_t extra_at            # which block that is
    uint32_t extra_cut           # the first one after it whose extra keys differ from `extra_later`
    int64_t namespace            # index into the batch's namespaces, -1: none is named
    uint32_t space               # for the block index
    uint32_t hashes_byte         # where the payload has the list of its hashes
    uint32_t parent_byte         # and its parent

cdef struct Fault:
    Trouble trouble
    uint32_t field               # 0: none
    const uint8_t* at

cdef struct Batch:
    Reader reader
    Budget budget
    Event* events
    Key* keys
    int32_t* tokens
    uint32_t* found              # room for an index per key, for the block index
    uint32_t event_count
    uint32_t key_count
    uint32_t token_count
    uint32_t event_room
    uint32_t key_room
    uint32_t found_room
    uint32_t token_room
    uint32_t seen                # events in the batch, those not kept included
    uint32_t unknown             # of these, with a tag that means nothing here
    Fault fault

cdef Trouble decode(Batch* b) noexcept nogil
cdef Trouble keep_event(Batch* b, Event* event) noexcept nogil
cdef Trouble need_keys(Batch* b, uint64_t count) noexcept nogil
cdef Trouble need_tokens(Batch* b, uint64_t count) noexcept nogil
cdef Trouble key_item(Batch* b, Key* key, Item* item, const uint8_t* at) noexcept nogil
cdef void take_prints(Batch* b, Event* event) noexcept nogil
cdef void empty_batch(Batch* b) noexcept nogil
cdef void close_batch(Batch* b) noexcept nogil

# --- fingerprints of tokens -------------------------------------------------------------------------------------------
# A polynomial over the tokens modulo 2**64, so that it can be taken forwards and backwards.

cdef inline uint64_t print_base() noexcept nogil:
    return <uint64_t> 0x9E3779B97F4A7C15

cdef inline uint64_t stirred(uint64_t h) noexcept nogil:
    h = (h ^ (h >> 32)) * <uint64_t> 0xD6E8FEB86659FD93
    return h ^ (h >> 32)

cdef inline uint32_t finished_print(uint64_t sum_) noexcept nogil:
    return <uint32_t> (stirred(sum_) >> 32)
