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

from libc.stdint cimport int64_t

from preble.batching.return_times cimport ReturnTimes

from .return_times import KINDS_MAX

cdef enum:
    ENDS_MAX = 1 << 16
    ENDINGS_MAX = 256            # that are counted
    ENDINGS_FADE = 4096          # answers, after which counts are halved

OTHER = ()                       # the kind of all rare endings

cdef Py_ssize_t KINDS = KINDS_MAX


cdef class EndLine:
    """Prefix ends in an order, each in one line at most."""

    cdef int append(self, PrefixEnd end) except -1:
        """Put it last."""
        end.line, end.before, end.after = self, self.last, None
        if self.last is None:
            self.first = end
        else:
            self.last.after = end
        self.last = end
        self.count += 1
        return 0

    cdef int prepend(self, PrefixEnd end) except -1:
        """Put it first."""
        end.line, end.before, end.after = self, None, self.first
        if self.first is None:
            self.last = end
        else:
            self.first.before = end
        self.first = end
        self.count += 1
        return 0

    cdef int remove(self, PrefixEnd end) except -1:
        """It stands here no more; it still names this line."""
        if end.before is None:
            self.first = end.after
        else:
            end.before.after = end.after
        if end.after is None:
            self.last = end.before
        else:
            end.after.before = end.before
        end.before = end.after = None
        self.count -= 1
        return 0


cdef class PrefixEnd:
    """A node where a prefix ends: its number, the kind of the pause since then, and the line in which it stands."""


cdef class Retention:
    """See the module. Numbers of nodes are those of `SlotTree.end_of`. Not thread-safe. All operations are O(kinds),
    but for an ending that was not counted yet: O(ENDINGS_MAX)."""

    def __init__(self, Py_ssize_t ends_max=ENDS_MAX):
        self.times = ReturnTimes()
        self.ends_max = ends_max
        self._ends = {}
        self._silent = {}
        self.dead = EndLine()
        self.wanted = EndLine()
        self.endings = {}
        self.once = {}

    def __len__(self) -> int:
        """Ends that are known."""
        return len(self._ends)

    cdef PrefixEnd end_at(self, int64_t number):
        return self._ends.get(number)

    # --- what happens -------------------------------------------------------------------------------------------------

    def ended(self, int64_t number, ending, double now) -> None:
        """A request has ended at this node, its answer with these tokens."""
        self.note_end(number, ending, now)

    cdef int note_end(self, int64_t number, object ending, double now) except -1:
        cdef EndLine line
        kind = self.kind_of(ending)
        line = self._silent.get(kind)
        if line is None:
            line = self._silent[kind] = EndLine()
        self.put(number, kind, now, line)
        return 0

    def asked(self, int64_t number, double now) -> bool:
        """A prompt that leads into this node has come; whether it is the next turn of who ended there."""
        return self.note_asked(number, now)

    cdef bint note_asked(self, int64_t number, double now) except -1:
        cdef PrefixEnd end = self.end_at(number)
        if end is None or end.line is self.dead:
            return False
        if end.line is not self.wanted:
            self.times.add(end.kind, now - end.since_seconds, True)
            self.leave(end)
            self.wanted.append(end)
        return True

    def want(self, int64_t number, double now) -> None:
        """A request that ended at this node for now waits to go on."""
        self.put(number, OTHER, now, self.wanted)

    def unwanted(self, int64_t number, double now) -> None:
        """Who asked has gone without it."""
        cdef PrefixEnd end = self.end_at(number)
        if end is not None and end.line is self.wanted:
            self.note_end(number, OTHER, now)

    def die(self, int64_t number, double now) -> None:
        """The next turn has ended, at another node."""
        self.put(number, OTHER, now, self.dead)

    def forget(self, int64_t number) -> None:
        """Know this end no more."""
        self.drop(number)

    cdef int drop(self, int64_t number) except -1:
        cdef PrefixEnd end = self._ends.pop(number, None)
        return 0 if end is None else self.leave(end)

    def evicted(self, PrefixEnd end not None, int64_t left, double now) -> None:
        """An end was evicted, or its last part: what is left of the prefix ends at node `left`, -1 if nowhere."""
        self.note_evicted(end, left, now)

    cdef int note_evicted(self, PrefixEnd end, int64_t left, double now) except -1:
        cdef EndLine line = end.line
        if self._silent.get(end.kind) is line:
            self.times.add(end.kind, now - end.since_seconds, False)
        self.drop(end.number)
        if left >= 0 and self.end_at(left) is None:
            end = self.put(left, end.kind, end.since_seconds, line)
            line.remove(end)
            line.prepend(end)
        return 0

    # --- who is first -------------------------------------------------------------------------------------------------

    def victim(self, double now) -> PrefixEnd | None:
        """What should go first; None where no end is known. Changes nothing."""
        return self.first_to_go(now)

    cdef PrefixEnd first_to_go(self, double now):
        cdef PrefixEnd found = None
        cdef PrefixEnd end
        cdef EndLine line
        cdef double value, least = 0.0
        if self.dead.count:
            return self.dead.first
        for line in self._silent.values():
            end = line.first
            value = self.times.value_of(end.kind, now - end.since_seconds)
            if found is None or value < least or (value == least and end.since_seconds < found.since_seconds):
                found, least = end, value
        return self.wanted.last if found is None else found

    # --- lines --------------------------------------------------------------------------------------------------------

    cdef object kind_of(self, object ending):
        """The ending, if one of so many kinds may be it and enough answers end so; else OTHER."""
        cdef dict counts = self.endings
        cdef int64_t count = <int64_t> counts.get(ending, 0) + 1
        if count == 1:
            if len(counts) >= ENDINGS_MAX:
                rarest = next(iter(self.once)) if self.once else min(counts, key=counts.__getitem__)
                self.once.pop(rarest, None)
                del counts[rarest]
            self.once[ending] = None
        elif count == 2:
            del self.once[ending]
        counts[ending] = count
        self.answers += 1
        if self.answers >= ENDINGS_FADE:
            self.answers //= 2
            self.endings = {known: seen // 2 for known, seen in counts.items() if seen > 1}
            self.once = {known: None for known, seen in self.endings.items() if seen == 1}
        if count * KINDS < self.answers:
            return OTHER
        return ending if ending in self._silent or len(self._silent) < KINDS else OTHER

    cdef PrefixEnd put(self, int64_t number, object kind, double since_seconds, EndLine line):
        cdef PrefixEnd end
        self.drop(number)
        if len(self._ends) >= self.ends_max:
            self.drop(next(iter(self._ends)))
        end = PrefixEnd.__new__(PrefixEnd)
        end.number, end.kind, end.since_seconds = number, kind, since_seconds
        self._ends[number] = end
        line.append(end)
        if line is not self.dead and line is not self.wanted:
            self._silent[kind] = line            # it may have been empty, and forgotten
        return end

    cdef int leave(self, PrefixEnd end) except -1:
        end.line.remove(end)
        if not end.line.count and self._silent.get(end.kind) is end.line:
            del self._silent[end.kind]
        return 0

    def check(self) -> None:
        """Assert that every end stands in one line, that it names, and that the bounds hold. O(ends)."""
        cdef EndLine line
        cdef PrefixEnd end
        cdef Py_ssize_t stand = 0, count
        for line in self._silent.values():
            assert line.count, "an empty line is kept"
        for line in [self.dead, self.wanted, *self._silent.values()]:
            end, count = line.first, 0
            while end is not None:
                assert self._ends[end.number] is end, f"end {end.number} is not the one that is known"
                assert end.line is line, f"end {end.number} names another line"
                count += 1
                end = end.after
            assert count == line.count, "a line counts others than stand in it"
            stand += count
        assert stand == len(self._ends) <= self.ends_max, "an end stands in no line, or in two"
        once = [ending for ending, seen in self.endings.items() if seen == 1]
        assert once == list(self.once), "the endings that were counted once are others"
        assert len(self._silent) <= KINDS + 1 and len(self.endings) <= ENDINGS_MAX, "more kinds than may be"
