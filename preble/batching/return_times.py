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

from __future__ import annotations

import math
from collections.abc import Hashable

from ..types import check_int

BIN_ENDS = tuple(0.25 * 2.0**power for power in range(15)) + (math.inf,)  # seconds of silence, to 68 minutes and beyond
BINS = len(BIN_ENDS)
LAST_SECONDS = 2.0 * BIN_ENDS[-2]  # where the open bin is taken to end
WIDTHS = tuple(
    (LAST_SECONDS if end == math.inf else end) - (BIN_ENDS[place - 1] if place else 0.0)
    for place, end in enumerate(BIN_ENDS)
)
PRIOR_SHARE = 0.5  # returns expected while a silence doubles
PRIOR_RETURNS = 1.0  # that it is worth, of all kinds together
KIND_RETURNS = 4.0  # that the rate of all is worth for a kind
FADE_EVENTS = 2048
RENEW_EVENTS = 16  # of a kind, after which its table is made anew
KINDS_MAX = 32


class _Pauses:
    """Returns and seconds of one kind, by bin, and what follows from them."""

    __slots__ = ("events", "fresh", "rates", "returns", "seconds", "values")

    def __init__(self) -> None:
        self.returns = [0.0] * BINS
        self.seconds = [0.0] * BINS
        self.events = 0.0
        self.fresh = 0  # events since the table was made
        self.rates: list[float] = []  # of return, a second
        self.values: list[float] = []  # see `ReturnTimes.value`

    def add(self, silent_seconds: float, returned: bool) -> None:
        """One pause, or as much of it as was seen."""
        left, place = silent_seconds, 0
        while left > WIDTHS[place] and place < BINS - 1:
            self.seconds[place] += WIDTHS[place]
            left -= WIDTHS[place]
            place += 1
        self.seconds[place] += left
        self.returns[place] += returned
        self.events += 1.0
        self.fresh += 1
        if self.events >= FADE_EVENTS:
            self.returns = [count / 2.0 for count in self.returns]
            self.seconds = [count / 2.0 for count in self.seconds]
            self.events /= 2.0


def bin_of(silent_seconds: float) -> int:
    """In which bin a silence is."""
    place = 0
    while silent_seconds > BIN_ENDS[place]:
        place += 1
    return place


class ReturnTimes:
    """Pauses by kind; see the module. Not thread-safe. Times are lengths in seconds, by whatever clock.

    Raises `InvalidConfig` for `kinds_max` below 1. Memory: about a kilobyte a kind.
    """

    def __init__(self, kinds_max: int = KINDS_MAX) -> None:
        check_int("kinds_max", kinds_max, 1, 1_000_000)
        self._kinds_max = kinds_max
        self._all = _Pauses()
        self._kinds: dict[Hashable, _Pauses] = {}

    def __len__(self) -> int:
        """Kinds that are known."""
        return len(self._kinds)

    # --- what is seen -------------------------------------------------------------------------------------------------

    def returned(self, kind: Hashable, silent_seconds: float) -> None:
        """A session came back after so long. O(bins)."""
        self._add(kind, silent_seconds, True)

    def unseen(self, kind: Hashable, silent_seconds: float) -> None:
        """A session had not come back in so long; what came then was not seen. O(bins)."""
        self._add(kind, silent_seconds, False)

    def _add(self, kind: Hashable, silent_seconds: float, returned: bool) -> None:
        if not silent_seconds >= 0.0:  # the clock was set back
            return
        self._all.add(silent_seconds, returned)
        pauses = self._kinds.get(kind)
        if pauses is None:
            if len(self._kinds) >= self._kinds_max:
                del self._kinds[min(self._kinds, key=lambda known: self._kinds[known].events)]
            pauses = self._kinds[kind] = _Pauses()
        pauses.add(silent_seconds, returned)

    # --- what it says -------------------------------------------------------------------------------------------------

    def chance(self, kind: Hashable, within_seconds: float, silent_seconds: float = 0.0) -> float:
        """That who has been silent so long returns within so many seconds from now. O(bins)."""
        rates, place, left, hazard = self._rates(kind), bin_of(silent_seconds), within_seconds, 0.0
        room = max(BIN_ENDS[place] - silent_seconds, 0.0)
        while left > 0.0:
            step = min(left, room)
            hazard += step * rates[place]
            left -= step
            place = min(place + 1, BINS - 1)
            room = WIDTHS[place] if place < BINS - 1 else math.inf
        return -math.expm1(-hazard)

    def remaining_seconds(self, kind: Hashable, silent_seconds: float = 0.0) -> float:
        """How long it takes on average until who has been silent so long returns, for all they return. O(bins)."""
        rates, place, stay, total = self._rates(kind), bin_of(silent_seconds), 1.0, 0.0
        room = max(BIN_ENDS[place] - silent_seconds, 0.0)
        while place < BINS - 1:
            waited, stay = _through(rates[place], room, stay)
            total += waited
            place += 1
            room = WIDTHS[place]
        return total + stay / rates[-1]

    def value(self, kind: Hashable, silent_seconds: float) -> float:
        """What keeping something for who has been silent so long is worth, in returns a second of keeping it: the most
        that any time of keeping gives (Gittins' index), chance of return over the time until then or until given up.
        By bins of the silence. O(1), and O(bins squared) every RENEW_EVENTS pauses of a kind."""
        pauses = self._kinds.get(kind, self._all)
        if not pauses.values or pauses.fresh >= RENEW_EVENTS:
            self._renew(pauses)
        return pauses.values[bin_of(silent_seconds)]

    def _rates(self, kind: Hashable) -> list[float]:
        """Returns a second in each bin, as of now."""
        pauses = self._kinds.get(kind, self._all)
        self._renew(pauses)
        return pauses.rates

    def _renew(self, pauses: _Pauses) -> None:
        whole = self._all
        rates = [
            (whole.returns[place] + PRIOR_RETURNS)
            / (whole.seconds[place] + PRIOR_RETURNS * WIDTHS[place] / PRIOR_SHARE)
            for place in range(BINS)
        ]
        if pauses is not whole:
            rates = [
                (pauses.returns[place] + KIND_RETURNS) / (pauses.seconds[place] + KIND_RETURNS / rates[place])
                for place in range(BINS)
            ]
        pauses.rates, pauses.values, pauses.fresh = rates, values_of(rates), 0


def _through(rate: float, seconds: float, stay: float) -> tuple[float, float]:
    """(seconds waited on average, chance to be silent still) of who goes through so many seconds at a rate of return,
    being silent as they begin with the chance `stay`."""
    after = stay * math.exp(-rate * seconds)
    return (stay - after) / rate, after


def values_of(rates: list[float]) -> list[float]:
    """Gittins' index at the beginning of each bin."""
    values = []
    for begin in range(BINS):
        best, stay, waited = 0.0, 1.0, 0.0
        for place in range(begin, BINS):
            step, stay = _through(rates[place], WIDTHS[place], stay)
            waited += step
            best = max(best, (1.0 - stay) / waited)
        values.append(best)
    return values
