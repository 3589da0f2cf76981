"""Which prefixes are redirected, and where to. Owns the table that decisions read; who puts what into it, and when it
ends, is `scheduling/rebalancer.py`'s business, how a target is chosen `e2.pyx`'s.

    node of the prefix -> {source: only what would go there, targets: 1 to 8 workers, reason}

A decision that finds no table pays one load. Else it climbs the prompt's own path, and the deepest redirected prefix
that the prompt has whole counts. A table is never changed: another takes its place, and the old one is freed once no
reader can be looking at it, so explanations need no lock.
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
    void store_redirects "preble_store"(RedirectTable** p, RedirectTable* value)


cdef const Redirect* find_redirect(const RedirectTable* table, Tree* t, Walk walk, uint32_t source) noexcept nogil:
    """The deepest redirect on a prompt's path that is for what would go to `source`; NULL if there is none. For writers
    and for readers with a slot. O(path)."""
    cdef uint32_t i = walk.node, at
    cdef const Redirect* redirect
    while i != NONE and run_end(load_run(&node_at(t, i).run)) >= table.shortest:
        at = redirect_place(i, table.size)
        while table.redirects[at].node != NONE:
            redirect = &table.redirects[at]
            if (redirect.node == i and redirect.generation == generation(node_at(t, i))
                and redirect.tokens <= walk.matched
                    and (redirect.source == NONE or redirect.source == source)):
                return redirect
            at = (at + 1) & (table.size - 1)
        i = load32(&node_at(t, i).parent)
    return NULL


cdef class Redirects:
    """The redirects of one scheduler. `put` comes under the tree's writers' lock."""

    def __init__(self, RadixTree tree not None):
        self.tree = tree

    def __dealloc__(self):
        free(self.table)

    def put(self, list redirects) -> None:
        """Let exactly these be redirected: tuples (node, generation, prefix tokens, source or None, reason, targets),
        one a node. Raises CapacityExceeded beyond 1024 of them or 8 targets, MemoryError; then nothing has changed.
        O(redirects)."""
        cdef RedirectTable* table = NULL
        cdef RedirectTable* old = self.table
        cdef Redirect* redirect
        cdef uint32_t size = 8, at
        if len(redirects) > REDIRECTS_MAX or any(not 1 <= len(targets) <= TARGETS_MAX for *_, targets in redirects):
            raise CapacityExceeded(f"at most {REDIRECTS_MAX} redirects, each to 1 to {TARGETS_MAX} workers")
        if redirects:
            while size < 2 * len(redirects):
                size *= 2
            table = <RedirectTable*> malloc(sizeof(RedirectTable) + size * sizeof(Redirect))
            if table == NULL:
                raise MemoryError("Redirects.put")
            table.size = size
            table.shortest = NONE
            for at in range(size):
                table.redirects[at].node = NONE
            for node, node_generation, tokens, source, reason, targets in redirects:
                at = redirect_place(node, size)
                while table.redirects[at].node != NONE:
                    at = (at + 1) & (size - 1)
                redirect = &table.redirects[at]
                redirect.node = node
                redirect.generation = node_generation
                redirect.tokens = tokens
                redirect.source = NONE if source is None else source
                redirect.reason = reason
                redirect.count = len(targets)
                for at, target in enumerate(targets):
                    redirect.targets[at] = target
                table.shortest = min(table.shortest, redirect.tokens)
        store_redirects(&self.table, table)
        self.count = len(redirects)
        if old != NULL:
            retire_thing(&self.tree.t, old, PLAIN, 0)
            reclaim(&self.tree.t)

    def show(self) -> list[tuple]:
        """What is redirected, as `put` takes it, in order of nodes."""
        cdef uint32_t at
        cdef const Redirect* redirect
        found = []
        for at in range(self.table.size if self.table != NULL else 0):
            redirect = &self.table.redirects[at]
            if redirect.node != NONE:
                source = None if redirect.source == NONE else redirect.source
                found.append((redirect.node, redirect.generation, redirect.tokens, source, redirect.reason,
                              tuple([redirect.targets[i] for i in range(redirect.count)])))
        return sorted(found)

    def check(self) -> None:
        """Assert that each redirect is found where it is looked for, and one a node."""
        cdef uint32_t at, place
        found = self.show()
        assert len(found) == self.count == len({redirect[0] for redirect in found}), "two redirects of a node"
        for at in range(self.table.size if self.table != NULL else 0):
            if self.table.redirects[at].node == NONE:
                continue
            assert self.table.redirects[at].tokens >= self.table.shortest, "a prefix shorter than the shortest"
            place = redirect_place(self.table.redirects[at].node, self.table.size)
            while place != at:
                assert self.table.redirects[place].node != NONE, f"redirect {at} cannot be found"
                place = (place + 1) & (self.table.size - 1)
