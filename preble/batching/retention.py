"""Which cached prefix a worker gives up first: the one least likely to be asked for soon. Owns the ends of the prefixes
that answers left behind, by what is expected of their sessions; the tree owns the tokens, `ReturnTimes` the chances.

When a request ends, the node where its prompt and answer end is put down under a kind: the tokens with which the answer
ended, since a model ends a tool's call with others than what it says to a person. A prompt that leads into that node is
the session's next turn: its pause is learned, and the prefix is wanted until the request has it.

    dead      the next turn has ended, elsewhere              go first, in order
    silent    by kind, the longest silent first               then the first of the kind where it is worth least
    wanted    a request that waits will use it                then these, the one asked for last first

A token of a prefix takes about as long to compute as another, and as much memory; so what is compared is only what a
second of keeping is worth, `ReturnTimes.value`. It is a price, never a pin: all of these may go. There are at most
`ends_max`, beyond which the oldest is forgotten; what is not put down is evicted after them, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias

from .return_times import KINDS_MAX, ReturnTimes

ENDS_MAX = 1 << 16
ENDINGS_MAX = 256  # that are counted
ENDINGS_FADE = 4096  # answers, after which counts are halved
OTHER: Hashable = ()  # the kind of all rare endings
Line: TypeAlias = "OrderedDict[int, PrefixEnd]"


@dataclass(slots=True, eq=False)
class PrefixEnd:
    """A node where a prefix ends: its number, the kind of the pause since then, and the line in which it stands."""

    number: int
    kind: Hashable
    since_seconds: float
    line: Line


class Retention:
    """See the module. Numbers of nodes are those of `SlotTree.end_of`. Not thread-safe. All operations are O(kinds),
    but for an ending that was not counted yet: O(ENDINGS_MAX)."""

    def __init__(self, ends_max: int = ENDS_MAX) -> None:
        self.times = ReturnTimes()
        self._ends_max = ends_max
        self._ends: dict[int, PrefixEnd] = {}  # by number, the oldest first
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

    def evicted(self, end: PrefixEnd, left: int, now: float) -> None:
        """An end was evicted, or its last part: what is left of the prefix ends at node `left`, -1 if nowhere."""
        if self._silent.get(end.kind) is end.line:
            self.times.unseen(end.kind, now - end.since_seconds)
        self.forget(end.number)
        if left >= 0 and left not in self._ends:
            self._put(left, end.kind, end.since_seconds, end.line)
            end.line.move_to_end(left, last=False)

    # --- who is first -------------------------------------------------------------------------------------------------

    def victim(self, now: float) -> PrefixEnd | None:
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
        self._ends[number] = line[number] = PrefixEnd(number, kind, since_seconds, line)
        if line is not self._dead and line is not self._wanted:
            self._silent[kind] = line  # it may have been empty, and forgotten

    def _move(self, end: PrefixEnd, line: Line) -> None:
        self._leave(end)
        end.line = line
        line[end.number] = end

    def _leave(self, end: PrefixEnd) -> None:
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
