"""The radix tree under `preble._radix`: its structs and invariants, nodes and walks, operations, eviction, audit.

`layout.pxd` has the picture and the invariants; read it first.
"""
