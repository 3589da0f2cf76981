"""What some rules must know beyond a request and the workers' columns. Owns these data types; the scheduler's books
fill them in (`preble/scheduling/policy_state.py`), for policies that name them in `needs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ActiveBlocks:
    """Need "active_blocks": blocks of the prompts of live requests; those that several share count once a worker.

    `prompt`: the request's whole blocks, 4 bytes a token. By worker id: `prefill_tokens`, uncached tokens of requests
    before their first token; `blocks`, different blocks; `new_blocks`, those that this request would add.
    """

    prompt: bytes
    prefill_tokens: Mapping[str, int]
    blocks: Mapping[str, int]
    new_blocks: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class WindowCosts:
    """Need "window_costs": what AIBrix's rule counts of a worker's last three minutes, by worker id, and how much of
    the prompt is in the tree."""

    known_tokens: int
    seconds: Mapping[str, float]
    requests: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PaperHistory:
    """Need "paper_history": what the paper's Algorithms 1 and 2 read.

    `known_tokens`: how much of the prompt is in the tree. `holders`: ids of workers that cache the longest node on that
    path. By worker id: `prefill_seconds` and `decode_seconds` of the last H requests; `eviction_seconds(id)` is M.
    """

    known_tokens: int
    holders: frozenset[str]
    prefill_seconds: Mapping[str, float]
    decode_seconds: Mapping[str, float]
    eviction_seconds: Callable[[str], float]
