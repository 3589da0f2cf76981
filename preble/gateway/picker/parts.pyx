"""Messages of a data plane read out of their bytes, and parts of bodies put into bytes, without protobuf's objects.
Owns what is read of `ProcessingRequest` (heads and parts of bodies, as data planes write them), how the answer that
passes a part on is written, and which parts pass without being looked into further; the numbers of fields stand in
`messages`, which reads whatever is written otherwise.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.string cimport memcpy

from preble.gateway.relay.plain_events cimport event_count, is_plain

cdef enum:
    REQUEST_HEADERS = 2  # of `ProcessingRequest`
    RESPONSE_HEADERS = 3
    REQUEST_BODY = 4
    RESPONSE_BODY = 5
    REQUEST_TRAILERS = 6
    RESPONSE_TRAILERS = 7
    METADATA = 8
    OBSERVABILITY = 10
    CONFIGURATION = 11
    END_OF_STREAM_OF_HEAD = 3  # of `HttpHeaders`
    END_OF_STREAM = 2  # of `HttpBody` and `StreamedBodyResponse`
    MODES = 16  # that a body may be sent in, and more

    SHORT = 5  # bytes of a number: of tags and sizes,
    LONG = 10  # and of all others
    VARINT = 0
    FIXED_64 = 1
    SIZED = 2
    FIXED_32 = 5

    ANSWER_BODY = 4  # of `ProcessingResponse`
    NESTED = 4  # messages around a part of a body
    PREFIX_BYTES = 64  # of all that stands before a part
    PART_LIMIT = 62_000  # of a body in one message: data planes take 64 KiB

PART_BYTES = PART_LIMIT


@cython.final
cdef class Said:
    """What one message says. `kind` is the field of `ProcessingRequest` that it is, 0 for none. Of a head there are
    `fields`, as ASGI has them; of a part of a body `body`; `end`: nothing of it follows. `modes`: how the bodies of
    request and answer are sent, where it says so. `metadata`: what came with a head, encoded."""

    def __init__(self, int kind=0):
        self.kind = kind
        self.body = b""


cdef struct Span:
    const unsigned char* data
    Py_ssize_t at, end


cdef struct Field:
    long long number
    int wire
    unsigned long long value  # of a number
    Span inside  # of what has a size


cdef bint read_varint(Span* span, unsigned long long* value, int bytes_max) noexcept nogil:
    cdef int shift = 0
    cdef unsigned char byte
    value[0] = 0
    while span.at < span.end and shift < 7 * bytes_max:
        byte = span.data[span.at]
        span.at += 1
        value[0] |= <unsigned long long> (byte & 0x7F) << shift
        if byte < 0x80:
            return True
        shift += 7
    return False


cdef bint read_field(Span* span, Field* field) noexcept nogil:
    """The next field; False where it is not to be read here."""
    cdef unsigned long long tag, size
    if not read_varint(span, &tag, SHORT) or tag >> 3 == 0 or tag >> 3 > 0x1FFF_FFFF:
        return False
    field.number, field.wire = tag >> 3, tag & 7
    if field.wire == VARINT:
        return read_varint(span, &field.value, LONG)
    if field.wire == SIZED:
        if not read_varint(span, &size, SHORT):
            return False
    elif field.wire == FIXED_64:
        size = 8
    elif field.wire == FIXED_32:
        size = 4
    else:
        return False
    if size > <unsigned long long> (span.end - span.at):
        return False
    field.inside = Span(span.data, span.at, span.at + <Py_ssize_t> size)
    span.at += <Py_ssize_t> size
    return True


cdef bint is_ascii(const Span* span) noexcept nogil:
    cdef Py_ssize_t at
    for at in range(span.at, span.end):
        if span.data[at] > 0x7F:
            return False
    return True


cdef inline bytes bytes_of(const Span* span):
    return PyBytes_FromStringAndSize(<const char*> span.data + span.at, span.end - span.at)


def read_said(bytes message):
    """What an encoded `ProcessingRequest` says; None where it is not written as data planes do, or has trailers, and
    protobuf is to read it: a field comes twice, or is of another kind, or a text is not ASCII."""
    cdef Span span = Span(<const unsigned char*> PyBytes_AS_STRING(message), 0, PyBytes_GET_SIZE(message))
    cdef Field field
    cdef Said said = Said()
    cdef int seen = 0
    while span.at < span.end:
        if not read_field(&span, &field):
            return None
        if field.number > CONFIGURATION:
            continue
        if field.wire != (VARINT if field.number == OBSERVABILITY else SIZED) or seen >> field.number & 1:
            return None
        seen |= 1 << field.number
        if field.number == REQUEST_BODY or field.number == RESPONSE_BODY:
            if said.kind or not read_body(&field.inside, said):
                return None
            said.kind = field.number
        elif field.number == REQUEST_HEADERS or field.number == RESPONSE_HEADERS:
            if said.kind or not read_head(&field.inside, said):
                return None
            said.kind = field.number
        elif field.number == REQUEST_TRAILERS or field.number == RESPONSE_TRAILERS:
            return None
        elif field.number == METADATA:
            said.metadata = bytes_of(&field.inside)
        elif field.number == OBSERVABILITY:
            said.is_observed = field.value != 0
        elif field.number == CONFIGURATION:
            if not read_modes(&field.inside, said):
                return None
    return said


cdef bint read_body(Span* span, Said said) except -1:
    cdef Field field
    cdef int seen = 0
    while span.at < span.end:
        if not read_field(span, &field):
            return False
        if field.number > END_OF_STREAM:
            continue
        if field.wire != (SIZED if field.number == 1 else VARINT) or seen & field.number:
            return False
        seen |= field.number
        if field.number == 1:
            said.body = bytes_of(&field.inside)
        else:
            said.end = field.value != 0
    return True


cdef bint read_head(Span* span, Said said) except -1:
    cdef Field field, one
    cdef Span listed
    cdef int seen = 0
    said.fields = []
    while span.at < span.end:
        if not read_field(span, &field):
            return False
        if field.number == 1:
            if field.wire != SIZED or seen & 1:
                return False
            seen |= 1
            listed = field.inside
            while listed.at < listed.end:
                if not read_field(&listed, &one):
                    return False
                if one.number == 1 and (one.wire != SIZED or not read_value(&one.inside, said.fields)):
                    return False
        elif field.number == END_OF_STREAM_OF_HEAD:
            if field.wire != VARINT or seen & 2:
                return False
            seen |= 2
            said.end = field.value != 0
    return True


cdef bint read_value(Span* span, list fields) except -1:
    """A name and its value, either way."""
    cdef Field field
    cdef Span parts[4]
    cdef int seen = 0, at
    for at in range(1, 4):
        parts[at] = Span(span.data, 0, 0)
    while span.at < span.end:
        if not read_field(span, &field):
            return False
        if field.number > 3:
            continue
        if field.wire != SIZED or seen >> field.number & 1:
            return False
        if field.number < 3 and not is_ascii(&field.inside):
            return False
        seen |= 1 << field.number
        parts[field.number] = field.inside
    fields.append((bytes_of(&parts[1]), bytes_of(&parts[3 if parts[3].end > parts[3].at else 2])))
    return True


cdef bint read_modes(Span* span, Said said) except -1:
    cdef Field field
    cdef unsigned long long modes[3]
    cdef int seen = 0
    modes[1] = modes[2] = 0
    while span.at < span.end:
        if not read_field(span, &field):
            return False
        if field.number > 2:
            continue
        if field.wire != VARINT or seen & field.number or field.value >= MODES:
            return False
        seen |= field.number
        modes[field.number] = field.value
    said.modes = (modes[1], modes[2])
    return True


# --- written ----------------------------------------------------------------------------------------------------------


cdef Py_ssize_t prepend_size(char* prefix, Py_ssize_t at, int number, Py_ssize_t size) noexcept nogil:
    """Write what begins a field of so many bytes before `at`; where that begins."""
    cdef Py_ssize_t more = size
    cdef int count = 1, place
    while more > 0x7F:
        more >>= 7
        count += 1
    at -= count
    for place in range(count):
        prefix[at + place] = <char> (size & 0x7F | (0x80 if place < count - 1 else 0))
        size >>= 7
    at -= 1
    prefix[at] = <char> (number << 3 | SIZED)
    return at


cdef bytes write_part(int number, const char* part, Py_ssize_t size, bint end):
    """See `passed_part`."""
    cdef char prefix[PREFIX_BYTES]
    cdef int numbers[NESTED]
    cdef int place
    cdef Py_ssize_t begin, total
    cdef bytes found
    cdef char* out
    numbers[0], numbers[1], numbers[2], numbers[3] = 3, 3, 1, number
    begin = prepend_size(prefix, PREFIX_BYTES, 1, size)
    for place in range(NESTED):
        begin = prepend_size(prefix, begin, numbers[place], PREFIX_BYTES - begin + size + 2 * end)
    total = PREFIX_BYTES - begin + size + 2 * end
    found = PyBytes_FromStringAndSize(NULL, total)
    out = PyBytes_AS_STRING(found)
    memcpy(out, prefix + begin, PREFIX_BYTES - begin)
    memcpy(out + PREFIX_BYTES - begin, part, size)
    if end:
        out[total - 2], out[total - 1] = END_OF_STREAM << 3 | VARINT, 1
    return found


def passed_part(int number, bytes part, bint end):
    """The answer that passes a part of a body on: five messages within each other (`number` of the answer's fields,
    what is common, the change of the body, the part as a stream's, its bytes)."""
    return write_part(number, PyBytes_AS_STRING(part), PyBytes_GET_SIZE(part), end)


# --- passed on --------------------------------------------------------------------------------------------------------


@cython.final
cdef class PlainParts:
    """The parts of one streamed answer that are whole events without anything that must be read (`plain_events`): they
    go on as they are, where the stream stands between two events, its first token is noted, and nothing of it is held
    back. Then `on_output` is set, to be called for each of them; it is None elsewhere. `is_open`: what goes on is sent
    in the answers, as in full duplex. `events`: how many have passed so."""

    def __init__(self):
        self.is_open = True

    cpdef bytes passed(self, bytes message):
        """The answer to a `ProcessingRequest` that is such a part; None for any other."""
        cdef Span span = Span(<const unsigned char*> PyBytes_AS_STRING(message), 0, PyBytes_GET_SIZE(message))
        cdef Field field, body
        cdef const char* part
        cdef Py_ssize_t size
        if self.on_output is None or not self.is_open:
            return None
        if not read_field(&span, &field) or field.number != RESPONSE_BODY or field.wire != SIZED:
            return None
        while span.at < span.end:  # metadata and attributes say nothing of a part
            if not read_field(&span, &body) or body.number < METADATA or body.number >= OBSERVABILITY:
                return None
        span = field.inside
        if not read_field(&span, &body) or body.number != 1 or body.wire != SIZED or span.at != span.end:
            return None
        part, size = <const char*> body.inside.data + body.inside.at, body.inside.end - body.inside.at
        if size > PART_LIMIT or not is_plain(part, size):
            return None
        self.events += event_count(part, size)
        self.on_output()
        return write_part(ANSWER_BODY, part, size, False)
