# A MessagePack reader as inline C: heads, skipping, runs of token ids. Owns no state and makes no objects: it points
# into the caller's buffer. What the values mean is the caller's business (`_kv_index/event_batch.pyx`).
#
# Every length that a value claims is checked against the bytes that are left before it is accepted, an element being at
# least one byte, so that no loop and no allocation can be larger than the payload. Skipping counts the values still to
# come instead of descending into them: however deep a payload nests, nothing is stacked.

from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp

cdef enum Kind:
    NIL_ITEM = 0
    BOOL_ITEM = 1
    INT_ITEM = 2
    FLOAT_ITEM = 3
    TEXT_ITEM = 4
    BYTES_ITEM = 5
    ARRAY_ITEM = 6
    MAP_ITEM = 7
    EXTENSION_ITEM = 8

cdef enum Trouble:               # why a payload is refused; `_kv_index/event_batch.pyx` has the words
    FINE = 0
    CUT_SHORT = 1                # the payload ends inside a value
    TOO_LONG = 2                 # a length is claimed that is more than what is left
    RESERVED_BYTE = 3            # 0xc1, which MessagePack never uses
    BAD_TOKEN = 4                # no int in [0, 2**31 - 1]

cdef struct Reader:
    const uint8_t* begin
    const uint8_t* at
    const uint8_t* end

cdef struct Item:                # one value; of an array or a map only its head
    Kind kind
    bint negative                # INT_ITEM: `number` is then the two's complement
    uint64_t number              # INT_ITEM's value
    const uint8_t* data          # TEXT_ITEM, BYTES_ITEM, EXTENSION_ITEM
    uint32_t length              # bytes of these; elements of an array, pairs of a map


cdef inline uint16_t big16(const uint8_t* p) noexcept nogil:
    return <uint16_t> (<uint32_t> p[0] << 8 | p[1])

cdef inline uint32_t big32(const uint8_t* p) noexcept nogil:
    return <uint32_t> p[0] << 24 | <uint32_t> p[1] << 16 | <uint32_t> p[2] << 8 | p[3]

cdef inline uint64_t big64(const uint8_t* p) noexcept nogil:
    return <uint64_t> big32(p) << 32 | big32(p + 4)

cdef inline uint64_t big_number(const uint8_t* p, uint32_t width) noexcept nogil:
    if width == 8:
        return big64(p)
    return big32(p) if width == 4 else big16(p) if width == 2 else p[0]

cdef inline int64_t signed_number(const uint8_t* p, uint32_t width) noexcept nogil:
    if width == 8:
        return <int64_t> big64(p)
    return <int32_t> big32(p) if width == 4 else <int16_t> big16(p) if width == 2 else <int8_t> p[0]

cdef inline bint is_text(Item* item, const char* text, uint32_t length) noexcept nogil:
    return item.kind == TEXT_ITEM and item.length == length and memcmp(item.data, text, length) == 0

cdef inline Trouble take_number(Reader* r, Item* item, Kind kind, uint32_t width, bint is_signed) noexcept nogil:
    # A scalar of `width` bytes after its tag byte.
    if r.end - r.at <= <int64_t> width:
        return CUT_SHORT
    item.kind = kind
    if is_signed:
        item.number = <uint64_t> signed_number(r.at + 1, width)
        item.negative = <int64_t> item.number < 0
    else:
        item.number = big_number(r.at + 1, width)
    r.at += 1 + width
    return FINE

cdef inline Trouble take_bytes(Reader* r, Item* item, Kind kind, uint32_t head, uint64_t length) noexcept nogil:
    if <uint64_t> (r.end - r.at) < head:
        return CUT_SHORT
    if <uint64_t> (r.end - r.at) - head < length:
        return TOO_LONG
    item.kind = kind
    item.data = r.at + head
    item.length = <uint32_t> length
    r.at += head + length
    return FINE

cdef inline Trouble take_head(Reader* r, Item* item, Kind kind, uint32_t head, uint64_t length) noexcept nogil:
    if <uint64_t> (r.end - r.at) < head:
        return CUT_SHORT
    if <uint64_t> (r.end - r.at) - head < (length * 2 if kind == MAP_ITEM else length):
        return TOO_LONG
    item.kind = kind
    item.length = <uint32_t> length
    r.at += head
    return FINE

cdef inline uint64_t claimed(Reader* r, uint32_t width) noexcept nogil:
    # The length after a tag byte, 0 where the payload ends before it; the taker says so.
    return big_number(r.at + 1, width) if r.end - r.at > <int64_t> width else 0

cdef inline Trouble take_wide(Reader* r, Item* item, uint8_t tag) noexcept nogil:
    # Tags 0xc0 to 0xdf.
    cdef uint32_t width
    if tag <= 0xc3:
        item.kind = NIL_ITEM if tag == 0xc0 else BOOL_ITEM
        r.at += tag != 0xc1
        return RESERVED_BYTE if tag == 0xc1 else FINE
    if 0xcc <= tag <= 0xcf:
        return take_number(r, item, INT_ITEM, <uint32_t> 1 << (tag - 0xcc), False)
    if 0xd0 <= tag <= 0xd3:
        return take_number(r, item, INT_ITEM, <uint32_t> 1 << (tag - 0xd0), True)
    if tag == 0xca or tag == 0xcb:
        return take_number(r, item, FLOAT_ITEM, 4 if tag == 0xca else 8, False)
    if tag <= 0xc6:
        width = <uint32_t> 1 << (tag - 0xc4)
        return take_bytes(r, item, BYTES_ITEM, 1 + width, claimed(r, width))
    if tag <= 0xc9:
        width = <uint32_t> 1 << (tag - 0xc7)
        return take_bytes(r, item, EXTENSION_ITEM, 2 + width, claimed(r, width))
    if tag <= 0xd8:
        return take_bytes(r, item, EXTENSION_ITEM, 2, <uint64_t> 1 << (tag - 0xd4))
    if tag <= 0xdb:
        width = <uint32_t> 1 << (tag - 0xd9)
        return take_bytes(r, item, TEXT_ITEM, 1 + width, claimed(r, width))
    width = 4 if tag & 1 else 2
    return take_head(r, item, ARRAY_ITEM if tag <= 0xdd else MAP_ITEM, 1 + width, claimed(r, width))

cdef inline Trouble read_item(Reader* r, Item* item) noexcept nogil:
    # The next value; of an array or a map its head only. On trouble the reader stays at the value's first byte.
    cdef uint8_t tag
    if r.at >= r.end:
        return CUT_SHORT
    tag = r.at[0]
    item.negative = tag >= 0xe0
    if tag < 0x80 or tag >= 0xe0:
        item.kind = INT_ITEM
        item.number = <uint64_t> <int64_t> <int8_t> tag
        r.at += 1
        return FINE
    if tag >= 0xc0:
        return take_wide(r, item, tag)
    if tag >= 0xa0:
        return take_bytes(r, item, TEXT_ITEM, 1, tag & 31)
    return take_head(r, item, ARRAY_ITEM if tag >= 0x90 else MAP_ITEM, 1, tag & 15)

cdef inline Trouble skip_items(Reader* r, uint64_t items) noexcept nogil:
    # Pass over whole values, whatever they hold.
    cdef Item item
    cdef Trouble trouble
    while items:
        trouble = read_item(r, &item)
        if trouble != FINE:
            return trouble
        items -= 1
        if item.kind == ARRAY_ITEM:
            items += item.length
        elif item.kind == MAP_ITEM:
            items += 2 * <uint64_t> item.length
        if items > <uint64_t> (r.end - r.at):
            return CUT_SHORT
    return FINE

cdef inline Trouble read_token(Reader* r, int32_t* out) noexcept nogil:
    cdef const uint8_t* before = r.at
    cdef Item item
    cdef Trouble trouble = read_item(r, &item)
    if trouble != FINE:
        return trouble
    if item.kind != INT_ITEM or item.negative or item.number > 0x7fffffff:
        r.at = before
        return BAD_TOKEN
    out[0] = <int32_t> item.number
    return FINE

cdef inline Trouble read_tokens(Reader* r, uint32_t count, int32_t* out) noexcept nogil:
    # Token ids are nearly always 16-bit or 32-bit unsigned values; four alike in a row are taken at once.
    cdef const uint8_t* p = r.at
    cdef const uint8_t* end = r.end
    cdef uint32_t i = 0
    cdef Trouble trouble
    while i < count:
        if end - p >= 20 and p[0] == 0xcd:
            if count - i >= 4 and p[3] == 0xcd and p[6] == 0xcd and p[9] == 0xcd:
                out[i] = big16(p + 1)
                out[i + 1] = big16(p + 4)
                out[i + 2] = big16(p + 7)
                out[i + 3] = big16(p + 10)
                p += 12
                i += 4
                continue
            out[i] = big16(p + 1)
            p += 3
        elif end - p >= 20 and p[0] == 0xce and p[1] < 0x80:
            out[i] = <int32_t> big32(p + 1)
            p += 5
        else:
            r.at = p
            trouble = read_token(r, &out[i])
            if trouble != FINE:
                return trouble
            p = r.at
        i += 1
    r.at = p
    return FINE
