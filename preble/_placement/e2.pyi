"""Types of the E2 rule; what it owns is said in `e2.pyx`."""

from .._cost import LoadTracker
from .._kv_index.cache_accuracy import CacheAccuracy
from .._radix import RadixTree

class E2:
    tree: RadixTree
    loads: LoadTracker
    accuracy: CacheAccuracy
    eligible_workers: int
    def load_rates(self, worker: int) -> tuple[float, float]: ...
    def loaded_tokens(self, worker: int) -> tuple[int, int]: ...
    def reprice_credits(self, factor: float) -> None: ...
