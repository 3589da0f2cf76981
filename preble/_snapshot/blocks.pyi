"""Types of blocks in a snapshot; what it owns is said in `blocks.pyx`."""

from .._kv_index.block_index import BlockIndex
from .codec import Reader, Writer

def write_blocks(w: Writer, index: BlockIndex) -> None: ...
def read_blocks(r: Reader, index: BlockIndex) -> None: ...
