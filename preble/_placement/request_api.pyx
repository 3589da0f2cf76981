"""The calls of a request's life, compiled: `schedule`, `first_token`, `finish`, `cancel`. Owns the way in and out: the
arguments, the request ids, the two locks. What the calls do is in `_placement/bookings.pyx`; the rest of a scheduler is
`scheduler.py`.

    with Python's lock        arguments, tokens borrowed, the clock read, the request id claimed, the namespace's root
    with neither              walk the prompt (a reader, beside others)
    with the writers' lock    make sure of the walk, choose, book, insert
    with Python's lock        the answer

That is how a long prompt is placed. One of up to SHORT_TOKENS, and any end of a request, keeps Python's lock
throughout if the writers' lock is free: it is done sooner than Python's lock changes hands and comes back. The
request id is claimed before Python's lock is let go, so two calls with one id cannot both be placed.
"""

from cpython.dict cimport PyDict_Size
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.ref cimport PyObject
from libc.math cimport INFINITY
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.string cimport memcpy

from preble._placement.decision cimport Decision, new_decision
from preble._placement.bookings cimport (
    BOOKED,
    LATE,
    NEGATIVE_TOKEN,
    PENDING,
    ROOT_GONE,
    TOO_MANY_CACHED,
    DecisionCore,
)
from preble._placement.e2 cimport Choice, Order
from preble._core.manual_clock cimport ManualClock
from preble._core.epochs cimport reader_enter, reader_leave
from preble._core.writer_lock cimport await_python, guard_enter, guard_leave, guard_try
from preble._core.tree.layout cimport Tree, generation, node_at
from preble._core.memory cimport NONE
from preble._core.tree.nodes cimport tree_walk
from preble._radix cimport SHORT_TOKENS
from preble._core.tree.reclaim cimport reclaim
from preble._core.token_ids cimport TokenView, check_tokens, has_negative, release_tokens, view_tokens

from ..errors import DuplicateRequest, InvalidInput, InvalidTime, InvalidTokens, NoWorkers

cdef extern from "Python.h":
    PyObject* PyDict_GetItemWithError(dict d, object key) except? NULL
    PyObject* PyDict_SetDefault(dict d, object key, object value) except NULL
    object PyUnicode_New(Py_ssize_t size, uint32_t greatest)
    uint8_t* PyUnicode_1BYTE_DATA(object text)

cdef enum:
    ROOT_TRIES = 8               # times a namespace may vanish under a call before it goes unremembered
    TOKENS_MOST = 2147483647

cdef double TIME_MOST = 1e12     # seconds either way, so that the number of a slice of the window always fits 64 bits

cdef bytes _PREFIX = b"request-"

_NOTHING = ()
_PENDING = PENDING
_REASONS = ("exploit", "explore", "escape", "rebalance", "replica", "handover", "rendezvous")


# --- arguments --------------------------------------------------------------------------------------------------------

def finite_time(str name, seconds) -> float:
    """`seconds` as a float. Raises InvalidTime naming it."""
    cdef double value
    if isinstance(seconds, bool) or not hasattr(seconds, "__float__"):
        raise InvalidTime(f"{name} must be a number of seconds, got {seconds!r}")
    try:
        value = seconds
    except OverflowError:
        value = INFINITY
    if not -TIME_MOST <= value <= TIME_MOST:
        raise InvalidTime(f"{name} must be finite and within {TIME_MOST:g} seconds, got {seconds!r}")
    return value


def hashable(str name, value) -> None:
    """Raise InvalidInput naming a value that cannot be a key."""
    try:
        hash(value)
    except TypeError:
        raise InvalidInput(f"{name} must be hashable, got a {type(value).__name__}") from None


cdef int64_t whole(str name, object value, int64_t low) except -2:
    """An int argument in [low, 2**31 - 1]."""
    cdef int overflow = 0
    cdef int64_t number
    if PyLong_CheckExact(value):
        number = PyLong_AsLongLongAndOverflow(value, &overflow)
        if low <= number <= TOKENS_MOST and not overflow:
            return number
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= TOKENS_MOST:
        raise InvalidInput(f"{name} must be an int in [{low}, {TOKENS_MOST}], got {value!r}")
    return value


cdef str numbered(int64_t number):
    """`request-{number}`, without a formatter."""
    cdef uint8_t digits[20]
    cdef int count = 0, i
    cdef uint8_t* letters
    while number or not count:
        digits[count] = <uint8_t> (48 + number % 10)
        number //= 10
        count += 1
    text = PyUnicode_New(len(_PREFIX) + count, 127)
    letters = PyUnicode_1BYTE_DATA(text)
    memcpy(letters, <const char*> _PREFIX, len(_PREFIX))
    for i in range(count):
        letters[len(_PREFIX) + i] = digits[count - 1 - i]
    return text


def output_limit(max_new_tokens) -> int:
    """0 when none is given, which is how the core says it."""
    return 0 if max_new_tokens is None else whole("max_new_tokens", max_new_tokens, 1)


cdef class RequestCalls:
    """What must be quick in a `GlobalScheduler`, its only subclass. Any thread may call anything."""

    # --- schedule ---

    def schedule(self, token_ids, *, request_id=None, namespace=None, max_new_tokens=None, exclude=_NOTHING,
                 bint explain=False) -> Decision:
        """Choose a worker and book the request on it, until `finish` or `cancel`.

        `token_ids`: see the package; not to be changed while this runs. `request_id`: made up when None. `exclude`:
        worker ids that may not take it (they failed it before). `explain`: fill `Decision.costs`. Raises
        InvalidTokens, InvalidInput, DuplicateRequest, UnknownWorker, NoWorkers, QueueFull; then nothing has changed.
        O(tokens + workers). Thread-safe; other threads run meanwhile.
        """
        cdef int64_t limit = 0
        if max_new_tokens is not None:
            limit = whole("max_new_tokens", max_new_tokens, 1)
        if namespace is not None:
            hashable("namespace", namespace)
        if request_id is not None:
            hashable("request_id", request_id)
        if explain or exclude is not _NOTHING or self._policy is not None:
            return self._schedule_weighed(token_ids, request_id, namespace, max_new_tokens, exclude, explain)
        return self.place(token_ids, request_id, namespace, limit)

    cdef double now(self) except? -1.0:
        cdef double seconds
        if type(self._clock) is ManualClock:
            seconds = (<ManualClock> self._clock).seconds
        else:
            value = self._clock()
            if type(value) is not float:
                return finite_time("what the clock returned", value)
            seconds = value
        if not -TIME_MOST <= seconds <= TIME_MOST:
            finite_time("what the clock returned", seconds)
        return seconds

    cdef object claim(self, object request_id):
        """Mark a request id as being placed, made up if it is None; returns it."""
        cdef dict leases = self._core.leases
        cdef int64_t number = self._sequence
        cdef Py_ssize_t known = PyDict_Size(leases)
        if known >= self._core.live_max:
            self._core.need_room(request_id)
        if request_id is not None:
            if PyDict_SetDefault(leases, request_id, _PENDING) != <PyObject*> _PENDING or PyDict_Size(leases) == known:
                raise DuplicateRequest(f"request_id {request_id!r} is live")
            return request_id
        while True:
            request_id = numbered(number)
            PyDict_SetDefault(leases, request_id, _PENDING)
            if PyDict_Size(leases) > known:
                return request_id
            number += 1

    cdef object key_of(self, object request_id):
        """What a request is leased by, None if it is not live. Raises InvalidInput for an id that cannot be one."""
        cdef PyObject* found
        try:
            found = PyDict_GetItemWithError(self._core.leases, request_id)
        except TypeError:
            hashable("request_id", request_id)
            raise
        return None if found == NULL else <object> found

    cdef Decision place(self, object token_ids, object request_id, object namespace, int64_t limit):
        """Decide by E2 and book; anew if the chosen worker is removed meanwhile."""
        cdef DecisionCore core = self._core
        cdef TokenView view
        cdef Order order
        cdef Choice choice
        cdef str name = None
        order.now = self.now()
        order.max_new_tokens = limit
        if core.eligible_workers == 0 and not any(name is not None for name in core.names):
            raise NoWorkers("the scheduler has no workers; add_worker first")
        request_id = self.claim(request_id)
        try:
            view_tokens(token_ids, &view)
            try:
                while name is None:
                    core.need_eligible()
                    self.decide(&view, namespace, &order, &choice)
                    name = core.chosen_name(&choice)
            finally:
                release_tokens(&view)
        except BaseException:
            core.leases.pop(request_id, None)
            raise
        core.leases[request_id] = choice.lease
        self._sequence += 1
        self.scheduled += 1
        self.reasons[<int> choice.reason] += 1
        return new_decision(request_id, name, choice.usable, order.count,
                            _REASONS[<int> choice.reason], None)

    cdef int decide(self, TokenView* view, object namespace, Order* order, Choice* choice) except -1:
        """Walk beside other readers, then decide and book as the writer. Raises what `schedule` says."""
        cdef DecisionCore core = self._core
        cdef Tree* t = &core.tree.t
        cdef uint32_t slot, tries = 0
        cdef int outcome = ROOT_GONE
        order.tokens = view.data
        order.count = view.count
        order.everyone = False
        order.writer = True
        order.mirrored = False
        while outcome == ROOT_GONE:
            core.bind_root(order, namespace, False)
            if order.root == NONE:
                check_tokens(view, 0)
                if tries < ROOT_TRIES:
                    core.bind_root(order, namespace, True)
            tries += 1
            if view.count <= SHORT_TOKENS and guard_try(&t.guard):
                outcome = self.walk_and_place(view, order, choice, False)
                guard_leave(&t.guard)
                continue
            with nogil:
                if order.root != NONE:
                    slot = reader_enter(&t.epochs)
                    if generation(node_at(t, order.root)) == order.root_generation:
                        order.walk = tree_walk(t, order.walk, view.data, view.count)
                    reader_leave(&t.epochs, slot)
                if has_negative(view, order.walk.matched):
                    outcome = NEGATIVE_TOKEN
                else:
                    guard_enter(&t.guard)
                    outcome = self.walk_and_place(view, order, choice, True)
                    guard_leave(&t.guard)
                await_python()
        if outcome == NEGATIVE_TOKEN:
            check_tokens(view, 0)
            raise InvalidTokens("token_ids changed while they were read")
        if outcome != BOOKED:
            core.raise_outcome(outcome)
        return 0

    cdef int walk_and_place(self, TokenView* view, Order* order, Choice* choice, bint checked) noexcept nogil:
        """Walk on from where the order's walk is, decide and book. As the writer; `checked` if no token is negative."""
        cdef int outcome
        if self._core.resume(order):
            return ROOT_GONE
        if not checked and has_negative(view, order.walk.matched):
            return NEGATIVE_TOKEN
        outcome = self._core.place(order, choice)
        reclaim(&self._core.tree.t)
        return outcome

    # --- the rest of a request's life ---

    def first_token(self, request_id, *, cached_tokens=None) -> bool:
        """The prefill is done. `cached_tokens`, the engine's word on how much it reused, corrects load and beliefs.

        Returns False, and counts it, if the request is not live (a late message is normal). Raises InvalidInput.
        """
        cdef int64_t cached = -1 if cached_tokens is None else whole("cached_tokens", cached_tokens, 0), key
        cdef DecisionCore core = self._core
        cdef double now
        cdef int ending
        found = self.key_of(request_id)
        now = self.now()
        key = PENDING if found is None else found
        core.tree.enter()
        ending = core.prefilled(key, cached, now)
        core.tree.leave()
        return self.answer(ending, request_id, False, cached, -1)

    def finish(self, request_id, *, output_tokens=None, cached_tokens=None) -> bool:
        """The request is done; its booking ends. `output_tokens` teaches the expected output length. False if not
        live."""
        if not self.end(request_id, output_tokens, cached_tokens):
            return False
        self.finished += 1
        return True

    def _end(self, request_id, output_tokens) -> bool:
        """`finish` without counting it."""
        return self.end(request_id, output_tokens, None)

    cdef bint end(self, object request_id, object output_tokens, object cached_tokens) except -1:
        """Whether the request was live, and has ended."""
        cdef int64_t output = -1 if output_tokens is None else whole("output_tokens", output_tokens, 0), key
        cdef int64_t cached = -1 if cached_tokens is None else whole("cached_tokens", cached_tokens, 0)
        cdef DecisionCore core = self._core
        cdef double now
        cdef int ending
        found = self.key_of(request_id)
        now = self.now()
        key = PENDING if found is None else found
        core.tree.enter()
        ending = core.ended(key, output, cached, now)
        core.tree.leave()
        return self.answer(ending, request_id, True, cached, output)

    def cancel(self, request_id) -> bool:
        """The request will not be served here: give its booking back. False if it is not live."""
        hashable("request_id", request_id)
        if not self._give_back(request_id, self.now()):
            self.late_calls += 1
            return False
        self.cancelled += 1
        return True

    def renew(self, request_id) -> bool:
        """The request is still wanted: its time to live (`SchedulerConfig.lease_seconds`) begins anew. False, and
        counted, if it is not live. Nothing else renews it but `reconcile`."""
        hashable("request_id", request_id)
        return self._core.renew(request_id, self.now()) or self._late()

    def _late(self) -> bool:
        """Count a call about a request that is not live; returns False."""
        self.late_calls += 1
        return False

    def _give_back(self, request_id, double now) -> bool:
        """Cancel without counting it. False if it is not live."""
        cdef DecisionCore core = self._core
        found = self.key_of(request_id)
        cdef int64_t key = PENDING if found is None else found
        cdef int ending
        core.tree.enter()
        ending = core.cancelled(key, now)
        core.tree.leave()
        return ending != LATE and self.answer(ending, request_id, True, -1, -1)

    cdef bint answer(self, int ending, object request_id, bint ended, int64_t cached_tokens,
                     int64_t output_tokens) except -1:
        """Whether the request was live; forgets its id if it has `ended`. A policy that needs books has them told."""
        if ending == LATE:
            self.late_calls += 1
            return False
        if ending == TOO_MANY_CACHED:
            raise InvalidInput(f"cached_tokens is {cached_tokens}, more than the prompt has")
        if self._books is not None:              # before the id is free for another request
            self._tell_books(request_id, ended, output_tokens)
        if ended:                                # only whoever ended the lease comes here
            del self._core.leases[request_id]
        return True

    # --- for the rest of the scheduler ---

    def _counts(self) -> dict[str, int]:
        """What these calls have counted."""
        return {"scheduled": self.scheduled, "finished": self.finished, "cancelled": self.cancelled,
                "late_calls": self.late_calls}

    def _e2_reasons(self) -> dict[str, int]:
        """Decisions by E2's reasons, those without any left out."""
        return {reason: self.reasons[i] for i, reason in enumerate(_REASONS) if self.reasons[i]}

    def _steered_reasons(self) -> dict[str, int]:
        """Those of them that a snapshot's counters have no place for."""
        return {reason: count for reason, count in self._e2_reasons().items() if reason not in _REASONS[:2]}

    def _booked(self) -> None:
        """Count a decision that was booked elsewhere."""
        self._sequence += 1
        self.scheduled += 1

    def _new_id(self) -> str:
        """A request id that is not in use, for a decision under the lock."""
        cdef int64_t number = self._sequence
        while f"request-{number}" in self._core.leases:
            number += 1
        return f"request-{number}"
