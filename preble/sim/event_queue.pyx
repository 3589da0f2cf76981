"""Future events in order: a binary heap of plain numbers. Owns which of them is next; `timeline.py` says what events
are. Every event has another number, so their order is one, whatever the heap.
"""

from libc.math cimport INFINITY
from libc.stdint cimport int64_t
from libc.stdlib cimport free, realloc

from preble._core.manual_clock cimport ManualClock

from ..errors import InvalidTime

cdef enum:
    ROOM_MIN = 64


cdef inline bint is_before(const Event* one, const Event* other) noexcept nogil:
    if one.seconds != other.seconds:
        return one.seconds < other.seconds
    if one.planned != other.planned:
        return one.planned < other.planned
    if one.order != other.order:
        return one.order < other.order
    return one.number < other.number


cdef void rise(Event* heap, Py_ssize_t at, Event event) noexcept nogil:
    """Put an event at a place, or above it."""
    cdef Py_ssize_t above
    while at:
        above = (at - 1) // 2
        if not is_before(&event, &heap[above]):
            break
        heap[at] = heap[above]
        at = above
    heap[at] = event


cdef void sink(Event* heap, Py_ssize_t count, Event event) noexcept nogil:
    """Put an event first, or below."""
    cdef Py_ssize_t at = 0, below
    while True:
        below = 2 * at + 1
        if below >= count:
            break
        if below + 1 < count and is_before(&heap[below + 1], &heap[below]):
            below += 1
        if not is_before(&heap[below], &event):
            break
        heap[at] = heap[below]
        at = below
    heap[at] = event


cdef class EventQueue:
    """Future events on a manual clock. Not thread-safe."""

    def __init__(self, ManualClock clock not None):
        self.clock = clock
        self.now = self.since = clock.seconds
        self.order = -1
        self.actions = {}
        self.cancelled = set()

    def __dealloc__(self):
        free(self.heap)

    @property
    def place(self) -> tuple[float, int]:
        """Of the event that happens, among those of its moment."""
        return self.since, self.order

    @property
    def _planned(self) -> list[tuple[float, float, int, int]]:
        """Those that have not happened, cancelled ones too, in no order."""
        cdef Py_ssize_t i
        return [(self.heap[i].seconds, self.heap[i].planned, self.heap[i].order, self.heap[i].number)
                for i in range(self.count)]

    def at(self, seconds, action, subject=None, place=None) -> int:
        """Plan `action(subject)` for a finite moment, not before now; among those of that moment in order of planning,
        or at a `place`. Returns its number, for `cancel`. Raises `InvalidTime`. O(log events)."""
        cdef double moment = seconds
        if not self.now <= moment < INFINITY:
            raise InvalidTime(f"an event cannot be planned for {seconds!r}, it is {self.now!r}")
        if place is None:
            return self.plan(moment, action, subject, self.now, self.numbers)
        planned, order = place
        return self.plan(moment, action, subject, planned, order)

    cdef int64_t plan(self, double seconds, object action, object subject, double planned, int64_t order) except -1:
        cdef Event event
        cdef Event* more
        cdef Py_ssize_t room
        if self.count == self.room:
            room = max(ROOM_MIN, 2 * self.room)
            more = <Event*> realloc(self.heap, room * sizeof(Event))
            if more == NULL:
                raise MemoryError("EventQueue.at")
            self.heap = more
            self.room = room
        event.seconds = seconds
        event.planned = planned
        event.order = order
        event.number = self.numbers
        self.actions[event.number] = (action, subject)
        self.numbers += 1
        rise(self.heap, self.count, event)
        self.count += 1
        return event.number

    def take_number(self) -> int:
        """Returns a number as the next event would have had it, for a `Place`."""
        self.numbers += 1
        return self.numbers - 1

    def cancel(self, int64_t number) -> None:
        """A planned event that has not happened does not."""
        self.cancelled.add(number)

    def pass_by(self, double seconds) -> None:
        """It is so late, if it is not later; between events only."""
        if seconds > self.now:
            self.now = self.clock.seconds = seconds

    def run(self, double until_seconds) -> None:
        """Let events happen, in order, up to and including that moment, or until there are none."""
        cdef Event event
        while self.count and self.heap[0].seconds <= until_seconds:
            event = self.heap[0]
            self.count -= 1
            if self.count:
                sink(self.heap, self.count, self.heap[self.count])
            action, subject = self.actions.pop(event.number)
            if self.cancelled and event.number in self.cancelled:
                self.cancelled.remove(event.number)
                continue
            self.since, self.order = event.planned, event.order
            if event.seconds != self.now:
                self.now = self.clock.seconds = event.seconds
            action(subject)
