"""The radix tree by example: each test draws the tree it expects. Random histories are in test_radix_machine.py, memory
in test_radix_memory.py."""

from __future__ import annotations

import math
import sys
import threading

import pytest

from preble._radix import RadixTree
from preble.batching._kv_slots import SlotTree
from preble.errors import InvalidConfig, InvalidInput, InvalidTime, InvalidTokens, UnknownWorker


def tree_with(*capacities: int, window_seconds: float = 100.0) -> RadixTree:
    """A tree with a worker for each capacity: indices 0, 1, ..."""
    tree = RadixTree(window_seconds=window_seconds)
    for capacity in capacities:
        tree.add_worker(capacity)
    return tree


def drawn(tree: RadixTree) -> list[str]:
    """The tree as its lines; children newest first. Only of a sound tree."""
    tree.check()
    return tree.show().split("\n") if tree.node_count else []


# --- insert and split -------------------------------------------------------------------------------------------------


def test_prompts_that_part_share_one_node_up_to_there() -> None:
    tree = tree_with(100)
    assert tree.insert([1, 2, 3, 4, 5, 6, 7], 0.0, worker=0) == 0
    assert drawn(tree) == ["(root)", "  [1 2 3 4 5 6 ...7]  0:7"]
    assert tree.insert([1, 2, 3, 4, 5, 8], 0.0, worker=0) == 5
    assert drawn(tree) == ["(root)", "  [1 2 3 4 5]  0:5", "    [8]  0:1", "    [6 7]  0:2"]


def test_the_picture_in_the_layout_file() -> None:
    """`_core/tree/layout.pxd` opens with this tree, before and after the insert that splits it, and after the
    eviction."""
    tree = tree_with(8, 100)
    tree.insert([1, 2, 3, 4, 5, 6, 7], 0.0, worker=0)
    tree.insert([1, 2, 3, 4, 5, 8], 0.0, worker=0)
    tree.insert([1, 2, 3, 9, 9], 0.0, worker=1)
    assert drawn(tree) == [
        "(root)",
        "  [1 2 3]  0:3 1:3",
        "    [9 9]  1:2",
        "    [4 5]  0:2",
        "      [8]  0:1",
        "      [6 7]  0:2",
    ]
    assert tree.victims(0, 2, 0.0) == [(2, 5, 1.0)]
    tree.insert([7, 7], 0.0, worker=0)
    assert drawn(tree) == [
        "(root)",
        "  [7 7]  0:2",
        "  [1 2 3]  0:3 1:3",
        "    [9 9]  1:2",
        "    [4 5]  0:2",
        "      [8]  0:1",
        "      [6 7]",
    ]


def test_a_prompt_that_ends_inside_a_node_splits_it() -> None:
    tree = tree_with(100, 100)
    tree.insert([1, 2, 3, 4], 0.0, worker=0)
    assert tree.insert([1, 2], 0.0, worker=1) == 2
    assert drawn(tree) == ["(root)", "  [1 2]  0:2 1:2", "    [3 4]  0:2"]


def test_a_split_gives_both_parts_the_hits_of_the_whole() -> None:
    tree = tree_with(100, 100)
    tree.insert([1, 2, 3, 4], 0.0, worker=0)
    tree.insert([1, 2, 3, 4], 0.0, worker=0)
    tree.insert([1, 2, 9], 0.0, worker=1)
    assert [tree.hits(prompt, 0.0) for prompt in ([1, 2], [1, 2, 3, 4], [1, 2, 9])] == [3.0, 2.0, 1.0]
    assert [tree.hits(prompt, 0.0, worker=0) for prompt in ([1, 2], [1, 2, 3, 4], [1, 2, 9])] == [2.0, 2.0, 0.0]


def test_a_split_leaves_a_worker_that_cached_only_the_upper_part_off_the_lower() -> None:
    tree = tree_with(3, 100, 100)
    tree.insert([1, 2, 3, 4, 5], 0.0, worker=0)
    tree.insert([1, 2, 3, 4, 5], 0.0, worker=1)
    assert drawn(tree) == ["(root)", "  [1 2 3 4 5]  0:3 1:5"]
    tree.insert([1, 2, 3, 9], 0.0, worker=2)
    assert drawn(tree) == ["(root)", "  [1 2 3]  0:3 1:3 2:3", "    [9]  2:1", "    [4 5]  1:2"]
    tree.insert([1, 2, 8], 0.0, worker=2)
    assert drawn(tree)[1:4] == ["  [1 2]  0:2 1:2 2:2", "    [8]  2:1", "    [3]  0:1 1:1 2:1"]


def test_match_reports_for_every_worker_how_much_it_holds() -> None:
    tree = tree_with(100, 100, 2)
    for worker, prompt in enumerate([[1, 2, 3, 4], [1, 2, 9], [1, 2, 3]]):
        tree.insert(prompt, 0.0, worker=worker)
    assert tree.match([1, 2, 3, 4, 5]) == (4, {0: 4, 1: 2, 2: 2})
    assert tree.match([1, 2, 3]) == (3, {0: 3, 1: 2, 2: 2})
    assert tree.match([1]) == (1, {0: 1, 1: 1, 2: 1})
    assert tree.match([2, 1]) == (0, {})
    assert tree.matched([1, 2, 3, 4], 1) == 2


def test_reading_changes_nothing() -> None:
    tree = tree_with(100)
    tree.insert([1, 2, 3, 4], 0.0, worker=0)
    before = (drawn(tree), tree.stats(), tree.version, tree.victims(0, 9, 0.0))
    tree.match([1, 2, 9])
    tree.match([1, 2], namespace="unknown")
    tree.matched([1], 0)
    tree.hits([1, 2], 50.0, worker=0)
    tree.worker_tokens(0)
    assert (drawn(tree), tree.stats(), tree.version, tree.victims(0, 9, 0.0)) == before


def test_tokens_span_the_whole_range_of_31_bits() -> None:
    tree = tree_with(100)
    tree.insert([0, (1 << 31) - 1, 0], 0.0, worker=0)
    assert tree.match([0, (1 << 31) - 1, 0]) == (3, {0: 3})
    assert tree.match([0, (1 << 31) - 1, 1]) == (2, {0: 2})


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 1000])
def test_long_runs_part_at_the_right_token(length: int) -> None:
    """Tokens are compared in large steps; the first difference may lie anywhere in one."""
    tree = tree_with(10**6)
    prompt = list(range(length))
    tree.insert(prompt, 0.0, worker=0)
    for at in {0, 1, length // 2, length - 1} & set(range(length)):
        other = [*prompt[:at], 10**6, *prompt[at + 1 :]]
        assert tree.match(other) == (at, {0: at} if at else {})
        assert tree.match(other[:at] or [5 * 10**6])[0] == at


def test_a_path_of_many_short_nodes_is_walked_without_recursion() -> None:
    tree = tree_with(10**6)
    prompt = list(range(20_000))
    for n in range(1, len(prompt), 50):
        tree.insert(prompt[:n], 0.0, worker=0)
    assert tree.node_count == 401
    assert tree.match(prompt) == (19_951, {0: 19_951})
    assert tree.unmark(prompt, 0, 10) == 19_941
    tree.check()


# --- eviction ---------------------------------------------------------------------------------------------------------


def test_eviction_takes_the_oldest_leaf_first_and_the_last_one_in_part() -> None:
    tree = tree_with(10)
    tree.insert([1, 2, 3, 4], 0.0, worker=0)
    tree.insert([1, 2, 5, 6], 1.0, worker=0)
    tree.insert([7, 7, 7], 2.0, worker=0)
    assert tree.worker_tokens(0) == 9
    tree.insert([8, 8, 8], 3.0, worker=0)
    assert drawn(tree) == ["(root)", "  [8 8 8]  0:3", "  [7 7 7]  0:3", "  [1 2]  0:2", "    [5 6]  0:2", "    [3 4]"]
    tree.insert([9], 4.0, worker=0)
    assert drawn(tree)[4:7] == ["  [1 2]  0:2", "    [5 6]  0:1", "    [3 4]"]
    assert tree.match([1, 2, 5, 6]) == (4, {0: 3})


def test_a_parent_outlives_its_children_however_old_it_is() -> None:
    """Prefix closure: what a worker caches is always a prefix, so nodes go from their ends."""
    tree = tree_with(6)
    tree.insert([1, 2], 0.0, worker=0)
    tree.insert([3, 3], 1.0, worker=0)
    tree.insert([1, 2, 4, 4], 2.0, worker=0)
    assert [before for _, before, _ in tree.victims(0, 99, 9.0)] == [0, 2, 0]
    tree.insert([5, 5, 5], 3.0, worker=0)
    assert drawn(tree) == ["(root)", "  [5 5 5]  0:3", "  [3 3]", "  [1 2]  0:2", "    [4 4]  0:1"]


def test_a_hit_makes_the_whole_path_the_most_recent() -> None:
    tree = tree_with(6)
    tree.insert([1, 2, 3], 0.0, worker=0)
    tree.insert([4, 5, 6], 1.0, worker=0)
    tree.insert([1, 2, 3], 2.0, worker=0)
    tree.insert([7, 7], 3.0, worker=0)
    assert (tree.matched([1, 2, 3]), tree.matched([4, 5, 6])) == (3, 1)


def test_a_prompt_longer_than_a_workers_cache_stays_with_its_first_tokens() -> None:
    tree = tree_with(4)
    tree.insert([9, 9], 0.0, worker=0)
    tree.insert([1, 2, 3, 4, 5, 6], 1.0, worker=0)
    assert drawn(tree) == ["(root)", "  [1 2 3 4 5 6]  0:4", "  [9 9]"]


def test_evicted_tokens_are_cached_again_in_place() -> None:
    tree = tree_with(4)
    tree.insert([1, 2, 3, 4], 0.0, worker=0)
    tree.insert([5, 5], 1.0, worker=0)
    assert drawn(tree) == ["(root)", "  [5 5]  0:2", "  [1 2 3 4]  0:2"]
    assert tree.insert([1, 2, 3, 4], 2.0, worker=0) == 4
    assert drawn(tree) == ["(root)", "  [5 5]", "  [1 2 3 4]  0:4"]


def test_victims_foretell_what_an_insert_evicts() -> None:
    tree = tree_with(8)
    for n, prompt in enumerate([[1, 2, 3], [1, 2, 4, 4], [6, 6, 6]]):
        tree.insert(prompt, float(n), worker=0)
    assert tree.victims(0, 3, 3.0) == [(1, 2, 1.0), (2, 2, 1.0)]
    assert tree.victims(0, 0, 3.0) == [] and len(tree.victims(0, 10**12, 3.0)) == 4
    tree.insert([8, 8, 8], 3.0, worker=0)
    assert (tree.matched([1, 2, 3]), tree.matched([1, 2, 4, 4]), tree.matched([6, 6, 6])) == (2, 2, 3)


def test_unmark_drops_every_prefix_through_a_token_and_nothing_else() -> None:
    tree = tree_with(100, 100)
    for prompt in [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 7]]:
        tree.insert(prompt, 0.0, worker=0)
    tree.insert([1, 2, 3, 4], 0.0, worker=1)
    assert tree.unmark([1, 2, 3, 5], 0, 2) == 4
    assert (tree.matched([1, 2, 3, 4], 0), tree.matched([1, 2, 3, 5, 6], 0), tree.matched([1, 7], 0)) == (2, 2, 2)
    assert tree.matched([1, 2, 3, 4], 1) == 4
    assert tree.unmark([1, 2, 3, 5], 0, 2) == tree.unmark([1, 2, 8], 0, 2) == tree.unmark([4], 0, 0) == 0
    assert tree.unmark([1, 2], 0, 0) == 3
    tree.check()


# --- workers ----------------------------------------------------------------------------------------------------------


def test_more_than_a_thousand_workers_may_cache_one_prefix() -> None:
    tree = tree_with(*[100] * 1300)
    prompt, count = [1, 2, 3], 1300
    tree.insert(prompt, 0.0)
    bare_bytes = tree.bytes_used
    for worker in reversed(range(count)):
        tree.insert(prompt if worker % 3 else prompt[:2], 0.0, worker=worker)
    assert tree.match(prompt) == (3, {worker: 3 if worker % 3 else 2 for worker in range(count)})
    tree.check()
    for worker in range(0, count, 2):
        assert tree.clear_worker(worker) == (3 if worker % 3 else 2)
    assert sorted(tree.match(prompt)[1]) == list(range(1, count, 2))
    tree.check()
    for worker in range(1, count, 2):
        tree.drop_worker(worker)
    assert tree.match(prompt) == (3, {})
    assert drawn(tree) == ["(root)", "  [1 2]", "    [3]"]
    assert tree.bytes_used - bare_bytes == 32 + 3 * (32 * 1024 + 64), "the second run, and the chunks of 2,166 marks"


def test_an_index_is_given_to_the_next_worker_with_nothing_of_the_last() -> None:
    tree = tree_with(10, 20, 30)
    tree.insert([1, 2, 3], 0.0, worker=1)
    tree.drop_worker(1)
    with pytest.raises(UnknownWorker, match="1"):
        tree.worker_tokens(1)
    assert tree.add_worker(2) == 1
    assert tree.worker_tokens(1) == 0 and tree.match([1, 2, 3]) == (3, {})
    tree.insert([1, 2, 3], 0.0, worker=1)
    assert tree.match([1, 2, 3]) == (3, {1: 2})
    assert tree.add_worker(5) == 3


@pytest.mark.parametrize("worker", [1, 7, 65536, (1 << 32) - 1])
def test_an_unknown_worker_is_refused_everywhere(worker: int) -> None:
    tree = tree_with(10)
    tree.insert([1, 2], 0.0, worker=0)
    before = (drawn(tree), tree.stats(), tree.version)
    for call in [
        lambda: tree.insert([1, 2, 3], 0.0, worker=worker),
        lambda: tree.insert([4], 0.0, worker=worker, namespace="new"),
        lambda: tree.unmark([1, 2], worker, 0),
        lambda: tree.hits([1, 2], 0.0, worker=worker),
        lambda: tree.matched([1, 2], worker),
        lambda: tree.victims(worker, 1, 0.0),
        lambda: tree.clear_worker(worker),
        lambda: tree.drop_worker(worker),
        lambda: tree.worker_tokens(worker),
    ]:
        with pytest.raises(UnknownWorker, match=str(worker)):
            call()
    assert (drawn(tree), tree.stats(), tree.version) == before


# --- namespaces -------------------------------------------------------------------------------------------------------


def test_namespaces_share_nothing() -> None:
    tree = tree_with(100)
    for namespace in [None, "lora-a", ("tenant", 3)]:
        assert tree.insert([1, 2, 3], 0.0, worker=0, namespace=namespace) == 0
    assert drawn(tree) == [
        "(root)",
        "  [1 2 3]  0:3",
        "('lora-a')",
        "  [1 2 3]  0:3",
        "(('tenant', 3))",
        "  [1 2 3]  0:3",
    ]
    assert tree.worker_tokens(0) == 9
    assert tree.unmark([1, 2, 3], 0, 1, namespace="lora-a") == 2
    assert tree.match([1, 2, 3]) == (3, {0: 3})
    assert tree.match([1, 2, 3], namespace="lora-a") == (3, {0: 1})
    assert tree.match([1, 2, 3], namespace="lora-b") == (0, {})
    assert tree.stats()["namespaces"] == 3, "asking for a namespace does not make it"


def test_a_namespace_goes_with_its_last_prefix() -> None:
    tree = tree_with(1000, window_seconds=10.0)
    for n in range(300):
        tree.insert([1, 2], 0.0, worker=0 if n % 2 else None, namespace=n)
    tree.expire(25.0)
    for _ in range(300 // 64 + 1):  # a bounded number is looked at each time
        tree.expire(25.0)
    assert tree.stats()["namespaces"] == 150 and tree.node_count == 300
    tree.clear_worker(0)
    for _ in range(300 // 64 + 1):
        tree.expire(25.0)
    assert drawn(tree) == []
    assert tree.insert([1], 26.0, worker=0, namespace=1) == 0


# --- hits and forgetting ----------------------------------------------------------------------------------------------


def test_hits_fade_linearly_within_the_window_after_theirs() -> None:
    tree = tree_with(100, window_seconds=10.0)
    for now in [1.0, 2.0, 12.0]:
        tree.insert([1, 2], now, worker=0)
    assert tree.hits([1, 2], 12.0) == pytest.approx(1 + 2 * 0.8)
    assert tree.hits([1, 2, 3], 19.0, worker=0) == pytest.approx(1 + 2 * 0.1)
    assert tree.hits([1, 2], 20.0) == pytest.approx(1.0)
    assert tree.hits([1, 2], 25.0) == pytest.approx(0.5)
    assert tree.hits([1, 2], 30.0) == 0.0
    assert tree.hits([9], 12.0) == tree.hits([1], 12.0, namespace="other") == 0.0


def test_an_uncached_prefix_is_forgotten_between_one_and_two_windows_after_its_last_hit() -> None:
    for hit_at in [100.0, 105.0, 109.75]:
        tree = tree_with(100, window_seconds=10.0)
        tree.insert([1, 2, 3], hit_at, worker=0)
        tree.clear_worker(0)
        quiet = 0.0
        while tree.expire(hit_at + quiet) == 0:
            assert tree.match([1, 2, 3]) == (3, {})
            quiet += 0.25
        assert 10.0 <= quiet <= 20.0
        assert drawn(tree) == []


def test_what_some_worker_caches_is_never_forgotten_for_age() -> None:
    tree = tree_with(3, window_seconds=10.0)
    tree.insert([1, 2, 3, 4, 5], 0.0, worker=0)
    tree.insert([1, 2, 8], 0.0)
    assert tree.expire(1000.0) == 1
    assert drawn(tree) == ["(root)", "  [1 2]  0:2", "    [3 4 5]  0:1"]


def test_a_prefix_goes_after_all_its_continuations() -> None:
    tree = tree_with(100, window_seconds=10.0)
    for n in range(1, 7):
        tree.insert(list(range(n)), 0.0)
    steps = 0
    while tree.node_count:
        tree.expire(100.0, 2)
        steps += 1
        tree.check()
    assert steps <= 40


def test_a_dead_prefix_does_not_wait_behind_one_that_is_still_asked_for() -> None:
    """They are looked at in the order of last use, so one that nobody caches but many ask for holds up nothing."""
    tree = tree_with(100, window_seconds=10.0)
    for now in range(0, 200, 5):
        tree.insert([1, 2, 3], float(now))
        tree.insert([4, now], float(now))
        tree.expire(float(now))
        assert tree.node_count <= 1 + 2 + 6, "the last two windows' prompts and the popular one"
    assert tree.match([1, 2, 3])[0] == 3


def test_a_clock_that_jumps_back_forgets_nothing_and_breaks_nothing() -> None:
    tree = tree_with(100, window_seconds=10.0)
    tree.insert([1, 2], 1000.0, worker=0)
    tree.insert([1, 2], 3.0, worker=0)
    tree.clear_worker(0)
    assert tree.hits([1, 2], 3.0) == 2.0
    assert tree.expire(3.0) == tree.expire(-50.0) == tree.expire(1010.0) == 0
    assert tree.hits([1, 2], 1015.0) == pytest.approx(1.0)
    assert tree.expire(1020.0) == 1


def test_window_numbers_wrap_without_a_trace() -> None:
    """Counters keep 24 bits of the window's number; with short windows and Unix time they run over within years."""
    for wraps in [1.0, 2.0, 101.0]:
        tree = tree_with(100, window_seconds=1.0)
        at = wraps * (1 << 24)
        tree.insert([1, 2], at - 1.5, worker=0)
        tree.insert([1, 2], at - 0.5, worker=0)
        assert tree.hits([1, 2], at - 0.25) == pytest.approx(1 + 0.25)
        assert tree.hits([1, 2], at + 0.25) == pytest.approx(0.75)
        tree.insert([1, 2], at + 0.25, worker=0)
        assert tree.hits([1, 2], at + 0.5) == pytest.approx(1.5)
        assert tree.hits([1, 2], at + 2.5) == 0.0
        tree.insert([7, 7], at)
        assert tree.expire(at + 0.5) == 0 and tree.expire(at + 2.0) == 1


@pytest.mark.parametrize("now", [math.nan, math.inf, -math.inf, 1e300])
def test_times_must_be_finite(now: float) -> None:
    tree = tree_with(10)
    tree.insert([1, 2], 0.0, worker=0)
    before = (drawn(tree), tree.stats())
    for call in [
        lambda: tree.insert([1, 2, 3], now, worker=0),
        lambda: tree.insert([1], now, namespace="new"),
        lambda: tree.hits([1, 2], now),
        lambda: tree.victims(0, 1, now),
        lambda: tree.expire(now),
    ]:
        with pytest.raises(InvalidTime, match="now"):
            call()
    assert (drawn(tree), tree.stats()) == before


# --- limits and errors ------------------------------------------------------------------------------------------------


def test_settings_out_of_range_are_refused_by_name() -> None:
    for window_seconds in [0.0, -1.0, math.nan, math.inf, 1e-9]:
        with pytest.raises(InvalidConfig, match="window_seconds"):
            RadixTree(window_seconds=window_seconds)
    with pytest.raises(InvalidConfig, match="max_bytes"):
        RadixTree(max_bytes=(1 << 20) - 1)
    for capacity_tokens in [0, -5]:
        with pytest.raises(InvalidConfig, match="capacity_tokens"):
            RadixTree().add_worker(capacity_tokens)


def test_bad_prompts_change_nothing_and_make_no_namespace() -> None:
    tree = tree_with(10)
    tree.insert([1, 2], 0.0, worker=0)
    before = (drawn(tree), tree.stats(), tree.version)
    for prompt in [[], [1, 2, -3], [1, 2, 1 << 31], [1, 2, 3.0], "12"]:
        with pytest.raises(InvalidTokens, match="token_ids"):
            tree.insert(prompt, 0.0, worker=0, namespace="new")
    with pytest.raises(TypeError, match="unhashable"):
        tree.insert([1], 0.0, namespace=["a", "list"])
    assert (drawn(tree), tree.stats(), tree.version) == before


def test_a_tree_of_slots_is_not_written_to_as_a_tree_of_estimates() -> None:
    """Tokens without a slot, or a slot without tokens, would be handed to an engine."""
    tree = SlotTree()
    hold = tree.hold([1, 2], 0.0)
    tree.extend(hold, [1, 2], [10, 11], 0.0)
    tree.release(hold, 0.0)
    before = (drawn(tree), tree.stats())
    for call in [
        lambda: tree.insert([1, 2, 3], 0.0, worker=0),
        lambda: tree.insert([1, 2, 3], 0.0),
        lambda: tree.unmark([1, 2], 0, 1),
        lambda: tree.clear_worker(0),
        lambda: tree.drop_worker(0),
    ]:
        with pytest.raises(InvalidInput, match="SlotTree"):
            call()
    assert (drawn(tree), tree.stats()) == before == (["(root)", "  [1 2]  0:2 @10 11"], before[1])


def test_threads_share_a_tree() -> None:
    """Each call is one step: whatever other threads do meanwhile, the tree stays sound."""
    tree = tree_with(*[400] * 4, window_seconds=5.0)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for n in range(3000):
                key = (n * 7919 + seed * 104729) % 1000
                tree.insert([key % 10, key % 30, key, n], n / 100, worker=n % 4)
                tree.match([key % 10, key % 30, key])
                if n % 40 == seed:
                    tree.clear_worker(seed)
                    tree.expire(n / 100)
        except BaseException as error:  # noqa: BLE001 - reported by the main thread
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
    finally:
        sys.setswitchinterval(interval)
    assert not errors and not any(thread.is_alive() for thread in threads)
    tree.check()


def test_a_worker_may_be_cleared_for_ever() -> None:
    """Epochs begin anew after 65,534, and no ghost of the first round is taken for a mark of the second."""
    tree = RadixTree(window_seconds=10.0)
    workers = [tree.add_worker(100), tree.add_worker(100)]
    tree.insert([1, 2, 3], 0.0, worker=workers[0])
    tree.insert([1, 2, 4], 0.0, worker=workers[1])
    for _ in range(65_540):
        tree.insert([1, 2, 4], 0.0, worker=workers[1])
        assert tree.clear_worker(workers[1], sweep_marks=0 if tree.stats()["ghost_marks"] < 9 else 4) == 3
    assert tree.match([1, 2, 4]) == (3, {workers[0]: 2})
    tree.check()
    tree.sweep()
    tree.check()
    assert tree.stats()["ghost_marks"] == 0 and tree.match([1, 2, 3]) == (3, {workers[0]: 3})
