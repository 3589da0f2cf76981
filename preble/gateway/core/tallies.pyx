"""Counters and histograms that cost a fraction of a microsecond to count: plain numbers, made into Prometheus' families
when they are asked for. Owns no metric's name.

prometheus_client's own take a lock and walk their buckets for each value, 2 to 4 µs, and a request has three dozen of
them. Each child here is counted by one thread at a time; it may be read by any other meanwhile.
"""

from bisect import bisect_left
from itertools import accumulate

cimport cython

from preble.errors import MissingExtra

try:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
    from prometheus_client.utils import floatToGoString
except ImportError as error:
    raise MissingExtra("metrics need prometheus_client: pip install 'preble[gateway]'") from error


@cython.final
cdef class CountTally:
    """A number that grows."""

    cdef readonly double value

    def inc(self, double amount=1.0):
        """Add to it."""
        self.value += amount


@cython.final
cdef class BucketTally:
    """How many values came up to each bound, and their sum. `bounds` ascend."""

    cdef readonly tuple bounds
    cdef readonly list counts
    cdef readonly double sum

    def __init__(self, tuple bounds):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)

    def observe(self, double value):
        """Count a value."""
        cdef Py_ssize_t place = bisect_left(self.bounds, value)
        self.counts[place] += 1
        self.sum += value


cdef class Tallies:
    """The children of one metric by the values of its labels; a collector of prometheus_client's registries."""

    cdef str name, text
    cdef tuple names
    cdef dict children

    def __init__(self, str name, str text, names):
        self.name, self.text, self.names = name, text, tuple(names)
        self.children = {}

    def labels(self, *values):
        """The child of these values, made at its first use."""
        child = self.children.get(values)
        if child is None:
            if len(values) != len(self.names):
                raise ValueError(f"{self.name} has the labels {self.names}, got {values}")
            child = self.children[values] = self.new()
        return child

    cdef object new(self):
        raise NotImplementedError

    cdef list samples(self):
        """All children; a new one may come while they are read."""
        return list(self.children.items())


@cython.final
cdef class Counts(Tallies):
    """A counter with labels."""

    cdef object new(self):
        return CountTally()

    def collect(self):
        """What a registry asks for."""
        family = CounterMetricFamily(self.name, self.text, labels=self.names)
        for values, child in self.samples():
            family.add_metric(values, child.value)
        return [family]


@cython.final
cdef class Buckets(Tallies):
    """A histogram with labels."""

    cdef tuple bounds
    cdef list words

    def __init__(self, str name, str text, labels, bounds):
        super().__init__(name, text, labels)
        self.bounds = tuple(map(float, bounds))
        self.words = [*map(floatToGoString, self.bounds), "+Inf"]

    cdef object new(self):
        return BucketTally(self.bounds)

    def collect(self):
        """What a registry asks for."""
        family = HistogramMetricFamily(self.name, self.text, labels=self.names)
        for values, child in self.samples():
            buckets = list(zip(self.words, accumulate(list(child.counts)), strict=True))
            family.add_metric(values, buckets, child.sum)
        return [family]
