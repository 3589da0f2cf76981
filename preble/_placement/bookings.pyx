"""Decisions that count: one scheduler's tree, load tracker and leases, and what a request's life does to them. Owns the
one function that books a decision (`commit`); the rule is `e2.pyx`, the calls of users come in by `request_api.pyx`.

A decision by E2 is one way from top to bottom, `decide`: the namespace's root, the walk, then as the tree's writer
`walk_and_book` (walk on, choose, `commit`), then the worker's name. `schedule` weighs every worker.
"""

from cpython.dict cimport PyDict_Next
from cpython.ref cimport Py_INCREF, Py_XDECREF, PyObject
from libc.math cimport INFINITY, nextafterf
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from preble._placement.decision cimport Decision, new_decision
from preble._core.atomic cimport FREE_THREADED, load32, load64, store32, store64, thread_number
from preble._core.dict_keys cimport dict_key
from preble._cost cimport Cost, CostModel, Lease, LoadTracker, Row, nanoseconds, prefill_seconds
from preble._placement.prefix_groups cimport Groups
from preble._placement.redirects cimport Redirect, Redirects, RedirectTable, find_redirect, load_redirects
from preble._placement.copy_credits cimport save
from preble._placement.e2 cimport (ANY_REQUEST, ESCAPE, EXPLOIT, EXPLORE, RENDEZVOUS, Choice, E2, Placement, Prices,
                                   Reason, Scratch, Terms, clear_scratch, load, use)
from preble._core.epochs cimport reader_enter, reader_leave
from preble._placement.timing_samples cimport TimingSamples, note_end, note_first
from preble._core.writer_lock cimport await_python, lock_enter, lock_leave, lock_try
from preble._core.tree.layout cimport Node, Tree, Walk, WorkerMarks, generation, is_same_node, node_at, run_end
from preble._core.tree.parts cimport find_entry
from preble._core.memory cimport NONE, slab_reserve
from preble._core.tree.nodes cimport at_root, confirmed_tokens, tree_walk, walk_holds
from preble._radix cimport SHORT_TOKENS, RadixTree
from preble._core.tree.reclaim cimport PLAIN, reclaim, retire_thing
from preble._core.token_ids cimport TokenView, check_tokens, has_negative, release_tokens, view_tokens
from preble._kv_index.cache_accuracy cimport Served
from preble._core.tree.operations cimport (await_blocks, confirm_path, drop_beside, limit_of, load_path, set_limit,
                                           take_back, tree_insert)

from sys import intern
from zlib import crc32

from ..errors import DuplicateRequest, InvalidInput, InvalidTokens, NoWorkers, QueueFull, TreeFull, UnknownWorker

cdef enum:
    NO_GENERATION = 0xFFFFFFFF   # no node has it: the prompt was not remembered
    ROOT_TRIES = 8               # times a namespace may vanish under a call before it goes unremembered
    SLICE = 32                   # prompts of one call walked as one reader, or booked in one hold of the lock
REASON_NAMES = ("exploit", "explore", "escape", "rebalance", "replica", "rendezvous")


cdef object exact(object name):
    """A worker's id as a str itself, whose hash and equality run no code; what is none stays what it is."""
    return str.__str__(name) if isinstance(name, str) and type(name) is not str else name


cdef class DecisionCore(E2):
    """One scheduler's compiled state: tree, load tracker, leases. Who changes it holds the lock (`with core.tree:`)."""

    def __init__(self, RadixTree tree not None, LoadTracker loads not None, *, uint32_t live_max, bint calibrate=True,
                 **rule):
        E2.__init__(self, tree, loads, **rule)
        self.groups = Groups(tree, loads)
        self.redirects = Redirects(tree)
        self.names = []
        self.names_now = ()
        self.leases = {}
        self.left_out = {}
        self.live_max = live_max
        self.timings = TimingSamples() if calibrate else None

    # --- workers ---

    def open_worker(self, str name, int64_t capacity_tokens, uint32_t block_size, CostModel cost, double now,
                    *, bint cached_first=False, int64_t places=0) -> int:
        """Give a worker an index, an empty cache and an empty account. An error changes nothing."""
        cdef uint32_t index, number = crc32(name.encode())
        cdef Cost* own = <Cost*> malloc(sizeof(Cost))
        if own == NULL:
            raise MemoryError("DecisionCore.open_worker")
        own[0] = cost.cost
        try:
            index = self.tree.add_worker(capacity_tokens)
            try:
                self.grow(index + 1)
                if self.timings is not None:
                    self.timings.open(index)
                self.names.extend([None] * (index + 1 - len(self.names)))
                names = (*self.names[:index], intern(name), *self.names[index + 1:])   # nobody counts references to it
                self.loads.open(index, own, places, now)
            except BaseException:
                self.tree.drop_worker(index)
                raise
        except BaseException:
            free(own)
            raise
        self.accuracy.open(index)
        self.state_rates(index)
        store32(&self.loads.rows[index].block_size, block_size)
        store32(&self.loads.rows[index].cached_first, cached_first)
        store32(&self.loads.rows[index].name, number)
        self.names[index] = names[index]
        self.names_now = names
        store64(&self.names_version, self.names_version + 1)
        self.set_eligible(index, True)
        return index

    def close_worker(self, uint32_t index) -> list[object]:
        """Forget a worker: marks, account, index. Its leases live on until they end; returns their requests' keys.
        Python's lock is held throughout: who was booked here and does not know yet finds out (`chosen_name`)."""
        cdef const Cost* cost
        orphans = self.live_on(index)
        self.left_out.pop(index, None)
        self.set_eligible(index, False)
        self.tree.drop_worker(index)
        cost = self.loads.close(index)
        retire_thing(&self.tree.t, <void*> cost, PLAIN, 0)
        self.accuracy.open(index)
        if self.timings is not None:
            self.timings.close(index)
        self.names[index] = None
        self.publish_names()
        return orphans

    cdef int publish_names(self) except -1:
        """Let everybody see what `names` is now. As the writer."""
        self.names_now = tuple(self.names)
        store64(&self.names_version, self.names_version + 1)
        return 0

    cdef tuple names_here(self):
        """`names_now`, without a lock. Where Python has none, either, a thread has its own copy: the one for all may be
        let go of meanwhile, and threads that count references to one object wait for each other."""
        cdef uint32_t number
        cdef OwnNames* own
        if not FREE_THREADED:
            return self.names_now
        number = thread_number()
        own = &self.own_names[number % <uint32_t> THREADS_KEPT]
        if load32(&own.thread) == number and own.version == load64(&self.names_version):
            return <tuple> own.names
        with self.tree:
            if own.thread != 0 and own.thread != number:
                return self.names_now
            copy = tuple(self.names)
            Py_XDECREF(own.names)
            Py_INCREF(copy)
            own.names = <PyObject*> copy
            own.version = self.names_version
            store32(&own.thread, number)
            return copy

    def __dealloc__(self):
        cdef uint32_t i
        for i in range(<uint32_t> THREADS_KEPT):
            Py_XDECREF(self.own_names[i].names)

    def set_eligible(self, uint32_t index, uint32_t eligible) -> None:
        """Which new requests a worker may take: none (0), any (1), or those exploited there (2). Under both locks.
        One that is left out of the decision being made does so from then on."""
        if index in self.left_out:
            self.left_out[index] = eligible
        else:
            self.serve(index, eligible)

    cdef int serve(self, uint32_t index, uint32_t eligible) except -1:
        store32(&self.eligible_workers, self.eligible_workers + (eligible == ANY_REQUEST)
                - (self.loads.rows[index].eligible == ANY_REQUEST))
        store32(&self.loads.rows[index].eligible, eligible)
        store64(&self.turnover, self.turnover + 1)
        return 0

    def leave_out(self, list names) -> list[int]:
        """Take workers out of the decision that is being made, until `take_back` is given what this returns. Under both
        locks. Raises UnknownWorker, and NoWorkers where there are none at all."""
        cdef uint32_t index
        names = [exact(name) for name in names]
        indices = dict.fromkeys([self.index_of(name) for name in names])
        self.need_workers()
        left_out = [index for index in indices if index not in self.left_out]
        for index in left_out:
            service = self.loads.rows[index].eligible
            self.serve(index, False)
            self.left_out[index] = service
        return left_out

    def take_back(self, list left_out) -> None:
        """Let workers be as they were, or as they have been set meanwhile; one that was removed stays so."""
        cdef uint32_t index
        for index in left_out:
            if index in self.left_out:
                self.serve(index, self.left_out.pop(index))

    def index_of(self, name) -> int:
        """A worker's index. Raises UnknownWorker."""
        name = exact(name)
        if type(name) is not str or name not in self.names:
            there = ", ".join([one for one in self.names if one is not None])
            raise UnknownWorker(f"no worker {name!r}; there are {there or 'none'}")
        return self.names.index(name)

    cdef int begin(self, Placement* request, TokenView* view, object space, int64_t max_new_tokens,
                   double now) except -1:
        """A placement request for these tokens, walked as far as the tree goes, in the namespace with the key `space`.
        For writers. Runs no code of users."""
        request.tokens = view.data
        request.count = view.count
        request.max_new_tokens = max_new_tokens
        request.now = now
        request.everyone = True
        request.from_peer = request.of_session = False
        self.bind_root(request, space, False)
        if request.root != NONE:
            request.walk = tree_walk(&self.tree.t, request.walk, view.data, view.count)
        check_tokens(view, request.walk.matched)
        return 0

    cdef int bind_root(self, Placement* request, object namespace, bint create) except -1:
        """Start the request's walk at its namespace's root. Made on demand, as the writer, if `create`: where the tree
        has no room for one it stays without, and its tokens are counted as refused."""
        request.root = self.tree.root_of(namespace, False)
        if request.root == NONE and create:
            with self.tree:
                try:
                    request.root = self.tree.root_of(namespace, True)
                except TreeFull:
                    self.tree.t.refused_tokens += request.count
        request.walk = at_root(&self.tree.t, request.root)
        request.root_generation = request.walk.generation
        return 0

    # --- Python policies ---

    cdef uint32_t choose_with(self, object policy, object asked, Placement* request) except? 0xFFFFFFFE:
        """Let a Python policy choose among the eligible workers; it sees every term and changes nothing."""
        cdef uint32_t i
        cdef Scratch* s = &self.scratch
        s.workers = self.tree.t.worker_end
        cdef uint32_t best = self.gather(s, request)
        cdef Prices prices = self.prices(request, best)
        self.weigh_all(s, request, self.least_held(best, request.count), &prices)
        clear_scratch(s)                         # before what may raise; terms stay
        for i in range(s.workers):
            s.terms[i].candidate = s.terms[i].weighed
        indices = [i for i in range(s.workers) if s.terms[i].weighed]
        return indices[policy.decide(asked, self.view(indices))] if indices else NONE

    def view(self, list indices) -> object:
        """The eligible workers as columns, for a policy."""
        from ..policies.base import WorkersView

        cdef uint32_t i
        return WorkersView(
            ids=[self.names[i] for i in indices],
            matched_tokens=[self.scratch.terms[i].usable for i in indices],
            load_seconds=[self.scratch.terms[i].load for i in indices],
            eviction_seconds=[self.scratch.terms[i].eviction for i in indices],
            prefill_seconds=[self.scratch.terms[i].prefill for i in indices],
            live_requests=[self.loads.workers[i].live_requests for i in indices],
            waiting_requests=[self.loads.workers[i].waiting_requests for i in indices],
            waiting_prefill_seconds=[self.loads.workers[i].waiting_prefill_ns * 1e-9 for i in indices],
            live_output_tokens=[self.loads.workers[i].live_output_tokens for i in indices],
            live_prompt_tokens=[self.loads.workers[i].live_prompt_tokens for i in indices],
            mean_output_tokens=[self.loads.expected_output(i, 0) for i in indices],
            context_token_seconds=[self.loads.rows[i].cost.context_slope for i in indices],
            cached_tokens=[self.tree.t.workers[i].tokens - self.tree.t.workers[i].away for i in indices],
            kv_capacity_tokens=[self.tree.t.workers[i].capacity for i in indices],
            hit_share=self.loads.hit_share,
            pressure=self.pressure_now(),
        )

    # --- whole decisions ---

    cdef str decide(self, TokenView* view, object namespace, Placement* request, Choice* choice):
        """Decide by E2 and book; returns the worker's id. Anew where the namespace vanishes under it, or the chosen
        worker before it can be returned. Raises what `schedule` says; then nothing is booked."""
        cdef Tree* t = &self.tree.t
        cdef uint32_t slot, tries = 0
        cdef int outcome
        cdef str name = None
        request.tokens = view.data
        request.count = view.count
        request.everyone = request.from_peer = False
        while name is None:
            self.need_eligible()
            self.bind_root(request, namespace, False)
            if request.root == NONE:
                check_tokens(view, 0)
                if tries < ROOT_TRIES:
                    self.bind_root(request, namespace, True)
            tries += 1
            if view.count <= SHORT_TOKENS and lock_try(&t.writer_lock):
                outcome = self.walk_and_book(view, request, choice, False)
                lock_leave(&t.writer_lock)
            else:
                with nogil:
                    if request.root != NONE:
                        slot = reader_enter(&t.epochs)
                        if generation(node_at(t, request.root)) == request.root_generation:
                            request.walk = tree_walk(t, request.walk, view.data, view.count)
                        reader_leave(&t.epochs, slot)
                    if has_negative(view, request.walk.matched):
                        outcome = NEGATIVE_TOKEN
                    else:
                        lock_enter(&t.writer_lock)
                        outcome = self.walk_and_book(view, request, choice, True)
                        lock_leave(&t.writer_lock)
                    await_python()
            if outcome == BOOKED:
                name = self.chosen_name(choice)
            elif outcome == NEGATIVE_TOKEN:
                check_tokens(view, 0)
                raise InvalidTokens("token_ids changed while they were read")
            elif outcome != ROOT_GONE:
                self.raise_outcome(outcome)
        return name

    cdef int walk_and_book(self, TokenView* view, Placement* request, Choice* choice, bint checked) noexcept nogil:
        """Walk on from where the request's walk is, choose by E2 and book, as the writer; `checked` if no token is
        negative. Returns an Outcome. Whatever is not BOOKED has changed nothing."""
        cdef Tree* t = &self.tree.t
        cdef Scratch* s = &self.scratch
        cdef int outcome = NOBODY_ELIGIBLE
        if request.root != NONE:
            if generation(node_at(t, request.root)) != request.root_generation:
                return ROOT_GONE
            if not walk_holds(t, request.walk):
                request.walk = at_root(t, request.root)
            request.walk = tree_walk(t, request.walk, request.tokens, request.count)
        if not checked and has_negative(view, request.walk.matched):
            return NEGATIVE_TOKEN
        self.loads.advance(request.now)
        s.workers = t.worker_end
        choice[0] = self.choose_e2(s, request)
        clear_scratch(s)
        if choice.worker != NONE:
            outcome = self.commit(request, choice)
        reclaim(t)
        return outcome

    # --- where Python has no lock: what `decide` does with it is done as the writer ---

    cdef int walk_ahead(self, TokenView* view, object namespace, Placement* request) except -1:
        """Walk a prompt as a reader, for `decide_walked`. Raises InvalidTokens."""
        cdef Tree* t = &self.tree.t
        cdef uint32_t slot
        request.tokens = view.data
        request.count = view.count
        request.everyone = request.from_peer = False
        self.bind_root(request, namespace, False)
        if request.root != NONE:
            slot = reader_enter(&t.epochs)
            if generation(node_at(t, request.root)) == request.root_generation:
                request.walk = tree_walk(t, request.walk, view.data, view.count)
            reader_leave(&t.epochs, slot)
        check_tokens(view, request.walk.matched)
        return 0

    cdef str decide_walked(self, TokenView* view, object namespace, Placement* request, Choice* choice):
        """`decide` from where `walk_ahead` came to, as the writer, who holds workers and names still."""
        cdef int outcome = ROOT_GONE
        self.need_eligible()
        if request.root != NONE:
            outcome = self.walk_and_book(view, request, choice, True)
        if outcome == ROOT_GONE:
            return self.decide(view, namespace, request, choice)
        self.raise_outcome(outcome)
        return self.names[choice.worker]

    # --- several prompts at once ---

    cdef int decide_many(self, Asked* asked, uint32_t count, object namespace, list names, uint32_t* at) except -1:
        """Decide by E2 and book all of these as `decide` would one by one; `names` receives their workers' ids.
        `at` says which one an error is about; what is `booked` in spite of it is the caller's to cancel."""
        cdef int outcome = BOOKED
        cdef uint32_t i
        cdef str name
        self.need_eligible()
        self.bind_many(asked, count, namespace, at)
        with nogil:
            at[0] = self.walk_many(asked, count)
            if at[0] == count:
                outcome = self.book_many(asked, count)
            await_python()
        if at[0] < count:
            check_tokens(&asked[at[0]].view, 0)
            raise InvalidTokens("token_ids changed while they were read")
        if outcome != ROOT_GONE:
            self.raise_outcome(outcome)
        for i in range(count):
            at[0] = i
            name = self.chosen_name(&asked[i].choice) if asked[i].booked else None
            if name is None:     # its worker has been removed since, or the namespace, or there is no room for one
                asked[i].booked = False
                name = self.decide(&asked[i].view, namespace, &asked[i].request, &asked[i].choice)
                asked[i].booked = True
            names.append(name)
        return 0

    cdef int bind_many(self, Asked* asked, uint32_t count, object namespace, uint32_t* at) except -1:
        """Start all walks at their namespace's root, made on demand once every token is known to be right."""
        cdef Placement* first = &asked[0].request
        cdef uint32_t i
        self.bind_root(first, namespace, False)
        if first.root == NONE:
            for i in range(count):
                at[0] = i
                check_tokens(&asked[i].view, 0)
            self.bind_root(first, namespace, True)
        for i in range(1, count):
            asked[i].request.root = first.root
            asked[i].request.root_generation = first.root_generation
            asked[i].request.walk = first.walk
        return 0

    cdef uint32_t walk_many(self, Asked* asked, uint32_t count) noexcept nogil:
        """Walk all prompts as a reader; returns the first that has a negative token, else `count`."""
        cdef Tree* t = &self.tree.t
        cdef Placement* request
        cdef uint32_t i = 0, end, slot
        while i < count:
            end = min(i + <uint32_t> SLICE, count)
            slot = reader_enter(&t.epochs)
            while i < end:
                request = &asked[i].request
                if request.root != NONE and generation(node_at(t, request.root)) == request.root_generation:
                    request.walk = tree_walk(t, request.walk, request.tokens, request.count)
                if has_negative(&asked[i].view, request.walk.matched):
                    end = 0
                else:
                    i += 1
            reader_leave(&t.epochs, slot)
            if end == 0:
                break
        return i

    cdef int book_many(self, Asked* asked, uint32_t count) noexcept nogil:
        """Choose for all prompts and book them, as the writer, in slices; returns an Outcome. One that is not BOOKED
        has left those that are not `booked`."""
        cdef Tree* t = &self.tree.t
        cdef int outcome = BOOKED
        cdef uint32_t i = 0, end
        while i < count and outcome == BOOKED:
            end = min(i + <uint32_t> SLICE, count)
            lock_enter(&t.writer_lock)
            while i < end and outcome == BOOKED:
                outcome = ROOT_GONE
                if asked[i].request.root != NONE:
                    outcome = self.walk_and_book(&asked[i].view, &asked[i].request, &asked[i].choice, True)
                asked[i].booked = outcome == BOOKED
                i += 1
            lock_leave(&t.writer_lock)
        return outcome

    cdef int commit(self, const Placement* request, Choice* choice) noexcept nogil:
        """Book the decision: a lease, the load, the prompt's marks and hits. When memory is out nothing stays booked. A
        prompt for whose namespace the tree has no room is booked all the same, and not remembered."""
        cdef Lease lease
        cdef Lease* booked
        cdef uint32_t leaf, key = self.tree.t.workers[choice.worker].key
        cdef Row* row = &self.loads.rows[choice.worker]
        cdef double seconds = prefill_seconds(row.cost, request.count - choice.usable, request.count)
        if slab_reserve(&self.loads.leases, &self.loads.budget, 1):
            return NO_MEMORY
        memset(&lease, 0, sizeof(Lease))
        lease.prompt_tokens = request.count
        lease.matched_tokens = choice.usable
        lease.alone = row.waiting_requests == 0
        lease.leaf_generation = NO_GENERATION
        if request.root != NONE:
            lease.confirmed_tokens = confirmed_tokens(&self.tree.t, request.walk, key)
        lease.expected_output = self.loads.expected_output(choice.worker, request.max_new_tokens)
        lease.prefill_ns = nanoseconds(seconds)
        choice.lease = self.loads.book(choice.worker, lease, request.now)
        self.note_placer(request.from_peer)
        choice.changes = self.tree.t.worker_changes
        if request.root == NONE:
            return BOOKED
        if tree_insert(&self.tree.t, request.walk, request.tokens, request.count, key, True, request.now, &leaf):
            self.loads.void_lease(self.loads.lease_of(choice.lease), request.now)
            return NO_MEMORY
        booked = self.loads.lease_of(choice.lease)
        if choice.credited != NONE:
            save(self.credits, &self.tree.t, choice.credited, 0.0 if choice.reason == ESCAPE else choice.credit,
                 request.now)
        if choice.loaded[0] or choice.loaded[1]:
            self.book_load(booked, choice, request.from_peer)
        booked.leaf = leaf
        booked.leaf_generation = generation(node_at(&self.tree.t, leaf))
        if request.count > choice.usable + row.block_size:
            await_blocks(&self.tree.t, leaf, key)
        if choice.reason != EXPLORE and choice.reason != RENDEZVOUS:
            self.groups.booked(booked, leaf, choice.usable)
        return BOOKED

    cdef str chosen_name(self, const Choice* choice):
        """The id of the worker a request was booked on, with Python's lock. If that worker has been removed since,
        None; then nothing stays booked."""
        cdef Lease* lease
        if choice.changes == load64(&self.tree.t.worker_changes):
            return self.names_now[choice.worker]
        with self.tree:
            lease = self.loads.lease_of(choice.lease)
            if self.loads.is_current(lease):
                return self.names[choice.worker]
            self.loads.void_lease(lease, lease.booked_at)
        return None

    cdef int raise_outcome(self, int outcome) except -1:
        """Turn an Outcome of `commit` or of a choice into an exception, unless it is BOOKED."""
        if outcome == NOBODY_ELIGIBLE:           # it was so under the lock, whoever has come since
            raise self.nobody()
        elif outcome == NO_MEMORY:
            raise MemoryError("GlobalScheduler.schedule")
        return 0

    def schedule(self, token_ids, object request_id, object key, object namespace, int64_t max_new_tokens, double now,
                 object policy, object asked, bint with_costs, bint of_session) -> Decision:
        """Decide and book, under the key that is claimed, with every worker weighed; under both locks. `policy` None is
        E2; else a `Policy`, given `asked` (its RequestView). `of_session`: its client names a session. Errors change
        nothing."""
        cdef TokenView view
        cdef Placement request
        cdef Choice choice
        view_tokens(token_ids, &view)
        try:
            space = self.tree.key_of(namespace)
            self.need_eligible()
            self.begin(&request, &view, space, max_new_tokens, now)
            request.of_session = of_session
            self.loads.advance(now)
            reason = self.choose(&request, policy, asked, &choice)
            if policy is not None:
                space = self.tree.key_of(namespace)    # a policy that called this scheduler may have changed anything
                if choice.worker >= self.tree.t.worker_end or not self.loads.rows[choice.worker].eligible:
                    raise InvalidInput(f"policy {reason!r} chose a worker and then took it out of service")
                self.begin(&request, &view, space, max_new_tokens, now)
                self.size_up_one(&request, choice.worker)
            use(&choice, &self.scratch.terms[choice.worker])
            costs = self.costs() if with_costs else None
            return self.booked(&request, &choice, request_id, key, space, reason, costs)
        finally:
            release_tokens(&view)

    def book_on(self, uint32_t worker, token_ids, object request_id, object key, object namespace,
                int64_t max_new_tokens, double now) -> Decision:
        """Book a request that was placed on a worker elsewhere, under the key that is claimed. Errors change nothing.
        Raises UnknownWorker if the worker was removed by what the arguments run."""
        cdef TokenView view
        cdef Placement request
        cdef Choice choice
        view_tokens(token_ids, &view)
        try:
            space = self.tree.key_of(namespace)
            self.tree.need_worker(worker)
            self.begin(&request, &view, space, max_new_tokens, now)
            request.from_peer = True
            self.loads.advance(now)
            self.size_up_one(&request, worker)
            choice.worker = worker
            choice.credited = NONE
            use(&choice, &self.scratch.terms[worker])
            choice.reason = EXPLOIT if choice.usable > request.count * self.exploit_ratio else EXPLORE
            return self.booked(&request, &choice, request_id, key, space, "peer", None)
        finally:
            release_tokens(&view)

    cdef Decision booked(self, Placement* request, Choice* choice, object request_id, object key, object space,
                         str reason, object costs):
        """Book what was chosen, in a namespace that may be new."""
        if request.root == NONE:
            self.bind_root(request, space, True)
        self.raise_outcome(self.commit(request, choice))
        self.leases[key] = choice.lease
        return new_decision(request_id, self.names[choice.worker], choice.usable, request.count, reason, costs)

    cdef void size_up_one(self, const Placement* request, uint32_t worker) noexcept nogil:
        """Size up one worker."""
        cdef Scratch* s = &self.scratch
        clear_scratch(s)
        s.workers = self.tree.t.worker_end
        self.gather(s, request)
        self.size_up(&s.terms[worker], worker, s.held[worker], request.count)
        load(&s.terms[worker], s, worker)
        clear_scratch(s)

    cdef bint redirect(self, const Placement* request, Choice* choice) noexcept nogil:
        """Where the prompt's prefix is redirected, the best target that may take it takes the place of a policy's
        choice; whether one does. Of several it must be better than the choice: copies are there to be used, not to keep
        others out. A redirect away from one worker is for what would have reused its cache there."""
        cdef const RedirectTable* table = load_redirects(&self.redirects.table)
        cdef const Redirect* redirect = NULL
        cdef Terms* terms = self.scratch.terms
        cdef uint32_t at, i, chosen = NONE
        if (table != NULL and request.root != NONE and walk_holds(&self.tree.t, request.walk)
                and (choice.reason == EXPLOIT or request.walk.matched > self.exploit_ratio * request.count)):
            redirect = find_redirect(table, &self.tree.t, request.walk, choice.worker)
        if redirect == NULL or (redirect.source != NONE and choice.reason != EXPLOIT):
            return False
        for at in range(redirect.count + (redirect.count > 1)):
            i = redirect.targets[at] if at < redirect.count else choice.worker
            if i < self.scratch.workers and self.loads.rows[i].eligible == ANY_REQUEST and terms[i].weighed:
                if chosen == NONE or self.better(&terms[i], i, &terms[chosen], chosen):
                    chosen = i
        if chosen == NONE or chosen == choice.worker:
            return False
        choice.worker = chosen
        choice.reason = <Reason> redirect.reason
        return True

    cdef str choose(self, Placement* request, object policy, object asked, Choice* choice):
        """Choose with every worker weighed; returns the reason."""
        if policy is not None:
            choice.credited = NONE
            choice.worker = self.choose_with(policy, asked, request)
            choice.reason = EXPLORE
            if choice.worker != NONE and self.scratch.terms[choice.worker].usable > self.exploit_ratio * request.count:
                choice.reason = EXPLOIT
            if policy.takes_plans and choice.worker != NONE and self.redirect(request, choice):
                return REASON_NAMES[choice.reason]
            return str(policy.reason)
        self.scratch.workers = self.tree.t.worker_end
        choice[0] = self.choose_e2(&self.scratch, request)
        clear_scratch(&self.scratch)
        return REASON_NAMES[choice.reason]

    def need_room(self, object key) -> None:
        """Raise DuplicateRequest if the key is that of a live request, QueueFull if as many are live as may be."""
        if key in self.leases:
            raise DuplicateRequest(f"request_id {key!r} is live")
        if len(self.leases) >= self.live_max:
            raise QueueFull(f"{self.live_max} requests are live, the most allowed (SchedulerConfig.live_requests_max)")

    cdef int need_workers(self) except -1:
        """Raise NoWorkers where there are none at all."""
        if load32(&self.eligible_workers) == 0 and not any(name is not None for name in self.names):
            raise NoWorkers("the scheduler has no workers; add_worker first")
        return 0

    cdef int need_eligible(self) except -1:
        """Raise NoWorkers unless some worker may take a request; waits for decisions that leave workers out."""
        if load32(&self.eligible_workers) == 0:
            with self.tree:
                if self.eligible_workers == 0:
                    raise self.nobody()
        return 0

    def nobody(self) -> NoWorkers:
        return NoWorkers(f"none of the {sum(name is not None for name in self.names)} workers may take a request")

    def costs(self) -> dict[str, float]:
        """Total seconds of each eligible worker in the decision just made."""
        cdef uint32_t i
        return {self.names[i]: self.scratch.terms[i].total for i in range(self.tree.t.worker_end)
                if self.loads.rows[i].eligible}

    def restore_accuracy(self, uint32_t worker, object state) -> None:
        """Restore what was reported about a worker's cache, and with it how much it may be estimated to hold."""
        with self.tree:
            self.accuracy.restore(worker, state)
            set_limit(&self.tree.t, worker, self.accuracy.on_events(worker))

    def advance(self, double now) -> None:
        """Let assigned work that is older than the window expire."""
        self.loads.advance(now)

    # --- the rest of a request's life: as the writer, by lease ---

    cdef int prefilled(self, int64_t key, int64_t cached_tokens, double now) noexcept nogil:
        """Prefill is done; `cached_tokens` is the engine's word on the hit, -1 if it said nothing. Returns an
        Ending."""
        cdef Lease* lease = self.live_lease(key)
        if lease == NULL:
            return LATE
        if cached_tokens > lease.prompt_tokens:
            return TOO_MANY_CACHED
        if self.timings is not None and not lease.prefilled and self.loads.is_current(lease):
            note_first(self.timings.at[lease.worker], lease, lease.prompt_tokens - <uint32_t> (
                lease.matched_tokens if cached_tokens < 0 else cached_tokens), self.decodes_on(lease.worker),
                self.loading_of(lease) if self.tree.t.below else 0.0, now)
        if self.tree.t.below:
            self.learn_load(lease, cached_tokens, now)
        self.first_seen(lease, cached_tokens, now)
        return DONE

    cdef int64_t decodes_on(self, uint32_t worker) noexcept nogil:  # requests that have their first token
        return self.loads.workers[worker].live_requests - self.loads.workers[worker].waiting_requests

    cdef Lease* live_lease(self, int64_t key) noexcept nogil:
        return self.loads.lease_of(key) if key != PENDING else NULL

    cdef void first_seen(self, Lease* lease, int64_t cached_tokens, double now) noexcept nogil:
        self.loads.advance(now)
        if self.loads.is_current(lease):
            self.correct(lease, cached_tokens, now)
            if lease.share and not lease.prefilled:
                self.groups.first_token(lease, now)
            self.loads.prefilled(lease, now)

    cdef void correct(self, Lease* lease, int64_t cached_tokens, double now) noexcept nogil:
        """Bring load and marks in line with what the engine reported. What it was known to hold and held no longer took
        along all that hung below, unless events report what goes; what it has computed is there."""
        cdef bint alive = self.is_remembered(lease)
        cdef uint32_t key = self.tree.t.workers[lease.worker].key
        cdef double seconds
        self.learn(lease, cached_tokens, alive, key)
        if cached_tokens >= 0:
            seconds = prefill_seconds(self.loads.rows[lease.worker].cost, lease.prompt_tokens - cached_tokens,
                                      lease.prompt_tokens)
            if lease.share:
                self.groups.corrected(lease, nanoseconds(seconds) - lease.prefill_ns, 0)
            self.loads.correct_prefill(lease, nanoseconds(seconds))
            if (alive and cached_tokens < lease.matched_tokens and cached_tokens < lease.confirmed_tokens
                    and not self.accuracy.on_events(lease.worker)):
                drop_beside(&self.tree.t, lease.leaf, key, <uint32_t> cached_tokens)
            # Reported once: what is computed from now on hangs there for good, also if `finish` says the number again.
            lease.confirmed_tokens = min(lease.confirmed_tokens, <uint32_t> cached_tokens)
        if alive and not lease.prefilled:
            self.remark(lease, now)
            confirm_path(&self.tree.t, lease.leaf, key)
            if self.tree.t.away and self.tree.t.workers[lease.worker].away:
                load_path(&self.tree.t, lease.leaf, key, 0, lease.prompt_tokens)

    cdef void learn(self, Lease* lease, int64_t cached_tokens, bint alive, uint32_t key) noexcept nogil:
        """Note how the estimates of the worker's cache fared, before they are corrected."""
        cdef Node* leaf = node_at(&self.tree.t, lease.leaf)
        cdef WorkerMarks* marks = &self.tree.t.workers[lease.worker]
        cdef Served one
        one.worker = lease.worker
        one.block_size = max(self.loads.rows[lease.worker].block_size, 1)
        one.prompt_tokens = lease.prompt_tokens
        one.matched_tokens = lease.matched_tokens
        one.confirmed_tokens = lease.confirmed_tokens
        one.leaf = lease.leaf
        one.leaf_generation = lease.leaf_generation
        one.remembered = alive and run_end(leaf.run) == lease.prompt_tokens
        one.marked = alive and find_entry(leaf, key).end == run_end(leaf.run)
        one.cached_tokens = cached_tokens
        if not lease.prefilled:
            self.accuracy.prompt_done(&one)
        if cached_tokens >= 0 and not lease.hit_reported:
            lease.hit_reported = True
            self.accuracy.reported(&one)
        if marks.evictions_reported and not self.accuracy.on_events(lease.worker):
            set_limit(&self.tree.t, lease.worker, False)

    cdef bint is_remembered(self, Lease* lease) noexcept nogil:
        """Whether the prompt's last node is still there."""
        return lease.leaf_generation != NO_GENERATION and is_same_node(&self.tree.t, lease.leaf, lease.leaf_generation)

    cdef void remark(self, Lease* lease, double now) noexcept nogil:
        """Mark the prompt again if it was unmarked while it waited. Out of memory the estimate stays what it was."""
        cdef Walk walk = self.leaf_walk(lease)
        cdef uint32_t leaf, key = self.tree.t.workers[lease.worker].key
        if find_entry(node_at(&self.tree.t, walk.node), key).end < walk.matched:
            tree_insert(&self.tree.t, walk, NULL, walk.matched, key, False, now, &leaf)

    cdef Walk leaf_walk(self, Lease* lease) noexcept nogil:
        """A walk that ends where the prompt does."""
        cdef Walk walk
        cdef Node* node = node_at(&self.tree.t, lease.leaf)
        walk.node = lease.leaf
        walk.inside = node.run.length
        walk.matched = run_end(node.run)
        walk.generation = lease.leaf_generation
        return walk

    cdef int ended(self, int64_t key, int64_t output_tokens, int64_t cached_tokens, double now) noexcept nogil:
        """The request is done. Counts as first token if that was not reported. Returns an Ending."""
        cdef Lease* lease = self.live_lease(key)
        if lease == NULL:
            return LATE
        if cached_tokens > lease.prompt_tokens:
            return TOO_MANY_CACHED
        if self.timings is not None and lease.prefilled and self.loads.is_current(lease):
            note_end(self.timings.at[lease.worker], lease, output_tokens, self.decodes_on(lease.worker),
                     self.loads.workers[lease.worker].waiting_prefill_ns, now)
        if cached_tokens >= 0 or not lease.prefilled:
            self.first_seen(lease, cached_tokens, now)
        self.loads.advance(now)
        if lease.share and output_tokens >= 0:
            self.groups.corrected(lease, 0, output_tokens - <int64_t> lease.expected_output)
        self.loads.end_lease(lease, output_tokens, now)
        return DONE

    cdef int cancelled(self, int64_t key, double now) noexcept nogil:
        """Give a booking back; before the first token also the estimate that the prompt is cached, as far as no engine
        has confirmed it and no other request has passed lately. Returns an Ending."""
        cdef Lease* lease = self.live_lease(key)
        cdef uint32_t known, owner
        if lease == NULL:
            return LATE
        self.loads.advance(now)
        if self.loads.is_current(lease) and not lease.prefilled and self.is_remembered(lease):
            owner = self.tree.t.workers[lease.worker].key
            known = confirmed_tokens(&self.tree.t, self.leaf_walk(lease), owner)
            take_back(&self.tree.t, lease.leaf, owner, known, lease.booked_at, now)
        if lease.share:
            self.groups.taken_back(lease)
        self.loads.void_lease(lease, now)
        return DONE

    # --- live requests, by key: a user's id is made one by `live_key` ---

    def live_key(self, object request_id) -> object:
        """A live request's key, None if it is not live. Raises what hash and equality of the id do."""
        key = dict_key(self.leases, request_id)
        return key if key in self.leases else None

    cdef int64_t lease_key(self, object key) except? -1:
        found = self.leases.get(key)
        return PENDING if found is None else <int64_t> found

    def renew(self, object request_id, double now) -> bool:
        """Note a sign of life of a live request. False if it is not live, or just being placed."""
        cdef Lease* lease
        cdef double seconds
        key = dict_key(self.leases, request_id)
        with self.tree:
            lease = self.live_lease(self.lease_key(key))
            if lease == NULL:
                return False
            seconds = now - lease.booked_at
            if seconds > lease.renewed_seconds:
                lease.renewed_seconds = <float> seconds
                if lease.renewed_seconds < seconds:
                    lease.renewed_seconds = nextafterf(lease.renewed_seconds, INFINITY)
        return True

    def seen_at(self, object request_id) -> float:
        """When a live request was booked or last renewed; infinity if it is not live, or just being placed."""
        cdef Lease* lease
        key = dict_key(self.leases, request_id)
        with self.tree:
            lease = self.live_lease(self.lease_key(key))
            return INFINITY if lease == NULL else lease.booked_at + lease.renewed_seconds

    def unseen_since(self, double then, double now) -> list[object]:
        """Keys of live requests booked before a time and not renewed since, in that order. O(those booked before)."""
        cdef PyObject* request
        cdef PyObject* key
        cdef Py_ssize_t place = 0
        cdef Lease* lease
        found = []
        with self.tree:
            while PyDict_Next(self.leases, &place, &request, &key):          # no other code runs in this loop
                lease = self.live_lease(<int64_t> <object> key)
                if lease != NULL and then <= lease.booked_at <= now:         # after `now`: the clock has gone back
                    break
                if lease != NULL and lease.booked_at + lease.renewed_seconds < then:
                    found.append(<object> request)
        return found

    def live_on(self, uint32_t worker) -> list[object]:
        """Keys of a worker's live requests. O(live requests)."""
        cdef PyObject* request
        cdef PyObject* key
        cdef Py_ssize_t place = 0
        cdef Lease* lease
        found = []
        with self.tree:
            while PyDict_Next(self.leases, &place, &request, &key):
                lease = self.live_lease(<int64_t> <object> key)
                if lease != NULL and lease.worker == worker and self.loads.is_current(lease):
                    found.append(<object> request)
        return found

    def lease(self, object request_id) -> dict[str, object]:
        """A live request's booking. Raises KeyError for one that is not live."""
        cdef Lease* lease = self.live_lease(<int64_t> self.leases[dict_key(self.leases, request_id)])
        if lease == NULL:                        # being placed, or just ended
            return {"worker": None, "prefilled": False, "booked_at": INFINITY}
        current = self.loads.is_current(lease)
        return {
            "worker": self.names[lease.worker] if current else None,
            "prompt_tokens": lease.prompt_tokens,
            "matched_tokens": lease.matched_tokens,
            "expected_output_tokens": lease.expected_output,
            "booked_at": lease.booked_at,
            "prefilled": bool(lease.prefilled),
        }

    def check(self) -> None:
        """Assert the invariants of tree and load tracker, and that they agree on the workers."""
        cdef uint32_t i
        cdef bint named, booked, marked
        self.tree.check()
        self.loads.check()
        self.accuracy.check()
        assert self.scratch.count == 0, "a decision has left what workers hold of its prompt behind"
        known = [key for key in self.leases.values() if self.live_lease(key) != NULL]
        pending = sum(1 for key in self.leases.values() if key == PENDING)
        assert len(known) <= self.loads.live <= len(known) + pending, (
            f"{len(known)} leases known, {self.loads.live} open")
        for i in range(len(self.names)):
            named = self.names[i] is not None
            booked = i < self.loads.end and bool(self.loads.workers[i].used)
            marked = i < self.tree.t.worker_end and self.tree.t.workers[i].capacity > 0
            assert named == booked == marked, f"worker {i}: name {named}, book {booked}, tree {marked}"
            assert named or not self.loads.rows[i].eligible, f"free worker {i} is eligible"
            limit = limit_of(self.tree.t.workers[i].capacity, self.tree.t.workers[i].below, self.accuracy.on_events(i))
            assert not named or self.tree.t.workers[i].limit == limit, f"worker {i}: limit"
