"""How accurate the estimates of each worker's cache are. Owns, per worker, what was reported about its cache and
how often it agreed with what was known; nobody's marks. The words for it are in `scheduling/cache_mismatch.py`.

Three sources say what a worker caches, the best first: cache events, `cached_tokens` reported with a request, and the
estimate, which is that a prompt once sent there stays until there is no room. A worker is on the best one that
has reported lately: within the last SILENT_PROMPTS prompts that should have been reported.

Accuracy is the share of what a worker was known to hold that its reports found there. A prefix that was only predicted,
because its first request still runs, does not count: that is no error. It is 1 as long as the share is at least
AGREED, and quantised, so that decisions change seldom; then what is marked counts for less. It fades with time, so the
marks of a worker that gets no more requests count again some minutes later, and it has to show what it has.

Everything is done as the tree's writer; `eighths` and `inaccurate` are also read without.
"""

from libc.math cimport ceil, exp2
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from preble._core.atomic cimport load32, store32
from preble._kv_index.block_layout cimport PLACES_KEPT, Place

from ..errors import InvalidConfig

cdef enum:
    WORKERS_MAX = 65536          # untouched rows take no memory
    REPORTS_MIN = 8              # before so many it counts as full
    SILENT_PROMPTS = 32          # prompts without a word, after which a source counts as silent
    APART_PROMPTS = 32           # prompts, and runs of stored blocks beside them, of which none ends as it was sent
    APART_RUNS = 8
    MISSES = 32                  # reports in a row of nothing, where something was known
    COUNT_MAX = 1 << 30

cdef double DECAY = 1.0 - 1.0 / 64.0
cdef double AGREED = 0.75
cdef double AMOUNT_MAX = 1e15

_EVENTS = "events"
_REPORTS = "reports"
_ESTIMATE = "estimate"


cdef inline bint is_apart(const WorkerAccuracy* row) noexcept nogil:
    return row.apart_prompts >= <uint32_t> APART_PROMPTS and row.apart_runs >= <uint32_t> APART_RUNS


cdef class CacheAccuracy:
    """What was reported about workers' caches, by worker index. `half_life_seconds`: of what reports have taught."""

    def __cinit__(self, double half_life_seconds):
        if not half_life_seconds > 0.0:
            raise InvalidConfig(f"half_life_seconds must be positive, got {half_life_seconds!r}")
        self.half_life_seconds = half_life_seconds
        self.rows = <WorkerAccuracy*> calloc(WORKERS_MAX, sizeof(WorkerAccuracy))
        if self.rows == NULL:
            raise MemoryError("CacheAccuracy")

    def __dealloc__(self):
        free(self.rows)

    cdef void open(self, uint32_t worker) noexcept:
        """A new worker: its marks count in full, and nothing is reported yet."""
        if worker < self.end and self.rows[worker].eighths < <uint32_t> FULL_ACCURACY:
            store32(&self.inaccurate, self.inaccurate - 1)
        memset(&self.rows[worker], 0, sizeof(WorkerAccuracy))
        store32(&self.rows[worker].eighths, FULL_ACCURACY)
        while self.end <= worker:                # rows in between are of workers that have not come yet
            store32(&self.rows[self.end].eighths, FULL_ACCURACY)
            self.end += 1

    # --- what is received ---

    cdef bint on_events(self, uint32_t worker) noexcept nogil:
        cdef WorkerAccuracy* row = &self.rows[worker]
        return row.seen_events and row.prompts_since_events < <uint32_t> SILENT_PROMPTS

    cdef void prompt_done(self, const Served* one) noexcept nogil:
        """A prompt was computed: from now on its new blocks should be reported."""
        cdef WorkerAccuracy* row = &self.rows[one.worker]
        cdef Place* place
        cdef int64_t held = max(<int64_t> one.matched_tokens, one.cached_tokens)
        row.prompts_since_report += row.prompts_since_report < <uint32_t> COUNT_MAX
        if one.prompt_tokens - 1 - held < one.block_size:        # the last token is computed in any case
            return
        row.prompts_since_events += row.prompts_since_events < <uint32_t> COUNT_MAX
        if row.prompts_since_events == <uint32_t> SILENT_PROMPTS:
            self.publish(one.worker)
        if one.remembered:
            place = &row.prompts[row.apart_prompts % <uint32_t> PLACES_KEPT]
            place.node = one.leaf
            place.generation = one.leaf_generation
            place.end = one.prompt_tokens
            row.apart_prompts += row.apart_prompts < <uint32_t> COUNT_MAX

    cdef void reported(self, const Served* one) noexcept nogil:
        """The first report for a request. The worker is judged by it only where its prompt was marked all the time:
        what was known to have gone is no error."""
        cdef WorkerAccuracy* row = &self.rows[one.worker]
        cdef int64_t known = min(one.confirmed_tokens, one.prompt_tokens - 1), kept
        row.seen_reports = True
        row.prompts_since_report = 0
        if one.cached_tokens > one.matched_tokens:
            row.surplus_total += one.cached_tokens - one.matched_tokens
        known -= known % one.block_size
        if known == 0 or not one.marked:
            return
        kept = min(known, one.cached_tokens)
        row.reports_total += 1
        row.known_total += known
        row.kept_total += kept
        row.reports = row.reports * DECAY + 1.0
        row.known = row.known * DECAY + known
        row.kept = row.kept * DECAY + kept
        if one.cached_tokens >= one.block_size:
            row.misses = 0
        elif row.misses < <uint32_t> COUNT_MAX:
            row.misses += 1
        if row.kept < AGREED * row.known or row.eighths != <uint32_t> FULL_ACCURACY:
            self.publish(one.worker)

    cdef void stored(self, uint32_t worker, int64_t apart, int64_t answers, uint32_t odd_runs) noexcept nogil:
        """The engine has reported blocks it stored: `apart` runs of new ones left what was sent there, `answers`
        reached the end of such a prompt, or may have; the last `odd_runs` are of another block size than was given."""
        cdef WorkerAccuracy* row = &self.rows[worker]
        row.seen_events = True
        row.prompts_since_events = 0
        row.odd_runs = odd_runs
        row.apart_runs = <uint32_t> min(row.apart_runs + apart, <int64_t> COUNT_MAX)
        if answers:
            self.acquit(worker)
        if row.eighths != <uint32_t> FULL_ACCURACY:
            self.publish(worker)

    cdef void acquit(self, uint32_t worker) noexcept nogil:
        """A prompt was reported to its end, or blocks that could not be placed, which may be those of any prompt."""
        self.rows[worker].apart_runs = self.rows[worker].apart_prompts = 0

    def cleared(self, uint32_t worker) -> None:
        """Its cache is empty: what was learned about the one before says nothing about this one."""
        self.rows[worker].known = self.rows[worker].kept = self.rows[worker].reports = 0.0
        self.rows[worker].misses = 0
        self.acquit(worker)
        self.publish(worker)

    def fade(self, double now) -> None:
        """Let what reports have taught lose weight with time. O(workers)."""
        cdef uint32_t i
        cdef double factor
        if now <= self.faded_at:                 # a clock that jumped back begins anew
            self.faded_at = now
            return
        factor = exp2((self.faded_at - now) / self.half_life_seconds)
        self.faded_at = now
        for i in range(self.end):
            if self.rows[i].reports > 0.0:
                self.rows[i].reports *= factor
                self.rows[i].known *= factor
                self.rows[i].kept *= factor
                self.publish(i)

    # --- what follows ---

    cdef void publish(self, uint32_t worker) noexcept nogil:
        """Work out the accuracy anew. With events it is full: what they say is no estimate."""
        cdef WorkerAccuracy* row = &self.rows[worker]
        cdef uint32_t eighths = FULL_ACCURACY
        if row.reports >= REPORTS_MIN and row.kept < AGREED * row.known and not self.on_events(worker):
            eighths = max(<uint32_t> 1, <uint32_t> ceil(FULL_ACCURACY * row.kept / row.known))
        if eighths != row.eighths:
            store32(&self.inaccurate, self.inaccurate + (eighths < <uint32_t> FULL_ACCURACY)
                    - (row.eighths < <uint32_t> FULL_ACCURACY))
            store32(&row.eighths, eighths)

    cdef uint32_t estimated(self, uint32_t worker, uint32_t tokens) noexcept nogil:
        """What to make of marks that cover so many tokens; at least one, so that it stays met."""
        return max(<uint32_t> 1, tokens // <uint32_t> FULL_ACCURACY * load32(&self.rows[worker].eighths))

    def stats(self, uint32_t worker) -> dict[str, object]:
        """One worker's source, accuracy, and the counts behind it."""
        cdef WorkerAccuracy* row = &self.rows[worker]
        source = _ESTIMATE
        if self.on_events(worker):
            source = _EVENTS
        elif row.seen_reports and row.prompts_since_report < <uint32_t> SILENT_PROMPTS:
            source = _REPORTS
        return {
            "cache_source": source,
            "cache_accuracy": row.eighths / <double> FULL_ACCURACY,
            "judged_reports": row.reports_total,
            "known_tokens": row.known_total,
            "kept_tokens": row.kept_total,
            "surplus_tokens": row.surplus_total,
        }

    def is_apart(self, uint32_t worker) -> bool:
        """Whether no prompt has been reported to its end for too long, but other blocks have."""
        return is_apart(&self.rows[worker])

    def apart_runs(self, uint32_t worker) -> int:
        """How many runs of blocks left what was sent since a prompt was last reported to its end."""
        return self.rows[worker].apart_runs

    def misses(self, uint32_t worker) -> bool:
        """Whether reports have found nothing of what was known for too long."""
        return self.rows[worker].misses >= <uint32_t> MISSES

    def is_odd(self, uint32_t worker) -> bool:
        """Whether its blocks have been of another size than was said for too long."""
        return self.rows[worker].odd_runs >= <uint32_t> APART_RUNS

    def suspects(self) -> list[int]:
        """Workers whose events or reports have had nothing in common with what they were sent for too long.
        O(workers)."""
        cdef uint32_t i
        return [i for i in range(self.end)
                if self.rows[i].misses >= <uint32_t> MISSES or self.rows[i].odd_runs >= <uint32_t> APART_RUNS
                or is_apart(&self.rows[i])]

    # --- as plain numbers, for snapshots ---

    def state(self, uint32_t worker) -> tuple[float, ...]:
        """All that was reported about a worker."""
        cdef WorkerAccuracy* row = &self.rows[worker]
        cdef uint32_t at
        places = tuple((row.prompts[at].node, row.prompts[at].generation, row.prompts[at].end)
                       for at in range(PLACES_KEPT))
        return ((row.known, row.kept, row.reports),
                (row.reports_total, row.known_total, row.kept_total, row.surplus_total),
                (row.misses, row.seen_events, row.seen_reports, row.prompts_since_events, row.prompts_since_report,
                 row.apart_prompts, row.apart_runs, row.odd_runs), places)

    def restore(self, uint32_t worker, object state) -> None:
        """Let a worker be as `state` said, new if that is None. Raises ValueError, TypeError or OverflowError."""
        cdef WorkerAccuracy* row = &self.rows[worker]
        cdef uint32_t at
        self.open(worker)
        if state is None:
            return
        sums, totals, counts, places = state
        row.known, row.kept, row.reports = sums
        row.reports_total, row.known_total, row.kept_total, row.surplus_total = totals
        (row.misses, row.seen_events, row.seen_reports, row.prompts_since_events, row.prompts_since_report,
         row.apart_prompts, row.apart_runs, row.odd_runs) = counts
        if (len(places) != PLACES_KEPT or not 0.0 <= row.kept <= row.known <= AMOUNT_MAX or min(totals) < 0
                or not 0.0 <= row.reports <= AMOUNT_MAX or max(counts) > COUNT_MAX):
            raise ValueError("what was reported of a cache is out of its range")
        for at in range(PLACES_KEPT):
            row.prompts[at].node, row.prompts[at].generation, row.prompts[at].end = places[at]
        self.publish(worker)

    @property
    def faded(self) -> float:
        """When `fade` was last called."""
        return self.faded_at

    @faded.setter
    def faded(self, double now):
        self.faded_at = now

    def check(self) -> None:
        """Assert that what decisions read agrees with what it is made of."""
        cdef uint32_t i
        assert self.inaccurate == sum(self.rows[i].eighths < <uint32_t> FULL_ACCURACY for i in range(self.end)), (
            f"{self.inaccurate} workers counted as inaccurate")
        for i in range(self.end):
            assert 1 <= self.rows[i].eighths <= <uint32_t> FULL_ACCURACY, (
                f"worker {i}: accuracy {self.rows[i].eighths}/8")
            assert 0.0 <= self.rows[i].kept <= self.rows[i].known, f"worker {i} kept more than was known"
