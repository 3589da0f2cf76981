"""The five factors of a worker's cost under which its samples fit best: robust least squares. Owns the solving; the
terms and what a fit means are `calibration_fit.py`'s.

Compiled, in plain loops in a fixed order: some ten times as fast as numpy for a hundred samples, and the same to the
bit on every machine, whatever its linear algebra.
"""

from libc.math cimport exp, fabs, fmax, fmin, isfinite, log, sqrt
from libc.stdlib cimport free, malloc, qsort

cdef enum:
    TERMS = 5                    # floor, rise, context, pair, start
    ROUNDS = 25

cdef double FAR = 2.0            # spreads at which a sample weighs half
cdef double STEP_MAX = 1.0       # of a logarithm, a round
cdef double STEP_MIN = 1e-3      # below which it is over
cdef double TO_DEVIATION = 1.4826    # of a normal distribution, from the median of what is off

cdef struct Row:                 # a sample that can be used
    double parts[TERMS]          # the prior's terms
    double seconds_log
    double weight
    double error                 # in logarithms, as the factors are now

cdef struct Weighed:
    double value
    double weight
    long at                      # so that equal values keep their order


cdef int compare_weighed(const void* one, const void* other) noexcept nogil:
    cdef const Weighed* a = <const Weighed*> one
    cdef const Weighed* b = <const Weighed*> other
    if a.value != b.value:
        return 1 if a.value > b.value else -1
    return 1 if a.at > b.at else -1


cdef double median_of(Weighed* values, Py_ssize_t count) noexcept nogil:
    """The value below and above which lies half of the weight. Sorts them."""
    cdef double whole = 0.0, upto = 0.0
    cdef Py_ssize_t i
    qsort(values, count, sizeof(Weighed), compare_weighed)
    for i in range(count):
        whole += values[i].weight
    for i in range(count):
        upto += values[i].weight
        if upto >= 0.5 * whole:
            return values[i].value
    return values[count - 1].value


cdef double within(double value, double limit) noexcept nogil:
    return fmin(fmax(value, -limit), limit)


cdef bint inverted(const double* matrix, double* inverse) noexcept nogil:
    """The inverse of a symmetric positive matrix, by Gauss and Jordan; False where it has none."""
    cdef double rows[TERMS][2 * TERMS]
    cdef double pivot, factor
    cdef int i, j, k
    for i in range(TERMS):
        for j in range(TERMS):
            rows[i][j] = matrix[TERMS * i + j]
            rows[i][TERMS + j] = 1.0 if i == j else 0.0
    for k in range(TERMS):
        pivot = rows[k][k]
        if not pivot > 0.0:
            return False
        for j in range(2 * TERMS):
            rows[k][j] /= pivot
        for i in range(TERMS):
            if i != k:
                factor = rows[i][k]
                for j in range(2 * TERMS):
                    rows[i][j] -= factor * rows[k][j]
    for i in range(TERMS):
        for j in range(TERMS):
            inverse[TERMS * i + j] = rows[i][TERMS + j]
    return True


cdef double spread_of(const Row* rows, Weighed* room, Py_ssize_t count) noexcept nogil:
    """The median of what samples are off."""
    cdef Py_ssize_t i
    for i in range(count):
        room[i].value = fabs(rows[i].error)
        room[i].weight = rows[i].weight
        room[i].at = i
    return TO_DEVIATION * median_of(room, count)


cdef double first_guess(const Row* rows, Weighed* room, Py_ssize_t count) noexcept nogil:
    """One factor for all terms."""
    cdef Py_ssize_t i
    for i in range(count):
        room[i].value = rows[i].seconds_log - log(sum_of(rows[i].parts))
        room[i].weight = rows[i].weight
        room[i].at = i
    return median_of(room, count)


cdef double sum_of(const double* parts) noexcept nogil:
    return parts[0] + parts[1] + parts[2] + parts[3] + parts[4]


cdef void solve(Row* rows, Weighed* room, Py_ssize_t count, const double* ridge, double least, double limit,
                double* found, double* covariance) noexcept nogil:
    """Gauss-Newton, each sample weighed anew each round."""
    cdef double normal[TERMS * TERMS]
    cdef double aim[TERMS]
    cdef double factors[TERMS]
    cdef double slopes[TERMS]
    cdef double total, spread, sure, step, longest
    cdef Py_ssize_t n
    cdef int i, j, _turn
    for i in range(TERMS):
        found[i] = 0.0
    total = within(first_guess(rows, room, count), limit)
    for i in range(TERMS):
        found[i] = total
    for _turn in range(ROUNDS):
        for i in range(TERMS):
            factors[i] = exp(found[i])
            aim[i] = 0.0
            for j in range(TERMS):
                normal[TERMS * i + j] = ridge[TERMS * i + j]
                aim[i] -= ridge[TERMS * i + j] * found[j]
        for n in range(count):
            total = 0.0
            for i in range(TERMS):
                total += rows[n].parts[i] * factors[i]
            rows[n].error = rows[n].seconds_log - log(total)
        spread = fmax(least, spread_of(rows, room, count))
        for n in range(count):
            total = 0.0
            for i in range(TERMS):
                slopes[i] = rows[n].parts[i] * factors[i]
                total += slopes[i]
            step = rows[n].error / (FAR * spread)
            sure = rows[n].weight / (1.0 + step * step) / (spread * spread)
            for i in range(TERMS):
                slopes[i] /= total
            for i in range(TERMS):
                aim[i] += slopes[i] * sure * rows[n].error
                for j in range(TERMS):
                    normal[TERMS * i + j] += slopes[i] * sure * slopes[j]
        if not inverted(normal, covariance):
            return
        longest = 0.0
        for i in range(TERMS):
            step = 0.0
            for j in range(TERMS):
                step += covariance[TERMS * i + j] * aim[j]
            step = within(step, STEP_MAX)
            found[i] = within(found[i] + step, limit)
            longest = fmax(longest, fabs(step))
        if longest < STEP_MIN:
            return


def robust_factors(const double[:, ::1] terms, const double[::1] seconds, const double[::1] weights,
                   const double[:, ::1] ridge, *, double spread_min, double spread_of_one,
                   double limit) -> tuple[tuple[float, float, float, float], list[list[float]]] | None:
    """Logarithms of the factors under which the sums of `terms`, shape [n, 4], are closest to `seconds`, shape [n], and
    their covariance, shape [4, 4]; None where no sample can be used.

    Gauss-Newton on log(seconds / sum), each sample weighed by 1 / (1 + (its error / 2 spreads)^2) anew each round,
    times its own of `weights`. The spread is what samples are off in the middle, at least `spread_min` and
    `spread_of_one` over the root of their number. `ridge`, shape [4, 4], is what factors near each other and near 1
    weigh; factors stay within `limit`, in logarithms. Raises MemoryError. O(n log n).
    """
    cdef double found[TERMS]
    cdef double covariance[TERMS * TERMS]
    cdef double pull[TERMS * TERMS]
    cdef Py_ssize_t n, count = 0, given = terms.shape[0]
    cdef int i, j
    cdef double total
    cdef Row* rows
    cdef Weighed* room
    assert terms.shape[1] == TERMS and seconds.shape[0] == given and weights.shape[0] == given
    assert ridge.shape[0] == TERMS and ridge.shape[1] == TERMS
    rows = <Row*> malloc((given + 1) * sizeof(Row))
    room = <Weighed*> malloc((given + 1) * sizeof(Weighed))
    try:
        if rows == NULL or room == NULL:
            raise MemoryError("robust_factors")
        for n in range(given):
            total = 0.0
            for i in range(TERMS):
                rows[count].parts[i] = terms[n, i]
                total += terms[n, i]
            if isfinite(seconds[n]) and seconds[n] > 0.0 and total > 0.0:
                rows[count].seconds_log = log(seconds[n])
                rows[count].weight = weights[n]
                count += 1
        if not count:
            return None
        for i in range(TERMS):
            for j in range(TERMS):
                pull[TERMS * i + j] = ridge[i, j]
                covariance[TERMS * i + j] = 0.0
        with nogil:
            solve(rows, room, count, pull, fmax(spread_min, spread_of_one / sqrt(<double> count)), limit, found,
                  covariance)
        return ((found[0], found[1], found[2], found[3], found[4]),
                [[covariance[TERMS * i + j] for j in range(TERMS)] for i in range(TERMS)])
    finally:
        free(rows)
        free(room)
