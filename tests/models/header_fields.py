"""The naive model of header fields of HTTP/2 (RFC 7541): what `gateway.picker.hpack` decodes, in plain Python, a bit at
a time. Owns no bound that matters elsewhere; `packed` writes Huffman's code, which the picker never does.
"""

from __future__ import annotations

from collections import deque

from preble.errors import ProtocolError

TABLE_BYTES = 4096  # of the other side's fields, the default, which we leave as it is
FIELDS_MAX = 256
_FIELD_OVERHEAD = 32  # which each field counts for beside its bytes
_INTEGER_MAX = 1 << 24
# Of each byte and, last, the end of a text: how many bits it has, "A" for 5.
_LENGTHS = (
    "ISXXXXXXXTZXXZXXXXXXXXZXXXXXXXXXBFFHIBDGFFDGDBBBAAABBBBBBBCDKBHFIBCCCCCCCCCCCCCCCCCCCC"
    "CCDCDIOIJBKABABABBBACCBBBABCBAABCCCCCKGJIXPRPPRRRSRSSSSSTSTTRSTSSSSQRSRSSTRQPRRSSQSRRT"
    "QRSSQQRQSRSSPRRRSRRSVVPORSRUVVVWWVTUOQVWWVWTQQVVXWWWPTPQRQQSRRUUTTVSVWVVWWWWWXWWWWWVZ"
)
_END = 256
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
_STATIC: tuple[tuple[bytes, bytes], ...] = tuple(
    (name, value.replace(b"~", b" ")) for name, _, value in (one.encode().partition(b"=") for one in _KNOWN.split())
)


class NaiveHeaderDecoder:
    """The fields of one connection's blocks, in the order in which they came."""

    def __init__(self) -> None:
        self.table: deque[tuple[bytes, bytes]] = deque()  # the newest first
        self.table_bytes = 0
        self.bytes_max = TABLE_BYTES

    def decode(self, block: bytes) -> list[tuple[bytes, bytes]]:
        """The fields of a block. Raises `ProtocolError`; then nothing of the connection can be understood any more."""
        fields: list[tuple[bytes, bytes]] = []
        at = 0
        try:
            while at < len(block):
                first = block[at]
                if first & 0x80:
                    index, at = _integer(block, at, 7)
                    fields.append(self._at(index))
                elif first & 0xE0 == 0x20:
                    self.bytes_max, at = _integer(block, at, 5)
                    if self.bytes_max > TABLE_BYTES or fields:
                        raise ProtocolError("header table: a size that was not allowed")
                    self._evict()
                else:
                    is_kept = first & 0xC0 == 0x40
                    field, at = self._literal(block, at, 6 if is_kept else 4)
                    fields.append(field)
                    if is_kept:
                        self._keep(field)
                if len(fields) > FIELDS_MAX:
                    raise ProtocolError(f"more than {FIELDS_MAX} header fields")
        except IndexError:
            raise ProtocolError("a block of header fields ends early") from None
        return fields

    def _literal(self, block: bytes, at: int, bits: int) -> tuple[tuple[bytes, bytes], int]:
        index, at = _integer(block, at, bits)
        if index:
            name = self._at(index)[0]
        else:
            name, at = _text(block, at)
        value, at = _text(block, at)
        return (name, value), at

    def _at(self, index: int) -> tuple[bytes, bytes]:
        if 0 < index <= len(_STATIC):
            return _STATIC[index - 1]
        index -= len(_STATIC) + 1
        if not 0 <= index < len(self.table):
            raise ProtocolError("header table: no such field")
        return self.table[index]

    def _keep(self, field: tuple[bytes, bytes]) -> None:
        self.table.appendleft(field)
        self.table_bytes += _size(field)
        self._evict()

    def _evict(self) -> None:
        while self.table_bytes > self.bytes_max:
            self.table_bytes -= _size(self.table.pop())


def _size(field: tuple[bytes, bytes]) -> int:
    return len(field[0]) + len(field[1]) + _FIELD_OVERHEAD


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    limit = (1 << bits) - 1
    value = block[at] & limit
    at += 1
    if value < limit:
        return value, at
    shift = 0
    while True:
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if shift > 21 or value > _INTEGER_MAX:
            raise ProtocolError("header fields: a number that is too large")
        if not byte & 0x80:
            return value, at
        shift += 7


def _text(block: bytes, at: int) -> tuple[bytes, int]:
    is_huffman = block[at] & 0x80
    length, at = _integer(block, at, 7)
    end = at + length
    if end > len(block):
        raise IndexError
    text = block[at:end]
    return (_unpacked(text) if is_huffman else text), end


def _codes() -> dict[tuple[int, int], int]:
    """By length and code, the symbol."""
    found: dict[tuple[int, int], int] = {}
    code = last = 0
    for bits, symbol in sorted((ord(letter) - ord("A") + 5, number) for number, letter in enumerate(_LENGTHS)):
        code <<= bits - last
        found[bits, code] = symbol
        code += 1
        last = bits
    return found


_SYMBOLS = _codes()
_BITS_MAX = 30


def _unpacked(packed: bytes) -> bytes:
    """Text out of Huffman's code. Raises `ProtocolError` for what is none, or does not end in ones."""
    found = bytearray()
    code = bits = 0
    for byte in packed:
        for place in range(7, -1, -1):
            code = code << 1 | byte >> place & 1
            bits += 1
            symbol = _SYMBOLS.get((bits, code))
            if symbol is not None and symbol != _END:
                found.append(symbol)
                code = bits = 0
            elif symbol == _END or bits > _BITS_MAX:
                raise ProtocolError("header fields: no Huffman code")
    if bits > 7 or code != (1 << bits) - 1:
        raise ProtocolError("header fields: Huffman code that ends early")
    return bytes(found)


def packed(text: bytes) -> bytes:
    """Text in Huffman's code, filled up with ones."""
    codes = {symbol: place for place, symbol in _SYMBOLS.items()}
    bits = "".join(format(codes[byte][1], f"0{codes[byte][0]}b") for byte in text)
    bits += "1" * (-len(bits) % 8)
    return int(bits or "0", 2).to_bytes(len(bits) // 8, "big")


def integer(value: int, bits: int, first: int) -> bytes:
    """A number whose first byte has so many bits of it, behind those of `first`."""
    limit = (1 << bits) - 1
    if value < limit:
        return bytes([first | value])
    found = bytearray([first | limit])
    value -= limit
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
