"""Data of the local scheduler: configuration, requests, batches, outputs. Owns their validation; decides nothing.

`LocalRequest` is what a caller hands in and never changes. `LiveRequest` is the scheduler's own record of it from `add`
to its last token. `Batch` and `BatchItem` are what an engine computes in one iteration.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import InvalidConfig, InvalidInput, InvalidTokens
from .types import check_int

if TYPE_CHECKING:
    from ._slots import Hold

Int32Array = npt.NDArray[np.int32]

ORDERS = ("priority", "fcfs", "longest_prefix")
TOKEN_ID_MAX = 2**31 - 1
NO_TOKENS: Int32Array = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class LocalConfig:
    """How one worker forms its batches. Raises `InvalidConfig` naming the field. Paper section 4.3.

    `token_budget` is the number of tokens computed in one iteration: decodes first, the rest for prefill chunks.
    `max_waiting` bounds newcomers; preempted requests come back on top of it, at most one for each place among the
    running. `order` is how waiting requests are chosen: "priority" (paper), "fcfs" or "longest_prefix". A request that
    waited longer than `max_wait_seconds` goes before all others, oldest first, in every order (math.inf: never).
    `min_shared_tokens` delays a request while a running one is computing that many tokens of its prompt (0: never
    delay).
    """

    kv_capacity_tokens: int
    token_budget: int = 512
    max_running: int = 64
    max_waiting: int = 4096
    order: str = "priority"
    priority_groups: int = 10
    max_wait_seconds: float = 30.0
    min_shared_tokens: int = 32

    def __post_init__(self) -> None:
        check_int("LocalConfig.kv_capacity_tokens", self.kv_capacity_tokens, 1, 2**31 - 1)
        check_int("LocalConfig.token_budget", self.token_budget, 1, 2**31 - 1)
        check_int("LocalConfig.max_running", self.max_running, 1, 1_000_000)
        check_int("LocalConfig.max_waiting", self.max_waiting, 1, 1_000_000)
        check_int("LocalConfig.priority_groups", self.priority_groups, 1, 1_000)
        check_int("LocalConfig.min_shared_tokens", self.min_shared_tokens, 0, 2**31 - 1)
        if self.order not in ORDERS:
            raise InvalidConfig(f"LocalConfig.order must be one of {', '.join(ORDERS)}, got {self.order!r}")
        if isinstance(self.max_wait_seconds, bool) or not isinstance(self.max_wait_seconds, (int, float)):
            raise InvalidConfig(f"LocalConfig.max_wait_seconds must be a number, got {self.max_wait_seconds!r}")
        if not self.max_wait_seconds >= 0.0:
            raise InvalidConfig(f"LocalConfig.max_wait_seconds must be at least 0, got {self.max_wait_seconds!r}")


@dataclass(frozen=True, slots=True, eq=False)
class LocalRequest:
    """A prompt to continue by up to `max_new_tokens` tokens. Raises `InvalidInput` or `InvalidTokens` naming the field.

    `token_ids` is 1-D, any integer type; it is copied to int32. A token in `stop_token_ids` ends the output and is part
    of it. Requests share cached prefixes only within one `namespace`.
    """

    request_id: str
    token_ids: Int32Array
    max_new_tokens: int
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    namespace: Hashable = None

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str) or not self.request_id:
            raise InvalidInput(f"LocalRequest.request_id must be a non-empty str, got {self.request_id!r}")
        check_int("LocalRequest.max_new_tokens", self.max_new_tokens, 1, 2**31 - 1, InvalidInput)
        object.__setattr__(self, "token_ids", _copy_tokens(self.token_ids))


class LiveRequest:
    """The scheduler's record of one request. Positions count from the start of the prompt.

        tokens   [ prompt ............................. | output ...... ]          known_tokens of them
        slots    [ owned by the tree (hold) | owned by the request | in flight ]   the KV of tokens[:computed] is valid
                   0        hold.matched_tokens       computed    computed + scheduled

    A request is prefilling until `computed` reaches `prefill_end`, the number of tokens known when it was admitted, and
    decoding from then on. While it waits it holds nothing.
    """

    __slots__ = (
        "arrival_seconds",
        "cached_now",
        "cached_tokens",
        "cached_version",
        "computed",
        "hold",
        "known_tokens",
        "number",
        "place",
        "place_version",
        "prefill_end",
        "request",
        "scheduled",
        "slots",
        "tokens",
    )

    def __init__(self, request: LocalRequest, number: int, arrival_seconds: float) -> None:
        self.request = request
        self.number = number  # order of arrival, the tie-breaker everywhere
        self.arrival_seconds = arrival_seconds
        self.tokens = request.token_ids  # replaced by a buffer with room for the output at the first admission
        self.known_tokens = len(request.token_ids)
        self.slots = NO_TOKENS
        self.hold: Hold | None = None
        self.computed = 0
        self.scheduled = 0
        self.prefill_end = 0
        self.cached_tokens: int | None = None  # prompt tokens reused at the first admission
        self.cached_now = 0  # the queue's: cached tokens of the known ones, as of cached_version
        self.cached_version = -1
        self.place = (0, 0)  # the queue's: (group, rank in it), as of place_version
        self.place_version = -1

    @property
    def max_tokens(self) -> int:
        """Tokens of the prompt and the longest output."""
        return len(self.request.token_ids) + self.request.max_new_tokens

    @property
    def output_count(self) -> int:
        """Output tokens produced so far."""
        return self.known_tokens - len(self.request.token_ids)

    @property
    def resumes(self) -> bool:
        """True of a waiting request that ran before and was preempted."""
        return self.prefill_end > 0

    @property
    def decoding(self) -> bool:
        """True once the tokens known at admission are computed."""
        return self.computed >= self.prefill_end

    @property
    def uncached_now(self) -> int:
        """Tokens that would have to be computed if the request were admitted now, as far as the queue knows."""
        return self.known_tokens - min(self.cached_now, self.known_tokens - 1)

    @property
    def known(self) -> Int32Array:
        """The known tokens: prompt and output so far. A view."""
        return self.tokens[: self.known_tokens]

    def append(self, token: int) -> None:
        """Add one output token."""
        self.tokens[self.known_tokens] = token
        self.known_tokens += 1

    def make_buffers(self) -> None:
        """Allocate room for the longest output and its slots, so that decode steps only hand out views."""
        if len(self.tokens) < self.max_tokens:
            tokens = np.empty(self.max_tokens, np.int32)
            tokens[: self.known_tokens] = self.known
            self.tokens = tokens
        self.slots = np.empty(self.max_tokens, np.int32)


@dataclass(slots=True)
class BatchItem:
    """One request's part of an iteration: compute `token_ids` at positions `start`, `start` + 1, ...

    `token_ids` and `write_slots` have shape [n] (n = 1 for a decode), `context_slots` [start + n] in order of position,
    ending in `write_slots`; all int32. They are views that hold until the batch is completed: read them, do not keep
    them. `samples` is True where the last token's logits yield an output token.
    """

    request_id: str
    start: int
    token_ids: Int32Array
    write_slots: Int32Array
    context_slots: Int32Array
    samples: bool
    is_decode: bool


@dataclass(slots=True)
class Batch:
    """What the engine computes in iteration `step`: decodes first, then prefill chunks. Empty when nothing can run."""

    items: list[BatchItem]
    step: int

    @property
    def total_tokens(self) -> int:
        """Tokens computed by this batch."""
        return sum(len(item.token_ids) for item in self.items)

    @property
    def decode_count(self) -> int:
        """Requests that decode in this batch."""
        return sum(item.is_decode for item in self.items)

    @property
    def prefill_tokens(self) -> int:
        """Tokens in prefill chunks."""
        return self.total_tokens - self.decode_count


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One output token. `index` is 0 for the request's first.

    `cached_tokens` is the number of prompt tokens reused at its first admission. `finish_reason` is None, or on the
    last token "stop" (a stop token) or "length".
    """

    request_id: str
    token: int
    index: int
    cached_tokens: int
    finish_reason: str | None


class LocalLoad(NamedTuple):
    """Load of one local scheduler, in requests and tokens.

    `kv_used_tokens` cannot be evicted (held or owned by running requests); `kv_cached_tokens` are in the prefix tree,
    held or not; `waiting_uncached_tokens` is what waiting requests would compute, by the queue's latest look at the
    cache.
    """

    running: int
    waiting: int
    kv_used_tokens: int
    kv_cached_tokens: int
    waiting_uncached_tokens: int


def _copy_tokens(token_ids: Any) -> Int32Array:
    """A private read-only int32 copy of a caller's tokens."""
    try:
        tokens = np.asarray(token_ids)
    except (TypeError, ValueError) as error:  # nested lists of different lengths, for one
        raise InvalidTokens(f"LocalRequest.token_ids is no array of integers: {error}") from None
    if tokens.ndim != 1 or tokens.size == 0:
        raise InvalidTokens(f"LocalRequest.token_ids must be 1-D and not empty, got shape {tokens.shape}")
    if tokens.dtype.kind not in "iu":
        raise InvalidTokens(f"LocalRequest.token_ids must be integers, got {tokens.dtype}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high > TOKEN_ID_MAX:
        raise InvalidTokens(f"LocalRequest.token_ids must be in [0, {TOKEN_ID_MAX}], got {low if low < 0 else high}")
    copy = np.array(tokens, np.int32)
    copy.flags.writeable = False
    return copy
