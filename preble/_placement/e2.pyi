"""Types of the E2 rule; what it owns is said in `e2.pyx`."""

from .._cost import LoadBook
from .._kv_index.cache_accuracy import TrustBook
from .._radix import RadixTree
from .prefix_groups import Groups
from .redirects import Steers

class E2:
    groups: Groups
    steers: Steers
    tree: RadixTree
    book: LoadBook
    trust: TrustBook
    def __init__(
        self,
        tree: RadixTree,
        book: LoadBook,
        *,
        exploit_ratio: float,
        escape_seconds: float,
        decode_ratio: float,
        victims_max: int,
    ) -> None: ...
