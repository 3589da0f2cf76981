"""Types of what Python code uses of `plain_events.pyx`; what it does is said there."""

from collections.abc import Callable
from typing import Any

class PlainEvents:
    is_open: bool
    remembers: bool
    events: list[bytes]
    size: int
    passed: int
    last: bytes
    def __init__(self, *, bytes_max: int, remembers: bool) -> None: ...
    def connect(
        self, cycle: Any, flow: Any, write: Callable[[bytes], object], on_output: Callable[[], object]
    ) -> None: ...
    def take(self, data: bytes) -> int: ...
