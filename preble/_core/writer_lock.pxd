# The writers' lock: recursive, held for microseconds, never while waiting for Python's lock. Owns nothing else.
#
# Whoever waits spins first, since a holder is done sooner than a sleeper would wake. The order of the two locks:
# Python's lock is let go before waiting here (`guard_enter` without it, or `guard_try` with it), so neither waits for
# the other in a circle. A thread that holds this one and Python's may let go of Python's and take it again: nobody who
# has Python's lock waits here.

cdef extern from * nogil:
    """
    #include <pthread.h>
    #include <Python.h>

    typedef pthread_mutex_t preble_guard;
    enum { PREBLE_SPINS = 400 };

    static inline int preble_guard_init(preble_guard *g) {
        pthread_mutexattr_t kind;
        if (pthread_mutexattr_init(&kind)) return -1;
        pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE);
        int failed = pthread_mutex_init(g, &kind);
        pthread_mutexattr_destroy(&kind);
        return failed ? -1 : 0;
    }
    static inline int preble_guard_try(preble_guard *g) { return pthread_mutex_trylock(g) == 0; }
    static inline void preble_guard_enter(preble_guard *g) {
        for (int i = 0; i < PREBLE_SPINS; i++) {
            if (preble_guard_try(g)) return;
            preble_pause();
        }
        pthread_mutex_lock(g);
    }
    static inline void preble_guard_leave(preble_guard *g) { pthread_mutex_unlock(g); }
    static inline void preble_guard_close(preble_guard *g) { pthread_mutex_destroy(g); }

    /* Python's own lock puts whoever waits to sleep, which costs more than a whole decision. Before asking for it, wait
       until nobody seems to hold it. From 3.12 on nobody can tell, so one asks at once. */
    static inline void preble_await_python(void) {
    #if PY_VERSION_HEX < 0x030C0000 && !defined(PYPY_VERSION)
        for (int i = 0; i < PREBLE_SPINS && _PyThreadState_UncheckedGet() != NULL; i++) preble_pause();
    #endif
    }
    """
    ctypedef struct Guard "preble_guard":
        pass
    int guard_init "preble_guard_init"(Guard* g)
    bint guard_try "preble_guard_try"(Guard* g)
    void guard_enter "preble_guard_enter"(Guard* g)          # not with Python's lock, unless this thread has it already
    void guard_leave "preble_guard_leave"(Guard* g)
    void guard_close "preble_guard_close"(Guard* g)
    void await_python "preble_await_python"()
