# Checking and drawing a tree: contents of `audit.pyx`.

from preble._core.tree.layout cimport Tree

cdef int check_tree(Tree* t, dict roots, dict names, root_queue) except -1
cdef str show_tree(Tree* t, dict roots, int max_tokens)
