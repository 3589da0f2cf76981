"""What rules share: the types of what some must know beyond a request and the workers' columns, how an order becomes
scores, and how chance breaks ties. The scheduler's bookings fill the types in (`preble/scheduling/policy_state.py`),
for policies that name them in `needs`. Owns no rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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
    path. By worker id: `prefill_seconds` and `decode_seconds` of the last H requests; `output_seconds`, the decode time
    of a request of their mean length; `imbalance_shares`, IMBALR in [0, 1]; `eviction_seconds(id)` is M.
    """

    known_tokens: int
    holders: frozenset[str]
    prefill_seconds: Mapping[str, float]
    decode_seconds: Mapping[str, float]
    output_seconds: Mapping[str, float]
    imbalance_shares: Mapping[str, float]
    eviction_seconds: Callable[[str], float]


def ranks(keys: Sequence[Any]) -> list[float]:
    """One score a worker from one sort key a worker: 0 for the smallest key, equal for equal keys."""
    order = {key: float(rank) for rank, key in enumerate(sorted(set(keys)))}
    return [order[key] for key in keys]


def drawn_least(scores: Sequence[float], draw: float) -> int:
    """The position of the lowest score; `draw`, in [0, 1), decides among equals."""
    least = min(scores)
    equal = [i for i, score in enumerate(scores) if score == least]
    return equal[int(draw * len(equal))]
