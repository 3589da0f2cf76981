# Where a worker's blocks end in the tree, as inline C: marks read by position, places and how a lost one is found
# again. Owns no state and changes nothing but the places that blocks remember; `block_updates.pyx` explains them.

from libc.stdint cimport uint32_t, uint64_t

from preble._kv_index.block_layout cimport Blocks
from preble._kv_index.block_table cimport Block, block_at, find_name
from preble._kv_index.decode cimport finished_print, print_base
from preble._core.tree.layout cimport LIVE, Node, Tree, generation, is_same_node, node_at, run_end
from preble._core.tree.parts cimport find_entry
from preble._core.memory cimport NONE
from preble._core.tree.child_table cimport find_child

cdef enum:
    FOUND_NODES = 64             # nodes looked at to find one block's place again
    FOUND_BLOCKS = 4096          # blocks climbed for it


cdef inline uint32_t marked_end(Node* node, uint32_t worker) noexcept nogil:
    # The position up to which the worker is estimated to cache the prompt, by its mark on this node; 0 without one.
    return find_entry(node, worker).end

cdef inline uint32_t marked_above(Tree* t, uint32_t i, uint32_t worker) noexcept nogil:
    # The position up to which the worker is estimated to cache the path to node `i`. O(path).
    cdef Node* node = node_at(t, i)
    cdef uint32_t end = marked_end(node, worker)
    while end == 0 and node.parent != NONE:
        node = node_at(t, node.parent)
        end = marked_end(node, worker)
    return end

cdef inline void put_place(Tree* t, Block* block, uint32_t i) noexcept nogil:
    block.node = i
    block.generation = generation(node_at(t, i)) if i != NONE else 0

cdef inline uint32_t seen_place(Tree* t, const Block* block) noexcept nogil:
    # The node that holds the block's end, as far as its place is still right; NONE otherwise. Changes nothing.
    cdef uint32_t i = block.node
    cdef Node* node
    if i == NONE:
        return NONE
    node = node_at(t, i)
    if not node.state & LIVE or generation(node) != block.generation:
        return NONE
    while node.run.start >= block.end:
        i = node.parent
        node = node_at(t, i)
    return i

cdef inline uint32_t live_place(Tree* t, Block* block) noexcept nogil:
    # The same; a place that a split has moved up is noted.
    cdef uint32_t i = seen_place(t, block)
    if i != block.node and i != NONE:
        put_place(t, block, i)
    return i

cdef inline uint32_t space_root(Blocks* x, Tree* t, uint32_t space) noexcept nogil:
    cdef uint32_t root = x.spaces[space].root
    return root if root != NONE and is_same_node(t, root, x.spaces[space].generation) else <uint32_t> NONE

cdef inline uint32_t place_of(Blocks* x, Tree* t, uint32_t index) noexcept nogil:
    # The node that holds a block's end, NONE if the tree does not know it. O(1), where places have been lost O(blocks
    # before it).
    cdef uint32_t node = live_place(t, block_at(&x.table, index))
    return node if node != NONE else find_again(x, t, index)

cdef inline uint32_t find_again(Blocks* x, Tree* t, uint32_t index) noexcept nogil:
    # Climb to a block whose place is right, or to the root, and come down again block by block.
    cdef uint32_t chain[FOUND_BLOCKS]
    cdef uint32_t depth = 0, node = NONE, start
    cdef Block* block = block_at(&x.table, index)
    while node == NONE:
        if depth == FOUND_BLOCKS or x.credit == 0:
            x.lost += 1
            return NONE
        x.credit -= 1
        chain[depth] = index
        depth += 1
        start = block.start
        if start == 0:
            node = space_root(x, t, block.space)
            break
        index = find_name(&x.table, block.parent)
        if index == NONE or block_at(&x.table, index).end != start:
            break
        block = block_at(&x.table, index)
        node = live_place(t, block)
    while depth and node != NONE:
        depth -= 1
        block = block_at(&x.table, chain[depth])
        node = follow(t, node, block)
        if node != NONE:
            put_place(t, block, node)
    x.lost += node == NONE
    return node

cdef inline uint32_t follow(Tree* t, uint32_t i, Block* block) noexcept nogil:
    # The node that holds the block's end, below node `i` that holds its start. Looks at FOUND_NODES at most.
    cdef Node* node = node_at(t, i)
    cdef uint32_t top = i, looked = 0, inside = block.start - node.run.start
    if inside < node.run.length:
        if node.run.tokens[inside] != block.first:
            return NONE
    else:
        top = i = find_child(t, i, block.first, block.start)
    while i != NONE and looked < FOUND_NODES:
        node = node_at(t, i)
        looked += 1
        if run_end(node.run) >= block.end:
            if print_above(t, i, block.start, block.end) == block.print:
                return i
        elif node.first_child != NONE:
            i = node.first_child
            continue
        while i != top and node_at(t, i).next_sibling == NONE:
            i = node_at(t, i).parent
        if i == top:
            return NONE
        i = node_at(t, i).next_sibling
    return NONE

cdef inline uint32_t print_above(Tree* t, uint32_t i, uint32_t start, uint32_t end) noexcept nogil:
    # The fingerprint of the tokens from `start` to `end` on the path to node `i`.
    cdef Node* node = node_at(t, i)
    cdef uint64_t sum = 0, power = 1
    while True:
        while end > node.run.start and end > start:
            end -= 1
            sum += power * <uint64_t> node.run.tokens[end - node.run.start]
            power *= print_base()
        if end == start:
            return finished_print(sum)
        node = node_at(t, node.parent)

cdef inline bint is_chain_known(Blocks* x, uint32_t index) noexcept nogil:
    # Whether every block from the prompt's start to this one is known. O(blocks).
    cdef Block* block = block_at(&x.table, index)
    cdef uint32_t start
    while block.start:
        start = block.start
        index = find_name(&x.table, block.parent) if x.credit else <uint32_t> NONE
        if index == NONE or block_at(&x.table, index).end != start:
            return False
        x.credit -= 1
        block = block_at(&x.table, index)
    return True
