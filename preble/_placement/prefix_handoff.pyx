"""Prefixes that change hands: which ones a worker is busy with, and the marks that send their next requests elsewhere;
and what a booking is worth once another worker has handed over KV of its prompt. Owns the search over one worker's
marks and the copying of marks. Who gets what, and when, is `membership.py`.

A prefix is handed over by marking it on its new worker as if a request had just been placed there: from then on the
ordinary rule sends its requests to that one worker, the first computes it, and those like it land together. Nothing is
asked in a decision that was not asked before.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from preble._placement.bookings cimport DecisionCore
from preble._cost cimport Bucket, Lease, nanoseconds, prefill_seconds
from preble._placement.e2 cimport ANY_REQUEST
from preble._core.tree.layout cimport (Entry, EntryBlock, Mark, Node, Tree, Walk, end_of, generation, index_of,
                                       is_same_node, mark_at, node_at, run_end, worker_of)
from preble._core.tree.parts cimport find_entry, hits_estimate
from preble._core.memory cimport NONE
from preble._core.tree.nodes cimport confirmed_tokens
from preble._core.tree.operations cimport drop_below, tree_insert

cdef enum:
    MARKS_MAX = 16384            # marks looked at in one search, the most recently used first
    HOT_MAX = 512                # of these, marks asked for more than once
    SLICE_MARKS = 2048           # the same in one hold of the lock, which is some 0.3 ms
    SLICE_HOT = 128
    HEAD_TOKENS = 8              # token ids that show a person which prefix is meant

cdef double HOT_HITS = 1.0       # a prefix that was asked for no more often than this has never been used again


cdef class HotPrefix:
    """Part of what a worker caches: a key portion and what is used again below it.

    `hits`: requests that had it and no longer one of these prefixes, on this worker, within the window. `hot_seconds`:
    what all that had it would have taken to compute without the cache. `loss_seconds`: what it takes to compute it
    once elsewhere. `tokens`: from the prompt's start to where its first node ends; `head`: the first ids of that node,
    which distinguish it from its siblings.
    """

    cdef readonly object namespace
    cdef readonly tuple head
    cdef readonly uint32_t tokens
    cdef readonly double hits
    cdef readonly double hot_seconds
    cdef readonly double loss_seconds
    cdef uint32_t top
    cdef uint32_t top_generation
    cdef list nodes              # (index, generation) of what is marked elsewhere

    def __repr__(self) -> str:
        return (f"HotPrefix({self.tokens} tokens {self.head}, {self.hits:.1f} hits, {self.hot_seconds:.3f} s, "
                f"loss {self.loss_seconds:.3f} s)")


cdef bint is_held_elsewhere(DecisionCore core, Node* node, uint32_t worker) noexcept:
    """Whether another worker that takes requests holds the whole of a node. O(entries), mostly much less."""
    cdef Tree* t = &core.tree.t
    cdef EntryBlock* block = node.block
    cdef uint32_t at, other
    cdef uint64_t word
    if block == NULL:
        return False
    for at in range(block.count):
        word = block.words[at]
        other = index_of(worker_of(word))
        if (end_of(word) >= run_end(node.run) and other != worker and t.workers[other].key == worker_of(word)
                and core.loads.rows[other].eligible == ANY_REQUEST):
            return True
    return False


cdef uint32_t top_of(DecisionCore core, uint32_t i, uint32_t worker) noexcept:
    """The node with which the prefix begins that node `i` is part of: the key portion (the nearest node that is longer
    than all before it), or below that the first that nobody else holds; NONE if somebody else holds `i` itself."""
    cdef Tree* t = &core.tree.t
    cdef Node* node = node_at(t, i)
    cdef uint32_t top = NONE
    while node.parent != NONE:
        if is_held_elsewhere(core, node, worker):
            return top
        top = i
        if node.run.length > node.run.start:
            return top
        i = node.parent
        node = node_at(t, i)
    return top


cdef HotPrefix new_prefix(DecisionCore core, uint32_t top, uint32_t worker, double now):
    cdef Tree* t = &core.tree.t
    cdef Node* node = node_at(t, top)
    cdef HotPrefix prefix = HotPrefix.__new__(HotPrefix)
    cdef uint32_t i
    prefix.namespace = core.tree.path_to(top, 0)[0]
    prefix.head = tuple([node.run.tokens[i] for i in range(min(node.run.length, HEAD_TOKENS))])
    prefix.tokens = run_end(node.run)
    prefix.hits = hits_estimate(mark_at(t, find_entry(node, t.workers[worker].key).mark).hits, now, t.window_seconds)
    prefix.hot_seconds = prefix.loss_seconds = 0.0
    prefix.top = top
    prefix.top_generation = generation(node)
    prefix.nodes = []
    return prefix


cdef class Search:
    """A search over one worker's marks, the most recently used first, a slice in a hold of the lock."""

    cdef DecisionCore core
    cdef uint32_t worker
    cdef double now
    cdef uint32_t looked         # marks
    cdef uint32_t hot            # of these, asked for more than once
    cdef uint32_t next           # mark to go on from, and its node, by which it is known again
    cdef uint32_t next_node
    cdef uint32_t next_generation
    cdef dict found              # top -> HotPrefix
    cdef set seen                # nodes: a mark that was used meanwhile may come twice

    cdef bint go_on(self) except -1:
        """The next slice; False after the last. A search whose next mark has gone meanwhile ends there."""
        cdef Tree* t = &self.core.tree.t
        cdef uint32_t i = self.next, marks_end = self.looked + SLICE_MARKS, hot_end = self.hot + SLICE_HOT
        cdef Mark* mark
        if self.looked == 0:
            i = t.workers[self.worker].recency.newest
        elif not self.is_still_there(i):
            return False
        while i != NONE and self.looked < min(marks_end, <uint32_t> MARKS_MAX) and (
                self.hot < min(hot_end, <uint32_t> HOT_MAX)):
            self.looked += 1
            mark = mark_at(t, i)
            if hits_estimate(mark.hits, self.now, t.window_seconds) > HOT_HITS and mark.node not in self.seen:
                self.note(mark)
            i = mark.older
        if i == NONE or self.looked >= MARKS_MAX or self.hot >= HOT_MAX:
            return False
        self.next = i
        self.next_node = mark_at(t, i).node
        self.next_generation = generation(node_at(t, self.next_node))
        return True

    cdef bint is_still_there(self, uint32_t i):
        """Whether mark `i` is the worker's on the node it was on. Its node knows; one that was freed says so, too."""
        cdef Tree* t = &self.core.tree.t
        cdef Entry entry
        if not is_same_node(t, self.next_node, self.next_generation):
            return False
        entry = find_entry(node_at(t, self.next_node), t.workers[self.worker].key)
        return entry.end > 0 and entry.mark == i and mark_at(t, i).pins == 0

    cdef int note(self, Mark* mark) except -1:
        """Add a hot mark to the prefix that it is part of."""
        cdef Tree* t = &self.core.tree.t
        cdef Node* node = node_at(t, mark.node)
        cdef Entry entry = find_entry(node, t.workers[self.worker].key)
        cdef HotPrefix prefix
        cdef double seconds
        cdef uint32_t top = top_of(self.core, mark.node, self.worker)
        self.hot += 1
        self.seen.add(mark.node)
        if top == NONE:
            return 0
        prefix = self.found.get(top)
        if prefix is None:
            prefix = self.found[top] = new_prefix(self.core, top, self.worker, self.now)
        seconds = prefill_seconds(self.core.loads.rows[self.worker].cost, entry.end - node.run.start, entry.end)
        prefix.hot_seconds += hits_estimate(mark.hits, self.now, t.window_seconds) * seconds
        prefix.loss_seconds += seconds
        prefix.nodes.append((mark.node, generation(node)))
        return 0


def hot_prefixes(DecisionCore core not None, uint32_t worker, double now) -> list[HotPrefix]:
    """The prefixes a worker has had more than one request for within the window and that no other worker holds that
    takes requests, in no order. Looks at the 16,384 most recently used marks, and no further than the 512th that was
    used again. UnknownWorker."""
    cdef Search search = Search.__new__(Search)
    search.core = core
    search.worker = worker
    search.now = now
    search.found = {}
    search.seen = set()
    more = True
    while more:
        with core.tree:
            core.tree.need_worker(worker)
            more = search.go_on()
    with core.tree:
        take_out_longer(core, search.found, worker)
    return [prefix for prefix in search.found.values() if prefix.hits > HOT_HITS]


cdef void take_out_longer(DecisionCore core, dict found, uint32_t worker) noexcept:
    """Whoever asked for a longer prefix goes with that one, and not with a shorter one it begins with."""
    cdef HotPrefix prefix, shorter
    cdef uint32_t top
    for prefix, hits in [(prefix, prefix.hits) for prefix in found.values()]:
        if not is_same_node(&core.tree.t, prefix.top, prefix.top_generation):
            continue
        top = top_of(core, node_at(&core.tree.t, prefix.top).parent, worker)
        shorter = found.get(top)
        if shorter is not None:
            shorter.hits -= <double> hits


def hand_over(DecisionCore core not None, HotPrefix prefix not None, uint32_t giver, uint32_t taker, double now, *,
              bint keep) -> int:
    """Mark on `taker` what `giver` still holds of a prefix, and unless `keep` forget that `giver` holds it; returns how
    many nodes were marked. What has gone since it was found is left out. One hold of the lock."""
    cdef Tree* t = &core.tree.t
    cdef uint32_t i, number, leaf, marked = 0
    cdef uint32_t from_key, to_key
    cdef Walk walk
    cdef Entry entry
    with core.tree:
        core.tree.need_worker(taker)
        from_key = t.workers[giver].key
        to_key = t.workers[taker].key
        for i, number in prefix.nodes:
            entry = find_entry(node_at(t, i), from_key) if is_same_node(t, i, number) else Entry(0, 0, NONE)
            if entry.end == 0:
                continue
            walk.node = i
            walk.matched = entry.end
            walk.inside = entry.end - node_at(t, i).run.start
            walk.generation = number
            if tree_insert(t, walk, NULL, walk.matched, to_key, False, now, &leaf):
                raise MemoryError("hand_over")
            marked += 1
        if not keep and is_same_node(t, prefix.top, prefix.top_generation):
            drop_below(t, prefix.top, from_key, node_at(t, prefix.top).run.start)
    return marked


def open_workers(DecisionCore core not None, double now) -> list[tuple[float, int, str, int]]:
    """(load seconds as decisions compare them, index, name, capacity in tokens) of each worker that takes any request.
    O(workers)."""
    cdef uint32_t i
    cdef double longest
    with core.tree:
        core.loads.advance(now)
        longest = core.loads.longest_observed(now)
        return [(core.loads.rows[i].load_seconds * core.loads.scale(i, now, longest), i, core.names[i],
                 core.tree.t.workers[i].capacity)
                for i in range(core.tree.t.worker_end) if core.loads.rows[i].eligible == ANY_REQUEST]


def takes_any(DecisionCore core not None, uint32_t index, str name) -> bool:
    """Whether the worker of an index is still the one of that name, and takes any request."""
    return index < len(core.names) and core.names[index] == name and core.loads.rows[index].eligible == ANY_REQUEST


def joined_at(DecisionCore core not None, uint32_t index) -> float:
    """When a worker joined."""
    return core.loads.rows[index].joined_at


def confirmed_on(DecisionCore core not None, token_ids, namespace, list workers) -> list[int]:
    """How many leading tokens of a prompt each of these workers, by index, is known to cache, not only predicted: what
    it could hand over now. Changes nothing; O(tokens + workers x path)."""
    cdef Walk walk
    cdef uint32_t index
    found = []
    with core.tree:
        if not core.tree.walk_python(token_ids, namespace, &walk):
            return [0] * len(workers)
        for worker in workers:
            index = worker
            found.append(confirmed_tokens(&core.tree.t, walk, core.tree.t.workers[index].key))
    return found


def pressure(DecisionCore core not None) -> float:
    """kappa of the decisions made now: seconds that others wait for a second of work. O(1)."""
    with core.tree:
        return core.pressure_now()


cdef void match_more(DecisionCore core, Lease* lease, uint32_t cached_tokens) noexcept nogil:
    """More of a live request's prompt counts as cached; also in the slice it was booked in, from which it takes back
    what its lease has."""
    cdef Bucket change
    memset(&change, 0, sizeof(Bucket))
    change.matched_tokens = cached_tokens - lease.matched_tokens
    core.loads.enter(lease, &change, 1)
    lease.matched_tokens = cached_tokens


def begin_after_transfer(DecisionCore core not None, request_id, uint32_t cached_tokens, double now) -> bool:
    """Book the prefill of a live request from `now` on, `cached_tokens` of its prompt having come to its worker. So
    what is ahead there, and what its first token will say of that worker's speed, are of the work that is really done.

    False, and nothing is changed, where it isn't live, has its first token, or its worker has left. Those booked after
    it may expire as much later as the transfer has taken. O(1)."""
    cdef Lease* lease
    cdef int64_t prefill_ns
    key = core.live_key(request_id)
    if key is None:
        return False
    with core.tree:
        lease = core.live_lease(core.lease_key(key))
        if lease == NULL or lease.prefilled or not core.loads.is_current(lease):
            return False
        core.loads.advance(now)
        cached_tokens = min(cached_tokens, lease.prompt_tokens)
        prefill_ns = nanoseconds(prefill_seconds(core.loads.rows[lease.worker].cost,
                                                 lease.prompt_tokens - cached_tokens, lease.prompt_tokens))
        if lease.share:
            core.groups.corrected(lease, prefill_ns - lease.prefill_ns, 0)
        core.loads.correct_prefill(lease, prefill_ns)
        if cached_tokens > lease.matched_tokens:
            match_more(core, lease, cached_tokens)
        if now > lease.booked_at:
            lease.renewed_seconds = max(0.0, lease.renewed_seconds - (now - lease.booked_at))
            lease.booked_at = now
    return True
