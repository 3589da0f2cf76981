"""`check` and `show` for radix trees: asserts every invariant of `_layout.pxd`, and draws a tree. Owns nothing,
changes nothing."""

from libc.stdint cimport uint32_t, uint64_t

from preble._layout cimport LIVE, Entry, List, Node, Tree, entries_of, entry_count, mark_at, node_at
from preble._layout_parts cimport block_bytes, find_child, find_entry, run_bytes, run_slots
from preble._memory cimport CHUNK, CHUNK_BITS, NONE, charged


cdef int check_tree(Tree* t, dict roots, dict names, root_queue) except -1:
    """Assert every invariant; the message names the invariant and the node. O(everything)."""
    nodes = [i for i in range(t.nodes.chunk_count << CHUNK_BITS) if node_at(t, i).state & LIVE]
    assert len(nodes) == t.nodes.live, f"slab counts {t.nodes.live} nodes, {len(nodes)} are live"
    for i in nodes:
        check_node(t, i)
    check_roots(t, nodes, roots, names, root_queue)
    check_workers(t, nodes)
    check_aging(t, nodes)
    check_table(t, nodes)
    check_bytes(t, nodes)


cdef check_node(Tree* t, uint32_t i):
    """R1 and M1 for one node."""
    cdef Node* node = node_at(t, i)
    cdef Entry* entries = entries_of(node)
    cdef Node* above
    cdef uint32_t at
    if node.parent == NONE:
        assert node.run.length == 0 and node.run.start == 0, f"R1: root {i} has tokens"
        assert entry_count(node) == 0, f"R1: root {i} has marks"
        return
    above = node_at(t, node.parent)
    assert above.state & LIVE, f"R1: node {i} hangs below a freed node"
    assert node.run.length > 0, f"R1: node {i} is empty"
    assert node.run.start == above.run.start + above.run.length, f"R1: node {i} does not start where its parent ends"
    assert find_child(t, node.parent, node.run.tokens[0]) == i, f"R2: the table does not lead to node {i}"
    assert all(node.run.tokens[at] >= 0 for at in range(node.run.length)), f"R1: node {i} holds a negative token"
    for at in range(entry_count(node)):
        assert 1 <= entries[at].tokens <= node.run.length, f"M1: mark of {entries[at].worker} on node {i}"
        assert at == 0 or entries[at - 1].worker < entries[at].worker, f"M1: entries of node {i} are not sorted"
        assert mark_at(t, entries[at].mark).node == i, f"M1: a mark of node {i} points elsewhere"
        assert mark_at(t, entries[at].mark).worker == entries[at].worker, f"M1: a mark of node {i} names another worker"
        check_closure(t, i, entries[at].worker)
        if t.with_slots:
            assert entries[at].tokens == node.run.length, f"M1: node {i} of a slot tree is cached in part"
    if t.with_slots:
        assert entry_count(node) == 1, f"M1: node {i} of a slot tree is not cached"
        assert pins_of(t, i) >= sum(pins_of(t, child) for child in children_of(t, i)), f"P1: node {i} has too few pins"


cdef uint64_t pins_of(Tree* t, uint32_t i):
    return mark_at(t, node_at(t, i).only.mark).pins


cdef check_closure(Tree* t, uint32_t i, uint32_t worker):
    cdef Node* above = node_at(t, node_at(t, i).parent)
    cdef Entry* entry
    if above.parent == NONE:
        return
    entry = find_entry(above, worker)
    assert entry != NULL and entry.tokens == above.run.length, f"M1: worker {worker} marks node {i}, not its parent"


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
    cdef uint32_t i
    used = sum(1 for i in range(t.table_size) if t.table[i].tag > 1)
    deleted = sum(1 for i in range(t.table_size) if t.table[i].tag == 1)
    children = sum(1 for i in nodes if node_at(t, i).parent != NONE)
    assert used == t.table_used == children, f"R2: {used} table entries, {t.table_used} counted, {children} children"
    assert deleted == t.table_deleted, "R2: deleted slots are miscounted"
    listed = sum(len(children_of(t, i)) for i in nodes)
    assert listed == used, f"R2: child lists hold {listed} nodes, the table {used}"


cdef check_workers(Tree* t, list nodes):
    """M2, L1 and P1."""
    cdef Entry* entries
    cdef uint32_t at, worker
    tokens, marks, pinned, unpinned = {}, {}, {}, {}
    for i in nodes:
        entries = entries_of(node_at(t, i))
        for at in range(entry_count(node_at(t, i))):
            worker = entries[at].worker
            tokens[worker] = tokens.get(worker, 0) + entries[at].tokens
            marks[worker] = marks.get(worker, 0) + 1
            if mark_at(t, entries[at].mark).pins:
                pinned[worker] = pinned.get(worker, 0) + entries[at].tokens
            else:
                unpinned.setdefault(worker, set()).add(entries[at].mark)
    assert sum(marks.values()) == t.marks.live, f"M2: {t.marks.live} marks live, {sum(marks.values())} on nodes"
    for worker in range(t.worker_end):
        assert t.workers[worker].tokens == tokens.get(worker, 0), f"M2: tokens of worker {worker}"
        assert t.workers[worker].marks == marks.get(worker, 0), f"M2: marks of worker {worker}"
        assert t.workers[worker].pinned == pinned.get(worker, 0), f"P1: pinned tokens of worker {worker}"
        assert t.workers[worker].tokens <= t.workers[worker].capacity, f"M2: worker {worker} is over its capacity"
        check_recency(t, worker, unpinned.get(worker, set()))


cdef check_recency(Tree* t, uint32_t worker, set expected):
    """L1: the list is exactly the unpinned marks, and each node is met before its parent. P1: a pin covers the whole
    path."""
    cdef uint32_t i = t.workers[worker].recency.oldest, before = NONE, parent
    cdef Entry* above
    seen = set()
    while i != NONE:
        assert mark_at(t, i).older == before, f"L1: broken link in the recency list of worker {worker}"
        assert i in expected and i not in seen, f"L1: mark {i} does not belong in the recency list of worker {worker}"
        seen.add(i)
        parent = node_at(t, mark_at(t, i).node).parent
        above = find_entry(node_at(t, parent), worker)
        assert above == NULL or above.mark not in seen, f"L1: worker {worker} has a parent older than its child"
        before = i
        i = mark_at(t, i).newer
    assert t.workers[worker].recency.newest == before, f"L1: wrong newest mark of worker {worker}"
    assert seen == expected, f"L1: marks are missing from the recency list of worker {worker}"


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


cdef check_bytes(Tree* t, list nodes):
    """B1."""
    cdef Node* node
    total = charged(t.table_size * 8) + t.worker_room * sizeof(t.workers[0])
    total += t.nodes.chunk_count * (CHUNK * t.nodes.item_bytes + 64)
    total += t.marks.chunk_count * (CHUNK * t.marks.item_bytes + 64)
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
    cdef Entry* entries = entries_of(node)
    cdef uint32_t at, shown = min(node.run.length, <uint32_t> max(max_tokens, 1))
    text = " ".join(str(node.run.tokens[at]) for at in range(shown))
    more = f" ...{node.run.length}" if shown < node.run.length else ""
    marks = " ".join(f"{entries[at].worker}:{entries[at].tokens}" + ("!" if mark_at(t, entries[at].mark).pins else "")
                     for at in range(entry_count(node)))
    slots = " @" + " ".join(str(run_slots(node.run)[at]) for at in range(shown)) if t.with_slots else ""
    return f"[{text}{more}]{'  ' + marks if marks else ''}{slots}"
