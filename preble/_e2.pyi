"""Types of the E2 rule; what it owns is said in `_e2.pyx`."""

from ._cost import LoadBook
from ._groups import Groups
from ._radix import RadixTree
from ._steers import Steers
from ._trust import TrustBook

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
