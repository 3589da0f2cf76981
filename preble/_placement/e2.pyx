"""The E2 rule in compiled code: exploit or explore (paper Algorithms 1 and 2), with an eye on the queue of the moment.
Owns the looking, the weighing and the choice; it changes nothing but its scratch rows. `bookings.pyx` books what is
chosen here.

    exploit, if the longest prefix cached in whole blocks on one worker is more than the rest of the prompt:
        among the workers that hold 0.9 of it, the one with the lowest `total`,
    escape from them, if another worker's `delay` is lower than theirs by more than `escape_seconds`:
        the one with the lowest `delay`
    explore, otherwise:
        among all workers, the one with the lowest `total`; of those within `decode_ratio` of it, if that is on, the one
        whose outstanding work is decoding to the largest part;
        where other routers place requests, too: of those that cost little more, the one on which all agree (`agree`)

    L   seconds of work assigned within the window (LoadTracker), scaled up for newcomers
    M   seconds to compute again what must be evicted to make room, times how often it was used in the window
    P   seconds to prefill what this worker lacks of this prompt
    Q   seconds of prefill booked and not seen done, and SLOW_SECONDS for each of the B live requests

    delay = Q + (M + P) (1 + kappa)
    total = delay + P (0.2 B + 0.2 reuse L / (1 - rho))

`delay` is what the request waits, and what its work makes others wait: kappa = rho / (1 - rho), at most 4, from the
mean load rho of the fleet. `total` adds what a miss costs in this place: it holds up B decodes, and the prefix stays
here, to be used `reuse` times (tokens cached for each token missed, within the window), on a worker of whose time rho
is taken. docs/e2.md has an example in numbers, and how each constant was found.

To exploit, only the workers on the path that far are looked at, and others only where `delay` is long. To explore, a
worker whose terms without M are more than the best total is passed over before its M is asked for: M is never negative,
so the choice is the same.

All of this runs as the tree's writer, or as a reader with a slot, for explanations; so it reads with atomic loads.
"""

from libc.math cimport INFINITY, log
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from preble._core.atomic cimport load32, load64, load_double, load_signed, store_double
from preble._cost cimport Cost, LoadTracker, Row, prefill_seconds
from preble._placement.prefix_groups cimport Groups
from preble._core.tree.layout cimport (EntryBlock, Node, Tree, Victim, Victims, Walk, WorkerMarks, end_of, load_block,
                                       load_run, load_workers, mark_at, node_at, run_end, worker_of)
from preble._core.tree.parts cimport hits_estimate
from preble._core.memory cimport NONE
from preble._core.tree.nodes cimport held_at
from preble._radix cimport RadixTree
from preble._placement.redirects cimport Redirect, Redirects, find_redirect, load_redirects
from preble._kv_index.cache_accuracy cimport FULL_ACCURACY, CacheAccuracy
from preble._core.tree.victims cimport victims_append, victims_of

cdef extern from * nogil:
    const Cost* load_cost "preble_load"(const Cost** p)

cdef enum:
    PATH_MAX = 64                # nodes of the prompt's own path that eviction is known to spare
    HEAD_TOKENS = 16             # by which routers agree on a worker
    PLACED_LATELY = 256          # bookings that say how much others place

cdef double HOLDER_SHARE_MIN = 0.9  # of the longest cached prefix: who holds as much is as good a place for it
cdef double SLOW_SECONDS = 0.03  # by which a live request lengthens the wait for a first token
cdef double MISS_WEIGHT = 0.2    # weight of what a miss costs in this place
cdef double LOADED_MAX = 0.9     # of a worker's time, as far as what stays there is priced
cdef double OTHERS_MIN = 0.001
cdef double WEIGHT_MIN = 1e-9    # seconds; less may be nothing, rounded
cdef double UNSEEN_SECONDS = 1.0  # of other routers' work that a decision reckons with
cdef double DRAW_QUEUE_WEIGHT = 3.0  # how often a queue counts again in a draw


cdef int new_scratch(Scratch* s, uint32_t room) noexcept nogil:
    """Rows for `room` workers; -1 when memory is out."""
    s.room = room
    s.workers = s.count = 0
    s.next = NONE
    s.held = <uint32_t*> calloc(2 * <size_t> max(room, 1), sizeof(uint32_t))
    s.terms = <Terms*> calloc(max(room, 1), sizeof(Terms))
    if s.held == NULL or s.terms == NULL:
        free_scratch(s)
        return -1
    s.met = s.held + max(room, 1)
    return 0


cdef void free_scratch(Scratch* s) noexcept nogil:
    free(s.held)
    free(s.terms)
    s.held = NULL
    s.terms = NULL


cdef void clear_scratch(Scratch* s) noexcept nogil:
    """Ready for the next decision. O(workers met)."""
    cdef uint32_t at
    for at in range(s.count):
        s.held[s.met[at]] = 0
    s.count = 0


cdef list rows_of(Scratch* s):
    """(index, usable, L, M, P, Q, what is compared, candidate) of each worker that might take the request."""
    cdef uint32_t i
    return [(i, s.terms[i].usable, s.terms[i].load, s.terms[i].eviction, s.terms[i].prefill, s.terms[i].queue,
             s.terms[i].total, bool(s.terms[i].candidate))
            for i in range(s.workers) if s.terms[i].weighed]


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


cdef double level_of(const Scratch* s, double unseen, double bound) noexcept nogil:
    """Up to where `unseen` seconds fill up the heights of the scratch, the lowest first; `bound` at most."""
    cdef double level = bound, before = INFINITY, below
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


cdef uint32_t path_of(Tree* t, uint32_t i, uint32_t* path) noexcept nogil:
    """The nodes from `i` up, PATH_MAX at most; returns how many."""
    cdef uint32_t depth = 0
    while i != NONE and depth < PATH_MAX:
        path[depth] = i
        depth += 1
        i = load32(&node_at(t, i).parent)
    return depth


cdef bint is_on(const uint32_t* path, uint32_t depth, uint32_t i) noexcept nogil:
    cdef uint32_t at
    for at in range(depth):
        if path[at] == i:
            return True
    return False


cdef uint32_t end_at(Node* node, uint32_t worker) noexcept nogil:
    """Where the worker's entry at a node ends, 0 if it has none. For readers, too: one that meets a block whose words
    are just moving up may miss it."""
    cdef EntryBlock* block = load_block(&node.block)
    cdef uint32_t low = 0, high, middle
    cdef uint64_t word
    if block == NULL:
        word = load64(&node.only)
        return end_of(word) if worker_of(word) == worker else 0
    high = load32(&block.count)
    while low < high:
        middle = (low + high) >> 1
        word = load64(&block.words[middle])
        if worker_of(word) == worker:
            return end_of(word)
        if worker_of(word) < worker:
            low = middle + 1
        else:
            high = middle
    return 0


cdef uint32_t held_by(Tree* t, Walk walk, uint32_t worker) noexcept nogil:
    """Tokens of the walked prefix that one worker is estimated to cache. O(path)."""
    cdef uint32_t i = walk.node, end, key = load32(&load_workers(&t.workers)[worker].key)
    while i != NONE and load32(&node_at(t, i).parent) != NONE:
        end = end_at(node_at(t, i), key)
        if end:
            return min(end, walk.matched)
        i = load32(&node_at(t, i).parent)
    return 0


cdef class E2:
    """The rule over one tree and one load tracker, and the writer's scratch rows."""

    def __init__(self, RadixTree tree not None, LoadTracker loads not None, *, double exploit_ratio,
                 double escape_seconds, double decode_ratio, uint32_t victims_max):
        self.tree = tree
        self.loads = loads
        self.accuracy = CacheAccuracy(tree.t.window_seconds / 3.0)
        self.groups = Groups(tree, loads)
        self.redirects = Redirects(tree)
        self.exploit_ratio = exploit_ratio
        self.escape_seconds = escape_seconds
        self.decode_ratio = decode_ratio
        self.victims_max = victims_max

    def __dealloc__(self):
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

    # --- looking ---

    cdef void discount(self, Scratch* s, uint32_t first) noexcept nogil:
        """Of what was noted from the `first` worker met on, count as much as its accuracy says."""
        cdef uint32_t at
        for at in range(first, s.count):
            if load32(&self.accuracy.rows[s.met[at]].eighths) != <uint32_t> FULL_ACCURACY:
                s.held[s.met[at]] = self.accuracy.estimated(s.met[at], s.held[s.met[at]])

    cdef void gather(self, Scratch* s, Walk walk, uint32_t least) noexcept nogil:
        """Note what workers hold, climbing on from s.next over the nodes that reach to `least` tokens or further."""
        cdef Tree* t = &self.tree.t
        cdef uint32_t before
        while s.next != NONE and load32(&node_at(t, s.next).parent) != NONE:
            if min(run_end(load_run(&node_at(t, s.next).run)), walk.matched) < least:
                return
            before = s.count
            s.count = held_at(t, s.next, walk.matched, s.held, s.met, s.count, s.workers)
            if load32(&self.accuracy.inaccurate):
                self.discount(s, before)
            s.next = load32(&node_at(t, s.next).parent)

    cdef uint32_t best_whole(self, Scratch* s, Walk walk) noexcept nogil:
        """The most tokens, in whole blocks, that one eligible worker holds; climbs only while more can be found."""
        cdef Tree* t = &self.tree.t
        cdef Row* row
        cdef uint32_t best = 0, seen = 0, held
        while s.next != NONE and load32(&node_at(t, s.next).parent) != NONE:
            if min(run_end(load_run(&node_at(t, s.next).run)), walk.matched) <= best:
                break
            s.count = held_at(t, s.next, walk.matched, s.held, s.met, s.count, s.workers)
            if load32(&self.accuracy.inaccurate):
                self.discount(s, seen)
            s.next = load32(&node_at(t, s.next).parent)
            while seen < s.count:
                row = &self.loads.rows[s.met[seen]]
                held = s.held[s.met[seen]]
                if load32(&row.eligible):
                    best = max(best, held - held % max(load32(&row.block_size), 1))
                seen += 1
        return best

    # --- weighing ---

    cdef void see_victim(self, uint32_t mark, uint32_t worker, const Cost* cost, Victim* victim) noexcept nogil:
        """A mark as eviction sees it. A reader may meet one that has just gone: then it has no tokens."""
        cdef uint32_t i = load32(&mark_at(&self.tree.t, mark).node)
        cdef Node* node = node_at(&self.tree.t, i)
        cdef uint32_t start = load_run(&node.run).start
        victim.mark = mark
        victim.node = i
        victim.end = end_at(node, load32(&load_workers(&self.tree.t.workers)[worker].key))
        victim.tokens = victim.end - start if victim.end > start else 0
        victim.hits = load64(&mark_at(&self.tree.t, mark).hits)
        victim.seconds = prefill_seconds(cost, victim.tokens, victim.end)

    cdef double eviction_seconds(self, uint32_t worker, const Placement* request, int64_t need) noexcept nogil:
        """M: seconds to compute again the `need` least recently used tokens, each times its hits in the window
        (Algorithm 2).

        Looks at `victims_max` nodes at most and extrapolates the rest; the prompt's own path is spared, as the engine
        would. The writer keeps what it has seen (see _core/tree/victims.pxd); a reader looks for itself.
        """
        cdef Tree* t = &self.tree.t
        cdef WorkerMarks* marks = &load_workers(&t.workers)[worker]
        cdef Victims* known = victims_of(t, worker) if request.writer else NULL
        cdef uint32_t path[PATH_MAX]
        cdef uint32_t depth = path_of(t, request.walk.node, path), looked = 0, i = load32(&marks.recency.oldest)
        cdef int64_t covered = 0, taken
        cdef double seconds = 0.0, uses
        cdef const Cost* cost = load_cost(&self.loads.rows[worker].cost)
        cdef Victim fresh
        cdef Victim* victim
        cdef Victim* kept
        if cost == NULL:
            return 0.0
        while i != NONE and covered < need and looked < self.victims_max:
            if known != NULL and looked < known.count:
                victim = &known.known[known.first + looked]
            else:
                victim = &fresh
                self.see_victim(i, worker, cost, victim)
                kept = victims_append(t, worker, i) if known != NULL and looked == known.count else NULL
                if kept != NULL:
                    kept[0] = fresh
            looked += 1
            if not is_on(path, depth, victim.node):
                taken = min(need - covered, <int64_t> victim.tokens)
                uses = hits_estimate(victim.hits, request.now, t.window_seconds)
                seconds += uses * (victim.seconds if taken == victim.tokens
                                   else prefill_seconds(cost, taken, victim.end))
                covered += taken
            if known != NULL and looked < known.count:
                i = known.known[known.first + looked].mark
            else:
                i = load32(&mark_at(t, i).newer)
        if covered and covered < need and i != NONE:
            seconds *= need / <double> covered
        return seconds

    cdef void size_up(self, Terms* terms, uint32_t worker, uint32_t held, uint32_t count) noexcept nogil:
        """Fill in what a worker can use of the prompt."""
        cdef uint32_t size = max(load32(&self.loads.rows[worker].block_size), 1)
        terms.whole = held - held % size
        terms.usable = min(terms.whole, count - 1 - (count - 1) % size)

    cdef int64_t needed(self, const Terms* terms, uint32_t worker, const Placement* request) noexcept nogil:
        """Tokens to evict for the prompt and its expected output; negative where there is room."""
        cdef WorkerMarks* marks = &load_workers(&self.tree.t.workers)[worker]
        cdef int64_t room = (load_signed(&marks.capacity) - load_signed(&marks.tokens)
                             - load_signed(&self.loads.rows[worker].live_output_tokens))
        return request.count - terms.usable + self.loads.expected_output(worker, request.max_new_tokens) - max(room, 0)

    cdef Prices prices(self, double now) noexcept nogil:
        """What one decision multiplies with."""
        cdef Prices prices
        prices.now = now
        prices.longest = self.loads.longest_observed(now)
        prices.delay_weight = 1.0 + self.loads.pressure(prices.longest)
        prices.reuse = MISS_WEIGHT * load_double(&self.loads.reuse)
        return prices

    cdef void weigh_queue(self, Terms* terms, uint32_t worker, const Prices* prices) noexcept nogil:
        """Fill in L, Q and the price of a second of prefill on a worker."""
        cdef Row* row = &self.loads.rows[worker]
        cdef double live = load32(&row.live_requests)
        terms.load = load_double(&row.load_seconds) * self.loads.scale(worker, prices.now, prices.longest)
        terms.queue = load_double(&row.queue_seconds) + SLOW_SECONDS * live
        terms.price = (prices.delay_weight + MISS_WEIGHT * live
                       + prices.reuse * terms.load / (1.0 - min(terms.load / prices.longest, LOADED_MAX)))

    cdef void add_up(self, Terms* terms, const Prices* prices) noexcept nogil:
        """Fill in what is compared."""
        terms.delay = terms.queue + (terms.eviction + terms.prefill) * prices.delay_weight
        terms.total = terms.queue + terms.eviction * prices.delay_weight + terms.prefill * terms.price

    cdef double missing_seconds(self, const Terms* terms, uint32_t worker, const Placement* request) noexcept nogil:
        """P: seconds to prefill what a worker that was sized up lacks. 0 where a reader meets one that has just left:
        its answer is thrown away (`explain`)."""
        cdef const Cost* cost = load_cost(&self.loads.rows[worker].cost)
        return prefill_seconds(cost, request.count - terms.usable, request.count) if cost != NULL else 0.0

    cdef double eviction_of(self, const Terms* terms, uint32_t worker, const Placement* request) noexcept nogil:
        """M of a worker that was sized up."""
        cdef int64_t need = self.needed(terms, worker, request)
        return self.eviction_seconds(worker, request, need) if need > 0 else 0.0

    cdef void weigh(self, Terms* terms, uint32_t worker, const Placement* request, const Prices* prices) noexcept nogil:
        """Fill in every term of a worker that was sized up."""
        self.weigh_queue(terms, worker, prices)
        terms.eviction = self.eviction_of(terms, worker, request)
        terms.prefill = self.missing_seconds(terms, worker, request)
        self.add_up(terms, prices)

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

    cdef Choice choose_e2(self, Scratch* s, const Placement* request) noexcept nogil:
        """The E2 rule. Leaves what it met in the scratch; `everyone` weighs all eligible workers, for an
        explanation."""
        cdef uint32_t best
        cdef Choice choice
        cdef Prices prices = self.prices(request.now)
        s.next = request.walk.node
        best = self.best_whole(s, request.walk)
        if request.everyone:
            self.weigh_all(s, request, &prices)
        if best > self.exploit_ratio * request.count:
            choice = self.exploit(s, request, best, &prices)
        else:
            choice = self.explore(s, request, best, &prices)
        if load_redirects(&self.redirects.table) != NULL and choice.worker != NONE and choice.reason != ESCAPE:
            self.redirect(s, request, &prices, &choice)
        return choice

    cdef void redirect(self, Scratch* s, const Placement* request, const Prices* prices, Choice* choice) noexcept nogil:
        """Where the prompt's prefix is redirected, the best of the redirect's targets takes the place of the choice. Of
        several targets it must be better than the choice: copies of a prefix are there to be used, not to keep others
        out. A redirect away from one worker is for what would have reused its cache there. One whose targets may all
        not take the request has no effect, and none has for a request that escaped."""
        cdef Tree* t = &self.tree.t
        cdef bint exploits = choice.reason == EXPLOIT
        cdef uint32_t at, i, chosen = NONE, usable = 0, with_choice
        cdef Terms terms, least
        cdef const Redirect* redirect = NULL
        if exploits or request.walk.matched > self.exploit_ratio * request.count:
            redirect = find_redirect(load_redirects(&self.redirects.table), t, request.walk, choice.worker)
        if redirect == NULL or (redirect.source != NONE and not exploits):
            return
        with_choice = redirect.count > 1
        for at in range(redirect.count + with_choice):
            i = redirect.targets[at] if at < redirect.count else choice.worker
            if i >= s.workers or load32(&self.loads.rows[i].eligible) != ANY_REQUEST:
                continue
            self.size_up(&terms, i, held_by(t, request.walk, i), request.count)
            self.weigh(&terms, i, request, prices)
            if chosen == NONE or self.better(&terms, i, &least, chosen):
                chosen = i
                usable = terms.usable
                least = terms
        if chosen != NONE and chosen != choice.worker:
            choice.worker = chosen
            choice.usable = usable
            choice.reason = <Reason> redirect.reason

    cdef Choice exploit(self, Scratch* s, const Placement* request, uint32_t best, const Prices* prices) noexcept nogil:
        """The best of those that hold as good as all of what is cached, or of all where these have too much to do."""
        cdef uint32_t least_held = max(1, <uint32_t> (HOLDER_SHARE_MIN * best)), i, at
        cdef Terms terms, least
        cdef Choice choice
        memset(&choice, 0, sizeof(Choice))
        choice.worker = NONE
        choice.reason = EXPLOIT
        if request.everyone:
            self.set_candidates(s, least_held)
        else:
            self.gather(s, request.walk, least_held)
        for at in range(s.count):
            i = s.met[at]
            self.size_up(&terms, i, s.held[i], request.count)
            if terms.whole >= least_held and load32(&self.loads.rows[i].eligible):
                self.weigh(&terms, i, request, prices)
                if choice.worker == NONE or self.better(&terms, i, &least, choice.worker):
                    choice.worker = i
                    choice.usable = terms.usable
                    least = terms
        if choice.worker != NONE and least.delay > self.escape_seconds:
            self.escape(s, request, best, least.delay - self.escape_seconds, prices, &choice)
        return choice

    cdef void escape(self, Scratch* s, const Placement* request, uint32_t best, double bound, const Prices* prices,
                     Choice* choice) noexcept nogil:
        """Choose the lowest `delay` of all, if it is below the bound."""
        cdef uint32_t i
        cdef double limit = bound
        cdef Terms terms
        self.gather(s, request.walk, 0)
        for i in range(s.workers):
            if load32(&self.loads.rows[i].eligible) != ANY_REQUEST:
                continue
            self.size_up(&terms, i, s.held[i], request.count)
            self.weigh_queue(&terms, i, prices)
            if terms.queue >= bound:
                continue
            terms.prefill = self.missing_seconds(&terms, i, request)
            if terms.queue + terms.prefill * prices.delay_weight >= bound:
                continue
            terms.eviction = self.eviction_of(&terms, i, request)
            self.add_up(&terms, prices)
            if terms.delay < bound:
                bound = terms.delay
                choice.worker = i
                choice.usable = terms.usable
                choice.reason = ESCAPE
        if choice.reason == ESCAPE and load_double(&self.loads.others) > 0.0:
            self.agree(s, request, best, limit, prices, choice)
        if request.everyone and choice.reason == ESCAPE:
            self.compare_delay(s)

    cdef Choice explore(self, Scratch* s, const Placement* request, uint32_t held, const Prices* prices) noexcept nogil:
        """The best of all; `held` tokens are the most that one has."""
        cdef uint32_t i, alike = NONE, usable = 0
        cdef Row* row
        cdef Terms terms, least
        cdef Choice choice
        self.gather(s, request.walk, 0)
        memset(&choice, 0, sizeof(Choice))
        memset(&terms, 0, sizeof(Terms))
        choice.worker = NONE
        choice.reason = EXPLORE
        if request.everyone:
            self.set_candidates(s, 0)
        for i in range(s.workers):
            row = &self.loads.rows[i]
            if load32(&row.eligible) != ANY_REQUEST:
                continue
            self.size_up(&terms, i, s.held[i], request.count)
            if load32(&row.alike) != alike or terms.usable != usable:
                alike = load32(&row.alike)
                terms.prefill = self.missing_seconds(&terms, i, request)
                usable = terms.usable
            self.weigh_queue(&terms, i, prices)
            if choice.worker != NONE and terms.queue + terms.prefill * terms.price > least.total:
                continue
            terms.eviction = self.eviction_of(&terms, i, request)
            self.add_up(&terms, prices)
            if choice.worker == NONE or self.better(&terms, i, &least, choice.worker):
                choice.worker = i
                choice.usable = terms.usable
                least = terms
        if load_double(&self.loads.others) > 0.0 and choice.worker != NONE:
            self.agree(s, request, held, INFINITY, prices, &choice)
        if self.decode_ratio > 1.0 and choice.worker != NONE:
            self.prefer_decoding(s, request, least.total * self.decode_ratio, prices, &choice)
        return choice

    cdef void agree(self, Scratch* s, const Placement* request, uint32_t held, double bound, const Prices* prices,
                    Choice* choice) noexcept nogil:
        """Choose by rendezvous hashing of what nobody has of the prompt, where others place requests that are not known
        here yet: each eligible worker whose height is below a level has the difference as its weight.

                #   #
            ----#---#----    the level at which the weights add up to the seconds of work that others may have placed
              # #   # #      meanwhile, and to those of this request; `bound` at most
              # # # # #
            a b c d e f      the likeliest is a, then d, then b and f; c and e are never drawn

        If all routers do so, that work brings all workers it touches to one level, and prompts that go on alike meet,
        whichever router they come to. A height is the total (to escape: `delay`), in which the queue counts
        DRAW_QUEUE_WEIGHT times more: a draw that misses the best worker should cost the future a little, not this
        request a wait.
        """
        cdef double unseen, added
        cdef uint32_t i
        cdef Terms* terms
        for i in range(s.workers):
            terms = &s.terms[i]
            terms.height = INFINITY
            if load32(&self.loads.rows[i].eligible) == ANY_REQUEST:
                self.size_up(terms, i, s.held[i], request.count)
                self.weigh(terms, i, request, prices)
                terms.height = (terms.delay if choice.reason == ESCAPE
                                else terms.total) + DRAW_QUEUE_WEIGHT * terms.queue
        unseen = UNSEEN_SECONDS * load_double(&self.loads.others) * load_double(&self.loads.fleet_load) / prices.longest
        added = s.terms[choice.worker].prefill * prices.delay_weight
        self.draw(s, level_of(s, unseen + added, bound), head_of(request, held), choice)

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
                choice.usable = s.terms[i].usable
        if choice.worker != chosen and choice.reason == EXPLORE:
            choice.reason = RENDEZVOUS

    cdef void prefer_decoding(self, Scratch* s, const Placement* request, double bound, const Prices* prices,
                              Choice* choice) noexcept nogil:
        """Of those whose total is within the bound, choose the one whose outstanding seconds are decoding to the
        largest part: it has compute to spare (paper section 4.2, prefill/decode balancing)."""
        cdef double most = self.decode_share(choice.worker), share
        cdef uint32_t i
        cdef Terms terms
        for i in range(s.workers):
            if load32(&self.loads.rows[i].eligible) != ANY_REQUEST:
                continue
            share = self.decode_share(i)
            if share <= most:
                continue
            self.size_up(&terms, i, s.held[i], request.count)
            self.weigh(&terms, i, request, prices)
            if terms.total <= bound:
                most = share
                choice.worker = i
                choice.usable = terms.usable

    cdef double decode_share(self, uint32_t worker) noexcept nogil:
        """How much of a worker's outstanding seconds is decoding; 0 if nothing is outstanding."""
        cdef Row* row = &self.loads.rows[worker]
        cdef double decode = load_signed(&row.live_output_tokens) * load_double(&self.loads.output_seconds)
        cdef double prefill = load_double(&row.queue_seconds)
        return decode / (decode + prefill) if decode > 0.0 else 0.0

    # --- explanations ---

    cdef void weigh_all(self, Scratch* s, const Placement* request, const Prices* prices) noexcept nogil:
        """Fill the terms of every eligible worker."""
        cdef uint32_t i
        self.gather(s, request.walk, 0)
        for i in range(s.workers):
            self.size_up(&s.terms[i], i, s.held[i], request.count)
            s.terms[i].candidate = False
            s.terms[i].weighed = load32(&self.loads.rows[i].eligible) != 0
            if s.terms[i].weighed:
                self.weigh(&s.terms[i], i, request, prices)

    cdef void set_candidates(self, Scratch* s, uint32_t least_held) noexcept nogil:
        """Note who is compared: those that hold so much of the prompt."""
        cdef uint32_t i
        for i in range(s.workers):
            s.terms[i].candidate = s.terms[i].weighed and s.terms[i].whole >= least_held and (
                least_held > 0 or load32(&self.loads.rows[i].eligible) == ANY_REQUEST)

    cdef void compare_delay(self, Scratch* s) noexcept nogil:
        """Note that all were compared, by `delay`."""
        cdef uint32_t i
        for i in range(s.workers):
            s.terms[i].candidate = s.terms[i].weighed and load32(&self.loads.rows[i].eligible) == ANY_REQUEST
            s.terms[i].total = s.terms[i].delay
