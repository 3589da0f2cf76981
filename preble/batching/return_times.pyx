"""How long it takes until a session is back, learned from the pauses seen. Owns the distribution of pauses by kind,
what it says of who has been silent for a while, and its bounds; knows neither caches nor sessions.

A kind is what can be known of a pause as it begins: that it is a tool's, a person's, or with which tokens the answer
before it ended. Seconds of silence fall into bins, each about twice as long as the one before. Of each kind and bin
there are the returns in it and the seconds that were waited in it, so that pauses of unknown end count for as long as
they were seen (an exposure, as survival analysis has it). Returns over seconds are the bin's rate of return; it is
drawn towards the rate of all kinds, and that towards PRIOR_SHARE over the silence: who knows nothing evicts the longest
silent first.

What is seen fades: at FADE_EVENTS pauses of a kind all its counts are halved. There are at most `kinds_max` kinds; a
new one takes the place of the one that has been seen least (Space-Saving, Metwally et al. 2005), and begins as all
kinds are.
"""

import math

from libc.math cimport INFINITY, exp, expm1, fmin

from ..types import check_int

BIN_ENDS = (*[0.25 * 2.0**power for power in range(15)], math.inf)   # seconds of silence, to 68 minutes and beyond
BINS = len(BIN_ENDS)
LAST_SECONDS = 2.0 * BIN_ENDS[BINS - 2]      # where the open bin is taken to end
PRIOR_SHARE = 0.5                # returns expected while a silence doubles
PRIOR_RETURNS = 1.0              # that it is worth, of all kinds together
KIND_RETURNS = 4.0               # that the rate of all is worth for a kind
FADE_EVENTS = 2048
RENEW_EVENTS = 16                # of a kind, after which its table is made anew
KINDS_MAX = 32

cdef double[BINS_HERE] ENDS
cdef double[BINS_HERE] WIDTHS
cdef double SHARE = PRIOR_SHARE, RETURNS = PRIOR_RETURNS, OF_KIND = KIND_RETURNS
cdef double FADES = FADE_EVENTS, RENEWS = RENEW_EVENTS

assert BINS == BINS_HERE
for _place, _end in enumerate(BIN_ENDS):
    ENDS[<int> _place] = _end
    WIDTHS[<int> _place] = min(_end, LAST_SECONDS) - (BIN_ENDS[_place - 1] if _place else 0.0)


cdef class Pauses:
    """Returns and seconds of one kind, by bin, and what follows from them."""

    cdef void add(self, double silent_seconds, bint returned) noexcept:
        """One pause, or as much of it as was seen."""
        cdef double left = silent_seconds
        cdef int place = 0, i
        while left > WIDTHS[place] and place < BINS_HERE - 1:
            self.seconds[place] += WIDTHS[place]
            left -= WIDTHS[place]
            place += 1
        self.seconds[place] += left
        self.returns[place] += returned
        self.events += 1.0
        self.fresh += 1
        if self.events >= FADES:
            for i in range(BINS_HERE):
                self.returns[i] /= 2.0
                self.seconds[i] /= 2.0
            self.events /= 2.0


cdef int bin_at(double silent_seconds) noexcept:
    cdef int place = 0
    while silent_seconds > ENDS[place]:
        place += 1
    return place


def bin_of(double silent_seconds) -> int:
    """In which bin a silence is."""
    return bin_at(silent_seconds)


cdef class ReturnTimes:
    """Pauses by kind; see the module. Not thread-safe. Times are lengths in seconds, by whatever clock.

    Raises `InvalidConfig` for `kinds_max` below 1. Memory: about a kilobyte a kind.
    """

    def __init__(self, kinds_max=KINDS_MAX):
        self.kinds_max = check_int("kinds_max", kinds_max, 1, 1_000_000)
        self.all = Pauses()
        self.kinds = {}

    def __len__(self) -> int:
        """Kinds that are known."""
        return len(self.kinds)

    # --- what is seen -------------------------------------------------------------------------------------------------

    def returned(self, kind, double silent_seconds) -> None:
        """A session came back after so long. O(bins)."""
        self.add(kind, silent_seconds, True)

    def unseen(self, kind, double silent_seconds) -> None:
        """A session had not come back in so long; what came then was not seen. O(bins)."""
        self.add(kind, silent_seconds, False)

    cdef int add(self, object kind, double silent_seconds, bint returned) except -1:
        cdef Pauses pauses
        if not silent_seconds >= 0.0:            # the clock was set back
            return 0
        self.all.add(silent_seconds, returned)
        pauses = self.kinds.get(kind)
        if pauses is None:
            if len(self.kinds) >= self.kinds_max:
                del self.kinds[self.rarest()]
            pauses = self.kinds[kind] = Pauses()
        pauses.add(silent_seconds, returned)
        return 0

    cdef object rarest(self):
        """The kind that has been seen least, the one that came first of several."""
        cdef Pauses pauses
        cdef double least = INFINITY
        found = None
        for kind, pauses in self.kinds.items():
            if pauses.events < least:
                found, least = kind, pauses.events
        return found

    # --- what it says -------------------------------------------------------------------------------------------------

    def chance(self, kind, double within_seconds, double silent_seconds=0.0) -> float:
        """That who has been silent so long returns within so many seconds from now. O(bins)."""
        cdef Pauses pauses = self.renewed(kind)
        cdef int place = bin_at(silent_seconds)
        cdef double left = within_seconds, hazard = 0.0, room = max(ENDS[place] - silent_seconds, 0.0), step
        while left > 0.0:
            step = fmin(left, room)
            hazard += step * pauses.rates[place]
            left -= step
            place = min(place + 1, BINS_HERE - 1)
            room = WIDTHS[place] if place < BINS_HERE - 1 else INFINITY
        return -expm1(-hazard)

    def remaining_seconds(self, kind, double silent_seconds=0.0) -> float:
        """How long it takes on average until who has been silent so long returns, for all they return. O(bins)."""
        cdef Pauses pauses = self.renewed(kind)
        cdef int place = bin_at(silent_seconds)
        cdef double stay = 1.0, total = 0.0, room = max(ENDS[place] - silent_seconds, 0.0)
        while place < BINS_HERE - 1:
            total += through(pauses.rates[place], room, &stay)
            place += 1
            room = WIDTHS[place]
        return total + stay / pauses.rates[BINS_HERE - 1]

    def value(self, kind, double silent_seconds) -> float:
        """What keeping something for who has been silent so long is worth, in returns a second of keeping it: the most
        that any time of keeping gives (Gittins' index), chance of return over the time until then or until given up.
        By bins of the silence. O(1), and O(bins squared) every RENEW_EVENTS pauses of a kind."""
        return self.value_of(kind, silent_seconds)

    cdef double value_of(self, object kind, double silent_seconds) except? -1.0:
        cdef Pauses pauses = self.kinds.get(kind, self.all)
        if not pauses.made or pauses.fresh >= RENEWS:
            self.renew(pauses)
        return pauses.values[bin_at(silent_seconds)]

    cdef Pauses renewed(self, object kind):
        """What is known of a kind, with its rates as of now."""
        cdef Pauses pauses = self.kinds.get(kind, self.all)
        self.renew(pauses)
        return pauses

    cdef int renew(self, Pauses pauses) except -1:
        cdef Pauses whole = self.all
        cdef int place
        for place in range(BINS_HERE):
            pauses.rates[place] = (whole.returns[place] + RETURNS) / (
                whole.seconds[place] + RETURNS * WIDTHS[place] / SHARE)
        if pauses is not whole:
            for place in range(BINS_HERE):
                pauses.rates[place] = (pauses.returns[place] + OF_KIND) / (
                    pauses.seconds[place] + OF_KIND / pauses.rates[place])
        index_of(pauses.rates, pauses.values)
        pauses.made, pauses.fresh = True, 0
        return 0


cdef double through(double rate, double seconds, double* stay) noexcept:
    """Seconds waited on average of who goes through so many seconds at a rate of return, being silent as they begin
    with the chance `stay`, which is then that to be silent still."""
    cdef double before = stay[0], after = before * exp(-rate * seconds)
    stay[0] = after
    return (before - after) / rate


cdef void index_of(const double* rates, double* values) noexcept:
    """Gittins' index at the beginning of each bin."""
    cdef double best, stay, waited
    cdef int begin, place
    for begin in range(BINS_HERE):
        best, stay, waited = 0.0, 1.0, 0.0
        for place in range(begin, BINS_HERE):
            waited += through(rates[place], WIDTHS[place], &stay)
            best = max(best, (1.0 - stay) / waited)
        values[begin] = best


def values_of(list rates) -> list[float]:
    """Gittins' index at the beginning of each bin, for rates of return."""
    cdef double[BINS_HERE] given
    cdef double[BINS_HERE] found
    cdef int place
    assert len(rates) == BINS_HERE
    for place in range(BINS_HERE):
        given[place] = rates[place]
    index_of(given, found)
    return [found[place] for place in range(BINS_HERE)]
