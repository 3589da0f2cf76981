"""The messages that come for every request and every token: `Submit` and `Chunk`, read and written in one go, `Events`
of requests and evictions, read so, and the prompt that goes into the first. Owns their fast form only: which messages
there are, what their fields may hold and the words of every error are `transport.wire`'s.

    chunk   [version, 19, epoch, session, seq, id, index, tokens, cached, finish, error, next event]
    submit  [version,  2, epoch, session, seq, id, tokens, [max new, temperature, top p, stop, eos, seed], namespace,
             offset]
    events  [version, 22, epoch, session, seq, number, [event, ...], complete for]; each event one of
             ["Q", router, id, tokens, namespace, max new]    ["F", router, id, cached]
             ["E", tokens, kept, namespace]                   ["X", router, id, output]

Each of them handles the usual case whole, and returns None for anything else: another version, a namespace, an
error text, a value out of its range. `wire` then takes its own way, field by field, which knows what is wrong. So the
two ways must agree wherever this one answers: same bytes out, same values in.

All functions are thread-safe; frames are immutable bytes.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from cpython.unicode cimport PyUnicode_AsUTF8AndSize, PyUnicode_DecodeUTF8
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from preble._core.msgpack_reader cimport (
    ARRAY_ITEM,
    BOOL_ITEM,
    BYTES_ITEM,
    FINE,
    FLOAT_ITEM,
    INT_ITEM,
    NIL_ITEM,
    TEXT_ITEM,
    Item,
    Reader,
    is_text,
    read_item,
)
from preble._core.token_ids cimport TokenView, check_tokens, release_tokens, view_tokens

cdef enum:
    SUBMIT = 2
    CHUNK = 19
    EVENTS = 22
    HEADER_FIELDS = 5
    CHUNK_FIELDS = 12
    SUBMIT_FIELDS = 10
    EVENTS_FIELDS = 8
    MAX_TEXT = 4096       # bytes, `fields.MAX_TEXT_BYTES`
    MAX_EVENTS = 4096     # `fields.MAX_EVENTS`
    MAX_ID = 256          # bytes, `fields.MAX_ID_BYTES`
    MAX_STOP = 1024       # tokens, `fields.MAX_STOP_TOKENS`
    MAX_TOKENS = 1 << 21  # `fields.MAX_PROMPT_TOKENS`
    NO_COUNT = -1
    WRONG_COUNT = -2
    LARGEST = 160         # bytes of a frame beside its id and its tokens

cdef uint64_t INT31 = 0x7fffffff
cdef uint64_t INT63 = 0x7fffffffffffffff


# --- prompts ----------------------------------------------------------------------------------------------------------

def prompt_words(token_ids) -> bytes:
    """A prompt's token ids (1-D int32, uint32 or int64 buffer, list or tuple of ints) as native int32 words: a copy, so
    that nobody can change them later.

    Raises `InvalidTokens` where an id is not in [0, 2**31 - 1], or for anything else.
    """
    cdef TokenView view
    view_tokens(token_ids, &view)
    try:
        check_tokens(&view, 0)
        return PyBytes_FromStringAndSize(<const char*> view.data, 4 * <Py_ssize_t> view.count)
    finally:
        release_tokens(&view)


# --- reading ----------------------------------------------------------------------------------------------------------

cdef inline bint take_int(Reader* r, uint64_t most, uint64_t* out) noexcept nogil:
    """An int in [0, most]."""
    cdef Item item
    if read_item(r, &item) != FINE or item.kind != INT_ITEM or item.negative or item.number > most:
        return False
    out[0] = item.number
    return True


cdef inline bint take_header(Reader* r, uint32_t fields, uint64_t version, uint64_t code,
                             uint64_t* header) noexcept nogil:
    """Epoch, session and sequence number, if the frame has this version, code and number of fields."""
    cdef Item item
    cdef uint64_t found
    if read_item(r, &item) != FINE or item.kind != ARRAY_ITEM or item.length != fields:
        return False
    if not take_int(r, INT63, &found) or found != version or not take_int(r, INT63, &found) or found != code:
        return False
    return take_int(r, INT63, &header[0]) and take_int(r, INT63, &header[1]) and take_int(r, INT63, &header[2])


cdef inline bint take_tokens(Reader* r, uint32_t most, Item* item) noexcept nogil:
    """Raw int32 words, none of them negative."""
    cdef uint32_t i = 3
    cdef uint8_t signs = 0
    if read_item(r, item) != FINE or item.kind != BYTES_ITEM or item.length % 4 or item.length > 4 * most:
        return False
    while i < item.length:
        signs |= item.data[i]  # the last byte of a little-endian word holds its sign
        i += 4
    return signs < 0x80


cdef inline str id_of(Reader* r):
    """A text of 1 to `MAX_ID` bytes, or None."""
    cdef Item item
    if read_item(r, &item) != FINE or item.kind != TEXT_ITEM or not 0 < item.length <= MAX_ID:
        return None
    return PyUnicode_DecodeUTF8(<char*> item.data, item.length, NULL)


cdef inline tuple tuple_of(Item* item):
    """The token ids of raw words."""
    cdef uint32_t i, count = item.length // 4
    cdef const uint8_t* p = item.data
    cdef tuple tokens = PyTuple_New(count)
    cdef object token
    for i in range(count):
        token = p[0] | <uint32_t> p[1] << 8 | <uint32_t> p[2] << 16 | <uint32_t> p[3] << 24
        Py_INCREF(token)
        PyTuple_SET_ITEM(tokens, i, token)
        p += 4
    return tokens


def read_chunk(bytes frame not None, uint64_t version):
    """(epoch, session, seq, fields of a `Chunk`), or None if it takes a closer look."""
    cdef Reader r
    cdef Item item, tokens
    cdef uint64_t header[3]
    cdef uint64_t index, number
    cdef object request_id, cached = None, finish = None
    start(&r, frame)
    if not take_header(&r, CHUNK_FIELDS, version, CHUNK, header):
        return None
    try:
        request_id = id_of(&r)
    except UnicodeDecodeError:
        return None
    if request_id is None or not take_int(&r, INT31, &index) or not take_tokens(&r, MAX_TOKENS, &tokens):
        return None
    if read_item(&r, &item) != FINE:
        return None
    if item.kind == INT_ITEM and not item.negative and item.number <= INT31:
        cached = item.number
    elif item.kind != NIL_ITEM:
        return None
    if read_item(&r, &item) != FINE:
        return None
    if item.kind != NIL_ITEM:
        finish = "length" if is_text(&item, b"length", 6) else "stop" if is_text(&item, b"stop", 4) else None
        if finish is None:
            return None
    if read_item(&r, &item) != FINE or item.kind != NIL_ITEM or not take_int(&r, INT63, &number) or r.at != r.end:
        return None
    return header[0], header[1], header[2], (request_id, index, tuple_of(&tokens), cached, finish, None, number)


def read_submit(bytes frame not None, uint64_t version):
    """(epoch, session, seq, request id, raw token ids, fields of `SamplingParams`, offset), or None."""
    cdef Reader r
    cdef Item item, tokens
    cdef uint64_t header[3]
    cdef uint64_t offset
    cdef object request_id, sampling
    start(&r, frame)
    if not take_header(&r, SUBMIT_FIELDS, version, SUBMIT, header):
        return None
    try:
        request_id = id_of(&r)
    except UnicodeDecodeError:
        return None
    if request_id is None or not take_tokens(&r, MAX_TOKENS, &tokens) or not tokens.length:
        return None
    sampling = sampling_of(&r)
    if sampling is None or read_item(&r, &item) != FINE or item.kind != NIL_ITEM:
        return None
    if not take_int(&r, INT31, &offset) or offset >= tokens.length // 4 or r.at != r.end:
        return None
    return (header[0], header[1], header[2], request_id,
            words_of(&tokens), sampling, offset)


cdef tuple sampling_of(Reader* r):
    """The six fields of `SamplingParams`; the class itself judges their values."""
    cdef Item item, stop
    cdef uint64_t max_new_tokens, seed
    cdef double temperature, top_p
    if read_item(r, &item) != FINE or item.kind != ARRAY_ITEM or item.length != 6:
        return None
    if not take_int(r, INT31, &max_new_tokens) or not take_double(r, &temperature) or not take_double(r, &top_p):
        return None
    if not take_tokens(r, MAX_STOP, &stop) or read_item(r, &item) != FINE or item.kind != BOOL_ITEM:
        return None
    ignore_eos = (r.at - 1)[0] == 0xc3
    if not take_int(r, INT63, &seed):
        return None
    return max_new_tokens, temperature, top_p, tuple_of(&stop), ignore_eos, seed


cdef inline bint take_double(Reader* r, double* out) noexcept nogil:
    """A 64-bit float."""
    cdef Item item
    if read_item(r, &item) != FINE or item.kind != FLOAT_ITEM or (r.at - 9)[0] != 0xcb:
        return False
    memcpy(out, &item.number, 8)
    return True


def read_events(bytes frame not None, uint64_t version):
    """(epoch, session, seq, number, [(first letter, fields of the event), ...], complete for), token ids as raw words,
    or None if it takes a closer look."""
    cdef Reader r
    cdef Item item
    cdef uint64_t header[3]
    cdef uint64_t number
    cdef uint32_t _, count
    cdef list events = []
    cdef tuple event
    start(&r, frame)
    if not take_header(&r, EVENTS_FIELDS, version, EVENTS, header) or not take_int(&r, INT63, &number):
        return None
    if read_item(&r, &item) != FINE or item.kind != ARRAY_ITEM or item.length > MAX_EVENTS:
        return None
    count = item.length
    try:
        for _ in range(count):
            event = event_of(&r)
            if event is None:
                return None
            events.append(event)
        if read_item(&r, &item) != FINE or item.kind != TEXT_ITEM or item.length > MAX_TEXT or r.at != r.end:
            return None
        complete_for = PyUnicode_DecodeUTF8(<char*> item.data, item.length, NULL)
    except UnicodeDecodeError:
        return None
    return header[0], header[1], header[2], number, events, complete_for


cdef tuple event_of(Reader* r):
    """The first letter and the fields of an event of a request, or of an eviction; None for any other."""
    cdef Item item
    cdef uint32_t fields
    if read_item(r, &item) != FINE or item.kind != ARRAY_ITEM:
        return None
    fields = item.length
    if read_item(r, &item) != FINE or item.kind != TEXT_ITEM or item.length != 1:
        return None
    if item.data[0] == b"E":
        return evicted_of(r) if fields == 4 else None
    if item.data[0] == b"Q":
        return request_of(r, "Q") if fields == 6 else None
    if item.data[0] == b"F":
        return request_of(r, "F") if fields == 4 else None
    return request_of(r, "X") if fields == 4 and item.data[0] == b"X" else None


cdef tuple evicted_of(Reader* r):
    cdef Item tokens
    cdef uint64_t kept
    if not take_prompt(r, &tokens) or not take_int(r, tokens.length // 4, &kept) or not take_nil(r):
        return None
    return "E", words_of(&tokens), kept, None


cdef tuple request_of(Reader* r, str letter):
    cdef Item tokens
    cdef int64_t count
    cdef str router = id_of(r)
    cdef str request_id = None if router is None else id_of(r)
    if request_id is None or (letter == "Q" and not (take_prompt(r, &tokens) and take_nil(r))):
        return None
    count = take_count(r, 1 if letter == "Q" else 0)
    if count == WRONG_COUNT:
        return None
    told = None if count == NO_COUNT else count
    return (letter, router, request_id, words_of(&tokens), None, told) if letter == "Q" else (
        letter, router, request_id, told)


cdef inline bytes words_of(Item* tokens):
    return PyBytes_FromStringAndSize(<char*> tokens.data, tokens.length)


cdef inline bint take_prompt(Reader* r, Item* item) noexcept nogil:
    return take_tokens(r, MAX_TOKENS, item) and item.length > 0


cdef inline bint take_nil(Reader* r) noexcept nogil:
    cdef Item item
    return read_item(r, &item) == FINE and item.kind == NIL_ITEM


cdef inline int64_t take_count(Reader* r, uint64_t least) noexcept nogil:
    """An int in [least, 2**31 - 1], or NO_COUNT, or WRONG_COUNT for anything else."""
    cdef Item item
    if read_item(r, &item) != FINE:
        return WRONG_COUNT
    if item.kind == NIL_ITEM:
        return NO_COUNT
    if item.kind != INT_ITEM or item.negative or not least <= item.number <= INT31:
        return WRONG_COUNT
    return <int64_t> item.number


cdef inline void start(Reader* r, bytes frame) noexcept:
    r.begin = r.at = <const uint8_t*> PyBytes_AS_STRING(frame)
    r.end = r.at + PyBytes_GET_SIZE(frame)


# --- writing ----------------------------------------------------------------------------------------------------------

cdef inline uint8_t* put_big(uint8_t* p, uint8_t tag, uint64_t value, int width) noexcept nogil:
    """A tag and a big-endian number."""
    cdef int i
    p[0] = tag
    for i in range(width):
        p[width - i] = <uint8_t> (value >> 8 * i)
    return p + 1 + width


cdef inline uint8_t* put_int(uint8_t* p, uint64_t value) noexcept nogil:
    """The shortest form."""
    if value < 0x80:
        p[0] = <uint8_t> value
        return p + 1
    if value < 1 << 8:
        return put_big(p, 0xcc, value, 1)
    if value < 1 << 16:
        return put_big(p, 0xcd, value, 2)
    if value < <uint64_t> 1 << 32:
        return put_big(p, 0xce, value, 4)
    return put_big(p, 0xcf, value, 8)


cdef inline uint8_t* put_text(uint8_t* p, const char* text, Py_ssize_t length) noexcept nogil:
    """At most 65,535 bytes."""
    if length < 32:
        p[0] = <uint8_t> (0xa0 | length)
        p += 1
    else:
        p = put_big(p, 0xd9, length, 1) if length < 256 else put_big(p, 0xda, length, 2)
    memcpy(p, text, length)
    return p + length


cdef inline uint8_t* put_bytes_head(uint8_t* p, uint64_t length) noexcept nogil:
    if length < 1 << 8:
        return put_big(p, 0xc4, length, 1)
    return put_big(p, 0xc5, length, 2) if length < 1 << 16 else put_big(p, 0xc6, length, 4)


cdef inline uint8_t* put_tuple(uint8_t* p, tuple tokens) except NULL:
    """Raw words. Raises `OverflowError` or `TypeError` for what is no token id."""
    cdef object token
    cdef int32_t value
    p = put_bytes_head(p, 4 * <uint64_t> len(tokens))
    for token in tokens:
        value = token
        if value < 0:
            raise OverflowError
        p[0], p[1] = <uint8_t> value, <uint8_t> (value >> 8)
        p[2], p[3] = <uint8_t> (value >> 16), <uint8_t> (value >> 24)
        p += 4
    return p


cdef inline uint8_t* put_header(uint8_t* p, uint8_t fields, uint64_t version, uint8_t code,
                                epoch, session, seq) except NULL:
    p[0] = 0x90 | fields
    p = put_int(p + 1, version)
    p = put_int(p, code)
    return put_int(put_int(put_int(p, epoch), session), seq)


def write_chunk(message, epoch, session, seq, uint64_t version):
    """The frame of a `Chunk`, or None."""
    cdef Py_ssize_t id_bytes
    cdef const char* request_id
    cdef tuple tokens = message.token_ids
    cdef uint8_t* p
    cdef bytes frame
    if message.error is not None:
        return None
    try:
        request_id = PyUnicode_AsUTF8AndSize(message.request_id, &id_bytes)
        if not 0 < id_bytes <= MAX_ID or len(tokens) > MAX_TOKENS:
            return None
        frame = PyBytes_FromStringAndSize(NULL, LARGEST + id_bytes + 4 * len(tokens))
        p = put_header(begin(frame), CHUNK_FIELDS, version, CHUNK, epoch, session, seq)
        p = put_int(put_text(p, request_id, id_bytes), message.index)
        p = put_tuple(p, tokens)
        if message.cached_tokens is None:
            p = put_big(p, 0xc0, 0, 0)
        else:
            p = put_int(p, message.cached_tokens)
        if message.finish_reason is None:
            p = put_big(p, 0xc0, 0, 0)
        else:
            p = put_choice(p, message.finish_reason)
        p = put_int(put_big(p, 0xc0, 0, 0), message.next_event_seq)
    except (OverflowError, TypeError, UnicodeEncodeError):
        return None
    return frame[:p - begin(frame)]


cdef inline uint8_t* put_choice(uint8_t* p, str reason) except NULL:
    """A finish reason that `read_chunk` knows."""
    if reason == "length":
        return put_text(p, b"length", 6)
    if reason == "stop":
        return put_text(p, b"stop", 4)
    raise TypeError


def write_submit(message, epoch, session, seq, const int32_t[::1] tokens, uint64_t version):
    """The frame of a `Submit` with these token ids, or None."""
    cdef Py_ssize_t id_bytes, count = tokens.shape[0]
    cdef const char* request_id
    cdef tuple stop
    cdef uint8_t* p
    cdef bytes frame
    sampling = message.sampling
    stop = sampling.stop_token_ids
    if message.namespace is not None or not 0 < count <= MAX_TOKENS or len(stop) > MAX_STOP:
        return None
    try:
        request_id = PyUnicode_AsUTF8AndSize(message.request_id, &id_bytes)
        if not 0 < id_bytes <= MAX_ID:
            return None
        frame = PyBytes_FromStringAndSize(NULL, LARGEST + id_bytes + 4 * (count + len(stop)))
        p = put_header(begin(frame), SUBMIT_FIELDS, version, SUBMIT, epoch, session, seq)
        p = put_bytes_head(put_text(p, request_id, id_bytes), 4 * <uint64_t> count)
        memcpy(p, &tokens[0], 4 * count)
        p = put_sampling(p + 4 * count, sampling, stop)
        p = put_int(put_big(p, 0xc0, 0, 0), message.output_offset)
    except (OverflowError, TypeError, UnicodeEncodeError):
        return None
    return frame[:p - begin(frame)]


cdef uint8_t* put_sampling(uint8_t* p, sampling, tuple stop) except NULL:
    p[0] = 0x96
    p = put_int(p + 1, sampling.max_new_tokens)
    p = put_double(put_double(p, exact(sampling.temperature)), exact(sampling.top_p))
    p = put_tuple(p, stop)
    return put_int(put_big(p, 0xc3 if sampling.ignore_eos else 0xc2, 0, 0), sampling.seed)


cdef inline double exact(value) except? -1.0:
    """A float. An int travels as one, so it is not for this way."""
    if type(value) is not float:
        raise TypeError
    return value


cdef inline uint8_t* put_double(uint8_t* p, double value) noexcept nogil:
    cdef uint64_t bits
    memcpy(&bits, &value, 8)
    return put_big(p, 0xcb, bits, 8)


cdef inline uint8_t* begin(bytes frame) noexcept:
    return <uint8_t*> PyBytes_AS_STRING(frame)
