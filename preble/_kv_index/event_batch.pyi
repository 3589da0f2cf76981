# Types of `event_batch.pyx`; what the methods promise stands there.

from collections.abc import Callable, Hashable
from typing import Any

from ..types import AllBlocksCleared, BlockKeys, BlockRemoved, BlockStored

class EventBatch:
    keyed_blocks: int
    @property
    def unknown_events(self) -> int: ...
    def __init__(self, payload: Any = None, *, fail_after: int = 0) -> None: ...
    def __len__(self) -> int: ...
    def events(
        self, *, namespace: Hashable = None, namespace_of: Callable[[BlockKeys], Hashable] | None = None
    ) -> list[BlockStored | BlockRemoved | AllBlocksCleared]: ...
    def add(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None: ...
