# Clocks, for those who read them without a call: the manual one (contents of `manual_clock.pyx`), the monotonic one.

cdef class ManualClock:
    cdef double seconds

cdef extern from * nogil:
    """
    #include <stdint.h>
    #include <time.h>
    /* What time.monotonic() returns, without the call; negative where that is another clock. */
    static inline double preble_monotonic(void) {
    #ifdef __linux__
        struct timespec now;
        if (clock_gettime(CLOCK_MONOTONIC, &now) == 0)
            return (double)((int64_t)now.tv_sec * 1000000000 + now.tv_nsec) / 1e9;
    #endif
        return -1.0;
    }
    """
    double monotonic_seconds "preble_monotonic"()
