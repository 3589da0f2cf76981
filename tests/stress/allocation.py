"""Lets each allocation of the core fail in turn, in every public operation that allocates, and says what came of it.

Owns the operations, the worlds they run in and what must hold: an operation whose n-th allocation fails either raises
MemoryError and has changed nothing that a caller can know, or does without and its result is as ever; `check` holds
either way, and the same call succeeds afterwards. Run with `failing_malloc.c` preloaded, as `test_allocation.py`
does: `python -m tests.stress.allocation [OPERATION ...]` prints a line of JSON for each.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import preble
from preble import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    GlobalScheduler,
    ManualClock,
    PrefixEvicted,
    SchedulerConfig,
    WorkerSpec,
)
from preble._radix import RadixTree
from preble.batching._kv_slots import SlotTree
from preble.errors import UnknownWorker
from preble.types import Explanation

CORE = preble.__file__.removesuffix("__init__.py")  # all compiled modules lie below it
GROWN_MAX = 1100  # fillers tried to find where tables and slabs grow
SYSTEM = [1, 2, 3, 4, 5, 6, 7, 8]
LONG = list(range(100, 160))
PROMPTS = [
    SYSTEM,
    SYSTEM + LONG,
    [*SYSTEM[:4], 9, 9, 9],
    [*SYSTEM, 50, 51],
    LONG,
    LONG[:30],
    [7] * 40,
    [10_003],
    [8, 8],
]
NAMESPACES = (None, "lora", "new")
KNOWN = [
    prompt[:n] for prompt in PROMPTS for n in range(1, len(prompt) + 1) if n < 12 or n % 9 == 0 or n == len(prompt)
]


class FailingMalloc:
    """The preloaded allocator; only calls from the core's own code count."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(None)
        self.library.watch_code.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
        self.library.fail_nth.argtypes = [ctypes.c_long]
        self.library.calls_counted.restype = ctypes.c_long
        self.library.blocks_live.restype = ctypes.c_long
        modules = set()
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, rights, *_, name = line.split(maxsplit=5)
            if "x" in rights and name.startswith(CORE) and name.endswith(".so"):
                start, _, end = addresses.partition("-")
                assert self.library.watch_code(int(start, 16), int(end, 16)) == 0
                modules.add(name)
        assert modules, "no module of the core is loaded"

    def fail_nth(self, nth: int) -> None:
        self.library.fail_nth(nth)

    @property
    def counted(self) -> int:
        """Allocations asked for by the core since the start."""
        return int(self.library.calls_counted())

    @property
    def live(self) -> int:
        """Blocks that the core has now."""
        return int(self.library.blocks_live())


# --- worlds -----------------------------------------------------------------------------------------------------------


class SchedulerWorld:
    """A scheduler with a past: shared prefixes on several workers, live requests, an engine's blocks."""

    def __init__(self, size: int, policy: str = "e2") -> None:
        self.clock = ManualClock(1000.0)
        self.sched = GlobalScheduler(
            [WorkerSpec(f"w{i}", kv_capacity_tokens=10**7, block_size=2) for i in range(16)],
            policy=policy,
            config=SchedulerConfig(history_seconds=100.0),
            clock=self.clock,
        )
        for number in range(size):
            self.sched.schedule([10_000 + number, 1], request_id=number)  # live, so that the leases fill a slab too
        self.live = {}
        for request, prompt, namespace in (
            *(("a", SYSTEM + LONG, None), ("b", [*SYSTEM, 50, 51], None), ("c", SYSTEM[:4], "lora")),
            *(("d", [*SYSTEM, 50, 52, 53], None), ("e", LONG, None)),
        ):
            self.live[request] = self.sched.schedule(prompt, request_id=request, namespace=namespace)
        self.sched.first_token("d", cached_tokens=0)
        self.sched.apply("w3", [BlockStored([1, 2, 3], None, SYSTEM[:6], 2), BlockStored([7], None, [3, 3], 2, "lora")])

    def facts(self) -> dict[str, object]:
        """All that a caller can know, but for how the tree is cut into nodes, what it takes in memory, and how many
        namespaces have a root: one without a prompt may stay, and is forgotten like any other. No cache is full, so
        that prices do not depend on where nodes are cut; what is saved up for copies does, and is left out."""
        self.sched.check()
        stats = self.sched.stats()
        tree = stats.pop("tree")
        room = {name: account.pop("block_index_bytes") for name, account in stats["workers"].items()}
        return {
            "stats": stats,
            "lost": [tree["shed_nodes"], tree["refused_tokens"]],
            "room": room,
            "matches": [repr(self.sched.match(prompt, namespace=ns)) for prompt in KNOWN for ns in NAMESPACES],
            "prices": [prices(self.sched.explain(prompt, namespace=ns)) for prompt in PROMPTS for ns in (None, "new")],
            "workers": list(self.sched.workers),
        }


def prices(explained: Explanation) -> list[str]:
    """Every worker's terms but the credit and what it is a part of."""
    return [repr(replace(cost, credit_seconds=0.0, total_seconds=0.0, score=0.0)) for cost in explained.workers]


class RadixWorld:
    """A radix tree with workers that share prefixes."""

    def __init__(self, size: int) -> None:
        self.tree = RadixTree(window_seconds=10.0)
        for _ in range(16):  # the table of workers grows with the next one
            self.tree.add_worker(10**6)
        for number in range(size):
            self.tree.insert([10_000 + number], 0.0, worker=15)
        for worker, prompt in enumerate([SYSTEM + LONG, [*SYSTEM, 50, 51], SYSTEM[:4], LONG[:30]]):
            self.tree.insert(prompt, 1.0, worker=worker)
        self.tree.insert(SYSTEM, 1.0, worker=0, namespace="lora")

    def facts(self) -> dict[str, object]:
        self.tree.check()
        stats = self.tree.stats()
        return {
            "workers": [self.cached(worker) for worker in range(18)],
            "lost": [stats["shed_nodes"], stats["refused_tokens"]],
            "matches": [self.tree.match(prompt, namespace=ns) for prompt in KNOWN for ns in NAMESPACES],
            "hits": [self.tree.hits(prompt, 2.0, namespace=ns) for prompt in KNOWN for ns in NAMESPACES],
        }

    def cached(self, worker: int) -> int | None:
        try:
            return self.tree.worker_tokens(worker)
        except UnknownWorker:
            return None


class SlotsWorld:
    """A slot tree with two holds on it and a prefix that nobody holds."""

    def __init__(self, size: int) -> None:
        self.tree, self.size = SlotTree(), size
        for number in range(size):
            self.serve([10_000 + number], 10_000 + number)
        self.serve(SYSTEM + LONG, 100)
        self.holds = {"a": self.tree.hold(SYSTEM, 2.0), "b": self.tree.hold([*SYSTEM[:4], 9], 2.0)}
        self.tree.extend(self.holds["b"], [*SYSTEM[:4], 9, 9], [500, 501], 2.0)

    def serve(self, tokens: list[int], first_slot: int) -> None:
        hold = self.tree.hold(tokens, 0.0)
        new = len(tokens) - hold.matched_tokens
        self.tree.extend(hold, tokens, list(range(first_slot, first_slot + new)), 0.0)
        self.tree.release(hold, 0.0)

    def facts(self) -> dict[str, object]:
        self.tree.check()
        return {
            "holds": [(name, list(self.tree.slots(hold))) for name, hold in self.holds.items()],
            "matches": [self.tree.matched(prompt, namespace=ns) for prompt in KNOWN for ns in NAMESPACES],
            "cached": self.tree.worker_tokens(0),
            "pinned": self.tree.pinned_tokens,
        }


class NoWorld:
    """Where a world itself is made."""

    def __init__(self, size: int) -> None:
        self.made: Any = None

    def facts(self) -> dict[str, object]:
        if self.made is not None:
            self.made.check()
        return {"nothing": self.made is None}


# --- operations -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """A call on a world. `degrades`: it may do without an allocation, and then its result may differ. `keeps`: a fact
    that may have changed although the call failed."""

    world: Callable[[int], Any]
    call: Callable[[Any], object]
    degrades: bool = False
    keeps: str = ""


def policy_world(size: int) -> SchedulerWorld:
    return SchedulerWorld(size, policy="least_loaded")


def only(worker: str) -> list[str]:
    """All workers but one, to be excluded."""
    return [name for name in (f"w{i}" for i in range(16)) if name != worker]


def make(world: NoWorld, maker: Callable[[], object]) -> None:
    world.made = maker()


OTHER = [3_000 + n for n in range(50)]
MANY = list(range(5_000, 6_100))  # blocks: their slab, segments and directory grow

OPERATIONS: dict[str, Operation] = {
    "schedule-new": Operation(SchedulerWorld, lambda w: w.sched.schedule(array("i", OTHER), request_id="x")),
    "schedule-list": Operation(SchedulerWorld, lambda w: w.sched.schedule(OTHER, request_id="x")),
    "schedule-split": Operation(SchedulerWorld, lambda w: w.sched.schedule([*SYSTEM[:6], 30, 31], request_id="x")),
    "schedule-known": Operation(SchedulerWorld, lambda w: w.sched.schedule([*SYSTEM, 50, 51], request_id="x")),
    "schedule-namespace": Operation(SchedulerWorld, lambda w: w.sched.schedule(LONG, request_id="x", namespace="new")),
    "schedule-many-marks": Operation(
        SchedulerWorld, lambda w: w.sched.schedule([*SYSTEM, 50, 52, 53, 54], request_id="x", exclude=only("w9"))
    ),
    "schedule-explained": Operation(
        SchedulerWorld, lambda w: w.sched.schedule([*SYSTEM[:5], 30], request_id="x", explain=True)
    ),
    "schedule-with-policy": Operation(policy_world, lambda w: w.sched.schedule([*SYSTEM[:5], 30], request_id="x")),
    "first-token": Operation(SchedulerWorld, lambda w: w.sched.first_token("a")),
    "first-token-corrected": Operation(SchedulerWorld, lambda w: w.sched.first_token("b", cached_tokens=3)),
    "first-token-evicted": Operation(
        SchedulerWorld,
        lambda w: (w.sched.apply(w.live["b"].worker, [AllBlocksCleared()]), w.sched.first_token("b"))[1],
        degrades=True,  # out of memory the estimate stays what it was
    ),
    "finish": Operation(SchedulerWorld, lambda w: w.sched.finish("d", output_tokens=9)),
    "finish-at-once": Operation(SchedulerWorld, lambda w: w.sched.finish("a", cached_tokens=1)),
    "cancel": Operation(SchedulerWorld, lambda w: w.sched.cancel("b")),
    "cancel-late": Operation(SchedulerWorld, lambda w: w.sched.cancel("d")),
    "apply-stored": Operation(SchedulerWorld, lambda w: w.sched.apply("w5", [BlockStored([9], None, SYSTEM[:6], 6)])),
    "apply-stored-new": Operation(
        SchedulerWorld, lambda w: w.sched.apply("w5", [BlockStored([9], None, OTHER[:6], 6, "new")])
    ),
    "apply-stored-below": Operation(SchedulerWorld, lambda w: w.sched.apply("w3", [BlockStored([9], 2, [60, 61], 2)])),
    # An index that knows blocks keeps the room that it has made for more.
    "apply-stored-many": Operation(
        SchedulerWorld, lambda w: w.sched.apply("w3", [BlockStored(MANY, None, MANY, 1)]), keeps="room"
    ),
    "apply-removed": Operation(SchedulerWorld, lambda w: w.sched.apply("w3", [BlockRemoved([2])])),
    "apply-evicted": Operation(
        SchedulerWorld, lambda w: w.sched.apply(w.live["a"].worker, [PrefixEvicted(SYSTEM + LONG, 5)])
    ),
    "apply-cleared": Operation(SchedulerWorld, lambda w: w.sched.apply(w.live["a"].worker, [AllBlocksCleared()])),
    "add-worker": Operation(SchedulerWorld, lambda w: w.sched.add_worker(WorkerSpec("w16", kv_capacity_tokens=99))),
    "remove-worker": Operation(SchedulerWorld, lambda w: w.sched.remove_worker("w3")),
    "scheduler-match": Operation(SchedulerWorld, lambda w: w.sched.match(SYSTEM + LONG)),
    "scheduler-explain": Operation(SchedulerWorld, lambda w: w.sched.explain(SYSTEM + LONG)),
    "tick": Operation(SchedulerWorld, lambda w: w.sched.tick(9999.0)),
    "new-scheduler": Operation(NoWorld, lambda w: make(w, lambda: GlobalScheduler(["a", "b"]))),
    "new-radix-tree": Operation(NoWorld, lambda w: make(w, RadixTree)),
    "new-slot-tree": Operation(NoWorld, lambda w: make(w, SlotTree)),
    "insert-new": Operation(RadixWorld, lambda w: w.tree.insert(OTHER, 2.0, worker=7)),
    "insert-split": Operation(RadixWorld, lambda w: w.tree.insert([*SYSTEM[:6], 30], 2.0, worker=7)),
    "insert-unmarked": Operation(RadixWorld, lambda w: w.tree.insert([*SYSTEM[:6], 30], 2.0)),
    "insert-mark": Operation(RadixWorld, lambda w: w.tree.insert(SYSTEM + LONG, 2.0, worker=7)),
    "insert-namespace": Operation(RadixWorld, lambda w: w.tree.insert(LONG, 2.0, worker=7, namespace="new")),
    "unmark": Operation(RadixWorld, lambda w: w.tree.unmark(SYSTEM + LONG, 0, 10)),
    "clear-worker": Operation(RadixWorld, lambda w: w.tree.clear_worker(0)),
    "expire": Operation(RadixWorld, lambda w: w.tree.expire(500.0)),
    "tree-match": Operation(RadixWorld, lambda w: w.tree.match(SYSTEM + LONG)),
    "tree-add-worker": Operation(RadixWorld, lambda w: w.tree.add_worker(5)),
    "tree-drop-worker": Operation(RadixWorld, lambda w: w.tree.drop_worker(1)),
    "hold": Operation(SlotsWorld, lambda w: w.holds.update(c=w.tree.hold(SYSTEM + LONG, 3.0))),
    "hold-split": Operation(SlotsWorld, lambda w: w.holds.update(c=w.tree.hold(SYSTEM + LONG[:20], 3.0))),
    "hold-namespace": Operation(SlotsWorld, lambda w: w.holds.update(c=w.tree.hold(SYSTEM, 3.0, namespace="new"))),
    "extend-branch": Operation(
        SlotsWorld, lambda w: list(w.tree.extend(w.holds["a"], [*SYSTEM, 8, 8], [700, 701], 3.0))
    ),
    "extend-split": Operation(
        SlotsWorld, lambda w: list(w.tree.extend(w.holds["a"], [*SYSTEM, *LONG[:9], 8], list(range(800, 810)), 3.0))
    ),
    "extend-append": Operation(
        SlotsWorld, lambda w: list(w.tree.extend(w.holds["b"], [*SYSTEM[:4], 9, 9, 8], [900], 3.0))
    ),
    "release": Operation(SlotsWorld, lambda w: w.tree.release(w.holds.pop("b"), 3.0)),
    "evict": Operation(SlotsWorld, lambda w: len(w.tree.evict(w.size + 5)[0]), degrades=True),  # else a whole leaf
}


# --- running ----------------------------------------------------------------------------------------------------------


def sizes_where_something_grows(world: Any, one_more: Callable[[Any, int], None], failing: FailingMalloc) -> list[int]:
    """Sizes of a world at which a table or slab is about to grow, found by counting what one more prompt allocates."""
    counts = []
    for number in range(GROWN_MAX):
        before = failing.counted
        one_more(world, number)
        counts.append(failing.counted - before)
    usual = sorted(counts)[len(counts) // 2]
    grown = [number for number, allocations in enumerate(counts) if allocations > usual]
    return sorted({3}.union(*(range(max(0, number - 1), number + 2) for number in grown)))


def one_more_prompt(world: SchedulerWorld, number: int) -> None:
    world.sched.schedule(array("i", [20_000 + number, 1]), request_id=number)


def one_more_insert(world: RadixWorld, number: int) -> None:
    world.tree.insert(array("i", [20_000 + number]), 1.0, worker=15)


def one_more_hold(world: SlotsWorld, number: int) -> None:
    world.serve([20_000 + number], 20_000 + number)


def fail_each(operation: Operation, size: int, failing: FailingMalloc) -> tuple[int, int]:
    """Let each allocation of the operation fail in turn; (failures, of them raised as MemoryError)."""
    world = fresh_world(operation, size)
    live = failing.live
    answer, blocks, facts = repr(operation.call(world)), failing.live - live, world.facts()
    raised = 0
    for nth in count(1):
        world = fresh_world(operation, size)
        before, live = world.facts(), failing.live
        given, failed = call_failing(operation, world, nth, failing)
        where = f"allocation {nth} in a world of {size}"
        if given == "MemoryError":
            raised += 1
            assert_same({**before, operation.keeps: 0}, {**world.facts(), operation.keeps: 0}, f"{where} failed")
            given = repr(operation.call(world))
        if operation.degrades and failed:
            world.facts()
            continue
        assert given == answer, f"{where}: the answer is {given}, not {answer}"
        assert failing.live - live == blocks, f"{where}: {failing.live - live} blocks more, not {blocks}"
        assert_same(facts, world.facts(), f"{where}: another result")
        if not failed:
            return nth - 1, raised
    raise AssertionError("unreachable")


def fresh_world(operation: Operation, size: int) -> Any:
    """A new world, once all that is left of former ones is gone, so that their blocks are not taken for its own."""
    gc.collect()
    return operation.world(size)


def call_failing(operation: Operation, world: Any, nth: int, failing: FailingMalloc) -> tuple[str, bool]:
    """What the call says, "MemoryError" if it raised that, and whether it came as far as the allocation that fails."""
    start = failing.counted
    failing.fail_nth(nth)
    try:
        given = repr(operation.call(world))
    except MemoryError:
        given = "MemoryError"
    finally:
        failing.fail_nth(0)
    return given, failing.counted - start >= nth


def assert_same(before: dict[str, object], after: dict[str, object], where: str) -> None:
    """Assert that nothing differs; the message shows what does."""
    for name, old in before.items():
        assert old == after[name], f"{where}: {name} was\n  {old}\nand is\n  {after[name]}"


def main() -> None:
    gc.disable()  # collected only where it cannot be counted
    failing = FailingMalloc()
    sizes: dict[Any, list[int]] = {
        SchedulerWorld: sizes_where_something_grows(SchedulerWorld(0), one_more_prompt, failing),
        RadixWorld: sizes_where_something_grows(RadixWorld(0), one_more_insert, failing),
        SlotsWorld: sizes_where_something_grows(SlotsWorld(0), one_more_hold, failing),
        policy_world: [3],
        NoWorld: [0],
    }
    for name in sys.argv[1:] or OPERATIONS:
        said: dict[str, object] = {"operation": name, "worlds": sizes[OPERATIONS[name].world]}
        try:
            results = [fail_each(OPERATIONS[name], size, failing) for size in sizes[OPERATIONS[name].world]]
            said |= {"failures": sum(failed for failed, _ in results), "raised": sum(raised for _, raised in results)}
        except AssertionError as error:
            said["wrong"] = str(error)
        sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
