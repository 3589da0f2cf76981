"""The Python face of the token radix tree. Owns which prefixes exist, which worker is believed to cache how much of
each, how often each was hit within the window, and each worker's recency order. Knows no sockets, no clock (times are
arguments), no policy.

The algorithms are in `_tree.pyx` and `_nodes.pyx`, layout, pictures and invariants in `_layout.pxd`, `check` and `show`
in `_audit.pyx`. Every public method is one uninterrupted step under the GIL, so threads may share a tree. Workers are
dense indices here; their names belong to the scheduler. Paper section 4.2.
"""

from collections import deque

from libc.math cimport isfinite
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memset

from preble._audit cimport check_tree, show_tree
from preble._layout cimport (
    ChildSlot,
    Entry,
    LIVE,
    Mark,
    mark_at,
    Node,
    node_at,
    TokenRun,
    Tree,
    Walk,
    WorkerMarks,
)
from preble._layout_parts cimport find_entry, free_run, hits_estimate, new_run
from preble._memory cimport NONE, budget_alloc, fails_now, slab_close, slab_init, slab_reserve
from preble._nodes cimport at_root, free_node, take_node, tree_matches, tree_walk
from preble._tokens cimport TokenView, check_tokens, release_tokens, view_tokens
from preble._tree cimport drop_below, evict_tokens, forget_dead, make_room_for_root, tree_insert

from .errors import InvalidConfig, InvalidInput, InvalidTime, TreeFull, UnknownWorker

cdef enum:
    WORKERS_MAX = 65536
    TABLE_START = 1024           # child slots of an empty tree
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
        self.t.table = <ChildSlot*> budget_alloc(&self.t.budget, TABLE_START * sizeof(ChildSlot))
        self.t.table_size = TABLE_START
        if (self.t.table == NULL or slab_init(&self.t.nodes, sizeof(Node)) or slab_init(&self.t.marks, sizeof(Mark))):
            raise MemoryError("RadixTree")
        memset(self.t.table, 0, TABLE_START * sizeof(ChildSlot))
        self._roots = {}
        self._names = {}
        self._root_queue = deque()

    def __dealloc__(self):
        cdef uint32_t i
        if self.t.nodes.chunks != NULL:
            for i in range(self.t.nodes.chunk_count * 1024):
                if node_at(&self.t, i).state & LIVE:
                    free(node_at(&self.t, i).run)
                    free(node_at(&self.t, i).block)
            slab_close(&self.t.nodes, &self.t.budget)
        if self.t.marks.chunks != NULL:
            slab_close(&self.t.marks, &self.t.budget)
        free(self.t.table)
        free(self.t.workers)

    cdef uint32_t root_of(self, object namespace, bint create) except? 0xFFFFFFFE:
        """The namespace's root, NONE if it has none and `create` is false. Raises TypeError for unhashable namespaces,
        TreeFull if a bounded search found no room for a root under max_bytes."""
        cdef TokenRun* run
        cdef uint32_t i
        found = self._roots.get(namespace)
        if found is not None:
            return <uint32_t> found
        if not create:
            return NONE
        if not make_room_for_root(&self.t, 0):
            self.forget_empty_roots()
            if not make_room_for_root(&self.t, ROOT_SHED_STEPS):
                raise TreeFull(f"no room for one more namespace within max_bytes ({self.t.budget.limit})")
        run = new_run(&self.t, 0, NULL, NULL, 0)
        if run == NULL or slab_reserve(&self.t.nodes, &self.t.budget, 1):
            free_run(&self.t, run)
            raise MemoryError("namespace root")
        i = take_node(&self.t, run, NONE)
        self._roots[namespace] = i
        self._names[i] = namespace
        self._root_queue.append(i)
        return i

    cdef int forget_empty_roots(self) except -1:
        """Drop namespaces without a prefix and without a pin, a bounded number of candidates at a time."""
        cdef uint32_t i
        cdef Node* root
        for _ in range(min(EMPTY_ROOT_CHECKS, len(self._root_queue))):
            i = self._root_queue.popleft()
            root = node_at(&self.t, i)
            if root.first_child == NONE and root.hits == 0:        # a root's `hits` counts the holds that end on it
                del self._roots[self._names.pop(i)]
                free_node(&self.t, i)
            else:
                self._root_queue.append(i)
        return 0

    cdef int need_worker(self, uint32_t worker) except -1:
        if worker >= self.t.worker_end or self.t.workers[worker].capacity == 0:
            raise UnknownWorker(f"no worker with index {worker}")
        return 0

    cdef int need_beliefs(self) except -1:
        """Refuse writes that would leave a slot tree with tokens that have no slot, or slots that have no tokens."""
        if self.t.with_slots:
            raise InvalidInput("a SlotTree changes by hold, extend, release and evict only")
        return 0

    # --- workers ---

    def add_worker(self, int64_t capacity_tokens) -> int:
        """Register a worker that can cache `capacity_tokens`; returns its index, the lowest free one."""
        cdef uint32_t i = 0, room
        cdef WorkerMarks* grown
        if capacity_tokens < 1:
            raise InvalidConfig(f"capacity_tokens must be positive, got {capacity_tokens}")
        while i < self.t.worker_end and self.t.workers[i].capacity:
            i += 1
        if i == WORKERS_MAX:
            raise InvalidConfig(f"at most {WORKERS_MAX} workers")
        if i == self.t.worker_room:
            room = max(16, self.t.worker_room * 2)
            grown = NULL
            if not fails_now(&self.t.budget):
                grown = <WorkerMarks*> realloc(self.t.workers, room * sizeof(WorkerMarks))
            if grown == NULL:
                raise MemoryError("workers")
            self.t.budget.used += (room - self.t.worker_room) * sizeof(WorkerMarks)
            self.t.workers = grown
            self.t.worker_room = room
        memset(&self.t.workers[i], 0, sizeof(WorkerMarks))
        self.t.workers[i].capacity = capacity_tokens
        self.t.workers[i].recency.oldest = self.t.workers[i].recency.newest = NONE
        self.t.worker_end = max(self.t.worker_end, i + 1)
        return i

    def drop_worker(self, uint32_t worker) -> None:
        """Forget a worker and all its marks; the index may be given to another. O(its marks)."""
        self.clear_worker(worker)
        self.t.workers[worker].capacity = 0
        while self.t.worker_end and self.t.workers[self.t.worker_end - 1].capacity == 0:
            self.t.worker_end -= 1

    def clear_worker(self, uint32_t worker) -> int:
        """Its cache is empty now: drop its marks; returns the tokens dropped. O(its marks)."""
        self.need_beliefs()
        self.need_worker(worker)
        return evict_tokens(&self.t, worker, self.t.workers[worker].tokens)

    # --- reads ---

    def match(self, token_ids, *, namespace=None) -> tuple[int, dict[int, int]]:
        """(tokens known, {worker: tokens believed cached, zeros left out}). Changes nothing; O(tokens + marks on the
        path)."""
        cdef Walk walk
        cdef uint32_t i, workers = self.t.worker_end
        cdef uint32_t* matched
        if not self.walk_python(token_ids, namespace, &walk):
            return 0, {}
        matched = <uint32_t*> malloc(max(workers, 1) * sizeof(uint32_t))
        if matched == NULL:
            raise MemoryError("match")
        tree_matches(&self.t, walk, matched, workers)
        answer = {i: matched[i] for i in range(workers) if matched[i]}
        free(matched)
        return walk.matched, answer

    cdef bint walk_python(self, object token_ids, object namespace, Walk* walk) except -1:
        """Walk Python token ids; False if the namespace is unknown."""
        cdef TokenView view
        cdef uint32_t root
        view_tokens(token_ids, &view)
        try:
            root = self.root_of(namespace, False)
            if root == NONE:
                check_tokens(&view, 0)
                return False
            walk[0] = tree_walk(&self.t, at_root(root), view.data, view.count)
            check_tokens(&view, walk.matched)
        finally:
            release_tokens(&view)
        return True

    def matched(self, token_ids, uint32_t worker=0, *, namespace=None) -> int:
        """Tokens of the longest prefix believed cached on `worker`. Changes nothing."""
        self.need_worker(worker)
        return self.match(token_ids, namespace=namespace)[1].get(worker, 0)

    def worker_tokens(self, uint32_t worker) -> int:
        """Tokens believed cached on a worker."""
        self.need_worker(worker)
        return self.t.workers[worker].tokens

    def hits(self, token_ids, now, *, worker=None, namespace=None) -> float:
        """Estimated hits within the window on the node where the known prefix ends, of one worker or of all."""
        cdef Walk walk
        cdef Entry* entry
        cdef double at = finite(now)
        cdef uint32_t index = NONE
        if worker is not None:
            index = worker
            self.need_worker(index)
        if not self.walk_python(token_ids, namespace, &walk) or walk.matched == 0:
            return 0.0
        if worker is None:
            return hits_estimate(node_at(&self.t, walk.node).hits, at, self.t.window_seconds)
        entry = find_entry(node_at(&self.t, walk.node), index)
        return hits_estimate(mark_at(&self.t, entry.mark).hits, at, self.t.window_seconds) if entry != NULL else 0.0

    def victims(self, uint32_t worker, int64_t need_tokens, now) -> list[tuple[int, int, float]]:
        """What eviction of `need_tokens` would take, in order: (tokens, tokens before them, hits of the worker in the
        window)."""
        cdef double at = finite(now)
        cdef uint32_t i
        cdef Entry* entry
        cdef Node* node
        self.need_worker(worker)
        answer = []
        i = self.t.workers[worker].recency.oldest
        while need_tokens > 0 and i != NONE:
            node = node_at(&self.t, mark_at(&self.t, i).node)
            entry = find_entry(node, worker)
            taken = min(need_tokens, <int64_t> entry.tokens)
            hits = hits_estimate(mark_at(&self.t, i).hits, at, self.t.window_seconds)
            answer.append((taken, node.run.start + entry.tokens - taken, hits))
            need_tokens -= taken
            i = mark_at(&self.t, i).newer
        return answer

    # --- writes ---

    def insert(self, token_ids, now, *, worker=None, namespace=None, bint is_hit=True) -> int:
        """Remember a prompt, on `worker` if given; returns the tokens that were known. Evicts the worker's oldest
        beyond capacity. What max_bytes has no room for is counted in `stats` and not remembered."""
        cdef TokenView view
        cdef Walk walk
        cdef uint32_t leaf, index = NONE
        cdef double at = finite(now)
        self.need_beliefs()
        if worker is not None:
            index = worker
            self.need_worker(index)
        view_tokens(token_ids, &view)
        try:
            check_tokens(&view, 0)
            try:
                walk = at_root(self.root_of(namespace, True))
            except TreeFull:
                self.t.refused_tokens += view.count
                return 0
            walk = tree_walk(&self.t, walk, view.data, view.count)
            if tree_insert(&self.t, walk, view.data, view.count, index, is_hit, at, &leaf):
                raise MemoryError("RadixTree.insert")
        finally:
            release_tokens(&view)
        return walk.matched

    def unmark(self, token_ids, uint32_t worker, uint32_t kept_tokens, *, namespace=None) -> int:
        """The worker dropped every cached prefix through token_ids[kept_tokens]; returns the tokens unmarked."""
        cdef Walk walk
        self.need_beliefs()
        self.need_worker(worker)
        if not self.walk_python(token_ids, namespace, &walk) or walk.matched <= kept_tokens:
            return 0
        while node_at(&self.t, walk.node).run.start > kept_tokens:
            walk.node = node_at(&self.t, walk.node).parent
        return drop_below(&self.t, walk.node, worker, kept_tokens)

    def expire(self, now, uint32_t max_nodes=1 << 30) -> int:
        """Forget nodes cached nowhere and unhit for a window, at most `max_nodes` looked at, and empty namespaces;
        returns nodes."""
        cdef uint32_t removed
        cdef double at = finite(now)
        removed = forget_dead(&self.t, at, min(max_nodes, self.t.nodes.live))
        self.forget_empty_roots()
        return removed

    # --- facts ---

    @property
    def bytes_used(self) -> int:
        """Bytes allocated now, as malloc counts them."""
        return self.t.budget.used

    @property
    def node_count(self) -> int:
        """Live nodes, roots included."""
        return self.t.nodes.live

    @property
    def version(self) -> int:
        """Grows whenever what is cached where changes."""
        return self.t.version

    def stats(self) -> dict[str, int]:
        """Sizes and what the byte budget has cost."""
        return {
            "bytes_used": self.t.budget.used,
            "bytes_max": self.t.budget.limit,
            "nodes": self.t.nodes.live,
            "marks": self.t.marks.live,
            "namespaces": len(self._roots),
            "shed_nodes": self.t.shed_nodes,
            "refused_tokens": self.t.refused_tokens,
        }

    def fail_allocation(self, int64_t nth) -> None:
        """Tests only: let the nth allocation from now fail (0: none)."""
        self.t.budget.fail_after = nth

    def check(self) -> None:
        """Assert every invariant of `_layout.pxd`. O(everything)."""
        check_tree(&self.t, self._roots, self._names, self._root_queue)

    def show(self, int max_tokens=6) -> str:
        """The tree as text, one node a line."""
        return show_tree(&self.t, self._roots, max_tokens)
