# The tree in a snapshot: contents of `tree.pyx`.

from preble._radix cimport RadixTree
from preble._snapshot.codec cimport Reader, Writer

cdef int write_tree(Writer w, RadixTree tree) except -1
cdef int read_tree(Reader r, RadixTree tree) except -1
