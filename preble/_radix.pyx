"""The Python face of the token radix tree. Owns which prefixes exist, which worker is estimated to cache how much of
each, how often each was hit within the window, and each worker's recency order. Knows no sockets, no clock (times are
arguments), no policy.

The algorithms are in `_core/tree/operations.pyx` and `_core/tree/nodes.pyx`, layout, pictures and invariants in
`_core/tree/layout.pxd`, `check` and `show` in `_core/tree/audit.pyx`. Threads may share a tree: what changes it holds
the writers' lock, `match` holds a reader's slot and no lock. Workers are dense indices here; their names belong to the
scheduler. Paper section 4.2.
"""

from collections import deque

from libc.math cimport isfinite
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from preble._core.atomic cimport load32, load64, load_signed, store32, store64, store_signed
from preble._core.dict_keys cimport dict_key, key_bytes, key_value
from preble._core.tree.audit cimport check_tree, show_tree
from preble._core.prefix_compare cimport KERNELS, Kernel, kernel_at, kernel_name, kernel_names
from preble._core.epochs cimport epochs_close, epochs_init, reader_enter, reader_leave, reader_try
from preble._core.writer_lock cimport await_python, lock_close, lock_enter, lock_init, lock_leave, lock_try
from preble._core.tree.layout cimport (LIVE, NAMESPACE_BYTES, Entry, Mark, Node, TokenRun, Tree, Walk, WorkerMarks,
                                       generation, load_workers, mark_at, node_at, run_end, store_workers)
from preble._core.tree.parts cimport find_entry, free_run, fresh_rows, hits_estimate, new_run, put_below
from preble._core.memory cimport NONE, budget_alloc, slab_close, slab_init, slab_reserve
from preble._core.tree.nodes cimport at_root, free_node, held_on_path, on_gpu, send_away, take_node, tree_walk
from preble._core.tree.reclaim cimport reclaim, reclaim_soon, retire_memory
from preble._core.tree.child_table cimport TABLE_START, new_table
from preble._core.token_ids cimport TokenView, check_tokens, release_tokens, view_tokens
from preble._core.tree.operations cimport (clear_marks, drop_below, fixed_bytes, forget_dead, has_dead,
                                           make_room_for_root, set_limit, sweep_ghosts, tree_insert)

from .errors import InvalidConfig, InvalidInput, InvalidTime, TreeFull, UnknownWorker

cdef enum:
    WORKERS_MAX = 65536
    EXPIRE_SLICE = 64            # aging nodes looked at in one hold of the lock, some 20 us
    SWEEP_SLICE = 256            # marks of cleared workers swept in one hold of the lock
    EMPTY_ROOT_CHECKS = 64       # namespaces looked at for removal at a time
    ROOT_SHED_STEPS = 4096       # aging nodes looked at to make room for a namespace; without a root it cannot be

# Together these keep window numbers within 64 bits.
cdef double TIME_MAX = 1e15
cdef double WINDOW_SECONDS_MIN = 1e-3


cdef double finite(object now) except? -1.0:
    """A time in seconds as C double. Raises InvalidTime beyond +-1e15, where a clock has no business."""
    cdef double value = now
    if not -TIME_MAX <= value <= TIME_MAX:
        raise InvalidTime(f"now must be finite and within 1e15 seconds, got {now!r}")
    return value


def common_tokens(a, b) -> dict[str, int]:
    """Tests only: how many leading tokens of two int32 buffers agree, by each kernel that this machine can run."""
    cdef TokenView one, two
    cdef Kernel kernel
    cdef int width
    view_tokens(a, &one, allow_empty=True)
    try:
        view_tokens(b, &two, allow_empty=True)
        try:
            count = min(one.count, two.count)
            answer = {}
            for width in range(KERNELS):
                kernel = kernel_at(width)
                if kernel != NULL:
                    answer[kernel_names[width].decode()] = kernel(one.data, two.data, count)
            return answer
        finally:
            release_tokens(&two)
    finally:
        release_tokens(&one)


cdef class RadixTree:
    """Prefix trees over token ids, one per namespace, with marks of who caches what. All methods are thread-safe.

    `max_bytes` bounds everything the tree allocates, enforced at each insert: old, unhit prefixes go first, and a
    prompt that still does not fit is not remembered (counted in `stats`). `window_seconds` is the paper's history
    window H.
    """

    def __cinit__(self, *, int64_t max_bytes=1 << 30, double window_seconds=180.0):
        memset(&self.t, 0, sizeof(Tree))
        if not isfinite(window_seconds) or window_seconds < WINDOW_SECONDS_MIN:
            raise InvalidConfig(
                f"window_seconds must be finite and at least {WINDOW_SECONDS_MIN}, got {window_seconds!r}")
        if max_bytes < 1 << 20:
            raise InvalidConfig(f"max_bytes must be at least 1048576, got {max_bytes}")
        self.t.budget.limit = max_bytes
        self.t.window_seconds = window_seconds
        self.t.marked.oldest = self.t.marked.newest = NONE
        self.t.unmarked.oldest = self.t.unmarked.newest = NONE
        self.t.ghost.recency.oldest = self.t.ghost.recency.newest = self.t.ghost.recency.warm = NONE
        self.t.table = new_table(&self.t.budget, TABLE_START)
        if (self.t.table == NULL or slab_init(&self.t.nodes, sizeof(Node)) or slab_init(&self.t.marks, sizeof(Mark))
                or epochs_init(&self.t.epochs) or lock_init(&self.t.writer_lock)):
            raise MemoryError("RadixTree")
        self._roots = {}
        self.unnamed_root = NONE
        self._names = {}
        self._root_queue = deque()

    def __dealloc__(self):
        cdef uint32_t i
        if self.t.epochs.slots != NULL and self.t.epochs.queue != NULL:
            reclaim(&self.t)                     # nobody reads a tree that nobody holds
        if self.t.nodes.chunks != NULL:
            for i in range(self.t.nodes.chunk_count * 1024):
                if node_at(&self.t, i).state & LIVE:
                    free(node_at(&self.t, i).run)
                    free(node_at(&self.t, i).block)
            slab_close(&self.t.nodes, &self.t.budget)
        if self.t.marks.chunks != NULL:
            slab_close(&self.t.marks, &self.t.budget)
        free(self.t.draining)
        free(self.t.table)
        free(self.t.workers)
        epochs_close(&self.t.epochs)
        lock_close(&self.t.writer_lock)

    # --- the lock ---

    cdef void enter(self) noexcept:
        """Become the writer; with Python's lock, which is let go while waiting. May be nested."""
        if lock_try(&self.t.writer_lock):
            return
        with nogil:
            lock_enter(&self.t.writer_lock)
            await_python()

    cdef void leave(self) noexcept:
        reclaim(&self.t)
        lock_leave(&self.t.writer_lock)

    def __enter__(self):
        self.enter()
        return self

    def __exit__(self, *_):
        self.leave()

    cdef object key_of(self, object namespace):
        """The key of a namespace, known or not; `root_of` takes it in place of the namespace and then runs no code of
        users. It holds until such code runs or the lock is let go. Raises TypeError for unhashable namespaces."""
        return dict_key(self._roots, namespace)

    cdef uint32_t root_of(self, object namespace, bint create) except? 0xFFFFFFFE:
        """The namespace's root, NONE if it has none and `create` is false. Raises TypeError for unhashable namespaces,
        TreeFull if a bounded search found no room for a root under max_bytes."""
        cdef TokenRun* run
        cdef uint32_t i
        cdef int64_t name_bytes
        if namespace is None:
            i = load32(&self.unnamed_root)
            if i != NONE:
                return i
        key = dict_key(self._roots, namespace)   # what users' code does is done by now
        found = self._roots.get(key)
        if found is not None:
            return <uint32_t> found
        if not create:
            return NONE
        name_bytes = NAMESPACE_BYTES + key_bytes(key)
        if fixed_bytes(&self.t) + name_bytes > self.t.budget.limit:      # costs nobody else's place
            raise TreeFull(f"a namespace of {name_bytes} bytes does not fit within max_bytes ({self.t.budget.limit})")
        if not make_room_for_root(&self.t, name_bytes, 0):
            _forgotten = self.forget_empty_roots()       # kept until the new one is in: letting go may run code
            if not make_room_for_root(&self.t, name_bytes, ROOT_SHED_STEPS):
                raise TreeFull(f"no room for one more namespace within max_bytes ({self.t.budget.limit})")
        run = new_run(&self.t, 0, NULL, NULL, 0)
        if run == NULL or slab_reserve(&self.t.nodes, &self.t.budget, 1):
            free_run(&self.t, run)
            raise MemoryError("namespace root")
        i = take_node(&self.t, run, NONE)
        self.name_root(i, key)
        return i

    cdef int name_root(self, uint32_t i, object key) except -1:
        """Enter a new root under the key of its namespace."""
        self._roots[key] = i
        self._names[i] = key
        self._root_queue.append(i)
        if key is None:
            store32(&self.unnamed_root, i)
        self.t.budget.used += NAMESPACE_BYTES + key_bytes(key)
        return 0

    cdef list forget_empty_roots(self):
        """Drop namespaces without a prefix and without a pin, a bounded number of candidates at a time; returns their
        keys."""
        cdef uint32_t i
        cdef Node* root
        forgotten = []
        for _ in range(min(EMPTY_ROOT_CHECKS, len(self._root_queue))):
            i = self._root_queue.popleft()
            root = node_at(&self.t, i)
            if root.first_child == NONE and root.hits == 0:        # a root's `hits` counts the holds that end on it
                key = self._names.pop(i)
                del self._roots[key]
                if key is None:
                    store32(&self.unnamed_root, NONE)
                self.t.budget.used -= NAMESPACE_BYTES + key_bytes(key)
                forgotten.append(key)
                free_node(&self.t, i)
            else:
                self._root_queue.append(i)
        return forgotten

    cdef tuple path_to(self, uint32_t i, uint32_t end, uint32_t start=0):
        """(namespace, token ids from position `start` to `end`) of the path to a live node. As the writer."""
        cdef TokenRun* run
        cdef uint32_t at, first
        parts = []
        while node_at(&self.t, i).parent != NONE:
            run = node_at(&self.t, i).run
            if run.start < end and run_end(run) > start:
                first = start - run.start if start > run.start else 0
                parts.append([run.tokens[at] for at in range(first, min(run.length, end - run.start))])
            i = node_at(&self.t, i).parent
        return key_value(self._names[i]), [token for part in reversed(parts) for token in part]

    cdef int need_worker(self, uint32_t worker) except -1:
        if worker >= self.t.worker_end or self.t.workers[worker].capacity == 0:
            raise UnknownWorker(f"no worker with index {worker}")
        return 0

    cdef int need_estimates(self) except -1:
        """Refuse writes that would leave a slot tree with tokens that have no slot, or slots that have no tokens."""
        if self.t.with_slots:
            raise InvalidInput("a SlotTree changes by hold, extend, release and evict only")
        return 0

    # --- workers ---

    def add_worker(self, int64_t capacity_tokens) -> int:
        """Register a worker that can cache `capacity_tokens`; returns its index, the lowest free one."""
        cdef uint32_t i = 0
        if capacity_tokens < 1:
            raise InvalidConfig(f"capacity_tokens must be positive, got {capacity_tokens}")
        with self:
            while i < self.t.worker_end and self.t.workers[i].capacity:
                i += 1
            if i == WORKERS_MAX:
                raise InvalidConfig(f"at most {WORKERS_MAX} workers")
            self.reserve_worker(i)
            store32(&self.t.workers[i].recency.oldest, NONE)
            self.t.workers[i].recency.newest = self.t.workers[i].recency.warm = NONE
            self.t.workers[i].moves_reported = False
            store_signed(&self.t.workers[i].capacity, capacity_tokens)
            set_limit(&self.t, i, False)
            store32(&self.t.worker_end, max(self.t.worker_end, i + 1))
            store64(&self.t.worker_changes, self.t.worker_changes + 1)
        return i

    cdef int reserve_worker(self, uint32_t i) except -1:
        """An empty row for worker `i`: a fresh one is zeroed; one whose worker was dropped is empty already, and
        readers may look at it still. MemoryError changes nothing."""
        cdef uint32_t room = max(16, self.t.worker_room * 2)
        cdef WorkerMarks* old = self.t.workers
        cdef WorkerMarks* grown
        if i == self.t.worker_room:
            grown = <WorkerMarks*> budget_alloc(&self.t.budget, room * sizeof(WorkerMarks))
            if grown == NULL:
                raise MemoryError("workers")
            fresh_rows(grown, self.t.worker_room, room)
            if old != NULL:
                memcpy(grown, old, self.t.worker_room * sizeof(WorkerMarks))
            store_workers(&self.t.workers, grown)
            retire_memory(&self.t, old, self.t.worker_room * sizeof(WorkerMarks))
            self.t.worker_room = room
        return 0

    def set_below(self, uint32_t worker, int64_t tokens) -> None:
        """So many tokens' KV fit into the host memory or onto the disk of a worker, copies of what its GPU's memory
        holds included: what leaves the GPU goes there. 0: it is gone."""
        with self:
            self.need_worker(worker)
            put_below(&self.t, &self.t.workers[worker], tokens)
            set_limit(&self.t, worker, self.t.workers[worker].evictions_reported)

    def drop_worker(self, uint32_t worker) -> None:
        """Forget a worker and all its marks; the index may be given to another. O(1), see `clear_worker`."""
        with self:
            self.clear_worker(worker)
            put_below(&self.t, &self.t.workers[worker], 0)
            store_signed(&self.t.workers[worker].capacity, 0)
            while self.t.worker_end and self.t.workers[self.t.worker_end - 1].capacity == 0:
                store32(&self.t.worker_end, self.t.worker_end - 1)
            store64(&self.t.worker_changes, self.t.worker_changes + 1)

    def clear_worker(self, uint32_t worker, *, uint32_t sweep_marks=SWEEP_SLICE) -> int:
        """Its cache is empty now: nobody counts its marks any more; returns the tokens dropped. O(1): what its marks
        take is given back by `sweep`, the first `sweep_marks` of them here."""
        cdef int64_t dropped = 0
        with self:
            self.need_estimates()
            self.need_worker(worker)
            dropped = clear_marks(&self.t, worker)
            sweep_ghosts(&self.t, sweep_marks)
        return dropped

    def sweep(self, uint32_t marks_max=0xFFFFFFFF) -> int:
        """Give back what marks of cleared and dropped workers take, no more than `marks_max` of them; returns how many.
        `expire` does it, too. In slices, so that a decision waits for SWEEP_SLICE marks at the most."""
        cdef uint32_t swept = 0, found = 1, slice_max
        with nogil:
            while found and swept < marks_max:
                slice_max = min(marks_max - swept, <uint32_t> SWEEP_SLICE)
                lock_enter(&self.t.writer_lock)
                found = sweep_ghosts(&self.t, slice_max)
                reclaim(&self.t)
                lock_leave(&self.t.writer_lock)
                swept += found
            await_python()
        return swept

    # --- reads ---

    def match(self, token_ids, *, namespace=None) -> tuple[int, dict[int, int]]:
        """(tokens known, {worker: tokens estimated cached, zeros left out}). Changes nothing, takes no lock; O(tokens +
        workers)."""
        cdef Held found
        cdef uint32_t i
        self.look(token_ids, namespace, &found)
        try:
            return found.walk.matched, {found.met[i]: found.held[found.met[i]] for i in range(found.count)}
        finally:
            free(found.held)

    cdef int look(self, object token_ids, object namespace, Held* found) except -1:
        """What each worker holds of a prompt, without a lock. The caller frees `found.held`.

        Asks again if a worker came or went meanwhile, so that no tokens are reported for the wrong one.
        """
        cdef TokenView view
        cdef uint64_t changes
        found.held = NULL
        view_tokens(token_ids, &view)
        try:
            while True:
                changes = load64(&self.t.worker_changes)
                found.walk = at_root(&self.t, self.root_of(namespace, False))
                found.prompt = view.count
                self.held(&view, found)
                if changes == load64(&self.t.worker_changes):
                    break
                free(found.held)
                found.held = NULL
            check_tokens(&view, found.walk.matched)
        except BaseException:
            free(found.held)
            found.held = NULL
            raise
        finally:
            release_tokens(&view)
        return 0

    cdef int held(self, TokenView* view, Held* found) except -1:
        """Walk from the root in `found` and gather who holds what."""
        cdef uint32_t workers = load32(&self.t.worker_end), slot
        cdef bint some_away = load_signed(&self.t.away) != 0
        found.workers = workers
        found.count = 0
        found.here = found.far = NULL
        found.held = <uint32_t*> calloc((4 if some_away else 2) * max(workers, 1), sizeof(uint32_t))
        if found.held == NULL:
            raise MemoryError("match")
        found.met = found.held + max(workers, 1)
        if some_away:
            found.here = found.met + max(workers, 1)
            found.far = found.here + max(workers, 1)
        if found.walk.node == NONE:
            return 0
        if view.count <= SHORT_TOKENS and reader_try(&self.t.epochs, &slot):
            self.read_path(view, found, slot)
            return 0
        with nogil:
            self.read_path(view, found, reader_enter(&self.t.epochs))
            await_python()
        return 0

    cdef void read_path(self, TokenView* view, Held* found, uint32_t slot) noexcept nogil:
        """Walk and gather, as the reader that holds `slot`, and give it back."""
        if generation(node_at(&self.t, found.walk.node)) == found.walk.generation:
            found.walk = tree_walk(&self.t, found.walk, view.data, view.count)
            found.count = held_on_path(&self.t, found.walk, found.held, found.met, found.workers)
            if found.here != NULL:
                self.read_away(found)
        reader_leave(&self.t.epochs, slot)

    cdef void read_away(self, Held* found) noexcept nogil:
        """Note what of it is in each worker's GPU memory, and what is not even in host memory. O(path) for each."""
        cdef uint32_t at, worker, key
        for at in range(found.count):
            worker = found.met[at]
            key = load32(&load_workers(&self.t.workers)[worker].key)
            found.here[worker] = on_gpu(&self.t, found.walk, key, found.held[worker], &found.far[worker])

    cdef bint walk_python(self, object token_ids, object namespace, Walk* walk) except -1:
        """Walk Python token ids, as the writer; False if the namespace is unknown."""
        cdef TokenView view
        cdef uint32_t root
        view_tokens(token_ids, &view)
        try:
            root = self.root_of(namespace, False)
            if root == NONE:
                check_tokens(&view, 0)
                return False
            walk[0] = tree_walk(&self.t, at_root(&self.t, root), view.data, view.count)
            check_tokens(&view, walk.matched)
        finally:
            release_tokens(&view)
        return True

    def matched(self, token_ids, uint32_t worker=0, *, namespace=None) -> int:
        """Tokens of the longest prefix estimated cached on `worker`. Changes nothing."""
        self.need_worker(worker)
        return self.match(token_ids, namespace=namespace)[1].get(worker, 0)

    def path(self, token_ids, *, namespace=None) -> list[int]:
        """Where each node on a prompt's known path ends, from the top, in tokens from the prompt's start; the last ends
        where the prompt is not known any more. Changes nothing; O(tokens + nodes)."""
        cdef Walk walk
        cdef uint32_t i
        ends = []
        with self:
            if self.walk_python(token_ids, namespace, &walk):
                i = walk.node
                while node_at(&self.t, i).parent != NONE:
                    ends.append(min(run_end(node_at(&self.t, i).run), walk.matched))
                    i = node_at(&self.t, i).parent
        ends.reverse()
        return ends

    def worker_tokens(self, uint32_t worker) -> int:
        """Tokens estimated cached on a worker."""
        with self:
            self.need_worker(worker)
            return self.t.workers[worker].tokens

    def away_tokens(self, uint32_t worker) -> int:
        """Of these, those that are not in its GPU's memory."""
        with self:
            self.need_worker(worker)
            return self.t.workers[worker].away

    def on_gpu(self, token_ids, uint32_t worker, *, namespace=None) -> tuple[int, int]:
        """(tokens of the longest prefix estimated to be in a worker's GPU memory, those of the rest it caches that are
        on disk or further off). Changes nothing."""
        cdef Walk walk
        cdef uint32_t far = 0, count, i
        with self:
            self.need_worker(worker)
            if not self.walk_python(token_ids, namespace, &walk):
                return 0, 0
            self.need_worker(worker)
            i = walk.node
            while node_at(&self.t, i).parent != NONE:
                count = find_entry(node_at(&self.t, i), self.t.workers[worker].key).end
                if count:
                    return on_gpu(&self.t, walk, self.t.workers[worker].key, min(count, walk.matched), &far), far
                i = node_at(&self.t, i).parent
            return 0, 0

    def hits(self, token_ids, now, *, worker=None, namespace=None) -> float:
        """Estimated hits within the window on the node where the known prefix ends, of one worker or of all."""
        cdef Walk walk
        cdef Entry entry
        cdef double at = finite(now)
        cdef uint32_t index = NONE
        with self:
            if worker is not None:
                index = worker
                self.need_worker(index)
            if not self.walk_python(token_ids, namespace, &walk) or walk.matched == 0:
                return 0.0
            if worker is not None:
                self.need_worker(index)          # what the namespace runs when it is looked up may have removed it
            if worker is None:
                return hits_estimate(node_at(&self.t, walk.node).hits, at, self.t.window_seconds)
            entry = find_entry(node_at(&self.t, walk.node), self.t.workers[index].key)
            return hits_estimate(mark_at(&self.t, entry.mark).hits, at, self.t.window_seconds) if entry.end else 0.0

    def victims(self, uint32_t worker, int64_t need_tokens, now) -> list[tuple[int, int, float]]:
        """What eviction of `need_tokens` would take, in order: (tokens, tokens before them, hits of the worker in the
        window)."""
        cdef double at = finite(now)
        cdef uint32_t i
        cdef Entry entry
        cdef Node* node
        answer = []
        with self:
            self.need_worker(worker)
            i = self.t.workers[worker].recency.oldest
            while need_tokens > 0 and i != NONE:
                node = node_at(&self.t, mark_at(&self.t, i).node)
                entry = find_entry(node, self.t.workers[worker].key)
                taken = min(need_tokens, <int64_t> entry.end - node.run.start)
                hits = hits_estimate(mark_at(&self.t, i).hits, at, self.t.window_seconds)
                answer.append((taken, entry.end - taken, hits))
                need_tokens -= taken
                i = mark_at(&self.t, i).newer
        return answer

    # --- writes ---

    def insert(self, token_ids, now, *, worker=None, namespace=None, bint is_hit=True) -> int:
        """Remember a prompt, on `worker` if given; returns the tokens that were known. Evicts the worker's oldest
        beyond capacity. What max_bytes has no room for is counted in `stats` and not remembered."""
        cdef TokenView view
        cdef uint32_t index = NONE
        cdef double at = finite(now)
        self.need_estimates()
        view_tokens(token_ids, &view)
        try:
            check_tokens(&view, 0)
            with self:
                key = self.key_of(namespace)
                if worker is not None:
                    index = worker
                    self.need_worker(index)
                return self.insert_view(&view, at, index, key, is_hit)
        finally:
            release_tokens(&view)

    cdef uint32_t insert_view(self, TokenView* view, double at, uint32_t worker, object namespace,
                              bint is_hit) except? 0xFFFFFFFF:
        """`insert` as the writer; returns the tokens that were known."""
        cdef Walk walk
        cdef uint32_t leaf
        try:
            walk = at_root(&self.t, self.root_of(namespace, True))
        except TreeFull:
            self.t.refused_tokens += view.count
            return 0
        walk = tree_walk(&self.t, walk, view.data, view.count)
        if worker != NONE:
            worker = self.t.workers[worker].key
        if tree_insert(&self.t, walk, view.data, view.count, worker, is_hit, at, &leaf):
            raise MemoryError("RadixTree.insert")
        return walk.matched

    def unmark(self, token_ids, uint32_t worker, uint32_t kept_tokens, *, namespace=None) -> int:
        """The worker dropped every cached prefix through token_ids[kept_tokens]; returns the tokens unmarked."""
        cdef Walk walk
        with self:
            self.need_estimates()
            self.need_worker(worker)
            if not self.walk_python(token_ids, namespace, &walk) or walk.matched <= kept_tokens:
                return 0
            self.need_worker(worker)             # what the namespace runs when it is looked up may have removed it
            while node_at(&self.t, walk.node).run.start > kept_tokens:
                walk.node = node_at(&self.t, walk.node).parent
            return drop_below(&self.t, walk.node, self.t.workers[worker].key, kept_tokens)

    def send_away(self, token_ids, uint32_t worker, uint32_t kept_tokens, bint far=False, *, namespace=None) -> int:
        """Of every cached prefix through token_ids[kept_tokens] the worker's GPU memory holds no more than that from
        now on, its host memory the rest, or, if `far`, its disk; returns the tokens that left. O(path): of nodes below,
        the path says it."""
        cdef Walk walk
        cdef int64_t before
        with self:
            self.need_estimates()
            self.need_worker(worker)
            if not self.walk_python(token_ids, namespace, &walk) or walk.matched <= kept_tokens:
                return 0
            self.need_worker(worker)
            before = self.t.workers[worker].away
            while node_at(&self.t, walk.node).parent != NONE and run_end(node_at(&self.t, walk.node).run) > kept_tokens:
                send_away(&self.t, walk.node, self.t.workers[worker].key, kept_tokens, far)
                walk.node = node_at(&self.t, walk.node).parent
            return self.t.workers[worker].away - before

    def expire(self, now, uint32_t max_nodes=1 << 30) -> int:
        """Forget nodes cached nowhere and unhit for a window, at most `max_nodes` looked at, and empty namespaces;
        returns nodes. First `sweep`, no more marks than nodes. Works in slices of EXPIRE_SLICE nodes, so that a
        decision waits for one of them at the most."""
        cdef uint32_t removed = 0, found, left = max_nodes
        cdef double at = finite(now)
        cdef bint more = left > 0
        self.sweep(left)
        with nogil:
            while more:
                lock_enter(&self.t.writer_lock)
                left = min(left, self.t.nodes.live)
                found = forget_dead(&self.t, at, min(left, <uint32_t> EXPIRE_SLICE))
                removed += found
                left -= min(left, <uint32_t> EXPIRE_SLICE)
                more = left > 0 and (found > 0 or has_dead(&self.t, at))
                reclaim(&self.t)
                lock_leave(&self.t.writer_lock)
            await_python()
        with self:
            self.forget_empty_roots()
        return removed

    # --- questions ---

    @property
    def bytes_used(self) -> int:
        """Bytes allocated now, as malloc counts them."""
        with self:
            return self.t.budget.used

    @property
    def node_count(self) -> int:
        """Live nodes, roots included."""
        with self:
            return self.t.nodes.live

    @property
    def version(self) -> int:
        """Grows whenever what is cached where changes."""
        with self:
            return self.t.version

    def stats(self) -> dict[str, int]:
        """Sizes and what the byte budget has cost."""
        with self:
            return {
                "bytes_used": self.t.budget.used,
                "bytes_max": self.t.budget.limit,
                "nodes": self.t.nodes.live,
                "marks": self.t.marks.live,
                "ghost_marks": self.t.ghost.marks,
                "namespaces": len(self._roots),
                "shed_nodes": self.t.shed_nodes,
                "refused_tokens": self.t.refused_tokens,
            }

    def kernel(self) -> str:
        """Which compare instructions this machine got: "avx512", "avx2" or "plain"."""
        return (<bytes> kernel_name).decode()

    def begin_read(self) -> int:
        """Tests only: take a reader's slot, as each read does for some microseconds; `end_read` gives it back."""
        cdef uint32_t slot
        with nogil:
            slot = reader_enter(&self.t.epochs)
        return slot

    def end_read(self, uint32_t slot) -> None:
        """Tests only: give back what `begin_read` took."""
        reader_leave(&self.t.epochs, slot)

    @property
    def retired_things(self) -> int:
        """Tests only: what is unlinked and not freed yet, since a reader may look at it. Takes no lock."""
        return load32(&self.t.epochs.count)

    def fail_allocation(self, int64_t nth) -> None:
        """Tests only: let the nth allocation from now fail (0: none)."""
        self.t.budget.fail_after = nth

    def check(self) -> None:
        """Assert every invariant of `_core/tree/layout.pxd`. O(everything)."""
        with self:
            reclaim_soon(&self.t)
            check_tree(&self.t, self._roots, self._names, self._root_queue)

    def show(self, int max_tokens=6) -> str:
        """The tree as text, one node a line."""
        with self:
            return show_tree(&self.t, self._roots, max_tokens)
