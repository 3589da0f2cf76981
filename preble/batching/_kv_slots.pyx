"""The radix tree of one engine's KV cache: every cached token has a KV slot, prefixes in use are pinned, leaves are
evicted LRU.

Owns the slots of cached tokens; free slots belong to the caller. Worker 0 is the engine itself, so marks, recency and
pins are those of `_core/tree/operations.pyx`. Unlike in the global tree each node is cached as a whole: evicting part
of a node splits it and removes the tail, and nothing uncached is remembered. Paper section 4.3.
"""

from array import array

from cpython.array cimport array as c_array
from cpython.array cimport clone
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.string cimport memcpy

from preble._core.dict_keys cimport key_value
from preble._core.atomic cimport store64
from preble._core.tree.layout cimport (Node, TokenRun, Tree, Walk, generation, is_same_node, mark_at, node_at, run_end,
                                       store_run)
from preble._core.tree.parts cimport (add_tokens, find_entry, free_run, new_run, recency_push_after, recency_remove,
                                      retire_run, run_slots)
from preble._core.memory cimport CHUNK_BITS, NONE, slab_reserve
from preble._core.tree.nodes cimport add_entry, add_leaf, at_root, forget_leaf, split_node, tree_walk
from preble._core.tree.child_table cimport table_reserve
from preble._core.token_ids cimport TokenView, check_tokens, release_tokens, view_tokens
from preble._radix cimport RadixTree, finite

from ..errors import InvalidInput, InvalidTokens

cdef c_array INTS = array("i")


cdef c_array int_array(uint32_t count):
    return clone(INTS, count, False)


cdef int view_slots(object slots, TokenView* view) except -1:
    """Like view_tokens, for slot ids; the caller calls release_tokens."""
    try:
        view_tokens(slots, view, True)
        check_tokens(view, 0)
    except InvalidTokens as error:
        release_tokens(view)
        raise InvalidInput(str(error).replace("token_ids", "slots")) from None
    return 0


cdef int64_t number_of(Tree* t, uint32_t i) noexcept:
    """What `end_of` says of a node."""
    return (<int64_t> generation(node_at(t, i)) << 32) | i


cdef bint is_evictable(Tree* t, uint32_t i, int64_t number) noexcept:
    """Whether a node is still the one of that number, and a leaf that nobody holds."""
    cdef Node* node
    if number < 0 or i >> CHUNK_BITS >= t.nodes.chunk_count or not is_same_node(t, i, <uint32_t> (number >> 32)):
        return False
    node = node_at(t, i)
    return node.parent != NONE and node.first_child == NONE and mark_at(t, node.only_mark).pins == 0


cdef class Hold:
    """A pinned path: the cached prefix of one request, never evicted until released. Made by `SlotTree.hold`."""

    def __init__(self):
        raise TypeError("a Hold is made by SlotTree.hold")

    def __repr__(self) -> str:
        return f"Hold(matched_tokens={self.matched_tokens}, released={self.released})"


cdef class SlotTree(RadixTree):
    """Prefixes cached by one engine, with the int32 KV slot of each token. All methods are thread-safe single steps."""

    def __init__(self):
        self.add_worker((1 << 31) - 1)

    def __cinit__(self):
        self.t.with_slots = True
        self.t.budget.limit = 1 << 62        # bounded by the number of KV slots

    cdef int need_hold(self, Hold hold) except -1:
        if hold.released or hold.tree is not self:
            raise InvalidInput("the hold was released, or belongs to another tree")
        return 0

    cdef void pin(self, uint32_t i, uint32_t above) noexcept nogil:
        """Pin node `i` and its ancestors up to, not including, `above`; pinned marks leave the recency list."""
        cdef Node* node = node_at(&self.t, i)
        cdef uint32_t index
        while i != above and node.parent != NONE:
            index = find_entry(node, 0).mark
            if mark_at(&self.t, index).pins == 0:
                recency_remove(&self.t, &self.t.workers[0].recency, index)
                self.t.workers[0].pinned += node.run.length
            mark_at(&self.t, index).pins += 1
            i = node.parent
            node = node_at(&self.t, i)

    def hold(self, token_ids, now, *, namespace=None, max_tokens=None) -> Hold:
        """Pin the longest cached prefix of at most `max_tokens` tokens. May split a node; O(prefix)."""
        cdef TokenView view
        cdef Walk walk
        cdef uint32_t count
        cdef Hold hold = Hold.__new__(Hold)      # first: making an object may run other Python code
        finite(now)
        view_tokens(token_ids, &view)
        try:
            count = view.count if max_tokens is None else min(<object> view.count, max(0, max_tokens))
            check_tokens(&view, 0)
            with self:
                walk = tree_walk(&self.t, at_root(&self.t, self.root_of(namespace, True)), view.data, count)
                self.hold_walk(hold, walk)
        finally:
            release_tokens(&view)
        return hold

    cdef int hold_walk(self, Hold hold, Walk walk) except -1:
        """Pin where a walk ended."""
        if walk.inside < node_at(&self.t, walk.node).run.length:
            if split_node(&self.t, walk.node, walk.inside):
                raise MemoryError("SlotTree.hold")
            walk.node = node_at(&self.t, walk.node).parent
        hold.tree = self
        hold.node = walk.node
        hold.matched_tokens = walk.matched
        self.pin(walk.node, NONE)
        node_at(&self.t, self.root_above(walk.node)).hits += 1      # a root counts the holds below it
        return 0

    cdef uint32_t root_above(self, uint32_t i) noexcept:
        """The root over a node. O(path)."""
        while node_at(&self.t, i).parent != NONE:
            i = node_at(&self.t, i).parent
        return i

    def slots(self, Hold hold) -> array[int]:
        """KV slots of the pinned prefix, in token order. Changes nothing; O(prefix)."""
        cdef c_array answer
        self.need_hold(hold)
        answer = int_array(hold.matched_tokens)
        self.copy_slots(hold, <int32_t*> answer.data.as_ints)
        return answer

    def extend(self, Hold hold, token_ids, slots, now) -> array[int]:
        """Cache tokens behind the hold and pin them too: `token_ids` is the whole prefix, `slots` those of its new
        tokens only.

        Where another request has cached the same tokens meanwhile, its slots stay; the caller's redundant ones are
        returned. Raises InvalidInput when the lengths do not fit, MemoryError when memory is out; then nothing has
        changed.
        """
        cdef TokenView view, slot_view
        self.need_hold(hold)
        finite(now)
        view_tokens(token_ids, &view)
        try:
            check_tokens(&view, hold.matched_tokens)
            view_slots(slots, &slot_view)
            try:
                with self:
                    self.need_hold(hold)         # another thread may have released or extended it meanwhile
                    if view.count != hold.matched_tokens + slot_view.count:
                        raise InvalidInput(f"slots: {slot_view.count} given, {view.count} tokens less "
                                           f"{hold.matched_tokens} held are new")
                    return self.grow(hold, view.data, slot_view.data, view.count)
            finally:
                release_tokens(&slot_view)
        finally:
            release_tokens(&view)

    cdef c_array grow(self, Hold hold, const int32_t* tokens, const int32_t* slots, uint32_t count):
        cdef Walk walk
        cdef uint32_t held = hold.matched_tokens, known
        cdef c_array redundant
        walk.node = hold.node
        walk.inside = node_at(&self.t, hold.node).run.length
        walk.matched = held
        walk = tree_walk(&self.t, walk, tokens, count)
        known = walk.matched
        redundant = int_array(known - held)
        if known > held:
            memcpy(redundant.data.as_ints, slots, (known - held) * 4)
        if walk.node == hold.node and self.may_append(hold.node) and count > known:
            self.append_run(hold, tokens + known, slots + (known - held), count - known)
        else:
            self.branch(hold, walk, tokens + known, slots + (known - held), count - known)
        hold.matched_tokens = count
        self.t.version += 1
        return redundant

    cdef bint may_append(self, uint32_t i) noexcept:
        """A leaf that only one hold pins can grow in place: no other request's prefix ends on it."""
        cdef Node* node = node_at(&self.t, i)
        return node.parent != NONE and node.first_child == NONE and mark_at(&self.t, node.only_mark).pins == 1

    cdef int append_run(self, Hold hold, const int32_t* tokens, const int32_t* slots, uint32_t count) except -1:
        """Replace the leaf's run by one that is `count` tokens longer."""
        cdef Node* node = node_at(&self.t, hold.node)
        cdef TokenRun* old = node.run
        cdef TokenRun* run = new_run(&self.t, old.start, NULL, NULL, old.length + count)
        if run == NULL:
            raise MemoryError("SlotTree.extend")
        memcpy(&run.tokens[0], &old.tokens[0], old.length * 4)
        memcpy(&run.tokens[old.length], tokens, count * 4)
        memcpy(run_slots(run), run_slots(old), old.length * 4)
        memcpy(run_slots(run) + old.length, slots, count * 4)
        store_run(&node.run, run)
        store64(&node.only, run_end(run))            # of worker 0
        add_tokens(&self.t.workers[0], count)
        self.t.workers[0].pinned += count
        retire_run(&self.t, old)
        return 0

    cdef int branch(self, Hold hold, Walk walk, const int32_t* tokens, const int32_t* slots, uint32_t count) except -1:
        """Pin what is cached already beyond the hold, split where the paths part, hang the rest below."""
        cdef TokenRun* run = NULL
        if (slab_reserve(&self.t.nodes, &self.t.budget, 2) or slab_reserve(&self.t.marks, &self.t.budget, 2)
                or table_reserve(&self.t, 2)):
            raise MemoryError("SlotTree.extend")
        if count:
            run = new_run(&self.t, walk.matched, tokens, slots, count)
            if run == NULL:
                raise MemoryError("SlotTree.extend")
        if walk.inside < node_at(&self.t, walk.node).run.length:
            if split_node(&self.t, walk.node, walk.inside):
                free_run(&self.t, run)
                raise MemoryError("SlotTree.extend")
            walk.node = node_at(&self.t, walk.node).parent
        if run != NULL:
            walk.node = add_leaf(&self.t, walk.node, run)
            add_entry(&self.t, walk.node, 0, run_end(run))
        self.pin(walk.node, hold.node)
        hold.node = walk.node
        return 0

    def release(self, Hold hold, now) -> None:
        """Unpin; what no other hold pins becomes evictable and most recently used. A second release raises
        InvalidInput."""
        finite(now)
        self.let_go(hold)

    cdef int let_go(self, Hold hold) except -1:
        with self:
            self.need_hold(hold)
            node_at(&self.t, self.root_above(hold.node)).hits -= 1
            self.unpin(hold.node)
            hold.released = True
            self.forget_empty_roots()
        return 0

    cdef void unpin(self, uint32_t i) noexcept nogil:
        """Take a pin off node `i` and its ancestors; leaf first, so that each node ends up older than its parent."""
        cdef Node* node = node_at(&self.t, i)
        cdef uint32_t index
        while node.parent != NONE:
            index = find_entry(node, 0).mark
            mark_at(&self.t, index).pins -= 1
            if mark_at(&self.t, index).pins == 0:
                recency_push_after(&self.t, &self.t.workers[0].recency, self.t.workers[0].recency.newest, index)
                self.t.workers[0].pinned -= node.run.length
            i = node.parent
            node = node_at(&self.t, i)

    def evict(self, int64_t need_tokens) -> tuple[array[int], list[tuple[array[int], int, object]]]:
        """Free at least `need_tokens` slots from the least recently used leaves, the last one in part; fewer if the
        rest is pinned.

        Returns the freed slots and, for each cut, (tokens of the whole path, how many of them stay cached, namespace).
        """
        cdef uint32_t oldest, i, length
        cdef int64_t freed = 0
        cdef c_array slots = int_array(0)
        reports = []
        with self:
            while freed < need_tokens and self.t.workers[0].recency.oldest != NONE:
                oldest = self.t.workers[0].recency.oldest
                i = mark_at(&self.t, oldest).node
                length = node_at(&self.t, i).run.length
                if length > need_tokens - freed:
                    if split_node(&self.t, i, <uint32_t> (length - (need_tokens - freed))) == 0:
                        length = node_at(&self.t, i).run.length
                slots.extend(self.cut(i, reports))
                freed += length
        return slots, reports

    def end_of(self, Hold hold) -> int:
        """A number for the node at which a held prefix ends: never that of another node, and of none once it is gone.
        A split leaves it to the lower part. O(1)."""
        self.need_hold(hold)
        return number_of(&self.t, hold.node)

    def reach(self, token_ids, *, namespace=None) -> tuple[int, int]:
        """How many tokens of a prompt are cached, and the number of the node in which that ends; -1 for none. Changes
        nothing; O(prefix)."""
        cdef Walk walk
        with self:
            if not self.walk_python(token_ids, namespace, &walk) or walk.matched == 0:
                return 0, -1
            return walk.matched, number_of(&self.t, walk.node)

    def evict_end(
        self, int64_t number, int64_t need_tokens
    ) -> tuple[array[int], list[tuple[array[int], int, object]], int]:
        """Free a leaf by its number, or its last `need_tokens` if it is longer. Returns what `evict` does, and the
        number of the leaf that prefix ends with now: what is left of it, or its parent where nothing else hangs there;
        -1 where that is none, and where the number is not that of a leaf that nobody holds; then nothing is freed."""
        cdef uint32_t i = <uint32_t> (number & 0xFFFFFFFF), length, above
        cdef c_array slots = int_array(0)
        reports = []
        with self:
            if not is_evictable(&self.t, i, number):
                return slots, reports, -1
            length = node_at(&self.t, i).run.length
            if length > need_tokens:
                split_node(&self.t, i, <uint32_t> (length - need_tokens))    # without memory all of it goes
            above = node_at(&self.t, i).parent
            slots = self.cut(i, reports)
            number = number_of(&self.t, above)
            return slots, reports, number if is_evictable(&self.t, above, number) else -1

    cdef c_array cut(self, uint32_t i, list reports):
        """Remove a leaf; returns its slots and adds the report."""
        cdef Node* node = node_at(&self.t, i)
        cdef uint32_t root
        cdef c_array path = int_array(node.run.start + node.run.length)
        cdef c_array slots = int_array(node.run.length)
        memcpy(slots.data.as_ints, run_slots(node.run), node.run.length * 4)
        kept = node.run.start
        root = i
        while node.parent != NONE:
            memcpy(path.data.as_ints + node.run.start, &node.run.tokens[0], node.run.length * 4)
            root = node.parent
            node = node_at(&self.t, root)
        forget_leaf(&self.t, i)                      # before anything that may run other Python code
        reports.append((path, kept, key_value(self._names[root])))
        return slots

    # --- for compiled callers: ids and slots that were checked before ---

    cdef bint walk_ids(self, const int32_t* ids, uint32_t count, object namespace, Walk* walk) except -1:
        """As `walk_python`, as the writer."""
        cdef uint32_t root = self.root_of(namespace, False)
        if root == NONE:
            return False
        walk[0] = tree_walk(&self.t, at_root(&self.t, root), ids, count)
        return True

    cdef uint32_t matched_ids(self, const int32_t* ids, uint32_t count, object namespace) except? 0xFFFFFFFF:
        """Tokens of the longest cached prefix."""
        cdef Walk walk
        with self:
            return walk.matched if self.walk_ids(ids, count, namespace, &walk) else 0

    cdef int64_t end_of_ids(self, const int32_t* ids, uint32_t count, object namespace) except? -2:
        """The number that `reach` says."""
        cdef Walk walk
        with self:
            if not self.walk_ids(ids, count, namespace, &walk) or walk.matched == 0:
                return -1
            return number_of(&self.t, walk.node)

    cdef Hold hold_ids(self, const int32_t* ids, uint32_t count, object namespace):
        """As `hold`."""
        cdef Hold hold = Hold.__new__(Hold)
        with self:
            self.hold_walk(hold, tree_walk(&self.t, at_root(&self.t, self.root_of(namespace, True)), ids, count))
        return hold

    cdef int copy_slots(self, Hold hold, int32_t* into) except -1:
        """As `slots`."""
        cdef Node* node
        self.need_hold(hold)
        node = node_at(&self.t, hold.node)
        while node.parent != NONE:
            memcpy(into + node.run.start, run_slots(node.run), node.run.length * 4)
            node = node_at(&self.t, node.parent)
        return 0

    cdef c_array extend_ids(self, Hold hold, const int32_t* ids, const int32_t* slots, uint32_t count):
        """As `extend`; `slots` are those of the new tokens."""
        with self:
            self.need_hold(hold)
            return self.grow(hold, ids, slots, count)

    @property
    def pinned_tokens(self) -> int:
        """Cached tokens that some hold pins."""
        return self.t.workers[0].pinned
