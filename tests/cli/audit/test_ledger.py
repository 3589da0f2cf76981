"""The ledger against a naive one that keeps every prefix as a tuple, and on bytes that real engines published."""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from itertools import count

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble import AllBlocksCleared, BlockRemoved, BlockStored
from preble._kv_index.event_batch import EventBatch
from preble.cli.audit.ledger import UNIT_TOKENS_MIN, CacheLedger, LedgerBounds, unit_tokens_of
from preble.transport.namespaces import namespace_of
from tests.support.events import read_events
from tests.support.paths import ROOT

DATA = ROOT / "tests" / "data"
Prefix = tuple[int, ...]


class NaiveEngine:
    """Caches whole blocks by their prefix, and says so as an engine does: hashes are numbers of its own."""

    def __init__(self, block_size: int, hashes: count[int]) -> None:
        self.block_size = block_size
        self.cached: dict[Prefix, int] = {}
        self._hashes = hashes

    def prompt(self, tokens: Sequence[int]) -> BlockStored | None:
        """Compute what is missing of a prompt's whole blocks."""
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        missing = [tuple(tokens[:end]) for end in ends if tuple(tokens[:end]) not in self.cached]
        if not missing:
            return None
        before = missing[0][: -self.block_size]
        for prefix in missing:
            self.cached[prefix] = next(self._hashes)
        hashes = [self.cached[prefix] for prefix in missing]
        return BlockStored(hashes, self.cached.get(before), missing[-1][len(before) :], self.block_size)

    def evict(self, prefix: Prefix) -> BlockRemoved:
        """Drop a block and all that begin with it."""
        gone = [one for one in self.cached if one[: len(prefix)] == prefix]
        return BlockRemoved([self.cached.pop(one) for one in gone])


class NaiveLedger:
    """Which units are held and were ever computed, as sets of prefixes."""

    def __init__(self, ranks: int, unit_tokens: int) -> None:
        self.held: list[set[Prefix]] = [set() for _ in range(ranks)]
        self.known: list[set[Prefix]] = [set() for _ in range(ranks)]
        self.pending: list[set[Prefix]] = [set() for _ in range(ranks)]  # blocks computed, in no whole unit so far
        self.ever: set[Prefix] = set()
        self.unit_tokens = unit_tokens
        self.computed = self.elsewhere = self.again = 0

    def look(self, rank: int, engine: NaiveEngine, computed: int) -> None:
        """Compare a rank with what its engine caches now."""
        self.computed += computed
        width = self.unit_tokens
        self.pending[rank] |= set(engine.cached) - self.known[rank]
        now = {prefix for prefix in engine.cached if len(prefix) % width == 0}
        for prefix in sorted(now - self.held[rank], key=len):
            ends = range(len(prefix) - width + engine.block_size, len(prefix) + 1, engine.block_size)
            fresh = self.pending[rank] & {prefix[:end] for end in ends}
            self.pending[rank] -= fresh
            if any(prefix in other for other in self.held):
                self.elsewhere += engine.block_size * len(fresh)
            elif prefix in self.ever:
                self.again += engine.block_size * len(fresh)
            self.ever.add(prefix)
        self.held[rank], self.known[rank] = now, set(engine.cached)
        self.pending[rank] &= self.known[rank]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([(1, 1), (4, 4), (16, 16), (16, 32), (1, 16), (4, 32)]))
def test_repeats_are_those_of_a_naive_ledger(data: st.DataObject, sizes: tuple[int, int]) -> None:
    hashes = count(1)
    engines = [NaiveEngine(size, hashes) for size in sizes]
    ledger = CacheLedger(2, unit_tokens_of(sizes))
    ledger.counts = True
    naive = NaiveLedger(2, ledger.unit_tokens)
    events = 0
    for step in range(data.draw(st.integers(1, 12))):
        rank = data.draw(st.integers(0, 1))
        engine = engines[rank]
        action = data.draw(st.sampled_from(["prompt", "prompt", "prompt", "evict", "clear"]))
        computed = 0
        if action == "prompt":
            # Few prefixes, which part anywhere: a document of some length, then a tail.
            document, length, tail = (data.draw(st.integers(0, high)) for high in (1, 70, 40))
            event = engine.prompt([document] * length + [7] * tail)
            if event is not None:
                computed = len(event.token_ids)
                events += 1
                ledger.apply(rank, event, float(step))
        elif action == "evict" and engine.cached:
            ledger.apply(rank, engine.evict(data.draw(st.sampled_from(sorted(engine.cached)))), float(step))
        else:
            engine.cached.clear()
            ledger.apply(rank, AllBlocksCleared(), float(step))
        naive.look(rank, engine, computed)
    stored = ledger.stored()
    assert stored.computed == naive.computed
    if min(sizes) >= UNIT_TOKENS_MIN:
        assert (stored.elsewhere, stored.again) == (naive.elsewhere, naive.again)
    else:  # tokens that wait for a whole unit may belong to several branches, and go with the first
        assert abs(stored.twice - naive.elsewhere - naive.again) <= naive.unit_tokens * events
    assert stored.twice <= stored.compared <= stored.computed
    assert sum(repeats for _, repeats in ledger.bins.values()) == stored.twice


def recorded(name: str) -> list[bytes]:
    """The payloads of a recorded engine."""
    rows = msgpack.unpackb(lzma.decompress((DATA / f"{name}.msgpack.xz").read_bytes()))
    return [row["payload"] for row in rows if row["kind"] == "event"]


RECORDED = (
    "events_vllm032_int",
    "events_vllm032_bytes_evict",
    "events_sglang0523_20m",
    "events_sglang0523_page1_evict",
)


@pytest.mark.parametrize("name", RECORDED)
def test_real_bytes_are_counted_to_the_token(name: str) -> None:
    """One engine's events at two ranks: at the second, all that the first still holds is elsewhere."""
    expected = expected_again = 0
    held: set[object] = set()
    ever: set[object] = set()  # hashes of one engine are of the content
    for payload in recorded(name):
        for event in read_events(payload)[0]:
            if isinstance(event, BlockStored):
                new = [block for block in event.block_hashes if block not in held]
                expected += len(new) * event.block_size
                expected_again += len(ever.intersection(new)) * event.block_size
                held.update(new)
                ever.update(new)
            elif isinstance(event, BlockRemoved):
                held.difference_update(event.block_hashes)
            else:
                held.clear()
    size = next(e.block_size for p in recorded(name) for e in read_events(p)[0] if isinstance(e, BlockStored))
    ledger = CacheLedger(2, unit_tokens_of([size]))
    ledger.counts = True
    for at, payload in enumerate(recorded(name)):
        for rank in (0, 1):
            for event in EventBatch(payload).events(namespace_of=namespace_of):
                ledger.apply(rank, event, float(at))
    first, second = (cache.stored for cache in ledger.ranks)
    assert first.computed == second.computed == expected
    assert second.elsewhere + second.again == second.compared, "the second rank computes nothing that is new"
    assert 0 <= second.computed - second.compared <= 0.2 * second.computed
    if size >= UNIT_TOKENS_MIN:
        assert first.twice == expected_again and bool(expected_again) == (name != "events_vllm032_int")
    else:
        assert 0 < first.twice <= expected_again


@pytest.mark.parametrize("size", [1, 4, 8])
def test_blocks_that_come_one_by_one_are_compared_to_the_token(size: int) -> None:
    """A unit's blocks in events of their own once counted as its last block only."""
    ledger = CacheLedger(2, 16)
    ledger.counts = True
    for rank in (0, 1):
        for at in range(0, 48, size):
            parent = at if at else None
            ledger.apply(rank, BlockStored([at + size], parent, list(range(at, at + size)), size), 0.0)
        assert ledger.stored().compared == 48 * (rank + 1) and ledger.stored().elsewhere == 48 * rank


def test_another_medium_and_another_group_of_layers_are_no_work() -> None:
    ledger = CacheLedger(1, 16)
    ledger.counts = True
    tokens = list(range(16))
    ledger.apply(0, BlockStored([1], None, tokens, 16, medium="CPU"), 0.0)
    ledger.apply(0, BlockStored([1], None, tokens, 16, medium="GPU"), 0.0)
    assert (ledger.stored().computed, ledger.stored().loaded) == (0, 16)
    ledger.apply(0, BlockRemoved([1]), 0.0)
    ledger.apply(0, BlockStored([1], None, tokens, 16), 0.0)
    assert ledger.stored().twice == 0, "it was loaded, not computed"
    ledger.apply(0, BlockRemoved([1], medium="CPU"), 0.0)
    ledger.apply(0, BlockRemoved([1]), 0.0)
    ledger.apply(0, BlockStored([1], None, tokens, 16), 0.0)
    ledger.apply(0, BlockStored([1], None, tokens, 16, medium="GPU/1"), 0.0)
    assert (ledger.stored().computed, ledger.stored().again) == (16, 16)


def test_what_came_before_it_counts_is_known_and_not_counted() -> None:
    ledger = CacheLedger(2, 16)
    ledger.apply(0, BlockStored([1, 2], None, list(range(32)), 16), 0.0)
    assert ledger.stored().computed == 0
    ledger.counts = True
    ledger.apply(1, BlockStored([5, 6], None, list(range(32)), 16), 1.0)
    assert (ledger.stored().computed, ledger.stored().elsewhere) == (32, 32)
    assert [unit.end for unit in ledger.resident_leaves(0)] == [32]
    # What is reported once more (vLLM can) is no work, and a start that nobody saw is said.
    ledger.apply(1, BlockStored([5, 6, 7], None, list(range(48)), 16), 2.0)
    ledger.apply(1, BlockStored([9], 8, list(range(16)), 16), 3.0)
    assert (ledger.stored().computed, ledger.stored().unplaced, ledger.stored().twice) == (64, 16, 32)


def test_salts_keep_contents_apart() -> None:
    ledger = CacheLedger(2, 16)
    ledger.counts = True
    ledger.apply(0, BlockStored([1], None, list(range(16)), 16, ("salt", "a")), 0.0)
    ledger.apply(1, BlockStored([1], None, list(range(16)), 16, ("salt", "b")), 0.0)
    assert ledger.stored().twice == 0


def test_every_table_has_a_bound_and_what_is_dropped_is_counted() -> None:
    ledger = CacheLedger(1, 16, LedgerBounds(units=100, hashes=60, segments=40, leaves=10))
    ledger.counts = True
    for number in range(500):
        ledger.apply(0, BlockStored([2 * number, 2 * number + 1], None, [number] * 32, 16), float(number))
        if number % 2:
            ledger.apply(0, BlockRemoved([2 * number, 2 * number + 1]), float(number))
    assert len(ledger.units) <= 100 and len(ledger.ranks[0].ends) <= 60 and len(ledger.ranks[0].leaves) <= 10
    assert sum(len(chain.segments) for chain in ledger.chains) == 40
    assert ledger.dropped_segments == 460 and ledger.dropped_hashes > 0
    assert ledger.forgotten_units + ledger.refused_units > 800
    assert ledger.stored().computed == 500 * 32, "what was computed is counted all the same"
    assert ledger.stored().twice == 0
