"""The slot tree by example: who holds a prefix, whose slots it has, and what eviction frees. `!` marks what is pinned,
`@` the slots. Random histories are in test_kv_slots_machine.py, failing allocations in test_radix_memory.py."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from preble.batching._kv_slots import Hold, SlotTree
from preble.errors import InvalidInput, InvalidTime


def cached(tree: SlotTree, tokens: list[int], first_slot: int, namespace: str | None = None) -> None:
    """Compute a prompt as a request that ends at once: its tokens stay cached, in slots from `first_slot` on."""
    hold = tree.hold(tokens, 0.0, namespace=namespace)
    new = len(tokens) - hold.matched_tokens
    tree.extend(hold, tokens, list(range(first_slot, first_slot + new)), 0.0)
    tree.release(hold, 0.0)


def drawn(tree: SlotTree) -> list[str]:
    tree.check()
    return tree.show().split("\n") if tree.node_count else []


def evicted(tree: SlotTree, need_tokens: int) -> tuple[list[int], list[tuple[list[int], int, object]]]:
    slots, reports = tree.evict(need_tokens)
    assert isinstance(slots, array) and all(isinstance(path, array) for path, _, _ in reports)
    return list(slots), [(list(path), kept, namespace) for path, kept, namespace in reports]


# --- holding ----------------------------------------------------------------------------------------------------------


def test_a_hold_pins_the_cached_prefix_and_ends_on_a_node() -> None:
    tree = SlotTree()
    cached(tree, [1, 2, 3, 4], 10)
    hold = tree.hold([1, 2, 9], 1.0)
    assert drawn(tree) == ["(root)", "  [1 2]  0:2! @10 11", "    [3 4]  0:2 @12 13"]
    assert hold.matched_tokens == 2 and list(tree.slots(hold)) == [10, 11]
    assert tree.pinned_tokens == 2 and tree.worker_tokens(0) == 4
    tree.release(hold, 2.0)
    assert tree.pinned_tokens == 0 and "!" not in tree.show()


@pytest.mark.parametrize(("max_tokens", "matched"), [(None, 4), (0, 0), (-3, 0), (3, 3), (4, 4), (5, 4), (10**12, 4)])
def test_a_hold_takes_at_most_max_tokens(max_tokens: int | None, matched: int) -> None:
    """An engine must compute at least the last prompt token, so it never holds all of them."""
    tree = SlotTree()
    cached(tree, [1, 2, 3, 4], 10)
    hold = tree.hold([1, 2, 3, 4, 5, 6], 0.0, max_tokens=max_tokens)
    assert hold.matched_tokens == matched == tree.pinned_tokens
    assert list(tree.slots(hold)) == [10, 11, 12, 13][:matched]


def test_a_hold_on_nothing_can_grow() -> None:
    tree = SlotTree()
    hold = tree.hold([1, 2, 3], 0.0)
    assert hold.matched_tokens == 0 and list(tree.slots(hold)) == []
    assert list(tree.extend(hold, [1, 2], [20, 21], 0.0)) == []
    assert list(tree.extend(hold, [1, 2, 3], np.array([22], np.int64), 0.0)) == []
    assert drawn(tree) == ["(root)", "  [1 2 3]  0:3! @20 21 22"], "a leaf that only this hold pins grows in place"


def test_two_holds_on_one_node_pin_it_until_both_are_released() -> None:
    tree = SlotTree()
    cached(tree, [1, 2, 3], 10)
    first, second = tree.hold([1, 2, 3], 0.0), tree.hold([1, 2, 3], 0.0)
    tree.release(first, 0.0)
    assert tree.pinned_tokens == 3 and evicted(tree, 9) == ([], [])
    tree.release(second, 0.0)
    assert evicted(tree, 9) == ([10, 11, 12], [([1, 2, 3], 0, None)])


def test_a_leaf_that_another_hold_ends_on_does_not_grow_but_branches() -> None:
    tree = SlotTree()
    cached(tree, [1, 2], 10)
    first, second = tree.hold([1, 2], 0.0), tree.hold([1, 2], 0.0)
    tree.extend(first, [1, 2, 3], [12], 0.0)
    assert drawn(tree) == ["(root)", "  [1 2]  0:2! @10 11", "    [3]  0:1! @12"]
    assert list(tree.slots(second)) == [10, 11] and second.matched_tokens == 2


def test_extending_by_nothing_changes_nothing() -> None:
    tree = SlotTree()
    cached(tree, [1, 2, 3], 10)
    hold = tree.hold([1, 2, 3], 0.0)
    before = drawn(tree)
    assert list(tree.extend(hold, [1, 2, 3], [], 0.0)) == []
    assert drawn(tree) == before


# --- two requests compute the same tokens -----------------------------------------------------------------------------


def test_slots_of_tokens_that_were_cached_meanwhile_come_back() -> None:
    """Both prefill the same prompt; the first to finish owns it, the second frees its copy and reads the first's."""
    tree = SlotTree()
    first, second = tree.hold([1, 2, 3, 4], 0.0), tree.hold([1, 2, 3, 9], 0.0)
    assert list(tree.extend(first, [1, 2, 3, 4], [10, 11, 12, 13], 0.0)) == []
    assert list(tree.extend(second, [1, 2, 3, 9], [20, 21, 22, 23], 0.0)) == [20, 21, 22]
    assert list(tree.slots(first)) == [10, 11, 12, 13] and list(tree.slots(second)) == [10, 11, 12, 23]
    assert drawn(tree) == ["(root)", "  [1 2 3]  0:3! @10 11 12", "    [9]  0:1! @23", "    [4]  0:1! @13"]


def test_all_slots_come_back_when_all_tokens_were_cached_meanwhile() -> None:
    tree = SlotTree()
    hold = tree.hold([1, 2, 3], 0.0)
    cached(tree, [1, 2, 3, 4], 10)
    assert list(tree.extend(hold, [1, 2, 3], [20, 21, 22], 0.0)) == [20, 21, 22]
    assert list(tree.slots(hold)) == [10, 11, 12]
    assert drawn(tree) == ["(root)", "  [1 2 3]  0:3! @10 11 12", "    [4]  0:1 @13"]


def test_namespaces_have_their_own_slots() -> None:
    tree = SlotTree()
    cached(tree, [1, 2], 10)
    cached(tree, [1, 2], 20, namespace="lora")
    assert tree.worker_tokens(0) == 4
    assert list(tree.slots(tree.hold([1, 2], 0.0))) == [10, 11]
    assert list(tree.slots(tree.hold([1, 2], 0.0, namespace="lora"))) == [20, 21]


# --- eviction ---------------------------------------------------------------------------------------------------------


def test_eviction_frees_exactly_what_is_needed_and_reports_what_stays() -> None:
    tree = SlotTree()
    cached(tree, [1, 2, 3, 4], 10)
    cached(tree, [1, 2, 8, 8], 20, namespace="lora")
    assert evicted(tree, 3) == ([11, 12, 13], [([1, 2, 3, 4], 1, None)])
    assert tree.matched([1, 2, 3, 4]) == 1
    assert evicted(tree, 2) == ([10, 23], [([1], 0, None), ([1, 2, 8, 8], 3, "lora")])
    assert evicted(tree, 0) == evicted(tree, -5) == ([], [])
    assert drawn(tree)[-2:] == ["('lora')", "  [1 2 8]  0:3 @20 21 22"]


def test_what_was_released_last_goes_last_and_leaves_go_before_their_prefix() -> None:
    tree = SlotTree()
    cached(tree, [1, 2, 3, 3], 10)
    cached(tree, [1, 2, 4, 4], 20)
    cached(tree, [5, 5], 30)
    tree.release(tree.hold([1, 2, 3, 3], 9.0), 9.0)
    assert evicted(tree, 7)[1] == [
        ([1, 2, 4, 4], 2, None),
        ([5, 5], 0, None),
        ([1, 2, 3, 3], 2, None),
        ([1, 2], 1, None),
    ]


def test_a_held_prefix_stays_while_its_unused_continuation_goes() -> None:
    tree = SlotTree()
    cached(tree, [1, 2, 3, 4], 10)
    hold = tree.hold([1, 2, 3, 4], 0.0, max_tokens=2)
    assert evicted(tree, 100) == ([12, 13], [([1, 2, 3, 4], 2, None)])
    assert list(tree.slots(hold)) == [10, 11]
    assert drawn(tree) == ["(root)", "  [1 2]  0:2! @10 11"]


def test_the_order_of_eviction_is_that_of_calls_not_of_times() -> None:
    """A clock that jumps back must not make the newest prefix the oldest."""
    tree = SlotTree()
    for now, token in [(50.0, 1), (10.0, 2), (-5.0, 3)]:
        hold = tree.hold([token], now)
        tree.extend(hold, [token], [token], now)
        tree.release(hold, now)
    assert evicted(tree, 3)[0] == [1, 2, 3]


def test_a_namespace_goes_with_its_last_prefix_and_its_last_hold() -> None:
    tree = SlotTree()
    holds = [tree.hold([1, 2], 0.0, namespace=f"tenant-{n}") for n in range(10)]
    assert tree.stats()["namespaces"] == 10, "a hold on nothing keeps its namespace"
    for hold in holds[1:]:
        tree.release(hold, 0.0)
    assert tree.stats()["namespaces"] == 1
    tree.extend(holds[0], [1, 2], [10, 11], 0.0)
    tree.release(holds[0], 0.0)
    tree.evict(2)
    cached(tree, [7], 20)
    assert drawn(tree) == ["(root)", "  [7]  0:1 @20"]


# --- misuse -----------------------------------------------------------------------------------------------------------


def test_a_hold_is_good_for_one_release_on_its_own_tree() -> None:
    tree = SlotTree()
    cached(tree, [1, 2], 10)
    hold = tree.hold([1, 2], 0.0)
    assert repr(hold) == "Hold(matched_tokens=2, released=False)"
    for call in [
        lambda: SlotTree().release(hold, 0.0),
        lambda: SlotTree().slots(hold),
        lambda: SlotTree().extend(hold, [1, 2, 3], [1], 0.0),
    ]:
        with pytest.raises(InvalidInput, match="another tree"):
            call()
    tree.release(hold, 0.0)
    assert hold.released and tree.pinned_tokens == 0
    for call in [
        lambda: tree.release(hold, 0.0),
        lambda: tree.slots(hold),
        lambda: tree.extend(hold, [1, 2, 3], [1], 0.0),
    ]:
        with pytest.raises(InvalidInput, match="released"):
            call()
    with pytest.raises(TypeError, match=r"SlotTree\.hold"):
        Hold()
    tree.check()


def test_a_refused_call_changes_nothing() -> None:
    tree = SlotTree()
    cached(tree, [1, 2, 3, 4], 10)
    hold = tree.hold([1, 2, 9], 0.0)
    before = (drawn(tree), tree.stats(), tree.version, list(tree.slots(hold)))
    for tokens, slots in [([1, 2, 9], []), ([1, 2, 9], [1, 2]), ([1, 2], [1]), ([1], []), ([1, 2, 9, -1], [1, 2])]:
        with pytest.raises(InvalidInput, match="slots|token_ids"):
            tree.extend(hold, tokens, slots, 0.0)
    for now in [float("nan"), float("inf")]:
        with pytest.raises(InvalidTime):
            tree.extend(hold, [1, 2, 9], [20], now)
        with pytest.raises(InvalidTime):
            tree.release(hold, now)
        with pytest.raises(InvalidTime):
            tree.hold([1, 2, 3], now, namespace="new")
    assert (drawn(tree), tree.stats(), tree.version, list(tree.slots(hold))) == before


def test_a_forgotten_hold_keeps_its_prefix_for_ever_but_not_the_tree() -> None:
    """Dropping the object is no release: its slots may still be in use on the device."""
    tree = SlotTree()
    cached(tree, [1, 2], 10)
    tree.hold([1, 2], 0.0)
    assert tree.pinned_tokens == 2 and evicted(tree, 2) == ([], [])
    hold = tree.hold([1], 0.0)
    del tree
    assert hold.matched_tokens == 1 and not hold.released
