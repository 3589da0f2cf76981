"""The decision step in compiled code. Owns the E2 rule (exploit or explore, paper Algorithms 1 and 2) and the one
function that books a decision; the tree and the load book it works on belong to its scheduler.

A decision has three parts, each a function here: `look` (what of the prompt does each worker hold), `choose_e2` (or a
Python policy) and `commit` (lease, marks, hits). Only `commit` changes anything. Callers serialise calls;
`scheduler.py` holds the lock.

    exploit, if the longest prefix cached in whole blocks on one worker is more than the rest of the prompt:
        among the workers that hold the key portion of it, the one with the lowest L + M + P
    explore, otherwise:
        among all workers, the one with the lowest L + M + P

    L  seconds of work assigned within the window (LoadBook), scaled up for newcomers
    M  seconds to compute again what must be evicted to make room, times how often it was used in the window
    P  seconds to prefill what this worker lacks of this prompt
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from preble._cost cimport Cost, CostModel, Lease, LoadBook, WorkerBook, nanoseconds, prefill_seconds
from preble._layout cimport LIVE, Entry, Node, Tree, Walk, WorkerMarks, generation, mark_at, node_at
from preble._layout_parts cimport find_entry, hits_estimate
from preble._memory cimport NONE
from preble._nodes cimport at_root, confirmed_tokens, key_portion_end, tree_matches, tree_walk
from preble._radix cimport RadixTree
from preble._tokens cimport TokenView, check_tokens, release_tokens, view_tokens
from preble._tree cimport confirm_path, drop_below, drop_beside, take_back, tree_insert

from .errors import DuplicateRequest, InvalidInput, NoWorkers, QueueFull, TreeFull

cdef enum:
    PATH_MAX = 64                # nodes of the prompt's own path that eviction is known to spare
    SIBLINGS_MAX = 64            # children looked at before a removed block is taken to share its first tokens
    NO_GENERATION = 0xFFFFFFFF   # no node has it: the prompt was not remembered

_REASONS = ("exploit", "explore")


cdef class Decision:
    """Where a request goes. `matched_tokens` are believed cached on `worker`; `costs` maps workers to seconds when
    asked for.

    `reason` is "exploit" or "explore" for E2, else the policy's own word. Immutable, so thread-safe.
    """

    def __init__(self):
        raise TypeError("a Decision is made by GlobalScheduler.schedule")

    def __repr__(self) -> str:
        return (f"Decision(worker={self.worker!r}, reason={self.reason!r}, matched_tokens={self.matched_tokens}, "
                f"prompt_tokens={self.prompt_tokens}, request_id={self.request_id!r})")


cdef Decision new_decision(object request_id, str worker, uint32_t matched, uint32_t prompt, str reason, object costs):
    cdef Decision decision = Decision.__new__(Decision)
    decision.request_id = request_id
    decision.worker = worker
    decision.matched_tokens = matched
    decision.prompt_tokens = prompt
    decision.reason = reason
    decision.costs = costs
    return decision


def unit_draw(uint64_t seed, uint64_t sequence) -> float:
    """A number in [0, 1) that depends on (seed, sequence) only (splitmix64), so that explaining a decision does not
    use up chance."""
    cdef uint64_t z = seed * <uint64_t> 0x9E3779B97F4A7C15 + (sequence + 1) * <uint64_t> 0xD1B54A32D192ED03
    z = (z ^ (z >> 30)) * <uint64_t> 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * <uint64_t> 0x94D049BB133111EB
    return <double> ((z ^ (z >> 31)) >> 11) / 9007199254740992.0


cdef uint32_t shared_end(Tree* t, Walk walk, uint32_t count, uint32_t worker, uint32_t start) noexcept nogil:
    """How far, from `start` on, the worker needs the walked prefix for another one that leaves it before `count`.
    Changes nothing.

    Looks at SIBLINGS_MAX children of a node; where there are more it says yes, which leaves less than a block
    believed that is gone.
    """
    cdef uint32_t i = walk.node, below = NONE, child, looked
    cdef Node* node = node_at(t, i)
    cdef Entry* entry = find_entry(node, worker)
    cdef bint is_whole = walk.matched == count
    if not is_whole and entry != NULL and entry.tokens > walk.inside:
        return walk.matched
    while node.parent != NONE and node.run.start + node.run.length > start:
        child = NONE if is_whole and below == NONE else node.first_child
        looked = 0
        while child != NONE:
            if looked == SIBLINGS_MAX or (child != below and find_entry(node_at(t, child), worker) != NULL):
                return node.run.start + node.run.length
            looked += 1
            child = node_at(t, child).next_sibling
        below = i
        i = node.parent
        node = node_at(t, i)
    return start


cdef class DecisionCore:
    """One scheduler's compiled state: tree, book, leases and a scratch row per worker. Not thread-safe: its scheduler
    holds a lock."""

    def __init__(self, RadixTree tree not None, LoadBook book not None, *, double exploit_ratio, uint32_t victims_max,
                 uint32_t live_max):
        self.tree = tree
        self.book = book
        self.names = []
        self.leases = {}
        self.exploit_ratio = exploit_ratio
        self.victims_max = victims_max
        self.live_max = live_max

    def __dealloc__(self):
        free(self.terms)
        free(self.held)

    # --- workers ---

    def open_worker(self, str name, int64_t capacity_tokens, uint32_t block_size, CostModel cost, double now) -> int:
        """Give a worker an index, an empty cache and an empty account."""
        cdef uint32_t index = self.tree.add_worker(capacity_tokens)
        cdef uint32_t room = max(16, self.room)
        while index >= room:
            room *= 2
        try:
            self.grow(room)
            self.book.open_worker(index, cost, now)
        except MemoryError:
            self.tree.drop_worker(index)
            raise
        memset(&self.terms[index], 0, sizeof(Terms))
        self.terms[index].eligible = True
        self.terms[index].block_size = block_size
        while len(self.names) <= index:
            self.names.append(None)
        self.names[index] = name
        return index

    cdef int grow(self, uint32_t room) except -1:
        """Scratch rows for `room` workers."""
        cdef void* grown
        if room <= self.room:
            return 0
        grown = realloc(self.terms, room * sizeof(Terms))
        if grown == NULL:
            raise MemoryError("DecisionCore.grow")
        self.terms = <Terms*> grown
        grown = realloc(self.held, room * sizeof(uint32_t))
        if grown == NULL:
            raise MemoryError("DecisionCore.grow")
        self.held = <uint32_t*> grown
        self.room = room
        return 0

    def close_worker(self, uint32_t index) -> None:
        """Forget a worker: marks, account, index. Its leases live on until they end."""
        self.tree.drop_worker(index)
        self.book.close_worker(index)
        self.names[index] = None
        self.terms[index].eligible = False

    def set_eligible(self, uint32_t index, bint eligible) -> None:
        """Whether a worker may take new requests."""
        self.terms[index].eligible = eligible

    # --- looking ---

    cdef int prepare(self, TokenView* view, object token_ids, object namespace, Walk* walk) except -1:
        """Borrow the tokens, walk them and look. Changes nothing; the caller releases `view`."""
        view_tokens(token_ids, view)
        try:
            self.follow(view, namespace, walk)
        except BaseException:
            release_tokens(view)
            raise
        return 0

    cdef int follow(self, TokenView* view, object namespace, Walk* walk) except -1:
        """Walk the prompt and look. A namespace without a root is not made: its prompts match nothing, `walk.node` is
        NONE."""
        cdef uint32_t root = self.tree.root_of(namespace, False)
        walk[0] = at_root(root)
        if root != NONE:
            walk[0] = tree_walk(&self.tree.t, walk[0], view.data, view.count)
        check_tokens(view, walk.matched)
        self.look(walk[0], view.count)
        return 0

    cdef void look(self, Walk walk, uint32_t count) noexcept nogil:
        """Fill held, whole and usable tokens of every worker."""
        cdef uint32_t i, size, workers = self.tree.t.worker_end
        if walk.node != NONE:
            tree_matches(&self.tree.t, walk, self.held, workers)
        for i in range(workers):
            size = self.terms[i].block_size
            self.terms[i].held = self.held[i] if walk.node != NONE else 0
            self.terms[i].whole = self.terms[i].held - self.terms[i].held % size
            self.terms[i].usable = min(self.terms[i].whole, count - 1 - (count - 1) % size)
            self.terms[i].candidate = False

    # --- E2 ---

    cdef double eviction_seconds(self, uint32_t worker, Walk walk, int64_t need, double now) noexcept nogil:
        """M: seconds to compute again the `need` least recently used tokens, each times its hits in the window
        (Algorithm 2).

        Looks at `victims_max` nodes at most and extrapolates the rest; the prompt's own path is spared, as the engine
        would.
        """
        cdef uint32_t path[PATH_MAX]
        cdef uint32_t depth = 0, at, looked = 0, i = self.tree.t.workers[worker].recency.oldest
        cdef int64_t covered = 0, taken
        cdef double seconds = 0.0, uses
        cdef const Cost* cost = &self.book.workers[worker].cost
        cdef Node* node
        cdef Entry* entry
        cdef bint spared
        path[0] = walk.node
        while path[depth] != NONE and depth + 1 < PATH_MAX:
            path[depth + 1] = node_at(&self.tree.t, path[depth]).parent
            depth += 1
        while i != NONE and covered < need and looked < self.victims_max:
            looked += 1
            spared = False
            for at in range(depth + 1):
                spared = spared or path[at] == mark_at(&self.tree.t, i).node
            if not spared:
                node = node_at(&self.tree.t, mark_at(&self.tree.t, i).node)
                entry = find_entry(node, worker)
                taken = min(need - covered, <int64_t> entry.tokens)
                uses = hits_estimate(mark_at(&self.tree.t, i).hits, now, self.tree.t.window_seconds)
                seconds += uses * prefill_seconds(cost, taken, node.run.start + entry.tokens)
                covered += taken
            i = mark_at(&self.tree.t, i).newer
        if covered and covered < need and i != NONE:
            seconds *= need / <double> covered
        return seconds

    cdef void weigh(self, uint32_t worker, Walk walk, uint32_t count, int64_t max_new_tokens, double now,
                    double longest) noexcept nogil:
        """Fill L, M and P of one worker."""
        cdef Terms* terms = &self.terms[worker]
        cdef WorkerBook* account = &self.book.workers[worker]
        cdef WorkerMarks* marks = &self.tree.t.workers[worker]
        cdef int64_t room = marks.capacity - marks.tokens - account.live_output_tokens
        cdef int64_t need = count - terms.usable + self.book.expected_output(worker, max_new_tokens) - max(room, 0)
        terms.load = self.book.load_seconds(worker) * self.book.scale(worker, now, longest)
        terms.eviction = self.eviction_seconds(worker, walk, need, now) if need > 0 else 0.0
        terms.prefill = prefill_seconds(&account.cost, count - terms.usable, count)
        terms.total = terms.load + terms.eviction + terms.prefill

    cdef bint better(self, uint32_t a, uint32_t b) noexcept nogil:
        """Whether worker `a` beats `b`: lower total, then more cached, then fewer live requests, then less cached,
        then order."""
        cdef Terms* one = &self.terms[a]
        cdef Terms* two = &self.terms[b]
        if one.total != two.total:
            return one.total < two.total
        if one.usable != two.usable:
            return one.usable > two.usable
        if self.book.workers[a].live_requests != self.book.workers[b].live_requests:
            return self.book.workers[a].live_requests < self.book.workers[b].live_requests
        if self.tree.t.workers[a].tokens != self.tree.t.workers[b].tokens:
            return self.tree.t.workers[a].tokens < self.tree.t.workers[b].tokens
        return a < b

    cdef Choice choose_e2(self, Walk walk, uint32_t count, int64_t max_new_tokens, double now,
                          bint everyone) noexcept nogil:
        """The E2 rule. `everyone` fills the terms of all eligible workers, for an explanation. O(workers)."""
        cdef uint32_t i, best = 0, key_end = 0, workers = self.tree.t.worker_end
        cdef double longest = self.book.longest_observed(now)
        cdef Choice choice
        choice.worker = NONE
        for i in range(workers):
            if self.terms[i].eligible:
                best = max(best, self.terms[i].whole)
        choice.reason = EXPLOIT if best > self.exploit_ratio * count else EXPLORE
        if choice.reason == EXPLOIT:
            key_end = key_portion_end(&self.tree.t, walk, best)
        for i in range(workers):
            self.terms[i].candidate = self.terms[i].eligible and self.terms[i].whole >= key_end
            if self.terms[i].candidate or (everyone and self.terms[i].eligible):
                self.weigh(i, walk, count, max_new_tokens, now, longest)
            if self.terms[i].candidate and (choice.worker == NONE or self.better(i, choice.worker)):
                choice.worker = i
        return choice

    # --- Python policies ---

    cdef Choice choose_with(self, object policy, object asked, Walk walk, uint32_t count, int64_t max_new_tokens,
                            double now) except *:
        """Let a Python policy choose among the eligible workers; it sees every term and changes nothing."""
        cdef Choice choice
        cdef uint32_t i
        cdef double longest = self.book.longest_observed(now)
        indices = []
        for i in range(self.tree.t.worker_end):
            self.terms[i].candidate = self.terms[i].eligible
            if self.terms[i].eligible:
                self.weigh(i, walk, count, max_new_tokens, now, longest)
                indices.append(i)
        choice.worker = NONE
        choice.reason = OTHER
        if indices:
            choice.worker = indices[policy.decide(asked, self.view(indices))]
        return choice

    def view(self, list indices) -> object:
        """The eligible workers as columns, for a policy."""
        from .policy import WorkersView

        cdef uint32_t i
        return WorkersView(
            ids=[self.names[i] for i in indices],
            matched_tokens=[self.terms[i].usable for i in indices],
            load_seconds=[self.terms[i].load for i in indices],
            eviction_seconds=[self.terms[i].eviction for i in indices],
            prefill_seconds=[self.terms[i].prefill for i in indices],
            live_requests=[self.book.workers[i].live_requests for i in indices],
            waiting_requests=[self.book.workers[i].waiting_requests for i in indices],
            waiting_prefill_seconds=[self.book.workers[i].waiting_prefill_ns * 1e-9 for i in indices],
            live_output_tokens=[self.book.workers[i].live_output_tokens for i in indices],
            cached_tokens=[self.tree.t.workers[i].tokens for i in indices],
            kv_capacity_tokens=[self.tree.t.workers[i].capacity for i in indices],
        )

    # --- whole decisions ---

    def schedule(self, token_ids, object request_id, object namespace, int64_t max_new_tokens, double now,
                 object policy, object asked, bint with_costs) -> Decision:
        """Decide and book. `policy` None is E2; else a `Policy`, given `asked` (its RequestView). Errors change
        nothing."""
        cdef TokenView view
        cdef Walk walk
        cdef Choice choice
        cdef uint32_t usable
        self.need_room(request_id)
        self.need_eligible()
        self.prepare(&view, token_ids, namespace, &walk)
        try:
            self.book.advance(now)
            if policy is None:
                with nogil:
                    choice = self.choose_e2(walk, view.count, max_new_tokens, now, with_costs)
                reason = _REASONS[choice.reason]
            else:
                choice = self.choose_with(policy, asked, walk, view.count, max_new_tokens, now)
                reason = str(policy.reason)
                self.need_room(request_id)     # a policy that called this scheduler may have changed anything
                self.need_chosen(choice.worker, reason)
                self.follow(&view, namespace, &walk)
            usable = self.terms[choice.worker].usable
            costs = self.costs() if with_costs else None
            self.commit(request_id, choice.worker, &view, namespace, walk, max_new_tokens, now)
        finally:
            release_tokens(&view)
        return new_decision(request_id, self.names[choice.worker], usable, view.count, reason, costs)

    def need_room(self, object request_id) -> None:
        """Raise DuplicateRequest if the id is live, QueueFull if as many requests are live as may be."""
        if request_id in self.leases:
            raise DuplicateRequest(f"request_id {request_id!r} is live")
        if len(self.leases) >= self.live_max:
            raise QueueFull(f"{self.live_max} requests are live, the most allowed (SchedulerConfig.live_requests_max)")

    def need_chosen(self, uint32_t worker, str reason) -> None:
        """Raise InvalidInput if a policy has taken the worker it chose out of service."""
        if worker >= self.tree.t.worker_end or not self.terms[worker].eligible:
            raise InvalidInput(f"policy {reason!r} chose a worker and then took it out of service")

    def need_eligible(self) -> None:
        """Raise NoWorkers unless some worker may take a request."""
        cdef uint32_t i
        for i in range(self.tree.t.worker_end):
            if self.terms[i].eligible:
                return
        raise NoWorkers(f"none of the {sum(name is not None for name in self.names)} workers may take a request")

    def costs(self) -> dict[str, float]:
        """Total seconds of each eligible worker in the decision just made."""
        cdef uint32_t i
        return {self.names[i]: self.terms[i].total for i in range(self.tree.t.worker_end) if self.terms[i].eligible}

    cdef int commit(self, object request_id, uint32_t worker, TokenView* view, object namespace, Walk walk,
                    int64_t max_new_tokens, double now) except -1:
        """Book the decision: a lease, the load, the prompt's marks and hits. On MemoryError nothing stays booked.

        A prompt for whose namespace the tree has no room is booked all the same, and not remembered.
        """
        cdef Lease lease
        cdef uint32_t index, leaf
        cdef uint32_t missed = view.count - self.terms[worker].usable
        cdef double seconds = prefill_seconds(&self.book.workers[worker].cost, missed, view.count)
        if walk.node == NONE:
            walk = self.new_root(namespace, view.count)
        memset(&lease, 0, sizeof(Lease))
        lease.prompt_tokens = view.count
        lease.matched_tokens = self.terms[worker].usable
        lease.leaf_generation = NO_GENERATION
        if walk.node != NONE:
            lease.confirmed_tokens = confirmed_tokens(&self.tree.t, walk, worker)
        lease.expected_output = self.book.expected_output(worker, max_new_tokens)
        lease.prefill_ns = nanoseconds(seconds)
        index = self.book.book(worker, lease, now)
        if walk.node != NONE:
            if tree_insert(&self.tree.t, walk, view.data, view.count, worker, True, now, &leaf):
                self.book.void_lease(index)
                raise MemoryError("GlobalScheduler.schedule")
            self.book.lease_at(index).leaf = leaf
            self.book.lease_at(index).leaf_generation = generation(node_at(&self.tree.t, leaf))
        self.leases[request_id] = index
        return 0

    cdef Walk new_root(self, object namespace, uint32_t count) except *:
        """A walk at the root of a new namespace; NONE, with the tokens counted as refused, if the tree has no room."""
        try:
            return at_root(self.tree.root_of(namespace, True))
        except TreeFull:
            self.tree.t.refused_tokens += count
            return at_root(NONE)

    def explain(self, token_ids, object namespace, int64_t max_new_tokens, double now, object policy,
                object asked) -> tuple:
        """Decide without booking: (chosen index, reason, prompt tokens, rows of (index, usable, L, M, P, total,
        candidate))."""
        cdef TokenView view
        cdef Walk walk
        cdef Choice choice
        cdef uint32_t i
        self.need_eligible()
        self.prepare(&view, token_ids, namespace, &walk)
        release_tokens(&view)
        self.book.advance(now)
        if policy is None:
            choice = self.choose_e2(walk, view.count, max_new_tokens, now, True)
        else:
            choice = self.choose_with(policy, asked, walk, view.count, max_new_tokens, now)
        rows = [
            (i, self.terms[i].usable, self.terms[i].load, self.terms[i].eviction, self.terms[i].prefill,
             self.terms[i].total, bool(self.terms[i].candidate))
            for i in range(self.tree.t.worker_end) if self.terms[i].eligible
        ]
        reason = _REASONS[choice.reason] if choice.reason != OTHER else str(policy.reason)
        return choice.worker, reason, view.count, rows

    def match(self, token_ids, object namespace) -> tuple[int, int, dict[str, int]]:
        """(prompt tokens, known tokens, {worker: usable tokens}). Changes nothing."""
        cdef TokenView view
        cdef Walk walk
        cdef uint32_t i
        self.prepare(&view, token_ids, namespace, &walk)
        release_tokens(&view)
        found = {self.names[i]: self.terms[i].usable for i in range(self.tree.t.worker_end)
                 if self.terms[i].usable and self.names[i] is not None}
        return view.count, walk.matched, found

    def stored(self, token_ids, object namespace, uint32_t worker, double now) -> None:
        """An engine says that a worker caches this prefix: mark it, as known and not only predicted."""
        cdef TokenView view
        cdef Walk walk
        cdef uint32_t leaf
        self.prepare(&view, token_ids, namespace, &walk)
        try:
            if walk.node == NONE:
                walk = self.new_root(namespace, view.count)
            if walk.node == NONE:
                return
            if tree_insert(&self.tree.t, walk, view.data, view.count, worker, False, now, &leaf):
                raise MemoryError("GlobalScheduler.apply")
            confirm_path(&self.tree.t, leaf, worker)
        finally:
            release_tokens(&view)

    def removed(self, token_ids, object namespace, uint32_t worker, uint32_t start) -> None:
        """An engine says that a worker no longer caches the block that ends this prefix and begins at `start`: unmark
        every prefix through the whole of it. Blocks that only begin alike stay."""
        cdef TokenView view
        cdef Walk walk
        cdef uint32_t kept
        self.prepare(&view, token_ids, namespace, &walk)
        release_tokens(&view)
        if walk.node == NONE or walk.matched <= start:
            return
        kept = shared_end(&self.tree.t, walk, view.count, worker, start)
        if kept < walk.matched:
            while node_at(&self.tree.t, walk.node).run.start > kept:
                walk.node = node_at(&self.tree.t, walk.node).parent
            drop_below(&self.tree.t, walk.node, worker, kept)

    def advance(self, double now) -> None:
        """Let assigned work that is older than the window expire."""
        self.book.advance(now)

    # --- the rest of a request's life ---

    def first_token(self, object request_id, int64_t cached_tokens, double now) -> bool:
        """Prefill is done; `cached_tokens` is the engine's word on the hit, -1 if it said nothing. False if the id is
        not live."""
        cdef Lease* lease
        found = self.leases.get(request_id)
        if found is None:
            return False
        lease = self.book.lease_at(<uint32_t> found)
        if cached_tokens > lease.prompt_tokens:
            raise InvalidInput(f"cached_tokens is {cached_tokens}, the prompt has {lease.prompt_tokens} tokens")
        self.book.advance(now)
        if self.book.is_current(lease):
            self.correct(lease, cached_tokens, now)
            self.book.prefilled(lease)
        return True

    cdef void correct(self, Lease* lease, int64_t cached_tokens, double now) noexcept:
        """Bring load and marks in line with what the engine told. What it was known to hold and no longer held took
        along everything that hung below; what it has computed is there, whatever was believed in the meantime."""
        cdef bint alive = self.is_remembered(lease)
        cdef double seconds
        if cached_tokens >= 0:
            seconds = prefill_seconds(&self.book.workers[lease.worker].cost, lease.prompt_tokens - cached_tokens,
                                      lease.prompt_tokens)
            self.book.correct_prefill(lease, nanoseconds(seconds))
            if alive and cached_tokens < lease.matched_tokens and cached_tokens < lease.confirmed_tokens:
                drop_beside(&self.tree.t, lease.leaf, lease.worker, <uint32_t> cached_tokens)
            # Told once: what is computed from now on hangs there for good, also if `finish` says the number again.
            lease.confirmed_tokens = min(lease.confirmed_tokens, <uint32_t> cached_tokens)
        if alive and not lease.prefilled:
            self.remark(lease, now)
            confirm_path(&self.tree.t, lease.leaf, lease.worker)

    cdef bint is_remembered(self, Lease* lease) noexcept:
        """Whether the prompt's last node is still there."""
        cdef Node* leaf
        if lease.leaf_generation == NO_GENERATION:
            return False
        leaf = node_at(&self.tree.t, lease.leaf)
        return leaf.state & LIVE and generation(leaf) == lease.leaf_generation

    cdef void remark(self, Lease* lease, double now) noexcept:
        """Mark the prompt again if it was unmarked while it waited. Out of memory the belief stays what it was."""
        cdef Walk walk = self.leaf_walk(lease)
        cdef Node* node = node_at(&self.tree.t, walk.node)
        cdef Entry* entry = find_entry(node, lease.worker)
        cdef uint32_t leaf
        if entry == NULL or entry.tokens < node.run.length:
            tree_insert(&self.tree.t, walk, NULL, walk.matched, lease.worker, False, now, &leaf)

    cdef Walk leaf_walk(self, Lease* lease) noexcept:
        """A walk that ends where the prompt does."""
        cdef Walk walk
        cdef Node* node = node_at(&self.tree.t, lease.leaf)
        walk.node = lease.leaf
        walk.inside = node.run.length
        walk.matched = node.run.start + node.run.length
        return walk

    def finish(self, object request_id, int64_t output_tokens, int64_t cached_tokens, double now) -> bool:
        """The request is done. Counts as first token if that was not told. False if the id is not live."""
        cdef Lease* lease
        found = self.leases.get(request_id)
        if found is None:
            return False
        lease = self.book.lease_at(<uint32_t> found)
        if cached_tokens >= 0 or not lease.prefilled:
            self.first_token(request_id, cached_tokens, now)
        self.book.advance(now)
        del self.leases[request_id]
        self.book.end_lease(<uint32_t> found, output_tokens)
        return True

    def cancel(self, object request_id, double now) -> bool:
        """Give a booking back; before the first token also the belief that the prompt is cached, as far as no engine
        has confirmed it and no other request has passed lately. False if the id is not live."""
        cdef Lease* lease
        found = self.leases.pop(request_id, None)
        if found is None:
            return False
        self.book.advance(now)
        lease = self.book.lease_at(<uint32_t> found)
        if self.book.is_current(lease) and not lease.prefilled and self.is_remembered(lease):
            known = confirmed_tokens(&self.tree.t, self.leaf_walk(lease), lease.worker)
            take_back(&self.tree.t, lease.leaf, lease.worker, known, now)
        self.book.void_lease(<uint32_t> found)
        return True

    def lease(self, object request_id) -> dict[str, object]:
        """A live request's booking."""
        cdef Lease* lease = self.book.lease_at(<uint32_t> self.leases[request_id])
        current = self.book.is_current(lease)
        return {
            "worker": self.names[lease.worker] if current else None,
            "prompt_tokens": lease.prompt_tokens,
            "matched_tokens": lease.matched_tokens,
            "expected_output_tokens": lease.expected_output,
            "booked_at": lease.booked_at,
            "prefilled": bool(lease.prefilled),
        }

    def check(self) -> None:
        """Assert the invariants of tree and book, and that they agree on the workers."""
        cdef uint32_t i
        cdef bint named, booked, marked
        self.tree.check()
        self.book.check(list(self.leases.values()))
        for i in range(len(self.names)):
            named = self.names[i] is not None
            booked = i < self.book.end and bool(self.book.workers[i].used)
            marked = i < self.tree.t.worker_end and self.tree.t.workers[i].capacity > 0
            assert named == booked == marked, f"worker {i}: name {named}, book {booked}, tree {marked}"
            assert named or not self.terms[i].eligible, f"free worker {i} is eligible"
