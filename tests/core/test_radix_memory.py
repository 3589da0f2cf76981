"""Memory of both trees: the byte bound, what goes first at the bound, allocations that fail, and that nothing leaks."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Hashable
from itertools import count

import pytest

from preble._radix import RadixTree
from preble.batching._kv_slots import SlotTree

MIB = 1 << 20


def bounded_tree(workers: int = 1, max_bytes: int = MIB, window_seconds: float = 1e6) -> RadixTree:
    """A tree with a byte bound and workers of endless memory."""
    tree = RadixTree(max_bytes=max_bytes, window_seconds=window_seconds)
    for _ in range(workers):
        tree.add_worker(1 << 40)
    return tree


def prompt_of(number: int, length: int) -> array:
    """A prompt that shares no prefix with those of other numbers."""
    return array("i", [number]) + array("i", [7]) * (length - 1)


# --- the bound --------------------------------------------------------------------------------------------------------


def random_prompt(rng: random.Random, stems: list[array], tail_max: int) -> array:
    stem, tail = rng.choice(stems), rng.randint(1, tail_max)
    few = array("i", [rng.randrange(50) for _ in range(min(tail, 40))])
    return stem[: rng.randrange(len(stem) + 1)] + (few * (tail // len(few) + 1))[:tail]


@pytest.mark.parametrize(
    ("workers", "namespaces", "inserts", "tail_max"),
    [(8, 1, 4000, 400), (1000, 3, 1500, 200), (300, 1, 2500, 20), (4, 10**9, 5000, 40), (2, 20, 300, 40_000)],
    ids=["usual", "many-workers", "short-prompts", "a-namespace-each", "long-prompts"],
)
def test_no_insert_leaves_more_than_max_bytes(workers: int, namespaces: int, inserts: int, tail_max: int) -> None:
    rng = random.Random(workers)
    tree = bounded_tree(workers, window_seconds=100.0)
    stems = [array("i", [rng.randrange(1000) for _ in range(200)]) for _ in range(20)]
    for n in range(inserts):
        tree.insert(
            random_prompt(rng, stems, tail_max),
            n / 10,
            worker=rng.randrange(workers) if rng.random() < 0.9 else None,
            namespace=rng.randrange(namespaces),
        )
        assert tree.bytes_used <= MIB
        if n % 500 == 0:
            tree.check()
            tree.expire(n / 10)
    tree.check()
    assert tree.stats()["shed_nodes"] > 0, "the run never came to the bound"
    assert tree.bytes_used > 0.8 * MIB, "the bound is there to be used"


def test_the_child_table_doubles_within_the_bound() -> None:
    """The largest single allocation. With so many nodes it is larger than everything else an insert could need."""

    def fill(tree: RadixTree, nodes: int) -> int:
        for n in range(nodes):
            tree.insert(array("i", [n]), 0.0, is_hit=False)
        return tree.bytes_used

    children = (1 << 17) * 3 // 4  # the table doubles with the next one
    before, after = fill(bounded_tree(max_bytes=1 << 30), children), fill(bounded_tree(max_bytes=1 << 30), children + 1)
    assert after - before > MIB
    tree = bounded_tree(max_bytes=after - MIB // 2)
    fill(tree, children + 1)
    assert tree.bytes_used <= tree.stats()["bytes_max"]
    assert tree.stats()["shed_nodes"] + tree.stats()["refused_tokens"] > 0


def test_many_marks_on_one_deep_path_stay_within_the_bound() -> None:
    """A short prompt may need a great deal: a mark at each of thousands of nodes."""
    tree = bounded_tree(500)
    prompt = array("i", range(4000))
    for length in range(2, 4001, 2):
        tree.insert(prompt[:length], 0.0)
    for worker in range(500):
        tree.insert(prompt, 1.0, worker=worker)
        assert tree.bytes_used <= MIB
    tree.check()
    assert tree.stats()["refused_tokens"] > 0


# --- what goes first --------------------------------------------------------------------------------------------------


def gone(tree: RadixTree, prompts: dict[str, array]) -> set[str]:
    return {name for name, prompt in prompts.items() if tree.match(prompt)[0] < len(prompt)}


def test_the_prompt_that_came_first_is_shed_first() -> None:
    tree = bounded_tree()
    prompts = {f"p{n}": prompt_of(n, 10_000) for n in range(40)}
    for n, prompt in enumerate(prompts.values(), 1):
        tree.insert(prompt, 0.0, worker=0)
        shed = tree.stats()["shed_nodes"]
        assert gone(tree, dict(list(prompts.items())[:n])) == {f"p{n}" for n in range(shed)}
    assert tree.stats()["shed_nodes"] > 10
    assert tree.worker_tokens(0) == 10_000 * (40 - tree.stats()["shed_nodes"])
    tree.check()


def test_a_prompt_that_was_hit_again_gets_a_second_chance() -> None:
    tree = bounded_tree()
    prompts = {f"p{n}": prompt_of(n, 10_000) for n in range(22)}
    for prompt in prompts.values():
        tree.insert(prompt, 0.0, worker=0)
    assert not gone(tree, prompts)
    tree.insert(prompts["p0"], 1.0, worker=0)
    tree.insert(prompts["p2"], 1.0, worker=0)
    for n in range(100, 104):
        tree.insert(prompt_of(n, 10_000), 2.0, worker=0)
    lost = gone(tree, prompts)
    assert lost >= {"p1", "p3"} and not lost & {"p0", "p2"}


def test_what_nobody_caches_is_shed_before_what_somebody_does() -> None:
    tree = bounded_tree()
    prompts = {f"p{n}": prompt_of(n, 10_000) for n in range(22)}
    for prompt in prompts.values():
        tree.insert(prompt, 0.0, worker=0)
    for name in ["p9", "p17"]:
        tree.unmark(prompts[name], 0, 0)
    tree.insert(prompt_of(100, 30_000), 1.0, worker=0)
    assert gone(tree, prompts) == {"p9", "p17"}


def test_shared_prefixes_are_shed_after_their_continuations() -> None:
    tree = bounded_tree()
    shared = prompt_of(1, 5_000)
    for n in range(60):
        tree.insert(shared + prompt_of(n, 9_000), 0.0, worker=0)
        tree.check()
        assert tree.match(shared) == (5_000, {0: 5_000})
    assert tree.stats()["shed_nodes"] > 20


def test_a_tree_of_unmarked_hit_prefixes_makes_room_all_the_same() -> None:
    """Right after all workers went away everything is unmarked and was hit; the next prompt must still find room."""
    tree = bounded_tree()
    for n in range(22):
        for _ in range(2):
            tree.insert(prompt_of(n, 10_000), 0.0, worker=0)
    tree.clear_worker(0)
    tree.insert(prompt_of(100, 30_000), 1.0, worker=0)
    assert tree.stats()["refused_tokens"] == 0 and tree.match(prompt_of(100, 30_000))[0] == 30_000


def test_a_prompt_without_room_is_counted_and_remembered_as_far_as_it_is_known() -> None:
    tree = bounded_tree(2)
    system = prompt_of(1, 1_000)
    tree.insert(system, 0.0, worker=0)
    tree.insert(system + prompt_of(2, 500), 0.0, worker=0)
    known = (tree.node_count, tree.stats()["shed_nodes"])
    huge = system + prompt_of(3, 400_000)
    assert tree.insert(huge, 1.0, worker=1) == 1_000
    assert tree.stats()["refused_tokens"] == 400_000
    assert tree.match(huge) == (1_000, {0: 1_000, 1: 1_000}), "the known part is marked for its new worker"
    assert tree.hits(system, 1.0) == 3.0
    assert (tree.node_count, tree.stats()["shed_nodes"]) == known, "what can never fit drives nothing out"
    assert tree.insert(system[:600] + prompt_of(4, 400_000), 1.0, worker=1) == 600
    assert tree.stats()["refused_tokens"] == 800_600, "a node is not split for a prompt that is not remembered"
    tree.check()


def test_namespaces_that_come_and_go_leave_room_for_new_ones() -> None:
    """A salt per request: every prompt is in a namespace of its own, which is of no use once its prompt is shed."""
    tree = bounded_tree()
    for n in range(25_000):
        tree.insert([1, 2, 3], float(n), worker=0, namespace=n)
        assert tree.bytes_used <= MIB
    stats = tree.stats()
    assert stats["refused_tokens"] == 0 and stats["shed_nodes"] > 15_000
    assert tree.match([1, 2, 3], namespace=24_999) == (3, {0: 3})
    assert stats["nodes"] - stats["namespaces"] > 0.9 * stats["namespaces"], "few namespaces are empty"
    tree.check()


def test_a_namespace_without_room_is_refused_like_a_prompt() -> None:
    """In one chain of thousands of nodes only the last can be shed, and the search for it is bounded."""
    tree = bounded_tree()
    prompt = array("i", range(12_000))
    length = 0
    while tree.stats()["refused_tokens"] == 0 and length < len(prompt):
        length += 1
        tree.insert(prompt[:length], 0.0)
    assert length > 5000
    refused = 0
    while tree.match([1, 2, 3], namespace=refused)[0] == 0 and refused < 500:
        assert tree.insert([1, 2, 3], 1.0, namespace=refused) == 0
        assert tree.bytes_used <= MIB
        assert tree.stats()["refused_tokens"] in (1 + 3 * refused, 4 + 3 * refused)
        refused += tree.match([1, 2, 3], namespace=refused)[0] == 0
    assert 1 <= refused < 500, "each new try goes on with the search"
    tree.check()


# --- failing allocations ----------------------------------------------------------------------------------------------

Step = Callable[..., object]


def crowded(nodes: int) -> RadixTree:
    """A tree where slabs (1,024 items a chunk) or child table (768 of 1,024 slots) are about to grow."""
    tree = RadixTree(window_seconds=10.0)
    for _ in range(16):  # the table of workers grows with the next one
        tree.add_worker(10**6)
    for n in range(nodes):
        tree.insert([10_000 + n], 0.0, worker=15)
    return tree


RADIX_STEPS: list[Step] = [
    lambda tree: tree.insert([1, 2, 3, 4, 5, 6], 1.0, worker=0),
    lambda tree: tree.insert([1, 2, 3, 9], 1.0, worker=1),
    lambda tree: tree.insert([1, 2, 3, 4, 5, 6, 7], 2.0, worker=2),
    lambda tree: tree.insert([1, 2], 2.0),
    lambda tree: tree.insert([1, 2, 3, 4, 5, 6, 7], 2.0, worker=3),
    lambda tree: tree.insert([1, 2, 3, 4, 8], 2.0, worker=0, namespace="lora"),
    lambda tree: tree.add_worker(4),
    lambda tree: tree.insert([1, 2, 3, 4, 5, 6, 7, 8], 3.0, worker=16),
    lambda tree: tree.unmark([1, 2, 3, 9], 1, 2),
    lambda tree: tree.insert([1, 2, 3, 4, 5, 5], 3.0, worker=1, is_hit=False),
    lambda tree: tree.clear_worker(2),
    lambda tree: tree.insert([1, 5], 4.0, worker=2),
    lambda tree: tree.drop_worker(3),
    lambda tree: tree.expire(40.0),
]
RADIX_PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 9], [1, 2, 3, 4, 5, 5], [1, 2, 3, 4, 8], [1, 5], [10_003]]


def beliefs(tree: RadixTree) -> list[object]:
    """All that a caller can know of a tree, but for how it is cut into nodes."""
    facts: list[object] = [tree.worker_tokens(worker) for worker in range(3)]
    for prompt in RADIX_PROMPTS:
        for namespace in [None, "lora"]:
            facts.append(tree.match(prompt, namespace=namespace))
            for length in range(1, len(prompt) + 1):
                facts.append(tree.hits(prompt[:length], 5.0, namespace=namespace))
    return facts


def replay(steps: list[Step], start: Callable[[], object]) -> object:
    tree = start()
    for step in steps:
        step(tree)
    return tree


@pytest.mark.parametrize("nodes", [10, 760, 764, 1016, 1020])
def test_whichever_allocation_fails_the_radix_tree_is_as_before(nodes: int) -> None:
    failures = 0
    for at, step in enumerate(RADIX_STEPS):
        expected = beliefs(replay(RADIX_STEPS[: at + 1], lambda: crowded(nodes)))
        for nth in count(1):
            tree = replay(RADIX_STEPS[:at], lambda: crowded(nodes))
            before = beliefs(tree)
            tree.fail_allocation(nth)
            try:
                step(tree)
            except MemoryError:
                failures += 1
                tree.fail_allocation(0)
                tree.check()
                assert beliefs(tree) == before, f"step {at} changed something although allocation {nth} failed"
                step(tree)
            else:
                tree.fail_allocation(0)
                assert beliefs(tree) == expected
                break
            tree.check()
            assert beliefs(tree) == expected, f"step {at} did not recover from allocation {nth}"
    assert failures >= 20


def test_a_failed_second_mark_leaves_room_that_is_given_back() -> None:
    """Room for a second mark is made before the leaf is; if that fails, the node keeps a block with one entry."""
    tree = bounded_tree(3)
    tree.insert([1, 2], 0.0, worker=0)
    bare_bytes = tree.bytes_used
    tree.fail_allocation(2)
    with pytest.raises(MemoryError):
        tree.insert([1, 2, 3], 0.0, worker=1)
    tree.fail_allocation(0)
    assert tree.bytes_used > bare_bytes
    tree.check()
    assert tree.match([1, 2, 3]) == (2, {0: 2})
    tree.clear_worker(0)
    assert tree.bytes_used == bare_bytes and tree.match([1, 2]) == (2, {})
    tree.check()
    tree.insert([1, 2, 3], 0.0, worker=1)
    tree.insert([1, 2, 3], 0.0, worker=2)
    assert tree.match([1, 2, 3]) == (3, {1: 3, 2: 3})
    tree.check()


class SlotWorld:
    """A slot tree and the holds on it, so that a step can be tried again."""

    def __init__(self, nodes: int) -> None:
        self.tree = SlotTree()
        self.holds: dict[str, object] = {}
        for n in range(nodes):
            hold = self.tree.hold([10_000 + n], 0.0)
            self.tree.extend(hold, [10_000 + n], [10_000 + n], 0.0)
            self.tree.release(hold, 0.0)

    def hold(self, name: str, tokens: list[int], namespace: str | None = None) -> None:
        self.holds[name] = self.tree.hold(tokens, 0.0, namespace=namespace)

    def extend(self, name: str, tokens: list[int], first_slot: int) -> list[int]:
        hold = self.holds[name]
        slots = list(range(first_slot, first_slot + len(tokens) - hold.matched_tokens))
        return list(self.tree.extend(hold, tokens, slots, 0.0))

    def release(self, name: str) -> None:
        self.tree.release(self.holds.pop(name), 0.0)

    def facts(self) -> list[object]:
        self.tree.check()
        held = [(name, list(self.tree.slots(hold))) for name, hold in self.holds.items()]
        prompts = [([1, 2, 3, 4, 5, 6, 7], None), ([1, 2, 3, 8, 8], None), ([1, 2, 9], "lora")]
        return [held, self.tree.worker_tokens(0), self.tree.pinned_tokens] + [
            self.tree.matched(prompt, namespace=namespace) for prompt, namespace in prompts
        ]


SLOT_STEPS: list[Step] = [
    lambda world: world.hold("a", [1, 2, 3]),
    lambda world: world.extend("a", [1, 2, 3, 4], 100),
    lambda world: world.extend("a", [1, 2, 3, 4, 5, 6], 200),
    lambda world: world.hold("b", [1, 2, 3, 8]),
    lambda world: world.extend("b", [1, 2, 3, 8, 8], 300),
    lambda world: world.hold("c", [1, 2]),
    lambda world: world.extend("c", [1, 2, 3, 4, 5, 5], 400),
    lambda world: world.hold("d", [1, 2, 9], "lora"),
    lambda world: world.extend("d", [1, 2, 9], 500),
    lambda world: world.release("a"),
    lambda world: world.hold("e", [1, 2, 3, 4, 5, 6, 7]),
    lambda world: world.release("b"),
    lambda world: world.extend("e", [1, 2, 3, 4, 5, 6, 7], 600),
]


@pytest.mark.parametrize("nodes", [3, 762, 765, 1017, 1020])
def test_whichever_allocation_fails_the_slot_tree_is_as_before(nodes: int) -> None:
    failures = 0
    for at, step in enumerate(SLOT_STEPS):
        expected = replay(SLOT_STEPS[: at + 1], lambda: SlotWorld(nodes)).facts()
        for nth in count(1):
            world = replay(SLOT_STEPS[:at], lambda: SlotWorld(nodes))
            before = world.facts()
            world.tree.fail_allocation(nth)
            try:
                step(world)
            except MemoryError:
                failures += 1
                world.tree.fail_allocation(0)
                assert world.facts() == before, f"step {at} changed something although allocation {nth} failed"
                step(world)
                assert world.facts() == expected, f"step {at} did not recover from allocation {nth}"
            else:
                world.tree.fail_allocation(0)
                assert world.facts() == expected
                break
    assert failures >= 13


def test_an_eviction_that_cannot_split_frees_the_whole_leaf() -> None:
    """Freeing memory must not need memory: more tokens go than asked for, and all their slots are reported."""
    for nth in [1, 2]:
        world = replay(SLOT_STEPS[:3] + [lambda world: world.release("a")], lambda: SlotWorld(0))
        world.tree.fail_allocation(nth)
        slots, reports = world.tree.evict(2)
        world.tree.fail_allocation(0)
        assert sorted(slots) == [100, 101, 102, 103, 200, 201]
        assert [(list(path), kept, namespace) for path, kept, namespace in reports] == [([1, 2, 3, 4, 5, 6], 0, None)]
        assert world.tree.worker_tokens(0) == 0
        world.tree.check()


# --- leaks ------------------------------------------------------------------------------------------------------------


def fixed_bytes(tree: RadixTree) -> int:
    """Bytes of an emptied tree: slabs and tables stay, everything else must be gone."""
    assert tree.node_count == 0 and tree.stats()["marks"] == 0
    return tree.bytes_used


def test_a_cleared_tree_gives_everything_back_but_slabs_and_table() -> None:
    rng = random.Random(5)
    tree = bounded_tree(20, max_bytes=64 * MIB, window_seconds=10.0)
    stems = [array("i", [rng.randrange(1000) for _ in range(100)]) for _ in range(10)]
    prompts = [random_prompt(rng, stems, 30) for _ in range(1500)]
    sizes = []
    for lap in range(3):
        for n, prompt in enumerate(prompts):
            tree.insert(prompt, lap * 100.0, worker=n % 20, namespace=n % 3)
        sizes.append(tree.bytes_used)
        for worker in range(20):
            tree.clear_worker(worker)
        while tree.expire(lap * 100.0 + 50.0):
            pass
        tree.check()
        sizes.append(fixed_bytes(tree))
    assert sizes[2] == sizes[4] and sizes[3] == sizes[5], "after the first lap nothing grows any more"
    assert sizes[1] < sizes[0] * 0.7


def test_a_slot_tree_that_serves_and_evicts_for_long_stays_small() -> None:
    tree, rng, sizes = SlotTree(), random.Random(6), []
    free = list(range(400))
    for n in range(6000):
        tokens = [n % 7, *(rng.randrange(3) for _ in range(rng.randint(1, 40)))]
        hold = tree.hold(tokens, float(n), namespace=n % 50)
        missing = len(tokens) - hold.matched_tokens
        if missing > len(free):
            free.extend(tree.evict(missing - len(free))[0])
        free.extend(tree.extend(hold, tokens, [free.pop() for _ in range(missing)], float(n)))
        tree.release(hold, float(n))
        assert len(free) + tree.worker_tokens(0) == 400
        sizes.append(tree.bytes_used)
    tree.check()
    assert max(sizes[3000:]) <= max(sizes[:3000]) + 4096
    tree.evict(400)
    tree.release(tree.hold([1], 6000.0), 6000.0)
    assert fixed_bytes(tree) < MIB


def test_a_hundred_thousand_operations_leave_a_sound_tree() -> None:
    """Long enough that counters, lists and tables would drift apart if any operation miscounted by one."""
    rng = random.Random(7)
    tree = bounded_tree(0, max_bytes=2 * MIB, window_seconds=50.0)
    for capacity in [50, 500, 5_000, 50_000]:
        tree.add_worker(capacity)
    stems = [[rng.randrange(100) for _ in range(30)] for _ in range(30)]
    for n in range(100_000):
        prompt = rng.choice(stems)[: rng.randrange(31)] + [rng.randrange(4) for _ in range(rng.randint(1, 8))]
        worker, kind, now = rng.randrange(4), rng.random(), n / 100
        if kind < 0.7:
            known = tree.insert(prompt, now, worker=worker, namespace=n % 2)
            assert known <= len(prompt)
        elif kind < 0.85:
            known, matched = tree.match(prompt, namespace=n % 2)
            assert all(0 < tokens <= known for tokens in matched.values())
        elif kind < 0.95:
            tree.unmark(prompt, worker, rng.randrange(8), namespace=n % 2)
        elif kind < 0.999:
            tree.expire(now, 50)
        else:
            tree.clear_worker(worker)
        if n % 10_000 == 0:
            tree.check()
    tree.check()
    assert tree.bytes_used <= 2 * MIB
    for worker in range(4):
        tree.drop_worker(worker)
    while tree.expire(10_000.0):
        pass
    assert fixed_bytes(tree) <= 2 * MIB
    tree.check()


def test_the_names_of_namespaces_are_within_the_bound() -> None:
    """Regression: unique salts took three to four times `max_bytes`."""
    tree = RadixTree(max_bytes=4 * MIB)
    for number in range(10_000):
        tree.insert([1, 2, 3], number * 1e-3, namespace=("salt", f"{number:01000d}"))
    stats = tree.stats()
    assert 0 < stats["namespaces"] * 1000 < stats["bytes_used"] <= 4 * MIB
    tree.check()
    tree.insert([1], 11.0, namespace="x" * 5_000_000)
    after = tree.stats()
    assert after["refused_tokens"] == stats["refused_tokens"] + 1
    assert after["namespaces"] == stats["namespaces"], "which costs nobody else's place"


@pytest.mark.parametrize("name", ["a", "é" * 9, "€" * 99, b"b" * 99, 1 << 999, None, ("lora", ("a", b"c")), 1.5])
def test_a_namespace_that_has_gone_gives_all_its_bytes_back(name: Hashable) -> None:
    tree = RadixTree(window_seconds=1.0)
    tree.insert([1], 0.0)
    before = tree.bytes_used
    tree.insert([1, 2], 0.0, namespace=(name, "unlike the others"))
    assert tree.bytes_used > before + 256
    for now in range(1, 9):
        tree.insert([1], float(now))
        tree.expire(float(now))
    tree.check()
    assert tree.stats()["namespaces"] == 1 and tree.bytes_used == before
