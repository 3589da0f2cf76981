"""Types of blocks in a snapshot; what it owns is said in `_snapshot_blocks.pyx`."""

from ._blocks import BlockIndex
from ._snapshot_bytes import Reader, Writer

def write_blocks(w: Writer, index: BlockIndex) -> None: ...
def read_blocks(r: Reader, index: BlockIndex) -> None: ...
