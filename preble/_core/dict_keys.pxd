# Keys of dictionaries, from what users hand in: contents of `dict_keys.pyx`.

from libc.stdint cimport int64_t

from cpython.long cimport PyLong_CheckExact
from cpython.unicode cimport PyUnicode_CheckExact

from preble._core.atomic cimport load_signed

cdef int64_t hashed_keys         # alive, in all dictionaries together

cdef class HashedKey:            # stands for an object whose hash or equality is Python code; equals itself alone
    cdef readonly object value
    cdef Py_hash_t value_hash

cpdef object find_key(dict table, object value)
cpdef object key_value(object key)
cpdef int64_t key_bytes(object key)

cdef inline bint is_plain_key(object value) noexcept:
    # Whether `value` is its own key in every dictionary.
    return load_signed(&hashed_keys) == 0 and (PyUnicode_CheckExact(value) or value is None or PyLong_CheckExact(value))

cdef inline object dict_key(dict table, object value):
    # The key under which `value` is in `table`, or is to be entered. See `find_key`.
    return value if is_plain_key(value) else find_key(table, value)
