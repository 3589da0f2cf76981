"""Counters and histograms of our own against prometheus_client's: the same text for the same values."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

prometheus_client = pytest.importorskip("prometheus_client", reason="needs prometheus_client: preble[gateway]")

from preble.gateway.core.tallies import Buckets, Counts  # noqa: E402

BOUNDS = (0.001, 0.5, 1, 64, 1024)
NAMES = ("plain", 'with "quotes"', "two\nlines", "back\\slash", "")


def text(*collectors: Any) -> str:
    """What a registry shows of these, without the times at which prometheus_client's own began."""
    registry = prometheus_client.CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    lines = prometheus_client.generate_latest(registry).decode().splitlines()
    return "\n".join(line for line in lines if "_created" not in line)


def test_a_histogram_shows_what_prometheus_own_shows() -> None:
    rng = random.Random(0)
    theirs = prometheus_client.Histogram("h_seconds", "Text", ("name",), registry=None, buckets=BOUNDS)
    ours = Buckets("h_seconds", "Text", ("name",), BOUNDS)
    values = [*BOUNDS, 0.0, 1e9, -1.0, math.nextafter(64, 65), *(rng.expovariate(0.1) for _ in range(200))]
    for value in values:
        name = rng.choice(NAMES)
        theirs.labels(name).observe(value)
        ours.labels(name).observe(value)
    assert text(ours) == text(theirs)
    assert text(ours).count("_bucket") == len(NAMES) * (len(BOUNDS) + 1)


def test_a_counter_shows_what_prometheus_own_shows() -> None:
    theirs = prometheus_client.Counter("c", "Text", ("one", "two"), registry=None)
    ours = Counts("c", "Text", ("one", "two"))
    for number, name in enumerate(NAMES * 3):
        theirs.labels(name, "x").inc(number)
        ours.labels(name, "x").inc(number)
    assert text(ours) == text(theirs)


def test_without_labels_there_is_one_child_from_its_first_use_on() -> None:
    ours, none = Counts("c", "Text", ()), Buckets("h", "Text", (), BOUNDS)
    ours.labels().inc()
    ours.labels().inc(2)
    shown = text(ours, none)
    assert "c_total 3.0" in shown and "# TYPE h histogram" in shown and "h_bucket" not in shown


@pytest.mark.parametrize("values", [(), ("a", "b")])
def test_another_number_of_labels_is_an_error_of_ours(values: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="c has the labels"):
        Counts("c", "Text", ("one",)).labels(*values)
