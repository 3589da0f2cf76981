"""Types of live requests and batches; what they own is said in `_batch.pyx`."""

from collections.abc import Hashable, Mapping
from typing import Any

from ..types import Claim
from ._kv_slots import Hold
from .requests import Int32Array, LocalRequest

class LiveRequest:
    request: LocalRequest
    tokens: Int32Array
    hold: Hold | None
    cached_tokens: int | None
    arrival_seconds: float
    number: int
    known_tokens: int
    computed: int
    scheduled: int
    prefill_end: int
    cached_now: int
    cached_version: int
    place_version: int
    group: int
    rank: float
    follows: int
    max_tokens: int
    claim: Claim | None
    yields: bool
    namespace: Hashable
    def __init__(self, request: LocalRequest, number: int, arrival_seconds: float) -> None: ...
    @property
    def place(self) -> tuple[int, float]: ...
    @property
    def slots(self) -> Int32Array: ...
    @property
    def output_count(self) -> int: ...
    @property
    def resumes(self) -> bool: ...
    @property
    def decoding(self) -> bool: ...
    @property
    def uncached_now(self) -> int: ...
    @property
    def known(self) -> Int32Array: ...
    def make_buffers(self) -> None: ...
    def drop_slots(self) -> None: ...
    def append(self, token: int) -> str | None: ...

class BatchItem:
    request_id: str
    start: int
    token_ids: Int32Array
    write_slots: Int32Array
    context_slots: Int32Array
    samples: bool
    is_decode: bool
    def __init__(
        self,
        request_id: str,
        start: int,
        token_ids: Int32Array,
        write_slots: Int32Array,
        context_slots: Int32Array,
        samples: bool,
        is_decode: bool,
    ) -> None: ...

class StepOutput:
    request_id: str
    token: int
    index: int
    cached_tokens: int
    finish_reason: str | None
    def __init__(
        self, request_id: str, token: int, index: int, cached_tokens: int, finish_reason: str | None
    ) -> None: ...
    def fields(self) -> tuple[Any, ...]: ...

class Batch:
    step: int
    decode_count: int
    prefill_tokens: int
    lives: list[LiveRequest]
    def __init__(self, step: int = 0) -> None: ...
    def __len__(self) -> int: ...
    @property
    def items(self) -> list[BatchItem]: ...
    @property
    def prefills(self) -> list[LiveRequest]: ...
    def chunks(self) -> list[tuple[int, int]]: ...
    def decode_contexts(self) -> list[int]: ...
    def sampling(self) -> list[str]: ...
    def sampled(self, tokens: Mapping[str, int]) -> list[int | None]: ...
    def book_decodes(self, picked: list[int | None], outputs: list[StepOutput]) -> list[LiveRequest]: ...

def are_token_ids(array: Any) -> bool: ...
