/* Faults planted on purpose, one function each. Owns nothing that is shipped: the sanitizer commands build this file
 * with the flags of the core and run each function, so that a run that finds nothing in the core is known to be one
 * that would have found something. Each result is returned, so that no compiler can leave the fault out. */

#include <limits.h>
#include <sched.h>
#include <stdlib.h>

static long shared_count = 0;
static int *volatile kept; /* volatile, so that the compiler cannot see where the pointer leads */

/* One byte beyond a block from malloc: AddressSanitizer, heap-buffer-overflow. */
int read_beyond(void) {
    kept = malloc(4 * sizeof(int));
    for (int i = 0; i < 4; i++) kept[i] = i;
    int value = kept[4];
    free(kept);
    return value;
}

/* A block that was given back: AddressSanitizer, heap-use-after-free. */
int read_freed(void) {
    kept = malloc(sizeof(int));
    *kept = 7;
    free(kept);
    return *kept;
}

/* UndefinedBehaviorSanitizer, signed integer overflow. */
int overflow(void) {
    volatile int most = INT_MAX;
    return most + 1;
}

/* Both threads must be inside at once, or the interpreter's own lock would order them. Relaxed: it orders nothing. */
static void wait_for_both(void) {
    static int arrived = 0;
    __atomic_add_fetch(&arrived, 1, __ATOMIC_RELAXED);
    while (__atomic_load_n(&arrived, __ATOMIC_RELAXED) < 2) sched_yield();
}

/* Called by two threads: ThreadSanitizer, data race. */
long race(long times) {
    wait_for_both();
    for (long i = 0; i < times; i++) shared_count++;
    return shared_count;
}

/* The same, done right: must not be reported. */
long no_race(long times) {
    wait_for_both();
    for (long i = 0; i < times; i++) __atomic_fetch_add(&shared_count, 1, __ATOMIC_RELAXED);
    return __atomic_load_n(&shared_count, __ATOMIC_RELAXED);
}
