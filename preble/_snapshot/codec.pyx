"""Bytes of a snapshot: a writer that grows, a reader that never looks past the end, and plain values between the two.
Owns how a number, a slab's free list and a Python value are spelled; what they mean is said by `tree.pyx` and
its neighbours.

Values are None, bool, int, float, str, bytes, and tuples of these. They are decoded piece by piece, so that no length
is accepted before the bytes for it have been seen.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.ref cimport PyObject, Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from preble._core.memory cimport CHUNK, CHUNKS_MAX, NONE, Budget, Slab, slab_at, slab_reserve

from ..errors import InvalidInput, SnapshotRefused

cdef extern from "Python.h":
    int _PyBytes_Resize(PyObject** whole, Py_ssize_t size) except -1

cdef enum:
    START_BYTES = 4096
    NESTED_MAX = 32              # tuples within tuples
    TEXT = 115                   # "s", the tags of values
    BYTES = 98                   # "b"
    INT = 105                    # "i", in as many bytes as it needs
    FLOAT = 102                  # "f"
    TUPLE = 116                  # "t"
    NOTHING = 110                # "n"
    TRUE = 84                    # "T"
    FALSE = 70                   # "F"


cdef const char* NO_MEMORY = "there is no memory for it"


cdef int refuse(const char* reason) except -1:
    """Raise SnapshotRefused unless `reason` is NULL, MemoryError if it is NO_MEMORY."""
    if reason == NO_MEMORY:
        raise MemoryError("snapshot")
    if reason != NULL:
        raise SnapshotRefused(f"the snapshot contradicts itself: {(<bytes> reason).decode()}")
    return 0


cdef void* allocated(void* memory) except NULL:
    """The memory; raises MemoryError where there was none."""
    if memory == NULL:
        raise MemoryError("snapshot")
    return memory


# --- writing ----------------------------------------------------------------------------------------------------------

cdef class Writer:
    """Bytes that grow. Large memory is moved by its pages, not copied, as it grows, and is the result itself."""

    def __cinit__(self):
        start = PyBytes_FromStringAndSize(NULL, START_BYTES)
        Py_INCREF(start)
        self.whole = <PyObject*> start
        self.room = START_BYTES
        self.size = 0

    def __dealloc__(self):
        if self.whole != NULL:
            Py_DECREF(<object> self.whole)

    cdef char* reserve(self, int64_t more) except NULL:
        """Where the next `more` bytes go; the caller writes them and adds what it wrote to `size`."""
        if self.whole == NULL:
            raise MemoryError("snapshot")
        if self.size + more > self.room:
            self.room = max(self.size + more, self.room + self.room // 2)
            _PyBytes_Resize(&self.whole, self.room)
        return PyBytes_AS_STRING(<object> self.whole) + self.size

    cdef int put(self, const void* data, int64_t size) except -1:
        if size:                                 # of nothing, `data` may be NULL, which memcpy must not be given
            memcpy(self.reserve(size), data, size)
        self.size += size
        return 0

    cdef int number(self, uint64_t value) except -1:
        return self.put(&value, sizeof(value))

    def value(self, value, str name, int nested=0) -> None:
        """Write a plain value. Raises InvalidInput naming what cannot be written."""
        cdef uint8_t tag
        kind = type(value)
        if kind is str:
            data, tag = value.encode("utf-8", "surrogatepass"), TEXT
        elif kind is bytes:
            data, tag = value, BYTES
        elif kind is int:
            data, tag = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True), INT
        elif kind is float:
            self.byte(FLOAT)
            self.real(value)
            return
        elif value is None or kind is bool:
            self.byte(NOTHING if value is None else TRUE if value else FALSE)
            return
        elif kind is tuple and nested < NESTED_MAX:
            self.byte(TUPLE)
            self.number(len(value))
            for part in value:
                self.value(part, name, nested + 1)
            return
        else:
            raise InvalidInput(f"a snapshot keeps None, bool, int, float, str, bytes, and tuples of these up to "
                               f"{NESTED_MAX} deep; {name} is or has a {kind.__name__}: {value!r}")
        self.byte(tag)
        self.number(len(data))
        self.put(PyBytes_AS_STRING(data), len(data))

    def byte(self, uint8_t value) -> None:
        """Write one byte."""
        self.put(&value, 1)

    def real(self, double value) -> None:
        """Write a float."""
        self.put(&value, sizeof(double))

    def seal(self, header_of) -> None:
        """Replace the first bytes by what `header_of(everything)` says."""
        self.reserve(0)
        header = header_of(memoryview(<bytes> self.whole)[:self.size])
        memcpy(PyBytes_AS_STRING(<object> self.whole), PyBytes_AS_STRING(header), len(header))

    def finish(self) -> bytes:
        """The bytes written; the writer is spent."""
        if self.whole == NULL:
            raise MemoryError("snapshot")
        _PyBytes_Resize(&self.whole, self.size)
        whole = <bytes> self.whole
        Py_DECREF(whole)
        self.whole = NULL
        return whole


# --- reading ----------------------------------------------------------------------------------------------------------

cdef class Reader:
    """Bytes from `start` on; whoever asks for more than there are is refused."""

    def __cinit__(self, bytes data not None, Py_ssize_t start):
        self.data = data
        self.at = PyBytes_AS_STRING(data) + min(start, len(data))
        self.end = PyBytes_AS_STRING(data) + len(data)

    cdef int64_t left(self) noexcept:
        return self.end - self.at

    cdef const char* take(self, int64_t size) except NULL:
        """The next `size` bytes."""
        cdef const char* at = self.at
        if not 0 <= size <= self.end - self.at:
            refuse(b"it ends too early")
        self.at += size
        return at

    cdef int copy(self, void* into, int64_t size) except -1:
        memcpy(into, self.take(size), size)
        return 0

    cdef uint64_t number(self) except? 0xFFFFFFFFFFFFFFFE:
        cdef uint64_t value
        self.copy(&value, sizeof(value))
        return value

    def value(self, int nested=0) -> object:
        """Read a plain value."""
        cdef uint8_t tag = (<const uint8_t*> self.take(1))[0]
        cdef double real
        cdef uint64_t count
        if tag == NOTHING or tag == TRUE or tag == FALSE:
            return None if tag == NOTHING else tag == TRUE
        if tag == FLOAT:
            self.copy(&real, sizeof(real))
            return real
        count = self.number()
        if count > <uint64_t> self.left():       # each part of a tuple takes a byte at least
            refuse(b"it ends too early")
        if tag == TUPLE and nested < NESTED_MAX:
            return tuple([self.value(nested + 1) for _ in range(count)])
        data = self.take(count)[:count]
        if tag == BYTES:
            return data
        if tag == INT and data:
            return int.from_bytes(data, "little", signed=True)
        if tag == TEXT:
            try:
                return data.decode("utf-8", "surrogatepass")
            except UnicodeDecodeError:
                refuse(b"a text is no UTF-8")
        refuse(b"a value of no known kind")

    def done(self) -> None:
        """Refuse a snapshot that has more bytes than it needs."""
        if self.at != self.end:
            refuse(b"it goes on after its end")


# --- slabs ------------------------------------------------------------------------------------------------------------

cdef int save_slab(Writer w, Slab* slab) except -1:
    """Write a slab's items as they lie in memory, then which are free, in the order in which they will be handed
    out."""
    cdef uint32_t chunk, i = slab.free_head
    for chunk in range(slab.chunk_count):
        w.put(slab.chunks[chunk], CHUNK * slab.item_bytes)
    while i != NONE:
        w.put(&i, 4)
        i = (<uint32_t*> slab_at(slab, i))[0]
    return 0


cdef int load_slab(Reader r, Slab* slab, Budget* budget, uint32_t chunks) except -1:
    """Allocate a slab's chunks, all items free, if the bytes that follow can fill them."""
    if chunks > <uint32_t> CHUNKS_MAX or <int64_t> chunks * CHUNK * slab.item_bytes > r.left():
        refuse(b"it ends too early")
    if slab_reserve(slab, budget, chunks * CHUNK):
        raise MemoryError("snapshot")
    return 0


cdef int load_items(Reader r, Slab* slab, Budget* budget, uint32_t chunks) except -1:
    """Allocate a slab's chunks and fill them with the items that follow. Python's lock is let go meanwhile."""
    cdef int64_t chunk_bytes = <int64_t> CHUNK * slab.item_bytes
    cdef const char* items
    cdef uint32_t chunk
    load_slab(r, slab, budget, chunks)
    items = r.take(chunks * chunk_bytes)
    with nogil:
        for chunk in range(chunks):
            memcpy(slab.chunks[chunk], items + chunk * chunk_bytes, chunk_bytes)
    return 0


cdef bint chain_free(Slab* slab, const uint32_t* order, uint32_t count, uint8_t* taken) noexcept nogil:
    """Let a slab hand out exactly these items, in this order. False if one is not an item, is in use or comes twice;
    `taken`, a flag for each item, says which are in use, and then all that are free."""
    cdef uint32_t i, index, items = slab.chunk_count * <uint32_t> CHUNK
    slab.free_head = NONE
    slab.free_count = count
    slab.live = items - count
    for i in range(count):
        memcpy(&index, order + (count - 1 - i), 4)
        if index >= items or taken[index]:
            return False
        taken[index] = True
        (<uint32_t*> slab_at(slab, index))[0] = slab.free_head
        slab.free_head = index
    return True
