"""Small helpers of the rules. Owns how an order becomes scores and how chance breaks ties; no rule itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def ranks(keys: Sequence[Any]) -> list[float]:
    """One score a worker from one sort key a worker: 0 for the smallest key, equal for equal keys."""
    order = {key: float(rank) for rank, key in enumerate(sorted(set(keys)))}
    return [order[key] for key in keys]


def drawn_least(scores: Sequence[float], draw: float) -> int:
    """The position of the lowest score; `draw`, in [0, 1), decides among equals."""
    least = min(scores)
    equal = [i for i, score in enumerate(scores) if score == least]
    return equal[int(draw * len(equal))]
