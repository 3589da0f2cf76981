/* Talks to callgrind from Python: count from here, count to here. Owns nothing else; without valgrind it does nothing. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <valgrind/callgrind.h>

static PyObject *begin(PyObject *self, PyObject *unused) {
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
    Py_RETURN_NONE;
}

/* end(name): write what was counted since `begin` under this name. */
static PyObject *end(PyObject *self, PyObject *name) {
    const char *text = PyUnicode_AsUTF8(name);
    if (!text) return NULL;
    CALLGRIND_DUMP_STATS_AT(text);
    CALLGRIND_STOP_INSTRUMENTATION;
    Py_RETURN_NONE;
}

/* nothing(anything): what a loop costs around the calls it makes. */
static PyObject *nothing(PyObject *self, PyObject *unused) { Py_RETURN_NONE; }

static PyMethodDef methods[] = {
    {"begin", begin, METH_NOARGS, "Count from here."},
    {"end", end, METH_O, "Write the count under a name."},
    {"nothing", nothing, METH_O, "Nothing."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "callgrind_request", "Talks to callgrind.", -1, methods};

PyMODINIT_FUNC PyInit_callgrind_request(void) { return PyModule_Create(&module); }
