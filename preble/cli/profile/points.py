"""What is measured: which prefills and decodes, in which order, and where to look closer. Owns no engine, no clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ...errors import InvalidInput
from ...types import check_int

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


def plan(limits: Limits, rng: np.random.Generator) -> list[Point]:
    """All points, in the order of measurement: random, so that a machine that warms up or slows down biases none.

    What a fit needs most, and what judges it under the same conditions, comes before what makes it better, for when
    time is short.
    """
    first = list(dict.fromkeys(needed(limits) + held_out(limits, rng)))
    later = [point for point in refining(limits) if point not in first]
    return [some[i] for some in (first, later) for i in rng.permutation(len(some))]


def needed(limits: Limits) -> list[Point]:
    """A coarse grid over all there is."""
    longest = limits.tokens_max
    points = [Point(PREFILL, length) for length in cold_lengths(limits)]
    points += [
        Point(PREFILL, longest // part, before) for part in (64, 8, 2) for before in (longest // 8, longest // 2)
    ]
    contexts = [longest // 32, longest // 8, limits.decode_context_max]
    points += [Point(DECODE, batch, context) for batch in decode_batches(limits) for context in contexts]
    return list(dict.fromkeys(points))


def decode_batches(limits: Limits) -> list[int]:
    """1, 4, 16 and so on up to the largest batch."""
    return sorted({min(4**i, limits.batch_max) for i in range(7)})


def refining(limits: Limits) -> list[Point]:
    """Lengths half-way between those of the grid, and more after cached tokens: where does what start?"""
    lengths = cold_lengths(limits)
    pairs = zip(lengths, lengths[1:], strict=False)
    points = [Point(PREFILL, (low + high) // 2) for low, high in pairs if high > low + 1]
    befores = (limits.tokens_max // 8, limits.tokens_max // 2)
    return points + [Point(PREFILL, limits.tokens_max // part, b) for part in (32, 16, 4) for b in befores]


def held_out(limits: Limits, rng: np.random.Generator) -> list[Point]:
    """Points that judge the fit: a random length within every step of the grid, other contexts, other batches."""
    longest, lengths = limits.tokens_max, cold_lengths(limits)
    pairs = zip(lengths, lengths[1:], strict=False)
    points = [Point(PREFILL, int(rng.integers(low + 1, high)), 0, True) for low, high in pairs if high > low + 1]
    points += [Point(PREFILL, longest // 32, longest // 4, True), Point(PREFILL, longest // 4, longest // 4, True)]
    batches = [(batch + 1) // 2 for batch in decode_batches(limits)]
    return points + [Point(DECODE, batch, longest // part, True) for batch in batches for part in (16, 4)]


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
