# How long it takes to bring a token's KV from host memory or disk into the GPU's memory, learned for each worker from
# times to first token, as inline C. Owns the estimate; `e2.pyx` prices with it, `bookings.pyx` brings the times.
#
# A first token that came after a load is late by the load, and by whatever makes all of the worker's first tokens late:
# decoding in between, the network, a cost model that is wrong. The latter is what those without a load are late by, on
# average. What is left, over the tokens loaded, is the rate: least squares through the origin. It begins with what was
# stated, as if some loads had shown that, and older loads fade. Only requests that found nothing waiting count, so that
# no queue is in it.

from libc.stdint cimport uint32_t

from preble._core.atomic cimport load_double, store_double

cdef enum:                       # media
    HOST = 0
    DISK = 1                     # or further off
    MEDIA = 2

cdef struct LoadRates:           # of one worker
    double seconds[MEDIA]        # (r) a token takes
    double products[MEDIA]       # sum of tokens x seconds late, fading
    double squares[MEDIA]        # sum of tokens squared
    double others_late           # seconds that first tokens without a load are late by, mean
    double others_count

cdef inline double rate_kept() noexcept nogil:
    return 0.98                  # of what was seen, with each load

cdef inline double stated_squares() noexcept nogil:
    return 4.0 * 4096.0 * 4096.0     # what is stated counts as four loads of 4,096 tokens do

cdef inline void open_rates(LoadRates* rates, double host_seconds, double disk_seconds) noexcept nogil:
    cdef uint32_t medium
    rates.others_late = rates.others_count = 0.0
    for medium in range(<uint32_t> MEDIA):
        rates.squares[medium] = stated_squares()
        rates.products[medium] = stated_squares() * (host_seconds if medium == HOST else disk_seconds)
        store_double(&rates.seconds[medium], host_seconds if medium == HOST else disk_seconds)

cdef inline void note_other(LoadRates* rates, double late) noexcept nogil:
    # A first token came without a load, so many seconds later than its prefill takes.
    rates.others_count = rates.others_count * rate_kept() + 1.0
    rates.others_late += (late - rates.others_late) / rates.others_count

cdef inline void note_load(LoadRates* rates, double late, const uint32_t* tokens) noexcept nogil:
    # A first token came after so many tokens were loaded from each medium.
    cdef double before[MEDIA]
    cdef double own
    cdef uint32_t medium
    late -= rates.others_late
    before[HOST] = rates.seconds[HOST]
    before[DISK] = rates.seconds[DISK]
    for medium in range(<uint32_t> MEDIA):
        if tokens[medium]:
            own = late - before[1 - medium] * tokens[1 - medium]
            rates.products[medium] = rates.products[medium] * rate_kept() + tokens[medium] * own
            rates.squares[medium] = rates.squares[medium] * rate_kept() + <double> tokens[medium] * tokens[medium]
            store_double(&rates.seconds[medium], max(rates.products[medium] / rates.squares[medium], 0.0))

cdef inline double load_seconds_of(const LoadRates* rates, uint32_t host_tokens, uint32_t disk_tokens) noexcept nogil:
    return load_double(&rates.seconds[HOST]) * host_tokens + load_double(&rates.seconds[DISK]) * disk_tokens
