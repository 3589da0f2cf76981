# Live requests and batches: contents of `_batch.pyx`.

from libc.stdint cimport int32_t, int64_t

from preble.batching._kv_slots cimport Hold

cdef class StepOutput:
    cdef readonly object request_id, cached_tokens, finish_reason
    cdef readonly int64_t token, index

cdef class LiveRequest:
    cdef readonly object request
    cdef readonly object tokens           # int32; replaced by a buffer with room for the output at the first admission
    cdef public Hold hold                 # None while it waits
    cdef public object cached_tokens      # prompt tokens reused at the first admission; None before it
    cdef public double arrival_seconds
    cdef public int64_t number            # order of arrival, the tie-breaker everywhere
    cdef public int64_t known_tokens, computed, scheduled, prefill_end
    cdef public int64_t cached_now        # the queue's: cached tokens of the known ones, as of cached_version
    cdef public int64_t cached_version, place_version
    cdef public int64_t group             # the queue's: its place as of place_version, a group and the rank in it
    cdef public double rank
    cdef public int64_t follows           # number of the prefix end that it goes on from; -1: none is known
    cdef readonly int64_t max_tokens      # of the prompt and the longest output
    cdef readonly object claim            # of the request
    cdef readonly bint yields             # batch work: what others compute goes before
    cdef readonly object namespace
    cdef int64_t prompt_tokens
    cdef bint planned
    cdef object slots_array
    cdef object stops
    cdef int32_t* token_data              # of `tokens`; read only before the first admission
    cdef int32_t* slot_data               # of `slots`; NULL while it holds none
    cdef int make_room(self) except -1
    cdef StepOutput output(self, int64_t token)

# Tokens that would have to be computed if it were admitted now.
cdef inline int64_t uncached_of(LiveRequest live) noexcept:
    return live.known_tokens - min(live.cached_now, live.known_tokens - 1)

# Of one that waits: it ran before and was preempted.
cdef inline bint resumes(LiveRequest live) noexcept:
    return live.prefill_end > 0

cdef class Batch:
    cdef readonly int64_t step, decode_count, prefill_tokens
    cdef readonly list lives
    cdef list made
    cdef int decode(self, list running, const int32_t* slots) except -1
    cdef int compute(self, LiveRequest live, const int32_t* slots, int64_t count) except -1
    cdef StepOutput booked_chunk(self, LiveRequest live, object token)
    cdef int64_t book_planned_decodes(self, list outputs, list ended) except -1
    cdef object planned_token(self, LiveRequest live)
    cdef LiveRequest unplanned(self)

cdef int64_t decodes_in(list running) noexcept
cdef int64_t steps_in(list running) noexcept
cdef list prefills_in(list running)
cdef int run_steps(list running, int64_t steps, const int32_t* slots) except -1
