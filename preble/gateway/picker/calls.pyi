"""Types of what Python code uses of `calls.pyx`; what it does is said there."""

from .http2 import Http2Call, Http2Stream
from .pick import Picker

class GrpcCall(Http2Call):
    @property
    def is_over(self) -> bool: ...
    def __init__(self, stream: Http2Stream, message_bytes_max: int) -> None: ...

class ProcessCall(GrpcCall):
    def __init__(self, stream: Http2Stream, message_bytes_max: int, picker: Picker) -> None: ...

class CheckCall(GrpcCall):
    def __init__(self, stream: Http2Stream, message_bytes_max: int, picker: Picker) -> None: ...

class UnknownCall(GrpcCall):
    def __init__(self, stream: Http2Stream, message_bytes_max: int, picker: Picker) -> None: ...

CALLS: dict[bytes, type[CheckCall] | type[ProcessCall] | type[UnknownCall]]
