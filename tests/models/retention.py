"""Retention and return times in Python, with ordered dictionaries for lines, to hold the compiled ones against. Owns
nothing of the product.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias

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


class PlainReturnTimes:
    """Pauses by kind; see the module. Not thread-safe. Times are lengths in seconds, by whatever clock.

    Raises `InvalidConfig` for `kinds_max` below 1. Memory: about a kilobyte a kind.
    """

    def __init__(self, kinds_max: int = KINDS_MAX) -> None:
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


ENDS_MAX = 1 << 16
ENDINGS_MAX = 256  # that are counted
ENDINGS_FADE = 4096  # answers, after which counts are halved
OTHER: Hashable = ()  # the kind of all rare endings
Line: TypeAlias = "OrderedDict[int, PlainEnd]"


@dataclass(slots=True, eq=False)
class PlainEnd:
    """A node where a prefix ends: its number, the kind of the pause since then, and the line in which it stands."""

    number: int
    kind: Hashable
    since_seconds: float
    line: Line


class PlainRetention:
    """See the module. Numbers of nodes are those of `SlotTree.end_of`. Not thread-safe. All operations are O(kinds),
    but for an ending that was not counted yet: O(ENDINGS_MAX)."""

    def __init__(self, ends_max: int = ENDS_MAX) -> None:
        self.times = PlainReturnTimes()
        self._ends_max = ends_max
        self._ends: dict[int, PlainEnd] = {}  # by number, the oldest first
        self._dead: Line = OrderedDict()  # every line is in order
        self._wanted: Line = OrderedDict()
        self._silent: dict[Hashable, Line] = {}  # without empty ones
        self._endings: dict[Hashable, int] = {}  # how many answers ended so
        self._answers = 0

    def __len__(self) -> int:
        """Ends that are known."""
        return len(self._ends)

    # --- what happens -------------------------------------------------------------------------------------------------

    def ended(self, number: int, ending: Hashable, now: float) -> None:
        """A request has ended at this node, its answer with these tokens."""
        kind = self._kind_of(ending)
        self._put(number, kind, now, self._silent.setdefault(kind, OrderedDict()))

    def asked(self, number: int, now: float) -> bool:
        """A prompt that leads into this node has come; whether it is the next turn of who ended there."""
        end = self._ends.get(number)
        if end is None or end.line is self._dead:
            return False
        if end.line is not self._wanted:
            self.times.returned(end.kind, now - end.since_seconds)
            self._move(end, self._wanted)
        return True

    def want(self, number: int, now: float) -> None:
        """A request that ended at this node for now waits to go on."""
        self._put(number, OTHER, now, self._wanted)

    def unwanted(self, number: int, now: float) -> None:
        """Who asked has gone without it."""
        end = self._ends.get(number)
        if end is not None and end.line is self._wanted:
            self.ended(number, OTHER, now)

    def die(self, number: int, now: float) -> None:
        """The next turn has ended, at another node."""
        self._put(number, OTHER, now, self._dead)

    def forget(self, number: int) -> None:
        """Know this end no more."""
        end = self._ends.pop(number, None)
        if end is not None:
            self._leave(end)

    def evicted(self, end: PlainEnd, left: int, now: float) -> None:
        """An end was evicted, or its last part: what is left of the prefix ends at node `left`, -1 if nowhere."""
        if self._silent.get(end.kind) is end.line:
            self.times.unseen(end.kind, now - end.since_seconds)
        self.forget(end.number)
        if left >= 0 and left not in self._ends:
            self._put(left, end.kind, end.since_seconds, end.line)
            end.line.move_to_end(left, last=False)

    # --- who is first -------------------------------------------------------------------------------------------------

    def victim(self, now: float) -> PlainEnd | None:
        """What should go first; None where no end is known. Changes nothing."""
        if self._dead:
            return next(iter(self._dead.values()))
        firsts = [next(iter(line.values())) for line in self._silent.values()]
        if firsts:
            value = self.times.value
            return min(firsts, key=lambda end: (value(end.kind, now - end.since_seconds), end.since_seconds))
        return next(reversed(self._wanted.values())) if self._wanted else None

    # --- lines --------------------------------------------------------------------------------------------------------

    def _kind_of(self, ending: Hashable) -> Hashable:
        """The ending, if one of so many kinds may be it and enough answers end so; else OTHER."""
        counts = self._endings
        if ending not in counts and len(counts) >= ENDINGS_MAX:
            del counts[min(counts, key=counts.__getitem__)]
        count = counts[ending] = counts.get(ending, 0) + 1
        self._answers += 1
        if self._answers >= ENDINGS_FADE:
            self._answers //= 2
            self._endings = {known: count // 2 for known, count in counts.items() if count > 1}
        if count * KINDS_MAX < self._answers:
            return OTHER
        return ending if ending in self._silent or len(self._silent) < KINDS_MAX else OTHER

    def _put(self, number: int, kind: Hashable, since_seconds: float, line: Line) -> None:
        self.forget(number)
        if len(self._ends) >= self._ends_max:
            self.forget(next(iter(self._ends)))
        self._ends[number] = line[number] = PlainEnd(number, kind, since_seconds, line)
        if line is not self._dead and line is not self._wanted:
            self._silent[kind] = line  # it may have been empty, and forgotten

    def _move(self, end: PlainEnd, line: Line) -> None:
        self._leave(end)
        end.line = line
        line[end.number] = end

    def _leave(self, end: PlainEnd) -> None:
        del end.line[end.number]
        if not end.line and self._silent.get(end.kind) is end.line:
            del self._silent[end.kind]

    def check(self) -> None:
        """Assert that every end stands in one line, that it names, and that the bounds hold. O(ends)."""
        lines = [self._dead, self._wanted, *self._silent.values()]
        assert all(self._silent.values()), "an empty line is kept"
        assert sum(map(len, lines)) == len(self._ends) <= self._ends_max, "an end stands in no line, or in two"
        for line in lines:
            for number, end in line.items():
                assert self._ends[number] is end and end.number == number, f"end {number} is not the one that is known"
                assert end.line is line, f"end {number} names another line"
        assert len(self._silent) <= KINDS_MAX + 1 and len(self._endings) <= ENDINGS_MAX, "more kinds than may be"
