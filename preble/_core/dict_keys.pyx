"""Keys of dictionaries, from what users hand in: request ids, namespaces. Owns how an object becomes a key whose hash
and equality are C code.

A dictionary hashes and compares its keys in the middle of being read and changed. Where that is Python code (a
`uuid.UUID`, a frozen dataclass), other threads run meanwhile, and it may call back or fail. So it runs before:

    key = dict_key(table, value)     hashes `value` and compares it with the keys of equal hash: any code may run
    ... table[key] ...               C alone; `key` holds until the lock is let go or code of users runs

An object whose type hashes and compares in C is its own key. Any other gets a `HashedKey`, which keeps its hash and
equals itself alone; found again is the one that is in the table. Nothing else may be entered in such a table.
"""

cimport cython
from cpython.object cimport PyTypeObject
from libc.stdint cimport int64_t

from preble._core.atomic cimport add_count, load_signed

cdef extern from "Python.h":
    Py_ssize_t PyUnicode_GET_LENGTH(object text)
    int PyUnicode_KIND(object text)

from ..errors import InvalidInput

cdef enum:
    TUPLE_DEPTH_MAX = 32         # tuples within tuples that are their own keys; snapshots keep no deeper ones
    LOOKS_MAX = 1000             # at keys of equal hash that others change meanwhile

cdef int64_t hashed_keys = 0


@cython.final
@cython.no_gc
cdef class HashedKey:
    """Stands for a user's object in a dictionary. `value`: that object. Immutable, so thread-safe."""

    def __cinit__(self):
        add_count(&hashed_keys, 1)

    def __init__(self):
        raise TypeError("a HashedKey is made by find_key")

    def __dealloc__(self):
        add_count(&hashed_keys, -1)

    def __hash__(self):
        return self.value_hash

    def __repr__(self) -> str:
        return repr(self.value)


@cython.final
cdef class KeyProbe:
    """Equals nothing and notes whom it is compared with: a lookup of it finds a dictionary's keys of one hash."""
    cdef Py_hash_t value_hash
    cdef list known              # keys that are known to differ
    cdef list met                # keys found by the lookup
    cdef bint news               # one of those is not among the known ones

    def __hash__(self):
        return self.value_hash

    def __eq__(self, other):
        cdef Py_ssize_t at = len(self.met)
        self.met.append(other)
        if at >= len(self.known) or self.known[at] is not other:
            self.news = self.news or not any_is(self.known, other)
        return False


cdef bint any_is(list keys, object key) noexcept:
    for one in keys:
        if one is key:
            return True
    return False


cdef bint is_own_key(object value, int depth=0):
    """Whether an object hashes and compares with others of its kind in C alone."""
    cdef type kind = type(value)
    if kind is str or kind is int or kind is bytes or kind is float or kind is bool or value is None:
        return True
    if kind is not tuple or depth == TUPLE_DEPTH_MAX:
        return False
    for one in <tuple> value:
        if not is_own_key(one, depth + 1):
            return False
    return True


cpdef object find_key(dict table, object value):
    """The key under which `value` is in `table`, or is to be entered; `value` may be a `HashedKey` already.

    Whatever `__hash__` and `__eq__` raise passes through. Raises InvalidInput where the keys of equal hash never stay
    the same for one look. O(keys of equal hash). From its return on nothing but C has run.
    """
    cdef HashedKey key
    cdef bint own = is_own_key(value)
    if type(value) is HashedKey or own and (load_signed(&hashed_keys) == 0 or value in table):
        return value
    if own:
        return compared_key(table, value, value, hash(value))
    key = HashedKey.__new__(HashedKey)
    key.value = value
    key.value_hash = hash(value)
    return compared_key(table, value, key, key.value_hash)


cdef object compared_key(dict table, object value, object key, Py_hash_t value_hash):
    """The one of a table's keys of equal hash that stands for `value`, else `key`."""
    cdef KeyProbe probe = KeyProbe.__new__(KeyProbe)
    probe.value_hash = value_hash
    probe.known = []
    for _ in range(LOOKS_MAX):
        probe.met = []
        probe.news = False
        table.get(probe)
        if not probe.news and len(probe.met) == len(probe.known):
            return key           # `known` lets go of nobody who is not in the table, so no code runs on the way out
        if not probe.news:
            probe.known = probe.met
            continue
        for other in probe.met:
            if not any_is(probe.known, other):
                if key_value(other) == value and other in table:
                    return other
                probe.known.append(other)
    raise InvalidInput(f"{value!r} cannot be a key: what has its hash changes whenever it is compared")


cpdef object key_value(object key):
    """What a key stands for."""
    return (<HashedKey> key).value if type(key) is HashedKey else key


cpdef int64_t key_bytes(object key):
    """About what a key takes in memory; the same whenever it is asked, and without code of users. Of a user's object it
    counts what its type says, not what it refers to."""
    cdef type kind = type(key)
    if kind is str:
        return 56 + <int64_t> PyUnicode_GET_LENGTH(key) * PyUnicode_KIND(key)
    if kind is bytes:
        return 40 + len(<bytes> key)
    if kind is int:
        return 32 + (key.bit_length() >> 3)
    if kind is tuple:
        return 64 + sum([8 + key_bytes(one) for one in <tuple> key])
    if kind is HashedKey:
        return 48 + key_bytes((<HashedKey> key).value)
    return 16 + (<PyTypeObject*> kind).tp_basicsize
