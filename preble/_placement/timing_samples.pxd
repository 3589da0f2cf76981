# What requests' own times say of a worker's speed: contents of `timing_samples.pyx`, and the two notes taken on the hot
# path.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from preble._cost cimport Lease

cdef enum:
    SAMPLES = 64                 # of each kind kept for one worker; older ones are written over
    STRETCH_MOMENTS = 1          # first tokens' moments after which a stretch of prefills is one sample

cdef double MOMENT_SECONDS       # first tokens that come closer than this are of one iteration

cdef struct Sample:              # doubles all, so that numpy reads them as rows
    double at                    # when it ended
    double seconds               # how long it took
    double tokens                # prefill: tokens computed; decode: output tokens after the first
    double context               # prefill: tokens of the prompts, summed; decode: of the request, at its middle
    double batch                 # decodes beside it; prefill: summed over moments, decode: with itself
    double moments               # iterations that ended a prefill: its own; decode: others' in the meantime
    double other                 # prefill: 1 if nothing else waited as it began; decode: others' tokens computed
    double waiting               # prefill: first tokens; decode: seconds of prefill booked and not done as it ended

cdef struct WorkerSamples:       # of one worker
    double first_at              # when its last first token came
    double took                  # seconds of its last iteration that ended a prefill
    double room_at               # when first since then a request ended while about as many ran as ever did
    uint32_t most                # requests that ran at once
    Sample stretch               # of prefills, still open
    uint32_t prefilled_tokens    # ever, modulo 2 ** 32
    uint32_t moments             # ever, modulo 2 ** 32
    uint64_t prefills            # samples ever written
    uint64_t decodes
    uint64_t ignored             # reports whose times cannot be
    Sample prefill[SAMPLES]
    Sample decode[SAMPLES]

cdef class TimingSamples:
    cdef WorkerSamples** at      # by worker index; NULL where there is none
    cdef uint32_t room

cdef void note_first(WorkerSamples* g, Lease* lease, uint32_t computed, int64_t decodes, double loading,
                     double now) noexcept nogil
cdef void note_end(WorkerSamples* g, const Lease* lease, int64_t output_tokens, int64_t decodes, int64_t waiting_ns,
                   double now) noexcept nogil
