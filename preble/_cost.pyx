"""What work costs, and who has how much of it. Owns `CostModel` (seconds as a function of tokens) and `LoadTracker`
(per worker: the work assigned in the history window, the work outstanding, and the leases of live requests).

Neither knows prompts, policies or clocks; times are arguments. Sums are integers of nanoseconds and tokens, so they
never drift and return to exactly zero. Paper section 4.2 (Algorithm 2, PREFILLTIME and DECODETIME).
"""

from array import array
from collections.abc import Iterable

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_STRIDES, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.long cimport PyLong_AsLongLongAndOverflow
from libc.math cimport INFINITY, isfinite, sqrt
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcmp, memset

from preble._core.atomic cimport load32, load_double, load_signed, store32, store_double, store_signed
from preble._core.memory cimport CHUNK_BITS, CHUNK_MASK, slab_close, slab_give, slab_init, slab_take

from .costs.presets import PRESETS
from .errors import InvalidConfig, InvalidInput, UnknownWorker

cdef enum:
    BATCH_MIN = 8                # usual decode batch assumed while fewer requests run
    BATCH_MAX = 64
    PRESSURE_MAX = 2             # seconds others wait for a second of work, at most
    REPEATED_MAX = 10            # and for a second of work that need not be done, at most
    ROW_TOKENS_MAX = 0xFFFFFFFF  # a row counts so many; more changes no decision
    ROWS_MAX = 65536             # workers; untouched rows take no memory
    OUTPUT_UNKNOWN = 128         # output tokens expected while nothing was observed

cdef double WORK_SHARE = 0.5     # of the time in which prefill waits, that goes into it; decoding goes on in between
cdef double STAY_SHARE = 0.125    # of the mean stay at a place, that the last request to end says
cdef double TURN_SHARE = 0.25      # of a turn of all places, that a wait for one counts at most
cdef double PREFILL_MAX = 1e6    # seconds booked for one prefill at most, so that sums of nanoseconds cannot overflow

cdef extern from * nogil:
    void store_cost "preble_store"(const Cost** p, const Cost* value)

# --- cost functions ---------------------------------------------------------------------------------------------------

cdef double linear_part(const Cost* cost, double tokens) noexcept nogil:
    """Time of the layers that see tokens only: linear between knots, beyond the last as between the last two."""
    cdef uint32_t i = 1
    if tokens <= cost.at[0] or cost.knots == 1:
        return cost.seconds[0]
    while i + 1 < cost.knots and tokens > cost.at[i]:
        i += 1
    return cost.seconds[i - 1] + (tokens - cost.at[i - 1]) * (
        (cost.seconds[i] - cost.seconds[i - 1]) / (cost.at[i] - cost.at[i - 1]))


cdef double context_part(const Cost* cost, double context) noexcept nogil:
    if context <= cost.context_from:
        return cost.context_flat
    return cost.context_base + cost.context_slope * context


cdef double pair_part(const Cost* cost, double chunk, double context) noexcept nogil:
    if chunk * context <= cost.pair_from:
        return 0.0
    return cost.pair_base + cost.pair_q * chunk + cost.pair_s * context + cost.pair_qs * chunk * context


cdef double prefill_seconds(const Cost* cost, double missed, double context) noexcept nogil:
    """Seconds to prefill `missed` tokens that end a context of `context` tokens, alone in the batch."""
    if missed <= 0:
        return 0.0
    return cost.start + linear_part(cost, missed) + context_part(cost, context) + pair_part(cost, missed, context)


cdef double token_seconds(const Cost* cost, double context, double batch) noexcept nogil:
    """Seconds of one decode iteration of `batch` requests with `context` tokens each."""
    return linear_part(cost, batch) + context_part(cost, context * batch) + batch * pair_part(cost, 1, context)


cdef int64_t nanoseconds(double seconds) noexcept nogil:
    return <int64_t> (min(seconds, PREFILL_MAX) * 1e9)


cdef double amount(str name, object value, double low=0.0) except? -1.0:
    """`value` as a finite number that is at least `low`; InvalidInput naming it otherwise."""
    cdef double number
    cdef int overflow = 0
    if type(value) is int:                   # almost always; costs no try block
        number = <double> PyLong_AsLongLongAndOverflow(value, &overflow)
        if not overflow and number >= low:
            return number
    try:
        number = value
    except (TypeError, ValueError, OverflowError):
        raise InvalidInput(f"{name} must be a number, got {value!r}") from None
    if not isfinite(number) or number < low:
        raise InvalidInput(f"{name} must be finite and at least {low:g}, got {value!r}")
    return number


def _numbers(str name, values, count) -> tuple[float, ...]:
    """`values` as `count` finite numbers; InvalidConfig naming them otherwise."""
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError, OverflowError):
        raise InvalidConfig(f"CostModel.{name} must be numbers, got {values!r}") from None
    if len(numbers) != count or not all(isfinite(number) for number in numbers):
        raise InvalidConfig(f"CostModel.{name} must be {count} finite numbers, got {values!r}")
    return numbers


cdef class CostModel:
    """Seconds an engine needs, as a function of tokens; never decreasing in any of them. Immutable, so thread-safe.

    `knots` are (tokens in the batch, seconds) points, ascending in both; `context` is (from, flat, base, slope): flat
    seconds up to `from` context tokens, base + slope * context beyond; `pair` is (from, base, q, s, qs): attention of a
    chunk, base + q * chunk + s * context + qs * chunk * context, where chunk * context > from; `start`: seconds that an
    iteration takes longer where there is a prefill in it (engines run decodes from a recorded graph, prefills not).
    Raises InvalidConfig when the result would not be monotone. `name`: what it is called in `stats` and messages.
    """

    def __init__(self, knots, *, context=(0.0, 0.0, 0.0, 0.0), pair=(0.0, 0.0, 0.0, 0.0, 0.0), start=0.0,
                 str name="custom"):
        cdef Cost* c = &self.cost
        try:
            points = [_numbers("knots", point, 2) for point in knots]
        except TypeError:
            raise InvalidConfig(f"CostModel.knots must be (tokens, seconds) points, got {knots!r}") from None
        if not 1 <= len(points) <= KNOTS_MAX:
            raise InvalidConfig(f"CostModel.knots: 1 to {KNOTS_MAX} points are allowed, got {len(points)}")
        if points[0][1] < 0 or any(b[0] <= a[0] or b[1] < a[1] for a, b in zip(points, points[1:])):
            raise InvalidConfig("CostModel.knots must ascend in tokens and not fall in seconds")
        self.name = name
        memset(c, 0, sizeof(Cost))
        c.knots = len(points)
        for i, (tokens, seconds) in enumerate(points):
            c.at[i] = tokens
            c.seconds[i] = seconds
        c.context_from, c.context_flat, c.context_base, c.context_slope = _numbers("context", context, 4)
        c.pair_from, c.pair_base, c.pair_q, c.pair_s, c.pair_qs = _numbers("pair", pair, 5)
        c.start, = _numbers("start", (start,), 1)
        self.assert_monotone()

    def assert_monotone(self) -> None:
        """Raises InvalidConfig if anything could be negative, or more tokens could cost less. Exact, not sampled.
        O(knots).

        The pair term is the only one that may fall with the chunk (q < 0), as long as the linear part or the growth
        with context makes up for it everywhere.
        """
        cdef Cost* c = &self.cost
        cdef double start = max(c.context_from, 0.0), low = 0.0, high, slope
        cdef double root = sqrt(max(c.pair_from, 0.0))         # the shortest fresh prompt that meets the pair term
        cdef uint32_t i, at
        if c.start < 0:
            raise InvalidConfig(f"CostModel {self.name}: start must not be negative, got {c.start:g}")
        if c.context_slope < 0 or c.context_flat < 0 or c.context_base + c.context_slope * start < c.context_flat:
            raise InvalidConfig(f"CostModel {self.name}: context must neither be negative nor fall")
        if c.pair_s < 0 or c.pair_qs < 0 or self.pair_jump(root) < 0:
            raise InvalidConfig(f"CostModel {self.name}: pair must neither be negative nor fall with the context")
        for i in range(c.knots + 1):
            at = min(i, c.knots - 1)
            high = c.at[i] if i < c.knots else INFINITY
            slope = (c.seconds[at] - c.seconds[at - 1]) / (c.at[at] - c.at[at - 1]) if at > 0 else 0.0
            if high > low and slope + c.pair_q + c.pair_qs * least_context(root, low, high) < 0:
                raise InvalidConfig(f"CostModel {self.name}: between {low:g} and {high:g} more tokens cost less")
            low = max(low, high)

    cdef double pair_jump(self, double root):
        """The least that the pair term starts with: over all chunks up to `root`, at context root ** 2 / chunk."""
        cdef Cost* c = &self.cost
        if c.pair_q <= c.pair_s:
            return c.pair_base + (c.pair_q + c.pair_s) * root + c.pair_qs * root * root
        return c.pair_base + 2 * sqrt(c.pair_q * c.pair_s) * root + c.pair_qs * root * root

    @staticmethod
    def preset(str name) -> CostModel:
        """Returns a published model by its `name`, such as "mistral-7b/a6000", or a measured one by its file, whose
        name ends in ".json". Raises InvalidConfig listing the names, or naming the file and what is wrong with it.
        O(knots)."""
        if name.endswith(".json"):
            return CostModel.load(name)
        if name not in PRESETS:
            raise InvalidConfig(f"no cost model preset {name!r}; there are {', '.join(sorted(PRESETS))}, and files "
                                "that end in .json")
        entry = PRESETS[name]
        unit = entry["scale"] / 1000.0
        first, flat, base, slope = entry["context"]
        return CostModel(
            [(tokens, ms * unit) for tokens, ms in entry["knots"]],
            context=(first, flat * unit, base * unit, slope * unit),
            pair=(entry["pair"][0], *[x * unit for x in entry["pair"][1:]]),
            name=name,
        )

    @staticmethod
    def presets() -> list[str]:
        """Returns the names that `preset` knows, sorted. Raises nothing. O(presets)."""
        return sorted(PRESETS)

    @staticmethod
    def fit(samples: Iterable[tuple[int, int, float]], *, decode=(), str name="fitted") -> CostModel:
        """Least relative squares over measured iterations, with no term that falls, so that the result is monotone.
        Returns the model, called `name`.

        `samples`: (missed tokens, context tokens, seconds) of single prefills; `decode`: (batch, context tokens of
        each, seconds) of decode iterations. Raises InvalidInput where there are fewer than 3 samples in total. Needs
        numpy. O(samples), some milliseconds.
        """
        from .costs.fit import fitted
        prefills = [_sample("samples", sample) for sample in samples]
        decodes = [_sample("decode", sample) for sample in decode]
        if len(prefills) + len(decodes) < 3:
            raise InvalidInput(f"CostModel.fit needs at least 3 samples, got {len(prefills) + len(decodes)}")
        for coefficients in fitted(prefills, decodes):
            try:
                return CostModel(name=name, **coefficients)
            except InvalidConfig:            # something falls: the next best
                continue
        raise AssertionError("the last fit falls nowhere")

    def save(self, path, measured=None) -> None:
        """Write the model to the file `path` as JSON, with `measured`: where it comes from, as a dict that JSON can
        hold. Raises InvalidConfig naming the file where that fails; a file of that name is then as it was. O(knots)."""
        from .costs.file import write
        write(path, self.coefficients(), measured)

    @staticmethod
    def load(path) -> CostModel:
        """Returns the model that `save` wrote to the file `path`. Raises InvalidConfig naming the file and what is
        wrong with it. O(knots)."""
        from .costs.file import read, refused
        coefficients = read(path)
        try:
            return CostModel(**coefficients)
        except InvalidConfig as error:
            raise refused(path, error) from error

    def prefill_time(self, missed_tokens, context_tokens=None) -> float:
        """Returns the seconds it takes to prefill `missed_tokens` that end a context of `context_tokens` (None: nothing
        before them), alone in the batch. Raises InvalidInput. O(knots)."""
        missed = amount("missed_tokens", missed_tokens)
        context = missed if context_tokens is None else amount("context_tokens", context_tokens)
        return prefill_seconds(&self.cost, missed, max(missed, context))

    def decode_time(self, output_tokens, context_tokens=0, batch=1) -> float:
        """Returns the seconds one request takes to decode `output_tokens` in a batch of `batch` alike, from
        `context_tokens` on. Raises InvalidInput. O(knots)."""
        tokens = amount("output_tokens", output_tokens)
        middle = amount("context_tokens", context_tokens) + tokens / 2
        return tokens * token_seconds(&self.cost, middle, amount("batch", batch, 1.0))

    def iteration_time(self, prefill_chunks=(), decode_contexts=()) -> float:
        """Returns the seconds of one mixed iteration. `prefill_chunks`: (new tokens, context tokens after them) each;
        `decode_contexts`: the context tokens of each decode, shape [decodes], any iterable; a list of ints and a numpy
        array of int32 or int64 are quickest. Raises InvalidInput. O(chunks + decodes)."""
        cdef Work work = Work(0, 0, 0)
        cdef double q, s, start = 0.0
        for chunk, after in prefill_chunks:
            q = amount("prefill_chunks: new tokens", chunk)
            s = max(q, amount("prefill_chunks: context tokens", after))
            work.tokens += q
            work.context += s
            work.pair_seconds += pair_part(&self.cost, q, s)
            start = self.cost.start if q > 0 else start
        if not PyObject_CheckBuffer(decode_contexts) or not self.add_array(&work, decode_contexts):
            for after in decode_contexts:
                self.add_decode(&work, amount("decode_contexts", after))
        if work.tokens == 0:
            return 0.0
        return start + linear_part(&self.cost, work.tokens) + context_part(&self.cost, work.context) + work.pair_seconds

    cdef inline void add_decode(self, Work* work, double context) noexcept:
        work.tokens += 1
        work.context += context
        work.pair_seconds += pair_part(&self.cost, 1, context)

    cdef bint add_array(self, Work* work, object contexts) except -1:
        """Add the decodes of a 1-D array of int32 or int64; False, and nothing done, for any other buffer."""
        cdef Py_buffer view
        cdef Py_ssize_t i
        cdef int64_t context
        PyObject_GetBuffer(contexts, &view, PyBUF_STRIDES | PyBUF_FORMAT)
        try:
            if view.ndim != 1 or view.format[0] not in b"ilq" or view.format[1] or view.itemsize not in (4, 8):
                return False
            for i in range(view.shape[0]):
                if view.itemsize == 8:
                    context = (<int64_t*> (<char*> view.buf + i * view.strides[0]))[0]
                else:
                    context = (<int32_t*> (<char*> view.buf + i * view.strides[0]))[0]
                if context < 0:
                    amount("decode_contexts", context)
                self.add_decode(work, <double> context)
        finally:
            PyBuffer_Release(&view)
        return True

    def coefficients(self) -> dict[str, object]:
        """Returns the arguments that make this model again, by name. Raises nothing. O(knots)."""
        cdef uint32_t i
        cdef Cost* c = &self.cost
        return {
            "name": self.name,
            "knots": [(c.at[i], c.seconds[i]) for i in range(c.knots)],
            "context": (c.context_from, c.context_flat, c.context_base, c.context_slope),
            "pair": (c.pair_from, c.pair_base, c.pair_q, c.pair_s, c.pair_qs),
            "start": c.start,
        }

    def __reduce__(self):
        return _rebuilt, (self.coefficients(),)

    def __repr__(self) -> str:
        return f"CostModel({self.name!r}, prefill 2048 tokens in {self.prefill_time(2048) * 1000:.0f} ms)"


cdef double least_context(double root, double low, double high) noexcept:
    """The shortest context at which a chunk of `low` to `high` tokens meets the pair term: max(chunk, root ** 2 /
    chunk)."""
    return root * root / high if high <= root else max(low, root)


def _sample(str name, sample) -> tuple[float, float, float]:
    """A measurement as (tokens, context tokens, seconds); InvalidInput otherwise."""
    try:
        tokens, context, seconds = sample
    except (TypeError, ValueError):
        raise InvalidInput(f"{name}: three numbers each, got {sample!r}") from None
    return (amount(f"{name}: tokens", tokens), amount(f"{name}: context tokens", context),
            amount(f"{name}: seconds", seconds, 1e-9))


def steady_ends(CostModel model, contexts, Py_ssize_t steps, double begin, double beside, double slowness):
    """When each of `steps` iterations ends that only decode, the first beginning at `begin`: requests with so many
    context tokens in the first of them, the new token included, and one more in each. An iteration takes what
    `iteration_time` says and `beside`, times `slowness`. Returns a list of seconds. Raises InvalidInput.
    O(steps * decodes)."""
    cdef Work work
    cdef Py_ssize_t step, i
    cdef double seconds, end = begin
    cdef double[::1] at = array("d", [amount("contexts", context) for context in contexts])
    found = []
    for step in range(steps):
        work = Work(0, 0, 0)
        for i in range(at.shape[0]):
            model.add_decode(&work, at[i] + step)
        seconds = 0.0
        if work.tokens:
            seconds = linear_part(&model.cost, work.tokens) + context_part(&model.cost, work.context)
            seconds += work.pair_seconds
        end += (seconds + beside) * slowness
        found.append(end)
    return found


def _rebuilt(coefficients: dict) -> CostModel:
    return CostModel(**coefficients)


# --- load -------------------------------------------------------------------------------------------------------------
# The window of H seconds is a ring of BUCKETS slices with running sums, so booking and expiry are O(1) a request.
# Corrections go to the slice the request was booked in, as long as it is still in the window.

cdef inline void bucket_add(Bucket* total, const Bucket* part, int64_t sign) noexcept nogil:
    total.prefill_ns += sign * part.prefill_ns
    total.requests += sign * part.requests
    total.prompt_tokens += sign * part.prompt_tokens
    total.matched_tokens += sign * part.matched_tokens
    total.output_tokens += sign * part.output_tokens
    total.finished += sign * part.finished
    total.finished_tokens += sign * part.finished_tokens


cdef class LoadTracker:
    """Work per worker: assigned within the window, and outstanding. Not thread-safe by itself: its scheduler calls it
    in single steps.

    `window_seconds` is the paper's H; a worker seen for less than that is scaled up to it, from at least
    `join_seconds` on.
    """

    def __cinit__(self, double window_seconds=180.0, double join_seconds=10.0):
        self.window_seconds = window_seconds
        self.join_seconds = min(join_seconds, window_seconds)
        self.bucket_seconds = window_seconds / BUCKETS
        self.now_bucket = -1
        memset(&self.fleet, 0, sizeof(Bucket))
        memset(&self.budget, 0, sizeof(Budget))
        self.oldest_joined = INFINITY
        self.fleet_output = -1
        self.rows = <Row*> calloc(ROWS_MAX, sizeof(Row))
        if self.rows == NULL or slab_init(&self.leases, sizeof(Lease)):
            raise MemoryError("LoadTracker")

    def __dealloc__(self):
        cdef uint32_t i
        if self.leases.chunks != NULL:
            slab_close(&self.leases, &self.budget)
        if self.rows != NULL:
            for i in range(self.end):
                free(<void*> self.rows[i].cost)
        free(self.workers)
        free(self.rows)

    cdef int open(self, uint32_t worker, const Cost* cost, int64_t places, double now) except -1:
        """Start an empty account for a worker index, which keeps `cost` until `close` returns it and runs so many
        requests at once, 0 where that is not known."""
        cdef uint32_t room = max(16, self.room)
        cdef WorkerLoad* grown
        while worker >= room:
            room *= 2
        if room > self.room:
            grown = <WorkerLoad*> realloc(self.workers, room * sizeof(WorkerLoad))
            if grown == NULL:
                raise MemoryError("LoadTracker.open")
            memset(grown + self.room, 0, (room - self.room) * sizeof(WorkerLoad))
            self.workers = grown
            self.room = room
        self.advance(now)
        memset(&self.workers[worker], 0, sizeof(WorkerLoad))
        self.generations += 1
        self.workers[worker].used = True
        store32(&self.used, self.used + 1)
        self.workers[worker].generation = self.generations
        self.workers[worker].joined_at = now
        self.workers[worker].places = places
        store_double(&self.rows[worker].joined_at, now)
        store_cost(&self.rows[worker].cost, cost)
        self.end = max(self.end, worker + 1)
        self.join_alike(worker)
        self.find_oldest()
        self.retune()
        return 0

    cdef const Cost* close(self, uint32_t worker) noexcept:
        """Forget a worker's account; its leases stay until they end, and then touch nothing of it. The caller frees
        what is returned, once nobody reads it."""
        cdef const Cost* cost = self.rows[worker].cost
        bucket_add(&self.fleet, &self.workers[worker].window, -1)
        store_signed(&self.fleet_waiting_ns, self.fleet_waiting_ns - self.workers[worker].waiting_prefill_ns)
        store_signed(&self.fleet_requests, self.fleet_requests - self.workers[worker].live_requests)
        store_signed(&self.fleet_prompt_tokens, self.fleet_prompt_tokens - self.workers[worker].live_prompt_tokens)
        store_signed(&self.fleet_places_ns, self.fleet_places_ns - self.workers[worker].longer_ns)
        memset(&self.workers[worker], 0, sizeof(WorkerLoad))
        store32(&self.used, self.used - 1)
        store32(&self.rows[worker].eligible, 0)
        store_cost(&self.rows[worker].cost, NULL)
        self.publish(worker)
        while self.end and not self.workers[self.end - 1].used:
            self.end -= 1
        self.find_oldest()
        self.leave_alike(worker)
        self.settle()
        return cost

    cdef void join_alike(self, uint32_t worker) noexcept:
        """A worker whose cost model was set gets the number of those that have the same one, its own if none has."""
        cdef uint32_t i, number = worker
        for i in range(self.end):
            if (i != worker and self.rows[i].cost != NULL
                    and not memcmp(self.rows[i].cost, self.rows[worker].cost, sizeof(Cost))):
                number = self.rows[i].alike
                break
        store32(&self.rows[worker].alike, number)

    cdef void leave_alike(self, uint32_t worker) noexcept:
        """Whoever shares this worker's number as that of its cost model gets another."""
        cdef uint32_t i, first = <uint32_t> -1
        for i in range(self.end):
            if i != worker and self.rows[i].cost != NULL and self.rows[i].alike == worker:
                first = min(first, i)
                store32(&self.rows[i].alike, first)

    cdef void find_oldest(self) noexcept nogil:
        cdef double oldest = INFINITY
        cdef uint32_t i
        for i in range(self.end):
            if self.workers[i].used:
                oldest = min(oldest, self.workers[i].joined_at)
        store_double(&self.oldest_joined, oldest)

    cdef void publish(self, uint32_t worker) noexcept nogil:
        """Bring a worker's row up to date with its account."""
        cdef WorkerLoad* loads = &self.workers[worker]
        cdef Row* row = &self.rows[worker]
        store_double(&row.load_seconds, self.load_seconds(worker))
        self.publish_place(worker)
        store_double(&row.queue_seconds, loads.waiting_prefill_ns * 1e-9)
        store32(&row.live_requests, <uint32_t> loads.live_requests)
        store32(&row.live_output_tokens, <uint32_t> min(loads.live_output_tokens, <int64_t> ROW_TOKENS_MAX))
        store32(&row.live_prompt_tokens, <uint32_t> min(loads.live_prompt_tokens, <int64_t> ROW_TOKENS_MAX))
        store32(&row.waiting_requests, <uint32_t> loads.waiting_requests)
        store_signed(&self.fleet_output, mean_output(&self.fleet))
        store_double(&self.fleet_load, self.fleet.prefill_ns * 1e-9 + self.fleet.output_tokens * self.output_seconds)
        store_double(&self.hit_share, self.fleet.matched_tokens / <double> max(self.fleet.prompt_tokens, 1))

    cdef void publish_place(self, uint32_t worker) noexcept nogil:
        """Bring up to date how long one more request would wait for a place, before the rest of the row. Where as many
        live as may run, it runs when enough of them have ended; all places are free once in a stay. Where far more
        live, it counts as a quarter of a stay: who waits there waits anywhere then, and what is computed twice to wait
        less makes all wait longer."""
        cdef WorkerLoad* loads = &self.workers[worker]
        cdef Row* row = &self.rows[worker]
        cdef int64_t over = loads.live_requests + 1 - loads.places
        cdef uint32_t place_us = 0
        cdef int64_t longer
        cdef double seconds
        if loads.places and over > 0:
            seconds = min(<double> over, TURN_SHARE * loads.places) * loads.stay_seconds / loads.places
            place_us = <uint32_t> min(seconds * 1e6, <double> ROW_TOKENS_MAX)
        longer = max(<int64_t> place_us * 1000 - loads.waiting_prefill_ns, 0)
        store_signed(&self.fleet_places_ns, self.fleet_places_ns + longer - loads.longer_ns)
        loads.longer_ns = longer
        store32(&row.place_us, place_us)

    cdef void note_stay(self, const Lease* lease, double now) noexcept nogil:
        """A request that has had its first token ends: how long it has kept its place."""
        cdef WorkerLoad* loads = &self.workers[lease.worker]
        cdef double stay = now - lease.began_at + lease.prefill_ns * 1e-9
        if loads.places and now > lease.began_at:
            loads.stay_seconds = stay if loads.stay_seconds == 0.0 else (
                loads.stay_seconds + STAY_SHARE * (stay - loads.stay_seconds))

    cdef Lease* lease_at(self, uint32_t index) noexcept nogil:
        return (<Lease*> self.leases.chunks[index >> CHUNK_BITS]) + (index & CHUNK_MASK)

    cdef uint32_t index_of(self, int64_t key) noexcept nogil:
        return <uint32_t> (key & (LEASES_MAX - 1))

    cdef Lease* lease_of(self, int64_t key) noexcept nogil:
        """The lease that `book` gave this key, NULL if it has ended."""
        cdef Lease* lease = self.lease_at(self.index_of(key))
        return lease if lease.serial == key // LEASES_MAX else NULL

    cdef bint is_current(self, Lease* lease) noexcept nogil:
        """Whether the lease's worker is still the one it was booked on."""
        return lease.worker < self.end and self.workers[lease.worker].generation == lease.worker_generation

    cdef void advance(self, double now) noexcept nogil:
        """Let slices older than the window expire. O(workers) once a slice; a clock that jumps back changes nothing."""
        cdef int64_t bucket = <int64_t> (now / self.bucket_seconds) if now > 0 else 0
        cdef int64_t first
        cdef uint32_t i
        if bucket <= self.now_bucket:
            return
        first = max(self.now_bucket + 1, bucket - BUCKETS + 1)
        store_signed(&self.now_bucket, bucket)
        while first <= bucket:
            for i in range(self.end):
                bucket_add(&self.workers[i].window, &self.workers[i].ring[first % BUCKETS], -1)
                bucket_add(&self.fleet, &self.workers[i].ring[first % BUCKETS], -1)
                memset(&self.workers[i].ring[first % BUCKETS], 0, sizeof(Bucket))
            first += 1
        self.retune()

    cdef bint is_behind(self, double now) noexcept nogil:
        """Whether `advance` would let a slice expire."""
        return now > 0 and <int64_t> (now / self.bucket_seconds) > load_signed(&self.now_bucket)

    cdef void retune(self) noexcept nogil:
        """Seconds of worker time per output token, at the fleet's usual batch and each worker's usual context."""
        cdef int64_t live = 0, workers = 0
        cdef double batch, context
        cdef uint32_t i
        for i in range(self.end):
            workers += self.workers[i].used
            live += self.workers[i].live_requests
        batch = min(<double> BATCH_MAX, max(<double> BATCH_MIN, live / <double> max(workers, 1)))
        for i in range(self.end):
            if self.workers[i].used:
                context = self.workers[i].window.prompt_tokens / <double> max(self.workers[i].window.requests, 1)
                self.workers[i].output_token_seconds = token_seconds(self.rows[i].cost, context, batch) / batch
        self.settle()

    cdef void settle(self) noexcept nogil:
        """Bring what is the same for all workers, and every row, up to date."""
        cdef double output = 0.0
        cdef uint32_t i
        for i in range(self.end):
            output += self.workers[i].output_token_seconds         # 0 where nobody is
        store_double(&self.output_seconds, min(output / <double> max(self.used, 1), PREFILL_MAX))
        for i in range(self.end):
            if self.workers[i].used:
                self.publish(i)

    cdef double pressure(self, double load_seconds, uint32_t workers, double longest) noexcept nogil:
        """kappa: seconds that others wait for each second of work, rho / (1 - rho), from the mean load rho of so many
        workers with so much assigned; 2 at most: more would keep hot prefixes where they are for too long."""
        return min(PRESSURE_MAX, self.whole_pressure(load_seconds, workers, longest))

    cdef double whole_pressure(self, double load_seconds, uint32_t workers, double longest) noexcept nogil:
        """The same, 10 at most: of work that is done a second time."""
        cdef double rho = load_seconds / (longest * max(workers, 1))
        return min(REPEATED_MAX, max(rho, 0.0) / (1.0 - min(rho, 0.9)))

    cdef double longest_observed(self, double now) noexcept nogil:
        """How long the oldest worker has been observed, at most the window."""
        cdef double longest = max(self.join_seconds, now - load_double(&self.oldest_joined))
        return min(longest, self.window_seconds)

    cdef double scale(self, uint32_t worker, double now, double longest) noexcept nogil:
        """Factor that makes a newcomer's history comparable with that of workers observed for `longest` seconds."""
        cdef double observed = max(self.join_seconds, now - load_double(&self.rows[worker].joined_at))
        return longest / observed if observed < longest else 1.0

    cdef double done_seconds(self, uint32_t worker, double now) noexcept nogil:
        """D: how much of what waits a worker is estimated to have computed since the last first token. At most as much
        as one of those that wait takes in the mean: a worker that hangs does not look as if it had nothing to do."""
        cdef Row* row = &self.rows[worker]
        cdef double spent = max(now - load_double(&row.working_since), 0.0)
        return min(WORK_SHARE * spent, load_double(&row.queue_seconds) / max(load32(&row.waiting_requests), 1))

    cdef double load_seconds(self, uint32_t worker) noexcept nogil:
        """L: seconds of prefill and decode assigned within the window (paper, Algorithm 2), unscaled."""
        cdef WorkerLoad* loads = &self.workers[worker]
        return loads.window.prefill_ns * 1e-9 + loads.window.output_tokens * loads.output_token_seconds

    cdef uint32_t expected_output(self, uint32_t worker, int64_t max_new_tokens) noexcept nogil:
        """Output tokens to expect: mean seen on the worker, else in the fleet, else 128; never above `max_new_tokens`
        (0: none given)."""
        cdef int64_t expected = mean_output(&self.workers[worker].window)
        if expected < 0:
            return <uint32_t> self.expected_of_fleet(max_new_tokens)
        return <uint32_t> (min(expected, max_new_tokens) if max_new_tokens > 0 else expected)

    cdef int64_t expected_of_fleet(self, int64_t max_new_tokens) noexcept nogil:
        """Output tokens to expect of a request wherever it goes."""
        cdef int64_t expected = load_signed(&self.fleet_output)
        if expected < 0:
            expected = OUTPUT_UNKNOWN
        return min(expected, max_new_tokens) if max_new_tokens > 0 else expected

    cdef int64_t book(self, uint32_t worker, Lease lease, double now) noexcept nogil:
        """Assign a request: returns the key of its lease. Needs slab_reserve of one lease, and `advance`."""
        cdef WorkerLoad* loads = &self.workers[worker]
        cdef Bucket change
        cdef uint32_t index = slab_take(&self.leases)
        self.serials += 1
        lease.serial = self.serials
        lease.index = index
        lease.worker = worker
        lease.worker_generation = loads.generation
        lease.bucket = self.now_bucket
        lease.booked_at = now
        lease.prefilled = False
        self.lease_at(index)[0] = lease
        memset(&change, 0, sizeof(Bucket))
        change.prefill_ns = lease.prefill_ns
        change.requests = 1
        change.prompt_tokens = lease.prompt_tokens
        change.matched_tokens = lease.matched_tokens
        change.output_tokens = lease.expected_output
        if loads.waiting_requests == 0:
            store_double(&self.rows[worker].working_since, now)
        loads.waiting_requests += 1
        self.wait_change(loads, lease.prefill_ns)
        self.live_change(loads, &lease, 1)
        self.enter(&lease, &change, 1)
        return self.serials * LEASES_MAX + index

    cdef void enter(self, Lease* lease, const Bucket* change, int64_t sign) noexcept nogil:
        """Add to the slice a lease was booked in, while that slice is within the window."""
        cdef WorkerLoad* loads = &self.workers[lease.worker]
        if self.now_bucket - lease.bucket < BUCKETS:
            bucket_add(&loads.ring[lease.bucket % BUCKETS], change, sign)
            bucket_add(&loads.window, change, sign)
            bucket_add(&self.fleet, change, sign)
        self.publish(lease.worker)

    cdef void correct_prefill(self, Lease* lease, int64_t prefill_ns) noexcept nogil:
        """The engine reported how much it really had to prefill."""
        cdef Bucket change
        memset(&change, 0, sizeof(Bucket))
        change.prefill_ns = prefill_ns - lease.prefill_ns
        if not lease.prefilled:
            self.wait_change(&self.workers[lease.worker], change.prefill_ns)
        lease.prefill_ns = prefill_ns
        self.enter(lease, &change, 1)

    cdef void reprice(self, uint32_t worker, double factor) noexcept nogil:
        """What a worker was assigned takes `factor` times as long as was booked. The caller settles. O(leases)."""
        cdef WorkerLoad* loads = &self.workers[worker]
        cdef int64_t before = loads.window.prefill_ns, waiting = 0
        cdef uint32_t slot, index
        cdef Lease* lease
        # Live bookings apart from the rest of their slices, so that a slice never holds less than them.
        self.book_again(worker, -1)
        for slot in range(BUCKETS):
            loads.ring[slot].prefill_ns = nanoseconds(loads.ring[slot].prefill_ns * 1e-9 * factor)
        for index in range(self.leases.chunk_count << CHUNK_BITS):
            lease = self.lease_at(index)
            if self.is_of(lease, worker):
                lease.prefill_ns = nanoseconds(lease.prefill_ns * 1e-9 * factor)
                waiting += 0 if lease.prefilled else lease.prefill_ns
        self.book_again(worker, 1)
        self.wait_change(loads, waiting - loads.waiting_prefill_ns)
        loads.window.prefill_ns = 0
        for slot in range(BUCKETS):
            loads.window.prefill_ns += loads.ring[slot].prefill_ns
        self.fleet.prefill_ns += loads.window.prefill_ns - before

    cdef void book_again(self, uint32_t worker, int64_t sign) noexcept nogil:
        """Add the prefill of a worker's live bookings to their slices, or (-1) take it out."""
        cdef uint32_t index
        cdef Lease* lease
        for index in range(self.leases.chunk_count << CHUNK_BITS):
            lease = self.lease_at(index)
            if self.is_of(lease, worker) and self.now_bucket - lease.bucket < BUCKETS:
                self.workers[worker].ring[lease.bucket % BUCKETS].prefill_ns += sign * lease.prefill_ns

    cdef bint is_of(self, Lease* lease, uint32_t worker) noexcept nogil:
        """Whether it is a live booking of this very worker."""
        return lease.serial != 0 and lease.worker == worker and self.is_current(lease)

    cdef void prefilled(self, Lease* lease, double now) noexcept nogil:
        """The first token came: the prefill is no longer outstanding."""
        if not lease.prefilled:
            lease.prefilled = True
            lease.began_at = now
            store_double(&self.rows[lease.worker].working_since, now)
            self.workers[lease.worker].waiting_requests -= 1
            self.wait_change(&self.workers[lease.worker], -lease.prefill_ns)
            self.publish(lease.worker)

    cdef void wait_change(self, WorkerLoad* loads, int64_t prefill_ns) noexcept nogil:
        """More or less prefill is outstanding. The caller publishes."""
        loads.waiting_prefill_ns += prefill_ns
        store_signed(&self.fleet_waiting_ns, self.fleet_waiting_ns + prefill_ns)

    cdef void live_change(self, WorkerLoad* loads, const Lease* lease, int64_t requests) noexcept nogil:
        """A request lives, or (-1) no longer. The caller publishes."""
        loads.live_requests += requests
        loads.live_output_tokens += requests * lease.expected_output
        loads.live_prompt_tokens += requests * lease.prompt_tokens
        store_signed(&self.fleet_requests, self.fleet_requests + requests)
        store_signed(&self.fleet_prompt_tokens, self.fleet_prompt_tokens + requests * lease.prompt_tokens)

    cdef void end_lease(self, Lease* lease, int64_t output_tokens, double now) noexcept nogil:
        """A request finished with `output_tokens` (-1: not reported)."""
        cdef Bucket change
        if self.is_current(lease):
            if lease.prefilled:
                self.note_stay(lease, now)
            self.prefilled(lease, now)
            self.live_change(&self.workers[lease.worker], lease, -1)
            if output_tokens < 0:
                self.publish(lease.worker)
            else:
                memset(&change, 0, sizeof(Bucket))
                change.output_tokens = output_tokens - lease.expected_output
                change.finished = 1
                change.finished_tokens = output_tokens
                self.enter(lease, &change, 1)
        self.drop_lease(lease)

    cdef void void_lease(self, Lease* lease, double now) noexcept nogil:
        """A request ended without result: what it booked is given back."""
        cdef Bucket change
        if self.is_current(lease):
            memset(&change, 0, sizeof(Bucket))
            change.prefill_ns = 0 if lease.prefilled else lease.prefill_ns     # a prefill that was done stays work done
            change.requests = 1
            change.prompt_tokens = lease.prompt_tokens
            change.matched_tokens = lease.matched_tokens
            change.output_tokens = lease.expected_output
            self.prefilled(lease, now)
            self.live_change(&self.workers[lease.worker], lease, -1)
            self.enter(lease, &change, -1)
        self.drop_lease(lease)

    cdef void drop_lease(self, Lease* lease) noexcept nogil:
        cdef uint32_t index = lease.index
        lease.serial = 0
        slab_give(&self.leases, index)

    def account(self, uint32_t worker) -> dict[str, float]:
        """One worker's load: what is outstanding, what the window holds."""
        cdef WorkerLoad* loads
        if worker >= self.end or not self.workers[worker].used:
            raise UnknownWorker(f"no worker with index {worker}")
        loads = &self.workers[worker]
        return {
            "live_requests": loads.live_requests,
            "waiting_requests": loads.waiting_requests,
            "waiting_prefill_seconds": loads.waiting_prefill_ns * 1e-9,
            "place_wait_seconds": self.rows[worker].place_us * 1e-6,
            "live_output_tokens": loads.live_output_tokens,
            "live_prompt_tokens": loads.live_prompt_tokens,
            "window_requests": loads.window.requests,
            "window_prefill_seconds": loads.window.prefill_ns * 1e-9,
            "window_output_tokens": loads.window.output_tokens,
            "load_seconds": self.load_seconds(worker),
            "mean_output_tokens": loads.window.finished_tokens / <double> max(loads.window.finished, 1),
        }

    @property
    def live(self) -> int:
        """Leases open now."""
        return self.leases.live

    def check(self) -> None:
        """Assert that sums equal their parts. O(workers x slices + leases)."""
        cdef uint32_t i, index
        cdef Lease* lease
        live, waiting, waiting_ns, output, prompts = {}, {}, {}, {}, {}
        found = longer = 0
        for index in range(self.leases.chunk_count << CHUNK_BITS):
            lease = self.lease_at(index)
            found += lease.serial != 0
            if lease.serial and self.is_current(lease):
                i = lease.worker
                live[i] = live.get(i, 0) + 1
                output[i] = output.get(i, 0) + lease.expected_output
                prompts[i] = prompts.get(i, 0) + lease.prompt_tokens
                if not lease.prefilled:
                    waiting[i] = waiting.get(i, 0) + 1
                    waiting_ns[i] = waiting_ns.get(i, 0) + lease.prefill_ns
        assert found == self.leases.live, f"{found} leases found, {self.leases.live} counted"
        totals = [0] * 7
        for i in range(self.end):
            assert self.workers[i].live_requests == live.get(i, 0), f"live requests of worker {i}"
            assert self.workers[i].waiting_requests == waiting.get(i, 0), f"waiting requests of worker {i}"
            assert self.workers[i].waiting_prefill_ns == waiting_ns.get(i, 0), f"waiting prefill of worker {i}"
            assert self.workers[i].live_output_tokens == output.get(i, 0), f"expected output of worker {i}"
            assert self.workers[i].live_prompt_tokens == prompts.get(i, 0), f"prompts of worker {i}"
            longer += self.workers[i].longer_ns
            place_ns = <int64_t> self.rows[i].place_us * 1000
            assert self.workers[i].longer_ns == max(place_ns - waiting_ns.get(i, 0), 0), f"places of worker {i}"
            sums = self.ring_sums(i)
            assert sums == bucket_tuple(&self.workers[i].window), f"window sums of worker {i}"
            assert min(sums) >= 0, f"negative window sum of worker {i}: {sums}"
            totals = [a + b for a, b in zip(totals, sums)]
        assert tuple(totals) == bucket_tuple(&self.fleet), "fleet sums"
        assert longer == self.fleet_places_ns, "waits for places of the fleet"
        outstanding = self.fleet_waiting_ns, self.fleet_requests, self.fleet_prompt_tokens
        assert outstanding == tuple([sum(each.values()) for each in (waiting_ns, live, prompts)]), "fleet outstanding"
        self.check_alike()

    cdef check_alike(self):
        """Assert that workers have one number if and only if they have one cost model."""
        cdef uint32_t i
        numbers = {}
        for i in range(self.end):
            if self.rows[i].cost != NULL:
                model = PyBytes_FromStringAndSize(<const char*> self.rows[i].cost, sizeof(Cost))
                assert numbers.setdefault(model, self.rows[i].alike) == self.rows[i].alike, f"cost model of worker {i}"
        assert len(set(numbers.values())) == len(numbers), "two cost models have one number"

    cdef tuple ring_sums(self, uint32_t worker):
        cdef Bucket total
        cdef uint32_t slot
        memset(&total, 0, sizeof(Bucket))
        for slot in range(BUCKETS):
            bucket_add(&total, &self.workers[worker].ring[slot], 1)
        return bucket_tuple(&total)


cdef int64_t mean_output(const Bucket* seen) noexcept nogil:
    """Mean output tokens of what finished, rounded; -1 if nothing did."""
    return (seen.finished_tokens + seen.finished // 2) // seen.finished if seen.finished else -1


cdef tuple bucket_tuple(const Bucket* b):
    return (b.prefill_ns, b.requests, b.prompt_tokens, b.matched_tokens, b.output_tokens, b.finished, b.finished_tokens)
