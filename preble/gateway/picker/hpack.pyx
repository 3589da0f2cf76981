"""Header fields of HTTP/2 as they are compressed (RFC 7541). Owns decoding, the table that both sides keep, and the few
fields that are ever sent; what fields mean is `http2`'s.

Huffman's code follows from its lengths: codes of one length go up with their symbols, longer ones come behind. What
is decoded is bounded by the frame that it came in, times at most 8/5 for Huffman's, and a table of `TABLE_BYTES`.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.string cimport memset

from preble.errors import ProtocolError

TABLE_BYTES = 4096  # of the other side's fields, the default, which we leave as it is
FIELDS_MAX = 256

cdef enum:
    TABLE = 4096  # `TABLE_BYTES`
    FIELDS = 256  # `FIELDS_MAX`
    FIELD_OVERHEAD = 32  # which each field counts for beside its bytes
    INTEGER_MAX = 1 << 24
    BITS_MAX = 30  # of Huffman's codes
    TEXT_END = 256  # its symbol for the end of a text

# Of each byte and, last, the end of a text: how many bits it has, "A" for 5.
_LENGTHS = (
    "ISXXXXXXXTZXXZXXXXXXXXZXXXXXXXXXBFFHIBDGFFDGDBBBAAABBBBBBBCDKBHFIBCCCCCCCCCCCCCCCCCCCC"
    "CCDCDIOIJBKABABABBBACCBBBABCBAABCCCCCKGJIXPRPPRRRSRSSSSSTSTTRSTSSSSQRSRSSTRQPRRSSQSRRT"
    "QRSSQQRQSRSSPRRRSRRSVVPORSRUVVVWWVTUOQVWWVWTQQVVXWWWPTPQRQQSRRUUTTVSVWVVWWWWWXWWWWWVZ"
)
# The fields that both sides know from the start, by their index less one: names, some with a value.
_KNOWN = (
    ":authority :method=GET :method=POST :path=/ :path=/index.html :scheme=http :scheme=https :status=200 "
    ":status=204 :status=206 :status=304 :status=400 :status=404 :status=500 accept-charset "
    "accept-encoding=gzip,~deflate accept-language accept-ranges accept access-control-allow-origin age allow "
    "authorization cache-control content-disposition content-encoding content-language content-length "
    "content-location content-range content-type cookie date etag expect expires from host if-match "
    "if-modified-since if-none-match if-range if-unmodified-since last-modified link location max-forwards "
    "proxy-authenticate proxy-authorization range referer refresh retry-after server set-cookie "
    "strict-transport-security transfer-encoding user-agent vary via www-authenticate "
)
cdef tuple STATIC = tuple(
    (name, value.replace(b"~", b" ")) for name, _, value in (one.encode().partition(b"=") for one in _KNOWN.split())
)
cdef int STATIC_FIELDS = <int>len(STATIC)
cdef int first_codes[BITS_MAX + 2]  # by length: the first of Huffman's codes, how many there are,
cdef int code_counts[BITS_MAX + 2]
cdef int code_places[BITS_MAX + 2]  # and where their symbols stand
cdef short symbols[TEXT_END + 1]


cdef int make_codes() except -1:
    """The codes out of their lengths."""
    cdef int code = 0, last = 0, at = 0, bits
    memset(code_counts, 0, sizeof(code_counts))
    for bits, symbol in sorted((ord(letter) - ord("A") + 5, number) for number, letter in enumerate(_LENGTHS)):
        code <<= bits - last
        if not code_counts[bits]:
            first_codes[bits], code_places[bits] = code, at
        code_counts[bits] += 1
        symbols[at] = symbol
        at += 1
        code += 1
        last = bits
    return 0


make_codes()


cdef struct Reading:
    const unsigned char* data
    Py_ssize_t at, end


cdef int read_integer(Reading* block, int bits) except -1:
    """A number whose first byte has so many bits of it."""
    cdef int limit = (1 << bits) - 1, value, byte, shift = 0
    if block.at >= block.end:
        raise_early()
    value = block.data[block.at] & limit
    block.at += 1
    if value < limit:
        return value
    while True:
        if block.at >= block.end:
            raise_early()
        byte = block.data[block.at]
        block.at += 1
        if shift <= 21:
            value += (byte & 0x7F) << shift
        if shift > 21 or value > INTEGER_MAX:
            raise ProtocolError("header fields: a number that is too large")
        if not byte & 0x80:
            return value
        shift += 7


cdef int raise_early() except -1:
    raise ProtocolError("a block of header fields ends early")


cdef bytes read_text(Reading* block):
    """A text, out of Huffman's code where it is in that."""
    cdef bint is_huffman
    cdef Py_ssize_t start, length
    if block.at >= block.end:
        raise_early()
    is_huffman = block.data[block.at] & 0x80
    length = read_integer(block, 7)
    start = block.at
    if length > block.end - start:
        raise_early()
    block.at = start + length
    if is_huffman:
        return unpacked(block.data + start, length)
    return PyBytes_FromStringAndSize(<const char*> block.data + start, length)


cdef bytes unpacked(const unsigned char* packed, Py_ssize_t size):
    """Text out of Huffman's code. Raises `ProtocolError` for what is none, or does not end in ones."""
    cdef bytes found = PyBytes_FromStringAndSize(NULL, size * 8 // 5 + 1)
    cdef char* out = PyBytes_AS_STRING(found)
    cdef Py_ssize_t at, count = 0
    cdef int code = 0, bits = 0, place, symbol, byte
    for at in range(size):
        byte = packed[at]
        for place in range(7, -1, -1):
            code = code << 1 | byte >> place & 1
            bits += 1
            if bits > BITS_MAX:
                raise ProtocolError("header fields: no Huffman code")
            if code_counts[bits] and 0 <= code - first_codes[bits] < code_counts[bits]:
                symbol = symbols[code_places[bits] + code - first_codes[bits]]
                if symbol == TEXT_END:
                    raise ProtocolError("header fields: no Huffman code")
                out[count] = <char> symbol
                count += 1
                code = bits = 0
    if bits > 7 or code != (1 << bits) - 1:
        raise ProtocolError("header fields: Huffman code that ends early")
    return PyBytes_FromStringAndSize(out, count)


@cython.final
cdef class HeaderDecoder:
    """The fields of one connection's blocks, in the order in which they came."""

    def __init__(self):
        self.table = []
        self.table_bytes = 0
        self.bytes_max = TABLE

    cpdef list decode(self, bytes block):
        """The fields of a block. Raises `ProtocolError`; then nothing of the connection can be understood any more."""
        cdef list fields = []
        cdef tuple field
        cdef Reading reading = Reading(
            <const unsigned char*> PyBytes_AS_STRING(block), 0, PyBytes_GET_SIZE(block)
        )
        cdef int first, index
        while reading.at < reading.end:
            first = reading.data[reading.at]
            if first & 0x80:
                fields.append(self.field_at(read_integer(&reading, 7)))
            elif first & 0xE0 == 0x20:
                self.bytes_max = read_integer(&reading, 5)
                if self.bytes_max > TABLE or fields:
                    raise ProtocolError("header table: a size that was not allowed")
                self.evict()
            else:
                index = read_integer(&reading, 6 if first & 0xC0 == 0x40 else 4)
                name = self.field_at(index)[0] if index else read_text(&reading)
                field = (name, read_text(&reading))
                fields.append(field)
                if first & 0xC0 == 0x40:
                    self.table.append(field)
                    self.table_bytes += size_of(field)
                    self.evict()
            if len(fields) > FIELDS:
                raise ProtocolError(f"more than {FIELDS} header fields")
        return fields

    cdef tuple field_at(self, Py_ssize_t index):
        if 0 < index <= STATIC_FIELDS:
            return <tuple> STATIC[index - 1]
        index = len(self.table) - (index - STATIC_FIELDS)
        if index < 0 or index >= len(self.table):
            raise ProtocolError("header table: no such field")
        return <tuple> self.table[index]

    cdef int evict(self) except -1:
        cdef Py_ssize_t count = 0
        while self.table_bytes > self.bytes_max:
            self.table_bytes -= size_of(<tuple> self.table[count])
            count += 1
        if count:
            del self.table[:count]
        return 0


cdef Py_ssize_t size_of(tuple field):
    return PyBytes_GET_SIZE(field[0]) + PyBytes_GET_SIZE(field[1]) + FIELD_OVERHEAD


def encoded(fields):
    """A block that adds nothing to the other side's table; names and values of at most 126 bytes."""
    parts = []
    for field in fields:
        if field in STATIC:
            parts.append(bytes([0x80 | STATIC.index(field) + 1]))
            continue
        assert all(len(text) < 127 for text in field), "longer ones are never sent"
        parts += [b"\0", bytes([len(field[0])]), field[0], bytes([len(field[1])]), field[1]]
    return b"".join(parts)
