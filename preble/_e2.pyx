"""The E2 rule in compiled code: exploit or explore (paper Algorithms 1 and 2). Owns the looking, the weighing and the
choice; it changes nothing but its scratch rows. `_booking.pyx` books what is chosen here.

    exploit, if the longest prefix cached in whole blocks on one worker is more than the rest of the prompt:
        among the workers that hold the key portion of it, the one with the lowest L + M + P
    explore, otherwise:
        among all workers, the one with the lowest L + M + P

    L  seconds of work assigned within the window (LoadBook), scaled up for newcomers
    M  seconds to compute again what must be evicted to make room, times how often it was used in the window
    P  seconds to prefill what this worker lacks of this prompt

To exploit, only the workers on the path below the key portion are looked at. To explore, a worker whose L + P alone is
more than the best total is passed over before its M is asked for: M is never negative, so the choice is the same.

All of this runs as the tree's writer, or as a reader with a slot, for explanations; so it reads with atomic loads.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from preble._atomic cimport load32, load64, load_double, load_signed
from preble._cost cimport Cost, LoadBook, Row, prefill_seconds
from preble._layout cimport (
    EntryBlock,
    Node,
    Tree,
    Victim,
    Victims,
    Walk,
    WorkerMarks,
    end_of,
    load_block,
    load_run,
    load_workers,
    mark_at,
    node_at,
    run_end,
    worker_of,
)
from preble._layout_parts cimport hits_estimate
from preble._memory cimport NONE
from preble._nodes cimport held_at, key_portion_end
from preble._radix cimport RadixTree
from preble._victims cimport victims_append, victims_of

cdef extern from * nogil:
    const Cost* load_cost "preble_load"(const Cost** p)

cdef enum:
    PATH_MAX = 64                # nodes of the prompt's own path that eviction is known to spare


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


cdef class E2:
    """The rule over one tree and one load book, and the writer's scratch rows."""

    def __init__(self, RadixTree tree not None, LoadBook book not None, *, double exploit_ratio, uint32_t victims_max):
        self.tree = tree
        self.book = book
        self.exploit_ratio = exploit_ratio
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

    cdef void gather(self, Scratch* s, Walk walk, uint32_t least) noexcept nogil:
        """Note what workers hold, climbing on from s.next over the nodes that reach to `least` tokens or further."""
        cdef Tree* t = &self.tree.t
        while s.next != NONE and load32(&node_at(t, s.next).parent) != NONE:
            if min(run_end(load_run(&node_at(t, s.next).run)), walk.matched) < least:
                return
            s.count = held_at(t, s.next, walk.matched, s.held, s.met, s.count, s.workers)
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
            s.next = load32(&node_at(t, s.next).parent)
            while seen < s.count:
                row = &self.book.rows[s.met[seen]]
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
        victim.end = end_at(node, worker)
        victim.tokens = victim.end - start if victim.end > start else 0
        victim.hits = load64(&mark_at(&self.tree.t, mark).hits)
        victim.seconds = prefill_seconds(cost, victim.tokens, victim.end)

    cdef double eviction_seconds(self, uint32_t worker, const Order* order, int64_t need) noexcept nogil:
        """M: seconds to compute again the `need` least recently used tokens, each times its hits in the window
        (Algorithm 2).

        Looks at `victims_max` nodes at most and extrapolates the rest; the prompt's own path is spared, as the engine
        would. The writer keeps what it has seen (see _victims.pxd); a reader looks for itself.
        """
        cdef Tree* t = &self.tree.t
        cdef WorkerMarks* marks = &load_workers(&t.workers)[worker]
        cdef Victims* known = victims_of(t, worker) if order.writer else NULL
        cdef uint32_t path[PATH_MAX]
        cdef uint32_t depth = path_of(t, order.walk.node, path), looked = 0, i = load32(&marks.recency.oldest)
        cdef int64_t covered = 0, taken
        cdef double seconds = 0.0, uses
        cdef const Cost* cost = load_cost(&self.book.rows[worker].cost)
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
                uses = hits_estimate(victim.hits, order.now, t.window_seconds)
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
        cdef uint32_t size = max(load32(&self.book.rows[worker].block_size), 1)
        terms.whole = held - held % size
        terms.usable = min(terms.whole, count - 1 - (count - 1) % size)

    cdef int64_t needed(self, const Terms* terms, uint32_t worker, const Order* order) noexcept nogil:
        """Tokens to evict for the prompt and its expected output; negative where there is room."""
        cdef WorkerMarks* marks = &load_workers(&self.tree.t.workers)[worker]
        cdef int64_t room = (load_signed(&marks.capacity) - load_signed(&marks.tokens)
                             - load_signed(&self.book.rows[worker].live_output_tokens))
        return order.count - terms.usable + self.book.expected_output(worker, order.max_new_tokens) - max(room, 0)

    cdef void weigh(self, Terms* terms, uint32_t worker, const Order* order, double longest) noexcept nogil:
        """Fill in L, M and P of a worker that was sized up."""
        cdef Row* row = &self.book.rows[worker]
        cdef const Cost* cost = load_cost(&row.cost)
        cdef int64_t need = self.needed(terms, worker, order)
        terms.load = load_double(&row.load_seconds) * self.book.scale(worker, order.now, longest)
        terms.eviction = self.eviction_seconds(worker, order, need) if need > 0 else 0.0
        terms.prefill = prefill_seconds(cost, order.count - terms.usable, order.count) if cost != NULL else 0.0
        terms.total = terms.load + terms.eviction + terms.prefill

    cdef bint better(self, const Terms* one, uint32_t a, const Terms* two, uint32_t b) noexcept nogil:
        """Whether worker `a` beats `b`: lower total, then more cached, then fewer live requests, then less cached,
        then order."""
        cdef WorkerMarks* marks = load_workers(&self.tree.t.workers)
        cdef int64_t x, y
        if one.total != two.total:
            return one.total < two.total
        if one.usable != two.usable:
            return one.usable > two.usable
        x = load_signed(&self.book.rows[a].live_requests)
        y = load_signed(&self.book.rows[b].live_requests)
        if x != y:
            return x < y
        x = load_signed(&marks[a].tokens)
        y = load_signed(&marks[b].tokens)
        return x < y if x != y else a < b

    # --- E2 ---

    cdef Choice choose_e2(self, Scratch* s, const Order* order) noexcept nogil:
        """The E2 rule. Leaves what it met in the scratch; `everyone` weighs all eligible workers, for an
        explanation."""
        cdef uint32_t best
        cdef Choice choice
        s.next = order.walk.node
        best = self.best_whole(s, order.walk)
        if best > self.exploit_ratio * order.count:
            choice = self.exploit(s, order, best)
            choice.reason = EXPLOIT
        else:
            choice = self.explore(s, order)
            choice.reason = EXPLORE
        return choice

    cdef Choice exploit(self, Scratch* s, const Order* order, uint32_t best) noexcept nogil:
        """The best of those that hold the key portion of the prompt."""
        cdef uint32_t key_end = key_portion_end(&self.tree.t, order.walk, best), i, at
        cdef double longest = self.book.longest_observed(order.now)
        cdef Terms terms, least
        cdef Choice choice
        if order.everyone:
            return self.best_of_all(s, order, key_end)
        self.gather(s, order.walk, key_end)
        memset(&choice, 0, sizeof(Choice))
        choice.worker = NONE
        for at in range(s.count):
            i = s.met[at]
            self.size_up(&terms, i, s.held[i], order.count)
            if terms.whole >= key_end and load32(&self.book.rows[i].eligible):
                self.weigh(&terms, i, order, longest)
                if choice.worker == NONE or self.better(&terms, i, &least, choice.worker):
                    choice.worker = i
                    choice.usable = terms.usable
                    least = terms
        return choice

    cdef Choice explore(self, Scratch* s, const Order* order) noexcept nogil:
        """The best of all."""
        cdef double longest = self.book.longest_observed(order.now)
        cdef uint32_t i, alike = NONE, usable = 0
        cdef int64_t need
        cdef Row* row
        cdef Terms terms, least
        cdef Choice choice
        if order.everyone:
            return self.best_of_all(s, order, 0)
        self.gather(s, order.walk, 0)
        memset(&choice, 0, sizeof(Choice))
        memset(&terms, 0, sizeof(Terms))
        choice.worker = NONE
        for i in range(s.workers):
            row = &self.book.rows[i]
            if row.eligible != ANY_REQUEST:
                continue
            self.size_up(&terms, i, s.held[i], order.count)
            if row.alike != alike or terms.usable != usable:
                terms.prefill = prefill_seconds(row.cost, order.count - terms.usable, order.count)
                alike = row.alike
                usable = terms.usable
            terms.load = row.load_seconds * self.book.scale(i, order.now, longest)
            if choice.worker != NONE and terms.load + terms.prefill > least.total:
                continue
            need = self.needed(&terms, i, order)
            terms.eviction = self.eviction_seconds(i, order, need) if need > 0 else 0.0
            terms.total = terms.load + terms.eviction + terms.prefill
            if choice.worker == NONE or self.better(&terms, i, &least, choice.worker):
                choice.worker = i
                choice.usable = terms.usable
                least = terms
        return choice

    cdef void weigh_all(self, Scratch* s, const Order* order) noexcept nogil:
        """Fill the terms of every eligible worker."""
        cdef double longest = self.book.longest_observed(order.now)
        cdef uint32_t i
        self.gather(s, order.walk, 0)
        for i in range(s.workers):
            self.size_up(&s.terms[i], i, s.held[i], order.count)
            s.terms[i].candidate = False
            s.terms[i].weighed = load32(&self.book.rows[i].eligible) != 0
            if s.terms[i].weighed:
                self.weigh(&s.terms[i], i, order, longest)

    cdef Choice best_of_all(self, Scratch* s, const Order* order, uint32_t key_end) noexcept nogil:
        """Weigh every eligible worker and choose among those that hold `key_end` tokens."""
        cdef Choice choice
        cdef uint32_t i
        self.weigh_all(s, order)
        memset(&choice, 0, sizeof(Choice))
        choice.worker = NONE
        for i in range(s.workers):
            s.terms[i].candidate = s.terms[i].weighed and s.terms[i].whole >= key_end and (
                key_end > 0 or load32(&self.book.rows[i].eligible) == ANY_REQUEST)
            if s.terms[i].candidate and (choice.worker == NONE or self.better(&s.terms[i], i, &s.terms[choice.worker],
                                                                              choice.worker)):
                choice.worker = i
                choice.usable = s.terms[i].usable
        return choice
