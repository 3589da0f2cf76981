"""Types of what Python code uses of `parts.pyx`; what it does is said there."""

from collections.abc import Callable

PART_BYTES: int

class PlainParts:
    on_output: Callable[[], object] | None
    is_open: bool
    events: int
    def __init__(self) -> None: ...
    def passed(self, message: bytes) -> bytes | None: ...

class Said:
    kind: int
    fields: list[tuple[bytes, bytes]] | None
    body: bytes
    end: bool
    is_observed: bool
    modes: tuple[int, int] | None
    metadata: bytes | None
    def __init__(self, kind: int = 0) -> None: ...

def read_said(message: bytes) -> Said | None: ...
def passed_part(number: int, part: bytes, end: bool) -> bytes: ...
