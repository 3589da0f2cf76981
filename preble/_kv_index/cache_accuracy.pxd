# How accurate the estimates of each worker's cache are: contents of `cache_accuracy.pyx`.

from libc.stdint cimport int64_t, uint32_t

from preble._kv_index.block_layout cimport PLACES_KEPT, Place

cdef enum:
    FULL_ACCURACY = 8            # accuracy is counted in eighths

cdef struct Served:              # a request that was served, as far as it concerns the cache
    uint32_t worker
    uint32_t block_size
    uint32_t prompt_tokens
    uint32_t matched_tokens      # what the decision counted as cached
    uint32_t confirmed_tokens    # what the worker was known, not only predicted, to hold before
    uint32_t leaf                # the prompt's last node
    uint32_t leaf_generation
    bint remembered              # that node is still there
    bint marked                  # and marked up to its end
    int64_t cached_tokens        # reported; -1: nothing was

cdef struct WorkerAccuracy:      # what was reported about one worker's cache
    double known                 # decayed: tokens it was known to hold, in requests whose report came
    double kept                  # decayed: of these, found there
    double reports               # decayed: these requests
    int64_t reports_total        # the same since the start
    int64_t known_total
    int64_t kept_total
    int64_t surplus_total        # tokens reported beyond what was counted on
    uint32_t eighths             # (r) how much of what is marked counts; FULL_ACCURACY: all
    uint32_t misses              # reports in a row of less than one block where one or more was known
    uint32_t seen_events         # whether the engine has ever reported what it stores
    uint32_t seen_reports        # whether it has ever reported a hit, or a miss
    uint32_t prompts_since_events  # prompts with new blocks since it last reported what it stores
    uint32_t prompts_since_report  # prompts since its last report
    uint32_t apart_prompts       # remembered prompts with new blocks since the engine last reported one to its end
    uint32_t apart_runs          # runs of blocks stored since then that left what was sent
    uint32_t odd_runs            # runs in a row of blocks of another size than was said
    Place prompts[PLACES_KEPT]   # the last of these prompts

cdef class CacheAccuracy:
    cdef WorkerAccuracy* rows    # by worker index, in memory that never moves
    cdef uint32_t end            # one past the highest index in use
    cdef uint32_t inaccurate     # (r) workers whose marks count for less than all
    cdef double half_life_seconds
    cdef double faded_at
    cdef void open(self, uint32_t worker) noexcept
    cdef bint on_events(self, uint32_t worker) noexcept nogil
    cdef void prompt_done(self, const Served* one) noexcept nogil
    cdef void reported(self, const Served* one) noexcept nogil
    cdef void stored(self, uint32_t worker, int64_t apart, int64_t answers, uint32_t odd_runs) noexcept nogil
    cdef void acquit(self, uint32_t worker) noexcept nogil
    cdef void publish(self, uint32_t worker) noexcept nogil
    cdef uint32_t estimated(self, uint32_t worker, uint32_t tokens) noexcept nogil
