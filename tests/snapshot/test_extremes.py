"""Snapshots with right checksums and numbers at their extremes are refused, or make a scheduler that can be used."""

from __future__ import annotations

import random
import struct

import pytest

from preble import GlobalScheduler
from preble.errors import SnapshotRefused
from tests.snapshot.extremes import NOW_BUCKET, SERIALS, attempt, attempts, lived, resealed, run

SLICE_WORDS = 7  # prefill, requests, prompt, matched and output tokens, finished, their tokens


def test_a_share_of_all_extremes_is_refused_or_can_be_used() -> None:
    """In processes of their own: one that crashes or hangs is a finding, too."""
    counts, found = run(0.001, seed=2)
    assert not found, found
    assert counts["refused"] > 20 and counts["used"] > 100, counts


def test_numbers_are_set_all_over_the_snapshot() -> None:
    data = lived()
    places = {one.at for one in attempts(data)}
    assert len(places) > 5000 and min(places) < 100 and max(places) > len(data) - 100 and book(data) in places


def book(data: bytes | bytearray) -> int:
    return data.index(struct.pack("<qq", SERIALS, NOW_BUCKET))


def test_a_number_of_bookings_beyond_the_keys_of_leases_is_refused() -> None:
    """Regression: with 2^42 the next key overflowed, and the next decision was a segmentation fault."""
    data = bytearray(lived())
    at = book(data)
    for serials in (-1, 1 << 36, 1 << 42, (1 << 63) - 1):
        struct.pack_into("<q", data, at, serials)
        with pytest.raises(SnapshotRefused, match="counter"):
            GlobalScheduler.restore(resealed(bytes(data)))


def test_a_slice_that_holds_less_than_its_live_requests_is_refused() -> None:
    """Regression: it was accepted, and the window's sums were negative once the requests had ended."""
    data, draw = lived(), random.Random(1)
    start, refused = book(data) + 40, 0
    row_bytes = 4 + 4 + 32 + 64 + 36 * 8 * SLICE_WORDS
    for row in range(2):
        for slot in range(36):
            at = start + row * row_bytes + 104 + slot * 8 * SLICE_WORDS
            words = list(struct.unpack_from(f"<{SLICE_WORDS}q", data, at))
            if words[1] == 0:
                continue
            words[draw.choice((1, 2, 4))] = 0
            bad = data[:at] + struct.pack(f"<{SLICE_WORDS}q", *words) + data[at + 8 * SLICE_WORDS :]
            refused += attempt(resealed(bad)) == "refused"
    assert refused > 10


def test_a_request_whose_key_is_that_of_a_free_lease_is_refused() -> None:
    """Regression: key 1 was taken for a lease that nobody had, and `check` failed later."""
    clean = GlobalScheduler(["a"])
    clean.schedule([1, 2, 3], request_id="the one")
    clean.schedule([1, 2, 3], request_id="another")
    clean.finish("another")
    data = clean.snapshot()
    key = struct.pack("<q", (1 << 26))
    assert data.count(key) >= 1
    at = data.rindex(key)
    with pytest.raises(SnapshotRefused, match="no lease"):
        GlobalScheduler.restore(resealed(data[:at] + struct.pack("<q", 1) + data[at + 8 :]))
