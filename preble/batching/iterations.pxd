# What one engine computes in each iteration: contents of `iterations.pyx`.

from libc.stdint cimport int64_t

from preble.batching._batch cimport Batch, LiveRequest
from preble.batching.kv_cache cimport KvCache
from preble.batching.waiting_queue cimport WaitingQueue

cdef class IterationCore:
    cdef readonly object config
    cdef readonly object _clock
    cdef readonly KvCache _cache
    cdef readonly WaitingQueue _waiting
    cdef readonly list _running  # oldest first
    cdef readonly dict _live     # request id -> every request, waiting or running
    cdef readonly Batch _batch   # in flight, else None
    cdef readonly int64_t _places    # requests that run at once: who runs decodes in every iteration, within its budget
    # of the configuration
    cdef int64_t capacity, token_budget, max_waiting, min_shared_tokens, decodes_per_look
    cdef bint chunked, short_first
    # where it stands
    cdef int64_t arrived, step, decodes_till_look
    cdef int64_t yielding        # requests that run and are batch work
    cdef int64_t rested          # iterations in a row in which they decoded nothing
    cdef double begun_seconds    # when the batch in flight began
    cdef double step_seconds     # of the iterations that prefilled lately; 0 before the first
    # counters
    cdef int64_t admitted, finished, cancelled, preempted, deferred, too_late
    cdef int64_t prompt_tokens, cached_tokens, computed_tokens

    cdef double time(self, object now) except? -1.0
    cdef Batch formed(self, double now)
    cdef int prefill_or_decode(self, Batch batch, double now) except -1
    cdef int form_by_class(self, Batch batch, double now) except -1
    cdef bint rests(self)
    cdef int schedule_decodes(self, Batch batch, double now, bint resting) except -1
    cdef int64_t admit_short(self, Batch batch, int64_t budget, list under_way, double now) except -1
    cdef int64_t schedule_prefills(self, Batch batch, int64_t budget, list under_way, double now) except? -1
    cdef int64_t admit(self, Batch batch, int64_t budget, double now, list behind) except? -1
    cdef bint is_being_computed(self, LiveRequest live) except -1
    cdef bint is_too_late(self, LiveRequest live, double now) except -1
    cdef bint is_late_in(self, LiveRequest live, int64_t steps, double now) except -1
    cdef bint start_running(self, LiveRequest live, double now, int64_t spared) except -1
    cdef int check_in_flight(self, Batch batch) except -1
    cdef int note_step(self, double seconds) except -1
    cdef int book_chunk(self, Batch batch, LiveRequest live, object token, list outputs, double now) except -1
    cdef int end(self, LiveRequest live, double now) except -1
    cdef int64_t steady(self) noexcept
    cdef int64_t decodes_left(self) noexcept
    cdef int preempt(self, LiveRequest live, double now) except -1
    cdef int stop_running(self, LiveRequest live, tuple ending, double now) except -1
    cdef int leave_running(self, LiveRequest live) except -1
    cdef int drop_in_flight(self, LiveRequest live) except -1
