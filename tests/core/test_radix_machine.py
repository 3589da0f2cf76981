"""State machine: the compiled radix tree answers every question as the naive model does, whatever happened before."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from preble._radix import RadixTree
from preble.errors import InvalidInput, UnknownWorker
from tests.models.tree import NaiveTree, prefixes

WINDOW_SECONDS = 10.0
NAMESPACES = [None, "lora", ("tenant", 7)]
# Few stems, cut anywhere and continued by few tokens: prompts share, split, extend and contain each other all the time.
STEMS = [(1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 9, 9, 9, 9), (2, 2, 2, 2, 2, 2), (1,)]
prompts = st.builds(
    lambda stem, cut, tail: (stem[:cut] + tuple(tail)) or (1,),
    st.sampled_from(STEMS),
    st.integers(0, 8),
    st.lists(st.integers(1, 3), max_size=5),
)
namespaces = st.sampled_from([None, None, *NAMESPACES])
some_worker = st.integers(0, 5)  # reduced to the workers there are


class RadixMachine(RuleBasedStateMachine):
    """Random prompts, evictions, workers and clocks, on the real tree and on the model."""

    @initialize(capacities=st.lists(st.integers(1, 30), min_size=1, max_size=3))
    def start(self, capacities):
        self.real = RadixTree(window_seconds=WINDOW_SECONDS)
        self.model = NaiveTree(WINDOW_SECONDS)
        self.now = 0.0
        self.version = 0
        self.cached_before: dict = {}
        self.prompts: set = {(None, (1, 2)), ("lora", (1,))}
        for capacity in capacities:
            self.add_worker(capacity)

    def pick(self, number: int) -> int:
        return sorted(self.model.capacity)[number % len(self.model.capacity)]

    # --- prompts ------------------------------------------------------------------------------------------------------

    @rule(batch=st.lists(prompts, min_size=1, max_size=5), number=some_worker, namespace=namespaces)
    def insert(self, batch, number, namespace):
        for tokens in batch:
            self.insert_one(namespace, tokens, self.pick(number), True)

    @rule(data=st.data(), cut=st.integers(0, 4), tail=st.lists(st.integers(1, 3), max_size=5), number=some_worker)
    def insert_a_relative(self, data, cut, tail, number):
        """A prompt that shares all but the last tokens of an earlier one."""
        namespace, tokens = self.draw_prompt(data)
        self.insert_one(namespace, (tokens[: len(tokens) - cut] + tuple(tail)) or (1,), self.pick(number), True)

    @rule(
        batch=st.lists(prompts, min_size=1, max_size=3), namespace=namespaces, is_hit=st.booleans(), number=some_worker
    )
    def insert_without_worker_or_hit(self, batch, namespace, is_hit, number):
        for tokens in batch:
            self.insert_one(namespace, tokens, None if is_hit else self.pick(number), is_hit)

    def insert_one(self, namespace, tokens, worker, is_hit):
        self.prompts.add((namespace, tokens))
        known = self.real.insert(tokens, self.now, worker=worker, namespace=namespace, is_hit=is_hit)
        assert known == self.model.insert(namespace, tokens, self.now, worker, is_hit)

    def draw_prompt(self, data):
        return data.draw(st.sampled_from(sorted(self.prompts, key=repr)))

    @rule(data=st.data(), number=some_worker, kept=st.integers(0, 9))
    def unmark(self, data, number, kept):
        namespace, tokens = self.draw_prompt(data)
        worker = self.pick(number)
        dropped = self.real.unmark(tokens, worker, kept, namespace=namespace)
        assert dropped == self.model.unmark(namespace, tokens, worker, kept)

    @rule(tokens=prompts, namespace=namespaces)
    def refuse(self, tokens, namespace):
        for bad_tokens in [(), (*tokens, -1), (*tokens, 1 << 31), [*tokens, 0.5]]:
            with pytest.raises(InvalidInput, match="token_ids"):
                self.real.insert(bad_tokens, self.now, namespace=namespace)
        with pytest.raises(InvalidInput, match="now"):
            self.real.insert(tokens, math.nan, namespace=namespace)
        with pytest.raises(UnknownWorker, match="99"):
            self.real.insert(tokens, self.now, worker=99, namespace=namespace)

    # --- workers and time ---------------------------------------------------------------------------------------------

    @rule(
        change=st.sampled_from(["add", "add", "drop", "clear"]),
        number=some_worker,
        capacity=st.integers(1, 30),
        sweep=st.sampled_from([0, 0, 1, 256]),
    )
    def change_workers(self, change, number, capacity, sweep):
        """What is not swept at once stays behind as ghosts, which nobody may see."""
        worker = self.pick(number)
        if change == "clear" or (change == "drop" and not sweep):
            assert self.real.clear_worker(worker, sweep_marks=sweep) == self.model.clear_worker(worker)
        if change == "drop" and len(self.model.capacity) > 1:
            self.drop_worker(worker)
        elif change == "add" and len(self.model.capacity) < 5:
            self.add_worker(capacity)

    def add_worker(self, capacity):
        assert self.real.add_worker(capacity) == self.model.add_worker(capacity)

    def drop_worker(self, worker):
        self.real.drop_worker(worker)
        self.model.drop_worker(worker)

    @rule(marks=st.sampled_from([0, 1, 3, 10**6]))
    def sweep(self, marks):
        ghosts = self.real.stats()["ghost_marks"]
        assert self.real.sweep(marks) == min(marks, ghosts)
        assert self.real.stats()["ghost_marks"] == ghosts - min(marks, ghosts)

    @rule(
        seconds=st.sampled_from([0.5, 3.25, 6.0, 11.0, 26.0, -0.75, -9.0, -31.0]),
        max_nodes=st.sampled_from([0, 1, 3, 99]),
    )
    def move_clock_and_expire(self, seconds, max_nodes):
        self.now += seconds
        self.expire(max_nodes)

    def expire(self, max_nodes):
        """The model does not know the order of forgetting; it checks that what went was dead, and whole nodes."""
        removed = self.real.expire(self.now, max_nodes)
        gone = {key for key in self.model.hits if self.real.match(key[1], namespace=key[0])[0] < len(key[1])}
        assert removed == len(gone & self.model.ends) <= max_nodes
        assert all(self.model.is_dead(key, self.now) for key in gone)
        self.model.forget(gone)
        return removed

    @precondition(lambda self: len(self.prompts) % 4 == 0)
    @rule()
    def wait_two_windows_and_expire(self):
        """Nothing that is cached nowhere outlives two quiet windows."""
        latest = max([self.now / WINDOW_SECONDS, *(w for hits in self.model.hits.values() for w in hits.windows)])
        self.now = (latest + 2) * WINDOW_SECONDS
        while self.expire(10**6):
            pass
        assert not any(self.model.is_dead(end, self.now) for end in self.model.ends)

    # --- what must hold after each step -------------------------------------------------------------------------------

    @invariant()
    def structure_is_sound(self):
        self.real.check()
        stats = self.real.stats()
        assert stats["namespaces"] == len(self.model.namespaces)
        assert stats["nodes"] == self.real.node_count == len(self.model.ends) + len(self.model.namespaces)
        assert stats["marks"] - stats["ghost_marks"] == self.model.mark_count()
        assert stats["bytes_used"] == self.real.bytes_used

    @invariant()
    def matches_are_equal(self):
        for namespace, tokens in self.prompts:
            for asked in [tokens, (*tokens, 3), tokens[:-1] or (7,)]:
                assert self.real.match(asked, namespace=namespace) == self.model.match(namespace, asked)

    @invariant()
    def hits_are_equal(self):
        for namespace, tokens in self.prompts:
            for worker in [None, *self.model.capacity]:
                seen = self.real.hits(tokens, self.now, worker=worker, namespace=namespace)
                assert math.isclose(seen, self.model.hits_of(namespace, tokens, self.now, worker))

    @invariant()
    def eviction_orders_are_equal(self):
        for worker, cached in self.model.cached.items():
            assert self.real.worker_tokens(worker) == len(cached) <= self.model.capacity[worker]
            for need in [1, len(cached) // 2, len(cached) + 1]:
                by_token = [
                    (before + n, hits)
                    for tokens, before, hits in self.real.victims(worker, need, self.now)
                    for n in range(tokens, 0, -1)
                ]
                assert by_token == [(n, pytest.approx(hits)) for n, hits in self.model.victims(worker, need, self.now)]

    @invariant()
    def version_tells_of_every_change(self):
        cached = {worker: set(keys) for worker, keys in self.model.cached.items() if keys}
        assert self.real.version > self.version or cached == self.cached_before
        self.version, self.cached_before = self.real.version, cached

    def teardown(self):
        """Once nobody caches anything and the windows have passed, nothing is left."""
        if hasattr(self, "real"):
            for worker in list(self.model.capacity):
                self.drop_worker(worker)
            self.wait_two_windows_and_expire()
            assert self.real.node_count == 0 and self.real.stats()["marks"] == 0
            self.real.check()


def test_radix_tree_does_what_the_naive_model_does() -> None:
    examples = max(120, settings.default.max_examples)
    run_state_machine_as_test(RadixMachine, settings=settings(max_examples=examples, stateful_step_count=50))


def test_the_model_itself_keeps_whole_prefixes() -> None:
    """The model's one subtle claim: dropping the least recently used token never leaves a hole in a path."""
    model = NaiveTree(WINDOW_SECONDS)
    worker = model.add_worker(7)
    for n, tokens in enumerate([(1, 2, 3, 4), (1, 2, 9), (5, 5, 5, 5, 5), (1, 2, 3, 4, 5, 6, 7, 8, 9)]):
        model.insert(None, tokens, float(n), worker, True)
        assert all(prefix in model.cached[worker] for key in model.cached[worker] for prefix in prefixes(*key))
    assert len(model.cached[worker]) == 7
