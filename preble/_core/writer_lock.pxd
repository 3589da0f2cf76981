# The writers' lock: recursive, held for microseconds, never while waiting for Python's lock. Owns nothing else.
#
# Whoever waits spins first, since a holder is done sooner than a sleeper would wake. The order of the two locks:
# Python's lock is let go before waiting here (`lock_enter` without it, or `lock_try` with it), so neither waits for
# the other in a circle. A thread that holds this one and Python's may let go of Python's and take it again: nobody who
# has Python's lock waits here.

cdef extern from * nogil:
    """
    #include <pthread.h>
    #include <Python.h>

    /* `held` is a hint for those who wait: they look at it, and do not take the lock's word from under its holder. */
    typedef struct { pthread_mutex_t mutex; uint32_t held; } preble_writer_lock;
    enum { PREBLE_SPINS = 400 };

    static inline int preble_writer_lock_init(preble_writer_lock *g) {
        pthread_mutexattr_t kind;
        if (pthread_mutexattr_init(&kind)) return -1;
        pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE);
        int failed = pthread_mutex_init(&g->mutex, &kind);
        pthread_mutexattr_destroy(&kind);
        return failed ? -1 : 0;
    }
    static inline int preble_writer_lock_try(preble_writer_lock *g) {
        if (pthread_mutex_trylock(&g->mutex)) return 0;
        preble_store(&g->held, 1u);
        return 1;
    }
    static inline void preble_writer_lock_enter(preble_writer_lock *g) {
        if (preble_writer_lock_try(g)) return;  /* also where this thread holds it already */
        for (int i = 0; i < PREBLE_SPINS; i++) {
            if (!preble_load(&g->held) && preble_writer_lock_try(g)) return;
            preble_pause();
        }
        pthread_mutex_lock(&g->mutex);
        preble_store(&g->held, 1u);
    }
    static inline void preble_writer_lock_leave(preble_writer_lock *g) {
        preble_store(&g->held, 0u);
        pthread_mutex_unlock(&g->mutex);
    }
    static inline void preble_writer_lock_close(preble_writer_lock *g) { pthread_mutex_destroy(&g->mutex); }

    /* Python's own lock puts whoever waits to sleep, which costs more than a whole decision. Before asking for it, wait
       until nobody seems to hold it. From 3.12 on nobody can know, so one asks at once. */
    static inline void preble_await_python(void) {
    #if PY_VERSION_HEX < 0x030C0000 && !defined(PYPY_VERSION)
        for (int i = 0; i < PREBLE_SPINS && _PyThreadState_UncheckedGet() != NULL; i++) preble_pause();
    #endif
    }
    """
    ctypedef struct WriterLock "preble_writer_lock":
        pass
    int lock_init "preble_writer_lock_init"(WriterLock* g)
    bint lock_try "preble_writer_lock_try"(WriterLock* g)
    void lock_enter "preble_writer_lock_enter"(WriterLock* g)  # without Python's lock, unless it is held already
    void lock_leave "preble_writer_lock_leave"(WriterLock* g)
    void lock_close "preble_writer_lock_close"(WriterLock* g)
    void await_python "preble_await_python"()
