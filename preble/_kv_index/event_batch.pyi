# Types of `_kv_index/event_batch.pyx`; what the methods promise stands there.

from typing import Any

from ..types import AllBlocksCleared, BlockRemoved, BlockStored

class EventBatch:
    def __init__(self, payload: Any = None, *, fail_after: int = 0) -> None: ...
    def __len__(self) -> int: ...
    def add(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None: ...
