"""What is measured: which prefills and decodes, in which order, and where to look closer. Owns no engine, no clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import InvalidInput
from ..types import check_int

PREFILL, DECODE = "prefill", "decode"
SHORTEST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Point:
    """A prefill of `tokens` after `before` cached ones, or a decode step of `tokens` sequences `before` tokens long.

    A held-out point judges the fit and takes no part in it.
    """

    kind: str
    tokens: int
    before: int = 0
    held_out: bool = False

    @property
    def cold(self) -> bool:
        """Whether it is a prefill with nothing before it."""
        return self.kind == PREFILL and self.before == 0


@dataclass(frozen=True, slots=True)
class Limits:
    """The longest prompt in tokens (64 to 2**20) and the largest decode batch (1 to 4096). Raises `InvalidInput`."""

    tokens_max: int
    batch_max: int

    def __post_init__(self) -> None:
        check_int("--max-tokens", self.tokens_max, 64, 1 << 20, InvalidInput)
        check_int("--max-batch", self.batch_max, 1, 4096, InvalidInput)

    @property
    def decode_context_max(self) -> int:
        """The longest context of a decode."""
        return self.tokens_max // 2


def doubling(first: int, last: int) -> list[int]:
    """`first`, twice that and so on, and `last`."""
    values = []
    while first < last:
        values.append(first)
        first *= 2
    return [*values, last]


def cold_lengths(limits: Limits) -> list[int]:
    """Lengths of the prompts that are measured alone, ascending."""
    return doubling(SHORTEST_TOKENS, limits.tokens_max)


def middles(lengths: list[int]) -> list[int]:
    """The lengths half-way between neighbours, which tell whether time is a straight line between these."""
    return [(low + high) // 2 for low, high in zip(lengths, lengths[1:], strict=False) if high > low + 1]


def plan(limits: Limits, rng: np.random.Generator) -> list[Point]:
    """All points, in the order of measurement: random, so that a machine that warms up or slows down biases none."""
    longest, batches = limits.tokens_max, [min(4**i, limits.batch_max) for i in range(6)]
    lengths = cold_lengths(limits)
    points = [Point(PREFILL, length) for length in lengths + middles(lengths)]
    points += [
        Point(PREFILL, longest // part, before)
        for part in (64, 32, 16, 8, 4, 2)
        for before in (longest // 8, longest // 2)
    ]
    contexts = [longest // 32, longest // 8, limits.decode_context_max]
    points += [Point(DECODE, batch, context) for batch in batches for context in contexts]
    points += [
        Point(PREFILL, int(rng.integers(low + 1, high)), held_out=True)
        for low, high in zip(lengths, lengths[1:], strict=False)
        if high > low + 1
    ]
    points += [Point(PREFILL, longest // 32, longest // 4, True), Point(PREFILL, longest // 4, longest // 4, True)]
    points += [Point(DECODE, (batch + 1) // 2, longest // part, True) for batch in batches for part in (16, 4)]
    unique = list(dict.fromkeys(points))
    return [unique[i] for i in rng.permutation(len(unique))]


def refine(
    known: dict[int, float], measure: Callable[[int], float], *, tolerance: float, room: int
) -> Iterator[tuple[int, float]]:
    """Measure lengths between the `known` ones (tokens -> seconds) where time is no straight line; yields each.

    Where a known length lies off the line between its neighbours by more than `tolerance` (a fraction), the gaps on
    both sides of it are halved, the worst first, and again where their middle is off the line, down to neighbouring
    lengths. At most `room` measurements.
    """
    seconds, lengths = dict(known), sorted(known)
    gaps: list[tuple[float, int, int]] = []

    def judge(low: int, middle: int, high: int) -> None:
        line = seconds[low] + (seconds[high] - seconds[low]) * (middle - low) / (high - low)
        off = abs(seconds[middle] / line - 1.0)
        if off > tolerance:
            heapq.heappush(gaps, (-off, low, middle))
            heapq.heappush(gaps, (-off, middle, high))

    for low, middle, high in zip(lengths, lengths[1:], lengths[2:], strict=False):
        judge(low, middle, high)
    while gaps and room > 0:
        _, low, high = heapq.heappop(gaps)
        middle = (low + high) // 2
        if middle in seconds:
            continue
        room -= 1
        seconds[middle] = measure(middle)
        yield middle, seconds[middle]
        judge(low, middle, high)
