"""State machine: the compiled slot tree pins, evicts and reports as the naive model does, and no slot is ever lost."""

from __future__ import annotations

from array import array

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

from preble.batching._kv_slots import SlotTree
from preble.errors import InvalidInput
from tests.models.tree import NaiveSlots

NAMESPACES = [None, "lora"]
STEMS = [(1, 2, 1, 2, 1, 2, 1, 2), (1, 2, 1, 3, 3, 3), (2, 2, 2, 2), (1,)]
prompts = st.builds(
    lambda stem, cut, tail: (stem[:cut] + tuple(tail)) or (1,),
    st.sampled_from(STEMS),
    st.integers(0, 8),
    st.lists(st.integers(1, 2), max_size=4),
)
namespaces = st.sampled_from([None, None, "lora"])
any_hold = st.integers(0, 7)  # reduced to the holds there are


class SlotsMachine(RuleBasedStateMachine):
    """Requests that hold, extend and release prefixes, and an allocator that runs out of slots."""

    @initialize(slot_count=st.integers(8, 48))
    def start(self, slot_count):
        self.real = SlotTree()
        self.model = NaiveSlots()
        self.slot_count = slot_count
        self.free = list(range(100, 100 + slot_count))
        self.holds: list = []  # (real hold, model hold)
        self.now = 0.0
        self.version = 0
        self.cached_before: set = set()

    # --- requests -----------------------------------------------------------------------------------------------------

    @rule(batch=st.lists(prompts, min_size=1, max_size=3), namespace=namespaces)
    def serve(self, batch, namespace):
        """Requests at once, from the first token to the last: what they leave behind is cached and in no hold."""
        for tokens in batch:
            self.hold_one(namespace, tokens, None)
        for tokens, pair in zip(batch, self.holds[-len(batch) :], strict=True):
            self.compute(*pair, tokens)
        for _ in batch:
            self.release_one(-1)

    @precondition(lambda self: len(self.holds) < 8)
    @rule(tokens=prompts, namespace=namespaces, max_tokens=st.none() | st.integers(0, 9))
    def hold(self, tokens, namespace, max_tokens):
        self.hold_one(namespace, tokens, max_tokens)

    def hold_one(self, namespace, tokens, max_tokens):
        real = self.real.hold(tokens, self.now, namespace=namespace, max_tokens=max_tokens)
        model = self.model.hold(namespace, tokens, max_tokens)
        assert real.matched_tokens == len(model.tokens) and not real.released
        self.holds.append((real, model))

    @precondition(lambda self: self.holds)
    @rule(number=any_hold, tail=st.lists(st.integers(1, 3), max_size=6), as_array=st.booleans())
    def extend(self, number, tail, as_array):
        real, model = self.holds[number % len(self.holds)]
        self.compute(real, model, (*model.tokens, *tail), as_array)

    def compute(self, real, model, tokens, as_array=False):
        """Take slots for the new tokens, evicting where there are too few, and cache them."""
        held = len(model.tokens)
        if len(tokens) - held > len(self.free):
            self.evict(len(tokens) - held - len(self.free))
        tokens = tokens[: held + len(self.free)]
        slots = [self.free.pop() for _ in tokens[held:]]
        if tokens:
            given = array("i", slots) if as_array else slots
            redundant = self.real.extend(real, array("i", tokens) if as_array else tokens, given, self.now)
            assert list(redundant) == self.model.extend(model, tokens, slots)
            self.free.extend(redundant)
            assert real.matched_tokens == len(tokens)

    @precondition(lambda self: self.holds)
    @rule(number=any_hold)
    def release(self, number):
        self.release_one(number % len(self.holds))

    def release_one(self, number):
        real, model = self.holds.pop(number)
        self.real.release(real, self.now)
        self.model.release(model)
        assert real.released
        with pytest.raises(InvalidInput, match="hold"):
            self.real.release(real, self.now)
        with pytest.raises(InvalidInput, match="hold"):
            self.real.slots(real)

    @precondition(lambda self: self.holds)
    @rule(number=any_hold, extra=st.sampled_from([-1, 1, 5]))
    def refuse(self, number, extra):
        """Wrong lengths, bad tokens and holds of another tree are refused before anything changes."""
        real, model = self.holds[number % len(self.holds)]
        tokens = (*model.tokens, 4, 4)
        with pytest.raises(InvalidInput, match="slots"):
            self.real.extend(real, tokens, list(range(2 + extra)), self.now)
        with pytest.raises(InvalidInput, match="token_ids"):
            self.real.extend(real, (*tokens, -4), [1, 2, 3], self.now)
        with pytest.raises(InvalidInput, match="now"):
            self.real.extend(real, tokens, [1, 2], float("inf"))
        with pytest.raises(InvalidInput, match="hold"):
            SlotTree().release(real, self.now)

    # --- memory -------------------------------------------------------------------------------------------------------

    @rule(need=st.sampled_from([0, 1, 2, 3, 5, 8, 100]))
    def evict(self, need):
        slots, reports = self.real.evict(need)
        freed = self.model.evict(need)
        by_token = [
            (namespace, tuple(path[:n])) for path, kept, namespace in reports for n in range(len(path), kept, -1)
        ]
        assert by_token == [key for key, _ in freed]
        assert sorted(slots) == sorted(slot for _, slot in freed)
        self.free.extend(slots)

    @rule(seconds=st.sampled_from([1.0, 30.0, -5.0]))
    def move_clock(self, seconds):
        """Times are only checked for sense: recency is the order of calls."""
        self.now += seconds

    # --- what must hold after each step -------------------------------------------------------------------------------

    @invariant()
    def structure_is_sound(self):
        self.real.check()
        assert self.real.worker_tokens(0) == len(self.model.slots)
        assert self.real.pinned_tokens == len(self.model.slots) - len(self.model.unused)

    @invariant()
    def version_tells_of_every_change(self):
        cached = set(self.model.slots)
        assert self.real.version > self.version or cached == self.cached_before
        self.version, self.cached_before = self.real.version, cached

    @invariant()
    def every_slot_has_one_owner(self):
        assert sorted([*self.free, *self.model.slots.values()]) == list(range(100, 100 + self.slot_count))

    @invariant()
    def held_slots_are_equal(self):
        for real, model in self.holds:
            assert list(self.real.slots(real)) == self.model.slots_of(model)

    @invariant()
    def matches_are_equal(self):
        known = set(self.model.slots) | {(hold.namespace, (*hold.tokens, 1)) for _, hold in self.holds}
        for namespace, tokens in known:
            for asked in NAMESPACES if namespace is None else [namespace]:
                assert self.real.matched(tokens, namespace=asked) == self.model.matched(asked, tokens)

    def teardown(self):
        """Every slot comes back exactly once, from the right prefix, and the tree is empty."""
        for key in list(self.model.slots) if hasattr(self, "real") else []:
            hold, model = self.real.hold(key[1], self.now, namespace=key[0]), self.model.hold(key[0], key[1], None)
            assert list(self.real.slots(hold)) == self.model.slots_of(model)
            self.holds.append((hold, model))
        while getattr(self, "holds", []):
            self.release_one(-1)
        if hasattr(self, "real"):
            self.evict(10**9)
            assert sorted(self.free) == list(range(100, 100 + self.slot_count))
            self.real.release(self.real.hold((1,), self.now), self.now)
            assert self.real.stats()["nodes"] == self.real.stats()["marks"] == self.real.worker_tokens(0) == 0
            self.real.check()


def test_slot_tree_does_what_the_naive_model_does() -> None:
    examples = max(150, settings.default.max_examples)
    run_state_machine_as_test(SlotsMachine, settings=settings(max_examples=examples, stateful_step_count=50))
