/* The physical limit of a decision: compare a prompt with its stored prefix and copy the rest.
   Loops in C so that nothing else is measured. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* For each prompt i: memcmp with stored[i] over matched[i] tokens, memcpy of the rest; nanoseconds into `ns`. */
int64_t compare_and_copy(const int32_t **prompts, const int32_t **stored, const int64_t *matched,
                         const int64_t *lengths, int64_t count, int32_t *out, double *ns) {
    int64_t differing = 0;
    for (int64_t i = 0; i < count; i++) {
        double start = seconds();
        differing += memcmp(prompts[i], stored[i], matched[i] * 4) != 0;
        memcpy(out, prompts[i] + matched[i], (lengths[i] - matched[i]) * 4);
        ns[i] = (seconds() - start) * 1e9;
    }
    return differing;
}
