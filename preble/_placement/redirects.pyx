"""Which prefixes are steered, and where to. Owns the table that decisions read; who puts what into it, and when it
ends, is `scheduling/rebalancer.py`'s business, how a target is chosen `e2.pyx`'s.

    node of the prefix -> {source: only what would go there, targets: 1 to 8 workers, reason}

A decision that finds no table pays one load. Else it climbs the prompt's own path, and the deepest steered prefix that
the prompt has whole counts. A table is never changed: another takes its place, and the old one is freed once no reader
can be looking at it, so explanations need no lock.
"""

from libc.stdint cimport uint32_t
from libc.stdlib cimport free, malloc

from preble._core.atomic cimport load32
from preble._core.tree.layout cimport Tree, Walk, generation, load_run, node_at, run_end
from preble._core.memory cimport NONE
from preble._radix cimport RadixTree
from preble._core.tree.reclaim cimport PLAIN, reclaim, retire_thing

from ..errors import CapacityExceeded

cdef extern from * nogil:
    void store_steers "preble_store"(SteerTable** p, SteerTable* value)


cdef const Steer* find_steer(const SteerTable* table, Tree* t, Walk walk, uint32_t source) noexcept nogil:
    """The deepest steer on a prompt's path that is for what would go to `source`; NULL if there is none. For writers
    and for readers with a slot. O(path)."""
    cdef uint32_t i = walk.node, at
    cdef const Steer* steer
    while i != NONE and run_end(load_run(&node_at(t, i).run)) >= table.shortest:
        at = steer_place(i, table.size)
        while table.steers[at].node != NONE:
            steer = &table.steers[at]
            if (steer.node == i and steer.generation == generation(node_at(t, i)) and steer.tokens <= walk.matched
                    and (steer.source == NONE or steer.source == source)):
                return steer
            at = (at + 1) & (table.size - 1)
        i = load32(&node_at(t, i).parent)
    return NULL


cdef class Steers:
    """The steers of one scheduler. `put` comes under the tree's writers' lock."""

    def __init__(self, RadixTree tree not None):
        self.tree = tree

    def __dealloc__(self):
        free(self.table)

    def put(self, list steers) -> None:
        """Let exactly these be steered: tuples (node, generation, prefix tokens, source or None, reason, targets), one
        a node. Raises CapacityExceeded beyond 1024 of them or 8 targets, MemoryError; then nothing has changed.
        O(steers)."""
        cdef SteerTable* table = NULL
        cdef SteerTable* old = self.table
        cdef Steer* steer
        cdef uint32_t size = 8, at
        if len(steers) > STEERS_MAX or any(not 1 <= len(targets) <= TARGETS_MAX for *_, targets in steers):
            raise CapacityExceeded(f"at most {STEERS_MAX} prefixes are steered, each to 1 to {TARGETS_MAX} workers")
        if steers:
            while size < 2 * len(steers):
                size *= 2
            table = <SteerTable*> malloc(sizeof(SteerTable) + size * sizeof(Steer))
            if table == NULL:
                raise MemoryError("Steers.put")
            table.size = size
            table.shortest = NONE
            for at in range(size):
                table.steers[at].node = NONE
            for node, node_generation, tokens, source, reason, targets in steers:
                at = steer_place(node, size)
                while table.steers[at].node != NONE:
                    at = (at + 1) & (size - 1)
                steer = &table.steers[at]
                steer.node = node
                steer.generation = node_generation
                steer.tokens = tokens
                steer.source = NONE if source is None else source
                steer.reason = reason
                steer.count = len(targets)
                for at, target in enumerate(targets):
                    steer.targets[at] = target
                table.shortest = min(table.shortest, steer.tokens)
        store_steers(&self.table, table)
        self.count = len(steers)
        if old != NULL:
            retire_thing(&self.tree.t, old, PLAIN, 0)
            reclaim(&self.tree.t)

    def show(self) -> list[tuple]:
        """What is steered, as `put` takes it, in order of nodes."""
        cdef uint32_t at
        cdef const Steer* steer
        found = []
        for at in range(self.table.size if self.table != NULL else 0):
            steer = &self.table.steers[at]
            if steer.node != NONE:
                source = None if steer.source == NONE else steer.source
                found.append((steer.node, steer.generation, steer.tokens, source, steer.reason,
                              tuple([steer.targets[i] for i in range(steer.count)])))
        return sorted(found)

    def check(self) -> None:
        """Assert that each steer is found where it is looked for, and one a node."""
        cdef uint32_t at, place
        found = self.show()
        assert len(found) == self.count == len({steer[0] for steer in found}), "two steers of a node"
        for at in range(self.table.size if self.table != NULL else 0):
            if self.table.steers[at].node == NONE:
                continue
            assert self.table.steers[at].tokens >= self.table.shortest, "a prefix shorter than the shortest"
            place = steer_place(self.table.steers[at].node, self.table.size)
            while place != at:
                assert self.table.steers[place].node != NONE, f"steer {at} cannot be found"
                place = (place + 1) & (self.table.size - 1)
