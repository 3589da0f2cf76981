"""What a prior says of timing samples, as sums of five terms, in seconds: floor (of iterations without a prefill),
rise, context, pair, start (the floor of iterations with one). Owns these sums, compiled; what they are for is
`calibration_fit.py`'s.
"""

from libc.math cimport fmax, fmin

from preble._cost cimport Cost, CostModel

import numpy as np

from ..cost_factors import DECODE_TOKENS

cdef enum:
    TERMS = 5
    # columns of a sample, see `_placement/timing_samples.pxd`
    TOKENS = 2
    CONTEXT = 3
    BATCH = 4
    MOMENTS = 5
    OTHER = 6
    WAITING = 7      # of a decode
    REQUESTS = 7     # of prefills

cdef double SHORT = DECODE_TOKENS


cdef double linear(const Cost* cost, double tokens) noexcept nogil:
    """Seconds of the layers that see tokens only: between knots straight, beyond the last as between the last two."""
    cdef int last = <int> cost.knots - 1, i = 0
    cdef double slope
    if tokens <= cost.at[0] or not last:
        return cost.seconds[0]
    while i < last - 1 and tokens > cost.at[i + 1]:
        i += 1
    slope = (cost.seconds[i + 1] - cost.seconds[i]) / (cost.at[i + 1] - cost.at[i])
    return cost.seconds[i] + slope * (tokens - cost.at[i])


cdef void add_terms(const Cost* cost, double times, double tokens, double context, double chunk, double last,
                    double* into) noexcept nogil:
    """Add the terms of so many iterations of `tokens`, over contexts that sum up to `context`, one chunk of a prefill
    among them, that ends at `last`."""
    cdef double floor = linear(cost, fmin(tokens, SHORT))
    if chunk > 0.0:
        into[4] += times * (floor + cost.start)
    else:
        into[0] += times * floor
    into[1] += times * (linear(cost, tokens) - floor)
    if context <= cost.context_from:
        into[2] += times * cost.context_flat
    else:
        into[2] += times * (cost.context_base + cost.context_slope * context)
    if chunk * last > fmax(cost.pair_from, 0.0):
        into[3] += times * (cost.pair_base + cost.pair_q * chunk + cost.pair_s * last + cost.pair_qs * chunk * last)


cdef double sum_of(const double* terms) noexcept nogil:
    return terms[0] + terms[1] + terms[2] + terms[3] + terms[4]


def prefill_terms(CostModel prior not None, const double[:, ::1] rows):
    """Of stretches of prefills, shape [n, 5]: each request as if it had an iteration of its own, with its share of the
    decodes beside, and half an iteration of these before it where nothing waited. So where several prefills share an
    iteration, a factor says what each of them takes there: decisions add up what waits, request by request. `rows`:
    samples, shape [n, 8]."""
    cdef Py_ssize_t n, count = rows.shape[0]
    cdef double mean = 0.0, moments, requests, tokens, context, batch, beside
    cdef double[:, ::1] into
    found = np.zeros((count, TERMS))
    into = found
    for n in range(count):
        mean += rows[n, CONTEXT] / fmax(rows[n, MOMENTS], 1.0) / count
    for n in range(count):
        moments = fmax(rows[n, MOMENTS], 1.0)
        requests = fmax(rows[n, REQUESTS], moments)
        tokens, context, batch = rows[n, TOKENS] / requests, rows[n, CONTEXT] / requests, rows[n, BATCH] / requests
        beside = batch * mean
        add_terms(&prior.cost, requests, tokens + batch, context + beside, tokens, fmax(tokens, context), &into[n, 0])
        batch = rows[n, BATCH] / moments
        beside = batch * mean
        if batch > 0.0:
            add_terms(&prior.cost, 0.5 * rows[n, OTHER], batch, beside, 0.0, beside, &into[n, 0])
    return found


def decode_terms(CostModel prior not None, const double[:, ::1] rows, double own_share_min):
    """Of decodes, with the iterations that ended others' prefills, shape [n, 5], and which rows can be used, shape [n]:
    those of whose time, by the prior, such a share at least is their own. `rows`: samples, shape [n, 8]."""
    cdef Py_ssize_t n, count = rows.shape[0]
    cdef double others, batch, beside, chunk, alone, whole
    cdef double[:, ::1] into
    cdef unsigned char[::1] flags
    found, usable = np.zeros((count, TERMS)), np.zeros(count, np.uint8)
    into, flags = found, usable
    for n in range(count):
        others, batch = rows[n, MOMENTS], rows[n, BATCH]
        beside, chunk = batch * rows[n, CONTEXT], rows[n, OTHER] / fmax(others, 1.0)
        add_terms(&prior.cost, fmax(rows[n, TOKENS] - others, 0.0), batch, beside, 0.0, beside, &into[n, 0])
        alone = sum_of(&into[n, 0])
        add_terms(&prior.cost, others, chunk + batch, chunk + beside, chunk, fmax(chunk, chunk + beside), &into[n, 0])
        whole = sum_of(&into[n, 0])
        flags[n] = alone >= own_share_min * (whole + rows[n, WAITING])
    return found, usable.view(np.bool_)
