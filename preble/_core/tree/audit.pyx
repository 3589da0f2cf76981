"""`check` and `show` for radix trees: asserts every invariant of `layout.pxd`, and draws a tree. Owns nothing,
changes nothing."""

from libc.stdint cimport uint32_t, uint64_t

from preble._core.tree.layout cimport (AWAY_SHIFT, FAR, LIVE, NAMESPACE_BYTES, ChildTable, Entry, List, Node, Tree,
                                       WorkerMarks, end_of, generation, index_of, mark_at, node_at, run_end, worker_of)
from preble._core.dict_keys cimport key_bytes
from preble._core.epochs cimport QUEUE_MAX
from preble._core.tree.parts cimport (block_bytes, entry_count, find_entry, gpu_end, marks_of, run_bytes, run_slots,
                                      word_count, words_of)
from preble._core.memory cimport CHUNK, CHUNK_BITS, NONE, charged
from preble._core.tree.reclaim cimport MARK, MEMORY, NODE, retired_of
from preble._core.tree.child_table cimport DELETED_SLOT, find_child, table_bytes


cdef int check_tree(Tree* t, dict roots, dict names, root_queue) except -1:
    """Assert every invariant; the message names the invariant and the node. O(everything)."""
    nodes = [i for i in range(t.nodes.chunk_count << CHUNK_BITS) if node_at(t, i).state & LIVE]
    counted = t.nodes.live - retired_of(t, NODE)
    assert len(nodes) == counted, f"slab counts {counted} nodes, {len(nodes)} are live"
    for i in nodes:
        check_node(t, i)
    check_roots(t, nodes, roots, names, root_queue)
    check_workers(t, nodes)
    check_aging(t, nodes)
    check_table(t, nodes)
    check_bytes(t, nodes, names)


cdef check_node(Tree* t, uint32_t i):
    """R1 and M1 for one node."""
    cdef Node* node = node_at(t, i)
    cdef Node* above
    cdef uint32_t at
    assert generation(node) & 1, f"G1: node {i} is live with a number that was noted of it when it was free"
    if node.parent == NONE:
        assert node.run.length == 0 and node.run.start == 0, f"R1: root {i} has tokens"
        assert entry_count(node) == 0, f"R1: root {i} has marks"
        return
    above = node_at(t, node.parent)
    assert above.state & LIVE, f"R1: node {i} hangs below a freed node"
    assert node.run.length > 0, f"R1: node {i} is empty"
    assert node.run.start == run_end(above.run), f"R1: node {i} does not start where its parent ends"
    child = find_child(t, node.parent, node.run.tokens[0], node.run.start)
    assert child == i, f"R2: the table leads to {child}, not to node {i}"
    assert all(node.run.tokens[at] >= 0 for at in range(node.run.length)), f"R1: node {i} holds a negative token"
    entries = entries_at(t, i)
    for worker, end, mark in entries:
        assert node.run.start < end <= run_end(node.run), f"M1: mark of {worker} on node {i}"
        assert mark_at(t, mark).node == i, f"M1: a mark of node {i} points elsewhere"
        assert mark_at(t, mark).worker == worker, f"M1: a mark of node {i} names another worker"
        flags = mark_at(t, mark).flags
        assert flags >> AWAY_SHIFT == 0 or node.run.start <= gpu_end(flags, end) < end, f"A1: mark {mark} of node {i}"
        assert flags >> AWAY_SHIFT or not flags & FAR, f"A1: mark {mark} of node {i} is far, and not away"
        assert above.parent == NONE or find_entry(above, worker).end == run_end(above.run), (
            f"M1: worker {worker} marks node {i}, not its parent")
        if t.with_slots:
            assert end == run_end(node.run), f"M1: node {i} of a slot tree is cached in part"
    if t.with_slots:
        assert len(entries) == 1, f"M1: node {i} of a slot tree is not cached"
        assert pins_of(t, i) >= sum(pins_of(t, child) for child in children_of(t, i)), f"P1: node {i} has too few pins"


cdef list entries_at(Tree* t, uint32_t i):
    """(worker, end, mark) of each entry of a node, and that the block counts them right."""
    cdef Node* node = node_at(t, i)
    cdef uint32_t at
    words = [(worker_of(words_of(node)[at]), end_of(words_of(node)[at]), marks_of(node)[at])
             for at in range(word_count(node))]
    workers = [word[0] for word in words]
    assert workers == sorted(set(workers)), f"M1: words of node {i} are not sorted"
    entries = [word for word in words if word[1]]
    assert len(entries) == entry_count(node), f"M1: node {i} counts {entry_count(node)} entries, has {len(entries)}"
    return entries


cdef uint64_t pins_of(Tree* t, uint32_t i):
    return mark_at(t, node_at(t, i).only_mark).pins


cdef check_roots(Tree* t, list nodes, dict roots, dict names, root_queue):
    found = sorted(i for i in nodes if node_at(t, i).parent == NONE)
    assert found == sorted(names) == sorted(roots.values()), "R1: roots and namespaces differ"
    assert sorted(root_queue) == found, "R1: a root is not queued for removal checks"


cdef children_of(Tree* t, uint32_t i):
    children = []
    child = node_at(t, i).first_child
    while child != NONE:
        assert node_at(t, child).parent == i, f"R1: node {child} is in the child list of {i}, its parent is another"
        children.append(child)
        child = node_at(t, child).next_sibling
    return children


cdef check_table(Tree* t, list nodes):
    """R2: each child is reachable from its parent's list, and the table has no other entries."""
    used, deleted = table_counts(t.table)
    children = sum(1 for i in nodes if node_at(t, i).parent != NONE)
    assert used == t.table.used, f"R2: {used} table entries, {t.table.used} counted"
    assert deleted == t.table.deleted, "R2: deleted slots are miscounted"
    if t.draining != NULL:
        used += sum(1 for i in range(t.drained, t.draining.size) if t.draining.slots[i] > DELETED_SLOT)
        assert table_counts(t.draining) == (t.draining.used, t.draining.deleted), "R2: the old table is miscounted"
    assert used == children, f"R2: {used} table entries, {children} children"
    listed = sum(len(children_of(t, i)) for i in nodes)
    assert listed == used, f"R2: child lists hold {listed} nodes, the table {used}"


cdef tuple table_counts(ChildTable* table):
    cdef uint32_t i
    used = sum(1 for i in range(table.size) if table.slots[i] > DELETED_SLOT)
    return used, sum(1 for i in range(table.size) if table.slots[i] == DELETED_SLOT)


cdef check_workers(Tree* t, list nodes):
    """M2, L1 and P1."""
    tokens, marks, pinned, unpinned, away = {}, {}, {}, {}, {}
    for i in nodes:
        start = node_at(t, i).run.start
        for worker, end, mark in entries_at(t, i):
            tokens[worker] = tokens.get(worker, 0) + end - start
            marks[worker] = marks.get(worker, 0) + 1
            away[worker] = away.get(worker, 0) + end - gpu_end(mark_at(t, mark).flags, end)
            if mark_at(t, mark).pins:
                pinned[worker] = pinned.get(worker, 0) + end - start
            else:
                unpinned.setdefault(worker, set()).add(mark)
    live = t.marks.live - retired_of(t, MARK)
    assert sum(marks.values()) == live, f"M2: {live} marks live, {sum(marks.values())} on nodes"
    for worker in range(t.worker_end):
        key = t.workers[worker].key
        assert index_of(key) == worker, f"M2: key {key:#x} is not one of worker {worker}"
        assert t.workers[worker].tokens == tokens.pop(key, 0), f"M2: tokens of worker {worker}"
        assert t.workers[worker].marks == marks.pop(key, 0), f"M2: marks of worker {worker}"
        assert t.workers[worker].away == away.pop(key, 0), f"A2: tokens of worker {worker} that are away"
        assert t.workers[worker].pinned == pinned.pop(key, 0), f"P1: pinned tokens of worker {worker}"
        assert t.workers[worker].tokens <= t.workers[worker].limit, f"M2: worker {worker} is over its limit"
        own = unpinned.pop(key, set())
        check_recency(t, &t.workers[worker], f"worker {worker}", own)
    assert t.ghost.tokens == sum(tokens.values()), "E1: tokens of ghosts"
    assert t.ghost.marks == sum(marks.values()), "E1: marks of ghosts"
    assert t.ghost.away == sum(away.values()), "A2: tokens of ghosts that are away"
    assert t.away == sum(t.workers[worker].away for worker in range(t.worker_end)), "A2: tokens away"
    assert t.below == sum(t.workers[worker].below for worker in range(t.worker_end)), "A2: tokens that fit below"
    assert not pinned, "E1: a ghost is pinned"
    check_recency(t, &t.ghost, "ghosts", set().union(*unpinned.values()))


cdef check_recency(Tree* t, WorkerMarks* state, str whose, set expected):
    """L1: the list is exactly the unpinned marks, and each node is met before its parent. P1: a pin covers the whole
    path."""
    cdef uint32_t i = state.recency.oldest, before = NONE, parent
    cdef Entry above
    seen = set()
    cold = state.recency.warm != NONE
    while i != NONE:
        cold = cold and i != state.recency.warm
        above = find_entry(node_at(t, mark_at(t, i).node), mark_at(t, i).worker)
        assert not cold or gpu_end(mark_at(t, i).flags, above.end) == node_at(t, mark_at(t, i).node).run.start, (
            f"A3: {whose}: mark {i} is older than what is in the GPU's memory, and not away")
        assert mark_at(t, i).older == before, f"L1: broken link in the recency list of {whose}"
        assert i in expected and i not in seen, f"L1: mark {i} does not belong in the recency list of {whose}"
        seen.add(i)
        parent = node_at(t, mark_at(t, i).node).parent
        above = find_entry(node_at(t, parent), mark_at(t, i).worker)
        assert above.end == 0 or above.mark not in seen, f"L1: {whose}: a parent older than its child"
        before = i
        i = mark_at(t, i).newer
    assert not cold, f"A3: {whose}: the list does not hold the mark where it begins to be in the GPU's memory"
    assert state.recency.newest == before, f"L1: wrong newest mark of {whose}"
    assert seen == expected, f"L1: marks are missing from the recency list of {whose}"


cdef check_aging(Tree* t, list nodes):
    """L2."""
    marked = {i for i in nodes if entry_count(node_at(t, i))}
    unmarked = {i for i in nodes if not entry_count(node_at(t, i)) and node_at(t, i).parent != NONE}
    assert listed(t, &t.marked) == marked, "L2: the list of marked nodes"
    assert listed(t, &t.unmarked) == unmarked, "L2: the list of unmarked nodes"


cdef set listed(Tree* t, List* ages):
    cdef uint32_t i = ages.oldest, before = NONE
    seen = set()
    while i != NONE:
        assert node_at(t, i).older == before and i not in seen, f"L2: broken aging link at node {i}"
        seen.add(i)
        before = i
        i = node_at(t, i).newer
    assert ages.newest == before, "L2: wrong newest node"
    return seen


cdef check_bytes(Tree* t, list nodes, dict names):
    """B1."""
    cdef Node* node
    cdef uint32_t at
    total = charged(table_bytes(t.table.size)) + (charged(table_bytes(t.draining.size)) if t.draining != NULL else 0)
    total += charged(t.worker_room * sizeof(WorkerMarks)) if t.worker_room else 0
    for at in range(t.epochs.count):
        what = t.epochs.queue[(t.epochs.first + at) % QUEUE_MAX].what
        total += charged(what >> 2) if what & 3 == MEMORY else 0
    total += t.nodes.chunk_count * (CHUNK * t.nodes.item_bytes + 64)
    total += t.marks.chunk_count * (CHUNK * t.marks.item_bytes + 64)
    for key in names.values():
        total += NAMESPACE_BYTES + key_bytes(key)
    for i in nodes:
        node = node_at(t, i)
        total += charged(run_bytes(t, node.run.length))
        total += charged(block_bytes(node.block.room)) if node.block != NULL else 0
    assert total == t.budget.used, f"B1: {t.budget.used} bytes counted, {total} in use"


cdef str show_tree(Tree* t, dict roots, int max_tokens):
    """The tree as text: tokens of each run (at most `max_tokens`), then worker:tokens, `!` where pinned, and KV slots
    if it has them."""
    lines = []
    for namespace, root in sorted(roots.items(), key=lambda item: item[1]):
        lines.append(f"({'root' if namespace is None else repr(namespace)})")
        stack = [(child, 1) for child in children_of(t, root)]
        while stack:
            i, depth = stack.pop(0)
            lines.append("  " * depth + describe(t, i, max_tokens))
            stack = [(child, depth + 1) for child in children_of(t, i)] + stack
    return "\n".join(lines)


cdef str describe(Tree* t, uint32_t i, int max_tokens):
    cdef Node* node = node_at(t, i)
    cdef uint32_t at, shown = min(node.run.length, <uint32_t> max(max_tokens, 1))
    text = " ".join(str(node.run.tokens[at]) for at in range(shown))
    more = f" ...{node.run.length}" if shown < node.run.length else ""
    marks = " ".join(f"{index_of(key)}:{end - node.run.start}" + ("!" if mark_at(t, mark).pins else "")
                     for key, end, mark in entries_at(t, i) if t.workers[index_of(key)].key == key)
    slots = " @" + " ".join(str(run_slots(node.run)[at]) for at in range(shown)) if t.with_slots else ""
    return f"[{text}{more}]{'  ' + marks if marks else ''}{slots}"
