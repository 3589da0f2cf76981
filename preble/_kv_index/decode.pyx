"""Engines' batches of cache events, decoded. Owns which fields an event has in which generation of the wire format, and
what must fit together; makes no Python object. `event_batch.pyx` is its Python face, `_core/msgpack_reader.pxd` reads
the values. Nothing else in the package decodes these bytes.

A batch is `[time, events, rank]`. Each event is a map with its tag under "type" (SGLang from 0.5.20, vLLM from 0.24) or
an array that begins with it (before these); names and order of the fields are the engines' own. Fields and tags that
mean nothing here are passed over. The whole batch is decoded and checked before anything is applied.

Sections: digests, room, decoding.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from preble._core.memory cimport budget_alloc, budget_free
from preble._core.msgpack_reader cimport (ARRAY_ITEM, BYTES_ITEM, FINE, FLOAT_ITEM, INT_ITEM, MAP_ITEM, NIL_ITEM,
                                          TEXT_ITEM, Item, Reader, Trouble, is_text, read_item, read_tokens, skip_items)

cdef const char* DEFAULT_MEDIUM = b"GPU"      # what an event that names no medium speaks of


# --- digests ----------------------------------------------------------------------------------------------------------

cdef uint64_t digest(const uint8_t* data, uint32_t length, uint32_t* more) noexcept nogil:
    """Two independent digests of some bytes, neither of them 0."""
    cdef uint64_t a = print_base() ^ length, b = ~<uint64_t> length, word
    cdef uint32_t i = 0, step
    while i < length:
        word = 0
        step = min(<uint32_t> 8, length - i)
        memcpy(&word, data + i, step)
        a = stirred(a ^ word) + print_base()
        b = stirred((b << 7 | b >> 57) + word * <uint64_t> 0xC2B2AE3D27D4EB4F)
        i += step
    more[0] = <uint32_t> (stirred(b ^ a >> 17) >> 32) | 2
    return stirred(a) | 1


cdef inline uint32_t print_of(const int32_t* tokens, uint32_t count) noexcept nogil:
    """A fingerprint of some tokens: a polynomial over them, four a step so that the multiplications overlap."""
    cdef uint64_t h = 0, base = print_base(), two = base * base
    cdef uint32_t i = 0
    while i + 4 <= count:
        h = (h * (two * two) + <uint64_t> tokens[i] * (two * base) + <uint64_t> tokens[i + 1] * two
             + <uint64_t> tokens[i + 2] * base + <uint64_t> tokens[i + 3])
        i += 4
    while i < count:
        h = h * base + <uint64_t> tokens[i]
        i += 1
    return finished_print(h)


# --- room -------------------------------------------------------------------------------------------------------------

cdef int more_room(Batch* b, void** memory, uint32_t* room, uint64_t need, uint32_t item_bytes) noexcept nogil:
    """Let an array hold `need` items; its content stays. -1 when memory is out, nothing has changed then."""
    cdef uint64_t wider = max(need, <uint64_t> room[0] * 2, <uint64_t> 16)
    cdef void* grown
    if need <= room[0]:
        return 0
    grown = budget_alloc(&b.budget, <int64_t> (wider * item_bytes))
    if grown == NULL:
        return -1
    if memory[0] != NULL:
        memcpy(grown, memory[0], <uint64_t> room[0] * item_bytes)
    budget_free(&b.budget, memory[0], <int64_t> room[0] * item_bytes)
    memory[0] = grown
    room[0] = <uint32_t> wider
    return 0


cdef Trouble need_keys(Batch* b, uint64_t count) noexcept nogil:
    if more_room(b, <void**> &b.found, &b.found_room, b.key_count + count, sizeof(uint32_t)):
        return <Trouble> OUT_OF_MEMORY
    if more_room(b, <void**> &b.keys, &b.key_room, b.key_count + count, sizeof(Key)):
        return <Trouble> OUT_OF_MEMORY
    return FINE


cdef Trouble need_tokens(Batch* b, uint64_t count) noexcept nogil:
    if more_room(b, <void**> &b.tokens, &b.token_room, b.token_count + count, sizeof(int32_t)):
        return <Trouble> OUT_OF_MEMORY
    return FINE


cdef Trouble keep_event(Batch* b, Event* event) noexcept nogil:
    """Add an event; one that says nothing is only counted."""
    if event.medium.data == NULL:
        event.medium.data = <const uint8_t*> DEFAULT_MEDIUM
        event.medium.length = 3
    b.seen += 1
    if event.kind == UNKNOWN_EVENT:
        b.unknown += 1
        return FINE
    if event.kind != CLEARED and event.key_count == 0 and not event.has_parent:
        return FINE
    if event.kind == CLEARED and b.event_count and b.events[b.event_count - 1].kind == CLEARED:
        return FINE
    if more_room(b, <void**> &b.events, &b.event_room, <uint64_t> b.event_count + 1, sizeof(Event)):
        return <Trouble> OUT_OF_MEMORY
    b.events[b.event_count] = event[0]
    b.event_count += 1
    return FINE


# --- decoding ---------------------------------------------------------------------------------------------------------

cdef Trouble fail(Batch* b, int trouble, uint32_t field, const uint8_t* at) noexcept nogil:
    b.fault.trouble = <Trouble> trouble
    b.fault.field = field
    b.fault.at = at
    return <Trouble> trouble


cdef Trouble typed_item(Batch* b, Item* item, uint32_t field, uint32_t kinds) noexcept nogil:
    """The next value, of one of the kinds whose bits are set."""
    cdef const uint8_t* at = b.reader.at
    cdef Trouble trouble = read_item(&b.reader, item)
    if trouble != FINE:
        return fail(b, trouble, field, at)
    if not kinds >> <uint32_t> item.kind & 1:
        return fail(b, WRONG_TYPE, field, at)
    return FINE


cdef Trouble skip(Batch* b, uint64_t items, uint32_t field) noexcept nogil:
    cdef Trouble trouble = skip_items(&b.reader, items)
    return fail(b, trouble, field, b.reader.at) if trouble != FINE else FINE


cdef Trouble key_item(Batch* b, Key* key, Item* item, const uint8_t* at) noexcept nogil:
    """A block hash as a key. Ints and bytes never meet: `hi` is below 2 for the one, above 1 for the other."""
    if item.kind == INT_ITEM:
        key.lo = item.number
        key.hi = item.negative
        return FINE
    if item.length > HASH_BYTES_MAX:
        return fail(b, HASH_TOO_LONG, HASHES, at)
    key.lo = digest(item.data, item.length, &key.hi)
    return FINE


cdef Trouble read_keys(Batch* b, Event* event) noexcept nogil:
    cdef Item item
    cdef uint32_t _i, count
    cdef const uint8_t* at = b.reader.at
    cdef Trouble trouble = typed_item(b, &item, HASHES, 1 << ARRAY_ITEM)
    event.hashes_byte = <uint32_t> (at - b.reader.begin)
    if trouble != FINE:
        return trouble
    count = item.length
    if need_keys(b, count) != FINE:
        return fail(b, OUT_OF_MEMORY, HASHES, b.reader.at)
    event.keys_at = b.key_count
    event.key_count = count
    for _i in range(count):
        at = b.reader.at
        trouble = typed_item(b, &item, HASHES, 1 << INT_ITEM | 1 << BYTES_ITEM)
        if trouble == FINE:
            trouble = key_item(b, &b.keys[b.key_count], &item, at)
        if trouble != FINE:
            return trouble
        b.key_count += 1
    return FINE


cdef Trouble read_token_ids(Batch* b, Event* event) noexcept nogil:
    cdef Item item
    cdef Trouble trouble = typed_item(b, &item, TOKENS, 1 << ARRAY_ITEM)
    if trouble != FINE:
        return trouble
    if need_tokens(b, item.length) != FINE:
        return fail(b, OUT_OF_MEMORY, TOKENS, b.reader.at)
    event.tokens_at = b.token_count
    event.token_count = item.length
    trouble = read_tokens(&b.reader, item.length, &b.tokens[b.token_count])
    if trouble != FINE:
        return fail(b, trouble, TOKENS, b.reader.at)
    b.token_count += item.length
    return FINE


cdef Trouble read_parent(Batch* b, Event* event) noexcept nogil:
    cdef Item item
    cdef const uint8_t* at = b.reader.at
    cdef Trouble trouble = typed_item(b, &item, PARENT, 1 << NIL_ITEM | 1 << INT_ITEM | 1 << BYTES_ITEM)
    if trouble != FINE or item.kind == NIL_ITEM:
        return trouble
    event.has_parent = True
    event.parent_byte = <uint32_t> (at - b.reader.begin)
    return key_item(b, &event.parent, &item, at)


cdef Trouble read_bounded(Batch* b, uint32_t field, uint32_t* number, uint64_t low, uint64_t high,
                          bint or_nil) noexcept nogil:
    """An int within bounds; nil leaves `number` as it is."""
    cdef Item item
    cdef const uint8_t* at = b.reader.at
    cdef Trouble trouble = typed_item(b, &item, field, 1 << INT_ITEM | <uint32_t> or_nil << NIL_ITEM)
    if trouble != FINE or item.kind == NIL_ITEM:
        return trouble
    if item.negative or not low <= item.number <= high:
        return fail(b, WRONG_TYPE, field, at)
    number[0] = <uint32_t> item.number
    return FINE


cdef Trouble read_slice(Batch* b, uint32_t field, Slice* slice_, uint32_t kinds) noexcept nogil:
    """A whole value of one of some kinds, as bytes; nil, an empty string and an empty list are none."""
    cdef Item item
    cdef const uint8_t* at = b.reader.at
    cdef Trouble trouble = typed_item(b, &item, field, kinds | 1 << NIL_ITEM)
    if trouble == FINE and item.kind == ARRAY_ITEM:
        trouble = skip(b, item.length, field)
    if trouble == FINE and item.kind != NIL_ITEM and (item.kind == INT_ITEM or item.length):
        slice_.data = at
        slice_.length = <uint32_t> (b.reader.at - at)
    return trouble


cdef Trouble read_medium(Batch* b, Event* event) noexcept nogil:
    cdef Item item
    cdef Trouble trouble = typed_item(b, &item, MEDIUM, 1 << NIL_ITEM | 1 << TEXT_ITEM)
    if trouble == FINE and item.kind == TEXT_ITEM and item.length:
        event.medium.data = item.data
        event.medium.length = item.length
    return trouble


cdef Trouble read_metadata(Batch* b, Event* event) noexcept nogil:
    """SGLang 0.5.18 and 0.5.19 put the salt there."""
    cdef Item item
    cdef uint32_t _i, pairs
    cdef Trouble trouble = typed_item(b, &item, METADATA, 1 << NIL_ITEM | 1 << MAP_ITEM)
    if trouble != FINE or item.kind == NIL_ITEM:
        return trouble
    pairs = item.length
    for _i in range(pairs):
        trouble = typed_item(b, &item, METADATA, 1 << TEXT_ITEM)
        if trouble == FINE:
            if is_text(&item, b"cache_salt", 10):
                trouble = read_slice(b, SALT, &event.salt, 1 << TEXT_ITEM)
            else:
                trouble = skip(b, 1, METADATA)
        if trouble != FINE:
            return trouble
    return FINE


cdef Trouble read_field(Batch* b, Event* event, uint32_t field) noexcept nogil:
    if field == HASHES:
        return read_keys(b, event)
    if field == PARENT:
        return read_parent(b, event)
    if field == TOKENS:
        return read_token_ids(b, event)
    if field == SIZE:
        return read_bounded(b, SIZE, &event.block_size, 1, 0x7fffffff, False)
    if field == GROUP:
        return read_bounded(b, GROUP, &event.group, 0, 0xffffffff, True)
    if field == MEDIUM:
        return read_medium(b, event)
    if field == LORA_ID:
        return read_slice(b, LORA_ID, &event.lora_id, 1 << INT_ITEM | 1 << TEXT_ITEM)
    if field == LORA_NAME:
        return read_slice(b, LORA_NAME, &event.lora_name, 1 << TEXT_ITEM)
    if field == SALT:
        return read_slice(b, SALT, &event.salt, 1 << TEXT_ITEM)
    if field == EXTRA:
        return read_slice(b, EXTRA, &event.extra, 1 << ARRAY_ITEM)
    if field == METADATA:
        return read_metadata(b, event)
    return skip(b, 1, OTHER)


cdef uint32_t field_named(Item* name, EventKind kind) noexcept nogil:
    if is_text(name, b"block_hashes", 12):
        return HASHES
    if is_text(name, b"medium", 6):
        return MEDIUM
    if is_text(name, b"group_idx", 9):
        return GROUP
    if kind != STORED:
        return OTHER
    if is_text(name, b"token_ids", 9):
        return TOKENS
    if is_text(name, b"parent_block_hash", 17):
        return PARENT
    if is_text(name, b"block_size", 10):
        return SIZE
    if is_text(name, b"lora_id", 7):
        return LORA_ID
    if is_text(name, b"lora_name", 9):
        return LORA_NAME
    if is_text(name, b"extra_keys", 10):
        return EXTRA
    if is_text(name, b"cache_salt", 10):
        return SALT
    return METADATA if is_text(name, b"metadata", 8) else OTHER


cdef uint32_t field_at(Batch* b, uint32_t position, EventKind kind) noexcept nogil:
    """What stands at a position of an array, counted from 0 after the tag."""
    if kind == REMOVED:
        return HASHES if position == 0 else MEDIUM if position == 1 else GROUP if position == 2 else OTHER
    if kind != STORED or position > 8:
        return OTHER
    if position < 6:
        return HASHES + position
    if position == 6 and b.reader.at < b.reader.end:      # vLLM's name of the LoRA, or SGLang's metadata
        return METADATA if b.reader.at[0] & 0xf0 == 0x80 or b.reader.at[0] >= 0xde and b.reader.at[0] < 0xe0 else (
            LORA_NAME)
    return EXTRA if position == 7 else GROUP


cdef EventKind kind_named(Item* tag) noexcept nogil:
    if is_text(tag, b"BlockStored", 11):
        return STORED
    if is_text(tag, b"BlockRemoved", 12):
        return REMOVED
    return CLEARED if is_text(tag, b"AllBlocksCleared", 16) else UNKNOWN_EVENT


cdef Trouble read_array_event(Batch* b, uint32_t length, const uint8_t* at) noexcept nogil:
    cdef Event event
    cdef Item tag
    cdef uint32_t i
    cdef Trouble trouble
    memset(&event, 0, sizeof(Event))
    if length == 0:
        return fail(b, MISSING, TAG, at)
    trouble = typed_item(b, &tag, TAG, 1 << TEXT_ITEM)
    if trouble != FINE:
        return trouble
    event.kind = kind_named(&tag)
    if event.kind == UNKNOWN_EVENT:
        trouble = skip(b, length - 1, OTHER)
    elif event.kind == STORED and length < 5 or event.kind == REMOVED and length < 2:
        return fail(b, MISSING, HASHES + length - 1, at)
    else:
        for i in range(length - 1):
            trouble = read_field(b, &event, field_at(b, i, event.kind))
            if trouble != FINE:
                return trouble
    return end_event(b, &event, at) if trouble == FINE else trouble


cdef Trouble find_tag(Batch* b, uint32_t pairs, EventKind* kind, const uint8_t* at) noexcept nogil:
    """The kind of a map event; the reader ends where it was."""
    cdef const uint8_t* first = b.reader.at
    cdef Item item
    cdef uint32_t _i
    cdef Trouble trouble
    for _i in range(pairs):
        trouble = typed_item(b, &item, TAG, 1 << TEXT_ITEM)
        if trouble != FINE:
            return trouble
        if is_text(&item, b"type", 4):
            trouble = typed_item(b, &item, TAG, 1 << TEXT_ITEM)
            kind[0] = kind_named(&item)
            b.reader.at = first
            return trouble
        trouble = skip(b, 1, OTHER)
        if trouble != FINE:
            return trouble
    return fail(b, MISSING, TAG, at)


cdef Trouble read_map_event(Batch* b, uint32_t pairs, const uint8_t* at) noexcept nogil:
    cdef Event event
    cdef Item name
    cdef uint32_t _i, field, named = 0
    cdef Trouble trouble
    memset(&event, 0, sizeof(Event))
    trouble = find_tag(b, pairs, &event.kind, at)
    if trouble == FINE and event.kind == UNKNOWN_EVENT:
        trouble = skip(b, 2 * <uint64_t> pairs, OTHER)
        pairs = 0
    if trouble != FINE:
        return trouble
    for _i in range(pairs):
        trouble = typed_item(b, &name, TAG, 1 << TEXT_ITEM)
        if trouble != FINE:
            return trouble
        field = field_named(&name, event.kind) if event.kind != CLEARED else <uint32_t> OTHER
        if field != OTHER and named >> field & 1:
            return fail(b, NAMED_TWICE, field, name.data)
        named |= <uint32_t> 1 << field
        trouble = read_field(b, &event, field)
        if trouble != FINE:
            return trouble
    if event.kind == STORED or event.kind == REMOVED:
        for field in range(HASHES, SIZE + 1 if event.kind == STORED else HASHES + 1):
            if not named >> field & 1:
                return fail(b, MISSING, field, at)
    return end_event(b, &event, at)


cdef Trouble end_event(Batch* b, Event* event, const uint8_t* at) noexcept nogil:
    """Check what must fit together, take the fingerprints, keep the event."""
    cdef Trouble trouble = FINE
    cdef uint32_t i
    event.namespace = -1
    if event.kind == STORED:
        if <uint64_t> event.key_count * event.block_size != event.token_count:
            return fail(b, NO_FIT, TOKENS, at)
        take_prints(b, event)
        if event.lora_name.data != NULL:
            event.lora = digest(event.lora_name.data, event.lora_name.length, &i)
        elif event.lora_id.data != NULL:
            event.lora = digest(event.lora_id.data, event.lora_id.length, &i)
        if event.salt.data != NULL:
            event.salted = digest(event.salt.data, event.salt.length, &i)
        event.extra_at = event.extra_cut = event.key_count
        if event.extra.data != NULL:
            trouble = read_extra(b, event)
    if trouble == FINE and keep_event(b, event) != FINE:
        return fail(b, OUT_OF_MEMORY, OTHER, at)
    return trouble


cdef void take_prints(Batch* b, Event* event) noexcept nogil:
    cdef uint32_t i
    for i in range(event.key_count):
        b.keys[event.keys_at + i].print = print_of(&b.tokens[event.tokens_at + i * event.block_size],
                                                   event.block_size)


cdef Trouble read_extra(Batch* b, Event* event) noexcept nogil:
    """Digest what each block's extra keys say beside the LoRA's name, and where they begin to differ."""
    cdef Reader after = b.reader
    cdef Item item
    cdef uint32_t i
    cdef uint64_t own = 0
    cdef Trouble trouble
    b.reader.at = event.extra.data
    b.reader.end = event.extra.data + event.extra.length
    trouble = typed_item(b, &item, EXTRA, 1 << ARRAY_ITEM)
    if trouble == FINE and item.length != event.key_count:
        trouble = fail(b, WRONG_TYPE, EXTRA, event.extra.data)
    for i in range(event.key_count):
        trouble = trouble or own_keys(b, event, &own)
        if trouble != FINE:
            break
        if i == 0:
            event.extra_first = own
        elif own and event.extra_at == event.key_count:
            event.extra_at = i
            event.extra_later = own
        elif own and own != event.extra_later and event.extra_cut == event.key_count:
            event.extra_cut = i
    b.reader = after
    return trouble


cdef Trouble own_keys(Batch* b, Event* event, uint64_t* own) noexcept nogil:
    """The digest of one block's extra keys, 0 if there are none beside the LoRA's name, which comes first."""
    cdef Item item
    cdef uint32_t items, more
    cdef const uint8_t* at
    cdef Trouble trouble = typed_item(b, &item, EXTRA, 1 << ARRAY_ITEM | 1 << NIL_ITEM)
    own[0] = 0
    if trouble != FINE or item.kind == NIL_ITEM or item.length == 0:
        return trouble
    items = item.length
    at = b.reader.at
    trouble = skip(b, 1, EXTRA)
    if trouble != FINE:
        return trouble
    if b.reader.at - at == event.lora_name.length and memcmp(at, event.lora_name.data, event.lora_name.length) == 0:
        at = b.reader.at
    trouble = skip(b, items - 1, EXTRA)
    if trouble == FINE and b.reader.at != at:
        own[0] = digest(at, <uint32_t> (b.reader.at - at), &more)
    return trouble


cdef Trouble decode(Batch* b) noexcept nogil:
    """Decode the whole payload, or say in `fault` why not."""
    cdef Item item
    cdef uint32_t _i, parts, events
    cdef const uint8_t* at = b.reader.at
    cdef Trouble trouble = typed_item(b, &item, BATCH, 1 << ARRAY_ITEM)
    parts = item.length
    if trouble == FINE and parts < 2:
        return fail(b, WRONG_TYPE, BATCH, at)
    if trouble == FINE:
        trouble = typed_item(b, &item, TIME, 1 << INT_ITEM | 1 << FLOAT_ITEM)
    if trouble == FINE:
        trouble = typed_item(b, &item, EVENTS, 1 << ARRAY_ITEM)
    if trouble != FINE:
        return trouble
    events = item.length
    for _i in range(events):
        at = b.reader.at
        trouble = typed_item(b, &item, EVENTS, 1 << ARRAY_ITEM | 1 << MAP_ITEM)
        if trouble == FINE:
            trouble = (read_array_event(b, item.length, at) if item.kind == ARRAY_ITEM
                       else read_map_event(b, item.length, at))
        if trouble != FINE:
            return trouble
    trouble = skip(b, parts - 2, OTHER)
    if trouble == FINE and b.reader.at != b.reader.end:
        return fail(b, LEFT_OVER, BATCH, b.reader.at)
    return trouble


cdef void empty_batch(Batch* b) noexcept nogil:
    """Forget everything but the arrays."""
    b.event_count = b.key_count = b.token_count = b.seen = b.unknown = 0
    memset(&b.reader, 0, sizeof(Reader))
    memset(&b.fault, 0, sizeof(Fault))
    b.budget.fail_after = 0


cdef void close_batch(Batch* b) noexcept nogil:
    """Give the arrays back."""
    budget_free(&b.budget, b.events, <int64_t> b.event_room * sizeof(Event))
    budget_free(&b.budget, b.keys, <int64_t> b.key_room * sizeof(Key))
    budget_free(&b.budget, b.found, <int64_t> b.found_room * sizeof(uint32_t))
    budget_free(&b.budget, b.tokens, <int64_t> b.token_room * sizeof(int32_t))
