# Atomic loads and stores, and the spin that goes with short locks, as inline C. Owns no state.
#
# Readers of the tree take no lock, so whatever they read is written with `store` (release) and read with `load`
# (acquire): who sees a pointer also sees what it points to. Writers are serialised, so they may read their own fields
# plainly. On x86-64 both are ordinary moves.

from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef extern from * nogil:
    """
    #define preble_load(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
    #define preble_store(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
    /* Keeps later loads behind an earlier read-and-write. A locked instruction of x86 does that by itself. */
    static inline void preble_fence(void) {
    #if !defined(__x86_64__) && !defined(__i386__)
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
    #endif
    }
    static inline uint64_t preble_swap(uint64_t *p, uint64_t value) {
        uint64_t before = __atomic_exchange_n(p, value, __ATOMIC_SEQ_CST);
        preble_fence();
        return before;
    }
    #define preble_claim(p, v) preble_claim_64((p), (v))

    static inline int preble_claim_64(uint64_t *p, uint64_t value) {
        uint64_t nothing = 0;
        int claimed = __atomic_compare_exchange_n(p, &nothing, value, 0, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
        preble_fence();
        return claimed;
    }
    static inline void preble_raise(uint32_t *p, uint32_t least) {
        uint32_t seen = __atomic_load_n(p, __ATOMIC_RELAXED);
        while (seen < least && !__atomic_compare_exchange_n(p, &seen, least, 1, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {}
    }
    static inline double preble_load_double(const double *p) {
        double value;
        __atomic_load((double *)p, &value, __ATOMIC_ACQUIRE);
        return value;
    }
    static inline void preble_store_double(double *p, double value) {
        __atomic_store(p, &value, __ATOMIC_RELEASE);
    }
    /* Keeps what threads read off the cache line of what others write. */
    typedef struct { char line[64]; } preble_apart;
    /* CPython built with --disable-gil: what Python's lock orders elsewhere needs a lock, or an atomic step. */
    #ifdef Py_GIL_DISABLED
    #define PREBLE_FREE_THREADED 1
    #define preble_count(p, n) ((void)__atomic_fetch_add((p), (n), __ATOMIC_RELAXED))
    #else
    #define PREBLE_FREE_THREADED 0
    #define preble_count(p, n) ((void)(*(p) += (n)))
    #endif
    static inline void preble_pause(void) {
    #if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
    #elif defined(__aarch64__)
        __asm__ __volatile__("yield");
    #endif
    }
    /* A number for this thread, so that threads start at different reader slots. */
    static inline uint32_t preble_thread_number(void) {
        static uint32_t threads;
        static __thread uint32_t number;
        if (number == 0) number = __atomic_add_fetch(&threads, 1, __ATOMIC_RELAXED);
        return number;
    }
    """
    ctypedef struct Apart "preble_apart":
        pass
    uint32_t load32 "preble_load"(const uint32_t* p)
    int64_t load_signed "preble_load"(const int64_t* p)
    uint64_t load64 "preble_load"(const uint64_t* p)
    double load_double "preble_load_double"(const double* p)
    void store32 "preble_store"(uint32_t* p, uint32_t value)
    void store_signed "preble_store"(int64_t* p, int64_t value)
    void store64 "preble_store"(uint64_t* p, uint64_t value)
    void store_double "preble_store_double"(double* p, double value)
    uint64_t swap64 "preble_swap"(uint64_t* p, uint64_t value)    # a full barrier
    bint claim64 "preble_claim"(uint64_t* p, uint64_t value)      # from 0 to `value`, or False; a full barrier
    void raise32 "preble_raise"(uint32_t* p, uint32_t least)      # to `least` at the least
    bint FREE_THREADED "PREBLE_FREE_THREADED"                     # a constant
    void add_count "preble_count"(int64_t* p, int64_t more)           # of what many threads add to
    void pause "preble_pause"()
    uint32_t thread_number "preble_thread_number"()
