/* Lets the n-th allocation of chosen modules fail. Preloaded into a test's Python; owns no test.
 *
 * A call counts when it comes from the code of a watched module, told by its return address: the interpreter's own
 * calls never count, and none of the core's can be left out. Everything else goes on to the real allocator, which may
 * be a sanitizer's. Not thread-safe: tests of failing allocations run in one thread. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

enum { MODULES_MAX = 64, EARLY_BYTES = 1 << 16 };

static struct { uintptr_t from, to; } watched[MODULES_MAX];
static int watched_count = 0;
static long countdown = 0; /* the n-th counted call from now fails; 0 = none */
static long counted = 0;
static long live = 0; /* blocks that watched code has and has not given back */

static struct {
    void *(*malloc)(size_t);
    void *(*calloc)(size_t, size_t);
    void *(*realloc)(void *, size_t);
    int (*posix_memalign)(void **, size_t, size_t);
    void *(*aligned_alloc)(size_t, size_t);
    void *(*mmap)(void *, size_t, int, int, int, off_t);
    int (*munmap)(void *, size_t);
    void (*free)(void *);
} real;

/* Looking up the real functions allocates: that little comes from here and is never given back. */
static _Alignas(16) char early[EARLY_BYTES];
static size_t early_used = 0;
static int looking_up = 0;

static void *early_alloc(size_t size) {
    size_t start = early_used;
    if (size > EARLY_BYTES - start) return NULL;
    early_used = (start + size + 15) & ~(size_t) 15;
    return early + start;
}

static int is_early(void *memory) { return (char *) memory >= early && (char *) memory < early + EARLY_BYTES; }

static void look_up(void) {
    looking_up = 1;
    real.calloc = (void *(*)(size_t, size_t)) dlsym(RTLD_NEXT, "calloc");
    real.realloc = (void *(*)(void *, size_t)) dlsym(RTLD_NEXT, "realloc");
    real.posix_memalign = (int (*)(void **, size_t, size_t)) dlsym(RTLD_NEXT, "posix_memalign");
    real.aligned_alloc = (void *(*)(size_t, size_t)) dlsym(RTLD_NEXT, "aligned_alloc");
    real.mmap = (void *(*)(void *, size_t, int, int, int, off_t)) dlsym(RTLD_NEXT, "mmap");
    real.munmap = (int (*)(void *, size_t)) dlsym(RTLD_NEXT, "munmap");
    real.free = (void (*)(void *)) dlsym(RTLD_NEXT, "free");
    real.malloc = (void *(*)(size_t)) dlsym(RTLD_NEXT, "malloc");
    looking_up = 0;
}

/* Whether the functions are known; not while they are looked up. */
static int ready(void) {
    if (!real.malloc && !looking_up) look_up();
    return !looking_up;
}

static int is_watched(void *caller) {
    uintptr_t at = (uintptr_t) caller;
    for (int i = 0; i < watched_count; i++) {
        if (at >= watched[i].from && at < watched[i].to) return 1;
    }
    return 0;
}

/* Whether this call is the one to fail; counts it, and the block that it is about to get (`blocks`, 0 or 1). */
static int fails(void *caller, int blocks) {
    if (!is_watched(caller)) return 0;
    counted++;
    if (countdown && --countdown == 0) {
        errno = ENOMEM;
        return 1;
    }
    live += blocks;
    return 0;
}

/* --- for the test ------------------------------------------------------------------------------------------------- */

int watch_code(uintptr_t from, uintptr_t to) {
    if (watched_count == MODULES_MAX) return -1;
    watched[watched_count].from = from;
    watched[watched_count].to = to;
    watched_count++;
    return 0;
}

void fail_nth(long nth) { countdown = nth; }

long calls_counted(void) { return counted; }

long blocks_live(void) { return live; }

/* --- the allocator ------------------------------------------------------------------------------------------------ */

void *malloc(size_t size) {
    if (!ready()) return early_alloc(size);
    return fails(__builtin_return_address(0), 1) ? NULL : real.malloc(size);
}

void *calloc(size_t count, size_t size) {
    if (!ready()) return early_alloc(count * size); /* static memory is zero */
    return fails(__builtin_return_address(0), 1) ? NULL : real.calloc(count, size);
}

void *realloc(void *old, size_t size) {
    if (!ready() || is_early(old)) {
        void *moved = ready() ? real.malloc(size) : early_alloc(size);
        size_t most = (size_t) (early + EARLY_BYTES - (char *) old); /* how long it was is not known */
        if (moved && old) memcpy(moved, old, size < most ? size : most);
        return moved;
    }
    return fails(__builtin_return_address(0), old == NULL) ? NULL : real.realloc(old, size);
}

int posix_memalign(void **out, size_t alignment, size_t size) {
    if (!ready()) return ENOMEM;
    return fails(__builtin_return_address(0), 1) ? ENOMEM : real.posix_memalign(out, alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size) {
    if (!ready()) return NULL;
    return fails(__builtin_return_address(0), 1) ? NULL : real.aligned_alloc(alignment, size);
}

void *mmap(void *address, size_t length, int protection, int flags, int file, off_t offset) {
    if (!ready()) return MAP_FAILED;
    return fails(__builtin_return_address(0), 1) ? MAP_FAILED
                                              : real.mmap(address, length, protection, flags, file, offset);
}

/* What `mmap` is called in code with large file offsets, as the interpreter's headers ask for. */
void *mmap64(void *address, size_t length, int protection, int flags, int file, off_t offset) {
    if (!ready()) return MAP_FAILED;
    return fails(__builtin_return_address(0), 1) ? MAP_FAILED
                                              : real.mmap(address, length, protection, flags, file, offset);
}

int munmap(void *address, size_t length) {
    if (!ready()) return -1;
    if (is_watched(__builtin_return_address(0))) live--;
    return real.munmap(address, length);
}

void free(void *memory) {
    if (memory == NULL || is_early(memory) || !ready()) return;
    if (is_watched(__builtin_return_address(0))) live--;
    real.free(memory);
}
