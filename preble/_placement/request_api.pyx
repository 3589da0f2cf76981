"""The calls of a request's life, compiled: `schedule`, `first_token`, `finish`, `cancel`, and the questions `match` and
`explain`. Owns the way in and out: the arguments, the request ids, the two locks, the counts, and reports to
observers. What the calls do to the core is in `bookings.pyx`; workers, events and background work: `scheduler.py`.

    with Python's lock        arguments, tokens borrowed, the clock read, the request id claimed    here
    with Python's lock        the namespace's root                                                  DecisionCore.decide
    with neither              walk the prompt (a reader, beside others)
    with the writers' lock    make sure of the walk, choose, book, insert
    with Python's lock        the answer                                                            here

That is how a long prompt is placed. One of up to SHORT_TOKENS, and any end of a request, keeps Python's lock
throughout if the writers' lock is free: it is done sooner than Python's lock changes hands and comes back.

The request id is claimed before Python's lock is let go and before any policy is asked, so two calls with one id cannot
both be placed. Its hash and equality may be Python code, which may call anything here; that runs before the claim
(`_core/dict_keys.pyx`). From then on the request is known by its key.
"""

from cpython.dict cimport PyDict_Size
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.ref cimport PyObject
from libc.math cimport INFINITY
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from preble._placement.decision cimport Decision, Match, new_decision
from preble._core.atomic cimport FREE_THREADED, add_count, load64
from preble._core.dict_keys cimport dict_key, is_plain_key
from preble._placement.bookings cimport DONE, LATE, PENDING, TOO_MANY_CACHED, Asked, DecisionCore
from preble._core.manual_clock cimport ManualClock, monotonic_seconds
from preble._placement.e2 cimport Choice, Placement, Scratch, Terms, free_scratch, new_scratch, rows_of
from preble._core.epochs cimport reader_enter, reader_leave
from preble._core.writer_lock cimport await_python, lock_leave, lock_try
from preble._core.tree.layout cimport TokenRun, Tree, generation, node_at
from preble._core.tree.parts cimport copied_run
from preble._core.memory cimport NONE
from preble._core.tree.nodes cimport at_root, tree_walk
from preble._core.token_ids cimport TokenView, check_tokens, release_tokens, view_tokens

from collections import Counter
from collections.abc import Iterable

from .decision import unit_draw
from .bookings import REASON_NAMES
from ..clock import monotonic
from ..errors import DuplicateRequest, InvalidInput, InvalidTime, QueueFull
from ..policies.base import RequestView
from ..types import Explanation, SessionHint, WorkerCost, claim_of

cdef extern from "Python.h":
    PyObject* PyDict_GetItemWithError(dict d, object key) except? NULL
    PyObject* PyDict_SetDefault(dict d, object key, object value) except NULL
    object PyUnicode_New(Py_ssize_t size, uint32_t greatest)
    uint8_t* PyUnicode_1BYTE_DATA(object text)

cdef enum:
    EXPLAIN_ATTEMPTS = 8         # of an explanation without a lock, while workers come and go
    TOKENS_MAX = 2147483647
    REASONS_MAX = 64             # counted apart; a policy that makes up more has the rest counted as "other"

cdef double TIME_MAX = 1e12      # seconds either way, so that the number of a slice of the window always fits 64 bits

cdef bytes _PREFIX = b"request-"

_NOTHING = ()
_PENDING = PENDING
cdef tuple _REASONS = REASON_NAMES
cdef object _MONOTONIC = monotonic


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
    if not -TIME_MAX <= value <= TIME_MAX:
        raise InvalidTime(f"{name} must be finite and within {TIME_MAX:g} seconds, got {seconds!r}")
    return value


def hashable(str name, value) -> object:
    """The value. Raises InvalidInput naming one that cannot be a key."""
    try:
        hash(value)
    except TypeError:
        raise InvalidInput(f"{name} must be hashable, got a {type(value).__name__}") from None
    return value


def iterable(str name, values, error=InvalidInput) -> Iterable[object]:
    """`values` if one can iterate over it; a lone string is taken for the mistake it is, and raises `error`."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise error(f"{name} must be an iterable, such as a list, got {values!r}")
    return values


cdef int64_t whole(str name, object value, int64_t low) except -2:
    """An int argument in [low, 2**31 - 1]."""
    cdef int overflow = 0
    cdef int64_t number
    if PyLong_CheckExact(value):
        number = PyLong_AsLongLongAndOverflow(value, &overflow)
        if low <= number <= TOKENS_MAX and not overflow:
            return number
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= TOKENS_MAX:
        raise InvalidInput(f"{name} must be an int in [{low}, {TOKENS_MAX}], got {value!r}")
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


cdef class RequestHandle:
    """Base of what stands for one request beside a `Decision`: its `request_id` names it (`Lease`)."""


cpdef object request_id_of(object value):
    """The id of a request that is named by its id, its `Decision` or its lease. Raises InvalidInput for None."""
    if type(value) is Decision:
        return (<Decision> value).request_id
    if value is None:
        raise InvalidInput("request_id is None: pass the request's id, or the Decision that schedule returned")
    return value.request_id if isinstance(value, RequestHandle) else value


def output_limit(max_new_tokens) -> int:
    """0 when none is given, which is how the core says it."""
    return 0 if max_new_tokens is None else whole("max_new_tokens", max_new_tokens, 1)


def names_session(session) -> bool:
    """Whether a hint names a session, and one alone. Raises InvalidInput for what is no hint."""
    if not isinstance(session, SessionHint):
        raise InvalidInput(f"session must be a SessionHint, got {type(session).__name__}")
    return bool(session.session) and not session.shared


cdef object at_index(object error, str what, Py_ssize_t at):
    """The same error; one that an argument caused names which of several."""
    if isinstance(error, InvalidInput):
        error.args = (f"{what}[{at}]: {error}",)
    return error


# --- questions --------------------------------------------------------------------------------------------------------

cdef Match estimated_match(RequestApi api, object token_ids, object namespace):
    """What each worker is estimated to cache. Changes nothing, takes no lock."""
    cdef Match match = Match.__new__(Match)
    cdef Terms terms
    cdef uint32_t at, i
    api.core.tree.look(token_ids, namespace, &match.held)
    match.prompt_tokens = match.held.prompt
    match.known_tokens = match.held.walk.matched
    match.names = api.core.names_here()
    for at in range(match.held.count):
        i = match.held.met[at]
        api.core.size_up(&terms, i, match.held.held[i], match.held.prompt)
        match.held.held[i] = terms.usable
        if match.held.here != NULL:
            api.core.size_up(&terms, i, match.held.here[i], match.held.prompt)
            match.held.here[i] = terms.usable
    return match


def choice_to_come(DecisionCore core not None, policy, token_ids, object namespace, int64_t max_new_tokens, double now,
                   request, bint of_session=False) -> tuple:
    """Decide without booking: (chosen index, reason, prompt tokens, rows of (index, usable, L, M, P, Q, total,
    candidate), names). E2 takes no lock for it; a Python policy is asked under both, with its `request`."""
    cdef TokenView view
    cdef Placement placement
    cdef Choice choice
    cdef uint64_t changes
    core.need_eligible()
    view_tokens(token_ids, &view)
    try:
        if policy is not None:
            with core.tree:
                core.begin(&placement, &view, core.tree.key_of(namespace), max_new_tokens, now)
                placement.of_session = of_session
                core.loads.advance(now)
                reason = core.choose(&placement, policy, request, &choice)
                return choice.worker, reason, view.count, rows_of(&core.scratch), core.names_now
        placement.tokens = view.data
        placement.count = view.count
        placement.max_new_tokens = max_new_tokens
        placement.now = now
        placement.everyone = True
        placement.of_session = of_session
        for _ in range(EXPLAIN_ATTEMPTS):
            changes = load64(&core.tree.t.worker_changes) + load64(&core.turnover)
            found = None if core.left_out else choose_beside_writers(core, &placement, &view, namespace)
            if found is not None and changes == load64(&core.tree.t.worker_changes) + load64(&core.turnover):
                return found
        with core.tree:        # workers come and go faster than one can look: nobody does while this is held
            core.need_eligible()
            found = choose_beside_writers(core, &placement, &view, namespace)
            if found is None:
                raise AssertionError("no worker was chosen, though some may take requests and nobody writes")
            return found
    finally:
        release_tokens(&view)


cdef tuple choose_beside_writers(DecisionCore core, Placement* request, TokenView* view, object namespace):
    """One look at the tree and the bookings as they are; None if those that could have been chosen left meanwhile. Only
    if a slice of the window has passed, and nobody writes, are the bookings brought up to date first; without that an
    explanation is late by one slice at most."""
    cdef Choice choice
    cdef Scratch own
    cdef Tree* t = &core.tree.t
    cdef uint32_t slot
    names = core.names_here()
    core.bind_root(request, namespace, False)
    if new_scratch(&own, len(names)):
        raise MemoryError("GlobalScheduler.explain")
    try:
        own.workers = own.room
        with nogil:
            if core.loads.is_behind(request.now) and lock_try(&t.writer_lock):
                core.loads.advance(request.now)
                lock_leave(&t.writer_lock)
            slot = reader_enter(&t.epochs)
            if request.root != NONE and generation(node_at(t, request.root)) == request.root_generation:
                request.walk = tree_walk(t, request.walk, request.tokens, request.count)
            else:
                request.walk = at_root(t, NONE)  # the namespace has gone, and its root may be another node by now
            choice = core.choose_e2(&own, request)
            reader_leave(&t.epochs, slot)
            await_python()
        check_tokens(view, request.walk.matched)
        if choice.worker == NONE:
            core.need_eligible()
            return None
        return choice.worker, REASON_NAMES[choice.reason], view.count, rows_of(&own), names
    finally:
        free_scratch(&own)


def explanation(DecisionCore core not None, policy, token_ids, namespace, int64_t max_new_tokens, double now,
                request, bint of_session=False) -> Explanation:
    """The decision to come, with every worker's terms. Books nothing. `request`: a Python policy's RequestView."""
    asked = token_ids, namespace, max_new_tokens, now, request, of_session
    chosen, reason, prompt, rows, names = choice_to_come(core, policy, *asked)
    costs = tuple([
        WorkerCost(names[i], usable, prompt - usable, *seconds, total, score, candidate, loading, host, disk)
        for (i, usable, *seconds, loading, host, disk, total, candidate), score
        in zip(rows, scores_of(core, policy, request, rows), strict=True)
    ])
    winner = [cost for cost in costs if cost.worker == names[chosen]][0]
    others = sorted([(cost.score, cost.worker) for cost in costs if cost.candidate and cost.worker != winner.worker])
    return Explanation(
        worker=winner.worker,
        runner_up=others[0][1] if others else None,
        margin=others[0][0] - winner.score if others else 0.0,
        reason=reason,
        policy=policy_name(policy),
        prompt_tokens=prompt,
        matched_tokens=winner.matched_tokens,
        workers=costs,
    )


def scores_of(DecisionCore core not None, policy, request, list rows) -> list[float]:
    """What was compared for each worker of an explanation: the total for E2."""
    if policy is None:
        return [row[13] for row in rows]
    return policy.checked_scores(request, core.view([row[0] for row in rows]))


def policy_name(policy) -> str:
    """A policy's name; None is E2."""
    return "e2" if policy is None else policy.name


# --- the calls --------------------------------------------------------------------------------------------------------

cdef class RequestApi:
    """What callers ask of a scheduler for each request. Complete in itself; `GlobalScheduler` adds the workers, their
    events and the work in the background. Any thread may call anything.

    `clock`: seconds. `policy`: None is E2. `policy_state`: what the policy is given beside columns (`known`), a
    RequestObserver. `observer`: who looks on; without one each call asks only whether there is one.
    """

    def __init__(self, DecisionCore core not None, clock, int64_t seed, *, policy=None, policy_state=None,
                 observer=None):
        self.core = core
        self._clock = clock
        self._seed = seed
        self._policy = policy
        self._policy_state = policy_state
        self._observer = observer
        self._tenants = None
        self._reasons = {}

    # --- schedule ---

    def schedule(self, token_ids, *, request_id=None, namespace=None, max_new_tokens=None, exclude=_NOTHING,
                 bint explain=False, group=None, session=None, tenant=None, deadline_seconds=None,
                 priority=None) -> Decision:
        """Choose a worker and book the request on it, until `finish` or `cancel`. Returns its Decision.

        `token_ids`: shape [n], n >= 1: a list or tuple of ints or a C-contiguous buffer of int32, uint32 or int64, with
        ids in [0, 2**31 - 1]; not to be changed while this runs. `request_id`: any hashable, made up when None.
        `namespace`: any hashable; prefixes are shared within one. `max_new_tokens`: bound of the output, in tokens.
        `exclude`: worker ids that may not take it (they failed it before). `explain`: fill `Decision.costs`. `group`:
        any hashable that samples of one prompt have in common, where all of a set are waited for; E2 places these so
        that the set ends soon. `session`: a `SessionHint`, what its client says it belongs to; one that names a session
        is placed as a session's turn, also where the tree does not show it. Raises InvalidTokens, InvalidInput,
        DuplicateRequest, UnknownWorker, NoWorkers, QueueFull; then nothing has changed. O(tokens + workers).
        Thread-safe; other threads run meanwhile.

        `tenant`: a text, on whose account the request's seconds of worker time go (`tenant_seconds`); it moves nothing
        here. `deadline_seconds`: from now, within which its first token is of use. Workers where it would come later
        are left out, and where that is all of them `Overloaded` is raised, with the seconds after which to try again:
        the shortest wait, by what is booked and what such requests have really waited (`scheduling/tenants`). A worker
        at which nothing waits is never too late. `priority` "batch": only where work for less than 0.15 s waits, else
        `Overloaded`; "interactive": as without. What is refused is for the caller to ask again. Shares of tenants, the
        order by slack, and batch work that waits need a queue in front: `Router`, or `scheduling.admission`.
        """
        cdef int64_t limit = 0
        cdef bint observed, of_session = False
        if request_id is not None and type(request_id) is not str:
            request_id = request_id_of(request_id)
        if max_new_tokens is not None:
            limit = whole("max_new_tokens", max_new_tokens, 1)
        if namespace is not None:
            hashable("namespace", namespace)
        if session is not None:
            of_session = names_session(session)
        observed = self._observer is not None and self.is_observed(&explain)
        if tenant is not None or deadline_seconds is not None or priority is not None:
            return self._place_claimed(claim_of(tenant, deadline_seconds, priority), token_ids, exclude, {
                "request_id": request_id, "namespace": namespace, "max_new_tokens": max_new_tokens,
                "explain": explain, "group": group, "session": session,
            })
        if explain or observed or exclude is not _NOTHING or self._policy is not None or group is not None:
            hashable("group", group)
            return self.place_weighed(token_ids, request_id, namespace, max_new_tokens, exclude, explain, group,
                                      of_session)
        return self.place(token_ids, request_id, namespace, limit, of_session)

    cdef bint is_observed(self, bint* explain) except -1:
        """Whether the observer looks at the decision to come; `explain` is set if it wants the costs in it."""
        if not explain[0]:
            with self.core.tree:
                explain[0] = self._observer.explains(self.time())
        return self._observer.watches(self.sequence)

    cdef double time(self) except? -1.0:
        cdef double seconds
        if type(self._clock) is ManualClock:
            seconds = (<ManualClock> self._clock).seconds
        else:
            seconds = monotonic_seconds() if self._clock is _MONOTONIC else -1.0
            if seconds >= 0.0:
                return seconds
            value = self._clock()
            if type(value) is not float:
                return finite_time("what the clock returned", value)
            seconds = value
        if not -TIME_MAX <= seconds <= TIME_MAX:
            finite_time("what the clock returned", seconds)
        return seconds

    def now(self) -> float:
        """Returns what the scheduler's clock shows, in seconds. Raises InvalidTime if that is no finite number.
        O(1)."""
        return self.time()

    cdef object claim(self, object request_id, int64_t number):
        """Mark a request id as being placed, made up from `number` on if it is None; returns its key. No code of users
        runs between the look at what is live and the mark."""
        cdef dict leases = self.core.leases
        cdef Py_ssize_t known
        while True:
            key = self.key_of(numbered(number) if request_id is None else request_id)
            known = PyDict_Size(leases)
            if known >= self.core.live_max:
                self.core.need_room(None if request_id is None else key)
            PyDict_SetDefault(leases, key, _PENDING)
            if PyDict_Size(leases) > known:
                return key
            if request_id is not None:
                raise DuplicateRequest(f"request_id {request_id!r} is live")
            number += 1

    cdef int give_up(self, object key) except -1:
        """Take the mark of a request that was not placed away."""
        if self.core.leases.get(key) == PENDING:
            del self.core.leases[key]
        return 0

    cdef Decision place(self, object token_ids, object request_id, object namespace, int64_t limit, bint of_session):
        """The quick way: E2 decides and books without a look at who is no candidate."""
        cdef TokenView view
        cdef Placement request
        cdef Choice choice
        cdef str name
        request.now = self.time()
        request.max_new_tokens = limit
        request.of_session = of_session
        self.core.need_workers()
        if FREE_THREADED:
            return self.place_walked(token_ids, request_id, namespace, &request)
        key = self.claim(request_id, self.sequence)
        try:
            view_tokens(token_ids, &view)
            try:
                name = self.core.decide(&view, namespace, &request, &choice)
            finally:
                release_tokens(&view)
        except BaseException:
            self.give_up(key)
            raise
        self.core.leases[key] = choice.lease
        self.sequence += 1
        self.scheduled += 1
        self.reasons[<int> choice.reason] += 1
        return new_decision(key if request_id is None else request_id, name, choice.usable, request.count,
                            _REASONS[<int> choice.reason], None)

    cdef Decision place_walked(self, object token_ids, object request_id, object namespace, Placement* request):
        """`place` where Python has no lock: what that does with it is done as the writer, after the walk. Nothing here
        counts a reference to what threads share, as a variable `core` or `with core.tree` would."""
        cdef TokenView view
        cdef Choice choice
        cdef TokenRun* run = NULL
        cdef TokenRun* outer
        cdef str name
        view_tokens(token_ids, &view)
        try:
            self.core.walk_ahead(&view, namespace, request)
            run = copied_run(&request.walk, request.tokens, request.count)
            self.core.tree.enter()
            outer = self.core.tree.t.ready       # of a call that has led to this one, by code of users
            self.core.tree.t.ready = run
            try:
                key = self.claim(request_id, self.sequence)
                try:
                    name = self.core.decide_walked(&view, namespace, request, &choice)
                except BaseException:
                    self.give_up(key)
                    raise
                self.core.leases[key] = choice.lease
                self.sequence += 1
                self.scheduled += 1
                self.reasons[<int> choice.reason] += 1
            finally:
                run = self.core.tree.t.ready
                self.core.tree.t.ready = outer
                self.core.tree.leave()
        finally:
            free(run)
            release_tokens(&view)
        return new_decision(key if request_id is None else request_id, name, choice.usable, request.count,
                            _REASONS[<int> choice.reason], None)

    def _place_claimed(self, claim, token_ids, exclude, asked) -> Decision:
        """Place a request that names a tenant, a deadline or a class: for a scheduler, which keeps their accounts."""
        raise InvalidInput("tenant, deadline_seconds and priority are for a GlobalScheduler")

    # --- several at once ---

    def schedule_many(self, prompts, *, request_ids=None, namespace=None, max_new_tokens=None, groups=None,
                      tenant=None, deadline_seconds=None, priority=None) -> list[Decision]:
        """Place several prompts by one call; returns their Decisions in order: those that `schedule` would have made
        one after the other at this moment.

        `prompts`: an iterable of what `schedule` takes as `token_ids`, not to be changed while this runs.
        `request_ids`, `groups`: as many, or None; the other arguments hold for all. Raises what `schedule` does, with
        the index of the prompt that is wrong, and then nothing has changed; where only the fleet, the memory
        or a policy of your own fails in the midst, what was placed before is cancelled. O(tokens + prompts x workers).
        Thread-safe; Python's lock is let go once, other threads' decisions come in between.
        """
        cdef int64_t limit = output_limit(max_new_tokens)
        cdef list given = list(iterable("prompts", prompts))
        cdef list ids = None, labels = None
        hashable("namespace", namespace)
        if request_ids is not None:
            ids = [None if one is None else request_id_of(one) for one in iterable("request_ids", request_ids)]
            if len(ids) != len(given):
                raise InvalidInput(f"request_ids are {len(ids)} for {len(given)} prompts")
        if groups is not None:
            labels = [hashable(f"groups[{at}]", one) for at, one in enumerate(iterable("groups", groups))]
            if len(labels) != len(given):
                raise InvalidInput(f"groups are {len(labels)} for {len(given)} prompts")
        if not given:
            return []
        self.core.need_workers()
        if PyDict_Size(self.core.leases) + len(given) > self.core.live_max:
            raise QueueFull(f"{len(given)} more requests than the {PyDict_Size(self.core.leases)} live ones are more "
                            f"than may be live ({self.core.live_max}, SchedulerConfig.live_requests_max)")
        claim = None
        if tenant is not None or deadline_seconds is not None or priority is not None:
            claim = claim_of(tenant, deadline_seconds, priority)
        if self._observer is not None or self._policy is not None or labels is not None or claim is not None:
            return self.place_each(given, ids, namespace, max_new_tokens, labels, claim)
        if FREE_THREADED:
            with self.core.tree:
                return self.place_many(given, ids, namespace, limit)
        return self.place_many(given, ids, namespace, limit)

    cdef list place_many(self, list prompts, list request_ids, object namespace, int64_t limit):
        """The quick way for several prompts."""
        cdef DecisionCore core = self.core
        cdef uint32_t i, at = 0, prompt_count = <uint32_t> len(prompts)
        cdef int64_t first = -1
        cdef double now = self.time()
        cdef Asked* asked = <Asked*> calloc(prompt_count, sizeof(Asked))
        cdef list keys = [], names = []
        if asked == NULL:
            raise MemoryError("GlobalScheduler.schedule_many")
        what = "prompts"
        try:
            for at in range(prompt_count):
                view_tokens(prompts[at], &asked[at].view)
                asked[at].request.tokens = asked[at].view.data
                asked[at].request.count = asked[at].view.count
                asked[at].request.max_new_tokens = limit
                asked[at].request.now = now
            what = "request_ids"
            first = self.sequence
            self.sequence += prompt_count               # so that others make up ids beyond these
            for at in range(prompt_count):
                keys.append(self.claim(None if request_ids is None else request_ids[at], first + at))
            what = "prompts"
            core.decide_many(asked, prompt_count, namespace, names, &at)
            return self.answer_many(asked, names, keys, request_ids)
        except BaseException as error:
            for i in range(prompt_count):
                if asked[i].booked:
                    core.tree.enter()
                    core.cancelled(asked[i].choice.lease, now)
                    core.tree.leave()
            for key in keys:
                self.give_up(key)
            if first >= 0 and self.sequence == first + prompt_count:
                self.sequence = first                   # nobody has made up an id since: none is made up twice
            raise at_index(error, what, at)
        finally:
            for i in range(prompt_count):
                release_tokens(&asked[i].view)
            free(asked)

    cdef list answer_many(self, Asked* asked, list names, list keys, list request_ids):
        """Enter the leases, and make the Decisions."""
        cdef Py_ssize_t i
        cdef Choice* choice
        decisions = []
        for i in range(len(names)):
            choice = &asked[i].choice
            request_id = None if request_ids is None else request_ids[i]
            decisions.append(new_decision(keys[i] if request_id is None else request_id, names[i], choice.usable,
                                          asked[i].request.count, REASON_NAMES[<int> choice.reason], None))
        for i in range(len(names)):
            self.core.leases[keys[i]] = asked[i].choice.lease
            self.reasons[<int> asked[i].choice.reason] += 1
        self.scheduled += len(names)
        return decisions

    cdef list place_each(self, list prompts, list request_ids, object namespace, object max_new_tokens, list groups,
                         object claim):
        """The way where a policy or an observer is asked about every prompt, or each has a `Claim`."""
        cdef Py_ssize_t at = 0
        decisions = []
        claimed = {} if claim is None else {"tenant": claim.tenant, "deadline_seconds": claim.deadline_seconds,
                                            "priority": claim.priority}
        self.check_many(prompts, request_ids)
        try:
            for at in range(len(prompts)):
                decisions.append(self.schedule(prompts[at], namespace=namespace, max_new_tokens=max_new_tokens,
                                               request_id=None if request_ids is None else request_ids[at],
                                               group=None if groups is None else groups[at], **claimed))
        except BaseException as error:
            for decision in reversed(decisions):
                self.cancel((<Decision> decision).request_id)
            raise at_index(error, "prompts", at)
        return decisions

    cdef int check_many(self, list prompts, list request_ids) except -1:
        """Raise what is wrong with one of several prompts or ids, with its index."""
        cdef TokenView view
        cdef Py_ssize_t at = 0
        what, keys = "prompts", set()
        try:
            for at in range(len(prompts)):
                view_tokens(prompts[at], &view)
                try:
                    check_tokens(&view, 0)
                finally:
                    release_tokens(&view)
            what = "request_ids"
            for at in range(0 if request_ids is None else len(request_ids)):
                key = None if request_ids[at] is None else self.key_of(request_ids[at])
                if key in keys or key in self.core.leases:
                    raise DuplicateRequest(f"request_id {request_ids[at]!r} is live")
                if key is not None:
                    keys.add(key)
        except InvalidInput as error:
            raise at_index(error, what, at)

    cdef Decision place_weighed(self, object token_ids, object request_id, object namespace, object max_new_tokens,
                                object exclude, bint explain, object group, bint of_session):
        """The way where every worker is weighed, some are left out, or somebody looks on: under both locks."""
        cdef DecisionCore core = self.core
        cdef Decision decision
        cdef double now
        before, policy = None, self.rule_for(group)
        with core.tree:
            now = self.time()
            key = self.claim(request_id, self.sequence)
            if request_id is None:
                request_id = key
            try:
                request = self.seen(token_ids, namespace, max_new_tokens, request_id, now, group)
                left_out = core.leave_out(list(iterable("exclude", exclude)))
                try:
                    if self._observer is not None:
                        core.need_eligible()     # what is wrong with the request is found before anybody looks at it
                        estimated_match(self, token_ids, namespace)
                        core.advance(now)
                        before = self._observer.before_decision(core, policy, request, now, explain)
                    decision = core.schedule(token_ids, request_id, key, namespace, output_limit(max_new_tokens), now,
                                             policy, request, explain, of_session)
                finally:
                    core.take_back(left_out)
            except BaseException:
                self.give_up(key)
                raise
            self.sequence += 1
            self.scheduled += 1
            self.count_reason(decision.reason)
            if self._policy_state is not None:
                self._policy_state.on_decision(key, decision, request, now)
            if self._observer is not None:
                self._observer.on_decision(key, decision, before, now)
            return decision

    cdef int count_reason(self, str reason) except -1:
        if reason not in self._reasons and len(self._reasons) >= REASONS_MAX:
            reason = "other"
        self._reasons[reason] = self._reasons.get(reason, 0) + 1
        return 0

    cdef object rule_for(self, object group):
        """The policy that decides: a scheduler's own, or that of samples where E2 is asked for one; None is E2."""
        if self._policy is not None or group is None:
            return self._policy
        from ..policies.sample_groups import SAMPLE_GROUPS  # rules are loaded when they are asked for

        return SAMPLE_GROUPS

    cdef object seen(self, object token_ids, object namespace, object max_new_tokens, object request_id, double now,
                     object group):
        """The request as Python policies and observers see it; None where there are none."""
        if self._policy is None and self._observer is None and group is None:
            return None
        draw = unit_draw(<uint64_t> self._seed, <uint64_t> self.sequence)
        known = {} if self._policy_state is None else self._policy_state.known(token_ids, namespace, now)
        return RequestView(token_ids, namespace, max_new_tokens, self.sequence, draw, request_id, known, group)

    def _book_on(self, uint32_t worker, token_ids, request_id, namespace, max_new_tokens, double now) -> bool:
        """Book a request that another router has placed on a worker. False if it is booked already, or finds no room.
        Raises InvalidInput, InvalidTokens. Under the writers' lock."""
        hashable("namespace of an event", namespace)
        limit = output_limit(max_new_tokens)
        try:
            key = self.claim(request_id, self.sequence)
        except (DuplicateRequest, QueueFull):
            return False
        try:
            request = self.seen(token_ids, namespace, max_new_tokens, request_id, now, None)
            decision = self.core.book_on(worker, token_ids, request_id, key, namespace, limit, now)
        except BaseException:
            self.give_up(key)
            raise
        if self._policy_state is not None:
            self._policy_state.on_decision(key, decision, request, now)
        return True

    # --- questions ---

    def match(self, token_ids, *, namespace=None) -> Match:
        """How much of a prompt each worker is estimated to cache. Changes nothing, takes no lock. `token_ids`,
        `namespace`: as for `schedule`. Returns a Match. Raises InvalidTokens, InvalidInput. O(tokens + workers)."""
        if namespace is not None:
            hashable("namespace", namespace)
        return estimated_match(self, token_ids, namespace)

    def explain(self, token_ids, *, request_id=None, namespace=None, max_new_tokens=None, group=None,
                session=None) -> Explanation:
        """Returns the decision that `schedule` would make now, with every worker's terms. Books nothing; with E2 it
        takes no lock. Arguments are those of `schedule`; `request_id` is for policies that look at it and need not be
        free. Raises InvalidTokens, InvalidInput, NoWorkers. O(tokens + workers)."""
        limit = output_limit(max_new_tokens)
        hashable("namespace", namespace)
        if request_id is not None:
            request_id = request_id_of(request_id)
            hashable("request_id", request_id)
        hashable("group", group)
        of_session = session is not None and names_session(session)
        policy = self.rule_for(group)
        if policy is None:
            return explanation(self.core, None, token_ids, namespace, limit, self.time(), None, of_session)
        with self.core.tree:                     # a Python policy's scores are of these very bookings
            now = self.time()
            request = self.seen(token_ids, namespace, max_new_tokens, request_id, now, group)
            return explanation(self.core, policy, token_ids, namespace, limit, now, request, of_session)

    # --- the rest of a request's life ---

    cdef object key_of(self, object request_id):
        """What a request is, or is to be, distinguished by among the live ones. Raises InvalidInput for what is no
        id."""
        if request_id is not None and is_plain_key(request_id):
            return request_id
        if type(request_id) is not str:
            request_id = request_id_of(request_id)
        try:
            return dict_key(self.core.leases, request_id)
        except TypeError:
            hashable("request_id", request_id)
            raise

    cdef int64_t lease_of(self, object key) except? -1:
        """The lease of a live request, PENDING if it has none. As the writer; a key's hash and equality cannot fail."""
        cdef PyObject* found = PyDict_GetItemWithError(self.core.leases, key)
        return PENDING if found == NULL else <int64_t> <object> found

    def first_token(self, request_id, *, cached_tokens=None) -> bool:
        """The prefill is done. `request_id`: the request's, or its Decision. `cached_tokens`, the engine's word on how
        many of the prompt's tokens it reused, corrects load and estimates.

        Returns False, and counts it, if the request is not live (a late message is normal). Raises InvalidInput; then
        nothing has changed. O(workers that cache the prefix).
        """
        cdef int64_t cached = -1 if cached_tokens is None else whole("cached_tokens", cached_tokens, 0)
        cdef double now
        cdef int64_t lease
        cdef int ending
        key = self.key_of(request_id)
        now = self.time()
        self.core.tree.enter()
        lease = self.lease_of(key)
        ending = self.core.prefilled(lease, cached, now)
        self.core.tree.leave()
        return self.answer(ending, FIRST_TOKEN, key, now, cached, -1)

    def finish(self, request_id, *, output_tokens=None, cached_tokens=None) -> bool:
        """The request is done; its booking ends. `request_id`: the request's, or its Decision. `output_tokens`, how
        many came, teaches the expected output length; `cached_tokens`: as for `first_token`. Returns False, and counts
        it, if the request is not live. Raises InvalidInput; then nothing has changed. O(prefix nodes)."""
        if not self.end(request_id, output_tokens, cached_tokens):
            return False
        add_count(&self.finished, 1)
        return True

    def _end(self, request_id, output_tokens) -> bool:
        """`finish` without counting it."""
        return self.end(request_id, output_tokens, None)

    cdef bint end(self, object request_id, object output_tokens, object cached_tokens) except -1:
        """Whether the request was live, and has ended."""
        cdef int64_t output = -1 if output_tokens is None else whole("output_tokens", output_tokens, 0)
        cdef int64_t cached = -1 if cached_tokens is None else whole("cached_tokens", cached_tokens, 0)
        cdef double now
        cdef int64_t lease
        cdef int ending
        cdef bint over
        key = self.key_of(request_id)
        now = self.time()
        self.core.tree.enter()
        lease = self.lease_of(key)
        ending = self.core.ended(lease, output, cached, now)
        over = self.is_over_unseen(ending, key)
        self.core.tree.leave()
        return over or self.answer(ending, FINISHED, key, now, cached, output)

    def cancel(self, request_id) -> bool:
        """The request will not be served here: give its booking back. `request_id`: the request's, or its Decision.
        Returns False, and counts it, if it is not live. Raises InvalidInput; then nothing has changed. O(1)."""
        key = self.key_of(request_id)
        if not self.give_back(key, self.time()):
            add_count(&self.core.late_calls, 1)
            return False
        add_count(&self.cancelled, 1)
        return True

    def _give_back(self, request_id, double now) -> bool:
        """Cancel without counting it. False if it is not live."""
        return self.give_back(self.key_of(request_id), now)

    cdef bint give_back(self, object key, double now) except -1:
        cdef int64_t lease
        cdef int ending
        cdef bint over
        self.core.tree.enter()
        lease = self.lease_of(key)
        ending = self.core.cancelled(lease, now)
        over = self.is_over_unseen(ending, key)
        self.core.tree.leave()
        return over or ending != LATE and self.answer(ending, CANCELLED, key, now, -1, -1)

    def renew(self, request_id) -> bool:
        """The request is still wanted: its time to live (`SchedulerConfig.lease_seconds`) begins anew. `request_id`:
        the request's, or its Decision. Returns False, and counts it, if it is not live. Nothing else renews it but
        `reconcile`. Raises InvalidInput. O(1)."""
        key = self.key_of(request_id)
        if not self.core.renew(key, self.time()):
            add_count(&self.core.late_calls, 1)
            return False
        return True

    cdef bint is_over_unseen(self, int ending, object key) noexcept:
        """Whether a request is over and nobody follows requests; then its id is free. As the writer."""
        if (ending != DONE or self._policy_state is not None or self._observer is not None
                or self._tenants is not None):
            return False
        del self.core.leases[key]
        return True

    cdef bint answer(self, int ending, Call call, object key, double now, int64_t cached_tokens,
                     int64_t output_tokens) except -1:
        """Whether the request was live; reports it to who looks on, and forgets the id of one that is over."""
        if ending == LATE:
            add_count(&self.core.late_calls, 1)
            return False
        if ending == TOO_MANY_CACHED:
            raise InvalidInput(f"cached_tokens is {cached_tokens}, more than the prompt has")
        try:
            if self._policy_state is not None or self._observer is not None or self._tenants is not None:
                # Before the id is free for another.
                self.report_ending(call, key, now, cached_tokens, output_tokens)
        finally:
            if call != FIRST_TOKEN:              # only whoever ended the lease comes here
                with self.core.tree:
                    del self.core.leases[key]
        return True

    cdef int report_ending(self, Call call, object key, double now, int64_t cached_tokens,
                           int64_t output_tokens) except -1:
        """Report to the policy's state and to the observer what has become of a request."""
        cached = None if cached_tokens < 0 else cached_tokens
        output = None if output_tokens < 0 else output_tokens
        with self.core.tree:
            for one in (self._policy_state, self._observer, self._tenants):
                if one is None:
                    continue
                if call == FIRST_TOKEN:
                    one.on_first_token(key, now, cached)
                elif call == FINISHED:
                    one.on_finish(key, now, cached, output)
                else:
                    one.on_cancel(key, now)
        return 0

    # --- counts ---

    def _note_decision(self, str reason) -> int:
        """Count a decision that was booked beside these calls; returns its number."""
        self.sequence += 1
        self.scheduled += 1
        self.count_reason(reason)
        return self.sequence - 1

    def _counts(self) -> dict[str, int]:
        """What these calls have counted."""
        return {"scheduled": self.scheduled, "finished": self.finished, "cancelled": self.cancelled,
                "late_calls": self.core.late_calls}

    def _reason_counts(self, bint beyond=False) -> dict[str, int]:
        """Decisions by reason; `beyond` leaves out those that a snapshot's counters have a place for."""
        found = Counter(self._reasons)
        for i, reason in enumerate(REASON_NAMES):
            if self.reasons[<int> i] and not (beyond and i < 2):
                found[reason] += self.reasons[<int> i]
        return dict(found)
