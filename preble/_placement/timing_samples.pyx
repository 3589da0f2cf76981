"""What requests' own times say of a worker's speed, noted as they happen. Owns the samples; what they mean is worked
out in `calibration.py`, in the background. Also `swap_cost`, by which a worker gets another cost model.

A prefill's own time is not its TTFT, which has the queue in it. But where a request waited when the first token before
it came, the worker went on from the one to the other, and what lies between is the later one's own:

    booked A   booked B        first token A        first token B
       |----------|------------------|--------------------|
       |<----------- A ------------->|<-------- B ------->|

So a prefill takes from the later of its booking and its worker's last first token to its own first token. Some such
pieces in a row are one sample, a stretch; first tokens of one moment were computed in one iteration. A decode takes
from a request's first token to its end, and with it is noted what was prefilled in between.

Engines run so many requests at once and no more. There the next one may have waited for another to end, not for its
prefill; so a piece is left out in which one ended while about as many ran as ever did.

First tokens of one iteration arrive one after the other, by network and by what makes text of them. So the same moment
is what comes within a tenth of the time that the iteration took.

Rings of fixed size, written as the tree's writer; a few dozen instructions each.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.math cimport INFINITY
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset

from preble._cost cimport Bucket, Cost, CostModel, Lease, LoadTracker, prefill_seconds
from preble._radix cimport RadixTree
from preble._core.tree.reclaim cimport PLAIN, retire_thing
from preble._placement.prefix_groups cimport Groups

cdef extern from * nogil:
    void store_cost "preble_store"(const Cost** p, const Cost* value)

cdef double MOMENT_SECONDS = 0.002
cdef double MOMENT_SHARE = 0.1   # of what an iteration took
cdef double FULL_SHARE = 0.9     # of the most that ran at once: from here on others may have waited for one to end


cdef void push(Sample* ring, uint64_t* count, const Sample* sample) noexcept nogil:
    ring[count[0] % <uint64_t> SAMPLES] = sample[0]
    count[0] += 1


cdef void note_first(WorkerSamples* g, Lease* lease, uint32_t computed, int64_t decodes, double loading,
                     double now) noexcept nogil:
    """A request's first token came; `computed` tokens of its prompt were not cached, `decodes` requests ran beside, and
    it is thought to have waited `loading` seconds for what is not in the GPU's memory."""
    cdef bint fresh = lease.booked_at > g.first_at
    cdef double began = lease.booked_at if fresh else g.first_at
    cdef double seconds = now - began
    cdef bint moment = fresh or seconds >= max(MOMENT_SECONDS, MOMENT_SHARE * g.took)
    cdef bint held = began < g.room_at < now
    cdef Sample* s = &g.stretch
    g.took = seconds if moment else g.took - max(seconds, 0.0) / MOMENT_SHARE      # the tenth is counted from its start
    if loading > 0.0 and seconds > 0.0:
        seconds = max(seconds - loading, 0.0)
    if seconds < 0.0 or (fresh and seconds <= 0.0):      # the clock went back, or nobody computed anything
        g.ignored += 1
        memset(s, 0, sizeof(Sample))
        fresh = moment = False
        seconds = 0.0
    elif moment and s.moments and (fresh or s.moments >= STRETCH_MOMENTS):
        s.at = g.first_at
        push(g.prefill, &g.prefills, s)
        memset(s, 0, sizeof(Sample))
    if s.moments or (moment and not held):
        if s.moments == 0:
            s.other = fresh
        s.seconds += seconds
        s.tokens += computed
        s.context += lease.prompt_tokens
        s.moments += moment
        s.batch += decodes if moment else 0
        s.waiting += 1
    g.first_at = now
    g.most = max(g.most, <uint32_t> (decodes + 1))
    g.prefilled_tokens += computed
    g.moments += moment
    lease.first_at = now
    lease.first_decodes = <uint32_t> (decodes + 1)
    lease.seen_tokens = g.prefilled_tokens
    lease.seen_moments = g.moments


cdef void note_end(WorkerSamples* g, const Lease* lease, int64_t output_tokens, int64_t decodes, int64_t waiting_ns,
                   double now) noexcept nogil:
    """A request ended that had its first token; `decodes` requests ran to the end, with it, and `waiting_ns` of
    prefill were booked and not done."""
    cdef Sample s
    if decodes >= FULL_SHARE * g.most and g.room_at <= g.first_at:
        g.room_at = now
    if output_tokens < 2:
        return
    s.at = now
    s.seconds = now - lease.first_at
    if not s.seconds > 0.0:
        g.ignored += 1
        return
    s.tokens = <double> (output_tokens - 1)
    s.context = lease.prompt_tokens + 0.5 * <double> output_tokens
    s.batch = 0.5 * (<double> lease.first_decodes + <double> decodes)
    s.moments = <uint32_t> (g.moments - lease.seen_moments)
    s.other = <uint32_t> (g.prefilled_tokens - lease.seen_tokens)
    s.waiting = <double> waiting_ns * 1e-9
    push(g.decode, &g.decodes, &s)


cdef class TimingSamples:
    """The samples of a fleet, by worker index."""

    def __dealloc__(self):
        cdef uint32_t i
        for i in range(self.room):
            free(self.at[i])
        free(self.at)

    def open(self, uint32_t worker) -> None:
        """Start to measure a worker, from nothing. MemoryError changes nothing."""
        cdef uint32_t room = max(16, self.room)
        cdef WorkerSamples** grown
        cdef WorkerSamples* row
        while worker >= room:
            room *= 2
        if room > self.room:
            grown = <WorkerSamples**> realloc(self.at, room * sizeof(WorkerSamples*))
            if grown == NULL:
                raise MemoryError("TimingSamples.open")
            memset(grown + self.room, 0, (room - self.room) * sizeof(WorkerSamples*))
            self.at = grown
            self.room = room
        row = <WorkerSamples*> calloc(1, sizeof(WorkerSamples))
        if row == NULL:
            raise MemoryError("TimingSamples.open")
        row.first_at = row.room_at = -INFINITY
        free(self.at[worker])
        self.at[worker] = row

    def close(self, uint32_t worker) -> None:
        """Forget what was measured of a worker; one that is not measured stays so."""
        if worker < self.room:
            free(self.at[worker])
            self.at[worker] = NULL

    def counts(self, uint32_t worker) -> tuple[int, int, int]:
        """Samples of prefill and of decode ever noted, and reports that were ignored."""
        if worker >= self.room or self.at[worker] == NULL:
            return 0, 0, 0
        return self.at[worker].prefills, self.at[worker].decodes, self.at[worker].ignored

    def samples(self, uint32_t worker) -> tuple[bytes, bytes]:
        """The samples kept of prefill and of decode, as rows of 8 doubles (see `Sample`), in no order."""
        cdef WorkerSamples* row
        if worker >= self.room or self.at[worker] == NULL:
            return b"", b""
        row = self.at[worker]
        return (ring_bytes(row.prefill, row.prefills), ring_bytes(row.decode, row.decodes))


cdef bytes ring_bytes(const Sample* ring, uint64_t count):
    return PyBytes_FromStringAndSize(<const char*> ring, min(count, <uint64_t> SAMPLES) * sizeof(Sample))


def swap_cost(Groups groups not None, uint32_t worker, CostModel cost not None) -> float:
    """Let decisions reckon with another cost model for a worker, as the tree's writer. What is booked, and what the
    window and the prefix groups hold, is priced anew: by as much as the two differ for the worker's mean request. Else
    a wrong price would be compared with right ones until the window is over. Returns how many times longer that
    request takes now. O(workers + leases + shares). MemoryError changes nothing."""
    cdef RadixTree tree = groups.tree
    cdef LoadTracker loads = groups.loads
    cdef const Cost* old = loads.rows[worker].cost
    cdef Cost* own
    cdef double factor
    assert old != NULL, f"no worker has index {worker}"
    own = <Cost*> malloc(sizeof(Cost))
    if own == NULL:
        raise MemoryError("swap_cost")
    memcpy(own, &cost.cost, sizeof(Cost))
    factor = price_ratio(&loads.workers[worker].window, old, own)
    loads.leave_alike(worker)
    store_cost(&loads.rows[worker].cost, own)
    loads.join_alike(worker)
    retire_thing(&tree.t, <void*> old, PLAIN, 0)
    groups.count_live(worker, -1)
    loads.reprice(worker, factor)
    groups.reprice(worker, factor)
    groups.count_live(worker, 1)
    loads.retune()
    return factor


cdef double price_ratio(const Bucket* window, const Cost* old, const Cost* new) noexcept nogil:
    """How many times longer the mean prefill of a window takes by another model; 1 of an empty window."""
    cdef double requests = max(<double> window.requests, 1.0)
    cdef double context = window.prompt_tokens / requests
    cdef double missed = max((window.prompt_tokens - window.matched_tokens) / requests, 1.0)
    cdef double before = prefill_seconds(old, missed, context)
    return prefill_seconds(new, missed, context) / before if window.requests and before > 0.0 else 1.0
