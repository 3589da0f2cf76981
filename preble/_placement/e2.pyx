"""The E2 rule in compiled code: one price for every worker, in seconds that a request and those beside it will wait;
the lowest wins. Owns the looking, the weighing and the choice; it changes nothing but its scratch rows. `bookings.pyx`
books what is chosen here.

    total = queue + prefill + loading + others + decode + eviction + balance - credit

    queue      max(g (Q - D), T) + g min(Q', 0.3 s) + 4 ms B
                                               what is ahead; a little of it counts twice: decoding goes on between
    prefill    P                               its own missed tokens
    loading    for what it caches in host memory or on disk alone: seconds a token, as learned; where that is more than
               computing it takes, it is computed
    others     P (kappa + 0.1 B) + 0.3 o b n B whom its prefill keeps waiting, whose decoding it interrupts and slows
               + (P - P*) max(3 (kappa' - kappa), 30 B')
                                               more, where there is no room for what another worker caches
    decode     0.3 o b C                       its own output in that batch
    eviction   2 h e P (1 + kappa) + 50 ms     what must be computed again, if it is used as often as the rest; 50 ms
               or min(3 P (1 + kappa), W) more for a copy's room, where others hold the prompt and this one does not;
                                               or, where nobody does, away from its home, but for
                                               one of another cost model that has room
    balance    L / 50 min(2 rho, 1)            so that equals take turns over the window
    credit     what a copy costs here, if saved up  so that copies are made that no request alone would make

    Q  seconds of prefill booked and not seen done;     L  seconds of work assigned within the window (LoadTracker),
       Q' without that of this prompt's own prefix         scaled up for newcomers
    D  of Q, what is estimated to be done: half of the time since the last first token, at most the mean of what waits
    T  until one of `WorkerSpec.max_running` places is free, where as many requests live there: 1 / places of the mean
       stay at one for each that must end first, a quarter of a stay at most (`LoadTracker.publish_place`)
    g  1 - 0.8 m / n where the prompt is a session's next turn and the worker takes who has most of its prompt cached
       first (`WorkerSpec.cached_first`), else 1; m: what it caches of the prompt, which so passes most of what is
       ahead; and nobody else's prompt goes on there, so that what is ahead has as little cached as others
    P  seconds to prefill what the worker lacks
    B  live requests, with C prompt tokens; B' of them  o  output tokens to expect; n: prompt tokens
       wait for their first token
    b  seconds that a token of context adds to an       h  share of the window's prompt tokens that was cached
       iteration (cost model)                           e  what must be evicted, as a share of what is missed
    kappa  seconds that the fleet's others wait for a second of work (`LoadTracker.pressure`), 2 at most; kappa' 10
    P*     seconds to prefill what nobody caches
    W      mean of Q, or T if that is more, of the workers that take requests: where nobody waits, nothing is gained by
           what is not moved
    home   who held last what is known of a prompt, and is no holder any more, if nobody still holds more: its siblings
           meet there again, instead of each idle worker computing it once
    rho    L over the time observed: on a fleet with little to do a cache of some hundred tokens outweighs the turns
    saved up: by how much the best holder's total was above what it would be on an average one of the others, were the
       prefix there; added up over the requests that share it (`copy_credits.pxd`). A copy spends it all. It pays for
       none that would drive out what its worker was asked for again: that would be copied back at once, and so on

Who caches the prompt is kept because P is more elsewhere, and left as soon as waiting and decoding there cost more than
that: there is no gate. What the choice is called follows from it:

    exploit     the longest hit is more than `exploit_ratio` of the prompt, and the choice holds 0.9 of it
    escape      it is, and the choice does not; where other routers place requests, only for more than these may hide
    explore     it is not (paper Algorithm 1)
    rendezvous  the same, drawn, where other routers place requests, too (`agree`)

docs/e2.md has an example in numbers, docs/experiments/one-price.md how each constant was found. The paper's own rule is
`preble/policies/e2_paper.py`.

All of this runs as the tree's writer, or as a reader with a slot, for explanations; so it reads with atomic loads.
"""

from libc.math cimport INFINITY, log, pow
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from preble._core.atomic cimport load32, load64, load_double, load_signed, store_double, store_signed
from preble._cost cimport Cost, Lease, LoadTracker, Row, prefill_seconds
from preble._core.tree.layout cimport (Tree, WorkerMarks, index_of, load_run, load_workers, mark_at, node_at,
                                       worker_of)
from preble._core.memory cimport NONE
from preble._core.tree.nodes cimport confirmed_tokens, held_at, last_word, on_gpu
from preble._core.tree.parts cimport hits_estimate
from preble._placement.copy_credits cimport CREDITS, Credit, credited_node, saved
from preble._kv_index.load_rates cimport DISK, HOST, LoadRates, load_seconds_of, note_load, note_other, open_rates
from preble._radix cimport RadixTree
from preble._kv_index.cache_accuracy cimport FULL_ACCURACY, CacheAccuracy

cdef extern from * nogil:
    const Cost* load_cost "preble_load"(const Cost** p)

cdef enum:
    WORKERS_MAX = 65536
    HEAD_TOKENS = 16             # by which routers agree on a worker
    DRIVEN_OUT_LOOKED = 64       # marks, of those that a copy would drive out
    PLACED_LATELY = 256          # bookings that say how much others place

cdef double HOLDER_SHARE_MIN = 0.9  # of the longest cached prefix: who holds as much exploits it
cdef double BEHIND_SECONDS = 0.3  # of what is ahead, that counts twice
cdef double PASSED_SHARE = 0.8   # of what is ahead, that a session's next turn passes where all of it is cached
cdef double REQUEST_SECONDS = 0.004  # by which a live request lengthens the wait for a first token
cdef double INTERRUPTED_SHARE = 0.1  # of a prefill, that each request which decodes there waits for it
cdef double TOGETHER_SHARE = 0.3  # of its output, that a request decodes with those that are there now
cdef double EVICTED_USES = 2.0   # of what is evicted, for each use of what is cached
cdef double MOVED_USES = 3.0     # of what is moved away from its home
cdef double COPY_SECONDS = 0.05  # for the room that a copy takes of what others hold
# A copy that drives something out, which is copied back, and so on, counts as so many (docs/experiments/copies.md):
cdef double FLEET_ROUNDS = 3.0   # for what waits in the fleet, by kappa,
cdef double WAITING_ROUNDS = 30.0  # and for each that waits on the worker
cdef double REUSED_HITS = 1.0    # within the window; who was asked for no more often was never used again
cdef double LOAD_SHARE = 0.02    # of a second of load,
cdef double HALF_BUSY = 0.5      # on a worker that is busy for so much of its time or more
cdef double OTHERS_MIN = 0.001
cdef double ROUNDED_UP = 1.0 + 1e-12  # a sum in another order
cdef double WEIGHT_MIN = 1e-9    # seconds; less may be nothing, rounded
cdef double UNSEEN_DELAYS = 20.0  # so many delays of other routers' reports is their work that a decision reckons with
cdef double DRAW_QUEUE_WEIGHT = 3.0  # how often a queue counts again in a draw


cdef int new_scratch(Scratch* s, uint32_t room) noexcept nogil:
    """Rows for `room` workers; -1 when memory is out."""
    s.room = room
    s.workers = s.count = 0
    s.held = <uint32_t*> calloc(2 * <size_t> max(room, 1), sizeof(uint32_t))
    s.terms = <Terms*> calloc(max(room, 1), sizeof(Terms))
    s.away = <Away*> calloc(max(room, 1), sizeof(Away))
    if s.held == NULL or s.terms == NULL or s.away == NULL:
        free_scratch(s)
        return -1
    s.met = s.held + max(room, 1)
    s.some_away = False
    return 0


cdef void free_scratch(Scratch* s) noexcept nogil:
    free(s.held)
    free(s.terms)
    free(s.away)
    s.held = NULL
    s.terms = NULL
    s.away = NULL


cdef void clear_scratch(Scratch* s) noexcept nogil:
    """Ready for the next decision. O(workers met)."""
    cdef uint32_t at
    for at in range(s.count):
        s.held[s.met[at]] = 0
    s.count = 0


cdef list rows_of(Scratch* s):
    """(index, usable, L, P, the other terms, the last of them loading, tokens loaded from host memory and from disk,
    what is compared, candidate) of each worker that might take the request."""
    cdef uint32_t i
    cdef Terms* of = s.terms
    return [(i, of[i].usable, of[i].load, of[i].prefill, of[i].queue, of[i].others, of[i].decode, of[i].eviction,
             of[i].balance, of[i].credit, of[i].loading, of[i].loaded[HOST], of[i].loaded[DISK], of[i].total,
             bool(of[i].candidate))
            for i in range(s.workers) if of[i].weighed]


cdef inline uint64_t mixed(uint64_t x) noexcept nogil:
    """Every bit depends on every bit: the finalizer of splitmix64."""
    x = (x ^ (x >> 30)) * <uint64_t> 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * <uint64_t> 0x94D049BB133111EB
    return x ^ (x >> 31)


cdef uint64_t head_of(const Placement* request, uint32_t held) noexcept nogil:
    """A number made of the first tokens of a prompt after those that are held."""
    cdef uint32_t at = min(held, request.count - 1)
    cdef uint32_t end = min(at + HEAD_TOKENS, request.count)
    cdef uint64_t head = at
    while at < end:
        head = mixed(head + <uint64_t> request.tokens[at])
        at += 1
    return head


cdef double level_of(const Scratch* s, double unseen) noexcept nogil:
    """Up to where `unseen` seconds fill up the heights of the scratch, the lowest first."""
    cdef double level = INFINITY, before = INFINITY, below
    cdef uint32_t i, count
    while level < before or before == INFINITY:
        before = level
        below = 0.0
        count = 0
        for i in range(s.workers):
            if s.terms[i].height < before:
                below += s.terms[i].height
                count += 1
        if count == 0:
            return before
        level = min((below + unseen) / count, before)
    return level


cdef inline void fit(Terms* terms, const Row* row, uint32_t held, uint32_t count) noexcept nogil:
    """Fill in what a worker can use of a prompt of which it holds so much."""
    cdef uint32_t block_size, most = count - 1
    terms.whole = terms.usable = terms.passes = 0
    if held == 0:
        return
    block_size = load32(&row.block_size)
    terms.whole = held
    if block_size > 1:
        terms.whole -= held % block_size
        most -= most % block_size
    terms.usable = min(terms.whole, most)
    terms.passes = terms.usable if load32(&row.cached_first) else 0


cdef void load(Terms* terms, const Scratch* s, uint32_t worker) noexcept nogil:
    """Fill in what must be loaded of what can be used."""
    if s.some_away and terms.usable:
        terms.loading = s.away[worker].seconds
        terms.loaded[HOST] = s.away[worker].loaded[HOST]
        terms.loaded[DISK] = s.away[worker].loaded[DISK]
    else:
        terms.loading = 0.0
        terms.loaded[HOST] = terms.loaded[DISK] = 0


cdef inline double still_ahead(const Terms* terms, const Prices* prices) noexcept nogil:
    """g: how much of what is ahead on a worker stays ahead of this prompt."""
    return 1.0 - prices.passed * terms.passes


cdef inline double lacking_share(int64_t room, int64_t missed, const Prices* prices) noexcept nogil:
    """What `room` tokens lack for the missed tokens and the expected output, as a share of the missed, 1 at most."""
    cdef double need = missed + prices.output_tokens - max(room, 0)
    return min(need / missed, 1.0) if need > 0.0 else 0.0


cdef inline double evicted_share(const WorkerMarks* marks, const Row* row, int64_t missed,
                                 const Prices* prices) noexcept nogil:
    """e: what must leave a worker's GPU memory, as a share of the missed."""
    cdef int64_t room = (load_signed(&marks.capacity) - load_signed(&marks.tokens) + load_signed(&marks.away)
                         - load32(&row.live_output_tokens))
    return lacking_share(room, missed, prices)


cdef inline double least_beside(const Row* row, const Prices* prices) noexcept nogil:
    """At most what a worker's total comes to beside the prompt's own prefill and what is ahead: what is known of it by
    a look at one row, without a division."""
    cdef double load = load_double(&row.load_seconds)
    return (load32(&row.live_requests) * prices.each_live
            + prices.context_seconds * load32(&row.live_prompt_tokens)
            + LOAD_SHARE * load * min(load * prices.full_share, 1.0))


cdef inline void charge_copy(Terms* terms, uint32_t worker, uint32_t least_held, const Prices* prices) noexcept nogil:
    """Add the room that a copy takes, where others are holders of the prompt (`least_held` is not NONE) and this worker
    is none; where nobody is, and another worker is its home, what it costs to move it: but to one of another kind that
    has room. The worker was weighed last."""
    cdef double seconds = 0.0
    if least_held != NONE:
        seconds = COPY_SECONDS if terms.whole < least_held else 0.0
    elif prices.home != NONE and prices.home != worker and (terms.must_evict or prices.alike == prices.home_alike):
        seconds = prices.fleet.ahead / max(prices.fleet.workers, 1)
        seconds = min(MOVED_USES * terms.prefill * (1.0 + prices.pressure), seconds)
    terms.eviction += seconds
    terms.total += seconds


cdef class E2:
    """The rule over one tree and one load tracker, the writer's scratch rows, and what is saved up for copies."""

    def __cinit__(self):
        self.credits = <Credit*> calloc(CREDITS, sizeof(Credit))
        self.rates = <LoadRates*> calloc(WORKERS_MAX, sizeof(LoadRates))     # untouched rows take no memory
        self.loaded = <int64_t*> calloc(WORKERS_MAX * MEDIA, sizeof(int64_t))
        if self.credits == NULL or self.rates == NULL or self.loaded == NULL:
            raise MemoryError("E2")

    def __init__(self, RadixTree tree not None, LoadTracker loads not None, *, double exploit_ratio,
                 double peer_delay_seconds, double host_token_seconds, double disk_token_seconds):
        self.tree = tree
        self.loads = loads
        self.stated_rates[HOST] = host_token_seconds
        self.stated_rates[DISK] = disk_token_seconds
        self.accuracy = CacheAccuracy(tree.t.window_seconds / 3.0)
        self.exploit_ratio = exploit_ratio
        self.unseen_seconds = UNSEEN_DELAYS * peer_delay_seconds

    def __dealloc__(self):
        free(self.credits)
        free(self.rates)
        free(self.loaded)
        free_scratch(&self.scratch)

    cdef int grow(self, uint32_t room) except -1:
        """Scratch rows for `room` workers."""
        cdef Scratch more
        if room > self.scratch.room:
            if new_scratch(&more, max(16, 2 * room)):
                raise MemoryError("E2.grow")
            free_scratch(&self.scratch)
            self.scratch = more
        return 0

    def reprice_credits(self, double factor) -> None:
        """One worker's work takes `factor` times as long as was thought: what is saved up, in seconds of all workers,
        changes by its share of that. The tree's writer calls it. O(credits)."""
        cdef double share = pow(factor, 1.0 / max(load32(&self.loads.used), 1))
        cdef uint32_t i
        for i in range(CREDITS):
            store_double(&self.credits[i].seconds, self.credits[i].seconds * share)

    # --- what loads take ---

    cdef void state_rates(self, uint32_t worker) noexcept nogil:
        """A worker's loads take what was stated, until its times say something else; it has loaded nothing."""
        cdef int64_t* loaded = &self.loaded[worker * <uint32_t> MEDIA]
        open_rates(&self.rates[worker], self.stated_rates[HOST], self.stated_rates[DISK])
        store_signed(&loaded[HOST], 0)
        store_signed(&loaded[DISK], 0)

    cdef double pressure_now(self) noexcept nogil:
        """kappa, as of the slice of time that the load tracker is in."""
        cdef Outstanding fleet = self.of_fleet()
        cdef double now = self.loads.now_bucket * self.loads.bucket_seconds
        return self.loads.pressure(fleet.load, fleet.workers, self.loads.longest_observed(now))

    cdef void book_load(self, Lease* lease, const Choice* choice, bint from_peer) noexcept nogil:
        """Note in a booking what its worker must load for it, and count it, unless another router does."""
        cdef int64_t* loaded = &self.loaded[choice.worker * <uint32_t> MEDIA]
        cdef uint32_t medium
        for medium in range(<uint32_t> MEDIA):
            lease.loaded[medium] = choice.loaded[medium]
            if not from_peer:
                store_signed(&loaded[medium], loaded[medium] + choice.loaded[medium])

    def loaded_tokens(self, uint32_t worker) -> tuple[int, int]:
        """Tokens that the requests placed here, and not by other routers, were to load on a worker since it was added:
        from host memory, from disk."""
        cdef int64_t* loaded = &self.loaded[worker * <uint32_t> MEDIA]
        return load_signed(&loaded[HOST]), load_signed(&loaded[DISK])

    cdef double loading_of(self, const Lease* lease) noexcept nogil:
        """Seconds that a request is thought to have waited for what was loaded."""
        return load_seconds_of(&self.rates[lease.worker], lease.loaded[HOST], lease.loaded[DISK])

    cdef void learn_load(self, Lease* lease, int64_t cached_tokens, double now) noexcept nogil:
        """A request's first token came: what its worker's loads take, if it found nothing waiting, nothing came
        meanwhile, and the engine says no other number of cached tokens."""
        cdef WorkerMarks* marks = &load_workers(&self.tree.t.workers)[lease.worker]
        cdef Row* row = &self.loads.rows[lease.worker]
        cdef double late = now - lease.booked_at - <double> lease.prefill_ns * 1e-9
        if not self.loads.is_current(lease):     # first: the worker of one that is not may be none at all
            return
        if ((load_signed(&marks.below) == 0 and load_signed(&marks.away) == 0) or not lease.alone or lease.prefilled
                or load32(&row.waiting_requests) != 1
                or 0 <= cached_tokens < <int64_t> lease.matched_tokens):
            return
        if lease.loaded[HOST] or lease.loaded[DISK]:
            note_load(&self.rates[lease.worker], late, &lease.loaded[0])
        elif cached_tokens <= <int64_t> lease.matched_tokens + load32(&row.block_size):
            note_other(&self.rates[lease.worker], late)

    def load_rates(self, uint32_t worker) -> tuple[float, float]:
        """Seconds that a worker takes to bring a token's KV into its GPU's memory: from host memory, from disk."""
        return self.rates[worker].seconds[HOST], self.rates[worker].seconds[DISK]

    # --- looking ---

    cdef void discount(self, Scratch* s) noexcept nogil:
        """Of what was noted, count as much as each worker's accuracy says."""
        cdef uint32_t at
        for at in range(s.count):
            if load32(&self.accuracy.rows[s.met[at]].eighths) != <uint32_t> FULL_ACCURACY:
                s.held[s.met[at]] = self.accuracy.estimated(s.met[at], s.held[s.met[at]])

    cdef void look_for_away(self, Scratch* s, const Placement* request) noexcept nogil:
        """Of what was noted, separate what is in the GPU's memory and what must be loaded; where computing the latter
        takes less time, do not count on it. O(path) for each worker that has some away."""
        cdef uint32_t at, i, here, far, key, loaded
        cdef WorkerMarks* marks
        cdef const Cost* cost
        cdef Terms all, near
        cdef Away* away
        for at in range(s.count):
            i = s.met[at]
            away = &s.away[i]
            memset(away, 0, sizeof(Away))
            marks = &load_workers(&self.tree.t.workers)[i]
            cost = load_cost(&self.loads.rows[i].cost)
            if load_signed(&marks.away) == 0 or cost == NULL:
                continue
            key = load32(&marks.key)
            here = on_gpu(&self.tree.t, request.walk, key, s.held[i], &far)
            fit(&all, &self.loads.rows[i], s.held[i], request.count)
            fit(&near, &self.loads.rows[i], here, request.count)
            loaded = all.usable - near.usable
            away.loaded[DISK] = min(far, loaded)
            away.loaded[HOST] = loaded - away.loaded[DISK]
            away.seconds = load_seconds_of(&self.rates[i], away.loaded[HOST], away.loaded[DISK])
            if (away.seconds + prefill_seconds(cost, request.count - all.usable, request.count)
                    > prefill_seconds(cost, request.count - near.usable, request.count)):
                s.held[i] = here
                memset(away, 0, sizeof(Away))

    cdef uint32_t gather(self, Scratch* s, const Placement* request) noexcept nogil:
        """Note what workers hold of the walked prefix; returns the most, in whole blocks, that one of those that take
        requests does. O(path and marks on it)."""
        cdef Tree* t = &self.tree.t
        cdef Row* row
        cdef uint32_t best = 0, at, held, i = request.walk.node
        while i != NONE and load32(&node_at(t, i).parent) != NONE:
            s.count = held_at(t, i, request.walk.matched, s.held, s.met, s.count, s.workers)
            i = load32(&node_at(t, i).parent)
        if load32(&self.accuracy.inaccurate):
            self.discount(s)
        s.some_away = load_signed(&t.away) != 0
        if s.some_away:
            self.look_for_away(s, request)
        for at in range(s.count):
            row = &self.loads.rows[s.met[at]]
            held = s.held[s.met[at]]
            if held > best and load32(&row.eligible):
                best = max(best, held - held % max(load32(&row.block_size), 1))
        return best

    cdef bint goes_on(self, const Placement* request) noexcept nogil:
        """Whether a prompt is a session's next turn: its client names one, or it leads into a prompt that no other has
        gone on from. O(1)."""
        if request.of_session:
            return True
        return (request.walk.matched > 0
                and load32(&node_at(&self.tree.t, request.walk.node).first_child) == NONE)

    cdef uint32_t home_of(self, const Scratch* s, const Placement* request, uint32_t best) noexcept nogil:
        """Who held last what is known of a prompt, where that is more than `exploit_ratio` of it; NONE if it takes no
        requests now or has been found not to keep what it is sent, or if somebody still holds more, `best` tokens.
        O(path)."""
        cdef Tree* t = &self.tree.t
        cdef uint32_t i = request.walk.node, known = request.walk.matched, worker
        cdef uint64_t word
        while known > self.exploit_ratio * request.count:
            word = last_word(node_at(t, i))
            worker = index_of(worker_of(word))
            if (worker < s.workers and load32(&load_workers(&t.workers)[worker].key) == worker_of(word)
                    and load32(&self.loads.rows[worker].eligible) == ANY_REQUEST
                    and load32(&self.accuracy.rows[worker].eighths) == <uint32_t> FULL_ACCURACY):
                return worker if s.held[worker] >= best else NONE
            known = load_run(&node_at(t, i).run).start
            i = load32(&node_at(t, i).parent)
        return NONE

    cdef Outstanding of_fleet(self) noexcept nogil:
        """What is outstanding on the workers that take requests, of all if none does. A worker that takes none is no
        place to compare others with. O(1) where all do, else O(workers)."""
        cdef Outstanding of
        cdef Row* row
        cdef uint32_t i, takes_any = load32(&self.eligible_workers)
        memset(&of, 0, sizeof(Outstanding))
        if takes_any and takes_any < load32(&self.loads.used):
            for i in range(load32(&self.tree.t.worker_end)):
                row = &self.loads.rows[i]
                if load32(&row.eligible) != NO_REQUEST:
                    of.workers += 1
                    of.ahead += max(load_double(&row.queue_seconds), load32(&row.place_us) * 1e-6)
                    of.live_requests += load32(&row.live_requests)
                    of.prompt_tokens += load32(&row.live_prompt_tokens)
                    of.load += load_double(&row.load_seconds)
            return of
        of.workers = load32(&self.loads.used)
        of.ahead = (load_signed(&self.loads.fleet_waiting_ns) + load_signed(&self.loads.fleet_places_ns)) * 1e-9
        of.live_requests = load_signed(&self.loads.fleet_requests)
        of.prompt_tokens = load_signed(&self.loads.fleet_prompt_tokens)
        of.load = load_double(&self.loads.fleet_load)
        return of

    # --- weighing ---

    cdef void size_up(self, Terms* terms, uint32_t worker, uint32_t held, uint32_t count) noexcept nogil:
        """Fill in what a worker can use of the prompt."""
        fit(terms, &self.loads.rows[worker], held, count)

    cdef Prices prices(self, const Placement* request, uint32_t best) noexcept nogil:
        """What one decision multiplies with, before it has met a worker; `best` tokens are the most that one has."""
        cdef Prices prices
        prices.now = request.now
        prices.longest = self.loads.longest_observed(request.now)
        prices.fleet = self.of_fleet()
        prices.pressure = self.loads.pressure(prices.fleet.load, prices.fleet.workers, prices.longest)
        prices.repeated_pressure = self.loads.whole_pressure(prices.fleet.load, prices.fleet.workers, prices.longest)
        prices.repeated_pressure = FLEET_ROUNDS * (prices.repeated_pressure - prices.pressure)
        prices.output_tokens = self.loads.expected_of_fleet(request.max_new_tokens)
        prices.evicted_uses = EVICTED_USES * load_double(&self.loads.hit_share)
        prices.passed = PASSED_SHARE / request.count if self.goes_on(request) else 0.0
        prices.alike = prices.usable = prices.home = NONE
        prices.prefill = prices.context_seconds = prices.own = prices.repeated = prices.each_live = 0.0
        prices.best = min(best, request.count - 1)
        prices.full_share = 1.0 / (HALF_BUSY * prices.longest)
        prices.some_below = load_signed(&self.tree.t.below) != 0
        return prices

    cdef void price_of(self, Prices* prices, uint32_t worker, uint32_t usable, uint32_t count) noexcept nogil:
        """Fill in what workers of one cost model that hold as much have in common. 0 where a reader meets one that has
        just left: its answer is thrown away (`explain`)."""
        cdef Row* row = &self.loads.rows[worker]
        cdef const Cost* cost = load_cost(&row.cost)
        prices.alike = load32(&row.alike)
        prices.usable = usable
        prices.prefill = prefill_seconds(cost, count - usable, count) if cost != NULL else 0.0
        prices.context_seconds = (TOGETHER_SHARE * prices.output_tokens * cost.context_slope
                                  if cost != NULL else 0.0)
        prices.own = prices.prefill * (1.0 + prices.pressure)
        prices.repeated = 0.0
        if usable < prices.best and cost != NULL and (prices.repeated_pressure > 0.0 or prices.fleet.live_requests):
            prices.repeated = max(prices.prefill - prefill_seconds(cost, count - prices.best, count), 0.0)
        prices.each_live = REQUEST_SECONDS + INTERRUPTED_SHARE * prices.prefill + prices.context_seconds * count

    cdef double sent_away_seconds(self, uint32_t worker, int64_t missed, const Terms* terms,
                                  const Prices* prices) noexcept nogil:
        """The eviction of a worker, `terms.eviction` where all that leaves its GPU's memory is gone, if below that lies
        more: bringing back what goes there, if it is used as often as the rest; what has no room there is gone."""
        cdef WorkerMarks* marks = &load_workers(&self.tree.t.workers)[worker]
        cdef int64_t below = load_signed(&marks.below), room
        cdef double gone, back
        if below == 0:
            return terms.eviction
        room = (max(below, load_signed(&marks.capacity)) - load_signed(&marks.tokens)
                - load32(&self.loads.rows[worker].live_output_tokens))
        gone = lacking_share(room, missed, prices) * terms.prefill * prices.evicted_uses * (1.0 + prices.pressure)
        gone = min(gone, terms.eviction)
        back = prices.evicted_uses * load_seconds_of(
            &self.rates[worker],
            <uint32_t> (missed + terms.loaded[HOST] + terms.loaded[DISK] + prices.output_tokens), 0)
        return gone + min(terms.eviction - gone, back)

    cdef double ahead_seconds(self, uint32_t worker, double stays, double now) noexcept nogil:
        """Q - D, of which such a share stays ahead; or until a place is free, if that is longer."""
        cdef double queue = load_double(&self.loads.rows[worker].queue_seconds)
        cdef double place = load32(&self.loads.rows[worker].place_us) * 1e-6
        queue = max(queue - self.loads.done_seconds(worker, now), 0.0) * stays if queue > 0.0 else 0.0
        return max(queue, place)

    cdef void add_outstanding(self, Outstanding* of, uint32_t worker, double now) noexcept nogil:
        """Count one more worker."""
        cdef Row* row = &self.loads.rows[worker]
        of.workers += 1
        of.ahead += self.ahead_seconds(worker, 1.0, now)
        of.live_requests += load32(&row.live_requests)
        of.prompt_tokens += load32(&row.live_prompt_tokens)

    cdef void weigh(self, Terms* terms, uint32_t worker, const Placement* request, Prices* prices) noexcept nogil:
        """Fill in every term of a worker that was sized up."""
        cdef double ahead = self.ahead_seconds(worker, still_ahead(terms, prices), prices.now)
        self.weigh_most(terms, worker, request, ahead, prices)
        self.weigh_behind(terms, worker, request, prices)

    cdef void weigh_most(self, Terms* terms, uint32_t worker, const Placement* request, double ahead,
                         Prices* prices) noexcept nogil:
        """Fill in every term, of the queue, of which `ahead` seconds stay ahead, all but what counts twice: at most the
        total that `weigh` comes to."""
        cdef Row* row = &self.loads.rows[worker]
        cdef double live = load32(&row.live_requests), evicted
        if load32(&row.alike) != prices.alike or terms.usable != prices.usable:
            self.price_of(prices, worker, terms.usable, request.count)
        terms.load = load_double(&row.load_seconds)
        if prices.now - load_double(&row.joined_at) < prices.longest:
            terms.load *= self.loads.scale(worker, prices.now, prices.longest)
        terms.prefill = prices.prefill
        terms.queue = ahead + REQUEST_SECONDS * live
        terms.others = (prices.prefill * (prices.pressure + INTERRUPTED_SHARE * live)
                        + prices.context_seconds * request.count * live)
        terms.decode = prices.context_seconds * load32(&row.live_prompt_tokens)
        evicted = evicted_share(&load_workers(&self.tree.t.workers)[worker], row, request.count - terms.usable, prices)
        terms.must_evict = evicted > 0.0
        terms.repeated = 0.0
        if terms.must_evict and prices.repeated > 0.0:
            terms.repeated = prices.repeated * max(prices.repeated_pressure,
                                                   WAITING_ROUNDS * load32(&row.waiting_requests))
            terms.others += terms.repeated
        terms.eviction = evicted * prices.evicted_uses * prices.prefill * (1.0 + prices.pressure)
        if prices.some_below and terms.eviction > 0.0:
            terms.eviction = self.sent_away_seconds(worker, request.count - terms.usable, terms, prices)
        terms.balance = LOAD_SHARE * terms.load * min(terms.load / (HALF_BUSY * prices.longest), 1.0)
        terms.credit = 0.0
        terms.total = (terms.queue + terms.prefill + terms.others + terms.decode + terms.eviction + terms.balance
                       + terms.loading)

    cdef void weigh_behind(self, Terms* terms, uint32_t worker, const Placement* request,
                           const Prices* prices) noexcept nogil:
        """Add how much of what is ahead counts twice: decoding goes on between the chunks of others' prefills. What is
        ahead of a prompt whose prefix was sent there and not yet seen done is that very prefix, for whose end it waits
        once."""
        cdef double ahead = load_double(&self.loads.rows[worker].queue_seconds)
        cdef const Cost* cost
        cdef uint32_t key, known
        if ahead <= 0.0:
            return
        if terms.usable:
            key = load32(&load_workers(&self.tree.t.workers)[worker].key)
            known = confirmed_tokens(&self.tree.t, request.walk, key)
            cost = load_cost(&self.loads.rows[worker].cost)
            if known < terms.usable and cost != NULL:
                ahead -= prefill_seconds(cost, terms.usable - known, terms.usable)
        ahead = min(max(ahead, 0.0), BEHIND_SECONDS) * still_ahead(terms, prices)
        terms.queue += ahead
        terms.total += ahead

    cdef double price_of_mean(self, const Placement* request, const Terms* home, const Outstanding* of,
                              const Prices* prices) noexcept nogil:
        """What the total would be on a worker with the mean of what is outstanding, that holds as much of the prompt as
        its best holder."""
        cdef double ahead = of.ahead / of.workers, live = of.live_requests / of.workers
        return ((ahead + min(ahead, BEHIND_SECONDS)) * still_ahead(home, prices) + REQUEST_SECONDS * live
                + home.prefill * (1.0 + prices.pressure + INTERRUPTED_SHARE * live)
                + prices.context_seconds * (request.count * live + of.prompt_tokens / of.workers))

    cdef void set_credit(self, Terms* terms, uint32_t worker, const Placement* request, const Terms* home,
                         double credit, const Prices* prices) noexcept nogil:
        """Take off what making a copy on this worker costs more than using the one at home, if that is saved up and
        nothing must go for it that was used again."""
        cdef int64_t need = request.count - terms.usable + <int64_t> prices.output_tokens
        cdef const Cost* cost = load_cost(&self.loads.rows[worker].cost)
        cdef double live = load32(&self.loads.rows[worker].live_requests), price
        if cost == NULL:
            return
        price = terms.prefill - prefill_seconds(cost, request.count - home.usable, request.count)
        price = price * (1.0 + prices.pressure + INTERRUPTED_SHARE * live) + max(terms.eviction - home.eviction, 0.0)
        price += terms.repeated
        if 0.0 < price <= credit and not (terms.must_evict and self.drives_out_reused(worker, need, request.now)):
            terms.credit = -price
            terms.total -= price

    cdef bint drives_out_reused(self, uint32_t worker, int64_t need, double now) noexcept nogil:
        """Whether a worker that needs room for so many tokens must give up something that it was asked for more than
        once within the window: of what was used longest ago, as far as needed. No more than DRIVEN_OUT_LOOKED marks are
        looked at; what comes after those counts as never used again. Where host memory is behind the GPU's, nothing is
        given up."""
        cdef Tree* t = &self.tree.t
        cdef WorkerMarks* marks = &load_workers(&t.workers)[worker]
        cdef uint32_t i = load32(&marks.recency.oldest), looked = 0
        if load_signed(&marks.below):
            return False
        need += (load_signed(&marks.tokens) - load_signed(&marks.capacity)
                 + load32(&self.loads.rows[worker].live_output_tokens))
        while need > 0 and looked < <uint32_t> DRIVEN_OUT_LOOKED:
            if i == NONE:                        # all else is held by requests that run
                return True
            if hits_estimate(load64(&mark_at(t, i).hits), now, t.window_seconds) > REUSED_HITS:
                return True
            need -= load_run(&node_at(t, load32(&mark_at(t, i).node)).run).length
            i = load32(&mark_at(t, i).newer)
            looked += 1
        return False

    cdef bint better(self, const Terms* one, uint32_t a, const Terms* two, uint32_t b) noexcept nogil:
        """Whether worker `a` beats `b`: lower total, then more cached, then fewer live requests, then less cached,
        then order."""
        cdef WorkerMarks* marks = load_workers(&self.tree.t.workers)
        cdef int64_t x, y
        if one.total != two.total:
            return one.total < two.total
        if one.usable != two.usable:
            return one.usable > two.usable
        x = load32(&self.loads.rows[a].live_requests)
        y = load32(&self.loads.rows[b].live_requests)
        if x != y:
            return x < y
        x = load_signed(&marks[a].tokens)
        y = load_signed(&marks[b].tokens)
        return x < y if x != y else a < b

    # --- E2 ---

    cdef uint32_t least_held(self, uint32_t best, uint32_t count) noexcept nogil:
        """How much a holder has, where `best` is the most that one has of a prompt; NONE where that is too little."""
        if best > self.exploit_ratio * count:
            return max(1, <uint32_t> (HOLDER_SHARE_MIN * best))
        return NONE

    cdef Choice choose_e2(self, Scratch* s, const Placement* request) noexcept nogil:
        """The E2 rule. Leaves what it met in the scratch; `everyone` keeps all terms, for an explanation."""
        cdef uint32_t best = self.gather(s, request)
        cdef uint32_t least_held = self.least_held(best, request.count)
        cdef Prices prices = self.prices(request, best)
        cdef Terms there
        cdef Choice choice
        if least_held == NONE:
            prices.home = self.home_of(s, request, best)
            if prices.home != NONE:
                prices.home_alike = load32(&self.loads.rows[prices.home].alike)
        if request.everyone:
            self.weigh_all(s, request, least_held, &prices)
            self.set_candidates(s, least_held)
        choice = self.cheapest(s, request, least_held, &prices, &there)
        if choice.worker == NONE:
            return choice
        if choice.reason != EXPLOIT and load_double(&self.loads.others) > 0.0:
            self.agree(s, request, best, least_held, &prices, &choice)
        if request.everyone and choice.credit > 0.0:
            self.take_credit(s, request, least_held, &there, choice.credit, &prices)
        return choice

    cdef Choice cheapest(self, Scratch* s, const Placement* request, uint32_t least_held, Prices* prices,
                         Terms* there) noexcept nogil:
        """The lowest total; `least_held` tokens are what a holder has, NONE where none has enough. The best holder is
        left only for more than what other routers may have placed unseen: else all of them leave it at one moment.

        Holders come first, so that others are passed over as soon as what is summed up of them is more than what is
        saved up for a copy: no term but that is negative. `there` becomes the terms of the best holder.
        """
        cdef uint32_t first = s.count if least_held != NONE else 0, i, at, service, home = NONE
        cdef double ahead, at_least, bound = INFINITY
        cdef bint alike
        cdef Row* row
        cdef Outstanding holders
        cdef Terms terms, least
        cdef Choice choice
        memset(&choice, 0, sizeof(Choice))
        memset(&holders, 0, sizeof(Outstanding))
        choice.worker = choice.credited = NONE
        least.total = there.total = INFINITY
        terms.loading = 0.0
        terms.loaded[HOST] = terms.loaded[DISK] = 0
        for at in range(first + s.workers):
            if at == first and home != NONE:
                self.save_up(request, least_held, home, &holders, there, prices, &choice)
                bound = (least.total + choice.credit) * ROUNDED_UP
            i = s.met[at] if at < first else at - first
            row = &self.loads.rows[i]
            alike = s.held[i] == 0 and prices.usable == 0 and load32(&row.alike) == prices.alike
            at_least = prices.own + least_beside(row, prices) if alike else 0.0
            if at_least > bound:                 # as most of a large fleet are
                continue
            service = load32(&row.eligible)
            if service == NO_REQUEST:
                continue
            fit(&terms, row, s.held[i], request.count)
            if s.some_away:
                load(&terms, s, i)
            if (terms.whole >= least_held) != (at < first) or (service == CACHED_ONLY and at >= first):
                continue
            if at < first:
                self.add_outstanding(&holders, i, prices.now)
            if not alike:
                if load32(&row.alike) != prices.alike or terms.usable != prices.usable:
                    self.price_of(prices, i, terms.usable, request.count)
                at_least = prices.own + least_beside(row, prices)
            ahead = self.ahead_seconds(i, still_ahead(&terms, prices), prices.now)
            if at_least + ahead > bound:
                continue
            self.weigh_most(&terms, i, request, ahead, prices)
            if terms.total > bound:
                continue
            self.weigh_behind(&terms, i, request, prices)
            charge_copy(&terms, i, least_held, prices)
            if at >= first and choice.credit > 0.0:
                self.set_credit(&terms, i, request, there, choice.credit, prices)
            if choice.worker == NONE or self.better(&terms, i, &least, choice.worker):
                choice.worker = i
                least = terms
            if at < first and (home == NONE or self.better(&terms, i, there, home)):
                home = i
                there[0] = terms
            bound = (least.total + choice.credit) * ROUNDED_UP
        if home != NONE and there.total - least.total <= self.unseen_seconds * load_double(&self.loads.others):
            choice.worker = home
            least = there[0]
        if choice.worker != NONE:
            use(&choice, &least)
        choice.reason = EXPLORE if least_held == NONE else EXPLOIT if choice.worker == home else ESCAPE
        return choice

    cdef void save_up(self, const Placement* request, uint32_t least_held, uint32_t home, const Outstanding* holders,
                      const Terms* there, Prices* prices, Choice* choice) noexcept nogil:
        """Note in the choice what is saved up for a copy of what the holders have, this request's share included: how
        much less its total would be on the mean of those that are none than on the mean holder; less than nothing,
        where it would be more. The best holder alone would say less: what many hold, somebody is always free to take.
        """
        cdef Tree* t = &self.tree.t
        cdef uint32_t node = credited_node(t, request.walk, least_held)
        cdef double share = 0.0, before = saved(self.credits, t, node, request.now)
        cdef Outstanding best, all
        memset(&best, 0, sizeof(Outstanding))
        self.add_outstanding(&best, home, prices.now)
        all = prices.fleet
        if load32(&self.loads.rows[home].alike) != prices.alike or there.usable != prices.usable:
            self.price_of(prices, home, there.usable, request.count)
        if holders.workers < all.workers:
            share = there.total - there.eviction - there.balance - there.loading
            share += self.price_of_mean(request, there, holders, prices)
            share -= self.price_of_mean(request, there, &best, prices)
            share -= self.price_of_mean(request, there, &all, prices)
            share *= <double> all.workers / (all.workers - holders.workers)
        choice.credit = max(before + share, 0.0)
        if before > 0.0 or choice.credit > 0.0:
            choice.credited = node

    cdef bint takes(self, uint32_t worker, uint32_t whole, uint32_t least_held) noexcept nogil:
        """Whether a worker takes a request of which it holds so much: one that leaves takes what is exploited there."""
        cdef uint32_t service = load32(&self.loads.rows[worker].eligible)
        return service == ANY_REQUEST or (service == CACHED_ONLY and whole >= least_held)

    cdef void agree(self, Scratch* s, const Placement* request, uint32_t held, uint32_t least_held, Prices* prices,
                    Choice* choice) noexcept nogil:
        """Choose by rendezvous hashing of what nobody has of the prompt, where others place requests that are not known
        here yet: each eligible worker whose height is below a level has the difference as its weight.

                #   #
            ----#---#----    the level at which the weights add up to the seconds of work that others may have placed
              # #   # #      meanwhile, and to those of this request; to escape, at most the lowest of the holders
              # # # # #
            a b c d e f      the likeliest is a, then d, then b and f; c and e are never drawn

        If all routers do so, that work brings all workers it touches to one level, and prompts that go on alike meet,
        whichever router they come to. A height is the total, in which the queue counts DRAW_QUEUE_WEIGHT times more: a
        draw that misses the best worker should cost the future a little, not this request a wait.
        """
        cdef double unseen, added, bound = INFINITY
        cdef uint32_t i
        cdef Terms* terms
        for i in range(s.workers):
            terms = &s.terms[i]
            terms.height = INFINITY
            if load32(&self.loads.rows[i].eligible) == ANY_REQUEST:
                self.size_up(terms, i, s.held[i], request.count)
                load(terms, s, i)
                self.weigh(terms, i, request, prices)
                charge_copy(terms, i, least_held, prices)
                terms.height = terms.total + DRAW_QUEUE_WEIGHT * terms.queue
                if terms.whole >= least_held:
                    bound = min(bound, terms.height)
        unseen = self.unseen_seconds * load_double(&self.loads.others)
        unseen *= load_double(&self.loads.fleet_load) / prices.longest
        added = s.terms[choice.worker].prefill * (1.0 + prices.pressure)
        self.draw(s, min(level_of(s, unseen + added), bound), head_of(request, held), choice)

    cdef void note_placer(self, bint from_peer) noexcept nogil:
        """Keep the load tracker's `others` up to date: a mean over the last bookings; 0 once nobody else places any."""
        cdef double others = self.loads.others + (<double> from_peer - self.loads.others) / PLACED_LATELY
        store_double(&self.loads.others, others if others > OTHERS_MIN else 0.0)

    cdef void draw(self, Scratch* s, double level, uint64_t head, Choice* choice) noexcept nogil:
        """Weighted rendezvous: each worker's number, made of the prompt and of its name, as a share of its weight."""
        cdef double weight, score, best = 0.0
        cdef uint32_t i, chosen = choice.worker
        cdef uint64_t drawn
        for i in range(s.workers):
            weight = level - s.terms[i].height
            if weight <= WEIGHT_MIN:
                continue
            drawn = mixed(head ^ mixed(load32(&self.loads.rows[i].name)))
            score = weight / -log(((drawn >> 12) + 0.5) / <double> (<uint64_t> 1 << 52))
            if score > best:
                best = score
                choice.worker = i
                use(choice, &s.terms[i])
        if choice.worker != chosen and choice.reason == EXPLORE:
            choice.reason = RENDEZVOUS

    # --- explanations ---

    cdef void weigh_all(self, Scratch* s, const Placement* request, uint32_t least_held,
                        Prices* prices) noexcept nogil:
        """Fill the terms of every worker that takes some requests. What workers hold was gathered."""
        cdef uint32_t i
        for i in range(s.workers):
            self.size_up(&s.terms[i], i, s.held[i], request.count)
            load(&s.terms[i], s, i)
            s.terms[i].candidate = False
            s.terms[i].weighed = load32(&self.loads.rows[i].eligible) != NO_REQUEST
            if s.terms[i].weighed:
                self.weigh(&s.terms[i], i, request, prices)
                charge_copy(&s.terms[i], i, least_held, prices)

    cdef void take_credit(self, Scratch* s, const Placement* request, uint32_t least_held, const Terms* home,
                          double credit, const Prices* prices) noexcept nogil:
        """Take off what is saved up for a copy where a worker holds less than the best holders."""
        cdef uint32_t i
        for i in range(s.workers):
            if s.terms[i].weighed and s.terms[i].whole < least_held:
                self.set_credit(&s.terms[i], i, request, home, credit, prices)

    cdef void set_candidates(self, Scratch* s, uint32_t least_held) noexcept nogil:
        """Note who is compared."""
        cdef uint32_t i
        for i in range(s.workers):
            s.terms[i].candidate = s.terms[i].weighed and self.takes(i, s.terms[i].whole, least_held)
