"""Data of the local scheduler: configuration, requests, load. Owns their validation; decides nothing.

`LocalRequest` is what a caller hands in and never changes. What the scheduler makes of it is in `_batch.pyx`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import InvalidConfig, InvalidInput, InvalidTokens
from ..types import Claim, check_int

Int32Array = npt.NDArray[np.int32]

ORDERS = ("priority", "fcfs", "longest_prefix")
EVICTIONS = ("returns", "lru")
TOKEN_ID_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class LocalConfig:
    """How one worker forms its batches. Raises `InvalidConfig` naming the field. Paper section 4.3.

    `kv_capacity_tokens` is how many tokens' KV there is room for, `max_running` how many requests run at once.
    `token_budget` is the number of tokens computed in one iteration: decodes first, the rest for prefill chunks.
    `max_waiting` bounds newcomers; preempted requests come back on top of it, at most one for each place among the
    running. `order` is how waiting requests are chosen: "priority" (paper, in `priority_groups`), "fcfs" or
    "longest_prefix". Of those that waited longer than `max_wait_seconds` the oldest has every eighth turn, in every
    order (math.inf: never). `min_shared_tokens` delays a request while a running one is computing that many tokens of
    its prompt (0: never delay).

    `eviction` is what goes first when the cache is full: "returns", the prefix whose session is least likely to come
    back soon (`retention`), or "lru", the one used least recently, as engines of others do (paper section 4.3).

    `short_first`: who waits and has little to compute goes before the next chunk of a long prefill, so that a cached
    prompt does not wait for a long one's end; False: after it, as in engines of others.

    `chunked_prefill` False is how engines worked before Sarathi, for comparison with them: prompts are computed whole,
    in iterations of their own that go before all decoding; `token_budget` then bounds the prompt tokens of an iteration
    that computes several. The queue is looked at before every `decodes_per_look`-th decode iteration.
    """

    kv_capacity_tokens: int
    token_budget: int = 512
    max_running: int = 64
    max_waiting: int = 4096
    order: Literal["priority", "fcfs", "longest_prefix"] = "priority"
    eviction: Literal["returns", "lru"] = "returns"
    short_first: bool = True
    priority_groups: int = 10
    max_wait_seconds: float = 30.0
    min_shared_tokens: int = 32
    chunked_prefill: bool = True
    decodes_per_look: int = 1

    def __post_init__(self) -> None:
        check_int("LocalConfig.kv_capacity_tokens", self.kv_capacity_tokens, 1, 2**31 - 1)
        check_int("LocalConfig.token_budget", self.token_budget, 1, 2**31 - 1)
        check_int("LocalConfig.max_running", self.max_running, 1, 1_000_000)
        check_int("LocalConfig.max_waiting", self.max_waiting, 1, 1_000_000)
        check_int("LocalConfig.priority_groups", self.priority_groups, 1, 1_000)
        check_int("LocalConfig.min_shared_tokens", self.min_shared_tokens, 0, 2**31 - 1)
        check_int("LocalConfig.decodes_per_look", self.decodes_per_look, 1, 1_000_000)
        for name in ("chunked_prefill", "short_first"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidConfig(f"LocalConfig.{name} must be True or False, got {getattr(self, name)!r}")
        if self.order not in ORDERS:
            raise InvalidConfig(f"LocalConfig.order must be one of {', '.join(ORDERS)}, got {self.order!r}")
        if self.eviction not in EVICTIONS:
            raise InvalidConfig(f"LocalConfig.eviction must be one of {', '.join(EVICTIONS)}, got {self.eviction!r}")
        if isinstance(self.max_wait_seconds, bool) or not isinstance(self.max_wait_seconds, (int, float)):
            raise InvalidConfig(f"LocalConfig.max_wait_seconds must be a number, got {self.max_wait_seconds!r}")
        if not self.max_wait_seconds >= 0.0:
            raise InvalidConfig(f"LocalConfig.max_wait_seconds must be at least 0, got {self.max_wait_seconds!r}")


@dataclass(frozen=True, slots=True, eq=False)
class LocalRequest:
    """A prompt to continue by up to `max_new_tokens` tokens. Raises `InvalidInput` or `InvalidTokens` naming the field.

    `request_id`: not empty. `token_ids` is 1-D, any integer type; it is copied to int32. A token in `stop_token_ids`
    ends the output and is part of it. Requests share cached prefixes only within one `namespace`. `planned_ids`, shape
    [max_new_tokens], are the output where it is known beforehand (a replay): nothing need be sampled for it. `claim`:
    on whose account it is served and how soon; requests without one are all of one tenant, without deadlines.
    """

    request_id: str
    token_ids: Int32Array
    max_new_tokens: int
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    namespace: Hashable = None
    planned_ids: Int32Array | None = None
    claim: Claim | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str) or not self.request_id:
            raise InvalidInput(f"LocalRequest.request_id must be a non-empty str, got {self.request_id!r}")
        check_int("LocalRequest.max_new_tokens", self.max_new_tokens, 1, 2**31 - 1, InvalidInput)
        object.__setattr__(self, "token_ids", _copy_tokens("token_ids", self.token_ids))
        if self.claim is not None and not isinstance(self.claim, Claim):
            raise InvalidInput(f"LocalRequest.claim must be a Claim, got {type(self.claim).__name__}")
        if self.planned_ids is not None:
            object.__setattr__(self, "planned_ids", _copy_tokens("planned_ids", self.planned_ids))
            if len(self.planned_ids) != self.max_new_tokens:
                raise InvalidTokens(
                    f"LocalRequest.planned_ids must be max_new_tokens = {self.max_new_tokens} tokens, "
                    f"got {len(self.planned_ids)}"
                )


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


def _copy_tokens(name: str, token_ids: Any) -> Int32Array:
    """A private read-only int32 copy of a caller's tokens."""
    try:
        tokens = np.asarray(token_ids)
    except (TypeError, ValueError) as error:  # nested lists of different lengths, for one
        raise InvalidTokens(f"LocalRequest.{name} is no array of integers: {error}") from None
    if tokens.ndim != 1 or tokens.size == 0:
        raise InvalidTokens(f"LocalRequest.{name} must be 1-D and not empty, got shape {tokens.shape}")
    if tokens.dtype.kind not in "iu":
        raise InvalidTokens(f"LocalRequest.{name} must be integers, got {tokens.dtype}")
    low = int(tokens.min())
    high = TOKEN_ID_MAX if tokens.dtype == np.int32 else int(tokens.max())
    if low < 0 or high > TOKEN_ID_MAX:
        raise InvalidTokens(f"LocalRequest.{name} must be in [0, {TOKEN_ID_MAX}], got {low if low < 0 else high}")
    copy = np.array(tokens, np.int32)
    copy.flags.writeable = False
    return copy
