"""Counters and histograms that cost a fraction of a microsecond to count: plain numbers, made into Prometheus' families
when they are asked for. Owns no metric's name.

prometheus_client's own take a lock and walk their buckets for each value, 2 to 4 µs, and a request has a dozen of them.
Each child here is counted by one thread at a time; it may be read by any other meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar

from ...errors import MissingExtra

try:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
    from prometheus_client.utils import floatToGoString
except ImportError as error:
    raise MissingExtra("metrics need prometheus_client: pip install 'preble[gateway]'") from error

T = TypeVar("T")


class CountTally:
    """A number that grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add to it."""
        self.value += amount


class BucketTally:
    """How many values came up to each bound, and their sum. `bounds` ascend."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Tallies(Generic[T]):
    """The children of one metric by the values of its labels; a collector of prometheus_client's registries."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._children: dict[tuple[str, ...], T] = {}

    def labels(self, *values: str) -> T:
        """The child of these values, made at its first use."""
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self._labels):
                raise ValueError(f"{self._name} has the labels {self._labels}, got {values}")
            child = self._children[values] = self._new()
        return child

    def _new(self) -> T:
        raise NotImplementedError

    def _samples(self) -> Iterable[tuple[tuple[str, ...], T]]:
        """All children; a new one may come while they are read."""
        return list(self._children.items())


class Counts(Tallies[CountTally]):
    """A counter with labels."""

    def _new(self) -> CountTally:
        return CountTally()

    def collect(self) -> list[Any]:
        """What a registry asks for."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, child in self._samples():
            family.add_metric(values, child.value)
        return [family]


class Buckets(Tallies[BucketTally]):
    """A histogram with labels."""

    def __init__(self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        super().__init__(name, text, labels)
        self._bounds = tuple(map(float, bounds))
        self._words = [*map(floatToGoString, self._bounds), "+Inf"]

    def _new(self) -> BucketTally:
        return BucketTally(self._bounds)

    def collect(self) -> list[Any]:
        """What a registry asks for."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, child in self._samples():
            buckets = list(zip(self._words, accumulate(list(child.counts)), strict=True))
            family.add_metric(values, buckets, child.sum)
        return [family]
