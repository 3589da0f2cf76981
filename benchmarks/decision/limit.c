/* The physical limit of a decision, as a Python extension: compare a prompt with its stored prefix and copy the rest.

   Owns a pool of stored tokens that only grows, and the timed calls. Where a prompt's prefix is stored, is told
   beforehand by `prepare`, outside the timing: looking it up is the scheduler's work, not the machine's.

     pool   [ system prompt | tool 7 | question 0 | tool 3 | question 1 | ...        end -> ]
     prompt [ system prompt | tool 3 | question 2 ]     compared piece by piece, then copied to the end      */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PIECES_MAX 65536
#define LIST_MAX (1 << 20)

static int32_t *pool;               /* every page touched by `reset`, so that page faults are not in the limit */
static int64_t pool_tokens, end;
static int64_t pieces[2 * PIECES_MAX]; /* (offset in the pool, tokens), in the prompt's order */
static int64_t piece_count, shared;
static int32_t converted[LIST_MAX];
static int64_t inner_ns;            /* of the last `timed` call */

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static PyObject *reset(PyObject *self, PyObject *tokens) {
    int64_t wanted = PyLong_AsLongLong(tokens);
    if (wanted < 1) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the pool needs room");
        return NULL;
    }
    free(pool);
    pool = malloc(wanted * sizeof *pool);
    if (!pool) return PyErr_NoMemory();
    memset(pool, 0xff, wanted * sizeof *pool);
    pool_tokens = wanted;
    end = 0;
    Py_RETURN_NONE;
}

/* prepare(pieces: int64 buffer, shared_tokens): what the next decision compares. */
static PyObject *prepare(PyObject *self, PyObject *args) {
    Py_buffer given;
    long long tokens;
    if (!PyArg_ParseTuple(args, "y*L", &given, &tokens)) return NULL;
    int64_t count = given.len / 16, total = 0;
    if (count <= PIECES_MAX) memcpy(pieces, given.buf, count * 16);
    PyBuffer_Release(&given);
    for (int64_t i = 0; i < count && count <= PIECES_MAX; i++) total += pieces[2 * i + 1];
    if (count > PIECES_MAX || total != tokens) {
        PyErr_SetString(PyExc_ValueError, "pieces: too many, or they do not add up to the shared tokens");
        return NULL;
    }
    piece_count = count;
    shared = tokens;
    Py_RETURN_NONE;
}

/* 1 if the prompt's prefix equals the stored pieces. Copies what follows to the end of the pool. */
static int compare_and_copy(const int32_t *tokens, int64_t count) {
    int equal = 1;
    const int32_t *at = tokens;
    for (int64_t i = 0; i < piece_count; i++) {
        equal &= memcmp(at, pool + pieces[2 * i], pieces[2 * i + 1] * 4) == 0;
        at += pieces[2 * i + 1];
    }
    memcpy(pool + end, at, (count - shared) * 4);
    end += count - shared;
    return equal;
}

static int has_room(int64_t count) {
    if (count >= shared && end + count - shared <= pool_tokens) return 1;
    PyErr_SetString(PyExc_ValueError, "the pool is full, or the prompt is shorter than its shared prefix");
    return 0;
}

static inline long small_int(PyObject *item) {
#if PY_VERSION_HEX >= 0x030C0000
    if (PyUnstable_Long_IsCompact((PyLongObject *)item)) return PyUnstable_Long_CompactValue((PyLongObject *)item);
#else
    Py_ssize_t size = Py_SIZE(item);
    if (size == 0 || size == 1) return size ? ((PyLongObject *)item)->ob_digit[0] : 0;
#endif
    return PyLong_AsLong(item);
}

/* The list's ints in `converted`; -1 with an error set if it is no list of ints, or too long. */
static int64_t converted_list(PyObject *list) {
    Py_ssize_t count = PyList_GET_SIZE(list);
    if (count > LIST_MAX) {
        PyErr_SetString(PyExc_ValueError, "the list is too long");
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyList_GET_ITEM(list, i);
        if (!PyLong_CheckExact(item)) {
            PyErr_SetString(PyExc_TypeError, "the list holds something that is no int");
            return -1;
        }
        converted[i] = (int32_t)small_int(item);
    }
    return count;
}

static PyObject *decide_any(PyObject *prompt, int timed) {
    Py_buffer buffer = {0};
    const int32_t *tokens = converted;
    int64_t count, start;
    int equal;
    if (PyList_CheckExact(prompt)) {
        count = converted_list(prompt);
        if (count < 0) return NULL;
    } else {
        if (PyObject_GetBuffer(prompt, &buffer, PyBUF_SIMPLE)) return NULL;
        tokens = buffer.buf;
        count = buffer.len / 4;
    }
    if (!has_room(count)) {
        if (buffer.obj) PyBuffer_Release(&buffer);
        return NULL;
    }
    if (timed) {
        start = now_ns();
        equal = compare_and_copy(tokens, count);
        inner_ns = now_ns() - start;
    } else {
        equal = compare_and_copy(tokens, count);
    }
    if (buffer.obj) PyBuffer_Release(&buffer);
    return PyBool_FromLong(equal);
}

/* decide(tokens): the limit with the Python call and the borrowed buffer (or the converted list) around it. */
static PyObject *decide(PyObject *self, PyObject *prompt) { return decide_any(prompt, 0); }

/* The same, keeping the nanoseconds of compare and copy alone for `inner`. */
static PyObject *timed(PyObject *self, PyObject *prompt) { return decide_any(prompt, 1); }

static PyObject *inner(PyObject *self, PyObject *none) { return PyLong_FromLongLong(inner_ns); }

/* borrow(tokens): the floor of any call with a buffer argument. */
static PyObject *borrow(PyObject *self, PyObject *prompt) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(prompt, &buffer, PyBUF_SIMPLE)) return NULL;
    PyBuffer_Release(&buffer);
    Py_RETURN_NONE;
}

/* convert(list): the floor of any call with a list of ints. */
static PyObject *convert(PyObject *self, PyObject *list) {
    if (!PyList_CheckExact(list)) return PyErr_Format(PyExc_TypeError, "convert needs a list");
    return converted_list(list) < 0 ? NULL : Py_NewRef(Py_None);
}

/* equal(a, b, release): memcmp of two buffers, with the GIL released if asked; for scaling over threads. */
static PyObject *equal(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Py_buffer a, b;
    int same;
    if (count != 3) return PyErr_Format(PyExc_TypeError, "equal needs two buffers and a bool");
    if (PyObject_GetBuffer(args[0], &a, PyBUF_SIMPLE)) return NULL;
    if (PyObject_GetBuffer(args[1], &b, PyBUF_SIMPLE)) {
        PyBuffer_Release(&a);
        return NULL;
    }
    size_t bytes = a.len < b.len ? a.len : b.len;
    if (args[2] == Py_True) {
        Py_BEGIN_ALLOW_THREADS
        same = memcmp(a.buf, b.buf, bytes) == 0;
        Py_END_ALLOW_THREADS
    } else {
        same = memcmp(a.buf, b.buf, bytes) == 0;
    }
    PyBuffer_Release(&a);
    PyBuffer_Release(&b);
    return PyBool_FromLong(same);
}

static PyMethodDef methods[] = {
    {"reset", reset, METH_O, "An empty pool with room for so many tokens."},
    {"prepare", prepare, METH_VARARGS, "Where the next prompt's shared prefix lies."},
    {"decide", decide, METH_O, "Compare and copy; whether all was equal."},
    {"timed", timed, METH_O, "The same, timed inside."},
    {"inner", inner, METH_NOARGS, "Nanoseconds of the last timed call's compare and copy."},
    {"borrow", borrow, METH_O, "Take a buffer and give it back."},
    {"convert", convert, METH_O, "Convert a list of ints."},
    {"equal", (PyCFunction)(void (*)(void))equal, METH_FASTCALL, "Whether two buffers are equal."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "limit", "The physical limit of a decision.", -1, methods};

PyMODINIT_FUNC PyInit_limit(void) { return PyModule_Create(&module); }
