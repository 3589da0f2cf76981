"""What one worker's engine says it caches, as Python sees it. Owns the index of its blocks by hash and which namespaces
they are in; tokens and marks belong to the tree. What events do is in `block_updates.pyx`, how they are decoded in
`event_batch.pyx`.

Bounded: at `blocks_max` everything is forgotten and the worker's cache counts as unknown, which is counted and safe,
since estimates only ever cost a miss. Everything happens under the tree's writers' lock.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from preble._kv_index.block_layout cimport PLACES_KEPT, SPACES_MAX, Blocks, Place, Space
from preble._kv_index.block_positions cimport place_of, print_above, seen_place, space_root
from preble._kv_index.block_updates cimport DONE, apply_batch, expect_moves
from preble._kv_index.block_table cimport SEGMENT, SEGMENT_FULL, Block, Segment, block_at
from preble._kv_index.block_table cimport clear_table, find_key, find_name, name_of
from preble._kv_index.decode cimport STORED, Event, Key
from preble._kv_index.event_batch cimport EventBatch, check_hashable, key_of
from preble._core.dict_keys cimport HashedKey
from preble._core.tree.layout cimport Node, Tree, generation, is_same_node, node_at, run_end
from preble._core.memory cimport CHUNK, NONE, budget_alloc, budget_free, charged
from preble._radix cimport RadixTree
from preble._core.tree.operations cimport set_limit
from preble._kv_index.cache_accuracy cimport CacheAccuracy, WorkerAccuracy

from ..errors import InvalidConfig, InvalidInput, TreeFull, UnknownWorker
from ..types import PrefixEvicted, check_int

cdef enum:
    BLOCKS_MAX = 1 << 26         # of a slab
    EVENTS_AT_ONCE = 4096        # event objects decoded before they are applied
    KEY_TRIES = 8                # times a namespace may vanish while those beside it are hashed and compared


cdef uint32_t parting(Tree* t, const Place* one, const Place* other) noexcept nogil:
    """The position at which two paths part; 0 in different namespaces. O(nodes on them)."""
    cdef uint32_t i = one.node, j = other.node
    cdef Node* a
    cdef Node* b
    while i != j:
        a = node_at(t, i)
        b = node_at(t, j)
        if a.parent == NONE and b.parent == NONE:
            return 0
        if a.parent != NONE and (b.parent == NONE or a.run.start >= b.run.start):
            i = a.parent
        else:
            j = b.parent
    return min(run_end(node_at(t, i).run), min(one.end, other.end))


cdef bint is_there(Tree* t, const Place* place) noexcept nogil:
    """Whether the tree still has a place, which may come from a snapshot and be wrong."""
    return (place.node < t.nodes.chunk_count * <uint32_t> CHUNK
            and is_same_node(t, place.node, place.generation) and place.end <= run_end(node_at(t, place.node).run))

NO_ROOM = object()               # in place of a namespace's key: the tree has no room for its root


cdef class BlockIndex:
    """What one worker's engine says it caches, by block hash, and the marks that follow from it. Thread-safe.

    Knows at most `blocks_max` blocks; at the bound everything is forgotten, the worker's marks with it, and counted.
    While it knows none it takes no memory. Out of memory an event changes nothing, but room made for it may stay.
    """

    def __cinit__(self, RadixTree tree not None, uint32_t worker, int64_t blocks_max):
        memset(&self.b, 0, sizeof(Blocks))
        if not 1 <= blocks_max:
            raise InvalidConfig(f"blocks_max must be positive, got {blocks_max}")
        self.tree = tree
        self.b.index = worker
        self.b.blocks_max = <uint32_t> min(blocks_max, <int64_t> BLOCKS_MAX)
        self.rows = {}
        self.names = []
        self.free_rows = []
        self.let_go = []
        self.known_namespaces = {}

    def __dealloc__(self):
        clear_table(&self.b.table)
        budget_free(&self.b.table.budget, self.b.spaces, <int64_t> self.b.space_room * sizeof(Space))

    def __len__(self) -> int:
        """Known blocks."""
        return self.b.table.count

    def close(self) -> None:
        """Its worker was removed: events that are on their way here find no worker."""
        self.closed = True

    # --- what it is compared with ---

    def watch(self, CacheAccuracy accuracy not None, uint32_t block_size) -> None:
        """Report to `accuracy` what events come, and compare blocks with the size that was given."""
        self.accuracy = accuracy
        self.b.block_size = block_size

    @property
    def odd_size(self) -> int:
        """Tokens of the last stored blocks that were of another size than was given; 0 if none were."""
        return self.b.odd_size

    def parted(self, uint32_t tokens_max) -> list[tuple[int, tuple[object, ...], tuple[object, ...]]]:
        """Each of some prompts computed there lately with each of some runs of blocks that were stored since and left
        what was sent: the position at which the two part, and of either its namespace, its end and its first
        `tokens_max` token ids from there. In different namespaces they part at 0."""
        cdef uint32_t i, j, at
        cdef WorkerAccuracy* row = &self.accuracy.rows[self.b.index]
        cdef Place* prompt
        cdef Place* run
        found = []
        with self.tree:
            for i in range(min(row.apart_prompts, <uint32_t> PLACES_KEPT)):
                prompt = &row.prompts[i]
                for j in range(min(row.apart_runs, <uint32_t> PLACES_KEPT)):
                    run = &self.b.apart[<uint64_t> (self.b.apart_runs - 1 - j) % PLACES_KEPT]
                    if is_there(&self.tree.t, prompt) and is_there(&self.tree.t, run):
                        at = parting(&self.tree.t, prompt, run)
                        found.append((at, self.beyond(prompt, at, tokens_max), self.beyond(run, at, tokens_max)))
        return found

    cdef tuple beyond(self, const Place* place, uint32_t start, uint32_t tokens_max):
        namespace, tokens = self.tree.path_to(place.node, min(place.end, start + tokens_max), start)
        return namespace, place.end, tokens

    def compared(self) -> tuple[object, ...]:
        """What the comparison has counted, as plain numbers, for snapshots."""
        cdef uint32_t at
        places = tuple((self.b.apart[at].node, self.b.apart[at].generation, self.b.apart[at].end)
                       for at in range(PLACES_KEPT))
        return self.b.stores, self.b.answers, self.b.apart_runs, self.b.odd_size, self.b.odd_runs, places

    def compare_on(self, object state) -> None:
        """Go on from what `compared` said. Raises ValueError, TypeError or OverflowError."""
        cdef uint32_t at
        self.b.stores, self.b.answers, self.b.apart_runs, self.b.odd_size, self.b.odd_runs, places = state
        if len(places) != PLACES_KEPT or min(self.b.stores, self.b.answers, self.b.apart_runs) < 0:
            raise ValueError("what was reported of a cache is out of its range")
        for at in range(PLACES_KEPT):
            self.b.apart[at].node, self.b.apart[at].generation, self.b.apart[at].end = places[at]

    # --- events ---

    def apply(self, object events, double now) -> int:
        """Apply event objects; returns how many changed an estimate. An event that is none or does not fit together
        raises InvalidInput; those before it have been applied."""
        cdef EventBatch batch = EventBatch()
        cdef int64_t changed = 0
        self.taken = 0
        try:
            for event in events:
                is_eviction = isinstance(event, PrefixEvicted)
                if not is_eviction:
                    batch.add(event)
                if is_eviction or len(batch) == EVENTS_AT_ONCE:
                    changed += self.run_batch(batch, None, now)
                    batch = EventBatch()
                if is_eviction:
                    changed += self.evicted(event)
                    self.taken += 1
        except BaseException:
            self.run_batch(batch, None, now)
            raise
        return changed + self.run_batch(batch, None, now)

    def resolve(self, EventBatch batch not None, object namespace, object namespace_of) -> None:
        """Find the namespaces of a batch's blocks that are distinguished by more than tokens. Runs the caller's
        `namespace_of`, which may do anything; nothing else of this index is in its middle then."""
        if namespace_of is not self.namespace_of and namespace_of != self.namespace_of:
            self.known_namespaces.clear()
            self.namespace_of = namespace_of
        batch.resolve(namespace, namespace_of, self.known_namespaces)
        if namespace_of is not self.namespace_of and namespace_of != self.namespace_of:      # it called here itself
            self.known_namespaces.clear()

    def apply_batch(self, EventBatch batch not None, double now, object namespace=None) -> int:
        """Apply a decoded and resolved batch; returns how many events changed an estimate. See
        `GlobalScheduler.apply_raw`."""
        self.taken = 0
        return self.run_batch(batch, namespace, now)

    cdef uint32_t run_batch(self, EventBatch batch, object namespace, double now) except? 0xFFFFFFFE:
        cdef uint32_t changed = 0, key
        cdef int outcome = DONE
        cdef int64_t stores = self.b.stores, apart_runs = self.b.apart_runs, answers = self.b.answers
        cdef int64_t unplaced = self.b.orphans + self.b.conflicts + self.b.keyed
        with self.tree:
            self.tree.need_estimates()
            keys = self.space_keys(batch, namespace)     # what users' code does is done by now
            if self.closed:
                raise UnknownWorker("the worker of these events was removed")
            self.tree.need_worker(self.b.index)
            self.b.worker = key = self.tree.t.workers[self.b.index].key
            try:
                self.place_events(batch, keys)
                with nogil:
                    outcome = apply_batch(&self.b, &self.tree.t, &batch.batch, now, &changed)
            finally:
                self.release_room()
                _given_up, self.let_go = self.let_go, []
            if self.accuracy is not None and self.b.worker != key:
                self.accuracy.cleared(self.b.index)
            if self.accuracy is not None and self.b.stores != stores:
                self.accuracy.stored(self.b.index, self.b.apart_runs - apart_runs, self.b.answers - answers,
                                     self.b.odd_runs)
                set_limit(&self.tree.t, self.b.index, True)
            if self.accuracy is not None and self.b.orphans + self.b.conflicts + self.b.keyed != unplaced:
                self.accuracy.acquit(self.b.index)
        if outcome != DONE:
            raise MemoryError("cache events")
        self.taken += batch.batch.seen
        return changed

    cdef bint evicted(self, object event) except -1:
        """Apply a PrefixEvicted; whether it changed an estimate."""
        cdef uint64_t version = self.tree.t.version
        kept = check_int("PrefixEvicted.kept_tokens", event.kept_tokens, 0, 2**31 - 1, InvalidInput)
        check_hashable("PrefixEvicted.namespace", event.namespace)
        if event.moved_to is None:
            self.tree.unmark(event.token_ids, self.b.index, kept, namespace=event.namespace)
        elif isinstance(event.moved_to, str):
            with self.tree:
                self.tree.send_away(event.token_ids, self.b.index, kept, not event.moved_to.startswith("CPU"),
                                    namespace=event.namespace)
                expect_moves(&self.tree.t, self.b.index)
        else:
            raise InvalidInput(f"PrefixEvicted.moved_to must be a string or None, got {event.moved_to!r}")
        return self.tree.t.version != version

    # --- namespaces ---

    cdef list space_keys(self, EventBatch batch, object namespace):
        """The keys of a batch's namespaces in the tree, that of `namespace` last. Hash and equality of namespaces run
        here, and may do anything. One that is not its own key has a root at once, so that the tree knows it by this
        key; NO_ROOM where there is none for one, or it never stays."""
        for _ in range(KEY_TRIES):
            keys = []
            for one in (*batch.namespaces, namespace):
                check_hashable("namespace", one)
                key = self.tree.key_of(one)
                if type(key) is HashedKey:
                    try:
                        self.tree.root_of(key, True)
                    except TreeFull:
                        key = NO_ROOM
                keys.append(key)
            strange = [key for key in keys if type(key) is HashedKey and key not in self.tree._roots]
            if not strange:
                return keys
        return [NO_ROOM if key in strange else key for key in keys]

    cdef int place_events(self, EventBatch batch, list keys) except -1:
        """Give each event that starts prompts or names a namespace its row."""
        cdef uint32_t i, plain = NONE
        cdef Event* event
        self.calls += 1
        for i in range(batch.batch.event_count):
            event = &batch.batch.events[i]
            event.space = NONE
            if event.kind != STORED or (event.has_parent and event.namespace < 0):
                continue
            if event.namespace >= 0:
                event.space = self.row_of(keys[event.namespace], event.lora, event.salted, event.extra_first)
                continue
            if plain == NONE:
                plain = self.row_of(keys[len(keys) - 1], 0, 0, 0)
            event.space = plain
        return 0

    cdef uint32_t row_of(self, object space, uint64_t lora, uint64_t salted, uint64_t extra) except? 0xFFFFFFFE:
        """The row of a namespace, with a root in the tree; NONE if there is no room for one."""
        cdef uint32_t row
        if space is NO_ROOM:
            return NONE
        key = (space, lora, salted, extra)
        found = self.rows.get(key)
        row = self.free_row() if found is None else <uint32_t> found
        if row == NONE:
            return NONE
        if found is None:
            memset(&self.b.spaces[row], 0, sizeof(Space))
            self.b.spaces[row].root = NONE
            self.b.spaces[row].lora = lora
            self.b.spaces[row].salted = salted
            self.b.spaces[row].extra = extra
            self.rows[key] = row
            self.names[row] = key
        self.b.spaces[row].call = self.calls
        if space_root(&self.b, &self.tree.t, row) == NONE:
            try:
                self.b.spaces[row].root = self.tree.root_of(space, True)
            except TreeFull:
                return NONE
            self.b.spaces[row].generation = generation(node_at(&self.tree.t, self.b.spaces[row].root))
        return row

    cdef uint32_t free_row(self) except? 0xFFFFFFFE:
        """A row that no block and no event of this call uses, NONE if there is none."""
        cdef uint32_t row, room = self.b.space_room, wider
        cdef Space* grown
        if self.free_rows:
            return self.free_rows.pop()
        for row in range(room):
            if self.b.spaces[row].blocks == 0 and self.b.spaces[row].call != self.calls and self.names[row]:
                self.let_go.append(self.names[row])
                del self.rows[self.names[row]]
                self.names[row] = None
                self.free_rows.append(row)
        if len(self.free_rows) * 4 <= room < SPACES_MAX:         # so that the next search is as many rows away
            wider = min(max(4, room * 2), <uint32_t> SPACES_MAX)
            grown = <Space*> budget_alloc(&self.b.table.budget, <int64_t> wider * sizeof(Space))
            if grown == NULL:
                raise MemoryError("cache events")
            memset(grown, 0, wider * sizeof(Space))
            if room:
                memcpy(grown, self.b.spaces, room * sizeof(Space))
            budget_free(&self.b.table.budget, self.b.spaces, <int64_t> room * sizeof(Space))
            self.b.spaces = grown
            self.b.space_room = wider
            self.names.extend([None] * (wider - room))
            self.free_rows.extend(range(room, wider))
        return self.free_rows.pop() if self.free_rows else NONE

    cdef int release_room(self) except -1:
        """Give all memory back if no block is known: whatever emptied the index, or failed to fill it."""
        if self.b.table.count:
            return 0
        clear_table(&self.b.table)
        budget_free(&self.b.table.budget, self.b.spaces, <int64_t> self.b.space_room * sizeof(Space))
        self.b.spaces = NULL
        self.b.space_room = 0
        self.let_go += self.names
        self.rows.clear()
        self.names.clear()
        self.free_rows.clear()
        return 0

    # --- questions ---

    @property
    def blocks_max(self) -> int:
        """Blocks that may be known at a time."""
        return self.b.blocks_max

    @property
    def bytes_used(self) -> int:
        """Bytes allocated now, as malloc counts them."""
        return self.b.table.budget.used

    def stats(self) -> dict[str, int]:
        """Sizes now and counters since the start. `GlobalScheduler.stats` has them per worker."""
        return {
            "known_blocks": self.b.table.count,
            "block_index_bytes": self.b.table.budget.used,
            "orphan_blocks": self.b.orphans,
            "conflicting_blocks": self.b.conflicts,
            "keyed_blocks": self.b.keyed,
            "unknown_blocks": self.b.unknown_blocks,
            "unknown_events": self.b.unknown_events,
            "block_overflows": self.b.overflows,
            "lost_places": self.b.lost,
        }

    def prefix(self, block_hash) -> list[int] | None:
        """Tokens from the prompt's start to the end of a block; None if it is unknown, or the tree has forgotten
        them."""
        cdef uint32_t i, node
        with self.tree:
            i = self.index_of(block_hash)
            node = place_of(&self.b, &self.tree.t, i) if i != NONE else <uint32_t> NONE
            return None if node == NONE else self.tree.path_to(node, block_at(&self.b.table, i).end)[1]

    def span(self, block_hash) -> tuple[int, int] | None:
        """Positions where a block starts and ends, None if it is unknown."""
        cdef uint32_t i = self.index_of(block_hash)
        return None if i == NONE else (block_at(&self.b.table, i).start, block_at(&self.b.table, i).end)

    cdef uint32_t index_of(self, object block_hash) except? 0xFFFFFFFE:
        cdef Key key
        key_of(block_hash, "block_hash", &key)
        return find_key(&self.b.table, &key)

    def fail_allocation(self, int64_t nth) -> None:
        """Tests only: let the nth allocation from now fail (0: none)."""
        self.b.table.budget.fail_after = nth

    def check(self) -> None:
        """Assert that table, rows and places agree with each other and with the tree. O(everything)."""
        cdef uint32_t i, at, node, entries = 0
        cdef Segment* segment
        cdef Block* block
        cdef set segments = set(), blocks = set()
        spaces = [0] * self.b.space_room
        if self.b.table.directory != NULL:
            entries = <uint32_t> 1 << self.b.table.depth
        for i in range(entries):
            segment = self.b.table.directory[i]
            assert segment.depth <= self.b.table.depth, f"segment {i} is deeper than the directory"
            if <uint64_t> segment not in segments:
                segments.add(<uint64_t> segment)
                found = [segment.slots[at].block for at in range(SEGMENT) if segment.slots[at].block != NONE]
                assert len(found) == segment.used <= SEGMENT_FULL, f"segment {i} miscounts its slots"
                blocks.update(found)
        assert len(segments) == self.b.table.segments, "a segment is lost"
        assert len(blocks) == self.b.table.count == self.b.table.blocks.live, "the table miscounts its blocks"
        assert self.b.table.count <= self.b.blocks_max, "more blocks are known than may be"
        for i in blocks:
            block = block_at(&self.b.table, i)
            assert find_name(&self.b.table, name_of(block.lo, block.hi)) == i, f"block {i} is not found by its hash"
            assert block.copies and block.start < block.end, f"block {i} is held nowhere, or empty"
            node = seen_place(&self.tree.t, block)
            assert node == NONE or print_above(&self.tree.t, node, block.start, block.end) == block.print, (
                f"block {i} is not where it should be")
            spaces[block.space] += 1
        assert spaces == [self.b.spaces[i].blocks for i in range(self.b.space_room)], "a namespace miscounts its blocks"
        assert self.rows == {key: i for i, key in enumerate(self.names) if key is not None}, "rows and names differ"
        assert blocks or self.b.table.budget.used == 0, "an index without blocks holds memory"
        self.check_bytes(len(segments), entries)

    cdef check_bytes(self, int segments, int entries):
        total = segments * charged(sizeof(Segment)) + self.b.table.blocks.chunk_count * (CHUNK * sizeof(Block) + 64)
        total += charged(entries * sizeof(Segment*)) if entries else 0
        total += charged(self.b.space_room * sizeof(Space)) if self.b.space_room else 0
        assert total == self.b.table.budget.used, f"{self.b.table.budget.used} bytes counted, {total} in use"
