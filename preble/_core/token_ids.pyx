"""Token ids at the door. Owns the conversion of what callers pass into a C array of int32; keeps nothing.

int32 and uint32 buffers are borrowed without a copy, int64 buffers and lists or tuples of ints are converted by one C
loop. The functions about words are for Python code that keeps token ids as raw bytes.
"""

from operator import index

cimport cython
from cpython.buffer cimport (PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_ND, PyBuffer_Release, PyObject_CheckBuffer,
                             PyObject_GetBuffer)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_Check, PyList_GET_SIZE
from cpython.ref cimport PyObject
from cpython.tuple cimport PyTuple_Check, PyTuple_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.stdlib cimport free, malloc

from ..errors import InvalidTokens

cdef extern from "Python.h":
    ctypedef struct PyListObject:
        PyObject** ob_item
    ctypedef struct PyTupleObject:
        PyObject** ob_item

cdef enum:
    COUNT_MAX = 1 << 28          # tokens in one prompt

cdef int64_t ID_MAX = 2147483647

cdef extern from * nogil:
    """
    /* The value of an exact int that fits a token id, else -1: without a call for each token. */
    static inline int64_t preble_token(PyObject *item) {
        if (!PyLong_CheckExact(item)) return -1;
    #if PY_VERSION_HEX < 0x030C0000
        const PyLongObject *number = (const PyLongObject *)item;
        Py_ssize_t digits = Py_SIZE(item);
        if (digits == 1) return number->ob_digit[0];
        if (digits == 0) return 0;
        if (digits != 2) return -1;
        int64_t value = (int64_t)number->ob_digit[0] | ((int64_t)number->ob_digit[1] << PyLong_SHIFT);
        return value <= INT32_MAX ? value : -1;
    #else
        if (!PyUnstable_Long_IsCompact((const PyLongObject *)item)) {
            int overflow = 0;
            long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
            return overflow == 0 && value >= 0 && value <= INT32_MAX ? value : -1;
        }
        return PyUnstable_Long_CompactValue((const PyLongObject *)item);
    #endif
    }
    /* Convert items until one is no plain token id; returns how many were. */
    static inline Py_ssize_t preble_tokens(PyObject *const *items, Py_ssize_t count, int32_t *out) {
        for (Py_ssize_t i = 0; i < count; i++) {
            int64_t value = preble_token(items[i]);
            if (value < 0) return i;
            out[i] = (int32_t)value;
        }
        return count;
    }

    /* All ids of a run or-ed: negative if one of them is. Wide where the machine is, as in prefix_compare.pxd. */
    #if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
    #include <immintrin.h>
    __attribute__((target("avx2")))
    static int32_t preble_signs_avx2(const int32_t *ids, uint32_t count) {
        __m256i all[4];
        for (int lane = 0; lane < 4; lane++) all[lane] = _mm256_setzero_si256();
        uint32_t i = 0;
        int32_t signs = 0;
        for (; i + 32 <= count; i += 32)
            for (int lane = 0; lane < 4; lane++)
                all[lane] = _mm256_or_si256(all[lane], _mm256_loadu_si256((const __m256i *)(ids + i + 8 * lane)));
        all[0] = _mm256_or_si256(_mm256_or_si256(all[0], all[1]), _mm256_or_si256(all[2], all[3]));
        if (_mm256_movemask_ps(_mm256_castsi256_ps(all[0]))) return -1;
        for (; i < count; i++) signs |= ids[i];
        return signs;
    }
    #define PREBLE_WIDE_SIGNS __builtin_cpu_supports("avx2")
    #else
    #define PREBLE_WIDE_SIGNS 0
    #define preble_signs_avx2(ids, count) 0
    #endif

    static inline int32_t preble_signs(const int32_t *ids, uint32_t count) {
        int32_t signs = 0;
        if (PREBLE_WIDE_SIGNS) return preble_signs_avx2(ids, count);
        for (uint32_t i = 0; i < count; i++) signs |= ids[i];
        return signs;
    }
    """
    int32_t signs_of "preble_signs"(const int32_t* ids, uint32_t count) nogil
    Py_ssize_t plain_tokens "preble_tokens"(PyObject** items, Py_ssize_t count, int32_t* out)


def prompt_words(token_ids) -> bytes:
    """A prompt's token ids (1-D int32, uint32 or int64 buffer, list or tuple of ints) as native int32 words: a copy, so
    that nobody can change them later.

    Raises `InvalidTokens` where there is none, where an id is not in [0, 2**31 - 1], or for anything else.
    """
    return words_of(token_ids, False)


def token_words(token_ids) -> bytes:
    """`prompt_words` for token ids that may be none at all."""
    return words_of(token_ids, True)


cdef bytes words_of(object token_ids, bint allow_empty):
    cdef TokenView view
    cdef int32_t token
    if PyTuple_Check(token_ids) and PyTuple_GET_SIZE(token_ids) == 1:      # what comes for every token
        if plain_tokens((<PyTupleObject*> token_ids).ob_item, 1, &token):
            return PyBytes_FromStringAndSize(<const char*> &token, 4)
    view_tokens(token_ids, &view, allow_empty)
    try:
        check_tokens(&view, 0)
        return PyBytes_FromStringAndSize(<const char*> view.data, 4 * <Py_ssize_t> view.count)
    finally:
        release_tokens(&view)


def word_count(bytes words not None) -> int:
    """How many token ids these native int32 words are; -1 if one of them is negative or the last is not whole."""
    cdef const int32_t* ids = <const int32_t*> PyBytes_AS_STRING(words)
    cdef Py_ssize_t count = PyBytes_GET_SIZE(words) // 4
    return -1 if 4 * count != PyBytes_GET_SIZE(words) or signs_of(ids, <uint32_t> count) < 0 else count


def word_tuple(bytes words not None):
    """The token ids of native int32 words; None where `word_count` says -1."""
    cdef Py_ssize_t i, count = word_count(words)
    cdef const int32_t* ids = <const int32_t*> PyBytes_AS_STRING(words)
    if count < 0:
        return None
    return tuple([ids[i] for i in range(count)])


cdef int view_tokens(object token_ids, TokenView* view, bint allow_empty=False) except -1:
    """Fill `view` from `token_ids`; the caller calls release_tokens. Borrowed ids are not yet known to be >= 0."""
    view.data = NULL
    view.owned = NULL
    view.count = 0
    view.borrowed = False
    view.checked = False
    try:
        if PyList_Check(token_ids) or PyTuple_Check(token_ids):
            with cython.critical_section(token_ids):     # nothing where Python has its lock
                convert_sequence(token_ids, view)
        else:
            borrow_buffer(token_ids, view)
        if view.count == 0 and not allow_empty:
            raise InvalidTokens("token_ids is empty; a prompt needs at least one token")
    except BaseException:
        release_tokens(view)
        raise
    return 0


cdef int check_tokens(TokenView* view, uint32_t first) except -1:
    """Raise InvalidTokens if an id from position `first` on is negative. Matched ids need no check: they equal stored
    ones."""
    cdef uint32_t i
    if not has_negative(view, first):
        return 0
    for i in range(first, view.count):
        if view.data[i] < 0:
            raise InvalidTokens(f"token_ids[{i}] is outside [0, {ID_MAX}]")
    return 0


cdef bint has_negative(const TokenView* view, uint32_t first) noexcept nogil:
    """Whether an id from position `first` on is negative: what check_tokens would raise for."""
    return not view.checked and first < view.count and any_negative(view.data + first, view.count - first)


cdef bint any_negative(const int32_t* ids, uint32_t count) noexcept nogil:
    return signs_of(ids, count) < 0


cdef void release_tokens(TokenView* view) noexcept:
    if view.borrowed:
        PyBuffer_Release(&view.buffer)
        view.borrowed = False
    free(view.owned)
    view.owned = NULL


cdef int allocate(TokenView* view, Py_ssize_t count) except -1:
    if count > COUNT_MAX:
        raise InvalidTokens(f"token_ids has {count} tokens; at most {COUNT_MAX} are allowed")
    view.owned = <int32_t*> malloc(max(count, 1) * sizeof(int32_t))
    if view.owned == NULL:
        raise MemoryError("token_ids could not be converted")
    view.data = view.owned
    view.count = <uint32_t> count
    return 0


cdef int convert_sequence(object token_ids, TokenView* view) except -1:
    """Plain ints in one C loop; whatever else there is, one by one."""
    cdef bint is_list = PyList_Check(token_ids)
    cdef Py_ssize_t i = 0, count = PyList_GET_SIZE(token_ids) if is_list else PyTuple_GET_SIZE(token_ids)
    cdef PyObject** items = (<PyListObject*> token_ids).ob_item if is_list else (<PyTupleObject*> token_ids).ob_item
    allocate(view, count)
    while True:
        i += plain_tokens(items + i, count - i, view.owned + i)
        if i == count:
            break
        view.owned[i] = whole_number(<object> items[i], i)
        if is_list and PyList_GET_SIZE(token_ids) != count:      # __index__ is foreign code
            raise InvalidTokens("token_ids changed its length while it was read")
        items = (<PyListObject*> token_ids).ob_item if is_list else items
        i += 1
    view.checked = True
    return 0


cdef int32_t whole_number(object item, Py_ssize_t i) except? -1:
    """An element that is no plain token id: numpy integers pass, floats, bools, numbers out of range and anything else
    do not."""
    if type(item).__name__ in ("bool", "bool_"):          # Python's and numpy's
        raise InvalidTokens(f"token_ids[{i}] is a bool, not an int")
    try:
        number = index(item)
    except TypeError:
        raise InvalidTokens(f"token_ids[{i}] is a {type(item).__name__}, not an int") from None
    if 0 <= number <= ID_MAX:
        return <int32_t> number
    raise InvalidTokens(f"token_ids[{i}] is {number}, outside [0, {ID_MAX}]")


cdef int borrow_buffer(object token_ids, TokenView* view) except -1:
    cdef char kind
    if not PyObject_CheckBuffer(token_ids) and hasattr(token_ids, "__array__"):
        try:
            token_ids = token_ids.__array__()      # torch CPU tensors offer no buffer, but this
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidTokens(f"token_ids is a {type(token_ids).__name__} that gives no array: {error}") from None
    if not PyObject_CheckBuffer(token_ids):
        raise InvalidTokens(f"token_ids is a {type(token_ids).__name__}; pass a 1-D int32, uint32 or int64 buffer, "
                            "or a list of ints")
    try:
        PyObject_GetBuffer(token_ids, &view.buffer, PyBUF_FORMAT | PyBUF_ND | PyBUF_C_CONTIGUOUS)
    except (BufferError, ValueError) as error:
        raise InvalidTokens(f"token_ids is not a C-contiguous buffer: {error}") from None
    view.borrowed = True
    if view.buffer.ndim != 1:
        raise InvalidTokens(f"token_ids has {view.buffer.ndim} dimensions, not 1")
    kind = kind_of(view.buffer.format, view.buffer.itemsize)
    if kind == b"4":
        if view.buffer.shape[0] > COUNT_MAX:
            raise InvalidTokens(f"token_ids has {view.buffer.shape[0]} tokens; at most {COUNT_MAX} are allowed")
        view.data = <const int32_t*> view.buffer.buf
        view.count = <uint32_t> view.buffer.shape[0]
    elif kind == b"8":
        narrow(<const int64_t*> view.buffer.buf, view)
    else:
        name = (<bytes> view.buffer.format).decode() if view.buffer.format != NULL else "B"
        raise InvalidTokens(f"token_ids has element format {name!r}; int32, uint32 or int64 is needed")
    return 0


cdef char kind_of(const char* form, Py_ssize_t itemsize) noexcept:
    """b'4' for native 32-bit integers, b'8' for signed 64-bit ones, b'?' for anything else."""
    if form == NULL:
        return b"?"
    if form[0] == b"@" or form[0] == b"=" or form[0] == b"<":
        form += 1
    if form[0] == 0 or form[1] != 0:
        return b"?"
    if itemsize == 4 and (form[0] == b"i" or form[0] == b"I" or form[0] == b"l" or form[0] == b"L"):
        return b"4"
    if itemsize == 8 and (form[0] == b"q" or form[0] == b"l"):
        return b"8"
    return b"?"


cdef int narrow(const int64_t* wide, TokenView* view) except -1:
    cdef Py_ssize_t i, count = view.buffer.shape[0]
    cdef int64_t bad = 0
    allocate(view, count)
    for i in range(count):
        bad |= wide[i]
        view.owned[i] = <int32_t> wide[i]
    if bad < 0 or bad > ID_MAX:
        for i in range(count):
            if wide[i] < 0 or wide[i] > ID_MAX:
                raise InvalidTokens(f"token_ids[{i}] is {wide[i]}, outside [0, {ID_MAX}]")
    view.checked = True
    return 0
